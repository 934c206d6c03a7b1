"""Where DKMS comes from on distributions that do not package it, as data: repository, key, and its full fingerprint.

Only DKMS is taken from there. What it depends on is in the distribution's own repositories (dkms.spec: kernel headers,
gcc, make, elfutils-libelf-devel, kmod, patch), so CodeReady Builder is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuprov.machine.distros import Distribution, ExtraRepository
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import server

PACKAGE = "dkms"


@dataclass(frozen=True)
class _Row:
    """A repository of DKMS: a folder below the server `base`, {major}, {minor} and {arch} filled in; the key too."""

    base: str
    folder: str
    key: str
    fingerprint: str


_EPEL_BASE, _EPEL_FOLDER, _EPEL_KEY = (
    "epel", "{major}/Everything/{arch}/", "RPM-GPG-KEY-EPEL-{major}",
)  # fmt: skip
# The keys: fedoraproject.org/security; EPEL 8 in Percona's images (github.com/percona/percona-docker), EPEL 9 and 10 in
# MariaDB's (github.com/MariaDB/mariadb-docker). The folders: epel-release's epel.repo.
# Package Hub: packagehub.suse.com/package-signatures; its packages are those of openSUSE:Backports, which lie on
# download.opensuse.org too (learn.microsoft.com, SAP on Azure with SLES 15).
_ROWS = {
    ("EPEL", "8"): _Row(_EPEL_BASE, _EPEL_FOLDER, _EPEL_KEY, "94E279EB8D8F25B21810ADF121EA45AB2F86D6A1"),
    ("EPEL", "9"): _Row(_EPEL_BASE, _EPEL_FOLDER, _EPEL_KEY, "FF8AD1344597106ECE813B918A3872BF3228467C"),
    ("EPEL", "10"): _Row(_EPEL_BASE, _EPEL_FOLDER, _EPEL_KEY, "7D8D15CBFC4E62688591FB2633D98517E37ED158"),
    ("PackageHub", "15"): _Row(
        "opensuse-backports", "SLE-{major}-SP{minor}/standard/",
        "SLE-{major}-SP{minor}/standard/repodata/repomd.xml.key", "637B32FF3D83F07A7AE1C40A9C214D4065176565",
    ),
}  # fmt: skip
# A mirror of a release without a row is laid out like this one's.
_LIKE = {"EPEL": ("EPEL", "10"), "PackageHub": ("PackageHub", "15")}


def dkms_repository(row: Distribution, version: str, architecture: str, spec: HostSpec) -> ExtraRepository | None:
    """Return the repository that has DKMS for a VERSION_ID, limited to it; None where its key or place is not known.

    gpuprov_epel_repository names a mirror, gpuprov_epel_key_fingerprint the key, of a release without a row too.
    """
    major, _, minor = version.partition(".")
    known = _ROWS.get((row.dkms_from, major))
    found = known or (_ROWS.get(_LIKE.get(row.dkms_from, ("", ""))) if spec.epel_repository else None)
    fingerprint = spec.epel_key_fingerprint or (known.fingerprint if known else "")
    if found is None or not fingerprint:
        return None
    base = (spec.epel_repository or server(found.base)).rstrip("/")
    words = {"major": major, "minor": minor or "0", "arch": architecture}
    return ExtraRepository(
        row.dkms_from.lower(), f"{base}/{found.folder}".format(**words),
        f"{base}/{found.key}".format(**words), fingerprint, signed_metadata=False, only=(f"{PACKAGE}*",),
    )  # fmt: skip
