"""Build the agent's zipapp: gpuprov's host side and its pure-Python dependencies, reproducibly.

It unpacks itself once on the host (measured: from the zip every start compiles all modules again, 0.9 s; unpacked, with
Python's own .pyc files beside the sources, 0.1 s). The folder belongs to root and is renamed into its place whole.
"""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePath

import gpuprov
from gpuprov.core.disk import make_user_folder
from gpuprov.fleet.agent_run import Agent
from gpuprov.protocol.errors import GpuprovError

# The host side's direct dependencies, marked [host] in pyproject.toml; metadata gives their own dependencies.
HOST_DEPENDENCIES = ("distro", "requests", "urllib3", "marshmallow", "nvidia-ml-py", "pyelftools", "tomlkit")
OLDEST_PYTHON = "3.9"
# The included folders; only the controller uses `cli`, `kubernetes`, `fleet` and `bundle_create`.
_HOST_FOLDERS = (
    "agent", "boot", "bundle", "cdi", "core", "doctor", "driver", "engines", "facts", "machine", "packages",
    "plan", "runtime_hook", "checks", "protocol",
)  # fmt: skip
_HOST_FILES = ("__init__.py", "driver_run.py", "repos.py", "toolkit.py", "verify.py")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # The earliest date that a zip file can store
_CACHE = "~/.cache/gpuprov"

_STARTER = '''\
"""Starts gpuprov's {name}: unpacks this zip once, then runs from there."""

import os
import sys

if sys.version_info < (3, 9):
    sys.exit("gpuprov needs Python 3.9 or later\\n  seen: %s is Python %d.%d\\n  next: install a newer Python (Ubuntu "
             "20.04: apt-get install python3.9; RHEL 8: dnf install python3.12), then name it: sudo python3.9 %s"
             % (sys.executable, sys.version_info[0], sys.version_info[1], sys.argv[0]))

DIGEST = "{digest}"
PLACE = "/var/cache/gpuprov" if os.geteuid() == 0 else os.path.expanduser("~/.cache/gpuprov")


def unpacked():
    """Return the folder with the modules, ours alone, or the zip itself where no folder can be had."""
    folder = os.path.join(PLACE, "{name}-" + DIGEST)
    archive = os.path.dirname(os.path.abspath(__file__))
    try:
        if is_below_others(PLACE):
            return archive
        os.makedirs(PLACE, mode=0o700, exist_ok=True)
        if is_ours(PLACE) and (is_ours(folder) or unpack(archive, folder)):
            return folder
    except OSError:
        pass  # a full or read-only disk: slower, but it runs
    return archive


def is_ours(path):
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and found.st_mode & 0o170022 == 0o040000


def is_below_others(path):
    """Say whether another user could swap the folder: below his home, or writable by a group, or a relative path."""
    if not os.path.isabs(path):
        return True
    above = os.path.dirname(os.path.realpath(path))
    while not os.path.exists(above):
        above = os.path.dirname(above)
    while True:
        found = os.stat(above)
        mode = found.st_mode
        by_group = mode & 0o1020 == 0o20 and found.st_gid not in (0, os.geteuid())
        if found.st_uid not in (0, os.geteuid()) or mode & 0o1002 == 0o2 or by_group:
            return True
        if above == "/":
            return False
        above = os.path.dirname(above)


def unpack(archive, folder):
    import shutil
    import tempfile
    import time
    import zipfile

    for name in os.listdir(PLACE):
        old = os.path.join(PLACE, name)
        is_old = name.startswith(("{name}-", ".{name}-")) and time.time() - os.lstat(old).st_mtime > 30 * 86400
        if is_old and is_ours(old):
            shutil.rmtree(old, ignore_errors=True)
    made = tempfile.mkdtemp(prefix=".{name}-", dir=PLACE)
    try:
        with zipfile.ZipFile(archive) as file:
            file.extractall(made)
        os.rename(made, folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        return is_ours(folder)  # another run was faster
    except Exception as error:  # what zipfile and zlib raise for a file that was cut or changed
        shutil.rmtree(made, ignore_errors=True)
        sys.exit("%s is damaged\\n  seen: %s\\n  next: copy or download it again" % (archive, error))
    return True


'''
AGENT_START = """\
sys.path[0] = unpacked()
from gpuprov.agent.agent import main  # noqa: E402

sys.exit(main())
"""


def build_agent(cache: Path | None = None) -> Agent:
    """Return the zipapp, from `cache` (default ~/.cache/gpuprov) if it was built from the same input before.

    Raises GpuprovError if a dependency is missing or does not run on Python 3.9.
    """
    files = dict(sorted(_files()))
    main, digest = main_program("agent", AGENT_START, files)
    kept = (cache or Path(_CACHE).expanduser()) / f"build-{digest}.pyz"
    try:
        content = kept.read_bytes()
        if zipfile.is_zipfile(io.BytesIO(content)):
            return Agent(content, hashlib.sha256(content).hexdigest())
    except OSError:
        pass
    content = pack({"__main__.py": main, **files})
    _keep(kept, content)
    return Agent(content, hashlib.sha256(content).hexdigest())


def stored_agent() -> Path:
    """Return the zipapp as a file, for a run on this machine. Raises GpuprovError as build_agent does."""
    path = Path(_CACHE).expanduser() / "local-agent.pyz"
    content = build_agent().content
    try:
        if path.is_file() and path.read_bytes() == content:
            return path
    except OSError:
        pass
    _keep(path, content)
    if not path.is_file():
        raise GpuprovError(
            f"the agent can't be stored at {path}", "", f"is there room, and may {path.parent} be written?"
        )
    return path


def main_program(name: str, start: str, files: dict[str, bytes]) -> tuple[bytes, str]:
    """Return the `__main__.py` of a zipapp with these files, and the digest in its text.

    It unpacks the zip into a folder NAME-DIGEST, the same for the same files. Then it runs `start`, code that calls
    `unpacked()`.
    """
    text = (_STARTER + start).replace("{name}", name)
    digest = _digest_of(text, files)
    return text.replace("{digest}", digest).encode(), digest


def pack(files: dict[str, bytes]) -> bytes:
    """Return a compressed zip file; same files, same bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, wherever it is built: the byte stands in the file
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content)
    return made.getvalue()


def host_distributions() -> tuple[str, ...]:
    """Return the sorted distributions in the agent: the host side's dependencies and their dependencies."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    environment = {"python_version": OLDEST_PYTHON, "python_full_version": f"{OLDEST_PYTHON}.0", "extra": ""}
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in HOST_DEPENDENCIES]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in _distribution(name).requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                waiting.append(canonicalize_name(requirement.name))
    return tuple(sorted(found))


def _distribution(name: str) -> metadata.Distribution:
    from packaging.specifiers import SpecifierSet

    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise GpuprovError(
            f"the agent cannot be built: the Python package {name} is missing", "", f"pip install {name}"
        ) from None
    if not SpecifierSet(found.metadata["Requires-Python"] or "").contains(OLDEST_PYTHON):
        raise GpuprovError(
            f"the agent cannot be built: {name} {found.version} does not run on Python {OLDEST_PYTHON}",
            f"it asks for Python {found.metadata['Requires-Python']}",
            f"pip install a release of {name} that does",
        )
    return found


def _files() -> Iterator[tuple[str, bytes]]:
    package = Path(gpuprov.__file__).parent
    for path in package.rglob("*"):
        place = path.relative_to(package)
        if path.is_file() and place.parts[0] in (*_HOST_FOLDERS, *_HOST_FILES) and travels(path):
            yield f"gpuprov/{place.as_posix()}", path.read_bytes()
    for name in host_distributions():
        distribution = _distribution(name)
        for entry in distribution.files or ():
            path = Path(str(distribution.locate_file(entry)))
            if ".." not in entry.parts and ".dist-info" not in entry.parts[0] and path.is_file() and travels(path):
                yield entry.as_posix(), path.read_bytes()


def travels(path: PurePath) -> bool:
    """Say whether a file belongs in a zipapp: sources and data, nothing compiled for this machine."""
    return path.suffix not in (".pyc", ".so", ".pyi") and "__pycache__" not in path.parts and path.name != "py.typed"


def _digest_of(main: str, files: dict[str, bytes]) -> str:
    digest = hashlib.sha256(main.encode())
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _keep(path: Path, content: bytes) -> None:
    """Store the result for the next run; an unwritable cache only costs time."""
    try:
        make_user_folder(path.parent)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(content)
        temporary.chmod(0o600)
        temporary.replace(path)
    except OSError:
        pass
