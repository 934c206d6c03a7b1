"""Packages whose version is asked for, held by a real dnf and a real zypper until another is asked for."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from gpuprov.facts.host import HostFacts, gather
from gpuprov.packages.dnf import DNF
from gpuprov.packages.zypper import ZYPPER
from gpuprov.plan.context import PlanContext
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
    tell,
    template,
)
from tests.lab.rpm_repository import RpmPackage
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
def test_a_pinned_package_is_held_until_another_version_is_asked_for(
    tmp_path: Path, repository: Repository, versionlock: Path, os_release: str
) -> None:
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
    assert converge(host, wanted("2.0"))[0] == "no longer hold held-tools"
    upgrade(host)
    assert manager(host).missing(facts_of(host).packages, ["held-tools=2.0"]) == ()
    assert converge(host, wanted("")) == ["no longer hold held-tools"]
    upgrade(host)
    assert manager(host).missing(facts_of(host).packages, ["held-tools=3.0"]) == (), (
        "the upgrade would have left it in any case"
    )
