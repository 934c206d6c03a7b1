"""What a boot brings by itself, and runs that go on behind one, on real hosts that really reboot."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import simgpu
from tests.integration.doctor_cases import SLEEPER
from tests.lab import Host, HostRequest, cgroups
from tests.lab.fixtures import DRIVER, GPUPROV, Site, gpuprov, running
from tests.lab.lab import REPOSITORY
from tests.lab.shell import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.root]
_UNITS = ("gpuprov-nodes.service", "gpuprov-refresh.service", "gpuprov-refresh.path")
_CDI = "/etc/cdi/nvidia.json"
_NEWER = "580.105.08"
# Instead of the lab's own: first nouveau has the GPUs of a bare machine, after the next boot NVIDIA's driver has them.
_NOUVEAU_ONCE = """
set -eu
tree=/usr/lib/simgpu
[ -e /var/lib/nouveau-was-here ] || tree=/usr/lib/simgpu-nouveau
touch /var/lib/nouveau-was-here
mount --bind $tree/sys/bus/pci/devices /sys/bus/pci/devices
[ $tree = /usr/lib/simgpu ] && mount --bind $tree/proc/driver /proc/driver
mount --bind $tree/proc/devices /proc/devices
"""
# gpuprov is to take the host for a bare machine: once systemd has read it, the mark of a container goes.
_UNMARK = "[Service]\nType=oneshot\nExecStart=/bin/rm -f /run/systemd/container\n[Install]\nWantedBy=basic.target\n"


@pytest.fixture(scope="module")
def lab_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    requests = {name: HostRequest(name, gpus=2, bind=(str(REPOSITORY),)) for name in ("boots", "metal")}
    with running(requests, tmp_path_factory.mktemp("inventories")) as site:
        yield site


@pytest.fixture(scope="module")
def main(lab_site: Site) -> Host:
    """A host that is installed, and whose own boot makes no device nodes any more."""
    done = gpuprov("install", "--hosts", lab_site.inventory("boots"))
    assert done.returncode == 0, done.stdout
    host = lab_site.hosts["boots"]
    attach = host.root / "usr/lib/simgpu/attach"
    attach.write_text("".join(line for line in attach.read_text().splitlines(keepends=True) if "mknod" not in line))
    return host


def active(host: Host, *units: str) -> list[str]:
    return host.ssh(("systemctl", "is-active", *units), check=False).stdout.split()


def test_a_second_run_has_nothing_to_do(lab_site: Site, main: Host) -> None:
    assert "0 changes" in gpuprov("install", "--hosts", lab_site.inventory("boots")).stdout


def test_after_a_reboot_nodes_and_links_are_there_before_docker_and_containers_see_gpus(
    lab_site: Site, main: Host
) -> None:
    main.ssh("rm -rf /dev/char")
    main.reboot()
    assert active(main, *_UNITS, "docker") == ["active", "inactive", "active", "active"]
    nodes = main.ssh("ls /dev/nvidia0 /dev/nvidia1 /dev/nvidiactl /dev/nvidia-uvm").stdout.split()
    assert len(nodes) == 4
    assert main.ssh("readlink /dev/char/195:1").stdout.strip() == "../nvidia1"
    assert main.ssh("systemctl show gpuprov-refresh --property=Result").stdout.strip() == "Result=success"
    times = main.ssh(
        "systemctl show gpuprov-nodes docker --property=ActiveEnterTimestampMonotonic --value"
    ).stdout.split()
    assert int(times[0]) <= int(times[1])
    done = gpuprov("verify", "--hosts", lab_site.inventory("boots"))
    assert done.returncode == 0, done.stdout
    assert "0 changes" in gpuprov("install", "--hosts", lab_site.inventory("boots")).stdout


def test_another_set_of_libraries_changes_the_specification_without_anybody(main: Host) -> None:
    """As an update of a driver's packages does: libraries come or go, ldconfig runs."""
    before = (main.root / _CDI[1:]).read_text()
    assert "libnvidia-encode" in before
    main.ssh("mkdir /root/away && mv /usr/lib/x86_64-linux-gnu/libnvidia-encode.so* /root/away && ldconfig")
    wait_for("the refresh", lambda: "libnvidia-encode" not in (main.root / _CDI[1:]).read_text())
    main.ssh("mv /root/away/* /usr/lib/x86_64-linux-gnu/ && ldconfig")
    wait_for("the refresh", lambda: (main.root / _CDI[1:]).read_text() == before)


def test_a_gpu_that_a_reboot_lost_is_missed_until_it_is_back(lab_site: Site, main: Host) -> None:
    inventory = lab_site.inventory("boots")
    attach = main.root / "usr/lib/simgpu/attach"
    whole = attach.read_text()
    simgpu.write_kernel_tree(main.root / "usr/lib/simgpu-one", 1, DRIVER)
    attach.write_text(whole.replace("/usr/lib/simgpu/", "/usr/lib/simgpu-one/"))
    main.reboot()
    main.ssh("rm -f /dev/nvidia1")
    failed = gpuprov("verify", "--hosts", inventory)
    missed = f"today: {simgpu.gpu(1).uuid} (NVIDIA H100 80GB HBM3 at 0000:2a:00.0) is gone"
    assert failed.returncode == 1 and f"1 {missed}" in failed.stdout, failed.stdout
    assert re.search(r"^remembered GPUs +failed", failed.stdout, re.MULTILINE), failed.stdout
    assert f"1 {missed}" in gpuprov("doctor", "--hosts", inventory).stdout
    attach.write_text(whole)
    main.reboot()
    done = gpuprov("verify", "--hosts", inventory)
    assert done.returncode == 0 and re.search(r"^remembered GPUs +ok +all 2 of", done.stdout, re.MULTILINE), done.stdout
    assert main.ssh("stat -c '%a %u' /var/lib/gpuprov/remembered.json").stdout.split() == ["600", "0"]


# -- containers with a restart policy ------------------------------------------------------------------------------

_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
# Without docker's CDI: up to 28.1 docker registers it after it has restarted containers (moby, 49989).
_CONTAINERS = {
    "flag": "docker run --gpus all",
    "runtime": "docker run --runtime=nvidia --env NVIDIA_VISIBLE_DEVICES=all",
    "podman": "podman --runtime=runc run --device nvidia.com/gpu=all",
}


@pytest.fixture(scope="module")
def restarting(lab_site: Site, main: Host) -> Host:
    """The host with four containers that come back at each boot, and the .run files of two drivers."""
    # A lab host has no pids controller.
    main.ssh("mkdir -p /etc/containers; printf '[containers]\\npids_limit = 0\\n' > /etc/containers/containers.conf")
    main.ssh("apt-get update -qq; apt-get install -qq --no-install-recommends podman", timeout=300)
    main.ssh(SLEEPER)
    main.ssh(SLEEPER.replace("docker import", "podman import"))
    main.ssh("systemctl enable podman-restart.service")
    for name, command in _CONTAINERS.items():
        main.ssh(f"{command} --detach --network=none --restart=always --name {name} sleeper:1 /bin/sleep 9999")
    for version in (DRIVER, _NEWER):
        shutil.copyfile(simgpu.build_run(lab_site.lab.www, version), main.root / f"root/{version}.run")
    return main


def _boot_with(host: Host, version: str, gpus: int = 2) -> None:
    """Boot with the kernel side of that driver and as many GPUs; a shutdown would wait for the containers."""
    tree = host.root / "usr/lib/simgpu"
    for part in ("sys", "proc"):
        shutil.rmtree(tree / part)
    simgpu.write_kernel_tree(tree, gpus, version)
    cgroups.end_processes(host.cgroup)
    host.switch_on()


def _by_another_hand(host: Host, version: str) -> None:
    """Replace the driver as its user does, with the file alone; the kernel keeps what it has until it boots."""
    host.ssh(f"sh /root/{version}.run --silent --no-kernel-modules --no-install-libglvnd", timeout=300)


def _given(host: Host, name: str) -> tuple[list[str], list[str]]:
    """Return the versions of libcuda and the GPUs' nodes in a container, nothing of one that does not run."""
    engine = "podman" if name == "podman" else "docker"
    seen = host.ssh(
        f"pid=$({engine} inspect --format '{{{{.State.Pid}}}}' {name}); [ $pid -gt 0 ] && "
        f"cd /proc/$pid/root && find dev -name 'nvidia[0-9]' -printf '%f\\n' && "
        f"find .{_LIBRARIES} -name 'libcuda.so.*.*' -size +0",
        check=False,
    ).stdout.split()  # fmt: skip
    nodes = sorted(word for word in seen if "/" not in word)
    return [word.partition("libcuda.so.")[2] for word in seen if "/" in word], nodes


@pytest.mark.parametrize(
    ("case", "version", "gpus"),
    [("upgraded", _NEWER, 2), ("downgraded", DRIVER, 2), ("a GPU lost", DRIVER, 1), ("a GPU added", DRIVER, 2),
     ("no specification", DRIVER, 2)],
)  # fmt: skip
def test_containers_with_a_restart_policy_have_their_gpus_after_a_boot(
    restarting: Host, case: str, version: str, gpus: int
) -> None:
    if case in ("upgraded", "downgraded"):
        _by_another_hand(restarting, version)
    if case == "no specification":
        restarting.ssh(f"rm {_CDI}")
    _boot_with(restarting, version, gpus)
    nodes = [f"nvidia{number}" for number in range(gpus)]
    wanted = {name: ([version], nodes) for name in _CONTAINERS}
    assert {name: _given(restarting, name) for name in _CONTAINERS} == wanted


def test_a_driver_that_does_not_fit_its_module_is_said_and_engines_start(restarting: Host) -> None:
    """Files that changed without a boot, as an update by apt in the night leaves them."""
    _by_another_hand(restarting, _NEWER)
    _boot_with(restarting, DRIVER)
    assert active(restarting, "docker", "gpuprov-refresh.service") == ["active", "failed"]
    said = restarting.ssh("journalctl --boot --output=cat --unit gpuprov-refresh").stdout
    assert f"files are {_NEWER}, the loaded module is {DRIVER}" in said
    _by_another_hand(restarting, DRIVER)
    wait_for("the refresh", lambda: active(restarting, "gpuprov-refresh.service") == ["inactive"])


def test_a_driver_that_hangs_delays_engines_and_does_not_stop_them(restarting: Host) -> None:
    """The limit is the unit's; a shorter one here."""
    hangs = (
        "mkdir -p {0} && printf '[Service]\\nTimeoutStartSec=1\\nExecStart=\\nExecStart=/bin/sleep 600\\n' > {0}/a.conf"
    )
    after = "systemctl show {} --property=After | grep -c gpuprov-refresh"
    assert restarting.ssh(after.format("user@1000.service")).stdout == "1\n"
    # The administrator who looks for the reason can log in.
    assert restarting.ssh(after.format("user@0.service"), check=False).stdout == "0\n"
    for unit in ("gpuprov-nodes.service", "gpuprov-refresh.service"):
        limit = restarting.ssh(f"systemctl show {unit} --property=TimeoutStartUSec --value").stdout.strip()
        assert limit == "1min 30s"
        restarting.ssh(hangs.format(f"/etc/systemd/system/{unit}.d"))
    _boot_with(restarting, DRIVER)
    assert active(restarting, "gpuprov-nodes", "gpuprov-refresh", "docker") == ["failed", "failed", "active"]
    restarting.ssh("rm -r /etc/systemd/system/gpuprov-*.service.d; systemctl daemon-reload")
    restarting.ssh("systemctl restart gpuprov-nodes gpuprov-refresh; docker rm --force flag runtime")
    restarting.ssh("podman rm --force --time 0 podman; systemctl disable podman-restart; apt-get purge -qq podman")


def test_roll_back_takes_units_links_and_program_away(lab_site: Site, main: Host) -> None:
    done = gpuprov("rollback", "--hosts", lab_site.inventory("boots"))
    assert done.returncode == 0, done.stdout
    found = main.ssh("find /etc /usr/lib/gpuprov -name '*gpuprov*' 2>&1", check=False).stdout
    assert "gpuprov-" not in found
    assert active(main, *_UNITS) == ["inactive"] * 3


# -- reboots -------------------------------------------------------------------------------------------------------


def _as_metal(lab_site: Site) -> Host:
    """Return a host with the driver's libraries that takes itself for a bare machine, nouveau on its GPUs."""
    if not lab_site.hosts.is_saved("metal"):
        _save_as_metal(lab_site, lab_site.fresh("metal"))
    host = lab_site.hosts.fresh("metal", saved=True)
    assert host.ssh("readlink /sys/bus/pci/devices/0000:1b:00.0/driver").stdout.strip().endswith("nouveau")
    return host


def _save_as_metal(lab_site: Site, host: Host) -> None:
    run_file = lab_site.variables["gpuprov_driver_url"]
    host.ssh(f'cd /root && python3 -c \'import urllib.request as u; u.urlretrieve("{run_file}", "driver.run")\'')
    host.ssh("sh /root/driver.run --silent --no-kernel-modules --no-install-libglvnd", timeout=300)
    simgpu.write_kernel_tree(host.root / "usr/lib/simgpu-nouveau", 2, driver="nouveau")
    (host.root / "usr/lib/simgpu/attach").write_text(_NOUVEAU_ONCE)
    units = host.root / "etc/systemd/system"
    (units / "unmark.service").write_text(_UNMARK)
    host.ssh("systemctl enable unmark.service")
    host.save()


def _inventory(lab_site: Site, **variables: str) -> Path:
    path = lab_site.inventory("metal", gpuprov_driver="preinstalled", gpuprov_driver_url=None, **variables)
    assert yaml.safe_load(path.read_text())["all"]["vars"]["gpuprov_driver"] == "preinstalled"
    return path


def test_without_leave_the_run_ends_with_3_and_goes_on_after_somebodys_reboot(lab_site: Site) -> None:
    host = _as_metal(lab_site)
    boot = host.boot_id()
    done = gpuprov("install", "--hosts", _inventory(lab_site))
    assert done.returncode == 3, done.stdout
    assert "is bound to nouveau" in done.stdout
    assert "systemctl reboot" in done.stdout
    assert host.boot_id() == boot
    host.reboot()
    again = gpuprov("install", "--hosts", _inventory(lab_site))
    assert again.returncode == 0, again.stdout
    # The .run brings the daemon's program without a unit.
    assert active(host, "nvidia-persistenced.service") == ["active"]
    assert gpuprov("verify", "--hosts", _inventory(lab_site)).returncode == 0


def test_over_ssh_the_run_waits_for_the_reboot_and_goes_on(lab_site: Site) -> None:
    host = _as_metal(lab_site)
    boot = host.boot_id()
    done = gpuprov("install", "--hosts", _inventory(lab_site, gpuprov_reboot="if-needed"), timeout=600)
    assert done.returncode == 0, done.stdout
    assert "rebooting" in done.stdout
    assert host.boot_id() not in ("", boot)
    assert "0 changes" in gpuprov("install", "--hosts", _inventory(lab_site, gpuprov_reboot="if-needed")).stdout
    # One run, before and behind the reboot: one roll-back.
    assert len(list((host.root / "var/lib/gpuprov/runs").iterdir())) == 1


def test_on_the_machine_itself_a_unit_goes_on_and_is_gone(lab_site: Site) -> None:
    host = _as_metal(lab_site)
    boot = host.boot_id()
    words = (GPUPROV, "install", "-e", "gpuprov_driver=preinstalled", "-e", "gpuprov_reboot=if-needed")
    done = host.ssh(shlex.join(map(str, words)), check=False, timeout=300)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "journalctl -u gpuprov-resume.service" in done.stdout
    wait_for("the reboot", lambda: host.boot_id() not in ("", boot))
    host.wait_until_settled()
    said = host.ssh("journalctl --output=cat --unit gpuprov-resume.service").stdout
    finished = [json.loads(line) for line in said.splitlines() if '"Finished"' in line]
    assert [event["exit_code"] for event in finished] == [0], said
    assert not (host.root / "etc/systemd/system/gpuprov-resume.service").exists()
    assert gpuprov("verify", "--hosts", _inventory(lab_site)).returncode == 0
