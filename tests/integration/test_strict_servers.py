"""Hosts with another sudo, or with an sshd that allows one session or few algorithms; a real sshd."""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from gpuprov.protocol.events import Finished
from tests.integration.sshd import serving
from tests.integration.test_fleet import failure, run

pytestmark = pytest.mark.root
# How sudo-rs 0.2.15, Ubuntu's sudo, asks for a password and refuses it.
_SUDO_RS = """\
#!/bin/sh
[ "$1" != -n ] || { echo 'sudo: interactive authentication is required' >&2; exit 1; }
while printf '[sudo: %s] Password: ' "$4" >&2; read -r password; do
    printf '\\nsudo: Authentication failed, try again.\\n' >&2
done
printf '\\nsudo: Authentication required but not attempted\\n' >&2
exit 1
"""


def test_a_server_that_allows_one_session_at_a_time_is_used_as_any_other(tmp_path: Path) -> None:
    with serving(more="MaxSessions 1") as strict:
        assert isinstance(run(strict.target(tmp_path))[-1], Finished)


def test_a_server_that_allows_no_session_is_no_hanging_host(tmp_path: Path) -> None:
    with serving(more="MaxSessions 0") as strict:
        problem = failure(strict.target(tmp_path)).problems[0]
    assert problem.what == "the host accepts the login, but opens no session"
    assert "maxsessions" in problem.next_step


@pytest.mark.parametrize("line", ["Ciphers chacha20-poly1305@openssh.com", "MACs umac-128-etm@openssh.com"])
def test_a_server_without_a_common_algorithm_gets_what_is_common(tmp_path: Path, line: str) -> None:
    with serving(more=line) as strict:
        problem = failure(strict.target(tmp_path)).problems[0]
    assert "is not a compatible SSH server" in problem.what and "the playbooks" in problem.next_step
    common = re.findall(r"(Ciphers|MACs|KexAlgorithms|HostKeyAlgorithms) ([^\s,;]+)", problem.next_step)
    assert len(common) == 4
    with serving(more="\n".join(map(" ".join, common))) as strict:
        (tmp_path / "known_hosts").unlink(missing_ok=True)
        assert isinstance(run(strict.target(tmp_path))[-1], Finished)


def test_the_evidence_of_sudo_rs_is_without_its_prompt(tmp_path: Path) -> None:
    # Other users can't enter pytest's own folder.
    with tempfile.TemporaryDirectory() as folder, serving(f"{folder}:/usr/bin:/bin") as server:
        Path(folder).chmod(0o755)
        (Path(folder) / "sudo").write_text(_SUDO_RS)
        (Path(folder) / "sudo").chmod(0o755)
        target = dataclasses.replace(server.target(tmp_path, "plain"), become_password="wrong pony")
        problem = failure(target).problems[0]
    assert problem.what == "sudo on the host refuses the password"
    assert problem.evidence == "sudo: Authentication failed, try again."


def test_a_controller_in_fips_mode_logs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise ValueError("[digital envelope routines] unsupported")

    monkeypatch.setattr("paramiko.pkey.md5", unsupported)
    with serving() as server:
        assert isinstance(run(server.target(tmp_path))[-1], Finished)


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_a_key_in_pem_that_needs_a_passphrase_is_named(tmp_path: Path, kind: str) -> None:
    key = tmp_path / "key"
    words = ("ssh-keygen", "-q", "-t", kind, "-m", "PEM", "-N", "correct horse", "-f", str(key))
    subprocess.run(words, check=True)
    with serving() as server:
        problem = failure(dataclasses.replace(server.target(tmp_path), identity_file=str(key))).problems[0]
    assert problem.what.endswith(f"the key {key} needs a passphrase, or is damaged")
    assert problem.next_step.startswith(f"ssh-add {key}")
