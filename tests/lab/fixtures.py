"""The lab for pytest: hosts that boot when a test asks for them, and the command line as a user would type it."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import simgpu
from tests.lab import command_line
from tests.lab.command_line import GPUPROV
from tests.lab.drivers import driver_variables
from tests.lab.host import Host, HostRequest
from tests.lab.lab import REPOSITORY, Lab, free_lab
from tests.lab.rpm_repository import build_rpm_repository

DRIVER = simgpu.DRIVER_VERSION
_HOSTS = {
    "main": HostRequest("main", gpus=2, bind=(str(REPOSITORY),)),
    "ops": HostRequest("ops", gpus=1, user="ops", password="correct horse", docker=False, archive=True),
    "bare": HostRequest("bare", gpus=0, python=False, archive=True),
    "bullseye": HostRequest("bullseye", release="bullseye", gpus=1),
    "trixie": HostRequest("trixie", release="trixie", gpus=2),
    "twin": HostRequest("twin", gpus=2),
    "sid": HostRequest("sid", release="sid", gpus=2, bind=(str(REPOSITORY),), archive=True),
}
_RPM_HOSTS = {
    "rocky": HostRequest("rocky", release="rpm", gpus=2, os_release="rocky-9.5"),
    "fedora": HostRequest("fedora", release="rpm", gpus=1, os_release="fedora-38"),
    "opensuse": HostRequest("opensuse", release="rpm", gpus=1, os_release="opensuse-tumbleweed"),
    "alma": HostRequest("alma", release="rpm", gpus=1, os_release="almalinux-8.10"),
    "leap": HostRequest("leap", release="rpm", gpus=1, os_release="opensuse-leap-15.6"),
    "sles": HostRequest("sles", release="rpm", gpus=1, os_release="sles-16.0"),
}


class Hosts(Mapping[str, Host]):
    """Hosts by name. The first who asks for one boots it; after `stop`, all are pristine again."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._up: set[str] = set()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name] if name in self._up else self.fresh(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def is_saved(self, name: str) -> bool:
        """Say whether a host has a saved state, without booting it."""
        return self._hosts[name].is_saved

    def fresh(self, name: str, *, saved: bool = False) -> Host:
        """Return a host that has just booted from its pristine files, or its saved ones."""
        host = self._hosts[name]
        host.reset(saved=saved)
        self._up.add(name)
        return host

    def stop(self) -> None:
        """Pull the plugs of all hosts."""
        for name in self._up:
            self._hosts[name].kill()
        self._up.clear()


@dataclass(frozen=True)
class Site:
    """A lab, its hosts by name, and inventories that name them."""

    lab: Lab
    hosts: Hosts
    directory: Path
    variables: dict[str, Any] = field(default_factory=dict)

    def fresh(self, name: str) -> Host:
        """Return a host as it is before anything is installed."""
        return self.hosts.fresh(name)

    def installed(self, name: str) -> Host:
        """Return a host that `gpuprov install` has just set up; it is done once, and kept for all who ask."""
        if not self.hosts.is_saved(name):
            host = self.fresh(name)
            gpuprov_succeeds("install", "--hosts", self.inventory(name))
            host.save()
        return self.hosts.fresh(name, saved=True)

    def inventory(self, *names: str, **variables: Any) -> Path:
        """Write an inventory with these hosts; `variables` add to, or with None take away from, the lab's own."""
        merged = {key: value for key, value in {**self.variables, **variables}.items() if value is not None}
        hosts = {name: {"ansible_host": self.hosts[name].address} for name in names}
        path = self.directory / f"{'-'.join(names)}.yml"
        path.write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": merged}}))
        return path


def patience(words: Sequence[object]) -> tuple[str, ...]:
    """Return what a call over SSH needs more on a busy machine, whose hosts may say nothing for ten seconds."""
    # `bundle` reads an inventory too, but connects to nobody; `hook explain` has no such option.
    connects = "--hosts" in words and words[0] not in ("bundle", "hook")
    return ("--connect-timeout", "60") if connects and "--connect-timeout" not in words else ()


def gpuprov(*words: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line; stdout and stderr come together, as a user sees them."""
    return command_line.run((*words, *patience(words)), timeout)


def gpuprov_succeeds(*words: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line, which must end with exit code 0."""
    done = gpuprov(*words, timeout=timeout)
    assert done.returncode == 0, done.stdout
    return done


def gpuprov_started(*words: object) -> subprocess.Popen[str]:
    """Start the command line and return at once; stdout and stderr come together."""
    argv = [str(GPUPROV), *map(str, words), *patience(words)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def events(printed: str) -> list[dict[str, Any]]:
    """Return the events that a command printed with --json."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.fixture(scope="session")
def apt_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A lab of Debian hosts for all files that this worker runs: the test driver and a signed repository served."""
    with running(_HOSTS, tmp_path_factory.mktemp("inventories")) as made:
        yield made


@pytest.fixture(scope="session")
def rpm_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The same of hosts with dnf and zypper, and a signed rpm repository."""
    with running(_RPM_HOSTS, tmp_path_factory.mktemp("inventories"), "rpm") as made:
        yield made


@pytest.fixture(scope="module")
def site(apt_lab: Site) -> Iterator[Site]:
    """The Debian hosts, none of which has been touched by another file."""
    yield apt_lab
    apt_lab.hosts.stop()


@pytest.fixture(scope="module")
def rpm_site(rpm_lab: Site) -> Iterator[Site]:
    """The hosts with dnf and zypper, none of which has been touched by another file."""
    yield rpm_lab
    rpm_lab.hosts.stop()


@contextlib.contextmanager
def running(requests: Mapping[str, HostRequest], directory: Path, repository: str = "apt") -> Iterator[Site]:
    """Give a lab of these hosts and all that inventories need; take it down in the end."""
    with free_lab() as lab:
        hosts = Hosts(lab.prepare(list(requests.values())))
        if repository == "rpm":
            build_rpm_repository(lab.www / "rpm", lab.directory / "gnupg")
        variables = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(lab.key),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={lab.known_hosts}",
            **driver_variables(lab),
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
        yield Site(lab, hosts, directory, variables)
