"""Troubles of a GPU host and what `gpuprov health` says of them.

`readings`: paths of `nvidia-smi -q -x`; `state`: what the simulated NVML tells, so that the genuine nvidia-smi 550
prints these readings. A case without a state has fields of other releases (from public samples of 535, 570, 575, 580),
is not nvidia-smi's to tell, or is one that nvidia-smi asks NVML by functions that no header has: licence, T.Limit,
the host's PCIe generation, infoROM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuprov.checks.health import Readings
from gpuprov.core.commands import Completed
from gpuprov.facts.gpus import FabricFacts
from gpuprov.protocol.errors import Problem
from tests import simgpu

_PCIE = "pci/pci_gpu_link_info"
_REASON = "clocks_event_reasons/clocks_event_reason_hw"


@dataclass(frozen=True)
class Case:
    """One trouble of GPU 0, or of the host if `host` gives its readings. `log`: lines of the kernel log."""

    name: str
    rule: str
    verdict: str
    what: str
    next_step: str
    readings: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, int] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    host: Readings | None = None

    def __str__(self) -> str:
        return self.name


def healthy(minor: int = 0) -> dict[str, str]:
    """Return readings of a GPU that has nothing."""
    one = simgpu.gpu(minor)
    return {
        "product_name": one.name, "uuid": one.uuid, "pci/pci_bus_id": one.bus_id, "persistence_mode": "Enabled",
        "gpu_recovery_action": "None", "compute_mode": "Default", "performance_state": "P0",
        "fb_memory_usage/total": "81559 MiB", "fb_memory_usage/used": "4 MiB", "utilization/gpu_util": "0 %",
        "temperature/gpu_temp": "30 C", "temperature/gpu_temp_tlimit": "57 C", "temperature/memory_temp": "40 C",
        f"{_PCIE}/pcie_gen/max_link_gen": "5", f"{_PCIE}/pcie_gen/current_link_gen": "1",
        f"{_PCIE}/pcie_gen/max_device_link_gen": "5", f"{_PCIE}/pcie_gen/max_host_link_gen": "5",
        f"{_PCIE}/link_widths/max_link_width": "16x", f"{_PCIE}/link_widths/current_link_width": "16x",
        "remapped_rows/remapped_row_pending": "No", "remapped_rows/remapped_row_failure": "No",
        "ecc_errors/volatile/sram_uncorrectable_parity": "0", "ecc_errors/volatile/dram_uncorrectable": "0",
        "ecc_errors/aggregate/dram_uncorrectable": "7", "retired_pages/pending_retirement": "N/A",
        "fabric/state": "Completed", "fabric/status": "Success", "fabric/cliqueId": "0", "fabric/clusterUuid": "0",
        f"{_REASON}_slowdown": "Not Active", f"{_REASON}_thermal_slowdown": "Not Active",
        "nvlink/active": "18", "nvlink/expected": "18", "memory without a process": "4 MiB",
    }  # fmt: skip


# The simulated NVML's words for the same GPU.
WELL = {"persistence": 1, "recovery-action": 0, "pcie-max-gen": 5, "pcie-gpu-gen": 5, "pcie-gen": 1,
        "pcie-max-width": 16, "pcie-width": 16, "nvlinks": 18, "ecc-dram": 0, "ecc-sram": 0, "ecc-threshold": 0,
        "clock-reasons": 1, "slow-temperature": 87, "memory-temperature": 40, "max-memory-temperature": 95,
        "pages-pending": 0, "memory-used": 4, "fabric": 3, "remapped": 2}  # fmt: skip
_RESET, _RMA = "nvidia-smi --gpu-reset", "replace the GPU (RMA)"
_SWITCHES = ("0000:05:00.0",)


def _xid(number: int, text: str = "pid=7, name=trainer") -> str:
    return f"[ 9000.000001] NVRM: Xid (PCI:0000:1b:00): {number}, {text}"


def _asks(old: str, new: str) -> str:
    return _xid(154, f"GPU recovery action changed from {old} to {new}")


def _action(number: int, text: str, rule: str, what: str, step: str = _RESET) -> Case:
    state = {"recovery-action": number}
    return Case(f"action {text}", rule, "unfit", what, step, {"gpu_recovery_action": text}, state)


def _of_host(name: str, rule: str, verdict: str, what: str, step: str, host: Readings, **state: int) -> Case:
    return Case(name, rule, verdict, what, step, host=host, state=state)


_GPUS = (healthy(0), healthy(1))

CASES = (
    _action(1, "Reset", "recovery-reset", "asks for a reset"),
    _action(2, "Reboot", "recovery-reboot", "asks for a reboot", "systemctl reboot"),
    _action(3, "Drain P2P", "recovery-drain-p2p", "over NVLink"),
    _action(4, "Drain and Reset", "recovery-drain", "let this GPU's programs end"),
    _action(5, "Recover IMEX domain", "recovery-imex", "recover the IMEX domain", "nvidia-imex"),
    _action(6, "Bus Reset", "recovery-reset", "asks for a reset"),
    Case("reset required, 565 and before", "recovery-reset", "unfit", "asks for a reset", _RESET,
         {"gpu_reset_status/reset_required": "Yes"}, {"reset-required": 1, "recovery-action": 99}),
    Case("drain recommended, 565 and before", "recovery-drain", "unfit", "programs end", _RESET,
         {"gpu_reset_status/drain_and_reset_recommended": "Yes"}, {"drain-recommended": 1, "recovery-action": 99}),
    Case("a GPU that requires a reset", "gpu-requires-reset", "unfit", "does not answer", _RESET,
         {"fb_memory_usage/used": "GPU requires reset"}, {"requires-reset": 1}),
    Case("compute mode prohibited", "compute-prohibited", "unfit", "lets no program use it", "-i 0 -c DEFAULT",
         {"compute_mode": "Prohibited"}, {"compute-mode": 2}),
    Case("failed remap", "row-remap-failed", "unfit", "could not be replaced", _RMA,
         {"remapped_rows/remapped_row_failure": "Yes"}, {"remap-failed": 1}),
    Case("pending remap", "row-remap-pending", "degraded", "wait for a reset to be replaced", "-i 0 --gpu-reset",
         {"remapped_rows/remapped_row_pending": "Yes"}, {"remap-pending": 1}),
    Case("pending pages", "pages-pending", "degraded", "memory pages wait", "-i 0 --gpu-reset",
         {"retired_pages/pending_retirement": "Yes"}, {"pages-pending": 1}),
    Case("pending channel repair, from 575", "repair-pending", "degraded", "part waits for a reset", "--gpu-reset",
         {"ecc_errors/channel_repair_pending": "Yes"}),
    Case("SRAM threshold", "ecc-threshold", "unfit", "too many errors in its SRAM", _RMA,
         {"ecc_errors/aggregate/sram_threshold_exceeded": "Yes"}, {"ecc-threshold": 1}),
    Case("SRAM errors", "ecc-uncorrectable", "unfit", "can't be corrected", _RESET,
         {"ecc_errors/volatile/sram_uncorrectable_parity": "3"}, {"ecc-sram": 3}),
    Case("double bit errors, before Turing", "ecc-uncorrectable", "unfit", "can't be corrected", _RESET,
         {"ecc_errors/volatile/double_bit/total": "1"}),
    Case("DRAM errors", "ecc-dram", "degraded", "in its memory", "nvidia-smi -q -d ECC",
         {"ecc_errors/volatile/dram_uncorrectable": "2"}, {"ecc-dram": 2}),
    Case("fabric not started", "fabric-state", "unfit", "CUDA error 802", "nvidia-fabricmanager",
         {"fabric/state": "Not Started"}, {"fabric": 1}),
    Case("fabric in progress", "fabric-state", "unfit", "CUDA error 802", "nvidia-fabricmanager",
         {"fabric/state": "In Progress"}, {"fabric": 2}),
    Case("fabric status", "fabric-status", "unfit", "could not take it", "journalctl -b -u nvidia-fabricmanager",
         {"fabric/status": "Unknown Error"}, {"fabric-status": 999}),
    Case("fabric bandwidth", "fabric-degraded", "degraded", "less than its full bandwidth", "nvlink --status",
         {"fabric/health/bandwidth": "Degraded"}, {"fabric-health": 1}),
    Case("fabric unhealthy, from 575", "fabric-unhealthy", "unfit", "fabric is unhealthy", "nvlink --status",
         {"fabric/health/summary": "Unhealthy", "fabric/health/bandwidth": "Degraded"}),
    Case("NVLinks down", "nvlinks-down", "degraded", "NVLinks are down", "nvlink --status",
         {"nvlink/active": "17"}, {"nvlinks": 17}),
    Case("thermal slowdown", "thermal-slowdown", "degraded", "so hot", "check fans",
         {f"{_REASON}_thermal_slowdown": "Active", f"{_REASON}_slowdown": "Active"}, {"clock-reasons": 0x48}),
    Case("power brake", "power-brake", "degraded", "power supply", "check the power supplies",
         {f"{_REASON}_power_brake_slowdown": "Active", f"{_REASON}_slowdown": "Active"}, {"clock-reasons": 0x88}),
    Case("hardware slowdown", "hardware-slowdown", "degraded", "its hardware has slowed it down", "PERFORMANCE",
         {f"{_REASON}_slowdown": "Active"}, {"clock-reasons": 8}),
    Case("thermal slowdown, 525", "thermal-slowdown", "degraded", "so hot", "check fans",
         {"clocks_throttle_reasons/clocks_throttle_reason_hw_thermal_slowdown": "Active"}),
    Case("hotter than its limit", "temperature", "degraded", "hotter than its limit", "check fans",
         {"temperature/gpu_temp": "88 C", "temperature/gpu_temp_slow_threshold": "87 C"}, {"temperature": 88}),
    Case("no margin left, Ada and later", "temperature", "degraded", "hotter than its limit", "check fans",
         {"temperature/gpu_temp_tlimit": "-1 C"}),
    Case("hot memory", "memory-temperature", "degraded", "its memory is hotter", "check fans",
         {"temperature/memory_temp": "96 C", "temperature/gpu_temp_max_mem_threshold": "95 C"},
         {"memory-temperature": 96}),
    Case("PCIe generation by the maximum", "pcie-generation", "degraded", "slower than GPU and slot", "lspci",
         {f"{_PCIE}/pcie_gen/max_link_gen": "3"}),
    Case("PCIe generation under load", "pcie-generation", "degraded", "slower than GPU and slot", "lspci",
         {f"{_PCIE}/pcie_gen/current_link_gen": "4", "utilization/gpu_util": "90 %"}, {"pcie-gen": 4, "load": 90}),
    Case("PCIe width by the maximum", "pcie-width", "degraded", "fewer lanes", "reseat",
         {f"{_PCIE}/link_widths/max_link_width": "8x", "sysfs/max_link_width": "16", "sysfs/../max_link_width": "16"},
         {"pcie-max-width": 8}),
    Case("PCIe width under load", "pcie-width", "degraded", "fewer lanes", "reseat",
         {f"{_PCIE}/link_widths/current_link_width": "8x", "utilization/gpu_util": "90 %",
          f"{_PCIE}/pcie_gen/current_link_gen": "5"},
         {"pcie-width": 8, "load": 90, "pcie-gen": 5}),
    Case("memory without a process", "memory-leaked", "degraded", "by no process", "fuser -v",
         {"memory without a process": "40960 MiB"}, {"memory-used": 40960}),
    Case("persistence off", "persistence-off", "degraded", "persistence mode is off", "nvidia-persistenced",
         {"persistence_mode": "Disabled"}, {"persistence": 0}),
    Case("no licence", "unlicensed", "degraded", "has no licence", "nvidia-gridd",
         {"vgpu_software_licensed_product/license_status": "Unlicensed (Unrestricted)"}),
    Case("no licence for a day", "unlicensed", "degraded", "its time without one is over", "nvidia-gridd",
         {"vgpu_software_licensed_product/license_status": "Unlicensed (Restricted)"}),
    Case("Xid that ends work", "xid-48", "unfit", "double bit", _RESET, {"gpu_recovery_action": "N/A"},
         {"recovery-action": 99}, (_xid(48),)),
    Case("Xid that the driver settled itself", "xid-48", "degraded", "double bit", _RESET, log=(_xid(48),),
         state={"recovery-action": 0}),
    Case("Xid 79", "xid-79", "unfit", "fallen off the PCI bus", "systemctl reboot", {"gpu_recovery_action": "N/A"},
         {"recovery-action": 99}, (_xid(79, "GPU has fallen off the bus."),)),
    Case("Xid 64", "xid-64", "unfit", "could not write down", "if it comes again, replace",
         {"gpu_recovery_action": ""}, {"recovery-action": 99}, (_xid(64),)),
    Case("Xid of a row to be replaced", "xid-63", "degraded", "written down a broken memory row", "reboot",
         {"gpu_recovery_action": ""}, {"recovery-action": 99},
         (_xid(63, "Row Remapper: New row marked for remapping"),)),
    Case("fatal Xid of NVLink 5", "xid-149", "unfit", "NVLink 5", "nvlink --status",
         {"gpu_recovery_action": ""}, {"recovery-action": 99},
         (_xid(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6)"),)),
    Case("Xid of NVLink 5 that is not fatal", "xid-145", "degraded", "NVLink 5", "nvlink --status",
         {"gpu_recovery_action": ""}, {"recovery-action": 99},
         (_xid(145, "RLW_REMAP Nonfatal XC0 i0 Link 02 (0x00000004)"),)),
    Case("Xid of corrected errors", "xid-92", "degraded", "corrects many", "nvidia-smi -q -d ECC", log=(_xid(92),),
         state={"recovery-action": 0}),
    Case("Xid 154 without the field", "recovery-reset", "unfit", "asks for a reset", _RESET,
         {"gpu_recovery_action": ""}, {"recovery-action": 99},
         (_asks("0x0 (None)", "0x1 (GPU Reset Required)"),)),
    _of_host("nvidia-smi hangs", "nvidia-smi-hangs", "unfit", "nvidia-smi hangs", "systemctl reboot",
             Readings(smi=Completed(("nvidia-smi",), 124), on_bus=2)),
    _of_host("a lost GPU", "no-report", "unfit", "fallen off the bus", "systemctl reboot",
             Readings(smi=Completed(("nvidia-smi",), 15, "Unable to determine the device handle"), on_bus=2), lost=1),
    _of_host("infoROM", "inforom", "degraded", "infoROM is corrupted", "RMA",
             Readings(_GPUS, smi=Completed(("nvidia-smi",), 14), on_bus=2)),
    _of_host("no nvidia-smi", "no-report", "unfit", "gives no report", "gpuprov doctor",
             Readings(smi=Completed(("nvidia-smi",), 127), on_bus=2)),
    _of_host("remembered GPUs", "gpus-lost", "unfit", "3 GPUs on 2026-11-01, 2 today", "systemctl reboot",
             Readings(_GPUS, lost=Problem("3 GPUs on 2026-11-01, 2 today: … is gone", "…", "systemctl reboot"))),
    _of_host("GPUs on the bus", "gpus-fewer", "unfit", "2 of the 3 GPUs", "dmesg", Readings(_GPUS, on_bus=3)),
    _of_host("fabric manager's version", "fabric-manager-version", "unfit", "550.1, the driver is 550.2",
             "gpuprov_fabric_manager",
             Readings(_GPUS, "550.2", fabric=FabricFacts(_SWITCHES, version="550.1", active=True))),
    _of_host("no fabric manager", "fabric-manager-missing", "unfit", "does not run", "enable --now",
             Readings(_GPUS, "550.2", fabric=FabricFacts(_SWITCHES, version="550.2"))),
    _of_host("cliques", "cliques", "degraded", "not in the same NVLink partition", "divided on purpose",
             Readings((healthy(0), {**healthy(1), "fabric/cliqueId": "1"})), clique=1),
    _of_host("IMEX", "imex-missing", "unfit", "nvidia-imex is enabled", "restart nvidia-imex",
             Readings(_GPUS, imex_down="systemctl is-active nvidia-imex.service: failed")),
)  # fmt: skip
