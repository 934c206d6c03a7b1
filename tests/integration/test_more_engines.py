"""containerd beside docker on a real host: `install` tells it of the runtime, restarts it once, and takes it back."""

from __future__ import annotations

import pytest

from tests.lab.fixtures import Site, gpuprov

pytestmark = [pytest.mark.lab, pytest.mark.root]
_DUMP = "containerd config dump | grep -c 'BinaryName = .*/usr/bin/gpuprov-container-runtime' || true"


def test_a_real_containerd_is_told_and_docker_lives_on(site: Site) -> None:
    host = site.installed("main")
    before = host.ssh(
        "cat /etc/containerd/config.toml 2>/dev/null | sha256sum; systemctl show -p MainPID docker"
    ).stdout
    assert host.ssh(_DUMP).stdout.strip() == "0"
    inventory = site.inventory("main", gpuprov_engines=["containerd"])
    done = gpuprov("install", "--hosts", inventory)
    assert done.returncode == 0, done.stdout
    assert "restart containerd (its containers go on)" in done.stdout
    assert host.ssh(_DUMP).stdout.strip() == "1"
    assert host.ssh("systemctl is-active containerd docker").stdout.split() == ["active", "active"]
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    assert gpuprov("rollback", "--hosts", inventory).returncode == 0
    after = host.ssh("cat /etc/containerd/config.toml 2>/dev/null | sha256sum; systemctl show -p MainPID docker").stdout
    assert after == before
    missing = gpuprov("install", "--hosts", site.inventory("main", gpuprov_engines=["crio"]))
    assert missing.returncode == 1
    assert "crio is not installed" in missing.stdout
