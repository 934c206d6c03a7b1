"""The driver's files: which driver capability needs which, and whether they are of the loaded module's version.

Source: the lists of libnvidia-container (utility, compute, video, graphics, ngx, compat32), and the file lists of
driver 550.163.01 as its .run and Debian's packages install them. Versions come from names of files and from the kernel;
nothing is written. Every command that finds files and module to differ says it by the same words.
"""

from __future__ import annotations

import posix
from typing import Any

from .errors import Refused
from .files import exists, read_text, status_of

# The program that makes links and the loader's cache in a container: it stands in the CDI specification.
HOOK_PATH = "/usr/bin/gpuprov-container-runtime-hook"
ALL = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
DEFAULT = ("compute", "utility")
# Folders that loaders search: Debian's, RHEL's and SUSE's, and those of 32-bit libraries.
MULTIARCH = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
LIB64 = "/usr/lib64"
FOLDERS_32_BIT = ("/usr/lib/i386-linux-gnu", "/usr/lib32")
# Where RHEL's and SUSE's images have them; it is more than that on other hosts.
RHEL_32_BIT = "/usr/lib"

# Capabilities, and what any of them needs: file names up to `.so`, or programs' whole names. What stands nowhere is
# needed by all but `utility`: a library that a later driver brings is better mounted than missed.
_NEEDED = (
    (("utility",), (
        "libnvidia-ml", "libnvidia-cfg", "nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "libnvidia-nscq",
        "libnvidia-sandboxutils",
    )),
    (("compute",), (
        "libcuda", "libcudadebugger", "libnvidia-opencl", "libnvidia-ptxjitcompiler", "libnvidia-nvvm",
        "libnvidia-nvvm70", "libnvidia-compiler", "libnvidia-pkcs11", "libnvidia-pkcs11-openssl3",
        "libnvidia-fatbinaryloader", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-mps", "nvidia.icd",
        "nvidia-imex", "nvidia-imex-ctl",
    )),
    (("compute", "display", "graphics"), ("libnvidia-gpucomp", "libnvidia-allocator")),
    (("video",), ("libvdpau_nvidia", "libnvidia-encode", "libnvidia-opticalflow", "libnvcuvid")),
    (("display", "graphics"), (
        "libnvidia-eglcore", "libnvidia-glcore", "libnvidia-tls", "libnvidia-glsi", "libnvidia-fbc", "libnvidia-ifr",
        "libnvidia-rtcore", "libnvoptix", "libGLX_nvidia", "libEGL_nvidia", "libGLESv2_nvidia", "libGLESv1_CM_nvidia",
        "libnvidia-glvkspirv", "libnvidia-cbl", "libnvidia-egl-gbm", "libnvidia-egl-wayland", "libnvidia-egl-xcb",
        "libnvidia-egl-xlib", "libnvidia-gtk2", "libnvidia-gtk3", "libnvidia-vulkan-producer",
        "libnvidia-wayland-client", "libnvidia-api", "nvidia_icd.json", "nvidia_icd.x86_64.json",
        "nvidia_icd.aarch64.json", "nvidia_layers.json", "09_nvidia_wayland2.json", "10-nvidia.conf",
        "nvidia-drm-outputclass.conf", "libGLX_indirect", "10_nvidia.json", "10_nvidia_wayland.json",
        "15_nvidia_gbm.json", "20_nvidia_xcb.json", "20_nvidia_xlib.json", "nvoptix.bin", "nvidia-drm_gbm",
        "nvidia_drv", "libglxserver_nvidia", "nvidia-xconfig",
    )),
    (("ngx",), ("libnvidia-ngx", "nvidia-ngx-updater", "_nvngx.dll", "nvngx.dll")),
)  # fmt: skip
_FILES = {name: capabilities for capabilities, names in _NEEDED for name in names}
_UNKNOWN = ("compute", "display", "graphics", "ngx", "video")
MODULE = "/proc/driver/nvidia/version"
_REFRESH = "systemctl start gpuprov-refresh, or run `gpuprov install`"
# systemd writes it in a system container: there is no module to change there.
CONTAINER = "/run/systemd/container"


def capabilities_of(path: str) -> tuple[str, ...]:
    """Return the driver capabilities, any of which needs the file at this path in a container."""
    name = path.rpartition("/")[2]
    if "/firmware/" in path or name == "socket":
        return ALL
    found = _FILES.get(name.partition(".so")[0], _UNKNOWN)
    # 32-bit libraries go by their folder and by the capability for them.
    return ("compat32",) if "/i386-linux-gnu/" in path or path.startswith("/usr/lib32/") else found


def node_is_needed(path: str, capabilities: frozenset[str]) -> bool:
    """Say whether a node is needed: unified memory is for compute, mode setting and rendering for a display."""
    if path.startswith("/dev/nvidia-uvm"):
        return "compute" in capabilities
    if path == "/dev/nvidia-modeset" or path.startswith("/dev/dri/"):
        return bool({"display", "graphics"} & capabilities)
    return True


def disagreement(files: str, module: str, since: str = "") -> str:
    """Return how files and module differ; `since` is what is known of the change, such as ` since apt upgraded …`."""
    return f"the driver's files are {files}{since}, the loaded module is {module}"


def next_step(module: str, *, container: bool) -> str:
    """Return after which step files and module have one version; a system container's module is its host's."""
    if container:
        return f"run `gpuprov install -e gpuprov_driver_version={module}`: the module belongs to the container host"
    return "reboot, or run `gpuprov install`"


def require_current(path: str, version: str, edits: dict[str, Any]) -> None:
    """Raise Refused if no driver is loaded, or the specification at `path` is of another or names files that are gone.

    Or if a device node has other numbers by now. Only files with the driver's version in their names are looked for.
    """
    if not version:
        return
    ending = f".so.{version}"
    named = [mount["hostPath"] for mount in edits.get("mounts") or () if mount["hostPath"].endswith(ending)]
    missing = next((path for path in named if not exists(path)), "")
    loaded = (read_text(MODULE) or "").partition("\n")[0] + " "
    if missing or (loaded != " " and f" {version} " not in loaded):
        module = next(filter(_is_version, loaded.split()), "")
        raise Refused(_reason(path, version, missing, (named or [""])[0], module))
    if named and loaded == " ":  # nodes would be there and give nothing; WSL, without a module, has no such files
        raise Refused(f"the driver {version} is not loaded ({MODULE} is missing): run `gpuprov doctor`")
    other = next(filter(_has_other_numbers, edits.get("deviceNodes") or ()), None)
    if other:
        raise Refused(f"{other['path']} has other device numbers than {path} says: {_REFRESH}")


def _has_other_numbers(node: dict[str, Any]) -> bool:
    """Say whether NVIDIA's node on the host is of another device: the kernel chooses some majors at each boot."""
    status = status_of(node.get("hostPath") or node["path"])
    if status is None:
        return False
    there, here = (node.get("major"), node.get("minor")), (posix.major(status.st_rdev), posix.minor(status.st_rdev))
    return node["path"].startswith("/dev/nvidia") and None not in there and here not in ((0, 0), there)


def _reason(path: str, version: str, missing: str, library: str, module: str) -> str:
    files = _installed(missing or library, version) or ("" if missing else version)
    if not files:
        return f"{missing}, a file of the driver, is gone: run `gpuprov install`"
    if module and module != files:
        return f"{disagreement(files, module)}: {next_step(module, container=exists(CONTAINER))}"
    stale = f"{path} is of driver {version}, the driver is {files}"
    if files == version:
        stale = f"{path} names {missing or library}, which is gone"
    return f"{stale}: {_REFRESH}"


def _installed(path: str, version: str) -> str:
    """Return the version of the library that has taken a library's place; the loader's link decides between several."""
    folder, _, name = path.rpartition("/")
    stem = name[: -len(version)]
    try:
        linked = posix.readlink(f"{folder}/{stem}1").rpartition("/")[2]
        names = [linked] if exists(f"{folder}/{linked}") else []
        names = names if _is_version(linked[len(stem) :]) else posix.listdir(folder)
    except (OSError, ValueError):
        return ""
    found = [one[len(stem) :] for one in names if one.startswith(stem) and _is_version(one[len(stem) :])]
    return max(found, key=lambda text: [int(part) for part in text.split(".")], default="")


def _is_version(text: str) -> bool:
    parts = text.split(".")
    return len(parts) > 1 and all(part.isdecimal() for part in parts)
