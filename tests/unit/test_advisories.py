"""Known security holes: NVIDIA's documents read, versions judged, installations warned of or refused."""

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuprov.agent.playbook_task import task_request
from gpuprov.agent.result import HostResult, hosts_by_vulnerability
from gpuprov.agent.site_tables import checked_tables, for_request, user_path, user_table, with_newer_tables
from gpuprov.cli.advisories import parse_csaf
from gpuprov.cli.main import cli
from gpuprov.facts.host import HostFacts, gather
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.report import summary
from gpuprov.fleet.run import request_for
from gpuprov.machine.pci import PciGpu
from gpuprov.packages.interface import PackageFacts
from gpuprov.plan.context import PlanContext
from gpuprov.plan.preflight import preflight
from gpuprov.plan.steps import make_plan
from gpuprov.protocol import tables
from gpuprov.protocol.advisories import (
    DRIVER,
    TOOLKIT,
    Advisory,
    Vulnerabilities,
    advisories,
    known_vulnerabilities,
    merged,
    rows_of,
    table_of,
    vulnerabilities,
)
from gpuprov.protocol.codec import dump
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.events import Event, Finished, Note
from gpuprov.protocol.request import Request, request_from_line
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.protocol.tables import ADVISORIES, PACKAGED, Tables
from gpuprov.verify import installed_versions
from tests import simgpu
from tests.advisories_table import TABLE, table_from
from tests.bundles import FILES, write_test_bundle
from tests.files import put
from tests.unit.ask import ask
from tests.unit.doctor.host import healthy
from tests.unit.fake_host import FakeHost
from tests.unit.fleet.fleets import run_of

pytestmark = pytest.mark.root
DOCUMENTS = Path(__file__).resolve().parents[1] / "data/csaf"
NEWER = Advisory("2027/6000", "2027-01-20", DRIVER, "580", "580.200.01", 9.3, ("CVE-2027-10000",))


@pytest.fixture(autouse=True)
def _own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def metal(tmp_path: Path) -> HostFacts:
    """A bare machine with a Turing GPU and no driver."""
    facts = gather(FakeHost(tmp_path / "root"))
    kernel = replace(facts.kernel, container="", takes_modules=True)
    driver = replace(facts.driver, kernel_version="", library_version="")
    return replace(facts, kernel=kernel, driver=driver, gpus=(PciGpu("0000:01:00.0", "1eb8"),))


def test_nvidias_documents_become_rows() -> None:
    (toolkit,) = parse_csaf((DOCUMENTS / "5850.json").read_bytes(), "5850.json")
    assert toolkit == Advisory("2026/5850", "2026-06-30", TOOLKIT, "", "1.19.1", 8.5, ("CVE-2026-24260",))
    drivers = parse_csaf((DOCUMENTS / "5861.json").read_bytes(), "5861.json")
    found = {one.branch: one.fixed_in for one in drivers}
    assert found == {"580": "580.178.04", "595": "595.91.07", "610": "610.57.04", "615": "615.71.09"}
    assert {(one.score, one.cves) for one in drivers} == {(7.8, ("CVE-2026-47494", "CVE-2026-47601"))}
    # The packaged table says the same of both.
    known = {(one.bulletin, one.branch): one.fixed_in for one in advisories(PACKAGED)}
    assert {(one.bulletin, one.branch): one.fixed_in for one in (toolkit, *drivers)}.items() <= known.items()


@pytest.mark.parametrize(
    ("product", "version", "score", "fixed_in", "unfixed"),
    [
        (DRIVER, "580.178.04", 0, "", False),
        (DRIVER, "580.159.04", 7.8, "580.178.04", False),
        (DRIVER, "595.104.02", 0, "", False),
        # 620 came after the bulletin; 570 and 590 get no fix any more, and the long-term branch, or the next, has it.
        (DRIVER, "620.32.03", 0, "", False),
        (DRIVER, "570.211.01", 8.8, "580.178.04", True),
        (DRIVER, "590.48.01", 8.8, "595.91.07", True),
        (DRIVER, "535.309.01", 7.8, "580.178.04", True),
        (DRIVER, "", 0, "", False),
        (TOOLKIT, "1.17.8-1", 8.5, "1.19.1", False),
        (TOOLKIT, "1.16.0-1", 9.0, "1.19.1", False),
        (TOOLKIT, "1.19.1-1", 0, "", False),
        (TOOLKIT, "1.20.0~rc.1-1", 0, "", False),
    ],
)
def test_versions_have_published_holes(product: str, version: str, score: float, fixed_in: str, unfixed: bool) -> None:
    found = vulnerabilities(product, version, advisories(PACKAGED))
    if not score:
        assert found is None
        return
    assert found is not None
    assert (found.score, found.fixed_in, found.unfixed_branch) == (score, fixed_in, unfixed)
    assert found.bulletins in str(found)
    assert fixed_in in str(found)
    assert ("gets no security fixes any more" in str(found)) is unfixed


def test_what_would_be_installed_with_holes_is_warned_of_or_refused(metal: HostFacts) -> None:
    old = {"driver_version": "580.159.04", "toolkit": "nvidia", "toolkit_version": "1.17.8-1"}
    plan = make_plan(metal, parse_spec(old))
    assert plan.problems == ()
    assert ["2026/5861 (7.8)" in one or "2026/5850 (8.5)" in one for one in plan.warnings] == [True, True]
    refused = preflight(PlanContext(metal, parse_spec({**old, "refuse_advisories": "high"})))
    assert [one.next_step.partition(",")[0] for one in refused] == [
        'set gpuprov_driver_version: "580.178.04"', 'set gpuprov_toolkit_version: "1.19.1"',
    ]  # fmt: skip
    # None of them is critical.
    assert preflight(PlanContext(metal, parse_spec({**old, "refuse_advisories": "critical"}))) == ()
    safe = parse_spec({"driver_version": "580.178.04", "refuse_advisories": "high"})
    plan = make_plan(metal, safe)
    assert (plan.warnings, plan.problems) == ((), ())


def test_a_branch_whose_support_has_ended_is_warned_of(metal: HostFacts) -> None:
    november, july = 1795000000, 1783000000  # of 2026
    warnings = [make_plan(replace(metal, clock=clock), parse_spec({"driver_version": "610.57.04"})).warnings
                for clock in (november, july)]  # fmt: skip
    assert warnings == [("driver 610.57.04: the support of branch 610 ended in 2026-08",), ()]


def test_what_is_there_already_is_no_installation(metal: HostFacts) -> None:
    driver = replace(metal.driver, kernel_version="580.159.04", library_version="580.159.04")
    there = replace(metal, driver=driver, packages=PackageFacts("apt", {"nvidia-container-toolkit": "1.17.8-1"}))
    spec = parse_spec({"driver_version": "580.159.04", "toolkit": "nvidia", "toolkit_version": "1.17.8-1"})
    assert make_plan(there, spec).warnings == ()
    found = preflight(PlanContext(there, replace(spec, refuse_advisories="high")))
    assert not any("refused" in one.what for one in found)


def of_driver(found: Tables) -> Vulnerabilities | None:
    return vulnerabilities(DRIVER, "580.178.04", advisories(found))


def with_bundle(found: Tables, table: Mapping[str, object]) -> Tables:
    content = json.dumps(table).encode()
    return with_newer_tables(found, lambda name: content if name == "advisories.json" else b"", "a bundle")


def test_newer_advisories_travel_with_requests_and_bundles(tmp_path: Path) -> None:
    assert for_request(HostSpec()) == {}
    newer = table_of(merged(advisories(PACKAGED), [NEWER]), "2027-02-01")
    put(user_path(ADVISORIES), json.dumps(newer))
    sent = json.loads(json.dumps(for_request(HostSpec())))
    # By both front doors.
    assert task_request("install", {}).tables == sent
    assert request_for(HostTarget("a", HostSpec()), Request("install"), alone=True).tables == sent
    assert of_driver(PACKAGED) is None
    site = tables.packaged(tables.SERVERS) | {"servers": {"epel": "https://mirror.example/epel"}}
    own = checked_tables({**sent, tables.SERVERS: site})
    found = of_driver(own)
    assert found is not None
    assert found.bulletins == "2027/6000 (9.3)"
    # Those of a bundle count where they are newer, and only there.
    assert of_driver(with_bundle(own, {**newer, "rows": [], "updated": "2027-01-31"})) is not None
    newest = with_bundle(own, {**newer, "rows": [], "updated": "2027-02-02"})
    assert of_driver(newest) is None
    assert newest.server("epel") == "https://mirror.example/epel"


def test_a_users_table_lacks_no_bulletin_of_a_later_gpuprov() -> None:
    put(user_path(ADVISORIES), json.dumps(table_of([NEWER], "2027-02-01")))
    assert rows_of(user_table(ADVISORIES)) == (NEWER, *advisories(PACKAGED))
    assert rows_of(for_request(HostSpec())[ADVISORIES]) == (NEWER, *advisories(PACKAGED))


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 0}, {"updated": "yesterday"}, {"rows": [{"bulletin": "x"}]}, {"rows": "none"},
        {"rows": [{**dataclasses.asdict(NEWER), "branch": ""}]}, {"rows": [{**dataclasses.asdict(NEWER), "score": 11}]},
    ],
)  # fmt: skip
def test_a_damaged_table_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(GpuprovError, match="table of security advisories is not valid"):
        rows_of({**table_of([NEWER], "2027-02-01"), **damage})


def run(*words: str) -> str:
    done = CliRunner().invoke(cli, ["advisories", *words])
    if isinstance(done.exception, GpuprovError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_documents_are_read_from_a_folder_and_listed(tmp_path: Path) -> None:
    folder = tmp_path / "2026"
    shutil.copytree(DOCUMENTS, folder)
    (folder / "CVE-2026-47601.json").write_text('{"dataType": "CVE_RECORD", "dataVersion": "5.1"}')
    text = (folder / "5861.json").read_text().replace("5861", "5999").replace("580_178_04", "580_300_01")
    (folder / "5999.json").write_text(text)
    assert "from this gpuprov" in run()
    assert "advisories, new: " in run("update", "--from", str(folder))
    shown = run()
    assert "2026/5999" in shown
    assert "580.300.01" in shown
    assert str(user_path(ADVISORIES)) in shown
    assert "(0 days ago)" in shown
    assert json.loads(run("--json"))["format"] == 1


@pytest.mark.parametrize("cut", [0, 1, 40, 400, -3])
def test_a_document_that_is_cut_off_changes_nothing_and_is_named(tmp_path: Path, cut: int) -> None:
    folder = tmp_path / "2026"
    shutil.copytree(DOCUMENTS, folder)
    (folder / "5861.json").write_bytes((folder / "5861.json").read_bytes()[:cut])
    with pytest.raises(GpuprovError, match=r"5861\.json can't be read, so nothing was changed"):
        run("update", "--from", str(folder))
    assert not user_path(ADVISORIES).exists()


def test_a_cve_of_other_products_needs_no_score() -> None:
    document = json.loads((DOCUMENTS / "5861.json").read_bytes())
    rows = parse_csaf(json.dumps(document).encode(), "5861.json")
    status = {"fixed": ["nemo_2_0_0"], "known_affected": ["nemo_all_versions_prior_to_2_0_0"]}
    document["vulnerabilities"] += [{"cve": "CVE-1", "product_status": status}]
    document["vulnerabilities"] += [{"cve": "CVE-2", "product_status": status, "scores": []}]
    assert parse_csaf(json.dumps(document).encode(), "5861.json") == rows


UNREADABLE = [
    ('"vulnerabilities"', '"weaknesses"'), ('"baseScore": 7.8', '"baseScore": "bad"'), ('"scores"', '"marks"'),
    ('"fixed"', '"repaired"'),
]  # fmt: skip
UNKNOWN = [
    ('"id": "5861"', '"id": "NVIDIA-5861"'), ('"baseScore": 7.8', '"baseScore": NaN'), ("CVE-2026-47601", "CVE-26-1"),
    ('"current_release_date": "2026', '"current_release_date": "26'),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [*UNREADABLE, *UNKNOWN])
def test_a_document_with_a_wrong_row_changes_nothing(tmp_path: Path, old: str, new: str) -> None:
    text = (DOCUMENTS / "5861.json").read_text()
    assert old in text
    if old == '"fixed"':
        text = text.replace("all_driver_versions_prior_to_", "some_")
    (tmp_path / "wrong.json").write_text(text.replace(old, new))
    says = "can't be read" if (old, new) in UNREADABLE else "has what gpuprov does not know"
    with pytest.raises(GpuprovError, match=rf"wrong\.json {says}"):
        run("update", "--from", str(tmp_path / "wrong.json"))
    assert not user_path(ADVISORIES).exists()


@pytest.mark.parametrize("damaged", ["{", '{"format": 0}'])
def test_an_update_replaces_a_damaged_table(damaged: str) -> None:
    put(user_path(ADVISORIES), damaged)
    with pytest.raises(GpuprovError):
        run()
    run("update", "--from", str(DOCUMENTS))
    assert {one.bulletin for one in rows_of(user_table(ADVISORIES))} == {one.bulletin for one in advisories(PACKAGED)}


def test_digests_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "5850.json"
    shutil.copy(DOCUMENTS / "5850.json", file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "5850.json.sha256").write_text(f"{'0' * 64}  5850.json\n")
    with pytest.raises(GpuprovError, match="not the one that was asked for, so nothing was changed"):
        run("update", "--from", str(file))
    with pytest.raises(GpuprovError, match="not the one that was asked for"):
        run("update", "--from", str(tmp_path))
    assert not user_path(ADVISORIES).exists()
    run("update", "--from", f"file://{file}", "--sha256", digest)
    assert user_path(ADVISORIES).exists()
    with pytest.raises(UsageError, match="is the digest of one document"):
        run("update", "--from", str(DOCUMENTS), "--sha256", digest)
    with pytest.raises(UsageError, match="over http needs a digest"):
        run("update", "--from", "http://mirror.example/5850.json")


@pytest.mark.parametrize("content", [b"<html>", b'{"rows": [], "format": 1, "updated": "2027-02-01"}'])
def test_the_password_of_a_mirror_is_not_printed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("gpuprov.core.download.fetch_small", lambda *_: b"0" * 64)
    monkeypatch.setattr("gpuprov.core.download.fetch", lambda system, url, path, **_: Path(path).write_bytes(content))
    with pytest.raises(GpuprovError, match=r"me:.*@mirror\.example") as caught:
        run("update", "--from", "https://me:hunter2@mirror.example/5861.json")
    assert "hunter2" not in str(caught.value)


def test_an_update_with_a_wrong_clock_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "gmtime", lambda: time.struct_time((2020, 1, 1, 0, 0, 0, 2, 1, 0)))
    (tmp_path / "advisories.json").write_text(json.dumps(table_of([NEWER], "2027-02-01")))
    assert ", new: 1" in run("update", "--from", str(tmp_path / "advisories.json"))
    assert NEWER in rows_of(user_table(ADVISORIES))


def test_the_report_names_the_hosts_of_each_hole() -> None:
    def host(name: str, driver: str, toolkit: str = "") -> HostResult:
        return HostResult(name, ExitCode.DONE, versions={"driver": driver, "toolkit": toolkit})

    results = [host("a", "580.159.04"), host("b", "580.178.04"), host("c", "580.159.04", "1.17.8-1"), host("d", "")]
    found = hosts_by_vulnerability(results, advisories(PACKAGED))
    assert [(one.product, one.version, names) for one, names in found] == [
        (TOOLKIT, "1.17.8-1", ("c",)), (DRIVER, "580.159.04", ("a", "c")),
    ]  # fmt: skip
    told = json.loads(json.dumps(summary(run_of("facts", results))))["holes"]
    assert [(one["fixed_in"], one["score"], one["hosts"]) for one in told] == [
        ("1.19.1", 8.5, ["c"]), ("580.178.04", 7.8, ["a", "c"]),
    ]  # fmt: skip


def test_the_packaged_table_is_what_its_script_writes() -> None:
    """NVIDIA's documents give the rows that are packaged, and running it twice changes nothing."""
    again = rows_of(json.loads(table_from(str(DOCUMENTS), advisories(PACKAGED), "2026-11-22")))
    packaged = rows_of(json.loads(TABLE.read_text()))
    assert [replace(one, cves=()) for one in again] == [replace(one, cves=()) for one in packaged]
    assert table_from(str(DOCUMENTS), again, "2026-11-22") == table_from(
        str(DOCUMENTS), advisories(PACKAGED), "2026-11-22"
    )


def test_verify_names_the_holes_of_what_is_installed(tmp_path: Path) -> None:
    """The simulated driver is 550.163.01."""
    found = known_vulnerabilities(installed_versions(healthy(tmp_path)), PACKAGED)
    assert [(one.product, one.version, one.fixed_in) for one in found] == [(DRIVER, "550.163.01", "580.178.04")]
    ended, events = ask(healthy(tmp_path / "again"), Request("verify"))
    assert warned(events) == [str(found[0])]
    assert ended.versions == {"driver": "550.163.01", "toolkit": ""}


def checked(host: FakeHost, bundle: str = "", sent: Mapping[str, object] | None = None, **values: str) -> list[Event]:
    """Return the events of `install --check` on a host that has no driver's libraries yet."""
    spec = {"driver_version": simgpu.DRIVER_VERSION, "packages": ["site-gpu-tools"], **values}
    request = Request("install", spec, check=True, bundle=bundle, tables=sent or {})
    return ask(host, request_from_line(dump(request)))[1]


def warned(events: list[Event]) -> list[str]:
    return [one.message for one in events if isinstance(one, Note) and one.level == "warning"]


def test_a_run_warns_refuses_and_takes_the_newest_of_all_tables(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root")
    old = write_test_bundle(tmp_path / "root/old.bundle")
    assert "branch 550 gets no security fixes any more" in warned(checked(host, "/old.bundle"))[0]
    end = checked(host, "/old.bundle", refuse_advisories="high")[-1]
    assert isinstance(end, Finished)
    assert end.exit_code == ExitCode.FAILED
    assert end.problems[0].what == "driver 550.163.01 is refused for its known security holes"
    # The request's table counts, and a bundle's newer one before it.
    none = table_of((), "2027-02-01")
    assert warned(checked(host, "/old.bundle", {ADVISORIES: none})) == []
    hole = replace(NEWER, branch="550", fixed_in="550.200.01")
    newer = json.dumps(table_of((hole,), "2027-02-02")).encode()
    write_test_bundle(old.with_name("new.bundle"), files={**FILES, "advisories.json": newer})
    for sent in ({}, {ADVISORIES: none}):
        (said,) = warned(checked(host, "/new.bundle", sent))
        assert "2027/6000 (9.3); fixed in 550.200.01" in said
    # Malformed, it is named, and nothing is done.
    write_test_bundle(old.with_name("bad.bundle"), files={**FILES, "advisories.json": newer[:-9]})
    end = checked(host, "/bad.bundle")[-1]
    assert isinstance(end, Finished)
    assert "/bad.bundle is not valid JSON" in end.problems[0].what
