"""What a run that changes nothing costs on lab hosts by both ways, beside one bare SSH command.

    python -m benchmarks.no_change [--hosts 8] [--rounds 3]

Boots hosts of its own and installs them first. Beside the wall time, which this machine's other work makes longer,
stands CPU time, which it doesn't: the controller's (its children included) and one host's (its control group's), idle
time taken off.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.lab import Host, HostRequest
from tests.lab.cgroups import cpu_seconds
from tests.lab.fixtures import Site, running

_BIN = Path(sys.executable).parent
_INSTALL = "gpuprov install"
_SITE = "site.yml without verify"


@dataclass(frozen=True)
class Cost:
    """What a command took, in seconds: by the clock, and of CPU time here and on one host."""

    wall: float
    controller: float
    host: float


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    names = [f"host{number}" for number in range(given.hosts)]
    requests = {name: HostRequest(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="gpuprov-bench-") as folder, running(requests, Path(folder)) as site:
        for name in names:
            site.fresh(name)
        subprocess.run((_BIN / "gpuprov", "install", "--hosts", site.inventory(*names)), check=True)
        _no_change(site, names[:1], given.rounds, verify=False)
        _no_change(site, names, given.rounds, verify=True)


def _no_change(site: Site, names: list[str], rounds: int, *, verify: bool) -> None:
    inventory = str(site.inventory(*names))
    playbook = (str(_BIN / "ansible-playbook"), "-i", inventory, "playbooks/site.yml")
    install, verification = ((str(_BIN / "gpuprov"), word, "--hosts", inventory) for word in ("install", "verify"))
    host = site.hosts[names[0]]
    commands: dict[str, tuple[tuple[str, ...], ...]] = {
        "ssh HOST true (one host)": ((*host.ssh_argv(), "true"),),
        _INSTALL: (install,),
        _SITE: ((*playbook, "--skip-tags", "verify"),),
        "ansible -m setup": ((str(_BIN / "ansible"), "-i", inventory, "all", "-m", "setup"),),
    }
    if verify:
        commands |= {"gpuprov install, then verify": (install, verification), "site.yml": (playbook,)}
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, parts in commands.items():
            costs[name].append(cost(parts, host))
    print(f"\n0 changes, {len(names)} host{'s' * (len(names) > 1)}, medians of {rounds} alternating rounds, s")
    print(f"{'':30}{'wall':>8}{'controller CPU':>16}{'CPU of a host':>15}{'ratio to install':>18}")
    base = median(costs[_INSTALL], lambda cost: cost.wall)
    for name, found in costs.items():
        wall = median(found, lambda cost: cost.wall)
        controller, on_host = (median(found, lambda cost: cost.controller), median(found, lambda cost: cost.host))
        print(f"{name:30}{wall:8.2f}{controller:16.2f}{on_host:15.2f}{wall / base:18.2f}")


def median(costs: list[Cost], value: Callable[[Cost], float]) -> float:
    """Return the median of one value of several costs."""
    return statistics.median(map(value, costs))


def cost(commands: tuple[tuple[str, ...], ...], host: Host, output: int | IO[str] = subprocess.DEVNULL) -> Cost:
    """Run commands, which write to `output`, and return what they took."""
    # ssh_args: no connection is left open by the run before, as by itself Ansible would for a minute.
    environment = {
        **os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}", "ANSIBLE_SSH_ARGS": "-C -o ControlMaster=auto -o "
        "ControlPersist=1s", "ANSIBLE_PYTHON_INTERPRETER": "auto_silent",
    }  # fmt: skip
    on_host, here, begun = cpu_seconds(host.cgroup), _children_seconds(), time.perf_counter()
    for command in commands:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=output, env=environment)
    wall, controller = time.perf_counter() - begun, _children_seconds() - here
    time.sleep(2)  # what the run leaves behind on the host, the end of its login among it, and Ansible's connections
    return Cost(wall, controller, cpu_seconds(host.cgroup) - on_host)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
