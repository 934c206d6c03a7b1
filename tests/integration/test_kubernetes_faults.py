"""Faults of a cluster, refusals, and signals, as `gpuprov verify --kubernetes` tells them; removal in every case."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from gpuprov.kubernetes.cluster import Kubectl
from gpuprov.kubernetes.verify import all_nodes
from gpuprov.protocol.errors import ExitCode, GpuprovError
from tests.integration import kube_run
from tests.integration.kube_run import ALL, ONE, REMOVED, TWO, call, checks, require_nothing_left, verified
from tests.kube_api import Behaviour, Cluster, kubeconfig, serving

# Fixtures.
cluster, program = kube_run.cluster, kube_run.program
_FORBIDDEN = 403, "Forbidden"
_OTHER = f"GPU 0: NVIDIA A100 (UUID: {ONE})\nGPU 1: NVIDIA A100 (UUID: GPU-00000009)\n"
_FAULTS = [
    (Behaviour("Pending", waiting="ImagePullBackOff", message="Back-off"), "can't pull the test pod's image"),
    (Behaviour("Pending", message="0/3 nodes are available: 1 Insufficient nvidia.com/gpu."), "in use by other pods"),
    (Behaviour("Pending", events=(("Failed", 'no runtime for "nvidia" is configured'),)), "runtime nvidia"),
    (Behaviour("Pending", events=(("Scheduled", "x"),)), "did not end within"),
    (Behaviour("Failed", log="", exit_code=127), "no nvidia-smi"),
    (Behaviour("Failed", log="Failed to initialize NVML: Unknown Error\n", exit_code=255), "failed with exit code 255"),
    (Behaviour(log="No devices were found\n"), "lists no GPU"),
    (Behaviour(log=_OTHER), "other GPUs than the host has"),
    (Behaviour(log=f"GPU 0: NVIDIA A100 (UUID: {ONE})\n"), "other GPUs than the host has"),
]  # fmt: skip


@pytest.mark.parametrize(("behaviour", "what"), _FAULTS, ids=[what for _, what in _FAULTS])
@pytest.mark.slow
def test_fault_is_named_and_pod_removed(cluster: Cluster, tmp_path: Path, behaviour: Behaviour, what: str) -> None:
    cluster.behaviours["gpu01"] = behaviour
    (result,) = verified(cluster, tmp_path, {"gpu01": (ONE, TWO)}, pod_seconds=0.5)
    assert [what in problem.what for problem in result.problems] == [True]
    assert (checks(result)[ALL], checks(result)[REMOVED]) == ("failed", "ok")
    for _, message in behaviour.events:
        assert message in result.problems[0].evidence
    require_nothing_left(cluster)


@pytest.mark.parametrize(
    ("request_", "answer", "what"),
    [
        ("POST pods", (*_FORBIDDEN, "pods is forbidden: User cannot create"), "(RBAC)"),
        (
            "POST pods",
            (*_FORBIDDEN, 'pods "x" is forbidden: exceeded quota: q, requested: nvidia.com/gpu=2'),
            "refuses the test pod",
        ),
        (
            "POST pods",
            (*_FORBIDDEN, 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'),
            "refuses the test pod",
        ),
        ("GET pods", (*_FORBIDDEN, "pods is forbidden: User cannot list"), "(RBAC)"),
        ("GET runtimeclasses", (*_FORBIDDEN, "runtimeclasses is forbidden: User cannot get"), "(RBAC)"),
    ],
    ids=["create", "quota", "pod security", "list", "runtime class"],
)
@pytest.mark.slow
def test_what_the_cluster_refuses_has_its_sentence(
    cluster: Cluster, tmp_path: Path, request_: str, answer: tuple[int, str, str], what: str
) -> None:
    cluster.refuse[request_] = answer
    (result,) = verified(cluster, tmp_path)
    assert what in result.problems[0].what
    assert checks(result)[ALL] == "failed"
    require_nothing_left(cluster)


@pytest.mark.slow
def test_a_removal_that_fails_is_told_with_the_command(cluster: Cluster, tmp_path: Path) -> None:
    cluster.refuse["DELETE pods"] = (*_FORBIDDEN, "pods is forbidden: User cannot delete")
    (result,) = verified(cluster, tmp_path, namespace="given")
    assert (checks(result)[ALL], checks(result)[REMOVED]) == ("ok", "failed")
    assert "remove the test pods in given" in result.problems[0].what
    cluster.refuse.clear()
    cluster.pods.clear()
    cluster.stays = True
    (result,) = verified(cluster, tmp_path, removal_seconds=0.5)
    assert checks(result)[REMOVED] == "failed"
    assert "still there" in result.problems[0].what
    assert result.problems[0].next_step.startswith("kubectl get ")


@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGINT, "GET pods"),
        pytest.param(signal.SIGINT, "POST pods", marks=pytest.mark.slow),
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
    assert started[0].returncode == 128 + number
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
