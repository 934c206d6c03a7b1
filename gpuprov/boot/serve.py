"""`gpuprov serve`: docker flags and GPU status for old scripts, in the form of nvidia-docker-plugin 1.0.

The server answers GET on 127.0.0.1:3476 and a Unix socket of root's, with all resources bounded. With systemd socket
activation (sd_listen_fds(3)) it makes no sockets and exits after two idle minutes. Form of the answers: NVIDIA's wiki
of nvidia-docker 1.0, page nvidia-docker-plugin, "REST API".
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable
from urllib.parse import parse_qs

from gpuprov.boot.docker_args import granted_flags
from gpuprov.cdi.discover import discover, missing_nodes
from gpuprov.cdi.nvml import run_child
from gpuprov.core.system import System
from gpuprov.engines.plain_flags import Device, PlainFlags, shell_words
from gpuprov.protocol.errors import GpuprovError

# -- answers ---------------------------------------------------------------------------------------------------------

# DNS rebinding: a page in a browser on this host can use a name that resolves to 127.0.0.1. The browser then sends that
# name as Host.
_HOSTS = frozenset(f"{name}{port}" for name in ("localhost", "127.0.0.1") for port in ("", ":3476"))
_GPU = r"(\d{1,3}(:\d{1,3})?|(GPU|MIG)-[0-9a-fA-F/-]{1,80})"
_GPUS = re.compile(rf"all|{_GPU}(,{_GPU}){{0,63}}")
# An HTTP status, and the body.
Answer = tuple[int, str]


def refusal(status: int, sentence: str) -> Answer:
    """Return an error as one option that docker does not know: `docker run $(curl …)` then starts no container.

    The first word of a sentence would be an image there.
    """
    option = re.sub(r"[^A-Za-z0-9_./]+", "-", sentence[:300]).strip("-")
    return status, f"--gpuprov-error-{option}\n"


# Path, also below /v1.0 → the answer to a query.
_PATHS: dict[str, Callable[[Answers, str], str]] = {
    "/docker/cli": lambda one, query: " ".join(shell_words(one.asked(query))),
    "/docker/cli/json": lambda one, query: json.dumps(_as_json(one.asked(query))),
    "/gpu/info/json": lambda one, _: one.reported({"Version": "Version", "Devices": "Info"}),
    "/gpu/status/json": lambda one, _: one.reported({"Devices": "Status"}),
}


class Answers:
    """What is answered. `report` returns what NVML reports, `flags` the plain flags of some GPUs."""

    def __init__(
        self, report: Callable[[], Mapping[str, Any]], flags: Callable[[str], PlainFlags] = granted_flags
    ) -> None:
        self._report, self._flags, self._lock = report, flags, threading.Lock()

    def answer(self, target: str, hosts: list[str]) -> Answer:
        """Return the answer to a GET. `hosts`: the values of the header Host; exactly one must name this machine."""
        if len(hosts) != 1 or hosts[0].strip().lower() not in _HOSTS:
            return refusal(403, "only requests to localhost are answered")
        path, _, query = target.partition("?")
        answer = _PATHS.get(path.removeprefix("/v1.0"))
        if answer is None:
            return refusal(404, f"there is no such path; there are {' '.join(_PATHS)}")
        try:
            return 200, answer(self, query)
        except ValueError as error:
            return refusal(400, str(error))
        except GpuprovError as error:
            return refusal(500, error.problems[0].what)
        except Exception as error:  # a client that hears nothing takes the empty answer for no flags
            return refusal(500, f"{type(error).__name__}: {error}")

    def reported(self, parts: Mapping[str, str]) -> str:
        """Return parts of the report by other names; one child process serves all who ask at once."""
        with self._lock:
            found = self._report()
        return json.dumps({key: found[part] for key, part in parts.items()})

    def asked(self, query: str) -> PlainFlags:
        """Return the flags that a query asks for. Raises ValueError for one that names no GPUs."""
        # `vol` chose among the plugin's volumes; gpuprov mounts the driver's files one by one.
        names = " ".join(parse_qs(query).get("dev", ())).replace(",", " ").split()
        gpus = "all" if not names or "*" in names else ",".join(names)
        if not _GPUS.fullmatch(gpus):
            raise ValueError(f"{gpus} is no list of up to 64 indexes or UUIDs of GPUs")
        return self._flags(gpus)


def _as_json(flags: PlainFlags) -> dict[str, Any]:
    return {
        "VolumeDriver": "",
        "Volumes": [f"{mount.source}:{mount.target}:ro" for mount in flags.mounts],
        # Only the container's path if it is the host's and has all rights: old programs read the text as a path.
        "Devices": [one.source if one == Device(one.source, one.source) else f"{one.source}:{one.target}:{one.access}"
                    for one in flags.devices],
        # Not the plugin's; a client that ignores them still has the devices and the files.
        "Environment": list(flags.environment),
        "GroupAdd": [str(group) for group in flags.groups],
    }  # fmt: skip


@lru_cache(maxsize=1)
def gpu_report(system: System, second: int) -> Mapping[str, Any]:
    """Return what NVML reports: `Version`, `Info` and `Status`. Raises GpuprovError if the driver does not answer.

    `second`: of the clock; the requests of one second share a report.
    """
    driver = discover(system)
    # NVML would load the driver, and make device nodes.
    if not driver.kernel_version:
        raise GpuprovError("the NVIDIA driver is not loaded", "no /proc/driver/nvidia/version", "gpuprov doctor")
    if missing := missing_nodes(driver):
        raise GpuprovError(f"the device node {missing[0].path} is missing", "", "nvidia-modprobe -u -c 0")
    library = next((one.path for one in driver.libraries if "/libnvidia-ml.so." in one.path), "")
    if not library:
        raise GpuprovError("there is no NVML on this host", "no libnvidia-ml.so.1", "gpuprov doctor")
    done = run_child(system, library, "gpuprov.boot.gpu_report_child")
    done.require("NVML does not answer", "nvidia-smi; gpuprov doctor")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


# -- the server ------------------------------------------------------------------------------------------------------

ADDRESS = ("127.0.0.1", 3476)
SOCKET = "/run/gpuprov/serve.sock"
# A request's line and headers. http.server alone takes 6.5 MB, and 50 MB to parse them.
LARGEST_REQUEST = 8192
# Connections of one socket.
MOST_AT_ONCE = 8
# How soon a socket of which all connections were busy accepts the next one.
_TICK_SECONDS = 0.5
# Longer than any answer takes.
_IDLE_SECONDS = 120.0
_FIRST_HANDED_OVER = 3


class Server(http.server.ThreadingHTTPServer):
    """Serve one listening socket, each request in its own thread, a bounded number at once.

    A new connection takes the place of the oldest one that has not sent its request: idle connections of one user
    would shut out all others.
    """

    # TCPServer makes a socket, which is replaced; systemd allows the service no other family.
    address_family = socket.AF_UNIX
    timeout = 0.0

    def __init__(self, listening: socket.socket, answers: Answers) -> None:
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.socket.setblocking(False)
        self.answers = answers
        self._room = threading.Condition()
        # Connections that have not sent their request, oldest first; and those that get their answer. While as many as
        # may be are busy, a new one waits in the kernel's queue.
        self._waiting: list[Any] = []
        self.busy: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a new connection."""
        with self._room:
            if self._waiting and len(self._waiting) + len(self.busy) >= MOST_AT_ONCE:
                with contextlib.suppress(OSError):
                    self._waiting.pop(0).shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            self._waiting.append(request)
        super().process_request(request, client_address)

    def begin(self, connection: Any) -> bool:
        """Note that a connection has sent its request; return False if it has lost its place."""
        with self._room:
            # It may have been accepted just before the last place was taken.
            self._room.wait_for(lambda: len(self.busy) < MOST_AT_ONCE)
            if connection not in self._waiting:
                return False
            self._waiting.remove(connection)
            self.busy.add(connection)
            return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and free its place."""
        with self._room:
            if request in self._waiting:
                self._waiting.remove(request)
            self.busy.discard(request)
            self._room.notify_all()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a defect; a client that disconnects is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Head:
    """The start of what a client sends; reading on raises HTTPException, which parse_request answers with 431."""

    def __init__(self, file: Any) -> None:
        self._file, self._left, self.close = file, LARGEST_REQUEST, file.close

    def readline(self, size: int) -> bytes:
        if not self._left:
            raise http.client.HTTPException(f"more than {LARGEST_REQUEST} bytes")
        line: bytes = self._file.readline(min(size, self._left))
        self._left -= len(line)
        return line


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection: one request, and its answer."""

    server: Server
    # Seconds without a byte of the request, and to send the answer.
    timeout = 5.0

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def do_GET(self) -> None:
        if self.server.begin(self.connection):
            # For a request of HTTP/0.9, Python 3.14.10 leaves a dict.
            hosts = self.headers.get_all("Host", []) if self.request_version != "HTTP/0.9" else []
            self._send(self.server.answers.answer(self.path, hosts))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self._send(refusal(code, message or "the request is not valid"))

    def _send(self, answer: Answer) -> None:
        status, body = answer
        self.send_response_only(status)
        kind = "application/json" if body.startswith("{") else "text/plain; charset=utf-8"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass  # any user of the host could fill the journal


def run(servers: Sequence[Server], idle_seconds: float = float("inf")) -> None:
    """Serve until no request has arrived for that long."""
    last = time.monotonic()
    while time.monotonic() - last < idle_seconds:
        # While a server has no room, a connection waits in the kernel's queue.
        accepting = [one for one in servers if len(one.busy) < MOST_AT_ONCE]
        for one in select.select(accepting, (), (), _TICK_SECONDS)[0]:
            one.handle_request()
            last = time.monotonic()


def own_sockets(address: tuple[str, int] = ADDRESS, path: str = SOCKET) -> list[socket.socket]:
    """Return listening sockets; the Unix socket, for root only, is made only by root. Raises GpuprovError."""
    try:
        made = socket.create_server(address)
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        step = f"ss -ltnp 'sport = :{address[1]}' names the program that has it"
        raise GpuprovError(f"{where} can't be used", str(error), step) from None
    if os.geteuid() != 0:
        return [made]
    Path(path).parent.mkdir(mode=0o755, exist_ok=True)
    Path(path).unlink(missing_ok=True)  # of a server that was killed: who runs has the port
    of_root = socket.socket(socket.AF_UNIX)
    of_root.bind(path)
    Path(path).chmod(0o600)  # before it listens: until then nobody can connect
    of_root.listen()
    return [made, of_root]


def serve(system: System) -> str:
    """Serve on systemd's sockets, or on own ones, until Ctrl-C; return why it ended."""
    answers = Answers(lambda: gpu_report(system, int(system.now())))
    # The sockets that systemd passes; none without socket activation.
    count = int(os.environ.get("LISTEN_FDS", "0")) if os.environ.get("LISTEN_PID") == str(os.getpid()) else 0
    sockets = [socket.socket(fileno=number) for number in range(_FIRST_HANDED_OVER, _FIRST_HANDED_OVER + count)]
    if sockets:
        run([Server(one, answers) for one in sockets], _IDLE_SECONDS)
        return "stopped: no request for a while"
    sockets = own_sockets()
    try:
        run([Server(one, answers) for one in sockets])
    except (KeyboardInterrupt, SystemExit):  # gpuprov's own handler raises the second
        for one in sockets[1:]:
            Path(one.getsockname()).unlink()
    return "stopped"
