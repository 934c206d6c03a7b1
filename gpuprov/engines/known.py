"""The engines besides docker that gpuprov configures: their programs, units, files and sockets. A table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuprov.engines import containerd, crio, podman


@dataclass(frozen=True)
class KnownEngine:
    """An engine's program, where it may lie beside the PATH, and what reads its files when it starts.

    `units`: for example a server's and an agent's; podman has none. `socket` is the engine's CRI socket. `cluster`: it
    is a whole Kubernetes, so restarting it affects more than an engine.
    """

    program: str
    units: tuple[str, ...]
    main: str
    drop_in: str = ""
    socket: str = ""
    places: tuple[str, ...] = ()
    cluster: bool = False

    @property
    def unit(self) -> str:
        """The default unit if no other one is known to run; empty if there is none."""
        return self.units[0] if self.units else ""


def _rancher(name: str, units: tuple[str, ...], places: tuple[str, ...]) -> KnownEngine:
    distribution = containerd.DISTRIBUTIONS[name]
    # RKE2 runs k3s's code, the socket's folder too.
    socket = "/run/k3s/containerd/containerd.sock"
    return KnownEngine(name, units, distribution.rendered, "", socket, places, cluster=True)


ENGINES: Mapping[str, KnownEngine] = {
    "containerd": KnownEngine(
        "containerd", ("containerd.service",), containerd.MAIN, containerd.DROP_IN, "/run/containerd/containerd.sock"
    ),
    "crio": KnownEngine("crio", ("crio.service",), crio.MAIN, crio.DROP_IN, "/var/run/crio/crio.sock"),
    "podman": KnownEngine("podman", (), podman.MAIN, podman.DROP_IN),
    "k3s": _rancher("k3s", ("k3s.service", "k3s-agent.service"), ("/usr/local/bin/k3s", "/opt/bin/k3s")),
    "rke2": _rancher(
        "rke2", ("rke2-server.service", "rke2-agent.service"), ("/usr/local/bin/rke2", "/opt/rke2/bin/rke2")
    ),
    "microk8s": KnownEngine(
        "microk8s", ("snap.microk8s.daemon-containerd.service",), containerd.DISTRIBUTIONS["microk8s"].templates[2],
        socket="/var/snap/microk8s/common/run/containerd.sock", places=("/snap/bin/microk8s",), cluster=True,
    ),
}  # fmt: skip
# Engines of a host itself, in the order in which `gpuprov_docker: none` configures them.
OF_THE_HOST = tuple(name for name, engine in ENGINES.items() if not engine.cluster)
