"""What a bundle shall hold, from the command line and the specifications of hosts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from gpuprov.bundle_create.recipe import Mirror, Recipe, Wanted, default_sources, machine_mirror, make_recipe, mirror_at
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.machine.distros import ROWS, Distribution
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.spec import HostSpec, SiteRepository
from gpuprov.protocol.tables import PACKAGED

MIRROR = mirror_at("http://mirror.example/debian/")
WANTED = Wanted("debian-12", "x86_64", mirror=MIRROR)
SITE = SiteRepository("site", "https://u:secret@mirror.example/apt", "https://mirror.example/key.asc", "A" * 40)
KERNEL = "6.1.0-37-amd64"
HEADERS = (f"linux-headers-{KERNEL}", "gcc", "make", "libc6-dev", "dkms", "kmod", "libtirpc3", "apparmor")
TOOLKIT = (
    "nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools", "libnvidia-container1",
)  # fmt: skip


OWN = HostSpec(driver="distribution", docker="preinstalled")


def recipe(*specs: HostSpec, **options: Any) -> Recipe:
    return make_recipe(dataclasses.replace(WANTED, **options), specs or (HostSpec(),))


@pytest.mark.parametrize(
    ("options", "specs", "packages"),
    [
        ({}, (HostSpec(),), {"docker.io"}),
        ({"distro": "debian-13"}, (HostSpec(),), {"docker.io", "docker-cli", "docker-buildx", "docker-compose"}),
        ({"distro": "ubuntu-24.04"}, (HostSpec(),), {"docker.io", "docker-buildx", "docker-compose-v2"}),
        ({}, (HostSpec(docker="preinstalled"),), set()), ({}, (HostSpec(docker="none"),), set()),
        ({}, (HostSpec(docker="none", packages=("podman",)),), {"podman"}),
        ({}, (HostSpec(docker="preinstalled"), HostSpec()), {"docker.io"}),
        ({"kernels": (KERNEL,)}, (HostSpec(),), {"docker.io", *HEADERS}),
        ({"packages": ("htop", "tini=0.19.0-1")}, (HostSpec(),), {"docker.io", "htop", "tini=0.19.0-1"}),
        ({}, (HostSpec(packages=("a",)), HostSpec(packages=("b", "a"))), {"docker.io", "a", "b"}),
        ({}, (HostSpec(toolkit="nvidia"),), {"docker.io", *TOOLKIT}),
        ({}, (HostSpec(docker="docker-ce"),),
         {"docker-ce", "docker-ce-cli", "containerd.io", "docker-buildx-plugin", "docker-compose-plugin"}),
        ({}, (HostSpec(cuda="12.4"),), {"docker.io", "cuda-toolkit-12-4"}),
    ],
)  # fmt: skip
def test_packages(options: dict[str, Any], specs: tuple[HostSpec, ...], packages: set[str]) -> None:
    found = recipe(*specs, **options)
    assert set(found.packages) == packages
    assert list(found.packages) == sorted(found.packages)


def test_the_distributions_own_driver_comes_with_its_components() -> None:
    libraries = recipe(OWN)
    assert {"libcuda1", "nvidia-smi"} < {*libraries.packages} and "nvidia-kernel-dkms" not in libraries.packages
    assert all(line.endswith(" main contrib non-free non-free-firmware") for line in libraries.sources)
    assert all(line.endswith(" main") for line in recipe(HostSpec()).sources)
    assert "nvidia-kernel-dkms" in recipe(OWN, kernels=(KERNEL,)).packages
    older = dataclasses.replace(OWN, driver_version="535", kernel_modules="build")
    assert "nvidia-tesla-535-kernel-dkms" in recipe(older, distro="debian-13", kernels=(KERNEL,)).packages
    kernels = ("6.8.0-31-generic", "6.8.0-40-generic")
    compiled = recipe(OWN, distro="ubuntu-24.04", kernels=kernels).packages
    assert {f"linux-modules-nvidia-580-server-open-{one}" for one in kernels} < {*compiled}
    assert "nvidia-headless-580-server-open" not in compiled


def test_the_driver_is_the_one_that_the_hosts_ask_for() -> None:
    found = recipe(HostSpec(driver_version="550.163.01"), HostSpec(driver="preinstalled"))
    assert found.driver.version == "550.163.01"
    assert found.driver.url.endswith("/550.163.01/NVIDIA-Linux-x86_64-550.163.01.run")
    own = recipe(HostSpec(driver_version="550.163.01", driver_url="https://a/b.run", driver_sha256="0" * 64))
    assert (own.driver.url, own.driver.sha256) == ("https://a/b.run", "0" * 64)
    assert recipe(HostSpec()).driver.url == ""


def test_repositories_are_taken_once_and_the_toolkits_too() -> None:
    spec = HostSpec(repositories=(SITE,), toolkit="nvidia")
    found = recipe(spec, dataclasses.replace(spec, packages=("a",)))
    assert [one.name for one in found.repositories] == ["nvidia-container-toolkit", "site"]


def test_what_comes_from_docker_and_nvidia_brings_their_repositories() -> None:
    found = recipe(HostSpec(docker="docker-ce"), HostSpec(cuda="12.4"))
    assert [(one.name, one.uri) for one in found.repositories] == [
        ("cuda", "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/"),
        ("docker-ce", "https://download.docker.com/linux/debian"),
    ]
    assert found.repositories[1].suite == "bookworm"


def test_what_it_is_made_from_holds_no_password() -> None:
    url = "https://u:secret@mirror.example/driver.run"
    spec = HostSpec(repositories=(SITE,), driver_version="550.163.01", driver_url=url)
    found = recipe(spec, sources=("deb https://u:secret@mirror.example/debian bookworm main",)).inputs()
    assert "secret" not in str(found)
    assert "https://u:***@mirror.example/debian" in str(found)


OTHER_SITE = dataclasses.replace(SITE, uri="https://elsewhere.example")
REFUSED: list[tuple[dict[str, Any], tuple[HostSpec, ...], str]] = [
    ({"distro": "fedora-40"}, (HostSpec(),), "where the packages of fedora 40 come from must be said"),
    ({"distro": "fedora"}, (HostSpec(toolkit="nvidia", toolkit_version="1.17.8-1"),), "where the packages of fedora"),
    ({"distro": "debian"}, (HostSpec(),), "supported are: Debian 11"),
    ({"distro": "rocky-9"}, (OWN,), "bundles hold it for Debian and Ubuntu"),
    ({"distro": "sles-15"}, (OWN,), "bundles hold it for Debian and Ubuntu"),
    ({"distro": "debian-13"}, (HostSpec(driver="distribution", driver_version="580"),),
     "its branches: 550 (open,proprietary), 535 (proprietary)"),
    ({"distro": "debian-11"}, (HostSpec(driver="distribution", kernel_module_type="open"),),
     "Debian 11 has no open driver"),
    ({"mirror": Mirror()}, (HostSpec(),), "name it with --mirror URL"),
    ({"architecture": "riscv64"}, (HostSpec(),), "riscv64 is not supported"),
    ({}, (HostSpec(driver_version="550.163.01"), HostSpec(driver_version="535.261.03")),
     "the hosts ask for different drivers"),
    (
        {}, (HostSpec(driver_version="1234.5", driver_sha256="0" * 64),
             HostSpec(driver_version="1234.5", driver_sha256="1" * 64)),
        "different digests",
    ),
    ({}, (HostSpec(driver="packages"),), "holds the driver as a .run file, not as packages"),
    ({}, (HostSpec(repositories=(SITE,)), HostSpec(repositories=(OTHER_SITE,))), "two repositories have the name site"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "specs", "says"), REFUSED)
def test_what_can_not_be_is_a_wrong_call(options: dict[str, Any], specs: tuple[HostSpec, ...], says: str) -> None:
    with pytest.raises(GpuprovError) as caught:
        recipe(*specs, **options)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE


APT = {f"{row.id}-{row.version}": row for row in ROWS if row.package_manager == "apt"}


@pytest.mark.parametrize("row", APT.values(), ids=APT)
def test_every_release_of_debian_and_ubuntu_has_an_archive(row: Distribution) -> None:
    for architecture in ("x86_64", "aarch64"):
        lines = default_sources(row, architecture, MIRROR, PACKAGED)
        assert len(lines) == 3
        assert all("signed-by=/usr/share/keyrings/" in line for line in lines)
        assert sum("-security" in line for line in lines) == 1


def test_ubuntu_for_arm_is_on_the_ports_server() -> None:
    assert all(
        "ports.ubuntu.com" in line for line in default_sources(APT["ubuntu-22.04"], "aarch64", Mirror(), PACKAGED)
    )
    assert not any(
        "ports.ubuntu.com" in line for line in default_sources(APT["ubuntu-22.04"], "x86_64", Mirror(), PACKAGED)
    )


def test_debians_security_updates_are_beside_the_mirror_and_ubuntus_in_it() -> None:
    assert (MIRROR.archive, MIRROR.security) == (
        "http://mirror.example/debian",
        "http://mirror.example/debian-security",
    )
    assert mirror_at("https://m.example/ubuntu").security == "https://m.example/ubuntu"
    lines = default_sources(
        APT["debian-13"], "x86_64", Mirror("https://m.example/deb", "https://s.example/deb"), PACKAGED
    )
    assert [line.split()[2:4] for line in lines] == [
        ["https://m.example/deb", "trixie"],
        ["https://m.example/deb", "trixie-updates"],
        ["https://s.example/deb", "trixie-security"],
    ]


def test_sources_replace_the_mirror() -> None:
    assert recipe(mirror=Mirror(), sources=("deb https://m.example bookworm main",)).sources


INDEX_TARGETS = """\
http://d.example/debian/\tDebian\tbookworm
http://d.example/debian/\tDebian\tbookworm-updates
http://d.example/debian-security/\tDebian\tbookworm-security
https://download.example/linux/debian/\tDocker\tbookworm
"""


@pytest.mark.parametrize(
    ("distribution", "code", "found"),
    [
        ("debian", 0, Mirror("http://d.example/debian", "http://d.example/debian-security")),
        ("ubuntu", 0, Mirror()), ("debian", 100, Mirror()),
    ],
)  # fmt: skip
def test_the_machines_own_mirror(distribution: str, code: int, found: Mirror) -> None:
    class Apt(System):
        def run(self, argv: Sequence[str], **_: Any) -> Completed:
            assert argv[:2] == ("apt-get", "indextargets")
            return Completed(tuple(argv), code, INDEX_TARGETS, "")

    assert machine_mirror(Apt(), distribution) == found
