"""daemon.json changed under a real dockerd: taken up, refused, gone back, undone."""

import contextlib
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprov.checks.engines import DOCKER
from gpuprov.core.apply import apply_changes, undo_runs
from gpuprov.core.changes import Change, Json
from gpuprov.core.journal import last_undoable_run, new_journal, read_runs
from gpuprov.core.system import System
from gpuprov.engines import docker
from gpuprov.engines.docker_change import ReconfigureDocker
from gpuprov.engines.docker_unit import DockerUnit, refusal
from gpuprov.engines.known import RuntimeEntry
from gpuprov.protocol.errors import GpuprovError
from tests.files import put
from tests.integration.dockerd import DockerHost, docker_host
from tests.runs import tell
from tests.unit.refused import refused

pytestmark = [pytest.mark.root, pytest.mark.needs("dockerd")]

# What stood in the file before and was never loaded: a start with it fails.
UNKNOWN_OPTION = b'{\n\t"no-such-option": true,  "debug": true}'


@pytest.fixture
def host() -> Iterator[DockerHost]:
    with docker_host() as running:
        yield running


@pytest.fixture
def runtime(host: DockerHost) -> str:
    """A runtime that leaves a mark and lets runc do the work."""
    path = host.folder / "runtime"
    put(path, f'#!/bin/sh\ntouch {host.folder}/runtime-was-called\nexec runc "$@"\n', 0o755)
    return str(path)


def planned(host: DockerHost, runtime: str, *, set_default: bool = False) -> ReconfigureDocker:
    (change,) = docker.plan(docker.gather(host), RuntimeEntry(path=runtime, set_default=set_default))
    assert isinstance(change, ReconfigureDocker)
    return change


def configure(host: DockerHost, runtime: str, *, set_default: bool = False) -> Json:
    """Plan, apply, and look again; return what was captured before."""
    change = planned(host, runtime, set_default=set_default)
    before = json.loads(json.dumps(change.capture(host)))
    change.apply(host, tell)
    assert docker.plan(docker.gather(host), RuntimeEntry(path=runtime, set_default=set_default)) == ()
    return before  # type: ignore[no-any-return]


def image(host: DockerHost, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DOCKER_HOST", host.socket)
    return DOCKER.image(System())


def start_container(host: DockerHost, image: str, *options: str) -> str:
    """Start a container that runs until its input ends, which it never does."""
    return host.docker("run", "--detach", "--interactive", "--network=none", "--name=web", *options, image, "cat")


def is_running(host: DockerHost, container: str) -> bool:
    return host.docker("inspect", "--format", "{{.State.Running}}", container) == "true"


def runtimes(host: DockerHost) -> dict[str, str]:
    return dict(docker.gather(host).runtimes or {})


def test_runtime_is_present_and_runs(host: DockerHost, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(host, runtime, set_default=True)
    assert (runtimes(host)["nvidia"], docker.gather(host).default_runtime) == (runtime, "nvidia")
    assert host.restarts == 1
    tag = image(host, monkeypatch)
    said = host.docker("run", "--rm", "--network=none", "--runtime=nvidia", tag, "sh", "-c", "echo $((6 * 7))")
    assert said == "42"
    assert (host.folder / "runtime-was-called").exists()


def test_a_running_container_survives(host: DockerHost, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    container = start_container(host, image(host, monkeypatch))
    pid = host.pid
    change = planned(host, runtime)
    assert change.containers == ("web",)
    change.apply(host, tell)
    assert runtimes(host)["nvidia"] == runtime
    assert is_running(host, container)
    assert (host.pid, host.restarts) == (pid, 0)


def test_a_file_that_was_written_before_is_only_taken_up(host: DockerHost, runtime: str) -> None:
    text = json.dumps({"runtimes": {"nvidia": {"path": runtime}}})
    host.daemon_json.write_text(text)
    assert planned(host, runtime).content is None
    configure(host, runtime)
    assert host.daemon_json.read_text() == text


def test_a_stopped_docker_is_started(host: DockerHost, runtime: str) -> None:
    host.stop()
    configure(host, runtime)
    assert host.pid


def test_a_file_that_docker_can_not_use_never_stops_docker(host: DockerHost, runtime: str) -> None:
    host.daemon_json.write_bytes(UNKNOWN_OPTION)
    pid = host.pid
    problem = refused(planned(host, runtime).apply, host, tell)
    assert "the old one is back and docker runs with it" in problem.what
    assert "no-such-option" in problem.evidence and "configuration option" in problem.evidence
    assert host.daemon_json.read_bytes() == UNKNOWN_OPTION
    assert (host.pid, host.restarts) == (pid, 0)


def test_a_stopped_docker_that_neither_file_can_start_is_told_apart(host: DockerHost, runtime: str) -> None:
    host.stop()
    host.daemon_json.write_bytes(UNKNOWN_OPTION)
    problem = refused(planned(host, runtime).apply, host, tell)
    assert "nor with the old one, which is back" in problem.what
    assert "no-such-option" in problem.evidence
    assert host.daemon_json.read_bytes() == UNKNOWN_OPTION


def test_a_mistake_that_only_a_start_finds_brings_the_old_file_back(host: DockerHost, runtime: str) -> None:
    old = b'{"debug": true}\n'
    host.daemon_json.write_bytes(old)
    content = json.dumps({"storage-driver": "no-such-driver", "runtimes": {"nvidia": {"path": runtime}}})
    problem = refused(ReconfigureDocker(content, runtime, restart=True).apply, host, tell)
    assert "the old one is back and docker runs with it" in problem.what
    assert "no-such-driver" in problem.evidence
    assert host.daemon_json.read_bytes() == old
    assert host.pid and "nvidia" not in runtimes(host)


def test_a_file_that_can_not_be_written_changes_nothing(host: DockerHost, runtime: str) -> None:
    old = b'{"debug": true}\n'
    host.daemon_json.write_bytes(old)
    if subprocess.run(("chattr", "+i", str(host.daemon_json)), capture_output=True, check=False).returncode != 0:
        pytest.skip("this file system knows no immutable files")
    pid = host.pid
    try:
        with pytest.raises(GpuprovError) as caught:
            planned(host, runtime).apply(host, tell)
    finally:
        subprocess.run(("chattr", "-i", str(host.daemon_json)), check=True)
    (problem,) = caught.value.problems
    assert "/etc/docker/daemon.json can't be written" in problem.what
    assert "lsattr" in problem.next_step
    assert host.daemon_json.read_bytes() == old
    assert [path.name for path in host.daemon_json.parent.iterdir() if "gpuprov" in path.name] == []
    assert (host.pid, host.restarts) == (pid, 0)


def seen(path: Path) -> tuple[bytes, int, int, int]:
    found = path.stat()
    return path.read_bytes(), stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid


def test_undo_gives_back_content_mode_and_owner(host: DockerHost, runtime: str) -> None:
    put(host.daemon_json, b'{"debug":true}', 0o640)
    os.chown(host.daemon_json, 12, 34)
    old = seen(host.daemon_json)
    before = configure(host, runtime)
    assert seen(host.daemon_json)[1:] == old[1:]
    for _ in range(2):
        ReconfigureDocker.undo(host, before, {})
        assert seen(host.daemon_json) == old
        assert "nvidia" not in runtimes(host)
    # One for the change, one for its undoing; the second undoing found nothing to do.
    assert host.restarts == 2


# -- what becomes of docker in the end ---------------------------------------------------------------------------


def install_again(host: DockerHost, runtime: str, *, set_default: bool) -> None:
    """Do what a run does for docker, with its journal; a file that docker does not take fails, and is left alone."""
    facts = docker.gather(host)
    if docker.problems(facts, RuntimeEntry(path=runtime, set_default=set_default)):
        return
    changes = docker.plan(facts, RuntimeEntry(path=runtime, set_default=set_default))
    journal = new_journal(host, "install")
    with contextlib.suppress(GpuprovError):
        apply_changes(changes, host, journal, lambda event: None)
    journal.end("done")


def undo_all(host: DockerHost) -> None:
    runs = tuple(run for run in reversed(read_runs(host)) if run.undoable)
    undo_runs(host, runs, KINDS, lambda event: None)


KINDS: dict[str, type[Change]] = {"ReconfigureDocker": ReconfigureDocker}
HISTORIES = (
    # An empty file is refused by docker 20.10; between two runs it is an intermediate state.
    ("install", b"", "default", b'{"debug": true}', "install", b"{}", "default", "undo"),
    ("install", UNKNOWN_OPTION, "default", "restart", "rollback", "undo"),
    ("default", None, "restart", "restart", "restart", "install", b"{", "rollback", "rollback", "undo"),
)
# Each start of docker takes seconds on a busy machine.
SLOW = pytest.param(HISTORIES[2], marks=pytest.mark.slow)


@pytest.mark.parametrize("history", [HISTORIES[0], pytest.param(HISTORIES[1], marks=pytest.mark.slow), SLOW])
@pytest.mark.parametrize("first", [b'{"debug":true}\r\n', pytest.param(None, marks=pytest.mark.slow)])
def test_docker_ends_as_it_was_before_the_first_run(
    host: DockerHost, runtime: str, first: bytes | None, history: tuple[str | bytes | None, ...]
) -> None:
    if first is not None:
        host.daemon_json.write_bytes(first)
        host.docker("info")
    for action in history:
        if isinstance(action, bytes):
            host.daemon_json.write_bytes(action)
        elif action is None:
            host.daemon_json.unlink(missing_ok=True)
        elif action == "restart":
            host.run(("systemctl", "restart", "docker.service"))
        elif action == "rollback":
            last = last_undoable_run(host)
            if last is not None:
                with contextlib.suppress(GpuprovError):
                    undo_runs(host, (last,), KINDS, lambda event: None)
        elif action == "undo":
            undo_all(host)
        else:
            install_again(host, runtime, set_default=action == "default")
    content = host.daemon_json.read_bytes() if host.daemon_json.exists() else None
    assert content == first
    assert host.pid and "nvidia" not in runtimes(host)


def test_an_installation_restarts_a_docker_that_was_started_too_often(host: DockerHost, runtime: str) -> None:
    for _ in range(4):
        host.run(("systemctl", "restart", "docker.service"))
    assert not host.pid
    configure(host, runtime)
    assert host.pid


# What stands in the file, and a part of what dockerd says to it; nothing where it takes it.
READINGS = {
    "nothing wrong": (b'{"debug": true}', ""),
    "a name twice": (b'{"debug": true, "debug": false}', ""),
    "no UTF-8": (b'{"labels": ["a=caf\xe9"]}', ""),
    "a level of its log": (b'{"log-level": "debug"}', ""),
    "CRLF": (b'{\r\n"debug": true\r\n}\r\n', ""),
    "unknown option": (UNKNOWN_OPTION, "no-such-option"),
    "torn": (b"{", "unexpected EOF"),
}


def test_docker_itself_says_whether_it_takes_a_file(host: DockerHost) -> None:
    said = {}
    for name, (content, _) in READINGS.items():
        host.daemon_json.write_bytes(content)
        said[name] = refusal(host, DockerUnit(), "/etc/docker/daemon.json")
    assert {name: bool(words) for name, words in said.items()} == {n: bool(part) for n, (_, part) in READINGS.items()}
    assert all(part in said[name] for name, (_, part) in READINGS.items())
    host.daemon_json.unlink()
    assert refusal(host, DockerUnit(), "/etc/docker/daemon.json") == ""
    assert "no such file" in refusal(host, DockerUnit(), "/etc/docker/other.json")
    # It was asked beside the docker that runs, which goes on.
    assert host.restarts == 0 and host.docker("version")


def test_undo_keeps_later_containers_running(host: DockerHost, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = configure(host, runtime)
    container = start_container(host, image(host, monkeypatch), "--runtime=nvidia")
    restarts = host.restarts
    ReconfigureDocker.undo(host, before, {})
    assert not host.daemon_json.exists()
    assert is_running(host, container)
    assert host.restarts == restarts
