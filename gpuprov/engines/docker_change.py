"""Change docker's configuration file, make docker load it, and restore the old file if docker fails."""

from __future__ import annotations

import errno
import json
from typing import Any, ClassVar

from gpuprov.core.changes import Change, Json, Tell, capture_path, parent_of, restore_path, text_diff
from gpuprov.core.system import System
from gpuprov.core.units import is_active, restart, systemctl
from gpuprov.engines import docker_unit
from gpuprov.engines.docker_config import VERSIONS_WITH_FEATURE, edited, needs_feature, parse_config
from gpuprov.engines.docker_unit import DAEMON_JSON, UNIT
from gpuprov.engines.known import RuntimeEntry
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import GpuprovError, from_os_error

RUNTIME = RuntimeEntry().name
_BUILT_IN = "runc"
_COMES_UP_SECONDS = 60
_RELOAD_SECONDS = 15


@dataclass(frozen=True)
class ReconfigureDocker(Change):
    """Write this content to docker's file (None: already written) and make the running docker know the runtime.

    `restart` is False if that would stop containers: a reload also loads runtimes, and containers keep running.
    `reload` is False if the running docker reads another file. `runs`: whether docker runs, so that its running
    containers are known. `enable`: start docker at boot. `is_loaded`: nothing else is to be done. `cdi_later`: docker
    reads CDI specifications only after a restart that is not made now. `cdi_by_version`: docker is not installed yet,
    so whether its file must set features.cdi is decided afterwards.
    """

    # Several runs may have changed the file, with manual edits between them that docker could not start with.
    undo_goes_to_first: ClassVar[bool] = True
    undo_restores_files: ClassVar[bool] = True
    undo_disturbs: ClassVar[bool] = True

    content: str | None
    runtime_path: str
    restart: bool
    containers: tuple[str, ...] = ()
    live_restore: bool = False
    validates: bool = False
    default_runtime: bool = False
    path: str = DAEMON_JSON
    runs: bool = True
    enable: bool = False
    is_loaded: bool = False
    reload: bool = True
    cdi_later: bool = False
    cdi_by_version: bool = False

    key = "configure docker"

    def summary(self) -> str:
        parts = [f"write {self.path}"] if self.content is not None else []
        parts += [f"enable {UNIT}"] if self.enable else []
        parts += [] if self.is_loaded else [self._reload_step()]
        said = " and ".join(parts)
        if self.cdi_by_version:
            return f"{said}, with features.cdi if that is docker {VERSIONS_WITH_FEATURE}"
        later = "; `--device nvidia.com/gpu=…` works after docker's next restart, which would stop them"
        return said + later if self.cdi_later else said

    def _reload_step(self) -> str:
        if not self.runs:
            return "start docker (it does not run)"
        how = "restart" if self.restart else "reload"
        count = len(self.containers)
        if not count:
            return f"{how} docker (no container is running)"
        fate = "they keep running (live-restore)" if self.restart and self.live_restore else "they keep running"
        return f"{how} docker ({count} running: {', '.join(self.containers)}; {fate})"

    def diff(self, system: System) -> str:
        if self.content is None:
            return ""
        return text_diff(self.path, system.read_bytes(self.path), self._bytes())

    def _bytes(self) -> bytes:
        return (self.content or "").encode("utf-8", "surrogateescape")

    def capture(self, system: System) -> Json:
        found: dict[str, Any] = {"file": capture_path(system, self.path), "was_active": is_active(system, UNIT)}
        return {**found, "was_disabled": True} if self.enable else found

    def apply(self, system: System, tell: Tell) -> None:
        if self.cdi_by_version and needs_feature(docker_unit.dockerd_version(system)):
            text = self.content if self.content is not None else system.read_text(self.path)
            content = edited(text, RuntimeEntry(path="", cdi=True)) or self.content
            replace(self, content=content, cdi_by_version=False).apply(system, tell)
            return
        before = self.capture(system)
        if self.content is not None:
            if self.validates:
                self._validate(system)
            self._write(system, before)
        if self.enable and (trouble := systemctl(system, "enable", UNIT)):
            what = "docker can't be enabled, so it would not come up at boot"
            raise GpuprovError(what, trouble, f"systemctl enable {UNIT}")
        if self.is_loaded:
            return
        tell(f"{'restarting' if self.restart else 'reloading'} docker", 0, 0)
        since = system.clock()
        if trouble := self._reload_or_restart(system):
            raise self._gone_back(system, before, trouble, since)

    def _validate(self, system: System) -> None:
        """Validate the new text with dockerd itself."""
        with system.temporary_directory("/run") as folder:
            system.write(f"{folder}/daemon.json", self._bytes(), mode=0o600)
            done = system.run(("dockerd", "--validate", "--config-file", f"{folder}/daemon.json"))
        step = f"correct what it names, then check: dockerd --validate --config-file {self.path}"
        done.require(f"dockerd refuses {self.path}; nothing was changed", step, 4)

    def _write(self, system: System, before: Json) -> None:
        mode = before["file"].get("mode", 0o644)
        try:
            system.make_directory(parent_of(self.path))
            system.write(self.path, self._bytes(), mode=mode)
        except OSError as error:
            is_forbidden = error.errno in (errno.EPERM, errno.EACCES)
            next_step = f"lsattr {self.path}; chattr -ia {self.path}" if is_forbidden else ""
            raise from_os_error(f"{self.path} can't be written", error, next_step) from None

    def _reload_or_restart(self, system: System) -> str:
        """Make docker read the file; return what went wrong, or ""."""
        if is_active(system, UNIT) and self.reload:
            # A docker that rejects the file at a reload keeps its old configuration: so reload first.
            trouble = systemctl(system, "reload", UNIT) or self._wait(system, _RELOAD_SECONDS)
            if trouble or not self.restart:
                return trouble
        return restart(system, UNIT) or self._wait(system, _COMES_UP_SECONDS)

    def _wait(self, system: System, seconds: float) -> str:
        """Wait until docker knows the runtime; return why it does not, or ""."""
        deadline = system.now() + seconds
        while seen := self._loaded(system):
            if system.now() > deadline:
                return seen
            system.sleep(0.2)
        return ""

    def _loaded(self, system: System) -> str:
        """Return why docker has not loaded the runtime yet, or ""."""
        field = f'{{{{with index .Runtimes "{RUNTIME}"}}}}{{{{.Path}}}}{{{{end}}}} {{{{.DefaultRuntime}}}}'
        done = system.run(("docker", "info", "--format", field), timeout=20)
        if not done.ok:
            return done.stderr.strip() or "docker info fails"
        path, _, default = done.stdout.strip("\n").partition(" ")
        if path != self.runtime_path:
            return f"docker info shows for runtime {RUNTIME}: {path or 'nothing'}"
        if self.default_runtime and default != RUNTIME:
            return f"docker info shows default runtime {default}"
        return ""

    def _gone_back(self, system: System, before: Json, trouble: str, since: int) -> GpuprovError:
        """Restore the old file and docker's state; return the error to raise."""
        words = docker_unit.last_words(system, since) or trouble
        if self.content is None:
            return GpuprovError(f"docker does not load {self.path}", words, "journalctl -u docker -n 50")
        restore_path(system, before["file"])
        since = system.clock()
        back = systemctl(system, "reload", UNIT) if is_active(system, UNIT) else restart(system, UNIT)
        if is_active(system, UNIT):
            what = f"docker failed to start with the new {self.path}"
            if "Operation refused" in trouble:
                words, what = trouble, f"systemd does not restart docker with the new {self.path}"
            what = f"{what}; the old one is back and docker runs with it"
            return GpuprovError(what, words, "fix what docker names, then run the same command again")
        what = f"docker starts neither with the new {self.path} nor with the old one, which is back"
        step = "journalctl -u docker -n 50; it was the old file that docker could not start with, before gpuprov came"
        return GpuprovError(what, f"{words}\nwith the old file: {docker_unit.last_words(system, since) or back}", step)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Restore the old file and docker's earlier state: running with it, or stopped.

        A docker that already runs with that file is not restarted. Raises GpuprovError if docker ran before and does
        not start.
        """
        image = before["file"]
        is_same = capture_path(system, image["path"]) == image
        if not is_same:
            restore_path(system, image)
        if system.which("dockerd") is None:
            # docker was removed since, so it loads nothing.
            return
        if before.get("was_disabled"):
            systemctl(system, "disable", UNIT)
        if not before["was_active"]:
            # Stop a docker that did not run before; if that would stop containers, or docker does not tell, reload it.
            if is_active(system, UNIT):
                systemctl(system, "stop" if docker_unit.restart_stops_containers(system) is False else "reload", UNIT)
        elif not (is_same and is_active(system, UNIT) and _runs_with_its_file(system)):
            trouble = _run_again(system, image["path"])
            # Do not repeat the messages of a failed change.
            if trouble and not (is_same and outcome is None):
                what = f"docker does not come up with its old {image['path']}, which is back"
                step = "journalctl -u docker -n 50; fix what docker names, then run the same command again"
                raise GpuprovError(what, trouble, step)


def _runs_with_its_file(system: System) -> bool:
    """Say whether the running docker has exactly the runtimes in its file, and its default.

    A user may have restored the file without restarting docker.
    """
    unit = docker_unit.gather_unit(system)
    text = docker_unit.text_of(system, unit.config_path)
    done = system.run(("docker", "info", "--format", "{{json .}}"), timeout=20)
    try:
        info: Any = json.loads(done.stdout)
        loaded, default = set(info["Runtimes"] or ()), str(info["DefaultRuntime"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return True  # not reported
    config, wrong = parse_config(text, unit.config_path, docker_unit.dockerd_version(system) if text else "")
    if wrong:
        return True
    by_flag = (*docker_unit.flag_values(unit.arguments, "--default-runtime"), "")
    named = str(config.get("default-runtime") or by_flag[0] or _BUILT_IN)
    wanted = {*(config.get("runtimes") or {}), *unit.flag_runtimes}
    others = (name for name in loaded ^ wanted if name != _BUILT_IN and not name.startswith("io.containerd."))
    return default == named and not any(others)


def _run_again(system: System, path: str) -> str:
    """Make docker run with the current file; return why it does not, or ""."""
    since, unit = system.clock(), docker_unit.gather_unit(system)
    if unit.is_foreign:
        return ""  # it runs under another unit, or by hand: this one would start a second docker
    if not is_active(system, UNIT):
        trouble = restart(system, UNIT)
    elif docker_unit.restart_stops_containers(system) is not False:
        # docker drops a runtime only at a restart: it may know it until then.
        trouble = systemctl(system, "reload", UNIT)
    elif docker_unit.refusal(system, unit, path):
        # It ran with a file that would have prevented its start, and does so again.
        return ""
    else:
        trouble = restart(system, UNIT)
    if not trouble and not is_active(system, UNIT):
        trouble = f"systemctl is-active {UNIT}: no"
    return (docker_unit.last_words(system, since) or trouble) if trouble else ""
