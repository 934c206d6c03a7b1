"""Rules about the kernel's log: the driver's messages about a GPU, Xids, refused modules. Pure.

A log line describes a past moment: if nvidia-smi shows every GPU now, the finding is an aside. Sources: NVIDIA's open
kernel modules (the messages), docs.nvidia.com/deploy/xid-errors (the numbers), Linux, kernel/module (refusals).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from gpuprov.doctor import words
from gpuprov.doctor.examined import KEYS, Examined
from gpuprov.doctor.finding import ASIDE, CERTAIN, GPUS, LIKELY, MODULE, Finding, Rule
from gpuprov.doctor.parse import find_in_log
from gpuprov.driver import generations
from gpuprov.machine.pci import PciGpu

_REPORT = "nvidia-bug-report.sh"
_BUS = r"(?P<bus>[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"


# Drivers that reserve a device for virtual machines.
FOR_GUESTS = ("vfio-pci", "pci-stub", "pciback", "nvgrace_gpu_vfio_pci")


def own_gpus(x: Examined) -> tuple[PciGpu, ...]:
    """Return the GPUs that are not reserved for virtual machines."""
    return tuple(gpu for gpu in x.host.gpus if gpu.driver not in FOR_GUESTS)


def serves_all(x: Examined) -> bool:
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
    next_step: Callable[[Examined], str]
    confidence: str = CERTAIN
    follows: tuple[str, ...] = ()


def rule_of(row: LogSign) -> Rule:
    """Return the rule for a message."""

    def look(x: Examined) -> Finding | None:
        found = find_in_log(x.kernel_log, row.pattern)
        if found is None:
            return None
        named, lines = found
        confidence = ASIDE if serves_all(x) else row.confidence
        evidence = "\n".join(("dmesg:", *lines))
        return Finding(row.what.format(**named), evidence, row.next_step(x), confidence)

    return Rule(row.name, row.area, f"the kernel's log: {row.said}", look, row.follows)


def _say(text: str) -> Callable[[Examined], str]:
    return lambda _: text


def _other_modules(kind: str) -> Callable[[Examined], str]:
    def step(x: Examined) -> str:
        if x.host.driver_packaged:
            return words.install_packages(x, "nvidia-open" if kind == "open" else "cuda-drivers")
        return f"{words.gpuprov_install(x)} -e gpuprov_kernel_module_type={kind}"

    return step


def _other_branch(x: Examined) -> str:
    rows = (generations.generation_of(gpu.device_id) for gpu in x.host.gpus)
    newest = min((row.newest for row in rows if row is not None and row.newest), default=580)
    return f"gpuprov install -e gpuprov_driver_version={newest}"


def _reset(x: Examined) -> str:
    return "systemctl reboot  # or, with nothing on the GPUs: nvidia-smi --gpu-reset"


def enrol(x: Examined) -> str:
    """Return the commands after which the kernel trusts the key of the driver's modules."""
    key = next((path for path in KEYS if path in x.there), "")
    if key:
        return f"mokutil --import {key}; systemctl reboot  # and enrol the key at the console"
    return (
        "gpuprov install -e gpuprov_module_signing_key=KEY -e gpuprov_module_signing_certificate=CERTIFICATE  # or "
        "switch Secure Boot off in the firmware"
    )


# With the driver's lines before it, which have the reason if no other rule knows it.
_PROBE_FAILED = (
    r".{0,240}(?:The NVIDIA probe routine failed for \d+ device|"
    r"None of the NVIDIA (?:devices|graphics adapters|graphics devices) were initialized|No NVIDIA devices probed)"
)


def _after_failed_probe(x: Examined) -> str:
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
        lambda x: words.firmware_setup(x, "switch on `Above 4G decoding`; or boot with pci=realloc"),
        follows=("fallen-off-bus",),
    ),
    LogSign(
        "no-interrupt", GPUS, "`Can't find an IRQ for your NVIDIA card`",
        r"Can't find an IRQ for your NVIDIA card",
        "the firmware, or the virtual machine, has given a GPU no interrupt",
        lambda x: words.firmware_setup(
            x, "update the firmware; of a virtual machine, check how the GPU is passed through"
        ),
        follows=("fallen-off-bus",),
    ),
    LogSign(
        "gsp-firmware-missing", MODULE, "`firmware load for nvidia/… failed`",
        r"Direct firmware load for nvidia/\S+ failed|RmFetchGspRmImages: No firmware",
        "the GPU's firmware (GSP) is not on this host, or is of another version", words.driver_again,
    ),
    LogSign(
        "gsp-timeout", GPUS, "Xid 119 or 120",
        r"Xid \(PCI:[^)]*\): (?:119|120),",
        "the GPU's own processor (GSP) has stopped responding", _reset,
    ),
    LogSign(
        "bound-to-another", MODULE, "`is already bound to`",
        rf"GPU {_BUS} is already bound to (?P<driver>[\w-]+)",
        "the driver {driver} has taken GPU {bus}", words.keep_nouveau_out, follows=("gpu-nouveau", "gpu-vfio"),
    ),
    LogSign(
        "probe-not-called", MODULE, "`NVIDIA probe routine was not called`",
        r"NVIDIA probe routine was not called for (?P<count>\d+) device",
        "another driver has taken GPUs before NVIDIA's: {count}", words.keep_nouveau_out,
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
        "a program with libraries {theirs} has asked the kernel module {ours}", words.same_versions, LIKELY,
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
        "the driver's module was built for another kernel", words.rebuild_module,
    ),
)  # fmt: skip
# Number, meaning, next command; docs.nvidia.com/deploy/xid-errors.
_XIDS: tuple[tuple[int, str, Callable[[Examined], str]], ...] = (
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


def _xid(number: int, what: str, next_step: Callable[[Examined], str]) -> Rule:
    pattern = rf"Xid \(PCI:(?P<bus>[^ )]+)[^)]*\): {number},"
    row = LogSign(f"xid-{number}", GPUS, f"Xid {number}", pattern, f"{what} (Xid {number}, {{bus}})", next_step, LIKELY)
    return rule_of(row)


RULES = (*map(rule_of, _DRIVER_SIGNS), *map(rule_of, _REFUSALS), *(_xid(*row) for row in _XIDS))
