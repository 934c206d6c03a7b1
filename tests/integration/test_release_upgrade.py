"""A host whose distribution is upgraded in place, from Debian 12 to 13 by real apt, and goes on giving out GPUs."""

import json
from collections.abc import Iterator

import pytest

from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.root]
# As Debian's release notes have it; autoremove takes the Python that gpuprov's programs name.
_UPGRADE = """
sed -i s/bookworm/trixie/g /etc/apt/sources.list
export DEBIAN_FRONTEND=noninteractive
apt-get -q update && apt-get -q -y -o Dpkg::Options::=--force-confold full-upgrade && apt-get -q -y autoremove
! ls /usr/bin/python3.11
"""
# docker 26 of Debian 13 reads CDI specifications only with a setting that docker 20.10 of Debian 12 did not have.
_CDI = "docker run --device"


@pytest.fixture(scope="module")
def upgraded(site: Site) -> Iterator[Host]:
    """Debian 13 since a moment ago, not yet booted again; gpuprov set it up as Debian 12."""
    host = site.fresh("main")
    host.add_archive()
    gpuprov_succeeds("install", "--hosts", site.inventory("main"))
    host.ssh(_UPGRADE, timeout=900)
    yield host


def failed(site: Site) -> set[str]:
    """Return the checks of verify that fail."""
    done = gpuprov("verify", "--hosts", site.inventory("main"), "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["name"] for row in rows if row["event"] == "CheckDone" and row["status"] == "failed"}


def test_containers_have_their_gpus_before_and_after_the_boot(site: Site, upgraded: Host) -> None:
    assert failed(site) == set()
    diagnosis = gpuprov_succeeds("doctor", "--hosts", site.inventory("main"))
    assert "python3.11; /usr/bin/python3 stands in for it" in diagnosis.stdout
    assert "another build" not in diagnosis.stdout
    upgraded.reboot()
    units = ("gpuprov-nodes.service", "gpuprov-refresh.service")
    assert upgraded.ssh(("systemctl", "show", "-P", "Result", *units)).stdout.split() == ["success", "success"]
    assert failed(site) == {_CDI}


def test_the_next_installation_settles_it(site: Site, upgraded: Host) -> None:
    inventory = site.inventory("main")
    gpuprov_succeeds("install", "--hosts", inventory)
    assert upgraded.ssh("grep -h ^python= /usr/bin/gpuprov-container-runtime").stdout == "python=/usr/bin/python3.13\n"
    assert failed(site) == set()
    assert "nothing to change" in gpuprov_succeeds("install", "--hosts", inventory, "--check").stdout
    gpuprov_succeeds("uninstall", "--hosts", inventory)
    assert "gpuprov" not in upgraded.ssh("ls /usr/lib /usr/bin /etc/systemd/system").stdout
