"""Settings that sites have in ansible.cfg and in Ansible's environment instead of in the inventory."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuprov.fleet import command, options
from gpuprov.fleet.inventory import read_inventory
from gpuprov.fleet.ssh_config import SshConfiguration, parse_ssh_arguments
from gpuprov.protocol.errors import UsageError
from tests.files import put

# Ansible reads its settings once in a process.
_READ = (
    "import json; from dataclasses import asdict; from gpuprov.fleet.inventory import read_inventory;"
    "print(json.dumps([asdict(one) for one in read_inventory(('hosts',)).hosts], default=str))"
)


def read(folder: Path, settings: str, hosts: str = "lab-a\n", **environment: str) -> Mapping[str, Any]:
    """Return the only host of an inventory, read in its folder, as JSON values."""
    (folder / "ansible.cfg").write_text(settings)
    (folder / "hosts").write_text(hosts)
    named = {**os.environ, "ANSIBLE_CONFIG": str(folder / "ansible.cfg"), **environment}
    done = subprocess.run((sys.executable, "-c", _READ), cwd=folder, env=named, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    (host,) = json.loads(done.stdout)
    return dict(host)


CFG = "[ssh_connection]\nssh_args = -C -o ControlPersist=60s -J bastion\nssh_common_args = -F ssh.cfg\n"
ARGUMENTS: list[tuple[str, str, Mapping[str, str], list[list[str]], str]] = [
    ("ansible.cfg", "lab-a", {}, [["ProxyJump", "bastion"]], "ssh.cfg"),
    ("environment", "lab-a", {"ANSIBLE_SSH_ARGS": "-J env"}, [["ProxyJump", "env"]], "ssh.cfg"),
    ("extra", "lab-a", {"ANSIBLE_SSH_EXTRA_ARGS": "-l me"}, [["ProxyJump", "bastion"], ["User", "me"]], "ssh.cfg"),
    ("inventory", "lab-a ansible_ssh_args='-J own'", {"ANSIBLE_SSH_ARGS": "-J env"}, [["ProxyJump", "own"]], "ssh.cfg"),
    ("nothing of the inventory", "lab-a ansible_ssh_common_args=''", {"ANSIBLE_SSH_ARGS": ""}, [], ""),
]  # fmt: skip


@pytest.mark.parametrize(("hosts", "environment", "options", "file"), [one[1:] for one in ARGUMENTS],
                         ids=[one[0] for one in ARGUMENTS])  # fmt: skip
def test_ssh_arguments_come_from_where_ansible_takes_them(
    tmp_path: Path, hosts: str, environment: Mapping[str, str], options: list[list[str]], file: str
) -> None:
    host = read(tmp_path, CFG, f"{hosts}\n", **environment)
    assert (host["ssh_options"], host["ssh_config_file"]) == (options, file)


def test_settings_of_the_connection_hold_unless_the_inventory_has_its_own(tmp_path: Path) -> None:
    text = "[defaults]\nremote_port=2200\nremote_user=ops\nprivate_key_file=/key\ninterpreter_python=/opt/python3\n"
    host, own = (read(tmp_path, text, f"lab-a {more}\n") for more in ("", "ansible_port=22 ansible_user=me"))
    assert [host[one] for one in ("port", "user", "identity_file", "python")] == [2200, "ops", "/key", "/opt/python3"]
    assert (own["port"], own["user"]) == (22, "me")


@pytest.mark.parametrize(("settings", "hosts", "options"), [
    ("[defaults]\nhost_key_checking=False\n", "lab-a", [["StrictHostKeyChecking", "no"]]),
    ("[defaults]\nhost_key_checking=True\n", "lab-a", []),
    ("[ssh_connection]\nhost_key_checking=False\n", "lab-a ansible_host_key_checking=true", []),
    ("", "lab-a ansible_ssh_host_key_checking=false", [["StrictHostKeyChecking", "no"]]),
])  # fmt: skip
def test_ansible_host_key_checking(tmp_path: Path, settings: str, hosts: str, options: list[list[str]]) -> None:
    assert read(tmp_path, settings, f"{hosts}\n")["ssh_options"] == options


def test_arguments_that_are_wrong_are_not_shown_with_a_password() -> None:
    with pytest.raises(UsageError, match="No closing quotation") as caught:
        parse_ssh_arguments("-o ProxyCommand='sshpass -p hunter2 ssh")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(UsageError, match="ssh refuses its configuration") as caught:
        options = (("ProxyCommand", "sshpass -p hunter2 ssh"), ("StrictHostKeyChecking", "odd"))
        SshConfiguration("a.example", options, "none").lookup("a.example")
    assert "hunter2" not in str(caught.value) and "-oStrictHostKeyChecking=odd" in str(caught.value)


def test_vault_ids_open_what_they_closed(tmp_path: Path) -> None:
    def closed(label: str, text: str) -> str:
        words = (Path(sys.executable).with_name("ansible-vault"), "encrypt_string", "--encrypt-vault-id", label)
        done = subprocess.run(
            (*words, "--vault-id", f"{label}@{label}", text), cwd=tmp_path, capture_output=True, check=True
        )
        return done.stdout.decode()

    (tmp_path / "dev").write_text("open sesame\n")
    put(tmp_path / "prod", "#!/bin/sh\necho 'open barley'\n", 0o700)
    variables = f"ansible_become_password: {closed('dev', 'hunter2')}\nansible_password: {closed('prod', 'hunter3')}\n"
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text(variables)
    named = "dev@dev, gone@gone, prompted@prompt, prod@prod"
    for settings, environment in (
        (f"[defaults]\nvault_identity_list = {named}\n", {}),
        ("", {"ANSIBLE_VAULT_IDENTITY_LIST": named}),
        ("[defaults]\nvault_identity_list = dev@dev\nvault_password_file = prod\n", {}),
    ):  # fmt: skip
        host = read(tmp_path, settings, **environment)
        assert (host["become_password"], host["password"]) == ("hunter2", "hunter3")
    (tmp_path / "ansible.cfg").write_text("")
    refused = subprocess.run(
        (sys.executable, "-m", "gpuprov", "facts", "--hosts", "hosts"), cwd=tmp_path, capture_output=True, check=False,
        env={**os.environ, "ANSIBLE_VAULT_IDENTITY_LIST": "dev@dev"},
    )  # fmt: skip
    assert b"next: the vault password is wrong" in refused.stderr, refused.stderr


def completed(folder: Path, words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Return what `gpuprov` with these options makes of the only host: its two passwords, one a line."""
    code = (
        "import sys, click; from gpuprov.fleet import command, options\n"
        "@click.command()\n@options.options_of('facts')\ndef facts(**given):\n"
        "    (host,) = command.inventory_of(options.made_options('facts', given)).hosts\n"
        "    print(host.password, host.become_password, sep=chr(10))\n"
        "try:\n    facts()\nexcept Exception as error:\n    sys.exit(str(error))\n"
    )
    return subprocess.run(
        (sys.executable, "-c", code, "--hosts", "hosts", *words.split()), cwd=folder, capture_output=True, check=False,
        text=True, input="typed\n", env={**os.environ, "ANSIBLE_CONFIG": str(folder / "ansible.cfg"), **environment},
        start_new_session=True,
    )  # fmt: skip


def test_password_files_are_read_as_ansible_reads_them(tmp_path: Path) -> None:
    put(tmp_path / "become", "#!/bin/sh\necho 'of the script'\n", 0o700)
    put(tmp_path / "login", "of the file\n", 0o600)
    put(tmp_path / "refusing", "#!/bin/sh\necho 'locked' >&2\nexit 3\n", 0o700)
    put(tmp_path / "hosts", "lab-a\n", 0o600)
    put(tmp_path / "ansible.cfg", "[defaults]\nbecome_password_file=become\nconnection_password_file=login\n", 0o600)
    assert completed(tmp_path, "").stdout.splitlines() == ["of the file", "of the script"]
    assert completed(tmp_path, "-k").stdout.splitlines()[-2:] == ["typed", "of the script"]
    named = {"ANSIBLE_BECOME_PASSWORD_FILE": str(tmp_path / "login")}
    assert completed(tmp_path, "", **named).stdout.splitlines()[1] == "of the file"
    put(tmp_path / "hosts", "lab-a ansible_password=own ansible_become_password=own\n", 0o600)
    assert completed(tmp_path, "", ANSIBLE_BECOME_PASSWORD_FILE="/none").stdout.splitlines() == ["own", "own"]
    put(tmp_path / "hosts", "lab-a\n", 0o600)
    for file, seen in ((tmp_path / "refusing", "exit status 3"), (Path("/none"), "/none: [Errno 2]")):
        error = completed(tmp_path, "", ANSIBLE_BECOME_PASSWORD_FILE=str(file)).stderr
        assert "become_password_file of Ansible's settings" in error and seen in error and "next: " in error, error


@pytest.mark.parametrize(("terminal", "passwords"), [(True, ("of -k", "of -K")), (False, ("", ""))])
def test_passwords_that_ansible_cfg_has_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool,
    passwords: tuple[str, str],
) -> None:  # fmt: skip
    put(tmp_path / "hosts", "lab-a\nlab-b\n", 0o600)
    typed = {"SSH password": ["of -k"], "sudo password": ["of -K"]}
    command.ansible_password.cache_clear()
    monkeypatch.setattr(command, "configured", lambda name: "True" if name.endswith("ASK_PASS") else "")
    monkeypatch.setattr(options, "has_terminal", lambda: terminal)
    monkeypatch.setattr(options, "asked", lambda what, wanted: typed[what].pop())
    hosts = command.inventory_of(options.Options("facts", hosts=(str(tmp_path / "hosts"),))).hosts
    assert [(host.password, host.become_password) for host in hosts] == [passwords] * 2
    assert ("become_ask_pass of Ansible's settings: no terminal" in capsys.readouterr().err) != terminal
    command.ansible_password.cache_clear()


@pytest.mark.parametrize(("hosts", "warns"), [
    ("ansible_become_flags='-H -S -n'", False), ("ansible_become_flags=-i", True), ("ansible_sudo_flags=-i", True),
    ("ansible_ssh_executable=/usr/bin/ssh", False), ("ansible_ssh_executable=plink", True),
    ("ansible_private_key=text", True), ("ansible_ssh_pkcs11_provider=/lib/opensc.so", True),
])  # fmt: skip
def test_settings_without_effect_are_named(tmp_path: Path, hosts: str, warns: bool) -> None:
    put(tmp_path / "hosts", f"lab-a {hosts}\n")
    found = read_inventory((str(tmp_path / "hosts"),)).warnings
    assert [" has no effect here: " in one for one in found] == [True] * warns, found


def test_a_user_that_ssh_takes_from_a_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As OpenSSH 10.6 does.
    refusing = "#!/bin/sh\necho remote username contains invalid characters >&2\nexit 255\n"
    put(tmp_path / "ssh", refusing, 0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UsageError) as caught:
        SshConfiguration("lab-a", (("User", r"CORP\bob"),), "none").lookup("lab-a")
    assert "take out ansible_user, and name the user in ~/.ssh/config" in caught.value.problems[0].next_step


def test_the_keys_that_newer_ssh_tries_by_default_are_nobodys_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As OpenSSH 10.6 prints them.
    kinds = ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk", "mldsa44_ed25519")
    printed = "".join(f"echo 'identityfile ~/.ssh/id_{kind}'\n" for kind in kinds)
    put(tmp_path / "ssh", f"#!/bin/sh\n{printed}", 0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "identityfile" not in SshConfiguration("lab-b", (), "none").lookup("lab-b")


def test_the_environments_sudo_password_and_sudo_of_its_own(tmp_path: Path) -> None:
    put(tmp_path / "hosts", "lab-a\n")
    put(tmp_path / "ansible.cfg", "")
    assert completed(tmp_path, "", ANSIBLE_BECOME_PASS="own").stdout.splitlines() == ["", "own"]
    assert "not by ansible_become_exe" in completed(tmp_path, "", ANSIBLE_BECOME_EXE="/opt/doas").stderr
    assert completed(tmp_path, "-e ansible_user=root", ANSIBLE_BECOME_EXE="/opt/doas").returncode == 0


@pytest.mark.parametrize("sudo", ["sudo", "sudo.ws", "/usr/bin/sudo.ws", "sudo-rs", "/opt/sudo/bin/sudo"])
def test_a_sudo_of_another_name_is_used(tmp_path: Path, sudo: str) -> None:
    assert read(tmp_path, f"[privilege_escalation]\nbecome_exe = {sudo}\n")["sudo"] == sudo


@pytest.mark.parametrize("sudo", ["doas", "sudo su -", "bin/sudo", "/usr/bin/sudo;id", "sudo.sh"])
def test_what_is_no_sudo_is_refused(tmp_path: Path, sudo: str) -> None:
    put(tmp_path / "hosts", "lab-a\n")
    put(tmp_path / "ansible.cfg", "")
    assert "not by ansible_become_exe" in completed(tmp_path, "", ANSIBLE_BECOME_EXE=sudo).stderr


@pytest.mark.parametrize(("hosts", "refused"), [
    ("lab-a", True), ("lab-a ansible_user=root", False), ("lab-a ansible_become=false", False),
    ("lab-a ansible_become_method=ansible.builtin.sudo", False),
])  # fmt: skip
def test_another_become_method_of_ansible_cfg(tmp_path: Path, hosts: str, refused: bool) -> None:
    put(tmp_path / "hosts", f"{hosts}\n", 0o600)
    put(tmp_path / "ansible.cfg", "[privilege_escalation]\nbecome_method = doas\nbecome_user = ops\n", 0o600)
    error = completed(tmp_path, "").stderr
    assert ("becomes root by sudo" in error) == refused, error
    assert ("'doas'" in error and "-e ansible_become_method=sudo" in error) == refused, error


def test_an_ansible_that_this_python_can_not_load_is_named(tmp_path: Path) -> None:
    put(tmp_path / "hosts", "lab-a\n")
    # As ansible-core 2.21 under Python 3.15.
    put(tmp_path / "ansible/__init__.py", "import dataclasses\ndataclasses.is_type\n")
    error = completed(tmp_path, "", PYTHONPATH=str(tmp_path)).stderr
    assert "ansible-core does not start with this Python" in error
    assert "AttributeError: module 'dataclasses' has no attribute" in error


FAILING = [
    (
        "aws_ec2.yml", "plugin: amazon.aws.aws_ec2\n", "specifies unknown plugin 'amazon.aws.aws_ec2'",
        "ansible-galaxy collection install amazon.aws",
    ),
    ("gen.yml", "plugin: ansible.builtin.generator\n", "'layers'", "ansible-inventory -i"),
    ("cloud", "#!/bin/sh\necho 'not logged in' >&2\nexit 3\n", "exit code 3.\n        not logged in\n", "ansible-inv"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "seen", "step"), FAILING, ids=[one[0] for one in FAILING])
def test_why_a_dynamic_inventory_fails_is_told(tmp_path: Path, name: str, text: str, seen: str, step: str) -> None:
    put(tmp_path / name, text, 0o700 if text.startswith("#!") else 0o600)
    with pytest.raises(UsageError) as caught:
        read_inventory((str(tmp_path / name),))
    assert seen in f"{caught.value}\n" and step in str(caught.value), caught.value


def test_a_warning_about_many_hosts_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gpu[01:40]\nlab-a\n[all:vars]\nansible_ssh_args='-o Odd=1 -o Other=2'\n")
    assert read_inventory((str(tmp_path / "hosts"),)).warnings == tuple(
        f"gpu[01:40], lab-a: the SSH option {one} has no effect here" for one in ("Odd", "Other")
    )


def test_arguments_for_ssh_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("all: {hosts: {a: {ansible_ssh_extra_args: [-J, x]}}}\n")
    with pytest.raises(UsageError, match="'var: ansible_ssh_extra_args' has an invalid value"):
        read_inventory((str(tmp_path / "hosts.yml"),))


def test_templates_may_name_variables_of_other_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(
        "[bastion]\njump ansible_host=10.0.0.1\n[gpu]\nlab-a\n[gpu:vars]\n"
        "ansible_ssh_common_args='-J {{ hostvars[groups.bastion[0]].ansible_host }}'\n"
        "gpuprov_proxy='http://{{ hostvars.jump.inventory_hostname }}:3128'\n"
    )
    (host,) = read_inventory((str(tmp_path / "hosts"),), limit="gpu").hosts
    assert (host.ssh_options, host.spec.proxy) == ((("ProxyJump", "10.0.0.1"),), "http://jump:3128")
