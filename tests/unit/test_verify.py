"""The checks of verify, and what becomes of the later ones."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from gpuprov import toolkit
from gpuprov.cdi.discover import discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import render_json
from gpuprov.checks import cuda_checks
from gpuprov.checks.engines import PODMAN, EngineTest, ended
from gpuprov.checks.outcome import Checks
from gpuprov.checks.smi import SmiReport
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.engines import other_engines
from gpuprov.facts.boot import NODES, PROGRAM, UNITS
from gpuprov.protocol.events import CheckDone, Event
from gpuprov.protocol.spec import HostSpec
from gpuprov.verify import verify
from tests.simgpu import gpu
from tests.unit.checks.test_smi import LAUGHS, REPORT
from tests.unit.driver_tree import write_driver

pytestmark = pytest.mark.root

RUNTIME = toolkit.runtime_path(HostSpec())
INFO = {
    "ServerVersion": "28.5.2",
    "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"],
    "Runtimes": {"runc": {"path": "runc"}, "nvidia": {"path": RUNTIME}},
    "DefaultRuntime": "runc",
    "ContainersRunning": 0,
}


_REFUSES = "unable to configure the Docker daemon with file /etc/docker/daemon.json: "


def only(report: str, minor: int) -> str:
    """The report of a container that sees that one GPU of the two."""
    other = gpu(1 - minor).bus_id
    return re.sub(rf'\t<gpu id="{other}">.*?\t</gpu>\n', "", report, flags=re.DOTALL)


class RecordedHost(System):
    """A host with two GPUs, driver, docker and runtime; `answers` changes what a command, by its key, says."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.answers: dict[str, tuple[int, str, str]] = {
            "smi": (0, REPORT, ""),
            "info": (0, json.dumps(INFO), ""),
            # systemd does not answer: no unit is known.
            "show": (1, "", ""),
            "--version": (0, "Docker version 28.5.2, build ecc6942", ""),
            "--validate": (125, "", "unknown flag: --validate"),
            "--log-level=none": (1, "", f"{_REFUSES}unexpected EOF"),
            "inspect": (0, "[]", ""),
            "ps": (0, "trainer\n", ""),
            "all": (0, REPORT, ""),
            gpu(1).uuid: (0, only(REPORT, 1), ""),
            "none": (0, "", ""),
            "void": (0, "", ""),
            "gpus": (0, REPORT, ""),
            "cdi": (0, REPORT, ""),
        }
        self.asked: list[tuple[str, ...]] = []
        self.programs = {"docker", "dockerd", "systemctl", "nvidia-smi", "sh", "ls", "cat"}

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}" if program in self.programs else None

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        argv = tuple(argv)
        self.asked.append(argv)
        return Completed(argv, *self.answers[self._key(argv)])

    def _key(self, argv: tuple[str, ...]) -> str:
        if argv[0] == "nvidia-smi":
            return "smi"
        if argv[1] != "run":
            return argv[1]
        if "--gpus=all" in argv:
            assert not [word for word in argv if word.startswith("--runtime")]
            return "gpus"
        if "--device=nvidia.com/gpu=all" in argv:
            return "cdi"
        devices = [word.partition("=")[2] for word in argv if word.startswith("NVIDIA_VISIBLE_DEVICES=")]
        return devices[0] if devices else "none"


SPEC = HostSpec(verify_image="example.org/cuda:12.4")
CONTAINERS = [
    "docker, all GPUs", "docker, one GPU", "docker, no GPU", "docker run --gpus", "docker run --device",
    *cuda_checks.names("docker"),
]  # fmt: skip
NAMES = ["driver", "device nodes", "CDI specification", "next kernel", "docker", "runtime nvidia", "image", *CONTAINERS]


def before(name: str) -> list[str]:
    """The names of the checks before this one."""
    return NAMES[: NAMES.index(name)]


@pytest.fixture
def host(tmp_path: Path) -> RecordedHost:
    write_driver(tmp_path, 2)
    made = RecordedHost(tmp_path)
    for path, content in (
        (toolkit.CDI_SPECIFICATION, render_json(specification(discover(made)))),
        ("/etc/docker/daemon.json", json.dumps({"runtimes": {"nvidia": {"path": RUNTIME}}}).encode()),
        (RUNTIME, b"#!/bin/sh\n"),
    ):
        made.make_directory(str(Path(path).parent))
        made.write(path, content)
    return made


@pytest.fixture(autouse=True)
def cuda_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of CUDA have tests of their own, in verify/test_cuda_checks.py."""

    def well(checks: Checks, test: EngineTest, *, own_image: bool) -> None:
        assert own_image is False
        for name in cuda_checks.names(test.engine.name):
            checks.check(name, lambda: ("", ""))

    monkeypatch.setattr(cuda_checks, "cuda_checks", well)


def checks(host: RecordedHost, spec: HostSpec = SPEC) -> tuple[bool, dict[str, CheckDone]]:
    """Verify; return whether all went well, and the checks by their names, in their order."""
    seen: list[Event] = []
    good = verify(host, spec, seen.append).good
    done = [event for event in seen if isinstance(event, CheckDone)]
    assert len(done) == len(seen) == len({one.name for one in done})
    return good, {one.name: one for one in done}


def states(done: Mapping[str, CheckDone]) -> dict[str, list[str]]:
    names = ("ok", "failed", "skipped")
    return {status: [one.name for one in done.values() if one.status == status] for status in names}


def test_a_host_that_is_well(host: RecordedHost) -> None:
    good, done = checks(host)
    assert good
    assert states(done) == {"ok": NAMES, "failed": [], "skipped": []}
    assert done["driver"].on_host == "550.163.01, CUDA 12.4, 2 GPUs"
    assert done["docker, all GPUs"].in_container == "2 GPUs, every field the same"
    assert done["docker, one GPU"].on_host == gpu(1).uuid


def test_of_a_divided_gpu_a_mig_device_is_asked_for(host: RecordedHost) -> None:
    """The CDI specification has no whole GPU in MIG mode: a container that asks for its UUID does not start."""
    part = "<mig_device><index>0</index><gpu_instance_id>1</gpu_instance_id></mig_device>"
    report = re.sub(r"(?<=<mig_devices>)\s*None", part, REPORT.replace("<current_mig>Disabled", "<current_mig>Enabled"))
    host.answers |= dict.fromkeys(("smi", "all", "gpus", "cdi"), (0, report, ""))
    host.answers |= {"1:0": (0, only(report, 1), ""), gpu(1).uuid: (125, "", "gpuprov: there is no GPU")}
    good, done = checks(host)
    assert (good, done["docker, one GPU"].on_host) == (True, "1:0")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", ""), "modprobe -a"),
        ((12, "", "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system."), "lists none: gpuprov install"),
        ((18, "Failed to initialize NVML: Driver/library version mismatch\n", ""), "versions: gpuprov doctor"),
        ((127, "", "nvidia-smi: command not found"), "nvidia-smi is not installed"),
        ((1, "", ""), "(silent)"),
        ((0, "garbage", ""), "prints no report, but: garbage; is it the driver's own program?"),
        ((0, "<garbage", ""), "is no XML report"),
        ((0, "<nvidia_smi_log/>", ""), "nvidia-smi sees no GPU"),
    ],
)
def test_no_container_without_driver(host: RecordedHost, answer: tuple[int, str, str], reason: str) -> None:
    host.answers["smi"] = answer
    good, done = checks(host)
    assert not good
    assert states(done) == {"ok": before("image")[1:], "failed": ["driver"], "skipped": CONTAINERS}
    assert reason in done["driver"].reason and "\n" not in done["driver"].reason
    assert {done[name].reason for name in CONTAINERS} == {"requires the driver"}
    assert not [argv for argv in host.asked if argv[:2] == ("docker", "run")]


# docker 20.10 reads the first value of the file; of a duplicate name the last counts.
@pytest.mark.parametrize(
    "text",
    [
        '{"runtimes": {"nvidia": {"path": "RUNTIME"}}} x',
        '{"runtimes": {}, "runtimes": {"nvidia": {"path": "RUNTIME"}}}',
    ],
)
def test_a_file_that_docker_reads_is_no_failure(host: RecordedHost, text: str) -> None:
    host.write("/etc/docker/daemon.json", text.replace("RUNTIME", RUNTIME).encode())
    host.answers["--log-level=none"] = (1, "", "unable to parse logging level: none")
    assert checks(host)[0]


def test_without_docker_neither_runtime_nor_containers_are_tried(host: RecordedHost) -> None:
    host.answers["info"] = (1, "", "Cannot connect to the Docker daemon")
    good, done = checks(host)
    assert not good
    assert states(done) == {"ok": before("docker"), "failed": ["docker"], "skipped": ["runtime nvidia", *CONTAINERS]}
    assert "Cannot connect to the Docker daemon" in done["docker"].reason
    assert done["runtime nvidia"].reason == "requires docker"


def test_each_skipped_check_names_what_it_lacks_itself(host: RecordedHost) -> None:
    host.answers["info"] = (1, "", "Cannot connect")
    host.answers["smi"] = (9, "", "")
    _, done = checks(host, HostSpec(torch_image="example.org/torch"))
    assert done["runtime nvidia"].reason == "requires docker"
    assert done["docker, all GPUs"].reason == done["torch"].reason == "requires the driver"


@pytest.mark.parametrize(
    ("daemon_json", "loaded", "reason"),
    [
        ("{}", RUNTIME, "does not have runtime nvidia"),
        (None, "/usr/bin/other", "docker info: /usr/bin/other"),
        (None, None, "docker info: no runtime nvidia"),
        ("{", RUNTIME, "daemon.json is not valid JSON: line 1, column 2"),
    ],
)
def test_no_runtime_no_container(host: RecordedHost, daemon_json: str | None, loaded: str | None, reason: str) -> None:
    if daemon_json is not None:
        host.write("/etc/docker/daemon.json", daemon_json.encode())
    runtimes = {"nvidia": {"path": loaded}} if loaded else {}
    host.answers["info"] = (0, json.dumps({**INFO, "Runtimes": runtimes}), "")
    good, done = checks(host)
    assert not good
    assert states(done) == {"ok": before("runtime nvidia"), "failed": ["runtime nvidia"], "skipped": CONTAINERS}
    assert reason in done["runtime nvidia"].reason
    assert done["docker, no GPU"].reason == "requires the runtime"


def test_a_disabled_docker_is_named_as_such(host: RecordedHost) -> None:
    shown = "Id=docker.service\nLoadState=loaded\nActiveState=active\nUnitFileState=disabled\n"
    host.answers["show"] = (0, shown, "")
    reason = checks(host)[1]["runtime nvidia"].reason
    assert reason == "docker.service is disabled, so docker does not start at the next boot; run gpuprov install"


@pytest.mark.parametrize(
    ("path", "content", "failed", "reason"),
    [
        (RUNTIME, None, "runtime nvidia", f"{RUNTIME} is missing; run gpuprov install"),
        ("/dev/nvidia1", None, "device nodes", "/dev/nvidia1 is missing; run gpuprov install, which makes it"),
        ("/proc/driver/nvidia/version", None, "device nodes", "modprobe nvidia"),
        (f"{UNITS}/{NODES}", b"x", "device nodes", "/usr/lib/gpuprov/boot.pyz is missing"),
        (PROGRAM, b"x", "device nodes", f"{UNITS}/{NODES} is missing"),
        (PROGRAM, b"", "device nodes", f"{PROGRAM} is missing, empty or masked"),
        (toolkit.CDI_SPECIFICATION, None, "CDI specification", "is missing"),
        (toolkit.CDI_SPECIFICATION, b"{}", "CDI specification", "does not describe the driver and GPUs"),
    ],
)
def test_a_file_that_is_missing_or_old_fails(
    host: RecordedHost, path: str, content: bytes | None, failed: str, reason: str
) -> None:
    host.remove(path)
    if content is not None:
        host.make_directory(str(Path(path).parent))
        host.write(path, content)
    good, done = checks(host)
    assert (good, done[failed].status, reason in done[failed].reason) == (False, "failed", True)
    found = states(done)
    assert path.startswith("/proc") or found["failed"] == [failed]
    assert found["skipped"] == (CONTAINERS if path == RUNTIME else [])


def test_a_masked_unit_of_the_boot_fails(host: RecordedHost) -> None:
    for path in (PROGRAM, *(f"{folder}/{NODES}" for folder in (UNITS, f"{UNITS}/multi-user.target.wants"))):
        host.make_directory(str(Path(path).parent))
        host.write(path, b"x")
    host.make_link(f"{UNITS}/{NODES}", "/dev/null")
    reason = checks(host)[1]["device nodes"].reason
    assert reason.startswith(f"{UNITS}/{NODES} is missing, empty or masked: the next boot may make no nodes")


def test_without_an_image_no_container_is_tried(host: RecordedHost) -> None:
    host.answers["images"] = (0, "", "")
    host.run = _without_ldd(host)  # type: ignore[method-assign]
    good, done = checks(host, HostSpec())
    assert not good
    assert states(done) == {"ok": before("image"), "failed": ["image"], "skipped": CONTAINERS}
    assert done["docker, all GPUs"].reason == "requires an image"


def _without_ldd(host: RecordedHost) -> Callable[..., Completed]:
    recorded = host.run
    return lambda argv, **more: Completed(tuple(argv), 127) if argv[0] == "ldd" else recorded(argv, **more)


_WAITED = 'time="2026-11-28T23:57:30Z" level=error msg="error waiting for container: context canceled"'


@pytest.mark.parametrize(
    ("key", "answer", "failed", "reason"),
    [
        ("all", (0, REPORT.replace(gpu(0).uuid, gpu(5).uuid), ""), "docker, all GPUs",
         f"GPU 0 UUID: host {gpu(0).uuid}, container {gpu(5).uuid}"),
        ("all", (0, only(REPORT, 0), ""), "docker, all GPUs", "GPU count: host 2, container 1"),
        ("all", (0, "<html/>", ""), "docker, all GPUs", "driver: host 550.163.01, container (none)"),
        ("all", (0, LAUGHS, ""), "docker, all GPUs", "is no report"),
        ("all", (125, "", "docker: Error response\ngpuprov: there is no GPU 7\nSee 'docker run --help'."),
         "docker, all GPUs", "the container exited 125: gpuprov: there is no GPU 7"),
        ("all", (1, "", ""), "docker, all GPUs", "the container exited 1: (silent)"),
        (gpu(1).uuid, (0, REPORT, ""), "docker, one GPU",
         f"asked for {gpu(1).uuid}, the container sees {gpu(0).uuid}, {gpu(1).uuid}; gpuprov install"),
        (gpu(1).uuid, (0, "<x/>", ""), "docker, one GPU", "the container sees none"),
        ("none", (0, "/dev/nvidia0\n/dev/nvidiactl\n", ""), "docker, no GPU",
         "a container that asked for no GPU got /dev/nvidia0, /dev/nvidiactl"),
        ("void", (0, "/usr/bin/nvidia-smi\n", ""), "docker, no GPU", "got /usr/bin/nvidia-smi"),
        ("void", (127, "", "sh: not found"), "docker, no GPU", "exited 127: sh: not found"),
        # docker 20.10: its client's two lines come in any order.
        ("void", (127, "", f"{_WAITED}\ndocker: Error response from daemon: no sh"), "docker, no GPU",
         "exited 127: docker: Error response from daemon: no sh"),
        ("gpus", (125, "", 'could not select device driver "" with capabilities: [[gpu]].\n'), "docker run --gpus",
         "systemctl restart docker"),
        ("gpus", (0, only(REPORT, 1), ""), "docker run --gpus", f"the container sees {gpu(1).uuid}"),
        ("gpus", (125, "", "OCI runtime create failed: gpuprov: there is no GPU 7"), "docker run --gpus",
         "gpuprov: there is no GPU 7"),
    ],
)  # fmt: skip
def test_a_container_that_is_not_as_the_host(
    host: RecordedHost, key: str, answer: tuple[int, str, str], failed: str, reason: str
) -> None:
    host.answers[key] = answer
    good, done = checks(host)
    assert not good
    assert states(done) == {"ok": [name for name in NAMES if name != failed], "failed": [failed], "skipped": []}
    assert reason in done[failed].reason


def test_an_images_entry_point_stays_out(host: RecordedHost) -> None:
    checks(host)
    runs = [argv for argv in host.asked if argv[:2] == ("docker", "run")]
    assert len(runs) == 6
    for argv in runs:
        place = argv.index(SPEC.verify_image)
        assert argv[place - 2] == "--entrypoint" and argv[place - 1] in ("nvidia-smi", "sh")


def test_specification_with_facts_of_nvml_is_right_while_nvml_is_silent(host: RecordedHost) -> None:
    driver = discover(host)
    gpus = tuple(replace(one, brand="NVIDIA", compute_capability="9.0") for one in driver.gpus)
    written = render_json(specification(replace(driver, gpus=gpus, cuda_version="12.4")))
    assert b"gpu-brand" in written
    host.write(toolkit.CDI_SPECIFICATION, written)
    assert checks(host)[1]["CDI specification"].status == "ok"


@pytest.mark.parametrize(
    ("info", "daemon_json", "status", "reason"),
    [
        ({"ServerVersion": "20.10.24+dfsg1", "CDISpecDirs": None}, None, None, ""),
        ({"ServerVersion": "26.1.5"}, {"features": {"cdi": True}}, "ok", ""),
        ({"ServerVersion": "26.1.5", "CDISpecDirs": []}, {"features": {"cdi": True}}, "failed",
         "docker has not been restarted since features.cdi was set; systemctl restart docker"),
        ({"ServerVersion": "26.1.5", "CDISpecDirs": []}, None, "failed",
         "features.cdi is not set in /etc/docker/daemon.json, which docker 26.1.5 needs; run gpuprov install"),
        ({"ServerVersion": "26.1.5", "CDISpecDirs": [], "ContainersRunning": 1}, {"features": {"cdi": True}}, "skipped",
         "docker has not been restarted since features.cdi was set: trainer would stop"),
        ({"ServerVersion": "29.0.0", "CDISpecDirs": []}, {"features": {"cdi": False}}, "skipped",
         "features.cdi is false in /etc/docker/daemon.json"),
    ],
)  # fmt: skip
def test_docker_gives_devices_by_cdi_where_it_can(
    host: RecordedHost, info: dict[str, Any], daemon_json: dict[str, Any] | None, status: str | None, reason: str
) -> None:
    host.answers["info"] = (0, json.dumps({**INFO, **info}), "")
    text = {"runtimes": {"nvidia": {"path": RUNTIME}}, **(daemon_json or {})}
    host.write("/etc/docker/daemon.json", json.dumps(text).encode())
    good, done = checks(host)
    check = done.get("docker run --device")
    assert good is (status != "failed")
    assert (check.status if check else None, check.reason if check else "") == (status, reason)


def test_each_engine_that_is_configured_is_proved_and_named(host: RecordedHost) -> None:
    """podman by its specification, containerd by ctr; CRI-O's containers are Kubernetes' to start."""
    host.programs |= {"podman", "containerd", "crio", "ctr"}
    host.programs -= {"docker", "dockerd"}
    said = {
        "podman": "podman version 5.4.2\n",
        "/usr/bin/containerd": "containerd github.com/containerd/containerd 1.7.24 1.7.24~ds1-6\n",
        "/usr/bin/crio": "crio version 1.33.1\n",
    }
    recorded = host.run

    def run(argv: Sequence[str], **more: Any) -> Completed:
        argv = tuple(argv)
        if argv[-1] == "--version":
            return Completed(argv, 0, said.get(argv[0], "podman version 5.4.2\n"))
        if argv[0] == "systemctl":
            return Completed(argv, 0)
        if argv[0] in ("podman", "ctr"):
            return _container(argv)
        return recorded(argv, **more)

    host.run = run  # type: ignore[method-assign]
    spec = replace(SPEC, docker="none")
    facts = other_engines.gather(host, other_engines.names(host, spec))
    for change in other_engines.plan(facts, toolkit.engine_runtime(spec)):
        change.apply(host, lambda *_: None)
    seen: list[Event] = []
    verdict = verify(host, spec, seen.append)
    done = {one.name: one for one in seen if isinstance(one, CheckDone)}
    handlers = ["containerd, handler nvidia", "crio, handler nvidia"]
    assert not states(done)["failed"] and states(done)["skipped"] == handlers, done
    assert (verdict.good, verdict.proved, verdict.configured) == (True, ("containerd", "podman"), ("crio",))
    assert verdict.summary() == "containers see this host's GPUs: containerd, podman; configuration only: crio"
    assert {name: one.on_host for name, one in done.items() if name in ("containerd", "crio", "podman")} == {
        "containerd": "1.7.24", "crio": "1.33.1", "podman": "5.4.2",
    }  # fmt: skip
    assert {one.engine for one in done.values()} == {"", "containerd", "crio", "podman"}
    assert "docker" not in " ".join(done)


def _container(argv: tuple[str, ...]) -> Completed:
    """What podman and ctr answer: images are there, and a container has the GPUs that it asks for."""
    if "run" not in argv[:4]:
        return Completed(argv, 0, "example.org/cuda:12.4\n")
    words = " ".join(argv)
    if "sh" in argv:
        return Completed(argv, 0)
    return Completed(argv, 0, only(REPORT, 1) if gpu(1).uuid in words else REPORT)


@pytest.mark.parametrize(
    ("spec", "status", "reason"),
    [
        (SPEC, "skipped", "installed, not configured by gpuprov: gpuprov_engines: [podman]"),
        (
            replace(SPEC, engines=("podman",)), "failed",
            f"/etc/containers/containers.conf.d/99-nvidia.conf does not have runtime nvidia as {RUNTIME}; run gpuprov",
        ),
    ],
)  # fmt: skip
def test_engine_without_runtime_fails_if_named(host: RecordedHost, spec: HostSpec, status: str, reason: str) -> None:
    host.programs |= {"podman", "containerd"}
    _, done = checks(host, spec)
    assert done["podman"].status == status and done["podman"].reason.startswith(reason)
    # Beside docker, containerd is docker's.
    assert "containerd" not in done
    assert done["docker, all GPUs"].status == "ok"


def test_a_docker_that_is_to_be_left_alone_is_named(host: RecordedHost) -> None:
    seen: list[Event] = []
    verdict = verify(host, replace(SPEC, docker="none"), seen.append)
    (check,) = [one for one in seen if isinstance(one, CheckDone) and one.engine]
    assert (check.name, check.status) == ("docker", "skipped")
    assert verdict.summary() == "the driver works; no container engine is configured, so no container ran"


# podman's exit code and last words → the hint; it takes 126 and 127 from its runtime, too.
ENDED = [
    (126, "Error: crun: open `/proc/self/oom_score_adj`: Permission denied: OCI permission denied",
     "OCI runtime starts"),
    (126, "Error: crun: executable file `nvidia-smi` is not executable: OCI permission denied",
     "set gpuprov_verify_image"),
    (126, "sh: nvidia-smi: Permission denied", "set gpuprov_verify_image"),
    (127, "Error: runc: runc create failed: unable to start container process: error during init",
     "OCI runtime starts"),
    (127, "Error: crun: executable file `nvidia-smi` not found in $PATH: No such file", "the container did not get it"),
    (127, 'docker: Error response: exec: "nvidia-container-runtime-hook": executable file not found in $PATH.',
     "; gpuprov install puts it back"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "said", "hint"), ENDED)
def test_a_runtime_that_fails_is_not_the_image_s_fault(code: int, said: str, hint: str) -> None:
    test = EngineTest(System(), "image", SmiReport("", "", ()), PODMAN)
    assert hint in ended(test, Completed(("podman",), code, "", said))
