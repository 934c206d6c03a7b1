"""What a container start costs: plain runc against gpuprov's runtime, the same bundle, alternating, on this machine.

    python -m benchmarks.container_start [--rounds 40] [--gpus 1 8 16]

Prints medians in ms of `create` with GPUs, `create` without any, and `state` (a command other than create).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from gpuprov.cdi.discover import discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import render_json
from gpuprov.runtime_hook import deploy
from gpuprov.system import System
from tests import simgpu


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 16])
    arguments = parser.parse_args()
    print(
        f"{'':28}{'plain runc':>12}{'gpuprov':>12}{'more':>10}   ms, medians of {arguments.rounds} alternating rounds"
    )
    with tempfile.TemporaryDirectory(prefix="gpuprov-bench-") as folder:
        for gpus in arguments.gpus:
            bench = Bench(Path(folder) / str(gpus), gpus)
            bench.compare(f"create, {gpus} GPUs", arguments.rounds, environment="NVIDIA_VISIBLE_DEVICES=all")
        bench.compare("create, no GPU asked for", arguments.rounds, environment="")
        bench.compare_state("state", arguments.rounds)


class Bench:
    """A deployed runtime, a simulated driver, and a bundle with busybox in it."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.folder = folder
        self.runc = shutil.which("runc", path="/usr/sbin:/usr/bin:/usr/local/sbin") or "runc"
        driver = folder / "driver"
        simgpu.install_tree(driver)
        simgpu.write_kernel_tree(driver, gpus)
        specification_path = folder / "nvidia.json"
        text = render_json(specification(discover(System(str(driver))))).decode()
        # The driver lies below this folder: containers get it from there, at its own paths.
        document = json.loads(text)
        for mount in document["containerEdits"]["mounts"]:
            mount["hostPath"] = f"{driver}{mount['hostPath']}"
        specification_path.write_text(json.dumps(document))
        self._deploy(specification_path)
        self._root()

    def _deploy(self, specification_path: Path) -> None:
        for path, mode, content in deploy.deployed_files():
            place = self.folder / "host" / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            place.chmod(mode)
        library = self.folder / "host" / deploy.LIBRARY_PATH.lstrip("/")
        settings = library / "runtime_hook/settings.py"
        settings.write_text(settings.read_text().replace("/etc/cdi/nvidia.json", str(specification_path)))
        deploy.compile_bytecode(str(library / "runtime_hook"))
        self.runtime = self.folder / "runtime"
        self.runtime.write_text(deploy.render_launcher("/usr/bin/python3", str(library), (self.runc,)))
        self.runtime.chmod(0o755)

    def _root(self) -> None:
        binaries = self.folder / "bundle/rootfs/bin"
        binaries.mkdir(parents=True)
        (self.folder / "bundle/rootfs/usr/lib/x86_64-linux-gnu").mkdir(parents=True)
        shutil.copy("/bin/busybox", binaries / "sh")
        subprocess.run((self.runc, "spec"), cwd=self.folder / "bundle", check=True)
        config = json.loads((self.folder / "bundle/config.json").read_text())
        config["process"]["terminal"] = False
        config["root"]["readonly"] = False
        self.config = config

    def _call(self, runtime: str, *words: str) -> float:
        begun = time.perf_counter()
        subprocess.run((runtime, *words), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        return (time.perf_counter() - begun) * 1000

    def _create(self, runtime: str, environment: str) -> float:
        env = [*self.config["process"]["env"], *([environment] if environment else [])]
        config = {**self.config, "process": {**self.config["process"], "env": env}}
        (self.folder / "bundle/config.json").write_text(json.dumps(config))
        taken = self._call(runtime, "create", "--bundle", str(self.folder / "bundle"), "gpuprov-bench")
        self._call(self.runc, "delete", "--force", "gpuprov-bench")
        return taken

    def compare(self, name: str, rounds: int, *, environment: str) -> None:
        """Print one row: `create` both ways, alternating."""
        pairs = [
            (self._create(self.runc, environment), self._create(str(self.runtime), environment)) for _ in range(rounds)
        ]
        _print_row(name, pairs)

    def compare_state(self, name: str, rounds: int) -> None:
        """Print one row: a command that is not `create`."""
        (self.folder / "bundle/config.json").write_text(json.dumps(self.config))
        self._call(self.runc, "create", "--bundle", str(self.folder / "bundle"), "gpuprov-bench")
        words = ("state", "gpuprov-bench")
        pairs = [(self._call(self.runc, *words), self._call(str(self.runtime), *words)) for _ in range(rounds)]
        self._call(self.runc, "delete", "--force", "gpuprov-bench")
        _print_row(name, pairs)


def _print_row(name: str, pairs: list[tuple[float, float]]) -> None:
    plain, ours = (statistics.median(values) for values in zip(*pairs, strict=True))
    print(f"{name:28}{plain:12.1f}{ours:12.1f}{ours - plain:+10.1f}", flush=True)


if __name__ == "__main__":
    main()
