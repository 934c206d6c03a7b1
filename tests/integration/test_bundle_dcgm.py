"""DCGM in a bundle: collected by the real apt and dnf from NVIDIA's layout, installed from it alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov import repos
from gpuprov.bundle.open import OpenBundle
from gpuprov.bundle_create.recipe import RunFile, Wanted, make_recipe
from gpuprov.core.system import System
from gpuprov.driver import cuda_repository, dcgm
from gpuprov.facts.host import HostFacts, gather
from gpuprov.plan import software, with_bundle
from gpuprov.plan.context import source_of
from gpuprov.protocol.spec import HostSpec
from tests.gpg import gpg_home
from tests.integration.apt_chroot import chroot_host
from tests.integration.opened_bundle import collected, opened
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import tell
from tests.integration.test_dcgm import build_dcgm
from tests.lab.repository import build_repository, sign
from tests.lab.rpm_repository import RpmPackage, build_rpm_repository

VERSION = "550.163.01"
_HAS_DNF = os.geteuid() == 0 and all(map(shutil.which, ("dnf", "rpmbuild", "createrepo_c")))
pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture
def gnupg(tmp_path: Path) -> Iterator[Path]:
    with gpg_home(tmp_path / "gnupg") as home:
        yield home


def specification(folder: Path, fingerprint: str) -> HostSpec:
    repository = {"cuda_repository": f"file://{folder}", "cuda_key_fingerprint": fingerprint}
    return replace(HostSpec(driver_version=VERSION, docker="preinstalled", dcgm=True), **repository)  # type: ignore[arg-type]


def bundle_of(distro: str, source: str, spec: HostSpec, folder: Path) -> OpenBundle:
    """Return a bundle with DCGM, and without the driver."""
    recipe = make_recipe(Wanted(distro, "x86_64", sources=(source,)), (spec,))
    return opened(collected(replace(recipe, driver=RunFile()), folder))


def install(host: System, facts: HostFacts, spec: HostSpec, bundle: OpenBundle | None) -> set[str]:
    """Install DCGM's packages; return those that are there."""
    source = source_of(facts, spec)
    changes = software.plan(source, dcgm.wanted_packages(source))
    with with_bundle.unpacked(host, bundle, changes):
        for change in changes:
            change.apply(host, tell)
    return {name for name in gather(host).packages.installed if name.startswith("datacenter-gpu-manager")}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")
@pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="needs mmdebstrap")
def test_by_apt(tmp_path: Path, gnupg: Path) -> None:
    folder = tmp_path / "cuda/debian12/x86_64"
    fingerprint = build_repository(folder, gnupg)
    build_dcgm(folder)
    sign(folder, gnupg)
    shutil.copy(folder / "key.asc", folder / "3bf863cc.pub")
    spec = specification(tmp_path / "cuda", fingerprint)
    bundle = bundle_of("debian-12", f"deb [signed-by={folder}/key.asc] file:{folder} ./", spec, tmp_path)
    wanted = {*dcgm.packages(VERSION, spec)}
    assert {one.name for one in bundle.manifest.packages} == wanted
    shutil.rmtree(folder)
    (tmp_path / "host").mkdir()
    with chroot_host("bookworm", tmp_path / "host") as host:
        facts = replace(gather(host), bundle=with_bundle.gather(host, bundle.manifest))
        assert install(host, facts, spec, bundle) == wanted


@pytest.mark.skipif(not _HAS_DNF, reason="needs dnf, rpmbuild and createrepo_c")
def test_by_dnf_from_a_bundle_and_from_the_repository(tmp_path: Path, gnupg: Path) -> None:
    folder = tmp_path / "cuda/rhel9/x86_64"
    wanted = {*dcgm.packages(VERSION, HostSpec(dcgm=True))}
    fingerprint = build_rpm_repository(folder, gnupg, tuple(RpmPackage(name, "4.7.0") for name in sorted(wanted)))
    shutil.copy(folder / "key.asc", folder / "D42D0685.pub")
    spec = specification(tmp_path / "cuda", fingerprint)
    build_rpm_repository(tmp_path / "base", gnupg, ())
    bundle = bundle_of("rocky-9", f"file://{tmp_path}/base {folder}/key.asc {fingerprint}", spec, tmp_path)
    connected, host = (RpmHost(tmp_path / name, "rocky-9.5", "dnf") for name in ("connected", "host"))
    shutil.move(tmp_path / "cuda", connected.path("/opt/cuda"))
    facts = replace(gather(host), bundle=with_bundle.gather(host, bundle.manifest))
    assert install(host, facts, spec, bundle) == wanted

    spec, facts = specification(Path("/opt/cuda"), fingerprint), gather(connected)
    for change in repos.plan(facts, spec, cuda_repository.repositories(source_of(facts, spec))):
        change.apply(connected, tell)
    assert install(connected, facts, spec, None) == wanted
