"""Kubernetes objects as plain dictionaries: runtime class, device plugin, test pod, resource claims. Pure.

The device plugin's settings are those of NVIDIA's static manifest, Helm chart and docs/cdi.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RUNTIME_CLASS = "nvidia"
GPU = "nvidia.com/gpu"
# Values of the plugin's DEVICE_LIST_STRATEGY, by the name that people give.
STRATEGIES = {"environment": "envvar", "cdi": "cdi-cri", "cdi-annotations": "cdi-annotations"}
PRESENT = "nvidia.com/gpu.present"
# Node Feature Discovery's label of a node with an NVIDIA device on its PCI bus.
DISCOVERED = "feature.node.kubernetes.io/pci-10de.present"
_LABELS = {"app.kubernetes.io/name": "nvidia-device-plugin", "app.kubernetes.io/managed-by": "gpuprov"}
_SELECTOR = {"app.kubernetes.io/name": "nvidia-device-plugin"}
_PLUGINS_FOLDER = "/var/lib/kubelet/device-plugins"
_CDI_FOLDER = "/var/run/cdi"
_TOLERATION = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}
Object = dict[str, Any]


def namespace(name: str, *, level: str, labels: Mapping[str, str] | None = None) -> Object:
    """Return a namespace whose pods must meet a Pod Security Standard: privileged, baseline or restricted."""
    all_labels = {**(labels or {}), "pod-security.kubernetes.io/enforce": level}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": all_labels}}


def runtime_class() -> Object:
    """Return the runtime class that leads to the engine's handler `nvidia`."""
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": RUNTIME_CLASS},
        "handler": RUNTIME_CLASS,
    }


def device_plugin(image: str, *, place: str, strategy: str, mig: str, node_selector: Mapping[str, str]) -> Object:
    """Return NVIDIA's device plugin as a DaemonSet in a namespace. `node_selector`: none means its own labels."""
    cdi = strategy != "environment"
    pod: Object = {
        "priorityClassName": "system-node-critical",
        "runtimeClassName": RUNTIME_CLASS,
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        **({"nodeSelector": dict(node_selector)} if node_selector else {"affinity": _nodes_with_gpus()}),
        "tolerations": [_TOLERATION],
        "containers": [_plugin_container(image, strategy=strategy, mig=mig)],
        "volumes": [
            _host_folder("device-plugins", _PLUGINS_FOLDER, "Directory"),
            *((_host_folder("driver-root", "/", "Directory"),) if cdi else ()),
            *((_host_folder("cdi", _CDI_FOLDER, "DirectoryOrCreate"),) if cdi else ()),
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "nvidia-device-plugin", "namespace": place, "labels": dict(_LABELS)},
        "spec": {
            "selector": {"matchLabels": dict(_SELECTOR)},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": {"labels": dict(_LABELS)}, "spec": pod},
        },
    }


def _plugin_container(image: str, *, strategy: str, mig: str) -> Object:
    cdi = strategy != "environment"
    variables = {
        "DEVICE_LIST_STRATEGY": STRATEGIES[strategy],
        "FAIL_ON_INIT_ERROR": "true",
        "MIG_STRATEGY": mig,
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        **({"NVIDIA_MIG_MONITOR_DEVICES": "all"} if mig != "none" else {}),
        # The plugin writes a CDI specification of its own and needs the host's files and NVIDIA's hook for it.
        **({"NVIDIA_DRIVER_ROOT": "/", "NVIDIA_CDI_HOOK_PATH": "/usr/bin/nvidia-cdi-hook"} if cdi else {}),
    }
    # MIG devices are watched through /proc/driver/nvidia/capabilities, for which NVIDIA's chart adds SYS_ADMIN.
    limits: Object = (
        {"capabilities": {"add": ["SYS_ADMIN"]}}
        if mig != "none"
        else {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    )
    mounts: list[Object] = [{"name": "device-plugins", "mountPath": _PLUGINS_FOLDER}]
    if cdi:
        mounts += [{"name": "driver-root", "mountPath": "/driver-root", "readOnly": True},
                   {"name": "cdi", "mountPath": _CDI_FOLDER}]  # fmt: skip
    return {
        "name": "nvidia-device-plugin",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "securityContext": limits,
        "volumeMounts": mounts,
    }


def test_pod(image: str, *, claim_template: str = "") -> Object:
    """Return a pod that lists the one GPU it gets: by the device plugin, or by a claim of this template."""
    container: Object = {
        "name": "nvidia-smi",
        "image": image,
        "command": ["nvidia-smi", "-L"],
        "resources": {"claims": [{"name": "gpu"}]} if claim_template else {"limits": {GPU: "1"}},
        "securityContext": confined(),
    }
    claims = [{"name": "gpu", "resourceClaimTemplateName": claim_template}]
    spec: Object = {
        "restartPolicy": "Never",
        **({"resourceClaims": claims} if claim_template else {"runtimeClassName": RUNTIME_CLASS}),
        "automountServiceAccountToken": False,
        "securityContext": confined_pod(),
        "tolerations": [_TOLERATION],
        "containers": [container],
    }
    metadata = {"name": "gpuprov-test", "namespace": "default", "labels": {"app.kubernetes.io/managed-by": "gpuprov"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def claim_template(name: str, *, version: str) -> Object:
    """Return a template for claims of one GPU of NVIDIA's DRA driver, in a version of resource.k8s.io."""
    wanted = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 1}
    # Until v1beta1 a request had no alternatives, so what it asks for stands in it directly.
    request: Object = {"name": "gpu", **(wanted if version == "v1beta1" else {"exactly": wanted})}
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def confined() -> Object:
    """Return a container's security context that meets the Pod Security Standard `restricted`."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def confined_pod() -> Object:
    """Return a pod's security context that meets the Pod Security Standard `restricted`: nobody's user id."""
    return {"runAsNonRoot": True, "runAsUser": 65534, "runAsGroup": 65534,
            "seccompProfile": {"type": "RuntimeDefault"}}  # fmt: skip


def _nodes_with_gpus() -> Object:
    terms = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": ["true"]}]} for key in (PRESENT, DISCOVERED)
    ]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _host_folder(name: str, path: str, kind: str) -> Object:
    return {"name": name, "hostPath": {"path": path, "type": kind}}
