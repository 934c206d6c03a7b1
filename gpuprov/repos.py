"""Sets up repositories and their GPG keys for apt, dnf and zypper.

`plan` returns what to write and what to remove on a host, `problems` what only a person can correct. A repository
renders itself: as a deb822 source for apt, as a .repo file for dnf and zypper. Its key is taken only if it has the
pinned fingerprint, and counts for this repository alone where the package manager can tell them apart (apt).
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Callable, Union

from gpuprov.core.changes import Change, FileFact, RemoveFile, WriteFile
from gpuprov.facts.host import LOGINS, HostFacts
from gpuprov.machine.distros import ExtraRepository, own_driver
from gpuprov.packages import sources
from gpuprov.packages.keys import RPM_KEYS, InstallKey, InstallRpmKey, armored, dearmored, fingerprints
from gpuprov.packages.retired import REPOSITORY
from gpuprov.packages.rpm import RpmManager
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.secrets import masked, split_login
from gpuprov.protocol.spec import HostSpec, SiteRepository

_KEYRINGS = "/etc/apt/keyrings"
_RPM_KEY = f"{RPM_KEYS}/RPM-GPG-KEY-{sources.OURS}"
# Debian's name of an architecture, from `uname -m`.
DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Keys that were withdrawn, and why; gpuprov never accepts one, even if an inventory names it.
# Source: NVIDIA's blog, 27 April 2022.
_WITHDRAWN = {"AE09FE4BBD223A84B2CCFCE3F60F4B3D7FA2AF80": "NVIDIA replaced its CUDA repository key in April 2022"}
# What apt_auth.conf(5), and the .repo files of dnf and zypper, take without quotes.
_LOGIN = re.compile(r"[A-Za-z0-9!%&()*+,./:;<=>?@^_~-]+")


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
        return f"{sources.SOURCES}/{sources.OURS}{self.name}.sources"

    @property
    def key_path(self) -> str:
        # apt takes the format from the name: a binary key must end in .gpg, an armored one in .asc.
        return f"{_KEYRINGS}/{sources.OURS}{self.name}.gpg"

    def __str__(self) -> str:
        lines = ["Types: deb", f"URIs: {split_login(self.uri)[0]}", f"Suites: {self.suite}"]
        if not self.suite.endswith("/"):
            lines.append(f"Components: {self.components or 'main'}")
        lines += [f"Architectures: {self.architecture}", f"Signed-By: {self.key_path}"]
        return "".join(f"{line}\n" for line in lines)

    def files(self) -> tuple[WriteFile, ...]:
        """Return the source, and the entry of apt_auth.conf(5) for a login: every user can read a source."""
        source = WriteFile(self.source_path, str(self).encode())
        place, user, password = split_login(self.uri)
        if not user:
            return (source,)
        login = f"machine {place} login {user} password {password}\n"
        return (WriteFile(f"{LOGINS}/{sources.OURS}{self.name}.conf", login.encode(), 0o600), source)

    def key(self) -> Change:
        return InstallKey(self.key_path, self.key_url, self.key_fingerprint)

    def has_key(self, host: HostFacts) -> bool:
        """Say whether its key is there. Armored, it would be in a form that apt does not read from this file."""
        return _is_key(host.files.get(self.key_path), self.key_fingerprint, dearmored)


@dataclass(frozen=True)
class RpmRepository:
    """A signed rpm repository; `str()` is its .repo file (dnf.conf(5), zypper(8)).

    The metadata, which has the digest of every package, or every package must be signed; ideally both.
    `only`: patterns of the packages that may come from it; none means all.
    """

    name: str
    uri: str
    key_url: str
    key_fingerprint: str
    manager: RpmManager
    signed_metadata: bool = True
    signed_packages: bool = True
    only: tuple[str, ...] = ()

    @property
    def file_path(self) -> str:
        return f"{self.manager.repository_directory}/{sources.OURS}{self.name}.repo"

    @property
    def key_path(self) -> str:
        return f"{_RPM_KEY}{self.name}"

    def __str__(self) -> str:
        enabled, limit = self.manager.limited if self.only else (True, "")
        place, user, password = split_login(self.uri)
        login: tuple[str, ...] = (f"username={user}", f"password={password}") if user else ()
        if self.manager.login_in_url:
            login, place = (), self.uri
        lines = [
            f"[{sources.OURS}{self.name}]", f"name={self.name} (gpuprov)", f"baseurl={place}", f"enabled={enabled:d}",
            f"repo_gpgcheck={self.signed_metadata:d}", f"{self.manager.package_check}={self.signed_packages:d}",
            f"gpgkey=file://{self.key_path}", *self.manager.repository_lines,
            *([limit.format(" ".join(self.only))] if limit else []), *login,
        ]  # fmt: skip
        return "".join(f"{line}\n" for line in lines)

    def files(self) -> tuple[WriteFile, ...]:
        """Return its .repo file; a login in it is for root only."""
        return (WriteFile(self.file_path, str(self).encode(), 0o600 if split_login(self.uri)[1] else 0o644),)

    def key(self) -> Change:
        return InstallRpmKey(self.key_path, self.key_url, self.key_fingerprint)

    def has_key(self, host: HostFacts) -> bool:
        is_trusted = self.key_fingerprint in host.packages.trusted_keys
        return is_trusted and _is_key(host.files.get(self.key_path), self.key_fingerprint, armored)


# Python 3.9 has no `|` for types at run time.
Repository = Union[AptRepository, RpmRepository]


def _is_key(file: FileFact | None, fingerprint: str, form: Callable[[bytes], bytes]) -> bool:
    """Say whether a file is the key with this fingerprint, and no other, in the form that `form` gives it."""
    if file is None or file.mode != 0o644:
        return False
    try:
        return fingerprints(file.content) == (fingerprint,) and form(file.content) == file.content
    except GpuprovError:
        return False


def apt_repositories(
    spec: HostSpec, architecture: str, extra: tuple[ExtraRepository, ...] = ()
) -> tuple[AptRepository, ...]:
    """Return the repositories that a host needs besides its distribution's: the user's, the toolkit's, and `extra`."""
    debian = DEBIAN_ARCHITECTURES.get(architecture, architecture)
    # docs.nvidia.com, Container Toolkit installation guide: one flat repository for all Debian and Ubuntu releases.
    toolkit = _toolkit_channels(spec, f"deb/{debian}")
    known: tuple[SiteRepository | ExtraRepository, ...] = (*spec.repositories, *extra, *toolkit)
    return tuple(
        AptRepository(one.name, one.uri, one.suite, one.components, one.key_url, one.key_fingerprint, debian)
        for one in known
    )


def rpm_repositories(
    manager: RpmManager, spec: HostSpec, architecture: str, extra: tuple[ExtraRepository, ...] = ()
) -> tuple[RpmRepository, ...]:
    """Return the same repositories for dnf or zypper."""
    # docs.nvidia.com, Container Toolkit installation guide: one repository for all, its metadata signed alone.
    toolkit = tuple(_toolkit_channels(spec, f"rpm/{architecture}"))
    own = (ExtraRepository(one.name, one.uri, one.key_url, one.key_fingerprint) for one in spec.repositories)
    return tuple(
        RpmRepository(
            one.name, one.uri, one.key_url, one.key_fingerprint, manager, one.signed_metadata, one not in toolkit,
            one.only,
        )
        for one in (*own, *toolkit, *extra)
    )  # fmt: skip


def _toolkit_channels(spec: HostSpec, folder: str) -> Iterator[ExtraRepository]:
    """Yield the container toolkit's repositories that a host needs.

    The repository of release candidates does not replace the stable one: the installation guide enables both.
    """
    base, name = spec.toolkit_repository.rstrip("/"), "nvidia-container-toolkit"
    channels = {"stable": name, "experimental": f"{name}-experimental"}
    for channel, own_name in channels.items() if spec.toolkit == "nvidia" else ():
        if channel in ("stable", spec.toolkit_channel):
            uri = f"{base}/{channel}/{folder}"
            yield ExtraRepository(own_name, uri, f"{base}/gpgkey", spec.toolkit_key_fingerprint)


def plan(host: HostFacts, spec: HostSpec, extra: tuple[ExtraRepository, ...] = ()) -> tuple[Change, ...]:
    """Return the keys and sources to write on a host, and the conflicting ones to remove."""
    wanted, conflicts = _wanted(host, spec, extra)
    own = own_driver(host.distribution) if spec.driver == "distribution" else None
    # What the distribution's own driver comes from.
    words = (host.distribution.codename, own.components, own.keyrings) if own is not None and own.components else None
    components = sources.component_source(host.files, *words) if words is not None else ""
    changes: list[Change] = []
    kept = set()
    for one in wanted:
        changes += [] if one.has_key(host) else [one.key()]
        changes += [change for file in one.files() for change in host.write(file.path, file.content, file.mode)]
        kept |= {one.key_path, *(file.path for file in one.files())}
    if components:
        changes += host.write(sources.COMPONENTS_PATH, components.encode())
        kept.add(sources.COMPONENTS_PATH)
    changes += [one for one in conflicts if isinstance(one, Change)]
    places = tuple(f"{folder}/{sources.OURS}" for folder in (sources.SOURCES, _KEYRINGS, LOGINS))
    if isinstance(host.package_manager, RpmManager):
        places = (f"{host.package_manager.repository_directory}/{sources.OURS}", _RPM_KEY)
    old = (path for path in host.files if path.startswith(places) and path not in kept)
    return (*changes, *(RemoveFile(path, "no longer asked for") for path in old))


def problems(host: HostFacts, spec: HostSpec, extra: tuple[ExtraRepository, ...] = ()) -> Iterator[Problem]:
    """Yield what gpuprov can't correct in the repositories of the host or the user."""
    wanted, conflicts = _wanted(host, spec, extra)
    for one in wanted:
        if reason := _WITHDRAWN.get(one.key_fingerprint):
            what, seen = f"the key of repository {one.name} is withdrawn", f"{one.key_fingerprint}: {reason}"
            yield Problem(what, seen, "set the fingerprint of the current key")
    names = [one.name for one in wanted]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(f"two repositories have the name {name}", "", "give each of gpuprov_repositories its own name")
    apt = [one for one in wanted if isinstance(one, AptRepository)]
    places = [f"{_plain_apt(one.uri, one.architecture)} {one.suite}" for one in apt]
    for place in sorted({one for one in places if places.count(one) > 1}):
        named = ", ".join(one.name for one, there in zip(apt, places) if there == place)
        step = "leave it out of gpuprov_repositories: apt reads no source at all where a URL has two keys (Signed-By)"
        yield Problem(f"two repositories have the URL {place}", named, step)
    for one in wanted:
        has_login = "@" in one.uri.partition("://")[2].partition("/")[0]
        if has_login and not all(map(_LOGIN.fullmatch, split_login(one.uri)[1:])):
            yield Problem(
                f"the login in the URL of repository {one.name} can't be given to the package manager", masked(one.uri),
                "use USER:PASSWORD, each of letters, digits and !%&()*+,-./:;<=>?@^_~; or a mirror that needs no login",
            )  # fmt: skip
    yield from (one for one in conflicts if isinstance(one, Problem))


def _wanted(
    host: HostFacts, spec: HostSpec, extra: tuple[ExtraRepository, ...]
) -> tuple[Sequence[Repository], Sequence[Change | Problem]]:
    """Return the repositories that a host needs, and the conflicts with its own: corrected, or problems."""
    if isinstance(host.package_manager, RpmManager):
        rpm = rpm_repositories(host.package_manager, spec, host.architecture, extra)
        return rpm, list(_rpm_conflicts(host.package_manager, host, rpm))
    apt = apt_repositories(spec, host.architecture, extra)
    foreign = sources.foreign_sources(host.files)
    return apt, [one for path, file in foreign for one in _apt_conflicts(path, file, apt, spec)]


def _apt_conflicts(
    path: str, file: FileFact, wanted: Sequence[AptRepository], spec: HostSpec
) -> Iterator[Change | Problem]:
    """Yield the change that comments unwanted entries of a source out, or removes a source that has no other.

    What the journal keeps of the file is the way back. Entries that share their lines with others are problems: only
    their owner may take them out.
    """
    found = sources.entries(path, sources.text_of(file))
    unwanted = _unwanted(found, wanted, spec)
    others = {entry.block for entry in found if entry not in unwanted}
    inseparable = [entry for entry in unwanted if entry.block in others]
    for entry in inseparable:
        what = f"{path} names {masked(entry.uri)} too, among others; apt would report conflicting values for Signed-By"
        step = f"remove that line: gpuprov keeps this repository in {sources.SOURCES}/{sources.OURS}*.sources"
        yield Problem(what, f"{path}, line {entry.line}", step)
    if not unwanted or inseparable:
        return
    if not others:
        yield RemoveFile(path, next(iter(unwanted.values())))
        return
    numbers = {number for entry in unwanted for number in range(*entry.block)}
    numbered = enumerate(sources.text_of(file).splitlines(keepends=True), 1)
    lines = [f"# {line}" if number in numbers else line for number, line in numbered]
    yield WriteFile(path, "".join(lines).encode("utf-8", "surrogateescape"), file.mode)


def _unwanted(
    found: Sequence[sources.Entry], wanted: Sequence[AptRepository], spec: HostSpec
) -> Mapping[sources.Entry, str]:
    """Return the entries of a source that stand in the way of `wanted`, each with the reason.

    To apt a repository is a URI with a suite: another suite of the same mirror is another one, with a key of its own.
    """
    ours = {(_plain_apt(one.uri, one.architecture), suite): one for one in wanted for suite in one.suite.split()}
    architecture = wanted[0].architecture if wanted else ""
    unwanted = {}
    for entry in found:
        double = ours.get((_plain_apt(entry.uri, architecture), entry.suite.replace("$(ARCH)", architecture)))
        if double is not None:
            unwanted[entry] = f"a second source for {masked(double.uri)}"
        elif (spec.toolkit == "nvidia" or spec.migrate_nvidia_docker) and REPOSITORY.match(entry.uri):
            unwanted[entry] = "NVIDIA has retired this repository"
    return unwanted


def _plain_apt(uri: str, architecture: str) -> str:
    """Return a URI as apt compares it: sources.list(5) has one variable, login and final slash do not count."""
    return split_login(uri)[0].replace("$(ARCH)", architecture).rstrip("/")


def _rpm_conflicts(manager: RpmManager, host: HostFacts, wanted: Sequence[RpmRepository]) -> Iterator[Change | Problem]:
    """Yield the removal of each file that defines the `wanted` repositories again, problems for one with others too."""
    ours = {_plain_rpm(one.uri, host.architecture): masked(one.uri) for one in wanted}
    pattern = re.compile(rf"{manager.repository_directory}/(?!{sources.OURS})[^/]+\.repo")
    for path, file in host.files.items():
        if not pattern.fullmatch(path):
            continue
        try:
            sections = sources.repo_sections(file.content.decode("utf-8", "replace"))
        except configparser.Error:
            # dnf and zypper do not read it either.
            continue
        doubles = {
            name: sorted({plain for one in urls if (plain := _plain_rpm(one, host.architecture)) in ours})
            for name, urls in ((name, re.split(r"[\s,]+", one.get("baseurl", ""))) for name, one in sections)
        }
        if any(doubles.values()) and all(doubles.values()):
            yield RemoveFile(path, f"a second definition of {ours[[*doubles.values()][-1][-1]]}")
            continue
        for name, uri in ((name, uri) for name, uris in doubles.items() for uri in uris):
            what = f"{path} names {ours[uri]} too, among others: packages could come from there with other checks"
            own = f"{manager.repository_directory}/{sources.OURS}*.repo"
            step = f"remove that section: gpuprov keeps this repository in {own}"
            yield Problem(what, f"{path}, section [{name}]", step)


def _plain_rpm(uri: str, architecture: str) -> str:
    """Return a URI as dnf(8) and zypper compare it: the architecture filled in, no login, no final slash."""
    return re.sub(r"\$\{?basearch\}?", architecture, split_login(uri)[0]).rstrip("/")
