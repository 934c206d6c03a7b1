"""What a fresh root file system gets before its first boot: address, keys, users, and a simulated GPU's kernel side."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests import simgpu
from tests.lab.base import debian_release
from tests.lab.rpm_repository import BASE, RPM_MACROS, build_package
from tests.lab.shell import run
from tests.lab.sources import copy_network_configuration, source_lines

if TYPE_CHECKING:
    from tests.lab.host import Host

_NETWORK = "[Match]\nName=host0\n\n[Network]\nAddress={address}/24\nGateway={gateway}\n"
# nspawn's own --bind can't reach below /proc, so the host mounts the tree itself, before anything else runs.
_ATTACH_UNIT = """[Unit]
Description=Simulated GPU: what a kernel with the loaded driver shows
DefaultDependencies=no
Before=sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh /usr/lib/simgpu/attach
"""
_OS_RELEASES = Path(__file__).resolve().parents[1] / "data/os-release"
_TREE = "/usr/lib/simgpu"
_SOURCES = "etc/apt/sources.list"
# The default is post-quantum: seven times the processor time for each of the thousands of logins that the tests make.
SSHD_CONFIG = ("etc/ssh/sshd_config.d/lab.conf", "KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org\n")


def prepare(host: Host) -> None:
    """Make the mounted root file system this host's own."""
    root, request = host.root, host.request
    _identity(host)
    copy_network_configuration(root, debian_release(request.release))
    if not request.archive:
        (root / _SOURCES).write_text("")
    if request.os_release:
        rpm_distribution(root, request.os_release)
    if request.user:
        _login_user(host)
    if not request.docker:
        run(("chroot", str(root), "dpkg", "--purge", "docker.io", "containerd", "runc"), timeout=120)
    if request.gpus:
        simulated_gpu(root, request.gpus, request.driver_version)
    if not request.python:
        names = run(("chroot", str(root), "dpkg-query", "--show", "--showformat=${Package}\n", "*python3*")).split()
        run(("chroot", str(root), "dpkg", "--purge", "--force-all", *names))


def add_archive(root: Path, release: str) -> None:
    """Name Debian's archive in apt's sources."""
    (root / _SOURCES).write_text("".join(f"{line}\n" for line in source_lines(debian_release(release))))


def _identity(host: Host) -> None:
    root, keys = host.root, host.directory.parent.parent
    (root / "etc/hostname").write_text(f"{host.name}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
    (root / SSHD_CONFIG[0]).write_text(SSHD_CONFIG[1])
    gateway = host.address.rpartition(".")[0] + ".1"
    network = root / "etc/systemd/network/10-lab.network"
    network.write_text(_NETWORK.format(address=host.address, gateway=gateway))
    authorized = root / "root/.ssh/authorized_keys"
    authorized.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(keys / "id_ed25519.pub", authorized)
    for path in (keys / "host-keys" / host.name).iterdir():
        shutil.copy2(path, root / "etc/ssh" / path.name)


def rpm_distribution(root: Path, os_release: str) -> None:
    """Make the host one of rpm's: it says so, its rpm keeps its database where theirs does, and apt is gone."""
    place = root / "etc/os-release"
    place.unlink()
    shutil.copyfile(_OS_RELEASES / os_release, place)
    (root / "etc/rpm").mkdir(exist_ok=True)
    (root / "etc/rpm/macros.lab").write_text(RPM_MACROS)
    for folder in ("var/lib/rpm", "etc/yum.repos.d", "etc/zypp/repos.d"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for program in ("apt-get", "dpkg", "dpkg-query"):
        (root / "usr/bin" / program).unlink()
    if (root / "usr/bin/dnf5").exists():
        # As Fedora has it; Debian's also keeps a copy of each package.
        (root / "usr/bin/dnf").symlink_to("dnf5")
        (root / "etc/dnf/libdnf5-plugins/local.conf").unlink()
    with tempfile.TemporaryDirectory() as folder:
        package = build_package(BASE, Path(folder))
        shutil.copyfile(package, root / "tmp" / package.name)
    run(("chroot", str(root), "rpm", "-i", "--nosignature", f"/tmp/{package.name}"))
    (root / "tmp" / package.name).unlink()


def _login_user(host: Host) -> None:
    root, request = str(host.root), host.request
    run(("chroot", root, "useradd", "--create-home", "--shell", "/bin/sh", "--groups", "sudo", request.user))
    run(("chroot", root, "chpasswd"), stdin=f"{request.user}:{request.password}\n")
    keys = host.root / f"home/{request.user}/.ssh"
    keys.mkdir(mode=0o700)
    shutil.copyfile(host.root / "root/.ssh/authorized_keys", keys / "authorized_keys")
    run(("chroot", root, "chown", "-R", f"{request.user}:", f"/home/{request.user}/.ssh"))


def simulated_gpu(root: Path, gpus: int, version: str) -> None:
    """Give a root file system what a kernel with the loaded driver shows, and a unit that mounts it."""
    tree = root / _TREE.lstrip("/")
    simgpu.write_kernel_tree(tree, gpus, version)
    nodes = [_node_line(node.path, node.major, node.minor, node.mode) for node in simgpu.device_nodes(gpus)]
    # A machine without PCI (some virtual ones) has no folder to mount over.
    mounts = [
        f"mkdir -p /run/simgpu; [ -d /sys/bus/pci/devices ] || mount --bind {_TREE}/sys/bus /sys/bus",
        f"mount --bind {_TREE}/sys/bus/pci/devices /sys/bus/pci/devices",
        f"mount --bind {_TREE}/proc/driver /proc/driver",
        f"mount --bind {_TREE}/proc/devices /proc/devices",
    ]
    (tree / "attach").write_text("\n".join(["set -eu", *mounts, *nodes, ""]))
    units = root / "etc/systemd/system"
    (units / "simgpu.service").write_text(_ATTACH_UNIT)
    (units / "sysinit.target.wants").mkdir(parents=True, exist_ok=True)
    (units / "sysinit.target.wants/simgpu.service").symlink_to("../simgpu.service")


def _node_line(path: str, major: int, minor: int, mode: int) -> str:
    return f"[ -e {path} ] || {{ mkdir -p {Path(path).parent}; mknod -m {mode:o} {path} c {major} {minor}; }}"
