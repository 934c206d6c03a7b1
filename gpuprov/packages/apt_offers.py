"""Query apt for the packages in its repositories, in a copy of the host's sources with a separate index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuprov.core.changes import Change, RemoveFile, WriteFile
from gpuprov.core.system import System
from gpuprov.packages.apt_failures import finish
from gpuprov.packages.dpkg import TRUST, proxy_options
from gpuprov.packages.keys import InstallKey, place_keys, with_placed_keys
from gpuprov.packages.pgp import dearmored

_REFRESH_SECONDS = 600
_SOURCES = ("/etc/apt/sources.list", "/etc/apt/sources.list.d", "/etc/apt/auth.conf.d")
# A host's hooks (command-not-found, appstream) would write to the host (apt.conf(5), APT::Update). Descriptions are not
# needed, and are as large as all the rest.
_CONFIGURATION = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Dir::State::lists "{work}/lists";
Dir::Cache "{work}/cache";
Dir::Etc::sourcelist "{work}/sources.list";
Dir::Etc::sourceparts "{work}/sources.list.d";
Dir::Etc::netrcparts "{work}/auth.conf.d";
"""


def ask(system: System, names: Sequence[str], planned: Sequence[Change]) -> Mapping[str, tuple[str, ...]]:
    """Return name → versions. Raises GpuprovError, as a refresh of the index would, if a repository can't be queried.

    It takes no lock, because it writes only to its own folder.
    """
    work = system.temporary_directory("/var/tmp")
    try:
        # apt downloads as the user _apt, who reads keys and writes the index (apt.conf(5), APT::Sandbox::User).
        system.change_mode(work, 0o755)
        _copy_sources(system, work, planned)
        configuration = ("-c", f"{work}/apt.conf")
        system.write(f"{work}/apt.conf", _CONFIGURATION.format(work=work).encode())
        command = (
            "apt-get",
            "-q",
            *TRUST,
            "-o",
            "Acquire::Retries=3",
            *proxy_options(system),
            *configuration,
            "update",
        )
        done = system.run(command, timeout=_REFRESH_SECONDS, env=system.proxy.environment)
        finish(done, "the package index could not be refreshed")
        said = system.run(("apt-cache", *configuration, "madison", *names)).stdout
    finally:
        system.remove_tree(work)
    return parse_madison(said)


def _copy_sources(system: System, work: str, planned: Sequence[Change]) -> None:
    """Copy the host's sources and index below `work`, with the planned changes of sources applied."""
    for place in ("sources.list.d", "auth.conf.d", "lists", "lists/partial", "cache", "keys"):
        system.make_directory(f"{work}/{place}")
    # What has not changed since the host's last refresh need not be fetched again.
    for source in (*(path for path in _SOURCES if system.exists(path)), "/var/lib/apt/lists"):
        system.run(("cp", "-a", "--reflink=auto", source, f"{work}/"))
    keys = place_keys(
        system, f"{work}/keys", [change for change in planned if isinstance(change, InstallKey)], dearmored
    )
    for change in planned:
        if isinstance(change, (WriteFile, RemoveFile)) and change.path.startswith(_SOURCES):
            place = change.path.replace("/etc/apt", work, 1)
            if isinstance(change, RemoveFile):
                system.remove(place)
            else:
                system.write(place, with_placed_keys(change.content, keys), mode=change.mode)


def parse_madison(text: str) -> Mapping[str, tuple[str, ...]]:
    """Return name → versions from lines of `NAME | VERSION | SOURCE` (apt-cache(8)); sources of source are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        name, version, source = (part.strip() for part in [*line.split("|"), "", ""][:3])
        if version and not source.endswith(" Sources"):
            found[name] = (*found.get(name, ()), version)
    return found
