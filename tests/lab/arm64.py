"""A virtual machine of another architecture: Debian 12 for arm64, emulated by qemu, with one of two kernels.

The kernel has pages of 4 KiB (Debian's cloud kernel) or 16 KiB (from backports). The disk is the same.

Nothing is configured under emulation: packages are unpacked, dpkg's database is written, and the few scripts that
matter are done by hand. The driver's packages lie in a repository inside; apt and dpkg install them in the machine.
"""

import fcntl
import hashlib
import lzma
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath

from tests.lab.prepare import simulated_gpu
from tests.lab.shell import run
from tests.lab.sources import mirrors
from tests.lab.vm import Vm, vm_disk

_SUITE = "bookworm"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SIZE = "3G"
_BUILD_SECONDS = 900
_PACKAGES_FOLDER = "/var/lib/lab-packages"
_SYSTEM = (
    "?essential", "apt", "busybox-static", "crun", "dbus", "glx-diversions", "iproute2", "kmod",
    "linux-image-cloud-arm64", "openssh-server", "podman", "procps", "python3", "runc", "systemd-sysv", "udev",
)  # fmt: skip
# What gpuprov's table of distributions names for Debian 12, without modules: their build takes half an hour here.
DRIVER_PACKAGES = (
    "libcuda1", "nvidia-smi", "nvidia-persistenced", "libnvcuvid1", "libnvidia-encode1", "libnvidia-opticalflow1",
    "libnvidia-cfg1", "nvidia-opencl-icd", "libnvidia-ml1",
)  # fmt: skip
# Debian has no kernel with pages of 64 KiB.
_LARGE_PAGES_KERNEL = "linux-image-arm64-16k"
_LARGE_PAGES_SUITE = f"{_SUITE}-backports"
# Of the disk: one kernel or the other has some of them built in. The rest is for the network and containers.
_FIRST_MODULES = ("ext4", "virtio_pci", "virtio_blk")
_MODULES = (*_FIRST_MODULES, "virtio_net", "virtio_rng", "overlay", "autofs4", "configfs")
# Soft-RoCE: an RDMA device on an Ethernet interface. Cloud kernels lack it.
_RDMA_MODULES = ("rdma_rxe", "crc32_generic")
_INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs devtmpfs /dev
for module in {modules}; do /bin/busybox insmod /$module; done
/bin/busybox mount -t ext4 /dev/vda /root || exec /bin/busybox sh
[ -d /root/{folder} ] || /bin/busybox cp -r /{folder} /root/lib/modules/
/bin/busybox mount --move /dev /root/dev
/bin/busybox umount /proc
exec /bin/busybox switch_root /root /sbin/init
"""
_ACCOUNTS = {
    "etc/passwd": "messagebus:x:101:101::/nonexistent:/usr/sbin/nologin\n"
    "sshd:x:102:65534::/run/sshd:/usr/sbin/nologin\n_apt:x:103:65534::/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "messagebus:x:101:\n",
}
_UNITS = "/lib/systemd/system"
_LINKS = {
    "usr/bin/awk": "mawk",
    "var/run": "/run",
    "var/lock": "/run/lock",
    "etc/mtab": "../proc/self/mounts",
    "etc/systemd/system/default.target": f"{_UNITS}/multi-user.target",
    "etc/systemd/system/multi-user.target.wants/ssh.service": f"{_UNITS}/ssh.service",
    "etc/systemd/system/multi-user.target.wants/systemd-networkd.service": f"{_UNITS}/systemd-networkd.service",
    "etc/systemd/system/getty.target": "/dev/null",
    "etc/systemd/system/systemd-binfmt.service": "/dev/null",
    "etc/systemd/system/proc-sys-fs-binfmt_misc.automount": "/dev/null",
    "etc/systemd/system/systemd-timesyncd.service": "/dev/null",
    "etc/systemd/system/apt-daily.timer": "/dev/null",
    "etc/systemd/system/apt-daily-upgrade.timer": "/dev/null",
    "etc/systemd/system/dpkg-db-backup.timer": "/dev/null",
    "etc/systemd/system/e2scrub_all.timer": "/dev/null",
}
_PAM = ("account", "auth", "password", "session")
_FILES = {
    "etc/hostname": "grace\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 grace\n",
    "etc/fstab": "/dev/vda / ext4 defaults 0 0\n",
    "etc/machine-id": "6d2f0a41c58b4e0f9a7d3b1c2e4f5a60\n",
    "etc/systemd/network/10-lab.network": "[Match]\nName=en*\n\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n",
    "etc/apt/sources.list": f"deb [trusted=yes] file:{_PACKAGES_FOLDER} ./\n",
    "etc/dpkg/dpkg.cfg.d/lab": "force-unsafe-io\n",
    # PAM's files come from a script that does not run; the default key exchange costs a second without KVM.
    "etc/ssh/sshd_config.d/lab.conf": "UsePAM no\nKexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org\n",
    **{f"etc/pam.d/common-{kind}": f"{kind} required pam_permit.so\n" for kind in _PAM},
    "etc/shadow": "root:*:19000:0:99999:7:::\n",
    "var/lib/dpkg/info/format": "1\n",
    "var/lib/dpkg/triggers/ldconfig": "libc-bin\n",
    "var/lib/dpkg/diversions": "",
    "var/lib/dpkg/statoverride": "",
}
_FOLDERS = {
    "tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "proc": 0o555, "sys": 0o555, "dev": 0o755, "run": 0o755,
    "var/lib/dpkg/updates": 0o755, "var/lib/dpkg/alternatives": 0o755,
}  # fmt: skip
_COPIES = {
    "etc/passwd": "usr/share/base-passwd/passwd.master",
    "etc/group": "usr/share/base-passwd/group.master",
    "etc/nsswitch.conf": "usr/share/libc-bin/nsswitch.conf",
    "etc/ssh/sshd_config": "usr/share/openssh/sshd_config",
}


class Arm64Vm(Vm):
    """The virtual machine: as Vm, with a kernel and an initrd in place of a boot loader.

    `page_size` is 4096 or 16384.
    """

    boot_seconds = 600
    program = "qemu-system-aarch64"

    def __init__(self, cache: Path, directory: Path, *, page_size: int = 4096) -> None:
        super().__init__(cache, directory)
        self.kernel = self.image / str(page_size)

    @staticmethod
    def build(cache: Path, tell: Callable[[str], None]) -> Path:
        return build_image(cache, tell)

    def hardware(self) -> tuple[str, ...]:
        return (
            # pauth-impdef: the architecture's own algorithm takes half of the emulator's time.
            "-M", "virt,gic-version=3", "-cpu", "max,pauth-impdef=on", "-accel", "tcg",
            "-kernel", f"{self.kernel}/vmlinuz", "-initrd", f"{self.kernel}/initrd",
            "-append", "console=ttyAMA0 root=/dev/vda rw quiet mitigations=off apparmor=0",
            *vm_disk("disk", self.image / "disk", 0),
        )  # fmt: skip


def image_path(cache: Path) -> Path:
    """Return the folder with the disk, the keys, and kernel and initrd by page size; it may not exist yet."""
    recipe = Path(__file__).read_bytes()
    return cache / f"arm64-{hashlib.sha256(recipe).hexdigest()[:12]}"


def build_image(cache: Path, tell: Callable[[str], None]) -> Path:
    """Return that folder, building it if the cache lacks it."""
    cache = cache.absolute()
    place = image_path(cache)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "arm64.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return place
        tell("building the disk of an arm64 virtual machine (three minutes, once)")
        for stale in (*cache.glob("arm64-*"), cache / "building-arm64"):
            shutil.rmtree(stale, ignore_errors=True)
        half = cache / "building-arm64"
        result = half / "result"
        result.mkdir(parents=True)
        _build(half, result)
        result.rename(place)
        shutil.rmtree(half)
    return place


def _build(half: Path, result: Path) -> None:
    root = half / "root"
    for folder in ("bin", "sbin", "lib"):
        (root / "usr" / folder).mkdir(parents=True)
        (root / folder).symlink_to(f"usr/{folder}")
    system = _download(half / "system", _SYSTEM, "")
    status = "".join(_unpacked(root, deb) for deb in system)
    (root / "var/lib/dpkg/status").write_text(status)
    _by_hand(root)
    place = root / _PACKAGES_FOLDER.lstrip("/")
    place.mkdir()
    driver = _download(half / "driver", DRIVER_PACKAGES, status)
    for deb in driver:
        # Uncompressed: under emulation, uncompressing takes longer than all scripts.
        run(("dpkg-deb", "--raw-extract", str(deb), str(half / "package")), timeout=_BUILD_SECONDS)
        run(("dpkg-deb", "-Znone", "--build", str(half / "package"), str(place / deb.name)), timeout=_BUILD_SECONDS)
        shutil.rmtree(half / "package")
    index = run(("sh", "-c", 'cd "$1" && dpkg-scanpackages --arch arm64 . 2>/dev/null', "sh", str(place)))
    (place / "Packages").write_text(index)
    # The kernel seems to have loaded the modules of these libraries.
    (version,) = {found[1] for deb in driver if (found := re.match(r"libcuda1_([\d.]+)-", deb.name))}
    simulated_gpu(root, 2, version)
    for name, path in (
        ("key", root / "root/.ssh/authorized_keys"),
        ("host_key", root / "etc/ssh/ssh_host_ed25519_key.pub"),
    ):
        run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "grace", "-f", str(result / name)))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(result / f"{name}.pub", path)
    (result / "host_key").rename(root / "etc/ssh/ssh_host_ed25519_key")
    large_pages = half / "large-pages"
    large_pages.mkdir()
    for deb in _download(half / "kernel", (_LARGE_PAGES_KERNEL,), status, _LARGE_PAGES_SUITE):
        run(("dpkg-deb", "--extract", str(deb), str(large_pages)), timeout=_BUILD_SECONDS)
    busybox = (root / "bin/busybox").read_bytes()
    _kernel(root, busybox, result / "4096", _MODULES)
    _kernel(large_pages, busybox, result / "16384", (*_MODULES, *_RDMA_MODULES))
    run(("truncate", "--size", _SIZE, str(result / "disk")))
    features = ("-O", "^has_journal", "-E", "lazy_itable_init=1")
    run(("mkfs.ext4", "-q", *features, "-d", str(root), str(result / "disk")), timeout=_BUILD_SECONDS)


def _download(folder: Path, names: Sequence[str], installed: str, suite: str = "") -> list[Path]:
    """Fetch these packages and all that they depend on with apt, besides what is installed; return the files.

    `suite` is used in addition to the release's own.
    """
    for place in ("state/lists/partial", "cache/archives/partial", "none"):
        (folder / place).mkdir(parents=True)
    (folder / "state/status").write_text(installed)
    archive, security = mirrors()
    suites = [(archive, _SUITE), (archive, f"{_SUITE}-updates"), (security, f"{_SUITE}-security")]
    suites += [(archive, suite)] if suite else []
    components = "main contrib non-free non-free-firmware"
    lines = (f"deb [signed-by={_KEYRING}] {uri} {name} {components}\n" for uri, name in suites)
    (folder / "debian.list").write_text("".join(lines))
    options = (
        f"Dir::State={folder}/state", f"Dir::State::status={folder}/state/status", f"Dir::Cache={folder}/cache",
        f"Dir::Etc::SourceList={folder}/debian.list", f"Dir::Etc::SourceParts={folder}/none",
        f"Dir::Etc::PreferencesParts={folder}/none", "APT::Architecture=arm64", "APT::Architectures=arm64",
        "APT::Sandbox::User=root", "APT::Install-Recommends=false",
    )  # fmt: skip
    apt = ("apt-get", "-qq", *(word for option in options for word in ("-o", option)))
    run((*apt, "update"), timeout=_BUILD_SECONDS)
    run((*apt, "--yes", "--download-only", "install", *names), timeout=_BUILD_SECONDS)
    return sorted((folder / "cache/archives").glob("*.deb"))


def _unpacked(root: Path, deb: Path) -> str:
    """Unpack a package; return what dpkg's database says of it, and write the rest of that."""
    fields = run(("dpkg-deb", "--field", str(deb)))
    tar = (
        'dpkg-deb --fsys-tarfile "$1" | tar -x --keep-directory-symlink -C "$2"; dpkg-deb --fsys-tarfile "$1" | tar -t'
    )
    files = run(("sh", "-c", f"set -e; {tar}", "sh", str(deb), str(root)), timeout=_BUILD_SECONDS)
    values = dict(line.split(": ", 1) for line in fields.splitlines() if ": " in line and not line.startswith(" "))
    name = f"{values['Package']}:arm64" if values.get("Multi-Arch") == "same" else values["Package"]
    info = root / "var/lib/dpkg/info"
    info.mkdir(parents=True, exist_ok=True)
    run(("dpkg-deb", "--control", str(deb), str(root / "control")))
    for part in (root / "control").iterdir():
        # Of the triggers, ldconfig's alone has work here; an initramfs takes minutes.
        if part.name != "control" and (part.name != "triggers" or name == "libc-bin"):
            shutil.copy(part, info / f"{name}.{part.name}")
    shutil.rmtree(root / "control")
    listed = [line.lstrip(".").rstrip("/") or "/." for line in files.splitlines()]
    (info / f"{name}.list").write_text("".join(f"{path}\n" for path in listed))
    first, _, rest = fields.partition("\n")
    return f"{first}\nStatus: install ok installed\n{rest.strip()}\n\n"


def _by_hand(root: Path) -> None:
    """Do what the scripts of the packages would have done."""
    for name, source in _COPIES.items():
        shutil.copy(root / source, root / name)
    for name, text in _ACCOUNTS.items():
        (root / name).write_text((root / name).read_text() + text)
    for name, text in _FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "etc/shadow").chmod(0o640)
    for name, target in _LINKS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        place = root / name
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink(missing_ok=True)
        place.symlink_to(target)
    for folder, mode in _FOLDERS.items():
        (root / folder).mkdir(exist_ok=True)
        (root / folder).chmod(mode)
    run(("systemd-sysusers", f"--root={root}"))
    # A static program, which runs without an entry in binfmt_misc.
    run(("qemu-aarch64-static", f"{root}/sbin/ldconfig", "-r", str(root)))
    compiled = ("python3", "-m", "compileall", "-q", "-s", str(root), "-p", "/", str(root / "usr/lib/python3.11"))
    run(compiled, check=False, timeout=_BUILD_SECONDS)


def _kernel(root: Path, busybox: bytes, result: Path, names: Sequence[str]) -> None:
    """Take the kernel out, keep these modules and what they need, and make an initrd that finds its disk."""
    result.mkdir()
    (image,) = (root / "boot").glob("vmlinuz-*")
    shutil.move(image, result / "vmlinuz")
    kernel = image.name.removeprefix("vmlinuz-")
    modules = root / "lib/modules" / kernel
    run(("depmod", "-b", str(root), kernel))
    needed = _in_order(root, kernel, names)
    for path in list(modules.rglob("*.ko*")):
        if _module_name(path) not in needed:
            path.unlink()
        elif path.suffix == ".xz":
            # busybox can't uncompress them.
            path.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
            path.unlink()
    run(("depmod", "-b", str(root), kernel))
    files = {str(path.relative_to(root)): path.read_bytes() for path in modules.rglob("*") if path.is_file()}
    places = {_module_name(PurePath(name)): name for name in files if name.endswith(".ko")}
    first = (places[name] for name in _in_order(root, kernel, _FIRST_MODULES))
    init = _INIT.format(modules=" ".join(first), folder=modules.relative_to(root)).encode()
    files |= {"init": init, "bin/busybox": busybox}
    (result / "initrd").write_bytes(b"".join(_cpio(files)))


def _module_name(path: PurePath) -> str:
    return path.name.partition(".")[0]


def _in_order(root: Path, kernel: str, names: Sequence[str]) -> list[str]:
    """Return modules and what they need, in the order in which they are loaded."""
    lines = [
        line.split()
        for name in names
        for line in run(("modprobe", "-d", str(root), "-S", kernel, "--show-depends", name)).splitlines()
    ]
    return list(dict.fromkeys(_module_name(Path(words[1])) for words in lines if words[0] == "insmod"))


def _cpio(files: dict[str, bytes]) -> Iterator[bytes]:
    """Yield an archive as the kernel takes it (Documentation/driver-api/early-userspace/buffer-format.rst)."""
    parents = {str(parent) for name in files for parent in PurePath(name).parents} - {"."}
    entries = [(name, 0o040755, b"") for name in sorted(parents | {"dev", "proc", "root"})]
    entries += [(name, 0o100755, content) for name, content in files.items()]
    for number, (name, mode, content) in enumerate((*entries, ("TRAILER!!!", 0, b"")), 1):
        numbers = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % one for one in numbers) + name.encode() + b"\0"
        yield head + b"\0" * (-len(head) % 4) + content + b"\0" * (-len(content) % 4)
