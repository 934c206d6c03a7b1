"""Compiles the stub libraries and programs of a driver: NVML and CUDA that answer, and the rest as empty shells.

The shells have the real file names, sonames and links, which is all that driver discovery looks at.
"""

from pathlib import Path

from .cache import SOURCES, built, digest_of
from .commands import output_of
from .debian import nvidia_smi, nvml_header, nvml_names
from .gpus import CUDA_VERSION, DRIVER_VERSION, render_c_table
from .layout import DriverFile, driver_files

_HINT = "install gcc and libc6-dev"
_CFLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
_SHARED = ("-shared", "-fPIC", "-fvisibility=hidden", "-s", "-Wl,--build-id=none")
# Only these hold code; every other library is plain.c under another name.
_CODE = {
    "libnvidia-ml.so.1": ("nvml.c", "nvml_device.c", "nvml_health.c", "device.c"),
    "libcuda.so.1": ("cuda.c", "device.c"),
}


def build_libraries(version: str = DRIVER_VERSION, cuda_version: str = CUDA_VERSION) -> Path:
    """A folder with all libraries of that driver version, flat and linked, and nvidia-smi and nvidia-modprobe.

    `LD_LIBRARY_PATH=<folder> <folder>/nvidia-smi -L` works there. Raises BuildError without gcc or without a mirror.
    """
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    digest = digest_of((version, cuda_version, render_c_table(), Path(__file__).read_bytes(), *sources))
    return built("libraries", digest, lambda folder: _build(folder, version, cuda_version))


def _build(folder: Path, version: str, cuda_version: str) -> None:
    work = folder / ".work"
    work.mkdir()
    (work / "simgpu_table.h").write_text(render_c_table(version, cuda_version))
    (work / "nvml.h").write_bytes(nvml_header().read_bytes())
    (work / "nvml_stubs.c").write_text("".join(_stub(name) for name in nvml_names()))
    output_of("gcc", *_CFLAGS, "-fPIC", "-c", str(SOURCES / "plain.c"), "-o", str(work / "plain.o"), hint=_HINT)
    libraries = [one for one in driver_files(version) if one.path.startswith("@LIBDIR@/")]
    for one in libraries:
        if one.is_link:
            (folder / one.name).symlink_to(one.target)
        else:
            _compile_library(one, folder / one.name, work)
    _compile_modprobe(folder / "nvidia-modprobe")
    (folder / "nvidia-smi").write_bytes(nvidia_smi().read_bytes())
    (folder / "nvidia-smi").chmod(0o755)
    for leftover in work.iterdir():
        leftover.unlink()
    work.rmdir()


def _stub(name: str) -> str:
    # Weak: a function that nvml.c defines wins over its stub at link time.
    return f'int {name}(void);\n__attribute__((weak, visibility("default"))) int {name}(void) {{ return 3; }}\n'


def _compile_library(one: DriverFile, output: Path, work: Path) -> None:
    names = _CODE.get(one.soname, ())
    inputs = [str(SOURCES / name) for name in names] or [str(work / "plain.o")]
    if one.soname == "libnvidia-ml.so.1":
        inputs.append(str(work / "nvml_stubs.c"))
    include = ("-I", str(work), "-I", str(SOURCES))
    soname = f"-Wl,-soname,{one.soname}"
    output_of("gcc", *_CFLAGS, *_SHARED, *include, soname, "-o", str(output), *inputs, hint=_HINT)


def _compile_modprobe(output: Path) -> None:
    # Static: it must run on every distribution of the lab, also on those with an older C library than ours.
    source = str(SOURCES / "nvidia-modprobe.c")
    output_of("gcc", *_CFLAGS, "-static", "-s", "-Wl,--build-id=none", "-o", str(output), source, hint=_HINT)
