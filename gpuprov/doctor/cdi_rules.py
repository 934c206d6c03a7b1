"""CDI specifications: missing, broken, stale, conflicting. Pure."""

from __future__ import annotations

import json
import re
import shlex

from gpuprov.cdi.generate import PATH
from gpuprov.doctor.docker_rules import in_daemon
from gpuprov.doctor.driver_rules import ROOTS
from gpuprov.doctor.finding import CDI, CERTAIN, LIKELY, WARNING, Finding, Rules, remove, restart, steps
from gpuprov.doctor.parse import host_paths
from gpuprov.doctor.snapshot import SPECIFICATION_FOLDERS, HostSnapshot
from gpuprov.doctor.suggested_commands import (
    gpuprov_install,
    has_unit,
    is_gpuprovs,
    refresh_specification,
    restart_docker,
)
from gpuprov.engines import docker as docker_engine
from gpuprov.engines.docker_config import knows_cdi
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH

RULES = Rules()

# NVIDIA's toolkit has this unit since 1.18.
NVIDIAS_REFRESH = "nvidia-cdi-refresh.service"
_OURS = (steps("cdi"),)
_SUFFIXES = (".json", ".yaml", ".yml")


def specifications(x: HostSnapshot) -> dict[str, str]:
    """Return path → text of the specifications that name NVIDIA's devices or can't be read."""
    texts = {path: text for path, text in x.texts.items() if path.startswith(SPECIFICATION_FOLDERS)}
    named = {path: text for path, text in texts.items() if path.endswith(_SUFFIXES)}
    return {path: text for path, text in named.items() if path == PATH or "nvidia" in text}


def _correction(x: HostSnapshot, path: str) -> str:
    """Return the command that corrects or removes a specification; gpuprov writes only its own."""
    if path == PATH:
        return refresh_specification(x)
    if has_unit(x, NVIDIAS_REFRESH) and path == "/var/run/cdi/nvidia.yaml":
        return f"systemctl restart {NVIDIAS_REFRESH}"
    if PATH in x.there:
        return f"rm {shlex.quote(path)}"
    if "/usr/bin/nvidia-ctk" in x.there:
        return f"nvidia-ctk cdi generate --output={shlex.quote(path)}"
    return f"rm {shlex.quote(path)}; {refresh_specification(x)}"


@RULES.add(
    "cdi-missing", CDI, "gpuprov's runtime (or podman alone), and no specification in /etc/cdi or /var/run/cdi", ROOTS
)
def _cdi_missing(x: HostSnapshot) -> Finding | None:
    wanted = in_daemon(x) == LAUNCHER_PATH or (not x.host.docker.installed and "/usr/bin/podman" in x.there)
    if not wanted or specifications(x) or not x.driver.library_version:
        return None
    return Finding(
        "there is no CDI specification, so no container can be given a GPU",
        "\n".join(f"{folder}: nothing of NVIDIA's" for folder in SPECIFICATION_FOLDERS),
        refresh_specification(x),
        remedies=_OURS,
    )


@RULES.add("cdi-broken", CDI, "a specification is invalid JSON")
def _cdi_broken(x: HostSnapshot) -> Finding | None:
    for path, text in specifications(x).items():
        try:
            if path.endswith(".json"):
                json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            place = "1: nested too deeply"
            if isinstance(error, json.JSONDecodeError):
                place = f"{error.lineno}: column {error.colno}: {error.msg}"
            return Finding(
                f"the CDI specification {path} is invalid JSON",
                f"{path}:{place}",
                _correction(x, path),
                CERTAIN if path == PATH else LIKELY,
                _OURS if path == PATH else (),
            )
    return None


@RULES.add("cdi-stale", CDI, "/etc/cdi/nvidia.json does not describe the driver and the GPUs of now", ROOTS)
def _cdi_stale(x: HostSnapshot) -> Finding | None:
    if not x.specification_fault or _cdi_broken(x) is not None:
        return None
    return Finding(
        f"the CDI specification is out of date: {x.specification_fault}",
        f"{PATH}:1: {x.specification_fault}",
        refresh_specification(x),
        remedies=_OURS,
    )


@RULES.add(
    "cdi-names-absent-files",
    CDI,
    "a specification names files or nodes that are not there",
    (*ROOTS, "cdi-stale", "runtime-missing", "runtime-files-missing"),
)
def _cdi_names_absent_files(x: HostSnapshot) -> Finding | None:
    for path, text in specifications(x).items():
        absent = [(named, line) for named, line in host_paths(text) if named in x.absent]
        if absent:
            step = _correction(x, path)
            ours = (remove(path),) if step == f"rm {shlex.quote(path)}" else ()
            return Finding(
                f"the CDI specification {path} names files that do not exist: {len(absent)}",
                "\n".join(f"{path}:{line}: {named}" for named, line in absent[:4]),
                step,
                remedies=_OURS if path == PATH else ours,
            )
    return None


def _devices(text: str) -> tuple[str, frozenset[str]]:
    """Return kind and names of devices in a specification's text, JSON or YAML."""
    kind = re.search(r"""^\s*["']?kind["']?\s*:\s*["']?([\w.-]+/[\w.-]+)""", text, re.MULTILINE)
    compact = kind or re.search(r'"kind"\s*:\s*"([^"]+)"', text)
    names = re.findall(r"""^\s*(?:- )?["']?name["']?\s*:\s*["']?([\w.:-]+)""", text, re.MULTILINE)
    names += re.findall(r'[{,]\s*"name"\s*:\s*"([^"]+)"', text)
    return compact[1] if compact else "", frozenset(names)


@RULES.add("cdi-closed", CDI, "a mode of /etc/cdi, /var/run/cdi or a specification there keeps others out")
def _cdi_closed(x: HostSnapshot) -> Finding | None:
    if not x.closed:
        return None
    folders = [path for path in x.closed if path in SPECIFICATION_FOLDERS]
    files = [path for path in x.closed if path not in folders]
    steps = (f"chmod a+rx {shlex.join(folders)}" if folders else "", f"chmod a+r {shlex.join(files)}" if files else "")
    return Finding(
        f"only root can read {' and '.join(x.closed)}: engines of other users (rootless docker) find no devices",
        "\n".join(f"stat -c %a {path}: {mode:o}" for path, mode in x.closed.items()),
        "; ".join(filter(None, steps)), LIKELY, remedies=_OURS if {*x.closed} <= {"/etc/cdi", PATH} else (),
    )  # fmt: skip


@RULES.add("cdi-conflict", CDI, "two specifications in one folder have the same devices")
def _cdi_conflict(x: HostSnapshot) -> Finding | None:
    seen: dict[tuple[str, str], tuple[str, frozenset[str]]] = {}
    for path, text in sorted(specifications(x).items()):
        kind, names = _devices(text)
        folder = path.rpartition("/")[0]
        other, known = seen.get((folder, kind), ("", frozenset()))
        both = sorted(names & known)
        if kind and both:
            mine = path if path != PATH else other
            return Finding(
                f"two CDI specifications have the same devices, so engines take neither: {kind}={both[0]}",
                f"{other}: {kind}={both[0]}\n{path}: {kind}={both[0]}",
                f"rm {shlex.quote(mine)}",
                LIKELY,
                (remove(mine),),
            )
        seen.setdefault((folder, kind), (path, names))
    return None


@RULES.add("cdi-covered", CDI, "a specification in /var/run/cdi overrides gpuprov's")
def _cdi_covered(x: HostSnapshot) -> Finding | None:
    later = [path for path in specifications(x) if path.startswith("/var/run/cdi/")]
    if PATH not in x.there or not later or _devices(x.texts[later[0]])[0] != "nvidia.com/gpu":
        return None
    if any(named in x.absent for named, _ in host_paths(x.texts[later[0]])):
        return None  # another rule reports this
    return Finding(
        f"{later[0]} overrides {PATH} and is not kept up to date", f"{later[0]}\n{PATH}",
        f"rm {shlex.quote(later[0])}", WARNING, (remove(later[0]),),
    )  # fmt: skip


@RULES.add(
    "cdi-off-in-docker",
    CDI,
    "docker ≥ 25, and `docker info` has no CDISpecDirs",
    ("runtime-unregistered", "daemon-json-broken"),
)
def _cdi_off_in_docker(x: HostSnapshot) -> Finding | None:
    docker = x.host.docker
    if not docker.active or docker.cdi or not specifications(x) or not knows_cdi(docker.version):
        return None
    # A host whose runtime is not gpuprov's does not need it, unless a user switched it off.
    off, is_to_be_set = docker_engine.cdi_switched_off(docker), docker_engine.cdi_is_to_be_set(docker)
    if in_daemon(x) and is_to_be_set and not is_gpuprovs(x):
        return None
    by_hand = f'${{EDITOR:-vi}} {docker.config_path}; {restart_docker(x)}  # "features": {{"cdi": true}}'
    waits = docker_engine.cdi_waits_for_containers(docker)
    return Finding(
        "docker does not read CDI specifications: `--device nvidia.com/gpu=…` is refused",
        f"{docker_engine.why_cdi_is_off(docker)}\ndocker info: no CDISpecDirs, docker {docker.version}",
        by_hand if off else gpuprov_install(x) if is_to_be_set else restart_docker(x),
        WARNING if waits else LIKELY,
        () if off or waits else (steps("docker"),) if is_to_be_set else (restart("docker.service"),),
    )
