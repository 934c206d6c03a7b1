"""nvidia-smi's exit codes, its report, and where two reports differ. Pure; the text may come from a hostile image."""

from __future__ import annotations

import contextlib
import functools
import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping

from gpuprov.core.commands import Failure, failures
from gpuprov.protocol.dataclass import dataclass, field, fields
from gpuprov.protocol.errors import GpuprovError

_LARGEST_REPORT = 8 << 20
_LOOK = "look at it: nvidia-smi -q -x"
# XML has none of these; nvidia-smi prints them as they are in names of processes, which users choose.
_NO_XML = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 0xFFFE, 0xFFFF], "?")
LOOK = "nvidia-smi; dmesg | grep -i -e nvrm -e xid"


@functools.cache
def exits(program: str = "nvidia-smi") -> Mapping[int, Failure]:
    """Return the meanings of a program's exit codes; a row without a next step has one that depends on the host."""
    return {row.returncode: row for row in failures(program) if row.returncode >= 0}


def exit_code(returncode: int) -> int:
    """Return the manual's code: nvidia-smi exits with NVML's, 11 (NVML_ERROR_IRQ_ISSUE) for the manual's 10."""
    return {11: 10}.get(returncode, returncode)


@dataclass(frozen=True)
class SmiGpu:
    """A GPU in a report: the fields that must be the same wherever it is looked at from.

    `called`: what people call a field; `place`: where it stands in the XML. Temperature, usage, clocks and processes
    change by themselves and are left out.
    """

    uuid: str = field(metadata={"called": "UUID", "place": "uuid"})
    name: str = field(metadata={"called": "name", "place": "product_name"})
    bus_id: str = field(metadata={"called": "PCI bus id", "place": "pci/pci_bus_id"})
    minor: str = field(metadata={"called": "minor number", "place": "minor_number"})
    memory: str = field(metadata={"called": "memory", "place": "fb_memory_usage/total"})
    mig: str = field(metadata={"called": "MIG mode", "place": "mig_mode/current_mig"})
    part: str = field(default="", metadata={"called": "first MIG device", "place": "mig_devices/mig_device/index"})


@dataclass(frozen=True)
class SmiReport:
    """A report: driver, CUDA version, GPUs."""

    driver: str
    cuda: str
    gpus: tuple[SmiGpu, ...]

    @property
    def last_alone(self) -> str:
        """The name by which a container asks for the last GPU; of a divided one its first MIG device can be asked."""
        number, last = len(self.gpus) - 1, self.gpus[-1]
        return f"{number}:{last.part}" if last.part else last.uuid if number else "0"


def parse_smi(text: str) -> SmiReport:
    """Return the report in nvidia-smi's XML. Raises GpuprovError if it is none."""
    if not _is_bounded(text):
        raise GpuprovError("nvidia-smi's output is no report", "too large, or with entities of its own", _LOOK)
    try:
        root = ElementTree.fromstring(text.translate(_NO_XML))
    except ElementTree.ParseError as error:
        raise GpuprovError("nvidia-smi's output is no XML report", f"{error}: {text.strip()[:200]}", _LOOK) from None
    gpus = tuple(
        SmiGpu(**{one.name: (gpu.findtext(one.metadata["place"]) or "").strip() for one in fields(SmiGpu)})
        for gpu in root.findall("gpu")
    )
    driver, cuda = ((root.findtext(name) or "").strip() for name in ("driver_version", "cuda_version"))
    return SmiReport(driver, cuda, gpus)


def difference(host: SmiReport, container: SmiReport) -> tuple[str, str, str] | None:
    """Return the first field that differs, as each has it: driver, CUDA, count, then each GPU's in turn."""
    rows = [
        ("driver", host.driver, container.driver),
        ("CUDA", host.cuda, container.cuda),
        ("GPU count", str(len(host.gpus)), str(len(container.gpus))),
    ]
    for index, (ours, theirs) in enumerate(zip(host.gpus, container.gpus)):
        for one in fields(SmiGpu):
            rows.append((f"GPU {index} {one.metadata['called']}", getattr(ours, one.name), getattr(theirs, one.name)))
    return next((row for row in rows if row[1] != row[2]), None)


# The doctor's rules look into the same report one by one.
@functools.lru_cache(maxsize=4)
def per_gpu(report: str) -> tuple[Mapping[str, str], ...]:
    """Return path → text of the elements of each GPU in `nvidia-smi -q -x`, up to where the report goes.

    It may have warnings around it, or be cut off by a GPU that hangs.
    """
    content = report[max(report.find("<"), 0) :].translate(_NO_XML) if _is_bounded(report) else ""
    gpus: list[ElementTree.Element] = []
    with contextlib.suppress(ElementTree.ParseError):
        for _, element in ElementTree.iterparse(io.BytesIO(content.encode("utf-8", "replace")), ("start",)):
            if element.tag == "gpu" and "id" in element.attrib:
                gpus.append(element)
    found = []
    for gpu in gpus:
        elements, texts = [(gpu, "")], dict[str, str]()
        for element, place in elements:
            elements += [(one, f"{place}/{one.tag}".lstrip("/")) for one in element]
            texts.setdefault(place, (element.text or "").strip())
        found.append(texts)
    return tuple(found)


def _is_bounded(text: str) -> bool:
    return len(text) <= _LARGEST_REPORT and "<!ENTITY" not in text
