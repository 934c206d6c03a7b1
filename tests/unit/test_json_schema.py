"""What programs read with --json: every line of every command parses strictly and is what docs/json.md says."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpuprov.agent.result import HostResult, Recorder
from gpuprov.agent.run import run_request
from gpuprov.cli.main import cli
from gpuprov.facts.gpus import mig_layout
from gpuprov.fleet.history import Run, save
from gpuprov.fleet.progress import JsonLines
from gpuprov.fleet.report import summary
from gpuprov.protocol.codec import WrongDataError, load
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import (
    SCHEMA,
    ChangeProgress,
    CheckDone,
    ChosenDriver,
    Event,
    EventReader,
    FactsGathered,
    Finished,
    Planned,
    PlannedChange,
    Started,
    Upgrade,
    from_line,
    to_line,
)
from gpuprov.protocol.request import COMMANDS, Request
from gpuprov.protocol.spec import HostSpec, spec_to_json
from tests import simgpu
from tests.bundles import write_test_bundle
from tests.unit.fake_host import FakeHost, write_runfile

_PAGE = Path(__file__).parents[2] / "docs/json.md"
_CLASSES: tuple[type[Any], ...] = (*get_args(Event), PlannedChange, Upgrade, ChosenDriver, Problem)
_KINDS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "any": lambda value: True,
}
_PARTS = {"changes": "PlannedChange", "upgrades": "Upgrade", "problems": "Problem"}


def documented() -> dict[str, dict[str, str]]:
    """Return the fields and their types of every heading in the page."""
    sections = re.split(r"^#+ (.+)$", _PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {
        name: dict(re.findall(r"^- `(\w+)` \(([\w ]+)\)", text, re.MULTILINE))
        for name, text in zip(sections[::2], sections[1::2])
    }


def strictly(line: str) -> Any:
    """Parse one document; refuse a key that comes twice, and what JSON does not have (NaN)."""

    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), f"a key comes twice: {line}"
        return dict(pairs)

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is invalid JSON")

    return json.loads(line, object_pairs_hook=no_twins, parse_constant=refuse)


def require_kinds(found: dict[str, Any], wanted: dict[str, str]) -> None:
    for name, value in found.items():
        kind, _, null = wanted[name].partition(" or ")
        assert _KINDS[kind](value) or (null and value is None), f"{name} is {value!r}, not {wanted[name]}"


def require_documented(line: str) -> str:
    """Hold one line against the page; return its event."""
    found = strictly(line)
    pages = documented()
    wanted = {**pages["Every line"], **pages[found["event"]]}
    if found["event"] == "Summary":
        del wanted["host"]
    assert set(found) == set(wanted)
    assert found["schema"] == SCHEMA
    require_kinds(found, wanted)
    for name, part in _PARTS.items():
        for one in found.get(name, []):
            assert set(one) == set(pages[part])
            require_kinds(one, pages[part])
    return str(found["event"])


@pytest.mark.parametrize("cls", _CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_documented_and_collides_with_no_other(cls: type[Any]) -> None:
    names = [one.name for one in fields(cls)]
    assert list(documented()[cls.__name__]) == names
    assert not set(names) & {"schema", "host", "event"}


def test_the_version_and_the_example_of_the_page_are_right() -> None:
    text = _PAGE.read_text("utf-8")
    assert f"version **{SCHEMA}**" in text
    (example,) = re.findall(r"```\n(.*)\n```", text)
    assert require_documented(example) == "CheckDone"


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    made = FakeHost(tmp_path)
    (tmp_path / "root").mkdir()
    write_runfile(tmp_path / "root/driver.run")
    return made


def lines_of(request: Request, host: Any) -> list[str]:
    """Return what --json prints of one request on one host."""
    console = Console(file=io.StringIO())
    recorder = Recorder("lab-a", JsonLines(console))
    run_request(request, recorder, host)
    made = Run("20261121T081500-7", request.command, "", 1.0, (recorder.result(1.0),))
    assert isinstance(console.file, io.StringIO)
    return [*console.file.getvalue().splitlines(), json.dumps(summary(made))]


@pytest.mark.root
def test_every_line_of_every_command_is_as_documented(host: FakeHost, tmp_path: Path) -> None:
    spec = spec_to_json(HostSpec(driver_version=simgpu.DRIVER_VERSION, driver_url="/root/driver.run"))
    seen: set[str] = set()
    asked: set[str] = set()
    for command, check in (("facts", False), ("install", True), ("install", False), ("verify", False),
                           ("doctor", False), ("health", False), ("accept", False), ("cuda", False), ("rollback", True),
                           ("rollback", False), ("install", False), ("uninstall", True),
                           ("uninstall", False)):  # fmt: skip
        lines = lines_of(Request(command, spec, check=check, diff=check), host)
        events = [require_documented(line) for line in lines]
        assert (events[0], events[-2:]) == ("Started", ["Finished", "Summary"])
        seen |= set(events)
        asked.add(command)
    assert asked == set(COMMANDS)
    # FakeHost runs no container.
    assert {*seen, "GpuMeasured"} == {*(cls.__name__ for cls in get_args(Event)), "Summary"}


def commands_with_json(group: click.Group, *names: str) -> Iterator[str]:
    """Yield the subcommands that have --json."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_with_json(command, *names, name)
        if any("--json" in parameter.opts for parameter in command.params):
            yield " ".join((*names, name))


# Commands that print one document → what else to type, with files below the test's folder.
DOCUMENTS = {
    "options": (),
    "advisories": (),
    "bundle show": ("bundle.tar",),
    "bundle verify": ("bundle.tar",),
    "cdi list": ("--spec-dir", "."),
    "cuda": (),
    "hook explain": (),
    "init": ("new.yml", "--hosts", "gpu01", "--no-look", "--yes"),
    "kubernetes manifest": (),
    "report": (),
    "runtime configure": ("--config", "{folder}/daemon.json", "--dry-run"),
}


def test_each_command_with_json_is_here() -> None:
    assert {name.partition(" ")[0] for name in COMMANDS} <= set(commands_with_json(cli))
    assert set(commands_with_json(cli)) == {*DOCUMENTS, *COMMANDS}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_document_is_as_documented(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    write_test_bundle(tmp_path / "bundle.tar")
    save(Run("20261121T081500-7", "install", "", 1.0, (HostResult("lab-a", ExitCode.DONE),)))
    words = [word.format(folder=tmp_path) for word in DOCUMENTS[name]]
    done = CliRunner().invoke(cli, [*name.split(), *words, "--json"], input='{"process": {"env": []}}')
    found = strictly(done.stdout)
    wanted = documented()[f"`gpuprov {name} --json`"]
    for one in found if isinstance(found, list) else [found]:
        assert set(one) == set(wanted)
        require_kinds(one, wanted)


def test_an_explained_cause_is_as_documented() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--explain", "gpu-nouveau", "--json"])
    found, wanted = strictly(done.stdout), documented()["`gpuprov doctor --explain --json`"]
    assert list(found) == list(wanted)
    require_kinds(found, wanted)


def test_what_the_program_prints_is_as_documented(tmp_path: Path) -> None:
    words = ("-m", "tests.unit.on_fake_host", str(tmp_path / "host"), "facts", "--json")
    done = subprocess.run(
        (sys.executable, *words), capture_output=True, text=True, timeout=60,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    events = [require_documented(line) for line in done.stdout.splitlines()]
    assert (events[-2:], done.stderr) == (["Finished", "Summary"], "")


def test_a_key_that_comes_twice_is_seen() -> None:
    with pytest.raises(AssertionError, match="twice"):
        strictly('{"host":"a","host":"b"}')
    with pytest.raises(AssertionError, match="NaN"):
        strictly('{"a":NaN}')


# -- events as lines ---------------------------------------------------------------------------------------------------


EVENTS: tuple[Event, ...] = (
    Started("0.1.0", "install", 12),
    Planned((PlannedChange("k", "docker", "write x", "-a\n+b"), PlannedChange("l", "cdi", "y"))),
    ChangeProgress("k", "Grüße", 1, 2),
    CheckDone("gpu 0 uuid", "failed", "a", "b", "differs"),
    FactsGathered({"os": {"id": "debian"}}),
    Finished(1, 3, 0.5, (Problem("what", "seen", "next"),), "done", {"driver": "550"}),
    Finished(0, versions={"mig": mig_layout((index, ("1g.10gb",) * 7) for index in range(16))}),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_what_goes_in_comes_out(event: Event) -> None:
    line = to_line(event)
    assert "\n" not in line
    assert line.isascii()
    assert from_line(line) == event


@pytest.mark.parametrize(
    "line", ["", "Welcome to lab-a", "[]", "7", "null", "{}", '{"event":"Unknown"}', '{"event":[1]}']
)
def test_anything_else_is_no_event(line: str) -> None:
    assert from_line(line) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"event":"Finished"}', "Finished.exit_code is missing"),
        ('{"event":"Finished","exit_code":"0"}', "Finished.exit_code is not a whole number"),
        ('{"event":"Finished","exit_code":true}', "Finished.exit_code is not a whole number"),
        ('{"event":"Planned","changes":3}', "Planned.changes is not a list"),
        ('{"event":"Planned","changes":[{"nope":1}]}', "Planned.changes[0].key is missing"),
        ('{"event":"Planned","changes":[3]}', "Planned.changes[0] is not an object"),
        ('{"event":"CheckDone","name":1,"status":"ok"}', "CheckDone.name is not a text"),
        ('{"event":"CheckDone","name":"n","status":"fine"}', "CheckDone.status is none of ok, failed, skipped"),
        ('{"event":"Finished","exit_code":0,"problems":[{"what":1}]}', "Finished.problems[0].what is not a text"),
        ('{"event":"FactsGathered","facts":[]}', "FactsGathered.facts is not an object"),
        ('{"event":"ChangeDone","key":"k","seconds":NaN}', "ChangeDone.seconds is no number that JSON has"),
        ('{"event":"ChangeDone","key":"k","seconds":1e999}', "ChangeDone.seconds is no number that JSON has"),
        (f'{{"event":"ChangeDone","key":"k","seconds":1{"0" * 400}}}', "ChangeDone.seconds is larger than"),
        ('{"event":"FactsGathered","facts":{"a":[-Infinity]}}', "FactsGathered.facts.a[0] is no number that JSON has"),
        (f'{{"event":"Note","message":{"[" * 100_000}', "a line is nested too deep"),
        (f'{{"event":"FactsGathered","facts":{{"a":{"[" * 40}{"]" * 40}}}}}', "is nested too deep"),
        (f'{{"event":"Finished","exit_code":0,"summary":"{"x" * 3_000_000}"}}', "Finished.summary is larger than 1000"),
    ],
    ids=lambda value: value[:60],
)
def test_an_event_with_other_values_is_refused_with_the_field(line: str, said: str) -> None:
    with pytest.raises(WrongDataError, match=re.escape(said)):
        from_line(line)
    with pytest.raises(GpuprovError, match="never sends"):
        EventReader()(line)


# At Ctrl-C a thread begins for each Started: ten thousand would leave none for the other hosts.
@pytest.mark.parametrize(("event", "most"), [(CheckDone("n", "ok"), 1000), (Started("1", "install", 7), 20)])
def test_an_event_that_comes_too_often_is_refused(event: Event, most: int) -> None:
    read = EventReader()
    line = to_line(event)
    with pytest.raises(GpuprovError, match=f"more than {most} events {type(event).__name__}"):
        for _ in range(16_000):
            read(line)


def test_control_characters_are_removed_on_arrival() -> None:
    found = from_line(to_line(CheckDone("a\x1b[2J\nb\ud800", "ok", reason="a\r\nb\u202e\x9b1A")))
    assert found == CheckDone("a b", "ok", reason="a\nb")


def test_a_newer_agent_may_say_more() -> None:
    line = json.dumps({"event": "CheckDone", "name": "n", "status": "ok", "new_field": 1})
    assert from_line(line) == CheckDone("n", "ok")


def test_what_gpuprov_wrote_itself_has_no_limits_and_keeps_its_characters() -> None:
    long = {"name": f"\x1b{'n' * 20_000}", "status": "ok"}
    assert load(CheckDone, long, trusted=True).name == long["name"]
    with pytest.raises(WrongDataError, match=r"CheckDone.name is larger than 500"):
        load(CheckDone, long)
    with pytest.raises(WrongDataError, match=r"CheckDone.reason is not a text"):
        load(CheckDone, {**long, "reason": 1}, trusted=True)
    with pytest.raises(WrongDataError, match=r"unknown in CheckDone: why"):
        load(CheckDone, {**long, "why": "x"}, trusted=True, exact=True)


@given(st.text())
def test_no_line_raises(line: str) -> None:
    assert from_line(line) is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from([type(event).__name__ for event in EVENTS]),
    st.dictionaries(
        st.sampled_from(["changes", "problems", "name", "status", "exit_code", "facts", "versions"]), _JSON
    ),
)
def test_an_object_is_an_event_or_refused(name: str, data: dict[str, object]) -> None:
    with contextlib.suppress(WrongDataError):
        assert type(from_line(json.dumps({"event": name, **data}))).__name__ == name
