"""An IMEX domain of two real hosts: a stand-in of NVIDIA's packages, by real apt and systemd, over SSH.

The stand-in's daemons read the genuine files, and its control program asks all nodes (tests/imex_stand_in.py).
"""

import shutil
from pathlib import Path

import pytest

from tests.gpg import gpg_home
from tests.imex_stand_in import package_files
from tests.lab.drivers import driver_variables, load_driver
from tests.lab.fixtures import DRIVER, Site, gpuprov, gpuprov_succeeds
from tests.lab.host import Host
from tests.lab.repository import build_package, build_repository, sign, stand_in

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.slow]
HOSTS = ("main", "twin")
OLD = "535.261.03"
_CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
_ONE_OF_THEM = "Provides: nvidia-imex\nConflicts: nvidia-imex\nReplaces: nvidia-imex\nDescription:"
_STATE = "systemctl is-active nvidia-imex; systemctl is-enabled nvidia-imex; nvidia-imex --version"


@pytest.fixture(scope="module")
def repository(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """NVIDIA's CUDA repository with IMEX of two drivers, whose names have the branch; returns the variables for it."""
    folder = site.lab.www / "imex/debian12/x86_64"
    with gpg_home(tmp_path_factory.mktemp("gpg") / "gnupg") as home:
        fingerprint = build_repository(folder, home)
        for version in (OLD, DRIVER):
            # All branches have the same files, so one of them goes as another comes.
            control = stand_in(f"nvidia-imex-{version.split('.')[0]}", f"{version}-1").replace(
                "Description:", _ONE_OF_THEM
            )
            build_package(folder, control, package_files(version))
        sign(folder, home)
    shutil.copy(folder / "key.asc", folder / "3bf863cc.pub")
    return {"gpuprov_cuda_repository": f"{site.lab.url}/imex", "gpuprov_cuda_key_fingerprint": fingerprint}


def load(site: Site, name: str, version: str) -> None:
    """Have the container host of a host load this driver, which has IMEX channels."""
    load_driver(site.hosts[name], version)
    path = site.hosts[name].root / "usr/lib/simgpu/proc/devices"
    devices = path.read_text()
    if "imex" not in devices:
        path.write_text(devices.replace("\n\nBlock", "\n239 nvidia-caps-imex-channels\n\nBlock"))


def inventory(site: Site, repository: dict[str, str], version: str) -> Path:
    """Write an inventory with a domain of the hosts and a driver."""
    return site.inventory(
        *HOSTS, **driver_variables(site.lab, version), gpuprov_packages=None, gpuprov_repositories=None,
        gpuprov_imex="service", gpuprov_imex_domain="rack1", **repository,
    )  # fmt: skip


def files(host: Host) -> str:
    return host.ssh("cat /etc/nvidia-imex/*.cfg /etc/modprobe.d/gpuprov-imex.conf").stdout


def test_a_domain_comes_loses_a_node_and_is_upgraded_as_one(
    site: Site, repository: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    hosts = {name: site.hosts[name] for name in HOSTS}
    for name in HOSTS:
        load(site, name, OLD)
    first = inventory(site, repository, OLD)
    part = gpuprov("install", "--hosts", first, "--limit", "main")
    assert part.returncode == 2 and "this run leaves out twin" in part.stdout, part.stdout

    done = gpuprov("install", "--hosts", first, "--serial", "1", timeout=600)
    assert done.returncode == 0 and "batch 1 of 1: 2 hosts" in done.stdout, done.stdout
    assert len({files(host) for host in hosts.values()}) == 1
    lines = hosts["main"].ssh("cat /etc/nvidia-imex/nodes_config.cfg").stdout.splitlines()
    assert lines == [hosts[name].address for name in HOSTS]
    for host in hosts.values():
        assert host.ssh(_STATE).stdout.split() == ["active", "enabled", "IMEX", "version", "is:", OLD]
        assert host.ssh(f"stat -c %t:%T:%a {_CHANNEL}").stdout.strip() == "ef:0:666"

    # A boot brings the unit and channel 0 back; then a node is missing.
    twin = hosts["twin"]
    twin.reboot()
    assert twin.ssh(f"stat -c %t:%T {_CHANNEL}; systemctl is-active nvidia-imex").stdout.split() == ["ef:0", "active"]
    twin.ssh("systemctl stop nvidia-imex")
    missing = gpuprov("verify", "--hosts", first, "--limit", "main")
    assert missing.returncode == 1, missing.stdout
    assert f"twin ({twin.address}) is UNAVAILABLE" in " ".join(missing.stdout.split())

    # Another machine takes its place; the other node changes nothing.
    pid = hosts["main"].ssh("systemctl show -P MainPID nvidia-imex").stdout
    hosts["twin"] = site.fresh("twin")
    load(site, "twin", OLD)
    replaced = gpuprov("install", "--hosts", first, timeout=600)
    assert replaced.returncode == 0 and "0 changes" in replaced.stdout, replaced.stdout
    assert hosts["main"].ssh("systemctl show -P MainPID nvidia-imex").stdout == pid

    # A node whose plan is impossible keeps the other one as it is; then both are upgraded.
    new = inventory(site, repository, DRIVER)
    load(site, "main", DRIVER)
    refused = gpuprov("install", "--hosts", new)
    assert refused.returncode == 1 and "nothing is changed: twin of an IMEX domain" in refused.stdout, refused.stdout
    assert OLD in hosts["main"].ssh("nvidia-imex --version").stdout
    load(site, "twin", DRIVER)
    gpuprov_succeeds("install", "--hosts", new, timeout=600)
    for host in hosts.values():
        assert host.ssh(_STATE).stdout.split() == ["active", "enabled", "IMEX", "version", "is:", DRIVER]
    verified = gpuprov("verify", "--hosts", new, "--limit", "twin")
    assert verified.returncode == 0 and "IMEX domain" in verified.stdout, verified.stdout

    # Kubernetes' DRA driver runs its own: nothing starts the unit.
    new.write_text(new.read_text().replace("gpuprov_imex: service", "gpuprov_imex: dra"))
    gpuprov_succeeds("install", "--hosts", new, timeout=600)
    for host in hosts.values():
        assert host.ssh(_STATE).stdout.split() == ["inactive", "masked", "IMEX", "version", "is:", DRIVER]

    gpuprov_succeeds("uninstall", "--hosts", new, timeout=600)
    left = "ls -d /etc/nvidia-imex /etc/systemd/system/nvidia-imex.service /etc/modprobe.d/gpuprov-imex.conf "
    left += "/dev/nvidia-caps-imex-channels 2>/dev/null || true"
    for host in hosts.values():
        assert host.ssh(f"{left}; dpkg-query -W 'nvidia-imex*' 2>/dev/null || true").stdout == ""
