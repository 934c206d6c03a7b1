"""README's "Your machine", line by line, on hosts without pip and git."""

import json
import re
from pathlib import Path

import pytest

from tests.lab import Host
from tests.lab.fixtures import Site
from tools import host_program

_README = Path(__file__).parents[2] / "README.md"
pytestmark = [pytest.mark.lab, pytest.mark.root]


def readme_lines() -> list[str]:
    """Return the commands of the section."""
    (block,) = re.findall(
        r"^## Your machine\n.*?^```\n(.*?)^```$", _README.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    return [line.partition("  #")[0].rstrip() for line in block.splitlines()]


def typed(host: Host, line: str, good: tuple[int, ...] = (0,)) -> str:
    """Type a line as root; the lab's image stands for the one that the README names."""
    line = line.replace("sudo ", "").replace("IMAGE", "$(docker images -q gpuprov-verify)")
    done = host.ssh(f"cd /root && ({line}) 2>&1", check=False, timeout=300)
    assert done.returncode in good, f"{line}\n{done.stdout}"
    return done.stdout


def bare_host(release: str, site: Site) -> Host:
    """Return a host with gpuprov-host.pyz, and a site's file, which names the lab's servers."""
    host = site.fresh(release)
    assert host.ssh("command -v pip pip3 git || python3 -c 'import click'", check=False).returncode == 1
    (host.root / "root" / host_program.NAME).write_bytes(host_program.build())
    variables = {name: value for name, value in site.variables.items() if name.startswith("gpuprov_")}
    (host.root / "etc/gpuprov").mkdir()
    (host.root / "etc/gpuprov/site.yml").write_text(json.dumps(variables))
    return host


@pytest.mark.sample
def test_the_readme_on_a_bare_host(site: Site) -> None:
    host = bare_host("bullseye", site)
    before = host.snapshot("/etc/docker")

    said = {line: typed(host, line) for line in readme_lines()}
    assert "nothing was touched" in said["sudo gpuprov install --check --diff"]
    assert "0 changes" in typed(host, "sudo gpuprov install")
    assert "1 host ready" in said["sudo gpuprov verify"]
    listed = host.ssh("nvidia-smi -L").stdout
    assert [output for line, output in said.items() if line.startswith("docker run")] == [listed, listed]

    assert "libcuda.so.1 " in typed(host, "gpuprov cuda")
    assert "facts of 1 host" in typed(host, f"python3 {host_program.NAME} facts")
    typed(host, "gpuprov rollback")
    assert host.snapshot("/etc/docker") == before
