"""gpuprov_watch on a real host: the timer's service measures, changes nothing, and everything goes with `off`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.test_install import etc
from tests.lab import Host
from tests.lab.fixtures import DRIVER, Site, gpuprov, gpuprov_succeeds

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.slow]
_LOST_GPU = '{"uuid":"GPU-9","model":"H100","bus_id":"0000:9b:00.0"}'
METRICS = "/var/lib/prometheus/node-exporter/gpuprov.prom"
PLACES = ("/etc/systemd/system/gpuprov-watch.service", "/etc/systemd/system/gpuprov-watch.timer",
          "/etc/systemd/system/timers.target.wants/gpuprov-watch.timer", "/usr/lib/gpuprov/watch.pyz",
          "/var/lib/gpuprov/watch.json", "/var/lib/systemd/timers/stamp-gpuprov-watch.timer", METRICS)  # fmt: skip


@pytest.fixture(scope="module")
def watched(site: Site) -> Iterator[tuple[Host, Path]]:
    host = site.installed("main")
    inventory = site.inventory("main", gpuprov_watch="daily")
    refused = gpuprov("install", "--hosts", inventory)
    assert refused.returncode == 1 and "there is no folder /var/lib/prometheus/node-exporter" in refused.stdout
    host.ssh("mkdir -p /var/lib/prometheus/node-exporter")
    done = gpuprov("install", "--hosts", inventory)
    assert done.returncode == 0 and "1 change" in done.stdout, done.stdout
    yield host, inventory


def measured(host: Host) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Let the service run; return name → labels → value."""
    host.ssh("systemctl start gpuprov-watch.service")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(host.ssh(f"cat {METRICS}").stdout):
        found[family.name] = {tuple(sorted(one.labels.items())): one.value for one in family.samples}
    return found


def journal(host: Host) -> str:
    return host.ssh("journalctl --no-pager --output=cat -u gpuprov-watch.service").stdout


def test_a_second_run_changes_nothing_and_the_timer_waits(watched: tuple[Host, Path]) -> None:
    host, inventory = watched
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    assert host.ssh("systemctl is-active gpuprov-watch.timer").stdout.strip() == "active"
    assert host.ssh("stat -c '%a %U' /var/lib/gpuprov/watch.json").stdout.split() == ["600", "root"]
    assert host.ssh("systemd-analyze verify /etc/systemd/system/gpuprov-watch.service 2>&1").stdout == ""


def test_the_service_measures_and_sees_what_breaks(watched: tuple[Host, Path]) -> None:
    host, _ = watched
    before = etc(host)
    good = measured(host)
    label = (("host", "main"),)
    assert good["gpuprov_host_success"] == {label: 1.0}, journal(host)
    assert good["gpuprov_host_changes_pending"] == {label: 0.0}, journal(host)
    assert good["gpuprov_gpus"] == {label: 2.0}
    (versions,) = good["gpuprov_version_info"]
    assert dict(versions)["driver"] == DRIVER
    assert set(good["gpuprov_check_success"].values()) == {1.0}
    assert etc(host) == before
    host.ssh("echo '{}' > /etc/docker/daemon.json && systemctl restart docker")
    host.ssh(f"sed -i 's/\"gpus\":\\[/&{_LOST_GPU},/' /var/lib/gpuprov/remembered.json")
    bad = measured(host)
    of_memory = {
        value for labels, value in bad["gpuprov_check_success"].items() if ("check", "remembered GPUs") in labels
    }
    assert of_memory == {0.0} and "2 today: GPU-9 (H100 at 0000:9b:00.0) is gone" in journal(host)
    assert bad["gpuprov_host_success"] == {label: 0.0}
    assert bad.get("gpuprov_host_changes_pending") == {label: 1.0}, journal(host)
    assert 0.0 in bad["gpuprov_check_success"].values()


def test_it_skips_while_a_run_holds_the_host(watched: tuple[Host, Path]) -> None:
    host, _ = watched
    before = host.ssh(f"cat {METRICS}").stdout
    host.ssh("flock /run/gpuprov.lock systemctl start gpuprov-watch.service")
    assert host.ssh(f"cat {METRICS}").stdout == before
    assert "skipped: a gpuprov run holds this host" in journal(host)


def test_the_doctor_names_a_watch_that_fails(watched: tuple[Host, Path]) -> None:
    host, inventory = watched
    host.ssh("mv /var/lib/prometheus /var/lib/away")
    assert host.ssh("systemctl start gpuprov-watch.service", check=False).returncode != 0
    said = gpuprov("doctor", "--hosts", inventory).stdout
    host.ssh("mv /var/lib/away /var/lib/prometheus")
    assert "gpuprov-watch.service has failed" in said


def test_off_removes_everything_and_rollback_brings_the_timer_back(watched: tuple[Host, Path], site: Site) -> None:
    host, _ = watched
    off = site.inventory("main")
    gpuprov_succeeds("install", "--hosts", off)
    assert [path for path in PLACES if host.ssh(f"test -e {path}", check=False).returncode == 0] == []
    gpuprov_succeeds("rollback", "--hosts", off)
    assert host.ssh("systemctl is-active gpuprov-watch.timer").stdout.strip() == "active"
    host.ssh("systemctl start gpuprov-watch.service")
    gpuprov_succeeds("uninstall", "--hosts", off)
    assert [path for path in PLACES if host.ssh(f"test -e {path}", check=False).returncode == 0] == []
