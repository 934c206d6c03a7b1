"""GPUs: none on the bus, bound to another driver, WSL; what the kernel's log says of them and their driver. Pure.

A log line describes a past moment: if nvidia-smi shows every GPU now, the finding is a warning. Sources: NVIDIA's open
kernel modules (the messages), docs.nvidia.com/deploy/xid-errors (the numbers), Linux, kernel/module (refusals).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Callable

from gpuprov.doctor.finding import CERTAIN, GPUS, LIKELY, MODULE, WARNING, Finding, Rule, Rules, finding_of, steps
from gpuprov.doctor.parse import find_in_log, lines_that_match
from gpuprov.doctor.snapshot import KEYS, HostSnapshot
from gpuprov.doctor.suggested_commands import (
    comment_out,
    driver_again,
    firmware_setup,
    gpuprov_install,
    install_packages,
    keep_nouveau_out,
    list_gpus,
    rebuild_initramfs,
    rebuild_module,
    remove_packages,
    same_versions,
)
from gpuprov.driver import generations, nouveau
from gpuprov.driver.source import UNSIGNED
from gpuprov.machine.pci import PciGpu
from gpuprov.plan import preflight
from gpuprov.plan.preflight import LIST_GPUS
from gpuprov.protocol.words import counted

RULES = Rules()

_TAKEN = ("gpu-nouveau", "gpu-vfio", "gpu-excluded", "gpu-unbound")


@RULES.add("wsl-without-gpu", GPUS, "WSL without /dev/dxg or /usr/lib/wsl/lib/libcuda.so.1")
def _wsl_without_gpu(x: HostSnapshot) -> Finding | None:
    if not x.host.kernel.wsl or {"/dev/dxg", "/usr/lib/wsl/lib/libcuda.so.1"} <= x.there:
        return None
    missing = "/dev/dxg" if "/dev/dxg" not in x.there else "/usr/lib/wsl/lib/libcuda.so.1"
    return Finding(
        "Windows gives this WSL no GPU", f"ls {missing}: No such file or directory",
        "wsl --update; wsl --shutdown  # in Windows, with NVIDIA's driver for Windows installed there",
    )  # fmt: skip


@RULES.add("wsl-with-driver", GPUS, "WSL, and a Linux driver is installed in it")
def _wsl_with_driver(x: HostSnapshot) -> Finding | None:
    if not x.host.kernel.wsl or not (x.host.driver_packaged or "/var/lib/nvidia/dirs" in x.there):
        return None
    seen = f"package {x.host.driver_packaged}" if x.host.driver_packaged else "/var/lib/nvidia/dirs"
    step = remove_packages(x, "'*nvidia*'") if x.host.driver_packaged else "nvidia-uninstall --silent"
    return Finding("a Linux driver stands over the one that Windows brings into WSL", seen, step)


@RULES.add("no-gpu", GPUS, "no device of vendor 10de and class 03 on the PCI bus")
def _no_gpu(x: HostSnapshot) -> Finding | None:
    # Tegra's GPU is not on a PCI bus.
    if x.host.gpus or x.host.kernel.wsl or x.driver.gpus or "/dev/nvmap" in x.there:
        return None
    step = preflight.NO_GPU.next_step.replace(LIST_GPUS, list_gpus(x))
    found = finding_of(preflight.NO_GPU, next_step=step)
    inside = x.host.kernel.container
    return replace(found, what=f"{found.what} (inside {inside})") if inside else found


@RULES.add("gpu-nouveau", GPUS, "a GPU is bound to nouveau, nova_core or nova_drm")
def _gpu_nouveau(x: HostSnapshot) -> Finding | None:
    bound = nouveau.bound(x.host.gpus)
    if not bound:
        return None
    return Finding(
        f"{bound[0].rpartition(' ')[2]} has the GPUs, which NVIDIA's driver needs",
        "\n".join(f"/sys/bus/pci/devices/{one.split()[1]}/driver: {one.rpartition(' ')[2]}" for one in bound),
        keep_nouveau_out(x),
        remedies=(steps("nouveau"),),
    )


@RULES.add("gpu-vfio", GPUS, "a GPU is bound to vfio-pci, pci-stub or pciback")
def _gpu_vfio(x: HostSnapshot) -> Finding | None:
    gpus = [gpu for gpu in x.host.gpus if gpu.driver in FOR_GUESTS]
    if not gpus:
        return None
    places = lines_that_match(x.texts, r"^\s*options\s+(vfio-pci|pci-stub)\s+.*ids=.*10de:")
    seen = [f"/sys/bus/pci/devices/{gpu.bus_id}/driver: {gpu.driver}" for gpu in gpus]
    free = "; ".join(
        f"echo {gpu.bus_id} > /sys/bus/pci/drivers/{gpu.driver}/unbind; "
        f"echo {gpu.bus_id} > /sys/bus/pci/drivers/nvidia/bind"
        for gpu in gpus[:1]
    )
    kept = f"{comment_out(places[0][0])}; {rebuild_initramfs(x)}; systemctl reboot" if places else free
    return Finding(
        f"{gpus[0].driver} keeps {len(gpus)} of {counted(len(x.host.gpus), 'GPU')} for virtual machines",
        "\n".join([*seen, *(f"{place}: {line}" for place, line in places)]),
        kept,
        # If only some of several GPUs are affected, the machine is divided on purpose.
        WARNING if x.driver.gpus else CERTAIN,
    )


RULES.row(
    "gpus-lost",
    GPUS,
    "a GPU that the last green `gpuprov verify` saw has left the PCI bus, or is bound to vfio-pci",
    lambda x: x.gpus_lost.evidence if x.gpus_lost else "",
    lambda x: x.gpus_lost.what if x.gpus_lost else "",
    lambda x: x.gpus_lost.next_step if x.gpus_lost else "",
    follows=("no-gpu", "gpu-nouveau", "gpu-vfio", "fallen-off-bus", "power-cables"),
)


@RULES.add(
    "iommu-fault", GPUS, "the kernel's log: `DMAR: [DMA …` or `AMD-Vi: Event` with a GPU's bus id", ("fallen-off-bus",)
)
def _iommu_fault(x: HostSnapshot) -> Finding | None:
    buses = "|".join(re.escape(gpu.bus_id.partition(":")[2]) for gpu in x.host.gpus)
    found = find_in_log(x.kernel_log, rf"(?:DMAR: \[DMA|AMD-Vi: Event).*?device[ =]\[?(?:[0-9a-f]{{4}}:)?({buses})")
    if not buses or found is None:
        return None
    return Finding(
        "the IOMMU refuses a GPU its memory", "\n".join(("dmesg:", *found[1])),
        "${EDITOR:-vi} /etc/default/grub; update-grub; systemctl reboot  # GRUB_CMDLINE_LINUX: add iommu=pt",
        WARNING if serves_all(x) else LIKELY,
    )  # fmt: skip


@RULES.add("gpu-excluded", GPUS, "/proc/driver/nvidia/params: ExcludedGpus is not empty")
def _gpu_excluded(x: HostSnapshot) -> Finding | None:
    there = lines_that_match(x.texts, r'^(ExcludedGpus|GpuBlacklist): "[^"]+"')
    if not there:
        return None
    cause = lines_that_match(x.texts, r"NVreg_(ExcludedGpus|GpuBlacklist)=")
    step = f"{comment_out(cause[0][0])}; " if cause else "grep -rn NVreg_ExcludedGpus /etc/modprobe.d; "
    seen = "\n".join(f"{place}: {line}" for place, line in (*there, *cause))
    sure = WARNING if x.driver.gpus else CERTAIN
    step = f"{step}{rebuild_initramfs(x)}; systemctl reboot"
    return Finding("the driver was told to leave GPUs out", seen, step, sure)


@RULES.add("gpu-unbound", GPUS, "the driver is loaded, and a GPU is bound to none", ("fallen-off-bus",))
def _gpu_unbound(x: HostSnapshot) -> Finding | None:
    gpus = [gpu for gpu in x.host.gpus if not gpu.driver]
    if not gpus or not x.driver.kernel_version:
        return None
    bus = gpus[0].bus_id
    return Finding(
        f"no driver has GPU {bus}, although NVIDIA's is loaded", f"/sys/bus/pci/devices/{bus}/driver is not there",
        f"echo {bus} > /sys/bus/pci/drivers/nvidia/bind; dmesg | grep -i nvrm", LIKELY,
    )  # fmt: skip


@RULES.add(
    "gpu-too-old-or-new",
    GPUS,
    "by PCI id the GPU is too old, too new or of the wrong kind for the driver",
    ("needs-open-modules", "needs-proprietary-modules", "branch-without-gpu"),
)
def _gpu_too_old_or_new(x: HostSnapshot) -> Finding | None:
    version = x.driver.kernel_version or x.driver.library_version or x.module.version
    if not version or serves_all(x):
        return None
    kind = {"NVIDIA": "proprietary", "Dual MIT/GPL": "open"}.get(x.module.license, "auto")
    problem = next(iter(generations.problems(x.host.gpu_device_ids, version, kind)), None)
    if problem is None:
        return None
    step = problem.next_step.partition(",")[0]
    if step.startswith("set gpuprov_"):
        name, _, value = step.removeprefix("set ").partition(": ")
        step = f"gpuprov install -e {name}={value.strip(chr(34))}"
    else:
        step = f"{list_gpus(x)}  # {step}"
    return Finding(problem.what, problem.evidence, step, LIKELY)


@RULES.add(
    "gpus-fewer",
    GPUS,
    "/proc/driver/nvidia/gpus has fewer GPUs than the PCI bus",
    (*_TAKEN, "fallen-off-bus", "init-failed", "bar-invalid", "power-cables", "gpu-too-old-or-new"),
)
def _gpus_fewer(x: HostSnapshot) -> Finding | None:
    known, there = len(x.driver.gpus), len(own_gpus(x))
    if not x.driver.kernel_version or known >= there or _gpu_excluded(x) is not None:
        return None
    served = {gpu.bus_id.lower() for gpu in x.driver.gpus}
    missing = ", ".join(gpu.bus_id for gpu in own_gpus(x) if gpu.bus_id.lower() not in served)
    return Finding(
        f"the driver serves {known} of this machine's {counted(there, 'GPU')}",
        f"/proc/driver/nvidia/gpus: {missing} is not there, and is on the PCI bus",
        "dmesg | grep -i nvrm; systemctl reboot",
        LIKELY,
    )


_REPORT = "nvidia-bug-report.sh"
_BUS = r"(?P<bus>[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"


# Drivers that reserve a device for virtual machines.
FOR_GUESTS = ("vfio-pci", "pci-stub", "pciback", "nvgrace_gpu_vfio_pci")


def own_gpus(x: HostSnapshot) -> tuple[PciGpu, ...]:
    """Return the GPUs that are not reserved for virtual machines."""
    return tuple(gpu for gpu in x.host.gpus if gpu.driver not in FOR_GUESTS)


def serves_all(x: HostSnapshot) -> bool:
    """Say whether nvidia-smi shows every GPU on the PCI bus that belongs to this machine itself."""
    return not x.smi.reason and x.smi.returncode == 0 and x.smi.text.count("<gpu id=") >= max(len(own_gpus(x)), 1)


@dataclass(frozen=True)
class LogSign:
    """A kernel message: `said` is its text, `pattern` finds it.

    `what` may use the pattern's named groups; `next_step` is the next command.
    """

    name: str
    area: str
    said: str
    pattern: str
    what: str
    next_step: Callable[[HostSnapshot], str]
    confidence: str = CERTAIN
    follows: tuple[str, ...] = ()


def rule_of(row: LogSign) -> Rule:
    """Return the rule for a message."""

    def look(x: HostSnapshot) -> Finding | None:
        found = find_in_log(x.kernel_log, row.pattern)
        if found is None:
            return None
        named, lines = found
        confidence = WARNING if serves_all(x) else row.confidence
        evidence = "\n".join(("dmesg:", *lines))
        return Finding(row.what.format(**named), evidence, row.next_step(x), confidence)

    return Rule(row.name, row.area, f"the kernel's log: {row.said}", look, row.follows)


def _say(text: str) -> Callable[[HostSnapshot], str]:
    return lambda _: text


def _other_modules(kind: str) -> Callable[[HostSnapshot], str]:
    def step(x: HostSnapshot) -> str:
        if x.host.driver_packaged:
            return install_packages(x, "nvidia-open" if kind == "open" else "cuda-drivers")
        return f"{gpuprov_install(x)} -e gpuprov_kernel_module_type={kind}"

    return step


def _other_branch(x: HostSnapshot) -> str:
    rows = (generations.generation_of(gpu.device_id) for gpu in x.host.gpus)
    newest = min((row.newest for row in rows if row is not None and row.newest), default=580)
    return f"gpuprov install -e gpuprov_driver_version={newest}"


def _reset(x: HostSnapshot) -> str:
    return "systemctl reboot  # or, with nothing on the GPUs: nvidia-smi --gpu-reset"


def enrol(x: HostSnapshot) -> str:
    """Return the commands after which the kernel trusts the key of the driver's modules."""
    key = next((path for path in KEYS if path in x.there), "")
    if key:
        return f"mokutil --import {key}; systemctl reboot  # and enrol the key at the console"
    # A key that the specification names is there, and perhaps enrolled: the module is to be signed with it.
    return gpuprov_install(x) if x.spec.module_signing_key else UNSIGNED.next_step


# With the driver's lines before it, which have the reason if no other rule knows it.
_PROBE_FAILED = (
    r".{0,240}(?:The NVIDIA probe routine failed for \d+ device|"
    r"None of the NVIDIA (?:devices|graphics adapters|graphics devices) were initialized|No NVIDIA devices probed)"
)


def _after_failed_probe(x: HostSnapshot) -> str:
    version = x.module.version or x.driver.library_version
    released = f" of driver {version}" if version else ""
    return f"{_REPORT}; systemctl reboot  # if it comes again, these lines{released} are what to search for"


_DRIVER_SIGNS = (
    LogSign(
        "fallen-off-bus", GPUS, "`fallen off the bus`, or Xid 79",
        r"GPU [^\]]{0,120}?fallen off the bus|Xid \(PCI:[^)]*\): 79,",
        "a GPU has fallen off the PCI bus",
        _say(f"{_REPORT}; systemctl reboot  # if it comes back: power, seating, heat"),
    ),
    LogSign(
        "power-cables", GPUS, "`necessary power cables`",
        r"does not have the necessary power cables",
        "a GPU lacks its power cable", _say("poweroff  # then connect the GPU's power cables"),
    ),
    LogSign(
        "bar-invalid", GPUS, "`PCI I/O region … is invalid`, `BAR1 is 0M @ 0x0`",
        r"PCI I/O region assigned to your NVIDIA device is invalid|BAR\d is 0M @ 0x0",
        "the firmware has given a GPU no room in the address space (BAR)",
        lambda x: firmware_setup(x, "switch on `Above 4G decoding`; or boot with pci=realloc"),
        follows=("fallen-off-bus",),
    ),
    LogSign(
        "no-interrupt", GPUS, "`Can't find an IRQ for your NVIDIA card`",
        r"Can't find an IRQ for your NVIDIA card",
        "the firmware, or the virtual machine, has given a GPU no interrupt",
        lambda x: firmware_setup(
            x, "update the firmware; of a virtual machine, check how the GPU is passed through"
        ),
        follows=("fallen-off-bus",),
    ),
    LogSign(
        "gsp-firmware-missing", MODULE, "`firmware load for nvidia/… failed`",
        r"Direct firmware load for nvidia/\S+ failed|RmFetchGspRmImages: No firmware",
        "the GPU's firmware (GSP) is not on this host, or is of another version", driver_again,
    ),
    LogSign(
        "gsp-timeout", GPUS, "Xid 119 or 120",
        r"Xid \(PCI:[^)]*\): (?:119|120),",
        "the GPU's own processor (GSP) has stopped responding", _reset,
    ),
    LogSign(
        "bound-to-another", MODULE, "`is already bound to`",
        rf"GPU {_BUS} is already bound to (?P<driver>[\w-]+)",
        "the driver {driver} has taken GPU {bus}", keep_nouveau_out, follows=("gpu-nouveau", "gpu-vfio"),
    ),
    LogSign(
        "probe-not-called", MODULE, "`NVIDIA probe routine was not called`",
        r"NVIDIA probe routine was not called for (?P<count>\d+) device",
        "another driver has taken GPUs before NVIDIA's: {count}", keep_nouveau_out,
        follows=("gpu-nouveau", "gpu-vfio", "bound-to-another"),
    ),
    LogSign(
        "probe-failed", MODULE, "`The NVIDIA probe routine failed`, `None of the NVIDIA devices were initialized`",
        _PROBE_FAILED,
        "the driver was loaded and could start no GPU, so the kernel did not keep it", _after_failed_probe,
        follows=(
            "gpu-nouveau", "gpu-vfio", "bound-to-another", "probe-not-called", "needs-open-modules",
            "needs-proprietary-modules", "branch-without-gpu", "fallen-off-bus", "power-cables", "bar-invalid",
            "no-interrupt", "gsp-firmware-missing", "gsp-timeout", "iommu-fault", "init-failed", "gpu-too-old-or-new",
        ),
    ),
    LogSign(
        "needs-open-modules", MODULE, "`requires use of the NVIDIA open kernel modules`",
        r"requires use of the NVIDIA open kernel modules",
        "this GPU works with the open kernel modules alone, and the proprietary ones are loaded",
        _other_modules("open"),
    ),
    LogSign(
        "needs-proprietary-modules", MODULE, "`not supported by open nvidia.ko`",
        r"not supported by open nvidia\.ko because it does not include",
        "this GPU works with the proprietary kernel modules alone (before Turing), and the open ones are loaded",
        _other_modules("proprietary"),
    ),
    LogSign(
        "branch-without-gpu", MODULE, "`is not supported by the NVIDIA … driver release`",
        r"is not supported by the (?:NVIDIA )?(?P<version>\d[\d.]+)",
        "driver {version} does not know this GPU: too old for it, or no longer for it", _other_branch,
    ),
    LogSign(
        "init-failed", GPUS, "`RmInitAdapter failed!`",
        rf"(?:GPU {_BUS}: )?RmInitAdapter failed! \((?P<code>[^)]*)\)",
        "the driver can't initialise a GPU (RmInitAdapter failed, {code})",
        _say(f"{_REPORT}; systemctl reboot"), LIKELY,
        ("fallen-off-bus", "power-cables", "bar-invalid", "iommu-fault", "gsp-firmware-missing", "gsp-timeout",
         "needs-open-modules", "needs-proprietary-modules", "branch-without-gpu", "xid-48", "xid-95", "xid-64"),
    ),
    LogSign(
        "uvm-and-kaslr", MODULE, "`devmem_alloc_pagemap … err -34`",
        r"devmem_alloc_pagemap|uvm_pmm_devmem\w*.*-34",
        "nvidia-uvm can't map its memory behind the kernel's (KASLR and HMM)",
        _say("echo options nvidia_uvm uvm_disable_hmm=1 > /etc/modprobe.d/nvidia-uvm-hmm.conf; "
             "modprobe -r nvidia_uvm; modprobe nvidia_uvm"), LIKELY,
    ),
    LogSign(
        "api-mismatch", MODULE, "`API mismatch: the client … has the version`",
        r"API mismatch: the client '?(?P<client>[^']*?)'? .*?has the version (?P<theirs>[\d.]+)"
        r".*?this kernel module has the version (?P<ours>[\d.]+)",
        "a program with libraries {theirs} has asked the kernel module {ours}", same_versions, LIKELY,
        ("version-mismatch",),
    ),
)  # fmt: skip
# The kernel's messages when it refuses a module.
_REFUSALS = (
    LogSign(
        "key-rejected", MODULE, "`Key was rejected by service`, `unavailable key is rejected`",
        r"nvidia.*?Key was rejected by service|Loading of module with unavailable key is rejected|"
        r"Loading of unsigned module is rejected|PKCS#7 signature not signed with a trusted key",
        "the kernel refuses the driver's module: it is not signed with a key that this machine trusts (Secure Boot)",
        enrol,
    ),
    LogSign(
        "lockdown", MODULE, "`Lockdown: … unsigned module loading is restricted`",
        r"Lockdown: \S+ unsigned module loading is restricted",
        "the kernel is locked down and refuses unsigned modules", enrol, follows=("key-rejected",),
    ),
    LogSign(
        "module-of-another-kernel", MODULE, "`disagrees about version of symbol`, `version magic`",
        r"nvidia[\w-]*: (?:disagrees about version of symbol \w+|version magic '[^']*' should be '[^']*')",
        "the driver's module was built for another kernel", rebuild_module,
    ),
)  # fmt: skip
# Number, meaning, next command; docs.nvidia.com/deploy/xid-errors.
_XIDS: tuple[tuple[int, str, Callable[[HostSnapshot], str]], ...] = (
    (31, "a program on a GPU has touched memory that is not its own",
     _say("dmesg | grep -i xid  # then: compute-sanitizer PROGRAM")),
    (43, "a GPU has stopped a program's channel", _say("dmesg | grep -i xid  # restart the program")),
    (48, "a GPU has an ECC error that can't be corrected (double bit)", _reset),
    (62, "a GPU's power management has halted", _reset),
    (63, "a GPU has written down a broken memory row, and replaces it at its next reset", _reset),
    (64, "a GPU could not replace a broken memory row", _say(f"{_REPORT}  # replace the GPU (RMA)")),
    (74, "an NVLink connection of a GPU fails", _say(f"nvidia-smi nvlink --status; {_REPORT}; systemctl reboot")),
    (92, "a GPU corrects many ECC errors (single bit)", _say("nvidia-smi -q -d ECC")),
    (94, "a GPU has an ECC error that ended one program (contained)",
     _say("nvidia-smi -q -d ECC  # restart the program")),
    (95, "a GPU has an ECC error that went beyond one program (uncontained)", _reset),
    (109, "a GPU's context switch has timed out", _reset),
    (140, "a GPU has ECC errors that can't be recovered", _reset),
    (154, "the driver asks for a GPU's reset or for a reboot", _reset),
)  # fmt: skip


def _xid(number: int, what: str, next_step: Callable[[HostSnapshot], str]) -> Rule:
    pattern = rf"Xid \(PCI:(?P<bus>[^ )]+)[^)]*\): {number},"
    row = LogSign(f"xid-{number}", GPUS, f"Xid {number}", pattern, f"{what} (Xid {number}, {{bus}})", next_step, LIKELY)
    return rule_of(row)


RULES += (*map(rule_of, _DRIVER_SIGNS), *map(rule_of, _REFUSALS), *(_xid(*row) for row in _XIDS))
