"""A tiny image made of the host's own C library and shell, so that verification needs no registry.

It holds /bin/sh and what nvidia-smi is linked against; its tag is the digest of its content, so an engine gets it once.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass

from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError

REPOSITORY = "gpuprov-verify"
_PROGRAMS = ("sh", "ls", "cat")
# What the driver's own libraries are linked against; the loader comes with nvidia-smi and the shell.
LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
# Go's names (runtime.GOARCH), which images have.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class OwnImage:
    """The image's tag and its files, path in the image → content."""

    tag: str
    files: Mapping[str, bytes]

    def root(self) -> bytes:
        """Return the root file system as a tar archive (`docker import`); same files, same bytes."""
        folders = sorted(
            {parent for name in self.files for parent in _parents(name)} | {"tmp", "etc", "usr/bin", "usr/lib"}
        )
        return _tar(self.files, folders)

    def archive(self, reference: str, architecture: str) -> bytes:
        """Return the image with its name as `docker save` writes it, for engines that import no root file system."""
        root = self.root()
        config = {
            "architecture": _ARCHITECTURES.get(architecture, architecture),
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(root).hexdigest()}"]},
        }
        manifest = [{"Config": "config.json", "RepoTags": [reference], "Layers": ["layer.tar"]}]
        files = {
            "config.json": json.dumps(config).encode(),
            "layer.tar": root,
            "manifest.json": json.dumps(manifest).encode(),
        }
        return _tar(files, [])


def own_image(system: System) -> OwnImage:
    """Return the image as this host's files make it. Raises GpuprovError where that can't be done."""
    files = _files(system)
    digest = hashlib.sha256(repr([(name, hashlib.sha256(files[name]).digest()) for name in sorted(files)]).encode())
    return OwnImage(digest.hexdigest()[:16], files)


def _files(system: System) -> dict[str, bytes]:
    """Return path in the image → content: the programs, and all that their loader names."""
    files: dict[str, bytes] = {}
    programs = [path for name in _PROGRAMS if (path := system.which(name))]
    for path in programs:
        files[f"bin/{path.rpartition('/')[2]}"] = _content(system, path)
    smi = system.which("nvidia-smi")
    listed = system.run(("ldd", *programs, *((smi,) if smi else ()))).stdout
    # The driver's own come from the runtime.
    needed = {path for path in re.findall(r"=> (/\S+)", listed) if "nvidia" not in path}
    folder = next((path.rpartition("/")[0] for path in needed if path.endswith("/libc.so.6")), "")
    if not folder:
        raise GpuprovError("the host's C library was not found", f"ldd: {listed[:200]}", "give an image with --image")
    needed |= {f"{folder}/{name}" for name in LIBRARIES if system.exists(f"{folder}/{name}")}
    # The loader's path stands in the programs themselves: without an arrow in ldd's list.
    loaders = set(re.findall(r"^\s+(/\S*ld-\S+) \(", listed, re.MULTILINE))
    for path in needed | loaders:
        files[path.lstrip("/")] = _content(system, path)
    return files


def _content(system: System, path: str) -> bytes:
    content = system.read_bytes(system.real_path(path))
    if content is None:
        raise GpuprovError(f"{path} can't be read", "", "give an image with --image")
    return content


def _tar(files: Mapping[str, bytes], folders: list[str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for folder in folders:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o755
            archive.addfile(entry, io.BytesIO(files[name]))
    return made.getvalue()


def _parents(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
