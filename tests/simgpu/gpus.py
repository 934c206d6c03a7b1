"""The simulated GPUs: one table of sixteen, a pure function of the minor number, for Python and for C.

It never looks at a machine: which of the sixteen exist somewhere is decided there, by the device nodes.
"""

import uuid
from dataclasses import dataclass

MAXIMUM_GPUS = 16
NVIDIA_MAJOR = 195
CONTROL_MINOR = 255
MODESET_MINOR = 254
# Unified memory and the capability nodes get dynamic major numbers from the kernel; these two are free on the
# kernels of the supported distributions (240-254 is the range for local use).
UVM_MAJOR = 242
CAPS_MAJOR = 241

DRIVER_VERSION = "550.163.01"
CUDA_VERSION = "12.4"

# Bus numbers as an eight-GPU HGX board has them (1b to df), with eight more in between.
_BUSES = (0x1B, 0x2A, 0x3A, 0x43, 0x52, 0x61, 0x6A, 0x7B, 0x8A, 0x9D, 0xA5, 0xB1, 0xC3, 0xD1, 0xDF, 0xE9)
# A namespace of its own keeps the UUIDs stable for ever: tests elsewhere may quote them.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "simulated-gpu.invalid")


@dataclass(frozen=True)
class SimGpu:
    """One simulated GPU. `memory_mib` differs per GPU, so that a test that mixes up two GPUs notices."""

    minor: int
    uuid: str
    name: str
    bus: int
    memory_mib: int
    serial: str
    vbios: str = "96.00.99.00.01"
    vendor_id: int = 0x10DE
    device_id: int = 0x2330  # H100 SXM5 80GB in the PCI ID database
    subsystem_vendor_id: int = 0x10DE
    subsystem_device_id: int = 0x16C1

    @property
    def bus_id(self) -> str:
        """As NVML and nvidia-smi write it: eight hex digits of domain, upper case."""
        return f"00000000:{self.bus:02X}:00.0"

    @property
    def sysfs_id(self) -> str:
        """As the kernel names it below /sys/bus/pci/devices and /proc/driver/nvidia/gpus."""
        return f"0000:{self.bus:02x}:00.0"

    @property
    def numa_node(self) -> int:
        """Two sockets: the upper half of the bus numbers hangs on the second."""
        return 0 if self.bus < 0x80 else 1


@dataclass(frozen=True)
class DeviceNode:
    """A character device to create: `mode` holds the permission bits only."""

    path: str
    major: int
    minor: int
    mode: int


def gpu(minor: int) -> SimGpu:
    """The GPU with that minor number (0 to 15); raises ValueError for any other."""
    if not 0 <= minor < MAXIMUM_GPUS:
        raise ValueError(f"no simulated GPU has minor number {minor}: 0 to {MAXIMUM_GPUS - 1} exist")
    return SimGpu(
        minor=minor,
        uuid=f"GPU-{uuid.uuid5(_NAMESPACE, str(minor))}",
        name="NVIDIA H100 80GB HBM3",
        bus=_BUSES[minor],
        memory_mib=81559 - minor,
        serial=f"16500230{minor:05d}",
    )


def all_gpus() -> tuple[SimGpu, ...]:
    """All sixteen, in order of their minor (and bus) numbers."""
    return tuple(gpu(minor) for minor in range(MAXIMUM_GPUS))


def device_nodes(gpus: int) -> list[DeviceNode]:
    """The nodes that the driver's modules and nvidia-modprobe leave in /dev on a machine with that many GPUs."""
    control = [
        DeviceNode("/dev/nvidiactl", NVIDIA_MAJOR, CONTROL_MINOR, 0o666),
        DeviceNode("/dev/nvidia-modeset", NVIDIA_MAJOR, MODESET_MINOR, 0o666),
        DeviceNode("/dev/nvidia-uvm", UVM_MAJOR, 0, 0o666),
        DeviceNode("/dev/nvidia-uvm-tools", UVM_MAJOR, 1, 0o666),
        # The driver's own access rule: the configuration capability is for root, monitoring for all.
        DeviceNode("/dev/nvidia-caps/nvidia-cap1", CAPS_MAJOR, 1, 0o400),
        DeviceNode("/dev/nvidia-caps/nvidia-cap2", CAPS_MAJOR, 2, 0o444),
    ]
    return [DeviceNode(f"/dev/nvidia{gpu(n).minor}", NVIDIA_MAJOR, n, 0o666) for n in range(gpus)] + control


# The GPU instances of a divided GPU, each with one compute instance (0).
MIG_INSTANCES = (1, 2)


def mig_minor(minor: int, instance: int, compute_instance: int | None = None) -> int:
    """The minor number of an instance's capability: a real driver gives one to each that could exist."""
    return 3 + minor * 135 + instance * 9 + (0 if compute_instance is None else compute_instance + 1)


def mig_uuid(minor: int, instance: int) -> str:
    """The UUID of the MIG device that a GPU instance's compute instance 0 is."""
    return f"MIG-{gpu(minor).uuid.removeprefix('GPU-')[:-2]}{instance}0"


def mig_nodes(minor: int) -> list[DeviceNode]:
    """The nodes of a divided GPU's instances."""
    numbers = [mig_minor(minor, instance, compute) for instance in MIG_INSTANCES for compute in (None, 0)]
    return [DeviceNode(f"/dev/nvidia-caps/nvidia-cap{number}", CAPS_MAJOR, number, 0o444) for number in numbers]


def render_c_table(driver_version: str = DRIVER_VERSION, cuda_version: str = CUDA_VERSION) -> str:
    """The same table as a C header, so that the stub libraries cannot disagree with this module."""
    rows = "\n".join(_c_row(one) for one in all_gpus())
    return (
        "/* Generated from gpus.py. */\n"
        f'#define SIMGPU_DRIVER_VERSION "{driver_version}"\n'
        f'#define SIMGPU_CUDA_VERSION "{cuda_version}"\n'
        f"static const struct simgpu simgpu_table[SIMGPU_MAX] = {{\n{rows}\n}};\n"
    )


def _c_row(one: SimGpu) -> str:
    device = one.device_id << 16 | one.vendor_id
    subsystem = one.subsystem_device_id << 16 | one.subsystem_vendor_id
    return (
        f'    {{{one.minor}, "{one.name}", "{one.uuid}", 0x{one.bus:02x}, 0x{device:08x}u, 0x{subsystem:08x}u, '
        f'{one.memory_mib}ull, "{one.serial}", "{one.vbios}"}},'
    )
