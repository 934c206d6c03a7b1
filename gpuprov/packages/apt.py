"""apt: Debian, Ubuntu and their derivatives."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuprov.core.changes import Change
from gpuprov.core.places import FOLDER, REPOSITORY, REPOSITORY_KEY, SOURCES_LIST
from gpuprov.core.system import System
from gpuprov.machine.distros import Distribution
from gpuprov.packages import apt_packages, apt_remove, apt_undo, dpkg, retired
from gpuprov.packages.apt_packages import InstallPackages, PackageFacts, RefreshPackageIndex, own_name, pinned
from gpuprov.packages.interface import Bundle, Commands, Installation
from gpuprov.packages.rpm_repos import Host
from gpuprov.protocol.spec import HostSpec

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


def apt_options(bundle: Bundle | None) -> tuple[str, ...]:
    """Return the options that make an unpacked bundle apt's only source, with lists of its own; none without one."""
    settings = _BUNDLE_SETTINGS if bundle is not None else {}
    return tuple(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))


class Apt:
    """apt and dpkg."""

    name = "apt"
    commands = Commands(
        "apt-get install -y",
        "apt-get install -y --reinstall",
        "apt-get purge",
        "apt-cache policy",
        "apt-mark hold",
        "export DEBIAN_FRONTEND=noninteractive; apt-get -q update && apt-get -q -y install",
    )
    # Debian's and Ubuntu's docker only recommend it, and recommendations are not installed (docs.docker.com, AppArmor).
    confinement_packages: tuple[str, ...] = ("apparmor",)
    has_pin_packages = True
    old_fabric_manager = "nvidia-fabricmanager-{branch}"
    # -1, or -1ubuntu1 on newer releases.
    any_release = "-*"

    gather = staticmethod(apt_packages.gather_packages)
    lock_holder = staticmethod(dpkg.lock_holder)
    missing = staticmethod(apt_packages.missing)

    def version_names(self, version: str) -> set[str]:
        return {version}

    def bundled_versions(self, version: str, architecture: str) -> set[str]:
        return {version}

    def typed(self, name: str) -> str:
        return shlex.quote(name)

    def offered(
        self, system: System, names: Sequence[str], planned: Sequence[Change], lock_timeout: int
    ) -> Mapping[str, tuple[str, ...]]:
        from gpuprov.packages import apt_offers

        # It takes no lock: all that it writes is in a folder of its own.
        return apt_offers.ask(system, names, planned)

    def plan_installation(self, packages: PackageFacts, wanted: Installation) -> tuple[Change, ...]:
        lacking, options = self.missing(packages, wanted.names), apt_options(wanted.bundle)
        keeps_holds = wanted.hold is None
        names = {name: own_name(packages, name) for name in pinned(lacking)}
        lifted = () if keeps_holds else tuple(name for name, own in names.items() if own in packages.held)
        installation: tuple[Change, ...] = (
            RefreshPackageIndex(wanted.lock_timeout, options),
            InstallPackages(lacking, lifted, wanted.lock_timeout, options, wanted.advice),
        )
        # A hold that the installation takes off is set again after it.
        held = replace(packages, held=packages.held - {names[name] for name in lifted})
        holds = () if wanted.hold is None else apt_packages.plan_holds(held, wanted.hold, wanted.lock_timeout)
        return (*(installation if lacking else ()), *holds)

    unowned = staticmethod(apt_remove.unowned)
    needed_by = staticmethod(apt_undo.needed_by_others)

    def removal(self, names: tuple[str, ...], keep: tuple[str, ...], lock_timeout: int) -> Change:
        return apt_remove.RemovePackages(names, keep, lock_timeout)

    def plan_retired(self, host: Host, spec: HostSpec) -> tuple[Change, ...]:
        return retired.plan_keys(host.files, spec.toolkit_key_fingerprint)

    def hold_packages(self, row: Distribution) -> tuple[str, ...]:
        return ()

    def open_bundle(self, system: System, repository_key: str) -> None:
        system.write(SOURCES_LIST, _BUNDLE_SOURCE.encode())


APT = Apt()
