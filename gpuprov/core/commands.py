"""Run one command in a separate process, to its end or its time limit, and return its result."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, Callable, cast

from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import ExitCode, GpuprovError

# Commands find programs here, whatever the caller's PATH is: on a host, gpuprov runs as root.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Non-interactive and in English, so that messages of programs can be recognised.
COMMAND_ENVIRONMENT = {
    "PATH": SYSTEM_PATH,
    "LC_ALL": "C.UTF-8",
    "LANG": "C.UTF-8",
    "HOME": "/root",
    "DEBIAN_FRONTEND": "noninteractive",
}
# A site may need a proxy to reach its mirrors: these variables are passed to commands.
_PASSED_ENVIRONMENT = (
    "http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "DOCKER_HOST",
)  # fmt: skip
_CHUNK = 1 << 16
_PATIENCE_SECONDS = 5.0
_LONGEST_LINE = 1 << 20
NOT_EXECUTABLE = 126
NOT_FOUND = 127
TIMED_OUT = 124
# How systemctl says that systemd, or the bus to it, does not answer; its exit code is that of a unit that is disabled.
_SILENT = re.compile(r"timed out|Connection re(fused|set)|(not |dis)connected")


@dataclass(frozen=True)
class Completed:
    """The result of a command. `returncode`: 127 for no such program, 124 after its time limit, 128+N by signal N.

    `ended`: how it ended, in words, if not by itself.
    """

    argv: tuple[str, ...]
    returncode: int
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    ended: str = ""

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def unanswered(self) -> bool:
        """Whether it says nothing, not even no: its time was over, a signal ended it, or systemd did not answer it."""
        has_no_systemd = self.argv[:1] == ("systemctl",) and not self.ok and _SILENT.search(self.stderr) is not None
        return self.returncode == TIMED_OUT or self.returncode > 128 or has_no_systemd

    def evidence(self, lines: int = 12) -> str:
        """Return the command, its exit code and the last lines it printed, for an error."""
        said = (self.stderr.strip() or self.stdout.strip()).splitlines()[-lines:]
        return "\n".join([f"`{' '.join(self.argv)}` exited {self.returncode}", *said])

    def require(self, what: str, next_step: str = "", lines: int = 12) -> Completed:
        """Return the result of a command that must succeed; raise GpuprovError saying `what` failed otherwise."""
        if not self.ok:
            raise GpuprovError(what, self.evidence(lines), next_step)
        return self


def unanswered_evidence(*asked: Completed) -> str:
    """Return the evidence of the first command that was left unanswered, "" if each has an answer."""
    return next((one.evidence(2).replace("\n", ": ") for one in asked if one.unanswered), "")


@dataclass(frozen=True)
class Failure:
    """A row of protocol/failures.json: how a program fails (a pattern in its output, its exit code), why, what to do.

    apt lists packages after some lines: `heading` begins the list, {listed} stands for it in the texts. `kind`: `lacks`
    if no repository has a package, `unreached` if a repository does not answer. `exit_code`: of gpuprov then.
    """

    what: str
    next_step: str = ""
    pattern: str = ""
    returncode: int = -1
    heading: str = ""
    kind: str = ""
    exit_code: ExitCode = ExitCode.FAILED


def failures(program: str) -> tuple[Failure, ...]:
    """Return the known failures of a program; the first row that matches decides."""
    # The programs of a boot come without tables.
    from gpuprov.protocol.tables import FAILURES, rows

    return rows(FAILURES, program, Failure)


def first_match(program: str, said: Iterable[str], flags: int = 0) -> tuple[Failure, str] | None:
    """Return the first of a program's failures whose pattern matches a line, and the first such line; else None.

    The order of the rows decides, not that of the lines: programs report consequences before causes.
    """
    lines = tuple(said)
    known = ((row, re.compile(row.pattern, flags)) for row in failures(program) if row.pattern)
    return next(((row, line) for row, compiled in known for line in lines if compiled.search(line)), None)


def lift_memory_limit(needed: int) -> None:
    """Lift a limit of the address space (`ulimit -v`) if this user may, fully or in part.

    Raises GpuprovError if fewer than `needed` bytes are left: programs fail then with messages about something else.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    for limit in (resource.RLIM_INFINITY, hard):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            break
    left = resource.getrlimit(resource.RLIMIT_AS)[0]
    if left != resource.RLIM_INFINITY and left < needed:
        what = f"this login may use too little memory: gpuprov and its programs need {needed >> 10} KiB of addresses"
        step = "raise the limit `as` in /etc/security/limits.conf or limits.d, log in again, then retry"
        raise GpuprovError(what, f"ulimit -v: {left >> 10}", step)


def run_command(
    argv: Sequence[str], *, timeout: float, stdin: bytes, env: Mapping[str, str] | None,
    on_line: Callable[[str], None] | None, stop: Callable[[], bool] = lambda: False, folder: str | None = "/",
    most: int = sys.maxsize,
) -> Completed:  # fmt: skip
    """Run a command, and end it after `timeout` seconds, or once `stop` is true; System.run documents the details.

    `folder`: where it runs; None: here. Of each of its outputs the last `most` bytes are kept.
    """
    argv = tuple(argv)
    begun = time.monotonic()
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=command_environment(env), start_new_session=True, close_fds=False, cwd=folder,
        )  # fmt: skip
    except FileNotFoundError:
        return Completed(argv, NOT_FOUND, "", f"{argv[0]}: command not found")
    except OSError as error:
        return Completed(argv, NOT_EXECUTABLE, "", f"{argv[0]}: {str(error.strerror).lower()}")
    with process:
        try:
            out, err, in_time = _communicate(process, stdin, begun + timeout, on_line, stop, most)
        except (KeyboardInterrupt, SystemExit):  # Popen would wait for its end first
            end_group(process)
            raise
        if not in_time:
            end_group(process)
            err += f"\nstopped after {timeout:g} s, its time limit".encode()
    code = process.returncode if in_time else TIMED_OUT
    seconds = round(time.monotonic() - begun, 3)
    # Python reports a signal as -N; shells report 128+N.
    code = 128 - code if code < 0 else code
    return Completed(argv, code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), seconds)


@contextlib.contextmanager
def command_output(argv: Sequence[str], *, timeout: float) -> Iterator[BinaryIO]:
    """Yield a command's output as it is written, for outputs too large for memory. It ends after `timeout` seconds.

    Its stderr is discarded: a truncated output shows the failure. Raises OSError if there is no such program.
    """
    process = subprocess.Popen(
        tuple(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=command_environment(), start_new_session=True, cwd="/",
    )  # fmt: skip
    limit = threading.Timer(timeout, end_group, (process,))
    limit.start()
    try:
        with process:
            try:
                # A pipe is a BufferedReader; typeshed has a protocol instead.
                yield cast("BinaryIO", process.stdout)
            except BaseException:
                end_group(process)
                raise
    finally:
        limit.cancel()


def command_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment that commands get."""
    passed = {name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ}
    return {**passed, **COMMAND_ENVIRONMENT, **(extra or {})}


def _communicate(
    process: subprocess.Popen[bytes], stdin: bytes, deadline: float, on_line: Callable[[str], None] | None,
    stop: Callable[[], bool], most: int,
) -> tuple[bytes, bytes, bool]:  # fmt: skip
    """Feed and read the process until it ends; the last value is False if it exceeded the deadline or must stop.

    The end of the process counts, not of its pipes: a daemon started by a package script may keep those open.
    """
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    given, rest, out, err = process.stdin.fileno(), memoryview(stdin), bytearray(), bytearray()
    # A command that hangs reads nothing, and a pipe takes 64 KiB.
    os.set_blocking(given, False)
    chunks = {process.stdout.fileno(): out, process.stderr.fileno(): err}
    pending = {number: bytearray() for number in chunks}
    with selectors.DefaultSelector() as selector:
        for number in (given, *chunks):
            selector.register(number, selectors.EVENT_WRITE if number == given else selectors.EVENT_READ)
        while selector.get_map():
            ended = process.poll() is not None
            if not ended and (time.monotonic() > deadline or stop()):
                return bytes(out), bytes(err), False
            ready = selector.select(0 if ended else 0.2)
            # What it left behind may print without end.
            if ended and (not ready or time.monotonic() > deadline):
                break
            for key, _ in ready:
                if key.fd == given:
                    with contextlib.suppress(BrokenPipeError):
                        if rest := rest[os.write(given, rest[:_CHUNK]) :]:
                            continue
                    selector.unregister(given)
                    process.stdin.close()
                    continue
                data = os.read(key.fd, _CHUNK)
                if not data:
                    selector.unregister(key.fd)
                chunks[key.fd] += data
                del chunks[key.fd][:-most]
                _tell_lines(pending[key.fd], data, on_line)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(deadline - time.monotonic(), 0.1))
    return bytes(out), bytes(err), process.returncode is not None


def _tell_lines(pending: bytearray, data: bytes, on_line: Callable[[str], None] | None) -> None:
    if on_line is None:
        return
    pending += data
    *lines, rest = pending.split(b"\n")
    # A line without end.
    pending[:] = rest[-_LONGEST_LINE:]
    for line in lines:
        on_line(line.decode("utf-8", "replace").rstrip("\r"))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the command and its children to end, then make them: the command may end at once, its children not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _signalled(process, number):
            return
        until = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < until:
            process.poll()
            # Nothing is sent: it tells whether any process of the group is left.
            if not _signalled(process, 0):
                return
            time.sleep(0.05)
    if process.poll() is None:
        # A call to a GPU that hangs ends by no signal: Popen must not wait for it.
        process.returncode = -signal.SIGKILL


def _signalled(process: subprocess.Popen[bytes], number: int) -> bool:
    try:
        os.killpg(process.pid, number)
    except OSError as error:
        # What a user's command has left may run as root, as nvidia-modprobe does.
        return isinstance(error, PermissionError)
    return True
