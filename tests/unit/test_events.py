"""The events on the wire: what goes in comes out, and nothing that a host sends does harm."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.wire.errors import Problem
from gpuprov.wire.events import (
    ChangeProgress,
    CheckDone,
    Event,
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
    ChangeProgress("k", "Grüße\n\x1b[31m", 1, 2),
    CheckDone("gpu 0 uuid", "failed", "a", "b", "differs"),
    FactsGathered({"os": {"id": "debian"}}),
    Finished(1, 3, 0.5, (Problem("what", "seen", "next"),), "done", {"driver": "550"}),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_what_goes_in_comes_out(event: Event) -> None:
    line = to_line(event)
    assert "\n" not in line
    assert line.isascii()
    assert from_line(line) == event


@pytest.mark.parametrize(
    "line",
    [
        "", "Welcome to lab-a", "[]", "7", "null", "{}", '{"event":"Unknown"}', '{"event":["Finished"]}',
        '{"event":"Finished"}', '{"event":"Finished","exit_code":"0"}', '{"event":"Planned","changes":3}',
        '{"event":"Planned","changes":[{"nope":1}]}', '{"event":"Planned","changes":[3]}',
        '{"event":"CheckDone","name":1,"status":"ok"}', '{"event":"Finished","exit_code":0,"problems":[{"what":1}]}',
        '{"event":"FactsGathered","facts":[]}', '{"event":"Finished","exit_code":true}',
        '{"event":"ChangeDone","key":"k","seconds":NaN}', '{"event":"ChangeDone","key":"k","seconds":-Infinity}',
        '{"event":"ChangeDone","key":"k","seconds":1e999}',
        f'{{"event":"ChangeDone","key":"k","seconds":1{"0" * 400}}}',
        '{"event":"FactsGathered","facts":{"a":[NaN]}}', '{"event":"FactsGathered","facts":{"a":[Infinity]}}',
        '{"event":"FactsGathered","facts":{"a":{"b":-1e999}}}', '{"event":"CudaSurveyed","survey":{"a":-Infinity}}',
        f'{{"event":"Finished","exit_code":1{"0" * 5000}}}',
    ],
)  # fmt: skip
def test_anything_else_is_no_event(line: str) -> None:
    assert from_line(line) is None


def test_a_newer_agent_may_say_more() -> None:
    line = json.dumps({"event": "CheckDone", "name": "n", "status": "ok", "new_field": 1})
    assert from_line(line) == CheckDone("n", "ok")


@given(st.text())
def test_no_line_raises(line: str) -> None:
    from_line(line)


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
def test_no_object_raises(name: str, data: dict[str, object]) -> None:
    from_line(json.dumps({"event": name, **data}))
