"""Where a container's loader looks for libraries; hostile images learn nothing and reach nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuprov.runtime_hook.rootfs import LibraryFolder

MULTIARCH = f"/usr/lib/{os.uname().machine}-linux-gnu"
OTHER = next(
    folder for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu") if folder != MULTIARCH
)  # fmt: skip
LIB64 = "/usr/lib64"


def make(root: Path, *folders: str) -> str:
    for folder in folders:
        (root / folder.lstrip("/")).mkdir(parents=True)
    return str(root)


@pytest.mark.parametrize(
    ("image", "on_debian", "on_red_hat"),
    [
        pytest.param([MULTIARCH], MULTIARCH, MULTIARCH, id="Debian"),
        # Debian 12 and Ubuntu have a /usr/lib64 too; their loader does not search it.
        pytest.param([MULTIARCH, LIB64], MULTIARCH, MULTIARCH, id="Debian with lib64"),
        pytest.param([LIB64], LIB64, LIB64, id="Red Hat"),
        pytest.param([LIB64, OTHER], LIB64, LIB64, id="Red Hat with a cross compiler"),
        pytest.param(["/lib"], MULTIARCH, LIB64, id="Alpine"),
        pytest.param([], MULTIARCH, LIB64, id="empty"),
    ],
)
def test_libraries_go_where_the_images_loader_looks(
    tmp_path: Path, image: list[str], on_debian: str, on_red_hat: str
) -> None:
    folder = LibraryFolder(make(tmp_path, *image))
    assert folder.in_container(f"{MULTIARCH}/libcuda.so.1") == f"{on_debian}/libcuda.so.1"
    assert folder.in_container(f"{LIB64}/libcuda.so.1") == f"{on_red_hat}/libcuda.so.1"


@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/nvidia-smi",
        "/lib/firmware/nvidia/550.163.01/gsp_tu10x.bin",
        f"{MULTIARCH}/vdpau/libvdpau_nvidia.so.1",
        f"{MULTIARCH}-more/libcuda.so.1",
        "/run/nvidia-persistenced/socket",
        "libcuda.so.1",
    ],
)
def test_other_paths_stay(tmp_path: Path, path: str) -> None:
    assert LibraryFolder(make(tmp_path, LIB64)).in_container(path) == path


@pytest.mark.parametrize("link", ["usr", "usr/lib64"])
@pytest.mark.parametrize("target", ["/", "/usr", "/usr/lib", "..", "../..", "real", "."])
def test_a_link_is_never_followed(tmp_path: Path, link: str, target: str) -> None:
    root = tmp_path / "root"
    make(root, "/real/lib64", "/usr/real")
    if link == "usr":
        (root / "usr/real").rmdir()
        (root / "usr").rmdir()
    (root / link).symlink_to(target)
    folder = LibraryFolder(str(root))
    assert folder.in_container(f"{MULTIARCH}/libcuda.so.1") == f"{MULTIARCH}/libcuda.so.1"


@pytest.mark.parametrize("kind", ["file", "fifo", "loop"])
def test_what_is_no_folder_is_no_folder_and_blocks_nothing(tmp_path: Path, kind: str) -> None:
    make(tmp_path, "/usr")
    place = tmp_path / "usr/lib64"
    if kind == "file":
        place.write_text("")
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to("lib64")
    assert LibraryFolder(str(tmp_path)).in_container(f"{MULTIARCH}/l.so") == f"{MULTIARCH}/l.so"


@pytest.mark.parametrize("root", ["", "/nonexistent", "/etc/passwd", "a\0b", "\ud800", "x" * 5000])
def test_a_root_that_is_none_leaves_paths_as_they_are(root: str) -> None:
    assert LibraryFolder(root).in_container(f"{MULTIARCH}/l.so") == f"{MULTIARCH}/l.so"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    root = make(tmp_path, LIB64)
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    LibraryFolder(root).in_container(f"{MULTIARCH}/l.so")
    LibraryFolder("/proc").in_container(f"{MULTIARCH}/l.so")
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
