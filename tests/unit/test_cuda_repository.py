"""NVIDIA's CUDA repository by distribution: keys, packages, pins, streams; a driver from packages is proved."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from gpuprov.bundle.manifest import BundleFacts, BundlePackage, Manifest
from gpuprov.cdi.discover import DriverFacts
from gpuprov.core.changes import FileFact, WriteFile, tell_nobody
from gpuprov.core.system import System
from gpuprov.driver import cuda_repository, cuda_toolkit
from gpuprov.driver.packaged import (
    ChangeDriver,
    ChangeDriverPackages,
    ChangeDriverRpms,
    EnableStream,
    LoadDriver,
    foreign_removals,
)
from gpuprov.facts.driver import OTHER_PROFILE, PROFILE
from gpuprov.facts.host import HostFacts, gather
from gpuprov.machine.pci import PciGpu, gather_gpus
from gpuprov.packages.apt_changes import InstallPackages, RefreshPackageIndex
from gpuprov.packages.dnf import DNF
from gpuprov.packages.interface import PackageFacts
from gpuprov.packages.managers import Offers
from gpuprov.packages.rpm import RefreshRpmIndex
from gpuprov.plan.context import source_of
from gpuprov.plan.inputs import resolve
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.protocol.tables import PACKAGED
from tests import simgpu
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted

pytestmark = pytest.mark.root
B200, V100 = "2901", "1db4"


@pytest.fixture(scope="module")
def metal(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    """A bare machine with Debian 12: its own kernel, no driver."""
    facts = gather(FakeHost(tmp_path_factory.mktemp("host") / "root"))
    kernel = replace(facts.kernel, container="", takes_modules=True)
    return replace(facts, kernel=kernel, driver=DriverFacts())


def on(facts: HostFacts, distribution: str, version: str, manager: str, **changes: Any) -> HostFacts:
    os = replace(facts.os, id=distribution, version=version, name=f"{distribution} {version}", codename="")
    return replace(facts, os=os, packages=PackageFacts(manager, {}), **changes)


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver": "packages", **values})


def problems(facts: HostFacts, wanted: HostSpec) -> tuple[Problem, ...]:
    return (*cuda_repository.problems(facts, wanted), *source_of(facts, wanted).problems())


def with_branch(facts: HostFacts, wanted: HostSpec) -> HostSpec:
    installed = facts.driver_installed_version if facts.driver_packaged else ""
    return cuda_repository.with_branch(facts.distribution, facts.gpu_device_ids, installed, wanted, PACKAGED)


def repository(facts: HostFacts, wanted: HostSpec) -> tuple[str, str, str]:
    (one,) = cuda_repository.repositories(source_of(facts, wanted))
    return one.uri, one.key_url.rpartition("/")[2], one.key_fingerprint[-8:]


_BASE = "https://developer.download.nvidia.com/compute/cuda/repos"


@pytest.mark.parametrize(
    ("distribution", "version", "manager", "folder", "key", "fingerprint"),
    [
        ("debian", "12", "apt", "debian12", "3bf863cc.pub", "3BF863CC"),
        ("debian", "13", "apt", "debian13", "8793F200.pub", "8793F200"),
        ("ubuntu", "24.04", "apt", "ubuntu2404", "3bf863cc.pub", "3BF863CC"),
        ("rocky", "9.5", "dnf", "rhel9", "D42D0685.pub", "D42D0685"),
        ("sles", "15.6", "zypper", "sles15", "D42D0685.pub", "D42D0685"),
        # Folders since 2025 have keys of their own.
        ("ubuntu", "26.04", "apt", "ubuntu2604", "60DF8A40.pub", "60DF8A40"),
        ("opensuse-leap", "16.0", "zypper", "suse16", "3A8B5622.pub", "3A8B5622"),
    ],
)
def test_each_distribution_has_its_repository_and_key(
    metal: HostFacts, distribution: str, version: str, manager: str, folder: str, key: str, fingerprint: str
) -> None:
    facts = on(metal, distribution, version, manager)
    assert repository(facts, spec()) == (f"{_BASE}/{folder}/x86_64/", key, fingerprint)
    assert repository(replace(facts, architecture="aarch64"), spec())[0] == f"{_BASE}/{folder}/sbsa/"


def test_a_key_whose_fingerprint_nobody_knows_is_the_users_to_give(metal: HostFacts) -> None:
    rocky = on(metal, "rocky", "10.0", "dnf")
    (problem,) = problems(rocky, spec())
    assert "rhel10/x86_64/CDF6BA43.pub" in problem.evidence and "gpuprov_cuda_key_fingerprint" in problem.next_step
    given = spec(cuda_key_fingerprint="A" * 40)
    assert problems(rocky, given) == ()
    assert repository(rocky, given) == (f"{_BASE}/rhel10/x86_64/", "CDF6BA43.pub", "A" * 8)


@pytest.mark.parametrize(
    ("distribution", "version", "file"),
    [("rhel", "10.1", "CDF6BA43.pub"), ("fedora", "43", "1940C73E.pub"), ("fedora", "45", ""), ("fedora", "51", "")],
)
def test_no_key_of_another_release_stands_in(metal: HostFacts, distribution: str, version: str, file: str) -> None:
    facts = on(metal, distribution, version, "dnf")
    problem = problems(facts, spec())[0]
    assert "does not know the fingerprint" in problem.what
    assert (file or "the .pub file that lies there") in problem.evidence
    assert "gpg --show-keys" in problem.next_step and "gpuprov_cuda_key_fingerprint" in problem.next_step
    assert repository(facts, spec())[2] == ""
    # NVIDIA names a key's file by the end of its fingerprint.
    own = spec(cuda_key_fingerprint=f"{'A' * 32}12345678")
    assert repository(facts, own)[1:] == (file or "12345678.pub", "12345678")
    assert not any("fingerprint" in one.what for one in problems(facts, own))


def test_where_there_is_no_repository_for_arm_it_is_said(metal: HostFacts) -> None:
    leap = replace(on(metal, "opensuse-leap", "15.6", "zypper"), architecture="aarch64")
    assert cuda_repository.repositories(source_of(leap, spec())) == ()
    assert "no CUDA repository for openSUSE Leap 15 on aarch64" in problems(leap, spec())[0].what


def test_a_mirror_with_a_key_of_its_own(metal: HostFacts) -> None:
    mirrored = spec(cuda_repository="http://mirror.example/cuda", cuda_key_fingerprint="A" * 40)
    assert repository(metal, mirrored) == ("http://mirror.example/cuda/debian12/x86_64/", "3bf863cc.pub", "A" * 8)


def test_without_a_wish_for_it_there_is_no_repository_of_nvidias(metal: HostFacts) -> None:
    plain = parse_spec({"driver_version": "580"})
    assert cuda_repository.repositories(source_of(metal, plain)) == ()
    assert source_of(metal, plain).packages() == ()
    assert not any(isinstance(one, LoadDriver) for one in source_of(metal, plain).plan())


@pytest.mark.parametrize(
    ("devices", "values", "names"),
    [
        ((), {}, ("nvidia-open",)),
        ((B200,), {}, ("nvidia-open",)),
        ((V100,), {"driver_version": "580"}, ("cuda-drivers",)),
        ((), {"kernel_module_type": "proprietary"}, ("cuda-drivers",)),
        ((), {"cuda": "12.4"}, ("nvidia-open", "cuda-toolkit-12-4")),
    ],
)
def test_the_driver_is_that_which_the_gpus_need(
    metal: HostFacts, devices: tuple[str, ...], values: dict[str, Any], names: tuple[str, ...]
) -> None:
    gpus = tuple(PciGpu("0000:01:00.0", device) for device in devices) or metal.gpus
    asked = spec(**values)
    packages = source_of(replace(metal, gpus=gpus), asked).packages()
    assert (*packages, *cuda_toolkit.toolkit_packages(asked)) == names


def test_apt_is_pinned_before_the_driver_comes(metal: HostFacts) -> None:
    plan = make_plan(metal, spec(driver_version="580"))
    installs = [item.change.names for item in plan.changes if isinstance(item.change, InstallPackages)]
    assert installs[0] == ("nvidia-driver-pinning-580",)
    assert "nvidia-open" in installs[1] and "dkms" in installs[1]
    assert isinstance(next(item.change for item in plan.changes if item.step == "driver"), LoadDriver)


@pytest.mark.parametrize(
    ("current", "values", "stream"),
    [
        ("", {}, "open-dkms"),
        ("", {"driver_version": "580"}, "580-open"),
        ("", {"kernel_module_type": "proprietary"}, "latest-dkms"),
        ("open-dkms", {"driver_version": "580", "kernel_module_type": "proprietary"}, "580-dkms"),
    ],
)
def test_dnf_has_streams(metal: HostFacts, current: str, values: dict[str, Any], stream: str) -> None:
    file = FileFact(f"[nvidia-driver]\nname=nvidia-driver\nstream={current}\nstate=enabled\n".encode(), 0o644, 0, 0)
    facts = on(metal, "rocky", "9.5", "dnf", files={cuda_repository.STREAM_FILE: file} if current else {})
    assert source_of(facts, spec(**values)).plan_preparation() == (EnableStream(stream, current),)
    there = replace(facts, files={cuda_repository.STREAM_FILE: replace(file, content=f"stream={stream}\n".encode())})
    assert source_of(there, spec(**values)).plan_preparation() == ()


@pytest.mark.parametrize(
    ("change", "values", "says"),
    [
        (lambda one: one, {}, ""),
        (lambda one: replace(one, kernel=replace(one.kernel, container="lxc")), {}, "kernel is not its own"),
        (lambda one: replace(one, driver=DriverFacts(library_version="535.1")), {}, "comes from a .run"),
        (lambda one: on(one, "fedora", "42", "dnf"), {"driver_version": "580"}, "a driver version can't be asked for"),
        (lambda one: on(one, "opensuse-tumbleweed", "2026", "zypper"), {}, "no CUDA repository for openSUSE"),
        (
            lambda one: replace(one, gpus=(PciGpu("0000:01:00.0", V100),)), {"driver_version": "590"},
            "no longer serves this host's Volta GPU",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(
    metal: HostFacts, change: Callable[[HostFacts], HostFacts], values: dict[str, Any], says: str
) -> None:
    found = problems(change(metal), spec(**values))
    assert says in (found[0].what if found else "")
    assert bool(found) is bool(says)


def packaged(facts: HostFacts, version: str, *, manager: str = "apt", **more: str) -> HostFacts:
    """Return a host that has NVIDIA's open driver of a version from packages, and runs it."""
    names = {"nvidia-open": f"{version}-1", **more}
    return replace(
        facts, packages=replace(facts.packages, manager=manager, installed={**facts.packages.installed, **names}),
        driver=DriverFacts(kernel_version=version, library_version=version), driver_packaged="nvidia-open",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("installed", "wanted", "changes"),
    [
        ("570.172.08", "", False),
        ("570.172.08", "570", False),
        ("570.172.08", "570.172.08", False),
        ("570.172.08", "570.172", False),
        ("570.172.08", "580", True),
        ("580.65.06", "570", True),
        ("580.65.06", "580.82.07", True),
    ],
)
def test_another_version_changes_the_packages(metal: HostFacts, installed: str, wanted: str, changes: bool) -> None:
    found = source_of(packaged(metal, installed), spec(driver_version=wanted)).plan_other_version()
    assert [type(one) for one in found] == [RefreshPackageIndex, ChangeDriverPackages] * changes


def test_a_stream_is_a_branch_whatever_version_of_it_is_asked_for(metal: HostFacts) -> None:
    facts = on(packaged(metal, "580.65.06"), "rocky", "9.5", "dnf")
    facts = replace(facts, packages=replace(facts.packages, installed={"nvidia-open": "3:580.65.06-1"}))
    assert source_of(facts, spec(driver_version="580.82.07")).plan_other_version() == ()
    _, change = source_of(facts, spec(driver_version="570")).plan_other_version()
    assert change == ChangeDriverRpms(DNF, ("nvidia-open",), wanted="570")


@pytest.mark.parametrize("manager", ["apt", "dnf"])
@pytest.mark.parametrize(("upgrade", "wanted"), [(True, "580.82.07"), (False, "")])
def test_upgrade_takes_newest_release_of_the_branch(metal: HostFacts, manager: str, upgrade: bool, wanted: str) -> None:
    facts = packaged(metal, "580.65.06", **{"libnvidia-compute": "580.65.06-1"})
    facts = on(facts, "rocky", "9.5", "dnf") if manager == "dnf" else facts
    end = "-1.el9.x86_64" if manager == "dnf" else "-1"
    names = ("nvidia-open", "libnvidia-compute")
    facts = replace(facts, packages=replace(facts.packages, installed=dict.fromkeys(names, f"580.65.06{end}")))
    found = tuple(f"{version}{end}" for version in ("580.65.06", "580.82.07", "590.44.01"))
    facts = replace(facts, upgrade=upgrade, offers=Offers(manager, dict.fromkeys(names, found)))
    source = source_of(facts, spec(driver_version="580"))
    assert ({*names} <= {*source.questions()}) is upgrade
    changes = [one for one in source.plan_other_version() if isinstance(one, ChangeDriver)]
    assert [one.wanted for one in changes] == [wanted] * upgrade
    asked = names if manager == "dnf" else tuple(f"{name}=580.82.07-1" for name in names)
    assert [one.names for one in changes] == [asked] * upgrade
    newest = replace(facts, packages=replace(facts.packages, installed=dict.fromkeys(names, f"580.82.07{end}")))
    assert source_of(newest, spec(driver_version="580")).plan_other_version() == ()


def test_an_upgrade_from_a_bundle_asks_no_repository(metal: HostFacts) -> None:
    held = (BundlePackage("nvidia-open", "3:580.82.07-1.el9", "x86_64", "a.rpm"),)
    manifest = Manifest("rocky", "9", "x86_64", "1", packages=held)
    facts = on(packaged(metal, "580.65.06"), "rocky", "9.5", "dnf", upgrade=True, bundle=BundleFacts(manifest))
    facts = replace(facts, packages=replace(facts.packages, installed={"nvidia-open": "3:580.65.06-1.el9.x86_64"}))
    changes = source_of(facts, spec(driver_version="580")).plan_other_version()
    assert [(type(one), getattr(one, "options", ())) for one in changes] == [
        (RefreshRpmIndex, DNF.bundle_options),
        (ChangeDriverRpms, DNF.bundle_options),
    ]


@pytest.mark.parametrize("upgrade", [True, False])
def test_an_upgrade_says_where_it_can_take_no_newer_release(metal: HostFacts, upgrade: bool) -> None:
    facts = on(packaged(metal, "580.65.06"), "opensuse-leap", "15.6", "zypper", upgrade=upgrade)
    facts = replace(facts, packages=replace(facts.packages, installed={"nvidia-open": "580.65.06-1.x86_64"}))
    source = source_of(facts, spec())
    assert source.plan_other_version() == ()
    assert ("zypper can't be told a release; gpuprov install -e " in source.note()) is upgrade


def test_a_driver_that_is_yet_to_come_is_not_changed(metal: HostFacts) -> None:
    assert source_of(metal, spec(driver_version="580")).plan_other_version() == ()


def test_a_pin_takes_the_place_of_another(metal: HostFacts) -> None:
    facts = packaged(metal, "570.172.08", **{"nvidia-driver-pinning-570": "570-1"})
    refresh, change = source_of(facts, spec(driver_version="580")).plan_preparation()
    assert isinstance(refresh, RefreshPackageIndex)
    assert change.summary() == "install nvidia-driver-pinning-580 instead of nvidia-driver-pinning-570"


def test_apt_may_take_away_packages_of_the_driver_alone() -> None:
    said = """\
Remv libnvidia-compute-570 [570.172.08-1]
Remv libcuda1 [570.172.08-1]
Remv xserver-xorg-video-nvidia-570 [570.172.08-1]
Remv libnvjpeg-12-4 [12.4.1]
Remv nvidia-container-toolkit [1.17.8-1]
Remv pytorch [2.0]
Inst nvidia-open [570.172.08-1] (580.65.06-1 cuda [amd64])
"""
    assert foreign_removals(said) == ("libnvjpeg-12-4", "nvidia-container-toolkit", "pytorch")


def test_a_driver_that_is_there_and_loaded_is_left_alone(metal: HostFacts) -> None:
    driver = DriverFacts(kernel_version="580.1", library_version="580.1")
    assert source_of(replace(metal, driver=driver), spec()).plan() == ()
    assert source_of(replace(metal, driver=replace(driver, kernel_version="")), spec()).plan() == (LoadDriver(),)


def test_the_toolkits_programs_are_on_the_path(metal: HostFacts) -> None:
    (change,) = cuda_toolkit.plan_profile(metal, spec(cuda="12.4"))
    assert b"/usr/local/cuda/bin" in change.content  # type: ignore[attr-defined]
    ours = FileFact(change.content, 0o644, 0, 0)  # type: ignore[attr-defined]
    assert cuda_toolkit.plan_profile(replace(metal, files={PROFILE: ours}), spec(cuda="12.4")) == ()
    assert cuda_toolkit.plan_profile(metal, spec()) == ()


def test_a_profile_that_somebody_else_wrote_stays(metal: HostFacts) -> None:
    files = {PROFILE: FileFact(b"export CUDA_HOME=/opt/cuda\n", 0o644, 0, 0)}
    (change,) = cuda_toolkit.plan_profile(replace(metal, files=files), spec(cuda="12.4"))
    assert isinstance(change, WriteFile)
    assert change.path == OTHER_PROFILE
    files[OTHER_PROFILE] = FileFact(change.content, 0o644, 0, 0)
    assert cuda_toolkit.plan_profile(replace(metal, files=files), spec(cuda="12.4")) == ()


LOG = (
    "1 nvidia: old",
    "2 NVRM: not called",
    "3 usb 1-1: new device",
    "4 nvidia: a",
    "5 NVIDIA: b",
    "6 nvidia: refused",
)


class Loading(Scripted):
    """A machine whose modprobe loads what it is told to, or refuses."""

    which = System.which

    def __init__(self, root: Path, loads: str = "", refuses: str = "") -> None:
        super().__init__(root)
        self.loads, self.refuses = loads, refuses

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if argv == ("dmesg",):
            return "".join(f"{line}\n" for line in LOG)
        assert argv[0] == "modprobe"
        if argv[1] == self.refuses:
            return 1, "", "modprobe: ERROR: could not insert 'nvidia': No such device"
        simgpu.write_kernel_tree(self.root, 1, self.loads)
        return ""


def test_loading_is_proved_by_the_kernels_own_word(tmp_path: Path) -> None:
    simgpu.install_tree(tmp_path)
    (tmp_path / "lib").symlink_to("usr/lib")
    host = Loading(tmp_path, "550.163.01")
    LoadDriver().apply(host, lambda *_: None)
    assert host.asked == [("modprobe", "nvidia"), ("modprobe", "nvidia-uvm")]
    problem = refused(LoadDriver().apply, Loading(tmp_path, "535.261.03"), tell_nobody)
    assert problem.what == "the loaded driver is 535.261.03, its libraries are 550.163.01"
    assert problem.evidence == "/proc/driver/nvidia/version" and problem.next_step.startswith("reboot")


def test_a_refusal_comes_with_what_the_kernel_says(tmp_path: Path) -> None:
    host = Loading(tmp_path, refuses="nvidia")
    problem = refused(LoadDriver().apply, host, tell_nobody)
    assert problem.what == "the kernel module nvidia can't be loaded" and "lspci -k -d 10de:" in problem.next_step
    (*said, _, _, _, _) = found = problem.evidence.splitlines()
    assert "No such device" in said[-1] and found[-4:] == [LOG[number] for number in (1, 3, 4, 5)]
    assert len(host.asked) == 2 and all(host.timeouts)


_VOLTA, _KEPLER = PciGpu("0000:01:00.0", "1db4"), PciGpu("0000:01:00.0", "102d")


def test_packages_without_a_version_are_of_a_branch_that_serves_the_gpus(metal: HostFacts) -> None:
    """cuda-drivers is of the newest branch, which no longer serves Volta."""
    volta = replace(metal, gpus=(_VOLTA,))
    found = with_branch(volta, spec())
    assert found.driver_version == "580"
    assert source_of(metal, found).pin_packages() == ("nvidia-driver-pinning-580",)
    assert problems(volta, found) == ()
    assert with_branch(metal, spec()) == spec()
    assert with_branch(volta, spec(driver_version="570")).driver_version == "570"
    rocky = on(volta, "rocky", "9.5", "dnf")
    assert source_of(rocky, with_branch(rocky, spec())).plan_preparation() == (EnableStream("580-dkms"),)
    # What is there of an earlier branch stays with it; what is of a later one does not.
    for version, branch in (("570.211.01", "570"), ("590.48.01", "580")):
        driver = DriverFacts(kernel_version=version, library_version=version)
        there = replace(volta, driver=driver, driver_packaged="cuda-drivers")
        kept = with_branch(there, spec())
        assert kept.driver_version == branch
        assert problems(there, kept) == ()


@pytest.mark.parametrize(
    ("gpu", "distribution", "release"),
    [(_VOLTA, ("fedora", "44", "dnf"), PACKAGED.resolved("580")), (_KEPLER, ("debian", "12", "apt"), "470.256.02")],
)
def test_gpus_without_package(metal: HostFacts, gpu: PciGpu, distribution: tuple[str, str, str], release: str) -> None:
    facts = on(replace(metal, gpus=(gpu,)), *distribution)
    assert with_branch(facts, spec()) == spec()
    (problem,) = problems(facts, spec())
    assert "have no driver that serves this host's GPUs" in problem.what
    assert f'gpuprov_driver: runfile and gpuprov_driver_version: "{release}"' in problem.next_step


@pytest.mark.parametrize(("device", "branch"), [("1db4", "580"), ("2330", "")])
def test_a_run_resolves_the_branch_once_for_the_gpus_that_it_finds(tmp_path: Path, device: str, branch: str) -> None:
    host = FakeHost(tmp_path / "host", gpus=1)
    (gpu,) = gather_gpus(host)
    (tmp_path / f"host/sys/bus/pci/devices/{gpu.bus_id}/device").write_text(f"0x{device}\n")
    assert resolve(host, spec(), None) == spec(driver_version=branch)
