"""One host's metrics for node_exporter's textfile collector, under the names that `gpuprov --metrics` uses; pure.

prometheus_client writes the controller's metrics; the agent does not carry that library. A test compares both outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import CheckDone
from gpuprov.protocol.versions import count_in
from gpuprov.verify import known_holes

COMMAND = "watch"
_VERSIONS = ("os", "kernel", "driver", "toolkit", "docker")


@dataclass(frozen=True)
class Measured:
    """Results of one watch. `pending` is None if the check made no plan."""

    host: str
    exit_code: int
    pending: int | None
    checks: tuple[CheckDone, ...]
    versions: Mapping[str, str]
    ended: float
    seconds: float


def metrics_text(found: Measured) -> str:
    """Return the metrics in Prometheus's text format."""
    return "".join(_lines(found))


def _lines(found: Measured) -> Iterator[str]:
    host = {"host": found.host}
    command = {"command": COMMAND}
    good = found.exit_code == ExitCode.DONE
    yield from _gauge("run_timestamp_seconds", "End of the run, seconds since the epoch", [(command, found.ended)])
    yield from _gauge("run_duration_seconds", "Wall time of the run", [(command, found.seconds)])
    yield from _gauge("host_success", "1 if the run went well on this host", [(host, good)])
    yield from _gauge("host_exit_code", "The exit code of gpuprov for this host", [(host, found.exit_code)])
    if found.pending is not None:
        yield from _gauge("host_changes_pending", "Changes foreseen by the run", [(host, found.pending)])
    checks = [
        ({**host, "check": check.name}, check.status == "ok")
        for check in found.checks
        if check.status in ("ok", "failed")
    ]
    yield from _gauge("check_success", "1 if this check of verify went well; skipped ones are missing", checks)
    versions = {name: str(found.versions.get(name, "")) for name in _VERSIONS}
    yield from _gauge("version_info", "What the host runs", [({**host, **versions}, 1)])
    gpus = count_in(found.versions.get("gpus", ""))
    yield from _gauge("gpus", "GPUs of the host", [] if gpus is None else [(host, gpus)])
    vulnerabilities = known_holes({name: versions[name] for name in ("driver", "toolkit")})
    worst = [
        ({**host, "product": one.product, "version": one.version, "fixed_in": one.fixed_in}, one.score)
        for one in vulnerabilities
    ]  # fmt: skip
    yield from _gauge("known_hole_score", "Worst CVSS score of the known holes in what the host runs", worst)


def _gauge(name: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    yield f"# HELP gpuprov_{name} {text}\n# TYPE gpuprov_{name} gauge\n"
    for labels, value in samples:
        told = ",".join(f'{label}="{_escaped(one)}"' for label, one in labels.items())
        yield f"gpuprov_{name}{{{told}}} {float(value)!r}\n"


def _escaped(value: str) -> str:
    """Return an escaped label value; the format escapes only backslash, quote and newline."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
