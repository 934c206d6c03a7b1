"""Causes in the container toolkit, gpuprov's own or NVIDIA's: programs gone, settings that don't fit. Pure."""

from __future__ import annotations

from gpuprov.doctor import words
from gpuprov.doctor.docker_rules import in_daemon, in_file
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import TOOLKIT, Finding, Rule
from gpuprov.engines.docker_config import DAEMON_JSON
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH


def _runtime_missing(x: Examined) -> Finding | None:
    named = (("docker info", in_daemon(x)), (DAEMON_JSON, in_file(x)))
    source, path = next(((source, path) for source, path in named if path in x.absent), ("", ""))
    if not path:
        return None
    return Finding(
        f"the container runtime {path} is missing",
        f"{source}: runtime nvidia is {path}\nls {path}: No such file or directory",
        words.gpuprov_install(x)
        if path == LAUNCHER_PATH
        else words.reinstall_packages(x, "nvidia-container-toolkit-base"),
    )


RULES = (
    Rule("runtime-missing", TOOLKIT, "the program that docker has as runtime nvidia is not there", _runtime_missing),
)  # fmt: skip
