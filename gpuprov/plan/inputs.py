"""Gather a plan's inputs: the resolved spec, the facts of the host, and additional facts that the spec needs.

Reads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuprov.bundle.manifest import Manifest
from gpuprov.bundle.open import OpenBundle
from gpuprov.cdi.discover import discover
from gpuprov.core.changes import images_in
from gpuprov.core.journal import read_runs, written_files
from gpuprov.core.places import FOLDER
from gpuprov.core.proxy import Proxy
from gpuprov.core.system import ImageSystem, System
from gpuprov.driver import cuda_repository, cuda_toolkit, distribution, generations, kernel, run_files, running_driver
from gpuprov.driver.generations import gather_served
from gpuprov.driver_run import RunFile
from gpuprov.engines import docker_proxy, other_engines
from gpuprov.engines.docker_unit import PID_FILE, UNIT
from gpuprov.facts.gpus import FabricFacts, gather_fabric, gather_mig
from gpuprov.facts.host import HostFacts, driver_package, gather, manager_on
from gpuprov.facts.kernels import ImageFacts, gather_identity, gather_kernels, gather_signing_keys, kernel_to_come
from gpuprov.facts.leftovers import with_docker
from gpuprov.machine.distros import distribution_of
from gpuprov.machine.machine import gather_os
from gpuprov.machine.pci import gather_gpus, own_ids
from gpuprov.packages import managers, sources
from gpuprov.plan import with_bundle
from gpuprov.plan.context import PlanContext
from gpuprov.protocol.events import Note, Sink
from gpuprov.protocol.spec import HostSpec
from gpuprov.runtime_hook.deploy import NVIDIA_HOOK_PATH


def resolve(system: System, spec: HostSpec, manifest: Manifest | None) -> HostSpec:
    """Return the spec with everything resolved: .run files of a bundle or a mirror, the branch of packages.

    Done once per run, before the plan; the spec never changes afterwards.

    A bundle replaces the network, so a mirror is queried only without one. Values that the user pinned stay, and are
    checked against the bundle later. Raises GpuprovError if the mirror's index can't be read, or lacks the branch.
    """
    if manifest is None:
        spec = run_files.resolved(system, spec, system.architecture())
    else:
        spec = cuda_toolkit.from_bundle(run_files.from_bundle(spec, manifest.driver_version, system.tables), manifest)
        if spec.driver == "runfile" and manifest.driver_file:
            file = manifest.file(manifest.driver_file)
            version, sha256 = spec.driver_version or manifest.driver_version, spec.driver_sha256 or file.sha256
            spec = replace(spec, driver_version=version, driver_url=f"{FOLDER}/{file.path}", driver_sha256=sha256)
    row = distribution_of(gather_os(system))
    spec = distribution.as_packages(row, spec)
    ids = generations.ids_of(spec.image_gpus, system.tables) or own_ids(gather_gpus(system))
    # NVIDIA's packages of the branch that this host's GPUs need; most GPUs need none.
    if spec.driver != "packages" or not generations.last_branch(ids, system.tables):
        return spec
    installed = discover(system).library_version if driver_package(manager_on(system).gather(system)) else ""
    return cuda_repository.with_branch(row, ids, installed, spec, system.tables)


def _as_image(system: System, facts: HostFacts, spec: HostSpec) -> HostFacts:
    """Return the facts of what the machine's disk becomes: its kernels, and the GPUs and switches that are to come."""
    if not isinstance(system, ImageSystem):
        return facts
    ids, identity = generations.ids_of(spec.image_gpus, system.tables), gather_identity(system)
    image = ImageFacts(gather_kernels(system), ids, system.offline, identity, gather_signing_keys(system))
    fabric = gather_fabric(system, managed="blackwell" in spec.image_gpus) if spec.image_nvswitch else FabricFacts()
    unit = facts.docker.unit
    if system.offline and facts.docker.installed:
        # Without systemd, only links show it.
        unit = replace(unit, load="loaded", enabled=system.run(("systemctl", "is-enabled", UNIT)).stdout.strip())
    return replace(
        facts, image=image, kernel=kernel_to_come(system.kernel), fabric=fabric, displays=(),
        docker=replace(facts.docker, unit=unit),
    )  # fmt: skip


def gather_for(
    system: System, spec: HostSpec, bundle: OpenBundle | None, steps: Sequence[str], sink: Sink, *,
    upgrade: bool = False,
) -> HostFacts:  # fmt: skip
    """Return the facts for a plan of these steps (none: all). Repositories are queried if the plan depends on them.

    Network queries are announced, because they take a while.
    """
    facts = _as_image(system, gather(system, other_engines.names(system, spec)), spec)
    facts = replace(facts, engines=other_engines.with_coming(facts.engines, spec), upgrade=upgrade)
    if spec.docker != "none":
        asks = spec.migrate_nvidia_docker
        leftovers = with_docker(system, facts.leftovers, facts.docker, facts.packages, always=asks)
        facts = replace(facts, leftovers=leftovers)
    context = PlanContext(facts, spec)
    in_use = docker_proxy.is_in_use(system, Proxy(spec.proxy, spec.no_proxy))
    facts = replace(facts, docker_proxy_in_use=in_use, docker_began_first=_began_before_the_hook(system))
    facts = _with_obstacles(system, facts, context, steps)
    if spec.divides_gpus and facts.image is None:
        facts = replace(facts, mig=gather_mig(system))
    if isinstance(context.driver, RunFile) and context.driver.installs and spec.driver_version:
        facts = replace(facts, served=gather_served(system, context.driver.path))
    if bundle is not None:
        facts = replace(facts, bundle=with_bundle.gather(system, bundle.manifest, with_bundle.image_engine(spec)))
    else:
        facts = _asked(system, facts, context, steps or ("repositories", "packages"), sink)
    in_the_way = running_driver.is_in_the_way(PlanContext(facts, spec).driver)
    return replace(facts, running=running_driver.gather_running(system, facts)) if in_the_way else facts


def _began_before_the_hook(system: System) -> bool:
    """Say whether docker runs since before a run brought the hook of `--gpus`, which it looks for when it starts."""
    begun, hook = system.status(PID_FILE), system.status(NVIDIA_HOOK_PATH)
    if begun is None or hook is None or hook.modified <= begun.modified:
        return False
    runs = read_runs(system)
    entries = (entry for run in runs for entry in run.entries if entry.state == "done")
    kinds = [one["kind"] for entry in entries for one in images_in(entry.before) if one["path"] == NVIDIA_HOOK_PATH]
    # Another hook in its place needs no restart: docker has found the first one.
    digest = written_files(runs).get(NVIDIA_HOOK_PATH, ("",))[0]
    return kinds == ["missing"] and digest == system.sha256(NVIDIA_HOOK_PATH)


def _with_obstacles(system: System, facts: HostFacts, context: PlanContext, steps: Sequence[str]) -> HostFacts:
    """Return the facts with obstacles that would defeat an installation that seems to succeed."""
    installs = context.driver.installs
    if installs or facts.driver_installed_version != facts.driver_loaded_version:
        # Most hosts have the desired driver.
        from gpuprov.checks.cuda.hiding import gather_hiding

        version = context.spec.driver_version if installs else facts.driver_loaded_version
        facts = replace(facts, hiding=gather_hiding(system, version))
    packages = facts.package_manager.missing(facts.packages, context.wanted_packages) if not facts.bundle else ()
    if packages and facts.package_manager.name == "apt" and (not steps or "packages" in steps):
        facts = replace(facts, pinned_out=sources.gather_pinned_out(system, packages))
    return facts


def _asked(system: System, facts: HostFacts, context: PlanContext, steps: Sequence[str], sink: Sink) -> HostFacts:
    names = kernel.questions(context.driver) if "packages" in steps else ()
    if not names:
        return facts
    if dead := system.proxy_problem() or sources.dns_problem(system, facts.package_manager.name, facts.files):
        return replace(facts, offers=managers.Offers(facts.package_manager.name, {}, (dead,)))
    sink(Note(f"asking the repositories for {', '.join(names)}"))
    # Nothing that is asked for comes from DKMS's repository; whether that is needed depends on the answer.
    without_dkms = PlanContext(facts, replace(context.spec, epel=False))
    planned = without_dkms.repository_changes if "repositories" in steps else ()
    return replace(facts, offers=managers.ask(system, facts.package_manager, names, planned))
