"""Repositories and keys for dnf, yum and zypper: which a host shall have, and the changes that bring it there."""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from gpuprov.core.changes import Change, Json, RemoveFile, Tell, WriteFile, capture_path, parent_of, restore_path
from gpuprov.core.system import System
from gpuprov.packaging.keys import fetch_pinned_key, problems_of_any
from gpuprov.packaging.past_kernels import PastRelease
from gpuprov.packaging.pgp import armored, fingerprints
from gpuprov.packaging.rpm_packages import gather_keys
from gpuprov.packaging.toolkit_channels import toolkit_channels
from gpuprov.wire.errors import GpuprovError, Problem
from gpuprov.wire.spec import HostSpec

if TYPE_CHECKING:
    from gpuprov.core.changes import FileFact
    from gpuprov.machine.distros import DockerRepository
    from gpuprov.packaging.apt_packages import PackageFacts

DIRECTORIES = {"dnf": "/etc/yum.repos.d", "yum": "/etc/yum.repos.d", "zypper": "/etc/zypp/repos.d"}
KEYS = "/etc/pki/rpm-gpg"
_OURS = "gpuprov-"
_KEY_PREFIX = f"{KEYS}/RPM-GPG-KEY-{_OURS}"


class Host(Protocol):
    """What repositories need to know of a host."""

    @property
    def architecture(self) -> str: ...
    @property
    def files(self) -> Mapping[str, FileFact]: ...
    @property
    def packages(self) -> PackageFacts: ...


@dataclass(frozen=True)
class RpmRepository:
    """A signed rpm repository; `str()` is its .repo file (dnf.conf(5), zypper(8)).

    Something must be signed: its metadata, which holds the digest of every package; or every package; best both.
    """

    name: str
    uri: str
    key_url: str
    key_fingerprint: str
    manager: str
    signed_metadata: bool = True
    signed_packages: bool = True

    @property
    def file_path(self) -> str:
        return f"{DIRECTORIES[self.manager]}/{_OURS}{self.name}.repo"

    @property
    def key_path(self) -> str:
        return f"{_KEY_PREFIX}{self.name}"

    def __str__(self) -> str:
        lines = [
            f"[{_OURS}{self.name}]", f"name={self.name} (gpuprov)", f"baseurl={self.uri}", "enabled=1",
            f"repo_gpgcheck={self.signed_metadata:d}", f"{self._packages_key}={self.signed_packages:d}",
            f"gpgkey=file://{self.key_path}",
        ]  # fmt: skip
        # zypper: gpgcheck is both checks together, and metadata is to be fetched anew by itself. dnf and yum: a
        # repository that is out of reach must not be passed over in silence, as some distributions have it.
        lines += ["gpgcheck=1", "autorefresh=1"] if self.manager == "zypper" else ["skip_if_unavailable=0"]
        return "".join(f"{line}\n" for line in lines)

    @property
    def _packages_key(self) -> str:
        return "pkg_gpgcheck" if self.manager == "zypper" else "gpgcheck"


def repositories(
    spec: HostSpec, manager: str, architecture: str, docker: DockerRepository | None = None
) -> tuple[RpmRepository, ...]:
    """Return the repositories that a host shall have besides its distribution's."""
    found = [RpmRepository(own.name, own.uri, own.key_url, own.key_fingerprint, manager) for own in spec.repositories]
    # docs.nvidia.com, Container Toolkit installation guide: one repository for all, its metadata signed alone.
    found += [
        RpmRepository(
            one.name, f"{one.base}/rpm/{architecture}", one.key_url, spec.toolkit_key_fingerprint, manager,
            signed_packages=False,
        )
        for one in toolkit_channels(spec)
    ]  # fmt: skip
    if docker is not None:
        # docs.docker.com, docker-ce.repo: the packages are signed.
        key = (docker.key_url, docker.key_fingerprint)
        found.append(RpmRepository("docker-ce", docker.uri, *key, manager, signed_metadata=False))
    return tuple(found)


def problems(
    facts: Host, spec: HostSpec, docker: DockerRepository | None = None, past: tuple[PastRelease, ...] = ()
) -> tuple[Problem, ...]:
    """Return what in the host's or the user's repositories can't be mended by gpuprov."""
    manager = facts.packages.manager
    wanted = (*repositories(spec, manager, facts.architecture, docker), *_past(past, manager))
    mixed = tuple(
        Problem(
            f"{path} names {uri} too, among others: packages could come from there with other checks",
            f"{path}, section [{section}]",
            f"remove that section: gpuprov keeps this repository in {DIRECTORIES[manager]}/{_OURS}*.repo",
        )
        for path, uri, section, alone in _doubles(facts, wanted)
        if not alone
    )
    return problems_of_any(wanted) + mixed


def _past(releases: tuple[PastRelease, ...], manager: str) -> tuple[RpmRepository, ...]:
    """Return repositories of past releases, whose packages are signed as the distribution's are."""
    return tuple(
        RpmRepository(one.name, one.uri, one.key_url, one.key_fingerprint, manager, signed_metadata=False)
        for one in releases
    )


def plan_repositories(
    facts: Host, spec: HostSpec, docker: DockerRepository | None = None, past: tuple[PastRelease, ...] = ()
) -> tuple[Change, ...]:
    """Return the keys and files to write, and what stands in their way to remove."""
    manager, files = facts.packages.manager, facts.files
    wanted = (*repositories(spec, manager, facts.architecture, docker), *_past(past, manager))
    changes: list[Change] = []
    for one in wanted:
        if not _key_is_there(files.get(one.key_path), one.key_fingerprint, facts.packages.trusted_keys):
            changes.append(InstallRpmKey(one.key_path, one.key_url, one.key_fingerprint))
        file = files.get(one.file_path)
        if file is None or file.content != str(one).encode() or file.mode != 0o644:
            changes.append(WriteFile(one.file_path, str(one).encode()))
    doubles = {path: uri for path, uri, _, alone in _doubles(facts, wanted) if alone}
    changes += [RemoveFile(path, f"a second definition of {uri}") for path, uri in doubles.items()]
    ours = {path for one in wanted for path in (one.file_path, one.key_path)}
    changes += [
        RemoveFile(path, "no longer asked for")
        for path in files
        if path.startswith((f"{DIRECTORIES[manager]}/{_OURS}", _KEY_PREFIX)) and path not in ours
    ]
    return tuple(changes)


def _key_is_there(file: FileFact | None, fingerprint: str, trusted: frozenset[str]) -> bool:
    if file is None or file.mode != 0o644 or fingerprint not in trusted:
        return False
    try:
        return fingerprints(file.content) == (fingerprint,) and armored(file.content) == file.content
    except GpuprovError:
        return False


def _doubles(facts: Host, wanted: tuple[RpmRepository, ...]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (path, URI, section, is it alone in its file) of foreign definitions of the repositories of `wanted`."""
    ours = {_plain(one.uri, facts.architecture): one.uri for one in wanted}
    pattern = re.compile(rf"{DIRECTORIES[facts.packages.manager]}/(?!{_OURS})[^/]+\.repo")
    for path, file in facts.files.items():
        if not pattern.fullmatch(path):
            continue
        sections = list(_sections(file.content.decode("utf-8", "replace"), facts.architecture))
        alone = all(uris & set(ours) for _, uris in sections)
        for section, uris in sections:
            for uri in sorted(uris & set(ours)):
                yield path, ours[uri], section, alone


def _sections(text: str, architecture: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each enabled section of a .repo file with its URIs; nothing of a file that can't be read."""
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
    """Return a URI as dnf(8) and zypper compare it: their variable for the architecture filled in, no final slash."""
    return re.sub(r"\$\{?basearch\}?", architecture, uri).rstrip("/")


@dataclass(frozen=True)
class InstallRpmKey(Change):
    """The key at a URL shall be trusted by rpm, if it is the pinned one and nothing else."""

    path: str
    url: str
    fingerprint: str

    bundle_part: ClassVar[str] = "packages"

    def summary(self) -> str:
        return f"install key {self.fingerprint} to {self.path}, trusted by rpm"

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
