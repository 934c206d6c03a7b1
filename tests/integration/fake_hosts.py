"""Hundreds of hosts played by one process: an SSH server on loopback, an address each, that do what their kind says.

    python -m tests.integration.fake_hosts FOLDER --hosts 1000 [--latency 0.05] [--seconds 5]

Writes an inventory, a key to log in with and known_hosts into FOLDER, prints `ready` and serves until its stdin ends;
then `sent.json` tells how many events each host has sent. What a kind of host does stands in `KINDS`; the agent that is
pushed to these hosts is taken and never run.
"""

import argparse
import asyncio
import collections
import contextlib
import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncssh
from asyncssh.connection import SSHServerConnection

from gpuprov.protocol.errors import Problem
from gpuprov.protocol.events import (
    ChangeDone,
    ChangeProgress,
    ChangeStarted,
    CheckDone,
    Event,
    Finished,
    Planned,
    PlannedChange,
    Started,
    to_line,
)
from tests.loopback import free_port

Process = asyncssh.SSHServerProcess[bytes]
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
_CHANGES = 8
_DIFF = "".join(f"+line {number} of a file as long as such files are\n" for number in range(40))
PLAN = tuple(PlannedChange(f"c{number}", f"step {number % 4}", f"change {number}", _DIFF) for number in range(_CHANGES))
VERSIONS = {"os": "Debian GNU/Linux 12", "kernel": "6.1.0-38-amd64", "driver": "550.163.01", "docker": "20.10.24",
            "gpus": "8"}  # fmt: skip
OLD_DRIVER = {**VERSIONS, "driver": "535.247.01"}


class Host:
    """One host: its kind, the agents that it was given, how many events it has sent."""

    def __init__(self, name: str, address: str, kind: str, seconds: float, folder: Path = Path()) -> None:
        self.name = name
        self.address = address
        self.kind = kind
        self.seconds = seconds
        self.folder = folder
        self.agents: set[str] = set()
        self.sent = 0
        self.request: dict[str, Any] = {}

    def tell(self, process: Process, event: Event) -> None:
        """Send an event as the agent does."""
        process.stdout.write(to_line(event).encode() + b"\n")
        self.sent += 1

    async def released(self, hold: str) -> None:
        """Return once a file of this name, with which a test holds such hosts up, is not in the folder."""
        while (self.folder / hold).exists():
            await asyncio.sleep(0.02)


# -- what the agent does on a host, by kind --------------------------------------------------------------------------

Run = Callable[[Host, Process], Awaitable[None]]


async def _begin(host: Host, process: Process, changes: int = _CHANGES) -> None:
    """Do the work up to the change of that number."""
    host.tell(process, Started("1", "install", 1))
    host.tell(process, Planned(PLAN))
    for number in range(1, changes + 1):
        host.tell(process, ChangeStarted(f"c{number}", f"change {number}", number, _CHANGES))
        await host.released("hold-changes")
        for part in range(4):
            await asyncio.sleep(host.seconds / _CHANGES / 4)
            host.tell(process, ChangeProgress(f"c{number}", "reading", part, 4))
        host.tell(process, ChangeDone(f"c{number}", host.seconds / _CHANGES))


def _end(host: Host, process: Process, finished: Finished) -> None:
    host.tell(process, finished)
    process.exit(finished.exit_code)


def _ends_with(code: int = 0, summary: str = f"{_CHANGES} changes made", versions: dict[str, str] = VERSIONS) -> Run:
    """Return a run that makes all changes."""

    async def run(host: Host, process: Process) -> None:
        await _begin(host, process)
        _end(host, process, Finished(code, _CHANGES, host.seconds, (), summary, versions))

    return run


async def _has_nothing_to_do(host: Host, process: Process) -> None:
    host.tell(process, Started("1", "install", 1))
    await asyncio.sleep(host.seconds)
    host.tell(process, Planned(()))
    _end(host, process, Finished(0, 0, host.seconds, (), "0 changes", VERSIONS))


async def _fails(host: Host, process: Process) -> None:
    await _begin(host, process, 2)
    problem = Problem("the disk is full", "df says 100 %", "make room")
    _end(host, process, Finished(1, 2, host.seconds, (problem,), "", VERSIONS))


async def _hangs(host: Host, process: Process) -> None:
    await _begin(host, process, 1)
    await asyncio.sleep(3600)


async def _drops(host: Host, process: Process) -> None:
    await _begin(host, process, 1)
    await asyncio.sleep(0.2)  # what was sent shall arrive
    process.channel.get_connection().abort()


async def _babbles(host: Host, process: Process) -> None:
    for line in (b"\xff\xfe\x00\x1b]0;owned\x07", b'{"event": "Finished"}', b'{"event": "Finished", "exit_code": "0"}',
                 b"[" * 20_000, b'{"event":' * 1000):  # fmt: skip
        process.stdout.write(line + b"\n")
    process.exit(0)


async def _never_ends_its_line(host: Host, process: Process) -> None:
    for _ in range(1000):  # much more than anybody wants to hear
        if process.channel.get_connection().is_closed():
            return
        process.stdout.write(b"x" * 32768)
        await process.stdout.drain()
        await asyncio.sleep(0.001)


async def _is_killed(host: Host, process: Process) -> None:
    await _begin(host, process, 1)
    process.exit_with_signal("KILL")


async def _rolls(host: Host, process: Process) -> None:
    """Heed the request: a plan that stops containers, its changes, and a verification that goes well."""
    command, check = host.request["command"], host.request["check"]
    if command == "verify":
        ill = host.kind == "ill"
        host.tell(process, Started("1", command, 1))
        host.tell(process, CheckDone("docker, all GPUs", "failed" if ill else "ok", reason="no GPU" if ill else ""))
        _end(host, process, Finished(int(ill), 0, host.seconds, (), "1 check"))
    elif check:
        host.tell(process, Started("1", command, 1))
        plan = tuple(replace(one, disturbs=host.kind != "calm" and one.key == "c3") for one in PLAN)
        host.tell(process, Planned(plan))
        _end(host, process, Finished(0, _CHANGES, host.seconds, (), f"{_CHANGES} changes would be made", VERSIONS))
    else:
        await RUNS["works"](host, process)


RUNS: Mapping[str, Run] = {
    "works": _ends_with(), "settled": _has_nothing_to_do, "old-driver": _ends_with(versions=OLD_DRIVER),
    "reboot": _ends_with(3, "reboot to finish"),
    "fails": _fails, "hangs": _hangs, "drops": _drops, "babbles": _babbles, "endless": _never_ends_its_line,
    "killed": _is_killed, "rolls": _rolls, "ill": _rolls, "calm": _rolls,
}  # fmt: skip
# Those with which it does not come to a run: answers to the probe, to the upload, to the login, and no SSH at all.
PROBES = {
    "no-shell": "This account is currently not available.\n",
    "old-python": "gpuprov-probe 1\nsystem Linux x86_64\nuid 0\ncache /root/.cache/gpuprov\nagent \n"
    "os rocky|8.10||rhel centos fedora|Rocky Linux 8.10||\n"
    "python 3.6.8 /usr/bin/python3\nend\n",
    "sudo": "gpuprov-probe 1\nsystem Linux x86_64\nuid 1000\ncache /home/ops/.cache/gpuprov\nagent \n"
    "python 3.11.2 /usr/bin/python3\nsudo 1 sudo: a password is required\nend\n",
}
# What a server says in place of SSH; OpenSSH 10.6 after logins that failed.
SAID = {"web": b"HTTP/1.1 400 Bad Request\r\n\r\n" * 40, "penalty": b"Not allowed at this time\r\n"}
NOT_SSH = ("refused", "silent", *SAID)
KINDS = (*RUNS, *PROBES, "full-home", "login", "other-key", "frozen", *NOT_SSH)


# -- the server ------------------------------------------------------------------------------------------------------


class Door(asyncssh.SSHServer):
    """Lets everybody in who has the key, on hosts that let anybody in."""

    def __init__(self, hosts: Mapping[str, Host], allowed: asyncssh.SSHKey) -> None:
        self._hosts = hosts
        self._allowed = allowed
        self._host: Host | None = None
        self._connection: SSHServerConnection | None = None

    def connection_made(self, conn: SSHServerConnection) -> None:
        self._connection = conn
        self._host = self._hosts[conn.get_extra_info("sockname")[0]]

    def auth_completed(self) -> None:
        """Let a frozen host hear nothing more: its kernel still takes what is sent, as with a stopped sshd."""
        if self._host is not None and self._host.kind == "frozen" and self._connection is not None:
            transport: Any = self._connection._transport
            transport.pause_reading()

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        is_ours = key.public_data == self._allowed.public_data
        return is_ours and self._host is not None and self._host.kind != "login"


async def answer(host: Host, process: Process) -> None:
    """Answer one command as the host's kind does: the probe, the upload, or the agent."""
    command = _without_ansibles_shell(process.command or "")
    digest = (_DIGEST.search(command) or [""])[0]
    if command.startswith("sh -s"):
        await process.stdin.read()
        found = digest if digest in host.agents else ""
        usual = (f"gpuprov-probe 1\nsystem Linux x86_64\nuid 0\ncache /root/.cache/gpuprov\nagent {found}\n"
                 "python 3.11.2 /usr/bin/python3\nend\n")  # fmt: skip
        process.stdout.write(PROBES.get(host.kind, usual).encode())
        process.exit(0)
    elif command.startswith("sh -c"):
        content = await process.stdin.read()
        if host.kind == "full-home" or hashlib.sha256(content).hexdigest() != digest:
            process.stderr.write(b"cat: write error: No space left on device\n")
            process.exit(1)
            return
        host.agents.add(digest)
        process.exit(0)
    else:
        host.request = json.loads(await process.stdin.readline())
        await RUNS[host.kind](host, process)


def _without_ansibles_shell(command: str) -> str:
    """Return the command that Ansible's SSH connection gives to `/bin/sh -c`, any other as it is."""
    words = shlex.split(command)
    return words[2] if words[:2] == ["/bin/sh", "-c"] else command


def _delay_what_arrives(latency: float) -> None:
    """Let every connection take that many seconds longer to hear what was sent: a round trip over a long line."""
    received = SSHServerConnection.data_received

    def later(self: Any, data: bytes, datatype: int | None = None) -> None:
        waiting = self.__dict__.setdefault("_gpuprov_waiting", collections.deque())
        waiting.append(data)
        asyncio.get_running_loop().call_later(latency, lambda: received(self, waiting.popleft()))

    SSHServerConnection.data_received = later  # type: ignore[method-assign]


async def _serve(folder: Path, hosts: Sequence[Host], latency: float) -> None:
    by_address = {host.address: host for host in hosts}
    identity, server_key, other_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(3))
    port = free_port()
    if latency:
        _delay_what_arrives(latency)

    async def process_factory(process: Process) -> None:
        with contextlib.suppress(OSError, asyncssh.Error):
            await answer(by_address[process.get_extra_info("sockname")[0]], process)

    async def listen(key: asyncssh.SSHKey, of: Sequence[Host]) -> None:
        if of:
            await asyncssh.listen(
                [host.address for host in of], port, server_host_keys=[key], encoding=None, backlog=1024,
                server_factory=lambda: Door(by_address, identity), process_factory=process_factory, line_editor=False,
                login_timeout=0,
            )  # fmt: skip

    async def not_ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = by_address[writer.get_extra_info("sockname")[0]]
        if host.kind in SAID:
            writer.write(SAID[host.kind])
            await writer.drain()
            await reader.readline()  # what is not read makes the end a reset, which takes back what was said
        else:
            await host.released("hold-silence")
        writer.close()

    others = [host for host in hosts if host.kind == "other-key"]
    await listen(other_key, others)
    await listen(server_key, [host for host in hosts if host not in others and host.kind not in NOT_SSH])
    plain = [host.address for host in hosts if host.kind in ("silent", *SAID)]
    server = await asyncio.start_server(not_ssh, plain, port) if plain else None
    _write_files(folder, hosts, port, identity, server_key)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    (folder / "sent.json").write_text(json.dumps({host.name: host.sent for host in hosts}))
    if server is not None:
        server.close()


def _write_files(
    folder: Path, hosts: Sequence[Host], port: int, identity: asyncssh.SSHKey, server_key: asyncssh.SSHKey
) -> None:
    (folder / "identity").write_bytes(identity.export_private_key())
    (folder / "identity").chmod(0o600)
    key = server_key.export_public_key().decode().strip()
    (folder / "known_hosts").write_text("".join(f"[{host.address}]:{port} {key}\n" for host in hosts))
    lines = [f"{host.name} ansible_host={host.address}" for host in hosts]
    common = (
        f"ansible_port={port}", "ansible_user=root", f"ansible_ssh_private_key_file={folder}/identity",
        f"ansible_ssh_common_args='-o UserKnownHostsFile={folder}/known_hosts -o IdentitiesOnly=yes'",
        "gpuprov_driver_version=550.163.01",
    )  # fmt: skip
    (folder / "inventory.ini").write_text("\n".join(("[gpu]", *lines, "[gpu:vars]", *common)) + "\n")


@contextlib.contextmanager
def playing(folder: Path, *options: str) -> Iterator[Path]:
    """Play hosts, in a process of their own, as long as the block lasts; give their inventory."""
    server = subprocess.Popen(
        (sys.executable, "-m", __name__, folder, *options), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        assert server.stdout.readline() == "ready\n"
        yield folder / "inventory.ini"
    finally:
        server.stdin.close()
        server.wait(60)


def make_hosts(kinds: Sequence[str], seconds: float, folder: Path = Path()) -> list[Host]:
    """Return a host of each kind named, with addresses of its own in 127.77.0.0/16."""
    width = len(str(len(kinds)))
    return [
        Host(f"gpu{number:0{width}}", f"127.77.{number // 250}.{number % 250 + 1}", kind, seconds, folder)
        for number, kind in enumerate(kinds, 1)
    ]


def mixed(number: int) -> Iterator[str]:
    """Yield kinds for so many hosts: of a hundred, ten are in some trouble, a different one each."""
    troubles = [kind for kind in KINDS if kind not in ("works", "settled")]
    for index in range(number):
        yield troubles[index // 10 % len(troubles)] if index % 10 == 7 else "works"


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--kinds", default="", help="one host of each kind that is named, with commas")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=0.2, help="how long the agent works")
    given = parser.parse_args()
    kinds = given.kinds.split(",") if given.kinds else list(mixed(given.hosts))
    folder = given.folder.absolute()
    asyncio.run(_serve(folder, make_hosts(kinds, given.seconds, folder), given.latency))


if __name__ == "__main__":
    main()
