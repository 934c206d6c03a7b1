"""A year of one host: installed by an earlier gpuprov, then lived in; after each event, all that looks tells the truth.

A step is what happens, and what containers, verify and doctor show before and after the reboot that follows. A kernel
with a driver of its own is test_vm.py's: a host of the lab runs on this machine's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import simgpu
from tests.integration.test_install import etc, packages
from tests.integration.test_uninstall import files, in_memory
from tests.integration.test_upgrade import CAT_IMAGE, WAYS, install_by, install_podman, unpacked, with_driver
from tests.lab.drivers import bring_run_files, change_kernel_side, install_by_hand, leave_nodes_to_gpuprov, load_driver
from tests.lab.fixtures import DRIVER, Site, events, gpuprov
from tests.lab.host import Snapshot, differences

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.long]
_EARLIER = "57c247a"
_OLD, _NEWER = "535.261.03", "580.105.08"
# The driver's version and the GPUs' nodes that open in a container, or why it does not run. The simulated driver
# answers an open with ENXIO, the device cgroup of another container with EPERM.
_LOOK = r"""
for way in by-hook by-one by-runtime by-cdi; do
    engine=docker; [ $way = by-cdi ] && engine=podman
    pid=$($engine inspect --format '{{.State.Pid}}' $way)
    if [ "$pid" = 0 ]; then
        why=$($engine inspect --format '{{.State.Error}}' $way 2>&1)
        [ $engine = podman ] && why=$(journalctl --boot --output=cat --unit podman-restart | tr '\n' ' ')
        echo "$way refused: $why"
        continue
    fi
    cd /proc/$pid/root
    version=$(find ./usr/lib/x86_64-linux-gnu -name 'libcuda.so.*.*' -size +0 | sed 's/.*libcuda.so.//')
    nodes=$(for node in dev/nvidia[0-9]; do
        $engine exec $way /bin/cat /$node 2>&1 | grep -q 'No such device or address' && echo ${node#dev/}; done)
    echo $way $version $nodes
done
"""
# As a package of the distribution: a higher version in its name, and in what its programs say.
_DOCKER_UP = """
set -e; cd /root; apt-get -q download docker.io; dpkg-deb -R docker.io_*.deb new
sed -i 's/^Version: .*/Version: 20.10.25+dfsg1-1/' new/DEBIAN/control
sed -i 's/20\\.10\\.24+dfsg1/20.10.25+dfsg1/g' new/usr/bin/docker new/usr/sbin/dockerd
dpkg-deb -Znone --build new docker.deb; dpkg --install docker.deb; rm -r new *.deb
"""
# What gpuprov keeps of runs that are undone.
_OWN = re.compile("/var/(lib|cache)/gpuprov")


class Year:
    """The host, what its user asks for at present, and what its kernel came up with."""

    def __init__(self, site: Site) -> None:
        self.site, self.host = site, site.fresh("main")
        self.driver, self.gpus = _OLD, 2
        self.inventory = with_driver(site, _OLD)

    def call(self, *words: str) -> str:
        """Run a command that must succeed, and return what it printed."""
        done = gpuprov(*words, "--hosts", self.inventory)
        assert done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout

    def reboot(self, driver: str, gpus: int) -> None:
        """Boot; the kernel comes up with this driver."""
        self.driver, self.gpus = driver, gpus
        change_kernel_side(self.host, driver, gpus)
        self.host.power_cycle()

    def whole(self) -> dict[str, str]:
        """Return what containers have when they have all that they ask for, as `containers` returns it."""
        every = " ".join(f"nvidia{number}" for number in range(self.gpus))
        return {name: f"{self.driver} {'nvidia1' if name == 'by-one' else every}" for name in WAYS}

    def containers(self) -> dict[str, str]:
        lines = self.host.ssh("sh -s", stdin=_LOOK).stdout.splitlines()
        return {
            name: re.sub(".*(gpuprov: .*): unknown$", r"\1", what)
            for name, _, what in (one.partition(" ") for one in lines)
        }

    def look(self, when: str, seen: Seen) -> None:
        """Compare containers, verify and doctor with what the host is."""
        assert self.containers() == {**self.whole(), **seen.containers}, when
        verify, doctor = (
            events(gpuprov(one, "--json", "--hosts", self.inventory).stdout) for one in ("verify", "doctor")
        )
        failed = {one["name"] for one in verify if one["event"] == "CheckDone" and one["status"] == "failed"}
        # Root causes, without what keeps no container from its GPUs.
        causes = [one for one in doctor if one["event"] == "CauseFound" and one["confidence"] != "aside"]
        roots = {one["rule"] for one in causes if not one["follows"]}
        assert (failed, roots) == (set(seen.verify), set(seen.doctor)), f"{when}: {verify} {doctor}"
        said = json.dumps([*verify, *doctor], ensure_ascii=False)
        for sentence in seen.says:
            assert sentence in said, f"{when}: {said}"

    def state(self) -> tuple[Snapshot, str, set[str]]:
        return etc(self.host), packages(self.host), {one for one in files(self.host) if not _OWN.match(one)}


@dataclass(frozen=True)
class Seen:
    """What differs from a healthy host: containers, verify's failed checks, doctor's root causes; and sentences."""

    containers: Mapping[str, str] = field(default_factory=dict)
    verify: tuple[str, ...] = ()
    doctor: tuple[str, ...] = ()
    says: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """Something that happens, what is seen at once (None: nobody looks), and what after the reboot with `driver`."""

    name: str
    happens: Callable[[Year], object]
    at_once: Seen | None
    booted: Seen
    driver: str
    gpus: int = 2


def _driver_by_gpuprov(year: Year) -> None:
    # In a container, the module is the container host's.
    load_driver(year.host, DRIVER)
    year.inventory = with_driver(year.site, DRIVER)
    year.call("install")


def _driver_by_hand(year: Year) -> None:
    install_by_hand(year.host, _NEWER)


def _nothing(year: Year) -> None: ...


_GONE = f"1 today: {simgpu.gpu(1).uuid} (NVIDIA H100 80GB HBM3 at 0000:2a:00.0) is gone"
_REFUSED = {"by-one": "gpuprov: there is no GPU '1' on this host; its GPUs: 0; next: gpuprov doctor"}
_EARLIER_ONE = Seen(says=("this host was set up by an earlier gpuprov on ", " changes, no container stops"))
_STEPS = (
    Step("installed by an earlier gpuprov", _nothing, _EARLIER_ONE, _EARLIER_ONE, _OLD),
    Step("gpuprov upgraded", lambda year: year.call("install"), Seen(), Seen(), _OLD),
    Step("driver upgraded by gpuprov", _driver_by_gpuprov,
         Seen(doctor=("container-library",), says=('"docker restart by-',)), Seen(), DRIVER),
    Step("driver upgraded by another hand", _driver_by_hand,
         Seen(verify=("driver", "CDI specification"), doctor=("version-mismatch",),
              says=(f"the driver's files are {_NEWER} since NVIDIA's installer wrote them (",
                    f"the loaded module is {DRIVER}: run `gpuprov install")),
         Seen(says=(f'"driver": "{_NEWER}"',)), _NEWER),
    Step("docker upgraded", lambda year: year.host.ssh(_DOCKER_UP), Seen(),
         Seen(says=("docker 20.10.24+dfsg1 → 20.10.25+dfsg1",)), _NEWER),
    Step("a GPU lost", _nothing, None,
         Seen(_REFUSED, ("remembered GPUs",), ("gpus-lost",), (_GONE,)), _NEWER, gpus=1),
    Step("the GPU back", _nothing, None, Seen(says=("all 2 of ",)), _NEWER),
)  # fmt: skip


def test_a_host_over_a_year(site: Site, tmp_path: Path) -> None:
    year = Year(site)
    _equip(year)
    before = (etc(year.host), packages(year.host), files(year.host), in_memory(year.host))
    install_by(unpacked(_EARLIER, tmp_path), year.inventory)
    for name, words in WAYS.items():
        year.host.ssh(f"{words} --detach --network none --restart always --name {name} sleeper:1 /bin/sleep 99999")
    for step in _STEPS:
        step.happens(year)
        if step.at_once is not None:
            year.look(step.name, step.at_once)
        year.reboot(step.driver, step.gpus)
        year.look(f"{step.name}, and booted", step.booted)

    # The last change is undone to the byte.
    was = year.state()
    year.inventory = with_driver(site, _NEWER)
    year.call("install", "-e", "gpuprov_docker_default_runtime=true")
    assert differences(was[0], year.state()[0]) == {"/etc/docker/daemon.json"}
    year.call("rollback")
    assert year.state() == was
    assert year.containers() == year.whole()

    year.host.ssh(f"podman rm --force --time 0 by-cdi; docker rm --force {' '.join(WAYS)}", check=False)
    year.call("uninstall")
    after = (etc(year.host), packages(year.host), files(year.host), in_memory(year.host))
    assert differences(before[0], after[0]) <= {"/usr/bin/docker"}
    assert {line for line in {*before[1].split("\n")} ^ {*after[1].split("\n")} if "docker.io" not in line} == set()
    # podman leaves files of its own.
    assert [one for one in after[2] ^ before[2] if "containers" not in one and "/cni" not in one] == []
    assert after[3] == before[3]


def _equip(year: Year) -> None:
    """Bring podman, an image, and what the year needs; a boot makes no device nodes but by gpuprov."""
    host = year.host
    install_podman(host)
    host.ssh(f"systemctl enable podman-restart; {CAT_IMAGE}; rm -rf /dev/nvidia* /dev/char/195:*")
    bring_run_files(year.site.lab, host, _NEWER)
    leave_nodes_to_gpuprov(host.root)
