"""One lab host: its root file system, its boot, SSH to it, and ways to hurt and to fix it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.lab import cgroups, prepare
from tests.lab.base import mount_over
from tests.lab.network import Network
from tests.lab.shell import LabError, run, wait_for

# Overlay on overlay does not work: these must be folders of the machine's own file system.
_BOUND = ("docker", "containerd", "containers")
_BOOT_SECONDS = 300
_SHOWN = 1000  # characters
# systemd-nspawn, told to keep the unit, ends with 133 when the host reboots; anything else is its end.
_SUPERVISOR = """
for directory in $1; do mkdir -p "$directory"; echo $$ > "$directory/cgroup.procs"; done
shift
while :; do
    "$@"
    [ $? = 133 ] || exit 0
done
"""
Snapshot = dict[str, tuple[int, int, int, bytes]]
_LOADER_CACHE = "/etc/ld.so.cache"
# The last commands on hosts, and what these said: a test that fails shows them (tests/conftest.py).
SAID: deque[str] = deque(maxlen=6)


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    """Return the paths that differ, but for the loader's cache: ldconfig writes the same entries in another order."""
    return {path for path in {*before, *after} if before.get(path) != after.get(path)} - {_LOADER_CACHE}


@dataclass(frozen=True)
class HostRequest:
    """What a host shall be.

    `gpus`: how many simulated GPUs; `user`: a login besides root, with sudo and a password; `os_release`: the file in
    tests/data/os-release that says what the host takes itself for, if not for the Debian that it is; `archive`: whether
    its sources name Debian's archive. To read its 63,000 packages takes apt a second each time, so most hosts, which
    install none of them, do without.
    """

    name: str
    release: str = "bookworm"
    gpus: int = 2
    driver_version: str = "550.163.01"
    docker: bool = True
    python: bool = True
    user: str = ""
    password: str = ""
    bind: tuple[str, ...] = ()
    os_release: str = ""
    archive: bool = False


class Host:
    """A host; made by Lab.up. `base` returns the root file system of its release, built if the cache lacks it."""

    def __init__(
        self, request: HostRequest, directory: Path, base: Callable[[], Path], address: str, network: Network
    ) -> None:
        self.request = request
        self.name = request.name
        self.address = address
        self.directory = directory
        self.root = directory / "root"
        # Where its files lie; a test may put them on a disk of its own.
        self.storage = directory
        self._base = base
        self._bridge = network.bridge
        # A machine's name is its network interface's too: labs beside each other may have hosts of the same name.
        self._machine = f"{network.number}-{self.name}"
        self._keys = directory.parent.parent
        self._saved = directory.parent.parent / "saved" / self.name
        self._from_saved = False

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def cgroup(self) -> str:
        """The name of the control group that all of the host's processes are in."""
        return f"{self._bridge}-{self.name}"

    def is_as_requested(self) -> bool:
        """Say whether this very host runs and answers."""
        marker = self.directory / "request.json"
        wanted = json.dumps([asdict(self.request), str(self._base())])
        return marker.exists() and marker.read_text() == wanted and cgroups.runs(self.cgroup) and self.answers()

    def start(self, *, saved: bool = False) -> None:
        """Boot from a pristine root file system, or from the saved one, without waiting for the end of the boot."""
        self.kill()
        self.wipe()
        self._from_saved = saved
        self._mount()
        if not saved:
            prepare.prepare(self)
        (self.directory / "request.json").write_text(json.dumps([asdict(self.request), str(self._base())]))
        self._boot()

    def _mount(self) -> None:
        for name in _BOUND:
            place = self.directory / name
            if self._from_saved and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                run(("cp", "--archive", str(self._saved / name), str(place)))
            place.mkdir(parents=True, exist_ok=True)
        lower = f"{self._saved}/upper:{self._base()}" if self._from_saved else str(self._base())
        mount_over(lower, self.storage, self.root, synced=self.storage != self.directory)

    @property
    def is_saved(self) -> bool:
        """Say whether there is a saved state."""
        return self._saved.exists()

    def save(self) -> None:
        """Shut the host down and keep its files: `reset(saved=True)` begins from them."""
        self.ssh("systemctl poweroff", check=False)
        wait_for(f"the shutdown of {self.name}", lambda: not cgroups.runs(self.cgroup), _BOOT_SECONDS)
        self.kill()
        half = self._saved.with_name(f"half-{self.name}")
        half.mkdir(parents=True)
        for name in ("upper", *_BOUND):
            (self.directory / name).rename(half / name)
        half.rename(self._saved)

    def _boot(self) -> None:
        binds = [f"--bind={self.directory / name}:/var/lib/{name}" for name in _BOUND]
        binds += [f"--bind-ro={path}:{path}" for path in self.request.bind]
        command = (
            "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "-D", str(self.root), "-b",
            "-M", self._machine, f"--hostname={self.name}", f"--network-bridge={self._bridge}",
            "--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=pipe", "--capability=all",
            "--system-call-filter=add_key keyctl bpf", *binds,
        )  # fmt: skip
        directories = " ".join(str(path) for path in cgroups.cgroup_directories(self.cgroup))
        with (self.directory / "console.log").open("w") as console:
            subprocess.Popen(
                ("sh", "-c", _SUPERVISOR, "gpuprov-lab", directories, *command),
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )  # fmt: skip

    def start_copy(self, image: Host, change: Callable[[Path], None]) -> None:
        """Boot a copy of another host's saved disk, with address, keys and GPUs of its own; `change` sees its root."""
        self.kill()
        self.wipe()
        self._saved, self._from_saved = image._saved, True
        self._mount()
        prepare.prepare(self)
        change(self.root)
        self._boot()

    def wait_until_up(self) -> None:
        """Wait for SSH. Raises LabError with the end of the console if it does not come."""
        try:
            wait_for(f"SSH on {self.name}", self.answers, _BOOT_SECONDS)
        except LabError as error:
            console = (self.directory / "console.log").read_text(errors="replace")[-1500:]
            said = self.ssh("systemctl list-jobs; systemctl --failed", check=False, timeout=60)
            raise LabError(f"{error}\nssh: {said.stdout}{said.stderr}\nconsole: {console}") from None

    def answers(self) -> bool:
        """Say whether a command runs over SSH."""
        return (
            self.ssh("test -e /run/systemd/system && ! test -e /run/nologin", check=False, timeout=60).returncode == 0
        )

    def wait_until_settled(self) -> None:
        """Wait until all of the boot is done: docker among it."""
        self.ssh("systemctl is-system-running --wait", check=False, timeout=_BOOT_SECONDS)

    def kill(self) -> None:
        """Pull the plug, and unmount."""
        cgroups.end_processes(self.cgroup)
        # The kernel takes its time to remove a dead host's network; the next boot would find its name in use.
        run(("ip", "link", "delete", f"vb-{self._machine}"), check=False)
        while os.path.ismount(self.root):
            run(("umount", "-R", str(self.root)))

    def wipe(self) -> None:
        """Remove the host's files."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.directory.exists():
            raise LabError(f"{self.directory} can't be removed; is something below it mounted? next: findmnt")

    def reset(self, *, saved: bool = False) -> None:
        """Bring the host back to its pristine state, or to the saved one: about two seconds."""
        self.start(saved=saved)
        self.wait_until_up()
        self.wait_until_settled()

    def switch_on(self) -> None:
        """Wait for the end of a shutdown from inside, and boot again."""
        wait_for(f"the shutdown of {self.name}", lambda: not cgroups.runs(self.cgroup), _BOOT_SECONDS)
        run(("ip", "link", "delete", f"vb-{self._machine}"), check=False)
        self._boot()
        self.wait_until_up()
        self.wait_until_settled()

    def power_cycle(self) -> None:
        """Pull the plug, since a shutdown would wait for containers, and boot again."""
        cgroups.end_processes(self.cgroup)
        self.switch_on()

    def boot_again(self) -> None:
        """Boot a host that was killed from the files in its storage."""
        self._mount()
        self._boot()
        self.wait_until_up()
        self.wait_until_settled()

    def reboot(self) -> None:
        """Reboot from inside, and wait for the new boot."""
        before = self.boot_id()
        self.ssh("systemctl reboot", check=False)
        wait_for(f"the reboot of {self.name}", lambda: self._boot_now() not in ("", before), _BOOT_SECONDS)
        self.wait_until_settled()

    def boot_id(self) -> str:
        """Return the boot's id, as soon as the host answers: a late answer must not be taken for another boot."""
        return wait_for(f"an answer of {self.name}", self._boot_now, _BOOT_SECONDS)

    def _boot_now(self) -> str:
        """Return the boot's id, nothing while the host does not answer or goes down.

        systemd-nspawn gives a host an id of its own by a mount, which the host's shutdown undoes: the machine's shows.
        """
        state = "initializing|starting|running|degraded|maintenance"
        line = f"case $(systemctl is-system-running) in {state}) cat /proc/sys/kernel/random/boot_id ;; esac"
        return self.ssh(line, check=False, timeout=10).stdout.strip()

    # -- use -----------------------------------------------------------------------------------------------------

    def add_archive(self) -> None:
        """Let the host install packages of Debian's archive, if it was made without."""
        prepare.add_archive(self.root, self.request.release)

    def ssh_argv(self, user: str = "root") -> tuple[str, ...]:
        """Return the ssh command up to the host's name."""
        options = (
            f"UserKnownHostsFile={self._keys}/known_hosts", "BatchMode=yes", "ConnectTimeout=30", "LogLevel=ERROR",
            "StrictHostKeyChecking=yes", "IdentitiesOnly=yes",
        )  # fmt: skip
        words = [word for option in options for word in ("-o", option)]
        return ("ssh", "-F", "none", "-i", f"{self._keys}/id_ed25519", *words, f"{user}@{self.address}")

    def ssh(
        self,
        command: str | Sequence[str],
        *,
        stdin: str = "",
        check: bool = True,
        timeout: float = 120,
        user: str = "root",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (words, or a line for the host's shell) on the host. Raises LabError if it fails."""
        line = command if isinstance(command, str) else shlex.join(command)
        argv = (*self.ssh_argv(user), line)
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(argv, 124, "", f"no end within {timeout:g} s")
        output = f"{done.stdout[-_SHOWN:]}{done.stderr[-_SHOWN:]}".rstrip()
        SAID.append(f"{self.name}$ {line[:_SHOWN]}\n{output}\n[exit code {done.returncode}]")
        if check and done.returncode != 0:
            raise LabError(
                f"{self.name}: `{line}` exited {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done

    def snapshot(self, *places: str) -> Snapshot:
        """Return mode, owner and content (or link target) of all that lies below some directories (default: /etc)."""
        found: Snapshot = {}
        for place in places or ("/etc",):
            for path in (self.root / place.lstrip("/")).rglob("*"):
                status = path.lstat()
                content = b""
                if stat.S_ISLNK(status.st_mode):
                    content = str(path.readlink()).encode()
                elif stat.S_ISREG(status.st_mode):
                    content = path.read_bytes()
                name = "/" + str(path.relative_to(self.root))
                found[name] = (status.st_mode, status.st_uid, status.st_gid, content)
        return found
