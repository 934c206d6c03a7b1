"""Results of hosts as metrics for node_exporter's textfile collector: drift, failures, known vulnerabilities. Pure.

The agent writes them too (gpuprov_watch), so the writer is this module: the format is four lines of grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Union

from gpuprov.agent.result import HostResult, hosts_by_vulnerability, machines
from gpuprov.protocol.advisories import Advisory
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.versions import count_in

_VERSIONS = ("os", "kernel", "driver", "toolkit", "docker")
MADE, PENDING = ("host_changes", "Changes made by the run"), ("host_changes_pending", "Changes foreseen by the run")
_Samples = Iterable[tuple[Mapping[str, str], Union[float, int, None]]]


def metrics_text(
    command: str,
    results: Sequence[HostResult],
    known: Sequence[Advisory],
    *,
    ended: float,
    seconds: float,
    changes: tuple[str, str] | None,
) -> str:
    """Return the metrics of a run in Prometheus's text format.

    `ended`: seconds since the epoch. `known`: the advisories that count. `changes`: MADE, PENDING or nothing.
    """
    return "".join(_gauges(command, results, known, ended, seconds, changes))


def _gauges(
    command: str,
    results: Sequence[HostResult],
    known: Sequence[Advisory],
    ended: float,
    seconds: float,
    changes: tuple[str, str] | None,
) -> Iterator[str]:
    run = {"command": command}
    yield _gauge("run_timestamp_seconds", "End of the run, seconds since the epoch", [(run, ended)])
    yield _gauge("run_duration_seconds", "Wall time of the run", [(run, seconds)])
    hosts = [({"host": one.host}, one) for one in results]
    yield _gauge(
        "host_success", "1 if the run went well on this host",
        ((host, one.exit_code == ExitCode.DONE) for host, one in hosts),
    )  # fmt: skip
    yield _gauge(
        "host_exit_code", "The exit code of gpuprov for this host", ((host, one.exit_code) for host, one in hosts)
    )
    if changes:
        yield _gauge(*changes, ((host, one.changed) for host, one in hosts))
    yield _gauge(
        "check_success", "1 if this check of verify went well; skipped ones are missing",
        (({**host, "check": check.name}, check.status == "ok")
         for host, one in hosts for check in one.checks if check.status != "skipped"),
    )  # fmt: skip
    once = [({"host": one.host}, one.versions) for one in machines(results)]
    yield _gauge(
        "version_info", "What the host runs",
        (({**host, **{name: str(found.get(name, "")) for name in _VERSIONS}}, 1) for host, found in once if found),
    )  # fmt: skip
    yield _gauge("gpus", "GPUs of the host", ((host, count_in(found.get("gpus", ""))) for host, found in once))
    yield _gauge(
        "known_hole_score", "Worst CVSS score of the known holes in what the host runs",
        (({"host": host, "product": one.product, "version": one.version, "fixed_in": one.fixed_in}, one.score)
         for one, names in hosts_by_vulnerability(results, known) for host in names),
    )  # fmt: skip


def _gauge(name: str, text: str, samples: _Samples) -> str:
    # A host may send a name twice: the last value counts, for two lines with the same labels make the file invalid.
    values = {
        ",".join(f'{label}="{_escaped(one)}"' for label, one in sorted(labels.items())): float(value)
        for labels, value in samples
        if value is not None
    }
    lines = (f"gpuprov_{name}{{{labels}}} {value!r}\n" for labels, value in values.items())
    return f"# HELP gpuprov_{name} {text}\n# TYPE gpuprov_{name} gauge\n{''.join(lines)}"


def _escaped(value: str) -> str:
    """Return an escaped label value; the format escapes only backslash, quote and newline."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
