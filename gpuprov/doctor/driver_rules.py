"""Rules about the driver's libraries on disk. Pure."""

from __future__ import annotations

import shlex

from gpuprov.cdi.files import CACHE
from gpuprov.doctor import words
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ASIDE, CERTAIN, DRIVER, LIKELY, Finding, Rule
from gpuprov.doctor.parse import lines_that_match
from gpuprov.doctor.remedy import INSTALL, LOADER_CACHE, Remedy
from gpuprov.driver import distribution, generations
from gpuprov.driver_run import INCOMPLETE_MARK
from gpuprov.protocol import advisories

_NVML, _CUDA = "libnvidia-ml.so.1", "libcuda.so.1"
# If one of these matches, a CDI specification can't be right.
ROOTS = (
    "no-gpu", "wsl-without-gpu", "gpu-nouveau", "gpu-vfio", "fallen-off-bus", "init-failed", "power-cables",
    "bar-invalid", "gsp-firmware-missing", "gsp-timeout", "driver-outside", "module-not-loaded", "module-missing",
    "version-mismatch", "driver-missing", "nvml-missing", "nodes-missing", "node-wrong", "gpu-too-old-or-new",
    "library-hidden", "driver-damaged", "nvidia-smi-missing", "gpus-fewer", "gpu-unbound",
)  # fmt: skip


def _versions(x: Examined) -> tuple[str, ...]:
    return tuple(dict.fromkeys(x.library_files.values()))


def _again(x: Examined) -> tuple[Remedy, ...]:
    """Return the command of words.driver_again: the package manager restores a package's files."""
    return () if x.host.driver_packaged else (INSTALL,)


def _mismatch(x: Examined) -> Finding | None:
    module, libraries = x.driver.kernel_version, x.driver.library_version
    if not module or not libraries or module == libraries:
        return None
    path = next((path for path, version in x.library_files.items() if version == libraries and "-ml." in path), _NVML)
    seen = [f"/proc/driver/nvidia/version: {module}", f"{path}: {libraries}"]
    changed = "a package manager changed the libraries under the loaded module" if x.package_change else ""
    return Finding(
        f"the loaded module is of version {module}, the libraries are of {libraries}"
        + (f": {changed}" if changed else ""),
        "\n".join([*seen, *x.package_change]),
        words.same_versions(x),
        # The kernel module belongs to the host of a system container: the libraries must follow it.
        remedies=(INSTALL,) if x.host.kernel.container else (),
    )


def _missing(x: Examined) -> Finding | None:
    if x.driver.library_version or x.library_files or x.host.kernel.wsl:
        return None
    return Finding(
        "no NVIDIA driver is installed", f"{_NVML} and {_CUDA} are in none of the loader's folders",
        words.driver_again(x), remedies=_again(x),
    )  # fmt: skip


def _nvml_missing(x: Examined) -> Finding | None:
    if x.driver.library_version or not x.library_files:
        return None
    path = next(iter(x.library_files))
    folder = path.rpartition("/")[0]
    return Finding(
        f"{_NVML}, which nvidia-smi and every container runtime need, is missing",
        f"ls -L {folder}/{_NVML}: No such file or directory\n{path} is there",
        words.driver_again(x),
        remedies=_again(x),
    )


def _not_in_cache(x: Examined) -> Finding | None:
    if not x.driver.library_version or x.host.kernel.wsl or _NVML in x.loader:
        return None
    seen = f"{CACHE}: no {_NVML}" if CACHE in x.there else f"ls {CACHE}: No such file or directory"
    return Finding(
        "the loader's cache does not have the driver's libraries; NVIDIA's toolkit and many programs look there alone",
        seen, "ldconfig", CERTAIN if CACHE not in x.there else LIKELY, (LOADER_CACHE,),
    )  # fmt: skip


def _other_in_cache(x: Examined) -> Finding | None:
    cuda = x.loader.get(_CUDA, "")
    if "/stubs/" not in cuda and "/compat/" not in cuda:
        return None
    kind = "a stub without a driver behind it" if "/stubs/" in cuda else "a compatibility library for other drivers"
    places = lines_that_match(_loader_configuration(x), r"/(stubs|compat)\b")
    step = f"{words.comment_out(places[0][0])}; ldconfig" if places else "unset LD_LIBRARY_PATH; ldconfig"
    seen = "\n".join([f"ldconfig -p: {_CUDA} => {cuda}", *(f"{place}: {line}" for place, line in places)])
    return Finding(f"programs get {kind} for {_CUDA} (CUDA errors 34, 35, 803, 804)", seen, step)


def _stub_configured(x: Examined) -> Finding | None:
    places = lines_that_match(_loader_configuration(x), r"^[^#]*/(stubs|compat)\b")
    if not places or "/stubs/" in x.loader.get(_CUDA, "") or "/compat/" in x.loader.get(_CUDA, ""):
        return None
    return Finding(
        "the loader is told of a folder with CUDA's stubs or compatibility libraries",
        "\n".join(f"{place}: {line}" for place, line in places),
        f"{words.comment_out(places[0][0])}; ldconfig",
        ASIDE,
    )


def _loader_configuration(x: Examined) -> dict[str, str]:
    return {path: text for path, text in x.texts.items() if path.startswith("/etc/ld.so.conf")}


def _mixed(x: Examined) -> Finding | None:
    if not x.host.driver_packaged or "/var/lib/nvidia/dirs" not in x.there or x.host.kernel.wsl:
        return None
    return Finding(
        "a driver from NVIDIA's installer and one from packages lie over each other",
        f"/var/lib/nvidia/dirs is there (the installer's)\npackage {x.host.driver_packaged} is installed",
        f"nvidia-uninstall --silent; {words.driver_again(x)}",
        LIKELY,
    )


def _several(x: Examined) -> Finding | None:
    versions = _versions(x)
    if len(versions) < 2 or x.host.hiding:
        return None
    wanted = x.driver.kernel_version or x.driver.library_version
    old = [path for path, version in x.library_files.items() if version != wanted]
    sure = ASIDE if x.driver.kernel_version == x.driver.library_version else LIKELY
    return Finding(
        f"libraries of several drivers lie here: {', '.join(versions)}",
        "\n".join(f"{path}: {version}" for path, version in x.library_files.items()),
        f"rm {shlex.join(old)}; ldconfig  # those that no package owns",
        sure,
    )


def _half_installed(x: Examined) -> Finding | None:
    if INCOMPLETE_MARK not in x.there:
        return None
    return Finding("the driver's installation was cut off", f"{INCOMPLETE_MARK} is there", words.gpuprov_install(x),
                   remedies=(INSTALL,))  # fmt: skip


def _no_smi(x: Examined) -> Finding | None:
    if not x.driver.library_version or x.smi.reason != "nvidia-smi is not installed" or x.host.kernel.wsl:
        return None
    names = ("nvidia-utils", "nvidia-smi")
    package = next((name for name in sorted(x.host.packages.installed) if name.startswith(names)), "")
    return Finding(
        "nvidia-smi is missing, though the driver's libraries are there", "command -v nvidia-smi: nothing",
        words.reinstall_packages(x, package) if package else words.driver_again(x),
        remedies=() if package else _again(x),
    )  # fmt: skip


def _holes(x: Examined) -> Finding | None:
    version = x.driver.library_version
    found = advisories.vulnerabilities(advisories.DRIVER, version)
    if found is None or x.host.kernel.wsl or x.host.hiding:
        return None
    unserved = generations.problems(x.host.gpu_device_ids, found.fixed_in, "auto")
    step = f"gpuprov install -e gpuprov_driver_version={found.fixed_in}"
    if distribution.installed_branch(x.host) is not None:
        # A distribution's branch gets only the distribution's updates: the fix is in another source.
        step = f"gpuprov uninstall; {step} -e gpuprov_driver=runfile"
    elif x.host.driver_packaged:
        branch = found.fixed_in.partition(".")[0]
        step = f"gpuprov install -e gpuprov_driver=packages -e gpuprov_driver_version={branch}"
    return Finding(
        f"{found}", f"{_NVML}: {version}; the advisories are of {advisories.updated()}",
        f"replace the GPU: {unserved[0].what}" if unserved else step, ASIDE,
    )  # fmt: skip


RULES = (
    Rule("driver-incomplete", DRIVER, "gpuprov's mark of an installation that was cut off", _half_installed),
    Rule("driver-missing", DRIVER, "neither libnvidia-ml nor libcuda in the loader's folders", _missing,
         ("driver-incomplete",)),
    Rule("nvml-missing", DRIVER, "libcuda is there and libnvidia-ml.so.1 is not, or leads nowhere", _nvml_missing,
         ("driver-incomplete",)),
    Rule("version-mismatch", DRIVER, "/proc/driver/nvidia/version and libnvidia-ml.so.VERSION differ", _mismatch,
         ("driver-incomplete", "library-hidden")),
    Rule("library-not-in-cache", DRIVER, "/etc/ld.so.cache is missing, or lacks libnvidia-ml.so.1", _not_in_cache),
    Rule("cuda-stub", DRIVER, "the loader's cache has libcuda.so.1 from a folder of stubs or compat", _other_in_cache),
    Rule("cuda-stub-configured", DRIVER, "/etc/ld.so.conf.d names a folder of stubs or compat", _stub_configured),
    Rule("drivers-mixed", DRIVER, "the installer's state, and a driver package", _mixed),
    Rule("drivers-several", DRIVER, "libnvidia-ml or libcuda of several versions", _several),
    Rule("nvidia-smi-missing", DRIVER, "the libraries are there, nvidia-smi is not", _no_smi,
         ("driver-missing", "nvml-missing", "driver-incomplete", "driver-damaged")),
    Rule("driver-old", DRIVER, "the driver has known security holes", _holes),
)  # fmt: skip
