"""Compiled kernel modules by the real dnf, with module streams, and the real zypper: taken, kept to, exchanged.

The repositories are laid out as NVIDIA's for RHEL 9, and as NVIDIA's and SUSE's for SLES 15; the packages in them have
their names, versions and relations, and nothing inside.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.cdi.discover import DriverFacts
from gpuprov.core.changes import Change
from gpuprov.core.commands import Completed
from gpuprov.core.journal import read_runs
from gpuprov.driver import cuda_repository
from gpuprov.driver.kernel import questions
from gpuprov.driver.packaged import ChangeDriverRpms, EnableStream, InstallDriverRpms
from gpuprov.facts.host import HostFacts, gather
from gpuprov.facts.interpreter import Interpreter
from gpuprov.machine.pci import PciGpu
from gpuprov.packages import managers
from gpuprov.packages.rpm import InstallRpmPackages
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.plan.preflight import preflight
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import PACKAGED
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import NEEDS
from tests.integration.test_driver_streams import host_with_streams, wanted
from tests.lab.rpm_repository import RpmPackage, build_rpm_repository
from tests.runs import as_a_run, tell, undo_last
from tests.unit.ask import check_of

pytestmark = [*NEEDS, pytest.mark.slow]
_KERNEL, _NEXT = "5.14.0-427.13.1", "5.14.0-427.20.1"
_SLES_KERNEL = "6.4.0-150600.23.7-default"
_SLES_NEXT = "6.4.0-150700.53.3-default"
_KMP = "nvidia-open-driver-G06-signed-cuda-kmp-default"


def driver(version: str) -> tuple[RpmPackage, ...]:
    """Return what a branch has besides modules: packages that want modules of their very version, from any vendor."""
    return (
        RpmPackage("cuda-drivers", version, requires=f"nvidia-driver = {version}"),
        RpmPackage("nvidia-driver", version, requires=f"nvidia-kmod = {version}"),
    )


def kmod(version: str, kernel: str) -> RpmPackage:
    return RpmPackage(f"kmod-nvidia-{version}-{kernel}", version, provides=f"nvidia-kmod = {version}")


def dkms(version: str) -> RpmPackage:
    return RpmPackage("kmod-nvidia-latest-dkms", version, provides=f"nvidia-kmod = {version}")


# 580's newest has none for this kernel yet, as after each release of a driver.
_STREAMS = {
    "570": (*driver("570.211.01"), kmod("570.211.01", _KERNEL)),
    "580": (*driver("580.95.05"), *driver("580.105.08"), kmod("580.95.05", _KERNEL), kmod("580.105.08", _NEXT)),
    "580-dkms": (*driver("580.105.08"), dkms("580.105.08")),
    "latest-dkms": (*driver("580.105.08"), dkms("580.105.08")),
}


@pytest.fixture
def host(tmp_path: Path) -> RpmHost:
    """A RHEL 9 that has the repository in /opt."""
    made = host_with_streams(tmp_path, "rhel-9.3", _STREAMS)
    # As if the plugin by which dnf holds packages were there.
    made.write("/etc/dnf/plugins/versionlock.conf", b"[main]\nenabled = 1\n")
    return made


def facts_of(host: RpmHost, spec: HostSpec, device: str, release: str) -> HostFacts:
    """Return what a bare machine with this GPU is like, its repositories asked as a run asks them."""
    found = gather(host)
    kernel = replace(found.kernel, release=release, container="", takes_modules=True, secure_boot="disabled")
    bare = replace(found, kernel=kernel, driver=DriverFacts(), gpus=(PciGpu("0000:01:00.0", device),))
    bare = replace(bare, docker=replace(found.docker, installed=True), interpreter=Interpreter("/usr/bin/python3"))
    names = questions(source_of(bare, spec))
    if not names:
        return bare
    # As a plan asks them (plan/inputs.py): without the repository of DKMS, which only a build needs.
    repositories = PlanContext(bare, replace(spec, epel=False)).repository_changes
    return replace(bare, offers=managers.ask(host, found.package_manager, names, repositories))


def rhel(host: RpmHost, spec: HostSpec, kernel: str = _KERNEL) -> HostFacts:
    """The machine has a V100, which the proprietary modules serve alone."""
    return facts_of(host, spec, "1db4", f"{kernel}.el9_4.x86_64")


def planned(facts: HostFacts, spec: HostSpec) -> list[Change]:
    found = make_plan(
        facts,
        cuda_repository.with_branch(facts.distribution, facts.gpu_device_ids, "", spec, PACKAGED),
        ("repositories", "packages"),
    )
    assert found.problems == ()
    return [one.change for one in found.changes]


def only_drivers(changes: Sequence[Change]) -> list[Change]:
    """Leave out what a distribution's repository would have: docker, the toolkit's needs."""
    kept = []
    for change in changes:
        if isinstance(change, InstallRpmPackages):
            names = tuple(name for name in change.names if "nvidia" in name or "cuda" in name or "nv-" in name)
            change = replace(change, names=names, enable=())
        kept.append(change)
    return [one for one in kept if not isinstance(one, InstallRpmPackages) or one.names]


def converge(host: RpmHost, facts: HostFacts, spec: HostSpec) -> list[Change]:
    changes = only_drivers(planned(facts, spec))
    for change in changes:
        change.apply(host, tell)
    return changes


def drivers(host: RpmHost) -> list[str]:
    names = ("nvidia", "cuda")
    return sorted(
        one.rsplit("-", 1)[0] for one in host.run(("rpm", "-qa")).stdout.split() if any(n in one for n in names)
    )


def test_the_driver_that_has_modules_for_this_kernel_is_installed_though_there_is_a_newer_one(host: RpmHost) -> None:
    spec = wanted(host)
    facts = rhel(host, spec)
    assert facts.offers is not None
    assert facts.offers.problems == ()
    changes = converge(host, facts, spec)
    assert EnableStream("580") in changes
    assert not any("kernel-devel" in name for one in planned(facts, spec) for name in getattr(one, "names", ()))
    expected = ["cuda-drivers-580.95.05", f"kmod-nvidia-580.95.05-{_KERNEL}-580.95.05", "nvidia-driver-580.95.05"]
    assert drivers(host) == expected
    again = rhel(host, spec)
    assert again.offers is None, "who has all need not ask"
    assert only_drivers(planned(again, spec)) == []


def test_another_branch_and_the_former_one_come_with_their_modules(host: RpmHost) -> None:
    spec = wanted(host)
    converge(host, rhel(host, spec), spec)
    before = drivers(host)
    other = wanted(host, "570")
    changes = only_drivers(planned(rhel(host, other), other))
    assert EnableStream("570", "580") in changes and any(isinstance(one, ChangeDriverRpms) for one in changes)
    captured = []
    for change in changes:
        if isinstance(change, ChangeDriverRpms):
            assert change.way_back(host)[0].startswith("way back: the driver's packages, by version (cuda-drivers-580.")
        state = change.capture(host)
        captured.append((change, state, change.apply(host, tell)))
    expected = ["cuda-drivers-570.211.01", f"kmod-nvidia-570.211.01-{_KERNEL}-570.211.01", "nvidia-driver-570.211.01"]
    assert drivers(host) == expected
    assert only_drivers(planned(rhel(host, other), other)) == []
    for change, state, outcome in reversed(captured):
        if isinstance(change, ChangeDriverRpms):
            assert change.restores(host, state, outcome) != () == change.irreversible(host, state, outcome, ())
        for _ in range(2):
            change.undo(host, state, outcome)
    assert drivers(host) == before


def test_the_next_kernel_finds_its_modules_with_a_newer_driver(host: RpmHost) -> None:
    spec = wanted(host)
    converge(host, rhel(host, spec), spec)
    facts = rhel(host, spec, _NEXT)
    assert source_of(facts, spec).packages() == ("cuda-drivers", f"kmod-nvidia-580.105.08-{_NEXT}")


def test_a_kernel_without_compiled_modules_is_named_before_it_boots(host: RpmHost) -> None:
    spec = wanted(host)
    converge(host, rhel(host, spec), spec)
    for kernel, modules in ((_KERNEL, "extra/nvidia.ko:\n"), (_NEXT, "kernel/fs/xfs/xfs.ko.xz:\n")):
        folder = host.path(f"/usr/lib/modules/{kernel}.el9_4.x86_64")
        folder.mkdir(parents=True)
        (folder / "vmlinuz").touch()
        (folder / "modules.dep").write_text(modules)
    assert check_of("next kernel", host, replace(spec, docker="none")).reason == (
        f"kernel {_NEXT}.el9_4.x86_64 has no NVIDIA module: install kmod-nvidia-580.95.05-{_NEXT}, "
        "or boot an older one until there is one"
    )


def test_where_there_are_none_they_are_built(host: RpmHost) -> None:
    spec = wanted(host)
    facts = rhel(host, spec, "5.14.0-427.99.1")
    assert source_of(facts, spec).plan_preparation() == (EnableStream("latest-dkms"),)
    # Nobody has its headers either: that is told before any of it.
    said = [one.what for one in preflight(PlanContext(facts, spec))]
    assert any("headers of the running kernel 5.14.0-427.99.1.el9_4.x86_64" in one for one in said), said
    must = replace(spec, kernel_modules="precompiled")
    said = [one.what for one in preflight(PlanContext(rhel(host, must, "5.14.0-427.99.1"), must))]
    assert any("no repository has proprietary kernel modules" in one for one in said), said
    built = replace(spec, kernel_modules="build")
    assert source_of(rhel(host, built), built).plan_preparation() == (EnableStream("latest-dkms"),)


@pytest.fixture
def suse(tmp_path: Path) -> RpmHost:
    """A SLES 15 that has NVIDIA's repository and, as SUSE has them in its own, the signed modules of two drivers."""
    cuda_folder, site, gnupg = (tmp_path / name for name in ("cuda/sles15/x86_64", "site", "gnupg"))
    libraries = tuple(
        RpmPackage(name, version)
        for version in ("580.95.05", "580.105.08")
        for name in ("nvidia-compute-utils-G06", "nvidia-persistenced", "nvidia-open")
    )
    build_rpm_repository(cuda_folder, gnupg, libraries)
    shutil.copy(cuda_folder / "key.asc", cuda_folder / "D42D0685.pub")
    build_rpm_repository(
        site, gnupg, (
            RpmPackage("nv-prefer-signed-open-driver", "580.95.05", requires=_KMP),
            RpmPackage("nv-prefer-signed-open-driver", "580.105.08", requires=_KMP),
            RpmPackage(_KMP, "580.95.05_k6.4.0_150600.21"), RpmPackage(_KMP, "580.105.08_k6.4.0_150700.51"),
        ),
    )  # fmt: skip
    made = RpmHost(tmp_path / "host", "sles-15.3", "zypper")
    shutil.move(tmp_path / "cuda", made.path("/opt/cuda"))
    shutil.move(site, made.path("/opt/suse"))
    made.write(
        "/etc/zypp/repos.d/suse.repo",
        b"[suse]\nname=suse\nbaseurl=file:///opt/suse\nenabled=1\ngpgkey=file:///opt/suse/key.asc\n",
    )
    assert made.run(("rpm", "--import", "/opt/suse/key.asc")).ok
    return made


def sles(host: RpmHost, spec: HostSpec, kernel: str = _SLES_KERNEL) -> HostFacts:
    return facts_of(host, spec, "2330", kernel)


def test_suses_signed_modules_bring_libraries_of_their_version(suse: RpmHost) -> None:
    spec = wanted(suse, place="sles15")
    facts = sles(suse, spec)
    assert facts.offers is not None
    assert facts.offers.problems == ()
    converge(suse, facts, spec)
    assert drivers(suse) == [
        "nvidia-compute-utils-G06-580.95.05",
        f"{_KMP}-580.95.05_k6.4.0_150600.21",
        "nvidia-persistenced-580.95.05",
    ]
    assert suse.run(("rpm", "-q", "nv-prefer-signed-open-driver")).ok
    again = sles(suse, spec)
    assert again.offers is None
    assert only_drivers(planned(again, spec)) == []


class Killed(BaseException):
    """Ends a run as a kill does."""


@dataclass
class Upgrade:
    """A SLES that boots the next service pack's kernel, whose modules are of a newer driver; and the run's changes."""

    host: RpmHost
    changes: list[Change]
    before: set[str]

    @property
    def change(self) -> InstallDriverRpms:
        (found,) = (one for one in self.changes if isinstance(one, InstallDriverRpms))
        return found

    def run(self) -> None:
        """Make the changes, as a run does."""
        as_a_run(self.host, *self.changes)

    def sentences(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what a rollback says: that it restores the driver, and that it can't."""
        (entry,) = (one for one in read_runs(self.host)[-1].entries if one.kind == "InstallDriverRpms")
        return (
            InstallDriverRpms.restores(self.host, entry.before, entry.outcome),
            InstallDriverRpms.irreversible(self.host, entry.before, entry.outcome, ()),
        )

    def roll_back(self) -> None:
        undo_last(self.host)

    def is_as_before(self) -> bool:
        return self.before == installed(self.host)


def installed(host: RpmHost) -> set[str]:
    return {*host.run(("rpm", "-qa")).stdout.split(), host.read_text("/etc/zypp/locks") or ""}


@pytest.fixture
def upgrade(suse: RpmHost) -> Upgrade:
    spec = wanted(suse, place="sles15")
    converge(suse, sles(suse, spec), spec)
    return Upgrade(suse, only_drivers(planned(sles(suse, spec, _SLES_NEXT), spec)), installed(suse))


def ending_after_zypper(host: RpmHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the run behind zypper's next change of packages."""
    run = host.run

    def killed(argv: Sequence[str], **more: Any) -> Completed:
        done = run(argv, **more)
        if argv[0] == "zypper" and "install" in argv and "--dry-run" not in argv:
            raise Killed
        return done

    monkeypatch.setattr(host, "run", killed)


def test_zypper_restores_the_driver_before_the_newer_one(upgrade: Upgrade, monkeypatch: pytest.MonkeyPatch) -> None:
    assert upgrade.change.way_back(upgrade.host)[0].startswith("way back: the driver's packages, by version (nv-prefer")
    upgrade.run()
    assert "nvidia-compute-utils-G06-580.105.08" in drivers(upgrade.host)
    # The packages are held; the rollback's first step is to release them.
    (restores,), lost = upgrade.sentences()
    assert restores.startswith("restores the driver's packages (nv-prefer-signed-open-driver-580.95.05-1.")
    assert lost == ()
    with monkeypatch.context() as now, pytest.raises(Killed):
        ending_after_zypper(upgrade.host, now)
        upgrade.roll_back()
    upgrade.roll_back()
    assert upgrade.is_as_before()


def test_an_upgrade_with_zypper_that_was_killed_is_undone(upgrade: Upgrade, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as now, pytest.raises(Killed):
        ending_after_zypper(upgrade.host, now)
        upgrade.run()
    assert not upgrade.is_as_before()
    upgrade.roll_back()
    assert upgrade.is_as_before()


def test_zypper_without_the_former_packages_says_so_before(upgrade: Upgrade) -> None:
    for place in upgrade.host.path("/etc/zypp/repos.d").glob("*cuda*"):
        place.unlink()
    (said,) = upgrade.change.way_back(upgrade.host)
    assert said.startswith("way back: the driver's packages can't be restored: no repository has nvidia-compute-utils")
