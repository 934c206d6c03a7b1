"""Find a machine's row in the table, and what it means for a kernel. Never queries the machine."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from gpuprov.machine.distro_rows import ROWS, Distribution, KernelPackages
from gpuprov.machine.machine import OperatingSystem
from gpuprov.protocol.errors import Problem

__all__ = ["ROWS", "Distribution", "KernelPackages"]
# NVIDIA's name of an architecture in its CUDA repositories, from `uname -m`; sbsa is Arm's servers.
_NVIDIA_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "sbsa"}
# Folders there without one for Arm: docs.nvidia.com, Driver Installation Guide, "Linux System Requirements".
_WITHOUT_SBSA = re.compile(r"debian11|opensuse15|fedora(3\d|4[014])")
_IMAGE = (
    "take its ordinary sibling; or bring the driver in by transactional-update and set gpuprov_driver: preinstalled"
)
# Systems that must not be changed by packages and a .run file, whatever parent they name: what they are, what to do.
_REFUSED = {
    "cos": ("Container-Optimized OS brings its own drivers", "cos-extensions install gpu"),
    "opensuse-microos": ("openSUSE MicroOS is an image, its /usr is read-only", _IMAGE),
    "sle-micro": ("SUSE Linux Enterprise Micro is an image, its /usr is read-only", _IMAGE),
    "sl-micro": ("SUSE Linux Micro is an image, its /usr is read-only", _IMAGE),
}
# SUSE Linux Micro 6.2 has the ID of SLES 16.
_REFUSED_VARIANTS = {("sles", "transactional"): _REFUSED["sl-micro"]}
# Releases past their end of life, by ID and VERSION_ID, of which a distribution may also be a derivative: their own
# name and date, what to do. None of them has a Python that gpuprov runs on. Sources: aws.amazon.com/amazon-linux-2;
# blog.centos.org; access.redhat.com, Red Hat Enterprise Linux Life Cycle; oracle.com, Lifetime Support Policy.
_MOVE_EL = "move the host to release 9 or 10 of RHEL, Rocky Linux, AlmaLinux or Oracle Linux, then run gpuprov again"
_ENDED = {
    ("amzn", "2"): ("30 June 2026", "move the host to Amazon Linux 2023, then run gpuprov again"),
    ("centos", "7"): ("30 June 2024", _MOVE_EL),
    ("rhel", "7"): ("30 June 2024", _MOVE_EL),
    ("ol", "7"): ("31 December 2024", _MOVE_EL),
}
# Names in ID_LIKE that are a family's, not a distribution's: SUSE's own editions for SAP, for desktops, for HPC.
_FAMILIES = {"suse": "sles"}
_DOCKER_DOWNLOADS = "https://download.docker.com/linux"


def find_distribution(distribution_id: str, version: str) -> Distribution | None:
    """Return the row for an os-release ID and VERSION_ID, or None if the table has none."""
    found = next((row for row in ROWS if row.id == distribution_id and row.covers(version)), None)
    return replace(found, version=version) if found is not None and found.version == "*" else found


def distribution_of(os: OperatingSystem) -> Distribution | None:
    """Return the row of a machine: its own, else that of the first parent in ID_LIKE that has one.

    A derivative's VERSION_ID counts as its parent's, unless a code name says which of Ubuntu's or Debian's releases it
    is made of: Linux Mint 21.3 is Ubuntu 22.04.
    """
    if _refusal(os):
        return None
    if any(row.id == os.id for row in ROWS):
        return find_distribution(os.id, os.version)
    return next((row for parent in os.like if (row := _parent_row(parent, os)) is not None), None)


def _parent_row(parent: str, os: OperatingSystem) -> Distribution | None:
    if parent in ("debian", "ubuntu"):
        # Versions of derivatives look like their parents' (Devuan 5, Linux Mint 22) and mean something else.
        names = {"debian": os.codename, "ubuntu": os.ubuntu_codename or os.codename}
        rows = (row for row in ROWS if row.id == parent and row.codename and row.codename == names[parent])
        return next(rows, None)
    if parent == "fedora" and not re.fullmatch(r"[3-9]\d", os.version):
        return None
    return find_distribution(_FAMILIES.get(parent, parent), os.version)


def derivative_note(os: OperatingSystem) -> str:
    """Return a warning if a machine is treated as its parent distribution, or ""."""
    row = distribution_of(os)
    if row is None or row.id == os.id:
        return ""
    return f"{os.name} is not in the table of distributions; it is treated as {row.name} {row.version}, which it names"


def machine_problems(os: OperatingSystem, architecture: str) -> tuple[Problem, ...]:
    """Return why this distribution, or this architecture of it, is not supported; empty if it is."""
    row = distribution_of(os)
    if refused := _refusal(os):
        reason, next_step = refused
        variant = f" VARIANT_ID={os.variant}" if os.variant else ""
        return (Problem(f"{os.name} is not supported: {reason}", f"/etc/os-release: ID={os.id}{variant}", next_step),)
    if row is None and (ended := _ended(os)):
        day, next_step = ended
        seen = f"/etc/os-release: ID={os.id} VERSION_ID={os.version}"
        return (Problem(f"{os.name} is not supported: its updates ended on {day}", seen, next_step),)
    if row is None:
        like = f" ID_LIKE={' '.join(os.like)}" if os.like else ""
        seen = f"/etc/os-release: ID={os.id} VERSION_ID={os.version or '(none)'}{like}"
        return (Problem(f"{os.name} is not supported", seen, f"supported are: {supported_names()}"),)
    if architecture not in row.architectures:
        return (
            Problem(
                f"{row.name} {row.version} is not supported on this architecture",
                f"uname -m: {architecture}",
                f"supported are: {', '.join(row.architectures)}",
            ),
        )
    return ()


def _refusal(os: OperatingSystem) -> tuple[str, str] | None:
    """Return what this system is and what to do, if it must not be changed."""
    return _REFUSED.get(os.id) or _REFUSED_VARIANTS.get((os.id, os.variant))


def _ended(os: OperatingSystem) -> tuple[str, str] | None:
    """Return when updates ended for this release, or its parent release, and what to do."""
    major = os.version.partition(".")[0]
    return next((_ENDED[one, major] for one in (os.id, *os.like) if (one, major) in _ENDED), None)


def supported_names() -> str:
    """Return what is supported, for a message: `Debian 11, 12, 13; Ubuntu 20.04, …`."""
    versions: dict[str, list[str]] = {}
    for row in ROWS:
        versions.setdefault(row.name, []).append("" if row.version == "*" else row.version)
    return "; ".join(f"{name} {', '.join(found)}".strip() for name, found in versions.items())


def kernel_headers(row: Distribution, kernel: str) -> tuple[str, ...]:
    """Return the packages that hold the headers of a kernel, by its `uname -r`."""
    found = (_matching(rule, kernel, kernel) for rule in row.kernel_headers)
    return next((names for names in found if names), ())


def kernel_compiler(row: Distribution, kernel: str) -> str:
    """Return the folder of the compiler that builds a kernel's modules, "" if it is the host's own `gcc`."""
    rule = next((rule for rule in row.kernel_headers if re.fullmatch(rule.pattern, kernel)), None)
    return rule.compiler if rule is not None else ""


def next_kernel_headers(row: Distribution, kernel: str, installed: Collection[str]) -> tuple[str, ...]:
    """Return the packages that bring headers with later kernels; empty if one is installed in any version."""
    names = packages_for_kernels(row.next_kernel_headers, kernel, installed)
    return tuple(name for name in names if name.partition("=")[0] not in installed)


def packages_for_kernels(rules: Iterable[KernelPackages], kernel: str, installed: Iterable[str]) -> tuple[str, ...]:
    """Return the packages that rules by the names of installed packages give, each once."""
    packages = sorted(installed)
    names = (name for rule in rules for package in packages for name in _matching(rule, f"{package} {kernel}", kernel))
    return tuple(dict.fromkeys(names))


def _matching(rule: KernelPackages, text: str, kernel: str) -> tuple[str, ...]:
    match = re.fullmatch(rule.pattern, text)
    return tuple(name.format(kernel=kernel, **match.groupdict()) for name in rule.names) if match else ()


def nvidia_folder(row: Distribution, architecture: str) -> str:
    """Return the folder of a machine in NVIDIA's CUDA repositories, such as `rhel9/sbsa`; "" if there is none."""
    name, kind = row.nvidia_repository, _NVIDIA_ARCHITECTURES.get(architecture, "")
    if not name or not kind or (kind == "sbsa" and _WITHOUT_SBSA.fullmatch(name)):
        return ""
    return f"{name}/{kind}"


@dataclass(frozen=True)
class ExtraRepository:
    """A repository that a host needs besides its distribution's and the user's: Docker's, NVIDIA's CUDA, an archive.

    apt needs suite and components; the other package managers have all in the URI. `signed_metadata`: the index is
    signed, not only the packages; apt accepts no other. `only`: patterns of the packages that may come from it (dnf and
    zypper); none means all.
    """

    name: str
    uri: str
    key_url: str
    key_fingerprint: str
    suite: str = "/"
    components: str = ""
    signed_metadata: bool = True
    only: tuple[str, ...] = ()


def docker_repository(row: Distribution, architecture: str) -> ExtraRepository | None:
    """Return Docker's own repository for a machine, None if Docker has none (docs.docker.com/engine/install)."""
    if not row.docker_repository:
        return None
    base = f"{_DOCKER_DOWNLOADS}/{row.docker_repository}"
    # Debian's and Ubuntu's releases have code names, which are apt's suites.
    if row.codename:
        fingerprint = "9DC858229FC7DD38854AE2D88D81803C0EBFCD88"
        return ExtraRepository("docker-ce", base, f"{base}/gpg", fingerprint, row.codename, "stable")
    uri, fingerprint = f"{base}/{row.version}/{architecture}/stable", "060A61C51B558A7F742B77AAC52FEB6B621E9F35"
    # docs.docker.com, docker-ce.repo: the packages are signed.
    return ExtraRepository("docker-ce", uri, f"{base}/gpg", fingerprint, signed_metadata=False)
