"""`gpuprov serve` over real sockets: what it answers, and what it makes of hostile clients."""

from __future__ import annotations

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

from gpuprov.boot import serve_main
from gpuprov.boot.gpu_report import GpuReport
from gpuprov.boot.serve_answers import Answers
from gpuprov.core.system import System
from gpuprov.engines.plain_flags import Device, Mount, PlainFlags
from gpuprov.protocol.errors import GpuprovError
from tests.lab.shell import wait_for

# For a request to come: more than any takes; and little, where it does not come whole.
_SECONDS, _FEW_SECONDS = 300.0, 0.5
_UUID = "GPU-d9b5d7b4-2126-5887-978a-2e436e1bd64a"


class Report(GpuReport):
    """A report of one GPU that tells nothing but its name, without NVML."""

    def read(self) -> dict[str, Any]:
        from gpuprov.boot.gpu_report_child import _FAMILIES

        nothing = {"Cores": None, "Memory": None}
        info = {
            "UUID": _UUID, "Path": "/dev/nvidia0", "Model": "A GPU", "Power": 250, "CPUAffinity": 0, "Clocks": nothing,
            "PCI": {"BusID": "0000:1b:00.0", "BAR1": None, "Bandwidth": None}, "Topology": None,
            "Family": _FAMILIES[9], "Arch": "9.0", "Cores": None, "Memory": {"ECC": False, "Global": 81559},
        }  # fmt: skip
        status = {
            "Power": 21, "Temperature": 42, "Utilization": dict.fromkeys(("GPU", "Memory", "Encoder", "Decoder"), 0),
            "Memory": {"GlobalUsed": 0, "ECCErrors": {"Global": None}}, "Clocks": nothing,
            "PCI": {"BAR1Used": None, "Throughput": {"RX": None, "TX": None}},
            "Processes": [{"PID": 7, "Name": "", "MemoryUsed": 12}],
        }  # fmt: skip
        return {"Version": {"Driver": "550.54.14", "CUDA": "12.4"}, "Info": [info], "Status": [status]}


# GPU 6 is not answered before its test says so.
BEGUN: list[threading.Barrier] = []
BLOCKED = threading.Event()


def flags(gpus: str) -> PlainFlags:
    """Return flags that name the GPUs that were asked for."""
    if "7" in gpus.split(","):
        raise GpuprovError("there is no GPU 7: the host has 0, 1", f"--gpus {gpus}", "nvidia-smi -L")
    if gpus == "6":
        BEGUN[0].wait(_SECONDS)
        assert BLOCKED.wait(_SECONDS)
    if gpus == "9":
        raise KeyError("mounts")
    if gpus == "8":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp")
    devices = (Device("/dev/nvidiactl", "/dev/nvidiactl"), Device("/dev/x", "/dev/y", "rw"))
    return PlainFlags(devices, (Mount("/lib/a.so", "/lib/b.so"),), (f"ASKED={gpus}",), (44,), ())


@pytest.fixture
def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A server on a port of its own; the Host header must still name the real one, or none."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    (listening,) = serve_main.own_sockets(("127.0.0.1", 0))
    seconds = getattr(request, "param", _SECONDS)
    server = serve_main.Server([listening], Answers(Report(System()), flags), seconds=seconds)
    threading.Thread(target=server.serve, daemon=True).start()
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
    status, said = get(port, f"{version}/docker/cli?dev=0+1&vol=nvidia_driver")
    assert (status, said.split()) == (200, [
        "--device=/dev/nvidiactl:/dev/nvidiactl:rwm", "--device=/dev/x:/dev/y:rw", "--volume=/lib/a.so:/lib/b.so:ro",
        "--env=ASKED=0,1", "--group-add=44",
    ])  # fmt: skip
    status, said = get(port, f"{version}/docker/cli/json?dev={_UUID}")
    assert (status, json.loads(said)) == (200, {
        "VolumeDriver": "", "Volumes": ["/lib/a.so:/lib/b.so:ro"], "Devices": ["/dev/nvidiactl", "/dev/x:/dev/y:rw"],
        "Environment": [f"ASKED={_UUID}"], "GroupAdd": ["44"],
    })  # fmt: skip


@pytest.mark.parametrize("query", ["", "?dev=", "?dev=*", "?dev=&vol=", "?dev=%2A&vol=*"])
def test_without_a_choice_all_gpus_are_meant(port: int, query: str) -> None:
    assert "--env=ASKED=all" in get(port, f"/docker/cli{query}")[1]


@pytest.mark.parametrize("version", ["", "/v1.0"])
def test_what_the_gpus_are_and_do(port: int, version: str) -> None:
    document = json.loads(get(port, f"{version}/gpu/info/json")[1])
    assert document["Version"] == {"Driver": "550.54.14", "CUDA": "12.4"}
    assert document["Devices"][0]["UUID"] == _UUID
    (device,) = json.loads(get(port, f"{version}/gpu/status/json")[1])["Devices"]
    assert device["Processes"] == [{"PID": 7, "Name": "", "MemoryUsed": 12}]
    text = get(port, f"{version}/gpu/info")[1]
    assert "Device #0\n  Model:              A GPU\n" in text
    assert "    BAR1:             N/A\n" in text
    text = get(port, f"{version}/gpu/status")[1]
    assert "  Temperature:        42 °C\n" in text
    assert "    - PID: 7  Memory: 12 MiB\n" in text


@pytest.mark.parametrize(
    ("target", "status", "option"),
    [
        ("?dev=7", 500, "--gpuprov-error-there-is-no-GPU-7-the-host-has-0-1"),
        ("?dev=8", 500, "--gpuprov-error-Errno-28-No-space-left-on-device-/tmp"),
        ("?dev=9", 500, "--gpuprov-error-internal-error-KeyError-mounts"),
        ("?dev=0+;--privileged", 400, "--gpuprov-error-privileged-is-neither-a-GPU-s-index-nor-its-UUID"),
        ("?dev=0%0a--privileged", 400, "--gpuprov-error-privileged-is-neither-a-GPU-s-index-nor-its-UUID"),
        ("?dev=nvidia.com/gpu=0", 400, "--gpuprov-error-nvidia.com/gpu-0-is-neither-a-GPU-s-index-nor-its-UUID"),
        ("?vol=other", 400, "--gpuprov-error-there-is-no-volume-other-only-nvidia_driver"),
        ("?dev=" + "+".join(["0"] * 65), 400, "--gpuprov-error-too-many-GPUs"),
    ],
)
def test_an_error_in_a_shells_argument_starts_no_container(port: int, target: str, status: int, option: str) -> None:
    assert get(port, f"/docker/cli{target}") == (status, f"{option}\n")


def test_an_error_as_json_is_a_sentence(port: int) -> None:
    assert get(port, "/docker/cli/json?dev=7") == (500, "there is no GPU 7: the host has 0, 1\n")
    assert get(port, "/docker/cli?" + "a=1&" * 9)[0] == 400


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:3476", "localhost:80", "localhost.evil", "", "127.0.0.2"]
)
def test_a_name_that_resolves_to_this_host_is_refused(port: int, host: str) -> None:
    assert get(port, "/docker/cli", host=host) == (403, "--gpuprov-error-only-requests-to-localhost-are-answered\n")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:3476", "127.0.0.1", "127.0.0.1:3476"])
def test_this_hosts_own_names_are_answered(port: int, host: str) -> None:
    assert get(port, "/docker/cli", host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "get", "CONNECT"])
def test_get_alone_is_answered(port: int, method: str) -> None:
    status, body = get(port, "/docker/cli", method=method)
    assert status == 405
    assert body in ("", "--gpuprov-error-only-GET-is-answered\n")


@pytest.mark.parametrize(
    "target",
    ["/", "/docker", "/docker/cli/", "/gpu/../docker/cli", "/docker/%63li", "/v1.0", "/v1.1/docker/cli",
     "/v1.0//gpu/info", "http://localhost:3476/docker/cli", "/VolumeDriver.Mount", "/docker/cli%00", "/docker/cli;x",
     "*", "http://[/"],
)  # fmt: skip
def test_no_other_path_is_answered(port: int, target: str) -> None:
    assert get(port, target)[0] in (400, 404)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /docker/cli HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"431"),
        (b"GET /docker/cli HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"Host: localhost\r\n\r\n", b"400"),
        (b"GET /docker/cli HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", b"403"),
        (b"GET /docker/cli HTTP/1.1\r\n\r\n", b"403"),
        (b"GET /docker/cli HTTP/1.0\r\n\r\n", b"403"),
        (b"GET /docker/cli\r\n\r\n", b"400"),
        (b"GET /docker/cli HTTP/9.9\r\nHost: localhost\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET /docker/cli HTTP/1.1\nHost: localhost\n\n", b"200"),
        (b"GET /docker/cli HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n", b"200"),
    ],
)
def test_requests_that_are_none_or_too_large(port: int, request_: bytes, status: bytes) -> None:
    answer = raw(port, request_)
    assert answer.split(b" ", 2)[1] == status
    # In `docker run $(curl …)` a sentence's first word would be the image.
    assert answer.partition(b"\r\n\r\n")[2].startswith(b"--gpuprov-error-" if status != b"200" else b"--device")
    assert get(port, "/docker/cli")[0] == 200


def test_a_slow_client_keeps_nobody_waiting(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET /docker/cli HTTP/1.1\r\n")
        assert get(port, "/docker/cli")[0] == 200


@pytest.mark.parametrize("port", [_FEW_SECONDS], indirect=True)
@pytest.mark.parametrize("drip", [b"", b"a"], ids=["silence", "a byte at a time"])
def test_a_request_that_does_not_end_is_refused(port: int, drip: bytes) -> None:
    answer = b""
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET /docker/cli HTTP/1.1\r\n")
        slow.settimeout(0.05)

        def answered() -> bool:
            nonlocal answer
            with contextlib.suppress(TimeoutError):
                slow.send(drip)
                answer += slow.recv(4096)
            return bool(answer)

        wait_for("an answer", answered)
    assert answer.startswith(b"HTTP/1.1 408 ")


REQUEST = b"GET /docker/cli HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET", REQUEST], ids=["silent", "half a request", "after the answer"])
def test_idle_clients_shut_nobody_out(port: int, sent: bytes) -> None:
    idle = []
    for _ in range(3 * serve_main.MOST_AT_ONCE):
        idle.append(socket.create_connection(("127.0.0.1", port), timeout=_SECONDS))
        idle[-1].sendall(sent)
        if sent == REQUEST:
            assert idle[-1].recv(4096)
    assert get(port, "/docker/cli")[0] == 200
    for one in idle:
        one.close()


def test_more_requests_than_slots_are_refused_at_once(port: int) -> None:
    begun = threading.Barrier(serve_main.MOST_AT_ONCE + 1)
    with concurrent.futures.ThreadPoolExecutor(serve_main.MOST_AT_ONCE) as pool:
        BLOCKED.clear()
        BEGUN.append(begun)
        answers = [pool.submit(raw, port, REQUEST.replace(b"cli", b"cli?dev=6")) for _ in range(begun.parties - 1)]
        begun.wait(_SECONDS)
        refused = raw(port, b"")
        BLOCKED.set()
        BEGUN.clear()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert refused.endswith(b"\r\n\r\n--gpuprov-error-too-many-requests-at-once\n")
        assert all(b" 200 OK" in answer.result() for answer in answers)
    assert get(port, "/docker/cli")[0] == 200


@pytest.mark.root
def test_the_unix_socket_is_roots_in_a_folder_of_roots(tmp_path: Path) -> None:
    path = tmp_path / "run/serve.sock"
    sockets = serve_main.own_sockets(("127.0.0.1", 0), str(path))
    status = path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, 0)
    with pytest.raises(GpuprovError, match="another program listens"):
        serve_main.own_sockets(("127.0.0.1", 0), str(path))
    server = serve_main.Server(sockets, Answers(Report(System()), flags))
    threading.Thread(target=server.serve, daemon=True).start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"GET /docker/cli HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    # Clients of the other socket, of any user, do not keep root from this one.
    slow = [socket.create_connection(sockets[0].getsockname()) for _ in range(serve_main.MOST_AT_ONCE)]
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /docker/cli HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        for one in slow:
            one.close()


@pytest.mark.root
def test_a_stale_socket_is_replaced_and_an_open_folder_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = serve_main.Server(serve_main.own_sockets(("127.0.0.1", 0), str(path)), Answers(Report(System()), flags))
    server.close()
    assert not path.exists()
    tmp_path.chmod(0o777)
    with pytest.raises(GpuprovError, match="root alone may write"):
        serve_main.own_sockets(("127.0.0.1", 0), str(path))


def test_a_port_in_use_is_a_sentence(port: int) -> None:
    with pytest.raises(GpuprovError, match=f"127.0.0.1:{port} can't be used"):
        serve_main.own_sockets(("127.0.0.1", port))
