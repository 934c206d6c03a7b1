"""Which driver a host gets whose specification names no version (`gpuprov_driver_version: recommended`). Reads only.

The first of these that there is: what an earlier run chose; the host's driver, if it serves the GPUs and has no known
holes; one of which that is true that other hosts of the inventory with these GPUs have; the newest such release of the
long-term branch or, if a GPU needs another, of the nearest branch.
ubuntu-drivers and Google's cuda_installer prefer a long-term branch too; neither looks at known holes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from gpuprov.cdi.discover import DriverFacts, discover
from gpuprov.core.journal import last_choice
from gpuprov.core.system import System
from gpuprov.driver import generations, run_files
from gpuprov.driver.run_files import INCOMPLETE_MARK
from gpuprov.facts.host import driver_package, manager_on
from gpuprov.machine.machine import Kernel, gather_kernel
from gpuprov.machine.pci import gather_gpus, own_ids
from gpuprov.protocol import known_problems
from gpuprov.protocol.advisories import DRIVER, advisories, updated, vulnerabilities
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.models import name_of
from gpuprov.protocol.spec import HOST, HostSpec
from gpuprov.protocol.tables import LONG_TERM_BRANCH, RELEASES, Tables
from gpuprov.protocol.versions import version_numbers

RUNFILE, PREINSTALLED = "runfile", "preinstalled"
_NOBODY: Mapping[str, str] = MappingProxyType({})
_ANOTHER = "; another: -e gpuprov_driver_version=…"


@dataclass(frozen=True)
class Choice:
    """The source and the version of a host's driver, and why; `url`: of its file on the mirror, if it is needed.

    `is_new`: the tables decided, not the host. `newer`: what they say today, if that is newer than what is kept.
    `gpus`: the GPU models that it is for; empty if the driver of the running kernel decided.
    """

    driver: str
    version: str
    why: str
    url: str = ""
    is_new: bool = False
    newer: str = ""
    gpus: str = ""

    def __str__(self) -> str:
        return f"driver {self.version}: {self.why}" if self.version else self.why

    def of(self, spec: HostSpec) -> HostSpec:
        """Return the specification with this choice."""
        return replace(spec, driver=self.driver, driver_version=self.version, driver_url=self.url)


UNCHOSEN = Choice("", "", "")


def completed(system: System, spec: HostSpec) -> HostSpec:
    """Return the specification with a driver's version, if it leaves that open. Raises GpuprovError as `choose`."""
    return choose(system, spec).of(spec) if is_open(spec) else spec


def is_open(spec: HostSpec) -> bool:
    """Say whether a specification leaves the driver's version to gpuprov."""
    return spec.driver == RUNFILE and not spec.driver_version and not spec.driver_url


def choose(system: System, spec: HostSpec, fleet: Mapping[str, str] = _NOBODY, *, upgrade: bool = False) -> Choice:
    """Return the driver for a specification that leaves it open. Raises GpuprovError for an unreadable mirror.

    `fleet`: GPU models → the release that other hosts with these have.
    """
    ids = generations.ids_of(spec.image_gpus, system.tables) or own_ids(gather_gpus(system))
    driver, kernel, tables = discover(system), gather_kernel(system), system.tables
    table = tables.table(RELEASES)
    known = (*table["newest"].values(), *table["sha256"].get(system.architecture(), {}))
    on_mirror = functools.cache(lambda: run_files.mirror_releases(system, spec, system.architecture()))
    kept, breaks = _kept(system, spec, ids, driver), _known_to_break(kernel, ids, tables)
    # The same text for the same set.
    models = ", ".join(sorted({name_of(one, tables) or one for one in ids}))

    def best_of(releases: Iterable[str]) -> Choice:
        return recommend(ids, releases, spec.kernel_module_type, system.clock(), tables, floor, breaks)

    there = "" if system.exists(INCOMPLETE_MARK) else driver.library_version
    other = "" if kept or upgrade else fleet.get(models, "")
    is_known = bool(other) and other in (on_mirror() if spec.driver_mirror else known)
    is_no_older = is_known and version_numbers(other) >= version_numbers(there)
    if is_no_older and _is_sound(ids, other, spec, tables) and not breaks(other):
        why = f"as other hosts with these GPUs have, {_serves(ids, tables)}{_ANOTHER}"
        kept = Choice(RUNFILE, other, why, is_new=True)
    floor = kept.version if kept is not None else there
    no_modules = kernel.container if spec.kernel_modules == "auto" else spec.kernel_modules == "none"
    from_packages = kept is not None and kept.driver != RUNFILE
    if no_modules and driver.kernel_version and spec.target == HOST and not from_packages:
        found = Choice(RUNFILE, driver.kernel_version, "the driver of the running kernel, which gets libraries only")
        models = ""
    elif kept is None or (upgrade and kept.driver == RUNFILE):
        found = best_of(on_mirror() if spec.driver_mirror else known)
    else:
        today = best_of(known)
        is_older = kept.driver == RUNFILE and version_numbers(kept.version) < version_numbers(today.version)
        # The mirror is not asked: a run that changes nothing needs no network.
        unlisted = "; the mirror may lack it" if spec.driver_mirror else ""
        found = replace(kept, newer=f"{today}{unlisted}") if is_older else kept
    if spec.driver_mirror and found.driver == RUNFILE and found.version != driver.library_version:
        found = replace(found, url=on_mirror().get(found.version, ""))
    return replace(found, gpus=models)


def _known_to_break(kernel: Kernel, ids: Sequence[str], tables: Tables) -> Callable[[str], bool]:
    """Return the function that says whether a release is known to fail on a host with this kernel and these GPUs."""
    host = {**kernel.conditions(), "gpus": ids, "builds": True, "mig": False, "toolkit": "", "docker": "", "podman": ""}
    return lambda version: bool(known_problems.matching({**host, "driver": version}, tables))


def _kept(system: System, spec: HostSpec, ids: Sequence[str], driver: DriverFacts) -> Choice | None:
    """Return what an earlier run chose, or the driver that is there and serves; None if neither is to be kept."""
    installed, recorded = driver.library_version, last_choice(system)
    if recorded is not None:
        # A run that found a driver there installs none in its place.
        is_gone = recorded.driver == PREINSTALLED and not installed
        is_replaced = recorded.done and recorded.driver == RUNFILE and installed not in ("", recorded.version)
        if not (is_gone or is_replaced):
            source = "" if recorded.version else f"gpuprov_driver: {recorded.driver}, "
            return Choice(recorded.driver, recorded.version, f"{source}chosen by an earlier run")
    if not installed or system.exists(INCOMPLETE_MARK):
        return None
    if run_files.recorded_installation(system, installed) is not None:
        # By a gpuprov that recorded no choice yet, or by a rollback.
        return Choice(RUNFILE, installed, "installed by an earlier run")
    if not _is_sound(ids, installed, spec, system.tables):
        return None
    if driver_package(manager_on(system).gather(system)):
        return Choice(PREINSTALLED, "", f"driver {installed} is there from packages, {_serves(ids, system.tables)}")
    return Choice(RUNFILE, installed, f"it is there, {_serves(ids, system.tables)}")


def _is_sound(ids: Sequence[str], version: str, spec: HostSpec, tables: Tables) -> bool:
    """Say whether a release serves the GPUs and has no known holes."""
    unserved = generations.problems(ids, version, spec.kernel_module_type, tables)
    return not (unserved or vulnerabilities(DRIVER, version, advisories(tables)))


def recommend(
    ids: Sequence[str], releases: Iterable[str], asked: str, clock: int, tables: Tables, floor: str = "",
    breaks: Callable[[str], bool] = lambda version: False,
) -> Choice:  # fmt: skip
    """Return the best of these releases for GPUs with these PCI device ids; `clock`: seconds since 1970.

    `asked`: gpuprov_kernel_module_type. `floor`: the release that is there; an earlier one is taken if no other serves.
    `breaks` says whether a release is known to fail on the host. If none serves all GPUs, it is a long-term one.
    """
    now = time.strftime("%Y-%m", time.gmtime(clock))
    newest_first = sorted(releases, key=version_numbers, reverse=True)
    serving = [one for one in newest_first if not generations.problems(ids, one, asked, tables)]
    usual = serving or newest_first
    later = [one for one in usual if floor and version_numbers(one) >= version_numbers(floor)] or usual
    branches = sorted({one.partition(".")[0] for one in later}, key=lambda one: _rank(one, now, tables))
    branch = next(iter(branches), LONG_TERM_BRANCH)
    mine = [one for one in later if one.partition(".")[0] == branch]
    usable = [one for one in mine if not breaks(one)] or mine
    known = advisories(tables)
    clean = next((one for one in usable if not vulnerabilities(DRIVER, one, known)), "")
    is_needed = generations.problems(ids, generations.comparable_version(LONG_TERM_BRANCH), asked, tables)
    kind = f"branch {branch}, which this host needs" if is_needed else f"branch {branch}"
    holes = "" if clean else "though no release of the branch is without known security holes"
    serves = f"{'long-term branch' if branch == LONG_TERM_BRANCH else kind}, {_serves(ids, tables, holes)}"
    why = serves if serving else "no known release serves all GPUs of this host"
    return Choice(RUNFILE, clean or next(iter(usable), ""), f"{why}{_ANOTHER}", is_new=bool(ids))


def _serves(ids: Sequence[str], tables: Tables, holes: str = "") -> str:
    names = list(dict.fromkeys(filter(None, (name_of(one, tables) for one in ids))))
    supports = f"supports {' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))}, " if names else ""
    return f"{supports}{holes or f'no known security holes by {updated(tables)}'}"


def _rank(branch: str, now: str, tables: Tables) -> tuple[bool, bool, bool, int]:
    """Return the sort key of a branch: the long-term one, then later supported ones, then the older ones."""
    number, long_term = int(branch), int(LONG_TERM_BRANCH)
    dated = tables.table(RELEASES)["support_ends"]
    # A branch without a date has ended, unless it is newer than all that have one.
    end = dated.get(branch) or ("" if number < max(map(int, dated), default=0) else "9999")
    return number < long_term, end < now, number != long_term, abs(number - long_term)
