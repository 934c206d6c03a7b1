"""What `nvidia-smi -q -x` says, and where two such reports differ. Pure; the text may come from a hostile image."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

from gpuprov.protocol.errors import GpuprovError

_LARGEST_REPORT = 8 << 20
_LOOK = "look at it: nvidia-smi -q -x"


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
