"""Choose the Python for the container runtime, its hook and the boot units, and say what is wrong with others.

They run as root, long after the login that installed them. So only root may be able to replace the program, its
standard library or a folder above them. A Python in a user's home is not suitable.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import gpuprov
from gpuprov.core.changes import parent_of
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass
from gpuprov.runtime_hook import deploy

OLDEST = (3, 9)
# As a login's PATH may have them; the newest first after the distribution's default.
NAMES = ("python3", *(f"python3.{minor}" for minor in range(15, 8, -1)))
PLATFORM_PYTHON = "/usr/libexec/platform-python"
# Debian's and Ubuntu's have the programs in packages of their own.
_PACKAGES = re.compile(r"python3(\.\d+)?-minimal|python3(\d{1,2}|\.\d+)?|platform-python")
MISSING = "it is missing"
_CANDIDATES = (*(f"/usr/bin/{name}" for name in NAMES), PLATFORM_PYTHON)
# The path stands unquoted in shell scripts and units.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+-]{1,200}")
ALONE = ("-I", "-S", "-E", "-B")
_SECONDS = 20
_FIRST_GROUP = 1000
_ASK = (
    "import os, sys; "
    "print('%d.%d.%d' % sys.version_info[:3], sys.implementation.cache_tag, os.path.dirname(os.__file__))"
)
_CALL = "import sys; sys.path.insert(0, sys.argv[2]); from gpuprov.runtime_hook import deploy; "
_COMPILE = f"{_CALL}deploy.compile_bytecode(sys.argv[1])"
_IS_CURRENT = f"{_CALL}sys.exit(not deploy.bytecode_is_current(sys.argv[1]))"


@dataclass(frozen=True)
class Interpreter:
    """The Python for the programs that gpuprov deploys.

    `path`: without links, "" if no Python of the host is suitable. `deployed`: the one that the deployed programs name,
    "" if none are deployed; `fault`: what is wrong with it; `replaced`: it is gone, and they run on `path` meanwhile.
    `refused`: why others were rejected, a sentence each. `cache_tag`: as in sys.implementation; it identifies the
    matching byte code.
    """

    path: str = ""
    version: str = ""
    cache_tag: str = ""
    deployed: str = ""
    fault: str = ""
    replaced: bool = False
    refused: tuple[str, ...] = ()


def gather_interpreter(system: System, deployed: str) -> Interpreter:
    """Return the Python to use: the current one if suitable, else this program's own, else the distribution's.

    Runs no program that another user than root could have placed there.
    """
    faults: dict[str, str] = {}
    for candidate in filter(None, (deployed, sys.executable, *_CANDIDATES)):
        path = system.real_path(candidate)
        if path in faults:
            continue
        found, fault = _examine(system, path)
        if not fault:
            break
        faults[path] = fault
    else:
        path, found = "", ("", "")
    broken = faults.get(system.real_path(deployed), "") if deployed else ""
    refused = tuple(f"{place}: {fault}" for place, fault in faults.items() if fault != MISSING)
    replaced = broken == MISSING and path == system.real_path(deploy.STAND_IN)
    return Interpreter(path, *found, deployed, broken, replaced, refused)


def packages_of_pythons(installed: Iterable[str]) -> tuple[str, ...]:
    """Return the installed packages that contain a Python: if the Python is missing, they must be reinstalled."""
    return tuple(sorted(name for name in installed if _PACKAGES.fullmatch(name)))


def _examine(system: System, path: str) -> tuple[tuple[str, str], str]:
    """Return the version and the cache tag of the Python at a path without links, and what is wrong with it."""
    nothing = ("", "")
    if fault := replaceable(system, path):
        return nothing, fault
    if not _PLAIN_PATH.fullmatch(path):
        return nothing, "its path has characters that scripts and units can't hold"
    done = system.run((path, *ALONE, "-c", _ASK), timeout=_SECONDS)
    answer = re.fullmatch(r"(\d+)\.(\d+)\.(\d+) (\S+) (/.*)\n", done.stdout) if done.ok else None
    if answer is None:
        return nothing, f"it does not run: exit code {done.returncode}: {done.evidence(1).rpartition(chr(10))[2]}"
    *numbers, tag, library = answer.groups()
    version = ".".join(numbers)
    if tuple(map(int, numbers)) < OLDEST:
        return nothing, f"it is Python {version}, older than {'.'.join(map(str, OLDEST))}"
    fault = replaceable(system, system.real_path(library))
    return (version, tag), f"its standard library {library}: {fault}" if fault else ""


def replaceable(system: System, path: str, *, system_groups: bool = False) -> str:
    """Return how a user other than root could replace the file at a path without links; "" if none could.

    `system_groups`: trust the groups of the system (below 1000, login.defs(5)), as Debian's staff.
    """
    place = path
    while True:
        status = system.status(place)
        if status is None:
            return MISSING
        if status.uid != 0:
            return f"{place} belongs to user {status.uid}, not to root"
        # /usr/local belongs to the group staff on Debian.
        if status.mode & 0o002 or (status.mode & 0o020 and status.gid >= (_FIRST_GROUP if system_groups else 1)):
            return f"{place} can be written by other users than root (mode {status.mode:04o})"
        if place == "/":
            return ""
        place = parent_of(place)


def bytecode_is_current(system: System, python: Interpreter, folder: str) -> bool:
    """Say whether the deployed modules have byte code for this Python."""
    place = str(system.path(folder))
    if python.cache_tag == sys.implementation.cache_tag:
        return deploy.bytecode_is_current(place)
    return bool(python.path) and system.run(_call(python, _IS_CURRENT, place), timeout=_SECONDS).ok


def compile_bytecode(system: System, python: Interpreter, folder: str) -> None:
    """Compile the deployed modules for this Python. Raises GpuprovError if it can't."""
    place = str(system.path(folder))
    if python.cache_tag == sys.implementation.cache_tag:
        deploy.compile_bytecode(place)
        return
    what = f"{python.path} can't compile the container runtime"
    lacks = f"{python.path} needs its whole standard library"
    step = f"{lacks}: install the distribution's package of it, not a minimal one"
    system.require(_call(python, _COMPILE, place), what, step)


def _call(python: Interpreter, code: str, place: str) -> tuple[str, ...]:
    # The folder or the archive that holds this very gpuprov.
    return (python.path, *ALONE, "-c", code, place, str(Path(gpuprov.__file__).resolve().parent.parent))
