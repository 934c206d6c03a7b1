"""A machine on which a driver is loaded and used, for tests that put another in its place."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuprov.cdi.discover import discover
from gpuprov.core.commands import Completed
from gpuprov.facts.driver import gather_holders, parse_cgroup
from gpuprov.protocol.events import Event, Finished
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import parse_spec, spec_to_json
from tests import simgpu
from tests.unit.ask import ask
from tests.unit.fake_host import RELEASE, FakeHost, write_runfile

OLD, NEW = "535.261.03", simgpu.DRIVER_VERSION
PERSISTENCED, DCGM = "nvidia-persistenced.service", "nvidia-dcgm.service"
CONTAINER = "4f" * 32


class LoadedHost(FakeHost):
    """A bare machine with driver 535 on the disk and in the kernel; services and containers use it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, gpus=1, metal=True)
        self.units = {PERSISTENCED, DCGM}
        self.containers: set[str] = set()
        self.running: set[str] = set()
        self.inspected: dict[str, Any] = {"HostConfig": {}, "Config": {}}
        self.kernel_holds = False
        self.installer_fails = False
        self.stopped: list[str] = []
        self.unloaded: list[str] = []
        self.on_disk = OLD
        # Of other kernels.
        self.on_disk_of: dict[str, str] = {}
        self._lay(OLD)
        self.load(OLD)
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
        self.process(700, "/usr/bin/nvidia-persistenced --verbose", f"/system.slice/{PERSISTENCED}", mapped=True)
        self.process(701, "/usr/bin/nv-hostengine -n", f"/system.slice/{DCGM}")
        write_runfile(root / "driver.run")

    def _lay(self, version: str) -> None:
        for path in self._driver_files:
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
        before = self.names()
        simgpu.install_tree(self.root, version)
        self._driver_files = sorted(map(self.root.joinpath, self.names() - before), reverse=True)
        self.build(version)

    def build(self, version: str) -> None:
        """Give the running kernel the module of a driver; "": of none."""
        self.on_disk = version
        (self.root / f"lib/modules/{RELEASE}/modules.dep").write_text("updates/dkms/nvidia.ko.xz:\n" if version else "")

    def _modinfo(self, words: tuple[str, ...]) -> tuple[int, str]:
        return 0, f"{self.on_disk_of.get(words[words.index('-k') + 1], self.on_disk)}\n"

    def load(self, version: str) -> None:
        for path in ("sys/bus", "sys/module", "proc/driver"):
            self.remove_tree(f"/{path}")
        simgpu.write_kernel_tree(self.root, 1, version)

    def process(self, pid: int, command: str, cgroup: str, *, mapped: bool = False) -> None:
        folder = self.root / f"proc/{pid}"
        for name in ("fd", "map_files"):
            (folder / name).mkdir(parents=True)
        for minor, name in ((0, "nvidia0"), (255, "nvidiactl")):
            if not self.exists(f"/dev/{name}"):
                self.make_directory("/dev")
                self.make_node(f"/dev/{name}", 195, minor, 0o666)
        (folder / "cmdline").write_text(command.replace(" ", "\0") + "\0")
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
        (folder / "maps").write_text("7f1c-7f1d rw-s 00000000 00:05 512    /dev/nvidia0\n" if mapped else "")
        (folder / "map_files/7f1c-7f1d").symlink_to("/dev/nvidia0" if mapped else "/dev/null")
        (folder / "fd/0").symlink_to("/dev/null" if mapped else "/dev/nvidiactl")

    def container(self, name: str, pid: int) -> None:
        self.containers.add(name)
        self.running.add(name)
        self.process(pid, "python3 train.py", f"/system.slice/docker-{CONTAINER}.scope")

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[0] == "systemd-run":
            return Completed(tuple(argv), 0)
        own = {"rmmod": self._rmmod, "modprobe": self._load_installed, "nvidia-modprobe": self._load_installed}
        if argv[0] in own:
            self.commands.append(tuple(argv))
            code, text = own[argv[0]](tuple(argv[1:]))
            return Completed(tuple(argv), code, "", text)
        return super().run(argv, **more)

    def _rmmod(self, words: tuple[str, ...]) -> tuple[int, str]:
        if gather_holders(self) or self.kernel_holds:
            return 1, f"rmmod: ERROR: Module {words[0]} is in use"
        self.unloaded.append(words[0])
        self.remove_tree(f"/sys/module/{words[0]}")
        lines = (self.read_text("/proc/modules") or "").splitlines(keepends=True)
        (self.root / "proc/modules").write_text("".join(one for one in lines if not one.startswith(f"{words[0]} ")))
        if words[0] == "nvidia":
            self.remove_tree("/proc/driver/nvidia")
            (self.root / "proc/devices").write_text("Character devices:\n  1 mem\n")
        return 0, ""

    def _load_installed(self, words: tuple[str, ...]) -> tuple[int, str]:
        if not self.exists("/sys/module/nvidia") and self.on_disk:
            self.load(self.on_disk)
        return 0, ""

    def _systemctl(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[0] == "is-active" and words[1] != "--quiet":
            return 0, "".join(f"{'active' if name in self.units else 'inactive'}\n" for name in words[1:])
        if words[0] == "show" and words[-1] == "display-manager.service":
            return 0, "gdm.service\n"
        if words[0] == "stop":
            self.stopped += [name for name in words[1:] if name in self.units]
            self.units -= set(words[1:])
            for pid in (name for name in self.list_directory("/proc") if name.isdigit()):
                unit, _ = parse_cgroup(self.read_text(f"/proc/{pid}/cgroup") or "")
                if unit in words[1:]:
                    self.remove_tree(f"/proc/{pid}")
        elif words[0] in ("start", "restart"):
            self.units |= {words[-1]} & {PERSISTENCED, DCGM}
        return super()._systemctl(words)

    def _docker(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[0] == "ps":
            named = "{{.Names}}" in words
            return 0, "".join(f"{name if named else CONTAINER}\n" for name in sorted(self.running))
        if words[0] == "inspect":
            rows = [{"Id": CONTAINER, "Name": f"/{name}", **self.inspected} for name in self.running]
            return 0, json.dumps(rows)
        if words[0] == "stop":
            self.running -= set(words[1:])
            self.remove_tree("/proc/900")
            return 0, ""
        if words[0] == "start":
            self.running |= set(words[1:])
            return 0, ""
        code, text = super()._docker(words)
        if code == 0 and words[-1] == "{{json .}}":
            text = json.dumps({**json.loads(text), "ContainersRunning": len(self.running)})
        return code, text

    def _runfile(self, words: tuple[str, ...]) -> tuple[int, str]:
        if "--uninstall" in words:
            return 0, ""
        log = self.root / "var/log/nvidia-installer.log"
        if self.exists("/sys/module/nvidia") and "--allow-installation-with-running-driver" not in words:
            log.write_text("ERROR: An NVIDIA kernel module 'nvidia-uvm' appears to be already loaded in your kernel.\n")
            return 1, ""
        if self.installer_fails:
            log.write_text("ERROR: Unable to find the development tool `cc` in your path\n")
            return 1, ""
        self._lay(NEW)
        log.write_text("-> now complete.\n")
        if "--skip-module-load" not in words:
            self.load(NEW)
        return 0, ""

    def _dkms(self, words: tuple[str, ...]) -> tuple[int, str]:
        return 0, f"nvidia/{NEW}, 6.1.0: installed\n"


def install(
    host: FakeHost,
    *,
    check: bool = False,
    steps: tuple[str, ...] = ("reboot", "driver"),
    command: str = "install",
    **values: Any,
) -> tuple[Finished, list[Event]]:
    spec = parse_spec({"driver_version": NEW, "driver_url": "/driver.run", **values})
    request = Request(command, spec_to_json(spec), check=check, diff=True, steps=steps)
    return ask(host, request)


def loaded(host: FakeHost) -> tuple[str, str]:
    found = discover(host)
    return found.kernel_version, found.library_version
