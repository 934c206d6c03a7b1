"""A virtual machine with a kernel of its own, for what system containers can't prove: headers, DKMS, modules, reboots.

qemu without KVM, so that it runs everywhere: it boots in some fifteen seconds. What the guest writes goes into a
temporary file and ends with the process (ImageVm's stays); a reboot of the guest keeps it.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.lab.shell import LabError, wait_for
from tests.lab.vm_image import build_image
from tests.loopback import free_port


class Vm:
    """A virtual machine; `directory` holds its console's log, its known_hosts, and its disk's changes."""

    # An emulated processor beside other work: 244 s were seen at a load of 15.
    boot_seconds = 900
    program = "qemu-system-x86_64"
    # Whether what the guest writes ends with the process.
    snapshot = True

    def __init__(self, cache: Path, directory: Path, tell: Callable[[str], None] = lambda message: None) -> None:
        self.image = self.build(cache, tell)
        self.directory = directory
        self.port = free_port()
        self.key = self.image / "key"
        self.known_hosts = directory / "known_hosts"
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def build(cache: Path, tell: Callable[[str], None]) -> Path:
        """Return the folder with the machine's disk and keys."""
        return build_image(cache, tell)

    def hardware(self) -> tuple[str, ...]:
        """Return qemu's options for the board, the processor, and what it boots from."""
        disk = vm_disk("disk", self.image / "disk", 1, snapshot=self.snapshot)
        return ("-accel", "tcg", *disk, *vm_disk("boot", self.image / "boot", 0))

    def start(self) -> None:
        """Boot from the pristine disk and wait for the end of the boot. Raises LabError if it does not come."""
        if shutil.which(self.program) is None:
            raise LabError(f"there is no program {self.program}; next: make setup")
        self.directory.mkdir(parents=True, exist_ok=True)
        kind, blob, _ = (self.image / "host_key.pub").read_text().split()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {blob}\n")
        # It must not outlive the process that started it, however that ends.
        command = (
            "setpriv", "--pdeathsig", "KILL",
            # One processor: two that one thread each emulates spend a third of their time on waiting for each other.
            self.program, *self.hardware(), "-m", "2048", "-smp", "1", "-display", "none",
            "-serial", f"file:{self.directory}/console.log", "-monitor", "none", "-nodefaults",
            "-netdev", f"user,id=network,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-:22",
            "-device", "virtio-net-pci,netdev=network,romfile=",
            "-object", "rng-random,id=random,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=random",
        )  # fmt: skip
        with (self.directory / "qemu.log").open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.directory)},
            )  # fmt: skip
        self.wait_until_up()

    def wait_until_up(self, left_boot: str = "") -> None:
        """Wait until another boot than `left_boot` has come to its end."""
        try:
            wait_for(
                "the boot of the virtual machine", lambda: self._boot_now() not in ("", left_boot), self.boot_seconds
            )
        except LabError as error:
            console = (self.directory / "console.log").read_text(errors="replace")[-1500:]
            raise LabError(f"{error}\nqemu: {self._said()}\nconsole: {console}") from None
        self.ssh("systemctl is-system-running --wait", check=False, timeout=self.boot_seconds)

    def boot_id(self) -> str:
        """Return the boot's id, as soon as the machine answers."""
        return wait_for("an answer of the virtual machine", self._boot_now, self.boot_seconds)

    def _boot_now(self) -> str:
        """Return the boot's id, nothing while the machine does not answer."""
        if self._process is None or self._process.poll() is not None:
            raise LabError(f"qemu does not run: {self._said()}")
        return self.ssh(
            "test ! -e /run/nologin && cat /proc/sys/kernel/random/boot_id", check=False, timeout=20
        ).stdout.strip()

    def reboot(self) -> None:
        """Reboot from inside, and wait for the end of the new boot."""
        before = self.boot_id()
        self.ssh("systemctl reboot", check=False)
        self.wait_until_up(before)

    def power_off(self) -> None:
        """Shut the machine down from inside, and wait for its end."""
        self.ssh("systemctl poweroff", check=False)
        assert self._process is not None
        self._process.wait(self.boot_seconds)

    def kill(self) -> None:
        """Pull the plug."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)

    def _said(self) -> str:
        return (self.directory / "qemu.log").read_text(errors="replace").strip()[-1500:]

    # -- use -----------------------------------------------------------------------------------------------------

    def ssh(
        self, command: str | Sequence[str], *, stdin: bytes = b"", check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (words, or a line for the machine's shell). Raises LabError if it fails."""
        line = command if isinstance(command, str) else shlex.join(command)
        options = (
            f"UserKnownHostsFile={self.known_hosts}", "BatchMode=yes", "ConnectTimeout=10", "LogLevel=ERROR",
            "StrictHostKeyChecking=yes", "IdentitiesOnly=yes",
        )  # fmt: skip
        words = [word for option in options for word in ("-o", option)]
        argv = ("ssh", "-F", "none", "-i", str(self.key), "-p", str(self.port), *words, "root@127.0.0.1", line)
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(argv, 124, b"", f"no end within {timeout:g} s".encode())
        answer = subprocess.CompletedProcess(
            argv, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        )
        if check and answer.returncode != 0:
            said = answer.stderr.strip() or answer.stdout.strip()
            raise LabError(f"`{line}` exited {answer.returncode}: {said}")
        return answer


def vm_disk(name: str, path: Path, order: int, *, snapshot: bool = True) -> tuple[str, ...]:
    """Return qemu's options for a disk; with `snapshot` its changes end with the process."""
    drive = f"file={path},if=none,id={name},format=raw,cache=unsafe,snapshot={'on' if snapshot else 'off'}"
    return ("-drive", drive, "-device", f"virtio-blk-pci,drive={name},bootindex={order}")
