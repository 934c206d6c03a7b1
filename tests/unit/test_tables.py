"""The tables that ship as data files: every row loads, names its source, and has patterns that compile."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.site_tables import checked_tables, for_request
from gpuprov.core.commands import failures, first_match
from gpuprov.driver import mig
from gpuprov.facts import boot
from gpuprov.facts.host import HostFacts, gather
from gpuprov.machine.distros import Unsupported
from gpuprov.machine.pci import PciGpu
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.plan.steps import make_plan
from gpuprov.protocol import tables
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.mig_configs import checked_mig_configs, layout_of
from gpuprov.protocol.models import checked_models, fabric_of, generation_of, model_of, models, name_of
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.protocol.tables import PACKAGED, Tables
from tests import simgpu
from tests.unit.fake_host import FakeHost

PROGRAMS = ("apt", "rpm", "installer", "fabric manager", "nvidia-smi", "container", "kubectl", "pod", "download",
            "http", "ansible", "sudo", "login", "device node")  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_failure_of_a_program_has_a_pattern_or_an_exit_code(program: str) -> None:
    rows = failures(program)
    assert rows
    for row in rows:
        re.compile(row.pattern)
        assert row.what and (row.pattern or row.returncode >= 0)
    assert tables.packaged(tables.FAILURES)["sources"].keys() == set(PROGRAMS)


def test_the_first_row_decides_not_the_first_line() -> None:
    found = first_match("apt", ["E: Failed to fetch http://a/InRelease", "E: write: No space left on device"])
    assert found is not None
    assert (found[0].what, found[1]) == ("the disk is full", "E: write: No space left on device")


def test_notes_in_tables_are_for_people_only() -> None:
    assert "note" not in str(tables.packaged(tables.FAILURES)).split("'")


def test_a_row_with_an_unknown_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "packaged", lambda name: {"wrong": [{"what": "x", "color": "y"}]})
    with pytest.raises(ValueError, match="unknown in Failure: color"):
        failures("wrong")


def test_a_row_has_everything_else_from_the_row_that_it_is_like(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = {"version": "2", "like": "a 1"}, {"version": "1", "next_step": "stop"}
    like = [{"id": "a", "what": "one", **one}, {"id": "a", "what": "two", **two}]
    monkeypatch.setattr(tables, "packaged", lambda name: {"like": like})
    expected = Unsupported("a", "2", "one", "stop"), Unsupported("a", "1", "two", "stop")
    assert tables.rows("like", "like", Unsupported) == expected


# Device id → model, form, fabric, whether it may be divided by MIG.
MODELS = {
    "1db4": ("V100", "PCIe", "", False), "20b2": ("A100", "HGX", "nvswitch", True), "27b8": ("L4", "PCIe", "", False),
    "2330": ("H100", "HGX", "nvswitch", True), "2331": ("H100", "PCIe", "", True), "233b": ("H200", "NVL", "", True),
    "2342": ("GH200", "Grace", "", True), "2901": ("B200", "HGX", "nvlsm", True),
    "3182": ("B300", "HGX", "nvlsm", True), "2941": ("GB200", "Grace", "imex", True),
    "31c2": ("GB300", "Grace", "imex", True),
}  # fmt: skip


@pytest.mark.parametrize("device_id", MODELS)
def test_a_model_has_its_form_and_fabric(device_id: str) -> None:
    found = model_of(device_id, PACKAGED)
    assert found is not None
    assert (found.name, found.form, found.fabric, found.mig) == MODELS[device_id]
    assert found.coherent_memory == (found.form == "Grace")
    generation = generation_of(device_id, PACKAGED)
    assert generation is not None and (found.form != "Grace" or generation.modules == "open")


def test_every_model_is_of_a_generation_and_in_the_table_once() -> None:
    ids = [one for model in models(PACKAGED).models for one in model.ids]
    assert len(ids) == len(set(ids)) and all(generation_of(one, PACKAGED) for one in ids)
    assert [name_of(one, PACKAGED) for one in ("2e12", "ffff")] == ["Blackwell", ""]
    assert fabric_of("2e12", PACKAGED) is None


def test_a_site_replaces_the_table_of_models(tmp_path: Path) -> None:
    table = json.loads(json.dumps(tables.packaged(tables.MODELS)))
    table["models"].append({"name": "X1", "ids": ["3fff"], "form": "HGX", "fabric": "nvlsm", "note": "of this site"})
    file = tmp_path / "models.json"
    file.write_text(json.dumps(table))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    own = checked_tables(json.loads(json.dumps(for_request(HostSpec(models=str(file), models_sha256=digest)))))
    assert (name_of("3fff", own), fabric_of("3fff", own)) == ("X1", fabric_of("2901", PACKAGED))
    assert name_of("3fff", PACKAGED) == ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"format": 0}, "its format is not 1"),
        ({"models": [{"name": "X1", "ids": ["3fff"], "fabric": "magic"}]}, "X1: no such fabric"),
        ({"models": [{"name": "X1", "ids": "3fff"}]}, "Table.models[0].ids is not a list"),
        ({"models": [{"name": "X1", "ids": ["3FFF"]}]}, "X1: '3FFF' is no PCI device id"),
        ({"models": [{"id": "a", "like": "a", "name": "X1", "ids": ["3fff"]}]}, "unknown in Table.models[0]: id, like"),
        ({"models": ["X1"]}, "Table.models[0] is not an object"),
        ({"fabrics": None}, "Table.fabrics is not a list"),
        ({"generations": [{"name": "X"}]}, "Table.generations[0].first is missing"),
        (
            {"generations": [{"name": "X", "first": "3f00", "last": "3fff", "modules": "openly"}]},
            "Table.generations[0].modules is none of proprietary, open, both",
        ),
    ],
)
def test_a_wrong_table_of_models_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        checked_models({**tables.packaged(tables.MODELS), **wrong}, "site.json")
    assert says in str(raised.value) and "site.json" in str(raised.value)


def test_help_reads_the_table_of_engines_alone() -> None:
    code = "import gpuprov.cli.main; from gpuprov.protocol import tables; print(tables.packaged.cache_info().misses)"
    assert subprocess.run((sys.executable, "-c", code), stdout=subprocess.PIPE, check=True).stdout == b"1\n"


# -- MIG configurations ------------------------------------------------------------------------------------------------


# In the form of the file in mig-parted's README, which people copy: anchors, comments and keys of YAML among it.
FILE = """\
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  all-enabled:
    - devices: all
      mig-enabled: true
      mig-devices: {}
  # H100-80GB and A100-40GB in one fleet
  all-balanced:
    - device-filter: ["0x20B010DE", "0x20B110DE"]
      devices: all
      mig-enabled: true
      mig-devices:
        "1g.5gb": 2
        "2g.10gb": 1
        "3g.20gb": 1
    - device-filter: "0x233010DE"
      devices: all
      mig-enabled: true
      mig-devices: &h100
        "1g.10gb": 2
        "2g.20gb": 1
        "3g.40gb": 1
  custom-config:
    - devices: [0, 1]
      mig-enabled: false
    - devices: [2]
      mig-enabled: true
      mig-devices: *h100
    - devices: [3]
      mig-enabled: true
      mig-devices: {"1g.10gb+me": 1}
"""
H100 = "1g.10gb,1g.10gb,2g.20gb,3g.40gb"


@pytest.fixture
def asked(tmp_path: Path) -> HostSpec:
    """Options that name a configuration in a file."""
    file = tmp_path / "config.yaml"
    file.write_text(FILE)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    configs = {"mig_configs": str(file), "mig_configs_sha256": digest, "mig_config": "all-balanced"}
    return parse_spec({"driver": "preinstalled", **configs})


@pytest.fixture
def own(asked: HostSpec) -> Tables:
    """The tables with that file, as a request brings it."""
    return checked_tables(json.loads(json.dumps(for_request(asked))))


@pytest.fixture
def facts(tmp_path: Path, own: Tables) -> HostFacts:
    """What is known of a host with an H100 and a B200 that nothing has divided."""
    host = FakeHost(tmp_path / "host", gpus=1, metal=True)
    simgpu.install_tree(host.root)
    gpus = (PciGpu("0000:17:00.0", "2330"), PciGpu("0000:18:00.0", "2901"))
    return replace(gather(host), gpus=gpus, tables=own)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("all-disabled", ("disabled",) * 4),
        ("all-enabled", ("enabled",) * 4),
        ("all-balanced", (H100, "1g.5gb,1g.5gb,2g.10gb,3g.20gb", "", H100)),
        ("custom-config", ("disabled", "disabled", H100, "1g.10gb+me")),
    ],
)
def test_each_gpu_gets_what_mig_parted_would_give_it(own: Tables, name: str, layout: tuple[str, ...]) -> None:
    assert layout_of(name, ["2330", "20B0", "2901", "2330"], own) == layout


def test_an_unknown_name_is_refused_with_the_known_ones(own: Tables) -> None:
    with pytest.raises(UsageError, match="known: all-disabled, all-enabled, all-balanced, custom-config"):
        layout_of("balanced", ["2330"], own)
    with pytest.raises(UsageError, match="gpuprov_mig_configs names no file"):
        layout_of("all-balanced", ["2330"], PACKAGED)


def test_the_plan_and_the_unit_of_the_next_boot_have_it(facts: HostFacts, asked: HostSpec) -> None:
    (change,) = mig.plan(source_of(facts, asked))
    assert change.summary() == f"divide GPUs by MIG: GPU 0: {H100}"
    changes: list[Any] = [item.change for item in make_plan(facts, asked, ("boot",)).changes]
    text = dict(changes[0].files)[f"{boot.UNITS}/{boot.MIG}"].decode()
    first, second = (gpu.bus_id for gpu in facts.gpus)
    assert f"nvidia-smi -i {first} -mig 1 && nvidia-smi mig -i {first} -cgi 3g.40gb,2g.20gb,1g.10gb,1g.10gb -C" in text
    changes = [item.change for item in make_plan(facts, replace(asked, mig_config="all-enabled"), ("boot",)).changes]
    text = dict(changes[0].files)[f"{boot.UNITS}/{boot.MIG}"].decode()
    assert f"nvidia-smi -i {second} -mig 1 && :" in text and "-cgi" not in text


def test_gpus_are_numbered_as_nvidia_smi_numbers_them(facts: HostFacts, asked: HostSpec) -> None:
    """One that is reserved for virtual machines has no number."""
    facts = replace(facts, gpus=(PciGpu("0000:16:00.0", "20b0", "vfio-pci"), *facts.gpus))
    (change,) = mig.plan(source_of(facts, asked))
    assert change.summary() == f"divide GPUs by MIG: GPU 0: {H100}"


def test_all_means_those_that_have_mig(own: Tables) -> None:
    """An L4, and a model that the table does not know."""
    assert layout_of("all-disabled", ["27b8", "2330", "3fff"], own) == ("", "disabled", "disabled")


def test_a_configuration_without_an_entry_for_the_hosts_gpus_is_said(facts: HostFacts, asked: HostSpec) -> None:
    gpus = PciGpu("0000:17:00.0", "2901"), PciGpu("0000:18:00.0", "29bc")
    (problem,) = mig.problems(replace(facts, gpus=gpus), asked)
    assert problem.what == "the MIG configuration all-balanced has no entry for the GPUs of this host"
    assert problem.evidence == "0x290110DE, 0x29BC10DE" and problem.next_step


def test_what_json_does_not_know_is_not_sent() -> None:
    found = checked_mig_configs({"version": "v1", "mig-configs": {}, "made": date(2026, 11, 24)}, "site.yaml")
    assert found == {"version": "v1", "mig-configs": {}}


def test_two_layouts_are_refused(facts: HostFacts, asked: HostSpec) -> None:
    (problem,) = mig.problems(facts, replace(asked, mig_layout=("disabled",)))
    assert problem.what == "two MIG layouts are given"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"devices": "all", "mig-enabled": True, "mig-devices": {"1c.3g.20gb": 2}}, "a profile none such as 1g.10gb"),
        ({"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb; reboot": 1}}, "a profile none"),
        ({"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 10**9}}, "more than 32 MIG devices"),
        ({"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": -1}}, "a profile none"),
        ({"devices": "all", "device-filter": "0x2330ABCD", "mig-enabled": False}, "a device-filter is no PCI id"),
        ({"devices": "some", "mig-enabled": False}, "devices is neither all nor a list"),
        ({"devices": "10", "mig-enabled": False}, "devices is neither all nor a list"),
        ({"devices": [True], "mig-enabled": False}, "devices is neither all nor a list"),
        ({"devices": [float("inf")], "mig-enabled": False}, "devices is neither all nor a list"),
        ({"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 2.9}}, "a profile none"),
        ({"devices": "all", "mig-enabled": "true", "mig-devices": {"1g.5gb": 1}}, "mig-enabled is neither true"),
        ({"devices": "all", "mig-enabled": False, "mig-devices": {"1g.5gb": 1}}, "mig-enabled is neither true"),
        ({"devices": "all", "mig-enabled": True}, "mig-enabled is neither true"),
        ({"devices": "all", "mig-enabled": True, "mig-device": {"1g.5gb": 1}}, "there is no field mig-device"),
        ({"devices": "all", "mig-enabled": False, "device_filter": "0x233010DE"}, "there is no field device_filter"),
        ({"mig-enabled": True}, "devices"),
        ({"devices": "all"}, "mig-enabled"),
        ("all", "no attribute"),
    ],
)
def test_a_wrong_entry_is_named(entry: object, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        checked_mig_configs({"version": "v1", "mig-configs": {"mine": [entry]}}, "site.yaml")
    assert says in str(raised.value) and "site.yaml" in str(raised.value)


@pytest.mark.parametrize("data", [[], {}, {"version": "v2"}, {"version": "v1"}, {"version": "v1", "mig-configs": []}])
def test_another_file_is_refused(data: object) -> None:
    with pytest.raises(UsageError, match="the file of MIG configurations is not valid"):
        checked_mig_configs(data, "site.yaml")


def test_every_refusal_has_a_condition_and_texts_that_can_be_filled_in(tmp_path: Path) -> None:
    facts = gather(FakeHost(tmp_path / "root", gpus=1, metal=True))
    options = {"coherent_memory": "driver", "gpudirect": ["rdma"], "dcgm": "true", "dcgm_exporter": "true",
               "cuda_url": "/cuda.run", "mig_layout": ["disabled"], "vgpu": {}, "mps": "true"}  # fmt: skip
    driver = source_of(facts, parse_spec(options))
    assert any("gpuprov_cuda does not say" in one.what for one in refusals(driver))
    words = {"row": facts.distribution, "commands": facts.package_manager.commands, "facts": facts, "spec": driver.spec,
             "get_python": "apt-get install python3"}  # fmt: skip
    for row in tables.packaged("options")["refusals"]:
        assert getattr(driver.spec, row.get("option", "driver")), "the condition was looked up"
        for text in (row["what"], row.get("seen", ""), row["next"]):
            assert "{" not in text.format(**words, evidence="evidence")
