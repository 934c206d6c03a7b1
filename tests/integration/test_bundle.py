"""Hosts without a network: a bundle from the real mirror, and a real host that has nothing else to install from."""

import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpg import signing_key
from tests.integration.dockerd import docker_host
from tests.integration.test_ansible import play, task_states
from tests.integration.test_install import etc, packages
from tests.lab import Host
from tests.lab.fixtures import DRIVER, Site, gpuprov, gpuprov_succeeds
from tests.lab.host import differences
from tests.lab.sources import source_lines
from tests.simgpu.cuda_run import build_cuda_run

pytestmark = [pytest.mark.lab, pytest.mark.root]
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_IMAGE = "site/app:1"
# SSH goes on; every other packet that the host would send is refused.
CUT_OFF = (
    "ip route del default; rm -f /etc/resolv.conf; "
    "iptables -I OUTPUT -o host0 -p tcp --sport 22 -j ACCEPT; iptables -I OUTPUT 2 -o host0 -j REJECT"
)


@dataclass(frozen=True)
class Made:
    """A signed bundle, the fingerprint of its key, the kernel whose headers it holds, and the command that made it."""

    file: Path
    fingerprint: str
    kernel: str
    words: tuple[str, ...]


def inventory(site: Site, kernel: str, name: str = "ops") -> Path:
    """Write an inventory that asks for the headers too: nothing is built in a container, but they can be installed."""
    login: dict[str, Any] = {"ansible_user": "ops", "ansible_become_password": "correct horse"} if name == "ops" else {}
    wanted = ["site-gpu-tools", f"linux-headers-{kernel}", "dkms", "gcc"]
    return site.inventory(name, **login, gpuprov_packages=wanted)


def newest_kernel(host: Host) -> str:
    """Return the release of the newest kernel that the mirror has headers for."""
    host.ssh("apt-get -qq update")
    found = re.search(r"Depends: linux-headers-(\S+)", host.ssh("apt-cache depends linux-headers-amd64").stdout)
    assert found is not None
    return found[1]


def source_words(release: str) -> list[str]:
    sources = [line.replace("deb ", f"deb [signed-by={_KEYRING}] ", 1) for line in source_lines(release)]
    return [word for line in sources for word in ("--source", line)]


def create_words(site: Site, kernel: str) -> tuple[str, ...]:
    """Return the command that makes a bundle of what the inventory asks for, from this machine's own mirror."""
    hosts = ("--hosts", str(inventory(site, kernel)))
    return ("bundle", "create", "--distro", "debian-12", *hosts, "--kernel", kernel, *source_words("bookworm"))


@pytest.fixture(scope="module")
def made(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("bundle")
    home = folder / "gnupg"
    fingerprint = signing_key(home, "ops@example.org")
    kernel = newest_kernel(site.hosts["ops"])
    words = create_words(site, kernel)
    with pytest.MonkeyPatch.context() as patch, docker_host() as docker:
        docker.docker("import", "-", _IMAGE, stdin=one_file())
        patch.setenv("GNUPGHOME", str(home))
        patch.setenv("DOCKER_HOST", docker.socket)
        done = gpuprov(*words, "--image", _IMAGE, "--sign", "ops@example.org", "-o", folder / "bundle.tar")
    assert done.returncode == 0, done.stdout
    return Made(folder / "bundle.tar", fingerprint, kernel, words)


def one_file() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        entry = tarfile.TarInfo("hello")
        entry.size = 5
        archive.addfile(entry, io.BytesIO(b"hello"))
    return content.getvalue()


@contextmanager
def without_network(host: Host) -> Iterator[Host]:
    """Give the host pristine and without any way out; other tests get it back as it was."""
    host.reset()
    host.ssh(CUT_OFF)
    yield host
    host.reset()


@pytest.fixture
def cut_off(site: Site) -> Iterator[Host]:
    """A host without docker, and without any way out."""
    with without_network(site.hosts["ops"]) as host:
        yield host


def install(site: Site, made: Made, *words: str, name: str = "ops") -> subprocess.CompletedProcess[str]:
    bundle = ("--bundle", made.file, "--bundle-key", made.fingerprint)
    return gpuprov("install", "--hosts", inventory(site, made.kernel, name), *bundle, *words)


def apt_files(host: Host) -> dict[str, Any]:
    return host.snapshot("/var/lib/apt", "/var/cache/apt", "/etc/apt")


def test_playbook_installs_without_network_and_the_command_line_agrees(site: Site, made: Made, cut_off: Host) -> None:
    """From bare by the playbook; a second run, verification and the rollback by the command line."""
    before = apt_files(cut_off)
    without = gpuprov("install", "--hosts", inventory(site, made.kernel))
    assert without.returncode == 1, "the host has a way out, so this test would prove nothing"
    pristine = (etc(cut_off), packages(cut_off))
    foreseen = by_playbook(site, made, "--check")
    assert foreseen.returncode == 0, foreseen.stdout
    assert task_states(foreseen)["engine"] == "changed"
    assert (etc(cut_off), packages(cut_off)) == pristine
    refused = by_playbook(site, made, key="A" * 40)
    assert "the bundle is signed by another key than the one that is pinned" in refused.stdout
    done = by_playbook(site, made)
    assert done.returncode == 0, done.stdout
    assert [path.name for path in (cut_off.root / "home/ops/.ansible/tmp").iterdir()] == []
    again = install(site, made)
    assert again.returncode == 0 and "0 changes" in again.stdout, again.stdout
    # Copied for the playbook, and never again.
    assert "uploading" not in again.stdout and "correct horse" not in again.stdout
    gpuprov_succeeds("verify", "--hosts", inventory(site, made.kernel))
    installed = packages(cut_off)
    assert {f"linux-headers-{made.kernel}\t", "docker.io\t", "site-gpu-tools\t", "dkms\t"} <= set(
        re.findall(r"^\S+\t", installed, re.MULTILINE)
    )
    assert DRIVER in cut_off.ssh("nvidia-smi").stdout
    assert _IMAGE in cut_off.ssh("docker images --format '{{.Repository}}:{{.Tag}}'").stdout
    assert differences(before, apt_files(cut_off)) <= {"/var/lib/apt/extended_states"}
    left = [path.name for path in (cut_off.root / "var/cache/gpuprov").iterdir()]
    assert [name for name in left if not name.startswith("agent-") and name != "driver"] == [
        name for name in left if re.fullmatch(r"bundle-[0-9a-f]{32}-\d+\.tar", name)
    ]
    by_the_agent_in_it(cut_off)
    gpuprov_succeeds("rollback", "--hosts", inventory(site, made.kernel))
    assert packages(cut_off) == pristine[1]
    assert not [path for path in differences(pristine[0], etc(cut_off)) if path.startswith("/etc/apt")]


def by_playbook(site: Site, made: Made, *words: str, key: str = "") -> subprocess.CompletedProcess[str]:
    """Run site.yml with the bundle, by a user whose sudo asks for a password."""
    given = ("-e", f"gpuprov_play_bundle={made.file}", "-e", f"gpuprov_play_bundle_key={key or made.fingerprint}")
    return play("site", inventory(site, made.kernel), *given, "--skip-tags", "verify", *words)


def by_the_agent_in_it(host: Host) -> None:
    """A host that no controller reaches: the bundle on it brings the program too."""
    host.ssh("tar -xf /var/cache/gpuprov/bundle-*.tar -C /root agent/gpuprov-agent.pyz")
    bundle = host.ssh("ls /var/cache/gpuprov/bundle-*.tar").stdout.strip()
    request = json.dumps({"command": "install", "bundle": bundle})
    said = host.ssh("python3 -I /root/agent/gpuprov-agent.pyz", stdin=request + "\n").stdout.splitlines()
    last = json.loads(said[-1])
    assert (last["event"], last["exit_code"], last["changed"]) == ("Finished", 0, 0), said


@pytest.mark.parametrize(
    ("release", "distro"), [pytest.param("bullseye", "debian-11", marks=pytest.mark.long), ("trixie", "debian-13")]
)
def test_other_releases(site: Site, tmp_path: Path, release: str, distro: str) -> None:
    """Debian 11 has apt 2.2 and Python 3.9; Debian 13 has apt 3.0, which checks signatures in another way.

    The CUDA toolkit comes from its .run, which the one inventory names by its URL, and the other leaves to the bundle.
    """
    cuda = build_cuda_run(site.lab.www if release == "trixie" else tmp_path)
    digest = hashlib.sha256(cuda.read_bytes()).hexdigest()
    by_url = {"gpuprov_cuda_url": f"{site.lab.url}/{cuda.name}", "gpuprov_cuda_sha256": digest}
    more, file = (by_url, ()) if release == "trixie" else ({}, ("--cuda-file", cuda))
    packages_wanted = ["site-gpu-tools", "jq"]
    wanted = site.inventory(
        release, gpuprov_docker="preinstalled", gpuprov_packages=packages_wanted, gpuprov_cuda="12.4", **more
    )
    bundle = tmp_path / "bundle.tar"
    words = ("--distro", distro, "--hosts", wanted, *file, *source_words(release), "-o", bundle)
    gpuprov_succeeds("bundle", "create", *words)
    with without_network(site.hosts[release]) as host:
        host.add_archive()
        gpuprov_succeeds("install", "--hosts", wanted, "--bundle", bundle)
        assert "jq\t" in packages(host)
        assert host.ssh("sh -lc 'nvcc'").stdout.strip() == "Cuda compilation tools, release 12.4"
        assert "0 changes" in gpuprov("install", "--hosts", wanted, "--bundle", bundle).stdout
        gpuprov_succeeds("verify", "--hosts", wanted)


def test_a_bundle_for_another_release_is_refused(site: Site, made: Made) -> None:
    host = site.hosts["trixie"]
    before = (etc(host), packages(host))
    done = install(site, made, name="trixie")
    assert done.returncode == 1
    assert "the bundle is for debian 12 on x86_64, this host is another" in done.stdout
    assert "ID=debian VERSION_ID=13" in done.stdout
    assert "gpuprov bundle create --distro debian-13" in done.stdout
    assert (etc(host), packages(host)) == before


def test_a_tampered_bundle_is_refused_before_any_host_is_asked(site: Site, made: Made, tmp_path: Path) -> None:
    content = bytearray(made.file.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "bundle.tar").write_bytes(content)
    done = gpuprov("install", "--hosts", inventory(site, made.kernel), "--bundle", tmp_path / "bundle.tar")
    assert done.returncode == 1
    assert "a file in the bundle was tampered with or damaged" in done.stdout
    assert "ops" not in done.stdout


def test_same_input_gives_the_same_files_except_the_key(made: Made, tmp_path: Path) -> None:
    again = tmp_path / "again.tar"
    gpuprov_succeeds(*made.words, "-o", again)
    shown = [json.loads(gpuprov("bundle", "show", file, "--json").stdout) for file in (made.file, again)]
    one, two = ({file["path"]: file["sha256"] for file in manifest["files"]} for manifest in shown)
    # A key made for each bundle, whose secret half is deleted, and what it signed. The first has an image, too.
    assert differences(one, two) & set(two) == {"repository/InRelease", "repository/key.gpg"}
    assert {"keys/site.gpg", "agent/gpuprov-agent.pyz"} <= set(one)


def test_a_mirror_signed_by_a_key_that_is_not_named_is_refused(made: Made, tmp_path: Path) -> None:
    (tmp_path / "empty.gpg").touch()
    words = [word.replace(_KEYRING, str(tmp_path / "empty.gpg")) for word in made.words]
    done = gpuprov(*words, "-o", tmp_path / "bundle.tar")
    assert done.returncode == 1
    assert "the repositories' lists can't be had" in done.stdout
    assert "is not signed" in done.stdout or "NO_PUBKEY" in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "empty.gpg"]
