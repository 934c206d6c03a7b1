"""Known security holes in what a run would install: warned of, or refused where the site asks for it. Pure."""

from __future__ import annotations

import time

from gpuprov import driver_run
from gpuprov.driver.precompiled import chosen
from gpuprov.facts.host import HostFacts
from gpuprov.wire.advisories import DRIVER, THRESHOLDS, TOOLKIT, TOOLKIT_PACKAGE, Holes, holes
from gpuprov.wire.driver_releases import support_end
from gpuprov.wire.errors import Problem
from gpuprov.wire.spec import HostSpec


def warnings(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return a sentence for each product that would be installed with known holes, or past its support."""
    version = _driver(facts, spec)
    end, now = support_end(version), time.strftime("%Y-%m", time.gmtime(facts.clock))
    ended = (f"driver {version}: the support of branch {version.partition('.')[0]} ended in {end}",) if end else ()
    return (*map(str, _installed_with(facts, spec)), *(ended if end < now else ()))


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return why what would be installed is refused, where gpuprov_refuse_advisories says so."""
    return tuple(
        Problem(
            f"{one.product} {one.version} is refused for its known security holes",
            f"gpuprov_refuse_advisories is {spec.refuse_advisories}; {one}",
            f'set gpuprov_{_VARIABLES[one.product]}: "{one.fixed_in}", or gpuprov_refuse_advisories: none',
        )
        for one in _installed_with(facts, spec)
        if one.score >= THRESHOLDS[spec.refuse_advisories]
    )


_VARIABLES = {DRIVER: "driver_version", TOOLKIT: "toolkit_version"}


def _installed_with(facts: HostFacts, spec: HostSpec) -> tuple[Holes, ...]:
    found = (holes(DRIVER, _driver(facts, spec)), holes(TOOLKIT, _toolkit(facts, spec)))
    return tuple(one for one in found if one is not None)


def _driver(facts: HostFacts, spec: HostSpec) -> str:
    """Return the driver release that would be installed, nothing if none would be, or only the repository knows."""
    if spec.driver == "packages" and not facts.driver_installed_version:
        compiled = chosen(facts, spec)
        return compiled.driver if compiled else spec.driver_version if "." in spec.driver_version else ""
    return spec.driver_version if driver_run.installs(facts, spec) else ""


def _toolkit(facts: HostFacts, spec: HostSpec) -> str:
    installed = facts.packages.installed.get(TOOLKIT_PACKAGE, "")
    wanted = spec.toolkit == "nvidia" and spec.toolkit_version != installed
    return spec.toolkit_version if wanted else ""
