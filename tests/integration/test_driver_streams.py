"""The driver from packages where dnf's module streams hold its branches, by the real dnf: chosen, changed, given back.

The repository is laid out as NVIDIA's for RHEL 9: one repository, a stream of the module nvidia-driver for each branch.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov import repos
from gpuprov.bundle_create.recipe import Wanted, make_recipe
from gpuprov.cdi.discover import DriverFacts
from gpuprov.core.changes import NextAction
from gpuprov.driver import cuda_repository
from gpuprov.driver.packaged import EnableStream
from gpuprov.facts.host import HostFacts, gather
from gpuprov.packages.dnf import DNF
from gpuprov.packages.keys import plan_bundle_keys
from gpuprov.packages.rpm import InstallRpmPackages, RefreshRpmIndex
from gpuprov.plan import with_bundle
from gpuprov.plan.context import source_of
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec
from tests.integration.opened_bundle import collected, opened
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import NEEDS
from tests.lab.rpm_repository import RpmPackage, add_streams, build_rpm_repository
from tests.runs import tell

pytestmark = [*NEEDS, pytest.mark.slow]
_VERSIONS = {"570-open": "570.172.08", "580-open": "580.65.06"}


@pytest.fixture
def host(tmp_path: Path) -> RpmHost:
    """A Rocky Linux 9 that has the repository in /opt."""
    streams = {stream: (RpmPackage("nvidia-open", version),) for stream, version in _VERSIONS.items()}
    return host_with_streams(tmp_path, "rocky-9.5", streams)


def host_with_streams(folder: Path, os_release: str, streams: Mapping[str, Sequence[RpmPackage]]) -> RpmHost:
    """Return a host with dnf that has in /opt a repository as NVIDIA's for RHEL 9, with these streams."""
    place, gnupg = folder / "cuda/rhel9/x86_64", folder / "gnupg"
    packages = {one.file_name: one for stream in streams.values() for one in stream}
    build_rpm_repository(place, gnupg, tuple(packages.values()))
    add_streams(place, gnupg, streams)
    shutil.copy(place / "key.asc", place / "D42D0685.pub")
    made = RpmHost(folder / "host", os_release, "dnf")
    shutil.move(folder / "cuda", made.path("/opt/cuda"))
    return made


def wanted(host: RpmHost, branch: str = "", place: str = "rhel9") -> HostSpec:
    fingerprint = (host.read_text(f"/opt/cuda/{place}/x86_64/fingerprint") or "").strip()
    spec = HostSpec(driver="packages", driver_version=branch, docker="preinstalled")
    # No inventory may name a file; here it spares a server.
    return replace(spec, cuda_repository="file:///opt/cuda", cuda_key_fingerprint=fingerprint)


def facts_of(host: RpmHost) -> HostFacts:
    """Return what a bare machine without a driver is like here."""
    found = gather(host)
    return replace(found, kernel=replace(found.kernel, container="", takes_modules=True), driver=DriverFacts())


def installed(host: RpmHost) -> str:
    return gather(host).packages.installed.get("nvidia-open", "")


def converge(host: RpmHost, branch: str) -> list[EnableStream]:
    """Bring repository, stream and package; return the changes of streams. A second plan has none."""
    spec = wanted(host, branch)
    facts = facts_of(host)
    assert cuda_repository.problems(facts, spec) == ()
    streams = [change for change in source_of(facts, spec).plan_preparation() if isinstance(change, EnableStream)]
    repositories = repos.plan(facts, spec, cuda_repository.repositories(source_of(facts, spec)))
    names = source_of(facts, spec).packages()
    for change in (*repositories, RefreshRpmIndex(DNF), *streams, InstallRpmPackages(DNF, names)):
        change.apply(host, tell)
    assert source_of(facts_of(host), spec).plan_preparation() == ()
    return streams


def test_the_branch_that_is_asked_for_is_installed_though_there_is_a_newer_one(host: RpmHost) -> None:
    (change,) = converge(host, "570")
    assert change.summary() == "enable stream nvidia-driver:570-open"
    assert installed(host).startswith("570.172.08-1")
    assert host.run(("dnf", "-y", "upgrade"), timeout=60).ok
    assert installed(host).startswith("570.172.08-1"), "an upgrade leaves the branch"


def test_a_bundle_needs_no_stream_and_brings_another_branch(host: RpmHost, tmp_path: Path) -> None:
    """The host reaches no repository: dnf could read no list of streams."""
    host.write("/etc/yum.repos.d/far.repo", b"[far]\nname=far\nbaseurl=http://127.0.0.1:9/far\ngpgcheck=0\n")
    for branch in ("570", "580"):
        spec, site = wanted(host, branch), tmp_path / branch / "site"
        package = RpmPackage("nvidia-open", _VERSIONS[f"{branch}-open"])
        source = f"file://{site} {site}/key.asc {build_rpm_repository(site, tmp_path / 'gnupg', (package,))}"
        asked = Wanted("rocky-9", "x86_64", packages=("nvidia-open",), sources=(source,))
        recipe = make_recipe(asked, (HostSpec(driver="preinstalled", docker="preinstalled"),))
        bundle = opened(collected(recipe, tmp_path / branch))
        facts = replace(facts_of(host), bundle=with_bundle.gather(host, bundle.manifest))
        driver = source_of(facts, spec)
        changes = (*driver.plan_preparation(), *driver.plan_other_version())
        if branch == "570":
            keys = plan_bundle_keys(facts.bundle.vendor_keys if facts.bundle else (), facts.packages.trusted_keys)
            changes += (*keys, InstallRpmPackages(DNF, ("nvidia-open",), options=DNF.bundle_options))
        assert not [one for one in changes if isinstance(one, EnableStream)]
        with with_bundle.unpacked(host, bundle, changes):
            for one in changes:
                one.apply(host, tell)
        assert installed(host).startswith(_VERSIONS[f"{branch}-open"])


def test_a_stream_is_given_back(host: RpmHost) -> None:
    before = host.read_text(cuda_repository.STREAM_FILE)
    change = EnableStream("570-open")
    facts = facts_of(host)
    spec = wanted(host, "570")
    for one in repos.plan(facts, spec, cuda_repository.repositories(source_of(facts, spec))):
        one.apply(host, tell)
    seen = change.capture(host)
    change.apply(host, tell)
    assert "stream=570-open" in (host.read_text(cuda_repository.STREAM_FILE) or "")
    EnableStream.undo(host, seen, {})
    EnableStream.undo(host, seen, {})
    listed = host.run(("dnf", "-q", "module", "list", "--enabled"), timeout=60)
    assert "nvidia-driver" not in listed.stdout
    assert before is None


@pytest.mark.parametrize(("first", "then"), [("570", "580"), ("580", "570")])
def test_another_branch_takes_the_place_of_the_first_be_it_older(host: RpmHost, first: str, then: str) -> None:
    converge(host, first)
    assert source_of(facts_of(host), wanted(host, first)).plan_other_version() == ()
    facts, spec = facts_of(host), wanted(host, then)
    stream, refresh, change = (*source_of(facts, spec).plan_preparation(), *source_of(facts, spec).plan_other_version())
    assert stream.summary() == f"enable stream nvidia-driver:{then}-open instead of {first}-open"
    seen = stream.capture(host)
    stream.apply(host, tell)
    refresh.apply(host, tell)
    outcome = change.apply(host, tell) or {}
    assert outcome["added"] == []
    assert [name.startswith(f"nvidia-open-{first}.") for name in outcome["replaced"]] == [True]
    assert change.next_action(outcome) is NextAction.PLAN_AGAIN
    assert installed(host).startswith(f"{_VERSIONS[f'{then}-open']}-1")
    assert (
        source_of(facts_of(host), spec).plan_preparation() == source_of(facts_of(host), spec).plan_other_version() == ()
    )
    type(stream).undo(host, seen, {})
    assert source_of(facts_of(host), wanted(host, first)).plan_preparation() == ()


def test_a_branch_that_the_repository_does_not_have_is_named(host: RpmHost) -> None:
    converge(host, "570")
    _, change = source_of(facts_of(host), wanted(host, "590")).plan_other_version()
    with pytest.raises(GpuprovError, match=r"are of 570\.172\.08-1.*590 is asked for"):
        change.apply(host, tell)
