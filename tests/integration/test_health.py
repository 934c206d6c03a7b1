"""`gpuprov health` with the genuine nvidia-smi on simulated GPUs of which a test says how they are.

This machine in a mount namespace of its own is the host: nothing is left behind. The last tests are on lab hosts.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import simgpu
from tests.integration.test_simgpu import on_host
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds
from tests.unit.health_cases import CASES, WELL, Case

pytestmark = [pytest.mark.root, pytest.mark.needs("gcc")]
_CLONE = Path(__file__).parents[2]
# The driver's files, what the kernel shows, and programs of the machine, as a host with GPUs has them.
_HOST = """
mount -t tmpfs none /run; mount -t tmpfs none /usr/local/sbin; mount -t tmpfs none /var/lib; mount -t tmpfs none /root
mkdir -p /run/simgpu; cp "$SMI" /usr/local/sbin/nvidia-smi
printf '#!/bin/sh\ncat /run/kernel.log\n' > /usr/local/sbin/dmesg
printf '#!/bin/sh\nexit 4\n' > /usr/local/sbin/systemctl
chmod 755 /usr/local/sbin/*
echo "$LD_LIBRARY_PATH" > /run/ld.conf
ldconfig -C /run/ld.cache -f /run/ld.conf && mount --bind /run/ld.cache /etc/ld.so.cache
unset LD_LIBRARY_PATH
mount --bind "$TREE/sys/bus/pci/devices" /sys/bus/pci/devices
cd "$CLONE"
"""
_JUDGE = """
import json, sys
from pathlib import Path
from gpuprov.checks.health import examine
from gpuprov.core.system import System
from gpuprov.protocol.events import HealthFound

class Machine(System):
    def exists(self, path):  # the machine of the tests may be a container
        return path != "/.dockerenv" and super().exists(path)

for name, states, log in json.load(sys.stdin):
    for minor, state in enumerate(states):
        for path in Path("/run/simgpu").glob(f"*-{minor}"):
            path.unlink()
        for what, number in state.items():
            Path(f"/run/simgpu/{what}-{minor}").write_text(f"{number}\\n")
    Path("/run/kernel.log").write_text("\\n".join(("[    0.000000] Linux version 6.1", *log, "")))
    found = []
    finished = examine(Machine(), lambda event: found.append(event) if isinstance(event, HealthFound) else None)
    print(json.dumps([name, finished.exit_code, [[one.rule, one.verdict, one.gpu, one.what] for one in found]]))
"""


def _on_health_host(
    tree: Path, gpus: int, command: str, *, home: str = "/root", judge: str = ""
) -> subprocess.CompletedProcess[str]:
    simgpu.write_kernel_tree(tree, gpus)
    words = {"TREE": str(tree), "CLONE": str(_CLONE), "PYTHON": sys.executable, "HOME": home, "JUDGE": judge}
    return on_host(gpus, _HOST + command, divided=(), **words)


def _states(number: int = 8, **first: int) -> str:
    """Return the commands after which all GPUs are well, and GPU 0 is also as `first` says."""
    rows = [(minor, name, value) for minor in range(number) for name, value in WELL.items()]
    rows += [(0, name.replace("_", "-"), value) for name, value in first.items()]
    lines = [f"echo {value} > /run/simgpu/{name}-{minor}" for minor, name, value in rows]
    return "\n".join((*lines, 'echo "[    0.000000] Linux version 6.1" > /run/kernel.log', ""))


_KNOWN = [case for case in CASES if case.state]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[list[str]]]]:
    """Return case → exit code and findings; the first case is a healthy host."""
    rows = [("well", [WELL, WELL], ()), *((one.name, [{**WELL, **one.state}, WELL], one.log) for one in _KNOWN)]
    tree = tmp_path_factory.mktemp("tree")
    (tree / "cases.json").write_text(json.dumps(rows))
    # The first GPU, and the slot that it is in, can do 16 lanes.
    devices = tree / "sys/bus/pci/devices"
    for place in (devices / "0000:1b:00.0", devices):
        place.mkdir(parents=True, exist_ok=True)
        (place / "max_link_width").write_text("16\n")
    done = _on_health_host(tree, 2, '"$PYTHON" -c "$JUDGE" < "$TREE/cases.json"', judge=_JUDGE)
    assert done.returncode == 0, done.stderr
    return {name: (code, found) for name, code, found in map(json.loads, done.stdout.splitlines())}


def test_a_healthy_host_has_no_finding(judged: dict[str, tuple[int, list[list[str]]]]) -> None:
    assert judged["well"] == (0, [])


@pytest.mark.parametrize("case", _KNOWN, ids=str)
def test_the_genuine_nvidia_smi_shows_the_trouble(case: Case, judged: dict[str, tuple[int, list[list[str]]]]) -> None:
    code, found = judged[case.name]
    assert [row[:3] for row in found] == [[case.rule, case.verdict, "" if case.host else "0"]]
    assert case.what in found[0][3]
    assert code == {"degraded": 6, "unfit": 7}[case.verdict]


def test_at_least_forty_troubles_come_from_the_genuine_nvidia_smi() -> None:
    assert len(_KNOWN) >= 40


def test_the_command_is_silent_and_changes_nothing_on_a_healthy_host(tmp_path: Path) -> None:
    command = _states() + 'find /run /var/lib > /run/b; "$PYTHON" -m gpuprov health; echo "exit $?"'
    done = _on_health_host(tmp_path, 8, command + "; find /run /var/lib | diff /run/b - | grep -v run/b")
    assert done.stdout.endswith("1 host healthy: 8 GPUs\nexit 0\n"), done.stdout + done.stderr
    assert not re.search(r"degraded|unfit|next:|warning", done.stdout)


def test_the_command_names_the_gpu_the_evidence_and_the_next_step(tmp_path: Path) -> None:
    command = _states(2, recovery_action=1, persistence=0) + '"$PYTHON" -m gpuprov health; echo "exit $?"'
    done = _on_health_host(tmp_path, 2, command)
    assert "localhost: unfit: GPU 0: the driver asks for a reset of this GPU\n" in done.stdout, done.stderr
    assert re.search(
        r"  seen: GPU-\S+ at 0000:1b:00: gpu_recovery_action: Reset\n  next: systemctl reboot", done.stdout
    )
    assert done.stdout.endswith("0 of 1 host healthy; unfit: localhost\nexit 7\n")


def test_a_user_without_root_may_ask(tmp_path: Path) -> None:
    command = (
        _states(2)
        + 'chmod 755 "$TREE"; setpriv --reuid=65534 --clear-groups "$PYTHON" -m gpuprov health; echo "exit $?"'
    )
    done = _on_health_host(tmp_path, 2, command, home="/tmp")
    assert "exit 0" in done.stdout, done.stdout + done.stderr


@pytest.mark.lab
@pytest.mark.slow
def test_a_fleet_says_which_host_is_unfit(site: Site) -> None:
    host = site.installed("main")
    inventory = site.inventory("main")
    host.ssh("mkdir -p /run/simgpu; for n in 0 1; do echo 1 > /run/simgpu/persistence-$n; done")
    try:
        gpuprov_succeeds("health", "--hosts", inventory)
        host.ssh("echo 1 > /run/simgpu/remap-failed-1")
        ill = gpuprov("health", "--hosts", inventory, "--json")
        assert ill.returncode == 7
        events = [json.loads(line) for line in ill.stdout.splitlines()]
        (found,) = [one for one in events if one["event"] == "HealthFound"]
        assert (found["rule"], found["gpu"], found["host"]) == ("row-remap-failed", "1", "main")
    finally:
        host.ssh("rm -rf /run/simgpu")
