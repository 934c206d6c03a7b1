"""`doctor --fix --allow`: what a finding needs, what ends for it, and what a host is afterwards."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent import repair
from gpuprov.agent.repair import Record, Repair, decide
from gpuprov.checks.accept import accept
from gpuprov.checks.health import Readings, judge
from gpuprov.core.commands import Completed
from gpuprov.facts.gpus import FabricFacts
from gpuprov.protocol.codec import load
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.events import ChangeDone, CheckDone, Event, Finished, HealthFound, Note, Planned, Sink
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, spec_to_json
from tests.unit.ask import ask
from tests.unit.health_cases import healthy
from tests.unit.loaded_host import DCGM, PERSISTENCED, LoadedHost

# Its hosts have device nodes.
pytestmark = pytest.mark.root
BOTH = ("reset", "reboot")
_XID = "[ 9.1] NVRM: Xid (PCI:0000:1b:00): {}, pid=7"
_WRONG = HealthFound("unfit", "accept-wrong", "0", "GPU-0", "it computes wrong results", "seen", "replace it")


def _readings(*log: str, **first: str) -> Readings:
    rows = [{**healthy(number), "minor_number": str(number)} for number in range(2)]
    rows[0].update(first)
    return Readings(tuple(rows), kernel_log=log)


def _asks(action: str) -> Readings:
    return _readings(gpu_recovery_action=action)


_LOG = {"gpu_recovery_action": ""}


@pytest.mark.parametrize(("readings", "allow", "action", "refused"), [
    (_asks("None"), BOTH, "", ""),
    (_asks("Reset"), BOTH, "reset", ""),
    (_asks("Drain and Reset"), BOTH, "reset", ""),
    (_asks("Drain P2P"), BOTH, "reset", ""),
    (_asks("Reboot"), BOTH, "reboot", ""),
    (_asks("Reset"), (), "reset", "needs --allow reset"),
    (_asks("Reboot"), ("reset",), "reboot", "needs --allow reboot"),
    # A reboot resets every GPU.
    (_asks("Reset"), ("reboot",), "reboot", ""),
    (_readings(**{"remapped_rows/remapped_row_pending": "Yes"}), BOTH, "reset", ""),
    (_readings(**{"remapped_rows/remapped_row_failure": "Yes"}), BOTH, "", ""),
    (_readings(persistence_mode="Disabled"), BOTH, "", ""),
    (_readings(_XID.format(95), **_LOG), BOTH, "reset", ""),
    (_readings(_XID.format(64), **_LOG), BOTH, "reset", ""),
    (_readings(_XID.format(79), **_LOG), BOTH, "reboot", ""),
    (_readings(_XID.format(142), **_LOG), BOTH, "", ""),
    # The driver asks for nothing any more.
    (_readings(_XID.format(95)), BOTH, "", ""),
    # nvidia-smi does not show the GPU.
    (Readings((healthy(1),), kernel_log=(_XID.format(95),)), BOTH, "reboot", ""),
])  # fmt: skip
def test_finding_needs_action_and_leave(readings: Readings, allow: tuple[str, ...], action: str, refused: str) -> None:
    wanted = decide(readings, allow)
    assert (wanted.action, wanted.refused) == (action, refused)
    assert bool(wanted.changes) == (bool(action) and not refused)


def test_a_reboot_that_has_changed_nothing_is_not_tried_again() -> None:
    readings = _asks("Reboot")
    assert decide(readings, BOTH, judge(readings)).refused == "a reboot has not changed that"
    # Faults that come and go would reboot the host for ever.
    assert decide(readings, BOTH, judge(_asks("Reset"))).refused
    assert not decide(_asks("Reset"), BOTH, judge(readings)).refused


_V100, _A100, _H100 = "1DB110DE", "20B210DE", "233010DE"


@pytest.mark.parametrize(("device", "switches", "manager", "whole"), [
    (_V100, True, True, True), (_V100, False, False, True), (_A100, True, True, False), (_A100, True, False, True),
    (_A100, False, False, False), (_H100, True, True, False),
])  # fmt: skip
def test_gpus_joined_by_nvlink_are_reset_together(device: str, switches: bool, manager: bool, whole: bool) -> None:
    x = _readings(gpu_recovery_action="Reset", **{"pci/pci_device_id": device})
    fabric = FabricFacts(("0000:05:00.0",) if switches else (), version="550", active=manager)
    found = decide(replace(x, fabric=fabric, driver="550"), BOTH)
    assert (found.whole, len(found.gpus)) == (whole, 2 if whole else 1)
    assert found.summary.startswith("reset all GPUs, which NVLink joins" if whole else "reset GPU 0")


def test_an_xid_before_gpuprovs_own_reset_is_settled() -> None:
    xid, done = _XID.format(95), "[ 10.5] gpuprov: gpu reset (PCI:0000:1b:00)"
    there = "2026-11-23T19:00:00+0000 gpu1 gpuprov: gpu reset (PCI:0000:1b:00)"
    for line in (done, there):
        assert judge(_readings(xid, line, **_LOG)) == ()
        assert judge(_readings(line, xid, **_LOG))
    other = _readings(xid, done.replace(":1b:", ":43:"), **_LOG)
    assert judge(other)


class IllHost(LoadedHost):
    """A host whose driver asks for something, as nvidia-smi shows it."""

    action = "Reset"
    cures = True
    cured_by = ""
    # Seconds from now on until the GPU is in the NVLink fabric.
    joining = 0.0
    # Whether it is one of an IMEX domain, too.
    imex = False
    refusal = ""
    resets: tuple[tuple[str, ...], ...] = ()
    seen: tuple[set[str], set[str]] = (set(), set())
    mig = "[N/A]"
    instances: tuple[str, ...] = ()

    def which(self, program: str) -> str | None:
        return "/usr/bin/nvidia-smi" if program == "nvidia-smi" else super().which(program)

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        words = tuple(argv)
        if words[0] == self.cured_by:
            self.action = "None"
        if words[0] == "kill":
            for pid in words[1:]:
                self.remove_tree(f"/proc/{pid}")
            return Completed(words, 0)
        if words[0] == "nvidia-imex-ctl":
            return Completed(words, 0, "WAITING_FOR_PEERS\n" if self.slept < self.joining else "READY\n")
        if words[-1] == "nvidia-imex.service" and self.imex:
            return Completed(words, 0, "active\n")
        if words[0] != "nvidia-smi":
            return super().run(argv, **more)
        if words[1].startswith("--query-gpu=index,mig"):
            return Completed(words, 0, f"0, {self.mig}, {self.mig}\n")
        if words[1] == "mig":
            if "-cgi" in words:
                assert DCGM not in self.units
                self.instances = tuple(words[words.index("-cgi") + 1].split(","))
            rows = (f"|   0  MIG {name}          9        2          4:4     |\n" for name in self.instances)
            return Completed(words, 0, "".join(rows) if "-lgi" in words else "")
        if "-mig" in words:
            self.mig = "Enabled"
            return Completed(words, 0)
        if "--gpu-reset" not in words:
            gpu = {"uuid": "GPU-0", "minor_number": "0", "gpu_recovery_action": self.action}
            text = "".join(f"<{name}>{value}</{name}>" for name, value in gpu.items())
            is_joining = self.slept < self.joining and not self.imex
            text += f"<fabric><state>{'In Progress' if is_joining else 'Completed'}</state></fabric>"
            pci = "<pci><pci_bus_id>00000000:1B:00.0</pci_bus_id></pci>"
            report = f"<nvidia_smi_log><gpu id='0'>{text}{pci}</gpu></nvidia_smi_log>"
            return Completed(words, 0, f"<?xml version='1.0'?>{report}")
        if self.refusal:
            return Completed(words, 3, self.refusal)
        self.resets += (words,)
        self.joining = self.slept + 40 if self.joining else 0
        self.instances = ()
        self.mig = "Disabled" if self.mig == "Enabled" else self.mig
        self.seen = (set(self.running), set(self.units))
        self.action = "None" if self.cures else self.action
        return Completed(words, 0)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IllHost:
    made = IllHost(tmp_path)
    made.container("job", 900)
    # No container starts here.
    monkeypatch.setattr(repair, "accept", lambda *_: None)
    return made


def _opens_the_gpu(host: IllHost) -> None:
    (host.root / "proc/900/fd/0").unlink()
    (host.root / "proc/900/fd/0").symlink_to("/dev/nvidia0")


def _doctor(host: IllHost, *allow: str, **more: Any) -> tuple[Finished, list[Event]]:
    spec = spec_to_json(HostSpec(driver="preinstalled", docker="preinstalled"))
    return ask(host, Request("doctor", spec, fix=True, allow=allow, **more))


def _repairs(events: list[Event]) -> list[str]:
    plans = (event.changes for event in events if isinstance(event, Planned))
    return [one.summary for changes in plans for one in changes if one.step == "repair"]


def _notes(events: list[Event]) -> str:
    return "\n".join(one.message for one in events if isinstance(one, Note))


def _reboot(host: IllHost) -> None:
    (host.root / "proc/sys/kernel/random/boot_id").write_text("boot-2\n")


def _record(host: IllHost) -> Record:
    return load(Record, json.loads(sorted(host.root.glob("var/lib/gpuprov/repairs/*"))[-1].read_text()), trusted=True)


def test_everything_that_ends_is_named_then_stopped_and_runs_again(host: IllHost) -> None:
    _opens_the_gpu(host)
    host.process(901, "python3 notebook.py", "/user.slice/user-1000.slice/session-3.scope", mapped=True)
    _, events = _doctor(host, "reset", check=True)
    (planned,) = _repairs(events)
    assert [event.disturbs for event in events if isinstance(event, Planned)] == [True]
    for name in ("container job", PERSISTENCED, "process 901 (python3 notebook.py)"):
        assert name in planned
    assert not host.resets

    _, events = _doctor(host, *BOTH)
    assert planned in _repairs(events)
    assert list(host.resets) == [("nvidia-smi", "--gpu-reset", "-i", "00000000:1B:00.0")]
    assert host.seen == (set(), {DCGM})
    assert (host.running, host.units) == ({"job"}, {PERSISTENCED, DCGM})
    record = _record(host)
    assert ([one.rule for one in record.before], record.after, record.outcome) == (["recovery-reset"], (), "ok")
    assert "container job" in record.ended
    assert any(isinstance(one, ChangeDone) and one.key == "repair" for one in events)


def test_mig_devices_which_a_reset_removes_are_made_again(host: IllHost) -> None:
    host.mig, host.instances = "Enabled", ("3g.40gb", "3g.40gb")
    host.process(902, "nv-hostengine", f"/system.slice/{DCGM}", mapped=True)
    finished, _ = _doctor(host, "reset")
    assert host.resets
    assert (host.mig, host.instances) == ("Enabled", ("3g.40gb", "3g.40gb"))
    assert (_record(host).outcome, host.units) == ("ok", {PERSISTENCED, DCGM}), finished


def test_a_gpu_that_an_earlier_change_has_cured_is_not_reset(host: IllHost) -> None:
    host.cured_by = "ldconfig"
    finished, events = _doctor(host, *BOTH)
    assert _repairs(events)
    assert (host.resets, host.action) == ((), "None")
    assert "GPUs: ok" in finished.summary


@pytest.mark.parametrize("imex", [False, True])
def test_a_gpu_is_judged_once_the_fabric_or_the_imex_domain_has_it(host: IllHost, imex: bool) -> None:
    host.joining, host.imex = -1, imex
    _doctor(host, "reset")
    assert (host.resets != (), _record(host).outcome) == (True, "ok")
    host.action = "Reboot"
    _doctor(host, *BOTH, caller_returns=True)
    _reboot(host)
    host.action, host.joining = "None", host.slept + 40
    _doctor(host, *BOTH, caller_returns=True)
    assert _record(host).outcome == "ok"


def test_who_does_not_have_the_gpu_open_goes_on(host: IllHost) -> None:
    _doctor(host, "reset")
    assert host.resets
    assert host.seen == ({"job"}, {DCGM})


def test_of_a_user_the_process_ends_and_not_all_that_the_user_runs(host: IllHost) -> None:
    host.process(901, "python3 notebook.py", "/user.slice/user-7.slice/user@7.service/app.slice/x.service", mapped=True)
    _, events = _doctor(host, "reset")
    (planned,) = set(_repairs(events))
    assert "process 901 (python3 notebook.py)" in planned
    assert "user@7.service" not in planned + "".join(host.stopped)
    assert host.resets


def test_the_unit_that_gpuprov_itself_runs_in_is_not_stopped(host: IllHost) -> None:
    host.process(901, "agent", "/system.slice/agent.service", mapped=True)
    own = host.root / f"proc/{host.own_pid()}"
    own.mkdir(exist_ok=True)
    (own / "cgroup").write_text("0::/system.slice/agent.service\n")
    _, events = _doctor(host, *BOTH)
    assert (host.resets, host.stopped) == ((), [])
    assert "gpuprov itself runs in agent.service" in _notes(events)


def test_a_container_that_docker_would_remove_is_not_stopped(host: IllHost) -> None:
    _opens_the_gpu(host)
    host.inspected = {"HostConfig": {"AutoRemove": True}, "Config": {}}
    _, events = _doctor(host, "reset")
    assert (host.resets, host.running) == ((), {"job"})
    assert "end it before: docker stop job" in _notes(events)


def test_a_reboot_names_who_has_a_gpu_open_in_containers_of_other_engines(host: IllHost) -> None:
    host.action = "Reboot"
    group = f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{'5e' * 32}.scope"
    host.process(901, "vllm serve", group, mapped=True)
    _, events = _doctor(host, *BOTH, check=True)
    assert _repairs(events)[-1].endswith("ends container job, process 901 (vllm serve)")


def test_without_leave_nothing_is_touched_and_the_option_is_named(host: IllHost) -> None:
    before = set(host.units)
    finished, events = _doctor(host)
    assert (host.resets, host.units, _repairs(events)) == ((), before, [])
    assert "needs --allow reset" in _notes(events)
    assert finished.exit_code != ExitCode.UNFIT
    assert not (host.root / "var/lib/gpuprov/repairs").exists()


def test_a_host_that_is_not_drained_is_left_alone(host: IllHost) -> None:
    finished, _ = _doctor(host, "reset", require_drained=True)
    assert finished.problems[0].what == "the host is not drained, and what is left to do disturbs containers"
    assert host.resets == ()


def test_one_that_stays_unfit_gets_its_container_not_back(host: IllHost) -> None:
    host.cures = False
    _opens_the_gpu(host)
    finished, _ = _doctor(host, "reset")
    assert finished.exit_code == ExitCode.UNFIT
    assert finished.problems[0].next_step == "docker start job"
    assert (host.running, host.units) == (set(), {PERSISTENCED, DCGM})
    assert _record(host).outcome == "unfit"


def test_gpu_that_fails_under_load_after_reset_is_unfit(host: IllHost, monkeypatch: pytest.MonkeyPatch) -> None:
    _opens_the_gpu(host)
    running: list[set[str]] = []

    def load(system: IllHost, spec: HostSpec, sink: Sink, minutes: int, verify: object) -> None:
        running.append(set(system.running))
        sink(_WRONG)
        sink(CheckDone("GPU 0, program", "failed", reason="accept-wrong"))

    monkeypatch.setattr(repair, "accept", load)
    finished, events = _doctor(host, "reset")
    assert running == [set()]
    assert (finished.exit_code, host.running) == (ExitCode.UNFIT, set())
    assert (_record(host).outcome, _record(host).after) == ("unfit", (_WRONG,))
    assert events.count(_WRONG) == 1
    assert "GPU 0, program" not in [one.name for one in events if isinstance(one, CheckDone)]


def test_gpus_that_can_not_be_loaded_are_noted(host: IllHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise GpuprovError("the GPUs are in use", "process 7", "drain the host")

    monkeypatch.setattr(repair, "accept", refuse)
    _, events = _doctor(host, "reset")
    assert _record(host).outcome == "ok"
    assert "not loaded after the repair: the GPUs are in use" in _notes(events)


def test_other_failures_keep_no_container_stopped(host: IllHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "accept", accept)
    # No container can be started here, and much else is missing: nothing of it is a GPU's fault.
    finished, events = _doctor(host, "reset")
    assert (_record(host).outcome, host.running) == ("ok", {"job"})
    assert "GPUs: ok" in finished.summary
    assert "not loaded after the repair" in _notes(events)


def test_gpus_that_a_service_has_again_are_not_loaded(host: IllHost, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[object] = []
    monkeypatch.setattr(repair, "accept", lambda *_: loads.append(1))
    host.process(903, "vllm serve", "/system.slice/vllm.service", mapped=True)
    _, events = _doctor(host, "reset")
    assert (loads, _record(host).outcome) == ([], "ok")
    assert "vllm.service runs on them again" in _notes(events)


def test_of_a_host_that_stays_unfit_100_records_are_kept(host: IllHost) -> None:
    host.cures = False
    folder = host.root / "var/lib/gpuprov/repairs"
    folder.mkdir(parents=True)
    for number in range(1, 121):
        (folder / f"{number:08d}.json").write_text("{}\n")
    assert _doctor(host, "reset")[0].exit_code == ExitCode.UNFIT
    assert len(list(folder.iterdir())) == 100
    assert _record(host).outcome == "unfit"


def test_what_nvidia_smi_refuses_is_said_in_its_words_and_all_runs_again(host: IllHost) -> None:
    host.refusal = "Resetting GPU 00000000:1B:00.0 is not supported."
    _opens_the_gpu(host)
    finished, _ = _doctor(host, "reset")
    assert finished.exit_code == ExitCode.UNFIT
    assert host.refusal in finished.problems[0].evidence
    assert (host.running, host.units) == ({"job"}, {PERSISTENCED, DCGM})


def test_a_reboot_ends_the_run_and_the_next_one_judges_the_host(host: IllHost) -> None:
    host.action = "Reboot"
    finished, events = _doctor(host, *BOTH, caller_returns=True)
    assert (finished.exit_code, finished.left_boot) == (ExitCode.REBOOT_NEEDED, "boot-1")
    assert "ends container job" in _repairs(events)[-1]
    assert _record(host).outcome == ""
    _reboot(host)
    finished, events = _doctor(host, *BOTH, caller_returns=True)
    assert finished.exit_code == ExitCode.UNFIT
    assert "a reboot has not changed that" in _notes(events)
    assert _record(host).outcome == "unfit"


@pytest.mark.parametrize("fails", [False, True])
def test_gpus_are_loaded_after_reboot(host: IllHost, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    outcomes: list[str] = []

    def load(system: IllHost, spec: HostSpec, sink: Sink, minutes: int, verify: object) -> None:
        # A run that is killed now leaves the load to the next one.
        outcomes.append(_record(host).outcome)
        if fails:
            sink(_WRONG)

    monkeypatch.setattr(repair, "accept", load)
    host.action = "Reboot"
    _doctor(host, *BOTH, caller_returns=True)
    assert outcomes == []
    _reboot(host)
    host.action = "None"
    finished, events = _doctor(host, *BOTH, caller_returns=True)
    assert outcomes == [""]
    assert (_record(host).outcome, _record(host).after) == (("unfit", (_WRONG,)) if fails else ("ok", ()))
    assert (finished.exit_code == ExitCode.UNFIT, _WRONG in events) == (fails, fails)
    # The next run repairs nothing, so it loads nothing.
    _doctor(host, *BOTH, caller_returns=True)
    assert outcomes == [""]


@pytest.mark.parametrize(("allow", "action", "named"), [
    (BOTH, "None", "not loaded after the repair: the GPUs are in use"), ((), "None", ""), (BOTH, "Reboot", ""),
], ids=["in use", "not allowed", "unfit"])  # fmt: skip
def test_after_a_reboot_no_gpu_is_loaded_that_computes_or_is_unfit(
    host: IllHost, monkeypatch: pytest.MonkeyPatch, allow: tuple[str, ...], action: str, named: str
) -> None:
    monkeypatch.setattr(repair, "accept", accept)
    monkeypatch.setattr(repair, "verify", lambda *_, **__: pytest.fail("a container started"))
    host.action = "Reboot"
    _doctor(host, *BOTH, caller_returns=True)
    _reboot(host)
    (host.root / "proc/900/fd/4").symlink_to("/dev/nvidia-uvm")
    host.action = action
    _, events = _doctor(host, *allow, caller_returns=True)
    notes = [one.message for one in events if isinstance(one, Note) and "not loaded" in one.message]
    assert len(notes) == bool(named)
    assert all(named in one and "process 900 (python3 train.py)" in one for one in notes)
    assert _record(host).outcome == ("ok" if action == "None" else "unfit")
    assert host.running == {"job"}


def test_without_a_place_for_its_record_nothing_is_repaired(host: IllHost) -> None:
    folder = host.root / "var/lib/gpuprov"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "repairs").write_text("a file")
    finished, _ = _doctor(host, "reset")
    assert finished.problems[0].what == "the record of this repair can't be written"
    assert (host.resets, host.running) == ((), {"job"})


def test_in_a_container_the_gpus_are_not_this_machines_to_reset(host: IllHost) -> None:
    (host.root / "run/systemd/container").write_text("lxc\n")
    _, events = _doctor(host, *BOTH)
    assert host.resets == ()
    assert "belong to the host of this lxc container" in _notes(events)


def test_nothing_to_repair_is_no_change() -> None:
    assert Repair().changes == ()
