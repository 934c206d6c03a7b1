"""The types of `gpuprov runtime configure`, shared by all engines: its options, what it reads, what it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuprov.core.commands import Completed

NVIDIA_RUNTIME = "/usr/bin/nvidia-container-runtime"
# Where k3s and RKE2 look for a runtime `nvidia` at each start; the first counts (pkg/agent/containerd/runtimes.go).
DETECTED_RUNTIMES = ("/usr/local/nvidia/toolkit/nvidia-container-runtime", NVIDIA_RUNTIME)


@dataclass(frozen=True)
class RuntimeEntry:
    """A runtime to register with an engine. `set_default` and `cdi` change nothing if they are False."""

    name: str = "nvidia"
    path: str = NVIDIA_RUNTIME
    set_default: bool = False
    cdi: bool = False


@dataclass(frozen=True)
class ConfigureRequest:
    """The options of one call of `gpuprov runtime configure`.

    `engine` is docker, containerd, crio, podman, k3s, rke2 or microk8s. `config` is its main file, nothing for the
    usual one. `drop_in` is None for the usual drop-in and nothing for none. `from_command` asks the engine for its
    configuration instead of reading the files. `executable` is the engine's program, nothing for the one on the PATH.
    """

    engine: str
    runtime: RuntimeEntry = RuntimeEntry()
    config: str = ""
    drop_in: str | None = None
    from_command: bool = False
    executable: str = ""
    unset: bool = False


@dataclass(frozen=True)
class FileEdit:
    """A file's content before and after; None means that there is no file."""

    path: str
    before: bytes | None
    after: bytes | None

    @property
    def changes(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True)
class Configuration:
    """The effect of a call: files, notes for the user, and the command that makes the engine read them."""

    edits: tuple[FileEdit, ...]
    notes: tuple[str, ...] = ()
    reload_command: str = ""


class Reader(Protocol):
    """The source for an engine's edits: a System, or the facts gathered from one."""

    def exists(self, path: str) -> bool: ...
    def read_bytes(self, path: str) -> bytes | None: ...
    def list_directory(self, path: str) -> tuple[str, ...]: ...
    def which(self, program: str) -> str | None: ...
    def run(self, argv: Sequence[str], *, timeout: float = 60) -> Completed: ...
    def require(self, argv: Sequence[str], what: str, next_step: str = "") -> Completed: ...
