"""Where each distribution's packages come from, as data: archive, suites, components and the key that signs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Debian's name of an architecture, from `uname -m`.
DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Archive:
    """A distribution release's own archive. `keyring_hint`: how `keyring` comes to a machine that lacks it."""

    codename: str
    components: str
    keyring: str
    keyring_hint: str


_DEBIAN = ("main", "/usr/share/keyrings/debian-archive-keyring.gpg", "apt-get install debian-archive-keyring")
# Debian has no package of Ubuntu's key.
_UBUNTU = (
    "main restricted universe",
    "/usr/share/keyrings/ubuntu-archive-keyring.gpg",
    "make the bundle on an Ubuntu machine, or copy that file from one that you trust",
)
# wiki.debian.org/DebianReleases; wiki.ubuntu.com/Releases.
ARCHIVES = {
    ("debian", "11"): Archive("bullseye", *_DEBIAN),
    ("debian", "12"): Archive("bookworm", *_DEBIAN),
    ("debian", "13"): Archive("trixie", *_DEBIAN),
    ("ubuntu", "20.04"): Archive("focal", *_UBUNTU),
    ("ubuntu", "22.04"): Archive("jammy", *_UBUNTU),
    ("ubuntu", "24.04"): Archive("noble", *_UBUNTU),
    ("ubuntu", "26.04"): Archive("resolute", *_UBUNTU),
}


def default_sources(
    distribution: str, version: str, architecture: str, components: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return apt's one-line sources of a release: the release, its updates, its security updates.

    `components` are needed besides those that every bundle gets.
    """
    archive = ARCHIVES[distribution, version]
    name = archive.codename
    words = " ".join(dict.fromkeys((*archive.components.split(), *components)))
    if distribution == "debian":
        places: tuple[tuple[str, str], ...] = (
            ("http://deb.debian.org/debian", name),
            ("http://deb.debian.org/debian", f"{name}-updates"),
            ("http://deb.debian.org/debian-security", f"{name}-security"),
        )
    else:
        # Ubuntu keeps all but amd64 on a server of its own.
        amd64 = architecture == "x86_64"
        base = "http://archive.ubuntu.com/ubuntu" if amd64 else "http://ports.ubuntu.com/ubuntu-ports"
        places = tuple((base, f"{name}{pocket}") for pocket in ("", "-updates", "-security"))
    return tuple(f"deb [signed-by={archive.keyring}] {uri} {suite} {words}" for uri, suite in places)
