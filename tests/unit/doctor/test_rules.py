"""Each rule over a host that has just its trouble: what it finds comes first, with evidence and what to type."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpuprov.doctor.examine import RULES, diagnose, report
from gpuprov.doctor.finding import ANY_ROOT, CERTAIN, CONFIDENCES, TOOLKIT, WARNING, Finding, Rule
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.doctor.toolkit_rules import INSTALL_OBSTRUCTED
from gpuprov.engines.docker_unit import DockerUnit
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH
from tests.unit.doctor.host import examined, healthy, with_driver
from tests.unit.doctor.ill import (
    NODES,
    Change,
    Row,
    both,
    bound_to,
    docker,
    hidden,
    host,
    kernel_says,
    mismatched,
    text,
    unit,
    without,
)
from tests.unit.doctor.rows_containers import CONTAINER_ROWS
from tests.unit.doctor.rows_driver import DRIVER_ROWS
from tests.unit.doctor.rows_engines import ENGINE_ROWS
from tests.unit.doctor.rows_kernel import KERNEL_ROWS
from tests.unit.doctor.rows_libraries import LIBRARY_ROWS

pytestmark = pytest.mark.root
ROWS = (*KERNEL_ROWS, *DRIVER_ROWS, *CONTAINER_ROWS, *ENGINE_ROWS, *LIBRARY_ROWS)


@pytest.fixture(scope="module")
def x(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostSnapshot]:
    """A host with two GPUs on which nothing is wrong."""
    yield examined(healthy(tmp_path_factory.mktemp("host")))


# What else is found there follows from these, and is told after them: (rule, what makes the host ill, the first cause).
CONSEQUENCES = (
    ("version-mismatch", hidden(), "library-hidden"),
    (
        "module-not-loaded",
        kernel_says("NVRM: The NVIDIA probe routine failed for 2 device(s)."),
        "probe-failed",
    ),
    (
        "probe-failed",
        kernel_says(
            "NVRM: GPU 0000:17:00.0: RmInitAdapter failed! (0x24:0xffff:1220)",
            "NVRM: The NVIDIA probe routine failed for 2 device(s).",
        ),
        "init-failed",
    ),
    (
        "runtime-missing",
        both(
            without(LAUNCHER_PATH),
            host(read_only={"/usr": "/usr (ro)"}),
            lambda x: replace(x, absent=frozenset({LAUNCHER_PATH})),
        ),
        "install-obstructed",
    ),
    (
        "node-does-not-open",
        lambda x: replace(mismatched(x), node_errors={"/dev/nvidia0": "Input/output error"}),
        "version-mismatch",
    ),
    ("nodes-unit-failed", both(unit(NODES, active="failed"), lambda x: with_driver(x, present=())), "nodes-missing"),
    ("nvidia-smi-18", mismatched, "version-mismatch"),
    ("module-not-loaded", bound_to("nouveau"), "gpu-nouveau"),
    (
        "docker-down",
        both(
            docker(active=False, runtimes=None, config_text="{", refused="unexpected EOF"),
            unit("docker.service", active="failed", result="exit-code"),
        ),
        "daemon-json-broken",
    ),
    (
        "docker-down",
        both(docker(active=False, runtimes=None), unit("docker.service", active="inactive", enabled="disabled")),
        "docker-disabled",
    ),
)
COVERED = {row.rule for row in ROWS} | {name for name, _, _ in CONSEQUENCES}


def test_every_rule_is_tried() -> None:
    assert {rule.name for rule in RULES} == COVERED
    assert len(RULES) >= 40


def test_nothing_is_wrong_with_the_host_that_all_rows_start_from(x: HostSnapshot) -> None:
    assert diagnose(x) == ()


# What docker reads is no trouble, however odd; of what it does not say nothing is certain.
READ_BY_DOCKER = (
    ("20.10.24", '{"debug": true, "debug": false, '),
    ("26.1.5", '\ufeff{"debug": true, '),
    ("20.10.24", '{"log-driver": "caf\udce9", '),
    ("20.10.24", '{\r\n"debug": true,\r\n'),
)


@pytest.mark.parametrize(("version", "beginning"), READ_BY_DOCKER)
def test_a_file_that_docker_reads_is_no_trouble(x: HostSnapshot, version: str, beginning: str) -> None:
    text = beginning + (x.host.docker.config_text or "")[1:]
    assert diagnose(docker(config_text=text, version=version, cdi=True)(x)) == ()


@pytest.mark.parametrize("address", ["unix:///run/docker.sock", "tcp://localhost:2375", "tcp://127.0.0.1:2375"])
def test_a_docker_host_that_leads_to_this_docker_is_no_trouble(x: HostSnapshot, address: str) -> None:
    both_ways = DockerUnit(load="loaded", command=("dockerd", "-H", "fd://", "-H", "tcp://0.0.0.0:2375"))
    ill = both(
        docker(unit=both_ways, address="unix:///run/docker.sock"),
        text("/etc/environment", f'PATH="/usr/bin"\nDOCKER_HOST={address}\n'),
    )
    assert diagnose(ill(x)) == ()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_the_trouble_comes_first(x: HostSnapshot, row: Row) -> None:
    causes = diagnose(row.change(x))
    told = [(cause.rule.name, cause.follows, cause.finding) for cause in causes]
    assert causes, "nothing found"
    assert causes[0].rule.name == row.rule, told
    finding = causes[0].finding
    assert row.evidence in finding.evidence
    assert row.step in finding.next_step
    assert finding.confidence == row.confidence


@pytest.mark.parametrize(("rule", "change", "root"), CONSEQUENCES, ids=[row[0] for row in CONSEQUENCES])
def test_a_consequence_comes_after_its_root(x: HostSnapshot, rule: str, change: Change, root: str) -> None:
    causes = diagnose(change(x))
    assert causes[0].rule.name == root, [cause.rule.name for cause in causes]
    assert {cause.rule.name: cause.follows for cause in causes}[rule] == root


@pytest.mark.parametrize("row", [row for row in ROWS if row.rule.startswith("xid-")], ids=lambda row: row.rule)
def test_a_line_of_the_past_is_an_aside_where_all_gpus_are_served(x: HostSnapshot, row: Row) -> None:
    causes = diagnose(replace(row.change(x), smi=x.smi))
    assert [(cause.rule.name, cause.finding.confidence) for cause in causes] == [(row.rule, WARNING)]


def test_causes_are_told_by_confidence_then_in_the_order_of_dependence(x: HostSnapshot) -> None:
    ill = both(docker(runtimes={"runc": "runc"}), unit("gpuprov-refresh.service", active="failed"),
               lambda x: replace(x, not_executable={LAUNCHER_PATH: 0o644}, open_run=" in: x"))(x)  # fmt: skip
    found = diagnose(ill)
    ranks = [CONFIDENCES.index(cause.finding.confidence) for cause in found]
    assert ranks == sorted(ranks)
    assert [cause.rule.name for cause in found] == [
        "runtime-not-executable", "docker-not-restarted", "run-cut-off", "refresh-unit-failed",
    ]  # fmt: skip


def test_what_obstructs_an_installation_does_not_follow_from_itself(x: HostSnapshot) -> None:
    finding = Finding("the disk is full", "df: 100 %", "make room, then: gpuprov install", CERTAIN)
    rules = [Rule(name, TOOLKIT, "…", lambda _: finding) for name in (INSTALL_OBSTRUCTED, "toolkit-missing")]
    causes = diagnose(x, rules)
    assert [cause.follows for cause in causes] == ["", INSTALL_OBSTRUCTED]
    events: list[Any] = []
    done = report(x, causes, events.append)
    assert done.problems[1].next_step == finding.next_step


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_a_rule_follows_from_exists(rule: Any) -> None:
    assert rule.follows == ANY_ROOT or set(rule.follows) <= {one.name for one in RULES} - {rule.name}
    assert rule.sign


# What a step may begin with: programs of a GPU host, its package managers, and gpuprov.
PROGRAMS = {
    "${EDITOR:-vi}", "aa-status", "apt-get", "chmod", "compute-sanitizer", "curl", "dkms", "dmesg", "docker", "echo",
    "gpuprov",
    "grep", "journalctl", "ldconfig", "ln", "ls", "lspci", "modprobe", "mokutil", "mount", "mv",
    "nvidia-bug-report.sh", "nvidia-ctk", "openssl",
    "nvidia-modprobe", "nvidia-smi", "nvidia-uninstall", "poweroff", "printf", "rm", "sed", "setsebool", "sh", "snap",
    "systemctl", "tail", "uname", "update-grub", "update-initramfs", "wsl",
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_what_to_type_is_a_line_that_a_shell_takes(x: HostSnapshot, row: Row) -> None:
    step = diagnose(row.change(x))[0].finding.next_step
    subprocess.run(("sh", "-n", "-c", step), check=True, timeout=300)
    commands = re.split(r"; | \| ", step.partition("  # ")[0])
    assert {command.split()[0] for command in commands} <= PROGRAMS


def test_a_machine_that_is_divided_on_purpose_is_not_ill(x: HostSnapshot) -> None:
    first, second = x.host.gpus
    shared = (first, replace(second, driver="vfio-pci"))
    half = replace(with_driver(x, gpus=x.driver.gpus[:1]), host=replace(x.host, gpus=shared))
    half = replace(half, host=replace(half.host, driver=replace(x.driver, gpus=x.driver.gpus[:1])))
    assert [(cause.rule.name, cause.finding.confidence) for cause in diagnose(half)] == [("gpu-vfio", WARNING)]


def test_what_concerns_the_kernel_is_typed_outside_of_a_system_container(x: HostSnapshot) -> None:
    ill = replace(x, host=replace(x.host, gpus=tuple(replace(gpu, driver="nouveau") for gpu in x.host.gpus)))
    step = diagnose(ill)[0].finding.next_step
    assert step.endswith("; systemctl reboot  # on the host")
