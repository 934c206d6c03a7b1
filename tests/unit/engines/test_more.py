"""Engines besides docker, as an installation keeps them: told, restarted if they run, brought back if that fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.engines import more
from gpuprov.engines.more import ConfigureEngine, gather, plan, problems
from gpuprov.plan.steps import engine_runtimes
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH
from gpuprov.wire.errors import GpuprovError
from gpuprov.wire.spec import parse_spec

CONTAINERD = 'version = 2\n# mine\n[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "pause:3.9"\n'
WISHES = {"containerd": LAUNCHER_PATH, "podman": LAUNCHER_PATH}


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
    changes = [change for change in plan(gather(host, WISHES)) if isinstance(change, ConfigureEngine)]
    for change in changes:
        change.apply(host, lambda *_: None)
    return changes


def test_engines_are_told_once_and_the_running_one_is_restarted_once(host: Host) -> None:
    assert [change.engine for change in applied(host)] == ["containerd", "podman"]
    assert host.restarts == 1
    text = host.config.read_text()
    assert text.startswith(CONTAINERD) and f'BinaryName = "{LAUNCHER_PATH}"' in text
    assert host.config.stat().st_mode & 0o777 == 0o640
    assert plan(gather(host, WISHES)) == ()


def test_a_stopped_engine_reads_its_files_when_somebody_starts_it(host: Host) -> None:
    host.active = False
    applied(host)
    assert host.restarts == 0


def test_an_engine_that_does_not_come_up_gets_its_files_back(host: Host) -> None:
    host.starts = False
    (change,) = plan(gather(host, {"containerd": LAUNCHER_PATH}))
    with pytest.raises(GpuprovError, match="did not come up with its new configuration; the old one is back") as caught:
        change.apply(host, lambda *_: None)
    assert "error: no such plugin" in str(caught.value)
    assert host.config.read_text() == CONTAINERD
    assert host.active and host.restarts == 2


def test_undoing_gives_back_every_byte(host: Host) -> None:
    before = {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()}
    changes = plan(gather(host, WISHES))
    images = [change.capture(host) for change in changes]
    applied(host)
    for change, image in reversed(list(zip(changes, images))):
        type(change).undo(host, image, None)
    assert {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()} == before


def test_the_summary_says_what_is_restarted_and_what_becomes_of_containers(host: Host) -> None:
    first, second = plan(gather(host, WISHES))
    assert first.summary().endswith("config.toml and restart containerd (its containers go on)")
    assert "restart" not in second.summary()
    assert "+BinaryName" in first.diff(host).replace(" ", "")


def test_engines_that_are_missing_or_broken_are_problems_told_together(host: Host) -> None:
    host.config.write_text("version = \n")
    found = problems(gather(host, {"containerd": LAUNCHER_PATH, "crio": LAUNCHER_PATH}))
    assert found[0].what == "crio is not installed"
    assert "line 1" in str(found[1])
    assert plan(gather(host, {"containerd": LAUNCHER_PATH})) == ()


def test_only_engines_that_are_asked_for_are_looked_at(host: Host) -> None:
    assert gather(host, engine_runtimes(parse_spec({}))) == {}
    assert host.asked == []
    wishes = engine_runtimes(parse_spec({"engines": ["containerd"], "toolkit": "nvidia"}))
    assert wishes == {"containerd": "/usr/bin/nvidia-container-runtime"}
    assert set(more.ENGINES) == {"containerd", "crio", "podman"}


@pytest.mark.parametrize("engine", ["docker", "k3s", "x"])
def test_other_names_are_refused(engine: str) -> None:
    with pytest.raises(GpuprovError, match="is not one of containerd, crio, podman"):
        parse_spec({"engines": [engine]})


def test_the_programs_are_looked_for_where_root_finds_them(host: Host) -> None:
    (host.root / "usr/bin/podman").unlink()
    assert not gather(host, WISHES)["podman"].installed
