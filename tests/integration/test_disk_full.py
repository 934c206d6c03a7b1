"""A disk that fills up in any change of a run: the change is undone, said why, and the next run goes on from there.

The host's programs are played; test_faults_on_hosts.py fills the disk of a real one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprov.apply import take_up
from gpuprov.journal import read_runs
from gpuprov.plan import CHANGE_KINDS
from gpuprov.spec import HostSpec
from tests.unit.fake_host import FakeHost, Tree
from tests.unit.test_laws import FOREIGN, finished, ignore, install, spec

__all__ = ["spec"]
pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")]
_FILLER = "filler"


class FillingHost(FakeHost):
    """A host whose disk somebody fills as soon as the change of this kind has begun."""

    fills_in = ""
    begun: Tree

    def append(self, path: str, content: bytes) -> None:
        super().append(path, content)
        begun = read_runs(self)[-1].interrupted
        if begun is not None and begun.kind == self.fills_in:
            self.begun = self.tree()
            self.fill()

    def fill(self) -> None:
        with (self.root / _FILLER).open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def empty(self) -> None:
        (self.root / _FILLER).unlink(missing_ok=True)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FillingHost]:
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=48m,huge=never", "gpuprov-full", str(tmp_path)), check=True)
    try:
        made = FillingHost(tmp_path, gpus=1)
        for path, text in FOREIGN.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        made.run(("systemctl", "reload", "docker.service"))
        yield made
    finally:
        subprocess.run(("umount", str(tmp_path)), check=True)


def differences(one: Tree, other: Tree) -> set[str]:
    return {path for path in {*one, *other} if one.get(path) != other.get(path)}


# What its programs do not need the disk for is not here: the package manager, which tests of its own make fail.
NEEDS_ROOM = (
    "FetchRunfile", "InstallKey", "WriteFile", "InstallDriver", "PrepareBoot", "InstallRuntime",
    "WriteCdiSpecification", "ReconfigureDocker",
)  # fmt: skip


def test_full_in_any_change_it_is_undone_and_the_next_run_goes_on(host: FillingHost, spec: HostSpec) -> None:
    for kind in NEEDS_ROOM:
        host.fills_in = kind
        told = finished(install(host, spec))
        assert told.exit_code == 1, kind
        said = "\n".join(map(str, told.problems))
        assert "No space left on device" in said or "not enough room" in said, f"{kind}: {said}"
        assert "df -h" in said and "bug" not in said, f"{kind}: {said}"
        host.fills_in = ""
        host.empty()
        # Undone, at once or as the next run begins: nothing is there but what is whole.
        take_up(host, CHANGE_KINDS, ignore)
        entries = read_runs(host)[-1].entries
        assert entries[-1].kind == kind and entries[-1].state != "begun"
        assert differences(host.tree(), host.begun) == set(), kind
    assert finished(install(host, spec)).exit_code == 0
    assert finished(install(host, spec)).changed == 0
