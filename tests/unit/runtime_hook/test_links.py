"""Links, loader cache and compatibility libraries in a container's root, held against the loader's own ldconfig."""

from pathlib import Path

import pytest

from gpuprov.runtime_hook.edits import ContainerEdits
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.links import COMPAT_CONFIGURATION, find_compatibility, inject, statement_on_loader
from gpuprov.runtime_hook.rootfs import Root
from tests.triplet import LIBRARIES as MULTIARCH
from tests.unit.runtime_hook.test_ldcache import printed

pytestmark = pytest.mark.root

COMPAT = "usr/local/cuda-13.0/compat"


def edits(driver: str = "550.163.01", folder: str = MULTIARCH) -> ContainerEdits:
    mounts = [
        {"containerPath": f"{folder}/{name}"}
        for name in (f"libcuda.so.{driver}", f"libnvidia-eglcore.so.{driver}", f"vdpau/libvdpau_nvidia.so.{driver}")
    ]
    links = [(f"libcuda.so.{driver}", f"{folder}/libcuda.so.1"), ("libcuda.so.1", f"{folder}/libcuda.so")]
    return ContainerEdits({"mounts": [*mounts, {"containerPath": "/usr/bin/nvidia-smi"}]}, links, driver)


def cached(root: Path) -> dict[str, str]:
    """Return name → path as the loader's cache says, by ldconfig."""
    return dict(printed(root / "etc/ld.so.cache"))


def prepare(path: Path, given: ContainerEdits, *, cuda_compat: bool = True) -> ContainerEdits:
    root = Root(str(path))
    try:
        find_compatibility(root, given, wanted=cuda_compat)
        inject(root, given)
    finally:
        root.close()
    return given


def everything(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in root.rglob("*")
        if not path.is_dir()
    }


def compatibility(root: Path, *versions: str) -> None:
    folder = root / COMPAT
    folder.mkdir(parents=True)
    (root / "etc/alternatives").mkdir(parents=True)
    (root / "etc/alternatives/cuda").symlink_to("/usr/local/cuda-13.0")
    (root / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")
    for version in versions:
        (folder / f"libcuda.so.{version}").write_text("library")
        (folder / "libcuda.so.1").unlink(missing_ok=True)
        (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")


def test_links_and_cache_lead_to_the_driver(tmp_path: Path) -> None:
    prepare(tmp_path, edits())
    folder = tmp_path / MULTIARCH.lstrip("/")
    assert str((folder / "libcuda.so.1").readlink()) == "libcuda.so.550.163.01"
    assert str((folder / "libcuda.so").readlink()) == "libcuda.so.1"
    assert cached(tmp_path) == {
        "libcuda.so.1": f"{MULTIARCH}/libcuda.so.1",
        "libcuda.so": f"{MULTIARCH}/libcuda.so",
        "libnvidia-eglcore.so.550.163.01": f"{MULTIARCH}/libnvidia-eglcore.so.550.163.01",
    }


def test_a_second_start_writes_nothing(tmp_path: Path) -> None:
    compatibility(tmp_path, "580.65.06")
    prepare(tmp_path, edits())
    before = everything(tmp_path)
    prepare(tmp_path, edits())
    assert everything(tmp_path) == before


def test_another_driver_later_leaves_as_many_files(tmp_path: Path) -> None:
    prepare(tmp_path, edits())
    before = set(everything(tmp_path))
    prepare(tmp_path, edits("580.65.06"))
    assert set(everything(tmp_path)) == before
    assert str((tmp_path / MULTIARCH.lstrip("/") / "libcuda.so.1").readlink()) == "libcuda.so.580.65.06"
    assert "libnvidia-eglcore.so.580.65.06" in cached(tmp_path)


@pytest.mark.parametrize(
    ("versions", "driver", "used"),
    [
        pytest.param(("580.65.06",), "550.163.01", True, id="newer than the driver"),
        pytest.param(("550.54.14",), "550.163.01", False, id="of the same branch"),
        pytest.param(("535.10.01",), "550.163.01", False, id="older"),
        pytest.param(("580.65.06", "575.51.03"), "550.163.01", False, id="two of them"),
        pytest.param((), "550.163.01", False, id="none"),
        pytest.param(("580.65.06",), "", False, id="driver unknown"),
    ],
)
def test_only_newer_compat_libraries_count(tmp_path: Path, versions: tuple[str, ...], driver: str, used: bool) -> None:
    compatibility(tmp_path, *versions)
    given = edits()
    given.host_driver = driver
    prepare(tmp_path, given)
    found = cached(tmp_path)["libcuda.so.1"]
    assert found == (f"/{COMPAT}/libcuda.so.1" if used else f"{MULTIARCH}/libcuda.so.1")
    assert (tmp_path / COMPAT_CONFIGURATION.lstrip("/")).exists() is used


def test_compatibility_can_be_turned_off_and_goes_again_after_a_driver_update(tmp_path: Path) -> None:
    compatibility(tmp_path, "580.65.06")
    prepare(tmp_path, edits(), cuda_compat=False)
    assert cached(tmp_path)["libcuda.so.1"] == f"{MULTIARCH}/libcuda.so.1"
    prepare(tmp_path, edits())
    assert (tmp_path / COMPAT_CONFIGURATION.lstrip("/")).read_text() == f"/{COMPAT}\n"
    prepare(tmp_path, edits("580.95.05"))
    assert cached(tmp_path)["libcuda.so.1"] == f"{MULTIARCH}/libcuda.so.1"
    assert not (tmp_path / COMPAT_CONFIGURATION.lstrip("/")).exists()


def test_of_the_images_compatibility_folder_nvidias_names_alone_are_found_by_the_loader(tmp_path: Path) -> None:
    compatibility(tmp_path, "580.65.06")
    theirs = ("libnvidia-ptxjitcompiler.so.1", "libcudadebugger.so.580.65.06", "libnvidia-nvvm.so.4", "libcuda.so")
    others = (
        "libc.so.6", "libm.so.6", "libcudart.so.12", "libcuda.so.evil", "libcuda.so.", "libcudaX.so",
        "libnvidia-ml.so.1", "ld-linux-x86-64.so.2", "libcuda.sox",
    )  # fmt: skip
    for name in (*theirs, *others):
        (tmp_path / COMPAT / name).touch()
    prepare(tmp_path, edits())
    in_folder = {name for name, path in cached(tmp_path).items() if path.startswith(f"/{COMPAT}/")}
    assert in_folder == {"libcuda.so.1", "libcuda.so.580.65.06", *theirs}


def test_names_of_the_image_that_no_library_has_are_left_out(tmp_path: Path) -> None:
    compatibility(tmp_path, "580.65.06")
    (tmp_path / COMPAT / "lib\udcff.so").touch()
    prepare(tmp_path, edits())
    assert cached(tmp_path)["libcuda.so.1"] == f"/{COMPAT}/libcuda.so.1"
    assert len(cached(tmp_path)) == 4


@pytest.mark.parametrize("folder", ["usr/local/\udcff", "usr/local/a\n/evil"])
def test_a_folder_that_no_line_of_a_file_can_name_does_not_count(tmp_path: Path, folder: str) -> None:
    compatibility(tmp_path, "580.65.06")
    (tmp_path / folder).parent.mkdir(exist_ok=True)
    (tmp_path / "usr/local/cuda-13.0").rename(tmp_path / folder)
    (tmp_path / "etc/alternatives/cuda").unlink()
    (tmp_path / "etc/alternatives/cuda").symlink_to(f"/{folder}")
    prepare(tmp_path, edits())
    assert cached(tmp_path)["libcuda.so.1"] == f"{MULTIARCH}/libcuda.so.1"
    assert not (tmp_path / COMPAT_CONFIGURATION.lstrip("/")).exists()


def test_a_folder_of_thousands_of_files_is_no_compatibility_folder(tmp_path: Path) -> None:
    compatibility(tmp_path, "580.65.06")
    for number in range(1000):
        (tmp_path / COMPAT / f"lib{number}.so").touch()
    prepare(tmp_path, edits())
    assert len(cached(tmp_path)) == 3


@pytest.mark.parametrize("place", ["usr", "usr/lib", f"{MULTIARCH.lstrip('/')}/libcuda.so.1/x", "etc/ld.so.cache/x"])
def test_a_root_that_cannot_take_them_is_refused_in_one_sentence(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way")
    with pytest.raises(Refused, match=r"can't be made in the container's root file system: [A-Z]"):
        prepare(tmp_path, edits())


@pytest.mark.parametrize(
    ("loaders", "says"),
    [
        (["lib/ld-musl-x86_64.so.1"], "musl"),
        (["lib/ld-musl-x86_64.so.1", "lib64/ld-linux-x86-64.so.2"], ""),
        (["lib64/ld-linux-x86-64.so.2"], ""),
        ([], ""),
    ],
)
def test_an_image_with_musl_is_told_what_cannot_work(tmp_path: Path, loaders: list[str], says: str) -> None:
    for name in loaders:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    root = Root(str(tmp_path))
    said = statement_on_loader(root)
    root.close()
    assert [says in one for one in said] == ([True] if says else [])
