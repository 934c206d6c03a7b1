"""The proof that a cluster's pods have its nodes' GPUs: a pod on each node, all at once, removed however it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from gpuprov.fleet.recorder import HostSink
from gpuprov.fleet.result import HostResult
from gpuprov.kubernetes import pod_problems
from gpuprov.kubernetes.cluster import Node, PodState, items, next_page, parse_node, used_resources
from gpuprov.kubernetes.gpu_list import parse_list
from gpuprov.kubernetes.hosts import HostList
from gpuprov.kubernetes.kubectl import Kubectl
from gpuprov.kubernetes.node_checks import ALL, FREE, REMOVED, NodeChecks
from gpuprov.kubernetes.objects import RUNTIME_CLASS
from gpuprov.kubernetes.stop import Stop
from gpuprov.kubernetes.trial import Trial, Wanted
from gpuprov.wire.errors import GpuprovError, Problem
from gpuprov.wire.words import counted

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
        one.fail(name, pod_problems.not_started(state, trial.events(state.name), trial.wanted.pod_seconds))
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
        one.fail(name, pod_problems.ended(state, trial.events(state.name), printed, by_class=trial.by_class))
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
