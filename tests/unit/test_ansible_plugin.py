"""Ansible's action plugin: the agent that it pushes, its Python, its domain, and what people see of a result."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager
from jinja2 import ChainableUndefined, Environment

from gpuprov.agent.playbook_task import TASK_COMMANDS, TaskResult, task_result
from gpuprov.agent.probe import Probe, Python
from gpuprov.cli.playbooks import write_playbooks
from gpuprov.core.commands import Completed
from gpuprov.fleet.agent_file import build_agent
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.events import Finished
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec_fields import PREFIX
from tools.zipapps import pack

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = loaded(PLAYBOOKS / "plugins/action/agent.py")
    monkeypatch.setattr(module.constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return module


def test_a_clones_plugin_pushes_the_command_lines_agent(plugin: ModuleType, tmp_path: Path) -> None:
    agent = build_agent()
    assert plugin._agent() == (agent.content, agent.digest)
    assert sys.path[0] == str(tmp_path / "gpuprov/modules")
    assert (tmp_path / "gpuprov/modules/gpuprov/agent/playbook_task.py").exists()


def test_playbooks_that_can_not_be_replaced_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_playbooks(tmp_path)
    before = sorted(map(str, tmp_path.rglob("*")))

    def interrupted() -> None:
        raise SystemExit(130)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("gpuprov.fleet.agent_file.build_agent", interrupted)
        write_playbooks(tmp_path)
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    (tmp_path / "playbooks/old.yml").touch()
    assert write_playbooks(tmp_path) == (tmp_path / "playbooks",)
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_the_agent_is_looked_for_once_in_a_run(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plugin._agent()
    monkeypatch.setattr(plugin, "_found", lambda: pytest.fail("looked for again"))
    assert plugin._agent() == first


def test_a_collection_carries_its_agent(plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = tmp_path / "gpuprov-agent.pyz"
    carried.write_bytes(pack({"gpuprov/__init__.py": b""}))
    monkeypatch.setattr(plugin, "_CARRIED", carried)
    assert plugin._agent()[0] == carried.read_bytes()


def test_two_tasks_at_once_unpack_it_once(plugin: ModuleType, tmp_path: Path) -> None:
    content = pack({"a.py": b"a = 1\n"})
    plugin._unpack(content, tmp_path / "gpuprov")
    plugin._unpack(content, tmp_path / "gpuprov")
    assert [path.name for path in tmp_path.iterdir()] == ["gpuprov"]


def test_no_gpuprov_says_what_to_do(plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_CLONE", tmp_path)
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(plugin.AnsibleError, match=f"next: make -C {tmp_path} setup"):
        plugin._agent()


def test_all_tasks_of_a_process_are_one_run_and_no_others(plugin: ModuleType) -> None:
    child = f"import sys; sys.path[:0] = {sys.path!r}; from tests.unit.test_ansible_plugin import *; "
    child += "print(loaded(PLAYBOOKS / 'plugins/action/agent.py')._run_id())"
    ran = [subprocess.run((sys.executable, "-c", child), capture_output=True, text=True, check=True) for _ in range(2)]
    assert ran[0].stdout == ran[1].stdout
    assert f" {os.getpid()} " in ran[0].stdout
    assert plugin._run_id() != ran[0].stdout.strip()


@pytest.mark.parametrize(
    ("value", "named"), [("auto_silent", ""), ("auto", ""), (None, ""), ("/usr/bin/python3.11 ", "/usr/bin/python3.11")]
)
def test_a_named_python_is_used_and_a_discovered_one_is_not(plugin: ModuleType, value: object, named: str) -> None:
    plugin._agent()
    assert plugin._named_python(value) == named


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, True), ("y", True), ("on", True), (1, True), ("no", False), ("", False), (None, False)],
)
def test_a_variable_of_plays_is_true_as_ansible_says(plugin: ModuleType, value: object, expected: bool) -> None:
    plugin._agent()
    assert plugin._flag({"gpuprov_play_upgrade": value}, "gpuprov_play_upgrade") is expected
    assert not plugin._flag({}, "gpuprov_play_upgrade")
    with pytest.raises(UsageError, match="gpuprov_play_upgrade must be true or false"):
        plugin._flag({"gpuprov_play_upgrade": "newest"}, "gpuprov_play_upgrade")


def test_a_command_in_the_place_of_a_python_is_refused(plugin: ModuleType) -> None:
    """The probe took each of its words for a program, and proposed to install again what has files of its name."""
    plugin._agent()
    with pytest.raises(UsageError, match="ansible_python_interpreter is not the path of a program"):
        plugin._named_python("/usr/bin/env python3")


def test_a_key_without_a_bundle_is_refused(plugin: ModuleType) -> None:
    """As on the command line: packages would come from the network, by no such key."""
    plugin._agent()
    assert plugin._bundle({}) == ("", "")
    with pytest.raises(UsageError, match="gpuprov_play_bundle_key needs gpuprov_play_bundle"):
        plugin._bundle({"gpuprov_play_bundle_key": "A" * 40})


def test_a_delegated_task_heeds_the_variables_of_the_host_it_goes_to(plugin: ModuleType) -> None:
    own = {"ansible_python_interpreter": "/controller/python"}
    other = {"ansible_python_interpreter": "/host/python"}
    variables = {**own, "ansible_delegated_vars": {"other": other}}
    assert plugin._connection_variables(variables, None) is variables
    assert plugin._connection_variables(variables, "other") == other
    assert plugin._connection_variables(own, "other") == {}


@pytest.mark.parametrize("become", [None, "env password"])
def test_every_password_of_the_connection_is_hidden(plugin: ModuleType, become: str | None) -> None:
    """Those of all plugins, and what ANSIBLE_BECOME_PASS has; a host is told one of them."""

    def template(value: str) -> str:
        if "{{" in value:
            raise plugin.AnsibleError("'vault_password' is undefined")
        return value

    names = ("ansible_password", "ansible_ssh_pass", "ansible_su_pass", "ansible_paramiko_password",
             "ansible_private_key_passphrase")  # fmt: skip
    variables = {**{name: f"of {name}" for name in names}, "ansible_winrm_password": "{{ vault_password }}"}
    variables |= {"ansible_user": "ops", "passwords": "none"}
    asked = SimpleNamespace(get_option=lambda name, playcontext: become) if become else None
    task = SimpleNamespace(
        _task_vars=variables, _task=SimpleNamespace(delegate_to=None), _templar=SimpleNamespace(template=template),
        _connection=SimpleNamespace(become=asked), _play_context=SimpleNamespace(password="typed", become_pass=None),
    )  # fmt: skip
    expected = {"typed", *(f"of {name}" for name in names), *filter(None, (become,))}
    assert set(plugin.ActionModule._passwords(task)) == expected


def test_a_template_without_a_value_names_the_variable_and_what_to_do(plugin: ModuleType) -> None:
    def template(value: str) -> str:
        raise plugin.AnsibleError("'site' is undefined")

    plugin._agent()
    task = SimpleNamespace(_task_vars={"gpuprov_proxy": "{{ site }}"}, _templar=SimpleNamespace(template=template))
    with pytest.raises(GpuprovError, match="template in gpuprov_proxy does not resolve") as caught:
        plugin.ActionModule._variables(task)
    assert caught.value.problems[0].next_step == "define what it names for this host, or remove gpuprov_proxy"


def test_ansible_doc_knows_every_command() -> None:
    documentation = yaml.safe_load(loaded(PLAYBOOKS / "plugins/modules/agent.py").DOCUMENTATION)
    assert set(TASK_COMMANDS) <= set(documentation["options"]["command"]["choices"])


def test_ansible_doc_knows_what_a_task_takes_and_what_it_returns(plugin: ModuleType) -> None:
    module = loaded(PLAYBOOKS / "plugins/modules/agent.py")
    kept = ("type", "default", "elements")
    options = yaml.safe_load(module.DOCUMENTATION)["options"]
    documented = {name: {key: one[key] for key in kept if key in one} for name, one in options.items()}
    assert documented == {
        name: {key: one[key] for key in kept if key in one} for name, one in plugin._ARGUMENTS.items()
    }
    assert options["allow"]["choices"] == plugin._ARGUMENTS["allow"]["choices"]
    # Ansible documents its own.
    own = {"failed", "changed", "msg", "diff", "warnings", "facts"}
    assert {one.name for one in fields(TaskResult)} - own == set(yaml.safe_load(module.RETURN))


def test_the_collection_holds_what_the_clone_holds_and_the_agent(tmp_path: Path) -> None:
    loaded(PLAYBOOKS / "collection.py").write_collection(tmp_path / "host")
    here = {path.relative_to(tmp_path / "host").as_posix() for path in (tmp_path / "host").rglob("*") if path.is_file()}
    clone = {path.relative_to(PLAYBOOKS).as_posix() for path in PLAYBOOKS.glob("roles/*/*/*.yml")}
    assert clone <= here
    assert {f"playbooks/{path.name}" for path in PLAYBOOKS.glob("*.yml")} <= here
    assert (tmp_path / "host/files/gpuprov-agent.pyz").read_bytes() == build_agent().content
    assert not any("__pycache__" in path for path in here)
    # Galaxy shows the page alone.
    linked = re.findall(r"\]\(([^)]+)\)", (tmp_path / "host/README.md").read_text())
    assert [link for link in linked if not link.startswith(("#", "https://"))] == []
    assert zipfile.is_zipfile(tmp_path / "host/files/gpuprov-agent.pyz")


def test_no_fact_or_variable_of_ours_would_be_read_as_an_option() -> None:
    """What the roles register goes into every host's variables, among which the schema looks for its own."""
    for path in PLAYBOOKS.glob("roles/*/tasks/main.yml"):
        for task in yaml.safe_load(path.read_text()):
            assert not str(task.get("register", "")).startswith(PREFIX)


@pytest.mark.parametrize(
    ("verbosity", "no_log", "said"),
    [(0, False, ["lab-a: disk full; next: df -h"]), (1, False, []), (0, True, [])],
    ids=["plain", "with -v Ansible shows all", "a task that must not be told"],
)
def test_people_see_one_line_of_a_result(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, verbosity: int, no_log: bool, said: list[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(plugin, "Display", lambda: SimpleNamespace(verbosity=verbosity, display=shown.append))
    task = SimpleNamespace(_task=SimpleNamespace(no_log=no_log))
    found = {"failed": True, "msg": "disk full; next: df -h\n  seen: 100 %"}
    assert plugin.ActionModule._displayed(task, found, {"inventory_hostname": "lab-a"}) is found
    assert shown == said


@pytest.mark.parametrize(("reboots", "failed", "waits"), [(2, False, 2), (3, False, 3), (99, True, 3)])
def test_a_fourth_reboot_fails_the_task(plugin: ModuleType, reboots: int, failed: bool, waits: int) -> None:
    """As on the command line: the host is told to stay up, and says what needs a reboot."""
    waited: list[str] = []

    def ask(request: Request) -> tuple[tuple[Finished], Finished]:
        boot = "boot" if request.spec["reboot"] != "never" else ""
        asks = Finished(int(ExitCode.REBOOT_NEEDED), left_boot=boot, summary="nouveau is loaded")
        finished = Finished(int(ExitCode.DONE)) if len(waited) == reboots else asks
        return (finished,), finished

    plugin._agent()
    task = SimpleNamespace(_ask=ask, _wait_for_boot=waited.append)
    result = task_result("install", plugin.ActionModule._events(task, Request("install", {"reboot": "if-needed"})))
    assert (result.failed, result.reboot_needed, len(waited)) == (failed, failed, waits)
    assert result.msg == ("nouveau is loaded" if failed else "")


def test_what_a_login_shell_prints_is_no_boot(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = ["boot-1", "boot-2", "offline", "lost", "boot-2", "running"], []

    def on_host(command: str, stdin: bytes) -> Completed:
        # Neither ~/.bashrc ends its line, nor may a unit that never starts hold up the play.
        asked.append(command.removeprefix("echo; ").split()[0])
        ended = "\n" if command.startswith("echo; ") else ""
        if answers[0] == "lost":  # sshd restarts late in a boot
            raise plugin.AnsibleError(answers.pop(0))
        return Completed((command,), 0, f"welcome to gpu01{ended}{answers.pop(0)}\n")

    monkeypatch.setattr(plugin.time, "sleep", lambda seconds: None)
    connection = SimpleNamespace(reset=lambda: None)
    task = SimpleNamespace(_connection=connection, _on_host=on_host)
    plugin.ActionModule._wait_for_boot(task, "boot-1")
    assert (answers, asked) == ([], ["cat", "cat", "timeout", "cat", "cat", "timeout"])


@pytest.mark.parametrize(
    ("transport", "method", "enabled", "how"),
    [
        ("ssh", "sudo", False, "pipe"),
        ("ssh", "su", False, "file"),
        ("local", "sudo", False, "file"),
        ("local", "sudo", True, "pipe"),
        ("local", "", False, "pipe"),
        ("paramiko", "", False, "file"),
    ],
)
@pytest.mark.parametrize("core", ["2.18", "2.19"])
def test_a_request_reaches_the_agent_beside_a_password(
    plugin: ModuleType, transport: str, method: str, enabled: bool, how: str, core: str
) -> None:
    """A local connection drops what it should write to a command that has a terminal, and waits for its end.

    Up to ansible-core 2.18 a plugin for become does not say whether it works with pipelining.
    """
    plugin._agent()
    done = {"rc": 0, "stderr": ""}
    connection = SimpleNamespace(has_pipelining=transport != "paramiko", transport=transport)
    says = {} if core == "2.18" else {"pipelining": method != "su"}
    connection.become = SimpleNamespace(name=method, **says) if method else None
    task = SimpleNamespace(_connection=connection, _is_pipelining_enabled=lambda style: enabled)
    task._low_level_execute_command = lambda *_, **__: {**done, "stdout": "pipe"}
    task._with_file = lambda *_, **__: {**done, "stdout": "file"}
    assert plugin.ActionModule._on_host(task, "agent", b"request", become=bool(method)).stdout == how
    # No file for nothing: the host that is asked whether it is up may be going down.
    assert plugin.ActionModule._on_host(task, "cat", b"").stdout == "pipe"


def test_a_probe_tries_no_sudo(plugin: ModuleType) -> None:
    """Ansible becomes root itself, maybe by su; a host would log a refusal for each task, and mail it."""
    asked: list[str] = []

    def on_host(command: str, stdin: bytes) -> Completed:
        asked.extend(shlex.split(command))
        return Completed((), 0, "gpuprov-probe 1\nsystem Linux x86_64\nuid 1000\nend\n")

    plugin._agent()
    task = SimpleNamespace(_digest="d", _on_host=on_host)
    assert plugin.ActionModule._probe(task, "/usr/bin/python3").uid == 1000
    assert asked == ["sh", "-s", "d", ":", "/usr/bin/python3"]


def test_a_become_user_who_is_not_root_is_named(plugin: ModuleType) -> None:
    said = "/usr/bin/python3: can't open file '/root/.cache/gpuprov/agent-1.pyz': [Errno 13] Permission denied"
    become = SimpleNamespace(get_option=lambda name, playcontext: "nobody")
    task = SimpleNamespace(_connection=SimpleNamespace(become=become), _play_context=None, _digest="d")
    task._on_host = lambda *_, **__: Completed((), 2, "", said)
    with pytest.raises(GpuprovError, match="the task becomes nobody, and gpuprov requires root") as raised:
        plugin.ActionModule._run_agent(task, Probe("Linux x86_64", 0, "/home", pythons=(Python("/p", (3, 11)),)), b"")
    assert "become_user" in raised.value.problems[0].next_step


def test_a_request_that_arrived_in_part_does_not_stay_on_the_host(plugin: ModuleType) -> None:
    """It may have a proxy's password, or a licence's token."""
    removed: list[str] = []

    def transfer(local: str, remote: str) -> None:
        raise plugin.AnsibleError("no space left on device")

    connection = SimpleNamespace(_shell=SimpleNamespace(join_path=lambda *words: "/".join(words)))
    task = SimpleNamespace(_connection=connection, _make_tmp_path=lambda: "/tmp/x", _transfer_file=transfer)
    task._remove_tmp_path = removed.append
    with pytest.raises(plugin.AnsibleError):
        plugin.ActionModule._with_file(task, "agent", b"request", become=True)
    assert removed == ["/tmp/x"]


_RACK = {
    "a2": {"ansible_host": "10.0.0.2", "gpuprov_imex_domain": "rack1"},
    "a1": {"ansible_host": "10.0.0.1", "gpuprov_imex_domain": "rack1"},
    "free": {"ansible_host": "10.0.0.9"},
}
_NODES = ["10.0.0.1 a1", "10.0.0.2 a2"]


@pytest.mark.parametrize(
    "groups", [{"all": [*_RACK]}, {"all": [*_RACK], "rack1": ["a2", "a1"]}], ids=["hosts", "group"]
)
def test_a_host_gets_its_domains_nodes_from_the_whole_inventory(plugin: ModuleType, groups: dict[str, Any]) -> None:
    plugin._agent()
    task = SimpleNamespace(_task_vars={"hostvars": _RACK, "groups": groups, "inventory_hostname": "a1"})
    found = plugin.ActionModule._with_domain(task, {"gpuprov_imex_domain": "rack1"})
    assert found == {"gpuprov_imex_domain": "rack1", "gpuprov_imex_nodes": _NODES}
    nothing = SimpleNamespace(_task_vars={})
    assert plugin.ActionModule._with_domain(nothing, {"gpuprov_dcgm": True}) == {"gpuprov_dcgm": True}


# A host that the limit leaves out has no facts; one of another group has nothing that the domain needs.
_LIMITED = """\
[rack1]
a1 ansible_host=10.0.0.1
a2 gpuprov_imex_address="{{ ansible_facts.default_ipv4.address }}"
[rack1:vars]
gpuprov_imex_domain=%s
[other]
x ansible_host="{{ ansible_facts.nodename }}" gpuprov_imex="{{ nowhere }}"
"""


@pytest.mark.parametrize("domain", ["rack1", "tray"])
def test_limit_reads_no_more(plugin: ModuleType, tmp_path: Path, domain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ansible's own inventory and templates."""
    (tmp_path / "hosts").write_text(_LIMITED % domain)
    loader = DataLoader()
    inventory = InventoryManager(loader, sources=[str(tmp_path / "hosts")])
    hosts = HostVars(inventory, VariableManager(loader, inventory), loader)
    plugin._agent()
    given = {"hostvars": hosts, "groups": inventory.get_groups_dict(), "inventory_hostname": "a1"}
    task = SimpleNamespace(_task_vars={**given, "ansible_play_hosts_all": ["a1"]}, _warnings=[])
    own = {"gpuprov_imex_domain": domain}
    assert plugin.ActionModule._with_domain(task, own, required=False) == own
    assert "an IMEX variable of a2 does not resolve, which this play leaves out" in task._warnings[0]
    with pytest.raises(GpuprovError, match="an IMEX variable of a2 does not resolve"):
        plugin.ActionModule._with_domain(task, own)
    inventory.hosts["a2"].set_variable("gpuprov_imex_address", "10.0.0.2")
    assert plugin.ActionModule._with_domain(task, own) == {**own, "gpuprov_imex_nodes": _NODES}


@pytest.mark.parametrize(
    ("batch", "alone", "missing"),
    [(["a1", "a2"], False, ""), (["a1", "free"], False, "a2"), (["a1", "a2"], True, "a2")],
)
def test_a_part_of_a_domain_is_refused(plugin: ModuleType, batch: list[str], alone: bool, missing: str) -> None:
    """A limit, another batch, a host that failed before: the play's batch lacks it."""
    plugin._agent()
    task = SimpleNamespace(_task_vars={"inventory_hostname": "a1", "ansible_play_batch": batch})
    request = SimpleNamespace(spec={"imex_nodes": _NODES, "imex_domain": "rack1"})
    if not missing:
        plugin.ActionModule._require_whole_domain(task, request, alone=alone)
        return
    with pytest.raises(GpuprovError, match=f"this run leaves out {missing}"):
        plugin.ActionModule._require_whole_domain(task, request, alone=alone)


def test_a_play_that_starts_at_a_later_task_does_it(plugin: ModuleType) -> None:
    """`--start-at-task` leaves out the preflight, whose plan says whether there is something to do."""
    (site,) = yaml.safe_load((PLAYBOOKS / "site.yml").read_text())
    conditions = {role["when"] for role in site["roles"] if "preflight_plan" in str(role.get("when"))}
    cases: tuple[tuple[dict[str, Any], bool], ...] = (({}, True), ({"preflight_plan": {"changes": []}}, False))
    for known, expected in cases:
        # As Ansible's, a value without a name has no attributes, and is no error before it is used.
        environment = Environment(undefined=ChainableUndefined)
        assert {environment.compile_expression(one)(**known) for one in conditions} == {expected}


@pytest.mark.parametrize(("fix", "window"), [({}, ""), ({"gpuprov_play_fix": "true"}, "Sat 02:00-06:00")])
def test_repairs_keep_to_the_order_and_the_window_of_a_play(fix: dict[str, str], window: str) -> None:
    play = yaml.safe_load((PLAYBOOKS / "doctor.yml").read_text())[0]
    install = yaml.safe_load((PLAYBOOKS / "site.yml").read_text())[0]
    assert all(play[name] == install[name] for name in ("hosts", "serial", "any_errors_fatal"))
    jinja = Environment()
    jinja.filters["bool"] = lambda value: value == "true"
    template = jinja.from_string(play["tasks"][0]["gpuprov.host.agent"]["window"])
    assert template.render(gpuprov_play_window="Sat 02:00-06:00", **fix) == window
