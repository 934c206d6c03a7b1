"""The proof that a cluster's pods have its nodes' GPUs: a pod on each node, all at once, removed however it ends."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from gpuprov.agent.result import HostResult, HostSink
from gpuprov.kubernetes.cluster import (
    Node,
    PodState,
    items,
    next_page,
    parse_events,
    parse_node,
    parse_pod,
    uid_of,
    used_resources,
)
from gpuprov.kubernetes.kubectl import Kubectl, Stop
from gpuprov.kubernetes.manifest import RUNTIME_CLASS, Object, confined, confined_pod, namespace
from gpuprov.kubernetes.node_checks import ALL, FREE, REMOVED, HostList, NodeChecks, ended, not_started, parse_list
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.words import counted

CONTAINER = "nvidia-smi"
NAME = "gpuprov-verify"
INSTANCE = "app.kubernetes.io/instance"


def labels(run: str) -> dict[str, str]:
    """Return the labels of all that one verification creates; `run` is its random name."""
    return {"app.kubernetes.io/name": NAME, "app.kubernetes.io/managed-by": "gpuprov", INSTANCE: run}


def verification_pod(
    name: str, node: str, *, run: str, image: str, resources: Mapping[str, int], by_class: bool, seconds: float
) -> Object:
    """Return the pod for one node. It ends by itself after `seconds`, so that a lost one gives its GPUs back.

    `by_class`: the cluster has the runtime class. The scheduler places the pod, as it places a DaemonSet's: a node is
    never given more than it has. Every taint is tolerated, so that a cordoned node can be proved before it is used.
    """
    counts = {key: str(count) for key, count in resources.items() if count}
    place = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels(run)},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": math.ceil(seconds),
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"runtimeClassName": RUNTIME_CLASS} if by_class else {}),
            "securityContext": confined_pod(),
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [place]}}
            },
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": CONTAINER,
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["nvidia-smi", "-L"],
                    # Namespaces with a quota take no pod that names none.
                    "resources": {
                        "requests": {"cpu": "50m", "memory": "64Mi"},
                        "limits": {"cpu": "1", "memory": "512Mi", **counts},
                    },
                    "securityContext": confined(),
                }
            ],
        },
    }


_MOST_LOG = 256 << 10
# A new namespace gets its service account a moment later; until then pods are refused.
_ACCOUNT_SECONDS = 30
# The uid of an object whose creation was asked for, until the answer is there.
_UNKNOWN = "unknown"
_NO_ACCOUNT = "serviceaccount"
# kubelets confirm the end of a pod; a node that is down does not.
_REMOVAL_SECONDS = 60
_MOST_FAILED_LOOKS = 5
# Waiting can't resolve these: a person must change something first.
_HOPELESS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
             "CreateContainerError", "RunContainerError", "CrashLoopBackOff")  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What a verification asks of the cluster. `namespace`: empty for one of its own. `interval`: seconds."""

    image: str
    namespace: str = ""
    pod_seconds: float = 300.0
    interval: float = 1.0


@dataclass
class Trial:
    """The pods of one verification. `now` and `stop` are clock and Ctrl-C."""

    kubectl: Kubectl
    wanted: Wanted
    stop: Stop
    by_class: bool = True
    now: Callable[[], float] = time.monotonic
    run: str = field(default_factory=lambda: secrets.token_hex(5))
    namespace_uid: str = ""
    # Pod → its uid, empty where the API server's answer to its creation did not arrive.
    pods: dict[str, str] = field(default_factory=dict)

    @property
    def namespace(self) -> str:
        return self.wanted.namespace or f"{NAME}-{self.run}"

    @property
    def _pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def open(self) -> None:
        """Create the namespace, unless one was named. Raises GpuprovError."""
        if not self.wanted.namespace:
            thing = namespace(self.namespace, level="restricted", labels=labels(self.run))
            self.namespace_uid = _UNKNOWN
            doing = f"create the namespace {self.namespace}"
            try:
                created = self.kubectl.create("/api/v1/namespaces", thing, doing=doing)
                self.namespace_uid = uid_of(created) or _UNKNOWN
            except GpuprovError as error:
                self.namespace_uid = "" if _is_refusal(error) else _UNKNOWN
                raise

    def start(self, number: int, node: str, resources: Mapping[str, int]) -> str:
        """Create the pod for a node and return its name. Raises GpuprovError."""
        name = f"{NAME}-{self.run}-{number}"
        pod = verification_pod(
            name, node, run=self.run, image=self.wanted.image, resources=resources, by_class=self.by_class,
            seconds=self.wanted.pod_seconds + _REMOVAL_SECONDS,
        )  # fmt: skip
        deadline = self.now() + _ACCOUNT_SECONDS
        while True:
            self.pods[name] = ""
            try:
                answer = self.kubectl.create(self._pods_path, pod, doing=f"create the pod {self.namespace}/{name}")
            except GpuprovError as error:
                if _is_refusal(error):
                    del self.pods[name]
                early = not self.wanted.namespace and _NO_ACCOUNT in error.problems[0].evidence
                if not early or self.now() > deadline or self.stop.is_asked:
                    raise
                self.stop.wait(self.wanted.interval)
                continue
            self.pods[name] = uid_of(answer)
            return name

    def watch(self, names: Collection[str]) -> Iterator[PodState]:
        """Yield each pod once: when it has ended or can't start; those that wait at the deadline then.

        Ends early if a stop is requested. Raises GpuprovError if the API server stops responding.
        """
        waiting = set(names)
        deadline = self.now() + self.wanted.pod_seconds
        failed = 0
        states: dict[str, PodState] = {}
        while waiting and not self.stop.is_asked:
            try:
                states = {pod.name: pod for pod in self._ours()}
                failed = 0
            except GpuprovError:
                failed += 1
                if failed >= _MOST_FAILED_LOOKS:
                    raise
            late = self.now() > deadline
            for name in sorted(waiting):
                state = states.get(name) or PodState(name, "", "removed" if not failed else "unknown")
                if late or state.is_done or state.waiting in _HOPELESS or state.phase == "removed":
                    waiting.discard(name)
                    yield state
            if waiting:
                self.stop.wait(self.wanted.interval)

    def log(self, name: str) -> str:
        """Return the pod's output. Raises GpuprovError."""
        path = f"{self._pods_path}/{name}/log?container={CONTAINER}&limitBytes={_MOST_LOG}"
        return self.kubectl.text(path, doing=f"read the log of {self.namespace}/{name}")[:_MOST_LOG]

    def events(self, name: str) -> tuple[str, ...]:
        """Return the last events of a pod; none where they can't be read."""
        selector = quote(f"involvedObject.name={name}")
        path = f"/api/v1/namespaces/{self.namespace}/events?limit=50&fieldSelector={selector}"
        with contextlib.suppress(GpuprovError):
            return parse_events(self.kubectl.get(path, doing="read events"))
        return ()

    def close(self) -> Mapping[str, Problem]:
        """Delete the pods, and the namespace if the run made it; return pod → why its removal is not confirmed.

        Under the empty name: what holds for all of them, such as a namespace that is still there.
        """
        problems: dict[str, Problem] = {}
        if not self.pods and not self.namespace_uid:
            return problems
        try:
            alive = {pod.name: pod.uid for pod in self._ours()} if self.pods else {}
        except GpuprovError:
            alive = {name: uid for name, uid in self.pods.items() if uid}
        for name, uid in alive.items():
            self._delete(f"{self._pods_path}/{name}", uid, f"pod {self.namespace}/{name}", name, problems)
        if self.namespace_uid:
            self._delete_namespace(problems)
        if not problems and (self.pods or self.namespace_uid):
            self._await_removal(problems)
        return problems

    def _ours(self) -> Iterator[PodState]:
        """Return the existing pods that this run created. Raises GpuprovError."""
        selector = quote(f"{INSTANCE}={self.run}", safe="")
        path = f"{self._pods_path}?labelSelector={selector}"
        answer = self.kubectl.find(path, doing=f"look at the test pods in {self.namespace}")
        found = filter(None, map(parse_pod, items(answer)))
        # Another one of this name is not ours.
        return (pod for pod in found if pod.uid and self.pods.get(pod.name, "none") in ("", pod.uid))

    def _delete(self, path: str, uid: str, what: str, key: str, problems: dict[str, Problem]) -> None:
        try:
            self.kubectl.delete(path, uid, doing=f"remove the {what}")
        except GpuprovError as error:
            problems[key] = error.problems[0]

    def _delete_namespace(self, problems: dict[str, Problem]) -> None:
        path, what = f"/api/v1/namespaces/{self.namespace}", f"namespace {self.namespace}"
        if self.namespace_uid == _UNKNOWN:
            with contextlib.suppress(GpuprovError):
                self.namespace_uid = uid_of(self.kubectl.find(path, doing=f"look for the {what}"))
        if self.namespace_uid and self.namespace_uid != _UNKNOWN:
            self._delete(path, self.namespace_uid, what, "", problems)

    def _await_removal(self, problems: dict[str, Problem]) -> None:
        """Wait until everything deleted is gone; add what still exists, or can't be seen."""
        deadline = self.now() + _REMOVAL_SECONDS
        failed = 0
        while True:
            try:
                left = self._left()
                if not left or self.now() > deadline:
                    break
            except GpuprovError as error:
                failed += 1
                if failed >= _MOST_FAILED_LOOKS:
                    problems[""] = error.problems[0]
                    return
            self.stop.pause(self.wanted.interval)
        seen = f"its removal was accepted, and was not finished in {_REMOVAL_SECONDS} s: the node may be down"
        for key, (what, show) in left.items():
            problems[key] = Problem(f"the {what} is still there", seen, f"kubectl get {show}")

    def _left(self) -> Mapping[str, tuple[str, str]]:
        """Return what is still there, and the words with which kubectl shows it. Raises GpuprovError."""
        space = f"namespace {self.namespace}"
        if self.namespace_uid:
            found = self.kubectl.find(f"/api/v1/namespaces/{self.namespace}", doing=f"look for the {space}")
            return {"": (space, space)} if uid_of(found) == self.namespace_uid else {}
        return {
            pod.name: (f"pod {self.namespace}/{pod.name}", f"pod -n {self.namespace} {pod.name}")
            for pod in self._ours()
        }


def _is_refusal(error: GpuprovError) -> bool:
    """Say whether the API server has answered that it did not create the object."""
    return "Error from server (" in error.problems[0].evidence and error.exit_code == ExitCode.FAILED


_PAGE = 200
_MOST_NODES = 20_000


def all_nodes(kubectl: Kubectl) -> tuple[Node, ...]:
    """Return the cluster's nodes. Raises GpuprovError."""
    nodes: list[Node] = []
    token = ""
    while len(nodes) < _MOST_NODES:
        more = f"&continue={quote(token, safe='')}" if token else ""
        answer = kubectl.get(f"/api/v1/nodes?limit={_PAGE}{more}", doing="list the cluster's nodes")
        page = [node for node in map(parse_node, items(answer)) if node is not None]
        nodes += page
        token = next_page(answer)
        if not token or not page:
            break
    return tuple(nodes)


def verify_nodes(
    kubectl: Kubectl, chosen: Sequence[tuple[Node, HostList | None]], wanted: Wanted, stop: Stop, sink: HostSink
) -> tuple[HostResult, ...]:
    """Verify nodes, each with what its host lists if that was asked; return one result for each, in their order."""
    nodes = [NodeChecks(node, host, sink) for node, host in chosen]
    able = [one for one in nodes if one.offers()]
    trial = Trial(kubectl, wanted, stop)
    stopped: Problem | None = None
    try:
        if able and not stop.is_asked:
            _try(trial, able)
    except GpuprovError as error:
        stopped = error.problems[0]
    finally:
        left = trial.close()
    for one in able:
        _conclude(one, stopped or _BY_CTRL_C, left)
    return tuple(one.result() for one in nodes)


_BY_CTRL_C = Problem("stopped before the test pod had ended", "", "run the same command again")


def _try(trial: Trial, able: Sequence[NodeChecks]) -> None:
    """Run a pod on each node and check what it sees. Raises GpuprovError if nothing can run."""
    class_path = f"/apis/node.k8s.io/v1/runtimeclasses/{RUNTIME_CLASS}"
    trial.by_class = trial.kubectl.find(class_path, doing="look for the runtime class nvidia") is not None
    asked = [(one, resources) for one in able if (resources := _resources(trial.kubectl, one))]
    if asked:
        trial.open()
    running: dict[str, NodeChecks] = {}
    for number, (one, resources) in enumerate(asked):
        if trial.stop.is_asked:
            return
        one.note(f"starting a pod in {trial.namespace}")
        try:
            one.pod = trial.start(number, one.node.name, resources)
            running[one.pod] = one
        except GpuprovError as error:
            one.fail(one.pod_check, error.problems[0])
    for state in trial.watch(running):
        _look(trial, running[state.name], state)


def _resources(kubectl: Kubectl, one: NodeChecks) -> Mapping[str, int]:
    """Return what the node's pod asks for: all that no other pod holds; one of each if GPUs are shared."""
    path = f"/api/v1/pods?limit=1000&fieldSelector={quote(f'spec.nodeName={one.node.name}', safe='')}"
    try:
        used = used_resources(kubectl.get(path, doing="look at the node's pods"))
    except GpuprovError:
        used = {}  # it may be forbidden, and the scheduler knows
    free = {name: count - used.get(name, 0) for name, count in one.node.offered.items() if count > used.get(name, 0)}
    one.whole = sum(free.values()) == one.node.count and one.node.replicas == 1
    if not free:
        one.skip((FREE, REMOVED), f"in use by pods: {counted(one.node.count, 'GPU')}")
    return dict.fromkeys(free, 1) if one.node.replicas > 1 else free


def _look(trial: Trial, one: NodeChecks, state: PodState) -> None:
    """Check what a pod printed, or say why it did not."""
    name = one.pod_check
    if not state.is_done:
        one.fail(name, not_started(state, trial.events(state.name), trial.wanted.pod_seconds))
        return
    try:
        printed = trial.log(state.name)
    except GpuprovError as error:
        if state.phase == "Succeeded":
            one.fail(name, error.problems[0])
            return
        printed = ""  # a container that never started has none
    found = parse_list(printed) if state.phase == "Succeeded" else None
    if found is None:
        one.fail(name, ended(state, trial.events(state.name), printed, by_class=trial.by_class))
    else:
        one.compare(found)


def _conclude(one: NodeChecks, stopped: Problem, left: Mapping[str, Problem]) -> None:
    """Emit the checks that a node has not had yet, and whether its pod is gone; `left`: see Trial.close."""
    if not {ALL, FREE} & one.done:
        one.fail(one.pod_check, stopped)
    if REMOVED in one.done:
        return
    if problem := left.get(one.pod) or left.get(""):
        one.fail(REMOVED, problem)
    elif one.pod:
        one.passed(REMOVED)
    else:
        one.skip((REMOVED,), "no pod was created")
