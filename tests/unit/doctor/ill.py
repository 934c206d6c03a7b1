"""Ways in which a healthy host can be ill, and the form of a row: a rule, its trouble, what is told of it."""

import json
from dataclasses import dataclass, replace
from typing import Any, Callable

from gpuprov.doctor.finding import CERTAIN
from gpuprov.doctor.snapshot import HostSnapshot, ModuleFile, Smi, Unit
from gpuprov.engines.known import EngineFacts, RuntimeEntry
from gpuprov.engines.other_engines import registrations
from gpuprov.facts.driver import HidingLibrary
from gpuprov.facts.gpus import FabricFacts
from gpuprov.facts.kernels import InstalledKernel
from gpuprov.machine.pci import PciGpu
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH
from tests.triplet import LIBRARIES
from tests.unit.doctor.host import SMI, with_docker, with_driver, with_kernel
from tests.unit.fake_host import RELEASE

Change = Callable[[HostSnapshot], HostSnapshot]
DOCKER_START = 'Sat Nov 21 docker: level=info msg="Starting up"'
NVIDIA_RUNTIME = "/usr/bin/nvidia-container-runtime"


@dataclass(frozen=True)
class Row:
    """A rule's name, what makes a healthy host ill, what the evidence and the step must hold, and how sure it is."""

    rule: str
    change: Change
    evidence: str
    step: str
    confidence: str = CERTAIN


# -- ways to be ill --------------------------------------------------------------------------------------------------


def smi(code: int, said: str = "") -> Change:
    return lambda x: replace(x, smi=Smi(code, said))


def report(old: str, new: str) -> Change:
    """A report of nvidia-smi in which something reads otherwise."""
    assert old in SMI
    return lambda x: replace(x, smi=Smi(0, SMI.replace(old, new)))


def reports(xml: str) -> Change:
    """A report of nvidia-smi in which each GPU has this in the place of its compute mode."""
    return report("<compute_mode>Default</compute_mode>", xml)


def log(*lines: str) -> Change:
    """A kernel's log, on a host whose nvidia-smi finds no device."""
    return lambda x: replace(x, kernel_log=lines, smi=Smi(6, "No devices were found"))


def metal(x: HostSnapshot, **more: Any) -> HostSnapshot:
    """A machine of its own, with the module built and not loaded."""
    x = with_driver(
        with_kernel(x, container="", takes_modules=True),
        kernel_version="",
        gpus=(),
        nodes=(),
        present=(),
        capability_nodes=(),
    )
    x = replace(
        x, smi=Smi(reason="no driver is loaded"), specification_fault="", dkms=DKMS + "installed\n",
        kernels=(InstalledKernel(RELEASE, headers=True, module=True),),
        module=ModuleFile(f"/lib/modules/{RELEASE}/updates/nvidia.ko", "550.163.01", f"{RELEASE} SMP", "", "NVIDIA"),
    )  # fmt: skip
    return replace(x, **more)


# `dkms status` of dkms 3.0.10, Debian 12.
DKMS = f"nvidia/550.163.01, {RELEASE}, x86_64: "


def on_metal(**more: Any) -> Change:
    return lambda x: metal(x, **more)


def kernel_says(*lines: str) -> Change:
    """A machine of its own whose kernel has refused the module."""
    return on_metal(kernel_log=lines)


def bound_to(driver: str) -> Change:
    def change(x: HostSnapshot) -> HostSnapshot:
        x = metal(x)
        return replace(x, host=replace(x.host, gpus=tuple(replace(gpu, driver=driver) for gpu in x.host.gpus)))

    return change


def host(**more: Any) -> Change:
    return lambda x: replace(x, host=replace(x.host, **more))


def registered(engine: str) -> dict[str, EngineFacts]:
    """Return the facts of an engine whose files name the runtime."""
    bare = {engine: EngineFacts(f"/usr/bin/{engine}")}
    edits = registrations(bare, RuntimeEntry(path=LAUNCHER_PATH))[engine].edits
    return {engine: replace(bare[engine], files={edit.path: edit.after or b"" for edit in edits})}


def installed(**packages: str) -> Change:
    """More packages; `_` in a name stands for `-`."""

    def change(x: HostSnapshot) -> HostSnapshot:
        names = {**x.host.packages.installed, **{name.replace("_", "-"): v for name, v in packages.items()}}
        return replace(x, host=replace(x.host, packages=replace(x.host.packages, installed=names)))

    return change


def text(path: str, content: str, *absent: str) -> Change:
    return lambda x: replace(x, texts={**x.texts, path: content}, absent=x.absent | {*absent})


def without(*paths: str) -> Change:
    return lambda x: replace(x, there=x.there - {*paths})


def there(*paths: str) -> Change:
    return lambda x: replace(x, there=x.there | {*paths})


def switches(version: str = "550.163.01") -> Change:
    """Two NVSwitches of this machine's own, and the fabric manager's program of a version."""
    fabric = FabricFacts(("0000:c1:00.0", "0000:c2:00.0"), version=version)
    return lambda x: with_kernel(replace(x, host=replace(x.host, fabric=fabric)), container="")


def fabric_says(*lines: str) -> Change:
    return lambda x: replace(x, fabric_log=lines)


def fabric(**more: Any) -> Change:
    """Facts of the fabric, of a machine of its own."""
    return lambda x: with_kernel(replace(x, host=replace(x.host, fabric=FabricFacts(**more))), container="")


def unit(name: str, **more: str) -> Change:
    return lambda x: replace(x, units={**x.units, name: Unit(**{"load": "loaded", "active": "active", **more})})


def docker(**more: Any) -> Change:
    return lambda x: with_docker(x, **more)


def daemon_json(keys: dict[str, Any], **more: Any) -> Change:
    """More keys in docker's own file."""

    def change(x: HostSnapshot) -> HostSnapshot:
        text = json.dumps({**json.loads(x.host.docker.config_text or ""), **keys})
        return with_docker(x, config_text=text, **more)

    return change


def docker_says(*lines: str) -> Change:
    return lambda x: replace(x, docker_log=(DOCKER_START, *lines))


def both(*changes: Change) -> Change:
    def change(x: HostSnapshot) -> HostSnapshot:
        for one in changes:
            x = one(x)
        return x

    return change


def nvidias(x: HostSnapshot) -> HostSnapshot:
    """NVIDIA's own toolkit in place of gpuprov's."""
    config = json.dumps({"runtimes": {"nvidia": {"path": NVIDIA_RUNTIME, "args": []}}})
    x = with_docker(x, runtimes={"runc": "runc", "nvidia": NVIDIA_RUNTIME}, config_text=config)
    names = {**x.host.packages.installed, "nvidia-container-toolkit-base": "1.19.0-1"}
    x = replace(x, host=replace(x.host, packages=replace(x.host.packages, installed=names)))
    return replace(x, there=x.there - {LAUNCHER_PATH} | {NVIDIA_RUNTIME, "/usr/bin/nvidia-ctk"})


def hidden(reason: str = "/etc/ld.so.conf.d/libc.conf:2 names /usr/local/lib", package: str = "") -> Change:
    """An older NVML in a folder that the loader searches before the driver's."""
    paths = tuple(f"/usr/local/lib/libnvidia-ml.so.{end}" for end in ("1", "535.261.03"))
    one = HidingLibrary(
        "libnvidia-ml.so.1", paths, "535.261.03", reason, f"{LIBRARIES}/libnvidia-ml.so.1", package, removable=paths
    )  # fmt: skip
    return both(
        host(hiding=(one,)),
        lambda x: replace(with_driver(x, library_version="535.261.03"), smi=Smi(18, "version mismatch")),
    )


def divided_without_instances(x: HostSnapshot) -> HostSnapshot:
    return replace(x, smi=Smi(0, SMI.replace("<current_mig>Disabled", "<current_mig>Enabled", 1)))


def gpu_ids(device_id: str, module_license: str = "NVIDIA") -> Change:
    """A machine whose GPUs are of another kind, and not served."""
    return lambda x: replace(
        metal(x), module=replace(metal(x).module, license=module_license),
        host=replace(metal(x).host, gpus=(PciGpu("0000:17:00.0", device_id, "nvidia"),)),
    )  # fmt: skip


def mismatched(x: HostSnapshot) -> HostSnapshot:
    """`nvidia-smi` of 550 after an upgrade under the loaded module (nvidia-smi's own words; dpkg.log of Debian 12)."""
    line = "/var/log/dpkg.log:812:2026-11-20 06:12:44 upgrade libnvidia-ml1:amd64 550.163.01-2 550.200.01-1"
    x = with_driver(x, library_version="550.200.01")
    files = {path.replace("550.163.01", "550.200.01"): "550.200.01" for path in x.library_files}
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.200"
    return replace(x, smi=Smi(18, said), library_files=files, package_change=(line,))


CONFIG_TOML = "[nvidia-container-cli]\n{}\n"
FABRIC = "nvidia-fabricmanager.service"
AVC = (
    # From a report to the toolkit's project, RHEL 9.
    'audit: type=1400 audit(1700.1:2): avc:  denied  { read write } for  pid=1 comm="nvidia-smi" name="nvidiactl" '
    "scontext=system_u:system_r:container_t:s0 tcontext=system_u:object_r:xserver_misc_device_t:s0 tclass=chr_file"
)
NODES = "gpuprov-nodes.service"
