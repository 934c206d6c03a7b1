"""The same machine under two names: what tells machines apart, and who comes first in a playbook."""

from __future__ import annotations

import multiprocessing
import subprocess
from pathlib import Path

import pytest

from gpuprov.agent.probe import PROBE, claim_in, local_machine, machine_of, parse_probe
from gpuprov.agent.result import HostResult
from gpuprov.core.system import System
from gpuprov.fleet.grouping import spreads
from gpuprov.fleet.report import last_line
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import CheckDone
from gpuprov.protocol.request import Request


def test_the_probe_and_this_machine_itself_say_the_same() -> None:
    done = subprocess.run(("sh", "-s", "0" * 64), input=PROBE, capture_output=True, text=True, check=True, timeout=60)
    probe = parse_probe(done.stdout)
    assert probe is not None
    assert len(probe.machine.split()) == 3
    assert probe.machine == local_machine(System("/"))


@pytest.mark.parametrize("text", ["", "  ", "machineid bootid", "bootid pid:[1]"])
def test_what_is_not_known_is_no_machine(text: str) -> None:
    assert machine_of(text) == ""


@pytest.mark.parametrize(
    ("request_", "changes"),
    [
        (Request("install"), True), (Request("rollback"), True), (Request("uninstall"), True),
        (Request("doctor", fix=True), True), (Request("doctor"), False), (Request("verify"), False),
        (Request("facts"), False), (Request("install", check=True), False),
        (Request("doctor", fix=True, check=True), False),
    ],
)  # fmt: skip
def test_only_what_changes_a_host_gets_in_the_way(request_: Request, changes: bool) -> None:
    assert request_.changes_the_host is changes


def test_the_first_name_keeps_the_machine(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    assert claim_in(folder, "a", "") == ""
    assert [claim_in(folder, name, "m 1 2") for name in ("a", "b", "a")] == ["", "a", ""]
    assert claim_in(folder, "b", "m 2 2") == ""
    assert len(list(folder.iterdir())) == 2


def _claim(folder: Path, name: str) -> str:
    return claim_in(folder, name, "m 1 2")


def test_of_many_processes_at_once_one_is_first(tmp_path: Path) -> None:
    names = [f"host{number}" for number in range(16)]
    with multiprocessing.Pool(8) as pool:
        others = pool.starmap(_claim, [(tmp_path / "claims", name) for name in names])
    first = next(name for name, other in zip(names, others) if not other)
    assert set(others) == {"", first}
    assert others.count("") == 1


def test_machines_are_counted_once() -> None:
    check = CheckDone("container, all GPUs", "ok", "8 GPUs", "8 GPUs")
    versions = {"driver": "550.163.01", "gpus": "8"}
    names = (("a", ""), ("b", "a"), ("c", ""))
    results = [
        HostResult(name, ExitCode.DONE, 1, checks=(check,), versions=versions, same_as=same) for name, same in names
    ]
    assert last_line("verify", results, check=False, next_command="").endswith("containers see 8 + 8 GPUs")
    assert "2 changes" in last_line("install", results, check=True, next_command="")
    assert {len(versions[0][1]) for _, versions in spreads(results)} == {2}
