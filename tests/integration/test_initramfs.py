"""nouveau kept out of real images of a real kernel package, by Debian's initramfs-tools and by dracut."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.lab import Host, HostRequest
from tests.lab.command_line import GPUPROV
from tests.lab.lab import REPOSITORY, free_lab

pytestmark = [pytest.mark.lab, pytest.mark.root]
_BLACKLIST = "/etc/modprobe.d/gpuprov-nouveau.conf"
# A host of the lab has no kernel of its own: the step is told that it has.
_KEEP_OUT = """
from dataclasses import replace
from gpuprov.driver import nouveau
from gpuprov.core.apply import apply_changes
from gpuprov.protocol.errors import GpuprovError
from gpuprov.facts.host import gather
from gpuprov.core.journal import new_journal
from gpuprov.protocol.spec import parse_spec
from gpuprov.core.system import System
from gpuprov.plan.context import PlanContext

system = System()
facts = gather(system)
facts = replace(facts, kernel=replace(facts.kernel, container="", takes_modules=True))
changes = nouveau.plan(PlanContext(facts, parse_spec({"driver_version": "550.163.01"})).driver)
journal = new_journal(system, "install")
try:
    apply_changes(changes, system, journal, lambda event: None)
    print("changes:", *(change.summary() for change in changes))
except GpuprovError as error:
    print("error:", error)
journal.end("done")
"""

_NEXT_KERNEL = """
from gpuprov.machine.distros import distribution_of, next_kernel_headers
from gpuprov.machine.machine import gather_os
from gpuprov.facts.kernels import gather_kernels
from gpuprov.packages.dpkg import gather_packages
from gpuprov.core.system import System

(kernel,) = gather_kernels(System())
row, installed = distribution_of(gather_os(System())), gather_packages(System()).installed
print(kernel.headers, kernel.module, *next_kernel_headers(row, kernel.release, installed))
"""


@dataclass(frozen=True)
class Maker:
    """What makes images on a host: its package, how nouveau gets into them, how one is listed."""

    package: str
    with_nouveau: str
    lister: str


MAKERS = (
    # Nothing but nouveau and what it needs: an image with all drivers takes minutes.
    Maker(
        "initramfs-tools",
        "sed -i s/^MODULES=.*/MODULES=list/ /etc/initramfs-tools/initramfs.conf;"
        "echo nouveau >> /etc/initramfs-tools/modules",
        "lsinitramfs",
    ),
    Maker(
        "dracut",
        "printf '%s\\n' hostonly=no compress=cat 'add_drivers+=\" nouveau \"' "
        "'omit_dracutmodules+=\" systemd network lvm mdraid kernel-modules kernel-network-modules \"' "
        "> /etc/dracut.conf.d/lab.conf",
        "lsinitrd",
    ),
)


@pytest.fixture(scope="module", params=MAKERS, ids=lambda maker: maker.package)
def maker(request: pytest.FixtureRequest) -> Maker:
    found = request.param
    assert isinstance(found, Maker)
    return found


@pytest.fixture(scope="module")
def host(maker: Maker) -> Iterator[Host]:
    """A Debian host with a kernel package whose initramfs holds nouveau."""
    with free_lab() as lab:
        (made,) = lab.up([HostRequest("image", gpus=0, bind=(str(REPOSITORY),), archive=True)])
        install = "export DEBIAN_FRONTEND=noninteractive; apt-get update && apt-get install -y --no-install-recommends"
        made.ssh(f"{install} {maker.package}", timeout=300)
        made.ssh(maker.with_nouveau)
        # The kernel's package builds its image: once, and with little in it.
        made.ssh(f"{install} linux-image-amd64", timeout=600)
        yield made


def image(host: Host) -> str:
    return host.ssh("ls /boot/initrd.img-*").stdout.strip()


def listing(host: Host, maker: Maker) -> str:
    return host.ssh((maker.lister, image(host)), timeout=300).stdout


def keep_out(host: Host) -> str:
    return host.ssh((f"{REPOSITORY}/.venv/bin/python", "-c", _KEEP_OUT), timeout=600).stdout


def harmless(found: str) -> bool:
    """Say whether an image with these files can't load nouveau."""
    return _BLACKLIST[1:] in found or "/nouveau.ko" not in found


def test_the_image_is_made_harmless_and_rollback_brings_the_old_one_back(host: Host, maker: Maker) -> None:
    assert not harmless(listing(host, maker))
    done = keep_out(host)
    kernel = image(host).partition("initrd.img-")[2]
    assert f"rebuild the initramfs of {kernel}" in done
    assert harmless(listing(host, maker))
    assert keep_out(host) == "changes:\n"
    host.ssh(f"{GPUPROV} rollback")  # the empty run
    host.ssh(f"{GPUPROV} rollback", timeout=600)
    assert host.ssh("find /etc -name 'gpuprov-nouveau*'").stdout == ""
    assert not harmless(listing(host, maker))


def test_a_kernel_package_without_headers_and_module_is_seen_as_that(host: Host) -> None:
    done = host.ssh((f"{REPOSITORY}/.venv/bin/python", "-c", _NEXT_KERNEL))
    assert done.stdout == "False False linux-headers-amd64\n"
    # The name is a package's, not a guess of ours.
    assert "linux-headers-amd64" in host.ssh("apt-cache show linux-headers-amd64").stdout


# By a hook of initramfs-tools.
@pytest.mark.only(maker=MAKERS[0])
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
