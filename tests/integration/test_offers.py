"""What repositories have, asked of the real dnf and zypper; those that are yet to be set up are asked in a copy."""

import shutil
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
from gpuprov.protocol.spec import HostSpec, SiteRepository, parse_spec
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import (
    NEEDS,
    Repository,
    configure,
    facts_of,
    host,
    manager,
    plan_repositories,
    repository,
    stranger,
    template,
)
from tests.lab.rpm_repository import RpmPackage, build_rpm_repository
from tests.loopback import served
from tests.runs import tell

__all__ = ["host", "repository", "stranger", "template"]
pytestmark = NEEDS


def configured(host: RpmHost) -> list[object]:
    """Return what a question must leave as it is: sources, keys, rpm's database, no leftovers."""
    kept = ("etc", "var/tmp", "var/lib/dnf")
    trees = [sorted(path for path in (host.root / place).rglob("*") if "dnf/" not in str(path)) for place in kept]
    return [*trees, host.run(("rpm", "-qa")).stdout]


@pytest.mark.parametrize("set_up", [True, False])
def test_repository_is_queried_before_and_after_setup(host: RpmHost, repository: Repository, *, set_up: bool) -> None:
    repository.add(replace(RpmPackage("site-gpu-tools"), version="2.0", requires="site-gpu-library"))
    planned = plan_repositories(facts_of(host), repository.spec)
    if set_up:
        configure(host, repository.spec)
    before = configured(host)
    answer = managers.ask(host, manager(host), ("site-gpu-tools", "nobody-has-this"), () if set_up else planned)
    assert answer.problems == ()
    assert {version.rpartition(":")[2] for version in answer.found["site-gpu-tools"]} == {
        "1.0-1.noarch",
        "2.0-1.noarch",
    }
    assert answer.lacking(("site-gpu-tools=2.0", "site-gpu-tools=3.0", "nobody-has-this")) == (
        "site-gpu-tools=3.0",
        "nobody-has-this",
    )
    assert configured(host) == before


def test_what_a_repository_has_got_since_the_last_question_is_offered(host: RpmHost, repository: Repository) -> None:
    """A driver that was published an hour ago: dnf would keep what it knows for two days."""
    configure(host, repository.spec)
    assert managers.ask(host, manager(host), ("site-gpu-tools",), ()).lacking(("site-gpu-tools=2.0",))
    repository.add(RpmPackage("site-gpu-tools", version="2.0"))
    assert not managers.ask(host, manager(host), ("site-gpu-tools",), ()).lacking(("site-gpu-tools=2.0",))


def test_what_is_only_installed_is_not_offered(host: RpmHost, repository: Repository) -> None:
    configure(host, repository.spec)
    assert managers.ask(host, manager(host), ("base-system",), ()).lacking(("base-system",)) == ("base-system",)


@pytest.mark.parametrize("host", ["rocky-9.5"], indirect=True)
def test_dnf_lists_excluded_packages_only_without_excludes(host: RpmHost, repository: Repository) -> None:
    """As driver/kernel.py says of the kernel's headers."""
    configure(host, repository.spec)
    settings = host.path("/etc/dnf/dnf.conf")
    settings.write_text(f"{settings.read_text()}\nexclude=site-gpu*\n")
    assert managers.ask(host, manager(host), ("site-gpu-tools",), ()).found == {}
    done = host.run(("dnf", "-y", "--setopt=disable_excludes=all,*", "install", "site-gpu-tools"), timeout=60)
    assert done.ok, done.evidence()


def test_planned_repository_of_other_key_is_not_asked(host: RpmHost, repository: Repository, stranger: Path) -> None:
    """The key is the pinned one, the metadata somebody else's."""
    for name in ("repomd.xml", "repomd.xml.asc"):
        shutil.copy(stranger / "www/repodata" / name, repository.folder / "repodata" / name)
    before = configured(host)
    planned = plan_repositories(facts_of(host), repository.spec)
    answer = managers.ask(host, manager(host), ("site-gpu-tools",), planned)
    (problem,) = answer.problems
    assert problem.what.startswith("the package index could not be refreshed: "), problem
    assert answer.found == {}
    assert configured(host) == before


def test_a_key_that_is_not_the_pinned_one_ends_it(host: RpmHost, repository: Repository) -> None:
    url = repository.url
    wanted = HostSpec(repositories=(SiteRepository("site", url, f"{url}/key.asc", "A" * 40),))
    answer = managers.ask(host, manager(host), ("site-gpu-tools",), plan_repositories(facts_of(host), wanted))
    assert [one.what for one in answer.problems] == ["the repository's key is not the one that is pinned"]
    assert host.list_directory("/var/tmp") == ()


def test_a_repository_of_the_host_that_is_out_of_reach_is_told(host: RpmHost, repository: Repository) -> None:
    configure(host, repository.spec)
    shutil.rmtree(repository.folder / "repodata")
    (problem,) = managers.ask(host, manager(host), ("site-gpu-tools",), ()).problems
    assert problem.what.startswith("the package index could not be refreshed: "), problem


def test_both_sets_of_repositories_answer(host: RpmHost, repository: Repository, tmp_path: Path) -> None:
    configure(host, repository.spec)
    more, gnupg = tmp_path / "more", tmp_path / "more-keys"
    build_rpm_repository(more, gnupg, (RpmPackage("site-gpu-tools", "7.0"), RpmPackage("kernel-devel", "5.14.0")))
    shutil.copytree(more, host.path("/opt/more"))
    fingerprint = (more / "fingerprint").read_text()
    second = SiteRepository("more", "file:///opt/more", "file:///opt/more/key.asc", fingerprint)
    wanted = HostSpec(repositories=(*repository.spec.repositories, second))
    planned = plan_repositories(facts_of(host), wanted)
    answer = managers.ask(host, manager(host), ("site-gpu-tools", "kernel-devel"), planned)
    assert answer.problems == ()
    assert answer.lacking(("site-gpu-tools=1.0", "site-gpu-tools=7.0", "kernel-devel=5.14.0")) == ()


def test_moved_repository_is_asked_at_its_new_url_with_the_present_key(host: RpmHost, repository: Repository) -> None:
    """As after a run with a wrong address in the inventory: what has to be fixed must not stand in the way."""
    configure(host, repository.spec)
    shutil.move(repository.folder / "repodata", repository.folder / "moved/repodata")
    for package in repository.folder.glob("*.rpm"):
        shutil.move(package, repository.folder / "moved")
    (site,) = repository.spec.repositories
    planned = plan_repositories(facts_of(host), HostSpec(repositories=(replace(site, uri=f"{site.uri}/moved"),)))
    assert [type(change).__name__ for change in planned] == ["WriteFile"]
    assert managers.ask(host, manager(host), ("site-gpu-tools",), ()).problems
    answer = managers.ask(host, manager(host), ("site-gpu-tools",), planned)
    assert answer.problems == ()
    assert len(answer.found["site-gpu-tools"]) == 1


def test_a_repository_that_goes_is_not_asked(host: RpmHost, repository: Repository) -> None:
    configure(host, repository.spec)
    shutil.rmtree(repository.folder / "repodata")
    answer = managers.ask(host, manager(host), ("site-gpu-tools",), plan_repositories(facts_of(host), HostSpec()))
    assert answer.problems == ()
    assert answer.lacking(("site-gpu-tools",)) == ("site-gpu-tools",)


# -- DKMS, from a repository that may give nothing else ----------------------------------------------------------------
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
def dkms_mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dkms")
    build_rpm_repository(folder / "www", folder / "gnupg", PACKAGES)
    return folder / "www"


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
def test_dkms_comes_from_there_and_nothing_else_can(dkms_mirror: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    shutil.copytree(dkms_mirror, tmp_path / "www" / case.folder)
    place = tmp_path / "www" / case.key
    shutil.copyfile(dkms_mirror / "key.asc", place)
    host = RpmHost(tmp_path / "root", name, case.program)
    try:
        with served(tmp_path / "www") as url:
            fingerprint = (dkms_mirror / "fingerprint").read_text()
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
    assert host.list_directory(manager(host).repository_directory) == ()
    assert fingerprint not in facts_of(host).packages.trusted_keys
    assert not host.exists("/etc/pki/rpm-gpg")
