"""`gpuprov accept` over hosts: outliers of a fleet, results that are kept and signed."""

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpuprov.agent.result import HostResult
from gpuprov.fleet import accepted, command, history, report
from gpuprov.fleet.history import Run
from gpuprov.fleet.options import Options
from gpuprov.fleet.run import Fleet
from gpuprov.protocol import codec
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import GpuMeasured, HealthFound


def gpus(host: int, **slow: Any) -> tuple[GpuMeasured, ...]:
    """Return 4 GPUs with some noise; `slow`: a GPU's rate by its index, a link by two."""
    names = [f"GPU-{host}-{number}" for number in range(4)]
    found = []
    for number, uuid in enumerate(names):
        noise = 1 + 0.002 * ((host * 7 + number * 3) % 5)
        peers = {f"peer {one}": 3e11 * noise * slow.get(f"link{min(number, other)}{max(number, other)}", 1.0)
                 for other, one in enumerate(names) if other != number}  # fmt: skip
        figures = {
            "rate": 100 * noise * slow.get(f"gpu{number}", 1.0),
            "to_device": 5e10 * noise,
            "clock": 1980.0,
            **peers,
        }
        found.append(GpuMeasured(str(number), uuid, "H100", figures))
    return tuple(found)


def fleet(changed: Mapping[int, dict[str, Any]]) -> list[HostResult]:
    return [
        HostResult(f"gpu0{host}", ExitCode.DONE, measured=gpus(host, **changed.get(host, {})), versions={"gpus": "4"})
        for host in range(8)
    ]


def found_in(results: tuple[HostResult, ...]) -> list[tuple[str, str, str]]:
    return [(one.host, found.gpu, found.what) for one in results for found in one.health]


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        # Less than five percent.
        ({2: {"gpu1": 0.96}}, []),
        # One GPU with slow links to all others.
        ({1: {"link01": 0.5, "link12": 0.5, "link13": 0.5}}, [("gpu01", "1", "slow link to GPU 0, 2, 3")]),
    ],
)
def test_outliers_of_a_fleet(changed: dict[int, dict[str, Any]], found: list[tuple[str, str, str]]) -> None:
    assert found_in(accepted.compared(fleet(changed), {}, ())) == found


def test_a_slow_gpu_and_a_flaky_link_are_named_and_nobody_else() -> None:
    results = accepted.compared(fleet({2: {"gpu1": 0.5}, 5: {"link03": 0.6}}), {}, ())
    assert found_in(results) == [("gpu02", "1", "slower than its like: rate"), ("gpu05", "0", "slow link to GPU 3")]
    assert {one.host for one in results if one.exit_code == ExitCode.DEGRADED} == {"gpu02", "gpu05"}
    slow = results[2].health[0]
    assert "50 % below 100" in slow.evidence
    assert "median of 32" in slow.evidence


def test_a_host_that_lies_does_not_decide_what_is_usual() -> None:
    """It claims to have ten times the GPUs of the others together, all of them fast."""
    honest = fleet({})
    claimed = tuple(replace(one, figures={"rate": 1e9, "to_device": 1e15}) for one in gpus(8) * 80)
    liar = HostResult("gpu08", ExitCode.DONE, measured=claimed, versions={"gpus": "4"})
    assert found_in(accepted.compared([liar, *honest], {}, ())) == []


def test_a_host_with_a_single_gpu_hides_no_slow_gpu_of_another() -> None:
    many = tuple(replace(one, figures={"rate": 100.0 + number}) for number, one in enumerate(gpus(0)))
    slow = (replace(many[0], figures={"rate": 50.0}), *many[1:])
    for single in (100.0, 1e9):
        other = (replace(gpus(1)[0], figures={"rate": single}),)
        results = [HostResult(name, ExitCode.DONE, measured=one, versions={"gpus": "4"})
                   for name, one in (("many", slow), ("single", other))]  # fmt: skip
        assert found_in(accepted.compared(results, {}, ())) == [("many", "0", "slower than its like: rate")]


def kept_run(folder: Path, results: tuple[HostResult, ...], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    run = Run("20261121T081500Z-7", "accept", "", 1.0, results)
    return accepted.write_records(run, accepted.read_records(), "", ())[0]


def test_a_host_is_compared_with_its_own_last_accepted_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = HostResult("a/../b", ExitCode.DONE, measured=gpus(0)[:1], versions={"gpus": "1"})
    path = kept_run(tmp_path, (one,), monkeypatch)
    assert path.parent == tmp_path / "gpuprov/accepted"
    assert path.stat().st_mode & 0o777 == 0o600
    slower = replace(one, measured=gpus(0, gpu0=0.8)[:1])
    for _ in range(2):
        # A slow result does not become the measure of the next one.
        results = accepted.compared((slower,), accepted.read_records(), ())
        assert found_in(results) == [("a/../b", "0", "slower than its like: rate")]
        assert "own last accepted" in results[0].health[0].evidence
        kept_run(tmp_path, results, monkeypatch)
    assert found_in(accepted.compared((one,), accepted.read_records(), ("other.ini",))) == []


def test_same_host_name_in_two_inventories_has_two_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    paths: list[Path] = []
    for number, (inventory, code) in enumerate(
        (("/a/hosts", ExitCode.DONE), ("/b/hosts", ExitCode.UNFIT), ("/a/hosts", ExitCode.UNFIT))
    ):
        result = HostResult("gpu01", code, measured=gpus(min(number, 1)))
        run = Run(f"20261121T081500Z-{number}", "accept", "", 1.0, (result,), inventory=(inventory,))
        paths += accepted.write_records(run, accepted.read_records(), "", ())
    assert [path.name for path in paths] == ["gpu01.json", "gpu01.1.json", "gpu01.json"]
    of_a, of_b = (codec.load(accepted.AcceptRecord, codec.parse(path.read_bytes())) for path in sorted(paths[1:])[::-1])
    assert (of_a.accepted, of_b.accepted) == (gpus(0), ())
    slow = HostResult("gpu01", ExitCode.DONE, measured=gpus(0, gpu0=0.5, gpu1=0.5, gpu2=0.5, gpu3=0.5))
    for inventory, seen in (("/a/hosts", True), ("/b/hosts", False)):
        assert bool(found_in(accepted.compared((slow,), accepted.read_records(), (inventory,)))) is seen


def test_a_signed_result_has_its_signature_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("gpuprov.bundle_create.create.sign", lambda system, content, key, environment: b"signature")
    found = HealthFound("unfit", "accept-failed", "0", "GPU-0", "it failed", "seen", "next")
    run = Run("20261121T081500Z-7", "accept", "", 1.0, (HostResult("a", ExitCode.UNFIT, health=(found,)),))
    (path,) = accepted.write_records(run, {}, "KEY", ())
    assert path.with_name("a.json.asc").read_bytes() == b"signature"
    accepted.write_records(run, {}, "", ())
    assert not path.with_name("a.json.asc").exists()


def test_half_of_a_fleet_that_became_slow_is_named() -> None:
    # The deviations are then as large as the loss.
    earlier = {
        Path(f"{host}.json"): accepted.AcceptRecord(f"gpu0{host}", "", "", 0, accepted=gpus(host)) for host in range(8)
    }
    half = {host: {f"gpu{number}": 0.7 for number in range(4)} for host in range(4)}
    results = accepted.compared(fleet(half), earlier, ())
    assert [one.host for one in results if one.exit_code == ExitCode.DEGRADED] == ["gpu00", "gpu01", "gpu02", "gpu03"]
    assert "30 % below" in results[0].health[0].evidence


def test_figures_that_no_gpu_has_are_left_out() -> None:
    hostile = [GpuMeasured("a", f"GPU-9-{one}", "H100", {"rate": one, "peer GPU-9-0": one}) for one in (0.0, 0.0, -1.0)]
    odd = HostResult("gpu09", ExitCode.DONE, measured=tuple(hostile), versions={"gpus": "many"})
    assert found_in(accepted.compared([*fleet({}), odd], {}, ())) == []
    # Nor does an index that is no number end the comparison.
    slow = replace(odd, measured=tuple(replace(one, gpu="a") for one in gpus(1, link01=0.5)))
    assert found_in(accepted.compared([*fleet({}), slow], {}, ())) == [("gpu09", "a", "slow link to GPU ")]


def test_a_run_that_failed_keeps_its_problems() -> None:
    lost = Problem("the connection was lost", "", "again")
    failed = replace(fleet({2: {"gpu1": 0.5}})[2], exit_code=ExitCode.FAILED, problems=(lost,))
    assert accepted.compared([*fleet({}), replace(failed, host="other")], {}, ())[-1].problems == (lost,)


def test_no_old_signature_lies_beside_a_new_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept_run(tmp_path, (HostResult("a", ExitCode.DONE, measured=gpus(0)),), monkeypatch)
    beside = path.with_name("a.json.asc")
    beside.write_bytes(b"old")

    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(accepted, "write_whole", full)
    with pytest.raises(OSError, match="No space"):
        kept_run(tmp_path, (HostResult("a", ExitCode.DONE, measured=gpus(0)),), monkeypatch)
    assert not beside.exists()


@pytest.mark.root
def test_a_key_that_can_not_sign_is_reported_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise GpuprovError("gpg could not sign with KEY", "", "")

    monkeypatch.setattr("gpuprov.bundle_create.create.sign", refuse)
    monkeypatch.setattr(Fleet, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(GpuprovError, match="could not sign"):
        command.run_command(Options("accept", sign="KEY"))


@pytest.mark.root
def test_results_that_can_not_be_kept_end_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(Fleet, "run", lambda *_: (HostResult("a", ExitCode.DONE, measured=gpus(0)),))
    monkeypatch.setattr(command, "conclude", lambda *_: None)
    with pytest.raises(GpuprovError, match="the results are not kept"):
        command.run_command(Options("accept"))


@pytest.mark.root
def test_results_are_kept_without_room_for_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(Fleet, "run", lambda *_: (HostResult("a", ExitCode.DONE, measured=gpus(0)),))
    monkeypatch.setattr(report, "write_page", lambda *_: problem_of_a_full_disk())
    with pytest.raises(GpuprovError, match="no room"):
        command.run_command(Options("accept", report=str(tmp_path / "page.html")))
    assert [one.host for one in accepted.read_records().values()] == ["a"]


def problem_of_a_full_disk() -> None:
    raise GpuprovError("no room")


def test_inventories_of_the_same_name_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(
        Fleet, "run", lambda _, hosts, *__: (HostResult(hosts[0].name, ExitCode.DONE, measured=gpus(0)),)
    )
    for site in ("one", "two"):
        (tmp_path / site).mkdir()
        (tmp_path / site / "inventory.ini").write_text(f"[gpu]\n{site}\n")
        monkeypatch.chdir(tmp_path / site)
        command.run_command(Options("accept", hosts=("inventory.ini",)))
        assert history.before(history.load()) is None
    assert {one.inventory for one in accepted.read_records().values()} == {
        (str(tmp_path / site / "inventory.ini"),) for site in ("one", "two")
    }


def test_hosts_stand_side_by_side_and_outliers_are_named() -> None:
    site = GpuMeasured("", "", "4 H100", {"all_reduce_perf: avg_bus_bandwidth": 4e11})
    hosts = fleet({2: {"gpu1": 0.5}})
    hosts[0] = replace(hosts[0], measured=(*hosts[0].measured, site))
    results = accepted.compared(hosts, {}, ())
    (model, columns, rows), (other, names, few) = accepted.side_by_side(results)
    assert (model, columns) == ("H100", ("host", "to_device", "rate", "peer", "outliers"))
    # The median of hosts, then the host with an outlier; of each host the slowest GPU counts.
    assert rows[0] == ("(median)", "50.0", "100.0", "300.0", "")
    assert rows[1] == ("gpu02", "50.0", "50.2", "300.0", "GPU 1: slower than its like: rate")
    assert [row[0] for row in rows[2:]] == [f"gpu0{number}" for number in (0, 1, 3, 4, 5, 6, 7)]
    assert (other, names) == ("4 H100", ("host", "all_reduce_perf: avg_bus_bandwidth", "outliers"))
    assert few == [("(median)", "400.0", ""), ("gpu00", "400.0", "")]


def test_the_report_of_an_accept_compares_its_hosts() -> None:
    results = accepted.compared(fleet({2: {"gpu1": 0.5}}), {}, ())
    hostile = replace(results[0], host="x[red]\x1b[2J", measured=gpus(9))
    run = Run("20261121T081500Z-7", "accept", "", 1.0, (*results, hostile))
    console = Console(file=io.StringIO(), width=200)
    report.show_run(console, run, as_json=False, verbose=False)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "H100: the slowest GPU of each host" in shown
    assert "GPU 1: slower than its like: rate" in shown
    assert "x[red]" in shown
    assert "\x1b" not in shown
