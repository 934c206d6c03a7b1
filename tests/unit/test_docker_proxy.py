"""gpuprov_proxy in whole runs: docker's drop-in and its file, diffs, rollback; the password where it may not be."""

import base64
import html
import json
import re
import shlex
import socket
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable
from urllib.parse import quote, quote_plus

import pytest

from gpuprov.agent.run import run_request
from gpuprov.core.changes import FileFact, text_diff
from gpuprov.core.proxy import NO_PROXY, Proxy
from gpuprov.engines.docker import DockerFacts
from gpuprov.engines.docker_proxy import DROP_IN, ENVIRONMENT, SetDockerProxy, is_in_use, plan, warning
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.events import Event, Finished, Note, Planned, to_line
from gpuprov.protocol.request import Request
from gpuprov.protocol.secrets import secret_free
from gpuprov.protocol.spec import parse_spec, spec_to_json
from tests import simgpu
from tests.files import put
from tests.unit.ask import ask, finished
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused

PASSWORD = "pa55-Word%21"
PLAIN = "pa55-Word!"
PID = 4711


class ProxyHost(FakeHost):
    """A host with a driver and the runtime, whose docker reads its drop-in when it starts."""

    pid: str | None = str(PID)
    containers = "0"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        simgpu.install_tree(root)
        put(root / "usr/bin/gpuprov-container-runtime", "")

    def _systemctl(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words == ("show", "docker.service", "--property=MainPID", "--value"):
            return (1, "no systemd") if self.pid is None else (0, f"{self.pid}\n")
        return super()._systemctl(words)

    def _docker(self, words: tuple[str, ...]) -> tuple[int, str]:
        counted = "ContainersRunning" in words[-1] and self.docker_active
        return (0, f"{self.containers} false\n") if counted else super()._docker(words)

    def _load_docker(self) -> None:
        super()._load_docker()
        text = (self.read_text(ENVIRONMENT) or "") if self.exists(DROP_IN) else ""
        lines = ["PATH=/usr/bin", *(line.replace('"', "") for line in text.splitlines())]
        (self.root / f"proc/{PID}").mkdir(parents=True, exist_ok=True)
        (self.root / f"proc/{PID}/environ").write_text("\0".join(lines))

    @property
    def docker_environment(self) -> str:
        return self.read_text(f"/proc/{PID}/environ") or ""


@pytest.fixture
def listening() -> Iterator[str]:
    """An address that takes connections, as a proxy's does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def request(host: FakeHost, command: str = "install", *, check: bool = False, **values: Any) -> list[Event]:
    spec = parse_spec({"driver": "preinstalled", "kernel_modules": "none", **values})
    return ask(host, Request(command, spec_to_json(spec), check=check, diff=True, steps=("docker",)))[1]


def is_secret_free(text: str) -> bool:
    sent = base64.b64encode(f"robot:{PLAIN}".encode()).decode()
    return not any(form in text for form in (PASSWORD, PLAIN, sent))


def journals(host: FakeHost) -> str:
    """Return the journals' text, with what they keep of files decoded."""
    text = "".join(path.read_text() for path in host.path("/var/lib/gpuprov/runs").iterdir())
    contents = re.findall(r'"content": ?"([^"]*)"', text)
    return text + "".join(base64.b64decode(one).decode("utf-8", "replace") for one in contents)


@pytest.mark.root
def test_docker_gets_the_proxy_and_no_text_gets_the_password(tmp_path: Path, listening: str) -> None:
    host = ProxyHost(tmp_path)
    before = host.tree()
    values: dict[str, Any] = {"proxy": f"http://robot:{PASSWORD}@{listening}", "no_proxy": "localhost,.example.org"}
    forecast = request(host, check=True, **values)
    assert host.tree() == before
    events = request(host, **values)
    assert finished(events).exit_code == 0, events
    assert f'HTTPS_PROXY="http://robot:{PASSWORD}@{listening}"\n' in (host.read_text(ENVIRONMENT) or "")
    assert f"HTTP_PROXY=http://robot:{PASSWORD}@{listening}\0" in host.docker_environment
    assert "NO_PROXY=localhost,.example.org" in host.docker_environment
    status = host.status(ENVIRONMENT)
    assert status is not None and status.mode == 0o600
    assert PASSWORD not in (host.read_text(DROP_IN) or "")
    (planned,) = (event for event in forecast if isinstance(event, Planned))
    (change,) = (one for one in planned.changes if one.key == "set docker's proxy")
    assert f'+HTTP_PROXY="http://robot:***@{listening}"' in change.diff and f"http://{listening}" in change.summary
    assert is_secret_free("".join(map(to_line, (*forecast, *events))) + journals(host))
    assert not any(PASSWORD in word for command in host.commands for word in command)
    assert finished(request(host, **values)).changed == 0


@pytest.mark.root
def test_another_password_is_taken_up_and_a_rollback_brings_the_old_one_back(tmp_path: Path, listening: str) -> None:
    host = ProxyHost(tmp_path)
    before = host.tree()
    request(host, proxy=f"http://robot:first-one@{listening}")
    first = host.tree()
    assert finished(request(host, proxy=f"http://robot:{PASSWORD}@{listening}")).changed == 1
    assert PASSWORD in host.docker_environment
    assert finished(request(host, "rollback")).exit_code == 0
    assert host.tree() == {**first, f"/proc/{PID}/environ": host.everything()[f"/proc/{PID}/environ"]}
    assert "robot:first-one@" in host.docker_environment
    assert "first-one" not in journals(host) and is_secret_free(journals(host))
    request(host, "uninstall")
    assert set(host.tree()) - set(before) <= {f"/proc/{PID}", f"/proc/{PID}/environ"}
    assert "PROXY" not in host.docker_environment
    assert not host.exists("/var/lib/gpuprov")


@pytest.mark.root
def test_a_proxy_that_is_no_longer_asked_for_goes(tmp_path: Path, listening: str) -> None:
    host = ProxyHost(tmp_path)
    request(host, proxy=f"http://{listening}")
    assert "HTTP_PROXY=" in host.docker_environment
    assert finished(request(host)).changed == 1
    assert not host.exists(DROP_IN) and not host.exists(ENVIRONMENT)
    assert "PROXY" not in host.docker_environment
    assert finished(request(host)).changed == 0


def tell(message: str, done: int, total: int) -> None:
    raise AssertionError(message)


FIRST, SECOND, NONE = (SetDockerProxy(Proxy(url)) for url in ("http://robot:one@a:1", "http://robot:two@b:1", ""))


@pytest.mark.root
def test_the_diff_shows_what_changes(tmp_path: Path) -> None:
    host = ProxyHost(tmp_path)
    assert FIRST.summary() == f"write {DROP_IN}: docker uses the proxy http://a:1"
    assert NONE.summary() == f"remove {DROP_IN}"
    assert f"+EnvironmentFile=-{ENVIRONMENT}\n--- /dev/null\n+++ {ENVIRONMENT}\n" in FIRST.diff(host)
    assert NONE.diff(host) == ""
    FIRST.apply(host, tell)
    assert FIRST.diff(host) == ""
    tree = host.everything()
    assert [stat.S_IMODE(tree[path][0]) for path in (DROP_IN, ENVIRONMENT)] == [0o644, 0o600]
    changed = SECOND.diff(host).splitlines()
    assert '-HTTP_PROXY="http://robot:***@a:1"' in changed and '+HTTP_PROXY="http://robot:***@b:1"' in changed
    assert not any("EnvironmentFile" in line for line in changed)
    removed = NONE.diff(host).splitlines()
    assert f"-EnvironmentFile=-{ENVIRONMENT}" in removed and '-HTTP_PROXY="http://robot:***@a:1"' in removed
    host.write(ENVIRONMENT, b"\xff\n")
    assert FIRST.diff(host)
    NONE.apply(host, tell)
    assert not host.exists(DROP_IN) and not host.exists(ENVIRONMENT)


@pytest.mark.root
@pytest.mark.parametrize("old", [b'HTTP_PROXY="http://robot:one@a:1"\n', b"", None])
def test_the_old_password_is_kept_for_root_alone_until_it_is_back(tmp_path: Path, old: bytes | None) -> None:
    host = ProxyHost(tmp_path)
    if old is not None:
        host.make_directory("/etc/gpuprov")
        host.write(ENVIRONMENT, old, mode=0o600)
    before = host.everything()
    captured = SECOND.capture(host)
    SECOND.apply(host, tell)
    kept = {path: stat.S_IMODE(mode) for path, (mode, *_) in host.everything().items() if "/var/lib/" in path}
    folder = "/var/lib/gpuprov"
    assert kept == ({} if old is None else {folder: 0o700, f"{folder}/docker-proxy.env.1": 0o600})
    # A file of an earlier run is not overwritten.
    assert SECOND.capture(host)["backup"] == f"{folder}/docker-proxy.env.{1 if old is None else 2}"
    SetDockerProxy.undo(host, captured, {})
    host.remove(folder)
    host.remove_tree(f"/proc/{PID}")
    assert host.everything() == before


@pytest.mark.root
@pytest.mark.parametrize(
    ("active", "containers", "restarts"), [(True, "0", 1), (True, "2", 0), (False, "0", 0)], ids=str
)
def test_an_undo_restarts_docker_if_nothing_stops(tmp_path: Path, active: bool, containers: str, restarts: int) -> None:
    host = ProxyHost(tmp_path)
    host.docker_active, host.containers = active, containers
    before = FIRST.capture(host)
    FIRST.apply(host, tell)
    assert (host.docker_starts, host.docker_active) == (0, active)
    SetDockerProxy.undo(host, before, None)
    assert (host.docker_starts, host.docker_active) == (restarts, active)
    assert host.commands.count(("systemctl", "daemon-reload")) == 2


@pytest.mark.root
def test_a_docker_that_does_not_start_with_its_proxy_is_an_error(tmp_path: Path) -> None:
    host = ProxyHost(tmp_path)
    host.failing_unit = "docker.service"
    problem = refused(replace(FIRST, restart=True).apply, host, tell)
    assert "docker" in problem.what and "Job for docker.service failed." in problem.evidence
    assert problem.next_step == "journalctl -u docker -n 50"


@pytest.mark.parametrize(
    ("url", "drop_in", "pid", "environment", "in_use"),
    [
        ("http://a:1", True, "4711", "PATH=/bin\0HTTP_PROXY=http://a:1\0HTTPS_PROXY=http://a:1\0", True),
        ("http://a:1", False, "4711", "HTTP_PROXY=http://a:1\0HTTPS_PROXY=http://a:1", True),
        ("http://a:1", True, "4711", "HTTP_PROXY=http://b:1\0HTTPS_PROXY=http://a:1", False),
        ("http://a:1", True, "4711", "HTTPS_PROXY=http://a:1", False),
        ("http://a:1", True, "4711", None, False),
        ("http://a:1?x=y", True, "4711", "HTTP_PROXY=http://a:1?x=y\0HTTPS_PROXY=http://a:1?x=y", True),
        ("http://a:1", True, "0", None, None),
        ("http://a:1", True, "", None, None),
        ("http://a:1", True, None, None, None),
        ("", True, "4711", "NO_PROXY=x", False),
        ("", True, "4711", "PATH=/bin", True),
        ("", False, "4711", "NO_PROXY=x", None),
    ],
)
def test_whether_the_running_docker_has_exactly_this_proxy(
    tmp_path: Path, url: str, drop_in: bool, pid: str | None, environment: str | None, in_use: bool | None
) -> None:
    host = ProxyHost(tmp_path)
    host.pid = pid
    files = {DROP_IN: "" if drop_in else None, "/proc/4711/environ": environment}
    for path, text in files.items():
        if text is not None:
            host.make_directory(str(Path(path).parent))
            host.write(path, text.encode())
    assert is_in_use(host, Proxy(url)) is in_use


def test_a_dead_proxy_stops_a_run_that_needs_it_before_anything_is_changed(tmp_path: Path) -> None:
    host = ProxyHost(tmp_path)
    before = host.tree()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    events: list[Event] = []
    spec = parse_spec({
        "driver": "preinstalled", "kernel_modules": "none", "packages": ["site-gpu-tools"],
        "proxy": f"http://robot:{PASSWORD}@{address}",
    })  # fmt: skip
    run_request(Request("install", spec_to_json(spec)), events.append, host)
    (problem,) = finished(events).problems
    assert problem.what == f"the proxy http://{address} does not answer"
    assert "gpuprov_proxy" in problem.next_step
    assert is_secret_free("".join(map(to_line, events)))
    assert host.tree() == before


PROXY = Proxy("http://proxy:3128")
BUSY = DockerFacts(installed=True, active=True, running_containers=("web",))
IDLE = replace(BUSY, running_containers=())


@pytest.mark.parametrize(
    ("docker", "in_use", "restart"),
    [
        (IDLE, False, True),
        (IDLE, True, False),
        (BUSY, False, False),
        (replace(BUSY, live_restore=True, config_text='{"live-restore": true}'), False, True),
        (replace(IDLE, active=False), None, False),
    ],
)
def test_docker_restarts_only_where_no_container_stops(docker: DockerFacts, in_use: bool | None, restart: bool) -> None:
    (change,) = plan({}, docker, PROXY, in_use=in_use)
    assert change.summary().endswith("and restart docker") is restart
    if restart:
        (quiet,) = plan({}, docker, PROXY, in_use=in_use, restarts=True)
        assert "restart" not in quiet.summary()


@pytest.mark.root
@pytest.mark.parametrize(
    ("docker", "in_use", "mode", "planned"),
    [
        (IDLE, True, 0o600, False),
        (IDLE, None, 0o600, False),
        (IDLE, False, 0o600, True),
        (BUSY, False, 0o600, False),
        (replace(IDLE, active=False), False, 0o600, False),
        (IDLE, True, 0o640, True),
    ],
)
def test_files_that_are_right_are_planned_again_only_where_a_restart_is_missing(
    tmp_path: Path, docker: DockerFacts, in_use: bool | None, mode: int, planned: bool
) -> None:
    host = ProxyHost(tmp_path)
    SetDockerProxy(PROXY).apply(host, tell)
    files = {DROP_IN: FileFact(host.read_bytes(DROP_IN) or b"", 0o644, 0, 0)}
    files[ENVIRONMENT] = FileFact(host.read_bytes(ENVIRONMENT) or b"", mode, 0, 0)
    assert bool(plan(files, docker, PROXY, in_use=in_use)) is planned


def test_what_keeps_docker_from_the_proxy_is_told() -> None:
    two = replace(BUSY, running_containers=("web", "db"))
    assert "which stops web, db: systemctl restart docker" in warning(two, PROXY, in_use=False)
    own = replace(IDLE, config_text='{"proxies": {"http-proxy": "http://other:1"}}')
    assert "/etc/docker/daemon.json names proxies of its own" in warning(own, PROXY, in_use=True)
    assert warning(BUSY, PROXY, in_use=True) == warning(IDLE, PROXY, in_use=False) == ""
    assert warning(own, NO_PROXY, in_use=None) == ""
    assert plan({}, IDLE, NO_PROXY, in_use=None) == ()
    for stale in (ENVIRONMENT, DROP_IN):
        found = plan({stale: FileFact(b"HTTP_PROXY=x\n", 0o600, 0, 0)}, IDLE, NO_PROXY, in_use=None)
        assert [one.key for one in found] == ["set docker's proxy"]


WRONG = [
    "proxy.example.org:3128",
    "http://proxy.example.org:65536",
    "socks5://proxy:1080",
    "http://robot:pass word@proxy:1",
    "http://robot:pa$$@proxy:1",
    'http://robot:"x"@proxy:1',
    "http://proxy:1/path",
    "http://proxy:1\nHTTP_PROXY=x",
]


@pytest.mark.parametrize("value", WRONG)
def test_a_wrong_proxy_is_refused_and_not_printed(value: str) -> None:
    with pytest.raises(GpuprovError) as caught:
        parse_spec({"proxy": value})
    assert "gpuprov_proxy is not a proxy's URL" in str(caught.value)
    assert repr(value) not in str(caught.value) and "robot:" not in str(caught.value)


@pytest.mark.parametrize(
    "value", ["http://proxy", "http://10.0.0.1:3128/", "https://a%40b:c@p.example.org:65535", "http://[::1]:8080"]
)
def test_a_proxys_url_is_taken(value: str) -> None:
    assert parse_spec({"proxy": value}).proxy == value


@pytest.mark.parametrize("value", ["a b", "a,,b", "$HOME", "a;b"])
def test_a_wrong_no_proxy_is_refused(value: str) -> None:
    with pytest.raises(GpuprovError, match="gpuprov_no_proxy is not a list of hosts"):
        parse_spec({"no_proxy": value})


@pytest.mark.parametrize(
    ("url", "host", "port", "address"),
    [
        ("http://u:p@proxy.example.org:3128", "proxy.example.org", 3128, "http://proxy.example.org:3128"),
        ("http://proxy", "proxy", 80, "http://proxy"),
        ("https://u:p%40@[::1]", "::1", 443, "https://[::1]"),
    ],
)
def test_a_proxys_address_is_its_url_without_the_login(url: str, host: str, port: int, address: str) -> None:
    proxy = Proxy(url)
    assert (*proxy.host_and_port, proxy.address) == (host, port, address)


@pytest.mark.parametrize("url", ["http://u:p@[::1", "u:p@[::1"])
def test_what_is_no_url_has_an_address_for_messages(url: str) -> None:
    """The environment's proxy is checked by nobody before a request."""
    assert Proxy(url).address == "http://[::1"


def test_events_are_free_of_every_form_of_the_password() -> None:
    told: list[Event] = []
    sink = secret_free(told.append, f"http://robot:{PASSWORD}@proxy:1")
    sent = base64.b64encode(f"robot:{PLAIN}".encode()).decode()
    sink(Note(f"407 robot:{PASSWORD}@proxy {PLAIN} Basic {sent}"))
    sink(Finished(1, problems=(Problem("x", f"seen {PLAIN}", "next"),), versions={"os": PASSWORD}))
    assert is_secret_free(json.dumps([to_line(event) for event in told]))
    assert "407 robot:***@proxy *** Basic ***" in to_line(told[0])
    # A short one is hidden where it stands with its user: as a word it would hide ordinary text.
    short = secret_free(told.append, "http://u:on@proxy:1")
    short(Note("u:on@proxy turned on"))
    assert told[-1] == Note("u:***@proxy turned on")


@pytest.mark.parametrize(
    "written",
    [
        lambda word: base64.b64encode(f"another:{word}".encode()).decode(), lambda word: json.dumps({"p": word}),
        lambda word: json.dumps({"p": word}, ensure_ascii=False), html.escape,
        lambda word: base64.urlsafe_b64encode(word.encode()).decode(), shlex.quote, quote_plus,
        lambda word: quote(word, safe="").lower(),
    ],
    ids=["base64", "JSON, ASCII", "JSON", "HTML", "base64url", "shell", "form", "percent, lower"],
)  # fmt: skip
def test_a_login_is_hidden_in_the_forms_in_which_programs_write_it(written: Callable[[str], str]) -> None:
    told: list[Event] = []
    word = "Ä/\"~~~? & <pa'ss>"
    text = written(word)
    secret_free(told.append, f"http://robot:{quote(word, safe='')}@proxy:1")(Note(text))
    (note,) = told
    assert isinstance(note, Note) and "***" in note.message
    # Of base64 the first and the last characters depend on what stands beside.
    assert not {text[at : at + 12] for at in range(len(text) - 12)} & {
        note.message[at : at + 12] for at in range(len(note.message) - 12)
    }


def test_events_are_free_of_every_login_of_a_specification() -> None:
    told: list[Event] = []
    values = {"repositories": [{"uri": f"https://robot:{PASSWORD}@a/b"}], "driver_url": "https://ghp_token@c/d"}
    secret_free(told.append, values)(Note(f"{PLAIN} https://ghp_token@c/d ghp_token Basic Z2hwX3Rva2VuOg=="))
    assert told == [Note("*** https://***@c/d *** Basic ***")]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("sudo: hunter\x1b[0m22-x\u202e", "sudo: ***"),
        ("curl: https://third:party@host/repodata", "curl: https://third:***@host/repodata"),
        ("sh -c 'hunter22-x'", "sh -c '***'"),
        ("sudo: hunter22-x of ssh, hunter22-xyz of sudo", "sudo: *** of ssh, *** of sudo"),
    ],
)
def test_events_have_no_password_that_a_control_sequence_divides_and_no_login_of_any_url(said: str, shown: str) -> None:
    told: list[Event] = []
    for passwords in (("hunter22-x", "hunter22-xyz"), ("hunter22-x", "hunter22-xyz", "another")):
        secret_free(told.append, {}, passwords)(Finished(1, problems=(Problem("x", said),)))
    assert [event.problems[0].evidence for event in told if isinstance(event, Finished)] == [shown, shown]
    secret_free(told.append, {})(Note("dnf: https://third:party@host"))
    assert told[-1] == Note("dnf: https://third:***@host")


@pytest.mark.parametrize(
    "line",
    [
        "machine h login u password secret1",
        "password=secret1",
        '"password": "secret1"',
        "password = 'secret1'",
        "password = two secret1",
        '"password": "a secret1"',
        'auth = "secret1"',
        "identitytoken = 'secret1'",
        "proxy_password=secret1",
        '"splunk-token": "a\\"secret1"',
        "Environment=REGISTRY_TOKEN=secret1",
    ],
)
def test_diffs_hide_passwords(line: str) -> None:
    diff = text_diff("/etc/x", f"{line}\n".encode(), f"https://u:secret1@h\n{line} # new\n".encode())
    assert "secret1" not in diff and diff.count("***") == 3
