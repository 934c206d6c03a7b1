"""Export a run as metrics for node_exporter's textfile collector, to alert on drift, failures and known holes."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from gpuprov.core.site_tables import advisories_table
from gpuprov.fleet.history import Run
from gpuprov.fleet.result import HostResult, machines
from gpuprov.fleet.versions import hosts_by_hole
from gpuprov.protocol.advisories import rows_of
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.versions import count_in

_VERSIONS = ("os", "kernel", "driver", "toolkit", "docker")


def write_metrics(run: Run, path: str, ended: float) -> None:
    """Write the run's metrics atomically; `ended` is its end in seconds since the epoch.

    Raises OSError.
    """
    registry = CollectorRegistry()
    names = ["command"]
    _gauge(registry, "run_timestamp_seconds", "End of the run, seconds since the epoch", names).labels(run.command).set(
        ended
    )
    _gauge(registry, "run_duration_seconds", "Wall time of the run", names).labels(run.command).set(run.seconds)
    _hosts(registry, run)
    _checks(registry, run.results)
    _versions(registry, machines(run.results))
    _holes(registry, run.results)
    write_to_textfile(str(Path(path).expanduser()), registry)


def _gauge(registry: CollectorRegistry, name: str, text: str, labels: list[str]) -> Gauge:
    return Gauge(f"gpuprov_{name}", text, labels, registry=registry)


def _hosts(registry: CollectorRegistry, run: Run) -> None:
    ok = _gauge(registry, "host_success", "1 if the run went well on this host", ["host"])
    code = _gauge(registry, "host_exit_code", "The exit code of gpuprov for this host", ["host"])
    name, text = ("changes_pending", "foreseen") if run.check else ("changes", "made")
    changes = _gauge(registry, f"host_{name}", f"Changes {text} by the run", ["host"])
    for result in run.results:
        ok.labels(result.host).set(result.exit_code == ExitCode.DONE)
        code.labels(result.host).set(int(result.exit_code))
        changes.labels(result.host).set(result.changed)


def _checks(registry: CollectorRegistry, results: tuple[HostResult, ...]) -> None:
    checks = _gauge(registry, "check_success", "1 if this check of verify went well; skipped ones are missing",
                    ["host", "check"])  # fmt: skip
    for result in results:
        for check in result.checks:
            if check.status in ("ok", "failed"):
                checks.labels(result.host, check.name).set(check.status == "ok")


def _versions(registry: CollectorRegistry, results: tuple[HostResult, ...]) -> None:
    info = _gauge(registry, "version_info", "What the host runs", ["host", *_VERSIONS])
    gpus = _gauge(registry, "gpus", "GPUs of the host", ["host"])
    for result in results:
        if result.versions:
            info.labels(result.host, *(str(result.versions.get(name, "")) for name in _VERSIONS)).set(1)
        count = count_in(result.versions.get("gpus", ""))
        if count is not None:
            gpus.labels(result.host).set(count)


def _holes(registry: CollectorRegistry, results: tuple[HostResult, ...]) -> None:
    worst = _gauge(registry, "known_hole_score", "Worst CVSS score of the known holes in what the host runs",
                   ["host", "product", "version", "fixed_in"])  # fmt: skip
    for hole, hosts in hosts_by_hole(results, rows_of(advisories_table())):
        for host in hosts:
            worst.labels(host, hole.product, hole.version, hole.fixed_in).set(hole.score)
