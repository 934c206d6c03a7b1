"""Kubernetes by a genuine kubectl (Debian 13's) against an API server of the tests' own: no cluster runs here."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuprov.kubernetes.manifest import Choice, manifest
from gpuprov.protocol.errors import ExitCode
from tests.integration import kube_run
from tests.integration.kube_run import ALL, LIST, ONE, PODS, TWO, call, checks, require_nothing_left, verified
from tests.kube_api import Behaviour, Cluster, node, serving
from tests.lab.fixtures import Site
from tests.unit.test_json_schema import require_documented

# Fixtures.
cluster, program = kube_run.cluster, kube_run.program


def test_a_pod_on_each_node_lists_the_hosts_gpus(tmp_path: Path) -> None:
    cluster = Cluster(
        nodes=[node("gpu01", 2), node("gpu02", 1)],
        behaviours={"gpu01": Behaviour(log=LIST), "gpu02": Behaviour(log=f"GPU 0: T4 (UUID: {ONE})\n")},
    )
    first, second = verified(cluster, tmp_path, {"gpu01": (ONE, TWO)})
    assert set(checks(first).values()) == set(checks(second).values()) == {"ok"}
    assert (first.exit_code, second.exit_code) == (ExitCode.DONE, ExitCode.DONE)
    compared, alone = (next(c for c in one.checks if c.name == ALL).in_container for one in (first, second))
    assert compared == "2 GPUs, the host's"
    assert alone == f"1 GPU: {ONE}; not compared with the host"
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
        words = ("--kubeconfig", str(config), "--report", str(page), "--metrics", str(metrics), "--namespace", "given",
                 "--image", "registry.example.org/ubuntu:22.04", "--pod-timeout", "90")  # fmt: skip
        out, _ = call(*words, folder=tmp_path).communicate(timeout=300)
    assert out.splitlines()[-1] == "1 host ready: containers see 2 GPUs (kubernetes)"
    assert "kubernetes, all GPUs" in page.read_text()
    assert 'host="gpu01"' in metrics.read_text()
    (pod,) = (body["spec"] for verb, path, body in cluster.requests if (verb, path) == ("POST", PODS.format("given")))
    assert (pod["containers"][0]["image"], pod["activeDeadlineSeconds"]) == ("registry.example.org/ubuntu:22.04", 150)


def test_only_the_runs_own_pods_are_removed(cluster: Cluster, tmp_path: Path) -> None:
    theirs = {"metadata": {"name": "theirs", "labels": {"app.kubernetes.io/name": "gpuprov-verify"}}, "spec": {}}
    cluster.pods["given", "theirs"] = theirs
    (result,) = verified(cluster, tmp_path, namespace="given")
    assert set(checks(result).values()) == {"ok"}
    assert cluster.writes() == [f"POST {PODS.format('given')}", f"DELETE {PODS.format('given')}"]
    assert list(cluster.pods) == [("given", "theirs")]


@pytest.mark.parametrize(
    ("gpus", "what"),
    [
        (None, "no device plugin offers"),
        (0, "reports no healthy GPU"),
        pytest.param(3, "offers 3 GPUs, and the host has 2", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_offers_other_than_its_host_has(gpus: int | None, what: str, tmp_path: Path) -> None:
    cluster = Cluster(nodes=[node("gpu01", gpus)], behaviours={"gpu01": Behaviour(log=LIST)})
    (result,) = verified(cluster, tmp_path, {"gpu01": (ONE, TWO)})
    assert what in result.problems[0].what
    assert checks(result)["kubernetes, allocatable GPUs"] == "failed"
    assert checks(result)[ALL] == ("skipped" if not gpus else "ok")


@pytest.mark.slow
def test_gpus_that_other_pods_hold_are_left_to_them(cluster: Cluster, tmp_path: Path) -> None:
    def busy(name: str, count: int) -> dict[str, Any]:
        limits = {"resources": {"limits": {"nvidia.com/gpu": str(count)}}}
        spec = {"nodeName": "gpu01", "containers": [limits]}
        return {"metadata": {"name": name}, "spec": spec, "status": {"phase": "Running"}}

    cluster.pods["default", "theirs"] = busy("theirs", 1)
    cluster.behaviours["gpu01"].log = f"GPU 0: NVIDIA A100 (UUID: {TWO})\n"
    (result,) = verified(cluster, tmp_path, {"gpu01": (ONE, TWO)})
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
    cluster.behaviours["gpu01"].log = f"GPU 0: NVIDIA A100 (UUID: {TWO})\n"
    (result,) = verified(cluster, tmp_path, {"gpu01": (ONE, TWO)})
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


_CHOICES = [Choice(), Choice("dra"), Choice(strategy="cdi", namespace="gpu")]


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
        inventory = str(site.inventory("main"))
        running = call("--kubeconfig", str(config), "--hosts", inventory, "--connect-timeout", "60", folder=tmp_path)
        out, err = running.communicate(timeout=600)
    assert running.returncode == 0, out + err
    assert f"{count} GPUs, the host's" in out
    require_nothing_left(cluster)
