"""The main job with dnf 5, Fedora's since 41: Debian's unstable release has it, without apt and dpkg here."""

from collections.abc import Iterator

import pytest

from gpuprov.core.system import System
from gpuprov.packages.dnf import DNF
from tests.integration.test_install_rpm import packages, tree
from tests.lab import HostRequest
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds, running
from tests.lab.host import differences

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.root]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    request = HostRequest("fedora", release="dnf5", os_release="fedora-43")
    with running({"fedora": request}, tmp_path_factory.mktemp("site"), "rpm") as made:
        yield made


def test_the_whole_way(site: Site) -> None:
    host, inventory = site.hosts["fedora"], site.inventory("fedora")
    # A site's own settings, against which gpuprov asks.
    host.ssh("printf '[main]\nassumeno=1\ncacheonly=all\n' > /etc/dnf/dnf.conf")
    before = tree(host), packages(host)
    gpuprov_succeeds("install", "--hosts", inventory)
    assert {"site-gpu-tools-1.0-1.noarch", "site-gpu-library-1.0-1.noarch"} <= set(packages(host))
    assert "1 host ready: containers see 2 GPUs (docker)" in gpuprov_succeeds("verify", "--hosts", inventory).stdout
    assert "nothing to change" in gpuprov_succeeds("install", "--hosts", inventory, "--check").stdout
    # As packages come back to an earlier version: nothing to do here.
    host.ssh(DNF.exact(System(), ("site-gpu-library-1.0-1.noarch",), simulate=True))
    gpuprov_succeeds("rollback", "--hosts", inventory)
    assert (differences(before[0], tree(host)), packages(host)) == (set(), before[1])


def test_a_site_that_only_tests_is_told(site: Site) -> None:
    site.hosts["fedora"].ssh("printf '[main]\ntsflags=test\n' > /etc/dnf/dnf.conf")
    done = gpuprov("install", "--hosts", site.inventory("fedora"))
    assert done.returncode == 1 and "dnf reported success, but has installed nothing" in done.stdout
    site.hosts["fedora"].ssh(": > /etc/dnf/dnf.conf")


def test_another_repository_out_of_reach_is_named(site: Site) -> None:
    place = "/etc/yum.repos.d/corp.repo"
    site.hosts["fedora"].ssh(f"printf '[corp]\nname=corp\nbaseurl=http://127.0.0.1:9/rpm\n' > {place}")
    done = gpuprov("install", "--hosts", site.inventory("fedora"))
    assert done.returncode == 1
    assert "repository corp: " in done.stdout and "grep -rlF corp /etc/yum.repos.d" in done.stdout
