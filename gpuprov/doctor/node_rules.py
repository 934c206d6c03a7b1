"""Rules about /dev: nodes that are missing, of the wrong kind, or can't be opened. Pure."""

from __future__ import annotations

from gpuprov.cdi.discover import missing_nodes
from gpuprov.doctor import words
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ANY_ROOT, ASIDE, CERTAIN, LIKELY, NODES, Finding, Rule
from gpuprov.doctor.remedy import open_nodes, restart, steps
from gpuprov.facts.boot_files import NODES as NODES_UNIT
from gpuprov.protocol.words import counted
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH

_LOAD = "modprobe -a nvidia nvidia-uvm; dmesg | grep -i nvrm"
# Errors of open(2) on a node, in the C locale, and their meaning for a device.
_ERRORS = {
    "No such device or address": ("opening {path} fails: the driver does not respond", _LOAD),
    "No such device": ("opening {path} fails: the driver does not respond", _LOAD),
    "Input/output error": (
        "the driver can't start the GPU behind {path}",
        "dmesg | grep -i -e nvrm -e xid; systemctl reboot",
    ),
    "Operation not permitted": (
        "a device cgroup forbids {path}, on this machine itself",
        "ls -l /dev/nvidia*  # allow the device on the host: lxc.cgroup2.devices.allow = c 195:* rwm, or "
        "DeviceAllow=char-nvidia rw",
    ),
    "Permission denied": ("{path} may not be opened", f"ls -lZ /dev/nvidia*; {words.OPEN_NODES}"),
}


def _missing(x: Examined) -> Finding | None:
    paths = [node.path for node in missing_nodes(x.driver) if not x.in_place.get(node.path)]
    if not paths:
        return None
    return Finding(
        f"{_listed(paths)} {'is' if len(paths) == 1 else 'are'} missing",
        "\n".join(f"ls {path}: No such file or directory" for path in paths[:4]),
        words.make_nodes(x),
        remedies=(steps("device nodes"),),
    )


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {counted(len(paths) - 4, 'more node')}" if len(paths) > 4 else "")


def _wrong(x: Examined) -> Finding | None:
    wrong = [(node, x.in_place[node.path]) for node in missing_nodes(x.driver) if x.in_place.get(node.path)]
    if not wrong:
        return None
    paths = " ".join(node.path for node, _ in wrong)
    return Finding(
        f"{paths} is not the device that it should be",
        "\n".join(f"ls -ld {node.path}: {there}; it should be char {node.major}:{node.minor}" for node, there in wrong),
        f"rm -rf {paths}; {words.make_nodes(x)}",
        # A folder may not be empty.
        remedies=() if "directory" in dict(wrong).values() else (steps("device nodes"),),
    )


def _closed(x: Examined) -> Finding | None:
    closed = [node.path for node in x.driver.closed]
    if not closed:
        return None
    by_mode: dict[int, list[str]] = {}
    for node in x.driver.closed:
        by_mode.setdefault(node.mode, []).append(node.path)
    return Finding(
        f"other users than root may not open {_listed(closed)}, so their containers get nothing",
        "\n".join(f"stat -c %a {path}: {x.node_modes[path]:o}" for path in closed[:4]),
        "; ".join(f"chmod {mode:04o} {' '.join(paths)}" for mode, paths in by_mode.items()),
        LIKELY,
        (open_nodes(*closed),),
    )


def _unopened(x: Examined) -> Finding | None:
    if not x.node_errors:
        return None
    path, error = next(iter(x.node_errors.items()))
    what, step = _ERRORS.get(error, ("{path} can't be opened", "dmesg | grep -i nvrm"))
    return Finding(what.format(path=path), f"head -c 0 {path}: {error}", step, LIKELY)


def _no_links(x: Examined) -> Finding | None:
    # gpuprov's runtime makes them at each container start.
    ours = (x.host.docker.runtimes or {}).get("nvidia") == LAUNCHER_PATH
    if ours or not x.links_missing or x.host.docker.cgroup_driver != "systemd" or not x.driver.present:
        return None
    return Finding(
        "running containers lose their GPUs at the next `systemctl daemon-reload` (Failed to initialize NVML: Unknown "
        "Error): systemd finds the devices by links in /dev/char, and they are missing",
        "\n".join(f"ls {path}: No such file or directory" for path in x.links_missing[:4]),
        _make_links(x),
        LIKELY,
    )


def _make_links(x: Examined) -> str:
    if "/usr/bin/nvidia-ctk" in x.there:
        return "nvidia-ctk system create-dev-char-symlinks --create-all"
    numbers = {node.path: f"{node.major}:{node.minor}" for node in x.driver.nodes}
    wanted = [path.rpartition("/")[2] for path in x.links_missing]
    return "; ".join(f"ln -s {path} /dev/char/{number}" for path, number in numbers.items() if number in wanted)


def _unit_failed(x: Examined) -> Finding | None:
    unit = x.units.get(NODES_UNIT)
    if unit is None or unit.active != "failed":
        return None
    return Finding(
        "the device nodes could not be made at boot", f"systemctl show {NODES_UNIT}: {unit.active}, {unit.result}",
        f"systemctl restart {NODES_UNIT}; journalctl -b -u {NODES_UNIT} -n 20",
        CERTAIN if missing_nodes(x.driver) or not x.driver.nodes else ASIDE,
        (restart(NODES_UNIT),),
    )  # fmt: skip


RULES = (
    Rule("nodes-missing", NODES, "the loaded driver's device nodes are not all in /dev", _missing),
    Rule("node-wrong", NODES, "a file, a folder or another device lies in a node's place", _wrong),
    Rule("nodes-closed", NODES, "the driver's DeviceFileMode is open to all, the node is not", _closed),
    Rule("node-does-not-open", NODES, "nvidia-smi fails, and a node does not open: ENXIO, EIO, EPERM or EACCES",
         _unopened, ANY_ROOT),
    Rule("dev-char-links", NODES, "NVIDIA's runtime, docker with systemd's cgroups, no links to the nodes in /dev/char",
         _no_links, ("nodes-missing", "driver-outside", "module-not-loaded")),
    Rule("nodes-unit-failed", NODES, "gpuprov-nodes.service has failed", _unit_failed,
         ("driver-outside", "module-not-loaded", "module-missing", "nodes-missing")),
)  # fmt: skip
