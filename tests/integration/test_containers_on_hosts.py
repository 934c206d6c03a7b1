"""Containers on provisioned hosts of three releases (docker 20.10 and 26, cgroup v2, systemd): every way to a GPU."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pynvml
import pytest

from tests.lab import Host
from tests.lab.command_line import GPUPROV
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds
from tests.lab.shell import LabError

pytestmark = [pytest.mark.lab, pytest.mark.root]
HOSTS = {"bullseye": 1, "main": 2, "trixie": 2}
# Each release's own, which the container runtime runs on.
PYTHONS = {"bullseye": "3.9", "main": "3.11", "trixie": "3.13"}
# The host's own system as an image: a loader, ldconfig and Python, and nothing of the driver's.
_IMAGE = r"""
cd / && tar --exclude='*nvidia*' --exclude='*libcuda*' --exclude='*libnvcuvid*' --exclude='*dist-packages*' \
  -c bin sbin lib lib64 usr/lib64 usr/bin/python3* usr/bin/bash usr/bin/sh usr/bin/dash usr/bin/ls usr/bin/grep \
  usr/bin/cat usr/bin/stat usr/bin/true usr/sbin/ldconfig usr/lib/python3.* usr/lib/x86_64-linux-gnu \
  etc/ld.so.conf etc/ld.so.conf.d 2>/dev/null |
  docker import - full:1
"""
_FINDS = """python3 -c 'import ctypes, ctypes.util
library, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert library.cuInit(0) == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0
print(count.value)'"""
_NVML = """python3 -c 'import pynvml as nvml
nvml.nvmlInit()
for number in range(nvml.nvmlDeviceGetCount()):
    print(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(number)))'"""
# What opening the nodes of two GPUs and of /dev/kmsg gives: ENXIO is the simulated driver's, EPERM the cgroup's.
_OPENS = """import errno, os
for number, device in enumerate((os.makedev(195, 0), os.makedev(195, 1), os.makedev(1, 11))):
    os.mknod(f"/node{number}", 0o20666, device)
    try:
        os.open(f"/node{number}", os.O_RDWR)
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
_RESTART = "systemctl reset-failed docker; systemctl restart docker"
_WAYS = ("--gpus all", "--runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all")


@pytest.fixture(scope="module", params=["bullseye", pytest.param("main", marks=pytest.mark.sample), "trixie"])
def host(request: pytest.FixtureRequest, site: Site) -> Host:
    """A provisioned host with an image of a whole system."""
    found = site.installed(request.param)
    found.ssh(_IMAGE)
    return found


def run(host: Host, flags: str, command: str) -> str:
    return host.ssh(f"docker run --rm --network=none {flags} full:1 {command}").stdout


@pytest.mark.parametrize("flags", _WAYS)
def test_a_program_finds_the_driver_by_the_loaders_cache(host: Host, flags: str) -> None:
    gpus = HOSTS[host.name]
    assert run(host, flags, _FINDS).strip() == str(gpus)
    listed = run(host, flags, "ldconfig -p")
    assert "libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1" in listed
    assert run(host, flags, "nvidia-smi -L") == host.ssh("nvidia-smi -L").stdout
    # And still does once the image's own ldconfig has run, as `apt-get install` makes it.
    assert run(host, flags, f'sh -c "ldconfig; {_quoted(_FINDS)}"').strip() == str(gpus)


# The clone's own Python is Debian 12's: it runs on that host alone.
@pytest.mark.only(host="main")
@pytest.mark.parametrize("installed", [True, False], ids=["with the specification", "the driver alone"])
def test_plain_flags_need_no_runtime(site: Site, host: Host, installed: bool) -> None:
    """`docker run $(gpuprov docker-args)`, by runc and without a hook."""
    if not installed:
        host.ssh("mv /etc/cdi /etc/cdi.away")
    try:
        flags = host.ssh(f"{GPUPROV} docker-args").stdout.strip()
        one = host.ssh(f"{GPUPROV} docker-args --gpus 1 --capabilities utility").stdout.strip()
        profile = json.loads(host.ssh(f"{GPUPROV} docker-args --for incus").stdout)["devices"].values()
        lines = host.ssh(f"{GPUPROV} docker-args --for lxc").stdout.splitlines()
    finally:
        host.ssh("mv /etc/cdi.away /etc/cdi", check=False)
    nodes = {device["path"] for device in profile if device["type"] == "unix-char"}
    assert {"/dev/nvidia0", "/dev/nvidiactl"} <= nodes
    assert "lxc.cgroup2.devices.allow = c 195:0 rw" in lines
    assert any(" usr/bin/nvidia-smi none bind,ro,create=file 0 0" in line for line in lines)
    flags, one = f"--runtime=runc {flags}", f"--runtime=runc {one}"
    assert run(host, flags, _FINDS).strip() == str(HOSTS[host.name])
    assert run(host, flags, "nvidia-smi -L") == host.ssh("nvidia-smi -L").stdout
    second = host.ssh("nvidia-smi -L").stdout.splitlines()[1]
    assert run(host, one, "nvidia-smi -L").strip() == second.replace("GPU 1", "GPU 0")
    assert "No such file" in run(host, one, "sh -c 'ls /usr/lib/x86_64-linux-gnu/libcuda.so.1 2>&1 || :'")


@pytest.mark.parametrize("flags", _WAYS)
def test_nvidias_own_python_bindings_see_the_gpus(host: Host, flags: str) -> None:
    """nvidia-ml-py, as PyTorch and monitors use it."""
    host.ssh("cat > /root/pynvml.py", stdin=Path(pynvml.__file__).read_text())
    seen = run(host, f"{flags} -v /root/pynvml.py:/own/pynvml.py:ro -e PYTHONPATH=/own", _NVML).split()
    assert seen == re.findall(r"UUID: (GPU-[0-9a-f-]+)", host.ssh("nvidia-smi -L").stdout)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        ("--gpus 1", 1),
        ("""--gpus '"device=0"'""", 1),
        ("""--gpus '"capabilities=utility"'""", 1),
        ("--gpus all --read-only", None),
        ("--gpus all --user 1000:1000", None),
        ("--gpus all --cap-drop ALL --security-opt no-new-privileges", None),
    ],
)
def test_dockers_own_flag(host: Host, flags: str, lines: int | None) -> None:
    listed = run(host, flags, "nvidia-smi -L")
    assert listed.count("UUID: GPU-") == (HOSTS[host.name] if lines is None else lines)


@pytest.mark.parametrize("flags", _WAYS)
def test_a_refusal_is_dockers_error_line(host: Host, flags: str) -> None:
    with pytest.raises(LabError) as caught:
        run(host, f"{flags} -e 'NVIDIA_REQUIRE_CUDA=cuda>=13.0'", "true")
    says = (
        "requires cuda>=13.0, this host's driver 550.163.01 supports 12.4: update the driver to ≥ 580 or use an image "
        "for CUDA ≤ 12.4"
    )
    assert says in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("flags", _WAYS)
def test_the_releases_own_python_is_recorded_and_python3_alone_stands_in_for_it(host: Host, flags: str) -> None:
    python = f"/usr/bin/python{PYTHONS[host.name]}"
    for program in ("gpuprov-container-runtime", "gpuprov-container-runtime-hook", "nvidia-container-runtime-hook"):
        assert host.ssh(f"grep ^python= /usr/bin/{program}").stdout == f"python={python}\n"
    for unit in ("gpuprov-nodes", "gpuprov-refresh"):
        assert f"' {python} -I /usr/lib/gpuprov/boot.pyz " in host.ssh(f"systemctl cat {unit}").stdout
    assert run(host, flags, "nvidia-smi -L").count("UUID: GPU-") == HOSTS[host.name]
    host.ssh(f"mv {python} {python}.away")
    try:
        with pytest.raises(LabError) as caught:
            run(host, flags, "true")
        assert f"gpuprov: the container runtime needs {python}, which is missing: run gpuprov install" in str(
            caught.value
        )
        run(host, "", "true")
        host.ssh(f"ln -sfn {python}.away /usr/bin/python3")
        assert run(host, flags, "nvidia-smi -L").count("UUID: GPU-") == HOSTS[host.name]
        host.ssh("systemctl restart gpuprov-nodes gpuprov-refresh")
    finally:
        host.ssh(f"mv {python}.away {python}; ln -sfn {python} /usr/bin/python3")


@pytest.mark.parametrize("flags", _WAYS)
def test_a_running_container_keeps_its_gpus_over_systemds_reload(host: Host, flags: str) -> None:
    """And gets no other: the devices that it was not given stay closed, as nodes of its own show."""
    one = flags.replace("all", "device=0") if "--gpus" in flags else flags.replace("=all", "=0")
    sleep = "--detach --network=none full:1 python3 -c 'import time; time.sleep(60)'"
    host.ssh(f"docker run --name reload {flags} {sleep} && docker run --name one {one} {sleep}")
    try:
        host.ssh("systemctl daemon-reload")
        assert host.ssh("docker exec reload nvidia-smi -L").stdout == host.ssh("nvidia-smi -L").stdout
        assert host.ssh(f"docker exec one python3 -c '{_OPENS}'").stdout.split() == ["ENXIO", "EPERM", "EPERM"]
    finally:
        host.ssh("docker rm --force reload one")


@pytest.mark.slow
def test_running_containers_keep_their_gpus_over_a_restart_of_docker(host: Host) -> None:
    """Without live-restore docker starts them again, with it they run on; with both ways to a GPU."""
    expected = host.ssh("nvidia-smi -L").stdout
    config = "/etc/docker/daemon.json"
    names = ("by-hook", "by-runtime")
    for name, flags in zip(names, _WAYS):
        flags = f"{flags} --restart=always --stop-signal=KILL --name {name} --detach --network=none"
        host.ssh(f"docker run {flags} full:1 python3 -c 'import time; time.sleep(1000)'")
    host.ssh(f"cp {config} /root/daemon.json")
    try:
        first = _started(host, names)
        host.ssh(_RESTART)
        again = _started(host, names)
        assert all(one != other for one, other in zip(first, again))
        assert [host.ssh(f"docker exec {name} nvidia-smi -L").stdout for name in names] == [expected] * 2
        host.ssh(f"sed -i '0,/{{/s//{{\"live-restore\": true,/' {config} && systemctl reload docker")
        host.ssh("until docker info | grep -q 'Live Restore Enabled: true'; do sleep 0.1; done")
        host.ssh(_RESTART)
        assert _started(host, names) == again
        assert [host.ssh(f"docker exec {name} nvidia-smi -L").stdout for name in names] == [expected] * 2
        host.ssh("systemctl daemon-reload")
        assert [host.ssh(f"docker exec {name} nvidia-smi -L").stdout for name in names] == [expected] * 2
    finally:
        host.ssh(f"docker rm --force {' '.join(names)}; mv /root/daemon.json {config}; {_RESTART}")


def _started(host: Host, names: Sequence[str]) -> list[str]:
    """Return the process and the time of each container's start; docker starts those of --restart=always by itself."""
    form = "'{{.State.Running}} {{.State.Pid}} {{.State.StartedAt}}'"
    script = (
        f"until docker inspect -f {form} {' '.join(names)} | grep -c ^true | grep -qx {len(names)}; do sleep 0.1; done"
    )
    host.ssh(script)
    return host.ssh(f"docker inspect -f {form} {' '.join(names)}").stdout.splitlines()


def test_a_container_left_alone_has_nothing_of_the_drivers(host: Host) -> None:
    listed = run(host, "", "sh -c 'ls /dev /usr/bin; ldconfig -p 2>/dev/null; :'")
    assert "nvidia" not in listed and "libcuda" not in listed


@pytest.mark.only(host="trixie")
def test_docker_26_takes_devices_by_the_specification(site: Site, host: Host) -> None:
    assert run(host, "--device nvidia.com/gpu=all", "nvidia-smi -L") == host.ssh("nvidia-smi -L").stdout
    assert run(host, "--device nvidia.com/gpu=1", "nvidia-smi -L").count("UUID: GPU-") == 1
    assert run(host, "--device nvidia.com/gpu=all", _FINDS).strip() == str(HOSTS[host.name])
    listed = run(host, "--device nvidia.com/gpu=all", "ldconfig -p")
    assert "libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1" in listed
    done = gpuprov_succeeds("verify", "--hosts", site.inventory(host.name))
    assert re.search(r"docker run --device +ok 2 GPUs \(CDI\)", done.stdout)


@pytest.mark.parametrize("flags", _WAYS)
def test_what_a_start_leaves_in_the_writable_layer_is_little_and_never_grows(host: Host, flags: str) -> None:
    """Links, empty targets of mounts and the loader's cache: the cache alone has a size."""
    layer = host.ssh(
        f"docker create --name layer --network=none {flags} full:1 true >&2 &&"
        " docker inspect --format '{{.GraphDriver.Data.UpperDir}}' layer"
    ).stdout.strip()
    listing = (
        f"docker start --attach layer && cd {layer} && find . -type f -printf '%s %p\\n' -o -printf '%y %p\\n' | sort"
    )
    try:
        first = host.ssh(listing).stdout
        assert [host.ssh(listing).stdout for _ in range(3)] == [first] * 3
    finally:
        host.ssh("docker rm layer")
    sizes = {name: int(size) for size, name in (line.split() for line in first.splitlines()) if size.isdigit()}
    assert {name for name, size in sizes.items() if size} == {"./etc/ld.so.cache"}
    assert "./usr/lib/x86_64-linux-gnu/libcuda.so.1" in first and "~" not in first
    assert sizes["./etc/ld.so.cache"] <= 2 * int(host.ssh("stat -c %s /etc/ld.so.cache").stdout)


# docker asks for more controllers than this machine has; so crun is given its container by hand.
_CRUN = r"""
set -e
command -v crun >/dev/null || { apt-get -q update && apt-get -qy install --no-install-recommends crun; } >/dev/null
mkdir -p /root/oci/rootfs && cd /root/oci
[ -e rootfs/usr/bin ] || { docker create --name oci full:1 true
  docker export oci | tar -xC rootfs; docker rm oci; } >/dev/null
rm -f config.json && crun spec
python3 - "$@" <<'END'
import json, sys
config = json.load(open("config.json"))
config["process"].update(terminal=False, args=["sh", "-c", "nvidia-smi -L; ldconfig -p | grep libcuda.so.1"])
config["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=all")
config["root"]["readonly"] = False
if "systemd" in sys.argv:
    config["linux"]["cgroupsPath"] = "system.slice:lab:oci"
if "hook" in sys.argv:
    hook = {"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["nvidia-container-runtime-hook", "prestart"]}
    config["hooks"] = {"prestart": [hook]}
json.dump(config, open("config.json", "w"))
END
case $* in *systemd*) cgroups=--systemd-cgroup ;; esac
"$1" $cgroups create --bundle . oci >out 2>&1 </dev/null || { cat out >&2; exit 1; }
"$1" start oci
for _ in $(seq 100); do crun state oci | grep -q '"stopped"' && break; sleep 0.1; done
"$1" delete --force oci
cat out
"""


# Only trixie has a crun (1.21) that starts here.
@pytest.mark.only(host="trixie")
@pytest.mark.parametrize(
    "words", ["gpuprov-container-runtime runtime", "/usr/bin/crun hook", "/usr/bin/crun hook systemd"]
)
def test_crun_on_cgroup_version_2(host: Host, words: str) -> None:
    settings = "/etc/gpuprov/container-runtime.toml"
    host.add_archive()
    host.ssh(f"mkdir -p /etc/gpuprov && cat > {settings}", stdin='[nvidia-container-runtime]\nruntimes = ["crun"]\n')
    try:
        out = host.ssh(f"sh -s {words}", stdin=_CRUN).stdout
    finally:
        host.ssh("rm -r /etc/gpuprov")
    assert out.startswith(host.ssh("nvidia-smi -L").stdout)
    assert "libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1" in out


def test_containers_whose_root_is_nobody_on_the_host(host: Host) -> None:
    """docker with userns-remap: files belong to the container's root, devices are the host's."""
    daemon = host.ssh("cat /etc/docker/daemon.json").stdout
    try:
        host.ssh("cat > /etc/docker/daemon.json", stdin='{"userns-remap": "default",' + daemon.strip()[1:])
        host.ssh(_RESTART)
        host.ssh(_IMAGE)
        for flags in _WAYS:
            assert run(host, flags, "cat /proc/self/uid_map").split()[1] != "0"
            assert run(host, flags, "nvidia-smi -L") == host.ssh("nvidia-smi -L").stdout
            assert run(host, f"{flags} --read-only", "nvidia-smi -L") == host.ssh("nvidia-smi -L").stdout
            assert run(host, flags, _FINDS).strip() == str(HOSTS[host.name])
            assert run(host, flags, "stat -c %u /etc/ld.so.cache").strip() == "0"
    finally:
        host.ssh("cat > /etc/docker/daemon.json", stdin=daemon)
        host.ssh(_RESTART)


_DIVIDE = r"""
set -eu
cd /proc/driver/nvidia/capabilities
for pair in gi1:12 gi1/ci0:13 gi2:21 gi2/ci0:22; do
    mkdir -p gpu0/mig/${pair%:*}
    printf 'DeviceFileMinor: %s\nDeviceFileMode: 292\nDeviceFileModify: 1\n' ${pair#*:} >gpu0/mig/${pair%:*}/access
done
"""


@pytest.mark.parametrize(("flags", "way"), zip(_WAYS, ("hook", "runtime")))
def test_running_container_is_explained_by_its_name(host: Host, site: Site, flags: str, way: str) -> None:
    """The engine's own answer to `inspect`: a name, an id; a container that has ended is told apart."""
    explain = ("hook", "explain", "--hosts", site.inventory(host.name), "--limit", host.name)
    sleep = "full:1 python3 -c 'import time; time.sleep(600)'"
    identifier = host.ssh(f"docker run -d --name explained --network=none {flags} {sleep}").stdout.strip()
    try:
        for name in ("explained", identifier[:12]):
            done = gpuprov_succeeds(*explain, name)
            assert f"{identifier}, started with GPUs by the {way}" in done.stdout
        done = gpuprov_succeeds("cuda", *explain[2:], "explained")
        assert "550.163.01 at /usr/lib/x86_64-linux-gnu/libcuda.so.1: " in done.stdout
        host.ssh("docker kill explained")
        done = gpuprov(*explain, "explained")
        assert done.returncode == 1 and "the container explained does not run" in done.stdout
    finally:
        host.ssh("docker rm -f explained")


def test_a_gpu_that_is_divided_is_given_by_its_parts(site: Site) -> None:
    """As after `nvidia-smi mig -cgi …`: the next run makes the nodes and names the parts."""
    host = site.installed("main")
    host.ssh(_IMAGE)
    inventory = site.inventory("main")
    host.ssh(_DIVIDE)
    try:
        gpuprov_succeeds("install", "--hosts", inventory)
        parts = [line.split("UUID: ")[1].rstrip(")\n") for line in host.ssh("nvidia-smi -L").stdout.splitlines()[1:3]]
        assert [part[:4] for part in parts] == ["MIG-", "MIG-"]
        for flags, seen in (
            ("--runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=0:1", parts[1:]),
            (f"--runtime=nvidia -e NVIDIA_VISIBLE_DEVICES={parts[0]}", parts[:1]),
            ("""--gpus '"device=0:0"'""", parts[:1]),
            ("--gpus all", parts),
        ):
            listed = run(host, flags, "nvidia-smi -L")
            assert [part for part in parts if part in listed] == seen, f"{flags}: {listed}"
        with pytest.raises(LabError, match="there is no GPU '0' on this host; its GPUs: 0:0, 0:1, 1"):
            run(host, "--runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=0", "true")
        assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
        gpuprov_succeeds("verify", "--hosts", inventory)
    finally:
        host.ssh("rm -r /proc/driver/nvidia/capabilities/gpu0 /dev/nvidia-caps/nvidia-cap[12][123]")
        gpuprov_succeeds("install", "--hosts", inventory)


@pytest.mark.slow
def test_the_doctor_names_a_running_container_that_loads_another_libcuda(site: Site) -> None:
    """By LD_LIBRARY_PATH; and a container that has asked for no libcuda is none of them."""
    host = site.installed("main")
    host.ssh(_IMAGE)
    library = "/usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01"
    host.ssh(f"mkdir /root/own && cp {library} /root/own/libcuda.so.535.261.03")
    host.ssh("ln -s libcuda.so.535.261.03 /root/own/libcuda.so.1")
    own = "-v /root/own:/opt/own:ro -e LD_LIBRARY_PATH=/opt/own"
    run = "docker run -d --network=none --gpus all"
    sleep = "full:1 python3 -c 'import time; time.sleep(600)'"
    doctor = ("doctor", "--hosts", site.inventory(host.name))
    host.ssh(f"{run} --name sound {sleep} && {run} --name smi -e NVIDIA_DRIVER_CAPABILITIES=utility {sleep}")
    try:
        sound = gpuprov(*doctor)
        assert re.search("containers +ok 2 running with GPUs", sound.stdout), sound.stdout
        host.ssh(f"{run} --name trainer {own} {sleep}")
        done = gpuprov(*doctor)
        assert done.returncode == 1, done.stdout
        assert (
            "the container trainer loads a library that does not fit the driver: /opt/own/libcuda.so.1 is of driver "
            "535.261.03, the loaded kernel module is 550.163.01 (CUDA result 803, 35, 36) (certain)\n  seen: trainer "
            "(docker): /opt/own/libcuda.so.535.261.03: LD_LIBRARY_PATH has /opt/own\n  next: gpuprov cuda trainer  # "
        ) in done.stdout
    finally:
        host.ssh("docker rm -f sound smi trainer; rm -r /root/own", check=False)
