"""What keeps gpuprov from a host is named, at both doors: accounts, sudo, keys, proxies; a real sshd, ssh and sudo."""

import contextlib
import dataclasses
import io
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
import yaml

from gpuprov.fleet import remote
from gpuprov.fleet.agent_run import run_agent
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.ssh import connected, wait_for_boot
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.events import Finished, Note
from gpuprov.protocol.request import Request
from tests.files import put
from tests.integration.sshd import PASSWORD, Server, serving
from tests.integration.sshd import server as server
from tests.integration.test_ansible import run_ansible
from tests.integration.test_fleet import ACCEPTING, DONE, REFUSING, failure, fake_agent, run

pytestmark = pytest.mark.root


@pytest.fixture
def target(server: Server, tmp_path: Path) -> HostTarget:
    return server.target(tmp_path, "open")


@dataclasses.dataclass(frozen=True)
class Account:
    """A user of the server, the sudo password that is given, and what is said.

    `by_ansible`: what a playbook says where Ansible keeps the reason to itself.
    """

    user: str
    password: str
    what: str
    code: ExitCode = ExitCode.FAILED
    by_ansible: str = ""


ACCOUNTS = (
    Account("seated", "", "sudo on the host requires a terminal (requiretty)"),
    Account("seated", PASSWORD, "sudo on the host requires a terminal (requiretty)"),
    Account("stranger", PASSWORD, "stranger is not in sudoers on the host"),
    Account(
        "limited",
        PASSWORD,
        "limited may run some commands with sudo on the host, and not gpuprov",
        by_ansible="sudo on the host refuses this command, or it ended without a word",
    ),
    Account("barred", "", "the account may not log in: its shell is nologin", ExitCode.UNREACHABLE),
    Account("silent", "", "the account's shell ends at once and runs nothing", ExitCode.UNREACHABLE),
)


@pytest.mark.parametrize("account", ACCOUNTS, ids=lambda one: f"{one.user}{'-password' if one.password else ''}")
def test_an_account_that_runs_nothing_is_named(target: HostTarget, account: Account) -> None:
    error = failure(dataclasses.replace(target, user=account.user, become_password=account.password))
    assert (error.exit_code, account.what in str(error)) == (account.code, True), str(error)
    assert "run again with -K" not in str(error)
    assert error.problems[0].evidence
    assert error.problems[0].next_step


def test_an_expired_password_is_named(target: HostTarget) -> None:
    error = failure(dataclasses.replace(target, user="lapsed", password=PASSWORD, identity_file=""))
    assert error.exit_code == ExitCode.UNREACHABLE
    assert "the account's password has expired" in str(error)
    assert "WARNING: Your password has expired." in error.problems[0].evidence


_PLAYBOOK = """
- hosts: accounts
  gather_facts: false
  ignore_errors: true
  tasks:
    - gpuprov.host.agent: {command: facts}
      become: true
- hosts: twins
  gather_facts: false
  ignore_errors: true
  tasks:
    - gpuprov.host.agent: {command: facts}
    # Nothing is rolled back: an ordinary user may not.
    - gpuprov.host.agent: {command: rollback}
"""


def variables(server: Server) -> dict[str, object]:
    return {
        "ansible_host": "127.0.0.1", "ansible_port": server.port, "ansible_ssh_private_key_file": str(server.identity),
        # Each login is the first: ssh itself announces the new key and prints the server's banner, on stderr.
        "ansible_ssh_common_args": "-F /dev/null -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
        "-o ControlPath=none", "ansible_pipelining": True,
    }  # fmt: skip


def test_a_playbook_runs_where_homes_are_closed_to_root(tmp_path: Path) -> None:
    inventory = tmp_path / "inventory.yml"
    with serving(limits="--bounding-set=-dac_override,-dac_read_search") as squashed:
        host = {**variables(squashed), "ansible_user": "open"}
        inventory.write_text(yaml.safe_dump({"all": {"hosts": {"lab-a": host}}}))
        done = run_ansible("-i", inventory, "playbooks/facts.yml", "-b")
    assert (done.returncode, "docker" in done.stdout) == (0, True), done.stdout


def test_playbooks_name_accounts_and_machines_with_two_names(server: Server, tmp_path: Path) -> None:
    common = variables(server)
    told = [one for one in ACCOUNTS if one.user != "seated" or one.password]
    accounts = {one.user: {"ansible_user": one.user, "ansible_become_password": one.password} for one in told}
    twins = {name: {"ansible_user": "open"} for name in ("twin-a", "twin-b")}
    inventory, playbook = tmp_path / "inventory.yml", tmp_path / "play.yml"
    groups = {"accounts": {"hosts": accounts}, "twins": {"hosts": twins}}
    inventory.write_text(yaml.safe_dump({"all": {"vars": common, "children": groups}}))
    playbook.write_text(_PLAYBOOK)
    done = run_ansible("-i", inventory, playbook)
    for one in told:
        assert f"fatal: [{one.user}]: " in done.stdout
        assert (one.by_ansible or one.what) in done.stdout, done.stdout
    # A host can send another's ids, and Ansible does not tell the host key: no name is refused.
    warning = r"twin-[ab] has the machine id and the boot\s+id of \w+"
    assert re.search(warning, done.stdout), done.stdout
    assert set(re.findall(r"fatal: \[(twin-[ab])\]", done.stdout)) == {"twin-a", "twin-b"}, done.stdout
    assert "gpuprov rollback must run as root" in done.stdout and "the same machine as" not in done.stdout


def test_a_wrong_password_is_known_by_the_second_question(target: HostTarget) -> None:
    with connected(dataclasses.replace(target, user="mocked"), ACCEPTING) as connection:
        # Without a limit of its own sudo would wait for another password for ever.
        too_late = threading.Timer(30, connection.close)
        too_late.start()
        wrong = dataclasses.replace(target, user="mocked", become_password="wrong pony")
        with pytest.raises(GpuprovError, match="sudo on the host refuses the password") as caught:
            run_agent(connection, wrong, Request("install"), fake_agent(DONE), lambda event: None)
        too_late.cancel()
    assert caught.value.problems[0].evidence == "You silly, twisted boy"
    right = dataclasses.replace(target, user="mocked", become_password=PASSWORD)
    assert isinstance(run(right)[-1], Finished)
    # What a failed agent has said does not begin with sudo's questions.
    assert failure(right, body="sys.exit('out of luck')").problems[0].evidence == "exit code 1\nout of luck"


def test_a_shell_that_sets_a_title_hides_nothing(tmp_path: Path) -> None:
    # As ~/.bashrc often does: it ends no line.
    programs, boot = tmp_path / "bin", Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    programs.mkdir()
    put(programs / "systemctl", "#!/bin/sh\necho running\n", 0o755)
    with serving(f"{programs}:/usr/bin:/bin") as titled:
        (titled.folder / "home/root/.bashrc").write_text(r"printf '\033]0;title\007'")
        target = titled.target(tmp_path)
        assert [type(event) for event in run(target)] == [Finished]
        wait_for_boot(target, ACCEPTING, "another", lambda: False, patience=60)
        looks = iter((False, True))
        with pytest.raises(GpuprovError, match="still in the boot before"):
            wait_for_boot(target, ACCEPTING, boot, lambda: next(looks, True))


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_that_cannot_be_used_is_named_with_the_reason(target: HostTarget, server: Server, tmp_path: Path) -> None:
    (tmp_path / "garbage").write_text("garbage\n")
    (tmp_path / "public").write_bytes((server.folder / "identity.pub").read_bytes())
    make = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", tmp_path / "locked")
    subprocess.run(make, check=True, timeout=60)
    said = {
        "gone": "can't be read: No such file or directory", "public": "can't be read: it is a public key",
        ".": "can't be read: Is a directory", "garbage": "holds no private key", "locked": "needs a passphrase",
    }  # fmt: skip
    for name, words in said.items():
        error = failure(dataclasses.replace(target, identity_file=str(tmp_path / name)))
        assert error.exit_code == ExitCode.UNREACHABLE
        assert words in error.problems[0].what
        assert str(tmp_path / name) in error.problems[0].what


def test_a_key_of_another_users_is_named(target: HostTarget, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # Below a folder that any user may enter.
    key = put(server.folder / "unreadable", server.identity.read_bytes(), 0)
    monkeypatch.setenv("HOME", str(server.folder / "home/open"))
    os.seteuid(4243)
    try:
        error = failure(dataclasses.replace(target, identity_file=str(key), ssh_options=()), ACCEPTING)
    finally:
        os.seteuid(0)
    assert f"the key {key} can't be read: Permission denied" in error.problems[0].what


class MoreThanAKey(paramiko.ServerInterface):  # type: ignore[misc]
    """A server that takes any key, then has its say, and asks; without a question it is content."""

    def __init__(self, *questions: tuple[str, bool]) -> None:
        self.questions = questions

    def get_allowed_auths(self, username: str) -> str:
        return "publickey,keyboard-interactive"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return int(paramiko.AUTH_PARTIALLY_SUCCESSFUL)

    def check_auth_interactive(self, username: str, submethods: str) -> paramiko.InteractiveQuery:
        return paramiko.InteractiveQuery("\x1b[2J", "all hosts are done", *self.questions)

    def check_auth_interactive_response(self, responses: list[str]) -> int:
        return int(paramiko.AUTH_SUCCESSFUL)


@contextlib.contextmanager
def asking(target: HostTarget, *questions: tuple[str, bool]) -> Iterator[HostTarget]:
    def serve() -> None:
        with paramiko.Transport(listener.accept()[0]) as transport:
            transport.add_server_key(paramiko.ECDSAKey.generate())
            transport.start_server(server=MoreThanAKey(*questions))
            transport.join(60)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield dataclasses.replace(target, port=listener.getsockname()[1])
        server.join(60)


def test_what_a_server_asks_at_the_login_is_not_shown(
    target: HostTarget, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("typed\n" * 9))
    with asking(target, ("sudo password of the controller:", False)) as host:
        error = failure(host)
    assert (error.exit_code, capfd.readouterr().out) == (ExitCode.UNREACHABLE, "")
    assert "keyboard-interactive" in error.problems[0].evidence


def test_second_factor_without_questions_is_accepted(target: HostTarget, capfd: pytest.CaptureFixture[str]) -> None:
    with asking(target) as host, connected(host, ACCEPTING) as connection:
        assert connection.is_connected
    assert capfd.readouterr().out == ""


@pytest.fixture
def agent(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real ssh-agent that has more keys than a server lets try, the last of which the server takes; a key's file.

    The file needs a passphrase, which nobody is asked for; its public part is beside it.
    """
    keys = [tmp_path / f"key{number}" for number in range(9)]
    monkeypatch.setenv("SSH_AUTH_SOCK", f"{tmp_path}/agent")
    with subprocess.Popen(("ssh-agent", "-D", "-a", tmp_path / "agent"), stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        for key in keys:
            subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key), check=True)
        keys[-1].write_bytes(server.identity.read_bytes())
        keys[-1].with_suffix(".pub").write_bytes((server.folder / "identity.pub").read_bytes())
        subprocess.run(("ssh-add", "-q", *keys), check=True)
        subprocess.run(("ssh-keygen", "-q", "-p", "-N", "secret", "-f", keys[-1]), check=True)
        yield keys[-1]
        process.terminate()


@pytest.mark.parametrize("options", [(), (("IdentitiesOnly", "yes"),)], ids=["any key", "IdentitiesOnly"])
@pytest.mark.parametrize("suffix", ["", ".pub"])
def test_named_key_of_agent(target: HostTarget, agent: Path, suffix: str, options: tuple[tuple[str, str], ...]) -> None:
    named = dataclasses.replace(target, identity_file=f"{agent}{suffix}")
    with connected(dataclasses.replace(named, ssh_options=(*target.ssh_options, *options)), ACCEPTING) as connection:
        assert connection.is_connected


@pytest.mark.parametrize("named", ["{0}", "$ELSEWHERE", "SSH_AUTH_SOCK"])
def test_configured_agent_is_used(target: HostTarget, agent: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSEWHERE", os.environ["SSH_AUTH_SOCK"])
    option = ("IdentityAgent", named.format(os.environ["SSH_AUTH_SOCK"]))
    if named != "SSH_AUTH_SOCK":
        monkeypatch.setenv("SSH_AUTH_SOCK", "/gone")
    here = dataclasses.replace(target, identity_file=str(agent), ssh_options=(*target.ssh_options, option))
    with connected(here, ACCEPTING) as connection:
        assert connection.is_connected
    without = (*target.ssh_options, ("IdentityAgent", "none"))
    assert "needs a passphrase" in str(failure(dataclasses.replace(here, ssh_options=without)))


@pytest.mark.parametrize("ends", [True, False], ids=["closes", "mute"])
def test_an_agent_that_does_not_answer_is_passed_over(
    target: HostTarget, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """As one that is forwarded from a machine that sleeps; the default key, which comes after it, is taken."""
    (tmp_path / ".ssh").mkdir()
    shutil.copy(server.identity, tmp_path / ".ssh/id_ed25519")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", f"{tmp_path}/mute")
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"{tmp_path}/mute")
        mute.listen(9)
        closer = threading.Thread(target=lambda: mute.accept()[0].close(), daemon=True)
        if ends:
            closer.start()
        soon = dataclasses.replace(ACCEPTING, connect_timeout=1)
        with connected(dataclasses.replace(target, identity_file=""), soon) as connection:
            assert connection.is_connected


def test_no_other_key_of_the_agent_is_used_with_identities_only(target: HostTarget, agent: Path) -> None:
    named = dataclasses.replace(target, identity_file=str(agent.with_name("key0")))
    only = (*target.ssh_options, ("IdentitiesOnly", "yes"))
    assert "refuses to log in open" in str(failure(dataclasses.replace(named, ssh_options=only)))


def test_no_key_is_tried_if_the_configuration_switches_keys_off(target: HostTarget, agent: Path) -> None:
    off = (*target.ssh_options, ("PubkeyAuthentication", "no"))
    for path in (str(agent), ""):
        assert "tried nothing" in str(failure(dataclasses.replace(target, identity_file=path, ssh_options=off)))


def test_a_connection_is_bound_to_its_own_address_or_says_that_it_is_not(target: HostTarget, tmp_path: Path) -> None:
    bound = (*target.ssh_options, ("BindAddress", "127.0.0.7"))
    with connected(dataclasses.replace(target, ssh_options=bound), ACCEPTING) as connection:
        assert connection.transport.getpeername()[0] == "127.0.0.1"
        assert connection.transport.sock.getsockname()[0] == "127.0.0.7"
    text = "Host *\n  BindInterface lo\n  KnownHostsCommand /bin/true\n"
    unheeded = dataclasses.replace(target, ssh_config_file=str(put(tmp_path / "config", text)))
    notes = [event.message for event in run(unheeded) if isinstance(event, Note)]
    assert notes == [f"the SSH option {one} has no effect here" for one in ("BindInterface", "KnownHostsCommand")]


def test_a_login_that_ends_after_too_many_keys_is_named(target: HostTarget, agent: Path) -> None:
    error = failure(dataclasses.replace(target, identity_file=""))
    assert error.exit_code == ExitCode.UNREACHABLE
    assert "takes no more keys" in error.problems[0].what
    assert "ansible_ssh_private_key_file" in error.problems[0].next_step


def test_identities_only_leaves_the_default_keys(
    target: HostTarget, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir()
    shutil.copy(server.identity, tmp_path / ".ssh/id_ed25519")
    monkeypatch.setenv("HOME", str(tmp_path))
    only = dataclasses.replace(target, identity_file="", ssh_options=(*target.ssh_options, ("IdentitiesOnly", "yes")))
    with connected(only, ACCEPTING) as connection:
        assert connection.is_connected


def test_the_sites_known_hosts_count_wherever_they_are(target: HostTarget, server: Server, tmp_path: Path) -> None:
    (tmp_path / "site").write_text(f"[127.0.0.1]:{server.port} {server.host_key}\n")
    (tmp_path / "config").write_text(f"Host *\n  GlobalKnownHostsFile {tmp_path}/site\n")
    here = dataclasses.replace(target, ssh_config_file=str(tmp_path / "config"))
    with connected(here, REFUSING) as connection:
        assert connection.is_connected
    own = (server.folder / "identity.pub").read_text()
    (tmp_path / "site").write_text(f"[127.0.0.1]:{server.port} {own}")
    assert "host key changed" in str(failure(here, ACCEPTING))


def test_configured_certificate_goes_with_its_key(target: HostTarget, server: Server, tmp_path: Path) -> None:
    authority, key, certificate = tmp_path / "ca", tmp_path / "own", tmp_path / "signed/own-cert.pub"
    for one in (authority, key):
        subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", one), check=True)
    subprocess.run(("ssh-keygen", "-q", "-s", authority, "-I", "x", "-n", "open", f"{key}.pub"), check=True)
    certificate.parent.mkdir()
    (tmp_path / "own-cert.pub").rename(certificate)  # beside its key, paramiko would find it
    with (server.folder / "identity.pub").open("a") as accepted:
        accepted.write(f"cert-authority {authority.with_suffix('.pub').read_text()}")
    named = dataclasses.replace(target, identity_file=str(key))
    assert "refuses to log in" in str(failure(named))
    options = (*target.ssh_options, ("CertificateFile", str(certificate)))
    with connected(dataclasses.replace(named, ssh_options=options), ACCEPTING) as connection:
        assert connection.is_connected
    gone = (*target.ssh_options, ("CertificateFile", "/gone-cert.pub"))
    assert "CertificateFile /gone-cert.pub: not used" in str(failure(dataclasses.replace(named, ssh_options=gone)))


# -- proxies ---------------------------------------------------------------------------------------------------------

PROXIES = (
    ("ProxyCommand", "sh -c 'echo no route >&2; exit 7'", "its ProxyCommand ended with exit code 7", "no route"),
    (
        "ProxyCommand",
        "sh -c 'read -r _; echo no route >&2; exit 8'",
        "its ProxyCommand ended with exit code 8",
        "no route",
    ),
    ("ProxyCommand", "/no/such/program %h", "its ProxyCommand ended with exit code 127", "/no/such/program"),
    ("ProxyCommand", "sleep 100", "its ProxyCommand says nothing within 1 s", "sleep"),
    ("ProxyJump", "127.0.0.1:9", "the jump host 127.0.0.1 port 9 cannot be reached", "Connection refused"),
    ("ProxyJump", "no-such-host.invalid", "the name no-such-host.invalid is not known", ""),
)


@pytest.mark.parametrize(("option", "value", "what", "seen"), PROXIES, ids=[row[2] for row in PROXIES])
def test_a_dead_proxy_is_named(target: HostTarget, option: str, value: str, what: str, seen: str) -> None:
    through = dataclasses.replace(target, ssh_options=(*target.ssh_options, (option, value)))
    # What has ended is not waited for: that would take longer than any test may.
    patience = 1 if value.startswith("sleep") else 100_000
    error = failure(through, dataclasses.replace(ACCEPTING, connect_timeout=patience))
    assert error.exit_code == ExitCode.UNREACHABLE
    assert what in error.problems[0].what
    assert seen in error.problems[0].evidence


@pytest.mark.parametrize("command", [
    "sh -c 'echo no route >&2; exit 7' hunter2", "sh -c 'echo SSH-2.0-x; read -r x; exit 7' hunter2",
    "/no/such/program hunter2", "sh -c ':; exec sleep 100' hunter2",
])  # fmt: skip
@pytest.mark.parametrize("user", ["open", "o pen"])
def test_a_password_of_a_proxy_command_is_not_shown(target: HostTarget, command: str, user: str) -> None:
    through = dataclasses.replace(target, user=user, ssh_options=(*target.ssh_options, ("ProxyCommand", command)))
    error = failure(through, dataclasses.replace(ACCEPTING, connect_timeout=1 if "sleep" in command else 100))
    assert f"ProxyCommand {command.split()[0]} …" in error.problems[0].evidence
    assert "hunter2" not in str(error) and "ssh -G 127.0.0.1" in error.problems[0].next_step


@pytest.mark.parametrize("said", [b"A" * 65536, b"y\n" * 32768], ids=["without a line's end", "line by line"])
def test_what_never_ends_is_no_ssh_server(target: HostTarget, said: bytes) -> None:
    def talk() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            while True:
                connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        talker = threading.Thread(target=talk)
        talker.start()
        error = failure(dataclasses.replace(target, port=listener.getsockname()[1]), ACCEPTING)
        talker.join()
    assert error.exit_code == ExitCode.UNREACHABLE
    assert "is not a compatible SSH server" in error.problems[0].what


def test_a_host_is_reached_through_a_proxy_command(target: HostTarget, server: Server) -> None:
    options = "-F none -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no"
    command = f"ssh {options} -i {server.identity} -p %p -W %h:%p open@127.0.0.1"
    through = dataclasses.replace(target, ssh_options=(*target.ssh_options, ("ProxyCommand", command)))
    with connected(through, ACCEPTING) as connection:
        # More than a pipe holds.
        assert remote.run(connection, "head -c 300000 /dev/zero", timeout=60).stdout.count("\0") == 300_000


@pytest.mark.parametrize("way", ["ProxyJump outer", "ProxyCommand {0} -p %p -W %h:%p open@127.0.0.1"])
def test_a_jump_host_may_be_behind_another(target: HostTarget, server: Server, tmp_path: Path, way: str) -> None:
    ssh = f"ssh -F none -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -i {server.identity}"
    config = tmp_path / "config"
    config.write_text(f"Host *\n  UserKnownHostsFile {tmp_path}/known_hosts\n  IdentityFile {server.identity}\n"
                      f"  Port {server.port}\nHost outer\n  HostName 127.0.0.1\n  User open\n"
                      f"Host inner\n  HostName localhost\n  User plain\n  {way.format(ssh)}\n"
                      "Host lab-a\n  HostName 127.0.0.1\n  ProxyJump inner\n")  # fmt: skip
    behind = dataclasses.replace(target, address="lab-a", ssh_config_file=str(config), ssh_options=())
    with connected(behind, ACCEPTING) as connection:
        assert connection.is_connected
        assert (connection.gateway.user, bool(connection.gateway.gateway)) == ("plain", True)


def test_a_jump_host_of_all_hosts_is_not_its_own(target: HostTarget, server: Server, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host bastion\n  HostName localhost\n  Port {server.port}\n  User open\n"
                      f"Host *\n  UserKnownHostsFile {tmp_path}/known_hosts\n  IdentityFile {server.identity}\n"
                      "  ProxyJump bastion\n")  # fmt: skip
    with connected(dataclasses.replace(target, ssh_config_file=str(config), ssh_options=()), ACCEPTING) as connection:
        assert connection.is_connected
        assert not connection.gateway.gateway


def test_a_jump_host_that_does_not_reach_the_host_is_named(
    target: HostTarget, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host *\n  UserKnownHostsFile {tmp_path}/known_hosts\n  IdentityFile {server.identity}\n"
                      f"Host bastion\n  HostName 127.0.0.1\n  Port {server.port}\n  User open\n")  # fmt: skip
    behind = dataclasses.replace(target, ssh_config_file=str(config), ssh_options=(("ProxyJump", "bastion"),))
    # A full queue: what would be the next connection is never answered, as by a host that is down.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        silent = full.getsockname()[1]
        for _ in range(3):
            stack.enter_context(waiting := socket.socket()).setblocking(False)
            waiting.connect_ex(("127.0.0.1", silent))
        monkeypatch.setattr(remote, "ACCEPTANCE_SECONDS", 1)
        for port in (9, silent):
            error = failure(dataclasses.replace(behind, port=port))
            assert error.exit_code == ExitCode.UNREACHABLE
            assert (
                error.problems[0].what
                == f"the jump host 127.0.0.1 port {server.port} can't reach 127.0.0.1 port {port}"
            )
