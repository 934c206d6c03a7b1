"""The walk through a hostile root file system: whatever its links say, nothing outside is opened or made."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpuprov.runtime_hook.rootfs import Root


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text("secret")
    return folder


@pytest.fixture
def tree(tmp_path: Path, outside: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "usr/lib").mkdir(parents=True)
    (folder / "etc").mkdir()
    return folder


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("link", "target", "path", "ends"),
    [
        ("lib", "usr/lib", "/lib", "/usr/lib"),
        ("lib", "/usr/lib", "/lib", "/usr/lib"),
        ("lib", "../../../../usr/lib", "/lib", "/usr/lib"),
        ("usr/share", "../usr/./lib/", "/usr/share", "/usr/lib"),
        ("usr/share", "lib/../../etc", "/usr/share", "/etc"),
        ("deep", "lib2", "/deep", "/usr/lib"),
        ("up", "..", "/up/usr/lib", "/usr/lib"),
        ("root", "/", "/root/root/root/usr/lib", "/usr/lib"),
    ],
)
def test_links_are_resolved_inside_the_root(tree: Path, link: str, target: str, path: str, ends: str) -> None:
    (tree / "lib2").symlink_to("/usr/lib")
    (tree / link).symlink_to(target)
    root = Root(str(tree))
    assert root.real_path(path) == ends
    assert os.path.samestat(os.fstat(root.open_directory(path)), (tree / ends.lstrip("/")).stat())
    root.close()


@pytest.mark.root
@pytest.mark.parametrize(
    "target", ["/outside", "../outside", "{outside}", "/proc/self/root{outside}", "/proc/self/cwd"]
)
def test_a_link_that_leads_out_ends_inside(tree: Path, outside: Path, target: str) -> None:
    (tree / "usr/lib/x").symlink_to(target.format(outside=outside))
    before = listing(outside)
    root = Root(str(tree))
    root.write_file("/usr/lib/x/file", b"written", 0o644)
    root.make_link("/usr/lib/x/link", "file")
    assert root.read_file("/usr/lib/x/file", 100) == b"written"
    root.close()
    assert listing(outside) == before
    assert not Path("file").exists()


@pytest.mark.root
@pytest.mark.parametrize("target", ["{outside}/secret", "../../outside/secret", "/proc/self/root{outside}/secret"])
def test_a_file_behind_a_link_that_leads_out_is_not_read_and_is_replaced(
    tree: Path, outside: Path, target: str
) -> None:
    (tree / "etc/ld.so.cache").symlink_to(target.format(outside=outside))
    root = Root(str(tree))
    assert root.read_file("/etc/ld.so.cache", 100) is None
    root.write_file("/etc/ld.so.cache", b"ours", 0o644)
    assert root.read_file("/etc/ld.so.cache", 100) == b"ours"
    root.close()
    assert (outside / "secret").read_text() == "secret"


@pytest.mark.root
def test_the_temporary_name_taken_by_a_link_or_a_file_is_taken_back(tree: Path, outside: Path) -> None:
    for content in (None, "file"):
        if content is None:
            (tree / "etc/.gpuprov~").symlink_to(outside / "secret")
        else:
            (tree / "etc/.gpuprov~").write_text(content)
        root = Root(str(tree))
        root.write_file("/etc/file", b"ours", 0o600)
        root.close()
        assert listing(tree / "etc") == ["file"]
        assert stat.S_IMODE((tree / "etc/file").stat().st_mode) == 0o600
    assert (outside / "secret").read_text() == "secret"


@pytest.mark.parametrize("target", ["loop", "a/b", "/loop/x"])
def test_links_in_a_circle_end(tree: Path, target: str) -> None:
    (tree / "loop").symlink_to(target)
    (tree / "a").symlink_to("loop")
    root = Root(str(tree))
    assert not root.is_directory("/loop")
    with pytest.raises(OSError, match=r"many links|No such file"):
        root.open_directory("/loop")
    root.close()


def test_a_path_that_doubles_with_each_link_ends_too(tree: Path) -> None:
    for number in range(30):
        (tree / f"l{number}").symlink_to(f"l{number + 1}/../l{number + 1}")
    (tree / "l30").mkdir()
    root = Root(str(tree))
    with pytest.raises(OSError, match="too many links"):
        root.open_directory("/l0")
    root.close()


@pytest.mark.root
@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "socket"])
def test_what_is_no_regular_file_is_not_even_opened(tree: Path, kind: str) -> None:
    """A pipe would hang the start, a device may act on being opened."""
    place = tree / "etc/ld.so.cache"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "device":
        os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    elif kind == "directory":
        place.mkdir()
    else:
        os.mknod(place, stat.S_IFSOCK | 0o666)
    root = Root(str(tree))
    assert root.read_file("/etc/ld.so.cache", 100) is None
    root.close()


def test_a_file_larger_than_asked_for_is_not_read(tree: Path) -> None:
    (tree / "etc/file").write_bytes(b"x" * 101)
    root = Root(str(tree))
    assert root.read_file("/etc/file", 100) is None
    assert root.read_file("/etc/file", 101) == b"x" * 101
    root.close()


def test_a_link_that_is_right_stays_and_a_wrong_one_is_replaced(tree: Path) -> None:
    root = Root(str(tree))
    root.make_link("/usr/lib/a", "a.1")
    made = os.lstat(tree / "usr/lib/a")
    root.make_link("/usr/lib/a", "a.1")
    assert os.lstat(tree / "usr/lib/a").st_ino == made.st_ino
    root.make_link("/usr/lib/a", "a.2")
    assert str((tree / "usr/lib/a").readlink()) == "a.2"
    (tree / "usr/lib/b").write_text("a file of the image")
    root.make_link("/usr/lib/b", "b.1")
    assert str((tree / "usr/lib/b").readlink()) == "b.1"
    root.close()
    assert listing(tree / "usr/lib") == ["a", "b"]


def test_a_folder_in_a_links_place_is_not_taken_away(tree: Path) -> None:
    (tree / "usr/lib/a/inner").mkdir(parents=True)
    root = Root(str(tree))
    with pytest.raises(OSError, match="directory"):
        root.make_link("/usr/lib/a", "a.1")
    root.close()
    assert (tree / "usr/lib/a/inner").is_dir()


@pytest.mark.root
def test_what_is_made_belongs_to_the_containers_root_user(tree: Path) -> None:
    root = Root(str(tree), owner=(100000, 100001))
    root.make_link("/opt/new/link", "file")
    root.write_file("/opt/new/file", b"", 0o644)
    root.close()
    for name in ("opt", "opt/new", "opt/new/link", "opt/new/file"):
        found = os.lstat(tree / name)
        assert (found.st_uid, found.st_gid) == (100000, 100001)


@pytest.mark.root
def test_no_descriptor_is_left_open(tree: Path) -> None:
    before = listing(Path("/proc/self/fd"))
    (tree / "lib").symlink_to("/usr/lib")
    root = Root(str(tree))
    root.make_link("/lib/x", "y")
    root.write_file("/usr/../etc/file", b"", 0o644)
    root.read_file("/lib/none", 1)
    root.names("/lib", 10)
    root.is_directory("/none/none")
    root.remove("/etc/file")
    root.remove("/etc/file")
    root.close()
    assert listing(Path("/proc/self/fd")) == before


def test_a_root_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Root(str(tmp_path / "none"))
