"""A rollback restores the driver that an upgrade replaced: apt of three Debian releases, the simulated .run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprov.cdi.discover import discover
from gpuprov.core.journal import read_runs
from gpuprov.core.places import KEPT
from gpuprov.driver.packaged import ChangeDriverPackages, SwitchPin
from gpuprov.driver_run import InstallDriver
from gpuprov.facts.host import gather_files
from gpuprov.packages import dpkg
from gpuprov.packages.apt_changes import InstallPackages, RefreshPackageIndex
from gpuprov.plan.steps import CHANGE_KINDS
from tests import simgpu
from tests.apt_host import plan_repositories
from tests.integration.apt_chroot import NEEDS, RELEASES, ChrootHost, SiteServer, chroot_host, site_server
from tests.runs import as_a_run, undo_last

pytestmark = NEEDS
_OLD, _NEW = "550.163.01-1", "580.178.04-1"
_ARCHIVES = "/var/cache/apt/archives"
_LIBRARIES = "/usr/lib/x86_64-linux-gnu"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteServer]:
    """A repository with two branches whose kernel modules are packages of their own."""
    with site_server(tmp_path_factory.mktemp("site")) as made:
        for version in (_OLD, _NEW):
            branch = version.partition(".")[0]
            made.add(f"nvidia-kernel-{branch}", version, Provides="nvidia-kernel", Conflicts="nvidia-kernel")
            made.add("nvidia-open", version, Depends=f"nvidia-kernel-{branch}")
            made.add(f"nvidia-driver-pinning-{branch}", Provides="nvidia-pin", Conflicts="nvidia-pin")
        yield made


@pytest.fixture(params=RELEASES)
def host(request: pytest.FixtureRequest, server: SiteServer, tmp_path: Path) -> Iterator[ChrootHost]:
    with chroot_host(request.param, tmp_path) as made:
        as_a_run(made, *plan_repositories(gather_files(made), server.spec, made.architecture()), RefreshPackageIndex())
        as_a_run(made, InstallPackages((f"nvidia-open={_OLD}", "nvidia-driver-pinning-550")))
        yield made


def versions(host: ChrootHost) -> dict[str, str]:
    return {one.name: one.version for one in dpkg.query(host) if "nvidia" in one.name and one.status != "not-installed"}


def upgrade(host: ChrootHost) -> tuple[str, ...]:
    """Install the newer branch; return what is said of the way back before."""
    change = ChangeDriverPackages(("nvidia-open",), wanted="580")
    said = change.way_back(host)
    as_a_run(host, SwitchPin(("nvidia-driver-pinning-580",), instead=("nvidia-driver-pinning-550",)))
    as_a_run(host, change)
    return said


def restored(host: ChrootHost) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a rollback of the last run says: that it restores, and that it can't."""
    (entry,) = read_runs(host)[-1].entries
    kind = CHANGE_KINDS[entry.kind]
    return kind.restores(host, entry.before, entry.outcome), kind.irreversible(host, entry.before, entry.outcome, ())


def test_a_rollback_installs_the_former_versions(host: ChrootHost) -> None:
    before = versions(host)
    assert upgrade(host)[0].startswith("way back: the driver's packages, by version (nvidia-driver-pinning-550=1.0 and")
    assert versions(host)["nvidia-kernel-580"] == _NEW
    assert restored(host) == ((f"restores the driver's packages (nvidia-kernel-550={_OLD} and 1 more)",), ())
    undo_last(host)
    (entry,) = read_runs(host)[-1].entries
    CHANGE_KINDS[entry.kind].undo(host, entry.before, entry.outcome)
    undo_last(host)
    assert versions(host) == before


def test_where_no_repository_has_them_it_is_said(host: ChrootHost, server: SiteServer) -> None:
    """But the files that apt keeps do as well."""
    for path in host.path(_ARCHIVES).glob("nvidia-*.deb"):
        shutil.move(path, host.path("/root"))
    lists = host.path("/var/lib/apt/lists")
    for path in lists.glob("*Packages*"):
        rows = [row for row in path.read_text().split("\n\n") if _OLD not in row]
        path.write_text("\n\n".join(rows))
    before = versions(host)
    (said,) = upgrade(host)
    assert said.startswith("way back: the driver's packages can't be restored: no repository has nvidia-")
    restores, lost = restored(host)
    assert restores == () and f"nvidia-open stays at {_NEW}; before gpuprov it was {_OLD}" in lost
    for path in host.path("/root").glob("nvidia-*.deb"):
        shutil.move(path, host.path(_ARCHIVES))
    if not list(host.path(_ARCHIVES).glob(f"nvidia-open_{_OLD}_*")):
        for path in server.folder.glob(f"nvidia-*_{_OLD}_*.deb"):
            shutil.copy(path, host.path(_ARCHIVES))
    assert restored(host)[0] != ()
    undo_last(host)
    undo_last(host)
    assert versions(host) == before


def test_the_kept_run_file_is_installed_again(host: ChrootHost) -> None:
    """The simulated .run, run by the host's own shell; libraries only."""
    undo_last(host)
    # No systemd runs here.
    host.write("/usr/bin/systemctl", b"#!/bin/sh\n", mode=0o755)
    old, new = "535.261.03", simgpu.DRIVER_VERSION
    libraries = {}
    for version, replaced in ((old, ""), (new, old)):
        file = simgpu.build_run(host.path("/root"), version)
        change = InstallDriver(
            version, f"/root/{file.name}", "", "x86_64", kernel_modules=False, replaces=replaced,
            keep=True,
        )  # fmt: skip
        as_a_run(host, change)
        file.unlink()
        assert discover(host).library_version == version
        libraries[version] = {path.name: path.read_bytes() for path in host.path(_LIBRARIES).glob("libcuda.so*")}
    assert sorted(host.list_directory(KEPT)) == [f"{old}.run", f"{new}.run"]
    undo_last(host)
    assert discover(host).library_version == old
    assert {path.name: path.read_bytes() for path in host.path(_LIBRARIES).glob("libcuda.so*")} == libraries[old]
    undo_last(host)
    assert discover(host).library_version == ""
