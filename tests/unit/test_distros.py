"""Which row a machine gets, from os-release files of real ones; which packages its kernels need."""

import re
import shutil
from pathlib import Path

import pytest

from gpuprov.core.system import System
from gpuprov.machine.distros import (
    ROWS,
    UNKNOWN,
    Distribution,
    derivative_note,
    distribution_of,
    docker_repository,
    find_distribution,
    kernel_compiler,
    kernel_headers,
    machine_problems,
    names_of,
    next_kernel_headers,
    nvidia_folder,
)
from gpuprov.machine.machine import OperatingSystem, gather_os

OS_RELEASES = Path(__file__).resolve().parents[1] / "data/os-release"


def machine(name: str, folder: Path) -> OperatingSystem:
    """Return what the facts say of a machine with this os-release."""
    (folder / "etc").mkdir(parents=True)
    shutil.copyfile(OS_RELEASES / name, folder / "etc/os-release")
    return gather_os(System(str(folder)))


def row(distribution_id: str, version: str) -> Distribution:
    found = find_distribution(distribution_id, version)
    assert found is not None
    return found


# os-release → the row's id and version, its package manager, NVIDIA's name for it.
KNOWN = {
    "debian-11": ("debian", "11", "apt", "debian11"),
    "debian-12": ("debian", "12", "apt", "debian12"),
    "debian-13": ("debian", "13", "apt", "debian13"),
    "ubuntu-20.04": ("ubuntu", "20.04", "apt", "ubuntu2004"),
    "ubuntu-22.04": ("ubuntu", "22.04", "apt", "ubuntu2204"),
    "ubuntu-24.04": ("ubuntu", "24.04", "apt", "ubuntu2404"),
    "ubuntu-26.04": ("ubuntu", "26.04", "apt", "ubuntu2604"),
    "linuxmint-21.3": ("ubuntu", "22.04", "apt", "ubuntu2204"),
    "rhel-8.10": ("rhel", "8", "dnf", "rhel8"),
    "rhel-9.3": ("rhel", "9", "dnf", "rhel9"),
    "rhel-10.0": ("rhel", "10", "dnf", "rhel10"),
    "rocky-8.9": ("rocky", "8", "dnf", "rhel8"),
    "rocky-9.5": ("rocky", "9", "dnf", "rhel9"),
    "rocky-10.1": ("rocky", "10", "dnf", "rhel10"),
    "almalinux-8.10": ("almalinux", "8", "dnf", "rhel8"),
    "almalinux-9.2": ("almalinux", "9", "dnf", "rhel9"),
    "almalinux-10.0": ("almalinux", "10", "dnf", "rhel10"),
    "centos-8": ("centos", "8", "dnf", "rhel8"),
    "centos-9": ("centos", "9", "dnf", "rhel9"),
    "centos-10": ("centos", "10", "dnf", "rhel10"),
    "ol-8.10": ("ol", "8", "dnf", "rhel8"),
    "ol-9.5": ("ol", "9", "dnf", "rhel9"),
    "ol-10.0": ("ol", "10", "dnf", "rhel10"),
    "eurolinux-9.2": ("rhel", "9", "dnf", "rhel9"),
    "fedora-38": ("fedora", "38", "dnf", "fedora38"),
    "fedora-43": ("fedora", "43", "dnf", "fedora43"),
    "amzn-2023": ("amzn", "2023", "dnf", "amzn2023"),
    "sles-15.3": ("sles", "15", "zypper", "sles15"),
    "sles-16.0": ("sles", "16", "zypper", "suse16"),
    "opensuse-leap-15.6": ("opensuse-leap", "15", "zypper", "opensuse15"),
    "opensuse-leap-16.0": ("opensuse-leap", "16", "zypper", "suse16"),
    "opensuse-tumbleweed": ("opensuse-tumbleweed", "20240609", "zypper", ""),
}
REFUSED = ("devuan-5", "rhcos-4.13", "amzn-2018.03")
# Past their end of life, and an image (SUSE Linux Micro 6.2 as it names itself): what the message says, and to do.
ENDED = {
    "centos-7": ("updates ended on 30 June 20", "release 9 or 10 of RHEL, Rocky Linux"),
    "amzn-2": ("updates ended on 30 June 20", "Amazon Linux 2023"),
    "sles-16.0-transactional": ("its /usr is read-only", "transactional-update"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_real_machine_gets_its_row(tmp_path: Path, name: str) -> None:
    os = machine(name, tmp_path)
    found = distribution_of(os)
    assert (found.id, found.version, found.package_manager, found.nvidia_repository) == KNOWN[name]
    assert machine_problems(os, "x86_64") == ()
    # A derivative is warned about.
    parent = f"{os.name} is not in the table of distributions; it is treated as {found.name} {found.version}"
    assert derivative_note(os).startswith(parent if name in ("linuxmint-21.3", "eurolinux-9.2") else "")
    assert bool(derivative_note(os)) == (name in ("linuxmint-21.3", "eurolinux-9.2"))


def test_every_os_release_is_looked_at() -> None:
    unmatched = {path.name for path in OS_RELEASES.iterdir()} ^ {*KNOWN, *REFUSED, *ENDED, "README.md"}
    assert not unmatched, "next: a file in tests/data/os-release and a line in KNOWN, REFUSED or ENDED for each"


def test_every_row_has_an_os_release_that_was_seen() -> None:
    seen = {(found[0], found[1]) for found in KNOWN.values()}
    rows = {(one.id, one.version) for one in ROWS if one.version != "*"}
    unseen = rows - seen
    assert not unseen, "next: the /etc/os-release of such a machine in tests/data/os-release, and its line in KNOWN"
    assert {one.id for one in ROWS if one.version == "*"} <= {one for one, _ in seen}


@pytest.mark.parametrize("name", ENDED)
def test_a_release_that_can_not_be_served_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    os = machine(name, tmp_path)
    (problem,) = machine_problems(os, "x86_64")
    what, next_step = ENDED[name]
    assert what in problem.what and next_step in problem.next_step
    assert distribution_of(os) == UNKNOWN


def test_a_derivative_of_such_a_release_is_told_the_same() -> None:
    os = OperatingSystem("scientific", "7.9", "", ("rhel", "centos", "fedora"), "Scientific Linux 7.9")
    (problem,) = machine_problems(os, "x86_64")
    assert problem.what == "Scientific Linux 7.9 is not supported: its updates ended on 30 June 2024"
    assert distribution_of(os) == UNKNOWN


@pytest.mark.parametrize("name", REFUSED)
def test_a_machine_whose_parent_has_no_such_release_is_refused_with_what_was_seen(tmp_path: Path, name: str) -> None:
    os = machine(name, tmp_path)
    (problem,) = machine_problems(os, "x86_64")
    assert problem.what == f"{os.name} is not supported"
    assert f"ID={os.id} VERSION_ID={os.version} ID_LIKE={' '.join(os.like)}" in problem.evidence
    assert "Ubuntu 20.04, 22.04, 24.04, 26.04" in problem.next_step


# Derivatives and strangers of which no whole file was to be had: ID, VERSION_ID, code names, ID_LIKE.
@pytest.mark.parametrize(
    ("os", "expected"),
    [
        # Mint's Debian edition names Debian's release by no code name of its own that Debian has.
        (OperatingSystem("linuxmint", "6", "faye", ("debian",), "LMDE 6"), None),
        (OperatingSystem("raspbian", "12", "bookworm", ("debian",), "Raspbian"), ("debian", "12")),
        (OperatingSystem("pop", "22.04", "jammy", ("ubuntu", "debian"), "Pop!_OS", "jammy"), ("ubuntu", "22.04")),
        (OperatingSystem("kali", "2026.1", "kali-rolling", ("debian",), "Kali"), None),
        # A release of a known distribution that is not in the table is not its parent's.
        (OperatingSystem("ubuntu", "25.10", "questing", ("debian",), "Ubuntu 25.10", "questing"), None),
        (OperatingSystem("debian", "", "trixie", (), "Debian GNU/Linux trixie/sid"), None),
        (OperatingSystem("debian", "120", "", (), "Debian"), None),
        (OperatingSystem("nobara", "39", "", ("rhel", "centos", "fedora"), "Nobara 39"), ("fedora", "39")),
        (OperatingSystem("cloudlinux", "8.9", "", ("rhel", "fedora", "centos"), "CloudLinux"), ("rhel", "8")),
        (OperatingSystem("someone", "10", "", ("fedora",), "Someone 10"), None),
        (OperatingSystem("sles", "12.5", "", (), "SLES 12 SP5"), None),
        (OperatingSystem("opensuse-leap", "16.0", "", ("suse", "opensuse"), "Leap 16"), ("opensuse-leap", "16")),
        (OperatingSystem("sles_sap", "15.6", "", ("suse",), "SLES for SAP 15 SP6"), ("sles", "15")),
        (OperatingSystem("opensuse-microos", "20260901", "", ("suse", "opensuse", "opensuse-tumbleweed"), "M"), None),
        (OperatingSystem("arch", "", "", (), "Arch Linux"), None),
        (OperatingSystem("", "", "", (), "unknown"), None),
    ],
)
def test_others(os: OperatingSystem, expected: tuple[str, str] | None) -> None:
    found = distribution_of(os)
    assert (found.id, found.version) == (expected or ("", ""))


@pytest.mark.parametrize(
    ("name", "reason", "next_step"),
    [
        ("cos", "brings its own drivers", "cos-extensions install gpu"),
        ("sle-micro", "its /usr is read-only", "transactional-update"),
    ],
)
def test_a_system_that_must_not_be_changed_is_refused_with_the_reason(name: str, reason: str, next_step: str) -> None:
    (problem,) = machine_problems(OperatingSystem(name, "113", "", ("sles",), "It"), "x86_64")
    assert reason in problem.what and next_step in problem.next_step


def test_another_architecture_is_refused() -> None:
    os = OperatingSystem("rocky", "9.5", "", ("rhel",), "Rocky Linux 9.5")
    assert machine_problems(os, "aarch64") == ()
    (problem,) = machine_problems(os, "ppc64le")
    assert "ppc64le" in problem.evidence and "x86_64, aarch64" in problem.next_step


def test_each_row_is_found_by_its_own_version_and_no_two_rows_are_the_same() -> None:
    assert len({(one.id, one.version) for one in ROWS}) == len(ROWS)
    for one in ROWS:
        version = "42" if one.version == "*" else one.version
        assert row(one.id, version).name == one.name
        assert one.source and one.initramfs and kernel_headers(one, "6.4.0-150600.23.30-default")


# Distribution, `uname -r` → its packages. The first two were seen on hosts of the lab, the rest in vendors' documents.
HEADERS = [
    ("debian", "12", "6.1.0-13-amd64", ("linux-headers-6.1.0-13-amd64",)),
    ("debian", "13", "6.14.11-4-pve", ("proxmox-headers-6.14.11-4-pve",)),
    ("debian", "13", "6.12.43+deb13-cloud-amd64", ("linux-headers-6.12.43+deb13-cloud-amd64",)),
    ("ubuntu", "22.04", "5.15.0-113-generic", ("linux-headers-5.15.0-113-generic",)),
    ("ubuntu", "22.04", "6.8.0-1021-aws", ("linux-headers-6.8.0-1021-aws", "gcc-12")),
    ("rocky", "8", "4.18.0-553.el8_10.x86_64",
     ("kernel-devel=4.18.0-553.el8_10.x86_64", "kernel-headers=4.18.0-553.el8_10.x86_64")),
    ("rhel", "8", "4.18.0-553.rt7.342.el8_10.x86_64", ("kernel-rt-devel=4.18.0-553.rt7.342.el8_10.x86_64",)),
    ("rocky", "8", "4.18.0-553.el8_10.x86_64+debug",
     ("kernel-debug-devel=4.18.0-553.el8_10.x86_64", "kernel-headers=4.18.0-553.el8_10.x86_64")),
    ("rhel", "9", "5.14.0-427.13.1.el9_4.x86_64", ("kernel-devel=5.14.0-427.13.1.el9_4.x86_64", "kernel-headers")),
    ("rhel", "9", "5.14.0-427.13.1.el9_4.aarch64+64k",
     ("kernel-64k-devel=5.14.0-427.13.1.el9_4.aarch64", "kernel-headers")),
    ("ol", "9", "5.15.0-206.153.7.el9uek.x86_64", ("kernel-uek-devel=5.15.0-206.153.7.el9uek.x86_64",)),
    ("ol", "9", "6.12.0-100.28.2.el9uek.x86_64",
     ("kernel-uek-devel=6.12.0-100.28.2.el9uek.x86_64", "gcc-toolset-14-gcc")),
    ("ol", "10", "6.12.0-100.28.2.el10uek.x86_64", ("kernel-uek-devel=6.12.0-100.28.2.el10uek.x86_64",)),
    ("fedora", "42", "6.14.2-300.fc42.x86_64", ("kernel-devel=6.14.2-300.fc42.x86_64", "kernel-headers")),
    ("amzn", "2023", "6.1.94-99.176.amzn2023.x86_64",
     ("kernel-devel=6.1.94-99.176.amzn2023.x86_64", "kernel-headers",
      "kernel-modules-extra=6.1.94-99.176.amzn2023.x86_64")),
    ("amzn", "2023", "6.12.22-27.96.amzn2023.x86_64",
     ("kernel6.12-devel=6.12.22-27.96.amzn2023.x86_64", "kernel-headers",
      "kernel6.12-modules-extra=6.12.22-27.96.amzn2023.x86_64")),
    ("sles", "15", "6.4.0-150600.23.30-default", ("kernel-default-devel=6.4.0-150600.23.30",)),
    ("sles", "15", "6.4.0-150600.8.20-azure", ("kernel-azure-devel=6.4.0-150600.8.20",)),
    ("opensuse-tumbleweed", "20240609", "6.9.3-1-default", ("kernel-default-devel=6.9.3-1",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "version", "kernel", "names"), HEADERS)
def test_headers_are_those_of_the_running_kernel(name: str, version: str, kernel: str, names: tuple[str, ...]) -> None:
    assert kernel_headers(row(name, version), kernel) == names


_EL9 = "5.14.0-503.11.1.el9_5"


@pytest.mark.parametrize(
    ("name", "version", "kernel", "installed", "names"),
    [
        ("debian", "12", "K", ("linux-image-amd64", "linux-image-6.1.0-13-amd64"), ("linux-headers-amd64",)),
        ("debian", "12", "K", ("linux-image-cloud-arm64",), ("linux-headers-cloud-arm64",)),
        ("debian", "12", "K", ("linux-image-amd64", "linux-headers-amd64", "linux-image-amd64-dbg"), ()),
        # Nobody asked for new kernels: there are none to prepare for.
        ("debian", "12", "K", ("linux-image-6.1.0-13-amd64",), ()),
        ("ubuntu", "22.04", "K", ("linux-image-generic-hwe-22.04",), ("linux-headers-generic-hwe-22.04",)),
        ("ubuntu", "24.04", "K", ("linux-image-unsigned-6.8.0-31-generic", "linux-image-aws"), ("linux-headers-aws",)),
        ("rocky", "9", "K", ("kernel-core", "kernel"), ("kernel-devel-matched=K",)),
        ("rocky", "9", "K", ("kernel-core", "kernel-devel-matched"), ()),
        ("rocky", "8", "K", ("kernel-core",), ()),
        ("fedora", "42", "K", ("kernel-core",), ("kernel-devel-matched=K",)),
        ("sles", "15", "K", ("kernel-default",), ()),
        # A kernel of another flavour runs, and the plain one lies beside it: there is no such version of its headers.
        ("rocky", "9", f"{_EL9}.aarch64+64k", ("kernel-core", "kernel-64k-core"),
         (f"kernel-64k-devel-matched={_EL9}.aarch64",)),
        ("rocky", "9", f"{_EL9}.x86_64+rt", ("kernel-core", "kernel-rt-core"),
         (f"kernel-rt-devel-matched={_EL9}.x86_64",)),
        ("rocky", "9", "5.14.0-284.30.1.rt14.315.el9_2.x86_64", ("kernel-core", "kernel-rt-core"), ()),
        ("ol", "9", "5.15.0-209.161.7.2.el9uek.x86_64", ("kernel-core", "kernel-uek-core"), ()),
        ("ol", "9", f"{_EL9}.x86_64", ("kernel-core", "kernel-uek-core"), (f"kernel-devel-matched={_EL9}.x86_64",)),
    ],
)  # fmt: skip
def test_headers_of_next_kernels(
    name: str, version: str, kernel: str, installed: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert next_kernel_headers(row(name, version), kernel, installed) == names


@pytest.mark.parametrize(
    ("name", "version", "architecture", "folder"),
    [
        ("ubuntu", "22.04", "aarch64", "ubuntu2204/sbsa"),
        ("debian", "12", "aarch64", "debian12/sbsa"),
        ("almalinux", "10.0", "aarch64", "rhel10/sbsa"),
        ("amzn", "2023", "aarch64", "amzn2023/sbsa"),
        ("sles", "15", "aarch64", "sles15/sbsa"),
        ("fedora", "43", "aarch64", "fedora43/sbsa"),
        ("opensuse-leap", "15.6", "x86_64", "opensuse15/x86_64"),
        ("opensuse-tumbleweed", "20240609", "x86_64", ""),
        ("debian", "12", "riscv64", ""),
        # NVIDIA has nothing for Arm there.
        ("debian", "11", "aarch64", ""),
        ("opensuse-leap", "15.6", "aarch64", ""),
        ("fedora", "44", "aarch64", ""),
    ],
)
def test_nvidias_repository(name: str, version: str, architecture: str, folder: str) -> None:
    assert nvidia_folder(row(name, version), architecture) == folder


def test_dockers_own_repository() -> None:
    debian = docker_repository(row("debian", "12"), "x86_64")
    assert debian is not None
    assert (debian.uri, debian.suite) == ("https://download.docker.com/linux/debian", "bookworm")
    rocky = docker_repository(row("rocky", "9.5"), "aarch64")
    assert rocky is not None and rocky.uri == "https://download.docker.com/linux/centos/9/aarch64/stable"
    assert rocky.key_fingerprint == "060A61C51B558A7F742B77AAC52FEB6B621E9F35"
    assert rocky.key_fingerprint != debian.key_fingerprint
    assert docker_repository(row("sles", "15"), "x86_64") is None


def test_what_is_supported_is_told_by_name() -> None:
    text = names_of(ROWS)
    assert re.match(r"Debian 11, 12, 13[^;]*; Ubuntu 20\.04", text)
    assert re.search(r"; Fedora; .*; openSUSE Tumbleweed$", text)


@pytest.mark.parametrize(
    ("version", "kernel", "folder"),
    [
        ("9.6", "6.12.0-100.28.2.el9uek.x86_64", "/opt/rh/gcc-toolset-14/root/usr/bin"),
        ("9.6", "5.15.0-206.153.7.el9uek.x86_64", ""),
        ("9.6", "5.14.0-503.11.1.el9_5.x86_64", ""),
        ("10.0", "6.12.0-100.28.2.el10uek.x86_64", ""),
    ],
)
def test_a_kernel_of_another_compiler_is_built_with_that(version: str, kernel: str, folder: str) -> None:
    assert kernel_compiler(row("ol", version), kernel) == folder
