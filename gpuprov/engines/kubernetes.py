"""Detect a Kubernetes node: a kubelet that uses an engine of the host, or a distribution with its own."""

from __future__ import annotations

from gpuprov.core.system import System
from gpuprov.engines.known import ENGINES

KUBELET = "kubelet"
# Where kubeadm puts its settings.
KUBELET_CONFIG = "/var/lib/kubelet/config.yaml"
# Programs, where packages (in /usr/bin) and the installers of k3s, RKE2 (tarball or rpm) and microk8s put them.
_PROGRAMS = {
    KUBELET: ("/usr/local/bin/kubelet",), **{name: one.places for name, one in ENGINES.items() if one.cluster},
}  # fmt: skip


def gather(system: System) -> tuple[str, ...]:
    """Return which of kubelet, k3s, rke2 and microk8s are installed."""
    return tuple(name for name, paths in _PROGRAMS.items() if any(map(system.exists, (f"/usr/bin/{name}", *paths))))


def own_engines(found: tuple[str, ...]) -> tuple[str, ...]:
    """Return those that include their own containerd."""
    return tuple(name for name in found if name != KUBELET)
