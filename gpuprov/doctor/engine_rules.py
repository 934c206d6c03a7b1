"""Engines besides docker, Kubernetes nodes, units that keep a host up to date, running containers. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from gpuprov import toolkit
from gpuprov.doctor.finding import (
    CERTAIN,
    CONTAINERS,
    ENGINES,
    LIKELY,
    POSSIBLE,
    WARNING,
    Finding,
    Rules,
    failed_unit,
    restart,
    steps,
)
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.doctor.suggested_commands import gpuprov_install, install_packages
from gpuprov.engines.known import ENGINES as KNOWN
from gpuprov.engines.known import OF_THE_HOST
from gpuprov.engines.kubernetes import KUBELET, KUBELET_CONFIG, own_engines
from gpuprov.engines.other_engines import Registration, kept_running, registrations, restart_command
from gpuprov.facts.boot import PERSISTENCE, REFRESH
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.versions import version_numbers
from gpuprov.protocol.words import counted

RULES = Rules()

_FIRST_PODMAN_WITH_CDI = (4, 1)
_MAIN = KNOWN["containerd"].main
_PACKAGES = {"crio": "cri-o"}
# Engines that no package of a distribution has, in the words of their own documentation.
_INSTALLERS = {
    "k3s": "curl -sfL https://get.k3s.io | sh -",
    "microk8s": "snap install microk8s --classic",
    "rke2": "curl -sfL https://get.rke2.io | sh -; systemctl enable --now rke2-server",
}


@RULES.add("engine-missing", ENGINES, "an engine of gpuprov_engines is not installed, or none at all")
def _engine_missing(x: HostSnapshot) -> Finding | None:
    name = next((name for name, facts in x.host.engines.items() if not facts.program), "")
    if x.spec.docker == "none" and not x.host.engines and not x.host.kubernetes:
        seen = f"command -v {' '.join(KNOWN[name].program for name in OF_THE_HOST)}: nothing"
        return Finding("no container engine is installed", seen, install_packages(x, "podman"))
    if not name:
        return None
    return Finding(
        f"{name} is asked for (gpuprov_engines) and not installed", f"command -v {KNOWN[name].program}: nothing",
        _INSTALLERS.get(name) or install_packages(x, _PACKAGES.get(name, name)),
    )  # fmt: skip


def registered(x: HostSnapshot) -> Mapping[str, Registration]:
    """Return engine → changes that its files need for the runtime of the specification."""
    return registrations(x.host.engines, toolkit.runtime_path(x.spec), set_default=x.spec.default_runtime)


@RULES.add("engine-unreadable", ENGINES, "an engine's configuration can't be read")
def _engine_unreadable(x: HostSnapshot) -> Finding | None:
    found = registered(x)
    problem = next((one.problem for one in found.values() if one.problem is not None), None)
    if problem is None:
        return None
    file = re.match(r"/\S+", problem.what)
    correct = f"${{EDITOR:-vi}} {file[0]}; gpuprov install" if file else "gpuprov install --check"
    return Finding(problem.what, problem.evidence, f"{correct}  # {problem.next_step}")


@RULES.add("engine-unconfigured", ENGINES, "an engine's configuration lacks runtime nvidia")
def _engine_unconfigured(x: HostSnapshot) -> Finding | None:
    found = registered(x)
    name = next((name for name, one in found.items() if one.edits), "")
    if not name:
        return None
    path = found[name].edits[0].path
    return Finding(f"{name} does not know the runtime nvidia", f"{path}: not as `gpuprov runtime configure` writes it",
                   gpuprov_install(x), remedies=(steps("engines"),))  # fmt: skip


@RULES.add("engine-down", ENGINES, "an engine's unit has failed, or is not active")
def _engine_down(x: HostSnapshot) -> Finding | None:
    for name, facts in x.host.engines.items():
        name_of_unit = facts.unit or KNOWN[name].unit
        unit = x.units.get(name_of_unit)
        if facts.program and unit is not None and unit.active in ("failed", "inactive"):
            return Finding(
                f"{name} does not run", f"systemctl show {name_of_unit}: {unit.active}, {unit.result}",
                f"{restart_command(name, facts)}; journalctl -u {name_of_unit} -n 30 --no-pager",
                remedies=() if KNOWN[name].cluster else (restart(name_of_unit),),
            )  # fmt: skip
    return None


@RULES.add("podman-without-cdi", ENGINES, "podman before 4.1")
def _podman_without_cdi(x: HostSnapshot) -> Finding | None:
    version = re.sub(r"^\d+:", "", x.host.packages.installed.get("podman", ""))
    if not version or version_numbers(version) >= _FIRST_PODMAN_WITH_CDI:
        return None
    return Finding(
        f"podman {version} knows no CDI, so it can't give containers GPUs", f"package podman: {version}",
        install_packages(x, "podman"), LIKELY if "podman" in x.host.engines else WARNING,
    )  # fmt: skip


RULES.row(
    "refresh-unit-failed", ENGINES, "gpuprov-refresh.service has failed", failed_unit(REFRESH),
    "the CDI specification is not kept up to date", f"systemctl start {REFRESH}; journalctl -b -u {REFRESH} -n 20",
    WARNING, (restart(REFRESH),),
)  # fmt: skip
RULES.row(
    "persistenced-failed", ENGINES, "nvidia-persistenced.service has failed", failed_unit(PERSISTENCE),
    "nvidia-persistenced has failed: GPUs are initialized again for each container, which takes seconds",
    f"systemctl reset-failed {PERSISTENCE}; systemctl restart {PERSISTENCE}; journalctl -b -u {PERSISTENCE} -n 20",
    WARNING, (restart(PERSISTENCE),),
)  # fmt: skip


_OF_KUBELETS = ("containerd", "crio")
# These detect NVIDIA's runtime by themselves.
_FIND_IT = ("k3s", "rke2")


@RULES.add("node-engine-unnamed", ENGINES, "a Kubernetes node whose engine gpuprov does not configure")
def _node_engine_unnamed(x: HostSnapshot) -> Finding | None:
    missing = [name for name in own_engines(x.host.kubernetes) if name not in x.host.engines]
    if KUBELET in x.host.kubernetes and not any(name in x.host.engines for name in _OF_KUBELETS):
        missing.append("crio" if "/usr/bin/crio" in x.there else "containerd")
    if "/usr/bin/nvidia-container-runtime" in x.there:
        missing = [name for name in missing if name not in _FIND_IT]
    if not missing:
        return None
    return Finding(
        f"this is a Kubernetes node, and gpuprov does not configure its engine {missing[0]}: pods get no GPU",
        f"kubernetes: {', '.join(x.host.kubernetes)}; gpuprov_engines: {', '.join(x.spec.engines) or 'not set'}",
        f"{gpuprov_install(x)} -e {shlex.quote(json.dumps({'gpuprov_engines': [*x.spec.engines, missing[0]]}))}",
        LIKELY if x.spec.docker == "none" else WARNING,
    )


@RULES.add("engine-not-restarted", ENGINES, "an engine runs without the handler that its files name")
def _engine_not_restarted(x: HostSnapshot) -> Finding | None:
    found = registered(x)
    kept = kept_running(x.host.engines, x.host.kubernetes, x.spec)
    for name, facts in x.host.engines.items():
        if facts.running is not None and facts.has_not_read_its_files and found.get(name) == Registration():
            return Finding(
                f"{name} runs and has not read its files: pods that name the handler nvidia do not start",
                f"CRI Status at {KNOWN[name].socket}: handlers {', '.join(facts.running.handlers)}",
                restart_command(name, facts),
                WARNING if name in kept else CERTAIN,
                () if name in kept else (restart(facts.unit or KNOWN[name].unit),),
            )
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


def _cri_off(x: HostSnapshot) -> str:
    facts = x.host.engines.get("containerd")
    text = facts.files.get(_MAIN, b"").decode("utf-8", "replace") if facts is not None else ""
    found = re.search(r"^\s*disabled_plugins\s*=.*\bcri\b.*$", text, re.MULTILINE)
    return f"{_MAIN}: {found[0].strip()}" if found is not None and KUBELET in x.host.kubernetes else ""


RULES.row(
    "containerd-cri-off", ENGINES, "`disabled_plugins` has cri on a node with a kubelet", _cri_off,
    "containerd's CRI plugin is switched off, so the kubelet can't use it",
    f"${{EDITOR:-vi}} {_MAIN}; systemctl restart containerd",
)  # fmt: skip
RULES.row(
    "containerd-cdi-off", ENGINES, "`enable_cdi = false` in containerd's configuration",
    lambda x: f"{_MAIN} or a file of its imports: enable_cdi = false" if _written(x).get("enable_cdi") is False else "",
    "containerd does not read CDI specifications: pods that ask for CDI devices get none",
    f"${{EDITOR:-vi}} {_MAIN}; systemctl restart containerd  # enable_cdi = true", WARNING,
)  # fmt: skip


@RULES.add("cgroup-drivers-differ", ENGINES, "kubelet's cgroupDriver is systemd, containerd's is not")
def _cgroup_drivers_differ(x: HostSnapshot) -> Finding | None:
    wanted = re.search(r"^cgroupDriver:\s*\"?(\w+)", x.texts.get(KUBELET_CONFIG, ""), re.MULTILINE)
    table = _written(x)
    if wanted is None or wanted[1] != "systemd" or "containerd" not in x.host.engines:
        return None
    runtimes = table.get("containerd", {}).get("runtimes", {})
    default = str(table.get("containerd", {}).get("default_runtime_name") or "runc")
    if runtimes.get(default, {}).get("options", {}).get("SystemdCgroup") is True:
        return None
    return Finding(
        "kubelet and containerd use different cgroup drivers: pods are unstable, and GPUs vanish from them",
        f"{KUBELET_CONFIG}: cgroupDriver: systemd\n{_MAIN}: no SystemdCgroup = true for {default}",
        f"${{EDITOR:-vi}} {_MAIN}; {gpuprov_install(x)}  # SystemdCgroup = true in the options of {default}",
        POSSIBLE,
    )


_MOST_SHOWN = 5


@RULES.add(
    "container-library",
    CONTAINERS,
    "a running container of docker or podman with GPUs loads a libcuda.so.1 or libnvidia-ml.so.1 of another "
    "version, CUDA's stub, or a file that is no library; read from outside",
    ("version-mismatch", "driver-damaged", "driver-incomplete"),
)
def _container_library(x: HostSnapshot) -> Finding | None:
    ill = [one for one in x.containers.examined if one.findings]
    if not ill:
        return None
    first = ill[0].findings[0]
    results = f" (CUDA result {', '.join(map(str, first.results))})" if first.results else ""
    more = f"; the same of {counted(len(ill) - 1, 'more container')}" if len(ill) > 1 else ""
    seen = [f"{one.name} ({one.engine}): {one.findings[0].evidence}" for one in ill[:_MOST_SHOWN]]
    if len(ill) > _MOST_SHOWN:
        seen.append(f"and {counted(len(ill) - _MOST_SHOWN, 'more container')}")
    return Finding(
        f"the container {ill[0].name} loads a library that does not fit the driver: {first.what}{results}{more}",
        "\n".join(seen),
        f"gpuprov cuda {shlex.quote(ill[0].name)}  # {first.next_step}",
    )


@RULES.add("containers-left-out", CONTAINERS, "more running containers with GPUs than are examined, or no time left")
def _containers_left_out(x: HostSnapshot) -> Finding | None:
    found = x.containers
    if not found.why:
        return None
    return Finding(
        f"not all running containers with GPUs were examined: {found.why}",
        f"examined: {len(found.examined)}, left out: {found.left or 'not known'}",
        "gpuprov cuda CONTAINER  # for each of the others",
        WARNING,
    )
