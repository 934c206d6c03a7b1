"""`gpuprov runtime configure` judged by the engines themselves: what containerd, podman and docker make of its files.

containerd comes in the three series that read drop-ins in different ways: this machine's, trixie's 1.7, sid's 2.
"""

import copy
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import tomllib
from click.testing import CliRunner

from gpuprov.cli.main import cli
from gpuprov.engines import containerd as engine
from tests.integration.container_bench import LIBRARIES, Bench
from tests.integration.dockerd import docker_host
from tests.integration.podman_store import run_report
from tests.simgpu import cache, debian
from tests.simgpu.commands import BuildError

PLUGIN = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
STOCK = """\
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd/opt"
"""
# What kubeadm's guides make of it: systemd's cgroups, a sandbox image, a mirror.
KUBERNETES = """\
version = 2
# our own
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "mirror.example/pause:3.9"
  enable_unprivileged_ports = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"  # the usual
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = true
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata]
      runtime_type = "io.containerd.kata.v2"
"""
VERSION_3 = """\
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = 'mirror.example/pause:3.10'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
    SystemdCgroup = true
"""
VERSION_1 = """\
oom_score = 7
[plugins.cri.containerd]
  snapshotter = "native"
  [plugins.cri.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.cri.containerd.runtimes.runc.options]
      SystemdCgroup = true
"""


@pytest.fixture(scope="module")
def containerd(request: pytest.FixtureRequest) -> str:
    """A containerd: 1.6 of Debian 12, 1.7 of 13, 2 of sid."""
    if request.param == "machine":
        return "/usr/bin/containerd"
    suite = str(request.param)

    def fetch(folder: Path) -> None:
        debian.fetch(folder, suite, "main", ["containerd"])

    try:
        folder = cache.built("containerd", cache.digest_of((suite,)), fetch)
        program = str(folder / "unpacked/usr/bin/containerd")
        subprocess.run((program, "--version"), check=True, capture_output=True)
    except (BuildError, subprocess.CalledProcessError) as error:
        if suite == "sid":  # it moves, and may be broken for a day
            pytest.skip(str(error))
        raise
    return program


@pytest.fixture
def drop_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The usual drop-in, in a folder of the test's."""
    monkeypatch.setattr(engine, "DROP_IN", str(tmp_path / "conf.d/99-nvidia.toml"))
    return tmp_path / "conf.d/99-nvidia.toml"


def configure(*words: object) -> str:
    done = CliRunner().invoke(cli, ["runtime", "configure", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def dump(containerd: str, main: Path) -> dict[str, Any]:
    """Return containerd's own view of its configuration, but for the list of files."""
    done = subprocess.run((containerd, "--config", main, "config", "dump"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = tomllib.loads(done.stdout)
    found.pop("imports", None)
    return found


def cri(found: dict[str, Any]) -> dict[str, Any]:
    plugin: dict[str, Any] = found["plugins"][PLUGIN[found["version"]]]
    return plugin


def require_only_the_runtime_is_new(before: dict[str, Any], after: dict[str, Any], program: str) -> None:
    """Everything is as before, and the runtime is runc's entry with another program."""
    rest = copy.deepcopy(after)
    added = cri(rest)["containerd"]["runtimes"].pop("nvidia")
    for found in (rest, before):
        # 1.7 fills the first in at its start; an empty table is the same as one of defaults.
        cri(found)["containerd"]["runtimes"]["runc"].pop("sandbox_mode", None)
        cri(found)["containerd"]["runtimes"]["runc"]["options"] = _telling(cri(found)["containerd"]["runtimes"]["runc"])
    assert rest == before
    runc = cri(before)["containerd"]["runtimes"]["runc"]
    options = {key: value for key, value in _telling(added).items() if key != "Runtime"}
    assert options == {**runc["options"], "BinaryName": program}
    assert added["runtime_type"] == runc["runtime_type"]


def _telling(runtime: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in runtime.get("options", {}).items() if value}


TEXTS = {"none": None, "empty": "", "stock": STOCK, "kubernetes": KUBERNETES, "3": VERSION_3, "1": VERSION_1}


# Which file each series reads: containerd 2 knows version 3, and version 1 no longer.
FILES = [
    pytest.param(series, name, marks=[pytest.mark.slow] * (series != "machine"))
    for series, names in (("machine", "none empty stock kubernetes 1"), ("trixie", "none empty stock kubernetes 1"),
                          ("sid", "none empty stock kubernetes 3"))
    for name in names.split()
]  # fmt: skip
with_files = pytest.mark.parametrize(("containerd", "name"), FILES, indirect=["containerd"])


@pytest.mark.parametrize("place", ["usual", "drop-in asked for", "main file asked for", "what containerd says"])
@with_files
def test_containerd_sees_the_runtime(containerd: str, drop_in: Path, tmp_path: Path, name: str, place: str) -> None:
    text = TEXTS[name]
    main = tmp_path / "config.toml"
    if text is not None or place == "what containerd says":  # it does not dump a file that is not there
        text = text or ""
        main.write_text(text)
    empty = tmp_path / "empty.toml"
    empty.write_text(text or "version = 2\n")
    before = dump(containerd, main if text else empty)
    words: list[object] = ["--runtime", "containerd", "--config", main, "--executable-path", containerd]
    words += ["--nvidia-runtime-path", "/opt/x"]
    chosen: dict[str, list[object]] = {
        "usual": [],
        "drop-in asked for": ["--drop-in-config", drop_in],
        "main file asked for": ["--drop-in-config", ""],
        "what containerd says": ["--config-source", "command"],
    }
    words += chosen[place]
    configure(*words)
    after = dump(containerd, main)
    if not text:
        before["version"] = after["version"]
    require_only_the_runtime_is_new(before, after, "/opt/x")
    if name in ("kubernetes", "3", "1"):
        assert cri(after)["containerd"]["runtimes"]["nvidia"]["options"]["SystemdCgroup"] is True
    files = {path: path.read_bytes() for path in (main, drop_in) if path.exists()}
    assert "nothing to change" in configure(*words)
    assert {path: path.read_bytes() for path in (main, drop_in) if path.exists()} == files
    configure(*words, "--unset")
    assert not drop_in.exists()
    assert (main.read_text() if main.exists() else None) == text


@with_files
def test_default_and_cdi_when_asked(containerd: str, drop_in: Path, tmp_path: Path, name: str) -> None:
    text = TEXTS[name]
    main = tmp_path / "config.toml"
    if text is not None:
        main.write_text(text)
    words = ["--runtime", "containerd", "--config", main, "--executable-path", containerd]
    configure(*words, "--nvidia-set-as-default", "--cdi.enabled")
    found = cri(dump(containerd, main))
    assert found["containerd"]["default_runtime_name"] == "nvidia"
    # 1.6 does not know CDI and drops the key.
    assert found.get("enable_cdi", True) is True
    assert "nothing to change" in configure(*words)
    configure(*words, "--unset")
    assert (main.read_text() if main.exists() else None) == text


@pytest.mark.parametrize("containerd", ["sid"], indirect=True)
def test_version_1_is_refused_where_containerd_no_longer_reads_it(containerd: str, tmp_path: Path) -> None:
    main = tmp_path / "config.toml"
    main.write_text(VERSION_1)
    words = ["--runtime", "containerd", "--config", str(main), "--executable-path", containerd]
    done = CliRunner().invoke(cli, ["runtime", "configure", *words])
    assert "config migrate" in str(done.exception)
    assert main.read_text() == VERSION_1


def test_podman_knows_the_runtime(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nexec crun "$@"\n')
    program.chmod(0o755)
    main, drop_in = tmp_path / "containers.conf", tmp_path / "99-nvidia.conf"
    words = ["--runtime", "podman", "--config", main, "--drop-in-config", drop_in, "--nvidia-runtime-path", program]
    configure(*words, "--nvidia-set-as-default")
    done = subprocess.run(
        ("podman", "info", "--format", "{{.Host.OCIRuntime.Name}} {{.Host.OCIRuntime.Path}}"),
        env={**os.environ, "CONTAINERS_CONF": str(drop_in)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["nvidia", str(program)], done.stderr
    assert "nothing to change" in configure(*words)
    configure(*words, "--unset")
    assert not drop_in.exists() and not main.exists()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), "runc")


def podman_run(bench: Bench, configuration: Path, *words: str) -> list[str]:
    """Run the report in a container of podman's; return the GPUs' nodes that it saw, and the CUDA library."""
    done = run_report(bench.root, configuration, "--env=NVIDIA_VISIBLE_DEVICES=1", podman=words)
    assert done.returncode == 0, done.stderr
    report = done.stdout.splitlines()
    return [line.split()[1] for line in report if line.startswith("node ") or "libcuda.so.1 cuda" in line]


PODMAN = '[containers]\npids_limit = 0 # none here\n\n[engine]\ncgroup_manager = "cgroupfs"\n'
EQUIPPED = ["/dev/nvidia1", "/dev/nvidiactl", f"{LIBRARIES}/libcuda.so.1"]


@pytest.mark.root
def test_podmans_container_gets_its_gpu_by_the_runtime(bench: Bench, tmp_path: Path) -> None:
    main = tmp_path / "containers.conf"
    main.write_text(PODMAN)
    words = ["--runtime", "podman", "--config", main, "--drop-in-config", ""]
    configure(*words, "--nvidia-runtime-path", bench.runtime)
    assert podman_run(bench, main, "--runtime=nvidia") == EQUIPPED
    configure(*words, "--unset")
    assert main.read_text() == PODMAN


@pytest.mark.root
def test_podmans_container_gets_its_gpu_by_the_hook(bench: Bench, tmp_path: Path) -> None:
    main = tmp_path / "containers.conf"
    main.write_text(PODMAN)
    hooks = tmp_path / "hooks.d"
    words = ["--runtime", "podman", "--config-mode", "hook", "--hook-path", hooks / "nvidia.json"]
    words += ["--nvidia-runtime-hook-path", bench.deployed.hook]
    configure(*words)
    assert podman_run(bench, main, "--runtime=runc", f"--hooks-dir={hooks}") == EQUIPPED
    configure(*words, "--unset")
    assert podman_run(bench, main, "--runtime=runc", f"--hooks-dir={hooks}")[:1] != EQUIPPED[:1]


@pytest.mark.root
def test_docker_knows_the_runtime(tmp_path: Path) -> None:
    with docker_host(started=False) as host:
        daemon_json = host.daemon_json
        text = '{"debug": true, "features": {"buildkit": true}}\n'
        daemon_json.write_text(text)
        words = ["--runtime", "docker", "--config", daemon_json, "--nvidia-runtime-path", "/usr/sbin/runc"]
        configure(*words, "--nvidia-set-as-default")
        assert host.start()
        info = json.loads(host.docker("info", "--format", "{{json .}}"))
        assert info["Runtimes"]["nvidia"]["path"] == "/usr/sbin/runc"
        assert info["DefaultRuntime"] == "nvidia"
        configure(*words, "--unset")
        assert daemon_json.read_text() == text


def starts_cri(containerd: str, main: Path) -> tuple[bool, str]:
    """Start containerd until it has loaded its plugins; say whether CRI is one of them, and what it logged."""
    # Sockets want short paths.
    with tempfile.TemporaryDirectory(prefix="gpuprov-") as name:
        folder = Path(name)
        argv = (containerd, "--config", str(main), "--root", f"{folder}/r", "--state", f"{folder}/s")
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(
                ("unshare", "--mount", *argv, "--address", f"{folder}/c.sock"), stdout=log, stderr=log
            ) as process,
        ):
            deadline = time.monotonic() + 300
            said = ""
            while "successfully booted" not in said and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.1)
                said = (folder / "log").read_text("utf-8", "replace")
            process.terminate()
            process.wait(60)
        return "successfully booted" in said and "failed to load plugin io.containerd.grpc.v1.cri" not in said, said


@pytest.mark.root
@with_files
def test_cri_starts_with_what_is_written(containerd: str, drop_in: Path, tmp_path: Path, name: str) -> None:
    main = tmp_path / "config.toml"
    text = TEXTS[name]
    if text is not None:
        main.write_text(text)
    configure("--runtime", "containerd", "--config", main, "--executable-path", containerd)
    started, said = starts_cri(containerd, main)
    assert started, said


@pytest.mark.root
@pytest.mark.parametrize("containerd", ["machine", "trixie"], indirect=True)
def test_cri_does_not_start_where_our_runtime_alone_is_named(containerd: str, tmp_path: Path) -> None:
    """Why runc is written too; without this the test above could not fail."""
    main = tmp_path / "config.toml"
    main.write_text(
        f'version = 2\n[plugins."{PLUGIN[2]}".containerd.runtimes.nvidia]\nruntime_type = "io.containerd.runc.v2"\n'
    )
    started, said = starts_cri(containerd, main)
    assert not started
    assert "no corresponding runtime configured" in said
