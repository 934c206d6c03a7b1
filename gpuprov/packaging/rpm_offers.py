"""dnf, yum and zypper asked what repositories have: the host's own, and those that are yet to be set up, in a copy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

from gpuprov.core.changes import Change, RemoveFile, WriteFile
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.packaging import planned_keys
from gpuprov.packaging.pgp import armored
from gpuprov.packaging.rpm_failures import finish
from gpuprov.packaging.rpm_packages import run_rpm
from gpuprov.packaging.rpm_repos import DIRECTORIES, InstallRpmKey

_ASK_SECONDS = 600
# zypper(8): there are no repositories; nothing has that name.
_NO_REPOSITORIES, _NOTHING_FOUND = 6, 104
_WHAT = "the package index could not be refreshed"
_Versions = Mapping[str, tuple[str, ...]]


def ask(system: System, manager: str, names: Sequence[str], planned: Sequence[Change], lock_timeout: int) -> _Versions:
    """Return name → versions. Raises GpuprovError, as a refresh of the index would, if a repository can't be asked."""
    place = f"{DIRECTORIES[manager]}/"
    touched = [one for one in planned if isinstance(one, (WriteFile, RemoveFile)) and one.path.startswith(place)]
    if not touched:
        return _asked(system, manager, (), names, lock_timeout)
    files = [one for one in touched if isinstance(one, WriteFile)]
    keys = [one for one in planned if isinstance(one, InstallRpmKey)]
    work = system.temporary_directory("/var/tmp")
    try:
        found = _asked(system, manager, _without(system, manager, work, touched), names, lock_timeout)
        more = _asked(system, manager, _copy(system, manager, work, files, keys), names, lock_timeout) if files else {}
    finally:
        system.remove_tree(work)
    return {name: (*found.get(name, ()), *more.get(name, ())) for name in {**found, **more}}


def _without(system: System, manager: str, work: str, touched: Sequence[WriteFile | RemoveFile]) -> tuple[str, ...]:
    """Return the options that leave out the host's repositories that will not be as they are.

    One that is out of reach may be about to be mended.
    """
    folder, gone = f"{work}/host.d", {one.path for one in touched}
    system.make_directory(folder)
    for name in system.list_directory(DIRECTORIES[manager]):
        path = f"{DIRECTORIES[manager]}/{name}"
        content = None if path in gone else system.read_bytes(path)
        if content is not None:
            system.write(f"{folder}/{name}", content, mode=0o600)
    return ("--reposd-dir", folder) if manager == "zypper" else (f"--setopt=reposdir={folder}",)


def _copy(
    system: System, manager: str, work: str, files: Sequence[WriteFile], keys: Sequence[InstallRpmKey]
) -> tuple[str, ...]:
    """Lay planned repositories below `work`; return the options that make these all that the manager knows of."""
    places = planned_keys.lay(system, work, keys, armored)
    folder = f"{work}{DIRECTORIES['zypper']}" if manager == "zypper" else f"{work}/repos.d"
    system.make_directory(folder)
    for file in files:
        system.write(f"{folder}/{file.path.rpartition('/')[2]}", planned_keys.pointed(file.content, places))
    if manager != "zypper":
        return (f"--setopt=reposdir={folder}", f"--setopt=cachedir={work}/cache")
    # zypper trusts the keys of rpm's database alone: here one of its own has those that the repositories name.
    named = (re.findall(r"^gpgkey=file://(\S+)", file.content.decode(), re.MULTILINE) for file in files)
    for place in {places.get(path, path) for paths in named for path in paths}:
        system.require(("rpm", "--root", work, "--import", place), "rpm does not take the key of a repository")
    return ("--root", work)


def _asked(
    system: System, manager: str, options: tuple[str, ...], names: Sequence[str], lock_timeout: int
) -> _Versions:
    """Return what one set of repositories has."""
    how = _QUESTIONS[manager]
    # Asked for packages, zypper passes over repositories that it can't read, and answers from the others.
    if manager == "zypper":
        refreshed = run_rpm(system, (*how.command, *options, "refresh"), _tell_nobody, _ASK_SECONDS, lock_timeout)
        if refreshed.returncode == _NO_REPOSITORIES:
            return {}
        finish(refreshed, _WHAT)
    done = run_rpm(system, (*how.command, *options, *how.verb, *names), _tell_nobody, _ASK_SECONDS, lock_timeout)
    if not _is_empty_answer(manager, done):
        finish(done, _WHAT)
    return how.parse(done.stdout)


def _is_empty_answer(manager: str, done: Completed) -> bool:
    if manager == "yum":
        return "No matching Packages to list" in done.stderr
    return manager == "zypper" and done.returncode == _NOTHING_FOUND


def parse_repoquery(text: str) -> _Versions:
    """Return name → versions from lines of `NAME EPOCH:VERSION-RELEASE.ARCH`."""
    rows = re.finditer(r"^(\S+) (\d+:\S+)$", text, re.MULTILINE)
    return _collected((match[1], match[2]) for match in rows)


def parse_yum(text: str) -> _Versions:
    """Return the same from yum's table: `NAME.ARCH  [EPOCH:]VERSION-RELEASE  REPOSITORY`."""
    rows = re.finditer(r"^(\S+)\.([a-z0-9_]+)\s+(\S+-\S+)\s+\S+\s*$", text, re.MULTILINE)
    return _collected((match[1], f"{match[3]}.{match[2]}") for match in rows)


def parse_zypper(text: str) -> _Versions:
    """Return the same from zypper's table; what is installed and in no repository is none that it offers."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.count("|") == 5]
    return _collected((row[1], f"{row[3]}.{row[4]}") for row in rows if row[2] == "package" and row[5][:1] != "(")


def _collected(pairs: Iterable[tuple[str, str]]) -> _Versions:
    found: dict[str, tuple[str, ...]] = {}
    for name, version in pairs:
        found[name] = (*found.get(name, ()), version)
    return found


def _tell_nobody(message: str, done: int, total: int) -> None:
    """The question has its own line of progress."""


@dataclass(frozen=True)
class _Question:
    """How a package manager is asked; options stand between command and verb. `parse` reads its answer."""

    command: tuple[str, ...]
    verb: tuple[str, ...]
    parse: Callable[[str], _Versions]


_QUERY_FORMAT = "%{name} %{epoch}:%{version}-%{release}.%{arch}\n"
# Streams that nobody has enabled hide their packages from all but this question (dnf(8), repoquery).
_DNF = ("repoquery", "--available", "--disable-modular-filtering", "--queryformat", _QUERY_FORMAT)
_ZYPPER = ("search", "--details", "--match-exact", "--type", "package")
_QUESTIONS = {
    "dnf": _Question(("dnf", "-q", "-y"), _DNF, parse_repoquery),
    "yum": _Question(("yum", "-q", "-y"), ("--showduplicates", "list", "available"), parse_yum),
    "zypper": _Question(("zypper", "--non-interactive"), _ZYPPER, parse_zypper),
}
