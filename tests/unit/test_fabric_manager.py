"""The fabric manager: found to be needed by the switches, of the driver's very version, running."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov import verify
from gpuprov.core.changes import FileFact, WriteFile
from gpuprov.core.commands import Completed
from gpuprov.driver import cuda_repository, fabric_manager
from gpuprov.driver.fabric_manager import RunFabricManager, packages
from gpuprov.facts.gpus import FABRIC_UNIT as UNIT
from gpuprov.facts.gpus import FabricFacts, gather_fabric, parse_version
from gpuprov.facts.host import HostFacts, gather
from gpuprov.machine.pci import gather_gpus
from gpuprov.packages.apt import APT
from gpuprov.packages.dpkg import missing
from gpuprov.packages.interface import PackageFacts
from gpuprov.packages.managers import manager_of
from gpuprov.packages.rpm import InstallRpmPackages
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.plan.steps import CHANGE_KINDS, STEPS, make_plan
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.protocol.tables import PACKAGED
from tests import simgpu
from tests.unit.ask import check_of
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root
VERSION, OTHER = simgpu.DRIVER_VERSION, "535.261.03"


class SwitchHost(FakeHost):
    """A bare machine with an NVSwitch on its bus, and a fabric manager of whatever version."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, gpus=2, metal=True)
        self.version = ""
        self.unit, self.failing_verb = {"is-active": False, "is-enabled": False}, ""
        switch = root / "sys/bus/pci/devices/0000:c1:00.0"
        switch.mkdir(parents=True)
        for name, text in (("vendor", "0x10de"), ("class", "0x068000"), ("device", "0x22a3")):
            (switch / name).write_text(f"{text}\n")

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if tuple(argv) == ("nv-fabricmanager", "--version"):
            self.commands.append(tuple(argv))
            said = f"\n\n\n\tFabric Manager version is : {self.version}\n\n"
            return Completed(tuple(argv), 0 if self.version else 127, said if self.version else "")
        return super().run(argv, **more)

    def _systemctl(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[-1] != UNIT:
            return super()._systemctl(words)
        if words[0] in self.unit:
            return (0 if self.unit[words[0]] else 3), ""
        if words[0] == self.failing_verb:
            return 1, f"Job for {UNIT} failed."
        changes = {"restart": ("is-active", True), "stop": ("is-active", False), "enable": ("is-enabled", True),
                   "disable": ("is-enabled", False)}  # fmt: skip
        name, value = changes[words[0]]
        self.unit[name] = value
        return 0, ""


class SilentHost(SwitchHost):
    """One on which a command about the fabric manager takes too long, or systemd does not answer it."""

    silent = ""

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        done = super().run(argv, **more)
        if self.silent not in argv or not {"nv-fabricmanager", UNIT} & {*argv}:
            return done
        if argv[0] == "systemctl":
            return Completed(tuple(argv), 1, "", "Failed to retrieve unit state: Connection timed out")
        return Completed(tuple(argv), 124, "", "stopped after 20 s, its time limit")


@pytest.fixture
def host(tmp_path: Path) -> SwitchHost:
    return SwitchHost(tmp_path / "root")


@pytest.fixture
def facts(host: SwitchHost) -> HostFacts:
    return gather(host)


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver_version": VERSION, **values})


def test_a_switch_is_a_bridge_of_nvidias_and_no_gpu(host: SwitchHost) -> None:
    assert gather_fabric(host) == FabricFacts(("0000:c1:00.0",))
    assert len(gather_gpus(host)) == 2


def test_switches_behind_adapters_are_known_by_their_product_data(host: SwitchHost) -> None:
    for name, data in (("mlx5_0", b"PN MCX75"), ("mlx5_1", b"\x82\x00 SW_MNG \x00")):
        (host.root / f"sys/class/infiniband/{name}/device").mkdir(parents=True)
        (host.root / f"sys/class/infiniband/{name}/device/vpd").write_bytes(data)
    found = gather_fabric(host)
    assert (found.switches, found.managed) == (("0000:c1:00.0", "mlx5_1"), True)
    assert packages("580.95.05", APT, found, PACKAGED) == ("nvidia-fabricmanager=580.95.05-*", "nvlsm")


def test_a_machine_without_switches_is_not_asked(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root", metal=True)
    assert gather_fabric(host) == FabricFacts()
    assert host.commands == []


def with_gpus(root: Path, device_id: str, count: int) -> FakeHost:
    """A bare machine with GPUs of a model alone, and no NVSwitch in sight."""
    host = FakeHost(root, gpus=count, metal=True)
    for gpu in gather_gpus(host):
        (root / f"sys/bus/pci/devices/{gpu.bus_id}/device").write_text(f"0x{device_id}\n")
    return host


# Device id, number of GPUs → whether their switches are hidden, a rack's; what the plan says.
MODELS = [
    ("2901", 8, True, False), ("3182", 8, True, False), ("2901", 1, False, False), ("3182", 7, False, False),
    ("2941", 4, False, True), ("31c2", 4, False, True), ("2342", 1, False, False), ("2330", 8, False, False),
    ("27b8", 8, False, False), ("2bb5", 8, False, False),
]  # fmt: skip


@pytest.mark.parametrize(("device_id", "count", "hidden", "rack"), MODELS)
def test_hidden_switches_by_model(tmp_path: Path, device_id: str, count: int, hidden: bool, rack: bool) -> None:
    facts = gather(with_gpus(tmp_path / "root", device_id, count))
    assert (bool(facts.fabric.hidden), facts.fabric.rack, facts.fabric.switches) == (hidden, rack, ())
    problems = fabric_manager.plan_problems(source_of(facts, spec()))
    assert [one.what.partition(":")[0] for one in problems] == (
        ["this host's GPUs are joined by NVSwitches, and none is in sight"] if hidden else []
    )
    for one in problems:
        assert (
            one.next_step.startswith("modprobe -a mlx5_ib ib_umad && gpuprov install  # ") and "mlx5_ib" in one.evidence
        )
        assert one.next_step.endswith(": -e gpuprov_fabric_manager=preinstalled")
    assert fabric_manager.plan(source_of(facts, spec())) == ()
    outside = spec(fabric_manager="preinstalled")
    assert fabric_manager.plan_problems(source_of(facts, outside)) == ()
    inside = replace(facts, kernel=replace(facts.kernel, container="lxc"))
    assert fabric_manager.plan_problems(source_of(inside, spec())) == ()


@pytest.mark.parametrize("device_id", ["2941", "31c2"])
def test_a_tray_of_a_rack_gets_no_fabric_manager_whatever_is_on_its_bus(host: SwitchHost, device_id: str) -> None:
    for gpu in gather_gpus(host):
        (host.root / f"sys/bus/pci/devices/{gpu.bus_id}/device").write_text(f"0x{device_id}\n")
    facts = gather(host)
    assert facts.fabric == FabricFacts(rack=True)
    assert fabric_manager.plan(source_of(facts, spec(driver_version="580.159.04"))) == ()


def behind_adapters(host: SwitchHost) -> HostFacts:
    (host.root / "sys/class/infiniband/mlx5_1/device").mkdir(parents=True)
    (host.root / "sys/class/infiniband/mlx5_1/device/vpd").write_bytes(b"SW_MNG")
    return gather(host)


def test_modules_for_switches_behind_adapters_are_loaded_first(host: SwitchHost) -> None:
    facts, wanted = behind_adapters(host), spec(driver_version="580.159.04")
    file, run = fabric_manager.plan(source_of(facts, wanted))[-2:]
    assert isinstance(file, WriteFile) and isinstance(run, RunFabricManager)
    assert (file.path, file.content) == ("/etc/modules-load.d/gpuprov-fabric.conf", b"mlx5_ib\nib_umad\n")
    host.version = "580.159.04"
    run.apply(host, lambda *words: None)
    assert ("modprobe", "-a", "mlx5_ib", "ib_umad") in host.commands
    file.apply(host, lambda *words: None)
    settled = replace(gather(host), driver=facts.driver)
    assert fabric_manager.plan(source_of(settled, wanted)) == ()


@pytest.mark.parametrize(
    ("version", "manager", "name"),
    [
        ("550.163.01", "apt", "nvidia-fabricmanager-550=550.163.01-*"),
        ("580.95.05", "apt", "nvidia-fabricmanager=580.95.05-*"),
        ("550.163.01", "dnf", "nvidia-fabric-manager=550.163.01"),
        ("580.95.05", "dnf", "nvidia-fabricmanager=580.95.05"),
    ],
)
def test_the_package_is_named_as_the_repository_names_it(version: str, manager: str, name: str) -> None:
    assert packages(version, manager_of(None, manager), FabricFacts(), PACKAGED) == (name,)


def test_a_pattern_is_met_by_a_version_of_its_kind() -> None:
    there = PackageFacts("apt", {"nvidia-fabricmanager-550": "550.163.01-1ubuntu1"})
    assert missing(there, ["nvidia-fabricmanager-550=550.163.01-*"]) == ()
    assert missing(there, ["nvidia-fabricmanager-550=550.163.02-*"]) == ("nvidia-fabricmanager-550=550.163.02-*",)


def test_it_is_installed_in_the_drivers_version_and_run(facts: HostFacts) -> None:
    changes = [change.summary() for change in fabric_manager.plan(source_of(facts, spec()))]
    assert changes == [
        "refresh the package index (apt-get update)",
        f"install nvidia-fabricmanager-550={VERSION}-*",
        f"enable and start {UNIT} ({VERSION})",
    ]
    assert [one.name for one in cuda_repository.repositories(source_of(facts, spec()))] == ["cuda"]
    branch = spec(driver_version="550", driver_url="/driver.run", driver_mirror="https://mirror.example")
    there = replace(facts, driver=replace(facts.driver, library_version=OTHER))
    assert fabric_manager.wanted_packages(source_of(there, branch)) == (f"nvidia-fabricmanager-535={OTHER}-*",)


def test_dnf_installs_it_past_module_streams(facts: HostFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostFacts, "package_manager", manager_of(None, "dnf"))
    _, install, _ = fabric_manager.plan(source_of(facts, spec()))
    assert isinstance(install, InstallRpmPackages)
    assert install.names == (f"nvidia-fabric-manager={VERSION}",)
    assert install.options == ("--setopt=gpuprov-cuda.module_hotfixes=1",)


def holds(facts: HostFacts, spec: HostSpec) -> list[str]:
    context = PlanContext(facts, spec)
    changes = [change for step in STEPS if step.name in ("packages", "driver") for change in step.plan(context)]
    return [change.summary() for change in changes if "hold" in change.summary()]


@pytest.mark.parametrize("more", [{}, {"hold_pinned": False}, {"driver": "preinstalled"}], ids=str)
def test_one_beside_a_run_file_is_held_and_changed_with_the_driver(facts: HostFacts, more: dict[str, Any]) -> None:
    name, runs = "nvidia-fabricmanager-550", FabricFacts(("0000:c1:00.0",), False, VERSION, True, True)
    there = replace(facts.packages, installed={**facts.packages.installed, name: f"{VERSION}-1"})
    beside = replace(facts, fabric=runs, packages=there)
    hold = f"hold the driver's packages at this version ({name})"
    assert holds(beside, spec(**more)) == [hold], "one that an earlier gpuprov installed"
    ours = replace(beside, packages=replace(there, held=frozenset({name}), held_here=frozenset({name})))
    assert holds(ours, spec(**more)) == []
    assert holds(ours, spec(**more, driver_updates="follow")) == [f"no longer hold {name}"]
    others = replace(ours, packages=replace(ours.packages, held_here=frozenset()))
    assert holds(others, spec(**more, driver_updates="follow")) == []
    if more:
        return
    other = replace(ours, fabric=replace(runs, version=OTHER))
    changed = replace(other, packages=replace(ours.packages, installed={**there.installed, name: f"{OTHER}-1"}))
    assert f"install {name}={VERSION}-* (taking the hold off {name})" in holds(changed, spec())
    assert holds(changed, spec())[-1] == "hold the driver's packages at this version"


def test_one_that_is_there_and_runs_asks_for_nothing(facts: HostFacts) -> None:
    good = replace(facts, fabric=FabricFacts(("0000:c1:00.0",), False, VERSION, True, True))
    assert fabric_manager.plan(source_of(good, spec())) == ()
    assert cuda_repository.repositories(source_of(good, spec())) == ()
    file = "/etc/apt/sources.list.d/gpuprov-cuda.sources"
    for switches, names in ((good.fabric, ["cuda"]), (FabricFacts(), [])):
        updated = replace(good, fabric=switches, files={file: FileFact(b"", 0o644, 0, 0)})
        assert [one.name for one in cuda_repository.repositories(source_of(updated, spec()))] == names
    stopped = replace(good, fabric=replace(good.fabric, active=False))
    assert [change.key for change in fabric_manager.plan(source_of(stopped, spec()))] == [f"run {UNIT}"]
    inside = replace(facts, kernel=replace(facts.kernel, container="lxc"))
    assert fabric_manager.plan(source_of(inside, spec())) == ()


@pytest.mark.parametrize("silent", ["--version", "is-active", "is-enabled"])
def test_one_that_gives_no_answer_is_not_restarted(tmp_path: Path, silent: str) -> None:
    """Its restart ends CUDA programs, and it may run."""
    host = SilentHost(tmp_path / "root")
    simgpu.install_tree(host.root)
    host.version, host.unit = VERSION, {"is-active": True, "is-enabled": True}
    assert fabric_manager.plan(source_of(gather(host), spec())) == ()
    host.silent = silent
    facts = gather(host)
    for asked in (spec(), spec(fabric_manager="preinstalled")):
        plan = make_plan(facts, asked)
        (problem,) = fabric_manager.plan_problems(source_of(facts, asked))
        assert plan.changes == () and problem in plan.problems
        assert problem.what == "whether the fabric manager serves the driver is not known"
        assert silent in problem.evidence and "exited 1" in problem.evidence and UNIT in problem.next_step
    found = check_of("fabric manager", host, spec())
    assert found.status == "failed" and found.reason.startswith(f"{problem.what}; {problem.evidence}")


def test_versions_that_differ_are_told_where_the_site_installs_it(facts: HostFacts) -> None:
    old = replace(facts, fabric=replace(facts.fabric, version=OTHER))
    (problem,) = fabric_manager.plan_problems(source_of(old, spec(fabric_manager="preinstalled")))
    assert problem.what == f"fabric manager is {OTHER}, the driver is {VERSION}: they must agree to the last digit"
    assert f"{OTHER}; NVSwitches: 0000:c1:00.0" in problem.evidence
    assert fabric_manager.plan(source_of(old, spec(fabric_manager="preinstalled"))) == ()
    assert fabric_manager.plan_problems(source_of(old, spec())) == ()
    stopped = replace(old, fabric=replace(facts.fabric, version=VERSION))
    assert fabric_manager.plan_problems(source_of(stopped, spec(fabric_manager="preinstalled"))) == ()
    without = replace(old, fabric=FabricFacts())
    assert fabric_manager.plan_problems(source_of(without, spec(fabric_manager="preinstalled"))) == ()


def test_its_unit_is_enabled_and_started_and_undo_takes_that_back(host: SwitchHost) -> None:
    host.version = VERSION
    change = RunFabricManager(VERSION)
    before = change.capture(host)
    change.apply(host, lambda *words: None)
    assert host.unit == {"is-active": True, "is-enabled": True}
    RunFabricManager.undo(host, change.capture(host), {})
    assert host.unit == {"is-active": True, "is-enabled": True}
    RunFabricManager.undo(host, before, {})
    assert host.unit == {"is-active": False, "is-enabled": False}
    asked = [f"systemctl is-enabled --quiet {UNIT}", f"systemctl is-active --quiet {UNIT}"]
    assert [" ".join(words) for words in host.commands] == [
        *asked, "nv-fabricmanager --version", f"systemctl enable {UNIT}", f"systemctl restart {UNIT}", *asked,
        f"systemctl stop {UNIT}", f"systemctl disable {UNIT}",
    ]  # fmt: skip


def test_an_image_has_it_enabled_and_not_started(host: SwitchHost) -> None:
    host.version = VERSION
    change = RunFabricManager(VERSION, start=False, modules=("mlx5_ib",))
    assert change.summary() == f"enable {UNIT} ({VERSION})"
    change.apply(host, lambda *words: None)
    assert host.unit == {"is-active": False, "is-enabled": True}
    assert not any(words[0] == "modprobe" for words in host.commands)


_LACKS_MODULE = 'Kernel module "ib_umad" has not been loaded, fabric manager cannot be started'
_COMMANDS = [
    f"systemctl enable {UNIT}", f"systemctl restart {UNIT}",
    f"journalctl --no-pager --output=cat --lines=4 --unit {UNIT}",
]  # fmt: skip
# The version, what systemctl fails to do, the unit's log → the problem, and what was run after the look at the version.
FAILURES: dict[str, tuple[str, str, str, Problem, list[str]]] = {
    "another version": (OTHER, "", "", Problem(
        f"fabric manager is {OTHER}, the driver is {VERSION}: they must agree to the last digit",
        f"`nv-fabricmanager --version` exited 0\nFabric Manager version is : {OTHER}",
        f"is nvidia-fabricmanager {VERSION} in a repository of this host? apt-cache policy 'nvidia-fabric*'",
    ), []),
    "not enabled": (VERSION, "enable", "", Problem(
        f"{UNIT} can't be enabled", f"`systemctl enable {UNIT}` exited 1\nJob for {UNIT} failed.",
        f"systemctl status {UNIT}",
    ), _COMMANDS[:1]),
    "not started": (VERSION, "restart", "the log", Problem(
        f"{UNIT} does not start", f"`systemctl restart {UNIT}` exited 1\nJob for {UNIT} failed.\nthe log",
        f"systemctl status {UNIT}",
    ), _COMMANDS),
    "not started, without a log": (VERSION, "restart", "", Problem(
        f"{UNIT} does not start", f"`systemctl restart {UNIT}` exited 1\nJob for {UNIT} failed.",
        f"systemctl status {UNIT}",
    ), _COMMANDS),
    "lacks a module": (VERSION, "restart", _LACKS_MODULE, Problem(
        f"{UNIT} does not start", f"`systemctl restart {UNIT}` exited 1\nJob for {UNIT} failed.\n{_LACKS_MODULE}",
        "modprobe -a mlx5_ib ib_umad && systemctl restart nvidia-fabricmanager  # no such module: install "
        "linux-modules-extra-$(uname -r); at each boot: gpuprov install",
    ), _COMMANDS),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_one_that_can_not_run_says_why_and_what_to_type(host: SwitchHost, name: str) -> None:
    host.version, host.failing_verb, host.unit_log, problem, commands = FAILURES[name]
    assert refused(RunFabricManager(VERSION).apply, host, lambda *words: None) == problem
    assert [" ".join(words) for words in host.commands] == ["nv-fabricmanager --version", *commands]
    assert not host.unit["is-active"]


def test_what_the_program_says_of_itself_is_read() -> None:
    assert parse_version("Fabric Manager version is : 580.159.03\n") == "580.159.03"
    assert parse_version("command not found") == ""


_INSTALL = f"install nvidia-fabricmanager {VERSION}, or set gpuprov_fabric_manager: auto"
SHOWN = {
    "another version": (
        FabricFacts(("0000:c1:00.0", "mlx5_1"), False, OTHER, True),
        f"fabric manager is {OTHER}, the driver is {VERSION}: they must agree to the last digit; "
        f"nv-fabricmanager --version: {OTHER}; NVSwitches: 0000:c1:00.0, mlx5_1; {_INSTALL}",
    ),
    "none": (
        FabricFacts(("0000:c1:00.0",)),
        f"fabric manager is not installed, the driver is {VERSION}: they must agree to the last digit; "
        f"nv-fabricmanager --version: not installed; NVSwitches: 0000:c1:00.0; {_INSTALL}",
    ),
    "stopped": (
        FabricFacts(("0000:c1:00.0",), False, VERSION, False),
        f"the fabric manager does not run: CUDA ends with error 802; systemctl is-active {UNIT}; "
        f"systemctl enable --now {UNIT}; systemctl status {UNIT}",
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_verify_names_what_keeps_cuda_down(host: SwitchHost, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    simgpu.install_tree(host.root)
    facts, reason = SHOWN[name]
    monkeypatch.setattr(verify, "gather_fabric", lambda system: facts)
    found = check_of("fabric manager", host, spec())
    assert (found.status, found.reason) == ("failed", reason)
    facts = FabricFacts(("0000:c1:00.0",), False, VERSION, True, True)
    found = check_of("fabric manager", host, spec())
    assert (found.status, found.on_host) == ("ok", VERSION)


def test_each_change_that_uses_the_package_manager_says_so() -> None:
    using = {name for name, kind in CHANGE_KINDS.items() if kind.uses_package_manager}
    assert {name for name in using if not name.startswith("_")} == {
        "RefreshPackageIndex", "InstallPackages", "HoldPackages", "InstallRpmKey", "RefreshRpmIndex",
        "InstallRpmPackages", "EnableStream", "SwitchPin", "SwitchBranch", "ChangeDriverPackages", "ChangeDriverRpms",
        "InstallDriverPackages", "InstallDriverRpms",
        "RemovePackages", "RemoveRpms", "RemoveRpmKey",
        "IndexRefresh", "PackageInstallation", "PackageRemoval",  # bases
    }  # fmt: skip
