"""Where packages come from: read at run time from the machine's own apt configuration."""

import os
import re
import shutil
from pathlib import Path

from tests.lab.shell import LabError, run

MIRROR_VARIABLE = "DEBIAN_MIRROR"
_CA_BUNDLE = "etc/ssl/certs/ca-certificates.crt"
# A mirror that is behind: of a release that never ends, unstable, its lists are then out of date.
_BEHIND = re.compile(r'^Acquire::Check-Valid-Until "(false|0|no)";$', re.MULTILINE)
# Proxies and certificates of the site are what a host needs to reach the same mirror.
_PASSED = re.compile(r'^Acquire::(http|https)::(Proxy|CaInfo|Verify-Peer)\b.*";$', re.MULTILINE)


def source_lines(release: str) -> tuple[str, ...]:
    """Return apt's one-line sources of a Debian release, from the mirror that this machine uses."""
    archive, security = mirrors()
    lines = [f"deb {archive} {release} main"]
    if release != "sid":
        lines += [f"deb {archive} {release}-updates main", f"deb {security} {release}-security main"]
    return tuple(lines)


def mirrors() -> tuple[str, str]:
    """Return the URIs of Debian's archive and security archive in this machine's sources (deb822 or one-line).

    A machine that is not Debian names the archive in the environment variable DEBIAN_MIRROR.
    """
    texts = [path.read_text() for path in Path("/etc/apt").rglob("*") if path.suffix in (".sources", ".list")]
    uris = re.findall(r"^(?:URIs:|deb(?:\s+\[[^]]*\])?)\s+(https?://\S+)", "\n".join(texts), re.MULTILINE)
    archive = next((uri for uri in uris if re.search(r"/debian/?$", uri)), os.environ.get(MIRROR_VARIABLE, ""))
    if not archive:
        raise LabError(f"this machine's apt names no mirror of Debian; next: export {MIRROR_VARIABLE}=URL")
    beside = archive.rstrip("/") + "-security"
    security = next((uri for uri in uris if re.search(r"/debian-security/?$", uri)), beside)
    return archive, security


def behind(release: str) -> tuple[str, ...]:
    """Return the settings of apt for unstable if this machine's apt takes lists of a mirror that is behind."""
    return (
        ('Acquire::Check-Valid-Until "false"',)
        if release == "sid" and _BEHIND.search(run(("apt-config", "dump")))
        else ()
    )


def copy_network_configuration(root: Path, release: str) -> None:
    """Give a host this machine's name servers, apt sources, proxy and certificates."""
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    (root / "etc/apt/sources.list").write_text("".join(f"{line}\n" for line in source_lines(release)))
    passed = _PASSED.finditer(run(("apt-config", "dump")))
    (root / "etc/apt/apt.conf.d/80site").write_text("".join(f"{match[0]}\n" for match in passed))
    bundle = Path("/") / _CA_BUNDLE
    if bundle.exists():
        shutil.copyfile(bundle, root / _CA_BUNDLE)
