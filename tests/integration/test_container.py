"""The runtime with the real runc: containers get what they ask for, others are left alone, refusals say why."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.integration.container_bench import LIBRARIES, NAME, Bench, bench, nodes
from tests.lab.shell import wait_for

__all__ = ["bench"]
pytestmark = pytest.mark.root


def test_a_container_gets_all_gpus_their_files_and_may_open_them(bench: Bench) -> None:
    report = bench.report("NVIDIA_VISIBLE_DEVICES=all")
    # No driver is loaded here: ENXIO says that the device cgroup let the call through; it forbids by EPERM.
    assert nodes(report) == [
        "node /dev/nvidia0 c3:0 666 No such device or address",
        "node /dev/nvidia1 c3:1 666 No such device or address",
        "node /dev/nvidiactl c3:ff 666 No such device or address",
    ]
    assert f"file {LIBRARIES}/libcuda.so.1 cuda" in report
    assert f"file {LIBRARIES}/libnvidia-ml.so.1 ml" in report
    assert "visible void" in report
    mounts = [line for line in report if line.startswith("mount ")]
    assert len(mounts) == 3
    assert len([line for line in report if line.startswith("file ")]) == 6
    assert all({"ro", "nosuid", "nodev"} <= set(line.split()[2].split(",")) for line in mounts)
    assert "wrote nvidia-smi" not in report


def test_a_subset_is_that_subset_and_the_cgroup_forbids_the_rest(bench: Bench) -> None:
    report = bench.report("NVIDIA_VISIBLE_DEVICES=GPU-1")
    assert [line.split()[1] for line in nodes(report)] == ["/dev/nvidia1", "/dev/nvidiactl"]
    config = json.loads(bench.config.read_text())
    allowed = [
        (rule.get("major"), rule.get("minor")) for rule in config["linux"]["resources"]["devices"] if rule["allow"]
    ]
    assert (195, 1) in allowed
    assert (195, 0) not in allowed


def test_a_node_that_was_not_asked_for_cannot_be_opened_even_if_it_is_made(bench: Bench) -> None:
    (bench.root / "made").mkdir()
    os.mknod(bench.root / "made/nvidia0", stat.S_IFCHR | 0o666, os.makedev(195, 0))
    bench.configure("NVIDIA_VISIBLE_DEVICES=1")
    config = json.loads(bench.config.read_text())
    config["process"]["args"] = ["sh", "-c", "exec 3</made/nvidia0"]
    bench.config.write_text(json.dumps(config))
    assert bench.create().returncode == 0
    bench.call("start", NAME)
    wait_for("the end", lambda: json.loads(bench.call("state", NAME).stdout)["status"] == "stopped")
    assert "Operation not permitted" in (bench.folder / "errors").read_text() + (bench.folder / "output").read_text()


def test_none_is_files_without_devices(bench: Bench) -> None:
    report = bench.report("NVIDIA_VISIBLE_DEVICES=none")
    assert nodes(report) == []
    assert f"file {LIBRARIES}/libcuda.so.1 cuda" in report


def test_a_driver_capability_brings_its_files_alone(bench: Bench) -> None:
    report = bench.report("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=utility")
    files = {line.split()[1] for line in report if line.startswith("file ")}
    assert files == {
        f"{LIBRARIES}/libnvidia-ml.so.1", f"{LIBRARIES}/libnvidia-ml.so.550.163.01", "/usr/bin/nvidia-smi"
    }  # fmt: skip


def test_a_container_that_asks_for_nothing_is_left_alone_bit_for_bit(bench: Bench) -> None:
    bench.specification.unlink()
    bench.configure("A=1")
    before = bench.config.read_bytes()
    assert bench.create().returncode == 0
    assert bench.config.read_bytes() == before


def test_config_json_keeps_mode_and_owner(bench: Bench) -> None:
    bench.configure("NVIDIA_VISIBLE_DEVICES=0")
    bench.config.chmod(0o640)
    os.chown(bench.config, 0, 12)
    assert bench.create().returncode == 0
    found = bench.config.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o640, 12)
    assert sorted(path.name for path in bench.config.parent.iterdir()) == ["config.json", "rootfs"]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (("NVIDIA_VISIBLE_DEVICES=7",), "there is no GPU '7' on this host; its GPUs: 0, 1"),
        (("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_REQUIRE_CUDA=cuda>=13.0"), "requires cuda>=13.0, this host's driver"),
        (("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=magic"), "asks for magic"),
    ],
)
def test_refusal_is_one_line_for_people_and_engine(bench: Bench, environment: tuple[str, ...], says: str) -> None:
    bench.configure(*environment)
    log = bench.folder / "log.json"
    done = bench.create("--log", str(log), "--log-format", "json")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("gpuprov: ")
    assert says in done.stderr
    entry = json.loads(log.read_text().splitlines()[-1])
    assert (entry["level"], entry["msg"]) == ("error", done.stderr.strip())
    assert bench.call("state", NAME).returncode != 0


@pytest.mark.parametrize("spoiled", ["specification", "settings"])
def test_what_is_broken_on_the_host_closes_the_door_for_gpu_containers_alone(bench: Bench, spoiled: str) -> None:
    getattr(bench, spoiled).write_text("{broken")
    bench.configure("NVIDIA_VISIBLE_DEVICES=0")
    done = bench.create()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    bench.configure("A=1")
    assert bench.create().returncode == 0


def test_other_commands_go_straight_through(bench: Bench) -> None:
    version = subprocess.run((bench.low_level, "--version"), capture_output=True, text=True, check=True)
    assert bench.call("--version").stdout == version.stdout
    direct = subprocess.run((bench.low_level, "state", "no such 'one'"), capture_output=True, text=True, check=False)
    passed = bench.call("state", "no such 'one'")
    assert (passed.returncode, passed.stdout) == (direct.returncode, direct.stdout)
    # runc puts the time before it.
    assert _message(passed.stderr) == _message(direct.stderr) != ""


def _message(line: str) -> str:
    return line.partition("msg=")[2] or line


def test_an_image_in_which_usr_is_a_link_to_the_host_gets_nothing_there(bench: Bench, tmp_path: Path) -> None:
    """runc resolves mount targets inside the root; what the runtime itself does must not reach out either."""
    outside = tmp_path / "outside"
    (outside / LIBRARIES.removeprefix("/usr/")).mkdir(parents=True)
    shutil.rmtree(bench.root / "usr")
    (bench.root / "usr").symlink_to(outside)
    bench.configure("NVIDIA_VISIBLE_DEVICES=0")
    bench.create()
    assert [path for path in outside.rglob("*") if not path.is_dir()] == []


def test_another_vendors_device_is_given_only_where_the_configuration_has_its_kind(bench: Bench) -> None:
    secret = bench.folder / "secret"
    secret.write_text("secret")
    mount = {"hostPath": str(secret), "containerPath": "/usr/nvidia-secret", "options": ["ro", "rbind"]}
    device = {"name": "admin", "containerEdits": {"mounts": [mount]}}
    (bench.specification.parent / "storage.json").write_text(
        json.dumps({"cdiVersion": "0.5.0", "kind": "vendor.com/storage", "devices": [device]})
    )
    asks = ("NVIDIA_VISIBLE_DEVICES=0,vendor.com/storage=admin", "NVIDIA_DRIVER_CAPABILITIES=all")
    bench.configure(*asks)
    before = bench.config.read_bytes()
    done = bench.create()
    assert done.returncode == 1
    assert "asks for vendor.com/storage=admin, and may name devices of nvidia.com alone" in done.stderr
    assert bench.config.read_bytes() == before
    bench.settings.write_text(
        f"[nvidia-container-runtime]\nruntimes = ['{bench.low_level}']\n"
        "modes.cdi.requestable-kinds = ['vendor.com/storage']\n"
    )
    assert "file /usr/nvidia-secret secret" in bench.report(*asks)
