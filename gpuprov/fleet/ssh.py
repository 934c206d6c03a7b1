"""SSH connections by Fabric, with checked server keys; every failure becomes a Problem."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpuprov.agent.push import BOOT_SECONDS, not_up
from gpuprov.core.files import expanded
from gpuprov.fleet import host_keys, remote
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import SshSettings
from gpuprov.machine.machine import MACHINES
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem

if TYPE_CHECKING:
    from fabric import Config, Connection

_KEEPALIVE_SECONDS = 15
_SILENCE_MILLISECONDS = 60_000
# After the server's first bytes: a thousand handshakes at once take this machine longer than a connect timeout.
_HANDSHAKE_SECONDS = 120
_DEFAULT_KEYS = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
# Of what paramiko knows, the best of each kind.
_KNOWN = (
    "Ciphers aes256-gcm@openssh.com, MACs hmac-sha2-256-etm@openssh.com, KexAlgorithms curve25519-sha256@libssh.org, "
    "HostKeyAlgorithms ssh-ed25519"
)
_LINKS = "ip -6 -brief address show scope link  # names the interfaces"
_OFF = ("no", "false")  # as the inventory has it, and as ssh says it
_UNUSED = "not used: it, or the file of its key, can't be read"
_PROXY_SECONDS = _API_SECONDS = 2
# RFC 4253, section 4.2: a version is 255 bytes at most; lines of text may come before it.
_BANNER_BYTES = 1 << 16
_PAUSE_SECONDS = 2.0


@contextlib.contextmanager
def connected(
    target: HostTarget, settings: SshSettings, made: Callable[[Connection], None] = lambda _: None
) -> Iterator[Connection]:
    """Yield an open connection and close it after use. `made` gets it before it opens, so that others can close it.

    Raises GpuprovError, exit code 4, if the host is unreachable or either side refuses the other.
    """
    from fabric import Config, Connection
    from paramiko import PKey

    # For paramiko's log alone, by MD5: Python in FIPS mode refuses it, and the login would fail.
    PKey.get_fingerprint = lambda key: hashlib.sha256(key.asbytes()).digest()
    # paramiko's own log would print tracebacks between the lines of a table; its exceptions have the reasons.
    logging.getLogger("paramiko").propagate = False
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    config = Config(ssh_config=target.ssh_configuration, lazy=True)  # without ~/.fabric.yml, of the user's own tasks
    keys = [str(expanded(target.identity_file))] if target.identity_file else []
    credentials = {"key_filename": keys, **({"password": target.password} if target.password else {})}
    connection = Connection(
        target.address, target.user or None, target.port, config=config, connect_kwargs=credentials,
        gateway=_gateway(config, target.address, settings), connect_timeout=settings.connect_timeout,
    )  # fmt: skip
    _check_key(connection, settings)
    made(connection)
    try:
        with explained(target, connection, settings):
            connection.open()
            connection.transport.set_keepalive(_KEEPALIVE_SECONDS)
        yield connection
    finally:
        close(connection)


def _gateway(config: Config, address: str, settings: SshSettings, behind: tuple[str, ...] = ()) -> Any:
    """Return what the connection goes through: a chain of connections, a command, or False for nothing.

    Built here, because Fabric goes through several ProxyJump hosts in the wrong order and accepts their keys. `behind`:
    the hosts that are reached through this one. Raises GpuprovError if it is one of them.
    """
    from fabric import Connection

    if address in behind:
        what, seen = "jump hosts of the SSH configuration name each other", " → ".join((*behind, address))
        raise GpuprovError(what, seen, f"correct ProxyJump: ssh -G {address}", exit_code=ExitCode.UNREACHABLE)
    options = config.base_ssh_config.lookup(address)
    jump, command = options.get("proxyjump", "none"), options.get("proxycommand", "none")
    if jump.lower() == "none":
        if command is None or command.lower() == "none":
            return False
        # By a shell, as with ssh: it may have `2>/dev/null`. But %r is the inventory's: never what a shell would read.
        plain = re.fullmatch(r"[\w.@+-]*", options.get("user", ""))
        return shlex.join(("sh", "-c", f"exec {command}")) if plain else command
    through: Any = False
    for hop in jump.split(","):
        user, _, place = hop.strip().removeprefix("ssh://").rpartition("@")
        # Fabric does not know the brackets around an address of IPv6.
        bracketed = re.fullmatch(r"\[(.+)\](?::(\d+))?", place)
        host, port = (bracketed[1], int(bracketed[2] or 0)) if bracketed else (place, 0)
        name = host if bracketed else place.partition(":")[0]
        if place == address or (behind and name == address):  # `Host *` names it for itself, too
            continue
        if not through and name != address:  # the first one may be behind another, as its own configuration says
            through = _gateway(config, name, settings, (*behind, address))
        through = Connection(
            host, user or None, port or None, config=config, gateway=through, connect_timeout=settings.connect_timeout
        )
        _check_key(through, settings)
    return through


def _check_key(connection: Connection, settings: SshSettings) -> None:
    """Replace Fabric's check of the server's key, which accepts every key, with gpuprov's."""
    options = connection.ssh_config
    # An alias stands in known_hosts without a port (ssh_config(5), HostKeyAlias).
    alias = options.get("hostkeyalias")
    host, port = (alias, 22) if alias else (connection.host, connection.port)
    files = tuple(options.get("userknownhostsfile", " ".join(host_keys.USER_FILES)).split())
    system = tuple(options.get("globalknownhostsfile", " ".join(host_keys.SYSTEM_FILES)).split())
    known = host_keys.KnownHosts(files, system)
    checking = options.get("stricthostkeychecking", "").lower()
    accept_new = settings.accept_new_host_keys or checking in ("accept-new", "no", "off", "false")
    check = host_keys.KeyCheck(known, host, accept_new, port, options.get("revokedhostkeys", "none"))
    connection.client.set_missing_host_key_policy(check)

    # As ssh(1) does, skip unreadable keys. If no other login works, they are named.
    named = connection.connect_kwargs.get("key_filename", ())
    alone = options.get("identitiesonly") == "yes"
    place = options.get("identityagent", "SSH_AUTH_SOCK")
    connection.client._agent = _agent(named or _DEFAULT_KEYS, place, settings.connect_timeout, alone=alone)
    connection.connect_kwargs = {
        **connection.connect_kwargs,
        "key_filename": [str(expanded(path)) for path in named if not key_fault(path)],
        "look_for_keys": not (alone and named),
        "pkey": _certified(named, options.get("certificatefile", "")),
        "transport_factory": functools.partial(_transport, connection, settings.connect_timeout, check),
        "sock": True,  # Fabric replaces it by what goes through a gateway
        "banner_timeout": connection.connect_timeout,
        "auth_timeout": max(connection.connect_timeout, 60),
    }
    if "password" in connection.connect_kwargs:
        connection.connect_kwargs |= {"allow_agent": False, "look_for_keys": False}
    if options.get("pubkeyauthentication") in _OFF:
        connection.connect_kwargs |= {"key_filename": [], "pkey": None, "allow_agent": False, "look_for_keys": False}


def _transport(connection: Connection, patience: float, check: host_keys.KeyCheck, sock: Any, **others: Any) -> Any:
    """Return paramiko's transport with time limits, and with certificates, known keys and fast ciphers first."""
    from paramiko import ProxyCommand, Transport

    if sock is True:
        # paramiko itself gives up at an address that does not answer, whatever comes next.
        own = connection.ssh_config.get("bindaddress")
        sock = socket.create_connection((connection.host, connection.port), patience, (own, 0) if own else None)
        # A dead connection breaks after a minute instead of hanging until TCP gives up.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MILLISECONDS)
        # As ssh(1) does: else the kernel holds a short packet back until the one before it is acknowledged, 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if isinstance(sock, ProxyCommand):
        sock.recv = lambda size: _read_from(sock, size)

    by_certificate = bool(check.authorities()) or check.revoked_file != "none"  # which may name an authority
    allowed = connection.ssh_config.get("hostkeyalgorithms", "").split(",")

    class Preferring(Transport):  # type: ignore[misc]  # paramiko has no types
        """Asks for a certificate first, as ssh(1) does of a host that an authority signs for."""

        @property
        def preferred_keys(self) -> tuple[str, ...]:
            kinds = (kind for kind in super().preferred_keys if kind in allowed or allowed == [""])
            return tuple(sorted(kinds, key=lambda kind: by_certificate and "-cert-" not in kind))

    made = Preferring(sock, **others)
    _bound_banner(made)
    security = made.get_security_options()
    security.key_types = host_keys.preferred_key_types(check.known.keys(check.name), security.key_types)
    # paramiko compares the code of every other cipher's packets byte by byte in Python: half of what a
    # connection costs, measured with a thousand of them.
    security.ciphers = sorted(security.ciphers, key=lambda cipher: "gcm" not in cipher)
    made.channel_timeout = remote.ACCEPTANCE_SECONDS
    made.auth_interactive_dumb = lambda user: made.auth_interactive(user, _no_answers)
    negotiate = made.start_client
    made.start_client = lambda event=None, timeout=None: negotiate(event, _HANDSHAKE_SECONDS)
    return made


def _agent(paths: Sequence[str], place: str, patience: float, *, alone: bool) -> Any:
    """Return the SSH agent as ssh(1) uses it: the keys of these files come first; `alone`: no others are offered.

    `place`: as IdentityAgent names its socket. One that does not list its keys in `patience` seconds has none.
    """
    opened: list[Any] = []

    def keys() -> list[Any]:
        from paramiko.agent import AgentSSH, SSHException

        opened.append(AgentSSH())
        with contextlib.suppress(OSError, SSHException):
            listing = socket.socket(socket.AF_UNIX)
            listing.settimeout(patience)
            listing.connect(os.path.expandvars(expanded("$SSH_AUTH_SOCK" if place == "SSH_AUTH_SOCK" else place)))
            opened[-1]._connect(listing)
            listing.settimeout(None)  # a signature may wait for a person
        named = ""
        for path in (f"{one}{suffix}" for one in paths for suffix in ("", ".pub", "-cert.pub")):
            with contextlib.suppress(OSError):
                named += expanded(path).read_text("utf-8", "replace")
        found = sorted(opened[-1].get_keys(), key=lambda key: key.get_base64() not in named)
        return [key for key in found if not alone or key.get_base64() in named]

    return SimpleNamespace(get_keys=keys, close=lambda: [one._close() for one in opened])


def _certified(paths: Sequence[str], certificate: str) -> Any:
    """Return the first of these keys that can have the certificate; paramiko itself finds those beside their keys."""
    from paramiko import PKey

    for path in paths if certificate else ():
        with contextlib.suppress(Exception):  # whatever is wrong with its file, the key is tried without it
            key = PKey.from_path(expanded(path))
            key.load_certificate(str(expanded(certificate)))
            return key
    return None


def _no_answers(_title: str, _text: str, questions: Sequence[Any]) -> Sequence[str]:
    """Refuse questions after a key: paramiko itself prints what the server sends, and reads answers from stdin."""
    from paramiko import AuthenticationException

    if questions:
        raise AuthenticationException("the key is not enough: it asks for more (keyboard-interactive)")
    return ()


def _bound_banner(transport: Any) -> None:
    """Let a server send only so much before its version, as paramiko would read on for ever; tell it if none comes."""
    from paramiko import SSHException

    packetizer, said = transport.packetizer, b""
    read = packetizer._read_timeout  # nothing but the reading of lines calls it

    def bounded(timeout: float) -> bytes:
        nonlocal said
        try:
            content: bytes = read(timeout)
        except (EOFError, ConnectionError) as error:
            raise type(error)(f": {said[:200].decode('utf-8', 'replace')}" if said else str(error)) from None
        said += content
        if len(said) > _BANNER_BYTES:
            raise SSHException(f": more than {_BANNER_BYTES} bytes before it")
        return content

    packetizer._read_timeout = bounded


def _read_from(proxy: Any, size: int) -> bytes:
    """Return what a ProxyCommand has written, b"" once it has ended: paramiko's own would read on till the timeout.

    Raises TimeoutError if it writes nothing within the proxy's timeout.
    """
    handle = proxy.process.stdout.fileno()
    ready = select.poll()
    ready.register(handle, select.POLLIN)
    if not ready.poll(None if proxy.timeout is None else proxy.timeout * 1000):
        raise TimeoutError
    return os.read(handle, size)


def close(connection: Connection) -> None:
    """Close a connection and those that it goes through, from any thread; errors no longer matter."""
    gateway = connection.gateway
    with contextlib.suppress(Exception):
        connection.client.close()
    if gateway and not isinstance(gateway, str):
        close(gateway)


def wait_for_boot(
    target: HostTarget, settings: SshSettings, left_boot: str, given_up: Callable[[], bool], *,
    patience: float = BOOT_SECONDS,
) -> None:  # fmt: skip
    """Return once the host is up in another boot than `left_boot`, docker and all.

    Raises GpuprovError, exit code 4, if it does not come back in `patience` seconds or the run is stopped.
    """
    deadline = time.monotonic() + patience
    seen = "it has not gone down"
    while time.monotonic() < deadline and not given_up():
        time.sleep(_PAUSE_SECONDS)
        try:
            with connected(target, settings) as connection:
                seen = not_up(left_boot, functools.partial(remote.run, connection))
            if not seen:
                return
        except GpuprovError as error:
            seen = f"{error.problems[0].what}: {error.problems[0].evidence}"
    raise GpuprovError(
        "the host did not come back from its reboot" + (" before the run was stopped" if given_up() else ""),
        f"waited {patience:g} s; last: {seen}",
        "look at its console; once it is up, run the same command again: it goes on where it stopped",
        exit_code=ExitCode.UNREACHABLE,
    )


# -- why it failed -----------------------------------------------------------------------------------------------------


def key_fault(path: str) -> str:
    """Return why a private key's file can't be read, "" if it can."""
    try:
        with expanded(path).open("rb") as file:
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
    except GpuprovError:  # the server's key is refused
        raise
    except Exception as error:
        hop = connection  # or the jump host on the way that was not reached
        while hop.gateway and not isinstance(hop.gateway, str) and not hop.gateway.is_connected:
            hop = hop.gateway
        seen = getattr(error, "strerror", None) or str(error)
        place = f"{'the jump host ' if hop is not connection else ''}{hop.host} port {hop.port}"
        if isinstance(error, AuthenticationException):
            problem = _authentication_problem(target, hop, error)
        elif isinstance(error, ChannelException) or "opening channel" in str(error):
            problem = Problem(
                f"the jump host {hop.gateway.host} port {hop.gateway.port} can't reach {hop.host} port {hop.port}",
                seen, f"try there: nc -zv {hop.host} {hop.port}; its sshd must allow it (AllowTcpForwarding)",
            )  # fmt: skip
        elif isinstance(hop.gateway, str) and not isinstance(error, socket.gaierror):
            problem = _proxy_problem(hop, settings, error)
        elif isinstance(error, SSHException) and not isinstance(error, ProxyCommandFailure):
            problem = _handshake_problem(place, target, hop, settings, error)
        elif isinstance(error, (socket.gaierror, UnicodeError)):  # the latter: no name of DNS, such as a..b
            set_it = "set ansible_host to the host's address" if hop is connection else "correct ProxyJump"
            what, (address, _, interface) = f"the name {hop.host} is not known", hop.host.partition("%")
            if ":" in address and interface:
                what, set_it = f"this machine has no network interface {interface}", _LINKS
            problem = Problem(what, seen, set_it)
        elif isinstance(error, TimeoutError):
            problem = _silence(place, "no answer", settings)
        elif isinstance(error, (OSError, EOFError)):
            problem = Problem(f"{place} cannot be reached", seen, f"try: ssh -v {_ssh_words(hop)}")
            problem = (_without_ssh(hop) if seen == os.strerror(errno.ECONNREFUSED) else None) or problem
            if seen == os.strerror(errno.EINVAL) and hop.host.lower().startswith("fe80:"):
                what = f"{hop.host} is an address of one link, and names no interface, as {hop.host}%eth0 does"
                problem = Problem(what, seen, _LINKS)
        else:
            raise
        raise GpuprovError(problem.what, problem.evidence, problem.next_step, exit_code=ExitCode.UNREACHABLE) from None


def _without_ssh(hop: Connection) -> Problem | None:
    """Return what a machine without SSH probably is, by the port of its own API; None if it answers at none."""
    for kind in MACHINES:
        if kind.api_port and not hop.gateway:
            with contextlib.suppress(OSError), socket.create_connection((hop.host, kind.api_port), _API_SECONDS):
                seen = f"port {hop.port} is closed, port {kind.api_port} is open"
                return Problem(f"{hop.host} is probably a host of {kind.name}: {kind.what}", seen, kind.next_step)
    return None


def _proxy_problem(hop: Connection, settings: SshSettings, error: Exception) -> Problem:
    """Return why the connection through a ProxyCommand failed, with the command's own error if any.

    Of the command only the program is shown: its arguments may have a password.
    """
    transport = hop.client.get_transport()
    process = getattr(getattr(transport, "sock", None), "process", None)
    ended, output = _end_of(process, settings) if process is not None else ("can't be started", str(error))
    if transport is not None and transport.remote_version:
        ended, output = "broke the connection", output or str(getattr(error, "error", error))
    program = hop.gateway.removeprefix("sh -c 'exec ").partition(" ")[0]
    seen = [f"ProxyCommand {program} …", *[line for line in output.splitlines() if line.strip()][-4:]]
    step = f"try it by hand, with < /dev/null; all of it: ssh -G {hop.original_host}, or ansible_ssh_common_args"
    return Problem(f"{hop.host} port {hop.port} cannot be reached: its ProxyCommand {ended}", "\n".join(seen), step)


def _end_of(process: subprocess.Popen[bytes], settings: SshSettings) -> tuple[str, str]:
    """Return how the command ended, and its complaints."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PROXY_SECONDS)
    code = process.returncode
    if code in (None, -signal.SIGTERM):  # paramiko ends it when it gives up
        return f"says nothing within {settings.connect_timeout:g} s", ""
    output = b""
    with contextlib.suppress(OSError, ValueError):
        output = process.stderr.read(4000) if process.stderr is not None else b""
    ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return ended, output.decode("utf-8", "replace")


def _handshake_problem(
    place: str, target: HostTarget, connection: Connection, settings: SshSettings, error: Exception
) -> Problem:
    """Distinguish a silent server, one that closes the connection, and one that is no SSH server.

    paramiko has one message for all three; the exception's context has the reason.
    """
    if re.search("No authentication methods|No existing session|(private|RSA|EC) key", str(error), re.IGNORECASE):
        return _authentication_problem(target, connection, error)
    if isinstance(error.__context__, TimeoutError):
        return _silence(place, "the port is open, but nothing there says a word", settings)
    transport = connection.client.get_transport()
    spoke = transport is not None and transport.remote_version
    if "Not allowed at this time" in str(error):  # OpenSSH 9.8 and later
        what = f"{place} accepts no connection from here for a while, as after failed logins (PerSourcePenalties)"
        return Problem(what, str(error), "wait a minute, and correct the login first; on the host: journalctl -u ssh")
    if isinstance(error.__context__, (EOFError, ConnectionError)) and not spoke:
        return Problem(
            f"{place} closes the connection before the SSH banner", str(error),
            "is this sshd's port? if so, are that too many logins at once (MaxStartups in sshd_config; fewer --forks), "
            f"or did logins fail before (PerSourcePenalties)? try: ssh -v {_ssh_words(connection)}",
        )  # fmt: skip
    step = f"try: ssh -v {_ssh_words(connection)}"
    if "no acceptable" in str(error):  # ssh(1) knows more
        step = f"in its sshd_config, also allow what gpuprov knows: {_KNOWN}; or use the playbooks, which call ssh(1)"
    return Problem(f"{place} is not a compatible SSH server", str(error), step)


def _silence(place: str, what: str, settings: SshSettings) -> Problem:
    step = "is the host up, and does a firewall let port 22 through? --connect-timeout waits longer"
    return Problem(f"{place} does not answer", f"{what} within {settings.connect_timeout:g} s", step)


def _authentication_problem(target: HostTarget, hop: Connection, error: Exception) -> Problem:
    place = f"{hop.host} port {hop.port}"
    # The keys that the inventory and the SSH configuration name.
    of_target = (target.identity_file,) if target.identity_file and hop.original_host == target.address else ()
    named = (*of_target, *(hop.ssh_config.get("identityfile", ()) if hop.ssh_config is not None else ()))
    faults = [(key, fault) for key in dict.fromkeys(named) if (fault := key_fault(key))]
    tried = list(hop.connect_kwargs.get("key_filename", ()))
    evidence = [str(error), *(f"{key}: {fault}" for key, fault in faults)]
    if hop.connect_kwargs.get("allow_agent", True):
        tried.append("the SSH agent's keys")
    if hop.connect_kwargs["look_for_keys"]:
        tried += (key for key in _DEFAULT_KEYS if not key_fault(key))
    if "password" in hop.connect_kwargs:
        tried.append("the password")
    if certificate := (hop.ssh_config or {}).get("certificatefile"):
        evidence.append(f"CertificateFile {certificate}: {'tried' if hop.connect_kwargs['pkey'] else _UNUSED}")
    off = "; PubkeyAuthentication is off" if (hop.ssh_config or {}).get("pubkeyauthentication") in _OFF else ""
    evidence.append(f"tried {', '.join(tried) or 'nothing'}{off}")
    what = f"{place} {'takes no more keys of' if 'session' in str(error) else 'refuses to log in'} {hop.user}"
    step = "set ansible_user and ansible_ssh_private_key_file, unlock the key with ssh-add, or give a password with -k"
    if faults:
        key, fault = faults[0]
        what = f"{place}: the key {key} can't be read: {fault}"
        step = f"ls -l {shlex.quote(key)}; or name another key with ansible_ssh_private_key_file"
    elif tried and "encrypted" in str(error):
        what, step = f"{place}: the key {tried[0]} needs a passphrase", f"ssh-add {shlex.quote(tried[0])}"
    elif tried and re.search("encountered (RSA|EC) key", str(error)):
        # A PEM file, which paramiko reads if it needs no passphrase.
        what = f"{place}: the key {tried[0]} needs a passphrase, or is damaged"
        step = f"ssh-add {shlex.quote(tried[0])}"
    elif tried and "private key" in str(error):
        what = f"{place}: {tried[0]} holds no private key"
        step = f"ssh-keygen -y -f {shlex.quote(tried[0])}; or name another with ansible_ssh_private_key_file"
    elif "password" in hop.connect_kwargs:
        step = "correct ansible_user and ansible_password (with -k: the password that was typed)"
    return Problem(what, "\n".join(evidence), f"{step}; try: ssh -v {_ssh_words(hop)}")


def _ssh_words(connection: Connection) -> str:
    port = "" if connection.port == 22 else f"-p {connection.port} "
    return port + shlex.quote(f"{connection.user}@{connection.original_host}")  # a domain's user has a backslash
