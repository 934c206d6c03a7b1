"""What people write for ssh(1): arguments, configuration files, and what a host answers first."""

import os
import pwd
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabric import Connection
from paramiko.config import SSHConfigDict

from gpuprov.agent.probe import (
    PROBE,
    Probe,
    Python,
    account_problem,
    bootstrap_input,
    bootstrap_script,
    parse_probe,
    probe_command,
    probe_problem,
    python_problem,
    sudo_problem,
)
from gpuprov.core.commands import SYSTEM_PATH, Completed
from gpuprov.core.system import System
from gpuprov.fleet.agent_run import RemoteSystem
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import SshSettings
from gpuprov.fleet.ssh import connected, explained
from gpuprov.fleet.ssh_config import SshArguments, parse_ssh_arguments
from gpuprov.machine.machine import gather_os
from gpuprov.packages.dpkg import HOOKS
from gpuprov.protocol.errors import GpuprovError, UsageError
from gpuprov.protocol.spec import HostSpec
from tests.files import put

ARGUMENTS = [
    ("", SshArguments()),
    ("-o UserKnownHostsFile=/k", SshArguments((("UserKnownHostsFile", "/k"),))),
    ("-oUserKnownHostsFile=/k", SshArguments((("UserKnownHostsFile", "/k"),))),
    ("-o 'UserKnownHostsFile /k1 /k2'", SshArguments((("UserKnownHostsFile", "/k1 /k2"),))),
    ("-o userknownhostsfile=/k", SshArguments((("UserKnownHostsFile", "/k"),))),
    ("-o StrictHostKeyChecking=no", SshArguments((("StrictHostKeyChecking", "no"),))),
    ("-o ProxyCommand='ssh -W %h:%p b'", SshArguments((("ProxyCommand", "ssh -W %h:%p b"),))),
    ("-J a,b -i ~/k -p 22 -l me", SshArguments(
        (("ProxyJump", "a,b"), ("IdentityFile", "~/k"), ("Port", "22"), ("User", "me")))),
    ("-F /c -Jx", SshArguments((("ProxyJump", "x"),), "/c")),
    ("-o ControlMaster=auto -o ControlPersist=60s -C -4", SshArguments()),
    ("-o Ciphers=x", SshArguments(warnings=("the SSH option Ciphers has no effect here",))),
    ("-L 1:b:2", SshArguments(warnings=(
        "the SSH argument -L has no effect here", "the SSH argument 1:b:2 has no effect here"))),
    ("-l 'a\n  ProxyCommand x'", SshArguments(warnings=("the SSH argument -l has no effect here",))),
    ("-o 'User=a\n  ProxyCommand x'", SshArguments(warnings=("the SSH option User has no effect here",))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), ARGUMENTS, ids=[text for text, _ in ARGUMENTS])
def test_ssh_arguments(text: str, expected: SshArguments) -> None:
    assert parse_ssh_arguments(text) == expected


def lookup(host: str, text: str = "", *options: tuple[str, str], **fields: Any) -> SSHConfigDict:
    with tempfile.NamedTemporaryFile("w") as config:
        config.write(text)
        config.flush()
        target = HostTarget(
            "lab-a", HostSpec(), "a.example", ssh_options=options, ssh_config_file=config.name, **fields
        )
        return target.ssh_configuration.lookup(host)


def probed(text: str) -> Probe:
    probe = parse_probe(text)
    assert probe is not None
    return probe


CONFIG = """
User ops
Host gateway
  HostName 10.0.0.1
  IdentityFile ~/.ssh/key-%h
Match originalhost a.example user robot
  ProxyJump robots,ops@[fe80::1%eth0]:2222
Host *
  Port 2222
  ProxyCommand nc %h %p
"""


def test_options_of_the_inventory_come_first_and_bind_this_host_alone() -> None:
    options = (("Port", "22"), ("ProxyJump", "gateway"), ("StrictHostKeyChecking", "no"))
    here, gateway = (lookup(host, CONFIG, *options) for host in ("a.example", "gateway"))
    assert (here["port"], here["user"], here["proxyjump"]) == ("22", "ops", "gateway")
    assert here["stricthostkeychecking"] == "false"
    assert (gateway["port"], gateway["hostname"], "proxyjump" in gateway) == ("2222", "10.0.0.1", False)


def test_ssh_evaluates_match_and_gpuprov_the_rest_of_the_placeholders() -> None:
    assert lookup("a.example", CONFIG, user="robot")["proxyjump"] == "robots,ops@[fe80::1%eth0]:2222"
    assert lookup("a.example", CONFIG)["proxycommand"] == "nc a.example 2222"
    assert lookup("gateway", CONFIG)["identityfile"] == [f"{pwd.getpwuid(os.getuid()).pw_dir}/.ssh/key-10.0.0.1"]


@pytest.mark.parametrize("address", ["::1", "fe80::1%hsi0", "2001:db8::7"])
def test_addresses_of_ipv6_stay_as_they_are(address: str) -> None:
    assert lookup(address)["hostname"] == address


def test_include_in_a_host_section_is_for_that_host(tmp_path: Path) -> None:
    (tmp_path / "1.conf").write_text("User one\nHost other\n  User other\n")
    text = f"Host a.example\n  Include {tmp_path}/*.conf {tmp_path}/missing\nHost *\n  User two\n"
    assert [lookup(host, text)["user"] for host in ("a.example", "other")] == ["one", "two"]


def test_defaults_of_ssh_are_not_taken_for_what_somebody_configured() -> None:
    found = lookup("a.example")
    assert found["hostname"] == "a.example"
    assert {"identityfile", "userknownhostsfile", "proxyjump", "proxycommand", "hostkeyalias"}.isdisjoint(found)
    assert lookup("a.example", "IdentityFile ~/.ssh/id_rsa")["identityfile"]


def test_none_is_no_file() -> None:
    found = lookup("a.example", "UserKnownHostsFile none\nIdentityFile none\nIdentityFile /key\n")
    assert (found["userknownhostsfile"], found["identityfile"]) == ("/dev/null", ["/key"])
    assert "identityfile" not in lookup("a.example", "IdentityFile none\n")


def connection_to(target: HostTarget) -> Connection:
    """Return the connection that would be opened."""
    found: list[Connection] = []

    def stop(connection: Connection) -> None:
        found.append(connection)
        raise InterruptedError

    with pytest.raises(InterruptedError), connected(target, SshSettings(), stop):
        pass
    return found[0]


def test_a_configuration_of_fabric_is_not_for_gpuprov(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".fabric.yml").write_text("forward_agent: true\nport: 2222\nconnect_kwargs: {password: other}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    made = connection_to(HostTarget("h", HostSpec(), "192.0.2.1"))
    assert (made.forward_agent, made.port, "password" in made.connect_kwargs) == (False, 22, False)


def test_a_shell_runs_the_proxy_command_as_with_ssh() -> None:
    options = (("ProxyCommand", "echo '%h a' 2>/dev/null | tr a b"),)
    made = connection_to(HostTarget("h", HostSpec(), "192.0.2.1", ssh_options=options))
    with made.open_gateway().process as process:
        assert process.communicate()[0] == b"192.0.2.1 b\n"


def test_no_shell_reads_the_name_of_a_user(tmp_path: Path) -> None:
    put(tmp_path / "config", 'Host *\n  ProxyCommand echo %r\n  User "CORP\\\\alice"\n')
    made = connection_to(HostTarget("h", HostSpec(), "192.0.2.1", ssh_config_file=str(tmp_path / "config")))
    assert made.gateway == r"echo CORP\alice"


def test_a_jump_host_that_all_hosts_have_is_not_behind_itself(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host *\n  ProxyJump ops@bastion:2222\n")
    made = connection_to(HostTarget("g", HostSpec(), "g", ssh_config_file=str(tmp_path / "config")))
    assert (made.gateway.host, made.gateway.port, made.gateway.gateway) == ("bastion", 2222, False)


def test_jump_hosts_that_name_each_other_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host a g\n  ProxyJump b:2222\nHost b\n  ProxyJump a\n")
    target = HostTarget("g", HostSpec(), "g", ssh_config_file=str(tmp_path / "config"))
    with pytest.raises(GpuprovError, match="name each other") as caught, connected(target, SshSettings()):
        pass
    assert caught.value.problems[0].evidence == "g → b → a → b"


def shown(target: HostTarget) -> list[str]:
    """Return the words of the command that shows why a connection to this host ended."""
    with pytest.raises(GpuprovError) as caught, explained(target, connection_to(target), SshSettings()):
        raise EOFError("the connection ended")
    return shlex.split(caught.value.problems[0].next_step)


def test_the_command_that_shows_why_can_be_typed(tmp_path: Path) -> None:
    target = HostTarget("h", HostSpec(), "192.0.2.1", user="first last", port=2222)
    assert shown(target) == ["try:", "ssh", "-v", "-p", "2222", "first last@192.0.2.1"]
    # It has the name that the configuration knows.
    (tmp_path / "config").write_text("Host gpu1\n  HostName 192.0.2.1\n")
    named = HostTarget("gpu1", HostSpec(), "gpu1", user="alice", ssh_config_file=str(tmp_path / "config"))
    assert shown(named) == ["try:", "ssh", "-v", "alice@gpu1"]


def test_names_and_keys_may_have_blanks() -> None:
    found = lookup("a.example", "", ("IdentityFile", "/a key"), user="first last")
    assert (found["user"], found["identityfile"]) == ("first last", ["/a key"])


def test_keys_are_in_the_home_directory_that_ssh_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert lookup("a.example", "IdentityFile ~/.ssh/gpu\n")["identityfile"] == [f"{home}/.ssh/gpu"]


def test_without_ssh_the_options_of_the_inventory_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    target = HostTarget("lab-a", HostSpec(), "a.example", port=2222, ssh_options=(("HostName", "10.0.0.1"),))
    found = target.ssh_configuration.lookup("a.example")
    assert (found["hostname"], found["port"], "user" in found) == ("10.0.0.1", "2222", False)


def test_without_ssh_a_configuration_is_not_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="install the OpenSSH client"):
        lookup("a.example", "ProxyJump bastion\n")


@pytest.mark.parametrize("host", ["-oProxyCommand=touch${IFS}/x", "a.example"])
def test_what_ssh_refuses_is_a_wrong_call(host: str) -> None:
    with pytest.raises(UsageError, match="ssh refuses its configuration") as caught:
        lookup(host, "" if host[0] == "-" else "Unheard of\n")
    assert ("invalid characters" if host[0] == "-" else "line 1: Bad configuration") in str(caught.value)


# -- the first round trip --------------------------------------------------------------------------------------------


def test_probe_of_this_machine_is_read() -> None:
    done = subprocess.run(
        shlex.split(probe_command("0" * 64, "")), input=PROBE, capture_output=True, text=True, check=True, timeout=300
    )  # fmt: skip
    probe = probed(f"Welcome to the machine!\n{done.stdout}")
    assert probe.system.startswith("Linux ")
    assert probe.python is not None
    assert probe.agent_digest == ""
    assert probe.os_release[0] == gather_os(System()).id


@pytest.mark.root
def test_probe_names_the_packages_of_a_python_that_is_gone(tmp_path: Path) -> None:
    for tool in ("uname", "id", "sha256sum", "cut", "sed", "grep", "head", "dpkg", "dpkg-query"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    done = subprocess.run(
        ("/bin/sh", "-s", "0" * 64, "sudo", "python3"), input=PROBE, capture_output=True, text=True, check=True,
        timeout=300, env={"PATH": str(tmp_path), "HOME": "/root"},
    )  # fmt: skip
    probe = probed(done.stdout)
    assert (probe.python, probe.owners) == (None, ("python3-minimal",))


@pytest.mark.root
def test_probe_finds_no_python_by_the_path_of_a_user_who_is_not_root() -> None:
    # Not pytest's own folder, which only root may enter.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        theirs = put(Path(folder, "python3"), '#!/bin/sh\nexec /usr/bin/python3 "$@"\n', 0o755)
        for user, expected in ((0, {str(theirs)}), (65534, {f"{one}/python3" for one in SYSTEM_PATH.split(":")})):
            done = subprocess.run(
                ("sh", "-s", "0" * 64, "sudo", "python3"), input=PROBE, capture_output=True, text=True, check=True,
                timeout=300, user=user, group=user, env={"PATH": f"{folder}:/usr/bin:/bin", "HOME": "/nonexistent"},
            )  # fmt: skip
            probe = probed(done.stdout)
            assert probe.uid == user
            assert probe.python is not None and probe.python.path in expected


ANSWER = (
    "gpuprov-probe 1\nsystem Linux x86_64\nuid 1000\ncache /home/a b/.cache/gpuprov\nagent \n"
    "os debian|12|bookworm||Debian GNU/Linux 12 (bookworm)||\n{}\nend\n"
)
ANSWERS = [
    ("too old, then new enough", "python 3.6.8 /usr/bin/python3\npython 3.11.2 /opt/python3.11", "/opt/python3.11"),
    ("Python 2 alone", "python 2.7.5 /usr/bin/python", None),
    ("broken interpreter", "python 0.0.0 /usr/bin/python3", None),
    ("none", "", None),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "python"), [a[1:] for a in ANSWERS], ids=[a[0] for a in ANSWERS])
def test_interpreter_is_chosen(lines: str, python: str | None) -> None:
    probe = probed(ANSWER.format(lines))
    assert probe.cache == "/home/a b/.cache/gpuprov"
    assert (probe.python.path if probe.python else None) == python
    assert (python_problem(probe, "") is None) == (python is not None)


@pytest.mark.parametrize("text", ["", "This account is not available.\n", "gpuprov-probe 1\nuid 0\n", "uid 0\nend\n"])
def test_what_is_no_answer_is_none(text: str) -> None:
    assert parse_probe(text) is None


READY = Probe("Linux x86_64", 1000, "/c", "", (Python("/p", (3, 11, 2)),), 0)
PROBLEMS = [
    ("ready", READY, True, False, ""),
    ("root", Probe("Linux x86_64", 0, "/c"), False, False, ""),
    ("not Linux", Probe("Darwin arm64", 0, "/c"), True, False, "does not run Linux"),
    ("become false", READY, False, False, "ansible_become is false"),
    ("no sudo", Probe("Linux x86_64", 1000, "/c", sudo_code=127), True, True, "there is no sudo"),
    ("password wanted", Probe("Linux x86_64", 1000, "/c", sudo_code=1), True, False, "wants a password"),
    ("password given", Probe("Linux x86_64", 1000, "/c", sudo_code=1), True, True, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("probe", "become", "has_password", "what"), [p[1:] for p in PROBLEMS], ids=[p[0] for p in PROBLEMS]
)
def test_probe_problems(probe: Probe, become: bool, has_password: bool, what: str) -> None:
    problem = probe_problem(probe, become=become, has_password=has_password)
    assert (problem is None) == (what == "")
    assert problem is None or what in problem.what


@pytest.mark.parametrize(
    ("returncode", "said", "what"),
    [
        (1, " \n", "the account's shell ends at once and runs nothing, as /bin/false does"),
        # A connection that broke, a shell that was killed, a shell that answers nothing.
        (255, "", None), (-9, "", None), (0, "", None), (127, "", None),
        (1, "Welcome!\n", None),
        (1, "This account is currently not available.", "the account may not log in: its shell is nologin"),
        (254, "Your account has expired; please contact your system administrator.", "the account has expired"),
    ],
)  # fmt: skip
def test_an_account_that_runs_nothing(returncode: int, said: str, what: str | None) -> None:
    problem = account_problem(Completed((), returncode, said, "1\n2\n3\n4\n5\n"), "ops")
    assert (problem and problem.what) == what
    assert problem is None or (" ops" in problem.next_step and "USER" not in problem.next_step)
    if problem is not None and not said.strip():
        assert problem.evidence.splitlines()[1:] == ["2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("sudo: sorry, you must have a tty to run sudo", "requires a terminal"),
        ("sh: 1: exec: sh: Permission denied", "NOEXEC"),
        ("bash: line 1: exec: sh: cannot execute: Permission denied", "NOEXEC"),
        ("sh: 1: exec: /usr/bin/python3: Permission denied", "lets no program start another one (NOEXEC)"),
        ("ops is not in the sudoers file.", "ops is not in sudoers on the host"),
        ("Sorry, user ops is not allowed to execute '/bin/sh' as root on a.", "ops may run some commands with sudo"),
        ("sudo: ops may not run sudo on a.", "may not use sudo"),
        ("sudo: I'm sorry ops. I'm afraid I can't do that", "ops may not run gpuprov with sudo on the host"),
        ("sudo: Account validation failure, is your account locked?", "expired account or password"),
        ("sudo: sudoers file not found: /etc/sudoers", "can't read its configuration"),
        ("sudo: interactive authentication is required", None),
        ("sudo: Account expired or PAM config lacks an account section", None),
        ("sudo: account validation failure, is your account locked?", "expired account or password"),
        ('sudo: The "no new privileges" flag is set', "no_new_privs"),
        ("sudo: effective uid is not 0, is sudo installed setuid root?", "not setuid root"),
        ("sudo: parse error in /etc/sudoers near line 3", "can't read its configuration"),
        ("sudo: a password is required", None),
    ],
)
def test_why_sudo_refuses(said: str, what: str | None) -> None:
    problem = sudo_problem(f"Welcome!\n  {said}{'!' * 300}\n")
    assert (problem is None) == (what is None)
    if problem is not None and what is not None:
        assert what in problem.what and problem.next_step
        assert problem.evidence == f"{said}{'!' * 300}"[:300]
        assert ("echo 'ops ALL" in problem.next_step) == ("ops" in said)


def test_a_name_in_a_command_is_a_name() -> None:
    """The host says it."""
    problem = sudo_problem("ops';reboot;' is not in the sudoers file.")
    assert problem is not None and "echo 'USER ALL" in problem.next_step
    problem = account_problem(Completed((), 1, "", ""), "$(reboot)")
    assert problem is not None and "getent passwd USER" in problem.next_step


def without_python(*os_release: str) -> Probe:
    return Probe("Linux x86_64", 0, "/c", os_release=(*os_release, *[""] * (7 - len(os_release))))


# os-release → the packages that are tried, and by whom.
BOOTSTRAPS = [
    (("ubuntu", "20.04", "focal"), "apt-get -q -y install", ["python3.9"]),
    (("ubuntu", "24.04", "noble"), "apt-get -q -y install", ["python3"]),
    (("debian", "11", "bullseye"), "apt-get -q -y install", ["python3"]),
    (("rhel", "8.10"), "dnf -q -y install", ["python3.12", "python3.11", "python39"]),
    (("rocky", "9.5"), "dnf -q -y install", ["python3"]),
    (("amzn", "2023"), "dnf -q -y install", ["python3"]),
    (("sles", "15.6"), "zypper -q -n install", ["python311"]),
    (("opensuse-leap", "15.6"), "zypper -q -n install", ["python311"]),
    (("opensuse-leap", "16.0"), "zypper -q -n install", ["python3"]),
    # A derivative is treated as its parent.
    (("linuxmint", "20.3", "una", "ubuntu debian", "Linux Mint 20.3", "focal"), "apt-get -q -y install", ["python3.9"]),
]


@pytest.mark.parametrize(("os_release", "command", "names"), BOOTSTRAPS)
def test_a_python_that_is_new_enough_is_installed(os_release: tuple[str, ...], command: str, names: list[str]) -> None:
    probe = without_python(*os_release)
    script = bootstrap_script(probe)
    assert re.findall(rf"{re.escape(command)} (\S+);", script) == names
    assert subprocess.run(("sh", "-n", "-c", script), check=False).returncode == 0
    problem = python_problem(probe, "")
    assert problem is not None
    assert problem.next_step.endswith(f"{command.partition(' ')[0]} install -y {names[0]}")


@pytest.mark.parametrize(
    ("lines", "what", "seen"),
    [
        ("", "there is no Python on the host", "looked for python3"),
        ("python 0.0.0 /usr/bin/python3", "the host's Python does not run", "/usr/bin/python3 does not run"),
    ],
)
def test_a_python_whose_package_is_there_is_installed_again(lines: str, what: str, seen: str) -> None:
    answer = ANSWER.format(f"{lines}\nowner python3-minimal\nowner python3.11-minimal\nowner a;b")
    probe = probed(answer)
    assert probe.owners == ("python3-minimal", "python3.11-minimal")
    probe = replace(probe, os_release=("debian", "12", "bookworm", "", "", "", ""))
    problem = python_problem(probe, "")
    assert problem is not None and problem.what == what and seen in problem.evidence
    assert problem.next_step.endswith("apt-get install -y --reinstall python3-minimal python3.11-minimal")
    first, others = bootstrap_script(probe).split(" || ", 1)
    assert "apt-get install -y --reinstall python3-minimal python3.11-minimal" in first
    assert bootstrap_script(replace(probe, owners=())).endswith(f"; done; {others}")


def with_dnf(folder: Path, body: str, script: str, given: bytes = b"") -> bytes:
    """Run a script where dnf is this program alone; return what it prints."""
    put(folder / "dnf", f"#!/bin/sh\n{body}\n", 0o755)
    argv = ("/bin/sh", "-c", script)
    return subprocess.run(argv, env={"PATH": str(folder)}, input=given, stdout=subprocess.PIPE, check=True).stdout


def test_of_several_packages_the_first_that_a_repository_has_is_enough(tmp_path: Path) -> None:
    script = bootstrap_script(without_python("almalinux", "8.8"))
    printed = with_dnf(tmp_path, 'echo "$@"\ncase "$*" in *python3.11) exit 0;; esac\nexit 1', script)
    assert printed.splitlines() == [b"-q -y install python3.12", b"-q -y install python3.11"]


@pytest.mark.parametrize(
    ("os_release", "what", "next_step"),
    [
        (
            ("centos", "7", "", "rhel fedora", "CentOS Linux 7 (Core)"),
            "its updates ended on 30 June 2024",
            "Rocky Linux",
        ),
        (("amzn", "2", "", "centos rhel fedora", "Amazon Linux 2"), "its updates ended on 30 June 2026", "2023"),
        (("arch", "", "", "", "Arch Linux"), "Arch Linux is not supported", "supported are: Debian 11"),
        ((), "this system is not supported", "supported are: Debian 11"),
    ],
)
def test_refused_host_gets_no_python(os_release: tuple[str, ...], what: str, next_step: str) -> None:
    probe = without_python(*os_release)
    with pytest.raises(GpuprovError) as caught:
        bootstrap_script(probe)
    problem = python_problem(probe, "")
    assert problem == caught.value.problems[0]
    assert what in problem.what and next_step in problem.next_step


def test_the_package_manager_that_installs_python_gets_the_proxy_by_standard_input(tmp_path: Path) -> None:
    script = bootstrap_script(without_python("rocky", "9.5"))
    given = bootstrap_input({"proxy": "http://robot:p%24s%22@proxy:3128", "no_proxy": "localhost,.example.org"})
    assert "robot" not in script
    printed = with_dnf(tmp_path, 'echo "$https_proxy $no_proxy"', script, given)
    assert printed == b"http://robot:p%24s%22@proxy:3128 localhost,.example.org\n"
    # Without a proxy: what keeps apt's hooks from restarting services.
    assert bootstrap_input({}).decode() == "".join(f"{name}={value}\n" for name, value in HOOKS.items()) + "\n"


class Greeting(RemoteSystem):
    """A host whose login shell prints before each command, the last line without its end."""

    def __init__(self) -> None:
        System.__init__(self)

    def as_root(
        self, command: tuple[str, ...], stdin: Iterable[bytes], on_line: Callable[[str], None], **more: Any
    ) -> Completed:
        done = subprocess.run(command, input=b"".join(stdin), capture_output=True, check=False)
        for line in f"welcome\nto gpu01: {done.stdout.decode()}".splitlines():
            on_line(line)
        return Completed(command, done.returncode)


def test_what_a_login_shell_prints_is_no_part_of_a_file(tmp_path: Path) -> None:
    host = Greeting()
    told: list[str] = []
    (tmp_path / "record").write_text('{"a": 1}\n')
    assert host.read_bytes(f"{tmp_path}/record") == b'{"a": 1}\n'
    assert host.list_directory(str(tmp_path)) == ("record",)
    assert host.which("sh") == shutil.which("sh", path=SYSTEM_PATH)
    assert (host.read_bytes(f"{tmp_path}/none"), host.which("no-such-program")) == (None, None)
    assert host.run(("cat",), stdin=b"a\nb", on_line=told.append).stdout == "a\nb\n"
    assert told == ["a", "b"]
