"""Causes in docker: not there, not up, not told of the runtime, or told and not restarted. Pure."""

from __future__ import annotations

import re

from gpuprov.doctor import words
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ASIDE, CERTAIN, DOCKER, LIKELY, Finding, Rule
from gpuprov.doctor.parse import find_in_log
from gpuprov.engines.docker_config import DAEMON_JSON, parse_config
from gpuprov.runtime_hook.deploy import NVIDIA_HOOK_PATH
from gpuprov.wire.versions import version_numbers

_RUNTIME = "nvidia"
_PID_FILE = "/run/docker.pid"
_UNIT = "docker.service"
_NO_DRIVER = r"could not select device driver"


def in_file(x: Examined) -> str:
    """Return the path of runtime nvidia as daemon.json has it, nothing where it has none."""
    entry = (parse_config(x.host.docker.config_text)[0].get("runtimes") or {}).get(_RUNTIME)
    return str(entry.get("path") or "") if isinstance(entry, dict) else ""


def in_daemon(x: Examined) -> str:
    """Return the path of runtime nvidia as the running docker has it, nothing where it has none."""
    return (x.host.docker.runtimes or {}).get(_RUNTIME, "")


def _line_of(x: Examined, word: str) -> str:
    lines = (x.host.docker.config_text or "").splitlines()
    number = next((number for number, line in enumerate(lines, 1) if word in line), 1)
    return f"{DAEMON_JSON}:{number}"


def _start(x: Examined) -> str:
    return f"systemctl reset-failed docker; {words.RESTART_DOCKER}"


def cdi_setting(x: Examined) -> object:
    """Return daemon.json's features.cdi, None where it says nothing."""
    features = parse_config(x.host.docker.config_text)[0].get("features")
    return features.get("cdi") if isinstance(features, dict) else None


def reads_cdi(x: Examined) -> bool:
    """Say whether the running docker takes devices by CDI: from 25 on where it is told to, from 28.2 on by itself."""
    setting, version = cdi_setting(x), version_numbers(x.host.docker.version)
    by_itself, as_told = setting is None and version >= (28, 2), setting is True and version >= (25,)
    return x.host.docker.active and (by_itself or as_told)


def _absent(x: Examined) -> Finding | None:
    others = {"/usr/bin/podman", "/usr/bin/crio", "/usr/bin/containerd"} & x.there
    if x.host.docker.installed or x.host.docker.snap or others:
        return None
    return Finding(
        "no container engine is installed", "command -v dockerd podman crio: nothing", words.gpuprov_install(x)
    )


def _snap(x: Examined) -> Finding | None:
    if not x.host.docker.snap:
        return None
    return Finding(
        "docker comes from snap, which keeps it from the host's driver and runtime", "/snap/bin/docker, and no dockerd",
        f"snap remove docker; {words.gpuprov_install(x)}",
    )  # fmt: skip


def _broken(x: Examined) -> Finding | None:
    wrong = parse_config(x.host.docker.config_text)[1]
    if not wrong:
        return None
    line = re.match(r"line (\d+)", wrong[0].evidence)
    number = line[1] if line else "1"
    return Finding(
        f"docker can't read its configuration: {wrong[0].what}",
        f"{DAEMON_JSON}:{number}: {wrong[0].evidence}",
        f"${{EDITOR:-vi}} +{number} {DAEMON_JSON}; {_start(x)}",
    )


def _twice(x: Examined) -> Finding | None:
    pattern = r"specified both as a flag and in the configuration file: (?P<names>[^\"]*?)(?:\(|$|\")"
    found = find_in_log(x.docker_log, pattern)
    if found is None or x.host.docker.active:
        return None
    return Finding(
        f"docker does not start: {found[0]['names'].strip(' :')} stands in {DAEMON_JSON} and on dockerd's command line",
        f"journalctl -u docker: {found[1][0]}",
        f"systemctl cat docker; ${{EDITOR:-vi}} {DAEMON_JSON}; {_start(x)}  # take one of the two out",
    )


def _masked(x: Examined) -> Finding | None:
    unit = x.units.get(_UNIT)
    if unit is None or unit.load != "masked":
        return None
    return Finding("docker is masked, so nothing starts it", f"systemctl show {_UNIT}: masked",
                   f"systemctl unmask {_UNIT}; systemctl start docker")  # fmt: skip


def _down(x: Examined) -> Finding | None:
    docker = x.host.docker
    if not docker.installed or docker.active:
        return None
    unit = x.units.get(_UNIT)
    said = [line for line in x.docker_log if re.search(r"level=(error|fatal)|failed to start daemon|unable to", line)]
    state = f"systemctl show {_UNIT}: {unit.active}, {unit.result}" if unit else docker.error
    return Finding(
        f"docker does not run{': ' + _reason(said[-1]) if said else ''}",
        "\n".join([state, *(f"journalctl -u docker: {line}" for line in said[-2:])]),
        f"{_start(x)}; journalctl -u docker -n 30 --no-pager",
    )


def _reason(line: str) -> str:
    found = re.search(r'msg="([^"]+)"', line)
    return (found[1] if found else line)[:200]


def _not_restarted(x: Examined) -> Finding | None:
    wanted, has = in_file(x), in_daemon(x)
    if not x.host.docker.active or not wanted or wanted == has:
        return None
    known = f"has runtime nvidia as {has}" if has else f"knows {', '.join(sorted(x.host.docker.runtimes or {}))} alone"
    return Finding(
        "docker has not been restarted since its configuration changed",
        f"{_line_of(x, wanted)}: runtime nvidia is {wanted}\ndocker info: the running docker {known}",
        words.RESTART_DOCKER,
    )


def _unregistered(x: Examined) -> Finding | None:
    if not x.host.docker.active or in_file(x) or in_daemon(x) or parse_config(x.host.docker.config_text)[1]:
        return None
    step = words.gpuprov_install(x)
    if not words.is_gpuprovs(x):
        step = f"nvidia-ctk runtime configure --runtime=docker; {words.RESTART_DOCKER}"
    return Finding(
        "docker does not know the runtime nvidia",
        f"{DAEMON_JSON}: {'no runtimes.nvidia' if x.host.docker.config_text is not None else 'No such file'}\n"
        f"docker info: runtimes {', '.join(sorted(x.host.docker.runtimes or {}))}",
        step,
        # `--device nvidia.com/gpu=all` does without.
        ASIDE if reads_cdi(x) and not words.is_gpuprovs(x) else CERTAIN,
    )


def _unsaved(x: Examined) -> Finding | None:
    by_flag = "add-runtime" in x.docker_unit or "add-runtime" in x.texts.get("/etc/default/docker", "")
    if not in_daemon(x) or in_file(x) or by_flag or parse_config(x.host.docker.config_text)[1]:
        return None
    return Finding(
        "the runtime nvidia is gone from docker's configuration; docker forgets it at its next start",
        f"docker info: runtime nvidia is {in_daemon(x)}\n{DAEMON_JSON}: no runtimes.nvidia",
        words.gpuprov_install(x),
        LIKELY,
    )


def _default_unknown(x: Examined) -> Finding | None:
    config = parse_config(x.host.docker.config_text)[0]
    name = str(config.get("default-runtime") or "")
    if not name or name == "runc" or name in (config.get("runtimes") or {}) or name.startswith("io.containerd"):
        return None
    return Finding(
        f"docker's default runtime {name} is one that it does not have",
        f"{_line_of(x, name)}: default-runtime: {name}",
        f"${{EDITOR:-vi}} {DAEMON_JSON}; {_start(x)}", LIKELY,
    )  # fmt: skip


def _hook_missing(x: Examined) -> Finding | None:
    if not x.host.docker.active or NVIDIA_HOOK_PATH in x.there or x.programs.get("nvidia-container-runtime-hook"):
        return None
    if not in_daemon(x) and not in_file(x):
        return None
    packaged = "nvidia-container-toolkit-base" in x.host.packages.installed
    again = words.reinstall_packages(x, "nvidia-container-toolkit-base") if packaged else words.gpuprov_install(x)
    return Finding(
        "`docker run --gpus` has no hook to give containers GPUs by",
        f"ls {NVIDIA_HOOK_PATH}: No such file or directory",
        f"{again}; {words.RESTART_DOCKER}",
    )


def _hook_unseen(x: Examined) -> Finding | None:
    found = find_in_log(x.docker_log, _NO_DRIVER)
    hook, begun = x.modified.get(NVIDIA_HOOK_PATH, 0.0), x.modified.get(_PID_FILE, 0.0)
    if NVIDIA_HOOK_PATH not in x.there or not x.host.docker.active:
        return None
    if found is not None:
        return Finding(
            "`docker run --gpus` finds no hook: docker looks for it when it starts, and it was not there then",
            f"journalctl -u docker: {found[1][0]}\nls {NVIDIA_HOOK_PATH}: it is there now",
            words.RESTART_DOCKER,
        )
    if not begun or hook <= begun:
        return None
    return Finding(
        "the hook of `docker run --gpus` is newer than the running docker, which looks for it when it starts",
        f"stat {NVIDIA_HOOK_PATH} {_PID_FILE}", words.RESTART_DOCKER, ASIDE,
    )  # fmt: skip


def _hook_not_on_path(x: Examined) -> Finding | None:
    path = re.search(r"Environment=.*\bPATH=([^\s\"]+)", x.docker_unit)
    if path is None or "/usr/bin" in path[1].split(":"):
        return None
    return Finding(
        "dockerd's PATH is set without /usr/bin, where the hook of `docker run --gpus` is",
        f"systemctl cat docker: PATH={path[1]}", f"systemctl edit docker; {words.RESTART_DOCKER}", LIKELY,
    )  # fmt: skip


RULES = (
    Rule("docker-missing", DOCKER, "neither dockerd nor podman, crio or containerd", _absent),
    Rule("docker-snap", DOCKER, "/snap/bin/docker, and no dockerd", _snap),
    Rule("daemon-json-broken", DOCKER, "/etc/docker/daemon.json is no JSON, or has the wrong shape", _broken),
    Rule("docker-flags-twice", DOCKER, "docker's log: specified both as a flag and in the configuration file", _twice),
    Rule("docker-masked", DOCKER, "the unit is masked", _masked),
    Rule("docker-down", DOCKER, "`docker info` gets no answer", _down,
         ("daemon-json-broken", "docker-flags-twice", "docker-masked", "default-runtime-unknown")),
    Rule("docker-not-restarted", DOCKER, "daemon.json has runtime nvidia, `docker info` has not, or another path",
         _not_restarted),
    Rule("runtime-unregistered", DOCKER, "neither daemon.json nor `docker info` has runtime nvidia", _unregistered,
         ("toolkit-missing",)),
    Rule("runtime-unsaved", DOCKER, "`docker info` has runtime nvidia, daemon.json and dockerd's flags have not",
         _unsaved),
    Rule("default-runtime-unknown", DOCKER, "daemon.json: default-runtime names one that is not configured",
         _default_unknown),
    Rule("hook-missing", DOCKER, "runtime nvidia is configured, nvidia-container-runtime-hook is not there",
         _hook_missing, ("toolkit-missing", "runtime-files-missing")),
    Rule("hook-unseen", DOCKER, "docker's log: could not select device driver, and the hook is there now",
         _hook_unseen),
    Rule("hook-not-on-path", DOCKER, "dockerd's PATH is set in its unit, without /usr/bin", _hook_not_on_path),
)  # fmt: skip
