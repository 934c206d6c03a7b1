"""A driver that is loaded while another is installed: who uses it is stopped or named; what was stopped runs again."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.cdi.discover import discover
from gpuprov.core.changes import tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.places import STOPPED
from gpuprov.core.system import System
from gpuprov.driver.running_driver import (
    ReloadDriver,
    StartContainers,
    Unloading,
    parse_containers,
    start_again,
    stop_users,
    unload,
)
from gpuprov.facts.boot import IN_USE_MARK
from gpuprov.facts.driver import GpuHolder, gather_holders, mapped_devices, parse_cgroup
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import ChangeDone, Planned
from tests.runs import undo_last
from tests.unit.fake_host import RELEASE
from tests.unit.loaded_host import CONTAINER, DCGM, NEW, OLD, PERSISTENCED, LoadedHost, install, loaded
from tests.unit.refused import refused

pytestmark = pytest.mark.root


@pytest.fixture
def host(tmp_path: Path) -> LoadedHost:
    return LoadedHost(tmp_path / "root")


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
    "a user's service": ("0::/user.slice/user-7.slice/user@7.service/app.slice/x.service\n", ("user@7.service", "")),
    "a user's scope with a container's name": (
        f"0::/user.slice/user-7.slice/user@7.service/app.slice/docker-{CONTAINER}.scope\n", ("user@7.service", ""),
    ),
    "a user's cgroup with a container's name": (f"0::/user.slice/user-7.slice/docker/{CONTAINER}\n", ("", "")),
    "a service in an LXC container": ("0::/lxc.payload.c1/system.slice/ssh.service\n", ("", "")),
    "a service in a machine": ("0::/machine.slice/machine-c1.scope/payload/system.slice/ssh.service\n", ("", "")),
    "an instance of a template": ("0::/system.slice/system-job.slice/job@7.service/x\n", ("job@7.service", "")),
    "a user in a container": (f"0::/docker/{CONTAINER}/user.slice/user-7.slice\n", ("", CONTAINER)),
    "a name that contains an id": (f"0::/system.slice/x{CONTAINER}y.scope\n", ("", "")),
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
    assert mapped_devices("7f-80 r-xp 0 08:01 1 /usr/lib/libnvidia-ml.so.1\n") == []
    assert str(GpuHolder(9, "x", "/dev/nvidia0", container=CONTAINER)).endswith("open, in container 4f4f4f4f4f4f")


ASKED = "NVIDIA_VISIBLE_DEVICES=all"
ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "--gpus": ({"HostConfig": {"DeviceRequests": [{"Driver": "", "Count": -1}]}}, True),
    "--runtime=nvidia": ({"HostConfig": {"Runtime": "nvidia"}, "Config": {"Env": [ASKED]}}, True),
    "a CDI name": (
        {"HostConfig": {"Runtime": "nvidia"}, "Config": {"Env": ["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"]}}, True,
    ),
    "--device": ({"HostConfig": {"Devices": [{"PathOnHost": "/dev/nvidia0"}]}}, True),
    "the default runtime, no GPU": ({"HostConfig": {"Runtime": "nvidia"}, "Config": {"Env": ["PATH=/bin"]}}, False),
    "void": ({"HostConfig": {"Runtime": "nvidia"}, "Config": {"Env": ["NVIDIA_VISIBLE_DEVICES=void"]}}, False),
    "none": ({"HostConfig": {"Runtime": "nvidia"}, "Config": {"Env": ["NVIDIA_VISIBLE_DEVICES=none"]}}, False),
    "a device that is no GPU": ({"HostConfig": {"Devices": [{"PathOnHost": "/dev/fuse"}, {}]}}, False),
    "nothing is known": ({}, False),
    "runc": ({"HostConfig": {"Runtime": "runc"}, "Config": {"Env": [ASKED]}}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_containers_with_gpus_are_known_by_what_they_asked_for(name: str) -> None:
    row, uses = ROWS[name]
    text = json.dumps([{"Id": CONTAINER, "Name": "/one", **row}])
    assert parse_containers(text, set()) == ({CONTAINER: "one"} if uses else {})
    assert parse_containers(text, {CONTAINER}) == {CONTAINER: "one"}


HOLDS = {
    # As in a container: the device has another name there.
    "the device by another name": ("touch /dev/gpu0; mount --bind $DEVICE /dev/gpu0; exec 9</dev/gpu0", "/dev/gpu0"),
    "a mapping": (
        "exec python3 -c 'import mmap, sys; f = open(sys.argv[1], \"r+b\"); "
        "m = mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE); f.close(); print(\"ready\", flush=True); input()' $DEVICE",
        "/dev/zero",
    ),
    "a file with a GPU's name": ("mount -t tmpfs none /dev; echo x > /dev/nvidia0; exec 9</dev/nvidia0", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDS)
def test_real_processes_hold_a_device_by_its_number_and_not_by_its_name(name: str) -> None:
    # /dev/zero stands for a GPU: without the driver, NVIDIA's devices can't be opened.
    script, device = HOLDS[name]
    command = ("unshare", "--mount", "--propagation", "private", "sh", "-c", f"{script}; echo ready; read -r end")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "DEVICE": "/dev/zero"}
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        found = [one.device for one in gather_holders(System(), ["/dev/zero"]) if one.pid == process.pid]
        process.stdin.close()
    assert found == ([device] if device else [])
    assert [one for one in gather_holders(System(), ["/dev/zero"]) if one.pid == process.pid] == []


def test_a_process_that_ends_while_it_is_looked_at_holds_nothing() -> None:
    class Ending(System):
        def read_text(self, path: str) -> str | None:
            if path == f"/proc/{process.pid}/cgroup":
                process.kill()
                process.wait()
            return super().read_text(path)

    with subprocess.Popen(("sh", "-c", "exec 3< /dev/zero; echo ready; read -r end"), stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        found = gather_holders(Ending(), ["/dev/zero"])
    assert [one for one in found if one.pid == process.pid] == []


# -- the way past it -------------------------------------------------------------------------------------------------


def test_services_stop_modules_are_unloaded_and_all_starts_again(host: LoadedHost) -> None:
    finished, events = install(host)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert host.stopped == [DCGM, PERSISTENCED]
    assert host.unloaded == ["nvidia_modeset", "nvidia_uvm", "nvidia"]
    assert loaded(host) == (NEW, NEW)
    assert host.units == {PERSISTENCED, DCGM}
    assert not host.exists(STOPPED)
    (planned,) = [event for event in events if isinstance(event, Planned)]
    (upgrade,) = planned.upgrades
    assert (upgrade.installed, upgrade.wanted, upgrade.stops, upgrade.reboot) == (OLD, NEW, (DCGM, PERSISTENCED), "no")
    (change,) = planned.changes
    assert change.summary.endswith(f"instead of {OLD}; stopped meanwhile: {DCGM}, {PERSISTENCED}")
    assert change.diff.splitlines() == [
        f"stop {DCGM} (started again afterwards)", f"stop {PERSISTENCED} (started again afterwards)",
        "unload nvidia_modeset", "unload nvidia_uvm", "unload nvidia",
    ]  # fmt: skip
    again, _ = install(host)
    assert (again.exit_code, again.changed) == (ExitCode.DONE, 0)


def test_a_container_is_stopped_with_consent_and_runs_again(host: LoadedHost) -> None:
    host.container("train", 900)
    finished, events = install(host, steps=(), stop_containers=True)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert ("docker", "stop", "train") in host.commands
    assert [event.upgrades[0].stops[0] for event in events if isinstance(event, Planned)] == ["train"]
    assert host.running == {"train"}
    assert loaded(host) == (NEW, NEW)
    # What it is given at its start stands in the CDI specification: that comes first.
    keys = [event.key for event in events if isinstance(event, ChangeDone)]
    assert keys.index("write /etc/cdi/nvidia.json") < keys.index("start the containers again")
    assert not host.exists(STOPPED)


def test_a_display_manager_is_stopped_with_consent_alone(host: LoadedHost) -> None:
    host.units |= {"display-manager.service", "gdm.service"}
    host.process(960, "/usr/lib/xorg/Xorg :0", "/system.slice/gdm.service")
    (host.root / "tmp").mkdir()
    (host.root / "tmp/.X0-lock").write_text("       960\n")
    finished, _ = install(host)
    assert {problem.what.split(" ")[0] for problem in finished.problems} == {"an", "driver"}
    assert all("gpuprov_stop_display_manager: true" in problem.next_step for problem in finished.problems)
    finished, _ = install(host, stop_display_manager=True)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert host.stopped[0] == "gdm.service"


class Patient(LoadedHost):
    """A host whose clock goes by what is waited for, alone."""

    time = 0.0

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def now(self) -> float:
        return self.time


def test_no_module_is_unloaded_while_a_process_has_a_gpu_open(tmp_path: Path) -> None:
    """One that came between the plan and the release, and stays; another one lets go in time."""
    host = Patient(tmp_path / "root")
    wanted = Unloading(OLD, ("nvidia_fs", "nvidia_uvm", "nvidia"), (DCGM,))
    problem = refused(unload, host, wanted, tell_nobody)
    assert problem.what == f"driver {OLD} is still in use, so it can't be replaced"
    assert problem.evidence.startswith("process 700 (/usr/bin/nvidia-persistenced --verbose) has /dev/nvidia0 open")
    assert "kill 700 (" in problem.next_step
    assert not any(command[0] == "rmmod" for command in host.commands)
    assert 15 <= host.time < 20
    host.remove_tree("/proc/700")
    # A program that draws has none of NVIDIA's own devices open.
    node = "/dev/dri/renderD128"
    host.make_directory("/dev/dri")
    host.make_node(node, 226, 128, 0o666)
    host.process(702, "/usr/bin/blender", "/user.slice/session-3.scope")
    (host.root / "proc/702/fd/0").unlink()
    (host.root / "proc/702/fd/0").symlink_to(node)
    assert f"has {node} open" in refused(unload, host, replace(wanted, devices=(node,)), tell_nobody).evidence
    unload(host, wanted, tell_nobody)
    assert host.unloaded == ["nvidia_uvm", "nvidia"]


@pytest.mark.parametrize("reason", ["somebody's process", "the kernel itself"])
def test_with_leave_it_is_left_to_the_reboot(host: LoadedHost, reason: str) -> None:
    if reason == "the kernel itself":
        host.kernel_holds = True
    else:
        host.process(950, "python3 train.py", "/user.slice/user-0.slice/session-3.scope")
    finished, events = install(host, reboot="if-needed")
    assert (finished.exit_code, finished.left_boot) == (ExitCode.REBOOT_NEEDED, "boot-1"), finished.problems
    foreseen = [event.upgrades[0].reboot for event in events if isinstance(event, Planned)]
    assert foreseen == ["if-in-use" if host.kernel_holds else "yes"]
    assert loaded(host) == (OLD, NEW)
    assert host.units == {PERSISTENCED, DCGM}
    host.load(NEW)
    (host.root / "proc/sys/kernel/random/boot_id").write_text("boot-2\n")
    finished, _ = install(host, reboot="if-needed")
    assert (finished.exit_code, finished.changed) == (ExitCode.DONE, 0), finished.problems
    assert not host.exists(IN_USE_MARK)


def test_failed_installation_leaves_the_old_driver_and_its_services(host: LoadedHost) -> None:
    host.container("train", 900)
    host.installer_fails = True
    before = host.tree()
    finished, _ = install(host, stop_containers=True)
    assert ("docker", "stop", "train") in host.commands and host.running == {"train"}
    what = f"driver {NEW} was not installed: there is no compiler on this host, and the kernel modules need one"
    assert finished.problems[0].what == what
    assert loaded(host) == (OLD, OLD)
    assert host.units == {PERSISTENCED, DCGM}
    assert not any(command[0].endswith("nvidia-uninstall") for command in host.commands)
    log = "/var/log/nvidia-installer.log"
    assert {path for path, value in host.tree().items() if before.get(path) != value} <= {log, "/var/log"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_kernel_without_the_drivers_module_gets_it(host: LoadedHost, fails: bool) -> None:
    """As after an update of the kernel, where DKMS does not know the driver, or could not build it."""
    host._lay(NEW)
    host.build("")
    host.remove_tree("/proc/driver")
    (host.root / "proc/devices").unlink()
    host.installer_fails = fails
    finished, _ = install(host)
    assert finished.exit_code == (ExitCode.FAILED if fails else ExitCode.DONE), finished.problems
    if not fails:
        assert loaded(host) == (NEW, NEW)
        undo_last(host)
    # It was there before; the kernel before may still have its module.
    assert discover(host).library_version == NEW


def test_dkms_tree_without_source_is_named_first(host: LoadedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """dkms 3.0.10 of Debian 12: its list ends there, and so does what it builds for the next kernel."""
    lost = "/var/lib/dkms/nvidia/535.129.03"
    said = f"Error! Could not locate dkms.conf file.\nFile: {lost}/source/dkms.conf does not exist.\n"
    real = host.run

    def run(argv: Sequence[str], **more: Any) -> Completed:
        return Completed(tuple(argv), 0, "", said) if argv[0] == "dkms" else real(argv, **more)

    monkeypatch.setattr(host, "run", run)
    finished, _ = install(host)
    (problem,) = finished.problems
    assert problem.next_step.startswith(f"rm -r {lost};") and lost in problem.evidence
    assert (host.stopped, loaded(host)) == ([], (OLD, OLD))


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


@pytest.mark.parametrize("undone", [False, True])
def test_units_that_a_killed_repair_has_stopped_start_with_its_containers(host: LoadedHost, undone: bool) -> None:
    host.container("job", 900)
    stop_users(host, Unloading(units=(DCGM,), containers=("job",)), tell_nobody)
    # The next run stops another unit, and is killed too.
    stop_users(host, Unloading(units=(PERSISTENCED,)), tell_nobody)
    assert (host.running, host.units, host.path(STOPPED).stat().st_mode & 0o777) == (set(), set(), 0o600)
    if undone:
        ReloadDriver.undo(host, {}, None)
    else:
        StartContainers(("job",)).apply(host, tell_nobody)
    assert (host.running, host.units, host.exists(STOPPED)) == ({"job"}, {DCGM, PERSISTENCED}, False)


def test_what_does_not_start_again_is_told_and_the_rest_starts(host: LoadedHost) -> None:
    stop_users(host, Unloading(modules=("nvidia_drm", "nvidia"), units=(DCGM, PERSISTENCED)), tell_nobody)
    host.remove_tree("/sys/module/nvidia_drm")
    host.failing_unit = DCGM
    told: list[str] = []
    start_again(host, lambda message, done, total: told.append(message))
    assert [(PERSISTENCED in one, DCGM in one, "failed" in one) for one in told] == [(1, 0, 0), (0, 1, 1)]
    assert ("modprobe", "nvidia_drm") in host.commands
    assert ("modprobe", "nvidia") not in host.commands


@pytest.mark.parametrize("content", [b"\xff", b"[]", b'{"modules": ["nvidia"], "units": "x"}', b""])
def test_a_damaged_list_of_what_was_stopped_prevents_no_run(host: LoadedHost, content: bytes) -> None:
    host.make_directory(STOPPED.rpartition("/")[0])
    host.write(STOPPED, content)
    start_again(host, tell_nobody)
    assert (host.exists(STOPPED), host.units) == (False, {PERSISTENCED, DCGM})
    assert not any(command[0] in ("modprobe", "systemctl") for command in host.commands)


@pytest.mark.parametrize("held", [False, True])
def test_a_driver_installed_by_others_is_loaded_or_needs_a_reboot(host: LoadedHost, held: bool) -> None:
    host._lay(NEW)
    host.kernel_holds = held
    finished, _ = install(host)
    assert host.units == {PERSISTENCED, DCGM}
    if held:
        assert finished.exit_code == ExitCode.REBOOT_NEEDED
        assert finished.problems[0].evidence == f"the kernel still runs driver {OLD}, installed is {NEW}"
    else:
        assert (finished.exit_code, finished.changed, loaded(host)) == (ExitCode.DONE, 1, (NEW, NEW)), finished.problems


@pytest.mark.parametrize("built", ["", OLD])
def test_a_kernel_without_the_installed_drivers_module_keeps_the_loaded_one(host: LoadedHost, built: str) -> None:
    """As after an upgrade of packages whose build by DKMS failed, or whose compiled modules are for a later kernel."""
    host._lay(NEW)
    host.build(built)
    finished, _ = install(host, driver="preinstalled", driver_version="", driver_url="", reboot="if-needed")
    assert (finished.exit_code, finished.changed, host.stopped, host.unloaded) == (ExitCode.FAILED, 0, [], [])
    what = f"driver {NEW} is installed, but kernel {RELEASE} has no module of it that it takes"
    assert finished.problems[0].what == what
    # In a system container, the kernel and its modules are not this machine's.
    host.write("/run/systemd/container", b"systemd-nspawn\n")
    finished, _ = install(host, driver="preinstalled", driver_version="", driver_url="")
    what = f"driver {NEW} is installed, but the container host runs {OLD}: the two must match"
    assert (finished.problems[0].what, host.unloaded) == (what, [])
    host.remove("/run/systemd/container")
    # A later kernel has a module: a reboot is of use if that is the installed driver's.
    host.make_directory("/lib/modules/6.1.0-14-amd64")
    host.write("/lib/modules/6.1.0-14-amd64/modules.dep", b"updates/dkms/nvidia.ko.xz:\n")
    host.write("/boot/vmlinuz-6.1.0-14-amd64", b"")
    for version, code in ((OLD, ExitCode.FAILED), (NEW, ExitCode.REBOOT_NEEDED)):
        host.on_disk_of["6.1.0-14-amd64"] = version
        finished, _ = install(host, driver="preinstalled", driver_version="", driver_url="", reboot="if-needed")
        assert (finished.exit_code, host.stopped, host.unloaded) == (code, [], []), version


@pytest.mark.parametrize("in_use", [False, True])
def test_a_roll_back_takes_the_driver_out_of_the_kernel_if_nobody_uses_it(host: LoadedHost, in_use: bool) -> None:
    install(host)
    host.kernel_holds = in_use
    undo_last(host)
    assert host.units == {PERSISTENCED, DCGM}
    assert loaded(host) == (NEW if in_use else "", "")
