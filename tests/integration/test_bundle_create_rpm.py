"""A bundle of rpm packages made by the real dnf, used by the real dnf and zypper; what is refused on the way."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpuprov.bundle.open import OpenBundle
from gpuprov.bundle_create.recipe import Recipe, RpmSource
from gpuprov.cli.main import cli
from gpuprov.facts.host import HostFacts, gather
from gpuprov.packages.keys import gather_keys
from gpuprov.plan import with_bundle
from gpuprov.plan.context import PlanContext
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec
from tests.integration.opened_bundle import collected, opened
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import HOSTS, NEEDS, Repository, build
from tests.lab.rpm_repository import RpmPackage
from tests.loopback import free_port
from tests.runs import tell

pytestmark = [*NEEDS, pytest.mark.slow]
UNSIGNED = RpmPackage("unsigned-tools")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository: its packages are signed, but for one, and its metadata is."""
    folder = build(tmp_path_factory.mktemp("rpm"))
    repository(folder).add(UNSIGNED, signed=False)
    return folder


def repository(folder: Path) -> Repository:
    return Repository(folder / "www", folder / "gnupg", f"file://{folder}/www")


def source(folder: Path, fingerprint: str = "", *, signed_packages: bool = False) -> RpmSource:
    site = repository(folder)
    key = (f"{site.url}/key.asc", fingerprint or site.fingerprint)
    return RpmSource("site", site.url, (key,), True, signed_packages)


def recipe(sources: tuple[RpmSource, ...], *packages: str) -> Recipe:
    return Recipe("rocky", "9", "x86_64", packages, (), (), rpm_sources=sources)


def facts_of(host: RpmHost, bundle: OpenBundle) -> HostFacts:
    """Return what the host is; docker is there already."""
    found = gather(host)
    return replace(
        found, docker=replace(found.docker, installed=True), bundle=with_bundle.gather(host, bundle.manifest)
    )


@pytest.mark.parametrize("os_release", ["rocky-9.5", "opensuse-tumbleweed"])
def test_requested_packages_are_included_and_installable(template: Path, tmp_path: Path, os_release: str) -> None:
    names = ("site-gpu-tools", "unsigned-tools")
    made = collected(recipe((source(template),), *names), tmp_path)
    assert [one.name for one in made.manifest.packages] == ["site-gpu-library", *names]
    assert not (tmp_path / "work/gnupg").exists(), "the secret half of the key is to be forgotten"

    host = RpmHost(tmp_path / "root", os_release, HOSTS[os_release])
    system = gather(host).os
    bundle = opened(replace(made, manifest=replace(made.manifest, distribution=system.id, version=system.version)))
    spec = HostSpec(packages=names, docker="preinstalled", driver="preinstalled")
    changes = PlanContext(facts_of(host, bundle), spec).package_changes
    with with_bundle.unpacked(host, bundle, changes):
        assert bundle.manifest.repository_key in gather_keys(host)
        for change in changes:
            change.apply(host, tell)
    assert {"site-gpu-tools", "site-gpu-library", "unsigned-tools"} <= set(gather(host).packages.installed)
    assert bundle.manifest.repository_key not in gather_keys(host)
    assert not host.exists("/var/cache/gpuprov/bundle")
    assert PlanContext(facts_of(host, bundle), spec).package_changes == ()


def tamper(folder: Path) -> None:
    path = folder / "repository/site-gpu-library-1.0-1.noarch.rpm"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def strip_the_signature(folder: Path) -> None:
    (folder / "repository/repodata/repomd.xml.asc").unlink()


@pytest.mark.parametrize(
    ("os_release", "damage"), [("rocky-9.5", strip_the_signature), ("opensuse-tumbleweed", tamper)]
)
def test_manager_finds_damage(template: Path, tmp_path: Path, os_release: str, damage: Callable[[Path], None]) -> None:
    made = collected(recipe((source(template),), "site-gpu-tools"), tmp_path)
    host = RpmHost(tmp_path / "root", os_release, HOSTS[os_release])
    system = gather(host).os
    bundle = opened(replace(made, manifest=replace(made.manifest, distribution=system.id, version=system.version)))
    spec = HostSpec(packages=("site-gpu-tools",), docker="preinstalled", driver="preinstalled")
    changes = PlanContext(facts_of(host, bundle), spec).package_changes
    with pytest.raises(GpuprovError), with_bundle.unpacked(host, bundle, changes):
        damage(host.path("/var/cache/gpuprov/bundle"))
        for change in changes:
            change.apply(host, tell)
    assert "site-gpu-tools" not in gather(host).packages.installed
    assert bundle.manifest.repository_key not in gather_keys(host)


@pytest.mark.parametrize(
    ("change", "package", "says"),
    [
        ({"signed_packages": True}, "unsigned-tools", "is not signed with a key"),
        ({}, "no-such-package", "no repository has such a package"),
        ({"fingerprint": "A" * 40}, "site-gpu-tools", "not the one that is pinned"),
    ],
)
def test_bad_source_is_refused(template: Path, tmp_path: Path, change: dict[str, Any], package: str, says: str) -> None:
    with pytest.raises(GpuprovError, match=says):
        collected(recipe((source(template, **change),), package), tmp_path)


def test_the_machine_that_makes_it_is_left_as_it_was(template: Path, tmp_path: Path) -> None:
    before = subprocess.run(("rpm", "-qa"), check=True, capture_output=True).stdout
    assert collected(recipe((source(template),), "site-gpu-tools"), tmp_path).manifest.packages
    assert subprocess.run(("rpm", "-qa"), check=True, capture_output=True).stdout == before


def test_no_password_of_a_source_is_in_the_error(template: Path, tmp_path: Path) -> None:
    """dnf prints the URL as it is; the log of a CI job is read by others."""
    site = repository(template)
    line = f"http://robot:opensesame@127.0.0.1:{free_port()}/rocky {site.url}/key.asc {site.fingerprint}"
    words = ("--distro", "rocky-9", "--source", line, "-e", "gpuprov_docker=none", "--package", "tool")
    done = CliRunner().invoke(cli, ["bundle", "create", *words, "-o", str(tmp_path / "b.tar")])
    assert isinstance(done.exception, GpuprovError) and "//robot:***@127.0.0.1" in str(done.exception)
    assert "opensesame" not in f"{done.exception}{done.output}"
