"""An image that is built without a GPU: installed, cleaned, and its copies booted with GPUs and without."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import Host, HostRequest
from tests.lab.command_line import GPUPROV
from tests.lab.drivers import leave_nodes_to_gpuprov
from tests.lab.fixtures import Site, gpuprov_succeeds, running
from tests.lab.lab import REPOSITORY
from tests.lab.shell import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.root]
# As an image has them: kernels of which none runs. Of apt's two newest, whose headers are the smallest.
_KERNELS = r"""
set -eu
apt-get -qq update
kernels=$(apt-cache pkgnames linux-headers-6.1.0- | grep -E -- '-[0-9]+-cloud-amd64$' | sort -V | tail -n 2)
for kernel in $kernels; do
    kernel=${kernel#linux-headers-}
    mkdir -p /boot "/lib/modules/$kernel"
    : > "/boot/vmlinuz-$kernel"
    echo "$kernel"
done
"""
_UNITS = ("gpuprov-nodes.service", "gpuprov-refresh.service", "gpuprov-refresh.path")
_NODES = ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")


@dataclass(frozen=True)
class Built:
    """A host whose disk became an image and that was switched off: its kernels, and what each command said."""

    site: Site
    host: Host
    kernels: tuple[str, ...]
    said: dict[str, tuple[int, str]]

    @property
    def disk(self) -> Path:
        """What was written on the base's file system."""
        return self.host._saved / "upper"


@pytest.fixture(scope="module")
def image_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    requests = {
        "builder": HostRequest("builder", gpus=0, bind=(str(REPOSITORY),), archive=True),
        "withgpus": HostRequest("withgpus", gpus=2),
        "without": HostRequest("without", gpus=0),
    }
    with running(requests, tmp_path_factory.mktemp("inventories")) as site:
        yield site


@pytest.fixture(scope="module")
def built(image_site: Site) -> Built:
    """All in one login: when the image is clean, the next login would find no host keys."""
    host = image_site.fresh("builder")
    kernels = tuple(host.ssh(_KERNELS, timeout=300).stdout.split())
    ours = {key: value for key, value in image_site.variables.items() if key.startswith("gpuprov_")}
    wanted = {**ours, "gpuprov_image_gpus": "ampere", "gpuprov_image_nvswitch": False}
    (host.root / "root/image.json").write_text(json.dumps(wanted))
    commands = {
        "unsaid": "install --image -e gpuprov_driver_version=550.163.01",
        "check": "install --image -e @/root/image.json --check --diff",
        "install": "install --image -e @/root/image.json",
        "second": "install --image -e @/root/image.json --json",
        "verify": "verify",
        "doctor": "doctor",
    }
    lines = [
        f"{GPUPROV} {words} > /run/{name}.said 2>&1; echo $? > /run/{name}.code" for name, words in commands.items()
    ]
    script = "\n".join(["cd /root", *lines, "cd /run; grep -H '' *.code *.said; systemctl poweroff"])
    told = host.ssh(script, timeout=900, check=False).stdout
    said = {name: _said(told, name) for name in commands}
    host.save()
    return Built(image_site, host, kernels, said)


def _said(told: str, name: str) -> tuple[int, str]:
    code = [line for line in told.splitlines() if line.startswith(f"{name}.code:")]
    text = [line.partition(":")[2] for line in told.splitlines() if line.startswith(f"{name}.said:")]
    return (int(code[0].partition(":")[2]) if code else -1), "\n".join(text)


def test_what_decides_something_and_is_not_said_is_asked_for(built: Built) -> None:
    code, said = built.said["unsaid"]
    assert code == 1, said
    assert "which kernel modules the image needs is not said" in said
    assert "next: set gpuprov_image_gpus" in said


def test_a_dry_run_tells_what_would_be_removed_and_removes_nothing(built: Built) -> None:
    code, said = built.said["check"]
    assert code == 0, said
    assert "empty /etc/machine-id" in said and "remove /etc/ssh/ssh_host_ed25519_key" in said


def test_the_image_is_installed_and_a_second_run_changes_nothing(built: Built) -> None:
    code, said = built.said["install"]
    assert code == 0, said
    assert f"build the driver's modules for {', '.join(built.kernels)}; load none" in said
    code, said = built.said["second"]
    assert code == 0, said
    assert json.loads(said.splitlines()[-1])["hosts"][0]["changed"] == 0, said


def test_each_installed_kernel_has_modules_and_none_is_the_builders(built: Built) -> None:
    for kernel in built.kernels:
        modules = built.disk / "lib/modules" / kernel
        folder = modules if modules.exists() else built.disk / "usr/lib/modules" / kernel
        assert "updates/dkms/nvidia.ko" in (folder / "modules.dep").read_text()


def test_what_would_be_two_machines_identity_is_gone(built: Built) -> None:
    assert (built.disk / "etc/machine-id").read_bytes() == b""
    assert not [path for path in (built.disk / "etc/ssh").glob("ssh_host_*") if path.is_file()]
    assert not (built.disk / "etc/cdi/nvidia.json").exists()
    assert list((built.disk / "etc/apt/keyrings").glob("gpuprov-*")), "the repositories' keys stay"
    # Neither does the journal, which stays in the image, hold what was removed.
    for path in (built.disk / "var/lib/gpuprov").rglob("*"):
        assert (
            not path.is_file()
            or b"ssh_host_ed25519_key" not in path.read_bytes()
            or b"content"
            not in next(line for line in path.read_bytes().splitlines() if b"ssh_host_ed25519_key" in line)
        )


def test_on_the_builder_verify_and_doctor_say_what_they_cannot_know(built: Built) -> None:
    code, said = built.said["verify"]
    assert code == 0, said
    assert "there is no GPU in this machine: run gpuprov verify on a copy" in said
    code, said = built.said["doctor"]
    assert code == 0, said
    assert "unknown" in said


def _without_network(root: Path) -> None:
    """Nothing outside the lab's own bridge can be reached, and no repository."""
    network = root / "etc/systemd/network/10-lab.network"
    network.write_text("".join(line for line in network.read_text().splitlines(True) if "Gateway" not in line))
    (root / "etc/apt/sources.list").write_text("")


def _with_kernel_that_makes_no_nodes(root: Path) -> None:
    _without_network(root)
    leave_nodes_to_gpuprov(root)


@pytest.fixture(scope="module")
def with_gpus(built: Built) -> Host:
    """A copy whose first boot finds two GPUs."""
    host = built.site.hosts._hosts["withgpus"]
    host.start_copy(built.host, _with_kernel_that_makes_no_nodes)
    built.site.hosts._up.add("withgpus")
    host.wait_until_up()
    host.wait_until_settled()
    return host


def test_the_first_boot_brings_nodes_and_specification_and_verify_is_green(with_gpus: Host, built: Built) -> None:
    found = with_gpus.ssh("ls /dev/nvidia0 /dev/nvidia1 /dev/nvidiactl /dev/nvidia-uvm; systemctl is-system-running")
    assert found.stdout.split()[-1] == "running", with_gpus.ssh("systemctl --failed", check=False).stdout
    assert "GPU-" in with_gpus.ssh("cat /etc/cdi/nvidia.json").stdout
    assert len(with_gpus.ssh("cat /etc/machine-id").stdout.strip()) == 32
    done = gpuprov_succeeds("verify", "--hosts", built.site.inventory("withgpus"))
    assert "containers see this host's GPUs: docker" in done.stdout


def test_docker_waits_for_nodes_and_specification_alone(with_gpus: Host) -> None:
    before = with_gpus.ssh("systemctl show docker --property=After --value").stdout.split()
    ours = sorted(name for name in before if "gpuprov" in name)
    assert ours == ["gpuprov-nodes.service", "gpuprov-refresh.service"]


def test_without_gpus_it_boots_clean_and_makes_its_own_identity(built: Built) -> None:
    host = built.site.hosts._hosts["without"]

    def bare(root: Path) -> None:
        _without_network(root)
        for key in (root / "etc/ssh").glob("ssh_host_*"):
            key.unlink()

    host.start_copy(built.host, bare)
    built.site.hosts._up.add("without")
    # The host has made keys that nobody here knows yet.
    argv = [word for word in host.ssh_argv() if not word.startswith(("UserKnownHostsFile=", "StrictHost"))]
    argv = [*(word for i, word in enumerate(argv) if not (word == "-o" and i + 1 < len(argv) and argv[i + 1] == "-o"))]
    argv[1:1] = ["-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no"]

    def ssh(line: str) -> str:
        return subprocess.run([*argv, line], capture_output=True, text=True, timeout=60, check=False).stdout

    wait_for("SSH", lambda: "up" in ssh("echo up"))
    assert ssh("systemctl is-system-running --wait").strip() == "running", ssh("systemctl --failed")
    assert ssh("systemctl --failed --no-legend").strip() == ""
    said = ssh("journalctl -q --output=cat -u gpuprov-nodes")
    assert "there is no NVIDIA GPU in this copy of the image: nothing to do" in said
    assert ssh("ls /etc/ssh/ssh_host_ed25519_key /etc/cdi/nvidia.json").split() == ["/etc/ssh/ssh_host_ed25519_key"]
