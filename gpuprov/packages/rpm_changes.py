"""The changes of packages and keys by rpm, dnf and zypper: install and remove them, and undo each."""

from __future__ import annotations

import base64
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from gpuprov.core.changes import Change, Json, Tell, capture_path, parent_of, restore_path
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.packages.failures import Advice, finish_rpm
from gpuprov.packages.interface import (
    COPIES,
    INSTALL_SECONDS,
    LOCK_SECONDS,
    REFRESH_SECONDS,
    PackageFacts,
    PackageInstallation,
    lock_holder,
    tell_nobody,
    wait_until_free,
)
from gpuprov.packages.keys import InstallKey, armored, fetch_pinned_key, fingerprints
from gpuprov.protocol.errors import GpuprovError

# Files that hold the process id of a running package manager: dnf 4 (dnf/lock.py), libzypp.
_PID_FILES = (
    "/var/cache/dnf/metadata_lock.pid", "/var/cache/dnf/download_lock.pid", "/var/lib/dnf/rpmdb_lock.pid",
    "/run/zypp.pid",
)  # fmt: skip
# Files that rpm locks with fcntl(2), whichever program calls it; the second is SUSE's and newer Fedoras'.
_LOCKS = ("/var/lib/rpm/.rpm.lock", "/usr/lib/sysimage/rpm/.rpm.lock")
_KEY_QUERY = "%{NAME}-%{VERSION}-%{RELEASE}\\n%{DESCRIPTION}\\n"
_REMOVE_SECONDS = 600


class RpmProgram(ABC):
    """What changes need of dnf or zypper.

    `refresh` and `install` are commands. `version_joint`: what stands between a name and the version that is asked for.
    `good_codes`: exit codes that mean success.
    """

    name: str
    refresh: tuple[str, ...]
    install: tuple[str, ...]
    version_joint: str
    good_codes: tuple[int, ...] = (0,)

    @abstractmethod
    def gather(self, system: System) -> PackageFacts:
        """Return the installed packages and the trusted keys."""

    @abstractmethod
    def copies(self, folder: str, names: Sequence[str]) -> tuple[str, ...]:
        """Return the command that fetches installed packages (NAME-VERSION-RELEASE.ARCH) into a folder."""


def gather_keys(system: System) -> Mapping[str, str]:
    """Return the keys that rpm trusts: fingerprint → the name of the package that rpm keeps each as."""
    return parse_keys(system.run(("rpm", "-q", "gpg-pubkey", "--queryformat", _KEY_QUERY)).stdout)


def parse_keys(text: str) -> Mapping[str, str]:
    """Return fingerprint → package name. The names alone tell a key's last eight digits, which anybody can make."""
    found = {}
    for match in re.finditer(
        r"^(gpg-pubkey-\S+)\n(-----BEGIN PGP.*?-----END [^\n]*\n)", text, re.MULTILINE | re.DOTALL
    ):
        try:
            found.update(dict.fromkeys(fingerprints(match[2].encode()), match[1]))
        except GpuprovError:
            # A key of an unknown kind is not a pinned key: skip it.
            continue
    return found


def installed_rpms(system: System) -> set[str]:
    """Return NAME-VERSION-RELEASE.ARCH of all packages; rpm's own names, by which it takes them away."""
    done = system.require(("rpm", "-qa"), "rpm's database can't be read", "rpm --rebuilddb; then run this again")
    return {name for name in done.stdout.split() if not name.startswith("gpg-pubkey-")}


def added(before: set[str], after: set[str]) -> set[str]:
    """Return the new packages, without those that only replaced an older version."""
    replaced = {package_name(package) for package in before - after}
    return {package for package in after - before if package_name(package) not in replaced}


def package_name(package: str) -> str:
    """Return NAME of NAME-VERSION-RELEASE.ARCH: neither version nor release may hold a dash."""
    return package.rsplit("-", 2)[0]


def run_rpm(system: System, command: tuple[str, ...], tell: Tell, seconds: float, lock_timeout: int) -> Completed:
    """Run a package manager, or rpm, once no other process works with packages."""
    # dnf would wait without a time limit and without a message.
    wait_until_free(system, tell, rpm_lock_holder, lock_timeout)
    return system.run(
        command,
        timeout=seconds,
        env={"ZYPP_LOCK_TIMEOUT": str(lock_timeout), **system.proxy.environment},
        on_line=lambda line: _progress(line, tell),
    )


def rpm_lock_holder(system: System) -> str:
    """Return `NAME (pid N)` of the process that works with packages, or nothing."""
    for path in _PID_FILES:
        pid = (system.read_text(path) or "").strip()
        # A killed process leaves its file.
        name = system.read_text(f"/proc/{pid}/comm") if pid.isdigit() else None
        if name is not None and int(pid) != system.own_pid():
            return f"{name.strip()} (pid {pid})"
    return lock_holder(system, _LOCKS)


def _progress(line: str, tell: Tell) -> None:
    if re.match(
        r"\s*(Installing|Upgrading|Removing|Erasing|Retrieving)\s*:\s*\S|[([]\d+/\d+[])] (Installing|Removing)", line
    ):
        tell(" ".join(line.split()), 0, 0)


def _with(command: tuple[str, ...], options: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command with options for the program itself, which stand before its verb."""
    return (command[0], *options, *command[1:])


@dataclass(frozen=True)
class RefreshRpmIndex(Change):
    """Fetch the current index of the repositories; `options` are further options for dnf or zypper."""

    program: RpmProgram
    lock_timeout: int = LOCK_SECONDS
    options: tuple[str, ...] = ()

    # A half-fetched index is fetched again; nothing to undo.
    undo_restores_files: ClassVar[bool] = True
    undo_when_interrupted: ClassVar[bool] = False
    uses_package_manager: ClassVar[bool] = True
    bundle_part: ClassVar[str] = "packages"

    def summary(self) -> str:
        return f"refresh the package index ({' '.join(self.program.refresh)})"

    def apply(self, system: System, tell: Tell) -> Json:
        done = run_rpm(system, _with(self.program.refresh, self.options), tell, REFRESH_SECONDS, self.lock_timeout)
        finish_rpm(done, "the package index could not be refreshed", self.program.good_codes)
        return {}


@dataclass(frozen=True)
class InstallRpmPackages(PackageInstallation):
    """Install these packages (`NAME` or `NAME=VERSION`), and enable the units that they bring.

    Debian's packages start and enable what they bring; those of rpm's distributions leave that to the administrator.
    `options` are options for the package manager, such as those that make a bundle its only source. `advice` is the
    answer if no repository has a package.
    """

    program: RpmProgram
    names: tuple[str, ...]
    enable: tuple[str, ...] = ()
    lock_timeout: int = LOCK_SECONDS
    options: tuple[str, ...] = ()
    advice: Advice | None = field(default=None, compare=False)

    def summary(self) -> str:
        enabled = f"; enable {', '.join(self.enable)}" if self.enable else ""
        return f"install {', '.join(self.names)}{enabled}"

    def capture(self, system: System) -> Json:
        return {"installed": sorted(installed_rpms(system)), "lock_timeout": self.lock_timeout}

    def apply(self, system: System, tell: Tell) -> Json:
        how = self.program
        before = installed_rpms(system)
        names = tuple(name.replace("=", how.version_joint, 1) for name in self.names)
        command = (*_with(how.install, self.options), *names)
        done = run_rpm(system, command, tell, INSTALL_SECONDS, self.lock_timeout)
        finish_rpm(done, f"{', '.join(self.names)} could not be installed", how.good_codes, self.advice)
        for unit in self.enable:
            # Taking the package away disables it again (%systemd_preun, daemon(7)).
            system.require(
                ("systemctl", "enable", unit), f"{unit} can't be enabled", f"systemctl status {unit}", timeout=60
            )
        return {"added": sorted(added(before, installed_rpms(system)))}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Remove what this change added, with rpm: it refuses if another package needs one of them by now.

        dnf and zypper would also remove packages that depend on these, and those that they consider unused.
        """
        now = installed_rpms(system)
        gone = [
            name for name in (outcome or {}).get("added", sorted(added(set(before["installed"]), now))) if name in now
        ]
        if gone:
            lock_timeout = before.get("lock_timeout", LOCK_SECONDS)
            done = run_rpm(system, ("rpm", "-e", *gone), tell_nobody, INSTALL_SECONDS, lock_timeout)
            finish_rpm(done, f"{', '.join(gone)} could not be removed")


@dataclass(frozen=True)
class RemoveRpms(Change):
    """Remove these packages; the files of `keep` stay as they are."""

    program: RpmProgram
    names: tuple[str, ...]
    keep: tuple[str, ...] = ()
    lock_timeout: int = LOCK_SECONDS

    uses_package_manager: ClassVar[bool] = True

    def summary(self) -> str:
        kept = f"; {', '.join(self.keep)} stays" if self.keep else ""
        copies = "a rollback installs them again from copies, if a repository still has them"
        return f"remove {', '.join(self.names)} ({copies}){kept}"

    @property
    def key(self) -> str:
        return f"remove {', '.join(self.names)}"

    def capture(self, system: System) -> Json:
        there = sorted(one for one in installed_rpms(system) if package_name(one) in self.names)
        # rpm renames a configuration file that was edited.
        keep = [path for one in self.keep for path in (one, f"{one}.rpmsave")]
        return {
            "packages": there, "keep": [capture_path(system, path) for path in keep], "lock_timeout": self.lock_timeout,
        }  # fmt: skip

    def apply(self, system: System, tell: Tell) -> Json:
        before = self.capture(system)
        system.make_directory(COPIES, 0o700)
        for package in before["packages"]:
            tell(f"keeping a copy of {package}", 0, 0)
            # `irreversible` reports packages that no repository has any more.
            run_rpm(system, self.program.copies(COPIES, (package,)), tell, _REMOVE_SECONDS, self.lock_timeout)
        system.sync()
        done = run_rpm(system, ("rpm", "--erase", *before["packages"]), tell, _REMOVE_SECONDS, self.lock_timeout)
        for image in before["keep"]:
            restore_path(system, image)
        finish_rpm(done, f"{', '.join(self.names)} could not be removed")
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        there = installed_rpms(system)
        files = [path for one in before["packages"] if one not in there and (path := _copy(system, one))]
        if files:
            words = ("rpm", "--install", "--oldpackage", *files)
            done = run_rpm(system, words, tell_nobody, _REMOVE_SECONDS, before["lock_timeout"])
            finish_rpm(done, "removed packages could not be installed again")
        for image in before["keep"]:
            restore_path(system, image)
        for one in before["packages"]:
            if path := _copy(system, one):
                system.remove(path)
        if not _files_below(system, COPIES):
            system.remove_tree(COPIES)

    @classmethod
    def irreversible(
        cls, system: System, before: Json, outcome: Json | None, earlier: tuple[Json, ...]
    ) -> tuple[str, ...]:
        there = installed_rpms(system)
        gone = (one for one in before["packages"] if one not in there and not _copy(system, one))
        return tuple(f"package {one} is not restored: no repository had it when it was removed" for one in gone)


def _copy(system: System, package: str) -> str:
    """Return the file of a package among the copies; zypper keeps them in folders of its own."""
    return next((path for path in _files_below(system, COPIES) if path.endswith(f"/{package}.rpm")), "")


def _files_below(system: System, folder: str) -> list[str]:
    found = []
    for name in system.list_directory(folder):
        path = f"{folder}/{name}"
        status = system.status(path)
        is_folder = status is not None and status.kind == "directory"
        found += _files_below(system, path) if is_folder else [path]
    return found


@dataclass(frozen=True)
class RemoveRpmKey(Change):
    """Make rpm stop trusting this key."""

    fingerprint: str

    uses_package_manager: ClassVar[bool] = True

    def summary(self) -> str:
        return f"remove key {self.fingerprint} of NVIDIA's retired repositories from rpm's keys"

    def capture(self, system: System) -> Json:
        package = gather_keys(system).get(self.fingerprint)
        if package is None:
            return {"fingerprint": self.fingerprint, "key": ""}
        text = system.require(
            ("rpm", "--query", "--queryformat", "%{DESCRIPTION}", package), "rpm does not show a key that it has"
        ).stdout
        return {"fingerprint": self.fingerprint, "key": base64.b64encode(text.encode()).decode("ascii")}

    def apply(self, system: System, tell: Tell) -> Json:
        package = gather_keys(system).get(self.fingerprint)
        if package is not None:
            system.require(("rpm", "--erase", package), f"rpm can't remove the key {self.fingerprint}")
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if not before["key"] or before["fingerprint"] in gather_keys(system):
            return
        work = system.temporary_directory("/var/tmp")
        try:
            system.write(f"{work}/key", base64.b64decode(before["key"]))
            done = system.run(("rpm", "--import", f"{work}/key"))
        finally:
            system.remove_tree(work)
        if not done.ok:
            raise GpuprovError(
                f"rpm can't import the key {before['fingerprint']} again", done.evidence(), "rpm -qa gpg-pubkey"
            )


@dataclass(frozen=True)
class InstallRpmKey(InstallKey):
    """Make rpm trust the key at a URL, if it is the pinned one and nothing else."""

    uses_package_manager: ClassVar[bool] = True
    bundle_part: ClassVar[str] = "packages"

    def summary(self) -> str:
        return f"install key {self.fingerprint} to {self.path}, trusted by rpm"

    def capture(self, system: System) -> Json:
        image = capture_path(system, self.path)
        return {"file": image, "fingerprint": self.fingerprint, "trusted": self.fingerprint in gather_keys(system)}

    def apply(self, system: System, tell: Tell) -> Json:
        key = fetch_pinned_key(system, self.url, self.fingerprint)
        system.make_directory(parent_of(self.path))
        system.write(self.path, armored(key))
        system.require(("rpm", "--import", self.path), f"rpm can't import the key {self.fingerprint}")
        if self.fingerprint not in gather_keys(system):
            raise GpuprovError(
                f"rpm took the key {self.fingerprint}, but does not list it", "rpm -q gpg-pubkey", "rpm -qi gpg-pubkey"
            )
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        package = gather_keys(system).get(before["fingerprint"])
        if package is not None and not before["trusted"]:
            system.require(("rpm", "-e", package), f"rpm can't remove the key {before['fingerprint']}")
        restore_path(system, before["file"])
