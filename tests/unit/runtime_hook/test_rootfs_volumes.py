"""Nothing is made in a mount that is not the root's own: with real mounts, and with volumes that are still to come."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuprov.runtime_hook import rootfs
from gpuprov.runtime_hook.rootfs import Root, mount_id

pytestmark = pytest.mark.root
ENOENT, EXDEV = 2, 18
ANOTHER = "is on another mount than the container's root file system"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "etc").mkdir(parents=True)
    (folder / "volume").mkdir()
    (folder / "etc/file").write_text("the image's")
    return folder


@pytest.fixture
def host(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / "file").write_text("the host's")
    return folder


@pytest.fixture
def mounted(tree: Path, host: Path) -> Iterator[Root]:
    """The root with a folder of the host's at /volume, and with a file of the host's at /etc/file."""
    places = {host: tree / "volume", host / "file": tree / "etc/file"}
    for source, place in places.items():
        subprocess.run(("mount", "--bind", source, place), check=True)
    root = Root(str(tree))
    yield root
    root.close()
    for place in places.values():
        subprocess.run(("umount", place), check=True)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


MADE: dict[str, Callable[[Root, str], object]] = {
    "a file": lambda root, path: root.write_file(path, b"ours", 0o644),
    "a link": lambda root, path: root.make_link(path, "target"),
    "a folder": lambda root, path: root.open_directory(f"{path}.d", make=True),
    "the folder itself": lambda root, path: root.open_writable(path.rpartition("/")[0]),
    "a removal": lambda root, path: root.remove(path),
}


@pytest.mark.parametrize("what", MADE)
def test_nothing_is_made_on_another_mount_though_its_device_is_the_roots(mounted: Root, host: Path, what: str) -> None:
    assert (host.stat().st_dev, host.stat().st_ino) == (
        os.fstat(mounted.open_directory("/volume")).st_dev, host.stat().st_ino,
    )  # fmt: skip
    for _ in range(2):  # what was refused once is not known as allowed
        with pytest.raises(OSError, match=ANOTHER) as caught:
            MADE[what](mounted, "/volume/file")
        assert caught.value.errno == EXDEV
        assert str(caught.value).startswith(f"[Errno {EXDEV}] /volume ")
    assert contents(host) == {"file": "the host's"}
    assert [path.name for path in host.iterdir()] == ["file"]


def test_a_mount_that_is_allowed_takes_files_and_no_other_does(mounted: Root, host: Path) -> None:
    mounted.allowed_mounts = lambda: {b"mnt_id:\t0", mount_id(mounted.open_directory("/etc"))}
    with pytest.raises(OSError, match=ANOTHER):
        mounted.write_file("/volume/new", b"ours", 0o644)
    mounted.allowed_mounts = lambda: {mount_id(mounted.open_directory("/volume"))}
    mounted.write_file("/volume/new", b"ours", 0o644)
    assert contents(host) == {"file": "the host's", "new": "ours"}


@pytest.mark.parametrize("what", ["a file", "a link"])
def test_mounted_name_is_kept_and_its_volume_named(mounted: Root, tree: Path, host: Path, what: str) -> None:
    """The kernel refuses the rename (EBUSY): the folder around it is the root's."""
    mounted.volume_over = lambda path: f"the volume at {path}"
    with pytest.raises(OSError, match="the volume at /etc/file") as caught:
        if what == "a file":
            mounted.write_file("/etc/file", b"ours", 0o644)
        else:
            mounted.make_link("/etc/file", "target")
    assert (caught.value.errno, caught.value.filename) == (EXDEV, "/etc/file")
    assert contents(host) == {"file": "the host's"}
    assert [path.name for path in (tree / "etc").iterdir()] == ["file"]


def test_files_in_a_volume_are_not_read(mounted: Root) -> None:
    assert mounted.read_file("/volume/file", 100) is None
    assert mounted.read_file("/etc/file", 100) is None


@pytest.fixture
def covered(tree: Path, host: Path) -> Iterator[Root]:
    """The root before its volumes are mounted: the source lies on the very mount that the root is on."""
    root = Root(str(tree))
    root.cover("/volume", str(host))
    root.volume_over = lambda path: f"the volume over {path}"
    yield root
    root.close()


def test_a_folder_of_a_volume_to_come_is_refused_though_its_mount_is_the_roots(covered: Root, host: Path) -> None:
    assert mount_id(covered.open_directory("/volume")) == covered.mount
    with pytest.raises(OSError, match="the volume over /volume") as caught:
        covered.write_file("/volume/new", b"ours", 0o644)
    assert (caught.value.errno, caught.value.filename) == (EXDEV, "/volume")
    assert contents(host) == {"file": "the host's"}


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_file_volume_to_come_is_not_opened_as_folder(covered: Root, host: Path, tmp_path: Path, kind: str) -> None:
    """Opening a pipe would wait for its writer."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("the host's")
    covered.cover("/etc", str(tmp_path / kind))
    with pytest.raises(NotADirectoryError):
        covered.real_path("/etc")


def test_a_name_that_a_volume_will_cover_is_refused_and_its_neighbours_are_not(tree: Path, covered: Root) -> None:
    covered.cover("/etc/file", "")
    covered.write_file("/etc/other", b"ours", 0o644)
    for what in ("a file", "a link", "a removal"):
        with pytest.raises(OSError, match="the volume over /etc/file") as caught:
            MADE[what](covered, "/etc/file")
        assert (caught.value.errno, caught.value.filename) == (EXDEV, "/etc")
    covered.write_file("/etc/file.d", b"ours", 0o644)
    assert contents(tree / "etc") == {"file": "the image's", "other": "ours", "file.d": "ours"}


def test_what_a_volume_to_come_holds_is_not_known(covered: Root) -> None:
    covered.cover("/etc", "")
    with pytest.raises(FileNotFoundError, match="nothing is known") as caught:
        covered.open_writable("/etc")
    assert caught.value.errno == ENOENT


def test_the_root_itself_has_a_name_in_an_error(mounted: Root) -> None:
    assert mounted.volume_over("") == f"/ {ANOTHER}"


def test_each_folder_is_looked_at_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counted(handle: int) -> bytes:
        looked.append(handle)
        return mount_id(handle)

    monkeypatch.setattr(rootfs, "mount_id", counted)
    root = Root(str(tree))
    for number in range(5):
        root.write_file(f"/etc/{number}", b"", 0o644)
        root.make_link(f"/etc/link{number}", "target")
    assert sorted(looked) == sorted([root.open_directory("/"), root.open_directory("/etc")])
    root.close()


def test_a_link_where_nothing_is_takes_no_temporary_name(tree: Path) -> None:
    """And one where something is takes it, and gives it back."""
    left = tree / "etc/.gpuprov~"
    left.write_text("left by a kill")
    root = Root(str(tree))
    root.make_link("/etc/new", "target")
    assert str((tree / "etc/new").readlink()) == "target"
    assert left.read_text() == "left by a kill"
    root.make_link("/etc/file", "target")
    assert str((tree / "etc/file").readlink()) == "target"
    assert not left.exists()
    before = (tree / "etc/file").lstat().st_ino
    root.make_link("/etc/file", "target")
    assert (tree / "etc/file").lstat().st_ino == before
    assert root.has_link("/etc/file", "target")
    assert not root.has_link("/etc/file", "another")
    root.make_link("/etc/file", "another")
    assert str((tree / "etc/file").readlink()) == "another"
    assert not root.has_link("/etc/none", "target") and not root.has_link("/none/file", "target")
    root.close()
