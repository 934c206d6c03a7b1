"""containerd, CRI-O and podman as `install` keeps them: their facts, and the registration of the runtime with them.

The edits of their files are configure.py's, the same as for `gpuprov runtime configure`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuprov.core.changes import Change, Json, Tell, capture_path, parent_of, restore_path, text_diff
from gpuprov.core.commands import NOT_FOUND, Completed
from gpuprov.core.system import System
from gpuprov.engines import containerd, crio, podman
from gpuprov.engines.runtime_entry import ConfigureRequest, FileEdit, RuntimeEntry
from gpuprov.wire.errors import GpuprovError, Problem
from gpuprov.wire.spec import HostSpec


@dataclass(frozen=True)
class _Engine:
    """An engine's program, the unit that reads its files when it starts (podman has none), and these files."""

    program: str
    unit: str
    main: str
    drop_in: str


ENGINES = {
    "containerd": _Engine("containerd", "containerd.service", containerd.MAIN, containerd.DROP_IN),
    "crio": _Engine("crio", "crio.service", crio.MAIN, crio.DROP_IN),
    "podman": _Engine("podman", "", podman.MAIN, podman.DROP_IN),
}
_RESTART_SECONDS = 180
_LOG_LINES = "20"


@dataclass(frozen=True)
class EngineFacts:
    """An engine on a host: its program (empty: not installed), what that says of its version, path → file.

    The edits are computed from it as from a System (`Reader`): a file that was not gathered does not exist.
    """

    program: str = ""
    version: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)

    def exists(self, path: str) -> bool:
        return path in self.files

    def read_bytes(self, path: str) -> bytes | None:
        return self.files.get(path)

    def list_directory(self, path: str) -> tuple[str, ...]:
        return tuple(sorted(file.rpartition("/")[2] for file in self.files if parent_of(file) == path))

    def which(self, program: str) -> str | None:
        return self.program if program == self.program.rpartition("/")[2] else None

    def run(self, argv: Sequence[str], *, timeout: float = 60) -> Completed:
        asks_version = tuple(argv) == (self.program, "--version") and bool(self.version)
        return Completed(tuple(argv), 0 if asks_version else NOT_FOUND, self.version if asks_version else "")

    def require(self, argv: Sequence[str], what: str, next_step: str = "") -> Completed:
        raise GpuprovError(what, f"not gathered: {' '.join(argv)}", next_step)


def names(system: System, spec: HostSpec) -> tuple[str, ...]:
    """Return the engines that a specification is about: those that it names, else, without docker, the installed."""
    if spec.engines or spec.docker != "none":
        return spec.engines
    # Docker's containerd is docker's, even where docker is to be left alone.
    others = (name for name in ENGINES if name != "containerd" or system.which("dockerd") is None)
    coming = _coming(spec)
    return tuple(name for name in others if name in coming or system.which(ENGINES[name].program) is not None)


def _coming(spec: HostSpec) -> frozenset[str]:
    """Return the engines that the run itself may install and then configure: podman's files need no look at it."""
    return frozenset({"podman"} & {package.partition("=")[0] for package in spec.packages})


def with_coming(found: Mapping[str, EngineFacts], spec: HostSpec) -> Mapping[str, EngineFacts]:
    """Return the facts as a plan needs them: an engine that the run itself may install counts as installed."""
    coming = _coming(spec)
    return {
        name: replace(one, program=f"/usr/bin/{name}") if name in coming and not one.program else one
        for name, one in found.items()
    }


def gather(system: System, names: Iterable[str]) -> Mapping[str, EngineFacts]:
    """Return engine → facts for the engines of these names."""
    return {name: _gather(system, name) for name in names}


def _gather(system: System, name: str) -> EngineFacts:
    engine = ENGINES[name]
    program = system.which(engine.program)
    if program is None:
        return EngineFacts()
    folder = parent_of(engine.drop_in)
    paths = [engine.main, *(f"{folder}/{file}" for file in system.list_directory(folder))]
    version = ""
    if name == "containerd":
        # Imported here: most hosts name no such engine, and the TOML editor costs as much as all of their facts.
        from gpuprov.engines import containerd_files

        paths += containerd_files.imported(system, engine.main)
        # The edits depend on the version of containerd alone.
        said = system.run((program, "--version"), timeout=20)
        version = said.stdout if said.ok else ""
    files = {path: content for path in paths if (content := system.read_bytes(path)) is not None}
    return EngineFacts(program, version, files)


@dataclass(frozen=True)
class Registration:
    """The edits that register the runtime with an engine, none if it is registered; or why that is not possible."""

    edits: tuple[FileEdit, ...] = ()
    problem: Problem | None = None


def registrations(facts: Mapping[str, EngineFacts], runtime_path: str) -> Mapping[str, Registration]:
    """Return engine → registration for the installed engines."""
    return {name: _registration(name, one, runtime_path) for name, one in facts.items() if one.program}


def _registration(name: str, facts: EngineFacts, runtime_path: str) -> Registration:
    from gpuprov.engines import configure

    try:
        found = configure.configuration(facts, ConfigureRequest(name, RuntimeEntry(path=runtime_path)))
    except GpuprovError as error:
        return Registration(problem=error.problems[0])
    return Registration(tuple(edit for edit in found.edits if edit.changes))


def problems(facts: Mapping[str, EngineFacts], runtime_path: str) -> tuple[Problem, ...]:
    """Return what prevents the registration of the runtime with these engines."""
    missing = tuple(
        Problem(
            f"{name} is not installed",
            f"there is no {ENGINES[name].program} on the PATH",
            f"install it, or take {name} out of gpuprov_engines",
        )
        for name, one in facts.items()
        if not one.program
    )
    found = registrations(facts, runtime_path).values()
    return (*missing, *(one.problem for one in found if one.problem is not None))


def plan(
    facts: Mapping[str, EngineFacts], runtime_path: str, kept_running: frozenset[str] = frozenset()
) -> tuple[Change, ...]:
    """Return the changes of the engines' files; each restarts its engine, if that runs and is not in `kept_running`."""
    found = registrations(facts, runtime_path)
    return tuple(ConfigureEngine(name, one.edits, name not in kept_running) for name, one in found.items() if one.edits)


@dataclass(frozen=True)
class ConfigureEngine(Change):
    """The engine's files name the runtime, and the running engine has read them.

    `restart` is False for the engine of a Kubernetes node that nobody has named: it reads them at its next start.
    """

    engine: str
    edits: tuple[FileEdit, ...]
    restart: bool = True

    @property
    def key(self) -> str:
        return f"configure {self.engine}"

    def summary(self) -> str:
        name = ENGINES[self.engine].unit.removesuffix(".service")
        written = f"write {', '.join(edit.path for edit in self.edits)}"
        if not name:
            return written
        if not self.restart:
            return f"{written} ({name} serves Kubernetes and is not restarted: it reads them at its next start)"
        # Containers are children of their shims or conmon, not of the engine: they keep running.
        return f"{written} and restart {name} (its containers go on)"

    def diff(self, system: System) -> str:
        return "".join(text_diff(edit.path, system.read_bytes(edit.path), edit.after) for edit in self.edits)

    def capture(self, system: System) -> Json:
        files = [capture_path(system, edit.path) for edit in self.edits]
        # What was not restarted is not restarted by the undoing either.
        was_active = self.restart and is_active(system, self.engine)
        return {"engine": self.engine, "files": files, "was_active": was_active}

    def apply(self, system: System, tell: Tell) -> Json:
        from gpuprov.engines import configure

        before = self.capture(system)
        configure.write(system, self.edits)
        unit = ENGINES[self.engine].unit
        # A stopped engine reads its files at its next start.
        if before["was_active"]:
            tell(f"restarting {unit}", 0, 0)
            trouble = _restart(system, self.engine)
            if trouble:
                self.undo(system, before, None)
                raise GpuprovError(
                    f"{self.engine} failed to start with its new configuration; the old one is back",
                    trouble,
                    f"fix what {self.engine} names, then run the same command again",
                )
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        for image in before["files"]:
            restore_path(system, image)
        if before["was_active"]:
            _restart(system, before["engine"])


def is_active(system: System, engine: str) -> bool:
    """Say whether an engine's unit is active; podman has none."""
    unit = ENGINES[engine].unit
    return bool(unit) and system.run(("systemctl", "is-active", "--quiet", unit)).ok


def _restart(system: System, engine: str) -> str:
    """Restart an engine; return what went wrong, or nothing."""
    unit = ENGINES[engine].unit
    system.run(("systemctl", "reset-failed", unit))
    done = system.run(("systemctl", "restart", unit), timeout=_RESTART_SECONDS)
    if done.ok and is_active(system, engine):
        return ""
    said = system.run(("journalctl", "--unit", unit, "--lines", _LOG_LINES, "--no-pager", "--output", "cat")).stdout
    lines = [line for line in said.splitlines() if "error" in line.lower() or "fail" in line.lower()]
    return "\n".join(lines[-3:]) or done.evidence(3)
