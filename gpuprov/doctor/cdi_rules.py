"""CDI specifications: missing, broken, stale, conflicting. Pure."""

from __future__ import annotations

import json
import re
import shlex

from gpuprov.cdi.generate import PATH
from gpuprov.cdi.specification import SUFFIXES
from gpuprov.doctor import suggested_commands as commands
from gpuprov.doctor.docker_rules import in_daemon
from gpuprov.doctor.finding import CERTAIN, FILES, LIKELY, STEPS, UNITS, WARNING, Remedy
from gpuprov.doctor.rules import Seen, conditions
from gpuprov.doctor.snapshot import SPECIFICATION_FOLDERS, HostSnapshot, host_paths
from gpuprov.engines.docker import cdi_of
from gpuprov.engines.docker_config import knows_cdi
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH

# NVIDIA's toolkit has this unit since 1.18.
NVIDIAS_REFRESH = "nvidia-cdi-refresh.service"
_OURS = (Remedy(STEPS, ("cdi",)),)


def specifications(x: HostSnapshot) -> dict[str, str]:
    """Return path → text of the specifications that name NVIDIA's devices or can't be read."""
    paths = (path for path in x.texts if path.startswith(SPECIFICATION_FOLDERS) and path.endswith(SUFFIXES))
    return {path: x.texts[path] for path in paths if path == PATH or "nvidia" in x.texts[path]}


def _correction(x: HostSnapshot, path: str) -> str:
    """Return the command that corrects or removes a specification; gpuprov writes only its own."""
    if path == PATH:
        return commands.refresh_specification(x)
    kept = commands.has_unit(x, NVIDIAS_REFRESH) and x.units[NVIDIAS_REFRESH].enabled != "disabled"
    if kept and path == "/var/run/cdi/nvidia.yaml":
        return f"systemctl restart {NVIDIAS_REFRESH}"
    if PATH in x.there:
        return f"rm {shlex.quote(path)}"
    if "/usr/bin/nvidia-ctk" in x.there:
        return f"nvidia-ctk cdi generate --output={shlex.quote(path)}"
    return f"rm {shlex.quote(path)}; {commands.refresh_specification(x)}"


def _is_missing(x: HostSnapshot) -> bool:
    wanted = in_daemon(x) == LAUNCHER_PATH or (not x.host.docker.installed and "/usr/bin/podman" in x.there)
    return wanted and not specifications(x) and bool(x.driver.library_version)


conditions({
    "cdi-missing": lambda x: _is_missing(x) and [f"{folder}: nothing of NVIDIA's" for folder in SPECIFICATION_FOLDERS],
    "cdi-stale": lambda x: x.specification_fault and not cdi_broken(x) and f"{PATH}:1: {x.specification_fault}",
})  # fmt: skip


def cdi_broken(x: HostSnapshot) -> Seen | None:
    for path, text in specifications(x).items():
        try:
            if path.endswith(".json"):
                json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            place = "1: nested too deeply"
            if isinstance(error, json.JSONDecodeError):
                place = f"{error.lineno}: column {error.colno}: {error.msg}"
            sure, remedies = (CERTAIN, _OURS) if path == PATH else (LIKELY, ())
            return Seen(f"{path}:{place}", path=path, next_step=_correction(x, path), confidence=sure,
                        remedies=remedies)  # fmt: skip
    return None


def cdi_names_absent_files(x: HostSnapshot) -> Seen | None:
    for path, text in specifications(x).items():
        if absent := [f"{path}:{line}: {named}" for named, line in host_paths(text) if named in x.absent]:
            step = _correction(x, path)
            removal = (Remedy(FILES, (path,)),) if step == f"rm {shlex.quote(path)}" else ()
            ours = _OURS if path == PATH else removal
            return Seen(*absent[:4], path=path, number=len(absent), next_step=step, remedies=ours)
    return None


def _devices(text: str) -> tuple[str, frozenset[str]]:
    """Return kind and names of devices in a specification's text, JSON or YAML."""
    kind = re.search(r"""^\s*["']?kind["']?\s*:\s*["']?([\w.-]+/[\w.-]+)""", text, re.MULTILINE)
    compact = kind or re.search(r'"kind"\s*:\s*"([^"]+)"', text)
    names = re.findall(r"""^\s*(?:- )?["']?name["']?\s*:\s*["']?([\w.:-]+)""", text, re.MULTILINE)
    names += re.findall(r'[{,]\s*"name"\s*:\s*"([^"]+)"', text)
    return compact[1] if compact else "", frozenset(names)


def cdi_closed(x: HostSnapshot) -> Seen | None:
    folders = [path for path in x.closed if path in SPECIFICATION_FOLDERS]
    changed = (("a+rx", folders), ("a+r", [path for path in x.closed if path not in folders]))
    step = "; ".join(f"chmod {mode} {shlex.join(paths)}" for mode, paths in changed if paths)
    seen = (f"stat -c %a {path}: {mode:o}" for path, mode in x.closed.items())
    ours = _OURS if {*x.closed} <= {"/etc/cdi", PATH} else ()
    return Seen(*seen, paths=" and ".join(x.closed), next_step=step, remedies=ours) if x.closed else None


def cdi_conflict(x: HostSnapshot) -> Seen | None:
    seen: dict[tuple[str, str], tuple[str, frozenset[str]]] = {}
    for path, text in sorted(specifications(x).items()):
        kind, names = _devices(text)
        folder = path.rpartition("/")[0]
        other, known = seen.get((folder, kind), ("", frozenset()))
        both = sorted(names & known)
        if kind and both:
            mine, device = path if path != PATH else other, f"{kind}={both[0]}"
            ours = (Remedy(FILES, (mine,)),) if PATH in (path, other) else ()
            return Seen(f"{other}: {device}", f"{path}: {device}", device=device, next_step=f"rm {shlex.quote(mine)}",
                        remedies=ours)  # fmt: skip
        seen.setdefault((folder, kind), (path, names))
    return None


def cdi_covered(x: HostSnapshot) -> Seen | None:
    later = next((path for path in specifications(x) if path.startswith("/var/run/cdi/")), "")
    if PATH not in x.there or not later or _devices(x.texts[later])[0] != "nvidia.com/gpu":
        return None
    if any(named in x.absent for named, _ in host_paths(x.texts[later])):
        return None  # another rule reports this
    # Its `all` is that of CDI engines, and of `docker run --gpus` on docker 29 with NVIDIA's toolkit (moby, 51942).
    names = (_devices(x.texts.get(path, ""))[1] for path in (later, PATH))
    # The numbers of GPUs and MIG devices.
    known, there = ({name for name in one if re.fullmatch(r"\d+(:\d+)?", name)} for one in names)
    lacks = ", ".join(sorted(there - known)) if known else ""
    effect, sure = (f"lacks the GPUs {lacks}", LIKELY) if lacks else ("is not kept up to date", WARNING)
    step = _correction(x, later)
    kept = not step.startswith("rm ")
    if kept and not lacks:
        return None
    remedy = Remedy(UNITS, (NVIDIAS_REFRESH,)) if kept else Remedy(FILES, (later,))
    return Seen(later, PATH, path=later, effect=effect, next_step=step, confidence=sure, remedies=(remedy,))


def cdi_off_in_docker(x: HostSnapshot) -> Seen | None:
    docker = x.host.docker
    if not docker.active or docker.cdi or not specifications(x) or not knows_cdi(docker.version):
        return None
    # A host whose runtime is not gpuprov's does not need it, unless a user switched it off.
    cdi = cdi_of(docker)
    if in_daemon(x) and cdi.is_to_be_set and not commands.is_gpuprovs(x):
        return None
    by_hand = f'{commands.edit_docker(x)}; {commands.restart_docker(x)}  # "features": {{"cdi": true}}'
    off, waits = cdi.switched_off, cdi.waits_for_containers
    by_gpuprov = Remedy(STEPS, ("docker",)) if cdi.is_to_be_set else Remedy(UNITS, ("docker.service",))
    return Seen(
        cdi.why_off, f"docker info: no CDISpecDirs, docker {docker.version}",
        next_step=by_hand if off else commands.gpuprov_install(x) if cdi.is_to_be_set else commands.restart_docker(x),
        confidence=WARNING if waits else LIKELY,
        remedies=() if off or waits else (by_gpuprov,),
    )  # fmt: skip
