"""What a running container was given, kept for `gpuprov hook explain`: with the real runc and crun."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuprov.cli.hook import hook
from gpuprov.runtime_hook import record
from tests.deployed import deploy_below
from tests.integration.container_bench import LIBRARIES, NAME, Bench, bench

__all__ = ["bench"]
pytestmark = pytest.mark.root

SECRET = "s3cr3t-t0k3n"
ASKS = (
    "NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_DRIVER_CAPABILITIES=utility,compute", f"TOKEN={SECRET}",
    "NVIDIA_REQUIRE_CUDA=cuda>=12.0 " + SECRET + "=1", f"CUDA_VERSION={SECRET}",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the bench's runtime keeps its decisions; the command reads it, too."""
    found = bench.deployed.folder / "run/containers"
    monkeypatch.setattr(record, "FOLDER", str(found))
    return found


def create(bench: Bench, *environment: str, by_hook: bool = False) -> None:
    done = bench.begin(*environment, by_hook="prestart" if by_hook else "")
    assert done.returncode == 0, done.stderr


def explained(*words: str) -> str:
    done = CliRunner().invoke(hook, ["explain", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("by_hook", [False, True], ids=["runtime", "hook"])
def test_a_running_containers_decision_is_told_by_id_and_by_bundle(bench: Bench, by_hook: bool) -> None:
    create(bench, *ASKS, by_hook=by_hook)
    text = explained(NAME)
    assert text.startswith(f"container      {NAME}, started with GPUs by the {'hook' if by_hook else 'runtime'}\n")
    for line in (
        "devices        1", "capabilities   compute, utility", "requirements   1 satisfied",
        "device         /dev/nvidia1", f"file           {LIBRARIES}/libcuda.so.550.163.01",
        "because        devices are named by NVIDIA_VISIBLE_DEVICES",
    ):  # fmt: skip
        assert f"{line}\n" in text
    assert explained("--bundle", str(bench.folder / "bundle")) == text
    assert json.loads(explained(NAME, "--json"))["nodes"] == ["/dev/nvidiactl", "/dev/nvidia1"]


def test_the_file_is_roots_alone_and_has_no_value_of_the_environment(bench: Bench, folder: Path) -> None:
    create(bench, *ASKS)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / NAME).stat().st_mode & 0o777 == 0o600
    assert SECRET not in (folder / NAME).read_text()


def test_delete_removes_it_and_a_delete_that_fails_does_not(bench: Bench, folder: Path) -> None:
    bench.configure(*ASKS, arguments=["busybox", "sleep", "60"])
    assert bench.create().returncode == 0
    assert bench.call("start", NAME).returncode == 0
    assert bench.call("delete", NAME).returncode != 0
    assert kept(folder) == [NAME]
    assert bench.call("delete", "--force", NAME).returncode == 0
    assert kept(folder) == []
    assert bench.call("state", NAME).returncode != 0


def test_what_containers_left_that_vanished_goes_with_the_next_start(bench: Bench, folder: Path) -> None:
    create(bench, *ASKS, by_hook=True)
    gone = json.loads((folder / NAME).read_text())
    (folder / "gone").write_text(json.dumps({**gone, "container": "gone", "bundle": str(bench.folder / "no-bundle")}))
    (folder / "broken").write_text("{")
    (folder / "lives").write_text(json.dumps({**gone, "container": "lives"}))
    bench.delete()
    create(bench, *ASKS)
    assert kept(folder) == sorted([NAME, "lives"])


def test_it_survives_an_upgrade(bench: Bench, folder: Path) -> None:
    create(bench, *ASKS)
    text = explained(NAME)
    shutil.rmtree(bench.deployed.folder / "host")
    deploy_below(bench.deployed.folder, bench.low_level)
    assert explained(NAME) == text
    assert bench.call("delete", "--force", NAME).returncode == 0
    assert kept(folder) == []


def test_a_container_without_gpus_has_none(bench: Bench, folder: Path) -> None:
    create(bench, "A=1")
    assert kept(folder) == []
    assert "asks for no GPU" in explained("--bundle", str(bench.folder / "bundle"))


def test_a_folder_that_cannot_be_made_keeps_nobody_from_starting(bench: Bench, folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("in the way")
    create(bench, *ASKS)
    assert bench.call("delete", "--force", NAME).returncode == 0
