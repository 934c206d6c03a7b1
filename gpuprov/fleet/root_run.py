"""Run the agent inside another root file system (`--root`): a mounted image that does not run.

It gets separate mount and process namespaces. Its mounts (/proc, /sys, /dev, /run) and its processes end with it in
every case.
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from gpuprov.agent.probe import PYTHONS
from gpuprov.core.commands import run_command
from gpuprov.fleet.agent_run import Agent
from gpuprov.wire.errors import ExitCode, GpuprovError
from gpuprov.wire.events import Finished, Sink, from_line
from gpuprov.wire.request import Request, request_to_line

_SECONDS = 86400
_FOLDERS = ("proc", "sys", "dev", "run", "etc", "usr")
_NO_PYTHON = 77
_BUNDLE = "/run/gpuprov.bundle"
# $1: the root; $2: the agent; $3: the bundle, or ""; $4: the target of its resolv.conf, or ""; then Pythons.
# It gets only the builder's devices that every program may use, so the builder's disks and GPUs are not touched.
# Debian's maintainer scripts start installed services through invoke-rc.d.
_ENTER = r"""
set -eu
root=$1 agent=$2 bundle=$3 resolver=$4; shift 4
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount --bind /sys sys
mount -o remount,bind,ro sys
mount -t tmpfs -o mode=0755 tmpfs dev
for node in null zero full random urandom tty; do : > "dev/$node"; mount --bind "/dev/$node" "dev/$node"; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin; ln -s /proc/self/fd/1 dev/stdout; ln -s /proc/self/fd/2 dev/stderr
mount -t tmpfs -o mode=0755 tmpfs run
mkdir run/lock
cp "$agent" run/gpuprov-agent.pyz
if [ -n "$bundle" ]; then : > run/gpuprov.bundle; mount --bind "$bundle" run/gpuprov.bundle; fi
if [ -n "$resolver" ] && [ -e /etc/resolv.conf ]; then
    case $resolver in run/*) mkdir -p "${resolver%/*}"; : > "$resolver" ;; esac
    mount --bind /etc/resolv.conf "$resolver"
fi
if [ -f usr/sbin/invoke-rc.d ] && [ ! -L usr/sbin/invoke-rc.d ]; then
    printf '#!/bin/sh\nexit 0\n' > run/start-nothing
    chmod 755 run/start-nothing
    mount --bind run/start-nothing usr/sbin/invoke-rc.d
fi
for python; do
    if chroot . "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 9))' > /dev/null 2>&1; then
        exec chroot . "$python" -I /run/gpuprov-agent.pyz
    fi
done
exit 77
"""


@dataclass(frozen=True)
class _Root:
    """An examined root file system. `resolver`: the file in it that names the name servers, or ""."""

    path: str
    resolver: str


def run_in_root(root: str, request: Request, agent: Agent, sink: Sink) -> None:
    """Carry the request out in a root file system. Raises GpuprovError if it is none, or has no Python."""
    looked = _looked_at(root)
    finished: list[Finished] = []
    strays: list[str] = []

    def on_line(line: str) -> None:
        event = from_line(line)
        if event is None:
            strays[:] = [*strays[-5:], line[:400]]
            return
        finished.extend([event] if isinstance(event, Finished) else [])
        sink(event)

    with tempfile.NamedTemporaryFile(prefix="gpuprov-agent-") as file:
        file.write(agent.content)
        file.flush()
        inside = replace(request, bundle=_BUNDLE if request.bundle else "")
        done = run_command(
            (
                "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER,
                "sh", looked.path, file.name, request.bundle, looked.resolver, *PYTHONS,
            ),
            timeout=_SECONDS,
            env={},
            stdin=f"{request_to_line(inside)}\n".encode(),
            on_line=on_line,
        )  # fmt: skip
    if finished:
        return
    if done.returncode == _NO_PYTHON:
        raise GpuprovError(
            "there is no Python in this root file system that gpuprov runs on: it must be 3.9 or later",
            f"looked in {root} for {', '.join(PYTHONS)}",
            f"install it there (chroot {root} apt-get install python3)",
        )
    said = "\n".join(strays) or done.stderr.strip()[-400:]
    raise GpuprovError(
        f"the run in {root} did not come to its end",
        f"exit code {done.returncode}: {said or 'no output'}",
        "is it of this machine's architecture, and may this process mount (root, CAP_SYS_ADMIN)?",
    )


def _looked_at(root: str) -> _Root:
    """Return the root and the facts about it. Raises GpuprovError for an invalid one: mounts must not leave it."""
    path = os.path.realpath(root)
    wrong = [name for name in _FOLDERS if not _is_directory(f"{path}/{name}")]
    if path == "/" or wrong:
        seen = "it is this machine's own" if path == "/" else f"no directory: {', '.join(wrong)}"
        raise GpuprovError(
            f"{root} is no root file system of an image", seen,
            "mount the image and name its root: --root /mnt/image; for this machine's own disk: --image",
            exit_code=ExitCode.USAGE,
        )  # fmt: skip
    return _Root(path, _resolver(path))


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _resolver(root: str) -> str:
    """Return the path of the root's resolv.conf below the root; "" if none can be mounted over it."""
    place = Path(root, "etc/resolv.conf")
    if not place.is_symlink():
        return "etc/resolv.conf" if place.is_file() else ""
    target = os.path.normpath(Path("/etc", place.readlink()))
    return target.lstrip("/") if target.startswith("/run/") else ""
