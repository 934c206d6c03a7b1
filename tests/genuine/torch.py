"""`make test-torch`: a genuine PyTorch from PyPI in containers, on the simulated GPUs and with the genuine libcuda.

By hand: it fetches 2.9 GB and unpacks 5 GB, which are removed at the end; an argument names a folder that has PyTorch
already (pip install --target). Prints what PyTorch says in each case.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import simgpu
from tests.deployed import PYTHON
from tests.genuine.debian import driver
from tests.integration.container_python import add_python
from tests.integration.genuine_bench import GenuineBench, build_probe
from tests.simgpu import cache

TORCH = "torch==2.5.1"
_SITE = "/site"
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK=1"
_ASK = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    found = {"available": torch.cuda.is_available(), "count": torch.cuda.device_count(), "cuda": torch.version.cuda}
found["warnings"] = [str(one.message).splitlines()[0] for one in caught if "CUDA" in str(one.message)]
print(json.dumps(found))
"""
# (what is installed, variable of PyTorch, is_available, device_count)
CASES = (
    ("simulated", "", False, 2),
    ("simulated", _NVML, True, 2),
    ("genuine", "", False, 0),
    ("genuine", _NVML, False, 0),
)


def fetch(folder: Path) -> Path:
    """Install PyTorch, for the machine's own Python, below a folder."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--only-binary=:all:", "--target")
    subprocess.run((*pip, str(folder / "site"), TORCH), check=True)
    return folder / "site"


def make_bench(folder: Path, site: Path) -> GenuineBench:
    """Make containers in which PyTorch lies at /site."""
    folder.mkdir()
    bench = GenuineBench(folder, build_probe(folder))
    bench.patience = 600
    add_python(bench.root, *map(str, (site / "torch/lib").glob("libtorch_cuda.so")))
    (bench.root / _SITE.lstrip("/")).mkdir()
    return bench


def simulated_root(folder: Path) -> Path:
    """Lay out a host's root with the simulated driver and two GPUs."""
    simgpu.install_tree(folder)
    simgpu.write_kernel_tree(folder, 2, simgpu.DRIVER_VERSION)
    return folder


def ask(bench: GenuineBench, site: Path, variable: str) -> Mapping[str, Any]:
    """Return what PyTorch says in a container with all GPUs."""
    bind = {"destination": _SITE, "type": "bind", "source": str(site), "options": ["rbind", "ro"]}
    environment = ("NVIDIA_VISIBLE_DEVICES=all", f"PYTHONPATH={_SITE}", *([variable] if variable else []))
    mounts = [*bench.pristine["mounts"], bind]
    bench.configure(*environment, arguments=[PYTHON, "-c", _ASK], mounts=mounts)
    lines = bench.run()
    found = json.loads(lines[-1]) if lines else {"failed": (bench.folder / "errors").read_text()}
    return dict(found)


def main() -> int:
    """Ask in each case; return 1 if an answer is not the expected one."""
    good, begun = True, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpuprov-torch-", dir=cache.cache_root()) as name:
        folder = Path(name)
        site = Path(sys.argv[1]) if sys.argv[1:] else fetch(folder)
        size = sum(one.stat().st_size for one in site.rglob("*") if one.is_file())
        print(f"{TORCH}: {size / 1e9:.1f} GB, installed in {time.monotonic() - begun:.0f} s")
        bench = make_bench(folder / "bench", site)
        try:
            for kind, variable, available, count in CASES:
                root = folder / kind
                if kind == "genuine":
                    bench.install(driver("550"))
                elif not root.exists():
                    bench.give(simulated_root(root))
                started = time.monotonic()
                said = ask(bench, site, variable)
                right = (said.get("available"), said.get("count")) == (available, count)
                good = good and right
                seconds = f"{time.monotonic() - started:.0f} s"
                print("ok    " if right else "FAILED", kind, variable or "-", json.dumps(said), seconds, flush=True)
        finally:
            bench.delete()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
