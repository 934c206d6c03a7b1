"""Packages through apt: what is installed, what is missing, and installing and taking away just that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpuprov.changes import Change, Json, Tell
from gpuprov.errors import GpuprovError
from gpuprov.system import Completed, System

# apt waits for the lock itself (since 1.9.11, apt.conf(5)); longer than unattended-upgrades usually takes.
LOCK_SECONDS = 300
_LOCKS = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
)
_APT = (
    "apt-get", "-q", "--yes", "--no-install-recommends",
    "-o", f"DPkg::Lock::Timeout={LOCK_SECONDS}",
    "-o", "Dpkg::Options::=--force-confold",
    "-o", "Dpkg::Use-Pty=0",
    "-o", "Acquire::Retries=3",
)  # fmt: skip
_INSTALL_SECONDS = 3600
_REFRESH_SECONDS = 600


@dataclass(frozen=True)
class PackageFacts:
    """The package manager (apt, or nothing that is supported) and what is installed: name → version."""

    manager: str
    installed: Mapping[str, str]


def gather_packages(system: System) -> PackageFacts:
    """Return what is installed, by one query."""
    if system.which("apt-get") is None or system.which("dpkg-query") is None:
        return PackageFacts("", {})
    query = ("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package} ${Version}\n")
    return PackageFacts("apt", parse_dpkg(system.run(query).stdout))


def parse_dpkg(text: str) -> Mapping[str, str]:
    """Return name → version of the packages that are wholly installed, from `STATUS NAME VERSION` lines."""
    rows = (line.split(" ") for line in text.splitlines())
    return {row[1]: row[2] for row in rows if len(row) == 3 and row[0] == "installed"}


def missing(packages: PackageFacts, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of `names` (`NAME` or `NAME=VERSION`) that are not installed, or not in that version."""
    return tuple(dict.fromkeys(name for name in names if not _is_installed(packages, name)))


def _is_installed(packages: PackageFacts, name: str) -> bool:
    plain, _, version = name.partition("=")
    found = packages.installed.get(plain)
    return found is not None and version in ("", found)


@dataclass(frozen=True)
class RefreshPackageIndex(Change):
    """apt shall know what its repositories hold now; `options` are further words for it."""

    options: tuple[str, ...] = ()

    # A half-fetched index is fetched again; nothing to undo.
    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return "refresh the package index (apt-get update)"

    def apply(self, system: System, tell: Tell) -> Json:
        # Without the option, apt-get answers 0 even if no repository could be reached.
        command = (*_APT, *self.options, "-o", "APT::Update::Error-Mode=any", "update")
        _finish(_run(system, command, tell, _REFRESH_SECONDS), "the package index could not be refreshed")
        return {}


@dataclass(frozen=True)
class InstallPackages(Change):
    """These packages (`NAME` or `NAME=VERSION`) shall be installed; `options` are further words for apt."""

    names: tuple[str, ...]
    options: tuple[str, ...] = ()

    # What dpkg was doing when it was killed is finished by the next run, which then plans afresh: taking packages out
    # again only to install them anew would gain nothing and could fail.
    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return f"install {', '.join(self.names)}"

    def capture(self, system: System) -> Json:
        return {"installed": sorted(gather_packages(system).installed)}

    def apply(self, system: System, tell: Tell) -> Json:
        repair(system, tell)
        before = set(gather_packages(system).installed)
        done = _run(system, (*_APT, *self.options, "install", "--", *self.names), tell, _INSTALL_SECONDS)
        _finish(done, f"{', '.join(self.names)} could not be installed")
        return {"added": sorted(set(gather_packages(system).installed) - before)}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Purge what this change added; what was there before is never touched."""
        now = set(gather_packages(system).installed)
        added = (outcome or {}).get("added", sorted(now - set(before["installed"])))
        gone = [name for name in added if name in now]
        if gone:
            done = system.run((*_APT, "purge", "--", *gone), timeout=_INSTALL_SECONDS)
            _finish(done, f"{', '.join(gone)} could not be removed")


def repair(system: System, tell: Tell) -> None:
    """Finish what an interrupted dpkg left half done."""
    if system.list_directory("/var/lib/dpkg/updates") or system.run(("dpkg", "--audit")).stdout.strip():
        tell("finishing what an interrupted dpkg left half done", 0, 0)
        done = _run(system, ("dpkg", "--force-confold", "--configure", "-a"), tell, _INSTALL_SECONDS)
        _finish(done, "an interrupted package installation could not be finished")


def _run(system: System, command: tuple[str, ...], tell: Tell, seconds: float) -> Completed:
    holder = lock_holder(system)
    if holder:
        tell(f"waiting up to {LOCK_SECONDS} s for {holder}, which holds the package manager's lock", 0, 0)
    return system.run(command, timeout=seconds + LOCK_SECONDS, on_line=lambda line: _tell_progress(line, tell))


def _tell_progress(line: str, tell: Tell) -> None:
    if line.startswith(("Get:", "Unpacking ", "Setting up ", "Removing ")):
        tell(line.strip(), 0, 0)


def lock_holder(system: System) -> str:
    """Return `NAME (pid N)` of the process that holds a lock of the package manager, or nothing.

    proc(5), /proc/locks: the sixth field is MAJOR:MINOR:INODE, the fifth the holder.
    """
    inodes = {str(system.inode(path)) for path in _LOCKS} - {"0"}
    for line in (system.read_text("/proc/locks") or "").splitlines():
        words = line.split()
        # A line with an arrow is one who waits for the lock.
        if "->" not in words and len(words) > 5 and words[5].rpartition(":")[2] in inodes:
            name = (system.read_text(f"/proc/{words[4]}/comm") or "a process").strip()
            return f"{name} (pid {words[4]})"
    return ""


# What apt says, what it means, what to do. The first row that matches decides.
_FAILURES = (
    (r"Could not get lock|Unable to acquire the dpkg frontend lock", "another program holds the package manager's lock",
     "wait for its end (ps -ef | grep -E 'apt|dpkg'), then run the same command again"),
    (r"Unable to locate package|has no installation candidate|Version '.*' for '.*' was not found",
     "no repository has such a package", "apt-cache policy NAME shows what the repositories have; is one missing?"),
    # Before the next row: of these apt says besides that the repository is not signed.
    (r"BADSIG|EXPKEYSIG|REVKEYSIG|signatures were invalid|Clearsigned file isn't valid",
     "a repository's signature is wrong, or its key has expired",
     "the line names the repository: get its current key; a mirror or proxy may also deliver damaged files"),
    (r"NO_PUBKEY|is not signed|no longer signed", "a repository is not signed with a key that this host trusts",
     "the line names the repository: correct its key (Signed-By), or remove it"),
    (r"Hash Sum mismatch|File has unexpected size", "a repository delivered a damaged file",
     "a mirror in the middle of its update, or a proxy: run the same command again in some minutes"),
    (r"is not valid yet|Release file .* expired", "this host's clock and a repository's disagree",
     "check the clock: timedatectl; then the mirror"),
    (r"does not have a Release file|no longer has a Release file|  404  ",
     "there is no repository at that address, or the file is gone from it",
     "the line names it: check its URI and suite, and whether the mirror is whole"),
    (r"Conflicting values set for option", "two sources name the same repository, with different keys",
     "grep -rl the address that the line names /etc/apt; remove one of the two"),
    (r"Temporary failure resolving|Could not resolve", "a repository's name is not known",
     "check DNS: getent hosts NAME"),
    (r"Could not connect|Connection (refused|failed|timed out)|Network is unreachable|Failed to fetch",
     "a repository can't be reached", "check network and proxy, or remove the repository that the line names"),
    (r"No space left on device|enough free space", "the disk is full", "make room: df -h"),
    (r"unmet dependencies|held broken packages", "the packages do not fit together",
     "apt-get --fix-broken install; apt-mark showhold shows what is held"),
)  # fmt: skip


def _finish(done: Completed, what: str) -> None:
    """Raise GpuprovError, with apt's decisive line, if apt failed."""
    if done.ok:
        return
    said = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
    for pattern, meaning, next_step in _FAILURES:
        line = next((line for line in said if re.search(pattern, line)), None)
        if line is not None:
            raise GpuprovError(f"{what}: {meaning}", f"{done.argv[0]} exited {done.returncode}: {line}", next_step)
    raise GpuprovError(what, done.evidence(), "run that command on the host to see all of it")
