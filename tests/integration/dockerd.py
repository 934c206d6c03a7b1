"""A real dockerd of a test's own: its own data, socket and /etc/docker, and systemctl's verbs for its unit."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpuprov.core.commands import Completed
from gpuprov.core.system import System

_STARTS_SECONDS = 120
_STOPS_SECONDS = 120
# StartLimitBurst of docker.service: after as many starts in a row systemd refuses until reset-failed.
_STARTS_IN_A_ROW = 3
# In a mount namespace of its own, so that the machine's /etc/docker stays unseen; $1: the folder that stands for it.
_START = 'mkdir -p /etc/docker && mount --bind "$1" /etc/docker && shift && exec "$@"'


class DockerHost(System):
    """A machine below a folder whose docker is a private dockerd; it has no other commands than docker's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder / "root"))
        self.folder = folder
        self.socket = f"unix://{folder}/docker.sock"
        self.restarts = 0
        self.starts_left = _STARTS_IN_A_ROW
        # Where dockerd looks for runtimes and hooks.
        self.search_path = os.environ["PATH"]
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "root/etc/docker").mkdir(parents=True)
        # As under systemd, containerd is a service of its own: dockerd's own one would delay each stop by a second.
        containerd = ("containerd", "--root", f"{folder}/c", "--state", f"{folder}/s", "--address", f"{folder}/c.sock")
        command = ("unshare", "--mount", "sh", "-c", _START, "sh", f"{self.root}/etc/docker", *containerd)
        self._containerd = self._spawn(command, "containerd.log")

    @property
    def daemon_json(self) -> Path:
        return self.path("/etc/docker/daemon.json")

    @property
    def pid(self) -> int:
        """The running dockerd's process id, 0 if none runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def docker(self, *words: str, stdin: bytes = b"") -> str:
        """Run docker's client; return its output without the last line end."""
        done = self.run(("docker", *words), stdin=stdin)
        assert done.ok, done.evidence()
        return done.stdout.strip()

    def which(self, program: str) -> str | None:
        return System().which(program)

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        argv = tuple(argv)
        if argv[:2] == ("systemctl", "show"):
            # As where dockerd is started by hand: its process tells how.
            return Completed(argv, 1)
        if argv[0] == "dockerd":
            # In the namespace in which it reads /etc/docker.
            return super().run(("nsenter", f"--mount=/proc/{self._containerd.pid}/ns/mnt", *argv), **more)
        if argv[0] == "systemctl":
            return self._systemctl(argv)
        if argv[0] == "journalctl":
            return Completed(argv, 0, "\n".join(self._log().splitlines()[-30:]))
        environment = {**(more.pop("env", None) or {}), "DOCKER_HOST": self.socket}
        return super().run(argv, env=environment, **more)

    def now(self) -> float:
        """Return a clock that runs faster, so that waiting in vain for docker costs seconds, not a quarter minute."""
        return super().now() * 10

    def start(self) -> bool:
        """Start dockerd; say whether it came up."""
        folder = self.folder
        arguments = (
            "--data-root", f"{folder}/data", "--exec-root", f"{folder}/run", "--pidfile", f"{folder}/docker.pid",
            "--containerd", f"{folder}/c.sock", "--host", self.socket, "--iptables=false", "--ip6tables=false",
            "--bridge=none",
        )  # fmt: skip
        deadline = time.monotonic() + _STARTS_SECONDS
        while not (folder / "c.sock").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        namespace = f"--mount=/proc/{self._containerd.pid}/ns/mnt"
        self._process = self._spawn(("nsenter", namespace, "dockerd", *arguments), "log")
        while self.pid and time.monotonic() < deadline:
            if (folder / "docker.sock").exists() and self.run(("docker", "version")).ok:
                return True
            time.sleep(0.05)
        return False

    def stop(self) -> None:
        """Stop dockerd, and with it its containers."""
        if self._process is not None:
            (self.folder / "docker.sock").unlink(missing_ok=True)
            _end(self._process)

    def close(self) -> None:
        """Stop everything."""
        if self.pid and (containers := self.run(("docker", "ps", "--all", "--quiet")).stdout.split()):
            self.run(("docker", "rm", "--force", *containers))
        self.stop()
        _end(self._containerd)

    def _spawn(self, command: tuple[str, ...], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as file:
            environment = {**os.environ, "PATH": self.search_path}
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)

    def _log(self) -> str:
        log = self.folder / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    def _systemctl(self, argv: tuple[str, ...]) -> Completed:
        """Do what systemctl does with docker.service, a unit of type notify whose ExecReload sends SIGHUP."""
        verb, unit = argv[1], argv[-1]
        assert unit == "docker.service"
        if verb == "is-active":
            return Completed(argv, 0 if self.pid else 3)
        if verb == "reset-failed":
            self.starts_left = _STARTS_IN_A_ROW
            return Completed(argv, 0)
        if verb == "reload":
            if not self.pid:
                return Completed(argv, 1, "", "docker.service is not active, cannot reload.")
            assert self._process is not None
            self._process.send_signal(signal.SIGHUP)
        elif verb in ("restart", "stop"):
            self.stop()
            if verb == "restart":
                self.restarts += 1
                self.starts_left -= 1
                if self.starts_left < 0 or not self.start():
                    return Completed(argv, 1, "", "Job for docker.service failed.")
        else:
            raise AssertionError(verb)
        return Completed(argv, 0)


@contextlib.contextmanager
def docker_host(*, started: bool = True) -> Iterator[DockerHost]:
    """Give a machine with a dockerd; take both away in the end."""
    # Not pytest's own folder: containerd's socket in it would have too long a path (unix(7): 108 bytes).
    with tempfile.TemporaryDirectory(prefix="gpuprov-docker-") as folder:
        host = DockerHost(Path(folder))
        try:
            if started:
                assert host.start(), host._log()
            yield host
        finally:
            host.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOPS_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
