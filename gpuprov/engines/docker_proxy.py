"""The site's proxy for docker's daemon: a drop-in of its unit, and a file with the password that only root can read.

A unit's own settings are world-readable (`systemctl show`), those of an EnvironmentFile= are not (systemd.exec(5)).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuprov.core.changes import Change, FileFact, Json, Tell, capture_path, restore_path, text_diff, write_files
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.proxy import Proxy
from gpuprov.core.system import System
from gpuprov.core.units import daemon_reload, is_active, systemctl
from gpuprov.engines.docker import DockerFacts
from gpuprov.engines.docker_unit import UNIT, restart_stops_containers
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.secrets import masked

DROP_IN = "/etc/systemd/system/docker.service.d/gpuprov-proxy.conf"
ENVIRONMENT = "/etc/gpuprov/docker-proxy.env"
_BACKUP = f"{STATE_DIRECTORY}/docker-proxy.env"
# Without its file docker starts all the same.
_DROP_IN_TEXT = (
    f"# Written by gpuprov: docker's proxy (gpuprov_proxy).\n[Service]\nEnvironmentFile=-{ENVIRONMENT}\n".encode()
)
# What dockerd reads (docs.docker.com, "Daemon proxy configuration").
_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def environment_text(proxy: Proxy) -> bytes:
    """Return the EnvironmentFile of a proxy; what the URL may hold needs no escape within quotes (systemd.exec(5))."""
    values = ((name, proxy.environment[name]) for name in _NAMES)
    return "".join(f'{name}="{value}"\n' for name, value in values if value).encode()


def is_in_use(system: System, proxy: Proxy) -> bool | None:
    """Return whether the running dockerd has exactly this proxy in its environment; None if none runs.

    A host that has no proxy, and is to have none, is not checked.
    """
    if not proxy.url and system.status(DROP_IN) is None:
        return None
    done = system.run(("systemctl", "show", UNIT, "--property=MainPID", "--value"), timeout=20)
    pid = done.stdout.strip()
    if not done.ok or not pid.strip("0"):
        return None
    words = (system.read_text(f"/proc/{pid}/environ") or "").split("\0")
    found = dict(word.partition("=")[::2] for word in words if word.partition("=")[0] in _NAMES)
    return found == {name: value for name in _NAMES if (value := proxy.environment.get(name, ""))}


def plan(
    files: Mapping[str, FileFact], docker: DockerFacts, proxy: Proxy, *, in_use: bool | None, restarts: bool = False
) -> tuple[Change, ...]:
    """Return the change of docker's proxy; empty if it is right.

    `restarts`: another change of the plan restarts docker afterwards.
    A docker whose containers a restart would stop keeps its old environment until it restarts; `warning` reports it.
    """
    if not proxy.url and ENVIRONMENT not in files and DROP_IN not in files:
        return ()
    wanted = {DROP_IN: (_DROP_IN_TEXT, 0o644), ENVIRONMENT: (environment_text(proxy), 0o600)} if proxy.url else {}
    there = {path: (files[path].content, files[path].mode) for path in (DROP_IN, ENVIRONMENT) if path in files}
    restart = docker.active and in_use is not True and not (docker.restart_stops or docker.unit.is_foreign)
    if there == wanted and not (restart and in_use is False):
        return ()
    return (SetDockerProxy(proxy, restart=restart and not restarts),)


def warning(docker: DockerFacts, proxy: Proxy, *, in_use: bool | None) -> str:
    """Return a warning for a docker that uses the proxy only later, or never; "" for any other."""
    if not proxy.url:
        return ""
    if docker.config.get("proxies"):
        return f"{docker.config_path} names proxies of its own: docker uses these, not gpuprov_proxy"
    if docker.active and in_use is False and docker.restart_stops:
        names = ", ".join(docker.running_containers)
        return f"docker uses the proxy after a restart, which stops {names}: systemctl restart {docker.unit.word}"
    return ""


@dataclass(frozen=True)
class SetDockerProxy(Change):
    """Set this proxy for docker's daemon (without a URL: remove gpuprov's), at once if `restart` is true.

    The former content of the password file is kept beside the journal, for root only, and not in it.
    """

    proxy: Proxy
    restart: bool = False

    key = "set docker's proxy"

    def summary(self) -> str:
        what = f"write {DROP_IN}: docker uses the proxy {self.proxy.address}" if self.proxy.url else f"remove {DROP_IN}"
        return f"{what} and restart docker" if self.restart else what

    def diff(self, system: System) -> str:
        wanted = environment_text(self.proxy) if self.proxy.url else None
        drop_in = text_diff(DROP_IN, system.read_bytes(DROP_IN), _DROP_IN_TEXT if self.proxy.url else None)
        shown = text_diff(ENVIRONMENT, _shown(system.read_bytes(ENVIRONMENT)), _shown(wanted))
        return "\n".join(part for part in (drop_in, shown) if part)

    def capture(self, system: System) -> Json:
        image: dict[str, Any] = dict(capture_path(system, ENVIRONMENT))
        had = image.pop("content", None) is not None
        number = 1
        while system.status(f"{_BACKUP}.{number}") is not None:
            number += 1
        backup = f"{_BACKUP}.{number}" if had else ""
        return {"drop_in": capture_path(system, DROP_IN), "backup": backup, "folders": image["missing_parents"]}

    def apply(self, system: System, tell: Tell) -> None:
        before = self.capture(system)
        if before["backup"]:
            system.make_directory(STATE_DIRECTORY, 0o700)
            system.write(before["backup"], system.read_bytes(ENVIRONMENT) or b"", mode=0o600)
        if self.proxy.url:
            secret = (ENVIRONMENT, environment_text(self.proxy), 0o600)
            write_files(system, (secret, (DROP_IN, _DROP_IN_TEXT, 0o644)))
        else:
            system.remove(DROP_IN)
            system.remove(ENVIRONMENT)
        _reload_units(system, restart=self.restart)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        restore_path(system, before["drop_in"])
        kept = system.read_bytes(before["backup"]) if before["backup"] else None
        if kept is not None:
            write_files(system, ((ENVIRONMENT, kept, 0o600),))
            system.remove(before["backup"])
        elif not before["backup"]:
            restore_path(system, {"path": ENVIRONMENT, "kind": "missing", "missing_parents": before["folders"]})
        _reload_units(system, restart=restart_stops_containers(system) is False and is_active(system, UNIT))


def _shown(content: bytes | None) -> bytes | None:
    """Return the file with the password in a form that a diff may show."""
    return None if content is None else masked(content.decode("utf-8", "replace")).encode()


def _reload_units(system: System, *, restart: bool) -> None:
    daemon_reload(system)
    if restart and (trouble := systemctl(system, "restart", UNIT)):
        raise GpuprovError("docker does not restart with its proxy", trouble, "journalctl -u docker -n 50")
