"""Kubernetes by a genuine kubectl (Debian 13's) against an API server of the tests' own: no cluster runs here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuprov.fleet.result import HostResult
from gpuprov.kubernetes import trial
from gpuprov.kubernetes.gpu_list import GpuList
from gpuprov.kubernetes.hosts import HostList
from gpuprov.kubernetes.kubectl import Kubectl
from gpuprov.kubernetes.manifest import MODES, RESOURCE_APIS, Choice, manifest
from gpuprov.kubernetes.stop import Stop
from gpuprov.kubernetes.trial import Wanted
from gpuprov.kubernetes.verify import all_nodes, verify_nodes
from gpuprov.wire.errors import ExitCode, GpuprovError
from tests.kube_api import Behaviour, Cluster, kubeconfig, kubectl, node, serving
from tests.lab.fixtures import Site
from tests.unit.test_json_schema import require_documented

_ONE, _TWO = "GPU-00000001", "GPU-00000002"
_LIST = f"GPU 0: NVIDIA A100 (UUID: {_ONE})\nGPU 1: NVIDIA A100 (UUID: {_TWO})\n"
_FORBIDDEN = 403, "Forbidden"
_ALL, _REMOVED = "kubernetes, all GPUs", "test pod removed"


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kubectl be Debian 13's, wherever a test runs it."""
    monkeypatch.setenv("PATH", f"{kubectl().parent}:{os.environ['PATH']}")


@pytest.fixture
def cluster() -> Cluster:
    """A cluster with one node, whose pod lists the two GPUs that it offers."""
    return Cluster(nodes=[node("gpu01", 2)], behaviours={"gpu01": Behaviour(log=_LIST)})


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
    settings = Wanted(**{"image": "ubuntu", "interval": 0.02, "pod_seconds": 60, **wanted})
    with kubectl_of(cluster, folder) as kubectl:
        chosen = [(node, (hosts or {}).get(node.name)) for node in all_nodes(kubectl)]
        return verify_nodes(kubectl, chosen, settings, Stop(), lambda host, event: None)


def checks(result: HostResult) -> dict[str, str]:
    return {check.name: check.status for check in result.checks}


def require_nothing_left(cluster: Cluster) -> None:
    """The cluster has what it had before, and only what the run made was written to."""
    assert sorted(cluster.namespaces) == ["default", "given", "kube-system"]
    assert not cluster.pods
    made = {body["metadata"]["name"] for verb, path, body in cluster.requests if (verb, path) == _NAMESPACE_MADE}
    for request in cluster.writes():
        verb, path = request.split()
        words = path.split("/")
        assert (verb, path) == _NAMESPACE_MADE or words[4] in made, request


_NAMESPACE_MADE = ("POST", "/api/v1/namespaces")


def call(*words: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(folder), "NO_COLOR": "1"}
    return subprocess.Popen(
        (sys.executable, "-m", "gpuprov", "verify", "--kubernetes", *words), env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_pod_on_each_node_lists_the_hosts_gpus(tmp_path: Path) -> None:
    cluster = Cluster(
        nodes=[node("gpu01", 2), node("gpu02", 1)],
        behaviours={"gpu01": Behaviour(log=_LIST), "gpu02": Behaviour(log=f"GPU 0: T4 (UUID: {_ONE})\n")},
        early=2,  # the namespace's service account comes later
    )
    first, second = verified(cluster, tmp_path, {"gpu01": GpuList((_ONE, _TWO))})
    assert set(checks(first).values()) == set(checks(second).values()) == {"ok"}
    assert (first.exit_code, second.exit_code) == (ExitCode.DONE, ExitCode.DONE)
    compared, alone = (next(c for c in one.checks if c.name == _ALL).in_container for one in (first, second))
    assert compared == "2 GPUs, the host's"
    assert alone == f"1 GPU: {_ONE}; not compared with the host"
    (space,) = (body for verb, path, body in cluster.requests if (verb, path) == _NAMESPACE_MADE)
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    require_nothing_left(cluster)


def test_the_command_prints_documented_json(cluster: Cluster, tmp_path: Path) -> None:
    with serving(cluster, tmp_path) as config:
        out, _ = call("--context", "test", "--kubeconfig", str(config), "--json", folder=tmp_path).communicate(
            timeout=300
        )
    events = [require_documented(line) for line in out.splitlines()]
    assert (events[0], events[-2:]) == ("CheckDone", ["Finished", "Summary"])
    assert not cluster.faults
    require_nothing_left(cluster)


@pytest.mark.slow
def test_the_command_prints_the_table_of_every_verification(cluster: Cluster, tmp_path: Path) -> None:
    page, metrics = tmp_path / "page.html", tmp_path / "gpuprov.prom"
    with serving(cluster, tmp_path) as config:
        words = ("--kubeconfig", str(config), "--report", str(page), "--metrics", str(metrics))
        out, _ = call(*words, folder=tmp_path).communicate(timeout=300)
    assert out.splitlines()[-1] == "1 host ready: containers see 2 GPUs (kubernetes)"
    assert "kubernetes, all GPUs" in page.read_text()
    assert 'host="gpu01"' in metrics.read_text()


def test_in_a_given_namespace_only_its_own_pod_is_touched(cluster: Cluster, tmp_path: Path) -> None:
    (result,) = verified(cluster, tmp_path, namespace="given")
    assert set(checks(result).values()) == {"ok"}
    created, deleted = cluster.writes()
    assert created == "POST /api/v1/namespaces/given/pods"
    assert deleted.startswith("DELETE /api/v1/namespaces/given/pods/gpuprov-verify-")
    assert set(cluster.namespaces) == {"default", "kube-system", "given"}


@pytest.mark.slow
def test_a_pod_that_somebody_put_in_its_place_stays(cluster: Cluster, tmp_path: Path) -> None:
    """Its uid is another one: it is not what the run created, whatever its name and labels."""

    def replace_it(verb: str, path: str) -> None:
        if path.endswith("/log"):
            for pod in cluster.pods.values():
                pod["metadata"]["uid"] = "somebody-elses"

    cluster.before = replace_it
    verified(cluster, tmp_path, namespace="given")
    assert [verb for verb in cluster.writes() if verb.startswith("DELETE")] == []
    assert [pod["metadata"]["uid"] for pod in cluster.pods.values()] == ["somebody-elses"]


_OTHER = f"GPU 0: NVIDIA A100 (UUID: {_ONE})\nGPU 1: NVIDIA A100 (UUID: GPU-00000009)\n"
_FAULTS = [
    (Behaviour("Pending", waiting="ImagePullBackOff", message="Back-off"), "can't pull the test pod's image"),
    (Behaviour("Pending", message="0/3 nodes are available: 1 Insufficient nvidia.com/gpu."), "in use by other pods"),
    (Behaviour("Pending", events=(("Failed", 'no runtime for "nvidia" is configured'),)), "runtime nvidia"),
    (Behaviour("Pending", events=(("Scheduled", "x"),)), "did not end within"),
    (Behaviour("Failed", log="", exit_code=127), "no nvidia-smi"),
    (Behaviour("Failed", log="Failed to initialize NVML: Unknown Error\n", exit_code=255), "failed with exit code 255"),
    (Behaviour(log="No devices were found\n"), "lists no GPU"),
    (Behaviour(log=_OTHER), "other GPUs than the host has"),
    (Behaviour(log=f"GPU 0: NVIDIA A100 (UUID: {_ONE})\n"), "other GPUs than the host has"),
]  # fmt: skip


@pytest.mark.parametrize(("behaviour", "what"), _FAULTS, ids=[what for _, what in _FAULTS])
@pytest.mark.slow
def test_each_fault_has_its_sentence_and_the_pod_is_removed(
    cluster: Cluster, tmp_path: Path, behaviour: Behaviour, what: str
) -> None:
    cluster.behaviours["gpu01"] = behaviour
    (result,) = verified(cluster, tmp_path, {"gpu01": GpuList((_ONE, _TWO))}, pod_seconds=0.5)
    assert [what in problem.what for problem in result.problems] == [True]
    assert (checks(result)[_ALL], checks(result)[_REMOVED]) == ("failed", "ok")
    for _, message in behaviour.events:
        assert message in result.problems[0].evidence
    require_nothing_left(cluster)


@pytest.mark.parametrize(
    ("request_", "answer", "what"),
    [
        ("POST namespaces", (*_FORBIDDEN, "namespaces is forbidden: User cannot create"), "(RBAC)"),
        (
            "POST pods",
            (*_FORBIDDEN, 'pods "x" is forbidden: exceeded quota: q, requested: nvidia.com/gpu=2'),
            "a quota",
        ),
        ("POST pods", (*_FORBIDDEN, 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'), "Pod Security"),
        ("GET pods", (*_FORBIDDEN, "pods is forbidden: User cannot list"), "(RBAC)"),
        ("GET runtimeclasses", (*_FORBIDDEN, "runtimeclasses is forbidden: User cannot get"), "(RBAC)"),
    ],
    ids=["namespace", "quota", "pod security", "list", "runtime class"],
)
@pytest.mark.slow
def test_what_the_cluster_refuses_has_its_sentence(
    cluster: Cluster, tmp_path: Path, request_: str, answer: tuple[int, str, str], what: str
) -> None:
    cluster.refuse[request_] = answer
    (result,) = verified(cluster, tmp_path)
    assert what in result.problems[0].what
    assert checks(result)[_ALL] == "failed"
    require_nothing_left(cluster)


@pytest.mark.slow
def test_a_removal_that_fails_is_told_with_the_command(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.refuse["DELETE pods"] = (*_FORBIDDEN, "pods is forbidden: User cannot delete")
    (result,) = verified(cluster, tmp_path, namespace="given")
    assert (checks(result)[_ALL], checks(result)[_REMOVED]) == ("ok", "failed")
    assert "remove the pod given/gpuprov-verify-" in result.problems[0].what
    cluster.refuse.clear()
    cluster.stays = True
    monkeypatch.setattr(trial, "_REMOVAL_SECONDS", 0.5)
    (result,) = verified(cluster, tmp_path)
    assert checks(result)[_REMOVED] == "failed"
    assert "still there" in result.problems[0].what
    assert result.problems[0].next_step.startswith("kubectl get ")


@pytest.mark.parametrize(
    ("gpus", "what"),
    [
        (None, "no device plugin offers"),
        (0, "reports no healthy GPU"),
        pytest.param(3, "offers 3 GPUs, and the host has 2", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_offers_other_than_its_host_has(gpus: int | None, what: str, tmp_path: Path) -> None:
    cluster = Cluster(nodes=[node("gpu01", gpus)], behaviours={"gpu01": Behaviour(log=_LIST)})
    (result,) = verified(cluster, tmp_path, {"gpu01": GpuList((_ONE, _TWO))})
    assert what in result.problems[0].what
    assert checks(result)["kubernetes, allocatable GPUs"] == "failed"
    assert checks(result)[_ALL] == ("skipped" if not gpus else "ok")


@pytest.mark.slow
def test_gpus_that_other_pods_hold_are_left_to_them(cluster: Cluster, tmp_path: Path) -> None:
    def busy(name: str, count: int) -> dict[str, Any]:
        limits = {"resources": {"limits": {"nvidia.com/gpu": str(count)}}}
        spec = {"nodeName": "gpu01", "containers": [limits]}
        return {"metadata": {"name": name, "uid": name}, "spec": spec, "status": {"phase": "Running"}}

    cluster.pods["default", "theirs"] = busy("theirs", 1)
    cluster.behaviours["gpu01"].log = f"GPU 0: NVIDIA A100 (UUID: {_TWO})\n"
    (result,) = verified(cluster, tmp_path, {"gpu01": GpuList((_ONE, _TWO))})
    assert (checks(result)["kubernetes, free GPUs"], result.exit_code) == ("ok", ExitCode.DONE)
    (pod,) = (body for verb, path, body in cluster.requests if verb == "POST" and path.endswith("/pods"))
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    cluster.pods["default", "theirs"] = busy("theirs", 2)
    (result,) = verified(cluster, tmp_path)
    assert (checks(result)["kubernetes, free GPUs"], result.exit_code) == ("skipped", ExitCode.DONE)
    assert ("default", "theirs") in cluster.pods


@pytest.mark.slow
def test_shared_gpus_are_counted_once_for_each_pod(cluster: Cluster, tmp_path: Path) -> None:
    cluster.nodes = [node("gpu01", 8, labels={"nvidia.com/gpu.replicas": "4"})]
    cluster.behaviours["gpu01"].log = f"GPU 0: NVIDIA A100 (UUID: {_TWO})\n"
    (result,) = verified(cluster, tmp_path, {"gpu01": GpuList((_ONE, _TWO))})
    assert set(checks(result).values()) == {"ok"}


def test_what_the_api_server_says_can_not_write_on_the_terminal(cluster: Cluster, tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J" + "x" * 500_000
    cluster.behaviours["gpu01"] = Behaviour(
        "Pending", waiting="CreateContainerError", message=evil, events=((evil, evil),)
    )
    cluster.nodes += [node("../../etc", 1), node("x\n", 1)]
    (result,) = verified(cluster, tmp_path)
    shown = repr(result.problems) + repr(result.checks)
    assert "\\x1b" not in shown
    assert len(shown) < 10_000
    require_nothing_left(cluster)


@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGINT, "GET pods"),
        pytest.param(signal.SIGINT, "POST pods", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "POST namespaces", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "GET pods", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "GET pods", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_removes_what_it_made(cluster: Cluster, tmp_path: Path, number: int, when: str) -> None:
    """The signal comes while kubectl waits for the answer to that request."""
    cluster.behaviours["gpu01"] = Behaviour("Running")
    started: list[subprocess.Popen[str]] = []
    verb, resource = when.split()

    def interrupt(method: str, path: str) -> None:
        if (method, path.rsplit("/", 1)[-1]) == (verb, resource) and path != "/api/v1/pods":
            started[0].send_signal(number)

    cluster.before = interrupt
    with serving(cluster, tmp_path) as config:
        started.append(call("--kubeconfig", str(config), folder=tmp_path))
        out, err = started[0].communicate(timeout=300)
    assert started[0].returncode == ExitCode.FAILED
    assert "the test pods are being removed" in err
    assert "stopped before the test pod had ended" in out
    assert not cluster.faults
    require_nothing_left(cluster)


@pytest.mark.parametrize(
    ("words", "what", "code"),
    [
        (("--context", "nope"), "the kubeconfig has no such context", ExitCode.USAGE),
        pytest.param((), "the cluster's API server does not answer", ExitCode.UNREACHABLE, marks=pytest.mark.slow),
    ],
)
def test_a_cluster_that_is_not_reached(words: tuple[str, ...], what: str, code: ExitCode, tmp_path: Path) -> None:
    config = kubeconfig(tmp_path, "http://127.0.0.1:9")  # discard: nothing listens
    running = call("--kubeconfig", str(config), *words, folder=tmp_path)
    out, err = running.communicate(timeout=300)
    assert what in out + err
    assert running.returncode == code
    assert "Traceback" not in err


@pytest.mark.slow
def test_without_kubectl_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpuprovError, match="kubectl is not installed"):
        all_nodes(Kubectl())


@pytest.mark.slow
def test_a_certificate_that_nobody_trusts(cluster: Cluster, tmp_path: Path) -> None:
    pem = tmp_path / "server.pem"
    subprocess.run(
        ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-days", "2",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", pem, "-out", tmp_path / "certificate"),
        check=True, capture_output=True,
    )  # fmt: skip
    pem.write_text(pem.read_text() + (tmp_path / "certificate").read_text())
    with serving(cluster, tmp_path, pem) as config:
        with pytest.raises(GpuprovError, match="certificate is not trusted"):
            all_nodes(Kubectl(kubeconfig=str(config)))
        content = json.loads(config.read_text())
        content["clusters"][0]["cluster"]["certificate-authority"] = str(tmp_path / "certificate")
        config.write_text(json.dumps(content))
        assert [node.name for node in all_nodes(Kubectl(kubeconfig=str(config)))] == ["gpu01"]


@pytest.mark.slow
def test_a_cluster_of_many_pages_is_read_whole(tmp_path: Path) -> None:
    cluster = Cluster(nodes=[node(f"gpu{number:04}", 1) for number in range(450)])
    with kubectl_of(cluster, tmp_path) as kubectl:
        assert len(all_nodes(kubectl)) == 450
    assert len(cluster.requests) == 3


_CHOICES = [Choice(mode) for mode in MODES if mode != "operator"] + [
    Choice("dra", resource_api=version) for version in list(RESOURCE_APIS)[1:]
] + [Choice(strategy="cdi", namespace="gpu")]  # fmt: skip


@pytest.mark.parametrize(
    "choice", [_CHOICES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in _CHOICES[1:])], ids=str
)
def test_kubectl_reads_the_manifest(choice: Choice, tmp_path: Path) -> None:
    """`--dry-run=client` needs discovery, and creates nothing."""
    cluster = Cluster()
    made = manifest(choice)
    with serving(cluster, tmp_path) as config:
        for text in (made.as_yaml(), made.as_json()):
            done = subprocess.run(
                ("kubectl", f"--kubeconfig={config}", f"--cache-dir={tmp_path}", "create", "--dry-run=client",
                 "--validate=false", "-f", "-", "-o", "name"),
                input=text, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (0, "")
            names = [line.rpartition("/")[2] for line in done.stdout.splitlines()]
            assert names == [one["metadata"]["name"] for one in made.objects]
    assert cluster.writes() == []


@pytest.mark.lab
def test_over_ssh_the_hosts_own_list_is_compared(site: Site, tmp_path: Path) -> None:
    """A lab host runs the genuine nvidia-smi on simulated GPUs; its node and pod are the tests' API server's."""
    host = site.installed("main")
    printed = host.ssh("nvidia-smi -L").stdout
    count = printed.count("GPU ")
    cluster = Cluster(
        nodes=[node("node-1", count, address=host.address), node("node-2", 1, address="10.9.9.9")],
        behaviours={"node-1": Behaviour(log=printed)},
    )
    with serving(cluster, tmp_path) as config:
        running = call(
            "--kubeconfig", str(config), "--hosts", str(site.inventory), "--limit", host.name, folder=tmp_path
        )
        out, err = running.communicate(timeout=600)
    assert running.returncode == 0, out + err
    assert f"{count} GPUs, the host's" in out
    require_nothing_left(cluster)
