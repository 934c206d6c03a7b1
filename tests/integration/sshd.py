"""A real sshd on loopback with users of its own, in a mount namespace: the machine's users stay as they are."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuprov.fleet.inventory import HostTarget
from gpuprov.protocol.spec import HostSpec
from tests.loopback import free_port

SSHD = "/usr/sbin/sshd"
PASSWORD = "correct horse"
_BOUND = ("etc/passwd", "etc/shadow", "etc/sudoers", "var/cache")


@dataclass(frozen=True)
class User:
    """An account: `sudo` is its line in sudoers, `changed` the day on which its password was changed, 0 for expired."""

    uid: int
    sudo: str = ""
    shell: str = "/bin/sh"
    changed: int = 20000


_FREE = "{0} ALL=(ALL) NOPASSWD: ALL"
USERS = {
    # bash gives way to the one command that it is called with, dash stays: a signal is seen in two ways.
    "root": User(0, "", "/bin/bash"),
    "plain": User(4242, "{0} ALL=(ALL) ALL"),
    "open": User(4243, _FREE),
    "seated": User(4244, "Defaults:{0} requiretty\n{0} ALL=(ALL) ALL"),
    "mocked": User(4250, 'Defaults:{0} badpass_message="You silly, twisted boy"\n{0} ALL=(ALL) ALL'),
    "stranger": User(4245),
    "limited": User(4246, "{0} ALL=(ALL) /bin/ls"),
    "lapsed": User(4247, _FREE, changed=0),
    "barred": User(4248, _FREE, "/usr/sbin/nologin"),
    # No home either, of which sshd itself complains on stderr.
    "silent": User(4249, _FREE, "/bin/false"),
}


@dataclass(frozen=True)
class Server:
    """A running server. `folder` holds its keys, users and their homes (`folder/home/NAME`)."""

    folder: Path
    port: int

    @property
    def identity(self) -> Path:
        """The private key that every user of the server accepts."""
        return self.folder / "identity"

    def target(self, folder: Path, user: str = "root") -> HostTarget:
        """Return the server as a host to which this user logs in; `folder` gets its known_hosts."""
        return HostTarget(
            name="lab-a", spec=HostSpec(), address="127.0.0.1", port=self.port, user=user,
            identity_file=str(self.identity), become_password=PASSWORD if user == "plain" else "",
            ssh_options=(("UserKnownHostsFile", str(folder / "known_hosts")),), ssh_config_file="/dev/null",
        )  # fmt: skip

    @property
    def host_key(self) -> str:
        """The server's public key, as known_hosts writes it."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text()

    def counts(self) -> tuple[int, int]:
        """Return how many logins with the key there have been, a connection each, and how many commands in all."""
        return self.log.count("\nAccepted publickey for "), self.log.count("\nStarting session: command ")


@contextlib.contextmanager
def serving(path: str = "/usr/sbin:/usr/bin:/sbin:/bin", *, limits: str = "", more: str = "") -> Iterator[Server]:
    """Start a server whose sessions get this PATH; stop it in the end.

    `limits`: words for setpriv(1); `more`: a line of sshd_config.
    """
    # Not pytest's own folder, which only root may enter: the users live here.
    with tempfile.TemporaryDirectory(prefix="gpuprov-sshd-") as folder:
        Path(folder).chmod(0o755)
        with _serving(Path(folder), path, limits, more) as server:
            yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@contextlib.contextmanager
def _serving(folder: Path, path: str, limits: str, more: str) -> Iterator[Server]:
    if not Path(SSHD).exists() or shutil.which("sudo") is None:
        raise RuntimeError("these tests need a real sshd and sudo: apt-get install openssh-server sudo")
    server = Server(folder, free_port())
    _prepare(server, path, more)
    binds = " && ".join(f"mount --bind {folder}/{name} /{name}" for name in _BOUND)
    command = f"{binds} && exec setpriv {limits} {SSHD} -D -e -f {folder}/sshd_config"
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen(("unshare", "-m", "sh", "-c", command), stderr=log)
        try:
            _wait_for(server, process)
            yield server
        finally:
            process.terminate()
            process.wait(60)


def _prepare(server: Server, path: str, more: str) -> None:
    folder = server.folder
    for name in ("etc", "var/cache", *(f"home/{user}" for user in USERS)):
        (folder / name).mkdir(parents=True)
    for name, kind in (("host_key", "ed25519"), ("other_host_key", "ecdsa"), ("identity", "ed25519")):
        subprocess.run(("ssh-keygen", "-q", "-t", kind, "-N", "", "-f", folder / name), check=True)
    hashed = subprocess.run(
        ("openssl", "passwd", "-6", PASSWORD), check=True, capture_output=True, text=True
    ).stdout.strip()  # fmt: skip
    users = "".join(
        f"{name}:x:{user.uid}:{user.uid}::{folder}/home/{name}:{user.shell}\n" for name, user in USERS.items()
    )
    (folder / "etc/passwd").write_text(users + "sshd:x:105:65534::/run/sshd:/usr/sbin/nologin\n")
    (folder / "etc/shadow").write_text(
        "".join(f"{name}:{hashed}:{user.changed}::::::\n" for name, user in USERS.items())
    )
    (folder / "etc/sudoers").write_text("".join(f"{user.sudo.format(name)}\n" for name, user in USERS.items()))
    (folder / "etc/sudoers").chmod(0o440)
    for name, user in USERS.items():
        shutil.chown(folder / "home" / name, user.uid, user.uid)
    (folder / "home/silent").rmdir()
    (folder / "banner").write_text("Authorized use only\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = (
        f"Port {server.port}", "ListenAddress 127.0.0.1", "ListenAddress ::1", "PidFile none",
        f"HostKey {folder}/host_key",
        f"HostKey {folder}/other_host_key", f"AuthorizedKeysFile {folder}/identity.pub", "StrictModes no", "UsePAM no",
        "PermitRootLogin yes", "MaxStartups 100", "LogLevel VERBOSE", f"SetEnv PATH={path}",
        f"Banner {folder}/banner", more,
    )  # fmt: skip
    (folder / "sshd_config").write_text("\n".join(settings) + "\n")


def _wait_for(server: Server, process: subprocess.Popen[bytes]) -> None:
    for _ in range(6000):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 1):
            return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"sshd did not start:\n{server.log}")
