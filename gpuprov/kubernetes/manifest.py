"""What a cluster needs for GPU nodes that gpuprov provisions: objects, or values of a chart, and what to type. Pure."""

from __future__ import annotations

import functools
import json
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from gpuprov.protocol.errors import ExitCode, GpuprovError

# A registry's host with its port, and a path as the OCI distribution specification allows it.
_MIRROR = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*(?::\d{1,5})?(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_LONGEST_MIRROR = 200


@dataclass(frozen=True)
class Component:
    """A component's release: `image` and `chart` where it has them, `repository` of a chart that needs one."""

    version: str
    sources: tuple[str, ...]
    image: str = ""
    chart: str = ""
    repository: str = ""


@functools.cache
def components() -> Mapping[str, Component]:
    """Return the table: device-plugin, gpu-operator, dra-driver, and the image of test pods."""
    content = json.loads(pkgutil.get_data(__package__, "components.json") or b"")
    return {
        name: Component(**{**fields, "sources": tuple(fields["sources"])})
        for name, fields in content["components"].items()
    }


def mirrored(image: str, mirror: str) -> str:
    """Return the image's name on a mirror: `nvcr.io/nvidia/x:1` on `registry.example.org/hub` is `…/hub/nvidia/x:1`.

    Raises GpuprovError (exit code 2) if the mirror is no name of a registry.
    """
    if not mirror:
        return image
    mirror = mirror.rstrip("/")
    if len(mirror) > _LONGEST_MIRROR or not _MIRROR.fullmatch(mirror):
        raise GpuprovError(
            "the mirror is no registry's name", f"--image-mirror {mirror[:_LONGEST_MIRROR]}",
            "give host and path, without https://: --image-mirror registry.example.org/nvidia",
            exit_code=ExitCode.USAGE,
        )  # fmt: skip
    return f"{mirror}/{image.partition('/')[2]}"


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


MODES = ("plugin", "operator", "dra")
MIG = ("none", "single", "mixed")
# The versions of resource.k8s.io, and the first Kubernetes release that serves each by default.
RESOURCE_APIS = {"v1": "1.34", "v1beta2": "1.33", "v1beta1": "1.32"}
_NAMESPACES = {"plugin": "kube-system", "operator": "gpu-operator", "dra": "dra-driver-nvidia-gpu"}
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_CLAIM = "gpuprov-gpu"


@dataclass(frozen=True)
class Choice:
    """The requested manifest. `namespace`: empty for the mode's own.

    `node_selector`: empty for nodes with NVIDIA GPUs.
    """

    mode: str = "plugin"
    strategy: str = "environment"
    namespace: str = ""
    image_mirror: str = ""
    mig: str = "none"
    resource_api: str = "v1"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    test_pod: bool = True


@dataclass(frozen=True)
class Manifest:
    """Objects for `kubectl apply`, or the values of a Helm chart, and sentences on how to use them."""

    notes: tuple[str, ...]
    objects: tuple[Object, ...] = ()
    values: Object | None = None

    def as_yaml(self) -> str:
        """Return the notes as comments, then one document for each object, or the values."""
        notes = "".join(f"# {line}".rstrip() + "\n" for line in self.notes)
        if self.values is not None:
            return notes + _dumped(self.values)
        return notes + "".join(f"---\n{_dumped(one)}" for one in self.objects)

    def as_json(self) -> str:
        """Return the objects as a List, or the values."""
        whole = self.values if self.values is not None else {"apiVersion": "v1", "kind": "List", "items": self.objects}
        return json.dumps(whole, indent=2)


def manifest(choice: Choice) -> Manifest:
    """Return the manifest of a choice. Raises GpuprovError (exit code 2) for an invalid one."""
    place = choice.namespace or _NAMESPACES[choice.mode]
    require_namespace(place)
    if choice.mode == "operator":
        return _operator(choice, place)
    return _dra(choice, place) if choice.mode == "dra" else _plugin(choice, place)


def require_namespace(name: str) -> None:
    """Raise GpuprovError (exit code 2) if this is not a valid namespace name (RFC 1123)."""
    if not _LABEL.fullmatch(name):
        raise GpuprovError(
            "this is no name of a namespace", f"--namespace {name[:100]}",
            "use at most 63 lower-case letters, digits and hyphens, such as gpu-test", exit_code=ExitCode.USAGE,
        )  # fmt: skip


def _plugin(choice: Choice, place: str) -> Manifest:
    known = components()
    plugin = known["device-plugin"]
    daemon_set = device_plugin(
        mirrored(plugin.image, choice.image_mirror), place=place, strategy=choice.strategy, mig=choice.mig,
        node_selector=choice.node_selector,
    )  # fmt: skip
    made = [runtime_class(), daemon_set]
    # kube-system is there. The plugin mounts folders of the host, which only `privileged` allows.
    if choice.namespace and place != "kube-system":
        made.insert(0, namespace(place, level="privileged"))
    if choice.test_pod:
        made.append(test_pod(mirrored(known["test"].image, choice.image_mirror)))
    selector = ",".join(f"{key}={value}" for key, value in choice.node_selector.items()) or f"{PRESENT}=true"
    needs = {
        "environment": "the engine's runtime handler `nvidia`: gpuprov's runtime or NVIDIA's toolkit",
        "cdi": "Kubernetes 1.29, containerd 1.7 or CRI-O 1.24 with CDI, and NVIDIA's toolkit (nvidia-cdi-hook)",
        "cdi-annotations": "containerd 1.7 or CRI-O 1.24 with CDI, and NVIDIA's toolkit (nvidia-cdi-hook)",
    }[choice.strategy]
    return Manifest(
        (
            f"NVIDIA's device plugin {plugin.version}, strategy {choice.strategy}. Each node needs {needs}.",
            *_sources(plugin),
            "",
            "  kubectl apply -f FILE",
            f"  kubectl label node NODE {selector}      nodes that Node Feature Discovery has not labelled",
            *(("  kubectl logs pod/gpuprov-test           one GPU",) if choice.test_pod else ()),
            "  gpuprov verify --kubernetes",
        ),
        tuple(made),
    )


def _operator(choice: Choice, place: str) -> Manifest:
    if choice.image_mirror or choice.node_selector:
        raise GpuprovError(
            "--image-mirror and --node-selector are not for --mode operator",
            "the chart has a repository key for each of its images, and selects nodes by labels of its own",
            "set the chart's repository keys, or let the container engine use the mirror (hosts.toml, registries.conf)",
            exit_code=ExitCode.USAGE,
        )  # fmt: skip
    operator = components()["gpu-operator"]
    values: Object = {
        "driver": {"enabled": False},
        "toolkit": {"enabled": False},
        "operator": {"runtimeClass": RUNTIME_CLASS},
        # With CDI, the operator's device plugin writes specifications that run NVIDIA's hook on the host.
        "cdi": {"enabled": choice.strategy != "environment"},
        "mig": {"strategy": "single" if choice.mig == "none" else choice.mig},
        # What the plugin's DaemonSet of `--mode plugin` does: gpuprov owns driver, runtime and MIG layout of the host.
        "migManager": {"enabled": False},
    }
    create = f"kubectl create namespace {place}"
    return Manifest(
        (
            f"Values for NVIDIA's GPU operator {operator.version} on nodes whose driver and runtime gpuprov installs.",
            *_sources(operator),
            "",
            f"  {create}",
            f"  kubectl label namespace {place} pod-security.kubernetes.io/enforce=privileged",
            f"  helm repo add nvidia {operator.repository}",
            f"  helm install gpu-operator {operator.chart} --version {operator.version} -n {place} -f FILE",
            "",
            "The operator creates the runtime class `nvidia`, installs the device plugin and the node labels, and runs",
            "its validator, which finds the driver on the host. Remove the objects of `--mode plugin` first.",
            f"Pods that ask for GPUs need {'no runtime class' if values['cdi']['enabled'] else _RUNTIME_CLASS}.",
        ),
        values=values,
    )


_RUNTIME_CLASS = "`runtimeClassName: nvidia`, unless nvidia is the engine's default runtime"


def _dra(choice: Choice, place: str) -> Manifest:
    known = components()
    driver = known["dra-driver"]
    made = [claim_template(_CLAIM, version=choice.resource_api)]
    if choice.test_pod:
        image = mirrored(known["test"].image, choice.image_mirror)
        made.append(test_pod(image, claim_template=_CLAIM))
    mirror = mirrored(driver.image, choice.image_mirror)
    return Manifest(
        (
            f"Claims of GPUs by DRA, for Kubernetes {RESOURCE_APIS[choice.resource_api]} and later, with NVIDIA's DRA "
            f"driver {driver.version}.",
            *_sources(driver),
            "",
            f"  helm install dra-driver-nvidia-gpu {driver.chart} \\",
            f"    --version {driver.version} -n {place} --create-namespace \\",
            "    --set nvidiaDriverRoot=/ --set gpuResourcesEnabledOverride=true"
            + (f" \\\n#     --set image.repository={mirror}" if choice.image_mirror else ""),
            "  kubectl apply -f FILE",
            *(("  kubectl logs pod/gpuprov-test",) if choice.test_pod else ()),
            "",
            "The chart brings the DeviceClass gpu.nvidia.com and its own CDI hook. Each node needs an engine with CDI",
            f"and the label {PRESENT}=true or Node Feature Discovery's.",
            "The DRA driver and the device plugin must not serve GPUs on the same node.",
        ),
        tuple(made),
    )


def _dumped(content: Object) -> str:
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=False)


def _sources(component: Component) -> tuple[str, ...]:
    return tuple(f"Source: {one}" for one in component.sources)
