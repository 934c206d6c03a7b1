"""NVIDIA's DCGM 4 on a host: packages by the driver's CUDA major version, its unit, and the exporter's.

Source: docs.nvidia.com/datacenter/dcgm, Installation and Install DCGM Exporter: names of packages and units.
"""

import re
from typing import ClassVar

from gpuprov.core import units
from gpuprov.core.changes import Change
from gpuprov.driver.source import DriverSource
from gpuprov.facts.gpus import DCGM_EXPORTER, DCGM_UNIT
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec

# The first driver branch of each major version of CUDA, the newest first.
_CUDA_SINCE = ((580, 13), (525, 12), (0, 11))
# DCGM 3, whose files the packages of DCGM 4 have, too.
_OLD = ("datacenter-gpu-manager", "datacenter-gpu-manager-config")


def packages(version: str, spec: HostSpec) -> tuple[str, ...]:
    """Return DCGM's packages for a driver of this version or branch; none if DCGM is not asked for, or for ""."""
    branch = re.match(r"\d+", version)
    if not spec.dcgm or branch is None:
        return ()
    cuda = next(cuda for since, cuda in _CUDA_SINCE if int(branch[0]) >= since)
    parts = ("4-core", f"4-cuda{cuda}", "4-proprietary", f"4-proprietary-cuda{cuda}", "exporter")
    return tuple(f"datacenter-gpu-manager-{part}" for part in parts if part != "exporter" or spec.dcgm_exporter)


def wanted_packages(driver: DriverSource) -> tuple[str, ...]:
    """Return DCGM's packages for the driver that the host will have; none if its version is not known."""
    asked = driver.spec.driver_version if driver.spec.driver != "preinstalled" else ""
    return packages(asked or driver.coming_version or driver.facts.driver_installed_version, driver.spec)


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return what prevents DCGM 4, if it is asked for, from being installed."""
    facts = driver.facts
    old = [name for name in _OLD if name in facts.packages.installed]
    if not (driver.spec.dcgm and old):
        return ()
    remove = f"systemctl disable --now nvidia-dcgm; {facts.package_manager.commands.remove} {' '.join(old)}"
    what = "DCGM 3 is installed, beside which DCGM 4 does not install"
    return (Problem(what, f"{old[0]} {facts.packages.installed[old[0]]}", f"{remove}; gpuprov install"),)


def plan(driver: DriverSource) -> tuple[Change, ...]:
    """Return the start of DCGM's units, or nothing; to be done after the driver and MIG."""
    there, starts, spec = driver.facts.services, driver.facts.image is None, driver.spec
    running = {*there.enabled} & {*there.active} if starts else {*there.enabled}
    wanted = ((DCGM_UNIT, spec.dcgm), (DCGM_EXPORTER, spec.dcgm and spec.dcgm_exporter))
    lacking = tuple(unit for unit, asked in wanted if asked and unit not in running)
    return (RunDcgm(lacking, starts),) if lacking else ()


class RunDcgm(units.RunUnits):
    """Require that these units of DCGM run, now (unless `start` is False) and at each boot."""

    key: ClassVar[str] = "run DCGM"
