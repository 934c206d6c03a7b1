"""The tables that ship as data files: every row loads, names its source, and has patterns that compile."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.site_tables import for_request, use_tables
from gpuprov.core.commands import failures, first_match
from gpuprov.machine.distros import Unsupported
from gpuprov.protocol import tables
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.models import Model, checked_models, fabric_of, generation_of, model_of, name_of
from gpuprov.protocol.spec import HostSpec

PROGRAMS = ("apt", "rpm", "installer", "fabric manager", "nvidia-smi", "kubectl", "pod", "download", "sudo", "login")


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
    with pytest.raises(ValueError, match="Failure has no color"):
        failures("wrong")


def test_a_row_has_everything_else_from_the_row_that_it_is_like(monkeypatch: pytest.MonkeyPatch) -> None:
    like = [
        {"id": "a", "what": "one", "version": "2", "like": "a 1"},
        {"id": "a", "what": "two", "version": "1", "next_step": "stop"},
    ]
    monkeypatch.setattr(tables, "packaged", lambda name: {"like": like})
    assert tables.rows("like", "like", Unsupported) == (
        Unsupported("a", "2", "one", "stop"),
        Unsupported("a", "1", "two", "stop"),
    )


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
    found = model_of(device_id)
    assert found is not None
    assert (found.name, found.form, found.fabric, found.mig) == MODELS[device_id]
    assert found.coherent_memory == (found.form == "Grace")
    generation = generation_of(device_id)
    assert generation is not None and (found.form != "Grace" or generation.modules == "open")


def test_every_model_is_of_a_generation_and_in_the_table_once() -> None:
    ids = [one for model in tables.rows(tables.MODELS, "models", Model) for one in model.ids]
    assert len(ids) == len(set(ids)) and all(generation_of(one) for one in ids)
    assert (name_of("2e12"), name_of("ffff"), fabric_of("2e12")) == ("Blackwell", "", None)


def test_a_site_replaces_the_table_of_models(tmp_path: Path) -> None:
    table = json.loads(json.dumps(tables.packaged(tables.MODELS)))
    table["models"].append({"name": "X1", "ids": ["3fff"], "form": "HGX", "fabric": "nvlsm", "note": "of this site"})
    file = tmp_path / "models.json"
    file.write_text(json.dumps(table))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    use_tables(json.loads(json.dumps(for_request(HostSpec(models=str(file), models_sha256=digest)))))
    assert (name_of("3fff"), fabric_of("3fff")) == ("X1", fabric_of("2901"))
    use_tables({})
    assert name_of("3fff") == ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"format": 2}, "its format is not 1"),
        ({"models": [{"name": "X1", "ids": ["3fff"], "fabric": "magic"}]}, "X1: no such fabric"),
        ({"models": [{"name": "X1", "ids": "3fff"}]}, "Table.models[0].ids is not a list"),
        ({"models": [{"name": "X1", "ids": ["3FFF"]}]}, "X1: '3FFF' is no PCI device id"),
        ({"models": [{"id": "a", "like": "a", "name": "X1", "ids": ["3fff"]}]}, "Table.models[0] has no id, like"),
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


def test_help_reads_no_table() -> None:
    code = "import gpuprov.cli.main; from gpuprov.protocol import tables; print(tables.packaged.cache_info().misses)"
    assert subprocess.run((sys.executable, "-c", code), stdout=subprocess.PIPE, check=True).stdout == b"0\n"
