"""Specification, files and module of different versions: the one sentence, and what no check is made of."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook import driver_files
from gpuprov.runtime_hook.errors import Refused

OLD, NEW = "550.163.01", "580.178.04"
_LOADED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Apr  8 12:41:17 UTC 2025\nGCC version:  gcc 12.2.0\n"
_OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22-I3)\n"


class Host:
    """A library folder, a loaded module and a specification of a driver."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.module = folder / "version"
        monkeypatch.setattr(driver_files, "MODULE", str(self.module))
        monkeypatch.setattr(driver_files, "CONTAINER", str(folder / "container"))

    def install(self, version: str) -> None:
        for old in self.folder.glob("lib*"):
            old.unlink()
        for name in ("libcuda", "libnvidia-ml"):
            (self.folder / f"{name}.so.{version}").touch()
            (self.folder / f"{name}.so.1").symlink_to(f"{name}.so.{version}")

    def start(self, version: str) -> str:
        """Return why a container does not start with the specification of this driver, "" if it does."""
        names = (f"libcuda.so.{version}", f"libnvidia-ml.so.{version}", "nvidia-smi")
        mounts = [{"hostPath": f"{self.folder}/{name}"} for name in names]
        try:
            driver_files.require_current("/etc/cdi/nvidia.json", version, {"mounts": mounts})
        except Refused as refused:
            return str(refused).replace(f"{self.folder}/", "/lib/")
        return ""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path, monkeypatch)
    made.install(OLD)
    made.module.write_text(_LOADED.format(OLD))
    return made


@pytest.mark.parametrize("form", [_LOADED, _OPEN])
def test_a_driver_of_one_version_is_given(host: Host, form: str) -> None:
    host.module.write_text(form.format(OLD))
    assert host.start(OLD) == ""


def test_files_that_changed_under_the_module_are_said_with_the_way_out(host: Host) -> None:
    host.install(NEW)
    sentence = f"the driver's files are {NEW}, the loaded module is {OLD}: reboot, or run `gpuprov install`"
    assert host.start(OLD) == sentence
    # Or with a specification of the new files, which nothing could use.
    assert host.start(NEW) == sentence


def test_in_a_system_container_the_files_follow_the_module(host: Host) -> None:
    (host.folder / "container").touch()
    host.install(NEW)
    assert host.start(OLD).endswith(
        f"run `gpuprov install -e gpuprov_driver_version={OLD}`: the module belongs to the container host"
    )


def test_a_specification_that_is_behind_a_whole_driver_is_refreshed_by_a_command(host: Host) -> None:
    host.install(NEW)
    host.module.write_text(_LOADED.format(NEW))
    assert host.start(OLD) == (
        f"/etc/cdi/nvidia.json is of driver {OLD}, the driver is {NEW}: "
        "systemctl start gpuprov-refresh, or run `gpuprov install`"
    )


def test_a_library_that_is_gone_is_named(host: Host) -> None:
    (host.folder / f"libnvidia-ml.so.{OLD}").unlink()
    assert host.start(OLD) == f"/lib/libnvidia-ml.so.{OLD}, a file of the driver, is gone: run `gpuprov install`"
    for path in host.folder.glob("lib*"):
        path.unlink()
    assert "libcuda.so.550.163.01, a file of the driver, is gone" in host.start(OLD)


def test_old_files_beside_the_new_ones_do_not_decide(host: Host) -> None:
    """The loader's link does."""
    host.install(NEW)
    (host.folder / "libcuda.so.610.10").touch()
    assert host.start(OLD).startswith(f"the driver's files are {NEW}, the loaded")
    (host.folder / "libcuda.so.1").unlink()
    (host.folder / "libcuda.so.1").symlink_to("/etc/alternatives/libcuda.so.1")
    (host.folder / "libcuda.so.610.10").unlink()
    (host.folder / "libcuda.so.580.99.1").touch()
    assert host.start(OLD).startswith(f"the driver's files are {NEW}, the loaded")


def test_nothing_is_said_where_no_version_is_known(host: Host) -> None:
    host.module.unlink()
    assert host.start("") == ""


def test_a_driver_that_is_not_loaded_is_said_as_its_nodes_would_give_nothing(host: Host) -> None:
    """As after a boot of a kernel without the module: docker starts what it had, and nodes are there by number."""
    host.module.unlink()
    assert host.start(OLD) == f"the driver {OLD} is not loaded (/lib/version is missing): run `gpuprov doctor`"


def test_files_without_a_version_need_no_module(host: Host) -> None:
    """What WSL gives its guests: its kernel has the GPU by another driver."""
    host.module.unlink()
    mounts = [{"hostPath": "/usr/lib/wsl/lib/libcuda.so.1.1"}]
    driver_files.require_current("/etc/cdi/nvidia.json", OLD, {"mounts": mounts})


def test_a_strange_digit_in_a_files_name_is_no_version(host: Host) -> None:
    (host.folder / "libcuda.so.1").unlink()
    (host.folder / "libcuda.so.1").symlink_to("libcuda.so.site")
    (host.folder / "libcuda.so.5².1").touch()
    assert f"the driver is {OLD}: systemctl start gpuprov-refresh" in host.start(NEW)


@pytest.mark.root
@pytest.mark.parametrize(("major", "fits"), [(510, True), (511, False)])
def test_nodes_that_got_other_numbers_at_a_boot_are_refused(host: Host, major: int, fits: bool) -> None:
    """Those of nvidia-uvm and of MIG are dynamic: by those of an earlier boot a container gets another device."""
    path = str(host.folder / "nvidia-uvm")
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(510, 0))
    absent = {"path": "/dev/nvidia9", "hostPath": f"{path}9", "major": 195, "minor": 9}
    others = {"path": "/dev/other", "hostPath": path, "major": 9, "minor": 0}
    ours = {"path": "/dev/nvidia-uvm", "hostPath": path, "major": major, "minor": 0}
    nodes: list[dict[str, Any]] = [absent, others, {"path": path}, ours]
    edits = {"mounts": [{"hostPath": f"{host.folder}/libcuda.so.{OLD}"}], "deviceNodes": nodes}
    if fits:
        driver_files.require_current("/etc/cdi/nvidia.json", OLD, edits)
        return
    with pytest.raises(Refused, match=r"nvidia-uvm .*/etc/cdi/nvidia\.json.*systemctl start gpuprov-refresh"):
        driver_files.require_current("/etc/cdi/nvidia.json", OLD, edits)
