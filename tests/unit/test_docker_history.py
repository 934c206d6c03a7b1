"""Installations, edits by hand and undoing in any order: docker ends as it was before the first run."""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuprov.core.journal import read_runs
from gpuprov.engines.docker_change import ReconfigureDocker
from gpuprov.protocol.events import Finished
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, spec_to_json
from tests.examples import examples
from tests.unit.ask import ask
from tests.unit.doctor.host import healthy_tree
from tests.unit.fake_host import FakeHost

pytestmark = pytest.mark.root

SPEC = HostSpec(driver="preinstalled", docker="preinstalled")
DEFAULT = replace(SPEC, docker_default_runtime=True)
DAEMON_JSON = "/etc/docker/daemon.json"
# What stands in the file, None for no file, and whether docker runs.
FIRST = ((None, True), ('{"debug": true}\r\n', True), ('{\n\t"debug":true}', True), ("", False), ("{}", False))
EDITS = (None, "", "{", '{"debug": false}', '{"no-such-option": true}', '{"runtimes": {"nvidia": {"path": "/x"}}}')


@dataclass
class Model:
    """A host, and what docker was on it before the first run whose change to docker stands."""

    host: FakeHost
    first: tuple[str | None, bool]

    def state(self) -> tuple[str | None, bool]:
        content = self.host.read_bytes(DAEMON_JSON)
        return (None if content is None else content.decode()), self.host.docker_active

    def by_hand(self, act: Callable[[], Any]) -> None:
        act()
        standing = (entry for run in read_runs(self.host) for entry in run.undoable)
        if not any(entry.kind == ReconfigureDocker.__name__ for entry in standing):
            self.first = self.state()

    def edit(self, text: str | None) -> None:
        if text is None:
            self.host.remove(DAEMON_JSON)
        else:
            self.host.make_directory("/etc/docker")
            self.host.write(DAEMON_JSON, text.encode())

    def run(self, command: str, spec: HostSpec = SPEC) -> Finished:
        return ask(self.host, Request(command, spec_to_json(spec)))[0]


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return healthy_tree(tmp_path / "root")


def restart(host: FakeHost) -> None:
    host.run(("systemctl", "restart", "docker.service"))


def do(model: Model, action: object) -> None:
    if action == "install":
        model.run("install")
    elif action == "other spec":
        model.run("install", DEFAULT)
    elif action == "uninstall":
        model.run("uninstall")
    elif action == "rollback":
        assert model.run("rollback").exit_code != 0 or not model.host.docker_failed
    elif action == "restart by hand":
        model.by_hand(lambda: restart(model.host))
    else:
        assert isinstance(action, tuple)
        model.by_hand(lambda: model.edit(action[0]))


actions = st.lists(
    st.sampled_from(("install", "other spec", "rollback", "uninstall", "restart by hand", *((one,) for one in EDITS))),
    max_size=7,
)


@settings(deadline=None, max_examples=examples(40))
@example(first=FIRST[1], history=["other spec", ("",), "install", ('{"debug": false}',), "other spec"])
@example(first=FIRST[0], history=["restart by hand", "restart by hand", "restart by hand", "other spec"])
@example(first=FIRST[0], history=["other spec", ("{",), "restart by hand", "rollback"])
@example(first=FIRST[3], history=["other spec", "install"])
@example(first=FIRST[0], history=["uninstall", ('{"no-such-option": true}',), "install", ("",)])
@given(first=st.sampled_from(FIRST), history=actions)
def test_docker_ends_as_it_was_before_the_first_run(
    tmp_path_factory: pytest.TempPathFactory, first: tuple[str | None, bool], history: list[object]
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder:
        host = healthy_tree(Path(folder) / "root")
        model = Model(host, first)
        model.edit(first[0])
        host.docker_active = first[1]
        do(model, "install")
        for action in history:
            do(model, action)
        # What is left may have no run behind it, and then nothing is undone.
        host.run(("systemctl", "reset-failed", "docker.service"))
        done = model.run("uninstall")
        assert model.state()[0] == model.first[0]
        if done.exit_code == 0 and read_runs(host) == ():
            assert model.state() == model.first
        if done.exit_code == 0 and done.changed and host.docker_active and (wanted := runtimes_in(model.first[0])):
            assert set(host.docker_loaded) == wanted


def runtimes_in(text: str | None) -> set[str]:
    """Return the runtimes of a docker that runs with this file; nothing for one with which it could not start."""
    try:
        config = json.loads(text or "{}") if text is None or text else None
    except ValueError:
        config = None
    return set() if config is None or "no-such-option" in config else {"runc", *config.get("runtimes", {})}


def test_a_file_that_came_back_by_hand_is_what_docker_runs_with_after_an_undoing(host: FakeHost) -> None:
    model = Model(host, ('{"debug": true}', True))
    model.edit('{"debug": true}')
    restart(host)
    assert model.run("install").exit_code == 0
    assert "nvidia" in host.docker_loaded
    model.edit('{"debug": true}')
    before = host.docker_starts
    assert model.run("rollback").exit_code == 0
    assert model.state() == ('{"debug": true}', True)
    assert (set(host.docker_loaded), host.docker_starts - before) == ({"runc"}, 1)


def test_five_runs_with_an_empty_file_between_them_are_undone_at_once(host: FakeHost) -> None:
    model = Model(host, (None, True))
    for text, spec in (("{}", SPEC), ("", DEFAULT), ('{"debug": true}', SPEC), ("", SPEC), ("{}", DEFAULT)):
        assert model.run("install", spec).exit_code == 0
        model.edit(text)
    before = host.docker_starts
    assert model.run("uninstall").exit_code == 0
    assert model.state() == (None, True)
    assert host.docker_starts - before == 1


def test_a_file_with_which_docker_can_not_start_comes_back_and_docker_runs_on(host: FakeHost) -> None:
    """Somebody has emptied the file under a running docker: it runs until its next start, and so it shall again."""
    model = Model(host, ("", True))
    model.edit("")
    assert model.run("install").exit_code == 0
    assert model.run("uninstall").exit_code == 0
    assert model.state() == ("", True)


def test_rollback_does_not_report_success_while_docker_is_failed(host: FakeHost) -> None:
    model = Model(host, (None, True))
    model.edit('{"no-such-option": true}')
    restart(host)
    assert host.docker_failed
    # The installation fails at docker; what it did before stands, and is rolled back.
    assert model.run("install").exit_code != 0
    host.docker_failed = True
    done = model.run("rollback")
    assert done.exit_code != 0
    assert "docker has failed" in done.problems[0].what
    assert model.state() == ('{"no-such-option": true}', False)


def test_a_disabled_docker_is_enabled_by_an_installation_and_disabled_by_its_undoing(host: FakeHost) -> None:
    host.docker_enabled = host.docker_active = False
    model = Model(host, (None, False))
    assert model.run("install").exit_code == 0
    assert host.docker_enabled and host.docker_active
    assert model.run("uninstall").exit_code == 0
    assert (host.docker_enabled, host.docker_active) == (False, False)


def test_a_docker_that_was_removed_since_is_no_obstacle_to_an_uninstallation(host: FakeHost) -> None:
    model = Model(host, (None, True))
    assert model.run("install").exit_code == 0
    host.remove("/usr/bin/dockerd")
    host.failing_unit, host.docker_active = "docker.service", False
    assert model.run("uninstall").exit_code == 0
    assert model.state() == (None, False)
