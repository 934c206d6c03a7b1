"""Debian's genuine nvidia.ko, built by DKMS, on a kernel of its own: what it says without a GPU, and what gpuprov does.

The machine's PCI bus shows GPUs that are only registers: the genuine driver finds them, and none of them answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.integration.test_vm import Machine
from tests.lab.lab import CACHE
from tests.lab.vm_driver import DriverVm

_TAKE_OUT = 'for gpu in /sys/bus/pci/devices/*; do grep -q 0x10de "$gpu/vendor" && echo 1 > "$gpu/remove"; done; :'
pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.timeout(3600)]


def version_of(machine: Machine) -> str:
    """Return the driver's version, by its package."""
    return machine.vm.ssh("dpkg-query -W -f '${Version}' nvidia-kernel-dkms").stdout.partition("-")[0]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("vm")
    vm = DriverVm(CACHE / "bases", directory)
    try:
        vm.start()
        variables = {
            "ansible_host": "127.0.0.1",
            "ansible_port": vm.port,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(vm.key),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={vm.known_hosts}",
            "gpuprov_driver": "distribution",
        }
        inventory = directory / "inventory.yml"
        inventory.write_text(yaml.safe_dump({"all": {"hosts": {"metal": variables}}}))
        yield Machine(vm, inventory)
    finally:
        vm.kill()


def test_dkms_has_built_the_genuine_modules_for_the_kernel_that_runs(machine: Machine) -> None:
    kernel = machine.vm.ssh("uname -r").stdout.strip()
    said = machine.vm.ssh("dkms status").stdout
    assert said.startswith(f"nvidia-current/{version_of(machine)}, {kernel}, x86_64: installed"), said
    fields = "; ".join(f"modinfo -F {field} nvidia-current" for field in ("filename", "version", "license"))
    path, version, license_of_it = machine.vm.ssh(fields).stdout.splitlines()
    assert path == f"/lib/modules/{kernel}/updates/dkms/nvidia-current.ko"
    assert (version, license_of_it) == (version_of(machine), "NVIDIA")
    assert machine.vm.ssh("modinfo nvidia", check=False).returncode != 0


def test_facts_name_libraries_and_no_loaded_driver(machine: Machine) -> None:
    code, said = machine.gpuprov("facts", "--json")
    assert code == 0, said
    facts: dict[str, Any] = json.loads(said.splitlines()[-1])
    driver = facts["hosts"][0]["facts"]["driver"]
    assert (driver["library_version"], driver["kernel_version"]) == (version_of(machine), "")


def test_an_installation_ends_with_the_kernels_own_words(machine: Machine) -> None:
    code, said = machine.gpuprov("install")
    assert code == 1, said
    assert "the kernel module nvidia can't be loaded" in said and "No such device" in said
    assert "NVRM" in said


def test_doctor_and_verify_name_what_the_genuine_driver_says(machine: Machine) -> None:
    code, said = machine.gpuprov("doctor")
    assert code == 1, said
    print(said)
    code, said = machine.gpuprov("verify")
    assert code == 1 and "nvidia-smi exited 9" in said, said


def test_without_a_gpu_on_the_bus_the_genuine_module_says_so(machine: Machine) -> None:
    machine.vm.ssh(_TAKE_OUT)
    done = machine.vm.ssh("modprobe nvidia", check=False, timeout=300)
    assert done.returncode != 0 and "No such device" in done.stderr
    assert "NVRM: No NVIDIA GPU found." in machine.vm.ssh("dmesg | tail -n 20").stdout
    code, said = machine.gpuprov("doctor")
    assert code == 1 and "no NVIDIA GPU" in said, said
