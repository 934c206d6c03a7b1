"""What stops a run before it begins, and what each kind of machine gets planned: a table on facts, no machine."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.cdi.discover import DriverFacts
from gpuprov.core.changes import FileFact, RemoveFile, WriteFile
from gpuprov.core.system import System
from gpuprov.driver import kernel
from gpuprov.driver.packaged import InstallDriverPackages, InstallDriverRpms
from gpuprov.driver.run_files import INCOMPLETE_MARK, FetchRunfile
from gpuprov.driver_run import InstallDriver, RunFile
from gpuprov.engines.docker import DockerFacts
from gpuprov.engines.docker_change import ReconfigureDocker
from gpuprov.engines.known import EngineFacts
from gpuprov.engines.other_engines import ConfigureEngine
from gpuprov.facts.driver import GpuHolder, RunningDriver
from gpuprov.facts.host import HostFacts, gather
from gpuprov.machine.machine import gather_displays
from gpuprov.machine.pci import PciGpu
from gpuprov.packages.apt_changes import InstallPackages
from gpuprov.packages.dnf import DNF
from gpuprov.packages.interface import PackageFacts
from gpuprov.plan import software
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.plan.preflight import preflight
from gpuprov.plan.steps import make_plan
from gpuprov.plan.upgrades import upgrades
from gpuprov.protocol import tables
from gpuprov.protocol.advisories import TOOLKIT_PACKAGE
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.runtime_hook.deploy import NVIDIA_HOOK_PATH, render_hook
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from gpuprov.toolkit import HandOverHook, InstallRuntime
from tests.unit.fake_host import RELEASE, FakeHost

pytestmark = pytest.mark.root
VERSION = "550.163.01"


@pytest.fixture(scope="module")
def facts(debian: HostFacts) -> HostFacts:
    return debian


@pytest.fixture(scope="module")
def metal(facts: HostFacts) -> HostFacts:
    """A bare machine: its own kernel, no driver."""
    kernel = replace(facts.kernel, container="", takes_modules=True)
    return replace(facts, kernel=kernel, driver=DriverFacts())


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver_version": VERSION, **values})


def said(facts: HostFacts, wanted: HostSpec) -> str:
    return "\n".join(str(problem) for problem in preflight(PlanContext(facts, wanted)))


def planned(facts: HostFacts, wanted: HostSpec, kind: type[Any]) -> Any:
    return next((item.change for item in make_plan(facts, wanted).changes if isinstance(item.change, kind)), None)


def test_a_good_machine_has_no_problems(facts: HostFacts, metal: HostFacts) -> None:
    assert preflight(PlanContext(facts, spec())) == ()
    assert preflight(PlanContext(metal, spec())) == ()


BROKEN = DockerFacts(installed=True, config_text="{", active=True)
OLD_GPU = (PciGpu("0000:01:00.0", "1db4"),)
# What is otherwise on the host, what is asked for, and the words that are said.
IN_A_CONTAINER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no GPU": ({"gpus": ()}, {}, "no NVIDIA GPU"),
    "packages": ({"driver_packaged": "nvidia-driver"}, {}, "comes from packages"),
    "no version": ({}, {"driver_version": ""}, "which driver version"),
    "no driver": ({}, {"driver": "preinstalled", "driver_version": ""}, "no NVIDIA driver is installed"),
    "another driver": ({}, {"driver_version": "535.261.03"}, "the two must match"),
    "no docker": ({"docker": DockerFacts()}, {"docker": "preinstalled"}, "docker is not installed"),
    "no engine": ({"docker": DockerFacts()}, {"docker": "none"}, "no container engine on this host for gpuprov"),
    "snap": ({"docker": DockerFacts(snap=True)}, {}, "snap"),
    "daemon.json": ({"docker": replace(BROKEN, active=False)}, {}, "not valid JSON"),
    "no room": ({"free_bytes": {"/usr": 1 << 20}}, {}, "not enough room on the file system of /usr"),
}
ON_METAL: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "branch": ({}, {"driver_version": "600"}, "no release of branch 600 is known"),
    "GPU": ({"gpus": OLD_GPU}, {"driver_version": "590.48.01"}, "no longer serves this host's Volta GPU"),
    "clock behind": ({"clock": 86400}, {}, "would not be valid yet.*timedatectl"),
    "clock ahead": ({"clock": 2240611200}, {}, "would have expired.*timedatectl"),
    "X server": ({"displays": ("display :0 is process 7's",)}, {}, "an X server is running.*systemctl isolate"),
    "cache full": ({"free_bytes": {"/var/cache/gpuprov": 1 << 30}}, {}, "room on the file system of /var/cache.*df -h"),
    "usr full": ({"free_bytes": {"/usr": 1 << 30}}, {}, "room on the file system of /usr for the driver.*df -h /usr"),
}


@pytest.mark.parametrize("name", IN_A_CONTAINER)
def test_problems_in_a_system_container(facts: HostFacts, name: str) -> None:
    changes, values, words = IN_A_CONTAINER[name]
    assert words in said(replace(facts, **changes), spec(**values))


@pytest.mark.parametrize("name", ON_METAL)
def test_problems_on_a_bare_machine_are_told_before_any_change(metal: HostFacts, name: str) -> None:
    changes, values, words = ON_METAL[name]
    host, wanted = replace(metal, **changes), replace(spec(), **values)
    assert re.search(words, said(host, wanted), re.DOTALL) and make_plan(host, wanted).changes == ()


PODMAN = EngineFacts("/usr/bin/podman")


@pytest.mark.parametrize("docker", [DockerFacts(), DockerFacts(snap=True), BROKEN])
def test_without_docker_it_is_neither_required_nor_installed_nor_touched(facts: HostFacts, docker: DockerFacts) -> None:
    found = make_plan(replace(facts, docker=docker, engines={"podman": PODMAN}), spec(docker="none"))
    assert found.problems == ()
    assert {item.step for item in found.changes} >= {"driver", "toolkit", "cdi", "engines"}
    assert not [item for item in found.changes if isinstance(item.change, ReconfigureDocker)]
    names = [name for item in found.changes if isinstance(item.change, InstallPackages) for name in item.change.names]
    assert not [name for name in names if "docker" in name]


@pytest.mark.parametrize(
    ("node", "named", "restarts"),
    [((), (), True), (("kubelet",), (), False), (("kubelet",), ("containerd",), True), (("k3s",), (), True)],
)
def test_named_engine_restarts(facts: HostFacts, node: tuple[str, ...], named: tuple[str, ...], restarts: bool) -> None:
    host = replace(facts, docker=DockerFacts(), kubernetes=node, engines={"containerd": EngineFacts("/usr/bin/x")})
    change = planned(host, spec(docker="none", engines=list(named)), ConfigureEngine)
    assert change.restart is restarts
    said = "restart containerd (its containers go on)" if restarts else "serves Kubernetes and is not restarted"
    assert said in change.summary()


def test_containerd_of_a_kubernetes_distribution_is_left_alone(facts: HostFacts) -> None:
    host = replace(facts, docker=DockerFacts(), kubernetes=("k3s",), engines={})
    found = make_plan(host, spec(docker="none"))
    assert found.problems == () and any(item.step == "cdi" for item in found.changes)
    assert any("gpuprov_engines: [k3s]" in note for note in found.notes)


def test_all_problems_are_told_at_once(facts: HostFacts) -> None:
    bad = replace(facts, clock=0, driver_packaged="nvidia-driver", free_bytes={"/etc": 0})
    assert len(preflight(PlanContext(bad, spec()))) == 3
    assert make_plan(bad, spec()).changes == ()


def test_an_unsupported_distribution_is_the_one_thing_said(facts: HostFacts) -> None:
    arch = replace(facts, os=replace(facts.os, id="arch", version="", name="Arch Linux"), gpus=())
    assert len(preflight(PlanContext(arch, spec()))) == 1
    assert "Arch Linux is not supported" in said(arch, spec())


@pytest.mark.parametrize(
    ("disabled", "seen", "step"),
    [
        (
            True,
            "/proc/sys/kernel/modules_disabled is 1",
            "grep -rn modules_disabled /etc/sysctl.conf /etc/sysctl.d  # ",
        ),
        (False, "there is no /proc/modules", "uname -r; ls /boot  # "),
    ],
)
def test_kernel_without_modules_is_refused_first(metal: HostFacts, disabled: bool, seen: str, step: str) -> None:
    bad = replace(metal, kernel=replace(metal.kernel, takes_modules=False, modules_disabled=disabled))
    (problem,) = preflight(PlanContext(bad, spec()))
    assert problem.what.startswith("this kernel takes no modules") and problem.evidence == f"kernel {RELEASE}: {seen}"
    assert problem.next_step.startswith(step)


@pytest.mark.parametrize("driver", ["runfile", "packages", "distribution", "preinstalled"])
@pytest.mark.parametrize("version", ["", "580", "535.261.03"])
def test_unknown_versions_leave_no_gaps(facts: HostFacts, metal: HostFacts, driver: str, version: str) -> None:
    wanted = [parse_spec({"driver": driver, **({"driver_version": version} if version else {}), **more})
              for more in ({}, {"kernel_modules": "none"}, {"toolkit": "nvidia"})]  # fmt: skip
    unloaded = replace(facts, driver=replace(facts.driver, kernel_version=""))
    held = replace(
        metal, running=RunningDriver("", ("nvidia",), (), {}, "", (GpuHolder(7, "python3", "/dev/nvidia0"),))
    )
    hosts = (facts, unloaded, metal, held, replace(metal, kernel=replace(metal.kernel, secure_boot="enabled")))
    told = [text for host in hosts for one in wanted for problem in preflight(PlanContext(host, one))
            for text in (problem.what, problem.next_step)]  # fmt: skip
    told += [text for host in hosts for one in wanted for plan in (make_plan(host, one),)
             for text in (*plan.notes, *plan.warnings)]  # fmt: skip
    assert [text for text in told if re.search(r"\S  (?!# )\S|\bNone\b| [,;:]|\(\)|''", text)] == []


def test_a_bare_machine_gets_headers_of_its_very_kernel_and_modules(metal: HostFacts) -> None:
    packages = planned(metal, spec(), InstallPackages)
    assert f"linux-headers-{RELEASE}" in packages.names
    assert {"gcc", "make", "dkms"} <= set(packages.names)
    driver = planned(metal, spec(), InstallDriver)
    assert driver.kernel_modules
    assert "libraries and kernel modules" in driver.summary()


def test_headers_that_are_there_are_not_installed_again(metal: HostFacts) -> None:
    names = (f"linux-headers-{RELEASE}", "gcc", "make", "libc6-dev", "dkms", "kmod", "libtirpc3")
    ready = replace(metal, packages=PackageFacts("apt", dict.fromkeys(names, "1")))
    assert planned(ready, spec(), InstallPackages) is None


def test_a_kept_driver_that_runs_needs_no_headers_of_its_kernel(metal: HostFacts) -> None:
    """Nothing is built, and perhaps no repository has them any more; those of kernels to come are another matter."""
    runs = replace(metal, driver=DriverFacts(library_version=VERSION, kernel_version=VERSION))
    assert f"linux-headers-{RELEASE}" not in software.wanted(source_of(runs, spec()))
    not_loaded = replace(metal, driver=DriverFacts(library_version=VERSION))
    assert f"linux-headers-{RELEASE}" in software.wanted(source_of(not_loaded, spec()))


def test_docker_gets_apparmors_parser_where_the_kernel_has_apparmor_on(metal: HostFacts, facts: HostFacts) -> None:
    """Without it docker runs no container at all; a system container's profiles are the container host's."""
    on = replace(metal, kernel=replace(metal.kernel, apparmor=True))
    assert "apparmor" in planned(on, spec(), InstallPackages).names
    assert "apparmor" not in planned(metal, spec(), InstallPackages).names
    inside = replace(facts, kernel=replace(facts.kernel, apparmor=True))
    assert "apparmor" not in software.wanted(source_of(inside, spec()))


def test_a_system_container_gets_libraries_alone_and_no_headers(facts: HostFacts) -> None:
    assert planned(facts, spec(), InstallPackages) is None
    assert not planned(facts, spec(), InstallDriver).kernel_modules
    assert "container host's" in make_plan(facts, spec()).notes[0]


def test_half_a_driver_is_installed_again_whatever_its_version_says(facts: HostFacts) -> None:
    whole = replace(facts, driver=replace(facts.driver, library_version=VERSION))
    assert planned(whole, spec(), InstallDriver) is None
    half = replace(whole, files={**whole.files, INCOMPLETE_MARK: FileFact(b"", 0o644, 0, 0)})
    assert planned(half, spec(), InstallDriver) is not None
    assert planned(replace(whole, driver_damage="libcuda.so.1 is missing"), spec(), InstallDriver) is not None


def test_the_running_kernels_module_belongs_to_a_whole_driver(metal: HostFacts, facts: HostFacts) -> None:
    unbuilt = replace(metal, driver=replace(metal.driver, library_version=VERSION), has_module=False)
    assert RunFile(unbuilt, spec()).installs and not RunFile(unbuilt, spec()).is_installed
    assert not RunFile(replace(unbuilt, has_module=True), spec()).installs
    assert not RunFile(replace(unbuilt, driver=replace(unbuilt.driver, kernel_version=VERSION)), spec()).installs
    assert not RunFile(replace(unbuilt, kernel=facts.kernel), spec()).installs


@pytest.mark.parametrize(
    ("release", "expected"),
    [("12", {"docker.io"}), ("13", {"docker.io", "docker-cli", "docker-buildx", "docker-compose"})],
)
def test_docker_comes_from_the_distribution(facts: HostFacts, release: str, expected: set[str]) -> None:
    bare = PackageFacts("apt", {})
    without = replace(facts, docker=DockerFacts(), packages=bare, os=replace(facts.os, version=release))
    assert expected <= set(planned(without, spec(), InstallPackages).names)


def test_nvidias_toolkit_brings_repository_and_packages_of_one_version(facts: HostFacts) -> None:
    wanted = spec(toolkit="nvidia", toolkit_version="1.18.0-1")
    names = planned(facts, wanted, InstallPackages).names
    assert [name.partition("=")[2] for name in names] == ["1.18.0-1"] * 4
    summaries = [item.change.summary() for item in make_plan(facts, wanted).changes]
    assert any("gpuprov-nvidia-container-toolkit.sources" in line for line in summaries)
    assert any("C95B321B61E88C1809C4F759DDCAE044F796ECB0" in line for line in summaries)


def test_another_version_of_nvidias_toolkit_is_an_upgrade(facts: HostFacts) -> None:
    there = replace(facts, packages=PackageFacts("apt", {**facts.packages.installed, TOOLKIT_PACKAGE: "1.19.0-1"}))
    (upgrade,) = make_plan(there, spec(toolkit="nvidia", toolkit_version="1.18.0-1")).upgrades
    assert (upgrade.product, upgrade.installed, upgrade.wanted) == ("toolkit", "1.19.0-1", "1.18.0-1")
    assert upgrade.sentence.startswith("downgrade: toolkit 1.19.0-1 → 1.18.0-1; stops no container; reboot: no; ")
    assert make_plan(facts, spec(toolkit="nvidia", toolkit_version="1.18.0-1")).upgrades == ()


@pytest.mark.parametrize("rpm", [False, True])
def test_packages_of_the_driver_that_are_asked_for_are_an_upgrade(facts: HostFacts, rpm: bool) -> None:
    there = replace(
        facts, driver=DriverFacts("", "550.163.01"), packages=PackageFacts("apt", {"nvidia-open": "550.163.01-1"})
    )
    names = ("site-tools=1.0", "nvidia-open=580.178.04-1")
    change = InstallDriverRpms(DNF, names) if rpm else InstallDriverPackages(names)
    (upgrade,) = upgrades(PlanContext(there, spec(driver="preinstalled", driver_version="")), (change,))
    assert (upgrade.product, upgrade.installed, upgrade.wanted) == ("driver", "550.163.01", "580.178.04")


def hook_file(content: bytes) -> FileFact:
    return FileFact(content, 0o755, 0, 0)


HOOKS = {
    "none": (None, True, False),
    "ours": (hook_file(render_hook("/usr/bin/python3.9").encode()), True, True),
    "NVIDIA's": (hook_file(b"\x7fELF"), False, False),
    "a link or large": (hook_file(b""), False, False),
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_hooks_name_is_ours_until_nvidias_package_owns_it(facts: HostFacts, name: str) -> None:
    there, ours, handed = HOOKS[name]
    host = replace(facts, files={**facts.files, **({NVIDIA_HOOK_PATH: there} if there else {})})
    paths = {path for path, _, _ in planned(host, spec(), InstallRuntime).files}
    assert (NVIDIA_HOOK_PATH in paths, HOOK_PATH in paths) == (ours, True)
    assert planned(host, spec(), HandOverHook) is None
    kinds = [type(item.change) for item in make_plan(host, spec(toolkit="nvidia")).changes]
    assert kinds.count(HandOverHook) == handed
    assert not handed or kinds.index(HandOverHook) < kinds.index(InstallPackages)


@pytest.mark.parametrize("kind", ["link", "large"])
def test_a_hook_of_nvidias_is_seen_though_it_is_not_read(tmp_path: Path, kind: str) -> None:
    host = FakeHost(tmp_path / "root")
    place = host.path(NVIDIA_HOOK_PATH)
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        place.symlink_to("nvidia-container-toolkit")
    else:
        place.write_bytes(b"\x7fELF" * (2 << 20))
    assert gather(host).files[NVIDIA_HOOK_PATH].content == b""


def test_nvidias_own_file_of_a_known_release_has_a_known_digest(metal: HostFacts) -> None:
    wanted = spec(driver_version="580")
    known = tables.PACKAGED.known_sha256(wanted.driver_version, "x86_64")
    assert planned(metal, wanted, FetchRunfile).sha256 == known != ""
    # Wherever the file comes from: a release has one file. A file without a known digest needs one given, or https.
    assert planned(metal, spec(driver_version="580", driver_url="http://a.example/x.run"), FetchRunfile).sha256 == known
    unknown = {"driver_version": "580.1.1", "driver_url": "https://a.example/x.run"}
    assert planned(metal, spec(**unknown), FetchRunfile).sha256 == ""
    # A path names the administrator's own file, which may be another build.
    own = spec(driver_version="580", driver_url="/root/driver.run")
    assert RunFile(metal, own).sha256 == "" != RunFile(metal, replace(own, driver_sha256="0" * 64)).sha256


def test_a_plan_with_problems_tells_what_it_would_fetch(metal: HostFacts) -> None:
    wanted = spec(driver_url="http://mirror.example/driver.run", driver_sha256="0" * 64, toolkit="nvidia")
    well = make_plan(metal, wanted)
    assert well.problems == () and "http://mirror.example/driver.run" in well.urls
    ill = make_plan(replace(metal, clock=0), wanted)
    assert ill.problems and ill.changes == ()
    assert set(ill.urls) == set(well.urls)
    assert make_plan(replace(metal, clock=0), wanted, ("docker",)).urls == ()
    assert make_plan(replace(metal, gpus=()), wanted).urls == ()
    unknown = replace(metal, os=replace(metal.os, id="arch", like=()))
    assert make_plan(unknown, wanted).urls == ()


def test_packages_that_dpkg_left_half_done_are_told(metal: HostFacts) -> None:
    torn = replace(metal, packages=replace(metal.packages, unfinished={"slow": "half-configured"}))
    assert "slow is half-configured: dpkg was interrupted" in " ".join(make_plan(torn, spec()).warnings)
    assert "dpkg" not in " ".join(make_plan(metal, spec()).warnings)


def test_secure_boot_wants_signed_modules(metal: HostFacts) -> None:
    locked = replace(metal, kernel=replace(metal.kernel, secure_boot="enabled"))
    (problem,) = preflight(PlanContext(locked, spec()))
    assert "mokutil --import" in problem.next_step
    signed = spec(module_signing_key="/root/mok.key", module_signing_certificate="/root/mok.der")
    assert preflight(PlanContext(locked, signed)) == ()
    assert preflight(PlanContext(locked, replace(signed, module_signing_certificate=""))) == (problem,)
    assert planned(locked, signed, InstallDriver).signing_certificate == "/root/mok.der"
    # A driver that is there already needs no new modules.
    there = replace(locked, driver=DriverFacts(library_version=VERSION, kernel_version=VERSION))
    assert preflight(PlanContext(there, spec())) == ()


def test_dkms_signs_with_the_users_key_as_long_as_it_is_asked_to(metal: HostFacts) -> None:
    signed = spec(module_signing_key="/root/mok.key", module_signing_certificate="/root/mok.der")
    (change,) = kernel.plan_signing(source_of(metal, signed))
    assert isinstance(change, WriteFile)
    assert change.content == b"mok_signing_key=/root/mok.key\nmok_certificate=/root/mok.der\n"
    there = replace(metal, files={change.path: FileFact(change.content, 0o644, 0, 0)})
    assert kernel.plan_signing(source_of(there, signed)) == ()
    assert kernel.plan_signing(source_of(there, spec())) == (RemoveFile(change.path, "no longer asked for"),)
    halves = (replace(signed, module_signing_key=""), replace(signed, module_signing_certificate=""))
    for other in (spec(), replace(signed, driver="preinstalled"), *halves):
        assert kernel.plan_signing(source_of(metal, other)) == ()
    names = [type(item.change).__name__ for item in make_plan(metal, signed).changes if item.step == "packages"]
    assert names.index("WriteFile") < names.index("InstallPackages"), "before DKMS builds"


def test_secure_boot_counts_for_packages_of_any_version(metal: HostFacts) -> None:
    locked = replace(metal, kernel=replace(metal.kernel, secure_boot="enabled"))
    wanted = spec(driver="packages", driver_version="")
    assert any("Secure Boot is on" in one.what for one in preflight(PlanContext(locked, wanted)))
    there = replace(locked, driver=DriverFacts(library_version="580.1", kernel_version="580.1"))
    there = replace(there, driver_packaged="nvidia-open")
    assert not any("Secure Boot" in one.what for one in preflight(PlanContext(there, wanted)))


def test_an_x_server_that_is_gone_left_its_lock_alone(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "proc/7").mkdir(parents=True)
    for name, text in ((".X0-lock", "         7\n"), (".X1-lock", "8\n"), (".X2-lock", "x"), ("X3-lock", "7")):
        (tmp_path / "tmp" / name).write_text(text)
    # What any user may put there.
    os.mkfifo(tmp_path / "tmp/.X4-lock")
    (tmp_path / "tmp/.X5-lock").symlink_to("../proc/7")
    (tmp_path / "tmp/.X6-lock").symlink_to(".X6-lock")
    with (tmp_path / "tmp/.X7-lock").open("wb") as file:
        file.truncate(1 << 42)
    assert gather_displays(System(str(tmp_path))) == ("display :0 is process 7's",)


@pytest.mark.parametrize("steps", [("docker",), ("cdi", "toolkit"), ("packages", "docker")])
def test_steps_keep_the_plan_to_a_part_in_the_plans_own_order(facts: HostFacts, steps: tuple[str, ...]) -> None:
    bare = replace(facts, packages=PackageFacts("apt", {}))
    whole = make_plan(bare, spec(packages=["jq"]))
    part = make_plan(bare, spec(packages=["jq"]), steps)
    assert part.changes == tuple(item for item in whole.changes if item.step in steps)
    assert {item.step for item in part.changes} == set(steps)


def test_what_stands_in_the_way_is_told_whatever_the_steps(facts: HostFacts) -> None:
    assert make_plan(replace(facts, gpus=()), spec(), ("docker",)).problems
