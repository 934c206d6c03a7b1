"""The disk of a virtual machine: the lab's bookworm with a Debian kernel, GPUs on its PCI bus, and no headers yet.

Built once, into the cache; its name holds the digest of its recipe. Beside it lies a disk with a boot loader, and the
key to log in with. The packages that a test installs, a newer kernel among them, are in a repository inside: tests
need no network, and the mirror's next kernel does not change them.
"""

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import simgpu
from tests.lab.base import base_path, build_base
from tests.lab.shell import LabError, run
from tests.lab.sources import copy_network_configuration

_RELEASE = "bookworm"
_SIZE = "6G"
_BUILD_SECONDS = 900
_PACKAGES = "/var/lib/lab-packages"
# The modules that the guest's own devices and docker need. A kernel has a thousand more, and without KVM each depmod,
# each coldplug and each unpacking of them takes half a minute.
_MODULES = "virtio_pci virtio_blk virtio_net virtio_rng overlay fuse loop autofs4 configfs evdev"
# What an initramfs does without: udev (the disk's modules are loaded by name), keyboards, swap, other disks.
_NOT_IN_INITRAMFS = (
    "hooks/dmsetup hooks/fsck hooks/keymap hooks/resume hooks/thermal hooks/udev scripts/init-top/all_generic_ide "
    "scripts/init-top/keymap scripts/init-top/udev scripts/init-bottom/udev scripts/local-premount/resume"
)
# The kernel before the newest is the one that boots, so that there is one to upgrade to. Compilers, dkms and what the
# headers of all flavours share are there: unpacking them proves nothing, and takes minutes in a virtual machine. So
# does uncompressing packages.
_INSTALL = f"""
set -eu
export DEBIAN_FRONTEND=noninteractive
mount -t proc none /proc
apt-get -qq update
kernels=$(apt-cache pkgnames linux-image-6.1.0- | grep -E -- '-[0-9]+-cloud-amd64$' | sort -V | tail -n 2)
old=$(echo "$kernels" | head -n 1)
[ "$old" != "$(echo "$kernels" | tail -n 1)" ]
apt-get -qq install --no-install-recommends udev initramfs-tools gcc make libc6-dev dkms kmod libtirpc3 > /dev/null
printf 'MODULES=list\nCOMPRESS=gzip\nCOMPRESSLEVEL=1\n' > /etc/initramfs-tools/conf.d/lab
printf 'virtio_pci\nvirtio_blk\n' >> /etc/initramfs-tools/modules
cd /usr/share/initramfs-tools
rm {_NOT_IN_INITRAMFS}
mkdir -p {_PACKAGES}/partial
apt-get -qq install --no-install-recommends --download-only -o Dir::Cache::archives={_PACKAGES} "$old" \
    "linux-headers-${{old#linux-image-}}" linux-image-cloud-amd64 linux-headers-cloud-amd64 apparmor > /dev/null
cd {_PACKAGES}
rmdir partial && rm -f lock
shared=$(ls linux-kbuild-*.deb linux-compiler-*.deb linux-headers-*-common_*.deb)
dpkg --install $shared > /dev/null
rm $shared
for package in *.deb; do
    dpkg-deb --raw-extract "$package" /repacked
    if [ -d /repacked/lib/modules/*/kernel ]; then
        kernel=$(ls /repacked/lib/modules)
        ls "/repacked/lib/modules/$kernel" > /before
        depmod -b /repacked "$kernel"
        for module in {_MODULES}; do modprobe -d /repacked -S "$kernel" --show-depends $module; done > /needed
        find /repacked/lib/modules -name '*.ko' | while read -r file; do
            grep -qF " $file" /needed || rm "$file"
        done
        ls "/repacked/lib/modules/$kernel" | grep -vxF -f /before | sed "s,^,/repacked/lib/modules/$kernel/," | xargs rm
    fi
    dpkg-deb -Znone --build /repacked "$package" > /dev/null
    rm -r /repacked
done
rm /before /needed
dpkg --install "$old"_*.deb > /dev/null
rm "$old"_*.deb
# What dkms does in its first build.
openssl req -new -x509 -nodes -days 36500 -subj "/CN=DKMS module signing key" -newkey rsa:2048 \
    -keyout /var/lib/dkms/mok.key -outform DER -out /var/lib/dkms/mok.pub 2> /dev/null
# To compile the profiles of two programs that no test runs takes half a minute.
mkdir -p /etc/apparmor.d/disable
ln -s ../lsb_release ../nvidia_modprobe /etc/apparmor.d/disable/
echo force-unsafe-io > /etc/dpkg/dpkg.cfg.d/lab
systemctl -q mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
    systemd-timesyncd.service systemd-binfmt.service getty@tty1.service
apt-get clean
rm -rf /var/lib/apt/lists/*
"""
# Built where the headers are, which the disk itself has not: the newer kernel needs its GPUs too. What is built lies
# outside: `clean` takes all modules away that are below.
_BUILD_MODULES = f"""
set -eu
mount -t proc none /proc
dpkg --unpack --force-depends {_PACKAGES}/linux-headers-*-cloud-amd64_*.deb > /dev/null 2>&1
for build in /lib/modules/*/build; do
    kernel=${{build#/lib/modules/}}; kernel=${{kernel%/build}}
    make -s -C "$build" M=/machine clean modules >&2
    mkdir -p "/built/$kernel"
    cp /machine/*.ko "/built/$kernel/"
done
"""
_FILES = {
    "etc/hostname": "metal\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 metal\n",
    "etc/fstab": "/dev/vda / ext4 defaults 0 0\n",
    "etc/systemd/network/10-lab.network": "[Match]\nName=en*\n\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n",
    "etc/apt/sources.list": f"deb [trusted=yes] file:{_PACKAGES} ./\n",
    "etc/modules-load.d/machine.conf": "simpci\n",
    # No test gives a container a network, and every start of docker would set up forty rules for it.
    "etc/docker/daemon.json": '{"bridge": "none", "iptables": false, "ip6tables": false}\n',
    # The default is post-quantum, which costs each connection a second without KVM.
    "etc/ssh/sshd_config.d/lab.conf": "KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org\n",
}
# The links in / lead to the kernel that was installed last: what Debian's own configuration of grub would choose.
_GRUB = """search --no-floppy --file --set=root /vmlinuz
linux /vmlinuz root=/dev/vda rootfstype=ext4 ro console=ttyS0 quiet mitigations=off
initrd /initrd.img
boot
"""
_GRUB_MODULES = ("biosdisk", "ext2", "linux", "search", "search_fs_file", "boot")
_GRUB_FILES = Path("/usr/lib/grub/i386-pc")


def image_path(cache: Path) -> Path:
    """Return the folder with the disks and the key, there or not."""
    recipe = (base_path(cache, _RELEASE).name, _INSTALL, _BUILD_MODULES, _FILES, _GRUB, simgpu.machine_sources(), _SIZE)
    return cache / f"vm-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]}"


def build_image(cache: Path, tell: Callable[[str], None]) -> Path:
    """Return the folder with `disk`, `boot` and `key`, building them if the cache lacks them."""
    place = image_path(cache)
    base = build_base(cache, _RELEASE, tell)
    with (cache / "vm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return place
        tell("building the disk of a virtual machine (about a minute, once)")
        for stale in cache.glob("vm-*"):
            shutil.rmtree(stale)
        half = cache / "building-vm"
        _remove(half)
        result = half / "result"
        result.mkdir(parents=True)
        _build(base, half, result)
        result.rename(place)
        _remove(half)
    return place


def _build(base: Path, half: Path, result: Path) -> None:
    with _overlay(half / "system", base) as root:
        copy_network_configuration(root, _RELEASE)
        _in_root(root, _INSTALL)
        packages = root / _PACKAGES.lstrip("/")
        index = run(("sh", "-c", 'cd "$1" && dpkg-scanpackages --multiversion . 2>/dev/null', "sh", str(packages)))
        (packages / "Packages").write_text(index)
    system = f"{half}/system/upper:{base}"
    with _overlay(half / "modules", system) as root:
        (root / "machine").mkdir()
        for name, text in simgpu.machine_sources().items():
            (root / "machine" / name).write_text(text)
        _in_root(root, _BUILD_MODULES)
        shutil.copytree(root / "built", half / "built")
    with _overlay(half / "final", system) as root:
        _finish(root, half / "built", result / "key")
        run(("truncate", "--size", _SIZE, str(result / "disk")))
        features = ("-O", "^has_journal", "-E", "lazy_itable_init=1")
        run(("mkfs.ext4", "-q", *features, "-d", str(root), str(result / "disk")), timeout=_BUILD_SECONDS)
    _boot_loader(half, result / "boot")


def _finish(root: Path, modules: Path, key: Path) -> None:
    """Give the file system its modules, its key, its network."""
    for folder in modules.iterdir():
        shutil.copytree(folder, root / "lib/modules" / folder.name / "extra")
        if (root / f"boot/vmlinuz-{folder.name}").exists():
            run(("chroot", str(root), "depmod", folder.name))
    run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpuprov-lab", "-f", str(key)))
    (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(key.with_suffix(".pub"), root / "root/.ssh/authorized_keys")
    host_key = root / "etc/ssh/ssh_host_ed25519_key"
    run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "metal", "-f", str(host_key)))
    shutil.copyfile(host_key.with_suffix(".pub"), key.with_name("host_key.pub"))
    for name, text in _FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for left in ("etc/resolv.conf", "etc/apt/apt.conf.d/80site"):
        (root / left).unlink()


def _boot_loader(half: Path, place: Path) -> None:
    """Make a disk that boots the kernel of the other one: grub's first sector, the rest of grub behind it."""
    if not _GRUB_FILES.is_dir():
        raise LabError(f"there is no {_GRUB_FILES}; next: make setup")
    (half / "grub.cfg").write_text(_GRUB)
    core = half / "core.img"
    run(("grub-mkimage", "-O", "i386-pc", "-c", str(half / "grub.cfg"), "-o", str(core), "-p", "/", *_GRUB_MODULES))
    content = (_GRUB_FILES / "boot.img").read_bytes() + core.read_bytes()
    place.write_bytes(content.ljust(1 << 20, b"\0"))


@contextlib.contextmanager
def _overlay(directory: Path, lower: Path | str) -> Iterator[Path]:
    for name in ("upper", "work", "root"):
        (directory / name).mkdir(parents=True)
    layers = f"lowerdir={lower},upperdir={directory}/upper,workdir={directory}/work"
    run(("mount", "-t", "overlay", "gpuprov-lab", "-o", layers, str(directory / "root")))
    try:
        yield directory / "root"
    finally:
        run(("umount", "-R", str(directory / "root")))


def _in_root(root: Path, script: str) -> None:
    """Run a script there, in namespaces of its own: its mounts and processes end with it."""
    namespaces = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
    run((*namespaces, "chroot", str(root), "sh", "-c", script), timeout=_BUILD_SECONDS)


def _remove(directory: Path) -> None:
    """Remove what a build that was killed has left, mounts and all."""
    for name in ("system", "modules", "final"):
        run(("sh", "-c", 'mountpoint -q "$1" && umount -R "$1"', "sh", str(directory / name / "root")), check=False)
    if directory.exists():
        shutil.rmtree(directory)
