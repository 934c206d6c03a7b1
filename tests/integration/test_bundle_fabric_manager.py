"""The fabric manager in a bundle: collected by the real apt and dnf from NVIDIA's layout, installed from it alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov import repos
from gpuprov.bundle.open import OpenBundle
from gpuprov.bundle_create.recipe import RunFile, Wanted, make_recipe
from gpuprov.core.system import System
from gpuprov.driver import cuda_repository, fabric_manager
from gpuprov.driver.fabric_manager import RunFabricManager
from gpuprov.facts.gpus import FabricFacts, parse_version
from gpuprov.facts.host import HostFacts, gather
from gpuprov.plan import with_bundle
from gpuprov.plan.context import source_of
from gpuprov.protocol.spec import HostSpec
from tests.integration.apt_chroot import chroot_host
from tests.integration.opened_bundle import collected, opened
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import tell
from tests.lab.repository import build_package, build_repository, sign
from tests.lab.rpm_repository import RpmPackage, add_streams, build_rpm_repository

VERSION, NEWER = "550.163.01", "550.163.02"
SWITCHES = FabricFacts(("0000:c1:00.0",))
_HAS_DNF = os.geteuid() == 0 and all(map(shutil.which, ("dnf", "rpmbuild", "createrepo_c")))
_CONTROL = """\
Package: nvidia-fabricmanager-550
Version: {version}-1
Architecture: amd64
Maintainer: The lab <lab@example.org>
Description: as NVIDIA names it
"""
_PROGRAM = "#!/bin/sh\necho 'Fabric Manager version is : {version}'\n"

pytestmark = pytest.mark.slow


@pytest.fixture
def gnupg(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "gnupg"
    subprocess.run(("gpgconf", "--homedir", str(tmp_path / "gnupg"), "--kill", "all"), check=True)


def with_fabric_manager(distro: str, source: str, spec: HostSpec, folder: Path) -> OpenBundle:
    """Return a bundle with the fabric manager, and without the driver."""
    recipe = make_recipe(Wanted(distro, "x86_64", sources=(source,), fabric_manager=True), (spec,))
    return opened(collected(replace(recipe, driver=RunFile()), folder))


def facts_of(host: System, bundle: OpenBundle) -> HostFacts:
    """Return what a machine with NVSwitches is like here."""
    found = gather(host)
    kernel = replace(found.kernel, container="")
    return replace(found, kernel=kernel, fabric=SWITCHES, bundle=with_bundle.gather(host, bundle.manifest))


def specification(folder: Path, fingerprint: str) -> HostSpec:
    repository = {"cuda_repository": f"file://{folder}", "cuda_key_fingerprint": fingerprint}
    return replace(HostSpec(driver_version=VERSION, docker="preinstalled"), **repository)  # type: ignore[arg-type]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")
@pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="needs mmdebstrap")
def test_by_apt_in_the_drivers_version_though_there_is_a_newer_one(tmp_path: Path, gnupg: Path) -> None:
    folder = tmp_path / "cuda/debian12/x86_64"
    fingerprint = build_repository(folder, gnupg)
    for version in (VERSION, NEWER):
        build_package(
            folder, _CONTROL.format(version=version), {"usr/bin/nv-fabricmanager": _PROGRAM.format(version=version)}
        )
    sign(folder, gnupg)
    shutil.copy(folder / "key.asc", folder / "3bf863cc.pub")
    spec = specification(tmp_path / "cuda", fingerprint)
    bundle = with_fabric_manager("debian-12", f"deb [signed-by={folder}/key.asc] file:{folder} ./", spec, tmp_path)
    assert [(one.name, one.version) for one in bundle.manifest.packages] == [
        ("nvidia-fabricmanager-550", f"{VERSION}-1")
    ]
    shutil.rmtree(folder)
    (tmp_path / "host").mkdir()
    with chroot_host("bookworm", tmp_path / "host") as host:
        changes = fabric_manager.plan(source_of(facts_of(host, bundle), spec))
        with with_bundle.unpacked(host, bundle, changes):
            # The last one starts it, and no systemd runs here.
            for change in changes[:-1]:
                change.apply(host, tell)
        assert changes[-1] == RunFabricManager(VERSION)
        assert parse_version(host.run(("nv-fabricmanager", "--version")).stdout) == VERSION
        assert not host.exists("/var/cache/gpuprov/bundle")


@pytest.mark.skipif(not _HAS_DNF, reason="needs dnf, rpmbuild and createrepo_c")
@pytest.mark.root
def test_by_dnf_out_of_a_stream_that_nobody_enabled(tmp_path: Path, gnupg: Path) -> None:
    """From a bundle, and on a host that has the repository."""
    folder = tmp_path / "cuda/rhel9/x86_64"
    packages = tuple(RpmPackage("nvidia-fabric-manager", version) for version in (VERSION, NEWER))
    fingerprint = build_rpm_repository(folder, gnupg, packages)
    add_streams(folder, gnupg, {"550-dkms": packages})
    shutil.copy(folder / "key.asc", folder / "D42D0685.pub")
    spec = specification(tmp_path / "cuda", fingerprint)
    build_rpm_repository(tmp_path / "base", gnupg, ())
    bundle = with_fabric_manager("rocky-9", f"file://{tmp_path}/base {folder}/key.asc {fingerprint}", spec, tmp_path)
    connected, host = (RpmHost(tmp_path / name, "rocky-9.5", "dnf") for name in ("connected", "host"))
    shutil.move(tmp_path / "cuda", connected.path("/opt/cuda"))

    changes = fabric_manager.plan(source_of(facts_of(host, bundle), spec))
    with with_bundle.unpacked(host, bundle, changes):
        for change in changes[:-1]:
            change.apply(host, tell)
    # The maker's key stays, the bundle's was for this run.
    assert gather(host).packages.trusted_keys == {fingerprint}

    spec = specification(Path("/opt/cuda"), fingerprint)
    facts = replace(facts_of(connected, bundle), bundle=None)
    repositories = repos.plan(facts, spec, cuda_repository.repositories(source_of(facts, spec)))
    for change in (*repositories, *fabric_manager.plan(source_of(facts, spec))[:-1]):
        change.apply(connected, tell)
    for one in (host, connected):
        assert gather(one).packages.installed["nvidia-fabric-manager"].startswith(f"{VERSION}-1")
