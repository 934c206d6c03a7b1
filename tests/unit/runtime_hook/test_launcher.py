"""The launcher reads the command line: which call is a `create`, and which bundle and log it names."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuprov.runtime_hook.deploy import render_launcher


@pytest.fixture
def called(tmp_path: Path) -> Callable[..., list[str]]:
    """Run the launcher, and return who was started and with what words, or what was said instead."""
    for name, skipped in (("python", 6), ("runc", 0)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nshift {skipped}\nprintf "%s\\n" {name} "$@"\n')
        program.chmod(0o755)
    launcher = tmp_path / "launcher"
    launcher.write_text(render_launcher(str(tmp_path / "python"), low_level=(str(tmp_path / "runc"),)))

    def call(*words: str) -> list[str]:
        # No bundle is there: what can't be read comes to Python, too.
        done = subprocess.run(("sh", launcher, *words), capture_output=True, text=True, check=False, cwd=tmp_path)
        return (done.stdout or done.stderr).splitlines()

    return call


@pytest.mark.parametrize(
    ("words", "create"),
    [
        ("create", True),
        ("create --bundle /b id", True),
        ("--root /r --log /l --log-format json --systemd-cgroup create --bundle /b --pid-file /p id", True),
        ("--root=/r create id", True),
        ("--root create create id", True),
        ("--log state create id", True),
        ("create --bundle /b create", True),
        ("create --bundle create id", True),
        ("-b create create id", True),
        ("--unknown-flag value create id", True),
        ("", False),
        ("state id", False),
        ("--version", False),
        # A container, or what runs in it, by that name.
        ("state create", False),
        ("--root /r --log /l --log-format json --systemd-cgroup delete --force create", False),
        ("kill create 9", False),
        ("exec id create", False),
        ("run --bundle create id", False),
        ("--root create state id", False),
        # A flag's value that looks like a flag with a value.
        ("--log --log create id", True),
        ("--root --bundle create id", True),
        ("--bundle create id", False),
        ("created", False),
    ],
)
def test_which_call_is_a_create(called: Callable[..., list[str]], words: str, create: bool) -> None:
    assert called(*words.split())[0] == ("python" if create else "runc")


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("create id", ""),
        ("create --bundle /b id", "/b"),
        ("create --bundle=/b=c id", "/b=c"),
        ("create -b /b id", "/b"),
        ("create -b=/b id", "/b"),
        ("create -bundle /b id", "/b"),
        ("create -bundle=/b id", "/b"),
        ("create --bundle /a -b /b id", "/b"),
        ("create --bundle= id", ""),
        ("create --bundles /b id", ""),
    ],
)
def test_the_bundle_that_a_call_names(called: Callable[..., list[str]], words: str, folder: str) -> None:
    assert called(*words.split())[2] == (folder or ".")


@pytest.mark.parametrize(
    ("words", "log"),
    [("--log /l create id", "/l"), ("--log=/l create id", "/l"), ("create id", ""), ("--root --log create id", "")],
)
def test_the_log_that_a_call_names(called: Callable[..., list[str]], words: str, log: str) -> None:
    assert called(*words.split())[3] == log


@pytest.mark.parametrize("flag", ["-b", "-bundle", "--bundle"])
def test_a_bundle_flag_without_a_folder_is_refused(called: Callable[..., list[str]], flag: str) -> None:
    assert called("create", flag) == [f"gpuprov: {flag} stands without a folder"]
