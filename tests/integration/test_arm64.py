"""gpuprov on a genuine arm64 kernel: facts, plan, Debian's own arm64 driver packages, containers, and the way back.

The tests are one story and stand in its order. A kernel with the driver is simulated by files, as on the lab's hosts.
"""

import contextlib
import io
import json
import re
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_vm import Machine, machine_of
from tests.lab.arm64 import DRIVER_PACKAGES, Arm64Vm
from tests.lab.fixtures import gpuprov_succeeds
from tests.lab.lab import CACHE
from tests.lab.vm import Vm
from tools.host_program import build

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.root, pytest.mark.timeout(3000)]
LIBRARIES = "/usr/lib/aarch64-linux-gnu"
PROGRAM = "python3 /root/gpuprov-host.pyz"
# A root with what an image of this architecture has: busybox, the loader and the C library.
_BUNDLE = f"""set -eu
rm -rf /root/bundle
mkdir -p /root/bundle/rootfs/bin /root/bundle/rootfs{LIBRARIES} /root/bundle/rootfs/lib /root/bundle/rootfs/dev
cd /root/bundle
cp /bin/busybox rootfs/bin/
for name in sh ls cat stat; do ln -sf busybox rootfs/bin/$name; done
cp -L /lib/ld-linux-aarch64.so.1 rootfs/lib/
for name in c m dl pthread rt; do cp -L {LIBRARIES}/lib$name.so.[0-9]* rootfs{LIBRARIES}/; done
runc spec
mv config.json spec.json
"""
# What a container says of itself: its nodes, what opening two gives, its libraries, and what nvidia-smi finds.
_REPORT = f"""ls /dev | grep nvidia; ls {LIBRARIES} | grep libcuda
for n in 0 1; do mknod /made$n c 195 $n; (exec 3</made$n) 2>&1; done; nvidia-smi; echo code $?"""
# Makes the container's configuration: of a request in its environment, by a hook where one is named.
_CONFIGURE = """
import json, sys
config = json.load(open("/root/bundle/spec.json"))
config["process"].update(terminal=False, args=["/bin/busybox", "sh", "-c", sys.argv[1]])
config["process"]["env"] = ["PATH=/bin:/usr/bin", *sys.argv[3:]]
for name in ("bounding", "effective", "permitted"):
    config["process"]["capabilities"][name].append("CAP_MKNOD")
config["root"]["readonly"] = False
if sys.argv[2]:
    config["hooks"] = {"prestart": [{"path": sys.argv[2], "args": [sys.argv[2], "prestart"]}]}
json.dump(config, open("/root/bundle/config.json", "w"))
"""
_HOOK = "/usr/bin/gpuprov-container-runtime-hook"
# The runtime equips a container at `create`; with `run`, which no engine uses, it passes all on to runc.
_AS_AN_ENGINE = """gpuprov-container-runtime create --bundle /root/bundle {name} < /dev/null > /root/said 2>&1
gpuprov-container-runtime start {name}
until gpuprov-container-runtime state {name} | grep -q stopped; do sleep 1; done
cat /root/said"""
_SETTINGS = "/etc/nvidia-container-runtime/config.toml"


@contextlib.contextmanager
def running(directory: Path, page_size: int) -> Iterator[Machine]:
    """Boot the virtual machine with a kernel of this page size; give it the one-file program."""
    vm = Arm64Vm(CACHE / "bases", directory, page_size=page_size)
    try:
        vm.start()
        vm.ssh("cat > /root/gpuprov-host.pyz", stdin=build())
        vm.ssh("cat > /root/configure.py", stdin=_CONFIGURE.encode())
        yield machine_of(vm, {"gpuprov_driver": "preinstalled", "gpuprov_docker": "none"})
    finally:
        vm.kill()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with running(tmp_path_factory.mktemp("arm64"), 4096) as machine:
        yield machine


def check_facts(machine: Machine, page_size: int) -> None:
    done = gpuprov_succeeds("facts", "--hosts", machine.inventory, "--json", timeout=1800)
    for name, value in (("architecture", '"aarch64"'), ("page_size", page_size), ("device_id", '"2330"')):
        assert re.search(rf'"{name}": ?{value}[,}}]', done.stdout), done.stdout


def install_driver(vm: Vm) -> str:
    """Install Debian's packages of the driver's libraries; return the version and the architecture."""
    vm.ssh("apt-get -qq update", timeout=600)
    names = " ".join(DRIVER_PACKAGES)
    vm.ssh(f"DEBIAN_FRONTEND=noninteractive apt-get -qq --yes --no-install-recommends install {names}", timeout=1800)
    return vm.ssh("dpkg-query --show --showformat='${Version} ${Architecture}' libcuda1").stdout


def test_the_agent_gathers_what_this_machine_is(machine: Machine) -> None:
    check_facts(machine, 4096)


def test_without_the_drivers_libraries_nothing_is_planned(machine: Machine) -> None:
    code, said = machine.gpuprov("install", "--check")
    assert code == 1 and "no NVIDIA driver is installed" in said, said


def test_debians_packages_for_arm64_are_what_is_discovered(machine: Machine) -> None:
    version = install_driver(machine.vm)
    assert version.endswith(" arm64")
    found = json.loads(machine.vm.ssh(f"{PROGRAM} cdi generate --format json", timeout=600).stdout)
    paths = {one["containerPath"] for one in found["containerEdits"]["mounts"]}
    assert f"{LIBRARIES}/libcuda.so.{version.partition('-')[0]}" in paths
    assert not [path for path in paths if "x86_64" in path]


def test_an_installation_and_a_second_run(machine: Machine) -> None:
    code, said = machine.gpuprov("install")
    assert code == 0, said
    code, said = machine.gpuprov("install")
    assert (code, "0 changes" in said) == (0, True), said


@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("way", ["runtime", "hook", "cdi"])
def test_a_container_gets_one_gpu(machine: Machine, way: str, low_level: str) -> None:
    check_one_gpu(machine.vm, way, low_level)


def check_one_gpu(vm: Vm, way: str, low_level: str) -> None:
    """Run a container that asks for the first GPU."""
    vm.ssh(_BUNDLE)
    request = "" if way == "cdi" else "NVIDIA_VISIBLE_DEVICES=0"
    vm.ssh(("python3", "/root/configure.py", _REPORT, _HOOK if way == "hook" else "", *([request] if request else [])))
    if way == "cdi":
        # An engine that reads CDI itself; its runtime runs the hook of the specification.
        report = shlex.join(("/bin/busybox", "sh", "-c", _REPORT))
        command = (
            f"podman --runtime {low_level} run --rm --network none --log-driver none --cap-add mknod "
            f"--device nvidia.com/gpu=0 --rootfs /root/bundle/rootfs {report}"
        )
    elif way == "runtime":
        settings = f"[nvidia-container-runtime]\nruntimes = ['{low_level}']\n"
        vm.ssh(f"mkdir -p {_SETTINGS.rpartition('/')[0]} && cat > {_SETTINGS}", stdin=settings.encode())
        command = _AS_AN_ENGINE.format(name=f"{way}-{low_level}")
    else:
        command = f"{low_level} run --bundle /root/bundle {way}-{low_level}"
    done = vm.ssh(f"{command} < /dev/null", check=False, timeout=600)
    said = done.stdout + done.stderr
    assert "nvidia0\n" in said and "nvidiactl\n" in said and "nvidia1\n" not in said, said
    assert "libcuda.so.1\n" in said, said
    # No driver is behind the node that was asked for; the device cgroup forbids the other.
    opened = re.findall(r"made(\d): (.+)", said)
    assert opened == [("0", "No such device or address"), ("1", "Operation not permitted")], said
    # The genuine program, and the loader's cache in its own format: it finds libnvidia-ml and asks the driver.
    assert "couldn't communicate with the NVIDIA driver" in said and "code 9" in said, said


def test_the_one_file_program_removes_all_of_it(machine: Machine) -> None:
    done = machine.vm.ssh(f"{PROGRAM} uninstall", check=False, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    left = machine.vm.ssh("ls /usr/bin/gpuprov-* /etc/cdi/nvidia.json /usr/lib/gpuprov 2>/dev/null", check=False).stdout
    assert left == ""
    # The driver is the machine's own.
    assert machine.vm.ssh(f"ls {LIBRARIES}/libcuda.so.1").stdout


def test_the_one_file_program_holds_nothing_of_one_architecture() -> None:
    with zipfile.ZipFile(io.BytesIO(build())) as program:
        names = program.namelist()
        assert [name for name in names if name.endswith(".py")]
        assert not [name for name in names if name.endswith(".so") or program.read(name)[:4] == b"\x7fELF"]
