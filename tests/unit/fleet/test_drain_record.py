"""A killed controller: the next run knows who is drained, says so, and undrains them; a live one is left alone."""

from __future__ import annotations

import fcntl
import gc
import json
from pathlib import Path

import pytest

from gpuprov.agent.result import Drain
from gpuprov.fleet.history import MOST_RUNS, DrainKeeper, DrainRecord, left_records
from gpuprov.fleet.rolling import parse_rollout
from gpuprov.protocol.events import Finished, Sink
from gpuprov.protocol.request import Request
from tests.unit.fleet.test_rolling import Site, of, states
from tests.unit.fleet.test_window import BERLIN, clock


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/gpuprov/drains"


class Killed(BaseException):
    """Ends a run as a kill does: nothing that would come after it is done."""


def killed_while(site: Site, names: str, command: str, host: str, **more: object) -> None:
    """Run, and end the controller when this host begins with a command; all calls of before are forgotten."""
    real = site.answer

    def answer(name: str, request: Request, sink: Sink) -> Finished:
        if (request.command, name, request.check) == (command, host, False):
            raise Killed
        return real(name, request, sink)

    site.answer = answer  # type: ignore[method-assign]
    with pytest.raises(Killed):
        site.run(names, **more)  # type: ignore[arg-type]
    # The kernel closes a killed process's files.
    del site.fleet
    gc.collect()
    site.answer = real  # type: ignore[method-assign]
    site.calls.unlink()
    site.told.clear()


def test_the_next_run_says_who_is_drained_and_undrains_a_host_with_nothing_left_to_do(
    tmp_path: Path, folder: Path
) -> None:
    site = Site(tmp_path)
    rollout = parse_rollout("1", canary="1", window="00:00-24:00 UTC")
    killed_while(site, "abc", "verify", "a", rollout=rollout)
    (record,) = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert (record["order"], record["window"]) == (
        {"canary": ["a"], "batch 1 of 2": ["b"], "batch 2 of 2": ["c"]}, "00:00-24:00 UTC"
    )  # fmt: skip
    assert list(record["drains"]) == ["a"]
    site.disturbing, site.settled = "bc", "a"
    results = site.run("abc", rollout=rollout)
    cut, drained = site.told[:2]
    assert "was cut off: gpuprov install; its order: canary: a; batch 1 of 2: b; batch 2 of 2: c; window: 00:00" in cut
    assert drained.startswith("a is drained since 2") and "this run undrains it once verify is green" in drained
    assert (of(site, "a"), of(site, "b")[1]) == (["look", "calm", "verify", "undrain"], "drain")
    assert states(results) == ["undrained"] * 3
    assert list(folder.iterdir()) == []


def test_a_host_that_still_has_to_stop_containers_is_drained_again(tmp_path: Path) -> None:
    site = Site(tmp_path)
    killed_while(site, "a", "install", "a")
    site.run("a")
    assert of(site, "a") == ["look", "drain", "install", "verify", "undrain"]


def test_a_host_that_is_not_green_stays_in_the_record_until_a_run_finds_it_green(tmp_path: Path, folder: Path) -> None:
    site = Site(tmp_path)
    site.ill = "a"
    site.run("a")
    (record,) = folder.glob("*.json")
    assert json.loads(record.read_text())["ended"] is True
    site.ill, site.disturbing, site.settled = "", "", "a"
    site.told.clear()
    site.run("b")
    assert "this run does not have it; by hand: " in site.told[0] and "cut off" not in site.told[0]
    site.calls.unlink()
    assert states(site.run("ab")) == ["undrained", ""]
    assert of(site, "a") == ["look", "calm", "verify", "undrain"]
    assert list(folder.iterdir()) == []


def test_a_check_says_who_is_drained_and_takes_nothing_over(tmp_path: Path, folder: Path) -> None:
    site = Site(tmp_path)
    killed_while(site, "a", "install", "a")
    before = sorted(folder.iterdir())
    site.run("a", check=True)
    assert any(line.startswith("a is drained since") for line in site.told)
    assert (of(site, "a"), sorted(folder.iterdir())) == (["look"], before)


def test_a_host_that_has_begun_is_finished_outside_of_the_window(tmp_path: Path) -> None:
    site = Site(tmp_path)
    killed_while(site, "ab", "install", "a")
    closed = parse_rollout(window=f"Sat 02:00-06:00 {BERLIN}")
    results = site.run("ab", rollout=closed, clock=clock("2026-11-27 14:05"))
    assert [one.begun for one in results] == [True, False]
    assert of(site, "a")[-1] == "undrain"


def test_window_holds_for_a_drained_host_where_the_run_does_not_drain(tmp_path: Path, folder: Path) -> None:
    site = Site(tmp_path)
    killed_while(site, "a", "install", "a")
    closed = parse_rollout(window=f"Sat 02:00-06:00 {BERLIN}")
    (result,) = site.run("a", rollout=closed, clock=clock("2026-11-27 14:05"), drain=False)
    assert (result.begun, of(site, "a"), len(list(folder.glob("*.json")))) == (False, [], 1)


def test_record_keeps_the_command_that_undrains_if_the_next_run_names_none(tmp_path: Path, folder: Path) -> None:
    site = Site(tmp_path)
    killed_while(site, "a", "install", "a")
    site.disturbing, site.settled = "", "a"
    site.run("a", after=False)
    (kept,) = (json.loads(path.read_text())["drains"]["a"] for path in folder.glob("*.json"))
    assert kept["after"].endswith("undrain a")


def test_a_run_over_a_long_list_of_hosts_begins(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.hosts = (",".join(f"gpu{number:03}" for number in range(99)),)
    assert states(site.run("a")) == ["undrained"]


def record(run: str, inventory: str = "i.ini") -> DrainRecord:
    return DrainRecord(run, "gpuprov install", (inventory,), {"": ("a",)})


def test_records_of_live_runs_other_inventories_and_broken_ones_are_left_alone(folder: Path) -> None:
    live = DrainKeeper(record("20261123T100000Z-1"), (), pytest.fail)
    live.keep("a", Drain("drained", "drain a"))
    assert left_records(("i.ini",)) == ()
    live._held.close()
    (folder / "x.json").write_text("[" * 9999)
    assert left_records(("other.ini",)) == ()
    assert [list(one.drains) for one in left_records(("i.ini",))] == [["a"]]


def test_record_at_which_another_run_looks_is_not_held(folder: Path) -> None:
    keeper = DrainKeeper(record("20261123T100000Z-1"), (), pytest.fail)
    keeper.keep("a", Drain("drained", "drain a"))
    keeper._held.close()
    with (folder / "20261123T100000Z-1.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert len(left_records(("i.ini",))) == 1


def test_records_are_bounded_and_their_failure_ends_no_run(folder: Path) -> None:
    told: list[str] = []
    for number in range(MOST_RUNS + 3):
        keeper = DrainKeeper(record(f"20261123T100000Z-{number:03}"), (), told.append)
        keeper.keep("a", Drain("drained", "drain a"))
        keeper.end()
    assert (len(list(folder.glob("*.json"))), told) == (MOST_RUNS, [])
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("")
    DrainKeeper(record("20261123T100000Z-1"), (), told.append).keep("a", Drain("drained", "drain a"))
    assert told and all(one.startswith("warning: it is not recorded which hosts are drained: ") for one in told)
