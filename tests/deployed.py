"""The container runtime deployed below a folder of a test's own: same code, same launcher, other paths."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuprov.runtime_hook import deploy, driver_files
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from gpuprov.runtime_hook.record import FOLDER
from gpuprov.runtime_hook.settings import LOW_LEVEL_CACHE, NVIDIA_SETTINGS_PATH, SETTINGS_PATH
from tests.files import put

PYTHON = "/usr/bin/python3"
# What the kernel says of the driver of most tests, as recorded of a loaded one.
LOADED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025\n"
_PROGRAMS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"


def program(name: str) -> str:
    """Return the path of a program of root's."""
    return shutil.which(name, path=_PROGRAMS) or name


@dataclass(frozen=True)
class Deployed:
    """A deployed runtime: its folder, and the low-level runtime below it."""

    folder: Path
    low_level: str

    @property
    def runtime(self) -> Path:
        return self.folder / "gpuprov-container-runtime"

    @property
    def hook(self) -> Path:
        return self.folder / "gpuprov-container-runtime-hook"

    @property
    def settings(self) -> Path:
        return self.folder / "settings/own.toml"

    @property
    def module(self) -> Path:
        """What stands for the kernel's file on the driver that is loaded."""
        return self.folder / "module"

    @property
    def nvidia_settings(self) -> Path:
        return self.folder / "settings-nvidia/config.toml"

    @property
    def specifications(self) -> Path:
        return self.folder / "cdi"

    @property
    def specification(self) -> Path:
        return self.specifications / "nvidia.json"


def deploy_below(folder: Path, low_level: str = "runc", python: str = PYTHON) -> Deployed:
    """Lay the runtime and its hook below a folder; specifications and settings are looked for there too.

    The byte code is that of the Python that runs the tests.
    """
    made = Deployed(folder, program(low_level))
    for place in (made.specification, made.settings, made.nvidia_settings):
        place.parent.mkdir(parents=True, exist_ok=True)
    made.module.write_text(LOADED)
    paths = {
        SETTINGS_PATH: made.settings, NVIDIA_SETTINGS_PATH: made.nvidia_settings,
        LOW_LEVEL_CACHE: folder / "run/low-level", FOLDER: folder / "run/containers",
        SETTINGS_PATH.rpartition("/")[0]: made.settings.parent,
        NVIDIA_SETTINGS_PATH.rpartition("/")[0]: made.nvidia_settings.parent, "/etc/cdi": made.specifications,
        "/var/run/cdi": folder / "run-cdi", HOOK_PATH: made.hook,
        driver_files.MODULE: made.module,
    }  # fmt: skip

    def moved(text: str) -> str:
        for path, place in paths.items():
            text = text.replace(path, str(place))
        return text

    for path, mode, content in deploy.deployed_files(python):
        put(folder / "host" / path.lstrip("/"), moved(content.decode()), mode)
    library = folder / "host" / deploy.LIBRARY_PATH.lstrip("/")
    deploy.compile_bytecode(str(library / "runtime_hook"))
    launcher = deploy.render_launcher(python, str(library), (made.low_level,))
    made.runtime.write_text(moved(launcher))
    made.hook.write_text(deploy.render_hook(python, str(library)))
    for program_path in (made.runtime, made.hook):
        program_path.chmod(0o755)
    return made


def bundle_below(folder: Path, low_level: str = "runc", applets: tuple[str, ...] = ()) -> dict[str, Any]:
    """Make a bundle with busybox in its root, and return its config.json, without a terminal."""
    binaries = folder / "rootfs/bin"
    binaries.mkdir(parents=True)
    shutil.copy("/bin/busybox", binaries / "busybox")
    for name in ("sh", *applets):
        (binaries / name).symlink_to("busybox")
    subprocess.run((program(low_level), "spec"), cwd=folder, check=True)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["process"]["terminal"] = False
    config["root"]["readonly"] = False
    return config
