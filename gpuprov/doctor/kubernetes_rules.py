"""Rules about a Kubernetes node: why a pod does not get the GPUs that its engine could provide. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpuprov.doctor import words
from gpuprov.doctor.engine_rules import registered
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ASIDE, CERTAIN, ENGINES, LIKELY, POSSIBLE, Finding, Rule
from gpuprov.doctor.remedy import restart
from gpuprov.engines.containerd import MAIN
from gpuprov.engines.known import ENGINES as KNOWN
from gpuprov.engines.kubernetes import KUBELET, KUBELET_CONFIG, own_engines
from gpuprov.engines.other_engines import Registration, kept_running, restart_command
from gpuprov.protocol.errors import GpuprovError

_OF_KUBELETS = ("containerd", "crio")
# These detect NVIDIA's runtime by themselves.
_FIND_IT = ("k3s", "rke2")


def _unnamed(x: Examined) -> Finding | None:
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
        f"{words.gpuprov_install(x)}  # with gpuprov_engines: [{missing[0]}]",
        LIKELY if x.spec.docker == "none" else ASIDE,
    )


def _not_restarted(x: Examined) -> Finding | None:
    found = registered(x)
    kept = kept_running(x.host.engines, x.host.kubernetes, x.spec)
    for name, facts in x.host.engines.items():
        if facts.running is not None and facts.has_not_read_its_files and found.get(name) == Registration():
            return Finding(
                f"{name} runs and has not read its files: pods that name the handler nvidia do not start",
                f"CRI Status at {KNOWN[name].socket}: handlers {', '.join(facts.running.handlers)}",
                restart_command(name, facts),
                ASIDE if name in kept else CERTAIN,
                () if name in kept else (restart(facts.unit or KNOWN[name].unit),),
            )
    return None


def _written(x: Examined) -> Mapping[str, Any]:
    """Return the CRI plugin's table in the files of the host's containerd; empty if they can't be read."""
    from gpuprov.engines import containerd_files

    facts = x.host.engines.get("containerd")
    if facts is None or not facts.program:
        return {}
    try:
        return containerd_files.written(facts)
    except GpuprovError:
        return {}


def _cri_off(x: Examined) -> Finding | None:
    facts = x.host.engines.get("containerd")
    text = facts.files.get(MAIN, b"").decode("utf-8", "replace") if facts is not None else ""
    found = re.search(r"^\s*disabled_plugins\s*=.*\bcri\b.*$", text, re.MULTILINE)
    if found is None or KUBELET not in x.host.kubernetes:
        return None
    return Finding(
        "containerd's CRI plugin is switched off, so the kubelet can't use it", f"{MAIN}: {found[0].strip()}",
        f"${{EDITOR:-vi}} {MAIN}; systemctl restart containerd",
    )  # fmt: skip


def _cdi_off(x: Examined) -> Finding | None:
    if _written(x).get("enable_cdi") is not False:
        return None
    return Finding(
        "containerd does not read CDI specifications: pods that ask for CDI devices get none",
        f"{MAIN} or a file that it imports: enable_cdi = false",
        f"${{EDITOR:-vi}} {MAIN}; systemctl restart containerd  # enable_cdi = true",
        ASIDE,
    )


def _other_cgroups(x: Examined) -> Finding | None:
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
        f"{KUBELET_CONFIG}: cgroupDriver: systemd\n{MAIN}: no SystemdCgroup = true for {default}",
        f"${{EDITOR:-vi}} {MAIN}; {words.gpuprov_install(x)}  # SystemdCgroup = true in the options of {default}",
        POSSIBLE,
    )


RULES = (
    Rule("node-engine-unnamed", ENGINES, "a Kubernetes node whose engine gpuprov does not configure", _unnamed),
    Rule("engine-not-restarted", ENGINES, "an engine runs without the handler that its files name", _not_restarted),
    Rule("containerd-cri-off", ENGINES, "`disabled_plugins` has cri on a node with a kubelet", _cri_off),
    Rule("containerd-cdi-off", ENGINES, "`enable_cdi = false` in containerd's configuration", _cdi_off),
    Rule("cgroup-drivers-differ", ENGINES, "kubelet's cgroupDriver is systemd, containerd's is not", _other_cgroups),
)
