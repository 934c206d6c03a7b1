"""daemon.json as docker's administrators write it, what becomes of it, and when docker must take it up."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprov.core.changes import Change
from gpuprov.engines.docker import DockerFacts, gather, parse_info, plan, problems
from gpuprov.engines.docker_change import ReconfigureDocker
from gpuprov.engines.docker_config import parse_config
from gpuprov.engines.docker_unit import DockerUnit
from gpuprov.engines.known import RuntimeEntry
from gpuprov.protocol.versions import version_numbers
from tests.unit.scripted import Answer, Scripted

RUNTIME = "/usr/local/bin/gpuprov-runtime"
NVIDIA = RuntimeEntry(path=RUNTIME, cdi=True)
ENTRY = '{"path": "/usr/local/bin/gpuprov-runtime", "args": []}'

# `docker info --format '{{json .}}'` of docker 20.10.24, what no plan looks at left out.
INFO_20_10 = """{"Containers":3,"ContainersRunning":2,
"ContainersPaused":0,"ContainersStopped":1,"Images":1,"Driver":"overlay2","CgroupDriver":"cgroupfs","CgroupVersion":"1",
"KernelVersion":"6.1.0-26-amd64","OperatingSystem":"Debian GNU/Linux 12 (bookworm)","ServerVersion":"20.10.24+dfsg1",
"Runtimes":{"io.containerd.runc.v2":{"path":"runc"},"io.containerd.runtime.v1.linux":{"path":"runc"},
"nvidia":{"path":"/usr/local/bin/gpuprov-runtime"},"runc":{"path":"runc"}},"DefaultRuntime":"runc",
"Swarm":{"NodeID":"","LocalNodeState":"inactive"},"LiveRestoreEnabled":false,"Warnings":null}"""
# The same client where no daemon runs; it answers 0 (20.10) or says why on stderr and answers 1 (28).
INFO_NO_DAEMON = (
    '{"ServerErrors":["Cannot connect to the Docker daemon at unix:///var/run/docker.sock. '
    'Is the docker daemon running?"],"ClientInfo":{"Debug":false,"Context":"default","Plugins":[],"Warnings":null}}'
)
INFO_NO_DAEMON_28 = (
    '{"ID":"","ContainersRunning":0,"ServerVersion":"","Runtimes":null,"DefaultRuntime":"",'
    '"ClientInfo":{"Debug":false,"Version":"28.2.2","Context":"default","Plugins":[],"Warnings":null}}'
)


def running(text: str | None, **changes: Any) -> DockerFacts:
    """A docker that runs, with that daemon.json, and has loaded the runtime."""
    facts: dict[str, Any] = {
        "installed": True, "config_text": text, "active": True, "version": "20.10.24+dfsg1",
        "runtimes": {"runc": "runc", "nvidia": RUNTIME}, "default_runtime": "runc",
    }  # fmt: skip
    return DockerFacts(**{**facts, **changes})


def the_change(facts: DockerFacts, *, set_default: bool = False) -> ReconfigureDocker:
    (change,) = plan(facts, replace(NVIDIA, set_default=set_default, cdi=False))
    assert isinstance(change, ReconfigureDocker)
    return change


def written(text: str | None, *, set_default: bool = False) -> str:
    content = the_change(running(text), set_default=set_default).content
    assert content is not None
    return content


ONLY_OURS = '{"runtimes": {"nvidia": ' + ENTRY + "}}"


def and_ours(text: str) -> tuple[str, str]:
    """Return an object on one line without and with the runtime behind its last key."""
    return text, f"{text[:-1]}, {ONLY_OURS[1:]}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, ONLY_OURS),
        ("", ONLY_OURS),
        (" \n\t\n", ONLY_OURS),
        ("{}", ONLY_OURS),
        ('{"runtimes": null}', ONLY_OURS),
        ('{"runtimes": {}}', ONLY_OURS),
        and_ours('{"zeta": 1, "no-such-option": [1, {"b": null}], "alpha": true}'),
        and_ours('{"features": {"cdi": true, "buildkit": false}}'),
        and_ours('{"max": 123456789012345678901234567890, "x": 1.5}'),
        (
            '{"runtimes": {"kata": {"path": "/k", "runtimeArgs": ["-x"]}}, "debug": true}',
            '{"runtimes": {"kata": {"path": "/k", "runtimeArgs": ["-x"]}, "nvidia": ' + ENTRY + '}, "debug": true}',
        ),
        (
            '{"runtimes": {"nvidia": {"path": "/old", "runtimeArgs": ["--x"], "args": ["y"]}, "b": {"path": "/b"}}}',
            '{"runtimes": {"nvidia": ' + ENTRY + ', "b": {"path": "/b"}}}',
        ),
        ('{"runtimes": {"nvidia": {"path": "' + RUNTIME + '", "args": ["--debug"]}}}', ONLY_OURS),
        ('{"runtimes": {"nvidia": "a word"}}', ONLY_OURS),
    ],
)
def test_the_runtime_comes_in_and_everything_else_stays(before: str | None, after: str) -> None:
    found = written(before)
    assert json.loads(found) == json.loads(after)
    # Objects compare equal in any order; people's files keep theirs.
    assert json.dumps(json.loads(found)) == json.dumps(json.loads(after))
    assert found.endswith("}\n") or before


@pytest.mark.parametrize(
    "text",
    [
        ONLY_OURS,
        '{"runtimes":{"nvidia":{"path":"' + RUNTIME + '"}}}',
        '{"runtimes": {"nvidia": {"args": null, "path": "' + RUNTIME + '"}},\n\n   "debug": true}',
    ],
)
def test_a_file_that_is_right_is_not_touched(text: str) -> None:
    assert plan(running(text), replace(NVIDIA, cdi=False)) == ()


@pytest.mark.parametrize(
    ("before", "second_line"),
    [
        (None, '    "runtimes": {'),
        ('{\n  "debug": true\n}', '  "debug": true,'),
        ('{\n    "debug": true\n}', '    "debug": true,'),
        ('{\n\t"debug": true\n}\n', '\t"debug": true,'),
    ],
)
def test_indentation_stays_as_it_was(before: str | None, second_line: str) -> None:
    assert written(before).splitlines()[1] == second_line


@pytest.mark.parametrize("text", ['{"debug": true}', '{"rack": "Gebäude 3 – 東"}', '{"odd": "\\ud800"}'])
def test_a_file_of_one_line_keeps_its_line_and_its_letters(text: str) -> None:
    found = written(text)
    assert found.startswith(f'{text[:-1]}, "runtimes": {{"nvidia": ')
    found.encode()


@pytest.mark.parametrize(
    ("text", "what", "evidence"),
    [
        ('{"debug": true,}', "not valid JSON", "line 1, column 1"),
        ('{\n  "debug": true\n  "hosts": []\n}', "not valid JSON", 'line 3, column 3: Expecting \',\' delimiter'),
        ('{\n"a": "\u2028",\n"b" 1}', "not valid JSON", 'line 3, column 5: Expecting \':\' delimiter: "b" 1}'),
        ("{", "not valid JSON", "line 1, column 2"),
        ("\n\nhello", "not valid JSON", "line 3, column 1"),
        ("\ufeff{}", "not valid JSON", "line 1, column 1: Unexpected UTF-8 BOM"),
        ("// comment\n{}", "not valid JSON", "line 1, column 1"),
        ("[1]", "wrong shape", "it is [1], not an object"),
        ("null", "wrong shape", "it is null, not an object"),
        ('{"runtimes": ["nvidia"]}', "wrong shape", '"runtimes" is ["nvidia"], not an object'),
        ('{"runtimes": "nvidia"}', "wrong shape", '"runtimes" is "nvidia", not an object'),
        ('{"features": ["cdi"]}', "wrong shape", '"features" is ["cdi"], not an object'),
        ('{"a": NaN}', "can't be edited safely", "NaN"),
        ('{"a": 1e999}', "can't be edited safely", "1e999"),
        ("[" * 100_000, "can't be edited safely", ""),
        ('{"a": ' + "9" * 5000 + "}", "can't be edited safely", "4300"),
    ],
)  # fmt: skip
def test_what_docker_could_not_read_is_a_problem_and_is_not_touched(text: str, what: str, evidence: str) -> None:
    (problem,) = problems(running(text), NVIDIA)
    assert what in problem.what
    assert evidence in problem.evidence
    # docker 20.10 has no --validate.
    assert problem.next_step == "correct it, then check: python3 -m json.tool /etc/docker/daemon.json"
    (newer,) = problems(running(text, version="28.5.2"), NVIDIA) or (None,)
    if newer is not None:
        assert newer.next_step == "correct it, then check: dockerd --validate --config-file /etc/docker/daemon.json"
    assert plan(running(text), replace(NVIDIA, cdi=False)) == ()


def test_docker_from_snap_is_a_problem() -> None:
    (problem,) = problems(DockerFacts(snap=True), NVIDIA)
    assert "snap" in problem.what and "snap remove docker" in problem.next_step


def test_the_default_runtime_is_set_only_when_asked_for() -> None:
    found = json.loads(written('{"default-runtime": "runc", "debug": true}', set_default=True))
    assert list(found) == ["default-runtime", "debug", "runtimes"]
    assert found["default-runtime"] == "nvidia"
    assert json.loads(written('{"default-runtime": "kata"}'))["default-runtime"] == "kata"


@pytest.mark.parametrize(
    ("containers", "live", "set_default", "summary"),
    [
        ((), False, False, "restart docker (no container is running)"),
        (("db", "web"), False, False, "reload docker (2 running: db, web; they keep running)"),
        (("db",), True, False, "restart docker (1 running: db; they keep running (live-restore))"),
        (("db",), False, True, "reload docker (1 running: db; they keep running)"),
    ],
)
def test_running_containers_go_on(containers: tuple[str, ...], live: bool, set_default: bool, summary: str) -> None:
    text = '{"live-restore": true}' if live else "{}"
    change = the_change(running(text, running_containers=containers, live_restore=live), set_default=set_default)
    assert change.restart is summary.startswith("restart")
    assert change.summary() == f"write /etc/docker/daemon.json and {summary}"


@pytest.mark.parametrize(
    ("text", "flag", "live", "stops"),
    [
        ('{"live-restore": true}', "", True, False),
        ("\ufeff" + '{"live-restore": true}', "", True, False),
        ("{}", "--live-restore", True, False),
        # It is in the file and not loaded yet, or it is loaded and no longer in the file.
        ('{"live-restore": true}', "", False, True),
        ("{}", "", True, True),
        ('{"live-restore": false}', "--live-restore=false", True, True),
        ("[]", "", True, True),
        ("{", "", True, True),
    ],
)
def test_live_restore_must_hold_before_a_restart_and_after(text: str, flag: str, live: bool, stops: bool) -> None:
    """A dockerd that starts without it ends the containers that it finds (moby, daemon.restore)."""
    unit = DockerUnit(load="loaded", command=("/usr/bin/dockerd", "-H", "fd://", *filter(None, (flag,))))
    facts = replace(running(text, running_containers=("web",), live_restore=live), unit=unit)
    assert facts.restart_stops is stops
    assert replace(facts, running_containers=()).restart_stops is False


@pytest.mark.parametrize(
    ("changes", "set_default"),
    [
        ({"runtimes": {"runc": "runc"}}, False),
        ({"runtimes": {"runc": "runc", "nvidia": "/usr/bin/nvidia-container-runtime"}}, False),
        ({"runtimes": None}, False),
        ({"config_text": '{"default-runtime": "nvidia", ' + ONLY_OURS[1:]}, True),
        ({"active": False}, False),
    ],
)
def test_a_file_that_docker_has_not_loaded_is_only_taken_up(changes: dict[str, Any], set_default: bool) -> None:
    change = the_change(running(ONLY_OURS, **{"config_text": ONLY_OURS, **changes}), set_default=set_default)
    assert change.content is None
    # Containers may outlive a docker that does not run (live-restore): nothing is said of them.
    runs = changes.get("active", True)
    told = "restart docker (no container is running)" if runs else "start docker (it does not run)"
    assert change.summary() == told


@pytest.mark.parametrize(
    ("version", "validates"),
    [("20.10.24+dfsg1", False), ("23.0.0", True), ("26.1.5+dfsg1", True), ("28.5.2", True), ("", False)],
)
def test_dockerd_checks_the_file_itself_from_23_on(version: str, validates: bool) -> None:
    assert the_change(running("{}", version=version)).validates is validates


def test_versions_compare_as_numbers() -> None:
    assert version_numbers("20.10.24+dfsg1") == (20, 10, 24)
    assert version_numbers("9.0.0") < version_numbers("20.10.5+dfsg1-1+deb11u2") < version_numbers("26.1.5")


@pytest.mark.parametrize("wrapper", ["", "*** this host belongs to team ml ***\nsee https://wiki/\n"])
def test_info_of_docker_20_10(wrapper: str) -> None:
    built_in = dict.fromkeys(("io.containerd.runc.v2", "io.containerd.runtime.v1.linux", "runc"), "runc")
    assert parse_info(f"{wrapper}{INFO_20_10}") == DockerFacts(
        active=True, version="20.10.24+dfsg1", runtimes={**built_in, "nvidia": RUNTIME}, default_runtime="runc",
        running_containers=("#0", "#1"), cgroup_version="1", cgroup_driver="cgroupfs",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "containers"),
    [("web\n", ("web",)), ("", ()), ((124, ""), ("#0", "#1")), ((1, "", "deadline exceeded"), ("#0", "#1"))],
)
def test_containers_whose_names_docker_does_not_tell_still_count(said: Answer, containers: tuple[str, ...]) -> None:
    facts = gather(Scripted(answers={"docker info": INFO_20_10, "docker ps": said}))
    assert (facts.running_containers, facts.restart_stops) == (containers, bool(containers))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (INFO_NO_DAEMON, "Cannot connect to the Docker daemon"),
        (INFO_NO_DAEMON_28, ""),
        ("", ""),
        ("permission denied", "permission denied"),
        ("null", "null"),
        ("[]", "[]"),
    ],
)
def test_a_daemon_that_does_not_answer_is_not_active(text: str, error: str) -> None:
    facts = parse_info(text)
    assert not facts.active
    assert error in facts.error


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    # Without two names whose shapes are checked.
    config=st.dictionaries(
        st.text().filter(lambda name: name not in ("runtimes", "features")), json_values, max_size=4
    ),
    runtimes=st.none() | st.dictionaries(st.text() | st.just("nvidia"), json_values, max_size=3),
    set_default=st.booleans(),
)
def test_unknown_keys_stay(config: dict[str, Any], runtimes: dict[str, Any] | None, set_default: bool) -> None:
    before = {**config, "runtimes": runtimes}
    changes = plan(running(json.dumps(before)), replace(NVIDIA, set_default=set_default, cdi=False))
    content = changes[0].content if changes and isinstance(changes[0], ReconfigureDocker) else None
    text = json.dumps(before) if content is None else content
    after, wrong = parse_config(text)
    assert wrong == ()
    ours = {"runtimes", "default-runtime"} if set_default else {"runtimes"}
    assert [(key, value) for key, value in after.items() if key not in ours] == [
        (key, value) for key, value in before.items() if key not in ours
    ]
    others = {name: entry for name, entry in (runtimes or {}).items() if name != "nvidia"}
    assert {name: entry for name, entry in after["runtimes"].items() if name != "nvidia"} == others
    settled = running(text, default_runtime="nvidia" if set_default else "runc")
    assert plan(settled, replace(NVIDIA, set_default=set_default, cdi=False)) == ()


# What docker reads, and a JSON writer would lose: version, text, the text afterwards.
_BYTE = b"\xe9".decode("utf-8", "surrogateescape")
_CRLF_ENTRY = f'''  "runtimes": {{
    "nvidia": {{
      "path": "{RUNTIME}",
      "args": []
    }}
  }}
}}
'''.replace("\n", "\r\n")
KEPT = {
    "byte order mark, docker 26": ("26.1.5", *and_ours('\ufeff{"debug": true}')),
    "a name twice": ("20.10.24", *and_ours('{"debug": true, "debug": false}')),
    "runtimes twice": (
        "20.10.24",
        '{"runtimes": {"a": {}}, "runtimes": {"b": {"path": "x", "path": "y"}}}',
        '{"runtimes": {"a": {}}, "runtimes": {"b": {"path": "x", "path": "y"}, "nvidia": ' + ENTRY + "}}",
    ),
    "no UTF-8": ("20.10.24", *and_ours('{"log-driver": "caf' + _BYTE + '"}')),
    "CRLF": ("20.10.24", '{\r\n  "debug": true\r\n}\r\n', '{\r\n  "debug": true,\r\n' + _CRLF_ENTRY),
    "CRLF, a name twice": (
        "20.10.24",
        '{\r\n  "debug": 1,\r\n  "debug": true\r\n}\r\n',
        '{\r\n  "debug": 1,\r\n  "debug": true,\r\n' + _CRLF_ENTRY,
    ),
}


@pytest.mark.parametrize(("version", "text", "after"), KEPT.values(), ids=KEPT)
def test_what_docker_reads_is_no_problem_and_stays_to_the_byte(version: str, text: str, after: str) -> None:
    facts = running(text, version=version)
    assert problems(facts, NVIDIA) == ()
    assert the_change(facts).content == after
    assert plan(replace(facts, config_text=after), replace(NVIDIA, cdi=False)) == ()


def test_a_folder_in_the_files_place_is_said_to_be_one() -> None:
    facts = running(None, config_kind="directory")
    (problem,) = problems(facts, NVIDIA)
    assert problem.what == "/etc/docker/daemon.json is a directory, not a file"
    assert problem.next_step.startswith("mv /etc/docker/daemon.json /etc/docker/daemon.json.old")
    assert plan(facts, replace(NVIDIA, cdi=False)) == ()


# -- features.cdi ----------------------------------------------------------------------------------------------------


def planned_for_cdi(text: str | None, version: str, **changes: Any) -> tuple[Change, ...]:
    return plan(running(text, version=version, **changes), NVIDIA)


@pytest.mark.parametrize(
    ("version", "before", "after"),
    [
        ("24.0.9", None, {}),
        ("25.0.0", None, {"features": {"cdi": True}}),
        ("26.1.5+dfsg1", '{"features": null}', {"features": {"cdi": True}}),
        ("27.5.1", '{"features": {"buildkit": false}}', {"features": {"buildkit": False, "cdi": True}}),
        ("28.1.1", "{}", {"features": {"cdi": True}}),
        ("28.2.0", "{}", {}),
        ("29.0.1", None, {}),
        # Somebody's own decision.
        ("26.1.5", '{"features": {"cdi": false}}', {"features": {"cdi": False}}),
        # A duplicate name: the last counts, and the text is edited in place.
        (
            "26.1.5", '{"debug": false, "features": {"a": true}, "debug": true}',
            {"debug": True, "features": {"a": True, "cdi": True}},
        ),
    ],
)  # fmt: skip
def test_docker_25_to_28_1_is_told_to_read_cdi(version: str, before: str | None, after: dict[str, Any]) -> None:
    (change,) = planned_for_cdi(before, version)
    assert isinstance(change, ReconfigureDocker) and change.content is not None
    assert json.loads(change.content) == {**after, **json.loads(ONLY_OURS)}
    assert change.restart and not change.cdi_later


IS_SET = '{"features": {"cdi": true}, "runtimes": {"nvidia": ' + ENTRY + "}}"


def test_a_docker_that_reads_cdi_already_is_left_alone() -> None:
    assert planned_for_cdi(IS_SET, "26.1.5", cdi=True) == ()
    assert planned_for_cdi(ONLY_OURS, "28.5.2", cdi=True) == ()
    # Off by hand, and too old.
    assert planned_for_cdi(IS_SET.replace("true", "false"), "26.1.5") == ()
    assert planned_for_cdi(ONLY_OURS, "20.10.24") == ()


def test_features_cdi_by_flag_is_left_to_the_flag() -> None:
    """dockerd does not start with the same directive as a flag and in its file."""
    unit = DockerUnit(load="loaded", command=("/usr/bin/dockerd", "--feature", "cdi=true"))
    assert planned_for_cdi(ONLY_OURS, "27.5.1", cdi=True, unit=unit) == ()


def test_a_docker_that_has_not_been_restarted_since_is_restarted_where_that_stops_nothing() -> None:
    (change,) = planned_for_cdi(IS_SET, "26.1.5")
    assert change.summary() == "restart docker (no container is running)"
    live = IS_SET.replace("{", '{"live-restore": true, ', 1)
    (change,) = planned_for_cdi(live, "26.1.5", running_containers=("web",), live_restore=True)
    assert change.summary().startswith("restart docker (1 running: web;")
    # It would stop containers: that waits for somebody to restart docker, and is no reason not to settle.
    assert planned_for_cdi(IS_SET, "26.1.5", running_containers=("web",)) == ()
    (change,) = planned_for_cdi(ONLY_OURS, "26.1.5", running_containers=("web",))
    said = change.summary()
    assert "reload docker (1 running: web; they keep running)" in said and "works after docker's next restart" in said


def test_what_the_daemon_says_of_cdi() -> None:
    for dirs, reads in ((["/etc/cdi", "/var/run/cdi"], True), ([], False), (None, False)):
        assert parse_info(json.dumps({"ServerVersion": "26.1.5", "CDISpecDirs": dirs})).cdi is reads
    assert parse_info(INFO_20_10).cdi is False


def test_a_docker_that_the_run_installs_decides_by_its_version() -> None:
    """test_docker_change.py does so."""
    (change,) = plan(DockerFacts(), NVIDIA)
    assert isinstance(change, ReconfigureDocker) and change.cdi_by_version
    assert json.loads(change.content or "") == json.loads(ONLY_OURS)
    assert change.summary().endswith("start docker (it does not run), with features.cdi if that is docker 25 to 28.1")


@pytest.mark.parametrize("running", [(), ("a",)])
def test_docker_that_systemd_did_not_start_is_a_problem(running: tuple[str, ...]) -> None:
    """systemd would start a second dockerd beside it, which fails; it can't reload the first."""
    unit = DockerUnit(load="loaded", active="failed", command=("dockerd",), running=("dockerd", "--config-file=/x"))
    facts = replace(parse_info(INFO_20_10), installed=True, unit=unit, running_containers=running)
    (problem,) = problems(facts, NVIDIA)
    assert "dockerd --config-file=/x" in problem.evidence and "kill $pid; " in problem.next_step
    assert problem.next_step.endswith("# this stops the containers") is bool(running)
    text = f'{{"runtimes": {{"nvidia": {ENTRY}}}}}'
    same_file = replace(unit, running=("dockerd",))
    configured = replace(facts, config_text=text, runtimes={"nvidia": RUNTIME}, unit=same_file)
    assert problems(configured, NVIDIA) == ()


@pytest.mark.parametrize(
    ("refusing", "evidence", "next_step"),
    [
        (DockerUnit(refuses_restart=True), "RefuseManualStop=yes", "RefuseManualStop=no"),
        (DockerUnit(socket_load="masked"), "docker.socket: LoadState=masked", "systemctl unmask docker.socket; "),
        (
            DockerUnit(socket_load="not-found"),
            "docker.socket: LoadState=not-found",
            "> /etc/systemd/system/docker.socket;",
        ),
    ],
)
def test_a_unit_that_refuses_a_restart_is_a_problem(refusing: DockerUnit, evidence: str, next_step: str) -> None:
    unit = replace(refusing, load="loaded", active="active")
    facts = replace(parse_info(INFO_20_10), installed=True, config_text="{}", unit=unit, running_containers=())
    (problem,) = problems(facts, NVIDIA)
    assert evidence in problem.evidence and next_step in problem.next_step
    # With running containers docker is only reloaded, and a docker that knows the runtime is left alone.
    assert problems(replace(facts, running_containers=("a",)), NVIDIA) == ()
    configured = replace(facts, config_text=f'{{"runtimes": {{"nvidia": {ENTRY}}}}}')
    assert problems(configured, NVIDIA) == ()
    stopped = replace(configured, active=False, runtimes=None, unit=replace(unit, active="inactive"))
    assert problems(stopped, NVIDIA) == (problem,)
