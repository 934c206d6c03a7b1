"""A driver whose packages came from bundles: a rollback restores the former ones without any repository."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov.bundle.open import OpenBundle
from gpuprov.bundle_create.recipe import RunFile, Wanted, make_recipe
from gpuprov.core.journal import read_runs
from gpuprov.core.places import KEPT_PACKAGES
from gpuprov.core.retention import prune
from gpuprov.core.system import System
from gpuprov.facts.host import HostFacts, gather
from gpuprov.packages.managers import manager_of
from gpuprov.plan import with_bundle
from gpuprov.plan.context import PlanContext
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.spec import HostSpec
from tests.gpg import gpg_home
from tests.integration.apt_chroot import chroot_host, site_server
from tests.integration.opened_bundle import collected, opened
from tests.integration.rpm_host import RpmHost
from tests.lab.rpm_repository import RpmPackage, build_rpm_repository
from tests.runs import as_a_run, undo_last

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.needs("mmdebstrap", "dnf", "zypper", "rpmbuild", "createrepo_c"),
]
# Of different length: apt takes its cache for fresh if dpkg's status has the same size and the same second.
_OLD, _NEW = "550.163.01", "580.65.06"
_NAMES = ("nvidia-driver-cuda", "libnvidia-ml")
_DISTROS = {"debian-12": "", "rocky-9.5": "dnf", "opensuse-tumbleweed": "zypper"}


def spec(version: str) -> HostSpec:
    names = tuple(f"{name}={version}-1" for name in _NAMES)
    return HostSpec(packages=names, driver="preinstalled", docker="preinstalled", hold_pinned=False)


def bundle(distro: str, version: str, source: str, folder: Path) -> OpenBundle:
    folder.mkdir()
    recipe = make_recipe(Wanted(distro, "x86_64", sources=(source,)), (spec(version),))
    return opened(collected(replace(recipe, driver=RunFile()), folder))


@contextmanager
def repository(distro: str, folder: Path) -> Iterator[str]:
    """Yield a source with both versions; at the end it is gone."""
    if not _DISTROS[distro]:
        with site_server(folder) as server:
            for version in (f"{_OLD}-1", f"{_NEW}-1"):
                server.add(_NAMES[0], version, Depends=f"{_NAMES[1]} (= {version})")
                server.add(_NAMES[1], version)
            yield f"deb [signed-by={server.folder}/key.asc] file:{server.folder} ./"
        return
    with gpg_home(folder / "g") as gnupg:
        packages = [
            package for version in (_OLD, _NEW)
            for package in (RpmPackage(_NAMES[0], version, requires=f"{_NAMES[1]} = {version}"),
                            RpmPackage(_NAMES[1], version))
        ]  # fmt: skip
        fingerprint = build_rpm_repository(folder / "www", gnupg, tuple(packages))
        yield f"file://{folder}/www {folder}/www/key.asc {fingerprint}"


@contextmanager
def host_of(distro: str, folder: Path) -> Iterator[System]:
    folder.mkdir()
    if not _DISTROS[distro]:
        with chroot_host("bookworm", folder) as host:
            yield host
        return
    made = RpmHost(folder / "root", distro, _DISTROS[distro])
    yield made
    made.end_agents()


def facts(host: System, used: OpenBundle) -> HostFacts:
    found = gather(host)
    docker = replace(found.docker, installed=True)
    return replace(found, docker=docker, bundle=with_bundle.gather(host, used.manifest))


def install(host: System, used: OpenBundle, version: str, *, keep_driver: bool) -> tuple[str, ...]:
    """Install this version from the bundle; return what is said of the way back before."""
    changes = PlanContext(facts(host, used), spec(version)).package_changes
    said = tuple(sentence for change in changes for sentence in change.way_back(host))
    with with_bundle.unpacked(host, used, changes, keep_driver=keep_driver):
        as_a_run(host, *changes)
    prune(host, CHANGE_KINDS, keep_driver=keep_driver)
    return said


def versions(host: System) -> list[str]:
    installed = gather(host).packages.installed
    return [installed[name].partition("-")[0].rpartition(":")[2] for name in _NAMES]


@pytest.mark.parametrize("keep_driver", [True, False])
@pytest.mark.parametrize("distro", _DISTROS)
def test_a_rollback_restores_packages_of_a_former_bundle(tmp_path: Path, distro: str, keep_driver: bool) -> None:
    (tmp_path / "site").mkdir()
    with repository(distro, tmp_path / "site") as source:
        # gpg-agent's sockets are there: their paths have 107 characters at most.
        old, new = (bundle(distro, version, source, tmp_path / version[:3]) for version in (_OLD, _NEW))
    shutil.rmtree(tmp_path / "site")
    with host_of(distro, tmp_path / "host") as host:
        assert manager_of(None, gather(host).packages.manager).name == (_DISTROS[distro] or "apt")
        install(host, old, _OLD, keep_driver=keep_driver)
        (said,) = install(host, new, _NEW, keep_driver=keep_driver)
        assert versions(host) == [_NEW, _NEW]
        (entry,) = (one for one in read_runs(host)[-1].entries if one.kind.startswith("InstallDriver"))
        kind = CHANGE_KINDS[entry.kind]
        restored = kind.restores(host, entry.before, entry.outcome)
        lost = kind.irreversible(host, entry.before, entry.outcome, ())
        undo_last(host)
        if keep_driver:
            assert said.startswith("way back: the driver's packages, by version (")
            assert restored[0].startswith("restores the driver's packages (") and lost == ()
            assert versions(host) == [_OLD, _OLD]
            assert sorted(host.list_directory(KEPT_PACKAGES)) == [_OLD, _NEW]
        else:
            assert said.startswith("way back: the driver's packages can't be restored: no repository has ")
            assert restored == () and lost
            assert host.list_directory(KEPT_PACKAGES) == ()
