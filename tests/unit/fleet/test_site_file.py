"""/etc/gpuprov/site.yml: a machine's own variables, below those of -e, and root's alone."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuprov.cli import reference
from gpuprov.fleet import inventory
from gpuprov.fleet.command import inventory_of
from gpuprov.fleet.options import Options
from gpuprov.protocol.errors import GpuprovError, UsageError
from gpuprov.protocol.spec import HostSpec

pytestmark = pytest.mark.root
MIRROR = "http://user:secret@mirror.example/drivers"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "gpuprov" / "site.yml"
    made.parent.mkdir()
    made.write_text(f"gpuprov_driver_mirror: {MIRROR}\ngpuprov_lock_timeout: 60\n")
    monkeypatch.setattr(inventory, "SITE_FILE", str(made))
    return made


def test_extra_variables_win_over_the_file(file: Path) -> None:
    (here,) = inventory_of(Options("install", extra_vars=("gpuprov_lock_timeout=7",))).hosts
    assert (here.spec.driver_mirror, here.spec.lock_timeout) == (MIRROR, 7)


def test_an_image_and_other_hosts_do_not_get_it(file: Path) -> None:
    for elsewhere in (Options("install", root="/mnt"), Options("install", hosts=("other,",))):
        (target,) = inventory_of(elsewhere).hosts
        assert (target.spec.driver_mirror, target.spec.lock_timeout) == ("", 300)


def test_without_the_file_all_is_as_it_was(file: Path) -> None:
    file.unlink()
    assert inventory.site_words() == ()


@pytest.mark.parametrize("text", ["", "---\n# later\n", reference.as_yaml({})], ids=["empty", "comments", "written"])
def test_a_file_of_comments_sets_nothing(file: Path, text: str) -> None:
    file.write_text(text)
    (here,) = inventory_of(Options("install", extra_vars=("gpuprov_lock_timeout=7",))).hosts
    assert here.spec == HostSpec(lock_timeout=7)


def _link(file: Path) -> None:
    file.rename(file.with_name("other"))
    file.symlink_to("other")


@pytest.mark.parametrize(
    ("spoil", "seen"),
    [
        (lambda file: file.chmod(0o620), "is a file of user 0 with mode 620"),
        (lambda file: os.chown(file, 1000, 0), "is a file of user 1000"),
        (lambda file: file.parent.chmod(0o777), "gpuprov is a directory of user 0 with mode 777"),
        (_link, "is a link"),
    ],
)
def test_a_file_that_others_could_change_is_refused(file: Path, spoil: Callable[[Path], None], seen: str) -> None:
    spoil(file)
    with pytest.raises(UsageError, match="others than root could change") as raised:
        inventory_of(Options("install"))
    assert seen in raised.value.problems[0].evidence and "chown root:root" in raised.value.problems[0].next_step


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("spoil", "what", "step"),
    [
        (_pipe, "is not an ordinary file", "mv "),
        (_folder, "is not an ordinary file", "mv "),
        (lambda file: file.write_bytes(b"\xff\xfe\x00a"), "is not text in UTF-8", "mv "),
        (lambda file: file.write_text("a: " + "[" * 600 + "]" * 600), "cannot read the extra variables", "fewer lists"),
        (lambda file: file.write_text("gpuprov_packages: [a\n"), "cannot read the extra variables", "correct /"),
    ],
    ids=["pipe", "folder", "binary", "deep", "broken"],
)
def test_options_refuse_file_without_variables(file: Path, spoil: Callable[[Path], None], what: str, step: str) -> None:
    spoil(file)
    for call in (lambda: inventory_of(Options("install")), reference.as_text):
        with pytest.raises(UsageError, match=what) as raised:
            call()
        assert step in raised.value.problems[0].next_step and "chown" not in raised.value.problems[0].next_step


def test_a_wrong_variable_is_told_with_the_file(file: Path) -> None:
    file.write_text("gpuprov_driver_miror: http://x.example\n")
    with pytest.raises(GpuprovError, match="there is no variable gpuprov_driver_miror") as raised:
        inventory_of(Options("install"))
    assert str(file) in raised.value.problems[0].evidence
    file.write_text("gpuprov_packages: [a\n")
    with pytest.raises(GpuprovError, match=r"site\.yml"):
        inventory_of(Options("install"))


def test_options_shows_its_values_without_passwords(file: Path) -> None:
    text = reference.as_text()
    assert f"gpuprov_lock_timeout: 300  [60 by {file}]" in text
    assert "secret" not in text and "//user:" in text
