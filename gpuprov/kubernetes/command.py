"""`gpuprov verify --kubernetes`: which nodes, what their hosts say, the verification, and the report of any run."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence

from gpuprov.agent.result import HostResult, HostSink, Recorder
from gpuprov.fleet.command import conclude, inventory_of, make_console, make_progress, require_writable
from gpuprov.fleet.grouping import listed
from gpuprov.fleet.history import Run, moment, new_identifier
from gpuprov.fleet.options import Options
from gpuprov.fleet.run import signals_handled
from gpuprov.fleet.standard_streams import say
from gpuprov.fleet.target import HostTarget
from gpuprov.kubernetes.cluster import Node
from gpuprov.kubernetes.kubectl import Kubectl
from gpuprov.kubernetes.manifest import require_namespace
from gpuprov.kubernetes.node_checks import HostList, host_lists, node_of
from gpuprov.kubernetes.verify import Wanted, all_nodes, verify_nodes
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.events import Finished

Chosen = tuple[Node, "HostList | None"]


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
        progress = make_progress(options, console, [*(name for name, _ in absent), *(node.name for node, _ in chosen)])
        with progress if isinstance(progress, contextlib.AbstractContextManager) else contextlib.nullcontext():
            results = tuple(_absent(name, error, progress) for name, error in absent)
            results += verify_nodes(kubectl, chosen, wanted, lambda: bool(ended_by), progress)
    run = Run(
        new_identifier(now), "verify", moment(now), round(time.monotonic() - begun, 1), results,
        inventory=options.hosts, limit=options.limit, ended_by=ended_by[0] if ended_by else None,
    )  # fmt: skip
    conclude(options, run, targets, "")
    return run.exit_code


def _require_sense(options: Options, wanted: Wanted) -> None:
    require_namespace(wanted.namespace)
    if options.serial or options.canary or options.max_fail:
        what = "--serial, --canary and --max-fail are not for --kubernetes"
        raise UsageError(what, "", "leave them out")
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
        chosen = tuple((node, None) for node in nodes if node.has_gpus)
        if not chosen:
            raise GpuprovError(
                "no node of the cluster offers nvidia.com/gpu: no device plugin has registered",
                f"nodes: {listed(node.name for node in nodes) or 'none'}",
                "gpuprov kubernetes manifest | kubectl apply -f -; kubectl label node NODE nvidia.com/gpu.present=true",
            )
        return chosen, ()
    pairs = [(target, node_of(target, nodes)) for target in targets]
    members = [target for target, node in pairs if node is not None]
    lists = host_lists(members, options, stopped)
    found: dict[str, Chosen] = {node.name: (node, lists[target.name]) for target, node in pairs if node is not None}
    return tuple(found.values()), tuple(
        (target.name, _no_node(target, nodes)) for target, node in pairs if node is None
    )


def _no_node(target: HostTarget, nodes: Sequence[Node]) -> GpuprovError:
    return GpuprovError(
        "no node of the cluster has the host's name or address",
        f"{' '.join(filter(None, (target.name, target.address)))}; nodes: {listed(node.name for node in nodes)}",
        "kubectl get nodes -o wide; join the host to the cluster, or leave it out with --limit",
    )


def _absent(name: str, error: GpuprovError, sink: HostSink) -> HostResult:
    """Return the result of a node or host that could not be verified at all."""
    recorder = Recorder(name, sink)
    recorder(Finished(int(error.exit_code), problems=error.problems))
    return recorder.result(0.0)
