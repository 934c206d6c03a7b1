"""Look at a host over SSH, as root: its files, its commands, and how a container got its GPUs. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuprov.checks.cuda.survey import Survey, from_json
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.engines.containers import decision_of
from gpuprov.fleet.agent_run import as_root, probe_host, run_agent
from gpuprov.fleet.options import Options
from gpuprov.fleet.ssh import connected
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import CudaSurveyed, Event
from gpuprov.protocol.request import Request

if TYPE_CHECKING:
    from fabric import Connection

    from gpuprov.fleet.agent_build import Agent

_SECONDS = 30


class RemoteSystem(System):
    """The machine behind a connection. Raises GpuprovError if its account or its sudo refuses."""

    def __init__(self, connection: Connection, target: HostTarget) -> None:
        super().__init__("/")
        self._connection = connection
        self._target = target
        self._probe = probe_host(connection, target)

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:
        """Run a command as root on the host."""
        lines: list[str] = []
        done = as_root(
            self._connection, self._target, self._probe, tuple(argv), (stdin,), on_line or lines.append, timeout=timeout
        )
        return Completed(tuple(argv), done.returncode, "".join(f"{line}\n" for line in lines), done.stderr)

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
