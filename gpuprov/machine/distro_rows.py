"""The table of distributions: what differs between them, each row with its source; distros.py looks things up in it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KernelPackages:
    """Packages that go with some kernels: those where `pattern` matches all of a name.

    The names may hold the pattern's named groups in braces, and {kernel} for `uname -r`; NAME=VERSION asks for a
    version.
    """

    pattern: str
    names: tuple[str, ...]


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

    @property
    def nvidia_repository(self) -> str:
        """The folder in NVIDIA's CUDA repositories, such as `rhel9`; nothing where NVIDIA has none."""
        return self.nvidia_name.format(major=self.version.partition(".")[0], digits=self.version.replace(".", ""))

    def covers(self, version: str) -> bool:
        """Say whether a VERSION_ID is this row's."""
        return self.version == "*" or version == self.version or version.startswith(f"{self.version}.")


_EVERY_KERNEL = r".+"
_UPDATE_INITRAMFS = ("update-initramfs", "-u", "-k", "all")
_DRACUT = ("dracut", "--force", "--regenerate-all")

# -- Debian and Ubuntu: packages.debian.org, packages.ubuntu.com ------------------------------------------------------

_DEB_BUILD = ("gcc", "make", "libc6-dev", "dkms", "kmod")
_DEB_HEADERS = (KernelPackages(_EVERY_KERNEL, ("linux-headers-{kernel}",)),)
# linux-image-amd64, linux-image-cloud-arm64, linux-image-generic-hwe-22.04, linux-image-aws …: packages without a
# kernel's version in their name, which bring the next kernel; its headers have the same name.
_DEB_NEXT = (
    KernelPackages(
        r"linux-image-(?P<flavour>(?!unsigned-|extra-)[a-z][a-z0-9.+-]*)(?<!-dbg) .*", ("linux-headers-{flavour}",)
    ),
)
_DEBIAN = Distribution(
    "debian", "12", "Debian", "apt", _DEB_HEADERS, _DEB_BUILD, ("docker.io",), _UPDATE_INITRAMFS,
    "packages.debian.org: linux-headers-*, docker.io", _DEB_NEXT, "", "debian", "debian{major}", "bookworm",
)  # fmt: skip
_UBUNTU = replace(
    _DEBIAN, id="ubuntu", name="Ubuntu", docker_repository="ubuntu", nvidia_name="ubuntu{digits}",
    source="packages.ubuntu.com: linux-headers-*, docker.io",
)  # fmt: skip
# The hardware enablement kernels of 22.04 (6.x) are built with gcc-12, its `gcc` is 11.
_JAMMY_HEADERS = (KernelPackages(r"6\..+", ("linux-headers-{kernel}", "gcc-12")), *_DEB_HEADERS)
# documentation.ubuntu.com, SRU exception "Container Stack Updates": every supported release gets these versions.
_UBUNTU_DOCKER = ("docker.io", "docker-buildx", "docker-compose-v2")
_DEBS = (
    replace(_DEBIAN, version="11", codename="bullseye"),
    _DEBIAN,
    # docker-cli became a package of its own with Debian 13, which is the first with docker's plugins: docker-compose
    # of Debian 12 is a program of its own, of version 1.
    replace(
        _DEBIAN, version="13", codename="trixie",
        docker_packages=("docker.io", "docker-cli", "docker-buildx", "docker-compose"),
    ),
    # Its python3 is 3.8; python3.9 is in universe (packages.ubuntu.com/focal/python3.9).
    replace(_UBUNTU, version="20.04", codename="focal", pythons=("python3.9",)),
    replace(
        _UBUNTU, version="22.04", codename="jammy", kernel_headers=_JAMMY_HEADERS, docker_packages=_UBUNTU_DOCKER
    ),
    replace(_UBUNTU, version="24.04", codename="noble", docker_packages=_UBUNTU_DOCKER),
    replace(_UBUNTU, version="26.04", codename="resolute", docker_packages=_UBUNTU_DOCKER),
)  # fmt: skip

# -- Red Hat's family: docs.nvidia.com, Driver Installation Guide, "Red Hat Enterprise Linux", and kernel.spec --------

# kernel-rt before 9.3 is a package of its own, its release `4.18.0-….rt7….el8.x86_64`; later `…x86_64+rt`, as `+64k`.
_EL_REALTIME = KernelPackages(r".+[.-]rt\d.*", ("kernel-rt-devel={kernel}",))
_EL_FLAVOUR = KernelPackages(
    r"(?P<release>.+)\+(?P<flavour>[a-z0-9-]+)", ("kernel-{flavour}-devel={release}", "kernel-headers")
)
# kernel-headers is built of newer sources from 9 on and need not be of the running kernel's version; Fedora has none
# that were.
_NEW_HEADERS = (KernelPackages(_EVERY_KERNEL, ("kernel-devel={kernel}", "kernel-headers")),)
_EL8_FLAVOUR = replace(_EL_FLAVOUR, names=("kernel-{flavour}-devel={release}", "kernel-headers={release}"))
_EL8_HEADERS = (
    _EL_REALTIME,
    _EL8_FLAVOUR,
    KernelPackages(_EVERY_KERNEL, ("kernel-devel={kernel}", "kernel-headers={kernel}")),
)
_EL9_HEADERS = (_EL_REALTIME, _EL_FLAVOUR, *_NEW_HEADERS)
# Oracle's own kernels: docs.oracle.com, Unbreakable Enterprise Kernel.
_UEK = KernelPackages(r".+\.el\d+uek\.\w+", ("kernel-uek-devel={kernel}",))
# kernel-devel-matched makes each new kernel-core bring its kernel-devel. Only one version of it can be installed, and
# the newest would bring the newest kernel: so it is asked for in the running kernel's version, once. Each flavour has
# its own (kernel-64k-core: kernel-64k-devel-matched); Oracle's UEK and the older kernel-rt have none, and kernel-core
# may lie beside them.
_MATCHED = (
    KernelPackages(r"kernel-core (?P<release>(?!.*(?:uek\.|[.-]rt\d))[^+]+)", ("kernel-devel-matched={release}",)),
    KernelPackages(
        r"kernel-(?P<flavour>[a-z0-9-]+)-core (?P<release>.+)\+(?P=flavour)",
        ("kernel-{flavour}-devel-matched={release}",),
    ),
)
_EL_BUILD = ("gcc", "make", "elfutils-libelf-devel", "kmod")
# Red Hat packages no docker; podman is its engine.
_ROCKY = Distribution(
    "rocky", "9", "Rocky Linux", "dnf", _EL9_HEADERS, _EL_BUILD, (), _DRACUT,
    "docs.nvidia.com, Driver Installation Guide: Red Hat Enterprise Linux", _MATCHED, "EPEL", "centos", "rhel{major}",
)  # fmt: skip
# Its python3 is 3.6. docs.redhat.com, RHEL 8, "Configuring basic system settings", Python: python39 since 8.4,
# python3.11 since 8.8, python3.12 since 8.10.
_EL8 = replace(
    _ROCKY,
    version="8",
    kernel_headers=_EL8_HEADERS,
    next_kernel_headers=(),
    pythons=("python3.12", "python3.11", "python39"),
)
_EL_RELEASES = (_EL8, _ROCKY, replace(_ROCKY, version="10"))
_EL_NAMES = (
    ("rhel", "Red Hat Enterprise Linux", "rhel"), ("rocky", "Rocky Linux", "centos"),
    ("almalinux", "AlmaLinux", "centos"), ("centos", "CentOS Stream", "centos"),
)  # fmt: skip
_EL = tuple(
    replace(row, id=one, name=name, docker_repository=docker) for one, name, docker in _EL_NAMES for row in _EL_RELEASES
)
_ORACLE = tuple(
    replace(row, id="ol", name="Oracle Linux", kernel_headers=(_UEK, *row.kernel_headers)) for row in _EL_RELEASES
)
_FEDORA = replace(
    _ROCKY, id="fedora", version="*", name="Fedora", kernel_headers=(_EL_FLAVOUR, *_NEW_HEADERS),
    build_packages=(*_EL_BUILD, "dkms"), dkms_from="",
    docker_packages=("moby-engine",), docker_repository="fedora", nvidia_name="fedora{major}",
    source="packages.fedoraproject.org; docs.nvidia.com, Driver Installation Guide: Fedora",
)  # fmt: skip

# -- Amazon Linux: docs.aws.amazon.com, Amazon Linux user guides ------------------------------------------------------

# Kernels after 6.1 have their series in their packages' names. Of the headers for programs only one series can be
# installed, and gcc has brought one; modules are built without them.
_AMAZON_HEADERS = (
    KernelPackages(r"6\.1\..+", ("kernel-devel={kernel}", "kernel-headers", "kernel-modules-extra={kernel}")),
    KernelPackages(
        r"(?P<series>\d+\.\d+)\..+",
        ("kernel{series}-devel={kernel}", "kernel-headers", "kernel{series}-modules-extra={kernel}"),
    ),
)
_AMAZON = replace(
    _ROCKY, id="amzn", version="2023", name="Amazon Linux", kernel_headers=_AMAZON_HEADERS, next_kernel_headers=(),
    build_packages=(*_EL_BUILD, "dkms"), dkms_from="", docker_packages=("docker",), docker_repository="",
    nvidia_name="amzn2023", source="docs.aws.amazon.com: Amazon Linux 2023 User Guide; docs.nvidia.com",
)  # fmt: skip

# -- SUSE: docs.nvidia.com, Driver Installation Guide, "SUSE"; kernel-binary.spec -------------------------------------

# `6.4.0-150600.23.30-default` runs from kernel-default-6.4.0-150600.23.30.1: the package provides its name in the
# version without the number of its rebuild. It brings kernel-devel and kernel-macros.
_SUSE_HEADERS = (KernelPackages(r"(?P<release>.+)-(?P<flavour>[a-z0-9_]+)", ("kernel-{flavour}-devel={release}",)),)
_SUSE_BUILD = ("gcc", "make", "libelf-devel", "kmod")
_SLES = Distribution(
    "sles", "15", "SUSE Linux Enterprise", "zypper", _SUSE_HEADERS, _SUSE_BUILD, ("docker",), _DRACUT,
    "docs.nvidia.com, Driver Installation Guide: SUSE; documentation.suse.com", (), "PackageHub", "", "sles{major}",
)  # fmt: skip
# Their python3 is 3.6; python311 is in the Python 3 Module since SLES 15 SP4, and in Leap since 15.4.
_SUSE_15 = ("python311",)
_LEAP = replace(
    _SLES, id="opensuse-leap", name="openSUSE Leap", build_packages=(*_SUSE_BUILD, "dkms"), dkms_from="",
    nvidia_name="opensuse{major}", source="software.opensuse.org; docs.nvidia.com, Driver Installation Guide: SUSE",
)  # fmt: skip
_SUSE = (
    replace(_SLES, pythons=_SUSE_15),
    replace(_SLES, version="16", nvidia_name="suse16"),
    replace(_LEAP, pythons=_SUSE_15),
    replace(_LEAP, version="16", nvidia_name="suse16"),
    replace(_LEAP, id="opensuse-tumbleweed", version="*", name="openSUSE Tumbleweed", nvidia_name=""),
)

ROWS: tuple[Distribution, ...] = (*_DEBS, *_EL, *_ORACLE, _FEDORA, _AMAZON, *_SUSE)
