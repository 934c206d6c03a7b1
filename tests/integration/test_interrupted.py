"""Runs that are cut off: killed at any moment, disconnected, started twice; the next one ends where it should."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.test_install import etc, packages
from tests.lab import Host
from tests.lab.fixtures import GPUPROV, Site, gpuprov, patience

pytestmark = [pytest.mark.lab, pytest.mark.root]
_KILLS = 10
_KILLED = ("main", "twin")
# What the installer itself dates or what a cut-off run cannot help leaving in other order.
_ORDER = {"/etc/ld.so.cache"}
# Such that it does not match the command that looks for it.
_AGENT = "agent-[0-9a-f]*[.]pyz"


def start(site: Site, host: str) -> subprocess.Popen[str]:
    """Start an installation and return at once."""
    words = ("install", "--hosts", str(site.inventory(host)))
    argv = [str(GPUPROV), *words, *patience(words)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_agent(host: Host) -> None:
    """Wait until the agent's worker is at work."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if host.ssh("ls /var/lib/gpuprov/runs/*.jsonl", check=False).returncode == 0:
            return
    raise AssertionError("the agent did not begin")


def test_killed_at_ten_moments_the_next_run_ends_as_an_undisturbed_one(site: Site) -> None:
    """Two hosts at once: much of a run is waiting."""
    draw = random.Random(20)
    moments = [draw.random() for _ in range(_KILLS)]
    with ThreadPoolExecutor(len(_KILLED)) as pool:
        parts = [moments[index :: len(_KILLED)] for index in range(len(_KILLED))]
        survived = sum(pool.map(lambda name, part: survivals(site, name, part), _KILLED, parts))
    assert survived < _KILLS // 2, "most kills came too late to mean anything"
    assert gpuprov("verify", "--hosts", site.inventory(*_KILLED)).returncode == 0


def survivals(site: Site, name: str, moments: Sequence[float]) -> int:
    """Kill a run on a host at each of these moments, 0 its beginning and 1 its end; return how many were over by then.

    Asserts that the next run ends as an undisturbed one.
    """
    host, inventory = site.hosts[name], site.inventory(name)
    host.reset()
    begun = time.monotonic()
    assert gpuprov("install", "--hosts", inventory).returncode == 0
    seconds = time.monotonic() - begun
    undisturbed = (etc(host), packages(host))
    survived = 0
    for moment in moments:
        host.reset()
        with start(site, name) as process:
            # The first second is the connection's; a kill there would meet no agent.
            time.sleep(1 + moment * (seconds - 1))
            killed = host.ssh(f"pkill -9 -f '{_AGENT}'", check=False).returncode == 0
            process.communicate(timeout=120)
        survived += not killed
        told = f"{name} at {moment:.2f}"
        done = gpuprov("install", "--hosts", inventory)
        assert done.returncode == 0, f"{told}:\n{done.stdout}"
        found = (etc(host), packages(host))
        different = {path for path in {*found[0], *undisturbed[0]} if found[0].get(path) != undisturbed[0].get(path)}
        assert different <= _ORDER, told
        assert found[1] == undisturbed[1], told
        assert host.ssh("find / -xdev -name '.*.gpuprov' -not -path '/proc/*'").stdout == "", told
        assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout, told
    return survived


def test_a_dropped_connection_does_not_end_the_work(site: Site) -> None:
    host = site.hosts["main"]
    host.reset()
    with start(site, "main") as process:
        wait_for_agent(host)
        process.kill()
        process.communicate()
    # As if the network were gone: the server's side of all connections ends too.
    host.ssh("pkill -9 -f 'sshd: root@notty'", check=False)
    deadline = time.monotonic() + 120
    while host.ssh(f"pgrep -f '{_AGENT}'", check=False).returncode == 0 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "0 changes" in gpuprov("install", "--hosts", site.inventory("main")).stdout


def test_the_second_of_two_runs_names_who_holds_the_lock(site: Site) -> None:
    host = site.hosts["main"]
    host.reset()
    with start(site, "main") as first:
        wait_for_agent(host)
        second = gpuprov("install", "--hosts", site.inventory("main"))
        output, _ = first.communicate(timeout=120)
    assert second.returncode == 1
    assert "another gpuprov run holds this host" in second.stdout
    assert "gpuprov install, since" in second.stdout
    assert first.returncode == 0, output


def test_ctrl_c_ends_the_run_and_leaves_no_mess(site: Site) -> None:
    host = site.hosts["main"]
    host.reset()
    with start(site, "main") as process:
        wait_for_agent(host)
        process.send_signal(2)
        output, _ = process.communicate(timeout=120)
    assert "Traceback" not in output
    done = gpuprov("install", "--hosts", site.inventory("main"))
    assert done.returncode == 0, done.stdout
    assert "0 changes" in gpuprov("install", "--hosts", site.inventory("main")).stdout
