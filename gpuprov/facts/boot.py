"""What the next boot does: gpuprov's units and files by name, and a reboot that was asked for. Reads only."""

import json
import re
from collections.abc import Mapping

from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.packages.interface import require_answer
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.runtime_hook.deploy import LIBRARY_PATH

UNITS = "/etc/systemd/system"
WANTS = f"{UNITS}/multi-user.target.wants"
PROGRAM = f"{LIBRARY_PATH}/boot.pyz"
NODES = "gpuprov-nodes.service"
REFRESH = "gpuprov-refresh.service"
WATCH = "gpuprov-refresh.path"
CHANGED = "gpuprov-changed.service"
SOCKETS = "gpuprov-sockets.service"
MIG = "gpuprov-mig.service"
MPS = "gpuprov-mps.service"
CONFIDENTIAL = "gpuprov-confidential.service"
GPUDIRECT = "gpuprov-gpudirect.service"
PERSISTENCE = "nvidia-persistenced.service"
SERVE = "gpuprov-serve.service"
SERVE_SOCKET = "gpuprov-serve.socket"
UDEV_RULES = "/etc/udev/rules.d/71-gpuprov.rules"
SSH_KEYS = "gpuprov-ssh-keys.service"
SSH_KEYGEN = "/usr/bin/ssh-keygen"
_FABRIC = "nvidia-fabricmanager.service"
MODULES = "/etc/modules-load.d/gpuprov.conf"
PERSISTENCE_PROGRAM = "/usr/bin/nvidia-persistenced"
MPS_PROGRAM = "/usr/bin/nvidia-cuda-mps-control"
MARK = "# By gpuprov"
# Linux, Documentation/virt/coco: the devices of a guest with AMD SEV-SNP, and with Intel TDX.
_ENCRYPTED = ("/dev/sev-guest", "/dev/tdx_guest")
_VENDOR = "/sys/class/dmi/id/sys_vendor"
_PACKAGED = tuple(f"{folder}/systemd/system/{PERSISTENCE}" for folder in ("/usr/lib", "/lib"))
_PYTHON = re.compile(rf"^ExecStart=(?:.* )?(\S+) -I {re.escape(PROGRAM)} ", re.MULTILINE)
STARTED = (NODES, MIG, REFRESH, WATCH, PERSISTENCE, CONFIDENTIAL, GPUDIRECT, MPS, SSH_KEYS, SERVE_SOCKET)
_ENABLED = tuple(f"{WANTS}/{name}" for name in STARTED)
USERS = f"{UNITS}/user@.service.d/gpuprov.conf"
ROOT = f"{UNITS}/user@0.service.d/gpuprov.conf"
DRIVEN = tuple(f"{UNITS}/{name}.d/gpuprov.conf" for name in (PERSISTENCE, _FABRIC))

# These belong to no package: an obsolete one is removed if it is gpuprov's.
MANAGED = (
    f"{UNITS}/{NODES}", f"{UNITS}/{MIG}", f"{UNITS}/{REFRESH}", f"{UNITS}/{WATCH}", f"{UNITS}/{PERSISTENCE}",
    f"{UNITS}/{SERVE}", f"{UNITS}/{SERVE_SOCKET}", UDEV_RULES, MODULES, f"{UNITS}/{SSH_KEYS}",
    f"{UNITS}/{CHANGED}", f"{UNITS}/{SOCKETS}", f"{UNITS}/{MPS}", f"{UNITS}/{CONFIDENTIAL}", f"{UNITS}/{GPUDIRECT}",
    USERS, ROOT, *DRIVEN,
)  # fmt: skip


# Each version has these, whatever the host's options are.
_NEEDED = (PROGRAM, *(f"{folder}/{name}" for name in (NODES, REFRESH, WATCH) for folder in (UNITS, WANTS)))


def lacking(system: System) -> tuple[str, ...]:
    """Return what each boot of a host set up here needs and is no file, or empty: /dev/null where a unit is masked."""
    there = {path: system.status(system.real_path(path)) for path in _NEEDED}
    missing = tuple(path for path, one in there.items() if one is None or one.kind != "file" or not one.size)
    return missing if any(map(system.status, _NEEDED)) else ()


def python_of(unit: bytes) -> str:
    """Return the Python with which a gpuprov unit of any version runs the boot program, "" for another file."""
    found = _PYTHON.search(unit.decode("utf-8", "replace"))
    return found[1] if found else ""


@dataclass(frozen=True)
class BootFacts:
    """The effect of the next boot.

    `enabled`: the link by which a unit of ours is started at boot → where it leads. `persistence_packaged`: a package
    brings nvidia-persistenced with its unit. `ssh_keygen`: the host can make SSH host keys. `confidential`: this is a
    virtual machine with encrypted memory, whose GPUs may be in the mode of confidential computing. `mps`: the host has
    the program of MPS. `lacking`: of what each boot needs.
    """

    enabled: Mapping[str, str] = field(default_factory=dict)
    persistence_packaged: bool = False
    ssh_keygen: bool = False
    confidential: bool = False
    mps: bool = False
    lacking: tuple[str, ...] = ()


def gather_boot(system: System) -> BootFacts:
    """Return the facts; reads only."""
    links = {path: status.target for path in _ENABLED if (status := system.status(path)) and status.kind == "link"}
    packaged = any(system.exists(path) for path in _PACKAGED)
    ssh_keygen = system.exists(SSH_KEYGEN) and system.exists("/etc/ssh")
    return BootFacts(links, packaged, ssh_keygen, _is_encrypted(system), system.exists(MPS_PROGRAM), lacking(system))


def _is_encrypted(system: System) -> bool:
    """Say whether this is a guest with encrypted memory. Azure's lack the devices: Hyper-V's isolation tells.

    systemd knows it from 254 on. The kernel prints it: 2 is SNP, 3 TDX (arch/x86/kernel/cpu/mshyperv.c).
    """
    if any(map(system.exists, _ENCRYPTED)):
        return True
    if (system.read_text(_VENDOR) or "").strip() != "Microsoft Corporation":
        return False
    what = "whether this machine's memory is encrypted is not known"
    if require_answer(system.run(("systemd-detect-virt", "--cvm")), what).stdout.strip() in ("sev-snp", "tdx"):
        return True
    told = system.run(("journalctl", "--dmesg", "--boot", "--no-pager", "--output=cat"), timeout=60)
    log = require_answer(told, what).stdout
    return re.search(r"Hyper-V: Isolation Config: .*Group B 0x[0-9a-f]*[23]$", log, re.MULTILINE) is not None


def is_ours(content: bytes) -> bool:
    """Say whether a file at one of these places is gpuprov's, of any version."""
    return content.startswith(MARK.encode())


_BOOT_ID = "/proc/sys/kernel/random/boot_id"
REBOOT_ASKED = f"{STATE_DIRECTORY}/reboot.json"
# Written when a loaded driver could not be unloaded: the id of that boot.
IN_USE_MARK = f"{STATE_DIRECTORY}/driver-in-use"


@dataclass(frozen=True)
class RebootFacts:
    """`boot_id`: of this boot (random(4)); `asked_in`, `asked_for`: the boot in which a reboot was asked, and why."""

    boot_id: str = ""
    asked_in: str = ""
    asked_for: tuple[str, ...] = ()


def gather_reboot(system: System) -> RebootFacts:
    """Return the facts; reads only."""
    boot_id = (system.read_text(_BOOT_ID) or "").strip()
    try:
        asked = json.loads(system.read_text(REBOOT_ASKED) or "")
        return RebootFacts(boot_id, str(asked["boot_id"]), tuple(str(reason) for reason in asked["reasons"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return RebootFacts(boot_id)
