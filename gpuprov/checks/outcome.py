"""The end of a check: two words to show, or a failure with its reason; independent of what is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Callable

from gpuprov.core.commands import Completed
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import CheckDone, Kept, Sink

_LONGEST_LINE = 400
# The values that a successful check shows: for the host, for the container.
Values = tuple[str, str]


class Failed(Exception):  # noqa: N818 (carries a check's outcome)
    """Ends a check: the reason, and what host and container showed."""

    def __init__(self, reason: str, host: str = "", container: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.host = host
        self.container = container


class Skipped(Exception):  # noqa: N818 (carries a check's outcome)
    """Ends a check that is not possible here, with the reason; this is not a failure."""


@dataclass(frozen=True)
class Verdict:
    """How a verification ended: `good` if no check failed, those of the host included.

    `proved`: engines whose containers have the GPUs; `configured`: those of which only the configuration was checked.
    `unknown`: what to say instead, if there is no GPU.
    """

    good: bool
    proved: tuple[str, ...] = ()
    configured: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    unknown: str = ""

    def summary(self) -> str:
        """Return the verdict as a sentence that names the engines."""
        if not self.good:
            return "containers do not see what the host has" + (f": {', '.join(self.failed)}" if self.failed else "")
        if self.unknown:
            return self.unknown
        if self.proved:
            rest = f"; configuration only: {', '.join(self.configured)}" if self.configured else ""
            return f"containers see this host's GPUs: {', '.join(self.proved)}{rest}"
        if self.configured:
            return f"the driver works, and the configuration is right: {', '.join(self.configured)}; no container ran"
        return "the driver works; no container engine is configured, so no container ran"


class Checks:
    """One verification: emits a CheckDone for each check, and knows whether all went well."""

    def __init__(self, sink: Sink) -> None:
        self._emit = Kept(CheckDone, sink)
        self._engine = ""

    @contextlib.contextmanager
    def about(self, engine: str) -> Iterator[None]:
        """Assign the checks inside to this engine."""
        self._engine = engine
        try:
            yield
        finally:
            self._engine = ""

    def check(self, name: str, do: Callable[[], Values]) -> Values | None:
        """Run a check; return what it shows for host and container, None if it raises: it failed or was skipped."""
        try:
            host, container = do()
        except Skipped as skipped:
            self.skip((name,), str(skipped))
            return None
        except (Failed, GpuprovError) as error:
            if isinstance(error, GpuprovError):
                texts = [f"{one.what}: {one.evidence}; {one.next_step}" for one in error.problems]
                error = Failed(" ".join("; ".join(texts).split()))
            self._emit(CheckDone(name, "failed", error.host, error.container, error.reason, self._engine))
            return None
        self._emit(CheckDone(name, "ok", host, container, engine=self._engine))
        return host, container

    def skip(self, names: tuple[str, ...], reason: str) -> None:
        """Report each of these checks as skipped, and why."""
        for name in names:
            self._emit(CheckDone(name, "skipped", reason=reason, engine=self._engine))

    @property
    def good(self) -> bool:
        """Whether no check has failed so far."""
        return all(one.status != "failed" for one in self._emit.events)

    @property
    def engine_versions(self) -> dict[str, str]:
        """The versions of the engines that passed the check of their own name."""
        return {one.engine: one.on_host for one in self._emit.events if one.status == "ok" and one.engine == one.name}

    def verdict(self) -> Verdict:
        """Return the verdict so far."""
        failed = _engines(one for one in self._emit.events if one.status == "failed")
        passed = [one for one in self._emit.events if one.status == "ok" and one.engine not in failed]
        good, proved = _engines(passed), _engines(one for one in passed if one.name == all_gpus_check(one.engine))
        configured = tuple(name for name in good if name not in proved)
        return Verdict(self.good, tuple(name for name in good if name in proved), configured, failed)


def all_gpus_check(engine: str) -> str:
    """Return the name of the check that an engine's container has all GPUs."""
    return f"{engine}, all GPUs"


def _engines(checks: Iterable[CheckDone]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.engine for one in checks if one.engine))


def telling_line(done: Completed) -> str:
    """Return what a command's end is due to: our own runtime's word, else the first error, else the first line."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    # docker's client says this too, at times before the reason, of a container that ends at once.
    said = [line for line in lines if "error waiting for container" not in line] or lines or ["(silent)"]
    found = (line for mark in ("gpuprov:", "rror", "") for line in said if mark in line)
    return next(found).strip()[:_LONGEST_LINE]
