"""A rolling driver upgrade over four real hosts: drained one batch after the other, and one drain fails."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.files import put
from tests.integration.test_ansible import play, play_succeeds
from tests.lab.drivers import driver_variables, load_driver
from tests.lab.fixtures import DRIVER, Site, gpuprov, gpuprov_started, gpuprov_succeeds
from tests.lab.shell import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.slow]
OLD = "535.261.03"
HOSTS = ("main", "twin", "bullseye", "trixie")
# It plays a scheduler: it writes down what it is asked, and refuses the hosts that a file names.
_SCRIPT = """#!/bin/sh
echo "$1 $2" >> {folder}/calls
if [ "$1" = drain ] && grep -qx "$2" {folder}/refused; then echo "error: $2 has a pod that may not go" >&2; exit 1; fi
"""


def inventory(site: Site, version: str, **more: Any) -> Path:
    """Write an inventory that asks for a driver, which the hosts' kernel has already: it is the container host's."""
    for name in HOSTS:
        load_driver(site.hosts[name], version)
    without = {"gpuprov_packages": None, "gpuprov_repositories": None}
    return site.inventory(*HOSTS, **driver_variables(site.lab, version), **{**without, **more})


def driver(site: Site, name: str) -> str:
    return site.hosts[name].ssh("ls /usr/lib/x86_64-linux-gnu/libcuda.so.*.*").stdout.strip().rpartition(".so.")[2]


def test_one_drain_fails_and_the_fleet_goes_on(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script, calls, refused = (tmp_path / name for name in ("scheduler", "calls", "refused"))
    put(script, _SCRIPT.format(folder=tmp_path), 0o700)
    refused.write_text("bullseye\n")
    calls.write_text("")
    words = ("--before-host", f"{script} drain {{host}}", "--after-host", f"{script} undrain {{host}}")

    # Four bare hosts: no container can run there, so nobody is drained.
    first = gpuprov("install", "--hosts", inventory(site, OLD), *words, timeout=600)
    assert (first.returncode, calls.read_text()) == (0, ""), first.stdout

    hosts = inventory(site, DRIVER)
    foreseen = gpuprov_succeeds("install", "--hosts", hosts, "--check", *words)
    assert f"would run before the changes: {script} drain twin" in foreseen.stdout
    assert calls.read_text() == ""

    rolled = gpuprov("install", "--hosts", hosts, "--serial", "2", "--max-fail", "1", *words, timeout=600)
    assert rolled.returncode == 1, rolled.stdout
    assert "error: bullseye has a pod that may not go" in rolled.stdout
    assert "drain failed: bullseye" in rolled.stdout.splitlines()[-1]
    order = calls.read_text().splitlines()
    assert sorted(order) == sorted([f"drain {name}" for name in HOSTS]
                                   + [f"undrain {name}" for name in HOSTS if name != "bullseye"])  # fmt: skip
    # An inventory in YAML is sorted by name here, so these two are the first batch.
    assert {line.split()[1] for line in order[:3]} == {"bullseye", "main"}
    assert {name: driver(site, name) for name in HOSTS} == {**dict.fromkeys(HOSTS, DRIVER), "bullseye": OLD}

    kept = json.loads(gpuprov("report", "--json").stdout)
    assert {one["host"]: one["drain"]["state"] for one in kept["results"]} == {
        **dict.fromkeys(HOSTS, "undrained"), "bullseye": "failed"
    }  # fmt: skip

    # The same command again, once the pod is gone: only the host that is left is drained.
    refused.write_text("")
    calls.write_text("")
    gpuprov_succeeds("install", "--hosts", hosts, *words, timeout=600)
    assert calls.read_text().splitlines() == ["drain bullseye", "undrain bullseye"]
    assert driver(site, "bullseye") == DRIVER


_HANGING = """#!/bin/sh
if [ "$1" = undrain ] && [ -e {folder}/hold ]; then
  : > {folder}/held; while [ -e {folder}/hold ]; do sleep 0.1; done; exit 1
fi
echo "$1 $2" >> {folder}/calls
"""


def test_run_resumes_after_a_killed_controller(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when the first of two hosts is done and still drained, and the second has not begun."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script, calls, hold = (tmp_path / name for name in ("scheduler", "calls", "hold"))
    put(script, _HANGING.format(folder=tmp_path), 0o700)
    hold.write_text("")
    gpuprov_succeeds("install", "--hosts", inventory(site, DRIVER), "--limit", "main,twin", timeout=600)
    words = (
        "install", "--hosts", inventory(site, OLD), "--limit", "main,twin", "--serial", "1",
        "--window", "00:00-24:00 UTC",
        "--before-host", f"{script} drain {{host}}", "--after-host", f"{script} undrain {{host}}",
    )  # fmt: skip
    with gpuprov_started(*words) as run:
        wait_for("the command after the change", (tmp_path / "held").exists, 300)
        run.kill()
    hold.unlink()
    assert calls.read_text().splitlines() == ["drain main"]
    assert (driver(site, "main"), driver(site, "twin")) == (OLD, DRIVER)

    again = gpuprov_succeeds(*words, timeout=600)
    assert "was cut off: gpuprov install" in again.stdout and "; window: 00:00-24:00 UTC" in again.stdout
    assert "its order: batch 1 of 2: main; batch 2 of 2: twin" in again.stdout
    assert "main is drained since" in again.stdout and "this run undrains it once verify is green" in again.stdout
    assert calls.read_text().splitlines() == ["drain main", "undrain main", "drain twin", "undrain twin"]
    assert driver(site, "twin") == OLD
    assert list((tmp_path / "state/gpuprov/drains").iterdir()) == []


# A package that breaks the host for as long as it is there.
_BREAKS = """cat > /etc/apt/apt.conf.d/99site <<'END'
DPkg::Post-Invoke {"if dpkg -s site-gpu-tools 2>&1 | grep -q 'ok installed'; then mv /usr/bin/nvidia-smi /root/; \
elif [ -e /root/nvidia-smi ]; then mv /root/nvidia-smi /usr/bin/; fi";};
END"""


def test_a_canary_that_is_not_green_goes_back(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    host = site.hosts["main"]
    gpuprov_succeeds("install", "--hosts", inventory(site, DRIVER), "--limit", "main")
    host.ssh(_BREAKS)
    before = host.ssh("dpkg-query --show; cat /etc/docker/daemon.json").stdout
    window = ("--window", "00:00-24:00 UTC")
    words = ("--hosts", site.inventory("main", "twin"), "--canary", "main", "--rollback-on-failure", *window)
    failed = gpuprov("install", *words, timeout=600)
    assert failed.returncode == 1, failed.stdout
    assert "the host was rolled back, and verify is green" in failed.stdout
    assert host.ssh("dpkg-query --show; cat /etc/docker/daemon.json").stdout == before
    kept = json.loads(gpuprov("report", "--json").stdout)["results"]
    assert [(one["host"], one["rolled_back"], one["begun"]) for one in kept] == [
        ("main", "verified", True), ("twin", "", False)
    ]  # fmt: skip
    host.ssh("rm /etc/apt/apt.conf.d/99site")
    done = gpuprov("install", *words, "--limit", "main", timeout=600)
    assert done.returncode == 0 and "verifying the changes" in done.stdout, done.stdout


# The same, whatever driver is installed; when the package goes, the container host has its former driver again.
_HIDES_SMI = """cat > /etc/apt/apt.conf.d/99site <<'END'
DPkg::Post-Invoke {{"if dpkg -s site-gpu-tools 2>&1 | grep -q 'ok installed'; then \
ln -sf /bin/false /usr/local/bin/nvidia-smi; elif [ -e /usr/local/bin/nvidia-smi ]; then rm /usr/local/bin/nvidia-smi; \
sed -i s/{new}/{old}/ /usr/lib/simgpu/proc/driver/nvidia/version; fi";}};
END"""


def test_a_playbook_takes_back_a_driver_that_is_not_green(site: Site) -> None:
    host = site.hosts["main"]
    gpuprov_succeeds("install", "--hosts", inventory(site, OLD), "--limit", "main", timeout=600)
    # Another test's package: it is to be installed beside the new driver.
    host.ssh("dpkg --purge site-gpu-tools")
    state = "dpkg-query --show; cat /etc/docker/daemon.json /etc/cdi/nvidia.json; sha256sum /usr/lib/*/libcuda.so.1"
    before = host.ssh(state).stdout
    host.ssh(_HIDES_SMI.format(new=DRIVER, old=OLD))
    more = {name: site.variables[name] for name in ("gpuprov_packages", "gpuprov_repositories")}
    words = ("--limit", "main", "-e", "gpuprov_play_rollback_on_failure=true")
    failed = play("upgrade", inventory(site, DRIVER, **more), *words)
    assert failed.returncode != 0, failed.stdout
    assert "rolled back, and verify is green now; before: " in failed.stdout, failed.stdout
    assert host.ssh(state).stdout == before
    host.ssh("rm /etc/apt/apt.conf.d/99site")
    play_succeeds("upgrade", inventory(site, DRIVER, **more), *words)
    assert driver(site, "main") == DRIVER


_TASKS = """
- name: Tell the scheduler
  ansible.builtin.command: {script} {verb} {{{{ inventory_hostname }}}}
  delegate_to: localhost
  become: false
  changed_when: true
"""


def test_a_playbooks_hooks_do_the_same(site: Site, tmp_path: Path) -> None:
    """Nothing is drained while nothing stops; a host whose drain fails is not changed."""
    script, calls, refused = (tmp_path / name for name in ("scheduler", "calls", "refused"))
    put(script, _SCRIPT.format(folder=tmp_path), 0o700)
    refused.write_text("")
    calls.write_text("")
    words = []
    for verb, name in (("drain", "before"), ("undrain", "after")):
        (tmp_path / f"{verb}.yml").write_text(_TASKS.format(script=script, verb=verb))
        words += ["-e", f"gpuprov_play_{name}_host_tasks={tmp_path / verb}.yml"]
    limit = ("--limit", "main", *words)
    first = play("site", inventory(site, DRIVER), *limit)
    assert (first.returncode, calls.read_text()) == (0, ""), first.stdout
    hosts = inventory(site, OLD)
    refused.write_text("main\n")
    failed = play("site", hosts, *limit)
    assert failed.returncode != 0 and calls.read_text() == "drain main\n", failed.stdout
    assert driver(site, "main") == DRIVER
    refused.write_text("")
    play_succeeds("site", hosts, *limit)
    assert calls.read_text().splitlines() == ["drain main", "drain main", "undrain main"]
    assert driver(site, "main") == OLD
