"""The files of a host, a container or an image. Nothing in them is executed.

A host and a running container are read in place (/proc/PID/root). Of an image, what is examined is unpacked from an
engine's archive: links, and the start of libraries. All are hostile: runtime_hook.rootfs walks them, so that no link
leads out of the root, and only regular files are opened.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from gpuprov.runtime_hook.edits import choose
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.links import find_compatibility, inject
from gpuprov.runtime_hook.request import DeviceRequest
from gpuprov.runtime_hook.rootfs import Root
from gpuprov.runtime_hook.settings import Settings, read_settings
from gpuprov.runtime_hook.specification import Specifications

_MOST_LINKS = 40
_MOST_NAMES = 20_000
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
# What is unpacked of an archive at most, and how many folders are open meanwhile.
MOST_ENTRIES = 100_000
MOST_BYTES = 256 << 20
_MOST_OPEN = 200
_LARGEST_FILE = 8 << 20
ELF_HEADER = 64
_LIBRARY = re.compile(r"(libcuda|libnvidia-ml|libcudart)[^/]*\.so[^/]*")
_KEPT = re.compile(
    rf".*/({_LIBRARY.pattern}|ld-[^/]*\.so[^/]*|torch/version\.py|nvidia_cuda_runtime[^/]*\.dist-info/METADATA)"
    r"|/etc/ld\.so\.(cache|preload)"
)
# The driver's files go where the image has its libraries.
_FOLDERS = re.compile(r"/(usr/)?lib[^/]*(/[^/]+-linux-gnu)?")


def chain(root: Root, path: str) -> tuple[str, ...]:
    """Return the path and what its links lead to, all in folders without links; () if no file is at the end."""
    found: list[str] = []
    try:
        for _ in range(_MOST_LINKS):
            above, _, name = path.rpartition("/")
            folder = root.directory(above, make=False)
            mode = os.stat(name, dir_fd=root.handles[folder], follow_symlinks=False).st_mode
            found.append(f"{folder}/{name}")
            if not stat.S_ISLNK(mode):
                return tuple(found) if stat.S_ISREG(mode) else ()
            path = posixpath.join(f"{folder}/", os.readlink(name, dir_fd=root.handles[folder]))
    except (OSError, ValueError):  # ValueError: a path that no file can have
        pass
    return ()


def names(root: Root, folder: str) -> list[str]:
    """Return the sorted names in a folder, none if there is no folder."""
    return root.names(folder, _MOST_NAMES)


def read(root: Root, path: str, size: int) -> bytes | None:
    """Return the first bytes of the file that a path leads to, in a volume too; None if it can't be read.

    The driver's files are mounts themselves in a container, so that Root.read_file would not read them.
    """
    real = chain(root, path)
    if not real:
        return None
    folder, _, name = real[-1].rpartition("/")
    try:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root.open_directory(folder))
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                return None
            # A file of /proc has no size: reading it may wait for ever.
            if not status.st_size:
                return b""
            with os.fdopen(os.open(f"/proc/self/fd/{handle}", _READ), "rb") as file:
                return file.read(size)
        finally:
            os.close(handle)
    except OSError:
        return None


def unpacked(folder: str) -> Root:
    """Return the root file system in a folder of this process's own."""
    return Root(os.path.realpath(folder), (os.getuid(), os.getgid()))


def unpack(archive: tarfile.TarFile, folder: str) -> None:
    """Put what is examined of an archive into an empty folder. Raises tarfile.TarError, OSError and ValueError."""
    root = unpacked(folder)
    left = MOST_BYTES
    try:
        for number, (path, content) in enumerate(_examined(archive)):
            left -= len(content)
            if number == MOST_ENTRIES or left < 0:
                raise OSError(f"more than {number} links and libraries, or {MOST_BYTES} bytes of them")
            if len(root.handles) > _MOST_OPEN:
                root.close()
                root = unpacked(folder)
            if isinstance(content, str):
                root.make_link(path, content)
            elif path.endswith("/"):
                root.open_directory(path, make=True)
            else:
                root.write_file(path, content, 0o644)
    finally:
        root.close()


def _examined(archive: tarfile.TarFile) -> Iterator[tuple[str, str | bytes]]:
    """Yield links with their text, files with their content, and folders, whose paths end in a slash."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # else each of millions of files stays in memory
        path = _absolute(member.name)
        if member.issym():
            yield path, member.linkname
        elif member.islnk():
            # Conda's images have a second name of every file.
            if not _KEPT.fullmatch(path):
                continue
            # The archive has the content at the first name; a second name is as good as a link to it.
            yield path, _absolute(member.linkname)
        elif member.isdir() and _FOLDERS.fullmatch(path):
            yield f"{path}/", b""
        elif member.isreg() and _KEPT.fullmatch(path):
            source = archive.extractfile(member)
            most = ELF_HEADER if _LIBRARY.fullmatch(posixpath.basename(path)) else _LARGEST_FILE
            yield path, source.read(most) if source is not None else b""


def _absolute(name: str) -> str:
    return posixpath.normpath("/" + name.lstrip("/"))


def add_driver(root: Root, settings: Settings | None = None) -> str:
    """Add the driver's files as for a container with all GPUs; return what was added, as a sentence.

    Nothing is added, and the sentence begins with `without`, on a host without a CDI specification.
    """
    trouble = ""
    if settings is None:
        settings, trouble = read_settings()
    request = DeviceRequest(legacy=False, privileged=False)
    request.devices, request.capabilities = ["all"], frozenset(("compute", "utility"))
    try:
        if trouble:
            raise Refused(trouble)
        edits = choose(Specifications(settings), request, settings, root)
        for mount in edits.cdi.get("mounts") or ():
            if _LIBRARY.fullmatch(posixpath.basename(mount["containerPath"])):
                with Path(mount["hostPath"]).open("rb") as file:
                    root.write_file(mount["containerPath"], file.read(ELF_HEADER), 0o644)
        find_compatibility(root, edits, wanted=settings.cuda_compat)
        inject(root, edits)
    except (Refused, OSError) as error:
        return f"without the driver's files, which the container runtime adds at the start: {error}"
    return f"with the files of driver {edits.host_driver}, as the container runtime adds them at the start"
