"""The changes that remove what nvidia-docker 1 has left: volumes, its plugin's service, and its folder."""

from __future__ import annotations

import shlex
from typing import ClassVar

from gpuprov.core.changes import Change, Json, Jsons, Tell
from gpuprov.core.system import System
from gpuprov.core.units import daemon_reload, is_active, systemctl
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError

_SECONDS = 120


@dataclass(frozen=True)
class RemoveVolume(Change):
    """Remove a volume that no container uses. Its content can't be restored."""

    name: str

    # It may be partly removed, and can't be restored.
    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return f"remove volume {self.name} (no container refers to it; a rollback can't restore its content)"

    @property
    def key(self) -> str:
        return f"remove volume {self.name}"

    def capture(self, system: System) -> Json:
        return {"name": self.name}

    def apply(self, system: System, tell: Tell) -> None:
        # Without --force: docker itself refuses a volume that a container has taken since.
        done = system.run(("docker", "volume", "rm", "--", self.name), timeout=_SECONDS)
        if not done.ok and "no such volume" not in done.stderr.lower():
            step = f"docker ps --all --filter volume={self.name}; then run the same command again"
            raise GpuprovError(f"docker can't remove volume {self.name}", done.evidence(4), step)

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        return (f"volume {before['name']} and its content are not restored",)


@dataclass(frozen=True)
class StopPlugin(Change):
    """Stop and disable the service of nvidia-docker 1's plugin."""

    unit: str

    def summary(self) -> str:
        return f"stop and disable {self.unit}"

    def capture(self, system: System) -> Json:
        was = {verb: is_active(system, self.unit, f"is-{verb}") for verb in ("active", "enabled")}
        return {"unit": self.unit, **was}

    def apply(self, system: System, tell: Tell) -> None:
        words = ("systemctl", "disable", "--now", self.unit)
        system.require(words, f"{self.unit} can't be stopped", f"systemctl status {self.unit}", timeout=_SECONDS)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        daemon_reload(system)
        for verb, was in (("enable", before["enabled"]), ("start", before["active"])):
            if was:
                systemctl(system, verb, before["unit"])


class RemoveAccount(Change):
    """The removal of the plugin's system user, which only journals of earlier versions have."""

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        name, fields = before["name"], before["line"].split(":")
        if len(fields) != 7 or system.run(("id", name)).ok:
            return
        _, _, uid, gid, comment, home, shell = fields
        system.run(("groupadd", "--system", "--gid", gid, name), timeout=_SECONDS)
        words = ("useradd", "--system", "--no-create-home", "--uid", uid, "--gid", gid, "--comment", comment,
                 "--home-dir", home, "--shell", shell, name)  # fmt: skip
        system.require(words, f"user {name} can't be made again", f"getent passwd {uid}", timeout=_SECONDS)


@dataclass(frozen=True)
class RemoveFolder(Change):
    """Remove a folder of the plugin: it holds copies of the driver's files that the plugin made."""

    path: str

    # It may be partly removed, and can't be restored.
    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return f"remove {self.path} (a rollback can't restore its content: copies of driver files)"

    @property
    def key(self) -> str:
        return f"remove {self.path}"

    def capture(self, system: System) -> Json:
        found = system.status(self.path)
        # A link in its place is not the plugin's.
        if found is None or found.kind != "directory":
            return {"path": self.path, "mode": None}
        return {"path": self.path, "mode": found.mode, "uid": found.uid, "gid": found.gid}

    def apply(self, system: System, tell: Tell) -> None:
        if mounts := _mounts(system, self.path):
            seen = f"mounted: {', '.join(mounts)}"
            step = f"umount {' '.join(map(shlex.quote, reversed(mounts)))}; then run the same command again"
            raise GpuprovError(f"{self.path} is not removed: another file system is mounted in it", seen, step)
        # A link in its place stays.
        system.remove_tree(self.path)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if before["mode"] is not None and system.status(before["path"]) is None:
            system.make_directory(before["path"], before["mode"])
            system.run(("chown", f"{before['uid']}:{before['gid']}", str(before["path"])))

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        return (f"the content of {before['path']} is not restored",) if before["mode"] is not None else ()


def _mounts(system: System, path: str) -> list[str]:
    """Return what is mounted at a path or below it (proc(5)): its files are not the folder's, and may be elsewhere."""
    rows = (line.split(" ") for line in (system.read_text("/proc/self/mountinfo") or "").splitlines())
    # The kernel writes a space as \040.
    places = {row[4].replace("\\040", " ") for row in rows if len(row) > 4}
    return sorted(place for place in places if f"{place}/".startswith(f"{path}/"))
