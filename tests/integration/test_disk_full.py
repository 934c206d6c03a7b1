"""A disk that fills up in any change of a run: the change is undone, said why, and the next run goes on from there.

The host's programs are played, but for apt and dpkg; test_faults_on_hosts.py fills the disk of a real host.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprov.core.apply import apply_changes, resume_run
from gpuprov.core.changes import Change
from gpuprov.core.journal import new_journal, read_runs
from gpuprov.core.system import System
from gpuprov.facts.host import gather, gather_files
from gpuprov.packages.apt_changes import InstallPackages, RefreshPackageIndex
from gpuprov.packages.dpkg import gather_packages
from gpuprov.packages.rpm import InstallRpmPackages, RefreshRpmIndex
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec
from tests.apt_host import plan_repositories
from tests.integration.apt_chroot import RELEASES, SiteServer, chroot_host, site_server
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import EACH_HOST, Repository, repository, template
from tests.integration.rpm_repositories import HOSTS as RPM_HOSTS
from tests.integration.rpm_repositories import manager as manager_on
from tests.integration.rpm_repositories import plan_repositories as plan_rpm_repositories
from tests.integration.test_power_cut import differences
from tests.lab.rpm_repository import RpmPackage
from tests.runs import ignore
from tests.unit.ask import finished
from tests.unit.fake_host import FakeHost, Tree
from tests.unit.test_laws import install, lay_foreign, spec

__all__ = ["repository", "spec", "template"]
pytestmark = pytest.mark.root
_FILLER = "filler"


def fill(disk: Path, but: int = 0) -> None:
    """Fill a disk, but for some bytes."""
    with (disk / _FILLER).open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
        file.truncate(file.tell() - but)


def make_room(disk: Path) -> None:
    (disk / _FILLER).unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a disk of this size for the time of the block."""
    place.mkdir(exist_ok=True)
    # As any host's root: a tmpfs is writable for everybody by default.
    options = f"size={size},huge=never,mode=755"
    subprocess.run(("mount", "-t", "tmpfs", "-o", options, "gpuprov-full", str(place)), check=True)
    try:
        yield place
    finally:
        subprocess.run(("umount", str(place)), check=True)


class FillingHost(FakeHost):
    """A host whose disk somebody fills as soon as the change of this kind has begun."""

    fills_in = ""
    begun: Tree

    def append(self, path: str, content: bytes) -> None:
        super().append(path, content)
        begun = read_runs(self)[-1].interrupted
        if begun is not None and begun.kind == self.fills_in:
            self.begun = self.tree()
            fill(self.root)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FillingHost]:
    with small_disk(tmp_path / "disk", "48m") as disk:
        made = FillingHost(disk, gpus=1)
        lay_foreign(disk)
        made.run(("systemctl", "reload", "docker.service"))
        yield made


# What its programs do not need the disk for is not here: the package manager, which tests of its own make fail.
NEEDS_ROOM = (
    "FetchRunfile", "InstallKey", "WriteFile", "InstallDriver", "PrepareBoot", "InstallRuntime",
    "WriteCdiSpecification", "ReconfigureDocker",
)  # fmt: skip


def test_full_in_any_change_it_is_undone_and_the_next_run_goes_on(host: FillingHost, spec: HostSpec) -> None:
    for kind in NEEDS_ROOM:
        host.fills_in = kind
        told = finished(install(host, spec))
        assert told.exit_code == 1, kind
        said = "\n".join(map(str, told.problems))
        assert "No space left on device" in said or "not enough room" in said, f"{kind}: {said}"
        assert "df -h" in said and "bug" not in said, f"{kind}: {said}"
        host.fills_in = ""
        make_room(host.root)
        # Undone, at once or as the next run begins: nothing is there but what is whole.
        resume_run(host, CHANGE_KINDS, ignore)
        entries = read_runs(host)[-1].entries
        assert entries[-1].kind == kind and entries[-1].state != "begun"
        assert differences(host.tree(), host.begun) == set(), kind
    assert finished(install(host, spec)).exit_code == 0
    assert finished(install(host, spec)).changed == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteServer]:
    """A repository with a package that takes 16 MiB."""
    with site_server(tmp_path_factory.mktemp("site")) as made:
        made.add("library")
        made.add("large", files={"usr/share/large": "x" * (16 << 20)}, Depends="library")
        yield made


# How much is left: nothing, not even for the journal; or enough to begin with, and not to end.
ROOM = {0: "could not begin the run's journal", 8 << 20: "large could not be installed: the disk is full"}


def carry_out(debian: System, *changes: Change) -> None:
    """Make these changes as a run does, one that was cut off taken up first."""
    journal = resume_run(debian, CHANGE_KINDS, ignore) or new_journal(debian, "install")
    apply_changes(changes, debian, journal, ignore)
    journal.end("done")


@pytest.mark.needs("mmdebstrap")
@pytest.mark.parametrize("release", RELEASES)
def test_dpkg_on_a_full_disk_leaves_nothing_half_installed(release: str, server: SiteServer, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "200m") as disk, chroot_host(release, tmp_path / "host", disk) as debian:
        carry_out(debian, *plan_repositories(gather_files(debian), server.spec, "x86_64"))
        # Without room apt says that the index can't be fetched, with a little that it is not signed.
        for but in (0, 4 << 10):
            fill(disk, but)
            with pytest.raises(GpuprovError, match="could not be refreshed: the disk is full"):
                RefreshPackageIndex().apply(debian, lambda message, done, total: None)
            make_room(disk)
        carry_out(debian, RefreshPackageIndex())
        before = gather_packages(debian).installed
        for but, what in ROOM.items():
            fill(disk, but)
            with pytest.raises(GpuprovError) as caught:
                carry_out(debian, InstallPackages(("large",)))
            make_room(disk)
            assert what in str(caught.value) and "df -h" in str(caught.value)
            assert gather_packages(debian).installed == before
            assert debian.run(("dpkg", "--audit")).stdout == ""
        carry_out(debian, InstallPackages(("large",)))
        assert gather_packages(debian).installed.keys() == {*before, "large", "library"}
        assert debian.run(("dpkg", "--audit")).stdout == ""


@pytest.mark.needs("createrepo_c")
@pytest.mark.parametrize("name", EACH_HOST)
def test_rpm_on_a_full_disk_leaves_nothing_half_installed(name: str, repository: Repository, tmp_path: Path) -> None:
    repository.add(RpmPackage("large", size=16 << 20))
    with small_disk(tmp_path / "disk", "200m") as disk:
        rpm = RpmHost(disk / "root", name, RPM_HOSTS[name])
        carry_out(rpm, *plan_rpm_repositories(gather(rpm), repository.spec))
        manager = manager_on(rpm)
        refresh, large = RefreshRpmIndex(manager), InstallRpmPackages(manager, ("large",))
        # Something was installed before, as on any host: dnf's history is there.
        carry_out(rpm, refresh, InstallRpmPackages(manager, ("site-gpu-library",)))
        before = set(rpm.run(("rpm", "-qa")).stdout.split())
        for change, but in ((refresh, 0), (large, 0), (large, 64 << 10)):
            journal = new_journal(rpm, "install")
            fill(disk, but)
            with pytest.raises(GpuprovError, match=r"the disk is full|No space left"):
                apply_changes([change], rpm, journal, ignore)
            make_room(disk)
            resume_run(rpm, CHANGE_KINDS, ignore)
            assert set(rpm.run(("rpm", "-qa")).stdout.split()) == before
            carry_out(rpm, refresh)
        carry_out(rpm, large)
        assert set(rpm.run(("rpm", "-qa")).stdout.split()) == {*before, "large-1.0-1.noarch"}
