"""What a driver needs from repositories, checked before any change: headers of the running kernel, or modules."""

from __future__ import annotations

from gpuprov.driver import distribution_plan, kernel, precompiled
from gpuprov.facts.host import HostFacts
from gpuprov.packages import past_kernels
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec


def questions(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages to query the repositories for before a plan is made; none if all are installed."""
    if facts.bundle is not None:
        return ()
    driver = (*precompiled.questions(facts, spec), *distribution_plan.questions(facts, spec))
    return (*driver, *_lacking_headers(facts, spec))


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what no repository has, or why the query failed; nothing if no repository was queried."""
    if facts.offers is None:
        return ()
    if facts.offers.problems:
        return facts.offers.problems
    lacking = facts.offers.lacking(_lacking_headers(facts, spec))
    return (_no_headers(facts, lacking),) if lacking else ()


def _lacking_headers(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    return facts.package_manager.missing(facts.packages, kernel.headers(facts, spec))


def _no_headers(facts: HostFacts, lacking: tuple[str, ...]) -> Problem:
    row, release = facts.distribution, facts.kernel.release
    said = past_kernels.advice(row, release, facts.architecture) if row else None
    return Problem(
        said.meaning if said else f"no repository of this host has the headers of the running kernel {release}",
        f"{facts.packages.manager} was asked for {', '.join(lacking)}",
        said.next_step if said else "boot the distribution's own kernel, or add the repository that this one came from",
    )
