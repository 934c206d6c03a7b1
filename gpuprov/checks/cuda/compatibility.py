"""What a chosen libcuda means for programs: its version against the kernel module's and the image's CUDA.

Source: NVIDIA, "CUDA Compatibility": a libcuda of another version than the kernel module's works only if it comes from
cuda-compat and from a newer branch (forward compatibility); a runtime of CUDA 11 or later works with each driver of its
major release (minor version compatibility), older runtimes need their own release's driver.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from gpuprov.checks.cuda.files import chain, names, read
from gpuprov.checks.cuda.search import GLIBC, LIBCUDA, LIBNVIDIA_ML, MUSL, Libraries, Loader
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.tables import rows
from gpuprov.protocol.versions import version_numbers
from gpuprov.runtime_hook.driver_files import disagreement, next_step
from gpuprov.runtime_hook.requirements import FIRST_DRIVERS, cuda_version_of_driver
from gpuprov.runtime_hook.rootfs import Root

_LARGEST_VERSION_FILE = 64 << 10
# libcudart.so.12.4.127; the link's name is libcudart.so.12.
_LIBCUDART = re.compile(r"libcudart\.so\.(\d+(?:\.\d+)?)[\d.]*")
_TORCH_CUDA = re.compile(r"^cuda(?:\s*:[^=\n]*)?\s*=\s*['\"](\d+\.\d+)", re.MULTILINE)
_FOLDERS = (
    "/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/opt/conda/lib",
)  # fmt: skip
_PREFIXES = ("/usr", "/usr/local", "/opt/conda", "/opt/venv")


@dataclass(frozen=True)
class Runtime:
    """A CUDA runtime: its release (12.4, or 12 where no more is known), and what says so."""

    version: str
    source: str


def find_runtimes(root: Root, environment: Mapping[str, str]) -> tuple[Runtime, ...]:
    """Return the CUDA runtimes in the usual places, each file once, and what CUDA_VERSION says."""
    found: list[Runtime] = []
    if stated := re.match(r"(\d+\.\d+)(?:\.\d+)*", environment.get("CUDA_VERSION", "")):
        found.append(Runtime(stated[1], f"the variable CUDA_VERSION ({stated[0]})"))
    toolkits = (f"/usr/local/{one}/lib64" for one in names(root, "/usr/local") if re.fullmatch(r"cuda-\d+\.\d+", one))
    for folder in (*_FOLDERS, *toolkits, *environment.get("LD_LIBRARY_PATH", "").split(":")):
        for name in names(root, folder) if folder else ():
            links = chain(root, f"{folder}/{name}") if _LIBCUDART.fullmatch(name) else ()
            named = _LIBCUDART.fullmatch(links[-1].rpartition("/")[2]) if links else None
            if named:
                found.append(Runtime(named[1], links[-1]))
    # Virtual environments put themselves into PATH.
    programs = environment.get("PATH", "").split(":")
    for prefix in (*_PREFIXES, *(one.removesuffix("/bin") for one in programs if re.fullmatch("/.+/bin", one))):
        for python in names(root, f"{prefix}/lib"):
            if re.fullmatch(r"python3(\.\d+)?", python):
                found += _in_python(root, f"{prefix}/lib/{python}/site-packages")
                found += _in_python(root, f"{prefix}/lib/{python}/dist-packages")
    return tuple(dict.fromkeys(found))


def _in_python(root: Root, folder: str) -> Iterator[Runtime]:
    """Yield what Python's packages bring: NVIDIA's wheels, and PyTorch's."""
    for name in names(root, folder):
        if wheel := re.fullmatch(r"nvidia_cuda_runtime(?:_cu\d+)?-(\d+\.\d+)[\d.]*\.dist-info", name):
            yield Runtime(wheel[1], f"{folder}/{name}")
    path = f"{folder}/torch/version.py"
    stated = _TORCH_CUDA.search((read(root, path, _LARGEST_VERSION_FILE) or b"").decode("utf-8", "replace"))
    if stated:
        yield Runtime(stated[1], f"PyTorch's {path}")


# CUDA 11 brought minor version compatibility, for drivers of its second release on (the page's table 1).
_FIRST_COMPATIBLE = 11
_LEAST_DRIVER_OF_11 = "450.80.02"


@dataclass(frozen=True)
class Incompatibility:
    """One thing that is wrong; `results` are the results of CUDA to expect. A `note` is worth knowing and not wrong.

    `library`: the name of the library that is at fault, nothing if it is none of the driver's.
    """

    results: tuple[int, ...]
    what: str
    evidence: str = ""
    next_step: str = ""
    note: bool = False
    library: str = ""


def least_driver(cuda: str) -> str:
    """Return the first driver on which a CUDA release's programs start, nothing if it is not known.

    Of a release that is known by its major number alone, the first one counts.
    """
    key = version_numbers(cuda)
    own = next((driver for release, driver in FIRST_DRIVERS if version_numbers(release) >= key), "")
    if key < (_FIRST_COMPATIBLE,) or key >= (_FIRST_COMPATIBLE + 1,):
        majors = (driver for release, driver in FIRST_DRIVERS if version_numbers(release)[0] == key[0])
        return next(majors, "") if key > (_FIRST_COMPATIBLE,) else own
    return min(own, _LEAST_DRIVER_OF_11, key=version_numbers)


_MUSL = Incompatibility(
    (35,), "the C library is musl, and the driver's libraries need glibc: CUDA can't run",
    "musl's loader is in the root file system, glibc's is not", "use an image with glibc, such as Debian's",
)  # fmt: skip
_NO_LOADER = Incompatibility(
    (), "there is no dynamic loader: only static programs run, and they can't load libcuda",
    "neither glibc's nor musl's loader is in the root file system", "use an image with glibc, such as Debian's",
)  # fmt: skip


def incompatibilities(
    loader: Loader, found: tuple[Libraries, ...], kernel: str, runtimes: tuple[Runtime, ...], *, kind: str,
    has_driver: bool = True, is_container: bool = False,
) -> tuple[Incompatibility, ...]:  # fmt: skip
    """Return what is wrong, the first to correct first.

    `kind` is host, container or image; `has_driver` says whether an image's files have the driver's among them, as they
    have in a container; `is_container` whether a host is a system container.
    """
    if loader.library != GLIBC:
        return (_MUSL if loader.library == MUSL else _NO_LOADER,)
    machine = os.uname().machine
    if loader.machine != machine:
        what = f"its programs are for {loader.machine}, this host is {machine}: at best they are emulated, without GPUs"
        return (Incompatibility((), what, f"its loader is {loader.path}", f"use an image for {machine}"),)
    named = {one.name: one for one in found}
    is_host = kind == "host"
    # The step for a host's only library: it is the installed driver's, and nobody shall remove it.
    step = next_step(kernel, container=is_container) if is_host else ""
    cuda, management = ((named[name], step if _is_alone(named[name]) else "") for name in (LIBCUDA, LIBNVIDIA_ML))
    return (
        *(replace(one, library=LIBCUDA) for one in _library(*cuda, kernel, is_host, has_driver)),
        *_runtimes(named[LIBCUDA], runtimes),
        *(replace(one, library=LIBNVIDIA_ML) for one in _management(*management, kernel, is_host)),
    )


def _is_alone(found: Libraries) -> bool:
    """Say whether no other usable library is of another version than the one that wins."""
    one = found.winner
    usable = (other for other in found.others if other.version and not (other.fault or other.stub))
    return one is not None and not any(one.fault or other.version != one.version for other in usable)


def _library(cuda: Libraries, own_step: str, kernel: str, is_host: bool, has_driver: bool) -> Iterator[Incompatibility]:
    one = cuda.winner
    if one is None:
        what = "the loader finds no libcuda.so.1" + ("" if has_driver else ": the image has none of its own")
        unused = "not in a folder that the loader searches"
        seen = "; ".join(f"{other.path}: {other.fault or unused}" for other in cuda.others)
        step = "sudo gpuprov install" if is_host else "start the container with GPUs: docker run --gpus all"
        yield Incompatibility((35,), what, seen, step, note=not has_driver)
        return
    seen, step = f"{one.chain[-1]}: {one.reason}", _way_out(one.reason, is_host)
    versions = f"{one.path} is of driver {one.version}, the loaded kernel module is {kernel}"
    newer = bool(one.version and kernel) and version_numbers(one.version)[0] > version_numbers(kernel)[0]
    if one.fault:
        step = "sudo gpuprov install" if own_step else f"remove {one.path}"
        yield Incompatibility((35,), f"the loader stops at {one.path}: {one.fault}", seen, step)
    elif one.stub:
        yield Incompatibility((34, 35), f"{one.path} is CUDA's stub, not the driver's library", seen, step)
    elif not one.version:
        what = f"the version of {one.path} is unknown: no name in its chain of links has one"
        yield Incompatibility((803,), what, seen, "compare the file with the host's libcuda", note=True)
    elif newer and one.compat:
        what = f"forward compatibility: {versions}; this works on data center GPUs only"
        yield Incompatibility((804,), what, seen, "on other GPUs, update the driver", note=True)
    elif kernel and version_numbers(one.version) != version_numbers(kernel):
        versions = disagreement(one.version, kernel) if own_step else versions
        yield Incompatibility((803, 804) if newer else (803, 35, 36), versions, seen, own_step or step)


def _way_out(reason: str, is_host: bool) -> str:
    """Return how to make another library win than the one for this reason."""
    variable = reason.partition(" ")[0]
    if variable in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        return f"correct {variable}: in the image, or in the call, such as docker run --env {variable}="
    if is_host:
        return "gpuprov doctor  # names an old library, or an update of the driver that needs a reboot"
    if reason.startswith("the loader's cache"):
        return "remove the file, or its folder from /etc/ld.so.conf.d, then run ldconfig"
    return "remove the file from the image; after an update of the host's driver, reboot the host"


def _runtimes(cuda: Libraries, runtimes: tuple[Runtime, ...]) -> Iterator[Incompatibility]:
    one = cuda.winner
    if one is None or one.fault or one.stub or not one.version:
        return
    supported = cuda_version_of_driver(one.version)
    for runtime in runtimes:
        least, release = least_driver(runtime.version), f"CUDA {runtime.version}"
        if not least:
            what = f"whether {release} runs on driver {one.version} is unknown: gpuprov has no table for it"
            step = "read NVIDIA's release notes of this CUDA release"
            yield Incompatibility((), what, runtime.source, step, note=True)
        elif version_numbers(one.version) < version_numbers(least):
            what = f"{release} needs driver {least} or later, {one.path} is of {one.version}"
            step = f"update the driver, or use an image for CUDA {supported or 'of an older release'} or earlier"
            yield Incompatibility((35,), what, runtime.source, step)
        elif supported and version_numbers(runtime.version) > version_numbers(supported):
            what = f"minor version compatibility: {release} runs on driver {one.version} (CUDA {supported})"
            step = "most programs run; calls of the newer release give 36, PTX of it gives 222: then update the driver"
            yield Incompatibility((36, 222), what, runtime.source, step, note=True)


def _management(management: Libraries, own_step: str, kernel: str, is_host: bool) -> Iterator[Incompatibility]:
    one = management.winner
    if one is None:
        return
    seen = f"{one.chain[-1]}: {one.reason}"
    if one.fault:
        what = f"the loader stops at {one.path}: {one.fault}; nvidia-smi exits 12"
        yield Incompatibility((), what, seen, "sudo gpuprov install" if own_step else f"remove {one.path}")
    elif one.version and kernel and version_numbers(one.version) != version_numbers(kernel):
        # cuda-compat brings no NVML: that library is the host's.
        what = f"{one.path} is of driver {one.version}, the loaded kernel module is {kernel}: nvidia-smi exits 18"
        what = f"{disagreement(one.version, kernel)}: nvidia-smi exits 18" if own_step else what
        yield Incompatibility((), what, seen, own_step or _way_out(one.reason, is_host))


@dataclass(frozen=True)
class Result:
    """A result. `codes`: its numbers, those of older releases first; `names`: the runtime's and the driver's."""

    codes: tuple[int, ...]
    names: tuple[str, ...]
    meaning: str
    cause: str
    evidence: str
    remedy: str


RESULTS = rows("cuda_results", "results", Result)


def result_of(text: str) -> Result | None:
    """Return the row of a number or a name, whatever its case; None if there is no such row."""
    wanted = text.strip().lower()
    known = ((one, (*map(str, one.codes), *map(str.lower, one.names))) for one in RESULTS)
    return next((one for one, names in known if wanted in names), None)
