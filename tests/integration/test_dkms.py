"""The driver's modules built by real DKMS against Debian's own headers, on Debian's releases; none is loaded.

From the .run on two releases, from NVIDIA's packages (stand-ins with their names and dependencies) on a third.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuprov.driver.kernel import dkms_states
from gpuprov.protocol.codec import dump
from gpuprov.protocol.request import Request
from tests import simgpu
from tests.lab import Host, HostRequest
from tests.lab.command_line import GPUPROV
from tests.lab.fixtures import DRIVER
from tests.lab.lab import free_lab
from tests.lab.nvidia_driver import build_cuda

pytestmark = [pytest.mark.lab, pytest.mark.root]
# Releases of Debian, by where their driver comes from.
_FROM_RUN, _FROM_PACKAGES = ("bullseye", "trixie"), "bookworm"
_RUN_WANTED = {"driver_version": DRIVER, "driver_url": "/root/driver.run", "kernel_modules": "build"}
_NEWER = "580.65.06"
# The key of one host, as an administrator makes it for Secure Boot.
_SIGNING = {"module_signing_key": "/root/mok.key", "module_signing_certificate": "/root/mok.der"}
_MAKE_KEY = (
    "openssl", "req", "-new", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "7", "-subj", "/CN=gpuprov-lab-key",
    "-outform", "DER",
)  # fmt: skip
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
import json
import sys
sys.path.insert(0, "/root/agent.pyz")
from dataclasses import replace
from gpuprov.core.apply import apply_changes
from gpuprov.core.changes import NextAction
from gpuprov.protocol.errors import GpuprovError
from gpuprov.facts.host import gather
from gpuprov.core.journal import new_journal
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.spec import parse_spec
from gpuprov.core.system import System

class Metal(System):
    def kernel_release(self):
        return sys.argv[1]

system = Metal()
spec = parse_spec(json.loads(sys.argv[2]))

def plan():
    facts = gather(system)
    facts = replace(facts, kernel=replace(facts.kernel, container="", takes_modules=True))
    return make_plan(facts, spec, ("repositories", "packages", "reboot", "driver"))

planned = plan()
for problem in planned.problems:
    print("problem:", problem.what, problem.evidence)
journal = new_journal(system, "install")
try:
    applied = apply_changes([change.change for change in planned.changes], system, journal, lambda event: None)
    end = "left:" if applied.next_action is NextAction.CONTINUE else "afresh:"
    print(end, [item.change.summary() for item in plan().changes])
except GpuprovError as error:
    print("error:", error)
journal.end("done")
"""
# What verify and the doctor say of the kernel to come; the host takes itself for a bare machine with an older one.
_NEXT = """
import json
import sys
sys.path.insert(0, "/root/agent.pyz")
from gpuprov.core.system import System
from gpuprov.doctor.examine import examine
from gpuprov.protocol.events import CauseFound, CheckDone
from gpuprov.protocol.spec import parse_spec
from gpuprov.verify import verify

class Metal(System):
    def kernel_release(self):
        return "1.0-1-cloud-amd64"

    def read_text(self, path):
        return None if path == "/run/systemd/container" else super().read_text(path)

events = []
for judge in (verify, examine):
    judge(Metal(), parse_spec({"docker": "none"}), events.append)
checks = [one for one in events if isinstance(one, CheckDone) and one.name == "next kernel"]
causes = [one for one in events if isinstance(one, CauseFound) and one.rule == "next-kernel"]
print(json.dumps([[one.on_host or one.reason for one in checks], [one.what + "; " + one.next_step for one in causes]]))
"""
_NON_FREE = "sed -i 's/ main$/ main contrib non-free non-free-firmware/' /etc/apt/sources.list; apt-get -qq update"
# With all drivers they take long.
_SMALL_IMAGES = "mkdir -p /etc/initramfs-tools/conf.d; echo MODULES=list > /etc/initramfs-tools/conf.d/lab"
_APT = "DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install"


@dataclass(frozen=True)
class Installed:
    """A host, the kernel that it was told to run, what was wanted there, and what its installation said."""

    host: Host
    kernel: str
    wanted: Mapping[str, str]
    said: str


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Installed]]:
    """Each release's host, installed: all at once, for each waits for the mirror and gcc."""
    with free_lab() as lab:
        names = (*_FROM_RUN, _FROM_PACKAGES)
        hosts = lab.up([HostRequest(name, release=name, gpus=1, docker=False, archive=True) for name in names])
        bring_files(hosts, tmp_path_factory.mktemp("run"))
        fingerprint = build_cuda(lab.www / "cuda", lab.directory / "gnupg", (DRIVER, _NEWER))
        mirror = {"cuda_repository": f"{lab.url}/cuda", "cuda_key_fingerprint": fingerprint}
        packages = {"driver": "packages", "driver_version": "550", "kernel_modules": "build", **mirror, **_SIGNING}
        wanted = [*[_RUN_WANTED] * len(_FROM_RUN), packages]
        with ThreadPoolExecutor() as pool:
            yield dict(zip(names, pool.map(install, hosts, wanted), strict=True))


def bring_files(hosts: Sequence[Host], work: Path) -> None:
    """Put the .run and the agent into root's home."""
    run_file = simgpu.build_run(work)
    agent = work / "agent.pyz"
    subprocess.run((str(GPUPROV), "agent", "build", "-o", str(agent)), check=True, timeout=120)
    subprocess.run((*_MAKE_KEY, "-keyout", str(work / "mok.key"), "-out", str(work / "mok.der")), check=True)
    for host in hosts:
        for name in ("mok.key", "mok.der"):
            (host.root / "root" / name).write_bytes((work / name).read_bytes())
        (host.root / "root/driver.run").write_bytes(run_file.read_bytes())
        (host.root / "root/agent.pyz").write_bytes(agent.read_bytes())


def install(host: Host, wanted: Mapping[str, str]) -> Installed:
    kernel = host.ssh(_PRETEND, timeout=300).stdout.strip()
    return Installed(host, kernel, wanted, install_again(host, kernel, wanted))


def install_again(host: Host, kernel: str, wanted: Mapping[str, str]) -> str:
    """Install packages and driver; return what was said."""
    done = host.ssh(("python3", "-c", _INSTALL, kernel, json.dumps(wanted)), check=False, timeout=600)
    return done.stdout + done.stderr


@pytest.mark.parametrize("release", [*_FROM_RUN, _FROM_PACKAGES])
def test_dkms_builds_modules_for_the_kernel_with_headers(installed: dict[str, Installed], release: str) -> None:
    host, kernel = installed[release].host, installed[release].kernel
    assert installed[release].said == "left: []\n"
    assert host.ssh(f"dpkg-query -W -f '${{Status}}' linux-headers-{kernel}").stdout == "install ok installed"
    assert dkms_states(host.ssh("dkms status").stdout, DRIVER) == {kernel: "installed"}
    for module in ("nvidia", "nvidia-uvm"):
        found = host.ssh(f"modinfo -k {kernel} {module}").stdout
        fields = dict(line.split(":", 1) for line in found.splitlines() if ":" in line)
        assert fields["filename"].strip().startswith(f"/lib/modules/{kernel}/updates/dkms/{module}.ko")
        assert (fields["version"].strip(), fields["vermagic"].split()[0]) == (DRIVER, kernel)


def test_modules_are_signed_with_the_key_that_was_asked_for_alone(installed: dict[str, Installed]) -> None:
    signers = {
        name: it.host.ssh(f"modinfo -k {it.kernel} -F signer nvidia").stdout.strip() for name, it in installed.items()
    }
    assert signers[_FROM_PACKAGES] == "gpuprov-lab-key"
    assert all(signers[name] != "gpuprov-lab-key" for name in _FROM_RUN)


def test_packages_keep_to_the_branch_that_is_asked_for_until_it_is_another(installed: dict[str, Installed]) -> None:
    it = installed[_FROM_PACKAGES]
    policy = it.host.ssh("apt-cache policy nvidia-open").stdout
    assert f"Installed: {DRIVER}-1" in policy and f"{_NEWER}-1" in policy
    it.host.ssh("DEBIAN_FRONTEND=noninteractive apt-get -qq -y upgrade", timeout=300)
    assert packages(it.host) == {f"nvidia-open={DRIVER}-1", "nvidia-driver-pinning-550=550"}
    # The container host has loaded the older one, and keeps it.
    said = install_again(it.host, it.kernel, {**it.wanted, "driver_version": "580"})
    reason = f"the kernel still runs driver {DRIVER}, installed is {_NEWER}"
    held = "hold the driver's packages at this version (nvidia-driver, nvidia-kernel-open-dkms, nvidia-open)"
    assert said == f"afresh: {[held, f'stop until somebody has rebooted this host ({reason})']}\n"
    assert packages(it.host) == {f"nvidia-open={_NEWER}-1", "nvidia-driver-pinning-580=580"}
    assert dkms_states(it.host.ssh("dkms status").stdout, _NEWER) == {it.kernel: "installed"}
    install_again(it.host, it.kernel, it.wanted)
    assert packages(it.host) == {f"nvidia-open={DRIVER}-1", "nvidia-driver-pinning-550=550"}
    assert install_again(it.host, it.kernel, it.wanted) == "left: []\n"


def next_kernel(host: Host) -> tuple[str, str]:
    """Return what verify and the doctor say of the kernel to come; the doctor says nothing of one that is well."""
    (check,), causes = json.loads(host.ssh(("python3", "-c", _NEXT), timeout=300).stdout)
    return check, "".join(causes)


def test_a_new_kernel_without_headers_is_named_before_it_boots(installed: dict[str, Installed]) -> None:
    host, kernel = installed["trixie"].host, installed["trixie"].kernel
    host.ssh(f"dkms unbuild nvidia/{DRIVER} -k {kernel}; apt-get -qq -y purge linux-headers-{kernel}", timeout=300)
    host.ssh(f"{_SMALL_IMAGES}; {_APT} linux-image-{kernel}", timeout=300)
    lack = f"kernel {kernel} has no NVIDIA module, and no headers to build one"
    steps = f"linux-headers-{kernel}; dkms autoinstall -k {kernel}"
    verified, diagnosed = next_kernel(host)
    assert verified == f"{lack}: install {steps}"
    assert diagnosed == f"at the next boot the driver would be gone: {lack}; apt-get install -y {steps}"
    host.ssh(f"{_APT} linux-headers-{kernel}; dkms autoinstall -k {kernel}", timeout=300)
    assert next_kernel(host) == (f"{kernel}, with the driver's module", "")


def packages(host: Host) -> set[str]:
    """Return NAME=VERSION of the driver's main package and of its pins."""
    names = ("nvidia-open", "nvidia-driver-pinning-*")
    return set(host.ssh(("dpkg-query", "-W", "-f", "${Package}=${Version}\n", *names)).stdout.split())


def test_packages_of_the_driver_go_with_a_rollback(installed: dict[str, Installed]) -> None:
    host = installed[_FROM_PACKAGES].host
    for _ in host.ssh("ls /var/lib/gpuprov/runs").stdout.split():
        host.ssh("python3 /root/agent.pyz", stdin=dump(Request("rollback")) + "\n", timeout=600)
    left = "dpkg-query -W -f '${Package} ${Status}\n' '*nvidia*' dkms; find /lib/modules /usr/src /etc -name '*nvidia*'"
    assert [line for line in host.ssh(left, check=False).stdout.splitlines() if "not-installed" not in line] == []


def test_a_new_kernel_is_named_with_debians_own_driver(installed: dict[str, Installed]) -> None:
    """DKMS knows it as nvidia-current; without headers its package builds nothing."""
    host, kernel = installed[_FROM_PACKAGES].host, installed[_FROM_PACKAGES].kernel
    host.ssh(f"apt-get -qq -y purge 'linux-headers-*'; {_NON_FREE}; {_SMALL_IMAGES}", timeout=300)
    host.ssh(f"{_APT} nvidia-kernel-dkms linux-image-{kernel}", timeout=600)
    assert "nvidia-current" in host.ssh("dkms status").stdout
    lack = f"kernel {kernel} has no NVIDIA module, and no headers to build one"
    verified, diagnosed = next_kernel(host)
    assert verified.startswith(lack) and lack in diagnosed


def test_a_module_that_does_not_compile_is_named_with_the_log_of_its_build(installed: dict[str, Installed]) -> None:
    """As with a driver that is too old for its kernel: the compiler stops at a header."""
    host, kernel = installed["trixie"].host, installed["trixie"].kernel
    common = f"/usr/src/linux-headers-{kernel.replace('-cloud-amd64', '-common')}"
    host.ssh(f"echo '#error another kernel' >> {common}/include/linux/proc_fs.h")
    host.ssh("mkdir -p /var/lib/gpuprov && touch /var/lib/gpuprov/driver-incomplete")
    said = install_again(host, kernel, _RUN_WANTED)
    assert "DKMS could not build the kernel modules" in said
    assert "make.log" in said
    built = f"kernel {kernel} has no NVIDIA module: dkms autoinstall -k {kernel}; dkms status"
    verified, diagnosed = next_kernel(host)
    assert verified == built and diagnosed.endswith(f"; dkms autoinstall -k {kernel}")
