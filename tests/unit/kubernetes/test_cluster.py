"""What the API server says: hostile until parsed, with lists of GPUs, nodes, pods, and kubectl's own words."""

import itertools
import json
import os
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.cli.main import cli
from gpuprov.core.commands import Completed
from gpuprov.fleet import history
from gpuprov.fleet.inventory import HostTarget, Inventory
from gpuprov.fleet.options import Options
from gpuprov.kubernetes import cluster, node_checks, verify
from gpuprov.kubernetes.cluster import (
    Kubectl,
    Node,
    PodState,
    parse_events,
    parse_node,
    parse_pod,
    succeeded,
    used_resources,
)  # fmt: skip
from gpuprov.kubernetes.manifest import Choice, manifest
from gpuprov.kubernetes.node_checks import host_list, host_lists, node_of, parse_list
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.spec import HostSpec
from tests.kube_api import node

_LIST = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-66d4f2b5-0d5c-5e9c-8ad2-3f9a8b2c8c11)
  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-5d5ba0d6/7/0)
GPU 1: Tesla T4 (UUID: GPU-6d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a78)
"""
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=20,
)
_NAMED = st.dictionaries(st.sampled_from(["metadata", "status", "spec", "items", "reason", "message", "type"]), _JSON)


def test_a_list_of_gpus_counts_mig_devices_instead_of_their_gpu() -> None:
    assert parse_list(_LIST) == (
        "MIG-66d4f2b5-0d5c-5e9c-8ad2-3f9a8b2c8c11", "MIG-GPU-5d5ba0d6/7/0", "GPU-6d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a78",
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "No devices were found\n", "Failed to initialize NVML: Unknown Error", "GPU 0: x (UUID: \x1b[31mGPU-1)"],
)
def test_what_is_no_list_is_empty(text: str) -> None:
    assert parse_list(text) == ()


@given(thing=_NAMED, text=st.text(max_size=200))
def test_no_answer_breaks_a_parser(thing: dict[str, Any], text: str) -> None:
    """Wrong types everywhere: each parser returns something, or None."""
    parse_node(thing)
    parse_pod(thing)
    parse_events(thing)
    used_resources(thing)
    parse_list(text)


def test_a_node_has_its_resources_and_what_it_runs() -> None:
    found = parse_node(
        node("gpu01", 2, resources={"nvidia.com/mig-1g.10gb": "3", "nvidia.com/evil\n": "9", "amd.com/gpu": "4"})
    )
    assert found is not None
    assert found.offered == {"nvidia.com/gpu": 2, "nvidia.com/mig-1g.10gb": 3}
    assert (found.count, found.ready, found.has_gpus, found.versions["kubelet"]) == (5, True, True, "v1.34.1")


@pytest.mark.parametrize("name", ["", "../x", "a b", "A", "-a", "a" * 300, None, 7])
def test_a_node_with_a_strange_name_is_left_out(name: Any) -> None:
    assert parse_node({"metadata": {"name": name}}) is None
    assert parse_pod({"metadata": {"name": name}}) is None


def test_text_of_the_api_server_is_shown_as_one_short_line() -> None:
    assert cluster.text("a\x1b]0;title\x07b\nc\u202e") == "ab c"
    assert cluster.text(json.loads(r'"a\ud800b"')).encode() == b"ab"
    assert len(cluster.text("x" * 10**6)) < 310


def test_pods_that_have_ended_use_nothing() -> None:
    def pod(phase: str) -> dict[str, Any]:
        container = {"resources": {"limits": {"nvidia.com/gpu": "2", "cpu": "1"}}}
        return {"status": {"phase": phase}, "spec": {"containers": [container]}}

    assert used_resources({"items": [pod("Running"), pod("Succeeded"), pod("Pending")]}) == {"nvidia.com/gpu": 4}


def asking(gpus: int, **more: str) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": str(gpus)} if gpus else {}}, **more}


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("initial", "containers", "held"),
    [
        ([], [asking(1), asking(2)], 3),
        ([asking(4)], [asking(1)], 4),
        ([asking(1), asking(2)], [asking(3)], 3),
        ([asking(2, **SIDECAR)], [asking(1)], 3),
        ([asking(1, **SIDECAR), asking(4)], [asking(2)], 5),
        ([asking(4), asking(1, **SIDECAR)], [asking(2)], 4),
        ([asking(3, **SIDECAR)], [asking(0)], 3),
        ([asking(0)], [asking(0)], 0),
    ],
)
def test_pod_holds_what_it_needs(initial: list[dict[str, Any]], containers: list[dict[str, Any]], held: int) -> None:
    """As the scheduler counts: Kubernetes documentation, "Sidecar Containers", Resource sharing within containers."""
    pod = {"status": {"phase": "Running"}, "spec": {"initContainers": initial, "containers": containers}}
    assert used_resources({"items": [pod, pod]}).get("nvidia.com/gpu", 0) == 2 * held


def test_a_host_is_a_node_by_name_by_address_or_by_short_name() -> None:
    nodes = (Node("gpu01.example.org", True, ("10.0.0.1",)), Node("gpu02", True, ("10.0.0.2", "gpu02")))

    def found(name: str, address: str = "") -> str:
        node = node_of(HostTarget(name, HostSpec(), address), nodes)
        return node.name if node else ""

    assert found("gpu02") == "gpu02"
    assert found("first", "10.0.0.1") == "gpu01.example.org"
    assert found("gpu01") == "gpu01.example.org"
    assert found("gpu03", "10.0.0.3") == ""
    assert node_of(HostTarget("10.0.0.5", HostSpec(), ""), (Node("10.0.0.9", True),)) is None


def test_hosts_with_one_short_name_are_not_the_same_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(node_checks, "host_lists", lambda hosts, *_: {one.name: (one.name,) for one in hosts})
    monkeypatch.setattr(verify, "all_nodes", lambda kubectl: (Node("gpu1.berlin", True, ("10.0.0.1",)),))
    chosen: list[verify.Chosen] = []
    monkeypatch.setattr(verify, "verify_nodes", lambda _, nodes, *more: chosen.__iadd__(nodes) and ())

    def absent(*hosts: HostTarget) -> list[str]:
        monkeypatch.setattr(verify, "inventory_of", lambda options: Inventory(hosts))
        verify.verify_cluster(Options("verify", hosts=("i",)), Kubectl(), verify.Wanted())
        return [one.host for one in history.load().results]

    first = HostTarget("gpu1.berlin", HostSpec())
    assert absent(first, HostTarget("gpu1.munich", HostSpec())) == ["gpu1.munich"]
    assert [host for _, host in chosen] == [("gpu1.berlin",)]
    # Another name of the same machine is not absent.
    assert absent(first, HostTarget("gpu1.mgmt", HostSpec(), "10.0.0.1")) == []


def test_no_host_is_asked_after_ctrl_c() -> None:
    """This one would be refused in other words: no options say how it is reached."""
    found = host_lists((HostTarget("gpu01", HostSpec(), ""),), Options(command="verify"), lambda: True)
    assert "not asked" in str(found["gpu01"])


def test_a_host_without_a_list_says_why() -> None:
    assert host_list(Completed((), 0, _LIST)) == parse_list(_LIST)
    assert "not installed" in str(host_list(Completed(("nvidia-smi", "-L"), 127)))
    assert "lists no GPU" in str(host_list(Completed((), 9, "Failed to initialize NVML")))


@pytest.mark.parametrize(
    ("said", "what", "code"),
    [
        ("kubectl: command not found", "kubectl is not installed", ExitCode.USAGE),
        ('error: context "x" does not exist', "no such context", ExitCode.USAGE),
        ("error: stat /nope: no such file or directory", "kubectl failed", ExitCode.FAILED),
        ('error loading config file "/x": yaml: line 1', "can't use the kubeconfig", ExitCode.USAGE),
        ('Error from server (Forbidden): pods "x" is forbidden: exceeded quota: gpus', "refuses", ExitCode.FAILED),
        ('Error from server (Forbidden): pods "x" is forbidden: violates PodSecurity "baseline:v1"', "refuses",
         ExitCode.FAILED),
        ('Error from server (Forbidden): nodes is forbidden: User "x" cannot list', "(RBAC)", ExitCode.FAILED),
        ('Error from server: admission webhook "policy" denied the request: no', "refuses", ExitCode.FAILED),
        ("error: You must be logged in to the server (Unauthorized)", "credentials", ExitCode.UNREACHABLE),
        ("error: EOF\nPlease enter Username: ", "no credentials", ExitCode.USAGE),
        ("Unable to connect to the server: x509: certificate signed by unknown authority", "certificate",
         ExitCode.UNREACHABLE),
        ("The connection to the server 10.0.0.1:6443 was refused", "does not answer", ExitCode.UNREACHABLE),
        ("stopped after its time limit", "does not answer", ExitCode.UNREACHABLE),
    ],
)  # fmt: skip
def test_each_failure_of_kubectl_has_its_sentence(said: str, what: str, code: ExitCode) -> None:
    with pytest.raises(GpuprovError) as failed:
        succeeded(Completed(("kubectl", "get"), 1, "", f"E1122 memcache.go:265] noise\n{said}\n"), "list nodes")
    (problem,) = failed.value.problems
    assert what in problem.what and problem.what.startswith("list nodes: ")
    assert failed.value.exit_code == code
    assert problem.next_step


@pytest.mark.parametrize(
    ("state", "events", "what"),
    [
        (PodState("p", "Pending", "ImagePullBackOff", "ImagePullBackOff: x"), (), "can't pull"),
        (PodState("p", "Pending", reason="Unschedulable: 1 Insufficient nvidia.com/gpu."), (), "in use"),
        (PodState("p", "Pending"), ('Failed: no runtime for "nvidia" is configured',), "runtime nvidia"),
        (PodState("p", "Pending"), ("Failed: unresolvable CDI devices k8s.device-plugin.nvidia.com/gpu=0",), "CDI"),
        # kubernetes-sigs/dra-driver-nvidia-gpu issue 568.
        (PodState("p", "Pending"), ("Failed: stderr: No help topic for 'disable-device-node-modification'",), "older"),
        (PodState("p", "Pending", "CreateContainerConfigError"), (), "can't start: CreateContainerConfigError"),
        (PodState("p", "Pending"), (), "did not end within 5 s"),
        (PodState("p", "removed"), (), "was removed"),
    ],
)  # fmt: skip
def test_a_pod_that_did_not_start_has_its_sentence(state: PodState, events: tuple[str, ...], what: str) -> None:
    problem = node_checks.not_started(state, events, 5)
    assert what in problem.what
    assert all(event in problem.evidence for event in events)


def program(folder: Path, text: str, **limits: Any) -> Kubectl:
    """Return a kubectl that is this script."""
    path = folder / "kubectl"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return Kubectl(program=str(path), **limits)


def test_a_run_over_a_cluster_is_kept_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    kubectl = replace(program(tmp_path, "exit 1"), context="prod")
    assert verify.verify_cluster(Options("verify"), kubectl, verify.Wanted()) == ExitCode.FAILED
    assert history.load().inventory == ("cluster prod",)
    assert "of cluster prod" in CliRunner().invoke(cli, ["report", "--list"]).output


def test_a_server_that_never_ends_fills_no_memory(tmp_path: Path) -> None:
    done = program(tmp_path, "exec yes", seconds=1, most=1 << 20).run(("get", "--raw", "/"))
    assert not done.ok
    assert len(done.stdout) <= 1 << 20
    with pytest.raises(GpuprovError, match="does not answer"):
        succeeded(done, "look")


def test_a_call_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/made; mv {tmp_path}/made {tmp_path}/pid; wait"
    call = program(tmp_path, script, seconds=2)
    with pytest.raises(GpuprovError) as caught:
        while not (tmp_path / "pid").exists():  # a busy machine may take longer to start it
            call.get("/x", doing="look")
    assert caught.value.exit_code == ExitCode.UNREACHABLE
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")

    def ended() -> bool:
        return not status.exists() or "State:\tZ" in status.read_text()

    deadline = time.monotonic() + 60  # a busy kernel takes its time with a signal; `sleep 600` takes more
    while not ended() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended()


def test_a_program_that_outlives_kubectl_is_not_waited_for(tmp_path: Path) -> None:
    """A credential plugin may start a daemon, which has kubectl's error output: the answer is there without its end."""
    done = program(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; echo '{{}}'").run(("get", "--raw", "/"))
    pid = int((tmp_path / "pid").read_text())
    try:
        assert (done.returncode, done.stdout) == (0, "{}\n")
        assert Path(f"/proc/{pid}").exists()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_arguments_stay_arguments(tmp_path: Path) -> None:
    """A context that looks like an option, and blanks, reach kubectl as they are."""
    call = program(tmp_path, 'for word do printf "%s\\n" "$word"; done')
    done = Kubectl("--as=root x", "a;b", call.program).run(("get", "--raw", "/$(id)"))
    chosen = ["--kubeconfig=a;b", "--context=--as=root x", "--request-timeout=30s"]
    assert done.stdout.splitlines() == [*chosen, "get", "--raw", "/$(id)"]


def test_an_answer_in_invalid_json_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(GpuprovError, match="invalid JSON"):
        program(tmp_path, "echo '<html>'").get("/x", doing="look")
    assert program(tmp_path, f"echo '{json.dumps({'a': 1})}'").get("/x", doing="look") == {"a": 1}


# -- the manifest ------------------------------------------------------------------------------------------------------


# The oldest that NVIDIA's components of the table support among those with DRA, and the newest two that the tests know.
_RELEASES = ("1.32", "1.36", "1.37")


def printed(*words: str) -> str:
    done = CliRunner().invoke(cli, ("kubernetes", "manifest", *words))
    assert done.exit_code == 0, done.output
    return done.output


_PLUGINS = (Choice(), Choice(strategy="cdi", namespace="gpu", mig="mixed"), Choice(mig="single"))
# Claims are for the releases that serve them.
_CHOICES = [*itertools.product(_PLUGINS, _RELEASES), (Choice("dra"), "1.34"), (Choice("dra"), "1.37")]


@pytest.mark.parametrize(("choice", "release"), _CHOICES, ids=str)
def test_the_objects_are_valid(choice: Choice, release: str) -> None:
    for one in manifest(choice).objects:
        kubernetes_validate.validate(one, release, strict=True)


@pytest.mark.parametrize("release", _RELEASES)
def test_the_pod_of_a_verification_is_valid_and_restricted(release: str) -> None:
    more: dict[str, Any] = {"run": "a", "image": "ubuntu", "resources": {"nvidia.com/gpu": 2}, "by_class": True}
    pod = verify.verification_pod("gpuprov-verify-a-0", "gpu01", seconds=0.5, **more)
    kubernetes_validate.validate(pod, release, strict=True)
    assert pod["spec"]["activeDeadlineSeconds"] == 1
    # https://kubernetes.io/docs/concepts/security/pod-security-standards/: restricted
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_an_invalid_object_does_not_pass() -> None:
    broken = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": [{}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.37", strict=True)


def test_yaml_and_json_have_the_same_objects() -> None:
    for mode in ("plugin", "dra"):
        objects = [one for one in yaml.safe_load_all(printed("--mode", mode)) if one is not None]
        whole = json.loads(printed("--mode", mode, "--json"))
        assert (whole["apiVersion"], whole["kind"], whole["items"]) == ("v1", "List", objects)


def test_the_strategy_decides_what_the_plugin_gets() -> None:
    def variables(strategy: str) -> dict[str, str]:
        items = manifest(Choice(strategy=strategy)).objects
        plugin = next(one for one in items if one["kind"] == "DaemonSet")["spec"]["template"]["spec"]
        return {one["name"]: one["value"] for one in plugin["containers"][0]["env"]}

    assert variables("environment")["DEVICE_LIST_STRATEGY"] == "envvar"
    assert "NVIDIA_CDI_HOOK_PATH" not in variables("environment")
    assert variables("cdi")["DEVICE_LIST_STRATEGY"] == "cdi-cri"
    assert variables("cdi")["NVIDIA_CDI_HOOK_PATH"] == "/usr/bin/nvidia-cdi-hook"


def test_the_plugin_is_confined_but_for_mig() -> None:
    def container(mig: str) -> Any:
        return manifest(Choice(mig=mig)).objects[1]["spec"]["template"]["spec"]["containers"][0]

    assert container("none")["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container("single")["securityContext"] == {"capabilities": {"add": ["SYS_ADMIN"]}}


def test_a_namespace_of_its_own_allows_folders_of_the_host() -> None:
    first = manifest(Choice(namespace="gpu")).objects[0]
    assert (first["kind"], first["metadata"]["name"]) == ("Namespace", "gpu")
    assert first["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"
    assert [one["kind"] for one in manifest(Choice(test_pod=False)).objects] == ["RuntimeClass", "DaemonSet"]


@pytest.mark.parametrize("name", ["Gpu", "a" * 64])
def test_a_wrong_namespace_is_refused(name: str) -> None:
    done = CliRunner().invoke(cli, ("kubernetes", "manifest", "--namespace", name))
    assert isinstance(done.exception, GpuprovError)
    assert "no name of a namespace" in str(done.exception)


def test_a_node_selector_replaces_the_labels() -> None:
    text = printed("--node-selector", "pool=gpu", "--node-selector", "example.org/zone=a")
    pod = list(yaml.safe_load_all(text))[-2]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "gpu", "example.org/zone": "a"}
    assert "affinity" not in pod
    assert CliRunner().invoke(cli, ("kubernetes", "manifest", "--node-selector", "gpu")).exit_code == 2
