"""daemon.json with the runtime in it and out again: not another byte touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprov.engines.configure import configuration
from gpuprov.engines.docker_config import edited, with_member, without_member
from gpuprov.engines.known import ConfigureRequest, RuntimeEntry
from gpuprov.protocol.errors import GpuprovError
from tests.examples import examples
from tests.unit.test_docker_unit import UnitHost

RUNTIME = RuntimeEntry("nvidia", "/usr/bin/x")
ENTRY = '{"path": "/usr/bin/x", "args": []}'


def docker_runtime(text: str, entry: RuntimeEntry) -> str:
    return edited(text, entry, keep_arguments=True) or text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"a":1,"b":2}\n', '{"a":1,"b":2,"runtimes": {"nvidia": ' + ENTRY + "}}\n"),
        (
            '{\n  "runtimes": {\n    "kata": {"path": "/k"}\n  }\n}\n',
            '{\n  "runtimes": {\n    "kata": {"path": "/k"},\n    "nvidia": {\n      "path": "/usr/bin/x",\n'
            '      "args": []\n    }\n  }\n}\n',
        ),
        # What a parser would round, escape or collapse.
        ('{"n": 12345678901234567890, "s": "<&>\\u00e9"}', '{"n": 12345678901234567890, "s": "<&>\\u00e9", "runtimes": '
         '{"nvidia": ' + ENTRY + "}}"),
        ("{}", '{\n    "runtimes": {\n        "nvidia": {\n            "path": "/usr/bin/x",\n            "args": []\n'
         "        }\n    }\n}"),
        # Another program, arguments of the user's: the program alone changes.
        ('{"runtimes": {"nvidia": {"path": "old", "runtimeArgs": ["-d"]}}}',
         '{"runtimes": {"nvidia": {"path": "/usr/bin/x", "runtimeArgs": ["-d"]}}}'),
    ],
)  # fmt: skip
def test_runtime_is_put_in(before: str, after: str) -> None:
    assert docker_runtime(before, RUNTIME) == after
    assert docker_runtime(after, RUNTIME) == after


@pytest.mark.parametrize(
    ("command", "environment", "set_default", "refused"),
    [
        ("/usr/sbin/dockerd -H fd://", "", True, ""),
        ("/usr/sbin/dockerd -H fd:// --add-runtime nvidia=/x", "", False, "--add-runtime=nvidia=/x"),
        ("/usr/sbin/dockerd --add-runtime=kata=/k -H fd://", "", False, "--add-runtime=kata=/k"),
        # What only the command line that systemd expands shows.
        ("/usr/sbin/dockerd $DOCKER_OPTS", "DOCKER_OPTS=--add-runtime=a=/b", False, "--add-runtime=a=/b"),
        ("/usr/sbin/dockerd $DOCKER_OPTS", "OTHER=--add-runtime=a=/b", False, ""),
        ("/usr/sbin/dockerd --default-runtime=crun", "", False, ""),
        ("/usr/sbin/dockerd --default-runtime=crun", "", True, "--default-runtime=crun"),
    ],
)
def test_flags_that_would_keep_docker_from_starting_are_refused(
    tmp_path: Path, command: str, environment: str, set_default: bool, refused: str
) -> None:
    request = ConfigureRequest("docker", RuntimeEntry("nvidia", "/x", set_default=set_default))
    system = UnitHost(tmp_path, command)
    system.put("/etc/default/docker", environment)
    if refused:
        with pytest.raises(GpuprovError, match="by a flag") as caught:
            configuration(system, request)
        assert caught.value.problems[0].evidence == f"systemctl show docker.service: {refused}"
    else:
        assert configuration(system, request).edits[0].changes


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
)
OBJECTS = st.dictionaries(st.one_of(st.text(max_size=5), st.sampled_from(["features", "cdi"])), JSON, max_size=4)
LAYOUTS: list[dict[str, Any]] = [
    {}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}, {"indent": 4, "ensure_ascii": False},
]  # fmt: skip


@settings(max_examples=examples(400), deadline=None)
@given(OBJECTS, st.sampled_from(LAYOUTS), st.sampled_from(["", "\n", "  \n\n"]), st.booleans())
def test_any_member_put_in_comes_out_to_the_byte(
    found: dict[str, Any], layout: dict[str, Any], end: str, deep: bool
) -> None:
    text = end + json.dumps(found, **layout) + end
    path = ("features", "cdi") if deep else ("features",)
    inner = found.get("features")
    edited = with_member(text, path, True)
    if deep and isinstance(inner, dict):
        assert json.loads(edited) == {**found, "features": {**inner, "cdi": True}}
    else:
        assert json.loads(edited) == {**found, "features": {"cdi": True} if deep else True}
    assert with_member(edited, path, True) == edited
    fresh = "features" not in found or (deep and isinstance(inner, dict) and inner and "cdi" not in inner)
    if fresh and found:
        assert without_member(edited, path) == text
