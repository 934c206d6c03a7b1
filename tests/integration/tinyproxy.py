"""A real proxy (tinyproxy) on loopback that wants a login, and a web server that answers only what came through it."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.loopback import QuietHandler, free_port

# ENCODED: as a URL may have it.
USER, PASSWORD, ENCODED = "robot", "s3cret-Word.1", "s3cret-Word%2E1"
_CONFIGURATION = """\
Port {port}
Listen {address}
Timeout 60
MaxClients 50
LogFile "{folder}/log"
LogLevel Connect
PidFile "{folder}/pid"
BasicAuth {user} {password}
"""


@dataclass(frozen=True)
class RunningProxy:
    """Where the proxy listens, and what it has logged."""

    place: str
    folder: Path

    @property
    def url(self) -> str:
        return f"http://{USER}:{ENCODED}@{self.place}"

    @property
    def address(self) -> str:
        return f"http://{self.place}"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


class BehindProxy(QuietHandler):
    """Refuses what did not come through a proxy (RFC 9110, 7.6.3)."""

    def send_head(self):  # type: ignore[no-untyped-def]
        if "tinyproxy" not in self.headers.get("Via", ""):
            self.send_error(403, "this did not come through the proxy")
            return None
        return super().send_head()


@contextmanager
def running_proxy(folder: Path, address: str = "127.0.0.1") -> Iterator[RunningProxy]:
    """Run the proxy, on an address of this machine, as long as a test has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    text = _CONFIGURATION.format(port=port, address=address, folder=folder, user=USER, password=PASSWORD)
    (folder / "tinyproxy.conf").write_text(text)
    process = subprocess.Popen(("tinyproxy", "-d", "-c", str(folder / "tinyproxy.conf")), stdout=subprocess.DEVNULL)
    try:
        _wait_until_it_listens(process, address, port)
        yield RunningProxy(f"{address}:{port}", folder)
    finally:
        process.terminate()
        process.wait()


def _wait_until_it_listens(process: subprocess.Popen[bytes], address: str, port: int) -> None:
    while process.poll() is None:
        with socket.socket() as client:
            if client.connect_ex((address, port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"tinyproxy ended with {process.returncode}")


def unused_address() -> str:
    """Return an address on which nothing listens."""
    return f"127.0.0.1:{free_port()}"
