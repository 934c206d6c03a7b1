"""Builds gpuprov-host.pyz: gpuprov's commands for one machine and what they import, for Python 3.9 and later.

python -m tools.host_program build/gpuprov-host.pyz
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import gpuprov
from tools.zipapps import files_of, locked, main_program, pack, travels, wheels

_CLONE = Path(__file__).resolve().parents[1]
NAME = "gpuprov-host.pyz"
_SHEBANG = b"#!/usr/bin/env python3\n"
# `uninstall` removes the folder that is unpacked: it runs from the zip.
_START = """\
sys.path[0] = os.path.dirname(os.path.abspath(__file__)) if "uninstall" in sys.argv[1:] else unpacked()
from gpuprov.fleet import options  # noqa: E402

options.one_file = True
from gpuprov.__main__ import main  # noqa: E402

main()
"""


def build(shebang: bytes = _SHEBANG, before: bytes = b"") -> bytes:
    """Return the program: the same bytes from the same sources. Raises GpuprovError if a locked wheel is missing.

    `before`: code that is to run first, for any Python.
    """
    files = dict(_files())
    main, _ = main_program("host", _START, files)
    return shebang + pack({"__main__.py": before + main, **files})


def _files() -> Iterator[tuple[str, bytes]]:
    package = Path(gpuprov.__file__).parent
    for path in package.rglob("*"):
        if path.is_file() and travels(path):
            yield f"gpuprov/{path.relative_to(package).as_posix()}", path.read_bytes()
    yield "LICENSE", (_CLONE / "LICENSE").read_bytes()
    for wheel in wheels(locked()).values():
        yield from files_of(wheel)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    content = build()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    target.chmod(0o755)
    print(f"{target}: {len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")
