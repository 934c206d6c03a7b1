"""All rules, and what they come to on a host: causes in the order in which to look at them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprov.doctor import docker_rules, toolkit_rules
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import AREAS, ASIDE, CONFIDENCES, Finding, Rule

RULES: tuple[Rule, ...] = (
    *toolkit_rules.RULES,
    *docker_rules.RULES,
)


@dataclass(frozen=True)
class Cause:
    """What a rule found. `follows`: the rule that explains it, where it is a mere consequence."""

    rule: Rule
    finding: Finding
    follows: str = ""


def diagnose(x: Examined, rules: Sequence[Rule] = RULES) -> tuple[Cause, ...]:
    """Return the causes: those that stand for themselves first, the surest first, in the order of dependence."""
    found = [(rule, finding) for rule in rules if (finding := rule.look(x)) is not None]
    names = {rule.name for rule, finding in found if finding.confidence != ASIDE}
    causes = [
        Cause(rule, finding, next((name for name in rule.follows if name in names), "")) for rule, finding in found
    ]
    return tuple(sorted(causes, key=_rank))


def _rank(cause: Cause) -> tuple[bool, bool, int, int]:
    confidence = CONFIDENCES.index(cause.finding.confidence)
    return cause.finding.confidence == ASIDE, cause.follows != "", confidence, AREAS.index(cause.rule.area)
