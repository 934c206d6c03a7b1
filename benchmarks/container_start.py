"""What a container start costs: plain runc against gpuprov's runtime and hook, and NVIDIA's where it is installed.

    python -m benchmarks.container_start [--rounds 40] [--gpus 1 8 16]

All variants start the same bundle with the same simulated driver, alternating. `floor` is runc with the same mounts
and devices in config.json and no hook: what any way of giving GPUs costs at least; `empty Python` puts a shell and a
Python that do nothing before it. Bundles lie in memory, as docker's do (/run). Times are of `create` alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuprov.cdi.discover import discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import render_json
from gpuprov.core.system import System
from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from tests import simgpu
from tests.deployed import Deployed, bundle_below, deploy_below, program

_NAME = f"gpuprov-bench-{os.getpid()}"
# An image's own libraries: the loader's cache of a CUDA image has some hundred entries.
_IMAGE_LIBRARIES = 300
_NVIDIA = "nvidia-container-runtime"


@dataclass
class Sample:
    """Wall and CPU milliseconds of each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 16])
    arguments = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for gpus in arguments.gpus:
        with tempfile.TemporaryDirectory(prefix="gpuprov-bench-", dir=memory) as folder:
            bench = Bench(Path(folder), gpus)
            bench.show(f"create, {gpus} GPU{'s' if gpus > 1 else ''}", bench.with_gpus(), arguments.rounds)
            if gpus == arguments.gpus[-1]:
                bench.show("create, no GPU asked for", bench.without_gpus(), arguments.rounds)
                bench.show_state(arguments.rounds)
                bench.show_parts()


class Bench:
    """A deployed runtime, a simulated driver, and a bundle with busybox in it."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.folder = folder
        self.runc = program("runc")
        self.deployed: Deployed = deploy_below(folder / "deployed")
        self.bundle = folder / "bundle"
        self._driver(gpus)
        self.config = bundle_below(self.bundle)
        self._image()

    def _driver(self, gpus: int) -> None:
        driver = self.folder / "driver"
        simgpu.install_tree(driver)
        simgpu.write_kernel_tree(driver, gpus)
        document = json.loads(render_json(specification(discover(System(str(driver))))))
        # The driver lies below this folder: containers get it from there, at its own paths.
        for mount in document["containerEdits"]["mounts"]:
            mount["hostPath"] = f"{driver}{mount['hostPath']}"
        text = json.dumps(document).replace(HOOK_PATH, str(self.deployed.hook))
        self.deployed.specification.write_text(text)

    def _image(self) -> None:
        root = self.bundle / "rootfs"
        folder = root / "usr/lib/x86_64-linux-gnu"
        folder.mkdir(parents=True)
        (root / "etc").mkdir()
        library = next(Path("/lib/x86_64-linux-gnu").glob("libz.so.1.*"))
        for number in range(_IMAGE_LIBRARIES):
            shutil.copy(library, folder / f"libimage{number}.so.1")
        subprocess.run(("/sbin/ldconfig", "-X", "-r", str(root)), check=True, capture_output=True)

    def _with(self, *environment: str) -> dict[str, Any]:
        process = self.config["process"]
        return {**self.config, "process": {**process, "env": [*process["env"], *environment]}}

    def with_gpus(self) -> dict[str, tuple[str, str]]:
        """Return the variants of a start with GPUs: name → (runtime, config.json)."""
        asked = self._with("NVIDIA_VISIBLE_DEVICES=all")
        plain = json.dumps(asked)
        self._create(str(self.deployed.runtime), plain)
        floor = (self.bundle / "config.json").read_text()
        hook = {"path": str(self.deployed.hook), "args": ["gpuprov-container-runtime-hook", "prestart"], "env": []}
        variants = {
            "plain runc": (self.runc, plain),
            "floor": (self.runc, floor),
            "empty Python, floor": (self._empty_python(), floor),
            "gpuprov runtime": (str(self.deployed.runtime), plain),
            "gpuprov hook": (self.runc, json.dumps({**asked, "hooks": {"prestart": [hook]}})),
        }
        return {**variants, **{f"nvidia {mode}": (path, plain) for mode, path in _nvidia_runtimes().items()}}

    def _empty_python(self) -> str:
        """Return a runtime that starts a shell and Python and does nothing: what one in Python costs at least."""
        path = self.folder / "empty-python"
        runc = f"import posix, sys; posix.execv({self.runc!r}, [{self.runc!r}, *sys.argv[1:]])"
        path.write_text(f'#!/bin/sh\nexec /usr/bin/python3 -I -S -E -B -c {shlex.quote(runc)} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def without_gpus(self) -> dict[str, tuple[str, str]]:
        """Return the variants of a start without GPUs."""
        plain = json.dumps(self.config)
        return {"plain runc": (self.runc, plain), "gpuprov runtime": (str(self.deployed.runtime), plain)}

    def _create(self, runtime: str, config: str) -> tuple[float, float]:
        (self.bundle / "config.json").write_text(config)
        taken = _timed((runtime, "create", "--bundle", str(self.bundle), _NAME))
        subprocess.run((self.runc, "delete", "--force", _NAME), check=True, stdout=subprocess.DEVNULL)
        return taken

    def show(self, title: str, variants: dict[str, tuple[str, str]], rounds: int) -> None:
        """Print one table: every variant of a start, alternating."""
        samples = {name: Sample() for name in variants}
        for runtime, config in variants.values():  # once to warm up
            self._create(runtime, config)
        for _ in range(rounds):
            for name, (runtime, config) in variants.items():
                wall, cpu = self._create(runtime, config)
                samples[name].wall.append(wall)
                samples[name].cpu.append(cpu)
        counted = {name: self._counted(*variant) for name, variant in variants.items()}
        _print_table(f"{title} ({rounds} alternating rounds)", samples, counted)

    def _counted(self, runtime: str, config: str) -> str:
        """Return processes and system calls of one start, as strace counts them; nothing without strace."""
        if shutil.which("strace") is None:
            return ""
        (self.bundle / "config.json").write_text(config)
        log = self.folder / "strace"
        argv = ("strace", "-f", "-qq", "-o", str(log), runtime, "create", "--bundle", str(self.bundle), _NAME)
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as traced:
            # It ends with the last process that it follows, which is the container's.
            for _ in range(200):
                if subprocess.run((self.runc, "state", _NAME), capture_output=True, check=False).returncode == 0:
                    break
                time.sleep(0.05)
            time.sleep(0.2)
            subprocess.run((self.runc, "delete", "--force", _NAME), check=True, stdout=subprocess.DEVNULL)
            traced.wait(timeout=30)
        lines = [
            line for line in log.read_text(errors="replace").splitlines() if "(" in line and "resumed>" not in line
        ]
        return f"{sum(' execve(' in line for line in lines):>10}{len(lines):>14}"

    def show_state(self, rounds: int) -> None:
        """Print one table: a command that is not `create`."""
        (self.bundle / "config.json").write_text(json.dumps(self.config))
        subprocess.run((self.runc, "create", "--bundle", str(self.bundle), _NAME), check=True, stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        samples = {"plain runc": Sample(), "gpuprov runtime": Sample()}
        for _ in range(rounds):
            for name, runtime in (("plain runc", self.runc), ("gpuprov runtime", str(self.deployed.runtime))):
                wall, cpu = _timed((runtime, "state", _NAME))
                samples[name].wall.append(wall)
                samples[name].cpu.append(cpu)
        subprocess.run((self.runc, "delete", "--force", _NAME), check=True, stdout=subprocess.DEVNULL)
        _print_table(f"state, a command other than create ({rounds} alternating rounds)", samples, {})

    def show_parts(self) -> None:
        """Print where the time of our own part goes, each part's median."""
        library = self.folder / "deployed/host/usr/lib/gpuprov"
        (self.bundle / "config.json").write_text(json.dumps(self._with("NVIDIA_VISIBLE_DEVICES=all")))
        original = (self.bundle / "config.json").read_text()
        parts: dict[str, list[float]] = {}
        for _ in range(20):
            (self.bundle / "config.json").write_text(original)
            begun = time.perf_counter()
            python = ("/usr/bin/python3", "-I", "-S", "-E", "-B", "-c")
            subprocess.run((*python, "import posix; posix._exit(0)"), check=True)
            parts.setdefault("Python's own start and end", []).append((time.perf_counter() - begun) * 1000)
            done = subprocess.run(
                (*python, _PARTS.format(load=deploy.render_start("main", str(library)), bundle=self.bundle)),
                capture_output=True,
                text=True,
                check=True,
            )
            for name, value in json.loads(done.stdout).items():
                parts.setdefault(name, []).append(value)
        for name in ("sh -c :", "grep -q NVIDIA_ config.json"):
            argv = (
                ("/bin/sh", "-c", ":")
                if name.startswith("sh")
                else ("grep", "-qF", "NVIDIA_", str(self.bundle / "config.json"))
            )
            parts[f"launcher: {name}"] = [_timed(argv)[0] for _ in range(20)]
        print("\nwhere the runtime's time goes, medians in ms")
        for name, values in parts.items():
            print(f"  {name:44}{statistics.median(values):8.2f}")


_PARTS = """
import time
now = time.perf_counter
begun = now()
{load}
found = {{"import": (now() - begun) * 1000}}
from runtime_hook import main, decision, jsonio
def timed(module, name, what):
    function = getattr(module, name)
    def measured(*words, **named):
        begun = now()
        try:
            return function(*words, **named)
        finally:
            found[what] = found.get(what, 0) + (now() - begun) * 1000
    setattr(module, name, measured)
timed(decision, "parse_config", "parse config.json")
timed(decision, "read_settings", "read settings")
timed(decision, "parse_request", "request")
timed(decision, "choose", "specification: read, choose")
timed(main, "inject", "files: links, loader cache")
timed(main, "apply_edits", "edit")
timed(main, "replace_file", "write config.json")
begun = now()
main.prepare("{bundle}")
found["all of it but the import"] = (now() - begun) * 1000
print(jsonio.dumps(found))
"""


def _nvidia_runtimes() -> dict[str, str]:
    found = {"jit-cdi": _NVIDIA, "cdi": f"{_NVIDIA}.cdi", "legacy": f"{_NVIDIA}.legacy"}
    return {mode: path for mode, name in found.items() if (path := shutil.which(name))}


def _timed(argv: tuple[str, ...]) -> tuple[float, float]:
    """Return wall and CPU milliseconds of a command and all that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall * 1000, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def _print_table(title: str, samples: dict[str, Sample], counted: dict[str, str]) -> None:
    first = statistics.median(next(iter(samples.values())).wall)
    heads = f"{'median ms':>11}{'more':>8}{'ratio':>7}{'p95':>8}{'CPU ms':>8}"
    print(
        f"\n{title}\n{'':20}{heads}{'processes':>12}{'system calls':>14}"
        if any(counted.values())
        else f"\n{title}\n{'':20}{heads}"
    )
    for name, sample in samples.items():
        wall = statistics.median(sample.wall)
        p95 = sorted(sample.wall)[int(len(sample.wall) * 0.95)]
        row = f"{name:20}{wall:11.1f}{wall - first:+8.1f}{wall / first:7.2f}{p95:8.1f}"
        print(f"{row}{statistics.median(sample.cpu):8.1f}{counted.get(name, ''):>26}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
