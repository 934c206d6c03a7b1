"""An image whose links lead into a volume: with a real runc and crun, nothing on the host is written or replaced."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpuprov.cli.main import cli
from gpuprov.runtime_hook import deploy
from tests.integration.container_bench import LIBRARIES, Bench, bench
from tests.integration.podman_store import CONFIGURATION, run_report
from tests.integration.test_hostile_roots import state

__all__ = ["bench"]
pytestmark = pytest.mark.root
ALL = "NVIDIA_VISIBLE_DEVICES=all"
# "" is the runtime, the rest are stages of the hook.
WAYS = ["", "prestart", "createRuntime", "createContainer"]
COMPAT = "usr/local/cuda/compat"
TMPFS = {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder that stands for the host's root."""
    folder = tmp_path / "outside"
    for place in ("etc/ld.so.conf.d", "usr/bin", LIBRARIES[1:], "run", "dev"):
        (folder / place).mkdir(parents=True)
    (folder / "etc/ld.so.cache").write_text("the host's")
    (folder / "etc/ld.so.conf.d/00-gpuprov-compat.conf").write_text("the host's")
    (folder / LIBRARIES[1:] / "libcuda.so.1").symlink_to("libcuda.so.another")
    (folder / "usr/bin/nvidia-smi").symlink_to("/etc/alternatives/nvidia-smi")
    for name in ("nvidia0", "nvidiactl"):
        (folder / "dev" / name).write_text("the host's")
    return folder


def bind(source: Path, destination: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", *options]}


def add_mount(bench: Bench, source: Path, destination: str) -> None:
    """Let the driver's specification mount this file, too."""
    document = json.loads(bench.specification.read_text())
    mount = {"hostPath": str(source), "containerPath": destination, "options": ["ro", "nosuid"]}
    document["containerEdits"]["mounts"].append(mount)
    bench.specification.write_text(json.dumps(document))


def start(bench: Bench, way: str, *volumes: dict[str, Any], **changes: Any) -> str:
    """Create a container with these volumes, and return what is said, nothing if it starts."""
    if way == "createContainer":
        links = ("libcuda.so.550.163.01::libcuda.so.1", "libcuda.so.1::libcuda.so")
        entry = bench.hook_entry(way)
        pairs = [pair.replace("::", f"::{LIBRARIES}/") for pair in links]
        entry["args"] += ["--host-driver-version", "550.163.01", "--link", pairs[0], "--link", pairs[1]]
        changes["hooks"] = {way: [entry]}
    elif way:
        changes["hooks"] = {way: [bench.hook_entry(way)]}
    mounts = changes.pop("mounts", bench.pristine["mounts"])
    bench.configure(ALL, mounts=[*mounts, *volumes], **changes)
    # Otherwise crun keeps what its hooks say.
    said = bench.folder / "hook-errors"
    said.unlink(missing_ok=True)
    text = bench.config.read_text()
    bench.config.write_text(text[:-1] + f', "annotations": {{"run.oci.hooks.stderr": "{said}"}}}}')
    done = bench.create(runtime=bench.low_level if way else "")
    bench.delete()
    words = done.stderr + (said.read_text() if said.exists() else "")
    assert "Traceback" not in words
    assert "internal error" not in words
    return words if done.returncode else ""


# Where an image's link leads, with the host's root as volume at /rootfs; and what the link stands for.
LINKS = {
    "etc": "/rootfs/etc",
    "usr": "/rootfs/usr",
    "usr/lib": "/rootfs/usr/lib",
    LIBRARIES[1:]: f"../../rootfs{LIBRARIES}",
    "usr/bin": "/bin/../rootfs/usr/bin",
    "usr/local": "/rootfs/run",
    "etc/ld.so.conf.d": "/rootfs/etc/ld.so.conf.d",
    f"{LIBRARIES[1:]}/libcuda.so.1": f"/rootfs{LIBRARIES}/libcuda.so.1",
    "usr/bin/nvidia-smi": "/rootfs/run/made",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("place", "access"), [*((place, "rw") for place in LINKS), ("etc", "ro"), ("usr", "ro")])
def test_a_link_into_a_volume_leads_to_no_write(bench: Bench, host: Path, way: str, place: str, access: str) -> None:
    """`/etc -> /rootfs/etc` in the image, and `-v /:/rootfs:ro`, as monitoring agents have it."""
    link = bench.root / place
    shutil.rmtree(link, ignore_errors=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(LINKS[place])
    before = state(host)
    start(bench, way, bind(host, "/rootfs", access))
    assert state(host) == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("destination", ["/usr", LIBRARIES, "/mnt"])
def test_volume_over_the_library_folder_is_refused(bench: Bench, tmp_path: Path, way: str, destination: str) -> None:
    """Also one whose destination is a link of the image into that folder: its files would be hidden without a word."""
    volume = tmp_path / "volume"
    volume.mkdir()
    if destination == "/mnt":
        (bench.root / "mnt").symlink_to(LIBRARIES[1:])
    said = start(bench, way, bind(volume, destination, "rw"))
    assert f"in the volume at {destination}, and nothing is written into volumes" in said
    assert list(volume.rglob("*")) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_volume_that_brings_the_drivers_files_itself_is_left_as_it_is(bench: Bench, way: str) -> None:
    """As `-v /usr:/usr` does: the files are the same ones."""
    driver = bench.folder / "driver"
    folder = driver / LIBRARIES[5:]
    folder.mkdir(parents=True)
    (driver / "bin").mkdir()
    for name, path in (("cuda", "libcuda.so.550.163.01"), ("ml", "libnvidia-ml.so.550.163.01")):
        os.link(driver / name, folder / path)
    os.link(driver / "smi", driver / "bin/nvidia-smi")
    for name, target in (
        ("libcuda.so.1", "libcuda.so.550.163.01"), ("libcuda.so", "libcuda.so.1"),
        ("libnvidia-ml.so.1", "libnvidia-ml.so.550.163.01"),
    ):  # fmt: skip
        (folder / name).symlink_to(target)
    before = state(driver)
    assert start(bench, way, bind(driver, "/usr", "rw")) == ""
    assert state(driver) == before


@pytest.mark.parametrize("way", WAYS[:3])
def test_the_programs_link_in_a_writable_volume_is_not_replaced(bench: Bench, host: Path, way: str) -> None:
    """`-v /usr:/usr` destroyed the host's own link /usr/bin/nvidia-smi."""
    before = state(host)
    said = start(bench, way, bind(host / "usr/bin", "/usr/bin", "rw"))
    # The engine follows the link inside the root, and makes the mount's target where it leads.
    assert said == "" if way == "" else "in the volume at /usr/bin, and nothing is written into volumes" in said
    assert state(host) == before


@pytest.mark.parametrize("way", WAYS[1:3])
def test_the_hosts_dev_as_a_volume_keeps_its_files(bench: Bench, host: Path, way: str) -> None:
    mounts = [mount for mount in bench.pristine["mounts"] if not mount["destination"].startswith("/dev")]
    said = start(bench, way, bind(host / "dev", "/dev", "rw"), mounts=mounts)
    assert "in the volume at /dev, and nothing is written into volumes" in said
    # The engine makes its own links and files in there.
    assert all((host / "dev" / name).read_text() == "the host's" for name in ("nvidia0", "nvidiactl"))


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_in_a_volume_stays_as_it_is_and_the_container_starts(bench: Bench, host: Path, way: str) -> None:
    """The loader finds the libraries in its own folders."""
    before = state(host)
    assert start(bench, way, bind(host / "etc", "/etc", "rw")) == ""
    assert state(host) == before


@pytest.mark.parametrize("way", WAYS)
def test_compatibility_libraries_and_a_cache_in_a_volume_are_refused(bench: Bench, host: Path, way: str) -> None:
    (bench.root / COMPAT).mkdir(parents=True)
    (bench.root / COMPAT / "libcuda.so.580.65.06").write_text("compat")
    before = state(host)
    assert "in the volume at /etc, and nothing is written into volumes" in start(
        bench, way, bind(host / "etc", "/etc", "ro")
    )
    assert state(host) == before


@pytest.mark.parametrize("way", WAYS)
def test_a_volume_over_the_root_itself_is_refused(bench: Bench, host: Path, way: str) -> None:
    (bench.root / "rootfs").symlink_to("/")
    before = state(host)
    assert start(bench, way, bind(host, "/rootfs", "rw")) != ""
    assert state(host) == before


@pytest.mark.parametrize("way", WAYS[:3])
def test_a_tmpfs_of_the_containers_own_takes_mount_targets(bench: Bench, tmp_path: Path, way: str) -> None:
    """As containers with systemd have it at /run, where the sockets of the driver's services go."""
    (tmp_path / "socket").write_text("socket")
    add_mount(bench, tmp_path / "socket", "/run/deep/socket")
    (bench.root / "run").mkdir()
    assert start(bench, way, TMPFS) == ""
    assert list((bench.root / "run").iterdir()) == []


@pytest.mark.parametrize("way", WAYS[1:3])
def test_a_tmpfs_of_the_hosts_takes_nothing(bench: Bench, way: str) -> None:
    """A volume that is mounted over the container's own tmpfs by way of a link: it is a tmpfs too, but the host's."""
    add_mount(bench, bench.folder / "driver/smi", "/run/deep/smi")
    (bench.root / "run").mkdir()
    (bench.root / "mnt").symlink_to("run")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        said = start(bench, way, TMPFS, bind(Path(folder), "/mnt", "rw"))
        assert "in the volume at /mnt, and nothing is written into volumes" in said
        assert list(Path(folder).iterdir()) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "target", ["/proc/kmsg", "/proc/self/fd/0", "/proc/1/mem", "/proc/sys/kernel/ostype", "/sys/kernel/notes"]
)
def test_a_file_of_the_kernels_in_the_caches_place_is_not_read(bench: Bench, way: str, target: str) -> None:
    """procfs calls /proc/kmsg a regular file, and a reader waits for ever: so did the start."""
    (bench.root / "etc").mkdir(exist_ok=True)
    (bench.root / "etc/ld.so.cache").symlink_to(target)
    assert start(bench, way) == ""
    content = (bench.root / "etc/ld.so.cache").read_bytes()
    assert not (bench.root / "etc/ld.so.cache").is_symlink()
    assert content.startswith(b"glibc-ld.so.cache1.1")


@pytest.mark.parametrize("stage", ["prestart", "createContainer"])
def test_a_hook_that_is_kept_waiting_gives_up_and_says_so(bench: Bench, stage: str) -> None:
    library = bench.deployed.folder / "host/usr/lib/gpuprov/runtime_hook"
    source = (library / "hook_main.py").read_text()
    assert "PATIENCE_SECONDS = 20\n" in source
    (library / "hook_main.py").write_text(source.replace("PATIENCE_SECONDS = 20\n", "PATIENCE_SECONDS = 1\n"))
    deploy.compile_bytecode(str(library))
    hook = subprocess.Popen(
        (bench.deployed.hook, stage), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert hook.stderr is not None
    try:
        # The state never comes.
        assert hook.wait(timeout=60) == 1
        said = hook.stderr.read()
    finally:
        hook.kill()
        hook.communicate()
    assert said == "gpuprov: the container's files were not ready after 1 s: something does not answer\n"


def podman(bench: Bench, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a container of podman's, equipped by the prestart hook in a folder of OCI hooks; `words` are its volumes."""
    hooks = bench.folder / "hooks.d"
    hooks.mkdir()
    configured = CliRunner().invoke(cli, [
        "runtime", "configure", "--runtime=podman", "--config-mode=hook", f"--hook-path={hooks}/nvidia.json",
        f"--nvidia-runtime-hook-path={bench.deployed.hook}", f"--config={bench.folder}/containers.conf",
    ])  # fmt: skip
    assert configured.exit_code == 0, configured.output
    configuration = bench.folder / "containers.conf"
    configuration.write_text(CONFIGURATION)
    options = ("--no-hosts", "--env=NVIDIA_VISIBLE_DEVICES=1", *words)
    engine = (f"--runtime={bench.low_level}", f"--hooks-dir={hooks}")
    # Its mounts go with this namespace, however long podman's own cleaning takes.
    return run_report(bench.root, configuration, *options, podman=engine, before=("unshare", "-m"))


@pytest.mark.needs("podman")
@pytest.mark.parametrize("link", ["", "etc", LIBRARIES[1:]])
def test_podman_with_a_folder_of_hooks_writes_nothing_into_the_hosts_root(bench: Bench, host: Path, link: str) -> None:
    """`podman run -v /:/rootfs:ro` with an image whose link leads there; an image without one gets its GPU."""
    for name in ("hostname", "resolv.conf", "hosts"):
        # The mounts of podman's own, whose targets the low-level runtime would make.
        (host / "etc" / name).touch()
    if link:
        # Before there is a volume, podman follows the link to this.
        (bench.root / "rootfs" / link).mkdir(parents=True)
        shutil.rmtree(bench.root / link, ignore_errors=True)
        (bench.root / link).symlink_to(f"/rootfs/{link}")
    (bench.root / "rootfs").mkdir(exist_ok=True)
    before = state(host)
    done = podman(bench, "-v", f"{host}:/rootfs:ro")
    assert state(host) == before
    assert "Traceback" not in done.stderr
    if link == LIBRARIES[1:]:
        assert done.returncode != 0
        # crun keeps what its hooks say.
        assert "crun" in bench.low_level or "in the volume at /rootfs, and nothing is written into" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "node /dev/nvidia1" in done.stdout
