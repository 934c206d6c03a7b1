"""A tiny image made of the host's own C library and shell, so that verification needs no registry.

It holds /bin/sh and what nvidia-smi is linked against; its tag is the digest of its content, so it is made once.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile

from gpuprov.core.system import System
from gpuprov.wire.errors import GpuprovError

REPOSITORY = "gpuprov-verify"
_PROGRAMS = ("sh", "ls", "cat")
# What the driver's own libraries are linked against; the loader comes with nvidia-smi and the shell.
LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")


def verification_image(system: System) -> str:
    """Return the tag of the image, building it if docker lacks it; images of an older C library are removed."""
    files = _files(system)
    digest = hashlib.sha256(repr([(name, hashlib.sha256(files[name]).digest()) for name in sorted(files)]).encode())
    tag = f"{REPOSITORY}:{digest.hexdigest()[:16]}"
    listed = system.run(("docker", "images", "--format", "{{.Repository}}:{{.Tag}}", REPOSITORY)).stdout.split()
    if tag in listed:
        return tag
    done = system.run(("docker", "import", "-", tag), stdin=_archive(files), timeout=120)
    if not done.ok:
        raise GpuprovError("the verification image can't be built", done.evidence(4), "give one with --image")
    for old in listed:
        system.run(("docker", "rmi", old))
    return tag


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


def _archive(files: dict[str, bytes]) -> bytes:
    """Return the files as a tar archive; same files, same bytes."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        folders = sorted({parent for name in files for parent in _parents(name)} | {"tmp", "etc", "usr/bin", "usr/lib"})
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
