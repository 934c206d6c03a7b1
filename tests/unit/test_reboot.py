"""Reboots: only where one is needed, never twice for the same, never without permission; and what follows them."""

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from gpuprov.agent.install import UNIT, forget_resume, leave_resume
from gpuprov.boot import reboot
from gpuprov.core.changes import tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.journal import read_runs
from gpuprov.facts.boot import WANTS, RebootFacts
from gpuprov.facts.host import HostFacts, gather
from gpuprov.plan.context import source_of
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import Event, Finished, Planned, from_line
from gpuprov.protocol.request import Request, request_from_line
from gpuprov.protocol.spec import HostSpec, parse_spec, spec_to_json
from tests import simgpu
from tests.unit.ask import ask
from tests.unit.fake_host import RELEASE, FakeHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root
BOUND = "GPU 0000:1b:00.0 is bound to nouveau"


class RebootingHost(FakeHost):
    """A bare machine whose libraries are there and on whose GPUs nouveau sits until it reboots."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, gpus=1, metal=True)
        simgpu.install_tree(root)
        self.boots = 0
        self.module_in_use = True
        self.boot("nouveau")

    def boot(self, driver: str) -> None:
        """Come up with that driver on the GPUs."""
        self.boots += 1
        for path in ("sys/bus", "sys/module", "proc/driver"):
            self.remove_tree(f"/{path}")
        simgpu.write_kernel_tree(self.root, 1, driver="nvidia" if driver == "nvidia" else "nouveau")
        (self.root / f"sys/module/{driver}").mkdir(parents=True, exist_ok=True)
        boot_id = self.root / "proc/sys/kernel/random/boot_id"
        boot_id.parent.mkdir(parents=True, exist_ok=True)
        boot_id.write_text(f"boot-{self.boots}\n")

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        assert argv[0] != "modprobe" or 0 < options["timeout"] <= 60
        if argv[0] == "modprobe" and not self.module_in_use:
            self.boot("nvidia")  # all that has to be seen of it: nouveau is gone
            self.boots -= 1
            (self.root / "proc/sys/kernel/random/boot_id").write_text(f"boot-{self.boots}\n")
        elif argv[0] not in ("systemd-run", "modprobe"):
            return super().run(argv, **options)
        self.commands.append(tuple(argv))
        return Completed(tuple(argv), 1 if argv[0] == "modprobe" and self.module_in_use else 0)

    @property
    def reboots(self) -> int:
        return sum(command[0] == "systemd-run" for command in self.commands)


@pytest.fixture
def host(tmp_path: Path) -> RebootingHost:
    return RebootingHost(tmp_path / "root")


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver": "preinstalled", **values})


def install(host: FakeHost, *, returns: bool = False, **values: Any) -> tuple[Finished, list[Event]]:
    return ask(host, Request("install", spec_to_json(spec(**values)), caller_returns=returns))


def test_by_default_the_run_ends_with_3_and_says_what_to_type(host: RebootingHost) -> None:
    finished, _ = install(host)
    assert finished.exit_code == ExitCode.REBOOT_NEEDED
    (problem,) = finished.problems
    assert problem.evidence == BOUND
    assert problem.next_step.startswith("reboot it: systemctl reboot;")
    assert "gpuprov_reboot: if-needed" in problem.next_step
    assert host.reboots == 0
    assert not host.exists(f"/etc/systemd/system/{UNIT}")


def test_after_the_reboot_the_same_command_goes_on_in_the_same_run(host: RebootingHost) -> None:
    install(host)
    host.boot("nvidia")
    finished, _ = install(host)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert [run.end for run in read_runs(host)] == ["done"]
    assert not host.exists("/var/lib/gpuprov/reboot.json")
    again, _ = install(host)
    assert (again.exit_code, again.changed) == (ExitCode.DONE, 0)


def test_with_leave_the_host_reboots_and_goes_on_by_itself(host: RebootingHost) -> None:
    finished, _ = install(host, reboot="if-needed")
    assert (finished.exit_code, finished.left_boot) == (ExitCode.REBOOT_NEEDED, "boot-1")
    assert f"journalctl -u {UNIT}" in finished.summary
    assert host.reboots == 1
    unit = host.read_text(f"/etc/systemd/system/{UNIT}") or ""
    assert "StandardInput=file:/var/lib/gpuprov/resume.json" in unit
    request = request_from_line(host.read_text("/var/lib/gpuprov/resume.json") or "")
    host.boot("nvidia")
    assert ask(host, request)[0].exit_code == ExitCode.DONE
    units = "/etc/systemd/system"
    left = (f"{units}/{UNIT}", f"{units}/multi-user.target.wants/{UNIT}", "/var/lib/gpuprov/resume.json")
    assert not any(map(host.exists, left))
    assert host.reboots == 1


def test_what_a_reboot_has_not_changed_asks_for_no_second_one(host: RebootingHost) -> None:
    finished, _ = install(host, returns=True, reboot="if-needed")
    # A caller that returns needs no unit.
    assert finished.left_boot == "boot-1" and not host.exists(f"/etc/systemd/system/{UNIT}")
    host.boot("nouveau")
    finished, _ = install(host, returns=True, reboot="if-needed")
    assert finished.exit_code == ExitCode.FAILED
    (problem,) = finished.problems
    assert problem.what == f"{BOUND}, and a reboot has not changed that"
    assert RELEASE in problem.evidence and "lsinitramfs" in problem.next_step
    assert host.reboots == 1


def test_a_reboot_that_was_asked_for_in_this_very_boot_is_asked_for_again(host: RebootingHost) -> None:
    """The same command typed twice without a reboot between them: no reboot was in vain yet."""
    for _ in range(2):
        finished, _ = install(host)
        assert (finished.exit_code, finished.problems[0].evidence) == (ExitCode.REBOOT_NEEDED, BOUND)


def test_a_module_that_nothing_uses_is_unloaded_instead(host: RebootingHost) -> None:
    host.module_in_use = False
    finished, _ = install(host, reboot="if-needed")
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert host.reboots == 0


# What there is once `modprobe -r` has ended well: the driver of the GPUs, its version, /proc/modules.
UNLOADED: dict[str, tuple[Literal["nvidia", "nouveau"] | None, str, str, bool]] = {
    "the installed driver": ("nvidia", simgpu.DRIVER_VERSION, "", False),
    "no driver": (None, "", "", False),
    "another version of the driver": ("nvidia", "535.261.03", "", True),
    "the module again": (None, "", "nouveau 1 0 - Live 0x0\n", True),
    "a GPU that is still bound": ("nouveau", "", "", True),
}


@pytest.mark.parametrize("name", UNLOADED)
def test_unloading_replaces_the_reboot(host: RebootingHost, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    driver, version, modules, needed = UNLOADED[name]
    (change,) = reboot.plan(source_of(gather(host), spec(reboot="if-needed")))

    def unload(_: str) -> None:
        for path in ("sys/bus", "sys/module", "proc/driver"):
            host.remove_tree(f"/{path}")
        simgpu.write_kernel_tree(host.root, 1, version, driver=driver)
        host.path("/proc/modules").write_text(modules)

    monkeypatch.setattr(host, "boot", unload)
    host.module_in_use = False
    told: list[tuple[Any, ...]] = []
    assert change.apply(host, lambda *words: told.append(words)) == {"needed": needed}
    assert ("modprobe", "-r", "nouveau") in host.commands
    assert [(bool(text), *progress) for text, *progress in told] == ([] if needed else [(True, 0, 0)])


def test_a_reboot_for_another_reason_unloads_no_module(host: RebootingHost) -> None:
    host.boot("nvidia")
    change = reboot.Reboot(("the kernel runs another driver",), "boot-2", allowed=True)
    assert change.apply(host, tell_nobody) == {"needed": True}
    assert not any(command[0] == "modprobe" for command in host.commands)


def test_all_reasons_and_the_containers_that_stop_are_named(host: RebootingHost) -> None:
    facts = gather(host)
    gpus, other = (*facts.gpus, replace(facts.gpus[0], bus_id="0000:2b:00.0")), BOUND.replace("1b", "2b")
    facts = replace(facts, gpus=gpus, docker=replace(facts.docker, running_containers=("train", "web")))
    (change,) = reboot.plan(source_of(facts, spec(reboot="if-needed")))
    assert change.summary() == f"reboot ({BOUND}; {other}); containers that stop: train, web"
    (change,) = reboot.plan(source_of(facts, spec()))
    assert change.summary().startswith(f"stop until somebody has rebooted this host ({BOUND}; {other})")
    problem = refused(change.apply, host, tell_nobody)
    assert problem.what and problem.evidence == f"{BOUND}\n{other}"
    assert "train, web" in problem.next_step


def test_the_reboot_precedes_the_driver_in_the_plan(host: RebootingHost) -> None:
    plan = make_plan(gather(host), parse_spec({"driver_version": "570.10"}))
    steps = [item.step for item in plan.changes]
    assert steps.index("nouveau") < steps.index("reboot") < steps.index("driver")


def _with(facts: HostFacts, *, loaded: str, installed: str, module: str = "nvidia") -> HostFacts:
    gpus = tuple(replace(gpu, driver="nvidia") for gpu in facts.gpus)
    kernel = replace(facts.kernel, loaded_modules=(module,))
    driver = replace(facts.driver, kernel_version=loaded, library_version=installed)
    return replace(facts, gpus=gpus, kernel=kernel, driver=driver)


TO_INSTALL = {"driver": "runfile", "driver_version": "550.163.01"}
REASONS: dict[str, tuple[str, str, str, dict[str, Any], bool]] = {
    "all of one version": ("nvidia", "550.163.01", "550.163.01", {}, False),
    "libraries were updated": ("nvidia", "535.261.03", "550.163.01", {}, True),
    "not loaded": ("nvidia", "", "550.163.01", {}, False),
    "about to be installed": ("nvidia", "535.261.03", "535.261.03", TO_INSTALL, False),
    "about to be installed, nouveau loaded without a GPU": ("nouveau", "", "", TO_INSTALL, True),
    "preinstalled, nouveau loaded without a GPU": ("nouveau", "", "550.163.01", {}, False),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(host: RebootingHost, name: str) -> None:
    module, loaded, installed, values, needed = REASONS[name]
    facts = _with(gather(host), loaded=loaded, installed=installed, module=module)
    found = reboot.reasons(source_of(facts, spec(**values)))
    assert bool(found) is needed
    assert all(loaded in reason and installed in reason for reason in found)


def test_in_a_system_container_there_is_never_one(tmp_path: Path) -> None:
    facts = gather(FakeHost(tmp_path / "root"))
    assert reboot.reasons(source_of(_with(facts, loaded="535.261.03", installed="550.163.01"), spec())) == ()


def test_check_foresees_the_reboot_and_does_not_make_it(host: RebootingHost) -> None:
    before = host.tree()
    ended, events = ask(host, Request("install", spec_to_json(spec(reboot="if-needed")), check=True))
    assert ended.exit_code == ExitCode.DONE
    planned = next(event for event in events if isinstance(event, Planned))
    assert f"reboot ({BOUND})" in [change.summary for change in planned.changes]
    assert host.tree() == before
    assert host.reboots == 0


def test_the_environment_of_the_rest_is_for_root_alone(host: RebootingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """`systemctl show` tells a unit's own Environment= to every user, whatever the mode of its file is."""
    monkeypatch.setenv("https_proxy", 'http://user:50%"\\@proxy:3128')
    leave_resume(host, Request("install"))
    unit, path = host.read_text(f"/etc/systemd/system/{UNIT}") or "", "/var/lib/gpuprov/resume.env"
    assert f"EnvironmentFile={path}" in unit and "user:50" not in unit
    assert 'https_proxy="http://user:50%\\"\\\\@proxy:3128"\n' in (host.read_text(path) or "")
    assert host.path(path).stat().st_mode & 0o777 == 0o600
    forget_resume(host)
    assert not host.exists(path)


def test_the_units_command_starts_the_agent_from_its_own_folder(host: RebootingHost) -> None:
    """With `-S` no other copy of gpuprov can be found, as on a host that has only the pushed agent."""
    leave_resume(host, Request("install"))
    unit = host.read_text(f"/etc/systemd/system/{UNIT}") or ""
    (line,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    program, *words = shlex.split(line.partition("=")[2])
    argv = (program, "-S", *words)
    done = subprocess.run(argv, input="no request\n", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert isinstance(from_line(done.stdout), Finished)


@pytest.mark.parametrize("command", ["rollback", "uninstall"])
def test_an_undo_after_half_a_run_forgets_the_rest(host: RebootingHost, command: str) -> None:
    install(host, reboot="if-needed")
    ask(host, Request(command))
    assert not host.exists(f"/etc/systemd/system/{UNIT}")
    assert host.status(f"{WANTS}/{UNIT}") is None
    assert not host.exists("/var/lib/gpuprov/reboot.json")


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b'{"boot_id": "boot-0"}', b"\xff\x00", b'{"boot_id": 1, "reasons": 2}']
)
def test_a_spoiled_state_file_is_no_state(host: RebootingHost, content: bytes) -> None:
    host.make_directory("/var/lib/gpuprov")
    host.write("/var/lib/gpuprov/reboot.json", content)
    assert gather(host).reboot == RebootFacts("boot-1")
