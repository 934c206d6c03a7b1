"""The hook on the real runc, without our runtime: as docker's --gpus has it, on cgroup version 1 and 2."""

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook import deploy, prestart
from tests.crun import newer_crun
from tests.files import put
from tests.integration.container_bench import ENXIO, LIBRARIES, Bench, bench, nodes, require_all_gpus

__all__ = ["bench"]
pytestmark = pytest.mark.root
_VERSION_2 = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; exec"


@pytest.fixture(params=[1, 2], ids=["cgroup v1", "cgroup v2"])
def versions(request: pytest.FixtureRequest, bench: Bench, tmp_path: Path) -> Iterator[Bench]:
    """The bench with a runtime that sees one version of cgroups alone."""
    if request.param == 2:
        if "crun" in bench.low_level:
            # That of Debian 12, 1.8, wants more locked memory here than root in a virtual machine may have.
            bench.low_level = newer_crun(tmp_path)
        wrapper = tmp_path / "runc-v2"
        inner = f'{_VERSION_2} {bench.low_level} "$@"'
        put(wrapper, f"#!/bin/sh\nexec unshare -m sh -c '{inner}' sh \"$@\"\n", 0o755)
        bench.low_level = str(wrapper)
        bench.caller = str(wrapper)
    yield bench
    bench.delete()


@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
def test_a_container_gets_all_gpus_by_hook(versions: Bench, stage: str) -> None:
    require_all_gpus(versions.report("NVIDIA_VISIBLE_DEVICES=all", by_hook=stage))


@pytest.fixture(params=["5.10", "4.18"])
def older(request: pytest.FixtureRequest, bench: Bench) -> Bench:
    """The bench with a hook to which this kernel is an older one: without mount_setattr, without all of them."""
    library = bench.deployed.folder / "host/usr/lib/gpuprov/runtime_hook"
    numbers = "428, 429, 442"
    source = (library / "system_calls.py").read_text()
    assert numbers in source and "_OPENAT2 = 437\n" in source
    if request.param == "5.10":
        source = source.replace(numbers, "428, 429, 9442")
    else:
        source = source.replace(numbers, "9428, 9429, 9442").replace("_OPENAT2 = 437\n", "_OPENAT2 = 9437\n")
    (library / "system_calls.py").write_text(source)
    deploy.compile_bytecode(str(library))
    return bench


def test_an_older_kernels_mounts_are_as_restricted(older: Bench) -> None:
    require_all_gpus(older.report("NVIDIA_VISIBLE_DEVICES=all", by_hook="prestart"))


def test_a_gpu_that_was_not_asked_for_stays_closed(versions: Bench) -> None:
    for number in (0, 1):
        os.mknod(versions.root / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(195, number))
    script = ["sh", "-c", "for n in 0 1; do (exec 3</gpu$n) 2>&1; done"]
    report = versions.report("NVIDIA_VISIBLE_DEVICES=1", by_hook="prestart", arguments=script)
    assert [line.rpartition(": ")[2] for line in report] == ["Operation not permitted", ENXIO]


def test_a_container_that_asks_for_nothing_gets_nothing(bench: Bench) -> None:
    bench.specification.unlink()
    assert [line for line in bench.report("A=1", by_hook="prestart") if not line.startswith("visible")] == []


def test_a_read_only_root_is_equipped_all_the_same(bench: Bench) -> None:
    report = bench.report("NVIDIA_VISIBLE_DEVICES=0", by_hook="prestart", root={"path": "rootfs", "readonly": True})
    assert [line.split()[1] for line in nodes(report)] == ["/dev/nvidia0", "/dev/nvidiactl"]
    assert f"file {LIBRARIES}/libcuda.so.1 cuda" in report


def test_a_refusal_stops_the_start_with_one_line(bench: Bench) -> None:
    done = bench.begin("NVIDIA_VISIBLE_DEVICES=9", by_hook="prestart")
    assert done.returncode != 0
    # crun keeps what hooks say to itself, unless the annotation run.oci.hooks.stderr names a file for it.
    says = (
        "(exit code: 1)" if "crun" in bench.low_level else "gpuprov: there is no GPU '9' on this host; its GPUs: 0, 1"
    )
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def add_kind(bench: Bench, **edits: Any) -> None:
    """Add vendor.com/thing=x to the specifications, and let containers ask for it."""
    bench.deployed.nvidia_settings.write_text(
        f"[nvidia-container-runtime]\nruntimes = ['{bench.low_level}']\n"
        "modes.cdi.requestable-kinds = ['vendor.com/thing']\n"
    )
    device = {"name": "x", "containerEdits": edits}
    (bench.deployed.specifications / "vendor.json").write_text(
        json.dumps({"cdiVersion": "0.6.0", "kind": "vendor.com/thing", "devices": [device]})
    )


@pytest.mark.parametrize(
    "edits",
    [
        {"hooks": [{"hookName": "createContainer", "path": "/bin/true"}]},
        {"netDevices": [{"hostInterfaceName": "eth9", "name": "eth0"}]},
        {"intelRdt": {"closID": "x"}},
        {"env": ["THING=1"]},
    ],
    ids=lambda edits: next(iter(edits)),
)
def test_what_stands_in_config_json_alone_is_refused_and_not_left_out(bench: Bench, edits: dict[str, Any]) -> None:
    add_kind(bench, **edits)
    done = bench.begin("NVIDIA_VISIBLE_DEVICES=0,vendor.com/thing=x", by_hook="prestart")
    assert done.returncode != 0
    if "crun" not in bench.low_level:
        assert f"the CDI specification has {next(iter(edits))} for what was asked for" in done.stderr


def test_nodes_of_every_kind_are_made(bench: Bench, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = {"path": "/dev/thing-pipe", "hostPath": str(tmp_path / "pipe")}
    unbuffered = {"path": "/dev/thing", "type": "u", "major": 195, "minor": 7}
    add_kind(bench, deviceNodes=[pipe, unbuffered])
    script = ["sh", "-c", "stat -c '%n %F %t:%T' /dev/thing*"]
    report = bench.report("NVIDIA_VISIBLE_DEVICES=vendor.com/thing=x", by_hook="prestart", arguments=script)
    assert report == ["/dev/thing character special file c3:7", "/dev/thing-pipe fifo 0:0"]


# crun itself starts no such container.
@pytest.mark.only(bench="runc")
def test_a_container_without_a_mount_namespace_of_its_own_is_refused(bench: Bench, tmp_path: Path) -> None:
    """What it is given would be mounted on the host, and stay there; here, in a namespace around the runtime."""
    wrapper = put(tmp_path / "inside", f'#!/bin/sh\nexec unshare -m {bench.low_level} "$@"\n', 0o755)
    linux = {name: value for name, value in bench.pristine["linux"].items() if not name.endswith("Paths")}
    linux["namespaces"] = [one for one in linux["namespaces"] if one["type"] != "mount"]
    bench.low_level = str(wrapper)
    done = bench.begin("NVIDIA_VISIBLE_DEVICES=0", by_hook="prestart", linux=linux, mounts=[])
    assert done.returncode != 0
    assert "no mount namespace of its own" in done.stderr


def test_whose_a_joined_user_namespaces_files_are_is_the_kernels_word() -> None:
    """Its mappings need not stand in config.json."""
    sleeper = subprocess.Popen(("unshare", "-U", "sh", "-c", "echo; exec sleep 60"), stdout=subprocess.PIPE)
    try:
        assert sleeper.stdout and sleeper.stdout.readline()
        Path(f"/proc/{sleeper.pid}/uid_map").write_text("5 5 1\n0 100000 5\n")
        Path(f"/proc/{sleeper.pid}/gid_map").write_text("0 200000 65536\n")
        assert prestart.root_user(sleeper.pid) == (100000, 200000)
        assert prestart.is_another_namespace(sleeper.pid, "user")
        assert not prestart.is_another_namespace(sleeper.pid, "mnt")
        assert prestart.root_user(os.getpid()) == (0, 0)
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize("place", ["usr", "usr/lib", LIBRARIES[1:], "usr/bin", "dev", "etc"])
@pytest.mark.parametrize(
    "target", ["{outside}", "/proc/self/root{outside}", "../../../../../../../..{outside}", "/proc"]
)
def test_nothing_is_written_through_links_to_the_host(bench: Bench, tmp_path: Path, place: str, target: str) -> None:
    outside = tmp_path / "outside"
    (outside / LIBRARIES.removeprefix("/usr/")).mkdir(parents=True)
    shutil.rmtree(bench.root / place, ignore_errors=True)
    (bench.root / place).parent.mkdir(parents=True, exist_ok=True)
    (bench.root / place).symlink_to(target.format(outside=outside))
    # runc 1.1 itself follows a /dev that leads out, for the links that it makes there.
    bench.configure("A=1")
    bench.create(runtime=bench.low_level)
    bench.delete()
    before = sorted(outside.rglob("*"))
    bench.begin("NVIDIA_VISIBLE_DEVICES=0", by_hook="prestart")
    assert sorted(outside.rglob("*")) == before
    # What comes from the driver's files, or lies outside; other tests mount their own meanwhile.
    assert f"/{tmp_path.parent.name}/{tmp_path.name}/" not in Path("/proc/self/mountinfo").read_text()


def test_wrong_nodes_in_the_image_are_replaced(bench: Bench) -> None:
    """/dev is a tmpfs in most containers; where the image's own is used, it may hold anything."""
    (bench.root / "dev").mkdir(exist_ok=True)
    (bench.root / "dev/nvidia0").symlink_to("/dev/zero")
    (bench.root / "dev/nvidiactl").write_text("a file")
    config = json.loads(bench.config.read_text())
    mounts = [mount for mount in config["mounts"] if not mount["destination"].startswith("/dev")]
    report = bench.report("NVIDIA_VISIBLE_DEVICES=0", by_hook="prestart", mounts=mounts)
    assert nodes(report) == [f"node /dev/nvidia0 c3:0 666 {ENXIO}", f"node /dev/nvidiactl c3:ff 666 {ENXIO}"]


@pytest.mark.parametrize(
    "state",
    ["", "{", "[]", "null", '{"bundle": 5}', "{}", '{"bundle": "/none", "pid": 1}', '{"bundle": "%s", "pid": true}'],
)
def test_a_state_that_is_none_is_refused_in_one_line(bench: Bench, state: str) -> None:
    bench.configure("NVIDIA_VISIBLE_DEVICES=0")
    text = state.replace("%s", str(bench.config.parent))
    done = subprocess.run((bench.deployed.hook, "prestart"), input=text, capture_output=True, text=True, check=False)
    if "none" in state:  # without a config.json there is nobody to give anything to, as runc will say
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, "")
    assert done.stderr.startswith("gpuprov: ")


def test_a_hook_without_standard_output_leaves_a_container_that_asks_for_nothing_alone(bench: Bench) -> None:
    bench.configure("A=1")
    shell = ("sh", "-c", 'exec "$1" prestart >&-', "sh", bench.deployed.hook)
    state = json.dumps({"bundle": str(bench.config.parent), "pid": os.getpid()})
    done = subprocess.run(shell, input=state, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
