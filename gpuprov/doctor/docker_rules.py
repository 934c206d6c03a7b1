"""Docker: missing, stopped, without the runtime, not restarted since, another docker, denied devices. Pure."""

from __future__ import annotations

import re
import shlex

from gpuprov.doctor.finding import (
    CERTAIN,
    DOCKER,
    LIKELY,
    POSSIBLE,
    WARNING,
    Finding,
    Rule,
    Rules,
    finding_of,
    restart,
    steps,
)
from gpuprov.doctor.parse import find_in_log
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.doctor.suggested_commands import gpuprov_install, is_gpuprovs, reinstall_packages, restart_docker
from gpuprov.engines import docker
from gpuprov.engines.docker_config import parse_config
from gpuprov.engines.docker_unit import decisive_lines, listens_at
from gpuprov.protocol.errors import Problem
from gpuprov.runtime_hook.deploy import NVIDIA_HOOK_PATH

RULES = Rules()

_RUNTIME = "nvidia"
_PID_FILE = "/run/docker.pid"
_UNIT = "docker.service"
_FLAGS_TWICE = "specified both as a flag and in the configuration file"
_OTHER_ENGINES = {
    "/usr/bin/podman", "/usr/bin/crio", "/usr/bin/kubelet", "/usr/local/bin/k3s", "/usr/bin/nerdctl",
    "/usr/local/bin/nerdctl",
}  # fmt: skip
_STEP, _RESTART = (steps("docker"),), (restart(_UNIT),)
_NO_DRIVER = r"could not select device driver"


def in_file(x: HostSnapshot) -> str:
    """Return the path of runtime nvidia in daemon.json, "" if it is not registered."""
    entry = (x.host.docker.config.get("runtimes") or {}).get(_RUNTIME)
    return str(entry.get("path") or "") if isinstance(entry, dict) else ""


def in_daemon(x: HostSnapshot) -> str:
    """Return the path of runtime nvidia in the running docker, "" if it is not registered."""
    return (x.host.docker.runtimes or {}).get(_RUNTIME, "")


def _line_of(x: HostSnapshot, word: str) -> str:
    lines = (x.host.docker.config_text or "").splitlines()
    number = next((number for number, line in enumerate(lines, 1) if word in line), 1)
    return f"{x.host.docker.config_path}:{number}"


def _start(x: HostSnapshot) -> str:
    return f"systemctl reset-failed docker; {restart_docker(x)}"


def _wrong(x: HostSnapshot) -> tuple[Problem, ...]:
    """Return what gpuprov can't read in docker's file; docker may still be able to read it."""
    facts = x.host.docker
    return parse_config(facts.config_text, facts.config_path, facts.version)[1]


@RULES.add("docker-missing", DOCKER, "no dockerd, and no other engine in its place")
def _docker_missing(x: HostSnapshot) -> Finding | None:
    # docker needs containerd, which stays when docker is removed.
    others = _OTHER_ENGINES & x.there or ("containerd" in x.spec.engines and "/usr/bin/containerd" in x.there)
    if x.host.docker.installed or x.host.docker.snap or (others and not in_file(x)):
        return None
    left = [f"{x.host.docker.config_path}: runtime nvidia is {in_file(x)}"] if in_file(x) else []
    what = "docker is not installed" if left or "/usr/bin/containerd" in x.there else "no container engine is installed"
    return Finding(what, "\n".join(["command -v dockerd: nothing", *left]), gpuprov_install(x))


@RULES.add("docker-snap", DOCKER, "/snap/bin/docker, and no dockerd")
def _docker_snap(x: HostSnapshot) -> Finding | None:
    if not x.host.docker.snap:
        return None
    return finding_of(docker.FROM_SNAP, next_step=f"snap remove docker; {gpuprov_install(x)}")


@RULES.add("daemon-json-broken", DOCKER, "dockerd refuses its configuration file, or gpuprov can't edit it")
def _daemon_json_broken(x: HostSnapshot) -> Finding | None:
    facts, path = x.host.docker, x.host.docker.config_path
    wrong, said = _wrong(x), _refused(x)
    if not facts.installed or not (wrong or said or facts.config_kind) or _FLAGS_TWICE in said:
        return None
    if facts.config_kind:
        step = f"mv {shlex.quote(path)} {shlex.quote(f'{path}.old')}; {_start(x)}"
        return finding_of(docker.not_a_file(facts), CERTAIN if said else LIKELY, next_step=step)
    line = re.match(r"line (\d+)", wrong[0].evidence) if wrong else None
    place = f"+{line[1]} {path}" if line else path
    ours = [f"{path}:{line[1] if line else '1'}: {wrong[0].evidence}"] if wrong else []
    if said:
        what = wrong[0].what if wrong else f"it refuses {path}"
        return Finding(f"docker can't read its configuration: {what}", "\n".join([f"dockerd: {said}", *ours]),
                       f"${{EDITOR:-vi}} {place}; {_start(x)}")  # fmt: skip
    return Finding(f"docker takes its configuration, gpuprov can't edit it: {wrong[0].what}", ours[0],
                   f"${{EDITOR:-vi}} {place}", WARNING)  # fmt: skip


def _refused(x: HostSnapshot) -> str:
    """Return why dockerd refuses its file: its answer now, or its log of the failed start."""
    found = find_in_log(x.docker_log, r"unable to configure the Docker daemon with file \S+: (?P<why>.*\S)")
    logged = found[0]["why"] if found is not None and not x.host.docker.active else ""
    return x.host.docker.refused or logged


@RULES.add("docker-flags-twice", DOCKER, "docker's log: specified both as a flag and in the configuration file")
def _docker_flags_twice(x: HostSnapshot) -> Finding | None:
    pattern = r"specified both as a flag and in the configuration file: (?P<names>[^\"]*?)(?:\(|$|\")"
    found = find_in_log(x.docker_log, pattern)
    asked = re.search(pattern, x.host.docker.refused)
    if asked is None and (found is None or x.host.docker.active):
        return None
    names = asked["names"] if asked else found[0]["names"] if found else ""
    seen = f"dockerd: {asked[0]}" if asked else f"journalctl -u docker: {found[1][0] if found else ''}"
    path = x.host.docker.config_path
    return Finding(
        f"docker does not start: {names.strip(' :')} stands in {path} and on dockerd's command line",
        seen,
        f"systemctl cat docker; ${{EDITOR:-vi}} {path}; {_start(x)}  # take one of the two out",
    )


@RULES.add("docker-masked", DOCKER, "the unit is masked")
def _docker_masked(x: HostSnapshot) -> Finding | None:
    return finding_of(docker.MASKED) if x.host.docker.unit.load == "masked" else None


@RULES.add("docker-disabled", DOCKER, "the unit is disabled")
def _docker_disabled(x: HostSnapshot) -> Finding | None:
    unit, docker = x.units.get(_UNIT), x.host.docker
    if not docker.installed or unit is None or unit.load != "loaded" or unit.enabled != "disabled":
        return None
    if unit.active == "failed":
        return None
    evidence = f"systemctl show {_UNIT}: {unit.enabled}, {unit.active}"
    if docker.unit.on_demand:
        what = "docker is disabled: after a boot nothing runs until docker.socket starts it"
        return Finding(what, evidence, f"systemctl enable {_UNIT}", WARNING, _STEP)
    if docker.active or unit.active == "active":
        what = "docker is disabled: it does not run after the next boot"
        return Finding(what, evidence, f"systemctl enable {_UNIT}", WARNING, _STEP)
    what = "docker is disabled, so nothing started it"
    return Finding(what, evidence, f"systemctl enable --now {_UNIT}", remedies=_STEP)


@RULES.add("docker-unreachable", DOCKER, "the unit is active, and `docker info` gets no answer")
def _docker_unreachable(x: HostSnapshot) -> Finding | None:
    unit = x.units.get(_UNIT)
    if not x.host.docker.installed or x.host.docker.active or unit is None or unit.active != "active":
        return None
    return finding_of(docker.unreachable(x.host.docker), LIKELY)


@RULES.add(
    "docker-down",
    DOCKER,
    "`docker info` gets no answer, and the unit is not active",
    ("daemon-json-broken", "docker-flags-twice", "docker-masked", "docker-disabled", "default-runtime-unknown"),
)
def _docker_down(x: HostSnapshot) -> Finding | None:
    docker, unit = x.host.docker, x.units.get(_UNIT)
    if not docker.installed or docker.active or (unit is not None and unit.active == "active"):
        return None
    said = decisive_lines("\n".join(x.docker_log)).splitlines()
    state = f"systemctl show {_UNIT}: {unit.active}, {unit.result}" if unit else docker.error
    return Finding(
        f"docker does not {'run' if unit else 'answer'}{': ' + _reason(said[-1]) if said else ''}",
        "\n".join([state, *(f"journalctl -u docker: {line}" for line in said[-2:])]),
        f"{_start(x)}; journalctl -u docker -n 30 --no-pager",
        # Without systemd it is unknown whether docker runs.
        CERTAIN if unit else LIKELY,
        _STEP,
    )


@RULES.add("docker-unit-changed", DOCKER, "the running dockerd reads another file than its unit names")
def _docker_unit_changed(x: HostSnapshot) -> Finding | None:
    if not x.host.docker.active or not x.host.docker.unit.is_outdated:
        return None
    return finding_of(docker.outdated(x.host.docker), remedies=_RESTART, next_step=restart_docker(x))


def _reason(line: str) -> str:
    found = re.search(r'msg="([^"]+)"', line)
    return (found[1] if found else line)[:200]


@RULES.add(
    "docker-not-restarted",
    DOCKER,
    "daemon.json has runtime nvidia, `docker info` has not, or another path",
    ("docker-unit-changed",),
)
def _docker_not_restarted(x: HostSnapshot) -> Finding | None:
    wanted, has = in_file(x), in_daemon(x)
    if not x.host.docker.active or not wanted or wanted == has:
        return None
    known = f"has runtime nvidia as {has}" if has else f"knows {', '.join(sorted(x.host.docker.runtimes or {}))} alone"
    return Finding(
        "docker has not been restarted since its configuration changed",
        f"{_line_of(x, wanted)}: runtime nvidia is {wanted}\ndocker info: the running docker {known}",
        restart_docker(x),
        remedies=_STEP,
    )


@RULES.add(
    "runtime-unregistered", DOCKER, "neither daemon.json nor `docker info` has runtime nvidia", ("toolkit-missing",)
)
def _runtime_unregistered(x: HostSnapshot) -> Finding | None:
    if not x.host.docker.active or in_file(x) or in_daemon(x) or _wrong(x):
        return None
    facts, step = x.host.docker, gpuprov_install(x)
    if not is_gpuprovs(x):
        step = f"nvidia-ctk runtime configure --runtime=docker; {restart_docker(x)}"
    return Finding(
        "docker does not know the runtime nvidia",
        f"{facts.config_path}: {'no runtimes.nvidia' if facts.config_text is not None else 'No such file'}\n"
        f"docker info: runtimes {', '.join(sorted(facts.runtimes or {}))}{_rewritten(x)}",
        f"{_who_rewrites(x)}{step}",
        # `--device nvidia.com/gpu=all` works without the runtime.
        WARNING if facts.cdi and not is_gpuprovs(x) else CERTAIN,
        _STEP,
    )


@RULES.add("runtime-unsaved", DOCKER, "`docker info` has runtime nvidia, daemon.json and dockerd's flags have not")
def _runtime_unsaved(x: HostSnapshot) -> Finding | None:
    by_flag = "add-runtime" in x.docker_unit or "add-runtime" in x.texts.get("/etc/default/docker", "")
    by_flag = by_flag or _RUNTIME in x.host.docker.unit.flag_runtimes
    if not in_daemon(x) or in_file(x) or by_flag or _wrong(x):
        return None
    return Finding(
        "the runtime nvidia is gone from docker's configuration; docker forgets it at its next start",
        f"docker info: runtime nvidia is {in_daemon(x)}\n"
        f"{x.host.docker.config_path}: no runtimes.nvidia{_rewritten(x)}",
        f"{_who_rewrites(x)}{gpuprov_install(x)}",
        LIKELY,
        _STEP,
    )


def _rewritten(x: HostSnapshot) -> str:
    """Return the evidence that a tool rewrites docker's file after each installation, "" if none seems to."""
    if x.docker_file_rewritten < 2:
        return ""
    return f"\n/var/lib/gpuprov/runs: {x.docker_file_rewritten} runs wrote it, and another tool wrote it after each"


def _who_rewrites(x: HostSnapshot) -> str:
    """Return the command that shows what ran when such a tool wrote docker's file; it would do so again."""
    written = int(x.modified.get(x.host.docker.config_path, 0))
    return (
        f"journalctl --no-pager --since @{written - 60} --until @{written + 60}; " if _rewritten(x) and written else ""
    )


@RULES.add("default-runtime-unknown", DOCKER, "daemon.json: default-runtime names one that is not configured")
def _default_runtime_unknown(x: HostSnapshot) -> Finding | None:
    config = x.host.docker.config
    name = str(config.get("default-runtime") or "")
    if not name or name == "runc" or name in (config.get("runtimes") or {}) or name.startswith("io.containerd"):
        return None
    return Finding(
        f"docker's default runtime {name} is one that it does not have",
        f"{_line_of(x, name)}: default-runtime: {name}",
        f"${{EDITOR:-vi}} {x.host.docker.config_path}; {_start(x)}", LIKELY,
    )  # fmt: skip


@RULES.add(
    "hook-missing",
    DOCKER,
    "runtime nvidia is configured, nvidia-container-runtime-hook is not there",
    ("toolkit-missing", "runtime-files-missing"),
)
def _hook_missing(x: HostSnapshot) -> Finding | None:
    if not x.host.docker.active or NVIDIA_HOOK_PATH in x.there or x.programs.get("nvidia-container-runtime-hook"):
        return None
    if not in_daemon(x) and not in_file(x):
        return None
    # Not the package that has the runtime, nvidia-container-toolkit-base.
    packaged = "nvidia-container-toolkit" in x.host.packages.installed
    again = reinstall_packages(x, "nvidia-container-toolkit") if packaged else gpuprov_install(x)
    return Finding(
        "`docker run --gpus` has no hook to give containers GPUs by",
        f"ls {NVIDIA_HOOK_PATH}: No such file or directory",
        f"{again}; {restart_docker(x)}",
        remedies=() if packaged else (steps("toolkit"), *_RESTART),
    )


@RULES.add("hook-unseen", DOCKER, "docker's log: could not select device driver, and the hook is there now")
def _hook_unseen(x: HostSnapshot) -> Finding | None:
    found = find_in_log(x.docker_log, _NO_DRIVER)
    hook, begun = x.modified.get(NVIDIA_HOOK_PATH, 0.0), x.modified.get(_PID_FILE, 0.0)
    if NVIDIA_HOOK_PATH not in x.there or not x.host.docker.active:
        return None
    if found is not None:
        return Finding(
            "`docker run --gpus` finds no hook: docker looks for it when it starts, and it was not there then",
            f"journalctl -u docker: {found[1][0]}\nls {NVIDIA_HOOK_PATH}: it is there now",
            restart_docker(x),
            remedies=_RESTART,
        )
    # An update of the hook needs no restart: docker found the earlier one.
    if not begun or hook <= begun or (x.installed is not None and NVIDIA_HOOK_PATH in x.installed.replaced):
        return None
    return Finding(
        "the hook of `docker run --gpus` is newer than the running docker, which looks for it when it starts",
        f"stat {NVIDIA_HOOK_PATH} {_PID_FILE}", restart_docker(x), WARNING,
    )  # fmt: skip


@RULES.add("hook-not-on-path", DOCKER, "dockerd's PATH is set in its unit, without /usr/bin")
def _hook_not_on_path(x: HostSnapshot) -> Finding | None:
    # Of several drop-ins the last one counts.
    path = re.findall(r"Environment=.*\bPATH=([^\s\"]+)", x.docker_unit)
    if not path or "/usr/bin" in path[-1].split(":"):
        return None
    return Finding(
        "dockerd's PATH is set without /usr/bin, where the hook of `docker run --gpus` is",
        f"systemctl cat docker: PATH={path[-1]}", f"systemctl edit docker; {restart_docker(x)}", LIKELY,
    )  # fmt: skip


@RULES.add("log-driver-unreachable", DOCKER, "docker's log: `failed to initialize logging driver`")
def _log_driver_unreachable(x: HostSnapshot) -> Finding | None:
    found = find_in_log(x.docker_log, r"failed to initialize logging driver: \S")
    if found is None:
        return None
    what, seen = "docker's log driver does not reach its server", f"journalctl -u docker: {found[1][0][:300]}"
    driver = str(x.host.docker.config.get("log-driver") or "")
    if not driver:
        # Asked for by --log-driver: that concerns the one container alone.
        step = "journalctl -u docker | grep 'logging driver'  # start the server that it names"
        return Finding(f"{what}, so a container did not start", seen, step, WARNING)
    step = f"${{EDITOR:-vi}} {x.host.docker.config_path}; {restart_docker(x)}  # or start the server of {driver}"
    seen += f"\n{_line_of(x, 'log-driver')}: log-driver: {driver}"
    return Finding(f"{what}, so no container starts", seen, step, LIKELY)


@RULES.add("docker-is-podman", DOCKER, "package podman-docker")
def _docker_is_podman(x: HostSnapshot) -> Finding | None:
    if "podman-docker" not in x.host.packages.installed:
        return None
    return Finding(
        "`docker` is podman here: it takes --device nvidia.com/gpu=all, and older ones no --gpus",
        "package podman-docker is installed", "docker run --rm --device nvidia.com/gpu=all IMAGE nvidia-smi -L",
        WARNING,
    )  # fmt: skip


@RULES.add("docker-host", DOCKER, "/etc/environment: DOCKER_HOST is another docker's")
def _docker_host(x: HostSnapshot) -> Finding | None:
    found = re.search(
        r"""^\s*(?:export )?DOCKER_HOST=["']?([^"'\s]+)""", x.texts.get("/etc/environment", ""), re.MULTILINE
    )
    facts = x.host.docker
    if found is None or not facts.installed or not facts.unit.load:
        return None
    if _place(found[1]) in {_place(one) for one in (facts.address, *listens_at(facts.unit, facts.config.get("hosts")))}:
        return None
    return Finding(
        f"docker's clients talk to another docker than this host's: DOCKER_HOST is {found[1]}",
        f"/etc/environment: DOCKER_HOST={found[1]}\nthis host's docker listens at {facts.address}",
        "sed -i '/^\\s*DOCKER_HOST=/d' /etc/environment  # then log in again", LIKELY,
    )  # fmt: skip


@RULES.add("docker-context", DOCKER, "/root/.docker/config.json: currentContext is not default")
def _docker_context(x: HostSnapshot) -> Finding | None:
    found = re.search(r'"currentContext"\s*:\s*"([^"]+)"', x.texts.get("/root/.docker/config.json", ""))
    if found is None or found[1] == "default":
        return None
    return Finding(
        f"root's docker client talks to another docker: context {found[1]}",
        f"/root/.docker/config.json: currentContext is {found[1]}", "docker context use default", LIKELY,
    )  # fmt: skip


def _place(address: str) -> str:
    """Return an address without the names of this host's own interfaces."""
    address = re.sub(r"^tcp://(?:127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1?\])", "tcp://", address)
    return address.replace("unix:///var/run/", "unix:///run/")


@RULES.add("docker-rootless", DOCKER, "/run/user/UID/docker.sock is there")
def _docker_rootless(x: HostSnapshot) -> Finding | None:
    if not x.rootless:
        return None
    user = x.rootless[0].split("/")[3]
    return Finding(
        f"user {user} has a rootless docker of its own, which knows nothing of this one's runtimes",
        x.rootless[0],
        "${EDITOR:-vi} ~/.config/docker/daemon.json; systemctl --user restart docker  # as that user, with `runtimes` "
        "as in /etc/docker/daemon.json",
        WARNING,
    )


@RULES.add("selinux-denies", DOCKER, "Enforcing, and `avc: denied` with nvidia or xserver_misc_device_t")
def _selinux_denies(x: HostSnapshot) -> Finding | None:
    pattern = r"avc: +denied +\{(?P<what>[^}]*)\}.*?(?:nvidia|xserver_misc_device_t|name=\"(?:nvidia|card|render)\S*\")"
    found = find_in_log((*x.kernel_log, *x.audit_log), pattern)
    if found is None or x.selinux != "Enforcing":
        return None
    return Finding(
        "SELinux denies containers the GPUs' devices", "\n".join(found[1]),
        "setsebool -P container_use_devices 1  # or per container: --security-opt=label=disable",
        LIKELY if x.container_use_devices == "off" else POSSIBLE,
    )  # fmt: skip


@RULES.add("apparmor-denies", DOCKER, 'the kernel\'s log: apparmor="DENIED" with nvidia')
def _apparmor_denies(x: HostSnapshot) -> Finding | None:
    found = find_in_log(x.kernel_log, r"apparmor=\"DENIED\".*?(?:nvidia|libcuda)")
    if found is None:
        return None
    return Finding(
        "AppArmor denies something of NVIDIA's", "\n".join(found[1]), "aa-status; dmesg | grep DENIED", POSSIBLE
    )


# Messages in docker's log about containers that did not start, mostly past ones: words, pattern, meaning, next command.
_CONTAINER_ERRORS = (
    ("bpf-refused", "bpf_prog_query(BPF_CGROUP_DEVICE) failed",
     r"bpf_prog_query\(BPF_CGROUP_DEVICE\) failed|bpf_prog_attach\S* failed",
     "a container could not be given its devices: the engine runs without the rights to a device cgroup (rootless)",
     "gpuprov cdi list  # ask by CDI, or set no-cgroups = true for the rootless user"),
    ("library-not-loaded", "load library failed",
     r"load library failed: (?P<library>\S+?):",
     "NVIDIA's toolkit could not load a library of the driver", "ldconfig; ldconfig -p | grep -e nvidia-ml -e libcuda"),
    ("cdi-unresolved", "unresolvable CDI devices",
     r"unresolvable CDI devices? (?P<device>\S+)",
     "a container asked for a CDI device that no specification has", "gpuprov cdi list"),
    ("requirement-unmet", "unsatisfied condition",
     r"unsatisfied condition: (?P<condition>[^,\"]+)|gpuprov: requires (?P<wanted>[^,]+)",
     "an image needs another driver than this host's", "nvidia-smi  # take an image for this driver"),
)  # fmt: skip


def _log_rule(name: str, said: str, pattern: str, what: str, step: str) -> Rule:
    def look(x: HostSnapshot) -> Finding | None:
        found = find_in_log(x.docker_log, pattern)
        if found is None:
            return None
        return Finding(what, f"journalctl -u docker: {found[1][0][:300]}", step, WARNING)

    return Rule(name, DOCKER, f"docker's log: `{said}`", look)


RULES += (_log_rule(*row) for row in _CONTAINER_ERRORS)
