"""What a chosen libcuda means for programs: its version against the kernel module's and the image's CUDA.

Source: NVIDIA, "CUDA Compatibility": a libcuda of another version than the kernel module's works only if it comes from
cuda-compat and from a newer branch (forward compatibility); a runtime of CUDA 11 or later works with each driver of its
major release (minor version compatibility), older runtimes need their own release's driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gpuprov.checks.cuda.search import (
    GLIBC,
    LIBCUDA,
    LIBNVIDIA_ML,
    MUSL,
    Candidate,
    Found,
    Loader,
    Program,
    find_loader,
    processor_levels,
    search,
)
from gpuprov.checks.cuda.trees import RootTree, Tree, chain, read_start
from gpuprov.core.system import System
from gpuprov.facts.driver import ENVIRONMENT, PRELOAD, HidingLibrary
from gpuprov.facts.interpreter import replaceable
from gpuprov.protocol.versions import version_numbers
from gpuprov.runtime_hook.requirements import FIRST_DRIVERS, cuda_version_of_driver
from gpuprov.runtime_hook.rootfs import Root

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


_SECONDS = 20
_VARIABLES = ("LD_PRELOAD", "LD_LIBRARY_PATH")
_CONFIGURATION = ("/etc/ld.so.conf", "/etc/ld.so.conf.d")
# No driver is installed below these by its installer or by a distribution.
_FOREIGN = ("/usr/local/", "/opt/", "/home/", "/root/", "/srv/", "/tmp/")


def gather_hiding(system: System, version: str) -> tuple[HidingLibrary, ...]:
    """Return the libraries that hide those of the driver of this version: the loaded one's, or the one to install."""
    if not version:
        return ()
    root = Root(str(system.path("/")))
    try:
        tree = RootTree(root)
        loader = find_loader(tree, processor_levels(system.read_text("/proc/cpuinfo") or ""))
        program = Program(environment_of_logins(system.read_text(ENVIRONMENT) or ""))
        found = [search(tree, loader, program, name) for name in (LIBNVIDIA_ML, LIBCUDA)]
    finally:
        root.close()
    return tuple(_named(system, one, own) for one in found if (own := hidden(one, version)) is not None)


def environment_of_logins(text: str) -> dict[str, str]:
    """Return the loader's variables in /etc/environment (pam_env(8))."""
    pairs = re.findall(r"""^\s*(?:export\s+)?(\w+)=["']?([^"'\n]*)""", text, re.MULTILINE)
    return {name: value for name, value in pairs if name in _VARIABLES}


def hidden(found: Found, version: str) -> str | None:
    """Return the driver's library that another one hides, "" if it is not there yet; None if nothing hides it."""
    one = found.winner
    # CUDA's stubs and compatibility libraries are another matter: programs ask for them.
    if one is None or one.stub or one.compat or (one.version == version and not one.fault):
        return None
    folder = _folder(one)
    own = next((o.path for o in found.others if o.version == version and _folder(o) != folder), None)
    return own if own is not None else "" if one.path.startswith(_FOREIGN) else None


def _folder(one: Candidate) -> str:
    return one.chain[-1].rpartition("/")[0]


def _named(system: System, found: Found, own: str) -> HidingLibrary:
    one = found.winner
    assert one is not None
    paths = tuple(dict.fromkeys((one.path, *one.chain)))
    # /lib may be a link to /usr/lib: the same file by two names.
    shown = (paths[0], *(path for path in paths[1:] if system.real_path(_parent(paths[0])) + _base(paths[0]) != path))
    # A link may lead to any file: only the library's own names in the folder that the loader searches are removed.
    folder, stem = system.real_path(_parent(paths[0])), f"/{found.name.partition('.so')[0]}.so"
    own_names = (path for path in shown if system.real_path(_parent(path)) == folder and _base(path).startswith(stem))
    removable = tuple(own_names)
    owner = _owner(system, removable[-1]) if removable else ""
    foreign = replaceable(system, folder, system_groups=True)
    return HidingLibrary(
        found.name, shown, one.version, _reason(system, one), own, owner, one.fault, removable, foreign
    )  # fmt: skip


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _base(path: str) -> str:
    return "/" + path.rpartition("/")[2]


def _reason(system: System, one: Candidate) -> str:
    """Return why the loader takes it, with the line of the file that makes it."""
    source, _, rest = one.reason.partition(" ")
    if source == PRELOAD:
        return _line(system, PRELOAD, re.escape(rest.rpartition(" ")[2])) + f" names {rest.rpartition(' ')[2]}"
    if source in _VARIABLES:
        return _line(system, ENVIRONMENT, rf"\b{source}=") + f" sets {source}"
    folder = _parent(one.path)
    for path in (_CONFIGURATION[0], *(f"{_CONFIGURATION[1]}/{name}" for name in
                                      sorted(system.list_directory(_CONFIGURATION[1])))):  # fmt: skip
        place = _line(system, path, rf"^\s*{re.escape(folder)}/?\s*(?:#.*)?$")
        if place != path:
            return f"{place} names {folder}"
    return one.reason


def _line(system: System, path: str, pattern: str) -> str:
    """Return `path:line` of the first line that matches, the path alone if none does."""
    lines = (system.read_text(path) or "").splitlines()
    number = next((number for number, line in enumerate(lines, 1) if re.search(pattern, line)), 0)
    return f"{path}:{number}" if number else path


def _owner(system: System, path: str) -> str:
    """Return the package that owns a file, nothing if none does."""
    if system.which("dpkg-query"):
        # Packages from before the merge of /usr have their files below /lib.
        for name in (path, path.removeprefix("/usr")):
            done = system.run(("dpkg-query", "--search", name), timeout=_SECONDS)
            # NAME[:ARCHITECTURE][, NAME…]: PATH
            owner = re.search(rf"^([a-z0-9][a-z0-9.+-]+)[^ ]*(?:, .*)?: {re.escape(name)}$", done.stdout, re.MULTILINE)
            if done.ok and owner:
                return owner[1]
    if system.which("rpm"):
        done = system.run(("rpm", "--query", "--file", "--queryformat", "%{NAME}\n", path), timeout=_SECONDS)
        return done.stdout.strip() if done.ok else ""
    return ""
