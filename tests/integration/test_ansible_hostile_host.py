"""A host that lies to ansible-playbook: nothing that it answers is obeyed, with the oldest and the newest ansible-core.

The host is this machine behind a "Python" of the test's, which answers whatever the test put beside it: every key that
the installed ansible-core looks for in a result. Ansible, its connection and the plugin are genuine.
"""

import base64
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ansible
import pytest
import yaml
from ansible import constants

from gpuprov.agent.playbook_task import split_output, task_result
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.events import (
    ChangeDone,
    CheckDone,
    CudaSurveyed,
    Event,
    FactsGathered,
    Finished,
    Note,
    Planned,
    PlannedChange,
    to_line,
)  # fmt: skip
from tests.lab.lab import REPOSITORY
from tests.simgpu import cache
from tests.simgpu.commands import BuildError, output_of

pytestmark = pytest.mark.slow

PASSWORD = "hunter/22+x"
# What the plugin answers; Ansible itself adds the second row.
_ANSWER = {
    "changed", "failed", "msg", "changes", "checks", "problems", "versions", "diff", "disturbs", "reboot_needed",
    "cuda", "warnings", "skipped", "ansible_facts", "started", "finished", "ansible_job_id", "results_file",
    "attempts", "item", "ansible_loop_var", "failed_when_result", "exception", "deprecations", "results",
}  # fmt: skip


def _oldest() -> Path:
    """Return a folder with the oldest ansible-core that pyproject.toml admits. Raises BuildError if pip has none."""
    found = re.search(r'"ansible-core>=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert found is not None
    requirement = f"ansible-core=={found[1]}.0"

    def fetch(folder: Path) -> None:
        words = ("install", "--quiet", "--only-binary=:all:", "--target", str(folder), requirement)
        output_of(sys.executable, "-m", "pip", *words, hint=f"check that pip can install {requirement}")

    return cache.built("ansible-core", requirement, fetch)


@pytest.fixture(scope="module", params=["oldest", "newest"])
def ansible_core(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment in which Python finds that ansible-core."""
    if request.param == "newest":
        return {}
    try:
        return {"PYTHONPATH": str(_oldest())}
    except BuildError as error:
        pytest.skip(f"the oldest ansible-core is not tried: {error}")


def internal_keys() -> dict[str, Any]:
    """Return every key for which ansible-core looks in results and facts, with a value that would do something."""
    core = Path(ansible.__file__).parent
    sources = (core / "plugins/strategy/__init__.py", core / "executor/task_executor.py", core / "vars/clean.py")
    text = "".join(path.read_text() for path in (*sources, *core.glob("executor/task_result.py")))
    results = r"(?:\w*result\w*|res|item|data|facts)"
    read = re.findall(rf"\b{results}(?:\.get\(|\.pop\(|\[)f?['\"](\w+)['\"]", text)
    asked = re.findall(rf"['\"](\w+)['\"] (?:not )?in {results}\b", text)
    magic = {name for names in constants.MAGIC_VARIABLE_MAPPING.values() for name in names}
    listed = {*constants.INTERNAL_RESULT_KEYS, *constants.RESTRICTED_RESULT_KEYS, *constants.COMMON_CONNECTION_VARS}
    assert {"add_host", "add_group", "ansible_facts", "_ansible_notify", "ansible_stats"} <= {*read, *asked}
    names = {*read, *asked, *magic, *listed, "include", "include_args", "ansible_evil_interpreter", "_ansible_parsed"}
    return {
        **{name: f"obeyed {name}" for name in sorted(names)},
        "add_host": {"host_name": "honest", "groups": ["obeyed"], "host_vars": {"ansible_host": "obeyed", "rack": 2}},
        "add_group": "obeyed", "parent_groups": ["all"],
        "ansible_facts": {**dict.fromkeys(magic, "obeyed"), "rack": 3, "discovered_interpreter_python": "obeyed"},
        "ansible_stats": {"data": {"obeyed": 1}, "per_host": False},
        "_ansible_delegated_vars": {"ansible_delegated_host": "honest"}, "_ansible_facts_cacheable": True,
        "_ansible_notify": ["obeyed"], "_ansible_item_result": True, "_ansible_no_log": False,
        "__ansible_type": "TrustedAsTemplate", "__ansible_vault": "obeyed", "__ansible_unsafe": "obeyed",
        "deprecations": [{"msg": "obeyed", "version": "1"}], "exception": "obeyed", "results": [{"add_host": {}}],
        "changed": True, "finished": 1, "started": 1, "ansible_job_id": "obeyed", "invocation": {"rack": 4},
        "failed": False, "unreachable": False, "skipped": False, "rc": 0,
    }  # fmt: skip


def text_of(canary: Path) -> str:
    """Return text that would run a command as a template, and that a terminal would take for another host's line."""
    template = f"{{{{ lookup('pipe', 'touch {canary}') }}}}"
    login = base64.b64encode(f"ops:{PASSWORD}".encode()).decode()
    said = f"said {PASSWORD} {quote(PASSWORD, safe='')} {login} {template}"
    return f"{said}\x1b[2J\x1b]0;title\x07\u202e\x9b1A\r\n\nhonest : ok=7 changed=0\nok: [honest]\r"


def events(text: str, exit_code: int) -> tuple[Event, ...]:
    """Return an event of each kind that becomes a part of a result: text and keys wherever a host may write."""
    keys = internal_keys()
    tree = {**keys, "text": text, "deep": [keys]}
    return (
        Note(text, "warning"),
        Planned((PlannedChange(text, text, text, text, text, True),), True),
        ChangeDone(text, 1.0),
        CheckDone(text, "failed", text, text, text, text),
        FactsGathered(tree),
        CudaSurveyed(tree),
        Finished(exit_code, 1, 1.0, (Problem(text, text, text),), text, {text: text, **dict.fromkeys(keys, text)}),
    )


def lines(text: str, exit_code: int) -> str:
    """Return the events as lines of which each has every internal key beside its own."""
    keys = internal_keys()
    return "".join(json.dumps({**keys, **json.loads(to_line(event))}) + "\n" for event in events(text, exit_code))


def job_result(text: str) -> dict[str, Any]:
    """Return a job's file as an agent writes it, the text and the keys wherever a host may write."""
    read, *_ = split_output(lines(text, 0))
    keys = {key: value for key, value in internal_keys().items() if key not in ("started", "failed", "changed")}
    return {**keys, **task_result("facts", read).answer(keys), "warnings": [text], "changes": []}


_PYTHON = r"""#!/bin/sh
case "$1" in
  -E) echo 3.11.2 ;;
  -I) mkdir -p "$HOME/.ansible_async"
      if [ "$3" = job ]; then
        id=$(sed -n 's/.*"id": *"\([^"]*\)".*/\1/p')
        cp "{here}/module" "$HOME/.ansible_async/$id"
        exec cat "{here}/job"
      fi
      if grep -q '"command":"verify"'; then answer=failed; else answer=done; fi
      cat "{here}/$answer" ;;
esac
"""

_PLAY = """
- hosts: hostile
  gather_facts: false
  strategy: {strategy}
  tasks:
    - gpuprov.host.agent: {{command: facts}}
    - gpuprov.host.agent: {{command: plan}}
      loop: [1, 2]
      register: looped
    - gpuprov.host.agent: {{command: install}}
      check_mode: true
      diff: true
      register: checked
    - gpuprov.host.agent: {{command: facts}}
      delegate_to: hostile
      delegate_facts: true
      register: delegated
    - block:
        - gpuprov.host.agent: {{command: verify}}
          register: failed
      rescue:
        - ansible.builtin.debug:
            msg: "{{{{ ansible_failed_result.msg }}}}"
    - gpuprov.host.agent: {{command: facts}}
      async: 60
      poll: 0
      register: job
    - gpuprov.host.agent: {{command: facts}}
      async: 60
      poll: 1
      register: waited
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.copy:
        content: "{{{{ {{'groups': groups, 'hostvars': hostvars, 'failed': failed}} | to_json }}}}"
        dest: "{seen}"
        mode: "0600"
      vars:
        failed: "{{{{ hostvars.hostile.ansible_failed_result }}}}"
"""


@dataclass(frozen=True)
class Played:
    """What Ansible printed, what it believes of its hosts afterwards, and a file that no host may make it write."""

    output: str
    seen: dict[str, Any]
    canary: Path


@pytest.fixture(scope="module", params=["linear", "free"])
def played(
    request: pytest.FixtureRequest, ansible_core: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Played:
    here = tmp_path_factory.mktemp("hostile")
    canary, seen = here / "canary", here / "seen.json"
    text, keys = text_of(canary), internal_keys()
    for name, code in (("done", 0), ("failed", 1)):
        (here / name).write_text(lines(text, code))
    (here / "job").write_text("".join(f"{line}\n" for line in (lines(text, 0), json.dumps({**keys, "msg": text}))))
    (here / "module").write_text(json.dumps({**job_result(text), "msg": text}))
    python = here / "python"
    python.write_text(_PYTHON.format(here=here))
    python.chmod(0o755)
    local = {"ansible_connection": "local", "rack": 1}
    hosts = {
        "hostile": {**local, "ansible_become_password": PASSWORD, "ansible_python_interpreter": str(python)},
        "honest": local,
        "localhost": {**local, "ansible_python_interpreter": sys.executable},
    }
    (here / "inventory.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    (here / "play.yml").write_text(_PLAY.format(strategy=request.param, seen=seen))
    words = (sys.executable, "-m", "ansible", "playbook", "-i", str(here / "inventory.yml"), str(here / "play.yml"))
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "HOME": str(here), "PYTHONIOENCODING": "utf-8", **ansible_core}
    done = subprocess.run(
        words, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=600, check=False,
    )  # fmt: skip
    output = done.stdout.decode()
    assert done.returncode == 0, output
    return Played(output, json.loads(seen.read_text()), canary)


def test_a_host_adds_no_host_and_no_group(played: Played) -> None:
    hosts = ["honest", "hostile", "localhost"]
    groups = {name: sorted(members) for name, members in played.seen["groups"].items()}
    assert groups == {"all": hosts, "ungrouped": hosts}


def test_no_variable_of_a_host_changes_by_what_a_host_answers(played: Played) -> None:
    for name, variables in played.seen["hostvars"].items():
        assert variables["rack"] == 1, name
        assert variables["ansible_connection"] == "local", name
        assert not [key for key, value in variables.items() if str(value).startswith("obeyed")], name
        assert set(variables.get("ansible_facts", {})) <= {"ansible_local"}, name
    assert set(played.seen["hostvars"]["hostile"]["ansible_local"]) == {"gpuprov"}


def test_a_result_has_the_keys_that_are_documented_and_no_others(played: Played) -> None:
    variables = played.seen["hostvars"]["hostile"]
    answers = [played.seen["failed"], *variables["looped"]["results"]]
    answers += [variables[name] for name in ("looped", "checked", "delegated", "failed", "job", "waited")]
    for answer in answers:
        assert {key for key in answer if not key.startswith("_ansible_")} <= _ANSWER
    assert set(variables["job"]) - {"failed", "changed"} == {"started", "finished", "ansible_job_id", "results_file"}
    assert re.fullmatch(r"j\d+\.\d+", variables["job"]["ansible_job_id"])


def test_nothing_that_a_host_answers_is_a_template(played: Played) -> None:
    assert "lookup" in played.seen["failed"]["msg"]
    assert not played.canary.exists()


def test_no_answer_shows_a_password(played: Played) -> None:
    shown = played.output + json.dumps([played.seen["failed"], played.seen["hostvars"]["hostile"]["ansible_local"]])
    assert "said *** ***" in shown
    assert not [form for form in ("hunter", base64.b64encode(b"ops:hunter").decode()[6:-4]) if form in shown]


def test_no_answer_reaches_the_terminal_as_more_than_text(played: Played) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", played.output)
    assert not [line for line in played.output.splitlines() if line.startswith(("honest : ok=7", "ok: [honest]"))]
