"""Going back all the way: whatever was done in however many runs, the host is as before the first one."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.run import run_request
from gpuprov.boot.prepare import content_of
from gpuprov.core.commands import Completed
from gpuprov.core.journal import RUNS_DIRECTORY, STATE_DIRECTORY, read_runs
from gpuprov.engines.containers import stop_command
from gpuprov.facts.boot import NODES, REFRESH, SERVE, SERVE_SOCKET, UNITS
from gpuprov.facts.host import gather
from gpuprov.facts.interpreter import MISSING
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import ChangeDone, ChangeStarted, Event, Finished, Note, Planned
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, spec_to_json
from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, LIBRARY_PATH, NVIDIA_HOOK_PATH
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from tests import simgpu
from tests.unit.ask import ask, finished
from tests.unit.fake_host import PYTHON, FakeHost, Tree, write_runfile

pytestmark = pytest.mark.root
DRIVER = "root/driver.run"
# What the container runtime makes at container starts; the last is udev's.
LINKS = {"195:0": "../nvidia0", "195:255": "../nvidiactl", "4:1": "../tty1"}


def with_runfile(host: FakeHost) -> FakeHost:
    (host.root / "root").mkdir(exist_ok=True)
    write_runfile(host.root / DRIVER)
    return host


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    made = with_runfile(FakeHost(tmp_path))
    (tmp_path / "etc/docker/daemon.json").write_text('{\n  "log-driver": "journald"\n}\n')
    made.run(("systemctl", "reload", "docker.service"))
    return made


SPEC = HostSpec(driver_version=simgpu.DRIVER_VERSION, driver_url=f"/{DRIVER}", packages=("site-gpu-tools",))


def carry_out(host: FakeHost, command: str, spec: HostSpec = SPEC, *, check: bool = False) -> list[Event]:
    return ask(host, Request(command, spec_to_json(spec), check=check, diff=check))[1]


def plan_of(events: Sequence[Event]) -> Planned:
    (plan,) = (event for event in events if isinstance(event, Planned))
    return plan


def done(events: Sequence[Event]) -> Finished:
    assert finished(events).exit_code == ExitCode.DONE, finished(events).problems
    return finished(events)


def install_in_two_runs(host: FakeHost) -> None:
    """The second run adds packages, changes docker's file again, and containers have been started since."""
    done(carry_out(host, "install", replace(SPEC, packages=())))
    done(carry_out(host, "install", replace(SPEC, docker_default_runtime=True)))
    assert len(read_runs(host)) == 2
    (host.root / "run/gpuprov").mkdir()
    (host.root / "run/gpuprov/low-level").write_text("low_level='/usr/bin/runc'\n")
    (host.root / "dev/char").mkdir(exist_ok=True)
    for name, target in LINKS.items():
        (host.root / "dev/char" / name).symlink_to(target)


def whole_tree(host: FakeHost) -> Tree:
    """All below the root, what the other tests leave out as well; the lock's file alone stays, as /run does."""
    left_out = ("/run/gpuprov.lock", "/dev/char", "/var/cache")
    return {path: value for path, value in host.everything().items() if not path.startswith(left_out)}


def test_after_two_runs_the_host_is_as_before_the_first(host: FakeHost) -> None:
    before = (whole_tree(host), dict(host.installed), dict(host.docker_loaded))
    install_in_two_runs(host)
    # systemd makes LogsDirectory=, and leaves it.
    host.path("/var/log/gpuprov-mps").mkdir(parents=True)
    host.path("/var/log/gpuprov-mps/control.log").write_text("[2026-11-27 20:00:00.000 Control] Start\n")
    events = carry_out(host, "uninstall")
    ended = done(events)
    assert (whole_tree(host), dict(host.installed), dict(host.docker_loaded)) == before
    assert warnings(events) == []
    assert [path.name for path in (host.root / "dev/char").iterdir()] == ["4:1"]
    assert not (host.root / "var/cache/gpuprov").exists()
    assert not host.exists("/var/log/gpuprov-mps")
    assert ended.changed > 0 and "as before gpuprov's first run" in ended.summary


def test_upgrade_removes_old_modules_and_rollback_restores(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions had more modules; none of them, nor its byte code, may stay importable."""
    before = whole_tree(host)
    folder = host.root / LIBRARY_PATH.lstrip("/") / "runtime_hook"
    names = ("root_walk", "low_level", "equipment")
    more = tuple((f"{LIBRARY_PATH}/runtime_hook/{name}.py", 0o644, f"# {name}\n".encode()) for name in names)
    now = deploy.deployed_files
    with monkeypatch.context() as earlier:
        earlier.setattr(deploy, "deployed_files", lambda *words, **named: (*now(*words, **named), *more))
        done(carry_out(host, "install"))
    older = {path: path.read_bytes() for path in folder.rglob("*.*")}
    assert {f"{name}.py" for name in names} < {path.name for path in older}
    assert done(carry_out(host, "install")).changed == 1
    newer = {path for path in folder.rglob("*.*") if path.is_file()}
    assert older.keys() - newer == {path for path in older if path.name.startswith(names)} and newer <= older.keys()
    assert done(carry_out(host, "install")).changed == 0
    done(carry_out(host, "rollback"))
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == older
    done(carry_out(host, "install"))
    done(carry_out(host, "uninstall"))
    assert whole_tree(host) == before


def test_programs_change_behind_the_modules_that_they_load(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two writes a container may start, or the power may go: none may then be refused."""
    now, write = deploy.deployed_files, FakeHost.write
    with monkeypatch.context() as earlier:
        older = lambda *words, **named: tuple((p, m, c + b"# older\n") for p, m, c in now(*words, **named))  # noqa: E731
        earlier.setattr(deploy, "deployed_files", older)
        done(carry_out(host, "install"))
    written: list[str] = []

    def noted(self: FakeHost, path: str, *words: Any, **named: Any) -> Any:
        written.append(path)
        return write(self, path, *words, **named)

    monkeypatch.setattr(FakeHost, "write", noted)
    for command in ("install", "rollback"):
        written.clear()
        done(carry_out(host, command))
        ours = [path for path in written if path.startswith((LIBRARY_PATH, "/usr/bin/"))]
        programs = [path for path in ours if path.startswith("/usr/bin/")]
        assert {*programs[:-1]} == {HOOK_PATH, NVIDIA_HOOK_PATH} and programs[-1] == LAUNCHER_PATH
        modules = [ours.index(path) for path in ours if path.endswith(".py")]
        assert max(modules) < ours.index(programs[0]), command


# What versions deployed that started /usr/bin/python3, whatever that was.
_BEFORE_THE_RECORD = {
    LAUNCHER_PATH: "#!/bin/sh\nexec /usr/bin/python3 -I -S -E -B -c 'import gc, sys\n' \"$@\"\n",
    HOOK_PATH: "#!/usr/bin/python3 -ISEB\nfrom runtime_hook.hook_main import main\n",
    NVIDIA_HOOK_PATH: "#!/usr/bin/python3 -ISEB\nfrom runtime_hook.hook_main import main\n",
    **{
        f"{UNITS}/{name}": content_of(f"{UNITS}/{name}", python="/usr/bin/python3").decode()
        for name in (NODES, REFRESH)
    },
}


def test_deployment_without_a_recorded_python_is_upgraded(host: FakeHost) -> None:
    before = whole_tree(host)
    done(carry_out(host, "install"))
    for path, text in _BEFORE_THE_RECORD.items():
        host.path(path).write_text(text)
    assert gather(host).interpreter.deployed == "/usr/bin/python3"
    assert done(carry_out(host, "install")).changed == 2
    recorded = gather(host).interpreter
    assert (recorded.deployed, recorded.path, recorded.fault) == (f"/usr/bin/{PYTHON}", f"/usr/bin/{PYTHON}", "")
    assert done(carry_out(host, "install")).changed == 0
    done(carry_out(host, "rollback"))
    assert {path: host.read_text(path) for path in _BEFORE_THE_RECORD} == _BEFORE_THE_RECORD
    done(carry_out(host, "uninstall"))
    assert whole_tree(host) == before


def test_missing_python_is_replaced_by_the_next_run(host: FakeHost) -> None:
    before = whole_tree(host)
    done(carry_out(host, "install"))
    named = (LAUNCHER_PATH, HOOK_PATH, NVIDIA_HOOK_PATH, f"{UNITS}/{NODES}", f"{UNITS}/{REFRESH}")
    for path in named:
        text = host.read_text(path) or ""
        assert f"/usr/bin/{PYTHON}" in text
        host.path(path).write_text(text.replace(f"/usr/bin/{PYTHON}", "/opt/python3.12/bin/python3.12-gone"))
    assert gather(host).interpreter.fault == MISSING
    assert done(carry_out(host, "install", check=True)).changed == 2
    assert done(carry_out(host, "install")).changed == 2
    assert all("-gone" not in (host.read_text(path) or "") for path in named)
    done(carry_out(host, "uninstall"))
    assert whole_tree(host) == before


def test_a_second_uninstall_does_nothing_and_an_installation_starts_afresh(host: FakeHost) -> None:
    install_in_two_runs(host)
    done(carry_out(host, "uninstall"))
    before = host.state()
    again = carry_out(host, "uninstall")
    assert (done(again).changed, done(again).summary) == (0, "there is nothing of gpuprov on this host")
    assert host.state() == before
    assert done(carry_out(host, "install")).changed > 0
    assert [run.path.rpartition("/")[2] for run in read_runs(host)] == ["0001.jsonl"]


@pytest.mark.parametrize(("command", "sign"), [("uninstall", ""), ("rollback", "-")])
def test_check_tells_what_would_be_undone_and_changes_nothing(host: FakeHost, command: str, sign: str) -> None:
    install_in_two_runs(host)
    before, journals = host.state(), read_runs(host)
    foreseen = carry_out(host, command, check=True)
    assert (host.state(), read_runs(host)) == (before, journals)
    plan = plan_of(foreseen)
    assert {change.step for change in plan.changes} == {command}
    assert f'{sign}  "default-runtime": "nvidia"' in "\n".join(change.diff for change in plan.changes)
    events = carry_out(host, command)
    undone = [event.key for event in events if isinstance(event, ChangeStarted)]
    assert undone == [change.key for change in plan.changes if change.summary.startswith("undo: ")]
    if command == "uninstall":
        assert [change.key for change in plan_of(events).changes] == [change.key for change in plan.changes]
    assert done(events).changed == done(foreseen).changed == len(plan.changes)


def test_rollback_check_without_a_run_says_so(host: FakeHost) -> None:
    foreseen = done(carry_out(host, "rollback", check=True))
    assert (foreseen.changed, foreseen.summary) == (0, "there is no run to roll back")


class Killed(BaseException):
    """As by kill -9: nothing tidies up behind it."""


def killed_in(host: FakeHost, request: Request, number: int) -> list[Event]:
    """Carry out a request that is killed when its change of that number starts; return what happened before."""
    events: list[Event] = []

    def sink(event: Event) -> None:
        if isinstance(event, ChangeStarted) and event.index == number:
            raise Killed
        events.append(event)

    with pytest.raises(Killed):
        run_request(request, sink, host)
    return events


@pytest.mark.parametrize("number", [1, 2, 4, 7, 11])
def test_an_uninstall_that_is_killed_anywhere_is_resumed(host: FakeHost, number: int) -> None:
    before = (whole_tree(host), dict(host.installed))
    install_in_two_runs(host)
    events = killed_in(host, Request("uninstall"), number)
    assert sum(isinstance(event, ChangeDone) for event in events) == number - 1
    rest = [event.index for event in carry_out(host, "uninstall") if isinstance(event, ChangeStarted)]
    assert rest[-1] == len(rest) > 0
    assert (whole_tree(host), dict(host.installed)) == before


def test_an_uninstall_that_is_killed_among_its_journals_is_resumed(tmp_path: Path) -> None:
    class Cut(FakeHost):
        def remove_tree(self, path: str) -> None:
            names = sorted((self.root / path.lstrip("/")).rglob("*.jsonl"))
            if len(names) > 1:
                names[0].unlink()
                raise Killed
            super().remove_tree(path)

    host = with_runfile(Cut(tmp_path))
    before = (whole_tree(host), dict(host.installed))
    install_in_two_runs(host)
    with pytest.raises(Killed):
        carry_out(host, "uninstall")
    done(carry_out(host, "uninstall"))
    assert (whole_tree(host), dict(host.installed)) == before


def test_an_installation_that_was_cut_off_is_undone_too(host: FakeHost) -> None:
    before = (whole_tree(host), dict(host.installed))
    killed_in(host, Request("install", spec_to_json(SPEC)), 4)
    assert read_runs(host)[-1].end == ""
    done(carry_out(host, "uninstall"))
    assert (whole_tree(host), dict(host.installed)) == before


def test_a_rolled_back_run_is_not_undone_again(host: FakeHost) -> None:
    install_in_two_runs(host)
    done(carry_out(host, "rollback"))
    kept = len(read_runs(host)[0].undoable)
    plan = plan_of(carry_out(host, "uninstall", check=True))
    assert len([change for change in plan.changes if change.summary.startswith("undo: ")]) == kept


def warnings(events: Sequence[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Note) and event.level == "warning"]


def test_what_does_not_come_back_is_told_before_anything_is_done(host: FakeHost) -> None:
    simgpu.install_tree(host.root, version="535.999.01")
    done(carry_out(host, "install"))
    daemon = host.root / "etc/docker/daemon.json"
    daemon.write_text(json.dumps({**json.loads(daemon.read_text()), "debug": True}))
    events = carry_out(host, "uninstall")
    first = next(number for number, event in enumerate(events) if isinstance(event, ChangeStarted))
    told = warnings(events[:first])
    assert any("driver 535.999.01 can't be restored" in line for line in told)
    assert "/etc/docker/daemon.json was changed after gpuprov wrote it; that change goes too" in told


def test_a_roll_back_tells_it_too(host: FakeHost) -> None:
    done(carry_out(host, "install"))
    (host.root / "etc/cdi/nvidia.json").write_text("{}")
    events = carry_out(host, "rollback")
    assert warnings(events) == ["/etc/cdi/nvidia.json was changed after gpuprov wrote it; that change goes too"]
    assert isinstance(events[1], Note)


def test_a_hook_that_nvidias_package_replaced_stays_and_does_not_go(host: FakeHost) -> None:
    done(carry_out(host, "install"))
    (host.root / "usr/bin/nvidia-container-runtime-hook").write_text("NVIDIA's")
    told = [one for one in warnings(carry_out(host, "rollback")) if "runtime-hook" in one]
    assert told == ["/usr/bin/nvidia-container-runtime-hook stays: it is no longer gpuprov's"]


class WithContainers(FakeHost):
    """A host with containers that docker lists for that word: those that run, or those that were stopped."""

    listed_for = "--quiet"

    def _docker(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[0] == "ps" and self.listed_for in words:
            return 0, "4c5f\n77aa\n"
        if words[0] == "inspect":
            rows = ("nvidia no - /trainer", "runc no - /web", "runc always gpus /server", "runc no gpus /once")
            return 0, "\n".join((*rows, "runc always - /db"))
        return super()._docker(words)


def test_a_container_that_still_runs_keeps_its_runtime(tmp_path: Path) -> None:
    host = with_runfile(WithContainers(tmp_path))
    done(carry_out(host, "install"))
    before = host.state()
    problem, restarted = finished(carry_out(host, "uninstall")).problems
    assert problem.evidence == "docker ps: trainer"
    assert problem.next_step.startswith("docker stop trainer,")
    assert restarted.evidence == "docker inspect: server (restart: always)"
    assert restarted.next_step.startswith("docker stop server,")
    assert host.state() == before


@pytest.mark.parametrize("word", ["ps", "inspect"])
def test_hanging_docker_may_have_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    host = with_runfile(WithContainers(tmp_path))
    done(carry_out(host, "install"))
    before, answer = host.state(), host._docker
    monkeypatch.setattr(host, "_docker", lambda words: (124, "") if words[0] == word else answer(words))
    (problem,) = finished(carry_out(host, "uninstall")).problems
    assert problem.what == "docker does not tell which containers it has" and host.state() == before


def test_a_task_of_swarm_is_ended_by_its_service() -> None:
    task, of_node = f"trainer.1.{'k2h' * 8}1", f"exporter.{'5ay' * 8}2.{'uvc' * 8}3"
    assert stop_command(["web", task]) == "docker stop web and docker service scale trainer=0"
    assert stop_command([task]) == "docker service scale trainer=0"
    # A global service has no scale.
    drain = f"docker node update --availability drain {'5ay' * 8}2"
    assert stop_command([of_node]) == drain
    assert stop_command(["web", task, of_node]) == f"docker stop web and {drain}"
    assert stop_command(["a.1.b"], "podman") == "podman stop a.1.b"


# What is spoilt, how it is told, and the next command; in all of them `uninstall` and `rollback` change nothing.
OBSTACLES = {
    "chattr +i {}/var/lib/gpuprov/runs/*": ("immutable (chattr +i)", "chattr -i "),
    "chattr +i {}/etc/docker/daemon.json": ("immutable (chattr +i)", "chattr -i "),
    "mount --bind {0}/etc {0}/etc; mount -o remount,bind,ro {0}/etc": ("etc is mounted read-only", "remount,rw "),
    "touch {0}/run/gpuprov.lock; cd {0}/..; seq 5000 | xargs touch 2>&- || :": ("inodes left", "df -i "),
    "cp {0}/etc/docker/daemon.json {0}/root/j; mount --bind {0}/root/j {0}/etc/docker/daemon.json": (
        "daemon.json is a mount point",
        "umount ",
    ),
    "mount --bind {0}/var {0}/var; mount -o remount,bind,noexec {0}/var": ("var is mounted noexec", "remount,exec "),
}


@pytest.mark.parametrize("spoil", OBSTACLES)
@pytest.mark.parametrize("command", ["uninstall", "rollback", "install"])
def test_what_prevents_a_command_is_known_before_its_first_change(tmp_path: Path, spoil: str, command: str) -> None:
    """Files are on a file system of their own: not each one below /tmp knows chattr(1)."""
    image = tmp_path / "image"
    script = (
        'truncate -s 300M "$1"; mkfs.ext4 -q -N 4000 "$1"; mkdir "$2"; '
        'mount -o loop "$1" "$2"; mkdir "$2/host" "$2/host/root" # few inodes, to use them up'
    )
    place = tmp_path / "disk"
    subprocess.run(("sh", "-ec", script, "sh", image, place), check=True)
    try:
        root = place / "host"
        host = with_runfile(FakeHost(root))
        if command != "install":
            done(carry_out(host, "install"))
        elif "runs" in spoil:
            spoil = "mkdir -p {0}/var/lib/gpuprov/runs; chattr +i {0}/var/lib/gpuprov/runs"
        if command == "install" and "daemon.json" in spoil:
            (root / "etc/docker/daemon.json").write_text("{}")
        subprocess.run(("sh", "-ec", spoil.format(root)), check=True)
        before = host.state()
        ended = finished(carry_out(host, command))
        told, step = OBSTACLES.get(spoil, OBSTACLES["chattr +i {}/var/lib/gpuprov/runs/*"])
        assert step in next(one for one in ended.problems if told in one.evidence).next_step
        assert host.state() == before
    finally:
        script = 'umount -l "$1/etc/docker/daemon.json" "$1/etc" "$1/var"; chattr -R -i "$2"; umount -l "$2"'
        subprocess.run(("sh", "-c", script, "sh", place / "host", place), capture_output=True, check=True)


@pytest.mark.parametrize(
    ("gone", "evidence"),
    [
        ("var/lib/gpuprov", f"{RUNS_DIRECTORY} has no run to undo, and {LAUNCHER_PATH} and {LIBRARY_PATH} are there"),
        ("var/lib/gpuprov/runs/0001.jsonl", f"{RUNS_DIRECTORY} lacks 0001.jsonl"),
    ],
)
def test_without_all_journals_nothing_is_undone(host: FakeHost, gone: str, evidence: str) -> None:
    install_in_two_runs(host)
    subprocess.run(("rm", "-r", host.root / gone), check=True)
    before = whole_tree(host)
    (problem,) = finished(carry_out(host, "uninstall")).problems
    assert problem.evidence == evidence
    assert "from a backup" in problem.next_step
    assert whole_tree(host) == before
    if gone == "var/lib/gpuprov":
        assert finished(carry_out(host, "rollback")).problems == (problem,)
    assert whole_tree(host) == before


def test_what_came_after_a_backup_of_the_journals_is_named(host: FakeHost) -> None:
    done(carry_out(host, "install"))
    kept, place = host.root.with_name("kept"), host.root / "var/lib/gpuprov"
    subprocess.run(("cp", "-a", place, kept), check=True)
    done(carry_out(host, "install", replace(SPEC, serve=True)))
    subprocess.run(("sh", "-ec", 'rm -r "$2"; mv "$1" "$2"', "sh", kept, place), check=True)
    (problem,) = finished(carry_out(host, "uninstall")).problems
    assert "not all is as it was" in problem.what
    own = "it is gpuprov's, and no journal names it"
    assert problem.evidence.splitlines() == [f"{UNITS}/{name}: {own}" for name in (SERVE, SERVE_SOCKET)]


@pytest.mark.parametrize("command", ["rollback", "uninstall"])
def test_stopped_containers_with_gpus_are_named_before_anything_is_done(tmp_path: Path, command: str) -> None:
    host = WithContainers(tmp_path)
    host.listed_for = "status=exited"
    done(carry_out(with_runfile(host), "install"))
    told = ["stopped containers with GPUs can't start again without gpuprov: once, server, trainer (docker)"]
    assert warnings(carry_out(host, command, check=True)) == told
    assert warnings(carry_out(host, command)) == told


class Meddled(FakeHost):
    """A host where a package's own scripts change a file while the package is taken away."""

    def _apt_get(self, words: tuple[str, ...]) -> tuple[int, str]:
        if "purge" in words:
            (self.root / "etc/cdi").mkdir(exist_ok=True)
            (self.root / "etc/cdi/nvidia.json").write_text("{}")
        return super()._apt_get(words)


def test_a_file_that_is_not_as_before_is_named(tmp_path: Path) -> None:
    host = with_runfile(Meddled(tmp_path))
    done(carry_out(host, "install"))
    (problem,) = finished(carry_out(host, "uninstall")).problems
    assert problem.evidence == "/etc/cdi/nvidia.json: it was not there before"
    assert not (host.root / STATE_DIRECTORY.lstrip("/")).exists()


def test_images_of_verification_go(tmp_path: Path) -> None:
    answers: dict[tuple[str, ...], str] = {
        ("docker", "images"): "gpuprov-verify:6d09\n",
        ("podman", "images"): "localhost/gpuprov-verify:6d09\n",
        ("ctr", "--address"): "docker.io/library/gpuprov-verify:6d09\nexample.org/cuda:13\n",
    }

    class WithImages(FakeHost):
        def run(self, argv: Sequence[str], **more: object) -> Completed:
            self.commands.append(tuple(argv))
            listed = answers.get(tuple(argv[:2])) if argv[-1] == "--quiet" or argv[1] == "images" else None
            if listed is not None or argv[0] in ("podman", "ctr"):
                return Completed(tuple(argv), 0, listed or "")
            return super().run(argv, **more)

        def which(self, program: str) -> str | None:
            return f"/usr/bin/{program}" if program in ("podman", "ctr") else super().which(program)

    host = WithImages(tmp_path)
    host.make_directory("/etc/containerd")
    host.write("/etc/containerd/config.toml", b'version = 2\n[grpc]\naddress = "/run"\n')
    assert done(carry_out(host, "uninstall")).changed == 3
    for command in (
        "docker rmi --force gpuprov-verify:6d09",
        "podman rmi --force localhost/gpuprov-verify:6d09",
        "ctr --address /run --namespace gpuprov-verify images remove --sync docker.io/library/gpuprov-verify:6d09",
    ):
        assert tuple(command.split()) in host.commands
    assert not [argv for argv in host.commands if argv[-1] == "example.org/cuda:13"]
