"""Which driver serves which GPU: generations by PCI device id, with branches and kernel modules for each.

Sources: NVIDIA's data-centre driver documentation (supported branches; 580 is the last for Maxwell, Pascal and Volta,
470 for Kepler), the open kernel modules' README (Turing and later; Blackwell and Grace Hopper require them). The ranges
of device ids are in protocol/models.json. They are a heuristic: an id outside all ranges has no restriction, and the
supported-gpus.json of an available .run decides: it lies in the payload behind the shell stub (makeself), and is read
without running the file. Its features: `kernelopen`, the open modules serve a GPU;
`gsp_proprietary_supported`, the proprietary ones too; `legacybranch`, the branch that was the last for it.
"""

from __future__ import annotations

import json
import lzma
import tarfile
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO

from gpuprov.core.system import System
from gpuprov.driver.installer import HEADER_BYTES, parse_header
from gpuprov.facts.gpus import Chip, Chips
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.models import Generation, generation_of, models
from gpuprov.protocol.tables import LONG_TERM_BRANCH, Tables
from gpuprov.protocol.versions import version_numbers

# First branch with open kernel modules for all GPUs that have a GSP; first branch whose installer prefers them; first
# branch without proprietary ones.
_OPEN_SINCE = (515, 43, 4)
_OPEN_PREFERRED_SINCE = (560,)
_OPEN_ONLY_SINCE = (620,)


def ids_of(names: Sequence[str], tables: Tables) -> tuple[str, ...]:
    """Return a device id of each generation, by the names of gpuprov_image_gpus, to represent future GPUs."""
    known = reversed(models(tables).generations)
    first = {row.name.lower().replace(" lovelace", "").replace(" ", "-"): row.first for row in known}
    if unknown := ", ".join(name for name in names if name not in first):
        what = "the table of GPU models lacks generations that gpuprov_image_gpus names"
        raise GpuprovError(what, unknown, "add them to the file that gpuprov_models names, or leave gpuprov_models out")
    return tuple(first[name] for name in names)


def settled_type(device_ids: Sequence[str], version: str, asked: str, tables: Tables) -> str:
    """Return open or proprietary; if both work, NVIDIA's recommendation for that version."""
    kind = module_type(device_ids, version, asked, tables)
    preferred = "open" if version_numbers(version or "0") >= _OPEN_PREFERRED_SINCE else "proprietary"
    return preferred if kind == "auto" else kind


def module_type(device_ids: Sequence[str], version: str, asked: str, tables: Tables) -> str:
    """Return which kernel modules to build: what was asked, or what serves all these GPUs; "auto" where both do."""
    if asked != "auto" or not version:
        return asked
    kinds = {row.modules for one in device_ids if (row := generation_of(one, tables))}
    by_version = "open" if version_numbers(version) >= _OPEN_ONLY_SINCE else "auto"
    return next((kind for kind in ("open", "proprietary") if kind in kinds), by_version)


def wanted_version(branch: int | str) -> str:
    """Return the setting that requests a branch, in quotes, for messages."""
    return f'gpuprov_driver_version: "{branch}"'


def last_branch(device_ids: Sequence[str], tables: Tables) -> str:
    """Return the last branch that serves all these GPUs, "" if the newest does."""
    ends = [row.newest for one in device_ids if (row := generation_of(one, tables)) and row.newest]
    return str(min(ends)) if ends else ""


def comparable_version(version: str) -> str:
    """Return a version for comparisons, of a branch the highest: another table has its newest release."""
    return f"{version}.999" if version.isdecimal() else version


def problems(device_ids: Sequence[str], version: str, asked: str, tables: Tables) -> tuple[Problem, ...]:
    """Return why a driver of this version, with the requested kernel modules, can't serve all these GPUs."""
    found = [(device_id, row) for device_id in sorted(set(device_ids)) if (row := generation_of(device_id, tables))]
    if not version or not found:
        return ()
    branches = tuple(problem for one in found if (problem := _branch_problem(*one, version)))
    gpus = [(device_id, row.name + " GPUs", row.modules) for device_id, row in found]
    kinds = _kind_problems(gpus, asked, "by their generation")
    kind = "" if kinds else module_type(device_ids, version, asked, tables)
    if kind == "open" and version_numbers(version) < _OPEN_SINCE:
        what = f"driver {version} has no open kernel modules for these GPUs"
        step = f"set a newer one: {wanted_version(LONG_TERM_BRANCH)}"
        return (*branches, Problem(what, "they came with 515.43.04", step))
    if kind == "proprietary" and version_numbers(version) >= _OPEN_ONLY_SINCE:
        what = f"driver {version} has no proprietary kernel modules any more"
        step = f"set {wanted_version(LONG_TERM_BRANCH)}, or gpuprov_kernel_module_type: open where the GPUs can"
        return (*branches, Problem(what, "620 was the first branch without", step))
    return (*branches, *kinds)


def _branch_problem(device_id: str, row: Generation, version: str) -> Problem | None:
    branch = version_numbers(version)[0]
    seen = f"PCI device 10de:{device_id} is {row.name}"
    if row.newest and branch > row.newest:
        what = f"driver {version} no longer serves this host's {row.name} GPU"
        return Problem(what, f"{seen}: {row.newest} is the last branch for it", f"set {wanted_version(row.newest)}")
    if branch < row.oldest:
        what = f"driver {version} does not know this host's {row.name} GPU yet"
        step = f"set {wanted_version(max(row.oldest, int(LONG_TERM_BRANCH)))}"
        return Problem(what, f"{seen}: {row.oldest} is the first branch for it", step)
    return None


def _kind_problems(gpus: Sequence[tuple[str, str, str]], asked: str, source: str) -> tuple[Problem, ...]:
    """Return why one set of kernel modules, the requested or any, can't serve all GPUs of a host.

    `gpus`: device id, name, modules as in Generation; `source`: what tells that.
    """
    closed, opened = ([one for one in gpus if one[2] == kind] for kind in ("proprietary", "open"))
    if closed and opened:
        what = f"this driver serves {closed[0][1]} and {opened[0][1]}, but not in one host"
        seen = f"{source}: {_listed(closed)} proprietary modules alone, {_listed(opened)} open ones alone"
        return (Problem(what, seen, "take one of them out, or bind it to vfio-pci for a virtual machine"),)
    wrong = {"open": closed, "proprietary": opened}.get(asked)
    if not wrong:
        return ()
    what, seen = f"{asked} kernel modules do not serve {wrong[0][1]}", f"{source}: {_listed(wrong)} {wrong[0][2]} ones"
    return (Problem(what, f"{seen} alone", f"set gpuprov_kernel_module_type: {wrong[0][2]}, or leave it out"),)


def _listed(gpus: Sequence[tuple[str, str, str]]) -> str:
    return ", ".join(f"10de:{one[0]}" for one in gpus) + (" has" if len(gpus) == 1 else " have")


_MEMBER = "supported-gpus/supported-gpus.json"
# The magic bytes of a payload, and tarfile's mode for it; none needs the whole in memory.
_FORMATS = ((b"\x1f\x8b", "r|gz"), (b"\xfd7zXZ\x00", "r|xz"), (b"BZh", "r|bz2"))
_ZSTD = b"\x28\xb5\x2f\xfd"
_FROM_ZSTD = 'tail -n +"$1" "$2" | zstd -dcq | tar -xOf - --wildcards "*supported-gpus.json"'
_LONGEST_STUB = 4 << 20
_SECONDS = 300


def gather_served(system: System, path: str) -> Chips:
    """Return the GPU list in the driver file at a path; none if the file or its list is missing."""
    start = system.read_start(path, HEADER_BYTES)
    try:
        skip = parse_header(start.decode("latin-1")).skip if start is not None else 0
    except GpuprovError:
        # The installation reports what the file is instead.
        return {}
    return read_supported_gpus(system, path, skip)


def read_supported_gpus(system: System, path: str, skip: int) -> Chips:
    """Return device id → chip of the .run whose payload begins at line `skip`; none if reading would be expensive."""
    try:
        with system.open(path) as file:
            start = _seek_payload(file, skip)
            if start != _ZSTD:
                text = _by_tarfile(file, start)
            elif system.which("zstd") is None:
                return {}
            else:
                text = system.run(("sh", "-c", _FROM_ZSTD, "sh", str(skip), path), timeout=_SECONDS).stdout
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error):
        return {}
    return parse_chips(text)


def _seek_payload(file: BinaryIO, skip: int) -> bytes:
    """Go to the first byte of the payload; return its first four bytes, which identify the compression."""
    if skip < 2:
        return b""
    for _ in range(skip - 1):
        # A line of the embedded decompressor may be long.
        if not file.readline(_LONGEST_STUB):
            return b""
    place = file.tell()
    start = file.read(6)
    file.seek(place)
    return _ZSTD if start.startswith(_ZSTD) else start


def _by_tarfile(file: BinaryIO, start: bytes) -> str:
    mode: Any = next((mode for magic, mode in _FORMATS if start.startswith(magic)), "")
    if not mode:
        return ""
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for member in archive:
            if member.name.endswith(_MEMBER):
                found = archive.extractfile(member)
                return found.read().decode("utf-8", "replace") if found is not None else ""
    return ""


def parse_chips(text: str) -> Chips:
    """Return device id (four digits, lower case) → chip; none for an invalid list."""
    try:
        rows: Any = json.loads(text)["chips"]
        features = [{str(one) for one in row.get("features") or ()} for row in rows]
        # Lists of branches before 560 do not mention proprietary modules, which serve all GPUs there.
        told = any("gsp_proprietary_supported" in one for one in features)
        found: dict[str, Chip] = {}
        for row, names in zip(rows, features):
            device_id = str(row["devid"]).lower().replace("0x", "", 1).zfill(4)
            legacy = str(row.get("legacybranch") or "").partition(".")[0]
            open_modules = "kernelopen" in names
            closed = not open_modules or not told or "gsp_proprietary_supported" in names
            # One id stands for several cards: one served card is enough.
            if device_id not in found or found[device_id].legacy_branch:
                found[device_id] = Chip(str(row.get("name") or "a GPU"), legacy, open_modules, closed)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return found


def listed_module_type(device_ids: Sequence[str], chips: Chips, asked: str, otherwise: str) -> str:
    """Return which modules to build: the requested kind, the kind that serves all GPUs, or `otherwise` if both do.

    A GPU that is not in the list has no restriction. Raises GpuprovError if no kind serves them all.
    """
    if found := listed_problems(device_ids, chips, asked):
        raise GpuprovError.several(found)
    kinds = {_kind_of(chips[one]) for one in device_ids if one in chips} - {"both"}
    return asked if asked != "auto" else next(iter(kinds), otherwise)


def listed_problems(device_ids: Sequence[str], chips: Chips, asked: str) -> tuple[Problem, ...]:
    """Return why the listed driver can't serve these GPUs with the requested kernel modules."""
    known = {device_id: chips[device_id] for device_id in sorted(set(device_ids)) if device_id in chips}
    gpus = [(device_id, chip.name, _kind_of(chip)) for device_id, chip in known.items()]
    legacy = tuple(
        Problem(
            f"this driver no longer serves {chip.name}",
            f"10de:{one} in its supported-gpus.json: legacy, branch {chip.legacy_branch} is the last for it",
            f"set {wanted_version(chip.legacy_branch)}",
        )
        for one, chip in known.items() if chip.legacy_branch
    )  # fmt: skip
    return legacy or _kind_problems(gpus, asked, "the driver's supported-gpus.json")


def _kind_of(chip: Chip) -> str:
    return "both" if chip.open_modules and chip.proprietary_modules else "open" if chip.open_modules else "proprietary"
