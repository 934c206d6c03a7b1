"""What gpuprov's units cost at each boot of a lab host: their time, and by how much docker starts later.

    python -m benchmarks.boot_cost [--gpus 8] [--rounds 7]

Boots alternate: with the units, and with units of the same names that do nothing. systemd gives the times, which
this machine's other work makes longer; beside them stands the units' CPU time, which it doesn't.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.lab import Host, HostRequest, cgroups
from tests.lab.fixtures import gpuprov, running

_NODES, _REFRESH, _DOCKER = "gpuprov-nodes.service", "gpuprov-refresh.service", "docker.service"
_OFF = "[Service]\nExecStart=\nExecStart=/bin/true\n"
_SECONDS = {"min": 60.0, "s": 1.0, "ms": 0.001, "us": 1e-6}


def main() -> None:
    """Measure and print the medians, in seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    requests = {"boot": HostRequest("boot", gpus=given.gpus)}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="gpuprov-bench-") as folder, running(requests, Path(folder)) as site:
        host = site.fresh("boot")
        done = gpuprov("install", "--hosts", site.inventory("boot"))
        if done.returncode:
            raise SystemExit(done.stdout)
        # The driver makes its nodes, and nobody else.
        attach = host.root / "usr/lib/simgpu/attach"
        attach.write_text("".join(line for line in attach.read_text().splitlines(True) if "mknod" not in line))
        for number in range(2 * given.rounds):
            mode = "without" if number % 2 else "with"
            for name, seconds in _boot(host, with_units=mode == "with").items():
                found[name, mode].append(seconds)
    for (name, mode), values in sorted(found.items()):
        print(f"{name:48}{mode:10}{statistics.median(values):8.2f} s  ({min(values):.2f} to {max(values):.2f})")


def _boot(host: Host, *, with_units: bool) -> Mapping[str, float]:
    """Boot, and return name → seconds."""
    for unit in (_NODES, _REFRESH):
        place = host.root / f"etc/systemd/system/{unit}.d/off.conf"
        place.parent.mkdir(exist_ok=True)
        place.write_text("" if with_units else _OFF)
    cgroups.end_processes(host.cgroup)
    host.switch_on()
    return dict(_times(host))


def _times(host: Host) -> Iterator[tuple[str, float]]:
    """Yield when docker starts, what systemd-analyze says of the units, and their CPU times."""
    # What critical-chain prints; but that leaves a unit's time out if it became active after the end of the boot.
    begun = host.ssh("systemctl show --property=UserspaceTimestampMonotonic --value").stdout
    docker = host.ssh(f"systemctl show {_DOCKER} --property=InactiveExitTimestampMonotonic --value").stdout
    yield "docker starts after", (int(docker) - int(begun)) / 1e6
    for line in host.ssh(("systemd-analyze", "blame")).stdout.splitlines():
        unit = line.split()[-1]
        if unit in (_NODES, _REFRESH, _DOCKER):
            yield f"{unit} (blame)", _seconds(line.rpartition(" ")[0])
    for unit in (_NODES, _REFRESH):
        used = host.ssh(("systemctl", "show", unit, "--property=CPUUsageNSec", "--value")).stdout
        yield f"{unit}, CPU", int(used) / 1e9


def _seconds(text: str) -> float:
    """Return the seconds in a span of time as systemd writes it: `1min 2.345s`, `231ms`."""
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"([\d.]+)(min|s|ms|us)\b", text))


if __name__ == "__main__":
    main()
