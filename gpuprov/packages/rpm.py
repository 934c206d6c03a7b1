"""What dnf and zypper have in common: rpm's packages, .repo files and bundles, and the changes of packages."""

from __future__ import annotations

import re
import shlex
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from gpuprov.core.changes import Change, Json, RemoveFile, Tell, WriteFile, capture_path, restore_paths, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.places import COPIES, FOLDER, REPOSITORY, REPOSITORY_KEY
from gpuprov.core.system import System
from gpuprov.packages import interface, keys, rpm_locks
from gpuprov.packages.failures import Advice, finish_rpm
from gpuprov.packages.rpm_locks import HoldRpmPackages
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import GpuprovError

QUERY_SECONDS = 600
_REMOVE_SECONDS = 600
NO_INDEX = "the package index could not be refreshed"
_QUERY = "%{NAME} %|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}.%{ARCH}[ %{PROVIDENAME}]\\n"
# As `rpm -qa` prints by default; a user's ~/.rpmmacros may say otherwise.
_NAMES = ("--queryformat", "%{NVRA}\\n")
# A user may want colors in each output, by dnf.conf or zypper.conf.
_COLOR = re.compile(r"\x1b\[[\d;]*[mK]")
# dnf 4 and 5 with tsflags=test.
_ONLY_TESTED = re.compile(
    r"^.*(will only download packages.* and check the transaction|Test mode enabled: Only package downloads).*$",
    re.MULTILINE,
)
_INCOMPLETE = re.compile(r"^\s*tsflags\s*=.*\b(justdb|noscripts)\b.*$", re.MULTILINE)
BUNDLE_SOURCES = f"{FOLDER}/repos.d"
_PROGRESS = r"\s*(Installing|Upgrading|Removing|Erasing|Retrieving)\s*:\s*\S|[([]\d+/\d+[])] (Installing|Removing)"
# Files that hold the process id of a running package manager: dnf 4 (dnf/lock.py), libzypp.
_PID_FILES = (
    "/var/cache/dnf/metadata_lock.pid", "/var/cache/dnf/download_lock.pid", "/var/lib/dnf/rpmdb_lock.pid",
    "/run/zypp.pid",
)  # fmt: skip
# Files that rpm locks with fcntl(2), whichever program calls it; the second is SUSE's and newer Fedoras'.
_LOCKS = ("/var/lib/rpm/.rpm.lock", "/usr/lib/sysimage/rpm/.rpm.lock")


def rpm_lock_holder(system: System) -> str:
    """Return `NAME (pid N)` of the process that works with packages, or nothing."""
    for path in _PID_FILES:
        pid = (system.read_text(path) or "").strip()
        # A killed process leaves its file.
        name = system.read_text(f"/proc/{pid}/comm") if pid.isdecimal() else None
        if name is not None and int(pid) != system.own_pid():
            return f"{name.strip()} (pid {pid})"
    return interface.lock_holder(system, _LOCKS)


class RpmManager(interface.PackageManager):
    """A package manager that uses rpm.

    `refresh` and `install` are commands. `version_joint`: what stands between a name and the version that is asked for.
    `good_codes`: exit codes that mean success. `package_check`: the option of a .repo file that checks the signatures
    of packages. `repository_lines` and `bundle_lines`: further lines of a .repo file, and of a bundle's. `rebuilds`: a
    release ends in a number that counts how often the package was built. `login_in_url`: a .repo file has no other
    place for a login. `copied_directory`: where .repo files lie in a copy of the configuration. `fetch`: the command
    that fetches installed packages into the folder {}. `folder_option` makes the .repo files in the folder {} the only
    ones, `cache_option` names a cache. `limited`: whether a repository that may give some packages alone is enabled,
    and its line with the patterns {}; `limited_option` makes it count for a command. `unfiltered_option` shows all
    packages of the repository {}, whatever module streams are enabled.
    """

    refresh: tuple[str, ...]
    install: tuple[str, ...]
    version_joint: str
    good_codes: tuple[int, ...] = (0,)
    repository_directory: str
    copied_directory: str
    package_check: str
    repository_lines: tuple[str, ...]
    login_in_url = False
    bundle_lines: tuple[str, ...]
    rebuilds = False
    fetch: tuple[str, ...]
    folder_option: tuple[str, ...]
    cache_option: tuple[str, ...]
    limited: tuple[bool, str]
    limited_option: tuple[str, ...] = ()
    unfiltered_option: tuple[str, ...] = ()
    old_fabric_manager = "nvidia-fabric-manager"

    lock_holder = staticmethod(rpm_lock_holder)
    hold_driver = staticmethod(rpm_locks.plan_driver)

    @property
    def bundle_options(self) -> tuple[str, ...]:
        """The options that make the unpacked bundle the only source."""
        return (*_filled(self.folder_option, BUNDLE_SOURCES), *_filled(self.cache_option, f"{FOLDER}/cache"))

    def hold_tool(self, system: System) -> str:
        """Return the tool that holds packages, by its name in rpm_locks.LOCK_TOOLS."""
        return self.name

    def as_asked(self, system: System) -> tuple[str, ...]:
        """Return the options that win over a site's settings, for `refresh` and `install`."""
        return ()

    def word(self, package: str) -> str:
        """Return NAME-VERSION-RELEASE.ARCH as the command line takes it."""
        return package

    @abstractmethod
    def exact(self, system: System, names: Sequence[str], *, simulate: bool) -> tuple[str, ...]:
        """Return the command that installs packages (NAME-VERSION-RELEASE.ARCH), older ones too, or only says how.

        They may be files; then no repository is read.
        """

    def unlocked(self, system: System) -> tuple[str, ...]:
        """Return the options that show all versions of held packages."""
        return ()

    @abstractmethod
    def removed_by(self, done: Completed) -> tuple[str, ...] | None:
        """Return the packages that a simulated command would remove, None if it is impossible."""

    def only_from_copy(self, system: System, work: str, keys: Iterable[str]) -> tuple[str, ...]:
        """Return the options for a copy of the configuration below `work`, after making these key files trusted."""
        folder, cache = f"{work}/{self.copied_directory}", f"{work}/cache"
        return (*_filled(self.folder_option, folder), *_filled(self.cache_option, cache))

    @abstractmethod
    def query(self, system: System, options: tuple[str, ...], names: Sequence[str]) -> interface.Versions:
        """Return name → versions of what one set of repositories has."""

    def gather(self, system: System) -> interface.PackageFacts:
        """Return what is installed and which keys are trusted, by two queries.

        Raises GpuprovError if rpm's database can't be read: no plan may be based on it.
        """
        if system.which("rpm") is None or system.which(self.name) is None:
            return interface.PackageFacts("", {})
        installed, provided = parse_rpm(_query_all(system, "--queryformat", _QUERY))
        if not installed:
            step = "put its folder (rpm -E %_dbpath) back from a backup; then run this again"
            raise GpuprovError("rpm's database has no package", "rpm -qa: nothing", step)
        trusted = frozenset(keys.gather_keys(system))
        locks = rpm_locks.gather_locks(system, self.hold_tool(system))
        return interface.PackageFacts(self.name, installed, provided=provided, trusted_keys=trusted, locks=locks)

    def missing(self, packages: interface.PackageFacts, names: Iterable[str]) -> tuple[str, ...]:
        installed, found = packages.installed, []
        for name, _, version in (one.partition("=") for one in names):
            if version:
                there = any(version in self.version_names(one) for one in installed.get(name, "").split())
            else:
                there = name in installed or name in packages.provided
            found += [] if there else [f"{name}={version}" if version else name]
        return tuple(dict.fromkeys(found))

    def version_names(self, version: str) -> set[str]:
        """Return the forms of `EPOCH:VERSION-RELEASE.ARCH`: without its ends, and without the number of the build."""
        names = {version, version.rpartition(":")[2]}
        names |= {name.rpartition(".")[0] for name in names}
        names |= {name.rpartition("-")[0] for name in names}
        if self.rebuilds:
            names |= {name.rpartition(".")[0] for name in names if "-" in name}
        return names

    def bundled_versions(self, version: str, architecture: str) -> set[str]:
        return self.version_names(f"{version}.{architecture}")

    def typed(self, name: str) -> str:
        return shlex.quote(name.replace("=", self.version_joint, 1))

    def unowned(self, system: System, paths: Sequence[str]) -> tuple[str, ...]:
        asked = ((path, system.run(("rpm", "--query", "--file", path))) for path in paths)
        what = "rpm does not tell which package has"
        return tuple(path for path, done in asked if not interface.require_answer(done, f"{what} {path}").ok)

    def needed_by(self, system: System, names: Sequence[str]) -> interface.Versions:
        if len(names) > 1 and system.run(("rpm", "--erase", "--test", *names)).ok:
            return {}
        said = {name: system.run(("rpm", "--erase", "--test", name)).stderr for name in names}
        found = {name: re.findall(r"is needed by \(installed\) (\S+)", text) for name, text in said.items()}
        others = {name: sorted({*map(package_name, needing)} - {*names}) for name, needing in found.items()}
        return {name: tuple(needing) for name, needing in others.items() if needing}

    def offered(self, system: System, names: Sequence[str], planned: Sequence[Change]) -> interface.Versions:
        place = f"{self.repository_directory}/"
        touched = [one for one in planned if isinstance(one, (WriteFile, RemoveFile)) and one.path.startswith(place)]
        if not touched:
            return self.query(system, (), names)
        files = [one for one in touched if isinstance(one, WriteFile)]
        new_keys = [one for one in planned if isinstance(one, keys.InstallRpmKey)]
        with system.temporary_directory("/var/tmp") as work:
            found = self.query(system, self._without(system, work, touched), names)
            new = self.query(system, self._copy(system, work, files, new_keys), names) if files else {}
        return {name: (*found.get(name, ()), *new.get(name, ())) for name in {**found, **new}}

    def _without(self, system: System, work: str, touched: Sequence[WriteFile | RemoveFile]) -> tuple[str, ...]:
        """Return the options that leave out the host's repositories that the plan changes.

        One of them may be out of reach, and the plan corrects that.
        """
        folder, gone = f"{work}/host.d", {one.path for one in touched}
        system.make_directory(folder)
        for name in system.list_directory(self.repository_directory):
            path = f"{self.repository_directory}/{name}"
            content = None if path in gone else system.read_bytes(path)
            if content is not None:
                system.write(f"{folder}/{name}", content, mode=0o600)
        return _filled(self.folder_option, folder)

    def _copy(
        self, system: System, work: str, files: Sequence[WriteFile], new_keys: Sequence[keys.InstallRpmKey]
    ) -> tuple[str, ...]:
        """Write planned repositories below `work`; return the options that make these the only ones."""
        places = keys.place_keys(system, work, new_keys, keys.armored)
        folder = f"{work}/{self.copied_directory}"
        system.make_directory(folder)
        named = set()
        for file in files:
            content = keys.with_placed_keys(file.content, places)
            system.write(f"{folder}/{file.path.rpartition('/')[2]}", content, mode=file.mode)
            named.update(re.findall(r"^gpgkey=file://(\S+)", content.decode(), re.MULTILINE))
        return self.only_from_copy(system, work, sorted(named))

    def plan_installation(self, packages: interface.PackageFacts, wanted: interface.Installation) -> tuple[Change, ...]:
        names = self.missing(packages, wanted.names)
        lift, hold = rpm_locks.plan(packages.locks, wanted.hold, interface.pinned(names))
        if not names:
            return hold
        repository = wanted.unfiltered_repository
        options = _filled(self.unfiltered_option, repository) if repository else ()
        if wanted.bundle is not None:
            options = self.bundle_options
        more = _filled(self.limited_option, wanted.limited) if wanted.limited and wanted.bundle is None else ()
        apart = tuple(name for name in names if more and name in wanted.limited_names)
        together = tuple(name for name in names if name not in apart)
        changes = [*keys.plan_bundle_keys(wanted.bundle.vendor_keys if wanted.bundle else (), packages.trusted_keys)]
        for some, units, words in ((together, wanted.units, options), (apart, (), more)):
            if some:
                install = InstallRpmPackages(self, some, units, words, wanted.advice, lift)
                changes += [RefreshRpmIndex(self, words), install]
                lift = ()
        return (*changes, *hold)

    def removal(self, names: tuple[str, ...], keep: tuple[str, ...]) -> Change:
        return RemoveRpms(self, names, keep)

    def open_bundle(self, system: System, repository_key: str) -> None:
        """Write the source, and make rpm trust the bundle's key: zypper, and packages that it signs, need that."""
        key = system.read_bytes(f"{FOLDER}/{REPOSITORY_KEY}")
        if key is None:
            return
        system.make_directory(BUNDLE_SOURCES, 0o700)
        system.write(keys.BUNDLE_KEY, keys.armored(key))
        system.write(f"{BUNDLE_SOURCES}/bundle.repo", bundle_source(self.bundle_lines).encode())
        system.require(("rpm", "--import", keys.BUNDLE_KEY), f"rpm can't import the key {repository_key}")


def _query_all(system: System, *words: str) -> str:
    again = "rpm --rebuilddb; then run this again"
    return system.require(("rpm", "-qa", *words), "rpm's database can't be read", again).stdout


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


def bundle_source(lines: Iterable[str]) -> str:
    """Return the repository as a .repo file with these further lines.

    The bundle's key signs the metadata; the keys of the vendors sign the packages.
    """
    head = (
        "[gpuprov-bundle]", "name=gpuprov bundle", f"baseurl=file://{FOLDER}/{REPOSITORY}", "enabled=1",
        "repo_gpgcheck=1", f"gpgkey=file://{keys.BUNDLE_KEY}", "gpgcheck=1",
    )  # fmt: skip
    return "".join(f"{line}\n" for line in (*head, *lines))


def installed_rpms(system: System) -> set[str]:
    """Return NAME-VERSION-RELEASE.ARCH of all packages; rpm's own names, by which it takes them away."""
    return {name for name in _query_all(system, *_NAMES).split() if not name.startswith("gpg-pubkey-")}


def added(before: set[str], after: set[str]) -> set[str]:
    """Return the new packages, without those that only replaced an older version."""
    replaced = {package_name(package) for package in before - after}
    return {package for package in after - before if package_name(package) not in replaced}


def package_name(package: str) -> str:
    """Return NAME of NAME-VERSION-RELEASE.ARCH: neither version nor release may hold a dash."""
    return package.rsplit("-", 2)[0]


def run_rpm(system: System, command: tuple[str, ...], tell: Tell, seconds: float) -> Completed:
    """Run a package manager, or rpm, once no other process works with packages."""
    # dnf would wait without a time limit and without a message.
    interface.wait_until_free(system, tell, rpm_lock_holder)
    env = {"ZYPP_LOCK_TIMEOUT": str(system.lock_timeout), **system.proxy.environment}
    done = system.run(command, timeout=seconds, env=env, on_line=interface.reporter(_PROGRESS, tell))
    return replace(done, stdout=_COLOR.sub("", done.stdout), stderr=_COLOR.sub("", done.stderr))


def _filled(words: tuple[str, ...], value: str) -> tuple[str, ...]:
    return tuple(word.format(value) for word in words)


def _with(command: tuple[str, ...], options: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command with options for the program itself, which stand before its verb."""
    return (command[0], *options, *command[1:])


@dataclass(frozen=True)
class RefreshRpmIndex(interface.IndexRefresh):
    """Fetch the current index of the repositories; `options` are further options for dnf or zypper."""

    program: RpmManager
    options: tuple[str, ...] = ()

    def summary(self) -> str:
        return f"refresh the package index ({' '.join(self.program.refresh)})"

    def apply(self, system: System, tell: Tell) -> None:
        command = _with(self.program.refresh, (*self.options, *self.program.as_asked(system)))
        done = run_rpm(system, command, tell, interface.REFRESH_SECONDS)
        finish_rpm(done, NO_INDEX, self.program.good_codes)


@dataclass(frozen=True)
class InstallRpmPackages(interface.PackageInstallation):
    """Install these packages (`NAME` or `NAME=VERSION`), and enable the units that they bring.

    Debian's packages start and enable what they bring; those of rpm's distributions leave that to the administrator.
    `options` are options for the package manager, such as those that make a bundle its only source. `advice` is the
    answer if no repository has a package. `lift` removes holds first; the undo of a failed installation restores them.
    """

    program: RpmManager
    names: tuple[str, ...]
    enable: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    advice: Advice | None = field(default=None, compare=False)
    lift: tuple[HoldRpmPackages, ...] = ()

    def summary(self) -> str:
        enabled = f"; enable {', '.join(self.enable)}" if self.enable else ""
        lifted = "".join(f" (taking the hold off {interface.shortened(one.release)})" for one in self.lift)
        return f"install {', '.join(self.names)}{enabled}{lifted}"

    def diff(self, system: System) -> str:
        return "".join(one.diff(system) for one in self.lift)

    def capture(self, system: System) -> Json:
        return {"installed": sorted(installed_rpms(system)), "lift": [one.capture(system) for one in self.lift]}

    def apply(self, system: System, tell: Tell) -> Json:
        before = installed_rpms(system)
        lifted = [one.apply(system, tell) for one in self.lift]
        self._install(system, tell)
        after = installed_rpms(system)
        return {"added": sorted(added(before, after)), "replaced": sorted(before - after), "lift": lifted}

    def _install(self, system: System, tell: Tell) -> None:
        how = self.program
        names = tuple(name.replace("=", how.version_joint, 1) for name in self.names)
        command = (*_with(how.install, (*self.options, *how.as_asked(system))), *names)
        what = f"{', '.join(self.names)} could not be installed"
        conf = "/etc/dnf/dnf.conf"
        if how.name == "dnf" and (flag := _INCOMPLETE.search(system.read_text(conf) or "")):
            lacks = "files" if flag[1] == "justdb" else "scripts"
            step = f"grep tsflags {conf}; remove `{flag[1]}`; then run the command again"
            raise GpuprovError(f"{what}: dnf installs packages without their {lacks}", f"{conf}: {flag[0]}", step)
        done = run_rpm(system, command, tell, interface.INSTALL_SECONDS)
        finish_rpm(done, what, how.good_codes, self.advice)
        if only := _ONLY_TESTED.search(f"{done.stdout}\n{done.stderr}"):  # dnf 5 says so on stderr
            step = f"grep tsflags {conf}; remove `test`; then run the command again"
            raise GpuprovError(f"{what}: dnf reported success, but has installed nothing", only[0], step)
        for unit in self.enable:
            # Taking the package away disables it again (%systemd_preun, daemon(7)).
            words = ("systemctl", "enable", unit)
            system.require(words, f"{unit} can't be enabled", f"systemctl status {unit}", timeout=60)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Remove what this change added, with rpm: it refuses if another package needs one of them by now.

        dnf and zypper would also remove packages that depend on these, and those that they consider unused.
        """
        now = installed_rpms(system)
        ours = (outcome or {}).get("added", sorted(added(set(before["installed"]), now)))
        gone = [name for name in ours if name in now]
        # An update has given a package another version; of kernels' headers, several are there at once.
        others = map(package_name, (*gone, *before["installed"]))
        updated = {package_name(name) for name in ours if name not in now}.difference(others)
        newer = sorted(name for name in now if package_name(name) in updated)
        # What others need stays.
        if newer and system.run(("rpm", "--erase", "--test", *gone, *newer)).ok:
            gone += newer
        if gone:
            done = run_rpm(system, ("rpm", "-e", *gone), tell_nobody, interface.INSTALL_SECONDS)
            finish_rpm(done, f"{', '.join(gone)} could not be removed")
        lifted = (outcome or {}).get("lift", ())
        for index, one in enumerate(before.get("lift", ())):
            HoldRpmPackages.undo(system, one, lifted[index] if lifted else None)


@dataclass(frozen=True)
class RemoveRpms(interface.PackageRemoval):
    """Remove these packages; the files of `keep` stay as they are."""

    program: RpmManager
    names: tuple[str, ...]
    keep: tuple[str, ...] = ()

    restored_from: ClassVar[str] = "copies, if a repository still has them"

    def capture(self, system: System) -> Json:
        there = sorted(one for one in installed_rpms(system) if package_name(one) in self.names)
        # rpm renames a configuration file that was edited.
        keep = [capture_path(system, path) for one in self.keep for path in (one, f"{one}.rpmsave")]
        # Earlier versions need the last to undo this.
        return {"packages": there, "keep": keep, "lock_timeout": system.lock_timeout}

    def apply(self, system: System, tell: Tell) -> None:
        before = self.capture(system)
        system.make_directory(COPIES, 0o700)
        for package in before["packages"]:
            tell(f"keeping a copy of {package}", 0, 0)
            # `irreversible` reports packages that no repository has any more.
            command = (*_filled(self.program.fetch, COPIES), self.program.word(package))
            run_rpm(system, command, tell, _REMOVE_SECONDS)
        system.sync()
        done = run_rpm(system, ("rpm", "--erase", *before["packages"]), tell, _REMOVE_SECONDS)
        restore_paths(system, before["keep"])
        finish_rpm(done, f"{', '.join(self.names)} could not be removed")

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        there, copies = installed_rpms(system), _copies(system)
        files = [copies[one] for one in before["packages"] if one not in there and one in copies]
        if files:
            done = run_rpm(system, ("rpm", "--install", "--oldpackage", *files), tell_nobody, _REMOVE_SECONDS)
            finish_rpm(done, "removed packages could not be installed again")
        restore_paths(system, before["keep"])
        for one in before["packages"]:
            if one in copies:
                system.remove(copies.pop(one))
        if not copies:
            system.remove_tree(COPIES)

    @classmethod
    def irreversible(
        cls, system: System, before: Json, outcome: Json | None, earlier: tuple[Json, ...]
    ) -> tuple[str, ...]:
        restored = {*installed_rpms(system), *_copies(system)}
        gone = (one for one in before["packages"] if one not in restored)
        return tuple(f"package {one} is not restored: gpuprov has no copy of it" for one in gone)


def _copies(system: System) -> dict[str, str]:
    """Return package → its file among the copies; zypper keeps them in folders of its own."""
    place = system.path(COPIES)
    return {one.stem: f"{COPIES}/{one.relative_to(place)}" for one in place.rglob("*.rpm")}
