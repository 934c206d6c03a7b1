"""Where DKMS comes from on hosts whose distribution has none: repository, key, limits, refusals; also in bundles."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov.bundle.manifest import BundleFacts, BundlePackage, Manifest
from gpuprov.bundle_create.recipe import Collection, Wanted, make_recipe
from gpuprov.bundle_create.repository import RepositoryKey, collect_rpm
from gpuprov.core.changes import FileFact, WriteFile, tell_nobody
from gpuprov.driver.kernel import dkms_note, dkms_packages, dkms_source
from gpuprov.driver.source import DriverSource
from gpuprov.facts.host import HostFacts
from gpuprov.machine.machine import OperatingSystem
from gpuprov.packages.interface import PackageFacts
from gpuprov.packages.known_repositories import dkms_repository
from gpuprov.packages.rpm import InstallRpmPackages, RefreshRpmIndex
from gpuprov.packages.zypper import ZYPPER
from gpuprov.plan import software
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.plan.refusals import refusals
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.protocol.tables import PACKAGED
from gpuprov.repos import rpm_repositories
from tests.unit.scripted import Scripted
from tests.unit.test_distros import row

EPEL8 = "94E279EB8D8F25B21810ADF121EA45AB2F86D6A1"
EPEL10 = "7D8D15CBFC4E62688591FB2633D98517E37ED158"
EPEL9 = "FF8AD1344597106ECE813B918A3872BF3228467C"
BACKPORTS = "637B32FF3D83F07A7AE1C40A9C214D4065176565"
RUNFILE = parse_spec({"driver_version": "580.178.04"})
PACKAGES = HostSpec(driver="packages")


def host(debian: HostFacts, name: str = "rocky", version: str = "9.5", *installed: str, files: str = "") -> HostFacts:
    """A bare machine; `files` is the content of a .repo file of the host's own."""
    manager = row(name, version).package_manager
    folder = "/etc/yum.repos.d" if manager == "dnf" else "/etc/zypp/repos.d"
    releases = {"dnf": "5.14.0-427.el9.x86_64", "zypper": "6.4.0-150600.23-default"}
    return replace(
        debian,
        os=OperatingSystem(name, version, "", (), f"{name} {version}"),
        kernel=replace(debian.kernel, container="", takes_modules=True, release=releases[manager]),
        packages=PackageFacts(manager, dict.fromkeys(("bash", *installed), "1-1.x86_64")),
        files={f"{folder}/own.repo": FileFact(files.encode(), 0o644, 0, 0)} if files else {},
    )


def added_files(facts: HostFacts, spec: HostSpec) -> dict[str, bytes]:
    return {one.path: one.content for one in PlanContext(facts, spec).repository_changes if isinstance(one, WriteFile)}


@pytest.mark.parametrize(
    ("name", "version", "uri", "key", "fingerprint"),
    [
        ("rhel", "8.10", "epel/8/Everything/x86_64/", "epel/RPM-GPG-KEY-EPEL-8", EPEL8),
        ("rocky", "9.5", "epel/9/Everything/x86_64/", "epel/RPM-GPG-KEY-EPEL-9", EPEL9),
        ("ol", "9", "epel/9/Everything/x86_64/", "epel/RPM-GPG-KEY-EPEL-9", EPEL9),
        ("almalinux", "10.1", "epel/10/Everything/x86_64/", "epel/RPM-GPG-KEY-EPEL-10", EPEL10),
        ("sles", "15.6", ":/Backports:/SLE-15-SP6/standard/", "-SP6/standard/repodata/repomd.xml.key", BACKPORTS),
    ],
)
def test_each_release_has_its_repository_and_key(name: str, version: str, uri: str, key: str, fingerprint: str) -> None:
    found = dkms_repository(row(name, version), version, "x86_64", HostSpec(), PACKAGED)
    assert found is not None
    assert found.uri.startswith("https://") and found.uri.endswith(uri) and found.key_url.endswith(key)
    assert (found.key_fingerprint, found.only) == (fingerprint, ("dkms*",))


@pytest.mark.parametrize(("name", "version"), [("sles", "16.0"), ("fedora", "44"), ("debian", "12")])
def test_what_is_not_known_is_not_guessed(name: str, version: str) -> None:
    assert dkms_repository(row(name, version), version, "x86_64", HostSpec(), PACKAGED) is None


def test_a_site_says_where_and_whose_key() -> None:
    sles = row("sles", "16.0")
    own = HostSpec(epel_repository="http://mirror/backports/", epel_key_fingerprint="A" * 40)
    found = dkms_repository(sles, "16.0", "x86_64", own, PACKAGED)
    assert found is not None and found.key_fingerprint == "A" * 40
    assert found.uri == "http://mirror/backports/SLE-16-SP0/standard/"
    assert dkms_repository(sles, "16.0", "x86_64", replace(own, epel_key_fingerprint=""), PACKAGED) is None


@pytest.mark.parametrize("spec", [RUNFILE, PACKAGES])
def test_only_dkms_may_come_from_epel(debian: HostFacts, spec: HostSpec) -> None:
    facts = host(debian)
    text = added_files(facts, spec)["/etc/yum.repos.d/gpuprov-epel.repo"].decode()
    assert "includepkgs=dkms*\n" in text and "gpgcheck=1\n" in text and "enabled=1\n" in text
    (install,) = (one for one in PlanContext(facts, spec).package_changes if isinstance(one, InstallRpmPackages))
    assert "dkms" in install.names and install.options == ()


def test_package_hub_counts_for_dkms_alone(debian: HostFacts) -> None:
    facts = host(debian, "sles", "15.6")
    (found,) = rpm_repositories(ZYPPER, RUNFILE, "x86_64", software.extra_repositories(source_of(facts, RUNFILE)))
    assert "enabled=0\n" in str(found) and "priority=200\n" in str(found)
    changes = PlanContext(facts, RUNFILE).package_changes
    first, second = (one for one in changes if isinstance(one, InstallRpmPackages))
    assert "dkms" not in first.names and first.options == () and "gcc" in first.names
    assert (second.names, second.options) == (("dkms",), ("--plus-content", "gpuprov-packagehub"))
    assert [one.options for one in changes if isinstance(one, RefreshRpmIndex)] == [first.options, second.options]


OWN = {
    "[epel]\nmetalink=https://mirrors.fedoraproject.org/x\n": True,
    "[ol9_developer_EPEL]\nbaseurl=https://yum.oracle.com/x\nenabled=1\n": True,
    "[rhui-epel]\nbaseurl=x\n": True,
    "[epel]\nbaseurl=x\nenabled=0\n": False,
    "[epel]\nbaseurl=x\nenabled=off\n": False,
    "[epel-cisco-openh264]\nbaseurl=x\n": False,
    "[epel-source]\nbaseurl=x\n": False,
    "[epel-testing]\nbaseurl=x\n": False,
    "no sections": False,
}


@pytest.mark.parametrize("text", OWN)
def test_a_host_with_epel_gets_no_second_one(debian: HostFacts, text: str) -> None:
    facts = host(debian, files=text)
    assert (dkms_source(source_of(facts, RUNFILE)) is None) is OWN[text]
    # It is forbidden to add one, not to use one's own.
    assert dkms_packages(source_of(facts, RUNFILE)) == ("dkms",)
    assert (dkms_packages(source_of(facts, replace(RUNFILE, epel=False))) == ("dkms",)) is OWN[text]


@pytest.mark.parametrize(
    "path", ["/etc/yum.repos.d/gpuprov-epel.repo", "/etc/yum.repos.d/old/epel.repo", "/etc/a.repo"]
)
def test_a_file_that_dnf_does_not_read_or_that_is_ours_is_no_epel(debian: HostFacts, path: str) -> None:
    facts = replace(host(debian), files={path: FileFact(b"[epel]\nbaseurl=x\n", 0o644, 0, 0)})
    assert dkms_source(source_of(facts, RUNFILE)) == dkms_repository(
        row("rocky", "9.5"), "9.5", "x86_64", RUNFILE, PACKAGED
    )


@pytest.mark.parametrize("name", ["SUSE_Package_Hub_15_SP6_x86_64:SUSE-PackageHub-15-SP6-Pool", "openSUSE_Backports"])
def test_an_activated_package_hub_is_used(debian: HostFacts, name: str) -> None:
    facts = host(debian, "sles", "15.6", files=f"[{name}]\nbaseurl=x\nenabled=1\n")
    assert dkms_source(source_of(facts, RUNFILE)) is None and dkms_packages(source_of(facts, RUNFILE)) == ("dkms",)


def test_where_nothing_is_built_there_is_no_epel(debian: HostFacts) -> None:
    facts = host(debian)
    inside = replace(facts, kernel=replace(facts.kernel, container="lxc"))
    for spec in (RUNFILE, PACKAGES):
        assert dkms_source(source_of(inside, spec)) is None and dkms_packages(source_of(inside, spec)) == ()
    preinstalled = HostSpec(driver="preinstalled")
    assert dkms_source(source_of(facts, preinstalled)) is None
    # SUSE's packages of NVIDIA's bring their modules.
    assert dkms_source(source_of(host(debian, "sles", "15.6"), PACKAGES)) is None
    assert dkms_source(source_of(host(debian, "fedora", "44"), RUNFILE)) is None
    assert dkms_source(source_of(host(debian, "rocky", "9.5", "dkms"), RUNFILE)) is None
    assert dkms_source(source_of(facts, replace(RUNFILE, packages=("dkms",)))) is None


def test_a_repository_that_was_added_stays_with_what_it_gave(debian: HostFacts) -> None:
    facts = host(debian)
    added = {path: FileFact(content, 0o644, 0, 0) for path, content in added_files(facts, RUNFILE).items()}
    after = replace(facts, files=added, packages=replace(facts.packages, installed={"dkms": "3-1.noarch"}))
    assert added_files(after, RUNFILE) == {}
    kept = dkms_source(source_of(after, RUNFILE))
    assert kept is not None and kept == dkms_source(source_of(facts, RUNFILE))
    gone = [one.summary() for one in PlanContext(after, replace(RUNFILE, epel=False)).repository_changes]
    assert any("gpuprov-epel.repo" in one and "no longer asked for" in one for one in gone)


def dkms_problems(driver: DriverSource) -> list[Problem]:
    return [one for one in refusals(driver) if "DKMS" in one.what or "the key of" in one.what]


def test_epel_forbidden_is_a_refusal_where_dkms_is_needed(debian: HostFacts) -> None:
    facts, spec = host(debian), replace(PACKAGES, epel=False)
    (problem,) = dkms_problems(source_of(facts, spec))
    assert problem in make_plan(facts, spec).problems
    assert problem.what == "NVIDIA's packages for Rocky Linux 9 need DKMS, which is in EPEL, and gpuprov_epel is false"
    assert "gpuprov_epel: true" in problem.next_step and "gpuprov_driver: runfile" in problem.next_step
    assert dkms_problems(source_of(host(debian, "rocky", "9.5", "dkms"), spec)) == []
    assert dkms_problems(source_of(host(debian, files="[epel]\nbaseurl=x\n"), spec)) == []
    # The .run builds without it, and the plan says what that means.
    assert dkms_problems(source_of(facts, replace(RUNFILE, epel=False))) == []
    assert "EPEL has" in dkms_note(source_of(facts, replace(RUNFILE, epel=False)))
    assert "gpuprov_epel at true" in dkms_note(source_of(facts, replace(RUNFILE, epel=False)))
    assert dkms_note(source_of(facts, RUNFILE)) == dkms_note(source_of(facts, spec)) == ""
    assert dkms_note(source_of(host(debian, "fedora", "44"), RUNFILE)) == ""


def test_an_unknown_key_is_told_with_the_way_to_set_it(debian: HostFacts) -> None:
    facts = host(debian, "sles", "16.0")
    assert "or enable PackageHub, or set gpuprov_epel_repository" in dkms_note(source_of(facts, RUNFILE))
    assert "PackageHub has" in dkms_note(source_of(facts, RUNFILE)) and dkms_problems(source_of(facts, RUNFILE)) == []
    (problem,) = dkms_problems(source_of(facts, replace(RUNFILE, epel_repository="http://mirror")))
    assert "does not know the key of PackageHub" in problem.what
    assert "gpuprov_epel_key_fingerprint" in problem.next_step
    assert "SUSEConnect --product PackageHub/16.0/x86_64" in problem.next_step


def test_a_bundle_takes_dkms_along(tmp_path: Path) -> None:
    wanted = Wanted("rocky-9.5", "x86_64", kernels=("5.14.0-503.11.1.el9_5.x86_64",))
    recipe = make_recipe(wanted, (HostSpec(docker="preinstalled"),))
    (epel,) = (one for one in recipe.rpm_sources if one.name == "epel")
    assert "dkms" in recipe.packages and epel.only == ("dkms*",)
    to = Collection(Scripted(tmp_path), replace(recipe, rpm_sources=(replace(epel, keys=()),)), "/work", tell_nobody)
    with pytest.raises(GpuprovError, match="dnf downloaded nothing"):
        collect_rpm(to, RepositoryKey(to.system, "", b"", ""))
    assert "includepkgs=dkms*\n" in (tmp_path / "work/rpm/repos.d/epel.repo").read_text()
    without = make_recipe(wanted, (HostSpec(docker="preinstalled", epel=False),))
    assert "dkms" not in without.packages and all(one.name != "epel" for one in without.rpm_sources)
    no_kernel = make_recipe(replace(wanted, kernels=()), (HostSpec(docker="preinstalled"),))
    assert all(one.name != "epel" for one in no_kernel.rpm_sources)


@pytest.mark.parametrize("names", [("dkms",), ()])
def test_a_host_with_a_bundle_needs_what_the_bundle_has(debian: HostFacts, names: tuple[str, ...]) -> None:
    held = tuple(BundlePackage(name, "3-1", "noarch", f"packages/{name}.rpm") for name in names)
    manifest = Manifest("rocky", "9.5", "x86_64", "0", packages=held)
    facts = replace(host(debian), bundle=BundleFacts(manifest, frozenset()))
    assert dkms_packages(source_of(facts, RUNFILE)) == names
