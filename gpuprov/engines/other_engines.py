"""containerd, CRI-O, podman and Kubernetes' distributions for `install`: their facts and changes.

The edits of their files are configure.py's, the same as for `gpuprov runtime configure`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from gpuprov.core import units
from gpuprov.core.changes import Change, Json, Tell, capture_path, parent_of, restore_paths, text_diff
from gpuprov.core.system import System
from gpuprov.engines import known
from gpuprov.engines.known import ENGINES, ConfigureRequest, EngineFacts, FileEdit, Reader, RuntimeEntry
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec

if TYPE_CHECKING:
    from gpuprov.engines.cri_status import CriStatus

# containerd 1.6 lacks CDI, and 2 enables it by default.
_CDI_ON_REQUEST = re.compile(r"\bv?1\.7\.\d")


def names(system: System, spec: HostSpec) -> tuple[str, ...]:
    """Return the engines that a specification covers: those that it names, else, without docker, the installed ones."""
    if spec.engines or spec.docker != "none":
        return spec.engines
    # Docker's containerd belongs to docker, even if docker is to be left alone.
    others = (name for name in known.OF_THE_HOST if name != "containerd" or system.which("dockerd") is None)
    coming = _coming(spec)
    return tuple(name for name in others if name in coming or system.which(ENGINES[name].program) is not None)


def _coming(spec: HostSpec) -> frozenset[str]:
    """Return the engines that the run itself may install and then configure: podman's files need not be read for it."""
    return frozenset({"podman"} & {package.partition("=")[0] for package in spec.packages})


def with_coming(found: Mapping[str, EngineFacts], spec: HostSpec) -> Mapping[str, EngineFacts]:
    """Return the facts for a plan: an engine that the run itself may install counts as installed."""
    coming = _coming(spec)
    return {
        name: replace(one, program=f"/usr/bin/{name}") if name in coming and not one.program else one
        for name, one in found.items()
    }


def gather(system: System, names: Iterable[str]) -> Mapping[str, EngineFacts]:
    """Return engine → facts for these engines."""
    return {name: _gather(system, name) for name in names}


def _gather(system: System, name: str) -> EngineFacts:
    engine = ENGINES[name]
    program = system.which(engine.program) or next(filter(system.exists, engine.places), None)
    if program is None:
        return EngineFacts()
    paths = [engine.main, *filter(None, (engine.rendered, *engine.templates.values()))]
    for folder in sorted({parent_of(one) for one in (engine.drop_in, *engine.drop_ins.values()) if one}):
        paths += [f"{folder}/{file}" for file in system.list_directory(folder)]
    version = ""
    if name == "containerd":
        # Imported here: most hosts name no such engine, and the TOML editor costs as much as all of their facts.
        from gpuprov.engines import containerd

        paths += containerd.imported(system, engine.main)
        # The edits depend on the version of containerd alone.
        said = containerd.asked_version(system, program)
        version = said.stdout if said.ok else ""
    files = {path: content for path in paths if (content := system.read_bytes(path)) is not None}
    # Programs that only need to exist.
    files.update({path: b"" for path in engine.detects if system.exists(path)})
    # Of several units the running one counts, because server and agent differ.
    active = (unit for unit in engine.units if units.is_active(system, unit)) if len(engine.units) > 1 else iter(())
    return EngineFacts(program, version, files, next(active, engine.unit), _running(system, name))


def socket_of(system: Reader, name: str) -> str:
    """Return an engine's CRI socket; containerd's own files may name another than the usual one."""
    if name != "containerd":
        return ENGINES[name].socket
    from gpuprov.engines import containerd

    return containerd.address(system)


def _running(system: System, name: str) -> CriStatus | None:
    if not (socket := socket_of(system, name)) or not system.exists(socket):
        return None
    from gpuprov.engines import cri_status

    return cri_status.ask(system, socket)


@dataclass(frozen=True)
class Registration:
    """The edits that register the runtime with an engine, none if it is registered; or why that is not possible."""

    edits: tuple[FileEdit, ...] = ()
    problem: Problem | None = None


def registrations(facts: Mapping[str, EngineFacts], entry: RuntimeEntry) -> Mapping[str, Registration]:
    """Return engine → registration of the runtime for the installed engines."""
    return {name: _registration(name, one, entry) for name, one in facts.items() if one.program}


def _registration(name: str, facts: EngineFacts, entry: RuntimeEntry) -> Registration:
    from gpuprov.engines import configure, containerd

    try:
        # CDI must be enabled in containerd, unless a user has disabled it.
        asks = name == "containerd" and _CDI_ON_REQUEST.search(facts.version)
        cdi = bool(asks) and containerd.written(facts).get("enable_cdi") is not False
        entry = replace(entry, set_default=entry.set_default and name != "podman", cdi=cdi)
        found = configure.configuration(facts, ConfigureRequest(name, entry))
    except GpuprovError as error:
        return Registration(problem=error.problems[0])
    return Registration(tuple(edit for edit in found.edits if edit.changes))


def problems(facts: Mapping[str, EngineFacts], entry: RuntimeEntry) -> tuple[Problem, ...]:
    """Return what prevents the registration of the runtime with these engines."""
    missing = tuple(
        Problem(f"{name} is not installed", f"there is no {ENGINES[name].program} on the PATH",
                f"install it, or take {name} out of gpuprov_engines")
        for name, one in facts.items() if not one.program
    )  # fmt: skip
    found = registrations(facts, entry).values()
    return (*missing, *(one.problem for one in found if one.problem is not None))


def kept_running(facts: Mapping[str, EngineFacts], of_kubernetes: Sequence[str], spec: HostSpec) -> frozenset[str]:
    """Return the engines that may not be restarted: pods or a cluster's API server depend on them."""
    unnamed = set(facts).difference(spec.engines) if known.KUBELET in of_kubernetes else set()
    return frozenset(unnamed | {name for name in facts if ENGINES[name].cluster and not spec.restart_kubernetes})


def plan(
    facts: Mapping[str, EngineFacts], entry: RuntimeEntry, kept: frozenset[str] = frozenset()
) -> tuple[Change, ...]:
    """Return the changes of the engines' files; each restarts its engine, if it runs and is not one of the `kept`.

    An engine that runs without having read its files is also restarted.
    """
    found = registrations(facts, entry)
    return tuple(
        ConfigureEngine(name, one.edits, name not in kept, facts[name].unit or ENGINES[name].unit)
        for name, one in found.items()
        if one.edits or (one.problem is None and name not in kept and facts[name].has_not_read_its_files)
    )


def restart_command(name: str, facts: EngineFacts) -> str:
    """Return the command that makes an engine read its files."""
    return f"systemctl restart {(facts.unit or ENGINES[name].unit).removesuffix('.service')}"


@dataclass(frozen=True)
class ConfigureEngine(Change):
    """Register the runtime in the engine's files and make the running engine read them.

    `restart` is False for an engine that serves Kubernetes and may not be restarted: it reads them at its next start.
    Without `edits` the files are right, but the engine has not read them. `unit` runs it; podman has none.
    """

    undo_restores_files: ClassVar[bool] = True

    engine: str
    edits: tuple[FileEdit, ...]
    restart: bool = True
    unit: str = ""

    @property
    def key(self) -> str:
        return f"configure {self.engine}"

    def summary(self) -> str:
        name = self.unit.removesuffix(".service")
        if not self.edits:
            return f"restart {name}: it runs and has not read its files ({self._fate()})"
        verbs = {"write": [one.path for one in self.edits if one.after is not None]}
        verbs["remove"] = [one.path for one in self.edits if one.after is None]
        written = " and ".join(f"{verb} {', '.join(paths)}" for verb, paths in verbs.items() if paths)
        if not name:
            return written
        if not self.restart:
            return f"{written} ({name} serves Kubernetes and is not restarted: type systemctl restart {name})"
        return f"{written} and restart {name} ({self._fate()})"

    def diff(self, system: System) -> str:
        return "\n".join(text_diff(edit.path, system.read_bytes(edit.path), edit.after) for edit in self.edits)

    def capture(self, system: System) -> Json:
        files = [capture_path(system, edit.path) for edit in self.edits]
        # If it was not restarted, the undo does not restart it either.
        was_active = self.restart and units.is_active(system, self.unit)
        return {"engine": self.engine, "files": files, "was_active": was_active, "unit": self.unit}

    def apply(self, system: System, tell: Tell) -> None:
        from gpuprov.engines import configure

        before = self.capture(system)
        configure.write(system, self.edits)
        # A stopped engine reads its files at its next start.
        if before["was_active"]:
            tell(f"restarting {self.unit}", 0, 0)
            if trouble := _restart(system, self.unit):
                self.undo(system, before, None)
                what = f"{self.engine} failed to start with its new configuration; the old one is back"
                raise GpuprovError(what, trouble, f"fix what {self.engine} names, then run the same command again")

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        restore_paths(system, before["files"])
        if not (before["was_active"] and before["files"]):
            return
        name, engine = before["engine"], ENGINES[before["engine"]]
        # Journals of older versions name no unit.
        unit = before.get("unit") or engine.unit
        trouble = _restart(system, unit)
        is_there = system.which(engine.program) or any(map(system.exists, engine.places))
        # A failed change has its own message, and an engine that was removed since reads nothing.
        if trouble and is_there and outcome is not None:
            step = f"journalctl -u {unit} -n 50; fix what {name} names, then run the same command again"
            raise GpuprovError(f"{name} does not start with its old configuration, which is back", trouble, step)

    def _fate(self) -> str:
        # Containers are children of their shims or conmon, not of the engine: they keep running.
        cluster = ENGINES[self.engine].cluster
        return "its pods go on; an API server in it does not answer meanwhile" if cluster else "its containers go on"


def _restart(system: System, unit: str) -> str:
    """Restart an engine; return what went wrong, or ""."""
    trouble = units.restart(system, unit)
    if not trouble and units.is_active(system, unit):
        return ""
    said = units.log_of(system, unit, 20).splitlines()
    lines = [line for line in said if "error" in line.lower() or "fail" in line.lower()]
    return "\n".join(lines[-3:]) or trouble or f"{unit} is not active"
