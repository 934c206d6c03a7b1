"""The program for boots (program_main.py) as one file that needs nothing but Python: same input, same bytes."""

from __future__ import annotations

import importlib.util
import io
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

# What program_main.py imports, and what that imports; a test runs the file without anything else.
_MODULES = (
    "__init__", "boot/__init__", "boot/program_main", "core/__init__", "core/changes", "core/commands", "core/disk",
    "core/lock", "core/system", "driver/__init__", "driver/load", "wire/__init__", "wire/errors",
)  # fmt: skip
_PACKAGES = ("gpuprov.cdi", "gpuprov.runtime_hook", "elftools")
_START = b"from gpuprov.boot.program_main import main\n\nmain()\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment that a zip file can tell


@lru_cache(maxsize=1)
def boot_program() -> bytes:
    """Return the file; works from inside the agent's zipapp too."""
    made = io.BytesIO()
    # Not compressed: the bytes would depend on the zlib that compresses.
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(_files()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content)
    return made.getvalue()


def _files() -> Iterator[tuple[str, bytes]]:
    yield "__main__.py", _START
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
