"""What the tests of `gpuprov verify --kubernetes` share: a cluster of tests/kube_api.py, runs on it, what is left."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.result import HostResult
from gpuprov.kubernetes.cluster import Kubectl
from gpuprov.kubernetes.node_checks import HostList
from gpuprov.kubernetes.verify import Wanted, all_nodes, verify_nodes
from tests.kube_api import Behaviour, Cluster, kubectl, node, serving

ONE, TWO = "GPU-00000001", "GPU-00000002"
LIST = f"GPU 0: NVIDIA A100 (UUID: {ONE})\nGPU 1: NVIDIA A100 (UUID: {TWO})\n"
ALL, REMOVED = "kubernetes, all GPUs", "test pod removed"
PODS = "/api/v1/namespaces/{}/pods"


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kubectl be Debian 13's, wherever a test runs it."""
    monkeypatch.setenv("PATH", f"{kubectl().parent}:{os.environ['PATH']}")


@pytest.fixture
def cluster() -> Cluster:
    """A cluster with one node, whose pod lists the two GPUs that it offers."""
    return Cluster(nodes=[node("gpu01", 2)], behaviours={"gpu01": Behaviour(log=LIST)})


@contextmanager
def kubectl_of(cluster: Cluster, folder: Path) -> Iterator[Kubectl]:
    """Yield how kubectl reaches the cluster; afterwards nothing went wrong in it."""
    with serving(cluster, folder) as config:
        yield Kubectl(kubeconfig=str(config))
    assert not cluster.faults


def verified(
    cluster: Cluster, folder: Path, hosts: Mapping[str, HostList] | None = None, **wanted: Any
) -> tuple[HostResult, ...]:
    """Verify all nodes in this process."""
    settings = Wanted(**{"interval": 0.02, "pod_seconds": 60, **wanted})
    with kubectl_of(cluster, folder) as kubectl:
        chosen = [(node, (hosts or {}).get(node.name)) for node in all_nodes(kubectl)]
        return verify_nodes(kubectl, chosen, settings, lambda: False, lambda host, event: None)


def checks(result: HostResult) -> dict[str, str]:
    return {check.name: check.status for check in result.checks}


def require_nothing_left(cluster: Cluster, namespace: str = "default") -> None:
    """The cluster has what it had before, and only pods of one namespace were created and deleted."""
    assert not cluster.pods
    assert {one.partition(" ")[2] for one in cluster.writes()} <= {PODS.format(namespace)}


def call(*words: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(folder), "NO_COLOR": "1"}
    return subprocess.Popen(
        (sys.executable, "-m", "gpuprov", "verify", "--kubernetes", *words), env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
