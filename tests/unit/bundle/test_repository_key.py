"""The key of a bundle's repository, made by the real gpg: it signs on a busy machine too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuprov.bundle_create.repository import SIGNED_AT, new_key
from gpuprov.core.commands import Completed
from gpuprov.core.system import System


class Busy(System):
    """Where gpg needs seconds before it makes a key, which is then so much younger, unless gpg's clock stands still.

    As seen of a gpg that was stopped for two seconds right after its start.
    """

    def run(self, argv: Sequence[str], **how: Any) -> Completed:
        word = "20260101T000000"
        later = [one.replace(word, "20260101T000003") if one == word else one for one in argv]
        return super().run(later if "--quick-gen-key" in argv else argv, **how)


def test_a_key_is_not_in_the_future_for_the_next_gpg(tmp_path: Path) -> None:
    (tmp_path / "Release").write_text("Origin: a test\n")
    with new_key(Busy(), f"{tmp_path}/gnupg") as key:
        key.sign(f"{tmp_path}/Release", f"{tmp_path}/Release.gpg", "--detach-sign")
        found = System().run(("gpg", "--homedir", key.home, "--with-colons", "--list-secret-keys")).stdout
    created = next(line.split(":")[5] for line in found.splitlines() if line.startswith("sec:"))
    assert int(created) == SIGNED_AT
    assert (tmp_path / "Release.gpg").stat().st_size
