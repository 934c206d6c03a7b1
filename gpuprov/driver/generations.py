"""Which driver serves which GPU: generations by PCI device id, with branches and kernel modules for each. Pure.

Sources: NVIDIA's data-centre driver documentation (supported branches; 580 is the last for Maxwell, Pascal and Volta,
470 for Kepler), the open kernel modules' README (Turing and later; Blackwell and Grace Hopper require them). The ranges
of device ids are those of the PCI ID database of 2026-10-24. They are a heuristic: an id outside all ranges has no
restriction, and the supported-gpus.json of an available .run decides (supported_gpus.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprov.protocol.driver_releases import LONG_TERM_BRANCH
from gpuprov.protocol.errors import Problem
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
