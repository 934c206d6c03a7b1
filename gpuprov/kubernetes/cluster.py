"""The cluster: the user's own kubectl, and the API server's nodes, pods and events, parsed with limits.

Each call of kubectl has a time limit and bounded output, and a sentence for each way that it fails. Calls use the API's
paths (`--raw`): no discovery, no cache on disk, the same with each release of kubectl. kubectl gets the user's
environment, because kubeconfig files run programs of the user's. A Ctrl-C does not reach it.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuprov.core.commands import Completed, Failure, first_match, run_command
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.words import one_line

_REQUEST_SECONDS = 30
_LONGEST_LINE = 600


@dataclass(frozen=True)
class Kubectl:
    """How kubectl is called: its program, and which cluster of which kubeconfig, empty for kubectl's own choice.

    A call ends after `seconds`; `most` bytes of its output are kept: more than a list of 5,000 nodes, the limit.
    The methods raise GpuprovError, and `doing` completes its first line.
    """

    context: str = ""
    kubeconfig: str = ""
    program: str = "kubectl"
    seconds: float = 40.0
    most: int = 128 << 20

    def get(self, path: str, *, doing: str) -> Any:
        """Return the JSON at a path of the API."""
        text = self.text(path, doing=doing)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            what = f"{doing}: the answer is invalid JSON"
            seen = one_line(text[:_LONGEST_LINE])
            raise GpuprovError(what, seen, "kubectl cluster-info", exit_code=ExitCode.UNREACHABLE) from None

    def text(self, path: str, *, doing: str) -> str:
        """Return the content at a path of the API."""
        return succeeded(self.run(("get", "--raw", path)), doing).stdout

    def has(self, path: str, *, doing: str) -> bool:
        """Say whether there is an object at a path of the API."""
        done = self.run(("get", "--raw", path))
        return "(NotFound)" not in done.stderr and succeeded(done, doing).ok

    def create(self, path: str, content: Any, *, doing: str) -> None:
        """Create an object."""
        succeeded(self.run(("create", "--raw", path, "-f", "-"), json.dumps(content).encode()), doing)

    def delete(self, path: str, *, doing: str) -> None:
        """Delete the object, or all objects, at a path of the API, with 5 seconds to end."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 5}
        succeeded(self.run(("delete", "--raw", path, "-f", "-"), json.dumps(body).encode()), doing)

    def run(self, words: tuple[str, ...], stdin: bytes = b"") -> Completed:
        """Run kubectl to its end or its time limit; a failure is a value."""
        chosen = (
            *((f"--kubeconfig={self.kubeconfig}",) if self.kubeconfig else ()),
            *((f"--context={self.context}",) if self.context else ()),
            f"--request-timeout={_REQUEST_SECONDS}s",
        )
        return run_command(
            (self.program, *chosen, *words), timeout=self.seconds, stdin=stdin, env=os.environ, on_line=None,
            folder=None, most=self.most,
        )  # fmt: skip


def succeeded(done: Completed, doing: str) -> Completed:
    """Return a call of kubectl's that went well. Raises GpuprovError, with the meaning of one that failed."""
    if done.ok:
        return done
    # Without credentials kubectl prompts for a name on stdout, and no one answers.
    lines = (*done.stderr.splitlines(), *done.stdout[:_LONGEST_LINE].splitlines()[:1])
    said = [one_line(line)[:_LONGEST_LINE] for line in lines if line.strip()] or ["(silent)"]
    row, line = first_match("kubectl", said) or (Failure("kubectl failed", "kubectl cluster-info"), said[-1])
    seen = f"`{' '.join((Path(done.argv[0]).name, *done.argv[1:]))}` exited {done.returncode}\n{line}"
    raise GpuprovError(f"{doing}: {row.what}", seen, row.next_step, exit_code=row.exit_code)


# -- the API server's answers: their text is not trusted ---------------------------------------------------------------

# Whole GPUs, MIG devices of the strategy `mixed`, and both when they are shared under a name of their own.
_RESOURCE = re.compile(r"nvidia\.com/(gpu|mig-[0-9a-z.]{1,40}(\.me)?(\+me)?)(\.shared)?")
_COUNT = re.compile(r"\d{1,5}")
_LONGEST_TEXT = 300
_MOST_EVENTS = 5
_DONE = ("Succeeded", "Failed")
# Set by NVIDIA's GPU feature discovery, and by Node Feature Discovery or by hand.
_REPLICAS = "nvidia.com/gpu.replicas"
_HAS_GPUS = ("nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present")
_VERSIONS = {"os": "osImage", "kernel": "kernelVersion", "kubelet": "kubeletVersion",
             "engine": "containerRuntimeVersion"}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A node: `offered` and `capacity` map nvidia.com's resources to how many there are; `replicas` of shared GPUs.

    `has_gpus`: it has such a resource, or a label says that it has GPUs.
    """

    name: str
    ready: bool
    addresses: tuple[str, ...] = ()
    offered: Mapping[str, int] = field(default_factory=dict)
    capacity: Mapping[str, int] = field(default_factory=dict)
    replicas: int = 1
    has_gpus: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of devices that pods can get."""
        return sum(self.offered.values())


@dataclass(frozen=True)
class PodState:
    """Where a pod stands: `waiting` and `exit_code` are its container's, `reason` the best sentence that it has."""

    name: str
    phase: str
    waiting: str = ""
    reason: str = ""
    exit_code: int | None = None

    @property
    def is_done(self) -> bool:
        return self.phase in _DONE


def text(value: Any, longest: int = _LONGEST_TEXT) -> str:
    """Return a text of the API server as one line without control characters, cut at `longest`."""
    line = one_line(value[: 4 * longest]) if isinstance(value, str) else ""
    return line if len(line) <= longest else line[:longest] + " …"


def items(answer: Any) -> Iterator[Mapping[str, Any]]:
    """Return the objects of a list."""
    return _maps(_map(answer).get("items"))


def parse_node(thing: Mapping[str, Any]) -> Node | None:
    """Return a node, None if its name is invalid."""
    name, status = _name(thing), _map(thing.get("status"))
    if not name:
        return None
    labels, info = _map(_map(thing["metadata"]).get("labels")), _map(status.get("nodeInfo"))
    conditions = (one for one in _maps(status.get("conditions")) if one.get("type") == "Ready")
    replicas = labels.get(_REPLICAS)
    capacity = _resources(status.get("capacity"))
    return Node(
        name=name,
        ready=any(one.get("status") == "True" for one in conditions),
        addresses=tuple(text(one.get("address"), 255) for one in _maps(status.get("addresses"))),
        offered=_resources(status.get("allocatable")),
        capacity=capacity,
        replicas=int(replicas) if isinstance(replicas, str) and _COUNT.fullmatch(replicas) and int(replicas) else 1,
        has_gpus=bool(capacity) or any(labels.get(key) == "true" for key in _HAS_GPUS),
        versions={key: shown for key, field in _VERSIONS.items() if (shown := text(info.get(field), 80))},
    )


def used_resources(pods: Any) -> Mapping[str, int]:
    """Return which of nvidia.com's resources the pods of a node hold; ended pods do not count."""
    used: Counter[str] = Counter()
    for pod in items(pods):
        spec, kept, most = _map(pod.get("spec")), Counter[str](), Counter[str]()
        # Init containers run one after the other, and sidecars among them go on.
        for one in _maps(spec.get("initContainers")):
            most |= kept + (asked := _limits(one))
            kept += asked if one.get("restartPolicy") == "Always" else Counter()
        held = most | sum(map(_limits, _maps(spec.get("containers"))), kept)
        used += held if _map(pod.get("status")).get("phase") not in _DONE else Counter()
    return used


def _limits(container: Mapping[str, Any]) -> Counter[str]:
    return Counter(_resources(_map(container.get("resources")).get("limits")))


def parse_pod(thing: Mapping[str, Any]) -> PodState | None:
    """Return the state of a pod, None if its name is invalid."""
    name, status = _name(thing), _map(thing.get("status"))
    if not name:
        return None
    state = _map(next(_maps(status.get("containerStatuses")), {}).get("state"))
    waiting, ended = _map(state.get("waiting")), _map(state.get("terminated"))
    unmet = (one for one in _maps(status.get("conditions")) if one.get("status") == "False")
    unscheduled = (one for one in unmet if one.get("type") == "PodScheduled")
    usual = ("Completed", "ContainerCreating")
    reasons = (_sentence(one) for one in (waiting, ended, status, *unscheduled) if one.get("reason") not in usual)
    code = ended.get("exitCode")
    return PodState(
        name, text(status.get("phase"), 40), text(waiting.get("reason"), 80),
        next(filter(None, reasons), ""), code if type(code) is int else None,
    )  # fmt: skip


def parse_events(answer: Any) -> tuple[str, ...]:
    """Return the last events as sentences, each once, warnings first."""
    found = {_sentence(one): one.get("type") == "Warning" for one in items(answer)}
    return tuple(sorted(filter(None, found), key=lambda line: not found[line])[:_MOST_EVENTS])


def _name(thing: Mapping[str, Any]) -> str:
    """Return an object's name, "" if it is invalid."""
    name = _map(thing.get("metadata")).get("name")
    return name if isinstance(name, str) and re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name) else ""


def _sentence(thing: Mapping[str, Any]) -> str:
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
