"""The changes of packages by apt: install, hold and remove them, and undo each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from gpuprov.core.changes import Change, Json, Jsons, Tell, capture_path, restore_path, restore_paths, tell_nobody
from gpuprov.core.places import COPIES, SOURCES_LIST
from gpuprov.core.system import System
from gpuprov.packages import dpkg, interface
from gpuprov.packages.dpkg import Package
from gpuprov.packages.failures import FAILED, Advice, finish_apt, listed_under
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.words import counted

# dpkg runs the packages' scripts here.
_SCRIPTS = "/var/lib/dpkg/info"
_CONFFILES = ("dpkg-query", "--show", "--showformat=${Package}\n${Conffiles}\n", "--")
_NOT_LEFT = "does not tell the configuration that packages have left"
# Debian's docker.io takes all of docker's data along when it is purged (its postrm).
_PURGES_DATA = "docker.io"
_SIMULATE_SECONDS = 60
# A removal needs dpkg's status alone: to read a distribution's lists takes apt a second each time.
_NO_LISTS = ("Etc::SourceList=/dev/null", "Etc::SourceParts=/dev/null", "Cache::pkgcache=", "Cache::srcpkgcache=")
_STATUS_ALONE = tuple(f"-oDir::{setting}" for setting in _NO_LISTS)
# What a package brings beside its files (deb(5)); dpkg's own lists are not among these.
_CONTROL = ("preinst", "postinst", "prerm", "postrm", "triggers", "config", "templates", "shlibs", "conffiles")
# $1: the list of files, $2: the folder that gets them, with owner, mode and links.
_COPY = 'tar -C / -c -f - --no-recursion --ignore-failed-read -T "$1" | tar -C "$2" -x -p -f -'
_COPY_SECONDS = 300
# Links to /usr on current releases, folders in packages.
_ALIASES = ("/.", "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")


@dataclass(frozen=True)
class RefreshPackageIndex(interface.IndexRefresh):
    """Fetch the current index of the repositories; `options` are further options for apt."""

    options: tuple[str, ...] = ()

    executes: ClassVar[str] = _SCRIPTS

    def summary(self) -> str:
        return "refresh the package index (apt-get update)"

    def apply(self, system: System, tell: Tell) -> None:
        # Without the option, apt-get answers 0 even if no repository could be reached.
        command = ("-o", "APT::Update::Error-Mode=any", "update")
        done = dpkg.run_apt(system, command, tell, seconds=interface.REFRESH_SECONDS, options=self.options)
        finish_apt(done, "the package index could not be refreshed")


@dataclass(frozen=True)
class InstallPackages(interface.PackageInstallation):
    """Install these packages (`NAME[:ARCHITECTURE][=VERSION]`), and never remove another for them.

    `unhold`: those that are held in another version than the requested one; their hold is removed first. `options` are
    options for apt, such as those that make a bundle its only source. `advice` is the answer if no repository has a
    package.
    """

    names: tuple[str, ...]
    unhold: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    advice: Advice | None = field(default=None, compare=False)

    executes: ClassVar[str] = _SCRIPTS

    def summary(self) -> str:
        held = f" (taking the hold off {interface.shortened(self.unhold)})" if self.unhold else ""
        return f"install {', '.join(self.names)}{held}"

    @property
    def key(self) -> str:
        return f"install {', '.join(self.names)}"

    def capture(self, system: System) -> Json:
        packages = dpkg.query(system)
        return {
            "installed": sorted(one.name for one in packages if one.present),
            "versions": {one.name: one.version for one in packages if one.present},
            "left": conffiles_left(system, packages, self.names, self.options),
            "unhold": list(self.unhold),
            "options": list(self.options),
        }

    def apply(self, system: System, tell: Tell) -> Json:
        dpkg.repair(system, tell, self.options)
        before = present(system)
        if self.unhold:
            _mark(system, "unhold", self.unhold, tell)
        self._install(system, tell)
        return _outcome(before, present(system))

    def _install(self, system: System, tell: Tell) -> None:
        what = f"{', '.join(self.names)} could not be installed"
        # A version that is asked for may be an older one.
        older = ("--allow-downgrades",) if interface.pinned(self.names) else ()
        words = ("install", "--no-remove", *older, "--", *self.names)
        done = dpkg.run_apt(system, words, tell, options=self.options)
        finish_apt(done, what, self.advice)
        left, lacking = self._left(system)
        if left or lacking:
            # apt-get exits 0 despite a package that an earlier, killed run unpacked in part.
            dpkg.repair(system, tell, self.options)
            left, lacking = self._left(system)
        if left or lacking:
            seen = [f"{name} is {status}" for name, status in left.items()]
            seen += [f"{name} is not installed" for name in lacking]
            what += ": apt-get reported success, but not all packages are installed"
            step = "dpkg --audit tells what is wrong with a package; apt-get install --reinstall NAME often fixes it"
            raise GpuprovError(what, f"dpkg-query: {'; '.join(seen)}", step)

    def _left(self, system: System) -> tuple[Mapping[str, str], tuple[str, ...]]:
        """Return name → status of all packages that are partly installed, and those of its own that are not."""
        packages = dpkg.gather_packages(system)
        return packages.unfinished, dpkg.missing(packages, self.names)

    @classmethod
    def interrupted(cls, system: System, before: Json) -> Json:
        """Return the packages that are present now and were not before, complete or not."""
        return _outcome(before.get("versions", dict.fromkeys(before["installed"], "")), present(system))

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Remove what this change added; keep what was there before, and what another package needs by now."""
        added = (outcome or cls.interrupted(system, before))["added"]
        left: Mapping[str, Any] = before.get("left", {})
        # A bundle is unpacked during its run only; after it the host's own sources are the only ones.
        options = tuple(before.get("options", ())) if system.exists(SOURCES_LIST) else ()
        dpkg.repair(system, tell_nobody, options, required=False)
        gone, _ = _removable(system, added)
        # Those of `left` are only removed: they had configuration.
        for verb, configured in (("purge", False), ("remove", True)):
            if names := [name for name in gone if (name in left) is configured]:
                done = dpkg.run_apt(system, (*_STATUS_ALONE, verb, "--", *names), tell_nobody)
                # If the script of a package that is not ours fails, apt-get fails too, although it removed ours.
                listed = listed_under(FAILED, f"{done.stderr}\n{done.stdout}")
                failed = {name.partition(":")[0] for name in listed}
                if not failed or failed & {*names} or {*names} & present(system).keys():
                    finish_apt(done, f"{', '.join(names)} could not be removed")
        restore_paths(system, (one for name in added for one in left.get(name, ())))
        here = present(system)
        if held_again := [name for name in before.get("unhold", ()) if name in here]:
            _mark(system, "hold", held_again, tell_nobody)

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        found = outcome or cls.interrupted(system, before)
        # What purging takes along, or has to leave.
        gone, kept = _removable(system, found["added"])
        told = [f"{name} stays: {', '.join(others)}, installed since, needs it" for name, others in kept.items()]
        purged = [name for name in gone if name not in before.get("left", {})]
        told += [f"{path}, changed since {name} was installed, goes with it" for name, path in _changed(system, purged)]
        if _PURGES_DATA in purged and (data := _docker_data(system)):
            told.append(f"{_PURGES_DATA} takes all of /var/lib/docker along: {data}")
        return (*stays(found.get("changed", {})), *told)


def stays(changed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a sentence for each package that is not restored; `changed`: name → old and new version."""
    return tuple(f"{name} stays at {new}; before gpuprov it was {old}" for name, (old, new) in changed.items())


def plan_holds(packages: interface.PackageFacts, names: Iterable[str]) -> tuple[Change, ...]:
    """Return the change that holds these packages, and releases others that gpuprov held before, not the driver's."""
    wanted = {dpkg.own_name(packages, name) for name in names}
    hold, release = wanted - packages.held, packages.held_here - wanted - packages.driver
    return (HoldPackages(tuple(sorted(hold)), tuple(sorted(release))),) if hold or release else ()


@dataclass(frozen=True)
class HoldPackages(interface.PackageHold):
    """Hold these packages (`names`) at their version, and no longer hold those of `release`."""

    names: tuple[str, ...]
    release: tuple[str, ...] = ()
    driver: bool = False

    uses_package_manager: ClassVar[bool] = True
    executes: ClassVar[str] = _SCRIPTS

    def capture(self, system: System) -> Json:
        held = {one.name for one in dpkg.query(system) if one.want == "hold"}
        names = [*self._names(system), *self.release]
        return {
            "held": sorted(held & {*names}),
            "names": names,
            "list": capture_path(system, interface.HELD_LIST),
            # Earlier versions need it to undo this.
            "lock_timeout": system.lock_timeout,
        }

    def apply(self, system: System, tell: Tell) -> None:
        hold = self._names(system)
        for verb, names in (("hold", hold), ("unhold", self.release)):
            if names:
                _mark(system, verb, names, tell)
        interface.write_held(system, hold, self.release)

    def _names(self, system: System) -> tuple[str, ...]:
        if not self.driver:
            return self.names
        free = (one.name for one in dpkg.query(system) if one.whole and one.want != "hold")
        return tuple(sorted(interface.driver_set(free)))

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        held, here = set(before["held"]), present(system)
        for verb, names in (("hold", held), ("unhold", set(before["names"]) - held)):
            if found := sorted(name for name in names if name in here):
                _mark(system, verb, found, tell_nobody)
        restore_path(system, before["list"])


def _mark(system: System, verb: str, names: Iterable[str], tell: Tell) -> None:
    done = dpkg.run_dpkg(system, ("apt-mark", verb, *names), tell)
    finish_apt(done, f"apt-mark {verb} {' '.join(names)} failed")


def present(system: System) -> dict[str, str]:
    """Return name → version of the packages of which more than their configuration is installed."""
    return {one.name: one.version for one in dpkg.query(system) if one.present}


def _outcome(before: Mapping[str, str], after: Mapping[str, str]) -> Json:
    """Return what an installation added, and what it changed to another version: name → old and new."""
    changed = {name: [old, after[name]] for name, old in before.items() if old and after.get(name, old) != old}
    return {"added": sorted(after.keys() - before.keys()), "changed": changed}


def conffiles_left(
    system: System, packages: Iterable[Package], wanted: Sequence[str], options: Sequence[str] = ()
) -> Mapping[str, list[Json]]:
    """Return name → images of the configuration that packages left when they were removed, and not purged.

    Only those count that apt would install again for `wanted`; `options` are further words for it.
    """
    names = [one.name for one in packages if one.status == "config-files"]
    if not names:
        return {}
    quiet = ("--simulate", "--yes", "--no-install-recommends", "--allow-downgrades", *dpkg.NOTHING_ELSE)
    words = ("apt-get", *options, *quiet, "install", "--", *wanted)
    asked = interface.require_answer(system.run(words, timeout=_SIMULATE_SECONDS), f"apt-get {_NOT_LEFT}")
    coming = re.findall(r"^Inst (\S+)", asked.stdout, re.MULTILINE)
    names = [name for name in names if name in coming]
    listed = _conffiles(system, names)
    return {name: [capture_path(system, path) for path, _ in listed.get(name, ())] for name in names}


def _conffiles(system: System, names: Sequence[str]) -> Mapping[str, tuple[tuple[str, str], ...]]:
    if not names:
        return {}
    return parse_conffiles(interface.require_answer(system.run((*_CONFFILES, *names)), f"dpkg {_NOT_LEFT}").stdout)


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


def _removable(system: System, added: Sequence[str]) -> tuple[Sequence[str], Mapping[str, tuple[str, ...]]]:
    """Return the packages that are there of `added` and can go, and those that others need: name → these."""
    here = present(system)
    gone = [name for name in added if name in here]
    kept = needed_by_others(system, gone)
    return [name for name in gone if name not in kept], kept


def needed_by_others(system: System, names: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return those of `names` that can't go because others, installed since, would go with them: name → these."""
    if not names or not _taken_along(system, names):
        return {}
    found = {name: tuple(sorted(_taken_along(system, [name]) - set(names))) for name in names}
    kept = {name: others for name, others in found.items() if others}
    # A package that needs one of several goes with none of them, and with all.
    gone = [name for name in names if name not in kept]
    while others := gone and _taken_along(system, gone) - set(names):
        fewer = {name: _taken_along(system, [one for one in gone if one != name]) - set(names) for name in gone}
        name = min(gone, key=lambda one: len(fewer[one]))
        kept[name] = tuple(sorted(others))
        gone.remove(name)
    return kept


def _taken_along(system: System, names: Sequence[str]) -> set[str]:
    """Return what apt would remove besides, without doing it. Raises GpuprovError if apt does not come to an end."""
    words = ("apt-get", *_STATUS_ALONE, "--simulate", "--yes", *dpkg.NOTHING_ELSE, "purge", "--", *names)
    what = f"apt-get does not tell what would go with {names[0]}"
    done = interface.require_answer(system.run(words, timeout=_SIMULATE_SECONDS), what)
    return {*re.findall(r"^(?:Purg|Remv) (\S+)", done.stdout, re.MULTILINE)} - {*names}


def _changed(system: System, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (package, path) of the configuration files that are not as the package brought them."""
    # MD5 is dpkg's own choice; nothing rests on it here but a sentence.
    return [
        (name, path)
        for name, files in _conffiles(system, names).items()
        for path, digest in files
        if (content := system.read_bytes(path)) is not None
        and hashlib.new("md5", content, usedforsecurity=False).hexdigest() != digest
    ]


def _docker_data(system: System) -> str:
    """Return how many containers, images and volumes of the site's own there are, nothing if there are none."""
    questions = (("ps", "--all", "--quiet"), ("images", "--format", "{{.Repository}}"), ("volume", "ls", "--quiet"))
    asked = [system.run(("docker", *words), timeout=20) for words in questions]
    if not all(one.ok for one in asked):
        return "docker does not tell what is in it" if system.exists("/var/lib/docker") else ""
    nouns = ("container", "image", "volume")
    found = [[name for name in one.stdout.split() if not name.startswith("gpuprov-")] for one in asked]
    return ", ".join(counted(len(names), noun) for names, noun in zip(found, nouns) if names)


@dataclass(frozen=True)
class RemovePackages(interface.PackageRemoval):
    """Remove these packages with their configuration; the files of `keep` stay as they are."""

    names: tuple[str, ...]
    keep: tuple[str, ...] = ()

    def capture(self, system: System) -> Json:
        there = {one.name: one.version for one in dpkg.query(system) if one.present and one.name in self.names}
        asked, what = ("apt-mark", "showauto", *there), "apt-mark does not tell which packages nobody has asked for"
        automatic = system.require(asked, what, " ".join(asked)).stdout.split() if there else []
        return {
            "names": there,
            "automatic": [name for name in automatic if name in there],
            "keep": [capture_path(system, path) for path in self.keep],
            # Earlier versions need it to undo this.
            "lock_timeout": system.lock_timeout,
        }

    def apply(self, system: System, tell: Tell) -> None:
        before = self.capture(system)
        dpkg.repair(system, tell)
        gone = tuple(before["names"])
        if others := needed_by_others(system, gone):
            needed = "; ".join(f"{name}: {', '.join(found)}" for name, found in others.items())
            raise GpuprovError("other packages need what is to be removed", needed, f"apt-get purge {' '.join(gone)}")
        for name in gone:
            tell(f"keeping a copy of {name}", 0, 0)
            _rebuild_package(system, name, _copy(name))
        system.sync()
        done = dpkg.run_apt(system, (*_STATUS_ALONE, "purge", "--", *gone), tell)
        restore_paths(system, before["keep"])
        finish_apt(done, f"{', '.join(gone)} could not be removed")

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        there = {one.name for one in dpkg.query(system) if one.whole}
        gone = [name for name in before["names"] if name not in there and system.exists(_copy(name))]
        if gone:
            words = ("dpkg", "--force-confold", "--force-confmiss", "--install", *(_copy(name) for name in gone))
            step = f"the packages lie in {COPIES}; remove what conflicts with them, then run the same again"
            what = f"{', '.join(gone)} could not be installed again"
            dpkg.run_dpkg(system, words, tell_nobody).require(what, step, 8)
        if automatic := [name for name in before["automatic"] if name in gone]:
            _mark(system, "auto", automatic, tell_nobody)
        restore_paths(system, before["keep"])
        for name in before["names"]:
            system.remove(_copy(name))
        if not system.list_directory(COPIES):
            system.remove(COPIES)

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        there = {one.name for one in dpkg.query(system) if one.present}
        gone = (name for name in before["names"] if name not in there and not system.exists(_copy(name)))
        return tuple(f"package {name} is not restored: gpuprov no longer has its copy" for name in gone)


def _copy(name: str) -> str:
    return f"{COPIES}/{name.replace(':', '_')}.deb"


def _rebuild_package(system: System, name: str, target: str) -> None:
    """Rebuild the file of an installed package: its present files, its scripts, its control fields.

    A rollback installs it again even if the retired repository that had it no longer exists.
    Raises GpuprovError if dpkg-deb can't build it.
    """
    with system.temporary_directory("/var/tmp") as work:
        # The package's root is not for root alone.
        root, names = f"{work}/root", f"{work}/list"
        folder = f"{root}/DEBIAN"
        system.make_directory(folder)
        fields = system.require(("dpkg-query", "--status", name), f"dpkg does not know {name}").stdout
        system.write(f"{folder}/control", control_of(fields).encode())
        for part in _CONTROL:
            _copy_control(system, name, part, folder)
        listed = system.require(("dpkg-query", "--listfiles", name), f"dpkg does not know {name}").stdout
        paths = (path for path in listed.splitlines() if path.startswith("/") and path not in _ALIASES)
        files = [path for path in paths if system.status(path)]
        system.write(names, "".join(f"./{path.lstrip('/')}\n" for path in files).encode())
        what = f"no copy of {name} could be kept, so it is not removed"
        system.require(("sh", "-c", _COPY, "sh", names, root), what, timeout=_COPY_SECONDS)
        system.make_directory(COPIES, 0o700)
        system.require(("dpkg-deb", "--build", "-Zgzip", root, target), what, timeout=_COPY_SECONDS)


def _copy_control(system: System, name: str, part: str, folder: str) -> None:
    native = name.partition(":")[0]
    pattern = re.compile(rf"{re.escape(native)}(:[\w-]+)?\.{part}")
    names = [*filter(pattern.fullmatch, system.list_directory(_SCRIPTS))]
    content = system.read_bytes(f"{_SCRIPTS}/{names[0]}") if names else None
    if content is None:
        return
    if part == "conffiles":
        # dpkg-deb refuses a configuration file that an administrator has deleted.
        lines = content.decode("utf-8", "replace").splitlines()
        content = "".join(f"{line}\n" for line in lines if system.status(line.split()[-1])).encode()
    system.write(f"{folder}/{part}", content, mode=0o755 if "inst" in part or "rm" in part else 0o644)


def control_of(status: str) -> str:
    """Return a package's control file from what `dpkg-query --status` prints: without dpkg's own fields."""
    fields = re.split(r"\n(?=\S)", status.strip("\n"))
    own = ("Status:", "Conffiles:", "Config-Version:", "Triggers-Pending:", "Triggers-Awaited:")
    return "".join(f"{field}\n" for field in fields if not field.startswith(own))
