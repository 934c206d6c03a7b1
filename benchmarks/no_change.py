"""What a run that changes nothing costs, on the demo's hosts, by both ways, beside one bare SSH command.

    make demo && python -m benchmarks.no_change [--rounds 10]

Ansible's `setup` module is the least that most playbooks do on each host, before their first task; site.yml does
without. Its verification is left out here, as `gpuprov install` does not verify either.
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
_SITE = ("playbooks/site.yml", "--skip-tags", "verify")
_INSTALL = "gpuprov install, 0 changes (two hosts)"


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
        _INSTALL: (str(_BIN / "gpuprov"), "install", "--hosts", _INVENTORY),
        "playbooks/site.yml, 0 changes (two hosts)": (str(_BIN / "ansible-playbook"), "-i", _INVENTORY, *_SITE),
        "ansible -m setup (two hosts)": (str(_BIN / "ansible"), "-i", _INVENTORY, "all", "-m", "setup"),
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            taken[name].append(_seconds(command))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    print(f"{'':42}{'median s':>10}{'ratio':>8}   of {rounds} alternating rounds; ratio to gpuprov install")
    for name, median in medians.items():
        print(f"{name:42}{median:10.2f}{median / medians[_INSTALL]:8.2f}")


def _seconds(command: tuple[str, ...]) -> float:
    begun = time.perf_counter()
    environment = {**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}"}
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
