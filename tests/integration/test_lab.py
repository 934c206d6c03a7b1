"""The lab itself: boots, resets, reboots, survives a kill in the middle, and leaves no trace."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import HostRequest, Lab, cgroups
from tests.lab.lab import REPOSITORY, free_lab
from tests.lab.shell import run, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.root]
_UP = "from tests.lab import HostRequest, Lab; Lab({}).up([HostRequest('one'), HostRequest('two')])"


def traces(lab: Lab) -> list[str]:
    """Return what a lab leaves on the machine while it is up."""
    name = f"gpuprov-lab{lab.number}"
    found = [line for line in Path("/proc/mounts").read_text().splitlines() if f"{lab.directory}/" in line]
    found += [line for line in run(("iptables-save",)).splitlines() if f"{name} " in line or f'{name}"' in line]
    found += [str(path) for path in Path("/sys/class/net").glob(f"{name}*")]
    found += cgroups.hosts_of(name)
    found += run(("pgrep", "-af", f"{lab.directory}/"), check=False).splitlines()
    return [*found, *(str(path) for path in lab.directory.glob("*"))]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with free_lab() as made:
        yield made


# How far it has come when it is killed.
MOMENTS: dict[str, Callable[[Lab], bool]] = {
    "network": lambda lab: lab.network.is_up(),
    "first host's files": lambda lab: (lab.directory / "hosts/one/root").is_mount(),
    "first host's boot": lambda lab: "one: running" in lab.status(),
}


def test_what_a_killed_run_of_another_clone_left_is_removed(lab: Lab) -> None:
    for path in cgroups.cgroup_directories(f"{lab.network.bridge}-gone"):
        (path / "payload").mkdir(parents=True)
    lab.network.up()
    assert traces(lab)
    lab.clear()
    assert traces(lab) == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_it_comes_up_the_next_up_works_and_down_leaves_no_trace(lab: Lab, moment: str) -> None:
    with subprocess.Popen((sys.executable, "-c", _UP.format(lab.number)), cwd=REPOSITORY) as process:
        wait_for(f"the lab's {moment}", lambda: MOMENTS[moment](lab) or process.poll() is not None)
        assert process.poll() is None, "it was up before it could be killed"
        process.send_signal(signal.SIGKILL)
    hosts = lab.up([HostRequest("one"), HostRequest("two")])
    assert [host.ssh("hostname").stdout.strip() for host in hosts] == ["one", "two"]
    assert traces(lab)
    lab.down()
    assert traces(lab) == []


def test_up_leaves_running_hosts_alone_and_restarts_a_dead_one(lab: Lab) -> None:
    requests = [HostRequest("one"), HostRequest("two")]
    first, second = lab.up(requests)
    before = first.boot_id()
    second.kill()
    again = lab.up(requests)
    assert again[0].boot_id() == before
    assert again[1].answers()


def test_a_host_reboots_and_resets(lab: Lab) -> None:
    (host,) = lab.up([HostRequest("one", gpus=3)])
    host.ssh("touch /etc/mark && rm /dev/nvidia2")
    before = host.boot_id()
    host.reboot()
    assert host.boot_id() != before
    assert host.ssh("ls /etc/mark /dev/nvidia2").returncode == 0
    host.reset()
    assert host.ssh("test -e /etc/mark", check=False).returncode == 1
