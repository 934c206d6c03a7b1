"""The driver's files: which driver capability needs which, and whether they are of the loaded module's version.

Source: the lists of libnvidia-container (utility, compute, video, graphics, ngx, compat32), and the file lists of
driver 550.163.01 as its .run and Debian's packages install them. Versions come from names of files and from the kernel;
nothing is written. Every command that finds files and module to differ says it by the same words.
"""

from __future__ import annotations

import posix
from typing import Any

from .errors import Refused
from .files import exists, read_text

# The program that makes links and the loader's cache in a container: it stands in the CDI specification.
HOOK_PATH = "/usr/bin/gpuprov-container-runtime-hook"
ALL = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
DEFAULT = ("compute", "utility")

_UTILITY = ("utility",)
_COMPUTE = ("compute",)
_VIDEO = ("video",)
_GRAPHICS = ("display", "graphics")
# File name up to `.so`, or a program's whole name. What stands nowhere is needed by all but `utility`: a library that
# a later driver brings is better mounted than missed.
_FILES = {
    "libnvidia-ml": _UTILITY, "libnvidia-cfg": _UTILITY, "nvidia-smi": _UTILITY, "nvidia-debugdump": _UTILITY,
    "nvidia-persistenced": _UTILITY, "libnvidia-nscq": _UTILITY,
    "libcuda": _COMPUTE, "libcudadebugger": _COMPUTE, "libnvidia-opencl": _COMPUTE, "libnvidia-gpucomp": (
        "compute", "display", "graphics"),
    "libnvidia-ptxjitcompiler": _COMPUTE, "libnvidia-nvvm": _COMPUTE, "libnvidia-nvvm70": _COMPUTE,
    "libnvidia-allocator": ("compute", "display", "graphics"), "libnvidia-compiler": _COMPUTE,
    "libnvidia-pkcs11": _COMPUTE, "libnvidia-pkcs11-openssl3": _COMPUTE, "libnvidia-fatbinaryloader": _COMPUTE,
    "libnvidia-sandboxutils": _UTILITY, "nvidia-cuda-mps-control": _COMPUTE, "nvidia-cuda-mps-server": _COMPUTE,
    "nvidia-mps": _COMPUTE,
    "libvdpau_nvidia": _VIDEO, "libnvidia-encode": _VIDEO, "libnvidia-opticalflow": _VIDEO, "libnvcuvid": _VIDEO,
    "libnvidia-eglcore": _GRAPHICS, "libnvidia-glcore": _GRAPHICS, "libnvidia-tls": _GRAPHICS,
    "libnvidia-glsi": _GRAPHICS, "libnvidia-fbc": _GRAPHICS, "libnvidia-ifr": _GRAPHICS, "libnvidia-rtcore": _GRAPHICS,
    "libnvoptix": _GRAPHICS, "libGLX_nvidia": _GRAPHICS, "libEGL_nvidia": _GRAPHICS, "libGLESv2_nvidia": _GRAPHICS,
    "libGLESv1_CM_nvidia": _GRAPHICS, "libnvidia-glvkspirv": _GRAPHICS, "libnvidia-cbl": _GRAPHICS,
    "libnvidia-egl-gbm": _GRAPHICS, "libnvidia-egl-wayland": _GRAPHICS, "libnvidia-egl-xcb": _GRAPHICS,
    "libnvidia-egl-xlib": _GRAPHICS, "libnvidia-gtk2": _GRAPHICS, "libnvidia-gtk3": _GRAPHICS,
    "libnvidia-vulkan-producer": _GRAPHICS, "libnvidia-wayland-client": _GRAPHICS, "libnvidia-api": _GRAPHICS,
    "nvidia_icd.json": _GRAPHICS, "nvidia_icd.x86_64.json": _GRAPHICS, "nvidia_icd.aarch64.json": _GRAPHICS,
    "nvidia_layers.json": _GRAPHICS,
    "09_nvidia_wayland2.json": _GRAPHICS, "10-nvidia.conf": _GRAPHICS, "nvidia-drm-outputclass.conf": _GRAPHICS,
    "libGLX_indirect": _GRAPHICS,
    "10_nvidia.json": _GRAPHICS, "10_nvidia_wayland.json": _GRAPHICS, "15_nvidia_gbm.json": _GRAPHICS,
    "20_nvidia_xcb.json": _GRAPHICS, "20_nvidia_xlib.json": _GRAPHICS, "nvoptix.bin": _GRAPHICS,
    "nvidia-drm_gbm": _GRAPHICS, "nvidia_drv": _GRAPHICS, "libglxserver_nvidia": _GRAPHICS, "nvidia.icd": _COMPUTE,
    "nvidia-imex": _COMPUTE, "nvidia-imex-ctl": _COMPUTE, "nvidia-xconfig": _GRAPHICS,
    "libnvidia-ngx": ("ngx",), "nvidia-ngx-updater": ("ngx",), "_nvngx.dll": ("ngx",), "nvngx.dll": ("ngx",),
}  # fmt: skip
_UNKNOWN = ("compute", "display", "graphics", "ngx", "video")
_MODULE = "/proc/driver/nvidia/version"
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


def require_current(path: str, version: str, mounts: list[dict[str, Any]]) -> None:
    """Raise Refused if no driver is loaded, or the specification at `path` is of another or names files that are gone.

    Only files that have the driver's version in their names are looked for.
    """
    if not version:
        return
    ending = f".so.{version}"
    named = [mount["hostPath"] for mount in mounts if mount["hostPath"].endswith(ending)]
    missing = next((path for path in named if not exists(path)), "")
    loaded = (read_text(_MODULE) or "").partition("\n")[0] + " "
    if missing or (loaded != " " and f" {version} " not in loaded):
        raise Refused(
            _reason(path, version, missing, (named or [""])[0], next(filter(_is_version, loaded.split()), ""))
        )
    if named and loaded == " ":  # nodes would be there and give nothing; WSL, without a module, has no such files
        raise Refused(f"the driver {version} is not loaded ({_MODULE} is missing): run `gpuprov doctor`")


def _reason(path: str, version: str, missing: str, library: str, module: str) -> str:
    files = _installed(missing or library, version) or ("" if missing else version)
    if not files:
        return f"{missing}, a file of the driver, is gone: run `gpuprov install`"
    if module and module != files:
        return f"{disagreement(files, module)}: {next_step(module, container=exists(CONTAINER))}"
    stale = f"{path} is of driver {version}, the driver is {files}"
    if files == version:
        stale = f"{path} names {missing or library}, which is gone"
    return f"{stale}: systemctl start gpuprov-refresh, or run `gpuprov install`"


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
