"""Package sources of rpm distributions, as data: repositories, and the keys that sign their packages."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprov.packages.known_repositories import vendor_key
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.tables import server
from gpuprov.repos import RpmRepository


@dataclass(frozen=True)
class RpmSource:
    """A repository to take packages from; `keys` holds each key's location and its full fingerprint.

    As in repos.py, either its metadata or every package must be signed. `all_streams`: also use packages of module
    streams that are not enabled. `only`: patterns of the packages that may come from it; empty means all.
    """

    name: str
    uri: str
    keys: tuple[tuple[str, str], ...]
    signed_metadata: bool = False
    signed_packages: bool = True
    all_streams: bool = False
    only: tuple[str, ...] = ()


_EL = ("BaseOS/{arch}/os/", "AppStream/{arch}/os/")
# Below each distribution's own server; {version}, {major} and {arch} are filled in.
_ARCHIVES = {
    "rocky": tuple(f"{{version}}/{folder}" for folder in _EL),
    "almalinux": tuple(f"{{version}}/{folder}" for folder in _EL),
    "centos": tuple(f"{{major}}-stream/{folder}" for folder in _EL),
    "fedora": ("releases/{version}/Everything/{arch}/os/", "updates/{version}/Everything/{arch}/"),
}
_KEY = re.compile(r"(https?://|file://|/)\S+")
_FORM = "--source 'URL KEY-URL FINGERPRINT', for packages signed by several keys with a further pair for each"


def rpm_sources(distribution: str, version: str, architecture: str, lines: tuple[str, ...]) -> tuple[RpmSource, ...]:
    """Return the sources that `lines` name, or the distribution's own.

    Raises GpuprovError (exit code 2) for a bad line.
    """
    if lines:
        return tuple(_parsed(number, line) for number, line in enumerate(lines, 1))
    major = version.partition(".")[0]
    key = vendor_key(distribution, version)
    if key is None:
        raise GpuprovError(
            f"where the packages of {distribution} {version} come from must be said",
            "its repositories need a subscription, or packages in it are signed by several keys",
            f"name each repository, or your mirror of it: {_FORM}",
            exit_code=ExitCode.USAGE,
        )
    words = {"version": version, "major": major, "arch": architecture}
    return tuple(
        RpmSource(f"{distribution}-{number}", f"{server(distribution)}/{folder.format(**words)}", (key,))
        for number, folder in enumerate(_ARCHIVES[distribution], 1)
    )


def _parsed(number: int, line: str) -> RpmSource:
    uri, *words = line.split() or [""]
    keys = tuple(zip(words[::2], words[1::2]))
    sound = all(_KEY.fullmatch(url) and re.fullmatch(r"[0-9A-F]{40}", fingerprint) for url, fingerprint in keys)
    if not re.match(r"(https?|file)://", uri) or not keys or len(words) % 2 or not sound:
        raise GpuprovError("this is no source of packages for dnf", line, f"write {_FORM}", exit_code=ExitCode.USAGE)
    return RpmSource(f"source-{number}", uri, keys)


def as_source(repository: RpmRepository) -> RpmSource:
    """Return a repository that hosts have in addition to their distribution's, as a source."""
    return RpmSource(
        repository.name,
        repository.uri,
        ((repository.key_url, repository.key_fingerprint),),
        repository.signed_metadata,
        repository.signed_packages,
        # NVIDIA's: the fabric manager is in the stream of its driver's branch.
        all_streams=repository.name == "cuda",
        only=repository.only,
    )
