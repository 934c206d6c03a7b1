"""Apply all rules to a host and order the causes: the first one is the first to examine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuprov.doctor import (
    access_rules,
    cdi_rules,
    container_rules,
    docker_rules,
    driver_rules,
    engine_rules,
    kubernetes_rules,
    leftover_rules,
    library_rules,
    log_rules,
    machine_rules,
    module_rules,
    node_rules,
    smi_rules,
    toolkit_rules,
    watch_rules,
)
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import (
    ANY_ROOT,
    AREAS,
    ASIDE,
    CERTAIN,
    CONFIDENCES,
    DOCKER,
    GPUS,
    MODULE,
    POSSIBLE,
    Finding,
    Rule,
    unknown_areas,
)
from gpuprov.doctor.remedy import STEPS, WHOLE
from gpuprov.doctor.toolkit_rules import INSTALL_OBSTRUCTED, RUN_ALIVE

RULES: tuple[Rule, ...] = (
    *machine_rules.RULES, *log_rules.RULES, *module_rules.RULES, *driver_rules.RULES, *library_rules.RULES,
    *smi_rules.RULES, *node_rules.RULES, *toolkit_rules.RULES, *cdi_rules.RULES, *docker_rules.RULES,
    *access_rules.RULES, *engine_rules.RULES, *kubernetes_rules.RULES, *container_rules.RULES, *leftover_rules.RULES,
    *watch_rules.RULES,
)  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """The finding of a rule. `follows`: the rule that explains it, if it is only a consequence."""

    rule: Rule
    finding: Finding
    follows: str = ""


def diagnose(x: Examined, rules: Sequence[Rule] = RULES) -> tuple[Cause, ...]:
    """Return the causes: independent ones first, the most certain first, in the order of dependence."""
    # A docker that the specification leaves alone is not examined.
    looked = [rule for rule in rules if rule.area != DOCKER or x.spec.docker != "none"]
    if x.lacks_gpus_yet:
        looked = [rule for rule in looked if rule.area not in unknown_areas(x)]
    found = [(rule, _in_its_place(x, rule, finding)) for rule in looked if (finding := rule.look(x)) is not None]
    if not any(
        _installs(finding) for rule, finding in found if rule.name != INSTALL_OBSTRUCTED and finding.confidence != ASIDE
    ):
        # A host that needs no installation may have a full or read-only disk.
        found = [(rule, finding) for rule, finding in found if rule.name != INSTALL_OBSTRUCTED]
    if x.runs_now and any(finding.confidence != ASIDE for _, finding in found):
        found = [(rule, _during_a_run(rule, finding)) for rule, finding in found]
    roots = [rule for rule, finding in found if finding.confidence != ASIDE]
    causes = (Cause(rule, finding, _obstacle(rule, finding, roots) or _root(rule, roots)) for rule, finding in found)
    return tuple(sorted(causes, key=_rank))


def _during_a_run(rule: Rule, finding: Finding) -> Finding:
    """Return the finding of a host on which a run works: what that has not done yet looks as missing."""
    if rule.name == RUN_ALIVE:
        return replace(finding, confidence=CERTAIN)
    return finding if finding.confidence == ASIDE else replace(finding, confidence=POSSIBLE)


def _installs(finding: Finding) -> bool:
    return "gpuprov install" in finding.next_step or any(one.kind in (STEPS, WHOLE) for one in finding.remedies)


def _obstacle(rule: Rule, finding: Finding, roots: Sequence[Rule]) -> str:
    """Return the rule that prevents an installation from repairing this, "" if none does."""
    obstructed = rule.name != INSTALL_OBSTRUCTED and any(root.name == INSTALL_OBSTRUCTED for root in roots)
    return INSTALL_OBSTRUCTED if obstructed and _installs(finding) else ""


def _in_its_place(x: Examined, rule: Rule, finding: Finding) -> Finding:
    """Return the finding with the place for its command: a system container's kernel belongs to the host."""
    inside = bool(x.host.kernel.container) and rule.area in (GPUS, MODULE)
    if not inside or "on the host" in finding.next_step:
        return finding
    step, _, comment = finding.next_step.partition("  # ")
    return replace(finding, next_step=f"{step}  # on the host" + (f"; {comment}" if comment else ""))


def _root(rule: Rule, found: Sequence[Rule]) -> str:
    """Return the rule that explains another one, "" if it is independent."""
    if rule.follows == ANY_ROOT:
        area = AREAS.index(rule.area)
        return next((o.name for o in found if o.follows != ANY_ROOT and AREAS.index(o.area) <= area), "")
    names = {one.name for one in found}
    return next((name for name in rule.follows if name in names), "")


def _rank(cause: Cause) -> tuple[bool, bool, int, int]:
    confidence = CONFIDENCES.index(cause.finding.confidence)
    return cause.finding.confidence == ASIDE, cause.follows != "", confidence, AREAS.index(cause.rule.area)
