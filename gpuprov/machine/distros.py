"""The table of distributions: find a machine's row, and what it means for a kernel. Never queries the machine.

The rows and their sources are in protocol/distributions.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

from gpuprov.machine.machine import MACHINES, MachineKind, OperatingSystem
from gpuprov.protocol.codec import load
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.tables import rows


@dataclass(frozen=True)
class KernelPackages:
    """Packages that go with some kernels: those where `pattern` matches all of a name.

    The names may hold the pattern's named groups in braces, and {kernel} for `uname -r`; NAME=VERSION asks for a
    version. `compiler`: the folder of the compiler that built these kernels, where it is not the host's `gcc`.
    """

    pattern: str
    names: tuple[str, ...]
    compiler: str = ""


@dataclass(frozen=True)
class Distribution:
    """A supported distribution release.

    `version`: what VERSION_ID is, or what it begins with before a dot (`9` stands for 9.5 too); `*` is every version.
    `kernel_headers`: by `uname -r`, first match wins. `next_kernel_headers`: by the name of an installed package, a
    blank and `uname -r`, so that a kernel that such a package brings finds headers too. `dkms_from`: the repository
    that has DKMS where the distribution itself has not. `docker_packages`: the distribution's own docker with the
    plugins that it packages, nothing where it has none. `docker_repository`: the folder at download.docker.com/linux.
    `nvidia_name`: the folder in NVIDIA's CUDA repositories, {major} and {digits} standing for parts of the version.
    `source`: where the row was read.
    `pythons`: packages of a Python that gpuprov runs on; the first that a repository has is enough.
    `service_packages`: what nvidia-persistenced of a .run needs and does not include.
    """

    id: str
    version: str
    name: str
    package_manager: str
    kernel_headers: tuple[KernelPackages, ...]
    build_packages: tuple[str, ...]
    docker_packages: tuple[str, ...]
    initramfs: tuple[str, ...]
    source: str
    next_kernel_headers: tuple[KernelPackages, ...] = ()
    dkms_from: str = ""
    docker_repository: str = ""
    nvidia_name: str = ""
    codename: str = ""
    architectures: tuple[str, ...] = ("x86_64", "aarch64")
    pythons: tuple[str, ...] = ("python3",)
    service_packages: tuple[str, ...] = ()

    @property
    def nvidia_repository(self) -> str:
        """The folder in NVIDIA's CUDA repositories, such as `rhel9`; nothing where NVIDIA has none."""
        return self.nvidia_name.format(major=self.version.partition(".")[0], digits=self.version.replace(".", ""))

    def covers(self, version: str) -> bool:
        """Say whether a VERSION_ID is this row's."""
        return self.version == "*" or version == self.version or version.startswith(f"{self.version}.")


@dataclass(frozen=True)
class DriverBranch:
    """A branch of a distribution's own driver, by its packages.

    `branch` is empty where the distribution has one driver, of whatever branch. `libraries`: what each host needs; the
    version of the first is the driver's. `built`: kind of kernel modules (open, proprietary) → what DKMS builds them
    from. `compiled`: kind → packages with modules that the distribution has compiled and signed; the first is for one
    kernel ({kernel}). `next_compiled`: kind → what brings modules with the kernels to come, as next_kernel_headers.
    `base`: what all other packages of the branch depend on, if there is such a one: without it they are gone.
    `fabric_manager`: its package, nothing where the distribution has none.
    """

    branch: str
    libraries: tuple[str, ...]
    built: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    compiled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    next_compiled: Mapping[str, tuple[KernelPackages, ...]] = field(default_factory=dict)
    base: str = ""
    fabric_manager: str = ""


@dataclass(frozen=True)
class OwnDriver:
    """The NVIDIA driver of a distribution release.

    `version`: as in the table of distributions; nothing is every release. `named`: branches with names of their own.
    `numbers`: those that the `template` gives, with {branch} for the number. It gives any other branch too, and
    `branch_pattern` finds the number in the name of an installed package. `components`: of the archive (apt).
    `repository_package`: brings the repository that has the driver. `like_packages`: the kernel modules are the
    distribution's, everything else comes from NVIDIA's repository, as with `gpuprov_driver: packages`.
    """

    id: str
    source: str
    version: str = ""
    named: tuple[DriverBranch, ...] = ()
    numbers: tuple[str, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    branch_pattern: str = ""
    components: tuple[str, ...] = ()
    keyrings: tuple[str, ...] = ()
    repository_package: str = ""
    like_packages: bool = False
    architectures: tuple[str, ...] = ("x86_64", "aarch64")

    @cached_property
    def branches(self) -> tuple[DriverBranch, ...]:
        """The branches of the table; the first that serves a host's GPUs is the default."""
        return *self.named, *map(self.numbered, self.numbers)

    def numbered(self, number: str) -> DriverBranch:
        """Return the template's branch of a number."""
        texts = json.loads(json.dumps(self.template).replace("{branch}", number))
        return load(DriverBranch, {**texts, "branch": number}, trusted=True, exact=True)


@dataclass(frozen=True)
class Unsupported:
    """A release past its end of life, whatever parent it names."""

    id: str
    version: str
    what: str
    next_step: str


ROWS = rows("distributions", "distributions", Distribution)
# The row of a distribution that is not supported: it has no packages and no repositories.
UNKNOWN = Distribution("", "", "", "", (), (), (), (), "")
_UNSUPPORTED = rows("distributions", "unsupported", Unsupported)
OWN_DRIVERS = rows("distributions", "drivers", OwnDriver)
# NVIDIA's name of an architecture in its CUDA repositories, from `uname -m`; sbsa is Arm's servers.
_NVIDIA_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "sbsa"}
# Folders there without one for Arm: docs.nvidia.com, Driver Installation Guide, "Linux System Requirements".
_WITHOUT_SBSA = re.compile(r"debian11|opensuse15|fedora(3\d|4[014])")
# Names in ID_LIKE that are a family's, not a distribution's: SUSE's own editions for SAP, for desktops, for HPC.
_FAMILIES = {"suse": "sles"}


def names_of(rows: Iterable[Distribution]) -> str:
    """Return names and versions of rows, for a message: `Debian 11, 12, 13; Ubuntu 20.04, …`."""
    versions: dict[str, list[str]] = {}
    for row in rows:
        versions.setdefault(row.name, []).append("" if row.version == "*" else row.version)
    return "; ".join(f"{name} {', '.join(found)}".strip() for name, found in versions.items())


def own_driver(row: Distribution | None) -> OwnDriver | None:
    """Return the driver that a distribution has itself, None if it has none."""
    found = (one for one in OWN_DRIVERS if row is not None and one.id == row.id and one.version in ("", row.version))
    return next(found, None)


def find_distribution(distribution_id: str, version: str) -> Distribution | None:
    """Return the row for an os-release ID and VERSION_ID, or None if the table has none."""
    found = next((row for row in ROWS if row.id == distribution_id and row.covers(version)), None)
    return replace(found, version=version) if found is not None and found.version == "*" else found


def distribution_of(os: OperatingSystem) -> Distribution:
    """Return the row of a machine: its own, else that of the first parent in ID_LIKE that has one, else UNKNOWN.

    A derivative's VERSION_ID counts as its parent's, unless a code name says which of Ubuntu's or Debian's releases it
    is made of: Linux Mint 21.3 is Ubuntu 22.04.
    """
    if _refusal(os):
        return UNKNOWN
    if any(row.id == os.id for row in ROWS):
        return find_distribution(os.id, os.version) or UNKNOWN
    return next((row for parent in os.like if (row := _parent_row(parent, os)) is not None), UNKNOWN)


def _parent_row(parent: str, os: OperatingSystem) -> Distribution | None:
    if parent in ("debian", "ubuntu"):
        # Versions of derivatives look like their parents' (Devuan 5, Linux Mint 22) and mean something else.
        names = {"debian": os.codename, "ubuntu": os.ubuntu_codename or os.codename}
        return next((row for row in ROWS if row.id == parent and row.codename and row.codename == names[parent]), None)
    if parent == "fedora" and not re.fullmatch(r"[3-9]\d", os.version):
        return None
    return find_distribution(_FAMILIES.get(parent, parent), os.version)


def derivative_note(os: OperatingSystem) -> str:
    """Return a warning if a machine is treated as its parent distribution, or ""."""
    row = distribution_of(os)
    if row.id in ("", os.id):
        return ""
    return f"{os.name} is not in the table of distributions; it is treated as {row.name} {row.version}, which it names"


def machine_problems(os: OperatingSystem, architecture: str) -> tuple[Problem, ...]:
    """Return why this distribution, or this architecture of it, is not supported; empty if it is."""
    row, what, seen = distribution_of(os), f"{os.name} is not supported", f"/etc/os-release: ID={os.id}"
    if refused := _refusal(os):
        variant = f" VARIANT_ID={os.variant}" if os.variant else ""
        return (Problem(f"{what}: {refused.what}", f"{seen}{variant}", refused.next_step),)
    # A release whose updates ended: this one, or its parent release.
    major, old = os.version.partition(".")[0], {(one.id, one.version): one for one in _UNSUPPORTED}
    ended = next((old[one, major] for one in (os.id, *os.like) if (one, major) in old), None)
    if not row.id and ended:
        return (Problem(f"{what}: {ended.what}", f"{seen} VERSION_ID={os.version}", ended.next_step),)
    if not row.id:
        like = f" ID_LIKE={' '.join(os.like)}" if os.like else ""
        seen = f"{seen} VERSION_ID={os.version or '(none)'}{like}"
        return (Problem(what, seen, f"supported are: {names_of(ROWS)}"),)
    if architecture not in row.architectures:
        what = f"{row.name} {row.version} is not supported on this architecture"
        return (Problem(what, f"uname -m: {architecture}", f"supported are: {', '.join(row.architectures)}"),)
    return ()


def _refusal(os: OperatingSystem) -> MachineKind | None:
    """Return what this system is, if it must not be changed."""
    return next((one for one in MACHINES if one.served == "no" and one.has_system(os)), None)


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
    base = f"https://download.docker.com/linux/{row.docker_repository}"
    # Debian's and Ubuntu's releases have code names, which are apt's suites.
    if row.codename:
        fingerprint = "9DC858229FC7DD38854AE2D88D81803C0EBFCD88"
        return ExtraRepository("docker-ce", base, f"{base}/gpg", fingerprint, row.codename, "stable")
    uri, fingerprint = f"{base}/{row.version}/{architecture}/stable", "060A61C51B558A7F742B77AAC52FEB6B621E9F35"
    # docs.docker.com, docker-ce.repo: the packages are signed.
    return ExtraRepository("docker-ce", uri, f"{base}/gpg", fingerprint, signed_metadata=False)
