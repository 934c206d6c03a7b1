"""Problems that prevent the requested driver, reported before anything is changed. Pure."""

from __future__ import annotations

from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.driver import generations, running_driver, supported_gpus
from gpuprov.driver.kernel import brings_modules
from gpuprov.driver_run import installs, needs_digest
from gpuprov.facts.host import HostFacts
from gpuprov.protocol import driver_releases
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.spec import HostSpec

# The largest .run has 460 MB and unpacks to 1.8 GB; what it installs has about 1 GB.
_ROOM = {CACHE_DIRECTORY: 2400 << 20, "/usr": 1200 << 20}


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what prevents the installation of the requested driver."""
    if spec.driver == "preinstalled":
        if facts.driver_installed_version:
            return ()
        return (
            Problem("no NVIDIA driver is installed", "libnvidia-ml.so.1 is missing", "set gpuprov_driver: runfile"),
        )
    if spec.driver != "runfile":
        return running_driver.problems(facts, spec)
    if not spec.driver_version:
        return (
            Problem(
                "which driver version to install is not said",
                "gpuprov_driver is runfile and gpuprov_driver_version is not set",
                "set gpuprov_driver_version in the inventory, or add -e gpuprov_driver_version=latest",
            ),
        )
    if spec.driver_version.isdigit():
        return (
            Problem(
                f"no release of branch {spec.driver_version} is known",
                f"known branches: {', '.join(driver_releases.branches())}",
                "set gpuprov_driver_version to one of these, or to a full version in quotes",
            ),
        )
    if facts.driver_packaged:
        return (
            Problem(
                "the driver on this host comes from packages; a .run over them would break both",
                f"package {facts.driver_packaged} is installed",
                "keep it: gpuprov_driver: preinstalled; or remove it first: "
                f"{facts.package_manager.commands.remove} '*nvidia*'",
            ),
        )
    unserved: tuple[Problem, ...] = ()
    if brings_modules(facts, spec):
        unserved = _unserved(facts, spec)
    if not installs(facts, spec):
        return unserved
    found = (*_digest_problems(facts, spec), *_room_problems(facts, spec), *running_driver.problems(facts, spec))
    return (*unserved, *found)


def _unserved(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return the GPUs that the driver does not serve: by its own list if its file is available, else by PCI ids.

    A GPU that the list does not know is judged by its PCI id.
    """
    ids, asked = facts.gpu_device_ids, spec.kernel_module_type
    unlisted = tuple(one for one in ids if one not in facts.served)
    listed = supported_gpus.problems(ids, facts.served, asked)
    return (*listed, *generations.problems(unlisted, spec.driver_version, asked))


def _digest_problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    if not needs_digest(facts, spec):
        return ()
    return (
        Problem(
            "the driver comes over http and its SHA-256 is not known, so the download could not be trusted",
            masked(spec.driver_url),
            "set gpuprov_driver_sha256 (sha256sum FILE, of a file that you trust), or use https",
        ),
    )


def _room_problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return the problems of disk space:

    NVIDIA's own file has a known size; another file is checked after its download.
    """
    if spec.driver_url:
        return ()
    return tuple(
        Problem(
            f"not enough room on the file system of {place} for the driver",
            f"{facts.free_bytes[place] // 2**20} MiB free, {needed // 2**20} MiB needed",
            f"make room: df -h {place}",
        )
        for place, needed in _ROOM.items()
        if facts.free_bytes.get(place, needed) < needed
    )
