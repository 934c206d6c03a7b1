"""The six laws that hold for every step: what a user relies on without reading how a step works."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuprov.agent.run import run_request
from gpuprov.core.journal import read_runs
from gpuprov.core.system import System
from gpuprov.facts.host import gather
from gpuprov.plan.context import PlanContext
from gpuprov.plan.steps import CHANGE_KINDS, STEPS, make_plan
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import ChangeDone, Event, Planned
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, parse_spec, spec_to_json
from tests import simgpu
from tests.files import put
from tests.gpg import gpg_home
from tests.lab.repository import build_repository
from tests.loopback import served
from tests.runs import as_a_run, ignore, undo_last
from tests.unit.ask import ask, finished
from tests.unit.fake_host import PYTHON, FakeHost, write_runfile

pytestmark = pytest.mark.root
# The first two have nothing to do in a system container; test_nouveau.py holds the laws for them. Only a bundle gives
# "images" something to do: bundle/test_use.py holds the laws over that one. Engines that nobody names are left alone:
# engines/test_other_engines.py. The watch is off unless it is asked for: test_watch.py. An image is cleaned in
# test_image.py.
_ELSEWHERE = ("nouveau", "reboot", "images", "engines", "watch", "clean image")
STEP_NAMES = tuple(step.name for step in STEPS if step.name not in _ELSEWHERE)
# What others keep where the steps work; none of it is gpuprov's.
FOREIGN = {
    "etc/apt/sources.list.d/other.sources": "Types: deb\nURIs: http://other.example/debian\nSuites: ./\n",
    "etc/apt/keyrings/other.gpg": "not ours",
    "etc/docker/daemon.json": '{\n  "runtimes": {"kata": {"path": "/usr/bin/kata"}},\n  "log-driver": "journald"\n}\n',
    "etc/cdi/other.json": "{}",
    "usr/lib/gpuprov/README": "a note of the administrator's",
    "dev/null-like": "",
}


def lay_foreign(root: Path) -> None:
    for path, text in FOREIGN.items():
        put(root / path, text)


# What nvidia-docker 1 has left, for the step that removes it.
LEFTOVER = "etc/default/nvidia-docker"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostSpec]:
    """A spec that gives every step something to do, with its files on a real web server."""
    folder = tmp_path_factory.mktemp("www")
    with gpg_home(tmp_path_factory.mktemp("gpg") / "home") as home:
        fingerprint = build_repository(folder / "apt", home)
    run_file = folder / "driver.run"
    write_runfile(run_file)
    with served(folder) as url:
        repository = {"name": "site", "uri": f"{url}/apt", "key_url": f"{url}/apt/key.asc"}
        values = {
            "driver_version": simgpu.DRIVER_VERSION,
            "driver_url": f"{url}/driver.run",
            "driver_sha256": hashlib.sha256(run_file.read_bytes()).hexdigest(),
            "repositories": [{**repository, "key_fingerprint": fingerprint}],
            "packages": ["site-gpu-tools=1.0"],
            "migrate_nvidia_docker": True,
        }
        yield parse_spec(values)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return used_host(tmp_path)


def used_host(root: Path) -> FakeHost:
    """Return a host that has files of others and leftovers, and whose docker runs with the file that it finds."""
    made = FakeHost(root)
    lay_foreign(root)
    put(root / LEFTOVER, "NV_DOCKER=docker\n")
    made.run(("systemctl", "reload", "docker.service"))
    return made


@dataclass(frozen=True)
class Applied:
    """What a step did: the keys it planned and those that the journal says were done."""

    planned: tuple[str, ...]
    done: tuple[str, ...]


def apply_step(host: System, spec: HostSpec, name: str) -> Applied:
    """Plan one step and carry it out, as a run of its own."""
    step = next(step for step in STEPS if step.name == name)
    changes = step.plan(PlanContext(gather(host), spec))
    as_a_run(host, *changes)
    entries = read_runs(host)[-1].entries
    planned = tuple(change.key for change in changes)
    return Applied(planned, tuple(entry.key for entry in entries if entry.state == "done"))


def bring_up_to(host: System, spec: HostSpec, name: str) -> None:
    """Carry out all steps before the named one; without nodes, so that there are some to make."""
    for before in STEP_NAMES[: STEP_NAMES.index(name)]:
        apply_step(host, spec, before)


def install(host: FakeHost, spec: HostSpec, *, check: bool = False) -> list[Event]:
    return ask(host, Request("install", spec_to_json(spec), check=check, diff=check))[1]


@pytest.mark.parametrize("name", STEP_NAMES)
def test_check_changes_nothing(host: FakeHost, spec: HostSpec, name: str) -> None:
    bring_up_to(host, spec, name)
    before = host.state()
    host.commands.clear()
    events = install(host, spec, check=True)
    assert finished(events).exit_code == ExitCode.DONE
    assert any(isinstance(event, Planned) and event.changes for event in events)
    assert host.state() == before
    systemd = {command[1] for command in host.commands if command[0] == "systemctl"}
    assert systemd <= {"show", "is-active", "is-enabled", "list-units"}
    programs = {command[0] for command in host.commands}
    # NVML is asked, for a diff shows what it says; the package sources are read in a copy.
    copying = {"cp", "apt-get", "apt-cache"}
    assert programs <= {"dpkg-query", "docker", "systemctl", f"/usr/bin/{PYTHON}", *copying, sys.executable}
    assert all("update" in command and "-c" in command for command in host.commands if command[0] == "apt-get")


@pytest.mark.parametrize("name", STEP_NAMES)
def test_applying_twice_changes_once(host: FakeHost, spec: HostSpec, name: str) -> None:
    bring_up_to(host, spec, name)
    assert apply_step(host, spec, name).planned, "the laws would hold for nothing"
    before = host.state()
    assert apply_step(host, spec, name).planned == ()
    assert host.state() == before


@pytest.mark.parametrize("name", STEP_NAMES)
def test_the_forecast_equals_what_was_done(host: FakeHost, spec: HostSpec, name: str) -> None:
    bring_up_to(host, spec, name)
    forecast = make_plan(gather(host), spec)
    keys = [item.change.key for item in forecast.changes]
    events = install(host, spec)
    assert finished(events).exit_code == ExitCode.DONE
    assert [event.key for event in events if isinstance(event, ChangeDone)] == keys
    assert [entry.key for entry in read_runs(host)[-1].entries if entry.state == "done"] == keys


@pytest.mark.parametrize("name", STEP_NAMES)
def test_what_is_not_ours_survives(host: FakeHost, spec: HostSpec, name: str) -> None:
    bring_up_to(host, spec, name)
    apply_step(host, spec, name)
    for path, text in FOREIGN.items():
        found = (host.root / path).read_text()
        if path.endswith("daemon.json"):
            assert '"log-driver": "journald"' in found
            assert '"/usr/bin/kata"' in found
        else:
            assert found == text


@pytest.mark.parametrize("name", STEP_NAMES)
def test_undo_gives_back_every_byte_owner_and_mode(host: FakeHost, spec: HostSpec, name: str) -> None:
    (host.root / "etc/docker/daemon.json").chmod(0o640)
    bring_up_to(host, spec, name)
    tree, installed, loaded, _ = host.state()
    apply_step(host, spec, name)
    undo_last(host)
    after, installed_after, loaded_after, _ = host.state()
    log = {"/var/log/nvidia-installer.log"}
    assert {path: after.get(path) for path in {*tree, *after} - log if after.get(path) != tree.get(path)} == {}
    assert installed_after == installed
    assert loaded_after == loaded


# What the download brings, the driver's installation uses up: once that is done, nobody misses it.
@pytest.mark.parametrize("name", [name for name in STEP_NAMES if name != "download"])
def test_done_means_looked_again(host: FakeHost, spec: HostSpec, name: str) -> None:
    """Somebody undoes a step's work behind the run's back: the run must not call itself done."""
    steps = {item.change.key: item.step for item in make_plan(gather(host), spec).changes}
    bring_up_to(host, spec, name)
    if name not in steps.values():
        steps.update({item.change.key: item.step for item in make_plan(gather(host), spec).changes})
    last = [item.change.key for item in make_plan(gather(host), spec).changes][-1]
    events: list[Event] = []
    undone = False

    def sabotage(event: Event) -> None:
        nonlocal undone
        events.append(event)
        if isinstance(event, ChangeDone) and event.key == last:
            for entry in read_runs(host)[-1].undoable:
                if steps.get(entry.key) == name:
                    CHANGE_KINDS[entry.kind].undo(host, entry.before, entry.outcome)
                    undone = True

    run_request(Request("install", spec_to_json(spec)), sabotage, host)
    assert undone
    assert finished(events).exit_code == ExitCode.FAILED
    assert "did not settle" in finished(events).problems[0].what


def test_a_problem_that_came_during_the_run_is_told_at_its_end(host: FakeHost, spec: HostSpec) -> None:
    last = make_plan(gather(host), spec).changes[-1].change.key
    events: list[Event] = []

    def spoil(event: Event) -> None:
        events.append(event)
        if isinstance(event, ChangeDone) and event.key == last:
            put(host.root / "etc/docker/daemon.json", "{,}")

    run_request(Request("install", spec_to_json(spec)), spoil, host)
    assert finished(events).exit_code == ExitCode.FAILED
    assert "daemon.json" in finished(events).problems[0].what


# As the playbooks' roles divide the plan: not in its own order.
PARTS = (
    ("repositories", "packages"), ("nouveau", "reboot"), ("download", "driver", "boot", "device nodes"),
    ("leftovers", "toolkit", "cdi"), ("docker", "engines"),
)  # fmt: skip


def install_parts(host: FakeHost, spec: HostSpec, run_id: str = "", *, check: bool = False) -> list[str]:
    """Install part by part; return the keys of what was planned."""
    keys: list[str] = []
    for steps in PARTS:
        request = Request("install", spec_to_json(spec), check=check, steps=steps, run_id=run_id)
        ended, events = ask(host, request)
        assert ended.exit_code == ExitCode.DONE, ended.problems
        planned = [change for event in events if isinstance(event, Planned) for change in event.changes]
        assert {change.step for change in planned} <= set(steps)
        keys += [change.key for change in planned]
    return keys


def test_part_by_part_is_the_whole(host: FakeHost, spec: HostSpec, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = used_host(tmp_path_factory.mktemp("other") / "root")
    forecast = [item.change.key for item in make_plan(gather(host), spec).changes]
    assert sorted(install_parts(host, spec, check=True)) == sorted(forecast)
    install_parts(host, spec)
    assert install_parts(host, spec) == []
    install(other, spec)
    (one, *rest), (two, *other_rest) = host.state(), other.state()
    assert one.keys() == two.keys()
    # Python's bytecode holds the time of its source.
    assert [path for path in one if one[path] != two[path] and not path.endswith(".pyc")] == []
    assert rest == other_rest


def test_a_part_that_needs_one_left_out_is_refused(host: FakeHost, spec: HostSpec) -> None:
    """As `--tags toolkit` on a bare host."""
    before = host.state()
    ended, _ = ask(host, Request("install", spec_to_json(spec), steps=("leftovers", "toolkit", "cdi")))
    (problem,) = ended.problems
    assert problem.what == "the CDI specification describes the driver, and this run leaves out what the driver needs"
    assert "--tags driver,toolkit" in problem.next_step
    assert host.state() == before


def test_no_engine_gets_a_runtime_that_is_missing(host: FakeHost, spec: HostSpec) -> None:
    """As `--tags engine` on a bare host."""
    before, request = host.state(), Request("install", spec_to_json(spec), steps=("docker", "engines"))
    ended, _ = ask(host, request)
    (problem,) = ended.problems
    assert problem.what == "this run registers a container runtime that is missing"
    assert "--tags repos,driver,toolkit,engine" in problem.next_step
    assert host.state() == before


@pytest.mark.parametrize("installs", [install, install_parts], ids=["as a whole", "part by part"])
def test_a_docker_that_began_before_the_hook_is_restarted_once(
    host: FakeHost, spec: HostSpec, installs: Callable[[FakeHost, HostSpec], object]
) -> None:
    """Its daemon.json names the runtime, as a site's configuration management writes it."""
    runtime = '{"runtimes": {"nvidia": {"path": "/usr/bin/gpuprov-container-runtime"}}}'
    put(host.root / "etc/docker/daemon.json", runtime)
    host.run(("systemctl", "restart", "docker.service"))
    put(host.root / "run/docker.pid", "1")
    os.utime(host.root / "run/docker.pid", (1, 1))
    begun = host.docker_starts
    installs(host, spec)
    assert host.docker_starts == begun + 1
    installs(host, spec)
    assert host.docker_starts == begun + 1
    # A later change of the hook is no news to docker.
    hook = host.root / "usr/bin/nvidia-container-runtime-hook"
    for spoil in (lambda: hook.write_text(f"{hook.read_text()}\n"), hook.unlink):
        spoil()
        os.utime(host.root / "run/docker.pid", (1, 1))
        installs(host, spec)
        assert host.docker_starts == begun + 1


def test_the_runtimes_folders_are_opened_to_other_users(host: FakeHost, spec: HostSpec) -> None:
    """After `chmod -R go-rwx`, or a hardening script: rootless engines start the runtime too."""
    install(host, spec)
    folder = host.root / "usr/lib/gpuprov"
    (folder / "runtime_hook").chmod(0o700)
    folder.chmod(0o700)
    assert finished(install(host, spec)).changed == 2
    assert {one.stat().st_mode & 0o777 for one in (folder, folder / "runtime_hook")} == {0o755}
    assert finished(install(host, spec)).changed == 0


def test_a_runtime_that_can_not_read_the_settings_replaces_no_other(host: FakeHost, spec: HostSpec) -> None:
    """After a downgrade, say: each container with GPUs would be refused."""
    host.make_directory("/etc/gpuprov", 0o755)
    host.write("/etc/gpuprov/container-runtime.toml", b"[of-a-later-version]\nkey = 1\n")
    before = host.state()
    for check in (True, False):
        ended, _ = ask(host, Request("install", spec_to_json(spec), check=check))
        (problem,) = ended.problems
        assert problem.what == "the container runtime can't read its settings: containers with GPUs would not start"
        assert problem.evidence.startswith("/etc/gpuprov/container-runtime.toml: there is no key 'of-a-later-version.")
        assert host.state() == before


def test_parts_of_one_run_are_rolled_back_together(host: FakeHost, spec: HostSpec) -> None:
    tree, installed, loaded, _ = host.state()
    install_parts(host, spec, "one play")
    assert len(read_runs(host)) == 1
    run_request(Request("rollback"), ignore, host)
    after, installed_after, loaded_after, _ = host.state()
    log = {"/var/log/nvidia-installer.log"}
    assert {path for path in {*tree, *after} - log if after.get(path) != tree.get(path)} == set()
    assert (installed_after, loaded_after) == (installed, loaded)
    install_parts(host, spec, "one play")
    assert len(read_runs(host)) == 2


def test_parts_of_different_runs_are_rolled_back_one_by_one(host: FakeHost, spec: HostSpec) -> None:
    install_parts(host, spec)
    # In a system container nothing has to be kept off the GPUs, so that part has no run.
    assert len(read_runs(host)) == len(PARTS) - 1


def test_a_step_of_no_such_name_is_refused_before_anything_is_done(host: FakeHost, spec: HostSpec) -> None:
    ended, _ = ask(host, Request("install", spec_to_json(spec), steps=("dokcer",)))
    assert ended.exit_code == ExitCode.USAGE
    assert "there is no step 'dokcer'" in ended.problems[0].what
    assert read_runs(host) == ()
