"""`gpuprov verify --kubernetes`: a pod on each node proves that pods have its GPUs. All run at once and are removed."""

import contextlib
import math
import secrets
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from urllib.parse import quote

from gpuprov.agent.result import HostResult, HostSink, Recorder
from gpuprov.fleet.command import conclude, inventory_of, make_console, progress_display, require_writable
from gpuprov.fleet.grouping import listed
from gpuprov.fleet.history import Run, inventory_names, moment, new_identifier
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import Options
from gpuprov.fleet.run import signals_handled
from gpuprov.fleet.standard_streams import say
from gpuprov.kubernetes import cluster, node_checks
from gpuprov.kubernetes.cluster import Kubectl, Node, PodState
from gpuprov.kubernetes.manifest import RUNTIME_CLASS, Object, objects, require_namespace
from gpuprov.kubernetes.node_checks import HostList, NodeChecks
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, UsageError
from gpuprov.protocol.events import Finished
from gpuprov.protocol.words import counted

NAME = "gpuprov-verify"
INSTANCE = "app.kubernetes.io/instance"
Chosen = tuple[Node, "HostList | None"]


@dataclass(frozen=True)
class Wanted:
    """What a verification asks of the cluster. `image`: empty for the default. `interval`: seconds between looks.

    `removal_seconds`: for kubelets to confirm the end of a pod; a node that is down does not.
    """

    image: str = ""
    namespace: str = "default"
    pod_seconds: float = 300.0
    interval: float = 1.0
    removal_seconds: float = 60.0


def verification_pod(
    name: str, node: str, *, run: str, image: str, resources: Mapping[str, int], by_class: bool, seconds: float
) -> Object:
    """Return the pod for one node. It ends by itself after `seconds`, so that a lost one gives its GPUs back.

    `by_class`: the cluster has the runtime class. The scheduler places the pod, as it places a DaemonSet's: a node is
    never given more than it has. Every taint is tolerated, so that a cordoned node can be proved before it is used.
    """
    made: Object = objects()["test-pod"]
    labels = {"app.kubernetes.io/name": NAME, "app.kubernetes.io/managed-by": "gpuprov", INSTANCE: run}
    made["metadata"] = {"name": name, "labels": labels}
    place = {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]}
    made["spec"] |= {
        "activeDeadlineSeconds": math.ceil(seconds),
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": place}},
        "tolerations": [{"operator": "Exists"}],
    }
    if not by_class:
        del made["spec"]["runtimeClassName"]
    (container,) = made["spec"]["containers"]
    container["image"] = image or container["image"]
    del container["resources"]["limits"]["nvidia.com/gpu"]
    container["resources"]["limits"] |= {key: str(count) for key, count in resources.items()}
    return made


_MOST_LOG = 256 << 10
_MOST_LOOKS = 5
# Waiting can't resolve these: a person must change something first.
_HOPELESS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
             "CreateContainerError", "RunContainerError", "CrashLoopBackOff")  # fmt: skip


@dataclass
class Trial:
    """The pods of one verification, by the label of its random name. `stopped`: whether a signal ends it."""

    kubectl: Kubectl
    wanted: Wanted
    stopped: Callable[[], bool]
    by_class: bool = True
    run: str = field(default_factory=lambda: secrets.token_hex(5))
    # The names of pods that exist, or whose creation the API server has not answered.
    pods: set[str] = field(default_factory=set)

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.wanted.namespace}/pods"

    @property
    def _ours(self) -> str:
        return f"{self._path}?labelSelector={quote(f'{INSTANCE}={self.run}', safe='')}"

    def start(self, name: str, node: str, resources: Mapping[str, int]) -> None:
        """Create the pod for a node. Raises GpuprovError."""
        pod = verification_pod(
            name, node, run=self.run, image=self.wanted.image, resources=resources, by_class=self.by_class,
            seconds=self.wanted.pod_seconds + self.wanted.removal_seconds,
        )  # fmt: skip
        self.pods.add(name)
        try:
            self.kubectl.create(self._path, pod, doing=f"create the pod {self.wanted.namespace}/{name}")
        except GpuprovError as error:
            # The API server's answer: it did not create the pod.
            if "Error from server (" in error.problems[0].evidence and error.exit_code == ExitCode.FAILED:
                self.pods.discard(name)
            raise

    def watch(self, names: Collection[str]) -> Iterator[PodState]:
        """Yield each pod once: when it has ended or can't start; those that wait at the deadline then.

        Ends early if a stop is requested. Raises GpuprovError if the API server stops responding.
        """
        waiting = set(names)
        deadline = time.monotonic() + self.wanted.pod_seconds
        while waiting and not self.stopped():
            states = self._states()
            late = time.monotonic() > deadline
            for name in sorted(waiting):
                state = states.get(name) or PodState(name, "removed")
                if late or state.is_done or state.waiting in _HOPELESS or state.phase == "removed":
                    waiting.discard(name)
                    yield state
            if waiting and not self.stopped():
                time.sleep(self.wanted.interval)

    def log(self, name: str) -> str:
        """Return the pod's output. Raises GpuprovError."""
        path = f"{self._path}/{name}/log?container=nvidia-smi&limitBytes={_MOST_LOG}"
        return self.kubectl.text(path, doing=f"read the log of {self.wanted.namespace}/{name}")[:_MOST_LOG]

    def events(self, name: str) -> tuple[str, ...]:
        """Return the last events of a pod; none where they can't be read."""
        selector = quote(f"involvedObject.name={name}")
        path = f"/api/v1/namespaces/{self.wanted.namespace}/events?limit=50&fieldSelector={selector}"
        with contextlib.suppress(GpuprovError):
            return cluster.parse_events(self.kubectl.get(path, doing="read events"))
        return ()

    def close(self) -> Mapping[str, Problem]:
        """Delete the pods and wait until they are gone; return pod → why its removal is not confirmed."""
        deadline = time.monotonic() + self.wanted.removal_seconds
        while self.pods:
            try:
                self.kubectl.delete(self._ours, doing=f"remove the test pods in {self.wanted.namespace}")
                left = self._states()
            except GpuprovError as error:
                return dict.fromkeys(self.pods, error.problems[0])
            if not left:
                break
            if time.monotonic() > deadline:
                limit = f"{self.wanted.removal_seconds:g} s"
                seen = f"its removal was accepted, and was not finished in {limit}: the node may be down"
                place = self.wanted.namespace
                return {
                    name: Problem(f"the pod {place}/{name} is still there", seen, f"kubectl get pod -n {place} {name}")
                    for name in left
                }
            time.sleep(self.wanted.interval)
        return {}

    def _states(self, looks: int = _MOST_LOOKS) -> Mapping[str, PodState]:
        """Return the run's pods by name; repeats a look that fails. Raises GpuprovError after so many."""
        try:
            found = self.kubectl.get(self._ours, doing=f"look at the test pods in {self.wanted.namespace}")
        except GpuprovError:
            if looks == 1:
                raise
            time.sleep(self.wanted.interval)
            return self._states(looks - 1)
        return {pod.name: pod for pod in filter(None, map(cluster.parse_pod, cluster.items(found)))}


def all_nodes(kubectl: Kubectl) -> tuple[Node, ...]:
    """Return the cluster's nodes. Raises GpuprovError."""
    found = kubectl.get("/api/v1/nodes", doing="list the cluster's nodes")
    return tuple(filter(None, map(cluster.parse_node, cluster.items(found))))


def verify_nodes(
    kubectl: Kubectl, chosen: Sequence[Chosen], wanted: Wanted, stopped: Callable[[], bool], sink: HostSink
) -> tuple[HostResult, ...]:
    """Verify nodes, each with what its host lists if that was asked; return one result for each, in their order."""
    nodes = [NodeChecks(node, host, sink) for node, host in chosen]
    able = [one for one in nodes if one.offers()]
    trial = Trial(kubectl, wanted, stopped)
    unfinished = Problem("stopped before the test pod had ended", "", "run the same command again")
    try:
        if able and not stopped():
            _try(trial, able)
    except GpuprovError as error:
        unfinished = error.problems[0]
    finally:
        left = trial.close()
    for one in able:
        if not {node_checks.ALL, node_checks.FREE} & one.done:
            one.fail(one.pod_check, unfinished)
        one.removed(left.get(one.pod), created=one.pod in trial.pods)
    return tuple(one.result() for one in nodes)


def _try(trial: Trial, able: Sequence[NodeChecks]) -> None:
    """Run a pod on each node and check what it sees. Raises GpuprovError if nothing can run."""
    class_path = f"/apis/node.k8s.io/v1/runtimeclasses/{RUNTIME_CLASS}"
    trial.by_class = trial.kubectl.has(class_path, doing="look for the runtime class nvidia")
    running: dict[str, NodeChecks] = {}
    for number, one in enumerate(able):
        resources = _resources(trial.kubectl, one)
        if trial.stopped():
            return
        if not resources:
            continue
        one.note(f"starting a pod in {trial.wanted.namespace}")
        one.pod = f"{NAME}-{trial.run}-{number}"
        try:
            trial.start(one.pod, one.node.name, resources)
            running[one.pod] = one
        except GpuprovError as error:
            one.fail(one.pod_check, error.problems[0])
    for state in trial.watch(running):
        _look(trial, running[state.name], state)


def _resources(kubectl: Kubectl, one: NodeChecks) -> Mapping[str, int]:
    """Return what the node's pod asks for: all that no other pod holds; one of each if GPUs are shared."""
    path = f"/api/v1/pods?limit=1000&fieldSelector={quote(f'spec.nodeName={one.node.name}', safe='')}"
    try:
        used = cluster.used_resources(kubectl.get(path, doing="look at the node's pods"))
    except GpuprovError:
        used = {}  # it may be forbidden, and the scheduler knows
    free = {name: count - used.get(name, 0) for name, count in one.node.offered.items() if count > used.get(name, 0)}
    one.whole = sum(free.values()) == one.node.count and one.node.replicas == 1
    if not free:
        one.skip((node_checks.FREE, node_checks.REMOVED), f"in use by pods: {counted(one.node.count, 'GPU')}")
    return dict.fromkeys(free, 1) if one.node.replicas > 1 else free


def _look(trial: Trial, one: NodeChecks, state: PodState) -> None:
    name = one.pod_check
    if not state.is_done:
        one.fail(name, node_checks.not_started(state, trial.events(state.name), trial.wanted.pod_seconds))
        return
    try:
        printed = trial.log(state.name)
    except GpuprovError as error:
        if state.phase == "Succeeded":
            one.fail(name, error.problems[0])
            return
        printed = ""  # a container that never started has none
    found = node_checks.parse_list(printed) if state.phase == "Succeeded" else ()
    if found:
        one.compare(found)
    else:
        one.fail(name, node_checks.ended(state, trial.events(state.name), printed, by_class=trial.by_class))


# -- the command -----------------------------------------------------------------------------------------------------


def verify_cluster(options: Options, kubectl: Kubectl, wanted: Wanted) -> ExitCode:
    """Verify a cluster's nodes and print the results. Raises GpuprovError for an invalid call."""
    _require_sense(options, wanted)
    targets = inventory_of(options).hosts if options.hosts else ()
    now, begun = time.time(), time.monotonic()
    console = make_console()
    ended_by: list[ExitCode] = []

    def stop(number: int) -> None:
        if not ended_by:
            ended_by.append(ExitCode(128 + number))
            say("stopping: the test pods are being removed", err=True)

    with signals_handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), stop)):
        try:
            chosen, absent = _chosen(all_nodes(kubectl), targets, options, lambda: bool(ended_by))
        except GpuprovError as error:
            if error.exit_code == ExitCode.USAGE:
                raise
            chosen, absent = (), ((kubectl.context or "cluster", error),)
        hosts = [*(name for name, _ in absent), *(node.name for node, _ in chosen)]
        with progress_display(options, console, hosts) as progress:
            results: list[HostResult] = []
            for name, refused in absent:
                recorder = Recorder(name, progress)
                recorder(Finished(int(refused.exit_code), problems=refused.problems))
                results.append(recorder.result())
            results += verify_nodes(kubectl, chosen, wanted, lambda: bool(ended_by), progress)
    run = Run(
        new_identifier(now), "verify", moment(now), round(time.monotonic() - begun, 1), tuple(results),
        inventory=(*inventory_names(options.hosts), f"cluster {kubectl.context or kubectl.kubeconfig}".rstrip()),
        limit=options.limit, ended_by=ended_by[0] if ended_by else None,
    )  # fmt: skip
    conclude(options, run, targets, "")
    return run.exit_code


def _require_sense(options: Options, wanted: Wanted) -> None:
    require_namespace(wanted.namespace)
    if options.serial or options.canary or options.max_fail:
        raise UsageError("--serial, --canary and --max-fail are not for --kubernetes", "", "leave them out")
    if options.limit and not options.hosts:
        raise UsageError("--limit needs an inventory", "", "add --hosts INVENTORY")
    for file in filter(None, (options.report, options.metrics)):
        require_writable(file)


def _chosen(
    nodes: Sequence[Node], targets: Sequence[HostTarget], options: Options, stopped: Callable[[], bool]
) -> tuple[tuple[Chosen, ...], tuple[tuple[str, GpuprovError], ...]]:
    """Return the nodes to verify with what their hosts list, and the hosts that are no node, with the reason.

    Without an inventory: all nodes with GPUs. Raises GpuprovError if there is none.
    """
    if not targets:
        if chosen := tuple((node, None) for node in nodes if node.has_gpus):
            return chosen, ()
        what = "no node of the cluster offers nvidia.com/gpu: no device plugin has registered"
        seen = f"nodes: {listed(node.name for node in nodes) or 'none'}"
        step = "gpuprov kubernetes manifest | kubectl apply -f -; kubectl label node NODE nvidia.com/gpu.present=true"
        raise GpuprovError(what, seen, step)
    names = {target.name for target in targets}
    pairs = [(target, node_checks.node_of(target, nodes, names)) for target in targets]
    lists = node_checks.host_lists([target for target, node in pairs if node is not None], options, stopped)
    found: dict[str, Chosen] = {node.name: (node, lists[target.name]) for target, node in pairs if node is not None}
    absent = tuple((target.name, _no_node(target, nodes)) for target, node in pairs if node is None)
    return tuple(found.values()), absent


def _no_node(target: HostTarget, nodes: Sequence[Node]) -> GpuprovError:
    seen = f"{' '.join(filter(None, (target.name, target.address)))}; nodes: {listed(node.name for node in nodes)}"
    step = "kubectl get nodes -o wide; join the host to the cluster, or leave it out with --limit"
    return GpuprovError("no node of the cluster has the host's name or address", seen, step)
