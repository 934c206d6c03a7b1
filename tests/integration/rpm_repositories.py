"""A signed rpm repository on loopback, and machines whose real dnf or zypper is to take packages from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprov import repos
from gpuprov.core.changes import Change
from gpuprov.facts.host import HostFacts, gather
from gpuprov.packages.dnf import DNF
from gpuprov.packages.rpm import InstallRpmPackages, RefreshRpmIndex, RpmManager
from gpuprov.packages.zypper import ZYPPER
from gpuprov.protocol.spec import HostSpec
from tests.integration.rpm_host import RpmHost
from tests.integration.served_repository import ServedRepository, served_copy
from tests.lab.rpm_repository import RpmPackage, build_package, build_rpm_repository, index, sign_package
from tests.runs import tell

NEEDS = [pytest.mark.root, pytest.mark.needs("dnf", "zypper", "rpmbuild", "createrepo_c")]
# os-release → its package manager.
HOSTS = {"rocky-9.5": "dnf", "fedora-38": "dnf", "opensuse-tumbleweed": "zypper"}
# One of each manager for `make test`.
EACH_HOST = ("rocky-9.5", pytest.param("fedora-38", marks=pytest.mark.slow), "opensuse-tumbleweed")


class Repository(ServedRepository):
    """One to which packages are added."""

    def add(self, package: RpmPackage, *, signed: bool = True) -> None:
        file = build_package(package, self.folder)
        if signed:
            sign_package(file, self.gnupg, self.fingerprint)
        index(self.folder, self.gnupg)


def build(folder: Path) -> Path:
    """Build a repository in `www` and its key in `gnupg`; return the folder."""
    build_rpm_repository(folder / "www", folder / "gnupg")
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository that each test gets a copy of."""
    return build(tmp_path_factory.mktemp("rpm"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the same content, with another key: its folder."""
    return build(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def repository(template: Path, tmp_path: Path) -> Iterator[Repository]:
    with served_copy(template, tmp_path) as places:
        yield Repository(*places)


@pytest.fixture(params=EACH_HOST)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RpmHost]:
    made = RpmHost(tmp_path / "root", request.param, HOSTS[request.param])
    yield made
    made.end_agents()


def facts_of(host: RpmHost) -> HostFacts:
    return gather(host)


def manager(host: RpmHost) -> RpmManager:
    return DNF if host.programs[1] == "dnf" else ZYPPER


def plan_repositories(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    return repos.plan(facts, spec)


def configure(host: RpmHost, spec: HostSpec) -> None:
    """Apply what is planned; a second plan is empty."""
    for change in plan_repositories(facts_of(host), spec):
        change.apply(host, tell)
    assert plan_repositories(facts_of(host), spec) == ()


def refresh(host: RpmHost) -> None:
    RefreshRpmIndex(manager(host)).apply(host, tell)


def set_up(host: RpmHost, spec: HostSpec) -> None:
    configure(host, spec)
    refresh(host)


def install(host: RpmHost, *names: str) -> tuple[InstallRpmPackages, dict[str, list[str]], dict[str, list[str]]]:
    change = InstallRpmPackages(manager(host), names)
    before = dict(change.capture(host))
    return change, before, dict(change.apply(host, tell) or {})


def tamper(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
