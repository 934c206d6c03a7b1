"""Hosts of rpm's world without a network: a bundle collected by the real dnf, and hosts with nothing else to use."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_bundle import without_network
from tests.integration.test_install_rpm import packages, tree
from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds
from tests.lab.host import differences

pytestmark = [pytest.mark.lab, pytest.mark.root]
DISTROS = {"rocky": "rocky-9", "fedora": "fedora-38", "opensuse": "opensuse-tumbleweed"}
PACKAGES = {"site-gpu-tools-1.0-1.noarch", "site-gpu-library-1.0-1.noarch"}


@pytest.fixture(params=DISTROS)
def cut_off(rpm_site: Site, request: pytest.FixtureRequest) -> Iterator[Host]:
    with without_network(rpm_site.hosts[request.param]) as host:
        yield host


def inventory(site: Site, name: str) -> Path:
    return site.inventory(name, gpuprov_docker="preinstalled")


def test_installed_from_a_bundle_alone_again_and_undone(rpm_site: Site, cut_off: Host, tmp_path: Path) -> None:
    hosts = inventory(rpm_site, cut_off.name)
    without = gpuprov("install", "--hosts", hosts)
    assert without.returncode == 1, "the host has a way out, so this test would prove nothing"
    gpuprov("rollback", "--hosts", hosts)
    repository = rpm_site.lab.www / "rpm"
    source = f"file://{repository} {repository}/key.asc {(repository / 'fingerprint').read_text()}"
    words = ("--distro", DISTROS[cut_off.name], "--source", source, "-o", tmp_path / "bundle.tar")
    assert "2 packages" in gpuprov_succeeds("bundle", "create", "--hosts", hosts, *words).stdout

    before = (tree(cut_off), packages(cut_off))
    gpuprov_succeeds("install", "--hosts", hosts, "--bundle", tmp_path / "bundle.tar")
    installed = packages(cut_off)
    assert set(installed) >= PACKAGES
    # Those of the packages' maker stay; the bundle's own key was for the one run.
    assert len([name for name in installed if name.startswith("gpg-pubkey-")]) == 1
    left = [path.name for path in (cut_off.root / "var/cache/gpuprov").iterdir()
            if not path.name.startswith("agent-") and path.name != "driver"]  # fmt: skip
    assert [re.fullmatch(r"bundle-[0-9a-f]{32}-\d+\.tar", name) is not None for name in left] == [True]
    again = gpuprov("install", "--hosts", hosts, "--bundle", tmp_path / "bundle.tar")
    assert "0 changes" in again.stdout, again.stdout
    gpuprov_succeeds("verify", "--hosts", hosts)

    gpuprov_succeeds("uninstall", "--hosts", hosts)
    assert packages(cut_off) == before[1]
    assert differences(before[0], tree(cut_off)) == set()
