"""Debian's genuine nvidia.ko, built by DKMS, on a kernel of its own: what it says, and what gpuprov makes of that.

One story in its order, on one boot: a machine without a GPU; then its PCI bus shows GPUs that are only registers, which
the genuine driver finds and can't start.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.integration.test_vm import Machine, machine_of
from tests.lab.lab import CACHE
from tests.lab.vm_driver import DriverVm

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.root, pytest.mark.timeout(3600)]
# udev finds the driver for each device, by the module's aliases.
_SHOW_GPUS = "modprobe simpci && udevadm settle --timeout=300"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    vm = DriverVm(CACHE / "bases", tmp_path_factory.mktemp("vm"))
    try:
        vm.start()
        yield machine_of(vm, {"gpuprov_driver": "distribution"})
    finally:
        vm.kill()


def served(modules: Iterable[str]) -> list[str]:
    """Return the driver's modules among the loaded ones, without nvidia_drm.

    On a kernel without DRM that one is empty, depends on nothing, and is loaded at boot (/etc/modules-load.d).
    """
    return [name for name in modules if name.startswith("nvidia") and name != "nvidia_drm"]


def version_of(machine: Machine) -> str:
    """Return the driver's version, by its package."""
    return machine.vm.ssh("dpkg-query -W -f '${Version}' nvidia-kernel-dkms").stdout.partition("-")[0]


def test_dkms_has_built_the_genuine_modules_for_the_kernel_that_runs(machine: Machine) -> None:
    kernel = machine.kernel()
    said = machine.vm.ssh("dkms status").stdout
    assert said.startswith(f"nvidia-current/{version_of(machine)}, {kernel}, x86_64: installed"), said
    fields = "; ".join(f"modinfo -F {field} nvidia-current" for field in ("filename", "version", "license"))
    path, version, license_of_it = machine.vm.ssh(fields).stdout.splitlines()
    assert path == f"/lib/modules/{kernel}/updates/dkms/nvidia-current.ko"
    assert (version, license_of_it) == (version_of(machine), "NVIDIA")


def test_without_a_gpu_the_genuine_module_does_not_stay(machine: Machine) -> None:
    done = machine.vm.ssh("modprobe nvidia-current; dmesg", check=False, timeout=600)
    assert "No such device" in done.stderr
    assert "NVRM: No NVIDIA GPU found." in done.stdout
    assert not served(machine.vm.ssh("cut -d ' ' -f 1 /proc/modules").stdout.split())


def test_facts_have_the_gpus_on_the_bus_and_no_loaded_driver(machine: Machine) -> None:
    machine.vm.ssh(_SHOW_GPUS, timeout=600)
    log = machine.vm.ssh("dmesg").stdout
    assert "NVRM: Can't find an IRQ for your NVIDIA card!" in log
    assert "NVRM: The NVIDIA probe routine failed for 2 device(s)." in log
    code, said = machine.gpuprov("facts", "--json")
    assert code == 0, said
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    facts: dict[str, Any] = next(event["facts"] for event in events if event["event"] == "FactsGathered")
    driver = facts["driver"]
    assert (driver["library_version"], driver["kernel_version"]) == (version_of(machine), "")
    assert [(gpu["device_id"], gpu["driver"]) for gpu in facts["gpus"]] == [("2330", "")] * 2
    assert not served(facts["kernel"]["loaded_modules"])


def test_doctor_names_the_drivers_own_reason_from_the_kernels_log(machine: Machine) -> None:
    code, said = machine.gpuprov("doctor")
    assert code == 1, said
    first = said.partition("\nmetal: the ")[2]
    assert first.startswith("firmware, or the virtual machine, has given a GPU no interrupt (certain)\n  seen: dmesg:")
    assert "NVRM: Can't find an IRQ for your NVIDIA card!" in first.partition("next:")[0]
    probe = "the driver was loaded and could start no GPU, so the kernel did not keep it (certain; a consequence of "
    assert f"{probe}no-interrupt)" in said
    assert f"modinfo nvidia-current: /lib/modules/{machine.kernel()}/updates/dkms/nvidia-current.ko" in said


def test_verify_says_what_the_genuine_nvidia_smi_says(machine: Machine) -> None:
    code, said = machine.gpuprov("verify")
    assert code == 1, said
    assert "nvidia-smi exited 9: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver" in said
    assert "nvidia-smi does not reach the driver: modprobe -a nvidia nvidia-uvm; dmesg | grep -i nvrm" in said
    assert f"ok {machine.kernel()}, with the driver's module" in said
