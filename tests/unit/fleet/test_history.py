"""Runs that are kept: what is in them, what never is, how many, for whom; and the command that shows them."""

import fcntl
import gc
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuprov.agent.result import Drain, HostResult, MadeChange
from gpuprov.cli.main import cli
from gpuprov.fleet import history
from gpuprov.fleet.history import (
    MOST_RUNS,
    DrainKeeper,
    DrainRecord,
    Run,
    left_records,
    load,
    save,
    without_secrets,
    write_log,
)
from gpuprov.fleet.rolling import parse_rollout
from gpuprov.protocol import tables
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, UsageError
from gpuprov.protocol.events import CheckDone, ChosenDriver, Finished, PlannedChange, Sink
from gpuprov.protocol.request import Request
from tests.unit.fleet.test_batches import BERLIN, clock
from tests.unit.fleet.test_rolling import Site, of, site, states

__all__ = ["site"]

NEWEST = tables.PACKAGED.resolved("580")
RESULT = HostResult(
    "gpu1", ExitCode.FAILED, 3, 2.5, (Problem("full", "df", "make room"),), "s", {"driver": "550"},
    (CheckDone("driver", "failed", "a", "b", "c"),), (PlannedChange("k", "packages", "install", "+secret file"),),
    (MadeChange("k", "packages", "install", 1.5), MadeChange("l", "docker", "restart")), {"raw": "facts"},
)  # fmt: skip


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/gpuprov/runs"


def run(number: int = 1, *results: HostResult) -> Run:
    return Run(f"20261121T0815{number:02}-7", "install", "2026-11-21T08:15:00+0000", 9.5, results or (RESULT,),
               inventory=("hosts",), limit="gpu")  # fmt: skip


def test_run_comes_back_as_it_was_but_for_diffs_and_facts() -> None:
    save(run())
    found = load()
    assert (found.command, found.seconds, found.inventory, found.limit, found.exit_code) == (
        "install", 9.5, ("hosts",), "gpu", ExitCode.FAILED,
    )  # fmt: skip
    result = found.results[0]
    assert (result.problems, result.checks, result.made, result.versions) == (
        RESULT.problems, RESULT.checks, RESULT.made, {"driver": "550"},
    )  # fmt: skip
    assert result.plan == (PlannedChange("k", "packages", "install", ""),)
    assert result.facts is None


def chose(host: str, version: str, gpus: str = "H100", driver: str = "runfile", code: int = 0) -> HostResult:
    return HostResult(host, ExitCode(code), choice=ChosenDriver(gpus, driver, version, "why"))


def test_most_hosts_with_the_same_gpus_say_which_driver_a_new_one_gets() -> None:
    save(replace(run(0, chose("g1", "1.1"), chose("g2", "1.1"), chose("g3", "1.1")), limit=""))  # before the last whole
    save(replace(run(1, chose("g1", "1.1"), chose("g2", "2.2"), chose("l1", "4.4", "L4")), limit=""))
    save(run(2, chose("g3", "2.2"), chose("g4", "9.9", driver="preinstalled"), chose("g5", "9.9", gpus="")))
    # Stopped early: the hosts of one batch are not the fleet.
    save(replace(run(3, chose("g1", "2.2"), chose("g6", "9.9", code=1), chose("g7", "$(id)")), limit=""))
    save(replace(run(4, chose("g8", "9.9")), inventory=("others",)))
    save(replace(run(5, chose("g9", "9.9")), check=True))
    assert history.drivers_by_gpus(("hosts",)) == {"H100": "2.2", "L4": "4.4"}
    assert history.drivers_by_gpus(("none",)) == {}


def test_hosts_that_differ_in_the_driver_are_named_with_one_command(tmp_path: Path) -> None:
    kept = run(
        0, chose("g1", "580.9.1"), chose("g2", "580.10.1"), chose("l1", "590.1", "L4"), chose("x", "$(id)", "L4")
    )
    one, *_, last = history.driver_choices(kept.results, ("lab/hosts.yml",))
    assert one == "driver 580.9.1 on g1: why"
    assert last == (
        "hosts with H100 differ in the driver; for one version: gpuprov options --hosts lab/hosts.yml "
        "-e gpuprov_driver_version=580.10.1 --write lab/group_vars/GROUP.yml"
    )
    lying = run(0, chose("g1", "580.9.1"), chose("g2", "580.9.1"), chose("g3", "999.9"))
    assert "gpuprov_driver_version=580.9.1 " in history.driver_choices(lying.results, ("hosts",))[-1]
    fixed = run(0, chose("g1", "580.9.1"), chose("g2", "580.9.1"), chose("g3", NEWEST), chose("g4", "999.9"))
    assert f"gpuprov_driver_version={NEWEST} " in history.driver_choices(fixed.results, ("hosts",))[-1]
    (folder := tmp_path / "lab").mkdir()
    assert f"--write {folder}/group_vars/gpu_hosts.yml" in history.driver_choices(fixed.results, (str(folder),))[-1]
    same = run(0, chose("g1", "580.9.1"), chose("g2", "580.9.1"))
    assert history.driver_choices(same.results, ("hosts",)) == ["driver 580.9.1 on g1, g2: why"]
    save(kept)
    done = CliRunner().invoke(cli, ["report"])
    assert one in done.output and "--write ./group_vars/GROUP.yml" in done.output
    path = save(kept).with_suffix(".html")
    assert CliRunner().invoke(cli, ["report", "--html", str(path)]).exit_code == 0
    assert one in path.read_text() and "differ in the driver" in path.read_text()
    assert CliRunner().invoke(cli, ["report", "--json"]).output.count('"why":"why"') == 4


@pytest.mark.parametrize("version", ["earlier", "newer"])
def test_run_that_another_version_kept_is_read(state: Path, version: str) -> None:
    path = save(run())
    data = json.loads(path.read_text())
    (check,) = data["results"][0]["checks"]
    if version == "earlier":
        check |= {"host": check.pop("on_host"), "container": check.pop("in_container")}
        data["format"] = 1
    else:
        data["results"][0]["of_a_newer_version"] = 1
    path.write_text(json.dumps(data))
    assert load().results[0].checks == RESULT.checks


def test_runs_are_for_their_user_alone(state: Path) -> None:
    path = save(run())
    assert state.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in state.iterdir()] == [path.name]
    state.chmod(0o755)
    save(run())
    assert state.stat().st_mode & 0o777 == 0o700


def test_fifty_runs_are_kept_and_files_of_others(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "notes.json").write_text("{}")
    for number in range(53):
        save(run(number))
    assert len(history.identifiers()) == 50
    assert (history.identifiers()[0], history.identifiers()[-1]) == ("20261121T081552-7", "20261121T081503-7")
    # The latest is kept, whatever the clock says.
    old = save(replace(run(), identifier="20250101T000000Z-1"))
    assert old.exists() and len(list(state.iterdir())) == 51
    assert (state / "notes.json").exists()


SECRETS = [
    ("the password hunter22 is wrong", "the password ••• is wrong"),
    ("http://user:sesame@proxy:3128/ refuses", "http://user:•••@proxy:3128/ refuses"),
    ("https://example.org/a:b@c", "https://example.org/a:b@c"),
    ("abc", "abc"),
]


@pytest.mark.parametrize(("said", "kept"), SECRETS, ids=[kept for _, kept in SECRETS])
def test_secrets_are_blotted_out(said: str, kept: str) -> None:
    assert without_secrets({"a": [said, 1, None]}, ("hunter22", "a", "")) == {"a": [kept, 1, None]}


def test_file_of_a_run_has_no_secret(state: Path) -> None:
    evil = HostResult("gpu1", ExitCode.FAILED, problems=(Problem("no", "sudo: hunter22"),), versions={"hunter22": "x"})
    assert "hunter22" not in save(run(1, evil), ("hunter22",)).read_text()
    assert "secret file" not in save(run(2)).read_text()


def test_half_a_character_from_a_host_is_no_obstacle() -> None:
    save(run(1, HostResult("gpu\udc80", ExitCode.DONE)))
    assert load().results[0].host == "gpu?"


WRONG = [
    ("", {}, "no run is kept here"),
    ("2025", {"20261121T081500-7": "{}"}, "there is no run 2025"),
    ("", {"20261121T081500-7": "{"}, "cannot be read"),
    ("", {"20261121T081500-7": '{"format": 0}'}, "format 0 is not known"),
    ("", {"20261121T081500-7": "[]"}, "cannot be read"),
    ("", {"20261121T081500-7": '{"format": 1, "results": [{}], "inventory": []}'}, "cannot be read"),
]


@pytest.mark.parametrize(("identifier", "files", "what"), WRONG, ids=[what for *_, what in WRONG])
def test_missing_or_broken_run_is_named(state: Path, identifier: str, files: dict[str, str], what: str) -> None:
    state.mkdir(parents=True)
    for name, text in files.items():
        (state / f"{name}.json").write_text(text)
    with pytest.raises(UsageError, match=re.escape(what)):
        load(identifier)


@pytest.mark.root
def test_a_folder_of_runs_that_is_closed_is_not_told_to_be_empty(state: Path) -> None:
    save(run(1))
    os.seteuid(4242)
    try:
        with pytest.raises(UsageError, match="holds none that this user can read"):
            load()
    finally:
        os.seteuid(0)


def test_the_whole_name_of_a_run_is_not_the_beginning_of_another() -> None:
    for process in (1, 12):
        save(replace(run(), identifier=f"20261121T081500Z-{process}"))
    assert load("20261121T081500Z-1").identifier == "20261121T081500Z-1"
    with pytest.raises(UsageError, match="more than one run begins with 20261121T081500Z"):
        load("20261121T081500Z")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_json_lacks_makes_a_kept_run_unreadable(number: str) -> None:
    path = save(run(1, HostResult("a", ExitCode.DONE, made=(MadeChange("k", "step", "summary", 4242.0),))))
    path.write_text(path.read_text().replace("4242.0", number))
    with pytest.raises(GpuprovError, match="cannot be read"):
        load()


# -- gpuprov report ------------------------------------------------------------------------------------------------


def called(*words: str) -> str:
    result = CliRunner().invoke(cli, ("report", *words))
    assert result.exit_code == 0, result.output
    return result.output


def test_report_shows_the_last_run_and_lists_the_latest_first() -> None:
    save(run(1))
    save(run(2, HostResult("gpu9", ExitCode.DONE)))
    assert "run 20261121T081502-7: gpuprov install on 1 host of hosts" in called()
    assert called().splitlines()[-1] == "1 host installed: 0 changes"
    assert "gpu1: full" in called("--run", "20261121T081501")
    lines = called("--list").splitlines()
    assert [line.split()[0] for line in lines] == ["run", "20261121T081502-7", "20261121T081501-7"]
    assert [entry["failed"] for entry in json.loads(called("--list", "--json"))] == [0, 1]


def test_a_broken_run_is_told_beside_the_list(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "20261121T081500-7.json").write_text("{")
    done = CliRunner().invoke(cli, ["report", "--list", "--json"])
    assert (done.exit_code, done.stdout) == (0, "[]\n")
    assert "the run 20261121T081500-7 cannot be read" in done.stderr


def test_report_for_programs_is_what_is_kept_and_the_page_is_written(tmp_path: Path) -> None:
    path = save(run(1))
    assert json.loads(called("--json")) == json.loads(path.read_text())
    assert called("--run", "20261121T081501", "--html", str(tmp_path / "a.html")) == ""
    assert "<!doctype html>" in (tmp_path / "a.html").read_text()


def test_names_are_in_utc_so_that_they_are_in_order_in_all_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summer time ends; the host moves."""
    named = []
    times = (("CET-1CEST", 1793154600), ("CET-1CEST", 1793158200), ("JST-9", 1793158300), ("UTC0", 1793158400))
    for zone, now in times:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        named.append(history.new_identifier(now))
        save(replace(run(), identifier=named[-1]))
    assert named == sorted(named) and named[0].startswith("20261028T")
    assert history.identifiers() == named[::-1] and load().identifier == named[-1]
    assert (found := history.before(load(named[1]))) is not None and found.identifier == named[0]


def test_a_home_that_is_not_there_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nonexistent"))
    with pytest.raises(OSError, match="no home directory"):
        save(run())
    assert "there is no home directory" in write_log(ValueError("x")).evidence
    assert not (tmp_path / "nonexistent").exists()


def test_a_relative_state_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG Base Directory Specification says: it would be another folder in each working directory."""
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history.state_folder() == tmp_path / ".local/state/gpuprov/runs"


# -- drained hosts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(state: Path) -> Path:
    return state.with_name("drains")


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


def test_the_next_run_says_who_is_drained_and_undrains_a_host_with_nothing_left_to_do(site: Site, folder: Path) -> None:
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


def test_a_host_that_still_has_to_stop_containers_is_drained_again(site: Site) -> None:
    killed_while(site, "a", "install", "a")
    site.run("a")
    assert of(site, "a") == ["look", "drain", "install", "verify", "undrain"]


def test_a_host_that_is_not_green_stays_in_the_record_until_a_run_finds_it_green(site: Site, folder: Path) -> None:
    site.ill = "a"
    site.run("a")
    (record,) = folder.glob("*.json")
    assert json.loads(record.read_text())["ended"] is True
    site.ill, site.disturbing, site.settled = "", "", "a"
    site.told.clear()
    site.run("b")
    assert "this run does not undrain it; by hand: " in site.told[0] and "cut off" not in site.told[0]
    site.calls.unlink()
    assert states(site.run("ab")) == ["undrained", ""]
    assert of(site, "a") == ["look", "calm", "verify", "undrain"]
    assert list(folder.iterdir()) == []


def test_a_check_says_who_is_drained_and_takes_nothing_over(site: Site, folder: Path) -> None:
    killed_while(site, "a", "install", "a")
    before = sorted(folder.iterdir())
    site.run("a", check=True)
    (told,) = [line for line in site.told if line.startswith("a is drained since")]
    assert "this run does not undrain it; by hand: " in told
    assert (of(site, "a"), sorted(folder.iterdir())) == (["look"], before)


def test_a_host_that_has_begun_is_finished_outside_of_the_window(site: Site) -> None:
    killed_while(site, "ab", "install", "a")
    closed = parse_rollout(window=f"Sat 02:00-06:00 {BERLIN}")
    results = site.run("ab", rollout=closed, clock=clock("2026-11-27 14:05"))
    assert [one.begun for one in results] == [True, False]
    assert of(site, "a")[-1] == "undrain"


def test_window_holds_for_a_drained_host_where_the_run_does_not_drain(site: Site, folder: Path) -> None:
    killed_while(site, "a", "install", "a")
    closed = parse_rollout(window=f"Sat 02:00-06:00 {BERLIN}")
    (result,) = site.run("a", rollout=closed, clock=clock("2026-11-27 14:05"), drain=False)
    assert (result.begun, of(site, "a"), len(list(folder.glob("*.json")))) == (False, [], 1)


def test_record_keeps_the_command_that_undrains_if_the_next_run_names_none(site: Site, folder: Path) -> None:
    killed_while(site, "a", "install", "a")
    site.disturbing, site.settled = "", "a"
    site.run("a", after=False)
    (kept,) = (json.loads(path.read_text())["drains"]["a"] for path in folder.glob("*.json"))
    assert kept["after"].endswith("undrain a")


def test_a_run_over_a_long_list_of_hosts_begins(site: Site) -> None:
    site.hosts = (",".join(f"gpu{number:03}" for number in range(99)),)
    assert states(site.run("a")) == ["undrained"]


def record(run: str, inventory: str = "i.ini") -> DrainRecord:
    return DrainRecord(run, "gpuprov install", (inventory,), {"": ("a",)})


def test_records_of_live_runs_other_inventories_and_broken_ones_are_left_alone(folder: Path) -> None:
    live = DrainKeeper(record("20261123T100000Z-1"), (), pytest.fail)
    live.keep("a", Drain("drained", "drain a"))
    assert left_records(("i.ini",)) == ()
    del live  # the kernel closes a killed process's files
    (folder / "x.json").write_text("[" * 9999)
    assert left_records(("other.ini",)) == ()
    assert [list(one.drains) for one in left_records(("i.ini",))] == [["a"]]


def test_record_at_which_another_run_looks_is_not_held(folder: Path) -> None:
    keeper = DrainKeeper(record("20261123T100000Z-1"), (), pytest.fail)
    keeper.keep("a", Drain("drained", "drain a"))
    del keeper
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
