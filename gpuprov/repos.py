"""Repositories and their keys for apt, dnf and zypper: which a host needs, and the changes that add them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpuprov.core.changes import Change, RemoveFile, WriteFile
from gpuprov.machine.driver_rows import own_driver
from gpuprov.packages import apt_components, rpm_repos
from gpuprov.packages.apt_components import PATH as COMPONENTS
from gpuprov.packages.apt_sources import OURS, SOURCES, Entry, entries, foreign_sources, text_of
from gpuprov.packages.keys import InstallKey, problems_of_any
from gpuprov.packages.pgp import dearmored, fingerprints
from gpuprov.packages.retired import REPOSITORY
from gpuprov.packages.rpm import RpmManager
from gpuprov.packages.toolkit_channels import toolkit_channels
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.secrets import masked, split_login
from gpuprov.protocol.spec import HostSpec

if TYPE_CHECKING:
    from gpuprov.core.changes import FileFact
    from gpuprov.machine.distros import ExtraRepository
    from gpuprov.packages.interface import PackageManager
    from gpuprov.protocol.site_repository import SiteRepository

_KEYRINGS = "/etc/apt/keyrings"
_LOGINS = "/etc/apt/auth.conf.d"
# Debian's name of an architecture, from `uname -m`.
_DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Host(rpm_repos.Host, Protocol):
    """The facts about a host that repositories need."""

    @property
    def package_manager(self) -> PackageManager: ...


def host_problems(host: Host, spec: HostSpec, extra: tuple[ExtraRepository, ...] = ()) -> tuple[Problem, ...]:
    """Return what gpuprov can't correct in the repositories of the host or the user."""
    manager = host.package_manager
    if isinstance(manager, RpmManager):
        return manager.repository_problems(host, spec, extra)
    return problems(host.files, spec, host.architecture, extra)


def plan(host: Host, spec: HostSpec, extra: tuple[ExtraRepository, ...] = ()) -> tuple[Change, ...]:
    """Return the keys and sources to write on a host, and the conflicting ones to remove."""
    manager = host.package_manager
    if isinstance(manager, RpmManager):
        return manager.plan_repositories(host, spec, extra)
    return plan_repositories(host.files, spec, host.architecture, extra, _driver_components(host, spec))


def _driver_components(host: Host, spec: HostSpec) -> str:
    """Return the source with the components that the distribution's own driver comes from, if it is asked for."""
    row, own = host.distribution, own_driver(host.distribution)
    if spec.driver != "distribution" or row is None or own is None or not own.components:
        return ""
    return apt_components.source(host.files, row.codename, own.components, own.keyrings)


@dataclass(frozen=True)
class AptRepository:
    """A signed apt repository; `str()` is its deb822 source (sources.list(5)).

    A `suite` that ends in a slash is a path, and such a flat repository has no components.
    """

    name: str
    uri: str
    suite: str
    components: str
    key_url: str
    key_fingerprint: str
    architecture: str

    @property
    def source_path(self) -> str:
        return f"{SOURCES}/{OURS}{self.name}.sources"

    @property
    def key_path(self) -> str:
        # apt takes the format from the name: a binary key must end in .gpg, an armored one in .asc.
        return f"{_KEYRINGS}/{OURS}{self.name}.gpg"

    @property
    def login_path(self) -> str:
        return f"{_LOGINS}/{OURS}{self.name}.conf"

    @property
    def login(self) -> bytes:
        """The entry of apt_auth.conf(5) for a login in the URI, empty for none: every user can read a source."""
        place, user, password = split_login(self.uri)
        return f"machine {place} login {user} password {password}\n".encode() if user else b""

    def __str__(self) -> str:
        lines = ["Types: deb", f"URIs: {split_login(self.uri)[0]}", f"Suites: {self.suite}"]
        if not self.suite.endswith("/"):
            lines.append(f"Components: {self.components or 'main'}")
        lines += [f"Architectures: {self.architecture}", f"Signed-By: {self.key_path}"]
        return "".join(f"{line}\n" for line in lines)


def repositories(
    spec: HostSpec, architecture: str, extra: tuple[ExtraRepository, ...] = ()
) -> tuple[AptRepository, ...]:
    """Return the repositories that a host needs besides its distribution's: the user's, the toolkit's, and `extra`."""
    debian = _DEBIAN_ARCHITECTURES.get(architecture, architecture)
    known: tuple[SiteRepository | ExtraRepository, ...] = (*spec.repositories, *extra)
    found = [
        AptRepository(one.name, one.uri, one.suite, one.components, one.key_url, one.key_fingerprint, debian)
        for one in known
    ]
    # docs.nvidia.com, Container Toolkit installation guide: one flat repository for all Debian and Ubuntu releases.
    found += [
        AptRepository(one.name, f"{one.base}/deb/{debian}", "/", "", one.key_url, spec.toolkit_key_fingerprint, debian)
        for one in toolkit_channels(spec)
    ]
    return tuple(found)


def problems(
    files: Mapping[str, FileFact], spec: HostSpec, architecture: str, extra: tuple[ExtraRepository, ...] = ()
) -> tuple[Problem, ...]:
    """Return what gpuprov can't correct in the host's or the user's sources."""
    wanted = repositories(spec, architecture, extra)
    mixed = tuple(
        Problem(
            f"{path} names {masked(entry.uri)} too, among others; apt would report conflicting values for Signed-By",
            f"{path}, line {entry.line}",
            f"remove that line: gpuprov keeps this repository in {SOURCES}/{OURS}*.sources",
        )
        for path, file in foreign_sources(files)
        for entry in _inseparable(path, file, _unwanted(path, file, wanted, spec))
    )
    return problems_of_any(wanted) + mixed


def plan_repositories(
    files: Mapping[str, FileFact],
    spec: HostSpec,
    architecture: str,
    extra: tuple[ExtraRepository, ...] = (),
    components: str = "",
) -> tuple[Change, ...]:
    """Return the keys and sources to write, and the conflicting ones to remove.

    `components`: the text of a source with further components of the distribution's archive.
    """
    wanted = repositories(spec, architecture, extra)
    changes: list[Change] = []
    for one in wanted:
        key = files.get(one.key_path)
        if key is None or key.mode != 0o644 or not _is_pinned(key.content, one.key_fingerprint):
            changes.append(InstallKey(one.key_path, one.key_url, one.key_fingerprint))
    sources = {**{one.source_path: str(one) for one in wanted}, **({COMPONENTS: components} if components else {})}
    logins = {one.login_path: one.login for one in wanted if one.login}
    for path, login in logins.items():
        found = files.get(path)
        if found is None or (found.content, found.mode) != (login, 0o600):
            changes.append(WriteFile(path, login, 0o600))
    for path, text in sources.items():
        source = files.get(path)
        if source is None or source.content != text.encode() or source.mode != 0o644:
            changes.append(WriteFile(path, text.encode()))
    for path, file in foreign_sources(files):
        changes += _cleaned(path, file, _unwanted(path, file, wanted, spec))
    ours = {*sources, *logins, *(one.key_path for one in wanted)}
    for path in files:
        if path.startswith((f"{SOURCES}/{OURS}", f"{_KEYRINGS}/{OURS}", f"{_LOGINS}/{OURS}")) and path not in ours:
            changes.append(RemoveFile(path, "no longer asked for"))
    return tuple(changes)


def _is_pinned(content: bytes, fingerprint: str) -> bool:
    try:
        # Armored, it would be the right key in a form that apt does not read from this file.
        return fingerprints(content) == (fingerprint,) and dearmored(content) == content
    except GpuprovError:
        return False


def _unwanted(path: str, file: FileFact, wanted: tuple[AptRepository, ...], spec: HostSpec) -> dict[Entry, str]:
    """Return the entries of a source that stand in the way of `wanted`, each with the reason.

    To apt a repository is a URI with a suite: another suite of the same mirror is another one, with a key of its own.
    """
    ours = {(_plain(one.uri, one.architecture), suite): one for one in wanted for suite in one.suite.split()}
    architecture = wanted[0].architecture if wanted else ""
    found = {}
    for entry in entries(path, text_of(file)):
        double = ours.get((_plain(entry.uri, architecture), entry.suite.replace("$(ARCH)", architecture)))
        if double is not None:
            found[entry] = f"a second source for {masked(double.uri)}"
        elif (spec.toolkit == "nvidia" or spec.migrate_nvidia_docker) and REPOSITORY.match(entry.uri):
            found[entry] = "NVIDIA has retired this repository"
    return found


def _inseparable(path: str, file: FileFact, unwanted: Mapping[Entry, str]) -> list[Entry]:
    """Return the entries that share their lines with others, so that only their owner may take them out."""
    kept = {entry.block for entry in entries(path, text_of(file)) if entry not in unwanted}
    return [entry for entry in unwanted if entry.block in kept]


def _cleaned(path: str, file: FileFact, unwanted: Mapping[Entry, str]) -> list[Change]:
    """Return the change that takes the entries out: the file goes if it has no other, else their lines are commented.

    What the journal keeps of the file is the way back.
    """
    if not unwanted or _inseparable(path, file, unwanted):
        return []
    reason = next(iter(unwanted.values()))
    if all(entry in unwanted for entry in entries(path, text_of(file))):
        return [RemoveFile(path, reason)]
    blocks = [range(*entry.block) for entry in unwanted]
    lines = [
        f"# {line}" if any(number in block for block in blocks) else line
        for number, line in enumerate(text_of(file).splitlines(keepends=True), 1)
    ]
    return [WriteFile(path, "".join(lines).encode("utf-8", "surrogateescape"), file.mode)]


def _plain(uri: str, architecture: str) -> str:
    """Return a URI as apt compares it: sources.list(5) has one variable, login and final slash do not count."""
    return split_login(uri)[0].replace("$(ARCH)", architecture).rstrip("/")
