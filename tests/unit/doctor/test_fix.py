"""`doctor --fix` on a host at the System seam: what is done, what is left, that a rollback takes it back."""

import copy
import hashlib
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov import __version__
from gpuprov.agent.run import run_request
from gpuprov.core.changes import Change
from gpuprov.core.commands import Completed
from gpuprov.core.journal import RUNS_DIRECTORY, new_journal, read_runs
from gpuprov.doctor.examine import diagnose
from gpuprov.doctor.finding import CERTAIN, LIKELY, WARNING
from gpuprov.doctor.fix import plan_fix, spec_as_found
from gpuprov.doctor.snapshot import Installed
from gpuprov.plan.steps import Plan, StepChange
from gpuprov.protocol.errors import ExitCode, Problem
from gpuprov.protocol.events import CauseFound, ChangeDone, CheckDone, Event, Note, Planned, from_line, to_line
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, spec_to_json
from gpuprov.runtime_hook.deploy import LIBRARY_PATH, NVIDIA_HOOK_PATH
from tests.triplet import TRIPLET
from tests.unit.ask import finished
from tests.unit.doctor import ill
from tests.unit.doctor.host import SPEC, DoctorHost, examined, healthy, healthy_tree, with_docker, with_driver

pytestmark = pytest.mark.root
LAUNCHER = "usr/bin/gpuprov-container-runtime"
SPECIFICATION = "etc/cdi/nvidia.json"
Break = Callable[[DoctorHost], object]


class FixHost(DoctorHost):
    """A host with an ldconfig of its own, for the cache below its root."""

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if tuple(argv) == ("ldconfig",):
            subprocess.run(("/sbin/ldconfig", "-r", str(self.root)), check=True, capture_output=True, timeout=60)
            return Completed(tuple(argv), 0, "", "")
        return super().run(argv, **more)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> DoctorHost:
    made = healthy(tmp_path_factory.mktemp("host"))
    made.__class__ = FixHost
    return made


@pytest.fixture
def host(pristine: DoctorHost, tmp_path: Path) -> DoctorHost:
    """A copy of the host that nothing is wrong with: its installation takes longer than a whole test."""
    subprocess.run(("cp", "-a", f"{pristine.root}/.", tmp_path), check=True, timeout=60)
    made = copy.deepcopy(pristine)
    made.root = tmp_path
    return made


def doctor(host: DoctorHost, command: str = "doctor", **more: Any) -> list[Event]:
    found: list[Event] = []
    run_request(Request(command, spec_to_json(SPEC), **{"fix": command == "doctor", **more}), found.append, host)
    assert [from_line(to_line(event)) for event in found] == found
    return found


def of(kind: type[Any], events: Sequence[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def planned(events: Sequence[Event]) -> list[str]:
    return [change.key for change in of(Planned, events)[-1].changes]


def stale(host: DoctorHost) -> None:
    path = host.root / SPECIFICATION
    path.write_text(path.read_text().replace("550.163.01", "535.261.03"))


def forget(host: DoctorHost) -> None:
    """Let docker run without the runtime that its file names."""
    host.docker_loaded = {"runc": "runc"}


def unregister(host: DoctorHost) -> None:
    (host.root / "etc/docker/daemon.json").write_text('{"log-driver": "journald"}\n')
    host.run(("systemctl", "reload", "docker.service"))


def stop_docker(host: DoctorHost) -> None:
    host.docker_active = False


def disable_docker(host: DoctorHost) -> None:
    host.docker_active = host.docker_enabled = False


def cover(host: DoctorHost) -> None:
    (host.root / "var/run/cdi").mkdir(parents=True)
    (host.root / "var/run/cdi/nvidia.json").write_bytes((host.root / SPECIFICATION).read_bytes())


def gone(path: str) -> Break:
    return lambda host: (host.root / path).unlink()


def spoil(path: str) -> Break:
    return lambda host: (host.root / path).write_text("x")


@dataclass(frozen=True)
class Case:
    """What breaks the host, the rule that finds it, and the changes by which gpuprov fixes it."""

    rule: str
    breaking: Break
    changes: tuple[str, ...]


_RUNTIME = "install the bundled container runtime (/usr/bin/gpuprov-container-runtime, /usr/lib/gpuprov/runtime_hook)"
_SPECIFICATION = "write /etc/cdi/nvidia.json"
CASES = (
    Case("runtime-missing", gone(LAUNCHER), (_RUNTIME,)),
    Case("runtime-not-executable", lambda host: (host.root / LAUNCHER).chmod(0o644), (_RUNTIME,)),
    Case("runtime-files-missing", gone("usr/lib/gpuprov/runtime_hook/main.py"), (_RUNTIME,)),
    Case("boot-incomplete", gone("usr/lib/gpuprov/boot.pyz"), ("prepare the next boot",)),
    Case("boot-incomplete", spoil("usr/lib/gpuprov/boot.pyz"), ("prepare the next boot",)),
    Case("boot-incomplete", spoil("etc/systemd/system/gpuprov-nodes.service"), ("prepare the next boot",)),
    Case(
        "boot-incomplete",
        gone("etc/systemd/system/multi-user.target.wants/gpuprov-refresh.path"),
        ("prepare the next boot",),
    ),
    Case("hook-missing", gone("usr/bin/nvidia-container-runtime-hook"), (_RUNTIME, "restart docker.service")),
    Case("nodes-missing", gone("dev/nvidia0"), ("make device node /dev/nvidia0 (c 195:0)",)),
    Case("nodes-closed", lambda host: (host.root / "dev/nvidia0").chmod(0o600), ("chmod 0666 /dev/nvidia0",)),
    Case("cdi-missing", gone(SPECIFICATION), (_SPECIFICATION,)),
    Case("cdi-stale", stale, (_SPECIFICATION,)),
    Case("cdi-broken", lambda host: (host.root / SPECIFICATION).write_text("{"), (_SPECIFICATION,)),
    Case("cdi-covered", cover, ("remove /var/run/cdi/nvidia.json",)),
    Case("library-not-in-cache", gone("etc/ld.so.cache"), ("write /etc/ld.so.cache (ldconfig)",)),
    Case("docker-not-restarted", forget, ("configure docker",)),
    Case("runtime-unregistered", unregister, ("configure docker",)),
    Case("docker-down", stop_docker, ("configure docker",)),
    Case("docker-disabled", disable_docker, ("configure docker",)),
)


def rules(host: DoctorHost) -> list[str]:
    return [cause.rule for cause in of(CauseFound, doctor(host, fix=False))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_it_plans_does_proves_and_a_rollback_takes_it_back(host: DoctorHost, case: Case) -> None:
    case.breaking(host)
    assert case.rule in rules(host)[:2]
    broken = host.tree()

    foreseen = doctor(host, check=True)
    assert planned(foreseen) == list(case.changes)
    assert finished(foreseen).changed == len(case.changes)
    assert host.tree() == broken

    events = doctor(host)
    assert finished(events).exit_code == ExitCode.DONE, finished(events)
    assert finished(events).changed == len(case.changes)
    assert [event.key for event in of(ChangeDone, events)] == planned(events) == planned(foreseen)
    assert rules(host) == []
    assert read_runs(host)[-1].command == "doctor"

    again = doctor(host)
    assert (finished(again).changed, planned(again)) == (0, [])

    assert finished(doctor(host, "rollback")).exit_code == ExitCode.DONE
    assert host.tree() == broken
    assert case.rule in rules(host) or case.changes == ("configure docker",)


def test_the_causes_come_first_then_the_plan_then_the_proof(host: DoctorHost) -> None:
    (host.root / LAUNCHER).unlink()
    kinds = [type(event) for event in doctor(host)]
    assert kinds.index(CauseFound) < kinds.index(Planned) < kinds.index(ChangeDone) < kinds.index(CheckDone)
    assert kinds.count(CheckDone) == len({event.name for event in of(CheckDone, doctor(host))})


def test_a_cause_tells_what_gpuprov_does_about_it(host: DoctorHost) -> None:
    (host.root / "dev/nvidia0").unlink()
    (host.root / "etc/docker/daemon.json").write_text("{")
    found = {cause.rule: cause.remedy for cause in of(CauseFound, doctor(host, fix=False))}
    assert found == {"nodes-missing": "steps: device nodes", "daemon-json-broken": ""}


def test_what_a_person_must_do_is_left_with_its_command(host: DoctorHost) -> None:
    (host.root / "dev/nvidia0").unlink()
    (host.root / "etc/docker/daemon.json").write_text("{")
    events = doctor(host)
    assert (host.root / "dev/nvidia0").is_char_device()
    assert (host.root / "etc/docker/daemon.json").read_text() == "{"
    assert (finished(events).exit_code, finished(events).changed) == (ExitCode.FAILED, 1)
    assert finished(events).summary == "1 change made; causes found: 1"
    (problem,) = finished(events).problems
    assert problem.next_step.startswith("${EDITOR:-vi}")


def test_a_change_that_fails_is_told_and_the_others_are_made(host: DoctorHost) -> None:
    host.failing_unit = "docker.service"
    (host.root / "usr/bin/nvidia-container-runtime-hook").unlink()
    (host.root / "dev/nvidia0").unlink()
    events = doctor(host)
    assert (finished(events).exit_code, finished(events).changed) == (ExitCode.FAILED, 2)
    assert finished(events).problems[0].what == "docker.service does not start"
    assert (host.root / "dev/nvidia0").is_char_device()
    assert read_runs(host)[-1].end == "failed"
    assert [entry.state for entry in read_runs(host)[-1].entries] == ["done", "done", "undone"]


def test_changes_come_in_the_order_of_an_installation(host: DoctorHost) -> None:
    stale(host)
    forget(host)
    (host.root / LAUNCHER).unlink()
    (host.root / "dev/nvidia0").unlink()
    (host.root / "dev/nvidia1").chmod(0o600)
    events = doctor(host)
    steps = [change.step for change in of(Planned, events)[-1].changes]
    assert steps == ["fix", "device nodes", "toolkit", "cdi", "docker"]
    assert finished(events).exit_code == ExitCode.DONE, finished(events)


def test_a_file_in_a_nodes_place_goes_and_a_folder_stays(host: DoctorHost) -> None:
    for name in ("nvidia0", "nvidia1"):
        (host.root / "dev" / name).unlink()
    (host.root / "dev/nvidia0").write_text("not a node")
    doctor(host)
    assert (host.root / "dev/nvidia0").is_char_device()
    (host.root / "dev/nvidia1").unlink()
    (host.root / "dev/nvidia1").mkdir()
    assert planned(doctor(host)) == []
    assert (host.root / "dev/nvidia1").is_dir()


@pytest.mark.parametrize("is_all", [True, False])
def test_a_run_that_was_cut_off_is_resumed(host: DoctorHost, is_all: bool) -> None:
    before = {"path": "/etc/half", "kind": "missing", "missing_parents": []}
    lines = ({"run": "install", "id": "", "format": 2}, {"begin": 1, "key": "x", "kind": "WriteFile", "before": before})
    (host.root / "var/lib/gpuprov/runs/0002.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (host.root / "etc/half").write_text("half")
    if not is_all:
        (host.root / LAUNCHER).unlink()
    events = doctor(host)
    assert finished(events).exit_code == ExitCode.DONE, finished(events)
    assert not (host.root / "etc/half").exists()
    assert [run.end for run in read_runs(host)] == ["done", "done"]


def test_what_a_cut_off_run_left_is_not_undone_on_a_host_that_is_not_drained(host: DoctorHost) -> None:
    new_journal(host, "install").begin("reconfigure docker", "ReconfigureDocker", {})
    assert [plan.disturbs for plan in of(Planned, doctor(host, check=True))] == [True]
    (problem,) = finished(doctor(host, require_drained=True)).problems
    assert problem.what == "the host is not drained, and what is left to do disturbs containers"
    assert not read_runs(host)[-1].end


def test_a_run_that_can_not_be_resumed_comes_first(host: DoctorHost) -> None:
    line = {"begin": 1, "key": "x", "kind": "WriteFile", "before": {}}
    (host.root / "var/lib/gpuprov/runs/0002.jsonl").write_text(f'{{"run":"install","id":""}}\n{json.dumps(line)}\n')
    (host.root / "dev/nvidia0").unlink()
    host.free_bytes = lambda path: 0  # type: ignore[method-assign]
    events = doctor(host)
    assert planned(events) == []
    assert [note.message for note in of(Note, events) if "must be resumed first: not enough room" in note.message]
    assert not read_runs(host)[-1].end


def test_it_needs_the_hosts_lock_and_check_does_not(host: DoctorHost) -> None:
    import fcntl

    with host.open_private("/run/gpuprov.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert finished(doctor(host, check=True)).exit_code == ExitCode.DONE
        assert finished(doctor(host, wait_seconds=0)).exit_code == ExitCode.FAILED


def test_a_healthy_host_gets_no_run(host: DoctorHost) -> None:
    end = finished(doctor(host))
    assert (end.exit_code, end.summary) == (ExitCode.DONE, "0 changes made; nothing found wrong")
    assert len(read_runs(host)) == 1


# -- what is decided, without a host --------------------------------------------------------------------------------


def test_a_host_that_gpuprov_has_not_set_up_is_not_taken_over(tmp_path: Path) -> None:
    host = healthy_tree(tmp_path)
    (host.root / "usr/bin/nvidia-ctk").write_text("")
    (host.root / "usr/bin/nvidia-container-runtime").write_text("")
    x = examined(host)
    fix = plan_fix(x, diagnose(x))
    assert {type(item.change).__name__ for item in fix.changes} <= {"MakeNode"}
    assert any("gpuprov has not set up this host" in sentence for sentence in fix.left)


def test_docker_is_not_restarted_under_running_containers(host: DoctorHost) -> None:
    (host.root / "usr/bin/nvidia-container-runtime-hook").unlink()
    x = examined(host)
    busy = with_docker(x, running_containers=("web", "db"))
    assert [item.change.key for item in plan_fix(x, diagnose(x)).changes] == [_RUNTIME, "restart docker.service"]
    fix = plan_fix(busy, diagnose(busy))
    assert [item.change.key for item in fix.changes] == [_RUNTIME]
    assert fix.left[0].endswith("a restart of docker stops web, db")
    kept = with_docker(busy, live_restore=True, config_text='{"live-restore": true}')
    assert len(plan_fix(kept, diagnose(kept)).changes) == 2


def test_a_consequence_is_left_with_its_cause(host: DoctorHost) -> None:
    x = ill.bound_to("vfio-pci")(examined(host))
    causes = diagnose(x)
    assert {cause.rule.name: cause.follows for cause in causes}["module-not-loaded"] == "gpu-vfio"
    fix = plan_fix(x, causes)
    assert "load" not in " ".join(item.change.key for item in fix.changes)
    assert any("it is a consequence of gpu-vfio" in sentence for sentence in fix.left)


def test_modules_are_loaded_on_a_machine_of_its_own_only(host: DoctorHost) -> None:
    x = ill.metal(examined(host))
    assert "load the driver's kernel modules" in plan_fix(x, diagnose(x)).changes[0].change.summary()
    y = with_driver(examined(host), nodes=tuple(n for n in x.driver.nodes if n.path != "/dev/nvidia-uvm"))
    fix = plan_fix(y, diagnose(y))
    assert "uvm-not-loaded" not in [cause.rule.name for cause in diagnose(y)] or "container" in " ".join(fix.left)


@pytest.mark.parametrize(
    ("plan", "left"),
    [
        (Plan((), (Problem("no room"),)), "no room"),
        (None, "its plan can't be made now"),
        (Plan((StepChange("x", Change()),)), ""),
    ],
)
def test_an_installation_is_done_whole_or_left(host: DoctorHost, plan: Plan | None, left: str) -> None:
    next(host.root.glob(f"usr/lib/{TRIPLET}/libnvidia-ml.so.[0-9][0-9]*")).unlink()
    x = examined(host)
    fix = plan_fix(x, diagnose(x), replace(plan, changes=()) if plan and not left else plan)
    assert [sentence.rpartition(": ")[2] for sentence in fix.left if "libnvidia-ml" in sentence] == (
        [left] if left else []
    )


def test_an_installation_keeps_driver_and_toolkit_that_are_there(host: DoctorHost) -> None:
    x = replace(examined(host), spec=HostSpec())
    assert spec_as_found(x).driver_version == "550.163.01"
    assert spec_as_found(x).toolkit == "bundled"
    asked = replace(x, spec=HostSpec(driver_version="580.178.04"))
    assert spec_as_found(asked).driver_version == "580.178.04"
    packaged = replace(x, host=replace(x.host, driver_packaged="nvidia-driver-libs"))
    assert spec_as_found(packaged).driver_version == ""  # a version means the .run file, which is refused over packages


# -- a host that another version of gpuprov set up ---------------------------------------------------------------------
_MODULES = f"{LIBRARY_PATH}/runtime_hook"
_OTHER = b"# another version's\n"


def by_another_version(host: DoctorHost, version: str | None) -> None:
    """Make it a host whose runtime lacks a module of this version, has one more, and another text of a third."""
    host.remove(f"{_MODULES}/volumes.py")
    for name in ("equipment.py", "decision.py"):
        host.write(f"{_MODULES}/{name}", _OTHER)
    (path,) = host.list_directory(RUNS_DIRECTORY)
    lines = [json.loads(line) for line in (host.read_text(f"{RUNS_DIRECTORY}/{path}") or "").splitlines()]
    lines[0].pop("version")
    lines[0].update({} if version is None else {"version": version})
    written = next(line["outcome"]["written"] for line in lines if _launches(line))
    written.update(
        dict.fromkeys((f"{_MODULES}/equipment.py", f"{_MODULES}/decision.py"), hashlib.sha256(_OTHER).hexdigest())
    )
    del written[f"{_MODULES}/volumes.py"]
    host.write(f"{RUNS_DIRECTORY}/{path}", "".join(f"{json.dumps(line)}\n" for line in lines).encode(), mode=0o600)


def _launches(line: dict[str, Any]) -> bool:
    return f"{_MODULES}/volumes.py" in line.get("outcome", {}).get("written", {})


def runtime_causes(host: DoctorHost) -> list[CauseFound]:
    return [one for one in of(CauseFound, doctor(host, fix=False)) if one.rule == "runtime-files-missing"]


@pytest.mark.parametrize(
    ("version", "who"),
    [
        (None, "an earlier gpuprov"),
        ("9.0.0", "gpuprov 9.0.0"),
        (__version__, f"another build of gpuprov {__version__}"),
    ],
)
def test_a_host_of_another_version_is_healthy(host: DoctorHost, version: str | None, who: str) -> None:
    by_another_version(host, version)
    events = doctor(host, fix=False)
    assert finished(events).exit_code == ExitCode.DONE and finished(events).summary == "nothing found wrong"
    (cause,) = (one for one in of(CauseFound, events) if one.rule == "runtime-files-missing")
    assert cause.confidence == WARNING and cause.evidence.startswith(RUNS_DIRECTORY)
    assert cause.what.startswith(f"this host was set up by {who} on 20")
    assert f"this is gpuprov {__version__}" in cause.what
    assert cause.next_step.endswith("  # updates it: 1 change, no container stops")


def test_what_its_own_record_has_and_the_host_lacks_is_found(host: DoctorHost) -> None:
    by_another_version(host, None)
    host.write(f"{_MODULES}/main.py", b"# changed by hand\n")
    (cause,) = runtime_causes(host)
    assert (cause.confidence, cause.evidence) == (LIKELY, f"{_MODULES}/main.py")
    assert cause.what == "of gpuprov's container runtime 1 file changed since gpuprov wrote it"
    host.remove(f"{_MODULES}/equipment.py")
    (cause,) = runtime_causes(host)
    assert (cause.confidence, cause.evidence) == (CERTAIN, f"ls {_MODULES}/equipment.py: No such file")


def test_a_record_that_can_not_be_read_is_said(host: DoctorHost) -> None:
    by_another_version(host, "9.0.0")
    (name,) = host.list_directory(RUNS_DIRECTORY)
    path = f"{RUNS_DIRECTORY}/{name}"
    host.write(path, (host.read_bytes(path) or b"").replace(b'"format": 2', b'"format": 7'), mode=0o600)
    (cause,) = runtime_causes(host)
    assert cause.confidence == WARNING and "has format 7" in cause.evidence
    assert cause.what == "a newer gpuprov made the journal of an earlier run"


def test_a_hook_that_an_update_replaced_needs_no_restart_of_docker(host: DoctorHost) -> None:
    x = replace(examined(host), modified={NVIDIA_HOOK_PATH: 20.0, "/run/docker.pid": 10.0})
    assert "hook-unseen" in [cause.rule.name for cause in diagnose(x)]
    x = replace(x, installed=Installed(replaced=frozenset({NVIDIA_HOOK_PATH})))
    assert "hook-unseen" not in [cause.rule.name for cause in diagnose(x)]
    by_another_version(host, None)
    doctor(host, command="install")
    found = examined(host).installed
    assert found is not None and NVIDIA_HOOK_PATH in found.replaced
