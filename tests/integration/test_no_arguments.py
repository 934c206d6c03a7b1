"""`sudo gpuprov install`, no more, from the .deb or the .rpm; /etc/gpuprov/site.yml names the mirror in NVIDIA's place.

One host of each package manager is in `make test` or `make test-rest`, the other releases are in `make test-long`.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.files import put
from tests.lab import Host
from tests.lab.fixtures import DRIVER, Site
from tests.lab.rpm_repository import RpmPackage, build_package
from tools import linux_packages

pytestmark = [pytest.mark.lab, pytest.mark.root]
_SITE_FILE = "etc/gpuprov/site.yml"
_OF_THE_SITE = ("gpuprov_driver_sha256", "gpuprov_repositories", "gpuprov_packages")
_LATER = {"site": ("bullseye", "trixie"), "rpm_site": ("fedora", "alma", "leap", "sles")}
_CASES = [
    ("site", "main"),
    *(pytest.param("rpm_site", name, marks=pytest.mark.slow) for name in ("rocky", "opensuse")),
    *(pytest.param(lab, name, marks=pytest.mark.long) for lab, names in _LATER.items() for name in names),
]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the .deb, the .rpm, and an rpm that says what these hosts have: a Python."""
    folder = tmp_path_factory.mktemp("packages")
    linux_packages.build(folder, 1_790_000_000)
    build_package(RpmPackage("python3", version="3.9.18", provides="/usr/bin/python3"), folder)
    return folder


def typed(host: Host, line: str, code: int = 0) -> str:
    done = host.ssh(f"{line} 2>&1", check=False, timeout=300)
    assert done.returncode == code, f"{line}\n{done.stdout}"
    return done.stdout


def install_package(host: Host, packages: Path) -> None:
    """Install gpuprov as a person would, with the host's own package manager."""
    for path in packages.iterdir():
        shutil.copy(path, host.root / "root")
    has = host.ssh("command -v apt-get zypper dnf", check=False).stdout.split()
    if "/usr/bin/apt-get" in has:
        typed(host, f"apt-get install --yes /root/{linux_packages.DEB}")
    elif host.ssh("grep -qi suse /etc/os-release", check=False).returncode == 0:
        typed(host, "zypper --non-interactive install --allow-unsigned-rpm /root/*.rpm")
    else:
        typed(host, "dnf --assumeyes install /root/*.rpm")


@pytest.mark.parametrize(("lab", "name"), _CASES)
def test_install_needs_no_argument(request: pytest.FixtureRequest, packages: Path, lab: str, name: str) -> None:
    site: Site = request.getfixturevalue(lab)
    host = site.fresh(name)
    install_package(host, packages)
    variables = {"gpuprov_driver_mirror": site.lab.url, **{one: site.variables[one] for one in _OF_THE_SITE}}
    file = host.root / _SITE_FILE
    file.parent.mkdir(mode=0o755, exist_ok=True)
    put(file, json.dumps(variables), 0o666)
    refused = typed(host, "gpuprov install", 2)
    assert "others than root could change /etc/gpuprov/site.yml" in refused and "mode 666" in refused
    file.chmod(0o600)
    assert f"gpuprov_driver_mirror  [{site.lab.url} by /etc/gpuprov/site.yml]" in typed(host, "gpuprov options")
    first = typed(host, "gpuprov install")
    assert f"driver {DRIVER}: the driver of the running kernel" in first
    assert "0 changes" in typed(host, "gpuprov install")
    assert "0 changes" in typed(host, "gpuprov install --upgrade")
    assert f"driver {DRIVER} on localhost: the driver of the running kernel" in typed(host, "gpuprov report")
    assert "1 host ready" in typed(host, "gpuprov verify")
