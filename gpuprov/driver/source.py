"""What a plan asks of the source of a host's driver, whichever that is; each answers in a class of its own. Pure.

The sources: a .run file (driver_run.py), NVIDIA's packages (cuda_repository.py), the distribution's (distribution.py),
and a driver that is there already. plan/context.py chooses.
"""

from functools import cached_property
from typing import ClassVar

from gpuprov.core.changes import Change, RemoveFile
from gpuprov.facts.host import PREFERENCES, HostFacts
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec

UNSIGNED = Problem(
    "Secure Boot is on: the kernel would refuse the driver's modules, which nobody has signed",
    "the EFI variable SecureBoot is 1",
    "openssl req -new -x509 -newkey rsa:2048 -nodes -subj /CN=modules -keyout /root/mok.key -outform DER "
    "-out /root/mok.der; mokutil --import /root/mok.der; systemctl reboot  # enrol it at the console, then gpuprov "
    "install -e gpuprov_module_signing_key=/root/mok.key -e gpuprov_module_signing_certificate=/root/mok.der; or "
    "switch Secure Boot off in the firmware",
)


@dataclass(frozen=True)
class DriverSource:
    """A source of the driver for one host. What a source does not answer itself is answered here: there is nothing."""

    facts: HostFacts
    spec: HostSpec

    # Whether its packages can't be installed without DKMS; whether its modules are built by its own installer.
    depends_on_dkms: ClassVar[bool] = False
    has_installer: ClassVar[bool] = False

    # -- kernel modules ----------------------------------------------------------------------------------------------

    @property
    def brings_modules(self) -> bool:
        """Whether this host needs kernel modules, built on it or not.

        The kernel of a system container belongs to the container host: only the libraries are installed.
        """
        if self.spec.kernel_modules == "auto":
            return not self.facts.kernel.container
        return self.spec.kernel_modules != "none"

    @property
    def installs_modules(self) -> bool:
        """Whether kernel modules come from this source."""
        return self.brings_modules

    @property
    def has_compiled_modules(self) -> bool:
        """Whether there are modules for the running kernel that need not be built."""
        return False

    @property
    def compiles(self) -> bool:
        """Whether kernel modules are built on this host."""
        # GPUDirect's are built against any driver, except nvidia-peermem, which comes with it.
        return (self.installs_modules and not self.has_compiled_modules) or bool({*self.spec.gpudirect} - {"rdma"})

    def signing_problems(self) -> tuple[Problem, ...]:
        """Return why a kernel that takes signed modules alone would refuse these (admin-guide/module-signing.rst)."""
        return (UNSIGNED,)

    @property
    def outside(self) -> str:
        """What runs the kernel of a host that gets libraries only."""
        return "the container host" if self.facts.kernel.container else "this kernel"

    def not_loaded_problem(self, driver: str) -> Problem:
        """Return the problem of a kernel outside that runs no driver."""
        what = f"the NVIDIA driver is not loaded {'on' if self.facts.kernel.container else 'in'} {self.outside}"
        seen = "there is no /proc/driver/nvidia/version"
        return Problem(what, seen, f"install {driver} on {self.outside} first, then run gpuprov again here")

    # -- versions ----------------------------------------------------------------------------------------------------

    @property
    def installs(self) -> bool:
        """Whether a .run file will be installed."""
        return False

    @property
    def is_installed(self) -> bool:
        """Whether the driver is installed; one from packages, which update it, counts in any version."""
        return bool(self.facts.driver_installed_version)

    @property
    def version(self) -> str:
        """The version that the driver will have, where it is known."""
        return self.facts.driver_installed_version

    @property
    def coming_version(self) -> str:
        """The release that this run installs, "" if none, or if only the repository knows it."""
        return ""

    @cached_property
    def replaces(self) -> bool:
        """Whether this run installs another driver on the disk, from a .run or as packages."""
        return self.installs or bool(self.plan_other_version())

    # -- packages ----------------------------------------------------------------------------------------------------

    def questions(self) -> tuple[str, ...]:
        """Return the packages, or patterns of them, to query the repositories for before a plan is made."""
        return ()

    def packages(self) -> tuple[str, ...]:
        """Return the driver's packages that the host needs, unless plan_other_version installs them."""
        return ()

    def pin_packages(self) -> tuple[str, ...]:
        """Return the packages that keep the driver at the requested branch or version."""
        return ()

    def fabric_package(self) -> str:
        """Return the package of the source's own fabric manager, "" if NVIDIA's is used."""
        return ""

    # -- the plan ----------------------------------------------------------------------------------------------------

    def problems(self) -> tuple[Problem, ...]:
        """Return what prevents this host from getting its driver from here."""
        return ()

    def note(self) -> str:
        """Return a sentence about the kernel modules, or ""."""
        if self.brings_modules:
            return ""
        if container := self.facts.kernel.container:
            return f"inside {container}: the kernel and its driver are the container host's; libraries only"
        return "kernel modules are left alone, as asked; libraries only"

    def plan_download(self) -> tuple[Change, ...]:
        """Return the download of a file; it comes before all else, so that a wrong URL or digest costs nothing."""
        return ()

    def plan_preparation(self) -> tuple[Change, ...]:
        """Return what must be done before packages are installed."""
        return (RemoveFile(PREFERENCES, "no longer asked for"),) if PREFERENCES in self.facts.files else ()

    def plan_other_version(self) -> tuple[Change, ...]:
        """Return the change of installed packages to the requested branch or version, if they are of another."""
        return ()

    def plan(self) -> tuple[Change, ...]:
        """Return the installation, or the loading of a driver whose packages are there."""
        return ()


class Preinstalled(DriverSource):
    """A driver that is there already: none of it is changed."""

    @property
    def installs_modules(self) -> bool:
        return False

    def note(self) -> str:
        return ""
