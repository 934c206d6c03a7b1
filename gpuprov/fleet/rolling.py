"""Drain, change, verify and restore one host: examine its plan first, and do not drain it if nothing is disturbed."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpuprov.agent.result import Drain, DrainState
from gpuprov.fleet.history import moment
from gpuprov.fleet.host_command import HostCommands, for_host, run_host_command
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import Event, Finished, Note, Planned, Sink
from gpuprov.protocol.request import Request

# Carries a request out on the host; relays every event but the last one, which it returns.
CarryOut = Callable[[Request, Sink], Finished]


@dataclass
class Rolling:
    """The drain of one host. `keep` is called with each new state; `stopped` returns why no further host may start.

    `interruptions` returns how often Ctrl-C came: the first one ends a drain, the second one every command.
    """

    target: HostTarget
    commands: HostCommands
    keep: Callable[[Drain], None]
    stopped: Callable[[], Problem | None]
    interruptions: Callable[[], int]

    def run(self, request: Request, sink: Sink, carry_out: CarryOut) -> Finished:
        """Carry the request out, draining the host if its plan disturbs containers; return the last event.

        Raises GpuprovError if a command or the host fails.
        """
        look = _Look(sink if request.check else None)
        looked = carry_out(replace(request, check=True, diff=request.diff and request.check), look)
        if looked.exit_code != ExitCode.DONE:
            return looked
        if request.check:
            return self._foreseen(looked, sink) if look.disturbs else looked
        stopped = self.stopped()
        if stopped is not None:
            raise GpuprovError.several((stopped,))
        if not look.disturbs:
            return carry_out(replace(request, require_drained=True), sink)
        begun = time.monotonic()
        self._drain(sink)
        try:
            finished = carry_out(request, sink)
            if finished.exit_code == ExitCode.DONE and self.commands.after:
                finished = self._give_back(request, sink, carry_out, finished, begun)
        finally:
            self._keep_length(begun)
        return finished

    def _foreseen(self, looked: Finished, sink: Sink) -> Finished:
        self._keep("foreseen")
        sink(Note(f"would run before the changes: {self._words(self.commands.before)}"))
        if self.commands.after:
            sink(Note(f"would run once verify is green: {self._words(self.commands.after)}"))
        return looked

    def _drain(self, sink: Sink) -> None:
        """Run the command before the change. Raises GpuprovError if it fails: the host is not changed then."""
        self._keep("failed")
        sink(Note(f"draining: {self._words(self.commands.before)}"))
        begun = time.monotonic()
        ended = run_host_command(
            for_host(self.commands.before, self.target), self.commands.timeout, lambda: self.interruptions() > 0
        )
        if ended.trouble:
            raise GpuprovError(
                "the command before the change failed, so the host was not changed",
                f"{self._words(self.commands.before)}: {ended.trouble}\n{ended.output}".rstrip(),
                f"the host may be drained in part{self._to_type()}; fix what the command names, then run the same "
                "command again",
            )
        self._keep("drained")
        sink(Note(f"drained in {time.monotonic() - begun:.1f} s"))

    def _give_back(
        self, request: Request, sink: Sink, carry_out: CarryOut, finished: Finished, begun: float
    ) -> Finished:
        """Verify the host and run the command after the change; return the overall result."""
        sink(Note("verifying before the host gets work again"))
        try:
            verified = carry_out(replace(request, command="verify", steps=(), bundle="", bundle_digest=""), sink)
        except GpuprovError as error:
            verified = Finished(int(error.exit_code), problems=error.problems)
        versions = {**finished.versions, **{name: one for name, one in verified.versions.items() if one}}
        finished = replace(finished, versions=versions)
        if verified.exit_code != ExitCode.DONE:
            problem = Problem("verify is not green, so the host stays drained", verified.summary, self._once_right())
            return replace(finished, exit_code=int(ExitCode.FAILED), problems=(*verified.problems, problem))
        ended = run_host_command(
            for_host(self.commands.after, self.target), self.commands.timeout, lambda: self.interruptions() > 1
        )
        if ended.trouble:
            problem = Problem(
                "the command after the change failed, so the host stays drained",
                f"{self._words(self.commands.after)}: {ended.trouble}\n{ended.output}".rstrip(),
                f"the host is ready: {self._words(self.commands.after)}",
            )
            return replace(finished, exit_code=int(ExitCode.FAILED), problems=(problem,))
        self._keep("undrained")
        sink(Note(f"undrained after {time.monotonic() - begun:.1f} s: {self._words(self.commands.after)}"))
        return finished

    def _once_right(self) -> str:
        return f"gpuprov doctor tells why; once verify is green: {self._words(self.commands.after)}"

    def _to_type(self) -> str:
        return f": {self._words(self.commands.after)}" if self.commands.after else ""

    def _words(self, words: Sequence[str]) -> str:
        return shlex.join(for_host(words, self.target))

    def _keep(self, state: DrainState) -> None:
        self._drain_now = Drain(
            state, self._words(self.commands.before), self._words(self.commands.after), moment(time.time())
        )
        self.keep(self._drain_now)

    def _keep_length(self, begun: float) -> None:
        self._drain_now = replace(self._drain_now, seconds=round(time.monotonic() - begun, 1))
        self.keep(self._drain_now)


class _Look:
    """Takes the events of a look at the plan, and passes them on to `sink` if there is one."""

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self.disturbs = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self.disturbs = event.disturbs or any(change.disturbs for change in event.changes)
        if self._sink is not None:
            self._sink(event)
