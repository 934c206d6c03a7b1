"""The example inventory as both ways to a host read it: Ansible's own program, and gpuprov."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.playbook_task import task_request
from gpuprov.fleet.inventory import HostTarget, read_inventory
from gpuprov.protocol.spec import spec_to_json

CLONE = Path(__file__).parents[2]
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
