"""Remove rpm packages, or a trusted key, so that an undo can restore them: copies are fetched first."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gpuprov.core.changes import Change, Json, Tell, capture_path, restore_path
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.packages.package_lock import LOCK_SECONDS, tell_nobody
from gpuprov.packages.rpm_failures import finish
from gpuprov.packages.rpm_packages import gather_keys, installed_rpms, package_name, run_rpm
from gpuprov.protocol.errors import GpuprovError

COPIES = f"{STATE_DIRECTORY}/removed"
_SECONDS = 600


class RpmProgram(Protocol):
    """The facts about dnf or zypper that a removal needs; packages/rpm.py explains the fields."""

    def copies(self, folder: str, names: Sequence[str]) -> tuple[str, ...]: ...


def unowned(system: System, paths: Sequence[str]) -> tuple[str, ...]:
    """Return those of the paths that no package owns."""
    return tuple(path for path in paths if not system.run(("rpm", "--query", "--file", path)).ok)


def needed_by(system: System, names: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return name → other installed packages that need it, except those in `names`."""
    return {name: others for name in names if (others := _needing(system, name, names))}


def _needing(system: System, name: str, names: Sequence[str]) -> tuple[str, ...]:
    if len(names) > 1 and system.run(("rpm", "--erase", "--test", *names)).ok:
        return ()
    said = system.run(("rpm", "--erase", "--test", name)).stderr
    others = {package_name(found) for found in re.findall(r"is needed by \(installed\) (\S+)", said)}
    return tuple(sorted(others - set(names)))


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
            run_rpm(system, self.program.copies(COPIES, (package,)), tell, _SECONDS, self.lock_timeout)
        system.sync()
        done = run_rpm(system, ("rpm", "--erase", *before["packages"]), tell, _SECONDS, self.lock_timeout)
        for image in before["keep"]:
            restore_path(system, image)
        finish(done, f"{', '.join(self.names)} could not be removed")
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        there = installed_rpms(system)
        files = [path for one in before["packages"] if one not in there and (path := _copy(system, one))]
        if files:
            words = ("rpm", "--install", "--oldpackage", *files)
            done = run_rpm(system, words, tell_nobody, _SECONDS, before["lock_timeout"])
            finish(done, "removed packages could not be installed again")
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
            system.require(("rpm", "--erase", package), f"rpm does not give up the key {self.fingerprint}")
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
                f"rpm does not take the key {before['fingerprint']} again", done.evidence(), "rpm -qa gpg-pubkey"
            )
