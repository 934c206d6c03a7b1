"""Remove packages again, except those that were there before or that another package needs by now."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence

from gpuprov.core.changes import Json, capture_path, restore_path
from gpuprov.core.system import System
from gpuprov.packages import dpkg
from gpuprov.packages.apt_failures import finish
from gpuprov.packages.dpkg import Package
from gpuprov.packages.package_lock import tell_nobody
from gpuprov.protocol.words import counted

_CONFFILES = ("dpkg-query", "--show", "--showformat=${Package}\n${Conffiles}\n", "--")
# Debian's docker.io takes all of docker's data along when it is purged (its postrm).
_PURGES_DATA = "docker.io"
_SECONDS = 60


def conffiles_left(
    system: System, packages: Iterable[Package], wanted: Sequence[str], options: Sequence[str] = ()
) -> Mapping[str, list[Json]]:
    """Return name → images of the configuration that packages left when they were removed, and not purged.

    Only those count that apt would install again for `wanted`; `options` are further words for it.
    """
    names = [one.name for one in packages if one.status == "config-files"]
    if not names:
        return {}
    words = (
        "apt-get", *options, "--simulate", "--yes", "--no-install-recommends", "--allow-downgrades", "install", "--",
    )  # fmt: skip
    coming = re.findall(r"^Inst (\S+)", system.run((*words, *wanted), timeout=_SECONDS).stdout, re.MULTILINE)
    names = [name for name in names if name in coming]
    if not names:
        return {}
    listed = parse_conffiles(system.run((*_CONFFILES, *names)).stdout)
    return {name: [capture_path(system, path) for path, _ in listed.get(name, ())] for name in names}


def parse_conffiles(text: str) -> Mapping[str, tuple[tuple[str, str], ...]]:
    """Return package → (path, MD5) of its configuration files, as dpkg-query prints them below the name."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in text.splitlines():
        words = line.split()
        if words and not line.startswith(" "):
            name = line.strip()
        elif len(words) >= 2 and words[-1] != "obsolete":
            found.setdefault(name, []).append((words[0], words[1]))
    return {package: tuple(files) for package, files in found.items()}


def purge(
    system: System, added: Sequence[str], left: Sequence[str], lock_timeout: int, options: tuple[str, ...] = ()
) -> None:
    """Purge the packages that are there of `added`; those of `left` are only removed: they had configuration."""
    dpkg.repair(system, tell_nobody, lock_timeout, options)
    there = {one.name for one in dpkg.query(system) if one.present}
    gone = [name for name in added if name in there]
    kept = needed_by_others(system, gone)
    for verb, names in (
        ("purge", [name for name in gone if name not in kept and name not in left]),
        ("remove", [name for name in gone if name not in kept and name in left]),
    ):
        if names:
            done = dpkg.run_apt(system, (verb, "--", *names), tell_nobody, lock_timeout=lock_timeout)
            finish(done, f"{', '.join(names)} could not be removed")


def restore_conffiles(system: System, left: Mapping[str, Sequence[Json]], added: Sequence[str]) -> None:
    """Bring back the configuration that packages had left behind before they were installed again."""
    for name in added:
        for image in left.get(name, ()):
            restore_path(system, image)


def needed_by_others(system: System, names: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return those of `names` that can't go because others, installed since, would go with them: name → these."""
    if not names or not _taken_along(system, names):
        return {}
    found = {name: tuple(sorted(_taken_along(system, [name]) - set(names))) for name in names}
    return {name: others for name, others in found.items() if others}


def _taken_along(system: System, names: Sequence[str]) -> set[str]:
    """Return what apt would remove besides, without doing it."""
    done = system.run(("apt-get", "--simulate", "--yes", "purge", "--", *names), timeout=_SECONDS)
    removed = re.findall(r"^(?:Purg|Remv) (\S+)", done.stdout, re.MULTILINE)
    return set(removed) - set(names)


def lasting_of_purge(system: System, added: Sequence[str], left: Sequence[str]) -> tuple[str, ...]:
    """Return, a sentence each, what purging takes along or has to leave."""
    there = {one.name for one in dpkg.query(system) if one.present}
    gone = [name for name in added if name in there]
    kept = needed_by_others(system, gone)
    told = [f"{name} stays: {', '.join(others)}, installed since, needs it" for name, others in kept.items()]
    purged = [name for name in gone if name not in kept and name not in left]
    told += [f"{path}, changed since {name} was installed, goes with it" for name, path in _changed(system, purged)]
    if _PURGES_DATA in purged and (data := _docker_data(system)):
        told.append(f"{_PURGES_DATA} takes all of /var/lib/docker along: {data}")
    return tuple(told)


def _changed(system: System, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (package, path) of the configuration files that are not as the package brought them."""
    if not names:
        return []
    listed = parse_conffiles(system.run((*_CONFFILES, *names)).stdout)
    return [
        (name, path)
        for name, files in listed.items()
        for path, digest in files
        if (content := system.read_bytes(path)) is not None and _md5(content) != digest
    ]


def _md5(content: bytes) -> str:
    # dpkg's own choice; nothing rests on it here but a sentence.
    return hashlib.new("md5", content, usedforsecurity=False).hexdigest()


def _docker_data(system: System) -> str:
    """Return how many containers and images of the site's own there are, nothing if there are none."""
    containers = system.run(("docker", "ps", "--all", "--quiet"), timeout=20).stdout.split()
    images = system.run(("docker", "images", "--format", "{{.Repository}}"), timeout=20).stdout.split()
    others = [name for name in images if not name.startswith("gpuprov-")]
    return f"{counted(len(containers), 'container')}, {counted(len(others), 'image')}" if containers or others else ""
