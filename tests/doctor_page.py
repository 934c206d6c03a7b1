"""The tables in docs/doctor.md, written from the rules and from the troubles that try them: `make docs`."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from gpuprov.doctor.finding import AREAS, Finding, Rule
from gpuprov.doctor.rules import RULES
from tests.unit.doctor.host import examined, healthy
from tests.unit.doctor.test_rules import CONSEQUENCES, ROWS

PAGE = Path(__file__).resolve().parents[1] / "docs/doctor.md"
_TABLES = re.compile(r"(?<=<!-- tables -->\n).*(?=<!-- end of the tables -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with the tables that the rules give; what people wrote around them stays."""
    return _TABLES.sub(lambda _: _tables(), page)


def _tables() -> str:
    findings = _findings()
    lines = []
    for area in AREAS:
        lines += [
            f"### {area}",
            "",
            "| rule | what it says | what is looked at | what to type, on Debian 12 | `--fix` |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(rule, findings[rule.name]) for rule in RULES if rule.area == area]
        lines.append("")
    return "\n".join(lines)


def _findings() -> dict[str, Finding]:
    """Return what each rule finds on the first host that tries it."""
    changes = [*((row.rule, row.change) for row in ROWS), *((rule, change) for rule, change, _ in CONSEQUENCES)]
    with tempfile.TemporaryDirectory() as folder:
        x = examined(healthy(Path(folder)))
    found = {}
    rules = {rule.name: rule for rule in RULES}
    for name, change in reversed(changes):
        finding = rules[name].look(change(x))
        assert finding is not None, name
        found[name] = finding
    return found


def _row(rule: Rule, finding: Finding) -> str:
    cells = (
        f"`{rule.name}`",
        f"{finding.what} ({finding.confidence})",
        rule.sign,
        f"`{finding.next_step.replace('`', chr(39))}`",
        "; ".join(map(str, finding.remedies)) or "–",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
