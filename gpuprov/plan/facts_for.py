"""The facts that a plan is made from: the host's own, and additional facts that the specification needs. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuprov.bundle.open import OpenBundle
from gpuprov.core.system import System
from gpuprov.driver import cuda_repository, running_driver
from gpuprov.facts.host import HostFacts, gather
from gpuprov.facts.mig import gather_mig
from gpuprov.plan import with_bundle
from gpuprov.plan.availability import questions
from gpuprov.plan.steps import repository_changes
from gpuprov.wire.events import Note, Sink
from gpuprov.wire.spec import HostSpec


def gather_for(
    system: System, spec: HostSpec, bundle: OpenBundle | None, steps: Sequence[str], sink: Sink
) -> HostFacts:
    """Return the facts for a plan of these steps (none: all), the repositories asked if it depends on what they have.

    Questions to the network are told, for they take a while.
    """
    facts = gather(system, spec.engines)
    if running_driver.is_in_the_way(facts, spec):
        facts = replace(facts, running=running_driver.gather_running(system, facts))
    if spec.mig_layout:
        facts = replace(facts, mig=gather_mig(system))
    if bundle is not None:
        return replace(facts, bundle=with_bundle.gather(system, bundle.manifest))
    return _asked(system, facts, spec, steps or ("repositories", "packages"), sink)


def _asked(system: System, facts: HostFacts, spec: HostSpec, steps: Sequence[str], sink: Sink) -> HostFacts:
    spec = cuda_repository.with_branch(facts, spec)
    names = questions(facts, spec) if "packages" in steps else ()
    if not names:
        return facts
    # Most runs change nothing and query no repository.
    from gpuprov.package_managers import offers

    sink(Note(f"asking the repositories for {', '.join(names)}"))
    planned = repository_changes(facts, spec) if "repositories" in steps else ()
    return replace(facts, offers=offers.ask(system, facts.package_manager, names, planned, spec.lock_timeout))
