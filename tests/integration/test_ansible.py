"""The playbooks on real hosts: what `gpuprov install --hosts` does, to the byte; check mode, changed, failures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_install import docker_start, etc, packages
from tests.lab import Host
from tests.lab.fixtures import Site
from tests.lab.lab import REPOSITORY

pytestmark = [pytest.mark.lab, pytest.mark.root]
_ANSIBLE_PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
_PARTS = ("repos", "driver", "toolkit", "engine")


def play(name: str, inventory: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a playbook of the clone as a user types it."""
    argv = (str(_ANSIBLE_PLAYBOOK), "-i", str(inventory), f"playbooks/{name}.yml", *words)
    return subprocess.run(
        argv, cwd=REPOSITORY, env={**os.environ, "ANSIBLE_NOCOLOR": "1", **environment}, timeout=300, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def recap(done: subprocess.CompletedProcess[str], host: str) -> dict[str, int]:
    """Return the counts of a host's line in the recap."""
    line = next((line for line in done.stdout.splitlines() if re.match(rf"{host} +: ok=", line)), "")
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", line)}


def task_states(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return role → ok, changed, skipping or fatal."""
    pairs = re.findall(r"TASK \[gpuprov\.host\.(\w+) : .*\n(?:.*\n)*?(ok|changed|skipping|fatal): ", done.stdout)
    return dict(pairs)


@pytest.fixture(scope="module")
def twin(site: Site) -> Host:
    """A host that site.yml has installed, from bare."""
    host = site.hosts["twin"]
    host.reset()
    done = play("site", site.inventory("twin"))
    assert done.returncode == 0, done.stdout
    assert task_states(done) == {"preflight": "ok", **dict.fromkeys(_PARTS, "changed"), "verify": "ok"}
    return host


def test_check_mode_says_what_would_change_and_changes_nothing(site: Site) -> None:
    host = site.hosts["twin"]
    host.reset()
    before = (etc(host), packages(host), docker_start(host))
    done = play("site", site.inventory("twin"), "--check", "--diff")
    assert done.returncode == 0, done.stdout
    assert task_states(done) == {"preflight": "ok", **dict.fromkeys(_PARTS, "changed"), "verify": "skipping"}
    assert re.search(r'^\+.*"path": "/usr/bin/gpuprov-container-runtime"', done.stdout, re.MULTILINE)
    assert (etc(host), packages(host), docker_start(host)) == before
    assert not (host.root / "var/lib/gpuprov").exists()


def test_a_second_run_changes_nothing_and_restarts_nothing(site: Site, twin: Host) -> None:
    before = (etc(twin), packages(twin), docker_start(twin))
    done = play("site", site.inventory("twin"))
    assert (done.returncode, recap(done, "twin")["changed"]) == (0, 0), done.stdout
    assert (etc(twin), packages(twin), docker_start(twin)) == before
