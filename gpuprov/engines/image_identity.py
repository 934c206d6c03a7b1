"""Identify a container image on any host, in any image store."""

from __future__ import annotations

from gpuprov.core.system import System, sha256_of

# Not docker's image id: that depends on how a daemon stores images (with containerd's store it is another). In podman's
# template the time is a value, which only JSON shows as docker does.
_IDENTITY = {
    "docker": "{{.Created}} {{json .RootFS.Layers}}",
    "podman": "{{json .Created}} {{json .RootFS.Layers}}",
}


def image_identity(system: System, reference: str, engine: str = "docker") -> str:
    """Return an identity that is the same wherever the image is loaded, or "" if docker or podman does not have it."""
    done = system.run((engine, "image", "inspect", "--format", _IDENTITY[engine], reference))
    created, blank, layers = done.stdout.strip().partition(" ")
    return sha256_of(f"{created.strip(chr(34))}{blank}{layers}".encode()) if done.ok else ""
