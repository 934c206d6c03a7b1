"""The decision explained: what each outcome says, in text and in JSON, and that nothing is changed."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpuprov.cli.hook import hook
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.runtime_hook import record
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.main import prepare

# As a host has it: the table under `--host-*` stands in the hook's arguments.
SPECIFICATION = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
    "containerEdits": {
        "mounts": [{"hostPath": "/usr/bin/nvidia-smi", "containerPath": "/usr/bin/nvidia-smi", "options": ["ro"]}],
        "hooks": [
            {
                "hookName": "createContainer",
                "path": "/usr/bin/gpuprov-container-runtime-hook",
                "args": [
                    "gpuprov-container-runtime-hook", "createContainer", "--host-driver-version", "550.163.01",
                    "--host-cuda-version", "12.4", "--link", "libcuda.so.550.163.01::/usr/lib64/libcuda.so.1",
                ],
                "env": ["PATH=/usr/bin:/bin"],
            }
        ],
    },
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A config.toml whose spec-dirs hold that specification."""
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/nvidia.json").write_text(json.dumps(SPECIFICATION))
    path = tmp_path / "config.toml"
    path.write_text(f"[nvidia-container-runtime.modes.cdi]\nspec-dirs = ['{tmp_path}/cdi']\n")
    return path


def explain(settings: Path, *environment: str, flags: tuple[str, ...] = ()) -> Result:
    config = json.dumps({"process": {"env": environment}})
    return CliRunner().invoke(hook, ["explain", "--config", str(settings), *flags], input=config)


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ([], ["asks for no GPU: the container is left alone", "  because NVIDIA_VISIBLE_DEVICES is not set"]),
        (["NVIDIA_VISIBLE_DEVICES=void"], ["  because NVIDIA_VISIBLE_DEVICES names no device"]),
        (["NVIDIA_VISIBLE_DEVICES=none"], ["devices        none: the driver files alone"]),
        (
            ["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_REQUIRE_CUDA=cuda>=12.0"],
            [
                "devices        0", "capabilities   compute, utility", "requirements   cuda>=12.0", "privileged     no",
                "legacy image   no", "device         /dev/nvidia0", "file           /usr/bin/nvidia-smi",
                "link           libcuda.so.550.163.01 <- /usr/lib64/libcuda.so.1",
                "because        the host satisfies every requirement",
            ],
        ),
        (["CUDA_VERSION=11.4", "NVIDIA_VISIBLE_DEVICES=0"], ["legacy image   yes", "requirements   cuda>=11.4"]),
        (
            ["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_REQUIRE_CUDA=cuda>=13.0"],
            [
                "refused        requires cuda>=13.0, this host's driver 550.163.01 supports 12.4: "
                "update the driver to ≥ 580 or use an image for CUDA ≤ 12.4"
            ],
        ),
    ],
)  # fmt: skip
def test_the_text_says_what_is_asked_given_and_why(settings: Path, environment: list[str], lines: list[str]) -> None:
    done = explain(settings, *environment)
    assert done.exit_code == 0
    assert [line for line in lines if line not in done.output.splitlines()] == []


def test_nothing_is_changed(settings: Path, tmp_path: Path) -> None:
    (tmp_path / "rootfs/usr/lib64").mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}, "root": {"path": "rootfs"},
    }))  # fmt: skip
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    done = CliRunner().invoke(hook, ["explain", "--config", str(settings), "--bundle", str(tmp_path), "--json"])
    assert json.loads(done.output)["error"] is None
    after = {path: path.lstat() for path in tmp_path.rglob("*")}
    assert {path: (one.st_mtime_ns, one.st_ctime_ns) for path, one in after.items()} == {
        path: (one.st_mtime_ns, one.st_ctime_ns) for path, one in before.items()
    }


def test_a_bundle_without_a_configuration_is_a_usage_error(settings: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(hook, ["explain", "--config", str(settings), "--bundle", str(tmp_path)])
    assert isinstance(done.exception, GpuprovError)
    assert done.exception.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("option", ["--cuda", "--driver", "--arch"])
def test_a_host_version_that_is_none_is_a_usage_error(option: str) -> None:
    done = CliRunner().invoke(hook, ["requirements", option, "new", "cuda>=12"])
    assert done.exit_code == 2
    assert option in done.output and "'new' is no version" in done.output


def bundle_with(tmp_path: Path, *mounts: dict[str, Any]) -> Path:
    (tmp_path / "rootfs/usr/lib64").mkdir(parents=True)
    for name in ("host", "host/ld.so.conf.d"):
        (tmp_path / name).mkdir()
    (tmp_path / "config.json").write_text(json.dumps({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}, "root": {"path": "rootfs"}, "mounts": mounts,
    }))  # fmt: skip
    return tmp_path


def of_bundle(settings: Path, bundle: Path) -> dict[str, Any]:
    done = CliRunner().invoke(hook, ["explain", "--config", str(settings), "--bundle", str(bundle), "--json"])
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.mark.root
@pytest.mark.parametrize(
    ("destination", "link", "refused"),
    [
        ("/usr/lib64", "", "/usr/lib64/libcuda.so.1 can't be made in the container's root file system"),
        ("/mnt", "usr/lib64", "/usr/lib64/libcuda.so.1 can't be made in the container's root file system"),
        ("/usr/bin", "", "/usr/bin/nvidia-smi can't be put into the container"),
        ("/mnt", ".", "the container's root file system can't be used"),
    ],
)
def test_refused_volume_is_named(settings: Path, tmp_path: Path, destination: str, link: str, refused: str) -> None:
    """With the runtime's own words."""
    volume: dict[str, Any] = {
        "destination": destination,
        "type": "bind",
        "source": str(tmp_path / "host"),
        "options": ["rbind", "ro"],
    }
    bundle = bundle_with(tmp_path, volume)
    if link:
        (bundle / "rootfs/mnt").symlink_to(link)
    specification = json.loads(json.dumps(SPECIFICATION))
    specification["containerEdits"]["mounts"][0]["hostPath"] = "/usr/bin/env"
    (settings.parent / "cdi/nvidia.json").write_text(json.dumps(specification))
    found = of_bundle(settings, bundle)
    assert found["error"].startswith(refused)
    assert f"the volume at {destination}" in found["error"]
    with pytest.raises(Refused) as caught:
        prepare(str(bundle), (str(settings), "/none"))
    assert str(caught.value) == found["error"]
    assert sorted(path.name for path in (tmp_path / "host").iterdir()) == ["ld.so.conf.d"]


@pytest.mark.root
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            '{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}, "process": {}, "root": {"path": "rootfs"}}',
            "twice in one",
        ),
        ('{"process": {"ENV": ["NVIDIA_VISIBLE_DEVICES=0"]}, "root": {"path": "rootfs"}}', "which runc reads as 'env'"),
        ('{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}, "root": {"path": "absent"}}', "can't be opened"),
    ],
)
def test_refusal_is_explained_as_by_the_runtime(settings: Path, tmp_path: Path, config: str, says: str) -> None:
    bundle = bundle_with(tmp_path)
    (bundle / "config.json").write_text(config)
    with pytest.raises(Refused, match=says) as caught:
        prepare(str(bundle), (str(settings), "/none"))
    assert of_bundle(settings, bundle)["error"] == str(caught.value)


@pytest.mark.root
@pytest.mark.parametrize("compat", [False, True])
def test_volume_over_loader_cache_is_refused_only_for_compat(settings: Path, tmp_path: Path, compat: bool) -> None:
    bundle = bundle_with(tmp_path, {"destination": "/etc", "type": "bind", "source": str(tmp_path / "host")})
    if compat:
        folder = bundle / "rootfs/usr/local/cuda/compat"
        folder.mkdir(parents=True)
        (folder / "libcuda.so.580.65.06").write_text("compat")
    found = of_bundle(settings, bundle)
    if compat:
        assert found["error"].startswith("/etc/ld.so.conf.d/00-gpuprov-compat.conf can't be made in the container's")
    else:
        assert found["error"] is None
        assert (
            "/etc/ld.so.cache stays as it is: it is in the volume at /etc, and nothing is written into volumes"
            in (found["decisions"])
        )


def test_the_kept_decision_of_a_running_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", str(tmp_path / "run/containers"))
    decided = {
        "way": "hook", "legacy": False, "privileged": False, "devices": ["0"], "capabilities": ["utility"],
        "requirements": 1, "imex_channels": ["0"], "mig_config": True, "mig_monitor": False,
        "nodes": ["/dev/nvidia0"], "files": ["/usr/bin/nvidia-smi"], "links": ["libcuda.so.1::/usr/lib/libcuda.so"],
        "decisions": ["devices are named by NVIDIA_VISIBLE_DEVICES"],
    }  # fmt: skip
    record.keep("web", str(tmp_path), decided)
    done = CliRunner().invoke(hook, ["explain", "--bundle", str(tmp_path)], catch_exceptions=False)
    assert done.output.splitlines() == [
        "container      web, started with GPUs by the hook",
        "devices        0",
        "capabilities   utility",
        "requirements   1 satisfied",
        "privileged     no",
        "legacy image   no",
        "device         /dev/nvidia0",
        "file           /usr/bin/nvidia-smi",
        "link           libcuda.so.1 <- /usr/lib/libcuda.so",
        "because        devices are named by NVIDIA_VISIBLE_DEVICES",
    ]
