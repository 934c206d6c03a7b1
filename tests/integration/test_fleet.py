"""The controller against a real sshd on loopback: server keys, logins, sudo, the agent's way to a host and back."""

import dataclasses
import hashlib
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.probe import local_host_keys
from gpuprov.agent.result import machines
from gpuprov.core.system import System
from gpuprov.fleet.agent_file import Agent, build_agent
from gpuprov.fleet.agent_run import run_agent
from gpuprov.fleet.inventory import HostTarget, read_inventory
from gpuprov.fleet.options import Options, SshSettings
from gpuprov.fleet.run import Fleet
from gpuprov.fleet.ssh import connected
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.events import Event, Finished, Note, Started, from_line
from gpuprov.protocol.request import Request
from tests.integration.sshd import PASSWORD, Server, serving
from tests.integration.sshd import server as server
from tests.pythons import VERSIONS
from tools.zipapps import pack

pytestmark = pytest.mark.root

ACCEPTING = SshSettings(accept_new_host_keys=True, connect_timeout=60)
REFUSING = SshSettings(connect_timeout=60)
PATIENT = Options("install", accept_new_host_keys=True, connect_timeout=60)


@pytest.fixture
def target(server: Server, tmp_path: Path) -> HostTarget:
    return server.target(tmp_path)


def fake_agent(body: str) -> Agent:
    """Return an agent that reads its request and then does what `body` says; `tell(event=…, …)` sends an event."""
    head = (
        "import json, os, signal, sys, time\n"
        "request = json.loads(sys.stdin.readline())\n"
        "def tell(**event): print(json.dumps(event), flush=True)\n"
    )
    content = pack({"__main__.py": (head + body).encode()})
    return Agent(content, hashlib.sha256(content).hexdigest())


DONE = "tell(event='Finished', exit_code=0, changed=3, summary=f'{os.geteuid()} {request[\"command\"]}')"


def run(
    target: HostTarget, settings: SshSettings = ACCEPTING, body: str = DONE, *, bootstrap: bool = False
) -> list[Event]:
    events: list[Event] = []
    with connected(target, settings) as connection:
        finished = run_agent(
            connection, target, Request("install"), fake_agent(body), events.append, bootstrap_python=bootstrap
        )  # fmt: skip
    return [*events, finished]


def failure(target: HostTarget, settings: SshSettings = ACCEPTING, body: str = DONE) -> GpuprovError:
    with pytest.raises(GpuprovError) as caught:
        run(target, settings, body)
    return caught.value


def known_hosts(target: HostTarget) -> Path:
    return Path(dict(target.ssh_options)["UserKnownHostsFile"])


# -- server keys -----------------------------------------------------------------------------------------------------


def test_unknown_host_key_is_refused_with_fingerprint_file_and_option(server: Server, target: HostTarget) -> None:
    error = failure(target, REFUSING)
    shown = subprocess.run(
        ("ssh-keygen", "-lf", server.folder / "host_key.pub"), check=True, capture_output=True, text=True
    ).stdout.split()[1]  # fmt: skip
    assert error.exit_code == ExitCode.UNREACHABLE
    assert shown in str(error)
    assert str(known_hosts(target)) in str(error)
    assert "--accept-new-host-keys" in str(error)
    assert not known_hosts(target).exists()


def test_accepted_host_key_is_stored_and_known_from_then_on(server: Server, target: HostTarget) -> None:
    run(target, ACCEPTING)
    assert known_hosts(target).read_text() == f"[127.0.0.1]:{server.port} {server.host_key}\n"
    assert known_hosts(target).stat().st_mode & 0o777 == 0o600
    run(target, REFUSING)


def test_strict_host_key_checking_of_the_inventory_is_heeded(target: HostTarget) -> None:
    options = (*target.ssh_options, ("StrictHostKeyChecking", "accept-new"))
    run(dataclasses.replace(target, ssh_options=options), REFUSING)
    assert known_hosts(target).exists()


def test_hashed_known_hosts_of_ssh_keygen_are_read(server: Server, target: HostTarget) -> None:
    known_hosts(target).write_text(f"[127.0.0.1]:{server.port} {server.host_key}\n")
    subprocess.run(("ssh-keygen", "-q", "-H", "-f", known_hosts(target)), check=True, capture_output=True)
    assert "127.0.0.1" not in known_hosts(target).read_text()
    run(target, REFUSING)


@pytest.mark.parametrize("settings", [REFUSING, ACCEPTING], ids=["refusing", "accepting"])
@pytest.mark.parametrize("key_type", ["ed25519", "rsa"])
def test_changed_host_key_is_refused_whatever_the_option(
    server: Server, target: HostTarget, tmp_path: Path, settings: SshSettings, key_type: str
) -> None:
    subprocess.run(("ssh-keygen", "-q", "-t", key_type, "-N", "", "-f", tmp_path / "other"), check=True)
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    known_hosts(target).write_text(f"# seen before\n[127.0.0.1]:{server.port} {other}\n")
    before = known_hosts(target).read_bytes()
    error = failure(target, settings)
    assert error.exit_code == ExitCode.UNREACHABLE
    assert "host key changed" in str(error)
    assert f"{known_hosts(target)}:2" in str(error)
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}'" in str(error)
    assert known_hosts(target).read_bytes() == before


def test_any_key_of_the_server_that_is_known_will_do(server: Server, target: HostTarget) -> None:
    known = " ".join((server.folder / "other_host_key.pub").read_text().split()[:2])
    known_hosts(target).write_text(f"[127.0.0.1]:{server.port} {known}\n")
    run(target, REFUSING)


def test_revoked_host_key_is_refused(server: Server, target: HostTarget) -> None:
    known_hosts(target).write_text(f"@revoked * {server.host_key}\n")
    assert "revoked" in str(failure(target, ACCEPTING))


def test_jump_host_is_gone_through_and_its_key_checked(server: Server, target: HostTarget, tmp_path: Path) -> None:
    config = tmp_path / "config"
    known = tmp_path / "known_hosts"
    config.write_text(
        f"Host *\n  UserKnownHostsFile {known}\n  IdentityFile {server.identity}\n"
        f"Host bastion\n  HostName 127.0.0.1\n  Port {server.port}\n  User open\n"
    )
    jumping = dataclasses.replace(
        target, address="localhost", ssh_config_file=str(config), ssh_options=(("ProxyJump", "bastion"),)
    )  # fmt: skip
    assert f"[127.0.0.1]:{server.port} is unknown" in str(failure(jumping, REFUSING))
    assert isinstance(run(jumping, ACCEPTING)[-1], Finished)
    assert [line.split()[0] for line in known.read_text().splitlines()] == [
        f"[127.0.0.1]:{server.port}", f"[localhost]:{server.port}",
    ]  # fmt: skip
    assert "Accepted publickey for open" in server.log
    with connected(jumping, ACCEPTING) as connection:  # a path that dies is noticed in a minute
        assert connection.gateway.transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        assert connection.gateway.transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize(("address", "jump"), [("::1", ""), ("127.0.0.1", "-J root@[::1]:{port} ")])
def test_addresses_of_ipv6_are_reached(server: Server, tmp_path: Path, address: str, jump: str) -> None:
    known, config = tmp_path / "known_hosts", tmp_path / "config"
    config.write_text(f"UserKnownHostsFile {known}\nIdentityFile {server.identity}\n")
    (tmp_path / "hosts.ini").write_text(
        f"lab-a ansible_host={address} ansible_port={server.port} ansible_user=root "
        f"ansible_ssh_common_args='{jump.format(port=server.port)}-F {config}'\n"
    )
    (host,) = read_inventory((str(tmp_path / "hosts.ini"),)).hosts
    assert isinstance(run(host)[-1], Finished)
    assert known.read_text().startswith(f"[::1]:{server.port} ")
    run(host, REFUSING)


# -- not reached, not let in -----------------------------------------------------------------------------------------


def test_wrong_key_names_user_and_keys_tried(target: HostTarget, tmp_path: Path) -> None:
    subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "wrong"), check=True)
    error = failure(dataclasses.replace(target, identity_file=str(tmp_path / "wrong"), ssh_options=(
        *target.ssh_options, ("IdentitiesOnly", "yes"))))  # fmt: skip
    assert error.exit_code == ExitCode.UNREACHABLE
    assert "refuses to log in root" in str(error)
    assert str(tmp_path / "wrong") in str(error)
    assert "ansible_ssh_private_key_file" in str(error)


def test_key_that_does_not_exist_is_said_so(target: HostTarget) -> None:
    error = failure(dataclasses.replace(target, identity_file="/nowhere/id", ssh_options=(
        *target.ssh_options, ("IdentitiesOnly", "yes"))))  # fmt: skip
    assert "the key /nowhere/id can't be read: No such file or directory" in str(error)


def test_password_opens_the_door_too(target: HostTarget) -> None:
    right = dataclasses.replace(target, identity_file="", user="open", password=PASSWORD)
    assert isinstance(run(right)[-1], Finished)
    wrong = failure(dataclasses.replace(right, password="wrong pony"))
    assert "refuses to log in open" in str(wrong)
    assert "tried the password" in str(wrong)
    assert "wrong pony" not in str(wrong)


def test_closed_port_and_unknown_name_are_unreachable(target: HostTarget) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        refused = failure(dataclasses.replace(target, port=taken.getsockname()[1]))
    nameless = failure(dataclasses.replace(target, address="no-such-host.invalid"))
    assert refused.exit_code == nameless.exit_code == ExitCode.UNREACHABLE
    assert "cannot be reached" in str(refused)
    assert "the name no-such-host.invalid is not known" in str(nameless)


def test_dead_address_does_not_hide_the_next_one(target: HostTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def both(host: str, *words: Any, **options: Any) -> list[Any]:
        # To the first one no network leads, as to an address of IPv6 in many places.
        addresses = ("255.255.255.255", "127.0.0.1") if host == "two.example" else (host,)
        return [one for address in addresses for one in known(address, *words, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with connected(dataclasses.replace(target, address="two.example"), ACCEPTING) as connection:
        assert connection.is_connected


# -- Python on the host ----------------------------------------------------------------------------------------------


def test_missing_interpreter_is_named_with_the_ways_to_get_one(target: HostTarget) -> None:
    error = failure(dataclasses.replace(target, python="/nowhere/python3"))
    assert "there is no Python on the host" in str(error)
    assert "/nowhere/python3" in str(error)
    assert "--bootstrap-python" in str(error)


def test_bootstrap_installs_python_with_the_package_manager(tmp_path: Path, target: HostTarget) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "uname", "id", "sha256sum", "cut", "cat", "mkdir", "mktemp", "mv", "rm", "find", "ln", "head"):
        (programs / name).symlink_to(shutil.which(name) or "")
    apt = programs / "apt-get"
    apt.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/apt.log\n'
                   f'case "$*" in *install*) ln -s /usr/bin/python3 {programs}/python3;; esac\n')  # fmt: skip
    apt.chmod(0o755)
    with serving(str(programs)) as bare:
        here = dataclasses.replace(target, port=bare.port, identity_file=str(bare.identity))
        assert "--bootstrap-python" in str(failure(here))
        events = run(here, bootstrap=True)
    assert isinstance(events[-1], Finished)
    assert (tmp_path / "apt.log").read_text() == "-q update\n-q -y install python3\n"


# -- the agent -------------------------------------------------------------------------------------------------------


def test_events_arrive_while_the_agent_works(target: HostTarget, tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    arrived: list[Event] = []

    def note(event: Event) -> None:
        arrived.append(event)
        heard.touch()

    with connected(target, ACCEPTING) as connection:
        run_agent(connection, target, Request("install"), fake_agent(f"{started_and_heard(heard)}{DONE}"), note)
    assert [type(event) for event in arrived] == [Started]


def started_and_heard(heard: Path) -> str:
    """Return an agent's beginning that tells an event, and goes on as soon as that is heard here."""
    return (
        "tell(event='Started', version='1', command='install', pid=1)\nprint('no event')\n"
        f"while not os.path.exists({str(heard)!r}): time.sleep(0.01)\n"
    )


def test_agent_is_uploaded_once_and_replaced_if_it_changed(server: Server, target: HostTarget) -> None:
    run(target)
    kept = server.folder / f"home/root/.cache/gpuprov/agent-{fake_agent(DONE).digest}.pyz"
    first = kept.stat()
    assert first.st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    run(target)
    assert kept.stat().st_ino == first.st_ino
    kept.write_bytes(b"something else")
    assert isinstance(run(target)[-1], Finished)
    assert kept.read_bytes() == fake_agent(DONE).content


@pytest.mark.parametrize("login", [{"user": "root"}, {"user": "plain", "become_password": PASSWORD}], ids=str)
def test_host_costs_one_connection_and_two_or_three_commands(target: HostTarget, login: dict[str, Any]) -> None:
    with serving() as fresh:
        host = dataclasses.replace(target, port=fresh.port, identity_file=str(fresh.identity), **login)
        seen = []
        for _ in range(2):
            before = fresh.counts()
            fleet = Fleet(lambda: fake_agent(DONE), PATIENT)
            (result,) = fleet.run([host], Request("install"), lambda host, event: None)
            assert result.exit_code == ExitCode.DONE
            connections, commands = fresh.counts()
            seen.append((connections - before[0], commands - before[1]))
    assert seen == [(1, 3), (1, 2)]


def test_cut_connection_says_that_the_agent_goes_on(target: HostTarget, tmp_path: Path) -> None:
    body = (
        f"{started_and_heard(tmp_path / 'heard')}"
        "up = lambda pid: int(open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[1])\n"
        "pid = os.getppid()\n"
        "while 'sshd' not in open(f'/proc/{pid}/comm').read(): pid = up(pid)\n"
        "os.kill(pid, signal.SIGKILL)\n"
        "time.sleep(2)\n"
    )
    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)
        (tmp_path / "heard").touch()

    with pytest.raises(GpuprovError) as caught, connected(target, ACCEPTING) as connection:
        run_agent(connection, target, Request("install"), fake_agent(body), note)
    assert [type(event) for event in events] == [Started]
    assert "the connection to the host dropped" in str(caught.value)
    assert "the agent on the host continues; run the same command again" in str(caught.value)


def test_agent_that_dies_shows_the_end_of_its_stderr(target: HostTarget) -> None:
    error = failure(target, body="raise SystemExit('no space left on device')")
    assert "the agent ended without a result" in str(error)
    assert "exit code 1\n        no space left on device" in str(error)


@pytest.mark.parametrize("user", ["root", "open"])
def test_agent_that_is_killed_is_no_lost_connection(target: HostTarget, user: str) -> None:
    error = failure(dataclasses.replace(target, user=user), body="os.kill(os.getpid(), signal.SIGKILL)")
    assert "the agent ended without a result" in str(error)


# -- root ------------------------------------------------------------------------------------------------------------


def test_sudo_with_password_makes_root_and_shows_it_to_nobody(target: HostTarget) -> None:
    seen = (
        # The agent, sudo, the login's shell, sshd and the controller: others only make the event too large.
        "pid, commands = os.getpid(), []\n"
        "while pid > 1:\n"
        "    commands.append(open(f'/proc/{pid}/cmdline').read())\n"
        "    pid = int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
        "tell(event='Note', message=repr([commands, dict(os.environ)]))\n"
    )
    asked = dataclasses.replace(target, user="plain", become_password=PASSWORD)
    note, finished = run(asked, body=seen + DONE)
    assert isinstance(note, Note)
    assert isinstance(finished, Finished)
    assert finished.summary == "0 install"
    assert "gpuprov" in note.message and "sudo" in note.message
    assert PASSWORD not in note.message
    assert PASSWORD not in repr(asked)


@pytest.mark.parametrize(
    ("password", "what"),
    [("", "sudo on the host wants a password"), ("wrong pony", "sudo on the host refuses the password")],
)
def test_sudo_without_the_right_password_says_what_to_do(target: HostTarget, password: str, what: str) -> None:
    error = failure(dataclasses.replace(target, user="plain", become_password=password))
    assert error.exit_code == ExitCode.FAILED
    assert what in str(error)
    # Who has given a password is not asked to give one.
    assert ("run again with -K" in str(error)) is (not password)
    assert "ansible_become_password" in str(error)
    assert "wrong pony" not in str(error)


@pytest.mark.parametrize("user", ["open", "plain"])
def test_a_home_that_is_closed_to_root_is_no_obstacle(tmp_path: Path, user: str) -> None:
    # As on NFS with root_squash: root may not read what others keep to themselves.
    with serving(limits="--bounding-set=-dac_override,-dac_read_search") as squashed:
        target = dataclasses.replace(squashed.target(tmp_path, user), become_password=PASSWORD)
        for _ in range(2):
            finished = run(target)[-1]
            assert isinstance(finished, Finished)
            assert finished.summary == "0 install"


def test_become_false_is_not_overruled(target: HostTarget) -> None:
    assert "gpuprov needs root on the host, and ansible_become is false" in str(
        failure(dataclasses.replace(target, user="open", become=False))
    )


# -- many hosts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "codes"), [("install", [0, 2]), ("facts", [0, 0])])
def test_machine_under_two_names_is_changed_once(target: HostTarget, command: str, codes: list[int]) -> None:
    targets = [target, dataclasses.replace(target, name="lab-b", user="open")]
    body = "tell(event='Finished', exit_code=0, changed=1, versions={'gpus': '8'})"
    notes: list[Event] = []
    fleet = Fleet(lambda: fake_agent(body), dataclasses.replace(PATIENT, command=command))
    results = fleet.run(targets, Request(command), lambda host, event: notes.append(event))
    second = next(result for result in results if result.same_as)
    first = next(result for result in results if result is not second)
    assert sorted(int(result.exit_code) for result in results) == codes
    assert (second.same_as, first.same_as) == (first.host, "")
    assert machines(results) == (first,)
    said = f"{second.host} is the same machine as {first.host}"
    if command == "install":
        assert said in second.problems[0].what
        assert Path("/etc/machine-id").read_text().strip() in second.problems[0].evidence
        assert f"--limit 'all:!{second.host}'" in second.problems[0].next_step
    else:
        assert any(isinstance(note, Note) and note.level == "warning" and said in note.message for note in notes)


def test_a_host_that_sends_the_ids_of_another_gets_no_host_refused(target: HostTarget, tmp_path: Path) -> None:
    # The same machine with another host key stands for a host that has learned the ids of `target`.
    with serving() as foreign:
        liar = dataclasses.replace(
            target, name="liar", port=foreign.port, identity_file=str(foreign.identity),
            ssh_options=(("UserKnownHostsFile", str(tmp_path / "known_hosts_of_liar")),),
        )  # fmt: skip
        notes: list[Event] = []
        body = "tell(event='Finished', exit_code=0, changed=1)"
        fleet = Fleet(lambda: fake_agent(body), dataclasses.replace(PATIENT, forks=1))
        results = fleet.run([liar, target], Request("install"), lambda host, event: notes.append(event))
    assert [(int(one.exit_code), one.same_as) for one in results] == [(0, ""), (0, "")]
    assert any(isinstance(note, Note) and "lab-a has the machine id" in note.message for note in notes)


def test_this_machine_and_itself_over_ssh_are_one(
    target: HostTarget, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc/ssh").mkdir(parents=True)
    for kind in ("host_key", "other_host_key"):
        (tmp_path / f"etc/ssh/ssh_host_{kind}_key.pub").write_text((server.folder / f"{kind}.pub").read_text())
    keys = local_host_keys(System(str(tmp_path)))
    monkeypatch.setattr("gpuprov.fleet.run.local_host_keys", lambda system: keys)
    local = dataclasses.replace(target, name="here", connection="local")
    fleet = Fleet(lambda: fake_agent(DONE), dataclasses.replace(PATIENT, command="facts", forks=1))
    results = fleet.run([target, local], Request("facts"), lambda host, event: None)
    assert [result.same_as for result in results] == ["", "lab-a"]


def test_one_unreachable_host_leaves_the_others_alone(target: HostTarget) -> None:
    hosts = [
        target,
        dataclasses.replace(target, name="gone", address="no-such-host.invalid"),
        dataclasses.replace(target, name="lab-c"),
    ]
    seen: list[tuple[str, Event]] = []
    fleet = Fleet(lambda: fake_agent(DONE), PATIENT)
    # Both names are the same machine's: for what changes nothing, that is a warning.
    results = fleet.run(hosts, Request("facts"), lambda host, event: seen.append((host, event)))
    assert [(result.host, result.exit_code, result.changed) for result in results] == [
        ("lab-a", ExitCode.DONE, 3), ("gone", ExitCode.UNREACHABLE, 0), ("lab-c", ExitCode.DONE, 3),
    ]  # fmt: skip
    assert {host for host, event in seen if isinstance(event, Finished)} == {"lab-a", "gone", "lab-c"}


# -- the real agent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", VERSIONS, indirect=True)
def test_built_agent_gathers_facts_on_every_python_here(tmp_path: Path, python: str) -> None:
    agent = tmp_path / "agent.pyz"
    agent.write_bytes(build_agent(tmp_path / "cache").content)
    alone = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /var/cache && exec "$@"', "sh")
    done = subprocess.run(
        (*alone, python, "-I", str(agent)), input=b'{"command":"facts"}\n', capture_output=True, timeout=60
    )  # fmt: skip
    events = [type(from_line(line)).__name__ for line in done.stdout.decode().splitlines()]
    assert (events, done.returncode, done.stderr) == (["Started", "FactsGathered", "Finished"], 0, b"")
