"""What a first installation over SSH takes, beside a plain shell script that does the same by hand.

    python -m benchmarks.first_install [--rounds 5]

Both begin with the same bare lab host that has docker. The script puts gpuprov's files on it and runs the commands
that gpuprov runs, over one SSH connection, without any check. After it, `gpuprov install --check` must find nothing to
change. Downloads are local, and a stand-in for NVIDIA's installer installs the driver. Beside the wall time, which this
machine's other work makes longer, stands CPU time, which it does not: the controller's and the host's.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gpuprov
from benchmarks.no_change import Cost, cost, median
from tests.disk import MEMORY, Disk
from tests.lab import Host, HostRequest
from tests.lab.command_line import GPUPROV
from tests.lab.fixtures import Site, running

_HOST = "first"
_INSTALL, _SCRIPT = "gpuprov install", "plain script"
# What others do: the package manager, the server with the file, NVIDIA's installer.
_OTHERS = frozenset(("repositories", "packages", "download", "driver"))
# Seconds that NVIDIA's installer 550.163.01 took with DKMS on Debian 12 and two cores, recorded with the real file.
_NVIDIAS_INSTALLER = 115.0
_DISK_BYTES = 4 << 30
# The files that gpuprov puts on a host have its name in their paths, all but these two.
_OTHER_FILES = ("etc/docker/daemon.json", "usr/bin/nvidia-container-runtime-hook")
# Standard input is an archive of the files; $1 is the address of the driver's .run, $2 its SHA-256; packages follow.
_BY_HAND = """
set -eu
export DEBIAN_FRONTEND=noninteractive
run=$1 digest=$2; shift 2
done_with() { echo "gpuprov-step $(date +%s.%N) $1"; }
done_with begin
tar -x -C /
done_with toolkit
apt-get -q update
apt-get -q --yes --no-install-recommends install "$@"
done_with packages
/usr/lib/apt/apt-helper download-file "$run" /root/driver.run "SHA256:$digest"
sh /root/driver.run --silent --no-kernel-modules --install-libglvnd
rm /root/driver.run
done_with driver
systemctl daemon-reload
systemctl restart gpuprov-nodes.service gpuprov-refresh.service gpuprov-refresh.path
done_with boot
systemctl restart docker
done_with docker
"""


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    # As pip leaves it; the environment may keep a clone from writing it.
    compileall.compile_dir(Path(gpuprov.__file__).parent, quiet=1)
    requests = {_HOST: HostRequest(_HOST, archive=True)}
    with tempfile.TemporaryDirectory(prefix="gpuprov-bench-") as folder, running(requests, Path(folder)) as site:
        install = (str(GPUPROV), "install", "--hosts", str(site.inventory(_HOST)), "--json")
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        script = _script(site, Path(folder) / "files.tar")
        site.fresh(_HOST)
        subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
        _require_no_change(install)
        _measure({_SCRIPT: script, _INSTALL: install}, site, given.rounds)


def _script(site: Site, archive: Path) -> tuple[str, ...]:
    """Return the command that does by hand what gpuprov did on the host; `archive` gets the files from there."""
    host = site.hosts[_HOST]
    places = ("etc", "usr/bin", "usr/lib/gpuprov")
    found = [path for place in places for path in (host.root / place).rglob("*") if not path.is_dir()]
    names = (str(path.relative_to(host.root)) for path in found)
    wanted = sorted(name for name in names if "gpuprov" in name or name in _OTHER_FILES)
    subprocess.run(("tar", "-C", str(host.root), "-c", "-f", str(archive), *wanted), check=True)
    variables = site.variables
    words = (variables["gpuprov_driver_url"], variables["gpuprov_driver_sha256"], *variables["gpuprov_packages"])
    return ("sh", "-c", '"$@" < "$0"', str(archive), *host.ssh_argv(), f"sh -c '{_BY_HAND}' sh {' '.join(words)}")


def _require_no_change(install: Sequence[str]) -> None:
    done = subprocess.run((*install, "--check"), check=True, stdout=subprocess.PIPE, text=True)
    planned = [json.loads(line) for line in done.stdout.splitlines() if '"Planned"' in line]
    if any(event["changes"] for event in planned):
        raise SystemExit(f"the script does not do what gpuprov does: {planned}")


def _measure(commands: dict[str, tuple[str, ...]], site: Site, rounds: int) -> None:
    costs: dict[str, list[Cost]] = defaultdict(list)
    steps: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds):
        for name, command in commands.items():
            with _new_disk(site.hosts[_HOST]) as host:
                taken, by_step = _measured(command, host)
            costs[name].append(taken)
            steps[name].append({**by_step, "everything else": taken.wall - sum(by_step.values())})
    print(f"first run on one host, medians of {rounds} alternating rounds, s")
    print(f"{'':30}{'wall':>8}{'controller CPU':>16}{'CPU of the host':>17}")
    for name, found in costs.items():
        values = (median(found, lambda one: one.wall), median(found, lambda one: one.controller))
        print(f"{name:30}{values[0]:8.2f}{values[1]:16.2f}{median(found, lambda one: one.host):17.2f}")
    ratios = [ours.wall / theirs.wall for ours, theirs in zip(costs[_INSTALL], costs[_SCRIPT])]
    print(f"wall time of gpuprov over that of the script: {statistics.median(ratios):.2f} "
          f"({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip
    print(f"\n{'of the wall time':30}{_SCRIPT:>16}{_INSTALL:>17}")
    for step in steps[_INSTALL][0]:
        columns = (statistics.median(one.get(step, 0.0) for one in steps[name]) for name in (_SCRIPT, _INSTALL))
        print(f"{step:30}{next(columns):16.2f}{next(columns):17.2f}")
    rows = [
        {**one, "rest": sum(value for step, value in one.items() if step not in _OTHERS)} for one in steps[_INSTALL]
    ]
    own, installer = (statistics.median(one[name] for one in rows) for name in ("rest", "driver"))
    real = median(costs[_INSTALL], lambda one: one.wall) - installer + _NVIDIAS_INSTALLER
    print(f"gpuprov without {', '.join(sorted(_OTHERS))}: {own:.2f} s, {100 * own / real:.1f} % of a run in which the "
          f"installer takes {_NVIDIAS_INSTALLER:g} s")  # fmt: skip


@contextlib.contextmanager
def _new_disk(host: Host) -> Iterator[Host]:
    """Give the host as it has just booted from a new ext4.

    The lab's own removes its files before each boot, and ext4 then takes up to a millisecond to create a file: it gives
    no inode to another file within five minutes.
    """
    host.kill()
    with tempfile.TemporaryDirectory(prefix="gpuprov-bench-", dir=MEMORY) as folder:
        disk = Disk("ext4", Path(folder) / "disk")
        disk.make(_DISK_BYTES)
        with disk.mounted() as host.storage:
            try:
                host.reset()
                yield host
            finally:
                host.kill()
                host.storage = host.directory


def _measured(command: tuple[str, ...], host: Host) -> tuple[Cost, dict[str, float]]:
    """Run one of the two commands; return what it took, and the seconds of its steps."""
    with tempfile.TemporaryFile("w+") as output:
        taken = cost((command,), host, output)
        output.seek(0)
        lines = output.read().splitlines()
    marks = [line.split()[1:] for line in lines if line.startswith("gpuprov-step ")]
    if marks:
        pairs = zip(marks, marks[1:])
        return taken, {name: float(end) - float(begun) for (begun, _), (end, name) in pairs}
    return taken, _seconds_by_step([json.loads(line) for line in lines])


def _seconds_by_step(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return step → seconds of its changes in the events of a run."""
    steps: dict[str, str] = {}
    taken: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["event"] == "Planned":
            steps |= {change["key"]: change["step"] for change in event["changes"]}
        elif event["event"] == "ChangeDone":
            taken[steps[event["key"]]] += event["seconds"]
    return dict(taken)


if __name__ == "__main__":
    main()
