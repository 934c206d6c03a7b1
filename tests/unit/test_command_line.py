"""tests/lab/command_line.py: gpuprov in a process that has its modules loaded does what a new Python does."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lab import command_line


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--version",), 0),
        (("instal",), 2),
        (("verify", "--hosts", "absent.yml"), 2),
        (("install", "--hosts", "192.0.2.1,", "-e", "gpuprov_forks=many"), 2),
    ],
    ids=["nothing wrong", "no such command", "no such file", "no such option"],
)
def test_it_says_and_ends_with_the_same(words: tuple[str, ...], code: int) -> None:
    loaded = command_line.run(words, 60)
    new = subprocess.run(loaded.args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert (loaded.returncode, loaded.stdout) == (new.returncode, new.stdout) and new.returncode == code, new.stdout


def test_what_a_test_changes_around_it_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command_line.run(("--version",), 60)
    (tmp_path / "here.yml").write_text("all: {hosts: {a: {gpuprov_forks: many}}}\n")
    monkeypatch.chdir(tmp_path)
    assert "gpuprov_forks" in command_line.run(("verify", "--hosts", "here.yml"), 60).stdout
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.setenv("NVIDIA_CTK_CDI_SPEC_DIRS", str(tmp_path))
    assert "broken.json" in command_line.run(("cdi", "list"), 60).stdout


def test_many_at_once_have_each_their_own_end() -> None:
    words = [("--version",), ("instal",)] * 10
    with ThreadPoolExecutor(5) as pool:
        codes = [one.returncode for one in pool.map(lambda one: command_line.run(one, 60), words)]
    assert codes == [0, 2] * 10


def test_it_ends_with_its_time() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        command_line.run(("facts",), 0.01)
