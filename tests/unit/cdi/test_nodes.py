"""Device nodes that a host lacks: made with mode and group, the rights over MIG among them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpuprov.cdi.discover import discover, missing_nodes
from gpuprov.cdi.generate import specification
from gpuprov.core.changes import MakeNode
from gpuprov.core.system import System
from tests import simgpu

pytestmark = pytest.mark.root
_MINORS = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\nodd line\nconfig x\n"


@pytest.fixture
def host(tmp_path: Path) -> System:
    """A host with one GPU whose driver has MIG capabilities, and no node at all."""
    simgpu.install_tree(tmp_path)
    simgpu.write_kernel_tree(tmp_path, 1)
    minors = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    minors.parent.mkdir(parents=True, exist_ok=True)
    minors.write_text(_MINORS)
    return System(str(tmp_path))


def test_what_is_missing_is_made_and_then_nothing_is_missing(host: System) -> None:
    missing = {node.path: node for node in missing_nodes(discover(host))}
    assert missing["/dev/nvidia-caps/nvidia-cap1"].mode == 0o400
    assert missing["/dev/nvidia-caps/nvidia-cap2"].mode == 0o444
    assert "/dev/nvidia-caps/nvidia-cap3" not in missing
    for node in missing.values():
        MakeNode(node.path, node.major, node.minor, node.mode, node.gid).apply(host, lambda *_: None)
    assert missing_nodes(discover(host)) == ()
    status = host.path("/dev/nvidia-caps/nvidia-cap1").stat()
    assert stat.S_ISCHR(status.st_mode)
    assert (os.minor(status.st_rdev), status.st_mode & 0o7777) == (1, 0o400)


def test_rights_over_mig_are_in_no_container_that_does_not_ask(host: System) -> None:
    found = specification(discover(host))
    paths = [node.path for edits in found.every_edits for node in edits.device_nodes]
    assert not [path for path in paths if "caps" in path]


def test_a_group_that_the_driver_is_told_of_is_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    MakeNode("/dev/nvidia0", 195, 0, 0o660, 44).apply(System(str(tmp_path)), lambda *_: None)
    status = (tmp_path / "dev/nvidia0").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (0, 44, 0o660)


@pytest.mark.parametrize(("there", "left"), [(None, None), ((195, 0), None), ((195, 7), (195, 7))])
def test_a_node_that_the_units_of_the_run_made_goes_with_it(
    tmp_path: Path, there: tuple[int, int] | None, left: tuple[int, int] | None
) -> None:
    """A node of other numbers was there before the plan, one of the same numbers was not."""
    host = System(str(tmp_path))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/null").write_text("")
    if there is not None:
        host.make_node("/dev/nvidia0", *there, 0o666)
    change = MakeNode("/dev/nvidia0", 195, 0)
    before = change.capture(host)
    change.apply(host, lambda *_: None)
    change.undo(host, before, {})
    found = host.status("/dev/nvidia0")
    assert ((found.major, found.minor) if found is not None else None) == left
