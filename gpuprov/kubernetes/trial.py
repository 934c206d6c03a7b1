"""The pods of one verification in a cluster: created, watched, read and removed; deletes only its own objects.

Every object bears the run's random name in its name and in a label, and is deleted by its uid.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from gpuprov.kubernetes import objects
from gpuprov.kubernetes.cluster import PodState, items, parse_events, parse_pod, uid_of
from gpuprov.kubernetes.kubectl import Kubectl
from gpuprov.kubernetes.stop import Stop
from gpuprov.kubernetes.verification_pod import CONTAINER, INSTANCE, NAME, labels, verification_pod
from gpuprov.wire.errors import ExitCode, GpuprovError, Problem

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
            thing = objects.namespace(self.namespace, level="restricted", labels=labels(self.run))
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
