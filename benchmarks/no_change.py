"""What a run that changes nothing costs, on the demo's hosts, beside one bare SSH command and Ansible's fact gathering.

    make demo && python -m benchmarks.no_change [--rounds 10]

Ansible's `setup` module is the least that any playbook does on each host, before its first task.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.demo import HOSTS
from tests.lab import Lab

_BIN = Path(sys.executable).parent
_INVENTORY = "inventories/lab"


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    hosts = Lab().up(HOSTS)
    # Whatever the demo left to do is done before, not measured.
    subprocess.run((_BIN / "gpuprov", "install", "--hosts", _INVENTORY), check=True, stdout=subprocess.DEVNULL)
    commands = {
        "ssh HOST true (one host)": (*hosts[0].ssh_argv(), "true"),
        "gpuprov install, 0 changes (two hosts)": (str(_BIN / "gpuprov"), "install", "--hosts", _INVENTORY),
        "ansible -m setup (two hosts)": (str(_BIN / "ansible"), "-i", _INVENTORY, "all", "-m", "setup"),
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            taken[name].append(_seconds(command))
    print(f"{'':42}{'median s':>10}   of {rounds} alternating rounds")
    for name, values in taken.items():
        print(f"{name:42}{statistics.median(values):10.2f}")


def _seconds(command: tuple[str, ...]) -> float:
    begun = time.perf_counter()
    environment = {**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}"}
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
