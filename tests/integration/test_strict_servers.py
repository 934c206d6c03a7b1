"""Hosts with another sudo, or with an sshd that allows one session or few algorithms; a real sshd."""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from gpuprov.protocol.events import Finished
from tests.integration.sshd import serving
from tests.integration.test_fleet import REFUSING, failure, run

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


def test_the_sudo_that_the_inventory_names_is_used(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, serving(f"{folder}:/usr/bin:/bin") as server:
        Path(folder).chmod(0o755)
        (Path(folder) / "sudo").write_text(_SUDO_RS)
        (Path(folder) / "sudo").chmod(0o755)
        (Path(folder) / "sudo.ws").symlink_to("/usr/bin/sudo")
        for user in ("open", "plain"):
            target = dataclasses.replace(server.target(tmp_path, user), sudo="sudo.ws")
            assert isinstance(run(target)[-1], Finished)
        absent = dataclasses.replace(server.target(tmp_path, "open"), sudo="sudo-rs")
        assert "no sudo-rs on the host" in failure(absent).problems[0].what


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


def _keygen(*words: object) -> None:
    subprocess.run(("ssh-keygen", "-q", *map(str, words)), check=True, stderr=subprocess.DEVNULL)


_NAMED = ("-h", "-n", "127.0.0.1")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two authorities, a server's key, and lists (KRL) that revoke each of them."""
    folder = tmp_path_factory.mktemp("keys")
    for name, kind in (("ca", "ed25519"), ("other", "ed25519"), ("key", "rsa")):
        _keygen("-t", kind, "-N", "", "-f", folder / name)
        _keygen("-k", "-f", folder / f"krl-{name}", folder / f"{name}.pub")
    (folder / "broken-krl").write_bytes((folder / "krl-key").read_bytes()[:40])
    (folder / "broken").write_text("127.0.0.1\n")
    (folder / "no-key").write_text("ssh-rsa AAAA!\n")
    return folder


@pytest.mark.parametrize(
    ("signed", "lines", "refused"),
    [
        (_NAMED, ("@cert-authority [127.0.0.1]:{port} {authority}",), ""),
        (_NAMED, ("@cert-authority 127.0.0.* {authority}",), ""),
        (("-h", "-n", "127.*"), ("@cert-authority * {authority}",), "its certificate is for 127.*"),
        (_NAMED, ("@cert-authority 127.0.0.2 {authority}",), "is unknown"),
        (_NAMED, ("@cert-authority * {other}",), "signed by no authority"),
        (_NAMED, ("@cert-authority * {authority}", "@revoked * {authority}"), "is revoked"),
        # A revoked authority stops ssh before it looks at the key.
        (
            _NAMED,
            ("@cert-authority * {authority}", "@revoked * {authority}", "[127.0.0.1]:{port} {key}"),
            "is revoked",
        ),
        (("-h", "-n", "gpu1"), ("HostKeyAlias=gpu1", "@cert-authority gpu1 {authority}"), ""),
        # An alias has no port, whatever it looks like.
        (("-h", "-n", "gpu1"), ("HostKeyAlias=[gpu1]:22", "@cert-authority * {authority}"), "its certificate is for"),
        (("-h", "-n", "gpu1"), ("HostKeyAlias=[gpu1]:22", "@cert-authority gpu1 {authority}"), "is unknown"),
        (("-h", "-n", "[gpu1]:22"), ("HostKeyAlias=[gpu1]:22", "@cert-authority * {authority}"), ""),
        (_NAMED, ("@cert-authority * {authority}", "@revoked * {key}"), "revoked"),
        (("-h", "-n", "gpu1"), ("@cert-authority * {authority}",), "its certificate is for gpu1"),
        (("-n", "127.0.0.1"), ("@cert-authority * {authority}",), "its certificate is a user's"),
        (("-h", "-n", "127.0.0.1", "-V", "20200101:20200102"), ("@cert-authority * {authority}",), "has expired"),
        # ssh goes by the plain key then.
        (("-h", "-n", "gpu1"), ("@cert-authority * {authority}", "[127.0.0.1]:{port} {key}"), ""),
        ((), ("@cert-authority * {authority}",), "its certificate is missing"),
        # A line without a port counts for a server that has none with its port.
        ((), ("127.0.0.1 {key}", "[127.0.0.1]:1 {other}"), ""),
        (("-h", "-n", "gpu1"), ("@cert-authority * {other}", "127.0.0.1 {key}"), ""),
        ((), ("127.0.0.1 {key}", "@revoked 127.0.0.1 {key}"), "revoked"),
        ((), ("127.0.0.1 {other}",), "is unknown"),
        ((), ("127.0.0.1 {key}", "[127.0.0.1]:{port} {other}"), "host key changed"),
        # A list of keys, and a KRL.
        ((), ("RevokedHostKeys={folder}/other.pub", "127.0.0.1 {key}"), ""),
        ((), ("RevokedHostKeys={folder}/key.pub", "127.0.0.1 {key}"), "host key revoked"),
        ((), ("RevokedHostKeys={folder}/krl-other", "127.0.0.1 {key}"), ""),
        ((), ("RevokedHostKeys={folder}/krl-key", "127.0.0.1 {key}"), "host key revoked"),
        ((), ("RevokedHostKeys={folder}/none", "127.0.0.1 {key}"), "RevokedHostKeys can't be read"),
        ((), ("RevokedHostKeys={folder}/broken", "127.0.0.1 {key}"), "RevokedHostKeys can't be read"),
        ((), ("RevokedHostKeys={folder}/no-key", "127.0.0.1 {key}"), "RevokedHostKeys can't be read"),
        ((), ("RevokedHostKeys={folder}/broken-krl", "127.0.0.1 {key}"), "RevokedHostKeys can't be read"),
        (_NAMED, ("RevokedHostKeys={folder}/other.pub", "@cert-authority * {authority}"), ""),
        (_NAMED, ("RevokedHostKeys={folder}/ca.pub", "@cert-authority * {authority}"), "is revoked"),
        (_NAMED, ("RevokedHostKeys={folder}/ca.pub", "127.0.0.1 {key}"), "is revoked"),
        (_NAMED, ("RevokedHostKeys={folder}/krl-other", "@cert-authority * {authority}"), ""),
        (_NAMED, ("RevokedHostKeys={folder}/krl-ca", "@cert-authority * {authority}"), "host key revoked"),
        (_NAMED, ("RevokedHostKeys={folder}/krl-key", "@cert-authority * {authority}"), "host key revoked"),
        (_NAMED, ("HostKeyAlgorithms=rsa-sha2-512", "@cert-authority * {authority}"), "its certificate is missing"),
        (_NAMED, ("HostKeyAlgorithms=rsa-sha2-512", "@cert-authority * {authority}", "127.0.0.1 {key}"), ""),
        ((), ("HostKeyAlgorithms=rsa-sha2-*", "127.0.0.1 {key}"), ""),
        ((), ("HostKeyAlgorithms=-rsa*", "127.0.0.1 {key}"), "is not a compatible SSH server"),
    ],
)  # fmt: skip
def test_a_certificate_counts_as_it_does_for_ssh(
    tmp_path: Path, keys: Path, signed: tuple[str, ...], lines: tuple[str, ...], refused: str
) -> None:
    more = f"HostKey {keys}/key\nHostKeyAlgorithms rsa-sha2-512-cert-v01@openssh.com,rsa-sha2-512"
    if signed:
        _keygen("-s", keys / "ca", "-I", "x", *signed, keys / "key.pub")
        more += f"\nHostCertificate {keys}/key-cert.pub"
    public = {
        word: " ".join((keys / f"{name}.pub").read_text().split()[:2])
        for word, name in (("authority", "ca"), ("other", "other"), ("key", "key"))
    }
    known = tmp_path / "known_hosts"
    with serving(more=more) as server:
        texts = [line.format(port=server.port, folder=keys, **public) for line in lines]
        settings = [text for text in texts if re.match(r"\w+=", text)]
        known.write_text("".join(f"{text}\n" for text in texts[len(settings) :]))
        options = (
            "StrictHostKeyChecking=yes", f"UserKnownHostsFile={known}", "GlobalKnownHostsFile=/dev/null", *settings,
        )  # fmt: skip
        words = ("-i", str(server.identity), "-p", str(server.port), *(f"-o{one}" for one in options), "root@127.0.0.1")
        done = subprocess.run(("ssh", "-F", "none", *words, "true"), check=False, capture_output=True, text=True)
        assert done.returncode == (255 if refused else 0), done.stderr
        target = server.target(tmp_path)
        given = tuple((name, value) for name, _, value in (setting.partition("=") for setting in settings))
        target = dataclasses.replace(target, ssh_options=target.ssh_options + given)
        if refused:
            problem = failure(target, REFUSING).problems[0]
            assert refused in f"{problem.what}\n{problem.evidence}"
        else:
            assert isinstance(run(target, REFUSING)[-1], Finished)
