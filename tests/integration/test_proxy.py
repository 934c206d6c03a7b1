"""gpuprov_proxy with a real proxy that wants a login: downloads, apt, dnf and zypper; nobody else gets the password."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core import commands, system
from gpuprov.core.commands import Completed
from gpuprov.core.download import fetch_small, unreachable
from gpuprov.core.proxy import Proxy
from gpuprov.core.system import System
from gpuprov.facts.host import gather_files
from gpuprov.packages import managers
from gpuprov.packages.apt import APT
from gpuprov.packages.apt_changes import InstallPackages, RefreshPackageIndex
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec, SiteRepository
from tests.apt_host import plan_repositories
from tests.integration import rpm_repositories
from tests.integration.apt_chroot import chroot_host
from tests.integration.rpm_host import RpmHost
from tests.integration.test_ansible import play, recap
from tests.integration.test_repos import AptHost
from tests.integration.tinyproxy import (
    ENCODED,
    PASSWORD,
    USER,
    BehindProxy,
    RunningProxy,
    running_proxy,
    unused_address,
)
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds
from tests.lab.repository import PACKAGE, build_repository
from tests.lab.rpm_repository import TOOLS, build_rpm_repository
from tests.loopback import served

pytestmark = [pytest.mark.root, pytest.mark.needs("tinyproxy")]


def tell(message: str, done: int, total: int) -> None:
    assert PASSWORD not in message


@pytest.fixture(autouse=True)
def no_password_on_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    real = commands.run_command

    def watched(argv: Sequence[str], **more: Any) -> Completed:
        assert not any(PASSWORD in word or ENCODED in word for word in argv)
        return real(argv, **more)

    monkeypatch.setattr(system, "run_command", watched)


@pytest.fixture(autouse=True)
def no_other_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path_factory.mktemp("proxy")) as found:
        yield found


def site_of(url: str, folder: Path) -> HostSpec:
    fingerprint = (folder / "fingerprint").read_text()
    return HostSpec(repositories=(SiteRepository("site", url, f"{url}/key.asc", fingerprint),))


def test_apt_reaches_its_repository_through_the_proxy(proxy: RunningProxy, tmp_path: Path) -> None:
    build_repository(tmp_path / "www", tmp_path / "gnupg")
    with chroot_host("bookworm", tmp_path) as host, served(tmp_path / "www", BehindProxy) as url:
        # A host's own setting, of a proxy that is gone, does not count.
        host.write("/etc/apt/apt.conf", f'Acquire::http::Proxy "http://{unused_address()}";\n'.encode())
        spec = site_of(url, tmp_path / "www")
        with pytest.raises(GpuprovError, match="HTTP 403"):
            fetch_small(host, f"{url}/key.asc")
        host.proxy = Proxy(proxy.url)
        planned = plan_repositories(gather_files(host), spec, "x86_64")
        assert managers.ask(host, APT, (PACKAGE,), planned).lacking((PACKAGE,)) == ()
        for change in planned:
            change.apply(host, tell)
        RefreshPackageIndex().apply(host, tell)
        InstallPackages((PACKAGE,)).apply(host, tell)
        assert PACKAGE in APT.gather(host).installed
        for folder in ("etc", "tmp", "var/log", "var/lib", "var/tmp"):
            for file in (one for one in host.path(folder).rglob("*") if one.is_file() and not one.is_symlink()):
                content = file.read_bytes()
                assert PASSWORD.encode() not in content and ENCODED.encode() not in content, file


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rocky-9.5", "opensuse-tumbleweed"])
def test_dnf_and_zypper_reach_repositories_through_the_proxy(proxy: RunningProxy, tmp_path: Path, name: str) -> None:
    build_rpm_repository(tmp_path / "www", tmp_path / "gnupg")
    host = RpmHost(tmp_path / "root", name, rpm_repositories.HOSTS[name])
    try:
        with served(tmp_path / "www", BehindProxy) as url:
            host.proxy = Proxy(proxy.url)
            rpm_repositories.configure(host, site_of(url, tmp_path / "www"))
            rpm_repositories.refresh(host)
            rpm_repositories.install(host, TOOLS.name)
    finally:
        host.end_agents()
    assert TOOLS.name in rpm_repositories.manager(host).gather(host).installed


@pytest.mark.slow
def test_a_bundle_is_made_through_the_proxy(proxy: RunningProxy, tmp_path: Path) -> None:
    build_repository(tmp_path / "www", tmp_path / "gnupg")
    (tmp_path / "proxy.yml").write_text(f"gpuprov_proxy: {proxy.url}\ngpuprov_docker: preinstalled\n")
    with served(tmp_path / "www", BehindProxy) as url:
        source = f"deb [signed-by={tmp_path}/www/key.asc] {url} ./"
        words = ("bundle", "create", "--distro", "debian-12", "--package", PACKAGE, "--source", source)
        refused = gpuprov(*words, "-e", "gpuprov_docker=preinstalled", "-o", tmp_path / "refused.tar")
        assert refused.returncode != 0 and "403" in refused.stdout
        done = gpuprov(*words, "-e", f"@{tmp_path}/proxy.yml", "-o", tmp_path / "bundle.tar")
    assert done.returncode == 0 and "1 package," in done.stdout, done.stdout
    assert PASSWORD not in done.stdout and ENCODED not in done.stdout
    shown = gpuprov("bundle", "show", tmp_path / "bundle.tar", "--json").stdout
    assert PASSWORD not in shown and ENCODED not in shown


@pytest.mark.slow
def test_a_bundle_for_hosts_of_several_proxies_asks_for_one(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.ini"
    hosts.write_text("a gpuprov_proxy=http://one:1\nb gpuprov_proxy=http://u:hidden@two:2\n")
    said = gpuprov("bundle", "create", "--distro", "debian-12", "--hosts", hosts, "-o", tmp_path / "bundle.tar")
    assert said.returncode == 2 and "the hosts name different proxies" in said.stdout
    assert "http://one:1, http://two:2" in said.stdout and "hidden" not in said.stdout


def test_hosts_of_no_proxy_are_reached_directly(proxy: RunningProxy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    with served(tmp_path) as url:
        host = System()
        host.proxy = Proxy(f"http://{unused_address()}", "example.org,127.0.0.1")
        assert fetch_small(host, f"{url}/file") == b"content"


def test_a_dead_proxy_is_named_without_its_password(tmp_path: Path) -> None:
    address = unused_address()
    host = System()
    host.proxy = Proxy(f"http://{USER}:{PASSWORD}@{address}")
    found = host.proxy_problem()
    assert found is not None and found.what == f"the proxy http://{address} does not answer"
    (asked,) = unreachable(host, ["http://repository.invalid/file"])
    assert asked.what == found.what
    with pytest.raises(GpuprovError, match=f"the proxy http://{address} does not answer") as caught:
        fetch_small(host, "https://repository.invalid/file")
    assert PASSWORD not in f"{found}{asked}{caught.value}"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_refused_login_names_the_proxy(proxy: RunningProxy, scheme: str) -> None:
    host = System()
    host.proxy = Proxy(f"http://{USER}:wrong-password@{proxy.place}")
    with pytest.raises(GpuprovError) as caught:
        fetch_small(host, f"{scheme}://{proxy.place}/file")
    (problem,) = caught.value.problems
    assert proxy.address in problem.evidence and "gpuprov_proxy" in problem.next_step
    assert "wrong-password" not in str(caught.value)


def test_apt_says_that_the_proxy_refuses_the_login(proxy: RunningProxy, tmp_path: Path) -> None:
    host = AptHost(tmp_path)
    host.write("/etc/apt/sources.list", b"deb [trusted=yes] http://127.0.0.1:1/ ./\n")
    host.proxy = Proxy(f"http://{USER}:wrong-password@{proxy.place}")
    with pytest.raises(GpuprovError, match="the proxy, refuses the login") as caught:
        RefreshPackageIndex().apply(host, tell)
    assert "wrong-password" not in str(caught.value)


@pytest.mark.lab
def test_a_host_behind_the_proxy_is_installed_by_both_doors(site: Site, tmp_path: Path) -> None:
    host = site.fresh("main")
    host.add_archive()
    with running_proxy(tmp_path / "proxy", site.lab.network.gateway) as proxy:
        hosts = site.inventory("main", gpuprov_proxy=proxy.url, gpuprov_no_proxy="registry.example.org")
        said = gpuprov("install", "--hosts", hosts, "--check", "--diff", "--json").stdout
        assert f"http://{USER}:***@{proxy.place}" in said
        done = gpuprov_succeeds("install", "--hosts", hosts)
        # The driver, the site's repository and Debian's own came through it.
        assert f"GET {site.variables['gpuprov_driver_url']}" in proxy.log
        assert f"{site.lab.url}/apt/" in proxy.log and "debian.org" in proxy.log
        host.ssh("docker pull registry.invalid/image", check=False)
        host.ssh("docker pull registry.example.org/image", check=False)
        assert "CONNECT registry.invalid:443" in proxy.log and "registry.example.org" not in proxy.log
        # The playbook finds nothing to do; it says no more with all that -vvv shows.
        played = play("site", hosts, "-vvv")
        assert recap(played, "main")["changed"] == 0, played.stdout
        back = gpuprov("rollback", "--hosts", hosts, "--check", "--diff").stdout
    told = "\n".join((said, done.stdout, played.stdout, back))
    told += host.ssh("journalctl --no-pager; systemctl show docker; cat /etc/systemd/system/docker.service.d/*").stdout
    told += host.ssh("cat /var/log/apt/*.log /var/log/dpkg.log /var/lib/gpuprov/runs/*").stdout
    assert PASSWORD not in told and ENCODED not in told
    assert host.ssh("stat -c %a:%U /etc/gpuprov/docker-proxy.env").stdout == "600:root\n"
    # The proxy is gone now: the rollback needs none.
    gpuprov_succeeds("rollback", "--hosts", hosts)
    assert host.ssh("ls /etc/gpuprov /etc/systemd/system/docker.service.d", check=False).stdout == ""
