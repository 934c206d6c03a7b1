"""Carries a request out on a simulated host, as the agent does."""

from collections.abc import Callable, Sequence

from gpuprov.agent.run import run_request
from gpuprov.core.system import System
from gpuprov.protocol.events import CheckDone, Event, Finished
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec
from gpuprov.verify import verify


def ask(
    host: System | None, request: Request, stop_requested: Callable[[], bool] = lambda: False
) -> tuple[Finished, list[Event]]:
    """Return the last event, whose exit code is the run's, and all events."""
    events: list[Event] = []
    code = run_request(request, events.append, host, stop_requested)
    assert finished(events).exit_code == code
    return finished(events), events


def finished(events: Sequence[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def check_of(name: str, host: System, spec: HostSpec) -> CheckDone:
    """Return a check of `gpuprov verify` by its name."""
    events: list[Event] = []
    verify(host, spec, events.append)
    (found,) = (event for event in events if isinstance(event, CheckDone) and event.name == name)
    return found
