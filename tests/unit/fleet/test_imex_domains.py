"""IMEX domains over hosts: one list from the whole inventory, never a part of a domain, at once or not at all."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.fleet.command import run_command
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import Options
from gpuprov.fleet.rolling import HostCommands, make_batches, parse_rollout, require_whole_domains
from gpuprov.fleet.run import Fleet
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import Finished, Planned, Sink
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import parse_spec
from tests.clock import clock_of
from tests.unit.fleet.fleets import played
from tests.unit.fleet.test_inventory import DRIVER, error_of, read

_HOSTS = """\
gpu10 ansible_host=10.0.0.10
gpu2 ansible_host=10.0.0.2
gpu1 ansible_host=jump.example gpuprov_imex_address=10.0.0.1
gpu11 ansible_host=10.0.0.11 gpuprov_imex=off
other ansible_host=10.0.0.99
"""
_ALL = "10.0.0.1 gpu1", "10.0.0.10 gpu10", "10.0.0.2 gpu2"
_GROUP = "[rack1:vars]\ngpuprov_imex_domain=rack1\n"
# Ways in which hosts are told that they are of a domain.
FORMS = {
    "a group of that name": {"hosts": f"{_HOSTS}[rack1]\ngpu[1:2]\ngpu[10:11]\n{_GROUP}"},
    "each host": {"hosts": _HOSTS, **{f"host_vars/gpu{n}.yml": "gpuprov_imex_domain: rack1\n" for n in (1, 2, 10, 11)}},
    "another group": {
        "hosts": f"{_HOSTS}[trays]\ngpu[1:2]\ngpu[10:11]\n",
        "group_vars/trays.yml": "number: 1\ngpuprov_imex_domain: 'rack{{ number }}'\n",
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep records of drained hosts from other tests: the next run over the same inventory would speak of them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limit", ["", "gpu10", "gpu2:other"])
def test_each_node_gets_the_whole_list_in_one_order(tmp_path: Path, form: str, limit: str) -> None:
    found = read(tmp_path, FORMS[form], limit=limit)
    nodes = {name: target.spec.imex_nodes for name, target in found.items()}
    assert nodes.pop("gpu11", ()) == nodes.pop("other", ()) == ()
    assert nodes and {*nodes.values()} == {_ALL}
    assert all(found[name].spec.imex_domain == "rack1" for name in nodes)


def test_a_list_that_is_given_stays(tmp_path: Path) -> None:
    text = 'gpu1 ansible_host=10.0.0.1 gpuprov_imex_domain=rack1 gpuprov_imex_nodes=\'["10.0.0.7", "10.0.0.1"]\'\n'
    assert read(tmp_path, {"hosts": text})["gpu1"].spec.imex_nodes == ("10.0.0.7", "10.0.0.1")


def test_a_domain_may_be_a_number(tmp_path: Path) -> None:
    found = read(tmp_path, {"hosts": "[all]\ngpu1\ngpu2\n[all:vars]\ngpuprov_imex_domain=7\n",
                            **{f"host_vars/gpu{n}.yml": f"ansible_host: 10.0.0.{n}\n" for n in (1, 2)}})  # fmt: skip
    assert found["gpu2"].spec.imex_nodes == ("10.0.0.1 gpu1", "10.0.0.2 gpu2")


WRONG = {
    "a name": (f"[rack1]\ngpu1\n{_GROUP}", "needs an address of gpu1 that is its own, and no name"),
    "one address twice": (f"[rack1]\na ansible_host=::1\nb ansible_host=::1\n{_GROUP}", "::1; a has it too"),
    "not in the group": (
        f"x ansible_host=10.0.0.9 gpuprov_imex_domain=rack1\n[rack1]\na ansible_host=10.0.0.1\n{_GROUP}",
        "x names the IMEX domain rack1 and is not in the group rack1",
    ),
    "does not name it": (
        "[rack1]\na ansible_host=10.0.0.1 gpuprov_imex_domain=rack1\nb ansible_host=10.0.0.2\n",
        "b is in the group rack1 and does not name it as its IMEX domain",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_would_give_nodes_different_lists_is_refused(tmp_path: Path, name: str) -> None:
    text, said = WRONG[name]
    assert said in str(error_of(tmp_path, {"hosts": text}))


def rack(*numbers: int, domain: str = "rack1") -> list[HostTarget]:
    names = [f"{domain}-{number}" for number in numbers]
    nodes = [f"10.0.{len(domain)}.{number} {name}" for number, name in zip(numbers, names)]
    spec = parse_spec({"imex_domain": domain, "imex_nodes": nodes})
    return [HostTarget(name, spec, connection="local") for name in names]


_FREE = HostTarget("free", parse_spec({}), connection="local")


@pytest.mark.parametrize(
    ("command", "more", "refused"),
    [
        ("install", {}, True), ("rollback", {}, True), ("uninstall", {}, True), ("doctor", {"fix": True}, True),
        ("install", {"check": True}, False), ("verify", {}, False), ("doctor", {}, False), ("facts", {}, False),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_over_a_part_of_a_domain_is_refused(command: str, more: dict[str, Any], refused: bool) -> None:
    hosts, request = rack(1, 2, 3), Request(command, **more)
    require_whole_domains([*hosts, _FREE], request, rollback=False)
    if not refused:
        require_whole_domains(hosts[:1], request, rollback=False)
        return
    with pytest.raises(GpuprovError) as raised:
        require_whole_domains([*hosts[:2], _FREE], request, rollback=False)
    assert raised.value.exit_code == ExitCode.USAGE
    assert "the IMEX domain rack1 must change as a whole, and this run leaves out rack1-3" in str(raised.value)


def test_a_single_host_of_a_domain_is_not_rolled_back() -> None:
    with pytest.raises(GpuprovError, match="--rollback-on-failure would divide an IMEX domain"):
        require_whole_domains(rack(1, 2), Request("install"), rollback=True)
    require_whole_domains([_FREE], Request("install"), rollback=True)


# --serial, --canary → the names of the batches' hosts, by their first letters.
BATCHES = [
    ("1", "", ["aaa", "bb", "f"]), ("2", "", ["aaa", "bb", "f"]), ("4", "", ["aaabb", "f"]),
    ("50%", "", ["aaa", "bbf"]), ("", "1", ["aaa", "bbf"]), ("", "free", ["f", "aaabb"]),
    ("1", "b-2", ["bb", "aaa", "f"]),
]  # fmt: skip


@pytest.mark.parametrize(("serial", "canary", "names"), BATCHES, ids=str)
def test_a_batch_takes_whole_domains(serial: str, canary: str, names: list[str]) -> None:
    a, b = rack(1, 2, 3, domain="a"), rack(1, 2, domain="b")
    batches = make_batches([*a, *b, _FREE], parse_rollout(serial, canary=canary))
    assert ["".join(target.name[0] for target in batch.targets) for batch in batches] == names


def test_batches_of_many_hosts_compare_no_two_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [replace(_FREE, name=f"gpu{number}") for number in range(50)]
    monkeypatch.setattr(HostTarget, "__eq__", lambda one, other: pytest.fail("a thousand hosts are a million pairs"))
    assert [len(batch.targets) for batch in make_batches(hosts, parse_rollout("20%"))] == [10] * 5


def words_of(hosts: list[HostTarget], **options: Any) -> list[tuple[bool, str]]:
    """Run over these hosts, one at a time; return whether each has begun and how it ended."""
    fleet = Fleet(lambda: pytest.fail("no agent"), Options("install", forks=1), **options)
    results = fleet.run(hosts, Request("install"), lambda host, event: None)
    return [(result.begun, result.word) for result in results]


def test_all_hosts_of_a_domain_run_at_once_with_fewer_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)

    def run_host(fleet: Fleet, request: Request, target: HostTarget, sink: Sink) -> None:
        together.wait(timeout=60)
        sink(Finished(0))

    monkeypatch.setattr(Fleet, "run_host", run_host)
    assert words_of(rack(1, 2, 3)) == [(True, "done")] * 3


def test_no_host_is_verified_before_the_others_of_its_domain_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two domains whose hosts alternate, with places for one: neither may wait for hosts that find no place."""
    ran: list[tuple[str, str]] = []
    waits = {"a": threading.Event(), "b": threading.Event()}

    def answer(name: str, request: Request, sink: Sink) -> Finished:
        if not request.check:
            if request.command == "verify":
                waits[name[0]].set()
            assert name.endswith("1") or waits[name[0]].wait(timeout=60)
            ran.append((request.command, name))
        sink(Planned((), disturbs=True))
        return Finished(0, changed=1)

    def sleep(seconds: float) -> None:
        waits[here.name[0]].set()
        time.sleep(0.01)

    here = played(monkeypatch, answer)
    monkeypatch.setattr(clock_of(monkeypatch, "gpuprov.fleet.run"), "sleep", sleep)
    hosts = [host for pair in zip(rack(1, 2, 3, domain="a"), rack(1, 2, 3, domain="b")) for host in pair]
    assert words_of(hosts, commands=HostCommands(("true",), ("true",))) == [(True, "done")] * 6
    for domain in "ab":
        of_it = [command for command, name in ran if name[0] == domain]
        assert of_it == ["install"] * 3 + ["verify"] * 3


@pytest.mark.parametrize("stop", ["max-fail", "window"])
def test_a_domain_that_has_begun_goes_on_as_a_whole(monkeypatch: pytest.MonkeyPatch, stop: str) -> None:
    a, b, c = rack(1, 2, domain="a"), rack(1, 2, 3, domain="b"), rack(1, 2, domain="c")
    begun = threading.Event()

    def run_host(fleet: Fleet, request: Request, target: HostTarget, sink: Sink) -> None:
        if target.name == "b-1":
            begun.set()
        assert begun.wait(timeout=60)
        if target.name == "a-1":
            raise GpuprovError("no route")
        while target.name in ("a-2", "b-1") and fleet.stopped is None and stop == "max-fail":
            time.sleep(0.01)
        sink(Finished(0))

    monkeypatch.setattr(Fleet, "run_host", run_host)
    rollout = parse_rollout(max_fail="0") if stop == "max-fail" else parse_rollout(window="Thu 00:00-24:00 UTC")
    ended = words_of([*a, *b, *c], rollout=rollout, clock=lambda: 86400.0 if begun.is_set() else 0.0)
    assert [has_begun for has_begun, _ in ended] == [True] * 5 + [False] * 2


@pytest.mark.parametrize("drains", [False, True])
def test_hosts_of_a_failed_domain_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, drains: bool) -> None:
    """Domain b has two places while a-2 runs: b-1 fails, b-2 runs (or is only looked at), b-3 has not begun."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ran, second, ended = list[str](), threading.Event(), defaultdict[str, threading.Event](threading.Event)

    def answer(name: str, request: Request, sink: Sink) -> Finished:
        sink(Planned((), disturbs=True))
        if not request.check or not drains:
            ran.append(name)
        if name == "b-1" and not request.check:
            assert second.wait(timeout=60)
            return Finished(1, problems=(Problem("dpkg is locked"),), changed=1)
        if name == "a-2":
            assert ended["b-3"].wait(timeout=60)
        if name == "b-2":
            second.set()
            assert ended["b-1"].wait(timeout=60)
        return Finished(0)

    class Pool(ThreadPoolExecutor):
        """Tells which hosts have ended, with all that the run does about them."""

        def submit(self, call: Callable[..., Any], /, *words: Any, **more: Any) -> Future[Any]:
            (name,) = (one.name for one in words if isinstance(one, HostTarget))
            future = super().submit(call, *words, **more)
            future.add_done_callback(lambda _: ended[name].set())
            return future

    played(monkeypatch, answer)
    monkeypatch.setattr("gpuprov.fleet.run.ThreadPoolExecutor", Pool)
    commands = HostCommands(("true",), ()) if drains else HostCommands()
    fleet = Fleet(lambda: pytest.fail("no agent"), Options("install", forks=3), commands=commands, again="gpuprov x")
    results = fleet.run([*rack(1, 2, domain="a"), *rack(1, 2, 3, domain="b")], Request("install"), lambda *_: None)
    assert [result.word for result in results] == ["done", "done", "failed", "failed" if drains else "done", "not run"]
    assert sorted(ran) == ["a-1", "a-2", "b-1", *([] if drains else ["b-2"])]
    stop = results[4].problems[0]
    assert (stop.what, stop.evidence) == ("not run: b-1 of the IMEX domain b failed", "dpkg is locked")
    assert not drains or results[3].problems == (stop,)
    assert all(
        one.problems[-1].next_step == "correct what b-1 names, then: gpuprov x" for one in (results[2], results[4])
    )
    assert "the IMEX domain b " in results[2].problems[-1].what


def test_domain_with_an_unchangeable_host_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, bool]] = []

    def run_host(fleet: Fleet, request: Request, target: HostTarget, sink: Sink) -> None:
        ran.append((target.name, request.check))
        if target.name == "b":
            raise GpuprovError("no route", exit_code=ExitCode.UNREACHABLE)
        sink(Finished(0))

    monkeypatch.setattr(Fleet, "run_host", run_host)
    hosts = "".join(f"{name} ansible_host=10.0.0.{number}\n" for number, name in enumerate("abc", 1))
    (tmp_path / "hosts").write_text(f"free ansible_connection=local\n[rack1]\n{hosts}{_GROUP}[all:vars]\n{DRIVER}\n")
    options = Options("install", hosts=(str(tmp_path / "hosts"),))
    with pytest.raises(GpuprovError) as raised:
        run_command(options)
    assert [one.what for one in raised.value.problems] == ["nothing is changed: b of an IMEX domain can't be"]
    assert raised.value.problems[0].evidence == "no route"
    assert sorted(ran) == [("a", True), ("b", True), ("c", True)]

    ran.clear()
    run_command(replace(options, limit="!rack1"))
    assert ran == [("free", False)]
    run_command(replace(options, check=True))
    assert {check for name, check in ran if name != "free"} == {True}


def test_ctrl_c_while_domains_are_planned_begins_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    together = threading.Barrier(2)

    def run_host(fleet: Fleet, request: Request, target: HostTarget, sink: Sink) -> None:
        ran.append(request.check)
        together.wait(timeout=60)
        fleet.interrupt()
        sink(Finished(0))

    monkeypatch.setattr(Fleet, "run_host", run_host)
    hosts = "".join(f"{name} ansible_host=10.0.0.{number}\n" for number, name in enumerate("ab", 1))
    (tmp_path / "hosts").write_text(f"[rack1]\n{hosts}{_GROUP}[all:vars]\n{DRIVER}\n")
    with pytest.raises(SystemExit) as raised:
        run_command(Options("install", hosts=(str(tmp_path / "hosts"),)))
    assert raised.value.code == ExitCode.INTERRUPTED
    assert ran and all(ran)
