"""The runtime with the real runc: containers get what they ask for, others are left alone, refusals say why."""

import json
import os
import stat
import subprocess

import pytest

from tests.integration.container_bench import ENXIO, LIBRARIES, NAME, Bench, bench, nodes, require_all_gpus

__all__ = ["bench"]
pytestmark = pytest.mark.root


def test_a_container_gets_all_gpus_their_files_and_may_open_them(bench: Bench) -> None:
    report = bench.report("NVIDIA_VISIBLE_DEVICES=all")
    require_all_gpus(report)
    assert f"file {LIBRARIES}/libnvidia-ml.so.1 ml" in report
    assert "visible void" in report
    assert len([line for line in report if line.startswith("file ")]) == 6


def test_a_subset_is_that_subset_and_the_cgroup_forbids_the_rest(bench: Bench) -> None:
    """Even if the node of a GPU that was not asked for is made."""
    report = bench.report("NVIDIA_VISIBLE_DEVICES=GPU-1")
    assert nodes(report) == [f"node /dev/nvidia1 c3:1 666 {ENXIO}", f"node /dev/nvidiactl c3:ff 666 {ENXIO}"]
    os.mknod(bench.root / "made", stat.S_IFCHR | 0o666, os.makedev(195, 0))
    (said,) = bench.report("NVIDIA_VISIBLE_DEVICES=GPU-1", arguments=["sh", "-c", "(exec 3</made) 2>&1"])
    assert said.endswith(": Operation not permitted")


@pytest.mark.parametrize("by_hook", ["", "prestart"], ids=["runtime", "hook"])
def test_none_is_files_without_devices(bench: Bench, by_hook: str) -> None:
    report = bench.report("NVIDIA_VISIBLE_DEVICES=none", by_hook=by_hook)
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
    odd = '{ "ociVersion": "1.0.2",   "odd": [1.50, 1e3, "\\ud83d\\ude00"], "process": {"env": ["%s"]} }\n'
    # The second looks like a request of the image's own: Python has to look.
    for variable in ("A=1", "NVIDIA_VISIBLE_DEVICES=void"):
        bench.config.write_text(odd % variable)
        bench.create()
        assert bench.config.read_text() == odd % variable


def test_config_json_is_replaced_whole_and_keeps_mode_owner_and_unknown_fields(bench: Bench) -> None:
    bench.configure("NVIDIA_VISIBLE_DEVICES=0", future={"x": [1, None, 2**63]})
    bench.config.chmod(0o640)
    os.chown(bench.config, 0, 12)
    before = bench.config.stat()
    assert bench.create().returncode == 0
    found = bench.config.stat()
    assert json.loads(bench.config.read_text())["future"] == {"x": [1, None, 2**63]}
    assert (stat.S_IMODE(found.st_mode), found.st_gid, found.st_ino != before.st_ino) == (0o640, 12, True)
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
