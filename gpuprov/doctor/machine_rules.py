"""Rules that precede any driver: no GPU on the bus, another driver bound to it, WSL. Pure."""

from __future__ import annotations

import re

from gpuprov.doctor import words
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ASIDE, CERTAIN, GPUS, LIKELY, Finding, Rule
from gpuprov.doctor.log_rules import FOR_GUESTS, own_gpus, serves_all
from gpuprov.doctor.parse import find_in_log, lines_that_match
from gpuprov.doctor.remedy import steps
from gpuprov.driver import generations, nouveau
from gpuprov.protocol.words import counted

_TAKEN = ("gpu-nouveau", "gpu-vfio", "gpu-excluded", "gpu-unbound")


def _no_gpu(x: Examined) -> Finding | None:
    # Tegra's GPU is not on a PCI bus.
    if x.host.gpus or x.host.kernel.wsl or x.driver.gpus or "/dev/nvmap" in x.there:
        return None
    inside = f" (inside {x.host.kernel.container})" if x.host.kernel.container else ""
    return Finding(
        f"there is no NVIDIA GPU in this machine{inside}",
        "/sys/bus/pci/devices: no device of vendor 10de and class 03",
        f"{words.list_gpus(x)}  # in a virtual machine pass the GPU through to it; in hardware look at seating and "
        "firmware",
    )


def _wsl_without_gpu(x: Examined) -> Finding | None:
    if not x.host.kernel.wsl or {"/dev/dxg", "/usr/lib/wsl/lib/libcuda.so.1"} <= x.there:
        return None
    missing = "/dev/dxg" if "/dev/dxg" not in x.there else "/usr/lib/wsl/lib/libcuda.so.1"
    return Finding(
        "Windows gives this WSL no GPU", f"ls {missing}: No such file or directory",
        "wsl --update; wsl --shutdown  # in Windows, with NVIDIA's driver for Windows installed there",
    )  # fmt: skip


def _wsl_with_driver(x: Examined) -> Finding | None:
    if not x.host.kernel.wsl or not (x.host.driver_packaged or "/var/lib/nvidia/dirs" in x.there):
        return None
    seen = f"package {x.host.driver_packaged}" if x.host.driver_packaged else "/var/lib/nvidia/dirs"
    step = words.remove_packages(x, "'*nvidia*'") if x.host.driver_packaged else "nvidia-uninstall --silent"
    return Finding("a Linux driver stands over the one that Windows brings into WSL", seen, step)


def _nouveau(x: Examined) -> Finding | None:
    bound = nouveau.bound(x.host.gpus)
    if not bound:
        return None
    return Finding(
        f"{bound[0].rpartition(' ')[2]} has the GPUs, which NVIDIA's driver needs",
        "\n".join(f"/sys/bus/pci/devices/{one.split()[1]}/driver: {one.rpartition(' ')[2]}" for one in bound),
        words.keep_nouveau_out(x),
        remedies=(steps("nouveau"),),
    )


def _for_guests(x: Examined) -> Finding | None:
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
    kept = f"{words.comment_out(places[0][0])}; {words.rebuild_initramfs(x)}; systemctl reboot" if places else free
    return Finding(
        f"{gpus[0].driver} keeps {len(gpus)} of {counted(len(x.host.gpus), 'GPU')} for virtual machines",
        "\n".join([*seen, *(f"{place}: {line}" for place, line in places)]),
        kept,
        # If only some of several GPUs are affected, the machine is divided on purpose.
        ASIDE if x.driver.gpus else CERTAIN,
    )


def _excluded(x: Examined) -> Finding | None:
    there = lines_that_match(x.texts, r'^(ExcludedGpus|GpuBlacklist): "[^"]+"')
    if not there:
        return None
    cause = lines_that_match(x.texts, r"NVreg_(ExcludedGpus|GpuBlacklist)=")
    step = f"{words.comment_out(cause[0][0])}; " if cause else "grep -rn NVreg_ExcludedGpus /etc/modprobe.d; "
    seen = "\n".join(f"{place}: {line}" for place, line in (*there, *cause))
    sure = ASIDE if x.driver.gpus else CERTAIN
    step = f"{step}{words.rebuild_initramfs(x)}; systemctl reboot"
    return Finding("the driver was told to leave GPUs out", seen, step, sure)


def _unbound(x: Examined) -> Finding | None:
    gpus = [gpu for gpu in x.host.gpus if not gpu.driver]
    if not gpus or not x.driver.kernel_version:
        return None
    bus = gpus[0].bus_id
    return Finding(
        f"no driver has GPU {bus}, although NVIDIA's is loaded", f"/sys/bus/pci/devices/{bus}/driver is not there",
        f"echo {bus} > /sys/bus/pci/drivers/nvidia/bind; dmesg | grep -i nvrm", LIKELY,
    )  # fmt: skip


def _fewer(x: Examined) -> Finding | None:
    known, there = len(x.driver.gpus), len(own_gpus(x))
    if not x.driver.kernel_version or known >= there or _excluded(x) is not None:
        return None
    served = {gpu.bus_id.lower() for gpu in x.driver.gpus}
    missing = ", ".join(gpu.bus_id for gpu in own_gpus(x) if gpu.bus_id.lower() not in served)
    return Finding(
        f"the driver serves {known} of this machine's {counted(there, 'GPU')}",
        f"/proc/driver/nvidia/gpus: {missing} is not there, and is on the PCI bus",
        "dmesg | grep -i nvrm; systemctl reboot",
        LIKELY,
    )


def _iommu(x: Examined) -> Finding | None:
    buses = "|".join(re.escape(gpu.bus_id.partition(":")[2]) for gpu in x.host.gpus)
    found = find_in_log(x.kernel_log, rf"(?:DMAR: \[DMA|AMD-Vi: Event).*?device[ =]\[?(?:[0-9a-f]{{4}}:)?({buses})")
    if not buses or found is None:
        return None
    return Finding(
        "the IOMMU refuses a GPU its memory", "\n".join(("dmesg:", *found[1])),
        "${EDITOR:-vi} /etc/default/grub; update-grub; systemctl reboot  # GRUB_CMDLINE_LINUX: add iommu=pt",
        ASIDE if serves_all(x) else LIKELY,
    )  # fmt: skip


def _wrong_driver(x: Examined) -> Finding | None:
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
        step = f"{words.list_gpus(x)}  # {step}"
    return Finding(problem.what, problem.evidence, step, LIKELY)


RULES = (
    Rule("wsl-without-gpu", GPUS, "WSL without /dev/dxg or /usr/lib/wsl/lib/libcuda.so.1", _wsl_without_gpu),
    Rule("wsl-with-driver", GPUS, "WSL, and a Linux driver is installed in it", _wsl_with_driver),
    Rule("no-gpu", GPUS, "no device of vendor 10de and class 03 on the PCI bus", _no_gpu),
    Rule("gpu-nouveau", GPUS, "a GPU is bound to nouveau, nova_core or nova_drm", _nouveau),
    Rule("gpu-vfio", GPUS, "a GPU is bound to vfio-pci, pci-stub or pciback", _for_guests),
    Rule("iommu-fault", GPUS, "the kernel's log: `DMAR: [DMA …` or `AMD-Vi: Event` with a GPU's bus id", _iommu,
         ("fallen-off-bus",)),
    Rule("gpu-excluded", GPUS, "/proc/driver/nvidia/params: ExcludedGpus is not empty", _excluded),
    Rule("gpu-unbound", GPUS, "the driver is loaded, and a GPU is bound to none", _unbound, ("fallen-off-bus",)),
    Rule("gpu-too-old-or-new", GPUS, "by PCI id the GPU is too old, too new or of the wrong kind for the driver",
         _wrong_driver, ("needs-open-modules", "needs-proprietary-modules", "branch-without-gpu")),
    Rule("gpus-fewer", GPUS, "/proc/driver/nvidia/gpus has fewer GPUs than the PCI bus", _fewer,
         (*_TAKEN, "fallen-off-bus", "init-failed", "bar-invalid", "power-cables", "gpu-too-old-or-new")),
)  # fmt: skip
