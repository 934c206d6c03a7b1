"""Fleets for pages: results of as many hosts as wanted, of every kind that a run may have; the same each time."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from gpuprov.agent.result import HostResult, MadeChange
from gpuprov.fleet.history import Run
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.run import Fleet
from gpuprov.protocol.errors import ExitCode, Problem
from gpuprov.protocol.events import CheckDone, Finished, PlannedChange, Sink
from gpuprov.protocol.request import Request

CHECKS = ("driver", "device nodes", "CDI specification", "next kernel", "docker", "runtime nvidia",
          "docker, all GPUs", "docker, one GPU", "docker, no GPU", "docker run --gpus")  # fmt: skip
STEPS = (("packages", "install docker.io, gcc, linux-headers-6.1.0-37-amd64"), ("driver", "install driver 550.163.01"),
         ("docker", "write /etc/docker/daemon.json and restart docker (no container is running)"),
         ("cdi", "write /etc/cdi/nvidia.json"))  # fmt: skip
NODES = Problem(
    "containers do not see the GPUs: /dev/nvidia0 is not in the container",
    "docker run --rm --gpus all: exit code 1\nFailed to initialize NVML: Unknown Error",
    "systemctl restart docker; gpuprov doctor --hosts inventory.ini says more",
)
FULL = Problem("the disk is full", "df -h /var: 100 %", "make room: df -h; then run the same command again")


def name_of(number: int) -> str:
    return f"r{number // 40 + 1:02}-gpu{number % 40 + 1:02}"


def verified(hosts: int) -> Run:
    """A verification: rack 7 has lost its network, every 37th host fails a check, every 53rd runs an older driver."""
    return run_of("verify", [_verified(number) for number in range(hosts)], "inventories/lab")


def _verified(number: int) -> HostResult:
    host, versions = name_of(number), _versions(number)
    seconds = round(14 + (number * 7919 % 97) / 9 + (number % 41 == 0) * 9, 1)
    if host.startswith("r07") and number % 40 < 30:
        problem = Problem(f"{host} port 22 does not answer", "no answer within 10 s", f"try: ssh -v root@{host}")
        return HostResult(host, ExitCode.UNREACHABLE, 0, 10.0, (problem,))
    ill = number % 37 == 1
    checks = [CheckDone(name, "ok", "550.163.01, 8 GPUs", "8 GPUs, every field the same") for name in CHECKS]
    if ill:
        checks[6] = CheckDone(CHECKS[6], "failed", "8 GPUs", "0 GPUs", "no device nodes in the container")
        checks[7:] = [CheckDone(name, "skipped", reason="requires the check of all GPUs") for name in CHECKS[7:]]
    problems = (NODES,) if ill else ()
    code = ExitCode.FAILED if ill else ExitCode.REBOOT_NEEDED if number % 61 == 5 else ExitCode.DONE
    return HostResult(host, code, 0, seconds, problems, "containers see this host's GPUs", versions, tuple(checks))


def _versions(number: int) -> dict[str, str]:
    mig = "0: 1g.10gb, 1g.10gb, 2g.20gb, 3g.40gb; 1: 3g.40gb, 3g.40gb" if number % 25 == 3 else ""
    return {
        "os": "Debian GNU/Linux 12 (bookworm)" if number % 11 else "Rocky Linux 9.5 (Blue Onyx)",
        "kernel": "6.1.0-37-amd64" if number % 11 else "5.14.0-503.el9.x86_64",
        "driver": "535.247.01" if number % 53 == 7 else "550.163.01",
        "docker": ("26.1.5", "27.5.1", "20.10.24")[0 if number % 5 else 1 if number % 3 else 2],
        "gpus": "4" if number % 25 == 3 else "8",
        **({"mig": mig} if mig else {}),
    }


def planned(hosts: int) -> Run:
    """An installation with --check: most hosts lack all, every fourth but docker's file, every tenth nothing."""
    results = [
        HostResult(
            name_of(number), ExitCode.DONE, len(plan), 3.0 + number % 7 / 5, versions=_versions(number), plan=plan
        )
        for number, plan in ((number, _plan(number)) for number in range(hosts))
    ]
    return replace(run_of("install", results, "inventories/lab"), check=True)


def _plan(number: int) -> tuple[PlannedChange, ...]:
    all_of_it = tuple(PlannedChange(summary, step, summary) for step, summary in STEPS)
    return () if number % 10 == 9 else all_of_it[2:3] if number % 4 == 3 else all_of_it


def installed(hosts: int) -> Run:
    """An installation: every 23rd host runs out of room in the middle of it."""
    return run_of("install", [_installed(number) for number in range(hosts)], "inventories/lab")


def _installed(number: int) -> HostResult:
    plan = tuple(PlannedChange(summary, step, summary) for step, summary in STEPS)
    made = tuple(MadeChange(summary, step, summary, 2.0 + 31 * (step == "driver")) for step, summary in STEPS)
    seconds = round(61 + (number * 7919 % 97) / 3, 1)
    if number % 23 == 1:
        made = (made[0], replace(made[1], seconds=None))
        return HostResult(name_of(number), ExitCode.FAILED, 1, seconds, (FULL,), "", _versions(number), (), plan, made)
    return HostResult(
        name_of(number), ExitCode.DONE, 4, seconds, (), "4 changes made", _versions(number), (), plan, made
    )


def played(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, Request, Sink], Finished]) -> threading.local:
    """Let a function answer for the local hosts of runs, by their names; each is another machine.

    Return what has the `name` of the host that a thread serves.
    """
    here, run_host = threading.local(), Fleet.run_host

    def named(fleet: Fleet, request: Request, target: HostTarget, sink: Sink) -> None:
        here.name = target.name
        run_host(fleet, request, target, sink)

    monkeypatch.setattr(Fleet, "run_host", named)
    monkeypatch.setattr("gpuprov.fleet.run.local_machine", lambda system: "")
    monkeypatch.setattr("gpuprov.fleet.run.run_here", lambda request, sink, stop: answer(here.name, request, sink))
    return here


def run_of(command: str, results: Sequence[HostResult], *inventory: str) -> Run:
    return Run("20261121T081500-7", command, "2026-11-21T08:15:00+0000", 200.0, tuple(results), inventory=inventory)


def the_day_before(run: Run) -> Run:
    """The same hosts a day earlier: all well but the third, and on the older driver."""
    results = tuple(
        replace(result, exit_code=ExitCode.FAILED if number == 2 else ExitCode.DONE, problems=(),
                versions={**result.versions, "driver": "535.247.01"} if result.versions else {},
                checks=tuple(CheckDone(name, "ok") for name in CHECKS) if result.checks else ())
        for number, result in enumerate(run.results[:-1])
    )  # fmt: skip
    return replace(run, identifier="20261120T081500-7", began="2026-11-20T08:15:00+0000", results=results)
