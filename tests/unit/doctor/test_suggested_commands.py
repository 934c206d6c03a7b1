"""What to type differs by distribution: package managers, headers, initramfs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.doctor.suggested_commands import (
    firmware_setup,
    gpuprov_install,
    headers_package,
    list_gpus,
    rebuild_initramfs,
    reinstall_packages,
)
from gpuprov.machine.machine import OperatingSystem
from gpuprov.protocol.spec import HostSpec
from tests.unit.doctor.host import examined, healthy, with_driver, with_kernel

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def x(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostSnapshot]:
    yield examined(healthy(tmp_path_factory.mktemp("host")))


def on(x: HostSnapshot, name: str, version: str, manager: str, kernel: str) -> HostSnapshot:
    os = OperatingSystem(name, version, "", (), name)
    host = replace(x.host, os=os, packages=replace(x.host.packages, manager=manager))
    return with_kernel(replace(x, host=host), release=kernel)


@pytest.mark.parametrize(
    ("name", "version", "manager", "kernel", "headers", "again", "initramfs"),
    [
        ("debian", "12", "apt", "6.1.0-13-amd64", "apt-get install -y linux-headers-6.1.0-13-amd64",
         "apt-get install -y --reinstall p", "update-initramfs -u -k all"),
        ("rocky", "9.5", "dnf", "5.14.0-503.14.1.el9_5.x86_64",
         "dnf install -y kernel-devel=5.14.0-503.14.1.el9_5.x86_64 kernel-headers", "dnf reinstall -y p",
         "dracut --force --regenerate-all"),
        ("opensuse-leap", "15.6", "zypper", "6.4.0-150600.23.25-default", "zypper install -y kernel-default-devel",
         "zypper install -y --force p", "dracut --force --regenerate-all"),
        ("void", "1", "", "6.6.1_1", "apt-get install -y linux-headers-6.6.1_1", "apt-get install -y --reinstall p",
         "update-initramfs -u -k all"),
    ],
)  # fmt: skip
def test_packages(
    x: HostSnapshot, name: str, version: str, manager: str, kernel: str, headers: str, again: str, initramfs: str
) -> None:
    there = on(x, name, version, manager, kernel)
    assert headers_package(there).startswith(headers)
    assert reinstall_packages(there, "p") == again
    assert rebuild_initramfs(there) == initramfs


def test_a_held_package_is_reinstalled_in_its_version(x: HostSnapshot) -> None:
    """Without it, apt takes the newest: `Held packages were changed and -y was used`."""
    there = on(x, "debian", "12", "apt", "6.1.0-13-amd64")
    packages = replace(there.host.packages, installed={"p": "1.0-1", "q": "2"}, held=frozenset({"p"}))
    there = replace(there, host=replace(there.host, packages=packages))
    assert reinstall_packages(there, "p", "q") == "apt-get install -y --reinstall p=1.0-1 q"


def test_an_installation_names_the_driver_where_the_inventory_does_not(x: HostSnapshot) -> None:
    plain = replace(x, spec=HostSpec())
    assert gpuprov_install(plain) == "gpuprov install -e gpuprov_driver_version=550.163.01"
    assert gpuprov_install(replace(x, spec=HostSpec(driver_version="580.95.05"))) == "gpuprov install"
    assert gpuprov_install(replace(x, spec=HostSpec(driver="packages"))) == "gpuprov install"
    # A version means the .run file, which is refused over packages.
    assert gpuprov_install(replace(plain, host=replace(x.host, driver_packaged="libcuda1"))) == "gpuprov install"
    nothing = with_driver(plain, kernel_version="", library_version="")
    assert gpuprov_install(nothing) == "gpuprov install"


def test_only_efi_firmware_is_told_to_show_its_setup(x: HostSnapshot) -> None:
    assert firmware_setup(with_kernel(x, secure_boot="disabled")) == "systemctl reboot --firmware-setup  #"
    bios = firmware_setup(with_kernel(x, secure_boot="no-efi"))
    assert bios == "systemctl reboot  # and in the firmware's setup:"


def test_the_bus_is_listed_by_what_the_host_has(x: HostSnapshot) -> None:
    assert list_gpus(replace(x, programs={"lspci": "/usr/bin/lspci"})) == "lspci -d 10de:"
    assert list_gpus(replace(x, programs={})).startswith("grep -l 0x10de /sys/bus/pci/devices/")
