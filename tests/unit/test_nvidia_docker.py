"""When the command nvidia-docker is installed, replaced, kept, removed and brought back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.boot import nvidia_docker
from gpuprov.boot.nvidia_docker import InstallNvidiaDocker, is_ours
from gpuprov.core.changes import Change
from gpuprov.facts.host import HostFacts, gather
from gpuprov.facts.leftovers import NVIDIA_DOCKER as PATH
from gpuprov.packages.interface import PackageFacts
from gpuprov.plan.context import PlanContext
from gpuprov.protocol.spec import HostSpec, parse_spec
from tests import simgpu
from tests.unit.fake_host import FakeHost

pytestmark = pytest.mark.root
THEIRS = b"#!/bin/sh\n# NVIDIA's\n"


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver_version": simgpu.DRIVER_VERSION, **values})


WANTED = spec(nvidia_docker=True)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "root")


@pytest.fixture
def facts(host: FakeHost) -> HostFacts:
    return gather(host)


def apply(host: FakeHost, changes: tuple[Change, ...]) -> dict[str, Any]:
    """Apply the only change; return what it captured."""
    (change,) = changes
    before = dict(change.capture(host))
    change.apply(host, lambda *words: None)
    return before


def test_it_comes_where_it_is_asked_for_and_once(host: FakeHost, facts: HostFacts) -> None:
    assert nvidia_docker.plan(facts, spec()) == ()
    before = apply(host, nvidia_docker.plan(facts, WANTED))
    status = host.status(PATH)
    assert status is not None
    assert (status.mode, status.uid, is_ours(host.read_bytes(PATH) or b"")) == (0o755, 0, True)
    text = host.read_text(PATH) or ""
    assert f"\nexec {facts.interpreter.path} -I " in text and "/usr/lib/gpuprov/" in text
    assert nvidia_docker.plan(gather(host), WANTED) == ()
    InstallNvidiaDocker.undo(host, before, {})
    InstallNvidiaDocker.undo(host, before, {})
    assert not host.exists(PATH)


def test_one_of_another_version_or_mode_is_replaced(host: FakeHost, facts: HostFacts) -> None:
    apply(host, nvidia_docker.plan(facts, WANTED))
    host.change_mode(PATH, 0o777)
    assert nvidia_docker.plan(gather(host), WANTED) != ()
    host.change_mode(PATH, 0o755)
    moved = replace(facts.interpreter, path="/usr/bin/python3.99")
    assert nvidia_docker.plan(replace(gather(host), interpreter=moved), WANTED) != ()


def test_ours_goes_where_it_is_no_longer_asked_for(host: FakeHost, facts: HostFacts) -> None:
    apply(host, nvidia_docker.plan(facts, WANTED))
    (change,) = nvidia_docker.plan(gather(host), spec())
    assert change.summary() == f"remove {PATH} (gpuprov_nvidia_docker is false)"


@pytest.mark.parametrize("kind", ["file", "link", "large", "folder"])
def test_anothers_is_kept_and_named(host: FakeHost, kind: str) -> None:
    place = host.path(PATH)
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        place.symlink_to("/opt/nvidia-docker")
    elif kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(THEIRS if kind == "file" else bytes(5 << 20))
    facts = gather(host)
    assert nvidia_docker.plan(facts, WANTED) == nvidia_docker.plan(facts, spec()) == ()
    assert nvidia_docker.warning(facts, spec()) == ""
    assert nvidia_docker.warning(facts, WANTED).startswith(f"{PATH} is not gpuprov's: gpuprov keeps it")
    assert "remove it" in nvidia_docker.warning(facts, WANTED)
    packaged = replace(facts, packages=PackageFacts("apt", {"nvidia-docker2": "2.13.0-1"}))
    assert "remove nvidia-docker2" in nvidia_docker.warning(packaged, WANTED)
    assert "belongs to the package nvidia-docker2" in nvidia_docker.warning(packaged, WANTED)


@pytest.mark.parametrize("left", ["package", "file"])
def test_a_migration_makes_room_in_the_same_run(host: FakeHost, left: str) -> None:
    host.path(PATH).parent.mkdir(parents=True, exist_ok=True)
    host.path(PATH).write_bytes(THEIRS)
    facts = gather(host)
    if left == "package":
        facts = replace(facts, packages=replace(facts.packages, installed={"nvidia-docker2": "2.13.0-1"}))
    else:
        facts = replace(facts, leftovers=replace(facts.leftovers, files=(PATH,)))
    for wanted, plans in ((WANTED, False), (spec(nvidia_docker=True, migrate_nvidia_docker=True), True)):
        later = PlanContext(facts, wanted).migrated
        assert bool(nvidia_docker.plan(later, wanted)) is plans
        assert bool(nvidia_docker.warning(later, wanted)) is not plans


def test_the_way_back_keeps_what_a_package_has_brought_since(host: FakeHost, facts: HostFacts) -> None:
    before = apply(host, nvidia_docker.plan(facts, WANTED))
    assert InstallNvidiaDocker.irreversible(host, before, {}, ()) == ()
    host.write(PATH, THEIRS, mode=0o755)
    assert InstallNvidiaDocker.irreversible(host, before, {}, ()) == (f"{PATH} stays: it is no longer gpuprov's",)
    InstallNvidiaDocker.undo(host, before, {})
    assert host.read_bytes(PATH) == THEIRS
