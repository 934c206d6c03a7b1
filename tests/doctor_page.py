"""The lists in docs/doctor.md and the texts of `gpuprov doctor --explain`, written from the rules: `make docs`."""

import json
import re
import tempfile
from pathlib import Path

from gpuprov.cli import reference
from gpuprov.doctor.examine import RULES
from gpuprov.doctor.finding import AREAS, CACHE, FILES, MODULES, NODE_MODES, STEPS, UNITS, WHOLE, Finding
from gpuprov.doctor.rules import Rule
from tests.unit.doctor.host import examined, healthy
from tests.unit.doctor.test_rules import CONSEQUENCES, ROWS

PAGE = Path(__file__).resolve().parents[1] / "docs/doctor.md"
EXPLANATIONS = Path(reference.__file__).with_name("causes.json")
_FIXES = {
    STEPS: "makes these parts of an installation's plan: {}",
    WHOLE: "makes the whole plan of `gpuprov install`",
    UNITS: "restarts {}",
    FILES: "removes {}",
    NODE_MODES: "sets the modes of {} as the driver does",
    CACHE: "rewrites the loader's cache",
    MODULES: "loads the driver's kernel modules",
}
_NUMBERED = re.compile(r"^(the kernel's log: Xid|nvidia-smi exits) [\d-]+$")
_LISTS = re.compile(r"(?<=<!-- lists -->\n).*(?=<!-- end of the lists -->)", re.DOTALL)


def with_lists(page: str) -> str:
    """Return the page with the lists that the rules give; what people wrote around them stays."""
    return _LISTS.sub(lambda _: _lists(), page)


def _lists() -> str:
    lines = []
    for area in AREAS:
        names: dict[str, list[str]] = {}
        for one in RULES:
            if one.area == area:
                names.setdefault(_sign(one), []).append(f"`{one.name}`")
        lines += [f"### {area}", "", *(f"- {', '.join(alike)}: {sign}" for sign, alike in names.items()), ""]
    return "\n".join(lines)


def _sign(rule: Rule) -> str:
    """Return how the rule's cause is recognised; the number of an Xid or an exit code is in the name."""
    return _NUMBERED.sub(r"\1 NUMBER", rule.sign)


def explanations() -> str:
    """Return the causes as `gpuprov doctor --explain` reads them, one a line: found on hosts of the tests."""
    findings = _findings()
    rules = sorted(RULES, key=lambda rule: AREAS.index(rule.area))
    return (
        "[\n" + ",\n".join(json.dumps(_cause(one, findings[one.name]), ensure_ascii=False) for one in rules) + "\n]\n"
    )


def _cause(rule: Rule, finding: Finding) -> dict[str, object]:
    return {
        "name": rule.name,
        "area": rule.area,
        "meaning": finding.what,
        "confidence": finding.confidence,
        "sign": rule.sign,
        "next_step": finding.next_step,
        "fix": [_FIXES[one.kind].format(", ".join(one.names)) for one in finding.remedies],
        "follows": ["any other cause of its area or of an earlier one" if one == "*" else one for one in rule.follows],
    }


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


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text()))
    EXPLANATIONS.write_text(explanations())
