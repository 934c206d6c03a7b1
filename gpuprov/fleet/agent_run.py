"""Run the agent on one host: probe, upload if missing, run as root, relay events; at most three round trips."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprov.agent.agent import STOP
from gpuprov.agent.probe import (
    PROBE,
    PYTHONS,
    Probe,
    bootstrap_input,
    bootstrap_script,
    parse_probe,
    probe_problem,
    python_problem,
)  # fmt: skip
from gpuprov.agent.push import STORE, agent_command, ending, no_probe_problem, unfinished_problem
from gpuprov.agent.refusals import sudo_problem
from gpuprov.bundle.place import ASK, CACHE, Place, parse_there
from gpuprov.bundle.place import STORE as STORE_BUNDLE
from gpuprov.core.commands import Completed
from gpuprov.fleet import remote
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.codec import dump
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import EventReader, Finished, Note, Sink, Started
from gpuprov.protocol.request import Request

if TYPE_CHECKING:
    from fabric import Connection

    from gpuprov.fleet.agent_build import Agent

_PATIENCE = 60
_BOOTSTRAP_PATIENCE = 900
_CHUNK = 1 << 18
# A marker on stderr shows that sudo accepted: only then does stdin belong to the command and no longer to sudo.
_THROUGH = "gpuprov-sudo-through"
_WRONG_PASSWORD = ("Sorry, try again", "incorrect password", "no password was provided")


def run_agent(
    connection: Connection,
    target: HostTarget,
    request: Request,
    agent: Agent,
    sink: Sink,
    *,
    bootstrap_python: bool = False,
    host_timeout: float | None = None,
    claim: Callable[[str], None] = lambda _: None,
    stoppable: Callable[[Callable[[], None]], None] = lambda _: None,
) -> Finished:
    """Run the request on the host and return its last event; `sink` gets all others. Raises GpuprovError without one.

    `host_timeout`: how many seconds the agent may be silent. `claim` gets the machine's identity before any change, and
    raises GpuprovError to prevent it. `stoppable` gets, once the agent runs, what asks it to stop unless a change has
    begun.
    """
    probe = _prepare(connection, target, request, agent, sink, claim, bootstrap_python=bootstrap_python)
    if request.bundle:
        request = replace(request, bundle=_upload_bundle(connection, target, probe, request, sink))
    command = agent_command(probe, agent.digest)
    finished: list[Finished] = []
    read = EventReader()

    def on_line(line: str) -> None:
        event = read(line)
        if isinstance(event, Finished):
            finished.append(event)
        elif event is not None:
            sink(event)
            if isinstance(event, Started):
                stoppable(lambda: later(STOP.encode() + b"\n"))

    line = _line(dump(request))
    later = remote.Later()
    done = as_root(connection, target, probe, command, line, on_line, timeout=host_timeout, later=later)
    if not finished:
        raise GpuprovError.several((_unfinished_problem(done, list(read.strays)),))
    return finished[-1]


def _prepare(
    connection: Connection, target: HostTarget, request: Request, agent: Agent, sink: Sink,
    claim: Callable[[str], None], *, bootstrap_python: bool,
) -> Probe:  # fmt: skip
    """Return the probe of a host that has, from now on, a Python and the agent. Raises GpuprovError."""
    probe = probe_host(connection, target, agent.digest)
    claim(probe.machine)
    if probe.python is None and bootstrap_python:
        sink(Note("installing Python with the host's package manager"))
        _bootstrap(connection, target, probe, request)
        probe = probe_host(connection, target, agent.digest)
    problem = python_problem(probe, target.python)
    if problem is not None:
        raise GpuprovError.several((problem,))
    if probe.agent_digest != agent.digest:
        _upload(connection, agent)
    return probe


def probe_host(connection: Connection, target: HostTarget, digest: str = "none") -> Probe:
    """Return the probe of the host. Raises GpuprovError if nothing can run there as root. `digest`: of the agent."""
    pythons = (target.python,) if target.python else PYTHONS
    done = remote.run(
        connection, f"sh -s {digest} {' '.join(pythons)}", PROBE.encode(), timeout=_PATIENCE
    )  # fmt: skip
    probe = parse_probe(done.stdout)
    if probe is None and done.returncode in (remote.CONNECTION_LOST, remote.SILENT):
        raise GpuprovError(
            "the host accepts the login, then stops responding", _ending(done),
            "look what hangs there: on its console, dmesg and uptime", exit_code=ExitCode.UNREACHABLE,
        )  # fmt: skip
    if probe is None:
        problem, no_login = no_probe_problem(done, ended=_ENDS.get(done.returncode, ""), user=target.user)
        code = ExitCode.UNREACHABLE if no_login else ExitCode.FAILED
        raise GpuprovError.several((problem,), exit_code=code)
    refused = probe_problem(probe, become=target.become, has_password=bool(target.become_password))
    if refused is not None:
        raise GpuprovError.several((refused,))
    return probe


def _upload(connection: Connection, agent: Agent) -> None:
    done = remote.run(
        connection, f"sh -c {shlex.quote(STORE)} sh {agent.digest}", agent.content, timeout=_PATIENCE
    )  # fmt: skip
    if not done.ok:
        raise GpuprovError(
            "the agent cannot be stored on the host", _ending(done),
            "is there room in the home directory (df -h ~; df -i ~)? may the user write to ~/.cache/gpuprov?",
        )  # fmt: skip


def _upload_bundle(connection: Connection, target: HostTarget, probe: Probe, request: Request, sink: Sink) -> str:
    """Upload the request's bundle, once for each digest, resumed after a broken connection; return its path there.

    The uploaded content is not checked here: the agent compares every digest before it uses anything.
    """
    place = Place(request.bundle_digest, Path(request.bundle).stat().st_size)
    lines: list[str] = []
    asked = as_root(connection, target, probe, place.command(ASK), (), lines.append)
    there = parse_there(lines)
    if there is None:
        raise GpuprovError("the host does not say what it has of the bundle", _ending(asked), "run it again")
    if there.whole:
        return place.path
    from_where = f", from byte {there.size} on" if there.size else ""
    sink(Note(f"uploading the bundle, {place.size / 2**20:.0f} MiB{from_where}"))
    content = _content(request.bundle, there.size)
    stored = as_root(connection, target, probe, place.command(STORE_BUNDLE), content, lambda line: None)
    if stored.returncode == remote.CONNECTION_LOST:
        next_step = "run the same command again; it goes on where this one stopped"
        raise GpuprovError("the connection dropped while the bundle was uploaded", _ending(stored), next_step)
    if not stored.ok:
        next_step = f"is there room? df -h {CACHE}; df -i {CACHE}"
        raise GpuprovError("the bundle can't be stored on the host", _ending(stored), next_step)
    return place.path


def _content(path: str, start: int) -> Iterator[bytes]:
    with Path(path).open("rb") as file:
        file.seek(start)
        while chunk := file.read(_CHUNK):
            yield chunk


def _line(text: str) -> tuple[bytes, ...]:
    return (f"{text}\n".encode(),)


def _bootstrap(connection: Connection, target: HostTarget, probe: Probe, request: Request) -> None:
    output: list[str] = []
    command = ("sh", "-c", bootstrap_script(probe))
    stdin = (bootstrap_input(request.spec),)
    done = as_root(connection, target, probe, command, stdin, output.append, timeout=_BOOTSTRAP_PATIENCE)
    if not done.ok:
        raise GpuprovError(
            "Python cannot be installed on the host", _ending(done, output[-5:]),
            "correct the host's package repositories, or install Python ≥ 3.9 by hand",
        )  # fmt: skip


def as_root(
    connection: Connection,
    target: HostTarget,
    probe: Probe,
    command: tuple[str, ...],
    stdin: Iterable[bytes],
    on_line: Callable[[str], None],
    *,
    timeout: float | None = None,
    later: remote.Later | None = None,
) -> Completed:
    """Run a command as root and write to its stdin; `later` keeps that open. Raises GpuprovError if sudo refuses."""
    if probe.uid == 0 or probe.sudo_code == 0:
        words = command if probe.uid == 0 else ("sudo", "-n", "--", *command)
        return remote.stream(connection, shlex.join(words), on_line, stdin=stdin, timeout=timeout, later=later)
    words = ("sudo", "-k", "-S", "-p", "", "--", "sh", "-c", f'echo {_THROUGH} >&2; exec "$@"', "sh", *command)
    answer = _SudoAnswer(stdin)
    done = remote.stream(
        connection, "env LC_ALL=C " + shlex.join(words), on_line,
        stdin=_line(target.become_password), answer=answer, timeout=timeout, later=later,
    )  # fmt: skip
    if not answer.went_through:
        raise GpuprovError.several((_sudo_refusal(target, done, wrong_password=answer.wrong_password),))
    return done


def _sudo_refusal(target: HostTarget, done: Completed, *, wrong_password: bool) -> Problem:
    """Return why sudo refused although it was given a password."""
    output = "\n".join(line for line in done.stderr.splitlines() if line.strip()) or _ending(done)
    if wrong_password:
        step = "correct ansible_become_password; with -K, type the password by which this user's sudo asks"
        return Problem("sudo on the host refuses the password", output, step)
    step = f"try on the host, as {target.user or 'this user'}: sudo -v"
    return sudo_problem(done.stderr) or Problem("sudo on the host refuses us", output, step)


class _SudoAnswer:
    """Respond to each line of sudo's stderr: stop after one wrong password, as a second might lock the account."""

    def __init__(self, stdin: Iterable[bytes]) -> None:
        self.stdin = stdin
        self.went_through = False
        self.wrong_password = False

    def __call__(self, line: str) -> Iterable[bytes] | None:
        if not self.went_through and any(text in line for text in _WRONG_PASSWORD):
            self.wrong_password = True
            return None
        if line.strip() == _THROUGH:
            self.went_through = True
            return self.stdin
        return ()


def _unfinished_problem(done: Completed, strays: list[str]) -> Problem:
    """Return why a run ended without a result."""
    if done.returncode == remote.SILENT:
        return Problem(
            "the host fell silent during the run", done.stderr.strip().rpartition("\n")[2],
            "look what hangs there (ps f); the agent may still be at work, the same command again gets its result; "
            "--host-timeout waits longer",
        )  # fmt: skip
    if done.returncode == remote.TOO_MUCH:
        return Problem(
            "the host sends no events but a flood", done.stderr.strip().rpartition("\n")[2],
            "look what its shell and its Python print: ssh HOST true; ssh HOST python3 -c pass",
        )  # fmt: skip
    return unfinished_problem(
        done, strays, lost=done.returncode == remote.CONNECTION_LOST, ended=_ENDS.get(done.returncode, "")
    )


def _ending(done: Completed, output: list[str] | None = None) -> str:
    """Return how the command ended and its last lines, without the long command itself."""
    return ending(done, output, ended=_ENDS.get(done.returncode, ""))


_ENDS = {
    remote.CONNECTION_LOST: "the connection broke",
    remote.TOO_MUCH: "too much output",
    remote.SILENT: "no answer",
    remote.KILLED: "killed by a signal",
}
