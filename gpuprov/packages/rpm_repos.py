"""Repositories and keys for dnf and zypper: which a host needs, and the changes that add them."""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from gpuprov.core.changes import Change, Json, RemoveFile, Tell, WriteFile, capture_path, parent_of, restore_path
from gpuprov.core.system import System
from gpuprov.packages.keys import fetch_pinned_key, problems_of_any
from gpuprov.packages.pgp import armored, fingerprints
from gpuprov.packages.rpm_packages import gather_keys
from gpuprov.packages.toolkit_channels import toolkit_channels
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.secrets import masked, split_login
from gpuprov.protocol.spec import HostSpec

if TYPE_CHECKING:
    from gpuprov.core.changes import FileFact
    from gpuprov.machine.distros import Distribution, ExtraRepository
    from gpuprov.packages.apt_packages import PackageFacts

KEYS = "/etc/pki/rpm-gpg"
_OURS = "gpuprov-"
_KEY_PREFIX = f"{KEYS}/RPM-GPG-KEY-{_OURS}"


class RepositoryProgram(Protocol):
    """The facts about dnf or zypper that repositories need; packages/rpm.py explains the fields."""

    repository_directory: str
    package_check: str
    repository_lines: tuple[str, ...]
    login_in_url: bool

    def limited(self, only: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]: ...


class Host(Protocol):
    """The facts about a host that repositories need."""

    @property
    def architecture(self) -> str: ...
    @property
    def distribution(self) -> Distribution | None: ...
    @property
    def files(self) -> Mapping[str, FileFact]: ...
    @property
    def packages(self) -> PackageFacts: ...


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
    program: RepositoryProgram
    signed_metadata: bool = True
    signed_packages: bool = True
    only: tuple[str, ...] = ()

    @property
    def file_path(self) -> str:
        return f"{self.program.repository_directory}/{_OURS}{self.name}.repo"

    @property
    def mode(self) -> int:
        """The mode of its file: a login is for root only."""
        return 0o600 if split_login(self.uri)[1] else 0o644

    @property
    def key_path(self) -> str:
        return f"{_KEY_PREFIX}{self.name}"

    def __str__(self) -> str:
        enabled, limits = self.program.limited(self.only) if self.only else (True, ())
        place, user, password = split_login(self.uri)
        login: tuple[str, ...] = (f"username={user}", f"password={password}") if user else ()
        if self.program.login_in_url:
            login, place = (), self.uri
        lines = [
            f"[{_OURS}{self.name}]", f"name={self.name} (gpuprov)", f"baseurl={place}", f"enabled={enabled:d}",
            f"repo_gpgcheck={self.signed_metadata:d}", f"{self.program.package_check}={self.signed_packages:d}",
            f"gpgkey=file://{self.key_path}", *self.program.repository_lines, *limits, *login,
        ]  # fmt: skip
        return "".join(f"{line}\n" for line in lines)


def key_files(text: str) -> list[str]:
    """Return the key files that a .repo file names."""
    return re.findall(r"^gpgkey=file://(\S+)", text, re.MULTILINE)


def repositories(
    program: RepositoryProgram, spec: HostSpec, architecture: str, extra: tuple[ExtraRepository, ...] = ()
) -> tuple[RpmRepository, ...]:
    """Return the repositories that a host needs besides its distribution's: the user's, the toolkit's, and `extra`."""
    found = [RpmRepository(own.name, own.uri, own.key_url, own.key_fingerprint, program) for own in spec.repositories]
    # docs.nvidia.com, Container Toolkit installation guide: one repository for all, its metadata signed alone.
    found += [
        RpmRepository(
            one.name, f"{one.base}/rpm/{architecture}", one.key_url, spec.toolkit_key_fingerprint, program,
            signed_packages=False,
        )
        for one in toolkit_channels(spec)
    ]  # fmt: skip
    found += [
        RpmRepository(
            one.name, one.uri, one.key_url, one.key_fingerprint, program, signed_metadata=one.signed_metadata,
            only=one.only,
        )
        for one in extra
    ]  # fmt: skip
    return tuple(found)


def problems(
    program: RepositoryProgram, host: Host, spec: HostSpec, extra: tuple[ExtraRepository, ...] = ()
) -> tuple[Problem, ...]:
    """Return what gpuprov can't correct in the host's or the user's repositories."""
    wanted = repositories(program, spec, host.architecture, extra)
    mixed = tuple(
        Problem(
            f"{path} names {uri} too, among others: packages could come from there with other checks",
            f"{path}, section [{section}]",
            f"remove that section: gpuprov keeps this repository in {program.repository_directory}/{_OURS}*.repo",
        )
        for path, uri, section, alone in _doubles(program, host, wanted)
        if not alone
    )
    return problems_of_any(wanted) + mixed


def plan_repositories(
    program: RepositoryProgram, host: Host, spec: HostSpec, extra: tuple[ExtraRepository, ...] = ()
) -> tuple[Change, ...]:
    """Return the keys and files to write, and the conflicting ones to remove."""
    files = host.files
    wanted = repositories(program, spec, host.architecture, extra)
    changes: list[Change] = []
    for one in wanted:
        if not _key_is_there(files.get(one.key_path), one.key_fingerprint, host.packages.trusted_keys):
            changes.append(InstallRpmKey(one.key_path, one.key_url, one.key_fingerprint))
        file = files.get(one.file_path)
        if file is None or file.content != str(one).encode() or file.mode != one.mode:
            changes.append(WriteFile(one.file_path, str(one).encode(), one.mode))
    doubles = {path: uri for path, uri, _, alone in _doubles(program, host, wanted) if alone}
    changes += [RemoveFile(path, f"a second definition of {uri}") for path, uri in doubles.items()]
    ours = {path for one in wanted for path in (one.file_path, one.key_path)}
    changes += [
        RemoveFile(path, "no longer asked for")
        for path in files
        if path.startswith((f"{program.repository_directory}/{_OURS}", _KEY_PREFIX)) and path not in ours
    ]
    return tuple(changes)


def _key_is_there(file: FileFact | None, fingerprint: str, trusted: frozenset[str]) -> bool:
    if file is None or file.mode != 0o644 or fingerprint not in trusted:
        return False
    try:
        return fingerprints(file.content) == (fingerprint,) and armored(file.content) == file.content
    except GpuprovError:
        return False


def _doubles(
    program: RepositoryProgram, host: Host, wanted: tuple[RpmRepository, ...]
) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (path, URI, section, whether it is alone in its file) of other definitions of the `wanted` repositories."""
    ours = {_plain(one.uri, host.architecture): masked(one.uri) for one in wanted}
    pattern = re.compile(rf"{program.repository_directory}/(?!{_OURS})[^/]+\.repo")
    for path, file in host.files.items():
        if not pattern.fullmatch(path):
            continue
        sections = list(_sections(file.content.decode("utf-8", "replace"), host.architecture))
        alone = all(uris & set(ours) for _, uris in sections)
        for section, uris in sections:
            for uri in sorted(uris & set(ours)):
                yield path, ours[uri], section, alone


def _sections(text: str, architecture: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each enabled section of a .repo file with its URIs; none for an unreadable file."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    for section in parser.sections():
        if parser.get(section, "enabled", fallback="1").strip().lower() not in ("0", "no", "false"):
            words = re.split(r"[\s,]+", parser.get(section, "baseurl", fallback=""))
            yield section, {_plain(word, architecture) for word in words if word}


def _plain(uri: str, architecture: str) -> str:
    """Return a URI as dnf(8) and zypper compare it: the architecture filled in, no login, no final slash."""
    return re.sub(r"\$\{?basearch\}?", architecture, split_login(uri)[0]).rstrip("/")


@dataclass(frozen=True)
class InstallRpmKey(Change):
    """Make rpm trust the key at a URL, if it is the pinned one and nothing else."""

    path: str
    url: str
    fingerprint: str

    uses_package_manager: ClassVar[bool] = True
    bundle_part: ClassVar[str] = "packages"

    def summary(self) -> str:
        return f"install key {self.fingerprint} to {self.path}, trusted by rpm"

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)

    def capture(self, system: System) -> Json:
        image = capture_path(system, self.path)
        return {"file": image, "fingerprint": self.fingerprint, "trusted": self.fingerprint in gather_keys(system)}

    def apply(self, system: System, tell: Tell) -> Json:
        key = fetch_pinned_key(system, self.url, self.fingerprint)
        system.make_directory(parent_of(self.path))
        system.write(self.path, armored(key))
        system.require(("rpm", "--import", self.path), f"rpm does not take the key {self.fingerprint}")
        if self.fingerprint not in gather_keys(system):
            raise GpuprovError(
                f"rpm took the key {self.fingerprint}, but does not list it", "rpm -q gpg-pubkey", "rpm -qi gpg-pubkey"
            )
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        package = gather_keys(system).get(before["fingerprint"])
        if package is not None and not before["trusted"]:
            system.require(("rpm", "-e", package), f"rpm does not give up the key {before['fingerprint']}")
        restore_path(system, before["file"])
