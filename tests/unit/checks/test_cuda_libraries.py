"""Which libcuda wins, and what that means: image files as archives have them, without any engine."""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from gpuprov.cdi.files import parse_cache
from gpuprov.checks.cuda.compatibility import RESULTS, least_driver, result_of
from gpuprov.checks.cuda.files import add_driver, unpacked
from gpuprov.checks.cuda.search import Program
from gpuprov.checks.cuda.survey import Subject, Survey, as_json, as_lines, survey_of, verdict
from gpuprov.runtime_hook import links
from gpuprov.runtime_hook.ldcache import FLAGS, merge
from gpuprov.runtime_hook.requirements import FIRST_DRIVERS
from gpuprov.runtime_hook.settings import Settings

DRIVER = "/usr/lib/x86_64-linux-gnu"
LOADER = "/lib64/ld-linux-x86-64.so.2"
VENV = "/env/lib/python3.12/site-packages"
TORCH = "/usr/local/lib/python3.11/dist-packages/torch"
DOCS = Path(__file__).parents[3] / "docs/cuda.md"
PROGRAMS = "whether a program brings its own path to libcuda (RPATH, RUNPATH)"


def elf(machine: int = 62) -> bytes:
    """Return the part of a library that is examined."""
    return b"\x7fELF\2\1\1".ljust(16, b"\0") + b"\3\0" + machine.to_bytes(2, "little") + bytes(44)


class Image:
    """An image's files; glibc's loader is there, and what `add` puts there. `machine`: what the host is."""

    machine = "x86_64"

    def __init__(self, folder: Path, loader: str = LOADER) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        if loader:
            self.add(loader, b"\0/lib/x86_64-linux-gnu/\0/usr/lib/x86_64-linux-gnu/\0/lib/\0/usr/lib/\0")

    def add(self, path: str, content: bytes | None = None) -> None:
        self._place(path).write_bytes(elf() if content is None else content)

    def link(self, path: str, target: str) -> None:
        self._place(path).symlink_to(target)

    def _place(self, path: str) -> Path:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def library(self, folder: str, version: str, name: str = "libcuda") -> None:
        self.add(f"{folder}/{name}.so.{version}")
        self.link(f"{folder}/{name}.so.1", f"{name}.so.{version}")

    def cache(self, *entries: str) -> None:
        self.add("/etc/ld.so.cache", merge(b"", [(one.rpartition("/")[2], one, FLAGS["x86_64"]) for one in entries]))

    def survey(
        self, kernel: str = "550.163.01", has_driver: bool = True, kind: str = "image", **environment: str
    ) -> Survey:
        return self.survey_with(environment, kernel, has_driver, kind)

    def survey_with(
        self, environment: Mapping[str, str], kernel: str = "", has_driver: bool = True, kind: str = "image"
    ) -> Survey:
        host = os.uname_result(("Linux", "", "", "", self.machine))
        with pytest.MonkeyPatch.context() as patch, contextlib.closing(unpacked(str(self.root))) as root:
            patch.setattr(os, "uname", lambda: host)
            return survey_of(Subject(kind, "app", root, Program(environment, "/work"), "test", has_driver), kernel)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def healthy(image: Image) -> Image:
    image.library(DRIVER, "550.163.01")
    image.library(DRIVER, "550.163.01", "libnvidia-ml")
    return image


def told(found: Survey) -> list[tuple[tuple[int, ...], str, bool]]:
    return [(one.results, one.what, one.note) for one in found.findings]


def test_without_a_loaded_driver_nothing_is_said_to_fit(image: Image) -> None:
    assert verdict(healthy(image).survey(kernel="")).endswith(" is unknown")


def test_a_healthy_container_has_nothing_wrong(image: Image) -> None:
    found = healthy(image).survey(CUDA_VERSION="12.4.1")
    assert found.findings == ()
    assert list(as_lines(found)) == [
        "image app, read from test",
        f"libcuda.so.1       {DRIVER}/libcuda.so.1 -> libcuda.so.550.163.01 (driver 550.163.01)",
        "  because          a default folder of the loader",
        f"libnvidia-ml.so.1  {DRIVER}/libnvidia-ml.so.1 -> libnvidia-ml.so.550.163.01 (driver 550.163.01)",
        "  because          a default folder of the loader",
        "kernel module      550.163.01",
        "CUDA               12.4: the variable CUDA_VERSION (12.4.1)",
        f"loader             glibc {LOADER}",
        f"unknown            {PROGRAMS}",
        "the libraries that programs of image app load fit the driver",
    ]


def test_an_images_own_older_libcuda_is_named_with_the_variable_that_makes_it_win(image: Image) -> None:
    healthy(image).library("/opt/own", "535.261.03")
    assert not image.survey().faults
    found = image.survey(LD_LIBRARY_PATH="/opt/own", CUDA_VERSION="12.4.1")
    problem, note = found.findings
    assert problem.results == (803, 35, 36)
    assert list(as_lines(found))[-1] == "not all libraries that programs of image app load fit the driver"
    assert problem.what == "/opt/own/libcuda.so.1 is of driver 535.261.03, the loaded kernel module is 550.163.01"
    assert problem.evidence == "/opt/own/libcuda.so.535.261.03: LD_LIBRARY_PATH has /opt/own"
    assert problem.next_step == (
        "correct LD_LIBRARY_PATH: in the image, or in the call, such as docker run --env LD_LIBRARY_PATH="
    )
    assert (note.results, note.note) == ((36, 222), True)
    assert [one.path for one in found.libraries[0].others] == [f"{DRIVER}/libcuda.so.1"]


def test_forward_compatibility_needs_a_newer_branch(image: Image) -> None:
    healthy(image).library("/usr/local/cuda-12.5/compat", "555.58.02")
    image.link("/usr/local/cuda", "cuda-12.5")
    path = "/usr/local/cuda/compat"
    found = image.survey(LD_LIBRARY_PATH=path, CUDA_VERSION="12.5.0")
    assert not found.faults
    assert told(found) == [
        ((804,), "forward compatibility: /usr/local/cuda/compat/libcuda.so.1 is of driver 555.58.02, the loaded kernel "
         "module is 550.163.01; this works on data center GPUs only", True)
    ]  # fmt: skip
    older = image.survey(kernel="580.178.04", LD_LIBRARY_PATH=path)
    assert older.faults
    assert older.findings[0].results == (803, 35, 36)
    # Of the same branch, it is not forward compatibility.
    same = image.survey(kernel="555.42.06", LD_LIBRARY_PATH=path)
    assert same.faults[0].results == (803, 35, 36)


def test_a_stub_is_named(image: Image) -> None:
    healthy(image).add("/usr/local/cuda/lib64/stubs/libcuda.so")
    assert not image.survey().faults
    image.cache("/usr/local/cuda/lib64/stubs/libcuda.so.1")
    image.link("/usr/local/cuda/lib64/stubs/libcuda.so.1", "libcuda.so")
    found = image.survey()
    assert found.findings[0].results == (34, 35)
    assert "stub" in found.findings[0].what
    assert found.findings[0].next_step.endswith("then run ldconfig")


def test_a_container_that_runs_since_before_an_update_is_restarted(image: Image) -> None:
    image.library(DRIVER, "535.261.03")
    image.library(DRIVER, "550.163.01", "libnvidia-ml")
    removed = frozenset({f"{DRIVER}/libcuda.so.535.261.03"})
    with contextlib.closing(unpacked(str(image.root))) as root:
        subject = Subject("container", "app", root, Program(), "test", removed=removed, restart="docker restart app")
        (found,) = survey_of(subject, "550.163.01").findings
    assert found.next_step == "docker restart app"
    assert found.evidence.endswith("; the host's driver was updated since it started")


@pytest.mark.parametrize(
    ("driver", "cuda", "results", "note"),
    [
        ("535.261.03", "13.0", (35,), False), ("535.261.03", "12.4", (36, 222), True),
        ("535.261.03", "11.8", None, True),
        ("535.261.03", "12.2", None, True), ("520.61.05", "12.0", (35,), False), ("525.60.13", "12.9", (36, 222), True),
        ("450.66", "11.0", None, True), ("450.66", "11.1", (35,), False),
        ("450.80.02", "11.8", (36, 222), True), ("440.33.01", "10.2", None, True),
        ("418.87.00", "10.2", (35,), False), ("580.65.06", "13", None, True), ("570.26", "13", (35,), False),
        ("999.1", "12.4", None, True),
    ],
)  # fmt: skip
def test_cuda_versus_libcuda(image: Image, driver: str, cuda: str, results: tuple[int, ...] | None, note: bool) -> None:
    image.library(DRIVER, driver)
    image.add(f"/usr/local/cuda/lib64/libcudart.so.{cuda}", b"")
    found = image.survey(kernel=driver)
    assert [one.results for one in found.findings] == ([results] if results else [])
    assert all(one.note is note for one in found.findings)


def test_every_cuda_release_has_a_least_driver_not_newer_than_its_own() -> None:
    for release, driver in FIRST_DRIVERS:
        least = least_driver(release)
        numbers = [tuple(map(int, one.split("."))) for one in (least, driver)]
        assert numbers[0] <= numbers[1], release


@pytest.mark.parametrize(
    ("path", "content", "environment", "version"),
    [
        ("/usr/local/cuda-11.8/lib64/libcudart.so.11.8.89", b"", {}, "11.8"),
        ("/usr/lib/x86_64-linux-gnu/libcudart.so.12.2.140", b"", {}, "12.2"),
        ("/opt/app/libcudart.so.10.2.89", b"", {"LD_LIBRARY_PATH": "/none:/opt/app"}, "10.2"),
        (f"{TORCH}/version.py", b"debug = False\ncuda: Optional[str] = '12.1'\n", {}, "12.1"),
        (f"{TORCH}/version.py", b"cuda = '12.4'\nhip = None\n", {}, "12.4"),
        (f"{VENV}/nvidia_cuda_runtime-13.0.48.dist-info/METADATA", b"", {"PATH": "/bin:/env/bin"}, "13.0"),
        (f"{VENV}/nvidia_cuda_runtime_cu12-12.4.127.dist-info/METADATA", b"", {"PATH": "/env/bin"}, "12.4"),
    ],
)
def test_runtimes_are_found_where_they_usually_lie(
    image: Image, path: str, content: bytes, environment: Mapping[str, str], version: str
) -> None:
    image.add(path, content)
    (found,) = image.survey_with(environment).runtimes
    assert found.version == version
    assert found.source.removeprefix("PyTorch's ") in path


@pytest.mark.parametrize("content", [b"cuda: Optional[str] = None\n", b"\xff" * 100, b""])
def test_a_torch_without_cuda_states_none(image: Image, content: bytes) -> None:
    image.add(f"{TORCH}/version.py", content)
    found = image.survey()
    assert found.runtimes == ()
    assert found.unknown[0].startswith("for which CUDA release its programs are: ")


def test_an_image_without_the_driver_is_not_wrong(image: Image) -> None:
    found = image.survey(has_driver=False)
    assert not found.faults
    assert verdict(found) == "whether the libraries that programs of image app load fit the driver is unknown"
    assert told(found) == [((35,), "the loader finds no libcuda.so.1: the image has none of its own", True)]


def test_a_container_without_a_libcuda_says_where_others_lie(image: Image) -> None:
    image.library("/opt/conda/lib", "535.261.03")
    (finding,) = image.survey().findings
    assert (finding.results, finding.note) == ((35,), False)
    assert finding.evidence == "/opt/conda/lib/libcuda.so.1: not in a folder that the loader searches"


def test_an_empty_file_that_an_image_kept_is_named(image: Image) -> None:
    image.add(f"{DRIVER}/libcuda.so.1", b"")
    (finding,) = image.survey().findings
    assert finding.what == f"the loader stops at {DRIVER}/libcuda.so.1: file too short"
    assert finding.results == (35,)


def test_a_library_without_a_version_is_of_an_unknown_one(image: Image) -> None:
    image.add(f"{DRIVER}/libcuda.so.1")
    (finding,) = image.survey().findings
    assert "version" in finding.what
    assert finding.note
    assert "(version unknown)" in "\n".join(as_lines(image.survey()))


def test_a_management_library_of_another_version_is_named(image: Image) -> None:
    healthy(image).library("/opt/own", "535.261.03", "libnvidia-ml")
    (finding,) = image.survey(LD_LIBRARY_PATH="/opt/own").findings
    assert finding.what.startswith("/opt/own/libnvidia-ml.so.1 is of driver 535.261.03")
    assert "nvidia-smi exits 18" in finding.what


@pytest.mark.parametrize(("container", "step"), [("", "reboot, or run `gpuprov install`"), ("lxc", "run `gpuprov ins")])
def test_only_library_of_the_installed_driver_is_kept(image: Image, container: str, step: str) -> None:
    image.library(DRIVER, "580.178.04")
    image.library(DRIVER, "580.178.04", "libnvidia-ml")
    image.add("/run/systemd/container", container.encode())
    for finding in image.survey(kind="host").findings:
        assert finding.what.startswith("the driver's files are 580.178.04, the loaded module is 550.163.01")
        assert finding.next_step.startswith(step)
    # With the loaded driver's own beside it, another one that wins is in the way.
    image.library("/usr/lib", "550.163.01")
    assert image.survey(kind="host").findings[0].what.startswith(f"{DRIVER}/libcuda.so.1 is of driver")


def test_on_a_host_a_broken_driver_is_installed_again(image: Image) -> None:
    for name in ("libcuda", "libnvidia-ml"):
        image.add(f"{DRIVER}/{name}.so.1", b"")
    steps = {finding.next_step for finding in image.survey(kind="host").findings}
    assert steps == {"sudo gpuprov install"}


@pytest.mark.parametrize(("loader", "words"), [("/lib/ld-musl-x86_64.so.1", "musl"), ("", "no dynamic loader")])
def test_an_image_without_glibc_gets_one_clear_sentence(tmp_path: Path, loader: str, words: str) -> None:
    image = healthy(Image(tmp_path, loader))
    (finding,) = image.survey().findings
    assert words in finding.what
    assert all(one.winner is None for one in image.survey().libraries)


def test_the_same_stands_in_json(image: Image) -> None:
    healthy(image).library("/opt/own", "535.261.03")
    found = json.loads(json.dumps(as_json(image.survey(LD_LIBRARY_PATH="/opt/own"))))
    assert found["kernel_module"] == "550.163.01"
    assert found["libraries"][0]["winner"] == {
        "path": "/opt/own/libcuda.so.1", "chain": ["/opt/own/libcuda.so.1", "/opt/own/libcuda.so.535.261.03"],
        "reason": "LD_LIBRARY_PATH has /opt/own", "version": "535.261.03", "fault": "", "stub": False, "compat": False,
    }  # fmt: skip
    assert found["findings"][0]["results"] == [803, 35, 36]
    assert found["unknown"][-1] == PROGRAMS


def test_the_table_of_results_has_what_people_meet() -> None:
    codes = [code for one in RESULTS for code in one.codes]
    assert codes == [3, 34, 35, 36, 38, 100, 101, 209, 222, 302, 304, 802, 803, 804, 999]
    assert all(all(asdict(one).values()) for one in RESULTS)
    assert result_of("38") is result_of("100") is result_of("CUDAERRORNODEVICE")
    assert (result_of("1"), result_of("")) == (None, None)


def test_the_page_has_the_table_of_results() -> None:
    rows = ((", ".join(map(str, one.codes)), ", ".join(f"`{name}`" for name in one.names), one) for one in RESULTS)
    assert "\n".join(f"- **{codes}** {names}: {one.meaning}" for codes, names, one in rows) in DOCS.read_text("utf-8")


def cdi_settings(folder: Path, libraries: str = DRIVER) -> Settings:
    """Return settings that name a CDI specification of driver 550.163.01."""
    words = ["gpuprov-container-runtime-hook", "createContainer", "--host-driver-version", "550.163.01"]
    mounts = []
    for name in ("libcuda", "libnvidia-ml"):
        (folder / name).write_bytes(elf() + b"the rest of the library")
        mounts.append({"hostPath": str(folder / name), "containerPath": f"{libraries}/{name}.so.550.163.01"})
        words += ["--link", f"{name}.so.550.163.01::{libraries}/{name}.so.1"]
    hooks = [{"hookName": "createContainer", "path": "/usr/bin/gpuprov-container-runtime-hook", "args": words}]
    devices = [{"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}]
    specification = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices,
                     "containerEdits": {"mounts": mounts, "hooks": hooks}}  # fmt: skip
    (folder / "cdi").mkdir()
    (folder / "cdi/nvidia.json").write_text(json.dumps(specification))
    return Settings({"nvidia-container-runtime.modes.cdi.spec-dirs": [str(folder / "cdi")]})


def added(image: Image, settings: Settings) -> str:
    with contextlib.closing(unpacked(str(image.root))) as root:
        return add_driver(root, settings)


def test_an_image_gets_the_drivers_files_as_at_its_start(image: Image, tmp_path: Path) -> None:
    (image.root / DRIVER.lstrip("/")).mkdir(parents=True)
    assert added(image, cdi_settings(tmp_path)).startswith("with the files of driver 550.163.01, ")
    found = image.survey()
    assert not found.faults
    winners = [one.winner for one in found.libraries if one.winner is not None]
    assert [(one.chain[-1], one.version) for one in winners] == [
        (f"{DRIVER}/{name}.so.550.163.01", "550.163.01") for name in ("libcuda", "libnvidia-ml")
    ]
    assert all(one.reason.startswith("the loader's cache") for one in winners)


def test_a_host_without_a_specification_adds_nothing(image: Image, tmp_path: Path) -> None:
    settings = Settings({"nvidia-container-runtime.modes.cdi.spec-dirs": [str(tmp_path)]})
    assert added(image, settings).startswith("without the driver's files, ")
    found = image.survey(kernel="", has_driver=False)
    assert [one.partition(":")[0] for one in found.unknown[1:3]] == [
        "whether the libraries fit", "which libraries a container of it has"
    ]  # fmt: skip


def test_lib64_of_an_arm64_image_is_not_x86_64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda-compat's libraries enter the loader's cache as libraries for arm64."""
    monkeypatch.setattr(links, "HOST_FLAGS", FLAGS["aarch64"])
    folder, compat = "/usr/lib/aarch64-linux-gnu", "/usr/local/cuda/compat"
    image = Image(tmp_path, "/lib/ld-linux-aarch64.so.1")
    image.machine = "aarch64"
    (image.root / "lib64").mkdir()
    (image.root / folder.lstrip("/")).mkdir(parents=True)
    image.add(f"{compat}/libcuda.so.555.58.02", elf(183))
    image.link(f"{compat}/libcuda.so.1", "libcuda.so.555.58.02")
    assert added(image, cdi_settings(tmp_path, folder)).startswith("with ")
    entries = parse_cache((image.root / "etc/ld.so.cache").read_bytes())
    assert f"{compat}/libcuda.so.1" in [one.path for one in entries if one.name == "libcuda.so.1"]
    assert FLAGS["aarch64"].to_bytes(4, "little") in (image.root / "etc/ld.so.cache").read_bytes()
    assert FLAGS["x86_64"].to_bytes(4, "little") not in (image.root / "etc/ld.so.cache").read_bytes()
    found = image.survey()
    assert found.loader.machine == "aarch64"
    assert found.libraries[0].winner is not None and found.libraries[0].winner.path == f"{compat}/libcuda.so.1"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_loader_of_this_machine_counts_where_there_are_two(image: Image, machine: str) -> None:
    image.machine = machine
    image.add("/lib/ld-linux-aarch64.so.1", b"")
    assert image.survey().loader.machine == machine


def test_an_image_for_another_machine_is_wrong(image: Image) -> None:
    image.machine = "aarch64"
    found = healthy(image).survey()
    assert [one.what.partition(":")[0] for one in found.findings] == [
        "its programs are for x86_64, this host is aarch64"
    ]
    assert found.faults


@pytest.mark.parametrize("target", ["x86_64-linux", "sbsa-linux"])
@pytest.mark.parametrize("prefix", ["/opt/conda", "/usr/local/cuda"])
def test_a_stub_of_a_target_is_named_where_the_loader_finds_none(image: Image, prefix: str, target: str) -> None:
    path = f"{prefix}/targets/{target}/lib/stubs/libcuda.so"
    image.add(path)
    (finding,) = image.survey().findings
    assert finding.evidence == f"{path}: not in a folder that the loader searches"


def test_a_library_for_another_machine_is_passed_over(image: Image) -> None:
    healthy(image).add("/opt/a/libcuda.so.1", elf(183))
    found = image.survey(LD_LIBRARY_PATH="/opt/a")
    assert not found.faults
    assert [one.fault for one in found.libraries[0].others] == ["for aarch64: the loader passes over it"]


def test_a_release_of_cuda_that_gpuprov_does_not_know_is_unknown(image: Image) -> None:
    (finding,) = healthy(image).survey(CUDA_VERSION="99.1").findings
    assert finding.note and finding.what.startswith("whether CUDA 99.1 runs on driver 550.163.01 is unknown")


def test_what_is_not_expanded_is_unknown(image: Image) -> None:
    found = healthy(image).survey(LD_LIBRARY_PATH="/opt/$LIB", CUDA_VERSION="12.4")
    assert found.unknown == ("what $ stands for in LD_LIBRARY_PATH", PROGRAMS)
