"""Docker: missing, stopped, without the runtime, not restarted since, another docker, denied devices. Pure."""

from __future__ import annotations

import re
import shlex

from gpuprov.doctor import suggested_commands as commands
from gpuprov.doctor.finding import CERTAIN, LIKELY, STEPS, UNITS, WARNING, Remedy
from gpuprov.doctor.rules import Seen, conditions, seen_of
from gpuprov.doctor.snapshot import HostSnapshot, find_in_log, lines_in_log
from gpuprov.engines import docker as engine
from gpuprov.engines.docker_change import RUNTIME
from gpuprov.engines.docker_config import parse_config
from gpuprov.engines.docker_unit import PID_FILE, UNIT, decisive_lines, flag_values, listens_at
from gpuprov.protocol.errors import Problem
from gpuprov.runtime_hook.deploy import NVIDIA_HOOK_PATH, is_ours

_CONTAINERD = "containerd.service"
_FLAGS_TWICE = "specified both as a flag and in the configuration file"
_OTHER_ENGINES = {"/usr/bin/podman", "/usr/bin/crio", "/usr/bin/nerdctl", "/usr/local/bin/nerdctl"}
# Settings of systemd.exec(5) that give a unit mounts of its own.
_OWN_MOUNTS = r"(?m)^# (/.*)|^((?:MountFlags|Private(?:Tmp|Devices|Mounts)|Protect\w+|\w+Paths)=)(.+)"
_AVC = r'avc: +denied(?=.*scontext=\S*(?:container|docker|svirt|\.process)).*?(?:nvidia|xserver_|name="(?:card|render))'
conditions({
    "docker-masked": lambda x: (unit := x.host.docker.unit).load == "masked" and not (unit.is_foreign and in_daemon(x))
        and seen_of(engine.restart_problem(unit) or engine.MASKED),
    "docker-unit-changed": lambda x: x.host.docker.active and x.host.docker.unit.is_outdated
        and seen_of(engine.outdated(x.host.docker), CERTAIN, (Remedy(UNITS, (UNIT,)),), commands.restart_docker(x)),
    # A containerd that is an engine of its own has the rule engine-down.
    "docker-containerd-down": lambda x: (unit := x.units.get(_CONTAINERD)) is not None and x.host.docker.installed
        and unit.load == "loaded" and "containerd" not in x.spec.engines
        and (unit.active in ("inactive", "failed") or (unit.active == "activating" and unit.result != "success"))
        and flag_values(x.host.docker.unit.arguments, "--containerd")[-1:] == ("/run/containerd/containerd.sock",)
        and Seen(f"systemctl show {_CONTAINERD}: {unit.active}, {unit.result}"),
    "hook-covered": lambda x: NVIDIA_HOOK_PATH in x.there and x.host.docker.active
        and (path := x.programs.get("nvidia-container-runtime-hook", NVIDIA_HOOK_PATH)) != NVIDIA_HOOK_PATH
        and Seen(f"command -v nvidia-container-runtime-hook: {path}", path=path, quoted=shlex.quote(path)),
    "docker-is-podman": lambda x: "podman-docker" in x.host.packages.installed
        and "package podman-docker is installed",
    "docker-rootless": lambda x: x.rootless and Seen(x.rootless[0], user=x.rootless[0].split("/")[3]),
    "docker-snap": lambda x: x.host.docker.snap
        and seen_of(engine.FROM_SNAP, next_step=f"snap remove docker; {commands.gpuprov_install(x)}"),
    "docker-unreachable": lambda x: x.host.docker.installed and not x.host.docker.active
        and (unit := x.units.get(UNIT)) is not None and unit.active == "active"
        and seen_of(engine.unreachable(x.host.docker), LIKELY),
    # Of several drop-ins the last one counts.
    "hook-not-on-path": lambda x: (paths := re.findall(r"(?m)^Environment=.*\bPATH=([^\s\"]+)", x.docker_unit))
        and "/usr/bin" not in paths[-1].split(":") and f"systemctl cat docker: PATH={paths[-1]}",
    "docker-context": lambda x: (
            found := re.search(r'"currentContext"\s*:\s*"([^"]+)"', x.texts.get("/root/.docker/config.json", "")))
        is not None and found[1] != "default"
        and Seen(f"/root/.docker/config.json: currentContext is {found[1]}", context=found[1]),
    "selinux-denies": lambda x: x.selinux == "Enforcing"
        and (lines := lines_in_log((*x.kernel_log, *x.audit_log), _AVC)) and _denied(x, lines),
    "apparmor-denies": lambda x: lines_in_log(x.kernel_log, r"apparmor=\"DENIED\".*?(?:nvidia|libcuda)"),
})  # fmt: skip


def _denied(x: HostSnapshot, lines: tuple[str, ...]) -> Seen:
    """Say what SELinux denies: a container's use of devices has a boolean, all else only the container's label."""
    if "tclass=chr_file" not in lines[0]:
        step = "podman run --rm --device nvidia.com/gpu=all --security-opt=label=disable IMAGE nvidia-smi -L"
        return Seen(*lines, denied="files of NVIDIA's", step=f"{step}  # what else it denies: ausearch -m avc -ts boot")
    if ":device_t:" in lines[0]:
        return Seen(*lines, denied="GPUs' devices, whose labels are not the policy's", confidence=LIKELY,
                    step="restorecon -R -v /dev/nvidia*; gpuprov install  # its unit does so at each boot")  # fmt: skip
    # The narrower one, container_use_xserver_devices, is the later one, and not in each policy.
    boolean = ("container_use_devices", *x.selinux_off)[-1]
    step = f"setsebool -P {boolean} 1  # or per container: --security-opt=label=disable"
    return Seen(*lines, denied="the GPUs' devices", step=step, confidence=LIKELY if x.selinux_off else "")


def in_file(x: HostSnapshot) -> str:
    """Return the path of runtime nvidia in daemon.json, "" if it is not registered."""
    entry = (x.host.docker.config.get("runtimes") or {}).get(RUNTIME)
    return str(entry.get("path") or "") if isinstance(entry, dict) else ""


def in_daemon(x: HostSnapshot) -> str:
    """Return the path of runtime nvidia in the running docker, "" if it is not registered."""
    return (x.host.docker.runtimes or {}).get(RUNTIME, "")


def _line_of(x: HostSnapshot, word: str) -> str:
    lines = (x.host.docker.config_text or "").splitlines()
    number = next((number for number, line in enumerate(lines, 1) if word in line), 1)
    return f"{x.host.docker.config_path}:{number}"


def _wrong(x: HostSnapshot) -> tuple[Problem, ...]:
    """Return what gpuprov can't read in docker's file; docker may still be able to read it."""
    facts = x.host.docker
    return parse_config(facts.config_text, facts.config_path, facts.version)[1]


def docker_missing(x: HostSnapshot) -> Seen | None:
    # docker needs containerd, which stays when docker is removed.
    others = x.host.kubernetes or _OTHER_ENGINES & x.there or (
        "containerd" in x.spec.engines and "/usr/bin/containerd" in x.there
    )  # fmt: skip
    if x.host.docker.installed or x.host.docker.snap or (others and not in_file(x)):
        return None
    left = [f"{x.host.docker.config_path}: runtime nvidia is {in_file(x)}"] if in_file(x) else []
    what = "docker is not installed" if left or "/usr/bin/containerd" in x.there else ""
    return Seen("command -v dockerd: nothing", *left, meaning=what)


def docker_mounts_apart(x: HostSnapshot) -> Seen | None:
    """Say whether containerd does not see the root file systems that docker mounts for its containers."""
    found = re.search(r"(?m)^ *\d+ (\S*/dockerd .*)", x.mount_namespaces)
    containerd = x.units.get(_CONTAINERD)
    if found is None or containerd is None or containerd.active != "active":
        return None
    seen, steps, path = [f"lsns -t mnt: {found[1]}"], [], ""
    for place, name, value in re.findall(_OWN_MOUNTS, x.docker_unit):
        path = place or path
        if name and value not in ("no", "false", "off", "0"):
            seen.append(f"{path}: {name}{value}")
            steps.append(f"sed -i 's/^{name}/#&/' {shlex.quote(path)}; ")
    return Seen(*seen, first="".join(steps)) if steps else None


def daemon_json_broken(x: HostSnapshot) -> Seen | None:
    facts, path = x.host.docker, x.host.docker.config_path
    wrong, said = _wrong(x), _refused(x)
    if not facts.installed or not (wrong or said or facts.config_kind) or _FLAGS_TWICE in said:
        return None
    if facts.config_kind:
        step = f"mv {shlex.quote(path)} {shlex.quote(f'{path}.old')}; {commands.start_docker(x)}"
        return seen_of(engine.not_a_file(facts), "" if said else LIKELY, next_step=step)
    line = re.match(r"line (\d+)", wrong[0].evidence) if wrong else None
    first = f"${{EDITOR:-vi}} {f'+{line[1]} ' if line else ''}{shlex.quote(path)}"
    ours = [f"{path}:{line[1] if line else '1'}: {wrong[0].evidence}"] if wrong else []
    if said:
        what = wrong[0].what if wrong else f"it refuses {path}"
        return Seen(f"dockerd: {said}", *ours, what=what, first=first)
    what = f"docker takes its configuration, gpuprov can't edit it: {wrong[0].what}"
    return Seen(ours[0], meaning=what, next_step=first, confidence=WARNING)


def _refused(x: HostSnapshot) -> str:
    """Return why dockerd refuses its file: its answer now, or its log of the failed start."""
    found = find_in_log(x.docker_log, r"unable to configure the Docker daemon with file \S+: (?P<why>.*\S)")
    logged = found[0]["why"] if found is not None and not x.host.docker.active else ""
    return x.host.docker.refused or logged


def docker_flags_twice(x: HostSnapshot) -> Seen | None:
    pattern = rf"{_FLAGS_TWICE}: (?P<names>[^\"]*?)(?:\(|$|\")"
    if asked := re.search(pattern, x.host.docker.refused):
        return Seen(f"dockerd: {asked[0]}", names=asked["names"].strip(" :"))
    found = None if x.host.docker.active else find_in_log(x.docker_log, pattern)
    return Seen(f"journalctl -u docker: {found[1][0]}", names=found[0]["names"].strip(" :")) if found else None


def docker_disabled(x: HostSnapshot) -> Seen | None:
    unit, docker = x.units.get(UNIT), x.host.docker
    is_off = unit is not None and unit.load == "loaded" and unit.enabled == "disabled" and unit.active != "failed"
    if not docker.installed or not is_off or unit is None or docker.unit.name != "docker":
        return None
    seen, step, what = f"systemctl show {UNIT}: {unit.enabled}, {unit.active}", f"systemctl enable {UNIT}", ""
    if docker.unit.on_demand:
        what = "docker is disabled: after a boot nothing runs until docker.socket starts it"
    elif docker.active or unit.active == "active":
        what = "docker is disabled: it does not run after the next boot"
    return Seen(seen, meaning=what, next_step=step, confidence=WARNING) if what else Seen(seen)


def docker_down(x: HostSnapshot) -> Seen | None:
    docker, unit = x.host.docker, x.units.get(UNIT)
    if not docker.installed or docker.active or (unit is not None and unit.active == "active"):
        return None
    said = decisive_lines("\n".join(x.docker_log)).splitlines()
    state = f"systemctl show {UNIT}: {unit.active}, {unit.result}" if unit else docker.error
    reason = re.sub(r'.*?msg="([^"]+)".*', r": \1", f": {said[-1]}")[:202] if said else ""
    # Without systemd it is unknown whether docker runs.
    refused = [one.evidence for one in (engine.restart_problem(docker.unit),) if one is not None]
    return Seen(state, *(f"journalctl -u docker: {line}" for line in said[-2:]), *refused,
                why=f"{'run' if unit else 'answer'}{reason}", confidence="" if unit else LIKELY)  # fmt: skip


def docker_not_restarted(x: HostSnapshot) -> list[str] | None:
    wanted, has = in_file(x), in_daemon(x)
    if not x.host.docker.active or not wanted or wanted == has:
        return None
    known = f"has runtime nvidia as {has}" if has else f"knows {', '.join(sorted(x.host.docker.runtimes or {}))} alone"
    return [f"{_line_of(x, wanted)}: runtime nvidia is {wanted}", f"docker info: the running docker {known}"]


def runtime_unregistered(x: HostSnapshot) -> Seen | None:
    if not x.host.docker.active or in_file(x) or in_daemon(x) or _wrong(x):
        return None
    facts, step = x.host.docker, commands.gpuprov_install(x)
    if not commands.is_gpuprovs(x):
        step = f"nvidia-ctk runtime configure --runtime=docker; {commands.restart_docker(x)}"
    return Seen(
        f"{facts.config_path}: {'no runtimes.nvidia' if facts.config_text is not None else 'No such file'}",
        f"docker info: runtimes {', '.join(sorted(facts.runtimes or {}))}", *_rewritten(x),
        next_step=f"{_who_rewrites(x)}{step}",
        # `--device nvidia.com/gpu=all` works without the runtime.
        confidence=WARNING if facts.cdi and not commands.is_gpuprovs(x) else CERTAIN,
    )  # fmt: skip


def runtime_unsaved(x: HostSnapshot) -> Seen | None:
    by_flag = "add-runtime" in x.docker_unit or "add-runtime" in x.texts.get("/etc/default/docker", "")
    by_flag = by_flag or RUNTIME in x.host.docker.unit.flag_runtimes
    if not in_daemon(x) or in_file(x) or by_flag or _wrong(x):
        return None
    missing = f"{x.host.docker.config_path}: no runtimes.nvidia"
    return Seen(f"docker info: runtime nvidia is {in_daemon(x)}", missing, *_rewritten(x), first=_who_rewrites(x))


def _rewritten(x: HostSnapshot) -> list[str]:
    """Return the evidence that a tool rewrites docker's file after each installation, if one seems to."""
    runs = x.docker_file_rewritten
    seen = f"/var/lib/gpuprov/runs: {runs} runs wrote it, and another tool wrote it after each"
    return [seen] if runs > 1 else []


def _who_rewrites(x: HostSnapshot) -> str:
    """Return the command that shows what ran when such a tool wrote docker's file; it would do so again."""
    written = int(x.modified.get(x.host.docker.config_path, 0)) if _rewritten(x) else 0
    return f"journalctl --no-pager --since @{written - 60} --until @{written + 60}; " if written else ""


def default_runtime_unknown(x: HostSnapshot) -> Seen | None:
    config = x.host.docker.config
    name = str(config.get("default-runtime") or "")
    path = (x.host.docker.runtimes or {}).get(name, "")
    if path in x.absent and name != RUNTIME:
        what = f"no container starts without --runtime: the program of docker's default runtime {name} is missing"
        seen = f"{_line_of(x, name)}: default-runtime: {name}", f"ls {path}: No such file or directory"
        return Seen(*seen, meaning=what)
    known = {"runc", *(config.get("runtimes") or {}), *x.host.docker.unit.flag_runtimes}
    if not name or name in known or name.startswith("io.containerd"):
        return None
    return Seen(f"{_line_of(x, name)}: default-runtime: {name}", name=name)


def default_runtime_isolates(x: HostSnapshot) -> Seen | None:
    """Say whether the default runtime gives containers another kernel, to which the host's driver does not belong."""
    name = str(x.host.docker.config.get("default-runtime") or "")
    entry = str((x.host.docker.config.get("runtimes") or {}).get(name, ""))
    there = bool(entry) or name.startswith("io.containerd.")
    if not there or not re.search("kata|runsc", f"{name} {entry}") or "nvproxy" in entry:
        return None
    return Seen(f"{_line_of(x, 'default-runtime')}: default-runtime: {name}", f"runtimes: {name}: {entry}", name=name)


def hook_missing(x: HostSnapshot) -> Seen | None:
    is_there = x.programs.get("nvidia-container-runtime-hook")
    if not x.host.docker.active or is_there or not (in_daemon(x) or in_file(x)):
        return None
    seen, package = "command -v nvidia-container-runtime-hook: nothing", "nvidia-container-toolkit"
    # Not the package that has the runtime, nvidia-container-toolkit-base.
    if package in x.host.packages.installed:
        return Seen(seen, again=commands.reinstall_packages(x, package))
    if (other := x.host.files.get(NVIDIA_HOOK_PATH)) and not is_ours(other.content):  # so it stays
        again = f"rm {NVIDIA_HOOK_PATH}; {commands.gpuprov_install(x)}"
        return Seen(seen, f"{NVIDIA_HOOK_PATH} is there, and no program", again=again, remedies=())
    remedies = (Remedy(STEPS, ("toolkit",)), Remedy(UNITS, (UNIT,)))
    return Seen(seen, again=commands.gpuprov_install(x), remedies=remedies)


def hook_unseen(x: HostSnapshot) -> Seen | None:
    found = find_in_log(x.docker_log, r"could not select device driver (?!\\?\"cdi)")
    hook, begun = x.modified.get(NVIDIA_HOOK_PATH, 0.0), x.modified.get(PID_FILE, 0.0)
    if NVIDIA_HOOK_PATH not in x.there or not x.host.docker.active:
        return None
    if found is not None:
        return Seen(f"journalctl -u docker: {found[1][0]}", f"ls {NVIDIA_HOOK_PATH}: it is there now")
    # An update of the hook needs no restart: docker found the earlier one.
    if not begun or hook <= begun or (x.installed is not None and NVIDIA_HOOK_PATH in x.installed.replaced):
        return None
    what = "the hook of `docker run --gpus` is newer than the running docker, which looks for it when it starts"
    return Seen(f"stat {NVIDIA_HOOK_PATH} {PID_FILE}", meaning=what, confidence=WARNING, remedies=())


def log_driver_unreachable(x: HostSnapshot) -> Seen | None:
    found = find_in_log(x.docker_log, r"failed to initialize logging driver: \S")
    if found is None:
        return None
    seen, driver = f"journalctl -u docker: {found[1][0][:300]}", str(x.host.docker.config.get("log-driver") or "")
    if driver:
        configured = f"{_line_of(x, 'log-driver')}: log-driver: {driver}"
        return Seen(seen, configured, effect="no container starts", driver=driver, confidence=LIKELY)
    # Asked for by --log-driver: that concerns the one container alone.
    step = "journalctl -u docker | grep 'logging driver'  # start the server that it names"
    return Seen(seen, effect="a container did not start", next_step=step, confidence=WARNING)


def docker_host(x: HostSnapshot) -> Seen | None:
    text, facts = x.texts.get("/etc/environment", ""), x.host.docker
    found = re.search(r"""^\s*(?:export )?DOCKER_HOST=["']?([^"'\s]+)""", text, re.MULTILINE)
    if found is None or not facts.installed or not facts.unit.load:
        return None
    if _place(found[1]) in {_place(one) for one in (facts.address, *listens_at(facts.unit, facts.config.get("hosts")))}:
        return None
    seen = f"/etc/environment: DOCKER_HOST={found[1]}", f"this host's docker listens at {facts.address}"
    return Seen(*seen, other=found[1])


def _place(address: str) -> str:
    """Return an address without the names of this host's own interfaces."""
    address = re.sub(r"^tcp://(?:127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1?\])", "tcp://", address)
    return address.replace("unix:///var/run/", "unix:///run/")
