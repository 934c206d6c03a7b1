"""What programs and files say, as values: recorded from Debian 12, from NVIDIA's driver 550, from nvidia-ctk 1.20."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprov.checks.smi import per_gpu
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.doctor import gather
from gpuprov.doctor.gather import gather_containers
from gpuprov.doctor.snapshot import (
    Containers,
    Loaded,
    ModuleFile,
    Unit,
    docker_lines,
    find_in_log,
    host_paths,
    lines_that_match,
    parse_modinfo,
    parse_units,
    telling_lines,
)
from gpuprov.protocol.errors import Stopped
from tests.unit.doctor.host import SMI
from tests.unit.scripted import Answer, Scripted

# `systemctl show -p Id,LoadState,ActiveState,Result,UnitFileState` of systemd 252.
UNITS = """\
Result=exit-code
Id=docker.service
LoadState=loaded
ActiveState=failed
UnitFileState=enabled

Id=nvidia-fabricmanager.service
LoadState=not-found
ActiveState=inactive
"""
# kmod 30, a module of DKMS that is signed.
MODINFO = """\
filename:       /lib/modules/6.1.0-13-amd64/updates/dkms/nvidia.ko
alias:          char-major-195-*
version:        550.163.01
license:        NVIDIA
signer:         DKMS module signing key
vermagic:       6.1.0-13-amd64 SMP preempt mod_unload modversions
parm:           NvSwitchRegDwords:NvSwitch regkey (charp)
"""
DMESG = """\
[    0.000000] Linux version 6.1.0-13-amd64
[    1.000000] usb 1-1: new high-speed USB device
[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0
               NVRM: (PCI ID: 10de:26b5) installed in this system has
               NVRM: fallen off the bus and is not responding to commands.
[ 1900.000000] eth0: link up
"""


def test_units() -> None:
    assert parse_units(UNITS) == {
        "docker.service": Unit("loaded", "failed", "exit-code", "enabled"),
        "nvidia-fabricmanager.service": Unit("not-found", "inactive"),
    }
    assert parse_units("") == {}


def test_modinfo() -> None:
    assert parse_modinfo(MODINFO) == ModuleFile(
        "/lib/modules/6.1.0-13-amd64/updates/dkms/nvidia.ko", "550.163.01",
        "6.1.0-13-amd64 SMP preempt mod_unload modversions", "DKMS module signing key", "NVIDIA",
    )  # fmt: skip
    assert parse_modinfo("") == ModuleFile()


def test_the_drivers_lines_are_kept_and_those_of_others_not() -> None:
    lines = telling_lines(DMESG)
    assert len(lines) == 3
    assert all("NVRM" in line for line in lines)


@pytest.mark.parametrize(
    "prefix",
    ["", "[ 1843.3] ", "Nov 21 11:31:32 gpu07 kernel: ", "kernel: ", "[  +0.000421] ", "[    9.1] [  T1946] ",
     "[    9.1][   C12] "],
)  # fmt: skip
def test_a_sentence_over_several_lines_is_one(prefix: str) -> None:
    lines = [f"{prefix}NVRM: The NVIDIA GPU 0000:b3:00.0", f"{prefix}NVRM: installed in this system has",
             f"{prefix}NVRM: fallen off the bus and is not responding."]  # fmt: skip
    found = find_in_log(lines, r"GPU (?P<bus>\S+) installed in this system has fallen off the bus")
    assert found is not None
    assert found[0] == {"bus": "0000:b3:00.0"}
    assert found[1] == tuple(lines)


def test_the_last_of_several_counts_and_no_more_than_a_few_lines_are_evidence() -> None:
    lines = [f"NVRM: Xid (PCI:0000:{number:02}:00): 79, off" for number in range(30)]
    found = find_in_log(lines, r"Xid \(PCI:(?P<bus>[^)]+)\): 79")
    assert found == ({"bus": "0000:29:00"}, (lines[-1],))
    everything = find_in_log(lines, r"(?s)Xid .*")
    assert everything is not None and len(everything[1]) == 6
    assert find_in_log((), "Xid") is None


def test_what_an_earlier_docker_said_is_past() -> None:
    old = 'level=error msg="could not select device driver"'
    log = f'level=info msg="Starting up"\n{old}\nlevel=info msg="Starting up"\nlevel=info msg="API listen"\n'
    assert docker_lines(log) == ('level=info msg="Starting up"', 'level=info msg="API listen"')
    assert docker_lines(old) == (old,)
    assert docker_lines("") == ()


@pytest.mark.parametrize("begins", ["Starting docker.service - Docker Application Container Engine...",
                                    "Starting Docker Application Container Engine..."])  # fmt: skip
def test_a_start_that_was_refused_has_the_log_of_this_start_alone(begins: str) -> None:
    first = "unable to configure the Docker daemon with file /etc/docker/daemon.json: the first fault"
    second = first.replace("first", "second")
    assert docker_lines(f"{begins}\n{first}\n{begins}\n{second}\n") == (begins, second)


YAML = "devices:\n- containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n      hostPath: /dev/nvidia0\n"
JSON = '{"mounts": [\n  {"hostPath": "/usr/lib/libcuda.so.1", "containerPath": "/x"},\n  {"hostPath":"/a b"}]}\n'
# As nvidia-ctk writes them since 1.12: a node's hostPath is there only if it differs.
NODES = """devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/dri/renderD129
      major: 226
    - path: /dev/dri/card1
      hostPath: /driver/dev/dri/card1
    - hostPath: /driver/dev/dri/card2
      path: /dev/dri/card2
    hooks:
    - path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, chmod, --path, /dev/dri]
"""


def test_paths_on_the_host_with_their_lines() -> None:
    assert host_paths(YAML) == (("/dev/nvidia0", 5),)
    assert host_paths(JSON) == (("/usr/lib/libcuda.so.1", 2), ("/a", 3))
    assert host_paths(NODES) == (("/dev/dri/renderD129", 5), ("/driver/dev/dri/card1", 8), ("/driver/dev/dri/card2", 9))


def test_lines_with_their_places() -> None:
    texts = {"/etc/modprobe.d/a.conf": "# blacklist nvidia\n  blacklist nvidia\n", "/b": ""}
    assert lines_that_match(texts, r"^\s*blacklist") == (("/etc/modprobe.d/a.conf:2", "blacklist nvidia"),)


def test_each_gpu_of_a_real_report() -> None:
    gpus = per_gpu(SMI)
    assert len(gpus) == 2
    for gpu in gpus:
        assert gpu["mig_mode/current_mig"] == "Disabled"
        assert gpu["mig_devices"] == "None"
        assert gpu["compute_mode"] == "Default"


@pytest.mark.parametrize("said", [
    f"{SMI}WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n", f"Welcome to our cluster\n{SMI}", SMI[:-400],
])  # fmt: skip
def test_a_report_counts_up_to_where_it_ends(said: str) -> None:
    assert [gpu["compute_mode"] for gpu in per_gpu(said)] == ["Default", "Default"]


@pytest.mark.parametrize("said", ["", "NVIDIA-SMI has failed", "<a>" * 5000, SMI[:200]])
def test_what_is_no_report_has_no_values(said: str) -> None:
    assert all("compute_mode" not in gpu for gpu in per_gpu(said))


class Docker(Scripted):
    """A docker that lists containers of which the last one is gone when it is asked for more."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def which(self, program: str) -> str | None:
        return "/usr/bin/docker" if program == "docker" else None

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if argv[1] == "ps":
            return "".join(f"{name}\n" for name in self.names)
        lines = "".join(f"{number} /{name}\n" for number, name in enumerate(self.names[:-1], 1))
        return 1, lines, f"Error: No such container: {self.names[-1]}\n"


@pytest.fixture(autouse=True)
def surveys(monkeypatch: pytest.MonkeyPatch) -> None:
    def survey(system: System, name: str, call: object) -> Any:
        if name == "hostile":
            raise RecursionError("too deep")
        return SimpleNamespace(libraries=(), faults=())

    monkeypatch.setattr(gather, "survey", survey)
    monkeypatch.setattr(gather, "has_gpu_node", lambda pid: pid != "2")


def test_one_that_ends_meanwhile_hides_no_other() -> None:
    found = gather_containers(Docker("a", "without-gpus", "b", "gone"))
    assert found == Containers((Loaded("docker", "a"), Loaded("docker", "b")))


def test_an_examination_that_breaks_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    found = gather_containers(Docker("a", "without-gpus", "hostile", "b", "gone"))
    assert found == Containers((Loaded("docker", "a"),), 2, "RecursionError: too deep")
    assert capfd.readouterr().err == ""


def test_a_podman_that_fails_is_told() -> None:
    class Podman(Docker):
        def which(self, program: str) -> str | None:
            return f"/usr/bin/{program}"

        def answer(self, argv: tuple[str, ...]) -> Answer:
            return super().answer(argv) if argv[0] == "docker" else (125, "", "toml: line 1")

    found = gather_containers(Podman("a", "gone"))
    seen = "`podman ps --format {{.Names}}` exited 125\ntoml: line 1"
    assert found == Containers((Loaded("docker", "a"),), 0, seen)


@pytest.mark.parametrize("asked_while", ["ps", "inspect"])
def test_a_stop_among_containers_is_the_callers_to_notice(asked_while: str) -> None:
    asked: list[str] = []

    class Interrupted(Docker):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            asked.append(argv[1])
            self._leave_if_asked()
            return super().run(argv, **more)

    system = Interrupted("a", "gone")
    with pytest.raises(Stopped), system.interruptible(lambda: asked_while in asked):
        gather_containers(system)
