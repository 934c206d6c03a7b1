"""Resume a run after the reboot that it needs, by a unit for one boot; the resumed run removes it."""

from __future__ import annotations

import sys
from pathlib import Path

import gpuprov
from gpuprov.core.commands import COMMAND_ENVIRONMENT, command_environment
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.facts.boot_files import NODES, REFRESH, UNITS, WANTS
from gpuprov.protocol.codec import dump
from gpuprov.protocol.request import Request

UNIT = "gpuprov-resume.service"
_REQUEST = f"{STATE_DIRECTORY}/resume.json"
# Time for the last event to reach the controller before the host goes down.
_REBOOT_DELAY_SECONDS = 3
# Puts the folder that holds this package, or the agent's archive, on the path.
_START = "import sys; sys.path.insert(0, sys.argv[1]); from gpuprov.agent.agent import main; main()"
_TEXT = """\
# By gpuprov: resumes the run that needed this reboot; removed as soon as it does.
[Unit]
Description=The rest of a gpuprov run, after its reboot
Wants=network-online.target
After=network-online.target docker.service containerd.service {nodes} {refresh}
ConditionPathExists={request}

[Service]
Type=oneshot
TimeoutStartSec=infinity
StandardInput=file:{request}
ExecStart={command}
{environment}
"""


def leave_resume(system: System, request: Request) -> None:
    """Make the next boot resume this request."""
    passed = {name: value for name, value in command_environment().items() if name not in COMMAND_ENVIRONMENT}
    words = (sys.executable, "-I", "-c", _START, str(Path(gpuprov.__file__).resolve().parent.parent))
    text = _TEXT.format(
        nodes=NODES, refresh=REFRESH, request=_REQUEST, command=" ".join(f'"{_word(word)}"' for word in words),
        environment="".join(f'Environment="{name}={_escaped(value)}"\n' for name, value in sorted(passed.items())),
    )  # fmt: skip
    # Only root may read them: the unit may hold a proxy's password, the request a repository's.
    system.make_directory(STATE_DIRECTORY, 0o700)
    system.make_directory(WANTS)
    system.write(_REQUEST, f"{dump(request)}\n".encode(), mode=0o600)
    system.write(f"{UNITS}/{UNIT}", text.encode(), mode=0o600)
    system.make_link(f"{WANTS}/{UNIT}", f"{UNITS}/{UNIT}")
    system.run(("systemctl", "daemon-reload"))


def _word(value: str) -> str:
    """Return a word escaped for quotes in ExecStart=, which also expands variables."""
    return _escaped(value).replace("$", "$$")


def _escaped(value: str) -> str:
    """Return a value escaped for quotes in a unit (systemd.unit(5), systemd.syntax(7))."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def forget_resume(system: System) -> None:
    """Remove the unit and its request, if they exist."""
    if system.status(f"{UNITS}/{UNIT}") is None and system.status(_REQUEST) is None:
        return
    for path in (f"{WANTS}/{UNIT}", f"{UNITS}/{UNIT}", _REQUEST):
        system.remove(path)
    system.run(("systemctl", "daemon-reload"))


def begin_reboot(system: System) -> None:
    """Reboot in a few seconds. Raises GpuprovError if the host refuses."""
    delay = (f"--on-active={_REBOOT_DELAY_SECONDS}", "--timer-property=AccuracySec=100ms")
    system.require(
        ("systemd-run", "--quiet", *delay, "systemctl", "reboot"),
        "the host can't be rebooted",
        "reboot it by hand, then run the same command again",
    )
