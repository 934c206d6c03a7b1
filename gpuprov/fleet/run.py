"""Run one request on many hosts, batch by batch and in parallel; a failure on one never ends another."""

from __future__ import annotations

import contextlib
import functools
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprov.agent import probe
from gpuprov.agent.probe import local_host_keys, local_machine
from gpuprov.agent.result import Drain, HostResult, HostSink, Recorder
from gpuprov.agent.site_tables import for_request
from gpuprov.agent.window import Window
from gpuprov.core.system import System
from gpuprov.fleet.agent_file import Agent, stored_agent
from gpuprov.fleet.agent_run import run_agent
from gpuprov.fleet.chroot import run_in_root
from gpuprov.fleet.grouping import listed
from gpuprov.fleet.history import DrainKeeper, DrainRecord, left_records, new_identifier
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import Options
from gpuprov.fleet.rolling import Batch, HostCommands, Rolling, Rollout, install_or_roll_back, make_batches
from gpuprov.fleet.ssh import close, connected, wait_for_boot
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, UsageError
from gpuprov.protocol.events import ChangeStarted, Finished, Kept, Note, Sink
from gpuprov.protocol.request import CHANGING, Request
from gpuprov.protocol.secrets import secret_free
from gpuprov.protocol.spec import spec_to_json
from gpuprov.protocol.words import counted

if TYPE_CHECKING:
    from fabric import Connection

# Of a host: its connection, the agent's, those through which it is reached, and the pipes of `ssh -G`.
_FILES, _FILES_OF_A_HOST = 50, 10
_LOOK_SECONDS = 0.2
_ONCE = "no further host begins, and a drain ends; hosts whose changes have begun finish (Ctrl-C again leaves them)"
_HERE_ONCE = "stopping: a change that has begun is finished, no further one begins"
_NOT_BEGUN = Problem("not run: this run was stopped before", "", "run the same command again")


@dataclass(eq=False)
class Fleet:
    """A run over hosts. `interrupt` lets changing hosts finish and starts no more; called twice, it cuts connections.

    A host that is still looked at stops before its first change. This machine alone, and a root file system, stop after
    the current change. `build` returns the agent; it is called once, and only if a host is reached by SSH. `output`
    prints a sentence. `again` is the command of this run, `clock` returns seconds since the epoch.
    """

    build: Callable[[], Agent]
    options: Options
    output: Callable[[str], None] = lambda _: None
    rollout: Rollout = field(default_factory=Rollout)
    commands: HostCommands = field(default_factory=HostCommands)
    again: str = "run the same command again"
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.interruptions = 0
        # The code of a run that a signal ended.
        self.ended_by: ExitCode | None = None
        # Why no further host starts; None while hosts may start.
        self.stopped: Problem | None = None
        # Set by `run` if a host's agent does not run in this process.
        self._agent: Agent
        self._connections: set[Any] = set()
        # Each asks the agent of one host to stop unless a change has begun.
        self._looking: set[Callable[[], None]] = set()
        self._lock = threading.Lock()
        self._alone = True
        self._here = False
        # Machine → the name under which it was met first, and its SSH host keys; name → the other name of its machine.
        self._machines: dict[str, tuple[str, frozenset[str]]] = {}
        self._same_as: dict[str, str] = {}
        self._drains: dict[str, Drain] = {}
        self._rebooted: set[str] = set()
        # When hosts may begin; None: at any time.
        self._window: Window | None = None
        self._closed: Problem | None = None
        # Hosts that an earlier run left drained: their turn has begun.
        self._left: dict[str, Drain] = {}
        self._keep_drain: Callable[[str, Drain], None] = lambda host, drain: None
        # IMEX domains of which a host has begun; host → domain of those that are to be changed.
        self._begun: set[tuple[str, ...]] = set()
        # IMEX domain → why its hosts no longer begin: one of them has failed.
        self._failed_domains: dict[tuple[str, ...], Problem] = {}
        self._to_change: dict[str, tuple[str, ...]] = {}

    def interrupt(self, code: ExitCode = ExitCode.INTERRUPTED) -> None:
        """Start no further host; at the second call, close the connections of running ones."""
        self.interruptions += 1
        self.ended_by = self.ended_by or code
        self.stopped = self.stopped or _NOT_BEGUN
        if drained := [name for name, drain in list(self._drains.items()) if drain.lasts]:
            self.output(f"drained now: {listed(drained)}; the report says who still is in the end")
        if self.interruptions == 1:
            self.output(_HERE_ONCE if self._here else _ONCE)
        # A handler interrupts the thread that may hold the lock.
        threading.Thread(target=self._reach, daemon=True).start()

    def _reach(self) -> None:
        """Ask hosts that are looked at to stop; after the second interruption, close all connections."""
        with self._lock:
            calls = list(self._looking)
            if self.interruptions > 1:
                calls = [functools.partial(close, connection) for connection in self._connections]
        for call in calls:  # each in a thread: closing waits for the connection's own
            threading.Thread(target=call, daemon=True).start()

    def run_host(self, request: Request, target: HostTarget, sink: Sink) -> None:
        """Run the request on one host. Raises GpuprovError."""
        wanted = request_for(target, request, alone=self._alone)
        if target.connection == "local":
            self._claim(target.name, local_machine(System()), local_host_keys(System()) | {"local"}, wanted, sink)
        if target.connection == "chroot":
            run_in_root(target.address, wanted, self._agent, sink, self._is_cut)
            return

        def carry_out(one: Request, events: Sink) -> Finished:
            try:
                if target.connection == "local":
                    return self._run_here(target, one, events)
                return self._through_reboots(target, one, wanted, events)
            except GpuprovError:
                # Not a verification that failed, after which a host would go back.
                if one.command != wanted.command and self._is_cut():
                    return Finished(int(ExitCode.INTERRUPTED), problems=_left().problems)
                raise

        rollback = self.rollout.rollback and wanted.command == "install" and not wanted.check
        if not self.commands.before:
            sink(install_or_roll_back(wanted, sink, carry_out) if rollback else carry_out(wanted, sink))
            return

        def keep(drain: Drain) -> None:
            self._drains[target.name] = drain
            self._keep_drain(target.name, drain)

        rolling = Rolling(
            target, self.commands, keep, lambda: self._refusal(target), lambda: self.interruptions, rollback,
            self._left.get(target.name), lambda: self._await_domain(target),
        )  # fmt: skip
        sink(rolling.run(wanted, sink, carry_out))

    def _await_domain(self, target: HostTarget) -> None:
        """Wait until the other hosts of this one's IMEX domain are changed, or have failed: verify asks them all."""
        self._to_change.pop(target.name, None)
        while target.spec.imex_nodes and target.spec.imex_nodes in list(self._to_change.values()):
            time.sleep(_LOOK_SECONDS)

    def _is_cut(self) -> bool:
        """Say whether Ctrl-C ends what runs: the second one, and of this machine alone the first."""
        return self.interruptions > (0 if self._here else 1)

    def _run_here(self, target: HostTarget, request: Request, sink: Sink) -> Finished:
        """Run the request in this process; alone, it stops after the current change, else as a host over SSH."""
        begun = Kept(ChangeStarted, sink)

        def stop() -> bool:
            looks = self._stops_before_its_first_change(target, request) and not begun.events
            return self._is_cut() or (looks and self.interruptions > 0)

        return run_here(request, begun, stop)

    def _stops_before_its_first_change(self, target: HostTarget, request: Request) -> bool:
        """Say whether a first Ctrl-C ends the look at this host: a drained host is changed, verified and undrained."""
        drain = self._drains.get(target.name)
        begun = target.name in self._rebooted or (drain is not None and drain.lasts)
        return request.changes_the_host and not begun

    def _through_reboots(self, target: HostTarget, request: Request, claims: Request, sink: Sink) -> Finished:
        """Run the request, again after each reboot that it needs; return the last event, with all changes.

        After the last reboot allowed the host is told to reboot no more: it ends with exit code 3 and says why.
        """
        made = 0
        for one in request.runs():
            finished = self._run_agent(target, one, claims, sink)
            finished = replace(finished, changed=finished.changed + made)
            if not finished.left_boot:
                break
            made = finished.changed
            self._rebooted.add(target.name)
            sink(Note(f"{finished.summary}; waiting for the host"))
            wait_for_boot(target, self.options, finished.left_boot, self._is_cut)
        return finished

    def _run_agent(self, target: HostTarget, request: Request, claims: Request, sink: Sink) -> Finished:
        """Run the request over one connection; return its last event, all others go to the sink.

        `claims` is the whole run's request: examining its plan must also find a machine with two names.
        """

        def stoppable(ask: Callable[[], None]) -> None:
            if self._stops_before_its_first_change(target, request):
                hold_ask(ask)
                if self.interruptions:  # Ctrl-C came before
                    ask()

        with (
            self._held(self._connections) as hold, connected(target, self.options, hold) as connection,
            self._held(self._looking) as hold_ask,
        ):  # fmt: skip
            if self.interruptions > 1:
                raise _left()
            return run_agent(
                connection, target, request, self._agent, sink, stoppable=stoppable,
                bootstrap_python=self.options.bootstrap_python,
                host_timeout=self.options.host_timeout,
                claim=lambda machine: self._claim(target.name, machine, _host_keys(connection), claims, sink),
            )  # fmt: skip

    def _claim(self, name: str, machine: str, keys: frozenset[str], request: Request, sink: Sink) -> None:
        """Record that this host is this machine. Raises GpuprovError if another host is too and it would be changed.

        Any host can send the identity of another one, but only the machine itself proves one of its host keys.
        """
        with self._lock:
            other, known = self._machines.setdefault(machine, (name, keys)) if machine else (name, keys)
        if other == name:
            return
        if not keys & known:
            sink(Note(probe.unproven_note(name, other), "warning"))
            return
        self._same_as[name] = other
        if request.changes_the_host:
            raise UsageError.several((probe.same_machine_problem(name, other, machine),))
        sink(Note(f"{name} is the same machine as {other}: it is counted once", "warning"))

    @contextlib.contextmanager
    def _held(self, where: set[Any]) -> Iterator[Callable[[Any], None]]:
        """Yield a function that puts what it gets into a set, which `interrupt` reads, for as long as it is in use."""
        held: list[Any] = []

        def hold(one: Any) -> None:
            with self._lock:
                held.append(one)
                where.add(one)

        try:
            yield hold
        finally:
            with self._lock:
                where.difference_update(held)

    def run(self, targets: Sequence[HostTarget], request: Request, sink: HostSink) -> tuple[HostResult, ...]:
        """Run the request on all hosts and return one result for each, in the hosts' order."""
        batches = make_batches(targets, self.rollout)
        if any(target.connection != "local" for target in targets):
            self._agent = self.build()
        results: dict[str, HostResult] = {}
        self._window = self.rollout.window if request.changes_the_host else None
        self._alone = len(targets) == 1
        self._here = self._alone and targets[0].connection != "ssh" and not self.commands.before
        # All hosts of an IMEX domain run at once, and one domain after the other.
        places = max(self.options.forks, *(len(target.spec.imex_nodes) for target in targets), 1)
        _lift_open_files(min(places, len(targets)))
        # A closed terminal or a job that is cancelled must not end the run without a word on what is done.
        handlers: dict[int, Callable[[int], None]] = {
            signal.SIGINT: lambda _: self.interrupt(),
            signal.SIGTERM: lambda _: self._cut_off(ExitCode.TERMINATED),
            signal.SIGHUP: lambda _: self._cut_off(ExitCode.HUNG_UP),
        }
        with (
            self._recorded(batches, request), signals_handled(handlers), ThreadPoolExecutor(max_workers=places) as pool,
        ):  # fmt: skip
            for batch in batches:
                if batch.name and self.stopped is None:
                    self.output(f"{batch.name}: {counted(len(batch.targets), 'host')}")
                failed: list[str] = []
                self._to_change = {target.name: target.spec.imex_nodes for target in batch.targets}
                in_order = sorted(batch.targets, key=lambda target: target.spec.imex_nodes)
                running = [pool.submit(self._run_in_batch, batch, failed, target, request, sink) for target in in_order]
                # The kernel may give a signal to a thread of the pool; its handler runs in this one, once it runs.
                while wait(running, timeout=_LOOK_SECONDS).not_done:
                    pass
                results |= {one.result().host: one.result() for one in running}
        return tuple(results[target.name] for target in targets)

    def _run_in_batch(
        self, batch: Batch, failed: list[str], target: HostTarget, request: Request, sink: HostSink
    ) -> HostResult:
        """Run one host of a batch, of which others `failed`; after too many failures no further host starts."""
        result = self._run_one(target, functools.partial(self.run_host, request), sink)
        self._to_change.pop(target.name, None)
        if result.begun and result.has_failed and len(target.spec.imex_nodes) > 1 and request.changes_the_host:
            result = self._fail_domain(target, result)
        # A host that waits for a reboot by hand has not failed; but drained for it, it does no work.
        drained = result.drain is not None and result.drain.lasts and bool(self.commands.after)
        if result.begun and (result.has_failed or drained):
            with self._lock:
                failed.append(target.name)
                if batch.most_failed is not None and len(failed) > batch.most_failed:
                    hosts = counted(len(batch.targets), "host")
                    self.stopped = self.stopped or Problem(
                        f"not run: too many hosts failed before it ({batch.name or 'the run'})",
                        f"{len(failed)} of {hosts} failed, at most {batch.most_failed} may",
                        "fix what failed, then run the same command again: hosts that are done change nothing",
                    )
        return result

    def _fail_domain(self, target: HostTarget, result: HostResult) -> HostResult:
        """Start no further host of this one's IMEX domain; return the result with what its failure means to it."""
        if self._failed_domains.get(target.spec.imex_nodes) in result.problems:
            return result
        domain = f"the IMEX domain {target.spec.imex_domain}".rstrip()
        step = f"correct what {target.name} names, then: {self.again}"
        stop = Problem(f"not run: {target.name} of {domain} failed", result.reason, step)
        self._failed_domains.setdefault(target.spec.imex_nodes, stop)
        divided = Problem(f"{domain} may have different drivers or lists now", f"{target.name} failed", step)
        return replace(result, problems=(*result.problems, divided))

    def _refusal(self, target: HostTarget) -> Problem | None:
        """Return why this host may not begin. Its IMEX domain, once begun, is changed as a whole unless Ctrl-C came."""
        domain = target.spec.imex_nodes
        if failed := self._failed_domains.get(domain):
            return failed
        return None if domain in self._begun and not self.interruptions else self.stopped

    @contextlib.contextmanager
    def _recorded(self, batches: Sequence[Batch], request: Request) -> Iterator[None]:
        """Record who is drained, and take over what earlier runs over the same inventory left drained."""
        if request.command not in CHANGING and not request.fix:
            yield
            return
        inventory = tuple(one if "," in one else str(Path(one).resolve()) for one in self.options.hosts)
        order = {batch.name: tuple(target.name for target in batch.targets) for batch in batches}
        hosts = {name for names in order.values() for name in names}
        left = left_records(inventory)
        undrained = hosts if self.commands.after and not request.check else ()
        for sentence in (line for record in left for line in record.sentences(undrained)):
            self.output(sentence)
        if not self.commands.before or request.check:
            yield
            return
        self._left = {name: drain for record in left for name, drain in record.drains.items()}
        window = self.rollout.window.text if self.rollout.window else ""
        run = new_identifier(self.clock())
        keeper = DrainKeeper(DrainRecord(run, self.again, inventory, order, window), left, self.output)
        self._keep_drain = keeper.keep
        yield
        keeper.end()

    def _run_one(self, target: HostTarget, run_host: Callable[[HostTarget, Sink], None], sink: HostSink) -> HostResult:
        domain, left = target.spec.imex_nodes, target.name in self._left
        problem = self._refusal(target)
        if problem is None and self._window is not None and not left and domain not in self._begun:
            problem = self._closed = self._closed or self._window.closed(self.clock(), self.again)
        if problem is not None:
            return HostResult(target.name, ExitCode.FAILED, problems=(problem,), begun=False)
        if domain and not left:
            self._begun.add(domain)
        recorder = Recorder(target.name, sink)
        # A host has been told these; it may print them.
        events = secret_free(recorder, spec_to_json(target.spec), (target.password, target.become_password))
        begun = time.monotonic()
        events(Note("connecting" if target.connection == "ssh" else "starting", "debug"))
        try:
            run_host(target, events)
        except GpuprovError as error:
            # What breaks after the second Ctrl-C breaks because of it; a drain that was cut says so itself.
            drain = self._drains.get(target.name)
            cut_drain = drain is not None and drain.state == "failed"
            error = _left() if self.interruptions > 1 and not cut_drain else error
            events(Finished(int(error.exit_code), problems=error.problems))
        except Exception as error:  # an internal error on one host must not end the others; the log has the traceback
            from gpuprov.fleet.history import write_log

            events(Finished(int(ExitCode.FAILED), problems=(write_log(error),)))
        return replace(
            recorder.result(time.monotonic() - begun),
            same_as=self._same_as.get(target.name, ""),
            drain=self._drains.get(target.name),
        )

    def _cut_off(self, code: ExitCode) -> None:
        """Interrupt as Ctrl-C does the second time."""
        while self.interruptions < 2:
            self.interrupt(code)


@contextlib.contextmanager
def signals_handled(handlers: Mapping[int, Callable[[int], None]]) -> Iterator[None]:
    """Call these functions for signals during the block, with the signal's number; in the main thread only.

    Without them a signal raises an exception anywhere in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda number, _: handlers[number](number))
        for number in handlers
        # nohup(1) and a service's manager ignore what is not for this process.
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _lift_open_files(hosts: int) -> None:
    """Let this process have so many hosts' files open at once. Raises GpuprovError (exit code 2) if it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + hosts * _FILES_OF_A_HOST
    if hard != resource.RLIM_INFINITY and hard < needed:
        what = f"this login may not open the files of {counted(hosts, 'host')} at once"
        fewer = f"--forks {max(1, (hard - _FILES) // _FILES_OF_A_HOST)}"
        step = f"{fewer}; or raise nofile in /etc/security/limits.conf, and log in again"
        raise UsageError(what, f"ulimit -Hn: {hard}; needed: {needed}", step)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def request_for(target: HostTarget, request: Request, *, alone: bool) -> Request:
    """Return the request with this host's own spec; `alone`: it is the only host of the run."""
    own = replace(request, spec=spec_to_json(target.spec), tables=for_request(target.spec))
    return own.sent(here=target.connection == "local", alone=alone)


def _host_keys(connection: Connection) -> frozenset[str]:
    """Return the key that the server has proved to have, in base64; none once the connection is lost."""
    from paramiko import SSHException

    try:
        return frozenset((connection.transport.get_remote_server_key().get_base64(),))
    except SSHException:
        return frozenset()


def run_here(request: Request, sink: Sink, stop_requested: Callable[[], bool]) -> Finished:
    """Run the request on this machine, in this process; return its last event, all others go to the sink."""
    from gpuprov.agent.run import run_request

    if request.command == "install" and request.spec.get("watch", "off") != "off":
        # The host keeps the agent. The one-file program has no sources to build it from: the plan says what is missing.
        with contextlib.suppress(GpuprovError):
            request = replace(request, agent=str(stored_agent()))
    last: list[Finished] = []
    run_request(
        request, lambda event: last.append(event) if isinstance(event, Finished) else sink(event),
        stop_requested=stop_requested,
    )  # fmt: skip
    return last[-1]


def _left() -> GpuprovError:
    next_step = "the agent on the host continues; run the same command again to get its result"
    return GpuprovError("left while it ran, as this run was stopped", "", next_step)
