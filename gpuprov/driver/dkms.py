"""DKMS on distributions that do not package it: whether a host needs it, and its source. Pure."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping

from gpuprov.core.changes import FileFact
from gpuprov.driver.source import DriverSource
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import ExtraRepository
from gpuprov.packages.known_repositories import DKMS, dkms_repository
from gpuprov.protocol.errors import Problem

# Names of the repositories as EPEL's own package, Oracle, cloud images and SUSEConnect give them; not their sources,
# debug packages, tests and EPEL's repository of Cisco's codec.
_ENABLED_ALREADY = {
    "EPEL": re.compile(r"(.*[_-])?epel", re.IGNORECASE),
    "PackageHub": re.compile(r"(?!.*(debug|source)).*(package[-_ ]?hub|backports).*", re.IGNORECASE),
}
_REPOSITORY_FILES = re.compile(r"/etc/(yum\.repos\.d|zypp/repos\.d)/(?!gpuprov-)[^/]+\.repo")


def packages(driver: DriverSource) -> tuple[str, ...]:
    """Return DKMS if it is installed, or to be installed, from a repository besides the distribution's."""
    facts = driver.facts
    if not _is_wanted(driver):
        return ()
    if facts.bundle is not None:
        has_it = any(one.name == DKMS for one in facts.bundle.manifest.packages)
        return (DKMS,) if has_it else ()
    has_source = _has_own_source(facts) or repository(driver) is not None
    return (DKMS,) if has_source or DKMS in facts.packages.installed else ()


def repository(driver: DriverSource) -> ExtraRepository | None:
    """Return the repository to add for DKMS, None if the host has DKMS or its own repository with it.

    A repository that gpuprov added stays, for DKMS's updates.
    """
    facts, spec, row = driver.facts, driver.spec, driver.facts.distribution
    if row is None or not spec.epel or not _is_wanted(driver) or _has_own_source(facts):
        return None
    found = dkms_repository(row, facts.os.version, facts.architecture, spec)
    ours = found is not None and any(path.endswith(f"/gpuprov-{found.name}.repo") for path in facts.files)
    return found if ours or DKMS not in facts.packages.installed else None


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return why DKMS is unavailable although the driver's packages depend on it."""
    facts, spec, row = driver.facts, driver.spec, driver.facts.distribution
    if row is None or facts.bundle is not None or not _is_wanted(driver):
        return ()
    if not driver.depends_on_dkms or packages(driver):
        return () if not spec.epel or driver.depends_on_dkms else _mirror_problems(driver)
    here = f"{row.name} {row.version}"
    if not spec.epel:
        return (
            Problem(
                f"NVIDIA's packages for {here} need DKMS, which is in {row.dkms_from}, and gpuprov_epel is false",
                "dkms is not installed, and no enabled repository of the host is one that has it",
                "set gpuprov_epel: true (only dkms comes from there); or gpuprov_driver: runfile, which needs no DKMS; "
                "or install dkms by hand",
            ),
        )
    return (_unknown(facts),)


def _mirror_problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return the problems of a named mirror: use it or refuse it, but never ignore it silently."""
    return (_unknown(driver.facts),) if driver.spec.epel_repository and not packages(driver) else ()


def _unknown(facts: HostFacts) -> Problem:
    row = facts.distribution
    assert row is not None
    return Problem(
        f"this gpuprov does not know the key of {row.dkms_from} for {row.name} {facts.os.version}",
        f"no public source that tells its fingerprint was found; {row.dkms_from} has dkms",
        f"enable {row.dkms_from} by hand (SUSE: SUSEConnect --product PackageHub/{facts.os.version}/"
        f"{facts.architecture}); or set gpuprov_epel_repository, and gpuprov_epel_key_fingerprint to what "
        "gpg --show-keys says of its key, fetched in a way that you trust",
    )


def note(driver: DriverSource) -> str:
    """Return a warning if the next kernel would have no driver, or ""."""
    row = driver.facts.distribution
    if row is None or not driver.has_installer or not _is_wanted(driver) or packages(driver):
        return ""
    how = (
        "leave gpuprov_epel at true"
        if not driver.spec.epel
        else f"enable {row.dkms_from}, or set gpuprov_epel_repository"
    )
    return f"{row.name} has no dkms of its own ({row.dkms_from} has): after a kernel update run gpuprov again, or {how}"


def _is_wanted(driver: DriverSource) -> bool:
    """Say whether modules are built here that DKMS must also build for later kernels.

    NVIDIA's packages for SUSE contain modules without DKMS. A site that names dkms among its packages has a source for
    it.
    """
    row = driver.facts.distribution
    if row is None or not row.dkms_from or DKMS in driver.spec.packages or not driver.compiles:
        return False
    return driver.has_installer or row.package_manager == "dnf"


def _has_own_source(facts: HostFacts) -> bool:
    row = facts.distribution
    pattern = _ENABLED_ALREADY.get(row.dkms_from) if row is not None else None
    return pattern is not None and any(map(pattern.fullmatch, _enabled_repositories(facts.files)))


def _enabled_repositories(files: Mapping[str, FileFact]) -> tuple[str, ...]:
    """Return the names (in brackets) of the host's own enabled repositories; none from an unreadable file."""
    found: list[str] = []
    for path, file in files.items():
        if not _REPOSITORY_FILES.fullmatch(path):
            continue
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(file.content.decode("utf-8", "replace"))
        except configparser.Error:
            continue
        off = ("0", "no", "false")
        found += [
            one for one in parser.sections() if parser.get(one, "enabled", fallback="1").strip().lower() not in off
        ]
    return tuple(found)
