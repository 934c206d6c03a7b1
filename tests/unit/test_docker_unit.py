"""How docker is really started (unit, command line, address), and the file that `runtime configure` edits then."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprov.core.system import System
from gpuprov.engines.configure import configuration
from gpuprov.engines.docker import plan, problems, reach_local_docker
from gpuprov.engines.docker_config import edited, with_member, without_member, without_runtimes
from gpuprov.engines.docker_unit import decisive_lines, failure, gather_unit, restart_stops_containers
from gpuprov.engines.known import ConfigureRequest, RuntimeEntry
from tests.examples import examples
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted
from tests.unit.test_docker import NVIDIA, ONLY_OURS, RUNTIME, running, the_change

# In the form of `systemctl show docker.service docker.socket -p …` (systemd 252).
SHOWN = """Id=docker.service
LoadState=loaded
ActiveState=active
Result=success
UnitFileState={enabled}
MainPID={pid}
ExecStart={{ path=/usr/sbin/dockerd ; argv[]={command} ; ignore_errors=no ; start_time=[n/a] ; stop_time=[n/a] ; \
pid=0 ; code=(null) ; status=0/0 }}
Environment=LEVEL=info
EnvironmentFiles=/etc/default/docker (ignore_errors=yes)
Requires=docker.socket system.slice sysinit.target

Id=docker.socket
LoadState={socket_load}
ActiveState=active
UnitFileState={socket}
Listen=/run/docker.sock (Stream)
"""
_DOCKERD = "/usr/sbin/dockerd -H fd:// --containerd=/run/containerd/containerd.sock $DOCKER_OPTS"


class UnitHost(Scripted):
    """A host on which systemd says how docker is started."""

    def __init__(self, root: Path, command: str = _DOCKERD, **words: str) -> None:
        super().__init__(root)
        usual = {"enabled": "enabled", "socket": "enabled", "socket_load": "loaded", "pid": "0", "command": command}
        self.shown = SHOWN.format(**{**usual, **words})

    def answer(self, argv: tuple[str, ...]) -> Answer:
        return self.shown if argv[:2] == ("systemctl", "show") else (1, "")

    def put(self, path: str, content: str) -> None:
        self.make_directory(path.rpartition("/")[0])
        self.write(path, content.encode())


@pytest.mark.parametrize(
    ("command", "options", "path"),
    [
        (_DOCKERD, "", "/etc/docker/daemon.json"),
        (_DOCKERD, "DOCKER_OPTS='--config-file /opt/dk/d.json'\n", "/opt/dk/d.json"),
        (_DOCKERD, "# DOCKER_OPTS=--config-file=/x\n", "/etc/docker/daemon.json"),
        ("/usr/bin/dockerd --config-file=/opt/dk/d.json", "", "/opt/dk/d.json"),
        ("/usr/bin/dockerd --config-file /a.json --config-file=${LEVEL}.json", "", "/info.json"),
        ('/usr/bin/dockerd --config-file "/opt/d k/d.json"', "", "/opt/d k/d.json"),
        ("/usr/bin/numactl --membind=0 /usr/bin/dockerd --config-file=/n.json", "", "/n.json"),
        ("/usr/bin/dockerd --config-file=/$$/d.json", "", "/$/d.json"),
    ],
)
def test_the_file_that_counts_by_the_command_line(tmp_path: Path, command: str, options: str, path: str) -> None:
    host = UnitHost(tmp_path, command)
    host.put("/etc/default/docker", options)
    assert gather_unit(host).config_path == path
    facts = replace(running("{}"), unit=gather_unit(host), config_path=gather_unit(host).config_path)
    assert the_change(facts).summary().startswith(f"write {path} and ")


def test_a_wrapper_is_looked_through_by_the_process(tmp_path: Path) -> None:
    host = UnitHost(tmp_path, "/usr/local/sbin/start-docker", pid="77")
    host.put("/proc/77/cmdline", "dockerd\0--config-file=/opt/dk/d.json\0")
    assert gather_unit(host).config_path == "/opt/dk/d.json"
    assert not gather_unit(host).is_outdated


def test_the_process_tells_what_a_shell_in_the_unit_expands(tmp_path: Path) -> None:
    host = UnitHost(tmp_path, "/bin/sh -c exec dockerd --config-file=/srv/$${SITE}/d.json", pid="77")
    host.put("/etc/default/docker", "SITE=berlin\n")
    host.put("/proc/77/cmdline", "dockerd\0--config-file=/srv/berlin/d.json\0")
    unit = gather_unit(host)
    assert unit.config_path == "/srv/berlin/d.json"
    assert not unit.is_outdated


def test_a_docker_that_reads_another_file_than_its_unit_names_is_restarted(tmp_path: Path) -> None:
    host = UnitHost(tmp_path, "/usr/bin/dockerd --config-file=/new.json", pid="77")
    host.put("/proc/77/cmdline", "/usr/bin/dockerd\0-H\0fd://\0")
    unit = gather_unit(host)
    assert unit.is_outdated and unit.config_path == "/new.json"
    assert not the_change(running("{}", unit=unit)).reload
    (problem,) = problems(running("{}", unit=unit, running_containers=("web",)), NVIDIA)
    assert "docker" in problem.what and "stops the containers" in problem.next_step


@pytest.mark.parametrize(
    ("command", "hosts", "address"),
    [
        ("/usr/bin/dockerd -H fd://", None, "unix:///run/docker.sock"),
        ("/usr/bin/dockerd", None, "unix:///var/run/docker.sock"),
        ("/usr/bin/dockerd", ["tcp://0.0.0.0:2375"], "tcp://127.0.0.1:2375"),
        ("/usr/bin/dockerd -H tcp://0.0.0.0:2375 -Hunix:///srv/d.sock", None, "unix:///srv/d.sock"),
        ("/usr/bin/dockerd --host=tcp://10.0.0.7:2376", None, "tcp://10.0.0.7:2376"),
    ],
)
def test_dockers_client_is_sent_here(tmp_path: Path, command: str, hosts: list[str] | None, address: str) -> None:
    host = UnitHost(tmp_path, command)
    if hosts:
        host.put("/etc/docker/daemon.json", json.dumps({"hosts": hosts}))
    assert reach_local_docker(host) == address
    assert host.environment == {"DOCKER_HOST": address}


def test_commands_get_the_address_of_this_hosts_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere.example:2375")
    host = System()
    host.environment["DOCKER_HOST"] = "unix:///run/docker.sock"
    assert host.run(("printenv", "DOCKER_HOST")).stdout == "unix:///run/docker.sock\n"


@pytest.mark.parametrize(
    ("flags", "set_default", "evidence"),
    [
        ("--add-runtime kata=/k", False, "--add-runtime=kata=/k"),
        ("--add-runtime=nvidia=/old", False, "--add-runtime=nvidia=/old"),
        ("--default-runtime=crun", True, "--default-runtime=crun"),
        ("--default-runtime=crun", False, ""),
        (f"--add-runtime=nvidia={RUNTIME}", False, ""),
        (f"--add-runtime=nvidia={RUNTIME}", True, f"--add-runtime=nvidia={RUNTIME}"),
    ],
)
def test_what_stands_on_the_command_line_stays(tmp_path: Path, flags: str, set_default: bool, evidence: str) -> None:
    facts = running("{}", unit=gather_unit(UnitHost(tmp_path, f"/usr/bin/dockerd {flags}")))
    found = problems(facts, replace(NVIDIA, set_default=set_default))
    assert [one.evidence for one in found] == [f"systemctl show docker.service: {evidence}"] * bool(evidence)


def test_a_runtime_that_the_command_line_registers_is_left_alone(tmp_path: Path) -> None:
    unit = gather_unit(UnitHost(tmp_path, f"/usr/bin/dockerd --add-runtime=nvidia={RUNTIME}"))
    assert plan(running(None, unit=unit), replace(NVIDIA, cdi=False)) == ()


def test_a_disabled_docker_is_enabled_and_the_plan_says_so(tmp_path: Path) -> None:
    unit = gather_unit(UnitHost(tmp_path, enabled="disabled", socket="disabled"))
    assert the_change(running(ONLY_OURS, unit=unit)).summary() == "enable docker.service"
    stopped = the_change(running(ONLY_OURS, unit=unit, active=False))
    assert stopped.summary() == "enable docker.service and start docker (it does not run)"
    # docker.socket starts docker when somebody uses it: until then no container of a restart policy runs.
    on_demand = gather_unit(UnitHost(tmp_path / "other", enabled="disabled"))
    assert the_change(running(ONLY_OURS, unit=on_demand)).summary() == "enable docker.service"


def test_of_a_docker_that_does_not_answer_nothing_is_said(tmp_path: Path) -> None:
    unit = gather_unit(UnitHost(tmp_path, "/usr/bin/dockerd -H tcp://127.0.0.1:2376 --tlsverify"))
    facts = running("{}", active=False, unit=unit, address="tcp://127.0.0.1:2376", error="client sent an HTTP request")
    (problem,) = problems(facts, NVIDIA)
    assert "docker runs, but does not answer" in problem.what and "not known" in problem.what
    assert problem.next_step.startswith("docker --host tcp://127.0.0.1:2376 info")


@pytest.mark.parametrize("said", [(124, ""), (1, "", "Failed to get properties: Connection timed out")])
def test_nothing_is_changed_if_systemd_does_not_tell_how_docker_starts(tmp_path: Path, said: Answer) -> None:
    """The unit may name another file, or runtimes with which those of a file keep docker from starting."""
    host = Scripted(tmp_path, {"systemctl show": said, "docker info": "3 true\n"})
    host.make_directory("/etc/docker")
    host.write("/etc/docker/daemon.json", b'{"live-restore": true}')
    (problem,) = problems(running("{}", unit=gather_unit(host)), NVIDIA)
    assert problem.what == "systemd does not tell how docker is started" and "systemctl show" in problem.evidence
    assert restart_stops_containers(host) is None
    for known in (
        SHOWN.format(enabled="", pid=0, command="dockerd", socket_load="", socket=""),
        (1, "", "Host is down"),
    ):
        host = Scripted(tmp_path, {"systemctl show": known, "docker info": "3 true\n"})
        assert problems(running("{}", unit=gather_unit(host)), NVIDIA) == ()
        assert restart_stops_containers(host) is False


class OtherUnit(UnitHost):
    """A host on which my-docker.service, or a script that ssh.service has started, runs dockerd."""

    def __init__(self, root: Path, load: str, main: str) -> None:
        super().__init__(root)
        self.main = main
        self.shown = self.shown.replace(
            "LoadState=loaded\nActiveState=active", f"LoadState={load}\nActiveState=inactive"
        )
        self.put("/run/docker.pid", "77")
        self.put("/proc/77/cmdline", "/usr/bin/dockerd\0--config-file=/my.json\0")
        self.put("/proc/77/cgroup", "0::/system.slice/my-docker.service\n")

    def answer(self, argv: tuple[str, ...]) -> Answer:
        return f"MainPID={self.main}\n" if "my-docker.service" in argv else super().answer(argv)


@pytest.mark.parametrize("load", ["loaded", "masked"])
def test_no_second_docker_starts_beside_that_of_another_unit(tmp_path: Path, load: str) -> None:
    host = OtherUnit(tmp_path, load, "77")
    unit = gather_unit(host)
    facts = running("{}", unit=unit, running_containers=("web",))
    assert unit.config_path == "/my.json" and not unit.is_outdated
    (problem,) = problems(facts, NVIDIA)
    assert problem.what.startswith("my-docker.service runs docker")
    assert problem.next_step.endswith("my-docker.service; gpuprov install  # this stops the containers")
    # As after that advice: it is not enabled, either.
    unit = replace(unit, enabled="disabled")
    after = running(ONLY_OURS, unit=unit)
    assert problems(after, NVIDIA) == () and plan(after, replace(NVIDIA, cdi=False)) == ()
    found = configuration(host, ConfigureRequest("docker", NVIDIA))
    assert found.reload_command.startswith("systemctl restart my-docker.service ")
    host.shown = host.shown.replace("ActiveState=inactive", "ActiveState=failed")
    assert gather_unit(host).active == "failed" and failure(host) is None


@pytest.mark.parametrize("load", ["loaded", "masked"])
def test_a_dockerd_without_a_unit_is_ended_before_docker_starts(tmp_path: Path, load: str) -> None:
    (problem,) = problems(running("{}", unit=gather_unit(OtherUnit(tmp_path, load, "5"))), NVIDIA)
    assert problem.next_step.startswith("pid=$(cat /run/docker.pid); kill $pid; ")
    assert problem.next_step.endswith(
        "; systemctl unmask docker; systemctl reset-failed docker; systemctl start docker"
    )


LIMIT = """Starting Docker Application Container Engine...
docker.service: Start request repeated too quickly.
docker.service: Failed with result 'start-limit-hit'.
Failed to start Docker Application Container Engine.
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (LIMIT, "docker.service: Start request repeated too quickly."),
        (
            'level=info msg="Starting up"\nfailed to start daemon: error initializing graphdriver: no-such-driver\n'
            "docker.service: Main process exited\nReloading Docker Application Container Engine...\n" + LIMIT,
            "failed to start daemon: error initializing graphdriver: no-such-driver",
        ),
        ("Reloading Docker Application Container Engine...\n", ""),
        ("Reloading\nan unusual last word\n", "an unusual last word"),
        ('time="2026-11-30T08:10:06.725918230Z" level=debug msg="Calling HEAD /_ping"\n', ""),
        ("Starting docker.service\nunknown flag: --bip6\nSee 'dockerd --help'.\n" + LIMIT, "unknown flag: --bip6"),
        (
            "docker.service: Failed at step EXEC spawning /usr/bin/dockerd: Exec format error\n" + LIMIT,
            "docker.service: Failed at step EXEC spawning /usr/bin/dockerd: Exec format error",
        ),
    ],
)
def test_the_decisive_line_of_dockers_journal_is_the_evidence(log: str, said: str) -> None:
    assert decisive_lines(log) == said


def test_the_state_of_the_socket_that_docker_requires_is_seen(tmp_path: Path) -> None:
    assert gather_unit(UnitHost(tmp_path, socket_load="masked")).socket_load == "masked"
    assert gather_unit(UnitHost(tmp_path)).socket_load == "loaded"


# -- gpuprov runtime configure -----------------------------------------------------------------------------------------
OWN_RUNTIME = RuntimeEntry("nvidia", "/usr/bin/x")
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
    assert docker_runtime(before, OWN_RUNTIME) == after
    assert docker_runtime(after, OWN_RUNTIME) == after


@pytest.mark.parametrize(
    ("command", "environment", "set_default", "flag"),
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
def test_conflicting_flags_fail(tmp_path: Path, command: str, environment: str, set_default: bool, flag: str) -> None:
    request = ConfigureRequest("docker", RuntimeEntry("nvidia", "/x", set_default=set_default))
    system = UnitHost(tmp_path, command)
    system.put("/etc/default/docker", environment)
    if flag:
        problem = refused(configuration, system, request)
        assert "by a flag" in problem.what
        assert problem.evidence == f"systemctl show docker.service: {flag}"
    else:
        assert configuration(system, request).edits[0].changes


def test_a_file_is_configured_by_its_name_alone_if_systemd_does_not_tell_which_one_counts(tmp_path: Path) -> None:
    system = Scripted(tmp_path, {"systemctl show": (124, "")})
    request = ConfigureRequest("docker", RuntimeEntry("nvidia", "/x"))
    problem = refused(configuration, system, request)
    assert problem.what == "systemd does not tell how docker is started" and "--config FILE" in problem.next_step
    assert configuration(system, replace(request, config="/etc/docker/daemon.json")).edits[0].changes


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ('{"runtimes": {"kata": {}}, "runtimes": {"nvidia": {}}}', '{"runtimes": {"kata": {}}}'),
        ('{"runtimes": {"nvidia": {}}, "debug": true, "runtimes": {"nvidia": {}}}', '{"debug": true}'),
        ('{"default-runtime": "nvidia", "debug": true, "default-runtime": "nvidia"}', '{"debug": true}'),
    ],
)
def test_of_members_of_one_name_none_keeps_a_removed_runtime(text: str, after: str) -> None:
    """docker reads such files; it would not start with a default runtime that is gone."""
    assert without_runtimes(text, ("nvidia",)) == after


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
def test_any_member_put_in_comes_out_again(found: dict[str, Any], layout: dict[str, Any], end: str, deep: bool) -> None:
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
