"""What a run that changes nothing takes by both ways where hosts have processors of their own, as fleets do.

    python -m benchmarks.fleet_no_change [--hosts 8 100] [--rounds 3] [--seconds 0.4] [--latency 0.05]

Lab hosts share this machine's processors with the controller. Here the hosts are played by an SSH server
(tests/integration/fake_hosts.py) that answers every packet 50 ms late; the agent there takes `--seconds`, as measured
on a lab host, and finds nothing to do. gpuprov and site.yml send it the same commands. The server's own processor
time is in the wall time of both, and in neither's CPU time.
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
from collections.abc import Sequence
from pathlib import Path

from tests.integration.fake_hosts import playing

_BIN = Path(sys.executable).parent
_FORKS = "20"


def main() -> None:
    """Measure and print a table for each number of hosts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--latency", type=float, default=0.05)
    given = parser.parse_args()
    for number in given.hosts:
        with tempfile.TemporaryDirectory(prefix="gpuprov-bench-") as name:
            folder = Path(name)
            kinds = ",".join(["settled"] * number)
            with playing(folder, "--kinds", kinds, "--seconds", str(given.seconds), "--latency", str(given.latency)):
                _measure(folder, number, given.rounds)


def _measure(folder: Path, number: int, rounds: int) -> None:
    inventory = str(folder / "inventory.ini")
    playbook = (str(_BIN / "ansible-playbook"), "-i", inventory, "-f", _FORKS, "playbooks/site.yml")
    commands = {
        "gpuprov install": (str(_BIN / "gpuprov"), "install", "--hosts", inventory, "--forks", _FORKS),
        "site.yml without verify": (*playbook, "--skip-tags", "verify"),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    _run(commands["gpuprov install"], folder)  # the agent is on the hosts from here on
    for _ in range(rounds):
        for name, command in commands.items():
            taken[name].append(_run(command, folder))
    print(f"\n0 changes, {number} hosts, {_FORKS} forks, medians of {rounds} alternating rounds, s")
    print(f"{'':30}{'wall':>8}{'controller CPU':>16}{'ratio of wall':>15}{'ratio of CPU':>14}")
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in taken.items()}
    base_wall, base_cpu = medians["gpuprov install"]
    for name, (wall, cpu) in medians.items():
        print(f"{name:30}{wall:8.2f}{cpu:16.2f}{wall / base_wall:15.2f}{cpu / base_cpu:14.2f}")


def _run(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Return the seconds by the clock and of this machine's processors that a command took."""
    # ssh_args: no connection is left open by the run before, as by itself Ansible would for a minute.
    environment = {
        **os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}", "XDG_STATE_HOME": str(folder / "state"),
        "ANSIBLE_SSH_ARGS": "-C -o ControlMaster=auto -o ControlPersist=1s",
    }  # fmt: skip
    used, begun = _children_seconds(), time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
    cost = (time.perf_counter() - begun, _children_seconds() - used)
    time.sleep(2)  # Ansible's connections come to their end
    return cost


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
