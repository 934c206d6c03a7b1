"""Gather the data that the doctor examines. Reads only.

It avoids queries with side effects: as root, NVML makes device nodes and loads modules. So nvidia-smi runs only if the
module is loaded and no node is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuprov import toolkit
from gpuprov.boot.prepare import is_of_another_version
from gpuprov.cdi.discover import DriverFacts, missing_nodes
from gpuprov.cdi.files import CACHE, LIBRARY_DIRECTORIES, parse_cache
from gpuprov.cdi.generate import PATH, difference
from gpuprov.checks import memory
from gpuprov.checks.cuda.hiding import gather_hiding
from gpuprov.checks.smi import parse_smi
from gpuprov.core.changes import file_digest, images_in
from gpuprov.core.commands import TIMED_OUT
from gpuprov.core.image_system import BOOTED
from gpuprov.core.journal import read_runs, unfinished_run, written_files
from gpuprov.core.lock import LOCK_PATH, other_run
from gpuprov.core.system import System
from gpuprov.doctor.cdi_rules import NVIDIAS_REFRESH
from gpuprov.doctor.containers import gather_containers
from gpuprov.doctor.gpu_rules import FOR_GUESTS
from gpuprov.doctor.parse import docker_lines, host_paths, parse_modinfo, parse_units, telling_lines
from gpuprov.doctor.snapshot import (
    KEYS,
    OPERATORS_RUNTIME,
    SPECIFICATION_FOLDERS,
    HostSnapshot,
    Installed,
    OtherSmi,
    Smi,
)
from gpuprov.driver.way_back import INCOMPLETE_MARK
from gpuprov.engines import other_engines
from gpuprov.engines.docker_config import parse_config
from gpuprov.engines.kubernetes import KUBELET_CONFIG
from gpuprov.facts.boot import NODES, PERSISTENCE, REFRESH
from gpuprov.facts.driver import PRELOAD
from gpuprov.facts.driver_change import package_change, since
from gpuprov.facts.gpus import UNIT
from gpuprov.facts.host import HostFacts
from gpuprov.facts.host import gather as gather_host
from gpuprov.facts.kernels import gather_kernels, module_name
from gpuprov.facts.leftovers import with_docker
from gpuprov.facts.watch import SERVICE as WATCH_SERVICE
from gpuprov.facts.watch import TIMER as WATCH_TIMER
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, NVIDIA_HOOK_PATH
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH, SETTINGS_PATH, read_settings

_SMI_SECONDS = 120
_SECONDS = 20
_HOOK = "nvidia-container-runtime-hook"
_LIBRARY = re.compile(r"lib(?:nvidia-ml|cuda)\.so\.(\d{3,4}(?:\.\d+)+)")
_AUDIT_LOG = "/var/log/audit/audit.log"
_LARGEST_TEXT = 1 << 20
_UNITS = (
    "docker.service", "containerd.service", PERSISTENCE, UNIT, NODES, REFRESH, NVIDIAS_REFRESH, WATCH_SERVICE,
    WATCH_TIMER,
)  # fmt: skip
# Folders in whose files rules search for a line, and single files.
_TEXT_FOLDERS = ("/etc/modprobe.d", "/etc/ld.so.conf.d", *SPECIFICATION_FOLDERS)
_TEXT_FILES = (
    SETTINGS_PATH, NVIDIA_SETTINGS_PATH, "/etc/ld.so.conf", "/root/.docker/config.json", "/etc/default/docker",
    "/etc/environment", "/proc/driver/nvidia/params", "/proc/self/mountinfo", KUBELET_CONFIG,
)  # fmt: skip
# Paths whose existence some rule checks.
_WATCHED = (
    "/dev/dxg", "/dev/nvmap", "/usr/lib/wsl/lib/libcuda.so.1", LAUNCHER_PATH,
    NVIDIA_HOOK_PATH, "/usr/bin/nvidia-container-runtime", "/usr/bin/nvidia-ctk", "/usr/bin/nvidia-modprobe",
    "/usr/bin/podman", "/usr/bin/crio", "/usr/bin/containerd", "/usr/bin/kubelet", "/usr/local/bin/nerdctl",
    "/usr/bin/nerdctl", "/usr/local/bin/k3s",
    OPERATORS_RUNTIME, "/var/lib/nvidia/dirs", INCOMPLETE_MARK, CACHE, PATH, *KEYS,
)  # fmt: skip


def gather(system: System, spec: HostSpec) -> HostSnapshot:
    """Return everything that the rules examine."""
    host = gather_host(system, other_engines.names(system, spec))
    host = replace(host, hiding=gather_hiding(system, host.driver_loaded_version))
    if spec.docker != "none":
        host = replace(host, leftovers=with_docker(system, host.leftovers, host.docker, host.packages))
    log, log_error = _kernel_log(system)
    first, own = system.which("nvidia-smi") or "", _own_smi(host.driver)
    is_other = bool(first and own) and system.real_path(first) != own
    smi = _smi(system, host.driver, own if is_other else "nvidia-smi")
    recalled = memory.recall(system)
    texts = _texts(system)
    specification = system.read_bytes(PATH)
    return HostSnapshot(
        host=host,
        spec=spec,
        kernel_log=log,
        kernel_log_error=log_error,
        smi=smi,
        node_errors=_node_errors(system, host.driver, smi),
        module=parse_modinfo(_said(system, ("modinfo", _module_name(system)))),
        kernels=gather_kernels(system),
        dkms=_said(system, ("dkms", "status")),
        loader=_loader(system),
        units=parse_units(
            _said(system, ("systemctl", "show", "-p", "Id,LoadState,ActiveState,Result,UnitFileState", *_units(host)))
        ),
        docker_log=_docker_log(system),
        texts=texts,
        there=frozenset(path for path in _WATCHED if system.exists(path)),
        absent=frozenset(path for path in _named_paths(host, texts) if not _is_there(system, path)),
        modified=_modified(system, host.docker.config_path),
        settings_fault=_settings_fault(system),
        specification_fault=difference(specification, host.driver, any_version=is_of_another_version(system))
        if specification is not None
        else "",
        installed=_installed(system),
        programs={name: path for name in ("runc", "crun", "lspci", _HOOK) if (path := system.which(name))},
        library_files=_library_files(system),
        package_change=package_change(system),
        driver_since=since(system, host.driver.library_version),
        in_place={node.path: _what_lies_at(system, node.path) for node in missing_nodes(host.driver)},
        node_modes={path: status.mode for path in host.driver.present if (status := system.status(path))},
        links_missing=_links_missing(system, host.driver),
        not_executable=_not_executable(system, host),
        open_run=_open_run(system),
        runs_now=runs_now(system),
        smi_path=own if is_other else first,
        smi_is_script=bool(first) and system.read_start(own if is_other else system.real_path(first), 2) == b"#!",
        other_smi=OtherSmi(first, _smi(system, host.driver, first)) if is_other else None,
        preload_said=_preload_said(system),
        docker_file_rewritten=_rewritten(system, host.docker.config_path),
        closed=_closed(system, texts),
        docker_unit=_said(system, ("systemctl", "cat", "docker.service")),
        rootless=_rootless(system),
        selinux=_said(system, ("getenforce",)).strip(),
        container_use_devices=_said(system, ("getsebool", "container_use_devices")).rpartition(" ")[2].strip(),
        containers=gather_containers(system),
        audit_log=tuple(_said(system, ("tail", "-n", "2000", _AUDIT_LOG)).splitlines()),
        gpus_lost=_gpus_lost(system, recalled.memory, smi, host),
        memory_fault=recalled.fault,
        is_booted=system.exists(BOOTED),
    )


def _module_name(system: System) -> str:
    return module_name(system.read_text(f"/lib/modules/{system.kernel_release()}/modules.dep") or "") or "nvidia"


def _said(system: System, argv: Sequence[str]) -> str:
    """Return a command's output, "" if it is not installed or fails."""
    if system.which(argv[0]) is None:
        return ""
    done = system.run(argv, timeout=_SECONDS)
    return done.stdout if done.ok else ""


def _kernel_log(system: System) -> tuple[tuple[str, ...], str]:
    """Return the relevant lines, or why the log can't be read."""
    if system.which("dmesg") is None:
        return (), "there is no dmesg"
    done = system.run(("dmesg",), timeout=_SECONDS)
    return (telling_lines(done.stdout), "") if done.ok else ((), done.evidence(1))


def _docker_log(system: System) -> tuple[str, ...]:
    return docker_lines(
        _said(system, ("journalctl", "--boot", "--unit=docker", "--lines=400", "--no-pager", "--output=cat"))
    )


def _own_smi(driver: DriverFacts) -> str:
    return next((one.real_path for one in driver.programs if one.path.endswith("/nvidia-smi")), "")


def _smi(system: System, driver: DriverFacts, program: str) -> Smi:
    if system.which(program) is None and not system.exists(program):
        return Smi(reason="nvidia-smi is not installed")
    if not driver.kernel_version:
        return Smi(reason="no driver is loaded")
    if missing_nodes(driver):
        return Smi(reason="device nodes are missing, which it would make")
    done = system.run((program, "-q", "-x"), timeout=_SMI_SECONDS)
    return Smi(done.returncode, done.stdout if done.stdout.strip() else done.stderr)


def _gpus_lost(system: System, remembered: memory.Memory | None, smi: Smi, host: HostFacts) -> Problem | None:
    """Return the trouble, without GPUs on the PCI bus: other rules say why the driver does not serve one."""
    if remembered is None:
        return None
    try:
        report = parse_smi(smi.text) if smi.is_report else None
    except GpuprovError:
        report = None
    return memory.lost_gpus(
        system, remembered, report, {gpu.bus_id for gpu in host.gpus if gpu.driver not in FOR_GUESTS}
    )


def _node_errors(system: System, driver: DriverFacts, smi: Smi) -> Mapping[str, str]:
    """Return node → why it does not open, if nvidia-smi was not run or failed; empty for a GPU that hangs."""
    if smi.returncode == TIMED_OUT or not (smi.reason or smi.returncode):
        return {}
    # In a child process, because opening may initialise a GPU, which takes time; no byte is read.
    tried = {path: system.run(("head", "-c", "0", path), timeout=_SECONDS) for path in driver.present}
    return {path: done.stderr.strip().rpartition(": ")[2] for path, done in tried.items() if done.returncode == 1}


def _loader(system: System) -> Mapping[str, str]:
    wanted = ("libnvidia-ml.so.1", "libcuda.so.1")
    cached = parse_cache(system.read_bytes(CACHE) or b"")
    return {one.name: one.path for one in reversed(cached) if one.name in wanted and one.is_64_bit}


def _units(host: HostFacts) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*_UNITS, *(one.unit for one in host.engines.values() if one.unit))))


def _texts(system: System) -> Mapping[str, str]:
    listed = [f"{folder}/{name}" for folder in _TEXT_FOLDERS for name in system.list_directory(folder)]
    found = {}
    for path in (*_TEXT_FILES, *listed):
        start = system.read_start(system.real_path(path), _LARGEST_TEXT)
        if start is not None:
            found[path] = start.decode("utf-8", "replace")
    return found


def _named_paths(host: HostFacts, texts: Mapping[str, str]) -> tuple[str, ...]:
    """Return the host paths that specifications and docker name."""
    of_specifications = (
        path for name, text in texts.items() if name.startswith(SPECIFICATION_FOLDERS) for path, _ in host_paths(text)
    )
    entries = (host.docker.config.get("runtimes") or {}).values()
    of_file = (str(entry.get("path") or "") for entry in entries if isinstance(entry, dict))
    of_settings = re.findall(
        r'^\s*(?:root|ldconfig)\s*=\s*"@?(/[^"]+)"', texts.get(NVIDIA_SETTINGS_PATH, ""), re.MULTILINE
    )
    return (*of_specifications, *of_settings, *filter(None, (*of_file, *(host.docker.runtimes or {}).values())))


def _is_there(system: System, name: str) -> bool:
    """Say whether a file exists; a name without a folder is a program that docker looks up on its PATH."""
    return system.exists(name) if name.startswith("/") else system.which(name) is not None


def _modified(system: System, docker_file: str) -> Mapping[str, float]:
    paths = (docker_file, NVIDIA_HOOK_PATH, "/run/docker.pid", CACHE, SETTINGS_PATH, NVIDIA_SETTINGS_PATH)
    return {path: status.modified for path in paths if (status := system.status(path)) is not None}


def _library_files(system: System) -> Mapping[str, str]:
    found = {}
    for folder in LIBRARY_DIRECTORIES:
        # /lib64 and the like are links to the others.
        if system.real_path(folder) == folder:
            for name in system.list_directory(folder):
                version = _LIBRARY.fullmatch(name)
                if version:
                    found[f"{folder}/{name}"] = version[1]
    return found


def _what_lies_at(system: System, path: str) -> str:
    status = system.status(path)
    if status is None:
        return ""
    return f"{status.kind} {status.major}:{status.minor}" if status.kind in ("char", "block") else status.kind


def _links_missing(system: System, driver: DriverFacts) -> tuple[str, ...]:
    numbers = (f"{node.major}:{node.minor}" for node in driver.nodes if node.path in driver.present)
    return tuple(path for path in (f"/dev/char/{number}" for number in numbers) if not system.exists(path))


def _not_executable(system: System, host: HostFacts) -> Mapping[str, int]:
    found = {}
    for path in (host.docker.runtimes or {}).values():
        status = system.status(system.real_path(path)) if path.startswith("/") else None
        if status is not None and status.kind == "file" and not status.mode & 0o111:
            found[path] = status.mode
    return found


def _open_run(system: System) -> str:
    try:
        run = unfinished_run(system)
    except GpuprovError:
        # The journal of a newer gpuprov: `install` reports it, and the doctor examines everything else.
        return ""
    if run is None:
        return ""
    return f" in: {run.interrupted.key}" if run.interrupted is not None else " between two changes"


def _installed(system: System) -> Installed | None:
    try:
        written = written_files(read_runs(system))
    except GpuprovError as error:
        return Installed(fault=error.problems[0])
    found = {path: digest for path, (digest, _) in written.items() if toolkit.is_runtimes(path)}
    if LAUNCHER_PATH not in found:
        return None
    run = written[LAUNCHER_PATH][1]
    status = system.status(run.path)
    images = [image for entry in run.entries if entry.state == "done" for image in images_in(entry.before)]
    replaced = frozenset(image["path"] for image in images if image["kind"] == "file")
    return Installed(run.path, run.version, status.modified if status else 0, found, replaced)


def runs_now(system: System) -> str:
    """Return the other gpuprov run that is alive on this host, "" if there is none."""
    holder = other_run(system)
    return f"{LOCK_PATH}: {holder}" if holder else ""


def _preload_said(system: System) -> str:
    """Return the loader's message about libraries in ld.so.preload that it can't load."""
    if not (system.read_text(PRELOAD) or "").strip():
        return ""
    said = system.run(("/bin/true",), timeout=_SECONDS).stderr
    return "\n".join(line for line in said.splitlines() if PRELOAD in line)


def _closed(system: System, texts: Mapping[str, str]) -> Mapping[str, int]:
    """Return the CDI paths that only root can read: engines of other users need them too."""
    files = [path for path, text in texts.items() if path.startswith(SPECIFICATION_FOLDERS) and "nvidia" in text]
    found = {path: system.status(system.real_path(path)) for path in (*SPECIFICATION_FOLDERS, *files)}
    wanted = {path: 0o005 if path in SPECIFICATION_FOLDERS else 0o004 for path in found}
    return {
        path: one.mode for path, one in found.items() if one is not None and one.mode & wanted[path] != wanted[path]
    }


def _rootless(system: System) -> tuple[str, ...]:
    """Return the sockets of users' own dockers that can give no GPU yet, by their daemon.json."""
    accounts = (line.split(":") for line in (system.read_text("/etc/passwd") or "").splitlines())
    homes = {fields[2]: fields[5] for fields in accounts if len(fields) > 5}
    found = []
    for user in system.list_directory("/run/user"):
        path = f"{homes.get(user, '')}/.config/docker/daemon.json"
        config = parse_config(system.read_text(path) if user in homes else None, path)[0]
        ready = "nvidia" in (config.get("runtimes") or {}) or (config.get("features") or {}).get("cdi")
        if not ready and system.exists(f"/run/user/{user}/docker.sock"):
            found.append(f"/run/user/{user}/docker.sock")
    return tuple(found)


def _rewritten(system: System, path: str) -> int:
    """Return how many runs wrote docker's file otherwise than it is now."""
    try:
        entries = [entry for run in read_runs(system) for entry in run.entries if entry.state == "done"]
    except GpuprovError:
        return 0
    written = [((entry.outcome or {}).get("written") or {}).get(path) for entry in entries]
    now = file_digest(system, path)
    return sum(digest not in (None, now) for digest in written) if now not in written else 0


def _settings_fault(system: System) -> str:
    _, fault = read_settings(str(system.path(SETTINGS_PATH)), str(system.path(NVIDIA_SETTINGS_PATH)))
    root = str(system.root).rstrip("/")
    return fault.replace(f"{root}/", "/") if root else fault
