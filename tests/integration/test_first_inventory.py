"""`gpuprov init` on real hosts: it looks at them over SSH, and the next command that it names works."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.lab.command_line import GPUPROV
from tests.lab.fixtures import Site

pytestmark = [pytest.mark.lab, pytest.mark.root]


def test_the_inventory_that_init_writes_reaches_its_hosts(site: Site, tmp_path: Path) -> None:
    with_gpus, without = site.hosts["main"], site.hosts["bare"]
    environment = {**os.environ, "HOME": str(tmp_path), "ANSIBLE_PRIVATE_KEY_FILE": str(site.lab.key)}

    def gpuprov(*words: str) -> subprocess.CompletedProcess[str]:
        argv = (str(GPUPROV), *words, "--connect-timeout", "60")
        return subprocess.run(
            argv, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )

    hosts = f"{with_gpus.address},{without.address}"
    made = gpuprov("init", "--hosts", hosts, "--user", "root", "--yes", "--accept-new-host-keys")
    assert made.returncode == 0, made.stderr
    assert "1 of 2 hosts answered" in made.stderr
    text = (tmp_path / "inventory.yml").read_text()
    assert f"    {with_gpus.address}:  # Debian GNU/Linux 12 (bookworm), 2 GPUs, driver none\n" in text
    # It has no Python: what it is stays unknown, and its place in the inventory too.
    assert f"    {without.address}:  # not seen: failed\n" in text
    assert made.stdout.endswith("wrote inventory.yml; next: gpuprov install --hosts inventory.yml --check --diff\n")
    facts = gpuprov("facts", "--hosts", "inventory.yml", "--limit", with_gpus.address)
    assert facts.returncode == 0, facts.stdout
