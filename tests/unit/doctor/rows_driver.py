"""Troubles of the driver's libraries and of device nodes, with what the doctor must say of each.

Rows are made-up facts, and groups real troubles of a lab host, whose commands test_doctor.py types.
Messages are recorded where a row says from where: drivers and installers in Debian chroots, NVIDIA's open kernel
modules and documentation, bug reports of the projects named. All others follow the known formats and were written here.
"""

from dataclasses import replace

from gpuprov.boot.prepare import content_of
from gpuprov.checks.cuda.compatibility import Incompatibility
from gpuprov.doctor.finding import LIKELY, WARNING
from gpuprov.doctor.snapshot import Containers, Loaded, ModuleFile, Smi
from gpuprov.driver.run_files import INSTALLER_STATE
from gpuprov.facts.boot import PERSISTENCE, UNITS
from gpuprov.facts.kernels import InstalledKernel
from gpuprov.packages.interface import PackageFacts
from tests.integration.doctor_typing import NO_REFRESH, OTHER, OTHER_CUDA, Group
from tests.lab.fixtures import DRIVER
from tests.triplet import LIBRARIES
from tests.unit.doctor.host import SMI, with_driver, with_kernel
from tests.unit.doctor.ill import (
    FABRIC,
    NODES,
    Change,
    Row,
    both,
    divided_without_instances,
    docker,
    fabric,
    fabric_says,
    hidden,
    host,
    installed,
    mismatched,
    nvidias,
    report,
    reports,
    smi,
    switches,
    text,
    there,
    unit,
    without,
)
from tests.unit.fake_host import RELEASE

# glibc 2.36's words.
PRELOAD_SAID = (
    "ERROR: ld.so: object '/opt/none.so' from /etc/ld.so.preload cannot be preloaded (cannot open shared object file): "
    "ignored."
)


def _next_boot(kernel: InstalledKernel) -> Change:
    """A machine of its own whose driver was upgraded and not loaded; `kernel` boots next."""
    return lambda x: replace(with_kernel(mismatched(x), container=""), kernels=(kernel,))


_ICD = "/etc/vulkansc/icd.d/nvidia_icd_vksc.json"
_IN_PROGRESS = reports("<fabric>\n<state>In Progress</state>\n<status>N/A</status>\n</fabric>")
DRIVER_ROWS = (
    # -- driver libraries
    Row("driver-incomplete", there("/var/lib/gpuprov/driver-incomplete"), "driver-incomplete", "gpuprov install"),
    Row("driver-missing",
        lambda x: replace(with_driver(x, library_version=""), library_files={}, loader={}, specification_fault=""),
        "none of the loader's folders", "gpuprov install"),
    Row("nvml-missing",
        lambda x: replace(
            with_driver(x, library_version=""), library_files={f"{LIBRARIES}/libcuda.so.550.163.01": "550.163.01"}
        ),
        f"ls -L {LIBRARIES}/libnvidia-ml.so.1", "gpuprov install"),
    Row("nvml-missing",
        # The first of them, cuda-drivers, has no file; the firmware is in another one.
        both(installed(cuda_drivers="550.163.01-1", libnvidia_compute_550="550.163.01-1", nvidia_firmware_550="550"),
             host(driver_packaged="cuda-drivers"),
             lambda x: replace(
                 with_driver(x, library_version=""), library_files={f"{LIBRARIES}/libcuda.so.550.163.01": "550.163.01"}
             )),
        "libcuda.so.550.163.01 is there",
        "apt-get install -y --reinstall cuda-drivers libnvidia-compute-550 nvidia-firmware-550"),
    # The installer's record, before and after the lines of other files.
    Row("vulkan-files-missing",
        text(INSTALLER_STATE, f"NVIDIA Unix driver (550.163.01)\n0: {_ICD}\n12 0644\n1: /etc/vulkan/link\n", _ICD),
        f"ls {_ICD}: No such file or directory", "d=$(mktemp -d)/run; sh /var/cache/gpuprov/driver/550.163.01.run "
        f"--extract-only --target $d; install -D -m 644 $d/nvidia_icd_vksc.json {_ICD}; ", WARNING),
    Row("version-mismatch", mismatched, "/var/log/dpkg.log:812:",
        "gpuprov install -e gpuprov_driver=runfile -e gpuprov_driver_version=550.163.01"),
    # The distribution's libraries in a container, whose host has another driver now; gpuprov holds them, or nobody.
    Row("version-mismatch", both(mismatched, host(driver_packaged="libnvidia-ml1", packages=PackageFacts(
            "apt", {"libnvidia-ml1": "550.200.01-1"}, held_here=frozenset({"libnvidia-ml1"})))),
        "/var/log/dpkg.log:812:", "gpuprov uninstall; gpuprov install -e gpuprov_driver=runfile -e"),
    Row("version-mismatch", both(mismatched, host(driver_packaged="libnvidia-ml1")), "/var/log/dpkg.log:812:",
        "apt-get purge '*nvidia*'; gpuprov install -e gpuprov_driver=runfile -e"),
    Row("version-mismatch", lambda x: with_kernel(mismatched(x), container=""),
        "libnvidia-ml.so.550.200.01: 550.200.01", "systemctl reboot  # or, with nothing on the GPUs: modprobe -r"),
    # What a reboot alone leaves without a driver, or with the earlier one.
    Row("version-mismatch", both(_next_boot(InstalledKernel(RELEASE, headers=True, module=False)),
                                 lambda x: replace(x, dkms="nvidia/550.200.01: added\n")),
        "550.200.01", f"linux-headers-{RELEASE}; dkms autoinstall -k {RELEASE}; systemctl reboot"),
    Row("version-mismatch", both(_next_boot(InstalledKernel(RELEASE, headers=True, module=True)),
                                 lambda x: replace(x, module=ModuleFile("/nvidia.ko", "550.163.01"))),
        "550.200.01", "gpuprov install -e gpuprov_driver=runfile -e gpuprov_driver_version=550.163.01"),
    Row("version-mismatch", both(_next_boot(InstalledKernel("6.1.0-99-amd64", headers=False, module=False)),
                                 lambda x: replace(x, dkms="nvidia/550.200.01: added\n")),
        "550.200.01", "linux-headers-6.1.0-99-amd64; dkms autoinstall -k 6.1.0-99-amd64; systemctl reboot"),
    Row("version-mismatch", _next_boot(InstalledKernel("6.1.0-99-amd64", headers=True, module=True)),
        "550.200.01", "systemctl reboot  # or"),
    Row("library-not-in-cache", both(without("/etc/ld.so.cache"), lambda x: replace(x, loader={})),
        "ls /etc/ld.so.cache: No such file", "ldconfig"),
    Row("library-not-in-cache", lambda x: replace(x, loader={}), "no libnvidia-ml.so.1", "ldconfig", LIKELY),
    Row("library-not-in-cache", lambda x: replace(x, loader={"libnvidia-ml.so.1": "/usr/lib/libnvidia-ml.so.1"}),
        "no libcuda.so.1, or it leads to no file", "ldconfig", LIKELY),
    Row("cuda-stub",
        both(text("/etc/ld.so.conf.d/cuda.conf", "/usr/local/cuda/lib64/stubs\n"),
             lambda x: replace(x, loader={**x.loader, "libcuda.so.1": "/usr/local/cuda/lib64/stubs/libcuda.so.1"})),
        "/etc/ld.so.conf.d/cuda.conf:1", "sed -i '1s/^/#/' /etc/ld.so.conf.d/cuda.conf; ldconfig"),
    Row("cuda-stub-configured", text("/etc/ld.so.conf.d/cuda.conf", "/usr/local/cuda/compat\n"), "cuda.conf:1",
        "ldconfig", WARNING),
    Row("drivers-mixed",
        both(there("/var/lib/nvidia/dirs"), installed(libcuda1="535.261.03-1", nvidia_smi="535.261.03-1"),
             host(driver_packaged="libcuda1")),
        "libcuda1", "nvidia-uninstall --silent; apt-get install -y --reinstall libcuda1 nvidia-smi", LIKELY),
    Row("driver-old", lambda x: with_driver(x, kernel_version="535.261.03", library_version="535.261.03"),
        "libnvidia-ml.so.1: 535.261.03; the advisories are of ", "gpuprov install -e gpuprov_driver_version=5",
        WARNING),
    Row("known-problem",
        lambda x: with_kernel(
            with_driver(x, kernel_version="595.104.02", library_version="595.104.02"), page_size=65536
        ),
        "driver-64k-pages: driver >=590.44.01,<=610.43.03; page size 65536",
        "gpuprov install -e gpuprov_driver_version=580.173.02", WARNING),
    Row("known-problem",
        lambda x: with_kernel(
            with_driver(x, kernel_version="", library_version="580.142"), release="7.1.2", container=""
        ),
        "driver-580-linux-7.1: driver >=580.142,<580.159.04; kernel >=7.1",
        "gpuprov install -e gpuprov_driver_version=580.178.04", LIKELY),
    Row("known-problem", installed(nvidia_container_toolkit="1.20.1-1", podman="4.9.3"),
        "issues/1860", "gpuprov install -e gpuprov_toolkit=bundled", WARNING),
    Row("drivers-several",
        lambda x: replace(x, library_files={**x.library_files, f"{LIBRARIES}/libcuda.so.535.261.03": "535.261.03"}),
        "libcuda.so.535.261.03: 535.261.03", f"rm {LIBRARIES}/libcuda.so.535.261.03; ldconfig", WARNING),
    Row("nvidia-smi-missing", lambda x: replace(x, smi=Smi(reason="nvidia-smi is not installed")),
        "command -v nvidia-smi", "gpuprov install"),
    # Recorded from nvidia-smi 535 and 550 (exit codes, message on stdout); the others from its manual.
    Row("nvidia-smi-3", smi(3, "Operation not supported"), "exited 3", "gpuprov install"),
    Row("nvidia-smi-4", smi(4, "Failed to initialize NVML: Insufficient Permissions"), "Insufficient", "chmod 0666"),
    Row("nvidia-smi-6", smi(6, "No devices were found"), "exited 6: No devices were found", "dmesg"),
    Row("nvidia-smi-8", smi(8, "power cables"), "exited 8", "poweroff"),
    Row("nvidia-smi-9",
        smi(9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure "
            "that the latest NVIDIA driver is installed and running."),
        "couldn't communicate", "modprobe"),
    # The genuine nvidia-smi exits with NVML's number.
    Row("nvidia-smi-10", smi(11, "Interrupt Request Issue"), "exited 11", "irq"),
    Row("nvidia-smi-12", smi(12, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system."), "libnvidia-ml.so",
        "ldconfig"),
    Row("nvidia-smi-13", smi(13, "Function not found"), "exited 13", "gpuprov install"),
    Row("nvidia-smi-14", smi(14, "infoROM is corrupted"), "infoROM", "RMA"),
    Row("nvidia-smi-15",
        smi(15,
            "Unable to determine the device handle for GPU0000:17:00.0: GPU is lost.  Reboot the "
            "system to recover this GPU"),
        "GPU is lost", "systemctl reboot"),
    Row("nvidia-smi-17", smi(17, "system call failed"), "exited 17", "dmesg"),
    Row("nvidia-smi-18", smi(18, "Failed to initialize NVML: Driver/library version mismatch"), "mismatch",
        "gpuprov install"),
    Row("nvidia-smi-124", smi(124), "exited 124: (silent)", "systemctl reboot"),
    Row("nvidia-smi-255", smi(255, "Failed to initialize NVML: Unknown Error"), "Unknown Error", "dmesg"),
    Row("nvidia-smi-fails", smi(77, "who knows"), "exited 77: who knows", "nvidia-smi"),
    Row("nvidia-smi-fewer", report('<gpu id="00000000:1B:00.0">', "<gpu_gone>"), "1 GPU;", "nvidia-smi -L", LIKELY),
    # NVIDIA/gpu-operator issue 1845.
    Row("mig-pending", report("<pending_mig>Disabled", "<pending_mig>Enabled"), "pending_mig is Enabled",
        "nvidia-smi --gpu-reset -i 0", WARNING),
    Row("mig-without-instances", divided_without_instances, "current_mig is Enabled", "nvidia-smi -i 0 -mig 0"),
    Row("compute-prohibited", report("<compute_mode>Default", "<compute_mode>Prohibited"), "GPU 0, 1", "-c DEFAULT"),
    Row("compute-exclusive", report("<compute_mode>Default", "<compute_mode>Exclusive_Process"), "compute_mode",
        "-c DEFAULT", WARNING),
    Row("row-remap-failed",
        reports("<remapped_rows>\n<remapped_row_failure>Yes</remapped_row_failure>\n</remapped_rows>"),
        "failure", "RMA", LIKELY),
    Row("row-remap-pending",
        reports("<remapped_rows>\n<remapped_row_pending>Yes</remapped_row_pending>\n</remapped_rows>"),
        "pending", "--gpu-reset", WARNING),
    Row("confidential-not-ready", unit("gpuprov-confidential.service", active="failed", result="exit-code"),
        "failed, exit-code", "nvidia-smi conf-compute -q"),
    # Reported in NVIDIA/gpu-operator, issue 2868.
    Row("peermem-symbols",
        lambda x: replace(
            x, kernel_log=("nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client",)),
        "disagrees about version", "modprobe nvidia-peermem", WARNING),
    Row("gpudirect-failed", unit("gpuprov-gpudirect.service", active="failed", result="exit-code"),
        "failed, exit-code", "journalctl -b -u gpuprov-gpudirect.service"),
    Row("mps-failed", unit("gpuprov-mps.service", active="failed", result="exit-code"), "failed, exit-code",
        "systemctl restart gpuprov-mps.service"),
    Row("unlicensed",
        reports("<vgpu_software_licensed_product>\n<license_status>Unlicensed (Unrestricted)</license_status>\n"
                "</vgpu_software_licensed_product>"),
        "license_status of GPU 0, 1", "systemctl restart nvidia-gridd"),
    Row("fabric-state", both(unit(FABRIC), _IN_PROGRESS), "state", "systemctl restart nvidia-fabricmanager", LIKELY),
    Row("fabric-state", _IN_PROGRESS, "state", "nvidia-smi -q | grep -A4 Fabric  # the fabric manager runs outside",
        LIKELY),
    Row("fabric-state", both(fabric(rack=True), _IN_PROGRESS), "state",
        "systemctl status nvidia-imex; nvidia-imex-ctl -N", LIKELY),
    Row("fabric-hidden", fabric(hidden="8 GPUs that NVSwitches join; not loaded: mlx5_ib"), "not loaded: mlx5_ib",
        "modprobe -a mlx5_ib ib_umad && gpuprov install"),
    Row("fabric-manager-missing", switches(), "not-found",
        "apt-get install -y 'nvidia-fabricmanager-550=550.163.01-*'; systemctl enable --now nvidia-fabricmanager"),
    Row("fabric-manager-missing", both(unit(FABRIC, active="failed", result="exit-code"), switches()),
        "failed, exit-code", "enable --now"),
    # Recorded by operators of B200 hosts.
    Row("fabric-manager-missing",
        both(unit(FABRIC, active="failed", result="exit-code"), switches(),
             fabric_says('Kernel module "ib_umad" has not been loaded, fabric manager cannot be started')),
        '"ib_umad" has not been loaded', "modprobe -a mlx5_ib ib_umad && systemctl restart nvidia-fabricmanager"),
    # siderolabs/extensions pull request 717.
    Row("fabric-manager-missing",
        both(unit(FABRIC, active="failed", result="exit-code"), switches(),
             fabric_says("request to query NVSwitch device information from NVSwitch driver failed with error:WARNING "
                         "Nothing to do [NV_WARN_NOTHING_TO_DO]")),
        "NV_WARN_NOTHING_TO_DO", "gpuprov install  # which installs nvlsm"),
    Row("fabric-manager-version", both(unit(FABRIC), switches("550.144.03")), "nv-fabricmanager --version: 550.144.03",
        "systemctl restart nvidia-fabricmanager"),
    # -- device nodes
    Row("nodes-missing", both(unit(NODES), lambda x: with_driver(x, present=x.driver.present[1:])),
        "ls /dev/nvidia0: No such", f"systemctl restart {NODES}"),
    Row("nodes-missing", both(there("/usr/bin/nvidia-modprobe"), lambda x: with_driver(x, present=())),
        "ls /dev/nvidia0", "nvidia-modprobe -c 0 -c 1 -u -m"),
    Row("node-wrong",
        both(unit(NODES),
             lambda x: replace(with_driver(x, present=x.driver.present[1:]), in_place={"/dev/nvidia0": "directory"})),
        "ls -ld /dev/nvidia0: directory; it should be char 195:0", "rm -rf /dev/nvidia0; systemctl restart"),
    Row("nodes-closed",
        lambda x: replace(
            with_driver(x, closed=tuple(node for node in x.driver.nodes if node.path == "/dev/nvidiactl")),
            node_modes={**x.node_modes, "/dev/nvidiactl": 0o600},
        ),
        "stat -c %a /dev/nvidiactl: 600", "chmod 0666 /dev/nvidiactl", LIKELY),
    Row("dev-char-links",
        both(nvidias, docker(cgroup_driver="systemd"), lambda x: replace(x, links_missing=("/dev/char/195:0",))),
        "/dev/char/195:0", "create-dev-char-symlinks", LIKELY),
    Row("dev-char-links",
        both(nvidias, without("/usr/bin/nvidia-ctk"), docker(cgroup_driver="systemd"),
             lambda x: replace(x, links_missing=("/dev/char/195:0",))),
        "/dev/char/195:0", "ln -s /dev/nvidia0 /dev/char/195:0", LIKELY),
    # -- what programs get in place of the driver's files
    Row("library-hidden", hidden(), "/etc/ld.so.conf.d/libc.conf:2 names /usr/local/lib",
        "rm /usr/local/lib/libnvidia-ml.so.1 /usr/local/lib/libnvidia-ml.so.535.261.03; ldconfig"),
    Row("library-hidden", hidden(package="stale-driver"), "/usr/local/lib/libnvidia-ml.so.535.261.03",
        "apt-get purge stale-driver; ldconfig"),
    Row("library-hidden", hidden(reason="/etc/ld.so.preload:1 names /opt/libnvidia-ml.so.1"), "/etc/ld.so.preload:1",
        "sed -i 's|/opt/libnvidia-ml.so.1||' /etc/ld.so.preload"),
    Row("library-hidden", hidden(reason="/etc/environment:3 sets LD_LIBRARY_PATH"), "/etc/environment:3",
        "sed -i -E '/^\\s*(export\\s+)?LD_LIBRARY_PATH=/d' /etc/environment", LIKELY),
    Row("preload-broken", lambda x: replace(x, preload_message=PRELOAD_SAID),
        "/bin/true: ERROR: ld.so: object '/opt/none.so'", "sed -i 's|/opt/none.so||' /etc/ld.so.preload"),
    Row("driver-damaged", host(driver_damage=f"{LIBRARIES}/libcuda.so.550.163.01: its end is missing (file too short)"),
        "file too short", "gpuprov install"),
    Row("driver-damaged",
        both(installed(libcuda1="550.163.01-2", nvidia_smi="550.163.01-2", nvidia_kernel_dkms="550.163.01-2"),
             host(driver_packaged="nvidia-kernel-dkms",
                  driver_damage="the loader's folders: no libcuda.so.550.163.01")),
        "no libcuda.so.550.163.01", "apt-get install -y --reinstall libcuda1 nvidia-kernel-dkms nvidia-smi"),
    Row("nvidia-smi-hidden",
        lambda x: replace(
            x,
            smi_path="/usr/bin/nvidia-smi",
            other_smi=Smi(13, "library version does not match", path="/usr/local/bin/nvidia-smi"),
        ),
        "/usr/local/bin/nvidia-smi -q -x exited 13", "mv /usr/local/bin/nvidia-smi /usr/local/bin/nvidia-smi.old"),
    Row("nvidia-smi-hidden",
        lambda x: replace(x, smi_path="/usr/bin/nvidia-smi",
                          other_smi=replace(x.smi, path="/usr/local/bin/nvidia-smi")),
        "command -v nvidia-smi: /usr/local/bin/nvidia-smi", "mv /usr/local/bin/nvidia-smi", WARNING),
    Row("nvidia-smi-replaced",
        lambda x: replace(
            x, smi=Smi(0, f"Welcome to our cluster\n{SMI}"), smi_path="/usr/bin/nvidia-smi", smi_is_script=True
        ),
        "Welcome to our cluster", "mv /usr/bin/nvidia-smi /usr/bin/nvidia-smi.old; gpuprov install"),
    Row("nvidia-smi-replaced",
        both(installed(nvidia_smi="550.163.01-2"), host(driver_packaged="libnvidia-ml1"),
             lambda x: replace(x, smi=Smi(127, "exec: gone"), smi_path="/usr/bin/nvidia-smi", smi_is_script=True)),
        "/usr/bin/nvidia-smi -q -x exited 127", "apt-get install -y --reinstall nvidia-smi"),
)  # fmt: skip


# -- running containers ------------------------------------------------------------------------------------------------
# As test_cuda_libraries.py has it of an image with a libcuda of its own.
_WRONG = Incompatibility(
    (803, 35, 36), "/opt/own/libcuda.so.1 is of driver 535.261.03, the loaded kernel module is 550.163.01",
    "/opt/own/libcuda.so.535.261.03: LD_LIBRARY_PATH has /opt/own",
    "correct LD_LIBRARY_PATH: in the image, or in the call, such as docker run --env LD_LIBRARY_PATH=",
    library="libcuda.so.1",
)  # fmt: skip

# Of a container that runs since before the host's driver was updated.
_UPDATED = Incompatibility((803, 35, 36), _WRONG.what, _WRONG.evidence, "docker restart {}", library="libcuda.so.1")


def _containers(*examined: Loaded) -> Change:
    return lambda x: replace(x, containers=Containers(examined))


LIBRARY_ROWS = (
    Row("container-library",
        _containers(Loaded("docker", "sound"), Loaded("docker", "trainer", (_WRONG,)),
                    Loaded("podman", "b", (_WRONG,))),
        "trainer (docker): /opt/own/libcuda.so.535.261.03: LD_LIBRARY_PATH has /opt/own",
        "gpuprov cuda trainer  # correct LD_LIBRARY_PATH"),
    Row("container-library", _containers(*(Loaded("docker", f"job-{number}", (_WRONG,)) for number in range(9))),
        "and 4 more containers", "gpuprov cuda job-0"),
    Row("container-library",
        _containers(*(Loaded("docker", one, (replace(_UPDATED, next_step=f"docker restart {one}"),)) for one in "ab"),
                    Loaded("docker", "trainer", (_WRONG,))),
        "trainer (docker): ", "docker restart a b"),
    Row("containers-left-out",
        lambda x: replace(x, containers=Containers((Loaded("docker", "a"),), 7, "not done after 20 s")), "examined: 1",
        "gpuprov cuda CONTAINER", WARNING),
)  # fmt: skip

# -- on lab hosts -----------------------------------------------------------------------------------------------------

_PERSISTENCE_UNIT = content_of(f"{UNITS}/{PERSISTENCE}").decode()
# systemd gives a path up that starts its unit too often. What mostly ends it, inotify's limits, hosts share.
_FAILED_PATH = """set -e; d=/run/systemd/system/gpuprov-refresh.path.d; mkdir -p $d
printf '[Path]\\nPathExists=/\\nTriggerLimitIntervalSec=1h\\nTriggerLimitBurst=2\\n' > $d/limit.conf
systemctl daemon-reload; systemctl restart gpuprov-refresh.path
until systemctl is-failed --quiet gpuprov-refresh.path; do sleep 0.1; done
rm -r $d; systemctl daemon-reload"""


def _wrapper(path: str, banner: str) -> str:
    script = f'#!/bin/sh\\necho {banner}\\nexec /usr/bin/nvidia-smi "$@"\\n'
    return f"printf '{script}' > {path}; chmod 755 {path}"


DRIVER_GROUPS = (
    Group("programs get other files than the driver's",
          (f"cp /root/{OTHER} /root/{OTHER_CUDA} /usr/local/lib/; ldconfig",
           "rm -r /etc/vulkan /etc/OpenCL",
           _wrapper("/usr/local/bin/nvidia-smi", "welcome")),
          frozenset({"library-hidden", "nvidia-smi-hidden", "vulkan-files-missing"})),
    Group("a preload that can't be loaded, a wrapper in the driver's place",
          ("mkdir -p /root/kept-smi; cp /usr/bin/nvidia-smi /root/kept-smi/; rm /usr/bin/nvidia-smi",
           "printf '#!/bin/sh\\necho welcome\\nexec /root/kept-smi/nvidia-smi \"$@\"\\n' > /usr/bin/nvidia-smi",
           "chmod 755 /usr/bin/nvidia-smi; echo /opt/none.so > /etc/ld.so.preload"),
          frozenset({"preload-broken", "nvidia-smi-replaced"})),
    Group("files of the driver are gone or broken",
          (f"truncate -s 1000 {LIBRARIES}/libcuda.so.{DRIVER}; rm /usr/bin/nvidia-smi",),
          frozenset({"driver-damaged", "nvidia-smi-missing"})),
    Group("device nodes are gone, and a file lies in the place of one", ("rm /dev/nvidia0",),
          frozenset({"nodes-missing", "node-wrong"}),
          then={"nodes-missing": "rm /dev/nvidiactl; touch /dev/nvidiactl"}),
    Group("libraries of another driver than the loaded module's",
          (f"cp /root/{OTHER} {LIBRARIES}/; ln -sf {OTHER} {LIBRARIES}/libnvidia-ml.so.1",),
          frozenset({"version-mismatch", "nvidia-smi-18", "driver-damaged", "drivers-several"})),
    Group("the loader's cache has a stub",
          (f"mkdir -p /usr/local/cuda/lib64/stubs; cp /root/{OTHER_CUDA} /usr/local/cuda/lib64/stubs/libcuda.so.1",
           "echo /usr/local/cuda/lib64/stubs > /etc/ld.so.conf.d/000-cuda.conf; ldconfig"),
          frozenset({"cuda-stub"})),
    Group("units that run at boot have failed",
          (_FAILED_PATH,
           f"{NO_REFRESH}; mv /usr/lib/gpuprov/boot.pyz /root/kept-boot",
           "systemctl restart gpuprov-nodes.service; systemctl restart gpuprov-refresh.service; true",
           "mv /root/kept-boot /usr/lib/gpuprov/boot.pyz"),
          frozenset({"nodes-unit-failed", "refresh-path-failed", "refresh-unit-failed"})),
    Group("the driver is gone", ("nvidia-uninstall --silent; touch /var/lib/gpuprov/driver-incomplete; true",),
          frozenset({"driver-incomplete", "driver-missing"})),
    Group(
        "a daemon of the driver's that has failed, a run that was cut off",
        (
            # As a package brings it: in a system container gpuprov leaves the GPUs to the machine around it.
            f"cat > {UNITS}/{PERSISTENCE} <<'end'\n{_PERSISTENCE_UNIT}end",
            "mv /usr/bin/nvidia-persistenced /root/kept-persistenced; systemctl daemon-reload",
            f"systemctl start {PERSISTENCE}; until systemctl is-failed --quiet {PERSISTENCE}; do sleep 0.2; done",
            "mv /root/kept-persistenced /usr/bin/nvidia-persistenced",
            "sed -i '$d' $(ls /var/lib/gpuprov/runs/*.jsonl | tail -1)",
        ),
        frozenset({"persistenced-failed", "run-cut-off"}),
    ),
)  # fmt: skip
# Kind (test_doctor_typed.py) → rules whose command no test types.
DRIVER_EXCUSES = {
    "firmware": {"mig-pending", "row-remap-pending"},
    "switches": {"fabric-hidden", "fabric-manager-missing", "fabric-manager-version"},
    "hardware": {"confidential-not-ready", "gpudirect-failed", "mps-failed", "peermem-symbols", "unlicensed"},
    "kernel": {"driver-old", "known-problem"},
}  # fmt: skip
