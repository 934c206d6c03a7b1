"""NVIDIA's container toolkit from its repository for rpm's world, by the real dnf and zypper: all four of one version.

The packages are stand-ins with NVIDIA's names and dependencies, in a mirror laid out as NVIDIA's own.
"""

import shutil
from pathlib import Path

import pytest

from gpuprov.facts.host import gather
from gpuprov.plan.context import PlanContext
from gpuprov.protocol.spec import HostSpec
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import HOSTS, NEEDS, configure
from tests.integration.test_rpm_holds import converge, with_docker
from tests.lab.nvidia_toolkit import NAMES, RPM_REQUIRES
from tests.lab.rpm_repository import RpmPackage, build_rpm_repository
from tests.runs import as_a_run, undo_last

pytestmark = [*NEEDS, pytest.mark.slow]
_OLD, _NEW = "1.17.8", "1.18.1"


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    place = folder / "www/stable/rpm/x86_64"
    packages = tuple(
        RpmPackage(name, version, requires=RPM_REQUIRES[name].format(version=f"{version}-1"))
        for name in NAMES
        for version in (_OLD, _NEW)
    )
    # As NVIDIA's: the metadata alone are signed.
    build_rpm_repository(place, folder / "gnupg", packages, signed_packages=False)
    shutil.copy(place / "key.asc", folder / "www/gpgkey")
    return folder / "www"


def wanted(mirror: Path, version: str = "") -> HostSpec:
    fingerprint = (mirror / "stable/rpm/x86_64/fingerprint").read_text()
    return HostSpec(
        driver="preinstalled", docker="preinstalled", toolkit="nvidia", toolkit_version=version, hold_pinned=False,
        toolkit_repository="file:///opt/mirror", toolkit_key_fingerprint=fingerprint,
    )  # fmt: skip


def versions(host: RpmHost) -> set[str]:
    """Return VERSION-RELEASE of the toolkit's packages."""
    installed = gather(host).packages.installed
    return {installed[name].rpartition(".")[0] for name in NAMES}


@pytest.mark.parametrize("os_release", HOSTS)
def test_all_four_packages_change_to_the_requested_version(tmp_path: Path, mirror: Path, os_release: str) -> None:
    host = RpmHost(tmp_path / "root", os_release, HOSTS[os_release])
    shutil.copytree(mirror, host.path("/opt/mirror"))
    configure(host, wanted(mirror))
    for version in (f"{_OLD}-1", f"{_NEW}-1"):
        as_a_run(host, *PlanContext(with_docker(host), wanted(mirror, version)).package_changes)
        assert versions(host) == {version}
    undo_last(host)
    assert versions(host) == {f"{_OLD}-1"}
    undo_last(host)
    assert not {*NAMES} & {*gather(host).packages.installed}


def test_without_a_version_the_newest(tmp_path: Path, mirror: Path) -> None:
    host = RpmHost(tmp_path / "root", "rocky-9.5", "dnf")
    shutil.copytree(mirror, host.path("/opt/mirror"))
    configure(host, wanted(mirror))
    converge(host, wanted(mirror))
    assert versions(host) == {f"{_NEW}-1"}
