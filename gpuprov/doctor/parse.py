"""Parse the output of programs and files into values for the doctor's rules. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Lines of the kernel's log that may explain why a GPU does not work.
_TELLING = re.compile(
    r"NVRM|nvidia|nouveau|NovaCore|nova[_-]core|Key was rejected|unavailable key|Lockdown|modprobe|"
    r"DMAR: \[|AMD-Vi: Event|avc: +denied|apparmor=\"DENIED\"|BAR \d|devmem_alloc_pagemap|module_layout",
    re.IGNORECASE,
)
_MOST_LINES = 4000
_MOST_EVIDENCE = 6
# Time, host and program as written by dmesg and journalctl -k; then the driver's own prefix.
_PREFIX = re.compile(r"^(?:\[ *\+?[\d.]+\] *|\w{3} +\d+ [\d:]+ \S+ )?(?:kernel: *)?(?:\[ *[\d.]+\] *)?(?:NVRM: *)?")
# systemd's message before a start, and dockerd's first one, which a refused configuration file prevents; earlier lines
# belong to an earlier daemon.
_DOCKER_BEGINS = re.compile(r"^Starting (?:docker\.service|Docker Application)|Starting up")


@dataclass(frozen=True)
class Unit:
    """A systemd unit, with the properties of `systemctl show`."""

    load: str = ""
    active: str = ""
    result: str = ""
    enabled: str = ""


@dataclass(frozen=True)
class ModuleFile:
    """The driver's module as modinfo describes it; `signer` is "" for an unsigned one."""

    path: str = ""
    version: str = ""
    vermagic: str = ""
    signer: str = ""
    license: str = ""

    @property
    def name(self) -> str:
        """The module's name for modinfo: Debian calls it nvidia-current."""
        return self.path.rpartition("/")[2].partition(".")[0] or "nvidia"


def telling_lines(log: str) -> tuple[str, ...]:
    """Return the lines of a kernel log about GPUs and their driver."""
    lines = (line.strip() for line in log.splitlines()[-_MOST_LINES:])
    return tuple(line for line in lines if _TELLING.search(line))


def docker_lines(log: str) -> tuple[str, ...]:
    """Return the log of the docker daemon that runs now or failed last."""
    lines = log.splitlines()
    begun = max((number for number, line in enumerate(lines) if _DOCKER_BEGINS.search(line)), default=0)
    return tuple(line.strip() for line in lines[begun:])


def parse_units(text: str) -> Mapping[str, Unit]:
    """Return name → unit from `systemctl show` of several units: blocks of KEY=VALUE separated by an empty line."""
    found = {}
    for block in text.split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("Id"):
            found[fields["Id"]] = Unit(
                fields.get("LoadState", ""), fields.get("ActiveState", ""), fields.get("Result", ""),
                fields.get("UnitFileState", ""),
            )  # fmt: skip
    return found


def parse_modinfo(text: str) -> ModuleFile:
    """Return the description of a module in modinfo's output (kmod)."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return ModuleFile(
        fields.get("filename", ""), fields.get("version", ""), fields.get("vermagic", ""), fields.get("signer", ""),
        fields.get("license", ""),
    )  # fmt: skip


def host_paths(specification: str) -> tuple[tuple[str, int], ...]:
    """Return (path on the host, line) of mounts and device nodes in a CDI specification's text, JSON or YAML."""
    pattern = re.compile(r"""["']?hostPath["']?\s*:\s*["']?(/[^"'\s,}]+)""")
    found: dict[str, int] = {}
    for number, line in enumerate(specification.splitlines(), 1):
        for match in pattern.finditer(line):
            found.setdefault(match[1], number)
    return tuple(found.items())


def find_in_log(lines: Sequence[str], pattern: str) -> tuple[Mapping[str, str], tuple[str, ...]] | None:
    """Return the last match of a pattern: its named groups, and the lines.

    The driver splits its sentences over several lines, each with the prefix `NVRM:`: they are joined.
    """
    starts, text = [], ""
    for line in lines:
        starts.append(len(text))
        text += _PREFIX.sub("", line.strip()) + " "
    found = None
    for match in re.finditer(pattern, text, re.IGNORECASE):
        found = match
    if found is None:
        return None
    first, last = (max(n for n, start in enumerate(starts) if start <= place) for place in (found.start(), found.end()))
    named = {name: value or "?" for name, value in found.groupdict().items()}
    return named, tuple(lines[first : last + 1][:_MOST_EVIDENCE])


def lines_that_match(texts: Mapping[str, str], pattern: str) -> tuple[tuple[str, str], ...]:
    """Return (`file:line`, the line) of every line that matches a pattern."""
    compiled = re.compile(pattern)
    return tuple(
        (f"{path}:{number}", line.strip())
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if compiled.search(line)
    )


def per_gpu(report: str) -> tuple[Mapping[str, str], ...]:
    """Return path → text of the elements of each GPU in `nvidia-smi -q -x`; empty for an invalid report.

    Parsed line by line: each value is on one line, and a report of unbounded size is possible.
    """
    found: list[dict[str, str]] = []
    path: list[str] = []
    for line in report.splitlines()[:_MOST_LINES]:
        text = line.strip()
        if text.startswith("<gpu "):
            found.append({})
            path = []
            continue
        opened = re.fullmatch(r"<([\w.-]+)>", text)
        whole = re.fullmatch(r"<([\w.-]+)>(.*)</\1>", text)
        if not found:
            continue
        if whole:
            found[-1].setdefault("/".join([*path, whole[1]]), whole[2].strip())
        elif opened:
            path.append(opened[1])
        elif text.startswith("</"):
            path = path[:-1]
        elif path:
            key = "/".join(path)
            found[-1][key] = found[-1].get(key, "") + text
    return tuple(found)
