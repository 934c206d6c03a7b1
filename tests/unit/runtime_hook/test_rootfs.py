"""The walk through a hostile root file system: whatever its links say, nothing outside is opened or made."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.rootfs import Root
from gpuprov.runtime_hook.volumes import Volume, cover
from tests.unit.runtime_hook.test_rootfs_edges import root, tree

__all__ = ["root", "tree"]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text("secret")
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
        ("usr/lib64", "lib", "/usr/lib64/inner", "/usr/lib/inner"),
        ("usr/absolute", "/lib2/", "/usr/absolute/inner", "/usr/lib/inner"),
        ("usr/lib/up", "../../etc", "/lib2/up/../usr", "/usr"),
    ],
)
def test_links_resolve_inside_the_root(tree: Path, root: Root, link: str, target: str, path: str, ends: str) -> None:
    (tree / "lib2").symlink_to("/usr/lib")
    (tree / "usr/lib/inner").mkdir()
    (tree / link).symlink_to(target)
    assert root.is_directory(path) and root.real_path(path) == ends
    assert os.path.samestat(os.fstat(root.open_directory(path)), (tree / ends.lstrip("/")).stat())


@pytest.mark.root
@pytest.mark.parametrize(
    "target", ["/outside", "../outside", "{outside}", "/proc/self/root{outside}", "/proc/self/cwd"]
)
def test_a_link_that_leads_out_ends_inside(tree: Path, root: Root, outside: Path, target: str) -> None:
    (tree / "usr/lib/x").symlink_to(target.format(outside=outside))
    before = listing(outside)
    root.write_file("/usr/lib/x/file", b"written", 0o644)
    root.make_link("/usr/lib/x/link", "file")
    assert root.read_file("/usr/lib/x/file", 100) == b"written"
    assert listing(outside) == before
    assert not Path("file").exists()


@pytest.mark.root
@pytest.mark.parametrize("target", ["{outside}/secret", "../../outside/secret", "/proc/self/root{outside}/secret"])
def test_file_behind_an_outward_link_is_replaced_unread(tree: Path, root: Root, outside: Path, target: str) -> None:
    (tree / "etc/ld.so.cache").symlink_to(target.format(outside=outside))
    assert root.read_file("/etc/ld.so.cache", 100) is None
    root.write_file("/etc/ld.so.cache", b"ours", 0o644)
    assert root.read_file("/etc/ld.so.cache", 100) == b"ours"
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
def test_links_in_a_circle_end(tree: Path, root: Root, target: str) -> None:
    (tree / "loop").symlink_to(target)
    (tree / "a").symlink_to("loop")
    assert not root.is_directory("/loop")
    with pytest.raises(OSError, match=r"many links|No such file"):
        root.open_directory("/loop")


def test_a_path_that_doubles_with_each_link_ends_too(tree: Path, root: Root) -> None:
    for number in range(30):
        (tree / f"l{number}").symlink_to(f"l{number + 1}/../l{number + 1}")
    (tree / "l30").mkdir()
    with pytest.raises(OSError, match="too many links"):
        root.open_directory("/l0")


@pytest.mark.root
@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "socket"])
def test_what_is_no_regular_file_is_not_even_opened(tree: Path, root: Root, kind: str) -> None:
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
    assert root.read_file("/etc/ld.so.cache", 100) is None


@pytest.mark.parametrize("link", ["root", "parent/root"])
def test_a_root_reached_by_a_link_is_refused(tmp_path: Path, tree: Path, link: str) -> None:
    """runc refuses it too, but after this would have written."""
    place = tmp_path / "link"
    if link == "root":
        place.symlink_to(tree)
    else:
        place.symlink_to(tree.parent)
        place = place / tree.name
    before = listing(tree)
    files = listing(Path("/proc/self/fd"))
    with pytest.raises(OSError, match="a symbolic link leads there") as caught:
        Root(str(place))
    assert (caught.value.errno, caught.value.filename) == (errno.ELOOP, str(place))
    assert listing(tree) == before
    assert listing(Path("/proc/self/fd")) == files


def test_an_empty_file_and_one_that_another_process_has_leased_are_not_waited_for(tree: Path, root: Root) -> None:
    """A write lease keeps a reader waiting for 45 s (/proc/sys/fs/lease-break-time)."""
    (tree / "etc/file").write_bytes(b"")
    assert root.read_file("/etc/file", 10) is None
    (tree / "etc/file").write_bytes(b"content")
    with (tree / "etc/file").open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # ignored, unlike SIGIO
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        reader = subprocess.run(
            (sys.executable, "-c", _READ, str(tree)), capture_output=True, text=True, check=True, timeout=300
        )
    assert reader.stdout == "None\n"


_READ = """
import sys
from gpuprov.runtime_hook.rootfs import Root
print(Root(sys.argv[1]).read_file("/etc/file", 100))
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("destinations", "path", "says"),
    [
        (["/rootfs"], "/etc", "/rootfs"), (["/a", "/a/b"], "/etc", None), (["/lib64"], "/usr/lib", "/lib64"),
        (["/none/../usr"], "/usr/lib", "/none/../usr"), (["/usr/lib/x"], "/usr/lib", None),
        (["/etc/ld.so.cache"], "/lib64", None), (["/up/lib"], "/usr/lib", "/up/lib"),
        (["/rootfs/etc"], "/etc", "/rootfs/etc"),
    ],
)  # fmt: skip
def test_unmounted_volume_counts(tree: Path, root: Root, destinations: list[str], path: str, says: str | None) -> None:
    if says and says.startswith("/rootfs"):
        (tree / "rootfs").mkdir()
        (tree / "etc").rmdir()
        (tree / "etc").symlink_to("rootfs/etc")
    (tree / "lib64").symlink_to("usr/lib")
    (tree / "up").symlink_to("usr/share/..")
    volumes = [Volume(destination, "bind", str(tree.parent)) for destination in destinations]
    cover(root, volumes)
    before = listing(tree.parent)
    if says is None:
        root.write_file(f"{path}/file", b"", 0o644)
    else:
        with pytest.raises(OSError, match=f"in the volume at {says}, and nothing is written") as caught:
            root.write_file(f"{path}/file", b"", 0o644)
        assert caught.value.errno == errno.EXDEV
        assert listing(tree.parent) == before


@pytest.mark.parametrize("destination", ["/", "/root", "/root/..", "/none/..", "//."])
def test_a_volume_over_the_root_itself_is_refused(tree: Path, root: Root, destination: str) -> None:
    (tree / "root").symlink_to("/")
    with pytest.raises(Refused, match=f"the volume at {destination} covers it"):
        cover(root, [Volume(destination, "bind", "/")])


@pytest.mark.root
def test_links_are_seen_as_they_will_be_with_the_volumes_mounted(tree: Path, root: Root, outside: Path) -> None:
    (outside / "lib").mkdir()
    (outside / "back").symlink_to("/etc")
    (outside / "lib/link").symlink_to("there")
    (tree / "usr/lib/hidden").touch()
    cover(root, [Volume("/usr", "bind", str(outside)), Volume("/tmpfs", "tmpfs", "tmpfs")])
    assert not root.exists("/usr/lib/hidden")
    assert root.exists("/usr/lib/link")
    root.make_link("/usr/lib/link", "there")  # right already
    # A link of the volume leads back into the container's root, not into the host's.
    root.write_file("/usr/back/file", b"", 0o644)
    assert (tree / "etc/file").exists()
    assert not root.exists("/tmpfs/x")
    assert listing(outside) == ["back", "lib", "lib/link", "secret"]


@pytest.mark.root
@pytest.mark.parametrize("source", ["{tree}", "{outside}"])
@pytest.mark.parametrize("place", ["etc", "etc/deep/er", "usr/lib"])
def test_mount_of_the_same_device_takes_nothing(tree: Path, outside: Path, place: str, source: str) -> None:
    """Also the root's own folder, mounted inside of itself."""
    (tree / place).mkdir(parents=True, exist_ok=True)
    (tree / "link").symlink_to(place)
    done = subprocess.run(
        ("unshare", "-m", sys.executable, "-c", _WRITE, source.format(tree=tree, outside=outside), str(tree), place),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["True"] + ["another mount than the container's root"] * 8
    assert "file" not in {path.name for path in (*tree.rglob("*"), *outside.rglob("*"))}


_WRITE = """
import os, subprocess, sys
from gpuprov.runtime_hook.rootfs import Root
source, tree, place = sys.argv[1:]
subprocess.run(("mount", "--bind", source, f"{tree}/{place}"), check=True)
print(os.stat(tree).st_dev == os.stat(f"{tree}/{place}").st_dev)
for path in (f"/{place}", "/link", f"/{place}/new", f"/usr/../link/."):
    for act, what in ((Root.write_file, (b"", 0o644)), (Root.make_link, ("target",))):
        try:
            act(Root(tree), f"{path}/file", *what)
            print("written")
        except OSError as error:
            print("another mount" + error.strerror.partition("another mount")[2].removesuffix(" file system"))
"""
