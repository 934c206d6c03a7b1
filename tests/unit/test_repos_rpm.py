"""Which rpm repositories a host shall have, and what becomes of definitions that people had before; no machine."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov import repos
from gpuprov.core.changes import FileFact, RemoveFile, WriteFile
from gpuprov.engines.docker import DockerFacts
from gpuprov.facts.host import HostFacts, gather
from gpuprov.machine.distros import docker_repository, find_distribution
from gpuprov.machine.machine import OperatingSystem
from gpuprov.packages.dnf import DNF
from gpuprov.packages.interface import PackageFacts
from gpuprov.packages.keys import InstallRpmKey, armored, dearmored, fingerprints
from gpuprov.packages.rpm import InstallRpmPackages, RefreshRpmIndex, RpmManager
from gpuprov.packages.zypper import ZYPPER
from gpuprov.plan.context import PlanContext
from gpuprov.plan.preflight import preflight
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.spec import HostSpec, SiteRepository, parse_spec
from gpuprov.repos import RpmRepository, rpm_repositories
from tests.unit.fake_host import FakeHost
from tests.unit.test_packages_rpm import KEY

(FINGERPRINT,) = fingerprints(KEY)
KEY_PATH = "/etc/pki/rpm-gpg/RPM-GPG-KEY-gpuprov-site"
URI = "https://rpm.example.org/gpu"
DRIVER = parse_spec({"driver_version": "550.163.01"})
SITE = HostSpec(repositories=(SiteRepository("site", URI, f"{URI}/key.asc", FINGERPRINT),))
SYSTEMS = {
    "dnf": OperatingSystem("rocky", "9.5", "", ("rhel", "centos", "fedora"), "Rocky Linux 9.5"),
    "zypper": OperatingSystem("opensuse-leap", "15.6", "", ("suse", "opensuse"), "openSUSE Leap 15.6"),
}


@pytest.fixture(params=SYSTEMS)
def facts(request: pytest.FixtureRequest, debian: HostFacts) -> HostFacts:
    """A host of each package manager, with docker, and nothing of gpuprov's."""
    packages = PackageFacts(request.param, {"bash": "5.1-1.x86_64"})
    return replace(debian, os=SYSTEMS[request.param], packages=packages, files={})


def fact(content: str | bytes, mode: int = 0o644) -> FileFact:
    return FileFact(content.encode() if isinstance(content, str) else content, mode, 0, 0)


def rpm(facts: HostFacts) -> RpmManager:
    assert isinstance(facts.package_manager, RpmManager)
    return facts.package_manager


def settled(facts: HostFacts, spec: HostSpec = SITE) -> HostFacts:
    """The same host as `spec` wants it."""
    (one,) = rpm_repositories(rpm(facts), spec, facts.architecture)
    files = {one.key_path: fact(armored(KEY)), one.file_path: fact(str(one))}
    return replace(facts, files=files, packages=replace(facts.packages, trusted_keys=frozenset({FINGERPRINT})))


def test_a_repository_is_checked_twice_and_never_passed_over() -> None:
    one = RpmRepository("site", URI, f"{URI}/key.asc", FINGERPRINT, DNF)
    lines = ["[gpuprov-site]", "name=site (gpuprov)", f"baseurl={URI}", "enabled=1", "repo_gpgcheck=1", "gpgcheck=1"]
    lines += [f"gpgkey=file://{KEY_PATH}", "skip_if_unavailable=0"]
    assert str(one) == "".join(f"{line}\n" for line in lines)
    assert one.file_path == "/etc/yum.repos.d/gpuprov-site.repo"
    zypper = str(replace(one, manager=ZYPPER))
    assert {"gpgcheck=1", "repo_gpgcheck=1", "pkg_gpgcheck=1", "autorefresh=1"} <= set(zypper.splitlines())


def test_a_bare_host_gets_key_and_file_and_a_settled_one_nothing(facts: HostFacts) -> None:
    key, file = repos.plan(facts, SITE)
    assert key == InstallRpmKey(KEY_PATH, f"{URI}/key.asc", FINGERPRINT)
    assert FINGERPRINT in key.summary()
    assert isinstance(file, WriteFile) and file.path == f"{rpm(facts).repository_directory}/gpuprov-site.repo"
    assert repos.plan(settled(facts), SITE) == ()


@pytest.mark.parametrize("wrong", ["other", "binary", "mode", "nonsense", "two", "untrusted"])
def test_a_key_that_is_not_wholly_right_is_installed_again(facts: HostFacts, wrong: str) -> None:
    good = settled(facts)
    bad = {
        "other": fact(armored(KEY.replace(b"\x01\x02", b"\x02\x01"))), "binary": fact(dearmored(armored(KEY))),
        "mode": fact(armored(KEY), 0o600), "nonsense": fact("no key"), "two": fact(armored(KEY) + armored(KEY)),
        "untrusted": fact(armored(KEY)),
    }  # fmt: skip
    trusted = frozenset() if wrong == "untrusted" else good.packages.trusted_keys
    packages = replace(good.packages, trusted_keys=trusted)
    host = replace(good, files={**good.files, KEY_PATH: bad[wrong]}, packages=packages)
    assert [type(change) for change in repos.plan(host, SITE)] == [InstallRpmKey]


def test_what_is_no_longer_asked_for_goes_and_what_others_have_stays(facts: HostFacts) -> None:
    good = settled(facts)
    place = rpm(facts).repository_directory
    others = {
        f"{place}/epel.repo": fact("[epel]\nbaseurl=https://epel.example.org/$basearch\n"),
        "/etc/pki/rpm-gpg/RPM-GPG-KEY-Rocky-9": fact("theirs"),
    }
    changes = repos.plan(replace(good, files={**good.files, **others}), HostSpec())
    assert {change.path for change in changes if isinstance(change, RemoveFile)} == set(good.files)
    assert len(changes) == 2


DOUBLES = {
    "the same": (f"[a]\nbaseurl={URI}\n", True),
    "with a slash": (f"[a]\nname=x\nbaseurl = {URI}/\nenabled=1\n", True),
    "among several addresses": (f"[a]\nbaseurl=https://mirror.example.org/a\n  {URI}\n", True),
    "beside a disabled one": (f"[a]\nbaseurl={URI}\n[b]\nbaseurl=https://x.example.org\nenabled=0\n", True),
    "disabled": (f"[a]\nbaseurl={URI}\nenabled=0\n", False),
    "switched off": (f"[a]\nbaseurl={URI}\nenabled = off\n", False),
    "another": (f"[a]\nbaseurl={URI}-other\n", False),
    "in a comment": (f"# baseurl={URI}\n[a]\nmirrorlist=https://x.example.org\n", False),
    "not a .repo file's content": (f"baseurl={URI}\n", False),
}


@pytest.mark.parametrize("name", DOUBLES)
def test_second_definitions(facts: HostFacts, name: str) -> None:
    text, removed = DOUBLES[name]
    path = f"{rpm(facts).repository_directory}/old.repo"
    good = settled(facts)
    changes = repos.plan(replace(good, files={**good.files, path: fact(text)}), SITE)
    assert [change.summary() for change in changes] == [f"remove {path} (a second definition of {URI})"] * removed


def test_a_variable_for_the_architecture_hides_nothing(facts: HostFacts) -> None:
    spec = parse_spec({"toolkit": "nvidia"})
    path = f"{rpm(facts).repository_directory}/nvidia-container-toolkit.repo"
    stable, experimental = (
        f"[nvidia-container-toolkit{name}]\nbaseurl=https://nvidia.github.io/libnvidia-container/{folder}/rpm/$basearch\n"
        f"gpgcheck=0\nenabled={enabled}\n"
        for name, folder, enabled in (("", "stable", 1), ("-experimental", "experimental", 0))
    )
    changes = repos.plan(replace(facts, files={path: fact(stable + experimental)}), spec)
    assert [change.path for change in changes if isinstance(change, RemoveFile)] == [path]
    mixed = fact(f"{stable}[other]\nbaseurl=https://other.example.org\n")
    (problem,) = repos.problems(replace(facts, files={path: mixed}), spec)
    assert "section [nvidia-container-toolkit]" in problem.evidence


def test_nvidias_toolkit_comes_with_signed_metadata() -> None:
    (one,) = rpm_repositories(DNF, parse_spec({"toolkit": "nvidia"}), "aarch64")
    assert one.uri == "https://nvidia.github.io/libnvidia-container/stable/rpm/aarch64"
    assert (one.signed_metadata, one.signed_packages) == (True, False)


@pytest.mark.parametrize("manager", [DNF, ZYPPER])
def test_release_candidates_lie_beside_the_stable_releases(manager: RpmManager) -> None:
    found = rpm_repositories(manager, parse_spec({"toolkit": "nvidia", "toolkit_channel": "experimental"}), "x86_64")
    base = "https://nvidia.github.io/libnvidia-container"
    assert [one.uri for one in found] == [f"{base}/stable/rpm/x86_64", f"{base}/experimental/rpm/x86_64"]
    assert len({one.file_path for one in found}) == 2
    assert all("repo_gpgcheck=1" in str(one) for one in found)


def test_no_repository_is_without_any_signature(facts: HostFacts) -> None:
    rocky = find_distribution("rocky", "9")
    assert rocky is not None
    wanted = rpm_repositories(
        rpm(facts), replace(parse_spec({"toolkit": "nvidia"}), repositories=SITE.repositories), "x86_64",
        tuple(filter(None, [docker_repository(rocky, "x86_64")])),
    )  # fmt: skip
    assert len(wanted) == 3
    for one in wanted:
        assert one.signed_metadata or one.signed_packages
        assert re.search(r"^gpgkey=file:///etc/pki/rpm-gpg/RPM-GPG-KEY-gpuprov-", str(one), re.MULTILINE)


def test_a_plan_for_rpm_has_nothing_of_apts(facts: HostFacts) -> None:
    plan = make_plan(facts, replace(DRIVER, packages=("gcc",), repositories=SITE.repositories))
    assert plan.problems == ()
    changes = [item.change for item in plan.changes]
    assert any(isinstance(change, RefreshRpmIndex) for change in changes)
    (install,) = (change for change in changes if isinstance(change, InstallRpmPackages))
    assert install == InstallRpmPackages(rpm(facts), ("gcc",))
    assert "apt" not in "\n".join(change.summary() for change in changes)


def test_a_bare_machine_gets_the_headers_of_its_very_kernel(facts: HostFacts) -> None:
    release, headers = {
        "dnf": ("5.14.0-427.el9.x86_64", "kernel-devel=5.14.0-427.el9.x86_64"),
        "zypper": ("6.4.0-150600.23-default", "kernel-default-devel=6.4.0-150600.23"),
    }[facts.packages.manager]
    kernel = replace(facts.kernel, container="", takes_modules=True, release=release)
    plan = make_plan(replace(facts, kernel=kernel), DRIVER)
    (install,) = (item.change for item in plan.changes if isinstance(item.change, InstallRpmPackages))
    assert {headers, "gcc", "make"} <= set(install.names)


def test_where_the_next_kernel_would_be_without_a_driver_the_plan_says_so(facts: HostFacts) -> None:
    metal = replace(facts, kernel=replace(facts.kernel, container="", takes_modules=True))
    assert make_plan(metal, DRIVER).notes == ()
    without = make_plan(metal, replace(DRIVER, epel=False))
    assert ("EPEL has" in " ".join(without.notes)) is (facts.packages.manager != "zypper")
    assert "gpuprov-epel" not in str(without.changes)
    with_dkms = replace(metal, packages=replace(metal.packages, installed={"dkms": "3.0-1.noarch"}))
    assert make_plan(with_dkms, DRIVER).notes == ()
    assert make_plan(metal, replace(DRIVER, packages=("dkms",))).notes == ()


def test_where_docker_comes_from(facts: HostFacts) -> None:
    bare = replace(facts, docker=DockerFacts())
    own, dockers = make_plan(bare, DRIVER), make_plan(bare, replace(DRIVER, docker="docker-ce"))
    if facts.packages.manager == "dnf":
        assert "Rocky Linux 9 has no docker of its own" in str(own.problems[0])
        said = "\n".join(item.change.summary() for item in dockers.changes)
        names = "docker-ce, docker-ce-cli, containerd.io, docker-buildx-plugin, docker-compose-plugin"
        assert f"install {names}; enable docker.service" in said and "gpuprov-docker-ce.repo" in said
    else:
        assert "install docker" in "\n".join(item.change.summary() for item in own.changes)
        assert "Docker has no repository for" in str(dockers.problems[0])


def test_docker_from_its_own_repository_on_debian(debian: HostFacts) -> None:
    bare = replace(debian, docker=DockerFacts(), packages=PackageFacts("apt", {}))
    changes = [item.change for item in make_plan(bare, replace(DRIVER, docker="docker-ce")).changes]
    (source,) = (one.content for one in changes if isinstance(one, WriteFile) and "docker-ce" in one.path)
    assert b"URIs: https://download.docker.com/linux/debian\nSuites: bookworm\nComponents: stable\n" in source


def test_a_host_without_its_package_manager_is_refused(facts: HostFacts) -> None:
    (problem,) = preflight(PlanContext(replace(facts, packages=PackageFacts("", {})), DRIVER))
    assert f"package manager, {facts.packages.manager}, is missing" in problem.what


def test_the_way_to_purge_a_packaged_driver_is_told_in_the_managers_words(facts: HostFacts) -> None:
    (problem,) = preflight(PlanContext(replace(facts, driver_packaged="nvidia-driver"), DRIVER))
    assert f"{facts.packages.manager} remove '*nvidia*'" in problem.next_step


def test_a_derivative_is_warned_about_in_the_plan(facts: HostFacts) -> None:
    os = replace(facts.os, id="someone", like=(facts.os.id,), name="Someone's Linux")
    plan = make_plan(replace(facts, os=os), DRIVER)
    assert plan.problems == ()
    assert any("Someone's Linux is not in the table" in note for note in plan.notes)


def test_the_place_of_each_file_is_looked_at(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root")
    for path in (KEY_PATH, *(f"{folder}/x.repo" for folder in ("/etc/yum.repos.d", "/etc/zypp/repos.d"))):
        host.make_directory(path.rpartition("/")[0])
        host.write(path, b"here")
        assert gather(host).files[path].content == b"here"
