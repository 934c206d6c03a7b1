"""Explain why a connection failed, as a Problem: the network, a proxy, a jump host, a key, the login."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpuprov.fleet.host_keys import HostKeyRefusedError
from gpuprov.fleet.options import SshSettings
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem

if TYPE_CHECKING:
    from fabric import Connection

_DEFAULT_KEYS = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
_PROXY_SECONDS = 2


def key_fault(path: str) -> str:
    """Return why a private key's file can't be read, "" if it can."""
    place = os.path.expanduser(path)  # noqa: PTH111 (Path raises where there is no home)
    try:
        with open(place, "rb") as file:  # noqa: PTH123
            start = file.read(64)
    except OSError as error:
        return error.strerror or str(error)
    return "it is a public key" if start.startswith((b"ssh-", b"ecdsa-", b"sk-")) else ""


@contextlib.contextmanager
def explained(target: HostTarget, connection: Connection, settings: SshSettings) -> Iterator[None]:
    """Convert failures of opening a connection to a GpuprovError with exit code 4."""
    from paramiko.ssh_exception import AuthenticationException, ChannelException, ProxyCommandFailure, SSHException

    try:
        yield
    except HostKeyRefusedError as error:
        problem = error.problem
    except Exception as error:
        hop = _failing_hop(connection)
        place = f"{'the jump host ' if hop is not connection else ''}{hop.host} port {hop.port}"
        if isinstance(error, AuthenticationException):
            problem = _authentication_problem(target, hop, error)
        elif isinstance(error, ChannelException):
            problem = _beyond_the_jump_host(hop, error)
        elif isinstance(hop.gateway, str) and not isinstance(error, socket.gaierror):
            problem = _proxy_problem(hop, settings, error)
        elif isinstance(error, SSHException) and not isinstance(error, ProxyCommandFailure):
            problem = _protocol_problem(place, target, hop, settings, error)
        elif isinstance(error, (socket.gaierror, UnicodeError)):  # the latter: no name of DNS, such as a..b
            seen = error.strerror if isinstance(error, socket.gaierror) else str(error)
            set_it = "set ansible_host to the host's address" if hop is connection else "correct ProxyJump"
            problem = Problem(f"the name {hop.host} is not known", f"{seen}", set_it)
        elif isinstance(error, TimeoutError):
            problem = _silence(place, "no answer", settings)
        elif isinstance(error, (OSError, EOFError)):
            problem = Problem(f"{place} cannot be reached", _reasons(error), f"try: ssh -v {_ssh_words(hop)}")
        else:
            raise
    else:
        return
    raise GpuprovError(problem.what, problem.evidence, problem.next_step, exit_code=ExitCode.UNREACHABLE) from None


def _failing_hop(connection: Connection) -> Connection:
    """Return the connection itself, or the jump host on the way that was not reached."""
    hop = connection
    while hop.gateway and not isinstance(hop.gateway, str) and not hop.gateway.is_connected:
        hop = hop.gateway
    return hop


def _beyond_the_jump_host(hop: Connection, error: Exception) -> Problem:
    gateway = hop.gateway
    return Problem(
        f"the jump host {gateway.host} port {gateway.port} can't reach {hop.host} port {hop.port}", str(error),
        f"try on the jump host: nc -zv {hop.host} {hop.port}; its sshd must allow it (AllowTcpForwarding)",
    )  # fmt: skip


def _proxy_problem(hop: Connection, settings: SshSettings, error: Exception) -> Problem:
    """Return why the connection through a ProxyCommand failed, with the command's own error if any."""
    transport = hop.client.get_transport()
    process = getattr(getattr(transport, "sock", None), "process", None)
    spoke = transport is not None and transport.remote_version
    seen = [f"ProxyCommand {hop.gateway}"]
    if process is None:
        ended, said = "can't be started", str(error)
    else:
        ended, said = _end_of(process, settings)
    if spoke:
        ended, said = "broke the connection", said or str(error)
    seen += [line for line in said.splitlines() if line.strip()][-4:]
    return Problem(
        f"{hop.host} port {hop.port} cannot be reached: its ProxyCommand {ended}", "\n".join(seen),
        f"try it by hand: {hop.gateway} < /dev/null",
    )  # fmt: skip


def _end_of(process: subprocess.Popen[bytes], settings: SshSettings) -> tuple[str, str]:
    """Return how the command ended, and its complaints."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PROXY_SECONDS)
    if process.returncode in (None, -signal.SIGTERM):  # paramiko ends it when it gives up
        return f"says nothing within {settings.connect_timeout:g} s", ""
    said = b""
    with contextlib.suppress(OSError, ValueError):
        said = process.stderr.read(4000) if process.stderr is not None else b""
    code = process.returncode
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}", said.decode(
        "utf-8", "replace"
    )


def _protocol_problem(
    place: str, target: HostTarget, hop: Connection, settings: SshSettings, error: Exception
) -> Problem:
    if "No authentication methods" in str(error) or "private key" in str(error).lower():
        return _authentication_problem(target, hop, error)
    return _handshake_problem(place, hop, settings, error)


def _handshake_problem(place: str, connection: Connection, settings: SshSettings, error: Exception) -> Problem:
    """Distinguish a silent server, one that closes the connection, and one that is no SSH server.

    paramiko has one message for all three; the exception's context has the reason.
    """
    if isinstance(error.__context__, TimeoutError):
        return _silence(place, "the port is open, but nothing there says a word", settings)
    transport = connection.client.get_transport()
    spoke = transport is not None and transport.remote_version
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
    """Return why a connection failed: paramiko's own message names none of its reasons."""
    errors = getattr(error, "errors", None)
    if not isinstance(errors, dict):
        return str(error)
    return "\n".join(dict.fromkeys(getattr(one, "strerror", None) or str(one) for one in errors.values()))


def _named_keys(target: HostTarget, hop: Connection) -> tuple[str, ...]:
    """Return the keys that the inventory and the SSH configuration name for the host."""
    configured = hop.ssh_config.get("identityfile", ()) if hop.ssh_config is not None else ()
    of_target = (target.identity_file,) if target.identity_file and hop.original_host == target.address else ()
    return tuple(dict.fromkeys((*of_target, *configured)))


def _authentication_problem(target: HostTarget, hop: Connection, error: Exception) -> Problem:
    place = f"{hop.host} port {hop.port}"
    faults = [(key, fault) for key in _named_keys(target, hop) if (fault := key_fault(key))]
    tried = list(hop.connect_kwargs.get("key_filename", ()))
    evidence = [str(error), *(f"{key}: {fault}" for key, fault in faults)]
    if hop.connect_kwargs.get("look_for_keys", True):
        tried += ["the SSH agent's keys", *(key for key in _DEFAULT_KEYS if not key_fault(key))]
    if "password" in hop.connect_kwargs:
        tried.append("the password")
    evidence.append(f"tried {', '.join(tried) or 'nothing'}")
    what, step = (
        f"{place} refuses to log in {hop.user}",
        ("set ansible_user and ansible_ssh_private_key_file, unlock the key with ssh-add, or give a password with -k"),
    )
    if faults:
        key, fault = faults[0]
        what = f"{place}: the key {key} can't be read: {fault}"
        step = f"ls -l {shlex.quote(key)}; or name another key with ansible_ssh_private_key_file"
    elif tried and "encrypted" in str(error):
        what, step = f"{place}: the key {tried[0]} needs a passphrase", f"ssh-add {shlex.quote(tried[0])}"
    elif tried and "private key" in str(error):
        what = f"{place}: {tried[0]} holds no private key"
        step = f"ssh-keygen -y -f {shlex.quote(tried[0])}; or name another with ansible_ssh_private_key_file"
    elif "password" in hop.connect_kwargs:
        step = "correct ansible_user and ansible_password (with -k: the password that was typed)"
    return Problem(what, "\n".join(evidence), f"{step}; try: ssh -v {_ssh_words(hop)}")


def _ssh_words(connection: Connection) -> str:
    port = "" if connection.port == 22 else f"-p {connection.port} "
    return f"{port}{connection.user}@{connection.host}"
