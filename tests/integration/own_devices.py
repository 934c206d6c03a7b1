"""A /dev of a test's own: what it makes there, and what others have left there, concern nobody else."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_DEVICES = Path("/dev")


@contextlib.contextmanager
def own_devices() -> Iterator[None]:
    """Let this thread, and what it starts, see a /dev without GPUs and without /dev/char; changes there are its own.

    A mount namespace for the time of the block: an overlay over the machine's /dev, with what is mounted below it.
    """
    before, folder = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), Path.cwd()
    try:
        _call("unshare", _CLONE_NEWNS)
        try:
            _cover()
            yield
        finally:
            _call("setns", before, _CLONE_NEWNS)
            os.chdir(folder)
    finally:
        os.close(before)


def _cover() -> None:
    _mount("--make-rprivate", "/")
    mounted = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    below = [path for path in sorted(mounted) if path.startswith(f"{_DEVICES}/")]
    # What others have mounted further down, as in /dev/shm, comes along with that, and may go at any time.
    below = [path for path in below if mounted.isdisjoint(map(str, Path(path).parents[: -len(_DEVICES.parts)]))]
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        _mount("-t", "tmpfs", "gpuprov-dev", str(room))
        for number, path in enumerate(below):
            place = room / str(number)
            place.mkdir() if Path(path).is_dir() else place.touch()
            _mount("--rbind", path, str(place))
        for layer in ("upper", "work"):
            (room / layer).mkdir()
        layers = f"lowerdir={_DEVICES},upperdir={room}/upper,workdir={room}/work"
        _mount("-t", "overlay", "-o", layers, "gpuprov-dev", str(_DEVICES))
        for number, path in enumerate(below):
            _mount("--rbind", str(room / str(number)), path)
        subprocess.run(("umount", "--recursive", "--lazy", str(room)), check=True)
    shutil.rmtree(_DEVICES / "char", ignore_errors=True)
    for left in _DEVICES.glob("nvidia*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def _mount(*words: str) -> None:
    subprocess.run(("mount", *words), check=True, capture_output=True)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
