"""The driver's libraries on disk and what hides them, nvidia-smi's exit code and report, the fabric. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Callable

from gpuprov.cdi.files import CACHE
from gpuprov.checks.smi import EXITS, LOOK, Exit
from gpuprov.doctor.finding import (
    ANY_ROOT,
    CERTAIN,
    DRIVER,
    INSTALL,
    LIKELY,
    LOADER_CACHE,
    WARNING,
    Finding,
    Look,
    Remedy,
    Rule,
    Rules,
    remove,
)
from gpuprov.doctor.parse import lines_that_match, per_gpu
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.doctor.suggested_commands import (
    comment_out,
    driver_again,
    gpuprov_install,
    has_unit,
    install_packages,
    reinstall_packages,
    same_versions,
    smi_again,
)
from gpuprov.driver import distribution, fabric_manager, generations
from gpuprov.driver.way_back import INCOMPLETE_MARK
from gpuprov.facts.driver import PRELOAD
from gpuprov.facts.gpus import UNIT
from gpuprov.protocol import advisories
from gpuprov.protocol.words import counted
from gpuprov.runtime_hook.freshness import disagreement

RULES = Rules()

_NVML, _CUDA = "libnvidia-ml.so.1", "libcuda.so.1"
# If one of these matches, a CDI specification can't be right.
ROOTS = (
    "no-gpu", "wsl-without-gpu", "gpu-nouveau", "gpu-vfio", "fallen-off-bus", "init-failed", "power-cables",
    "bar-invalid", "gsp-firmware-missing", "gsp-timeout", "driver-outside", "module-not-loaded", "module-missing",
    "version-mismatch", "driver-missing", "nvml-missing", "nodes-missing", "node-wrong", "gpu-too-old-or-new",
    "library-hidden", "driver-damaged", "nvidia-smi-missing", "gpus-fewer", "gpu-unbound",
)  # fmt: skip


def _again(x: HostSnapshot) -> tuple[Remedy, ...]:
    """Return the command of driver_again: the package manager restores a package's files."""
    return () if x.host.driver_packaged else (INSTALL,)


@RULES.add("driver-incomplete", DRIVER, "gpuprov's mark of an installation that was cut off")
def _driver_incomplete(x: HostSnapshot) -> Finding | None:
    if INCOMPLETE_MARK not in x.there:
        return None
    return Finding("the driver's installation was cut off", f"{INCOMPLETE_MARK} is there", gpuprov_install(x),
                   remedies=(INSTALL,))  # fmt: skip


@RULES.add("driver-missing", DRIVER, "neither libnvidia-ml nor libcuda in the loader's folders", ("driver-incomplete",))
def _driver_missing(x: HostSnapshot) -> Finding | None:
    if x.driver.library_version or x.library_files or x.host.kernel.wsl:
        return None
    return Finding(
        "no NVIDIA driver is installed", f"{_NVML} and {_CUDA} are in none of the loader's folders",
        driver_again(x), remedies=_again(x),
    )  # fmt: skip


@RULES.add(
    "nvml-missing", DRIVER, "libcuda is there and libnvidia-ml.so.1 is not, or leads nowhere", ("driver-incomplete",)
)
def _nvml_missing(x: HostSnapshot) -> Finding | None:
    if x.driver.library_version or not x.library_files:
        return None
    path = next(iter(x.library_files))
    folder = path.rpartition("/")[0]
    return Finding(
        f"{_NVML}, which nvidia-smi and every container runtime need, is missing",
        f"ls -L {folder}/{_NVML}: No such file or directory\n{path} is there",
        driver_again(x),
        remedies=_again(x),
    )


@RULES.add(
    "version-mismatch",
    DRIVER,
    "/proc/driver/nvidia/version and libnvidia-ml.so.VERSION differ",
    ("driver-incomplete", "library-hidden"),
)
def _version_mismatch(x: HostSnapshot) -> Finding | None:
    module, libraries = x.driver.kernel_version, x.driver.library_version
    if not module or not libraries or module == libraries:
        return None
    path = next((path for path, version in x.library_files.items() if version == libraries and "-ml." in path), _NVML)
    seen = [f"/proc/driver/nvidia/version: {module}", f"{path}: {libraries}"]
    return Finding(
        disagreement(libraries, module, x.driver_since),
        "\n".join([*seen, *x.package_change]),
        same_versions(x),
        # The kernel module belongs to the host of a system container: the libraries must follow it.
        remedies=(INSTALL,) if x.host.kernel.container else (),
    )


@RULES.add("library-not-in-cache", DRIVER, "/etc/ld.so.cache is missing, or lacks libnvidia-ml.so.1")
def _library_not_in_cache(x: HostSnapshot) -> Finding | None:
    if not x.driver.library_version or x.host.kernel.wsl or _NVML in x.loader:
        return None
    seen = f"{CACHE}: no {_NVML}" if CACHE in x.there else f"ls {CACHE}: No such file or directory"
    return Finding(
        "the loader's cache does not have the driver's libraries; NVIDIA's toolkit and many programs look there alone",
        seen, "ldconfig", CERTAIN if CACHE not in x.there else LIKELY, (LOADER_CACHE,),
    )  # fmt: skip


@RULES.add("cuda-stub", DRIVER, "the loader's cache has libcuda.so.1 from a folder of stubs or compat")
def _cuda_stub(x: HostSnapshot) -> Finding | None:
    cuda = x.loader.get(_CUDA, "")
    if "/stubs/" not in cuda and "/compat/" not in cuda:
        return None
    kind = "a stub without a driver behind it" if "/stubs/" in cuda else "a compatibility library for other drivers"
    places = lines_that_match(_loader_configuration(x), r"/(stubs|compat)\b")
    step = f"{comment_out(places[0][0])}; ldconfig" if places else "unset LD_LIBRARY_PATH; ldconfig"
    seen = "\n".join([f"ldconfig -p: {_CUDA} => {cuda}", *(f"{place}: {line}" for place, line in places)])
    return Finding(f"programs get {kind} for {_CUDA} (CUDA errors 34, 35, 803, 804)", seen, step)


def _loader_configuration(x: HostSnapshot) -> dict[str, str]:
    return {path: text for path, text in x.texts.items() if path.startswith("/etc/ld.so.conf")}


@RULES.add("cuda-stub-configured", DRIVER, "/etc/ld.so.conf.d names a folder of stubs or compat")
def _cuda_stub_configured(x: HostSnapshot) -> Finding | None:
    places = lines_that_match(_loader_configuration(x), r"^[^#]*/(stubs|compat)\b")
    if not places or "/stubs/" in x.loader.get(_CUDA, "") or "/compat/" in x.loader.get(_CUDA, ""):
        return None
    return Finding(
        "the loader is told of a folder with CUDA's stubs or compatibility libraries",
        "\n".join(f"{place}: {line}" for place, line in places),
        f"{comment_out(places[0][0])}; ldconfig",
        WARNING,
    )


@RULES.add("drivers-mixed", DRIVER, "the installer's state, and a driver package")
def _drivers_mixed(x: HostSnapshot) -> Finding | None:
    if not x.host.driver_packaged or "/var/lib/nvidia/dirs" not in x.there or x.host.kernel.wsl:
        return None
    return Finding(
        "a driver from NVIDIA's installer and one from packages lie over each other",
        f"/var/lib/nvidia/dirs is there (the installer's)\npackage {x.host.driver_packaged} is installed",
        f"nvidia-uninstall --silent; {driver_again(x)}",
        LIKELY,
    )


@RULES.add("drivers-several", DRIVER, "libnvidia-ml or libcuda of several versions")
def _drivers_several(x: HostSnapshot) -> Finding | None:
    versions = tuple(dict.fromkeys(x.library_files.values()))
    if len(versions) < 2 or x.host.hiding:
        return None
    wanted = x.driver.kernel_version or x.driver.library_version
    old = [path for path, version in x.library_files.items() if version != wanted]
    sure = WARNING if x.driver.kernel_version == x.driver.library_version else LIKELY
    return Finding(
        f"libraries of several drivers lie here: {', '.join(versions)}",
        "\n".join(f"{path}: {version}" for path, version in x.library_files.items()),
        f"rm {shlex.join(old)}; ldconfig  # those that no package owns",
        sure,
    )


@RULES.add(
    "nvidia-smi-missing",
    DRIVER,
    "the libraries are there, nvidia-smi is not",
    ("driver-missing", "nvml-missing", "driver-incomplete", "driver-damaged"),
)
def _nvidia_smi_missing(x: HostSnapshot) -> Finding | None:
    if not x.driver.library_version or x.smi.reason != "nvidia-smi is not installed" or x.host.kernel.wsl:
        return None
    names = ("nvidia-utils", "nvidia-smi")
    package = next((name for name in sorted(x.host.packages.installed) if name.startswith(names)), "")
    return Finding(
        "nvidia-smi is missing, though the driver's libraries are there", "command -v nvidia-smi: nothing",
        reinstall_packages(x, package) if package else driver_again(x),
        remedies=() if package else _again(x),
    )  # fmt: skip


@RULES.add("driver-old", DRIVER, "the driver has known security holes")
def _driver_old(x: HostSnapshot) -> Finding | None:
    version = x.driver.library_version
    found = advisories.vulnerabilities(advisories.DRIVER, version)
    if found is None or x.host.kernel.wsl or x.host.hiding:
        return None
    unserved = generations.problems(x.host.gpu_device_ids, found.fixed_in, "auto")
    step = f"gpuprov install -e gpuprov_driver_version={found.fixed_in}"
    if distribution.installed_branch(x.host) is not None:
        # A distribution's branch gets only the distribution's updates: the fix is in another source.
        step = f"gpuprov uninstall; {step} -e gpuprov_driver=runfile"
    elif x.host.driver_packaged:
        branch = found.fixed_in.partition(".")[0]
        step = f"gpuprov install -e gpuprov_driver=packages -e gpuprov_driver_version={branch}"
    return Finding(
        f"{found}", f"{_NVML}: {version}; the advisories are of {advisories.updated()}",
        f"replace the GPU: {unserved[0].what}" if unserved else step, WARNING,
    )  # fmt: skip


_NO_SMI = "/nvidia-smi:"


@RULES.add(
    "library-hidden",
    DRIVER,
    "the loader takes libnvidia-ml.so.1 or libcuda.so.1 of another version: by a file in "
    "/usr/local/lib or any folder of /etc/ld.so.conf.d, by /etc/ld.so.preload, by /etc/environment",
)
def _library_hidden(x: HostSnapshot) -> Finding | None:
    if not x.host.hiding or x.host.kernel.wsl:
        return None
    one = x.host.hiding[0]
    commands = x.host.package_manager.commands
    seen = [
        f"{other.reason}: {', '.join(other.paths)}" + (f"; {other.foreign}" if other.foreign else "")
        for other in x.host.hiding
    ]
    sure = LIKELY if one.is_by_environment or not (one.version or one.fault) else CERTAIN
    steps = dict.fromkeys(other.way_out(commands) for other in x.host.hiding)
    return Finding(
        f"the loader takes another library than the driver's: {one.what}",
        "\n".join(seen),
        _together(list(steps)),
        sure,
        _removal(x),
    )


def _removal(x: HostSnapshot) -> tuple[Remedy, ...]:
    """Return the removal of the files, if nothing else is to be done."""
    ours = (one for one in x.host.hiding if not (one.package or one.is_configured or one.foreign))
    files = [one.removable for one in ours if one.removable]
    whole = len(files) == len(x.host.hiding)
    return (remove(*(path for paths in files for path in paths)), LOADER_CACHE) if whole else ()


def _together(steps: list[str]) -> str:
    """Return the commands as one line: one rm for several files, and one ldconfig at the end."""
    files = [step[len("rm ") : -len("; ldconfig")] for step in steps if step.startswith("rm ")]
    others = [step for step in steps if not step.startswith("rm ")]
    removal = [f"rm {' '.join(files)}; ldconfig"] if files else []
    # A comment ends the line.
    return "; ".join(sorted((*others, *removal), key=lambda step: "  # " in step))


@RULES.add("preload-broken", DRIVER, "the loader says of /etc/ld.so.preload: cannot be preloaded")
def _preload_broken(x: HostSnapshot) -> Finding | None:
    named = re.findall(r"object '([^']+)' from /etc/ld\.so\.preload", x.preload_said)
    if not named:
        return None
    return Finding(
        f"the loader can't load {named[0]}, which {PRELOAD} names: every program complains, and docker starts no "
        "container whose shim does",
        f"/bin/true: {x.preload_said.splitlines()[0]}",
        "; ".join(f"sed -i {shlex.quote(f's|{path}||')} {PRELOAD}" for path in dict.fromkeys(named)),
    )


@RULES.add(
    "driver-damaged",
    DRIVER,
    "libnvidia-ml or libcuda of the driver's version is missing, or its file is not whole",
    ("driver-incomplete", "library-hidden"),
)
def _driver_damaged(x: HostSnapshot) -> Finding | None:
    damage = x.host.driver_damage
    if not damage or _NO_SMI in damage or x.host.kernel.wsl:
        return None
    version = x.driver.library_version
    packages = [name for name, one in x.host.packages.installed.items() if version in one and "dkms" not in name]
    again = reinstall_packages(x, *sorted(packages)) if packages else driver_again(x)
    ours = not (packages or x.host.driver_packaged)
    return Finding("a file of the driver is missing or broken", damage, again, remedies=(INSTALL,) if ours else ())


@RULES.add("nvidia-smi-hidden", DRIVER, "PATH has another nvidia-smi before the driver's")
def _nvidia_smi_hidden(x: HostSnapshot) -> Finding | None:
    other = x.other_smi
    if other is None:
        return None
    what = f"{other.path} hides the driver's own nvidia-smi, {x.smi_path}"
    step = f"mv {shlex.join((other.path, f'{other.path}.old'))}"
    if other.smi.is_report or not x.smi.is_report:
        return Finding(what, f"command -v nvidia-smi: {other.path}", step, WARNING)
    seen = f"{other.path} -q -x exited {other.smi.returncode}: {other.smi.first_line}"
    return Finding(f"{what}, and does not do its work", seen, step, CERTAIN)


@RULES.add("nvidia-smi-replaced", DRIVER, "nvidia-smi -q -x prints something else than a report")
def _nvidia_smi_replaced(x: HostSnapshot) -> Finding | None:
    if x.smi.reason or x.smi.is_report or (x.smi.returncode and not x.smi_is_script):
        return None
    kind = "is a script, not the driver's program, and" if x.smi_is_script else "is not the driver's program: it"
    return Finding(
        f"{x.smi_path} {kind} prints something else than its report",
        f"{x.smi_path} -q -x exited {x.smi.returncode}: {x.smi.first_line}",
        smi_again(x),
    )


# nvidia-smi's exit codes whose remedy depends on the host.
_STEPS: dict[int, Callable[[HostSnapshot], str]] = {3: smi_again, 13: smi_again, 18: same_versions}


def _exit_rule(code: int, one: Exit) -> Rule:
    def look(x: HostSnapshot) -> Finding | None:
        if x.smi.reason or x.smi.code != code:
            return None
        return Finding(one.what, _exited(x), one.next_step or _STEPS[code](x))

    return Rule(f"nvidia-smi-{code}", DRIVER, f"nvidia-smi exits {code}", look, ANY_ROOT)


def _exited(x: HostSnapshot) -> str:
    return f"nvidia-smi exited {x.smi.returncode}: {x.smi.first_line}"


RULES += (_exit_rule(code, one) for code, one in EXITS.items())


@RULES.add("nvidia-smi-fails", DRIVER, "nvidia-smi exits with any other code", ANY_ROOT)
def _nvidia_smi_fails(x: HostSnapshot) -> Finding | None:
    if x.smi.reason or x.smi.code == 0 or x.smi.code in EXITS:
        return None
    return Finding("nvidia-smi fails", _exited(x), LOOK)


@RULES.add("nvidia-smi-fewer", DRIVER, "nvidia-smi shows fewer GPUs than the driver has", ANY_ROOT)
def _nvidia_smi_fewer(x: HostSnapshot) -> Finding | None:
    shown, known = x.smi.text.count("<gpu id="), len(x.driver.gpus)
    if x.smi.reason or x.smi.returncode or shown >= known:
        return None
    return Finding(
        f"nvidia-smi shows {shown} of the driver's {counted(known, 'GPU')}",
        f"nvidia-smi -q -x: {counted(shown, 'GPU')}; /proc/driver/nvidia/gpus: {known}",
        "nvidia-smi -L; dmesg | grep -i -e nvrm -e xid",
        LIKELY,
    )


def _of_gpus(place: str, value: str, what: str, step: str, sure: str = CERTAIN) -> Look:
    """Return a rule function for one value that nvidia-smi -q -x shows of each GPU. `{gpu}`: the first one's number."""

    def look(x: HostSnapshot) -> Finding | None:
        numbers = [number for number, gpu in enumerate(per_gpu(x.smi.text)) if re.search(value, gpu.get(place, ""))]
        if not numbers:
            return None
        shown = ", ".join(map(str, numbers))
        seen = f"nvidia-smi -q -x: {place.rpartition('/')[2]} of GPU {shown} matches {value}"
        return Finding(f"GPU {shown}: {what}", seen, step.format(gpu=numbers[0]), sure)

    return look


# Rule, what its sign names, then what _of_gpus takes.
_VALUES: tuple[tuple[str, str, str, str, str, str, str], ...] = (
    ("compute-prohibited", "compute_mode is Prohibited", "compute_mode", "^Prohibited",
     "its compute mode lets no program use it", "nvidia-smi -i {gpu} -c DEFAULT", CERTAIN),
    ("compute-exclusive", "compute_mode is Exclusive_Process", "compute_mode", "^Exclusive",
     "its compute mode lets one program use it at a time (CUDA error 46)", "nvidia-smi -i {gpu} -c DEFAULT", WARNING),
    ("row-remap-failed", "remapped_row_failure is Yes", "remapped_rows/remapped_row_failure", "^Yes",
     "broken memory rows could not be replaced", "nvidia-bug-report.sh  # replace the GPU (RMA)", LIKELY),
    ("row-remap-pending", "remapped_row_pending is Yes", "remapped_rows/remapped_row_pending", "^Yes",
     "broken memory rows wait for a reset to be replaced", "nvidia-smi -i {gpu} --gpu-reset", WARNING),
)  # fmt: skip
RULES += (Rule(name, DRIVER, f"nvidia-smi: {sign}", _of_gpus(*row)) for name, sign, *row in _VALUES)


@RULES.add("mig-without-instances", DRIVER, "MIG is enabled and there are no instances")
def _mig_without_instances(x: HostSnapshot) -> Finding | None:
    gpus = per_gpu(x.smi.text)
    numbers = [
        number
        for number, gpu in enumerate(gpus)
        if gpu.get("mig_mode/current_mig") == "Enabled" and not gpu.get("mig_devices", "None").replace("None", "")
    ]
    if not numbers:
        return None
    number = numbers[0]
    return Finding(
        f"GPU {', '.join(map(str, numbers))}: MIG is enabled and has no instances, so there is nothing to compute on",
        "nvidia-smi -q -x: current_mig is Enabled, mig_devices is None",
        f"nvidia-smi -i {number} -mig 0  # or divide it: nvidia-smi mig -i {number} -lgip; "
        f"nvidia-smi mig -i {number} -cgi PROFILE -C",
    )


@RULES.add(
    "fabric-state",
    DRIVER,
    "nvidia-smi: the fabric's state is In Progress or Not Started",
    ("fabric-manager-missing", "fabric-manager-version"),
)
def _fabric_state(x: HostSnapshot) -> Finding | None:
    finding = _of_gpus("fabric/state", "In Progress|Not Started", "it is not in the NVLink fabric (CUDA error 802)",
                       f"systemctl restart {UNIT}; nvidia-smi -q -i {{gpu}} | grep -A4 Fabric", LIKELY)(x)  # fmt: skip
    if finding is None or has_unit(x, UNIT):
        return finding
    elsewhere = "nvidia-smi -q | grep -A4 Fabric  # the fabric manager runs outside: on the container host, or the VM's"
    return replace(finding, next_step=elsewhere)


@RULES.add(
    "fabric-manager-missing", DRIVER, "NVSwitches, and nvidia-fabricmanager does not run", ("fabric-manager-version",)
)
def _fabric_manager_missing(x: HostSnapshot) -> Finding | None:
    unit = x.units.get(UNIT)
    version = _fabric_wanted(x)
    if not version or (unit is not None and unit.active == "active"):
        return None
    if unit is None or unit.load != "loaded":
        return Finding(
            "this machine has NVSwitches, and no fabric manager: CUDA ends with error 802",
            f"NVSwitches: {', '.join(x.host.fabric.switches)}\nsystemctl show {UNIT}: not-found",
            f"{install_packages(x, *_fabric_packages(x, version))}; systemctl enable --now nvidia-fabricmanager",
        )
    return Finding(
        "the fabric manager does not run: CUDA ends with error 802",
        f"systemctl show {UNIT}: {unit.active}, {unit.result}",
        "systemctl enable --now nvidia-fabricmanager; journalctl -u nvidia-fabricmanager -n 50",
    )


def _fabric_wanted(x: HostSnapshot) -> str:
    """Return the version that the fabric manager must have (the loaded driver's), "" if none has to run."""
    if not x.host.fabric.switches or x.host.kernel.container:
        return ""
    return x.driver.kernel_version or x.driver.library_version


def _fabric_packages(x: HostSnapshot, version: str) -> tuple[str, ...]:
    manager = x.host.package_manager
    return tuple(manager.typed(name) for name in fabric_manager.packages(version, manager, x.host.fabric))


@RULES.add("fabric-manager-version", DRIVER, "nvidia-fabricmanager is not of the driver's version")
def _fabric_manager_version(x: HostSnapshot) -> Finding | None:
    wanted, found = _fabric_wanted(x), x.host.fabric.version
    if not wanted or not found or wanted == found:
        return None
    return Finding(
        f"the fabric manager is of version {found}, the driver of {wanted}: they must be the same, to the last digit",
        f"nv-fabricmanager --version: {found}\nthe driver: {wanted}",
        f"{install_packages(x, *_fabric_packages(x, wanted))}; systemctl restart nvidia-fabricmanager",
    )
