"""A driver is found as .run files and packages lay it, wherever the loader looks; NVML adds what files don't tell."""

import csv
import ctypes
import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pynvml
import pytest

from gpuprov.cdi import nvml_child
from gpuprov.cdi.discover import DriverFacts, Node, ask_nvml, discover, expected_nodes, missing_nodes
from gpuprov.cdi.files import CachedLibrary, parse_cache
from gpuprov.cdi.generate import difference, host_facts, specification
from gpuprov.cdi.nvml import GpuAnswer, parse_answers, sysfs_bus_id
from gpuprov.cdi.specification import problems, render_json
from gpuprov.core.system import System
from tests.simgpu import build_libraries, gpu, install_tree, write_kernel_tree
from tests.unit.driver_tree import mounts, write_driver
from tests.unit.scripted import Answer, Scripted

pytestmark = pytest.mark.root

DATA = Path(__file__).parent / "data"
VERSION = "550.163.01"
MULTIARCH = "/usr/lib/x86_64-linux-gnu"
DRIVER = "--host-driver-version"
# What the child process says of two GPUs of the simulated driver; tests/integration/test_nvml.py lets it speak itself.
ANSWER: dict[str, Any] = {
    "cuda_version": "12.4",
    "gpus": [
        {"bus_id": gpu(n).bus_id, "uuid": gpu(n).uuid, "brand": 14, "compute_capability": "9.0", "mig": []}
        for n in (0, 1)
    ],
}


class Host(Scripted):
    """A machine below a folder, whose NVML says what it is told to."""

    nvml = (0, json.dumps(ANSWER))

    def answer(self, argv: tuple[str, ...]) -> Answer:
        assert argv[0] == sys.executable and "nvml_child" in argv[3]
        return self.nvml


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with a .run's files, two GPUs and all nodes."""
    write_driver(tmp_path, 2)
    return Host(tmp_path)


def lay(root: Path, table: str) -> None:
    """Lay a tree as a table of path, type (f file, l link), soname and target has it."""
    with (DATA / table).open(newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            path = root / row["path"].lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if row["type"] == "l":
                path.symlink_to(row["target"])
            else:
                path.write_text(row["soname"])
    (root / "lib").symlink_to("usr/lib")


def sonames(table: str) -> dict[str, str]:
    """File name → soname, of the libraries that have one."""
    with (DATA / table).open(newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        return {row["path"].rpartition("/")[2]: row["soname"] for row in rows if row["soname"] not in ("", "-")}


def test_the_specification_of_a_run_files_driver(host: Host) -> None:
    """The golden one. Rewritten by: python -m tests.unit.cdi.golden"""
    found = render_json(specification(ask_nvml(host, discover(host))))
    assert found == (DATA / "specification-550.163.01.json").read_bytes()
    assert problems(specification(discover(host))) == ()


def test_debians_layout(tmp_path: Path) -> None:
    lay(tmp_path, "debian-535.261.03.tsv")
    driver = discover(System(str(tmp_path)))
    assert driver.library_version == "535.261.03"
    found = mounts(driver)
    lines = [f"{path} {real}" for path, real in sorted(found.items())]
    assert lines == (DATA / "debian-535.261.03.mounts").read_text().splitlines()
    assert all((tmp_path / real[1:]).is_file() and not (tmp_path / real[1:]).is_symlink() for real in found.values())
    # Every soname that programs ask the loader for is there, and leads to the library with that soname.
    for file_name, soname in sonames("debian-535.261.03.tsv").items():
        assert found[f"{MULTIARCH}/{soname}"].endswith(f"/{file_name}")


def loader(root: Path, *folders: str, compat: bool = False) -> None:
    """Write the cache of the loader below root, as its own ldconfig does."""
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/ld.so.conf").write_text("".join(f"{folder}\n" for folder in folders))
    form = ("-c", "compat") if compat else ()
    subprocess.run(("/sbin/ldconfig", "-X", "-r", str(root), *form), check=True, capture_output=True)


@pytest.mark.parametrize("compat", [False, True])
def test_a_folder_that_only_the_loader_knows(tmp_path: Path, compat: bool) -> None:
    """Containers' loaders don't know it: its libraries go where they look."""
    place = tmp_path / "opt/nvidia/lib64"
    place.mkdir(parents=True)
    (tmp_path / "usr/lib64").mkdir(parents=True)
    libraries = build_libraries()
    for name in ("libnvidia-ml.so", "libcuda.so"):
        shutil.copy(libraries / f"{name}.{VERSION}", place)
        (place / f"{name}.1").symlink_to(f"{name}.{VERSION}")
    assert discover(System(str(tmp_path))) == DriverFacts()
    loader(tmp_path, "/opt/nvidia/lib64", compat=compat)
    driver = discover(System(str(tmp_path)))
    assert driver.library_version == VERSION
    assert mounts(driver) == {
        f"/usr/lib64/{name}{end}": f"/opt/nvidia/lib64/{name}.{VERSION}"
        for name, end in product(("libnvidia-ml.so", "libcuda.so"), (".1", f".{VERSION}"))
    } | {"/usr/lib64/libcuda.so": f"/opt/nvidia/lib64/libcuda.so.{VERSION}"}


def test_what_the_loader_finds_first_counts(tmp_path: Path) -> None:
    install_tree(tmp_path, "535.261.03")
    place = tmp_path / "opt/nvidia"
    place.mkdir(parents=True)
    shutil.copy(build_libraries() / f"libnvidia-ml.so.{VERSION}", place)
    (place / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{VERSION}")
    loader(tmp_path, "/opt/nvidia", MULTIARCH)
    driver = discover(System(str(tmp_path)))
    assert driver.library_version == VERSION
    assert not [library for library in driver.libraries if "535" in library.path]


def test_32_bit_libraries_of_the_same_version_come_too(tmp_path: Path) -> None:
    install_tree(tmp_path)
    for folder, version in (("usr/lib/i386-linux-gnu", VERSION), ("usr/lib32", "535.261.03")):
        (tmp_path / folder).mkdir()
        for name in ("libnvidia-ml.so", "libcuda.so"):
            (tmp_path / folder / f"{name}.{version}").write_text("32 bit")
            (tmp_path / folder / f"{name}.1").symlink_to(f"{name}.{version}")
    found = mounts(discover(System(str(tmp_path))))
    assert found["/usr/lib/i386-linux-gnu/libcuda.so.1"] == f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}"
    assert found[f"{MULTIARCH}/libcuda.so.1"] == f"{MULTIARCH}/libcuda.so.{VERSION}"
    assert not [path for path in found if "lib32" in path]


@pytest.mark.parametrize(
    "content", [b"", b"ld.so-1.7.0\0" + b"\0" * 100, b"glibc-ld.so.cache1.1", b"glibc-ld.so.cache1.1" + b"\xff" * 60]
)
def test_a_cache_that_is_none_or_torn_holds_nothing(content: bytes) -> None:
    assert parse_cache(content) == ()


def test_the_cache_of_this_machine() -> None:
    listed = subprocess.run(("/sbin/ldconfig", "-p"), check=True, capture_output=True, text=True).stdout
    lines = [line.strip() for line in listed.splitlines() if " => " in line]
    found = parse_cache(Path("/etc/ld.so.cache").read_bytes())
    assert [f"{one.name} {one.path}" for one in found] == [
        f"{line.partition(' (')[0]} {line.rpartition(' => ')[2]}" for line in lines
    ]
    (c_library,) = (one for one in found if one.name == "libc.so.6" and one.is_64_bit)
    assert c_library == CachedLibrary("libc.so.6", c_library.path, True)


# -- NVML -------------------------------------------------------------------------------------------------------------


def information(root: Path, index: int) -> Path:
    return root / f"proc/driver/nvidia/gpus/{gpu(index).sysfs_id}/information"


def put_to_sleep(root: Path, index: int) -> None:
    """A GPU that nobody has used since the boot has no UUID yet."""
    path = information(root, index)
    path.write_text(path.read_text().replace(gpu(index).uuid, "GPU-????????-????-????-????-????????????"))


def test_discovery_asks_nobody(host: Host) -> None:
    """nvidia-smi would make device nodes and load modules: a look must not."""
    assert discover(host).cuda_version == ""
    assert host.asked == []


def test_nvml_knows_the_uuid_of_a_sleeping_gpu_and_what_images_require(host: Host, tmp_path: Path) -> None:
    put_to_sleep(tmp_path, 1)
    driver = ask_nvml(host, discover(host))
    assert driver.cuda_version == "12.4"
    assert [(one.uuid, one.brand, one.compute_capability) for one in driver.gpus] == [
        (gpu(number).uuid, "NVIDIA", "9.0") for number in (0, 1)
    ]
    assert host_facts(specification(driver)) == {
        "--host-driver-version": VERSION, "--host-cuda-version": "12.4",
        "--gpu-architecture": "9.0", "--gpu-brand": "NVIDIA",
    }  # fmt: skip


@pytest.mark.parametrize(
    "spoil",
    [
        lambda host: host.remove("/dev/nvidia1"),
        lambda host: host.remove("/dev/nvidia-uvm"),
        lambda host: host.remove("/proc/driver/nvidia/version"),
        lambda host: write_kernel_tree(host.root, 2, "535.261.03"),
    ],
    ids=["gpu", "control", "module", "libraries of another version"],
)
def test_nvml_is_not_asked_where_it_would_make_something_or_fail(host: Host, spoil: Callable[[Host], object]) -> None:
    spoil(host)
    before = discover(host)
    assert ask_nvml(host, before) == before
    assert host.asked == []


@pytest.mark.parametrize(
    "answer",
    [(9, ""), (0, "no JSON"), (0, "[]"), (0, "{}"), (0, '{"cuda_version": "12.4", "gpus": [{}]}'), (0, "[" * 9999)],
)
def test_an_nvml_that_does_not_answer_leaves_what_is_known(host: Host, answer: tuple[int, str]) -> None:
    host.nvml = answer
    assert ask_nvml(host, discover(host)) == discover(host)


def test_this_drivers_own_library_is_asked(host: Host) -> None:
    ask_nvml(host, discover(host))
    assert host.asked[0][4] == f"{MULTIARCH}/libnvidia-ml.so.{VERSION}"


def answer_with(**changes: Any) -> str:
    """Return the recorded answer, with other values for the first GPU."""
    first, *others = ANSWER["gpus"]
    return json.dumps({**ANSWER, "gpus": [{**first, **changes}, *others]})


def test_a_driver_older_than_the_question_for_compute_capabilities(host: Host) -> None:
    host.nvml = (0, answer_with(compute_capability=""))
    driver = ask_nvml(host, discover(host))
    assert {one.brand for one in driver.gpus} == {"NVIDIA"}
    assert "--gpu-architecture" not in host_facts(specification(driver))


def test_unlike_gpus_promise_the_least(host: Host) -> None:
    host.nvml = (0, answer_with(compute_capability="10.0", brand=15))
    driver = ask_nvml(host, discover(host))
    assert [one.brand for one in driver.gpus] == ["GeForceRTX", "NVIDIA"]
    annotations = host_facts(specification(driver))
    assert annotations["--gpu-architecture"] == "9.0"
    assert "--gpu-brand" not in annotations


@pytest.mark.parametrize("brand", [None, -1, 17, 1 << 40, "x"])
def test_what_nvml_does_not_know_is_not_taken_for_a_name(brand: object) -> None:
    text = answer_with(uuid="../../etc", brand=brand, compute_capability="[N/A]")
    gpus, version = parse_answers(text)
    assert (gpus["0000:1b:00.0"], version) == (GpuAnswer(), "12.4")
    endless = {"gpu_instance": float("inf"), "compute_instance": 0, "uuid": ""}
    assert parse_answers(answer_with(mig=[endless])) == ({}, "")


@pytest.mark.parametrize(
    ("nvml", "kernel"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000FFFF:AF:00.0", "ffff:af:00.0"),
        ("00010000:E1:00.0", "10000:e1:00.0"),
        ("0000:1b:00.0", "0000:1b:00.0"),
    ],
)
def test_bus_ids(nvml: str, kernel: str) -> None:
    assert sysfs_bus_id(nvml) == kernel


def test_indices_follow_the_bus_ids_as_numbers(host: Host, tmp_path: Path) -> None:
    """A PCI domain of five digits comes after those of four, as NVML counts."""
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    (gpus / gpu(0).sysfs_id).rename(gpus / "10000:01:00.0")
    assert [(one.index, one.minor, one.bus_id) for one in discover(host).gpus] == [
        (0, 1, gpu(1).sysfs_id),
        (1, 0, "10000:01:00.0"),
    ]


# -- device nodes -----------------------------------------------------------------------------------------------------


def set_params(root: Path, **values: int) -> None:
    path = root / "proc/driver/nvidia/params"
    lines = (line.partition(": ") for line in path.read_text().splitlines())
    path.write_text("".join(f"{key}: {values.get(key, value)}\n" for key, _, value in lines))


def test_nodes_that_are_not_for_everybody(host: Host, tmp_path: Path) -> None:
    """The driver's own parameters, in decimal, say so; engines then add the group to the container's process."""
    set_params(tmp_path, DeviceFileMode=0o660, DeviceFileGID=44)
    host.remove("/dev/nvidia1")
    driver = discover(host)
    assert missing_nodes(driver) == (Node("/dev/nvidia1", 195, 1, 0o660, 44),)
    found = specification(driver)
    assert found.version == "0.7.0"
    assert found.edits.additional_gids == (44,)
    assert {(node.file_mode, node.gid) for node in found.edits.device_nodes} == {(0o660, 44)}
    assert {device.edits.additional_gids for device in found.devices} == {(44,)}
    assert problems(found) == ()


def test_udevs_word_holds_where_the_driver_keeps_its_hands_off(host: Host, tmp_path: Path) -> None:
    os.chown(tmp_path / "dev/nvidia0", 0, 107)
    (tmp_path / "dev/nvidia0").chmod(0o660)
    assert specification(discover(host)).devices[0].edits.additional_gids == ()
    set_params(tmp_path, ModifyDeviceFiles=0)
    nodes = {node.path: node for node in discover(host).nodes}
    assert nodes["/dev/nvidia0"] == Node("/dev/nvidia0", 195, 0, 0o660, 107)
    assert nodes["/dev/nvidia1"] == Node("/dev/nvidia1", 195, 1, 0o666, 0)
    edits = {device.name: device.edits for device in specification(discover(host)).devices}
    assert (edits["0"].additional_gids, edits["1"].additional_gids, edits["all"].additional_gids) == (
        (107,),
        (),
        (107,),
    )


def test_before_550_40_one_name_stands_for_mode_setting_too() -> None:
    majors = {"nvidia-frontend": 195}
    for loaded in (False, True):
        paths = [node.path for node in expected_nodes((0,), majors, modeset_loaded=loaded)]
        assert ("/dev/nvidia-modeset" in paths) is loaded


# -- is a file still right? -------------------------------------------------------------------------------------------


def test_what_only_nvml_knows_is_no_difference_while_it_is_not_asked(host: Host, tmp_path: Path) -> None:
    put_to_sleep(tmp_path, 1)
    plain = discover(host)
    asked = ask_nvml(host, plain)
    content = render_json(specification(asked))
    assert content != render_json(specification(plain))
    assert difference(content, asked) == difference(content, plain) == ""
    # Asked, it does count.
    assert difference(render_json(specification(plain)), asked) != ""


def changed(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(content)
    change(document)
    return (json.dumps(document, indent=1) + "\n").encode()


def tell(document: dict[str, Any], version: str | None) -> None:
    """Let the specification say another driver version, or none."""
    words = document["containerEdits"]["hooks"][0]["args"]
    place = words.index(DRIVER)
    words[place : place + 2] = [] if version is None else [DRIVER, version]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda one: tell(one, "535.1"), "driver-version: the specification says 535.1, the host has 550.163.01"),
        (lambda one: tell(one, None), "driver-version: the specification says nothing, the host has 550.163.01"),
        (lambda one: one["devices"].pop(1), f"device {gpu(0).uuid} is missing"),
        (lambda one: one["devices"].append({**one["devices"][0], "name": "7"}), "device 7 is gone"),
        (lambda one: one["devices"][0]["containerEdits"]["deviceNodes"][0].update(minor=5), "device 0 is another"),
        (lambda one: one["devices"].append(one["devices"][0]), "the device '0' stands there more than once"),
        (lambda one: one["containerEdits"]["mounts"].pop(0), "EGL_nvidia.so.550.163.01 is missing"),
        (lambda one: one["containerEdits"]["mounts"][0].update(hostPath="/x"), "EGL_nvidia.so.550.163.01 is another"),
        (lambda one: one["containerEdits"]["hooks"][0]["args"].pop(), "the links are others"),
        (lambda one: one["containerEdits"]["deviceNodes"].pop(), "the control nodes are others"),
        (lambda one: one["containerEdits"].pop("env"), "its form is another"),
        (lambda one: one.pop("cdiVersion"), "cdiVersion is missing"),
        (lambda one: one.update(more=1), "unknown in Specification: more"),
    ],
)  # fmt: skip
def test_a_difference_is_named(host: Host, change: Callable[[dict[str, Any]], object], says: str) -> None:
    driver = discover(host)
    content = render_json(specification(driver))
    assert changed(content, lambda one: None) == content
    assert says in difference(changed(content, change), driver)


def without_link(name: str) -> Callable[[dict[str, Any]], None]:
    """Return the change that takes the hook's link of this name away."""

    def change(document: dict[str, Any]) -> None:
        words = document["containerEdits"]["hooks"][0]["args"]
        place = next(place for place, word in enumerate(words) if word.endswith(f"/{name}"))
        del words[place - 1 : place + 1]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda one: one["containerEdits"]["hooks"][0].pop("timeout"), ""),
        (without_link("libGLX_indirect.so.0"), ""),
        (without_link("libcuda.so.1"), "the links are others"),
        (lambda one: one["containerEdits"]["hooks"][0].pop("env"), "the links are others"),
        (
            lambda one: one["containerEdits"]["hooks"][0].update(path="/bin/true"),
            "driver-version: the specification says",
        ),
        (lambda one: one["containerEdits"]["hooks"].clear(), "driver-version: the specification says nothing"),
        (lambda one: tell(one, "535.1"), "driver-version: the specification says 535.1"),
        (lambda one: one["devices"].pop(1), f"device {gpu(0).uuid} is missing"),
        (lambda one: one["containerEdits"]["mounts"].pop(0), "EGL_nvidia.so.550.163.01 is missing"),
    ],
)
def test_other_version_serves_if_it_has_all(host: Host, change: Callable[[dict[str, Any]], object], says: str) -> None:
    driver = discover(host)
    content = changed(render_json(specification(driver)), change)
    assert difference(content, driver) != ""
    found = difference(content, driver, any_version=True)
    assert found.startswith(says) or says in found if says else found == ""


def test_a_driver_that_was_updated_is_a_difference(host: Host, tmp_path: Path) -> None:
    content = render_json(specification(discover(host)))
    shutil.rmtree(tmp_path / "usr")
    install_tree(tmp_path, "570.86.16")
    said = difference(content, discover(host))
    assert said == "driver-version: the specification says 550.163.01, the host has 570.86.16"


def test_a_socket_that_comes_is_a_difference(host: Host, tmp_path: Path) -> None:
    content = render_json(specification(discover(host)))
    (tmp_path / "run/nvidia-persistenced").mkdir(parents=True)
    (tmp_path / "run/nvidia-persistenced/socket").touch()
    assert difference(content, discover(host)) == "/run/nvidia-persistenced/socket is missing"


@pytest.mark.parametrize("lost_by", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo"])
def test_a_lost_gpu_hides_no_other_from_nvml(
    lost_by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVML counts a GPU that has fallen off the bus, and says so when it is asked for it."""

    def answer(of: str, value: object) -> Callable[..., object]:
        def answered(device: object, *_: object) -> object:
            if of == lost_by and device == 1:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return device if of == "nvmlDeviceGetHandleByIndex" else value

        return answered

    values = {"nvmlDeviceGetHandleByIndex": 0, "nvmlDeviceGetPciInfo": SimpleNamespace(busId=gpu(0).bus_id),
              "nvmlDeviceGetUUID": gpu(0).uuid, "nvmlDeviceGetBrand": 14}  # fmt: skip
    for name in (one for one in dir(pynvml) if one.startswith("nvmlDeviceGet")):
        monkeypatch.setattr(pynvml, name, answer(name, values.get(name)))
    for name, value in (("nvmlInit", None), ("nvmlDeviceGetCount", 2), ("nvmlSystemGetCudaDriverVersion_v2", 12040)):
        monkeypatch.setattr(pynvml, name, lambda value=value: value)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: None)
    nvml_child.main("/libnvidia-ml.so.1")
    answers, version = parse_answers(capsys.readouterr().out)
    assert ([one.uuid for one in answers.values()], version) == ([gpu(0).uuid], "12.4")
