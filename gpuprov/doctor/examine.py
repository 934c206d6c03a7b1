"""Examine a host once: apply all rules, order the causes, and report them as events, the first to fix first."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Callable

from gpuprov.checks.memory import FORGET
from gpuprov.core.system import System
from gpuprov.doctor import cdi_rules, docker_rules, driver_rules, engine_rules, gpu_rules, module_rules, toolkit_rules
from gpuprov.doctor import finding as findings
from gpuprov.doctor.finding import AREAS, CERTAIN, DOCKER, GPUS, MODULE, POSSIBLE, STEPS, WARNING, WHOLE, Finding
from gpuprov.doctor.gather import gather
from gpuprov.doctor.rules import ANY_ROOT, Rule, read_rules
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.driver import recommended
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import ExitCode, Problem
from gpuprov.protocol.events import CauseFound, CheckDone, Finished, Note, Sink
from gpuprov.protocol.spec import HostSpec

# They hold the conditions of the rules.
_MODULES = (gpu_rules, module_rules, driver_rules, toolkit_rules, cdi_rules, docker_rules, engine_rules)
RULES = tuple(read_rules(_MODULES))
INSTALL_OBSTRUCTED, RUN_ALIVE, RULE_FAILED = "install-obstructed", "run-alive", "rule-failed"
_NO_GPU = "no-gpu"
_ANSWERS = ", nvidia-smi answers"
# Summary of an area without findings, in a few words, in the order of AREAS.
_SUMMARIES: tuple[Callable[[HostSnapshot], str], ...] = (
    lambda x: f"{len(x.host.gpus)} on the PCI bus",
    lambda x: f"{x.driver.kernel_version or 'none'} loaded",
    lambda x: f"{x.driver.library_version or 'none'}{f'; {x.smi.reason}' if x.smi.reason else _ANSWERS}",
    lambda x: f"{len(x.driver.present)} present",
    lambda x: (x.host.docker.runtimes or {}).get("nvidia") or "none for docker",
    lambda x: ", ".join(name for name in x.texts if name.startswith(("/etc/cdi/", "/var/run/cdi/"))) or "none",
    lambda x: x.host.docker.version or "none",
    lambda x: ", ".join(sorted(x.host.engines)) or "none asked for",
    lambda x: f"{len(x.containers.examined)} running with GPUs",
)


@dataclass(frozen=True)
class Cause:
    """The finding of a rule. `follows`: the rule that explains it, if it is only a consequence."""

    rule: Rule
    finding: Finding
    follows: str = ""


def examine(system: System, spec: HostSpec, sink: Sink) -> Finished:
    """Examine the host, report the findings, and return the final event."""
    x = gather(system, spec)
    is_unknown = x.installed is not None and x.installed.fault is not None  # what the journals say of the driver
    if recommended.is_open(spec) and x.driver.library_version and not is_unknown:
        # The mirror is not asked: the doctor needs no network.
        choice = recommended.choose(system, replace(spec, driver_mirror=""))
        if choice.newer:
            unlisted = "; the mirror may lack it" if spec.driver_mirror else ""
            sink(Note(f"`gpuprov install --upgrade` installs {choice.newer}{unlisted}"))
    return report(x, diagnose(x), sink)


def report(x: HostSnapshot, causes: Sequence[Cause], sink: Sink) -> Finished:
    """Report a whole examination, and return the final event."""
    troubles = tuple(cause for cause in causes if cause.finding.confidence != WARNING)
    without_gpu = any(cause.rule.name == _NO_GPU for cause in causes)
    for area, summary in zip(AREAS, _SUMMARIES):
        if without_gpu and area != GPUS:
            sink(CheckDone(area, "skipped", reason="there is no GPU"))
        elif x.lacks_gpus_yet and area in findings.unknown_areas(x):
            sink(CheckDone(area, "skipped", reason="unknown: this copy of an image has no GPU, or does not run"))
        else:
            ill = any(cause.rule.area == area for cause in troubles)
            sink(CheckDone(area, "failed") if ill else CheckDone(area, "ok", summary(x)))
    for rank, cause in enumerate(causes, 1):
        sink(_event(rank, cause))
        if cause.finding.confidence == WARNING:
            sink(Note(f"{cause.finding.what}; {_next_step(cause, causes)}", "warning"))
    if x.memory_fault:
        sink(Note(f"{x.memory_fault}: nothing is compared with it; {FORGET}", "warning"))
    if silent := x.host.docker.unit.silent or x.host.fabric.silent:
        sink(Note(f"what depends on the state of a unit is not known: {silent}", "warning"))
    if x.kernel_log_error:
        sink(Note(f"the kernel's log was not read: {x.kernel_log_error}", "warning"))
    if troubles:
        found = []
        for one in troubles:
            follows = f"; a consequence of {one.follows}" if one.follows else ""
            what = f"{one.finding.what} ({one.finding.confidence}{follows})"
            found.append(Problem(what, one.finding.evidence, _next_step(one, troubles)))
        return Finished(int(ExitCode.FAILED), problems=tuple(found), summary=f"causes found: {len(troubles)}")
    rest = "; there is no GPU here, so the rest is unknown" if x.lacks_gpus_yet else ""
    return Finished(int(ExitCode.DONE), summary=f"nothing found wrong{rest}")


def report_causes(causes: Sequence[Cause], sink: Sink) -> None:
    """Report only the causes, before they are fixed."""
    for rank, cause in enumerate(causes, 1):
        sink(_event(rank, cause))


def _event(rank: int, cause: Cause) -> CauseFound:
    finding = cause.finding
    return CauseFound(
        rank, cause.rule.name, cause.rule.area, finding.what, finding.evidence, finding.next_step, finding.confidence,
        cause.follows, "; ".join(map(str, finding.remedies)),
    )  # fmt: skip


def _next_step(cause: Cause, causes: Sequence[Cause]) -> str:
    """Return what to type now: nothing helps against a consequence before its first cause is gone."""
    first = cause
    for _ in causes:  # No chain is longer, even one that would end in itself.
        first = next((one for one in causes if one.rule.name == first.follows), first)
    wanted, own = first.finding.next_step, cause.finding.next_step
    return own if wanted == own else f"first: {wanted}"


def diagnose(x: HostSnapshot, rules: Sequence[Rule] = RULES) -> tuple[Cause, ...]:
    """Return the causes: independent ones first, the most certain first, in the order of dependence."""
    # A docker that the specification leaves alone is not examined.
    looked = [rule for rule in rules if rule.area != DOCKER or x.spec.docker != "none"]
    if x.lacks_gpus_yet:
        looked = [rule for rule in looked if rule.area not in findings.unknown_areas(x)]
    found = list(filter(None, (_look(x, rule) for rule in looked)))
    if any(rule.name == _NO_GPU for rule, _ in found):
        # Whatever else is missing or wrong, to put it right helps nobody here.
        found = [(rule, finding) for rule, finding in found if rule.area == GPUS or rule.name == RUN_ALIVE]
    troubles = [finding for rule, finding in found if rule.name != INSTALL_OBSTRUCTED and finding.confidence != WARNING]
    if not any(map(_installs, troubles)):
        # A host that needs no installation may have a full or read-only disk.
        found = [(rule, finding) for rule, finding in found if rule.name != INSTALL_OBSTRUCTED]
    if x.runs_now and any(finding.confidence != WARNING for _, finding in found):
        found = [(rule, _during_a_run(rule, finding)) for rule, finding in found]
    roots = [rule for rule, finding in found if finding.confidence != WARNING]
    causes = (Cause(rule, finding, _root(rule, finding, roots)) for rule, finding in found)
    return tuple(sorted(causes, key=_rank))


def _look(x: HostSnapshot, rule: Rule) -> tuple[Rule, Finding] | None:
    """Return the rule with its finding, None if it finds nothing. A rule that fails must not keep back the others."""
    try:
        finding = rule.look(x)
    except Exception as error:  # the sentence says which rule, and where
        failed = traceback.extract_tb(error.__traceback__)[-1]
        what = f"internal error: the rule {rule.name} failed, so whether this host has its cause is unknown"
        seen = f"{type(error).__name__}: {str(error)[:200]} ({failed.filename}:{failed.lineno})"
        report_it = "gpuprov doctor --json  # please report this"
        return Rule(RULE_FAILED, rule.area, "", rule.look), Finding(what, seen, report_it, WARNING)
    return None if finding is None else (rule, _with_place(x, rule, finding))


def _during_a_run(rule: Rule, finding: Finding) -> Finding:
    """Return the finding of a host on which a run works: what that has not done yet looks as missing."""
    if rule.name == RUN_ALIVE:
        return replace(finding, confidence=CERTAIN)
    return finding if finding.confidence == WARNING else replace(finding, confidence=POSSIBLE)


def _installs(finding: Finding) -> bool:
    return "gpuprov install" in finding.next_step or any(one.kind in (STEPS, WHOLE) for one in finding.remedies)


def _with_place(x: HostSnapshot, rule: Rule, finding: Finding) -> Finding:
    """Return the finding with the place for its command: a system container's kernel belongs to the host."""
    # A line feed in a value would end a comment, and begin a command.
    finding = replace(finding, next_step=" ".join(finding.next_step.splitlines()))
    inside = bool(x.host.kernel.container) and rule.area in (GPUS, MODULE)
    if not inside or "on the host" in finding.next_step:
        return finding
    step, _, comment = finding.next_step.partition("  # ")
    return replace(finding, next_step=f"{step}  # on the host" + (f"; {comment}" if comment else ""))


def _root(rule: Rule, finding: Finding, found: Sequence[Rule]) -> str:
    """Return the rule that explains another one, or keeps an installation from fixing it; "" if it is independent."""
    names = {one.name for one in found}
    if rule.name != INSTALL_OBSTRUCTED and INSTALL_OBSTRUCTED in names and _installs(finding):
        return INSTALL_OBSTRUCTED
    if rule.follows == ANY_ROOT:
        area = AREAS.index(rule.area)
        return next((o.name for o in found if o.follows != ANY_ROOT and AREAS.index(o.area) <= area), "")
    return next((name for name in rule.follows if name in names), "")


def _rank(cause: Cause) -> tuple[bool, bool, int, int]:
    confidence = findings.CONFIDENCES.index(cause.finding.confidence)
    return cause.finding.confidence == WARNING, cause.follows != "", confidence, AREAS.index(cause.rule.area)
