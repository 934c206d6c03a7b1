"""Look at a host over SSH, as root: its files and its commands. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.fleet.agent_run import as_root, probe_host
from gpuprov.fleet.target import HostTarget

if TYPE_CHECKING:
    from fabric import Connection


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
