"""Journals of other versions: those of format 1, recorded from the last version that wrote it, are read and undone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import gpuprov
from gpuprov.core.changes import images_in
from gpuprov.core.journal import FORMAT, RUNS_DIRECTORY, Run, new_journal, parse_run, read_runs, unfinished_run
from gpuprov.core.system import System
from gpuprov.facts.boot import MANAGED
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.events import Note
from tests.unit.ask import finished
from tests.unit.fake_host import FakeHost, Tree
from tests.unit.loaded_host import LoadedHost
from tests.unit.test_uninstall import SPEC, carry_out, done
from tests.unit.test_uninstall import host as host

pytestmark = pytest.mark.root
DATA = Path(__file__).parents[1] / "data"
JOURNAL, LOCK = f"{RUNS_DIRECTORY}/0001.jsonl", "/run/gpuprov.lock"


def recorded(name: str) -> str:
    """Return a journal that commit 57c247a wrote: `format-1` by test_uninstall's host, `format-1-reboot` by a driver
    that could not be unloaded.
    """
    return (DATA / f"journal-{name}.jsonl").read_text()


def installed_by_format_1(host: FakeHost) -> Run:
    """Install, and put the recorded journal in the place of the one that this made."""
    done(carry_out(host, "install"))
    host.write(JOURNAL, recorded("format-1").encode(), mode=0o600)
    (run,) = read_runs(host)
    assert len(run.entries) == 15 and run.end == "done"
    return run


def state(host: FakeHost, paths: set[str]) -> tuple[Tree, dict[str, str], dict[str, str]]:
    """Return what an undo of these paths must give back."""
    tree = {path: value for path, value in host.everything().items() if path in paths}
    return tree, dict(host.installed), dict(host.docker_loaded)


@pytest.mark.parametrize("command", ["rollback", "uninstall"])
def test_a_run_of_format_1_is_undone(host: FakeHost, command: str) -> None:
    images = [image for entry in parse_run("", recorded("format-1")).entries for image in images_in(entry.before)]
    paths = {str(image["path"]) for image in images}
    before = state(host, paths)
    installed_by_format_1(host)
    assert state(host, paths) != before
    for path in {*MANAGED} - paths:  # only this version has written it
        host.remove(path)
    done(carry_out(host, command))
    assert state(host, paths) == before


def test_a_host_of_format_1_is_upgraded_and_goes_back_run_by_run(host: FakeHost) -> None:
    installed_by_format_1(host)
    assert done(carry_out(host, "install")).changed == 0
    assert host.docker_default == "runc"
    done(carry_out(host, "install", replace(SPEC, docker_default_runtime=True)))
    assert host.docker_default == "nvidia"
    assert [json.loads(path.read_text().splitlines()[0]).get("format", 1) for path in journals(host)] == [1, FORMAT]
    done(carry_out(host, "rollback"))
    assert host.docker_default == "runc" and host.docker_loaded.keys() == {"runc", "nvidia"}
    done(carry_out(host, "rollback"))
    assert host.docker_loaded.keys() == {"runc"} and "site-gpu-tools" not in host.installed


def journals(host: FakeHost) -> list[Path]:
    return sorted(host.path(RUNS_DIRECTORY).iterdir())


@pytest.mark.parametrize("kept", [2, 4, 6, 26, 28])
def test_an_interrupted_run_of_format_1_is_resumed(host: FakeHost, kept: int) -> None:
    installed_by_format_1(host)
    host.write(JOURNAL, "".join(recorded("format-1").splitlines(keepends=True)[:kept]).encode(), mode=0o600)
    done(carry_out(host, "install"))
    (run,) = read_runs(host)
    assert (run.end, run.interrupted) == ("done", None)


def test_a_driver_that_format_1_planned_again_is_uninstalled_once(tmp_path: Path) -> None:
    """Its first InstallDriver did nothing (`installed`), its second was made beside the loaded driver (`reboot`)."""
    host = LoadedHost(tmp_path / "root")
    host.make_directory(RUNS_DIRECTORY)
    host.write(JOURNAL, recorded("format-1-reboot").encode())
    host.run(("sh", "/driver.run", "--allow-installation-with-running-driver", "--skip-module-load"))
    first, second, reboot = read_runs(host)[0].entries
    assert first.outcome and not first.outcome["installed"]
    assert second.outcome and "installed" not in second.outcome
    assert reboot.outcome == {"reboot": True}
    carry_out(host, "rollback")
    assert [command[0].rpartition("/")[2] for command in host.commands].count("nvidia-uninstall") == 1


@pytest.mark.parametrize("number", [0, FORMAT + 1, "2", None])
def test_a_number_that_is_no_known_format_is_refused(number: object) -> None:
    with pytest.raises(GpuprovError, match="a newer gpuprov made the journal" if number == FORMAT + 1 else "damaged"):
        parse_run("", json.dumps({"run": "install", "id": "", "format": number}))


def install_by_a_newer_version(host: FakeHost) -> None:
    done(carry_out(host, "install"))
    first, _, rest = (host.read_text(JOURNAL) or "").partition("\n")
    first = json.dumps({**json.loads(first), "format": FORMAT + 1, "version": "9.1.0"})
    host.write(JOURNAL, f"{first}\n{rest}".encode())


@pytest.mark.parametrize("command", ["install", "rollback", "uninstall"])
def test_an_unknown_format_is_refused_and_nothing_is_touched(host: FakeHost, command: str) -> None:
    install_by_a_newer_version(host)
    before = host.state()
    ended = finished(carry_out(host, command))
    (problem,) = ended.problems
    assert ended.exit_code == ExitCode.FAILED
    assert problem.what == "a newer gpuprov made the journal of an earlier run"
    assert f"{JOURNAL} has format {FORMAT + 1}" in problem.evidence
    assert problem.next_step == "run the command again with gpuprov 9.1.0, or a newer one"
    assert host.state() == before


@pytest.mark.parametrize(("version", "said"), [("9.1.0", True), ("0.0.9", False), (gpuprov.__version__, False)])
def test_an_older_version_says_that_it_replaces_a_newer_runtime(host: FakeHost, version: str, said: bool) -> None:
    done(carry_out(host, "install"))
    own = f'"version": "{gpuprov.__version__}"'
    host.write(JOURNAL, (host.read_text(JOURNAL) or "").replace(own, f'"version": "{version}"', 1).encode())
    host.write("/usr/lib/gpuprov/runtime_hook/decision.py", b"# newer")
    events = carry_out(host, "install")
    assert done(events).changed == 1
    notes = [one.message for one in events if isinstance(one, Note) and "is the older gpuprov" in one.message]
    assert [note.partition(",")[0] for note in notes] == (["gpuprov 9.1.0 set this host up"] if said else [])


def test_the_doctor_examines_a_host_of_a_newer_version(host: FakeHost) -> None:
    install_by_a_newer_version(host)
    host.docker_active = False
    assert any("docker does not run" in problem.what for problem in finished(carry_out(host, "doctor")).problems)


def test_the_latest_journal_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    system.make_directory(RUNS_DIRECTORY)
    for number, end in (("9999", "done"), ("10000", "")):
        lines = ({"run": "install", "id": "", "format": FORMAT}, *(({"end": end},) if end else ()))
        system.write(f"{RUNS_DIRECTORY}/{number}.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    assert [run.path.rpartition("/")[2] for run in read_runs(system)] == ["9999.jsonl", "10000.jsonl"]
    found = unfinished_run(system)
    assert found is not None and found.path.endswith("/10000.jsonl")
    assert new_journal(system, "install").path.endswith("/10001.jsonl")


@pytest.mark.parametrize("line", ['{"done": 7, "outcome": {}}', '{"begin": 1}', '{"undone": [1]}', '{"done": 1}'])
def test_a_damaged_journal_is_named_and_nothing_is_changed(host: FakeHost, line: str) -> None:
    done(carry_out(host, "install"))
    lines = (host.read_text(JOURNAL) or "").splitlines()
    host.write(JOURNAL, "\n".join((lines[0], line, '{"end": "done"}', "")).encode(), mode=0o600)
    before = {**host.everything(), LOCK: None}
    for command in ("rollback", "uninstall"):
        ended = finished(carry_out(host, command))
        assert ended.problems[0].what == "the journal of an earlier run is damaged"
        assert ended.problems[0].evidence.startswith(JOURNAL) and ended.problems[0].next_step
    assert {**host.everything(), LOCK: None} == before


def test_check_names_an_interrupted_change_that_a_later_version_made(host: FakeHost) -> None:
    done(carry_out(host, "install"))
    first = json.dumps({"run": "install", "id": "", "format": FORMAT, "version": "9.0.0"})
    begun = json.dumps({"begin": 1, "key": "something new", "kind": "SomethingNew", "before": {}})
    host.write(f"{RUNS_DIRECTORY}/0002.jsonl", f"{first}\n{begun}\n".encode(), mode=0o600)
    for check in (True, False):
        ended = finished(carry_out(host, "install", check=check))
        assert ended.problems[0].what == "can't undo a change of kind 'SomethingNew': this gpuprov does not know it"
