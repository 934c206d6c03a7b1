"""Engines besides docker, as an installation keeps them: told, restarted if they run, brought back if that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.engines import known
from gpuprov.engines.configure import configuration
from gpuprov.engines.known import ENGINES, ConfigureRequest, RuntimeEntry
from gpuprov.engines.other_engines import ConfigureEngine, gather, names, plan, problems, with_coming
from gpuprov.facts.host import gather as gather_facts
from gpuprov.plan.context import PlanContext
from gpuprov.plan.steps import STEPS
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import parse_spec
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH
from tests.unit.fake_host import FakeHost

CONTAINERD = 'version = 2\n# mine\n[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "pause:3.9"\n'
BOTH = ("containerd", "podman")


class Host(System):
    """A host with containerd 1.7 and podman, whose systemctl does what it is told to, or not."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.active = True
        self.starts = True
        self.asked: list[tuple[str, ...]] = []
        for program in ("containerd", "podman"):
            path = root / "usr/bin" / program
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n")
            path.chmod(0o755)
        self.config = root / "etc/containerd/config.toml"
        self.config.parent.mkdir(parents=True)
        self.config.write_text(CONTAINERD)
        self.config.chmod(0o640)

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        argv = tuple(argv)
        self.asked.append(argv)
        if argv == ("/usr/bin/containerd", "--version"):
            return Completed(argv, 0, "containerd github.com/containerd/containerd 1.7.24 1.7.24~ds1-6\n", "")
        if argv[0] == "journalctl":
            return Completed(argv, 0, "starting\nerror: no such plugin\n", "")
        assert argv[0] == "systemctl"
        if argv[1] == "restart":
            self.active = self.starts
            # What does not start with the new file starts with the old one.
            self.starts = True
            return Completed(argv, 0 if self.active else 1, "", "")
        return Completed(argv, 0 if argv[1] != "is-active" or self.active else 3, "", "")

    @property
    def restarts(self) -> int:
        return len([argv for argv in self.asked if argv[:2] == ("systemctl", "restart")])


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def applied(host: Host) -> list[ConfigureEngine]:
    changes = [change for change in plan(gather(host, BOTH), LAUNCHER_PATH) if isinstance(change, ConfigureEngine)]
    for change in changes:
        change.apply(host, lambda *_: None)
    return changes


def test_engines_are_told_once_and_the_running_one_is_restarted_once(host: Host) -> None:
    assert [change.engine for change in applied(host)] == ["containerd", "podman"]
    assert host.restarts == 1
    text = host.config.read_text()
    assert text.replace("enable_cdi = true  # gpuprov: added\n", "").startswith(CONTAINERD)
    assert f'BinaryName = "{LAUNCHER_PATH}"' in text
    assert host.config.stat().st_mode & 0o777 == 0o640
    assert plan(gather(host, BOTH), LAUNCHER_PATH) == ()


def test_a_stopped_engine_reads_its_files_when_somebody_starts_it(host: Host) -> None:
    host.active = False
    applied(host)
    assert host.restarts == 0


def test_an_engine_that_does_not_come_up_gets_its_files_back(host: Host) -> None:
    host.starts = False
    (change,) = plan(gather(host, ("containerd",)), LAUNCHER_PATH)
    with pytest.raises(GpuprovError, match="failed to start with its new configuration; the old one is back") as caught:
        change.apply(host, lambda *_: None)
    assert "error: no such plugin" in str(caught.value)
    assert host.config.read_text() == CONTAINERD
    assert host.active and host.restarts == 2


def test_undoing_gives_back_every_byte(host: Host) -> None:
    before = {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()}
    changes = plan(gather(host, BOTH), LAUNCHER_PATH)
    images = [change.capture(host) for change in changes]
    applied(host)
    for change, image in reversed(list(zip(changes, images))):
        type(change).undo(host, image, None)
    assert {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()} == before


def test_the_summary_says_what_is_restarted_and_what_becomes_of_containers(host: Host) -> None:
    first, second = plan(gather(host, BOTH), LAUNCHER_PATH)
    assert first.summary().endswith("config.toml and restart containerd (its containers go on)")
    assert "restart" not in second.summary()
    assert "+BinaryName" in first.diff(host).replace(" ", "")


def test_engines_that_are_missing_or_broken_are_problems_told_together(host: Host) -> None:
    host.config.write_text("version = \n")
    found = problems(gather(host, ("containerd", "crio")), LAUNCHER_PATH)
    assert found[0].what == "crio is not installed"
    assert "line 1" in str(found[1])
    assert plan(gather(host, ("containerd",)), LAUNCHER_PATH) == ()


def test_only_engines_that_are_asked_for_are_looked_at(host: Host) -> None:
    assert gather(host, ()) == {}
    assert host.asked == []
    assert set(ENGINES) == {"containerd", "crio", "podman", "k3s", "rke2", "microk8s"}


@pytest.mark.parametrize(
    ("values", "dockerd", "expected"),
    [
        ({}, True, ()),
        ({"engines": ["crio"]}, True, ("crio",)),
        ({"docker": "none"}, False, ("containerd", "podman")),
        # Docker's containerd is docker's.
        ({"docker": "none"}, True, ("podman",)),
        ({"docker": "none", "engines": ["containerd"]}, True, ("containerd",)),
    ],
)
def test_without_docker_the_installed_engines_are_meant(
    host: Host, values: dict[str, Any], dockerd: bool, expected: tuple[str, ...]
) -> None:
    if dockerd:
        (host.root / "usr/bin/dockerd").touch(0o755)
    assert names(host, parse_spec(values)) == expected


@pytest.mark.parametrize("values", [{"docker": "none"}, {"engines": ["podman"]}])
def test_podman_of_the_runs_own_packages_is_configured_in_the_same_run(host: Host, values: dict[str, Any]) -> None:
    (host.root / "usr/bin/podman").unlink()
    (host.root / "usr/bin/containerd").unlink()
    without, spec = parse_spec(values), parse_spec({**values, "packages": ["podman=5.4.2-1"]})
    assert not [one for one in gather(host, names(host, without)).values() if one.program]
    found = with_coming(gather(host, names(host, spec)), spec)
    assert problems(found, LAUNCHER_PATH) == ()
    (change,) = plan(found, LAUNCHER_PATH)
    assert isinstance(change, ConfigureEngine) and change.engine == "podman"


def test_an_engine_that_is_kept_running_reads_its_files_later_and_is_not_restarted_by_the_undoing(host: Host) -> None:
    before = host.config.read_text()
    (change,) = plan(gather(host, ("containerd",)), LAUNCHER_PATH, frozenset({"containerd"}))
    image = change.capture(host)
    change.apply(host, lambda *_: None)
    assert host.config.read_text() != before
    type(change).undo(host, image, None)
    assert (host.config.read_text(), host.restarts) == (before, 0)


@pytest.mark.parametrize(
    ("paths", "found", "own"),
    [
        ((), (), ()),
        (("usr/bin/kubelet",), ("kubelet",), ()),
        (("usr/local/bin/k3s", "snap/bin/microk8s"), ("k3s", "microk8s"), ("k3s", "microk8s")),
    ],
)
def test_what_makes_a_host_a_kubernetes_node(
    host: Host, paths: tuple[str, ...], found: tuple[str, ...], own: tuple[str, ...]
) -> None:
    for path in paths:
        (host.root / path).parent.mkdir(parents=True, exist_ok=True)
        (host.root / path).touch()
    assert known.kubernetes_programs(host) == found
    assert known.own_engines(found) == own


@pytest.mark.parametrize("toolkit", ["bundled", "nvidia"])
def test_the_step_engines_registers_the_runtime_of_the_spec(host: Host, tmp_path: Path, toolkit: str) -> None:
    (tmp_path / "fake").mkdir()
    facts = replace(gather_facts(FakeHost(tmp_path / "fake")), engines=gather(host, ("podman",)))
    step = next(one for one in STEPS if one.name == "engines")
    (change,) = step.plan(PlanContext(facts, parse_spec({"toolkit": toolkit})))
    runtime = {"bundled": LAUNCHER_PATH, "nvidia": "/usr/bin/nvidia-container-runtime"}[toolkit]
    assert f'+nvidia = ["{runtime}"]' in change.diff(host)


IMPORTED = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "pause:3.9"\n'


@pytest.mark.parametrize(
    ("engine", "files"),
    [
        ("containerd", {"etc/containerd/config.toml": CONTAINERD}),
        ("containerd", {"etc/containerd/config.toml": 'version = 2\nimports = ["/opt/*.toml"]\n',
                        "opt/a.toml": IMPORTED}),
        ("containerd", {"etc/containerd/config.toml": 'version = 2\nimports = ["conf.d/*.toml"]\n',
                        "etc/containerd/conf.d/10-cri.toml": "version = 2\n"}),
        ("containerd", {"etc/containerd/config.toml": ""}),
        ("crio", {"etc/crio/crio.conf.d/10-crun.conf": '[crio.runtime]\ndefault_runtime = "crun"\n'
                  '[crio.runtime.runtimes.crun]\nruntime_path = "/usr/bin/crun"\nmonitor_path = "/usr/bin/conmon"\n'}),
        ("podman", {"etc/containers/containers.conf.d/99-nvidia.conf": "[engine]\n# mine\n"}),
    ],
)  # fmt: skip
def test_facts_give_the_same_edits_as_the_host_itself(host: Host, engine: str, files: dict[str, str]) -> None:
    """The plan reads gathered files, `gpuprov runtime configure` reads the host: neither may see more."""
    (host.root / "usr/bin/crio").touch(0o755)
    for path, text in files.items():
        (host.root / path).parent.mkdir(parents=True, exist_ok=True)
        (host.root / path).write_text(text)
    # containerd 1.7 reads CDI on request alone.
    entry = RuntimeEntry(path=LAUNCHER_PATH, cdi=engine == "containerd")
    found = configuration(host, ConfigureRequest(engine, entry))
    (change,) = plan(gather(host, (engine,)), LAUNCHER_PATH)
    assert isinstance(change, ConfigureEngine)
    assert change.edits == tuple(edit for edit in found.edits if edit.changes) != ()
