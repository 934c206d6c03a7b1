"""The last step of an image: remove the identity of this machine from the disk, so that each copy gets its own."""

from __future__ import annotations

from typing import ClassVar

from gpuprov.core.changes import Change, Json, Jsons, RemoveFile, Tell, WriteFile, parent_of
from gpuprov.core.system import BOOTED, System
from gpuprov.core.units import daemon_reload
from gpuprov.facts.boot import SSH_KEYGEN
from gpuprov.facts.host import HostFacts
from gpuprov.facts.kernels import MACHINE_ID, gather_identity, gather_signing_keys
from gpuprov.machine.pci import MARK
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.spec import IMAGE, HostSpec

_MARK_TEXT = b"""\
# Written by gpuprov: this system was installed as an image, on a machine without its GPUs.
# Where a copy of it meets none, gpuprov's units have nothing to do, and verify says what it can't know.
"""
_SSH = "/etc/ssh/"
_NO_SEED = "/run/systemd/system/systemd-random-seed.service.d/gpuprov-image.conf"


def plan_mark(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that writes the image mark; on a host, the change that removes it."""
    there = facts.files.get(MARK)
    if spec.target != IMAGE or facts.image is None:
        return (RemoveFile(MARK, "this is a host now, and no longer an image"),) if there is not None else ()
    return () if there is not None and there.content == _MARK_TEXT else (WriteFile(MARK, _MARK_TEXT),)


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the removal of an image's identity; empty for a host."""
    if facts.image is None:
        return ()
    found = (*facts.image.identity, *(facts.image.signing_keys if spec.image_remove_signing_key else ()))
    return (CleanImage(found, signing_keys=spec.image_remove_signing_key),) if found else ()


def warning(facts: HostFacts, spec: HostSpec) -> str:
    """Return a warning for an image that keeps a private key which all copies trust, "" for any other."""
    if facts.image is None or not facts.image.signing_keys or spec.image_remove_signing_key:
        return ""
    what = f"the image keeps the private key of its kernel modules, {', '.join(facts.image.signing_keys)}"
    return f"{what}: gpuprov_image_remove_signing_key removes it"


@dataclass(frozen=True)
class CleanImage(Change):
    """Remove these files from the image and empty its machine-id; each copy then generates its own.

    Their content is secret, so none of it goes into the journal, which stays in the image.
    """

    paths: tuple[str, ...]
    signing_keys: bool = False

    undo_when_interrupted: ClassVar[bool] = False
    key = "clean the image"

    def summary(self) -> str:
        return f"clean the image: {', '.join(self._done(path) for path in self.paths)}"

    @staticmethod
    def _done(path: str) -> str:
        # An empty file, not "uninitialized": that would cause a first boot, at which systemd resets units to presets.
        return f"empty {path}" if path == MACHINE_ID else f"remove {path}"

    def diff(self, system: System) -> str:
        return "\n".join(f"-{path}" for path in self.paths)

    def capture(self, system: System) -> Json:
        return {"paths": list(self.paths)}

    def apply(self, system: System, tell: Tell) -> None:
        # Includes files that this run created: the first installation of sshd generates host keys.
        keys = gather_signing_keys(system)
        for path in sorted({*self.paths, *gather_identity(system), *(keys if self.signing_keys else ())}):
            if path == MACHINE_ID:
                system.write(path, b"")
            else:
                system.remove(path)
            tell(self._done(path), 0, 0)
        for path in () if self.signing_keys else keys:
            tell(f"keep {path}, the private key of kernel modules: gpuprov_image_remove_signing_key removes it", 0, 0)
        if system.exists(BOOTED):
            # Else the shutdown would save a new seed; what is in /run is not in the image.
            system.make_directory(parent_of(_NO_SEED))
            system.write(_NO_SEED, b"[Service]\nExecStop=\n")
            daemon_reload(system)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Generate new SSH host keys, without which no login works; the next boot generates the machine-id."""
        system.remove(_NO_SEED)
        if any(path.startswith(_SSH) for path in before["paths"]) and system.exists(SSH_KEYGEN):
            system.run((SSH_KEYGEN, "-A"), timeout=60)

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        return (
            "the identity that the image was cleaned of does not come back: new SSH host keys are made now, a new "
            "machine-id at the next boot",
        )
