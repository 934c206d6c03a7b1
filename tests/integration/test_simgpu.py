"""The simulated GPU against the genuine nvidia-smi, and the test .run in a throw-away copy of this machine.

Everything happens in mount namespaces of its own: nothing is installed here, and no device node outlives its test.
"""

import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import simgpu
from tests.simgpu import (
    all_gpus,
    build_libraries,
    build_run,
    debian,
    device_nodes,
    gpu,
    install_tree,
    mig_nodes,
    write_kernel_tree,
)
from tests.simgpu.kernel_tree import proc_devices
from tests.simgpu.layout import DEBIAN_LIBRARY_DIRECTORY, driver_files
from tests.simgpu.runfile import run_name

VERSION = "550.163.01"

pytestmark = [pytest.mark.root, pytest.mark.needs("gcc")]

# $1: lines of "path major minor mode"; $2: what to run. /dev is a tmpfs with nothing else in it.
_WITH_NODES = """
mount -t tmpfs -o mode=755 none /dev
mknod -m 666 /dev/null c 1 3
printf '%s\n' "$1" | while read -r path major minor mode; do
    mkdir -p "${path%/*}"
    mknod -m "$mode" "$path" c "$major" "$minor"
done
eval "$2"
"""

# $1: an empty folder; $2: what to run in a copy of this machine whose every change lands in $1/up.
_IN_COPY = """
set -e
mount -t tmpfs none "$1"
mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" none "$1/root"
mount -t proc none "$1/root/proc"
mount -t tmpfs none "$1/root/dev"
mount -t tmpfs none "$1/root/tmp"
mknod -m 666 "$1/root/dev/null" c 1 3
cp "$RUN" "$1/root/tmp/"
set +e
chroot "$1/root" sh -c "$2"
status=$?
umount "$1/root/tmp" "$1/root/dev" "$1/root/proc" "$1/root"
echo "== left behind"
find "$1/up" -mindepth 1 ! -type d -printf '/%P\n' | sort
umount "$1"
exit $status
"""
_NAMESPACES = ("--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
_LEFT_ALONE = ("/etc/ld.so.cache", "/var/cache/ldconfig/aux-cache", "/var/log/")


def _unshared(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # A process namespace too: whatever a test leaves running dies with it.
    argv = ("unshare", *_NAMESPACES, "sh", "-c", script, "sh", *arguments)
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", **environment}
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env, check=False)


def on_host(
    gpus: int, command: str, *, divided: tuple[int, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a shell command where the nodes of that many GPUs are, with the stub libraries."""
    wanted = [*device_nodes(gpus), *(node for minor in divided for node in mig_nodes(minor))]
    nodes = "\n".join(f"{node.path} {node.major} {node.minor} {node.mode:o}" for node in wanted)
    folder = str(build_libraries())
    return _unshared(_WITH_NODES, nodes, command, SMI=f"{folder}/nvidia-smi", LD_LIBRARY_PATH=folder, **environment)


def _list_line(index: int, minor: int) -> str:
    return f"GPU {index}: {gpu(minor).name} (UUID: {gpu(minor).uuid})"


# GPUs, what happens to their nodes, and the minors that nvidia-smi lists.
NODES = {
    **{f"{count} with a node each": (count, ":", range(count)) for count in (1, 8, 16)},
    "two without a node: the others move up": (4, "rm /dev/nvidia0 /dev/nvidia2", (1, 3)),
    "a node with another number": (2, "rm /dev/nvidia1; mknod /dev/nvidia1 c 195 5", (0,)),
    # nodev refuses as the device cgroup does, for root too; the control node must stay usable.
    "a node that may not be opened": (
        2, """
    mkdir /dev/closed && mount -t tmpfs -o nodev none /dev/closed && mknod /dev/closed/n c 195 1
    mount --bind /dev/closed/n /dev/nvidia1""", (0,),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("count", "command", "minors"), NODES.values(), ids=NODES)
def test_nvidia_smi_lists_every_gpu_that_has_a_node(count: int, command: str, minors: Sequence[int]) -> None:
    done = on_host(count, f"{command}; $SMI -L")
    assert done.stdout.splitlines() == [_list_line(index, minor) for index, minor in enumerate(minors)]


def test_query_gives_the_attributes_of_the_table() -> None:
    fields = "index,name,uuid,pci.bus_id,memory.total,driver_version,mig.mode.current"
    done = on_host(3, f"$SMI --query-gpu={fields} --format=csv,noheader", SIMGPU_MIG="1")
    assert done.stdout.splitlines() == [
        f"{one.minor}, {one.name}, {one.uuid}, {one.bus_id}, {one.memory_mib} MiB, {VERSION}, "
        + ("Enabled" if one.minor == 1 else "Disabled")
        for one in all_gpus()[:3]
    ]


def test_the_xml_report_is_whole() -> None:
    root = ElementTree.fromstring(on_host(2, "$SMI -q -x").stdout)
    cards = root.findall("gpu")
    assert (root.findtext("driver_version"), root.findtext("cuda_version")) == (VERSION, "12.4")
    assert [card.get("id") for card in cards] == [one.bus_id for one in all_gpus()[:2]]
    assert [card.findtext("uuid") for card in cards] == [one.uuid for one in all_gpus()[:2]]
    assert [card.findtext("minor_number") for card in cards] == ["0", "1"]
    assert [card.findtext("fb_memory_usage/total") for card in cards] == ["81559 MiB", "81558 MiB"]


@pytest.mark.parametrize("selector", ["1", gpu(1).uuid, gpu(1).bus_id])
def test_one_gpu_is_selected_by_index_uuid_and_bus_id(selector: str) -> None:
    done = on_host(2, f"$SMI -i {selector} --query-gpu=uuid --format=csv,noheader")
    assert done.stdout.split() == [gpu(1).uuid]


def test_the_table_and_persistence_mode() -> None:
    done = on_host(1, "mount -t tmpfs none /run; $SMI -pm 1 && $SMI && $SMI --version")
    assert done.returncode == 0
    assert f"Driver Version: {VERSION}     CUDA Version: 12.4" in done.stdout
    assert "NVIDIA H100 80GB HBM3          On" in done.stdout


def test_an_idle_gpu_has_no_processes() -> None:
    assert on_host(1, "$SMI --query-compute-apps=pid --format=csv,noheader").stdout == ""


@pytest.mark.parametrize(
    ("before", "environment", "code", "text"),
    [
        ("rm /dev/nvidiactl", {}, 9, "couldn't communicate with the NVIDIA driver"),
        ("rm /dev/nvidia0", {}, 6, "No devices were found"),
        (":", {"SIMGPU_ERROR": "15"}, 15, "GPU is lost"),
        (":", {"SIMGPU_GPUS": "0"}, 6, "No devices were found"),
    ],
)
def test_faults_give_the_real_exit_codes(before: str, environment: dict[str, str], code: int, text: str) -> None:
    settings = " ".join(f"{name}={value}" for name, value in environment.items())
    done = on_host(1, f"{before}; {settings} $SMI")
    assert (done.returncode, text in done.stdout) == (code, True)


@pytest.mark.parametrize(("module", "code"), [(VERSION, 0), ("535.261.03", 18), ("550.163.011", 18)])
def test_a_kernel_module_of_another_version_is_a_mismatch(tmp_path: Path, module: str, code: int) -> None:
    write_kernel_tree(tmp_path, 1, module)
    done = on_host(1, f"mount --bind {tmp_path}/proc/driver /proc/driver; $SMI -L")
    assert done.returncode == code
    assert ("Driver/library version mismatch" in done.stdout) == (code == 18)


_CUDA = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
version, count, name, uuid = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(64), (ctypes.c_ubyte * 16)()
print(cuda.cuDriverGetVersion(ctypes.byref(version)), version.value, cuda.cuInit(0))
cuda.cuDeviceGetCount(ctypes.byref(count))
for device in range(count.value):
    cuda.cuDeviceGetName(name, 64, device)
    cuda.cuDeviceGetUuid(uuid, device)
    print(name.value.decode(), bytes(uuid).hex())
"""


def test_cuda_sees_the_same_gpus_as_nvml() -> None:
    done = on_host(3, 'rm /dev/nvidia1; "$PYTHON" -c "$CODE"', PYTHON=sys.executable, CODE=_CUDA)
    uuids = [gpu(minor).uuid.removeprefix("GPU-").replace("-", "") for minor in (0, 2)]
    assert done.stdout.splitlines() == ["0 12040 0", *(f"{gpu(0).name} {uuid}" for uuid in uuids)]


@pytest.mark.parametrize(("missing", "code"), [("nvidiactl", 100), ("nvidia0", 100), ("nvidia-uvm", 999)])
def test_cuda_says_what_is_missing(missing: str, code: int) -> None:
    done = on_host(1, f'rm /dev/{missing}; "$PYTHON" -c "$CODE"', PYTHON=sys.executable, CODE=_CUDA)
    assert done.stdout.splitlines() == [f"0 12040 {code}"]


def test_the_kernel_tree_names_the_gpus_of_the_table(tmp_path: Path) -> None:
    write_kernel_tree(tmp_path, 2)
    for one in all_gpus()[:2]:
        information = (tmp_path / "proc/driver/nvidia/gpus" / one.sysfs_id / "information").read_text()
        assert f"GPU UUID: \t {one.uuid}\n" in information
        assert f"Device Minor: \t {one.minor}\n" in information
        assert (tmp_path / "sys/bus/pci/devices" / one.sysfs_id / "driver").readlink().name == "nvidia"
    devices = (tmp_path / "proc/devices").read_text()
    assert "\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n" in devices
    assert devices.endswith(Path("/proc/devices").read_text().partition("Block devices:")[2])


@pytest.mark.parametrize(("version", "line"), [("535.261.03", "195 nvidia-frontend"), ("550.163.01", "195 nvidia")])
def test_major_195_has_the_name_of_its_time(version: str, line: str) -> None:
    assert line in proc_devices(version).splitlines()


def test_a_machine_without_a_driver_shows_gpus_and_no_module(tmp_path: Path) -> None:
    write_kernel_tree(tmp_path, 1, driver=None)
    assert (tmp_path / "sys/bus/pci/devices" / gpu(0).sysfs_id / "vendor").read_text() == "0x10de\n"
    assert not (tmp_path / "sys/bus/pci/devices" / gpu(0).sysfs_id / "driver").is_symlink()
    assert not (tmp_path / "proc/driver").exists()
    assert (tmp_path / "proc/devices").read_text() == Path("/proc/devices").read_text()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("run"))


def _in_copy(run_file: Path, folder: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return _unshared(
        _IN_COPY, str(folder), command, RUN=str(run_file), INSTALL=f"sh /tmp/{run_file.name}", **environment
    )


def _left_behind(output: str) -> set[str]:
    paths = output.partition("== left behind\n")[2].splitlines()
    return {path for path in paths if not path.startswith(_LEFT_ALONE)}


def _header(run_file: Path, option: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("sh", str(run_file), option), capture_output=True, text=True, timeout=300, check=False)


def test_same_input_gives_the_same_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_file: Path) -> None:
    # A fresh cache but for Debian's packages, which need the network.
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/debian").symlink_to(build_libraries().parents[1] / "debian")
    monkeypatch.setenv("SIMGPU_CACHE", str(tmp_path / "cache"))
    assert build_run(tmp_path / "again").read_bytes() == run_file.read_bytes()


def test_the_header_answers_without_unpacking(run_file: Path) -> None:
    assert _header(run_file, "--check").stdout == "check sums and md5 sums are ok\n"
    assert _header(run_file, "--version-string").stdout == f"{VERSION}\n"
    assert _header(run_file, "--label").stdout == f"NVIDIA Accelerated Graphics Driver for Linux-x86_64 {VERSION}\n"
    assert "Target directory  : NVIDIA-Linux-x86_64-550.163.01" in _header(run_file, "--info").stdout
    assert "./supported-gpus/supported-gpus.json" in _header(run_file, "--list").stdout
    assert "--skip-module-load" in _header(run_file, "-A").stdout
    assert run_file.name == run_name(VERSION)


def test_a_damaged_file_is_refused_with_2(run_file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.run"
    content = bytearray(run_file.read_bytes())
    content[-1000] ^= 1
    damaged.write_bytes(content)
    done = _header(damaged, "--check")
    assert (done.returncode, done.stdout.startswith("Error in checksums ")) == (2, True)


def test_a_tree_for_discovery_is_what_the_run_file_installs(run_file: Path, tmp_path: Path) -> None:
    command = "$INSTALL --silent --no-kernel-modules --no-install-libglvnd --systemd; rm -r /var/lib/nvidia"
    (tmp_path / "copy").mkdir()
    done = _in_copy(run_file, tmp_path / "copy", command)
    install_tree(tmp_path / "tree")
    laid = {f"/{path.relative_to(tmp_path / 'tree')}" for path in (tmp_path / "tree").rglob("*") if not path.is_dir()}
    assert laid == _left_behind(done.stdout)


def test_installation_puts_every_file_in_its_place(run_file: Path, tmp_path: Path) -> None:
    command = (
        "$INSTALL --silent --no-kernel-modules --no-install-libglvnd; echo rc $?; stat -c %a /usr/bin/nvidia-modprobe"
    )
    done = _in_copy(run_file, tmp_path, command)
    expected = {
        one.path.replace("@LIBDIR@", DEBIAN_LIBRARY_DIRECTORY)
        for one in driver_files(VERSION)
        if one.when != "libglvnd" and (one.when != "systemd" or shutil.which("systemctl"))
    }
    assert "rc 0\n4755\n" in done.stdout
    assert _left_behind(done.stdout) == expected | {"/var/lib/nvidia/log", "/var/lib/nvidia/dirs"}


def test_the_installed_driver_works_and_leaves_nothing_when_uninstalled(run_file: Path, tmp_path: Path) -> None:
    command = """
    echo precious > /usr/bin/nvidia-smi; chmod 0711 /usr/bin/nvidia-smi
    $INSTALL --silent --no-kernel-modules --no-systemd; tail -n 1 /var/log/nvidia-installer.log
    mknod /dev/nvidiactl c 195 255; mknod /dev/nvidia3 c 195 3
    nvidia-smi -L
    nvidia-installer --driver-info
    nvidia-uninstall --silent; echo rc $?; tail -n 1 /var/log/nvidia-uninstall.log
    stat -c %a /usr/bin/nvidia-smi; cat /usr/bin/nvidia-smi; rm /usr/bin/nvidia-smi
    """
    done = _in_copy(run_file, tmp_path, command)
    label = "NVIDIA Accelerated Graphics Driver for Linux-x86_64"
    assert done.stdout.splitlines()[2:10] == [
        f"-> Installation of the {label} (version: {VERSION}) is now complete.",
        _list_line(0, 3),
        f"The currently installed driver is: '{label}' (version: {VERSION}).",
        "rc 0",
        f"-> Uninstallation of existing driver: {label} ({VERSION}) is complete.",
        "711",
        "precious",
        "== left behind",
    ]
    assert _left_behind(done.stdout) == set()


# The other failures on request are those of test_driver_cases.py, on a real host.
def test_a_refusal_because_of_nouveau_leaves_what_disables_it(run_file: Path, tmp_path: Path) -> None:
    done = _in_copy(run_file, tmp_path, "$INSTALL --silent 2>&1; echo rc $?", SIMRUN_FAIL="nouveau")
    assert "rc 1\n" in done.stdout
    names = {f"{folder}/modprobe.d/nvidia-installer-disable-nouveau.conf" for folder in ("/etc", "/usr/lib")}
    assert _left_behind(done.stdout) == names


def test_a_full_disk_kills_the_installer_in_the_middle(run_file: Path, tmp_path: Path) -> None:
    command = "$INSTALL --silent --no-kernel-modules 2>&1; echo rc $?; tail -n 1 /var/log/nvidia-installer.log"
    done = _in_copy(run_file, tmp_path, command, SIMRUN_FAIL="sigbus")
    assert "Received signal SIGBUS; aborting." in done.stdout
    assert f"rc 135\n-> Installing 'NVIDIA Accelerated Graphics Driver for Linux-x86_64' ({VERSION}):\n" in done.stdout
    assert 30 < len(_left_behind(done.stdout)) < len(driver_files(VERSION))


def test_after_a_kill_the_next_run_starts_over(run_file: Path, tmp_path: Path) -> None:
    command = """
    echo slow > /etc/simrun.fail
    setsid $INSTALL --silent --no-kernel-modules > /dev/null 2>&1 & group=$!
    until [ "$(grep -c '^0: ' /var/lib/nvidia/log 2> /dev/null)" = 40 ]; do sleep 0.05; done
    kill -KILL -$group; wait; rm /etc/simrun.fail
    ls /var/lib/nvidia/log
    $INSTALL --silent --no-kernel-modules --no-systemd > /dev/null 2>&1; echo rc $?
    nvidia-uninstall --silent; echo rc $?
    """
    done = _in_copy(run_file, tmp_path, command)
    assert done.stdout.startswith("/var/lib/nvidia/log\nrc 0\nrc 0\n")
    assert _left_behind(done.stdout) == set()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--no-such-option", 'unrecognized option: "--no-such-option"'),
        ("--kernel-module-type=open", 'unrecognized option: "--kernel-module-type"'),  # from 555.42.02 on
        ("--kernel-source-path=/nowhere", "The kernel source path '/nowhere' does not exist"),
        ("--kernel-name=9.9.9", "Unable to find the kernel source tree"),
        ("--kernel-modules-only --no-kernel-modules", "can only be used if"),
    ],
)
def test_wrong_options_are_refused(run_file: Path, tmp_path: Path, options: str, text: str) -> None:
    done = _in_copy(run_file, tmp_path, f"$INSTALL --silent {options} 2>&1; echo rc $?")
    assert text in done.stdout
    assert "\nrc 1\n" in done.stdout


def test_all_spellings_of_options_are_understood(run_file: Path, tmp_path: Path) -> None:
    options = "-s -no-x-check --dkms --no-rebuild-initramfs -m=kernel-open --tmpdir /tmp/mine --log-file-name=/tmp/log"
    done = _in_copy(run_file, tmp_path, f"$INSTALL {options} --no-kernel-module; echo rc $?; tail -n 1 /tmp/log")
    assert "\nrc 0\n-> Installation of the NVIDIA" in done.stdout


def test_packages_are_fetched_even_if_installed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = "Status: install ok installed\nArchitecture: amd64\nMaintainer: x <x@example.org>\nDescription: x\n"
    (tmp_path / "status").write_text(f"Package: hello\nVersion: 99\n{fields}")
    (tmp_path / "apt.conf").write_text(f'Dir::State::status "{tmp_path}/status";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    debian.fetch(tmp_path / "fetched", "bookworm", "main", ("hello",))
    assert (tmp_path / "fetched/unpacked/usr/bin/hello").exists()
    with pytest.raises(simgpu.BuildError) as caught:
        debian.fetch(tmp_path / "none", "bookworm", "main", ("no-such-package",))
    assert "Unable to locate package no-such-package; the mirror http" in str(caught.value)
    assert str(caught.value).endswith(" must offer bookworm (main)")
