"""C sources for a real kernel: the driver's table of GPUs, and modules that give a virtual machine such GPUs.

They are built elsewhere, against a kernel's headers: the driver by DKMS on the host, the machine's by its maker.
"""

from .cache import SOURCES
from .gpus import all_gpus
from .kernel_tree import information


def kernel_header(version: str) -> str:
    """Returns gpus.h of the driver's module: bus id and information of each GPU, by minor."""
    rows = "".join(f"\t{{{_literal(card.sysfs_id)}, {_literal(information(card, version))}}},\n" for card in all_gpus())
    return f"static const struct {{\n\tconst char *bus_id, *information;\n}} gpus[] = {{\n{rows}}};\n"


def module_sources(version: str, flavour: str) -> dict[str, str]:
    """Returns name → text of the driver's modules and their dkms.conf; `flavour`: kernel (proprietary), kernel-open."""
    values = {"@VERSION@": version, "@LICENSE@": "Dual MIT/GPL" if flavour == "kernel-open" else "NVIDIA"}
    sources = {path.name: path.read_text() for path in sorted((SOURCES / "kernel").iterdir())}
    for placeholder, value in values.items():
        sources = {name: text.replace(placeholder, value) for name, text in sources.items()}
    return {**sources, "gpus.h": kernel_header(version)}


def machine_sources() -> dict[str, str]:
    """Returns name → text of two modules: `simpci` (PCI buses with GPUs) and a `nouveau` that takes them at boot."""
    cards = all_gpus()
    values = {
        "@BUSES@": ", ".join(hex(card.bus) for card in cards),
        "@VENDOR@": hex(cards[0].vendor_id),
        "@DEVICE@": hex(cards[0].device_id),
        "@SUBSYSTEM_VENDOR@": hex(cards[0].subsystem_vendor_id),
        "@SUBSYSTEM_DEVICE@": hex(cards[0].subsystem_device_id),
    }
    sources = {path.name: path.read_text() for path in sorted((SOURCES / "machine").iterdir())}
    for placeholder, value in values.items():
        sources = {name: text.replace(placeholder, value) for name, text in sources.items()}
    return sources


def _literal(text: str) -> str:
    return '"' + text.replace("\t", "\\t").replace("\n", "\\n") + '"'
