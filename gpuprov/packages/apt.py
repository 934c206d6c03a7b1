"""apt: Debian, Ubuntu and their derivatives."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from gpuprov.core.changes import Change, RemoveFile, WriteFile
from gpuprov.core.places import FOLDER, REPOSITORY, REPOSITORY_KEY, SOURCES_LIST
from gpuprov.core.system import System
from gpuprov.packages import apt_changes, dpkg, interface
from gpuprov.packages.failures import finish_apt
from gpuprov.packages.keys import InstallKey, dearmored, place_keys, with_placed_keys

_BUNDLE_SOURCE = f"deb [signed-by={FOLDER}/{REPOSITORY_KEY}] file:{FOLDER}/{REPOSITORY} ./\n"
_BUNDLE_SETTINGS = {
    "Dir::Etc::sourcelist": SOURCES_LIST,
    "Dir::Etc::sourceparts": f"{FOLDER}/none",
    "Dir::State::lists": f"{FOLDER}/lists",
    "Dir::Cache::archives": f"{FOLDER}/archives",
    # The host's own cache would be rebuilt from the bundle's lists.
    "Dir::Cache::pkgcache": "",
    "Dir::Cache::srcpkgcache": "",
    "Acquire::Languages": "none",
    # Nothing is downloaded, and the folder is closed to apt's own user.
    "APT::Sandbox::User": "root",
}
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


def apt_options(bundle: interface.Bundle | None) -> tuple[str, ...]:
    """Return the options that make an unpacked bundle apt's only source, with lists of its own; none without one."""
    settings = _BUNDLE_SETTINGS if bundle is not None else {}
    return tuple(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))


class Apt(interface.PackageManager):
    """apt and dpkg."""

    name = "apt"
    commands = interface.Commands(
        "apt-get install -y",
        "apt-get install -y --reinstall",
        "apt-get purge",
        "apt-cache policy",
        "apt-mark hold",
        "export DEBIAN_FRONTEND=noninteractive; apt-get -q update && apt-get -q -y install",
    )
    # Debian's and Ubuntu's docker only recommend it, and recommendations are not installed (docs.docker.com, AppArmor).
    confinement_packages = ("apparmor",)
    has_pin_packages = True
    old_fabric_manager = "nvidia-fabricmanager-{branch}"
    # -1, or -1ubuntu1 on newer releases.
    any_release = "-*"

    gather = staticmethod(dpkg.gather_packages)
    lock_holder = staticmethod(dpkg.lock_holder)
    missing = staticmethod(dpkg.missing)
    needed_by = staticmethod(apt_changes.needed_by_others)

    def version_names(self, version: str) -> set[str]:
        return {version}

    def typed(self, name: str) -> str:
        return shlex.quote(name)

    def offered(self, system: System, names: Sequence[str], planned: Sequence[Change]) -> interface.Versions:
        """Ask apt in a copy of the host's sources, with an index of its own.

        It takes no lock, because it writes only to its own folder.
        """
        with system.temporary_directory("/var/tmp") as work:
            # apt downloads as the user _apt, who reads keys and writes the index (apt.conf(5), APT::Sandbox::User).
            system.change_mode(work, 0o755)
            _copy_sources(system, work, planned)
            configuration = ("-c", f"{work}/apt.conf")
            system.write(f"{work}/apt.conf", _CONFIGURATION.format(work=work).encode())
            options = (*dpkg.TRUST, "-o", "Acquire::Retries=3", *dpkg.proxy_options(system), *configuration)
            command = ("apt-get", "-q", *options, "update")
            done = system.run(command, timeout=interface.REFRESH_SECONDS, env=system.proxy.environment)
            finish_apt(done, "the package index could not be refreshed")
            asked = (system.run(("apt-cache", *configuration, verb, *names)) for verb in ("madison", "policy"))
            what = "apt-cache does not tell what the repositories have"
            said, policy = (interface.require_answer(done, what).stdout for done in asked)
        return not_refused(parse_madison(said), policy)

    def plan_installation(self, packages: interface.PackageFacts, wanted: interface.Installation) -> tuple[Change, ...]:
        lacking, options = self.missing(packages, wanted.names), apt_options(wanted.bundle)
        names = {name: dpkg.own_name(packages, name) for name in interface.pinned(lacking) if wanted.hold is not None}
        # The driver's packages move together: apt changes none of them against the hold of another.
        ours = packages.driver_held if any(interface.DRIVER_PACKAGES.match(name) for name in lacking) else ()
        lifted = tuple(dict.fromkeys([*(name for name, own in names.items() if own in packages.held), *ours]))
        installation: tuple[Change, ...] = (
            apt_changes.RefreshPackageIndex(options),
            apt_changes.InstallPackages(lacking, lifted, options, wanted.advice),
        )
        # A hold that the installation takes off is set again after it.
        held = replace(packages, held=packages.held - {*ours, *(names.get(name, name) for name in lifted)})
        holds = () if wanted.hold is None else apt_changes.plan_holds(held, wanted.hold)
        return (*(installation if lacking else ()), *holds)

    def hold_driver(self, packages: interface.PackageFacts, hold: bool, coming: bool) -> tuple[Change, ...]:
        new = tuple(sorted(packages.driver - packages.held)) if hold else ()
        release = () if hold else packages.driver_held
        change = apt_changes.HoldPackages(new, release, driver=hold)
        return (change,) if new or release or (hold and coming) else ()

    def unowned(self, system: System, paths: Sequence[str]) -> tuple[str, ...]:
        return tuple(path for path in paths if not dpkg.owner(system, path))

    def removal(self, names: tuple[str, ...], keep: tuple[str, ...]) -> Change:
        return apt_changes.RemovePackages(names, keep)

    def open_bundle(self, system: System, repository_key: str) -> None:
        system.write(SOURCES_LIST, _BUNDLE_SOURCE.encode())


APT = Apt()


def _copy_sources(system: System, work: str, planned: Sequence[Change]) -> None:
    """Copy the host's sources and index below `work`, with the planned changes of sources applied."""
    for place in ("sources.list.d", "auth.conf.d", "lists", "lists/partial", "cache", "keys"):
        system.make_directory(f"{work}/{place}")
    # With what links lead to. What has not changed since the host's last refresh need not be fetched again.
    for source in (*(path for path in _SOURCES if system.exists(path)), "/var/lib/apt/lists"):
        system.run(("cp", "-a", "-L", "--reflink=auto", source, f"{work}/"))
    new_keys = [change for change in planned if isinstance(change, InstallKey)]
    keys = place_keys(system, f"{work}/keys", new_keys, dearmored)
    for change in planned:
        if isinstance(change, (WriteFile, RemoveFile)) and change.path.startswith(_SOURCES):
            place = change.path.replace("/etc/apt", work, 1)
            if isinstance(change, RemoveFile):
                system.remove(place)
            else:
                system.write(place, with_placed_keys(change.content, keys), mode=change.mode)


def parse_madison(text: str) -> interface.Versions:
    """Return name → versions from lines of `NAME | VERSION | SOURCE` (apt-cache(8)); sources of source are left out."""
    rows = ([part.strip() for part in [*line.split("|"), "", ""][:3]] for line in text.splitlines())
    return interface.versions_by_name((row[0], row[1]) for row in rows if row[1] and not row[2].endswith(" Sources"))


def not_refused(offered: interface.Versions, policy: str) -> interface.Versions:
    """Return the versions that apt's preferences do not refuse, by `apt-cache policy`; all, if they refuse each."""
    blocks = re.split(r"^(?=\S)", policy, flags=re.MULTILINE)
    refused = {block.partition(":\n")[0]: re.findall(r"^ (?:\*\*\*|   ) (\S+) -\d+$", block, re.MULTILINE)
               for block in blocks}  # fmt: skip
    return {name: tuple(one for one in found if one not in refused.get(name, ())) or found
            for name, found in offered.items()}  # fmt: skip
