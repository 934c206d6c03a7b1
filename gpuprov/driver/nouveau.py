"""modprobe's files, also in every initramfs: nouveau, nova_core and nova_drm kept off the GPUs, and nvidia's options.

From Linux 7.0 on nova_core binds Turing and later, as nouveau does; distributions build both as modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuprov.core.changes import Change, Json, Tell, capture_path, parent_of, restore_paths, text_diff
from gpuprov.core.system import System
from gpuprov.driver.source import DriverSource
from gpuprov.facts import kernels
from gpuprov.facts.kernels import BLACKLIST, DRACUT_CONFIGURATION, MODULE_OPTIONS, Image
from gpuprov.machine.pci import PciGpu
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError

# In the order of unloading: nova_drm depends on nova_core.
MODULES = ("nova_drm", "nova_core", "nouveau")
# A file that is newer than now by more was written before the clock was set back.
_CLOCK_SECONDS = 60
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
# Debian's packages name the module nvidia-current, and only its own options reach it there.
_OPTIONS_TEXT = """\
# By gpuprov: gpuprov_coherent_memory.
options nvidia NVreg_CoherentGPUMemoryMode={mode}
options nvidia-current NVreg_CoherentGPUMemoryMode={mode}
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
        files[MODULE_OPTIONS] = _OPTIONS_TEXT.format(mode=mode).encode() if mode else None
    if not files:
        return ()
    there = {path: found.content for path in files if (found := facts.files.get(path)) is not None}
    # No image is newer then, so the files are written again.
    ahead = facts.initramfs.configured > facts.clock + _CLOCK_SECONDS
    wrong = tuple((path, text) for path, text in files.items() if ahead or there.get(path) != text)
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
            # A driver that was there before gpuprov has a blacklist of its own; then only options are set.
            if not system.exists(BLACKLIST):
                continue
            listing = kernels.list_content(system, image)
            drivers = kernels.modules_in(listing, MODULES)
            if drivers and not kernels.holds_file(listing, BLACKLIST):
                raise GpuprovError(
                    f"{image.path} would still load {', '.join(drivers)} at boot",
                    f"it was rebuilt, holds {drivers[0]}.ko and not {BLACKLIST}",
                    "is /etc/modprobe.d left out by the configuration of initramfs-tools or dracut? fix that, then run "
                    "the same command again",
                )

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        restore_paths(system, before["files"])
        former = {path: Image(kernel, path) for kernel, path in before["images"]}
        # Kernels come and go: an image that came since has the files, too.
        there = [one for one in kernels.gather_images(system) if before["files"] or one.path in former]
        for image in former.values() if outcome is None else there:
            try:
                kernels.rebuild(system, image)
            except GpuprovError:
                # A change that failed here failed for the same reason, which was reported already.
                if outcome is not None:
                    raise


def bound(gpus: Sequence[PciGpu]) -> tuple[str, ...]:
    """Return `GPU 0000:17:00.0 is bound to nouveau` for each GPU bound to one of these drivers."""
    # The PCI driver of the module nova_core calls itself NovaCore.
    drivers = {name.replace("_", "") for name in MODULES}
    taken = (gpu for gpu in gpus if gpu.driver.lower().replace("_", "") in drivers)
    return tuple(f"GPU {gpu.bus_id} is bound to {gpu.driver}" for gpu in taken)
