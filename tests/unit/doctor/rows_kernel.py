"""Troubles of GPUs, of the kernel and of its modules, with what the doctor must say of each.

Rows are made-up facts, and groups real troubles of a lab host, whose commands test_doctor.py types.
Messages are recorded where a row says from where: drivers and installers in Debian chroots, NVIDIA's open kernel
modules and documentation, bug reports of the projects named. All others follow the known formats and were written here.
"""

import shlex
from dataclasses import replace

from gpuprov.core.places import REMEMBERED
from gpuprov.doctor.finding import LIKELY, WARNING
from gpuprov.doctor.snapshot import KEYS, ModuleFile
from gpuprov.facts.kernels import BLACKLIST, InstalledKernel
from gpuprov.protocol.errors import Problem
from tests.integration.doctor_typing import Group
from tests.unit.doctor.host import with_driver, with_kernel
from tests.unit.doctor.ill import (
    DKMS,
    Change,
    Row,
    both,
    bound_to,
    gpu_ids,
    host,
    installed,
    kernel_says,
    log,
    metal,
    on_metal,
    text,
    there,
)
from tests.unit.fake_host import RELEASE

UPDATES = f"/lib/modules/{RELEASE}/updates/dkms"


def _with_module(name: str) -> Change:
    return lambda x: replace(x, module=ModuleFile(f"{UPDATES}/{name}.ko.xz"))


_NEEDS_OPEN = (
    "NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:2901)",
    "NVRM: installed in this system requires use of the NVIDIA", "NVRM: open kernel modules.",
)  # fmt: skip
KERNEL_ROWS = (
    # -- GPUs
    Row("wsl-without-gpu", lambda x: with_driver(with_kernel(metal(x), wsl=True), library_version="550.163.01"),
        "/dev/dxg", "wsl --update"),
    Row("wsl-with-driver",
        both(lambda x: with_kernel(metal(x), wsl=True), there("/dev/dxg", "/usr/lib/wsl/lib/libcuda.so.1"),
             host(driver_packaged="libnvidia-compute-550")),
        "libnvidia-compute-550", "apt-get purge '*nvidia*'"),
    Row("no-gpu", lambda x: both(host(gpus=()))(metal(x)), "/sys/bus/pci/devices", "grep -l 0x10de"),
    Row("gpu-nouveau", bound_to("nouveau"), "driver: nouveau", "blacklist nouveau"),
    Row("gpu-nouveau", bound_to("NovaCore"), "driver: NovaCore", "update-initramfs -u -k all; systemctl reboot"),
    Row("gpu-nouveau", both(bound_to("nouveau"), lambda x: host(files={**x.host.files, BLACKLIST: None})(x)),
        "driver: nouveau", "update-initramfs -u -k all; systemctl reboot"),
    Row("gpu-vfio",
        both(bound_to("vfio-pci"), text("/etc/modprobe.d/vfio.conf", "#\noptions vfio-pci ids=10de:2330\n")),
        "/etc/modprobe.d/vfio.conf:2: options vfio-pci", "sed -i '2s/^/#/' /etc/modprobe.d/vfio.conf"),
    # As driverctl and libvirt give a GPU away: with the override in place, a write to nvidia/bind fails (ENODEV).
    Row("gpu-vfio", bound_to("vfio-pci"), "driver: vfio-pci", "/driver_override; echo "),
    Row("gpu-vfio", bound_to("vfio-pci"), "driver: vfio-pci", "> /sys/bus/pci/drivers/vfio-pci/unbind"),
    Row("gpu-excluded",
        both(text("/proc/driver/nvidia/params", 'RmMsg: ""\nExcludedGpus: "GPU-1"\n'),
             text("/etc/modprobe.d/nv.conf", "options nvidia NVreg_ExcludedGpus=GPU-1\n"),
             lambda x: with_driver(x, gpus=(), nodes=(), capability_nodes=())),
        '/proc/driver/nvidia/params:2: ExcludedGpus: "GPU-1"', "sed -i '1s/^/#/' /etc/modprobe.d/nv.conf"),
    Row("gpu-excluded",
        both(text("/proc/driver/nvidia/params", 'ExcludedGpus: "GPU-1"\n'),
             lambda x: with_driver(x, gpus=x.driver.gpus[:1])),
        "/proc/driver/nvidia/params:1", "grep -rn NVreg_ExcludedGpus /etc/modprobe.d; update-initramfs", WARNING),
    Row("gpu-unbound", lambda x: host(gpus=tuple(replace(gpu, driver="") for gpu in x.host.gpus))(x),
        "/driver is not there", "/sys/bus/pci/drivers/nvidia/bind", LIKELY),
    Row("gpus-fewer", lambda x: with_driver(x, gpus=x.driver.gpus[:1]), "/proc/driver/nvidia/gpus",
        "dmesg | grep -i nvrm", LIKELY),
    Row("gpu-too-old-or-new", both(gpu_ids("1db1"), lambda x: with_driver(x, library_version="590.48.01")),
        "10de:1db1 is Volta", "gpuprov install -e gpuprov_driver_version=580", LIKELY),
    Row("gpu-too-old-or-new",
        both(gpu_ids("1db1"), host(driver_packaged="cuda-drivers"),
             lambda x: with_driver(x, library_version="590.48.01")),
        "10de:1db1 is Volta", "gpuprov install -e gpuprov_driver=packages -e gpuprov_driver_version=580", LIKELY),
    Row("gpu-too-old-or-new", both(gpu_ids("2901"), lambda x: with_driver(x, library_version="580.95.05")), "10de:2901",
        "gpuprov_kernel_module_type=open", LIKELY),
    Row("gpus-lost",
        lambda x: replace(x, gpus_lost=Problem("3 GPUs on 2026-11-03, 2 today", REMEMBERED, "systemctl reboot")),
        REMEMBERED, "systemctl reboot"),
    # open-gpu-kernel-modules 595.45.04; NVIDIA/NVSentinel's report of a GPU lost without an Xid.
    Row("fallen-off-bus",
        log("[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0",
            "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
            "               NVRM: fallen off the bus and is not responding to commands."),
        "fallen off the bus", "systemctl reboot"),
    Row("fallen-off-bus", log("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus."), "Xid", "power, seating"),
    # Linux, pci_power_up(): the GPU's configuration space reads as ones.
    Row("fallen-off-bus",
        log("[   87.41] nvidia 0000:01:00.0: Unable to change power state from D3cold to D0, device inaccessible",
            "[   87.47] NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:667)"),
        "device inaccessible", "systemctl reboot"),
    Row("power-cables", log("NVRM: GPU 0000:0b:00.0: GPU does not have the necessary power cables connected."),
        "power cables", "poweroff"),
    Row("bar-invalid",
        log("NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:",
            "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:b3:00.0)"),
        "BAR1 is 0M", "Above 4G decoding"),
    # Debian's driver 535.309.01 in a virtual machine, on PCI devices that are only registers.
    Row("no-interrupt",
        kernel_says("NVRM: Can't find an IRQ for your NVIDIA card!", "NVRM: Please check your BIOS settings.",
                    "NVRM: [Plug & Play OS] should be set to NO", "NVRM: [Assign IRQ to VGA] should be set to YES",
                    "nvidia: probe of 0000:1b:00.0 failed with error -1",
                    "NVRM: The NVIDIA probe routine failed for 1 device(s).",
                    "NVRM: None of the NVIDIA devices were initialized."),
        "NVRM: Can't find an IRQ for your NVIDIA card!", "systemctl reboot  # and in the firmware's setup: "),
    Row("gsp-timeout",
        log("NVRM: Xid (PCI:0000:17:00): 119, pid=1, name=x, Timeout after 6s of waiting for RPC response "
            "from GPU0 GSP!"),
        "119", "--gpu-reset"),
    # open-gpu-kernel-modules issues 1080 and 1353.
    Row("gsp-timeout", log("NVRM: GPU0 _kgspRpcRecvPoll: GSP RM heartbeat timed out"), "heartbeat", "--gpu-reset"),
    # A T4, whose proprietary module can do without GSP.
    Row("gsp-timeout",
        lambda x: log("NVRM: Xid (PCI:0000:17:00): 119, pid=1, name=x, Timeout after 6s of waiting for RPC response "
                      "from GPU0 GSP!")(gpu_ids("1eb8")(x)),
        "119", "'options nvidia NVreg_EnableGpuFirmware=0' in /etc/modprobe.d, then a reboot"),
    # Cyridd/cmpunlocker's report.
    Row("init-failed", log("[   21.091872] NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:894)"),
        "(0x22:0x56:894)", "nvidia-bug-report.sh", LIKELY),
    Row("iommu-fault",
        lambda x: log(
            f"DMAR: [DMA Read NO_PASID] Request device [{x.host.gpus[0].bus_id[5:]}] fault addr 0xff [fault "
            "reason 0x06] PTE Read access is not set"
        )(x),
        "fault addr", "iommu=pt", LIKELY),
    # As the kernel names a device that has a driver, since 4.20.
    Row("iommu-fault",
        lambda x: log(
            f"nvidia {x.host.gpus[0].bus_id}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0003 address=0x80000040 "
            "flags=0x0020]"
        )(x),
        "IO_PAGE_FAULT", "iommu=pt", LIKELY),
    # docs.nvidia.com/deploy: a100-gpu-mem-error-mgmt, Xid log examples.
    Row("xid-94",
        log("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No"),
        "94, pid=7194", "nvidia-smi -q -d ECC", LIKELY),
    *(
        Row(f"xid-{number}", log(f"NVRM: Xid (PCI:0000:65:00): {number}, pid='N/A', said so"), f"{number}, pid", step,
            LIKELY)
        for number, step in (
            (31, "compute-sanitizer"),
            (43, "restart the program"),
            (64, "--gpu-reset; if it comes again, replace"),
            (74, "nvlink"),
            (92, "ECC"),
            (142, "nvidia-bug-report.sh"),
            (151, "systemctl reboot"),
            (54, "power cables"),
            (157, "nvidia-bug-report.sh"),
            (163, "TEMPERATURE"),
            (168, "--ecc-config=1"),
            *((number, "--gpu-reset") for number in (46, 48, 62, 63, 95, 109, 110, 136, 140, 143, 154, 155, 156, 158)),
        )
    ),
    # NVIDIA/open-gpu-kernel-modules, issue 1150.
    *(
        Row("xid-144-150", log(f"NVRM: Xid (PCI:0009:01:00): {number}, RLW_REMAP Nonfatal XC1 i0 Link 02"),
            f"{number}, RLW", "nvlink", LIKELY)
        for number in (144, 145, 149, 150)
    ),
    # -- kernel module
    Row("driver-outside", lambda x: with_driver(x, kernel_version="", gpus=(), nodes=(), present=()),
        "cat /proc/driver/nvidia/version: No such file", "modprobe -a nvidia nvidia-uvm; nvidia-smi  # on the host"),
    Row("modules-disabled", lambda x: with_kernel(metal(x), takes_modules=False, modules_disabled=True),
        "modules_disabled is 1", "grep -rn modules_disabled"),
    # Linux, kernel/module/signing.c, as the report of gpu-driver-container has it.
    Row("key-rejected", both(kernel_says("[ 8.1] Loading of module with unavailable key is rejected"), there(KEYS[1])),
        "unavailable key", f"mokutil --import {KEYS[1]}"),
    # Such a kernel names no module: RHEL's with Secure Boot, any with module.sig_enforce=1.
    Row("key-rejected", kernel_says("[ 8.1] Loading of unsigned module is rejected"), "unsigned module", "mokutil"),
    Row("key-rejected", kernel_says("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service"),
        "Key was rejected", "gpuprov_module_signing_key"),
    Row("lockdown", kernel_says("Lockdown: modprobe: unsigned module loading is restricted; see man kernel_lockdown.7"),
        "kernel_lockdown.7", "Secure Boot off"),
    Row("secure-boot-unsigned", both(on_metal(), lambda x: with_kernel(x, secure_boot="enabled"), there(KEYS[0])),
        "has no signer",
        f"; dkms install nvidia/550.163.01 -k {RELEASE}; mokutil --import {KEYS[0]}", LIKELY),
    # The kernel may be older than what repositories keep.
    Row("headers-missing",
        on_metal(module=ModuleFile(), dkms="nvidia/550.163.01: added\n",
                 kernels=(InstalledKernel(RELEASE, headers=False, module=False),)),
        "dkms status: nvidia/550.163.01: added",
        f"apt-get install -y linux-headers-{RELEASE}; dkms autoinstall -k {RELEASE}; modprobe nvidia  # if no "
        "repository has them: boot the newest kernel: apt-get install linux-image-amd64"),
    Row("dkms-failed",
        on_metal(module=ModuleFile(), dkms="nvidia/550.163.01: added\n",
                 kernels=(InstalledKernel(RELEASE, headers=True, module=False),)),
        "dkms status: nvidia/550.163.01: added", f"dkms install nvidia/550.163.01 -k {RELEASE}"),
    # The installer without dkms registers nothing, and a new kernel comes.
    Row("module-missing",
        on_metal(module=ModuleFile(), dkms="",
                 kernels=(
                     InstalledKernel("6.1.0-12-amd64", headers=True, module=True),
                     InstalledKernel(RELEASE, headers=True, module=False),
                 )),
        "6.1.0-12-amd64 has it", "gpuprov install -e gpuprov_driver=runfile -e gpuprov_driver_version=550.163.01"),
    Row("module-vermagic", lambda x: metal(x, module=replace(metal(x).module, vermagic="6.1.0-12-amd64 SMP")),
        "vermagic 6.1.0-12-amd64", "dkms autoinstall"),
    Row("module-of-another-kernel", kernel_says("nvidia: disagrees about version of symbol module_layout"),
        "module_layout", "dkms autoinstall"),
    Row("module-blacklisted", both(on_metal(), text("/etc/modprobe.d/no.conf", "# site\nblacklist nvidia\n")),
        "/etc/modprobe.d/no.conf:2: blacklist nvidia", "sed -i '2s/^/#/' /etc/modprobe.d/no.conf"),
    # Debian's packages have the module by the name of nvidia-current.
    Row("module-not-loaded", on_metal(module=ModuleFile(f"{UPDATES}/nvidia-current.ko", RELEASE)),
        f"modinfo nvidia-current: {UPDATES}/nvidia-current.ko", "modprobe -a nvidia nvidia-uvm"),
    Row("module-not-loaded", on_metal(module=ModuleFile()), "a module of NVIDIA's is there", "modprobe -a nvidia"),
    Row("module-not-loaded", on_metal(), "/proc/driver/nvidia/version is not there", "modprobe -a nvidia nvidia-uvm"),
    Row("uvm-not-loaded",
        lambda x: with_driver(x, nodes=tuple(node for node in x.driver.nodes if "uvm" not in node.path)),
        "/proc/devices: no nvidia-uvm", "modprobe nvidia-uvm"),
    Row("next-kernel",
        lambda x: replace(
            with_kernel(x, container=""),
            dkms=DKMS + "installed",
            kernels=(InstalledKernel("6.1.0-99-amd64", headers=False, module=False),),
        ),
        "/lib/modules/6.1.0-99-amd64", "dkms autoinstall -k 6.1.0-99-amd64", LIKELY),
    Row("gsp-firmware-missing",
        log("nvidia 0000:01:00.0: Direct firmware load for nvidia/550.163.01/gsp_ga10x.bin failed with error -2"),
        "gsp_ga10x.bin", "gpuprov install"),
    # beclab/Olares' report, kernel 7.0 of Ubuntu 26.04.
    Row("bound-to-another", log("[  201.910514] NVRM: GPU 0000:01:00.0 is already bound to NovaCore."), "NovaCore",
        "nova_core"),
    Row("probe-not-called", log("NVRM: The NVIDIA probe routine was not called for 1 device(s)."), "1 device",
        "blacklist"),
    # NVIDIA's open kernel modules, kernel-open/nvidia/nv.c (nvidia_init_module): what comes of every failed start.
    Row("probe-failed",
        kernel_says("NVRM: GPU 0000:01:00.0: some reason that no rule knows.",
                    "NVRM: The NVIDIA probe routine failed for 1 device(s).",
                    "NVRM: None of the NVIDIA devices were initialized."),
        "NVRM: GPU 0000:01:00.0: some reason that no rule knows.", "nvidia-bug-report.sh; systemctl reboot"),
    Row("probe-failed", kernel_says("NVRM: None of the NVIDIA graphics adapters were initialized!"),
        "NVRM: None of the NVIDIA graphics adapters were initialized!", "systemctl reboot"),
    *(
        Row("needs-open-modules", both(log(*_NEEDS_OPEN), change), "requires use of", step)
        for change, step in (
            (host(), "gpuprov_kernel_module_type=open"),
            (both(installed(cuda_drivers="570"), host(driver_packaged="cuda-drivers")), "install -y nvidia-open"),
            # Ubuntu's and Debian's own, whose repositories have no nvidia-open.
            (both(installed(nvidia_driver_570="570"), host(driver_packaged="nvidia-driver-570")),
             "install -y nvidia-driver-570-open"),
            (both(installed(libcuda1="535.261.03-1"), host(driver_packaged="nvidia-kernel-dkms")),
             "install -y nvidia-open-kernel-dkms"),
        )
    ),
    # negativo17/nvidia-driver's report, a GT 1030 with 560.31.
    Row("needs-proprietary-modules",
        log("kernel: NVRM: The NVIDIA GPU 0000:09:00.0 (PCI ID: 10de:1d01)",
            "             NVRM: installed in this system is not supported by open",
            "             NVRM: nvidia.ko because it does not include the required GPU"),
        "not supported by open", "gpuprov_kernel_module_type=proprietary"),
    # open-gpu-kernel-modules' report of a 3050 Ti with 520.56.06.
    Row("branch-without-gpu",
        log("[  +0.000005] NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:25a0)",
            "              NVRM: installed in this system is not supported by the",
            "              NVRM: NVIDIA 520.56.06 driver release."),
        "520.56.06", "gpuprov install -e gpuprov_driver_version=580"),
    # An upgrade to the branch that left a GPU out; the first that a .run file is refused beside.
    *(
        Row("branch-without-gpu",
            both(gpu_ids("1db1"), change,
                 log("NVRM: installed in this system is not supported by the NVIDIA 590.48.01 driver release.")),
            "590.48.01", step)
        for change, step in (
            (host(driver_packaged="cuda-drivers"), "-e gpuprov_driver=packages -e gpuprov_driver_version=580"),
            (both(host(driver_packaged="nvidia-kernel-dkms"), installed(libcuda1="535.261.03-1")),
             "gpuprov uninstall; gpuprov install -e gpuprov_driver_version=580 -e gpuprov_driver=runfile"),
        )
    ),
    # Options reach a module by the name of its file, which in Debian's packages is another.
    *(
        Row("uvm-and-kaslr",
            both(log("nvidia-uvm: devmem_alloc_pagemap() err -34"), _with_module(name)),
            "err -34", f"echo options {name}-uvm uvm_disable_hmm=1 > ", LIKELY)
        for name in ("nvidia", "nvidia-current-open")
    ),
    Row("api-mismatch",
        log("NVRM: API mismatch: the client 'nvidia-smi' (pid 1) has the version 550.200.01, but",
            "NVRM: this kernel module has the version 550.163.01.  Please"),
        "550.200.01", "gpuprov install", LIKELY),
    Row("api-mismatch",
        log("NVRM: API mismatch: the client has the version 570.153.02, but",
            "NVRM: this kernel module has the version 570.144.  Please"),
        "570.153.02", "gpuprov install", LIKELY),
)  # fmt: skip

# -- on lab hosts: no hardware; dmesg reads a file, and /run/simgpu.conf says how the simulated GPUs are --------------
# Both end with a boot, as hardware's own state does. The kernel half of the driver is a copy in /run, too.

_ONE_GPU = "echo gpus=1 > /run/simgpu.conf"
_GPU, _OTHER_GPU = "0000:1b:00", "0000:2a:00"
_BUS = "/sys/bus/pci/devices"
# What the kernel shows, as a copy that a boot takes away.
_OWN_BUS = f"cp -a {_BUS} /run/bus; mount --bind /run/bus {_BUS}"
_OWN_DRIVER = "cp -a /proc/driver /run/driver; mount --bind /run/driver /proc/driver"


def dmesg(*lines: str) -> str:
    """Return the command by which the kernel's log has these lines."""
    text = "".join(f"<6>[  100.00000{number}] {line}\n" for number, line in enumerate(lines))
    return f"printf %s {shlex.quote(text)} >> /run/kernel.log"


def fails(code: int) -> str:
    """Return the command after which NVML, and with it the genuine nvidia-smi, ends with this error."""
    return f"echo error={code} > /run/simgpu.conf"


def _xid(*numbers: int) -> str:
    return dmesg(*(f"NVRM: Xid (PCI:{_GPU}): {number}, pid=7, name=trainer" for number in numbers))


_RESET_AFTER = (46, 48, 62, 63, 64, 95, 109, 110, 136, 140, 143, 151, 154, 155, 156, 158)
_INITRAMFS = "apt-get -qq install initramfs-tools"
_WELL = "rm /run/simgpu.conf"
_REPLACED = "rm -f /run/kernel.log /run/simgpu.conf"

GPU_GROUPS = (
    Group("a reset of the GPUs",
          (_xid(*_RESET_AFTER, 119),
           dmesg("NVRM: API mismatch: the client nvidia-smi (pid 7) has the version 550.1, but",
                 "NVRM: this kernel module has the version 550.2.  Please",
                 "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:1b:00.0)"),
           fails(15)),
          frozenset({*(f"xid-{number}" for number in _RESET_AFTER), "gsp-timeout", "nvidia-smi-15", "api-mismatch",
                    "bar-invalid"}),
          metal=True),
    Group("an NVLink 5 connection that fails", (_xid(145),), frozenset({"xid-144-150"}), metal=True),
    Group("broken memory while ECC is off", (_xid(168),), frozenset({"xid-168"}), metal=True),
    Group("a GPU that does not start",
          (_ONE_GPU,
           dmesg(f"NVRM: GPU {_GPU}.0: RmInitAdapter failed! (0x26:0x56:1474)",
                 f"NVRM: GPU at PCI:{_GPU}: GPU-0 has fallen off the bus.",
                 "NVRM: The NVIDIA probe routine failed for 1 device(s).")),
          frozenset({"fallen-off-bus", "init-failed", "probe-failed"}), metal=True),
    Group("a cable that is not plugged in",
          (dmesg(f"NVRM: GPU {_GPU}.0: GPU does not have the necessary power cables connected."), _xid(54), fails(8)),
          frozenset({"power-cables", "xid-54", "nvidia-smi-8"}), metal=True),
    Group("a GPU that the driver does not serve, as the kernel shows it",
          (_OWN_DRIVER, "rm -r /proc/driver/nvidia/gpus/0000:2a*", fails(17)),
          frozenset({"gpus-fewer", "nvidia-smi-17"}), metal=True),
    Group("an interrupt that does not come", (fails(11),), frozenset({"nvidia-smi-10"}), metal=True),
    Group("no interrupt", (dmesg(f"NVRM: Can't find an IRQ for your NVIDIA card! ({_GPU}.0)"), _ONE_GPU),
          frozenset({"no-interrupt"}), metal=True, quiet=frozenset({"nvidia-smi-fewer"})),
    Group("an NVLink that fails", (_xid(74), _ONE_GPU), frozenset({"xid-74"}), metal=True,
          quiet=frozenset({"nvidia-smi-fewer"})),
    # The genuine nvidia-smi opens the simulated driver, which waits for a writer.
    Group("a GPU that hangs", ("mkfifo /run/simgpu.conf",), frozenset({"nvidia-smi-124"}), metal=True),
    Group("programs that have failed on a GPU", (_xid(31, 43, 92, 94),),
          frozenset({"xid-31", "xid-43", "xid-92", "xid-94"}),
          then={"xid-31": "sed -i '/: 31,/d; /: 43,/d' /run/kernel.log", "xid-92": _REPLACED}, metal=True, short=True),
    Group("a GPU for its vendor", (_xid(142, 157, 163), fails(14)),
          frozenset({"xid-142", "xid-157", "xid-163", "nvidia-smi-14"}),
          then={"xid-142": "sed -i '/: 163,/!d' /run/kernel.log; rm /run/simgpu.conf", "xid-163": _REPLACED},
          metal=True),
    Group("nvidia-smi's other exit codes", (_ONE_GPU,),
          frozenset({"nvidia-smi-fewer", "nvidia-smi-4", "nvidia-smi-6", "nvidia-smi-9", "node-does-not-open",
                    "nvidia-smi-12", "nvidia-smi-255", "nvidia-smi-fails"}),

          then={
              "nvidia-smi-fewer": fails(4),
              "nvidia-smi-4": fails(6),
              "nvidia-smi-6": fails(12),
              "nvidia-smi-12": fails(255),
              "nvidia-smi-255": fails(19),
              "nvidia-smi-fails": fails(9),
              "nvidia-smi-9": _WELL,
          },
          metal=True),
    Group("an nvidia-smi of another driver", (fails(13),), frozenset({"nvidia-smi-13", "nvidia-smi-3"}),
          then={"nvidia-smi-13": fails(3), "nvidia-smi-3": _WELL}),
    Group("modes of GPUs that keep programs out",
          ("mkdir -p /run/simgpu; echo 2 > /run/simgpu/compute-mode-0; echo 3 > /run/simgpu/compute-mode-1",
           "echo 1 > /run/simgpu/mig-1"),
          frozenset({"compute-prohibited", "compute-exclusive", "mig-without-instances"}), short=True),
    Group("memory rows and a fabric",
          ("mkdir -p /run/simgpu; echo 1 > /run/simgpu/remap-failed-0; echo 2 > /run/simgpu/fabric-1",),
          frozenset({"row-remap-failed", "fabric-state"}),
          then={"row-remap-failed": "rm /run/simgpu/remap-failed-0", "fabric-state": "rm /run/simgpu/fabric-1"}),
    Group("another driver has the GPUs",
          (_INITRAMFS, _OWN_BUS, f"for gpu in {_BUS}/*/driver; do ln -sfn ../../drivers/nouveau $gpu; done",
           "rm /etc/modprobe.d/gpuprov-nouveau.conf 2>/dev/null; true",
           dmesg(f"NVRM: GPU {_GPU}.0 is already bound to nouveau.",
                 "NVRM: The NVIDIA probe routine was not called for 2 device(s)."),
           _ONE_GPU),
          frozenset({"gpu-nouveau", "bound-to-another", "probe-not-called"}), metal=True),
    Group("GPUs for virtual machines",
          (_INITRAMFS, _OWN_BUS, _OWN_DRIVER, "rm -r /proc/driver/nvidia/gpus/*",
           f"for gpu in {_BUS}/*/driver; do ln -sfn ../../drivers/vfio-pci $gpu; done",
           "echo 'options vfio-pci ids=10de:2330' > /etc/modprobe.d/vfio.conf"),
          frozenset({"gpu-vfio"}), metal=True),
    Group("GPUs that the driver leaves out",
          (_INITRAMFS, _OWN_DRIVER, "rm -r /proc/driver/nvidia/gpus/*",
           "sed -i 's/^ExcludedGpus: .*/ExcludedGpus: \"GPU-1\"/' /proc/driver/nvidia/params",
           "echo 'options nvidia NVreg_ExcludedGpus=GPU-1' > /etc/modprobe.d/leave-out.conf"),
          frozenset({"gpu-excluded"}), metal=True),
    Group("a GPU that was there",
          (_OWN_BUS, _OWN_DRIVER, f"rm -r {_BUS}/0000:2a* /proc/driver/nvidia/gpus/0000:2a*", _ONE_GPU),
          frozenset({"gpus-lost"}), metal=True),
    Group("no GPU in the machine", (_OWN_BUS, _OWN_DRIVER, f"rm -r {_BUS}/* /proc/driver/nvidia/gpus/*"),
          frozenset({"no-gpu"}), then={"no-gpu": f"umount {_BUS} /proc/driver"}, short=True),
    Group("an IOMMU that refuses",
          ("apt-get -qq install grub-common grub2-common; mkdir -p /boot/grub",
           dmesg(f"DMAR: [DMA Read NO_PASID] Request device [{_GPU[5:]}.0] fault addr 0x1000"), _ONE_GPU),
          frozenset({"iommu-fault"}), editor="sed -i 's/^GRUB_CMDLINE_LINUX=.*/GRUB_CMDLINE_LINUX=\"iommu=pt\"/' $file",
          metal=True),
    Group("an AppArmor that denies",
          ("apt-get -qq install apparmor",
           dmesg('audit: type=1400 apparmor="DENIED" operation="open" profile="d" name="/dev/nvidia0" comm="smi"')),
          frozenset({"apparmor-denies"}), then={"apparmor-denies": _REPLACED}),
)  # fmt: skip
# Kind (test_doctor_typed.py) → rules whose command no test types.
KERNEL_EXCUSES = {
    "firmware": {"key-rejected", "lockdown", "secure-boot-unsigned"},
    "system": {"wsl-with-driver", "wsl-without-gpu"},
    "container host": {"driver-outside"},
    "kernel": {"branch-without-gpu", "dkms-failed", "gpu-too-old-or-new", "gpu-unbound", "gsp-firmware-missing",
        "headers-missing", "module-blacklisted", "module-missing", "module-not-loaded", "module-of-another-kernel",
        "module-vermagic", "modules-disabled", "needs-open-modules", "needs-proprietary-modules", "next-kernel",
        "uvm-and-kaslr", "uvm-not-loaded"},
}  # fmt: skip
