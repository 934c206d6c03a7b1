"""Changes daemon.json, makes docker take it up, and goes back to the old file if docker does not come up."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprov.core.changes import Change, Json, Tell, capture_path, parent_of, restore_path, text_diff
from gpuprov.core.system import System
from gpuprov.engines.docker_config import DAEMON_JSON
from gpuprov.wire.errors import GpuprovError, from_os_error

_UNIT = "docker.service"
_COMES_UP_SECONDS = 60
_RELOAD_SECONDS = 15
_RESTART_SECONDS = 180
# Lines of docker's log that only say that it stopped, not why.
_NOISE = re.compile(r"^(Starting|Stopping|Stopped|Started|Failed to start|docker\.service: )|level=(info|warning)")


@dataclass(frozen=True)
class ReconfigureDocker(Change):
    """daemon.json shall have this content (None: it has it already) and the running docker shall know the runtime.

    `restart` is False where that would stop containers: docker takes up runtimes by a reload too, and containers go on.
    """

    content: str | None
    runtime_name: str
    runtime_path: str
    restart: bool
    containers: tuple[str, ...] = ()
    live_restore: bool = False
    validates: bool = False
    default_runtime: bool = False

    @property
    def key(self) -> str:
        return "configure docker"

    def summary(self) -> str:
        what = f"write {DAEMON_JSON} and " if self.content is not None else ""
        how = "restart" if self.restart else "reload"
        count = len(self.containers)
        if not count:
            return f"{what}{how} docker (no container is running)"
        fate = "they go on, by live-restore" if self.restart and self.live_restore else "they go on"
        return f"{what}{how} docker ({count} running: {', '.join(self.containers)}; {fate})"

    def diff(self, system: System) -> str:
        if self.content is None:
            return ""
        return text_diff(DAEMON_JSON, system.read_bytes(DAEMON_JSON), self.content.encode())

    def capture(self, system: System) -> Json:
        return {"file": capture_path(system, DAEMON_JSON), "was_active": _is_active(system)}

    def apply(self, system: System, tell: Tell) -> Json:
        before = self.capture(system)
        if self.content is not None:
            self._validate(system)
            self._write(system, before)
        tell(f"{'restarting' if self.restart else 'reloading'} docker", 0, 0)
        trouble = self._take_up(system)
        if trouble:
            raise self._gone_back(system, before, trouble)
        return {}

    def _validate(self, system: System) -> None:
        """Let dockerd itself look at the new text, where its version can (23.0 and later)."""
        if not self.validates or self.content is None:
            return
        folder = system.temporary_directory("/run")
        try:
            system.write(f"{folder}/daemon.json", self.content.encode(), mode=0o600)
            done = system.run(("dockerd", "--validate", "--config-file", f"{folder}/daemon.json"))
        finally:
            system.remove_tree(folder)
        if not done.ok:
            raise GpuprovError(
                f"dockerd refuses {DAEMON_JSON}; nothing was changed",
                done.evidence(4),
                f"correct what it names, then check: dockerd --validate --config-file {DAEMON_JSON}",
            )

    def _write(self, system: System, before: Json) -> None:
        mode = before["file"].get("mode", 0o644)
        try:
            system.make_directory(parent_of(DAEMON_JSON))
            system.write(DAEMON_JSON, (self.content or "").encode(), mode=mode)
        except OSError as error:
            next_step = f"lsattr {DAEMON_JSON} shows an immutable file (chattr -i)"
            raise from_os_error(f"{DAEMON_JSON} can't be written", error, next_step) from None

    def _take_up(self, system: System) -> str:
        """Make docker read the file; return what went wrong, or nothing."""
        if not _is_active(system):
            # A unit that failed too often is not started again without this.
            _systemctl(system, "reset-failed")
            return _systemctl(system, "restart") or self._wait(system, _COMES_UP_SECONDS)
        # A reload reads the file as a start does, but a docker that can't use it goes on as before: so it comes first.
        trouble = _systemctl(system, "reload") or self._wait(system, _RELOAD_SECONDS)
        if trouble or not self.restart:
            return trouble
        return _systemctl(system, "restart") or self._wait(system, _COMES_UP_SECONDS)

    def _wait(self, system: System, seconds: float) -> str:
        """Wait until docker has the runtime; return why it has not, or nothing."""
        deadline = system.now() + seconds
        while seen := self._loaded(system):
            if system.now() > deadline:
                return seen
            system.sleep(0.2)
        return ""

    def _loaded(self, system: System) -> str:
        """Return why docker has not taken the runtime up yet, or nothing."""
        field = f'{{{{with index .Runtimes "{self.runtime_name}"}}}}{{{{.Path}}}}{{{{end}}}} {{{{.DefaultRuntime}}}}'
        done = system.run(("docker", "info", "--format", field), timeout=20)
        if not done.ok:
            return done.stderr.strip() or "docker info fails"
        path, _, default = done.stdout.strip("\n").partition(" ")
        if path != self.runtime_path:
            return f"docker info shows for runtime {self.runtime_name}: {path or 'nothing'}"
        if self.default_runtime and default != self.runtime_name:
            return f"docker info shows default runtime {default}"
        return ""

    def _gone_back(self, system: System, before: Json, trouble: str) -> GpuprovError:
        """Bring the old file back, and docker with it; return the error that tells."""
        words = _last_words(system) or trouble
        if self.content is None:
            return GpuprovError(f"docker does not take up {DAEMON_JSON}", words, "journalctl -u docker -n 50")
        restore_path(system, before["file"])
        back = _make_active(system)
        if _is_active(system):
            return GpuprovError(
                f"docker did not come up with the new {DAEMON_JSON}; the old one is back and docker runs with it",
                words,
                "mend what docker names, then run the same command again",
            )
        return GpuprovError(
            f"docker did not come up with the new {DAEMON_JSON}, nor with the old one, which is back",
            f"{words}\nwith the old file: {_last_words(system) or back}",
            "journalctl -u docker -n 50; it was the old file that docker could not start with, before gpuprov came",
        )

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Bring the old file back and let docker take it up; an unchanged file disturbs nobody."""
        image = before["file"]
        if capture_path(system, DAEMON_JSON) == image:
            return
        restore_path(system, image)
        if not _is_active(system):
            return
        # docker forgets a runtime only at a restart; where that would stop containers, it may know it until the next.
        # Several runs undone one after the other would else end at the unit's limit of starts (StartLimitBurst).
        _systemctl(system, "reset-failed")
        trouble = _systemctl(system, "reload" if _restart_stops_containers(system) else "restart")
        if trouble:
            raise GpuprovError(
                f"docker does not come up with its old {DAEMON_JSON}, which is back", _last_words(system) or trouble,
                "journalctl -u docker -n 50; mend what docker names, then run the same command again",
            )  # fmt: skip
        if not before["was_active"]:
            _systemctl(system, "stop")


def _is_active(system: System) -> bool:
    return system.run(("systemctl", "is-active", "--quiet", _UNIT)).ok


def _make_active(system: System) -> str:
    """Let a docker that runs read its file again, and start one that does not; return what went wrong, or nothing."""
    if _is_active(system):
        return _systemctl(system, "reload")
    _systemctl(system, "reset-failed")
    return _systemctl(system, "restart")


def _restart_stops_containers(system: System) -> bool:
    asked = system.run(("docker", "info", "--format", "{{.ContainersRunning}} {{.LiveRestoreEnabled}}"), timeout=20)
    return asked.ok and asked.stdout.split()[:1] != ["0"] and "true" not in asked.stdout


def _systemctl(system: System, verb: str) -> str:
    """Do something with docker's unit; return what systemctl complains of, or nothing."""
    done = system.run(("systemctl", verb, _UNIT), timeout=_RESTART_SECONDS)
    return "" if done.ok else done.evidence(3)


def _last_words(system: System) -> str:
    """Return why docker says it did not start, from its journal."""
    done = system.run(("journalctl", "--unit", _UNIT, "--lines", "30", "--no-pager", "--output", "cat"))
    telling = [line for line in done.stdout.splitlines() if line.strip() and not _NOISE.search(line)]
    return "\n".join(telling[-3:])
