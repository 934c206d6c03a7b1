"""Which driver serves which GPU: generations by PCI device id, with branches and kernel modules for each.

Sources: NVIDIA's data-centre driver documentation (supported branches; 580 is the last for Maxwell, Pascal and Volta,
470 for Kepler), the open kernel modules' README (Turing and later; Blackwell and Grace Hopper require them). The ranges
of device ids are those of the PCI ID database of 2026-10-24. They are a heuristic: an id outside all ranges has no
restriction, and the supported-gpus.json of an available .run decides: it lies in the payload behind the shell stub
(makeself), and is read without running the file. Its features: `kernelopen`, the open modules serve a GPU;
`gsp_proprietary_supported`, the proprietary ones too; `legacybranch`, the branch that was the last for it.
"""

from __future__ import annotations

import json
import lzma
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from gpuprov.core.system import System
from gpuprov.driver.installer import HEADER_BYTES, parse_header
from gpuprov.facts.gpus import Chip, Chips
from gpuprov.protocol.driver_releases import LONG_TERM_BRANCH
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.versions import version_numbers

# First branch with open kernel modules for all GPUs that have a GSP; first branch whose installer prefers them; first
# branch without proprietary ones.
_OPEN_SINCE = (515, 43, 4)
_OPEN_PREFERRED_SINCE = (560,)
_OPEN_ONLY_SINCE = (620,)


@dataclass(frozen=True)
class Generation:
    """A generation of GPUs: PCI device ids from `first` to `last`, driver branches from `oldest` to `newest` (0: all).

    `modules`: the supported kernel modules: "proprietary", "open", or "both".
    """

    name: str
    first: int
    last: int
    oldest: int
    newest: int
    modules: str


# Device ids were assigned by generation, with some exceptions: the first matching row wins.
_GENERATIONS = (
    Generation("Fermi or older", 0x0000, 0x0FBF, 0, 390, "proprietary"),
    Generation("Kepler", 0x0FC0, 0x103F, 304, 470, "proprietary"),
    # GF119 and GF117, two rows of GT218.
    Generation("Fermi or older", 0x1040, 0x117F, 0, 390, "proprietary"),
    Generation("Kepler", 0x1180, 0x11FF, 304, 470, "proprietary"),
    # GF114, GF116.
    Generation("Fermi or older", 0x1200, 0x127F, 0, 390, "proprietary"),
    Generation("Kepler", 0x1280, 0x133F, 304, 470, "proprietary"),
    Generation("Maxwell", 0x1340, 0x14FF, 340, 580, "proprietary"),
    Generation("Pascal", 0x1580, 0x15FF, 375, 580, "proprietary"),
    Generation("Maxwell", 0x1600, 0x16FF, 340, 580, "proprietary"),
    # GP100 between two islands of Maxwell.
    Generation("Pascal", 0x1725, 0x172F, 375, 580, "proprietary"),
    Generation("Maxwell", 0x1730, 0x17FF, 340, 580, "proprietary"),
    Generation("Volta", 0x1D81, 0x1DFF, 384, 580, "proprietary"),
    Generation("Pascal", 0x1B00, 0x1D80, 367, 580, "proprietary"),
    Generation("Turing", 0x1E00, 0x1FFF, 410, 0, "both"),
    Generation("Ampere", 0x2080, 0x20FF, 450, 0, "both"),
    Generation("Turing", 0x2180, 0x21FF, 418, 0, "both"),
    Generation("Ampere", 0x2200, 0x22BF, 455, 0, "both"),
    # Grace Hopper (GH200): no proprietary modules.
    Generation("Grace Hopper", 0x2342, 0x2348, 535, 0, "open"),
    Generation("Hopper", 0x2300, 0x23FF, 525, 0, "both"),
    Generation("Ampere", 0x2400, 0x25FF, 455, 0, "both"),
    Generation("Ada Lovelace", 0x2600, 0x28FF, 525, 0, "both"),
    Generation("Blackwell", 0x2900, 0x2DFF, 570, 0, "open"),
    # GB10 (DGX Spark) and related chips: 580 is the first branch that is known to serve them.
    Generation("Blackwell", 0x2E00, 0x2E7F, 580, 0, "open"),
    Generation("Blackwell", 0x2F00, 0x2F7F, 570, 0, "open"),
    # GR100: CUDA 13.4 and its driver R615 are the first with Rubin (CUTLASS 4.8, release notes).
    Generation("Rubin", 0x3000, 0x30FF, 615, 0, "open"),
    # B300, GB300 (GB110, GB112, GB120), Thor's iGPU (GB10B): 580 is the first branch that is known to serve them.
    Generation("Blackwell Ultra", 0x3180, 0x34FF, 580, 0, "open"),
)


def generation_of(device_id: str) -> Generation | None:
    """Return the generation of a PCI device id (four hexadecimal digits), None for one that the table does not know."""
    try:
        number = int(device_id, 16)
    except ValueError:
        return None
    return next((row for row in _GENERATIONS if row.first <= number <= row.last), None)


def ids_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return a device id of each generation, by the names of gpuprov_image_gpus, to represent future GPUs."""
    rows = {_plain_name(row): row for row in reversed(_GENERATIONS)}
    return tuple(f"{rows[name].first:04x}" for name in names)


def _plain_name(row: Generation) -> str:
    return row.name.lower().replace(" lovelace", "").replace(" ", "-")


def settled_type(device_ids: Sequence[str], version: str, asked: str) -> str:
    """Return open or proprietary; if both work, NVIDIA's recommendation for that version."""
    kind = module_type(device_ids, version, asked)
    preferred = "open" if version_numbers(version or "0") >= _OPEN_PREFERRED_SINCE else "proprietary"
    return preferred if kind == "auto" else kind


def module_type(device_ids: Sequence[str], version: str, asked: str) -> str:
    """Return which kernel modules to build: what was asked, or what serves all these GPUs; "auto" where both do."""
    if asked != "auto" or not version:
        return asked
    kinds = {one.modules for one in map(generation_of, device_ids) if one}
    if "open" in kinds:
        return "open"
    if "proprietary" in kinds:
        return "proprietary"
    return "open" if version_numbers(version) >= _OPEN_ONLY_SINCE else "auto"


def packaged_type(device_ids: Sequence[str], branch: str, asked: str) -> str:
    """Return open or proprietary, for packages of a branch or version; if both work, open, as NVIDIA recommends.

    Without a branch or version it is the newest, which only the repository knows.
    """
    kind = module_type(device_ids, newest_of(branch) or "580.999", asked)
    return "open" if kind == "auto" else kind


def wanted_version(branch: int | str) -> str:
    """Return the setting that requests a branch, in quotes, for messages."""
    return f'gpuprov_driver_version: "{branch}"'


def last_branch(device_ids: Sequence[str]) -> str:
    """Return the last branch that serves all these GPUs, "" if the newest does."""
    ends = [row.newest for row in map(generation_of, device_ids) if row and row.newest]
    return str(min(ends)) if ends else ""


def newest_of(version: str) -> str:
    """Return a version for comparisons, of a branch the highest: another table has its newest release."""
    return f"{version}.999" if version.isdigit() else version


def problems(device_ids: Sequence[str], version: str, asked: str) -> tuple[Problem, ...]:
    """Return why a driver of this version, with the requested kernel modules, can't serve all these GPUs."""
    found = [(device_id, row) for device_id in sorted(set(device_ids)) if (row := generation_of(device_id))]
    if not version or not found:
        return ()
    branches = tuple(problem for one in found if (problem := _branch_problem(*one, version)))
    mixed = _mixed(found)
    if mixed:
        return (*branches, mixed)
    return (*branches, *_module_problems(found, version, asked))


def _branch_problem(device_id: str, row: Generation, version: str) -> Problem | None:
    branch = version_numbers(version)[0]
    seen = f"PCI device 10de:{device_id} is {row.name}"
    if row.newest and branch > row.newest:
        return Problem(
            f"driver {version} no longer serves this host's {row.name} GPU",
            f"{seen}: {row.newest} is the last branch for it",
            f"set {wanted_version(row.newest)}",
        )
    if branch < row.oldest:
        return Problem(
            f"driver {version} does not know this host's {row.name} GPU yet",
            f"{seen}: {row.oldest} is the first branch for it",
            f"set {wanted_version(max(row.oldest, int(LONG_TERM_BRANCH)))}",
        )
    return None


def _mixed(found: Sequence[tuple[str, Generation]]) -> Problem | None:
    """One set of kernel modules serves all GPUs of a host: with an old one and a new one there may be none."""
    old = next((one for one in found if one[1].modules == "proprietary"), None)
    new = next((one for one in found if one[1].modules == "open"), None)
    if old is None or new is None:
        return None
    return Problem(
        f"no driver serves a {old[1].name} and a {new[1].name} GPU in one host",
        f"10de:{old[0]} needs proprietary kernel modules, 10de:{new[0]} has open ones alone",
        "take one of them out, or bind it to vfio-pci for a virtual machine",
    )


def _module_problems(found: Sequence[tuple[str, Generation]], version: str, asked: str) -> tuple[Problem, ...]:
    kind = module_type([device_id for device_id, _ in found], version, asked)
    problems = []
    for device_id, row in found:
        if kind in ("open", "proprietary") and row.modules not in ("both", kind):
            problems.append(
                Problem(
                    f"{kind} kernel modules can't drive this host's {row.name} GPU",
                    f"PCI device 10de:{device_id} has {row.modules} ones alone",
                    f"set gpuprov_kernel_module_type: {row.modules}, or leave it out",
                )
            )
    if kind == "open" and version_numbers(version) < _OPEN_SINCE:
        problems.append(
            Problem(
                f"driver {version} has no open kernel modules for these GPUs",
                "they came with 515.43.04",
                f"set a newer one: {wanted_version(LONG_TERM_BRANCH)}",
            )
        )
    if kind == "proprietary" and version_numbers(version) >= _OPEN_ONLY_SINCE:
        problems.append(
            Problem(
                f"driver {version} has no proprietary kernel modules any more",
                "620 was the first branch without",
                f"set {wanted_version(LONG_TERM_BRANCH)}, or gpuprov_kernel_module_type: open where the GPUs can",
            )
        )
    return tuple(problems)


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
            text = _by_zstd(system, path, skip) if start == _ZSTD else _by_tarfile(file, start)
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


def _by_zstd(system: System, path: str, skip: int) -> str:
    if system.which("zstd") is None:
        return ""
    return system.run(("sh", "-c", _FROM_ZSTD, "sh", str(skip), path), timeout=_SECONDS).stdout


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
    known = {device_id: chips[device_id] for device_id in sorted(set(device_ids)) if device_id in chips}
    problems = tuple(_legacy(device_id, chip) for device_id, chip in known.items() if chip.legacy_branch)
    if problems:
        raise GpuprovError.several(problems)
    closed_only = [one for one in known.items() if not one[1].open_modules]
    open_only = [one for one in known.items() if not one[1].proprietary_modules]
    if closed_only and open_only:
        raise GpuprovError(
            f"this driver serves {closed_only[0][1].name} and {open_only[0][1].name}, but not in one host",
            f"its supported-gpus.json: {_listed(closed_only)} proprietary modules alone, "
            f"{_listed(open_only)} open ones alone",
            "take one of them out, or bind it to vfio-pci for a virtual machine",
        )
    wrong = {"open": closed_only, "proprietary": open_only}.get(asked, [])
    if wrong:
        other = "proprietary" if asked == "open" else "open"
        raise GpuprovError(
            f"{asked} kernel modules do not serve {wrong[0][1].name}",
            f"the driver's supported-gpus.json: {_listed(wrong)} {other} ones alone",
            f"set gpuprov_kernel_module_type: {other}, or leave it out",
        )
    if asked != "auto":
        return asked
    return "proprietary" if closed_only else "open" if open_only else otherwise


def listed_problems(device_ids: Sequence[str], chips: Chips, asked: str) -> tuple[Problem, ...]:
    """Return why the listed driver can't serve these GPUs with the requested kernel modules."""
    try:
        listed_module_type(device_ids, chips, asked, "auto")
    except GpuprovError as error:
        return error.problems
    return ()


def _legacy(device_id: str, chip: Chip) -> Problem:
    return Problem(
        f"this driver no longer serves {chip.name}",
        f"10de:{device_id} in its supported-gpus.json: legacy, branch {chip.legacy_branch} is the last for it",
        f'set gpuprov_driver_version: "{chip.legacy_branch}"',
    )


def _listed(found: Sequence[tuple[str, Chip]]) -> str:
    return ", ".join(f"10de:{device_id}" for device_id, _ in found) + (" has" if len(found) == 1 else " have")
