"""`gpuprov_driver: distribution`: which packages each distribution's host gets, and why one gets none."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpuprov.bundle.manifest import BundleFacts, BundlePackage
from gpuprov.cdi.discover import DriverFacts
from gpuprov.core.changes import FileFact, RemoveFile, WriteFile
from gpuprov.driver import distribution, fabric_manager, kernel, precompiled
from gpuprov.driver.packaged import LoadDriver, SwitchBranch
from gpuprov.facts.gpus import FabricFacts
from gpuprov.facts.host import PREFERENCES, HostFacts, gather
from gpuprov.machine.distros import OWN_DRIVERS, find_distribution
from gpuprov.machine.pci import PciGpu
from gpuprov.packages.apt_changes import InstallPackages
from gpuprov.packages.interface import PackageFacts
from gpuprov.packages.managers import Offers
from gpuprov.packages.rpm import InstallRpmPackages
from gpuprov.packages.sources import COMPONENTS_PATH as COMPONENTS
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.plan.preflight import preflight, security_warnings
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.spec import HostSpec, parse_spec
from tests.unit.bundle.test_rpm import MANIFEST
from tests.unit.fake_host import FakeHost

pytestmark = pytest.mark.root
_UBUNTU_KERNEL, _SLES_KERNEL = "6.8.0-31-generic", "6.4.0-150600.23.7-default"
_H100, _V100, _B200, _GH200, _K80 = "2330", "1db4", "2901", "2342", "102d"
_CODENAMES = {"11": "bullseye", "12": "bookworm", "13": "trixie", "22.04": "jammy", "24.04": "noble"}
_COMPONENTS = "contrib non-free non-free-firmware restricted multiverse universe"


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    """A system container."""
    return gather(FakeHost(tmp_path_factory.mktemp("host") / "root"))


def host(
    facts: HostFacts, name: str, *, gpus: Iterable[str] = (_H100,), installed: Mapping[str, str] | None = None,
    release: str = "6.1.0-13-amd64", components: str = "", **more: Any,
) -> HostFacts:  # fmt: skip
    """Return a bare machine of a distribution such as `debian 13`, without a driver, with its archive as a source."""
    id_, _, version = name.partition(" ")
    codename = _CODENAMES.get(version, "")
    os = replace(facts.os, id=id_, version=version, name=name, codename=codename)
    row = find_distribution(id_, version)
    running = replace(facts.kernel, release=release, container="", takes_modules=True)
    source = FileFact(f"deb http://mirror.example {codename} main {components}\n".encode(), 0o644, 0, 0)
    values = {
        "os": os, "kernel": running, "driver": DriverFacts(), "offers": None,
        "packages": PackageFacts(row.package_manager if row else "", {"docker.io": "1", **(installed or {})}),
        "gpus": tuple(PciGpu(f"0000:0{number}:00.0", one) for number, one in enumerate(gpus)),
        "files": {"/etc/apt/sources.list": source},
    }  # fmt: skip
    return replace(facts, **{**values, **more})


def ubuntu(facts: HostFacts, *offered: str, **more: Any) -> HostFacts:
    found = host(facts, "ubuntu 24.04", release=_UBUNTU_KERNEL, **more)
    return offering(found, dict.fromkeys(offered, "580.178.04-0ubuntu0.24.04.1")) if offered else found


def offering(facts: HostFacts, found: Mapping[str, str]) -> HostFacts:
    versions = {name: tuple(version.split()) for name, version in found.items()}
    return replace(facts, offers=Offers(facts.packages.manager, versions))


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver": "distribution", **values})


def problem(facts: HostFacts, wanted: HostSpec) -> str:
    (found,) = preflight(PlanContext(facts, wanted))
    return f"{found.what} | {found.evidence} | {found.next_step}"


_DEBIAN = (
    "libcuda1", "nvidia-smi", "nvidia-persistenced", "libnvcuvid1", "libnvidia-encode1", "libnvidia-opticalflow1",
    "libnvidia-cfg1", "nvidia-opencl-icd",
)  # fmt: skip
_TESLA_535 = (
    "libnvidia-tesla-535-cuda1", "nvidia-tesla-535-smi", "nvidia-persistenced", "libnvidia-tesla-535-nvcuvid1",
    "libnvidia-tesla-535-encode1", "libnvidia-tesla-535-opticalflow1", "libnvidia-tesla-535-cfg1",
    "nvidia-tesla-535-opencl-icd",
)  # fmt: skip
_UBUNTU_580 = (
    "libnvidia-compute-580-server", "nvidia-utils-580-server", "nvidia-compute-utils-580-server",
    "libnvidia-decode-580-server", "libnvidia-encode-580-server",
)  # fmt: skip
_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "11": ("debian 11", {}, {}, (*_DEBIAN, "nvidia-kernel-dkms")),
    "12": ("debian 12", {}, {}, (*_DEBIAN, "nvidia-kernel-dkms")),
    "13": ("debian 13", {}, {}, (*_DEBIAN, "nvidia-kernel-dkms")),
    "13, V100": ("debian 13", {"gpus": (_V100,)}, {}, (*_DEBIAN, "nvidia-kernel-dkms")),
    "13, open": ("debian 13", {}, {"kernel_module_type": "open"}, (*_DEBIAN, "nvidia-open-kernel-dkms")),
    "13, 535": ("debian 13", {}, {"driver_version": "535"}, (*_TESLA_535, "nvidia-tesla-535-kernel-dkms")),
    "24.04": ("ubuntu 24.04", {}, {}, (*_UBUNTU_580, "nvidia-headless-580-server-open")),
    "24.04, V100": ("ubuntu 24.04", {"gpus": (_V100,)}, {}, (*_UBUNTU_580, "nvidia-headless-580-server")),
    "2023": ("amzn 2023", {}, {}, ("nvidia-driver-cuda", "nvidia-persistenced", "kmod-nvidia-open-dkms")),
    "2023, V100": (
        "amzn 2023", {"gpus": (_V100,)}, {}, ("nvidia-driver-cuda", "nvidia-persistenced", "kmod-nvidia-latest-dkms"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _ROWS)
def test_each_row_has_its_packages(some: HostFacts, name: str) -> None:
    where, facts, values, packages = _ROWS[name]
    machine, wanted = host(some, where, **facts), spec(**values)
    assert source_of(machine, wanted).packages() == packages
    assert kernel.headers(source_of(machine, wanted)) != ()
    assert [type(one) for one in source_of(machine, wanted).plan()] == [LoadDriver]


def test_a_branch_that_ubuntu_has_besides_those_of_the_table_is_asked_for_by_number(some: HostFacts) -> None:
    machine, wanted = ubuntu(some), spec(driver_version="595")
    assert source_of(machine, wanted).packages()[0] == "libnvidia-compute-595-server"
    assert kernel.questions(source_of(machine, wanted))[0] == "libnvidia-compute-595-server"
    none = ubuntu(some, "linux-headers-6.8.0-31-generic")
    assert "has branch 595" in problem(none, wanted)


def test_a_debian_host_gets_its_archives_components_and_the_driver_in_one_plan(some: HostFacts) -> None:
    machine, wanted = host(some, "debian 13"), spec()
    plan = make_plan(machine, wanted)
    assert plan.problems == ()
    changes = [one.change for one in plan.changes]
    written = {one.path: one.content.decode() for one in changes if isinstance(one, WriteFile)}
    assert "Components: contrib non-free non-free-firmware\n" in written[COMPONENTS]
    assert "Pin: release o=NVIDIA\nPin-Priority: -1\n" in written[PREFERENCES]
    (installation,) = (one for one in changes if isinstance(one, InstallPackages))
    assert {*_DEBIAN, "nvidia-kernel-dkms", "dkms", "linux-headers-6.1.0-13-amd64"} <= {*installation.names}
    order = [type(one) for one in changes]
    assert order.index(InstallPackages) < order.index(LoadDriver)


def test_what_was_written_for_it_goes_when_another_driver_is_asked_for(some: HostFacts) -> None:
    there = {path: FileFact(b"", 0o644, 0, 0) for path in (COMPONENTS, PREFERENCES)}
    changes = make_plan(host(some, "debian 13", files=there), parse_spec({"driver_version": "580"})).changes
    assert {one.change.path for one in changes if isinstance(one.change, RemoveFile)} == {COMPONENTS, PREFERENCES}


@pytest.mark.parametrize(
    ("where", "gpus", "values", "said"),
    [
        ("rocky 9", (_H100,), {}, "these have one: Debian 11, 12, 13"),
        ("fedora 42", (_H100,), {}, "Fedora 42 has no NVIDIA driver of its own"),
        ("debian 13", (_H100,), {"driver_version": "580"}, "it has the branches 550, 535"),
        ("debian 13", (_H100,), {"driver_version": "550.163.01"}, "the version within a branch is the distribution's"),
        ("amzn 2023", (_H100,), {"driver_version": "580"}, "leave gpuprov_driver_version out"),
        ("debian 13", (_B200,), {}, 'set gpuprov_driver: runfile and gpuprov_driver_version: "580"'),
        ("debian 13", (_K80,), {}, 'set gpuprov_driver: runfile and gpuprov_driver_version: "470"'),
        ("debian 11", (_H100,), {"kernel_module_type": "open"}, "no open kernel modules of its branch 535"),
        ("debian 13", (_H100,), {"kernel_modules": "precompiled"}, "Debian 13 has no compiled kernel modules"),
    ],
)
def test_what_is_refused(some: HostFacts, where: str, gpus: tuple[str, ...], values: dict[str, Any], said: str) -> None:
    assert said in problem(host(some, where, gpus=gpus), spec(**values))


def test_an_old_gpu_gets_the_branch_that_still_serves_it(some: HostFacts) -> None:
    machine = host(some, "debian 12", gpus=(_K80,))
    assert source_of(machine, spec()).packages()[-1] == "nvidia-tesla-470-kernel-dkms"


def test_arm_is_refused_where_the_distribution_has_no_driver_for_it(some: HostFacts) -> None:
    assert "Amazon Linux 2023 on aarch64 has no" in problem(host(some, "amzn 2023", architecture="aarch64"), spec())
    assert source_of(host(some, "debian 13", architecture="aarch64"), spec()).packages() != ()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"installed": {"nvidia-open": "580.95.05-1"}}, "comes from NVIDIA's packages"),
        ({"driver": DriverFacts(library_version="580.95.05"), "driver_packaged": ""}, "comes from a .run"),
        ({"files": {}}, "no source of this host is Debian 13's own archive"),
    ],
)
def test_what_lies_on_the_host_already_is_not_overwritten(some: HostFacts, more: dict[str, Any], said: str) -> None:
    assert said in problem(host(some, "debian 13", **more), spec())


def test_modules_and_libraries_of_different_versions_are_told_before_anything_is_changed(some: HostFacts) -> None:
    """Debian 12's security archive has the proprietary modules of 535.309.01, and the open ones stay at 535.261.03."""
    offered = {"libcuda1": "535.309.01-0+deb12u1 535.261.03-1", "nvidia-open-kernel-dkms": "535.261.03-1"}
    machine = offering(host(some, "debian 12"), {**offered, "linux-headers-6.1.0-13-amd64": "6.1"})
    said = problem(machine, spec(kernel_module_type="open"))
    assert "nvidia-open-kernel-dkms 535.261.03, libcuda1 535.309.01" in said
    assert "leave gpuprov_kernel_module_type out" in said
    needs_open = replace(machine, gpus=(PciGpu("0000:00:00.0", _GH200),))
    assert problem(needs_open, spec()).endswith("| set gpuprov_driver: runfile")
    whole = offering(machine, {**offered, "nvidia-kernel-dkms": "535.309.01-0+deb12u1"})
    assert source_of(whole, spec()).problems() == ()


def test_the_version_that_would_come_is_held_against_the_advisories(some: HostFacts) -> None:
    offered = {"libcuda1": "550.163.01-2", "nvidia-kernel-dkms": "550.163.01-2", "linux-headers-6.1.0-13-amd64": "6.1"}
    machine = offering(host(some, "debian 13"), offered)
    assert any(one.startswith("driver 550.163.01") for one in security_warnings(source_of(machine, spec())))
    said = problem(machine, spec(refuse_advisories="high"))
    assert "driver 550.163.01 is refused" in said and "gpuprov_driver: runfile" in said


def test_a_bundle_says_what_would_come_as_repositories_do(some: HostFacts) -> None:
    held = (BundlePackage("libcuda1", "550.163.01-2", "amd64", "libcuda1.deb"),)
    manifest = replace(MANIFEST, distribution="debian", version="13", packages=held)
    machine = host(some, "debian 13", bundle=BundleFacts(manifest))
    assert source_of(machine, spec()).coming_version == "550.163.01"
    assert any(one.startswith("driver 550.163.01") for one in security_warnings(source_of(machine, spec())))
    assert kernel.questions(source_of(machine, spec())) == ()
    inside = replace(machine, kernel=some.kernel, driver=DriverFacts(kernel_version="555.58.02"))
    assert "runs 555.58.02: the two must match" in source_of(inside, spec()).problems()[0].what


# -- modules that the distribution has compiled ------------------------------------------------------------------------

_MODULES = "linux-modules-nvidia-580-server-open"


def test_ubuntus_compiled_modules_of_the_running_kernel_are_taken_and_nothing_is_built(some: HostFacts) -> None:
    images = {"linux-image-generic": "1", "linux-image-virtual": "1"}
    bare = ubuntu(some, installed=images)
    asked = kernel.questions(source_of(bare, spec()))
    assert {f"{_MODULES}-{_UBUNTU_KERNEL}", f"{_MODULES}-generic", f"{_MODULES}-virtual"} < {*asked}
    offered = (f"{_MODULES}-{_UBUNTU_KERNEL}", f"{_MODULES}-generic", "libnvidia-compute-580-server")
    machine = ubuntu(some, *offered, installed=images)
    assert source_of(machine, spec()).packages() == (
        *_UBUNTU_580, f"{_MODULES}-{_UBUNTU_KERNEL}", "nvidia-headless-no-dkms-580-server-open", f"{_MODULES}-generic",
    )  # fmt: skip
    assert kernel.packages(source_of(machine, spec())) == ()
    assert "nvidia-headless-580-server-open" in source_of(machine, spec(kernel_modules="build")).packages()
    assert kernel.headers(source_of(machine, spec(kernel_modules="build"))) != ()


def test_secure_boot_takes_what_the_distribution_has_signed_and_nothing_else(some: HostFacts) -> None:
    machine = ubuntu(some, f"{_MODULES}-{_UBUNTU_KERNEL}", "libnvidia-compute-580-server")
    secure = replace(machine, kernel=replace(machine.kernel, secure_boot="enabled"))
    assert kernel.problems(source_of(secure, spec())) == ()
    (built,) = kernel.problems(source_of(secure, spec(kernel_modules="build")))
    assert "nobody has signed" in built.what


def test_a_kernel_without_compiled_modules_is_refused_where_they_are_asked_for_or_in_use(some: HostFacts) -> None:
    headers = (f"linux-headers-{_UBUNTU_KERNEL}", "libnvidia-compute-580-server", "nvidia-headless-580-server-open")
    machine = ubuntu(some, *headers)
    assert source_of(machine, spec()).packages()[-1] == "nvidia-headless-580-server-open"
    assert f"looked for {_MODULES}-{_UBUNTU_KERNEL}" in problem(machine, spec(kernel_modules="precompiled"))
    older = {f"{_MODULES}-6.8.0-30-generic": "1", **dict.fromkeys(_UBUNTU_580, "580.95.05-1")}
    in_use = ubuntu(some, *headers, installed=older)
    assert f"looked for {_MODULES}-{_UBUNTU_KERNEL}" in problem(in_use, spec())
    assert precompiled.module_package(older, _UBUNTU_KERNEL) == f"{_MODULES}-{_UBUNTU_KERNEL}"


def test_suse_has_the_modules_alone_and_nvidias_repository_the_rest(some: HostFacts) -> None:
    machine = host(some, "sles 15.6", release=_SLES_KERNEL)
    wanted = distribution.as_packages(machine.distribution, spec())
    assert wanted == replace(spec(), driver="packages", kernel_modules="precompiled")
    module = "nvidia-open-driver-G06-signed-cuda-kmp-default"
    assert module in kernel.questions(source_of(machine, wanted))
    versions = dict.fromkeys(("nv-prefer-signed-open-driver", "nvidia-compute-utils-G06"), "580.178.04-1.x86_64")
    offered = offering(machine, {**versions, module: "580.178.04_k6.4.0_150600.21-1.x86_64"})
    changes = [one.change for one in make_plan(offered, wanted).changes]
    (installation,) = (one for one in changes if isinstance(one, InstallRpmPackages))
    assert f"{module}=580.178.04_k6.4.0_150600.21" in installation.names
    assert distribution.as_packages(host(some, "debian 13").distribution, spec()) == spec()


def test_amazons_repository_comes_by_a_package_before_the_driver(some: HostFacts) -> None:
    machine = host(some, "amzn 2023", release="6.1.1-1.amzn2023.x86_64")
    changes = [one.change for one in make_plan(machine, spec()).changes if isinstance(one.change, InstallRpmPackages)]
    assert changes[0].names == ("nvidia-release",)
    assert {"nvidia-driver-cuda", "kmod-nvidia-open-dkms"} <= {*changes[1].names}


# -- a system container, another branch, NVSwitches -------------------------------------------------------------------


def test_a_system_container_gets_libraries_of_the_loaded_version_alone(some: HostFacts) -> None:
    inside = replace(host(some, "debian 13"), kernel=some.kernel, driver=DriverFacts(kernel_version="550.163.01"))
    assert source_of(inside, spec()).packages() == _DEBIAN
    assert source_of(inside, spec()).plan() == ()
    assert kernel.questions(source_of(inside, spec())) == ("libcuda1",)
    assert preflight(PlanContext(offering(inside, {"libcuda1": "550.163.01-2"}), spec())) == ()
    said = problem(offering(inside, {"libcuda1": "555.58.02-1"}), spec())
    assert "the distribution's driver is 555.58.02, but the container host runs 550.163.01" in said
    branch = replace(inside, packages=PackageFacts("apt", dict.fromkeys(_DEBIAN, "550.163.01-2")))
    other = offering(branch, {"libnvidia-tesla-535-cuda1": "535.274.02-1"})
    assert "driver is 535.274.02, but the container host runs 550" in problem(other, spec(driver_version="535"))
    unloaded = replace(inside, driver=DriverFacts())
    assert "is not loaded on the container host" in problem(unloaded, spec())


def test_another_branch_takes_the_place_of_the_installed_one(some: HostFacts) -> None:
    there = dict.fromkeys((*_DEBIAN, "nvidia-kernel-dkms", "nvidia-alternative"), "550.163.01-2")
    machine = host(some, "debian 13", installed=there)
    _, change = source_of(machine, spec(driver_version="535")).plan_other_version()
    assert isinstance(change, SwitchBranch) and change.wanted == "535"
    assert change.names == (*_TESLA_535, "nvidia-tesla-535-kernel-dkms")
    # What both branches have stays.
    assert "nvidia-persistenced" not in change.instead
    assert {"nvidia-alternative", "nvidia-kernel-dkms"} < {*change.instead}
    assert "remove libcuda1" in change.summary()
    assert source_of(machine, spec(driver_version="535")).packages() == ()


def test_nvidias_packages_do_not_go_over_the_distributions(some: HostFacts) -> None:
    there = dict.fromkeys((*_DEBIAN, "nvidia-kernel-dkms"), "550.163.01-2")
    said = problem(host(some, "debian 13", installed=there), spec(driver="packages"))
    assert "the distribution's own" in said and "package libcuda1 is installed" in said
    nvidias = {**there, "libcuda1": "580.95.05-1", "nvidia-open": "580.95.05-1"}
    assert preflight(PlanContext(host(some, "debian 13", installed=nvidias), spec(driver="packages"))) == ()


def test_a_host_stays_with_its_branch_until_another_is_asked_for(some: HostFacts) -> None:
    there = dict.fromkeys((*_TESLA_535, "nvidia-tesla-535-kernel-dkms"), "535.274.02-1")
    machine = host(some, "debian 13", installed=there)
    assert source_of(machine, spec()).plan_other_version() == ()
    assert source_of(machine, spec()).packages()[0] == "libnvidia-tesla-535-cuda1"
    older = dict.fromkeys(("libnvidia-compute-535-server", "linux-modules-nvidia-535-server-6.8.0-30-generic"), "1")
    _, change = source_of(ubuntu(some, installed=older), spec(driver_version="580")).plan_other_version()
    assert isinstance(change, SwitchBranch) and change.instead == tuple(sorted(older))


def test_the_fabric_manager_comes_from_where_the_driver_does(some: HostFacts) -> None:
    switches = FabricFacts(("0000:05:00.0",))
    there = DriverFacts(kernel_version="580.178.04", library_version="580.178.04")
    machine = replace(ubuntu(some), fabric=switches, driver=there)
    assert fabric_manager.wanted_packages(source_of(machine, spec())) == ("nvidia-fabricmanager-580=580.178.04-*",)
    assert not fabric_manager.comes_from_repository(source_of(machine, spec()))
    debian = replace(host(some, "debian 13"), fabric=switches, driver=replace(there, library_version="550.163.01"))
    assert fabric_manager.wanted_packages(source_of(debian, spec())) == ("nvidia-fabricmanager-550=550.163.01-*",)
    assert fabric_manager.comes_from_repository(source_of(debian, spec()))


def test_every_row_is_one_of_the_table_of_distributions_and_names_its_source() -> None:
    for one in OWN_DRIVERS:
        row = find_distribution(one.id, one.version or "15")
        assert row is not None and one.source
        assert bool(one.components) == (row.package_manager == "apt")
        assert one.like_packages or one.branches
