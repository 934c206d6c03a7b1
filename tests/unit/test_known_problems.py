"""Combinations that are known to break: the table, plans that would make them, sites that replace the table."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.site_tables import checked_tables, for_request, user_path, with_newer_tables
from gpuprov.cdi.discover import Gpu, MigDevice
from gpuprov.core.system import System
from gpuprov.engines.known import EngineFacts
from gpuprov.facts.host import HostFacts
from gpuprov.machine.machine import gather_kernel
from gpuprov.packages.interface import PackageFacts
from gpuprov.plan.preflight import combination
from gpuprov.plan.steps import make_plan
from gpuprov.protocol import tables
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.known_problems import NEWEST, matching, problems_of
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.protocol.tables import KNOWN_PROBLEMS, PACKAGED
from tests.unit.test_advisories import _own_tables, metal, run
from tests.unit.test_facts import put

__all__ = ["_own_tables", "metal"]

pytestmark = pytest.mark.root


def of_kernel(facts: HostFacts, **values: Any) -> HostFacts:
    return replace(facts, kernel=replace(facts.kernel, **values))


def with_driver(facts: HostFacts, version: str) -> HostFacts:
    return replace(facts, driver=replace(facts.driver, kernel_version=version, library_version=version))


def with_podman_4(facts: HostFacts, **packages: str) -> HostFacts:
    installed = {**facts.packages.installed, "podman": "4.9.3+ds1-1ubuntu0.2", **packages}
    return replace(facts, packages=PackageFacts("apt", installed), engines={"podman": EngineFacts("/usr/bin/podman")})


def with_docker(facts: HostFacts, version: str, *, mig: bool) -> HostFacts:
    device = MigDevice(0, 1, 0)
    gpu = Gpu(0, 0, "GPU-1", "0000:01:00.0", "NVIDIA A100", mig=(device,) if mig else ())
    docker = replace(facts.docker, version=version)
    return replace(facts, docker=docker, driver=replace(facts.driver, gpus=(gpu,)))


def refused(facts: HostFacts, **options: Any) -> tuple[str, ...]:
    """Return the names of the known problems for which a plan is refused."""
    names = {one.name for one in problems_of(tables.packaged(KNOWN_PROBLEMS))}
    found = make_plan(facts, parse_spec({"driver_version": "580.178.04", **options})).problems
    return tuple(name for one in found if (name := one.what.partition(":")[0]) in names)


LINUX_7_1, P6E = {"release": "7.1.2-amd64"}, {"machine": "p6e-gb200.36xlarge", "loaded_modules": ("efa", "ena")}
PAGES = {"page_size": 65536}


@pytest.mark.parametrize(
    ("kernel", "version", "name"),
    [
        (LINUX_7_1, "580.142", "driver-580-linux-7.1"),
        (LINUX_7_1, "580.159.03", "driver-580-linux-7.1"),
        (LINUX_7_1, "580.159.04", ""),
        ({"release": "7.0.9-amd64"}, "580.142", ""),
        (PAGES, "590.44.01", "driver-64k-pages"),
        (PAGES, "610.43.03", "driver-64k-pages"),
        ({"release": "6.12.0-1.el10.aarch64+64k"}, "595.91.07", "driver-64k-pages"),
        (PAGES, "580.173.02", ""),
        (PAGES, "610.57.04", ""),
        ({}, "595.91.07", ""),
        (P6E, "595.91.07", "driver-595-p6e-efa"),
        (P6E, "580.173.02", ""),
        # The same driver breaks nothing on another machine of Amazon's, or without EFA.
        ({**P6E, "machine": "p5.48xlarge"}, "595.91.07", ""),
        ({**P6E, "loaded_modules": ("ena",)}, "595.91.07", ""),
    ],
)
def test_a_driver_that_breaks_is_refused(metal: HostFacts, kernel: Mapping[str, Any], version: str, name: str) -> None:
    facts = of_kernel(metal, **kernel)
    assert refused(facts, driver_version=version) == ((name,) if name else ())
    if name:
        assert refused(facts, driver_version=version, allow_known_problems=[name]) == ()


def test_the_refusal_says_source_and_settings(metal: HostFacts) -> None:
    facts = of_kernel(metal, **LINUX_7_1)
    (one,) = make_plan(facts, parse_spec({"driver_version": "580.142"})).problems
    assert one.evidence == (
        "driver >=580.142,<580.159.04; kernel >=7.1; builds: https://github.com/void-linux/void-packages/issues/61087"
    )
    allow = "gpuprov_allow_known_problems: [driver-580-linux-7.1]"
    assert one.next_step == f'set gpuprov_driver_version: "580.178.04", or {allow}'


def test_an_allowed_known_problem_is_a_warning(metal: HostFacts) -> None:
    spec = parse_spec({"driver_version": "580.142", "allow_known_problems": ["driver-580-linux-7.1"]})
    plan = make_plan(of_kernel(metal, **LINUX_7_1), spec)
    assert plan.problems == ()
    assert [one for one in plan.warnings if one.startswith("driver-580-linux-7.1: ")]


def test_libraries_alone_need_no_modules_of_the_kernel(metal: HostFacts) -> None:
    assert refused(of_kernel(metal, **LINUX_7_1), driver_version="580.142", kernel_modules="none") == ()


@pytest.mark.parametrize(
    ("options", "packages", "is_refused"),
    [
        # The newest, which the repository alone knows, writes CDI 0.7.0 too.
        ({"toolkit": "nvidia"}, {}, True),
        ({"toolkit": "nvidia", "toolkit_version": "1.19.1-1"}, {}, True),
        ({"toolkit": "nvidia", "toolkit_version": "1.18.2-1"}, {}, False),
        ({"toolkit": "bundled"}, {}, False),
        ({"toolkit": "nvidia"}, {"podman": "5.4.2-1"}, False),
    ],
)
def test_a_toolkit_that_podman_4_can_not_read_is_refused(
    metal: HostFacts, options: Mapping[str, Any], packages: Mapping[str, str], is_refused: bool
) -> None:
    facts = with_podman_4(metal, **packages)
    assert refused(facts, **options) == (("toolkit-podman-4",) if is_refused else ())
    # podman is nobody's concern on a host that uses docker.
    assert refused(replace(facts, engines={}), **options) == ()


def test_what_is_there_already_is_a_warning(metal: HostFacts) -> None:
    facts = with_podman_4(metal, **{"nvidia-container-toolkit": "1.20.1-1"})
    plan = make_plan(facts, parse_spec({"driver_version": "580.178.04", "toolkit": "nvidia"}))
    assert (plan.problems, [one[:17] for one in plan.warnings]) == ((), ["toolkit-podman-4:"])


@pytest.mark.parametrize(
    ("docker", "options", "is_refused"),
    [
        ("29.8.2", {"toolkit": "nvidia"}, True),
        ("29.8.2", {"toolkit": "bundled"}, False),
        ("28.5.2", {"toolkit": "nvidia"}, False),
        ("29.8.2", {"toolkit": "nvidia", "docker": "none", "engines": ["podman"]}, False),
    ],
)
def test_mig_refuses_docker_29(metal: HostFacts, docker: str, options: Mapping[str, Any], is_refused: bool) -> None:
    assert refused(with_docker(metal, docker, mig=True), **options) == (("docker-29-mig",) if is_refused else ())
    assert refused(with_docker(metal, docker, mig=False), **options) == ()


def test_the_kernels_facts_have_page_size_and_machine(tmp_path: Path) -> None:
    put(tmp_path, "/sys/class/dmi/id/product_name", "p6e-gb200.36xlarge\n")
    found = gather_kernel(System(str(tmp_path)))
    assert (found.page_size, found.machine) == (os.sysconf("SC_PAGE_SIZE"), "p6e-gb200.36xlarge")


def test_each_packaged_row_has_a_source_and_is_found() -> None:
    rows = problems_of(tables.packaged(KNOWN_PROBLEMS))
    assert len({one.name for one in rows}) == len(rows) >= 5
    assert {option for one in rows for option in one.use} <= {"driver_version", "toolkit"}


@pytest.mark.parametrize(
    "change",
    [
        {"sources": []},
        {"sources": ["see the forum"]},
        {"sources": ["https://forum.example/\x1b[2J"]},
        {"fixed_in": "\x1b[2J"},
        {"when": {"driver": "580.142"}},
        {"when": {"driver": ">=580;reboot"}},
        {"when": {}},
        {"when": {"lxc": ">=1"}},
        {"when": {"docker": ""}},
        {"when": {"page_size": "64k"}},
        {"when": {"modules": "efa"}},
        {"when": {"machine": "p6e-\n"}},
        {"name": "A name"},
        {"use": {"driver_version": "1; reboot"}},
        {"command": "true\nreboot"},
        {"what": 5},
        {"severity": "high"},
    ],
)
def test_a_wrong_row_is_refused(change: Mapping[str, Any]) -> None:
    data = json.loads(json.dumps(tables.packaged(KNOWN_PROBLEMS)))
    data["problems"][0].update(change)
    with pytest.raises(GpuprovError, match="table of known problems is not valid"):
        checked_tables({KNOWN_PROBLEMS: data})


def table_of(updated: str, *rows: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": 1, "updated": updated, "problems": list(rows)}


OWN = {
    "name": "our-rack", "reported": "2026-12-01", "when": {"driver": ">=580", "gpus": ["1eb8"]},
    "what": "the rack trips", "sources": ["https://wiki.example/rack"],
}  # fmt: skip


def test_a_sites_table_replaces_the_packaged_one(tmp_path: Path, metal: HostFacts) -> None:
    assert "driver-64k-pages (2026-07-29): driver >=590.44.01,<=610.43.03; page size 65536\n" in run()
    (tmp_path / "site.json").write_text(json.dumps(table_of("2026-12-01", OWN)))
    assert "known_problems.json: 1 known problem" in run("update", "--from", str(tmp_path / "site.json"))
    shown = json.loads(run("--json"))
    assert [one["name"] for one in shown["known_problems"]["problems"]] == ["our-rack"]
    assert shown["rows"]
    # It travels to the hosts, where it counts.
    own = checked_tables(json.loads(json.dumps(for_request(HostSpec()))))
    assert [one.name for one in matching(combination(with_driver(metal, "580.178.04")), own)] == ["our-rack"]
    (problem,) = make_plan(replace(metal, tables=own), parse_spec({"driver_version": "580.178.04"})).problems
    assert problem.next_step == "set gpuprov_allow_known_problems: [our-rack]"
    # What another gpuprov shows is read as well.
    (tmp_path / "all.json").write_text(json.dumps({**shown, "known_problems": table_of("2026-12-02")}))
    assert "0 known problems" in run("update", "--from", str(tmp_path / "all.json"))
    assert json.loads(user_path(KNOWN_PROBLEMS).read_text())["problems"] == []


@pytest.mark.parametrize(
    "table", [table_of("2026-12-01", {**OWN, "sources": []}), table_of("2026-13-01", OWN)], ids=["row", "date"]
)
def test_a_wrong_sites_table_changes_nothing(tmp_path: Path, table: Mapping[str, Any]) -> None:
    (tmp_path / "site.json").write_text(json.dumps(table))
    with pytest.raises(GpuprovError):
        run("update", "--from", str(tmp_path / "site.json"))
    assert not user_path(KNOWN_PROBLEMS).exists()


def test_a_sites_table_that_is_not_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "site.json").write_text(json.dumps(table_of("2026-01-01", OWN)))
    said = run("update", "--from", str(tmp_path / "site.json"))
    assert "1 known problem; not used: this gpuprov's own are newer\n" in said


@pytest.mark.parametrize(("updated", "count"), [("2026-01-01", 0), ("2027-01-01", 1)])
def test_a_bundles_table_counts_if_it_is_newer(metal: HostFacts, updated: str, count: int) -> None:
    content = json.dumps(table_of(updated, OWN)).encode()
    own = with_newer_tables(PACKAGED, lambda name: content if name == "known_problems.json" else b"", "a bundle")
    assert len(matching(combination(with_driver(metal, "580.178.04")), own)) == count


def test_the_newest_version_is_beyond_no_fix(metal: HostFacts) -> None:
    there = {**combination(metal), "driver": NEWEST, "page_size": 65536}
    assert matching(there, PACKAGED) == ()
