"""Fabric manager, IMEX and DCGM in a bundle: by the real apt and dnf from NVIDIA's layout, installed from it alone."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov import repos
from gpuprov.bundle.open import OpenBundle
from gpuprov.bundle_create.recipe import RunFile, Wanted, make_recipe
from gpuprov.core.system import System
from gpuprov.driver import cuda_repository, dcgm, fabric_manager, imex
from gpuprov.driver.fabric_manager import RunFabricManager
from gpuprov.driver.imex import StopImex
from gpuprov.facts.gpus import FabricFacts, parse_version
from gpuprov.facts.host import HostFacts, gather
from gpuprov.plan import software, with_bundle
from gpuprov.plan.context import source_of
from gpuprov.protocol.spec import HostSpec
from tests.gpg import gpg_home
from tests.integration.apt_chroot import chroot_host
from tests.integration.opened_bundle import collected, opened
from tests.integration.rpm_host import RpmHost
from tests.integration.test_dcgm import build_dcgm
from tests.lab.repository import build_package, build_repository, sign
from tests.lab.rpm_repository import RpmPackage, add_streams, build_rpm_repository
from tests.runs import tell

VERSION, NEWER = "550.163.01", "550.163.02"
NAMES = ("nvidia-fabric-manager", "nvidia-imex-550")
SWITCHES = FabricFacts(("0000:c1:00.0",))
_CONTROL = """\
Package: {name}
Version: {version}-1
Architecture: amd64
Maintainer: The lab <lab@example.org>
Description: as NVIDIA names it
"""
_PROGRAM = "#!/bin/sh\necho 'Fabric Manager version is : {version}'\n"

pytestmark = [pytest.mark.slow, pytest.mark.root]
needs_apt = pytest.mark.needs("mmdebstrap")
needs_dnf = pytest.mark.needs("dnf", "rpmbuild", "createrepo_c")


@pytest.fixture
def gnupg(tmp_path: Path) -> Iterator[Path]:
    with gpg_home(tmp_path / "gnupg") as home:
        yield home


def bundle_of(distro: str, source: str, spec: HostSpec, folder: Path, *, fabric: bool = False) -> OpenBundle:
    """Return a bundle without the driver."""
    recipe = make_recipe(Wanted(distro, "x86_64", sources=(source,), fabric_manager=fabric), (spec,))
    return opened(collected(replace(recipe, driver=RunFile()), folder))


def facts_of(host: System, bundle: OpenBundle) -> HostFacts:
    """Return what a machine with NVSwitches is like here."""
    found = gather(host)
    kernel = replace(found.kernel, container="")
    return replace(found, kernel=kernel, fabric=SWITCHES, bundle=with_bundle.gather(host, bundle.manifest))


def specification(folder: Path, fingerprint: str, *, dcgm: bool = False) -> HostSpec:
    """With the fabric manager also IMEX, for a host without a domain of its own."""
    repository = {"cuda_repository": f"file://{folder}", "cuda_key_fingerprint": fingerprint}
    repository["imex"] = "off" if dcgm else "dra"
    return replace(HostSpec(driver_version=VERSION, docker="preinstalled", dcgm=dcgm), **repository)  # type: ignore[arg-type]


@needs_apt
def test_by_apt_in_the_drivers_version_though_there_is_a_newer_one(tmp_path: Path, gnupg: Path) -> None:
    folder = tmp_path / "cuda/debian12/x86_64"
    fingerprint = build_repository(folder, gnupg)
    for version in (VERSION, NEWER):
        for name, program in (("nvidia-fabricmanager-550", "nv-fabricmanager"), ("nvidia-imex-550", "nvidia-imex")):
            files = {f"usr/bin/{program}": _PROGRAM.format(version=version)}
            build_package(folder, _CONTROL.format(name=name, version=version), files)
    sign(folder, gnupg)
    shutil.copy(folder / "key.asc", folder / "3bf863cc.pub")
    spec = specification(tmp_path / "cuda", fingerprint)
    bundle = bundle_of("debian-12", f"deb [signed-by={folder}/key.asc] file:{folder} ./", spec, tmp_path, fabric=True)
    assert [(one.name, one.version) for one in bundle.manifest.packages] == [
        (name, f"{VERSION}-1") for name in ("nvidia-fabricmanager-550", "nvidia-imex-550")
    ]
    shutil.rmtree(folder)
    (tmp_path / "host").mkdir()
    with chroot_host("bookworm", tmp_path / "host") as host:
        source = source_of(facts_of(host, bundle), spec)
        changes, of_imex = fabric_manager.plan(source), imex.plan(source)
        with with_bundle.unpacked(host, bundle, changes):
            # The last one starts or stops it, and no systemd runs here.
            for change in (*changes[:-1], *of_imex[:-1]):
                change.apply(host, tell)
        assert (changes[-1], type(of_imex[-1])) == (RunFabricManager(VERSION), StopImex)
        assert gather(host).packages.installed["nvidia-imex-550"] == f"{VERSION}-1"
        assert parse_version(host.run(("nv-fabricmanager", "--version")).stdout) == VERSION
        assert not host.exists("/var/cache/gpuprov/bundle")


@needs_dnf
def test_by_dnf_out_of_a_stream_that_nobody_enabled(tmp_path: Path, gnupg: Path) -> None:
    """From a bundle, and on a host that has the repository."""
    folder = tmp_path / "cuda/rhel9/x86_64"
    packages = tuple(RpmPackage(name, version) for name in NAMES for version in (VERSION, NEWER))
    fingerprint = build_rpm_repository(folder, gnupg, packages)
    add_streams(folder, gnupg, {"550-dkms": packages})
    shutil.copy(folder / "key.asc", folder / "D42D0685.pub")
    spec = specification(tmp_path / "cuda", fingerprint)
    build_rpm_repository(tmp_path / "base", gnupg, ())
    bundle = bundle_of("rocky-9", f"file://{tmp_path}/base {folder}/key.asc {fingerprint}", spec, tmp_path, fabric=True)
    connected, host = (RpmHost(tmp_path / name, "rocky-9.5", "dnf") for name in ("connected", "host"))
    shutil.move(tmp_path / "cuda", connected.path("/opt/cuda"))

    source = source_of(facts_of(host, bundle), spec)
    changes = (*fabric_manager.plan(source)[:-1], *imex.plan(source)[:-1])
    with with_bundle.unpacked(host, bundle, changes):
        for change in changes:
            change.apply(host, tell)
    # The maker's key stays, the bundle's was for this run.
    assert gather(host).packages.trusted_keys == {fingerprint}

    spec = specification(Path("/opt/cuda"), fingerprint)
    facts = replace(facts_of(connected, bundle), bundle=None)
    repositories = repos.plan(facts, spec, cuda_repository.repositories(source_of(facts, spec)))
    source = source_of(facts, spec)
    for change in (*repositories, *fabric_manager.plan(source)[:-1], *imex.plan(source)[:-1]):
        change.apply(connected, tell)
    for one in (host, connected):
        assert all(gather(one).packages.installed[name].startswith(f"{VERSION}-1") for name in NAMES)


# -- DCGM --------------------------------------------------------------------------------------------------------------
def install_dcgm(host: System, facts: HostFacts, spec: HostSpec, bundle: OpenBundle | None) -> set[str]:
    """Install DCGM's packages; return those that are there."""
    source = source_of(facts, spec)
    changes = software.plan(source, dcgm.wanted_packages(source))
    with with_bundle.unpacked(host, bundle, changes):
        for change in changes:
            change.apply(host, tell)
    return {name for name in gather(host).packages.installed if name.startswith("datacenter-gpu-manager")}


@needs_apt
def test_dcgm_by_apt(tmp_path: Path, gnupg: Path) -> None:
    folder = tmp_path / "cuda/debian12/x86_64"
    fingerprint = build_repository(folder, gnupg)
    build_dcgm(folder)
    sign(folder, gnupg)
    shutil.copy(folder / "key.asc", folder / "3bf863cc.pub")
    spec = specification(tmp_path / "cuda", fingerprint, dcgm=True)
    bundle = bundle_of("debian-12", f"deb [signed-by={folder}/key.asc] file:{folder} ./", spec, tmp_path)
    wanted = {*dcgm.packages(VERSION, spec)}
    assert {one.name for one in bundle.manifest.packages} == wanted
    shutil.rmtree(folder)
    (tmp_path / "host").mkdir()
    with chroot_host("bookworm", tmp_path / "host") as host:
        facts = replace(gather(host), bundle=with_bundle.gather(host, bundle.manifest))
        assert install_dcgm(host, facts, spec, bundle) == wanted


@needs_dnf
def test_dcgm_by_dnf_from_a_bundle_and_from_the_repository(tmp_path: Path, gnupg: Path) -> None:
    folder = tmp_path / "cuda/rhel9/x86_64"
    wanted = {*dcgm.packages(VERSION, HostSpec(dcgm=True))}
    fingerprint = build_rpm_repository(folder, gnupg, tuple(RpmPackage(name, "4.7.0") for name in sorted(wanted)))
    shutil.copy(folder / "key.asc", folder / "D42D0685.pub")
    spec = specification(tmp_path / "cuda", fingerprint, dcgm=True)
    build_rpm_repository(tmp_path / "base", gnupg, ())
    bundle = bundle_of("rocky-9", f"file://{tmp_path}/base {folder}/key.asc {fingerprint}", spec, tmp_path)
    connected, host = (RpmHost(tmp_path / name, "rocky-9.5", "dnf") for name in ("connected", "host"))
    shutil.move(tmp_path / "cuda", connected.path("/opt/cuda"))
    facts = replace(gather(host), bundle=with_bundle.gather(host, bundle.manifest))
    assert install_dcgm(host, facts, spec, bundle) == wanted

    spec, facts = specification(Path("/opt/cuda"), fingerprint, dcgm=True), gather(connected)
    for change in repos.plan(facts, spec, cuda_repository.repositories(source_of(facts, spec))):
        change.apply(connected, tell)
    assert install_dcgm(connected, facts, spec, None) == wanted
