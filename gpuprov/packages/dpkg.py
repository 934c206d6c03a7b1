"""Run apt-get and dpkg: with gpuprov's own options, once their locks are free; finish what a killed one left."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from gpuprov.core.changes import Tell
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.packages import interface
from gpuprov.packages.failures import finish_apt
from gpuprov.packages.interface import INSTALL_SECONDS, PackageFacts, read_held
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError

# In the order in which apt and dpkg take them.
_LOCKS = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
)
_LOCKED = re.compile(r"Could not get lock|Unable to acquire the dpkg frontend lock|is locked by another process")
# A host's own apt.conf may say otherwise; what gpuprov installs is signed, always.
TRUST = (
    "-o", "APT::Get::AllowUnauthenticated=false",
    "-o", "Acquire::AllowInsecureRepositories=false",
    "-o", "Acquire::AllowWeakRepositories=false",
    "-o", "Acquire::AllowDowngradeToInsecureRepositories=false",
)  # fmt: skip
# So may it about what a command does: an installation fails where apt would also remove what nobody needs, and a
# rollback must not remove that, nor purge configuration.
_OFF = ("AutomaticRemove", "Purge", "Download-Only", "Print-URIs", "Trivial-Only", "Only-Upgrade")
_SET = {"APT::Install-Suggests": "false", "APT::Get::Remove": "true", "APT::Get::Download": "true"}
_SET.update({f"APT::Get::{name}": "false" for name in _OFF})
NOTHING_ELSE = tuple(word for name, value in _SET.items() for word in ("-o", f"{name}={value}"))
_APT = (
    "apt-get", "-q", "--yes", "--no-install-recommends", *TRUST, *NOTHING_ELSE,
    "-o", "APT::Get::Simulate=false",
    "-o", "Dpkg::Options::=--force-confold",
    "-o", "Dpkg::Use-Pty=0",
    "-o", "Acquire::Retries=3",
)  # fmt: skip
# A host's own apt.conf may name another proxy; without it apt takes its environment's (apt-transport-http(1)).
_OWN_PROXY = ("http::Proxy", "http::Proxy-Auto-Detect", "https::Proxy", "https::Proxy-Auto-Detect")
_NO_OWN_PROXY = tuple(word for setting in _OWN_PROXY for word in ("-o", f"Acquire::{setting}="))
# apt's hooks of these programs restart services, or end an installation for a bug that somebody has reported.
HOOKS = {"NEEDRESTART_SUSPEND": "1", "APT_LISTCHANGES_FRONTEND": "none", "APT_LISTBUGS_FRONTEND": "none"}
_QUERY = (
    "dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package} ${Version} ${Architecture} "
    "${db:Status-Want} ${db:Status-Eflag} ${Provides}\n",
)  # fmt: skip
_STATUS, _LISTS = "/var/lib/dpkg/status", "/var/lib/dpkg/info"
_RESTORE = f"cp -p {_STATUS}-old {_STATUS}, or the newest whole one of /var/backups/dpkg.status*; then run this again"
# Packages with pending triggers work; dpkg has yet to run another package's trigger.
_WHOLE = ("installed", "triggers-pending", "triggers-awaited")
_GONE = ("not-installed", "config-files")
_PROGRESS = r"Get:|(Unpacking|Setting up|Removing) "


@dataclass(frozen=True)
class Package:
    """A package as dpkg knows it. `name` ends in `:ARCHITECTURE` if that is not the machine's own."""

    name: str
    version: str
    status: str
    want: str = "install"
    error: str = "ok"
    provides: tuple[str, ...] = ()

    @property
    def present(self) -> bool:
        """Whether more of it than its configuration is installed."""
        return self.status not in _GONE

    @property
    def whole(self) -> bool:
        """Whether it is completely installed."""
        return self.status in _WHOLE and self.error == "ok"


def query(system: System) -> tuple[Package, ...]:
    """Return all packages that dpkg knows of, by one query.

    Raises GpuprovError if dpkg can't list them: an undo would remove those that it left out.
    """
    return _queried(system)[0]


def _queried(system: System) -> tuple[tuple[Package, ...], str]:
    """Return them with the machine's architecture, which is dpkg's own."""
    done, audit = system.run(_QUERY), "dpkg --audit; then run the same command again"
    text = done.require("dpkg's database can't be read", _RESTORE if _STATUS in done.stderr else audit).stdout
    rows = [row for row in (line.split(" ", 6) for line in text.splitlines()) if len(row) >= 3]
    if not rows and system.list_directory(_LISTS):
        # dpkg takes a lost or empty database for a machine without packages.
        raise GpuprovError("dpkg's database has no package", f"ls {_LISTS}: it has files of packages", _RESTORE)
    native = next((row[3] for row in rows if row[:2] == ["installed", "dpkg"] and len(row) > 3), "")
    packages = []
    for status, name, version, architecture, want, error, provides in (row + [""] * (7 - len(row)) for row in rows):
        own_name = f"{name}:{architecture}" if native and architecture not in ("", "all", native) else name
        names = tuple(part.split()[0].partition(":")[0] for part in provides.split(",") if part.strip())
        packages.append(Package(own_name, version, status, want or "install", error or "ok", names))
    return tuple(packages), native


def gather_packages(system: System) -> PackageFacts:
    """Return what is installed, by one query. Raises GpuprovError if dpkg can't list it: no plan may be based on it."""
    if system.which("apt-get") is None or system.which("dpkg-query") is None:
        return PackageFacts("", {})
    found, architecture = _queried(system)
    packages = [one for one in found if one.whole]
    held = frozenset(one.name for one in packages if one.want == "hold")
    return PackageFacts(
        "apt",
        {one.name: one.version for one in packages},
        architecture,
        frozenset(name for one in packages for name in one.provides),
        held,
        held & read_held(system),
        unfinished={one.name: one.status for one in found if one.present and not one.whole},
    )


def missing(packages: PackageFacts, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of `names` (`NAME[:ARCHITECTURE][=VERSION]`) that are not installed, or not in that version."""
    found = []
    for name in names:
        plain, _, version = name.partition("=")
        plain = own_name(packages, plain)
        # A version may be a pattern, as apt takes them (apt-get(8)): "550.163.01-*".
        is_there = plain in packages.installed and fnmatchcase(packages.installed[plain], version or "*")
        found += [] if is_there or (not version and plain in packages.provided) else [name]
    return tuple(dict.fromkeys(found))


def own_name(packages: PackageFacts, name: str) -> str:
    """Return a package's name as dpkg's query gives it: without the architecture where that is the machine's own."""
    plain, _, architecture = name.partition(":")
    return plain if architecture in ("", "all", "native", packages.architecture) else name


def owner(system: System, path: str) -> str:
    """Return dpkg's line about the package that has brought a path, or nothing. Raises GpuprovError if it can't say."""
    # /lib is a link to /usr/lib on current releases; packages name the one or the other.
    other = path[len("/usr") :] if path.startswith("/usr/") else f"/usr{path}"
    what = f"dpkg does not tell which package has {path}"
    return interface.require_answer(system.run(("dpkg-query", "--search", path, other)), what).stdout


def run_apt(
    system: System, words: tuple[str, ...], tell: Tell, *, seconds: float = INSTALL_SECONDS,
    options: tuple[str, ...] = (),
) -> Completed:  # fmt: skip
    """Run apt-get once no other process holds a lock; `options` are further options, such as those that name sources.

    Raises GpuprovError, naming the holder, if the lock takes too long.
    """
    return run_dpkg(system, (*_APT, *proxy_options(system), *options, *words), tell, seconds)


def proxy_options(system: System) -> tuple[str, ...]:
    """Return the options that make apt use the proxy of its environment, where gpuprov_proxy names one."""
    return _NO_OWN_PROXY if system.proxy.url else ()


def run_dpkg(system: System, command: tuple[str, ...], tell: Tell, seconds: float = INSTALL_SECONDS) -> Completed:
    """Run dpkg, or apt-mark, in the same way."""
    deadline = system.now() + system.lock_timeout
    while True:
        # apt's own waiting (DPkg::Lock::Timeout) knows the lock of dpkg alone: `apt-get update` fails at once.
        interface.wait_until_free(system, tell, lock_holder, deadline)
        env, on_line = {**HOOKS, **system.proxy.environment}, interface.reporter(_PROGRESS, tell)
        done = system.run(command, timeout=seconds, env=env, on_line=on_line)
        # Another process may have taken the lock between the check and apt's own.
        if done.ok or not _LOCKED.search(done.stderr) or system.now() > deadline:
            return done
        system.sleep(1)


def lock_holder(system: System) -> str:
    """Return the process that holds a lock of apt's or dpkg's, or nothing."""
    return interface.lock_holder(system, _LOCKS)


def repair(system: System, tell: Tell, options: tuple[str, ...] = (), *, required: bool = True) -> None:
    """Finish what an interrupted dpkg left: configure what is unpacked, and unpack half-installed packages again.

    apt-get itself may exit 0 despite such packages. Raises GpuprovError if they are `required` and can't be finished.
    """
    if system.list_directory("/var/lib/dpkg/updates") or system.run(("dpkg", "--audit")).stdout.strip():
        tell("finishing what an interrupted dpkg left half done", 0, 0)
        done = run_dpkg(system, ("dpkg", "--force-confold", "--configure", "-a"), tell)
        # Packages that are only partly on the disk, so that dpkg requires them to be unpacked again.
        present = [one for one in query(system) if one.present]
        halves = tuple(one.name for one in present if one.error != "ok" or one.status == "half-installed")
        if halves:
            done = run_apt(system, ("install", "--reinstall", "--no-remove", "--", *halves), tell, options=options)
        if required:
            finish_apt(done, "an interrupted package installation could not be finished")
