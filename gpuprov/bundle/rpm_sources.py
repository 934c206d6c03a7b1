"""Where the packages of rpm's distributions come from, as data: repositories, and the keys that sign their packages."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprov.errors import ExitCode, GpuprovError
from gpuprov.repos_rpm import RpmRepository


@dataclass(frozen=True)
class RpmSource:
    """A repository to take packages from; `keys` are where each key lies, and its full fingerprint.

    Something must be signed, as in repos_rpm.py: its metadata, or every package.
    """

    name: str
    uri: str
    keys: tuple[tuple[str, str], ...]
    signed_metadata: bool = False
    signed_packages: bool = True


@dataclass(frozen=True)
class _Archive:
    """A distribution's own repositories; {version}, {major} and {arch} are filled in."""

    uris: tuple[str, ...]
    key_url: str
    fingerprint: str


_ROCKY = tuple(
    f"https://dl.rockylinux.org/pub/rocky/{{version}}/{name}/{{arch}}/os/" for name in ("BaseOS", "AppStream")
)
_ALMA = tuple(
    f"https://repo.almalinux.org/almalinux/{{version}}/{name}/{{arch}}/os/" for name in ("BaseOS", "AppStream")
)
_STREAM = tuple(
    f"https://mirror.stream.centos.org/{{major}}-stream/{name}/{{arch}}/os/" for name in ("BaseOS", "AppStream")
)
_FEDORA = (
    "https://dl.fedoraproject.org/pub/fedora/linux/releases/{version}/Everything/{arch}/os/",
    "https://dl.fedoraproject.org/pub/fedora/linux/updates/{version}/Everything/{arch}/",
)
_ROCKY_KEY = "https://dl.rockylinux.org/pub/rocky/RPM-GPG-KEY-Rocky-{major}"
_ALMA_KEY = "https://repo.almalinux.org/almalinux/RPM-GPG-KEY-AlmaLinux-{major}"
_FEDORA_KEY = "https://src.fedoraproject.org/rpms/fedora-repos/raw/rawhide/f/RPM-GPG-KEY-fedora-{major}-primary"
# Fingerprints: rockylinux.org/resources/gpg-key-info; almalinux.org/security; centos.org/keys;
# fedoraproject.org/security.
_ARCHIVES = {
    ("rocky", "8"): _Archive(_ROCKY, _ROCKY_KEY, "7051C470A929F454CEBE37B715AF5DAC6D745A60"),
    ("rocky", "9"): _Archive(_ROCKY, _ROCKY_KEY, "21CB256AE16FC54C6E652949702D426D350D275D"),
    ("rocky", "10"): _Archive(_ROCKY, _ROCKY_KEY, "FC226859C0860BF0DDB95B085B106C736FEDFC85"),
    ("almalinux", "8"): _Archive(_ALMA, _ALMA_KEY, "BC5EDDCADF502C077F1582882AE81E8ACED7258B"),
    ("almalinux", "9"): _Archive(_ALMA, _ALMA_KEY, "BF18AC2876178908D6E71267D36CB86CB86B3716"),
    ("almalinux", "10"): _Archive(_ALMA, _ALMA_KEY, "EE6DB7B98F5BF5EDD9DA0DE5DEE5C11CC2A1E572"),
    ("centos", "9"): _Archive(
        _STREAM, "https://www.centos.org/keys/RPM-GPG-KEY-CentOS-Official", "99DB70FAE1D7CE227FB6488205B555B38483C65D"
    ),
    ("fedora", "42"): _Archive(_FEDORA, _FEDORA_KEY, "B0F4950458F69E1150C6C5EDC8AC4916105EF944"),
    ("fedora", "43"): _Archive(_FEDORA, _FEDORA_KEY, "C6E7F081CF80E13146676E88829B606631645531"),
    ("fedora", "44"): _Archive(_FEDORA, _FEDORA_KEY, "36F612DCF27F7D1A48A835E4DBFCF71C6D9F90A6"),
}
_KEY = re.compile(r"(https?://|file://|/)\S+")
_FORM = "--source 'URL KEY-URL FINGERPRINT', for packages signed by several keys with a further pair for each"


def rpm_sources(distribution: str, version: str, architecture: str, lines: tuple[str, ...]) -> tuple[RpmSource, ...]:
    """Return the sources that `lines` name, or the distribution's own. Raises GpuprovError (exit code 2) else."""
    if lines:
        return tuple(_parsed(number, line) for number, line in enumerate(lines, 1))
    major = version.partition(".")[0]
    archive = _ARCHIVES.get((distribution, major))
    if archive is None:
        raise GpuprovError(
            f"where the packages of {distribution} {version} come from must be said",
            "its repositories need a subscription, or packages in it are signed by several keys",
            f"name each repository, or your mirror of it: {_FORM}",
            exit_code=ExitCode.USAGE,
        )
    words = {"version": version, "major": major, "arch": architecture}
    key = (archive.key_url.format(**words), archive.fingerprint)
    return tuple(
        RpmSource(f"{distribution}-{number}", uri.format(**words), (key,)) for number, uri in enumerate(archive.uris, 1)
    )


def _parsed(number: int, line: str) -> RpmSource:
    uri, *words = line.split() or [""]
    keys = tuple(zip(words[::2], words[1::2]))
    sound = all(_KEY.fullmatch(url) and re.fullmatch(r"[0-9A-F]{40}", fingerprint) for url, fingerprint in keys)
    if not re.match(r"(https?|file)://", uri) or not keys or len(words) % 2 or not sound:
        raise GpuprovError("this is no source of packages for dnf", line, f"write {_FORM}", exit_code=ExitCode.USAGE)
    return RpmSource(f"source-{number}", uri, keys)


def as_source(repository: RpmRepository) -> RpmSource:
    """Return a repository that hosts have besides their distribution's."""
    key = (repository.key_url, repository.key_fingerprint)
    return RpmSource(repository.name, repository.uri, (key,), repository.signed_metadata, repository.signed_packages)
