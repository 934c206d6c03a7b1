"""Which CUDA a root file system was made for: libcudart, PyTorch's version, CUDA_VERSION. Reads only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuprov.verify.cuda.trees import Tree, chain, read_start

_LARGEST_VERSION_FILE = 64 << 10
# libcudart.so.12.4.127; the wheels' file is libcudart.so.12, torch's own libcudart-9335f6a2.so.11.0.
_LIBCUDART = re.compile(r"libcudart(?:-[0-9a-f]+)?\.so\.(\d+(?:\.\d+)*)")
_DISTRIBUTION = re.compile(r"nvidia_cuda_runtime(?:_cu\d+)?-(\d+\.\d+)[\d.]*\.dist-info")
_TORCH_CUDA = re.compile(r"^cuda(?:\s*:[^=\n]*)?\s*=\s*['\"](\d+\.\d+)", re.MULTILINE)
_VERSION = re.compile(r"(\d+\.\d+)(?:\.\d+)*")
_FOLDERS = (
    "/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/opt/conda/lib",
)  # fmt: skip
_PREFIXES = ("/usr", "/usr/local", "/opt/conda", "/opt/venv")
_PYTHON = re.compile(r"python3(\.\d+)?")


@dataclass(frozen=True)
class Runtime:
    """A CUDA runtime: its release (12.4, or 12 where no more is known), and what says so."""

    version: str
    source: str


def find_runtimes(tree: Tree, environment: Mapping[str, str]) -> tuple[Runtime, ...]:
    """Return the CUDA runtimes in the usual places, each file once, and what CUDA_VERSION says."""
    found: dict[str, Runtime] = {}
    stated = _VERSION.match(environment.get("CUDA_VERSION", ""))
    if stated:
        found["CUDA_VERSION"] = Runtime(stated[1], f"the variable CUDA_VERSION ({stated[0]})")
    versions = [one for one in tree.names("/usr/local") if re.fullmatch(r"cuda-\d+\.\d+", one)]
    libraries = environment.get("LD_LIBRARY_PATH", "").split(":")
    folders = (*_FOLDERS, *(f"/usr/local/{one}/lib64" for one in versions), *(one for one in libraries if one))
    for folder in folders:
        found.update(_libraries(tree, folder))
    for folder in dict.fromkeys(_python_folders(tree, environment)):
        found.update(_in_python(tree, folder))
    return tuple(found.values())


def _libraries(tree: Tree, folder: str) -> Iterator[tuple[str, Runtime]]:
    """Yield the runtimes of a folder, by their real path."""
    for name in tree.names(folder):
        links = chain(tree, f"{folder}/{name}") if _LIBCUDART.fullmatch(name) else ()
        named = _LIBCUDART.fullmatch(links[-1].rpartition("/")[2]) if links else None
        if named:
            yield links[-1], Runtime(".".join(named[1].split(".")[:2]), links[-1])


def _python_folders(tree: Tree, environment: Mapping[str, str]) -> Iterator[str]:
    programs = environment.get("PATH", "").split(":")
    named = (environment.get("VIRTUAL_ENV", ""), environment.get("CONDA_PREFIX", ""))
    prefixes = (*_PREFIXES, *named, *(one.removesuffix("/bin") for one in programs if one.endswith("/bin")))
    for prefix in dict.fromkeys(one.rstrip("/") for one in prefixes if one.startswith("/")):
        for python in tree.names(f"{prefix}/lib"):
            if _PYTHON.fullmatch(python):
                for packages in ("site-packages", "dist-packages"):
                    folder = tree.real_folder(f"{prefix}/lib/{python}/{packages}")
                    if folder:
                        yield folder


def _in_python(tree: Tree, folder: str) -> Iterator[tuple[str, Runtime]]:
    """Yield what Python's packages bring: NVIDIA's wheels, and PyTorch's."""
    wheel = next((found for name in tree.names(folder) if (found := _DISTRIBUTION.fullmatch(name))), None)
    below = (one for one in tree.names(f"{folder}/nvidia") if re.fullmatch(r"cuda_runtime|cu\d+", one))
    for one in (f"{folder}/torch/lib", *(f"{folder}/nvidia/{name}/lib" for name in below)):
        for path, runtime in _libraries(tree, one):
            exact = wheel is not None and runtime.version == wheel[1].partition(".")[0]
            yield path, Runtime(wheel[1], path) if exact and wheel is not None else runtime
    path = f"{folder}/torch/version.py"
    stated = _TORCH_CUDA.search(read_start(tree, path, _LARGEST_VERSION_FILE).decode("utf-8", "replace"))
    if stated:
        yield path, Runtime(stated[1], f"PyTorch's {path}")
