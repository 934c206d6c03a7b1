"""What a cluster needs for GPU nodes that gpuprov provisions: objects, and what to type. Pure."""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from gpuprov.protocol.errors import UsageError

Object = dict[str, Any]
RUNTIME_CLASS = "nvidia"
# Values of the plugin's DEVICE_LIST_STRATEGY, by the name that people give.
STRATEGIES = {"environment": "envvar", "cdi": "cdi-cri"}
_NEEDS = {
    "environment": "the engine's runtime handler `nvidia`: gpuprov's runtime or NVIDIA's toolkit",
    "cdi": "Kubernetes 1.29, containerd 1.7 or CRI-O 1.24 with CDI, and NVIDIA's toolkit (nvidia-cdi-hook)",
}
_PRESENT = "nvidia.com/gpu.present"
_NAMESPACES = {"plugin": "kube-system", "dra": "dra-driver-nvidia-gpu"}
# Release notes of kubernetes-sigs/dra-driver-nvidia-gpu v0.4.1, section Helm install, and the chart's values.yaml.
_DRA_CHART = "oci://registry.k8s.io/dra-driver-nvidia/charts/dra-driver-nvidia-gpu"
_DRA_VERSION = "0.4.1"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def objects() -> dict[str, Any]:
    """Return objects.yaml, by the names that it gives."""
    found: dict[str, Any] = yaml.safe_load(pkgutil.get_data(__package__, "objects.yaml") or b"")
    return found


@dataclass(frozen=True)
class Choice:
    """The requested manifest. `namespace`: empty for the mode's own; `node_selector`: empty for nodes with GPUs."""

    mode: str = "plugin"
    strategy: str = "environment"
    namespace: str = ""
    mig: str = "none"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    test_pod: bool = True


@dataclass(frozen=True)
class Manifest:
    """Objects for `kubectl apply`, and sentences on how to use them."""

    notes: tuple[str, ...]
    objects: tuple[Object, ...]

    def as_yaml(self) -> str:
        """Return the notes as comments, then one document for each object."""
        notes = "".join(f"# {line}".rstrip() + "\n" for line in self.notes)
        return notes + yaml.safe_dump_all(
            self.objects, explicit_start=True, sort_keys=False, default_flow_style=False
        )  # fmt: skip

    def as_json(self) -> str:
        """Return the objects as a List."""
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": self.objects}, indent=2)


def manifest(choice: Choice) -> Manifest:
    """Return the manifest of a choice. Raises GpuprovError (exit code 2) for an invalid one."""
    place = choice.namespace or _NAMESPACES[choice.mode]
    require_namespace(place)
    return _dra(choice, place) if choice.mode == "dra" else _plugin(choice, place)


def require_namespace(name: str) -> None:
    """Raise GpuprovError (exit code 2) if this is not a valid namespace name (RFC 1123)."""
    if not _LABEL.fullmatch(name):
        raise UsageError(
            "this is no name of a namespace", f"--namespace {name[:100]}",
            "use at most 63 lower-case letters, digits and hyphens, such as gpu-test",
        )  # fmt: skip


def _plugin(choice: Choice, place: str) -> Manifest:
    daemon_set = _daemon_set(choice, place)
    made = [objects()["runtime-class"], daemon_set, *_test_pod(choice)]
    # kube-system is there. The plugin mounts folders of the host, which only `privileged` allows.
    if place != "kube-system":
        labels = {"pod-security.kubernetes.io/enforce": "privileged"}
        made.insert(0, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": place, "labels": labels}})
    version = daemon_set["spec"]["template"]["spec"]["containers"][0]["image"].rpartition(":")[2]
    selector = ",".join(f"{key}={value}" for key, value in choice.node_selector.items()) or f"{_PRESENT}=true"
    needs = f"Each node needs {_NEEDS[choice.strategy]}."
    return Manifest(
        (
            f"NVIDIA's device plugin {version}, strategy {choice.strategy}. {needs}",
            "",
            "  kubectl apply -f FILE",
            f"  kubectl label node NODE {selector}      nodes that Node Feature Discovery has not labelled",
            *(("  kubectl logs pod/gpuprov-test           one GPU",) if choice.test_pod else ()),
            "  gpuprov verify --kubernetes",
        ),
        tuple(made),
    )


def _daemon_set(choice: Choice, place: str) -> Object:
    things = objects()
    made: Object = things["device-plugin"]
    made["metadata"]["namespace"] = place
    pod = made["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {"DEVICE_LIST_STRATEGY": STRATEGIES[choice.strategy], "MIG_STRATEGY": choice.mig}
    if choice.mig != "none":
        variables["NVIDIA_MIG_MONITOR_DEVICES"] = "all"
        # MIG devices are watched through /proc/driver/nvidia/capabilities, for which NVIDIA's chart adds SYS_ADMIN.
        container["securityContext"] = {"capabilities": {"add": ["SYS_ADMIN"]}}
    container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    if choice.strategy == "cdi":
        container["env"] += things["cdi"]["env"]
        container["volumeMounts"] += things["cdi"]["volumeMounts"]
        pod["volumes"] += things["cdi"]["volumes"]
    if choice.node_selector:
        del pod["affinity"]
        pod["nodeSelector"] = dict(choice.node_selector)
    return made


def _test_pod(choice: Choice) -> list[Object]:
    """Return the pod that lists the one GPU it gets, by the device plugin or by a claim; nothing if not wanted."""
    if not choice.test_pod:
        return []
    made: Object = objects()["test-pod"]
    if choice.mode == "dra":
        del made["spec"]["runtimeClassName"]
        made["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "gpuprov-gpu"}]
        resources = made["spec"]["containers"][0]["resources"]
        del resources["limits"]["nvidia.com/gpu"]
        resources["claims"] = [{"name": "gpu"}]
    return [made]


def _dra(choice: Choice, place: str) -> Manifest:
    return Manifest(
        (
            f"Claims of GPUs by DRA, for Kubernetes 1.34 and later, with NVIDIA's DRA driver {_DRA_VERSION}.",
            "",
            f"  helm install dra-driver-nvidia-gpu {_DRA_CHART} \\",
            f"    --version {_DRA_VERSION} -n {place} --create-namespace \\",
            "    --set nvidiaDriverRoot=/ --set gpuResourcesEnabledOverride=true",
            "  kubectl apply -f FILE",
            *(("  kubectl logs pod/gpuprov-test",) if choice.test_pod else ()),
            "",
            "The chart brings the DeviceClass gpu.nvidia.com and its own CDI hook. Each node needs an engine with CDI",
            f"and the label {_PRESENT}=true or Node Feature Discovery's.",
            "The DRA driver and the device plugin must not serve GPUs on the same node.",
        ),
        (objects()["claim"], *_test_pod(choice)),
    )
