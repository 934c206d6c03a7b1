"""NVIDIA's container toolkit as packages, on a real host: pinned, held, verified, changed for another, taken away.

The packages are stand-ins with NVIDIA's names, dependencies and paths, in a signed mirror laid out as NVIDIA's own.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.integration.test_install import etc, packages
from tests.integration.test_uninstall import files
from tests.lab import Host, HostRequest
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds, running
from tests.lab.host import differences
from tests.lab.nvidia_toolkit import NAMES, build_toolkit

pytestmark = [pytest.mark.lab, pytest.mark.root]
_OLD, _NEW, _CANDIDATE = "1.17.8-1", "1.18.1-1", "1.19.0~rc.2-1"
_CHANNELS = {"stable": (_OLD, _NEW), "experimental": (_CANDIDATE,)}


@pytest.fixture(scope="module")
def lab_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running({"kit": HostRequest("kit", gpus=2)}, tmp_path_factory.mktemp("inventories")) as site:
        fingerprint = build_toolkit(site.lab.www / "toolkit", site.lab.directory / "gnupg", _CHANNELS)
        mirror = {
            "gpuprov_toolkit": "nvidia",
            "gpuprov_toolkit_repository": f"{site.lab.url}/toolkit",
            "gpuprov_toolkit_key_fingerprint": fingerprint,
            "gpuprov_packages": None,
            "gpuprov_repositories": None,
        }
        yield replace(site, variables={**site.variables, **mirror})


@pytest.fixture(scope="module")
def host(lab_site: Site) -> Host:
    return lab_site.hosts["kit"]


def install(site: Site, **variables: str) -> None:
    """Install; a second run has nothing to do, and containers see the GPUs."""
    inventory = site.inventory("kit", **variables)
    gpuprov_succeeds("install", "--hosts", inventory)
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    verified = gpuprov_succeeds("verify", "--hosts", inventory)
    assert re.search(r"runtime nvidia +ok /usr/bin/nvidia-container-runtime *$", verified.stdout, re.MULTILINE)


def versions(host: Host) -> set[str]:
    return set(host.ssh(("dpkg-query", "-W", "-f", "${Version}\n", *NAMES)).stdout.split())


def held(host: Host) -> set[str]:
    return set(host.ssh("apt-mark showhold").stdout.split())


def test_all_four_of_the_version_that_is_asked_for_held_changed_and_taken_away(lab_site: Site, host: Host) -> None:
    before = (etc(host), packages(host), files(host))

    install(lab_site, gpuprov_toolkit_version=_OLD)
    assert versions(host) == {_OLD}
    assert held(host) == set(NAMES)
    host.ssh("apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y upgrade")
    assert versions(host) == {_OLD}
    runtimes = host.ssh("docker info --format '{{json .Runtimes}}'").stdout
    assert '"path":"/usr/bin/nvidia-container-runtime"' in runtimes
    assert not (host.root / "usr/bin/gpuprov-container-runtime").exists()

    newer = lab_site.inventory("kit", gpuprov_toolkit_version=_NEW)
    foreseen = gpuprov("install", "--hosts", newer, "--check").stdout
    assert f"upgrade: toolkit {_OLD} → {_NEW}; " in foreseen
    assert "way back: the toolkit's packages, by version (libnvidia-container-tools=" in foreseen
    install(lab_site, gpuprov_toolkit_version=_NEW)
    assert (versions(host), held(host)) == ({_NEW}, set(NAMES))
    assert "restores the toolkit's packages (" in gpuprov("rollback", "--hosts", newer, "--check").stdout
    gpuprov_succeeds("rollback", "--hosts", newer)
    assert (versions(host), held(host)) == ({_OLD}, set(NAMES))
    install(lab_site, gpuprov_toolkit_version=_NEW)

    source = host.root / "etc/apt/sources.list.d/gpuprov-nvidia-container-toolkit-experimental.sources"
    assert not source.exists()
    install(lab_site, gpuprov_toolkit_version=_CANDIDATE, gpuprov_toolkit_channel="experimental")
    assert source.exists()
    assert (versions(host), held(host)) == ({_CANDIDATE}, set(NAMES))

    gpuprov_succeeds("uninstall", "--hosts", lab_site.inventory("kit"))
    assert differences(before[0], etc(host)) == set()
    assert (packages(host), files(host)) == before[1:]


def test_without_a_version_the_newest_that_is_stable_and_nothing_is_held(lab_site: Site, host: Host) -> None:
    host.reset()
    install(lab_site)
    assert versions(host) == {_NEW}
    assert held(host) == set()


def test_from_the_bundled_runtime_to_nvidias_and_back(lab_site: Site, host: Host) -> None:
    """docker's configuration follows, and each runtime serves containers in its time.

    A toolkit that somebody then installs by hand keeps its hook when gpuprov goes.
    """
    host.reset()
    bundled = lab_site.inventory("kit", gpuprov_toolkit="bundled")
    gpuprov_succeeds("install", "--hosts", bundled)
    install(lab_site)
    gpuprov_succeeds("rollback", "--hosts", lab_site.inventory("kit"))
    assert host.ssh(("dpkg-query", "-W", *NAMES), check=False).stdout == ""
    bundled = lab_site.inventory("kit", gpuprov_toolkit="bundled")
    assert "/usr/bin/gpuprov-container-runtime" in gpuprov_succeeds("verify", "--hosts", bundled).stdout

    by_hand = f"""
    echo 'deb [trusted=yes] {lab_site.lab.url}/toolkit/stable/deb/amd64 /' > /etc/apt/sources.list.d/by-hand.list
    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install nvidia-container-toolkit
    """
    host.ssh(by_hand, timeout=300)
    gpuprov_succeeds("uninstall", "--hosts", bundled)
    assert host.ssh(("dpkg", "--verify", *NAMES)).stdout == ""
