"""What the command line and the playbooks do alike: the commands they send, what they say, the options they have."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.probe import NOT_BOOTSTRAPPED
from gpuprov.agent.push import require
from gpuprov.core.commands import Completed
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import Finished, to_line
from tests.files import put

REPOSITORY = Path(__file__).parents[2]


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
    command = (sys.executable, "-m", "ansible", "playbook", "-c", "local", *words, str(here / "play.yml"))
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
