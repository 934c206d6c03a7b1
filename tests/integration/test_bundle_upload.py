"""A bundle's way onto a host, over a real sshd: once, resumed, with and without a sudo password."""

import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpuprov.fleet.agent_run import run_agent
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import SshSettings
from gpuprov.fleet.ssh import connected
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import Event, Note
from gpuprov.protocol.request import Request
from tests.files import put
from tests.integration.sshd import Server, serving
from tests.integration.sshd import server as server
from tests.integration.test_fleet import fake_agent

pytestmark = pytest.mark.root

ACCEPTING = SshSettings(accept_new_host_keys=True, connect_timeout=60)
DIGEST = "d" * 64
SIZE = 5_000_001
# The agent tells what the host got, by the path that its request names.
TELL = (
    "import hashlib; path = request['bundle']; status = os.stat(path); "
    "tell(event='Finished', exit_code=0, summary=' '.join([path, oct(status.st_mode), str(status.st_uid), "
    "hashlib.sha256(open(path, 'rb').read()).hexdigest()]))"
)


@pytest.fixture(params=["root", "open", "plain"])
def target(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> HostTarget:
    """Root; a user whose sudo asks for nothing; a user whose sudo asks for a password."""
    for path in (server.folder / "var/cache").glob("gpuprov/*"):
        path.unlink()
    return server.target(tmp_path, request.param)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "bundle.tar"
    path.write_bytes(os.urandom(SIZE))
    return path


def run(target: HostTarget, bundle: Path) -> tuple[str, list[str]]:
    """Run an agent with a bundle; return what it says of the bundle, and what users are told."""
    events: list[Event] = []
    request = Request("install", bundle=str(bundle), bundle_digest=DIGEST)
    with connected(target, ACCEPTING) as connection:
        finished = run_agent(connection, target, request, fake_agent(TELL), events.append)
    return finished.summary, [event.message for event in events if isinstance(event, Note)]


def cache(server: Server) -> Path:
    return server.folder / "var/cache/gpuprov"


def name() -> str:
    return f"bundle-{DIGEST[:32]}-{SIZE}.tar"


def arrived(bundle: Path) -> str:
    import hashlib

    return f"/var/cache/gpuprov/{name()} 0o100600 0 {hashlib.sha256(bundle.read_bytes()).hexdigest()}"


def test_it_arrives_whole_for_root_alone_and_once(server: Server, target: HostTarget, bundle: Path) -> None:
    summary, notes = run(target, bundle)
    assert summary == arrived(bundle)
    assert notes == ["uploading the bundle, 5 MiB"]
    assert cache(server).stat().st_mode & 0o777 == 0o700
    assert run(target, bundle) == (summary, [])


def test_it_goes_on_where_an_earlier_upload_stopped(server: Server, target: HostTarget, bundle: Path) -> None:
    cache(server).mkdir(mode=0o700, exist_ok=True)
    put(cache(server) / f"{name()}.part", bundle.read_bytes()[:2_000_000], 0o600)
    assert run(target, bundle) == (arrived(bundle), ["uploading the bundle, 5 MiB, from byte 2000000 on"])


def test_a_part_that_is_all_but_in_its_place_is_put_there(server: Server, target: HostTarget, bundle: Path) -> None:
    cache(server).mkdir(mode=0o700, exist_ok=True)
    put(cache(server) / f"{name()}.part", bundle.read_bytes(), 0o600)
    assert run(target, bundle)[0] == arrived(bundle)


def test_what_is_too_long_to_be_a_part_is_thrown_away(server: Server, target: HostTarget, bundle: Path) -> None:
    cache(server).mkdir(mode=0o700, exist_ok=True)
    (cache(server) / f"{name()}.part").write_bytes(bytes(SIZE + 1))
    assert run(target, bundle) == (arrived(bundle), ["uploading the bundle, 5 MiB"])


def test_other_bundles_go_and_nothing_else(server: Server, target: HostTarget, bundle: Path) -> None:
    cache(server).mkdir(mode=0o700, exist_ok=True)
    # The last but one is what another controller uploads now.
    for other in ("bundle-1-2.tar", "bundle-3-4.tar.part", "bundle-5-6.tar.part", "driver.run"):
        (cache(server) / other).write_bytes(b"x")
    two_days_ago = time.time() - 2 * 86400
    os.utime(cache(server) / "bundle-3-4.tar.part", (two_days_ago, two_days_ago))
    run(target, bundle)
    assert sorted(path.name for path in cache(server).iterdir()) == sorted(
        [name(), "bundle-5-6.tar.part", "driver.run"]
    )


@contextmanager
def proxy(port: int, most: int) -> Iterator[int]:
    """Give the port of a proxy that breaks the connection after `most` bytes towards the server."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_forward, args=(listening, port, most))
        thread.start()
        yield listening.getsockname()[1]
    thread.join(10)
    assert not thread.is_alive()


def _forward(listening: socket.socket, port: int, most: int) -> None:
    client, _ = listening.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        back = threading.Thread(target=_copy, args=(server, client, 1 << 40))
        back.start()
        _copy(client, server, most)
        for one in (client, server):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        back.join()


def _copy(source: socket.socket, target: socket.socket, most: int) -> None:
    with suppress(OSError):
        while most > 0 and (data := source.recv(1 << 16)):
            target.sendall(data)
            most -= len(data)


def test_broken_connection_is_reported_and_next_run_resumes(server: Server, target: HostTarget, bundle: Path) -> None:
    with proxy(server.port, 3_000_000) as port, pytest.raises(GpuprovError) as caught:
        run(dataclasses.replace(target, port=port), bundle)
    assert "the connection dropped while the bundle was uploaded" in str(caught.value)
    assert "it goes on where this one stopped" in str(caught.value)
    summary, notes = run(target, bundle)
    assert summary == arrived(bundle)
    (note,) = notes
    # Of what came, the server may hold 2 MiB for the program, the window of a channel.
    assert 500_000 < int(note.partition("from byte ")[2].split()[0]) < SIZE


def test_a_host_that_hangs_while_it_stores_the_bundle_is_left(tmp_path: Path, bundle: Path) -> None:
    programs, hangs = tmp_path / "bin", tmp_path / "hangs"
    programs.mkdir()
    put(programs / "stat", f"#!/bin/sh\necho $$ > {hangs}; exec sleep 100000\n", 0o755)
    request = Request("install", bundle=str(bundle), bundle_digest=DIGEST)
    with serving(f"{programs}:/usr/bin:/bin") as slow:
        target = slow.target(tmp_path)
        with connected(target, ACCEPTING) as connection:
            # Else it would hang for ever.
            too_late = threading.Timer(30, connection.close)
            too_late.start()
            with pytest.raises(GpuprovError, match="the bundle can't be stored on the host") as caught:
                run_agent(connection, target, request, fake_agent(TELL), lambda event: None, host_timeout=1)
            too_late.cancel()
        os.kill(int(hangs.read_text()), signal.SIGKILL)
    assert "not a word for 1 s" in caught.value.problems[0].evidence
