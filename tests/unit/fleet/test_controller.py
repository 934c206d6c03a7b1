"""The machine and the login at which gpuprov is typed: locale, limits, homes that are missing, full or others'."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuprov.fleet.options import made_options


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("strict", ["", "utf-8:strict"])
def test_a_password_that_is_not_utf_8_is_refused_before_the_run(locale: str, strict: str) -> None:
    words = (sys.executable, "-m", "gpuprov", "facts", "--hosts", "a,", "-K")
    named = {**os.environ, "LC_ALL": locale, "PYTHONIOENCODING": strict}
    done = subprocess.run(
        words, input=b"p\xe9ss\n", env=named, capture_output=True, start_new_session=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"the sudo password is not text in UTF-8\n") and b"udce9" not in done.stderr


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("ssh", "typed", "found"),
    [
        (True, "secret\n\n", ("secret", "secret")), (True, "secret\nhunter2\n", ("secret", "hunter2")),
        (False, "hunter2\n", ("", "hunter2")),
    ],
)  # fmt: skip
def test_an_empty_sudo_password_is_the_ssh_password(
    monkeypatch: pytest.MonkeyPatch, ssh: bool, typed: str, found: tuple[str, str], *, terminal: bool
) -> None:
    """As with Ansible."""
    monkeypatch.setattr("gpuprov.fleet.options.has_terminal", lambda: terminal)
    with CliRunner().isolation(typed):
        made = made_options("install", {"ask_pass": ssh, "ask_become_pass": True})
    assert (made.password, made.become_password) == found


def facts_of_silent_hosts(folder: Path, number: int, files: tuple[int, int]) -> subprocess.CompletedProcess[str]:
    """Ask so many hosts for facts at once, with a soft and a hard limit of open files; none of them says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=number) as listener:
        port = listener.getsockname()[1]
        (folder / "hosts").write_text(f"h[1:{number}] ansible_host=127.0.0.1 ansible_port={port}\n")
        words = ("facts", "--hosts", "hosts", "--forks", "500", "--connect-timeout", "1")
        return subprocess.run(
            ("prlimit", f"--nofile={files[0]}:{files[1]}", sys.executable, "-m", "gpuprov", *words),
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip


def test_many_forks_get_the_open_files_that_they_need(tmp_path: Path) -> None:
    done = facts_of_silent_hosts(tmp_path, 100, (64, 4096))
    assert done.returncode == 4, done.stdout
    assert "100 hosts: 127.0.0.1 port " in done.stdout and "does not answer" in done.stdout, done.stdout
    refused = facts_of_silent_hosts(tmp_path, 100, (64, 256))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        "this login may not open the files of 100 hosts at once\n  seen: ulimit -Hn: 256; needed: 1050\n"
        "  next: --forks 20; or raise nofile in /etc/security/limits.conf, and log in again\n"
    )


@pytest.mark.parametrize("named", ["", "ops"])
def test_a_user_without_a_name_reaches_hosts(tmp_path: Path, named: str) -> None:
    """As in containers with a user id of their own; ssh itself refuses such users."""
    code = (
        "import pwd, sys\ndef unknown(_): raise KeyError('uid not found')\npwd.getpwuid = unknown\n"
        "from gpuprov.cli.main import main; main()"
    )
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    (tmp_path / "hosts").write_text(f"a ansible_host=127.0.0.1 ansible_port={port}\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **({"USER": named} if named else {})}
    words = (sys.executable, "-c", code, "facts", "--hosts", "hosts")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert f"127.0.0.1 port {port} cannot be reached" in done.stdout, done.stdout + done.stderr
    assert f"ssh -v -p {port} {named or os.getuid()}@127.0.0.1" in done.stdout
