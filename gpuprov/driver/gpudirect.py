"""GPUDirect: packages of the modules that DKMS builds against the driver. A unit of boot/etc builds and loads them.

Sources: NVIDIA's GPUDirect RDMA and GPUDirect Storage documentation, gdrcopy's README (names of packages and modules);
Azure/azhpc-images and NVIDIA's GPU operator (the order: RDMA stack, driver, these modules).
"""

from collections.abc import Mapping
from typing import Any

from gpuprov.core.changes import Change
from gpuprov.driver.source import DriverSource
from gpuprov.packages.interface import Installation
from gpuprov.protocol import tables
from gpuprov.protocol.spec import HostSpec


def unit_values(spec: HostSpec) -> Mapping[str, str]:
    """Return what the unit needs: the modules in the order in which they are loaded, and those that DKMS builds."""
    names = {name: " ".join(kind[name] for kind in _asked(spec) if kind.get(name)) for name in ("module", "dkms")}
    return {"gpudirect": names["module"], "dkms": names["dkms"]}


def packages(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages that are needed besides the driver."""
    family = "apt" if driver.facts.package_manager.name == "apt" else "rpm"
    return tuple(name for kind in _asked(driver.spec) for name in kind.get(family, ()))


def plan(driver: DriverSource) -> tuple[Change, ...]:
    """Return the installation of what is missing; to be done after the driver, for DKMS builds it at once."""
    facts, names = driver.facts, packages(driver)
    return facts.package_manager.plan_installation(facts.packages, Installation(names, facts.bundle)) if names else ()


def _asked(spec: HostSpec) -> list[dict[str, Any]]:
    return [kind for kind in tables.packaged("options")["gpudirect"] if kind["name"] in spec.gpudirect]
