"""What both drivers from packages share: NVIDIA's (cuda_repository.py), the distribution's (distribution.py). Pure."""

from gpuprov.core.changes import Change
from gpuprov.driver import running_driver
from gpuprov.driver.packaged import ChangeDriverPackages, ChangeDriverRpms, LoadDriver, driver_version, fits
from gpuprov.driver.source import DriverSource
from gpuprov.packages.apt import apt_options
from gpuprov.packages.apt_changes import RefreshPackageIndex
from gpuprov.packages.keys import plan_bundle_keys
from gpuprov.packages.rpm import RefreshRpmIndex, RpmManager
from gpuprov.packages.rpm_locks import lift
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.versions import version_numbers


class PackagedDriver(DriverSource):
    """A driver from packages on one host: NVIDIA's or the distribution's."""

    @property
    def key_package(self) -> str:
        """The package whose version is the driver's, "" if there is none."""
        return ""

    @property
    def branch(self) -> str:
        """The branch, or the version, in which an upgrade stays; "" for any."""
        return self.spec.driver_version

    def problems(self) -> tuple[Problem, ...]:
        return running_driver.problems(self)

    def run_file_problems(self) -> tuple[Problem, ...]:
        """Return why packages can't be installed over a driver from a .run."""
        version = self.facts.driver_installed_version
        what = f"driver {version} on this host comes from a .run; packages would break both"
        step = "remove it first: nvidia-uninstall; or keep it: gpuprov_driver: preinstalled"
        problem = Problem(what, "its libraries belong to no package", step)
        return (problem,) if version and not self.facts.driver_packaged else ()

    def plan(self) -> tuple[Change, ...]:
        """Return the loading of a driver whose packages were just installed, or are installed and not loaded."""
        # An image's modules are loaded when it boots.
        if not self.brings_modules or self.facts.image is not None:
            return ()
        there, loaded = self.facts.driver_installed_version, self.facts.driver_loaded_version
        return () if there and loaded else (LoadDriver(),)

    # -- a newer release -----------------------------------------------------------------------------------------------

    def offered(self, name: str) -> tuple[str, ...]:
        """Return the versions of a package in the bundle, or in the repositories if they were queried."""
        bundle, offers = self.facts.bundle, self.facts.offers
        if bundle is not None:
            return tuple(one.version for one in bundle.manifest.packages if one.name == name)
        return offers.found.get(name, ()) if offers is not None else ()

    def upgrade_questions(self) -> tuple[str, ...]:
        """Return the packages to query the repositories for if the user asks for an upgrade."""
        packages = self.facts.packages
        asked = self.facts.upgrade and self.key_package in packages.installed
        return tuple(sorted({*self.packages(), *packages.driver})) if asked else ()

    def plan_newer(self) -> tuple[Change, ...]:
        """Return the change to the newest release of the branch, if the user asks for it and there is one."""
        questions, facts = self.upgrade_questions(), self.facts
        found = [one for one in self.offered(self.key_package) if not self.branch or fits(one, self.branch)]
        newest = max(map(driver_version, found), key=version_numbers, default="")
        there = driver_version(facts.packages.installed.get(self.key_package, ""))
        fits_kernel = self.brings_modules or newest == facts.driver_loaded_version
        if not (questions and fits_kernel) or version_numbers(newest) <= version_numbers(there):
            return ()
        versions = {name: next((one for one in self.offered(name) if driver_version(one) == newest), "")
                    for name in (self.key_package, *questions)}  # fmt: skip
        # Compiled modules have the kernel's version: the newest of them that fit come along.
        own = {name: f"{name}={version}" if version else name for name, version in versions.items()
               if version or name in self.packages()}  # fmt: skip
        return self.change_to(newest, tuple(own if isinstance(facts.package_manager, RpmManager) else own.values()))

    def change_to(self, wanted: str, names: tuple[str, ...]) -> tuple[Change, ...]:
        """Return the change of the installed packages to this version or branch."""
        packages, manager = self.facts.packages, self.facts.package_manager
        bundle = self.facts.bundle
        if isinstance(manager, RpmManager):
            lifted, options = lift(packages.locks, packages.driver_held), manager.bundle_options if bundle else ()
            keys = plan_bundle_keys(bundle.vendor_keys if bundle else (), packages.trusted_keys)
            rpms = ChangeDriverRpms(manager, names, (), options, lift=lifted, wanted=wanted)
            return (*keys, RefreshRpmIndex(manager, options), rpms)
        options = apt_options(bundle)
        return (RefreshPackageIndex(options), ChangeDriverPackages(names, packages.driver_held, options, wanted=wanted))
