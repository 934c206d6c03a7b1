"""IMEX's unit and its control program: the commands, what fails in them, and what a domain's state means."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.changes import Change
from gpuprov.driver import imex
from gpuprov.driver.imex import RunImex, StopImex, UnmaskImex
from gpuprov.facts.gpus import IMEX_CONFIG as CONFIG
from gpuprov.facts.gpus import IMEX_NODES as NODES
from gpuprov.facts.gpus import IMEX_PROGRAM as PROGRAM
from gpuprov.facts.gpus import IMEX_UNIT as UNIT
from gpuprov.facts.host import gather
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.spec import HostSpec
from tests import simgpu
from tests.unit.ask import check_of
from tests.unit.imex_host import Node, Rack
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted
from tests.unit.test_imex import answering, install, of_domain, spec

pytestmark = pytest.mark.root
SPEC = HostSpec(imex_domain="rack1", imex_nodes=("10.0.0.1 gpu1", "10.0.0.2"))


class Unit(Scripted):
    """A host on which one verb of systemctl fails, and whose control program gives an answer; its clock is its own."""

    def __init__(self, root: Path, *, fails: str = "", said: str = "") -> None:
        super().__init__(root)
        self.fails, self.said, self.seconds = fails, said, 100.0
        for path in ("/etc/nvidia-imex", "/etc/modprobe.d"):
            self.make_directory(path)

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if argv[0] == "nvidia-imex-ctl":
            return self.said
        if argv[0] == "journalctl":
            return "its last words" if argv[-1] == UNIT else ""
        return (1, "", "it fails") if self.fails and self.fails in argv else ""


@pytest.mark.parametrize(
    ("change", "verb", "verbs"),
    [
        (UnmaskImex(), "unmask", ["unmask"]), (StopImex(), "disable", ["disable"]),
        (StopImex(mask=True), "mask", ["disable", "mask"]), (RunImex("580.1", (), ()), "enable", ["unmask", "enable"]),
        (RunImex("580.1", (), ()), "restart", ["unmask", "enable", "reset-failed", "restart"]),
    ],
)  # fmt: skip
def test_a_verb_of_systemctl_that_fails_is_told(tmp_path: Path, change: Change, verb: str, verbs: list[str]) -> None:
    host = Unit(tmp_path, fails=verb)
    problem = refused(change.apply, host, lambda *_: None)
    assert problem.what.startswith(f"{UNIT} ") and problem.next_step.startswith(f"systemctl status {UNIT}; ")
    assert "it fails" in problem.evidence and ("its last words" in problem.evidence) == (verb == "restart")
    assert [words[1] for words in host.asked if words[0] == "systemctl"] == verbs
    assert all(words[-1] == UNIT for words in host.asked if words[0] == "systemctl")


@pytest.mark.parametrize("mask", [True, False])
def test_imex_is_stopped_at_once_and_masked_on_request(tmp_path: Path, mask: bool) -> None:
    host = Unit(tmp_path)
    host.write("/etc/modprobe.d/gpuprov-imex.conf", b"")
    StopImex(mask).apply(host, lambda *_: None)
    assert host.asked == [("systemctl", "disable", "--now", UNIT), *([("systemctl", "mask", UNIT)] if mask else [])]
    assert not host.exists("/etc/modprobe.d/gpuprov-imex.conf")


@pytest.mark.parametrize(
    ("before", "verbs"),
    [
        ({"active": True, "enabled": True, "masked": False}, ["unmask", "enable", "restart"]),
        ({"active": False, "enabled": False, "masked": True}, ["mask", "disable", "stop"]),
        ({"active": False, "enabled": True}, ["unmask", "enable", "stop"]),
    ],
)
def test_the_undo_gives_the_unit_its_former_state(tmp_path: Path, before: dict[str, Any], verbs: list[str]) -> None:
    host = Unit(tmp_path)
    StopImex.undo(host, {**before, "files": []}, None)
    assert host.asked == [("systemctl", verb, UNIT) for verb in verbs]


@pytest.mark.parametrize("there", [True, False])
def test_the_packages_file_is_not_restored_without_the_package(tmp_path: Path, there: bool) -> None:
    host = Unit(tmp_path)
    if there:
        host.make_directory(PROGRAM.rpartition("/")[0])
        host.write(PROGRAM, b"")
    assert RunImex.skipped_paths(host, {}) == (() if there else (CONFIG,))


def test_a_key_with_blanks_is_replaced_and_comments_stay() -> None:
    text = imex.edited("IMEX_CMD_PORT = 1\n# IMEX_CMD_PORT\nOTHER=1", ("IMEX_CMD_PORT=2",))
    comment, other, mark, setting = text.splitlines()
    assert (comment, other, setting) == ("# IMEX_CMD_PORT", "OTHER=1", "IMEX_CMD_PORT=2")
    assert mark.startswith("# By gpuprov")
    assert text.endswith("\n") and imex.edited(text, ("IMEX_CMD_PORT=2",)) == text


def test_files_are_made_of_a_file_that_is_not_utf_8_and_of_none(tmp_path: Path) -> None:
    change = RunImex("580.1", ("10.0.0.1 gpu1", "10.0.0.2"), ("A=1",))
    of_none, of_other = change.files(lambda _: None), change.files(lambda _: b"B=\xff\n")
    assert of_none.keys() == of_other.keys() and of_other[CONFIG].decode().startswith("B=\N{REPLACEMENT CHARACTER}\n")
    assert b"10.0.0.1\n10.0.0.2\n" in of_none.values() and of_none[CONFIG].startswith(b"# By gpuprov")
    host = Unit(tmp_path)
    for path, content in of_none.items():
        host.write(path, content)
    assert change.diff(host) == ""
    host.write(CONFIG, b"B=1\n")
    assert f"+++ {CONFIG}" in change.diff(host) and "10.0.0.1" not in change.diff(host)
    host.write(NODES, b"")
    assert f"\n--- {NODES}" in change.diff(host)
    change.apply(host, lambda *_: None)
    assert {found.mode for path in of_none if (found := host.status(path))} == {0o644}


@pytest.mark.parametrize(
    ("values", "may"),
    [
        ({"imex": "service"}, True), ({"imex": "dra"}, True), ({}, False), ({"imex_nodes": ("10.0.0.1",)}, True),
        ({"imex": "off", "imex_nodes": ("10.0.0.1",)}, False),
    ],
)  # fmt: skip
def test_a_specification_may_need_imex(values: dict[str, Any], may: bool) -> None:
    assert imex.may_run(HostSpec(**values)) is may


def node(host: str, status: str = "READY", **states: str) -> dict[str, Any]:
    links = {str(number): {"host": to, "status": one} for number, (to, one) in enumerate(states.items())}
    return {"host": host, "status": status, **({"connections": links} if links else {})}


ONE, TWO = "10.0.0.1", "10.0.0.2"
_NOTHING = "nvidia-imex-ctl -N says nothing of it"
STATES: dict[str, tuple[Any, str]] = {
    "whole": ({"status": "UP", "nodes": {"0": node(ONE), "1": node(TWO)}}, ""),
    "connected": ({"status": "UP", "nodes": {"0": node(ONE, **{TWO: "CONNECTED"}), "1": node(TWO)}}, ""),
    "degraded alone": ({"status": "DEGRADED", "nodes": {"0": node(ONE), "1": node(TWO)}}, "it is DEGRADED; "),
    "not ready": (
        {"status": "UP", "nodes": {"0": node(ONE, "STARTING"), "1": node(TWO, "GONE")}},
        f"it is UP; gpu1 ({ONE}) is STARTING, {TWO} is GONE",
    ),
    "not connected": (
        {"status": "UP", "nodes": {"0": node(ONE, **{TWO: "REFUSED"}), "1": node(TWO, **{ONE: "CONNECTED"})}},
        f"it is UP; gpu1 ({ONE}) to {TWO}: REFUSED",
    ),
    "a node that is gone knows no connection": (
        {"status": "UP", "nodes": {"0": node(ONE, **{TWO: "REFUSED"}), "1": node(TWO, "GONE", **{ONE: "REFUSED"})}},
        f"it is UP; {TWO} is GONE",
    ),
    "a host outside the domain": (
        {"status": "UP", "nodes": {"0": node(ONE, **{"10.0.0.9": "REFUSED"}), "1": node(TWO)}}, "",
    ),
    "other nodes": ({"status": "UP", "nodes": {"0": node(ONE), "1": node("10.0.0.3")}}, f"{ONE}, 10.0.0.3"),
    "one too many": (
        {"status": "UP", "nodes": {str(last): node(f"10.0.0.{last}") for last in (1, 2, 3)}}, f"{ONE}, {TWO}, 10.0.0.3",
    ),
    "no status": ({"nodes": {"0": node(ONE), "1": node(TWO)}}, _NOTHING),
    "a list of nodes": ({"status": "UP", "nodes": []}, _NOTHING),
    "a number for a node": ({"status": "UP", "nodes": {"0": 1}}, _NOTHING),
    "something else": ([], _NOTHING),
    "no JSON": ("no", _NOTHING),
    "no words": ("", _NOTHING),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_what_is_wrong_with_a_domain_is_named_after_a_wait(tmp_path: Path, name: str) -> None:
    said, fault = STATES[name]
    host = Unit(tmp_path, said=said if isinstance(said, str) else json.dumps(said))
    if not fault:
        assert imex.verify_domain(host, SPEC) == ("rack1, 2 nodes", "")
        assert host.asked == [("nvidia-imex-ctl", "-N", "-j")] and host.timeouts == [60]
        return
    problem = refused(imex.verify_domain, host, SPEC)
    assert "the IMEX domain rack1 is not whole" in problem.what
    assert problem.evidence == fault if fault.startswith("it is") else fault in problem.evidence
    assert problem.next_step
    assert (host.seconds, len(host.asked)) == (120, 11)


@pytest.mark.parametrize("asked", ["--version", "is-active", "is-enabled"])
def test_silent_one_is_not_restarted_or_stopped(tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rack = Rack()
    node, *others = (Node(tmp_path / f"gpu{number}", rack, f"10.0.0.{number}") for number in (1, 2, 3))
    for one in (node, *others):
        simgpu.install_tree(one.root)
        install(one, of_domain())
    command = (PROGRAM, asked) if asked == "--version" else ("systemctl", asked, UNIT)
    answering(monkeypatch, node, command, 124, "")
    for wanted in (of_domain(), spec(imex="off"), spec(imex="dra")):
        plan = make_plan(gather(node), wanted)
        (problem,) = plan.problems
        assert (plan.changes, problem.what) == ((), "whether IMEX runs on this host is not known")
        assert asked in problem.evidence
    assert make_plan(gather(node), spec()).problems == ()
    assert check_of("IMEX domain", node, of_domain()).status == "ok"
