"""PCI trees of whole machines by their GPU models: GPUs, NVSwitches, and the adapters that manage switches.

Device ids are those of pci-ids.ucw.cz; bus ids are made up. Adapters that stand before NVLink 5 switches say SW_MNG in
their product data, as NVIDIA's Fabric Manager User Guide has it. L4 fractions are an L4 with the subsystem of a virtual
GPU (awslabs/amazon-eks-ami). GH200 and GB200 have their GPUs in PCI domains of their own.
"""

from dataclasses import dataclass
from pathlib import Path

_GPU, _BRIDGE = "0x030200", "0x068000"


@dataclass(frozen=True)
class Board:
    """A machine: GPUs of a device id, NVSwitches as bridges of NVIDIA's, adapters that manage switches."""

    device_id: str
    gpus: int
    switches: int = 0
    switch_id: str = ""
    adapters: int = 0
    subsystem: str = "16c1"
    domains: bool = False


BOARDS = {
    "V100 PCIe": Board("1db4", 4),
    "V100 HGX-1": Board("1db1", 8),
    "V100 HGX-2": Board("1db8", 16, switches=12, switch_id="1ac2"),
    "L4": Board("27b8", 8),
    "L4 fraction": Board("27b8", 1, subsystem="1733"),
    "H100 HGX": Board("2330", 8, switches=4, switch_id="22a3"),
    "GH200": Board("2342", 1, domains=True),
    "B200 HGX": Board("2901", 8, adapters=4),
    "B200 HGX without adapters": Board("2901", 8),
    "B200 in a guest": Board("2901", 1),
    "GB200 NVL72": Board("2941", 4, domains=True),
    "GB300 NVL72": Board("31c2", 4, domains=True),
}


def write_board(destination: Path, name: str) -> None:
    """Write destination/sys of a machine, in place of the PCI devices that are there. Raises KeyError for a name."""
    board = BOARDS[name]
    devices = destination / "sys/bus/pci/devices"
    for left in devices.glob("*"):
        for file in left.iterdir():
            file.unlink()
        left.rmdir()
    for number in range(board.gpus):
        # A tray of a rack has its superchips' GPUs in the domains 8, 9, 18 and 19.
        domain = (8, 9, 0x18, 0x19)[number] if board.domains else 0
        bus = 1 if board.domains else 0x10 + number
        _device(devices / f"{domain:04x}:{bus:02x}:00.0", board.device_id, _GPU, board.subsystem)
    for number in range(board.switches):
        _device(devices / f"0000:{0xC0 + number:02x}:00.0", board.switch_id, _BRIDGE, "0000")
    for number in range(board.adapters):
        folder = destination / f"sys/class/infiniband/mlx5_{number}/device"
        folder.mkdir(parents=True)
        (folder / "vpd").write_bytes(b"\x82\x00PN 900-9X\x00SW_MNG\x00")


def _device(folder: Path, device_id: str, kind: str, subsystem: str) -> None:
    folder.mkdir(parents=True)
    files = {"vendor": "0x10de", "device": f"0x{device_id}", "class": kind, "subsystem_vendor": "0x10de",
             "subsystem_device": f"0x{subsystem}", "numa_node": "0"}  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
