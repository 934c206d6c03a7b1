"""Writes what a kernel with the loaded nvidia module shows in /sys and /proc, for a host that has neither.

The formats are those of the real files; the caller mounts them over its own /sys/bus/pci/devices, /proc/driver/nvidia
and /proc/devices. It creates no device nodes: `gpus.device_nodes` lists those.
"""

from pathlib import Path
from typing import Literal

from .gpus import CAPS_MAJOR, DRIVER_VERSION, MIG_INSTANCES, NVIDIA_MAJOR, UVM_MAJOR, SimGpu, gpu, mig_minor

# The kernel's driver names its build as this: version, date, builder and the compiler on the second line.
_VERSION = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Apr  8 12:41:17 UTC 2025\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1) \n"
)
_OPEN_VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (dvs-builder@U22-I3)  "
    "Tue Apr  8 12:41:17 UTC 2025\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1) \n"
)
_PARAMS = (
    "ResmanDebugLevel: 4294967295\nRmLogonRC: 1\nModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\n"
    "DeviceFileMode: 438\nInitializeSystemMemoryAllocations: 1\nUsePageAttributeTable: 4294967295\n"
    "EnableMSI: 1\nEnablePCIeGen3: 0\nMemoryPoolSize: 0\nKMallocHeapMaxSize: 0\nVMallocHeapMaxSize: 0\n"
    "IgnoreMMIOCheck: 0\nEnableStreamMemOPs: 0\nEnableUserNUMAManagement: 1\nNvLinkDisable: 0\n"
    "RmProfilingAdminOnly: 1\nPreserveVideoMemoryAllocations: 0\nEnableS0ixPowerManagement: 0\n"
    "S0ixPowerManagementVideoMemoryThreshold: 256\nDynamicPowerManagement: 3\n"
    "DynamicPowerManagementVideoMemoryThreshold: 200\nRegisterPCIDriver: 1\nEnablePCIERelaxedOrderingMode: 0\n"
    "EnableResizableBar: 0\nEnableGpuFirmware: 18\nEnableGpuFirmwareLogs: 2\nRmNvlinkBandwidthLinkCount: 0\n"
    'EnableDbgBreakpoint: 0\nOpenRmEnableUnsupportedGpus: 1\nDmaRemapPeerMmio: 1\nRegistryDwords: ""\n'
    'RegistryDwordsPerDevice: ""\nRmMsg: ""\nGpuBlacklist: ""\nTemporaryFilePath: ""\nExcludedGpus: ""\n'
)
# From 550.40.07 on the kernel lists three names for major 195; before, the one frontend.
_FIRST_VERSION_WITHOUT_FRONTEND = 550


def write_kernel_tree(
    destination: Path,
    gpus: int,
    version: str = DRIVER_VERSION,
    *,
    driver: Literal["nvidia", "nouveau"] | None = "nvidia",
    open_module: bool = False,
    divided: tuple[int, ...] = (),
) -> None:
    """Writes destination/{sys,proc} for a machine with `gpus` GPUs that `driver` is bound to.

    With "nvidia" the modules are loaded: /proc/driver/nvidia, /proc/devices, /proc/modules and /sys/module show it;
    `open_module` gives the version line of the open modules. "nouveau" and None (no driver yet) have none of that.
    The GPUs with a minor in `divided` have MIG instances. Raises ValueError for more than sixteen GPUs.
    """
    cards = [gpu(minor) for minor in range(gpus)]
    bus = destination / "sys" / "bus" / "pci"
    _write_all(bus / "devices" / "0000:00:00.0", _host_bridge())
    for card in cards:
        _write_all(bus / "devices" / card.sysfs_id, _pci_device(card, driver))
        if driver:
            (bus / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            _link(bus / "devices" / card.sysfs_id / "driver", f"../../drivers/{driver}")
    loaded = version if driver == "nvidia" else None
    _write_all(destination / "proc", {"devices": proc_devices(loaded), "modules": _MODULES.get(driver or "", "")})
    if loaded:
        _write_nvidia(destination, cards, version, _OPEN_VERSION if open_module else _VERSION)
        _write_mig(destination / "proc" / "driver", cards, divided)


def _write_nvidia(destination: Path, cards: list[SimGpu], version: str, version_format: str) -> None:
    nvidia = destination / "proc" / "driver" / "nvidia"
    text = version_format.format(version=version)
    _write_all(nvidia, {"version": text, "params": _PARAMS, "registry": 'Binary: ""\n'})
    for card in cards:
        files = {"information": information(card, version), "registry": 'Binary: ""\n', "power": _POWER}
        _write_all(nvidia / "gpus" / card.sysfs_id, files)
    for module in ("nvidia", "nvidia_modeset", "nvidia_uvm"):
        files = {"version": f"{version}\n", "initstate": "live\n", "refcnt": "0\n"}
        _write_all(destination / "sys" / "module" / module, files)


def _write_mig(driver: Path, cards: list[SimGpu], divided: tuple[int, ...]) -> None:
    """Every capability that there could be has its minor; only those of instances that exist have a file."""
    rights = driver / "nvidia" / "capabilities"
    _write_all(rights / "mig", {"config": _capability(1, 0o400), "monitor": _capability(2, 0o444)})
    lines = ["config 1", "monitor 2"]
    for card in cards:
        for instance in range(15):
            lines.append(f"gpu{card.minor}/gi{instance}/access {mig_minor(card.minor, instance)}")
            for compute in range(8):
                number = mig_minor(card.minor, instance, compute)
                lines.append(f"gpu{card.minor}/gi{instance}/ci{compute}/access {number}")
    _write_all(driver / "nvidia-caps", {"mig-minors": "\n".join([*lines, ""])})
    for minor in divided:
        for instance in MIG_INSTANCES:
            folder = rights / f"gpu{minor}" / "mig" / f"gi{instance}"
            _write_all(folder, {"access": _capability(mig_minor(minor, instance), 0o444)})
            _write_all(folder / "ci0", {"access": _capability(mig_minor(minor, instance, 0), 0o444)})


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


# /proc/modules: name, size, references, users, state, address, taint.
_MODULES = {
    "nvidia": (
        "nvidia_uvm 4866048 0 - Live 0x0000000000000000 (POE)\n"
        "nvidia_modeset 1363968 0 - Live 0x0000000000000000 (POE)\n"
        "nvidia 54243328 2 nvidia_uvm,nvidia_modeset, Live 0x0000000000000000 (POE)\n"
    ),
    "nouveau": "nouveau 2433024 1 - Live 0x0000000000000000\n",
}
_POWER = (
    "Runtime D3 status:          Disabled by default\nVideo Memory:               Active\n\n"
    "GPU Hardware Support:\n Video Memory Self Refresh: Not Supported\n Video Memory Off:          Supported\n"
)


def _write_all(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def _host_bridge() -> dict[str, str]:
    """Something that is not a GPU: code that takes every PCI device for one must not pass."""
    return {
        "vendor": "0x8086\n",
        "device": "0x1237\n",
        "class": "0x060000\n",
        "revision": "0x02\n",
        "subsystem_vendor": "0x0000\n",
        "subsystem_device": "0x0000\n",
        "numa_node": "0\n",
        "modalias": "pci:v00008086d00001237sv00000000sd00000000bc06sc00i00\n",
        "uevent": "PCI_CLASS=60000\nPCI_ID=8086:1237\nPCI_SUBSYS_ID=0000:0000\nPCI_SLOT_NAME=0000:00:00.0\n",
    }


def _pci_device(card: SimGpu, driver: str | None) -> dict[str, str]:
    modalias = (
        f"pci:v{card.vendor_id:08X}d{card.device_id:08X}sv{card.subsystem_vendor_id:08X}"
        f"sd{card.subsystem_device_id:08X}bc03sc02i00"
    )
    uevent = [
        "PCI_CLASS=30200",
        f"PCI_ID={card.vendor_id:04X}:{card.device_id:04X}",
        f"PCI_SUBSYS_ID={card.subsystem_vendor_id:04X}:{card.subsystem_device_id:04X}",
        f"PCI_SLOT_NAME={card.sysfs_id}",
        f"MODALIAS={modalias}",
    ]
    if driver:
        uevent.insert(0, f"DRIVER={driver}")
    return {
        "vendor": f"0x{card.vendor_id:04x}\n",
        "device": f"0x{card.device_id:04x}\n",
        "class": "0x030200\n",
        "revision": "0xa1\n",
        "subsystem_vendor": f"0x{card.subsystem_vendor_id:04x}\n",
        "subsystem_device": f"0x{card.subsystem_device_id:04x}\n",
        "boot_vga": "0\n",
        "enable": "1\n" if driver else "0\n",
        "numa_node": f"{card.numa_node}\n",
        "local_cpulist": "0-1\n",
        "modalias": modalias + "\n",
        "uevent": "\n".join(uevent) + "\n",
    }


def information(card: SimGpu, version: str) -> str:
    """Returns what the driver says of a GPU in /proc/driver/nvidia/gpus/BUSID/information."""
    return (
        f"Model: \t\t {card.name}\n"
        f"IRQ:   \t\t {64 + card.minor}\n"
        f"GPU UUID: \t {card.uuid}\n"
        f"Video BIOS: \t {card.vbios}\n"
        "Bus Type: \t PCIe\n"
        "DMA Size: \t 52 bits\n"
        "DMA Mask: \t 0xfffffffffffff\n"
        f"Bus Location: \t {card.sysfs_id}\n"
        f"Device Minor: \t {card.minor}\n"
        f"GPU Firmware: \t {version}\n"
        "GPU Excluded:\t No\n"
    )


def _capability(minor: int, mode: int) -> str:
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"


def proc_devices(version: str | None, machine: Path = Path("/proc/devices")) -> str:
    """This machine's /proc/devices with the driver's lines for that version added; None adds none."""
    text = machine.read_text()
    if version is None:
        return text
    head, separator, block = text.partition("\nBlock devices:")
    named = [(number, name) for number, name in (_device_line(line) for line in head.splitlines()[1:]) if name]
    if int(version.partition(".")[0]) < _FIRST_VERSION_WITHOUT_FRONTEND:
        named.append((NVIDIA_MAJOR, "nvidia-frontend"))
    else:
        named += [(NVIDIA_MAJOR, name) for name in ("nvidia", "nvidia-modeset", "nvidiactl")]
    named += [(UVM_MAJOR, "nvidia-uvm"), (CAPS_MAJOR, "nvidia-caps")]
    lines = [f"{number:3d} {name}" for number, name in sorted(named, key=lambda pair: pair[0])]
    return "\n".join(["Character devices:", *lines, ""]) + separator + block


def _device_line(line: str) -> tuple[int, str]:
    number, _, name = line.strip().partition(" ")
    return (int(number), name) if number.isdigit() else (0, "")
