"""What a driver needs from repositories, checked before any change: headers of the running kernel, or modules."""

from __future__ import annotations

from gpuprov.driver import kernel
from gpuprov.driver.source import DriverSource
from gpuprov.facts.host import HostFacts
from gpuprov.packages import known_repositories
from gpuprov.protocol.errors import Problem


def questions(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages to query the repositories for before a plan is made; none if all are installed."""
    return (*driver.questions(), *_lacking_headers(driver)) if driver.facts.bundle is None else ()


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return what no repository has, or why the query failed; nothing if no repository was queried."""
    facts = driver.facts
    if facts.offers is None:
        return ()
    if facts.offers.problems:
        return facts.offers.problems
    lacking = facts.offers.lacking(_lacking_headers(driver))
    return (_no_headers(facts, lacking),) if lacking else ()


def _lacking_headers(driver: DriverSource) -> tuple[str, ...]:
    return driver.facts.package_manager.missing(driver.facts.packages, kernel.headers(driver))


def _no_headers(facts: HostFacts, lacking: tuple[str, ...]) -> Problem:
    row, release = facts.distribution, facts.kernel.release
    said = known_repositories.advice(row, release, facts.architecture) if row else None
    return Problem(
        said.meaning if said else f"no repository of this host has the headers of the running kernel {release}",
        f"{facts.packages.manager} was asked for {', '.join(lacking)}",
        said.next_step if said else "boot the distribution's own kernel, or add the repository that this one came from",
    )
