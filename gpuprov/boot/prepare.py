"""The units and the program that load the driver, make its nodes and refresh the CDI specification at each boot."""

from __future__ import annotations

import importlib.util
import io
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from gpuprov.cdi.discover import discover
from gpuprov.core.changes import Change, Json, Tell, capture_path_itself, restore_paths, text_diff, write_files
from gpuprov.core.system import System
from gpuprov.core.units import daemon_reload, log_of, systemctl
from gpuprov.driver import gpudirect, mig
from gpuprov.driver.source import DriverSource
from gpuprov.facts import boot
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.mig_configs import DISABLED, ENABLED
from gpuprov.runtime_hook import deploy

if TYPE_CHECKING:
    from importlib.abc import Traversable

# The modules that program_main.py imports, directly or not; a test runs the file with these only.
_MODULES = (
    "__init__", "boot/__init__", "boot/program_main", "core/__init__", "core/changes", "core/commands", "core/files",
    "core/lock", "core/proxy", "core/system", "machine/__init__", "machine/pci", "protocol/__init__",
    "protocol/codec", "protocol/dataclass", "protocol/errors", "protocol/secrets", "protocol/words",
    # nvidia-docker and `gpuprov serve`.
    "boot/docker_args", "boot/gpu_report_child", "boot/serve", "engines/__init__",
    "engines/nvidia_docker_command", "engines/plain_flags",
)  # fmt: skip
_PACKAGES = ("gpuprov.cdi", "gpuprov.runtime_hook", "elftools")
# Boots wait for it. zipimport compiles a module for its file name, and again for its code: a quarter of the time.
_MAIN = b"""\
import zipimport
from functools import lru_cache

if hasattr(zipimport, "_get_module_code"):
    zipimport._get_module_code = lru_cache(None)(zipimport._get_module_code)

from gpuprov.boot.program_main import main

main()
"""
# Longer than the longest TimeoutStartSec of these units; MIG's is of its layout: two minutes, and one for each GPU.
START_SECONDS = 1000
# These leave no process: nothing that requires them, such as a container's unit, has to restart or stop with them.
_ALONE = (boot.NODES, boot.MIG, boot.REFRESH, boot.WATCH, boot.CONFIDENTIAL, boot.GPUDIRECT)
_EPOCH = (1980, 1, 1, 0, 0, 0)  # The earliest date that a zip file can store


def packages(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages that a driver's services need."""
    return driver.facts.distribution.service_packages if _has_persistence(driver) else ()


def plan(driver: DriverSource) -> tuple[Change, ...]:
    """Return the change that installs what is missing and removes what is obsolete; empty if nothing is."""
    facts, wanted = driver.facts, _wanted(driver)
    wrong = tuple(one for one in wanted.items() if not facts.is_roots(*one))
    units = tuple(name for name in boot.STARTED if f"{boot.UNITS}/{name}" in wanted)
    links = tuple(name for name in units if facts.boot.enabled.get(f"{boot.WANTS}/{name}") != f"{boot.UNITS}/{name}")
    # A restart of MPS ends the programs that it serves.
    if boot.MPS not in links and f"{boot.UNITS}/{boot.MPS}" not in dict(wrong):
        units = tuple(name for name in units if name != boot.MPS)
    stale = tuple(
        path
        for path in boot.MANAGED
        if path not in wanted and (found := facts.files.get(path)) is not None and boot.is_ours(found.content)
    )
    return (PrepareBoot(wrong, links, stale, units),) if wrong or links or stale else ()


def _wanted(driver: DriverSource) -> dict[str, bytes]:
    """Return path → content of all files that this host needs."""
    facts, spec, python = driver.facts, driver.spec, driver.facts.interpreter.path
    units = [boot.NODES, boot.REFRESH, boot.WATCH, boot.CHANGED, boot.SOCKETS]
    paths = [boot.UDEV_RULES, boot.USERS, boot.ROOT]
    # In a system container, the kernel modules and the GPU modes belong to the host.
    # A copy of an image may have no GPU: loading modules would then fail the unit. The nodes' unit loads them instead.
    machine = not facts.kernel.container and facts.image is None
    if facts.kernel.takes_modules and machine:
        paths.append(boot.MODULES)
    # By address: numbers change if a GPU is missing at a boot.
    divided = tuple(one for one in mig.wanted(facts, spec) if one[1] != DISABLED)
    if divided:
        units.append(boot.MIG)
    encrypted = machine and facts.boot.confidential and spec.confidential_ready == "auto"
    asked = {boot.GPUDIRECT: spec.gpudirect, boot.MPS: spec.mps, boot.CONFIDENTIAL: encrypted}
    units += (name for name, is_asked in asked.items() if is_asked)
    if spec.serve:
        units += (boot.SERVE, boot.SERVE_SOCKET)
    if _has_persistence(driver):
        units.append(boot.PERSISTENCE)
    if facts.image is not None:
        paths += boot.DRIVEN
        units += (boot.SSH_KEYS,) if facts.boot.ssh_keygen else ()
    paths += (f"{boot.UNITS}/{name}" for name in units)
    memory = f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={spec.mps_memory}" if spec.mps_memory else ""
    values = {"python": python_command(python), "mps_threads": str(spec.mps_threads), "mps_memory": memory}
    values.update(mig_values(divided))
    values.update(gpudirect.unit_values(spec))
    return {boot.PROGRAM: boot_program(), **{path: content_of(path, **values) for path in paths}}


def content_of(path: str, **values: str) -> bytes:
    """Return the content of gpuprov's file with this path on a host: `$name` in it stands for a value.

    The files are in the folder boot/etc of this package.
    """
    # By name: in a zip, Python 3.10.0 to 3.10.9 and 3.11.0 and 3.11.1 take it by position for a second one.
    text = files("gpuprov.boot").joinpath(path[1:]).read_text(encoding="utf-8")
    return Template(text).substitute(values).encode()


def python_command(python: str) -> str:
    """Return what starts this Python in a unit's command line, and the one in its place once an upgrade removed it."""
    return f'/bin/sh -c \'test -x $$0 || exec {deploy.STAND_IN} "$$@"; exec $$0 "$$@"\' {python}'


def mig_values(layout: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return what the unit that divides the GPUs of a layout (PCI address → text, mig.py) needs, for content_of.

    From Hopper on the MIG mode does not outlive a boot either. A GPU that has MIG devices already stays as it is.
    """
    steps = []
    for gpu, text in layout:
        profiles = mig.largest_first(text.split(",")) if text[0].isdigit() else text.partition("-")[2]
        make = f"nvidia-smi mig -i {gpu} -cgi {profiles} -C" if text != ENABLED else ":"
        if text.startswith("all-"):
            # The first must succeed; the others repeat until there is no room left.
            make = f"{make} && while {make}; do :; done"
        there = f'nvidia-smi mig -i {gpu} -lgi | grep -q " MIG "'
        steps.append(f"{there} || {{ nvidia-smi -i {gpu} -mig 1 && {make}; }} || failed=1")
    return {"steps": "; ".join(steps), "seconds": str(120 + 60 * len(layout))}


@lru_cache(maxsize=1)
def boot_program() -> bytes:
    """Return program_main.py as one file that needs only Python. Same input, same bytes; also inside a zipapp."""
    made = io.BytesIO()
    # Not compressed: the bytes would depend on the zlib that compresses.
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(_modules()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content)
    return made.getvalue()


def is_of_another_version(system: System) -> bool:
    """Say whether another version of gpuprov has prepared this host's boot: it wrote the CDI specification, too."""
    there = system.read_bytes(boot.PROGRAM)
    return there is not None and there != boot_program()


def _modules() -> Iterator[tuple[str, bytes]]:
    yield "__main__.py", _MAIN
    package = files("gpuprov")
    for name in _MODULES:
        yield f"gpuprov/{name}.py", package.joinpath(f"{name}.py").read_bytes()
    for name in _PACKAGES:
        yield from _sources(files(name), name.replace(".", "/"))
    pynvml = importlib.util.find_spec("pynvml")
    assert pynvml is not None and pynvml.origin is not None and pynvml.loader is not None
    yield "pynvml.py", pynvml.loader.get_data(pynvml.origin)  # type: ignore[attr-defined]


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _sources(entry, f"{name}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{name}/{entry.name}", entry.read_bytes()


def _has_persistence(driver: DriverSource) -> bool:
    """Say whether the host has, or is about to get, nvidia-persistenced without a unit from a package."""
    facts = driver.facts
    if facts.boot.persistence_packaged or not driver.brings_modules:
        return False
    return driver.installs or any(file.path == boot.PERSISTENCE_PROGRAM for file in facts.driver.programs)


@dataclass(frozen=True)
class PrepareBoot(Change):
    """Install these files and start these units, now and at every boot; remove stale ones.

    `files`: path, content; `links`: units to enable; `units`: all units that must run.
    """

    files: tuple[tuple[str, bytes], ...]
    links: tuple[str, ...]
    stale: tuple[str, ...]
    units: tuple[str, ...]

    key = "prepare the next boot"

    def summary(self) -> str:
        return f"prepare the next boot: {', '.join(self.units)}"

    def diff(self, system: System) -> str:
        texts = [
            f"+{path}" if path == boot.PROGRAM else text_diff(path, system.read_bytes(path), content)
            for path, content in self.files
        ]
        removed = [text_diff(path, system.read_bytes(path), None) for path in self.stale]
        return "\n".join([*texts, *removed, *(f"+{boot.WANTS}/{name}" for name in self.links)])

    def capture(self, system: System) -> Json:
        gone = _units_in(self.stale)
        links = (f"{boot.WANTS}/{name}" for name in (*self.links, *gone))
        paths = (*(path for path, _ in self.files), *self.stale, *links)
        files = [capture_path_itself(system, path) for path in paths]
        # A unit that is stopped now starts again once its file and its link are restored.
        going = [name for name in gone if system.status(f"{boot.WANTS}/{name}") is not None]
        return {"files": files, "units": [*self.units, *going]}

    def apply(self, system: System, tell: Tell) -> None:
        write_files(system, ((path, content, 0o644) for path, content in self.files))
        gone = _units_in(self.stale)
        _systemctl(system, "stop", gone)
        for path in (*self.stale, *(f"{boot.WANTS}/{name}" for name in gone)):
            system.remove(path)
        for name in self.links:
            system.make_directory(boot.WANTS)
            system.make_link(f"{boot.WANTS}/{name}", f"{boot.UNITS}/{name}")
        _reload(system)
        self._start(system, tell)
        # By the same link, a package's own unit was enabled.
        if boot.PERSISTENCE in gone and boot.gather_boot(system).persistence_packaged:
            systemctl(system, "enable", "--now", boot.PERSISTENCE)
        # A package's own unit has failed if it started before the libraries were installed.
        failed = system.run(("systemctl", "is-failed", "--quiet", boot.PERSISTENCE)).ok
        if failed and (trouble := systemctl(system, "restart", boot.PERSISTENCE)):
            tell(f"{boot.PERSISTENCE} did not start: {trouble}", 0, 0)

    def _start(self, system: System, tell: Tell) -> None:
        """Start the units now, so that a failing unit is reported now and not at the next boot."""
        for name in self.units:
            # `restart`: the nodes' unit stays active after its work, and may be an older one.
            if not (trouble := _systemctl(system, "restart", (name,))):
                continue
            said = log_of(system, name)
            # Persistence is optional. While another driver or none is loaded no unit can work: that may need a reboot.
            driver = discover(system)
            if name == boot.PERSISTENCE or driver.kernel_version != driver.library_version:
                tell(f"{name} did not start: {said.replace(chr(10), '; ')}", 0, 0)
                continue
            raise GpuprovError(f"{name} did not start", f"{trouble}\n{said}", f"systemctl status {name}")

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        _systemctl(system, "stop", before["units"])
        restore_paths(system, before["files"])
        _reload(system)
        _systemctl(system, "restart", [name for name in before["units"] if system.exists(f"{boot.UNITS}/{name}")])


def _systemctl(system: System, verb: str, units: Collection[str]) -> str:
    """Stop or restart units; return systemctl's last error, or ""."""
    trouble = ""
    for alone in (True, False):
        if names := [name for name in units if (name in _ALONE) == alone]:
            trouble = systemctl(system, verb, *names, seconds=START_SECONDS, alone=alone) or trouble
    return trouble


def _units_in(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the units among these files."""
    return tuple(name for folder, name in (path.rpartition("/")[::2] for path in paths) if folder == boot.UNITS)


def _reload(system: System) -> None:
    """Make systemd and udev reread their files."""
    daemon_reload(system)
    if system.which("udevadm") is not None:
        system.run(("udevadm", "control", "--reload"), timeout=60)
