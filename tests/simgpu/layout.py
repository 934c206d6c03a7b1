"""Which files a driver puts where: the list recorded from a real .run installation, as data.

`data/driver-files.tsv` says path, type (f file, l link), mode, soname, link target and when the installer wants it:
always, systemd (only where systemctl exists), modprobe (not with --no-nvidia-modprobe), libglvnd (only where the
distribution has none). The sizes and contents are our own.
"""

import csv
import functools
from dataclasses import dataclass
from pathlib import PurePosixPath

from tests.triplet import LIBRARIES

from .cache import DATA

DEBIAN_LIBRARY_DIRECTORY = LIBRARIES


@dataclass(frozen=True)
class DriverFile:
    """One row: `path` and `target` may hold @LIBDIR@, which the installer replaces on the host."""

    path: str
    is_link: bool
    mode: int
    soname: str
    target: str
    when: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def payload_name(self) -> str:
        """Where the file lies in the unpacked .run: flat, but systemd's files in a folder of their own."""
        return f"systemd/{self.name}" if self.when == "systemd" else self.name


@functools.cache
def driver_files(version: str) -> tuple[DriverFile, ...]:
    """All rows for that driver version, files before links, so that no link is ever made before its target."""
    with (DATA / "driver-files.tsv").open(newline="") as file:
        rows = [
            {key: value.replace("@VERSION@", version) for key, value in row.items()}
            for row in csv.DictReader(file, delimiter="\t")
        ]
    files = [
        DriverFile(row["path"], row["type"] == "l", int(row["mode"], 8), row["soname"], row["target"], row["when"])
        for row in rows
    ]
    return tuple(sorted(files, key=lambda one: (one.is_link, one.path)))
