"""A container's decision by its name: docker and podman know the id."""

import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.core.system import System
from gpuprov.engines.containers import decision_of
from gpuprov.engines.cri_status import CriStatus, ask, parse
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook import jsonio, record
from tests.unit.scripted import Answer, Scripted

ID = "4f5c" * 16
OTHER = "9a9b" * 16


class Engines(Scripted):
    """Engines that know names, as their `inspect` answers."""

    def __init__(self, **names: dict[str, str]) -> None:
        super().__init__("/")
        self.names = names

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}" if program in self.names else None

    def answer(self, argv: tuple[str, ...]) -> Answer:
        assert argv[1:-1] == ("inspect", "--type", "container", "--format", "{{.Id}} {{.State.Running}}", "--")
        found = self.names[argv[0]].get(argv[-1])
        if found is None:
            return 1, "\n", f"Error: No such container: {argv[-1]}\n"
        return f"{found} {'false' if argv[-1] == 'ended' else 'true'}\n"


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "FOLDER", str(tmp_path))
    (tmp_path / ID).write_text(jsonio.dumps({"format": 1, "container": ID}))
    return tmp_path


@pytest.mark.parametrize(
    ("system", "name"),
    [
        (Engines(), ID),
        (Engines(), ID[:12]),
        (Engines(docker={"web": ID}), "web"),
        (Engines(docker={}, podman={"web": ID}), "web"),
    ],
)
def test_a_container_is_found_by_its_name_or_id(system: System, name: str) -> None:
    assert decision_of(system, name)["container"] == ID


@pytest.mark.parametrize(
    ("system", "name", "says"),
    [
        (Engines(docker={"web": OTHER}), "web", f"docker knows it as {OTHER}"),
        (Engines(docker={}), "web", "there is no container web with GPUs on this host"),
        (Engines(), "../../etc/passwd", "there is no container ../../etc/passwd with GPUs"),
        (Engines(), "--help", "there is no container --help with GPUs"),
    ],
)
def test_one_of_which_nothing_is_known_is_said_so(system: System, name: str, says: str) -> None:
    with pytest.raises(GpuprovError) as caught:
        decision_of(system, name)
    assert says in str(caught.value)


def test_a_container_that_has_ended_is_said_to_have_ended() -> None:
    """The hook's file outlives it under plain runc; and it did ask for GPUs."""
    with pytest.raises(GpuprovError, match="the container ended does not run") as caught:
        decision_of(Engines(docker={"ended": ID}), "ended")
    assert "docker start ended" in str(caught.value)


def test_two_with_the_same_beginning_are_none(records: Path) -> None:
    (records / (ID[:-1] + "x")).write_text(jsonio.dumps({"format": 1, "container": "x"}))
    with pytest.raises(GpuprovError, match="there is no container 4f5c with GPUs"):
        decision_of(Engines(), "4f5c")


@pytest.mark.parametrize(("number", "says"), [(0, "no decision is kept"), (99, "a newer gpuprov made the decision")])
def test_a_file_of_another_format_is_named(records: Path, number: int, says: str) -> None:
    (records / ID).write_text(jsonio.dumps({"format": number}))
    with pytest.raises(GpuprovError, match=says):
        decision_of(Engines(docker={"web": ID}), "web")


# -- CRI ---------------------------------------------------------------------------------------------------------------
_SERVICE, _METHOD = "runtime.v1.RuntimeService", "Status"


def field(number: int, value: bytes) -> bytes:
    """Return a field of protobuf that has a length."""
    length, size = len(value), b""
    while length > 0x7F:
        size += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + value


def info(**config: object) -> bytes:
    return field(2, field(1, b"config") + field(2, json.dumps(config).encode()))


# containerd 1.7.24 and 2.1.9 in their form.
OLD = info(containerd={"runtimes": {"runc": {}, "nvidia": {}}}, enableCDI=False)
NEW = info(enableCDI=True) + b"".join(field(3, field(1, name)) for name in (b"", b"nvidia", b"runc"))


@contextlib.contextmanager
def served(answer: bytes | grpc.StatusCode) -> Iterator[System]:
    """A system whose /cri.sock is a gRPC server that gives this answer. Sockets want short paths."""

    def status(request: bytes, context: grpc.ServicerContext) -> bytes:
        if isinstance(answer, bytes):
            return answer if request == b"\x08\x01" else b""
        context.abort(answer, "server is not initialized yet")
        return b""

    with tempfile.TemporaryDirectory(prefix="gpuprov-") as folder, ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        handlers: dict[str, Any] = {_METHOD: grpc.unary_unary_rpc_method_handler(status)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        server.add_insecure_port(f"unix://{folder}/cri.sock")
        server.start()
        try:
            yield System(folder)
        finally:
            server.stop(None).wait()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (OLD, CriStatus(("nvidia", "runc"), cdi=False)),
        (NEW, CriStatus(("nvidia", "runc"), cdi=True)),
        # Longer than HTTP/2's windows are by themselves.
        (OLD + info(padding="x" * 300_000) + NEW, CriStatus(("nvidia", "runc"), cdi=True)),
        # CRI-O before 1.30 names no handlers.
        (field(1, b""), None),
        (b"\x0a\xff", None),
        pytest.param(field(2, field(1, b"config") + field(2, b'{"a":' * 100_000)), None, id="deep"),
        (grpc.StatusCode.UNAVAILABLE, None),
        (grpc.StatusCode.UNIMPLEMENTED, None),
    ],
)
def test_a_servers_answer(answer: bytes | grpc.StatusCode, expected: CriStatus | None) -> None:
    with served(answer) as system:
        assert ask(system, "/cri.sock") == expected


def test_no_server(tmp_path: Path) -> None:
    assert ask(System(str(tmp_path)), "/cri.sock") is None
    (tmp_path / "cri.sock").write_text("a file")
    assert ask(System(str(tmp_path)), "/cri.sock") is None


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64, b"\0\0\1\0\1\0\0\0\1\0"])
def test_a_server_that_speaks_something_else(said: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="gpuprov-") as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/cri.sock")
        server.listen()

        def answer() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask(System(folder), "/cri.sock") is None
        thread.join(10)


@given(st.binary(max_size=200))
def test_no_message_is_a_traceback(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse(message)
