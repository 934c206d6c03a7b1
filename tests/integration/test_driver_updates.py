"""The driver's packages move as one set or not at all: apt of two Debian releases, with the site's own packages."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov.core.changes import Change
from gpuprov.driver.packaged import ChangeDriverPackages
from gpuprov.facts.host import gather, gather_files
from gpuprov.machine.distros import find_distribution, own_driver
from gpuprov.packages.apt_changes import InstallPackages, RefreshPackageIndex
from gpuprov.packages.dpkg import gather_packages
from gpuprov.plan import software
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.plan.inputs import gather_for
from gpuprov.plan.steps import STEPS
from gpuprov.protocol.spec import HostSpec
from tests.apt_host import plan_repositories
from tests.integration.apt_chroot import NEEDS, RELEASES, ChrootHost, SiteServer, chroot_host, site_server
from tests.lab.sources import copy_network_configuration
from tests.runs import as_a_run, ignore, undo_last

pytestmark = NEEDS
_OLD, _NEW = "580.178.04-1", "580.200.01-1"
_SPEC = HostSpec(driver="preinstalled", docker="preinstalled")
# Ubuntu's: the driver's in one version, and modules for one kernel each by way of a package for all of a flavour.
_TOP = "nvidia-headless-580-server"
_SET = {
    _TOP,
    "libnvidia-compute-580-server",
    "nvidia-kernel-common-580-server",
    "libnvidia-nscq-580",
    "nvidia-imex-580",
    # Debian's, of the driver's source: the other packages that begin so are the CUDA toolkit's.
    "nvidia-cuda-mps",
}
_MODULES = "linux-modules-nvidia-580-server"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteServer]:
    """A repository with two versions of a driver, and modules for two kernels; `hwe` gets no new driver."""
    with site_server(tmp_path_factory.mktemp("site")) as made:
        for version in (_OLD, _NEW):
            depends = f"libnvidia-compute-580-server (= {version}), nvidia-kernel-common-580-server (= {version})"
            for name in _SET:
                made.add(name, version, Depends=depends if name == _TOP else "")
            made.add("bystander", version)
        for flavour, driver in (("generic", _NEW), ("hwe", _OLD)):
            for kernel, needs in (("1", _OLD), ("1", _NEW), ("2", driver)):
                modules = f"{_MODULES}-6.8.0-{kernel}-{flavour}"
                made.add(modules, needs, Depends=f"nvidia-kernel-common-580-server (= {needs})")
                made.add(f"{_MODULES}-{flavour}", f"6.8.{kernel}", Depends=modules)
        yield made


@pytest.fixture(params=RELEASES[1:])
def host(request: pytest.FixtureRequest, server: SiteServer, tmp_path: Path) -> Iterator[ChrootHost]:
    with chroot_host(request.param, tmp_path) as made:
        as_a_run(made, *plan_repositories(gather_files(made), server.spec, made.architecture()), RefreshPackageIndex())
        modules = [f"{_MODULES}-{flavour}=6.8.1" for flavour in ("generic", "hwe")]
        modules += [f"{_MODULES}-6.8.0-1-{flavour}={_OLD}" for flavour in ("generic", "hwe")]
        names = (*(f"{name}={_OLD}" for name in (*_SET, "bystander")), *modules)
        as_a_run(made, InstallPackages(names))
        yield made


def planned(host: ChrootHost, spec: HostSpec) -> tuple[Change, ...]:
    (step,) = (step for step in STEPS if step.name == "packages")
    return step.plan(PlanContext(gather(host), spec))


def settle(host: ChrootHost, spec: HostSpec) -> list[str]:
    """Apply what is planned for the packages; a second plan is empty."""
    changes = planned(host, spec)
    as_a_run(host, *changes)
    assert planned(host, spec) == ()
    return [change.summary() for change in changes]


def held(host: ChrootHost) -> set[str]:
    return {*host.run(("apt-mark", "showhold")).stdout.split()}


def moves(host: ChrootHost, verb: str) -> set[str]:
    done = host.run(("apt-get", "--simulate", "--yes", verb))
    assert done.ok and "Remv" not in done.stdout, done.stdout
    return {*re.findall(r"^Inst (\S+)", done.stdout, re.MULTILINE)}


def test_no_upgrade_changes_a_part_of_the_driver(host: ChrootHost) -> None:
    assert moves(host, "dist-upgrade") >= {*_SET, "bystander", f"{_MODULES}-generic"}
    (said,) = settle(host, _SPEC)
    assert said.startswith("hold the driver's packages at this version (libnvidia-compute-580-server, ")
    assert held(host) == _SET
    assert moves(host, "upgrade") == {"bystander"}
    # Modules of this driver come with a new kernel, those of another wait for it.
    assert moves(host, "dist-upgrade") == {"bystander", f"{_MODULES}-hwe", f"{_MODULES}-6.8.0-2-hwe"}
    assert settle(host, replace(_SPEC, driver_updates="follow", hold_pinned=True)) == [
        "no longer hold libnvidia-compute-580-server, libnvidia-nscq-580, nvidia-cuda-mps, nvidia-headless-580-server, "
        "nvidia-imex-580, nvidia-kernel-common-580-server"
    ]
    undo_last(host)
    assert held(host) == _SET
    undo_last(host)
    assert held(host) == set()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["bookworm"], indirect=True)
def test_unattended_upgrades_leave_the_driver_alone(host: ChrootHost) -> None:
    """By Debian's own program, with every origin allowed."""
    ours = {*host.path("/etc/apt/sources.list.d").iterdir()}
    away = [(path, path.read_bytes()) for path in ours]
    for path in ours:
        path.unlink()
    copy_network_configuration(host.root, "bookworm")
    install = "apt-get -q update && apt-get install -qy --no-install-recommends unattended-upgrades"
    done = host.run(("sh", "-c", install), timeout=300, env={"DEBIAN_FRONTEND": "noninteractive"})
    assert done.ok, done.evidence(9)
    host.write("/etc/apt/sources.list", b"")
    for path, content in away:
        path.write_bytes(content)
    host.write("/etc/apt/apt.conf.d/51all", b'Unattended-Upgrade::Origins-Pattern { "origin=*"; };\n')
    assert host.run(("apt-get", "-q", "update"), timeout=60).ok

    def upgraded() -> set[str]:
        said = host.run(("unattended-upgrade", "--dry-run", "--verbose"), timeout=300)
        (names,) = re.findall(r"Packages that will be upgraded: (.*)", said.stdout + said.stderr)
        return {*names.split()}

    assert upgraded() >= {*_SET, "bystander"}
    settle(host, _SPEC)
    assert upgraded() & {*_SET, "bystander"} == {"bystander"}


def test_our_own_upgrade_lifts_the_holds_and_sets_them_again(host: ChrootHost) -> None:
    host.run(("apt-mark", "hold", "nvidia-imex-580", "bystander"))
    others = {"nvidia-imex-580", "bystander"}
    settle(host, replace(_SPEC, hold_pinned=False))
    assert held(host) == _SET | others
    change = ChangeDriverPackages((_TOP,), gather_packages(host).driver_held, wanted="580.200.01")
    as_a_run(host, RefreshPackageIndex(), change)
    versions = gather_packages(host).installed
    assert (versions[_TOP], versions["libnvidia-compute-580-server"]) == (_NEW, _NEW)
    assert (versions["nvidia-imex-580"], held(host)) == (_OLD, others)
    settle(host, _SPEC)
    assert held(host) == _SET | others
    for remains in (others, _SET | others, others):
        undo_last(host)
        assert held(host) == remains
    assert gather_packages(host).installed[_TOP] == _OLD


def test_packages_of_the_driver_that_are_asked_for_move_together_with_the_rest(host: ChrootHost) -> None:
    settle(host, _SPEC)
    asked = replace(_SPEC, packages=(f"{_TOP}={_NEW}", f"{_MODULES}-generic=6.8.2"))
    refresh, install, hold = settle(host, asked)
    assert refresh and "(taking the hold off nvidia-headless-580-server, libnvidia-compute-580-server, " in install
    assert f"{_MODULES}-generic" not in held(host), "a kernel would not get its modules"
    assert hold == "hold the driver's packages at this version"
    assert held(host) == _SET
    assert gather_packages(host).installed["nvidia-kernel-common-580-server"] == _NEW


_DEBIANS = own_driver(find_distribution("debian", "12"))
assert _DEBIANS is not None
_PACKAGES = (*_DEBIANS.branches[0].libraries, *(one for built in _DEBIANS.branches[0].built.values() for one in built))
_RELEASES = ("535.183.01-1~deb12u1", "535.247.01-1~deb12u1", "550.163.01-2~bpo12+1")


@pytest.mark.parametrize("host", ["bookworm"], indirect=True)
def test_an_upgrade_takes_the_newest_release_of_the_distributions_branch(host: ChrootHost, server: SiteServer) -> None:
    for version in _RELEASES:
        server.add("libnvidia-ptxjitcompiler1", version)
        for name in _PACKAGES:
            server.add(name, version, Depends=f"libnvidia-ptxjitcompiler1 (= {version})")
    spec = HostSpec(driver="distribution", docker="preinstalled")
    own = (*_PACKAGES, "libnvidia-ptxjitcompiler1")
    # The other test's driver is another distribution's.
    others = [name for name in gather_packages(host).installed if "nvidia" in name]
    assert host.run(("apt-get", "--yes", "purge", *others)).ok
    as_a_run(host, RefreshPackageIndex())
    as_a_run(host, InstallPackages(tuple(f"{name}={_RELEASES[0]}" for name in own)))

    def versions() -> set[str]:
        installed = gather_packages(host).installed
        return {installed[name] for name in own}

    def plan(*, upgrade: bool) -> tuple[Change, ...]:
        # The whole step would want the headers of this machine's kernel.
        source = source_of(gather_for(host, spec, None, ("packages",), ignore, upgrade=upgrade), spec)
        coming = bool(source.plan_other_version())
        return (*source.plan_other_version(), *software.plan_driver_hold(source, coming=coming))

    as_a_run(host, *plan(upgrade=False))
    assert (versions(), held(host)) == ({_RELEASES[0]}, {*own})
    (change,) = (one for one in plan(upgrade=True) if isinstance(one, ChangeDriverPackages))
    assert change.wanted == "535.247.01"
    as_a_run(host, *plan(upgrade=True))
    # The rest of the plan was made for the former driver: a run plans again.
    as_a_run(host, *plan(upgrade=True))
    assert (versions(), held(host)) == ({_RELEASES[1]}, {*own})
    assert plan(upgrade=True) == ()
    undo_last(host)
    undo_last(host)
    assert (versions(), held(host)) == ({_RELEASES[0]}, {*own})
