"""What the command line and the playbooks do alike: the commands they send, what they say, the options they have."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuprov.agent.probe import NOT_BOOTSTRAPPED
from gpuprov.agent.push import require
from gpuprov.core.commands import Completed
from gpuprov.fleet.options import FLAG, Options
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import Finished, to_line
from gpuprov.protocol.spec import PLAY_VARIABLES
from tests.files import put

REPOSITORY = Path(__file__).parents[2]
PLAYBOOKS = REPOSITORY / "playbooks"


def test_the_errors_of_a_command_that_had_a_terminal_are_in_its_output() -> None:
    """Ansible gives a terminal to a command that becomes root by su."""
    with pytest.raises(GpuprovError, match="Python cannot be installed") as caught:
        require(Completed((), 100, "Reading package lists...\nE: Unable to locate package\n"), *NOT_BOOTSTRAPPED)
    assert caught.value.problems[0].evidence.endswith("E: Unable to locate package")


# -- what a play asks of its hosts, by Ansible itself -----------------------------------------------------------------

# A "Python" that keeps each request; what it answers is a run that has changed nothing.
_PYTHON = """#!/bin/sh
case "$1" in
  -E) echo 3.11.2 ;;
  -I) cat > "$(mktemp {here}/request-XXXXXX)"; cat {here}/answer ;;
esac
"""
_PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - gpuprov.host.agent: {command: install}
"""


def requests_of(here: Path, play: str, *words: str, **environment: str) -> list[dict[str, Any]]:
    """Return the requests that a play sends to this machine. Fails if the play does."""
    put(here / "python", _PYTHON.format(here=here), 0o755)
    put(here / "answer", f"{to_line(Finished(0))}\n")
    put(here / "play.yml", play)
    # One host after the other: they have one home.
    one_by_one = ("-c", "local", "--forks", "1")
    command = (sys.executable, "-m", "ansible", "playbook", *one_by_one, *words, str(here / "play.yml"))
    own = {**os.environ, "HOME": str(here), "ANSIBLE_NOCOLOR": "1", "PYTHONPATH": str(REPOSITORY), **environment}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return [json.loads(path.read_text()) for path in here.glob("request-*")]


@pytest.mark.parametrize(("hosts", "reboot"), [("a,", "if-needed"), ("a,b,", "never")])
def test_a_play_does_not_reboot_the_machine_it_runs_on(tmp_path: Path, hosts: str, reboot: str) -> None:
    """As `gpuprov install --hosts` does not: alone, it goes on by itself after the reboot."""
    own = ("-i", hosts, "-e", "gpuprov_reboot=if-needed", "-e", f"ansible_python_interpreter={tmp_path}/python")
    asked = requests_of(tmp_path, _PLAY, *own)
    assert len(asked) == len(hosts) // 2
    assert {(one["spec"]["reboot"], one["caller_returns"]) for one in asked} == {(reboot, False)}


@pytest.mark.parametrize("named", ["{here}/python", "{{{{ own_python }}}}"])
def test_ansibles_settings_name_a_python(tmp_path: Path, named: str) -> None:
    """`interpreter_python` of ansible.cfg, in which Ansible resolves templates, as for its own modules."""
    own = ("-i", "a,", "-e", f"own_python={tmp_path}/python")
    assert requests_of(tmp_path, _PLAY, *own, ANSIBLE_PYTHON_INTERPRETER=named.format(here=tmp_path))


# -- options and variables --------------------------------------------------------------------------------------------

# What stands for each option of the command line in a playbook: Ansible's own, a variable, or nothing ("").
_IN_PLAYBOOKS = {
    "hosts": "-i", "limit": "--limit", "extra_vars": "-e", "vault_password_file": "--vault-password-file",
    "check": "--check", "diff": "--diff", "forks": "--forks", "verbose": "-v", "connect_timeout": "--timeout",
    "accept_new_host_keys": "host_key_checking",
    "image": "gpuprov_target", "root": "",
    "fix": "gpuprov_play_fix", "allow": "gpuprov_play_allow", "remember": "gpuprov_play_remember",
    "minutes": "gpuprov_play_minutes", "upgrade": "gpuprov_play_upgrade", "bundle": "gpuprov_play_bundle",
    "bundle_key": "gpuprov_play_bundle_key", "serial": "gpuprov_play_serial", "window": "gpuprov_play_window",
    "rollback_on_failure": "gpuprov_play_rollback_on_failure", "bootstrap_python": "gpuprov_play_bootstrap_python",
    "max_fail": "gpuprov_play_any_errors_fatal",
    "before_host": "gpuprov_play_before_host_tasks", "after_host": "gpuprov_play_after_host_tasks",
    # Tasks have their own `timeout`, Ansible its callbacks for results; canaries are a play's `serial: [1, 100%]`.
    "host_command_timeout": "", "host_timeout": "", "canary": "", "sign": "", "detailed_exitcode": "", "report": "",
    "metrics": "", "json": "",
}  # fmt: skip
# They have no option: a play's hosts are `hosts`, its container is an argument of `gpuprov cuda`.
_OF_PLAYS_ALONE = {"gpuprov_play_hosts", "gpuprov_play_container"}


def test_each_option_has_its_variable_and_each_variable_its_option() -> None:
    """A new one is to have its counterpart in the other way to hosts."""
    assert {one.name for one in fields(Options) if FLAG in one.metadata} == set(_IN_PLAYBOOKS)
    variables = {name for name in _IN_PLAYBOOKS.values() if name.startswith("gpuprov_play_")}
    assert variables | _OF_PLAYS_ALONE == PLAY_VARIABLES


@pytest.mark.parametrize("path", sorted(PLAYBOOKS.glob("*.yml")), ids=lambda path: path.stem)
def test_each_playbook_heeds_the_variables_of_all_plays(path: Path) -> None:
    (play,) = yaml.safe_load(path.read_text())
    if "import_playbook" not in play:
        assert play["hosts"] == "{{ gpuprov_play_hosts | default('all') }}"
        assert play["serial"] == "{{ gpuprov_play_serial | default('100%') }}"
        assert play["any_errors_fatal"] == "{{ gpuprov_play_any_errors_fatal | default(false) }}"


def test_each_task_that_may_begin_to_change_a_host_heeds_the_window() -> None:
    """The parts of `site.yml` begin with the preflight, which makes the plan."""
    for path in (*PLAYBOOKS.glob("*.yml"), PLAYBOOKS / "roles/preflight/tasks/main.yml"):
        content = yaml.safe_load(path.read_text())
        tasks = [task for one in content for task in one.get("tasks", [one]) if "gpuprov.host.agent" in task]
        for own in (task["gpuprov.host.agent"] for task in tasks):
            may_change = own["command"] in ("plan", "rollback", "uninstall") or "fix" in own
            assert ("gpuprov_play_window" in own.get("window", "")) == may_change, path


def test_docs_say_what_the_options_in_messages_of_hosts_are_in_a_playbook() -> None:
    folders = ("agent", "boot", "checks", "doctor", "driver", "engines", "facts", "plan", "protocol")
    every = (path for name in folders for path in (REPOSITORY / "gpuprov" / name).rglob("*"))
    files = (path for path in every if path.suffix in (".py", ".json"))
    told = re.compile(r"(?:`|\")gpuprov (?:install|verify|rollback|doctor)((?: --[a-z-]+)+)|needs (--[a-z]+)")
    found = {word for path in files for one in told.findall(path.read_text()) for word in " ".join(one).split()}
    page = (PLAYBOOKS.parent / "docs/ansible.md").read_text()
    explained = set(re.findall(r"--[a-z-]+", page.split("## Next steps in messages")[1].split("\n## ")[0]))
    assert {"--upgrade", "--remember", "--allow"} <= found
    # Images are made without playbooks' help in a Containerfile, and a report of a fault is for the project.
    assert found - {"--image", "--json", "--kubernetes"} <= explained
