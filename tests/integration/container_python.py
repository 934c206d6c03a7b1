"""The machine's own Python in a container's root, with what it and other programs are linked with."""

import re
import shutil
import subprocess
from pathlib import Path

from tests.deployed import PYTHON

_PARTS = "import os, _ctypes; print(os.path.dirname(os.__file__)); print(_ctypes.__file__)"
_LEFT_OUT = ("__pycache__", "test", "tests", "dist-packages", "site-packages", "idlelib", "lib2to3")


def add_python(root: Path, *programs: str) -> None:
    """Copy /usr/bin/python3, its standard library, and all libraries that it and `programs` are linked with."""
    said = subprocess.run((PYTHON, "-c", _PARTS), capture_output=True, text=True, check=True).stdout
    library, ctypes = said.split()
    shutil.copytree(library, f"{root}{library}", ignore=shutil.ignore_patterns(*_LEFT_OUT), dirs_exist_ok=True)
    linked = subprocess.run(("ldd", PYTHON, ctypes, *programs), capture_output=True, text=True, check=True).stdout
    for path in {PYTHON, *re.findall(r"(/\S+) \(0x", linked)}:
        place = Path(f"{root}{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
