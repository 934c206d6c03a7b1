"""Files of hostile images: archives that are unpacked, loaders and caches that are read, within bounds."""

import contextlib
import io
import resource
import struct
import tarfile
from pathlib import Path

import pytest

from gpuprov.cdi.files import parse_cache
from gpuprov.checks.cuda import files
from gpuprov.checks.cuda.files import chain, read, unpack, unpacked
from gpuprov.checks.cuda.search import find_loader
from tests.unit.checks.test_cuda_libraries import LOADER, Image, elf


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


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_archive_is_never_unpacked_out_of_its_folder(tmp_path: Path) -> None:
    outside, kept = tmp_path / "outside", tmp_path / "kept"
    outside.mkdir()
    kept.mkdir()
    members = archive(
        ("../../libcuda.so.1", b"1"), ("a/libcuda.so.2", b"2"), ("lib", "../../../a"),
        ("hard/libcuda.so.2", "=a/libcuda.so.2"),
        ("etc", "/"), ("loop", "loop"), ("out", str(outside)), ("out/libcuda.so.3", b"3"),
    )  # fmt: skip
    unpack(members, str(kept))
    assert list(outside.iterdir()) == []
    with contextlib.closing(unpacked(str(kept))) as root:
        assert read(root, "/libcuda.so.1", 9) == b"1"
        for path in ("/lib/libcuda.so.2", "/hard/libcuda.so.2", "/etc/etc/etc/a/libcuda.so.2"):
            assert read(root, path, 9) == b"2"
        assert read(root, "/out/libcuda.so.3", 9) == b"3"
        assert chain(root, "/loop") == chain(root, "/loop/x") == chain(root, "/a") == ()


def test_only_what_is_examined_of_an_archive_is_unpacked(tmp_path: Path) -> None:
    unpack(
        archive(("usr/bin/tool", b"1"), ("opt/libcuda.so.1", elf() * 9), ("etc/ld.so.cache", b"2" * 99)), str(tmp_path)
    )
    assert held(tmp_path) == {"opt/libcuda.so.1": elf(), "etc/ld.so.cache": b"2" * 99}


@pytest.mark.parametrize("limit", [{"MOST_ENTRIES": 2}, {"MOST_BYTES": 9}])
def test_oversized_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]) -> None:
    members = ("a/libcuda.so.1", b"12345"), ("b/libcuda.so.1", b"1234"), ("c", "b")
    unpack(archive(*members[:2]), str(tmp_path))
    for name, most in limit.items():
        monkeypatch.setattr(files, name, most)
    with pytest.raises(OSError, match="more than 2 links and libraries"):
        unpack(archive(*members), str(tmp_path))


def test_second_names_of_other_files_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conda gives every file one."""
    monkeypatch.setattr(files, "MOST_ENTRIES", 2)
    unpack(
        archive(("a/libcuda.so.1", b"1"), *((f"pkgs/{number}.py", "=site.py") for number in range(9))), str(tmp_path)
    )
    assert held(tmp_path) == {"a/libcuda.so.1": b"1"}


def test_a_hostile_loader_takes_no_time(tmp_path: Path) -> None:
    """Hours, if the folders were looked for from each of its characters."""
    image = Image(tmp_path)
    image.add(LOADER, b"/lib" * 20_000)
    with contextlib.closing(unpacked(str(image.root))) as root:
        assert find_loader(root).folders


def test_a_hostile_cache_takes_no_memory() -> None:
    """All its entries have the same long text."""
    content = bytearray(Path("/etc/ld.so.cache").read_bytes())
    start = content.index(b"glibc-ld.so.cache1.1")
    (count,) = struct.unpack_from("=I", content, start + 20)
    for number in range(count):
        struct.pack_into("=II", content, start + 48 + 24 * number + 4, len(content) - start, len(content) - start)
    assert parse_cache(bytes(content) + b"a" * 4000 + b"\0") == ()
    assert parse_cache(bytes(content) + b"a" * 9_000_000) != ()
    assert {one.path for one in parse_cache(bytes(content) + b"a" * 9_000_000)} == {""}


def test_an_archive_may_have_more_folders_than_a_process_may_open(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
    try:
        unpack(archive(*((f"{number}/libcuda.so.1", b"") for number in range(600))), str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(held(tmp_path)) == 600
