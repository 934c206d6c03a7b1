"""The engines besides docker that gpuprov configures: their programs, units, files and sockets. Tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Distribution:
    """A Kubernetes distribution with a containerd of its own: its files, and what makes it read them.

    It writes `rendered` at every start, from `templates` (by version) if any exist.
    """

    name: str
    rendered: str
    templates: Mapping[int, str]
    drop_in: Mapping[int, str]
    reload_command: str


def _rancher_distribution(name: str) -> Distribution:
    folder = f"/var/lib/rancher/{name}/agent/etc/containerd"
    unit = {"k3s": "k3s", "rke2": "rke2-server"}[name]
    return Distribution(
        name,
        f"{folder}/config.toml",
        {2: f"{folder}/config.toml.tmpl", 3: f"{folder}/config-v3.toml.tmpl"},
        {2: f"{folder}/config.toml.d/99-nvidia.toml", 3: f"{folder}/config-v3.toml.d/99-nvidia.toml"},
        f"systemctl restart {unit} (on an agent: {name}-agent)",
    )


# https://docs.k3s.io/advanced#configuring-containerd, https://docs.rke2.io/advanced, microk8s' args folder.
DISTRIBUTIONS = {
    "k3s": _rancher_distribution("k3s"),
    "rke2": _rancher_distribution("rke2"),
    "microk8s": Distribution(
        "microk8s", "/var/snap/microk8s/current/args/containerd.toml",
        {2: "/var/snap/microk8s/current/args/containerd-template.toml"}, {},
        "snap restart microk8s.daemon-containerd",
    ),
}  # fmt: skip


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
    distribution = DISTRIBUTIONS[name]
    # RKE2 runs k3s's code, the socket's folder too.
    socket = "/run/k3s/containerd/containerd.sock"
    return KnownEngine(name, units, distribution.rendered, "", socket, places, cluster=True)


ENGINES: Mapping[str, KnownEngine] = {
    "containerd": KnownEngine(
        "containerd", ("containerd.service",), "/etc/containerd/config.toml", "/etc/containerd/conf.d/99-nvidia.toml",
        "/run/containerd/containerd.sock",
    ),
    "crio": KnownEngine(
        "crio", ("crio.service",), "/etc/crio/crio.conf", "/etc/crio/crio.conf.d/99-nvidia.conf",
        "/var/run/crio/crio.sock",
    ),
    "podman": KnownEngine(
        "podman", (), "/etc/containers/containers.conf", "/etc/containers/containers.conf.d/99-nvidia.conf"
    ),
    "k3s": _rancher("k3s", ("k3s.service", "k3s-agent.service"), ("/usr/local/bin/k3s", "/opt/bin/k3s")),
    "rke2": _rancher(
        "rke2", ("rke2-server.service", "rke2-agent.service"), ("/usr/local/bin/rke2", "/opt/rke2/bin/rke2")
    ),
    "microk8s": KnownEngine(
        "microk8s", ("snap.microk8s.daemon-containerd.service",), DISTRIBUTIONS["microk8s"].templates[2],
        socket="/var/snap/microk8s/common/run/containerd.sock", places=("/snap/bin/microk8s",), cluster=True,
    ),
}  # fmt: skip
# Engines of a host itself, in the order in which `gpuprov_docker: none` configures them.
OF_THE_HOST = tuple(name for name, engine in ENGINES.items() if not engine.cluster)
