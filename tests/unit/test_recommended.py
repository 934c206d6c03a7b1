"""Which driver a host gets that names none: GPUs × what is there × the day of the tables → version and sentence."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent import install
from gpuprov.agent.playbook_task import task_request
from gpuprov.agent.run import run_request
from gpuprov.core.changes import WriteFile
from gpuprov.core.journal import last_choice, new_journal, read_runs, resume_journal
from gpuprov.driver import recommended
from gpuprov.driver.installer import Installation
from gpuprov.driver.recommended import choose, recommend
from gpuprov.driver.run_files import RECORD
from gpuprov.facts.host import HostFacts
from gpuprov.machine.machine import gather_kernel
from gpuprov.plan.steps import Plan, StepChange, make_plan
from gpuprov.protocol import tables
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.events import ChangeDone, Note, Planned
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.protocol.tables import PACKAGED, Tables
from tests import simgpu
from tests.unit.ask import ask
from tests.unit.fake_host import FakeHost, write_runfile

pytestmark = pytest.mark.root
K80, P100, V100, T4, A100, L4, H100, B200, RUBIN, B300 = (
    "102d", "15f8", "1db4", "1eb8", "20b0", "27b8", "2330", "2901", "3002", "3224",
)  # fmt: skip
IN_2026, IN_2028 = 1795392000, 1854000000
# Of the packaged table, which gets new releases; the last is of no table.
NEWEST, NEWEST_615, NEWEST_595, LATER = *map(PACKAGED.resolved, ("latest", "615", "595")), "580.900.01"
DAY = tables.packaged("advisories")["updated"]


def released(version: str) -> dict[str, Any]:
    """The table of releases of a later day, with one more release of the long-term branch."""
    table = json.loads(json.dumps(tables.packaged("driver_releases")))
    table["newest"]["580"] = version
    return {"driver_releases": table}


def bulletin(fixed_in: str) -> dict[str, Any]:
    """The advisories of a later day: all releases of the long-term branch before this one have a hole."""
    table = json.loads(json.dumps(tables.packaged("advisories")))
    new = {"bulletin": "2027/6001", "published": "2027-01-20", "branch": "580", "fixed_in": fixed_in}
    row = {**table["rows"][0], **new}
    later = [{**row, "branch": "615", "fixed_in": "615.99.01"}]
    return {"advisories": {**table, "updated": "2027-01-20", "rows": [row, *later, *table["rows"]]}}


@pytest.mark.parametrize(
    ("ids", "sent", "clock", "version", "sentence"),
    [
        ((H100, L4), {}, IN_2026, NEWEST, f"long-term branch, supports H100 and L4, no known security holes by {DAY}"),
        ((H100, H100), {}, IN_2026, NEWEST, "long-term branch, supports H100, no known"),
        ((P100, T4, A100), {}, IN_2026, NEWEST, "long-term branch, supports P100, T4 and A100, no known"),
        (("2bff",), {}, IN_2026, NEWEST, "long-term branch, supports Blackwell, no known"),
        (("ffff",), {}, IN_2026, NEWEST, "long-term branch, no known"),
        ((B200, B300), {}, IN_2026, NEWEST, "long-term branch, supports B200 and Blackwell Ultra, no known"),
        ((RUBIN,), {}, IN_2026, NEWEST_615, "branch 615, which this host needs, supports Rubin, no known"),
        ((RUBIN, H100), {}, IN_2026, NEWEST_615, "supports Rubin and H100"),
        ((K80,), {}, IN_2026, "470.256.02", "branch 470, which this host needs, supports K80, though no release of the "
         "branch is without known security holes"),
        # No driver serves both: preflight says so, of the long-term branch.
        ((K80, H100), {}, IN_2026, NEWEST, "no known release serves all GPUs of this host; another"),
        ((V100, B200), {}, IN_2026, NEWEST, "no known release serves all GPUs of this host; another"),
        ((H100,), released(LATER), IN_2026, LATER, "long-term branch"),
        ((H100,), released(LATER) | bulletin(LATER), IN_2026, LATER, "no known security holes by "
         "2027-01-20"),
        # The bulletin is out and its release is not in the table yet.
        ((H100,), bulletin(LATER), IN_2026, NEWEST, "though no release of the branch is without known"),
        # The branch's support has ended.
        ((H100,), {}, IN_2028, NEWEST_615, "branch 615, supports H100"),
        ((V100,), {}, IN_2028, NEWEST, "long-term branch"),
    ],
)  # fmt: skip
def test_table_of_choices(ids: tuple[str, ...], sent: dict[str, Any], clock: int, version: str, sentence: str) -> None:
    own = Tables(sent)
    found = recommend(ids, own.table("driver_releases")["newest"].values(), "auto", clock, own)
    assert (found.driver, found.version) == ("runfile", version)
    assert sentence in str(found) and str(found).startswith(f"driver {version}: ")


def test_a_release_with_holes_gives_way_to_one_without() -> None:
    """A release that is not known to be fixed may be listed on a mirror beside older and newer ones."""
    own = Tables(bulletin("580.178.04"))
    mirrored = ("580.173.02", "580.178.04", "590.48.01")
    assert recommend((H100,), mirrored, "auto", IN_2026, own).version == "580.178.04"
    assert recommend((H100,), ("580.173.02", "550.163.01"), "auto", IN_2026, own).version == "580.173.02"
    assert recommend((H100,), (), "auto", IN_2026, own).version == ""
    assert ": branch 570, supports H100" in str(recommend((H100,), ("570.211.01",), "auto", IN_2026, own))


@pytest.mark.parametrize(
    ("there", "version"),
    [("550.163.01", NEWEST), ("595.84", NEWEST_595), (NEWEST_615, NEWEST_615), ("620.32.03", NEWEST)],
)
def test_no_branch_is_taken_that_is_older_than_the_one_there(there: str, version: str) -> None:
    known = tables.packaged("driver_releases")["newest"].values()
    assert recommend((H100,), known, "auto", IN_2026, PACKAGED, there).version == version


@pytest.mark.parametrize(("kernel", "version"), [("7.1.3", "580.126.20"), ("6.1.0-13-amd64", "580.142")])
def test_a_release_that_breaks_on_this_kernel_is_not_taken(tmp_path: Path, kernel: str, version: str) -> None:
    table = {**released("580.142")["driver_releases"], "sha256": {"x86_64": {"580.126.20": "a" * 64}}}
    host = Bare(tmp_path, H100)
    host.tables = Tables({"driver_releases": table})
    host.kernel_release = lambda: kernel  # type: ignore[method-assign]
    assert choose(host, SPEC).version == version


def test_the_release_of_an_images_kernel_tells_its_page_size(tmp_path: Path) -> None:
    host = Bare(tmp_path, H100)
    host.kernel_release = lambda: "6.12.0-1.el10.aarch64+64k"  # type: ignore[method-assign]
    assert gather_kernel(host).conditions()["page_size"] == 65536


class Bare(FakeHost):
    """A machine of its own with these GPUs, without a driver."""

    def __init__(self, root: Path, *ids: str) -> None:
        super().__init__(root, gpus=len(ids), metal=True)
        for one, place in zip(ids, sorted(root.glob("sys/bus/pci/devices/*/device"))[1:]):
            place.write_text(f"0x{one}\n")

    def clock(self) -> int:
        return IN_2026

    def with_driver(self, version: str) -> Bare:
        for path in self._driver_files:
            path.unlink(missing_ok=True)
        before = set(self.root.rglob("*"))
        simgpu.install_tree(self.root, version)
        self._driver_files = [one for one in set(self.root.rglob("*")) - before if not one.is_dir()]
        return self

    def with_run(self, version: str, end: str = "", driver: str = "runfile") -> Bare:
        journal = new_journal(self, "install")
        journal.chose(driver, version)
        if end:
            journal.end(end)
        return self


SPEC = parse_spec({})


def test_recommended_is_the_default_and_may_be_named() -> None:
    assert parse_spec({"driver_version": "recommended"}) == SPEC == HostSpec()
    assert recommended.is_open(SPEC)
    others = ({"driver": "packages"}, {"driver_version": "latest"}, {"driver_url": "/root/NVIDIA.run"})
    assert not any(recommended.is_open(parse_spec(one)) for one in others)
    assert parse_spec({"driver": "packages", "driver_version": "recommended"}).driver_version == ""


def test_a_bare_host_gets_the_release_of_the_tables(tmp_path: Path) -> None:
    found = choose(Bare(tmp_path, H100, L4), SPEC)
    assert (found.version, found.is_new) == (NEWEST, True)
    assert found.of(SPEC) == replace(SPEC, driver_version=NEWEST)


@pytest.mark.parametrize(
    ("installed", "gpu", "version"),
    [
        (NEWEST, H100, NEWEST),  # without holes
        (NEWEST_615, H100, NEWEST_615),  # newer than what is recommended
        ("550.163.01", H100, NEWEST),  # with holes
        (NEWEST_615, V100, NEWEST),  # does not serve the GPU
    ],
)
def test_a_driver_that_serves_without_holes_is_kept(tmp_path: Path, installed: str, gpu: str, version: str) -> None:
    found = choose(Bare(tmp_path, gpu).with_driver(installed), SPEC)
    assert (found.driver, found.version, found.is_new) == ("runfile", version, installed != version)


def test_a_driver_from_packages_is_kept_as_it_is(tmp_path: Path) -> None:
    host = Bare(tmp_path, H100).with_driver(NEWEST)
    host.installed["nvidia-driver-libs"] = f"{NEWEST}-1"
    found = choose(host, SPEC)
    assert (found.driver, found.version) == ("preinstalled", "")
    assert f"driver {NEWEST} is there from packages, supports H100" in str(found)


def test_a_gpu_that_is_kept_for_virtual_machines_does_not_decide(tmp_path: Path) -> None:
    """Preflight advises it for two GPUs that no driver serves together."""
    host = Bare(tmp_path, K80, RUBIN)
    place = next(one.parent for one in tmp_path.glob("sys/bus/pci/devices/*/device") if "102d" in one.read_text())
    (place / "driver").unlink(missing_ok=True)
    (place / "driver").symlink_to("../../../bus/pci/drivers/vfio-pci")
    assert choose(host, SPEC).version == NEWEST_615


def test_half_an_installation_is_no_driver_to_keep(tmp_path: Path) -> None:
    host = Bare(tmp_path, H100).with_driver(NEWEST_615)
    host.make_directory("/var/lib/gpuprov")
    host.write("/var/lib/gpuprov/driver-incomplete", f"{NEWEST_615}\n".encode())
    assert choose(host, SPEC).version == NEWEST


@pytest.mark.parametrize(
    ("ended", "installed", "version"),
    [
        ("", "", "580.159.03"),  # cut off before the driver, by Ctrl-C, a reboot or a lost connection
        ("failed", "550.163.01", "580.159.03"),  # cut off while it replaced another
        ("done", "580.159.03", "580.159.03"),  # though it has holes today
        ("done", "", "580.159.03"),  # somebody removed it
        ("done", NEWEST, NEWEST),  # somebody put another in its place
        ("rolled-back", "", NEWEST),
    ],
)
def test_what_was_chosen_stays_chosen(tmp_path: Path, ended: str, installed: str, version: str) -> None:
    host = Bare(tmp_path, H100).with_run("470.256.02", "rolled-back").with_run("580.159.03", ended)
    if installed:
        host.with_driver(installed)
    found = choose(host, SPEC)
    assert found.version == version
    assert bool(found.newer) is (version == "580.159.03")


def test_a_driver_that_gpuprov_installed_stays_without_a_recorded_choice(tmp_path: Path) -> None:
    """Journals of earlier versions have none; and a rollback takes the last one away."""
    host = Bare(tmp_path, H100).with_driver("550.163.01")
    host.make_directory("/var/lib/gpuprov")
    record = Installation("550.163.01", "https://x.example/a.run", "0" * 64, "x86_64", kernel_modules=True)
    host.write(RECORD, json.dumps(asdict(record)).encode())
    assert (choose(host, SPEC).version, choose(host, SPEC, upgrade=True).version) == ("550.163.01", NEWEST)


def test_an_image_does_not_follow_the_kernel_that_it_is_built_on(tmp_path: Path) -> None:
    spec = parse_spec({"target": "image", "image_gpus": ["hopper"]})
    assert choose(FakeHost(tmp_path), spec).version == NEWEST


def test_a_newer_table_is_told_and_upgrade_takes_it(tmp_path: Path) -> None:
    host = Bare(tmp_path, H100).with_run(NEWEST, "done").with_driver(NEWEST)
    assert (choose(host, SPEC).version, choose(host, SPEC).newer) == (NEWEST, "")
    host.tables = Tables(released(LATER))
    assert choose(host, SPEC).version == NEWEST
    assert choose(host, SPEC).newer.startswith(f"driver {LATER}: long-term branch")
    assert choose(host, SPEC, upgrade=True).version == LATER
    mirror = parse_spec({"driver_mirror": "https://mirror.example/drivers"})
    assert choose(host, mirror).newer.endswith("; the mirror may lack it")
    events: list[Any] = []
    request = Request("doctor", tables=released(LATER))
    run_request(request, events.append, host)
    told = [one.message for one in events if isinstance(one, Note)]
    assert [one for one in told if one.startswith(f"`gpuprov install --upgrade` installs driver {LATER}: long-term")]
    run_request(Request("doctor", {"driver_mirror": mirror.driver_mirror}, tables=request.tables), events.append, host)
    assert "; the mirror may lack it" in str(events)


@pytest.mark.parametrize(
    ("others", "there", "sent", "version"),
    [
        ({"H100, L4": NEWEST}, "", {}, NEWEST),
        ({"H100": NEWEST}, "", {}, LATER),  # other models
        ({"H100, L4": "580.159.03"}, "", {}, LATER),  # has holes
        ({"H100, L4": NEWEST}, "", bulletin(LATER), LATER),  # has holes by now
        ({"H100, L4": "580.999.01"}, "", {}, LATER),  # no release that is known
        ({"H100, L4": "$(id)"}, "", {}, LATER),
        ({"H100, L4": NEWEST}, NEWEST_615, {}, NEWEST_615),  # the host has a driver that serves
        ({"H100, L4": NEWEST}, "595.84", {}, NEWEST_595),  # older than the one with holes that is there
    ],
)
def test_a_new_host_gets_the_driver_of_hosts_with_the_same_gpus(
    tmp_path: Path, others: dict[str, str], there: str, sent: dict[str, Any], version: str
) -> None:
    host = Bare(tmp_path, L4, H100, L4)
    host.tables = Tables(released(LATER) | sent)
    if there:
        host.with_driver(there)
    found = choose(host, SPEC, others)
    assert (found.version, found.gpus) == (version, "H100, L4")
    if version == NEWEST:
        assert "as other hosts with these GPUs have, supports L4 and H100, no known" in str(found)
        assert found.is_new and LATER in found.newer
        assert choose(host, SPEC, others, upgrade=True).version == LATER
        tables = released(LATER)
        _, events = ask(host, Request("install", check=True, tables=tables, fleet_drivers=others))
        notes = [one.message for one in events if isinstance(one, Note)]
        assert [one for one in notes if one.startswith(f"driver {NEWEST} is not the newest; `gpuprov install --up")]


def test_the_choice_is_part_of_the_plan(tmp_path: Path) -> None:
    events: list[Any] = []
    host = FakeHost(tmp_path)
    simgpu.install_tree(tmp_path, simgpu.DRIVER_VERSION)
    assert run_request(Request("install", check=True), events.append, host) == 0, events[-1]
    (planned,) = [one for one in events if isinstance(one, Planned)]
    # The kernel decides, so that no other version can be named.
    assert planned.choice is not None and not planned.choice.can_be_named
    assert (planned.choice.gpus, planned.choice.version) == ("", simgpu.DRIVER_VERSION)
    run_request(Request("install", {"driver": "preinstalled"}, check=True), events.append, host)
    assert [one for one in events if isinstance(one, Planned)][-1].choice is None


@pytest.mark.parametrize(
    ("value", "command", "upgrade"),
    [(True, "install", True), (True, "plan", True), (False, "install", False), (True, "verify", False)],
)
def test_a_playbook_may_upgrade_too(value: bool, command: str, upgrade: bool) -> None:
    assert task_request(command, {}, upgrade=value).upgrade is upgrade


def test_a_run_that_is_stopped_has_recorded_its_choice(tmp_path: Path) -> None:
    """Else a table that is newer by the next run would change it."""
    host, events = FakeHost(tmp_path), list[Any]()
    write_runfile(tmp_path / "driver.run")
    wanted = {"driver_url": "/driver.run", "driver_version": simgpu.DRIVER_VERSION}
    stop = lambda: bool(events[-1:]) and is_done(events[-1])  # noqa: E731
    assert run_request(Request("install", wanted), events.append, host, stop) == 130, events[-1]
    found = last_choice(host)
    assert found is not None and (found.driver, found.version, found.done) == ("runfile", simgpu.DRIVER_VERSION, False)


@pytest.mark.parametrize("how", ["stop", "power cut"])
def test_the_run_after_a_cut_resumes_the_same_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Though the controller's table has a newer release by then; the plan's changes stand for the driver's."""
    host, events = Bare(tmp_path, H100), list[Any]()
    files = ("/etc/first", "/etc/second")

    def two_files(facts: object, spec: HostSpec, steps: object) -> Plan:
        missing = (WriteFile(path, spec.driver_version.encode()) for path in files if not host.exists(path))
        return Plan(tuple(StepChange("driver", one) for one in missing))

    def cut(event: object) -> None:
        events.append(event)
        if how == "power cut" and is_done(event):
            raise KeyboardInterrupt

    monkeypatch.setattr(install, "make_plan", two_files)
    with contextlib.suppress(KeyboardInterrupt):
        run_request(Request("install"), cut, host, lambda: bool(events) and is_done(events[-1]))
    assert not host.exists(files[1])
    newer = Request("install", tables=released(LATER))
    assert run_request(newer, events.append, host) == 0, events[-1]
    assert {host.read_text(path) for path in files} == {NEWEST}
    planned = [one for one in events if isinstance(one, Planned)][-1]
    assert planned.choice is not None and planned.choice.version == NEWEST and LATER in planned.choice.newer


def test_a_further_request_of_a_run_has_not_ended_yet(tmp_path: Path) -> None:
    """As a playbook's tasks, of which the second is cut off in the middle of the driver."""
    host = Bare(tmp_path, H100).with_run("570.211.01", "done").with_driver("550.163.01")
    resume_journal(host, read_runs(host)[0]).chose("runfile", "570.211.01")
    host.write("/var/lib/gpuprov/driver-incomplete", b"570.211.01\n")
    assert choose(host, SPEC).version == "570.211.01"


def is_done(event: object) -> bool:
    return isinstance(event, ChangeDone)


def test_another_source_that_was_chosen_stays(tmp_path: Path) -> None:
    host = Bare(tmp_path, H100).with_run("", "done", "distribution").with_driver("535.261.03")
    assert choose(host, SPEC).driver == choose(host, SPEC, upgrade=True).driver == "distribution"


@pytest.mark.parametrize("end", ["failed", "done"])
def test_a_driver_that_was_there_and_is_gone_is_replaced(tmp_path: Path, end: str) -> None:
    """`set gpuprov_driver: runfile`, the advice without a driver, names what is the default."""
    assert choose(Bare(tmp_path, H100).with_run("", end, "preinstalled"), SPEC).version == NEWEST


def test_libraries_follow_the_driver_of_a_kernel_outside(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    assert choose(host, SPEC).version == choose(host, SPEC, upgrade=True).version == simgpu.DRIVER_VERSION
    new_journal(host, "install").chose("distribution", "")
    assert str(choose(host, SPEC)) == "gpuprov_driver: distribution, chosen by an earlier run"


def test_a_journal_of_before_holds_no_choice(tmp_path: Path) -> None:
    host = Bare(tmp_path, H100)
    assert last_choice(host) is None
    new_journal(host, "install").end("done")
    assert last_choice(host) is None


@pytest.mark.parametrize(
    ("works", "unreachable", "code", "what", "step"),
    [
        (("distribution", "packages"), False, 2, "can't be installed here, the distribution's own driver can",
         "gpuprov install -e gpuprov_driver=distribution"),
        (("packages",), True, 2, "can't be installed here, the driver in NVIDIA's repository can",
         "gpuprov install -e gpuprov_driver=packages"),
        ((), True, 2, "no source of the driver can be reached",
         f"gpuprov bundle create --distro debian-12 --driver {NEWEST} --kernel 6.1.0-13-amd64 -o bundle.tar"),
        ((), False, 1, "Secure Boot is on", "mokutil --import"),
    ],
)  # fmt: skip
def test_the_source_that_works_here_is_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: tuple[str, ...], unreachable: bool, code: int, what: str,
    step: str,
) -> None:  # fmt: skip
    """With Secure Boot, or without NVIDIA's server, before anything is changed; a named version is only refused."""
    host = Bare(tmp_path, H100)
    host.make_directory("/sys/firmware/efi/efivars")
    host.write("/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", b"\6\0\0\0\1")
    down = (Problem("us.download.nvidia.com can't be reached"),) if unreachable else ()
    monkeypatch.setattr(install, "unreachable", lambda system, urls: down if urls else ())

    def plan(facts: HostFacts, spec: HostSpec, steps: tuple[str, ...]) -> Plan:
        return Plan(()) if spec.driver in works else make_plan(facts, spec, steps)

    monkeypatch.setattr(install, "make_plan", plan)
    before = host.state()
    ended: list[Any] = []
    assert run_request(Request("install"), ended.append, host) == code
    assert (what in ended[-1].problems[0].what, step in ended[-1].problems[0].next_step) == (True, True)
    assert "Secure Boot is on" in ended[-1].problems[-1].what or unreachable
    assert host.state() == before and last_choice(host) is None
    assert run_request(Request("install", {"driver_version": NEWEST}), ended.append, host) == 1


@pytest.mark.parametrize("metal", [True, False])
def test_without_a_gpu_an_installation_says_that_alone(tmp_path: Path, *, metal: bool) -> None:
    ended, events = ask(FakeHost(tmp_path, 0, metal=metal), Request("install"))
    assert [one.what for one in ended.problems] == ["there is no NVIDIA GPU in this machine"]
    assert not [one for one in events if isinstance(one, Note) and one.level != "debug" and "driver" in one.message]
