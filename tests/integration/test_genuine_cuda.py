"""NVIDIA's genuine libcuda, libcudart, libnvidia-ml and nvidia-smi in containers that gpuprov's runtime makes.

No GPU is needed: without one, the genuine libraries still say which version they are, and end with the documented
results. The simulated libcuda has no part here; genuine runtimes ask libcuda for private tables that only NVIDIA knows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuprov.checks.cuda.compatibility import least_driver
from gpuprov.checks.cuda.search import Program
from gpuprov.checks.cuda.survey import Subject, Survey, as_lines, survey_of
from gpuprov.protocol.versions import version_numbers
from gpuprov.runtime_hook.rootfs import Root
from tests.genuine import BRANCHES, Driver, UnavailableError, driver, libcudart
from tests.integration.container_bench import LIBRARIES, NAME
from tests.integration.dockerd import docker_host
from tests.integration.genuine_bench import NO_DRIVER, GenuineBench, answers, build_probe, build_stub, winner

pytestmark = [pytest.mark.root, NO_DRIVER]
_slow = pytest.mark.slow
_COMPAT = "/usr/local/cuda/compat"


def genuine(branch: str) -> Driver:
    try:
        return driver(branch)
    except UnavailableError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_probe(tmp_path_factory.mktemp("probe"))


@pytest.fixture
def bench(tmp_path: Path, probe: Path) -> Iterator[GenuineBench]:
    made = GenuineBench(tmp_path, probe)
    yield made
    made.delete()


@pytest.mark.parametrize("branch", ["535", *(pytest.param(one, marks=_slow) for one in ("470", "550", "555"))])
def test_a_genuine_driver_in_a_container(bench: GenuineBench, branch: str) -> None:
    found = genuine(branch)
    bench.install(found)
    cuda, management = bench.probe("libcuda.so.1", "libnvidia-ml.so.1")
    assert winner(cuda) == f"{LIBRARIES}/libcuda.so.{found.version}"
    assert winner(management) == f"{LIBRARIES}/libnvidia-ml.so.{found.version}"
    assert answers([cuda]) == {
        "cuInit": "100", "cuDriverGetVersion": f"0:{BRANCHES[branch].cuda}", "cuDeviceGetCount": "3:-1"
    }  # fmt: skip
    assert answers([management]) == {"nvmlInit_v2": "9"}
    assert nvidia_smi(bench) == ["9", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."]


def nvidia_smi(bench: GenuineBench) -> list[str]:
    """Return the exit code of the genuine nvidia-smi in a container, and its first sentence."""
    bench.configure("NVIDIA_VISIBLE_DEVICES=all", arguments=["sh", "-c", "nvidia-smi; echo $?"])
    *said, code = bench.run()
    return [code, said[0].partition(" Make sure")[0]]


RUNTIMES = {"11": "11.8", "12": "12.4", "13": "13.0"}


@pytest.mark.parametrize("branch", ["535", *(pytest.param(one, marks=_slow) for one in ("470", "550"))])
def test_genuine_runtimes_start_on_the_drivers_that_gpuprov_says(bench: GenuineBench, branch: str) -> None:
    found = genuine(branch)
    bench.install(found)
    for major in RUNTIMES:
        bench.put(f"/opt/cuda/{libcudart(major).name}", libcudart(major))
    seen = bench.probe(*(f"/opt/cuda/{libcudart(major).name}" for major in RUNTIMES))
    for line, release in zip(seen, RUNTIMES.values()):
        starts = version_numbers(found.version) >= version_numbers(least_driver(release))
        # 100: the driver is new enough, and there is no GPU. 35: the driver is too old.
        assert answers([line]) == {
            "cudaDriverGetVersion": f"0:{BRANCHES[branch].cuda}", "cudaGetDeviceCount": "100:-1" if starts else "35:-1"
        }, release  # fmt: skip


def test_a_genuine_runtime_without_a_driver(bench: GenuineBench) -> None:
    bench.install(genuine("535"))
    bench.put(f"/opt/cuda/{libcudart('12').name}", libcudart("12"))
    (line,) = bench.probe(f"/opt/cuda/{libcudart('12').name}", environment=())
    assert answers([line]) == {"cudaDriverGetVersion": "0:0", "cudaGetDeviceCount": "35:-1"}


@pytest.mark.parametrize(("branch", "wins"), [("555", True), ("535", False)])
@pytest.mark.parametrize("by_hook", ["", "prestart"])
@pytest.mark.slow
def test_forward_compatibility_genuine_libcuda(bench: GenuineBench, branch: str, wins: bool, by_hook: str) -> None:
    """A newer libcuda in /usr/local/cuda/compat wins; an older one is ignored."""
    newer, host = genuine(branch), genuine("550")
    bench.install(host)
    bench.put(f"{_COMPAT}/libcuda.so.{newer.version}", newer.library("libcuda"))
    (line,) = bench.probe("libcuda.so.1", by_hook=by_hook)
    assert winner(line) == (
        f"{_COMPAT}/libcuda.so.{newer.version}" if wins else f"{LIBRARIES}/libcuda.so.{host.version}"
    )
    assert answers([line])["cuDriverGetVersion"] == f"0:{BRANCHES[branch if wins else '550'].cuda}"


# -- genuine faults, and the line by which `gpuprov cuda` names the library ---------------------------------------


@dataclass(frozen=True)
class Fault:
    """A container that goes wrong: its environment, what the genuine libraries answer, and what gpuprov says.

    In `says`, {470} to {555} are the whole versions of these branches.
    """

    environment: tuple[str, ...]
    answer: Mapping[str, str]
    says: str
    host: str = "550"
    loads: tuple[str, ...] = ("libcuda.so.1",)
    kernel: str = ""


_GPUS = "NVIDIA_VISIBLE_DEVICES=all"
_OLD = {"cuInit": "100", "cuDriverGetVersion": "0:12020", "cuDeviceGetCount": "3:-1"}
_MISMATCH = "/opt/535/libcuda.so.1 is of driver {535}, the loaded kernel module is {550} (CUDA result 803, 35, 36)"
FAULTS = {
    "older-by-variable": Fault((_GPUS, "LD_LIBRARY_PATH=/opt/535"), _OLD, f"wrong: {_MISMATCH}"),
    "older-by-preload": Fault((_GPUS, "LD_PRELOAD=/opt/535/libcuda.so.1"), _OLD, f"wrong: {_MISMATCH}"),
    "newer-by-variable": Fault(
        (_GPUS, "LD_LIBRARY_PATH=/opt/555"), {**_OLD, "cuDriverGetVersion": "0:12050"},
        "wrong: /opt/555/libcuda.so.1 is of driver {555}, the loaded kernel module is {550} (CUDA result 803, 804)",
    ),
    "runtime-13-on-535": Fault(
        (_GPUS, "LD_LIBRARY_PATH=/opt/cuda13"), {"cudaDriverGetVersion": "0:12020", "cudaGetDeviceCount": "35:-1"},
        "wrong: CUDA 13 needs driver 580.65.06 or later,"
        " /usr/lib/x86_64-linux-gnu/libcuda.so.1 is of {535} (CUDA result 35)",
        host="535", loads=("libcudart.so.13",),
    ),
    "runtime-12-on-470": Fault(
        (_GPUS, "LD_LIBRARY_PATH=/opt/cuda12"), {"cudaDriverGetVersion": "0:11040", "cudaGetDeviceCount": "35:-1"},
        "wrong: CUDA 12 needs driver 525.60.13 or later,"
        " /usr/lib/x86_64-linux-gnu/libcuda.so.1 is of {470} (CUDA result 35)",
        host="470", loads=("libcudart.so.12",),
    ),
    "stub": Fault(
        (_GPUS, "LD_LIBRARY_PATH=/usr/local/cuda/lib64/stubs:/opt/cuda12"),
        {"cudaDriverGetVersion": "0:0", "cudaGetDeviceCount": "34:-1"},
        "wrong: /usr/local/cuda/lib64/stubs/libcuda.so.1 is CUDA's stub, not the driver's library (CUDA result 34, 35)",
        loads=("libcudart.so.12",),
    ),
    "empty-file": Fault(
        (_GPUS, "LD_LIBRARY_PATH=/opt/empty:/opt/cuda12"),
        {"cudaDriverGetVersion": "0:0", "cudaGetDeviceCount": "35:-1"},
        "wrong: the loader stops at /opt/empty/libcuda.so.1: file too short (CUDA result 35)",
        loads=("libcudart.so.12",),
    ),
    "no-gpus-asked-for": Fault(
        ("LD_LIBRARY_PATH=/opt/cuda12",), {"cudaDriverGetVersion": "0:0", "cudaGetDeviceCount": "35:-1"},
        "wrong: the loader finds no libcuda.so.1 (CUDA result 35)", loads=("libcudart.so.12",),
    ),
    "older-nvml": Fault(
        (_GPUS, "LD_LIBRARY_PATH=/opt/535-nvml"), {"nvmlInit_v2": "9"},
        "wrong: /opt/535-nvml/libnvidia-ml.so.1 is of driver {535}, the loaded kernel module is {550}:"
        " nvidia-smi exits 18",
        loads=("libnvidia-ml.so.1",),
    ),
    "updated-without-a-reboot": Fault(
        (_GPUS,), {**_OLD, "cuDriverGetVersion": "0:12040"},
        "wrong: /usr/lib/x86_64-linux-gnu/libcuda.so.1 is of driver {550}, the loaded kernel module is {535}"
        " (CUDA result 803, 804)",
        kernel="535",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, probe: Path) -> Iterator[GenuineBench]:
    """An image with every library that a fault needs, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("faulty")
    bench = GenuineBench(folder, probe)
    for branch in ("535", "555"):
        try:
            found = driver(branch)
        except UnavailableError:  # the fault that needs it is skipped
            continue
        bench.put(f"/opt/{branch}/libcuda.so.{found.version}", found.library("libcuda"))
    found = genuine("535")
    bench.put(f"/opt/535-nvml/libnvidia-ml.so.{found.version}", found.library("libnvidia-ml"))
    for major in ("12", "13"):
        bench.put(f"/opt/cuda{major}/{libcudart(major).name}", libcudart(major))
    bench.put("/usr/local/cuda/lib64/stubs/libcuda.so", build_stub(folder))
    (bench.root / "opt/empty").mkdir()
    (bench.root / "opt/empty/libcuda.so.1").touch()
    yield bench
    bench.delete()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_genuine_fault_is_named(faulty: GenuineBench, name: str) -> None:
    fault = FAULTS[name]
    versions = {branch: genuine(branch).version for branch in BRANCHES if f"{{{branch}}}" in fault.says}
    faulty.forget_starts()
    faulty.install(genuine(fault.host))
    faulty.configure(*fault.environment, arguments=["/bin/probe", *fault.loads])
    done = faulty.create()
    assert done.returncode == 0, done.stderr
    # The container waits for its start, with all that its program will find.
    kernel = genuine(fault.kernel).version if fault.kernel else faulty.kernel
    found = surveyed(faulty, fault, kernel)
    (line,) = faulty.output()
    assert answers([line]) == fault.answer
    said = fault.says
    for branch, version in versions.items():
        said = said.replace(f"{{{branch}}}", version)
    wrong = [text.splitlines()[0] for text in as_lines(found) if text.startswith("wrong: ")]
    # Where all libraries are of another version than the module, NVML is too.
    assert wrong[0] == said
    assert all("/libnvidia-ml.so.1 is of driver " in line for line in wrong[1:])
    assert found.faults
    if "libcuda.so.1" in fault.loads:
        named = found.libraries[0].winner
        assert named is not None
        assert named.chain[-1] == winner(line)


def surveyed(bench: GenuineBench, fault: Fault, kernel: str) -> Survey:
    pid = json.loads(bench.call("state", NAME).stdout)["pid"]
    root = Root(f"/proc/{pid}/root", of_process=True)
    try:
        program = Program(dict(one.split("=", 1) for one in fault.environment))
        return survey_of(Subject("container", "app", root, program, "test"), kernel)
    finally:
        root.close()


_AS_LOADED = 'mount --bind "$1" /proc/driver && shift && exec "$@"'


@pytest.mark.slow
def test_the_command_names_the_older_libcuda_of_an_image(bench: GenuineBench) -> None:
    """The real `gpuprov cuda` on a container of the real docker, on a host whose kernel has loaded driver 550."""
    host, older = genuine("550"), genuine("535")
    bench.install(host)
    bench.put(f"/opt/own/libcuda.so.{older.version}", older.library("libcuda"))
    with docker_host(started=False) as docker:
        docker.daemon_json.write_text(json.dumps({"runtimes": {"nvidia": {"path": str(bench.runtime)}}}))
        assert docker.start()
        packed = subprocess.run(("tar", "-C", str(bench.root), "-c", "."), capture_output=True, check=True).stdout
        docker.docker("import", "--change", "ENV LD_LIBRARY_PATH=/opt/own", "-", "app", stdin=packed)
        options = ("--network=none", "--runtime=nvidia", "--env=NVIDIA_VISIBLE_DEVICES=all", "--env=PATH=/bin")
        run = ("run", "--detach", "--interactive", *options, "--name=trainer", "app", "busybox", "cat")
        docker.docker(*run)
        line = docker.docker("exec", "trainer", "probe", "libcuda.so.1")
        assert answers([line])["cuDriverGetVersion"] == "0:12020"
        argv = ("unshare", "--mount", "sh", "-c", _AS_LOADED, "sh", f"{bench.host}/proc/driver")
        command = (*argv, sys.executable, "-m", "gpuprov", "cuda", "trainer")
        environment = {**os.environ, "DOCKER_HOST": docker.socket}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    own = f"/opt/own/libcuda.so.1 -> libcuda.so.{older.version} (driver {older.version})"
    assert said[1:3] == [f"libcuda.so.1       {own}", "  because          LD_LIBRARY_PATH has /opt/own"]
    assert f"kernel module      {host.version}" in said
    versions = f"is of driver {older.version}, the loaded kernel module is {host.version}"
    assert f"wrong: /opt/own/libcuda.so.1 {versions} (CUDA result 803, 35, 36)" in said
