"""Docker: what it is now, what is wrong with it, and whether daemon.json must change; docker_change.py does it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuprov.core.changes import Change
from gpuprov.core.system import System
from gpuprov.engines.docker_change import ReconfigureDocker
from gpuprov.engines.docker_config import DAEMON_JSON, parse_config, render_config, with_runtime
from gpuprov.wire.errors import Problem
from gpuprov.wire.versions import version_numbers

_SNAP = "/snap/bin/docker"


@dataclass(frozen=True)
class DockerFacts:
    """What docker is on a host.

    `config_text` is None without a daemon.json. What comes after `active` is what the running daemon says, and empty
    where none answers; `error` is then its client's complaint.
    """

    installed: bool = False
    snap: bool = False
    config_text: str | None = None
    active: bool = False
    version: str = ""
    runtimes: Mapping[str, str] | None = None
    default_runtime: str = ""
    live_restore: bool = False
    running_containers: tuple[str, ...] = ()
    cgroup_version: str = ""
    cgroup_driver: str = ""
    error: str = ""


def gather(system: System) -> DockerFacts:
    """Return what docker is here, by two commands of its client."""
    installed = system.which("dockerd") is not None
    snap = not installed and system.exists(_SNAP)
    content = system.read_bytes(DAEMON_JSON)
    config_text = None if content is None else content.decode("utf-8", "surrogateescape")
    if not installed or system.which("docker") is None:
        return DockerFacts(installed=installed, snap=snap, config_text=config_text)
    info = system.run(("docker", "info", "--format", "{{json .}}"), timeout=20)
    facts = parse_info(info.stdout)
    if not facts.active:
        error = facts.error or info.stderr.strip()
        return DockerFacts(installed=True, config_text=config_text, error=error)
    names = system.run(("docker", "ps", "--format", "{{.Names}}"), timeout=20) if facts.running_containers else None
    return DockerFacts(
        installed=True,
        config_text=config_text,
        active=True,
        version=facts.version,
        runtimes=facts.runtimes,
        default_runtime=facts.default_runtime,
        live_restore=facts.live_restore,
        running_containers=tuple(sorted(names.stdout.split())) if names else (),
        cgroup_version=facts.cgroup_version,
        cgroup_driver=facts.cgroup_driver,
    )


def parse_info(text: str) -> DockerFacts:
    """Return what `docker info --format '{{json .}}'` says; a daemon that does not answer shows up as not active."""
    try:
        info: Any = json.loads(text)
    except ValueError:
        info = None
    if not isinstance(info, dict):
        return DockerFacts(error=text.strip()[:200])
    errors = info.get("ServerErrors") or []
    if errors or not info.get("ServerVersion"):
        return DockerFacts(error="; ".join(str(error) for error in errors))
    count = int(info.get("ContainersRunning") or 0)
    return DockerFacts(
        active=True,
        version=str(info["ServerVersion"]),
        runtimes={name: str(entry.get("path") or "") for name, entry in (info.get("Runtimes") or {}).items()},
        default_runtime=str(info.get("DefaultRuntime") or ""),
        live_restore=bool(info.get("LiveRestoreEnabled")),
        running_containers=tuple(f"#{number}" for number in range(count)),
        cgroup_version=str(info.get("CgroupVersion") or ""),
        cgroup_driver=str(info.get("CgroupDriver") or ""),
    )


def problems(facts: DockerFacts) -> tuple[Problem, ...]:
    """Return what keeps docker from being configured; nothing is touched then."""
    if facts.snap:
        return (
            Problem(
                "docker on this host comes from snap, which keeps it from using a runtime of the host",
                f"{_SNAP} is there and no dockerd",
                "snap remove docker, then run the same command again: the distribution's docker is installed",
            ),
        )
    return parse_config(facts.config_text)[1]


def plan(
    facts: DockerFacts, *, runtime_path: str, set_default: bool, runtime_name: str = "nvidia"
) -> tuple[Change, ...]:
    """Return the change of daemon.json and its taking up by docker, or nothing where both are as they should be."""
    config, wrong = parse_config(facts.config_text)
    if wrong:
        return ()
    wanted = with_runtime(config, runtime_name, runtime_path, set_default=set_default)
    text = None if wanted == config else render_config(wanted, facts.config_text)
    default_loaded = not set_default or facts.default_runtime == runtime_name
    loaded = (facts.runtimes or {}).get(runtime_name) == runtime_path and default_loaded
    if text is None and facts.active and loaded:
        return ()
    return (
        ReconfigureDocker(
            content=text,
            runtime_name=runtime_name,
            runtime_path=runtime_path,
            restart=facts.live_restore or not facts.running_containers,
            containers=facts.running_containers,
            live_restore=facts.live_restore,
            validates=version_numbers(facts.version) >= (23,),
            default_runtime=set_default,
        ),
    )
