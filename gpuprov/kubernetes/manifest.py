"""What a cluster needs for GPU nodes that gpuprov provisions: objects, and what to type. Pure."""

import json
import pkgutil
import re
from collections.abc import Mapping
from typing import Any

import yaml

from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import UsageError

Object = dict[str, Any]
RUNTIME_CLASS = "nvidia"


def objects() -> dict[str, Any]:
    """Return objects.yaml, by the names that it gives."""
    return dict(yaml.safe_load(pkgutil.get_data("gpuprov.kubernetes", "objects.yaml") or b""))


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
        return notes + yaml.safe_dump_all(self.objects, explicit_start=True, sort_keys=False, default_flow_style=False)

    def as_json(self) -> str:
        """Return the objects as a List."""
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": self.objects}, indent=2)


def manifest(choice: Choice) -> Manifest:
    """Return the manifest of a choice. Raises GpuprovError (exit code 2) for an invalid one."""
    place = choice.namespace or {"plugin": "kube-system", "dra": "dra-driver-nvidia-gpu"}[choice.mode]
    require_namespace(place)
    selector = ",".join(map("=".join, choice.node_selector.items())) or "nvidia.com/gpu.present=true"
    things = objects()
    image = things["device-plugin"]["spec"]["template"]["spec"]["containers"][0]["image"]
    words = {"place": place, "selector": selector, "version": image.rpartition(":")[2]}
    notes = things["notes"]["dra" if choice.mode == "dra" else choice.strategy].format(**words).splitlines()
    shown = (line for line in notes if choice.test_pod or "pod/gpuprov-test" not in line)
    made, pod = _plugin(choice, place, things), things["test-pod"]
    if choice.mode == "dra":
        made, pod = [things["claim"]], things["dra-test-pod"]
    return Manifest(tuple(shown), (*made, *([pod] if choice.test_pod else ())))


def require_namespace(name: str) -> None:
    """Raise GpuprovError (exit code 2) if this is not a valid namespace name (RFC 1123)."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
        step = "use at most 63 lower-case letters, digits and hyphens, such as gpu-test"
        raise UsageError("this is no name of a namespace", f"--namespace {name[:100]}", step)


def _plugin(choice: Choice, place: str, things: Object) -> list[Object]:
    made: Object = things["device-plugin"]
    made["metadata"]["namespace"] = place
    pod = made["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    strategy = "cdi-cri" if choice.strategy == "cdi" else "envvar"
    variables = {"DEVICE_LIST_STRATEGY": strategy, "MIG_STRATEGY": choice.mig}
    container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    if choice.mig != "none":
        container["env"] += things["mig"]["env"]
        container["securityContext"] = things["mig"]["securityContext"]
    if choice.strategy == "cdi":
        container["env"] += things["cdi"]["env"]
        container["volumeMounts"] += things["cdi"]["volumeMounts"]
        pod["volumes"] += things["cdi"]["volumes"]
    if choice.node_selector:
        del pod["affinity"]
        pod["nodeSelector"] = dict(choice.node_selector)
    things["namespace"]["metadata"]["name"] = place
    # kube-system is there.
    return [*([things["namespace"]] if place != "kube-system" else []), things["runtime-class"], made]
