"""Run the agent on one host: probe, upload if missing, run as root, relay events; mostly in three round trips."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprov.agent import probe, push
from gpuprov.agent.agent import STOP
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.fleet import remote
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.ssh_config import UNHEEDED
from gpuprov.protocol.codec import dump
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import EventReader, Finished, Note, Sink, Started
from gpuprov.protocol.request import Request

if TYPE_CHECKING:
    from fabric import Connection

    from gpuprov.fleet.agent_file import Agent


_PATIENCE = 60
_BOOTSTRAP_PATIENCE = 900
_SECONDS = 30
_SLOWEST = 10_000  # bytes a second, over which the agent arrives in time
# A marker on stderr shows that sudo accepted: only then does stdin belong to the command and no longer to sudo.
# sudo's prompt is this line and a dot: a second one says that the first password was wrong, however sudo words it.
_THROUGH, _ASKS = "gpuprov-sudo-through", "gpuprov-sudo-asks"
# The line after which the output of a command begins.
_BEGIN = "gpuprov-output"


def run_agent(
    connection: Connection, target: HostTarget, request: Request, agent: Agent, sink: Sink, *,
    bootstrap_python: bool = False, host_timeout: float | None = None, claim: Callable[[str], None] = lambda _: None,
    stoppable: Callable[[Callable[[], None]], None] = lambda _: None,
) -> Finished:  # fmt: skip
    """Run the request on the host and return its last event; `sink` gets all others. Raises GpuprovError without one.

    `host_timeout`: how many seconds the agent may be silent. `claim` gets the machine's identity before any change, and
    raises GpuprovError to prevent it. `stoppable` gets, once the agent runs, what asks it to stop unless a change has
    begun.
    """
    for keyword in UNHEEDED:
        if connection.ssh_config.get(keyword.lower(), "none") != "none":
            sink(Note(f"the SSH option {keyword} has no effect here", "warning"))
    host = RemoteSystem(connection, target, agent.digest)
    claim(host.probe.machine)
    if host.probe.python is None and bootstrap_python:
        sink(Note("installing Python with the host's package manager"))
        _bootstrap(host, request)
        host = RemoteSystem(connection, target, agent.digest)
    if problem := probe.python_problem(host.probe, target.python):
        raise GpuprovError.several((problem,))
    in_time = _PATIENCE + len(agent.content) / _SLOWEST
    if host.probe.agent_digest != agent.digest:
        store = shlex.join(push.store_command(agent.digest))
        push.require(remote.run(connection, store, agent.content, timeout=in_time), *push.NOT_STORED)
    if request.bundle:
        request = replace(request, bundle=_upload_bundle(host, request, sink, host_timeout))
    read = EventReader()

    def on_line(line: str) -> None:
        event = read(line)
        if event is not None and not isinstance(event, Finished):
            sink(event)
            if isinstance(event, Started):
                stoppable(lambda: later(STOP.encode() + b"\n"))

    later = remote.LateInput()
    command, stdin = push.agent_command(host.probe, agent.digest), (f"{dump(request)}\n".encode(),)
    run = functools.partial(host.as_root, command, stdin, on_line, timeout=host_timeout, later=later)
    done = run()
    if done.returncode == push.UNREADABLE:
        store_as_root = push.store_command(agent.digest, by_root=True)
        push.require(host.run(store_as_root, stdin=agent.content, timeout=in_time), *push.NOT_STORED)
        done = run()
    if read.finished is None:
        raise GpuprovError.several((_unfinished_problem(done, list(read.strays)),))
    return read.finished


def _upload_bundle(host: RemoteSystem, request: Request, sink: Sink, timeout: float | None) -> str:
    """Upload the request's bundle, once for each digest, resumed after a broken connection; return its path there.

    The uploaded content is not checked here: the agent compares every digest before it uses anything.
    """
    place = push.BundlePlace(request.bundle_digest, Path(request.bundle).stat().st_size)
    lines: list[str] = []
    asked = host.as_root(place.command(push.ASK_BUNDLE), (), lines.append, timeout=timeout)
    there = push.parse_stored(lines)
    if there is None:
        raise GpuprovError("the host does not say what it has of the bundle", push.ending(asked), "run it again")
    size, whole = there
    if whole:
        return place.path
    from_where = f", from byte {size} on" if size else ""
    sink(Note(f"uploading the bundle, {place.size / 2**20:.0f} MiB{from_where}"))
    with Path(request.bundle).open("rb") as file:
        file.seek(size)
        content = iter(functools.partial(file.read, 1 << 18), b"")
        stored = host.as_root(place.command(push.STORE_BUNDLE), content, lambda line: None, timeout=timeout)
    if stored.returncode == remote.CONNECTION_LOST:
        next_step = "run the same command again; it goes on where this one stopped"
        raise GpuprovError("the connection dropped while the bundle was uploaded", push.ending(stored), next_step)
    push.require(stored, *push.NO_ROOM)
    return place.path


def _bootstrap(host: RemoteSystem, request: Request) -> None:
    output: list[str] = []
    command, stdin = ("sh", "-c", probe.bootstrap_script(host.probe)), (probe.bootstrap_input(request.spec),)
    done = host.as_root(command, stdin, output.append, timeout=_BOOTSTRAP_PATIENCE)
    push.require(replace(done, stdout="\n".join(output[-5:])), *probe.NOT_BOOTSTRAPPED)


class RemoteSystem(System):
    """The machine behind a connection; its commands run as root. Raises GpuprovError if account or sudo refuses.

    `probe` is what the host is; `digest` that of the agent whose place there is looked up.
    """

    def __init__(self, connection: Connection, target: HostTarget, digest: str = "none") -> None:
        super().__init__("/")
        self._connection = connection
        self._target = target
        self.probe = self._probed(digest)

    def _probed(self, digest: str) -> probe.Probe:
        command = probe.probe_command(digest, self._target.python, self._target.sudo)
        done = remote.run(self._connection, command, probe.PROBE.encode(), timeout=_PATIENCE)
        found = probe.parse_probe(done.stdout)
        if found is None and done.returncode in (remote.CONNECTION_LOST, remote.SILENT):
            what, step = "then stops responding", "look what hangs there: on its console, dmesg and uptime"
            if "ChannelException" in done.stderr:
                what, step = "but opens no session", "on the host: sshd -T | grep -i maxsessions"
            what = f"the host accepts the login, {what}"
            raise GpuprovError(what, push.ending(done), step, exit_code=ExitCode.UNREACHABLE)
        if found is None:
            problem, no_login = push.no_probe_problem(done, self._target.user)
            code = ExitCode.UNREACHABLE if no_login else ExitCode.FAILED
            raise GpuprovError.several((problem,), exit_code=code)
        refused = probe.probe_problem(
            found, become=self._target.become, has_password=bool(self._target.become_password), sudo=self._target.sudo
        )
        if refused is not None:
            raise GpuprovError.several((refused,))
        return found

    def as_root(
        self, command: tuple[str, ...], stdin: Iterable[bytes], on_line: Callable[[str], None], *,
        timeout: float | None = None, later: remote.LateInput | None = None,
    ) -> Completed:  # fmt: skip
        """Run a command and write to its stdin; `later` keeps that open. Raises GpuprovError if sudo refuses."""
        # An empty line comes before its output: what a login shell prints may not end its last line.
        stream = functools.partial(remote.stream, self._connection, on_line=on_line, timeout=timeout, later=later)
        if self.probe.uid == 0 or self.probe.sudo_code == 0:
            words = command if self.probe.uid == 0 else (self._target.sudo, "-n", "--", *command)
            return stream(f"echo; {shlex.join(words)}", stdin=stdin)
        questions, through = 0, False
        ask = f'exec {self._target.sudo} -k -S -p "$(echo {_ASKS}; echo .)" -- "$@"'
        words = ("sh", "-c", ask, "sh", "sh", "-c", f'echo {_THROUGH} >&2; exec "$@"', "sh", *command)

        def answer(line: str) -> Iterable[bytes] | None:
            """Stop after one wrong password, as a second might lock the account."""
            nonlocal questions, through
            if line.endswith(_THROUGH):
                through = True
                return stdin
            questions += line.endswith(_ASKS)
            return None if questions > 1 and not through else ()

        password = (f"{self._target.become_password}\n".encode(),)
        done = stream("echo; env LC_ALL=C " + shlex.join(words), stdin=password, answer=answer)
        if not through:
            # Of the prompt's second line, which sudo-rs ends in its own way.
            lines = (line.removeprefix(".").removeprefix("] Password:").strip() for line in done.stderr.splitlines())
            output = "\n".join(line for line in lines if line and not line.endswith(_ASKS)) or push.ending(done)
            if questions > 1 or "incorrect password" in output:
                step = "correct ansible_become_password; with -K, type the password by which this user's sudo asks"
                raise GpuprovError("sudo on the host refuses the password", output, step)
            step = f"try on the host, as {self._target.user or 'this user'}: {self._target.sudo} -v"
            known = probe.sudo_problem(done.stderr)
            raise GpuprovError.several((known or Problem("sudo on the host refuses us", output, step),))
        return replace(done, stderr=f"{done.stderr}\n".rpartition(f"{_THROUGH}\n")[2].rstrip())

    def run(
        self, argv: Sequence[str], *, timeout: float = 60, stdin: bytes = b"", env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:  # fmt: skip
        """Run a command as root on the host; what a login shell prints before it is left out."""
        lines: list[str] = []
        words = ("sh", "-c", f'echo {_BEGIN}; exec "$@"', "sh", *argv)
        done = self.as_root(words, (stdin,), lines.append, timeout=timeout)
        begin = next((number for number, line in enumerate(lines, 1) if line.endswith(_BEGIN)), len(lines))
        if on_line is not None:
            for line in lines[begin:]:
                on_line(line)
        return replace(done, argv=tuple(argv), stdout="".join(f"{line}\n" for line in lines[begin:]))

    def read_bytes(self, path: str) -> bytes | None:
        """Return a file's content, None if there is none."""
        done = self.run(("cat", "--", path), timeout=_SECONDS)
        return done.stdout.encode("utf-8", "surrogateescape") if done.ok else None

    def list_directory(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory; none if it is missing."""
        done = self.run(("ls", "-A", "--", path), timeout=_SECONDS)
        return tuple(sorted(done.stdout.splitlines())) if done.ok else ()

    def which(self, program: str) -> str | None:
        """Return a program's path on the host."""
        done = self.run(("sh", "-c", 'command -v -- "$1"', "sh", program), timeout=_SECONDS)
        return done.stdout.strip() or None


def _unfinished_problem(done: Completed, strays: list[str]) -> Problem:
    last_line = done.stderr.strip().rpartition("\n")[2]
    if done.returncode == remote.SILENT:
        return Problem(
            "the host fell silent during the run", last_line,
            "look what hangs there (ps f); the agent may still be at work, the same command again gets its result; "
            "--host-timeout waits longer",
        )  # fmt: skip
    if done.returncode == remote.TOO_MUCH:
        step = "look what its shell and its Python print: ssh HOST true; ssh HOST python3 -c pass"
        return Problem("the host sends no events but a flood", last_line, step)
    return push.unfinished_problem(done, strays, lost=done.returncode == remote.CONNECTION_LOST)
