"""The disk of a machine that is not here: installed without a GPU in a mounted root, then booted with GPUs.

The disk is the virtual machine's. It is installed by this machine's processor, as image builders do; only its boots
are emulated. Before the last one, another kernel and another driver come, and containers find their GPUs again.
"""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import simgpu
from tests.integration.test_vm import Machine, machine_of
from tests.lab.fixtures import DRIVER, gpuprov
from tests.lab.lab import CACHE
from tests.lab.vm import Vm
from tests.lab.vm_driver import in_root, mounted

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.root, pytest.mark.timeout(2400)]
_OPTIONS = (
    "-e", f"gpuprov_driver_version={DRIVER}", "-e", f"gpuprov_driver_url=/root/{DRIVER}.run",
    "-e", "gpuprov_image_gpus=hopper", "-e", '{"gpuprov_image_nvswitch": false}',
)  # fmt: skip
_HOST_KEY = "etc/ssh/ssh_host_ed25519_key"
# Of another hand; both builds are DKMS', of the driver that is there for the new kernel, and of the other one.
_OLDER = "550.144.03"
_OTHER_KERNEL_AND_DRIVER = f"""
set -e
export DEBIAN_FRONTEND=noninteractive
mount -t proc none /proc
apt-get -qq update
apt-get -qq install linux-image-cloud-amd64 linux-headers-cloud-amd64
kernel=$(readlink -f /vmlinuz); kernel=${{kernel#*vmlinuz-}}
sh /root/{_OLDER}.run --silent --dkms --kernel-name "$kernel" --no-install-libglvnd
"""
# sleep as the first process of a container ends by KILL alone.
_CONTAINERS = {"flag": "--gpus all", "runtime": "--runtime nvidia --env NVIDIA_VISIBLE_DEVICES=all"}
_FILES = "/bin/sleep /bin/cat /lib/x86_64-linux-gnu/libc.so.6 /lib64/ld-linux-x86-64.so.2"
_RUN = "docker run --detach --network none --restart always --stop-signal KILL --name {} {} sleeper:1 /bin/sleep 99999"
# The driver's version and the nodes that open in each container: this driver's nodes open and can't be read (EINVAL).
_LOOK = r"""
for name in flag runtime; do
    pid=$(docker inspect --format '{{.State.Pid}}' $name)
    [ $pid = 0 ] && { echo "$name refused: $(docker inspect --format '{{.State.Error}}' $name)"; continue; }
    version=$(find /proc/$pid/root/usr/lib/x86_64-linux-gnu -name 'libcuda.so.*.*' -size +0 | sed 's/.*libcuda.so.//')
    nodes=$(for node in 0 1 ctl -uvm; do
        docker exec $name /bin/cat /dev/nvidia$node 2>&1 | grep -q 'Invalid argument' && echo $node; done)
    echo $name $version $nodes
done
"""
_UNITS = "gpuprov-nodes.service gpuprov-refresh.service gpuprov-ssh-keys.service"


class ImageVm(Vm):
    """A virtual machine whose disk is a copy that a test may write to."""

    snapshot = False

    def __init__(self, cache: Path, directory: Path) -> None:
        super().__init__(cache, directory)
        copy = directory / "image"
        subprocess.run(("cp", "--archive", "--sparse=always", str(self.image), str(copy)), check=True)
        self.image = copy


@dataclass(frozen=True)
class Installed:
    """What the installation of the disk said, and what it left there before the first boot."""

    first: subprocess.CompletedProcess[str]
    second: subprocess.CompletedProcess[str]
    left: frozenset[str]
    machine: Machine


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    directory = tmp_path_factory.mktemp("vm")
    vm = ImageVm(CACHE / "bases", directory)
    with mounted(vm.image / "disk", directory / "root") as root:
        key = (root / _HOST_KEY).read_bytes()
        (root / f"root/{DRIVER}.run").write_bytes(simgpu.build_run(directory, DRIVER).read_bytes())
        words = ("install", "--root", root, *_OPTIONS)
        first, second = gpuprov(*words, timeout=1200), gpuprov(*words, timeout=600)
        left = frozenset(
            name for name in (_HOST_KEY, "etc/cdi/nvidia.json", "dev/nvidia0") if (root / name).exists()
        ) | ({"machine-id"} if (root / "etc/machine-id").read_text().strip() else set())
        # The test must know the machine when it answers: the key that a site's own provisioning would give it.
        (root / _HOST_KEY).touch(mode=0o600)
        (root / _HOST_KEY).write_bytes(key)
    try:
        vm.start()
        yield Installed(first, second, left, machine_of(vm, {}))
    finally:
        vm.kill()


def test_the_disk_is_installed_where_no_gpu_is_and_has_nothing_of_one_machine(installed: Installed) -> None:
    assert installed.first.returncode == 0, installed.first.stdout
    assert "build the driver's modules for" in installed.first.stdout
    assert installed.second.returncode == 0 and "0 changes" in installed.second.stdout, installed.second.stdout
    assert installed.left == frozenset()


def test_the_first_boot_with_gpus_is_green_without_a_second_run(installed: Installed) -> None:
    machine = installed.machine
    assert machine.loaded() == DRIVER
    assert machine.vm.ssh("readlink /sys/bus/pci/devices/*/driver").stdout.count("drivers/nvidia") == 2
    code, said = machine.gpuprov("verify")
    assert code == 0, said
    assert machine.vm.ssh("systemctl --failed --no-legend").stdout == ""
    assert len(machine.vm.ssh("cat /etc/machine-id").stdout.strip()) == 32


def test_docker_waits_for_nodes_and_specification_alone(installed: Installed) -> None:
    vm = installed.machine.vm
    waits = vm.ssh("systemctl show docker.service --property=After --value").stdout.split()
    ours = sorted(unit for unit in waits if unit.startswith("gpuprov"))
    assert ours == ["gpuprov-nodes.service", "gpuprov-refresh.service"]
    # What docs/images.md shows was copied from here.
    print(
        vm.ssh(
            f"systemd-analyze; systemd-analyze blame --no-pager | head -n 20; systemctl status {_UNITS}", check=False
        ).stdout
    )


def _containers(vm: Vm) -> dict[str, str]:
    """Return the driver's version and the open nodes in each container, or why it does not run."""
    said = vm.ssh("sh -s", stdin=_LOOK.encode(), timeout=600).stdout.splitlines()
    return dict(line.split(" ", 1) for line in said)


def test_containers_have_gpus_after_another_kernel_and_driver(installed: Installed, tmp_path: Path) -> None:
    machine, vm = installed.machine, installed.machine.vm
    vm.ssh(f"tar -hc {_FILES} | docker import - sleeper:1")
    for name, words in _CONTAINERS.items():
        vm.ssh(_RUN.format(name, words), timeout=300)
    whole = "{} 0 1 ctl -uvm"
    assert _containers(vm) == dict.fromkeys(_CONTAINERS, whole.format(DRIVER))
    before = machine.kernel()
    vm.power_off()
    with mounted(vm.image / "disk", tmp_path / "root") as root:
        (root / f"root/{_OLDER}.run").write_bytes(simgpu.build_run(tmp_path, _OLDER).read_bytes())
        in_root(root, _OTHER_KERNEL_AND_DRIVER)
    vm.start()
    assert machine.kernel() != before and machine.loaded() == _OLDER
    assert _containers(vm) == dict.fromkeys(_CONTAINERS, whole.format(_OLDER))
    assert vm.ssh("systemctl show gpuprov-nodes gpuprov-refresh --property=Result").stdout.count("=success") == 2
