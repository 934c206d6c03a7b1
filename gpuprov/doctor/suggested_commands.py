"""Commands to suggest on a host, in its distribution's own tools. Pure."""

import re
import shlex

from gpuprov.doctor.snapshot import KEYS, HostSnapshot
from gpuprov.driver import distribution
from gpuprov.driver.precompiled import module_package
from gpuprov.driver.source import UNSIGNED
from gpuprov.engines.docker import restart_problem
from gpuprov.facts.boot import NODES, PERSISTENCE, REFRESH
from gpuprov.facts.interpreter import packages_of_pythons
from gpuprov.facts.kernels import BLACKLIST
from gpuprov.machine.distros import kernel_headers
from gpuprov.packages import known_repositories
from gpuprov.plan.migration import VARIABLE
from gpuprov.plan.preflight import LIST_GPUS
from gpuprov.protocol.models import generation_of, model_of
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH

# Ubuntu's packages that bring kernel modules of one kind.
_UBUNTUS = re.compile(r"(nvidia-(?:dkms|driver|headless)-\d+(?:-server)?)(?:-open)?")


def install_packages(x: HostSnapshot, *names: str) -> str:
    """Return the command that installs packages."""
    manager = x.host.package_manager
    return f"{manager.commands.install} {' '.join(map(manager.typed, names))}"


def reinstall_packages(x: HostSnapshot, *names: str) -> str:
    """Return the command that restores the files of installed packages."""
    there = x.host.packages
    # Without its version apt would replace a held package by a newer one, and refuses.
    words = (f"{name}={there.installed[name]}" if name in there.held else name for name in names)
    return f"{x.host.package_manager.commands.reinstall} {' '.join(words)}"


def headers_package(x: HostSnapshot) -> str:
    """Return the command that installs the running kernel's headers."""
    names = kernel_headers(x.host.distribution, x.host.kernel.release)
    return install_packages(x, *(names or (f"linux-headers-{x.host.kernel.release}",)))


def past_headers(x: HostSnapshot) -> str:
    """Return, as a comment, what to do if no repository has the running kernel's headers any more."""
    host = x.host
    said = known_repositories.advice(host.distribution, host.kernel.release, host.architecture, host.tables)
    return f"  # if no repository has them: {said.next_step}" if said else ""


def rebuild_initramfs(x: HostSnapshot) -> str:
    """Return the command that rebuilds the initramfs of all kernels."""
    return " ".join(x.host.distribution.initramfs) or "update-initramfs -u -k all"


def gpuprov_install(x: HostSnapshot) -> str:
    """Return the installation command that fixes gpuprov's own parts; it must know which driver to install."""
    version = x.driver.kernel_version or x.driver.library_version
    known = x.spec.driver_version or x.spec.driver != "runfile" or not version or x.host.driver_packaged
    return "gpuprov install" if known else f"gpuprov install -e gpuprov_driver_version={version}"


def is_gpuprovs(x: HostSnapshot) -> bool:
    """Say whether gpuprov set this host up, or NVIDIA's toolkit did not."""
    return LAUNCHER_PATH in x.there or has_unit(x, REFRESH) or "/usr/bin/nvidia-ctk" not in x.there


def has_unit(x: HostSnapshot, name: str) -> bool:
    """Say whether a unit of that name exists and can be started."""
    unit = x.units.get(name)
    return unit is not None and unit.load == "loaded"


def refresh_specification(x: HostSnapshot) -> str:
    """Return the command that rewrites the CDI specification."""
    # One that has failed would fail again: an installation names what prevents the file.
    if has_unit(x, REFRESH) and x.units[REFRESH].active != "failed":
        return f"systemctl start {REFRESH}"
    if is_gpuprovs(x):
        return gpuprov_install(x)
    return "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"


def edit_docker(x: HostSnapshot) -> str:
    """Return the command that opens docker's configuration file."""
    return f"${{EDITOR:-vi}} {shlex.quote(x.host.docker.config_path)}"


def restart_docker(x: HostSnapshot) -> str:
    """Return the command that restarts docker or, without systemd, the one that shows how it was started."""
    refused, name = restart_problem(x.host.docker.unit), x.host.docker.unit.word
    if refused and name == "docker":
        return refused.next_step
    unit = x.units.get("docker.service")
    if unit is None or unit.load != "not-found" or name != "docker":
        return f"systemctl restart {name}"
    return "ps -o args= -p $(cat /run/docker.pid)  # restart docker as it was started: systemd has no docker.service"


def start_docker(x: HostSnapshot) -> str:
    """Return the command that starts docker after failures."""
    return f"systemctl reset-failed docker; {restart_docker(x)}"


def make_nodes(x: HostSnapshot) -> str:
    """Return the command that makes missing device nodes, and their links in /dev/char."""
    if has_unit(x, NODES):
        return f"systemctl restart {NODES}"
    if "/usr/bin/nvidia-modprobe" in x.there:
        numbers = " ".join(f"-c {gpu.minor}" for gpu in x.driver.gpus)
        return f"nvidia-modprobe {numbers} -u -m"
    return gpuprov_install(x)


def comment_out(place: str) -> str:
    """Return the command that comments a line out, given as `file:line`."""
    path, _, line = place.rpartition(":")
    return f"sed -i '{line}s/^/#/' {shlex.quote(path)}"


def driver_again(x: HostSnapshot) -> str:
    """Return the command that restores the driver's files: from all its packages or the .run."""
    if x.host.driver_packaged:
        return reinstall_packages(x, *sorted(x.host.packages.driver))
    return gpuprov_install(x)


def smi_again(x: HostSnapshot) -> str:
    """Return the command that replaces another nvidia-smi with the driver's own."""
    if x.host.driver_packaged:
        return driver_again(x)
    return f"mv {shlex.join((x.smi_path, f'{x.smi_path}.old'))}; {driver_again(x)}"


def rebuild_module(x: HostSnapshot) -> str:
    """Return the command that builds or installs the module for the running kernel, of a preinstalled driver, too."""
    kernel = x.host.kernel.release
    if compiled := module_package(x.host.packages.installed, kernel):
        return f"{install_packages(x, compiled)}; modprobe nvidia"
    if "nvidia" in x.dkms:
        return f"{headers_package(x)}; dkms autoinstall -k {kernel}; modprobe nvidia"
    if x.host.driver_packaged:
        return f"{headers_package(x)}; {driver_again(x)}; modprobe nvidia"
    version = x.driver.kernel_version or x.driver.library_version
    again = f"gpuprov install -e gpuprov_driver=runfile -e gpuprov_driver_version={version}"
    return again if x.spec.driver == "preinstalled" else gpuprov_install(x)


def pass_iommu_through(x: HostSnapshot) -> str:
    """Return the commands that add iommu=pt to the kernel's command line, and reboot."""
    name = x.host.package_manager.name
    if name == "dnf":
        # Boot entries do not follow GRUB's file there.
        return "grubby --update-kernel=ALL --args=iommu=pt; systemctl reboot"
    make = "grub2-mkconfig -o /boot/grub2/grub.cfg" if name == "zypper" else "update-grub"
    return f"${{EDITOR:-vi}} /etc/default/grub; {make}; systemctl reboot  # GRUB_CMDLINE_LINUX: add iommu=pt"


def keep_nouveau_out(x: HostSnapshot) -> str:
    """Return the commands that prevent nouveau from using the GPUs from the next boot on."""
    if BLACKLIST in x.host.files:
        return f"{rebuild_initramfs(x)}; systemctl reboot"
    lines = "printf 'blacklist nouveau\\noptions nouveau modeset=0\\nblacklist nova_core\\nblacklist nova_drm\\n'"
    return f"{lines} > {BLACKLIST}; {rebuild_initramfs(x)}; systemctl reboot"


def list_gpus(x: HostSnapshot) -> str:
    """Return the command that lists NVIDIA's devices on the PCI bus; not every host has lspci."""
    return LIST_GPUS if x.programs.get("lspci") else "grep -l 0x10de /sys/bus/pci/devices/*/vendor"


def firmware_setup(x: HostSnapshot) -> str:
    """Return the command that reboots into the firmware's setup (only EFI can be told to), up to its comment."""
    if x.host.kernel.secure_boot == "no-efi":
        return "systemctl reboot  # and in the firmware's setup:"
    return "systemctl reboot --firmware-setup  #"


def module_options(x: HostSnapshot) -> str:
    """Return what to add to a step for models that an option of the proprietary module helps; "" for others."""
    known = (model_of(one, x.host.tables) for one in x.host.gpu_device_ids if x.module.license == "NVIDIA")
    options = dict.fromkeys(option for model in known if model for option in model.options)
    line = f"options {x.module.name} {' '.join(options)}"
    return f"; each time: '{line}' in /etc/modprobe.d, then a reboot" if options else ""


def same_versions(x: HostSnapshot) -> str:
    """Return the commands after which module and libraries have the same version."""
    if x.host.kernel.container:
        # The kernel and its module belong to the host: the libraries must follow.
        kind = "" if x.spec.driver == "runfile" else " -e gpuprov_driver=runfile"
        version = x.driver.kernel_version
        wanted = "" if x.spec.driver_version == version else f" -e gpuprov_driver_version={version}"
        remove = f"{x.host.driver_removal}; " if x.host.driver_packaged else ""
        return f"{remove}gpuprov install{kind}{wanted}"
    stop = f"systemctl stop {PERSISTENCE}; " if has_unit(x, PERSISTENCE) else ""
    again = f"{stop}modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia; modprobe nvidia"
    return f"systemctl reboot  # or, with nothing on the GPUs: {again}"


def open_modules(x: HostSnapshot) -> str:
    """Return the command that installs the open kernel modules."""
    return modules_of(x, "open")


def proprietary_modules(x: HostSnapshot) -> str:
    """Return the command that installs the proprietary kernel modules."""
    return modules_of(x, "proprietary")


def modules_of(x: HostSnapshot, kind: str) -> str:
    """Return the command that installs the kernel modules of this kind, open or proprietary."""
    if not x.host.driver_packaged:
        return f"{gpuprov_install(x)} -e gpuprov_kernel_module_type={kind}"
    own, end = distribution.installed_branch(x.host), "-open" if kind == "open" else ""
    names = tuple(f"{one[1]}{end}" for one in map(_UBUNTUS.fullmatch, sorted(x.host.packages.installed)) if one)
    return install_packages(x, *(names or (own and own.built.get(kind)) or ("nvidia-open" if end else "cuda-drivers",)))


def other_branch(x: HostSnapshot) -> str:
    """Return the command that installs the newest branch that serves all GPUs."""
    rows = (generation_of(gpu.device_id, x.host.tables) for gpu in x.host.gpus)
    return other_driver(x, str(min((row.newest for row in rows if row is not None and row.newest), default=580)))


def other_driver(x: HostSnapshot, version: str) -> str:
    """Return the command that installs a release, of a package the newest of its branch."""
    own, branch = distribution.available(x.host), version.partition(".")[0]
    if own is not None and distribution.installed_branch(x.host) is not None:
        if branch == version and distribution.asked_branch(own, branch):
            return f"gpuprov install -e gpuprov_driver=distribution -e gpuprov_driver_version={branch}"
        # A distribution's branch gets only the distribution's updates: the fix is in another source.
        return f"gpuprov uninstall; gpuprov install -e gpuprov_driver_version={version} -e gpuprov_driver=runfile"
    if x.host.driver_packaged:
        return f"gpuprov install -e gpuprov_driver=packages -e gpuprov_driver_version={branch}"
    return f"gpuprov install -e gpuprov_driver_version={version}"


def enrol(x: HostSnapshot) -> str:
    """Return the commands after which the kernel trusts the key of the driver's modules."""
    if key := next((path for path in KEYS if path in x.there), ""):
        return f"mokutil --import {key}; systemctl reboot  # and enrol the key at the console"
    # A key that the specification names is there, and perhaps enrolled: the module is to be signed with it.
    return gpuprov_install(x) if x.spec.module_signing_key else UNSIGNED.next_step


def report_failed_probe(x: HostSnapshot) -> str:
    """Return the command that records why the driver started no GPU."""
    version = x.module.version or x.driver.library_version
    released = f" of driver {version}" if version else ""
    return f"nvidia-bug-report.sh; systemctl reboot  # if it comes again, these lines{released} are what to search for"


def another_python(x: HostSnapshot) -> str:
    """Return the command that records a suitable Python, and first installs one if the host has none."""
    if x.host.interpreter.path:
        return gpuprov_install(x)
    names = packages_of_pythons(x.host.packages.installed)
    again = reinstall_packages(x, *names) if names else ""
    return f"{again or install_packages(x, x.host.distribution.pythons[0])}; {gpuprov_install(x)}"


def migrate(x: HostSnapshot) -> str:
    """Return the command that removes remains of nvidia-docker; the package manager's also removes daemon.json."""
    return f"{gpuprov_install(x)} -e {VARIABLE}=true"
