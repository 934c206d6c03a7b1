"""Troubles of GPUs and of the kernel's half of the driver for test_doctor.py, on simulated GPUs.

A lab host has no hardware: the kernel's log is a file that the real dmesg reads, and /run/simgpu.conf says how the
simulated GPUs are. Both end with a boot, as hardware's own state does. Its kernel half is a copy in /run, too.
"""

import shlex

from tests.integration.doctor_typing import Group

_ONE_GPU = "echo gpus=1 > /run/simgpu.conf"
_GPU, _OTHER_GPU = "0000:1b:00", "0000:2a:00"
_BUS = "/sys/bus/pci/devices"
# What the kernel shows, as a copy that a boot takes away.
_OWN_BUS = f"cp -a {_BUS} /run/bus; mount --bind /run/bus {_BUS}"
_OWN_DRIVER = "cp -a /proc/driver /run/driver; mount --bind /run/driver /proc/driver"


def log(*lines: str) -> str:
    """Return the command by which the kernel's log has these lines."""
    text = "".join(f"<6>[  100.00000{number}] {line}\n" for number, line in enumerate(lines))
    return f"printf %s {shlex.quote(text)} >> /run/kernel.log"


def fails(code: int) -> str:
    """Return the command after which NVML, and with it the genuine nvidia-smi, ends with this error."""
    return f"echo error={code} > /run/simgpu.conf"


def _xid(*numbers: int) -> str:
    return log(*(f"NVRM: Xid (PCI:{_GPU}): {number}, pid=7, name=trainer" for number in numbers))


_RESET_AFTER = (46, 48, 62, 63, 64, 95, 109, 110, 136, 140, 143, 151, 154, 155, 156, 158)
_INITRAMFS = "apt-get -qq install initramfs-tools"
_WELL = "rm /run/simgpu.conf"
_REPLACED = "rm -f /run/kernel.log /run/simgpu.conf"

GPU_GROUPS = (
    Group("a reset of the GPUs",
          (_xid(*_RESET_AFTER, 119),
           log("NVRM: API mismatch: the client nvidia-smi (pid 7) has the version 550.1, but",
               "NVRM: this kernel module has the version 550.2.  Please", "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:1b:00.0)"),
           fails(15)),
          frozenset({*(f"xid-{number}" for number in _RESET_AFTER), "gsp-timeout", "nvidia-smi-15", "api-mismatch",
                    "bar-invalid"}),
          metal=True),
    Group("an NVLink 5 connection that fails", (_xid(145),), frozenset({"xid-144-150"}), metal=True),
    Group("broken memory while ECC is off", (_xid(168),), frozenset({"xid-168"}), metal=True),
    Group("a GPU that does not start",
          (_ONE_GPU,
           log(f"NVRM: GPU {_GPU}.0: RmInitAdapter failed! (0x26:0x56:1474)",
               f"NVRM: GPU at PCI:{_GPU}: GPU-0 has fallen off the bus.",
               "NVRM: The NVIDIA probe routine failed for 1 device(s).")),
          frozenset({"fallen-off-bus", "init-failed", "probe-failed"}), metal=True),
    Group("a cable that is not plugged in",
          (log(f"NVRM: GPU {_GPU}.0: GPU does not have the necessary power cables connected."), _xid(54), fails(8)),
          frozenset({"power-cables", "xid-54", "nvidia-smi-8"}), metal=True),
    Group("a GPU that the driver does not serve, as the kernel shows it",
          (_OWN_DRIVER, "rm -r /proc/driver/nvidia/gpus/0000:2a*", fails(17)),
          frozenset({"gpus-fewer", "nvidia-smi-17"}), metal=True),
    Group("an interrupt that does not come", (fails(11),), frozenset({"nvidia-smi-10"}), metal=True),
    Group("no interrupt", (log(f"NVRM: Can't find an IRQ for your NVIDIA card! ({_GPU}.0)"), _ONE_GPU),
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
           log(f"NVRM: GPU {_GPU}.0 is already bound to nouveau.",
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
           log(f"DMAR: [DMA Read NO_PASID] Request device [{_GPU[5:]}.0] fault addr 0x1000"), _ONE_GPU),
          frozenset({"iommu-fault"}), editor="sed -i 's/^GRUB_CMDLINE_LINUX=.*/GRUB_CMDLINE_LINUX=\"iommu=pt\"/' $file",
          metal=True),
    Group("an AppArmor that denies",
          ("apt-get -qq install apparmor",
           log('audit: type=1400 apparmor="DENIED" operation="open" profile="docker" name="/dev/nvidia0" comm="smi"')),
          frozenset({"apparmor-denies"}), then={"apparmor-denies": _REPLACED}),
)  # fmt: skip
