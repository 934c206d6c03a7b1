"""What a chosen libcuda means for programs: its version against the kernel module's and the image's CUDA. Pure.

Source: NVIDIA, "CUDA Compatibility": a libcuda of another version than the kernel module's works only if it comes from
cuda-compat and from a newer branch (forward compatibility); a runtime of CUDA 11 or later works with each driver of its
major release (minor version compatibility), older runtimes need their own release's driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpuprov.runtime_hook.requirements import FIRST_DRIVERS, cuda_version_of_driver
from gpuprov.verify.cuda.loader import GLIBC, MUSL, Loader
from gpuprov.verify.cuda.runtimes import Runtime
from gpuprov.verify.cuda.search import LIBCUDA, LIBNVIDIA_ML, Found
from gpuprov.wire.versions import version_numbers

# CUDA 11 brought minor version compatibility, for drivers of its second release on (the page's table 1).
_FIRST_COMPATIBLE = 11
_LEAST_DRIVER_OF_11 = "450.80.02"


@dataclass(frozen=True)
class Finding:
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


_MUSL = Finding(
    (35,), "the C library is musl, and the driver's libraries need glibc: CUDA can't run",
    "musl's loader is in the root file system, glibc's is not", "use an image with glibc, such as Debian's",
)  # fmt: skip
_NO_LOADER = Finding(
    (), "there is no dynamic loader: only static programs run, and they can't load libcuda",
    "neither glibc's nor musl's loader is in the root file system", "use an image with glibc, such as Debian's",
)  # fmt: skip


def judge(
    loader: Loader,
    found: tuple[Found, ...],
    kernel: str,
    runtimes: tuple[Runtime, ...],
    *,
    kind: str,
    has_driver: bool = True,
) -> tuple[Finding, ...]:
    """Return what is wrong, the first to correct first.

    `kind` is host, container or image; `has_driver` says whether an image's files have the driver's among them, as they
    have in a container.
    """
    if loader.library != GLIBC:
        return (_MUSL if loader.library == MUSL else _NO_LOADER,)
    named = {one.name: one for one in found}
    return (
        *(replace(one, library=LIBCUDA) for one in _library(named[LIBCUDA], kernel, kind, has_driver)),
        *_runtimes(named[LIBCUDA], runtimes),
        *(replace(one, library=LIBNVIDIA_ML) for one in _management(named[LIBNVIDIA_ML], kernel)),
    )


def _library(cuda: Found, kernel: str, kind: str, has_driver: bool) -> Iterator[Finding]:
    one = cuda.winner
    if one is None:
        what = "the loader finds no libcuda.so.1" + ("" if has_driver else ": the image has none of its own")
        unused = "not in a folder that the loader searches"
        seen = "; ".join(f"{other.path}: {other.fault or unused}" for other in cuda.others)
        step = "sudo gpuprov install" if kind == "host" else "start the container with GPUs: docker run --gpus all"
        yield Finding((35,), what, seen, step, note=not has_driver)
        return
    seen = f"{one.chain[-1]}: {one.reason}"
    if one.fault:
        yield Finding((35,), f"the loader stops at {one.path}: {one.fault}", seen, f"remove {one.path}")
    elif one.stub:
        yield Finding((34, 35), f"{one.path} is CUDA's stub, not the driver's library", seen, _way_out(one.reason))
    elif not one.version:
        what = f"the version of {one.path} is unknown: no name in its chain of links has one"
        yield Finding((803,), what, seen, "compare the file with the host's libcuda", note=True)
    elif kernel and version_numbers(one.version) != version_numbers(kernel):
        yield _other_version(one.path, one.version, kernel, seen, one.reason, compat=one.compat)


def _other_version(path: str, version: str, kernel: str, seen: str, reason: str, *, compat: bool) -> Finding:
    newer = version_numbers(version)[0] > version_numbers(kernel)[0]
    versions = f"{path} is of driver {version}, the loaded kernel module is {kernel}"
    if newer and compat:
        what = f"forward compatibility: {versions}; this works on data center GPUs only"
        return Finding((804,), what, seen, "on other GPUs, update the driver", note=True)
    results = (803, 804) if newer else (803, 35, 36)
    return Finding(results, versions, seen, _way_out(reason))


def _way_out(reason: str) -> str:
    """Return how to make another library win than the one for this reason."""
    variable = reason.partition(" ")[0]
    if variable in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        return f"correct {variable}: in the image, or in the call, such as docker run --env {variable}="
    if reason.startswith("the loader's cache"):
        return "remove the file, or its folder from /etc/ld.so.conf.d, then run ldconfig"
    return "remove the file; on a host, reboot after an update of the driver"


def _runtimes(cuda: Found, runtimes: tuple[Runtime, ...]) -> Iterator[Finding]:
    one = cuda.winner
    if one is None or one.fault or one.stub or not one.version:
        return
    supported = cuda_version_of_driver(one.version)
    for runtime in runtimes:
        least = least_driver(runtime.version)
        if least and version_numbers(one.version) < version_numbers(least):
            what = f"CUDA {runtime.version} needs driver {least} or later, {one.path} is of {one.version}"
            step = f"update the driver, or use an image for CUDA {supported or 'of an older release'} or earlier"
            yield Finding((35,), what, runtime.source, step)
        elif supported and version_numbers(runtime.version) > version_numbers(supported):
            what = (
                f"minor version compatibility: CUDA {runtime.version} runs on driver {one.version} (CUDA {supported})"
            )
            step = "most programs run; calls of the newer release give 36, PTX of it gives 222: then update the driver"
            yield Finding((36, 222), what, runtime.source, step, note=True)


def _management(management: Found, kernel: str) -> Iterator[Finding]:
    one = management.winner
    if one is not None and one.fault:
        what = f"the loader stops at {one.path}: {one.fault}; nvidia-smi exits 12"
        yield Finding((), what, f"{one.chain[-1]}: {one.reason}", f"remove {one.path}")
        return
    if one is None or not one.version or not kernel or version_numbers(one.version) == version_numbers(kernel):
        return
    # cuda-compat brings no NVML: that library is the host's.
    what = f"{one.path} is of driver {one.version}, the loaded kernel module is {kernel}: nvidia-smi exits 18"
    yield Finding((), what, f"{one.chain[-1]}: {one.reason}", _way_out(one.reason))
