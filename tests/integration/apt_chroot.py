"""A release's own apt and dpkg on a root file system of its own: an overlay over the lab's base, entered by chroot."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.changes import Change
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.facts.host import gather_files
from gpuprov.packages.apt_changes import RefreshPackageIndex
from tests.apt_host import plan_repositories
from tests.gpg import gpg_home
from tests.integration.served_repository import ServedRepository, served_directly
from tests.lab.base import build_base, mount_over
from tests.lab.lab import CACHE
from tests.lab.repository import build_package, build_repository, sign
from tests.lab.shell import run
from tests.runs import tell

NEEDS = [pytest.mark.root, pytest.mark.needs("mmdebstrap")]
# apt 2.2, 2.6 and 3.0.
RELEASES = (
    pytest.param("bullseye", marks=pytest.mark.slow), "bookworm", pytest.param("trixie", marks=pytest.mark.slow)
)  # fmt: skip
_PLACES = ("proc", "dev/pts")


class ChrootHost(System):
    """A machine whose programs run in its own root; a package's scripts find no running systemd there."""

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        words = tuple("Acquire::Retries=0" if word == "Acquire::Retries=3" else word for word in argv)
        done = super().run(("chroot", str(self.root), *words), **more)
        return Completed(tuple(argv), done.returncode, done.stdout, done.stderr, done.seconds)


@contextmanager
def chroot_host(release: str, folder: Path, storage: Path | None = None) -> Iterator[ChrootHost]:
    """A pristine host of a release, without any package source; its files lie in `folder` until the end.

    What is written there takes room in `storage`, which may be a disk of the test's own.
    """
    base = build_base(CACHE / "bases", release, print)
    root = folder / "root"
    # Overlay on overlay does not work: the layers lie where the base does.
    layers = (storage or CACHE) / f"chroot-{os.getpid()}-{release}"
    mount_over(str(base), layers, root)
    try:
        run(("mount", "-t", "proc", "proc", str(root / "proc")))
        # Daemons are none of these tests' business.
        (root / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
        (root / "usr/sbin/policy-rc.d").chmod(0o755)
        lists = (path for path in (root / "var/lib/apt/lists").iterdir() if path.is_file())
        for path in ((root / "etc/apt/sources.list"), *(root / "etc/apt/sources.list.d").iterdir(), *lists):
            path.unlink(missing_ok=True)
        (root / "etc/apt/keyrings").mkdir(exist_ok=True)
        yield ChrootHost(str(root))
    finally:
        run(("umount", "-R", str(root)))
        shutil.rmtree(layers)


def plan_site(host: ChrootHost, site: ServedRepository) -> tuple[Change, ...]:
    return plan_repositories(gather_files(host), site.spec, host.architecture())


def configure_site(host: ChrootHost, site: ServedRepository, *, refreshed: bool = True) -> None:
    """Let the host have the repository, and read its index."""
    for change in (*plan_site(host, site), *([RefreshPackageIndex()] if refreshed else [])):
        change.apply(host, tell)


class SiteServer(ServedRepository):
    """A repository to which packages are added."""

    def add(self, name: str, version: str = "1.0", files: Mapping[str, str] | None = None, **fields: str) -> None:
        """Build a package and sign the index again. Fields of its control file have `_` for `-`."""
        given = {"Package": name, "Version": version, "Architecture": "all", "Maintainer": "The lab <lab@example.org>"}
        more = {key.replace("_", "-"): value for key, value in fields.items()}
        control = "".join(f"{key}: {value}\n" for key, value in {**given, **more}.items())
        build_package(self.folder, f"{control}Description: a package of the tests\n", files or {})
        sign(self.folder, self.gnupg)


@contextmanager
def site_server(folder: Path) -> Iterator[SiteServer]:
    """Serve a repository in `folder`/www, to programs that use no proxy."""
    (folder / "www").mkdir(parents=True)
    # Not pytest's folder: the socket of gpg's agent would have too long a path (unix(7): 108 bytes).
    with (
        tempfile.TemporaryDirectory(prefix="gpuprov-gpg-") as short, gpg_home(Path(short)) as gnupg,
        served_directly(folder / "www") as url,
    ):  # fmt: skip
        build_repository(folder / "www", gnupg)
        yield SiteServer(folder / "www", gnupg, url)
