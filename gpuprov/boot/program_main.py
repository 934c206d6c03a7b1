"""The program that a host runs by itself, without a controller: at each boot, and when its driver or its GPUs change.

`nodes` makes device nodes and their links in /dev/char, before docker starts; `refresh` writes the CDI specifications
again if they are out of date; `serve` answers old scripts (boot/serve.py). It needs no network, and travels as one
file (prepare.py). The command nvidia-docker lies in the same file (engines/nvidia_docker_command.py).
"""

import contextlib
import sys

from gpuprov.cdi.discover import DriverFacts, ask_nvml, discover, load_driver, missing_nodes
from gpuprov.core.changes import parent_of, write_files
from gpuprov.core.lock import try_lock
from gpuprov.core.system import System
from gpuprov.machine.pci import gather_gpus, is_copy
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.device_nodes import link_nodes
from gpuprov.runtime_hook.driver_files import CONTAINER, disagreement, next_step

# Both are gone at each boot. The version in which files and module agreed last:
_AGREED = "/run/gpuprov/driver"
# What unattended-upgrades, kured and other tools look for, and `zypper needs-rebooting`; and the packages that ask.
_REBOOT_MARKS = ("/run/reboot-required", "/run/reboot-needed")
_REBOOT_PACKAGES = "/run/reboot-required.pkgs"
_REBOOT_TEXT = b"*** System restart required: the NVIDIA driver was upgraded (gpuprov) ***\n"
_REBOOT_NAME = "nvidia-driver"


def main() -> None:
    """Run the given subcommand; exit with 1 and a message if it fails."""
    actions = {"nodes": make_nodes, "refresh": refresh, "serve": serve}
    action = actions.get(sys.argv[1] if len(sys.argv) == 2 else "")
    if action is None:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(actions)}")
    try:
        print(action(System()))  # noqa: T201 (for the journal)
    except GpuprovError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"gpuprov: {error}")


def make_nodes(system: System) -> str:
    """Load the driver if nothing has yet; make the nodes and links that are missing; return what was done.

    Does nothing on a copy of an image that has never seen a GPU. Raises GpuprovError if GPUs have no driver.
    """
    if is_copy(system) and not gather_gpus(system):
        return "there is no NVIDIA GPU in this copy of the image: nothing to do"
    load_driver(system)
    driver = discover(system)
    if not driver.kernel_version:
        what = "the NVIDIA driver is not loaded, so there are no device nodes to make"
        raise GpuprovError(what, "there is no /proc/driver/nvidia/version", "modprobe nvidia; dmesg | grep -i nvrm")
    made = _make_missing(system, driver)
    return f"device nodes: {len(driver.nodes) + len(driver.capability_nodes)}, made now: {made}"


def _make_missing(system: System, driver: DriverFacts) -> int:
    missing = missing_nodes(driver)
    for node in missing:
        system.make_directory(parent_of(node.path))
        system.remove(node.path)
        # nvidia-modprobe and nvidia-persistenced make nodes too.
        with contextlib.suppress(FileExistsError):
            system.make_node(node.path, node.major, node.minor, node.mode, node.gid)
    link_nodes([{"path": str(system.path(node.path))} for node in (*driver.nodes, *driver.capability_nodes)])
    return len(missing)


def refresh(system: System) -> str:
    """Rewrite the CDI specifications that are out of date; return what was done.

    Raises GpuprovError, which marks the unit as failed, if the loaded module and the libraries differ in version.
    """
    # Imported here: making nodes, which docker waits for at boot, does not need it.
    from gpuprov.cdi.generate import PATH, difference, other_specifications, updated

    with try_lock(system) as ours:
        if not ours:
            return "a gpuprov run is going on: nothing is written meanwhile"
        driver = discover(system)
        if not driver.kernel_version or not driver.library_version:
            versions = f"loaded: {driver.kernel_version or 'none'}, libraries: {driver.library_version or 'none'}"
            return f"the driver is not whole ({versions}): the specification is left as it is"
        _require_one_version(system, driver)
        if _make_missing(system, driver):
            driver = discover(system)
        wanted = dict(other_specifications(system))
        found = system.read_bytes(PATH)
        reason = "it is missing" if found is None else difference(found, driver)
        # Only NVML knows the UUIDs of MIG devices.
        if reason or any(gpu.mig for gpu in driver.gpus):
            wanted[PATH] = updated(ask_nvml(system, driver), found or b"")
        changed = {path: content for path, content in wanted.items() if system.read_bytes(path) != content}
        write_files(system, ((path, content, 0o644) for path, content in changed.items()))
    if not changed:
        return "nothing has changed"
    return f"refreshed: {', '.join(sorted(changed))}" + (f" ({reason})" if reason else "")


def _require_one_version(system: System, driver: DriverFacts) -> None:
    module, container = driver.kernel_version, system.exists(CONTAINER)
    agreed = module == driver.library_version
    # If they differ since the boot, the next one would not help, and could follow this one every day.
    if not container and (agreed or system.read_text(_AGREED) == module):
        _mark_reboot(system, needed=not agreed)
    if not agreed:
        seen = "/proc/driver/nvidia/version and libnvidia-ml.so.1; the CDI specification is left as it is"
        raise GpuprovError(disagreement(driver.library_version, module), seen, next_step(module, container=container))
    if system.read_text(_AGREED) != module:
        system.make_directory(parent_of(_AGREED))
        system.write(_AGREED, module.encode())


def _mark_reboot(system: System, *, needed: bool) -> None:
    """Mark that the loaded driver needs a reboot, or take that mark back; those of others stay."""
    named = (system.read_text(_REBOOT_PACKAGES) or "").splitlines()
    if needed == (_REBOOT_NAME in named):
        return
    others = [name for name in named if name != _REBOOT_NAME]
    for path in _REBOOT_MARKS:
        if needed and not system.exists(path):
            system.write(path, _REBOOT_TEXT)
        elif not needed and not others and system.read_bytes(path) == _REBOOT_TEXT:
            system.remove(path)
    names = [*others, _REBOOT_NAME] if needed else others
    system.write(_REBOOT_PACKAGES, "".join(f"{name}\n" for name in names).encode())
    if not names:
        system.remove(_REBOOT_PACKAGES)


def serve(system: System) -> str:
    """Answer requests for GPU arguments and status; return why it ended."""
    from gpuprov.boot.serve import serve as run_server

    return run_server(system)
