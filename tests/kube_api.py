"""An API server of the tests' own, for a genuine kubectl: nodes, namespaces, pods, logs, events, discovery. No cluster.

It does what a cluster does about the pods of `gpuprov verify --kubernetes`, as a test says: a pod becomes what its
node's `Behaviour` is, at the second look at it. It records each request, so that a test can say what was touched.
"""

import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests import loopback
from tests.loopback import Quiet
from tests.simgpu import cache
from tests.simgpu.debian import fetch

# Debian 13's, named with its suite: a machine may have a newer one from elsewhere installed.
_PACKAGE = ("kubectl/trixie",)
Thing = dict[str, Any]


def kubectl() -> Path:
    """Return Debian 13's kubectl, fetched once."""
    folder = cache.built(
        "kubectl", cache.digest_of(("trixie", *_PACKAGE)), lambda place: fetch(place, "trixie", "main", _PACKAGE)
    )
    return folder / "unpacked/usr/bin/kubectl"


@dataclass
class Behaviour:
    """What becomes of the pod on a node: its end, what it prints, what it waits for, events about it."""

    phase: str = "Succeeded"
    log: str = ""
    waiting: str = ""
    message: str = ""
    exit_code: int = 0
    events: tuple[tuple[str, str], ...] = ()


@dataclass
class Cluster:
    """The cluster: `refuse` maps `VERB resource` to (HTTP code, reason, message); `stays` keeps what is deleted."""

    nodes: list[Thing] = field(default_factory=list)
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    refuse: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    namespaces: tuple[str, ...] = ("default", "kube-system", "given")
    pods: dict[tuple[str, str], Thing] = field(default_factory=dict)
    classes: tuple[str, ...] = ("nvidia",)
    requests: list[tuple[str, str, Thing]] = field(default_factory=list)
    stays: bool = False
    # Called with (verb, path) before each answer.
    before: Any = None
    # What went wrong in here: a defect of the test.
    faults: list[str] = field(default_factory=list)

    def writes(self) -> list[str]:
        """Return `VERB path` of every request that changes something, in their order."""
        return [f"{verb} {path}" for verb, path, _ in self.requests if verb != "GET"]

    def answer(self, verb: str, path: str, query: dict[str, str], body: Thing) -> tuple[int, Any]:
        """Return the HTTP code and the object, or text, for a request."""
        words = path.strip("/").split("/")
        if path in _DISCOVERY:
            return 200, _DISCOVERY[path]
        resource = _resource(words)
        for key in (f"{verb} {resource}", f"{verb} {path}"):
            if key in self.refuse:
                code, reason, message = self.refuse[key]
                return code, _status(code, reason, message)
        found = getattr(self, f"_{resource}", None)
        return found(verb, words, query, body) if found else (404, _status(404, "NotFound", f"{path} not found"))

    def _nodes(self, verb: str, words: list[str], query: dict[str, str], body: Thing) -> tuple[int, Any]:
        return 200, _list(self.nodes)

    def _runtimeclasses(self, verb: str, words: list[str], query: dict[str, str], body: Thing) -> tuple[int, Any]:
        return (
            (200, {"kind": "RuntimeClass"}) if words[-1] in self.classes else (404, _missing("runtimeclasses", words))
        )

    def _pods(self, verb: str, words: list[str], query: dict[str, str], body: Thing) -> tuple[int, Any]:
        if words[2] == "pods":  # of all namespaces
            node = query.get("fieldSelector", "").partition("=")[2]
            return 200, _list(pod for pod in self.pods.values() if pod["spec"].get("nodeName") == node)
        space = words[3]
        if space not in self.namespaces:
            return (200, _list(())) if len(words) == 5 and verb == "GET" else (404, _missing("namespaces", words[:4]))
        if verb == "POST":
            return self._create_pod(space, body)
        if len(words) == 5:
            label, _, value = query["labelSelector"].partition("=")
            found = {
                key: pod for key, pod in self.pods.items()
                if key[0] == space and pod["metadata"].get("labels", {}).get(label) == value
            }  # fmt: skip
            if verb == "DELETE" and not self.stays:
                self.pods = {key: pod for key, pod in self.pods.items() if key not in found}
            return 200, _list(map(self._looked_at, found.values()))
        key = (space, words[5])
        if key not in self.pods:
            return 404, _missing("pods", words)
        return 200, self._behaviour(self.pods[key]).log

    def _create_pod(self, space: str, body: Thing) -> tuple[int, Any]:
        name = body["metadata"]["name"]
        if (space, name) in self.pods:
            return 409, _status(409, "AlreadyExists", f'pods "{name}" already exists')
        made = {**body, "metadata": {**body["metadata"], "namespace": space}, "looks": 0}
        self.pods[space, name] = made
        return 201, made

    def _events(self, verb: str, words: list[str], query: dict[str, str], body: Thing) -> tuple[int, Any]:
        pod = self.pods.get((words[3], query.get("fieldSelector", "").partition("=")[2]))
        events = self._behaviour(pod).events if pod else ()
        return 200, _list({"type": "Warning", "reason": reason, "message": message} for reason, message in events)

    def _looked_at(self, pod: Thing) -> Thing:
        """Return the pod with its status: pending at the first look, then what its node makes of it."""
        pod["looks"] += 1
        behaviour = self._behaviour(pod)
        if pod["looks"] == 1:
            return {**pod, "status": {"phase": "Pending"}}
        state: Thing = {}
        if behaviour.waiting:
            state["waiting"] = {"reason": behaviour.waiting, "message": behaviour.message}
        elif behaviour.phase in ("Succeeded", "Failed"):
            reason = "Completed" if not behaviour.exit_code else "Error"
            state["terminated"] = {"exitCode": behaviour.exit_code, "reason": reason, "message": behaviour.message}
        status: Thing = {"phase": behaviour.phase, "containerStatuses": [{"name": "nvidia-smi", "state": state}]}
        if behaviour.phase == "Pending" and not behaviour.waiting:
            status["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                     "message": behaviour.message}]  # fmt: skip
        return {**pod, "status": status}

    def _behaviour(self, pod: Thing) -> Behaviour:
        terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return self.behaviours[terms["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]]


def node(name: str, gpus: int | None, *, ready: bool = True, **rest: Any) -> Thing:
    """Return a node that offers so many GPUs; None: no device plugin was ever there."""
    resources = {"cpu": "8", **({} if gpus is None else {"nvidia.com/gpu": str(gpus)}), **rest.get("resources", {})}
    info = {
        "osImage": "Debian GNU/Linux 13 (trixie)",
        "kernelVersion": "6.12.0",
        "kubeletVersion": "v1.34.1",
        "containerRuntimeVersion": "containerd://2.1.4",
    }
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.present": "true", **rest.get("labels", {})}},
        "status": {
            "allocatable": resources,
            "capacity": resources,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "addresses": [{"type": "InternalIP", "address": rest.get("address", "10.0.0.9")}],
            "nodeInfo": info,
        },
    }


@contextmanager
def serving(cluster: Cluster, folder: Path, certificate: Path | None = None) -> Iterator[Path]:
    """Serve the cluster meanwhile; yield a kubeconfig for it. `certificate`: PEM with its key, for HTTPS."""

    class Handler(Quiet, BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _sent(self) -> bytes:
            """Return the body; kubectl sends what it reads from a pipe in chunks."""
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content

        def _serve(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            sent = self._sent()
            body = json.loads(sent) if sent else {}
            path = unquote(url.path)
            with lock:
                cluster.requests.append((self.command, path, body))
                if cluster.before:
                    cluster.before(self.command, path)
                try:
                    code, answer = cluster.answer(self.command, path, query, body)
                except Exception as error:
                    cluster.faults.append(f"{self.command} {path}: {error!r}")
                    code, answer = 500, _status(500, "InternalError", repr(error))
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = do_PATCH = _serve  # noqa: N815 (http.server's names)

    lock = threading.Lock()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate else None
    if context and certificate:
        context.load_cert_chain(certificate)
    with loopback.serving(Handler, context) as url:
        yield kubeconfig(folder, url)


def kubeconfig(folder: Path, server: str) -> Path:
    """Write a kubeconfig with one context, `test`."""
    path = folder / "kubeconfig"
    context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
    path.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "test", "contexts": [context],
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {"token": "of-the-tests"}}],
    }))  # fmt: skip
    return path


def _resource(words: list[str]) -> str:
    """Return the resource that a path is about: pods, log as pods, nodes, …"""
    names = [word for word in words if word in ("pods", "events", "nodes", "runtimeclasses")]
    return names[0] if names else ""


def _list(things: Any) -> Thing:
    return {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": list(things)}


def _missing(resource: str, words: list[str]) -> Thing:
    return _status(404, "NotFound", f'{resource} "{words[-1]}" not found')


def _status(code: int, reason: str, message: str) -> Thing:
    status = "Success" if code < 400 else "Failure"
    return {"kind": "Status", "apiVersion": "v1", "status": status, "reason": reason, "message": message, "code": code}


def _resources_of(group_version: str, *kinds: tuple[str, str, bool]) -> Thing:
    verbs = ["create", "delete", "get", "list", "patch"]
    return {
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version,
        "resources": [{"name": name, "singularName": re.sub("s$", "", name), "kind": kind, "namespaced": inside,
                       "verbs": verbs} for name, kind, inside in kinds],
    }  # fmt: skip


def _group(name: str, *versions: str) -> Thing:
    all_versions = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": all_versions, "preferredVersion": all_versions[0]}


_CLAIMS = (("resourceclaimtemplates", "ResourceClaimTemplate", True), ("deviceclasses", "DeviceClass", False))
_CORE = (("pods", "Pod", True), ("namespaces", "Namespace", False), ("nodes", "Node", False), ("events", "Event", True))
_DISCOVERY: dict[str, Thing] = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.1"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
        _group("apps", "v1"), _group("node.k8s.io", "v1"), _group("resource.k8s.io", "v1", "v1beta2", "v1beta1"),
    ]},
    "/api/v1": _resources_of("v1", *_CORE),
    "/apis/apps/v1": _resources_of("apps/v1", ("daemonsets", "DaemonSet", True)),
    "/apis/node.k8s.io/v1": _resources_of("node.k8s.io/v1", ("runtimeclasses", "RuntimeClass", False)),
    **{f"/apis/resource.k8s.io/{version}": _resources_of(f"resource.k8s.io/{version}", *_CLAIMS)
       for version in ("v1", "v1beta2", "v1beta1")},
}  # fmt: skip
