"""Builds gpuprov-host.pyz: gpuprov's commands for one machine and what they import, for Python 3.9 and later.

python -m tools.host_program build/gpuprov-host.pyz
"""

from __future__ import annotations

import email.message
import email.parser
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import gpuprov
from gpuprov.fleet.agent_build import OLDEST_PYTHON, main_program, pack, travels

_CLONE = Path(__file__).resolve().parents[1]
NAME = "gpuprov-host.pyz"
LOCK = Path(__file__).with_name("host-program.txt")
_WHEELS = _CLONE / ".cache/wheels"
_LOCKED = re.compile(r"(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})")
_LICENCE = re.compile(r"(?i)(licen[cs]e|copying|notice|authors)")
_SHEBANG = b"#!/usr/bin/env python3\n"
# `uninstall` removes the folder that is unpacked: it runs from the zip.
_START = """\
sys.path[0] = os.path.dirname(os.path.abspath(__file__)) if "uninstall" in sys.argv[1:] else unpacked()
from gpuprov.fleet import one_file  # noqa: E402

one_file.active = True
from gpuprov.__main__ import main  # noqa: E402

main()
"""


def build() -> bytes:
    """Return the program: the same bytes from the same sources. Fetches wheels that are not in .cache yet."""
    files = dict(_files())
    main, _ = main_program("host", _START, files)
    return _SHEBANG + pack({"__main__.py": main, **files})


def locked() -> dict[str, tuple[str, str]]:
    """Return name → version and SHA-256 of each wheel in the lock file."""
    return {name: (version, digest) for name, version, digest in _LOCKED.findall(LOCK.read_text())}


def wheels() -> dict[str, Path]:
    """Return name → file of each wheel in the lock file, fetched by pip where it is not here. Checks the digests."""
    found = _present()
    if len(found) < len(locked()):
        subprocess.run(
            (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
             "--only-binary", ":all:", "--require-hashes", "--python-version", OLDEST_PYTHON, "--implementation", "cp",
             "--platform", "manylinux2014_x86_64", "--requirement", str(LOCK), "--dest", str(_WHEELS)),
            check=True,
        )  # fmt: skip
        found = _present()
    return found


def metadata_of(wheel: Path) -> email.message.Message:
    """Return a wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.BytesParser().parsebytes(archive.read(name), headersonly=True)


def _present() -> dict[str, Path]:
    digests = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in sorted(_WHEELS.glob("*.whl"))}
    return {name: digests[digest] for name, (_, digest) in locked().items() if digest in digests}


def _files() -> Iterator[tuple[str, bytes]]:
    package = Path(gpuprov.__file__).parent
    for path in package.rglob("*"):
        if path.is_file() and travels(path):
            yield f"gpuprov/{path.relative_to(package).as_posix()}", path.read_bytes()
    yield "LICENSE", (_CLONE / "LICENSE").read_bytes()
    for wheel in wheels().values():
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.endswith("/") and _is_taken(PurePosixPath(name)):
                    yield name, archive.read(name)


def _is_taken(path: PurePosixPath) -> bool:
    """Say whether a wheel's file is taken: modules and data, and of its metadata name, version and licence."""
    if path.parts[0].endswith(".dist-info"):
        return path.name == "METADATA" or bool(_LICENCE.match(path.name))
    return travels(path) and path.suffix not in (".c", ".pyx", ".h") and not path.parts[0].endswith(".data")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    content = build()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    target.chmod(0o755)
    print(f"{target}: {len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")
