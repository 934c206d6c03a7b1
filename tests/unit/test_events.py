"""The events on the wire: what goes in comes out, and nothing that a host sends does harm."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.facts.gpus import mig_layout
from gpuprov.protocol.codec import WrongDataError, load
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.events import (
    ChangeProgress,
    CheckDone,
    Event,
    EventReader,
    FactsGathered,
    Finished,
    Planned,
    PlannedChange,
    Started,
    from_line,
    to_line,
)

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
        (
            f'{{"event":"Finished","exit_code":0,"summary":"{"x" * 3_000_000}"}}',
            "Finished.summary is larger than 10000",
        ),
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
    with pytest.raises(WrongDataError, match=r"CheckDone has no why"):
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
