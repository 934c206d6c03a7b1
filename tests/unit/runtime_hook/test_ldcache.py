"""The loader's cache as we write it, held against glibc's own ldconfig and loader."""

import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprov.runtime_hook import ldcache
from gpuprov.runtime_hook.ldcache import FLAGS, FLAGS_32_BIT, merge
from tests.examples import examples
from tests.triplet import LIBRARIES as FOLDER
from tests.triplet import LOADER, MACHINE, TRIPLET

FLAG = FLAGS[MACHINE]
DRIVER = [
    ("libcuda.so.1", f"{FOLDER}/libcuda.so.1", FLAG),
    ("libcuda.so", f"{FOLDER}/libcuda.so", FLAG),
    ("libnvidia-ml.so.1", f"{FOLDER}/libnvidia-ml.so.1", FLAG),
    ("libnvidia-eglcore.so.550.163.01", f"{FOLDER}/libnvidia-eglcore.so.550.163.01", FLAG),
    ("libcuda.so.1", "/usr/lib/i386-linux-gnu/libcuda.so.1", FLAGS_32_BIT),
]


def printed(cache: Path) -> list[tuple[str, str]]:
    """Return (name, path) of each entry as ldconfig prints it, in the cache's order."""
    done = subprocess.run(("/sbin/ldconfig", "-p", "-C", str(cache)), capture_output=True, text=True, check=True)
    rows = [line.strip().split(" => ") for line in done.stdout.splitlines() if " => " in line]
    return [(name.split()[0], path) for name, path in rows]


def entries(cache: bytes, folder: Path) -> list[tuple[str, str]]:
    (folder / "printed").write_bytes(cache)
    return printed(folder / "printed")


def ldconfig(root: Path, *names: str) -> bytes:
    """Return what glibc's ldconfig writes for a tree with copies of a library under these names."""
    library = next(Path(f"/lib/{TRIPLET}").glob("libz.so.1.*"))
    for name in names:
        place = root / name.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, place)
    (root / "etc").mkdir(exist_ok=True)
    subprocess.run(("/sbin/ldconfig", "-r", str(root)), check=True, capture_output=True)
    return (root / "etc/ld.so.cache").read_bytes()


def test_a_cache_made_from_nothing_is_one_to_ldconfig(tmp_path: Path) -> None:
    found = entries(merge(b"", DRIVER), tmp_path)
    assert sorted(found) == sorted((name, path) for name, path, _ in DRIVER)


def test_what_the_image_had_is_still_there_and_the_order_is_glibcs(tmp_path: Path) -> None:
    names = [f"/usr/lib/{TRIPLET}/lib{name}.so.1" for name in ("a", "cuda2", "cudart", "cuda-10", "z", "nvidia")]
    old = ldconfig(tmp_path / "root", *names, f"/usr/lib/{TRIPLET}/libz.so.1.2")
    before = entries(old, tmp_path)
    after = entries(merge(old, DRIVER), tmp_path)
    assert [row for row in after if "libcuda.so" not in row[0] and "libnvidia-" not in row[0]] == before
    fresh = entries(merge(b"", [(name, path, FLAG) for name, path in after]), tmp_path)
    assert [name for name, _ in fresh] == list(dict.fromkeys(name for name, _ in after))


@pytest.mark.parametrize(
    ("higher", "lower"),
    [
        ("libcuda.so.10", "libcuda.so.9"), ("libcuda.so.1", "libcuda.so"), ("lib10.so", "liba.so"),
        ("libb.so", "liba.so"), ("libcuda2.so", "libcuda.so"), ("liba.so.1.10", "liba.so.1.9.9"),
    ],
)  # fmt: skip
def test_names_are_ordered_as_the_loader_searches_them(tmp_path: Path, higher: str, lower: str) -> None:
    cache = merge(b"", [(name, f"/{name}", FLAG) for name in (lower, higher)])
    assert [name for name, _ in entries(cache, tmp_path)] == [higher, lower]


def test_a_second_start_leaves_the_same_bytes() -> None:
    once = merge(b"", DRIVER)
    assert merge(once, DRIVER) == once
    assert merge(once, list(reversed(DRIVER))) == once


def test_another_drivers_libraries_are_replaced_and_the_file_does_not_grow_without_end(tmp_path: Path) -> None:
    newer = [
        (name.replace("550.163.01", "580.65.06"), path.replace("550.163.01", "580.65.06"), f)
        for name, path, f in DRIVER
    ]
    sizes = set()
    cache = merge(ldconfig(tmp_path / "root", f"{FOLDER}/libz.so.1"), DRIVER)
    for _ in range(6):
        cache = merge(cache, newer)
        cache = merge(cache, DRIVER)
        sizes.add(len(cache))
    assert len(sizes) == 1


def test_an_images_own_entry_of_that_name_gives_way_only_for_the_same_kind_of_library(tmp_path: Path) -> None:
    old = merge(b"", [("libcuda.so.1", "/opt/stubs/libcuda.so.1", FLAG), ("libcuda.so.1", "/opt/32", FLAGS_32_BIT)])
    found = entries(merge(old, [("libcuda.so.1", f"{FOLDER}/libcuda.so.1", FLAG)]), tmp_path)
    assert sorted(path for _, path in found) == ["/opt/32", f"{FOLDER}/libcuda.so.1"]


def test_optimised_variants_of_the_image_survive(tmp_path: Path) -> None:
    """The loader of glibc 2.33 and later takes these from the extensions behind the strings, whose offsets move."""
    root = tmp_path / "root"
    old = ldconfig(root, f"{FOLDER}/glibc-hwcaps/x86-64-v2/libz.so.1", f"{FOLDER}/libz.so.1")
    assert b"x86-64-v2" in old
    (root / "etc/ld.so.cache").write_bytes(merge(old, DRIVER))
    done = subprocess.run(
        ("/sbin/ldconfig", "-p", "-C", str(root / "etc/ld.so.cache")), capture_output=True, text=True, check=True
    )
    rows = [line for line in done.stdout.splitlines() if "libz" in line]
    assert len(rows) == 2
    assert any('hwcap: "x86-64-v2"' in row for row in rows)


@pytest.mark.root
def test_the_loader_itself_finds_a_library_by_the_cache_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "opt/driver").mkdir(parents=True)
    (root / "etc").mkdir()
    program = root / "opt/program"
    source = tmp_path / "program.c"
    source.write_text('#include <dlfcn.h>\nint main(void) { return dlopen("libz.so.1", RTLD_NOW) ? 0 : 3; }\n')
    subprocess.run(("gcc", str(source), "-o", str(program), "-ldl"), check=True)
    shutil.copy(next(Path(f"/lib/{TRIPLET}").glob("libz.so.1.*")), root / "opt/driver/libz.so.1")
    for path in (LOADER, f"/lib/{TRIPLET}/libc.so.6"):
        (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path.lstrip("/"))
    assert subprocess.run(("chroot", str(root), "/opt/program"), check=False).returncode == 3
    (root / "etc/ld.so.cache").write_bytes(merge(b"", [("libz.so.1", "/opt/driver/libz.so.1", FLAG)]))
    assert subprocess.run(("chroot", str(root), "/opt/program"), check=False).returncode == 0


@pytest.mark.parametrize("spoil", ["", "glibc-ld.so.cache1.1", "torn", "offsets", "count"])
def test_a_cache_that_cannot_be_read_counts_as_none(spoil: str, tmp_path: Path) -> None:
    good = merge(b"", [("liba.so.1", "/usr/lib/liba.so.1", FLAG)])
    bad = {
        "torn": good[:60],
        "offsets": good[:52] + b"\xff\xff\xff\x7f" + good[56:],
        "count": good[:20] + b"\xff\xff\xff\xff" + good[24:],
    }.get(spoil, spoil.encode())
    assert entries(merge(bad, DRIVER[:1]), tmp_path) == [("libcuda.so.1", f"{FOLDER}/libcuda.so.1")]


def with_entries(count: int, text: bytes, extensions: bytes = b"") -> bytes:
    """A cache all of whose entries share one text."""
    place = 48 + 24 * count
    header = struct.pack("=20sIIB3xI12x", ldcache.MAGIC, count, len(text), 2, place + len(text) if extensions else 0)
    return header + struct.pack("=iIIIQ", FLAG, place, place, 0, 0) * count + text + extensions


def test_texts_that_no_path_can_be_make_no_start_take_the_hosts_memory() -> None:
    """Of 0.8 MB, in 8000 entries: comparing them would take minutes and gigabytes."""
    hostile = with_entries(8000, b"a1" * 400_000 + b"\0")
    assert len(hostile) < ldcache.LARGEST
    assert merge(hostile, DRIVER) == merge(b"", DRIVER)
    longest = with_entries(1, b"a" * 255 + b"\0")
    assert merge(longest, DRIVER) != merge(b"", DRIVER)


def test_extensions_larger_than_the_loaders_own_are_left_out() -> None:
    """Each section of a hostile cache might have all of it moved once more."""
    text = b"libz.so.1\0"
    place = 48 + 24 + len(text)
    sizes = {}
    for size in (8, 800_000):
        section = struct.pack("=IIIIII", 0xEAA42174, 1, 1, 0, place + 24, size)
        merged = merge(with_entries(1, text, section + struct.pack("=I", place) * 200_000), DRIVER)
        sizes[size] = struct.unpack_from("=I", merged, 32)[0]
    assert sizes[8] and not sizes[800_000]


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_no_bytes_make_it_fail(data: st.DataObject) -> None:
    good = bytearray(merge(b"", [(f"lib{n}.so.{n}", f"/opt/{n}", FLAG) for n in range(8)]))
    for _ in range(data.draw(st.integers(1, 12))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    merged = merge(bytes(good[:cut]), DRIVER)
    assert merged.startswith(ldcache.MAGIC)
    assert len(merged) < 4096


def test_a_big_images_cache_is_merged_at_once(tmp_path: Path) -> None:
    names = [(f"lib{random.Random(n).random()}.so.{n}", f"/opt/{n}", FLAG) for n in range(3000)]
    old = merge(b"", names)
    assert len(entries(merge(old, DRIVER), tmp_path)) == 3000 + len(DRIVER)


# -- bounds: counted, because a time says nothing on a busy machine ---------------------------------------------------


def hostile(names: list[bytes], strings: bytes = b"") -> bytes:
    """Return a cache whose entries have these names, each the start of a path too."""
    texts = b"\0".join([*dict.fromkeys(names), b""]) + strings
    begin = 48 + 24 * len(names)
    table = b"".join(struct.pack("=iIIIQ", FLAG, *(begin + texts.index(name + b"\0"),) * 2, 0, 0) for name in names)
    return struct.pack("=20sIIB3xI12x", ldcache.MAGIC, len(names), len(texts), 2, 0) + table + texts


def calls(old: bytes, added: list[tuple[str, str, int]]) -> int:
    """Return how many functions, Python's and C's, a merge calls."""
    counted = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        merge(old, added)
    finally:
        sys.setprofile(None)
    return counted


WANTED = [(f"libnvidia-{number}.so.1", f"{FOLDER}/libnvidia-{number}.so.1", FLAG) for number in range(60)]


@pytest.mark.parametrize(
    "old",
    [
        pytest.param(hostile([b"libnvidia-7.so.1"] * 40_000), id="one wanted name 40000 times"),
        pytest.param(hostile([b"libnvidia-9.so." + b"1a" * 2000] * 30_000), id="names of many numbers"),
        pytest.param(hostile([b"libnvidia-9." + b"x" * 4000] * 10_000), id="names as long as paths"),
        pytest.param(hostile([b"a"] * 40_000), id="many entries"),
        pytest.param(hostile([b"liba.so"], b"\0".join([b"x" * 100] * 9000)), id="many strings"),
    ],
)
def test_no_cache_of_an_image_costs_many_times_the_work_of_an_ordinary_one(tmp_path: Path, old: bytes) -> None:
    names = [f"{FOLDER}/lib{one}{two}.so.{one}" for one in "abcdefghij" for two in "abcdefghij"]
    ordinary = calls(ldconfig(tmp_path, *names), WANTED)
    assert calls(old, WANTED) < 5 * ordinary


def test_a_cache_of_more_than_the_largest_size_is_none() -> None:
    large = hostile([b"liba.so"], b"x" * ldcache.LARGEST)
    assert merge(large, WANTED) == merge(b"", WANTED)


def test_of_many_strings_the_last_alone_are_searched_for_earlier_ones() -> None:
    """Each of them is looked for: all of a large cache would be read a hundred times."""
    own = b"\0".join(path.encode() for _, path, _ in WANTED)
    padding = b"\0" + b"x" * (32 << 10) + b"\0"
    found = merge(hostile([b"liba.so"], own + padding), WANTED)
    assert all(found.count(path.encode() + b"\0") == 2 for _, path, _ in WANTED)


def test_sections_of_many_variants_are_none() -> None:
    """glibc's own have a handful; each offset in them is moved by itself."""
    cache = bytearray(hostile([b"liba.so"], b"\0" * 5000))
    place = len(cache) - 4400 & ~3
    struct.pack_into("=I", cache, 32, place)
    struct.pack_into("=II", cache, place, ldcache.EXTENSION_MAGIC, 16)
    for section in range(16):
        struct.pack_into("=IIII", cache, place + 8 + 16 * section, 1, 0, place + 300, 4096)
    assert struct.unpack_from("=I", merge(bytes(cache), WANTED), 32) == (0,)
