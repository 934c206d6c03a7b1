"""Which installed versions a plan replaces, what that stops, and whether the host reboots. Pure."""

from collections.abc import Sequence

from gpuprov.boot.reboot import Reboot
from gpuprov.core.changes import Change
from gpuprov.driver import running_driver
from gpuprov.driver.packaged import ChangeDriver, driver_version
from gpuprov.driver_run import InstallDriver
from gpuprov.packages.interface import PackageInstallation, driver_set
from gpuprov.plan.context import PlanContext
from gpuprov.protocol.advisories import TOOLKIT_PACKAGE
from gpuprov.protocol.events import RebootNeed, Upgrade


def upgrades(context: PlanContext, changes: Sequence[Change]) -> tuple[Upgrade, ...]:
    """Return the replaced versions, without their way back, which only the host knows."""
    facts, found = context.facts, []
    names = (name.partition("=") for change in changes for name in getattr(change, "names", ()))
    versions = {name: version for name, _, version in names if version and name in facts.packages.installed}
    packaged = next((driver_version(versions[name]) for name in sorted(driver_set(versions))), "")
    wanted = next((one.version if isinstance(one, InstallDriver) else one.wanted for one in changes
                   if isinstance(one, (InstallDriver, ChangeDriver))), packaged)  # fmt: skip
    reboot = _reboot(context, changes) if wanted else "no"
    if wanted not in ("", facts.driver_installed_version) and facts.driver_installed_version:
        stops = _stops(context, changes, reboot)
        found.append(Upgrade("driver", facts.driver_installed_version, wanted, stops, reboot))
    if version := versions.get(TOOLKIT_PACKAGE):
        stops = _stops(context, changes, "no")
        found.append(Upgrade("toolkit", facts.packages.installed[TOOLKIT_PACKAGE], version, stops))
    return tuple(found)


def _reboot(context: PlanContext, changes: Sequence[Change]) -> RebootNeed:
    asked = next((one for one in changes if isinstance(one, Reboot)), None)
    replacement = running_driver.replacement(context.driver)
    if asked is not None or replacement.keep_loaded:
        return "yes" if asked is None or asked.allowed else "by-hand"
    return "if-in-use" if replacement.unloading is not None and replacement.unloading.boot_id else "no"


def _stops(context: PlanContext, changes: Sequence[Change], reboot: RebootNeed) -> tuple[str, ...]:
    """Return the containers and units that the changes, or the reboot, certainly stop."""
    docker, unloading = context.facts.docker, running_driver.replacement(context.driver).unloading
    packages = (one for one in changes if isinstance(one, PackageInstallation) and not isinstance(one, ChangeDriver))
    restarts = docker.restart_stops and any(one.disturbs for one in packages)
    every = docker.running_containers if reboot in ("yes", "by-hand") or restarts else ()
    own = () if unloading is None else (*unloading.containers, *unloading.units)
    return tuple(dict.fromkeys((*every, *own)))
