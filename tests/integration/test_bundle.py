"""Hosts without a network: a bundle from the real mirror, and a real host that has nothing else to install from."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpg import signing_key
from tests.integration.test_install import packages
from tests.lab import Host
from tests.lab.fixtures import DRIVER, Site, gpuprov
from tests.lab.sources import source_lines

pytestmark = [pytest.mark.lab, pytest.mark.root]
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# SSH goes on; every packet that the host sends of its own accord is refused and counted.
_CUT_OFF = (
    "ip route del default; rm -f /etc/resolv.conf; "
    "iptables -I OUTPUT -o host0 -p tcp --sport 22 -j ACCEPT; iptables -I OUTPUT 2 -o host0 -j REJECT"
)


def create_words(site: Site, name: str, output: Path, *words: str) -> tuple[str, ...]:
    """Return the command that makes a bundle of what the inventory asks for, from this machine's own mirror."""
    sources = [line.replace("deb ", f"deb [signed-by={_KEYRING}] ", 1) for line in source_lines("bookworm")]
    lines = [word for line in sources for word in ("--source", line)]
    inventory = site.inventory(name, ansible_user="ops", ansible_become_password="correct horse")
    return ("bundle", "create", "--distro", "debian-12", "--hosts", str(inventory), *lines, *words, "-o", str(output))


class Made:
    """A signed bundle, and the fingerprint of its key."""

    def __init__(self, file: Path, fingerprint: str) -> None:
        self.file, self.fingerprint = file, fingerprint


@pytest.fixture(scope="module")
def made(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("bundle")
    home = folder / "gnupg"
    fingerprint = signing_key(home, "ops@example.org")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNUPGHOME", str(home))
        done = gpuprov(*create_words(site, "ops", folder / "bundle.tar", "--sign", "ops@example.org"))
    assert done.returncode == 0, done.stdout
    yield Made(folder / "bundle.tar", fingerprint)
    subprocess.run(("gpgconf", "--homedir", str(home), "--kill", "all"), check=True)


@pytest.fixture
def cut_off(site: Site) -> Host:
    """A pristine host without docker, and without any way out."""
    host = site.hosts["ops"]
    host.reset()
    host.ssh(_CUT_OFF)
    return host


def inventory(site: Site) -> Path:
    return site.inventory("ops", ansible_user="ops", ansible_become_password="correct horse")


def install(site: Site, made: Made, *words: str) -> subprocess.CompletedProcess[str]:
    return gpuprov(
        "install", "--hosts", inventory(site), "--bundle", made.file, "--bundle-key", made.fingerprint, *words
    )


def test_a_host_without_a_network_is_installed_and_the_second_run_is_empty(
    site: Site, made: Made, cut_off: Host
) -> None:
    lists = cut_off.snapshot("/var/lib/apt", "/var/cache/apt", "/etc/apt")
    without = gpuprov("install", "--hosts", inventory(site))
    assert without.returncode == 1, "the host has a way out, so this test would prove nothing"
    done = install(site, made)
    assert done.returncode == 0, done.stdout
    assert "uploading the bundle" in done.stdout
    again = install(site, made)
    assert again.returncode == 0, again.stdout
    assert "0 changes" in again.stdout
    assert "uploading the bundle" not in again.stdout
    verified = gpuprov("verify", "--hosts", inventory(site))
    assert verified.returncode == 0, verified.stdout
    installed = packages(cut_off)
    assert "docker.io\t" in installed and "site-gpu-tools\t" in installed
    assert f"{DRIVER}" in cut_off.ssh("nvidia-smi").stdout
    after = cut_off.snapshot("/var/lib/apt", "/var/cache/apt", "/etc/apt")
    changed = {path for path in {*lists, *after} if lists.get(path) != after.get(path)}
    assert changed <= {"/var/lib/apt/extended_states"}
    names = [path.name for path in (cut_off.root / "var/cache/gpuprov").iterdir()]
    assert [name for name in names if not name.startswith("agent-")] == [
        name for name in names if name.startswith("bundle-") and name.endswith(".tar")
    ]
