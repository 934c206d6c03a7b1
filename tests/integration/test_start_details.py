"""Single sides of a start on the real runc: user namespaces, settings, logs, volumes, an image that interferes."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.files import put
from tests.integration.container_bench import ENXIO, LIBRARIES, Bench, bench, nodes
from tests.integration.own_devices import own_devices

__all__ = ["bench"]
pytestmark = [pytest.mark.root, pytest.mark.only(bench="runc")]
ALL = "NVIDIA_VISIBLE_DEVICES=all"
BY = ["", "prestart"]


# -- user namespaces -------------------------------------------------------------------------------------------------


@pytest.fixture
def host_nodes(bench: Bench) -> Iterator[None]:
    """Device nodes on the host, which a user namespace can't make; in a /dev of the test's own."""
    with own_devices():
        for name, minor in (("nvidia0", 0), ("nvidia1", 1), ("nvidiactl", 255)):
            path = Path("/dev") / name
            os.mknod(path, 0o20666, os.makedev(195, minor))
            path.chmod(0o666)
        yield


@pytest.mark.parametrize("by_hook", BY, ids=["runtime", "hook"])
def test_host_nodes_have_the_links_that_systemd_uses(bench: Bench, host_nodes: None, by_hook: str) -> None:
    bench.report("NVIDIA_VISIBLE_DEVICES=1", by_hook=by_hook)
    found = {path.name: str(path.readlink()) for path in Path("/dev/char").glob("195:*")}
    assert found == {"195:1": "../nvidia1", "195:255": "../nvidiactl"}


def in_user_namespace(bench: Bench) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Give the root to user 100000; return config.json's `linux` and `mounts` for a namespace in which he is root."""
    for path in [bench.folder, *bench.folder.parents[:3]]:
        path.chmod(path.stat().st_mode | 0o055)
    for folder, _, files in os.walk(bench.root):
        for name in (".", *files):
            os.chown(Path(folder) / name, 100000, 100000, follow_symlinks=False)
    linux = dict(bench.pristine["linux"])
    mapping = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    linux |= {"uidMappings": mapping, "gidMappings": mapping, "namespaces": [*linux["namespaces"], {"type": "user"}]}
    mounts = [one for one in bench.pristine["mounts"] if one["type"] not in ("sysfs", "cgroup", "mqueue")]
    return linux, mounts


def test_links_made_inside_a_user_namespace_are_its_root_users(bench: Bench, host_nodes: None) -> None:
    """The specification's hook makes them in the container's own namespaces, as engines that read CDI run it."""
    linux, mounts = in_user_namespace(bench)
    entry = bench.hook_entry("createContainer")
    entry["args"] += ["--link", f"libcuda.so.550.163.01::{LIBRARIES}/libcuda.so.1"]
    bench.configure(ALL, linux=linux, mounts=mounts, hooks={"createContainer": [entry]})
    done = bench.create(runtime=bench.low_level)
    assert done.returncode == 0, done.stderr
    link = (bench.root / LIBRARIES[1:] / "libcuda.so.1").lstat()
    assert (link.st_uid, link.st_gid) == (100000, 100000)


def require_gpus(report: list[str]) -> None:
    """The container has the host's nodes, which it may open, and the driver's library."""
    assert [line.split()[1] for line in nodes(report)] == ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]
    assert all(line.endswith(ENXIO) for line in nodes(report))
    assert f"file {LIBRARIES}/libcuda.so.1 cuda" in report


@pytest.mark.parametrize("by_hook", BY, ids=["runtime", "hook"])
def test_user_namespace_container_gets_its_own_nodes_and_links(bench: Bench, host_nodes: None, by_hook: str) -> None:
    linux, mounts = in_user_namespace(bench)
    require_gpus(bench.report(ALL, by_hook=by_hook, linux=linux, mounts=mounts))
    link = bench.root / LIBRARIES[1:] / "libcuda.so.1"
    assert (link.lstat().st_uid, link.lstat().st_gid) == (100000, 100000)
    assert (bench.root / "etc/ld.so.cache").stat().st_uid == 100000


_ROOTLESS = """#!/bin/sh
exec unshare -U --map-root-user -m sh -c 'mount -t tmpfs none /run; exec {program} --root {folder}/state "$@"' sh "$@"
"""


def test_rootless_engine_gives_gpus_by_runtime_and_hook_with_no_cgroups(bench: Bench, host_nodes: None) -> None:
    wrappers = {}
    for name, program in (("runtime", bench.runtime), ("runc", bench.low_level)):
        wrappers[name] = bench.folder / f"rootless-{name}"
        put(wrappers[name], _ROOTLESS.format(program=program, folder=bench.folder), 0o755)
    bench.low_level = bench.caller = str(wrappers["runc"])
    bench.runtime = wrappers["runtime"]
    linux = {name: value for name, value in bench.pristine["linux"].items() if name != "resources"}
    linux["namespaces"] = [one for one in linux["namespaces"] if one["type"] != "network"]
    mounts = [one for one in bench.pristine["mounts"] if one["type"] not in ("sysfs", "cgroup", "mqueue", "devpts")]
    given: dict[str, Any] = {"linux": linux, "mounts": mounts}
    require_gpus(bench.report(ALL, **given))
    assert "use --runtime=nvidia, or no-cgroups = true" in bench.begin(ALL, by_hook="prestart", **given).stderr
    bench.deployed.nvidia_settings.write_text("[nvidia-container-cli]\nno-cgroups = true\n")
    require_gpus(bench.report(ALL, by_hook="prestart", **given))


# -- settings and logs -----------------------------------------------------------------------------------------------


def test_an_edit_of_the_settings_counts_at_the_next_start(bench: Bench) -> None:
    wanted = (ALL, "NVIDIA_REQUIRE_CUDA=cuda>=99")
    bench.configure(*wanted)
    assert "requires cuda>=99" in bench.create().stderr
    bench.deployed.nvidia_settings.write_text("disable-require = true\n")
    assert len(nodes(bench.report(*wanted))) == 3
    bench.settings.write_text("disable-require = false\n")
    bench.configure(*wanted)
    assert "requires cuda>=99" in bench.create().stderr


def test_a_swarm_resource_is_heard_though_its_name_is_none_of_nvidias(bench: Bench) -> None:
    bench.settings.write_text('swarm-resource = "DOCKER_RESOURCE_GPU"\n')
    assert [line.split()[1] for line in nodes(bench.report("DOCKER_RESOURCE_GPU=1"))] == [
        "/dev/nvidia1",
        "/dev/nvidiactl",
    ]


def test_the_low_level_runtime_is_the_settings_and_a_change_of_it_is_seen(bench: Bench, tmp_path: Path) -> None:
    for name in ("one", "two"):
        program = put(tmp_path / name, f'#!/bin/sh\necho {name} "$@"\n', 0o755)
        bench.settings.write_text(f"[nvidia-container-runtime]\nruntimes = ['{tmp_path}/absent', '{program}']\n")
        for _ in range(2):
            assert bench.call("state", "x").stdout == f"{name} state x\n"
    bench.settings.unlink()
    assert "container does not exist" in bench.call("state", "x").stderr


def test_a_log_has_one_line_for_each_gpu_containers_start(bench: Bench) -> None:
    log = bench.folder / "log"
    bench.settings.write_text(f"[nvidia-container-runtime]\ndebug = '{log}'\n")
    bench.report(ALL, "EVIL=\x1b[2J\n2026 forged")
    bench.report("A=1")
    bench.report("NVIDIA_VISIBLE_DEVICES=none", by_hook="prestart")
    bench.configure("NVIDIA_VISIBLE_DEVICES=9")
    bench.create()
    lines = log.read_text().splitlines()
    assert [re.sub(r"^\S+ ", "", line).split(":")[0] for line in lines] == [
        "info bundle",
        "info bundle",
        "error bundle",
    ]
    assert "all; compute,utility; devices are named by NVIDIA_VISIBLE_DEVICES" in lines[0]
    assert "there is no GPU '9'" in lines[2]
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("target", ["{folder}", "{folder}/absent/x", "{folder}/link"])
def test_a_log_that_cannot_be_written_keeps_nobody_from_starting(bench: Bench, target: str) -> None:
    (bench.folder / "victim").write_text("untouched")
    (bench.folder / "link").symlink_to("victim")
    bench.settings.write_text(f"[nvidia-container-runtime]\ndebug = '{target.format(folder=bench.folder)}'\n")
    assert len(nodes(bench.report(ALL))) == 3
    assert (bench.folder / "victim").read_text() == "untouched"


# -- what the container brings itself --------------------------------------------------------------------------------


_PYTHON = (
    "json", "posix", "sitecustomize", "usercustomize", "encodings/__init__", "runtime_hook/__init__", "ctypes",
    "_struct", "runtime_hook/hook_main",
)  # fmt: skip


@pytest.mark.parametrize("stage", ["prestart", "createRuntime", "createContainer"])
@pytest.mark.parametrize("env", [[], None], ids=["env empty", "no env key"])
def test_nothing_of_the_image_runs_in_a_hook(bench: Bench, stage: str, env: list[str] | None) -> None:
    """CVE-2025-23266, and Python's own doors: its path, its working folder, sitecustomize, a codec."""
    mark = bench.root / "mark"
    code = f"open({str(mark)!r}, 'a').write('ran'); open('/mark', 'a').write('ran')\n"
    for name in _PYTHON:
        put(bench.root / f"{name}.py", code)
        for folder in ("usr/lib/python3.11", "usr/lib/python3/dist-packages"):
            put(bench.root / folder / f"{name}.py", code)
    for name in ("etc/ld.so.preload", "etc/ld.so.conf", "etc/nsswitch.conf"):
        put(bench.root / name, "/evil.so\n")
    for name in ("sbin/ldconfig", "sbin/ldconfig.real", "usr/bin/python3"):
        put(bench.root / name, "#!/bin/sh\necho ran > /mark\n", 0o755)
    entry: dict[str, Any] = {**bench.hook_entry(stage), "env": env}
    if stage == "createContainer":
        entry["args"] = [*entry["args"], "--link", f"libcuda.so.550.163.01::{LIBRARIES}/libcuda.so.1"]
    if env is None:
        del entry["env"]
    preload = "LD_AUDIT=/evil.so" if env == [] else "A=1"
    bench.configure(ALL, "PYTHONPATH=/", "PYTHONHOME=/", "PYTHONSTARTUP=/json.py", "PYTHONINSPECT=1", preload,
                    hooks={stage: [entry]})  # fmt: skip
    done = bench.create(runtime=bench.low_level)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not mark.exists() and not Path("/mark").exists()
    assert (bench.root / LIBRARIES[1:] / "libcuda.so.1").is_symlink()
    assert "evil" not in (bench.root / "etc/ld.so.cache").read_bytes().decode("latin-1")


@pytest.mark.parametrize("spoil", ["bundle torn", "bundle garbage", "a module missing", "all gone"])
@pytest.mark.parametrize("by_hook", BY, ids=["runtime", "hook"])
def test_a_broken_deployment_closes_the_door_in_one_line(bench: Bench, spoil: str, by_hook: str) -> None:
    library = bench.deployed.folder / "host/usr/lib/gpuprov/runtime_hook"
    for bundle in (library / "__pycache__").glob("*main.*cpython-*"):
        if bundle.suffix == ".pyc":
            continue
        if spoil == "bundle torn":
            bundle.write_bytes(bundle.read_bytes()[:5000])
        elif spoil == "bundle garbage":
            bundle.write_bytes(bytes(range(256)) * 10)
        else:
            bundle.unlink()
    if spoil == "a module missing":
        (library / "edits.py").unlink()
    elif spoil == "all gone":
        shutil.rmtree(library)
    done = bench.begin(ALL, by_hook=by_hook)
    assert done.returncode != 0
    assert "gpuprov: the container runtime in " in done.stderr and "run gpuprov install on this host" in done.stderr
    assert "Traceback" not in done.stderr
    bench.configure("A=1", arguments=["sh", "-c", ":"])
    assert bench.create().returncode == 0


@pytest.mark.parametrize(
    ("layout", "folder"),
    [
        (["usr/lib/x86_64-linux-gnu", "usr/lib64"], "/usr/lib/x86_64-linux-gnu"),
        (["usr/lib64"], "/usr/lib64"),
        (["usr/lib"], LIBRARIES),
    ],
    ids=["Debian", "RHEL and SUSE", "neither"],
)
def test_libraries_are_where_the_images_loader_searches(bench: Bench, layout: list[str], folder: str) -> None:
    shutil.rmtree(bench.root / "usr")
    for place in layout:
        (bench.root / place).mkdir(parents=True)
    assert f"file {folder}/libcuda.so.1 cuda" in bench.report(ALL)


def test_compatibility_libraries_of_the_image_are_found_first(bench: Bench) -> None:
    folder = bench.root / "usr/local/cuda/compat"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.580.65.06").write_text("compat")
    (folder / "libcuda.so.1").symlink_to("libcuda.so.580.65.06")
    for by_hook in BY:
        bench.report(ALL, by_hook=by_hook)
        cache = (bench.root / "etc/ld.so.cache").read_bytes()
        assert b"/usr/local/cuda/compat/libcuda.so.1\0" in cache
        assert f"{LIBRARIES}/libcuda.so.1\0".encode() not in cache
