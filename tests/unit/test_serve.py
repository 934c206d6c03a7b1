"""`gpuprov serve` over real sockets: what it answers, and what it makes of hostile clients."""

import concurrent.futures
import contextlib
import errno
import http.client
import json
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuprov.boot import serve as server
from gpuprov.boot.serve import Answers
from gpuprov.engines.plain_flags import Device, Mount, PlainFlags
from gpuprov.protocol.errors import GpuprovError

# For a request to come: more than any takes.
_SECONDS = 300.0
_UUID = "GPU-d9b5d7b4-2126-5887-978a-2e436e1bd64a"
REPORT: dict[str, Any] = {
    "Version": {"Driver": "550.54.14", "CUDA": "12.4"}, "Info": [{"UUID": _UUID}], "Status": [{"Power": 21}],
}  # fmt: skip
# GPU 6 is not answered before its test says so.
BEGUN: list[threading.Barrier] = []
BLOCKED = threading.Event()
# The server works on a request for GPU 5.
REACHED = threading.Event()


def flags(gpus: str) -> PlainFlags:
    """Return flags that name the GPUs that were asked for."""
    if "7" in gpus.split(","):
        raise GpuprovError("there is no GPU 7: the host has 0, 1", f"--gpus {gpus}", "nvidia-smi -L")
    if gpus == "5":
        REACHED.set()
    if gpus == "6":
        BEGUN[0].wait(_SECONDS)
        assert BLOCKED.wait(_SECONDS)
    if gpus == "9":
        raise KeyError("mounts")
    if gpus == "8":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp")
    devices = (Device("/dev/nvidiactl", "/dev/nvidiactl"), Device("/dev/x", "/dev/y", "rw"))
    return PlainFlags(devices, (Mount("/lib/a.so", "/lib/b.so"),), (f"ASKED={gpus}",), (44,), ())


ANSWERS = Answers(lambda: REPORT, flags)


def start(*sockets: socket.socket) -> None:
    servers = [server.Server(one, ANSWERS) for one in sockets]
    threading.Thread(target=server.run, args=(servers,), daemon=True).start()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A server on a port of its own; the Host header must still name the real one, or none."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    (listening,) = server.own_sockets(("127.0.0.1", 0))
    start(listening)
    return int(listening.getsockname()[1])


def get(port: int, target: str, *, method: str = "GET", host: str = "localhost:3476") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    connection.putrequest(method, target, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def raw(port: int, request: bytes) -> bytes:
    """Send bytes as they are; return all that comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=_SECONDS) as connection:
        connection.sendall(request)
        received = b""
        while more := connection.recv(4096):
            received += more
        return received


@pytest.mark.parametrize("version", ["", "/v1.0"])
def test_arguments_for_docker(port: int, version: str) -> None:
    status, text = get(port, f"{version}/docker/cli?dev=0+1&vol=nvidia_driver")
    assert (status, text.split()) == (200, [
        "--device=/dev/nvidiactl:/dev/nvidiactl:rwm", "--device=/dev/x:/dev/y:rw", "--volume=/lib/a.so:/lib/b.so:ro",
        "--env=ASKED=0,1", "--group-add=44",
    ])  # fmt: skip
    status, text = get(port, f"{version}/docker/cli/json?dev={_UUID}")
    assert (status, json.loads(text)) == (200, {
        "VolumeDriver": "", "Volumes": ["/lib/a.so:/lib/b.so:ro"], "Devices": ["/dev/nvidiactl", "/dev/x:/dev/y:rw"],
        "Environment": [f"ASKED={_UUID}"], "GroupAdd": ["44"],
    })  # fmt: skip


@pytest.mark.parametrize("query", ["", "?dev=", "?dev=*", "?dev=&vol=", "?dev=%2A&vol=*"])
def test_without_a_choice_all_gpus_are_meant(port: int, query: str) -> None:
    assert "--env=ASKED=all" in get(port, f"/docker/cli{query}")[1]


@pytest.mark.parametrize("version", ["", "/v1.0"])
def test_what_the_gpus_are_and_do(port: int, version: str) -> None:
    document = {"Version": REPORT["Version"], "Devices": REPORT["Info"]}
    assert json.loads(get(port, f"{version}/gpu/info/json")[1]) == document
    assert json.loads(get(port, f"{version}/gpu/status/json")[1]) == {"Devices": REPORT["Status"]}


@pytest.mark.parametrize(
    ("target", "status", "option"),
    [
        ("?dev=7", 500, "there-is-no-GPU-7-the-host-has-0-1"),
        ("?dev=8", 500, "OSError-Errno-28-No-space-left-on-device-/tmp"),
        ("?dev=9", 500, "KeyError-mounts"),
        ("?dev=0+;--privileged", 400, "0-privileged-is-no-list-of-up-to-64-indexes-or-UUIDs-of-GPUs"),
        ("?dev=0%0a--privileged", 400, "0-privileged-is-no-list-of-up-to-64-indexes-or-UUIDs-of-GPUs"),
        ("?dev=nvidia.com/gpu=0", 400, "nvidia.com/gpu-0-is-no-list-of-up-to-64-indexes-or-UUIDs-of-GPUs"),
    ],
)
def test_an_error_in_a_shells_argument_starts_no_container(port: int, target: str, status: int, option: str) -> None:
    assert get(port, f"/docker/cli{target}") == (status, f"--gpuprov-error-{option}\n")


def test_more_gpus_than_a_host_has_are_refused(port: int) -> None:
    assert get(port, "/docker/cli?dev=" + "+".join(["0"] * 65))[0] == 400


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:3476", "localhost:80", "localhost.evil", "", "127.0.0.2"]
)
def test_a_name_that_resolves_to_this_host_is_refused(port: int, host: str) -> None:
    assert get(port, "/docker/cli", host=host) == (403, "--gpuprov-error-only-requests-to-localhost-are-answered\n")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:3476", "127.0.0.1", "127.0.0.1:3476"])
def test_this_hosts_own_names_are_answered(port: int, host: str) -> None:
    assert get(port, "/docker/cli", host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "HEAD", "OPTIONS", "get"])
def test_get_alone_is_answered(port: int, method: str) -> None:
    status, body = get(port, "/docker/cli", method=method)
    assert status == 501
    assert body == "" or body.startswith("--gpuprov-error-Unsupported-method")


@pytest.mark.parametrize("target", ["/", "/docker/cli/", "/gpu/../docker/cli", "/docker/%63li", "/v1.0", "*"])
def test_no_other_path_is_answered(port: int, target: str) -> None:
    assert get(port, target)[0] == 404


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /docker/cli HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"Host: localhost\r\n\r\n", b"431"),
        (b"GET /docker/cli HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", b"403"),
        (b"GET /docker/cli HTTP/1.0\r\n\r\n", b"403"),
        (b"GET /docker/cli HTTP/9.9\r\nHost: localhost\r\n\r\n", b"505"),
        (b"GET /docker/cli\r\n\r\n", b""),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
        (b"GET /docker/cli HTTP/1.1\nHost: localhost\n\n", b"200"),
    ],
)
def test_requests_that_are_none_or_too_large(port: int, request_: bytes, status: bytes) -> None:
    head, _, body = raw(port, request_).rpartition(b"\r\n\r\n")
    # Before 3.14.10, Python answers a version that it does not know without a head.
    assert (head.split(b" ")[1] == status) if head else status in (b"", b"400", b"505")
    # In `docker run $(curl …)` a sentence's first word would be the image.
    assert body.startswith(b"--gpuprov-error-" if status != b"200" else b"--device")
    assert get(port, "/docker/cli")[0] == 200


def test_a_request_without_a_head_where_python_leaves_none(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = server.Handler.parse_request

    def parsed(handler: server.Handler) -> bool:
        """Parse as Python 3.14.10 does."""
        found = parse(handler)
        if handler.request_version == "HTTP/0.9":
            handler.headers = {}  # type: ignore[assignment]
        return found

    monkeypatch.setattr(server.Handler, "parse_request", parsed)
    assert raw(port, b"GET /docker/cli\r\n\r\n").startswith(b"--gpuprov-error-only-requests-to-localhost")


def test_a_client_that_sends_nothing_is_disconnected(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.Handler, "timeout", 0.1)
    assert raw(port, b"GET /docker/cli HTTP/1.1\r\n") == b""


REQUEST = b"GET /docker/cli HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET", REQUEST], ids=["silent", "half a request", "after the answer"])
def test_idle_clients_shut_nobody_out(port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.Handler, "timeout", _SECONDS)
    idle = []
    for _ in range(3 * server.MOST_AT_ONCE):
        idle.append(socket.create_connection(("127.0.0.1", port), timeout=_SECONDS))
        idle[-1].sendall(sent)
        if sent == REQUEST:
            assert idle[-1].recv(4096)
    assert get(port, "/docker/cli")[0] == 200
    for one in idle:
        one.close()


def test_a_request_waits_while_the_server_works_on_all_it_may(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.Handler, "timeout", _SECONDS)
    begun = threading.Barrier(server.MOST_AT_ONCE + 1)
    with concurrent.futures.ThreadPoolExecutor(server.MOST_AT_ONCE + 1) as pool:
        BLOCKED.clear()
        REACHED.clear()
        BEGUN.append(begun)
        answers = [pool.submit(raw, port, REQUEST.replace(b"cli", b"cli?dev=6")) for _ in range(begun.parties - 1)]
        begun.wait(_SECONDS)
        last = pool.submit(get, port, "/docker/cli?dev=5")
        # It comes after the others' answers, however long one waits: the second is for a server that lets it in.
        is_early = REACHED.wait(1)
        BLOCKED.set()
        BEGUN.clear()
        assert all(b" 200 OK" in answer.result() for answer in answers)
        assert last.result()[0] == 200 and REACHED.is_set() and not is_early


@pytest.mark.root
def test_unix_socket_is_roots_and_has_places_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run/serve.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:  # of a server that was killed
        dead.bind(str(path))
    sockets = server.own_sockets(("127.0.0.1", 0), str(path))
    status = path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, 0)
    start(*sockets)
    idle = [socket.create_connection(sockets[0].getsockname()) for _ in range(server.MOST_AT_ONCE)]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(REQUEST)
        assert client.recv(100).startswith(b"HTTP/1.0 200 ")
    for one in idle:
        one.close()


def test_a_port_in_use_is_a_sentence(port: int) -> None:
    with pytest.raises(GpuprovError, match=f"127.0.0.1:{port} can't be used"):
        server.own_sockets(("127.0.0.1", port))


def test_a_request_has_a_bound(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), _SECONDS) as client:
        with contextlib.suppress(OSError):  # it may be answered before all is sent
            client.sendall(b"GET /gpu/info/json HTTP/1.1\r\n" + b"X: 1\r\n" * 90 + b"Y: " + b"y" * 9000 + b"\r\n\r\n")
        assert client.recv(99).split(b" ", 2)[1] == b"431"


def test_those_who_ask_at_once_have_one_child() -> None:
    now, most, begun = [0], [0], threading.Barrier(8)

    def report() -> dict[str, Any]:
        now[0] += 1
        most[0] = max(most[0], now[0])
        threading.Event().wait(0.05)
        now[0] -= 1
        return REPORT

    answers = Answers(report, flags)

    def ask(_: int) -> None:
        begun.wait(_SECONDS)
        assert answers.answer("/gpu/info/json", ["localhost:3476"])[0] == 200

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert most == [1]
