"""A lab: hosts, their network, their file server; brought up, looked at, and taken down without a trace."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.disk import Disk
from tests.lab import cgroups
from tests.lab.base import build_base
from tests.lab.host import Host, HostRequest
from tests.lab.network import Network
from tests.lab.repository import build_repository
from tests.lab.shell import LabError, run, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".cache"
_PORT = 8000
# Lower numbers are given by hand; the third byte of an address ends at 255.
_FREE_NUMBERS = range(100, 250)
_FIRST_ADDRESS = 11
_DISK_BYTES = 24 << 30  # sparse
_INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
_INOTIFY_INSTANCES = 1024


def _allow_many_watches() -> None:
    """Let a dozen systemds watch their files: they share this machine's limit, 128 in most kernels (inotify(7))."""
    # Where that is not allowed, one lab at a time still fits.
    with contextlib.suppress(OSError):
        if int(_INOTIFY.read_text()) < _INOTIFY_INSTANCES:
            _INOTIFY.write_text(str(_INOTIFY_INSTANCES))


class Lab:
    """Lab number `number`; labs of different numbers live beside each other. Number 0 is `make demo`'s."""

    def __init__(self, number: int = 0, tell: Callable[[str], None] = lambda message: None) -> None:
        self.number = number
        self.directory = REPOSITORY / (".lab" if number == 0 else f".cache/lab{number}")
        self.network = Network(number)
        self.www = self.directory / "www"
        self.url = f"http://{self.network.gateway}:{_PORT}"
        self.key = self.directory / "id_ed25519"
        self.known_hosts = self.directory / "known_hosts"
        self._tell = tell

    def up(self, requests: Sequence[HostRequest]) -> tuple[Host, ...]:
        """Bring up hosts; one that runs as requested is left alone, anything half-dead is cleaned up and made again."""
        hosts = self.prepare(requests)
        fresh = [host for host in hosts if not host.is_as_requested()]
        if fresh:
            self._tell(f"booting {', '.join(host.name for host in fresh)}")
        with self._locked():
            for host in fresh:
                host.start()
        with ThreadPoolExecutor(max(len(fresh), 1)) as pool:
            list(pool.map(Host.wait_until_up, fresh))
            list(pool.map(Host.wait_until_settled, fresh))
        return hosts

    def prepare(self, requests: Sequence[HostRequest]) -> tuple[Host, ...]:
        """Make keys, network and file server, and return the hosts, which do not run yet."""
        if os.geteuid() != 0:
            raise LabError("the lab needs root; next: sudo make demo")
        with self._locked():
            _allow_many_watches()
            self._keys([request.name for request in requests])
            self.network.up()
            self._serve()
            return tuple(self._host(index, request) for index, request in enumerate(requests))

    def down(self) -> None:
        """Remove hosts, mounts, network, server and files; the cache of root file systems stays."""
        with self._locked():
            for name in self.host_names():
                Host(HostRequest(name), self._host_directory(name), Path, "", self.network).kill()
            self._stop_serving()
            self.network.down()
            if os.path.ismount(self.directory):
                # A host's last process may end a moment later; its image is removed with the mount.
                run(("umount", "--lazy", str(self.directory)))
            run(("rm", "-rf", str(self.directory)), timeout=300)

    def take_disk(self) -> None:
        """Put the lab's files on an ext4 of their own, in a file that goes with the mount.

        A file system without a journal, as those of many virtual machines, takes up to a millisecond to create a file
        where others were removed. Where mounting a file is not allowed, the lab works without.
        """
        disk = Disk("ext4", CACHE / f"lab{self.number}.disk")
        disk.make(_DISK_BYTES)
        self.directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(LabError):
            options = "loop,noatime,discard,barrier=0,noinit_itable"
            run(("mount", "-o", options, str(disk.image), str(self.directory)))
        disk.image.unlink()

    def clear(self) -> None:
        """Remove what a killed run left under this number, of another clone too: its mounts went with its namespace."""
        self.down()
        for name in cgroups.hosts_of(self.network.bridge):
            cgroups.end_processes(name)

    def host_names(self) -> tuple[str, ...]:
        """Return the names of all hosts of this lab, running or not."""
        directory = self.directory / "hosts"
        return tuple(sorted(path.name for path in directory.iterdir())) if directory.exists() else ()

    def status(self) -> str:
        """Return one line for each host."""
        lines = []
        for name in self.host_names():
            state = "running" if cgroups.runs(f"{self.network.bridge}-{name}") else "down"
            lines.append(f"{name}: {state}")
        return "\n".join(lines) or "no hosts; next: python -m tests.lab up"

    # -- parts ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        CACHE.mkdir(exist_ok=True)
        with (CACHE / f"lab{self.number}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _base(self, release: str) -> Path:
        return build_base(CACHE / "bases", release, self._tell)

    def _host_directory(self, name: str) -> Path:
        return self.directory / "hosts" / name

    def _host(self, index: int, request: HostRequest) -> Host:
        address = f"{self.network.prefix}.{_FIRST_ADDRESS + index}"
        directory = self._host_directory(request.name)
        return Host(request, directory, partial(self._base, request.release), address, self.network)

    def _keys(self, names: Sequence[str]) -> None:
        """Make the login key and each host's own; write known_hosts."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self.key.exists():
            run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpuprov-lab", "-f", str(self.key)))
        lines = []
        for index, name in enumerate(names):
            directory = self.directory / "host-keys" / name
            directory.mkdir(parents=True, exist_ok=True)
            key = directory / "ssh_host_ed25519_key"
            if not key.exists():
                run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key)))
            kind, blob, _ = key.with_suffix(".pub").read_text().split()
            lines.append(f"{self.network.prefix}.{_FIRST_ADDRESS + index} {kind} {blob}\n")
        self.known_hosts.write_text("".join(lines))

    def _serve(self) -> None:
        """Start the file server with the signed repository, if it does not run."""
        if not (self.www / "apt/InRelease").exists():
            build_repository(self.www / "apt", self.directory / "gnupg")
        if self._servers():
            return
        command = (sys.executable, "-m", "tests.lab.www", str(self.www), self.network.gateway, str(_PORT))
        with (self.directory / "www.log").open("w") as log:
            subprocess.Popen(
                command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        listening = ("sh", "-c", f"ss -Hltn src {self.network.gateway}:{_PORT} | grep -q . && echo yes; :")
        wait_for("the start of the file server", lambda: "yes" in run(listening))

    def _servers(self) -> list[int]:
        """Return the process ids of its file servers: one that a killed `up` has left is written down nowhere."""
        return self._processes(f"\0tests.lab.www\0{self.www}\0")

    def _processes(self, words: str) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if words.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def _stop_serving(self) -> None:
        # The agent of a killed session, too: it would keep that session's disk.
        for pid in (*self._servers(), *self._processes(f"\0{self.directory}/gnupg\0")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_for("the end of the file server", lambda: not self._servers())


@contextlib.contextmanager
def free_lab() -> Iterator[Lab]:
    """Give a lab under a number that nobody else on this machine uses, from any clone; remove it in the end."""
    for number in _FREE_NUMBERS:
        # A name that one process can have, in this network and from any mount namespace (unix(7), "abstract").
        with socket.socket(socket.AF_UNIX) as taken:
            try:
                taken.bind(f"\0gpuprov-lab{number}")
            except OSError:
                continue
            lab = Lab(number)
            if lab.network.is_up() and not lab.directory.exists():
                continue  # left by a session of another clone, which alone knows its mounts
            lab.clear()
            lab.take_disk()
            try:
                yield lab
            finally:
                lab.down()
            return
    raise LabError(f"all lab numbers up to {_FREE_NUMBERS.stop - 1} are taken; next: ss -xa | grep gpuprov-lab")
