"""List the GPUs of an inventory's hosts over SSH, and match each host with its node of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Union

from gpuprov.core.commands import NOT_FOUND, Completed
from gpuprov.core.system import System
from gpuprov.fleet.options import Options
from gpuprov.fleet.target import HostTarget
from gpuprov.kubernetes.cluster import Node
from gpuprov.kubernetes.gpu_list import GpuList, parse_list
from gpuprov.wire.errors import GpuprovError

_SMI = ("nvidia-smi", "-L")
_SECONDS = 120


@dataclass(frozen=True)
class NoList:
    """A host whose list is unavailable, and the reason."""

    error: GpuprovError


HostList = Union[GpuList, NoList]


def host_lists(targets: Sequence[HostTarget], options: Options) -> Mapping[str, HostList]:
    """Return the output of `nvidia-smi -L` on each host, by the host's name; many hosts at a time."""
    if not targets:
        return {}
    with ThreadPoolExecutor(max_workers=max(1, min(options.forks, len(targets)))) as pool:
        found = pool.map(lambda target: _host_list(target, options), targets)
        return {target.name: one for target, one in zip(targets, found)}


def _host_list(target: HostTarget, options: Options) -> HostList:
    from gpuprov.fleet.remote_system import RemoteSystem
    from gpuprov.fleet.ssh import connected

    try:
        if target.connection == "local":
            return listed(System().run(_SMI, timeout=_SECONDS))
        with connected(target, options) as connection:
            return listed(RemoteSystem(connection, target).run(_SMI, timeout=_SECONDS))
    except GpuprovError as error:
        return NoList(error)


def listed(done: Completed) -> HostList:
    """Return the list in what nvidia-smi did on a host."""
    found = parse_list(done.stdout) if done.ok else None
    if found is not None:
        return found
    missing = done.returncode == NOT_FOUND
    what = "nvidia-smi is not installed on the host" if missing else "the host's own nvidia-smi lists no GPU"
    return NoList(GpuprovError(what, done.evidence(), "gpuprov verify --hosts INVENTORY"))


def node_of(target: HostTarget, nodes: Iterable[Node]) -> Node | None:
    """Return the node of a host: by its name, else by its address, else by the first part of its name."""
    nodes = tuple(nodes)
    address = target.address or target.name
    tests: tuple[Callable[[Node], bool], ...] = (
        lambda node: node.name == target.name,
        lambda node: address in node.addresses or target.name in node.addresses,
        lambda node: node.name.partition(".")[0] == target.name.partition(".")[0],
    )
    for test in tests:
        found = [node for node in nodes if test(node)]
        if len(found) == 1:
            return found[0]
    return None
