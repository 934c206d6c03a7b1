"""Parse the API server's nodes, pods and events with limits: its text is not trusted. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuprov.protocol.words import one_line

# Whole GPUs, MIG devices of the strategy `mixed`, and both when they are shared under a name of their own.
_RESOURCE = re.compile(r"nvidia\.com/(gpu|mig-[0-9a-z.]{1,40}(\.me)?(\+me)?)(\.shared)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_UID = re.compile(r"[0-9A-Za-z-]{1,64}")
_COUNT = re.compile(r"\d{1,5}")
_LONGEST = 300
_LONGEST_TOKEN = 8192
_MOST_EVENTS = 5
_DONE = ("Succeeded", "Failed")
REPLICAS = "nvidia.com/gpu.replicas"


@dataclass(frozen=True)
class Node:
    """A node: `offered` and `capacity` map nvidia.com's resources to how many there are; `replicas` of shared GPUs."""

    name: str
    ready: bool
    addresses: tuple[str, ...] = ()
    offered: Mapping[str, int] = field(default_factory=dict)
    capacity: Mapping[str, int] = field(default_factory=dict)
    replicas: int = 1
    labelled: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of devices that pods can get."""
        return sum(self.offered.values())

    @property
    def has_gpus(self) -> bool:
        """Whether the node offers GPUs, or a label says that it has GPUs."""
        return bool(self.capacity) or self.labelled


@dataclass(frozen=True)
class PodState:
    """Where a pod stands: `waiting` and `exit_code` are its container's, `reason` the best sentence that it has."""

    name: str
    uid: str
    phase: str
    waiting: str = ""
    reason: str = ""
    exit_code: int | None = None

    @property
    def is_done(self) -> bool:
        return self.phase in _DONE


def text(value: Any, longest: int = _LONGEST) -> str:
    """Return a text of the API server as one line without control characters, cut at `longest`."""
    if not isinstance(value, str):
        return ""
    line = one_line(value[: 4 * longest])
    return line if len(line) <= longest else line[:longest] + " …"


def uid_of(thing: Any) -> str:
    """Return an object's uid, "" if it has no valid one."""
    uid = _map(_map(thing).get("metadata")).get("uid")
    return uid if isinstance(uid, str) and _UID.fullmatch(uid) else ""


def items(answer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list."""
    found = _map(answer).get("items")
    yield from (one for one in (found if isinstance(found, list) else ()) if isinstance(one, Mapping))


def next_page(answer: Any) -> str:
    """Return the token of a list's next page, "" after the last one."""
    token = _map(_map(answer).get("metadata")).get("continue")
    return token if isinstance(token, str) and len(token) < _LONGEST_TOKEN else ""


def parse_node(thing: Mapping[str, Any]) -> Node | None:
    """Return a node, None if its name is invalid."""
    metadata, status = _map(thing.get("metadata")), _map(thing.get("status"))
    name = metadata.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    labels, info = _map(metadata.get("labels")), _map(status.get("nodeInfo"))
    conditions = (one for one in _maps(status.get("conditions")) if one.get("type") == "Ready")
    replicas = labels.get(REPLICAS)
    known = {
        "os": "osImage",
        "kernel": "kernelVersion",
        "kubelet": "kubeletVersion",
        "engine": "containerRuntimeVersion",
    }
    return Node(
        name=name,
        ready=any(one.get("status") == "True" for one in conditions),
        addresses=tuple(text(one.get("address"), 255) for one in _maps(status.get("addresses"))),
        offered=_resources(status.get("allocatable")),
        capacity=_resources(status.get("capacity")),
        replicas=int(replicas) if isinstance(replicas, str) and _COUNT.fullmatch(replicas) and int(replicas) else 1,
        labelled=any(
            labels.get(key) == "true"
            for key in ("nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present")
        ),
        versions={key: shown for key, field in known.items() if (shown := text(info.get(field), 80))},
    )


def used_resources(pods: Any) -> Mapping[str, int]:
    """Return which of nvidia.com's resources the pods of a node use; ended pods do not count."""
    used: dict[str, int] = {}
    for pod in items(pods):
        if _map(pod.get("status")).get("phase") in _DONE:
            continue
        for container in _maps(_map(pod.get("spec")).get("containers")):
            for name, count in _resources(_map(container.get("resources")).get("limits")).items():
                used[name] = used.get(name, 0) + count
    return used


def parse_pod(thing: Mapping[str, Any]) -> PodState | None:
    """Return the state of a pod, None if its name is invalid."""
    metadata, status = _map(thing.get("metadata")), _map(thing.get("status"))
    name = metadata.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    state = _map(next(_maps(status.get("containerStatuses")), {}).get("state"))
    waiting, ended = _map(state.get("waiting")), _map(state.get("terminated"))
    scheduled = (one for one in _maps(status.get("conditions")) if one.get("status") == "False")
    reasons = (
        *(
            _said(one)
            for one in (waiting, ended, status)
            if one.get("reason") not in ("Completed", "ContainerCreating")
        ),
        *(_said(one) for one in scheduled if one.get("type") == "PodScheduled"),
    )
    code = ended.get("exitCode")
    return PodState(
        name, uid_of(thing), text(status.get("phase"), 40), text(waiting.get("reason"), 80),
        next(filter(None, reasons), ""), code if type(code) is int else None,
    )  # fmt: skip


def parse_events(answer: Any) -> tuple[str, ...]:
    """Return the last events as sentences, each once, warnings first."""
    found: dict[str, bool] = {}
    for one in items(answer):
        found[_said(one)] = one.get("type") == "Warning"
    sentences = sorted((line for line in found if line), key=lambda line: not found[line])
    return tuple(sentences[:_MOST_EVENTS])


def _said(thing: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (text(thing.get("reason"), 80), text(thing.get("message")))))


def _resources(value: Any) -> dict[str, int]:
    """Return the quantity of each of nvidia.com's resources; 0 means that a device plugin was there."""
    return {
        key: int(count)
        for key, count in _map(value).items()
        if _RESOURCE.fullmatch(key) and isinstance(count, str) and _COUNT.fullmatch(count)
    }


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: Any) -> Iterator[Mapping[str, Any]]:
    return (one for one in (value if isinstance(value, list) else ()) if isinstance(one, Mapping))
