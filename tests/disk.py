"""Disks whose power can be cut: a file system in a file, and copies of what it has handed down so far.

A copy of the file below a loop device holds nothing of what is still in memory: that is what a cut leaves.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

# Where disks lie: the waiting for them takes nothing of the machine's own.
MEMORY = "/dev/shm"
# The least that each does by default: no commit every few seconds, no guess at what a program forgot to sync.
FILE_SYSTEMS = {"ext4": "commit=3600,noauto_da_alloc", "xfs": "nouuid", "btrfs": "commit=3600"}


@dataclass(frozen=True)
class Disk:
    """A file system in a file that serves as a device."""

    kind: str
    image: Path

    def make(self, size: int = 400 << 20) -> None:
        """Make an empty file system of this many bytes."""
        with self.image.open("wb") as file:
            file.truncate(size)
        subprocess.run((f"mkfs.{self.kind}", "-q", str(self.image)), check=True, capture_output=True)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """Give the folder in which it is mounted for the time of the block."""
        place = self.image.with_suffix(".mounted")
        place.mkdir(exist_ok=True)
        options = f"loop,{FILE_SYSTEMS[self.kind]}"
        subprocess.run(("mount", "-o", options, str(self.image), str(place)), check=True, capture_output=True)
        try:
            yield place
        finally:
            subprocess.run(("umount", str(place)), check=True)

    def cut(self, name: str) -> Disk:
        """Return a copy of what the device holds now."""
        copied = replace(self, image=self.image.with_name(name))
        subprocess.run(("cp", "--sparse=always", str(self.image), str(copied.image)), check=True)
        return copied
