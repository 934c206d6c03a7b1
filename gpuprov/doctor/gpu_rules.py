"""GPUs: none on the bus, bound to another driver, WSL. Pure.

What the kernel's log says of them stands in rules.json alone. Sources: NVIDIA's open kernel modules (the messages),
docs.nvidia.com/deploy/xid-errors (the numbers), Linux, kernel/module (refusals).
"""

from __future__ import annotations

import re

from gpuprov.doctor import suggested_commands as commands
from gpuprov.doctor.finding import LIKELY, WARNING
from gpuprov.doctor.rules import Seen, conditions, in_kernel_log, quoted, seen_of
from gpuprov.doctor.snapshot import HostSnapshot, lines_that_match
from gpuprov.driver import generations, nouveau
from gpuprov.machine.pci import FOR_GUESTS
from gpuprov.plan import preflight
from gpuprov.protocol.words import counted

_IN_WSL = ("/dev/dxg", "/usr/lib/wsl/lib/libcuda.so.1")
_PLACE, _RESERVED = r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?", "|".join(FOR_GUESTS)
conditions({
    "wsl-without-gpu": lambda x: x.host.kernel.wsl and [
        f"ls {path}: No such file or directory" for path in _IN_WSL if path not in x.there][:1],
    "gpus-lost": lambda x: x.gpus_lost is not None and seen_of(x.gpus_lost),
    "gpu-nouveau": lambda x: (
            bound := [(one.split()[1], one.rpartition(" ")[2]) for one in nouveau.bound(x.host.gpus)])
        and Seen(*(f"/sys/bus/pci/devices/{bus}/driver: {driver}" for bus, driver in bound), driver=bound[0][1]),
    "gpu-unbound": lambda x: bool(x.driver.kernel_version)
        and (bus := next((gpu.bus_id for gpu in x.host.gpus if not gpu.driver), ""))
        and Seen(f"/sys/bus/pci/devices/{bus}/driver is not there", bus=bus),
    "bound-to-another": lambda x: in_kernel_log(
        x, rf"GPU (?P<bus>{_PLACE}) is already bound to (?!(?:{_RESERVED})(?![\w-]))(?P<driver>[\w-]+)"),
    # Those that are reserved for virtual machines count too, and nothing is wrong with them.
    "probe-not-called": lambda x: (
            found := in_kernel_log(x, r"NVIDIA probe routine was not called for (?P<count>\d+) device"))
        and int(str(found.values["count"])) > len(x.host.gpus) - len(x.own_gpus) and found,
    "iommu-fault": lambda x: (buses := "|".join(re.escape(gpu.bus_id.partition(":")[2]) for gpu in x.host.gpus))
        and in_kernel_log(
            x, rf"(?:DMAR: \[DMA|AMD-Vi: Event).*?device[ =]\[?(?:[0-9a-f]{{4}}:)?({buses})|:({buses}): AMD-Vi: Event"),
})  # fmt: skip


def wsl_with_driver(x: HostSnapshot) -> Seen | str | None:
    installer = "/var/lib/nvidia/dirs"
    if not x.host.kernel.wsl:
        return None
    if x.host.driver_packaged:
        return Seen(f"package {x.host.driver_packaged}", next_step=x.host.driver_removal)
    return installer if installer in x.there else None


def no_gpu(x: HostSnapshot) -> Seen | None:
    # Tegra's GPU is not on a PCI bus.
    if x.host.gpus or x.host.kernel.wsl or x.driver.gpus or "/dev/nvmap" in x.there:
        return None
    step = preflight.NO_GPU.next_step.replace(preflight.LIST_GPUS, commands.list_gpus(x))
    inside = f" (inside {x.host.kernel.container})" if x.host.kernel.container else ""
    return Seen(preflight.NO_GPU.evidence, meaning=f"{preflight.NO_GPU.what}{inside}", next_step=step)


def gpu_vfio(x: HostSnapshot) -> Seen | None:
    gpus = [gpu for gpu in x.host.gpus if gpu.driver in FOR_GUESTS]
    if not gpus:
        return None
    places = lines_that_match(x.texts, r"^\s*options\s+(vfio-pci|pci-stub)\s+.*ids=.*10de:")
    seen = [f"/sys/bus/pci/devices/{gpu.bus_id}/driver: {gpu.driver}" for gpu in gpus]
    pci, bus = "/sys/bus/pci", gpus[0].bus_id
    # driverctl, libvirt and Proxmox VE set an override, with which no other driver may have the GPU.
    free = f"echo > {pci}/devices/{bus}/driver_override; echo {bus} > {pci}/drivers/{gpus[0].driver}/unbind; "
    free += f"modprobe nvidia; echo {bus} > {pci}/drivers_probe"
    if places:
        free = f"{commands.comment_out(places[0][0])}; {commands.rebuild_initramfs(x)}; systemctl reboot"
    # If only some of several GPUs are affected, the machine is divided on purpose.
    sure = WARNING if x.driver.gpus else ""
    gpu, number, of_all = gpus[0], len(gpus), counted(len(x.host.gpus), "GPU")
    return Seen(*seen, *quoted(places), driver=gpu.driver, number=number, gpus=of_all, next_step=free, confidence=sure)


def gpu_excluded(x: HostSnapshot) -> Seen | None:
    there = lines_that_match(x.texts, r'^(ExcludedGpus|GpuBlacklist): "[^"]+"')
    cause = lines_that_match(x.texts, r"NVreg_(ExcludedGpus|GpuBlacklist)=")
    first = commands.comment_out(cause[0][0]) if cause else "grep -rn NVreg_ExcludedGpus /etc/modprobe.d"
    sure = WARNING if x.driver.gpus else ""
    return Seen(*quoted((*there, *cause)), first=first, confidence=sure) if there else None


def gpu_too_old_or_new(x: HostSnapshot) -> Seen | None:
    version = x.driver.kernel_version or x.driver.library_version or x.module.version
    if not version or x.serves_all:
        return None
    kind = {"NVIDIA": "proprietary", "Dual MIT/GPL": "open"}.get(x.module.license, "auto")
    problem = next(iter(generations.problems(x.host.gpu_device_ids, version, kind, x.host.tables)), None)
    if problem is None:
        return None
    step = problem.next_step.partition(",")[0]
    name, _, value = step.removeprefix("set gpuprov_").partition(": ")
    if name == "driver_version":
        step = commands.other_driver(x, value.strip('"'))
    elif name == "kernel_module_type":
        step = commands.modules_of(x, value)
    else:
        step = f"{commands.list_gpus(x)}  # {step}"
    return seen_of(problem, LIKELY, next_step=step)


def gpus_fewer(x: HostSnapshot) -> Seen | None:
    known, there = len(x.driver.gpus), len(x.own_gpus)
    if not x.driver.kernel_version or known >= there or gpu_excluded(x):
        return None
    served = {gpu.bus_id.lower() for gpu in x.driver.gpus}
    missing = ", ".join(gpu.bus_id for gpu in x.own_gpus if gpu.bus_id.lower() not in served)
    seen = f"/proc/driver/nvidia/gpus: {missing} is not there, and is on the PCI bus"
    return Seen(seen, known=known, gpus=counted(there, "GPU"))
