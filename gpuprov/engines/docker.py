"""Docker: its facts, its problems, and whether daemon.json must change; docker_change.py changes it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gpuprov.core.changes import Change
from gpuprov.core.system import System
from gpuprov.engines import docker_unit
from gpuprov.engines.docker_change import RUNTIME, ReconfigureDocker
from gpuprov.engines.docker_config import edited, knows_cdi, needs_feature, parse_config
from gpuprov.engines.docker_unit import DAEMON_JSON, SOCKET, UNIT, DockerUnit
from gpuprov.engines.known import RuntimeEntry
from gpuprov.protocol.codec import json_at
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.versions import version_numbers
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH

_SNAP = "/snap/bin/docker"

# Troubles of docker: install says them before the first change, the doctor when containers get no GPU.
FROM_SNAP = Problem(
    "docker on this host comes from snap, which keeps it from the host's driver and runtime",
    f"{_SNAP} is there and no dockerd",
    "snap remove docker; gpuprov install",
)
MASKED = Problem(
    "docker is masked, so nothing can start it",
    f"systemctl show {UNIT}: LoadState=masked",
    f"systemctl unmask {UNIT}; systemctl start docker",
)
RESTART_REFUSED = Problem(
    "docker must be restarted, and its unit refuses that",
    f"systemctl show {UNIT}: RefuseManualStop=yes",
    "systemctl edit docker; systemctl restart docker  # RefuseManualStop=no in [Unit]",
)
# As docker's packages have it; a unit in /etc works on each distribution.
_SOCKET = r"'[Socket]\nListenStream=/run/docker.sock\nSocketMode=0660\nSocketGroup=docker\n'"
# By the LoadState of docker.socket.
_SOCKET_STEPS = {
    "masked": f"systemctl unmask {SOCKET}; systemctl restart {SOCKET} docker",
    "not-found": f"printf {_SOCKET} > /etc/systemd/system/{SOCKET}; systemctl daemon-reload; systemctl restart docker",
}
_NO_CLIENT = "docker's client is not installed"
_OTHER_UNIT = "gpuprov runtime configure --runtime-path {} --cdi.enabled; systemctl restart {}; gpuprov install"
_END_FOREIGN = (
    "pid=$(cat /run/docker.pid); kill $pid; tail --pid=$pid -f /dev/null; systemctl unmask docker; "
    "systemctl reset-failed docker; systemctl start docker"
)


def restart_problem(unit: DockerUnit, path: str = LAUNCHER_PATH) -> Problem | None:
    """Return why systemd could not restart docker, or None; `path`: the runtime's program."""
    seen = f"systemctl show {UNIT}: {unit.active}\n/proc/PID/cmdline of dockerd: {' '.join(unit.running)}"
    if unit.is_foreign and unit.name != "docker":
        return Problem(f"{unit.name} runs docker, not {UNIT}", seen, _OTHER_UNIT.format(path, unit.word))
    if unit.is_foreign:
        return Problem("the running docker was not started by systemd, which can't restart it", seen, _END_FOREIGN)
    if step := _SOCKET_STEPS.get(unit.socket_load):
        state = unit.socket_load.replace("not-found", "missing")
        what = f"docker must be restarted, and {SOCKET}, which it requires, is {state}"
        return Problem(what, f"systemctl show {SOCKET}: LoadState={unit.socket_load}", step)
    return RESTART_REFUSED if unit.refuses_restart else None


@dataclass(frozen=True)
class DockerFacts:
    """Facts about docker on a host.

    `config_path` is the file that docker.service reads; `config_text` is None if it is missing, and `config_kind` says
    what lies there instead of a file. `refused`: why dockerd rejects the file, checked if there is reason to. The
    fields after `active` come from the running daemon, and are empty if it does not respond. `error` is then the
    client's error, and `version` the program's. `cdi`: it reads CDI specifications.
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
    config_path: str = DAEMON_JSON
    config_kind: str = ""
    refused: str = ""
    unit: DockerUnit = field(default_factory=DockerUnit)
    address: str = ""
    cdi: bool = False

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of the file; empty if it can't be read."""
        return parse_config(self.config_text, self.config_path, self.version)[0]

    @property
    def restart_stops(self) -> bool:
        """Whether a restart would stop containers."""
        lives = self.live_restore and docker_unit.will_live_restore(self.unit, self.config_text)
        return bool(self.running_containers) and not lives

    @property
    def is_unreachable(self) -> bool:
        """Whether systemd says that docker runs, but it does not respond to its client: nothing is known of it then."""
        return self.installed and not self.active and self.unit.active == "active"


def reach_local_docker(system: System) -> str:
    """Make every docker command of this run use this host's own docker; return its address.

    Neither DOCKER_HOST nor a context of docker's client may select another one. If systemd does not respond, both stay
    unchanged.
    """
    unit = docker_unit.gather_unit(system)
    if not unit.load:
        return ""
    config = parse_config(docker_unit.text_of(system, unit.config_path), unit.config_path)[0]
    address = docker_unit.local_address(unit, config.get("hosts"))
    system.environment["DOCKER_HOST"] = address
    return address


def gather(system: System) -> DockerFacts:
    """Return the facts about docker, from one systemd query and two commands of docker's client."""
    installed = system.which("dockerd") is not None
    unit = docker_unit.gather_unit(system)
    path = unit.config_path
    status = system.status(system.real_path(path))
    facts = replace(
        _running_daemon(system) if installed else DockerFacts(),
        installed=installed,
        snap=not installed and system.exists(_SNAP),
        config_text=docker_unit.text_of(system, path),
        config_path=path,
        config_kind="" if status is None or status.kind == "file" else status.kind,
        unit=unit,
        address=system.environment.get("DOCKER_HOST", ""),
    )
    if not installed:
        return facts
    if not facts.active:
        facts = replace(facts, version=docker_unit.dockerd_version(system))
    if not facts.active or _file_problems(facts):
        facts = replace(facts, refused=docker_unit.refusal(system, unit, path))
    return facts


def _running_daemon(system: System) -> DockerFacts:
    """Return what the running daemon reports."""
    if system.which("docker") is None:
        return DockerFacts(error=_NO_CLIENT)
    info = system.run(("docker", "info", "--format", "{{json .}}"), timeout=20)
    facts = parse_info(info.stdout)
    if not facts.active:
        return replace(facts, error=facts.error or info.stderr.strip())
    if not facts.running_containers:
        return facts
    done = system.run(("docker", "ps", "--format", "{{.Names}}"), timeout=20)
    # It waits for a container that hangs; then the daemon's count remains, or a restart would seem to stop nothing.
    return replace(facts, running_containers=tuple(sorted(done.stdout.split()))) if done.ok else facts


def parse_info(text: str) -> DockerFacts:
    """Return the fields of `docker info --format '{{json .}}'`; a daemon that does not respond counts as not active."""
    # A wrapper of docker's client may print lines of its own first.
    start = re.search(r"^\{", text, re.MULTILINE)
    info = json_at(text[start.start() :] if start else text)
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
        # Since docker 25; empty where CDI is off.
        cdi=bool(info.get("CDISpecDirs")),
    )


def problems(facts: DockerFacts, entry: RuntimeEntry) -> tuple[Problem, ...]:
    """Return what prevents the registration of this runtime with docker; nothing is changed then."""
    if facts.snap:
        return (FROM_SNAP,)
    if not facts.installed:
        return parse_config(facts.config_text, facts.config_path)[1]
    found = (*_unit_problems(facts), *_file_problems(facts), *_flag_problems(facts, entry))
    # systemd also refuses the restart of a docker that does not run; it reloads none that it did not start.
    restarts = any(isinstance(one, ReconfigureDocker) and not one.is_loaded
                   and (one.restart or not one.runs or facts.unit.is_foreign)
                   for one in plan(facts, entry))  # fmt: skip
    refused = restart_problem(facts.unit, entry.path)
    if refused and facts.unit.is_foreign and facts.restart_stops:
        refused = _stops(refused)
    return (refused,) if refused and not found and restarts else found


def _file_problems(facts: DockerFacts) -> tuple[Problem, ...]:
    if facts.config_kind:
        return (not_a_file(facts),)
    return parse_config(facts.config_text, facts.config_path, facts.version)[1]


def not_a_file(facts: DockerFacts) -> Problem:
    """Return the problem of a folder or the like in place of docker's configuration file."""
    path = facts.config_path
    move = f"mv {shlex.quote(path)} {shlex.quote(f'{path}.old')}"
    step = f"{move}; systemctl reset-failed docker; systemctl restart docker"
    return Problem(f"{path} is a {facts.config_kind}, not a file", f"stat {path}: {facts.config_kind}", step)


def unreachable(facts: DockerFacts) -> Problem:
    """Return the problem of a docker that runs, by systemd, and does not answer its client."""
    if facts.error == _NO_CLIENT:
        return Problem(_NO_CLIENT, "command -v docker: nothing", "apt-get install -y docker-cli  # or docker-ce-cli")
    info = f"docker {f'--host {shlex.quote(facts.address)} ' if facts.address else ''}info"
    seen = f"systemctl show {UNIT}: active\n{info}: {facts.error or 'no answer'}"
    step = f"{info}; journalctl -u docker -n 50"
    return Problem("docker runs, but does not answer: whether containers run is not known", seen, step)


def outdated(facts: DockerFacts) -> Problem:
    """Return the problem of a docker that has not been restarted since its unit names another file."""
    if facts.unit.is_foreign and (problem := restart_problem(facts.unit)):
        return problem
    named, running = " ".join(facts.unit.command), " ".join(facts.unit.running)
    what = f"the running docker does not read {facts.config_path}, which its unit names since it was changed"
    seen = f"systemctl show {UNIT}: {named}\n/proc/PID/cmdline of dockerd: {running}"
    return Problem(what, seen, "systemctl restart docker")


def _unit_problems(facts: DockerFacts) -> tuple[Problem, ...]:
    if facts.unit.silent:
        what = "systemd does not tell how docker is started"
        return (Problem(what, facts.unit.silent, "run the same command again"),)
    if facts.unit.load == "masked" and not facts.unit.is_foreign:
        return (MASKED,)
    if facts.is_unreachable:
        return (unreachable(facts),)
    if facts.active and facts.unit.is_outdated and facts.restart_stops:
        one = _stops(outdated(facts))
        seen = f"{one.evidence}\nrunning containers: {', '.join(facts.running_containers)}"
        return (replace(one, evidence=seen),)
    return ()


def _stops(problem: Problem) -> Problem:
    return replace(problem, next_step=f"{problem.next_step}  # this stops the containers")


def _flag_problems(facts: DockerFacts, entry: RuntimeEntry) -> tuple[Problem, ...]:
    """Return the problems of flags: dockerd does not start with the same directive as a flag and in its file."""
    words = [f"--add-runtime={name}={path}" for name, path in facts.unit.flag_runtimes.items()]
    is_default = not entry.set_default or facts.default_runtime == RUNTIME
    if facts.unit.flag_runtimes.get(RUNTIME) == entry.path and is_default:
        words = []
    named = docker_unit.flag_values(facts.unit.arguments, "--default-runtime")[-1:] if entry.set_default else ()
    words += [f"--default-runtime={name}" for name in named if name != RUNTIME]
    return docker_unit.runtime_flags_problem(facts.config_path, words)


def plan(
    facts: DockerFacts, entry: RuntimeEntry, *, drop: Sequence[str] = (), offline: bool = False, new_hook: bool = False
) -> tuple[Change, ...]:
    """Return the change of docker's configuration file and its reload or restart; empty if all is right.

    `entry` with `cdi`: docker must read CDI specifications if its version can. `drop`: runtimes to remove. `offline`:
    docker can't run here (an image). `new_hook`: the run brings the hook of `--gpus`, which docker finds at its start.
    """
    if _file_problems(facts):
        return ()
    in_file = replace(entry, cdi=entry.cdi and cdi_of(facts).is_to_be_set)
    if facts.unit.flag_runtimes.get(RUNTIME) == entry.path:
        in_file = replace(in_file, path="", set_default=False)
    text = edited(facts.config_text, in_file, drop=drop)
    restart = not facts.restart_stops
    cdi_waits = entry.cdi and cdi_of(facts).waits
    default_loaded = not entry.set_default or facts.default_runtime == RUNTIME
    loaded = (facts.runtimes or {}).get(RUNTIME) == entry.path and default_loaded
    # No restart is made for these two if that would stop containers.
    waits = restart and (cdi_waits or (new_hook and restart_problem(facts.unit) is None))
    is_loaded = text is None and (offline or (facts.active and loaded and not waits))
    if is_loaded and not facts.unit.is_disabled:
        return ()
    return (
        ReconfigureDocker(
            content=text,
            runtime_path=entry.path,
            restart=restart,
            containers=facts.running_containers,
            live_restore=facts.live_restore,
            validates=version_numbers(facts.version) >= (23,),
            default_runtime=entry.set_default,
            path=facts.config_path,
            runs=facts.active,
            enable=facts.unit.is_disabled,
            is_loaded=is_loaded or offline,
            reload=not facts.unit.is_outdated,
            cdi_later=cdi_waits and not restart,
            cdi_by_version=entry.cdi and not facts.installed,
        ),
    )


# -- CDI ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DockerCdi:
    """Whether docker reads CDI specifications. `why_off`: why the running docker reads none, "" if it does.

    `switched_off`: how a user switched CDI off in docker's file, "" if not; gpuprov keeps that setting. `is_to_be_set`:
    features.cdi is missing there. `waits`: docker reads them after a restart with its file, or with features.cdi added;
    `waits_for_containers`: it is set, and docker was not restarted since, because that would stop containers.
    """

    why_off: str
    switched_off: str
    is_to_be_set: bool
    waits: bool
    waits_for_containers: bool


def cdi_of(facts: DockerFacts) -> DockerCdi:
    """Return whether docker reads CDI specifications, by its version, its file, its flags and the running daemon."""
    features, folders = facts.config.get("features"), facts.config.get("cdi-spec-dirs")
    setting = features.get("cdi") if isinstance(features, dict) else None
    off = ""
    if setting is False:
        off = f"features.cdi is false in {facts.config_path}"
    elif isinstance(folders, list) and not any(folders):
        off = f"cdi-spec-dirs is empty in {facts.config_path}"
    needed = needs_feature(facts.version) and not off
    # dockerd does not start with the same directive as a flag and in its file.
    is_to_be_set = needed and setting is None and not docker_unit.flag_values(facts.unit.arguments, "--feature")
    waits = facts.active and not facts.cdi and needed and (setting is True or is_to_be_set)
    why = off or "docker info has no CDISpecDirs"
    if facts.cdi:
        why = ""
    elif not knows_cdi(facts.version):
        why = f"docker {facts.version} has no CDI: it comes with docker 25"
    elif is_to_be_set:
        why = f"features.cdi is not set in {facts.config_path}, which docker {facts.version} needs"
    elif waits:
        why = "docker has not been restarted since features.cdi was set"
    return DockerCdi(why, off, is_to_be_set, waits, waits and not is_to_be_set and facts.restart_stops)
