"""A deployed runtime and hook, a driver of four files, and a bundle whose container says what it sees."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprov.cdi.specification import Device, DeviceNode, Edits, Hook, Mount, Specification, render_json
from tests.deployed import PYTHON, bundle_below, deploy_below, program

# Of this process alone: two test runs on one machine must not meet.
NAME = f"gpuprov-test-{os.getpid()}"
LIBRARIES = f"/usr/lib/{os.uname().machine}-linux-gnu"
# What opening a GPU's node gives where no driver is loaded, if the device cgroup lets the call through.
ENXIO = "No such device or address"
# What a container says of itself: GPUs' nodes with what opening them gives, the driver's files, the variable.
REPORT = """
for node in /dev/nvidia*; do
    [ -e "$node" ] || continue
    result=$( (exec 3<"$node") 2>&1 ) && result=opened
    echo "node $node $(stat -c '%t:%T %a' "$node") ${result##*: }"
done
find /usr -name '*nvidia*' -o -name 'libcuda*' | sort | while read -r file; do echo "file $file $(cat $file)"; done
grep -E 'libcuda|nvidia' /proc/mounts | while read -r a b c options d; do echo "mount $b $options"; done
echo "visible $NVIDIA_VISIBLE_DEVICES"
(echo x > /usr/bin/nvidia-smi) 2>/dev/null && echo "wrote nvidia-smi"
"""


# crun refuses a machine with both versions of cgroups; and before 1.9 its device rules on version 2 want more locked
# memory than root in a virtual machine may have: it is shown version 1 alone.
_CRUN = """#!/bin/sh
exec unshare -m sh -c 'umount /sys/fs/cgroup/unified 2>/dev/null; exec {crun} "$@"' sh "$@"
"""


def low_level_runtime(name: str, folder: Path) -> str:
    """Return what stands for a low-level runtime here."""
    if name != "crun":
        return name
    wrapper = folder / "crun"
    wrapper.write_text(_CRUN.format(crun=program("crun")))
    wrapper.chmod(0o755)
    return str(wrapper)


class Bench:
    """A deployed runtime over a low-level one, a driver of four files, and a bundle with busybox in it."""

    # Seconds for a container's program to end.
    patience = 60.0

    def __init__(self, folder: Path, low_level: str, python: str = PYTHON) -> None:
        self.folder = folder
        self.deployed = deploy_below(folder / "deployed", low_level, python)
        self.low_level = self.deployed.low_level
        self.runtime = self.deployed.runtime
        self.caller = str(self.runtime)
        self.specification = self.deployed.specification
        self.settings = self.deployed.settings
        self.root = folder / "bundle/rootfs"
        self._driver()
        applets = ("stat", "find", "sort", "cat", "grep", "readlink")
        self.pristine = bundle_below(folder / "bundle", low_level, applets)
        (self.root / LIBRARIES.lstrip("/")).mkdir(parents=True)

    def _driver(self) -> None:
        driver = self.folder / "driver"
        driver.mkdir()
        mounts = []
        for name, path in (
            ("cuda", f"{LIBRARIES}/libcuda.so.550.163.01"), ("ml", f"{LIBRARIES}/libnvidia-ml.so.550.163.01"),
            ("smi", "/usr/bin/nvidia-smi"),
        ):  # fmt: skip
            (driver / name).write_text(name)
            mounts.append(Mount(str(driver / name), path))
        devices = tuple(
            Device(name, Edits(device_nodes=(DeviceNode(f"/dev/nvidia{minor}", major=195, minor=minor),)))
            for minor in range(2)
            for name in (str(minor), f"GPU-{minor}")
        )
        every = Device(
            "all",
            Edits(device_nodes=tuple(DeviceNode(f"/dev/nvidia{minor}", major=195, minor=minor) for minor in range(2))),
        )
        arguments = ["gpuprov-container-runtime-hook", "createContainer", "--host-driver-version", "550.163.01"]
        arguments += ["--host-cuda-version", "12.4"]
        for target, name in (
            ("libcuda.so.550.163.01", "libcuda.so.1"), ("libcuda.so.1", "libcuda.so"),
            ("libnvidia-ml.so.550.163.01", "libnvidia-ml.so.1"),
        ):  # fmt: skip
            arguments += ["--link", f"{target}::{LIBRARIES}/{name}"]
        hook = Hook("createContainer", str(self.deployed.hook), tuple(arguments), ("PATH=/usr/bin",))
        common = Edits(
            ("NVIDIA_VISIBLE_DEVICES=void",), (DeviceNode("/dev/nvidiactl", major=195, minor=255),),
            mounts=tuple(mounts), hooks=(hook,),
        )  # fmt: skip
        self.specification.write_bytes(render_json(Specification((*devices, every), common, {})))

    @property
    def config(self) -> Path:
        return self.folder / "bundle/config.json"

    def configure(self, *environment: str, arguments: list[str] | None = None, **changes: Any) -> None:
        config = self.pristine
        process = {**config["process"], "terminal": False, "args": arguments or ["sh", "-c", REPORT]}
        process["env"] = ["PATH=/bin:/usr/bin", *environment]
        root = {"path": "rootfs", "readonly": False}
        self.config.write_text(json.dumps({**config, "process": process, "root": root, **changes}))

    def create(self, *words: str, runtime: str = "") -> subprocess.CompletedProcess[str]:
        """Run `create`, with the container's own output in a file: it outlives the command."""
        argv = (runtime or str(self.runtime), *words, "create", "--bundle", str(self.folder / "bundle"), NAME)
        with (self.folder / "output").open("w") as output, (self.folder / "errors").open("w") as errors:
            # Of its own: in a user namespace crun gives its stdin to the container's root, /dev/null too.
            done = subprocess.run(argv, input=b"", stdout=output, stderr=errors, check=False)
        said = (self.folder / "errors").read_text()
        return subprocess.CompletedProcess(argv, done.returncode, "", said)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run((self.caller, *words), capture_output=True, text=True, check=False)

    def hook_entry(self, stage: str) -> dict[str, Any]:
        """Return what an engine puts into config.json for our hook."""
        return {"path": str(self.deployed.hook), "args": [self.deployed.hook.name, stage], "env": []}

    def begin(self, *environment: str, by_hook: str = "", **changes: Any) -> subprocess.CompletedProcess[str]:
        """Create a container with this environment; equipped by the hook, if a stage is given, else by the runtime."""
        if by_hook:
            changes["hooks"] = {by_hook: [self.hook_entry(by_hook)]}
        self.configure(*environment, **changes)
        return self.create(runtime=self.low_level if by_hook else "")

    def report(self, *environment: str, by_hook: str = "", **changes: Any) -> list[str]:
        """Return what such a container says of itself."""
        done = self.begin(*environment, by_hook=by_hook, **changes)
        assert done.returncode == 0, done.stderr
        return self.output()

    def output(self) -> list[str]:
        """Start the container that was created, and return its lines once it has ended."""
        started = self.call("start", NAME)
        assert started.returncode == 0, started.stderr
        deadline = time.monotonic() + self.patience
        while json.loads(self.call("state", NAME).stdout)["status"] != "stopped" and time.monotonic() < deadline:
            time.sleep(0.01)
        self.delete()
        return (self.folder / "output").read_text().splitlines()

    def delete(self) -> None:
        subprocess.run((self.low_level, "delete", "--force", NAME), capture_output=True, check=False)


def nodes(report: list[str]) -> list[str]:
    return [line for line in report if line.startswith("node ")]


def require_all_gpus(report: list[str]) -> None:
    """The container has both GPUs and may open them, and the driver's files, which it can't change."""
    # No driver is loaded here: ENXIO says that the device cgroup let the call through; it forbids by EPERM.
    assert nodes(report) == [
        f"node /dev/nvidia0 c3:0 666 {ENXIO}",
        f"node /dev/nvidia1 c3:1 666 {ENXIO}",
        f"node /dev/nvidiactl c3:ff 666 {ENXIO}",
    ]
    assert f"file {LIBRARIES}/libcuda.so.1 cuda" in report
    mounts = [line for line in report if line.startswith("mount ")]
    assert len(mounts) == 3
    assert all({"ro", "nosuid", "nodev"} <= set(line.split()[2].split(",")) for line in mounts)
    assert "wrote nvidia-smi" not in report


@pytest.fixture(params=["runc", "crun"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, low_level_runtime(request.param, tmp_path))
    yield made
    made.delete()
