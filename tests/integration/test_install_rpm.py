"""The main job on hosts with dnf and zypper: install, again, verify, roll back; what is refused, and why.

The hosts are Debian underneath, without apt and dpkg; their os-release is that of Rocky Linux, Fedora and openSUSE.
"""

import pytest

from tests.integration.test_install import VOLATILE, docker_start
from tests.lab import Host
from tests.lab.fixtures import Site, events, gpuprov, gpuprov_succeeds
from tests.lab.host import Snapshot, differences

pytestmark = [pytest.mark.lab, pytest.mark.root]
NAMES = ("rocky", "fedora", "opensuse")


def tree(host: Host) -> Snapshot:
    """Return /etc, /opt (where the packages' files lie) and where programs of ours would lie."""
    found = host.snapshot("/etc", "/opt", "/usr/lib/gpuprov", "/usr/bin")
    return {path: value for path, value in found.items() if not VOLATILE.match(path)}


def packages(host: Host) -> list[str]:
    return sorted(host.ssh("rpm -qa").stdout.split())


def test_the_whole_way(rpm_site: Site) -> None:
    """Check changes nothing; install does it; containers see the GPUs; again is empty; roll back gives all back."""
    inventory = rpm_site.inventory(*NAMES)
    hosts = [rpm_site.hosts[name] for name in NAMES]
    before = [(tree(host), packages(host), docker_start(host)) for host in hosts]

    check = gpuprov_succeeds("install", "--hosts", inventory, "--check", "--diff")
    assert "+repo_gpgcheck=1" in check.stdout and "+skip_if_unavailable=0" in check.stdout
    assert "/etc/zypp/repos.d/gpuprov-site.repo" in check.stdout
    assert [(tree(host), packages(host), docker_start(host)) for host in hosts] == before

    gpuprov_succeeds("install", "--hosts", inventory)
    for host in hosts:
        assert {"site-gpu-tools-1.0-1.noarch", "site-gpu-library-1.0-1.noarch"} <= set(packages(host))
        assert len([name for name in packages(host) if name.startswith("gpg-pubkey-")]) == 1
    assert "3 hosts ready" in gpuprov_succeeds("verify", "--hosts", inventory).stdout

    settled = [(tree(host), packages(host), docker_start(host)) for host in hosts]
    again = events(gpuprov("install", "--hosts", inventory, "--json").stdout)
    assert [event["changed"] for event in again if event.get("event") == "Finished"] == [0, 0, 0]
    assert [(tree(host), packages(host), docker_start(host)) for host in hosts] == settled

    gpuprov_succeeds("rollback", "--hosts", inventory)
    for host, (tree_before, packages_before, _) in zip(hosts, before, strict=True):
        assert differences(tree_before, tree(host)) == set(), host.name
        assert packages(host) == packages_before, host.name


def test_a_host_without_docker_is_told_where_to_get_it(rpm_site: Site) -> None:
    """Rocky Linux has no docker of its own; a repository that can't be reached is told before anything is changed."""
    host = rpm_site.hosts["rocky"]
    host.ssh("mv /usr/sbin/dockerd /usr/sbin/dockerd.away; cp /etc/hosts /root/hosts")
    host.ssh("echo 127.0.0.1 download.docker.com >> /etc/hosts")
    try:
        done = gpuprov("install", "--hosts", rpm_site.inventory("rocky"))
        assert done.returncode == 1
        assert "Rocky Linux 9 has no docker of its own" in done.stdout
        assert "gpuprov_docker: docker-ce" in done.stdout
        asked = rpm_site.inventory("rocky", gpuprov_docker="docker-ce")
        refused = gpuprov("install", "--hosts", asked, "--check")
        assert refused.returncode == 1, refused.stdout
        assert (
            "https://download.docker.com/linux/centos/gpg can't be reached: the connection is refused" in refused.stdout
        )
    finally:
        host.ssh("mv /usr/sbin/dockerd.away /usr/sbin/dockerd; cat /root/hosts > /etc/hosts")
