"""What nvidia-smi says of the GPUs: the one door through which its reports come in. The text may be hostile."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass

from gpuprov.errors import GpuprovError
from gpuprov.system import System

_LARGEST_REPORT = 8 << 20
_LOOK = "look at it: nvidia-smi -q -x"
# A GPU without a persistent client is initialised first: seconds for each.
_SECONDS = 120
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_COMPUTE_CAPABILITY = re.compile(r"\d+\.\d+")
_BRAND = re.compile(r"[A-Za-z][A-Za-z0-9 ]*")


@dataclass(frozen=True)
class SmiFacts:
    """What is known of a GPU through NVML alone; "" where nvidia-smi does not tell."""

    uuid: str = ""
    brand: str = ""
    compute_capability: str = ""


def ask(system: System) -> tuple[Mapping[str, SmiFacts], str]:
    """Return PCI bus id → facts, and the driver's CUDA version; nothing where nvidia-smi does not answer."""
    report = system.run(("nvidia-smi", "-q", "-x"), timeout=_SECONDS)
    if not report.ok:
        return {}, ""
    # The report has the brand, but not the compute capability; the query has that alone, from driver 510 on.
    query = ("nvidia-smi", "--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader")
    try:
        return parse_facts(report.stdout, system.run(query, timeout=_SECONDS).stdout)
    except GpuprovError:
        return {}, ""


def parse_facts(report: str, capabilities: str) -> tuple[Mapping[str, SmiFacts], str]:
    """Return what ask() does, from the texts of report and query. Raises GpuprovError for what is no report."""
    root = xml_root(report)
    lines = (line.partition(", ") for line in capabilities.splitlines())
    capability = {sysfs_bus_id(bus_id): value for bus_id, _, value in lines if _COMPUTE_CAPABILITY.fullmatch(value)}
    found = {}
    for gpu in root.findall("gpu"):
        bus_id = sysfs_bus_id(gpu.findtext("pci/pci_bus_id") or "")
        # As images name it in NVIDIA_REQUIRE_CUDA: `brand=geforcertx`.
        brand = _matching(_BRAND, gpu.findtext("product_brand")).replace(" ", "")
        uuid = _matching(_UUID, gpu.findtext("uuid"))
        found[bus_id] = SmiFacts(uuid, brand, capability.get(bus_id, ""))
    return found, _matching(_COMPUTE_CAPABILITY, root.findtext("cuda_version"))


def xml_root(text: str) -> ElementTree.Element:
    """Return the report's root element. Raises GpuprovError if it is too large, has entities, or is no XML."""
    if len(text) > _LARGEST_REPORT or "<!ENTITY" in text:
        raise GpuprovError("nvidia-smi's output is no report", "too large, or with entities of its own", _LOOK)
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        start = text.strip()[:200]
        raise GpuprovError("nvidia-smi's output is no XML report", f"{error}: {start}", _LOOK) from None


def sysfs_bus_id(text: str) -> str:
    """Return a PCI bus id as the kernel writes it: NVML's 00000000:1B:00.0 is 0000:1b:00.0."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:] if domain[:-4].strip('0') == '' else domain.lstrip('0')}:{rest}"


def _matching(pattern: re.Pattern[str], text: str | None) -> str:
    """Return the text if it is of that form: `N/A`, `[Unknown Error]` and worse are not."""
    found = (text or "").strip()
    return found if pattern.fullmatch(found) else ""
