"""The commands that unload a driver, what is written meanwhile, and how its users decide on the way past it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.cdi.discover import Node
from gpuprov.core.changes import FileFact, NextAction, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.places import STOPPED
from gpuprov.driver import running_driver
from gpuprov.driver.running_driver import MODULES, UNITS, ReloadDriver, Replacement, StartContainers, Unloading
from gpuprov.driver_run import RunFile
from gpuprov.facts.boot import IN_USE_MARK, REBOOT_ASKED
from gpuprov.facts.driver import GpuHolder, RunningDriver, gather_holders
from gpuprov.facts.host import HostFacts, gather
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import parse_spec
from tests.unit.loaded_host import CONTAINER, DCGM, NEW, OLD, PERSISTENCED, LoadedHost, loaded
from tests.unit.refused import refused
from tests.unit.scripted import Scripted

pytestmark = pytest.mark.root
DISPLAY = "display-manager.service"
ALL = Unloading(OLD, MODULES, (DCGM, PERSISTENCED), ("train",), boot_id="boot-1")
ACTIVE = ("systemctl", "is-active", *UNITS)
STOPS = [("systemctl", "stop", DCGM), ("systemctl", "stop", PERSISTENCED)]
UNLOADS = [("rmmod", "nvidia_modeset"), ("rmmod", "nvidia_uvm"), ("rmmod", "nvidia")]
LOAD = ("nvidia-modprobe", "-u", "-c", "0")
STARTS = [("systemctl", "start", PERSISTENCED), ("systemctl", "start", DCGM)]


@pytest.fixture
def host(tmp_path: Path) -> LoadedHost:
    return LoadedHost(tmp_path / "root")


def asked(host: LoadedHost, act: Callable[..., object], *arguments: object) -> list[tuple[str, ...]]:
    """Return the commands that a call runs."""
    host.commands.clear()
    act(host, *arguments)
    return host.commands[:]


def test_a_driver_is_unloaded_and_its_users_start_again_in_the_other_order(host: LoadedHost) -> None:
    host.container("train", 900)
    stops = [("docker", "stop", "train"), *STOPS, *UNLOADS]
    assert asked(host, running_driver.unload, ALL, tell_nobody) == stops
    lists = {"modules": [*MODULES], "units": [DCGM, PERSISTENCED], "containers": ["train"]}
    assert json.loads(host.read_text(STOPPED) or "") == lists
    assert host.path(STATE_DIRECTORY).stat().st_mode & 0o777 == 0o700
    host.on_disk, told = NEW, list[tuple[Any, ...]]()
    loads = [("modprobe", name) for name in reversed(MODULES) if ("rmmod", name) not in UNLOADS]
    starts = asked(host, running_driver.start_all_again, lambda *words: told.append(words))
    assert starts == [LOAD, *loads, *STARTS, ("docker", "start", "train")]
    named = (PERSISTENCED, DCGM, "container train")
    assert [(text.split(" runs")[0], *progress) for text, *progress in told] == [(name, 0, 0) for name in named]
    assert not host.exists(STOPPED)


def test_without_a_driver_on_the_disk_none_is_loaded(host: LoadedHost) -> None:
    stopped = Unloading(modules=("nvidia_drm",), containers=("train",))
    running_driver.stop_users(host, stopped, tell_nobody)
    assert asked(host, running_driver.start_again, tell_nobody) == [("modprobe", "nvidia_drm")]
    running_driver.stop_users(host, stopped, tell_nobody)
    host._uninstall(())
    assert asked(host, running_driver.start_again, tell_nobody) == []
    assert json.loads(host.read_text(STOPPED) or "") == {"modules": [], "units": [], "containers": ["train"]}
    assert asked(host, StartContainers(("train",)).apply, tell_nobody) == [("docker", "start", "train")]


@pytest.mark.parametrize("code", [124, 137])
def test_services_do_not_count_as_stopped_if_systemd_does_not_tell(host: LoadedHost, code: int) -> None:
    """A unit that has no GPU open would keep the old driver's libraries, and a display would count as a process."""
    real = host.run

    def run(argv: Sequence[str], **more: Any) -> Completed:
        return Completed(tuple(argv), code) if tuple(argv[:2]) == ("systemctl", "is-active") else real(argv, **more)

    facts = gather(host)
    host.run = run  # type: ignore[method-assign]
    problem = refused(running_driver.gather_running, host, facts)
    assert problem.what == "systemd does not tell which services use the GPUs"
    assert problem.next_step == "run the same command again"
    error = running_driver.unload_for_undo(host)
    assert error is not None and error.problems[0].what == problem.what and host.exists("/sys/module/nvidia")


FAILING = {
    "_docker": (Unloading(containers=("train",)), "`docker stop train` exited 1\nnot now", "docker ps"),
    "_systemctl": (Unloading(units=(DCGM,)), f"`systemctl stop {DCGM}` exited 1\nnot now", f"systemctl status {DCGM}"),
}


@pytest.mark.parametrize("program", FAILING)
def test_a_user_that_does_not_stop_is_an_error(host: LoadedHost, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, *expected = FAILING[program]
    monkeypatch.setattr(host, program, lambda words: (1, "not now"))
    problem = refused(running_driver.stop_users, host, wanted, tell_nobody)
    assert [problem.evidence, problem.next_step] == expected
    told: list[tuple[Any, ...]] = []
    running_driver.start_all_again(host, lambda *words: told.append(words))
    assert [("not now" in text, *progress) for text, *progress in told] == [(True, 0, 0)]


def test_a_process_may_take_seconds_to_let_go_of_its_gpu(host: LoadedHost) -> None:
    """Of GPU 0, which nvidia-persistenced has mapped; nobody has GPU 1."""
    assert (running_driver.still_held(host, minors=(1,)), host.slept) == ((), 0)
    assert [one.pid for one in running_driver.still_held(host, minors=(0,))] == [700]
    assert 0 < host.slept < 16  # the test's own time counts, too


def test_a_holder_or_a_kernel_that_keeps_the_driver_is_named(host: LoadedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Unloading(OLD, ("nvidia_uvm", "nvidia"))
    problem = refused(running_driver.unload, host, wanted, tell_nobody)
    assert problem.evidence == "\n".join(map(str, gather_holders(host))) and "kill 700 701 (" in problem.next_step
    for pid in (700, 701):
        host.remove_tree(f"/proc/{pid}")
    (line,) = (one for one in (host.read_text("/proc/modules") or "").splitlines() if one.startswith("nvidia "))
    host.kernel_holds = True
    for text in (line, ""):
        problem = refused(running_driver.unload, host, Unloading(OLD, ("nvidia",)), tell_nobody)
        lines = ["`rmmod nvidia` exited 1", "rmmod: ERROR: Module nvidia is in use", f"/proc/modules: {text}".strip()]
        assert problem.evidence.splitlines() == lines and "gpuprov_reboot: if-needed" in problem.next_step
        host.remove("/proc/modules")

    def vanish(words: tuple[str, ...]) -> tuple[int, str]:
        host.remove_tree(f"/sys/module/{words[0]}")
        return 1, "rmmod: ERROR: Module nvidia_uvm is not currently loaded"

    monkeypatch.setattr(host, "_rmmod", vanish)
    assert asked(host, running_driver.unload, wanted, tell_nobody) == [("rmmod", "nvidia_uvm"), ("rmmod", "nvidia")]


@pytest.mark.parametrize("held", [False, True])
def test_the_installed_driver_is_loaded_or_a_reboot_is_planned(host: LoadedHost, held: bool) -> None:
    host.container("train", 900)
    host.on_disk, host.kernel_holds, told = NEW, held, list[tuple[Any, ...]]()
    change = ReloadDriver(ALL, NEW)
    assert change.summary() == f"load driver {NEW} instead of {OLD}; stopped meanwhile: train, {DCGM}, {PERSISTENCED}"
    names = (f"stop {name} (started again afterwards)" for name in ("container train", DCGM, PERSISTENCED))
    assert change.diff(host).splitlines() == [*names, *(f"unload {name}" for name in MODULES)]
    outcome = change.apply(host, lambda *words: told.append(words))
    assert outcome == {"loaded": OLD if held else NEW} and {words[1:] for words in told} == {(0, 0)}
    assert change.next_action(outcome) is (NextAction.PLAN_AGAIN if held else NextAction.CONTINUE)
    assert host.read_text(IN_USE_MARK) == ("boot-1\n" if held else None)
    # The containers wait for the CDI specification of another driver.
    assert (host.units, host.running) == ({DCGM, PERSISTENCED}, {"train"} if held else set())
    assert held or replace(ALL, units=(), containers=()).meanwhile == ""


def test_modules_of_a_removed_driver_are_unloaded_in_order(host: LoadedHost) -> None:
    assert asked(host, running_driver.unload_unused) == UNLOADS


# What keeps the driver, the commands of an undo after is-active, what the error names.
UNDOES: dict[str, tuple[list[tuple[str, ...]], str]] = {
    "nothing": ([*STOPS, *UNLOADS], ""),
    "a process": ([], "process 950 (python3) has /dev/nvidiactl open"),
    "a service's process": ([*STOPS, *STARTS], f"open, in {PERSISTENCED}"),
    "the kernel": ([*STOPS, UNLOADS[0], *STARTS], "nvidia_modeset"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDOES)
def test_undo_unloads_or_restarts_services(host: LoadedHost, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, evidence = UNDOES[name]
    if name == "a process":
        host.process(950, "python3", "/user.slice/session-3.scope")
    elif name == "a service's process":
        monkeypatch.setattr(host, "_systemctl", lambda words: (0, "active\n" * len(UNITS)))
        monkeypatch.setattr(running_driver, "UNITS", (DCGM, PERSISTENCED))
    host.kernel_holds, found = name == "the kernel", list[Any]()
    ran = asked(host, lambda system: found.append(running_driver.unload_for_undo(system)))
    assert ran == [ACTIVE if "service" not in name else (*ACTIVE[:2], DCGM, PERSISTENCED), *commands]
    assert (found == [None]) is (name == "nothing")
    if name != "nothing":
        (problem,) = found[0].problems
        assert evidence in problem.evidence and (OLD in problem.what) is ("process" in name)


# What is special of the host, whether the driver on the disk is loaded, whether a reboot is asked for.
LOADS = {
    "the same driver": (False, False), "another driver": (True, False), "another driver, in use": (False, True),
    "a container": (False, False), "nothing is loaded": (False, False), "it does not load": (False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADS)
def test_driver_on_disk_is_loaded_if_possible(host: LoadedHost, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asks = LOADS[name]
    if name != "the same driver":
        host._lay(NEW)
    if name == "a container":
        host.path("/run/systemd/container").write_text("lxc\n")
    elif name == "nothing is loaded":
        host.remove_tree("/proc/driver/nvidia")
    elif name == "it does not load":
        monkeypatch.setattr(host, "_load_installed", lambda words: (1, ""))
    host.kernel_holds = asks
    ran = asked(host, running_driver.load_installed)
    assert [command for command in ran if command[0] == "systemctl"] == (
        [ACTIVE, *STOPS, *STARTS] if now or asks or "not load" in name else []
    )
    assert (LOAD in ran, loaded(host)[0] == NEW) == (now or "not load" in name, now)
    status = host.status(REBOOT_ASKED)
    assert (status is not None) is asks and host.units == {DCGM, PERSISTENCED}
    if status is not None:
        reasons = [f"the kernel still runs driver {OLD}, installed is {NEW}"]
        assert json.loads(host.read_text(REBOOT_ASKED) or "") == {"boot_id": "boot-1", "reasons": reasons}
        assert (status.mode, host.path(STATE_DIRECTORY).stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_reboot_is_asked_for_in_a_private_folder(host: LoadedHost) -> None:
    running_driver.note_asked(host, "boot-1", ("it is needed",))
    assert host.path(STATE_DIRECTORY).stat().st_mode & 0o777 == 0o700


# -- who uses it -----------------------------------------------------------------------------------------------------

INSPECTED: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"HostConfig": None, "Config": None}, False),
    ({"HostConfig": {"AutoRemove": False}, "Config": {"Labels": None}}, False),
    ({"HostConfig": {"AutoRemove": True}}, True),
    ({"Config": {"Labels": {"com.docker.swarm.task.id": "9x"}}}, True),
]


@pytest.mark.parametrize(("inspected", "once"), INSPECTED)
def test_users_are_gathered_by_exact_commands(host: LoadedHost, inspected: dict[str, Any], once: bool) -> None:
    host.inspected = inspected
    facts, shown = gather(host), ("systemctl", "show", "--property=Id", "--value", DISPLAY)
    found: list[RunningDriver] = []
    gathered = lambda system, facts: found.append(running_driver.gather_running(system, facts))  # noqa: E731
    assert asked(host, gathered, facts) == [(*ACTIVE, DISPLAY)]
    expected = RunningDriver(OLD, ("nvidia_modeset", "nvidia_uvm", "nvidia"), (DCGM, PERSISTENCED), {}, "",
                             gather_holders(host))  # fmt: skip
    assert found.pop() == expected
    host.make_directory("/dev/dri")
    host.make_node(NODE, 226, 128, 0o666)
    host.process(702, "/usr/bin/blender", "/user.slice/session-3.scope")
    (host.root / "proc/702/fd/0").unlink()
    (host.root / "proc/702/fd/0").symlink_to(NODE)
    host.container("train", 900)
    host.units.add(DISPLAY)
    (gpu,) = facts.driver.gpus
    driver = replace(facts.driver, gpus=(replace(gpu, drm_nodes=(Node(NODE, 226, 128),)),))
    facts = replace(facts, driver=driver, docker=replace(facts.docker, running_containers=("train",)))
    docker = [("docker", "ps", "--quiet", "--no-trunc"), ("docker", "inspect", CONTAINER)]
    assert asked(host, gathered, facts) == [(*ACTIVE, DISPLAY), shown, *docker]
    holders = gather_holders(host, (NODE,))
    assert [one.pid for one in holders] == [700, 701, 702, 900]
    assert found == [replace(expected, containers={CONTAINER: "train"}, display_manager="gdm.service", holders=holders,
                             single_use=("train",) * once)]  # fmt: skip


@pytest.mark.parametrize("word", ["ps", "inspect"])
def test_hanging_docker_may_have_containers(host: LoadedHost, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    facts, answer = gather(host), host._docker
    host.container("train", 900)
    monkeypatch.setattr(host, "_docker", lambda words: (124, "") if words[0] == word else answer(words))
    facts = replace(facts, docker=replace(facts.docker, running_containers=("train",)))
    problem = refused(running_driver.gather_running, host, facts)
    assert problem.what == "docker does not tell which containers use the GPUs"


def test_units_that_are_active_or_about_to_be() -> None:
    system = Scripted(answers={"systemctl": "active\ninactive\nactivating\nreloading\nfailed\n"})
    assert running_driver.active_units(system, ("a", "b", "c", "d", "e")) == ("a", "c", "d")


# -- the way past it -------------------------------------------------------------------------------------------------

HELD = GpuHolder(950, "python3 train.py", "/dev/nvidia0")
GDM = GpuHolder(960, "Xorg", "/dev/nvidia0", "gdm.service")
SHELL = GpuHolder(961, "gnome-shell", "/dev/nvidia0")
FOREIGN = GpuHolder(962, "python3", "/dev/nvidia0", container="5e")
OURS = GpuHolder(963, "python3", "/dev/nvidia0", container="id1")
OLLAMA = GpuHolder(964, "ollama serve", "/dev/nvidia0", "ollama.service")
TWO = {"containers": {"id1": "two", "id2": "one"}}
ONCE = {**TWO, "single_use": ("one",)}
SCREEN: dict[str, Any] = {"display_manager": "gdm.service", "holders": (GDM, SHELL)}
SOON, NO = {"reboot": "if-needed"}, {"reboot": "never"}
CONSENT, DARK = {"stop_containers": True}, {"stop_display_manager": True}
NODE = "/dev/dri/renderD128"
PLAIN = Unloading(OLD, ("nvidia_uvm", "nvidia"), (DCGM,), devices=(NODE,))
CAN_WAIT, WAITS = replace(PLAIN, boot_id="boot-1"), Replacement(keep_loaded=True)
GONE = "container one uses a GPU, and once stopped it can't be started again (--rm, or swarm)"
LATER = "or set gpuprov_reboot: if-needed, which leaves it to a reboot"
BOTH = "docker stop one two, or set gpuprov_stop_containers: true (they are started again)"
# The running driver, the specification → the way, the problem's next step.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], Replacement, str]] = {
    "unused": ({}, NO, Replacement(PLAIN), ""),
    "unused, a reboot helps": ({}, SOON, Replacement(CAN_WAIT), ""),
    "containers": (TWO, NO, Replacement(obstacles=("container one uses a GPU", "container two uses a GPU")),
                   f"{BOTH}; {LATER}"),
    "containers, consent": ({**TWO, "holders": (OURS,)}, {**CONSENT, **NO},
                            Replacement(replace(PLAIN, containers=("one", "two"))), ""),
    "one for once": (ONCE, NO, Replacement(obstacles=(GONE, "container two uses a GPU")),
                     f"docker stop one; {BOTH.replace('one ', '')}; {LATER}"),
    "one for once, consent": (ONCE, {**CONSENT, **NO}, Replacement(obstacles=(GONE,)), f"docker stop one; {LATER}"),
    "one for once, a reboot helps": (ONCE, {**CONSENT, **SOON}, WAITS, ""),
    "a process": ({"holders": (HELD, replace(HELD, pid=951))}, NO,
                  Replacement(obstacles=(str(HELD), str(replace(HELD, pid=951)))),
                  f"end what holds the GPUs: kill 950 951; {LATER}"),
    # ollama.service has Restart=always, as the units of most monitoring agents.
    "a process of a service": ({"holders": (HELD, OLLAMA)}, NO, Replacement(obstacles=(str(HELD), str(OLLAMA))),
                               "end what holds the GPUs: kill 950 964 (if they come again: systemctl stop "
                               f"ollama.service); {LATER}"),
    "a process, a reboot helps": ({"holders": (HELD,)}, SOON, WAITS, ""),
    "an old installer can't wait": ({"holders": (HELD,)}, {**SOON, "driver_version": "545.23.08"},
                                    Replacement(obstacles=(str(HELD),)), "end what holds the GPUs: kill 950"),
    "a display": (SCREEN, NO, Replacement(obstacles=(str(GDM), str(SHELL))),
                  "systemctl stop gdm.service, or set gpuprov_stop_display_manager: true; "
                  f"end what holds the GPUs: kill 961; {LATER}"),
    "a display, consent": (SCREEN, {**DARK, **NO}, Replacement(replace(PLAIN, units=("gdm.service", DCGM))), ""),
    "no display": ({}, {**DARK, **NO}, Replacement(PLAIN), ""),
    "a service and its container": ({**SCREEN, "holders": (replace(HELD, unit=DCGM), FOREIGN)}, {**DARK, **NO},
                                    Replacement(obstacles=(str(FOREIGN),)),
                                    f"end what holds the GPUs: kill 962; {LATER}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    found = gather(LoadedHost(tmp_path_factory.mktemp("host") / "root"))
    gpus = tuple(replace(gpu, drm_nodes=(Node(NODE, 226, 128),)) for gpu in found.driver.gpus)
    return replace(found, driver=replace(found.driver, gpus=gpus))


def driver(facts: HostFacts, running: dict[str, Any], **values: Any) -> RunFile:
    plain = RunningDriver(OLD, ("nvidia_uvm", "nvidia"), (DCGM,), {}, "", ())
    spec = parse_spec({"driver_version": NEW, "driver_url": "/driver.run", **values})
    return RunFile(replace(facts, running=replace(plain, **running)), spec)


@pytest.mark.parametrize("name", WAYS)
def test_the_way_past_a_loaded_driver(facts: HostFacts, name: str) -> None:
    running, values, way, step = WAYS[name]
    asked = driver(facts, running, **values)
    assert running_driver.replacement(asked) == way
    what = f"driver {OLD} is loaded and in use, so {asked.spec.driver_version} can't replace it"
    expected = (Problem(what, "\n".join(way.obstacles), step),) if step else ()
    assert running_driver.problems(asked) == expected
    starts = way.unloading.containers if way.unloading is not None else ()
    assert running_driver.plan_containers(asked) == ((StartContainers(starts),) if starts else ())


# The driver on the disk, the boot in which it could not be unloaded, whether a reboot helps → the way.
TRIED = [
    (OLD, b"boot-1\n", "if-needed", WAITS), (OLD, b"boot-0\n", "if-needed", Replacement(CAN_WAIT)),
    (OLD, b"\xff", "if-needed", Replacement(CAN_WAIT)), (OLD, b"boot-1\n", "never", Replacement(PLAIN)),
    (NEW, b"boot-1\n", "never", WAITS), (NEW, b"boot-0\n", "never", Replacement(CAN_WAIT)),
]  # fmt: skip


@pytest.mark.parametrize(("on_disk", "mark", "reboot", "way"), TRIED)
def test_driver_that_stays_loaded_waits(
    facts: HostFacts, on_disk: str, mark: bytes, reboot: str, way: Replacement
) -> None:
    facts = replace(facts, driver=replace(facts.driver, library_version=on_disk))
    there = driver(replace(facts, files={IN_USE_MARK: FileFact(mark, 0o644, 0, 0)}), {}, reboot=reboot)
    assert (running_driver.replacement(there), running_driver.problems(there)) == (way, ())


# Of the host: the driver on the disk, the loaded one, its modules, displays, its container, the specification.
IN_THE_WAY = [
    (OLD, OLD, (), (), "", "auto", True), (OLD, "", (), (), "", "auto", False),
    (OLD, "", ("nvidia",), (), "", "auto", True),
    (OLD, "", (), (":0",), "", "auto", True), (OLD, OLD, (), (), "lxc", "build", False),
    (OLD, OLD, (), (), "", "none", False), ("", OLD, (), (), "", "auto", True), (NEW, OLD, (), (), "", "auto", True),
    (NEW, NEW, (), (), "", "auto", False), (NEW, "", ("nvidia",), (), "", "auto", False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("on_disk", "loaded", "modules", "displays", "container", "kernel_modules", "expected"), IN_THE_WAY
)
def test_what_is_in_the_way_of_another_driver(
    facts: HostFacts, on_disk: str, loaded: str, modules: tuple[str, ...], displays: tuple[str, ...], container: str,
    kernel_modules: str, expected: bool,
) -> None:  # fmt: skip
    facts = replace(
        facts,
        driver=replace(facts.driver, library_version=on_disk, kernel_version=loaded),
        kernel=replace(facts.kernel, loaded_modules=modules, container=container),
        displays=displays,
        has_module=True,
    )
    there = driver(facts, {}, kernel_modules=kernel_modules, reboot="never")
    assert running_driver.is_in_the_way(there) is expected
    assert (running_driver.replacement(there) == Replacement()) is not expected
    assert running_driver.replacement(replace(there, facts=replace(there.facts, running=None))) == Replacement()
    assert running_driver.is_other(facts) is ((on_disk, loaded) == (NEW, OLD))


def test_containers_of_a_killed_run_start_with_those_of_this_one(facts: HostFacts) -> None:
    stopped = FileFact(json.dumps({"containers": ["one", "three"]}).encode(), 0o600, 0, 0)
    there = replace(facts, files={STOPPED: stopped})
    (change,) = running_driver.plan_containers(driver(there, TWO, stop_containers=True))
    assert change == StartContainers(("one", "three", "two"))
    assert change.summary() == "start again: one, three, two"
    assert running_driver.plan_containers(driver(there, {})) == (StartContainers(("one", "three")),)


def test_a_service_is_named_beside_the_process_to_kill() -> None:
    mine = GpuHolder(5, "train", NODE, "user@1000.service")
    assert running_driver.end_command((mine,)) == "kill 5"
    found = running_driver.end_command((mine, GpuHolder(6, "ollama", NODE, "ollama.service")))
    assert found == "kill 5 6 (if they come again: systemctl stop ollama.service)"
    found = running_driver.end_command((GpuHolder(6, "x", NODE, "data\\x2dx.service"),))
    assert found == "kill 6 (if they come again: systemctl stop 'data\\x2dx.service')"
