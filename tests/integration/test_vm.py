"""The kernel's half of the driver on a virtual machine with a kernel of its own: built, loaded, kept, and seen missing.

The tests are one story and stand in its order: a bare machine whose GPUs nouveau has; its installation, with the reboot
that it needs; a newer driver in place of the one that runs, without a reboot; an upgrade of its kernel.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from gpuprov.driver.kernel import dkms_states
from tests import simgpu
from tests.lab.fixtures import DRIVER, gpuprov
from tests.lab.lab import CACHE
from tests.lab.shell import wait_for
from tests.lab.vm import Vm

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.root, pytest.mark.timeout(2400)]
_OLDER = "550.144.03"
# Python opens the node as a program of the driver's would; what a missing driver gives is ENXIO.
_OPEN = 'import os; [os.close(os.open(f"/dev/nvidia{name}", os.O_RDWR)) for name in ("0", "1", "ctl", "-uvm")]'

_HOLD = 'import os, time; os.open("/dev/nvidia0", os.O_RDWR); time.sleep(3600)'
_HOLDS = "ls -l /proc/$(systemctl show -p MainPID --value trainer)/fd"


@dataclass(frozen=True)
class Machine:
    """A running virtual machine, and an inventory that names it."""

    vm: Vm
    inventory: Path

    def gpuprov(self, *words: str) -> tuple[int, str]:
        done = gpuprov(*words, "--hosts", self.inventory, timeout=1800)
        return done.returncode, done.stdout

    def kernel(self) -> str:
        return self.vm.ssh("uname -r").stdout.strip()

    def set(self, **variables: str) -> None:
        """Change what the inventory asks for."""
        found = yaml.safe_load(self.inventory.read_text())
        found["all"]["hosts"]["metal"].update(variables)
        self.inventory.write_text(yaml.safe_dump(found))

    def loaded(self) -> str:
        """Return the version that the kernel runs."""
        return self.vm.ssh("cat /sys/module/nvidia/version").stdout.strip()


def machine_of(vm: Vm, variables: Mapping[str, str]) -> Machine:
    """Return the machine with an inventory that says how to log in, and these variables."""
    login = {
        "ansible_host": "127.0.0.1",
        "ansible_port": vm.port,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(vm.key),
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={vm.known_hosts}",
    }
    inventory = vm.directory / "inventory.yml"
    inventory.write_text(yaml.safe_dump({"all": {"hosts": {"metal": {**login, **variables}}}}))
    return Machine(vm, inventory)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("vm")
    vm = Vm(CACHE / "bases", directory)
    try:
        vm.start()
        for version in (_OLDER, DRIVER):
            run_file = simgpu.build_run(directory, version)
            vm.ssh(f"cat > /root/{version}.run", stdin=run_file.read_bytes())
        wanted = {
            "gpuprov_driver_version": _OLDER,
            "gpuprov_driver_url": f"/root/{_OLDER}.run",
            "gpuprov_reboot": "if-needed",
        }
        yield machine_of(vm, wanted)
    finally:
        vm.kill()


def test_a_machine_whose_gpus_nouveau_has_is_rebooted_and_gets_a_driver_built_for_its_kernel(machine: Machine) -> None:
    vm = machine.vm
    assert vm.ssh("readlink /sys/bus/pci/devices/0000:1b:00.0/driver").stdout.strip().endswith("/nouveau")
    assert vm.ssh("modprobe -r nouveau", check=False).returncode != 0
    missing = "test ! -e /lib/modules/$(uname -r)/build && ! which apparmor_parser"
    assert vm.ssh(missing, check=False).returncode == 0
    boot = vm.boot_id()
    code, said = machine.gpuprov("install")
    assert code == 0, said
    assert "rebooting" in said
    assert vm.boot_id() != boot


def test_the_module_is_dkms_own_for_this_kernel_and_loaded(machine: Machine) -> None:
    kernel = machine.kernel()
    assert dkms_states(machine.vm.ssh("dkms status").stdout, _OLDER) == {kernel: "installed"}
    fields = "; ".join(f"modinfo -F {field} nvidia" for field in ("filename", "version", "vermagic"))
    path, version, magic = machine.vm.ssh(fields).stdout.splitlines()
    assert path.startswith(f"/lib/modules/{kernel}/updates/dkms/nvidia.ko")
    assert (version, magic.split()[0]) == (_OLDER, kernel)
    assert machine.vm.ssh("readlink /sys/bus/pci/devices/*/driver").stdout.count("drivers/nvidia") == 2
    machine.vm.ssh(("python3", "-c", _OPEN))


def test_containers_open_the_nodes_of_the_loaded_driver(machine: Machine) -> None:
    code, said = machine.gpuprov("verify")
    assert code == 0, said
    assert re.search(rf"next kernel +ok .*{re.escape(machine.kernel())}", said), said


def test_a_second_run_has_nothing_to_do(machine: Machine) -> None:
    code, said = machine.gpuprov("install")
    assert (code, "0 changes" in said) == (0, True), said


def test_a_newer_driver_waits_for_a_process_with_an_open_gpu_and_names_it(machine: Machine) -> None:
    machine.set(gpuprov_driver_version=DRIVER, gpuprov_driver_url=f"/root/{DRIVER}.run", gpuprov_reboot="never")
    machine.vm.ssh(f"systemd-run --quiet --unit=trainer python3 -c {shlex.quote(_HOLD)}")
    wait_for("the trainer", lambda: "/dev/nvidia0" in machine.vm.ssh(_HOLDS, check=False).stdout)
    code, said = machine.gpuprov("install")
    assert code == 1, said
    assert f"driver {_OLDER} is loaded and in use" in said
    assert "trainer.service" in said
    assert machine.loaded() == _OLDER


def test_then_it_takes_the_place_of_the_loaded_one_without_a_reboot(machine: Machine) -> None:
    machine.vm.ssh("systemctl stop trainer")
    boot = machine.vm.boot_id()
    code, said = machine.gpuprov("install")
    assert code == 0, said
    assert machine.loaded() == DRIVER
    assert machine.vm.boot_id() == boot
    assert dkms_states(machine.vm.ssh("dkms status").stdout, DRIVER) == {machine.kernel(): "installed"}
    assert machine.vm.ssh("systemctl is-active nvidia-persistenced").stdout.strip() == "active"
    machine.vm.ssh(("python3", "-c", _OPEN))


def test_a_newer_kernel_without_headers_is_named_and_the_next_run_brings_them(machine: Machine) -> None:
    machine.vm.ssh("DEBIAN_FRONTEND=noninteractive apt-get -qq install linux-image-cloud-amd64", timeout=1500)
    newer = machine.vm.ssh("readlink -f /vmlinuz").stdout.strip().partition("vmlinuz-")[2]
    assert newer != machine.kernel()
    code, said = machine.gpuprov("verify")
    assert code == 1, said
    assert f"kernel {newer} has no NVIDIA module, and no headers to build one: install linux-headers-{newer}" in said
    code, said = machine.gpuprov("install")
    assert code == 0, said
    code, said = machine.gpuprov("verify")
    assert code == 0, said


def test_the_newer_kernel_boots_with_the_driver(machine: Machine) -> None:
    before = machine.kernel()
    machine.vm.reboot()
    assert machine.kernel() != before
    code, said = machine.gpuprov("verify")
    assert code == 0, said
    code, said = machine.gpuprov("install")
    assert (code, "0 changes" in said) == (0, True), said
