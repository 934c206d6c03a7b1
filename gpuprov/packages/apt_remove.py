"""Remove packages of apt's such that they can come back: each is built again from the installed files before."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gpuprov.core.changes import Change, Json, Tell, capture_path, restore_path
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.packages import dpkg
from gpuprov.packages.apt_failures import finish
from gpuprov.packages.apt_undo import needed_by_others
from gpuprov.packages.package_lock import LOCK_SECONDS, tell_nobody
from gpuprov.protocol.errors import GpuprovError

COPIES = f"{STATE_DIRECTORY}/removed"
_INFO = "/var/lib/dpkg/info"
# What a package brings beside its files (deb(5)); dpkg's own lists are not among these.
_CONTROL = ("preinst", "postinst", "prerm", "postrm", "triggers", "config", "templates", "shlibs", "conffiles")
# $1: the list of files, $2: the folder that gets them, with owner, mode and links.
_COPY = 'tar -C / -c -f - --no-recursion --ignore-failed-read -T "$1" | tar -C "$2" -x -p -f -'
_SECONDS = 300
# Links to /usr on current releases, folders in packages.
_ALIASES = ("/.", "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")


def unowned(system: System, paths: Sequence[str]) -> tuple[str, ...]:
    """Return those of the paths that no package has brought."""
    return tuple(path for path in paths if not _owner(system, path))


def _owner(system: System, path: str) -> str:
    # /lib is a link to /usr/lib on current releases; packages name the one or the other.
    other = path[len("/usr") :] if path.startswith("/usr/") else f"/usr{path}"
    return system.run(("dpkg-query", "--search", path, other)).stdout


@dataclass(frozen=True)
class RemovePackages(Change):
    """These packages shall be gone, with their configuration; the files of `keep` stay as they are."""

    names: tuple[str, ...]
    keep: tuple[str, ...] = ()
    lock_timeout: int = LOCK_SECONDS

    uses_package_manager: ClassVar[bool] = True

    def summary(self) -> str:
        kept = f"; {', '.join(self.keep)} stays" if self.keep else ""
        return f"remove {', '.join(self.names)} (a rollback installs them again from copies){kept}"

    @property
    def key(self) -> str:
        return f"remove {', '.join(self.names)}"

    def capture(self, system: System) -> Json:
        there = {one.name: one.version for one in dpkg.query(system) if one.present and one.name in self.names}
        automatic = system.run(("apt-mark", "showauto", *there)).stdout.split() if there else []
        return {
            "names": there,
            "automatic": [name for name in automatic if name in there],
            "keep": [capture_path(system, path) for path in self.keep],
            "lock_timeout": self.lock_timeout,
        }

    def apply(self, system: System, tell: Tell) -> Json:
        before = self.capture(system)
        dpkg.repair(system, tell, self.lock_timeout)
        gone = tuple(before["names"])
        if others := needed_by_others(system, gone):
            needed = "; ".join(f"{name}: {', '.join(found)}" for name, found in others.items())
            raise GpuprovError("other packages need what is to be removed", needed, f"apt-get purge {' '.join(gone)}")
        for name in gone:
            tell(f"keeping a copy of {name}", 0, 0)
            build_again(system, name, _copy(name))
        system.sync()
        done = dpkg.run_apt(system, ("purge", "--", *gone), tell, lock_timeout=self.lock_timeout)
        for image in before["keep"]:
            restore_path(system, image)
        finish(done, f"{', '.join(gone)} could not be removed")
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        there = {one.name for one in dpkg.query(system) if one.whole}
        gone = [name for name in before["names"] if name not in there]
        lock_timeout = before["lock_timeout"]
        if gone:
            words = ("dpkg", "--force-confold", "--force-confmiss", "--install", *(_copy(name) for name in gone))
            done = dpkg.run_dpkg(system, words, tell_nobody, lock_timeout)
            if not done.ok:
                raise GpuprovError(
                    f"{', '.join(gone)} could not be installed again", done.evidence(8),
                    f"the packages lie in {COPIES}; remove what is in conflict with them, then run the same again",
                )  # fmt: skip
        automatic = [name for name in before["automatic"] if name in gone]
        if automatic:
            finish(
                dpkg.run_dpkg(system, ("apt-mark", "auto", *automatic), tell_nobody, lock_timeout), "apt-mark failed"
            )
        for image in before["keep"]:
            restore_path(system, image)
        for name in before["names"]:
            system.remove(_copy(name))
        if not system.list_directory(COPIES):
            system.remove(COPIES)


def _copy(name: str) -> str:
    return f"{COPIES}/{name.replace(':', '_')}.deb"


def build_again(system: System, name: str, target: str) -> None:
    """Build an installed package again as a file: its files as they are now, its scripts, its fields.

    What others than NVIDIA keep in a repository can be fetched again; a retired repository may be gone tomorrow.
    Raises GpuprovError if dpkg-deb can't build it.
    """
    work = system.temporary_directory("/var/tmp")
    try:
        # The folder becomes the package's root, which is not for root alone.
        system.change_mode(work, 0o755)
        folder = f"{work}/DEBIAN"
        system.make_directory(folder)
        fields = system.require(("dpkg-query", "--status", name), f"dpkg does not know {name}").stdout
        system.write(f"{folder}/control", control_of(fields).encode())
        for part in _CONTROL:
            _copy_control(system, name, part, folder)
        listed = system.require(("dpkg-query", "--listfiles", name), f"dpkg does not know {name}").stdout
        paths = (path for path in listed.splitlines() if path.startswith("/") and path not in _ALIASES)
        files = [path for path in paths if system.status(path)]
        system.write(f"{work}.list", "".join(f"./{path.lstrip('/')}\n" for path in files).encode())
        what = f"no copy of {name} could be kept, so it is not removed"
        system.require(("sh", "-c", _COPY, "sh", f"{work}.list", work), what, timeout=_SECONDS)
        system.make_directory(COPIES, 0o700)
        system.require(("dpkg-deb", "--build", "-Zgzip", work, target), what, timeout=_SECONDS)
    finally:
        system.remove_tree(work)
        system.remove(f"{work}.list")


def _copy_control(system: System, name: str, part: str, folder: str) -> None:
    native = name.partition(":")[0]
    names = [
        one for one in system.list_directory(_INFO) if re.fullmatch(rf"{re.escape(native)}(:[\w-]+)?\.{part}", one)
    ]
    content = system.read_bytes(f"{_INFO}/{names[0]}") if names else None
    if content is None:
        return
    if part == "conffiles":
        # One that an administrator has deleted can not be packed.
        lines = content.decode("utf-8", "replace").splitlines()
        content = "".join(f"{line}\n" for line in lines if system.status(line.split()[-1])).encode()
    system.write(f"{folder}/{part}", content, mode=0o755 if "inst" in part or "rm" in part else 0o644)


def control_of(status: str) -> str:
    """Return a package's control file from what `dpkg-query --status` prints: without dpkg's own fields."""
    fields = re.split(r"\n(?=\S)", status.strip("\n"))
    own = ("Status:", "Conffiles:", "Config-Version:", "Triggers-Pending:", "Triggers-Awaited:")
    return "".join(f"{field}\n" for field in fields if not field.startswith(own))
