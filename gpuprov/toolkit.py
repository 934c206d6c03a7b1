"""The container toolkit, NVIDIA's or the bundled one: its programs; for both, device nodes and the CDI specification.

`gpuprov_toolkit` chooses. NVIDIA's comes as packages; the bundled one is files of gpuprov's that any host can take.
After that nothing differs but the program that engines/ register as the runtime `nvidia`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from gpuprov.cdi.discover import ask_nvml, discover, missing_nodes
from gpuprov.cdi.generate import OTHER_PATHS, PATH, difference, in_short, other_specifications, specification, updated
from gpuprov.cdi.specification import render_json
from gpuprov.core import changes
from gpuprov.core.changes import Change, Json, Jsons, MakeNode, SetMode, Tell, parent_of
from gpuprov.core.system import System
from gpuprov.driver.source import DriverSource
from gpuprov.engines.known import NVIDIA_RUNTIME, RuntimeEntry
from gpuprov.facts.host import HostFacts
from gpuprov.facts.interpreter import Interpreter, compile_bytecode
from gpuprov.packages.retired import TOOLKIT
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH, SETTINGS_PATH, read_settings

CDI_SPECIFICATION = PATH
_MODE = 0o644  # engines of users read it, too
_HOOK_DIRECTORY = f"{deploy.LIBRARY_PATH}/runtime_hook"


def runtime_path(spec: HostSpec) -> str:
    """Return the program that the engine starts as runtime `nvidia`."""
    return NVIDIA_RUNTIME if spec.toolkit == "nvidia" else deploy.LAUNCHER_PATH


def docker_runtime(spec: HostSpec) -> RuntimeEntry:
    """Return the runtime `nvidia` as docker gets it."""
    return RuntimeEntry(path=runtime_path(spec), set_default=spec.docker_default_runtime, cdi=True)


def engine_runtime(spec: HostSpec) -> RuntimeEntry:
    """Return the runtime `nvidia` as the engines besides docker get it."""
    return RuntimeEntry(path=runtime_path(spec), set_default=spec.default_runtime)


# -- `gpuprov_toolkit: nvidia`, from NVIDIA's repositories (repos.py has the channels) ----------------------------


def packages(spec: HostSpec) -> tuple[str, ...]:
    """Return NVIDIA's toolkit as packages, if requested."""
    if spec.toolkit != "nvidia":
        return ()
    pin = f"={spec.toolkit_version}" if spec.toolkit_version else ""
    # All four of one version, or apt takes the newest of those that only one of them depends on.
    return tuple(f"{name}{pin}" for name in TOOLKIT)


def plan_hook_handover(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that lets NVIDIA's package, which is about to be installed, replace the hook."""
    there = facts.files.get(deploy.NVIDIA_HOOK_PATH)
    if spec.toolkit != "nvidia" or there is None or not deploy.is_ours(there.content):
        return ()
    return (HandOverHook(),)


@dataclass(frozen=True)
class HandOverHook(Change):
    """Let NVIDIA's package replace the hook; the undo restores gpuprov's once that package is removed."""

    # An interrupted one has changed nothing.
    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return f"let NVIDIA's package replace {deploy.NVIDIA_HOOK_PATH}"

    def capture(self, system: System) -> Json:
        return changes.capture_path(system, deploy.NVIDIA_HOOK_PATH)

    def apply(self, system: System, tell: Tell) -> None:
        """Do nothing: the package manager replaces it at once; until then, containers that need it find it."""

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if system.status(before["path"]) is None:
            changes.restore_path(system, before)


# -- `gpuprov_toolkit: bundled`, gpuprov's own runtime and hook ------------------------------------------------------


def plan_runtime(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that updates the bundled runtime's files and their byte code to this version."""
    python = facts.interpreter
    if spec.toolkit != "bundled" or not python.path:
        return ()
    hook = facts.files.get(deploy.NVIDIA_HOOK_PATH)
    files = deploy.deployed_files(python.path, docker_hook=hook is None or deploy.is_ours(hook.content))
    wanted = {path for path, _, _ in files}
    # A module of an older version that this one lacks would otherwise stay importable.
    stale = tuple(path for path in facts.files if path.startswith(f"{_HOOK_DIRECTORY}/") and path not in wanted)
    current = all(facts.is_roots(path, content, mode) for path, mode, content in files)
    # Engines of other users start it too.
    opened = (SetMode(path, mode | 0o555) for path, mode in facts.runtime_modes.items() if mode & 0o555 != 0o555)
    current = current and not stale and facts.bytecode_current
    return (*(() if current else (InstallRuntime(files, python, stale),)), *opened)


def is_runtimes(path: str) -> bool:
    """Say whether this is a file of the bundled runtime, of any version; byte code is not."""
    programs = (deploy.LAUNCHER_PATH, HOOK_PATH, deploy.NVIDIA_HOOK_PATH)
    return path in programs or path.rpartition("/")[0] == _HOOK_DIRECTORY


# From a launcher's first line to the moment when its Python has read all modules: 15 ms on an idle host.
_START_SECONDS = 1.0


@dataclass(frozen=True)
class InstallRuntime(Change):
    """Install the bundled runtime: its files (path, mode, content), compiled for the Python that runs them."""

    undo_restores_files: ClassVar[bool] = True

    files: tuple[tuple[str, int, bytes], ...]
    python: Interpreter
    stale: tuple[str, ...] = ()

    def summary(self) -> str:
        return f"install the bundled container runtime ({deploy.LAUNCHER_PATH}, {_HOOK_DIRECTORY})"

    def diff(self, system: System) -> str:
        """Return the names of the files: a program's text is no configuration."""
        lines = [f"+{path}" for path, _, content in self.files if system.read_bytes(path) != content]
        return "\n".join([*lines, *(f"-{path}" for path in self.stale)])

    def capture(self, system: System) -> Json:
        cache = f"{_HOOK_DIRECTORY}/__pycache__"
        compiled = [f"{cache}/{name}" for name in system.list_directory(cache)]
        paths = [*(path for path, _, _ in self.files), *self.stale, *compiled]
        return {"files": [changes.capture_path(system, path) for path in paths]}

    def apply(self, system: System, tell: Tell) -> None:
        # Programs come last, the launcher behind the hooks: none must start a partial installation.
        files = sorted(self.files, key=lambda file: _program_rank(file[0]))
        replaces = system.exists(deploy.LAUNCHER_PATH)
        changes.write_files(system, ((path, content, mode) for path, mode, content in files))
        # Only then: the launcher of the older version may have named them, and their byte code.
        if replaces:
            system.sleep(_START_SECONDS)
        for path in self.stale:
            system.remove(path)
        compile_bytecode(system, self.python, _HOOK_DIRECTORY)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        cache = f"{_HOOK_DIRECTORY}/__pycache__"
        kept = {image["path"] for image in before["files"]}
        skipped = cls.skipped_paths(system, before)
        if not any(path.startswith(f"{cache}/") for path in kept):
            system.remove_tree(cache)
        # Programs that go precede the modules that they load; programs that come back follow theirs.
        signs = {image["path"]: -1 if image["kind"] == "missing" else 1 for image in before["files"]}
        for image in sorted(before["files"], key=lambda one: signs[one["path"]] * _program_rank(one["path"])):
            if image["path"] not in skipped:
                changes.restore_path(system, image)
        # The programs of the newer version have their byte code until the last container that they start has begun.
        newer = [name for name in system.list_directory(cache) if f"{cache}/{name}" not in kept]
        if newer:
            system.sleep(_START_SECONDS)
        for name in newer:
            system.remove(f"{cache}/{name}")

    @classmethod
    def skipped_paths(cls, system: System, before: Json) -> tuple[str, ...]:
        # A package of NVIDIA's, perhaps installed by hand, has replaced the hook since.
        path = deploy.NVIDIA_HOOK_PATH
        there = any(image["path"] == path for image in before["files"]) and system.status(path) is not None
        return (path,) if there and not deploy.is_ours(system.read_bytes(path) or b"") else ()

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        return tuple(f"{path} stays: it is no longer gpuprov's" for path in cls.skipped_paths(system, before))


def _program_rank(path: str) -> int:
    """Return 0 for a module, 1 for a hook, 2 for the launcher."""
    return path.startswith("/usr/bin/") + (path == deploy.LAUNCHER_PATH)


def settings_fault(system: System) -> str:
    """Return why the bundled runtime can't read its settings on this host, "" if it can."""
    _, fault = read_settings(str(system.path(SETTINGS_PATH)), str(system.path(NVIDIA_SETTINGS_PATH)))
    root = str(system.root).rstrip("/")
    return fault.replace(f"{root}/", "/") if root else fault


def settings_problems(system: System, planned: Iterable[Change]) -> tuple[Problem, ...]:
    """Return the problem of a runtime that would refuse all GPUs once these changes have installed it."""
    fault = settings_fault(system) if any(isinstance(one, InstallRuntime) for one in planned) else ""
    what = "the container runtime can't read its settings: containers with GPUs would not start"
    step = "correct that file, or move it away; after a downgrade, use the newer gpuprov again"
    return (Problem(what, fault, step),) if fault else ()


# -- for both: the device nodes and the CDI specification ------------------------------------------------------------


def plan_device_nodes(facts: HostFacts) -> tuple[Change, ...]:
    """Return the changes that make missing device nodes, as nvidia-modprobe would, and correct their modes."""
    missing = (MakeNode(node.path, node.major, node.minor, node.mode, node.gid) for node in missing_nodes(facts.driver))
    return (*missing, *(SetMode(node.path, node.mode) for node in facts.driver.closed))


def plan_cdi(driver: DriverSource) -> tuple[Change, ...]:
    """Return the changes that update outdated CDI specifications, and that open their folder to engines of users."""
    facts, folder, mode = driver.facts, parent_of(CDI_SPECIFICATION), driver.facts.cdi_folder_mode
    # Engines of users look there, too.
    opening = (SetMode(folder, mode | 0o555),) if mode is not None and mode & 0o555 != 0o555 else ()
    # Unknown until the driver and its nodes exist.
    if driver.plan() or missing_nodes(facts.driver):
        return (*opening, WriteCdiSpecification(None))
    others = tuple(one for one in facts.other_specifications.items() if not facts.is_roots(*one))
    found = facts.files.get(CDI_SPECIFICATION)
    if found is not None and found.is_roots(found.content) and not difference(found.content, facts.driver):
        return (*opening, WriteCdiSpecification(found.content, others)) if others else opening
    return (*opening, WriteCdiSpecification(render_json(specification(facts.driver)), others))


def _present_specification(system: System) -> bytes:
    """Return the specification of the present driver, with the facts from NVML."""
    return updated(ask_nvml(system, discover(system)), system.read_bytes(CDI_SPECIFICATION) or b"")


def follow_driver(system: System, before: str) -> None:
    """Write the CDI specifications again if the driver is no longer `before`, and loaded and installed are the same."""
    found, driver = system.read_bytes(CDI_SPECIFICATION), discover(system)
    settled = driver.kernel_version == driver.library_version != before
    if found and settled and difference(found, driver):
        _write(system)


def _write(system: System) -> None:
    # Devices that come with a driver (NVSwitches) exist only now; NVML is queried only now, too, because it initialises
    # GPUs: seconds for each without a persistent client.
    found = {CDI_SPECIFICATION: _present_specification(system), **other_specifications(system)}
    changes.write_files(system, ((path, content, _MODE) for path, content in found.items()))


@dataclass(frozen=True)
class WriteCdiSpecification(Change):
    """Write the CDI specifications of the driver, the GPUs and (`others`) the devices that go with them.

    `content` is None before the driver is installed.
    """

    undo_restores_files: ClassVar[bool] = True

    content: bytes | None
    others: tuple[tuple[str, bytes], ...] = ()

    def summary(self) -> str:
        names = ", ".join((CDI_SPECIFICATION, *(path for path, _ in self.others)))
        return f"write {names}" + ("" if self.content else " (from the driver, once it is there)")

    @property
    def key(self) -> str:
        return f"write {CDI_SPECIFICATION}"

    def diff(self, system: System) -> str:
        files = (((CDI_SPECIFICATION, _present_specification(system)),) if self.content else ()) + self.others
        diffs = (changes.file_diff(system, path, content, _MODE) for path, content in files)
        return "\n".join(one for one in diffs if one)

    def diff_in_short(self, system: System) -> str:
        files = (((CDI_SPECIFICATION, _present_specification(system)),) if self.content else ()) + self.others
        texts = [in_short(path, old, new) for path, new in files if (old := system.read_bytes(path)) != new]
        # One that is not a specification is shown only in the full diff.
        return "\n".join(texts) if all(texts) else ""

    def capture(self, system: System) -> Json:
        return {"files": [changes.capture_path(system, path) for path in (CDI_SPECIFICATION, *OTHER_PATHS)]}

    def apply(self, system: System, tell: Tell) -> None:
        _write(system)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        # Journals of earlier versions hold one file only.
        changes.restore_paths(system, before.get("files", [before]))
