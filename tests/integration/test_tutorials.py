"""The tutorials, typed: each command as the page has it, and the lines that the page shows."""

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import simgpu, tutorials
from tests.gpg import gpg_home, signing_key
from tests.integration.test_bundle import CUT_OFF, source_words
from tests.integration.test_host_program import bare_host
from tests.integration.test_host_program import typed as typed_on
from tests.lab.command_line import GPUPROV
from tests.lab.fixtures import Site

pytestmark = [pytest.mark.lab, pytest.mark.root]
# Variables of the lab that add changes to those of the page.
SITES_OWN = ("gpuprov_repositories", "gpuprov_packages")


def typed(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line in a shell, as a reader does; stdout and stderr come together."""
    path = f"{GPUPROV.parent}:{os.environ['PATH']}"
    return subprocess.run(
        ("bash", "-c", command), cwd=folder, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip


def write_files(page: str, folder: Path, addresses: Mapping[str, str], variables: Mapping[str, Any]) -> None:
    """Write the page's files, and what the lab adds: how to log in, and where its test driver lies."""
    for name, text in tutorials.files(page).items():
        for host, address in addresses.items():
            text = text.replace(host, address)
        (folder / name).write_text(text.replace("580.178.04", simgpu.DRIVER_VERSION))
    (folder / "group_vars").mkdir()
    (folder / "group_vars/all.yml").write_text(yaml.safe_dump(dict(variables)))


def check(step: tutorials.Step, folder: Path, replaced: Mapping[str, str]) -> None:
    """Type a command, with words of the lab's in place of the page's, and compare what it prints."""
    words = step.command
    if not words.startswith("gpuprov bundle"):  # which connects to nobody
        words = words.replace("--hosts inventory.ini", "--hosts inventory.ini --connect-timeout 60")
    for there, here in replaced.items():
        words = words.replace(there, here)
    done = typed(words, folder)
    # --connect-timeout is in the command that gpuprov prints as the next one, too.
    printed = done.stdout.replace(" --connect-timeout 60", "")
    assert tutorials.differs(step, printed) == "", f"$ {step.command}\n{done.stdout}"


def test_the_fleet(site: Site, tmp_path: Path) -> None:
    hosts = {"gpu01.example.org": site.fresh("main"), "gpu02.example.org": site.fresh("twin")}
    for host in hosts.values():
        host.add_archive()
    page = (tutorials.TUTORIALS / "fleet.md").read_text()
    # The page's hosts need nothing but the driver: the number of changes is theirs.
    variables = {name: value for name, value in site.variables.items() if name not in SITES_OWN}
    write_files(page, tmp_path, {name: host.address for name, host in hosts.items()}, variables)
    for step in tutorials.steps(page):
        if step.command.startswith("ssh "):
            _, name, command = step.command.split(" ", 2)
            hosts[name].ssh(command)
        else:
            check(step, tmp_path, {})


def test_a_host_without_a_network(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = site.fresh("main")
    host.ssh(CUT_OFF)
    page = (tutorials.TUTORIALS.parent / "air-gapped.md").read_text()
    write_files(page, tmp_path, {"gpu01.example.org": host.address}, site.variables)
    # A system container builds no modules; packages come from the mirror that this machine uses.
    replaced = {" --kernel 6.1.0-37-amd64": f" {shlex.join(source_words('bookworm'))}"}
    with gpg_home(tmp_path / "gnupg") as home:
        signing_key(home, "ops@example.org")
        monkeypatch.setenv("GNUPGHOME", str(home))
        for step in tutorials.steps(page):
            check(step, tmp_path, replaced)


def test_one_machine(site: Site) -> None:
    host = bare_host("trixie", site)
    for step in tutorials.steps((tutorials.TUTORIALS / "one-machine.md").read_text()):
        # The doctor ends with 1 where it finds a cause.
        printed = typed_on(host, step.command, good=(0, 1) if step.command == "sudo gpuprov doctor" else (0,))
        assert tutorials.differs(step, printed) == "", f"$ {step.command}\n{printed}"
    assert not (host.root / "var/cache/gpuprov").exists()
    assert not (host.root / "var/lib/gpuprov").exists()
