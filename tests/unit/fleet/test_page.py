"""The page of a run: all of it is there, nothing comes from elsewhere, nothing that a host says becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from gpuprov.fleet.history import Run
from gpuprov.fleet.page import render
from gpuprov.fleet.result import HostResult, MadeChange
from gpuprov.wire.errors import ExitCode, Problem
from gpuprov.wire.events import CheckDone, PlannedChange

VOID = {"meta", "br"}
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


def test_what_matters_of_a_host_is_seen_without_scrolling() -> None:
    heads = re.findall(r"<th [^>]*>(.*?)</th>", render(run(*FLEET)).partition("<h2>Hosts</h2>")[2])
    assert heads[:7] == ["host", "result", "reason", "changes", "time", "driver", "docker"]
    assert heads[7:9] == ["driver", "gpus"], "versions come after the work"


def test_page_has_hosts_steps_versions_durations_and_causes() -> None:
    text = Reader(render(run(*FLEET))).text
    for words in ("gpuprov install", "3 min 20 s", "1 done", "1 failed", "1 not run", "gpu1", "1 min 1 s", "550.163.01",
                  "535.247.01: gpu2", "1 of 1 in 55.0 s", "0 of 1", "the disk is full", "df says 100 %", "make room",
                  "install the driver not finished"):  # fmt: skip
        assert words in text, words


def test_page_of_a_verification_has_a_column_for_each_check() -> None:
    checks = (CheckDone("driver", "ok", "550, 8 GPUs"), CheckDone("docker run --gpus", "failed", reason="no nodes"))
    text = Reader(render(run(HostResult("gpu1", ExitCode.FAILED, checks=checks)))).text
    assert "docker run --gpus" in text
    assert "ok 550, 8 GPUs" in text
    assert "failed no nodes" in text


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
        EVIL, ExitCode.FAILED, 1, 1.0, (Problem(EVIL, EVIL, EVIL),), EVIL, {"driver": EVIL, EVIL: EVIL},
        (CheckDone(EVIL, EVIL, EVIL, EVIL, EVIL), CheckDone(EVIL, "failed", EVIL, EVIL, EVIL)),
        (PlannedChange(EVIL, EVIL, EVIL, EVIL),), (MadeChange(EVIL, EVIL, EVIL, 1.0), MadeChange("b", EVIL, EVIL)),
    )  # fmt: skip
    page = render(run(evil, evil))
    tags = Reader(page).tags
    clean = Reader(render(run(*FLEET))).tags
    assert {tag for tag, _ in tags} <= {tag for tag, _ in clean} | {"td"}
    assert not {name for _, attributes in tags for name in attributes} - {
        "lang", "charset", "name", "content", "http-equiv", "class", "scope"
    }  # fmt: skip
    assert all(re.fullmatch(r"[a-z ]*", str(attributes.get("class", ""))) for _, attributes in tags)
    assert "<script>alert(1)</script>" in Reader(page).text
    assert not set(page) & {"\x1b", "\u202e"}


def test_same_run_gives_the_same_bytes() -> None:
    assert render(run(*FLEET)) == render(run(*FLEET))


def test_flood_from_a_host_does_not_make_a_flood_of_a_page() -> None:
    flood = HostResult("gpu1", ExitCode.FAILED, problems=(Problem("x" * 100_000, "y\n" * 100_000, "z"),))
    assert len(render(run(flood))) < 20_000
