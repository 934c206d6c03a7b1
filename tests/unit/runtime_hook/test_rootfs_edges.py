"""The edges of the walk through a container's root: limits, what is made and with which mode, answers to oddities."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuprov.runtime_hook.rootfs import Root

pytestmark = pytest.mark.root
LINKS = 40  # as many as the kernel follows (path_resolution(7))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "usr/lib").mkdir(parents=True)
    (folder / "etc").mkdir()
    return folder


@pytest.fixture
def root(tree: Path) -> Iterator[Root]:
    """The tree as the hook opens it; whatever a test does with it, no descriptor stays open."""
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 (no Path holds a descriptor open)
    made = Root(str(tree))
    yield made
    made.close()
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# -- where paths lead ------------------------------------------------------------------------------------------------


def test_as_many_links_are_followed_as_the_kernel_follows(tree: Path, root: Root) -> None:
    (tree / "f0").write_text("content")
    (tree / "d0").mkdir()
    for number in range(1, LINKS + 2):
        (tree / f"d{number}").symlink_to(f"d{number - 1}")
        (tree / f"f{number}").symlink_to(f"f{number - 1}")
    assert root.real_path(f"/d{LINKS}") == "/d0"
    with pytest.raises(OSError, match="too many links") as caught:
        root.open_directory(f"/d{LINKS + 1}")
    assert caught.value.errno == 40
    assert caught.value.filename == f"/d{LINKS + 1}"
    assert root.read_file(f"/f{LINKS - 1}", 100) == b"content"
    assert root.read_file(f"/f{LINKS + 1}", 100) is None


def test_a_path_of_very_many_components_ends(tree: Path, root: Root) -> None:
    assert root.real_path("/." * 400 + "/usr/lib") == "/usr/lib"
    with pytest.raises(OSError, match="too many links"):
        root.open_directory("/." * 1100 + "/usr/lib")


@pytest.mark.parametrize(
    ("path", "real"),
    [
        ("/", "/"),
        ("", "/"),
        ("/..", "/"),
        ("/../../..", "/"),
        ("/usr/../..", "/"),
        ("/usr/lib/..", "/usr"),
        ("/usr/lib/../lib/./", "/usr/lib"),
        ("//usr//lib//", "/usr/lib"),
        ("usr/lib", "/usr/lib"),
        ("/usr/lib/../../etc", "/etc"),
    ],
)
def test_dots_and_slashes(tree: Path, root: Root, path: str, real: str) -> None:
    assert root.real_path(path) == real
    assert os.path.samestat(os.fstat(root.open_directory(path)), (tree / real.lstrip("/")).stat())


def test_the_descriptor_of_a_folder_is_kept_until_the_root_is_closed(tree: Path, root: Root) -> None:
    first = root.open_directory("/usr/lib")
    assert root.open_directory("/usr/lib") == first
    os.fstat(first)
    assert root.open_directory("/usr") != first


@pytest.mark.parametrize("name", ["file", "fifo", "none", "a\0b"])
def test_what_is_no_folder_is_said_to_be_none(tree: Path, root: Root, name: str) -> None:
    (tree / "file").write_text("x")
    os.mkfifo(tree / "fifo")
    with pytest.raises((OSError, ValueError), match=r"Invalid argument|Not a directory|No such file|null byte"):
        root.open_directory(f"/{name}/below")
    assert not root.is_directory(f"/{name}")


# -- what is there ---------------------------------------------------------------------------------------------------


def test_anything_exists_that_has_a_name(tree: Path, root: Root) -> None:
    (tree / "usr/lib/nowhere").symlink_to("none")
    (tree / "usr/lib/file").write_text("")
    (tree / "lib").symlink_to("usr/lib")
    for path in ("/usr", "/usr/lib/nowhere", "/usr/lib/file", "/lib/file", "/lib/nowhere"):
        assert root.exists(path), path
    for path in ("/none", "/usr/lib/none", "/none/file", "/usr/lib/file/below", "/a\0b", "/usr/a\0b"):
        assert not root.exists(path), path


def test_names_are_sorted_and_given_only_if_they_are_few(tree: Path, root: Root) -> None:
    for name in ("c", "a", "b"):
        (tree / "etc" / name).write_text("")
    (tree / "conf").symlink_to("/etc")
    assert root.names("/etc", 4) == root.names("/etc", 3) == root.names("/conf", 3) == ["a", "b", "c"]
    assert root.names("/etc", 2) == []
    assert root.names("/usr/lib", 0) == []
    assert root.names("/none", 9) == root.names("/etc/a", 9) == root.names("/a\0b", 9) == []


@pytest.mark.parametrize("size", [1, 100])
def test_a_file_is_read_whole_or_not_at_all(tree: Path, root: Root, size: int) -> None:
    (tree / "etc/file").write_bytes(b"x" * size)
    assert root.read_file("/etc/file", size) == b"x" * size
    assert root.read_file("/etc/file", size + 1) == b"x" * size
    assert root.read_file("/etc/file", size - 1) is None


def test_a_file_that_comes_in_pieces_is_read_whole(tree: Path, root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(1000)
    (tree / "etc/file").write_bytes(content)
    read, inode = os.read, (tree / "etc/file").stat().st_ino

    def read_little(handle: int, size: int) -> bytes:
        return read(handle, min(size, 7) if os.fstat(handle).st_ino == inode else size)

    monkeypatch.setattr("posix.read", read_little)
    assert root.read_file("/etc/file", 1000) == content
    assert root.read_file("/etc/file", 999) is None


def test_growing_file_is_not_read_forever(tree: Path, root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "etc/file").write_bytes(b"x")
    reads: list[int] = []

    def read_more(handle: int, size: int) -> bytes:
        reads.append(size)
        assert len(reads) < 20
        return b"x" * min(size, 7)

    assert root.directory("/etc", False) == "/etc" and root.mount
    monkeypatch.setattr("posix.read", read_more)
    # How large it is, is read before: by another name than mount_id's, whose file does not grow.
    monkeypatch.setattr("gpuprov.runtime_hook.rootfs.mount_id", lambda handle: root.mount)
    assert root.read_file("/etc/file", 50) is None
    assert reads == [51, 44, 37, 30, 23, 16, 9, 2]


@pytest.mark.parametrize(
    ("path", "target", "found"),
    [
        ("/etc/link", "file", b"of etc"),
        ("/etc/link", "/etc/file", b"of etc"),
        ("/etc/link", "../file", b"of the root"),
        ("/etc/link", "/file", b"of the root"),
        ("/etc/link", "../../../file", b"of the root"),
        ("/etc/link", "../usr/lib/file", b"of lib"),
        ("/etc/link", "none", None),
        ("/etc/link", "/usr/lib", None),
        ("/etc/link", "../etc/link", None),
    ],
)
def test_file_link_resolves_inside_root(tree: Path, root: Root, path: str, target: str, found: bytes | None) -> None:
    for name, content in (("file", b"of the root"), ("etc/file", b"of etc"), ("usr/lib/file", b"of lib")):
        (tree / name).write_bytes(content)
    (tree / path.lstrip("/")).symlink_to(target)
    (tree / "conf").symlink_to("/etc")
    assert root.read_file(path, 100) == found
    # Reached through another link, it is followed from where it really lies.
    assert root.read_file(path.replace("/etc", "/conf"), 100) == found


@pytest.mark.parametrize("path", ["/none", "/none/file", "/etc", "/a\0b", "/etc/a\0b"])
def test_what_can_not_be_read_is_none(root: Root, path: str) -> None:
    assert root.read_file(path, 100) is None


# -- what is made ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mask() -> Iterator[None]:
    """The mask under which engines start us decides nothing about files; it does about folders."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755, 0o666])
@pytest.mark.usefixtures("mask")
def test_files_have_the_mode_that_is_asked_for_and_folders_may_be_entered(tree: Path, root: Root, mode: int) -> None:
    root.write_file("/opt/a/b/file", b"content", mode)
    assert mode_of(tree / "opt/a/b/file") == mode
    assert {mode_of(tree / path) for path in ("opt", "opt/a", "opt/a/b")} == {0o755}
    assert (tree / "opt/a/b/file").read_bytes() == b"content"
    assert [path.name for path in (tree / "opt/a/b").iterdir()] == ["file"]


def test_a_file_is_written_whole_even_in_pieces(tree: Path, root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(1000)
    write = os.write
    monkeypatch.setattr("posix.write", lambda handle, data: write(handle, data[:7]))
    root.write_file("/etc/file", content, 0o644)
    assert (tree / "etc/file").read_bytes() == content


def test_a_file_takes_the_place_of_a_file_a_link_or_a_pipe(tree: Path, root: Root) -> None:
    (tree / "etc/file").write_text("before")
    (tree / "etc/link").symlink_to("file")
    os.mkfifo(tree / "etc/fifo")
    for name in ("link", "fifo"):
        root.write_file(f"/etc/{name}", b"ours", 0o644)
        assert stat.S_ISREG((tree / "etc" / name).lstat().st_mode)
        assert (tree / "etc" / name).read_bytes() == b"ours"
    assert (tree / "etc/file").read_text() == "before"
    held = (tree / "etc/file").open()
    with held:
        root.write_file("/etc/file", b"ours", 0o644)
        assert held.read() == "before"


@pytest.mark.parametrize("make", [lambda root, path: root.write_file(path, b"ours", 0o644),
                                  lambda root, path: root.make_link(path, "a.1")], ids=["file", "link"])  # fmt: skip
def test_a_folder_in_the_way_is_an_error_and_stays(tree: Path, root: Root, make: Callable[[Root, str], object]) -> None:
    (tree / "usr/lib/inner").mkdir()
    with pytest.raises(IsADirectoryError):
        make(root, "/usr/lib")
    assert (tree / "usr/lib/inner").is_dir()
    assert [path.name for path in (tree / "usr").iterdir()] == ["lib"]


def test_what_is_roots_already_stays_roots_where_it_only_leads_there(tree: Path) -> None:
    """Folders that the image has keep their owner; only what is made gets another."""
    root = Root(str(tree), owner=(100000, 100001))
    root.make_link("/usr/lib/link", "target")
    root.make_link("/usr/lib/link", "another")
    root.write_file("/etc/new/file", b"", 0o600)
    root.close()
    owners = {
        name: ((tree / name).lstat().st_uid, (tree / name).lstat().st_gid)
        for name in ("usr", "usr/lib", "etc", "usr/lib/link", "etc/new", "etc/new/file")
    }
    assert owners == {
        **dict.fromkeys(("usr", "usr/lib", "etc"), (0, 0)),
        **dict.fromkeys(("usr/lib/link", "etc/new", "etc/new/file"), (100000, 100001)),
    }


@pytest.mark.parametrize("owner", [(0, 5), (5, 0), (1, 0), (0, 1)])
def test_a_user_or_a_group_alone_is_an_owner_too(tree: Path, owner: tuple[int, int]) -> None:
    root = Root(str(tree), owner)
    root.make_link("/opt/link", "target")
    root.close()
    for name in ("opt", "opt/link"):
        assert ((tree / name).lstat().st_uid, (tree / name).lstat().st_gid) == owner


def test_a_folder_is_made_only_where_something_is_put_into_it(tree: Path, root: Root) -> None:
    with pytest.raises(FileNotFoundError):
        root.open_directory("/new")
    assert not (tree / "new").exists()
    os.fstat(root.open_directory("/new/er", make=True))
    assert (tree / "new/er").is_dir()
    os.fstat(root.open_writable("/another/new"))
    assert (tree / "another/new").is_dir()
    (tree / "dangling").symlink_to("/made/later")
    root.write_file("/dangling/file", b"", 0o644)
    assert (tree / "made/later/file").exists()


def test_folder_made_by_another_start_is_used(tree: Path, root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.mkdir

    def made_by_another(name: str, mode: int, dir_fd: int) -> None:
        make(name, mode, dir_fd=dir_fd)
        raise FileExistsError(17, "File exists", name)

    monkeypatch.setattr("posix.mkdir", made_by_another)
    root.write_file("/opt/file", b"ours", 0o644)
    assert (tree / "opt/file").read_bytes() == b"ours"


def test_swapped_folder_changes_no_owner_elsewhere(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    make = os.mkdir

    def swap(name: str, mode: int, dir_fd: int) -> None:
        make(name, mode, dir_fd=dir_fd)
        os.rmdir(name, dir_fd=dir_fd)
        os.symlink(outside, name, dir_fd=dir_fd)

    monkeypatch.setattr("posix.mkdir", swap)
    root = Root(str(tree), owner=(100000, 100001))
    with pytest.raises(OSError, match="too many links"):
        root.write_file("/opt/file", b"ours", 0o644)
    root.close()
    assert (outside.stat().st_uid, outside.stat().st_gid, list(outside.iterdir())) == (0, 0, [])


@pytest.mark.usefixtures("mask")
def test_nobody_else_may_open_a_file_before_it_is_whole(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, write = [], os.write

    def noted(handle: int, data: bytes) -> int:
        modes.append(stat.S_IMODE(os.fstat(handle).st_mode))
        return write(handle, data)

    monkeypatch.setattr("posix.write", noted)
    root.write_file("/etc/file", b"ours", 0o644)
    assert modes == [0o600]


def test_only_what_is_named_is_taken_away(tree: Path, root: Root) -> None:
    (tree / "etc/file").write_text("x")
    (tree / "etc/link").symlink_to("file")
    (tree / "etc/dangling").symlink_to("/none")
    root.remove("/etc/link")
    root.remove("/etc/dangling")
    root.remove("/etc/none")
    root.remove("/none/file")
    assert not (tree / "none").exists()
    assert [path.name for path in (tree / "etc").iterdir()] == ["file"]
    with pytest.raises(OSError, match="directory"):
        root.remove("/etc")
    assert (tree / "etc").is_dir()


@pytest.mark.parametrize(("name", "error"), [("file", NotADirectoryError), ("none", FileNotFoundError)])
def test_the_root_itself_must_be_a_folder(tmp_path: Path, name: str, error: type[OSError]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(error):
        Root(str(tmp_path / name))


@pytest.mark.parametrize("ways", [1, 3])
def test_no_descriptor_is_passed_on_to_programs(tree: Path, root: Root, ways: int) -> None:
    (tree / "lib").symlink_to("/usr/lib")
    for path in ("/usr/lib", "/lib/..", "/new")[:ways]:
        assert not os.get_inheritable(root.open_directory(path, make=True))
