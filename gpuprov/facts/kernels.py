"""Kernels that a host has, their initramfs, and the image that a disk becomes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuprov.cdi.generate import OTHER_PATHS, PATH
from gpuprov.core.places import REMEMBERED
from gpuprov.core.system import System
from gpuprov.machine.machine import Kernel
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError

# The module's name as NVIDIA's installer and DKMS give it, and as Debian's packages do, one for each of its branches.
_MODULE = re.compile(r"(?:^|/)(nvidia(?:-current(?:-open)?|-tesla(?:-\d+)?)?)\.ko(?:\.\w+)?:", re.MULTILINE)
_FILES = ("vmlinuz", "Image")  # of a kernel; the second is SUSE's on arm64
# Version, the distribution's number, flavour: 6.1.0-13-amd64, 6.12.48+deb13-cloud-amd64, 6.5.0-1014-aws; Red Hat's,
# behind the architecture: 5.14.0-427.el9.aarch64+64k; Oracle's own kernel, beside Red Hat's: 5.15.0-206.el9uek.x86_64.
_FLAVOUR = re.compile(r".*\.(?:x86_64|aarch64)\+([a-z0-9-]+)|\d[^-]*(?:-\d[^-]*)?-([a-z].*)|.*(uek)\.\w+")


@dataclass(frozen=True)
class InstalledKernel:
    """An installed kernel. `headers`: what building modules for it needs is installed; `module`: nvidia.ko exists."""

    release: str
    headers: bool
    module: bool


def gather_kernels(system: System) -> tuple[InstalledKernel, ...]:
    """Return the installed kernels, oldest first; a module folder without its kernel is ignored."""
    found = []
    for release in system.list_directory("/lib/modules"):
        folder = f"/lib/modules/{release}"
        if any(system.exists(f"/boot/{name}-{release}") or system.exists(f"{folder}/{name}") for name in _FILES):
            headers = system.exists(f"{folder}/build/Makefile")
            found.append(InstalledKernel(release, headers, bool(module_of(system, release))))
    return tuple(sorted(found, key=lambda kernel: _order(kernel.release)))


def module_of(system: System, release: str) -> str:
    """Return the name of a kernel's module of NVIDIA: nvidia, nvidia-current; nothing if its modules.dep lists none."""
    found = _MODULE.search(system.read_text(f"/lib/modules/{release}/modules.dep") or "")
    return found[1] if found else ""


def newest(kernels: Iterable[InstalledKernel], running: str) -> InstalledKernel | None:
    """Return the newest kernel of the running one's flavour: others (-rt, -cloud) lie there for other reasons."""
    same = [kernel for kernel in kernels if flavour(kernel.release) == flavour(running)]
    return max(same, key=lambda kernel: _order(kernel.release), default=None)


def flavour(release: str) -> str:
    """Return `amd64` of 6.1.0-13-amd64; nothing where releases name none (RHEL's 5.14.0-427.el9.x86_64)."""
    found = _FLAVOUR.fullmatch(release)
    return next(filter(None, found.groups())) if found else ""


def _order(release: str) -> tuple[tuple[int, str], ...]:
    parts = re.findall(r"\d+|[a-z]+", release)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def next_kernel_fault(
    kernel: InstalledKernel, *, headers: tuple[str, ...], missing: tuple[str, ...], dkms: bool, compiled: str = ""
) -> str:
    """Return why the next booted kernel, or a later one, will lack the driver; "" if it will not.

    `headers`: packages with this kernel's headers; `missing`: those that bring headers with later kernels; `dkms`: DKMS
    builds the module; `compiled`: the package that would bring it, where modules are precompiled.
    """
    lack, build = f"kernel {kernel.release} has no NVIDIA module", f"dkms autoinstall -k {kernel.release}"
    if compiled:
        return "" if kernel.module else f"{lack}: install {compiled}, or boot an older one until there is one"
    if not kernel.module and not kernel.headers:
        install = f"install {' '.join(headers) or 'its headers'}"
        return f"{lack}, and no headers to build one: {install}; {build}"
    if not kernel.module and dkms:
        return f"{lack}: {build}; dkms status"
    if not kernel.module:
        return f"{lack}, and DKMS does not build it: boot it, then gpuprov install, or the .run again with dkms"
    if dkms and missing:
        return f"the kernel after {kernel.release} will come without headers: install {' '.join(missing)}"
    return ""


# The path that driver/nouveau.py writes; defined here because facts read its age.
BLACKLIST = "/etc/modprobe.d/gpuprov-nouveau.conf"
# dracut adds drivers of the machine's devices despite modprobe.d, so it needs its own configuration.
DRACUT_CONFIGURATION = "/etc/dracut.conf.d/gpuprov-nouveau.conf"
# Options of the module nvidia, and those that the loaded one has.
MODULE_OPTIONS = "/etc/modprobe.d/gpuprov-nvidia.conf"
LOADED_OPTIONS = "/proc/driver/nvidia/params"
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
    files = (system.status(path) for path in (BLACKLIST, DRACUT_CONFIGURATION, MODULE_OPTIONS))
    configured = max((file.modified for file in files if file is not None), default=0.0)
    return InitramfsFacts(gather_images(system), configured, system.which("dracut") is not None)


def gather_images(system: System) -> tuple[Image, ...]:
    """Return the images of installed kernels, by name; rescue and crash-dump images have no modules of their own."""
    kernels = set(system.list_directory("/lib/modules"))
    found = ((name, system.status(f"{_BOOT}/{name}")) for name in system.list_directory(_BOOT))
    return tuple(Image(kernel, f"{_BOOT}/{name}", status.modified)
                 for name, status in found if status and (kernel := kernel_of(name)) in kernels)  # fmt: skip


def kernel_of(name: str) -> str:
    """Return the kernel that an image's file name names, nothing for another file."""
    ends = ((before, after) for before, after, _ in _FAMILIES if name.startswith(before) and name.endswith(after))
    return next((name[len(before) : len(name) - len(after)] for before, after in ends), "")


def rebuild_command(system: System, image: Image) -> tuple[str, ...]:
    """Return the distribution's own command that rebuilds an image. Raises GpuprovError if the host has none."""
    name = image.path.rpartition("/")[2]
    commands = next(commands for before, after, commands in _FAMILIES if name.startswith(before + image.kernel))
    found = next((words for words in commands if system.which(words[0])), None)
    if found is None:
        what = f"{image.path} can't be rebuilt: its program is not installed"
        seen = f"there is none of {', '.join(words[0] for words in commands)}"
        raise GpuprovError(what, seen, "install the one that made it, then run the same command again")
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


MACHINE_ID = "/etc/machine-id"
_DBUS_ID = "/var/lib/dbus/machine-id"
_SSH = "/etc/ssh"
# systemd's documentation "Safely Building Images" names these besides the machine id; the last is NetworkManager's.
_SECRETS = (
    "/var/lib/systemd/random-seed", "/boot/loader/random-seed", "/boot/efi/loader/random-seed",
    "/efi/loader/random-seed", "/var/lib/systemd/credential.secret", "/var/lib/NetworkManager/secret_key",
)  # fmt: skip
# What DKMS signs modules with (dkms(8); Ubuntu has shim-signed's): its owner signs modules that copies load.
_SIGNING_KEYS = ("/var/lib/dkms/mok.key", "/var/lib/shim-signed/mok/MOK.priv")
_UNINITIALIZED = b"uninitialized"


@dataclass(frozen=True)
class ImageFacts:
    """`kernels`: those that the image's copies can boot, oldest first. `offline`: systemd does not run here.

    `device_ids`: PCI device ids that stand for the GPUs to come. `identity`: files that must not be in two machines.
    `signing_keys`: the private keys of kernel modules.
    """

    kernels: tuple[InstalledKernel, ...] = ()
    device_ids: tuple[str, ...] = ()
    offline: bool = False
    identity: tuple[str, ...] = ()
    signing_keys: tuple[str, ...] = ()


def newest_kernel(system: System) -> str:
    """Return the release of the newest kernel that is installed, nothing if there is none."""
    return next((kernel.release for kernel in reversed(gather_kernels(system))), "")


def gather_identity(system: System) -> tuple[str, ...]:
    """Return the files that identify this machine or its GPUs: copies must not have them."""
    found = [path for path in (*_SECRETS, PATH, REMEMBERED, *OTHER_PATHS) if system.status(path) is not None]
    machine_id = (system.read_bytes(MACHINE_ID) or b"").strip()
    if machine_id not in (b"", _UNINITIALIZED):
        found.append(MACHINE_ID)
    dbus = system.status(_DBUS_ID)
    if dbus is not None and dbus.kind == "file":
        found.append(_DBUS_ID)
    keys = [name for name in system.list_directory(_SSH) if name.startswith("ssh_host_") and "_key" in name]
    return tuple(sorted((*found, *(f"{_SSH}/{name}" for name in keys))))


def gather_signing_keys(system: System) -> tuple[str, ...]:
    """Return the private keys with which DKMS signs kernel modules."""
    return tuple(path for path in _SIGNING_KEYS if system.status(path) is not None)


def kernel_to_come(release: str) -> Kernel:
    """Return the kernel of the image's copies: what is known while the image is built, without its devices."""
    return Kernel(
        release=release, command_line="", takes_modules=True, modules_disabled=False, loaded_modules=(),
        # Distributions with AppArmor enable it; Secure Boot depends on the firmware of the later machine.
        secure_boot="no-efi", container="", wsl=False, apparmor=True,
    )  # fmt: skip
