"""The lab for pytest: hosts booted once a session, and the command line as a user would type it against them."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import simgpu
from tests.lab.host import Host, HostRequest
from tests.lab.lab import REPOSITORY, Lab
from tests.lab.rpm_repository import build_rpm_repository

GPUPROV = Path(sys.executable).with_name("gpuprov")
DRIVER = simgpu.DRIVER_VERSION
# One lab for the whole session, beside the demo's.
_NUMBER = 1
_HOSTS = {
    "main": HostRequest("main", gpus=2, bind=(str(REPOSITORY),)),
    "ops": HostRequest("ops", gpus=1, user="ops", password="correct horse", docker=False),
    "bare": HostRequest("bare", gpus=0, python=False),
    "bullseye": HostRequest("bullseye", release="bullseye", gpus=1),
    "trixie": HostRequest("trixie", release="trixie", gpus=2),
    "twin": HostRequest("twin", gpus=2),
}
_RPM_NUMBER = 5
_RPM_HOSTS = {
    "rocky": HostRequest("rocky", release="rpm", gpus=2, os_release="rocky-9.5"),
    "fedora": HostRequest("fedora", release="rpm", gpus=1, os_release="fedora-38"),
    "opensuse": HostRequest("opensuse", release="rpm", gpus=1, os_release="opensuse-tumbleweed"),
}


@dataclass(frozen=True)
class Site:
    """A lab, its hosts by name, and inventories that name them."""

    lab: Lab
    hosts: dict[str, Host]
    directory: Path
    variables: dict[str, Any] = field(default_factory=dict)

    def inventory(self, *names: str, **variables: Any) -> Path:
        """Write an inventory with these hosts; `variables` add to, or with None take away from, the lab's own."""
        merged = {key: value for key, value in {**self.variables, **variables}.items() if value is not None}
        hosts = {name: {"ansible_host": self.hosts[name].address} for name in names}
        path = self.directory / f"{'-'.join(names)}.yml"
        path.write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": merged}}))
        return path


def patience(words: Sequence[object]) -> tuple[str, ...]:
    """Return what a call over SSH needs more on a busy machine, whose hosts may say nothing for ten seconds."""
    # `bundle` reads an inventory too, but connects to nobody.
    connects = "--hosts" in words and words[0] != "bundle"
    return ("--connect-timeout", "60") if connects and "--connect-timeout" not in words else ()


def gpuprov(*words: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line; stdout and stderr come together, as a user sees them."""
    argv = [str(GPUPROV), *(str(word) for word in words), *patience(words)]
    return subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The session's lab: all hosts up, the test driver and a signed repository served."""
    lab = Lab(_NUMBER)
    # Two sessions on one machine, from whatever clone, take turns: bridge and addresses are the machine's.
    with Path(f"/run/lock/gpuprov-lab{_NUMBER}").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield from running(lab, tmp_path_factory.mktemp("inventories"), _HOSTS, "apt")


@pytest.fixture(scope="session")
def rpm_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A lab of hosts with dnf and zypper, the test driver and a signed rpm repository served."""
    lab = Lab(_RPM_NUMBER)
    with Path(f"/run/lock/gpuprov-lab{_RPM_NUMBER}").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        build_rpm_repository(lab.www / "rpm", lab.directory / "gnupg")
        yield from running(lab, tmp_path_factory.mktemp("inventories"), _RPM_HOSTS, "rpm")


def running(lab: Lab, directory: Path, requests: dict[str, HostRequest], repository: str) -> Iterator[Site]:
    """Give a lab with these hosts and all that inventories need; take it down in the end."""
    try:
        hosts = lab.up(list(requests.values()))
        run_file = simgpu.build_run(lab.www)
        variables = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(lab.key),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={lab.known_hosts}",
            "gpuprov_driver_version": DRIVER,
            "gpuprov_driver_url": f"{lab.url}/{run_file.name}",
            "gpuprov_driver_sha256": hashlib.sha256(run_file.read_bytes()).hexdigest(),
            "gpuprov_repositories": [
                {
                    "name": "site",
                    "uri": f"{lab.url}/{repository}",
                    "key_url": f"{lab.url}/{repository}/key.asc",
                    "key_fingerprint": (lab.www / repository / "fingerprint").read_text(),
                }
            ],
            "gpuprov_packages": ["site-gpu-tools"],
        }
        yield Site(lab, {host.name: host for host in hosts}, directory, variables)
    finally:
        lab.down()
