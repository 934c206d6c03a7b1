"""modprobe's files, also in every initramfs: nouveau, nova_core and nova_drm kept off the GPUs, and nvidia's options.

From Linux 7.0 on nova_core binds Turing and later, as nouveau does; distributions build both as modules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprov.core.changes import Change, Json, Tell, capture_path, parent_of, restore_path, text_diff
from gpuprov.core.system import System
from gpuprov.driver.source import DriverSource
from gpuprov.facts import kernels
from gpuprov.facts.kernels import BLACKLIST, DRACUT_CONFIGURATION, MODULE_OPTIONS, Image
from gpuprov.machine.pci import PciGpu
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.models import model_of, name_of

# In the order of unloading: nova_drm depends on nova_core.
MODULES = ("nova_drm", "nova_core", "nouveau")
_BLACKLIST_TEXT = """\
# By gpuprov: these drivers would take the GPUs before NVIDIA's can.
blacklist nouveau
options nouveau modeset=0
blacklist nova_core
blacklist nova_drm
"""
# A site's add_drivers overrides omit_drivers, and an image for any machine (hostonly=no) does not include modprobe.d.
_DRACUT_TEXT = f"""\
# By gpuprov: these drivers would take the GPUs before NVIDIA's can.
omit_drivers+=" nouveau nova_core nova_drm "
install_items+=" {BLACKLIST} "
"""
_COHERENT_MEMORY = "CoherentGPUMemoryMode"
# The first branch with it: awslabs/amazon-eks-ami, nvidia-kmod-load.sh.
_COHERENT_MEMORY_SINCE = 580
# Debian's packages name the module nvidia-current, and only its own options reach it there.
_OPTIONS_TEXT = """\
# By gpuprov: gpuprov_coherent_memory.
options nvidia NVreg_{name}={mode}
options nvidia-current NVreg_{name}={mode}
"""


def plan(driver: DriverSource) -> tuple[Change, ...]:
    """Return the change that writes modprobe's files and rebuilds each initramfs that lacks them, if any."""
    # NVIDIA's packages blacklist nouveau themselves, but not nova.
    facts, mode = driver.facts, driver.spec.coherent_memory
    files: dict[str, bytes | None] = {}
    if driver.installs_modules:
        files[BLACKLIST] = _BLACKLIST_TEXT.encode()
        if facts.initramfs.dracut:
            option = f'install_items+=" {MODULE_OPTIONS} "\n' if mode else ""
            files[DRACUT_CONFIGURATION] = f"{_DRACUT_TEXT}{option}".encode()
    if mode or MODULE_OPTIONS in facts.files:
        files[MODULE_OPTIONS] = _OPTIONS_TEXT.format(name=_COHERENT_MEMORY, mode=mode).encode() if mode else None
    if not files:
        return ()
    there = {path: found.content for path in files if (found := facts.files.get(path)) is not None}
    wrong = tuple((path, text) for path, text in files.items() if there.get(path) != text)
    images = facts.initramfs.images
    stale = images if wrong else tuple(one for one in images if one.modified < facts.initramfs.configured)
    return (KeepNouveauOut(wrong, stale),) if wrong or stale else ()


@dataclass(frozen=True)
class KeepNouveauOut(Change):
    """Write modprobe's files (path, content; None removes one) and include them in these initramfs images."""

    files: tuple[tuple[str, bytes | None], ...]
    images: tuple[Image, ...]

    key = "keep nouveau off the GPUs"

    def summary(self) -> str:
        kernels = ", ".join(image.kernel for image in self.images)
        rebuilt = f"; rebuild the initramfs of {kernels}" if kernels else ""
        paths = {path for path, _ in self.files}
        if paths == {MODULE_OPTIONS}:
            return f"set the options of the module nvidia ({MODULE_OPTIONS}){rebuilt}"
        options = f"; set the options of the module nvidia ({MODULE_OPTIONS})" if MODULE_OPTIONS in paths else ""
        return f"keep nouveau, nova_core and nova_drm off the GPUs ({BLACKLIST}){options}{rebuilt}"

    def diff(self, system: System) -> str:
        return "\n".join(text_diff(path, system.read_bytes(path), content) for path, content in self.files)

    def capture(self, system: System) -> Json:
        return {
            "files": [capture_path(system, path) for path, _ in self.files],
            "images": [[image.kernel, image.path] for image in self.images],
        }

    def apply(self, system: System, tell: Tell) -> None:
        for path, content in self.files:
            if content is None:
                system.remove(path)
                continue
            system.make_directory(parent_of(path))
            system.write(path, content)
        for number, image in enumerate(self.images):
            tell(f"rebuilding {image.path}", number, len(self.images))
            kernels.rebuild(system, image)
            _prove(system, image)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        for image in before["files"]:
            restore_path(system, image)
        for kernel, path in before["images"]:
            try:
                kernels.rebuild(system, Image(kernel, path))
            except GpuprovError:
                # A change that failed here failed for the same reason, which was reported already.
                if outcome is not None:
                    raise


def _prove(system: System, image: Image) -> None:
    """Inspect the image: it must contain the blacklist, or none of the drivers."""
    listing = kernels.list_content(system, image)
    drivers = kernels.modules_in(listing, MODULES)
    if drivers and not kernels.holds_file(listing, BLACKLIST):
        raise GpuprovError(
            f"{image.path} would still load {', '.join(drivers)} at boot",
            f"it was rebuilt, holds {drivers[0]}.ko and not {BLACKLIST}",
            "is /etc/modprobe.d left out by the configuration of initramfs-tools or dracut? fix that, then run "
            "the same command again",
        )


def other_mode(options: bytes | None, asked: str) -> tuple[str, ...]:
    """Return a sentence if the options of the loaded module nvidia name another mode than the one asked for.

    `options`: LOADED_OPTIONS; the mode is empty there where the driver chose, and missing where it has none.
    """
    found = re.search(rf'^{_COHERENT_MEMORY}: "(\w*)"', (options or b"").decode("utf-8", "replace"), re.MULTILINE)
    if not asked or found is None or found[1] == asked:
        return ()
    return (f"the driver is loaded with {_COHERENT_MEMORY} {found[1] or 'unset'}, and {asked} is asked for",)


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return why this host's driver or GPUs have no mode for coherent memory, if one is asked for."""
    facts, mode = driver.facts, driver.spec.coherent_memory
    version = driver.coming_version or facts.driver_installed_version or driver.spec.driver_version
    ids = [one for one in facts.gpu_device_ids if not ((model := model_of(one)) and model.coherent_memory)]
    seen, found = f"gpuprov_coherent_memory: {mode}", []
    if mode and facts.kernel.container:
        step = "set gpuprov_coherent_memory for the container host, and leave it out here"
        found.append(Problem("options of kernel modules are the container host's", seen, step))
    if mode and ids and facts.image is None:
        what = f"this host's GPU has no coherent memory: {name_of(ids[0]) or ids[0]}"
        found.append(Problem(what, seen, "leave gpuprov_coherent_memory out"))
    if mode and version and int(version.partition(".")[0]) < _COHERENT_MEMORY_SINCE:
        what = f"driver {version} has no modes for coherent memory"
        step = f'set gpuprov_driver_version: "{_COHERENT_MEMORY_SINCE}" or a later one, or leave it out'
        found.append(Problem(what, f"{seen}; they came with {_COHERENT_MEMORY_SINCE}", step))
    return tuple(found)


def bound(gpus: Sequence[PciGpu]) -> tuple[str, ...]:
    """Return `GPU 0000:17:00.0 is bound to nouveau` for each GPU bound to one of these drivers."""
    # The PCI driver of the module nova_core calls itself NovaCore.
    drivers = {name.replace("_", "") for name in MODULES}
    taken = (gpu for gpu in gpus if gpu.driver.lower().replace("_", "") in drivers)
    return tuple(f"GPU {gpu.bus_id} is bound to {gpu.driver}" for gpu in taken)
