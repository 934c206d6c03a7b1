"""What a cluster needs for GPU nodes that gpuprov provisions: objects, or values of a chart, and what to type. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from gpuprov.kubernetes import objects
from gpuprov.kubernetes.components import Component, components, mirrored
from gpuprov.kubernetes.objects import Object
from gpuprov.wire.errors import ExitCode, GpuprovError

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
    daemon_set = objects.device_plugin(
        mirrored(plugin.image, choice.image_mirror), place=place, strategy=choice.strategy, mig=choice.mig,
        node_selector=choice.node_selector,
    )  # fmt: skip
    made = [objects.runtime_class(), daemon_set]
    # kube-system is there. The plugin mounts folders of the host, which only `privileged` allows.
    if choice.namespace and place != "kube-system":
        made.insert(0, objects.namespace(place, level="privileged"))
    if choice.test_pod:
        made.append(objects.test_pod(mirrored(known["test"].image, choice.image_mirror)))
    selector = ",".join(f"{key}={value}" for key, value in choice.node_selector.items()) or f"{objects.PRESENT}=true"
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
        "operator": {"runtimeClass": objects.RUNTIME_CLASS},
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
    made = [objects.claim_template(_CLAIM, version=choice.resource_api)]
    if choice.test_pod:
        image = mirrored(known["test"].image, choice.image_mirror)
        made.append(objects.test_pod(image, claim_template=_CLAIM))
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
            f"and the label {objects.PRESENT}=true or Node Feature Discovery's.",
            "The DRA driver and the device plugin must not serve GPUs on the same node.",
        ),
        tuple(made),
    )


def _dumped(content: Object) -> str:
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=False)


def _sources(component: Component) -> tuple[str, ...]:
    return tuple(f"Source: {one}" for one in component.sources)
