"""`gpuprov hook explain CONTAINER` on a host: the recorded decision, and which libcuda the container loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuprov.checks.cuda.survey import Survey, from_json
from gpuprov.engines.containers import decision_of
from gpuprov.fleet.agent_run import Agent, run_agent
from gpuprov.fleet.options import Options
from gpuprov.fleet.remote_system import RemoteSystem
from gpuprov.fleet.ssh import connected
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import CudaSurveyed, Event
from gpuprov.protocol.request import Request

if TYPE_CHECKING:
    from fabric import Connection


def explain_on(
    target: HostTarget, options: Options, container: str, agent: Callable[[], Agent]
) -> tuple[dict[str, Any], Survey | str]:
    """Return the decision, and which libraries win or why that is unknown.

    Raises GpuprovError if the host can't be reached, or if it has no such container with GPUs.
    """
    with connected(target, options) as connection:
        decided = decision_of(RemoteSystem(connection, target), container)
        try:
            return decided, _libraries(connection, target, container, agent())
        except GpuprovError as error:
            return decided, error.problems[0].what


def _libraries(connection: Connection, target: HostTarget, container: str, agent: Agent) -> Survey | str:
    """Return the agent's findings in the container's files: there are too many to read over SSH."""
    found: list[Survey] = []

    def take(event: Event) -> None:
        if isinstance(event, CudaSurveyed):
            found.append(from_json(event.survey))

    finished = run_agent(connection, target, Request("cuda", arguments={"subject": container}), agent, take)
    if found:
        return found[0]
    return finished.problems[0].what if finished.problems else "the host gave no answer"
