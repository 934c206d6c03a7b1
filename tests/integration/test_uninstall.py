"""Off a real host again: after runs, verification and containers, nothing of gpuprov is left."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.killed import kill_at
from tests.integration.test_install import etc, packages
from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov, gpuprov_started, gpuprov_succeeds
from tests.lab.host import differences

pytestmark = [pytest.mark.lab, pytest.mark.root]
# Where package managers, systemd and docker keep their own accounts.
_ACCOUNTS = re.compile(r"^/var/(lib/(apt|dpkg|docker|containerd|systemd|private)|cache/(apt|ldconfig|debconf))\b")
_FILES = "find /usr /var/lib /var/cache /opt /srv /root /home -xdev -printf '%p %M %U:%G %l\\n' | sort"
_IN_MEMORY = "find /dev -name '*nvidia*' -printf '%p %l\\n'; find /dev/char -lname '*nvidia*'; find /run/gpuprov"


def files(host: Host) -> set[str]:
    return {line for line in host.ssh(_FILES).stdout.splitlines() if not _ACCOUNTS.match(line)}


def in_memory(host: Host) -> str:
    return host.ssh(_IN_MEMORY, check=False).stdout


def install_and_use(site: Site) -> None:
    """Two runs with different wishes; verification, and a container by each of docker's two ways."""
    gpuprov_succeeds("install", "--hosts", site.inventory("main", gpuprov_packages=None))
    host = site.hosts["main"]
    gpuprov_succeeds("verify", "--hosts", site.inventory("main"))
    require_running_containers_are_named(site, host)
    gpuprov_succeeds("install", "--hosts", site.inventory("main", gpuprov_docker_default_runtime=True))
    assert "site-gpu-tools" in packages(host) and "nvidia" in in_memory(host)
    assert host.ssh("docker images -q gpuprov-verify").stdout


def require_running_containers_are_named(site: Site, host: Host) -> None:
    """Nothing is touched while containers run, or would be started again."""
    image = host.ssh("docker images -q gpuprov-verify").stdout.strip()
    asks = "--runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all"
    host.ssh(f"docker run -d --name trainer {asks} {image} sh -c 'read x < /dev/zero'")
    host.ssh(f"docker run -d --name server --gpus all --restart always {image} sh -c 'read x < /dev/zero'")
    before = etc(host)
    refused = gpuprov("uninstall", "--hosts", site.inventory("main"))
    assert refused.returncode == 1
    assert "docker stop trainer," in refused.stdout
    assert "seen: docker inspect: server (restart: always)" in refused.stdout
    assert "docker stop server," in refused.stdout
    assert etc(host) == before
    host.ssh("docker rm -f trainer server")


def test_nothing_is_left_and_all_else_is_as_before(site: Site) -> None:
    host = site.fresh("main")
    before = (etc(host), packages(host), files(host), in_memory(host))
    install_and_use(site)
    installed = etc(host)
    foreseen = gpuprov_succeeds("uninstall", "--hosts", site.inventory("main"), "--check", "--diff")
    assert re.search(r"^\s*-.*gpuprov-container-runtime", foreseen.stdout, re.MULTILINE)
    assert "would be made, nothing was touched" in foreseen.stdout
    assert etc(host) == installed
    done = gpuprov_succeeds("uninstall", "--hosts", site.inventory("main"))
    assert "1 host uninstalled: " in done.stdout
    after = (etc(host), packages(host), files(host), in_memory(host))
    assert differences(before[0], after[0]) == set()
    assert after[1] == before[1]
    assert after[2] == before[2]
    assert after[3] == before[3]
    assert host.ssh("docker images -q").stdout == ""
    again = gpuprov("uninstall", "--hosts", site.inventory("main"))
    assert again.returncode == 0 and "1 host uninstalled: 0 changes" in again.stdout, again.stdout
    gpuprov_succeeds("install", "--hosts", site.inventory("main"))
    assert host.ssh("ls /var/lib/gpuprov/runs").stdout.split() == ["0001.jsonl"]
    assert etc(host).keys() == installed.keys()


def test_a_killed_uninstall_is_resumed(site: Site) -> None:
    """Early on one host, later on another, at once: much of a run is waiting."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name, undone: uninstall_killed_and_again(site, name, undone), ("main", "twin"), (1, 4)))


def uninstall_killed_and_again(site: Site, name: str, undone: int) -> None:
    """Kill an uninstall behind so many undone changes; the next one leaves the host as before the install."""
    host, inventory = site.fresh(name), site.inventory(name)
    before = (etc(host), packages(host))
    gpuprov_succeeds("install", "--hosts", inventory)
    with gpuprov_started("uninstall", "--hosts", inventory) as process:
        kill_at(host, process, undone, word='"undone"')
        process.communicate(timeout=120)
    gpuprov_succeeds("uninstall", "--hosts", inventory)
    assert differences(before[0], etc(host)) == set(), name
    assert packages(host) == before[1], name
    assert host.ssh("ls -d /var/lib/gpuprov", check=False).returncode != 0, name
