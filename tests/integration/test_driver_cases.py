"""Every way that the driver's installer is known to end, on a real host: the right sentence, and an unharmed host."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests import simgpu
from tests.lab import Host
from tests.lab.drivers import driver_variables, load_driver
from tests.lab.fixtures import DRIVER, Site, gpuprov, gpuprov_succeeds
from tests.lab.lab import REPOSITORY

pytestmark = [pytest.mark.lab, pytest.mark.root]
OLD = "535.261.03"
_FILE, _OLD_FILE = "/root/driver.run", "/root/old.run"
# All that an installer may touch: kind, mode, owner, a link's target, a file's size and time. Not what ldconfig writes.
_TREE = (
    r"find /etc /usr /opt /lib/modules /var/lib/nvidia /var/lib/dkms -xdev "
    r"\( -type f -printf '%p %M %U:%G %s %T@\n' -o -printf '%p %M %U:%G %l\n' \) 2>/dev/null "
    r"| grep -v -e '^/etc/ld.so.cache ' -e '^[a-z/]*/lib/modules d' | sort"
)
# A kernel's build folder and a compiler that build what is no module, on a kernel that takes none.
_TOOLS = """
set -e
mkdir -p "/lib/modules/$(uname -r)/build"
echo all: > "/lib/modules/$(uname -r)/build/Makefile"
cd /usr/local/sbin
printf '#!/bin/sh\\nexit 0\\n' > cc
printf '#!/bin/sh\\nexit 0\\n' > modprobe
printf '#!/bin/sh\\necho "$0 $*" >> /run/tools; for word; do case $word in M=*) for name in nvidia nvidia-uvm; do
echo built > "${word#M=}/$name.ko"; done ;; esac; done\\n' > make
printf '#!/bin/sh\\necho VERSION\\n' > modinfo
chmod 755 cc modprobe make modinfo
""".replace("VERSION", DRIVER)
_NO_TOOLS = 'rm -rf /usr/local/sbin/* /run/tools "/lib/modules/$(uname -r)"'
_DKMS = """
printf '#!/bin/sh\\necho "$0 $*" >> /run/tools\\ncase "$1 $REGISTERS" in status*) %s ;; esac\\n' > /usr/local/sbin/dkms
chmod 755 /usr/local/sbin/dkms
"""
_REGISTERED = f'echo "nvidia/{DRIVER}, $(uname -r), x86_64: installed"'


@dataclass(frozen=True)
class Case:
    """What is done before (`setup`, a line for the host's shell), asked of the installer, said, and done after."""

    what: str
    evidence: str = ""
    fails: str = ""
    setup: str = ":"
    after: str = ":"
    asked: dict[str, Any] = field(default_factory=dict)


_MODULES = {"kernel_modules": True}
# The table's row "bad --kernel-source-path" is missing: gpuprov never names one.
FAILURES = {
    "no compiler": Case(
        "there is no compiler on this host", "find the development tool", "no-compiler", asked=_MODULES
    ),
    "headers missing": Case(
        "the headers of the running kernel are missing", "kernel source tree", "no-headers",
        setup=_TOOLS, after=_NO_TOOLS, asked=_MODULES,
    ),
    "the module does not compile": Case(
        "the kernel modules did not compile", "kernel module was not created", "compile-error",
        setup=_TOOLS, after=_NO_TOOLS, asked=_MODULES,
    ),
    "nouveau loaded": Case("nouveau, the free driver, holds the GPU", "currently in use", "nouveau", asked=_MODULES),
    "X running": Case("an X server holds the GPU", "running an X server", "x-running"),
    "NVIDIA module loaded": Case("another version of the driver is loaded", "'nvidia-uvm'", "module-loaded",
                                 asked=_MODULES),
    "over the distribution's packages": Case(
        "the distribution's own NVIDIA packages", "alternate", "alternate-install"
    ),
    "a flipped byte": Case("the .run file is damaged", "exited 2", asked={"url": "/root/flipped"}),
    "missing bytes": Case("the .run file is damaged", "exited 2", asked={"url": "/root/short"}),
    "a web page saved as .run": Case("this is a web page, not a .run file", "<!DOCTYPE", asked={"url": "/root/page"}),
    "tmp too small": Case("the .run file could not be unpacked", "exited 15", "tmp-too-small"),
    "tmp too small, seen before": Case(
        "not enough room on the file system of /var/cache/gpuprov", "MiB needed",
        setup="mkdir -p /var/cache/gpuprov && mount -t tmpfs -o size=1m none /var/cache/gpuprov",
        after="umount /var/cache/gpuprov",
    ),
    "noexec tmp": Case(
        "the temporary directory is mounted noexec", "is not executable",
        setup="mkdir -p /var/cache/gpuprov && mount -t tmpfs -o noexec none /var/cache/gpuprov",
        after="umount /var/cache/gpuprov",
    ),
    "root file system full": Case("the root file system filled up", "exited 135", "sigbus"),
    "errors with exit code 0": Case("the installation failed its own final check", "exited 0", "sanity-errors-rc0"),
    "another version than asked": Case(f"the driver file is {DRIVER}", "NVIDIA", asked={"version": "550.1.1"}),
    "another file than asked": Case("the driver file is not the one that was asked for", "SHA-256",
                                    asked={"sha256": "0" * 64}),
    "dkms does not register it": Case(
        "the driver is not registered with DKMS", "dkms status", setup=_TOOLS + _DKMS % ":",
        after=_NO_TOOLS, asked=_MODULES,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def host(site: Site) -> Iterator[Host]:
    """A pristine host with the files: whole, of another version, flipped, cut, and a page."""
    made = site.fresh("main")
    root = made.root / "root"
    shutil.copyfile(simgpu.build_run(site.lab.www), root / "driver.run")
    shutil.copyfile(simgpu.build_run(site.lab.www, OLD), root / "old.run")
    whole = (root / "driver.run").read_bytes()
    (root / "flipped").write_bytes(whole[:-1000] + bytes([whole[-1000] ^ 1]) + whole[-999:])
    (root / "short").write_bytes(whole[:-1000])
    (root / "page").write_text("<!DOCTYPE html><title>Please log in</title>\n")
    yield made
    made.reset()


@pytest.fixture(scope="module")
def pristine(host: Host) -> str:
    return tree(host)


def tree(host: Host) -> str:
    return host.ssh(_TREE, check=False).stdout


def lost_and_found(before: str, after: str) -> list[str]:
    """Return the lines that differ, each with its side."""
    old, new = set(before.splitlines()), set(after.splitlines())
    return sorted([f"-{line}" for line in old - new] + [f"+{line}" for line in new - old])


def install(host: Host, **asked: Any) -> list[str] | None:
    """Install on the host; return what, evidence and next step if that failed."""
    words = json.dumps({"url": _FILE, "version": DRIVER, **asked})
    python = f"cd {REPOSITORY} && PYTHONDONTWRITEBYTECODE=1 .venv/bin/python -m tests.integration.on_host_driver"
    problem: list[str] | None = json.loads(host.ssh(f"{python} '{words}'").stdout)["problem"]
    return problem


def fail(host: Host, case: Case) -> list[str]:
    host.ssh(case.setup)
    host.ssh(f"echo {case.fails} > /etc/simrun.fail" if case.fails else ":")
    problem = install(host, **case.asked)
    host.ssh(f"rm -f /etc/simrun.fail; {case.after}")
    assert problem is not None
    return problem


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_has_its_sentence_and_leaves_the_host_as_it_was(host: Host, pristine: str, name: str) -> None:
    case = FAILURES[name]
    what, evidence, next_step = fail(host, case)
    assert case.what in what
    assert case.evidence in evidence
    assert next_step
    assert lost_and_found(pristine, tree(host)) == []
    assert host.ssh("ls /var/lib/gpuprov/driver-incomplete", check=False).returncode != 0


def test_not_root(host: Host, pristine: str) -> None:
    command = f"{REPOSITORY}/.venv/bin/gpuprov install -e gpuprov_driver_version={DRIVER}"
    done = host.ssh(f"su nobody -s /bin/sh -c '{command}' 2>&1", check=False)
    assert done.returncode == 2
    assert "`gpuprov install` needs root on this machine" in done.stdout and "sudo" in done.stdout
    assert lost_and_found(pristine, tree(host)) == []


# -- what goes well, and what fails over a driver that is there; each leaves the host bare again ---------------------


@pytest.fixture
def bare_again(host: Host, pristine: str) -> Iterator[Host]:
    yield host
    for _ in range(2):
        host.ssh("! command -v nvidia-uninstall || nvidia-uninstall --silent")
    host.ssh(_NO_TOOLS)
    assert lost_and_found(pristine, tree(host)) == []


def test_libraries_alone_and_uninstalled_twice(bare_again: Host) -> None:
    assert install(bare_again) is None
    assert bare_again.ssh("nvidia-smi --query-gpu=driver_version --format=csv,noheader").stdout.split() == [DRIVER] * 2
    path = f"/usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}"
    assert bare_again.ssh(f"stat -c %a {path}").stdout


@pytest.mark.parametrize(
    ("kind", "tools", "option", "where"),
    [
        ("no dkms on the host", _TOOLS, "M=", "/lib/modules/*/video/nvidia.ko"),
        ("dkms", _TOOLS + _DKMS % _REGISTERED, f"install -m nvidia -v {DRIVER}", f"/usr/src/nvidia-{DRIVER}/dkms.conf"),
        ("open", _TOOLS, "/kernel-open", "/lib/modules/*/video/nvidia.ko"),
    ],
    ids=["no dkms", "dkms", "open"],
)
def test_modules_are_built_and_installed(bare_again: Host, kind: str, tools: str, option: str, where: str) -> None:
    bare_again.ssh(tools)
    assert install(bare_again, kernel_modules=True, asked_module_type="open" if kind == "open" else "auto") is None
    assert option in bare_again.ssh("cat /run/tools").stdout
    bare_again.ssh(f"ls {where}")


OVER = ("the module does not compile", "tmp too small", "a flipped byte", "noexec tmp")


def test_what_fails_over_an_older_driver_leaves_that_one_whole(bare_again: Host) -> None:
    assert install(bare_again, url=_OLD_FILE, version=OLD) is None
    before = tree(bare_again)
    for name in OVER:
        case = FAILURES[name]
        asked = {**case.asked, "replaces": OLD}
        what, _, _ = fail(bare_again, Case(case.what, "", case.fails, case.setup, case.after, asked))
        assert case.what in what
        assert lost_and_found(before, tree(bare_again)) == [], name


def test_what_breaks_off_in_the_middle_of_an_older_one_leaves_none_of_either(bare_again: Host, pristine: str) -> None:
    assert install(bare_again, url=_OLD_FILE, version=OLD) is None
    what, _, _ = fail(bare_again, Case("", fails="sigbus", asked={"replaces": OLD}))
    assert "the root file system filled up" in what
    assert lost_and_found(pristine, tree(bare_again)) == []


def test_a_driver_is_replaced_by_a_newer_and_by_an_older_one_and_uninstalled(site: Site, host: Host) -> None:
    """By the command line. The container host changes its driver too: the two must always match."""
    without: dict[str, None] = {"gpuprov_packages": None, "gpuprov_repositories": None}
    try:
        for version in (OLD, DRIVER, OLD):
            load_driver(host, version)
            inventory = site.inventory("main", **without, **driver_variables(site.lab, version))
            gpuprov_succeeds("install", "--hosts", inventory)
            shown = host.ssh("nvidia-smi --query-gpu=driver_version --format=csv,noheader").stdout.split()
            assert shown == [version] * 2
            left = host.ssh("ls -d /usr/lib/x86_64-linux-gnu/libcuda.so.*.*").stdout.split()
            assert left == [f"/usr/lib/x86_64-linux-gnu/libcuda.so.{version}"]
        assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
        gpuprov_succeeds("uninstall", "--hosts", inventory)
        assert host.ssh("ls /usr/lib/x86_64-linux-gnu | grep nvidia", check=False).stdout == ""
    finally:
        load_driver(host, DRIVER)
