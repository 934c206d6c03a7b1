"""The migration from nvidia-docker 1 and 2 on a real host: real apt, real docker, volumes and containers of each kind.

The packages are stand-ins with NVIDIA's names, dependencies, paths and scripts, from a signed repository laid out as
NVIDIA's retired ones, and under their address (tests/lab/nvidia_docker.py). nvidia-docker 1's plugin is a real plugin.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpuprov.packages.keys import dearmored, fingerprints
from tests.integration.test_install import etc, packages
from tests.lab import Host, HostRequest
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds, running
from tests.lab.host import differences
from tests.lab.nvidia_docker import DOCKER1, PACKAGES_OF_2, PROXY, SOURCES, build_retired
from tests.lab.nvidia_toolkit import NAMES, build_toolkit
from tests.lab.repository import make_key
from tests.lab.shell import run

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.root]
_CURRENT = "1.18.1-1"
_SOURCE = "etc/apt/sources.list.d/nvidia-docker.list"
_PREPARE = """
tar -hc /bin/sh /bin/sleep /lib/x86_64-linux-gnu/libc.so.6 /lib64/ld-linux-x86-64.so.2 2>/dev/null |
  docker import - small:1
apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install "$@"
"""
# A volume of each kind, and one of a site's own whose name begins in the same way.
_VOLUMES = """
systemctl restart docker
for name in nvidia_driver_375.26 nvidia_driver_384.111 nvidia_driver_390.30 nvidia_driver_mine; do
  docker volume create $name
done
docker create --name stopped -v nvidia_driver_375.26:/usr/local/nvidia:ro small:1 /bin/sleep 1
docker run -d --runtime runc --name running -v nvidia_driver_384.111:/usr/local/nvidia:ro small:1 /bin/sleep 3600
"""
_EDITED = {
    "log-driver": "json-file",
    "default-runtime": "nvidia",
    "runtimes": {
        "nvidia": {"path": "/usr/bin/nvidia-container-runtime", "runtimeArgs": []},
        "nvidia-experimental": {"path": "/usr/bin/nvidia-container-runtime-experimental"},
    },
    "live-restore": True,
}


@pytest.fixture(scope="module")
def lab_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running({"old": HostRequest("old", gpus=2, archive=True)}, tmp_path_factory.mktemp("inventories")) as site:
        gnupg = site.lab.directory / "gnupg"
        fingerprint = build_retired(site.lab.www, gnupg)
        build_toolkit(site.lab.www / "toolkit", gnupg, {"stable": (_CURRENT,)})
        variables = {
            "gpuprov_toolkit_key_fingerprint": fingerprint,
            "gpuprov_toolkit_repository": f"{site.lab.url}/toolkit",
            "gpuprov_packages": None,
            "gpuprov_repositories": None,
        }
        yield replace(site, variables={**site.variables, **variables})


def host_with(site: Site, *names: str) -> Host:
    """Return a fresh host on which packages of the old repositories were installed in the way of their time."""
    host = site.fresh("old")
    gnupg = site.lab.directory / "gnupg"
    other = site.lab.directory / "gnupg-other"
    ours, others = make_key(gnupg), make_key(other)
    keys = "".join(
        run(("gpg", "--homedir", str(home), "--armor", "--export", one))
        for home, one in ((gnupg, ours), (other, others))
    )
    run(("gpgconf", "--homedir", str(other), "--kill", "all"))
    (host.root / "etc/apt/trusted.gpg").write_bytes(dearmored(keys.encode()))
    (host.root / _SOURCE).write_text(SOURCES)
    (host.root / "etc/apt/apt.conf.d/99retired").write_text(PROXY.format(url=site.lab.url))
    host.ssh(("sh", "-e", "-c", _PREPARE, "sh", *names), timeout=300)
    return host


def install(site: Site, *words: object, **variables: Any) -> str:
    return gpuprov_succeeds("install", *words, "--hosts", site.inventory("old", **variables)).stdout


def installed(host: Host, *names: str) -> dict[str, str]:
    said = host.ssh(("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n", *names), check=False)
    rows = (line.split() for line in said.stdout.splitlines())
    return {name: version for status, name, version in rows if status == "installed"}


def names_of(host: Host, what: str) -> set[str]:
    return set(host.ssh(what).stdout.split())


def volumes(host: Host) -> set[str]:
    return {name for name in names_of(host, "docker volume ls -q") if name.startswith("nvidia_driver_")}


def undo(site: Site, command: str) -> str:
    return gpuprov_succeeds(command, "--hosts", site.inventory("old")).stdout


def test_from_nvidia_docker2_and_back(lab_site: Site) -> None:
    host = host_with(lab_site, *PACKAGES_OF_2)
    (host.root / "etc/docker/daemon.json").write_text(json.dumps(_EDITED, indent=2))
    host.ssh(_VOLUMES, timeout=120)
    before, packages_before = etc(host), packages(host)
    containers = {"stopped", "running"}

    examined = gpuprov("doctor", "--json", "--hosts", lab_site.inventory("old")).stdout
    rules = ("toolkit-retired", "nvidia-docker-volumes", "nvidia-docker-repository", "nvidia-docker-runtimes")
    assert [rule for rule in rules if f'"{rule}"' not in examined] == []
    assert "gpuprov_migrate_nvidia_docker=true" in examined and "apt-get purge" not in examined

    # A container that runs with NVIDIA's program keeps it.
    host.ssh("docker run -d --name gpu small:1 /bin/sleep 3600")
    checked = " ".join(install(lab_site, "--check", "--diff", gpuprov_migrate_nvidia_docker=True).split())
    assert "gpu runs with it; docker stop gpu" in checked and "remove nvidia-docker2" not in checked
    assert "remove volume nvidia_driver_390.30 (no container refers to it; a rollback can't restore its" in checked
    assert "volume nvidia_driver_384.111 stays: running (running) refers to it" in checked
    assert "volume nvidia_driver_375.26 stays: stopped (created) refers to it" in checked
    host.ssh("docker rm -f gpu")
    assert differences(before, etc(host)) == set() and packages(host) == packages_before

    install(lab_site, gpuprov_migrate_nvidia_docker=True)
    assert installed(host, *PACKAGES_OF_2) == {}
    assert volumes(host) == {"nvidia_driver_375.26", "nvidia_driver_384.111", "nvidia_driver_mine"}
    assert names_of(host, "docker ps -a --format '{{.Names}}'") == containers
    config = json.loads((host.root / "etc/docker/daemon.json").read_text())
    assert (config["log-driver"], config["live-restore"], config["default-runtime"]) == ("json-file", True, "nvidia")
    assert {name: one["path"] for name, one in config["runtimes"].items()} == {
        "nvidia": "/usr/bin/gpuprov-container-runtime"
    }
    assert not (host.root / _SOURCE).exists()
    assert len(fingerprints((host.root / "etc/apt/trusted.gpg").read_bytes())) == 1
    host.ssh("apt-get update")
    assert "0 changes" in install(lab_site, gpuprov_migrate_nvidia_docker=True)
    gpuprov_succeeds("verify", "--hosts", lab_site.inventory("old"))

    told = gpuprov("rollback", "--check", "--hosts", lab_site.inventory("old")).stdout
    assert "volume nvidia_driver_390.30 and its content are not restored" in " ".join(told.split())
    undo(lab_site, "rollback")
    assert packages(host) == packages_before
    assert differences(before, etc(host)) == set()
    assert set(host.ssh("apt-mark showauto").stdout.split()).isdisjoint({"nvidia-docker2"})
    host.ssh("dpkg --audit && dpkg --verify nvidia-container-toolkit-base nvidia-container-runtime && apt-get check")


def test_to_nvidias_current_toolkit_and_a_package_manager_that_refuses(lab_site: Site) -> None:
    host = host_with(lab_site, *PACKAGES_OF_2)
    prerm = host.root / "var/lib/dpkg/info/nvidia-docker2.prerm"
    prerm.write_text("#!/bin/sh\necho the disk is on fire >&2; exit 1\n")
    prerm.chmod(0o755)
    before = etc(host)
    # Without docker, nothing of docker's is asked or changed; the repositories go all the same.
    without = {"gpuprov_docker": "none", "gpuprov_engines": ["containerd"], "gpuprov_migrate_nvidia_docker": True}
    checked = " ".join(install(lab_site, "--check", **without).split())
    assert "stays: docker may use it, and gpuprov_docker is none" in checked and f"remove /{_SOURCE}" in checked
    assert "daemon.json" not in checked and "remove nvidia" not in checked

    new = {"gpuprov_toolkit": "nvidia", "gpuprov_toolkit_version": _CURRENT, "gpuprov_migrate_nvidia_docker": True}
    done = gpuprov("install", "--hosts", lab_site.inventory("old", **new))
    assert done.returncode == 1
    assert "the disk is on fire" in done.stdout and "could not be removed" in " ".join(done.stdout.split())
    assert installed(host, *PACKAGES_OF_2).keys() == set(PACKAGES_OF_2)
    assert (host.root / "etc/docker/daemon.json").read_bytes() == before["/etc/docker/daemon.json"][3]

    prerm.unlink()
    install(lab_site, **new)
    assert installed(host, *PACKAGES_OF_2) == dict.fromkeys(NAMES, _CURRENT)
    assert "nvidia-container-runtime" in host.ssh("cat /etc/docker/daemon.json").stdout
    assert "0 changes" in install(lab_site, **new)


def test_from_nvidia_docker_1_whose_plugin_stays_as_long_as_a_container_needs_it(lab_site: Site) -> None:
    host = host_with(lab_site, "nvidia-docker")
    host.ssh("""
    for version in 375.26 384.111; do docker volume create -d nvidia-docker nvidia_driver_$version; done
    docker create --name job -v nvidia_driver_375.26:/usr/local/nvidia:ro small:1 /bin/sleep 1
    """)
    packages_before = packages(host)
    first = " ".join(install(lab_site, gpuprov_migrate_nvidia_docker=True).split())
    assert "package nvidia-docker stays: its volumes are used by job (created); docker rm job" in first
    assert volumes(host) == {"nvidia_driver_375.26"}
    assert host.ssh("systemctl is-active nvidia-docker").stdout == "active\n"

    host.ssh("docker rm job")
    install(lab_site, gpuprov_migrate_nvidia_docker=True)
    assert volumes(host) == set()
    assert installed(host, "nvidia-docker") == {}
    for path in ("usr/bin/nvidia-docker-plugin", "var/lib/nvidia-docker", "lib/systemd/system/nvidia-docker.service"):
        assert not (host.root / path).exists()
    assert not re.search(r"^nvidia-docker:", host.ssh("cat /etc/passwd /etc/group").stdout, re.MULTILINE)

    undo(lab_site, "rollback")
    assert installed(host, "nvidia-docker") == {"nvidia-docker": DOCKER1}
    assert host.ssh("systemctl is-active nvidia-docker").stdout == "active\n"
    host.ssh("docker volume create -d nvidia-docker nvidia_driver_390.30")
    undo(lab_site, "uninstall")
    assert packages(host) == packages_before
