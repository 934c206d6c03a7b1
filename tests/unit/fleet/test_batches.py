"""Batches as Ansible makes them: numbers, percentages, lists of both, and the canaries before them."""

from __future__ import annotations

import pytest

from gpuprov.fleet.batches import Share, make_batches, parse_rollout
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.spec import HostSpec


def hosts(number: int) -> list[HostTarget]:
    return [HostTarget(f"gpu{index:02}", HostSpec()) for index in range(1, number + 1)]


# Hosts, --serial, sizes: the rows with a list are the examples of Ansible's own page on serial.
SIZES = [
    (5, "", [5]),
    (5, "2", [2, 2, 1]),
    (5, "100%", [5]),
    (10, "30%", [3, 3, 3, 1]),
    (3, "10%", [1, 1, 1]),
    (20, "1,5,10", [1, 5, 10, 4]),
    (40, "10%,20%,100%", [4, 8, 28]),
    (30, "1,5,20%", [1, 5, 6, 6, 6, 6]),
    (3, "9", [3]),
    (0, "2", []),
]


@pytest.mark.parametrize(("number", "serial", "sizes"), SIZES, ids=[f"{n}-{s}" for n, s, _ in SIZES])
def test_sizes(number: int, serial: str, sizes: list[int]) -> None:
    batches = make_batches(hosts(number), parse_rollout(serial))
    assert [len(batch.targets) for batch in batches] == sizes
    assert [target for batch in batches for target in batch.targets] == hosts(number)


# --serial, --max-fail: how many of the first batch of ten hosts may fail.
ALLOWED = [
    ("", "", None), ("", "0", 0), ("", "3", 3), ("", "10%", 1), ("", "25%", 2), ("5", "", 4), ("5", "20%", 1),
    ("5", "100%", 4), ("1", "", 0),
]  # fmt: skip


@pytest.mark.parametrize(("serial", "max_fail", "allowed"), ALLOWED, ids=str)
def test_failures_allowed(serial: str, max_fail: str, allowed: int | None) -> None:
    assert make_batches(hosts(10), parse_rollout(serial, max_fail))[0].most_failed == allowed


CANARIES = [
    ("2", ["gpu01", "gpu02"]), ("gpu03", ["gpu03"]), ("gpu04, gpu02", ["gpu02", "gpu04"]),
    ("gpu0[12]", ["gpu01", "gpu02"]), ("9", ["gpu01", "gpu02", "gpu03", "gpu04"]),
]  # fmt: skip


@pytest.mark.parametrize(("canary", "names"), CANARIES, ids=[canary for canary, _ in CANARIES])
def test_canaries_come_first_and_once(canary: str, names: list[str]) -> None:
    first, *others = make_batches(hosts(4), parse_rollout(canary=canary))
    assert (first.name, first.most_failed, [target.name for target in first.targets]) == ("canary", 0, names)
    rest = [target.name for batch in others for target in batch.targets]
    assert sorted(names + rest) == ["gpu01", "gpu02", "gpu03", "gpu04"]


WRONG = [
    (("0",), "--serial takes a number of hosts or a percentage, not '0'"),
    (("1,,5",), "not ''"),
    (("101%",), "not '101%'"),
    (("-1",), "not '-1'"),
    (("", "5 %%"), "--max-fail takes"),
    (("", "", "0"), "--canary 0 names no host"),
]


@pytest.mark.parametrize(("words", "what"), WRONG, ids=[str(words) for words, _ in WRONG])
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(GpuprovError) as caught:
        parse_rollout(*words)
    assert caught.value.exit_code == ExitCode.USAGE
    assert what in str(caught.value)
    assert caught.value.problems[0].next_step


def test_unknown_canary_is_refused_with_the_name_that_was_meant() -> None:
    with pytest.raises(GpuprovError) as caught:
        make_batches(hosts(4), parse_rollout(canary="gpu1"))
    assert "--canary gpu1 is no host of this run" in str(caught.value)
    assert "did you mean gpu01?" in str(caught.value)


def test_percentages_round_down() -> None:
    assert Share(25, percent=True).of(7) == 1
