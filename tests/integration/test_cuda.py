"""The CUDA toolkit on a real host: from a signed repository laid out as NVIDIA's is, by real apt; from its .run."""

import hashlib
import shutil
from pathlib import Path

import pytest

from tests.gpg import gpg_home
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds
from tests.lab.repository import build_repository
from tests.simgpu.cuda_run import build_cuda_run

pytestmark = [pytest.mark.lab, pytest.mark.root]


def test_the_toolkit_comes_from_nvidias_layout_and_goes_again(site: Site, tmp_path: Path) -> None:
    host = site.installed("main")
    folder = site.lab.www / "cuda/debian12/x86_64"
    with gpg_home(tmp_path / "gnupg") as home:
        fingerprint = build_repository(folder, home, "cuda-toolkit-12-4")
    shutil.copy(folder / "key.asc", folder / "3bf863cc.pub")
    wanted = {"gpuprov_cuda": "12.4", "gpuprov_cuda_repository": f"{site.lab.url}/cuda"}
    refused = gpuprov("install", "--hosts", site.inventory("main", **wanted))
    assert refused.returncode == 1
    assert "pinned is EB693B3035CD5710E231E123A4B469963BF863CC" in refused.stdout
    inventory = site.inventory("main", **wanted, gpuprov_cuda_key_fingerprint=fingerprint)
    gpuprov_succeeds("install", "--hosts", inventory)
    assert host.ssh("dpkg-query -W -f '${Status}' cuda-toolkit-12-4").stdout == "install ok installed"
    assert "/usr/local/cuda/bin" in host.ssh("sh -lc 'echo $PATH'").stdout
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    gpuprov_succeeds("rollback", "--hosts", inventory)
    assert "cuda" not in host.ssh("ls /etc/apt/sources.list.d /etc/apt/keyrings /etc/profile.d").stdout
    assert host.ssh("dpkg-query -W -f '${Status}' cuda-toolkit-12-4 2>/dev/null || echo gone").stdout.strip() == "gone"


def test_the_toolkit_comes_from_its_run_file_and_goes_again(site: Site) -> None:
    host = site.installed("main")
    file = build_cuda_run(site.lab.www)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    wanted = {"gpuprov_cuda": "12.4", "gpuprov_cuda_url": f"{site.lab.url}/{file.name}"}
    inventory = site.inventory("main", **wanted, gpuprov_cuda_sha256=digest)
    gpuprov_succeeds("install", "--hosts", inventory)
    assert host.ssh("sh -lc 'nvcc'").stdout.strip() == "Cuda compilation tools, release 12.4"
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    gpuprov_succeeds("rollback", "--hosts", inventory)
    left = host.ssh("ls -d /usr/local/cuda* /etc/profile.d/*cuda* /etc/ld.so.conf.d/cuda* 2>/dev/null", check=False)
    assert left.stdout == ""
