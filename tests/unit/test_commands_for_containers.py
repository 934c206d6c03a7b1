"""`gpuprov cdi` and `gpuprov hook` as a user types them."""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from gpuprov.cli.main import cli
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook import driver_files
from tests import simgpu
from tests.triplet import TRIPLET

CONFIG = '{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}'


def run(*words: object, stdin: str = "") -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], input=stdin)


def error_of(result: Result) -> GpuprovError:
    assert isinstance(result.exception, GpuprovError), result.output
    return result.exception


def generated(root: Path, *words: object) -> Any:
    """Return the specification that `gpuprov cdi generate` prints for a tree."""
    return yaml.safe_load(run("cdi", "generate", "--driver-root", root, *words).stdout)


def mounts_of(specification: Any) -> dict[str, str]:
    return {one["containerPath"]: one["hostPath"] for one in specification["containerEdits"]["mounts"]}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with a driver and two GPUs."""
    root = tmp_path_factory.mktemp("driver")
    simgpu.install_tree(root)
    simgpu.write_kernel_tree(root, 2)
    return root


@pytest.fixture
def host(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config.toml, and a specification of that driver, which is loaded, in its spec-dirs."""
    monkeypatch.setattr(driver_files, "MODULE", str(driver / "proc/driver/nvidia/version"))
    (tmp_path / "cdi").mkdir()
    done = run("cdi", "generate", "--driver-root", driver, "--output", tmp_path / "cdi/nvidia.json")
    assert done.exit_code == 0, done.output
    (tmp_path / "config.toml").write_text(f"[nvidia-container-runtime.modes.cdi]\nspec-dirs = ['{tmp_path}/cdi']\n")
    return tmp_path


def test_a_generated_specification_is_valid_and_names_every_device(driver: Path) -> None:
    done = run("cdi", "generate", "--driver-root", driver)
    assert run("cdi", "validate", "-", stdin=done.output).output == ""
    found = yaml.safe_load(done.output)
    assert [device["name"] for device in found["devices"]] == [
        name for n in range(2) for name in (str(n), simgpu.gpu(n).uuid, simgpu.gpu(n).sysfs_id)
    ] + ["all"]
    assert all(mount["hostPath"].startswith(str(driver)) for mount in found["containerEdits"]["mounts"])
    assert not any(mount["containerPath"].startswith(str(driver)) for mount in found["containerEdits"]["mounts"])
    as_json = run("cdi", "generate", "--driver-root", driver, "--format", "json")
    assert json.loads(as_json.output) == found


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--no-all-device", "--device-name-strategy", "index"), ["0", "1"]),
        (("--no-all-device", "--device-name-strategy", "uuid"), [simgpu.gpu(0).uuid, simgpu.gpu(1).uuid]),
        (("--device-name-strategy", "type-index"), ["gpu0", "gpu1", "all"]),
        (("--device-name-strategy", "index,uuid", "--device-id", "1"), ["1", simgpu.gpu(1).uuid, "all"]),
        (("--device-id", "1,0", "--device-name-strategy", "index"), ["0", "1", "all"]),
        (("--device", simgpu.gpu(1).uuid, "--device-name-strategy", "index", "--no-all-device"), ["1"]),
        (("--device-ids", "all", "--device-name-strategy", "index"), ["0", "1", "all"]),
    ],
)
def test_devices_are_named_and_chosen_as_asked(driver: Path, words: tuple[str, ...], names: list[str]) -> None:
    assert [device["name"] for device in generated(driver, *words)["devices"]] == names


def test_kind_and_hook_are_what_is_asked_for(driver: Path) -> None:
    words = ("--vendor", "example.com", "--class", "accelerator", "--nvidia-cdi-hook-path", "/opt/hook")
    found = generated(driver, *words)
    assert found["kind"] == "example.com/accelerator"
    assert found["containerEdits"]["hooks"][0]["path"] == "/opt/hook"
    assert "hooks" not in generated(driver, "--disable-hook", "all")["containerEdits"]


@pytest.mark.parametrize("mode", ["auto", "gds", "mofed", "gdrcopy", "nvswitch", "imex", "management"])
def test_where_nothing_of_the_kind_is_there_is_nothing_to_generate(tmp_path: Path, mode: str) -> None:
    output = tmp_path / "nvidia.json"
    error = error_of(run("cdi", "generate", "--driver-root", tmp_path, "--mode", mode, "--output", output))
    assert not output.exists()
    assert "there is no NVIDIA driver here" in str(error) or "this host has nothing for" in str(error)


@pytest.fixture
def windows(tmp_path: Path) -> Path:
    """The root of a WSL to which Windows gives a GPU: file names as in nvidia-container-toolkit's driver-wsl.go."""
    for name in ("lib/libcuda.so.1", "lib/libdxcore.so", "lib/libnvidia-ml.so.1", "lib/nvidia-smi",
                 "drivers/nvmii.inf_amd64_c5b5db3e12daa5e3/libcuda.so.1.1"):  # fmt: skip
        place = tmp_path / "usr/lib/wsl" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(name)
    (tmp_path / "dev").mkdir()
    os.mknod(tmp_path / "dev/dxg", stat.S_IFCHR | 0o666, os.makedev(10, 125))
    return tmp_path


@pytest.mark.root
@pytest.mark.parametrize("mode", ["auto", "wsl"])
def test_wsl_gets_the_driver_of_windows(windows: Path, mode: str) -> None:
    found = generated(windows, "--mode", mode)
    (device,) = found["devices"]
    (node,) = device["containerEdits"]["deviceNodes"]
    assert (device["name"], node["path"], node["major"], node["minor"]) == ("all", "/dev/dxg", 10, 125)
    mounts, source = mounts_of(found), f"{windows}/usr/lib/wsl"
    assert mounts["/usr/lib/wsl/drivers"] == f"{source}/drivers"
    places = (f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64")
    assert {mounts[f"{place}/libcuda.so.1"] for place in places} == {f"{source}/lib/libcuda.so.1"}
    assert mounts["/usr/bin/nvidia-smi"] == f"{source}/lib/nvidia-smi"
    assert "hooks" not in found["containerEdits"]


@pytest.mark.root
@pytest.mark.parametrize("missing", ["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"])
def test_a_wsl_without_a_gpu_names_what_is_missing(windows: Path, missing: str) -> None:
    (windows / missing).unlink()
    error = str(error_of(run("cdi", "generate", "--driver-root", windows, "--mode", "wsl")))
    assert "Windows gives this WSL no GPU" in error and f"/{missing}" in error and "wsl --update" in error


def test_device_nodes_may_lie_elsewhere_than_the_driver(driver: Path) -> None:
    devices = generated(driver, "--dev-root", "/host")["devices"]
    nodes = [node for device in devices for node in device["containerEdits"]["deviceNodes"]]
    assert {node["hostPath"] for node in nodes} == {"/host/dev/nvidia0", "/host/dev/nvidia1"}
    assert {node["path"] for node in nodes} == {"/dev/nvidia0", "/dev/nvidia1"}


def test_libraries_and_configuration_are_looked_for_where_one_is_told_first(tmp_path: Path) -> None:
    simgpu.install_tree(tmp_path)
    simgpu.write_kernel_tree(tmp_path, 1)
    place = tmp_path / "opt/nvidia"
    (place / "vulkan/icd.d").mkdir(parents=True)
    (place / "vulkan/icd.d/nvidia_icd.json").write_text("{}")
    (place / "libnvidia-ml.so.999.1").write_text("")
    (place / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.999.1")
    words = ("--library-search-path", "/opt/nvidia", "--config-search-path", "/opt/nvidia")
    mounts = mounts_of(generated(tmp_path, *words))
    assert mounts[f"/usr/lib/{TRIPLET}/libnvidia-ml.so.999.1"] == f"{place}/libnvidia-ml.so.999.1"
    assert mounts["/etc/vulkan/icd.d/nvidia_icd.json"] == f"{place}/vulkan/icd.d/nvidia_icd.json"
    assert not [path for path in mounts if "libcuda" in path]


def test_nvidias_other_flags_are_taken_and_what_changes_nothing_is_said(driver: Path) -> None:
    words = ("--ldconfig-path", "/sbin/ldconfig", "--feature-flags", "x,y", "--disable-hooks", "all,enable-cuda-compat")
    done = run("cdi", "generate", "--driver-root", driver, *words, "--enable-hook", "all", "--discovery-mode", "NVML")
    assert "hooks" in yaml.safe_load(done.stdout)["containerEdits"]
    assert [line.split(" has no effect: ")[0] for line in done.stderr.splitlines()] == [
        "note: --ldconfig-path /sbin/ldconfig", "note: --feature-flag x", "note: --feature-flag y",
        "note: --disable-hook enable-cuda-compat",
    ]  # fmt: skip


def test_nvidias_variables_are_read(driver: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "NVIDIA_CTK_DRIVER_ROOT": str(driver), "NVIDIA_CTK_DEV_ROOT": "/host", "NVIDIA_CTK_CDI_HOOK_PATH": "/opt/hook",
        "NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES": "index,uuid", "NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS": "0",
        "NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE": "true", "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH": str(tmp_path / "x.json"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert (run("cdi", "generate").exit_code, run("cdi", "generate").output) == (0, "")
    found = json.loads((tmp_path / "x.json").read_text())
    assert [device["name"] for device in found["devices"]] == ["0", simgpu.gpu(0).uuid]
    assert found["devices"][0]["containerEdits"]["deviceNodes"][0]["hostPath"] == "/host/dev/nvidia0"
    assert found["containerEdits"]["hooks"][0]["path"] == "/opt/hook"
    assert json.loads(run("cdi", "generate", "--output", "", "--format", "JSON").output) == found


@pytest.mark.parametrize(
    "words", ["--mode csv", "--csv.file x", "--csv.ignore-pattern x", "--csv.compat-container-root x"]
)
def test_what_is_for_tegra_is_refused_with_the_reason(words: str) -> None:
    assert "is for Tegra, which gpuprov does not serve" in str(error_of(run("cdi", "generate", *words.split())))


def test_wrong_values_are_refused(driver: Path) -> None:
    strategy = run("cdi", "generate", "--device-name-strategy", "index,serial")
    assert (strategy.exit_code, "'serial' is not one of index, uuid, type-index" in strategy.output) == (2, True)
    profile = run("docker-args", "--for", "lxc", "--format", "json")
    assert (profile.exit_code, "leave --format out" in profile.output) == (2, True)
    assert "there is no device 7" in str(error_of(run("cdi", "generate", "--driver-root", driver, "--device-id", "7")))


def test_listing_names_devices_and_says_on_stderr_what_is_wrong(host: Path) -> None:
    (host / "cdi/bad.yaml").write_text("kind: x\n")
    done = run("cdi", "list", "--spec-dir", host / "cdi")
    assert done.exit_code == 0
    assert "nvidia.com/gpu=0\n" in done.stdout and "nvidia.com/gpu=all\n" in done.stdout
    assert done.stderr.startswith(f"{host}/cdi/bad.yaml: ")
    found = json.loads(run("cdi", "list", "--spec-dir", host / "cdi", "--json").stdout)
    assert {"name": "nvidia.com/gpu=0", "file": f"{host}/cdi/nvidia.json"} in found["devices"]
    assert list(found["errors"]) == [f"{host}/cdi/bad.yaml"]


def test_validation_says_each_fault_in_a_line(host: Path, tmp_path: Path) -> None:
    good = host / "cdi/nvidia.json"
    assert run("cdi", "validate", good).exit_code == 0
    assert run("cdi", "validate", "--spec-dir", host / "cdi").exit_code == 0
    bad = tmp_path / "bad.json"
    bad.write_text(good.read_text().replace('"name": "1"', '"name": "0"').replace("nvidia.com/gpu", "-/gpu"))
    done = run("cdi", "validate", good, bad)
    assert done.exit_code == 1
    assert [line.partition(": ")[0] for line in done.output.splitlines()] == [str(bad), str(bad)]
    assert "can't be read" in str(error_of(run("cdi", "validate", tmp_path / "missing.json")))


def test_injection_prints_the_configuration_with_the_device(host: Path) -> None:
    done = run("cdi", "inject", "--device", "nvidia.com/gpu=1", "--spec-dir", host / "cdi", stdin=CONFIG)
    config = json.loads(done.stdout)
    assert "/dev/nvidia1" in [device["path"] for device in config["linux"]["devices"]]
    assert "/dev/nvidia0" not in [device["path"] for device in config["linux"]["devices"]]
    assert config["process"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
    assert len(config["hooks"]["createContainer"]) == 1
    (host / "config.json").write_text(CONFIG)
    words = ("--bundle", host, "--output", host / "injected.json", "--spec-dir", host / "cdi")
    assert run("cdi", "inject", "--device", "nvidia.com/gpu=1", *words).exit_code == 0
    assert json.loads((host / "injected.json").read_text()) == config
    missing = run("cdi", "inject", "--device", "nvidia.com/gpu=9", "--spec-dir", host / "cdi", stdin=CONFIG)
    assert "there is no CDI device nvidia.com/gpu=9" in str(error_of(missing))
    for text in ("", "[]", "{"):
        broken = run("cdi", "inject", "--device", "x", stdin=text)
        assert "holds no OCI configuration" in str(error_of(broken))


def test_a_specification_is_moved_to_another_root_and_another_form(host: Path) -> None:
    words = ("--from", "/usr", "--to", "/opt", "--relative-to", "container", "--input", host / "cdi/nvidia.json")
    done = run("cdi", "transform", "root", *words, "--format", "yaml", "--output", host / "moved.yaml")
    assert done.exit_code == 0, done.output
    found = yaml.safe_load((host / "moved.yaml").read_text())
    paths = [mount["containerPath"] for mount in found["containerEdits"]["mounts"]]
    assert "/opt/bin/nvidia-smi" in paths and not any(path.startswith("/usr/") for path in paths)
    assert run("cdi", "validate", host / "moved.yaml").exit_code == 0


def explain(host: Path, config: str) -> dict[str, Any]:
    done = run("hook", "explain", "--config", host / "config.toml", "--json", stdin=config)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_explain_has_all_its_keys(host: Path) -> None:
    found = explain(host, CONFIG)
    assert list(found) == [
        "legacy", "privileged", "gpu_container", "devices", "imex_channels", "capabilities", "requirements",
        "mig_config", "mig_monitor", "edits", "decisions", "error",
    ]  # fmt: skip
    assert (found["devices"], found["capabilities"], found["error"]) == (["all"], ["compute", "utility"], None)
    assert [node["path"] for node in found["edits"]["deviceNodes"]][-2:] == ["/dev/nvidia0", "/dev/nvidia1"]
    assert f"libcuda.so.{simgpu.DRIVER_VERSION}::/usr/lib/{TRIPLET}/libcuda.so.1" in found["edits"]["links"]
    assert "devices are named by NVIDIA_VISIBLE_DEVICES" in found["decisions"]


@pytest.mark.parametrize(
    ("environment", "devices", "error"),
    [
        ("", None, None),
        ("NVIDIA_VISIBLE_DEVICES=void", None, None),
        ("NVIDIA_VISIBLE_DEVICES=none", [""], None),
        ("NVIDIA_VISIBLE_DEVICES=7", ["7"], "there is no GPU '7' on this host; its GPUs: 0, 1"),
        ("NVIDIA_VISIBLE_DEVICES=0 NVIDIA_REQUIRE_CUDA=cuda>=13.0", ["0"], "update the driver to ≥ 580"),
        ("NVIDIA_VISIBLE_DEVICES=0 NVIDIA_DRIVER_CAPABILITIES=magic", ["0"], "asks for magic"),
        ("NVIDIA_VISIBLE_DEVICES=0 NVIDIA_MIG_CONFIG_DEVICES=all", ["0"], "is for privileged containers alone"),
        ("CUDA_VERSION=11.4", ["all"], None),
    ],
)
def test_explain_tells_the_refusal(host: Path, environment: str, devices: list[str] | None, error: str | None) -> None:
    found = explain(host, json.dumps({"process": {"env": environment.split()}}))
    assert (found["devices"], found["gpu_container"]) == (devices, devices is not None)
    assert (found["error"] is None) if error is None else error in found["error"]
    assert error is None or found["edits"] == {}
    assert found["mig_config"] == ("all" if "MIG" in environment else "")


def test_explain_looks_into_a_bundles_root(host: Path) -> None:
    bundle = host / "bundle"
    (bundle / "rootfs/lib").mkdir(parents=True)
    (bundle / "rootfs/lib/ld-musl-x86_64.so.1").touch()
    (bundle / "rootfs/usr/lib64").mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps({**json.loads(CONFIG), "root": {"path": "rootfs"}}))
    done = run("hook", "explain", "--config", host / "config.toml", "--bundle", bundle)
    assert done.exit_code == 0, done.output
    assert "this image's C library is musl" in done.stdout
    assert "/usr/lib64/libcuda.so.1" in done.stdout
    assert sorted(path.name for path in (bundle / "rootfs/usr/lib64").iterdir()) == []


def test_explain_of_broken_settings_is_the_refusal(host: Path) -> None:
    (host / "config.toml").write_text("typo = 1\n")
    assert "there is no key 'typo'" in explain(host, CONFIG)["error"]
    assert explain(host, "{}")["error"] is None


@pytest.mark.parametrize("text", ["", "{", "[]", "5"])
def test_explain_of_what_is_no_configuration_is_a_usage_error(text: str) -> None:
    assert error_of(run("hook", "explain", stdin=text)).exit_code == 2


@pytest.mark.parametrize("words", ["hook explain", "cdi transform root", "cdi validate -"])
def test_closed_input_holds_nothing(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises((GpuprovError, SystemExit)):
        cli.main(words.split(), standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--cuda", "12.4", "cuda>=12.0"), 0, "satisfied"),
        (("--cuda", "12.4"), 0, "satisfied"),
        (("--cuda", "12.4", "", " , "), 0, "satisfied"),
        (("--cuda", "12.4", "--driver", "550.163.01", "cuda>=13.0"), 1, "violated: requires cuda>=13.0, this host's"),
        (("--brand", "Tesla", "brand=geforce brand=TESLA"), 0, "satisfied"),
        (("--arch", "9.0", "arch<9.0"), 1, "violated"),
        (("--cuda", "12.4", "cuda>=12 cuda==1"), 2, "invalid"),
        (("--brand", "x", "brand<x"), 2, "invalid"),
    ],
)  # fmt: skip
def test_requirements_are_satisfied_violated_or_invalid(words: tuple[str, ...], code: int, says: str) -> None:
    done = run("hook", "requirements", *words)
    assert (done.exit_code, done.output.startswith(says)) == (code, True), done.output
