"""The packages that the services of a .run driver need on a distribution."""

from __future__ import annotations

# nvidia-persistenced of the .run is linked against it and brings it not (packages.debian.org, packages.ubuntu.com).
_LIBTIRPC = {
    "libtirpc3": (("debian", "11"), ("debian", "12"), ("ubuntu", "20.04"), ("ubuntu", "22.04")),
    "libtirpc3t64": (("debian", "13"), ("ubuntu", "24.04"), ("ubuntu", "26.04")),
}  # fmt: skip


def service_packages(distribution: str, version: str) -> tuple[str, ...]:
    """Return the packages that a driver's services need on a distribution."""
    release = (distribution, version)
    return tuple(name for name, releases in _LIBTIRPC.items() if release in releases)
