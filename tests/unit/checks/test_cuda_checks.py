"""The checks of CUDA in containers: what a healthy host shows, and the line that names each fault."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.checks import cuda_checks
from gpuprov.checks.cuda.survey import Survey
from gpuprov.checks.cuda_checks import Python
from gpuprov.checks.engines import DOCKER, PODMAN, Containerd, Engine, EngineTest
from gpuprov.checks.outcome import Checks
from gpuprov.checks.smi import SmiGpu, SmiReport
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import CheckDone, Event
from tests.unit.checks.test_cuda_libraries import DRIVER, Image, healthy

NAMES = ("libcuda.so.1", "libnvidia-ml.so.1", "CUDA", "CUDA kernel")
UUIDS = ("GPU-0", "GPU-1")
REPORT = SmiReport("550.163.01", "12.4", tuple(SmiGpu(uuid, "H100", "", "", "", "Disabled") for uuid in UUIDS))
LOADED = {name: f"{DRIVER}/{name[:-1]}550.163.01" for name in ("libcuda.so.1", "libnvidia-ml.so.1")}
MISSING = "libcuda.so.1: cannot open shared object file: No such file or directory"
WELL = {"gpu": 0, "wrong": 0, "of": 9, "failed": None, "busy": False}
KERNEL = {"left_out": "", "gpus": [WELL, {**WELL, "gpu": 1}]}
NO_KERNEL: dict[str, Any] = {}
PYTHON = Python("/usr/bin/python3.11", ("/usr/bin/python3.11", "/usr/lib/python3.11"))


def output(uuids: Sequence[str] = UUIDS, kernel: dict[str, Any] = NO_KERNEL, **more: Any) -> str:
    """What the program prints."""
    first = {"loaded": LOADED, "faults": {}, "variables": {}, "version": 12040, "uuids": uuids, "failed": None, **more}
    return "\n".join(map(json.dumps, (first, kernel) if kernel else (first,)))


def failing(call: str, result: int, name: str = "") -> str:
    return output((), failed={"call": call, "result": result, "name": name})


class CudaHost(System):
    """A host whose commands say what `answers` has; images and files are the surveys'."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        nothing = output((), loaded={}, faults={"libcuda.so.1": MISSING}, version=0)
        self.answers: dict[str, tuple[int, str, str]] = {
            "start": (0, "c0ffee\n", ""),
            "rm": (0, "", ""),
            "host": (0, output(), ""),
            "all": (0, output(kernel=KERNEL), ""),
            "GPU-1": (0, output(["GPU-1"]), ""),
            "void": (0, nothing, ""),
        }
        self.asked: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        argv = tuple(argv)
        self.asked.append(argv)
        return Completed(argv, *self.answers[self._key(argv)])

    def _key(self, argv: tuple[str, ...]) -> str:
        if argv[0] not in ("docker", "podman", "ctr"):
            return "host"
        if "--detach" in argv:
            return "start"
        asked = ("NVIDIA_VISIBLE_DEVICES=", "--device=nvidia.com/gpu=")
        devices = [word.rpartition("=")[2] for word in argv if word.startswith(asked)]
        return devices[0] if devices else {"exec": "all", "rm": "rm", "run": "void"}[argv[1]]


class Case:
    """A host, and what the loader finds on it and in its containers."""

    def __init__(self, folder: Path) -> None:
        self.host = CudaHost(folder)
        (folder / "host").mkdir()
        (folder / "container").mkdir()
        self.on_host = healthy(Image(folder / "host"))
        self.in_container = healthy(Image(folder / "container"))
        self.environment: dict[str, str] = {}

    def survey(self, system: System, name: str, call: object) -> Survey:
        assert name in ("", "c0ffee", "app")
        if name:
            return self.in_container.survey_with(self.environment, "550.163.01")
        return self.on_host.survey_with({}, "550.163.01")

    def checks(self, *, own_image: bool = False, engine: Engine = DOCKER) -> dict[str, CheckDone]:
        seen: list[Event] = []
        cuda_checks.cuda_checks(Checks(seen.append), EngineTest(self.host, "app", REPORT, engine), own_image=own_image)
        found = {event.name: event for event in seen if isinstance(event, CheckDone)}
        assert tuple(found) == cuda_checks.names(engine.name)
        return {name.partition(", ")[2]: one for name, one in found.items()}


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    made = Case(tmp_path)
    monkeypatch.setattr(cuda_checks, "survey", made.survey)
    monkeypatch.setattr(cuda_checks, "recorded_python", lambda system: "/usr/bin/python3.11")
    return made


@pytest.mark.parametrize("engine", [DOCKER, PODMAN], ids=lambda engine: engine.name)
def test_a_healthy_host(case: Case, engine: Engine) -> None:
    found = case.checks(engine=engine)
    assert {one.status for one in found.values()} == {"ok"}
    assert (found["CUDA"].on_host, found["CUDA"].in_container) == (
        "CUDA 12.4, 2 GPUs",
        "CUDA 12.4, 2 GPUs; one alone; none",
    )
    assert found["libcuda.so.1"].on_host == "550.163.01"
    assert found["libcuda.so.1"].in_container == f"550.163.01 in {DRIVER}"
    assert found["CUDA kernel"].in_container == "right results on 2 GPUs"
    assert (engine.name, "rm", "--force", "--volumes", "c0ffee") in case.host.asked


def test_the_hosts_python_is_mounted_into_verifys_own_image(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_checks, "host_python", lambda system: PYTHON)
    assert case.checks(own_image=True)["CUDA"].status == "ok"
    runs = [argv for argv in case.host.asked if argv[:2] == ("docker", "run")]
    assert len(runs) == 3
    for argv in runs:
        assert "type=bind,source=/usr/lib/python3.11,target=/usr/lib/python3.11,readonly" in argv
    monkeypatch.setattr(cuda_checks, "host_python", lambda system: Python("", missing="python3.11 has no ctypes"))
    found = case.checks(own_image=True)
    assert [found[name].status for name in NAMES] == ["ok", "ok", "skipped", "skipped"]
    assert found["CUDA"].reason == "python3.11 has no ctypes"


def test_containerds_containers_tell_by_themselves(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from outside: the file that a program loaded has the version in its name."""
    monkeypatch.setattr(cuda_checks, "host_python", lambda system: PYTHON)
    engine = Containerd("/usr/bin/gpuprov-container-runtime")
    found = case.checks(engine=engine, own_image=True)
    assert {one.status for one in found.values()} == {"ok"}
    assert found["libcuda.so.1"].in_container == f"550.163.01 in {DRIVER}"
    runs = [argv for argv in case.host.asked if argv[0] == "ctr"]
    mount = "type=bind,src=/usr/lib/python3.11,dst=/usr/lib/python3.11,options=rbind:ro"
    assert len(runs) == 3 and all(mount in argv for argv in runs)
    own = {**LOADED, "libcuda.so.1": "/opt/own/libcuda.so.535.261.03"}
    case.host.answers["all"] = (0, output(loaded=own), "")
    reason = case.checks(engine=engine)["libcuda.so.1"].reason
    assert reason == "a program loads /opt/own/libcuda.so.535.261.03, the host's driver is 550.163.01"


def test_an_images_own_older_libcuda_is_named_with_what_makes_it_win(case: Case) -> None:
    case.in_container.library("/opt/own", "535.261.03")
    case.environment["LD_LIBRARY_PATH"] = "/opt/own"
    own = {**LOADED, "libcuda.so.1": "/opt/own/libcuda.so.535.261.03"}
    failed = {"call": "cuInit", "result": 803, "name": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}
    case.host.answers["all"] = (0, output((), loaded=own, version=12020, failed=failed), "")
    found = case.checks()
    assert found["libcuda.so.1"].reason == (
        "/opt/own/libcuda.so.1 is of driver 535.261.03, the loaded kernel module is 550.163.01 "
        "(/opt/own/libcuda.so.535.261.03: LD_LIBRARY_PATH has /opt/own); "
        "correct LD_LIBRARY_PATH: in the image, or in the call, such as docker run --env LD_LIBRARY_PATH="
    )
    assert (found["libcuda.so.1"].on_host, found["libnvidia-ml.so.1"].status) == ("550.163.01", "ok")
    assert found["CUDA"].reason.startswith("cuInit gives 803 (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH): libcuda.so.1 is of")
    assert found["CUDA kernel"].reason == "requires docker, CUDA"


def test_a_newer_libcuda_of_cuda_compat_is_right(case: Case) -> None:
    case.in_container.library("/usr/local/cuda/compat", "555.58.02")
    case.environment["LD_LIBRARY_PATH"] = "/usr/local/cuda/compat"
    loaded = {**LOADED, "libcuda.so.1": "/usr/local/cuda/compat/libcuda.so.555.58.02"}
    case.host.answers["all"] = (0, output(loaded=loaded, version=12050), "")
    found = case.checks()
    assert found["libcuda.so.1"].in_container == "555.58.02 (cuda-compat) in /usr/local/cuda/compat"
    assert (found["CUDA"].status, found["CUDA"].in_container) == ("ok", "CUDA 12.5, 2 GPUs; one alone; none")


def test_a_library_that_the_rules_do_not_give_is_named(case: Case) -> None:
    case.host.answers["all"] = (0, output(loaded={**LOADED, "libcuda.so.1": "/opt/x/libcuda.so.1"}), "")
    assert case.checks()["libcuda.so.1"].reason.startswith(
        "a program loads /opt/x/libcuda.so.1, the loader's rules give"
    )


@pytest.mark.parametrize("name", ["libcuda", "libnvidia-ml"])
def test_a_missing_library_is_named_on_either_side(case: Case, tmp_path: Path, name: str) -> None:
    other = {"libcuda": "libnvidia-ml", "libnvidia-ml": "libcuda"}[name]
    (tmp_path / "less").mkdir()
    less = Image(tmp_path / "less")
    less.library(DRIVER, "550.163.01", other)
    whole, case.in_container = case.in_container, less
    case.host.answers["all"] = (0, output((), loaded={}, faults={"libcuda.so.1": MISSING}), "")
    assert f"the loader finds no {name}.so.1 in the container" in case.checks()[f"{name}.so.1"].reason
    case.in_container, case.on_host = whole, less
    # A link that is gone is made again by ldconfig alone: an installation finds nothing to change.
    step = "sudo ldconfig; then sudo gpuprov install"
    assert case.checks()[f"{name}.so.1"].reason == f"the loader finds no {name}.so.1 on the host; {step}"


@pytest.mark.parametrize(
    ("key", "answer", "reason"),
    [
        ("host", (0, failing("cuInit", 999, "CUDA_ERROR_UNKNOWN"), ""),
         "on the host: cuInit gives 999 (CUDA_ERROR_UNKNOWN): often /dev/nvidia-uvm is missing"),
        ("host", (0, failing("cuInit", 802), ""), "on the host: cuInit gives 802: the GPUs are joined by NVSwitches"),
        ("all", (0, failing("cuInit", 100), ""), "cuInit gives 100: the container has the libraries and no device"),
        ("all", (0, failing("cuInit", 701), ""), "cuInit gives 701"),
        ("all", (0, output(["GPU-0"], variables={"CUDA_VISIBLE_DEVICES": "0"}), ""),
         "CUDA has GPU-0 in the container, GPU-0, GPU-1 on the host: the image sets CUDA_VISIBLE_DEVICES=0"),
        ("all", (0, output(version=12020), ""), "CUDA is 12.2 in the container"),
        ("all", (0, output(version=12060), ""), "CUDA is 12.6 in the container"),
        ("all", (0, output((), faults={"libcuda.so.1": MISSING}), ""), MISSING),
        ("GPU-1", (0, output(), ""), "with GPU GPU-1 alone: CUDA 12.4 has GPU-0, GPU-1"),
        ("GPU-1", (0, output(["GPU-0"]), ""), "with GPU GPU-1 alone: CUDA 12.4 has GPU-0"),
        ("GPU-1", (0, failing("cuInit", 304), ""), "with GPU GPU-1 alone: cuInit gives 304: a device node can't be"),
        ("void", (0, output(), ""), "a container that asked for no GPU computes on GPU-0, GPU-1"),
    ],
)  # fmt: skip
def test_calls_that_differ_from_the_hosts(case: Case, key: str, answer: tuple[int, str, str], reason: str) -> None:
    case.host.answers[key] = answer
    found = case.checks()
    assert found["CUDA"].status == "failed"
    assert found["CUDA"].reason.startswith(reason)
    assert (found["CUDA kernel"].status, found["CUDA kernel"].reason) == ("skipped", "requires docker, CUDA")


@pytest.mark.parametrize("key", ["host", "all", "GPU-1", "void"])
@pytest.mark.parametrize("answer", [(124, "", "stopped after 120 s, its time limit"), (139, "", "")])
def test_calls_that_hang_or_crash_are_no_missing_python(case: Case, key: str, answer: tuple[int, str, str]) -> None:
    """A driver that hangs in cuInit while nvidia-smi works, say: the program prints nothing before."""
    case.host.answers[key] = answer
    found = case.checks()
    assert (found["CUDA"].status, found["CUDA kernel"].status) == ("failed", "skipped")
    assert f"exited {answer[0]}" in found["CUDA"].reason and "dmesg" in found["CUDA"].reason


@pytest.mark.parametrize(
    "answer",
    [
        # docker 20.10 with a full /tmp prints it on standard output, docker 26 on standard error.
        (126, "OCI runtime exec failed: open /tmp/runc-process2207876851: no space left on device: unknown\n", ""),
        (127, "", "OCI runtime exec failed: open /tmp/runc-process42: read-only file system: unknown\n"),
    ],
)
def test_an_engine_that_starts_no_program_is_no_missing_python(case: Case, answer: tuple[int, str, str]) -> None:
    case.host.answers["all"] = answer
    found = case.checks()["CUDA"]
    assert (found.status, "OCI runtime exec failed: open /tmp/runc-process" in found.reason) == ("failed", True), found


@pytest.mark.parametrize("none", [(0, failing("cuInit", 100), ""), (0, output(()), "")])
def test_an_image_with_a_libcuda_of_its_own_may_have_no_gpu(case: Case, none: tuple[int, str, str]) -> None:
    case.host.answers["void"] = none
    assert case.checks()["CUDA"].status == "ok"


@pytest.mark.parametrize(
    ("kernel", "status", "reason"),
    [
        (NO_KERNEL, "failed", "printed nothing of it"),
        ({"left_out": "the GPUs are simulated and compute nothing", "gpus": []}, "skipped",
         "simulated and compute nothing"),
        ({"left_out": "", "gpus": [{**WELL, "wrong": 2}]}, "failed", "GPU 0: 2 of 9 results are wrong; dmesg"),
    ],
)  # fmt: skip
def test_the_kernel(case: Case, kernel: dict[str, Any], status: str, reason: str) -> None:
    case.host.answers["all"] = (0, output(kernel=kernel), "")
    found = case.checks()["CUDA kernel"]
    assert (found.status, reason in found.reason) == (status, True), found


def test_an_image_without_python_leaves_the_calls_out_and_says_so(case: Case) -> None:
    case.host.answers["all"] = (127, "", 'exec: "python3": executable file not found in $PATH')
    found = case.checks()
    assert [found[name].status for name in NAMES] == ["ok", "ok", "skipped", "skipped"]
    assert found["CUDA"].reason == "app has no python3 with ctypes"
    case.host.answers["all"] = (1, "", "ModuleNotFoundError: No module named '_ctypes'")
    assert case.checks()["CUDA"].reason == (
        "app has no python3 with ctypes: it exited 1: ModuleNotFoundError: No module named '_ctypes'"
    )


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (
            "/lib/ld-musl-x86_64.so.1",
            "app: the C library is musl, and the driver's libraries need glibc: CUDA can't run",
        ),
        ("", "app: there is no dynamic loader: only static programs run, and they can't load libcuda"),
        ("/lib64/ld-linux-x86-64.so.2", "the container exited 127: no such file"),
    ],
)
def test_failed_start_is_explained_by_the_image(case: Case, tmp_path: Path, loader: str, reason: str) -> None:
    case.host.answers["start"] = (127, "", "no such file")
    (tmp_path / "bare").mkdir()
    case.in_container = Image(tmp_path / "bare", loader)
    found = case.checks()
    assert found["libcuda.so.1"].reason.startswith(reason)
    assert {found[name].reason for name in NAMES[1:]} == {"requires a container that runs"}


def test_a_container_that_can_not_be_read_is_removed_all_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object) -> Survey:
        raise GpuprovError("container c0ffee stopped while it was read")

    monkeypatch.setattr(cuda_checks, "survey", refuse)
    assert "stopped while it was read" in case.checks()["libcuda.so.1"].reason
    assert ("docker", "rm", "--force", "--volumes", "c0ffee") in case.host.asked


def test_what_an_image_prints_is_told_in_few_words(case: Case) -> None:
    case.host.answers["all"] = (0, output(["GPU-0"], variables={"CUDA_VISIBLE_DEVICES": "0," * 900}), "")
    reason = case.checks()["CUDA"].reason
    assert "CUDA_VISIBLE_DEVICES=0,0" in reason and len(reason) < 400
    case.host.answers["all"] = (0, output((), faults={"libcuda.so.1": "long " * 900}), "")
    assert len(case.checks()["CUDA"].reason) < 400
