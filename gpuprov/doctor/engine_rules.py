"""Engines besides docker, Kubernetes nodes, units that keep a host up to date, running containers. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from gpuprov import toolkit
from gpuprov.checks.cuda.survey import renew_command
from gpuprov.doctor import suggested_commands as commands
from gpuprov.doctor.finding import CERTAIN, LIKELY, UNITS, WARNING, Remedy
from gpuprov.doctor.rules import Seen, conditions, seen_of
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.engines.known import ENGINES as KNOWN
from gpuprov.engines.known import KUBELET, KUBELET_CONFIG, OF_THE_HOST, EngineFacts, RuntimeEntry, own_engines
from gpuprov.engines.other_engines import Registration, kept_running, registrations, restart_command, socket_of
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.versions import version_numbers
from gpuprov.protocol.words import counted

_FIRST_PODMAN_WITH_CDI = (4, 1)
_MAIN = KNOWN["containerd"].main


def engine_missing(x: HostSnapshot) -> Seen | None:
    name = next((name for name, facts in x.host.engines.items() if not facts.program), "")
    if x.spec.docker == "none" and not x.host.engines and not x.host.kubernetes:
        seen = f"command -v {' '.join(KNOWN[name].program for name in OF_THE_HOST)}: nothing"
        return Seen(seen, meaning="no container engine is installed", next_step=commands.install_packages(x, "podman"))
    if not name:
        return None
    known = KNOWN[name]
    step = known.install_command or commands.install_packages(x, known.package or name)
    return Seen(f"command -v {known.program}: nothing", name=name, next_step=step)


def registered(x: HostSnapshot) -> Mapping[str, Registration]:
    """Return engine → changes that its files need for the runtime of the specification."""
    return registrations(x.host.engines, toolkit.engine_runtime(x.spec))


def engine_unreadable(x: HostSnapshot) -> Seen | None:
    problem = next((one.problem for one in registered(x).values() if one.problem is not None), None)
    if problem is None:
        return None
    file = re.match(r"/\S+", problem.what)
    correct = f"${{EDITOR:-vi}} {shlex.quote(file[0])}; gpuprov install" if file else "gpuprov install --check"
    return seen_of(problem, next_step=f"{correct}  # {problem.next_step}")


def engine_down(x: HostSnapshot) -> Seen | None:
    for name, facts in x.host.engines.items():
        name_of_unit = facts.unit or KNOWN[name].unit
        unit = x.units.get(name_of_unit)
        # `Restart=always`: systemd waits to start it once more.
        again = unit is not None and unit.active == "activating" and unit.result != "success"
        if facts.program and unit is not None and (again or unit.active in ("failed", "inactive")):
            return Seen(
                f"systemctl show {name_of_unit}: {unit.active}, {unit.result}", name=name, unit=name_of_unit,
                restart=restart_command(name, facts),
                remedies=() if KNOWN[name].cluster else (Remedy(UNITS, (name_of_unit,)),),
            )  # fmt: skip
    return None


def node_engine_unnamed(x: HostSnapshot) -> Seen | None:
    missing = [name for name in own_engines(x.host.kubernetes) if name not in x.host.engines]
    if KUBELET in x.host.kubernetes and not any(name in x.host.engines for name in ("containerd", "crio")):
        missing.append("crio" if "/usr/bin/crio" in x.there else "containerd")
    # Some detect NVIDIA's runtime by themselves.
    missing = [name for name in missing if not x.there.intersection(KNOWN[name].detects)]
    # Those that an earlier run, with other variables, has configured.
    files = {name: (KNOWN[name].main, KNOWN[name].drop_in) for name in missing}
    missing = [name for name in missing if not any("nvidia" in x.texts.get(path, "") for path in files[name])]
    if not missing:
        return None
    variable = shlex.quote(json.dumps({"gpuprov_engines": [*x.spec.engines, missing[0]]}))
    seen = f"kubernetes: {', '.join(x.host.kubernetes)}; gpuprov_engines: {', '.join(x.spec.engines) or 'not set'}"
    return Seen(seen, name=missing[0], variable=variable, confidence=LIKELY if x.spec.docker == "none" else WARNING)


def engine_not_restarted(x: HostSnapshot) -> Seen | None:
    found = registered(x)
    kept = kept_running(x.host.engines, x.host.kubernetes, x.spec)
    for name, facts in x.host.engines.items():
        if facts.running is not None and facts.has_not_read_its_files and found.get(name) == Registration():
            restart = Remedy(UNITS, (facts.unit or KNOWN[name].unit,))
            sure, ours = (WARNING, ()) if name in kept else (CERTAIN, (restart,))
            seen = f"CRI Status at {socket_of(facts, name)}: handlers {', '.join(facts.running.handlers)}"
            return Seen(seen, name=name, next_step=restart_command(name, facts), confidence=sure, remedies=ours)
    return None


def _written(x: HostSnapshot) -> Mapping[str, Any]:
    """Return the CRI plugin's table in the files of the host's containerd; empty if they can't be read."""
    from gpuprov.engines import containerd

    facts = x.host.engines.get("containerd")
    if facts is None or not facts.program:
        return {}
    try:
        return containerd.written(facts)
    except GpuprovError:
        return {}


def podman_runtime_covered(x: HostSnapshot) -> Seen | None:
    from gpuprov.engines import toml

    facts, name = x.host.engines.get("podman", EngineFacts()), RuntimeEntry().name
    # podman takes each runtime from the last file that has it.
    later = (path for path in facts.files if path > KNOWN["podman"].drop_in and path.endswith(".conf"))
    for path in sorted(later, reverse=True):
        try:
            found = toml.table_at(toml.read(facts, path), "engine", "runtimes").get(name)
        except GpuprovError:  # podman-fails
            continue
        if found is not None:
            ours = found[:1] == [toolkit.runtime_path(x.spec)]
            return None if ours else Seen(f"{path}: {name} = {json.dumps(found)}", path=path, quoted=shlex.quote(path))
    return None


def containerd_cri_off(x: HostSnapshot) -> str:
    facts = x.host.engines.get("containerd")
    text = facts.files.get(_MAIN, b"").decode("utf-8", "replace") if facts is not None else ""
    found = re.search(r"^\s*disabled_plugins\s*=.*\bcri\b.*$", text, re.MULTILINE)
    return f"{_MAIN}: {found[0].strip()}" if found is not None and KUBELET in x.host.kubernetes else ""


conditions({
    "engine-unconfigured": lambda x: (
            found := next(((name, one.edits[0].path) for name, one in registered(x).items() if one.edits), None))
        is not None and Seen(f"{found[1]}: not as `gpuprov runtime configure` writes it", name=found[0]),
    "containerd-cdi-off": lambda x: _written(x).get("enable_cdi") is False
        and f"{_MAIN} or a file of its imports: enable_cdi = false",
    "podman-without-cdi": lambda x: (version := re.sub(r"^\d+:", "", x.host.packages.installed.get("podman", "")))
        and version_numbers(version) < _FIRST_PODMAN_WITH_CDI
        and Seen(f"package podman: {version}", version=version, next_step=commands.install_packages(x, "podman"),
                 confidence=LIKELY if "podman" in x.host.engines else ""),
    "podman-fails": lambda x: x.containers.why.startswith("`podman ps")
        and Seen(x.containers.why, confidence=CERTAIN if "podman" in x.host.engines else WARNING),
    "containers-left-out": lambda x: x.containers.why and not x.containers.why.startswith("`podman ps")
        and f"examined: {len(x.containers.examined)}, left out: {x.containers.left or 'not known'}",
})  # fmt: skip


def cgroup_drivers_differ(x: HostSnapshot) -> Seen | None:
    wanted = re.search(r"^cgroupDriver:\s*\"?(\w+)", x.texts.get(KUBELET_CONFIG, ""), re.MULTILINE)
    table = _written(x).get("containerd", {})
    if wanted is None or wanted[1] != "systemd" or "containerd" not in x.host.engines:
        return None
    default = str(table.get("default_runtime_name") or "runc")
    if table.get("runtimes", {}).get(default, {}).get("options", {}).get("SystemdCgroup") is True:
        return None
    seen = f"{KUBELET_CONFIG}: cgroupDriver: systemd", f"{_MAIN}: no SystemdCgroup = true for {default}"
    return Seen(*seen, default=default)


_MOST_SHOWN = 5


def container_library(x: HostSnapshot) -> Seen | None:
    ill = [one for one in x.containers.examined if one.findings]
    if not ill:
        return None
    first, engine, name = ill[0].findings[0], ill[0].engine, ill[0].name
    results = f" (CUDA result {', '.join(map(str, first.results))})" if first.results else ""
    more = f"; the same of {counted(len(ill) - 1, 'more container')}" if len(ill) > 1 else ""
    seen = [f"{one.name} ({one.engine}): {one.findings[0].evidence}" for one in ill[:_MOST_SHOWN]]
    if len(ill) > _MOST_SHOWN:
        seen.append(f"and {counted(len(ill) - _MOST_SHOWN, 'more container')}")
    of_engine = ((one.name, one.findings[0].next_step) for one in ill if one.engine == engine)
    stale = [other for other, step in of_engine if step == renew_command(engine, other)]
    step = f"gpuprov cuda {shlex.quote(name)}  # {first.next_step}"
    if name in stale:
        step = renew_command(engine, *stale)
    return Seen(*seen, name=name, what=f"{first.what}{results}{more}", next_step=step)
