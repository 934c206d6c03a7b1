"""Kubernetes nodes as an installation keeps them: k3s, RKE2 and microk8s, and when their services are restarted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.engines.cri_status import CriStatus
from gpuprov.engines.other_engines import (
    ConfigureEngine,
    EngineFacts,
    gather,
    kept_running,
    names,
    plan,
    problems,
    restart_command,
)
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH
from tests.unit.engines.test_containerd import K3S, NEW_K3S, OLD_K3S

MICROK8S = "/var/snap/microk8s/current/args/containerd-template.toml"
MICROK8S_TEXT = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\ndefault_runtime_name = "${RUNTIME}"\n'
FILES = {
    "k3s": {"/usr/local/bin/k3s": "", f"{K3S}/config.toml": NEW_K3S},
    "rke2": {"/opt/rke2/bin/rke2": "", f"{K3S.replace('k3s', 'rke2')}/config.toml": NEW_K3S.replace("k3s", "rke2")},
    "microk8s": {"/snap/bin/microk8s": "", MICROK8S: MICROK8S_TEXT},
}
WRITTEN = {
    "k3s": f"{K3S}/config-v3.toml.d/99-nvidia.toml",
    "rke2": f"{K3S.replace('k3s', 'rke2')}/config-v3.toml.d/99-nvidia.toml",
    "microk8s": MICROK8S,
}
UNITS = {"k3s": "k3s-agent", "rke2": "rke2-agent", "microk8s": "snap.microk8s.daemon-containerd"}


class Node(System):
    """A node with a distribution, whose systemctl keeps to itself what it is told."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(str(root))
        for path, text in FILES[name].items():
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True)
            place.write_text(text)
        self.restarted: list[str] = []

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        argv = tuple(argv)
        assert argv[0] == "systemctl", argv
        if argv[1] == "restart":
            self.restarted.append(argv[-1])
        is_server = argv[-1] in ("k3s.service", "rke2-server.service")
        return Completed(argv, 3 if argv[1] == "is-active" and is_server else 0, "", "")


def spec(name: str, **values: Any) -> HostSpec:
    return parse_spec({"docker": "none", "engines": [name], **values})


def changes(node: System, name: str, **values: Any) -> list[ConfigureEngine]:
    wanted = spec(name, **values)
    facts = gather(node, names(node, wanted))
    assert problems(facts, LAUNCHER_PATH, set_default=wanted.default_runtime) == ()
    kept = kept_running(facts, (name,), wanted)
    found = plan(facts, LAUNCHER_PATH, kept, set_default=wanted.default_runtime)
    return [one for one in found if isinstance(one, ConfigureEngine)]


@pytest.mark.parametrize("name", ["k3s", "rke2", "microk8s"])
def test_a_named_distribution_is_configured_and_not_restarted(tmp_path: Path, name: str) -> None:
    node = Node(tmp_path, name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (change,) = changes(node, name)
    assert [edit.path for edit in change.edits] == [WRITTEN[name]]
    assert f"is not restarted: type systemctl restart {UNITS[name]}" in change.summary()
    image = change.capture(node)
    change.apply(node, lambda *_: None)
    assert node.restarted == [] and changes(node, name) == []
    assert LAUNCHER_PATH in str(node.read_text(WRITTEN[name]))
    type(change).undo(node, image, {})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert node.restarted == []


@pytest.mark.parametrize("name", ["k3s", "rke2", "microk8s"])
def test_it_is_restarted_where_that_is_asked_for(tmp_path: Path, name: str) -> None:
    node = Node(tmp_path, name)
    (change,) = changes(node, name, restart_kubernetes=True)
    assert f"and restart {UNITS[name]} (its pods go on" in change.summary()
    image = change.capture(node)
    change.apply(node, lambda *_: None)
    assert node.restarted == [f"{UNITS[name]}.service"]
    type(change).undo(node, image, {})
    assert node.restarted == [f"{UNITS[name]}.service"] * 2


@pytest.mark.parametrize(("asked", "restarts"), [(False, []), (True, ["k3s-agent.service"])])
def test_files_that_it_has_not_read_yet_are_read_by_a_restart_that_is_asked_for(
    tmp_path: Path, asked: bool, restarts: list[str]
) -> None:
    node = Node(tmp_path, "k3s")
    for change in changes(node, "k3s"):
        change.apply(node, lambda *_: None)
    wanted = spec("k3s", restart_kubernetes=asked)
    facts = {"k3s": replace(gather(node, ("k3s",))["k3s"], running=CriStatus(("runc",)))}
    assert facts["k3s"].has_not_read_its_files
    assert restart_command("k3s", facts["k3s"]) == "systemctl restart k3s-agent"
    for found in plan(facts, LAUNCHER_PATH, kept_running(facts, ("k3s",), wanted)):
        assert "it runs and has not read its files" in found.summary() and found.diff(node) == ""
        image = found.capture(node)
        found.apply(node, lambda *_: None)
        # Nothing was written, so a rollback has nothing to bring back.
        type(found).undo(node, image, {})
    assert node.restarted == restarts


def test_default_runtime(tmp_path: Path) -> None:
    (change,) = changes(Node(tmp_path / "k3s", "k3s"), "k3s", default_runtime=True)
    assert b'default_runtime_name = "nvidia"' in (change.edits[0].after or b"")
    old = Node(tmp_path / "old", "k3s")
    old.write(f"{K3S}/config.toml", OLD_K3S.encode())
    (problem,) = problems(gather(old, ("k3s",)), LAUNCHER_PATH, set_default=True)
    assert "put `default-runtime: nvidia` into /etc/rancher/k3s/config.yaml" in problem.next_step


def test_runtime_that_k3s_finds_itself_needs_no_file(tmp_path: Path) -> None:
    node = Node(tmp_path, "k3s")
    node.write(f"{K3S}/config.toml", OLD_K3S.encode())
    assert plan(gather(node, ("k3s",)), "/usr/bin/nvidia-container-runtime") == ()
    assert len(plan(gather(node, ("k3s",)), LAUNCHER_PATH)) == 1
    node.make_directory("/usr/local/nvidia/toolkit")
    node.write("/usr/local/nvidia/toolkit/nvidia-container-runtime", b"")
    assert plan(gather(node, ("k3s",)), LAUNCHER_PATH) == ()
    (problem,) = problems(gather(node, ("k3s",)), LAUNCHER_PATH)
    assert "itself adds a runtime nvidia" in problem.what


def test_a_distribution_is_configured_only_if_it_is_named(tmp_path: Path) -> None:
    node = Node(tmp_path, "k3s")
    assert names(node, parse_spec({"docker": "none"})) == ()
    (problem,) = problems(gather(node, ("rke2",)), LAUNCHER_PATH)
    assert problem.what == "rke2 is not installed"


@pytest.mark.parametrize(
    ("version", "text", "enabled"),
    [
        ("1.6.20", "", False),
        ("1.7.24", "", True),
        ("1.7.24", "enable_cdi = false\n", False),
        ("1.7.24", "enable_cdi = true\n", False),
        ("2.1.9", "", False),
    ],
)
def test_cdi_is_switched_on_in_containerd_1_7_unless_somebody_has_decided(
    version: str, text: str, enabled: bool
) -> None:
    main = "/etc/containerd/config.toml"
    config = f'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n{text}'.encode()
    facts = EngineFacts(
        "/usr/bin/containerd", f"containerd github.com/containerd/containerd {version}\n", {main: config}
    )
    (change,) = plan({"containerd": facts}, LAUNCHER_PATH)
    assert isinstance(change, ConfigureEngine)
    added = b"".join(edit.after or b"" for edit in change.edits).count(b"enable_cdi = true") - config.count(b"= true")
    assert added == enabled
