"""The lists in docs/distributions.md, written from the table of distributions: `make docs`."""

import re
from collections.abc import Mapping
from pathlib import Path

from gpuprov.machine.distros import ROWS, Distribution, KernelPackages, OwnDriver, own_driver
from gpuprov.machine.machine import MACHINES, MachineKind

PAGE = Path(__file__).resolve().parents[1] / "docs/distributions.md"
_LISTS = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of the table -->)", re.DOTALL)


def with_lists(page: str) -> str:
    """Return the page with the lists that the table gives; what people wrote around them stays."""
    return _LISTS.sub(lambda _: _lists(), page)


def _lists() -> str:
    columns = (
        "distribution",
        "packages by",
        "docker",
        "Docker's repository",
        "NVIDIA's name",
        "to build with",
        "Python",
        "initramfs",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for cells, names in _grouped({row: _cells(row) for row in ROWS}):
        lines.append(f"| {names} | {' | '.join(cells)} |")
    lines += ["", "## Kernel headers", ""]
    for (running, following), names in _grouped({row: (_rules(row.kernel_headers), _next(row)) for row in ROWS}):
        lines += [f"- **{names}**: {running}.{following}"]
    lines += ["", "## The distribution's own driver (`gpuprov_driver: distribution`)", "", *_own_drivers()]
    lines += ["", "## Machines that are something else", "", "`gpuprov/protocol/machines.json` names the sources.", ""]
    lines += ["| machine | by | gpuprov | way |", "|---|---|---|---|", *map(_kind, MACHINES)]
    return "".join(f"{line}\n" for line in lines)


_SERVED = {"yes": "installs", "preinstalled": "keeps its driver", "no": "refuses"}


def _kind(row: MachineKind) -> str:
    signs = [*(f"`ID={one}`" for one in row.os), *(f"`{one}`" for one in (*row.files, row.dmi, row.kernel) if one)]
    signs += [f"container manager `{one}`" for one in row.container]
    signs += [f"port {row.api_port}"] if row.api_port else []
    return f"| {row.name} | {', '.join(signs)} | {_SERVED[row.served]} | {row.next_step} |"


def _own_drivers() -> list[str]:
    columns = ("distribution", "branches", "libraries and programs", "kernel modules", "from")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    rows = {row: own for row in ROWS if (own := own_driver(row)) is not None}
    for cells, names in _grouped({row: _own_cells(own) for row, own in rows.items()}):
        lines.append(f"| {names} | {' | '.join(cells)} |")
    return lines


def _own_cells(own: OwnDriver) -> tuple[str, ...]:
    if own.like_packages:
        return ("–", "NVIDIA's, of the modules' version", "SUSE's, compiled and signed: open alone", "–")
    first = own.branches[0]
    branches = ", ".join(one.branch for one in own.branches if one.branch) or "one"
    others = " and any other that the archive has" if own.template else ""
    built = "; ".join(f"{kind}: {' '.join(names)}" for kind, names in sorted(first.built.items()))
    compiled = "; ".join(f"compiled, {kind}: {names[0]}" for kind, names in sorted(first.compiled.items()))
    modules = "; ".join(filter(None, (compiled, f"built by DKMS, {built}")))
    archive = f"components {', '.join(own.components)}" if own.components else f"package {own.repository_package}"
    return (f"{branches}{others}", " ".join(first.libraries), modules, archive)


def _cells(row: Distribution) -> tuple[str, ...]:
    name = row.nvidia_name.format(major="N", digits="NNNN")
    dkms = f" (dkms: {row.dkms_from})" if row.dkms_from else ""
    return (
        row.package_manager, " ".join(row.docker_packages) or "–", row.docker_repository or "–", name or "–",
        f"{' '.join(row.build_packages)}{dkms}", " or ".join(row.pythons), row.initramfs[0],
    )  # fmt: skip


def _grouped(cells: Mapping[Distribution, tuple[str, ...]]) -> list[tuple[tuple[str, ...], str]]:
    """Return the rows that say the same once, with the names of all of them."""
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row, said in cells.items():
        version = "" if row.version == "*" else row.version
        only = "" if len(row.architectures) > 1 else f" ({row.architectures[0]})"
        groups.setdefault(said, {}).setdefault(row.name, []).append(f"{version}{only}")
    return [
        (said, "; ".join(f"{name} {', '.join(versions)}".strip() for name, versions in names.items()))
        for said, names in groups.items()
    ]


def _rules(rules: tuple[KernelPackages, ...]) -> str:
    return "; ".join(
        ("" if rule.pattern == ".+" else f"for `{rule.pattern}` ") + " ".join(f"`{name}`" for name in rule.names)
        for rule in rules
    )


def _next(row: Distribution) -> str:
    names = " ".join(f"`{name}`" for rule in row.next_kernel_headers for name in rule.names)
    return f" For kernels to come: {names}." if names else ""


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text()))
