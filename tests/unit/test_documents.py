"""Documents that are written by a program say what the program says; examples are valid."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tomllib

from gpuprov.agent.playbook_task import TaskChange
from gpuprov.agent.result import MADE, PENDING, metrics_text
from gpuprov.doctor.examine import RULES
from gpuprov.fleet.inventory import read_inventory
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.events import CheckDone, Upgrade
from gpuprov.protocol.spec import PLAY_VARIABLES
from gpuprov.protocol.tables import HEALTH, XIDS, packaged
from gpuprov.runtime_hook.settings import KEYS
from tests import doctor_page
from tests.distributions_page import PAGE, with_lists
from tests.integration.test_doctor import GROUPS, TROUBLES
from tools import ansible_page, cli_page, plain_english
from tools.zipapps import HOST_FILES, HOST_FOLDERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md"))


def test_configuration_reference_is_the_schemas_own() -> None:
    command = (Path(sys.executable).with_name("gpuprov"), "options", "--markdown")
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.strip() in (ROOT / "docs/configuration.md").read_text(), "next: make docs"


def test_the_page_on_distributions_is_the_tables_own() -> None:
    text = PAGE.read_text()
    assert "| Debian 11, 12 |" in text and with_lists(text) == text, "next: make docs"


@pytest.mark.root
def test_the_page_of_the_doctor_is_the_rules_own() -> None:
    text = doctor_page.PAGE.read_text()
    assert "- `gpu-nouveau`: " in text and doctor_page.with_lists(text) == text, "next: make docs"
    assert doctor_page.EXPLANATIONS.read_text() == doctor_page.explanations(), "next: make docs"


def test_the_page_of_the_command_line_has_every_command_and_option() -> None:
    """Not its bytes: each version of click breaks lines in its own way."""
    text = cli_page.PAGE.read_text()
    wanted = set(re.findall(r"^## .*$|(?<![\w-])--[a-z][a-z-]+", cli_page.page(), re.MULTILINE))
    assert len(wanted) > 100
    assert sorted(word for word in wanted if word not in text) == [], "next: make docs"


def test_the_reference_of_the_collection_is_its_own() -> None:
    text = ansible_page.PAGE.read_text()
    assert "| `reboot_needed` |" in text and ansible_page.page() == text, "next: make docs"
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:list of )?dict \|.*each with (.*)\. \|$", text, re.MULTILINE))
    for name, kind in (("checks", CheckDone), ("upgrades", Upgrade), ("changes", TaskChange)):
        assert set(re.findall(r"`(\w+)`", rows[name].partition(". ")[0])) == {one.name for one in fields(kind)}


def test_every_playbook_and_variable_of_a_play_has_a_row() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", ansible_page.PAGE.read_text(), re.MULTILINE)
    wanted = {path.name for path in (ROOT / "playbooks").glob("*.yml")} | PLAY_VARIABLES
    assert sorted(wanted - {*rows}) == [], "name them in docs/ansible.md"


def test_every_metric_has_a_row() -> None:
    texts = (metrics_text("verify", (), (), ended=0.0, seconds=0.0, changes=one) for one in (MADE, PENDING))
    names = {name for text in texts for name in re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)}
    rows = re.findall(r"^\| `(gpuprov_\w+)` \|", (ROOT / "docs/fleets.md").read_text(), re.MULTILINE)
    assert len(rows) > 10 and names == {*rows}


def test_phrases_with_a_plainer_form_are_found_in_names_too() -> None:
    phrase = "who" + "ever"  # apart, so that the check does not find it in this file
    text = f"one line\n{phrase} reads\ndef test_{phrase}_reads() -> None:\n"
    assert [number for number, _, _ in plain_english.findings(text)] == [2, 3]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in index] == ["README.md"]


def test_example_inventory_is_valid() -> None:
    hosts = {host.name: host for host in read_inventory((str(ROOT / "inventories/example"),)).hosts}
    assert len(hosts) == 7
    assert hosts["train01.example.org"].spec.kernel_module_type == "open"
    assert hosts["infer03.example.org"].spec.docker == "preinstalled"
    assert hosts["infer02.example.org"].port == 2222


@pytest.mark.parametrize(
    "page", ["tests/integration/docker-cases.md", "tests/integration/host-cases.md", "docs/threat-model.md"]
)
def test_the_tables_of_cases_name_tests_that_exist(page: str) -> None:
    rows = [row.split(" | ") for row in (ROOT / page).read_text().splitlines() if row.startswith("| ")]
    file = ""
    for row in rows:
        for word in re.findall(r"`([^`]+)`", row[-1]):
            if word.endswith(".py"):
                file = _test_file(word)
            else:
                assert f"def {word.removesuffix('…')}" in file, f"{row}: {word}"


def _test_file(name: str) -> str:
    """Return the text of a test file: its path below tests/unit or tests, or its name alone."""
    tests = ROOT / "tests"
    places = (tests / "unit" / name, tests / name, *sorted(tests.glob(f"**/{name}")))
    return next(path for path in places if path.exists()).read_text()


def test_the_table_of_cases_names_rules_of_the_doctor_and_all_that_is_typed() -> None:
    page = (ROOT / "tests/integration/host-cases.md").read_text()
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| ") and "---" not in row]
    named = {word for row in rows for word in re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", row[1])}
    rules = {rule.name for rule in RULES}
    assert named - rules <= {"gpuprov-refresh"}, named - rules
    typed = {word for row in rows if row[-1].startswith("typed") for word in re.findall(r"`([a-z0-9-]+)`", row[1])}
    assert typed & rules <= {rule for group in GROUPS for rule in group.typed} | {one.rule for one in TROUBLES}


def test_every_link_of_a_page_leads_somewhere() -> None:
    for page in PAGES:
        for file, _, heading in (one.partition("#") for one in re.findall(r"\]\(([^):\s]+)\)", page.read_text())):
            place = (page.parent / file).resolve() if file else page
            assert place.exists(), f"{page.name}: {file}"
            assert not heading or heading in _headings(place), f"{page.name}: {file}#{heading}"


def _headings(page: Path) -> set[str]:
    """Return the headings of a page as GitHub names them in links."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_row_of_a_table_has_as_many_cells_as_its_head(page: Path) -> None:
    width, in_fence = 0, False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        in_fence ^= line.lstrip().startswith("```")
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") and not in_fence else 0
        assert not (width and cells) or cells == width, f"line {number}: write \\| for a | in a cell"
        width = cells


def test_the_page_on_health_has_every_rule_and_repair() -> None:
    text, table, xids = (ROOT / "docs/health.md").read_text(), packaged(HEALTH), packaged(XIDS)
    verdicts = {**{one["rule"]: one for one in table["rules"]}, **table["host"]}
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (\w+) \|", text, re.MULTILINE))
    assert {name: rows.get(name) for name in verdicts} == {name: one["verdict"] for name, one in verdicts.items()}
    for one in (*xids["xids"], *xids["named"]):
        step = re.escape(xids["actions"][one["action"]].replace("|", r"\|"))
        row = rf"^\| ([\d, -]+, )?{one['xid']}(, [\d, -]+)? \| {table['xids'][one['action']]} \| `{step}` \|$"
        assert re.search(row, text, re.MULTILINE), one
    repaired = {one["rule"] for one in table["rules"] if "repair" in one and not one["rule"].startswith("recovery-")}
    sentence = text.partition("as the driver asks. The rules ")[2].partition(", and Xids")[0]
    assert set(re.findall("`([a-z-]+)`", sentence)) == repaired


def test_every_file_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`((?:gpuprov|tests|tools)/[\w./-]+)`", (ROOT / "docs/architecture.md").read_text())
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_key_of_the_runtimes_configuration_is_explained() -> None:
    text = (ROOT / "docs/container-runtime.md").read_text()
    names = [key.removeprefix("nvidia-container-runtime.").removeprefix("features.") for key in KEYS]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_folder_that_travels_is_held_to_the_import_contract() -> None:
    """The layers are exhaustive by themselves; the folders that travel stand in two lists."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    _, travels = contracts
    packed = {f"gpuprov.{name}" for name in (*HOST_FOLDERS, *(file.removesuffix(".py") for file in HOST_FILES))}
    assert set(travels["source_modules"]) == packed - {"gpuprov.__init__"}


def test_each_kind_of_change_is_mutated_by_hand() -> None:
    modules = {word.strip('"') for word in (ROOT / "tests/mutation.py").read_text().split()}
    kinds = {kind.__module__.removeprefix("gpuprov.").replace(".", "/") for kind in CHANGE_KINDS.values()}
    assert kinds <= modules
