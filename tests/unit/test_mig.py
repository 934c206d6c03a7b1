"""MIG: what nvidia-smi's tables say, what a layout means, and GPUs brought to it and back."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov.driver import mig
from gpuprov.driver.mig import DivideGpus, is_right, profiles_of
from gpuprov.facts import boot
from gpuprov.facts.driver import GpuHolder
from gpuprov.facts.gpus import MigGpu, gather_mig, parse_instances, parse_modes, parse_profiles
from gpuprov.facts.host import HostFacts, gather
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec, parse_spec
from tests import simgpu
from tests.unit.mig_host import LGIP, NONE, PENDING, MigHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root
# As nvidia-smi 535 and 550 print it for A100.
LGI = """\
+-------------------------------------------------------+
| GPU instances:                                        |
| GPU   Name             Profile  Instance   Placement  |
|                          ID       ID       Start:Size |
|=======================================================|
|   0  MIG 3g.20gb          9        2          4:4     |
+-------------------------------------------------------+
|   0  MIG 4g.20gb          5        1          0:4     |
+-------------------------------------------------------+
|   3  MIG 1g.5gb+me       20        7          0:1     |
+-------------------------------------------------------+
"""
# The genuine nvidia-smi 535 over NVML functions that answer Not Supported; either ends with 0.
UNABLE = """\
Unable to enable MIG Mode for GPU 00000000:1B:00.0: Not Supported
Treating as warning and moving on.
All done.
"""
NOT_ENABLED = "No MIG-enabled devices found.\n"


def test_the_tables_are_read() -> None:
    assert parse_instances(LGI) == {0: ("3g.20gb", "4g.20gb"), 3: ("1g.5gb+me",)}
    assert parse_instances(NONE) == {}
    assert parse_profiles(LGIP) == {0: {"1g.10gb": 7, "1g.10gb+me": 1, "3g.40gb": 2}}
    assert parse_modes("0, Enabled, Enabled\n1, Disabled, Enabled\n2, [N/A], [N/A]\n") == (
        (0, "Enabled", "Enabled"), (1, "Disabled", "Enabled"), (2, "[N/A]", "[N/A]"),
    )  # fmt: skip
    assert parse_modes("No devices were found\n") == ()


H100 = MigGpu(0, "Enabled", "Enabled", most={"1g.10gb": 7, "3g.40gb": 2})
WHOLE = replace(H100, current="Disabled", pending="Disabled")
LAYOUTS = {
    "whole, and so wanted": ("disabled", WHOLE, True),
    "no MIG at all, none wanted": ("disabled", MigGpu(0, "[N/A]", "[N/A]"), True),
    "no MIG at all, in other words": ("disabled", MigGpu(0, "N/A", "N/A"), True),
    "no MIG at all": ("all-1g.10gb", MigGpu(0, "[N/A]", "[N/A]"), False),
    "on without instances": ("disabled", H100, False),
    "nothing said": ("", H100, True),
    "all of a kind": ("all-1g.10gb", replace(H100, instances=("1g.10gb",) * 7), True),
    "one is missing": ("all-1g.10gb", replace(H100, instances=("1g.10gb",) * 6), False),
    "no such profile": ("all-2g.99gb", H100, False),
    "a mix, in another order": ("3g.40gb,1g.10gb", replace(H100, instances=("1g.10gb", "3g.40gb")), True),
    "another mix": ("3g.40gb", replace(H100, instances=("1g.10gb", "3g.40gb")), False),
    "not on yet": ("3g.40gb", WHOLE, False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gpu_is_divided_as_the_layout_says_or_not(name: str) -> None:
    text, gpu, right = LAYOUTS[name]
    assert is_right(text, gpu) is right


def test_one_text_is_for_all_gpus_a_list_for_each(facts: HostFacts) -> None:
    addresses = [f"0000:{bus}:00.0" for bus in ("0b", "1b", "2b")]
    facts = replace(facts, gpus=tuple(replace(facts.gpus[0], bus_id=one) for one in addresses))
    assert mig.wanted(facts, spec("all-1g.10gb")) == tuple((one, "all-1g.10gb") for one in addresses)
    assert mig.wanted(facts, spec("disabled", "3g.40gb")) == ((addresses[0], "disabled"), (addresses[1], "3g.40gb"))
    assert profiles_of("all-3g.40gb", H100) == ("3g.40gb", "3g.40gb")


@pytest.fixture
def host(tmp_path: Path) -> MigHost:
    return MigHost(tmp_path / "root")


def divide(host: MigHost, text: str, index: int = 0) -> DivideGpus:
    told: list[tuple[str, int, int]] = []
    change = DivideGpus(((index, text),))
    change.apply(host, lambda *words: told.append(words))
    assert told == [(f"GPU {index}: {text}", 0, 0)]
    return change


def test_mig_is_switched_on_and_filled(host: MigHost) -> None:
    divide(host, "all-1g.10gb")
    assert host.instances == ["1g.10gb"] * 7
    assert host.changes == [("-i", "0", "-mig", "1"), ("mig", "-i", "0", "-cgi", ",".join(["1g.10gb"] * 7), "-C")]
    assert is_right("all-1g.10gb", gather_mig(host)[0])


@pytest.mark.parametrize(("bare", "wrong"), [(0, False), (1, True), (7, True)])
def test_instances_that_containers_cannot_use_are_made_again(host: MigHost, bare: int, wrong: bool) -> None:
    host.mode = host.pending = "Enabled"
    host.instances, host.bare = ["1g.10gb"] * 7, bare
    (gpu,) = gather_mig(host)
    assert (gpu.incomplete, is_right("all-1g.10gb", gpu)) == (wrong, not wrong)
    assert (" (without compute instances)\n" in DivideGpus(((0, "all-1g.10gb"),)).diff(host)) is wrong
    divide(host, "all-1g.10gb")
    assert is_right("all-1g.10gb", gather_mig(host)[0])


def test_instances_without_compute_instances_are_an_error(host: MigHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi exits with 0 after many failures, of -C too."""
    alone = host._smi
    monkeypatch.setattr(host, "_smi", lambda words: (6, NONE) if words == ["mig", "-lci"] else alone(words))
    with pytest.raises(GpuprovError, match="GPU 0 is not divided as asked") as raised:
        divide(host, "3g.40gb")
    (problem,) = raised.value.problems
    assert problem.evidence.startswith("there is 3g.40gb (without compute instances), asked for was 3g.40gb")


def test_a_list_of_compute_instances_that_fails_tells_nothing(host: MigHost) -> None:
    host.mode = host.pending = "Enabled"
    host.instances, host.answers = ["1g.10gb"] * 7, {"-lci": (255, "Failed to display compute instances\n")}
    assert not gather_mig(host)[0].incomplete


def test_instances_that_are_not_listed_are_not_taken_for_none(host: MigHost) -> None:
    """They would be divided again, and the way back would be a GPU without instances."""
    host.mode = host.pending = "Enabled"
    host.instances, host.answers = ["3g.40gb"], {"-lgi": (255, "Failed to display GPU instances: Unknown Error\n")}
    change = DivideGpus(((0, "3g.40gb"),))
    for look in (lambda: gather_mig(host), lambda: change.capture(host), lambda: divide(host, "3g.40gb")):
        with pytest.raises(GpuprovError, match="the MIG devices of this host can't be listed") as raised:
            look()
    assert "Failed to display GPU instances" in raised.value.problems[0].evidence
    assert host.changes == []


@pytest.mark.parametrize("corrupt", [False, True])
def test_other_instances_are_replaced_and_undo_brings_them_back(host: MigHost, corrupt: bool) -> None:
    host.mode, host.pending, host.corrupt = "Enabled", "Enabled", corrupt
    host.instances = ["3g.40gb"]
    change = DivideGpus(((0, "1g.10gb,1g.10gb"),))
    before = change.capture(host)
    assert change.diff(host) == "-GPU 0: 3g.40gb\n+GPU 0: 1g.10gb,1g.10gb"
    change.apply(host, lambda *words: None)
    assert host.instances == ["1g.10gb", "1g.10gb"]
    made = ("mig", "-i", "0", "-cgi", "1g.10gb,1g.10gb", "-C")
    assert host.changes == [("mig", "-i", "0", "-dci"), ("mig", "-i", "0", "-dgi"), made]
    for _ in range(2):
        DivideGpus.undo(host, before, {})
        assert (host.mode, host.instances) == ("Enabled", ["3g.40gb"])


@pytest.mark.parametrize(("mode", "instances"), [("Disabled", []), ("Enabled", []), ("Enabled", ["1g.10gb"])])
def test_undo_restores_and_a_second_undo_changes_nothing(host: MigHost, mode: str, instances: list[str]) -> None:
    host.mode, host.pending, host.instances = mode, mode, list(instances)
    change = DivideGpus(((0, "3g.40gb"),))
    before = change.capture(host)
    change.apply(host, lambda *words: None)
    # GPU 7 is gone.
    DivideGpus.undo(host, {"before": {"7": "1g.10gb", **before["before"]}}, {})
    assert (host.mode, host.instances) == (mode, instances)
    host.changes.clear()
    DivideGpus.undo(host, before, {})
    assert host.changes == []


@pytest.mark.parametrize("answer", [(0, ""), (9, "NVIDIA-SMI has failed"), (127, "")])
def test_undo_skips_a_lost_gpu(host: MigHost, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str]) -> None:
    """No other way led to the end of a rollback, an uninstall or the next installation."""
    before, told = DivideGpus(((0, "3g.40gb"),)).capture(host), "GPU 0 is gone, or has no driver: its MIG layout stays"
    assert DivideGpus.irreversible(host, before, {}, ()) == ()
    monkeypatch.setattr(host, "_smi", lambda words: answer)
    assert DivideGpus.irreversible(host, before, {}, ()) == (told,)
    DivideGpus.undo(host, before, {})
    assert host.changes == []
    monkeypatch.setattr(host, "_smi", lambda words: (124, ""))
    assert refused(gather_mig, host).what == "nvidia-smi does not tell which GPUs there are"
    assert refused(DivideGpus.undo, host, before, {}).what == "nvidia-smi does not tell which GPUs there are"


def test_all_gpus_are_shown_and_those_of_the_layout_noted(host: MigHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.mode, host.pending, host.instances = "Enabled", "Enabled", ["1g.10gb", "3g.40gb"]
    alone = host._smi
    more = {"--query-gpu=index,mig.mode.current,mig.mode.pending": "1, Disabled, Disabled\n"}
    monkeypatch.setattr(host, "_smi", lambda words: (0, alone(words)[1] + more.get(words[0], "")))
    change = DivideGpus(((0, "1g.10gb"), (1, "3g.40gb"), (2, "disabled")))
    assert change.summary() == "divide GPUs by MIG: GPU 0: 1g.10gb; GPU 1: 3g.40gb; GPU 2: disabled"
    assert change.diff(host).splitlines() == [
        "-GPU 0: 1g.10gb,3g.40gb", "+GPU 0: 1g.10gb", "-GPU 1: Disabled", "+GPU 1: 3g.40gb", "-GPU 2: ?",
        "+GPU 2: disabled",
    ]  # fmt: skip
    assert change.capture(host) == {"before": {"0": "1g.10gb,3g.40gb", "1": "disabled"}}
    assert DivideGpus(((1, "3g.40gb"),)).capture(host) == {"before": {"1": "disabled"}}


def test_a_gpu_that_is_not_there_is_named(host: MigHost) -> None:
    with pytest.raises(GpuprovError, match="there is no GPU 1 to divide") as raised:
        divide(host, "3g.40gb", 1)
    (problem,) = raised.value.problems
    assert problem.evidence == "nvidia-smi --query-gpu=index,mig.mode.current,mig.mode.pending --format=csv,noheader"
    assert problem.next_step.startswith("nvidia-smi -L")
    assert host.changes == []


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        (("1g.10gb", "1g.10gb+me", "3g.40gb"), "3g.40gb,1g.10gb,1g.10gb+me"),
        (("2g.20gb", "10g.99gb", "1g.20gb"), "10g.99gb,2g.20gb,1g.20gb"),
    ],
)
def test_the_largest_profiles_are_made_first(profiles: tuple[str, ...], words: str) -> None:
    assert mig.largest_first(profiles) == words


def test_what_needs_a_reset_gets_one(host: MigHost) -> None:
    host.busy = host.resets = True
    divide(host, "3g.40gb")
    assert ("--gpu-reset", "-i", "0") in host.changes
    assert host.instances == ["3g.40gb"]


class MonitoredHost(MigHost):
    """One on which DCGM and its exporter run and have the GPU open; `refused`: a unit that does not start again."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.units, self.refused = ["nvidia-dcgm-exporter.service", "nvidia-dcgm.service"], ""
        self.order: list[str] = []

    def _smi(self, words: list[str]) -> tuple[int, str]:
        self.busy = bool(self.units)
        return super()._smi(words)

    def _systemctl(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[0] == "is-active":
            return 0, "".join("active\n" if unit in self.units else "inactive\n" for unit in words[1:])
        self.order.append(" ".join(words))
        if words[1] == self.refused and words[0] == "start":
            return 1, "Job failed."
        self.units = [*self.units, words[1]] if words[0] == "start" else [one for one in self.units if one != words[1]]
        return 0, ""


_AROUND = [
    "stop nvidia-dcgm-exporter.service", "stop nvidia-dcgm.service",
    "start nvidia-dcgm.service", "start nvidia-dcgm-exporter.service",
]  # fmt: skip


def test_dcgm_is_stopped_meanwhile_and_started_again(tmp_path: Path) -> None:
    host = MonitoredHost(tmp_path / "root")
    change = DivideGpus(((0, "3g.40gb"),))
    before = change.capture(host)
    change.apply(host, lambda *words: None)
    assert (host.mode, host.instances, host.order) == ("Enabled", ["3g.40gb"], _AROUND)
    DivideGpus.undo(host, before, {})
    assert (host.mode, host.instances, host.order) == ("Disabled", [], _AROUND * 2)
    host.mode = host.pending = "Enabled"
    host.order.clear()
    DivideGpus.undo(host, DivideGpus(((0, "3g.40gb"),)).capture(host), {})
    assert host.order == [], "nothing is to be done"


def test_an_undo_ends_though_dcgm_does_not_start_again(tmp_path: Path) -> None:
    host = MonitoredHost(tmp_path / "root")
    before = DivideGpus(((0, "3g.40gb"),)).capture(host)
    host.mode, host.refused = "Enabled", "nvidia-dcgm.service"
    DivideGpus.undo(host, before, {})
    assert (host.mode, host.units) == ("Disabled", ["nvidia-dcgm-exporter.service"])


def test_dcgm_runs_again_after_a_division_that_fails_and_one_that_does_not_is_told(tmp_path: Path) -> None:
    host, told = MonitoredHost(tmp_path / "root"), []
    host.refused = "nvidia-dcgm-exporter.service"
    with pytest.raises(GpuprovError, match="has no MIG profile"):
        DivideGpus(((0, "all-2g.99gb"),)).apply(host, lambda text, *counts: told.append(text))
    assert host.units == ["nvidia-dcgm.service"]
    assert told[-1].startswith("nvidia-dcgm-exporter.service did not start again: ")


ON, OFF = "Enabled", "Disabled"
USED = "Unable to destroy a Compute instance: In use by another client"
DENIED = "Unable to enable MIG Mode for GPU 00000000:1B:00.0: Insufficient Permissions\nTerminating early"
# The layout, the mode before, the program's answers; the problem and its evidence.
FAULTS: dict[str, tuple[str, str, dict[str, tuple[int, str]], str, str]] = {
    "in use": ("3g.40gb", OFF, {"-mig": (0, PENDING)}, "MIG on GPU 0 is Disabled, Enabled only after a reset",
        "All done.\nprocess 1 (a) has /dev/nvidia0 open\nprocess 2 (b) has /dev/nvidia0 open"),
    "no MIG": ("3g.40gb", "[N/A]", {}, "GPU 0 can't be divided: it has no MIG",
        "mig.mode.pending --format=csv,noheader: 0, [N/A], "),
    "no such profile": ("all-2g.99gb", OFF, {}, "GPU 0 has no MIG profile 2g.99gb", "1g.10gb, 1g.10gb+me, 3g.40gb"),
    "not supported": ("3g.40gb", OFF, {"-mig": (0, UNABLE)}, "MIG on GPU 0 is Disabled", "Unable to enable MIG Mode"),
    "denied": ("3g.40gb", OFF, {"-mig": (4, DENIED)}, "GPU 0: MIG can't be switched enabled",
        f"`nvidia-smi -i 0 -mig 1` exited 4\n{DENIED}"),
    "not made": ("1g.10gb,3g.40gb", ON, {"-cgi": (0, NOT_ENABLED)}, "GPU 0 is not divided as asked, though nvidia-smi",
        f"there is nothing, asked for was 1g.10gb,3g.40gb\n{NOT_ENABLED}".strip()),
    "used": ("3g.40gb", ON, {"-dci": (19, USED)}, "GPU 0: its instances can't be removed",
        f"`nvidia-smi mig -i 0 -dci` exited 19\n{USED}\nprocess 1 (a) has /dev/nvidia0 open\nprocess 2 (b) has"),
    "no room": ("3g.40gb,4g.40gb", ON, {"-cgi": (19, "Insufficient Resources")}, "GPU 0: 3g.40gb,4g.40gb can't be made",
        "Insufficient Resources"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_can_not_be_is_said(host: MigHost, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, host.mode, host.answers, what, evidence = FAULTS[name]
    users = tuple(GpuHolder(pid, command, "/dev/nvidia0") for pid, command in ((1, "a"), (2, "b")))
    monkeypatch.setattr(mig, "gather_holders", lambda system: users if system is host else ())
    if name == "used":
        host.instances = ["1g.10gb"]
    problem = refused(divide, host, text)
    assert what in problem.what
    assert evidence in problem.evidence and problem.next_step
    assert name != "no MIG" or "A30" in problem.next_step


def test_gpu_instances_without_compute_instances_are_replaced(host: MigHost) -> None:
    host.mode, host.instances = ON, ["1g.10gb"]
    host.answers = {"-dci": (6, "No compute instances found: Not Found\n")}
    divide(host, "3g.40gb")
    assert host.instances == ["3g.40gb"]


def test_a_gpu_without_mig_is_as_it_should_be_where_none_is_wanted(host: MigHost) -> None:
    host.mode = host.pending = "[N/A]"
    divide(host, "disabled")
    assert host.changes == []


# -- the plan --------------------------------------------------------------------------------------------------------


def spec(*layout: str) -> HostSpec:
    return parse_spec({"driver": "preinstalled", "mig_layout": list(layout)})


@pytest.fixture
def facts(host: MigHost) -> HostFacts:
    simgpu.install_tree(host.root)
    return replace(gather(host), mig=gather_mig(host))


def test_a_layout_that_is_there_asks_for_nothing(host: MigHost, facts: HostFacts) -> None:
    (change,) = mig.plan(source_of(facts, spec("3g.40gb,3g.40gb")))
    assert change.summary() == "divide GPUs by MIG: GPU 0: 3g.40gb,3g.40gb"
    change.apply(host, lambda *words: None)
    assert mig.plan(source_of(replace(facts, mig=gather_mig(host)), spec("3g.40gb,3g.40gb"))) == ()
    assert mig.plan(source_of(facts, spec())) == ()
    assert mig.plan(source_of(facts, spec("disabled"))) == ()
    # The layout may be there: nvidia-smi was killed while it was asked, or gpuprov-mig.service has been faster.
    made = list(host.changes)
    change.apply(host, lambda *words: None)
    assert host.changes == made
    # What is not known is divided: nvidia-smi does not answer, does not know the GPU, or is to be replaced.
    for unknown in ((), (MigGpu(1, "Disabled", "Disabled"),)):
        assert mig.plan(source_of(replace(facts, mig=unknown), spec("disabled"))) == (DivideGpus(((0, "disabled"),)),)
    other = parse_spec({"driver_version": "570.10", "mig_layout": ["disabled"]})
    assert mig.plan(source_of(facts, other)) == (DivideGpus(((0, "disabled"),)),)


def test_a_gpu_that_the_driver_does_not_serve_moves_no_layout_to_another(host: MigHost, facts: HostFacts) -> None:
    """One that failed at the boot, or is excluded, has no number in NVML: those behind it have lower ones."""
    simgpu.write_kernel_tree(host.root, 1)
    driver, (own,) = gather(host).driver, facts.gpus
    dead = replace(own, bus_id="0000:01:00.0", driver="")
    assert [dead.bus_id < one.bus_id == own.bus_id for one in driver.gpus] == [True]
    broken = replace(facts, gpus=(dead, own), driver=driver)
    assert mig.plan(source_of(broken, spec("3g.40gb", "disabled"))) == ()
    assert mig.plan(source_of(broken, spec("all-1g.10gb"))) == (DivideGpus(((0, "all-1g.10gb"),)),)
    # A list for the GPUs that NVML numbers, as on a host with an excluded one.
    two = replace(driver, gpus=tuple(replace(driver.gpus[0], index=n, bus_id=bus) for n, bus in enumerate(("a", "c"))))
    excluded = replace(facts, gpus=tuple(replace(own, bus_id=bus) for bus in "abc"), driver=two)
    assert mig.plan(source_of(excluded, spec("disabled", "3g.40gb"))) == (DivideGpus(((1, "3g.40gb"),)),)
    assert mig.wanted(excluded, spec("disabled", "disabled", "3g.40gb"))[2] == ("c", "3g.40gb")
    # Another driver may serve both.
    other = parse_spec({"driver_version": "570.10", "mig_layout": ["3g.40gb", "disabled"]})
    assert mig.plan(source_of(broken, other)) == (DivideGpus(((0, "3g.40gb"), (1, "disabled"))),)


def test_the_layout_comes_back_at_each_boot(facts: HostFacts) -> None:
    changes = [item.change for item in make_plan(facts, spec("all-1g.10gb"), ("boot",)).changes]
    files = dict(changes[0].files)  # type: ignore[attr-defined]
    text = files[f"{boot.UNITS}/{boot.MIG}"].decode()
    bus = facts.gpus[0].bus_id
    assert f"nvidia-smi -i {bus} -mig 1 && nvidia-smi mig -i {bus} -cgi 1g.10gb -C && while" in text
    changes = [item.change for item in make_plan(facts, spec("disabled"), ("boot",)).changes]
    assert f"{boot.UNITS}/{boot.MIG}" not in dict(changes[0].files)  # type: ignore[attr-defined]


def test_a_boot_without_one_gpu_divides_no_other_in_its_place(facts: HostFacts) -> None:
    """NVML then gives the other GPUs lower numbers; a GPU of virtual machines has none."""
    names = [(f"0000:{bus}:00.0", driver) for bus, driver in (("0b", "nvidia"), ("1b", "vfio-pci"), ("2b", "nvidia"))]
    gpus = tuple(replace(facts.gpus[0], bus_id=bus, driver=driver) for bus, driver in names)
    (item,) = make_plan(replace(facts, gpus=gpus), spec("disabled", "3g.40gb"), ("boot",)).changes
    text = dict(item.change.files)[f"{boot.UNITS}/{boot.MIG}"].decode()  # type: ignore[attr-defined]
    assert set(re.findall(r"-i (\S+)", text)) == {"0000:2b:00.0"}


def test_a_system_container_and_too_long_a_list_are_refused(facts: HostFacts) -> None:
    inside = replace(facts, kernel=replace(facts.kernel, container="lxc"))
    assert any("the container host" in one.what for one in refusals(source_of(inside, spec("disabled"))))
    assert mig.problems(inside, spec("disabled", "disabled")) == ()
    (problem,) = mig.problems(facts, spec("disabled", "disabled"))
    assert problem.what == "gpuprov_mig_layout speaks of 2 GPUs, this host has 1"
    two = replace(facts, gpus=(*facts.gpus, replace(facts.gpus[0], bus_id="0000:2b:00.0")))
    (problem,) = mig.problems(two, spec(*["disabled"] * 3))
    assert problem.evidence == ", ".join(gpu.bus_id for gpu in two.gpus) and problem.next_step
    # NVML has no number for a GPU of virtual machines.
    guests = replace(two, gpus=(replace(two.gpus[0], driver="vfio-pci"), two.gpus[1]))
    (problem,) = mig.problems(guests, spec("disabled", "3g.40gb"))
    assert (problem.what, problem.evidence) == (
        "gpuprov_mig_layout speaks of 2 GPUs, this host has 1", two.gpus[1].bus_id,
    )  # fmt: skip
    both = replace(spec("disabled", "3g.40gb"), mig_config="all-balanced")
    (problem,) = mig.problems(inside, both)
    assert problem.evidence == "gpuprov_mig_layout is disabled,3g.40gb, gpuprov_mig_config is all-balanced"
    assert problem.what and problem.next_step


@pytest.mark.parametrize(
    ("gpus", "texts", "fits"), [(0, 1, True), (0, 2, False), (1, 1, True), (2, 1, True), (2, 2, True), (2, 3, False)]
)
def test_a_layout_has_one_text_or_one_for_each_gpu(facts: HostFacts, gpus: int, texts: int, fits: bool) -> None:
    assert (mig.problems(replace(facts, gpus=facts.gpus * gpus), spec(*["disabled"] * texts)) == ()) is fits


def test_mig_without_devices_is_a_layout_of_its_own() -> None:
    assert is_right("enabled", replace(H100, current="Enabled", instances=()))
    assert not is_right("enabled", replace(H100, current="Enabled", instances=("1g.10gb",)))
    assert not is_right("enabled", replace(H100, current="Disabled", instances=()))
