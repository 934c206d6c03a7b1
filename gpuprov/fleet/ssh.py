"""SSH connections by Fabric, with the keys of servers checked; every way to fail becomes a Problem."""

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
    HostKeyRefusedError,
    KeyCheck,
    KnownHosts,
    known_hosts_name,
    preferred_key_types,
)
from gpuprov.fleet.options import SshSettings
from gpuprov.fleet.ssh_config import config_for
from gpuprov.fleet.target import HostTarget
from gpuprov.wire.errors import ExitCode, GpuprovError, Problem

if TYPE_CHECKING:
    from fabric import Config, Connection

_KEEPALIVE_SECONDS = 15
_SILENCE_MILLISECONDS = 60_000
# Once a server has spoken: a thousand handshakes at a time keep this machine busy for longer than a connect timeout.
_HANDSHAKE_SECONDS = 120
_DEFAULT_KEYS = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")


@contextlib.contextmanager
def connected(
    target: HostTarget, settings: SshSettings, made: Callable[[Connection], None] = lambda _: None
) -> Iterator[Connection]:
    """Give an open connection and close it after use. `made` gets it before it is open, to close it from elsewhere.

    Raises GpuprovError, with exit code 4, if the host is not reached, its key is refused or we are.
    """
    connection = make_connection(target, settings)
    made(connection)
    try:
        with _explained(target, connection, settings):
            connection.open()
            _notice_silence(connection)
        yield connection
    finally:
        close(connection)


def make_connection(target: HostTarget, settings: SshSettings) -> Connection:
    """Return the connection, not yet open, with the hosts that it goes through as its gateways."""
    from fabric import Config, Connection

    # paramiko's own log would print tracebacks between the lines of a table; what matters reaches us as exceptions.
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
    """Put our check of the server's key in the place of Fabric's, which accepts every key."""
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

    keys = [path for path in connection.connect_kwargs.get("key_filename", ()) if Path(path).expanduser().is_file()]
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
    """Let a connection whose other end is gone break after a minute instead of hanging until TCP gives up."""
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


@contextlib.contextmanager
def _explained(target: HostTarget, connection: Connection, settings: SshSettings) -> Iterator[None]:
    from paramiko.ssh_exception import AuthenticationException, ProxyCommandFailure, SSHException

    place = f"{connection.host} port {connection.port}"
    try:
        yield
    except HostKeyRefusedError as error:
        problem = error.problem
    except AuthenticationException as error:
        problem = _authentication_problem(target, connection, error)
    except SSHException as error:
        if "No authentication methods" in str(error) or "private key" in str(error).lower():
            problem = _authentication_problem(target, connection, error)
        else:
            problem = _handshake_problem(place, connection, settings, error)
    except (socket.gaierror, UnicodeError) as error:  # the latter: no name of DNS, such as a..b
        seen = error.strerror if isinstance(error, socket.gaierror) else str(error)
        problem = Problem(
            f"the name {connection.host} is not known", f"{seen}", "set ansible_host to the host's address"
        )
    except TimeoutError:
        problem = _silence(place, "no answer", settings)
    except (OSError, EOFError, ProxyCommandFailure) as error:
        problem = Problem(f"{place} cannot be reached", _reasons(error), f"try: ssh -v {_ssh_words(connection)}")
    else:
        return
    raise GpuprovError(problem.what, problem.evidence, problem.next_step, exit_code=ExitCode.UNREACHABLE) from None


def _handshake_problem(place: str, connection: Connection, settings: SshSettings, error: Exception) -> Problem:
    """Tell a server that says nothing from one that hangs up and from one that is no SSH server.

    paramiko has one sentence for all three; why it gave up stands in the exception's context.
    """
    if isinstance(error.__context__, TimeoutError):
        return _silence(place, "the port is open, but nothing there says a word", settings)
    spoke = connection.transport is not None and connection.transport.remote_version
    if isinstance(error.__context__, (EOFError, ConnectionError)) and not spoke:
        return Problem(
            f"{place} closes the connection before the SSH banner", str(error),
            "is this sshd's port? if so, are that too many logins at once (MaxStartups in sshd_config; fewer --forks)? "
            f"try: ssh -v {_ssh_words(connection)}",
        )  # fmt: skip
    return Problem(f"{place} speaks no SSH that we understand", str(error), f"try: ssh -v {_ssh_words(connection)}")


def _silence(place: str, what: str, settings: SshSettings) -> Problem:
    return Problem(
        f"{place} does not answer", f"{what} within {settings.connect_timeout:g} s",
        "is the host up, and does a firewall let port 22 through? --connect-timeout waits longer",
    )  # fmt: skip


def _reasons(error: Exception) -> str:
    """Return why a connection failed: paramiko's own sentence names none of the reasons that it holds."""
    errors = getattr(error, "errors", None)
    if not isinstance(errors, dict):
        return str(error)
    return "\n".join(dict.fromkeys(getattr(one, "strerror", None) or str(one) for one in errors.values()))


def _authentication_problem(target: HostTarget, connection: Connection, error: Exception) -> Problem:
    refusing = connection
    while refusing.gateway and not isinstance(refusing.gateway, str) and not refusing.gateway.is_connected:
        refusing = refusing.gateway
    tried = list(refusing.connect_kwargs.get("key_filename", ()))
    evidence = [str(error)]
    if target.identity_file and not Path(target.identity_file).expanduser().is_file():
        evidence.append(f"the key {target.identity_file} that the inventory names does not exist")
    if refusing.connect_kwargs.get("look_for_keys", True):
        tried += ["the SSH agent's keys", *(path for path in _DEFAULT_KEYS if Path(path).expanduser().is_file())]
    if "password" in refusing.connect_kwargs:
        tried.append("the password")
    evidence.append(f"tried {', '.join(tried)}")
    return Problem(
        f"{refusing.host} port {refusing.port} refuses to log in {refusing.user}",
        "\n".join(evidence),
        "set ansible_user and ansible_ssh_private_key_file, unlock the key with ssh-add, or give a password with -k; "
        f"try: ssh -v {_ssh_words(refusing)}",
    )


def _ssh_words(connection: Connection) -> str:
    port = "" if connection.port == 22 else f"-p {connection.port} "
    return f"{port}{connection.user}@{connection.host}"
