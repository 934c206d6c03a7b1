"""Firmware where the kernel would look for it, and the folders of services beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprov.cdi.discover import discover
from gpuprov.cdi.files import find_firmware
from gpuprov.core.system import System
from tests import simgpu

VERSION = simgpu.DRIVER_VERSION
KERNEL = "6.1.0-18-amd64"


def put(root: Path, folder: str, *names: str) -> None:
    place = root / folder.lstrip("/") / "nvidia" / VERSION
    place.mkdir(parents=True)
    for name in names:
        (place / name).touch()


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        (["/lib/firmware"], "/lib/firmware"),
        (["/lib/firmware", f"/lib/firmware/{KERNEL}"], f"/lib/firmware/{KERNEL}"),
        ([f"/lib/firmware/{KERNEL}", "/lib/firmware/updates"], "/lib/firmware/updates"),
        (["/lib/firmware/updates", f"/lib/firmware/updates/{KERNEL}"], f"/lib/firmware/updates/{KERNEL}"),
        (["/lib/firmware", "/srv/firmware"], "/srv/firmware"),
        ([], ""),
    ],
)
def test_the_first_folder_in_the_kernels_order_counts(tmp_path: Path, folders: list[str], found: str) -> None:
    for path, text in (("proc/sys/kernel/osrelease", KERNEL), ("sys/module/firmware_class/parameters/path", "")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"{text}\n")
    if "/srv/firmware" in folders:
        (tmp_path / "sys/module/firmware_class/parameters/path").write_text("/srv/firmware\n")
    for folder in folders:
        put(tmp_path, folder, "gsp_ga10x.bin", "gsp_tu10x.bin")
    expected = tuple(f"{found}/nvidia/{VERSION}/{name}" for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")) if found else ()
    assert find_firmware(System(str(tmp_path)), VERSION) == expected
    assert find_firmware(System(str(tmp_path)), "") == ()


def test_mps_is_in_the_specification_where_it_runs(tmp_path: Path) -> None:
    simgpu.install_tree(tmp_path)
    simgpu.write_kernel_tree(tmp_path, 1)
    assert "/tmp/nvidia-mps" not in discover(System(str(tmp_path))).sockets
    (tmp_path / "tmp/nvidia-mps").mkdir(parents=True)
    assert "/tmp/nvidia-mps" in discover(System(str(tmp_path))).sockets
