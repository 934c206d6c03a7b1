"""Detect a Kubernetes node: a kubelet that uses an engine of the host, or a distribution with its own."""

from __future__ import annotations

from gpuprov.core.system import System

KUBELET = "kubelet"
# Where kubeadm puts its settings.
KUBELET_CONFIG = "/var/lib/kubelet/config.yaml"
# Programs, where packages and the installers of k3s, RKE2 (tarball or rpm) and microk8s put them.
_PROGRAMS = {
    KUBELET: ("/usr/bin/kubelet", "/usr/local/bin/kubelet"),
    "k3s": ("/usr/local/bin/k3s", "/usr/bin/k3s", "/opt/bin/k3s"),
    "rke2": ("/usr/local/bin/rke2", "/usr/bin/rke2", "/opt/rke2/bin/rke2"),
    "microk8s": ("/snap/bin/microk8s",),
}


def gather(system: System) -> tuple[str, ...]:
    """Return which of kubelet, k3s, rke2 and microk8s are installed."""
    return tuple(name for name, paths in _PROGRAMS.items() if any(system.exists(path) for path in paths))


def own_engines(found: tuple[str, ...]) -> tuple[str, ...]:
    """Return those that include their own containerd."""
    return tuple(name for name in found if name != KUBELET)
