"""A power cut at each of the journal's writes, on real file systems: what was not synced is gone, the next run copes.

The host's programs are played here; test_faults_on_hosts.py cuts the power of a real one.
"""

import contextlib
import copy
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.run import run_request
from gpuprov.core.files import temporary_name
from gpuprov.core.journal import RUNS_DIRECTORY, read_runs
from gpuprov.core.system import System
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec
from tests.disk import FILE_SYSTEMS, MEMORY, Disk
from tests.read_once import read_once
from tests.runs import ignore
from tests.unit.ask import finished
from tests.unit.fake_host import FakeHost, Tree
from tests.unit.test_laws import install, lay_foreign, spec

__all__ = ["spec"]
pytestmark = pytest.mark.root


class PoweredHost(FakeHost):
    """A host whose journal is watched. `at(moment, line)` is called, with a line that is being written:

    torn: half of it is on the disk; unsynced: a change is made, and nobody has waited for the disk (there is no line
    yet); whole: it is on the disk.
    """

    at: Callable[[str, str], None] = staticmethod(lambda moment, line: None)

    def write(self, path: str, content: bytes, **more: Any) -> None:
        if path.startswith(RUNS_DIRECTORY):
            # A journal's first line comes with its file, whole: a cut leaves half of it under another name.
            System.append(self, str(temporary_name(Path(path))), content[: len(content) // 2])
            self.at("torn", content.decode())
        super().write(path, content, **more)
        if path.startswith(RUNS_DIRECTORY):
            self.at("whole", content.decode())

    def append(self, path: str, content: bytes) -> None:
        size = self.path(path).stat().st_size
        super().append(path, content[: len(content) // 2])
        self.at("torn", content.decode())
        os.truncate(self.path(path), size)
        super().append(path, content)
        self.at("whole", content.decode())

    def sync(self) -> None:
        self.at("unsynced", "")
        System.sync(self)

    def after_a_cut(self) -> Callable[[Path], FakeHost]:
        """Return what makes this host, as it is now, again over a file system that a cut has left."""
        programs = copy.deepcopy({**vars(self), "at": None})

        def made(root: Path) -> FakeHost:
            found = FakeHost.__new__(FakeHost)
            found.__dict__.update(copy.deepcopy(programs), root=root)
            return found

        return made


@dataclass(frozen=True)
class Cut:
    """What a power cut has left of a host, and what was there in memory."""

    name: str
    disk: Disk
    after: Callable[[Path], FakeHost]
    promised: Tree

    @contextlib.contextmanager
    def booted(self, *, whole: bool = False) -> Iterator[FakeHost]:
        """Give the host as it boots from that disk: /run and /dev are new, docker reads its file.

        `whole`: the disk has all that was in memory.
        """
        with self.disk.mounted() as root:
            host = self.after(root)
            if whole:
                assert differences(host.tree(), self.promised) == set(), self.name
            for path in (*(root / "run").glob("gpuprov*"), *(root / "dev").glob("nvidia*")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            host.run(("systemctl", "restart", "docker.service"))
            yield host


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """Keep what is read out of the same bytes on each of a hundred disks: most of what an installation costs here."""
    with read_once():
        yield


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
        lay_foreign(root)
        host.run(("systemctl", "reload", "docker.service"))
        host.sync()
        yield host


def irreversible(host: FakeHost) -> Tree:
    """Return what is more than memory on a host, and the same in every run: byte code holds the time of its source."""
    tree = host.tree()
    return {path: tree[path] for path in tree if not path.startswith(("/run/", "/lost+found")) and ".pyc" not in path}


def cut(host: PoweredHost, disk: Disk, name: str) -> Cut:
    """Cut the power of a copy of the host: this one goes on."""
    return Cut(name, disk.cut(name), host.after_a_cut(), host.tree())


def differences(one: Tree, other: Tree) -> set[str]:
    return {path for path in {*one, *other} if one.get(path) != other.get(path)}


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
    cuts: dict[tuple[str, str], Cut] = {}
    with running(disk) as host:

        def note(moment: str, line: str) -> None:
            state, number = (*json.loads(line or "{}").items(), ("", 0))[0]
            if moment == "whole" and state in ("done", "undone"):
                kind = next(entry.kind for entry in read_runs(host)[0].entries if entry.number == number)
                if (state, kind) not in cuts:
                    cuts[state, kind] = cut(host, disk, f"{state}-{kind}")

        host.at = note
        assert finished(install(host, spec)).exit_code == 0
        run_request(Request("rollback"), ignore, host)
    assert {("undone", kind) for kind in ("InstallDriver", "InstallRuntime", "PrepareBoot")} <= cuts.keys()
    for one in cuts.values():
        with one.disk.mounted() as place:
            assert differences(one.after(place).tree(), one.promised) == set(), one.name


@pytest.mark.parametrize("kind", ["ext4"])
def test_cut_in_the_drivers_installation_the_next_run_ends_as_an_undisturbed_one(disk: Disk, spec: HostSpec) -> None:
    """One cut of each kind in the largest change; the next tests have all writes and all changes."""
    cuts: dict[str, Cut] = {}
    with running(disk) as host:
        before = irreversible(host)

        def note(moment: str, line: str) -> None:
            entries = [entry for run in read_runs(host) for entry in run.entries]
            if moment not in cuts and entries and entries[-1].kind == "InstallDriver":
                cuts[moment] = cut(host, disk, moment)

        host.at = note
        assert finished(install(host, spec)).exit_code == 0
        undisturbed = irreversible(host)
    assert cuts.keys() == {"torn", "unsynced", "whole"}
    for moment, one in cuts.items():
        with one.booted(whole=moment != "unsynced") as after:
            assert_whole(after, spec, undisturbed, before, one.name)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["torn", "unsynced", "whole"])
@pytest.mark.parametrize("kind", ["ext4"])
def test_power_cut_at_any_journal_write_is_resumed(disk: Disk, spec: HostSpec, moment: str) -> None:
    cuts: list[Cut] = []
    with running(disk) as host:
        before = irreversible(host)

        def note(now: str, line: str) -> None:
            if now == moment:
                cuts.append(cut(host, disk, f"{len(cuts)}-{line[2:12]}"))

        host.at = note
        assert finished(install(host, spec)).exit_code == 0
        undisturbed = irreversible(host)
        written = (host.read_text(read_runs(host)[0].path) or "").splitlines()
        changes = [line for line in written if line.startswith('{"begin"')]
    # The driver's change waits for the disk twice: its files, and that they are whole.
    assert len(cuts) == (len(changes) + 1 if moment == "unsynced" else len(written))
    for one in cuts:
        with one.booted(whole=moment != "unsynced") as after:
            assert_whole(after, spec, undisturbed, before, one.name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["btrfs"])
def test_cut_in_any_kind_of_change_the_next_run_ends_as_an_undisturbed_one(disk: Disk, spec: HostSpec) -> None:
    """Cut where the most is at stake: all of a change is made, and of that only what was synced by itself is there."""
    cuts: dict[tuple[str, int], Cut] = {}
    syncs: Counter[str] = Counter()
    with running(disk) as host:
        before = irreversible(host)

        def note(moment: str, line: str) -> None:
            if moment == "unsynced":
                change = read_runs(host)[-1].entries[-1]
                syncs[change.key] += 1
                if (at := (change.kind, syncs[change.key])) not in cuts:
                    cuts[at] = cut(host, disk, f"{change.kind}{syncs[change.key]}")

        host.at = note
        assert finished(install(host, spec)).exit_code == 0
        undisturbed = irreversible(host)
    assert {("InstallDriver", 2), ("InstallRuntime", 1), ("PrepareBoot", 1), ("ReconfigureDocker", 1)} <= cuts.keys()
    for one in cuts.values():
        with one.booted() as after:
            assert_whole(after, spec, undisturbed, before, one.name)


def assert_whole(host: FakeHost, spec: HostSpec, undisturbed: Tree, before: Tree, told: str) -> None:
    """The next run ends as an undisturbed one, the one after it has nothing to do, and nothing of before is lost."""
    if not any(run.entries for run in read_runs(host)):
        assert differences(irreversible(host), before) == set(), told
    done = finished(install(host, spec))
    assert done.exit_code == 0, f"{told}: {done.problems}"
    assert differences(irreversible(host), undisturbed) == set(), told
    assert finished(install(host, spec)).changed == 0, told
    run_request(Request("uninstall"), ignore, host)
    assert differences(irreversible(host), before) <= {"/var/log/nvidia-installer.log"}, told
