"""The facts that a plan is made from: a machine's own, and what a wish makes worth a look besides. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuprov.bundle import use
from gpuprov.driver import mig, running_driver
from gpuprov.driver.availability import questions
from gpuprov.events import Note, Sink
from gpuprov.facts import HostFacts, gather
from gpuprov.plan import engine_wishes, repository_changes
from gpuprov.spec import HostSpec
from gpuprov.system import System


def gather_for(
    system: System, spec: HostSpec, bundle: use.OpenBundle | None, steps: Sequence[str], sink: Sink
) -> HostFacts:
    """Return the facts for a plan of these steps (none: all), the repositories asked if it depends on what they have.

    Questions to the network are told, for they take a while.
    """
    facts = gather(system, engine_wishes(spec))
    if running_driver.is_in_the_way(facts, spec):
        facts = replace(facts, running=running_driver.gather_running(system, facts))
    if spec.mig_layout:
        facts = replace(facts, mig=mig.gather_mig(system))
    if bundle is not None:
        return replace(facts, bundle=use.gather(system, bundle.manifest))
    return _asked(system, facts, spec, steps or ("repositories", "packages"), sink)


def _asked(system: System, facts: HostFacts, spec: HostSpec, steps: Sequence[str], sink: Sink) -> HostFacts:
    names = questions(facts, spec) if "packages" in steps else ()
    if not names:
        return facts
    # Most runs change nothing, and ask nobody.
    from gpuprov.packaging import offers

    sink(Note(f"asking the repositories for {', '.join(names)}"))
    planned = repository_changes(facts, spec) if "repositories" in steps else ()
    return replace(facts, offers=offers.ask(system, facts.packages.manager, names, planned, spec.lock_timeout))
