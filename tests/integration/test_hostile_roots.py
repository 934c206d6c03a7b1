"""Hostile root file systems: random trees full of links, and trees that change meanwhile; nothing outside is touched.

The short form takes seconds. For the long one: --hypothesis-profile=thorough, and GPUPROV_RACE_SECONDS=300.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpuprov.runtime_hook.edits import ContainerEdits
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.links import find_compatibility, inject
from gpuprov.runtime_hook.rootfs import Root
from tests.examples import examples
from tests.integration.container_bench import LIBRARIES, Bench, low_level_runtime

pytestmark = pytest.mark.root
_RACE_SECONDS = float(os.environ.get("GPUPROV_RACE_SECONDS", "8"))
# Every place on the way to something that a start makes.
_PLACES = (
    "usr", "usr/lib", LIBRARIES[1:], f"{LIBRARIES[1:]}/libcuda.so.1", f"{LIBRARIES[1:]}/libcuda.so.550.163.01",
    f"{LIBRARIES[1:]}/.gpuprov~", "usr/bin", "usr/bin/nvidia-smi", "usr/local", "usr/local/cuda",
    "usr/local/cuda/compat", "usr/local/cuda/compat/libcuda.so.580.65.06", "etc", "etc/ld.so.cache", "etc/.gpuprov~",
    "etc/ld.so.conf.d", "etc/ld.so.conf.d/00-gpuprov-compat.conf", "lib", "lib64", "dev",
)  # fmt: skip
_TARGETS = (
    "{outside}", "{outside}/file", "../{outside}", "../../../../../../../..{outside}", "/proc/self/root{outside}",
    "/proc/self/cwd", "/proc/self/fd/0", "/proc/1/root", "/", ".", "..", "/etc", "/usr/lib", "usr", "lib", "loop",
    "/usr/local/cuda", "../etc", "/dev", "a/../b", "//", "{outside}/folder/../file", "/proc", "/sys", "/proc/kmsg",
    "/proc/sys/kernel", "/volume", "/volume/folder", "/volume/file", "../../volume", "/volume/back",
)  # fmt: skip
_KINDS = ("folder", "file", "fifo", "device")


def outside_of(folder: Path) -> Path:
    """Make what must stay as it is."""
    outside = folder / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("host")
    (outside / "back").symlink_to("/etc")
    return outside


def state(folder: Path) -> list[tuple[str, int, int, int, int]]:
    """Return what would change if anything in the folder were made, written, mounted over or given away."""
    found = []
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        found.append((str(path), status.st_ino, status.st_mode, status.st_uid, status.st_mtime_ns))
    return found


def lay(root: Path, outside: Path, tree: dict[str, str]) -> None:
    """Make the tree where it can be made: what lies below a link that leads out is left out."""
    for place in sorted(tree):
        path = root / place
        if any(
            parent.is_symlink() or not parent.is_dir() for parent in _between(root, path) if os.path.lexists(parent)
        ):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        what = tree[place]
        if what == "folder":
            path.mkdir(exist_ok=True)
        elif what == "file":
            path.write_text("image")
        elif what == "fifo":
            os.mkfifo(path)
        elif what == "device":
            os.mknod(path, 0o20666, os.makedev(1, 5))
        else:
            path.symlink_to(what.format(outside=outside))


def _between(root: Path, path: Path) -> list[Path]:
    return [parent for parent in path.parents if root in parent.parents]


def edits() -> ContainerEdits:
    mounts = [{"containerPath": f"{LIBRARIES}/libcuda.so.550.163.01"}, {"containerPath": "/usr/bin/nvidia-smi"}]
    links = [("libcuda.so.550.163.01", f"{LIBRARIES}/libcuda.so.1"), ("libcuda.so.1", f"{LIBRARIES}/libcuda.so")]
    return ContainerEdits({"mounts": mounts}, links, "550.163.01")


def prepare(path: Path) -> bool:
    root = Root(str(path))
    try:
        given = edits()
        find_compatibility(root, given, wanted=True)
        inject(root, given)
        return True
    except Refused:
        return False
    finally:
        root.close()


_TREES = st.dictionaries(st.sampled_from(_PLACES), st.sampled_from(_TARGETS) | st.sampled_from(_KINDS), max_size=8)


@pytest.mark.property
def test_thousands_of_random_trees_lead_nowhere_else() -> None:
    """By a plain generator: hypothesis takes four times as long, and a tree is small enough to be read as it is."""
    outcomes = set()
    for seed in range(examples(5_000)):
        random = Random(seed)
        places = random.sample(_PLACES, random.randint(0, 8))
        tree = {place: random.choice((*_TARGETS, *_KINDS)) for place in places}
        with tempfile.TemporaryDirectory(prefix="gpuprov-tree-", dir="/dev/shm") as folder:
            outside = outside_of(Path(folder))
            root = Path(folder) / "root"
            root.mkdir()
            lay(root, outside, tree)
            before = world(outside)
            outcomes.add(prepare(root))
            assert world(outside) == before, tree
    assert outcomes == {True, False}


def world(outside: Path) -> tuple[object, ...]:
    """Return what is outside of the root; of this machine's mounts, those in the test's own folder."""
    files = sorted(path.name for path in Path("/proc/self/fd").iterdir())
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(outside.parent) in line]
    return state(outside), _etc(), len(files), mounts


def _etc() -> list[tuple[str, int, int]]:
    """Return what a start that went astray would write into this machine's /etc; others may write there, too."""
    found = (path for pattern in ("ld.so*", "*gpuprov*") for path in Path("/etc").glob(pattern))
    return sorted((path.name, path.lstat().st_ino, path.lstat().st_mtime_ns) for path in found)


@pytest.fixture(scope="module", params=["runc", "crun"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    made = Bench(folder, low_level_runtime(request.param, folder))
    shutil.copytree(made.root, made.folder / "pristine", symlinks=True)
    yield made
    made.delete()


def restore(bench: Bench) -> None:
    shutil.rmtree(bench.root)
    shutil.copytree(bench.folder / "pristine", bench.root, symlinks=True)


# Where the outside is mounted as a volume; links of the tree may stand there too.
_DESTINATIONS = (
    "/volume",
    "/usr",
    "/usr/lib",
    LIBRARIES,
    "/etc",
    "/etc/ld.so.conf.d",
    "/usr/bin",
    "/lib64",
    "/lib/../opt",
)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tree=_TREES,
    way=st.sampled_from(["", "prestart", "createRuntime", "createContainer"]),
    destination=st.sampled_from(["", "/volume", *_DESTINATIONS]),
    access=st.sampled_from(["ro", "rw"]),
)
def test_random_trees_stay_inside(bench: Bench, tree: dict[str, str], way: str, destination: str, access: str) -> None:
    restore(bench)
    outside = bench.folder / "outside"
    if not outside.exists():
        outside_of(bench.folder)
    for place in tree:
        if (bench.root / place).is_dir() and not (bench.root / place).is_symlink():
            shutil.rmtree(bench.root / place)
    # runc 1.1 itself makes links in a /dev that leads out.
    lay(bench.root, outside, {place: what for place, what in tree.items() if place != "dev"})
    changes: dict[str, Any] = {}
    if way:
        entry = bench.hook_entry(way)
        if way == "createContainer":
            entry["args"] += ["--link", f"libcuda.so.550.163.01::{LIBRARIES}/libcuda.so.1"]
        changes["hooks"] = {way: [entry]}
    if destination:
        volume = {"destination": destination, "type": "bind", "source": str(outside), "options": ["rbind", access]}
        changes["mounts"] = [*bench.pristine["mounts"], volume]
        # What an engine does by itself with such a tree and volume is its own: at /dev it makes links at each start.
        (outside / "ptmx").unlink(missing_ok=True)
        bench.configure("A=1", mounts=changes["mounts"])
        bench.create(runtime=bench.low_level)
        bench.delete()
        assume(not (outside / "ptmx").is_symlink())
    before = world(outside)
    bench.configure("NVIDIA_VISIBLE_DEVICES=all", **changes)
    try:
        done = bench.create(runtime=bench.low_level if way else "")
    finally:
        bench.delete()
    assert world(outside) == before
    assert "Traceback" not in done.stderr


# Swaps folders of the root with links out of it, as fast as it can, with and without a moment between.
_SWAP = """
import os, sys, itertools
root, outside = sys.argv[1:]
places = ["usr/lib", "usr/lib/x86_64-linux-gnu", "etc", "usr/bin"]
for place in itertools.cycle(places):
    path, aside = f"{root}/{place}", f"{root}/aside"
    try:
        os.symlink(outside, aside)
        os.rename(path, f"{root}/real")
        os.rename(aside, path)
        os.rename(path, aside)
        os.rename(f"{root}/real", path)
        os.unlink(aside)
    except OSError:
        try:
            if os.path.islink(path):
                os.unlink(path)
            os.rename(f"{root}/real", path)
        except OSError:
            pass
        try:
            os.unlink(aside)
        except OSError:
            pass
"""


@contextlib.contextmanager
def swapping(root: Path, target: str) -> Iterator[None]:
    """Swap folders of the root with links to the target, as long as the block lasts."""
    swapper = subprocess.Popen((sys.executable, "-c", _SWAP, str(root), target))
    try:
        yield
    finally:
        swapper.kill()
        swapper.wait()


@pytest.mark.property
def test_folders_swapped_for_links_meanwhile_lead_nowhere_else(tmp_path: Path) -> None:
    """CVE-2024-0132, CVE-2025-23359: between look and use the image's path may become another."""
    outside = outside_of(tmp_path)
    root = tmp_path / "root"
    for place in (LIBRARIES[1:], "etc", "usr/bin"):
        (root / place).mkdir(parents=True)
    before = state(outside)
    made = refused = 0
    end = time.monotonic() + _RACE_SECONDS
    with swapping(root, str(outside)):
        # Both happened, or this was no race: on a busy machine that takes longer.
        while time.monotonic() < end or made <= 100 or made + refused <= 200:
            for path in (root / LIBRARIES[1:], root / "etc"):
                for name in ("libcuda.so", "libcuda.so.1", "ld.so.cache"):
                    with contextlib.suppress(OSError):
                        (path / name).unlink(missing_ok=True)
            assert not (outside / "libcuda.so").is_symlink()
            if prepare(root):
                made += 1
            else:
                refused += 1
    assert state(outside) == before


@pytest.mark.property
@pytest.mark.parametrize("target", ["{outside}", "/volume"])
def test_a_race_against_the_hook_in_real_containers_leads_nowhere_else(bench: Bench, target: str) -> None:
    """Also into a volume that the container has."""
    restore(bench)
    outside = bench.folder / "outside-of-race"
    for place in (".", LIBRARIES[1:], "lib", "x86_64-linux-gnu", "ld.so.conf.d"):
        (outside / place).mkdir(parents=True, exist_ok=True)
    (outside / "ld.so.cache").write_text("host")
    before = world(outside)
    volume = {"destination": "/volume", "type": "bind", "source": str(outside), "options": ["rbind", "rw"]}
    bench.configure(
        "NVIDIA_VISIBLE_DEVICES=all", hooks={"prestart": [bench.hook_entry("prestart")]},
        mounts=[*bench.pristine["mounts"], volume],
    )  # fmt: skip
    codes = set()
    end = time.monotonic() + _RACE_SECONDS
    with swapping(bench.root, target.format(outside=outside)):
        # A slow machine tries until one start has won, too.
        while time.monotonic() < end or 0 not in codes:
            done = bench.create(runtime=bench.low_level)
            codes.add(done.returncode)
            bench.delete()
            assert "Traceback" not in done.stderr
    assert world(outside) == before
    assert 0 in codes
