"""Facts about an image: the kernels that its copies boot, and files that two machines must not share."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprov.cdi import other_devices
from gpuprov.cdi.generate import PATH
from gpuprov.core.system import System
from gpuprov.facts.kernels import InstalledKernel, gather_kernels
from gpuprov.machine.machine import Kernel

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

    @property
    def without_module(self) -> tuple[str, ...]:
        """The kernels that have no NVIDIA module yet."""
        return tuple(kernel.release for kernel in self.kernels if not kernel.module)


def gather_image(system: System, device_ids: tuple[str, ...], *, offline: bool) -> ImageFacts:
    """Return the facts; reads only."""
    return ImageFacts(gather_kernels(system), device_ids, offline, gather_identity(system), gather_signing_keys(system))


def newest_kernel(system: System) -> str:
    """Return the release of the newest kernel that is installed, nothing if there is none."""
    return next((kernel.release for kernel in reversed(gather_kernels(system))), "")


def gather_identity(system: System) -> tuple[str, ...]:
    """Return the files that identify this machine or its GPUs: copies must not have them."""
    found = [path for path in (*_SECRETS, PATH, *other_devices.PATHS) if system.status(path) is not None]
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
