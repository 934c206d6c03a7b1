"""Packages through dnf or zypper: what is installed, what is missing, and the changes that install and remove it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from gpuprov.core.changes import Change, Json, Tell
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.packages.apt_packages import PackageFacts
from gpuprov.packages.engine_packages import restarts_engine
from gpuprov.packages.package_lock import LOCK_SECONDS, lock_holder, tell_nobody, wait_until_free
from gpuprov.packages.past_kernels import Advice
from gpuprov.packages.pgp import fingerprints
from gpuprov.packages.rpm_failures import finish
from gpuprov.packages.rpm_locks import gather_locks
from gpuprov.protocol.errors import GpuprovError

_INSTALL_SECONDS = 3600
_REFRESH_SECONDS = 600
# Files that hold the process id of a running package manager: dnf 4 (dnf/lock.py), libzypp.
_PID_FILES = (
    "/var/cache/dnf/metadata_lock.pid", "/var/cache/dnf/download_lock.pid", "/var/lib/dnf/rpmdb_lock.pid",
    "/run/zypp.pid",
)  # fmt: skip
# Files that rpm locks with fcntl(2), whichever program calls it; the second is SUSE's and newer Fedoras'.
_LOCKS = ("/var/lib/rpm/.rpm.lock", "/usr/lib/sysimage/rpm/.rpm.lock")
_QUERY = "%{NAME} %|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}.%{ARCH}[ %{PROVIDENAME}]\\n"
_KEY_QUERY = "%{NAME}-%{VERSION}-%{RELEASE}\\n%{DESCRIPTION}\\n"


class RpmProgram(Protocol):
    """The facts about dnf or zypper that changes need; packages/rpm.py explains the fields."""

    name: str
    refresh: tuple[str, ...]
    install: tuple[str, ...]
    version_joint: str
    good_codes: tuple[int, ...]

    def hold_tool(self, system: System) -> str: ...


def gather_packages(system: System, program: RpmProgram) -> PackageFacts:
    """Return what is installed and which keys are trusted, by two queries.

    Raises GpuprovError if rpm's database can't be read: no plan may be based on it.
    """
    if system.which("rpm") is None or system.which(program.name) is None:
        return PackageFacts("", {})
    done = system.require(
        ("rpm", "-qa", "--queryformat", _QUERY), "rpm's database can't be read", "rpm --rebuilddb; then run this again"
    )
    installed, provided = parse_rpm(done.stdout)
    keys = frozenset(gather_keys(system))
    locks = gather_locks(system, program.hold_tool(system))
    return PackageFacts(program.name, installed, provided=provided, trusted_keys=keys, locks=locks)


def parse_rpm(text: str) -> tuple[Mapping[str, str], frozenset[str]]:
    """Return name → versions, and the plain names that packages provide, from `NAME VERSION PROVIDED…` lines."""
    installed: dict[str, str] = {}
    provided: set[str] = set()
    for words in (line.split(" ") for line in text.splitlines()):
        if len(words) < 2 or words[0] == "gpg-pubkey":
            continue
        installed[words[0]] = f"{installed[words[0]]} {words[1]}" if words[0] in installed else words[1]
        # Users never name libraries, files and capabilities with brackets.
        provided.update(name for name in words[2:] if not re.search(r"[(/]", name))
    return installed, frozenset(provided - set(installed))


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


def missing(packages: PackageFacts, names: Iterable[str], *, rebuilds: bool) -> tuple[str, ...]:
    """Return those of `names` (`NAME` or `NAME=VERSION`) that are not installed, or not in the requested version."""
    return tuple(dict.fromkeys(name for name in names if not _is_installed(packages, name, rebuilds=rebuilds)))


def _is_installed(packages: PackageFacts, wanted: str, *, rebuilds: bool) -> bool:
    name, _, version = wanted.partition("=")
    found = packages.installed.get(name)
    if not version:
        return found is not None or name in packages.provided
    return any(version in versions(one, rebuilds=rebuilds) for one in (found or "").split())


def versions(installed: str, *, rebuilds: bool) -> set[str]:
    """Return every form in which a user may write `EPOCH:VERSION-RELEASE.ARCH`.

    With `rebuilds` also without the last number of the release, which SUSE increments with each build of a package.
    """
    plain = installed.rpartition(":")[2]
    names = {installed, plain}
    names |= {name.rpartition(".")[0] for name in names}
    names |= {name.rpartition("-")[0] for name in names}
    if rebuilds:
        names |= {name.rpartition(".")[0] for name in names if "-" in name}
    return names


@dataclass(frozen=True)
class RefreshRpmIndex(Change):
    """Fetch the current index of the repositories; `options` are further options for dnf or zypper."""

    program: RpmProgram
    lock_timeout: int = LOCK_SECONDS
    options: tuple[str, ...] = ()

    # A half-fetched index is fetched again; nothing to undo.
    undo_when_interrupted: ClassVar[bool] = False
    uses_package_manager: ClassVar[bool] = True
    bundle_part: ClassVar[str] = "packages"

    def summary(self) -> str:
        return f"refresh the package index ({' '.join(self.program.refresh)})"

    def apply(self, system: System, tell: Tell) -> Json:
        done = run_rpm(system, _with(self.program.refresh, self.options), tell, _REFRESH_SECONDS, self.lock_timeout)
        finish(done, "the package index could not be refreshed", self.program.good_codes)
        return {}


@dataclass(frozen=True)
class InstallRpmPackages(Change):
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

    # The next run plans again, from what rpm reports.
    undo_when_interrupted: ClassVar[bool] = False
    uses_package_manager: ClassVar[bool] = True
    bundle_part: ClassVar[str] = "packages"
    undo_disturbs: ClassVar[bool] = True

    @property
    def disturbs(self) -> bool:
        return restarts_engine(self.names)

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
        done = run_rpm(system, command, tell, _INSTALL_SECONDS, self.lock_timeout)
        finish(done, f"{', '.join(self.names)} could not be installed", how.good_codes, self.advice)
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
            done = run_rpm(system, ("rpm", "-e", *gone), tell_nobody, _INSTALL_SECONDS, lock_timeout)
            finish(done, f"{', '.join(gone)} could not be removed")


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


def _with(command: tuple[str, ...], options: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command with options for the program itself, which stand before its verb."""
    return (command[0], *options, *command[1:])


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
