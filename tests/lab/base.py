"""The cached root file system of a release, built once by mmdebstrap; its name holds the digest of its recipe."""

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.lab.shell import LabError, run
from tests.lab.sources import behind, source_lines

# `rpm` and `dnf5` are Debian with the package managers of rpm's distributions; which of those it is, a host says.
RELEASES = ("bullseye", "bookworm", "trixie", "sid", "rpm", "dnf5")
_DEBIAN = {"rpm": "bookworm", "dnf5": "sid"}
_PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "openssh-server", "python3", "iproute2", "ca-certificates", "sudo", "procps",
    "kmod", "iptables", "gpgv", "netbase", "docker.io",
)  # fmt: skip
# From trixie on docker.io no longer brings the client.
_MORE = {
    "trixie": ("docker-cli",), "sid": ("docker-cli",), "rpm": ("dnf", "zypper", "rpm"),
    "dnf5": ("docker-cli", "dnf5", "rpm", "gnupg"),
}  # fmt: skip
# apt's lists stay: a host asks its mirror whether they changed, instead of fetching 15 MiB of them in every test.
_OPTIONS = ("--skip=cleanup/apt/lists", '--aptopt=Acquire::Languages "none"')
# Every host makes its own.
_CLEANUP = (
    'rm -f "$1"/etc/ssh/ssh_host_* "$1"/etc/machine-id "$1"/var/lib/dbus/machine-id && : > "$1"/etc/machine-id',
    'ln -sf /lib/systemd/system/systemd-networkd.service "$1"/etc/systemd/system/multi-user.target.wants/',
)
_BUILD_SECONDS = 900


def base_path(cache: Path, release: str) -> Path:
    """Return where the root file system of a release lies, or will lie, in the cache."""
    recipe = repr((release, _packages(release), _OPTIONS, _CLEANUP))
    return cache / f"{release}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def debian_release(release: str) -> str:
    """Return the Debian release that a release of the lab is made of."""
    return _DEBIAN.get(release, release)


def _packages(release: str) -> tuple[str, ...]:
    return (*_PACKAGES, *_MORE.get(release, ()))


def build_base(cache: Path, release: str, tell: Callable[[str], None]) -> Path:
    """Return the root file system of a release, building it if the cache lacks it; half a build is never left there."""
    place = base_path(cache, release)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return place
        tell(f"building the root file system of {release} (about a minute, once)")
        for stale in cache.glob(f"{release}-*"):
            shutil.rmtree(stale)
        half = cache / f"building-{release}"
        shutil.rmtree(half, ignore_errors=True)
        hooks = [f"--customize-hook={command}" for command in _CLEANUP]
        keyring = "--keyring=/usr/share/keyrings/debian-archive-keyring.gpg"
        include = f"--include={','.join(_packages(release))}"
        debian = debian_release(release)
        options = ("--quiet", "--variant=minbase", *_OPTIONS, *(f"--aptopt={line}" for line in behind(debian)))
        command = ("mmdebstrap", *options, keyring, include, *hooks, debian, str(half), "-")
        run(command, stdin="".join(f"{line}\n" for line in source_lines(debian)), timeout=_BUILD_SECONDS)
        half.rename(place)
    return place


def mount_over(lower: str, storage: Path, root: Path, *, synced: bool = False) -> None:
    """Mount at `root` what `lower` is (folders, the uppermost first) with the changes that lie in `storage`.

    Unless `synced`, programs that wait for the disk do not: a host of a test is thrown away anyway (Linux 5.10).
    """
    for place in (storage / "upper", storage / "work", root):
        place.mkdir(parents=True, exist_ok=True)
    layers = f"lowerdir={lower},upperdir={storage}/upper,workdir={storage}/work"
    mount = ("mount", "-t", "overlay", "gpuprov-lab", "-o")
    if not synced:
        with contextlib.suppress(LabError):
            run((*mount, f"{layers},volatile", str(root)))
            return
    run((*mount, layers, str(root)))
