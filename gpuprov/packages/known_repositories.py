"""Repositories that gpuprov knows, as data: the vendors' keys, archives of past kernels, DKMS. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprov.machine.distros import Distribution, ExtraRepository, kernel_headers
from gpuprov.packages.failures import Advice
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import SERVERS, packaged, server

# The keys that sign the packages of rpm's distributions: the server, the file below it, the full fingerprint.
# Sources: rockylinux.org/resources/gpg-key-info, almalinux.org/security, centos.org/keys, fedoraproject.org/security.
_ROCKY = ("rocky", "RPM-GPG-KEY-Rocky-{major}")
_ALMA = ("almalinux", "RPM-GPG-KEY-AlmaLinux-{major}")
_FEDORA = ("fedora-keys", "RPM-GPG-KEY-fedora-{major}-primary")
_VENDOR_KEYS = {
    ("rocky", "8"): (_ROCKY, "7051C470A929F454CEBE37B715AF5DAC6D745A60"),
    ("rocky", "9"): (_ROCKY, "21CB256AE16FC54C6E652949702D426D350D275D"),
    ("rocky", "10"): (_ROCKY, "FC226859C0860BF0DDB95B085B106C736FEDFC85"),
    ("almalinux", "8"): (_ALMA, "BC5EDDCADF502C077F1582882AE81E8ACED7258B"),
    ("almalinux", "9"): (_ALMA, "BF18AC2876178908D6E71267D36CB86CB86B3716"),
    ("almalinux", "10"): (_ALMA, "EE6DB7B98F5BF5EDD9DA0DE5DEE5C11CC2A1E572"),
    ("centos", "9"): (
        ("centos-keys", "RPM-GPG-KEY-CentOS-Official"), "99DB70FAE1D7CE227FB6488205B555B38483C65D",
    ),
    ("fedora", "42"): (_FEDORA, "B0F4950458F69E1150C6C5EDC8AC4916105EF944"),
    ("fedora", "43"): (_FEDORA, "C6E7F081CF80E13146676E88829B606631645531"),
    ("fedora", "44"): (_FEDORA, "36F612DCF27F7D1A48A835E4DBFCF71C6D9F90A6"),
}  # fmt: skip


def vendor_key(distribution: str, version: str) -> tuple[str, str] | None:
    """Return URL and fingerprint of the key of a distribution's release, or None where gpuprov knows none."""
    major = version.partition(".")[0]
    found = _VENDOR_KEYS.get((distribution, major))
    if found is None:
        return None
    (name, file), fingerprint = found
    return f"{server(name)}/{file.format(major=major)}", fingerprint


# Distributions keep only the newest kernels in their repositories. The source of older ones differs, and mostly needs a
# decision (a subscription, a repository without updates). So gpuprov reports it and adds nothing unless requested.
@dataclass(frozen=True)
class _Archive:
    """Where one distribution's older kernels are. `version`: a major version, * for all; `kernel`: matches `uname -r`.

    The texts may hold {kernel}, {names} (the packages), {architecture}, {major}, {release}, the pattern's groups, and
    the servers of protocol/servers.json, such as {rocky_vault}.
    `archive`: folders of a repository that anybody may read, below `base`.
    """

    id: str
    version: str
    kernel: str
    next_step: str
    base: str = ""
    archive: tuple[str, ...] = ()


_ADD_ARCHIVE = (
    "set gpuprov_kernel_archive: true, which adds {base} ({names} lies in {first}); or boot the newest kernel: "
)
_DEB_NEWEST = (
    "boot the newest kernel: apt-get install linux-image-{flavour} linux-headers-{flavour} && reboot; or take {names}"
)
_DNF_NEWEST = "dnf upgrade kernel && reboot"
_EL_MINOR = r".*\.el(?P<release>\d+_\d+)(?:\.|$).*"
# In Enterprise Linux 8 kernel-devel lies in BaseOS, from 9 on in AppStream (access.redhat.com, Package Manifest).
_EL_FOLDERS = ("BaseOS/{architecture}/os/", "AppStream/{architecture}/os/")
_ROCKY_VAULT = "{rocky_vault}/{release}/"
_ALMA_VAULT = "{almalinux_vault}/{release}/"
_EUS = (
    "subscription-manager release --set {release}; subscription-manager repos --enable "
    "rhel-{major}-for-{architecture}-baseos-eus-rpms --enable rhel-{major}-for-{architecture}-appstream-eus-rpms "
    "(in {first}: {names}; needs a subscription for Extended Update Support); or boot the newest kernel: "
    f"{_DNF_NEWEST}"
)
_ARCHIVES = (
    _Archive(
        "debian", "*", r".+",
        f"{_DEB_NEWEST}, with the linux-headers-*-common and linux-kbuild-* that it depends on, from "
        "{debian_snapshot}/package/linux/ and install them with apt-get install ./*.deb",
    ),
    _Archive(
        "ubuntu", "*", r".+",
        f"{_DEB_NEWEST}, with the linux-*-headers-* that it depends on, from "
        "{ubuntu_sources}/linux (-aws, -gcp …) and install them with apt-get install ./*.deb",
    ),
    _Archive("rhel", "*", _EL_MINOR, _EUS),
    _Archive("rocky", "*", _EL_MINOR, _ADD_ARCHIVE + _DNF_NEWEST, _ROCKY_VAULT, _EL_FOLDERS),
    # Packages before 8.10 are signed by the key that was replaced in 2023 (almalinux.org/security).
    _Archive(
        "almalinux", "8", _EL_MINOR,
        "take {names} from {almalinux_vault}/{release}/BaseOS/{architecture}/os/ (signed by AlmaLinux's "
        f"key of that time); or boot the newest kernel: {_DNF_NEWEST}",
    ),
    _Archive("almalinux", "*", _EL_MINOR, _ADD_ARCHIVE + _DNF_NEWEST, _ALMA_VAULT, _EL_FOLDERS),
    _Archive(
        "centos", "8", r".+",
        "CentOS 8 and Stream 8 are in the vault alone: point /etc/yum.repos.d at {centos_vault}/8-stream/ "
        "(or 8.5.2111), whose BaseOS has {names}; better move to a release that gets updates",
    ),
    _Archive(
        "centos", "*", r".+",
        f"boot the newest kernel: {_DNF_NEWEST}; CentOS Stream keeps older ones at {{centos_builds}} "
        "alone (package kernel: {names})",
    ),
    _Archive(
        "fedora", "*", r".+",
        "dnf install fedora-repos-archive; dnf --enablerepo=updates-archive install {names}; or boot the newest "
        f"kernel: {_DNF_NEWEST}",
    ),
    *(
        _Archive(
            "ol", "*", rf"{series}.+\.el\d+uek\..*",
            "enable the repository of the running UEK, which keeps {names}: dnf config-manager --enable "
            f"ol{{major}}_{uek}; or boot the newest kernel: dnf upgrade kernel-uek && reboot",
        )
        # docs.oracle.com, release notes of UEK 8, 7 and R6, "Obtaining Packages".
        for series, uek in ((r"6\.12\.", "UEKR8"), (r"5\.15\.", "UEKR7"), ("", "UEKR6"))
    ),
    _Archive(
        "ol", "*", r".+",
        "dnf config-manager --enable ol{major}_baseos_latest ol{major}_appstream, which keep {names}; or boot the "
        f"newest kernel: {_DNF_NEWEST}",
    ),
    _Archive(
        "amzn", "*", r".+",
        "the host is bound to one release of the repositories, its kernel is of another: dnf --releasever=latest "
        "install {names}; or boot the newest kernel: dnf --releasever=latest upgrade && reboot",
    ),
    _Archive(
        "sles", "*", r".+",
        "zypper search -s --match-exact kernel-{flavour}-devel shows what there is; the Development Tools module or "
        "LTSS may be missing: SUSEConnect --list-extensions; or boot the newest kernel: zypper update kernel-{flavour} "
        "&& reboot",
    ),
    _Archive(
        "opensuse-leap", "*", r".+",
        "zypper search -s --match-exact kernel-{flavour}-devel shows what there is: is the update repository enabled? "
        "Or boot the newest kernel: zypper update kernel-{flavour} && reboot",
    ),
    _Archive(
        "opensuse-tumbleweed", "*", r".+",
        "Tumbleweed keeps the newest kernel alone: zypper dup && reboot; past snapshots are at "
        "{opensuse_history}/",
    ),
)  # fmt: skip


def advice(row: Distribution, kernel: str, architecture: str) -> Advice | None:
    """Return the advice if no repository has the headers of the running kernel, None for a kernel without a row."""
    found = _found(row, kernel, architecture)
    if found is None:
        return None
    archive, words = found
    names = [name for name in kernel_headers(row, kernel) if words["needle"] in name]
    shown = {**words, "names": " ".join(name.replace("=", "-", 1) for name in names) or "the headers"}
    meaning = f"no repository of this host has the headers of the running kernel {kernel}"
    return Advice(words["needle"], meaning, archive.next_step.format(**shown))


def past_releases(row: Distribution, kernel: str, architecture: str) -> tuple[ExtraRepository, ...]:
    """Return the repositories of the running kernel's own release, empty if no public archive exists.

    Their packages are signed by the distribution's key.
    """
    found = _found(row, kernel, architecture)
    key = vendor_key(row.id, row.version)
    if found is None or key is None or not found[0].archive:
        return ()
    archive, words = found
    uris = (f"{archive.base}{folder}".format(**words) for folder in archive.archive)
    return tuple(
        # The third part from the end names the repository: …/AppStream/x86_64/os/.
        ExtraRepository(f"past-{uri.split('/')[-4].lower()}", uri, *key, signed_metadata=False)
        for uri in uris
    )


def archive_problems(row: Distribution, kernel: str, architecture: str) -> tuple[Problem, ...]:
    """Return why gpuprov_kernel_archive is not possible on this host, if it is requested."""
    if past_releases(row, kernel, architecture):
        return ()
    said = advice(row, kernel, architecture)
    return (
        Problem(
            f"{row.name} has no archive of past kernels that gpuprov could add",
            f"gpuprov_kernel_archive is true, the kernel is {kernel}",
            f"leave it out; {said.next_step}" if said else "leave gpuprov_kernel_archive out",
        ),
    )


def _found(row: Distribution, kernel: str, architecture: str) -> tuple[_Archive, dict[str, str]] | None:
    """Return the table's row, and the words that its texts may hold."""
    major = row.version.partition(".")[0]
    for one in _ARCHIVES:
        match = re.fullmatch(one.kernel, kernel) if one.id == row.id and one.version in ("*", major) else None
        if match:
            return one, _words(one, major, kernel, architecture, match.groupdict())
    return None


def _words(one: _Archive, major: str, kernel: str, architecture: str, groups: dict[str, str]) -> dict[str, str]:
    version, _, flavour = kernel.partition("-")[2].rpartition("-")
    suse = one.id.startswith(("sles", "opensuse"))
    # Debian's flavours may have a dash (cloud-amd64), Ubuntu's have none.
    debian = re.search(r"-((?:cloud-|rt-)?[a-z][a-z0-9]*)$", kernel)
    words = {
        "kernel": kernel, "architecture": architecture, "major": major,
        "release": groups.get("release", "").replace("_", "."),
        "flavour": flavour if suse or not debian else debian[1],
        # SUSE's packages are asked for in the kernel's version without its flavour.
        "needle": kernel[: -len(flavour) - 1] if suse and version else kernel,
        "first": "BaseOS" if major == "8" else "AppStream",
        **{name.replace("-", "_"): server(name) for name in packaged(SERVERS)["servers"]},
    }  # fmt: skip
    return {**words, "base": one.base.format(**words)}


# Where DKMS comes from on distributions that do not package it. Only DKMS is taken from there: what it depends on is in
# the distribution's own repositories (dkms.spec: kernel headers, gcc, make, elfutils-libelf-devel, kmod, patch), so
# CodeReady Builder is not needed.
DKMS = "dkms"


@dataclass(frozen=True)
class _DkmsRow:
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
_DKMS = {
    ("EPEL", "8"): _DkmsRow(_EPEL_BASE, _EPEL_FOLDER, _EPEL_KEY, "94E279EB8D8F25B21810ADF121EA45AB2F86D6A1"),
    ("EPEL", "9"): _DkmsRow(_EPEL_BASE, _EPEL_FOLDER, _EPEL_KEY, "FF8AD1344597106ECE813B918A3872BF3228467C"),
    ("EPEL", "10"): _DkmsRow(_EPEL_BASE, _EPEL_FOLDER, _EPEL_KEY, "7D8D15CBFC4E62688591FB2633D98517E37ED158"),
    ("PackageHub", "15"): _DkmsRow(
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
    known = _DKMS.get((row.dkms_from, major))
    found = known or (_DKMS.get(_LIKE.get(row.dkms_from, ("", ""))) if spec.epel_repository else None)
    fingerprint = spec.epel_key_fingerprint or (known.fingerprint if known else "")
    if found is None or not fingerprint:
        return None
    base = (spec.epel_repository or server(found.base)).rstrip("/")
    words = {"major": major, "minor": minor or "0", "arch": architecture}
    return ExtraRepository(
        row.dkms_from.lower(), f"{base}/{found.folder}".format(**words),
        f"{base}/{found.key}".format(**words), fingerprint, signed_metadata=False, only=(f"{DKMS}*",),
    )  # fmt: skip
