"""Containers of podman's, and a folder for its storage that is removed only when its own cleanup is done with it."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.integration.container_bench import REPORT

# No pids controller is here.
CONFIGURATION = '[containers]\npids_limit = 0\n[engine]\ncgroup_manager = "cgroupfs"\n'
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


def run_report(
    root: Path, configuration: Path, *options: str, podman: Sequence[str] = (), before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the report of container_bench.py in a container of podman's that has this root.

    `options`: of `podman run`; `podman`: of podman itself; `before`: what starts podman.
    """
    with podman_store() as folder:
        argv = (
            *before, "podman", f"--root={folder}/store", f"--runroot={folder}/run", *podman, "run", "--rm",
            "--network=none", "--log-driver=none", "--ulimit=nofile=256:256", "--ulimit=nproc=100:100", *options,
            "--rootfs", str(root), "sh", "-c", f"{REPORT}\n:",
        )  # fmt: skip
        environment = {**os.environ, "CONTAINERS_CONF": str(configuration)}
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=environment)


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
