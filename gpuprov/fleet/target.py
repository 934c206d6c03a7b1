"""HostTarget: one host of an inventory, how to reach it and its desired state."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuprov.protocol.spec import HostSpec


@dataclass(frozen=True)
class HostTarget:
    """One host. Empty text and a port of None mean: as ~/.ssh/config, or SSH's own default, says.

    `ssh_options` are (keyword, value) pairs in ssh_config(5)'s words; `ssh_config_file` stands in for the user's and
    the system's files, as `ssh -F` does. `python` is the interpreter that the inventory names. Passwords never show
    in repr.
    """

    name: str
    spec: HostSpec
    address: str = ""
    port: int | None = None
    user: str = ""
    identity_file: str = ""
    ssh_options: tuple[tuple[str, str], ...] = ()
    ssh_config_file: str = ""
    password: str = field(default="", repr=False)
    become: bool = True
    become_user: str = "root"
    become_password: str = field(default="", repr=False)
    connection: str = "ssh"
    python: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Inventory:
    """The hosts of a run, in the inventory's order, and warnings about them."""

    hosts: tuple[HostTarget, ...]
    warnings: tuple[str, ...] = ()
