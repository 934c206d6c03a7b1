"""Faults on a real host, put into each kind of change: the power cut, the disk full, the network gone.

Afterwards the same command ends as on a host that nothing disturbed: the same files, the same packages, and a second
run has nothing to do.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprov.request import Request, request_to_line
from tests.disk import MEMORY, Disk
from tests.integration.test_install import etc, packages
from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov
from tests.lab.host import Snapshot
from tests.lab.lab import REPOSITORY

pytestmark = [pytest.mark.lab, pytest.mark.root]
_NAME = "main"
_DISK_BYTES = 2 << 30
# ldconfig writes its cache anew; the entries are the same.
_SAME_MEANING = {"/etc/ld.so.cache"}
Stop = dict[str, Any]


class Steps:
    """A run on a host, stop by stop: the journal's lines, `{"sync": true}`, and in the end the Finished event."""

    def __init__(self, site: Site) -> None:
        spec = {
            key.removeprefix("gpuprov_"): site.variables[key] for key in site.variables if key.startswith("gpuprov_")
        }
        line = f"cd {REPOSITORY} && exec .venv/bin/python -m tests.stepping"
        argv = (*site.hosts[_NAME].ssh_argv(), line)
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say(request_to_line(Request("install", spec)))

    def __iter__(self) -> Iterator[Stop]:
        """Yield the stops; the run goes on when the next one is asked for."""
        assert self._process.stdout is not None
        with self._process:
            for line in self._process.stdout:
                stop = json.loads(line)
                yield stop
                if "event" not in stop:
                    self._say("")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


@pytest.fixture
def disk(site: Site) -> Iterator[Disk]:
    """The host's disk, on which it has just booted for the first time."""
    host = site.hosts[_NAME]
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        made = Disk("ext4", Path(folder) / "disk")
        made.make(_DISK_BYTES)
        try:
            with plugged_in(host, made):
                host.reset()
                yield made
        finally:
            host.storage = host.directory
            host.reset()


@contextlib.contextmanager
def plugged_in(host: Host, disk: Disk) -> Iterator[None]:
    """Let a host that does not run have this disk for the time of the block."""
    host.kill()
    with disk.mounted() as place:
        host.storage = place
        try:
            yield
        finally:
            host.kill()


def state(host: Host) -> tuple[Snapshot, str]:
    return etc(host), packages(host)


def assert_whole(site: Site, undisturbed: tuple[Snapshot, str], told: str) -> None:
    host = site.hosts[_NAME]
    found = state(host)
    different = {path for path in {*found[0], *undisturbed[0]} if found[0].get(path) != undisturbed[0].get(path)}
    assert different <= _SAME_MEANING, told
    assert found[1] == undisturbed[1], told
    assert host.ssh("find / -xdev -name '.*.gpuprov' -not -path '/proc/*'").stdout == "", told
    assert "0 changes" in gpuprov("install", "--hosts", site.inventory(_NAME)).stdout, told


def test_after_a_power_cut_the_host_boots_and_the_next_run_ends_as_an_undisturbed_one(site: Site, disk: Disk) -> None:
    """Cut where all of a change is made, and only what was synced by itself is on the disk."""
    host = site.hosts[_NAME]
    cuts: dict[str, Disk] = {}
    kind = ""
    for stop in Steps(site):
        kind = stop.get("kind", kind)
        if "sync" in stop and kind in ("InstallPackages", "InstallDriver", "InstallRuntime", "ReconfigureDocker"):
            cuts.setdefault(kind, disk.cut(kind))
    assert stop["exit_code"] == 0, stop
    undisturbed = state(host)
    for kind, cut in cuts.items():
        with plugged_in(host, cut):
            host.boot_again()
            done = gpuprov("install", "--hosts", site.inventory(_NAME))
            assert done.returncode == 0, f"{kind}:\n{done.stdout}"
            assert "an earlier run was cut off in" in done.stdout
            assert_whole(site, undisturbed, kind)
    assert len(cuts) == 4
