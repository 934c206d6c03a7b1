"""Read which GPUs a .run serves, with which kernel modules, from its supported-gpus.json, without running it.

The file lies in the payload behind the shell stub (makeself). Its features: `kernelopen`, the open modules serve it;
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
from gpuprov.facts.chips import Chip, Chips
from gpuprov.protocol.errors import GpuprovError, Problem

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


def module_type(device_ids: Sequence[str], chips: Chips, asked: str, otherwise: str) -> str:
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


def problems(device_ids: Sequence[str], chips: Chips, asked: str) -> tuple[Problem, ...]:
    """Return why the listed driver can't serve these GPUs with the requested kernel modules."""
    try:
        module_type(device_ids, chips, asked, "auto")
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
