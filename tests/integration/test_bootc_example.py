"""The example of a bootable container, built by buildah: its own lines, on a stand-in base without network."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import simgpu
from tests.lab.base import build_base, mount_over
from tests.lab.fixtures import DRIVER
from tests.lab.lab import CACHE, REPOSITORY
from tests.lab.shell import run
from tools.host_program import build

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.root, pytest.mark.timeout(1800)]
_EXAMPLE = (REPOSITORY / "examples/bootc/Containerfile").read_text()
_BASE = "quay.io/centos-bootc/centos-bootc:stream9"
_PROGRAM = "/usr/lib/gpuprov-cli/bin/gpuprov"
# In place of pip's network: the one-file program. Behind the example's own options, for the last ones win.
_OFFLINE = f"COPY gpuprov {_PROGRAM}\nCOPY driver.run /root/driver.run\n"
_OPTIONS = (
    f" -e gpuprov_driver_version={DRIVER} -e gpuprov_driver_url=/root/driver.run -e gpuprov_kernel_modules=none"
    " -e gpuprov_docker=distribution\n"
)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the mounted root of the image that buildah made."""
    folder = tmp_path_factory.mktemp("bootc")
    store = CACHE / "bootc-store"
    buildah = ("buildah", "--root", str(store), "--runroot", str(folder / "run"), "--storage-driver", "overlay")
    place = folder / "base"
    mount_over(str(build_base(CACHE / "bases", "bookworm", print)), CACHE / "bootc-base", place)
    try:
        (place / "boot/vmlinuz-6.1.0-1-amd64").touch()
        (place / "lib/modules/6.1.0-1-amd64").mkdir(parents=True)
        base = run((*buildah, "from", "scratch")).strip()
        run((*buildah, "copy", "--quiet", base, str(place), "/"), timeout=900)
        run((*buildah, "commit", "--quiet", base, "localhost/stand-in"), timeout=900)
        (folder / "gpuprov").write_bytes(build())
        (folder / "gpuprov").chmod(0o755)
        shutil.copyfile(simgpu.build_run(folder), folder / "driver.run")
        (folder / "Containerfile").write_text(_offline())
        argv = (*buildah, "build", "--isolation", "chroot", "--tag", "gpu-host", str(folder))
        done = subprocess.run(argv, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        made = run((*buildah, "from", "localhost/gpu-host")).strip()
        yield Path(run((*buildah, "mount", made)).strip())
        run((*buildah, "umount", made))
    finally:
        run((*buildah, "rm", "--all"), check=False)
        run(("umount", str(place)))
        for left in (store, CACHE / "bootc-base"):
            run(("rm", "-rf", str(left)), check=False, timeout=300)


def _offline() -> str:
    """Return the example with the stand-in base, without pip, and with this test's driver; the rest is its own."""
    lines = _EXAMPLE.rstrip("\n").splitlines()
    (pip,) = (line for line in lines if "pip install" in line)
    text = "\n".join(line for line in lines if line not in (pip,))
    assert f"FROM {_BASE}" in text and f"RUN {_PROGRAM} install --image" in text
    text = text.replace(f"FROM {_BASE}", "FROM localhost/stand-in")
    return text.replace(f"RUN {_PROGRAM}", f"{_OFFLINE}RUN {_PROGRAM}") + _OPTIONS


def test_the_image_has_the_driver_the_runtime_and_its_units(image: Path) -> None:
    assert (image / f"usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}").exists()
    assert (image / "usr/bin/gpuprov-container-runtime").exists()
    wants = image / "etc/systemd/system/multi-user.target.wants"
    assert "gpuprov-nodes.service" in {path.name for path in wants.iterdir()}
    assert (image / "etc/gpuprov/image").exists()


def test_the_image_is_nobodys_yet(image: Path) -> None:
    assert (image / "etc/machine-id").read_bytes() == b""
    assert not list((image / "etc/ssh").glob("ssh_host_*_key"))
