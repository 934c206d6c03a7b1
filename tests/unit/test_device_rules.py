"""GPUs of running containers that systemd does not know: they are found in the kernel's rules, and systemd is told."""

import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core import units
from gpuprov.core.commands import Completed
from gpuprov.core.device_rules import UnregisteredDevices, allows, register_devices, unregistered_devices
from gpuprov.core.units import daemon_reload
from gpuprov.protocol.events import ChangeStarted, Event, Note, Planned
from gpuprov.protocol.request import Request
from gpuprov.runtime_hook import device_cgroup
from gpuprov.runtime_hook.device_cgroup import program
from gpuprov.runtime_hook.errors import Refused
from tests.unit.ask import ask, finished
from tests.unit.fake_host import FakeHost, write_runfile
from tests.unit.refused import refused
from tests.unit.runtime_hook.test_device_cgroup import ALLOW, DENY, EXIT, LOADS, NODES, verdict
from tests.unit.test_units import NO_ANSWER

pytestmark = pytest.mark.root
ID, CRI = "4f5c" * 16, ("cri-containerd", "crio")
SCOPE = f"docker-{ID}.scope"
GROUP = f"/system.slice/{SCOPE}"
HOOKS = program([{"type": "c", "major": 195, "minor": 0, "access": "rw"}], LOADS + DENY + EXIT)


def code(*steps: tuple[int, int, int, int, int]) -> bytes:
    """Return instructions: operation, to, from, offset, number."""
    return b"".join(struct.pack("=BBhi", op, source << 4 | to, offset, last) for op, to, source, offset, last in steps)


# As runc's rule `c 195:1 rw` (opencontainers/runc, devicefilter) and systemd's (bpf-devices.c) are written.
RUNCS = code(
    (0x69, 2, 1, 0, 0), (0x61, 3, 1, 0, 0), (0x74, 3, 0, 0, 16), (0x61, 4, 1, 4, 0), (0x61, 5, 1, 8, 0),
    (0x55, 2, 0, 7, 2), (0xBC, 1, 3, 0, 0), (0x54, 1, 0, 0, 6), (0x5D, 1, 3, 4, 0), (0x55, 4, 0, 3, 195),
    (0x55, 5, 0, 2, 1), (0xB4, 0, 0, 0, 1), (0x95, 0, 0, 0, 0), (0xB4, 0, 0, 0, 0), (0x95, 0, 0, 0, 0),
)  # fmt: skip
SYSTEMDS = code(
    (0x61, 2, 1, 0, 0), (0x54, 2, 0, 0, 0xFFFF), (0x61, 3, 1, 0, 0), (0x74, 3, 0, 0, 16), (0x61, 4, 1, 4, 0),
    (0x61, 5, 1, 8, 0), (0xBC, 1, 3, 0, 0), (0x54, 1, 0, 0, 6), (0x5D, 1, 3, 4, 0), (0x55, 2, 0, 3, 2),
    (0x55, 4, 0, 2, 195), (0x55, 5, 0, 1, 1), (0x05, 0, 0, 2, 0), (0xB7, 0, 0, 0, 0), (0x05, 0, 0, 1, 0),
    (0xB7, 0, 0, 0, 1), (0x95, 0, 0, 0, 0),
)  # fmt: skip


@pytest.mark.parametrize("written", [RUNCS, SYSTEMDS])
def test_programs_of_runc_and_systemd_are_understood(written: bytes) -> None:
    asked = [(major, minor, access) for major in (1, 195) for minor in (0, 1) for access in (1, 2, 4, 6)]
    assert [one for one in asked if allows(written, 2, *one)] == [(195, 1, 2), (195, 1, 4), (195, 1, 6)]
    assert not allows(written, 1, 195, 1, 2)


@pytest.mark.parametrize("then", [ALLOW, DENY])
def test_programs_of_the_hook_are_understood(then: bytes) -> None:
    whole = program(NODES, LOADS + then + EXIT)
    for kind in (1, 2):
        for major, minor, access in ((195, 0, 2), (195, 0, 1), (8, 1, 7)):
            assert allows(whole, kind, major, minor, access) == bool(verdict(whole, kind, access, major, minor))


@pytest.mark.parametrize(
    "strange", [b"", code((0x85, 0, 0, 0, 1)), code((0x05, 0, 0, -1, 0)), code((0x05, 0, 0, 9, 0))]
)
def test_a_program_that_is_not_understood_allows_nothing(strange: bytes) -> None:
    assert not allows(strange, 2, 195, 0, 2)


class ScopeHost(FakeHost):
    """A host with two GPUs and one container, whose rules a hook has changed beside systemd."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.allowed = ["/dev/char/1:3 rwm", "char-* m"]
        self.policy = "strict"
        self.refuses = ""
        for number in range(2):
            place = root / f"dev/nvidia{number}"
            place.unlink(missing_ok=True)
            os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(195, number))
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/cgroup.controllers").touch()

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        """Answer as systemctl does for scopes."""
        if argv[:2] == ("systemctl", "list-units"):
            return Completed(tuple(argv), 0, f"init.scope loaded active running a\n{SCOPE} loaded active running b\n")
        if argv[:2] == ("systemctl", "show") and SCOPE in argv:
            allowed = "".join(f"DeviceAllow={one}\n" for one in self.allowed)
            shown = f"{allowed}Id={SCOPE}\nControlGroup={GROUP}\nDevicePolicy={self.policy}\n"
            return Completed(tuple(argv), 0, shown)
        if argv[:2] == ("systemctl", "set-property"):
            self.commands.append(tuple(argv))
            self.allowed += [one.partition("=")[2] for one in argv[4:]] if not self.refuses else []
            return Completed(tuple(argv), int(bool(self.refuses)), "", self.refuses)
        return super().run(argv, **more)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScopeHost:
    made = ScopeHost(tmp_path / "root")
    monkeypatch.setattr(device_cgroup, "programs", lambda folder: [HOOKS] if folder.endswith(GROUP) else 0)
    return made


def test_systemd_is_told_before_it_reads_its_units_again(host: ScopeHost) -> None:
    (found,) = unregistered_devices(host)
    assert str(found) == "docker 4f5c4f5c4f5c (/dev/nvidia0)"
    daemon_reload(host)
    assert host.commands[-2:] == [
        ("systemctl", "set-property", "--runtime", SCOPE, "DeviceAllow=/dev/char/195:0 rw"),
        ("systemctl", "daemon-reload"),
    ]
    assert (host.root / "dev/char/195:0").readlink() == Path("../nvidia0")
    assert unregistered_devices(host) == ()


@pytest.mark.parametrize(
    ("policy", "programs", "allowed"),
    [
        ("auto", [HOOKS], []),
        ("strict", [], []),
        ("strict", [HOOKS, LOADS + DENY + EXIT], []),
        ("strict", [HOOKS], ["/dev/char/195:0 rw"]),
        ("closed", [HOOKS], ["/dev/nvidia0 rwm"]),
    ],
    ids=["no policy", "privileged", "another program forbids it", "known by number", "known by name"],
)
def test_a_container_that_loses_nothing_is_left_alone(
    host: ScopeHost, monkeypatch: pytest.MonkeyPatch, policy: str, programs: list[bytes], allowed: list[str]
) -> None:
    monkeypatch.setattr(device_cgroup, "programs", lambda _: programs)
    host.policy, host.allowed = policy, [*host.allowed, *allowed]
    assert unregistered_devices(host) == ()


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ("c 1:3 rwm\nc 195:0 rw\n", {"/dev/nvidia0": ("195:0", "rw")}),
        ("c 195:* rwm\n", {"/dev/nvidia0": ("195:0", "rwm"), "/dev/nvidia1": ("195:1", "rwm")}),
        ("c *:* m\n", None),
        ("a *:* rwm\n", None),
        ("", None),
    ],
)
def test_version_1_has_its_rules_as_text(host: ScopeHost, rules: str, found: dict[str, tuple[str, str]] | None) -> None:
    (host.root / "sys/fs/cgroup/cgroup.controllers").unlink()
    folder = host.root / f"sys/fs/cgroup/devices{GROUP}"
    folder.mkdir(parents=True)
    (folder / "devices.list").write_text(rules)
    assert [one.nodes for one in unregistered_devices(host)] == ([found] if found else [])


def events_of(host: ScopeHost, command: str = "install", **options: Any) -> list[Event]:
    write_runfile(host.root / "driver.run")
    spec = {"driver_version": "550.163.01", "driver_url": "/driver.run", "packages": ["site-gpu-tools"]}
    return ask(host, Request(command, spec, steps=("packages",), **options))[1]


def unreadable(host: ScopeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel hide the rules; a process of the container has the second GPU open."""

    def refuse(_: str) -> list[bytes]:
        raise Refused("this kernel does not show the device cgroup's program")

    monkeypatch.setattr(device_cgroup, "programs", refuse)
    folder = host.root / f"sys/fs/cgroup{GROUP}"
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text("77\n78\n")
    (host.root / "proc/77/fd").mkdir(parents=True)
    (host.root / "proc/77/fd/3").symlink_to("/dev/nvidia1")


def test_a_plan_names_the_containers_and_what_they_lose(host: ScopeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of(host, check=True)
    told = "before the first change, systemd is told of devices that running containers use: docker 4f5c4f5c4f5c"
    assert [one.message for one in events if isinstance(one, Note) and "systemd is told" in one.message] == [
        f"{told} (/dev/nvidia0)"
    ], events
    assert [one.disturbs for one in events if isinstance(one, Planned)] == [False]
    unreadable(host, monkeypatch)
    events = events_of(host, check=True)
    assert [one.disturbs for one in events if isinstance(one, Planned)] == [True]
    warnings = (one.message for one in events if isinstance(one, Note) and one.level == "warning")
    (said,) = (one for one in warnings if "reload" in one)
    assert said.startswith("`systemctl daemon-reload` takes devices from docker 4f5c4f5c4f5c (/dev/nvidia1): this ")
    assert register_devices(host)[0][1] == "this kernel does not show the device cgroup's program"


def test_a_host_that_is_not_drained_keeps_its_containers(host: ScopeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable(host, monkeypatch)
    events = events_of(host, require_drained=True)
    assert finished(events).problems[0].what == "the host is not drained, and what is left to do disturbs containers"
    assert not any(isinstance(one, ChangeStarted) for one in events)


@pytest.mark.parametrize("command", ["install", "rollback"])
def test_a_systemd_that_refuses_ends_the_run_before_its_first_change(host: ScopeHost, command: str) -> None:
    if command == "rollback":
        events_of(host)
        host.allowed = host.allowed[:2]
    host.refuses = "Failed to set unit properties: Access denied"
    events = events_of(host, command)
    (problem,) = finished(events).problems
    assert "Access denied" in problem.evidence and "docker stop 4f5c4f5c4f5c" in problem.next_step
    assert not any(isinstance(one, ChangeStarted) for one in events)


@pytest.mark.parametrize("answer", NO_ANSWER, ids=str)
@pytest.mark.parametrize("verb", ["list-units", "show"])
def test_no_answer_of_systemd_means_no_container(
    host: ScopeHost, monkeypatch: pytest.MonkeyPatch, verb: str, answer: tuple[int, str, str]
) -> None:
    """A plan would name none that loses its GPUs, and systemd would be told of none before it reads its units again."""
    answering = host.run
    silent = lambda argv, **more: Completed(tuple(argv), *answer) if argv[1] == verb else answering(argv, **more)  # noqa: E731
    monkeypatch.setattr(host, "run", silent)
    for look in (unregistered_devices, register_devices):
        assert refused(look, host).next_step == "run the same command again"


@pytest.mark.parametrize(
    ("prefix", "command"),
    [("docker", "docker"), ("libpod", "podman"), ("nerdctl", "nerdctl"), *((one, "crictl") for one in CRI)],
)
def test_each_engines_containers_are_stopped_by_its_own_command(prefix: str, command: str) -> None:
    assert UnregisteredDevices(f"{prefix}-{ID}.scope", {}).stop == f"{command} stop 4f5c4f5c4f5c"


def test_nothing_but_one_function_makes_systemd_read_its_units_again() -> None:
    """Another call would take the GPUs from containers."""
    sources = Path(units.__file__).parents[1].rglob("*.py")
    calls = [path.name for path in sources if '"daemon-reload")' in path.read_text()]
    assert sorted(calls) == ["units.py"]
