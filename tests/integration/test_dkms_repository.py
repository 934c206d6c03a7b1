"""DKMS from a repository that may give nothing else, with the real dnf and zypper; and the way back."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpuprov.driver.kernel import dkms_source
from gpuprov.facts.host import HostFacts
from gpuprov.packages import managers
from gpuprov.packages.interface import Installation
from gpuprov.packages.rpm import InstallRpmPackages
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec, parse_spec
from tests.integration.loopback import served
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import NEEDS, facts_of, manager, tell
from tests.lab.rpm_repository import RpmPackage, build_rpm_repository

pytestmark = NEEDS
PACKAGES = (RpmPackage("dkms"), RpmPackage("surprise"))


@dataclass(frozen=True)
class Case:
    """A distribution, its package manager, and where the repository and its key lie below a mirror."""

    program: str
    folder: str
    key: str


CASES = {
    "rocky-9.5": Case("dnf", "9/Everything/x86_64", "RPM-GPG-KEY-EPEL-9"),
    "sles-15.3": Case("zypper", "SLE-15-SP3/standard", "SLE-15-SP3/standard/repodata/repomd.xml.key"),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("dkms")
    build_rpm_repository(folder / "www", folder / "gnupg", PACKAGES)
    yield folder / "www"
    subprocess.run(("gpgconf", "--homedir", str(folder / "gnupg"), "--kill", "all"), check=True)


def metal(host: RpmHost) -> HostFacts:
    """Return the host's facts, as of one that builds modules."""
    facts = facts_of(host)
    return replace(facts, architecture="x86_64", kernel=replace(facts.kernel, container="", takes_modules=True))


def install(host: RpmHost, spec: HostSpec) -> None:
    limited = dkms_source(source_of(metal(host), spec))
    assert limited is not None
    wanted = Installation(("dkms",), limited=f"gpuprov-{limited.name}", limited_names=("dkms",))
    for change in manager(host).plan_installation(facts_of(host).packages, wanted):
        change.apply(host, tell)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_dkms_comes_from_there_and_nothing_else_can(repository: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    shutil.copytree(repository, tmp_path / "www" / case.folder)
    place = tmp_path / "www" / case.key
    shutil.copyfile(repository / "key.asc", place)
    host = RpmHost(tmp_path / "root", name, case.program)
    try:
        with served(tmp_path / "www") as url:
            fingerprint = (repository / "fingerprint").read_text()
            values = {"driver_version": "580.178.04", "epel_repository": url, "epel_key_fingerprint": fingerprint}
            spec = parse_spec(values)
            changes = PlanContext(metal(host), spec).repository_changes
            before = [(change, change.capture(host)) for change in changes]
            for change in changes:
                change.apply(host, tell)
            assert PlanContext(metal(host), spec).repository_changes == ()
            install(host, spec)
            assert "dkms" in manager(host).gather(host).installed
            assert managers.ask(host, manager(host), ("surprise",), ()).lacking(("surprise",)) == ("surprise",)
            with pytest.raises(GpuprovError, match=r"no repository has such a package|an exclude"):
                InstallRpmPackages(manager(host), ("surprise",)).apply(host, tell)
            # With DKMS there, nothing is left to do, and its repository stays.
            assert PlanContext(metal(host), spec).repository_changes == ()
            for change, image in reversed(before):
                type(change).undo(host, image, {})
    finally:
        host.end_agents()
    folder = manager(host).repository_directory
    assert host.list_directory(folder) == ()
    assert fingerprint not in facts_of(host).packages.trusted_keys
    assert not host.exists("/etc/pki/rpm-gpg")
