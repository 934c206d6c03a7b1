"""A driver that is loaded while another is installed: who uses it is stopped or named; what was stopped runs again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.apply import last_undoable_run, roll_back
from gpuprov.cdi.discover import discover
from gpuprov.commands import Completed
from gpuprov.driver.holders import Holder, gather_holders, mapped_device, parse_cgroup
from gpuprov.driver.release import STOPPED
from gpuprov.driver.running_driver import parse_containers
from gpuprov.errors import ExitCode
from gpuprov.events import ChangeDone, ChangeProgress, Event, Finished, Planned
from gpuprov.plan import CHANGE_KINDS
from gpuprov.reboot_state import IN_USE_MARK
from gpuprov.request import Request
from gpuprov.run import run_request
from gpuprov.spec import parse_spec, spec_to_json
from gpuprov.system import System
from tests import simgpu
from tests.unit.fake_host import FakeHost, write_runfile

pytestmark = pytest.mark.root
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
        self.kernel_holds = False
        self.installer_fails = False
        self.stopped: list[str] = []
        self.unloaded: list[str] = []
        self.on_disk = OLD
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
        before = set(self.root.rglob("*"))
        simgpu.install_tree(self.root, version)
        self._driver_files = sorted(set(self.root.rglob("*")) - before, reverse=True)
        self.on_disk = version

    def load(self, version: str) -> None:
        for path in ("sys/bus", "sys/module", "proc/driver"):
            self.remove_tree(f"/{path}")
        simgpu.write_kernel_tree(self.root, 1, version)

    def process(self, pid: int, command: str, cgroup: str, *, mapped: bool = False) -> None:
        folder = self.root / f"proc/{pid}"
        (folder / "fd").mkdir(parents=True)
        (folder / "cmdline").write_text(command.replace(" ", "\0") + "\0")
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
        (folder / "maps").write_text("7f1c-7f1d rw-s 00000000 00:05 512    /dev/nvidia0\n" if mapped else "")
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
        if not self.exists("/sys/module/nvidia"):
            self.load(self.on_disk)
        return 0, ""

    def _systemctl(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[0] == "is-active" and words[1] != "--quiet":
            return 0, "".join(f"{'active' if name in self.units else 'inactive'}\n" for name in words[1:])
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
            rows = [{"Id": CONTAINER, "Name": f"/{name}", "HostConfig": {}, "Config": {}} for name in self.running]
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


@pytest.fixture
def host(tmp_path: Path) -> LoadedHost:
    return LoadedHost(tmp_path / "root")


def install(
    host: FakeHost, *, check: bool = False, steps: tuple[str, ...] = ("reboot", "driver"), **values: Any
) -> tuple[Finished, list[Event]]:
    events: list[Event] = []
    spec = parse_spec({"driver_version": NEW, "driver_url": "/driver.run", **values})
    request = Request("install", spec_to_json(spec), check=check, diff=True, steps=steps)
    run_request(request, events.append, host)
    assert isinstance(events[-1], Finished)
    return events[-1], events


def told(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, ChangeProgress)]


def loaded(host: FakeHost) -> tuple[str, str]:
    found = discover(host)
    return found.kernel_version, found.library_version


# -- who holds a GPU -------------------------------------------------------------------------------------------------

CGROUPS = {
    "a service": ("0::/system.slice/nvidia-dcgm.service\n", ("nvidia-dcgm.service", "")),
    "a login": ("0::/user.slice/user-0.slice/session-3.scope\n", ("", "")),
    "docker, systemd driver": (f"0::/system.slice/docker-{CONTAINER}.scope\n", ("", CONTAINER)),
    "docker, cgroupfs driver, v1": (f"5:devices:/docker/{CONTAINER}\n", ("", CONTAINER)),
    "containerd in Kubernetes": (
        f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{CONTAINER}.scope\n", ("", CONTAINER),
    ),
    "podman": (f"0::/machine.slice/libpod-{CONTAINER}.scope/container\n", ("", CONTAINER)),
    "a user's service": ("0::/user.slice/user-7.slice/user@7.service/app.slice/x.service\n", ("x.service", "")),
    "nothing": ("", ("", "")),
}  # fmt: skip


@pytest.mark.parametrize("name", CGROUPS)
def test_a_cgroup_tells_unit_and_container(name: str) -> None:
    text, expected = CGROUPS[name]
    assert parse_cgroup(text) == expected


def test_open_and_mapped_devices_count_and_others_do_not(host: LoadedHost) -> None:
    host.process(950, "sshd", "/system.slice/ssh.service")
    (host.root / "proc/950/fd/0").unlink()
    (host.root / "proc/950/fd/0").symlink_to("/dev/nvme0")
    found = gather_holders(host)
    assert [(one.pid, one.device, one.unit) for one in found] == [
        (700, "/dev/nvidia0", PERSISTENCED), (701, "/dev/nvidiactl", DCGM),
    ]  # fmt: skip
    assert mapped_device("7f-80 r-xp 0 08:01 1 /usr/lib/libnvidia-ml.so.1\n") == ""
    assert str(Holder(9, "x", "/dev/nvidia0", container=CONTAINER)).endswith("open, in container 4f4f4f4f4f4f")


ASKED = "NVIDIA_VISIBLE_DEVICES=all"
ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "--gpus": ({"HostConfig": {"DeviceRequests": [{"Driver": "", "Count": -1}]}}, True),
    "--runtime=nvidia": ({"HostConfig": {"Runtime": "nvidia"}, "Config": {"Env": [ASKED]}}, True),
    "--device": ({"HostConfig": {"Devices": [{"PathOnHost": "/dev/nvidia0"}]}}, True),
    "the default runtime, no GPU": ({"HostConfig": {"Runtime": "nvidia"}, "Config": {"Env": ["PATH=/bin"]}}, False),
    "runc": ({"HostConfig": {"Runtime": "runc"}, "Config": {"Env": [ASKED]}}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_containers_with_gpus_are_known_by_what_they_asked_for(name: str) -> None:
    row, uses = ROWS[name]
    text = json.dumps([{"Id": CONTAINER, "Name": "/one", **row}])
    assert parse_containers(text, set()) == ({CONTAINER: "one"} if uses else {})
    assert parse_containers(text, {CONTAINER}) == {CONTAINER: "one"}


def test_a_real_process_in_a_namespace_of_its_own_is_found_while_it_lives() -> None:
    """As in a container: the device is the container's own node, and the kernel says its path there."""
    script = "mount -t tmpfs none /dev && echo x > /dev/nvidia0 && exec 9</dev/nvidia0 && echo ready && read -r end"
    command = ("unshare", "--mount", "--propagation", "private", "sh", "-c", script)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (found,) = (one for one in gather_holders(System()) if one.pid == process.pid)
        assert found.device == "/dev/nvidia0"
        assert found.command.startswith("sh -c mount")
        process.stdin.close()
    assert [one for one in gather_holders(System()) if one.pid == process.pid] == []


# -- the way past it -------------------------------------------------------------------------------------------------


def test_services_are_stopped_modules_unloaded_in_order_and_all_started_again(host: LoadedHost) -> None:
    finished, events = install(host)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert host.stopped == [DCGM, PERSISTENCED]
    assert host.unloaded == ["nvidia_modeset", "nvidia_uvm", "nvidia"]
    assert loaded(host) == (NEW, NEW)
    assert host.units == {PERSISTENCED, DCGM}
    assert not host.exists(STOPPED)
    (planned,) = [event for event in events if isinstance(event, Planned)]
    (change,) = planned.changes
    assert change.summary.endswith(f"instead of {OLD}; stopped meanwhile: {DCGM}, {PERSISTENCED}")
    assert change.diff.splitlines() == [
        f"stop {DCGM} (started again afterwards)", f"stop {PERSISTENCED} (started again afterwards)",
        "unload nvidia_modeset", "unload nvidia_uvm", "unload nvidia",
    ]  # fmt: skip
    again, _ = install(host)
    assert (again.exit_code, again.changed) == (ExitCode.DONE, 0)


def test_check_stops_nobody(host: LoadedHost) -> None:
    finished, _ = install(host, check=True)
    assert (finished.changed, host.stopped, host.unloaded) == (1, [], [])


def test_somebody_elses_process_is_named_and_nothing_is_touched(host: LoadedHost) -> None:
    host.process(950, "python3 train.py", "/user.slice/user-0.slice/session-3.scope")
    before = host.tree()
    finished, _ = install(host)
    assert finished.exit_code == ExitCode.FAILED
    (problem,) = finished.problems
    assert problem.what == f"driver {OLD} is loaded and in use, so {NEW} can't replace it"
    assert problem.evidence == "process 950 (python3 train.py) has /dev/nvidiactl open"
    assert "kill 950" in problem.next_step
    assert "gpuprov_reboot: if-needed" in problem.next_step
    assert (host.tree(), host.stopped) == (before, [])


def test_a_container_is_stopped_with_consent_alone_and_runs_again(host: LoadedHost) -> None:
    host.container("train", 900)
    finished, _ = install(host)
    (problem,) = finished.problems
    assert problem.evidence == "container train uses a GPU"
    assert "gpuprov_stop_containers: true" in problem.next_step
    assert host.running == {"train"}
    finished, events = install(host, steps=(), stop_containers=True)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert ("docker", "stop", "train") in host.commands
    assert host.running == {"train"}
    assert loaded(host) == (NEW, NEW)
    # What it is given at its start stands in the CDI specification: that comes first.
    keys = [event.key for event in events if isinstance(event, ChangeDone)]
    assert keys.index("write /etc/cdi/nvidia.json") < keys.index("start the containers again")
    assert not host.exists(STOPPED)


def test_a_container_runs_again_with_the_old_driver_if_the_new_one_can_not_be_installed(host: LoadedHost) -> None:
    host.container("train", 900)
    host.installer_fails = True
    finished, _ = install(host, stop_containers=True)
    assert finished.exit_code == ExitCode.FAILED
    assert ("docker", "stop", "train") in host.commands
    assert host.running == {"train"}
    assert loaded(host) == (OLD, OLD)


def test_a_display_manager_is_stopped_with_consent_alone(host: LoadedHost) -> None:
    host.units.add("display-manager.service")
    host.process(960, "/usr/lib/xorg/Xorg :0", "/system.slice/display-manager.service")
    (host.root / "tmp").mkdir()
    (host.root / "tmp/.X0-lock").write_text("       960\n")
    finished, _ = install(host)
    assert {problem.what.split(" ")[0] for problem in finished.problems} == {"an", "driver"}
    assert all("gpuprov_stop_display_manager: true" in problem.next_step for problem in finished.problems)
    finished, _ = install(host, stop_display_manager=True)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert host.stopped[0] == "display-manager.service"


def test_where_the_kernel_itself_holds_on_the_run_says_so_and_services_run_again(host: LoadedHost) -> None:
    host.kernel_holds = True
    finished, _ = install(host)
    (problem,) = finished.problems
    assert problem.what == "the kernel module nvidia_modeset can't be unloaded"
    assert "Module nvidia_modeset is in use" in problem.evidence
    assert host.units == {PERSISTENCED, DCGM}
    assert loaded(host) == (OLD, OLD)


@pytest.mark.parametrize("reason", ["somebody's process", "the kernel itself"])
def test_with_leave_it_is_left_to_the_reboot(host: LoadedHost, reason: str) -> None:
    if reason == "the kernel itself":
        host.kernel_holds = True
    else:
        host.process(950, "python3 train.py", "/user.slice/user-0.slice/session-3.scope")
    finished, _ = install(host, reboot="if-needed")
    assert (finished.exit_code, finished.left_boot) == (ExitCode.REBOOT_NEEDED, "boot-1"), finished.problems
    assert loaded(host) == (OLD, NEW)
    assert host.units == {PERSISTENCED, DCGM}
    host.load(NEW)
    (host.root / "proc/sys/kernel/random/boot_id").write_text("boot-2\n")
    finished, _ = install(host, reboot="if-needed")
    assert (finished.exit_code, finished.changed) == (ExitCode.DONE, 0), finished.problems
    assert not host.exists(IN_USE_MARK)


def test_an_installation_that_fails_leaves_the_old_driver_loaded_and_its_services_running(host: LoadedHost) -> None:
    host.installer_fails = True
    before = host.tree()
    finished, _ = install(host)
    what = f"driver {NEW} was not installed: there is no compiler on this host, and the kernel modules need one"
    assert finished.problems[0].what == what
    assert loaded(host) == (OLD, OLD)
    assert host.units == {PERSISTENCED, DCGM}
    assert not any(command[0].endswith("nvidia-uninstall") for command in host.commands)
    log = "/var/log/nvidia-installer.log"
    assert {path for path, value in host.tree().items() if before.get(path) != value} <= {log, "/var/log"}


def test_a_run_that_was_killed_is_taken_up_and_starts_what_it_had_stopped(host: LoadedHost) -> None:
    """Killed while the installer ran: services are stopped, modules unloaded, nobody but the file knows of it."""

    class KilledError(BaseException):
        """As kill -9: nothing of ours runs any more."""

    real = host._runfile

    def kill(words: tuple[str, ...]) -> tuple[int, str]:
        raise KilledError

    host._runfile = kill  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        install(host)
    assert host.units == set()
    host._runfile = real  # type: ignore[method-assign]
    finished, _ = install(host)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert host.units == {PERSISTENCED, DCGM}
    assert loaded(host) == (NEW, NEW)


# -- a driver from packages ------------------------------------------------------------------------------------------


class Plenty(dict[str, str]):
    """A repository that has every package."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return "1.0"


class PackagedHost(LoadedHost):
    """The same with the driver from NVIDIA's packages, whose branch is pinned."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.installed.update({"nvidia-open": f"{OLD}-1", "nvidia-driver-pinning-535": "535"})
        self.available = Plenty({"nvidia-open": f"{NEW}-1"})

    def _dpkg_query(self, words: tuple[str, ...]) -> tuple[int, str]:
        return (0, f"nvidia-driver:amd64: {words[-1]}\n") if "--search" in words else super()._dpkg_query(words)

    def _apt_get(self, words: tuple[str, ...]) -> tuple[int, str]:
        if "--simulate" in words and "purge" not in words:
            return 0, self.removes
        gone = [word.rstrip("-") for word in words if word.startswith("nvidia-") and word.endswith("-")]
        for name in gone:
            del self.installed[name]
        code, said = super()._apt_get(tuple(word for word in words if word.rstrip("-") not in gone))
        if "nvidia-open" in words:
            self._lay(NEW)
        return code, said

    removes = "Remv libnvidia-compute-535 [535.261.03-1]\n"


def take_550(host: FakeHost, **values: Any) -> tuple[Finished, list[Event]]:
    """Install the packages of branch 550."""
    steps = ("packages", "reboot", "driver")
    return install(host, steps=steps, driver="packages", driver_version="550", driver_url="", **values)


def test_another_branch_of_packages_is_loaded_in_the_same_run(tmp_path: Path) -> None:
    host = PackagedHost(tmp_path / "root")
    finished, events = take_550(host)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert loaded(host) == (NEW, NEW)
    assert host.units == {PERSISTENCED, DCGM}
    assert (host.installed["nvidia-open"], "nvidia-driver-pinning-535" in host.installed) == (f"{NEW}-1", False)
    keys = [event.key for event in events if isinstance(event, ChangeDone)]
    assert keys.index("change the driver's packages") < keys.index("load the driver that is installed")
    assert take_550(host)[0].changed == 0


def test_packages_of_a_driver_in_use_are_left_alone(tmp_path: Path) -> None:
    host = PackagedHost(tmp_path / "root")
    host.container("train", 900)
    before = host.tree()
    finished, _ = take_550(host)
    (problem,) = finished.problems
    assert problem.what == f"driver {OLD} is loaded and in use, so 550 can't replace it"
    assert problem.evidence == "container train uses a GPU"
    assert (host.tree(), host.installed["nvidia-open"]) == (before, f"{OLD}-1")
    finished, _ = take_550(host, reboot="if-needed")
    assert finished.summary.startswith("rebooting")
    assert (host.running, host.installed["nvidia-open"]) == ({"train"}, f"{NEW}-1")


def test_packages_that_are_not_the_drivers_do_not_go_for_it(tmp_path: Path) -> None:
    host = PackagedHost(tmp_path / "root")
    host.removes = "Remv libnvidia-compute-535 [535.261.03-1]\nRemv pytorch [2.0]\n"
    finished, _ = take_550(host)
    assert finished.problems[0].what == "apt would take away pytorch for driver 550"
    assert (host.installed["nvidia-open"], loaded(host)) == (f"{OLD}-1", (OLD, OLD))


def test_a_driver_installed_by_others_is_loaded_without_a_reboot(host: LoadedHost) -> None:
    host._lay(NEW)
    finished, _ = install(host)
    assert (finished.exit_code, finished.changed) == (ExitCode.DONE, 1), finished.problems
    assert loaded(host) == (NEW, NEW)
    assert host.units == {PERSISTENCED, DCGM}


def test_and_where_that_fails_a_reboot_is_asked_for(host: LoadedHost) -> None:
    host._lay(NEW)
    host.kernel_holds = True
    finished, _ = install(host)
    assert finished.exit_code == ExitCode.REBOOT_NEEDED
    assert finished.problems[0].evidence == f"the kernel still runs driver {OLD}, installed is {NEW}"
    assert host.units == {PERSISTENCED, DCGM}


@pytest.mark.parametrize("in_use", [False, True])
def test_a_roll_back_takes_the_driver_out_of_the_kernel_if_nobody_uses_it(host: LoadedHost, in_use: bool) -> None:
    install(host)
    host.kernel_holds = in_use
    run = last_undoable_run(host)
    assert run is not None
    roll_back(host, run, CHANGE_KINDS, lambda event: None)
    assert host.units == {PERSISTENCED, DCGM}
    assert loaded(host) == (NEW if in_use else "", "")
