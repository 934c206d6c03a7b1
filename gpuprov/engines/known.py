"""The engines that gpuprov configures: tables of their programs, units, files and sockets, and the parts of an edit.

Also which of them a Kubernetes node has: a kubelet that uses an engine of the host, or a distribution with its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

from gpuprov.core.changes import parent_of
from gpuprov.core.commands import NOT_FOUND, Completed
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.tables import packaged

if TYPE_CHECKING:
    from gpuprov.engines.cri_status import CriStatus

NVIDIA_RUNTIME = "/usr/bin/nvidia-container-runtime"


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


@dataclass(frozen=True)
class EngineFacts:
    """Facts of an engine on a host: its program (empty: not installed), its version output, path → file.

    `unit`: the unit that runs it; `running`: its CRI status (None: no response). The edits are computed from these
    facts as from a System: a file that was not gathered does not exist.
    """

    program: str = ""
    version: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    unit: str = ""
    running: CriStatus | None = None

    @property
    def has_not_read_its_files(self) -> bool:
        """Whether it runs without knowing the runtime."""
        return self.running is not None and RuntimeEntry().name not in self.running.handlers

    def exists(self, path: str) -> bool:
        return path in self.files

    def read_bytes(self, path: str) -> bytes | None:
        return self.files.get(path)

    def list_directory(self, path: str) -> tuple[str, ...]:
        return tuple(sorted(file.rpartition("/")[2] for file in self.files if parent_of(file) == path))

    def which(self, program: str) -> str | None:
        return self.program if program == self.program.rpartition("/")[2] else None

    def run(self, argv: Sequence[str], *, timeout: float = 60) -> Completed:
        asks_version = tuple(argv) == (self.program, "--version") and bool(self.version)
        return Completed(tuple(argv), 0 if asks_version else NOT_FOUND, self.version if asks_version else "")


# The source for an engine's edits: a System, or the facts gathered from one.
Reader = Union[System, EngineFacts]

# -- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownEngine:
    """A row of protocol/engines.json: a program, its `places` beside the PATH, and what reads its files at its start.

    `units`: for example a server's and an agent's; podman has none. `socket` is the engine's CRI socket.
    A Kubernetes distribution has a containerd of its own, and writes `rendered` at every start, from `templates` (by
    version) if any exist; `drop_ins`, also by version, are read besides. If one of `detects` exists, it adds a runtime
    `nvidia` of the first. `package`: where it has another name than the engine; `install_command`, of the engine's own
    documentation, if no distribution has a package.
    """

    program: str
    units: tuple[str, ...]
    main: str
    drop_in: str = ""
    socket: str = ""
    reload_command: str = ""
    places: tuple[str, ...] = ()
    rendered: str = ""
    templates: Mapping[int, str] = field(default_factory=dict)
    drop_ins: Mapping[int, str] = field(default_factory=dict)
    detects: tuple[str, ...] = ()
    package: str = ""
    install_command: str = ""

    @property
    def unit(self) -> str:
        """The default unit if no other one is known to run; empty if there is none."""
        return self.units[0] if self.units else ""

    @property
    def cluster(self) -> bool:
        """Whether it is a whole Kubernetes, so that restarting it affects more than an engine."""
        return bool(self.rendered)


def _known(row: Mapping[str, Any]) -> KnownEngine:
    lists = {key: tuple(row.get(key, ())) for key in ("units", "places", "detects")}
    versions = ((key, row.get(key, {}).items()) for key in ("templates", "drop_ins"))
    return KnownEngine(**{**row, **lists, **{key: {int(n): path for n, path in paths} for key, paths in versions}})


# Of k3s and RKE2, which runs k3s's code: docs.k3s.io/advanced#configuring-containerd, pkg/agent/containerd/runtimes.go.
ENGINES: Mapping[str, KnownEngine] = {name: _known(row) for name, row in packaged("engines").items()}
# Engines of a host itself, in the order in which `gpuprov_docker: none` configures them.
OF_THE_HOST = tuple(name for name, engine in ENGINES.items() if not engine.cluster)

# -- Kubernetes nodes ------------------------------------------------------------------------------------------------

KUBELET = "kubelet"
# Where kubeadm puts its settings.
KUBELET_CONFIG = "/var/lib/kubelet/config.yaml"
# Programs, where packages (in /usr/bin) and the installers of k3s, RKE2 (tarball or rpm) and microk8s put them.
_KUBERNETES = {
    KUBELET: ("/usr/local/bin/kubelet",), **{name: one.places for name, one in ENGINES.items() if one.cluster},
}  # fmt: skip


def kubernetes_programs(system: System) -> tuple[str, ...]:
    """Return which of kubelet, k3s, rke2 and microk8s are installed."""
    return tuple(name for name, paths in _KUBERNETES.items() if any(map(system.exists, (f"/usr/bin/{name}", *paths))))


def own_engines(found: tuple[str, ...]) -> tuple[str, ...]:
    """Return those that include their own containerd."""
    return tuple(name for name in found if name != KUBELET)
