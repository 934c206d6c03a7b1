"""The ssh_config(5) that one connection sees: the inventory's options first, then the user's and the system's files."""

from __future__ import annotations

import functools
import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import ExitCode, GpuprovError

if TYPE_CHECKING:
    from paramiko import SSHConfig

USER_FILE = "~/.ssh/config"
SYSTEM_FILE = "/etc/ssh/ssh_config"
_INCLUDE = re.compile(r"\s*include[\s=]+(.+)", re.IGNORECASE)
_DEEPEST = 16  # ssh(1) stops there as well


def config_for(target: HostTarget) -> SSHConfig:
    """Return the configuration for one host. Raises GpuprovError (exit code 2) if it cannot be read.

    The inventory's options bind this host alone, not the hosts it is reached through: just as with ssh(1).
    """
    from paramiko import SSHConfig
    from paramiko.ssh_exception import ConfigParseError

    files = (target.ssh_config_file,) if target.ssh_config_file else (USER_FILE, SYSTEM_FILE)
    options = "\n".join(f"  {keyword} {value}" for keyword, value in target.ssh_options)
    try:
        texts = [expanded(path) for path in files]
        return SSHConfig.from_text("\n".join((f"Host {target.address}", options, "Host *", *texts)))
    except (ConfigParseError, OSError) as error:
        raise GpuprovError(
            f"the SSH configuration {' or '.join(files)} cannot be read",
            str(error),
            f"fix it: ssh -G {target.address} says where",
            exit_code=ExitCode.USAGE,
        ) from None


@functools.cache
def expanded(path: str) -> str:
    """Return a configuration file with its Include lines carried out, which paramiko passes over; empty if missing."""
    return "\n".join(_lines(Path(path).expanduser(), 0))


def _lines(path: Path, depth: int) -> Iterator[str]:
    if depth > _DEEPEST or not path.is_file():
        return
    for line in path.read_text("utf-8", "replace").splitlines():
        include = _INCLUDE.fullmatch(line)
        if include is None:
            yield line
            continue
        for pattern in include.group(1).split():
            # A relative name means the folder of the including file's kind: ~/.ssh, or /etc/ssh.
            base = Path("/etc/ssh") if path.is_relative_to("/etc/ssh") else Path("~/.ssh").expanduser()
            for name in sorted(glob.glob(str(base / Path(pattern.strip('"')).expanduser()))):  # noqa: PTH207
                yield from _lines(Path(name), depth + 1)
