"""Use an unpacked bundle as the only repository of dnf or zypper; rpm trusts its key for that time."""

from __future__ import annotations

from collections.abc import Iterable

from gpuprov.core.changes import Change
from gpuprov.core.places import FOLDER, KEYS, REPOSITORY, REPOSITORY_KEY
from gpuprov.core.system import System
from gpuprov.packages.pgp import armored, fingerprints
from gpuprov.packages.rpm_packages import gather_keys
from gpuprov.packages.rpm_repos import InstallRpmKey

SOURCES = f"{FOLDER}/repos.d"
_KEY = f"{FOLDER}/key.asc"
# Where a key lies while rpm imports it.
_TAKEN = f"{FOLDER}/trusted"


def source_text(lines: Iterable[str]) -> str:
    """Return the repository as a .repo file with these further lines.

    The bundle's key signs the metadata; the keys of the vendors sign the packages.
    """
    head = (
        "[gpuprov-bundle]", "name=gpuprov bundle", f"baseurl=file://{FOLDER}/{REPOSITORY}", "enabled=1",
        "repo_gpgcheck=1", f"gpgkey=file://{_KEY}", "gpgcheck=1",
    )  # fmt: skip
    return "".join(f"{line}\n" for line in (*head, *lines))


def plan_keys(vendor_keys: Iterable[str], trusted: frozenset[str]) -> tuple[Change, ...]:
    """Return the change that makes rpm trust the vendor keys of the bundle's packages."""
    return tuple(
        InstallRpmKey(f"{_TAKEN}/{one}.asc", f"file://{FOLDER}/{KEYS}/{one}.asc", one)
        for one in vendor_keys
        if one not in trusted
    )


def prepare(system: System, repository_key: str, source: str) -> None:
    """Write the source, and make rpm trust the bundle's key: zypper, and packages that the bundle signs, need that."""
    if not system.exists(f"{FOLDER}/{REPOSITORY_KEY}"):
        return
    system.make_directory(SOURCES, 0o700)
    system.write(_KEY, armored(system.read_bytes(f"{FOLDER}/{REPOSITORY_KEY}") or b""))
    system.write(f"{SOURCES}/bundle.repo", source.encode())
    system.require(("rpm", "--import", _KEY), f"rpm does not take the key {repository_key}")


def forget(system: System) -> None:
    """Remove the bundle's key from rpm again, if present, including the key of a killed run."""
    key = system.read_bytes(_KEY)
    package = gather_keys(system).get(fingerprints(key)[0]) if key else None
    if package is not None:
        system.run(("rpm", "-e", package))
