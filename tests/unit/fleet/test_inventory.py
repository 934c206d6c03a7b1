"""Inventories in the forms that people keep them in, and the mistakes that they make."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader

from gpuprov.agent.playbook_task import task_request
from gpuprov.fleet import options
from gpuprov.fleet.ansible_reader import find_variable
from gpuprov.fleet.inventory import HostTarget, ansible_extra_vars, plain_extra_vars, read_extra_vars, read_inventory
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.spec import spec_to_json
from tests.files import put

DRIVER = "gpuprov_driver_version=550.163.01"


def written(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        put(folder / name, text)
    return folder


def read(
    folder: Path, files: Mapping[str, str], source: str = "hosts", limit: str = "", extra: Sequence[str] = ()
) -> dict[str, HostTarget]:
    written(folder, files)
    found = read_inventory((str(folder / source),), limit=limit, extra_vars=extra)
    return {target.name: target for target in found.hosts}


def error_of(folder: Path, files: Mapping[str, str], source: str = "hosts", limit: str = "") -> GpuprovError:
    with pytest.raises(UsageError) as caught:
        read(folder, files, source, limit)
    return caught.value


FORMS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ini": ("hosts", {"hosts": f"[gpu]\nlab-a ansible_port=2222\nlab-b\n[gpu:vars]\nansible_user=ops\n{DRIVER}\n"}),
    "ini with a range": (
        "hosts",
        {
            "hosts": f"[gpu]\nlab-[a:b]\n[gpu:vars]\nansible_user=ops\n{DRIVER}\n",
            "host_vars/lab-a": "ansible_port: 2222\n",
        },
    ),
    "yaml": (
        "hosts.yml",
        {
            "hosts.yml": "gpu:\n  hosts:\n    lab-a: {ansible_port: 2222}\n    lab-b:\n  vars:\n    ansible_user: ops\n"
            "    gpuprov_driver_version: 550.163.01\n"
        },
    ),
    "directory with group_vars and host_vars": (
        "site",
        {
            "site/hosts.ini": "[gpu]\nlab-a\nlab-b\n",
            "site/group_vars/gpu/driver.yml": "gpuprov_driver_version: 550.163.01\n",
            "site/group_vars/all.yml": "ansible_user: ops\n",
            "site/host_vars/lab-a.yml": "ansible_port: 2222\n",
        },
    ),
    "group within a group": (
        "hosts",
        {
            "hosts": "[old]\nlab-a ansible_port=2222\n[gpu:children]\nold\nnew\n[new]\nlab-b\n"
            f"[all:vars]\nansible_user=ops\n{DRIVER}\n"
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_inventory_gives_the_same_hosts(tmp_path: Path, form: str) -> None:
    source, files = FORMS[form]
    hosts = read(tmp_path, files, source)
    assert sorted(hosts) == ["lab-a", "lab-b"]
    assert [hosts[name].port for name in ("lab-a", "lab-b")] == [2222, None]
    assert {host.user for host in hosts.values()} == {"ops"}
    assert {host.spec.driver_version for host in hosts.values()} == {"550.163.01"}


COMMA_LISTS = {
    "lab-a,10.0.0.2,": ["lab-a", "10.0.0.2"],
    "gpu[01:03].example.org,lab-a": [*(f"gpu0{number}.example.org" for number in (1, 2, 3)), "lab-a"],
    "gpu[1:2],": ["gpu1", "gpu2"],
    "one,": ["one"],
}


@pytest.mark.parametrize("text", COMMA_LISTS)
def test_comma_list_is_an_inventory(text: str) -> None:
    assert [host.name for host in read_inventory((text,)).hosts] == COMMA_LISTS[text]


def test_several_inventories_are_read_as_one(tmp_path: Path) -> None:
    written(tmp_path, {"one": "lab-a\n", "two": "lab-b\n"})
    assert len(read_inventory((str(tmp_path / "one"), str(tmp_path / "two"))).hosts) == 2


ALL = {"hosts": "[gpu]\nlab-[a:c]\n[web]\nweb-1\n"}
LIMITS = [
    ("lab-a", ["lab-a"]),
    ("gpu", ["lab-a", "lab-b", "lab-c"]),
    ("gpu:!lab-b", ["lab-a", "lab-c"]),
    ("lab-a,web", ["lab-a", "web-1"]),
    ("~(lab-b|web.*)", ["lab-b", "web-1"]),
    ("gpu[0]", ["lab-a"]),
    ("lab-*", ["lab-a", "lab-b", "lab-c"]),
]


@pytest.mark.parametrize(("limit", "expected"), LIMITS, ids=[limit for limit, _ in LIMITS])
def test_limit_means_what_it_means_to_ansible(tmp_path: Path, limit: str, expected: list[str]) -> None:
    assert sorted(read(tmp_path, ALL, limit=limit)) == expected


def test_limit_with_a_name_that_nothing_matches(tmp_path: Path) -> None:
    written(tmp_path, ALL)
    found = read_inventory((str(tmp_path / "hosts"),), limit="lab-a,lab-z")
    assert [host.name for host in found.hosts] == ["lab-a"]
    assert any("lab-z" in warning for warning in found.warnings)
    assert "--limit nothing matches no host" in str(error_of(tmp_path, ALL, limit="nothing"))
    assert "next: correct --limit: there is no file retry" in str(error_of(tmp_path, ALL, limit="@retry"))


EXTRA = [
    ("key=value", ["gpuprov_toolkit=nvidia"]),
    ("two in one", ["ansible_user=x gpuprov_toolkit=nvidia"]),
    ("JSON", ['{"gpuprov_toolkit": "nvidia", "gpuprov_packages": ["htop"]}']),
    ("YAML", ["{gpuprov_toolkit: nvidia}"]),
    ("file", ["@extra.yml"]),
    ("the last wins", ["gpuprov_toolkit=bundled", "gpuprov_toolkit=nvidia"]),
]


@pytest.mark.parametrize("extra", [extra for _, extra in EXTRA], ids=[name for name, _ in EXTRA])
def test_extra_variables_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"extra.yml": "gpuprov_toolkit: nvidia\n"})
    hosts = read(tmp_path, {"hosts": "lab-a gpuprov_toolkit=bundled\n"}, extra=extra)
    assert hosts["lab-a"].spec.toolkit == "nvidia"


def test_extra_variables_of_one_call_are_gone_in_the_next(tmp_path: Path) -> None:
    read(tmp_path, {"hosts": "lab-a\n"}, extra=["gpuprov_toolkit=nvidia"])
    assert read(tmp_path, {})["lab-a"].spec.toolkit == "bundled"


def test_extra_variables_describe_this_machine_without_an_inventory() -> None:
    here = read_extra_vars([DRIVER, "v=nvidia", "gpuprov_toolkit={{ v }}"])
    assert (here.connection, here.spec.driver_version, here.spec.toolkit) == ("local", "550.163.01", "nvidia")
    assert read_extra_vars([]).connection == "local"


def test_templates_and_connection_variables_are_resolved(tmp_path: Path) -> None:
    files = {
        "hosts": "lab-a ansible_host=10.0.0.1\n[all:vars]\nkeys={{ inventory_dir }}/keys\n"
        "ansible_ssh_private_key_file={{ keys }}/{{ inventory_hostname }}\n"
        "ansible_ssh_common_args='-o UserKnownHostsFile={{ inventory_dir }}/known -o Odd=1 -J bastion'\n"
        "ansible_ssh_extra_args='-F {{ inventory_dir }}/config -J none'\nansible_ssh_args='-p 23'\n"
        "ansible_become_pass=hunter2\nansible_ssh_pass=hunter3\nansible_python_interpreter=/opt/python3\n"
    }
    found = read_inventory((str(written(tmp_path, files) / "hosts"),))
    assert found.warnings == ("lab-a: the SSH option Odd has no effect here",)
    (host,) = found.hosts
    assert (host.address, host.identity_file) == ("10.0.0.1", f"{tmp_path}/keys/lab-a")
    jumps = [("ProxyJump", "bastion"), ("ProxyJump", "none")]  # of ssh's options the first counts
    assert [*host.ssh_options] == [("Port", "23"), ("UserKnownHostsFile", f"{tmp_path}/known"), *jumps]
    assert host.ssh_config_file == f"{tmp_path}/config"
    assert (host.become_password, host.password, host.python) == ("hunter2", "hunter3", "/opt/python3")
    assert "hunter" not in repr(host)


def test_local_connection_and_automatic_interpreter(tmp_path: Path) -> None:
    host = read(tmp_path, {"hosts": "here ansible_connection=local ansible_python_interpreter=auto_silent\n"})["here"]
    assert (host.connection, host.python) == ("local", "")


def test_vault_is_opened_with_the_password_file(tmp_path: Path) -> None:
    written(tmp_path, {"password": "open sesame\n", "group_vars/all.yml": "ansible_become_password: hunter2\n"})
    subprocess.run(
        (
            Path(sys.executable).parent / "ansible-vault", "encrypt", "--vault-password-file",
            "password", "group_vars/all.yml",
        ),
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    assert "--vault-password-file" in str(error_of(tmp_path, {"hosts": "lab-a\n"}))
    found = read_inventory((str(tmp_path / "hosts"),), vault_password_file=str(tmp_path / "password"))
    assert found.hosts[0].become_password == "hunter2"
    (tmp_path / "password").write_text("another\n")
    with pytest.raises(GpuprovError, match="the vault password is wrong"):
        read_inventory((str(tmp_path / "hosts"),), vault_password_file=str(tmp_path / "password"))


def test_a_single_vaulted_value_is_opened_too(tmp_path: Path) -> None:
    """`ansible-vault encrypt_string` makes them: of a variable, and of a part of one."""
    written(tmp_path, {"password": "open sesame\n", "hosts": "lab-a\n"})
    words = (Path(sys.executable).parent / "ansible-vault", "encrypt_string", "--vault-password-file", "password")
    text = ""
    for name, value, before in (
        ("ansible_become_password", "hunter2", ""), ("token", "eyJhbGciOiJSUzI1NiJ9", "gpuprov_vgpu:\n "),
    ):  # fmt: skip
        done = subprocess.run((*words, "--name", name, value), cwd=tmp_path, check=True, capture_output=True, text=True)
        text += before + done.stdout
    written(tmp_path, {"group_vars/all.yml": text})
    (host,) = read_inventory((str(tmp_path / "hosts"),), vault_password_file=str(tmp_path / "password")).hosts
    assert host.become_password == "hunter2"
    assert host.spec.vgpu is not None and host.spec.vgpu.token == "eyJhbGciOiJSUzI1NiJ9"
    with pytest.raises(GpuprovError, match="no vault secrets"):
        read_inventory((str(tmp_path / "hosts"),))


# -- mistakes ------------------------------------------------------------------------------------------------------


def test_unknown_variable_names_place_hosts_and_the_nearest_one(tmp_path: Path) -> None:
    files = {"hosts": "[gpu]\nlab-[a:f]\n", "group_vars/gpu.yml": "---\n# site\ngpuprov_driver_versoin: 550.163.01\n"}
    text = str(error_of(tmp_path, files))
    assert text.count("there is no variable gpuprov_driver_versoin") == 1
    assert f"{tmp_path}/group_vars/gpu.yml:3" in text
    assert "for lab-a, lab-b, lab-c and 3 more hosts" in text
    assert "did you mean gpuprov_driver_version?" in text


MISTAKES = [
    ("no such file", "nowhere", {}, "there is no inventory"),
    ("empty file", "hosts", {"hosts": ""}, "names no host"),
    ("only comments", "hosts", {"hosts": "# lab-a\n"}, "names no host"),
    ("empty directory", "site", {"site/.keep": ""}, "the inventory"),
    ("broken YAML", "hosts.yml", {"hosts.yml": "all:\n  hosts: [\n"}, "cannot read the inventory"),
    ("YAML that is no inventory", "hosts.yml", {"hosts.yml": "- lab-a\n- lab-b\n"}, "cannot read the inventory"),
    ("broken INI", "hosts", {"hosts": "[gpu\nlab-a\n"}, "cannot read the inventory"),
    ("broken group_vars", "hosts", {"hosts": "lab-a\n", "group_vars/all.yml": "a: [\n"}, "group_vars/all.yml"),
    ("undefined template", "hosts", {"hosts": "lab-a ansible_host='{{ nowhere }}'\n"}, "ansible_host does not resolve"),
    ("wrong value", "hosts", {"hosts": "lab-a gpuprov_toolkit=podman\n"}, "gpuprov_toolkit is not one of"),
    ("user in the address", "hosts", {"hosts": "lab-a ansible_host=me@10.0.0.1\n"}, "neither a name nor an address"),
    ("port in the address", "hosts", {"hosts": "lab-a ansible_host=10.0.0.1:22\n"}, "neither a name nor an address"),
    ("pattern as address", "hosts", {"hosts": "lab-a ansible_host=*\n"}, "neither a name nor an address"),
    ("keyword in user", "hosts", {"hosts": "lab-a", "host_vars/lab-a": 'ansible_user: "x\\nport 1"'}, "no name"),
    ("wrong port", "hosts", {"hosts": "lab-a ansible_port=99999\n"}, "ansible_port is not a port number"),
    ("foreign connection", "hosts", {"hosts": "lab-a ansible_connection=docker\n"}, "must be ssh or local"),
    ("foreign become", "hosts", {"hosts": "lab-a ansible_become_method=su\n"}, "-e ansible_become_method=sudo"),
    ("other user", "hosts", {"hosts": "lab-a ansible_become_user=ops\n"}, "-e ansible_become_user=root"),
    ("interpreter", "hosts", {"hosts": "lab-a ansible_python_interpreter='/bin/python; id'\n"}, "not the path of a"),
    ("open quote", "hosts", {"hosts": "lab-a ansible_ssh_common_args=\"-o 'A=1\"\n"}, "is no list of arguments"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "files", "what"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_mistake_is_told_with_exit_code_2(tmp_path: Path, source: str, files: dict[str, str], what: str) -> None:
    assert what in str(error_of(tmp_path, files, source))


@pytest.mark.parametrize(
    ("text", "seen"),
    [("#!/bin/sh\nexit 3\n", "non-zero exit code 3"), ("[gpu\nlab-a\n", "not enough")],
    ids=["ran", "INI"],
)
def test_a_program_that_fails_gives_its_own_reason(tmp_path: Path, text: str, seen: str) -> None:
    put(tmp_path / "hosts", text, 0o755)
    assert seen in error_of(tmp_path, {}, "hosts").problems[0].evidence


@pytest.mark.parametrize("name", ["a[b", "a[:]", "a[1:x]", "a[1:2:0]", "[::1]", "a[2:b]", "a[1:2"])
def test_a_range_that_is_none_is_a_mistake(name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"the range in {name} is invalid")):
        read_inventory((f"{name},",))


def test_mistakes_of_all_hosts_are_told_at_once(tmp_path: Path) -> None:
    assert len(error_of(tmp_path, {"hosts": "lab-a gpuprov_toolkit=x\nlab-b ansible_port=x\n"}).problems) == 2


@pytest.mark.parametrize("words", [("--hosts", "a,"), ("-e", "a={{ 1 }}")])
def test_a_wrong_setting_of_ansible_is_told(words: tuple[str, str]) -> None:
    argv = (sys.executable, "-m", "gpuprov", "facts", *words)
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "ANSIBLE_FORKS": "x"}, check=False)
    assert (done.returncode, "ANSIBLE_FORKS' has an invalid value" in done.stderr) == (2, True), done.stderr


def test_ansible_keeps_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    error_of(tmp_path, {"hosts.yml": "all:\n  hosts: [\n"}, "hosts.yml")
    read(tmp_path, {"hosts": "[a-b]\nlab-a\n"})
    assert capfd.readouterr() == ("", "")


def test_variable_is_found_where_it_is_set() -> None:
    text = "# gpuprov_driver: x\nother: '{{ gpuprov_driver }}'\ngpuprov_driver: x\nlab-a gpuprov_driver=x\n"
    as_json = json.dumps({"gpuprov_driver": "x"})
    assert [*find_variable("gpuprov_driver", [("a", text), ("b.json", as_json)])] == ["a:3", "a:4", "b.json:1"]


def test_a_long_list_of_hosts_does_not_hide_a_wrong_value() -> None:
    names = ",".join(f"gpu{number:03}.example.org" for number in range(40))
    with pytest.raises(UsageError, match="gpuprov_toolkit is not one of"):
        read_inventory((names,), extra_vars=("gpuprov_toolkit=x",))


def test_another_users_file_does_not_hide_a_wrong_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *words: str) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)  # root reads all files
    assert "gpuprov_toolkit is not one of" in str(error_of(tmp_path, {"hosts": "lab-a gpuprov_toolkit=x\n"}))


def test_what_sets_the_wrong_value_is_blamed(tmp_path: Path) -> None:
    files = {
        "hosts": "gpu1\ngpu2\n",
        "group_vars/all.yml": "# gpuprov_forward_to\ngpuprov_driver_version: 550.163.01\n",
        "host_vars/gpu1.yml": "gpuprov_driver_version: abc\n",
    }
    said = str(error_of(tmp_path, files))
    assert f"{tmp_path}/host_vars/gpu1.yml:1" in said
    assert "group_vars" not in said
    assert "for gpu1" in said
    with pytest.raises(UsageError) as caught:
        read(tmp_path, {}, extra=["gpuprov_driver_version=abd"])
    said = str(caught.value)
    assert "seen: " in said and "-e\n" in said
    assert "_vars/" not in said


def test_ansibles_own_warnings_are_told(tmp_path: Path) -> None:
    folder = written(tmp_path / "inventory", {"good.ini": "[rack-1]\ngpu1\n", "bad.ini": "[a b]\ngpu2\n"})
    found = read_inventory((str(folder),))
    assert [host.name for host in found.hosts] == ["gpu1"]
    assert any("Invalid section entry: '[a b]'" in warning for warning in found.warnings)
    # Ansible itself would wrap this line, in the middle of the path too.
    assert f"Unable to parse {folder}/bad.ini as an inventory source" in found.warnings
    assert read_inventory((str(EXAMPLE),)).warnings == ()


def test_a_file_of_variables_that_is_missing_is_named() -> None:
    for read in (lambda: read_inventory(("a,",), extra_vars=("@/missing.yml",)),
                 lambda: read_extra_vars(("@/missing.yml",))):  # fmt: skip
        with pytest.raises(GpuprovError) as caught:
            read()
        assert (caught.value.exit_code, caught.value.problems[0].what) == (
            ExitCode.USAGE, "there is no file /missing.yml with extra variables",
        )  # fmt: skip


def test_of_ansibles_reasons_the_one_that_fits_the_file_is_told(tmp_path: Path) -> None:
    (problem,) = error_of(tmp_path, {"hosts.yml": "all:\n  hosts:\n\ta:\n"}, "hosts.yml").problems
    assert problem.evidence.splitlines() == [
        "YAML parsing failed: Tabs are usually invalid in YAML.", f"{tmp_path}/hosts.yml:3:1",
    ]  # fmt: skip


@pytest.mark.parametrize("source", ["hosts.ini", "lab-a,"])
def test_a_path_that_the_locale_cannot_express_is_the_locales_fault(tmp_path: Path, source: str) -> None:
    folder = tmp_path / "größe"
    folder.mkdir()
    (folder / "hosts.ini").write_text("lab-a\n")
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = (sys.executable, "-m", "gpuprov", "facts", "--hosts", source)
    done = subprocess.run(words, capture_output=True, env=environment, check=False, cwd=folder)
    assert done.returncode == 2
    assert b"next: export LC_ALL=C.UTF-8" in done.stdout + done.stderr


_PLAIN = [
    ("a=1",),
    ("a=1 b=two  c=",),
    ("a='x y' b=\"it is\" c=\"'x'\" d='\"x\"'",),
    ("a==b", "b=c=d"),
    ("a=/x/y,z:1", "", "a=later"),
    ('{"a": [1, 2.5, null, true], "b": {"c": "d"}}',),
    ("{a: yes, b: 0x10, c: 010, d: 1_000, e: on, f: ~, g: 1e3}",),
    ("{a: [x, 'y z']}", "b=2"),
    ("a=ümlaut",),
]
_ANSIBLES = ["a={{ b }}", "a={% x %}", "{a: '{{ b }}'}", "{a: [{b: '{# c #}'}]}", "a", "a=b c", "/etc/x.yml", "[1, 2]",
             "{a: !vault x}", "{a: 2026-01-01}", "{1: a}", "a=b\\nc", "a=\"b", "{a", "a-b=c"]  # fmt: skip


@pytest.mark.parametrize("words", _PLAIN, ids=" ".join)
def test_plain_ones_are_read_as_ansible_reads_them(words: tuple[str, ...]) -> None:
    found, other = plain_extra_vars(words)
    assert other == ""
    # As text: True is not 1.
    assert json.dumps(found) == json.dumps(ansible_extra_vars(DataLoader(), words))


@pytest.mark.parametrize("word", _ANSIBLES)
def test_all_others_are_left_to_ansible(word: str) -> None:
    assert plain_extra_vars(["a=1", word]) == ({}, word)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "site.yml").write_text("# site\ngpuprov_engines: [podman]\ngpuprov_packages:\n  - a\n")
    (tmp_path / "vault.yml").write_text("$ANSIBLE_VAULT;1.1;AES256\n6162\n")
    words = (f"@{tmp_path}/site.yml",)
    assert plain_extra_vars(words) == (dict(ansible_extra_vars(DataLoader(), words)), "")
    assert plain_extra_vars([f"@{tmp_path}/vault.yml"])[1]


def test_dictionaries_of_one_name_are_left_to_ansible_which_may_merge_them() -> None:
    assert plain_extra_vars(["{a: {b: 1}}", "{a: {c: 2}}"])[1] == "{a: {c: 2}}"


def test_without_ansible_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "one_file", True)
    assert read_extra_vars(["gpuprov_toolkit=nvidia"]).spec.toolkit == "nvidia"
    with pytest.raises(UsageError, match="the extra variables cannot be read") as caught:
        read_extra_vars(["gpuprov_proxy={{ x }}http://user:secret@proxy"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "one_file"), [('gpuprov_vgpu={"token": "secret"}', True), ("ansible_password=of the secret", False)]
)
def test_a_word_that_is_refused_keeps_its_secret(word: str, one_file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "one_file", one_file)
    with pytest.raises(UsageError, match="-e ") as caught:
        read_extra_vars([word])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", [f"a: {'[' * 30_000}{']' * 30_000}", "a: \n" + "- " * 30_000], ids=["[", "-"])
def test_what_is_nested_too_deep_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "deep.yml"
    file.write_text(text)
    for sources, words in (((str(file),), ()), (("a,",), (f"@{file}",))):
        with pytest.raises(UsageError) as caught:
            read_inventory(sources, extra_vars=words)
        assert ("nested too deep" in str(caught.value), "fewer" in str(caught.value)) == (True, True)
    with pytest.raises(UsageError, match="extra variables"):
        read_extra_vars((f"{{{text}}}",))


@pytest.mark.parametrize("name", ["ansible_port", "ansible_user", "gpuprov_driver_version", "gpuprov_lock_timeout"])
def test_a_number_without_end_is_a_mistake_like_others(tmp_path: Path, name: str) -> None:
    text = f"all: {{hosts: {{a: {{{name}: 0x{'f' * 5000}, gpuprov_packages: [0x{'f' * 5000}]}}}}}}"
    assert len(str(error_of(tmp_path, {"hosts.yml": text}, "hosts.yml"))) < 1000


# -- as Ansible reads it -----------------------------------------------------------------------------------------------


CLONE = Path(__file__).parents[3]
EXAMPLE = CLONE / "inventories/example"
_ANSIBLE_INVENTORY = Path(sys.executable).with_name("ansible-inventory")


@pytest.fixture(scope="module")
def targets() -> dict[str, HostTarget]:
    """What gpuprov reads."""
    inventory = read_inventory([str(EXAMPLE)])
    assert inventory.warnings == ()
    return {target.name: target for target in inventory.hosts}


@pytest.fixture(scope="module")
def variables() -> dict[str, dict[str, Any]]:
    """What ansible-inventory reads: host → variables; it leaves templates as they are."""
    argv = (_ANSIBLE_INVENTORY, "-i", EXAMPLE, "--list")
    done = subprocess.run(argv, cwd=CLONE, capture_output=True, text=True, check=True)
    assert "WARNING" not in done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)["_meta"]["hostvars"]
    return found


def test_both_find_the_same_hosts(targets: dict[str, HostTarget], variables: dict[str, dict[str, Any]]) -> None:
    assert list(targets) == [*(f"train0{number}.example.org" for number in (1, 2, 3, 4)),
                             *(f"infer0{number}.example.org" for number in (1, 2, 3))]  # fmt: skip
    assert set(variables) == set(targets)


def test_both_make_the_same_specification(targets: dict[str, HostTarget], variables: dict[str, dict[str, Any]]) -> None:
    for name, target in targets.items():
        values = {
            key: value.replace("{{ gpuprov_driver_version }}", target.spec.driver_version)
            if isinstance(value, str)
            else value
            for key, value in variables[name].items()
        }
        assert task_request("install", values).spec == spec_to_json(target.spec)


def test_groups_and_hosts_differ_as_the_files_say(targets: dict[str, HostTarget]) -> None:
    train, infer = targets["train01.example.org"], targets["infer02.example.org"]
    assert (train.spec.driver_version, infer.spec.driver_version) == ("580.178.04", "580.178.04")
    assert train.spec.driver_url.endswith("/NVIDIA-Linux-x86_64-580.178.04.run")
    assert (infer.address, infer.port) == ("192.0.2.42", 2222)
    assert {target.ssh_options for target in targets.values()} == {(("ProxyJump", "ops@bastion.example.org"),)}
    assert [name for name, target in targets.items() if target.spec.docker == "preinstalled"] == ["infer03.example.org"]
