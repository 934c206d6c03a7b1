"""The initramfs images of a host: their list, the distribution's command to rebuild one, and their content.

An initramfs carries its own copy of /etc/modprobe.d: a blacklist on the root file system alone comes too late.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError

# The path that driver/nouveau.py writes; defined here because facts read its age.
BLACKLIST = "/etc/modprobe.d/gpuprov-nouveau.conf"
# dracut adds drivers of the machine's devices despite modprobe.d, so it needs its own configuration.
DRACUT_CONFIGURATION = "/etc/dracut.conf.d/gpuprov-nouveau.conf"
_BOOT = "/boot"
# Compressing one image takes ten seconds on a fast machine and minutes on a slow one.
_REBUILD_SECONDS = 900
_LIST_SECONDS = 120
_DRACUT = ("dracut", "--force", "{path}", "{kernel}")
# Names of a family's images, and the command that rebuilds one: the first program that the host has.
# Debian and Ubuntu: update-initramfs(8), where dracut stands in for initramfs-tools it brings a command of that name;
# RHEL family, Fedora, Amazon Linux: dracut(8); SUSE: dracut(8), the name as its mkinitrd gave it.
_FAMILIES = (
    ("initrd.img-", "", (("update-initramfs", "-u", "-k", "{kernel}"), _DRACUT)),
    ("initramfs-", ".img", (_DRACUT,)),
    ("initrd-", "", (_DRACUT, ("mkinitrd", "-k", "vmlinuz-{kernel}", "-i", "initrd-{kernel}"))),
)
_LISTERS = ("lsinitramfs", "lsinitrd")


@dataclass(frozen=True)
class Image:
    """An initramfs and the kernel that it is for. `modified`: when it was built, seconds since 1970."""

    kernel: str
    path: str
    modified: float = 0.0


@dataclass(frozen=True)
class InitramfsFacts:
    """The images of a host; when our configuration for them was written (0: it is not there); whether dracut is here.

    An image newer than the configuration contains it: the distributions' tools copy it when they build one.
    """

    images: tuple[Image, ...] = ()
    configured: float = 0.0
    dracut: bool = False


def gather_initramfs(system: System) -> InitramfsFacts:
    """Return the facts; reads only, and runs nothing."""
    files = (system.status(path) for path in (BLACKLIST, DRACUT_CONFIGURATION))
    configured = max((file.modified for file in files if file is not None), default=0.0)
    return InitramfsFacts(gather_images(system), configured, system.which("dracut") is not None)


def gather_images(system: System) -> tuple[Image, ...]:
    """Return the images of installed kernels, by name; rescue and crash-dump images have no modules of their own."""
    kernels = set(system.list_directory("/lib/modules"))
    found = []
    for name in system.list_directory(_BOOT):
        kernel = kernel_of(name)
        status = system.status(f"{_BOOT}/{name}")
        if kernel in kernels and status is not None:
            found.append(Image(kernel, f"{_BOOT}/{name}", status.modified))
    return tuple(found)


def kernel_of(name: str) -> str:
    """Return the kernel that an image's file name names, nothing for another file."""
    for before, after, _ in _FAMILIES:
        if name.startswith(before) and name.endswith(after):
            return name[len(before) : len(name) - len(after)]
    return ""


def rebuild_command(system: System, image: Image) -> tuple[str, ...]:
    """Return the distribution's own command that rebuilds an image. Raises GpuprovError if the host has none."""
    name = image.path.rpartition("/")[2]
    commands = next(commands for before, after, commands in _FAMILIES if name.startswith(before + image.kernel))
    found = next((words for words in commands if system.which(words[0])), None)
    if found is None:
        programs = ", ".join(words[0] for words in commands)
        raise GpuprovError(
            f"{image.path} can't be rebuilt: its program is not installed",
            f"there is none of {programs}",
            "install the one that made it, then run the same command again",
        )
    return tuple(word.format(kernel=image.kernel, path=image.path) for word in found)


def rebuild(system: System, image: Image) -> None:
    """Rebuild an image. Raises GpuprovError with what the command said."""
    system.require(
        rebuild_command(system, image),
        f"{image.path} could not be rebuilt",
        f"is there room in /boot ({system.df('/boot')})? fix what the command names, then run the same command again",
        timeout=_REBUILD_SECONDS,
    )


def list_content(system: System, image: Image) -> str:
    """Return the names of all files in an image. Raises GpuprovError if no installed program can read it."""
    lister = next((name for name in _LISTERS if system.which(name)), None)
    if lister is None:
        raise GpuprovError(f"{image.path} can't be looked into", f"there is none of {', '.join(_LISTERS)}",
                           "install initramfs-tools or dracut, whichever makes the images here")  # fmt: skip
    return system.require((lister, image.path), f"{image.path} can't be read", timeout=_LIST_SECONDS).stdout


def modules_in(listing: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the named kernel modules that a listing shows: `lsinitramfs` paths or `lsinitrd` lines."""
    there = {name.replace("-", "_") for name in re.findall(r"/([\w-]+)\.ko(?:\.\w+)?\s*$", listing, re.MULTILINE)}
    return tuple(name for name in names if name in there)


def holds_file(listing: str, path: str) -> bool:
    """Say whether a listing shows the file of that absolute path."""
    return re.search(rf"(?:^|\s|/){re.escape(path.lstrip('/'))}\s*$", listing, re.MULTILINE) is not None
