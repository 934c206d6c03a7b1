"""The runtime's configuration: NVIDIA's config.toml, its keys and their meaning, and a file of our own over it.

Both are read at every start of a container that may want GPUs: an edit takes effect at the next one. Which program does
the containers' work (runc, crun, or what the settings name) is kept for the launcher.
"""

from __future__ import annotations

import posix
import sys
from typing import Any

from . import driver_files
from .errors import refuse
from .files import make_folder, replace_file

SETTINGS_PATH = "/etc/gpuprov/container-runtime.toml"
NVIDIA_SETTINGS_PATH = "/etc/nvidia-container-runtime/config.toml"
LOW_LEVEL_CACHE = "/run/gpuprov/low-level"
# Where root's programs are; a caller's PATH decides nothing.
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# Where CRI-O's packages, k3s, RKE2 and MicroK8s have the low-level runtimes that they bring: on no host's usual PATH.
_OF_ENGINES = (
    "/usr/libexec/crio", "/var/lib/rancher/k3s/data/current/bin", "/var/lib/rancher/rke2/bin",
    "/snap/microk8s/current/bin",
)  # fmt: skip

_RUNTIME = "nvidia-container-runtime"
# NVIDIA's names, in any case of letters, and ours; it takes a name that it does not know for info.
_LOG_LEVELS = {
    "trace": "debug", "debug": "debug", "info": "info", "warning": "warning", "warn": "warning", "error": "error",
    "fatal": "error", "panic": "error",
}  # fmt: skip
# Modes of NVIDIA's: all but Tegra's give the same here, because ours honours every request in one way.
_MODES = ("auto", "cdi", "jit-cdi", "legacy")
# Key → (type, default). What NVIDIA's runtime has and ours has no use for is known, so that nobody's file is refused.
KEYS: dict[str, tuple[type, Any]] = {
    "disable-require": (bool, False),
    "swarm-resource": (str, ""),
    "accept-nvidia-visible-devices-envvar-when-unprivileged": (bool, True),
    "accept-nvidia-visible-devices-as-volume-mounts": (bool, False),
    "supported-driver-capabilities": (str, "all"),
    "nvidia-container-cli.no-cgroups": (bool, False),
    f"{_RUNTIME}.debug": (str, ""),
    f"{_RUNTIME}.log-level": (str, "info"),
    f"{_RUNTIME}.runtimes": (list, ["runc", "crun"]),
    f"{_RUNTIME}.mode": (str, "auto"),
    f"{_RUNTIME}.modes.cdi.spec-dirs": (list, ["/etc/cdi", "/var/run/cdi"]),
    f"{_RUNTIME}.modes.cdi.default-kind": (str, "nvidia.com/gpu"),
    f"{_RUNTIME}.modes.cdi.annotation-prefixes": (list, ["cdi.k8s.io/"]),
    f"{_RUNTIME}.modes.cdi.requestable-kinds": (list, []),
    f"{_RUNTIME}.modes.legacy.cuda-compat-mode": (str, "ldconfig"),
    "features.ignore-imex-channel-requests": (bool, False),
    "features.disable-cuda-compat-lib-hook": (bool, False),
    "features.no-additional-gids-for-device-nodes": (bool, False),
}
_WITHOUT_USE = (
    "nvidia-container-cli.", "nvidia-ctk.", "nvidia-container-runtime-hook.", "features.", f"{_RUNTIME}.modes.",
)  # fmt: skip


class Settings:
    """What the configuration says; `values` holds what differs from the defaults, by dotted key."""

    def __init__(self, values: dict[str, Any]) -> None:
        def value(key: str) -> Any:
            return values.get(key, KEYS[key][1])

        self.accept_envvar_when_unprivileged: bool = value("accept-nvidia-visible-devices-envvar-when-unprivileged")
        self.accept_volume_mounts: bool = value("accept-nvidia-visible-devices-as-volume-mounts")
        self.disable_require: bool = value("disable-require")
        supported = _items(value("supported-driver-capabilities"))
        self.supported_capabilities = driver_files.ALL if "all" in supported else tuple(sorted(set(supported)))
        self.swarm_resources = _items(value("swarm-resource"))
        self.no_cgroups: bool = value("nvidia-container-cli.no-cgroups")
        debug = value(f"{_RUNTIME}.debug")
        self.debug: str = "" if debug == "/dev/null" else debug
        self.log_level: str = _LOG_LEVELS.get(value(f"{_RUNTIME}.log-level").lower(), "info")
        self.runtimes = tuple(value(f"{_RUNTIME}.runtimes"))
        self.mode: str = value(f"{_RUNTIME}.mode")
        self.spec_dirs = tuple(value(f"{_RUNTIME}.modes.cdi.spec-dirs"))
        self.default_kind: str = value(f"{_RUNTIME}.modes.cdi.default-kind")
        self.requestable_kinds = tuple(value(f"{_RUNTIME}.modes.cdi.requestable-kinds"))
        self.annotation_prefixes = tuple(value(f"{_RUNTIME}.modes.cdi.annotation-prefixes"))
        compat = value(f"{_RUNTIME}.modes.legacy.cuda-compat-mode")
        self.cuda_compat: bool = compat != "disabled" and not value("features.disable-cuda-compat-lib-hook")
        self.ignore_imex: bool = value("features.ignore-imex-channel-requests")
        self.additional_gids: bool = not value("features.no-additional-gids-for-device-nodes")


def read_settings(own: str = SETTINGS_PATH, nvidia: str = NVIDIA_SETTINGS_PATH) -> tuple[Settings, str]:
    """Return the settings, and what is wrong with their files: that concerns none but GPU containers.

    Each key of our own file stands over NVIDIA's; neither file has to be there.
    """
    values: dict[str, Any] = {}
    try:
        values.update(_read(nvidia, strict=False))
        values.update(_read(own, strict=True))
        return Settings(values), ""
    except ValueError as error:
        return Settings({}), str(error)


def _read(path: str, *, strict: bool) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            from . import toml  # most hosts have neither file

            document = toml.parse(file.read())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {getattr(error, 'strerror', error)}") from None
    values = _flat(document, "")
    for key, value in values.items():
        fault = _fault(key, value, strict=strict)
        if fault:
            raise ValueError(f"{path}: {fault}")
    return {key: value for key, value in values.items() if key in KEYS}


def _flat(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values by dotted key; a table in a known key's place is its value, a wrong one."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and prefix + key not in KEYS:
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = value
    return found


def _fault(key: str, value: Any, *, strict: bool) -> str:
    """Return what is wrong with a value, nothing if it is right; NVIDIA's newer keys are none of our business."""
    if key not in KEYS:
        if any(known.startswith(f"{key}.") for known in KEYS):
            return f"{key} must be a table"
        known = not strict or key.startswith(_WITHOUT_USE)
        return "" if known else f"there is no key {key!r}; known are {', '.join(KEYS)}"
    kind = KEYS[key][0]
    if kind is list:
        right = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
        return "" if right and (value or not key.endswith("runtimes")) else f"{key} must be a list of texts"
    if not isinstance(value, kind):
        return f"{key} must be {'true or false' if kind is bool else 'text'}"
    if key == f"{_RUNTIME}.mode" and value not in _MODES:
        what = "is for Tegra, which is not supported" if value == "csv" else "is unknown"
        return f"mode {value!r} {what}: use one of {', '.join(_MODES)}"
    if key == f"{_RUNTIME}.log-level" and strict and str(value).lower() not in _LOG_LEVELS:
        return f"log-level {value!r} is unknown: use one of {', '.join(_LOG_LEVELS)}"
    if key == "supported-driver-capabilities":
        unknown = [one for one in _items(str(value)) if one != "all" and one not in driver_files.ALL]
        return f"there is no driver capability {unknown[0]!r}" if unknown else ""
    return ""


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def candidates(names: tuple[str, ...]) -> list[str]:
    """Return where low-level runtimes are looked for, those that an engine brings last; a name may be a path itself."""
    places = [(folder, name) for folders in (FOLDERS, _OF_ENGINES) for name in names for folder in folders]
    return list(dict.fromkeys(name if "/" in name else f"{folder}/{name}" for folder, name in places))


def find_low_level(names: tuple[str, ...]) -> str:
    """Return the path of the first low-level runtime that is there, nothing for none."""
    return next((path for path in candidates(names) if posix.access(path, posix.X_OK)), "")


def keep_low_level(log: str, cache: str = LOW_LEVEL_CACHE, own: str = SETTINGS_PATH) -> None:
    """Print which low-level runtime it is, and write it for a shell; end with a sentence if there is none.

    `log`: the file in which the engine looks for that sentence.
    """
    settings, _ = read_settings(own)
    path = find_low_level(settings.runtimes)
    if not path:
        what = f"gpuprov: none of the low-level runtimes {', '.join(settings.runtimes)} is installed"
        refuse(log, f"{what}: install one, or change runtimes in {SETTINGS_PATH}")
    try:
        make_folder(cache.rpartition("/")[0])
        quoted = path.replace("'", "'\\''")
        # A shell of root's reads it: nobody else may write it.
        replace_file(cache, f"low_level='{quoted}'\n", 0o644)
    except OSError:
        pass  # a full disk, or a rootless engine: then the next start looks for it again
    sys.stdout.write(f"{path}\n")
