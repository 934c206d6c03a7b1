"""Keys of the real gpg, for tests."""

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

_HOMES: set[Path] = set()


def end_agents_later(home: Path) -> None:
    """Have the daemons of gpg's folder ended with the session, whatever becomes of the test that began them."""
    _HOMES.add(home)


def end_agents() -> None:
    """End the daemons of all folders that are still there."""
    for home in filter(Path.exists, _HOMES):
        subprocess.run(("gpgconf", "--homedir", str(home), "--kill", "all"), check=False)


@contextlib.contextmanager
def gpg_home(place: Path) -> Iterator[Path]:
    """Give a folder for gpg; the daemons that gpg starts for it end with the block, but not by themselves."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield place
    finally:
        subprocess.run(("gpgconf", "--homedir", str(place), "--kill", "all"), check=True)


def signing_key(home: Path, name: str, *options: str) -> str:
    """Make a key in gpg's folder `home` and return its fingerprint; `options` are gpg's."""
    home.mkdir(mode=0o700, exist_ok=True)
    home.chmod(0o700)
    end_agents_later(home)
    gpg = ("gpg", "--homedir", str(home), "--batch")
    subprocess.run(
        (*gpg, *options, "--passphrase", "", "--quick-gen-key", name, "ed25519", "sign", "never"), check=True
    )
    listed = subprocess.run((*gpg, "--with-colons", "--list-keys", name), check=True, capture_output=True, text=True)
    found = re.search(r"^fpr:+([0-9A-F]{40}):", listed.stdout, re.MULTILINE)
    assert found is not None
    return found[1]
