"""`make test-gpu`: gpuprov on this machine's own GPUs, without provisioning it; nothing is simulated.

Discovery, health, a container by runc with each way to a GPU, nvidia-smi field by field, a CUDA kernel, and PyTorch
where an image is named. Everything lies in a temporary folder; the machine is not changed. The report is for sending.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpuprov.cdi.discover import DriverFacts, ask_nvml, discover, missing_nodes
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import render_json
from gpuprov.checks import features
from gpuprov.checks.cuda_checks import command
from gpuprov.checks.health import examine
from gpuprov.checks.outcome import Failed as OutcomeFailed
from gpuprov.core.system import System
from gpuprov.facts.boot import gather_boot
from gpuprov.facts.gpus import gather_imex
from gpuprov.machine.pci import gather_gpus
from gpuprov.protocol import tables
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import HealthFound
from gpuprov.protocol.models import model_of
from gpuprov.protocol.tables import PACKAGED
from tests.deployed import PYTHON
from tests.integration.container_bench import Bench
from tests.integration.container_python import add_python

_CHECKS = Path(__file__).resolve().parents[1] / "gpuprov/checks"
_TORCH = _CHECKS / "torch_program.py"
_ALL = "NVIDIA_VISIBLE_DEVICES=all"
# What changes by itself, or is another process's.
_VOLATILE = re.compile(
    r"timestamp|process|temperature|power|clocks|utilization|used|free|reserved|fan_speed|performance_state|"
    r"_util|replay|link_gen|violation|sample|accounting"
)
_QUERY = "index,uuid,pci.bus_id,name"
_SECONDS = 600
WAYS = ("runtime", "hook")


class Failed(Exception):  # noqa: N818 (carries a check's outcome)
    """A check found something wrong."""


class Skipped(Exception):  # noqa: N818 (carries a check's outcome)
    """A check can't be made on this machine."""


class Report:
    """The checks in their order, and what was recorded; printed as it comes."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.good = True

    def check(self, name: str, do: Callable[[], str]) -> None:
        """Run a check, which returns what to show."""
        try:
            self._say(f"ok       {name}: {do()}")
        except Skipped as reason:
            self._say(f"skipped  {name}: {reason}")
        except (Failed, GpuprovError, OSError, AssertionError, subprocess.SubprocessError) as error:
            self.good = False
            self._say(f"FAILED   {name}: {error}")

    def _say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def record(self, title: str, text: str) -> None:
        """Add data that tests can use later; not printed."""
        self.lines += ["", f"==== {title}", text.rstrip()]


def output_of(*argv: str) -> str:
    """Return what a command prints. Raises Failed."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        raise Failed(f"{' '.join(argv)} exited {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def leaves(text: str) -> dict[str, str]:
    """Return each field of `nvidia-smi -q -x` by its path, without those that change by themselves."""
    found: dict[str, str] = {}

    def walk(element: ElementTree.Element, path: str) -> None:
        counts: dict[str, int] = {}
        for child in element:
            counts[child.tag] = counts.get(child.tag, 0) + 1
            walk(child, f"{path}/{child.tag}[{counts[child.tag]}]")
        if not len(element) and not _VOLATILE.search(path):
            found[path] = (element.text or "").strip()

    walk(ElementTree.fromstring(text), "")
    return found


def differences(host: Sequence[str], container: str) -> list[str]:
    """Return the fields that differ from the host's; a field that the host itself changed meanwhile is left out."""
    before, after, seen = leaves(host[0]), leaves(host[1]), leaves(container)
    return [
        f"{path}: {before[path]} on the host, {seen.get(path, 'missing')} in the container"
        for path in before
        if before[path] == after.get(path) and before[path] != seen.get(path)
    ]


class GpuBench(Bench):
    """A bench whose driver is the machine's own, with Python in its containers."""

    patience = _SECONDS

    def __init__(self, folder: Path, driver: DriverFacts) -> None:
        self.driver = driver
        super().__init__(folder, "runc")
        add_python(self.root, "/usr/bin/nvidia-smi")

    def _driver(self) -> None:
        found = specification(self.driver)
        hooks = tuple(replace(one, path=str(self.deployed.hook)) for one in found.edits.hooks)
        self.specification.write_bytes(render_json(replace(found, edits=replace(found.edits, hooks=hooks))))

    def run(self, way: str, environment: str, *arguments: str) -> tuple[str, str]:
        """Run a program in a container by a way; return what it printed, and its errors."""
        hooks = {"hooks": {"prestart": [self.hook_entry("prestart")]}} if way == "hook" else {}
        self.configure(environment, arguments=list(arguments), **hooks)
        done = self.create(runtime=self.low_level if way == "hook" else "")
        if done.returncode != 0:
            self.delete()
            raise Failed(done.stderr.strip())
        return "\n".join(self.output()), (self.folder / "errors").read_text()


def check_discovery(driver: DriverFacts) -> str:
    """Hold discovery against the loaded driver and nvidia-smi."""
    if driver.kernel_version != driver.library_version:
        raise Failed(f"kernel module {driver.kernel_version or 'none'}, libraries {driver.library_version or 'none'}")
    rows = output_of("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader").splitlines()
    theirs = [tuple(row.split(", ")) for row in rows]
    # nvidia-smi writes the domain with eight digits, sysfs with four.
    ours = [(str(gpu.index), gpu.uuid, gpu.bus_id.upper().rjust(16, "0"), gpu.model) for gpu in driver.gpus]
    if ours != theirs:
        raise Failed(f"discovery has {ours}, nvidia-smi has {theirs}")
    missing = ", ".join(node.path for node in missing_nodes(driver))
    if missing:
        raise Failed(f"missing device nodes: {missing}")
    libraries = f"{len(driver.libraries)} libraries"
    return f"driver {driver.library_version}, CUDA {driver.cuda_version}, {len(ours)} GPUs, {libraries}"


def check_container(bench: GpuBench, way: str, smi: list[str]) -> str:
    """Compare nvidia-smi's whole report on the host and in a container with all GPUs; `smi` takes the host's."""
    before = output_of("nvidia-smi", "-q", "-x")
    seen, errors = bench.run(way, _ALL, "nvidia-smi", "-q", "-x")
    if not seen.startswith("<?xml"):
        raise Failed(f"nvidia-smi in the container: {errors.strip() or seen}")
    smi[:] = [before]
    found = differences((before, output_of("nvidia-smi", "-q", "-x")), seen)
    if found:
        raise Failed("; ".join(found))
    return f"{len(leaves(seen))} fields of nvidia-smi are the host's"


def check_one(bench: GpuBench, way: str) -> str:
    """Give the last GPU alone, then none."""
    gpu = bench.driver.gpus[-1]
    seen, errors = bench.run(way, f"NVIDIA_VISIBLE_DEVICES={gpu.uuid or gpu.index}", "nvidia-smi", "-L")
    found = re.findall(r"UUID: (GPU-[0-9a-f-]+)", seen)
    if found != [gpu.uuid]:
        raise Failed(f"asked for {gpu.uuid}, nvidia-smi -L prints {seen.strip()} {errors.strip()}")
    seen, _ = bench.run("", "NVIDIA_VISIBLE_DEVICES=void", "sh", "-c", "echo /dev/*")
    if "nvidia" in seen:
        raise Failed(f"a container without GPUs has {seen}")
    return "that GPU alone; none where none is asked for"


def check_cuda(bench: GpuBench, way: str) -> str:
    """Call CUDA's driver API in a container, and run a kernel on each GPU."""
    seen, errors = bench.run(way, _ALL, *command(PYTHON, "kernel", "own"))
    lines: list[dict[str, Any]] = [json.loads(line) for line in seen.splitlines() if line.startswith("{")]
    if not lines or lines[0]["failed"] or lines[0]["faults"]:
        raise Failed(f"{seen} {errors}".strip())
    if sorted(lines[0]["uuids"]) != sorted(gpu.uuid for gpu in bench.driver.gpus if not gpu.mig):
        raise Failed(f"CUDA sees {lines[0]['uuids']}")
    kernel: dict[str, Any] = lines[1] if len(lines) > 1 else {"left_out": "", "gpus": []}
    if kernel["left_out"]:
        raise Skipped(f"the calls work; the kernel did not run: {kernel['left_out']}")
    wrong = [one for one in kernel["gpus"] if one["wrong"] or one["failed"]]
    if wrong or len(kernel["gpus"]) != len(lines[0]["uuids"]):
        raise Failed(json.dumps(kernel))
    return f"CUDA {lines[0]['version']}, {len(kernel['gpus'])} GPUs computed, {lines[0]['loaded']}"


def check_accept(bench: GpuBench) -> str:
    """Test each GPU in a container by the program of `gpuprov accept`, and all of them at once for a minute."""
    seen, errors = bench.run("runtime", _ALL, *command(PYTHON, "60", accept=True))
    lines: list[dict[str, Any]] = [json.loads(line) for line in seen.splitlines() if line.startswith("{")]
    found = {(line["step"], line.get("gpu", "")): line for line in lines}
    if not lines or lines[0]["step"] != "found" or lines[-1]["step"] != "end":
        raise Failed(f"{seen} {errors}".strip())
    if lines[0]["simulated"]:
        raise Skipped("the program ran; simulated GPUs compute nothing")
    wrong = [line for line in lines if line.get("wrong") or line.get("error")]
    uuids = sorted(gpu.uuid for gpu in bench.driver.gpus if not gpu.mig)
    if wrong or sorted(uuid for step, uuid in found if step == "all") != uuids:
        raise Failed(json.dumps(wrong or lines))
    return "\n".join(json.dumps(line) for line in lines)


def check_torch(bench: GpuBench, image: str) -> str:
    """Run PyTorch in an image of docker's or podman's, whose files runc gets."""
    if not image:
        raise Skipped("no image is named: make test-gpu TORCH_IMAGE=pytorch/pytorch")
    engine = next((name for name in ("docker", "podman") if shutil.which(name)), "")
    if not engine:
        raise Skipped("needs docker or podman for the image's files")
    described: dict[str, list[str]] = json.loads(output_of(engine, "image", "inspect", image))[0]["Config"]
    container = output_of(engine, "create", image, "true").strip()
    export = f'"{engine}" export "$1" | tar -x -C "$2"'
    root = Path(tempfile.mkdtemp(dir=bench.folder))
    try:
        output_of("sh", "-ec", export, "sh", container, str(root))
    finally:
        output_of(engine, "rm", container)
    environment = [one for one in described.get("Env") or [] if not one.startswith("NVIDIA_VISIBLE_DEVICES=")]
    command = ["python3", "-c", _TORCH.read_text() if _TORCH.exists() else _TORCH_ASKS]
    bench.configure(*environment, _ALL, arguments=command, root={"path": str(root), "readonly": False})
    done = bench.create()
    if done.returncode != 0:
        raise Failed(done.stderr.strip())
    said = "\n".join(bench.output())
    if '"available": true' not in said or '"error": ""' not in said:
        raise Failed(f"{said} {(bench.folder / 'errors').read_text()[-2000:]}")
    return said


_TORCH_ASKS = """
import json, torch
print(json.dumps({"version": torch.__version__, "available": torch.cuda.is_available(), "error": "",
                  "count": torch.cuda.device_count()}))
"""


def without_serials(text: str) -> str:
    """Return nvidia-smi's report without the numbers on the boards."""
    return re.sub(r"<(serial|board_id|gpu_part_number)>[^<]*<", r"<\1>left out<", text)


def not_here() -> str:
    """Return why this machine can't be tested, nothing if it can."""
    if not Path("/dev/nvidia0").exists():
        return "this machine has no GPU with a loaded driver: /dev/nvidia0 is missing"
    if not Path("/proc/driver/nvidia/version").exists():
        return "the nvidia module is not loaded: /proc/driver/nvidia/version is missing; next: modprobe nvidia"
    return "" if os.geteuid() == 0 else "needs root for runc; next: sudo make test-gpu"


def check_containers(report: Report, bench: GpuBench, image: str, smi: list[str]) -> str:
    """Make the checks of each way to a GPU, then PyTorch's; `smi` takes the host's report of nvidia-smi."""
    try:
        for way in WAYS:
            report.check(f"{way}, all GPUs", partial(check_container, bench, way, smi))
            report.check(f"{way}, one GPU", partial(check_one, bench, way))
            report.check(f"{way}, CUDA", partial(check_cuda, bench, way))
        report.check("accept", partial(check_accept, bench))
        report.check("PyTorch", partial(check_torch, bench, image))
    finally:
        bench.delete()
    return f"each line above, by runc with the {' and the '.join(WAYS)}"


def check_health(report: Report, system: System) -> str:
    """Judge the GPUs, twice: the second time tells how long it takes once the driver is awake."""
    found: list[HealthFound] = []
    examine(system, lambda event: None)
    begun = time.monotonic()
    finished = examine(system, lambda event: found.append(event) if isinstance(event, HealthFound) else None)
    seconds = time.monotonic() - begun
    report.record("gpuprov health", "\n".join(f"{one.verdict} {one.rule} {one.gpu}: {one.evidence}" for one in found))
    return f"{finished.summary}; {seconds:.2f} s"


def lacking(system: System) -> dict[str, str]:
    """Return a check of `gpuprov verify` → why this machine can't make it, "" if it can."""
    ids = {gpu.device_id for gpu in gather_gpus(system)}
    virtual = re.search("Virtualization Mode *: VGPU", system.run(("nvidia-smi", "-q"), timeout=_SECONDS).stdout)
    modules = {"rdma": "nvidia_peermem", "gdrcopy": "gdrdrv", "storage": "nvidia_fs"}
    missing = {f"GPUDirect {kind}": f"the module {name} is not loaded" for kind, name in modules.items()
               if not system.exists(f"/sys/module/{name}")}  # fmt: skip
    coherent = any((model := model_of(one, PACKAGED)) and model.coherent_memory for one in ids)
    return {
        "coherent memory": "" if coherent else "no GPU of a Grace host",
        "vGPU licence": "" if virtual else "no virtual GPU",
        "MPS": "" if system.exists("/run/gpuprov-mps/control") else "gpuprov-mps.service does not run",
        "confidential computing": "" if gather_boot(system).confidential else "no guest with encrypted memory",
        "IMEX": "" if gather_imex(system).active else "nvidia-imex does not run: no rack, or no domain",
        **{f"GPUDirect {kind}": missing.get(f"GPUDirect {kind}", "") for kind in modules},
    }


def check_feature(system: System, name: str, reason: str) -> str:
    """Make a check of `gpuprov verify`, or ask IMEX for its domain. Raises Skipped for a reason."""
    if reason:
        raise Skipped(reason)
    if name == "IMEX":
        found: dict[str, Any] = json.loads(output_of("nvidia-imex-ctl", "-N", "-j"))
        if found["status"] != "UP":
            raise Failed(json.dumps(found))
        return f"{len(found['nodes'])} nodes are UP"
    row = next(row for row in tables.packaged("options")["checks"] if row["name"] == name)
    try:
        return features.check(system, row, "driver|numa")[0]
    except OutcomeFailed as error:
        raise Failed(str(error)) from None


def check_features(report: Report, system: System) -> None:
    """Check what only this kind of hardware can show, where the machine has it (docs/testing.md)."""
    for name, reason in lacking(system).items():
        report.check(name, partial(check_feature, system, name, reason))


def main() -> int:
    """Make all checks; write the report; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="make test-gpu")
    parser.add_argument("--torch-image", default="")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.txt"))
    words = parser.parse_args()
    reason = not_here()
    if reason:
        print(f"skipped: {reason}")
        return 0
    report, system = Report(), System()
    driver = ask_nvml(system, discover(system))
    report.check("discovery", lambda: check_discovery(driver))
    report.check("health", lambda: check_health(report, system))
    check_features(report, system)
    smi: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gpuprov-gpu-") as folder:
        report.check(
            "containers", lambda: check_containers(report, GpuBench(Path(folder), driver), words.torch_image, smi)
        )
    report.record("machine", f"{platform.platform()}\n{Path('/etc/os-release').read_text()}")
    report.record("/proc/driver/nvidia/version", system.read_text("/proc/driver/nvidia/version") or "")
    report.record("CDI specification", render_json(specification(driver)).decode())
    report.record("nvidia-smi -q -x", without_serials("".join(smi)))
    words.report.write_text("\n".join([*report.lines, ""]))
    print(f"the report: {words.report.resolve()} (board serial numbers are left out)")
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
