"""nouveau kept out with Debian's own update-initramfs, a real kernel package and real images."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Host, HostRequest, Lab
from tests.lab.fixtures import GPUPROV
from tests.lab.lab import REPOSITORY

pytestmark = [pytest.mark.lab, pytest.mark.root]
_NUMBER = 6
_PACKAGES = "initramfs-tools linux-image-amd64"
_BLACKLIST = "/etc/modprobe.d/gpuprov-nouveau.conf"
# A host of the lab has no kernel of its own: the step is told that it has.
_KEEP_OUT = """
from dataclasses import replace
from gpuprov import nouveau
from gpuprov.apply import apply_changes
from gpuprov.errors import GpuprovError
from gpuprov.facts import gather
from gpuprov.journal import new_journal
from gpuprov.spec import parse_spec
from gpuprov.system import System

system = System()
facts = gather(system)
facts = replace(facts, kernel=replace(facts.kernel, container="", takes_modules=True))
changes = nouveau.plan(facts, parse_spec({"driver_version": "550.163.01"}))
journal = new_journal(system, "install")
try:
    apply_changes(changes, system, journal, lambda event: None)
    print("changes:", *(change.summary() for change in changes))
except GpuprovError as error:
    print("error:", error)
journal.end("done")
"""

_NEXT_KERNEL = """
from gpuprov.distros import distribution_of, next_kernel_headers
from gpuprov.facts import gather_os
from gpuprov.next_kernel import gather_kernels
from gpuprov.packages import gather_packages
from gpuprov.system import System

(kernel,) = gather_kernels(System())
row, installed = distribution_of(gather_os(System())), gather_packages(System()).installed
print(kernel.headers, kernel.module, *next_kernel_headers(row, kernel.release, installed))
"""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A Debian host with a kernel package whose initramfs holds nouveau."""
    lab = Lab(_NUMBER)
    with Path(f"/run/lock/gpuprov-lab{_NUMBER}").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            (made,) = lab.up([HostRequest("metal", gpus=0, bind=(str(REPOSITORY),))])
            install = f"apt-get install -y --no-install-recommends {_PACKAGES}"
            made.ssh(f"export DEBIAN_FRONTEND=noninteractive; apt-get update && {install}", timeout=600)
            # Nothing but nouveau and what it needs: an image with all drivers takes minutes.
            made.ssh("sed -i s/^MODULES=.*/MODULES=list/ /etc/initramfs-tools/initramfs.conf")
            made.ssh("echo nouveau >> /etc/initramfs-tools/modules")
            made.ssh("update-initramfs -u -k all", timeout=300)
            yield made
        finally:
            lab.down()


def image(host: Host) -> str:
    return host.ssh("ls /boot/initrd.img-*").stdout.strip()


def listing(host: Host) -> str:
    return host.ssh(("lsinitramfs", image(host)), timeout=300).stdout


def keep_out(host: Host) -> str:
    return host.ssh((f"{REPOSITORY}/.venv/bin/python", "-c", _KEEP_OUT), timeout=600).stdout


def test_the_image_holds_the_blacklist_and_rollback_takes_it_out_again(host: Host) -> None:
    before = listing(host)
    assert "/nouveau.ko" in before
    assert _BLACKLIST[1:] not in before
    done = keep_out(host)
    kernel = image(host).partition("initrd.img-")[2]
    assert f"rebuild the initramfs of {kernel}" in done
    assert _BLACKLIST[1:] in listing(host)
    assert keep_out(host) == "changes:\n"
    host.ssh(f"{GPUPROV} rollback")  # the empty run
    host.ssh(f"{GPUPROV} rollback")
    assert not (host.root / _BLACKLIST[1:]).exists()
    assert _BLACKLIST[1:] not in listing(host)


def test_a_kernel_package_without_headers_and_module_is_seen_as_that(host: Host) -> None:
    done = host.ssh((f"{REPOSITORY}/.venv/bin/python", "-c", _NEXT_KERNEL))
    assert done.stdout == "False False linux-headers-amd64\n"
    # The name is a package's, not a guess of ours.
    assert "linux-headers-amd64" in host.ssh("apt-cache show linux-headers-amd64").stdout


def test_an_image_that_leaves_the_blacklist_out_is_found_out(host: Host) -> None:
    """As a configuration that leaves /etc/modprobe.d out of the image would."""
    hook = host.root / "etc/initramfs-tools/hooks/zz-forget"
    hook.write_text(f'#!/bin/sh\n[ "$1" = prereqs ] || rm -f "$DESTDIR{_BLACKLIST}"\n')
    hook.chmod(0o755)
    try:
        assert "would still load nouveau at boot" in keep_out(host)
        assert not (host.root / _BLACKLIST[1:]).exists()
    finally:
        hook.unlink()


def test_a_full_boot_says_so_and_changes_nothing(host: Host) -> None:
    """/boot is often a small file system of its own."""
    name = image(host).rpartition("/")[2]
    host.ssh(f"mount -t tmpfs -o size=1m none /boot && : > /boot/{name}")
    try:
        assert "df -h /boot" in keep_out(host)
        assert not (host.root / _BLACKLIST[1:]).exists()
    finally:
        host.ssh("umount /boot")
