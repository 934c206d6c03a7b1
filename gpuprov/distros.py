"""What differs between distributions, as data: one row each, with its source. Never asks the machine anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Distribution:
    """A supported distribution release.

    `kernel_headers`: packages that hold the headers of the running kernel, `{kernel}` standing for `uname -r`.
    `build_packages`: what compiling a kernel module needs besides. `docker_packages`: the distribution's own engine.
    """

    id: str
    version: str
    package_manager: str
    kernel_headers: tuple[str, ...]
    build_packages: tuple[str, ...]
    docker_packages: tuple[str, ...]


# packages.debian.org: linux-headers-*, docker.io (docker-cli became a package of its own with trixie).
_DEBIAN_HEADERS = ("linux-headers-{kernel}",)
_DEBIAN_BUILD = ("gcc", "make", "libc6-dev", "dkms", "kmod")
# packages.ubuntu.com: the same names.
_ROWS = (
    Distribution("debian", "11", "apt", _DEBIAN_HEADERS, _DEBIAN_BUILD, ("docker.io",)),
    Distribution("debian", "12", "apt", _DEBIAN_HEADERS, _DEBIAN_BUILD, ("docker.io",)),
    Distribution("debian", "13", "apt", _DEBIAN_HEADERS, _DEBIAN_BUILD, ("docker.io", "docker-cli")),
    Distribution("ubuntu", "20.04", "apt", _DEBIAN_HEADERS, _DEBIAN_BUILD, ("docker.io",)),
    Distribution("ubuntu", "22.04", "apt", _DEBIAN_HEADERS, _DEBIAN_BUILD, ("docker.io",)),
    Distribution("ubuntu", "24.04", "apt", _DEBIAN_HEADERS, _DEBIAN_BUILD, ("docker.io",)),
    Distribution("ubuntu", "26.04", "apt", _DEBIAN_HEADERS, _DEBIAN_BUILD, ("docker.io",)),
)


def find_distribution(distribution_id: str, version: str) -> Distribution | None:
    """Return the row for an os-release ID and VERSION_ID, or None if gpuprov does not support it."""
    return next((row for row in _ROWS if (row.id, row.version) == (distribution_id, version)), None)


def supported_names() -> str:
    """Return what is supported, for a message: `debian 11, 12, 13; ubuntu 20.04, …`."""
    versions: dict[str, list[str]] = {}
    for row in _ROWS:
        versions.setdefault(row.id, []).append(row.version)
    return "; ".join(f"{name} {', '.join(found)}" for name, found in versions.items())
