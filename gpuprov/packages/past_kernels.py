"""Headers of a kernel that the host's repositories no longer have: their packages, their sources, the commands. Pure.

Distributions keep only the newest kernels in their repositories. The source of older ones differs, and mostly needs a
decision (a subscription, a repository without updates). So gpuprov reports it and adds nothing unless requested.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpuprov.core.commands import Completed
from gpuprov.machine.distros import Distribution, ExtraRepository, kernel_headers
from gpuprov.packages.rpm_vendor_keys import vendor_key
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.tables import SERVERS, packaged, server


@dataclass(frozen=True)
class Advice:
    """What to say when no repository has a package whose name holds `needle`."""

    needle: str
    meaning: str
    next_step: str


@dataclass(frozen=True)
class _Row:
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
_ROWS = (
    _Row(
        "debian", "*", r".+",
        f"{_DEB_NEWEST}, with the linux-headers-*-common and linux-kbuild-* that it depends on, from "
        "{debian_snapshot}/package/linux/ and install them with apt-get install ./*.deb",
    ),
    _Row(
        "ubuntu", "*", r".+",
        f"{_DEB_NEWEST}, with the linux-*-headers-* that it depends on, from "
        "{ubuntu_sources}/linux (-aws, -gcp …) and install them with apt-get install ./*.deb",
    ),
    _Row("rhel", "*", _EL_MINOR, _EUS),
    _Row("rocky", "*", _EL_MINOR, _ADD_ARCHIVE + _DNF_NEWEST, _ROCKY_VAULT, _EL_FOLDERS),
    # Packages before 8.10 are signed by the key that was replaced in 2023 (almalinux.org/security).
    _Row(
        "almalinux", "8", _EL_MINOR,
        "take {names} from {almalinux_vault}/{release}/BaseOS/{architecture}/os/ (signed by AlmaLinux's "
        f"key of that time); or boot the newest kernel: {_DNF_NEWEST}",
    ),
    _Row("almalinux", "*", _EL_MINOR, _ADD_ARCHIVE + _DNF_NEWEST, _ALMA_VAULT, _EL_FOLDERS),
    _Row(
        "centos", "8", r".+",
        "CentOS 8 and Stream 8 are in the vault alone: point /etc/yum.repos.d at {centos_vault}/8-stream/ "
        "(or 8.5.2111), whose BaseOS has {names}; better move to a release that gets updates",
    ),
    _Row(
        "centos", "*", r".+",
        f"boot the newest kernel: {_DNF_NEWEST}; CentOS Stream keeps older ones at {{centos_builds}} "
        "alone (package kernel: {names})",
    ),
    _Row(
        "fedora", "*", r".+",
        "dnf install fedora-repos-archive; dnf --enablerepo=updates-archive install {names}; or boot the newest "
        f"kernel: {_DNF_NEWEST}",
    ),
    *(
        _Row(
            "ol", "*", rf"{series}.+\.el\d+uek\..*",
            "enable the repository of the running UEK, which keeps {names}: dnf config-manager --enable "
            f"ol{{major}}_{uek}; or boot the newest kernel: dnf upgrade kernel-uek && reboot",
        )
        # docs.oracle.com, release notes of UEK 8, 7 and R6, "Obtaining Packages".
        for series, uek in ((r"6\.12\.", "UEKR8"), (r"5\.15\.", "UEKR7"), ("", "UEKR6"))
    ),
    _Row(
        "ol", "*", r".+",
        "dnf config-manager --enable ol{major}_baseos_latest ol{major}_appstream, which keep {names}; or boot the "
        f"newest kernel: {_DNF_NEWEST}",
    ),
    _Row(
        "amzn", "*", r".+",
        "the host is bound to one release of the repositories, its kernel is of another: dnf --releasever=latest "
        "install {names}; or boot the newest kernel: dnf --releasever=latest upgrade && reboot",
    ),
    _Row(
        "sles", "*", r".+",
        "zypper search -s --match-exact kernel-{flavour}-devel shows what there is; the Development Tools module or "
        "LTSS may be missing: SUSEConnect --list-extensions; or boot the newest kernel: zypper update kernel-{flavour} "
        "&& reboot",
    ),
    _Row(
        "opensuse-leap", "*", r".+",
        "zypper search -s --match-exact kernel-{flavour}-devel shows what there is: is the update repository enabled? "
        "Or boot the newest kernel: zypper update kernel-{flavour} && reboot",
    ),
    _Row(
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


def require_known(done: Completed, said: Iterable[str], advice: Advice | None, what: str, pattern: str) -> None:
    """Raise GpuprovError with the advice if a package manager says, in a line of this pattern, that it lacks these."""
    lines = (line for line in said if advice and advice.needle in line and re.search(pattern, line))
    line = next(lines, None)
    if advice and line is not None:
        evidence = f"{done.argv[0]} exited {done.returncode}: {line}"
        raise GpuprovError(f"{what}: {advice.meaning}", evidence, advice.next_step)


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


def problems(row: Distribution, kernel: str, architecture: str) -> tuple[Problem, ...]:
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


def _found(row: Distribution, kernel: str, architecture: str) -> tuple[_Row, dict[str, str]] | None:
    """Return the table's row, and the words that its texts may hold."""
    major = row.version.partition(".")[0]
    for one in _ROWS:
        match = re.fullmatch(one.kernel, kernel) if one.id == row.id and one.version in ("*", major) else None
        if match:
            return one, _words(one, major, kernel, architecture, match.groupdict())
    return None


def _words(one: _Row, major: str, kernel: str, architecture: str, groups: dict[str, str]) -> dict[str, str]:
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
