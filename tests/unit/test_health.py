"""`gpuprov health`: from readings to verdicts, exit codes and events."""

import json
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov import doctor
from gpuprov.agent.playbook_task import task_result
from gpuprov.agent.result import HostResult
from gpuprov.checks.health import Readings, examine, judge, next_step, rules, with_expected_links, xid_rows
from gpuprov.checks.memory import Gpu
from gpuprov.core.commands import NOT_FOUND, TIMED_OUT, Completed
from gpuprov.protocol import tables
from gpuprov.protocol.errors import ExitCode, Problem, Stopped, worst
from gpuprov.protocol.events import CheckDone, Event, Finished, HealthFound, Note
from gpuprov.protocol.tables import PACKAGED
from tests.simgpu import write_kernel_tree
from tests.unit.fake_host import FakeHost
from tests.unit.health_cases import CASES, Case, healthy

_WELL = (healthy(0), healthy(1))
_XID = "NVRM: Xid (PCI:0000:1b:00): {}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_trouble_gives_its_verdict_and_next_step(case: Case) -> None:
    ours = ({**healthy(0), **case.readings}, healthy(1))
    (found,) = judge(replace(case.host or Readings(ours), kernel_log=case.log))
    assert (found.rule, found.verdict) == (case.rule, case.verdict)
    assert case.what in found.what
    assert case.next_step in found.next_step
    assert "{" not in found.next_step
    assert found.gpu == ("" if case.host else "0")
    assert found.evidence


def test_the_table_has_at_least_forty_troubles_and_each_rule() -> None:
    assert len(CASES) >= 40
    named = {row["rule"] for row in rules()["rules"]} | set(rules()["host"])
    assert {case.rule for case in CASES if not case.rule.startswith("xid-")} == named


def test_each_word_for_a_next_step_is_an_action() -> None:
    for row in (*rules()["rules"], *rules()["host"].values()):
        assert " " in next_step(row.get("next", "a sentence of its own"))
    xids = tables.packaged(tables.XIDS)
    assert set(rules()["xids"]) == set(xids["actions"]) == {one["action"] for one in xids["xids"]}


# What the words of NVIDIA's catalogue for the immediate action mean in ours.
_BUCKETS = {
    "RESET_GPU": {"reset", "replace"}, "WORKFLOW_XID_48": {"reset"}, "XID_154": {"reset"}, "RESTART_BM": {"reboot"},
    "RESTART_VM": {"reboot"}, "WORKFLOW_NVLINK_ERR": {"nvlink"}, "WORKFLOW_NVLINK5_ERR": {"nvlink"},
    "RESTART_APP": {"sanitize", "ecc-program"}, "CHECK_MECHANICALS": {"mechanics"}, "CONTACT_SUPPORT": {"report"},
    "IGNORE": {"program", "later", "ecc", "report"}, "(none)": {"cool", "ecc-on"},
}  # fmt: skip


def test_each_xid_has_its_source_and_an_action_that_agrees_with_it() -> None:
    table = tables.packaged(tables.XIDS)
    for row in (*table["xids"], *table["named"]):
        immediate = row["nvidia"].partition(" / ")[0]
        assert row["action"] in _BUCKETS[immediate], row["xid"]
        assert row.get("eks", immediate).partition(",")[0] == immediate, row["xid"]
        assert immediate not in ("IGNORE", "(none)") or row["why"]
    asked = {46, 110, 136, *range(142, 152), 155, 156, 158, 163, 168}
    assert asked <= {*xid_rows()}


def test_a_healthy_host_has_nothing() -> None:
    assert judge(Readings(_WELL, "550.2", on_bus=2)) == ()
    assert judge(Readings()) == ()


def test_the_table_names_no_place_twice_where_an_earlier_rule_says_more() -> None:
    reason = "clocks_event_reasons/clocks_event_reason_hw_"
    hot = {**healthy(), f"{reason}thermal_slowdown": "Active", f"{reason}slowdown": "Active"}
    hot["temperature/gpu_temp_tlimit"] = "-3 C"
    assert [one.rule for one in judge(Readings((hot,)))] == ["thermal-slowdown"]


def test_an_idle_link_saves_power_and_is_no_trouble() -> None:
    place = "pci/pci_gpu_link_info/"
    idle = {**healthy(), f"{place}pcie_gen/current_link_gen": "1", f"{place}link_widths/current_link_width": "1x"}
    assert judge(Readings((idle,))) == ()
    busy = {**idle, "utilization/gpu_util": "35 %"}
    assert [one.rule for one in judge(Readings((busy,)))] == ["pcie-generation", "pcie-width"]


@pytest.mark.parametrize(("mig", "switches", "expected"), [
    ((), False, [12, 12]), ((0,), False, [0, 0]), ((0,), True, [0, 12]),
])  # fmt: skip
def test_a_model_has_its_nvlinks_except_in_mig_mode(mig: tuple[int, ...], switches: bool, expected: list[int]) -> None:
    gpus = tuple(
        {"uuid": f"GPU-{n}", "pci/pci_device_id": "20B210DE", "nvlink/active": "0" if n in mig else "12",
         "mig_mode/current_mig": "Enabled" if n in mig else "Disabled"} for n in range(2)
    )  # fmt: skip
    before = [Gpu(f"GPU-{n}", "A100", f"0000:0{n}:00.0", 12) for n in range(2)]
    for remembered in ((), before):
        found = with_expected_links(gpus, remembered, PACKAGED, switches=switches)
        assert [int(gpu["nvlink/expected"]) for gpu in found] == expected


@pytest.mark.parametrize("gpu", [
    # A desktop whose screen is drawn: some percent of a GPU that runs at its lowest clocks.
    {"utilization/gpu_util": "23 %", "performance_state": "P8", "display_active": "Enabled",
     "persistence_mode": "Disabled", "pci/pci_gpu_link_info/pcie_gen/current_link_gen": "1"},
    {"product_name": "NVIDIA RTX A2000 Laptop GPU", "persistence_mode": "Disabled"},
    {"product_brand": "GeForce", "persistence_mode": "Disabled"},
    {"gpu_virtualization_mode/virtualization_mode": "VGPU", "memory without a process": "2064 MiB"},
    {"addressing_mode": "ATS", "memory without a process": "23552 MiB"},
], ids=["desktop", "laptop", "GeForce", "vGPU", "Grace"])  # fmt: skip
def test_what_is_normal_on_a_kind_of_gpu_is_no_trouble(gpu: dict[str, str]) -> None:
    assert judge(Readings(({**healthy(), **gpu},))) == ()


@pytest.mark.parametrize("value", ["N/A", "[N/A]", "", "Not Supported"])
def test_what_a_gpu_does_not_report_is_no_trouble(value: str) -> None:
    assert judge(Readings(({**dict.fromkeys(healthy(), value), "uuid": "GPU-0", "pci/pci_bus_id": "0:1:0"},))) == ()


def test_unfit_comes_first() -> None:
    gpu = {**healthy(), "persistence_mode": "Disabled", "compute_mode": "Prohibited"}
    assert [one.verdict for one in judge(Readings((gpu,)))] == ["unfit", "degraded"]


_ASKS = _XID.format("154, GPU recovery action changed from 0x0 (None) to {}")
_ASKS_RESET, _ASKS_REBOOT = _ASKS.format("0x1 (GPU Reset Required)"), _ASKS.format("0x2 (Node Reboot Required)")
_RESET = _XID.format("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
_KERNEL = "2026-11-23T19:00:00+0000 gpu1 kernel: "
_LOADED = f"{_KERNEL}NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.105.08"
_DBE, _CONTAINED, _FALLEN = (
    _XID.format(words) for words in ("48, pid=7", "95, pid=7", "79, GPU has fallen off the bus.")
)
# Recovery action that the driver gives, lines of the kernel log → the rules.
LOGS: list[tuple[str, tuple[str, ...], list[str]]] = [
    # A verdict of the driver counts, unless the kernel log has a newer one.
    ("GPU Reset", (), ["unfit: recovery-reset"]),
    ("GPU Reset", (_RESET,), []),
    # Xids of programs, and an unknown one.
    *(("", (_XID.format(f"{number}, pid=7"),), []) for number in (31, 43, 13, 9999)),
    # A reset settles what came before it.
    ("", (_CONTAINED, _RESET), []),
    ("", (_RESET, _CONTAINED), ["degraded: xid-95"]),
    # So does loading the driver, except for a reboot.
    ("", (_DBE, _ASKS_RESET, _LOADED), []),
    ("", (_ASKS_REBOOT, _LOADED), ["unfit: recovery-reboot"]),
    ("", (_LOADED, _DBE), ["unfit: xid-48"]),
    # Lines that a user can make.
    ("", ("[ 9.1] Xid (PCI:0): 79[4242]: segfault at 0 ip 0000000000401136 sp 00007ffc9d7c1d10 error 6 in a.out",), []),
    ("", (f"[ 9.1] oom-kill:task_memcg=/user.slice/{_XID.format('79, x,task=a.out,pid=7,uid=1000')}",), []),
    ("", (f"{_KERNEL}Xid (PCI:0): 79[4242]: segfault at 0",), []),
    # The prefixes of logs.
    *(
        ("", (prefix + _FALLEN,), ["unfit: xid-79"])
        for prefix in ("", "[ 9.1] ", "[    9.123456] [  T1946] ", "[    9.1][    T7] ", "<4>[ 9.1] ", _KERNEL)
    ),
]


@pytest.mark.parametrize(("action", "log", "found"), LOGS)
def test_the_kernel_log_tells_xids(action: str, log: tuple[str, ...], found: list[str]) -> None:
    gpu = {**healthy(), "gpu_recovery_action": action}
    told = judge(Readings((gpu, healthy(1)), kernel_log=log))
    assert [f"{one.verdict}: {one.rule}" for one in told] == found
    assert all(any(line in one.evidence for line in log) for one in told if one.rule.startswith("xid"))


def test_an_xid_of_a_gpu_that_is_gone_is_the_hosts() -> None:
    (found,) = judge(Readings((healthy(1),), kernel_log=(_XID.format("79, GPU has fallen off the bus."),)))
    assert (found.gpu, found.verdict) == ("", "unfit")
    assert "0000:1b:00" in found.what


def test_the_doctor_says_the_same_of_the_same_trouble() -> None:
    table = json.loads((Path(doctor.__file__).parent / "rules.json").read_text())["rules"]
    own = {row["name"]: row["meaning"] for row in table if "meaning" in row}
    assert not own.keys() & {row["rule"] for row in rules()["rules"]}
    assert own.keys() & rules()["host"].keys() == {"gpus-fewer"}  # seen at another place
    assert {own[name] for name in ("fallen-off-bus", "gsp-timeout")} == {
        row["what"] for row in tables.packaged(tables.XIDS)["named"]
    }


def test_exit_codes_stand_in_their_order() -> None:
    order = [ExitCode(number) for number in (2, 1, 7, 4, 3, 6, 0)]
    assert [worst(order[place:]) for place in range(len(order))] == order


@pytest.mark.parametrize(("code", "failed"), [(ExitCode.UNFIT, True), (ExitCode.DEGRADED, False)])
def test_unfit_counts_as_a_failure_and_degraded_does_not(code: ExitCode, failed: bool) -> None:
    found = (Problem("unfit or degraded", "seen", "reboot"),)
    result = task_result("health", [Finished(int(code), problems=found, summary="1 finding")])
    assert (result.failed, HostResult("a", code).has_failed) == (failed, failed)
    assert result.msg.startswith("unfit or degraded; next: reboot")
    assert not result.changed


class HealthHost(FakeHost):
    """A host whose nvidia-smi prints a given report, and which gives the kernel log to `journalctl`."""

    report = Completed(("nvidia-smi",), NOT_FOUND)
    journal = Completed(("journalctl",), NOT_FOUND, stderr="not found")

    def which(self, program: str) -> str | None:
        there = ("journalctl", "dmesg", *(["nvidia-smi"] if self.report.ok else []))
        return f"/usr/bin/{program}" if program in there else None

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        words = tuple(argv)
        if words[0] == "nvidia-smi":
            return self.report
        if words[0] == "journalctl":
            return self.journal
        return Completed(words, NOT_FOUND)

    def examined(self) -> tuple[Finished, list[Event]]:
        events: list[Event] = []
        return examine(self, events.append), events

    def rules_found(self) -> list[str]:
        return [one.rule for one in self.examined()[1] if isinstance(one, HealthFound)]


@pytest.mark.parametrize(("journal", "notes", "code"), [
    (Completed((), 1), 0, ExitCode.DONE),
    (Completed((), 1, stderr="No journal files were opened due to insufficient permissions."), 1, ExitCode.DONE),
    (Completed((), 0, _XID.format("62, pid=7")), 0, ExitCode.UNFIT),
])  # fmt: skip
def test_a_reader_of_the_journal_needs_no_dmesg(tmp_path: Path, journal: Completed, notes: int, code: ExitCode) -> None:
    host = HealthHost(tmp_path)
    host.report, host.journal = report_of("", ""), journal
    finished, events = host.examined()
    assert finished.exit_code == code
    assert sum(isinstance(one, Note) for one in events) == notes


def report_of(*gpus: str) -> Completed:
    text = "".join(f'<gpu id="0"><uuid>GPU-{n}</uuid>{gpu}</gpu>' for n, gpu in enumerate(gpus))
    return Completed(("nvidia-smi",), 0, f"<?xml version='1.0'?><nvidia_smi_log>{text}</nvidia_smi_log>")


@pytest.mark.parametrize(("gpus", "code", "words"), [
    (("", ""), ExitCode.DONE, "ok: 2 GPUs"),
    (("<persistence_mode>Disabled</persistence_mode>",) * 2, ExitCode.DEGRADED, "degraded: 2 findings"),
    (("<compute_mode>Prohibited</compute_mode>", "<persistence_mode>Disabled</persistence_mode>"), ExitCode.UNFIT,
     "unfit: 2 findings"),
])  # fmt: skip
def test_the_exit_code_is_the_worst_gpus(tmp_path: Path, gpus: tuple[str, ...], code: ExitCode, words: str) -> None:
    host = HealthHost(tmp_path)
    host.report = report_of(*gpus)
    finished, events = host.examined()
    assert (finished.exit_code, finished.summary) == (code, words)
    found = [one for one in events if isinstance(one, HealthFound)]
    checks = [one for one in events if isinstance(one, CheckDone)]
    assert len(found) == sum(map(bool, gpus))
    assert [one.status == "failed" for one in checks] == ["Prohibited" in gpu for gpu in gpus]
    assert any(isinstance(one, Note) and "Xids are unknown" in one.message for one in events)


def test_the_same_trouble_of_several_gpus_is_told_once(tmp_path: Path) -> None:
    host = HealthHost(tmp_path)
    host.report = report_of(*["<persistence_mode>Disabled</persistence_mode>"] * 2)
    (problem,) = examine(host, lambda event: None).problems
    assert problem.what.startswith("degraded: GPU 0, 1: persistence mode is off")
    assert problem.next_step.endswith("nvidia-smi -i 0,1 -pm 1")
    assert re.findall(r"GPU-\d", problem.evidence) == ["GPU-0", "GPU-1"]


def test_a_warning_of_the_inforom_leaves_the_report(tmp_path: Path) -> None:
    host = HealthHost(tmp_path)
    report = report_of("", "")
    warning = "WARNING: infoROM is corrupted at gpu 0000:1b"
    host.report = replace(report, returncode=14, stdout=f"{report.stdout}\n{warning}")
    finished, _ = host.examined()
    assert (finished.exit_code, finished.versions["gpus"]) == (ExitCode.DEGRADED, "2")


@pytest.mark.parametrize("programs", [True, False])
def test_a_machine_without_gpus_is_fit(tmp_path: Path, programs: bool) -> None:
    host = HealthHost(tmp_path, gpus=0)
    if programs:
        host.which = lambda program: f"/usr/bin/{program}"  # type: ignore[method-assign]
        host.report = Completed(
            ("nvidia-smi",), 9, "NVIDIA-SMI has failed because it couldn't communicate with the driver"
        )
    finished, _ = host.examined()
    assert (finished.exit_code, finished.summary) == (ExitCode.DONE, "ok: 0 GPUs")


@pytest.mark.parametrize(
    ("container", "rules_found"), [(True, set()), (False, {"gpus-fewer", "fabric-manager-missing"})]
)
def test_a_container_is_not_judged_by_its_hosts_sysfs(tmp_path: Path, container: bool, rules_found: set[str]) -> None:
    host = HealthHost(tmp_path, metal=not container)
    report = report_of("")
    text = report.stdout.replace("log>", "log><driver_version>550.2</driver_version>", 1)
    host.report = replace(report, stdout=text)
    for device in host.path("/sys/bus/pci/devices").iterdir():
        (device / "driver").unlink(missing_ok=True)
        (device / "driver").symlink_to("/sys/bus/pci/drivers/nvidia")
    switch = host.path("/sys/bus/pci/devices/0000:05:00.0")
    switch.mkdir()
    (switch / "vendor").write_text("0x10de\n")
    (switch / "class").write_text("0x068000\n")
    assert {*host.rules_found()} == rules_found


@pytest.mark.parametrize(("excluded", "rules_found"), [("Yes", []), ("No", ["gpus-fewer"])])
def test_gpu_that_the_driver_excludes_is_not_missed(tmp_path: Path, excluded: str, rules_found: list[str]) -> None:
    """NVreg_ExcludedGpus: the driver has it, and neither NVML nor nvidia-smi counts it."""
    host = HealthHost(tmp_path, metal=True)
    host.report = report_of("")
    write_kernel_tree(host.root, 2)
    for device in host.path("/sys/bus/pci/devices").iterdir():
        (device / "driver").unlink(missing_ok=True)
        (device / "driver").symlink_to("/sys/bus/pci/drivers/nvidia")
    *_, last = sorted(host.path("/proc/driver/nvidia/gpus").glob("*/information"))
    last.write_text(last.read_text().replace("GPU Excluded:\t No", f"GPU Excluded:\t {excluded}"))
    assert host.rules_found() == rules_found


@pytest.mark.parametrize(("version", "findings"), [("Linux version 6.1", 1), ("Linux version 5.15-microsoft-WSL2", 0)])
def test_wsl_shows_no_processes(tmp_path: Path, version: str, findings: int) -> None:
    host = HealthHost(tmp_path, metal=True)
    host.report = report_of("<fb_memory_usage><used>3000 MiB</used></fb_memory_usage>", "")
    host.path("/proc/version").write_text(version)
    assert len(examine(host, lambda event: None).problems) == findings


@pytest.mark.parametrize(("active", "domain", "seen"), [
    (False, Completed((), NOT_FOUND), "is-active nvidia-imex.service: inactive"),
    (True, Completed((), 0, "INITIALIZING\n"), "nvidia-imex-ctl -q: INITIALIZING"),
    (True, Completed((), 0, "READY\n"), ""), (True, Completed((), NOT_FOUND), ""),
])  # fmt: skip
def test_imex_that_is_not_ready_makes_a_host_unfit(tmp_path: Path, active: bool, domain: Completed, seen: str) -> None:
    class ImexHost(HealthHost):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            if argv[0] == "nvidia-imex-ctl":
                return domain
            if argv[0] == "systemctl":
                down = argv[1] == "is-active" and not active
                return Completed(tuple(argv), 3 * down, "inactive\n" if down else "")
            return super().run(argv, **more)

    host = ImexHost(tmp_path)
    host.report = report_of("")
    found = [(one.rule, one.evidence) for one in host.examined()[1] if isinstance(one, HealthFound)]
    assert [rule for rule, _ in found] == ["imex-missing"] * bool(seen)
    assert all(seen in evidence for _, evidence in found)


@pytest.mark.parametrize("silent", ["is-enabled", "is-active", "nvidia-imex-ctl", "nv-fabricmanager"])
def test_no_answer_is_unknown_and_not_down(tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class SilentHost(HealthHost):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            if silent in argv:
                return Completed(tuple(argv), 124, "", "stopped after 20 s, its time limit")
            if argv[0] in ("systemctl", "nvidia-imex-ctl"):
                return Completed(tuple(argv), 0, "READY\n")
            return super().run(argv, **more)

    host = SilentHost(tmp_path, metal=True)
    switch = host.root / "sys/bus/pci/devices/0000:c1:00.0"
    switch.mkdir(parents=True)
    for name, text in (("vendor", "0x10de"), ("class", "0x068000"), ("device", "0x22a3")):
        (switch / name).write_text(f"{text}\n")
    host.report = report_of("")
    events = host.examined()[1]
    assert "imex-missing" not in {one.rule for one in events if isinstance(one, HealthFound)}
    notes = [one.message for one in events if isinstance(one, Note) and "is not known: " in one.message]
    assert notes and all(f"{silent}" in one and "exited 124" in one for one in notes)
    if silent != "nvidia-imex-ctl":
        assert not {one.rule for one in events if isinstance(one, HealthFound)} & {"fabric-manager-missing"}


def test_a_stop_ends_the_look_and_is_no_verdict(tmp_path: Path) -> None:
    asked, noticed = threading.Event(), threading.Event()

    class Interrupted(HealthHost):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            if argv[0] == "nvidia-smi":
                asked.set()
                assert noticed.wait(60)
                self._leave_if_asked()
            elif argv[0] == sys.executable:
                assert asked.wait(60)
                try:
                    self._leave_if_asked()
                finally:
                    noticed.set()
            return Completed(tuple(argv), TIMED_OUT)

    host = Interrupted(tmp_path)
    with pytest.raises(Stopped), host.interruptible(asked.is_set):
        examine(host, lambda event: pytest.fail(f"{event}"))


def test_values_without_end_do_not_end_the_judgement(tmp_path: Path) -> None:
    nines = "9" * 5000
    host = HealthHost(tmp_path)
    host.report = report_of(f"<pci><pci_bus_id>{nines}</pci_bus_id></pci><temperature><gpu_temp>{nines} C</gpu_temp>"
                            "<gpu_temp_slow_threshold>87 C</gpu_temp_slow_threshold></temperature>", "")  # fmt: skip
    host.journal = Completed((), 0, _XID.format(nines))
    assert host.examined()[0].exit_code == ExitCode.DEGRADED
    assert host.rules_found() == ["temperature"]


def test_a_report_that_is_none_makes_the_host_unfit(tmp_path: Path) -> None:
    host = HealthHost(tmp_path)
    host.report = Completed(("nvidia-smi",), 0, "not a report")
    assert host.examined()[0].exit_code == ExitCode.UNFIT
