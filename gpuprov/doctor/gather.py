"""Gather the data that the doctor examines. Reads only.

It avoids queries with side effects: as root, NVML makes device nodes and loads modules. So nvidia-smi runs only if the
module is loaded and no node is missing.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuprov import toolkit
from gpuprov.boot.prepare import is_of_another_version
from gpuprov.cdi.discover import DriverFacts, missing_nodes
from gpuprov.cdi.files import CACHE, LIBRARY_DIRECTORIES, parse_cache
from gpuprov.cdi.generate import PATH, difference
from gpuprov.checks import memory
from gpuprov.checks.cuda.compatibility import Incompatibility
from gpuprov.checks.cuda.hiding import gather_hiding
from gpuprov.checks.cuda.search import LIBCUDA, LIBNVIDIA_ML, Program
from gpuprov.checks.cuda.survey import ENGINES, Survey, survey
from gpuprov.checks.smi import parse_smi
from gpuprov.core.changes import file_digest, images_in, parent_of
from gpuprov.core.commands import TIMED_OUT
from gpuprov.core.journal import RUNS_DIRECTORY, STATE_DIRECTORY, Run, read_runs, unfinished_run, written_files
from gpuprov.core.lock import LOCK_PATH, other_run
from gpuprov.core.system import BOOTED, System
from gpuprov.doctor import snapshot
from gpuprov.doctor.cdi_rules import NVIDIAS_REFRESH
from gpuprov.doctor.snapshot import SPECIFICATION_FOLDERS, Containers, HostSnapshot, Installed, Loaded, Smi, host_paths
from gpuprov.driver.run_files import INCOMPLETE_MARK, INSTALLER_STATE
from gpuprov.engines import other_engines
from gpuprov.engines.docker_config import parse_config
from gpuprov.engines.docker_unit import PID_FILE
from gpuprov.engines.known import ENGINES as KNOWN
from gpuprov.engines.known import KUBELET_CONFIG
from gpuprov.facts.boot import CONFIDENTIAL, GPUDIRECT, MPS, NODES, PERSISTENCE, PROGRAM, REFRESH, UNITS, WATCH
from gpuprov.facts.driver import PRELOAD, package_change, since
from gpuprov.facts.gpus import FABRIC_UNIT
from gpuprov.facts.host import HostFacts
from gpuprov.facts.host import gather as gather_host
from gpuprov.facts.kernels import gather_kernels, module_of
from gpuprov.facts.leftovers import is_program, with_docker
from gpuprov.facts.watch import SERVICE as WATCH_SERVICE
from gpuprov.facts.watch import TIMER as WATCH_TIMER
from gpuprov.machine.pci import FOR_GUESTS
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, NVIDIA_HOOK_PATH
from gpuprov.runtime_hook.rootfs import Root
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH, SETTINGS_PATH
from gpuprov.toolkit import settings_fault

MOST_CONTAINERS = 20
CONTAINERS_SECONDS = 20
_ENGINE_SECONDS = 10
_SMI_SECONDS = 120
_SECONDS = 20
_DOCKER_LOG = ("journalctl", "--boot", "--unit=docker", "--lines=400", "--no-pager", "--output=cat")
_FABRIC_LOG = ("journalctl", "--boot", f"--unit={FABRIC_UNIT}", "--lines=50", "--no-pager", "--output=cat")
_SHOW = ("systemctl", "show", "-p", ",".join(snapshot.UNIT_PROPERTIES))
_LARGEST_TEXT = 1 << 20
_BOOTS = (PROGRAM, f"{UNITS}/gpuprov-")
_TIMED = (NVIDIA_HOOK_PATH, PID_FILE, CACHE, SETTINGS_PATH, NVIDIA_SETTINGS_PATH)
_UNITS = (
    "docker.service", "containerd.service", PERSISTENCE, FABRIC_UNIT, NODES, REFRESH, NVIDIAS_REFRESH, WATCH_SERVICE,
    WATCH_TIMER, WATCH, MPS, GPUDIRECT, CONFIDENTIAL,
)  # fmt: skip
# Folders in whose files rules search for a line, and single files.
_TEXT_FOLDERS = ("/etc/modprobe.d", "/etc/ld.so.conf.d", *SPECIFICATION_FOLDERS)
_TEXT_FILES = (
    SETTINGS_PATH, NVIDIA_SETTINGS_PATH, "/etc/ld.so.conf", "/root/.docker/config.json", "/etc/default/docker",
    "/etc/environment", INSTALLER_STATE, "/proc/driver/nvidia/params", "/proc/self/mountinfo", KUBELET_CONFIG,
    *(path for one in KNOWN.values() for path in (one.main, one.drop_in) if path),
)  # fmt: skip
# Paths whose existence some rule checks.
_WATCHED = (
    "/dev/dxg", "/dev/nvmap", "/usr/lib/wsl/lib/libcuda.so.1", LAUNCHER_PATH,
    NVIDIA_HOOK_PATH, "/usr/bin/nvidia-container-runtime", "/usr/bin/nvidia-ctk", "/usr/bin/nvidia-modprobe",
    "/usr/bin/podman", "/usr/bin/crio", "/usr/bin/containerd", "/usr/local/bin/nerdctl", "/usr/bin/nerdctl",
    snapshot.OPERATORS_RUNTIME, "/var/lib/nvidia/dirs", INCOMPLETE_MARK, CACHE, PATH, *snapshot.KEYS,
)  # fmt: skip


def gather(system: System, spec: HostSpec) -> HostSnapshot:
    """Return everything that the rules examine."""
    host = gather_host(system, other_engines.names(system, spec))
    host = replace(host, hiding=gather_hiding(system, host.driver_loaded_version))
    if spec.docker != "none":
        host = replace(host, leftovers=with_docker(system, host.leftovers, host.docker, host.packages))
    log, log_error = _kernel_log(system)
    units = dict.fromkeys((*_UNITS, *(one.unit for one in host.engines.values() if one.unit)))
    first = system.which("nvidia-smi") or ""
    own = next((one.real_path for one in host.driver.programs if one.path.endswith("/nvidia-smi")), "")
    is_other = bool(first and own) and system.real_path(first) != own
    smi = _smi(system, host.driver, own if is_other else "nvidia-smi")
    recalled = memory.recall(system)
    texts = _texts(system)
    cached = parse_cache(system.read_bytes(CACHE) or b"")
    present = [node for node in host.driver.nodes if node.path in host.driver.present]
    links = [f"/dev/char/{node.major}:{node.minor}" for node in present]
    timed = (*_TIMED, host.docker.config_path)
    found = system.read_bytes(PATH)
    stale = difference(found, host.driver, any_version=is_of_another_version(system)) if found is not None else ""
    runs, fault = _runs(system)
    module = module_of(system, system.kernel_release()) or "nvidia"
    return HostSnapshot(
        host=host,
        spec=spec,
        kernel_log=log,
        kernel_log_error=log_error,
        smi=smi,
        node_errors=_node_errors(system, host.driver, smi),
        module=snapshot.parse_modinfo(_said(system, ("modinfo", module))),
        kernels=gather_kernels(system),
        dkms="".join(re.findall(rf"nvidia.*{host.driver.library_version}.*\n", _said(system, ("dkms", "status")))),
        loader={
            one.name: one.path
            for one in reversed(cached)
            if one.name in (LIBCUDA, LIBNVIDIA_ML) and one.is_64_bit and _is_file(system, one.path)
        },
        units=snapshot.parse_units(_said(system, (*_SHOW, *units))),
        docker_log=snapshot.docker_lines(_said(system, _DOCKER_LOG)),
        fabric_log=tuple(_said(system, _FABRIC_LOG).splitlines()) if host.fabric.switches else (),
        texts=texts,
        there=frozenset(path for path in _WATCHED if system.exists(path)),
        absent=frozenset(path for path in _named_paths(host, texts) if not is_program(system, path)),
        modified={path: status.modified for path in timed if (status := system.status(path)) is not None},
        settings_fault=settings_fault(system),
        specification_fault=stale,
        installed=Installed(fault=fault) if fault else _installed(system, runs),
        boot_changed=_boot_changed(system, runs),
        programs=_programs(system),
        broken=_broken(system),
        library_files=_library_files(system),
        package_change=package_change(system),
        driver_since=since(system, host.driver.library_version),
        in_place={node.path: _what_lies_at(system, node.path) for node in missing_nodes(host.driver)},
        node_modes={path: status.mode for path in host.driver.present if (status := system.status(path))},
        links_missing=tuple(path for path in links if not system.exists(path)),
        not_executable=_not_executable(system, host),
        open_run=_open_run(system),
        runs_now=runs_now(system),
        smi_path=own if is_other else first,
        smi_is_script=bool(first) and system.read_start(own if is_other else system.real_path(first), 2) == b"#!",
        other_smi=replace(_smi(system, host.driver, first), path=first) if is_other else None,
        preload_message=_preload_message(system),
        docker_file_rewritten=_rewritten(system, runs, host.docker.config_path),
        closed=_closed(system, texts),
        changeable=_changeable(system, host, texts),
        docker_unit=_said(system, ("systemctl", "cat", "docker.service")),
        mount_namespaces=_said(system, ("lsns", "--list", "--type=mnt", "--noheadings", "--output=NS,COMMAND")),
        rootless=_rootless(system),
        selinux=_said(system, ("getenforce",)).strip(),
        selinux_off=tuple(
            re.findall(r"(?m)^(container_use_(?:xserver_)?devices) --> off", _said(system, ("getsebool", "-a")))
        ),
        containers=gather_containers(system),
        audit_log=tuple(_said(system, ("tail", "-n", "2000", "/var/log/audit/audit.log")).splitlines()),
        gpus_lost=_gpus_lost(system, recalled.memory, smi, host),
        memory_fault=recalled.fault,
        is_booted=system.exists(BOOTED),
    )


def _is_file(system: System, path: str) -> bool:
    found = system.status(system.real_path(path))
    return found is not None and found.kind == "file"


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
    return (snapshot.telling_lines(done.stdout), "") if done.ok else ((), done.evidence(1))


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
    buses = {gpu.bus_id for gpu in host.gpus if gpu.driver not in FOR_GUESTS}
    return memory.lost_gpus(system, remembered, report, buses)


def _node_errors(system: System, driver: DriverFacts, smi: Smi) -> Mapping[str, str]:
    """Return node → why it does not open, if nvidia-smi was not run or failed; empty for a GPU that hangs."""
    if smi.returncode == TIMED_OUT or not (smi.reason or smi.returncode):
        return {}
    # In a child process, because opening may initialise a GPU, which takes time; no byte is read.
    tried = {path: system.run(("head", "-c", "0", path), timeout=_SECONDS) for path in driver.present}
    return {path: done.stderr.strip().rpartition(": ")[2] for path, done in tried.items() if done.returncode == 1}


def _texts(system: System) -> Mapping[str, str]:
    listed = [f"{folder}/{name}" for folder in _TEXT_FOLDERS for name in system.list_directory(folder)]
    starts = ((path, system.read_start(system.real_path(path), _LARGEST_TEXT)) for path in (*_TEXT_FILES, *listed))
    return {path: start.decode("utf-8", "replace") for path, start in starts if start is not None}


def _named_paths(host: HostFacts, texts: Mapping[str, str]) -> tuple[str, ...]:
    """Return the host paths that specifications and docker name."""
    specifications = (text for name, text in texts.items() if name.startswith(SPECIFICATION_FOLDERS))
    of_specifications = (path for text in specifications for path, _ in host_paths(text))
    entries = (host.docker.config.get("runtimes") or {}).values()
    of_file = (str(entry.get("path") or "") for entry in entries if isinstance(entry, dict))
    settings = texts.get(NVIDIA_SETTINGS_PATH, "")
    of_settings = re.findall(r'^\s*(?:root|ldconfig)\s*=\s*"@?(/[^"]+)"', settings, re.MULTILINE)
    of_settings += snapshot.VULKAN_AND_OPENCL.findall(texts.get(INSTALLER_STATE, ""))
    return (*of_specifications, *of_settings, *filter(None, (*of_file, *(host.docker.runtimes or {}).values())))


def _library_files(system: System) -> Mapping[str, str]:
    found = {}
    for folder in LIBRARY_DIRECTORIES:
        # /lib64 and the like are links to the others.
        for name in system.list_directory(folder) if system.real_path(folder) == folder else ():
            if version := re.fullmatch(r"lib(?:nvidia-ml|cuda)\.so\.(\d{3,4}(?:\.\d+)+)", name):
                found[f"{folder}/{name}"] = version[1]
    return found


def _what_lies_at(system: System, path: str) -> str:
    status = system.status(path)
    if status is None:
        return ""
    return f"{status.kind} {status.major}:{status.minor}" if status.kind in ("char", "block") else status.kind


def _not_executable(system: System, host: HostFacts) -> Mapping[str, int]:
    paths = [path for path in (host.docker.runtimes or {}).values() if path.startswith("/")]
    there = ((path, system.status(system.real_path(path))) for path in paths)
    return {path: one.mode for path, one in there if one is not None and one.kind == "file" and not one.mode & 0o111}


def _open_run(system: System) -> str:
    # The journal of a newer gpuprov: `install` reports it, and the doctor examines everything else.
    with contextlib.suppress(GpuprovError):
        if run := unfinished_run(system):
            return f" in: {run.interrupted.key}" if run.interrupted is not None else " between two changes"
    return ""


def _runs(system: System) -> tuple[tuple[Run, ...], Problem | None]:
    """Return the runs on this host, or why their journals can't be read."""
    try:
        return read_runs(system), None
    except GpuprovError as error:
        return (), error.problems[0]


def _installed(system: System, runs: Sequence[Run]) -> Installed | None:
    written = written_files(runs)
    found = {path: digest for path, (digest, _) in written.items() if toolkit.is_runtimes(path)}
    if LAUNCHER_PATH not in found:
        return None
    run = written[LAUNCHER_PATH][1]
    status = system.status(run.path)
    images = [image for entry in run.entries if entry.state == "done" for image in images_in(entry.before)]
    replaced = frozenset(image["path"] for image in images if image["kind"] == "file")
    return Installed(run.path, run.version, status.modified if status else 0, found, replaced)


def _boot_changed(system: System, runs: Sequence[Run]) -> tuple[str, ...]:
    """Return gpuprov's program and units of each boot that have changed since a run wrote them."""
    written = {path: digest for path, (digest, _) in written_files(runs).items() if path.startswith(_BOOTS)}
    changed = {path: file_digest(system, path) for path, digest in written.items() if digest}
    return tuple(path for path, digest in changed.items() if digest not in ("", written[path]))


def runs_now(system: System) -> str:
    """Return the other gpuprov run that is alive on this host, "" if there is none."""
    holder = other_run(system)
    return f"{LOCK_PATH}: {holder}" if holder else ""


def _preload_message(system: System) -> str:
    """Return the loader's message about libraries in ld.so.preload that it can't load."""
    if not (system.read_text(PRELOAD) or "").strip():
        return ""
    said = system.run(("/bin/true",), timeout=_SECONDS).stderr
    return "\n".join(line for line in said.splitlines() if PRELOAD in line)


def _programs(system: System) -> Mapping[str, str]:
    """Return name → the first on the PATH, by a folder that is no link: /sbin may be one to /usr/bin."""
    found = {name: system.which(name) for name in ("runc", "crun", "lspci", "nvidia-container-runtime-hook")}
    return {name: f"{system.real_path(parent_of(path))}/{name}" for name, path in found.items() if path}


def _broken(system: System) -> Mapping[str, str]:
    """Return the low-level runtimes that do not run, with their last words."""
    paths = filter(None, map(system.which, ("runc", "crun")))
    said = {path: system.run((path, "--version"), timeout=_SECONDS) for path in paths}
    return {path: done.evidence(1) for path, done in said.items() if not done.ok}


def _changeable(system: System, host: HostFacts, texts: Mapping[str, str]) -> Mapping[str, str]:
    """Return what root or its containers obey and others can change, with owner and mode."""
    journals = (f"{RUNS_DIRECTORY}/{name}" for name in system.list_directory(RUNS_DIRECTORY))
    paths = (*SPECIFICATION_FOLDERS, *_specifications(texts), *host.files, host.docker.config_path, STATE_DIRECTORY,
             RUNS_DIRECTORY, *journals)  # fmt: skip
    found = ((path, system.status(system.real_path(path))) for path in paths)
    real = {path: one for path, one in found if one and one.kind in ("file", "directory")}
    return {path: f"{one.uid} {one.mode:o}" for path, one in real.items() if one.uid or one.mode & 0o022}


def _specifications(texts: Mapping[str, str]) -> list[str]:
    return [path for path, text in texts.items() if path.startswith(SPECIFICATION_FOLDERS) and "nvidia" in text]


def _closed(system: System, texts: Mapping[str, str]) -> Mapping[str, int]:
    """Return the CDI paths that only root can read: engines of other users need them too."""
    wanted = {**dict.fromkeys(SPECIFICATION_FOLDERS, 0o005), **dict.fromkeys(_specifications(texts), 0o004)}
    found = {path: one.mode for path in wanted if (one := system.status(system.real_path(path)))}
    return {path: mode for path, mode in found.items() if mode & wanted[path] != wanted[path]}


def _rootless(system: System) -> tuple[str, ...]:
    """Return the sockets of users' own dockers that can give no GPU yet, by their daemon.json."""
    accounts = (line.split(":") for line in (system.read_text("/etc/passwd") or "").splitlines())
    homes = {fields[2]: fields[5] for fields in accounts if len(fields) > 5}
    found = []
    for user in system.list_directory("/run/user"):
        path = f"{homes.get(user, '')}/.config/docker/daemon.json"
        # A home on NFS, or a user's own file system, may be closed to root: then it is unknown.
        with contextlib.suppress(OSError):
            start = (system.read_start(path, _LARGEST_TEXT) or b"") if user in homes else b""
            config = parse_config(start.decode("utf-8", "replace"), path)[0]
            ready = "nvidia" in (config.get("runtimes") or {}) or (config.get("features") or {}).get("cdi")
            if not ready and system.exists(f"/run/user/{user}/docker.sock"):
                found.append(f"/run/user/{user}/docker.sock")
    return tuple(found)


def _rewritten(system: System, runs: Sequence[Run], path: str) -> int:
    """Return how many runs wrote docker's file otherwise than it is now."""
    entries = [entry for run in runs for entry in run.entries if entry.state == "done"]
    written = [((entry.outcome or {}).get("written") or {}).get(path) for entry in entries]
    now = file_digest(system, path)
    return sum(digest not in (None, now) for digest in written) if now not in written else 0


def gather_containers(system: System) -> Containers:
    """Return the libraries that the running containers of docker and podman load, examined from outside.

    The same examination as `gpuprov cuda CONTAINER`: through /proc/PID/root, without following links out of it, and
    without running anything in a container. Number and time are limited: a host may have hundreds of containers, and a
    file system may hang.
    """
    found: list[Loaded] = []
    waiting: list[tuple[str, str]] = []
    # A file system of a container that does not answer would keep this process, but not a thread's caller.
    why: list[str] = []
    # A System notices once that it is to stop: this one's is the caller's to notice.
    worker = threading.Thread(target=_examine_all, args=(copy.copy(system), found, waiting, why), daemon=True)
    worker.start()
    worker.join(CONTAINERS_SECONDS)
    if worker.is_alive():
        return Containers(tuple(found), len(waiting), f"not done after {CONTAINERS_SECONDS} s")
    return Containers(tuple(found), len(waiting), (why or [f"{MOST_CONTAINERS} are looked at" if waiting else ""])[0])


def _examine_all(system: System, found: list[Loaded], waiting: list[tuple[str, str]], why: list[str]) -> None:
    try:
        waiting.extend(_with_gpus(system, why))
        for engine, name in tuple(waiting[:MOST_CONTAINERS]):
            # One that has stopped meanwhile can't be read.
            with contextlib.suppress(GpuprovError, OSError):
                found.append(Loaded(engine, name, faults_of_winners(survey(system, name, Program()))))
            waiting.remove((engine, name))
    except Exception as error:  # a thread would print it, and doctor say nothing of what was left out
        why.append(f"{type(error).__name__}: {str(error)[:200]}")


def _with_gpus(system: System, why: list[str]) -> list[tuple[str, str]]:
    """Return engine and name of each running container that has the driver's device node."""
    found = []
    for engine in ENGINES:
        if system.which(engine) is None:
            continue
        listed = system.run((engine, "ps", "--format", "{{.Names}}"), timeout=_ENGINE_SECONDS)
        names = listed.stdout.split() if listed.ok else []
        # Of a docker that does not answer, other rules know.
        why.extend([listed.evidence(2)] if engine == "podman" and not listed.ok else [])
        if not names:
            continue
        words = (engine, "inspect", "--type", "container", "--format", "{{.State.Pid}} {{.Name}}", "--", *names)
        # One that was removed meanwhile has no line.
        lines = (line.split() for line in system.run(words, timeout=_ENGINE_SECONDS).stdout.splitlines())
        found += [(engine, line[1].lstrip("/")) for line in lines if len(line) == 2 and has_gpu_node(line[0])]
    return found


def has_gpu_node(pid: str) -> bool:
    """Say whether the process of a container sees the node that all GPUs share."""
    if not pid.isdecimal() or pid == "0":
        return False
    with contextlib.suppress(OSError), contextlib.closing(Root(f"/proc/{pid}/root", of_process=True)) as root:
        return root.exists("/dev/nvidiactl")
    return False


def faults_of_winners(found: Survey) -> tuple[Incompatibility, ...]:
    """Return what is wrong with the library that wins; a container without one may not have requested it."""
    winners = {one.name for one in found.libraries if one.winner is not None}
    return tuple(one for one in found.faults if one.library in winners)
