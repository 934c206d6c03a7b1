"""The programs for hosts as zip files: what they contain, and how they are packed, reproducibly.

A program unpacks itself once on the host (measured: from the zip every start compiles all modules again, 0.9 s;
unpacked, with Python's own .pyc files beside the sources, 0.1 s). The folder belongs to root and is renamed into its
place whole. What it contains of others are the locked wheels, so it does not depend on the packages of the controller.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

import gpuprov
from gpuprov.fleet.agent_file import keep
from gpuprov.protocol.errors import GpuprovError

_CLONE = Path(gpuprov.__file__).resolve().parents[1]
# Name, version and SHA-256 of each package in the programs for hosts (`make lock`), and their wheels (`make setup`).
LOCK = _CLONE / "tools/host-packages.txt"
WHEELS = _CLONE / ".cache/wheels"
_LOCKED = re.compile(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})( +# agent)?$", re.MULTILINE)
_LICENCE = re.compile(r"(?i)(licen[cs]e|copying|notice|authors)")
# The included folders; only the controller uses `cli`, `kubernetes`, `fleet` and `bundle_create`.
HOST_FOLDERS = (
    "agent", "boot", "bundle", "cdi", "core", "doctor", "driver", "engines", "facts", "machine", "packages",
    "plan", "runtime_hook", "checks", "protocol",
)  # fmt: skip
HOST_FILES = ("__init__.py", "driver_run.py", "repos.py", "toolkit.py", "verify.py")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # The earliest date that a zip file can store

AGENT_START = """\
# What an installation imports after all else, the earliest first.
LATE = (
    "gpuprov/plan", "gpuprov", "gpuprov/boot", "gpuprov/driver", "gpuprov/packages", "gpuprov/checks/cuda", "urllib3",
    "urllib3/util", "requests", "charset_normalizer", ".",
)


def compile_late():
    # Write byte code that is missing in a second process, beside the one that works. Measured with two processors: an
    # agent's first run takes 0.2 s less.
    if os.fork():
        return
    os.closerange(0, 64)  # the caller waits for all who could write to it
    try:
        for place in [os.path.join(sys.path[0], name) for name in LATE]:
            for path in [os.path.join(place, file) for file in sorted(os.listdir(place)) if file.endswith(".py")]:
                if not os.path.exists(importer.cache_from_source(path)):
                    importer.SourceFileLoader(path, path).get_code(path)  # writes it, too
    finally:  # a full disk: the program compiles for itself
        os._exit(0)


sys.path[0] = unpacked()
from gpuprov.agent.agent import main  # noqa: E402

sys.exit(main(compile_late))
"""


@dataclass(frozen=True)
class LockedWheel:
    """A line of the lock file."""

    name: str
    version: str
    sha256: str
    in_agent: bool


def agent(cache: Path) -> bytes:
    """Return the agent's zipapp, which is kept in `cache`. Raises GpuprovError if a locked wheel is missing."""
    wanted, own = [one for one in locked() if one.in_agent], dict(_own_files())
    # What decides the content; the wheels themselves are only read for a new one.
    decisive = {"builder": Path(__file__).read_bytes(), **{one.name: one.sha256.encode() for one in wanted}}
    main, digest = main_program("agent", AGENT_START, {**own, **decisive})
    kept = cache / f"build-{digest}.pyz"
    with contextlib.suppress(OSError):
        content = kept.read_bytes()
        if zipfile.is_zipfile(io.BytesIO(content)):
            return content
    others = (file for wheel in wheels(wanted).values() for file in files_of(wheel))
    content = pack({"__main__.py": main, **own, **dict(others)})
    keep(kept, content)
    return content


def main_program(name: str, start: str, files: dict[str, bytes]) -> tuple[bytes, str]:
    """Return the `__main__.py` of a zipapp with these files, and the digest in its text.

    It unpacks the zip into a folder NAME-DIGEST, the same for the same files. Then it runs `start`, code that calls
    `unpacked()`.
    """
    text = (Path(__file__).with_name("starter.py.template").read_text() + start).replace("{name}", name)
    made = hashlib.sha256(text.encode())
    for path, content in sorted(files.items()):
        made.update(f"{path}\0{len(content)}\0".encode() + content)
    digest = made.hexdigest()
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


def locked() -> tuple[LockedWheel, ...]:
    """Return the lines of the lock file."""
    found = _LOCKED.findall(LOCK.read_text())
    return tuple(LockedWheel(name, version, digest, bool(agent)) for name, version, digest, agent in found)


def wheels(wanted: Iterable[LockedWheel]) -> dict[str, bytes]:
    """Return name → content of the wheels, whose digests are checked. Raises GpuprovError if one is missing."""
    found = {}
    for one in wanted:
        paths = WHEELS.glob(f"{one.name.replace('-', '_')}-{one.version}-*.whl")
        contents = (path.read_bytes() for path in sorted(paths))
        content = next((content for content in contents if hashlib.sha256(content).hexdigest() == one.sha256), None)
        if content is None:
            raise GpuprovError(
                f"the agent can't be built: the wheel of {one.name} {one.version} is missing",
                f"{WHEELS} has none with SHA-256 {one.sha256}",
                f"`make setup` in {_CLONE}",
            )
        found[one.name] = content
    return found


def files_of(wheel: bytes) -> Iterator[tuple[str, bytes]]:
    """Give name and content of a wheel's files that a zipapp contains: modules and data, METADATA, licences."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            taken = travels(path) and path.suffix not in (".c", ".pyx", ".h") and not path.parts[0].endswith(".data")
            taken = taken and name != "example.py"  # of NVIDIA's bindings, beside their module
            if path.parts[0].endswith(".dist-info"):
                taken = path.name == "METADATA" or bool(_LICENCE.match(path.name))
            if taken and not name.endswith("/"):
                yield name, archive.read(name)


def _own_files() -> Iterator[tuple[str, bytes]]:
    package = Path(gpuprov.__file__).parent
    for path in package.rglob("*"):
        place = path.relative_to(package)
        if path.is_file() and place.parts[0] in (*HOST_FOLDERS, *HOST_FILES) and travels(path):
            yield f"gpuprov/{place.as_posix()}", path.read_bytes()
    yield "LICENSE", (_CLONE / "LICENSE").read_bytes()


def travels(path: PurePath) -> bool:
    """Say whether a file belongs in a zipapp: sources and data, nothing compiled for this machine."""
    return path.suffix not in (".pyc", ".so", ".pyi") and "__pycache__" not in path.parts and path.name != "py.typed"
