"""containerd and podman on real hosts, beside docker and without it; docker's features.cdi, on and off again."""

import json

import pytest

from tests.integration.test_ansible import play, recap
from tests.lab import Host
from tests.lab.fixtures import Site, events, gpuprov, gpuprov_succeeds
from tests.lab.host import differences

pytestmark = [pytest.mark.lab, pytest.mark.root]
_DUMP = "containerd config dump | grep -c 'BinaryName = .*/usr/bin/gpuprov-container-runtime' || true"
# podman in a host of the lab: no pids controller, and bookworm's crun does not start there.
_PODMAN_CONF = '[containers]\npids_limit = 0\n[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\n'
_ENGINES = {"gpuprov_docker": "none", "gpuprov_packages": ["site-gpu-tools", "podman", "runc"]}


def without_docker(site: Site, name: str) -> Host:
    """A fresh host without docker, on which a run can install podman."""
    host = site.fresh(name)
    host.add_archive()
    host.ssh("dpkg --purge docker.io docker-cli && mkdir -p /etc/containers/containers.conf.d")
    host.ssh("cat > /etc/containers/containers.conf.d/10-lab.conf", stdin=_PODMAN_CONF)
    return host


def test_a_real_containerd_is_told_and_docker_lives_on(site: Site) -> None:
    host = site.installed("main")
    state = "cat /etc/containerd/config.toml 2>/dev/null | sha256sum; systemctl show -p MainPID docker"
    before = host.ssh(state).stdout
    assert host.ssh(_DUMP).stdout.strip() == "0"
    inventory = site.inventory("main", gpuprov_engines=["containerd"])
    done = gpuprov_succeeds("install", "--hosts", inventory)
    assert "restart containerd (its containers go on)" in done.stdout
    assert host.ssh(_DUMP).stdout.strip() == "1"
    assert host.ssh("systemctl is-active containerd docker").stdout.split() == ["active", "active"]
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    verified = gpuprov_succeeds("verify", "--hosts", inventory)
    assert "main: containers see this host's GPUs: docker, containerd" in verified.stdout
    gpuprov_succeeds("rollback", "--hosts", inventory)
    assert host.ssh(state).stdout == before
    missing = gpuprov("install", "--hosts", site.inventory("main", gpuprov_engines=["crio"]))
    assert missing.returncode == 1
    assert "crio is not installed" in missing.stdout


def test_a_host_with_podman_and_containerd_alone_is_provisioned_and_given_back(site: Site) -> None:
    """Debian 13: podman 5 comes with the run, containerd 1.7 is there."""
    host = without_docker(site, "trixie")
    inventory = site.inventory("trixie", **_ENGINES)
    before = host.snapshot()
    planned = gpuprov_succeeds("install", "--hosts", inventory, "--check", "--diff")
    assert '+nvidia = ["/usr/bin/gpuprov-container-runtime"]' in planned.stdout
    assert "restart containerd (its containers go on)" in planned.stdout and "daemon.json" not in planned.stdout
    gpuprov_succeeds("install", "--hosts", inventory)
    assert host.ssh("command -v dockerd", check=False).stdout == ""
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    told = events(gpuprov("verify", "--hosts", inventory, "--json").stdout)
    checks = {event["name"]: event for event in told if event.get("event") == "CheckDone"}
    # The simulated GPUs compute nothing.
    others = {name: check for name, check in checks.items() if check["status"] != "ok"}
    assert set(others) == {"containerd, CUDA kernel", "podman, CUDA kernel"}, others
    for engine in ("containerd", "podman"):
        assert checks[f"{engine}, all GPUs"]["in_container"] == "2 GPUs, every field the same"
        assert checks[f"{engine}, one GPU"]["engine"] == engine
    summaries = [event["summary"] for event in told if event.get("event") == "Finished"]
    assert summaries == ["containers see this host's GPUs: containerd, podman"]
    gpuprov_succeeds("doctor", "--hosts", inventory)
    gpuprov_succeeds("rollback", "--hosts", inventory)
    different = differences(before, host.snapshot())
    # What packages leave behind when they are removed: caches, accounts, configuration that only a purge takes.
    assert not [path for path in different if "nvidia" in path or "gpuprov" in path or "containerd" in path], different
    assert host.ssh("systemctl is-active containerd").stdout == "active\n"


@pytest.mark.long
def test_the_playbook_does_the_same_on_debian_12(site: Site) -> None:
    """podman 4.3, and no containerd."""
    host = without_docker(site, "ops")
    inventory = site.inventory("ops", **_ENGINES)
    done = play("site", inventory)
    assert recap(done, "ops")["failed"] == 0, done.stdout
    assert "containers see this host's GPUs: podman" in done.stdout
    assert recap(play("site", inventory), "ops")["changed"] == 0
    assert host.ssh("command -v dockerd containerd", check=False).stdout == ""


def test_features_cdi_is_switched_on_and_goes_with_the_run(site: Site) -> None:
    """docker 26.1. That devices come by CDI then is tried in test_containers_on_hosts.py."""
    host = site.installed("trixie")
    reads = "docker info --format '{{json .CDISpecDirs}}'"
    assert json.loads(host.ssh("cat /etc/docker/daemon.json").stdout)["features"] == {"cdi": True}
    assert json.loads(host.ssh(reads).stdout) == ["/etc/cdi", "/var/run/cdi"]
    gpuprov_succeeds("rollback", "--hosts", site.inventory("trixie"))
    assert host.ssh("test ! -e /etc/docker/daemon.json && " + reads).stdout == "[]\n"
