"""A host at the System seam: a real tree of files below a temporary root, and programs that act on it.

What its programs answer was recorded from Debian 12 with docker 20.10; the real programs run in tests/integration.
"""

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuprov.core.commands import NOT_FOUND, Completed
from gpuprov.core.files import FileStatus
from gpuprov.core.system import System
from tests import simgpu
from tests.files import put
from tests.triplet import LIBRARIES

RELEASE = "6.1.0-13-amd64"
_OS_RELEASE = 'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n'
PYTHON = f"python3.{sys.version_info.minor}"
BUILD_PACKAGES = ("gcc", "make", "libc6-dev", "dkms", "kmod")
Tree = dict[str, tuple[int, int, int, int, bytes]]


class FakeHost(System):
    """Debian 12 in a system container, with GPUs, docker and no driver libraries.

    With `metal` it is a bare machine instead: a kernel of its own with an initramfs, and nouveau on the GPUs.
    """

    def __init__(self, root: Path, gpus: int = 2, *, metal: bool = False) -> None:
        super().__init__(str(root))
        self.installed = {"dpkg": "1.21.22", "docker.io": "20.10.24+dfsg1-1+deb12u1+b2"}
        self.available = {"site-gpu-tools": "1.0"}
        self.held: set[str] = set()
        self.docker_active = True
        self.docker_loaded: dict[str, str] = {"runc": "runc"}
        self.docker_default = "runc"
        self.docker_starts = 0
        self.docker_failed = False
        self.docker_enabled = True
        # systemd starts a unit a few times in a row, and then no more until reset-failed.
        self.docker_starts_left = 3
        self.commands: list[tuple[str, ...]] = []
        self.slept = 0.0
        self.failing_unit = "no unit"
        self.unit_log = "the unit's last words"
        self.python_version = ".".join(map(str, sys.version_info[:3]))
        self.initramfs_error = ""
        self.initramfs_forgets = False
        self._driver_files: list[Path] = []
        for folder in (
            "etc/apt/sources.list.d",
            "etc/docker",
            "run/systemd",
            "usr/bin",
            "var/lib",
            "var/log",
            "var/tmp",
            "dev",
            "usr/lib",
        ):
            (root / folder).mkdir(parents=True)
        (root / "etc/os-release").write_text(_OS_RELEASE)
        (root / "run/systemd/container").write_text("systemd-nspawn\n")
        simgpu.write_kernel_tree(root, gpus, driver="nouveau" if metal else "nvidia")
        programs = ["apt-get", "dpkg-query", "docker", "dockerd", "systemctl"]
        put(root / f"usr/bin/{PYTHON}", "\x7fELF", 0o755)
        (root / "usr/bin/python3").symlink_to(PYTHON)
        if metal:
            programs += ["update-initramfs", "lsinitramfs"]
            self._make_metal()
        for program in programs:
            put(root / "usr/bin" / program, "#!/bin/sh\n", 0o755)

    def _make_metal(self) -> None:
        (self.root / "run/systemd/container").unlink()
        (self.root / f"lib/modules/{RELEASE}").mkdir(parents=True)
        (self.root / "sys/module/nouveau").mkdir(parents=True)
        (self.root / "boot").mkdir()
        self.available.update(
            {f"linux-headers-{RELEASE}": "6.1.55-1", "libtirpc3": "1.3", **dict.fromkeys(BUILD_PACKAGES, "1")}
        )
        self._update_initramfs(("-u", "-k", RELEASE))

    def user_id(self) -> int:
        return 0

    def status(self, path: str) -> FileStatus | None:
        """Tell what lies at a path; what a test made that does not run as root is root's all the same."""
        found = super().status(path)
        return found if found is None or os.geteuid() == 0 else replace(found, uid=0, gid=0)

    def kernel_release(self) -> str:
        return RELEASE

    def architecture(self) -> str:
        return "x86_64"

    def free_bytes(self, path: str) -> int:
        return 10 << 30

    def sleep(self, seconds: float) -> None:
        """Nobody waits in a test: the clock goes on instead, so that a wait reaches its end."""
        self.slept += seconds

    def now(self) -> float:
        return super().now() + self.slept

    def sync(self) -> None:
        """Nobody waits for the machine's disk; integration/test_power_cut.py has one of its own."""

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        argv = tuple(argv)
        self.commands.append(argv)
        programs = {
            "apt-get": self._apt_get, "apt-mark": self._apt_mark, "apt-cache": self._apt_cache,
            "cp": self._cp,
            "dpkg": lambda words: (0, ""), "dpkg-query": self._dpkg_query,
            "docker": self._docker, "dockerd": self._dockerd, "systemctl": self._systemctl,
            "journalctl": lambda words: (0, self.unit_log),
            "sh": self._runfile, "nvidia-uninstall": self._uninstall, "update-initramfs": self._update_initramfs,
            "lsinitramfs": lambda words: (0, self.read_text(words[0]) or ""), "modprobe": self._modprobe,
            "modinfo": self._modinfo, PYTHON: self._python,
            "runc": self._low_level_runtime, "crun": self._low_level_runtime,
        }  # fmt: skip
        program = programs.get(argv[0].rpartition("/")[2])
        if program is None:
            return Completed(argv, NOT_FOUND, "", f"{argv[0]}: command not found")
        code, output = program(argv[1:])
        return Completed(argv, code, output if code == 0 else "", "" if code == 0 else output)

    def _python(self, words: tuple[str, ...]) -> tuple[int, str]:
        """Be the Python that runs the tests, with a standard library below this root."""
        return 0, f"{self.python_version} {sys.implementation.cache_tag} /usr/lib\n"

    def _low_level_runtime(self, words: tuple[str, ...]) -> tuple[int, str]:
        return 0, "runc version 1.1.5\n"

    def _dpkg_query(self, words: tuple[str, ...]) -> tuple[int, str]:
        if "${Conffiles}" in words[1]:
            return 0, ""
        if words[0] == "--search":
            return 1, "dpkg-query: no path found matching pattern"
        rows = sorted(self.installed.items())
        wants = {name: "hold" if name in self.held else "install" for name in self.installed}
        return 0, "".join(f"installed {name} {version} amd64 {wants[name]} ok \n" for name, version in rows)

    def _apt_mark(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[0] == "showauto":
            return 0, ""
        if words[0] not in ("hold", "unhold"):
            return 100, f"E: Invalid operation {words[0]}"
        self.held = self.held | {*words[1:]} if words[0] == "hold" else self.held - {*words[1:]}
        return 0, ""

    def _apt_get(self, words: tuple[str, ...]) -> tuple[int, str]:
        if "update" in words:
            return 0, "Reading package lists...\n"
        names = [name.partition("=")[0] for name in words[words.index("--") + 1 :]]
        if "--simulate" in words:
            return 0, "".join(f"{'Purg' if 'purge' in words else 'Inst'} {name}\n" for name in names)
        if "purge" in words:
            for name in names:
                del self.installed[name]
                self.held.discard(name)
            return 0, ""
        unknown = [name for name in names if name not in self.available]
        if unknown:
            return 100, f"E: Unable to locate package {unknown[0]}"
        self.installed.update({name: self.available[name] for name in names})
        return 0, ""

    def _apt_cache(self, words: tuple[str, ...]) -> tuple[int, str]:
        if "madison" not in words:
            return 0, ""
        names = [name for name in words[words.index("madison") + 1 :] if name in self.available]
        where = "http://mirror.example/debian bookworm/main amd64 Packages"
        return 0, "".join(f"{name:>10} | {self.available[name]:>10} | {where}\n" for name in names)

    def _docker(self, words: tuple[str, ...]) -> tuple[int, str]:
        if not self.docker_active:
            return (
                1,
                "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
            )
        if words[0] in ("ps", "images", "volume"):
            return 0, ""
        if words[-1] == "{{json .}}":
            runtimes = {name: {"path": path} for name, path in self.docker_loaded.items()}
            info = {"ServerVersion": "20.10.24+dfsg1", "Runtimes": runtimes, "DefaultRuntime": self.docker_default}
            return 0, json.dumps({**info, "LiveRestoreEnabled": False, "ContainersRunning": 0, "CgroupVersion": "2"})
        if "ContainersRunning" in words[-1]:
            return 0, "0 false\n"
        return 0, f"{self.docker_loaded.get('nvidia', '')} {self.docker_default}\n"

    def _dockerd(self, words: tuple[str, ...]) -> tuple[int, str]:
        """Answer as dockerd 20.10 does that is to end before it begins anything."""
        if "--version" in words:
            return 0, "Docker version 20.10.24+dfsg1, build 5d6db84\n"
        if "--validate" in words:
            return 125, "Status: unknown flag: --validate\nSee 'dockerd --help'., Code: 125"
        path = words[words.index("--config-file") + 1] if "--config-file" in words else "/etc/docker/daemon.json"
        refused = self._refusal(path)
        if refused:
            return 1, f"unable to configure the Docker daemon with file {path}: {refused}"
        return 1, "unable to parse logging level: none"

    def _refusal(self, path: str = "/etc/docker/daemon.json") -> str:
        """Return why dockerd 20.10 does not take the file."""
        text = self.read_text(path)
        if text is None:
            return f"read {path}: is a directory" if self.status(path) else ""
        try:
            config = json.loads(text)
        except ValueError:
            return "invalid character" if text.strip() else "EOF"
        unknown = [name for name in config if name == "no-such-option"]
        return f"the following directives don't match any configuration option: {unknown[0]}" if unknown else ""

    def _systemctl(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[0] == "is-active":
            return (0 if self.docker_active else 3), ""
        if self.failing_unit in words:
            return 1, f"Job for {self.failing_unit} failed."
        if words[0] == "show":
            return 0, self._docker_shown() if "docker.service" in words else ""
        if "docker" in words[-1]:
            return self._docker_unit(words[0])
        return 0, ""

    def _docker_shown(self) -> str:
        state = "active" if self.docker_active else "failed" if self.docker_failed else "inactive"
        enabled = "enabled" if self.docker_enabled else "disabled"
        return (
            f"Id=docker.service\nLoadState=loaded\nActiveState={state}\nResult=success\nUnitFileState={enabled}\n"
            "ExecStart={ path=/usr/sbin/dockerd ; argv[]=/usr/sbin/dockerd -H fd:// $DOCKER_OPTS ; ignore_errors=no }\n"
        )

    def _docker_unit(self, verb: str) -> tuple[int, str]:
        """Do with docker what systemctl's verb does, with the real one's limit of starts."""
        if verb in ("enable", "disable"):
            self.docker_enabled = verb == "enable"
        elif verb == "reset-failed":
            self.docker_starts_left, self.docker_failed = 3, False
        elif verb == "stop":
            self.docker_active = False
        elif verb == "restart":
            self.docker_starts += 1
            if (pid := self.root / "run/docker.pid").exists():
                pid.touch()
            self.docker_starts_left -= 1
            self.docker_active = self.docker_starts_left >= 0 and not self._refusal()
            self.docker_failed = not self.docker_active
            if self.docker_failed:
                return 1, "Job for docker.service failed."
            self._load_docker()
        elif verb == "reload" and not self._refusal():
            self._load_docker()
        return 0, ""

    def _load_docker(self) -> None:
        self.docker_active = True
        config = json.loads(self.read_text("/etc/docker/daemon.json") or "{}")
        self.docker_default = config.get("default-runtime", "runc")
        runtimes = config.get("runtimes", {})
        self.docker_loaded = {"runc": "runc", **{name: entry["path"] for name, entry in runtimes.items()}}

    def _cp(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[0] == "--reflink=auto":
            shutil.copyfile(self.path(words[-2]), self.path(words[-1]))
        return 0, ""

    def _runfile(self, words: tuple[str, ...]) -> tuple[int, str]:
        """Install as the .run does: libraries, programs, its log; a driver of another version is removed first."""
        label = re.search(r"Linux-x86_64 ([0-9.]+)", self.read_text(words[0]) or "") if words else None
        version = label[1] if label else simgpu.DRIVER_VERSION
        if not list(self.root.glob(f"{LIBRARIES}/libcuda.so.{version}"[1:])):
            self._uninstall(())
        before = self.names()
        simgpu.install_tree(self.root, version)
        (self.root / "var/log/nvidia-installer.log").write_text("-> now complete.\n")
        new = map(Path, self.names() - before)
        # What it is installed over, it has installed before.
        self._driver_files = sorted({*self._driver_files, *new}, reverse=True)
        return 0, ""

    def _update_initramfs(self, words: tuple[str, ...]) -> tuple[int, str]:
        """Write an image that is its own listing: nouveau, as in Debian's larger images, and /etc/modprobe.d."""
        if self.initramfs_error:
            return 1, self.initramfs_error
        files = [f"etc/modprobe.d/{name}" for name in self.list_directory("/etc/modprobe.d")]
        module = f"usr/lib/modules/{words[2]}/kernel/drivers/gpu/drm/nouveau/nouveau.ko"
        names = [module, *([] if self.initramfs_forgets else files)]
        (self.root / f"boot/initrd.img-{words[2]}").write_text("".join(f"{name}\n" for name in names))
        return 0, ""

    def _modprobe(self, words: tuple[str, ...]) -> tuple[int, str]:
        return 1, "modprobe: FATAL: Module nouveau is in use."

    def _modinfo(self, words: tuple[str, ...]) -> tuple[int, str]:
        return 0, f"{simgpu.DRIVER_VERSION}\n"

    def _uninstall(self, words: tuple[str, ...]) -> tuple[int, str]:
        for path in map(self.root.joinpath, self._driver_files):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
            elif not any(path.iterdir()):
                path.rmdir()
        return 0, ""

    def tree(self) -> Tree:
        """Return all that lies below the root, the journal left out."""
        left_out = ("/var/lib/gpuprov", "/run/gpuprov.lock", "/var/cache")
        return {path: value for path, value in self.everything().items() if not path.startswith(left_out)}

    def everything(self) -> Tree:
        """Return all that lies below the root: mode, owner, device numbers, content."""
        found: Tree = {}
        for name in sorted(self.names()):
            path = f"{self.root}/{name}"
            status = os.lstat(path)
            content = b""
            if stat.S_ISLNK(status.st_mode):
                content = os.fsencode(os.readlink(path))  # noqa: PTH115
            elif stat.S_ISREG(status.st_mode):
                content = Path(path).read_bytes()
            found[f"/{name}"] = (status.st_mode, status.st_uid, status.st_gid, status.st_rdev, content)
        return found

    def names(self) -> set[str]:
        """Return the paths of all that lies below the root, from there."""
        left = len(f"{self.root}/")
        walked = os.walk(self.root)
        return {f"{folder}/{name}"[left:] for folder, folders, files in walked for name in (*folders, *files)}

    def state(self) -> tuple[Tree, dict[str, str], dict[str, str], int]:
        """Return all that a run could have changed."""
        return self.tree(), dict(self.installed), dict(self.docker_loaded), self.docker_starts


def write_runfile(path: Path, version: str = simgpu.DRIVER_VERSION) -> None:
    """Write a file with a driver .run's header and nothing behind it."""
    label = f"NVIDIA Accelerated Graphics Driver for Linux-x86_64 {version}"
    path.write_text(f'#!/bin/sh\nlabel="{label}"\n')
    os.utime(path, (0, 0))
