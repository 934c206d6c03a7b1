"""Causes in docker: not there, not up, not told of the runtime, or told and not restarted. Pure."""

from __future__ import annotations

import re

from gpuprov.doctor import words
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import DOCKER, Finding, Rule
from gpuprov.engines.docker_config import DAEMON_JSON, parse_config

_RUNTIME = "nvidia"


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


def _broken(x: Examined) -> Finding | None:
    wrong = parse_config(x.host.docker.config_text)[1]
    if not wrong:
        return None
    line = re.match(r"line (\d+)", wrong[0].evidence)
    number = line[1] if line else "1"
    return Finding(
        f"docker can't read its configuration: {wrong[0].what}",
        f"{DAEMON_JSON}:{number}: {wrong[0].evidence}",
        f"correct it: ${{EDITOR:-vi}} +{number} {DAEMON_JSON}; then systemctl reset-failed docker; "
        f"{words.RESTART_DOCKER}",
    )


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


RULES = (
    Rule("daemon-json-broken", DOCKER, "/etc/docker/daemon.json is no JSON, or has the wrong shape", _broken),
    Rule("docker-not-restarted", DOCKER, "daemon.json has runtime nvidia, `docker info` has not, or another path",
         _not_restarted),
)  # fmt: skip
