"""The driver's modules built by real DKMS against Debian's own headers, on Debian's releases; none is loaded."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuprov.driver.module_proof import dkms_states
from tests import simgpu
from tests.lab import Host, HostRequest, Lab
from tests.lab.fixtures import DRIVER, GPUPROV

pytestmark = [pytest.mark.lab, pytest.mark.root]
_NUMBER = 3
_RELEASES = ("bullseye", "trixie")
# A host of the lab has no kernel of its own, so it is told which one it runs, and that what is to be loaded is loaded.
# apt's newest of the cloud kernels: their headers are the smallest.
_PRETEND = r"""
set -eu
apt-get -qq update
kernel=$(apt-cache depends linux-headers-cloud-amd64 | sed -n 's/.*Depends: linux-headers-//p')
printf '#!/bin/sh\n[ "$*" = -r ] && echo %s || exec /bin/uname "$@"\n' "$kernel" > /usr/local/bin/uname
printf '#!/bin/sh\n' > /usr/local/sbin/modprobe
chmod 755 /usr/local/bin/uname /usr/local/sbin/modprobe
echo "$kernel"
"""
_INSTALL = """
import sys
sys.path.insert(0, "/root/agent.pyz")
from dataclasses import replace
from gpuprov.apply import apply_changes
from gpuprov.errors import GpuprovError
from gpuprov.facts import gather
from gpuprov.journal import new_journal
from gpuprov.plan import make_plan
from gpuprov.spec import parse_spec
from gpuprov.system import System

class Metal(System):
    def kernel_release(self):
        return sys.argv[1]

system = Metal()
spec = parse_spec({"driver_version": sys.argv[2], "driver_url": "/root/driver.run", "kernel_modules": "build"})

def plan():
    facts = gather(system)
    facts = replace(facts, kernel=replace(facts.kernel, container="", takes_modules=True))
    return make_plan(facts, spec, ("packages", "driver"))

planned = plan()
for problem in planned.problems:
    print("problem:", problem.what, problem.evidence)
journal = new_journal(system, "install")
try:
    apply_changes([change.change for change in planned.changes], system, journal, lambda event: None)
    print("left:", [change.change.summary() for change in plan().changes])
except GpuprovError as error:
    print("error:", error)
journal.end("done")
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    lab = Lab(_NUMBER)
    with Path(f"/run/lock/gpuprov-lab{_NUMBER}").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            made = lab.up([HostRequest(f"d-{release}", release=release, gpus=1, docker=False) for release in _RELEASES])
            run_file = simgpu.build_run(tmp_path_factory.mktemp("run"))
            agent = run_file.with_name("agent.pyz")
            subprocess.run((str(GPUPROV), "agent", "build", "-o", str(agent)), check=True, timeout=120)
            for host in made:
                (host.root / "root/driver.run").write_bytes(run_file.read_bytes())
                (host.root / "root/agent.pyz").write_bytes(agent.read_bytes())
            yield dict(zip(_RELEASES, made, strict=True))
        finally:
            lab.down()


def install(host: Host) -> tuple[str, str]:
    """Install packages and driver; return the kernel and what was said."""
    kernel = host.ssh(_PRETEND, timeout=300).stdout.strip()
    done = host.ssh(("python3", "-c", _INSTALL, kernel, DRIVER), check=False, timeout=600)
    return kernel, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(hosts: dict[str, Host]) -> dict[str, tuple[str, str]]:
    """The kernel of each host and what its installation said: all at once, for each waits for the mirror and gcc."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(_RELEASES, pool.map(install, hosts.values()), strict=True))


@pytest.mark.parametrize("release", _RELEASES)
def test_modules_are_built_by_dkms_for_the_kernel_whose_headers_were_brought(
    hosts: dict[str, Host], installed: dict[str, tuple[str, str]], release: str
) -> None:
    kernel, said = installed[release]
    assert said == "left: []\n"
    host = hosts[release]
    assert host.ssh(f"dpkg-query -W -f '${{Status}}' linux-headers-{kernel}").stdout == "install ok installed"
    assert dkms_states(host.ssh("dkms status").stdout, DRIVER) == {kernel: "installed"}
    for module in ("nvidia", "nvidia-uvm"):
        found = host.ssh(f"modinfo -k {kernel} {module}").stdout
        fields = dict(line.split(":", 1) for line in found.splitlines() if ":" in line)
        assert fields["filename"].strip().startswith(f"/lib/modules/{kernel}/updates/dkms/{module}.ko")
        assert (fields["version"].strip(), fields["vermagic"].split()[0]) == (DRIVER, kernel)


def test_a_module_that_does_not_compile_is_named_with_the_log_of_its_build(
    hosts: dict[str, Host], installed: dict[str, tuple[str, str]]
) -> None:
    """As with a driver that is too old for its kernel: the compiler stops at a header."""
    host, (kernel, _) = hosts["trixie"], installed["trixie"]
    common = f"/usr/src/linux-headers-{kernel.replace('-cloud-amd64', '-common')}"
    host.ssh(f"echo '#error another kernel' >> {common}/include/linux/proc_fs.h")
    host.ssh("mkdir -p /var/lib/gpuprov && touch /var/lib/gpuprov/driver-incomplete")
    said = host.ssh(("python3", "-c", _INSTALL, kernel, DRIVER), check=False, timeout=600).stdout
    assert "DKMS could not build the kernel modules" in said
    assert "make.log" in said
