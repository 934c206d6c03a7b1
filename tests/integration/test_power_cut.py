"""A power cut at the journal's writes, on real file systems: what was not synced is gone, and the next run copes.

The host's programs are played here; test_faults_on_hosts.py cuts the power of a real one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuprov.journal import read_runs
from gpuprov.request import Request
from gpuprov.run import run_request
from gpuprov.spec import HostSpec
from gpuprov.system import System
from tests.disk import FILE_SYSTEMS, MEMORY, Disk
from tests.unit.fake_host import FakeHost, Tree
from tests.unit.test_laws import FOREIGN, finished, ignore, install, spec

__all__ = ["spec"]
pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")]


class PoweredHost(FakeHost):
    """A host that lets somebody look at each line that its journal has got, and before it waits for the disk."""

    written: Callable[[str], None] | None = None
    unsynced: Callable[[], None] | None = None

    def append(self, path: str, content: bytes) -> None:
        super().append(path, content)
        if self.written is not None:
            self.written(content.decode())

    def sync(self) -> None:
        if self.unsynced is not None:
            self.unsynced()
        System.sync(self)

    def after_a_cut(self) -> Callable[[Path], FakeHost]:
        """Return what makes this host, as it is now, anew over a file system that a cut has left."""
        programs = copy.deepcopy({**vars(self), "written": None, "unsynced": None})

        def made(root: Path) -> FakeHost:
            found = FakeHost.__new__(FakeHost)
            found.__dict__.update(copy.deepcopy(programs), root=root)
            return found

        return made


@pytest.fixture
def disk(kind: str) -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        made = Disk(kind, Path(folder) / "disk")
        made.make()
        yield made


@contextlib.contextmanager
def running(disk: Disk) -> Iterator[PoweredHost]:
    """Give a host that others use, too, all of it synced."""
    with disk.mounted() as root:
        host = PoweredHost(root, gpus=1)
        for path, text in FOREIGN.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        host.run(("systemctl", "reload", "docker.service"))
        host.sync()
        yield host


def lasting(host: FakeHost) -> Tree:
    """Return what is more than memory on a host, and the same in every run: byte code holds the time of its source."""
    tree = host.tree()
    return {path: tree[path] for path in tree if not path.startswith(("/run/", "/lost+found")) and ".pyc" not in path}


def differences(one: Tree, other: Tree) -> set[str]:
    return {path for path in {*one, *other} if one.get(path) != other.get(path)}


def last_kind(host: FakeHost, state: str) -> str:
    """Return the kind of the change that has come to this state last."""
    found = [entry.kind for entry in read_runs(host)[-1].entries if entry.state == state]
    return found[0 if state == "undone" else -1]


def _write_in_a_new_folder(system: System) -> None:
    system.make_directory("/a/b")
    system.write("/a/b/c", b"new")


def _download(system: System) -> None:
    """As a download ends: written piece by piece, and given its name."""
    system.path("/old.part").write_bytes(b"new" * 1000)
    system.rename("/old.part", "/old")


def _sync(system: System) -> None:
    system.path("/new").write_bytes(b"new")
    system.remove("/old")
    system.sync()


VERBS: dict[str, Callable[[System], None]] = {
    "write": lambda system: system.write("/old", b"new" * 1000),
    "write in a new folder": _write_in_a_new_folder,
    "append": lambda system: system.append("/old", b"new"),
    "append to a new file": lambda system: system.append("/new", b"new"),
    "rename": _download,
    "sync": _sync,
}


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_what_is_written_is_on_the_disk_when_the_call_returns(disk: Disk) -> None:
    def content(root: Path) -> dict[str, bytes]:
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    promised: dict[str, dict[str, bytes]] = {}
    for name, act in VERBS.items():
        with disk.mounted() as root:
            for path in (path for path in root.iterdir() if path.name != "lost+found"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            (root / "old").write_bytes(b"old")
            os.sync()
            act(System(str(root)))
            promised[name] = content(root)
            cut = disk.cut(name)
        with cut.mounted() as root:
            assert content(root) == promised[name], name
    assert promised["rename"]["old"] == b"new" * 1000 and promised["sync"] == {"new": b"new"}


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_what_the_journal_calls_done_or_undone_is_on_the_disk(disk: Disk, spec: HostSpec) -> None:
    """Looked at once for each kind of change."""
    cuts: dict[tuple[str, str], tuple[Disk, Callable[[Path], FakeHost], Tree]] = {}
    with running(disk) as host:

        def note(line: str) -> None:
            state = line.split('"')[1]
            if state in ("done", "undone") and (change := (state, last_kind(host, state))) not in cuts:
                cuts[change] = (disk.cut("-".join(change)), host.after_a_cut(), host.tree())

        host.written = note
        assert finished(install(host, spec)).exit_code == 0
        run_request(Request("rollback"), ignore, host)
    assert {("undone", kind) for kind in ("InstallDriver", "InstallRuntime", "PrepareBoot")} <= cuts.keys()
    for change, (cut, after_a_cut, promised) in cuts.items():
        with cut.mounted() as place:
            assert differences(after_a_cut(place).tree(), promised) == set(), change


@pytest.mark.parametrize("kind", ["ext4", "btrfs"])
def test_cut_in_any_change_the_next_run_ends_as_an_undisturbed_one(disk: Disk, spec: HostSpec) -> None:
    """Cut where the most is at stake: all of a change is made, and of that only what was synced by itself is there."""
    cuts: dict[tuple[str, int], tuple[Disk, Callable[[Path], FakeHost]]] = {}
    syncs: Counter[str] = Counter()
    with running(disk) as host:

        def note() -> None:
            kind = last_kind(host, "begun")
            # The driver's change syncs twice: its files, and that they are whole.
            key = read_runs(host)[-1].entries[-1].key
            syncs[key] += 1
            if (kind, syncs[key]) not in cuts:
                cuts[kind, syncs[key]] = (disk.cut(f"{kind}{syncs[key]}"), host.after_a_cut())

        host.unsynced = note
        assert finished(install(host, spec)).exit_code == 0
        undisturbed = lasting(host)
    assert {("InstallDriver", 2), ("InstallRuntime", 1), ("PrepareBoot", 1), ("ReconfigureDocker", 1)} <= cuts.keys()
    for change, (cut, after_a_cut) in cuts.items():
        with cut.mounted() as place:
            after = after_a_cut(place)
            done = finished(install(after, spec))
            assert done.exit_code == 0, f"{change}: {done.problems}"
            assert differences(lasting(after), undisturbed) == set(), change
            assert finished(install(after, spec)).changed == 0, change
