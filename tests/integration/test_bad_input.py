"""What can be wrong on a host before a run: a clear error, the right exit code, and nothing changed there.

What is wrong with a login, sudo or the inventory is tried in test_fleet.py, test_refused_logins.py and unit tests.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov

pytestmark = [pytest.mark.lab, pytest.mark.root]


@dataclass(frozen=True)
class Case:
    """A mistake: on which host, how it is made and unmade there, by which variables, and what is said of it."""

    exit_code: int
    says: tuple[str, ...]
    host: str = "ops"
    break_: str = ""
    fix: str = ""
    variables: dict[str, Any] = field(default_factory=dict)


CASES = {
    "no GPU": Case(
        1,
        ("there is no NVIDIA GPU in this machine", "lspci -d 10de:"),
        break_="umount /sys/bus/pci/devices",
        fix="mount --bind /usr/lib/simgpu/sys/bus/pci/devices /sys/bus/pci/devices",
    ),
    "driver not loaded outside": Case(
        1,
        ("the NVIDIA driver is not loaded on the container host",),
        break_="umount /proc/driver",
        fix="mount --bind /usr/lib/simgpu/proc/driver /proc/driver",
    ),
    "another version loaded outside": Case(
        1,
        ("535.261.03 is asked for, but the container host runs 550.163.01", 'gpuprov_driver_version: "550.163.01"'),
        variables={"gpuprov_driver_version": "535.261.03"},
    ),
    "kernel without modules": Case(
        1, ("this kernel takes no modules", "/proc/modules"), variables={"gpuprov_kernel_modules": "build"}
    ),
    "no version given": Case(
        1, ("which driver version to install is not said",), variables={"gpuprov_driver_version": None}
    ),
    "unsupported distribution": Case(
        1,
        ("Arch Linux is not supported", "supported are: debian 11, 12, 13"),
        break_="cp -a --remove-destination /etc/os-release /root/os-release; "
        "printf 'ID=arch\\nPRETTY_NAME=\"Arch Linux\"\\n' > /usr/lib/os-release.arch; "
        "ln -sf /usr/lib/os-release.arch /etc/os-release; mv /usr/lib/os-release /usr/lib/os-release.real; "
        "cp /usr/lib/os-release.arch /usr/lib/os-release",
        fix="mv /usr/lib/os-release.real /usr/lib/os-release; rm /usr/lib/os-release.arch /root/os-release; "
        "ln -sf ../usr/lib/os-release /etc/os-release",
    ),
    "unreachable host": Case(4, ("no route",), variables={"ansible_host": "PREFIX.199"}),
    "no Python": Case(1, ("--bootstrap-python",), host="bare"),
    "wrong digest": Case(
        1, ("is not the file that was asked for",), variables={"gpuprov_driver_sha256": "0" * 64}
    ),
    "no such file": Case(
        1, ("HTTP 404", "check version and URL"),
        variables={"gpuprov_driver_url": "URL/nothing.run", "gpuprov_driver_sha256": "0" * 64},
    ),
    "wrong key": Case(
        1,
        ("the repository's key is not the one that is pinned",),
        variables={
            "gpuprov_repositories": [
                {"name": "site", "uri": "URL/apt", "key_url": "URL/apt/key.asc", "key_fingerprint": "A" * 40}
            ]
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _pristine(site: Site) -> None:
    """The hosts that are broken here have neither docker nor, one of them, Python: other tests may have given them."""
    for name in ("ops", "bare"):
        site.fresh(name)


def state(host: Host) -> tuple[object, ...]:
    """Return what tells whether a host was changed: configuration, packages, the driver, docker's process."""
    # Earlier changes of a failed run stand, as documented: the site's repository is one.
    kept = ("ld.so.cache", "gpuprov-site", "/etc/apt/keyrings")
    commands = ("dpkg-query -W", "ls /usr/bin/nvidia-smi", "pidof dockerd")
    return (
        {path: value for path, value in host.snapshot("/etc").items() if not any(part in path for part in kept)},
        *(host.ssh(command, check=False).stdout for command in commands),
    )


@pytest.mark.parametrize("name", CASES)
def test_bad_input(site: Site, name: str) -> None:
    case = CASES[name]
    host = site.hosts[case.host]
    # What only the lab that runs knows.
    text = json.dumps(case.variables).replace("PREFIX", site.lab.network.prefix).replace("URL", site.lab.url)
    variables = json.loads(text)
    # Without packages of its own, nothing comes before the driver.
    inventory = site.inventory(case.host, **{"gpuprov_packages": None, **variables})
    if "ansible_host" in variables:
        text = inventory.read_text().replace(
            f"ansible_host: {host.address}", f"ansible_host: {variables['ansible_host']}"
        )
        inventory.write_text(text)
    if case.break_:
        host.ssh(case.break_)
    try:
        before = state(host) if case.host != "bare" else ()
        done = gpuprov("install", "--hosts", inventory)
        after = state(host) if case.host != "bare" else ()
    finally:
        if case.fix:
            host.ssh(case.fix)
    for sentence in case.says:
        assert sentence.lower() in done.stdout.lower()
    assert done.returncode == case.exit_code, done.stdout
    assert "Traceback" not in done.stdout
    assert after == before


def test_bootstrap_python_installs_what_is_missing(site: Site) -> None:
    """On a host without Python; it has no GPU, so the run then ends there, saying so."""
    done = gpuprov("install", "--hosts", site.inventory("bare"), "--bootstrap-python")
    assert "there is no NVIDIA GPU in this machine" in done.stdout
    assert done.returncode == 1
    assert site.hosts["bare"].ssh("python3 --version").stdout.startswith("Python 3")
