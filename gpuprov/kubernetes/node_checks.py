"""The checks of one node: compare its offer, the host's GPUs, and a pod's view. Pure except for events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gpuprov.fleet.display_text import listed
from gpuprov.fleet.recorder import HostSink, Recorder
from gpuprov.fleet.result import HostResult
from gpuprov.kubernetes.cluster import Node
from gpuprov.kubernetes.gpu_list import GpuList
from gpuprov.kubernetes.hosts import HostList, NoList
from gpuprov.verify.outcome import all_gpus_check
from gpuprov.wire.errors import ExitCode, Problem
from gpuprov.wire.events import CheckDone, Finished, Note
from gpuprov.wire.words import counted

ENGINE = "kubernetes"
READY, OFFERED, ALL = "node ready", f"{ENGINE}, allocatable GPUs", all_gpus_check(ENGINE)
FREE, REMOVED = f"{ENGINE}, free GPUs", "test pod removed"
_NO_PLUGIN = "gpuprov kubernetes manifest | kubectl apply -f -; kubectl -n kube-system logs ds/nvidia-device-plugin"


@dataclass
class NodeChecks:
    """One node under verification; `host` is what the host itself lists, None if it was not asked.

    `whole`: the pod requests everything that the node offers. `pod`: its name, once it was created.
    """

    node: Node
    host: HostList | None
    sink: HostSink
    whole: bool = True
    pod: str = ""
    problems: list[Problem] = field(default_factory=list)
    seen: GpuList | None = None
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._recorder = Recorder(self.node.name, self.sink)

    @property
    def _listed(self) -> GpuList | None:
        return self.host if isinstance(self.host, GpuList) else None

    @property
    def pod_check(self) -> str:
        """The name of the check of the pod's view."""
        return ALL if self.whole else FREE

    def note(self, message: str) -> None:
        """Report the current action to the user."""
        self._recorder(Note(message, "debug"))

    def passed(self, name: str, on_host: str = "", in_container: str = "") -> None:
        """Report a passed check."""
        self._emit(CheckDone(name, "ok", on_host, in_container, engine=ENGINE))

    def skip(self, names: tuple[str, ...], reason: str) -> None:
        """Report each of these checks as skipped, and why."""
        for name in names:
            self._emit(CheckDone(name, "skipped", reason=reason, engine=ENGINE))

    def fail(self, name: str, problem: Problem, on_host: str = "", in_container: str = "") -> None:
        """Report a failed check."""
        self.problems.append(problem)
        self._emit(CheckDone(name, "failed", on_host, in_container, problem.what, ENGINE))

    def _emit(self, check: CheckDone) -> None:
        self.done.add(check.name)
        self._recorder(check)

    def result(self) -> HostResult:
        """End the node's verification and return its result."""
        code = ExitCode.FAILED if self.problems else ExitCode.DONE
        good = "pods see this node's GPUs" if self.seen else "no test pod ran on this node"
        summary = "pods do not see what the node has" if self.problems else good
        gpus = self._listed or self.seen
        versions = {**self.node.versions, "gpus": str(len(gpus.devices) if gpus else self.node.count)}
        self._recorder(Finished(int(code), problems=tuple(self.problems), summary=summary, versions=versions))
        return self._recorder.result(time.monotonic() - self._began)

    def offers(self) -> bool:
        """Check the node's offer; return whether a pod can be tried on it."""
        node = self.node
        if not node.ready:
            self.fail(READY, Problem("the node is not Ready", "", f"kubectl describe node {node.name}"))
            self.skip((OFFERED, ALL, REMOVED), "requires a node that is Ready")
            return False
        self.passed(READY, "", node.versions.get("kubelet", ""))
        on_host = counted(len(self._listed.devices), "GPU") if self._listed else ""
        offered = f"{node.count} allocatable" + (f", {node.replicas} pods share a GPU" if node.replicas > 1 else "")
        if isinstance(self.host, NoList):
            self.fail(OFFERED, self.host.error.problems[0], "", offered)
        elif not node.count:
            self.fail(OFFERED, _no_plugin(node), on_host, offered)
        elif self._listed and node.count != len(self._listed.devices) * node.replicas:
            self.fail(OFFERED, _other_count(node, self._listed), on_host, offered)
        else:
            compared = "" if self._listed else "; not compared with the host: no --hosts"
            self.passed(OFFERED, on_host, offered + compared)
        if not node.count:
            self.skip((ALL, REMOVED), "requires a device plugin")
        return bool(node.count)

    def compare(self, found: GpuList) -> None:
        """Check the list that the pod printed against the host's."""
        self.seen = found
        name, host = self.pod_check, self._listed
        seen = counted(len(found.devices), "GPU") + ("" if self.whole else f" of {self.node.count}")
        if host is None:
            self.passed(name, "", f"{seen}: {listed(found.devices)}; not compared with the host")
        elif set(found.devices) - set(host.devices) or (self.whole and set(found.devices) != set(host.devices)):
            what = "the pod sees other GPUs than the host has"
            evidence = f"nvidia-smi -L on the host: {host}\nnvidia-smi -L in the pod: {found}"
            problem = Problem(what, evidence, "gpuprov verify --hosts INVENTORY")
            self.fail(name, problem, str(host), str(found))
        else:
            self.passed(name, counted(len(host.devices), "GPU"), f"{seen}, the host's")


def _no_plugin(node: Node) -> Problem:
    seen = ", ".join(f"{name}: {count}" for name, count in node.capacity.items())
    what = "the device plugin on the node reports no healthy GPU" if seen else "no device plugin offers the node's GPUs"
    evidence = f"status.capacity has {seen}" if seen else "status.capacity has no nvidia.com/gpu"
    return Problem(what, evidence, _NO_PLUGIN)


def _other_count(node: Node, host: GpuList) -> Problem:
    has = f"the host has {len(host.devices)}" + (f" for {node.replicas} pods each" if node.replicas > 1 else "")
    offered = (f"allocatable {name}: {count}" for name, count in node.offered.items())
    return Problem(
        f"the node offers {counted(node.count, 'GPU')}, and {has}", "\n".join((*offered, f"nvidia-smi -L: {host}")),
        "kubectl -n kube-system rollout restart ds/nvidia-device-plugin: it counts when it starts",
    )  # fmt: skip
