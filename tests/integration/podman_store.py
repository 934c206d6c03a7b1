"""A folder for podman's storage that is removed only when podman's own cleanup process is done with it."""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SECONDS = 300


@contextmanager
def podman_store() -> Iterator[str]:
    """Give a short path for `--root` and `--runroot`; podman refuses long ones.

    `podman run` returns before `podman container cleanup`, which conmon starts, has written its last files there.
    """
    with tempfile.TemporaryDirectory(prefix="gpuprov-") as folder:
        try:
            yield folder
        finally:
            deadline = time.monotonic() + _SECONDS
            while (users := _users(folder)) and time.monotonic() < deadline:
                time.sleep(0.05)
            subprocess.run(("umount", f"{folder}/store/overlay"), capture_output=True, check=False)
        assert not users, f"still at work in {folder} after {_SECONDS} s: {users}"


def _users(folder: str) -> list[str]:
    """Return the command lines of the processes that name `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if folder.encode() in words:
            found.append(words.replace(b"\0", b" ").decode("utf-8", "replace"))
    return found
