"""NVIDIA's GPUs on the PCI bus, and the mark of an image, whose copies may have none.

Standard library only, because each boot uses it (boot/program_main.py).
"""

from collections.abc import Iterable

from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass

# PCI vendor and base class, from the PCI Code and ID Assignment Specification: 03 is a display controller
# (VGA 0300, 3D 0302, other 0380); NVIDIA's vendor number is 10de. Class 03 leaves out its audio and USB functions.
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"
_DEVICES = "/sys/bus/pci/devices"
MARK = "/etc/gpuprov/image"
# Drivers that reserve a device for virtual machines.
FOR_GUESTS = ("vfio-pci", "pci-stub", "pciback", "nvgrace_gpu_vfio_pci")


def is_copy(system: System) -> bool:
    """Say whether this machine built an image or is a copy of one: there a missing GPU is no error."""
    return system.status(MARK) is not None


@dataclass(frozen=True)
class PciGpu:
    """An NVIDIA display controller as the PCI bus shows it: `0000:17:00.0`, `2330`.

    `driver`: the kernel driver that it is bound to, by the name in /sys/bus/pci/drivers, or nothing. `subsystem`: the
    device id of its subsystem, which tells a virtual GPU.
    """

    bus_id: str
    device_id: str
    driver: str = ""
    subsystem: str = ""


def own_ids(gpus: Iterable[PciGpu]) -> tuple[str, ...]:
    """Return the device ids of the GPUs that are not reserved for virtual machines: the driver must serve these."""
    return tuple(gpu.device_id for gpu in gpus if gpu.driver not in FOR_GUESTS)


def gather_gpus(system: System) -> tuple[PciGpu, ...]:
    """Return NVIDIA's display controllers on the PCI bus, in bus order."""
    found = []
    for bus_id in of_nvidia(system, _DISPLAY_CLASS):
        texts = (system.read_text(f"{_DEVICES}/{bus_id}/{name}") or "" for name in ("device", "subsystem_device"))
        device, subsystem = map(str.strip, texts)
        link = system.status(f"{_DEVICES}/{bus_id}/driver")
        driver = link.target.rpartition("/")[2] if link is not None else ""
        found.append(PciGpu(bus_id, device[2:] if device.startswith("0x") else device, driver, subsystem[2:]))
    return tuple(found)


def of_nvidia(system: System, kind: str) -> tuple[str, ...]:
    """Return the bus ids of NVIDIA's devices whose class begins with `kind`, in bus order."""
    found = system.list_directory(_DEVICES)
    for name, start in (("vendor", _NVIDIA_VENDOR), ("class", kind)):
        found = tuple(one for one in found if (system.read_text(f"{_DEVICES}/{one}/{name}") or "").startswith(start))
    return found
