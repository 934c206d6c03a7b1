"""A host that an earlier version installed: the present one upgrades it, rolls back both runs, and uninstalls."""

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import simgpu
from tests.integration.doctor_typing import SLEEPER
from tests.integration.killed import kill_when
from tests.integration.test_install import etc, packages
from tests.integration.test_uninstall import files, in_memory
from tests.lab import Host
from tests.lab.drivers import driver_variables, load_driver
from tests.lab.fixtures import DRIVER, Site, gpuprov, gpuprov_started, gpuprov_succeeds
from tests.lab.host import differences
from tests.lab.shell import wait_for
from tools.zipapps import locked, wheels

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.slow]
# The last version whose journals have no format number; and one whose runtime had 38 modules.
_EARLIER = {"57c247a": 1, "9c33d30": 2}
_OLD = "535.261.03"
_DIGEST = "sha256sum /usr/bin/gpuprov-container-runtime"
# Starts containers by the runtime and by the hook until it is told to end, and keeps what gpuprov's programs refuse.
_STARTS = """
touch /root/starting
while [ -e /root/starting ]; do
    for by in '--gpus all' '--runtime nvidia -e NVIDIA_VISIBLE_DEVICES=all'; do
        docker run --rm --network none $by sleeper:1 /bin/sleep 0 2>> /root/refused && echo started >> /root/started
    done
done
"""
_REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The source trees of the earlier versions, from the history of this repository."""
    return {commit: unpacked(commit, tmp_path_factory.mktemp(commit)) for commit in _EARLIER}


def unpacked(commit: str, folder: Path) -> Path:
    packed = subprocess.run(("git", "archive", commit), cwd=_REPOSITORY, capture_output=True, check=False, timeout=60)
    if packed.returncode != 0:
        pytest.skip(f"no commit {commit} here (a shallow clone?): {packed.stderr.decode().strip()}")
    subprocess.run(("tar", "x"), cwd=folder, input=packed.stdout, check=True, timeout=60)
    # Earlier versions built the agent from the controller's packages, which had to run on Python 3.9.
    for wheel in wheels(one for one in locked() if one.in_agent).values():
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            archive.extractall(folder)
    return folder


def install_by(tree: Path, inventory: Path) -> None:
    """Run `gpuprov install` from another source tree."""
    done = subprocess.run(
        (sys.executable, "-m", "gpuprov", "install", "--hosts", inventory, "--connect-timeout", "60"),
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def formats(host: Host) -> list[int]:
    lines = host.ssh("head -qn 1 /var/lib/gpuprov/runs/*").stdout.splitlines()
    return [json.loads(line).get("format", 1) for line in lines]


def calls(site: Site, *commands: str) -> None:
    for command in commands:
        done = gpuprov(command, "--hosts", site.inventory("main"))
        assert done.returncode == 0, f"{command}: {done.stdout}"


@pytest.mark.parametrize("commit", _EARLIER)
def test_upgrade_from_older_version(site: Site, trees: Mapping[str, Path], commit: str) -> None:
    host = site.hosts["main"]
    host.reset()
    before = (etc(host), packages(host), files(host), in_memory(host))
    install_by(trees[commit], site.inventory("main", gpuprov_packages=None))
    assert formats(host) == [_EARLIER[commit]]
    # The inventory of the new version asks for a package more, so there is something to upgrade.
    calls(site, "install", "verify")
    assert formats(host) == [_EARLIER[commit], 2]
    again = gpuprov("install", "--hosts", site.inventory("main"))
    assert again.returncode == 0 and len(formats(host)) == 2, again.stdout
    calls(site, "rollback", "rollback", "uninstall")
    after = (etc(host), packages(host), files(host), in_memory(host))
    assert differences(before[0], after[0]) == set()
    assert after[1:] == before[1:]


def test_containers_start_while_the_runtime_is_upgraded_and_rolled_back(site: Site, trees: Mapping[str, Path]) -> None:
    host = site.hosts["main"]
    host.reset()
    install_by(trees["9c33d30"], site.inventory("main"))
    host.ssh(SLEEPER)
    with subprocess.Popen((*host.ssh_argv("root"), "sh -s"), stdin=subprocess.PIPE, text=True) as starts:
        assert starts.stdin
        starts.stdin.write(_STARTS)
        starts.stdin.close()
        for command in ("install", "rollback"):
            wait_for("a start", lambda: host.ssh("cat /root/started", check=False).stdout)
            host.ssh("rm /root/started")
            before = host.ssh(_DIGEST).stdout
            calls(site, command)
            assert host.ssh(_DIGEST).stdout != before
        wait_for("a start", lambda: host.ssh("cat /root/started", check=False).stdout)
        host.ssh("rm /root/starting")
    # What docker itself says while it restarts is not ours.
    said = host.ssh("cat /root/refused").stdout
    assert [line for line in said.splitlines() if "gpuprov" in line] == []


def test_a_rollback_restores_the_driver_that_an_upgrade_replaced(site: Site) -> None:
    """From the kept file, without the server, in containers too; a rollback that is killed is resumed."""
    host = site.hosts["main"]
    host.reset()
    libraries = "cd /usr/lib/x86_64-linux-gnu && sha256sum libcuda.so.1 libnvidia-ml.so.1"
    gpuprov_succeeds("install", "--hosts", with_driver(site, _OLD), timeout=300)
    before = (host.ssh(libraries).stdout, host.ssh("cat /etc/cdi/nvidia.json").stdout)
    newer = with_driver(site, DRIVER)
    done = gpuprov_succeeds("install", "--hosts", newer, timeout=300)
    assert f"way back: driver {_OLD} from /var/cache/gpuprov/driver/{_OLD}.run" in done.stdout
    assert host.ssh(libraries).stdout != before[0]
    foreseen = gpuprov("rollback", "--hosts", newer, "--check")
    assert f"restores driver {_OLD} from /var/cache/gpuprov/driver/{_OLD}.run" in foreseen.stdout

    # No server has the file any more, and the rollback is killed while the installer works.
    (site.lab.www / simgpu.run_name(_OLD)).unlink()
    mark = host.root / "var/lib/gpuprov/driver-incomplete"
    with gpuprov_started("rollback", "--hosts", newer) as process:
        kill_when(host, process, lambda: mark.exists() and mark.read_text().strip() == _OLD)
        process.communicate(timeout=120)
    load_driver(host, _OLD)
    calls(site, "rollback")
    assert (host.ssh(libraries).stdout, host.ssh("cat /etc/cdi/nvidia.json").stdout) == before
    gpuprov_succeeds("verify", "--hosts", with_driver(site, _OLD))


def with_driver(site: Site, version: str) -> Path:
    """Return an inventory that asks for this driver, which the container host has already."""
    load_driver(site.hosts["main"], version)
    variables = driver_variables(site.lab, version)
    return site.inventory("main", gpuprov_packages=None, gpuprov_repositories=None, **variables)


# What opening the node in a container says: of the simulated driver if the cgroup allows it.
_OPENS = "No such device or address"
CAT_IMAGE = (
    "tar -hc /bin/sleep /bin/cat /lib/x86_64-linux-gnu/libc.so.6 /lib64/ld-linux-x86-64.so.2 | tee /root/image.tar | "
    "docker import - sleeper:1; podman import /root/image.tar sleeper:1; rm /root/image.tar"
)
# podman in a host of the lab: no pids controller, and bookworm's crun does not start there.
_PODMAN_CONF = '[containers]\npids_limit = 0\n[engine]\ncgroup_manager = "systemd"\nruntime = "runc"\n'
# With CAP_MKNOD, a container may make any node; the cgroup decides whether it opens.
_OTHER_NODE = (
    "pid=$(docker inspect -f '{{.State.Pid}}' by-one); mknod /proc/$pid/root/n0 c 195 0; "
    "docker exec by-one /bin/cat /n0 2>&1"
)
WAYS = {
    "by-hook": "docker run --gpus all",
    "by-one": "docker run --gpus device=1",
    "by-runtime": "docker run --runtime nvidia -e NVIDIA_VISIBLE_DEVICES=all",
    "by-cdi": "podman run --device nvidia.com/gpu=all",
}


def install_podman(host: Host) -> None:
    host.add_archive()
    host.ssh("apt-get -q update && apt-get install -qy --no-install-recommends podman")
    host.ssh("mkdir -p /etc/containers/containers.conf.d")
    host.ssh("cat > /etc/containers/containers.conf.d/10-lab.conf", stdin=_PODMAN_CONF)


def opened(host: Host) -> dict[str, str]:
    """Return what each container gets when it opens a GPU's node."""
    execs = ((name, words.split()[0]) for name, words in WAYS.items())
    script = "; ".join(f"{engine} exec {name} /bin/cat /dev/nvidia1 2>&1 | tail -n 1" for name, engine in execs)
    said = host.ssh(script).stdout.splitlines()
    return {name: line.rpartition(": ")[2] for name, line in zip(WAYS, said)}


@pytest.mark.parametrize("commit", _EARLIER)
def test_running_containers_keep_their_gpus_over_an_upgrade(site: Site, trees: Mapping[str, Path], commit: str) -> None:
    """And verify and doctor take the host of the earlier version for what it is: one that works.

    Debian 12, because systemd 257 leaves device rules as they are when it reads its units again.
    """
    host = site.hosts["main"]
    host.reset()
    install_podman(host)
    before = (etc(host), packages(host), files(host))
    inventory = site.inventory("main")
    install_by(trees[commit], inventory)
    host.ssh(CAT_IMAGE)
    for name, words in WAYS.items():
        host.ssh(f"{words} --detach --network none --name {name} sleeper:1 /bin/sleep 3600")
    every = dict.fromkeys(WAYS, _OPENS)
    assert opened(host) == every
    gpuprov_succeeds("verify", "--hosts", inventory)
    healthy = gpuprov_succeeds("doctor", "--hosts", inventory)
    planned = gpuprov("install", "--hosts", inventory, "--check")
    count = re.search(r"(\d+) changes would be made", planned.stdout)
    assert count and f"# updates it: {count[1]} changes, no container stops" in healthy.stdout, healthy.stdout
    assert "this host was set up by an earlier gpuprov on 20" in healthy.stdout
    told = "before the first change, systemd is told of devices that running containers use: docker"
    # Hooks of the later one have told it.
    assert (told in planned.stdout) == (commit == "57c247a"), planned.stdout
    identifier = host.ssh("docker inspect -f '{{.Id}}' by-one").stdout[:12]
    assert (f"docker {identifier} (/dev/nvidia1)" in planned.stdout) == (commit == "57c247a")
    for command in ("install", "rollback", "install"):
        gpuprov_succeeds(command, "--hosts", inventory)
        assert opened(host) == every, command
    host.ssh("systemctl daemon-reload")
    assert opened(host) == every
    # And no other GPU than before.
    assert "Operation not permitted" in host.ssh(_OTHER_NODE, check=False).stdout
    host.ssh(f"podman rm --force by-cdi; docker rm --force {' '.join(WAYS)}; docker rmi sleeper:1", check=False)
    calls(site, "uninstall")
    assert differences(before[0], etc(host)) == set() and packages(host) == before[1]
    # podman leaves files of its own.
    assert not [line for line in files(host) - before[2] if "nvidia" in line or "gpuprov" in line]
