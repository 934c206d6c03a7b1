"""Which libcuda wins, and what that means: image files as archives have them, without any engine."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from gpuprov.cdi.files import parse_cache
from gpuprov.checks.cuda.judgement import least_driver
from gpuprov.checks.cuda.results import RESULTS, result_of
from gpuprov.checks.cuda.search import Program, processor_levels, read_elf
from gpuprov.checks.cuda.survey import Subject, Survey, as_json, as_lines, from_json, results_markdown, survey_of
from gpuprov.checks.cuda.trees import ArchiveTree, chain, read_archive, read_start
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.ldcache import FLAGS, merge
from gpuprov.runtime_hook.requirements import FIRST_DRIVERS

DRIVER = "/usr/lib/x86_64-linux-gnu"
LOADER = "/lib64/ld-linux-x86-64.so.2"
TORCH = "/usr/local/lib/python3.11/dist-packages/torch"
DOCS = Path(__file__).parents[3] / "docs/cuda.md"


def elf(soname: str = "libcuda.so.1", machine: int = 62, runpath: str = "") -> bytes:
    """Return the smallest library that has what the loader reads: two segments and a dynamic section."""
    strings = b"\0" + soname.encode() + b"\0" + runpath.encode() + b"\0"
    tags = [(5, 0x1000), (14, 1), *([(29, len(soname) + 2)] if runpath else []), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    start = 64 + 2 * 56
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 4, start + len(dynamic), 0x1000, 0, len(strings), len(strings), 0)
    return (
        header + load + struct.pack("<IIQQQQQQ", 2, 4, start, 0, 0, len(dynamic), len(dynamic), 8) + dynamic + strings
    )


class Image:
    """An image's files; glibc's loader is there, and what `add` puts there."""

    def __init__(self, folder: Path, loader: str = LOADER) -> None:
        self.folder = folder
        self.tree = ArchiveTree()
        if loader:
            self.add(loader, b"\0/lib/x86_64-linux-gnu/\0/usr/lib/x86_64-linux-gnu/\0/lib/\0/usr/lib/\0x86-64-v2")

    def add(self, path: str, content: bytes | None = None) -> None:
        place = self.folder / path.replace("/", "%")
        place.write_bytes(elf() if content is None else content)
        self.tree.add_file(path, place)

    def library(self, folder: str, version: str, name: str = "libcuda") -> None:
        self.add(f"{folder}/{name}.so.{version}", elf(f"{name}.so.1"))
        self.tree.add_link(f"{folder}/{name}.so.1", f"{name}.so.{version}")

    def cache(self, *entries: str) -> None:
        self.add("/etc/ld.so.cache", merge(b"", [(one.rpartition("/")[2], one, FLAGS["x86_64"]) for one in entries]))

    def survey(self, kernel: str = "550.163.01", has_driver: bool = True, **environment: str) -> Survey:
        return self.survey_with(environment, kernel, has_driver)

    def survey_with(self, environment: Mapping[str, str], kernel: str = "", has_driver: bool = True) -> Survey:
        program = Program(environment, "/work")
        return survey_of(Subject("image", "app", self.tree, program, "test", has_driver), kernel, ("x86-64-v2",))


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def healthy(image: Image) -> Image:
    image.library(DRIVER, "550.163.01")
    image.library(DRIVER, "550.163.01", "libnvidia-ml")
    return image


def told(found: Survey) -> list[tuple[tuple[int, ...], str, bool]]:
    return [(one.results, one.what, one.note) for one in found.findings]


def test_a_healthy_container_has_nothing_wrong(image: Image) -> None:
    found = healthy(image).survey(CUDA_VERSION="12.4.1")
    assert (found.good, found.findings) == (True, ())
    assert list(as_lines(found)) == [
        "image app, read from test",
        f"libcuda.so.1       {DRIVER}/libcuda.so.1 -> libcuda.so.550.163.01 (driver 550.163.01)",
        "  because          a default folder of the loader",
        f"libnvidia-ml.so.1  {DRIVER}/libnvidia-ml.so.1 -> libnvidia-ml.so.550.163.01 (driver 550.163.01)",
        "  because          a default folder of the loader",
        "kernel module      550.163.01",
        "CUDA               12.4: the variable CUDA_VERSION (12.4.1)",
        f"loader             glibc {LOADER}",
    ]


def test_an_images_own_older_libcuda_is_named_with_the_variable_that_makes_it_win(image: Image) -> None:
    healthy(image).library("/opt/own", "535.261.03")
    assert image.survey().good
    found = image.survey(LD_LIBRARY_PATH="/opt/own", CUDA_VERSION="12.4.1")
    problem, note = found.findings
    assert problem.results == (803, 35, 36)
    assert problem.what == "/opt/own/libcuda.so.1 is of driver 535.261.03, the loaded kernel module is 550.163.01"
    assert problem.evidence == "/opt/own/libcuda.so.535.261.03: LD_LIBRARY_PATH has /opt/own"
    assert problem.next_step == (
        "correct LD_LIBRARY_PATH: in the image, or in the call, such as docker run --env LD_LIBRARY_PATH="
    )
    assert (note.results, note.note) == ((36, 222), True)
    assert [one.path for one in found.libraries[0].others] == [f"{DRIVER}/libcuda.so.1"]


def test_forward_compatibility_needs_a_newer_branch(image: Image) -> None:
    healthy(image).library("/usr/local/cuda-12.5/compat", "555.58.02")
    image.tree.add_link("/usr/local/cuda", "cuda-12.5")
    path = "/usr/local/cuda/compat"
    found = image.survey(LD_LIBRARY_PATH=path, CUDA_VERSION="12.5.0")
    assert found.good
    assert told(found) == [
        ((804,), "forward compatibility: /usr/local/cuda/compat/libcuda.so.1 is of driver 555.58.02, the loaded kernel "
         "module is 550.163.01; this works on data center GPUs only", True)
    ]  # fmt: skip
    older = image.survey(kernel="580.178.04", LD_LIBRARY_PATH=path)
    assert not older.good
    assert older.findings[0].results == (803, 35, 36)
    # Of the same branch, it is not forward compatibility.
    same = image.survey(kernel="555.42.06", LD_LIBRARY_PATH=path)
    assert (same.good, same.findings[0].results) == (False, (803, 35, 36))


def test_a_stub_is_named(image: Image) -> None:
    healthy(image).add("/usr/local/cuda/lib64/stubs/libcuda.so")
    assert image.survey().good
    image.cache("/usr/local/cuda/lib64/stubs/libcuda.so.1")
    image.tree.add_link("/usr/local/cuda/lib64/stubs/libcuda.so.1", "libcuda.so")
    found = image.survey()
    assert found.findings[0].results == (34, 35)
    assert "stub" in found.findings[0].what
    assert found.findings[0].next_step.endswith("then run ldconfig")


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
def test_the_images_cuda_against_its_libcuda(
    image: Image, driver: str, cuda: str, results: tuple[int, ...] | None, note: bool
) -> None:
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
        (f"{TORCH}/lib/libcudart-9335f6a2.so.11.0", b"", {}, "11.0"),
        ("/env/lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13", b"", {"PATH": "/bin:/env/bin"}, "13"),
        ("/v/lib/python3.9/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12", b"", {"VIRTUAL_ENV": "/v"}, "12"),
    ],
)
def test_runtimes_are_found_where_they_usually_lie(
    image: Image, path: str, content: bytes, environment: Mapping[str, str], version: str
) -> None:
    image.add(path, content)
    (found,) = image.survey_with(environment).runtimes
    assert found.version == version
    assert path in found.source


@pytest.mark.parametrize("content", [b"cuda: Optional[str] = None\n", b"\xff" * 100, b""])
def test_a_torch_without_cuda_states_none(image: Image, content: bytes) -> None:
    image.add(f"{TORCH}/version.py", content)
    assert image.survey().runtimes == ()


def test_a_wheels_own_version_counts(image: Image) -> None:
    folder = "/opt/venv/lib/python3.11/site-packages"
    image.add(f"{folder}/nvidia/cuda_runtime/lib/libcudart.so.12", b"")
    image.tree.add_folder(f"{folder}/nvidia_cuda_runtime_cu12-12.4.127.dist-info")
    assert [one.version for one in image.survey().runtimes] == ["12.4"]


def test_an_image_without_the_driver_is_not_wrong(image: Image) -> None:
    found = image.survey(has_driver=False)
    assert found.good
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


def test_a_survey_of_another_host_is_the_same_again(image: Image) -> None:
    healthy(image).library("/opt/own", "535.261.03")
    found = image.survey(LD_LIBRARY_PATH="/opt/own", CUDA_VERSION="12.4.1")
    sent = json.loads(json.dumps(as_json(found)))
    assert as_json(from_json(sent)) == as_json(found)
    assert list(as_lines(from_json(sent))) == list(as_lines(found))


@pytest.mark.parametrize(
    "change",
    [{"loader": None}, {"libraries": [{"name": "libcuda.so.1", "winner": {"odd": 1}, "others": []}]}, {"cuda": [{}]},
     {"findings": 5}],
)  # fmt: skip
def test_what_is_no_survey_is_an_error(image: Image, change: dict[str, object]) -> None:
    sent = {**as_json(healthy(image).survey()), **change}
    with pytest.raises(GpuprovError, match="can't be read"):
        from_json(sent)


def test_the_table_of_results_has_what_people_meet() -> None:
    codes = [code for one in RESULTS for code in one.codes]
    assert codes == [3, 34, 35, 36, 38, 100, 101, 209, 222, 302, 304, 802, 803, 804, 999]
    assert all(all(asdict(one).values()) for one in RESULTS)
    assert result_of("38") is result_of("100") is result_of("CUDAERRORNODEVICE")
    assert (result_of("1"), result_of("")) == (None, None)


def test_the_page_has_the_table_of_results() -> None:
    assert results_markdown() in DOCS.read_text("utf-8")


def archive(*members: tuple[str, bytes | str]) -> tarfile.TarFile:
    """Return an archive as engines write it; a text is a link's target, and `=` before it makes it a hard link."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type = tarfile.LNKTYPE if content.startswith("=") else tarfile.SYMTYPE
                member.linkname = content.lstrip("=")
                made.addfile(member)
            else:
                member.size = len(content)
                made.addfile(member, io.BytesIO(content))
    return tarfile.open(fileobj=io.BytesIO(file.getvalue()), mode="r|")


def test_an_archive_is_never_unpacked_under_its_own_names(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    members = archive(
        ("../../escaped", b"1"),
        ("a/real", b"2"),
        ("lib", "../../../a"),
        ("hard", "=a/real"),
        ("etc", "/"),
        ("loop", "loop"),
    )
    tree = read_archive(members, lambda path: True, kept, 100)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["0", "1"]
    assert read_start(tree, "/escaped", 9) == b"1"
    assert read_start(tree, "/lib/real", 9) == read_start(tree, "/hard", 9) == b"2"
    assert read_start(tree, "/etc/etc/etc/a/real", 9) == b"2"
    assert chain(tree, "/loop") == chain(tree, "/loop/x") == chain(tree, "/a") == ()


def test_only_so_many_bytes_of_an_archive_are_kept(tmp_path: Path) -> None:
    tree = read_archive(archive(("a", b"12345"), ("b", b"123456"), ("c", b"12345")), lambda path: True, tmp_path, 10)
    assert [read_start(tree, path, 9) for path in ("/a", "/b", "/c")] == [b"12345", b"", b"12345"]
    assert chain(tree, "/b") == ("/b",)


@pytest.mark.parametrize("length", range(0, len(elf()), 7))
def test_a_torn_library_raises_nothing(length: int) -> None:
    found = read_elf(io.BytesIO(elf()[:length]))
    assert found.fault in ("file too short", "the file is torn", "")
    assert read_elf(io.BytesIO(elf(runpath="/x:$ORIGIN"))).runpath == "/x:$ORIGIN"


@pytest.mark.parametrize("offset", range(16, 64 + 112, 4))
def test_hostile_numbers_in_a_library_raise_nothing(offset: int) -> None:
    for value in (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f"):
        content = bytearray(elf())
        content[offset : offset + 4] = value
        assert read_elf(io.BytesIO(content)).soname in ("libcuda.so.1", "")


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        ("fpu sse2", ()),
        ("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3", ("x86-64-v2",)),
        ("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx512f avx512bw avx512cd avx512dq avx512vl", ("x86-64-v2",)),
    ],
)
def test_processor_levels(flags: str, levels: tuple[str, ...]) -> None:
    assert processor_levels(f"processor : 0\nflags\t\t: {flags}\n") == levels


def test_a_caches_variants_are_named() -> None:
    (plain,) = parse_cache(merge(b"", [("libcuda.so.1", "/opt/libcuda.so.1", FLAGS["x86_64"])]))
    assert plain.variant == ""
