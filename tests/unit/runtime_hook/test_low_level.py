"""Which low-level runtime does the work, and how the launcher gets to know it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpuprov.runtime_hook import low_level
from gpuprov.runtime_hook.settings import read_settings


def program(path: Path) -> str:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_the_first_that_is_there_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_level, "FOLDERS", (str(tmp_path / "a"), str(tmp_path / "b")))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    second, other = program(tmp_path / "b/second"), program(tmp_path / "other")
    (tmp_path / "a/second").write_text("no program")
    assert low_level.find(("first", "second")) == second
    assert low_level.find((other, "second")) == other
    assert low_level.find((f"{tmp_path}/none", "second")) == second
    assert low_level.find(("first",)) == ""


def test_the_answer_is_a_shells_word_whatever_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = program(tmp_path / "run'c $(touch x)")
    own = tmp_path / "own.toml"
    own.write_text(f'[nvidia-container-runtime]\nruntimes = ["{runtime}"]\n')
    monkeypatch.setattr(read_settings, "__defaults__", (str(own), str(tmp_path / "none")))
    low_level.keep(str(tmp_path / "run/low-level"))
    told = subprocess.run(
        ("sh", "-c", '. "$1"; printf %s "$low_level"', "sh", tmp_path / "run/low-level"), capture_output=True,
        text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert told.stdout == runtime
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["low-level"]
    assert not (tmp_path / "x").exists()


def test_where_none_is_installed_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[nvidia-container-runtime]\nruntimes = ["/nonexistent/runc"]\n')
    monkeypatch.setattr(read_settings, "__defaults__", (str(own), str(tmp_path / "none")))
    with pytest.raises(SystemExit, match="none of the low-level runtimes /nonexistent/runc is installed"):
        low_level.keep(str(tmp_path / "run/low-level"))
    assert not (tmp_path / "run").exists()
