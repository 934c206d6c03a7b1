"""Rules about nvidia-smi's exit code and report, and about the fabric of NVSwitch machines. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Callable

from gpuprov.doctor import words
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ANY_ROOT, ASIDE, CERTAIN, DRIVER, LIKELY, Finding, Look, Rule
from gpuprov.doctor.parse import per_gpu
from gpuprov.driver import fabric_manager
from gpuprov.facts.fabric import UNIT
from gpuprov.protocol.words import counted

_RESET = "systemctl reboot"
# Exit code → meaning, next command; nvidia-smi's manual, "RETURN VALUE", and recorded runs.
_EXITS: tuple[tuple[int, str, str], ...] = (
    (3, "nvidia-smi and the driver do not fit together (an operation that this GPU does not have)", ""),
    (4, "nvidia-smi may not open the devices", f"ls -l /dev/nvidia*; {words.OPEN_NODES}"),
    (6, "the driver serves no GPU", "dmesg | grep -i nvrm"),
    (8, "a GPU lacks its power cable", "poweroff  # then connect the GPU's power cables"),
    (9, "nvidia-smi does not reach the driver", "modprobe -a nvidia nvidia-uvm; dmesg | grep -i nvrm"),
    (10, "the kernel has trouble with a GPU's interrupts", "dmesg | grep -i -e nvrm -e irq; systemctl reboot"),
    (12, "libnvidia-ml.so.1 can't be loaded", "ldconfig; ldconfig -p | grep libnvidia-ml"),
    (13, "libnvidia-ml.so.1 is of another version than nvidia-smi", ""),
    (14, "a GPU's infoROM is corrupted", "nvidia-bug-report.sh  # replace the GPU (RMA)"),
    (15, "a GPU is lost: it has fallen off the bus", "systemctl reboot  # if it comes back: power, seating, heat"),
    (17, "the driver could not take the GPU's memory or its interrupts", "dmesg | grep -i nvrm; systemctl reboot"),
    (18, "libraries and kernel module are of different versions", ""),
    (124, "nvidia-smi hangs: a GPU does not answer", f"dmesg | grep -i -e nvrm -e xid; {_RESET}"),
    (255, "nvidia-smi fails in a way that it has no number for", "nvidia-smi; dmesg | grep -i -e nvrm -e xid"),
)  # fmt: skip
# Exit code → the manual's. nvidia-smi exits with NVML's number, which is 11 (NVML_ERROR_IRQ_ISSUE) for the manual's 10.
_MANUALS = {11: 10}


def _exit_rule(code: int, what: str, step: str) -> Rule:
    def look(x: Examined) -> Finding | None:
        if x.smi.reason or _MANUALS.get(x.smi.returncode, x.smi.returncode) != code:
            return None
        evidence = f"nvidia-smi exited {x.smi.returncode}: {x.smi.first_line}"
        return Finding(what, evidence, step or (words.same_versions(x) if code == 18 else words.smi_again(x)))

    return Rule(f"nvidia-smi-{code}", DRIVER, f"nvidia-smi exits {code}", look, ANY_ROOT)


def _other_exit(x: Examined) -> Finding | None:
    known = {0, *_MANUALS, *(code for code, _, _ in _EXITS)}
    if x.smi.reason or x.smi.returncode in known:
        return None
    seen = f"nvidia-smi exited {x.smi.returncode}: {x.smi.first_line}"
    return Finding("nvidia-smi fails", seen, "nvidia-smi; dmesg | grep -i -e nvrm -e xid")


def _smi_shows_fewer(x: Examined) -> Finding | None:
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

    def look(x: Examined) -> Finding | None:
        numbers = [number for number, gpu in enumerate(per_gpu(x.smi.text)) if re.search(value, gpu.get(place, ""))]
        if not numbers:
            return None
        shown = ", ".join(map(str, numbers))
        seen = f"nvidia-smi -q -x: {place.rpartition('/')[2]} of GPU {shown} matches {value}"
        return Finding(f"GPU {shown}: {what}", seen, step.format(gpu=numbers[0]), sure)

    return look


def _mig_empty(x: Examined) -> Finding | None:
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


def _fabric_missing(x: Examined) -> Finding | None:
    unit = x.units.get(UNIT)
    version = _fabric_wanted(x)
    if not version or (unit is not None and unit.active == "active"):
        return None
    if unit is None or unit.load != "loaded":
        return Finding(
            "this machine has NVSwitches, and no fabric manager: CUDA ends with error 802",
            f"NVSwitches: {', '.join(x.host.fabric.switches)}\nsystemctl show {UNIT}: not-found",
            f"{words.install_packages(x, *_fabric_packages(x, version))}; systemctl enable --now nvidia-fabricmanager",
        )
    return Finding(
        "the fabric manager does not run: CUDA ends with error 802",
        f"systemctl show {UNIT}: {unit.active}, {unit.result}",
        "systemctl enable --now nvidia-fabricmanager; journalctl -u nvidia-fabricmanager -n 50",
    )


def _fabric_version(x: Examined) -> Finding | None:
    wanted, found = _fabric_wanted(x), x.host.fabric.version
    if not wanted or not found or wanted == found:
        return None
    return Finding(
        f"the fabric manager is of version {found}, the driver of {wanted}: they must be the same, to the last digit",
        f"nv-fabricmanager --version: {found}\nthe driver: {wanted}",
        f"{words.install_packages(x, *_fabric_packages(x, wanted))}; systemctl restart nvidia-fabricmanager",
    )


def _fabric_wanted(x: Examined) -> str:
    """Return the version that the fabric manager must have (the loaded driver's), "" if none has to run."""
    if not x.host.fabric.switches or x.host.kernel.container:
        return ""
    return x.driver.kernel_version or x.driver.library_version


def _fabric_packages(x: Examined, version: str) -> tuple[str, ...]:
    manager = x.host.package_manager
    return tuple(manager.typed(name) for name in fabric_manager.packages(version, manager, x.host.fabric))


def _fabric_state(x: Examined) -> Finding | None:
    finding = _of_gpus("fabric/state", "In Progress|Not Started", "it is not in the NVLink fabric (CUDA error 802)",
                       f"systemctl restart {UNIT}; nvidia-smi -q -i {{gpu}} | grep -A4 Fabric", LIKELY)(x)  # fmt: skip
    if finding is None or words.has_unit(x, UNIT):
        return finding
    elsewhere = "nvidia-smi -q | grep -A4 Fabric  # the fabric manager runs outside: on the container host, or the VM's"
    return replace(finding, next_step=elsewhere)


_REMAP: Callable[[str], str] = "remapped_rows/remapped_row_{}".format
RULES = (
    *(_exit_rule(*row) for row in _EXITS),
    Rule("nvidia-smi-fails", DRIVER, "nvidia-smi exits with any other code", _other_exit, ANY_ROOT),
    Rule("nvidia-smi-fewer", DRIVER, "nvidia-smi shows fewer GPUs than the driver has", _smi_shows_fewer, ANY_ROOT),
    Rule("mig-without-instances", DRIVER, "MIG is enabled and there are no instances", _mig_empty),
    Rule("compute-prohibited", DRIVER, "nvidia-smi: compute_mode is Prohibited",
         _of_gpus("compute_mode", "^Prohibited", "its compute mode lets no program use it",
                  "nvidia-smi -i {gpu} -c DEFAULT")),
    Rule("compute-exclusive", DRIVER, "nvidia-smi: compute_mode is Exclusive_Process",
         _of_gpus("compute_mode", "^Exclusive", "its compute mode lets one program use it at a time (CUDA error 46)",
                  "nvidia-smi -i {gpu} -c DEFAULT", ASIDE)),
    Rule("row-remap-failed", DRIVER, "nvidia-smi: remapped_row_failure is Yes",
         _of_gpus(_REMAP("failure"), "^Yes", "broken memory rows could not be replaced",
                  "nvidia-bug-report.sh  # replace the GPU (RMA)", LIKELY)),
    Rule("row-remap-pending", DRIVER, "nvidia-smi: remapped_row_pending is Yes",
         _of_gpus(_REMAP("pending"), "^Yes", "broken memory rows wait for a reset to be replaced",
                  "nvidia-smi -i {gpu} --gpu-reset", ASIDE)),
    Rule("fabric-state", DRIVER, "nvidia-smi: the fabric's state is In Progress or Not Started",
         _fabric_state,
         ("fabric-manager-missing", "fabric-manager-version")),
    Rule("fabric-manager-missing", DRIVER, "NVSwitches, and nvidia-fabricmanager does not run", _fabric_missing,
         ("fabric-manager-version",)),
    Rule("fabric-manager-version", DRIVER, "nvidia-fabricmanager is not of the driver's version", _fabric_version),
)  # fmt: skip
