"""Faults on a real host, put into each kind of change: the power cut, the disk full, the network gone.

Afterwards the same command ends as on a host that nothing disturbed: the same files, the same packages, and a second
run has nothing to do.
"""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprov.protocol.codec import dump
from gpuprov.protocol.request import Request
from tests.disk import MEMORY, Disk
from tests.integration.killed import require_undisturbed
from tests.integration.test_install import etc, packages
from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds
from tests.lab.host import Snapshot
from tests.lab.lab import REPOSITORY

pytestmark = [pytest.mark.lab, pytest.mark.root]
_NAME = "main"
_DISK_BYTES = 2 << 30
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
        self._say(dump(Request("install", spec)))

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
            assert "an earlier run was interrupted in" in done.stdout
            require_undisturbed(host, site.inventory(_NAME), undisturbed, kind)
    assert len(cuts) == 4


def fill(host: Host) -> None:
    """Fill the host's disk to the last byte."""
    disk = os.statvfs(host.storage)
    with (host.storage / "filler").open("ab", buffering=0) as file:
        # Most of it needs no writing.
        with contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(disk.f_bfree * disk.f_frsize - (16 << 20), 1))
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 12))


def make_room(host: Host) -> None:
    (host.storage / "filler").unlink()


def cut_network(host: Host) -> None:
    """From now on, connections to the file server are reset: those that are open, too."""
    host.ssh("iptables -I OUTPUT -p tcp --dport 8000 -j REJECT --reject-with tcp-reset")


def restore_network(host: Host) -> None:
    host.ssh("iptables -D OUTPUT -p tcp --dport 8000 -j REJECT --reject-with tcp-reset")


NETWORK = (cut_network, restore_network)
# In which change, what happens and how it is fixed, and what the error says.
FAULTS = (
    ("FetchRunfile", NETWORK, "can't be reached"),
    ("InstallKey", NETWORK, "can't be reached"),
    ("WriteFile", (fill, make_room), "No space left on device"),
    ("RefreshPackageIndex", NETWORK, "could not be refreshed"),
    ("RefreshPackageIndex", (fill, make_room), "make room"),
    ("InstallPackages", NETWORK, "site-gpu-tools"),
    ("InstallPackages", (fill, make_room), "make room"),
    ("InstallDriver", (fill, make_room), "not enough room"),
    ("PrepareBoot", (fill, make_room), "No space left on device"),
    ("InstallRuntime", (fill, make_room), "No space left on device"),
    ("WriteCdiSpecification", (fill, make_room), "No space left on device"),
    ("ReconfigureDocker", (fill, make_room), "No space left on device"),
)  # fmt: skip


def test_a_fault_in_any_change_is_told_and_the_next_run_goes_on_from_there(site: Site, disk: Disk) -> None:
    """One fault after the other, on the way to one installation, each fixed before the next run."""
    host = site.hosts[_NAME]
    for kind, (hurt, fix), told in FAULTS:
        hurt_in = ""
        if kind == "WriteCdiSpecification":  # With room again, the host may have written it by itself.
            host.ssh(
                "systemctl stop gpuprov-refresh.path gpuprov-changed.service gpuprov-refresh.service; "
                "rm -f /etc/cdi/nvidia.json"
            )
        for stop in Steps(site):
            if not hurt_in and stop.get("kind") == kind and "begin" in stop:
                hurt_in = kind
                hurt(host)
        assert hurt_in == kind, f"{kind}: {stop}"
        fix(host)
        said = json.dumps(stop["problems"])
        assert stop["exit_code"] == 1 and told in said, f"{kind}, {hurt.__name__}: {said}"
        assert host.ssh("docker info --format '{{.ServerVersion}}'").stdout.strip(), kind
    gpuprov_succeeds("install", "--hosts", site.inventory(_NAME))
    found = state(host)
    assert "0 changes" in gpuprov("install", "--hosts", site.inventory(_NAME)).stdout
    host.kill()
    host.storage = host.directory
    host.reset()
    gpuprov_succeeds("install", "--hosts", site.inventory(_NAME))
    require_undisturbed(host, site.inventory(_NAME), found, "after all faults")
