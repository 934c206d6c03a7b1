"""The checks of a node: what it offers, what its pod saw against its host's list, and why a pod did not run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Union

from gpuprov.agent.result import HostResult, HostSink, Recorder
from gpuprov.checks.outcome import all_gpus_check
from gpuprov.core.commands import NOT_FOUND, Completed, first_match
from gpuprov.core.system import System
from gpuprov.fleet.grouping import listed
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import Options
from gpuprov.kubernetes.cluster import Node, PodState
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import CheckDone, Finished, Note
from gpuprov.protocol.words import counted, one_line

_GPU = re.compile(r"GPU \d{1,4}: .{1,200}? \(UUID: (GPU-[0-9A-Za-z-]{1,64})\)\s*")
_MIG = re.compile(r"\s+MIG \S{1,40}\s+Device\s+\d{1,4}: \(UUID: (MIG-[0-9A-Za-z/-]{1,120})\)\s*")
_MOST_LINES = 2000


# What a host lists, or why it could not be asked.
HostList = Union[tuple[str, ...], GpuprovError]


def parse_list(text: str) -> tuple[str, ...]:
    """Return the devices of `nvidia-smi -L` that containers can be given: a GPU's UUID, or those of its MIG devices.

    Empty if the text is no such list: nvidia-smi prints at least one GPU, or an error.
    """
    gpus: list[tuple[str, list[str]]] = []
    for line in text.splitlines()[:_MOST_LINES]:
        if found := _GPU.fullmatch(line):
            gpus.append((found[1], []))
        elif gpus and (found := _MIG.fullmatch(line)):
            gpus[-1][1].append(found[1])
    return tuple(device for gpu, parts in gpus for device in (parts or [gpu]))


_SMI = ("nvidia-smi", "-L")
_SECONDS = 120


def host_lists(
    targets: Sequence[HostTarget], options: Options, stopped: Callable[[], bool] = lambda: False
) -> Mapping[str, HostList]:
    """Return the output of `nvidia-smi -L` on each host, by the host's name; many hosts at a time.

    Once `stopped`, no further host is asked.
    """
    from gpuprov.fleet.agent_run import RemoteSystem
    from gpuprov.fleet.ssh import connected

    def ask(target: HostTarget) -> HostList:
        if stopped():
            return GpuprovError("the host was not asked", "the run was stopped before", "run the same command again")
        try:
            if target.connection == "local":
                return host_list(System().run(_SMI, timeout=_SECONDS))
            with connected(target, options) as connection:
                return host_list(RemoteSystem(connection, target).run(_SMI, timeout=_SECONDS))
        except GpuprovError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, min(options.forks, len(targets)))) as pool:
        return {target.name: one for target, one in zip(targets, pool.map(ask, targets))}


def host_list(done: Completed) -> HostList:
    """Return the list in what nvidia-smi did on a host."""
    if done.ok and (found := parse_list(done.stdout)):
        return found
    missing = done.returncode == NOT_FOUND
    what = "nvidia-smi is not installed on the host" if missing else "the host's own nvidia-smi lists no GPU"
    return GpuprovError(what, done.evidence(), "gpuprov verify --hosts INVENTORY")


def node_of(target: HostTarget, nodes: Iterable[Node], hosts: Collection[str] = ()) -> Node | None:
    """Return the node of a host: by its name, else by its address, else by the first part of its name.

    Of the hosts gpu1.berlin and gpu1.munich only the first is the node gpu1.berlin.
    """
    nodes = tuple(nodes)
    short = target.name.partition(".")[0]
    address = target.address or target.name
    tests: tuple[Callable[[Node], bool], ...] = (
        lambda node: node.name == target.name,
        lambda node: address in node.addresses or target.name in node.addresses,
        # Not of addresses, which some clusters have as names.
        lambda node: not short.isdecimal() and node.name.partition(".")[0] == short and node.name not in hosts,
    )
    for test in tests:
        found = [node for node in nodes if test(node)]
        if len(found) == 1:
            return found[0]
    return None


_LONGEST = 400
_MOST_SHOWN = 5
_MISSING = re.compile(r"executable file not found|no such file or directory", re.IGNORECASE)


def not_started(state: PodState, events: Iterable[str], seconds: float) -> Problem:
    """Return why a pod did not start; `seconds` is how long it was waited for."""
    lines = tuple(dict.fromkeys(filter(None, (state.waiting, state.reason, *events))))
    evidence = "\n".join(lines) or f"phase {state.phase or 'unknown'}"
    if state.phase == "removed":
        return Problem("the test pod was removed while it ran", "\n".join(lines), "kubectl get events -A")
    if found := first_match("pod", lines):
        return Problem(found[0].what, evidence, found[0].next_step)
    if state.waiting not in ("", "ContainerCreating", "PodInitializing"):
        return Problem(f"the test pod can't start: {state.waiting}", evidence, "kubectl describe node NODE")
    what = f"the test pod did not end within {seconds:g} s"
    return Problem(what, evidence, "kubectl describe node NODE; or wait longer: --pod-timeout SECONDS")


def ended(state: PodState, events: Iterable[str], printed: str, *, by_class: bool) -> Problem:
    """Return why a pod that ended printed no list of GPUs. `by_class`: it had the runtime class nvidia."""
    output = [one_line(line)[:_LONGEST] for line in printed.splitlines() if line.strip()][:_MOST_SHOWN]
    lines = tuple(dict.fromkeys(filter(None, (*output, state.reason, *events))))
    evidence = "\n".join(lines) or "(silent)"
    if state.phase == "Succeeded":
        return Problem("nvidia-smi in the pod lists no GPU", evidence, "gpuprov verify --hosts INVENTORY")
    if state.exit_code == NOT_FOUND or any(map(_MISSING.search, lines)):
        how = "" if by_class else "the cluster has no runtime class nvidia (gpuprov kubernetes manifest); "
        cure = f"{how}look at the node: gpuprov verify --hosts INVENTORY; give an image with glibc: --image IMAGE"
        return Problem("the pod has no nvidia-smi: the runtime gave it no driver files", evidence, cure)
    if state.exit_code is None and (found := first_match("pod", lines)):
        return Problem(found[0].what, evidence, found[0].next_step)
    code = "" if state.exit_code is None else f" with exit code {state.exit_code}"
    return Problem(f"nvidia-smi in the pod failed{code}", evidence, "gpuprov doctor --hosts INVENTORY")


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
    seen: tuple[str, ...] = ()
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._recorder = Recorder(self.node.name, self.sink)

    @property
    def _listed(self) -> tuple[str, ...]:
        return self.host if isinstance(self.host, tuple) else ()

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

    def removed(self, problem: Problem | None, *, created: bool) -> None:
        """Report whether the node's pod is gone; `problem`: why that is not confirmed."""
        if REMOVED in self.done:
            return
        if problem:
            self.fail(REMOVED, problem)
        elif created:
            self.passed(REMOVED)
        else:
            self.skip((REMOVED,), "no pod was created")

    def _emit(self, check: CheckDone) -> None:
        self.done.add(check.name)
        self._recorder(check)

    def result(self) -> HostResult:
        """End the node's verification and return its result."""
        code = ExitCode.FAILED if self.problems else ExitCode.DONE
        good = "pods see this node's GPUs" if self.seen else "no test pod ran on this node"
        summary = "pods do not see what the node has" if self.problems else good
        versions = {**self.node.versions, "gpus": str(len(self._listed or self.seen) or self.node.count)}
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
        on_host = counted(len(self._listed), "GPU") if self._listed else ""
        offered = f"{node.count} allocatable" + (f", {node.replicas} pods share a GPU" if node.replicas > 1 else "")
        if isinstance(self.host, GpuprovError):
            self.fail(OFFERED, self.host.problems[0], "", offered)
        elif not node.count:
            self.fail(OFFERED, _no_plugin(node), on_host, offered)
        elif self._listed and node.count != len(self._listed) * node.replicas:
            self.fail(OFFERED, _other_count(node, self._listed), on_host, offered)
        else:
            compared = "" if self._listed else "; not compared with the host: no --hosts"
            self.passed(OFFERED, on_host, offered + compared)
        if not node.count:
            self.skip((ALL, REMOVED), "requires a device plugin")
        return bool(node.count)

    def compare(self, found: tuple[str, ...]) -> None:
        """Check the list that the pod printed against the host's."""
        self.seen = found
        name, host = self.pod_check, self._listed
        seen = counted(len(found), "GPU") + ("" if self.whole else f" of {self.node.count}")
        if not host:
            self.passed(name, "", f"{seen}: {listed(found)}; not compared with the host")
        elif set(found) - set(host) or (self.whole and set(found) != set(host)):
            what = "the pod sees other GPUs than the host has"
            evidence = f"nvidia-smi -L on the host: {', '.join(host)}\nnvidia-smi -L in the pod: {', '.join(found)}"
            problem = Problem(what, evidence, "gpuprov verify --hosts INVENTORY")
            self.fail(name, problem, ", ".join(host), ", ".join(found))
        else:
            self.passed(name, counted(len(host), "GPU"), f"{seen}, the host's")


def _no_plugin(node: Node) -> Problem:
    seen = ", ".join(f"{name}: {count}" for name, count in node.capacity.items())
    what = "the device plugin on the node reports no healthy GPU" if seen else "no device plugin offers the node's GPUs"
    return Problem(what, f"status.capacity has {seen or 'no nvidia.com/gpu'}", _NO_PLUGIN)


def _other_count(node: Node, host: tuple[str, ...]) -> Problem:
    has = f"the host has {len(host)}" + (f" for {node.replicas} pods each" if node.replicas > 1 else "")
    offered = (f"allocatable {name}: {count}" for name, count in node.offered.items())
    seen = "\n".join((*offered, f"nvidia-smi -L: {', '.join(host)}"))
    step = "kubectl -n kube-system rollout restart ds/nvidia-device-plugin: it counts when it starts"
    return Problem(f"the node offers {counted(node.count, 'GPU')}, and {has}", seen, step)
