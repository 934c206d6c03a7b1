"""Which hosts run when, and what surrounds a host's change: batches, canaries, the user's commands, the drain.

The terms of batches are Ansible's: `serial` as in a play, `--max-fail` as its max_fail_percentage, which also accepts a
number. The user's commands run on the controller, without a shell, and come only from the command line: an inventory
must not be able to run anything here. A host whose plan disturbs nothing is not drained.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

from gpuprov.agent.result import Drain, DrainState, HostResult
from gpuprov.agent.window import Window, parse_window
from gpuprov.core.commands import TIMED_OUT, run_command
from gpuprov.fleet.grouping import listed
from gpuprov.fleet.history import moment
from gpuprov.fleet.inventory import HostTarget
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, UsageError
from gpuprov.protocol.events import ChangeStarted, Finished, Kept, Note, Planned, RolledBack, Sink
from gpuprov.protocol.imex import split_problem
from gpuprov.protocol.request import Request
from gpuprov.protocol.words import counted, plain

_SHARE = re.compile(r"(\d{1,6})(%?)")
# Hosts with the same `imex_nodes` are of one IMEX domain, which changes at once or not at all.
_ROLLS_BACK = Problem("--rollback-on-failure would divide an IMEX domain", "", "leave it out, and roll back by hand")
_WITHOUT = "correct it; or set gpuprov_imex: off for it, or leave its domain out with --limit; then run this again"
# A name that can't become an option, a second argument or a control sequence; addresses of IPv6 included.
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]{0,252}\Z")
_PLACE = re.compile(r"\{([A-Za-z_]+)\}")
_PLACES = ("host", "address")
# Of a command's output: the last lines are those that say why.
_KEPT_LINES = 5
_LONGEST_LINE = 300
_MOST_OUTPUT = 1 << 18
# Carries a request out on the host; relays every event but the last one, which it returns.
CarryOut = Callable[[Request, Sink], Finished]
# What became of a rollback.
_OUTCOMES: dict[RolledBack, str] = {
    "verified": "the host was rolled back, and verify is green", "failed": "the host could not be rolled back",
    "not-verified": "the host was rolled back, but verify fails after it too",
}  # fmt: skip


@dataclass(frozen=True)
class Share:
    """A number of hosts, or with `percent` a part of them."""

    number: int
    percent: bool = False

    def of(self, hosts: int) -> int:
        """Return this share of a number of hosts, rounded down as Ansible does."""
        return hosts * self.number // 100 if self.percent else self.number


@dataclass(frozen=True)
class Rollout:
    """The order given on the command line; empty means all at once. `canary`: a number, or host names.

    `window`: when hosts may begin. `rollback`: a host on which changes or verify fail goes back.
    """

    serial: tuple[Share, ...] = ()
    max_fail: Share | None = None
    canary: str = ""
    window: Window | None = None
    rollback: bool = False


@dataclass(frozen=True)
class Batch:
    """Hosts that run together. If more than `most_failed` of them fail, no further host starts; None: no limit."""

    name: str
    targets: tuple[HostTarget, ...]
    most_failed: int | None = None


def parse_rollout(
    serial: str = "", max_fail: str = "", canary: str = "", window: str = "", *, rollback: bool = False
) -> Rollout:
    """Return the meaning of the options of these names. Raises GpuprovError (exit code 2)."""
    sizes = tuple(_share("--serial", word, least=1) for word in serial.split(",")) if serial else ()
    if canary.isdecimal() and int(canary) == 0:
        raise UsageError("--canary 0 names no host", "", "leave it out, or name at least one")
    most = _share("--max-fail", max_fail, least=0) if max_fail else None
    return Rollout(sizes, most, canary, parse_window(window), rollback)


def _share(option: str, word: str, *, least: int) -> Share:
    found = _SHARE.fullmatch(word.strip())
    share = Share(int(found.group(1)), bool(found.group(2))) if found else None
    if share is None or share.number < least or (share.percent and share.number > 100):
        example = "--serial 1,5,20%" if option == "--serial" else "--max-fail 10%"
        what = f"{option} takes a number of hosts or a percentage, not {word!r}"
        raise UsageError(what, "", f"for example {example}")
    return share


def make_batches(targets: Sequence[HostTarget], rollout: Rollout) -> tuple[Batch, ...]:
    """Return the batches in order. Raises GpuprovError (exit code 2) if a canary is not among the hosts.

    A failed canary ends the run. So does, as in Ansible, a batch in which every host fails.
    """
    canaries = _whole(_canaries(targets, rollout.canary), targets)
    parts = _parts([target for target in targets if target not in canaries], rollout.serial)
    batches = [Batch("canary", canaries, most_failed=0)] if canaries else []
    for number, part in enumerate(parts, 1):
        name = f"batch {number} of {len(parts)}" if rollout.serial else "all others" if canaries else ""
        size = len(part)
        limits = [*([rollout.max_fail.of(size)] if rollout.max_fail else ()), *([size - 1] if rollout.serial else ())]
        batches.append(Batch(name, part, min(limits, default=None)))
    return tuple(batches)


def _parts(hosts: Sequence[HostTarget], serial: Sequence[Share]) -> list[tuple[HostTarget, ...]]:
    """Return the hosts in parts; the last of `serial` applies to all remaining hosts, percentages are of all hosts.

    A part grows until it has all hosts of its IMEX domains.
    """
    parts: list[tuple[HostTarget, ...]] = []
    left = list(hosts)
    while left:
        share = serial[min(len(parts), len(serial) - 1)] if serial else Share(len(left))
        parts.append(_whole(left[: max(1, share.of(len(hosts)))], left))
        chosen = {target.name for target in parts[-1]}
        left = [target for target in left if target.name not in chosen]
    return parts


def _whole(chosen: Iterable[HostTarget], hosts: Iterable[HostTarget]) -> tuple[HostTarget, ...]:
    """Return the chosen ones of these hosts, and all that are of the same domains."""
    some = {host.name: host.spec.imex_nodes for host in chosen}
    domains = {*some.values()} - {()}
    return tuple(host for host in hosts if host.name in some or host.spec.imex_nodes in domains)


def _canaries(targets: Sequence[HostTarget], canary: str) -> tuple[HostTarget, ...]:
    if canary.isdecimal():
        return tuple(targets[: int(canary)])
    names = [target.name for target in targets]
    wanted = [word.strip() for word in canary.split(",") if word.strip()]
    for word in wanted:
        if not fnmatch.filter(names, word):
            near = difflib.get_close_matches(word, names, 1)
            hint = f"did you mean {near[0]}?" if near else "name one of them, or a number: --canary 2"
            seen = f"{counted(len(names), 'host')}: {listed(names)}"
            raise UsageError(f"--canary {word} is no host of this run", seen, hint)
    return tuple(target for target in targets if any(fnmatch.fnmatchcase(target.name, word) for word in wanted))


def hosts_in_domains(hosts: Iterable[HostTarget], request: Request) -> tuple[HostTarget, ...]:
    """Return the hosts that the request would change, and that have a domain with others."""
    return tuple(host for host in hosts if request.changes_the_host and len(host.spec.imex_nodes) > 1)


def require_whole_domains(hosts: Sequence[HostTarget], request: Request, *, rollback: bool) -> None:
    """Raise UsageError if the run would change a part of a domain, or roll a part of it back."""
    names = {host.name for host in hosts}
    domains = {host.spec.imex_nodes: host.spec.imex_domain for host in hosts_in_domains(hosts, request)}
    found = [split_problem(domain, nodes, names) for nodes, domain in domains.items()]
    if problems := tuple(filter(None, (*found, _ROLLS_BACK if domains and rollback else None))):
        raise UsageError.several(problems)


def require_possible_domains(planned: Iterable[HostResult]) -> None:
    """Raise GpuprovError with each host of a domain whose plan is not possible: nothing has been changed yet."""
    problems = tuple(Problem(f"nothing is changed: {one.host} of an IMEX domain can't be", one.reason, _WITHOUT)
                     for one in planned if one.has_failed)  # fmt: skip
    if problems:
        raise GpuprovError.several(problems)


@dataclass(frozen=True)
class HostCommands:
    """What to run before a host is disturbed and after it is proved; empty means nothing."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    timeout: float = 1800.0


def parse_host_commands(before: str, after: str, timeout: float) -> HostCommands:
    """Return the commands from the command line. Raises GpuprovError (exit code 2) for an invalid one."""
    if after and not before:
        raise UsageError("--after-host needs --before-host", "", "add --before-host 'kubectl drain {host} …'")
    return HostCommands(_parsed("--before-host", before), _parsed("--after-host", after), timeout)


def _parsed(option: str, text: str) -> tuple[str, ...]:
    if not text:
        return ()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} can't be split into arguments", f"{text}: {error}", "close its quotes") from None
    if not words:
        raise UsageError(f"{option} names no command", repr(text), f"{option} 'kubectl cordon {{host}}'")
    if wrong := [name for word in words for name in _PLACE.findall(word) if name not in _PLACES]:
        raise UsageError(f"{option} has an unknown place {{{wrong[0]}}}", text, "write {host} or {address}")
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"{option}: there is no program {words[0]}", "it is looked for in PATH; no shell runs it",
            f"install it, or name its path; for shell syntax: {option} \"sh -c '… $1 …' sh {{host}}\"",
        )  # fmt: skip
    return words


def require_safe_hosts(commands: HostCommands, targets: Sequence[HostTarget]) -> None:
    """Raise GpuprovError (exit code 2) if a name can't be put into a command, or if the commands name no host."""
    for option, words in (("--before-host", commands.before), ("--after-host", commands.after)):
        named = {name for word in words for name in _PLACE.findall(word)}
        if words and not named and len(targets) > 1:
            step = "put {host} where the name of the host belongs"
            raise UsageError(f"{option} is the same for all {counted(len(targets), 'host')}", shlex.join(words), step)
        for target in targets:
            for name in sorted(named):
                value = _values(target)[name]
                if not _SAFE.match(value):
                    raise UsageError(
                        f"the {name} of {plain(target.name)} can't be an argument of {option}", repr(value),
                        "a name has letters, digits and ._:%- alone, and does not begin with -",
                    )  # fmt: skip


def for_host(words: Sequence[str], target: HostTarget) -> tuple[str, ...]:
    """Return the command for this host; each placeholder is filled within its argument."""
    values = _values(target)
    return tuple(_PLACE.sub(lambda found: values[found[1]], word) for word in words)


def _values(target: HostTarget) -> dict[str, str]:
    return {"host": target.name, "address": target.address or target.name}


def run_host_command(words: Sequence[str], timeout: float, stop: Callable[[], bool] = lambda: False) -> tuple[str, str]:
    """Run a command to its end, its timeout, or until `stop` is true; then kill its whole process group.

    Return why it failed, "" if it did not, and the last lines of its output. It has its own session, so Ctrl-C at the
    terminal does not reach it: the run decides what Ctrl-C ends.
    """
    # The user's own language: an empty LC_ALL is as good as none.
    own = {"LC_ALL": "", **os.environ}
    done = run_command(
        words, timeout=timeout, stdin=b"", env=own, on_line=None, stop=stop, folder=None, most=_MOST_OUTPUT
    )
    code, stderr = done.returncode, done.stderr
    # Shells and run_command report a signal as 128 and its number.
    trouble = "" if done.ok else f"killed by signal {code - 128}" if 128 < code < 193 else f"exit code {code}"
    if done.returncode == TIMED_OUT and (done.seconds >= timeout or stop()):
        trouble = f"it took longer than {timeout:g} s" if done.seconds >= timeout else "it was stopped with this run"
        stderr = stderr.rpartition("\n")[0]  # run_command's own line is the last one
    output = stderr if plain(stderr).strip() else done.stdout
    lines = [line[:_LONGEST_LINE] for line in output.split("\n") if line.strip()]
    return trouble, "\n".join(map(plain, lines[-_KEPT_LINES:]))


def verified(request: Request, sink: Sink, carry_out: CarryOut) -> Finished:
    """Verify the host that a request was for; that it can't be reached is a result, too."""
    wanted = replace(request, command="verify", steps=(), bundle="", bundle_digest="", require_drained=False)
    try:
        return carry_out(wanted, sink)
    except GpuprovError as error:
        return Finished(int(error.exit_code), problems=error.problems)


def install_or_roll_back(
    request: Request, sink: Sink, carry_out: CarryOut, drain: Callable[[], None] = lambda: None
) -> Finished:
    """Install and, if something changed, verify; if either fails, `drain`, roll the changes back and verify again.

    Raises GpuprovError if the host is lost before the verification.
    """
    # The host's last run may be another one: of a run whose only change failed nothing is left to undo.
    request, begun = replace(request, run_id=uuid.uuid4().hex), Kept(ChangeStarted, sink)
    finished = proof = carry_out(request, begun)
    if not (begun.events or finished.changed) or finished.exit_code not in (ExitCode.DONE, ExitCode.FAILED):
        return finished
    failed = "the changes failed"
    if finished.exit_code == ExitCode.DONE:
        sink(Note("verifying the changes"))
        proof, failed = verified(request, sink, carry_out), "verify failed after the changes"
    if proof.exit_code in (ExitCode.DONE, ExitCode.INTERRUPTED):
        return replace(_with_versions(finished, proof), exit_code=proof.exit_code, problems=proof.problems)
    sink(Note(f"{failed}: rolling this run back", "warning"))
    outcome, after = _roll_back(request, sink, carry_out, drain)
    seen = (proof.summary, *(f"{one}" for one in proof.problems), *(f"{one}" for one in after.problems))
    step = f"gpuprov doctor tells why{'; gpuprov rollback --check shows what is left to undo' * (outcome == 'failed')}"
    problem = Problem(f"{failed}; {_OUTCOMES[outcome]}", "\n".join(filter(None, seen)), step)
    finished = _with_versions(finished, after)
    return replace(finished, exit_code=int(ExitCode.FAILED), problems=(problem,), rolled_back=outcome)


def _roll_back(
    request: Request, sink: Sink, carry_out: CarryOut, drain: Callable[[], None]
) -> tuple[RolledBack, Finished]:
    """Undo what this run changed, and nothing else, and verify; return the outcome and the last event."""
    try:
        drain()
        wanted = replace(request, command="rollback", steps=(), bundle="", bundle_digest="", require_drained=False,
                         arguments={"this_run": True})  # fmt: skip
        undone = carry_out(wanted, sink)
    except GpuprovError as error:
        undone = Finished(int(error.exit_code), problems=error.problems)
    if undone.exit_code != ExitCode.DONE:
        return "failed", undone
    sink(Note("verifying the host as it was before"))
    proof = verified(request, sink, carry_out)
    return ("verified" if proof.exit_code == ExitCode.DONE else "not-verified"), proof


def _with_versions(finished: Finished, proof: Finished) -> Finished:
    """Return the result with the versions that a verification saw."""
    seen = {name: one for name, one in proof.versions.items() if one}
    return replace(finished, versions={**finished.versions, **seen})


@dataclass
class Rolling:
    """The drain of one host. `keep` is called with each new state; `stopped` returns why no further host may start.

    `interruptions` returns how often Ctrl-C came: the first one ends a drain, the second one every command.
    `rollback`: go back if the changes or verify fail. `left`: the state in which an earlier run left the host.
    `await_domain` returns once the host's IMEX domain can be whole.
    """

    target: HostTarget
    commands: HostCommands
    keep: Callable[[Drain], None]
    stopped: Callable[[], Problem | None]
    interruptions: Callable[[], int]
    rollback: bool = False
    left: Drain | None = None
    await_domain: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._drain_now: Drain | None = None
        self._begun = 0.0
        commands = (self.commands.before, self.commands.after)
        self._before, self._after = (shlex.join(for_host(words, self.target)) for words in commands)

    def run(self, request: Request, sink: Sink, carry_out: CarryOut) -> Finished:
        """Carry the request out, draining the host if its plan disturbs containers; return the last event.

        Raises GpuprovError if a command or the host fails.
        """
        if self.left is not None and not request.check:
            self._drain_now, self._begun = replace(self.left, after=self._after or self.left.after), time.monotonic()
            self.keep(self._drain_now)
            sink(Note(f"drained by an earlier run since {self.left.since}"))
        plans = Kept(Planned, sink) if request.check else Kept(Planned)
        looked = carry_out(replace(request, check=True, diff=request.diff and request.check), plans)
        disturbs = any(plan.disturbs or any(change.disturbs for change in plan.changes) for plan in plans.events)
        # The doctor's look ends with what it has found.
        if looked.exit_code != ExitCode.DONE and not (request.fix and plans.events):
            return looked
        if request.check:
            if disturbs:
                self._keep("foreseen")
                sink(Note(f"would run before the changes: {self._before}"))
                if self._after:
                    sink(Note(f"would run once verify is green: {self._after}"))
            return looked
        if stopped := self.stopped():
            raise GpuprovError.several((stopped,))
        if disturbs:
            self._drain(sink)
        else:
            request = replace(request, require_drained=True)
        try:
            finished, green = self._change(request, sink, carry_out)
            well = finished.exit_code in (ExitCode.DONE, ExitCode.DEGRADED) or finished.rolled_back == "verified"
            if self._drain_now is not None and self._after and well:
                finished = self._give_back(request, sink, carry_out, finished, green=green)
        finally:
            if self._drain_now is not None:
                self._drain_now = replace(self._drain_now, seconds=round(time.monotonic() - self._begun, 1))
                self.keep(self._drain_now)
        return finished

    def _change(self, request: Request, sink: Sink, carry_out: CarryOut) -> tuple[Finished, bool]:
        """Carry the request out; return the result, and whether verify has been green after it."""
        if not self.rollback or request.command != "install":
            return carry_out(request, sink), False
        # What an undo disturbs its installation may not have disturbed.
        drain = (lambda: None) if self._drain_now is not None else (lambda: self._drain(sink))
        finished = install_or_roll_back(request, sink, carry_out, drain)
        return finished, finished.rolled_back == "verified" or finished.changed > 0

    def _drain(self, sink: Sink) -> None:
        """Run the command before the change. Raises GpuprovError if it fails: the host is not changed then."""
        self._begun = time.monotonic()
        self._keep("failed")
        sink(Note(f"draining: {self._before}"))
        if trouble := self._run(self.commands.before, interruptions=1):
            raise GpuprovError(
                "the command before the change failed, so the host was not changed", trouble,
                f"the host may be drained in part{f': {self._after}' if self._after else ''}; fix what the command "
                "names, then run the same command again",
            )  # fmt: skip
        self._keep("drained")
        sink(Note(f"drained in {time.monotonic() - self._begun:.1f} s"))

    def _give_back(
        self, request: Request, sink: Sink, carry_out: CarryOut, finished: Finished, *, green: bool
    ) -> Finished:
        """Verify the host, unless it is `green`, and run the command after the change; return the overall result."""
        if not green:
            self.await_domain()
            sink(Note("verifying before the host gets work again"))
            proof = verified(request, sink, carry_out)
            finished = _with_versions(finished, proof)
            if proof.exit_code != ExitCode.DONE:
                next_step = f"gpuprov doctor tells why; once verify is green: {self._after}"
                problem = Problem("verify is not green, so the host stays drained", proof.summary, next_step)
                return replace(finished, exit_code=int(ExitCode.FAILED), problems=(*proof.problems, problem))
        if trouble := self._run(self.commands.after, interruptions=2):
            what = "the command after the change failed, so the host stays drained"
            problem = Problem(what, trouble, f"the host is ready: {self._after}")
            return replace(finished, exit_code=int(ExitCode.FAILED), problems=(*finished.problems, problem))
        self._keep("undrained")
        sink(Note(f"undrained after {time.monotonic() - self._begun:.1f} s: {self._after}"))
        return finished

    def _run(self, words: Sequence[str], *, interruptions: int) -> str:
        """Run a command until its end or that many Ctrl-C; return why it failed, with its output, or ""."""
        words = for_host(words, self.target)
        trouble, output = run_host_command(words, self.commands.timeout, lambda: self.interruptions() >= interruptions)
        return f"{shlex.join(words)}: {trouble}\n{output}".rstrip() if trouble else ""

    def _keep(self, state: DrainState) -> None:
        self._drain_now = Drain(state, self._before, self._after, moment(time.time()))
        self.keep(self._drain_now)
