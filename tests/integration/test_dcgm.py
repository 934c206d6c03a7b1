"""DCGM 4 on a real host: from a signed repository laid out as NVIDIA's is, by real apt and systemd, and back again."""

import shutil
from pathlib import Path

import pytest

from tests.gpg import gpg_home
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds
from tests.lab.repository import build_package, build_repository, sign, stand_in

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.long]
_NAME, _VERSION = "datacenter-gpu-manager", "1:4.7.0-1"
_UNIT = """\
[Unit]
Description={description}
[Service]
ExecStart={program}
[Install]
WantedBy=multi-user.target
"""
_SERVER = "#!/bin/sh\nexec sleep infinity\n"
# What dcgmi prints of each GPU: of those that nvidia-smi has, but for one that the file names.
_CLIENT = """\
#!/bin/sh
[ "$*" = "discovery -l" ] || exit 1
systemctl is-active --quiet nvidia-dcgm || { echo 'Error: unable to establish a connection'; exit 1; }
nvidia-smi -L | grep -v -F "$(cat /run/lost-gpu 2>/dev/null || echo none)" |
    sed -E 's/.*UUID: (GPU-[0-9a-f-]+).*/|        | Device UUID: \\1                |/'
"""


def build_dcgm(folder: Path) -> None:
    """Build stand-ins of NVIDIA's packages, with their names, versions, dependencies, programs and units."""
    core, needs = f"{_NAME}-4-core", f"{_NAME}-4-core (= {_VERSION})"
    files = {"usr/bin/nv-hostengine": _SERVER, "usr/bin/dcgmi": _CLIENT}
    unit = _UNIT.format(description="NVIDIA DCGM service", program="/usr/bin/nv-hostengine -n")
    build_package(folder, stand_in(core, _VERSION), {**files, "lib/systemd/system/nvidia-dcgm.service": unit})
    for name in ("cuda12", "proprietary", "proprietary-cuda12"):
        build_package(folder, stand_in(f"{_NAME}-4-{name}", _VERSION, needs), {f"usr/share/dcgm/{name}": ""})
    unit = _UNIT.format(description="DCGM Exporter", program="/usr/bin/dcgm-exporter")
    exporter = {"usr/bin/dcgm-exporter": _SERVER, "lib/systemd/system/nvidia-dcgm-exporter.service": unit}
    build_package(folder, stand_in(f"{_NAME}-exporter", "4.8.3-1", f"{core} (>= 1:4.0)"), exporter)


def test_it_comes_runs_is_verified_and_goes_again(site: Site, tmp_path: Path) -> None:
    host = site.installed("main")
    folder = site.lab.www / "dcgm/debian12/x86_64"
    with gpg_home(tmp_path / "gnupg") as home:
        fingerprint = build_repository(folder, home)
        build_dcgm(folder)
        sign(folder, home)
    shutil.copy(folder / "key.asc", folder / "3bf863cc.pub")
    wanted = {"gpuprov_cuda_repository": f"{site.lab.url}/dcgm", "gpuprov_cuda_key_fingerprint": fingerprint}
    inventory = site.inventory("main", **wanted, gpuprov_dcgm=True, gpuprov_dcgm_exporter=True)
    units = "nvidia-dcgm nvidia-dcgm-exporter"
    done = gpuprov_succeeds("install", "--hosts", inventory)
    assert "enable and start nvidia-dcgm.service, nvidia-dcgm-exporter.service" in done.stdout
    assert host.ssh(f"systemctl is-active {units}; systemctl is-enabled {units}").stdout.split() == [
        "active", "active", "enabled", "enabled",
    ]  # fmt: skip
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    verified = gpuprov("verify", "--hosts", inventory)
    assert verified.returncode == 0 and "DCGM" in verified.stdout, verified.stdout

    host.ssh("nvidia-smi -L | sed -E 's/.*(GPU-[0-9a-f-]+).*/\\1/; q' > /run/lost-gpu")
    lost = gpuprov("verify", "--hosts", inventory)
    assert lost.returncode == 1 and "dcgmi discovery -l lacks GPU-" in lost.stdout, lost.stdout
    host.ssh("rm /run/lost-gpu; systemctl stop nvidia-dcgm")
    stopped = gpuprov("install", "--hosts", inventory)
    assert stopped.returncode == 0 and "enable and start nvidia-dcgm.service" in stopped.stdout, stopped.stdout

    for _ in range(2):
        gpuprov_succeeds("rollback", "--hosts", inventory)
    left = f"systemctl list-unit-files --no-legend '*dcgm*'; dpkg-query -W '{_NAME}*' 2>/dev/null || true"
    assert host.ssh(left).stdout == ""
    assert "cuda" not in host.ssh("ls /etc/apt/sources.list.d /etc/apt/keyrings").stdout

    gpuprov_succeeds("install", "--hosts", inventory)
    host.ssh(f"systemctl is-active {units}")
    gpuprov_succeeds("uninstall", "--hosts", inventory)
    assert host.ssh(left).stdout == ""
