"""SSH connections by Fabric, with checked server keys; every failure becomes a Problem."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprov.fleet import remote
from gpuprov.fleet.host_keys import (
    SYSTEM_FILES,
    USER_FILES,
    KeyCheck,
    KnownHosts,
    known_hosts_name,
    preferred_key_types,
)
from gpuprov.fleet.options import SshSettings
from gpuprov.fleet.ssh_config import config_for
from gpuprov.fleet.ssh_problems import explained, key_fault
from gpuprov.fleet.target import HostTarget

if TYPE_CHECKING:
    from fabric import Config, Connection

_KEEPALIVE_SECONDS = 15
_SILENCE_MILLISECONDS = 60_000
# After the server's first bytes: a thousand handshakes at once take this machine longer than a connect timeout.
_HANDSHAKE_SECONDS = 120


@contextlib.contextmanager
def connected(
    target: HostTarget, settings: SshSettings, made: Callable[[Connection], None] = lambda _: None
) -> Iterator[Connection]:
    """Yield an open connection and close it after use. `made` gets it before it opens, so that others can close it.

    Raises GpuprovError, exit code 4, if the host is unreachable or either side refuses the other.
    """
    connection = make_connection(target, settings)
    made(connection)
    try:
        with explained(target, connection, settings):
            connection.open()
            _notice_silence(connection)
        yield connection
    finally:
        close(connection)


def make_connection(target: HostTarget, settings: SshSettings) -> Connection:
    """Return the connection, not yet open, with its jump hosts as gateways."""
    from fabric import Config, Connection

    # paramiko's own log would print tracebacks between the lines of a table; its exceptions have the reasons.
    logging.getLogger("paramiko").propagate = False
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    config = Config(ssh_config=config_for(target))
    connection = Connection(
        target.address,
        user=target.user or None,
        port=target.port,
        config=config,
        gateway=_gateway(config, target.address, settings),
        connect_timeout=settings.connect_timeout,
        connect_kwargs=_credentials(target),
    )
    _check_key(connection, settings)
    return connection


def _gateway(config: Config, address: str, settings: SshSettings) -> Any:
    """Return what the connection goes through: a chain of connections, a command, or False for nothing.

    Built here, because Fabric goes through several ProxyJump hosts in the wrong order and accepts their keys.
    """
    from fabric import Connection

    options = config.base_ssh_config.lookup(address)
    jump, command = options.get("proxyjump", "none"), options.get("proxycommand", "none")
    if jump.lower() == "none":
        return False if command is None or command.lower() == "none" else command
    through: Any = False
    for hop in jump.split(","):
        through = Connection(
            hop.strip().removeprefix("ssh://"), config=config, gateway=through, connect_timeout=settings.connect_timeout
        )
        _check_key(through, settings)
    return through


def _credentials(target: HostTarget) -> dict[str, Any]:
    credentials: dict[str, Any] = {}
    if target.identity_file:
        credentials["key_filename"] = [str(Path(target.identity_file).expanduser())]
    if target.password:
        credentials["password"] = target.password
    return credentials


def _check_key(connection: Connection, settings: SshSettings) -> None:
    """Replace Fabric's check of the server's key, which accepts every key, with gpuprov's."""
    options = connection.ssh_config
    # An alias stands in known_hosts without a port (ssh_config(5), HostKeyAlias).
    name = options.get("hostkeyalias") or known_hosts_name(connection.host, connection.port)
    files = tuple(options.get("userknownhostsfile", " ".join(USER_FILES)).split())
    known = KnownHosts(files, SYSTEM_FILES)
    checking = options.get("stricthostkeychecking", "").lower()
    accept_new = settings.accept_new_host_keys or checking in ("accept-new", "no", "off")
    connection.client.set_missing_host_key_policy(KeyCheck(known, name, accept_new=accept_new))

    def transport(sock: Any, **settings: Any) -> Any:
        from paramiko import Transport

        made = Transport(sock, **settings)
        security = made.get_security_options()
        security.key_types = preferred_key_types(known.keys(name), security.key_types)
        # paramiko compares the code of every other cipher's packets byte by byte in Python: half of what a
        # connection costs, measured with a thousand of them.
        security.ciphers = sorted(security.ciphers, key=lambda cipher: "gcm" not in cipher)
        made.channel_timeout = remote.ACCEPTANCE_SECONDS
        negotiate = made.start_client
        made.start_client = lambda event=None, timeout=None: negotiate(event, _HANDSHAKE_SECONDS)
        return made

    # As ssh(1) does, skip unreadable keys. If no other login works, they are named.
    keys = [path for path in connection.connect_kwargs.get("key_filename", ()) if not key_fault(path)]
    connection.connect_kwargs = {
        **connection.connect_kwargs,
        "key_filename": [str(Path(path).expanduser()) for path in keys],
        "transport_factory": transport,
        "banner_timeout": connection.connect_timeout,
        "auth_timeout": max(connection.connect_timeout, 60),
    }
    if options.get("identitiesonly") == "yes" or "password" in connection.connect_kwargs:
        connection.connect_kwargs |= {"allow_agent": False, "look_for_keys": False}


def _notice_silence(connection: Connection) -> None:
    """Make a dead connection break after a minute instead of hanging until TCP gives up."""
    connection.transport.set_keepalive(_KEEPALIVE_SECONDS)
    if hasattr(connection.transport.sock, "setsockopt"):
        connection.transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MILLISECONDS)


def close(connection: Connection) -> None:
    """Close a connection and those that it goes through, from any thread; errors no longer matter."""
    gateway = connection.gateway
    with contextlib.suppress(Exception):
        connection.client.close()
    if gateway and not isinstance(gateway, str):
        close(gateway)
