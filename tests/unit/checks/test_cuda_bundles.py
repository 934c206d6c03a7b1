"""Which libcuda a bundle's program loads, as `gpuprov hook explain --bundle` says it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpuprov.checks.cuda.trees import AddedTree, RootTree, chain, read_start
from gpuprov.cli.hook import hook
from gpuprov.runtime_hook.rootfs import Root
from tests.unit.checks.test_cuda_libraries import LOADER, elf

GLIBC = b"\0/lib/x86_64-linux-gnu/\0/usr/lib/x86_64-linux-gnu/\0/lib/\0/usr/lib/\0x86-64-v2"
DRIVER = "/usr/lib/x86_64-linux-gnu"
HOOK = "/usr/bin/gpuprov-container-runtime-hook"
GPU = "NVIDIA_VISIBLE_DEVICES=all"


class Bundle:
    """A bundle whose root has glibc's loader, a host's driver of 550.163.01, and settings that name it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "bundle/rootfs"
        self.file(self.root / LOADER.lstrip("/"), GLIBC)
        (self.root / DRIVER.lstrip("/")).mkdir(parents=True)
        driver = folder / "driver"
        mounts = []
        for name in ("libcuda", "libnvidia-ml"):
            path = self.file(driver / f"{name}.so.550.163.01", elf(f"{name}.so.1"))
            mounts.append({"hostPath": str(path), "containerPath": f"{DRIVER}/{path.name}"})
        links = (f"{name}.so.550.163.01::{DRIVER}/{name}.so.1" for name in ("libcuda", "libnvidia-ml"))
        arguments = [
            HOOK.rpartition("/")[2],
            "createContainer",
            "--host-driver-version",
            "550.163.01",
            "--host-cuda-version",
            "12.4",
        ]
        arguments += [word for link in links for word in ("--link", link)]
        hooks = [{"hookName": "createContainer", "path": HOOK, "args": arguments}]
        specification = {
            "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
            "devices": [{"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
            "containerEdits": {"mounts": mounts, "hooks": hooks},
        }  # fmt: skip
        self.file(folder / "cdi/nvidia.json", json.dumps(specification).encode())
        text = f"[nvidia-container-runtime.modes.cdi]\nspec-dirs = ['{folder}/cdi']\n"
        self.settings = self.file(folder / "config.toml", text.encode())

    @staticmethod
    def file(path: Path, content: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def library(self, folder: Path, version: str) -> None:
        self.file(folder / f"libcuda.so.{version}", elf())
        (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")

    def explain(self, *environment: str, flags: tuple[str, ...] = (), **more: Any) -> str:
        process = {"env": list(environment), "cwd": "/", "args": ["/app"]}
        config = {"root": {"path": "rootfs"}, "process": process, **more}
        (self.folder / "bundle/config.json").write_text(json.dumps(config))
        before = sorted(self.root.rglob("*"))
        words = ["explain", "--config", str(self.settings), "--bundle", str(self.folder / "bundle"), *flags]
        done = CliRunner().invoke(hook, words)
        assert done.exit_code == 0, done.output
        assert sorted(self.root.rglob("*")) == before
        return done.output

    def winner(self, *environment: str, **more: Any) -> dict[str, Any]:
        found = json.loads(self.explain(*environment, flags=("--json",), **more))
        library = found["cuda"]["libraries"][0]
        assert library["name"] == "libcuda.so.1"
        return dict(library["winner"] or {})


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path)


def test_the_drivers_own_wins_where_the_image_has_none(bundle: Bundle) -> None:
    text = bundle.explain(GPU)
    assert f"libcuda.so.1       {DRIVER}/libcuda.so.1 -> libcuda.so.550.163.01 (driver 550.163.01)" in text
    assert f"libnvidia-ml.so.1  {DRIVER}/libnvidia-ml.so.1 -> libnvidia-ml.so.550.163.01 (driver 550.163.01)" in text
    assert "with the files of driver 550.163.01, as the container runtime adds them at the start" in text
    assert bundle.winner(GPU)["reason"].startswith("the loader's cache")


def test_an_images_own_wins_by_its_variable(bundle: Bundle) -> None:
    bundle.library(bundle.root / "opt/own", "535.261.03")
    text = bundle.explain(GPU, "LD_LIBRARY_PATH=/opt/own")
    assert "libcuda.so.1       /opt/own/libcuda.so.1 -> libcuda.so.535.261.03 (driver 535.261.03)" in text
    assert "  because          LD_LIBRARY_PATH has /opt/own" in text
    assert f"  also there       {DRIVER}/libcuda.so.1" in text


def test_a_volumes_own_wins_too(bundle: Bundle, tmp_path: Path) -> None:
    bundle.library(tmp_path / "volume", "470.256.02")
    (bundle.root / "opt").mkdir()
    mounts = [{"destination": "/opt/own", "type": "bind", "source": str(tmp_path / "volume"), "options": ["rbind"]}]
    assert bundle.winner(GPU, "LD_LIBRARY_PATH=/opt/own", mounts=mounts)["version"] == "470.256.02"


def test_the_program_that_the_bundle_starts_counts(bundle: Bundle) -> None:
    bundle.library(bundle.root / "opt/own", "535.261.03")
    bundle.file(bundle.root / "app", elf("", runpath="/opt/own"))
    assert bundle.winner(GPU)["reason"] == "RUNPATH of /app has /opt/own"


def test_links_of_the_image_never_lead_out_of_its_root(bundle: Bundle, tmp_path: Path) -> None:
    bundle.library(tmp_path / "outside", "470.256.02")
    (bundle.root / "opt").mkdir()
    (bundle.root / "opt/own").symlink_to(tmp_path / "outside")
    assert bundle.winner(GPU, "LD_LIBRARY_PATH=/opt/own")["version"] == "550.163.01"


def test_a_container_without_gpus_gets_nothing_added(bundle: Bundle) -> None:
    text = bundle.explain("PATH=/bin")
    assert "and the volumes, as it is: the container asks for no GPU" in text
    assert "libcuda.so.1       none: the loader finds none" in text


def test_musl_is_told(bundle: Bundle) -> None:
    (bundle.root / LOADER.lstrip("/")).unlink()
    bundle.file(bundle.root / "lib/ld-musl-x86_64.so.1", b"musl")
    assert "wrong: the C library is musl, and the driver's libraries need glibc" in bundle.explain(GPU)


def test_a_refusal_is_no_failure_of_the_explanation(bundle: Bundle) -> None:
    text = bundle.explain(GPU, mounts=[{"destination": "/", "type": "bind", "source": "/", "options": ["rbind"]}])
    assert "refused        " in text
    assert "libcuda        not looked for: the libraries of " in text


def test_what_is_added_precedes_what_the_tree_has(tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "usr/lib/a").write_bytes(b"old")
    (tmp_path / "usr/lib/b").write_bytes(b"b")
    new = tmp_path.parent / f"{tmp_path.name}.new"
    new.write_bytes(b"new")
    root = Root(os.fspath(tmp_path))
    try:
        tree = AddedTree(RootTree(root))
        tree.add_file("/lib/a", new)
        tree.add_link("/lib/b", "a")
        tree.add_file("/lib/deep/er/c", new)
        assert tree.names("/lib") == ["a", "b", "deep"]
        assert tree.names("/lib/deep") == ["er"]
        assert chain(tree, "/lib/b") == ("/usr/lib/b", "/usr/lib/a")
        assert chain(tree, "/lib/deep/er/c") == ("/usr/lib/deep/er/c",)
        assert [read_start(tree, path, 9) for path in ("/lib/a", "/lib/b", "/lib/deep/er/c")] == [b"new"] * 3
        assert (tmp_path / "usr/lib/a").read_bytes() == b"old"
    finally:
        root.close()
