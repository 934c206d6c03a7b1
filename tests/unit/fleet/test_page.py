"""The page of a run: all of it is there, nothing comes from elsewhere, nothing that a host says becomes markup."""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gpuprov.agent.result import HostResult, MadeChange
from gpuprov.facts.gpus import MigGpu, mig_layout
from gpuprov.fleet.grouping import mig_instances
from gpuprov.fleet.history import Run, differences
from gpuprov.fleet.page import render
from gpuprov.protocol.errors import ExitCode, Problem
from gpuprov.protocol.events import CheckDone, PlannedChange
from tests.unit.fleet import fleets

VOID = {"meta", "br"}
ATTRIBUTES = {
    "lang", "charset", "name", "content", "http-equiv", "class", "title", "role",
    "viewbox", "preserveaspectratio", "d", "x", "y", "rx", "width", "height",
}  # fmt: skip
EVIL = "\"'></title></style></td><script>alert(1)</script><img src=http://evil.example onerror=a>\x1b[2J\u202e&lt;"


def run(*results: HostResult) -> Run:
    return Run("20261121T081500-7", "install", "2026-11-21T08:15:00+0000", 200.0, results, inventory=("hosts.ini",))


class Reader(HTMLParser):
    """Notes tags with their attributes and the text between them; fails where tags do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self._open[-1:] != ["style"] else ""


FLEET = (
    HostResult("gpu1", ExitCode.DONE, 2, 61.0, (), "2 changes made", {"driver": "550.163.01", "gpus": "8"},
               plan=(PlannedChange("a", "driver", "install the driver"), PlannedChange("b", "docker", "restart")),
               made=(MadeChange("a", "driver", "install the driver", 55.0), MadeChange("b", "docker", "restart", 2.0))),
    HostResult("gpu2", ExitCode.FAILED, 0, 9.0, (Problem("the disk is full", "df says 100 %", "make room"),), "",
               {"driver": "535.247.01", "gpus": "8"}, plan=(PlannedChange("a", "driver", "install the driver"),),
               made=(MadeChange("a", "driver", "install the driver"),)),
    HostResult("gpu3", ExitCode.FAILED, problems=(Problem("not run: stopped"),), begun=False),
)  # fmt: skip


def squares(page: str) -> dict[str, dict[str, int]]:
    """Return for each host of the grid how many squares of each kind it has."""
    found: dict[str, dict[str, int]] = {}
    for host, paths in re.findall(r'viewBox="0 0 10 \d+"><title>([^:]*):[^<]*</title>(.*?)</svg>', page):
        for kind, path in re.findall(r'<path class="(\w+)" d="([^"]*)"', paths):
            lengths = [(int(length) + 1) // 10 for length in re.findall(r"v(\d+)", path)]
            found.setdefault(host, {})[kind] = sum(lengths)
    return found


def test_grid_has_a_square_for_each_host_and_each_step() -> None:
    page = render(run(*FLEET))
    assert squares(page) == {"gpu1": {"good": 3}, "gpu2": {"bad": 2, "none": 1}, "gpu3": {"none": 3}}
    assert re.findall(r"<li>(\w+)</li>", page.partition('class="labels"')[2])[:3] == ["result", "driver", "docker"]


@pytest.mark.parametrize("code", ExitCode)
def test_page_shows_a_host_of_each_exit_code(code: ExitCode) -> None:
    result = HostResult("gpu1", code)
    assert result.word in Reader(render(run(result))).text


@pytest.mark.parametrize("make", [fleets.verified, fleets.planned, fleets.installed])
@pytest.mark.parametrize("number", [1, 2, 13, 50, 1000])
def test_every_host_is_in_the_grid_and_the_page_is_below_a_megabyte(make: Callable[[int], Run], number: int) -> None:
    made = make(number)
    page = render(made, fleets.the_day_before(made))
    assert len(page.encode()) < 1_000_000
    found = squares(page)
    assert list(found) == [result.host for result in made.results]
    assert len({sum(kinds.values()) for kinds in found.values()}) == 1
    Reader(page)


def test_a_bad_rack_stands_apart_and_names_without_racks_stand_together() -> None:
    page = render(fleets.verified(400))
    assert re.findall(r"<h3>(r\d\d)</h3>", page) == [f"r{number:02}" for number in range(1, 11)]
    rack = page.partition("<h3>r07</h3>")[2].partition("<h3>r08</h3>")[0]
    assert sum("bad" in kinds for kinds in squares(rack).values()) == 30
    plain = render(run(*(HostResult(f"gpu{number}", ExitCode.DONE) for number in range(40))))
    assert "<h3>gpu" not in plain


def test_worst_fleet_is_below_a_megabyte_too() -> None:
    """A thousand hosts, each with another fault, another version and a long name."""
    results = [
        HostResult(
            f"{number:04}" + "n" * 60, ExitCode.FAILED, 0, 1.0,
            (Problem("w" * 300 + str(number), "e" * 3000, "x"),), "",
            {name: f"{number}.{name}" for name in ("driver", "kernel", "docker", "os", "gpus", "mig")},
            tuple(CheckDone(name, "failed", reason="r" * 100) for name in fleets.CHECKS),
        )
        for number in range(1000)
    ]  # fmt: skip
    assert len(render(run(*results)).encode()) < 1_000_000


def test_check_shows_each_plan_with_its_hosts() -> None:
    text = Reader(render(fleets.planned(50))).text.partition("What would change")[2]
    for words in ("35 hosts:", "r01-gpu[01:03]", "install driver 550.163.01", "5 hosts:", "nothing to change"):
        assert words in text


def test_gpus_are_drawn_with_their_mig_instances() -> None:
    page = render(fleets.verified(50))
    text = Reader(page).text
    assert "8 GPUs on 48 hosts" in text
    assert "MIG: 0: 1g.10gb, 1g.10gb, 2g.20gb, 3g.40gb; 1: 3g.40gb, 3g.40gb" in text
    assert re.findall(r'class="slice" x="([\d.]+)" y="1" width="([\d.]+)"', page) == [
        ("0.0", "3.2"), ("4.0", "3.2"), ("8.0", "7.2"), ("16.0", "11.2"), ("0.0", "11.2"), ("12.0", "11.2"),
    ]  # fmt: skip


def test_a_mig_layout_is_read_back() -> None:
    mig = [MigGpu(0, "Enabled", "Enabled", ("1g.10gb", "3g.40gb")), MigGpu(1, "Disabled", "Disabled")]
    layout = mig_layout((gpu.index, gpu.instances) for gpu in mig)
    assert layout == "0: 1g.10gb, 3g.40gb"
    assert mig_instances(layout) == {0: ("1g.10gb", "3g.40gb")}


def test_what_changed_since_the_run_before_is_told_the_worse_first() -> None:
    made = fleets.verified(50)
    found = differences(fleets.the_day_before(made), made)
    assert [(one.sentence, one.kind, len(one.hosts)) for one in found[:4]] == [
        ("done → failed", "bad", 2), ("docker, all GPUs: ok → failed", "bad", 2), ("failed → done", "good", 1),
        ("driver 535.247.01 → 550.163.01", "", 48),
    ]  # fmt: skip
    text = Reader(render(made, fleets.the_day_before(made))).text
    assert "new in this run 1 host: r02-gpu10" in " ".join(text.split())
    assert "Nothing changed." in render(made, replace(made, identifier="20261120T081500-7"))
    assert [one.sentence for one in differences(made, replace(made, results=made.results[1:]))] == ["not in this run"]


def test_page_has_hosts_steps_versions_durations_and_causes() -> None:
    text = Reader(render(run(*FLEET))).text
    for words in ("gpuprov install", "3 min 20 s", "1 done", "1 failed", "1 not run", "gpu1", "1 min 1 s", "550.163.01",
                  "535.247.01: gpu2", "1 of 1 in 55.0 s", "0 of 1", "the disk is full", "df says 100 %", "make room",
                  "install the driver not finished"):  # fmt: skip
        assert words in text, words


def test_page_lists_the_hosts_by_vulnerability() -> None:
    old, older = (
        replace(FLEET[0], host="gpu4"),
        replace(FLEET[1], versions={"driver": "535.247.01", "toolkit": "1.17.7"}),
    )
    text = " ".join(Reader(render(run(FLEET[0], old, older))).text.split())
    assert "Known security holes" in text
    assert "driver 550.163.01" in text and "gpu1, gpu4 (2)" in text and "580.178.04" in text
    assert "1.17.7" in text and "1.19.1" in text
    safe = [replace(one, versions={"driver": "580.178.04"}) for one in FLEET[:2]]
    assert "Known security holes" not in render(run(*safe))


def test_page_of_a_verification_has_a_square_and_the_words_of_each_check() -> None:
    checks = (CheckDone("driver", "ok", "550, 8 GPUs"), CheckDone("docker run --gpus", "failed", reason="no nodes"),
              CheckDone("GPU 0", "ok", "degraded: xid-95"))  # fmt: skip
    text = Reader(render(run(HostResult("gpu1", ExitCode.FAILED, checks=checks)))).text
    assert "docker run --gpus" in text
    assert "ok 550, 8 GPUs" in text
    assert "failed no nodes" in text
    assert "GPU 0: degraded: xid-95" in re.sub(r"\s+", " ", text)


def test_page_needs_nothing_from_elsewhere() -> None:
    page = render(run(*FLEET))
    assert not re.search(r"(?:src|href|action)\s*=|url\(|@import|https?:|//", page)
    policy = [dict(tag[1]).get("content") for tag in Reader(page).tags if tag[1].get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_page_is_made_for_phones_and_for_the_dark() -> None:
    page = render(run(*FLEET))
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in page
    assert "prefers-color-scheme:dark" in page


def test_nothing_that_a_host_says_becomes_markup() -> None:
    evil = HostResult(
        EVIL, ExitCode.FAILED, 1, 1.0, (Problem(EVIL, EVIL, EVIL),), EVIL,
        {"driver": EVIL, EVIL: EVIL, "gpus": EVIL, "mig": f"0: {EVIL}"},
        (CheckDone(EVIL, "failed", EVIL, EVIL, EVIL), CheckDone(EVIL, "failed", EVIL, EVIL, EVIL)),
        (PlannedChange(EVIL, EVIL, EVIL, EVIL),), (MadeChange(EVIL, EVIL, EVIL, 1.0), MadeChange("b", EVIL, EVIL)),
    )  # fmt: skip
    page = render(replace(run(evil, replace(evil, exit_code=ExitCode.DONE)), check=True), run(replace(evil, checks=())))
    tags = Reader(page).tags
    clean = Reader(render(run(*FLEET))).tags
    names = {tag for tag, _ in Reader(render(fleets.verified(50))).tags}
    assert {tag for tag, _ in tags} <= {tag for tag, _ in clean} | names
    for tag, attributes in tags:
        assert not set(attributes) - ATTRIBUTES, tag
        drawn = [str(attributes.get(name, "0")) for name in ("d", "viewbox", "x", "y", "width", "height")]
        assert tag == "meta" or all(re.fullmatch(r"[Mv0-9. -]*", value) for value in drawn), drawn
        assert re.fullmatch(r"[a-z ]*", str(attributes.get("class", "")))
    assert "<script>alert(1)</script>" in Reader(page).text
    assert not set(page) & {"\x1b", "\u202e"}


def test_same_run_gives_the_same_bytes() -> None:
    assert render(run(*FLEET)) == render(run(*FLEET))


def test_flood_from_a_host_does_not_make_a_flood_of_a_page() -> None:
    flood = HostResult("gpu1", ExitCode.FAILED, problems=(Problem("x" * 100_000, "y\n" * 100_000, "z"),))
    assert len(render(run(flood))) < 20_000
