"""Asks PyTorch for its GPUs, computes on each, and prints one JSON object; runs by itself in an image of the user's."""

import ctypes
import json
import warnings
from typing import Any


def is_simulated() -> bool:
    """Say whether libcuda is that of gpuprov's tests, which computes nothing."""
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "simgpu_computes_nothing")
    except OSError:
        return False


def computed(torch: Any, count: int) -> str:
    """Compute on each GPU and return what went wrong, nothing if all is right."""
    try:
        for number in range(count):
            if int((torch.arange(1000, device=f"cuda:{number}") * 3).sum().item()) != 1498500:
                return f"GPU {number}: wrong result"
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    """Print versions, what is_available and device_count give, the warnings, and what a computation gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch

        available, count = bool(torch.cuda.is_available()), int(torch.cuda.device_count())
    built = {name: str(getattr(torch.version, name, None) or "") for name in ("cuda", "hip")}
    told = [str(one.message) for one in caught if "CUDA" in str(one.message)]
    error = computed(torch, count) if available and not is_simulated() else ""
    found = {"version": str(torch.__version__), **built, "available": available, "count": count}
    print(json.dumps({**found, "warnings": told, "error": error}))


main()
