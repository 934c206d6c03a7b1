"""Manifests: what they say, held against Kubernetes' own schemas of several releases (kubernetes-validate)."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from gpuprov.cli.main import cli
from gpuprov.kubernetes.manifest import Choice, manifest
from gpuprov.kubernetes.verify import verification_pod
from gpuprov.protocol.errors import GpuprovError

# The oldest that NVIDIA's components of the table support among those with DRA, and the newest two that the tests know.
_RELEASES = ("1.32", "1.36", "1.37")
_PLUGINS = [Choice(), Choice(strategy="cdi", namespace="gpu", mig="mixed"), Choice(mig="single")]


def printed(*words: str) -> str:
    done = CliRunner().invoke(cli, ("kubernetes", "manifest", *words))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("release", _RELEASES)
@pytest.mark.parametrize("choice", _PLUGINS, ids=str)
def test_the_device_plugins_objects_are_valid(choice: Choice, release: str) -> None:
    for one in manifest(choice).objects:
        kubernetes_validate.validate(one, release, strict=True)


@pytest.mark.parametrize("release", ["1.34", "1.37"])
def test_claims_are_valid_for_the_releases_that_serve_them(release: str) -> None:
    for one in manifest(Choice("dra")).objects:
        kubernetes_validate.validate(one, release, strict=True)


@pytest.mark.parametrize("release", _RELEASES)
def test_the_pod_of_a_verification_is_valid_and_restricted(release: str) -> None:
    pod = verification_pod(
        "gpuprov-verify-a-0",
        "gpu01",
        run="a",
        image="ubuntu",
        resources={"nvidia.com/gpu": 2},
        by_class=True,
        seconds=0.5,
    )
    kubernetes_validate.validate(pod, release, strict=True)
    assert pod["spec"]["activeDeadlineSeconds"] == 1
    # https://kubernetes.io/docs/concepts/security/pod-security-standards/: restricted
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_an_invalid_object_does_not_pass() -> None:
    broken: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": {"containers": [{}]},
    }
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


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--namespace", "Gpu"), "no name of a namespace"), (("--namespace", "a" * 64), "no name of a namespace")],
)
def test_a_wrong_call_is_refused(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(cli, ("kubernetes", "manifest", *words))
    assert isinstance(done.exception, GpuprovError)
    assert said in str(done.exception)


def test_a_node_selector_replaces_the_labels() -> None:
    text = printed("--node-selector", "pool=gpu", "--node-selector", "example.org/zone=a")
    pod = list(yaml.safe_load_all(text))[-2]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "gpu", "example.org/zone": "a"}
    assert "affinity" not in pod
    assert CliRunner().invoke(cli, ("kubernetes", "manifest", "--node-selector", "gpu")).exit_code == 2
