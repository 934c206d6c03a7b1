"""Package sources of each distribution, as data: archive, suites, components and the signing key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprov.core.system import System
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.tables import server

# Debian's name of an architecture, from `uname -m`.
DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Archive:
    """A distribution release's archive. `keyring_hint`: how to get `keyring` on a machine that lacks it."""

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


@dataclass(frozen=True)
class Mirror:
    """URLs of a distribution's archive and of its security updates; empty if unknown."""

    archive: str = ""
    security: str = ""


NO_MIRROR = Mirror()


def mirror_at(url: str) -> Mirror:
    """Return the mirror at `url`. Debian's security updates are beside it, Ubuntu's in it."""
    archive = url.rstrip("/")
    return Mirror(archive, f"{archive}-security" if archive.endswith("/debian") else archive)


def machine_mirror(system: System, distribution: str) -> Mirror:
    """Return the mirror of `distribution` that this machine's apt uses; an empty one if it uses none."""
    fields = "$(REPO_URI)\t$(ORIGIN)\t$(CODENAME)"
    listing = system.run(("apt-get", "indextargets", "--format", fields, "Created-By: Packages"))
    found: dict[str, str] = {}
    for line in listing.stdout.splitlines() if listing.ok else ():
        url, origin, codename = line.split("\t")
        if origin.lower() == distribution:
            found.setdefault("security" if codename.endswith("-security") else "archive", url.rstrip("/"))
    return Mirror(found.get("archive", ""), found.get("security", ""))


def default_sources(
    distribution: str, version: str, architecture: str, mirror: Mirror, components: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return apt's one-line sources of a release: the release, its updates, its security updates.

    `components` are added to those that every bundle gets.
    Raises GpuprovError for Debian without a mirror. Ubuntu has servers of its own for all.
    """
    release = ARCHIVES[distribution, version]
    if distribution == "ubuntu" and not mirror.archive:
        # Ubuntu keeps all but amd64 on a server of its own.
        mirror = mirror_at(server("ubuntu" if architecture == "x86_64" else "ubuntu-ports"))
    if not mirror.archive:
        raise GpuprovError(
            f"no mirror of {distribution} is known on this machine",
            "apt-get indextargets lists none",
            "name it with --mirror URL",
            exit_code=ExitCode.USAGE,
        )
    name = release.codename
    places = (
        (mirror.archive, name),
        (mirror.archive, f"{name}-updates"),
        (mirror.security or mirror_at(mirror.archive).security, f"{name}-security"),
    )
    words = " ".join(dict.fromkeys((*release.components.split(), *components)))
    return tuple(f"deb [signed-by={release.keyring}] {uri} {suite} {words}" for uri, suite in places)
