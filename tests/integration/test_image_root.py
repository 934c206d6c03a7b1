"""`--root`: an image that is mounted and does not run, entered by chroot, as in a container build without systemd."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import simgpu
from tests.lab.base import build_base, mount_over
from tests.lab.fixtures import DRIVER, gpuprov, gpuprov_succeeds
from tests.lab.lab import CACHE
from tests.lab.shell import run
from tests.lab.sources import copy_network_configuration

pytestmark = [pytest.mark.lab, pytest.mark.root]
# docker is to come by this installation: nothing may start it then. The kernel is not this machine's.
_PREPARE = r"""
dpkg --purge docker.io containerd runc > /dev/null
apt-get -qq update
kernel=$(apt-cache depends linux-headers-cloud-amd64 | sed -n 's/.*Depends: linux-headers-//p')
mkdir -p /boot "/lib/modules/$kernel"
: > "/boot/vmlinuz-$kernel"
echo 0123456789abcdef0123456789abcdef > /etc/machine-id
echo "$kernel"
"""
_WANTED = (
    "-e", f"gpuprov_driver_version={DRIVER}", "-e", "gpuprov_driver_url=/root/driver.run",
    "-e", "gpuprov_image_gpus=ampere", "-e", "gpuprov_image_nvswitch=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("image")
    place, layers = folder / "root", CACHE / f"image-{os.getpid()}"
    mount_over(str(build_base(CACHE / "bases", "bookworm", print)), layers, place)
    try:
        copy_network_configuration(place, "bookworm")
        shutil.copyfile(simgpu.build_run(folder), place / "root/driver.run")
        run(("chroot", str(place), "sh", "-euc", _PREPARE), timeout=300)
        yield place
    finally:
        run(("umount", "-R", str(place)))
        shutil.rmtree(layers)


def _mounts_below(root: Path) -> list[str]:
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if place.startswith(f"{root}/")]


def test_a_folder_that_is_no_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "etc").symlink_to("/etc")
    done = gpuprov("install", "--root", tmp_path, *_WANTED)
    assert done.returncode == 2, done.stdout
    assert "is no root file system of an image" in done.stdout


def test_an_image_is_installed_where_no_systemd_runs(root: Path) -> None:
    gpuprov_succeeds("install", "--root", root, *_WANTED, timeout=900)
    (kernel,) = (path.name for path in (root / "lib/modules").iterdir())
    assert "updates/dkms/nvidia.ko" in (root / f"lib/modules/{kernel}/modules.dep").read_text()
    wants = root / "etc/systemd/system/multi-user.target.wants"
    assert {"gpuprov-nodes.service", "docker.service"} <= {path.name for path in wants.iterdir()}
    assert (root / "etc/machine-id").read_bytes() == b""
    # Neither a mount nor a daemon is left, nor was dockerd ever started: it makes its folders first.
    assert _mounts_below(root) == []
    assert not (root / "var/lib/docker/overlay2").exists()


# What a hostile Python of an image finds: each line of /seen is a probe or the agent's start.
_HOSTILE_PYTHON = r"""#!/usr/bin/python3.real
import ctypes, os, sys
libc = ctypes.CDLL(None)
bounding = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("CapBnd:"))
above = os.open("/", os.O_RDONLY)
os.makedirs("/below", exist_ok=True)
if os.fork() == 0:
    os.chroot("/below")
    os.fchdir(above)
    for _ in range(64):
        os.chdir("..")
    os.chroot(".")
    with open("/seen" if os.path.exists("/run/gpuprov-agent.pyz") else "/escaped", "a") as file:
        file.write(f"{int(bounding, 16) & (1 << 16 | 1 << 17 | 1 << 25)} {os.path.exists('MARKER')}\n")
    os._exit(0)
os.wait()
os.execv("/usr/bin/python3.real", ["python3", *sys.argv[1:]])
"""


def test_programs_of_an_image_do_not_reach_the_builder(root: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    python, real = root / "usr/bin/python3", root / "usr/bin/python3.real"
    real.symlink_to(python.readlink())
    python.unlink()
    python.write_text(_HOSTILE_PYTHON.replace("MARKER", str(marker)))
    python.chmod(0o755)
    try:
        done = gpuprov("doctor", "--root", root)
    finally:
        python.unlink()
        real.rename(python)
    # The probe and the agent: without the capabilities, and with no way out.
    assert (root / "seen").read_text().splitlines()[:2] == ["0 False"] * 2, done.stdout
    assert not Path("/escaped").exists()


def test_a_second_run_changes_nothing_and_verify_says_what_it_can(root: Path) -> None:
    done = gpuprov("install", "--root", root, *_WANTED)
    assert (done.returncode, "0 changes" in done.stdout) == (0, True), done.stdout
    done = gpuprov_succeeds("verify", "--root", root)
    assert "skipped: there is no GPU in this machine" in done.stdout
    gpuprov_succeeds("doctor", "--root", root)


def test_a_rollback_takes_it_out_of_the_image_again(root: Path) -> None:
    done = gpuprov_succeeds("rollback", "--root", root)
    assert "the identity that the image was cleaned of does not come back" in done.stdout
    assert not (root / "etc/gpuprov").exists() and not (root / "usr/bin/nvidia-smi").exists()
    assert not list((root / "etc/systemd/system").glob("gpuprov-*"))
