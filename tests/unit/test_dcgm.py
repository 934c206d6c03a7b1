"""DCGM 4: its packages by the driver's branch, its units, and what `verify` says of it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.bundle.manifest import BundleFacts
from gpuprov.bundle_create.recipe import Wanted, make_recipe
from gpuprov.checks.smi import parse_smi
from gpuprov.core.commands import Completed
from gpuprov.driver import cuda_repository, dcgm
from gpuprov.driver.dcgm import RunDcgm, packages
from gpuprov.driver.running_driver import UNITS
from gpuprov.facts.gpus import DCGM_EXPORTER, DCGM_UNIT, ServiceFacts, gather_services
from gpuprov.facts.host import HostFacts, gather
from gpuprov.facts.kernels import ImageFacts
from gpuprov.plan import software, with_bundle
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.errors import GpuprovError, UsageError
from gpuprov.protocol.spec import HostSpec, parse_spec
from tests.bundles import MANIFEST
from tests.unit.ask import check_of
from tests.unit.checks.test_smi import REPORT
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root
NAME, BOTH = "datacenter-gpu-manager", (DCGM_UNIT, DCGM_EXPORTER)
# dcgmi 4 on a host with two GPUs (NVIDIA's documentation and public reports of issues).
_LISTED = """\
{count} GPUs found.
+--------+----------------------------------------------------------------------+
| GPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
{rows}0 NvSwitches found.
+-----------+
| Switch ID |
+-----------+
+-----------+
0 CPUs found.
"""
_ROW = """\
| {number}      | Name: NVIDIA H100 80GB HBM3                                          |
|        | PCI Bus ID: 00000000:1B:00.0                                         |
|        | Device UUID: {uuid}                |
+--------+----------------------------------------------------------------------+
"""
_UUIDS = tuple(gpu.uuid for gpu in parse_smi(REPORT).gpus)


class DcgmHost(FakeHost):
    """A machine on which each unit has a state of its own, and dcgmi lists GPUs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, gpus=2, metal=True)
        self.states: dict[str, set[str]] = {}
        self.listed: tuple[str, ...] | None = _UUIDS

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[0] == "nvidia-smi":
            return Completed(tuple(argv), 0, REPORT)
        if argv[0] != "dcgmi":
            return super().run(argv, **more)
        if self.listed is None:
            return Completed(tuple(argv), 1, "", "Error: unable to establish a connection to the specified host")
        rows = "".join(_ROW.format(number=number, uuid=uuid) for number, uuid in enumerate(self.listed))
        return Completed(tuple(argv), 0, _LISTED.format(count=len(self.listed), rows=rows))

    def _systemctl(self, words: tuple[str, ...]) -> tuple[int, str]:
        unit = words[-1]
        if unit not in BOTH or words[0] == "reset-failed" or (unit == self.failing_unit and words[0] == "restart"):
            return super()._systemctl(words)
        there = self.states.setdefault(unit, set())
        if words[0].startswith("is-"):
            return (0 if words[0] in there else 3), ""
        verb, adds = {"enable": ("is-enabled", True), "disable": ("is-enabled", False),
                      "restart": ("is-active", True), "stop": ("is-active", False)}[words[0]]  # fmt: skip
        self.states[unit] = there | {verb} if adds else there - {verb}
        return 0, ""


@pytest.fixture
def host(tmp_path: Path) -> DcgmHost:
    return DcgmHost(tmp_path / "root")


@pytest.fixture
def facts(host: DcgmHost) -> HostFacts:
    return gather(host)


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver_version": "550.163.01", "dcgm": True, **values})


@pytest.mark.parametrize(
    ("version", "cuda"), [("470.256.02", 11), ("535.261.03", 12), ("550", 12), ("580.95.05", 13), ("595-server", 13)]
)
def test_the_packages_are_those_of_the_drivers_cuda_as_apt_dnf_and_zypper_name_them(version: str, cuda: int) -> None:
    names = (f"{NAME}-4-core", f"{NAME}-4-cuda{cuda}", f"{NAME}-4-proprietary", f"{NAME}-4-proprietary-cuda{cuda}")
    assert packages(version, spec()) == names
    assert packages(version, spec(dcgm_exporter=True)) == (*names, f"{NAME}-exporter")
    assert packages(version, spec(dcgm=False)) == packages("", spec()) == ()


@pytest.mark.parametrize(("values", "branch"), [
    ({"driver_version": "535.261.03"}, "535"),
    ({"driver_version": "535", "driver": "packages"}, "535"),
    ({"driver_version": "535.261.03", "driver": "preinstalled"}, "580"),
    ({"driver_version": "", "driver": "preinstalled"}, "580"),
])  # fmt: skip
def test_its_packages_are_those_of_the_driver_to_come(facts: HostFacts, values: dict[str, Any], branch: str) -> None:
    has = replace(facts, driver=replace(facts.driver, library_version="580.95.05"))
    assert dcgm.wanted_packages(source_of(has, spec(**values))) == packages(branch, spec())


def test_it_comes_from_nvidias_repository_in_the_same_installation(facts: HostFacts) -> None:
    source = source_of(facts, spec())
    assert f"{NAME}-4-cuda12" in software.wanted(source)
    assert [one.name for one in cuda_repository.repositories(source)] == ["cuda"]
    without = source_of(facts, spec(dcgm=False))
    assert not any(name.startswith(NAME) for name in software.wanted(without))
    assert cuda_repository.repositories(without) == () and dcgm.plan(without) == ()


@pytest.mark.parametrize(("there", "exporter", "units"), [
    (ServiceFacts(), False, (DCGM_UNIT,)),
    (ServiceFacts(), True, BOTH),
    (ServiceFacts((DCGM_UNIT,), (DCGM_UNIT,)), True, (DCGM_EXPORTER,)),
    (ServiceFacts((DCGM_UNIT,), ()), False, (DCGM_UNIT,)),
    (ServiceFacts((), (DCGM_UNIT,)), False, (DCGM_UNIT,)),
    (ServiceFacts(BOTH, BOTH), True, ()),
])  # fmt: skip
def test_stopped_unit_is_planned(facts: HostFacts, there: ServiceFacts, exporter: bool, units: tuple[str, ...]) -> None:
    changes = dcgm.plan(source_of(replace(facts, services=there), spec(dcgm_exporter=exporter)))
    assert changes == ((RunDcgm(units),) if units else ())
    # An image needs them enabled only.
    image = dcgm.plan(source_of(replace(facts, services=there, image=ImageFacts()), spec(dcgm_exporter=exporter)))
    lacking = tuple(unit for unit in BOTH[: 1 + exporter] if unit not in there.enabled)
    assert image == ((RunDcgm(lacking, start=False),) if lacking else ())
    assert CHANGE_KINDS["RunDcgm"] is RunDcgm and {*BOTH} <= {*UNITS}


@pytest.mark.parametrize("verb", ["is-active", "is-enabled"])
def test_units_of_unknown_state_are_not_restarted(host: DcgmHost, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host.write("/usr/bin/nv-hostengine", b"")
    monkeypatch.setattr(host, "_systemctl", lambda words: (124 if words[0] == verb else 0, ""))
    assert refused(gather_services, host).what == f"systemd does not tell about {DCGM_UNIT}"


def test_its_units_run_and_undo_restores_what_was(host: DcgmHost) -> None:
    host.states = {DCGM_UNIT: {"is-enabled"}}
    change = RunDcgm(BOTH)
    before = change.capture(host)
    assert change.summary() == f"enable and start {DCGM_UNIT}, {DCGM_EXPORTER}"
    change.apply(host, lambda *words: None)
    assert gather_services(host) == ServiceFacts(), "no command where there is no DCGM"
    host.write("/usr/bin/nv-hostengine", b"")
    assert gather_services(host) == ServiceFacts(BOTH, BOTH)
    RunDcgm.undo(host, before, {})
    assert host.states == {DCGM_UNIT: {"is-enabled"}, DCGM_EXPORTER: set()}


def test_a_unit_that_does_not_start_says_why(host: DcgmHost) -> None:
    host.failing_unit = DCGM_UNIT
    with pytest.raises(GpuprovError, match=f"{DCGM_UNIT} does not start") as raised:
        RunDcgm((DCGM_UNIT,)).apply(host, lambda *words: None)
    assert "the unit's last words" in str(raised.value)


def test_an_image_has_it_enabled_and_not_started(host: DcgmHost) -> None:
    RunDcgm((DCGM_UNIT,), start=False).apply(host, lambda *words: None)
    assert host.states == {DCGM_UNIT: {"is-enabled"}}


def test_what_prevents_it_is_told_before_anything_is_changed(facts: HostFacts) -> None:
    def told(facts: HostFacts = facts, **values: Any) -> list[str]:
        return [str(one) for find in (dcgm.problems, refusals) for one in find(source_of(facts, spec(**values)))]

    assert told() == told(dcgm=False) == []
    assert "gpuprov_dcgm: true" in told(dcgm=False, dcgm_exporter=True)[0]
    (unknown,) = told(driver="packages", driver_version="")
    assert "gpuprov_driver_version" in unknown
    old = replace(facts, packages=replace(facts.packages, installed={**facts.packages.installed, NAME: "1:3.3.9"}))
    (three,) = told(old)
    assert "DCGM 3 is installed" in three and f"{NAME} 1:3.3.9" in three
    assert f"systemctl disable --now nvidia-dcgm; apt-get purge {NAME}; gpuprov install" in three.replace("-y ", "")
    assert told(old, dcgm=False) == []
    config = f"{NAME}-config"
    both = replace(old, packages=replace(old.packages, installed={**old.packages.installed, config: "1:3.3.9"}))
    assert f"{NAME} {config}; gpuprov install" in told(both)[0]


def test_verify_compares_its_gpus_with_those_of_nvidia_smi(host: DcgmHost) -> None:
    def checked(**values: Any) -> str:
        found = check_of("DCGM", host, spec(**values))
        return found.on_host if found.status == "ok" else found.reason

    assert checked() == "2 GPUs"
    host.listed = _UUIDS[:1]
    assert f"lacks {_UUIDS[1]}; gpuprov health; systemctl restart {DCGM_UNIT}" in checked()
    host.listed = None
    assert re.search(f"unable to establish a connection.*systemctl restart {DCGM_UNIT}", checked(), re.DOTALL)
    host.listed = _UUIDS
    assert f"{DCGM_EXPORTER} does not run" in checked(dcgm_exporter=True)
    host.states = {DCGM_EXPORTER: {"is-active"}}
    assert checked(dcgm_exporter=True) == "2 GPUs"


@pytest.mark.parametrize("distro", ["ubuntu-24.04", "rocky-9"])
def test_a_bundle_collects_it_from_nvidias_repository(distro: str) -> None:
    made = make_recipe(Wanted(distro, "x86_64"), (spec(docker="preinstalled", driver_version="580.95.05"),))
    assert {*packages("580.95.05", spec())} <= {*made.packages}
    assert "cuda" in " ".join((*(one.name for one in made.repositories), *(one.name for one in made.rpm_sources)))
    with pytest.raises(UsageError, match="depends on the driver's branch"):
        make_recipe(Wanted(distro, "x86_64"), (spec(driver="preinstalled", driver_version="", docker="preinstalled"),))


def test_a_bundle_for_a_distributions_own_driver_has_the_one_of_its_branch() -> None:
    wanted = Wanted("ubuntu-24.04", "x86_64")
    made = make_recipe(wanted, (spec(driver="distribution", driver_version="", docker="preinstalled"),))
    assert f"{NAME}-4-core" in made.packages


def test_a_bundle_without_it_names_the_option(facts: HostFacts) -> None:
    facts = replace(facts, bundle=BundleFacts(replace(MANIFEST, version="*")))
    (problem,) = with_bundle.problems(facts, spec(), (f"{NAME}-4-core",), installs_driver=False)
    assert f"-e gpuprov_dcgm=true --package {NAME}-4-core" in problem.next_step
