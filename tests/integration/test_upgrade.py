"""A host that an earlier version installed: the present one upgrades it, rolls back both runs, and uninstalls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_install import etc, packages
from tests.integration.test_uninstall import differences, files, in_memory
from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.slow]
# The last version whose journals have no format number.
_EARLIER = "57c247a"
_REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree of the earlier version, from the history of this repository."""
    packed = subprocess.run(("git", "archive", _EARLIER), cwd=_REPOSITORY, capture_output=True, check=False, timeout=60)
    if packed.returncode != 0:
        pytest.skip(f"no commit {_EARLIER} here (a shallow clone?): {packed.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("earlier")
    subprocess.run(("tar", "x"), cwd=folder, input=packed.stdout, check=True, timeout=60)
    return folder


def install_by(tree: Path, inventory: Path) -> None:
    """Run `gpuprov install` from another source tree."""
    done = subprocess.run(
        (sys.executable, "-m", "gpuprov", "install", "--hosts", inventory, "--connect-timeout", "60"),
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def formats(host: Host) -> list[int]:
    lines = host.ssh("head -qn 1 /var/lib/gpuprov/runs/*").stdout.splitlines()
    return [json.loads(line).get("format", 1) for line in lines]


def calls(site: Site, *commands: str) -> None:
    for command in commands:
        done = gpuprov(command, "--hosts", site.inventory("main"))
        assert done.returncode == 0, f"{command}: {done.stdout}"


@pytest.mark.parametrize("back", [("rollback", "rollback", "uninstall"), ("uninstall",)], ids=["rollback", "uninstall"])
def test_an_earlier_versions_host_is_upgraded_and_given_back(site: Site, earlier: Path, back: tuple[str, ...]) -> None:
    host = site.hosts["main"]
    host.reset()
    before = (etc(host), packages(host), files(host), in_memory(host))
    install_by(earlier, site.inventory("main", gpuprov_packages=None))
    assert formats(host) == [1]
    # The inventory of the new version asks for a package more, so there is something to upgrade.
    calls(site, "install", "verify")
    assert formats(host) == [1, 2]
    again = gpuprov("install", "--hosts", site.inventory("main"))
    assert again.returncode == 0 and formats(host) == [1, 2], again.stdout
    calls(site, *back)
    after = (etc(host), packages(host), files(host), in_memory(host))
    assert differences(before[0], after[0]) == set()
    assert after[1:] == before[1:]
