"""How many faults that mutmut puts into a module its own unit tests find: a sample of each module, always the same one.

What is mutated, and which tests are run, stands in pyproject.toml, [tool.mutmut]. By hand: `make mutation`.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import tomllib

_MUTMUT = str(Path(sys.executable).with_name("mutmut"))
# A mutant that makes a loop endless is found, too: its tests would never end.
_FOUND = ("killed", "timeout")


def modules() -> list[str]:
    """Return the modules that are mutated, by their dotted names."""
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    return [path.removesuffix(".py").replace("/", ".") for path in settings["only_mutate"]]


def run(names: Sequence[str]) -> None:
    """Make all mutants that are not there yet, and test those of these names."""
    subprocess.run((_MUTMUT, "run", "--max-children", "1", *names), check=True)


def states() -> dict[str, str]:
    """Return what became of each mutant, by its name: `MODULE.FUNCTION__mutmut_NUMBER`."""
    shown = subprocess.run((_MUTMUT, "results", "--all", "true"), capture_output=True, text=True, check=True).stdout
    return dict(line.strip().rsplit(": ", 1) for line in shown.splitlines() if ": " in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "modules", nargs="*", default=modules(), help="dotted names; all of pyproject.toml's by default"
    )
    parser.add_argument("--sample", type=int, default=110, help="mutants of each module (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the random choice (default: %(default)s)")
    wanted = parser.parse_args()
    run([f"{wanted.modules[0]}.*__mutmut_1"])
    every = {name: [one for one in states() if one.startswith(f"{name}.")] for name in wanted.modules}
    chosen = {
        name: random.Random(wanted.seed).sample(found, min(wanted.sample, len(found))) for name, found in every.items()
    }
    run([one for names in chosen.values() for one in names])
    became = states()
    print("\n| module | mutants | tested | killed | survived |\n|---|---|---|---|---|")
    for name, names in chosen.items():
        counted = Counter(became[one] in _FOUND for one in names)
        print(f"| {name} | {len(every[name])} | {len(names)} | {counted[True]} | {counted[False]} |")
    for one in (one for names in chosen.values() for one in names if became[one] not in _FOUND):
        print(f"{became[one]}: mutmut show {one}")


if __name__ == "__main__":
    main()
