"""What identifies a container image on any host, in any image store."""

from __future__ import annotations

from gpuprov.core.system import System, sha256_of

# Not docker's image id: that depends on how a daemon stores images (with containerd's store it is another).
_IDENTITY = "{{.Created}} {{json .RootFS.Layers}}"


def image_identity(system: System, reference: str) -> str:
    """Return what is the same for an image wherever it is loaded, or nothing if docker does not have it."""
    done = system.run(("docker", "image", "inspect", "--format", _IDENTITY, reference))
    return sha256_of(done.stdout.strip().encode()) if done.ok else ""
