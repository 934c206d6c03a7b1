"""The table of the distributions' own NVIDIA drivers: branches and packages, each row with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuprov.machine.distro_rows import ROWS, Distribution, KernelPackages


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

    `version`: as in the table of distributions; nothing is every release. `branches`: the first that serves a host's
    GPUs is the default. `other_branch` makes the branches that the table does not name; None where there are no others,
    and `branch_pattern` finds their number in the name of an installed package. `components`: of the archive (apt).
    `repository_package`: brings the repository that has the driver. `like_packages`: the kernel modules are the
    distribution's, everything else comes from NVIDIA's repository, as with `gpuprov_driver: packages`.
    """

    id: str
    version: str
    source: str
    branches: tuple[DriverBranch, ...] = ()
    other_branch: Callable[[str], DriverBranch] | None = None
    branch_pattern: str = ""
    components: tuple[str, ...] = ()
    keyrings: tuple[str, ...] = ()
    repository_package: str = ""
    like_packages: bool = False
    architectures: tuple[str, ...] = ("x86_64", "aarch64")


# -- Debian: packages.debian.org, and its security archive (535 in 11 and 12 since 2026) ------------------------------


def _debian(branch: str, tag: str = "", *, kinds: tuple[str, ...] = ("proprietary",)) -> DriverBranch:
    """Return a branch; `tag` is in the names of all branches but one of each release.

    The graphics libraries (nvidia-driver-libs), which pull in X, are left out.
    """
    cuda, decoder = ("libcuda1", "libnvcuvid1") if not tag else (f"libnvidia-{tag}cuda1", f"libnvidia-{tag}nvcuvid1")
    libraries = (
        cuda, f"nvidia-{tag}smi", "nvidia-persistenced", decoder, f"libnvidia-{tag}encode1",
        f"libnvidia-{tag}opticalflow1", f"libnvidia-{tag}cfg1", f"nvidia-{tag}opencl-icd",
    )  # fmt: skip
    names = {"proprietary": f"nvidia-{tag}kernel-dkms", "open": "nvidia-open-kernel-dkms"}
    built = {kind: (names[kind],) for kind in kinds}
    # As long as it is installed, Debian's alternatives lead to the newest branch.
    return DriverBranch(branch, libraries, built, base=f"nvidia-{tag}alternative")


_BOTH = ("proprietary", "open")
# 11 has no component non-free-firmware: the firmware is in non-free.
_DEBIAN = (
    ("11", (_debian("535"), _debian("470", "tesla-470-")), ("contrib", "non-free")),
    ("12", (_debian("535", kinds=_BOTH), _debian("470", "tesla-470-")), ("contrib", "non-free", "non-free-firmware")),
    ("13", (_debian("550", kinds=_BOTH), _debian("535", "tesla-535-")), ("contrib", "non-free", "non-free-firmware")),
)  # fmt: skip
_DEBIAN_KEYRINGS = (
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
)

# -- Ubuntu: documentation.ubuntu.com/server, "NVIDIA drivers installation"


def _ubuntu(branch: str) -> DriverBranch:
    """Return a branch of the server drivers.

    The compiled modules' package for a flavour brings the newest kernel's only: so the running kernel's are asked for
    by its name, and the flavour's for the kernels to come.
    """
    server = f"{branch}-server"
    libraries = (
        f"libnvidia-compute-{server}", f"nvidia-utils-{server}", f"nvidia-compute-utils-{server}",
        f"libnvidia-decode-{server}", f"libnvidia-encode-{server}",
    )  # fmt: skip
    ends = {"proprietary": "", "open": "-open"}
    return DriverBranch(
        branch,
        libraries,
        {kind: (f"nvidia-headless-{server}{end}",) for kind, end in ends.items()},
        {
            kind: (f"linux-modules-nvidia-{server}{end}-{{kernel}}", f"nvidia-headless-no-dkms-{server}{end}")
            for kind, end in ends.items()
        },
        {
            kind: (
                KernelPackages(
                    r"linux-image-(?P<flavour>(?!unsigned-|extra-)[a-z][a-z0-9.+-]*)(?<!-dbg) .*",
                    (f"linux-modules-nvidia-{server}{end}-{{flavour}}",),
                ),
            )
            for kind, end in ends.items()
        },
        fabric_manager=f"nvidia-fabricmanager-{branch}",
    )


# The newest long-term branch and the one before it; others are asked for by their number.
_UBUNTU_BRANCHES = {"20.04": ("535",), "22.04": ("580", "535"), "24.04": ("580", "535"), "26.04": ("580",)}

# -- Amazon Linux 2023: docs.aws.amazon.com, EC2 User Guide, "Install NVIDIA drivers" ---------------------------------

_AMAZON = DriverBranch(
    "",
    ("nvidia-driver-cuda", "nvidia-persistenced"),
    {"proprietary": ("kmod-nvidia-latest-dkms",), "open": ("kmod-nvidia-open-dkms",)},
    fabric_manager="nvidia-fabricmanager",
)

# -- SUSE: documentation.suse.com, "NVIDIA GPU driver on SLES": modules by SUSE, libraries of their version by NVIDIA

_SUSE = ("sles", "opensuse-leap")

OWN_DRIVERS: tuple[OwnDriver, ...] = (
    *(
        OwnDriver(
            "debian", version, "packages.debian.org: nvidia-kernel-dkms, nvidia-open-kernel-dkms, nvidia-tesla-*",
            branches, components=components, keyrings=_DEBIAN_KEYRINGS,
        )
        for version, branches, components in _DEBIAN
    ),
    *(
        OwnDriver(
            "ubuntu", version, "packages.ubuntu.com: nvidia-headless-*-server, linux-modules-nvidia-*-server-*",
            tuple(_ubuntu(one) for one in branches), _ubuntu, r"libnvidia-compute-(\d+)-server",
            ("restricted", "multiverse"), ("/usr/share/keyrings/ubuntu-archive-keyring.gpg",),
        )
        for version, branches in _UBUNTU_BRANCHES.items()
    ),
    OwnDriver(
        "amzn", "2023", "docs.aws.amazon.com, EC2 User Guide: nvidia-release", (_AMAZON,),
        repository_package="nvidia-release", architectures=("x86_64",),
    ),
    *(
        OwnDriver(name, "", "documentation.suse.com: nvidia-open-driver-G0*-signed", like_packages=True)
        for name in _SUSE
    ),
)  # fmt: skip


def own_driver(row: Distribution | None) -> OwnDriver | None:
    """Return the driver that a distribution has itself, None if it has none."""
    found = (one for one in OWN_DRIVERS if row is not None and one.id == row.id and one.version in ("", row.version))
    return next(found, None)


def names_with_own_driver() -> str:
    """Return the distributions that have one, for a message: `Debian 11, 12, 13; Ubuntu 20.04, …`."""
    versions: dict[str, list[str]] = {}
    for row in ROWS:
        if own_driver(row) is not None:
            versions.setdefault(row.name, []).append(row.version)
    return "; ".join(f"{name} {', '.join(found)}" for name, found in versions.items())
