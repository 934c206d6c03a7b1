"""What the hook says to systemd of a container's devices: over a real socket, to a systemd that is made up.

Real ones hear it in tests/integration/test_containers_on_hosts.py.
"""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook import device_cgroup, prestart
from gpuprov.runtime_hook.device_cgroup import properties, scope_of, unit_path
from gpuprov.runtime_hook.settings import read_settings

ID = "4f5c" * 16
UNIT = f"docker-{ID}.scope"
NODES = [
    {"type": "c", "major": 195, "minor": 0, "access": "rw"},
    {"type": "b", "major": 8, "minor": 1, "access": "rwm"},
]
RETURN, ERROR, SIGNAL = 2, 3, 4


def string(text: str) -> bytes:
    return struct.pack("=I", len(text)) + text.encode() + b"\0"


def message(kind: int, body: bytes = b"", fields: bytes = b"\5\1u\0\1\0\0\0") -> bytes:
    head = struct.pack("=cBBBIII", b"l", kind, 1, 1, len(body), 1, len(fields))
    return head + fields + b"\0" * (-len(fields) % 8) + body


def policy(value: str) -> bytes:
    return message(RETURN, b"\1s\0\0" + string(value))


class Systemd:
    """Answers calls one after the other, and keeps what it was sent."""

    def __init__(self, path: Path, answers: list[bytes], welcome: bytes) -> None:
        self.heard = b""
        self._answers, self._welcome = answers, welcome
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            self.heard += connection.recv(1 << 16)
            connection.sendall(self._welcome)
            for answer in self._answers:
                self.heard += connection.recv(1 << 16)
                connection.sendall(answer)

    def end(self) -> None:
        self._thread.join(10)
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Systemd] = []
    monkeypatch.setattr(device_cgroup, "SOCKETS", (str(tmp_path / "bus"), str(tmp_path / "private")))

    def make(*answers: bytes, name: str = "private", welcome: bytes = b"OK 1234\r\n") -> Systemd:
        made.append(Systemd(tmp_path / name, list(answers), welcome))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.parametrize(
    ("folder", "container", "found"),
    [
        (f"/sys/fs/cgroup/system.slice/{UNIT}", ID, UNIT),
        (f"/sys/fs/cgroup/unified/machine.slice/libpod-{ID}.scope/container", ID, f"libpod-{ID}.scope"),
        (f"/sys/fs/cgroup/docker/{ID}", ID, ""),
        (f"/sys/fs/cgroup/system.slice/docker-{ID[:-1]}0.scope", ID, ""),
        (f"/sys/fs/cgroup/{UNIT}/a/b", ID, ""),
        (f"/sys/fs/cgroup/system.slice/d\udcfcr-{ID}.scope", ID, ""),
        ("/sys/fs/cgroup/system.slice/docker-.scope", "", ""),
        ("", ID, ""),
    ],
)
def test_the_scope_is_the_containers_own(folder: str, container: str, found: str) -> None:
    assert scope_of(folder, container) == found


def test_the_path_of_a_unit_is_systemds() -> None:
    # As `busctl tree org.freedesktop.systemd1` shows them.
    assert unit_path("docker-4f.scope").endswith("/unit/docker_2d4f_2escope")
    assert unit_path("4f_5.scope").endswith("/unit/_34f_5f5_2escope")


def test_the_nodes_are_added_to_the_units_list() -> None:
    body = properties("u.scope", NODES)
    assert body[:12] == string("u.scope") and body[12:16] == struct.pack("=I", 1)
    size = struct.unpack_from("=I", body, 16)[0]
    assert len(body) == 24 + size  # the structures begin at a multiple of eight
    assert body[24:40] == string("DeviceAllow") and body[40:47] == b"\5a(ss)\0"
    assert struct.unpack_from("=I", body, 48)[0] == len(body) - 56
    first = string("/dev/char/195:0")
    assert body[56 : 56 + len(first)] == first and body[76:83] == string("rw")
    assert body[88:].startswith(string("/dev/block/8:1"))


def heard(served: Systemd) -> bytes:
    """Tell this systemd of the nodes; return what it was sent."""
    device_cgroup.wait(device_cgroup.tell(UNIT, NODES))
    served.end()
    return served.heard


@pytest.mark.parametrize("value", ["strict", "closed"])
def test_systemd_is_asked_to_allow_the_nodes(systemd: Any, value: str) -> None:
    sent = heard(systemd(policy(value), message(RETURN)))
    assert sent.startswith(b"\0AUTH EXTERNAL ") and b"BEGIN\r\n" in sent
    assert sent.count(b"l\1\0\1") == 2 and b"Hello" not in sent
    assert sent.endswith(properties(UNIT, NODES))


def test_a_privileged_containers_scope_stays_without_rules(systemd: Any) -> None:
    served = systemd(policy("auto"))
    assert device_cgroup.tell(UNIT, NODES) is None
    served.end()
    assert b"SetUnitProperties" not in served.heard


def test_the_system_bus_is_greeted_and_signals_are_passed_over(systemd: Any) -> None:
    signal = message(SIGNAL, string("x"), fields=b"")
    hello = message(RETURN, string(":1.7")) + signal * 3
    sent = heard(systemd(hello, signal + policy("strict"), message(RETURN), name="bus"))
    assert b"Hello" in sent and b"SetUnitProperties" in sent


@pytest.mark.parametrize(
    ("answers", "welcome", "said"),
    [
        ([], b"REJECTED EXTERNAL\r\n", "refuses the authentication"),
        ([], b"", "ends the connection"),
        ([message(ERROR, string("Unit not loaded."))], b"OK\x201\r\n", "Unit not loaded"),
        ([message(ERROR)], b"OK 1\r\n", "answers with an error"),
        ([message(SIGNAL) * 40], b"OK 1\r\n", "ends the connection"),
        ([b"x" + message(SIGNAL)[1:]], b"OK 1\r\n", "can't be read"),
        ([message(RETURN, bytes(1 << 17))], b"OK 1\r\n", "can't be read"),
        ([b"l" + b"\xff" * 15], b"OK 1\r\n", "can't be read"),
        ([b"B" + message(RETURN)[1:]], b"OK 1\r\n", "can't be read"),
        ([message(RETURN)[:9]], b"OK 1\r\n", "ends the connection"),
    ],
)
def test_odd_answer_of_systemd_is_an_error(systemd: Any, answers: list[bytes], welcome: bytes, said: str) -> None:
    systemd(*answers, welcome=welcome)
    with pytest.raises(OSError, match=said):
        device_cgroup.tell(UNIT, NODES)


def test_signals_that_another_user_sends_do_not_hide_the_answer(systemd: Any) -> None:
    """The bus hands a signal to whomever its sender names, in the sender's byte order."""
    other_order = struct.pack(">cBBBIII", b"B", SIGNAL, 1, 1, 3, 1, 0) + b"abc"
    flood = message(SIGNAL) * 500 + message(SIGNAL, bytes(1 << 20)) + other_order
    assert heard(systemd(flood + policy("strict"), message(RETURN))).endswith(properties(UNIT, NODES))


def test_a_systemd_that_drips_does_not_hold_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and all of them together do not: without a limit for all, the last line is read."""
    monkeypatch.setattr(device_cgroup, "SOCKETS", (str(tmp_path / "none"), str(tmp_path / "private")))
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "private"))
        listening.listen()

        def drip() -> None:
            connection, _ = listening.accept()
            with connection:
                for byte in b"OK 1" + b"1" * 30 + b"\r\n":
                    connection.send(bytes((byte,)))
                    if ended.wait(0.05):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(OSError, match=r"in time|timed out"):
                device_cgroup.Bus(0.3)
        finally:
            ended.set()
            thread.join(10)


def test_start_without_systemd_logs_the_loss(systemd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prestart, "allow", lambda pid, nodes: f"/sys/fs/cgroup/system.slice/{UNIT}")
    own = tmp_path / "own.toml"
    own.write_text(f"[nvidia-container-runtime]\ndebug = '{tmp_path}/log'\n")
    settings, _ = read_settings(str(own), "")
    assert prestart.allow_nodes(1, ID, NODES, settings) is None
    line = (tmp_path / "log").read_text()
    assert f"warning systemd was not told of the devices of {UNIT}" in line and "No such file" in line


def test_a_systemd_that_is_being_replaced_is_told_again(systemd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment, `systemctl daemon-reexec` leaves the bus without it: it would take the devices away later."""
    monkeypatch.setattr(prestart, "allow", lambda pid, nodes: f"/sys/fs/cgroup/system.slice/{UNIT}")
    exited = message(ERROR, string("Process org.freedesktop.systemd1 exited with status 1"))
    served = [systemd(exited, name="private")]
    paused = []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        Path(device_cgroup.SOCKETS[-1]).unlink()
        served.append(systemd(policy("strict"), message(RETURN)))

    monkeypatch.setattr(time, "sleep", pause)
    told = prestart.allow_nodes(1, ID, NODES, read_settings("", "")[0])
    assert told is not None and len(paused) == 1
    device_cgroup.wait(told)
    served[-1].end()
    assert served[-1].heard.endswith(properties(UNIT, NODES))


def test_an_error_in_the_end_is_no_reason_against_a_start(systemd: Any) -> None:
    systemd(policy("strict"), message(ERROR, string("Access denied")))
    device_cgroup.wait(device_cgroup.tell(UNIT, NODES))
