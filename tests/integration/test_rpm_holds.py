"""Packages whose version is asked for, held by a real dnf and a real zypper until another is asked for."""

import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.apply import apply_changes, resume_run
from gpuprov.core.commands import Completed
from gpuprov.core.journal import new_journal
from gpuprov.driver.packaged import ChangeDriverRpms
from gpuprov.facts.host import HostFacts, gather
from gpuprov.packages.dnf import DNF
from gpuprov.packages.rpm import InstallRpmPackages, RefreshRpmIndex
from gpuprov.packages.rpm_locks import held_names, lift
from gpuprov.packages.zypper import ZYPPER
from gpuprov.plan.context import PlanContext
from gpuprov.plan.steps import CHANGE_KINDS, STEPS
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import (
    HOSTS,
    NEEDS,
    Repository,
    configure,
    facts_of,
    manager,
    repository,
    template,
)
from tests.lab.rpm_repository import RpmPackage
from tests.runs import as_a_run, tell, undo_last
from tests.simgpu import debian

__all__ = ["repository", "template"]
pytestmark = [*NEEDS, pytest.mark.slow]


@pytest.fixture(scope="module")
def versionlock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dnf 4's plugin, out of Debian's package, which can't be installed beside zypper."""
    folder = tmp_path_factory.mktemp("plugins")
    debian.fetch(folder, "bookworm", "main", ("dnf-plugins-core",))
    return folder / "unpacked"


def give_plugin(host: RpmHost, plugin: Path) -> None:
    """Let dnf on the host have the plugin."""
    modules = plugin / "usr/lib/python3/dist-packages"
    shutil.copytree(modules / "dnf-plugins", host.path("/opt/plugins"))
    shutil.copytree(modules / "dnfpluginscore", host.path("/opt/plugins/dnfpluginscore"))
    for name in ("versionlock.conf", "versionlock.list"):
        host.path("/etc/dnf/plugins").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plugin / "etc/dnf/plugins" / name, host.path(f"/etc/dnf/plugins/{name}"))
    # Beside what it imports; the other plugins stay away.
    for path in host.path("/opt/plugins").glob("*.py"):
        if path.name != "versionlock.py":
            path.unlink()
    host.write("/etc/dnf/dnf.conf", b"[main]\npluginpath=/opt/plugins\npluginconfpath=/etc/dnf/plugins\n")


def converge(host: RpmHost, spec: HostSpec) -> list[str]:
    """Apply what is planned for the packages, and return the sentences; a second plan is empty."""
    changes = PlanContext(with_docker(host), spec).package_changes
    for change in changes:
        change.apply(host, tell)
    assert PlanContext(with_docker(host), spec).package_changes == ()
    return [change.summary() for change in changes]


def with_docker(host: RpmHost) -> HostFacts:
    found = gather(host)
    return dataclasses.replace(found, docker=dataclasses.replace(found.docker, installed=True))


def upgrade(host: RpmHost) -> None:
    words = ("zypper", "--non-interactive", "update") if manager(host) is ZYPPER else ("dnf", "-y", "upgrade")
    assert host.run((*words, "held-tools"), timeout=60, env={"PYTHONPATH": "/opt/plugins"}).stdout


@pytest.mark.parametrize("os_release", ["rocky-9.5", "opensuse-tumbleweed"])
def test_pinned_package_is_held(tmp_path: Path, repository: Repository, versionlock: Path, os_release: str) -> None:
    host = RpmHost(tmp_path / "root", os_release, HOSTS[os_release])
    if manager(host) is DNF:
        give_plugin(host, versionlock)
    for version in ("1.0", "2.0", "3.0"):
        repository.add(RpmPackage("held-tools", version))
    configure(host, repository.spec)

    def wanted(version: str) -> HostSpec:
        pin = (f"held-tools={version}",) if version else ("held-tools",)
        return HostSpec(packages=pin, driver="preinstalled", docker="preinstalled")

    assert converge(host, wanted("1.0"))[-1] == "hold held-tools at this version"
    upgrade(host)
    assert manager(host).missing(facts_of(host).packages, ["held-tools=1.0"]) == ()
    place = gather(host).packages.locks.path
    held = host.read_text(place)
    journal = new_journal(host, "install")
    with pytest.raises(GpuprovError, match=r"held-tools=9\.9 could not be installed"):
        apply_changes(PlanContext(with_docker(host), wanted("9.9")).package_changes, host, journal, lambda event: None)
    assert host.read_text(place) == held, "the hold is set again when the installation fails"
    assert gather(host).packages.locks.held_here == {"held-tools"}
    assert converge(host, wanted("2.0"))[1] == "install held-tools=2.0 (taking the hold off held-tools)"
    upgrade(host)
    assert manager(host).missing(facts_of(host).packages, ["held-tools=2.0"]) == ()
    assert converge(host, wanted("")) == ["no longer hold held-tools"]
    upgrade(host)
    assert manager(host).missing(facts_of(host).packages, ["held-tools=3.0"]) == (), (
        "the upgrade would have left it in any case"
    )


_DRIVER = ("libnvidia-ml", "nvidia-driver-cuda", "nvidia-fabricmanager")


def settle(host: RpmHost, **more: Any) -> list[str]:
    """Apply what is planned for the packages, holds of the driver among them; a second plan is empty."""
    (step,) = (step for step in STEPS if step.name == "packages")
    spec = HostSpec(driver="preinstalled", docker="preinstalled", **more)
    changes = step.plan(PlanContext(with_docker(host), spec))
    as_a_run(host, *changes)
    assert step.plan(PlanContext(with_docker(host), spec)) == ()
    return [change.summary() for change in changes]


def versions(host: RpmHost) -> list[str]:
    found = gather(host).packages.installed
    return [found[name].partition("-")[0] for name in (*_DRIVER, "bystander")]


def upgrade_all(host: RpmHost) -> None:
    words = ("zypper", "--non-interactive", "update") if manager(host) is ZYPPER else ("dnf", "-y", "upgrade")
    host.run(words, timeout=60, env={"PYTHONPATH": "/opt/plugins"})


def automatic(host: RpmHost) -> None:
    """Run dnf-automatic, of which Debian has all but the program's file, as its timer does."""
    host.write("/etc/dnf/automatic.conf", b"[commands]\nupgrade_type = default\n[emitters]\nemit_via = stdio\n")
    # It has no option for the release, and no package here tells it.
    host.write("/etc/dnf/vars/releasever", b"9\n")
    program = "import sys; from dnf.automatic.main import main; sys.exit(main(sys.argv[1:]))"
    done = host.run(("python3", "-c", program, "--installupdates"), timeout=60, env={"PYTHONPATH": "/opt/plugins"})
    assert done.ok and "bystander" in done.stdout, done.evidence()


@pytest.mark.parametrize("os_release", ["rocky-9.5", "opensuse-tumbleweed"])
def test_the_drivers_packages_move_as_one_set(
    tmp_path: Path, repository: Repository, versionlock: Path, os_release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/opt/plugins")
    host = RpmHost(tmp_path / "root", os_release, HOSTS[os_release])
    how = manager(host)
    if how is DNF:
        give_plugin(host, versionlock)
    old, new = "580.178.04", "580.200.01"
    for version in (old, new):
        repository.add(RpmPackage("libnvidia-ml", version))
        repository.add(RpmPackage("nvidia-driver-cuda", version, requires=f"libnvidia-ml = {version}"))
        repository.add(RpmPackage("nvidia-fabricmanager", version))
        repository.add(RpmPackage("bystander", version))
    configure(host, repository.spec)
    place = gather(host).packages.locks.path
    others = (
        "\ntype: package\nmatch_type: glob\ncase_sensitive: on\nsolvable_name: bash\n\n" if how is ZYPPER else "bash\n"
    )
    host.write(place, others.encode())
    as_a_run(
        host, RefreshRpmIndex(how), InstallRpmPackages(how, tuple(f"{name}={old}" for name in (*_DRIVER, "bystander")))
    )
    hold = f"hold the driver's packages at this version ({', '.join(_DRIVER)})"
    assert settle(host, hold_pinned=False) == [hold]
    if how is DNF:
        automatic(host)
    else:
        upgrade_all(host)
    assert versions(host) == [old, old, old, new], "only what is not the driver's"
    lifted = f"no longer hold {', '.join(_DRIVER)}"
    asked = settle(host, packages=(f"nvidia-driver-cuda={new}",))
    assert asked[1:] == [
        f"install nvidia-driver-cuda={new} (taking the hold off {', '.join(_DRIVER)})",
        "hold the driver's packages at this version",
    ]
    assert versions(host) == [new, new, old, new]
    upgrade_all(host)
    assert versions(host) == [new, new, old, new], "the fabric manager's hold is set again"
    undo_last(host)
    assert held_names(how.hold_tool(host), host.read_text(place) or "") == {*_DRIVER, "bash"}
    assert settle(host, driver_updates="follow") == [lifted]
    assert host.read_text(place) == others
    if how is DNF:
        settle(host)
        locks, held = gather(host).packages, host.read_text(place)
        off = lift(locks.locks, locks.driver_held)
        with pytest.raises(GpuprovError, match="the driver's packages are of"):
            as_a_run(host, ChangeDriverRpms(DNF, ("nvidia-driver-cuda",), lift=off, wanted="999"))
        assert host.read_text(place) == held
        as_a_run(host, ChangeDriverRpms(DNF, ("nvidia-driver-cuda",), lift=off, wanted="580"))
        settle(host)
        assert versions(host) == [new] * 4 and gather(host).packages.driver_held == _DRIVER
        for _ in range(3):
            undo_last(host)
    undo_last(host)
    undo_last(host)
    assert host.read_text(place) == others


@pytest.mark.parametrize("after", [False, True], ids=["before the installation", "after it"])
@pytest.mark.parametrize("os_release", ["rocky-9.5", "opensuse-tumbleweed"])
def test_a_killed_upgrade_of_the_driver_leaves_its_hold_to_the_next_run(
    tmp_path: Path, repository: Repository, versionlock: Path, os_release: str, after: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", "/opt/plugins")
    host = RpmHost(tmp_path / "root", os_release, HOSTS[os_release])
    if manager(host) is DNF:
        give_plugin(host, versionlock)
    for version in ("580.1", "580.2"):
        repository.add(RpmPackage("libnvidia-ml", version))
    configure(host, repository.spec)
    as_a_run(host, RefreshRpmIndex(manager(host)), InstallRpmPackages(manager(host), ("libnvidia-ml=580.1",)))
    settle(host)
    place = gather(host).packages.locks.path
    held = host.read_text(place)
    (step,) = (step for step in STEPS if step.name == "packages")
    spec = HostSpec(driver="preinstalled", docker="preinstalled", packages=("libnvidia-ml=580.2",))
    changes = step.plan(PlanContext(with_docker(host), spec))
    run = host.run

    def killed(argv: Sequence[str], **more: Any) -> Completed:
        is_installation = any(word.startswith("libnvidia-ml") for word in argv) and "install" in argv
        done = run(argv, **more) if after or not is_installation else None
        if is_installation:
            os.kill(os.getpid(), signal.SIGKILL)
        assert done is not None
        return done

    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            monkeypatch.setattr(host, "run", killed)
            apply_changes(changes, host, new_journal(host, "install"), lambda event: None)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert "libnvidia-ml" not in held_names(manager(host).hold_tool(host), host.read_text(place) or "")
    journal = resume_run(host, CHANGE_KINDS, lambda event: None)
    assert journal is not None
    # The same run goes on.
    apply_changes(step.plan(PlanContext(with_docker(host), spec)), host, journal, lambda event: None)
    journal.end("done")
    assert gather(host).packages.installed["libnvidia-ml"].startswith("580.2")
    assert gather(host).packages.driver_held == ("libnvidia-ml",)
    assert step.plan(PlanContext(with_docker(host), spec)) == ()
    undo_last(host)
    assert host.read_text(place) == held
