"""nvidia-smi's exit codes, its report, and where two reports differ. Pure; the text may come from a hostile image."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass

from gpuprov.protocol.errors import GpuprovError

_LARGEST_REPORT = 8 << 20
_LOOK = "look at it: nvidia-smi -q -x"


@dataclass(frozen=True)
class Exit:
    """An exit code of nvidia-smi: its meaning, and the next command; "" if that depends on the host."""

    what: str
    next_step: str = ""


# Not nvidia-caps, a folder, which nobody could enter then.
OPEN_NODES = "chmod 0666 /dev/nvidia[0-9]* /dev/nvidiactl /dev/nvidia-uvm*"
LOOK = "nvidia-smi; dmesg | grep -i -e nvrm -e xid"
# nvidia-smi's manual, "RETURN VALUE", and recorded runs; its message comes on stdout.
EXITS: Mapping[int, Exit] = {
    3: Exit("nvidia-smi and the driver do not fit together (an operation that this GPU does not have)"),
    4: Exit("nvidia-smi may not open the devices", f"ls -l /dev/nvidia*; {OPEN_NODES}"),
    6: Exit("the driver serves no GPU", "dmesg | grep -i nvrm"),
    8: Exit("a GPU lacks its power cable", "poweroff  # then connect the GPU's power cables"),
    9: Exit("nvidia-smi does not reach the driver", "modprobe -a nvidia nvidia-uvm; dmesg | grep -i nvrm"),
    10: Exit("the kernel has trouble with a GPU's interrupts", "dmesg | grep -i -e nvrm -e irq; systemctl reboot"),
    12: Exit(
        "libnvidia-ml.so.1 can't be loaded", "ldconfig; ldconfig -p | grep libnvidia-ml  # lists none: gpuprov install"
    ),
    13: Exit("libnvidia-ml.so.1 is of another version than nvidia-smi"),
    14: Exit("a GPU's infoROM is corrupted", "nvidia-bug-report.sh  # replace the GPU (RMA)"),
    15: Exit("a GPU is lost: it has fallen off the bus", "systemctl reboot  # if it comes back: power, seating, heat"),
    17: Exit("the driver could not take the GPU's memory or its interrupts", "dmesg | grep -i nvrm; systemctl reboot"),
    18: Exit("libraries and kernel module are of different versions"),
    124: Exit("nvidia-smi hangs: a GPU does not answer", "dmesg | grep -i -e nvrm -e xid; systemctl reboot"),
    255: Exit("nvidia-smi fails in a way that it has no number for", LOOK),
}


def exit_code(returncode: int) -> int:
    """Return the manual's code: nvidia-smi exits with NVML's, 11 (NVML_ERROR_IRQ_ISSUE) for the manual's 10."""
    return {11: 10}.get(returncode, returncode)


@dataclass(frozen=True)
class SmiGpu:
    """A GPU in a report: the fields that must be the same wherever it is looked at from."""

    uuid: str
    name: str
    bus_id: str
    minor: str
    memory: str
    mig: str


@dataclass(frozen=True)
class SmiReport:
    """A report: driver, CUDA version, GPUs."""

    driver: str
    cuda: str
    gpus: tuple[SmiGpu, ...]


@dataclass(frozen=True)
class Compared:
    """One field, as the host has it and as the container has it."""

    field: str
    host: str
    container: str

    @property
    def same(self) -> bool:
        return self.host == self.container


# Field of SmiGpu, what people call it, where it stands in the XML. Temperature, usage, clocks and processes change by
# themselves and are left out.
_FIELDS = (
    ("uuid", "UUID", "uuid"),
    ("name", "name", "product_name"),
    ("bus_id", "PCI bus id", "pci/pci_bus_id"),
    ("minor", "minor number", "minor_number"),
    ("memory", "memory", "fb_memory_usage/total"),
    ("mig", "MIG mode", "mig_mode/current_mig"),
)


def parse_smi(text: str) -> SmiReport:
    """Return the report in nvidia-smi's XML. Raises GpuprovError if it is none."""
    root = _xml_root(text)
    gpus = tuple(
        SmiGpu(**{field: (gpu.findtext(place) or "").strip() for field, _, place in _FIELDS})
        for gpu in root.findall("gpu")
    )
    return SmiReport(
        (root.findtext("driver_version") or "").strip(), (root.findtext("cuda_version") or "").strip(), gpus
    )


def compare(host: SmiReport, container: SmiReport) -> tuple[Compared, ...]:
    """Return every field side by side: driver, CUDA, count, then each GPU's, in the host's order."""
    rows = [
        Compared("driver", host.driver, container.driver),
        Compared("CUDA", host.cuda, container.cuda),
        Compared("GPU count", str(len(host.gpus)), str(len(container.gpus))),
    ]
    for index, (ours, theirs) in enumerate(zip(host.gpus, container.gpus)):
        rows += [
            Compared(f"GPU {index} {what}", getattr(ours, field), getattr(theirs, field)) for field, what, _ in _FIELDS
        ]
    return tuple(rows)


def _xml_root(text: str) -> ElementTree.Element:
    """Return the report's root element. Raises GpuprovError if it is too large, has entities, or is no XML."""
    if len(text) > _LARGEST_REPORT or "<!ENTITY" in text:
        raise GpuprovError("nvidia-smi's output is no report", "too large, or with entities of its own", _LOOK)
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        start = text.strip()[:200]
        raise GpuprovError("nvidia-smi's output is no XML report", f"{error}: {start}", _LOOK) from None
