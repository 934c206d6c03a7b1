"""A stand-in of NVIDIA's IMEX: a program of its own (nvidia-imex, nvidia-imex-ctl), and its packages.

Names, files, keys and unit come from public files: the templates of config.cfg and nvidia-imex.service in
aws-parallelcluster, NVIDIA's IMEX guide, and `nvidia-imex-ctl -N -j` as ai-cloud-validation's tests record it. How the
genuine program names two nodes with different lists in JSON was not found (its table says !M!): the word is made up.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

VERSION = "@VERSION@"
CONFIG = "/etc/nvidia-imex/config.cfg"
# What a node says of itself: its version and its list; None if it does not answer.
State = Optional["dict[str, Any]"]


def settings_of(text: str) -> dict[str, str]:
    """Return the keys of a config.cfg; a duplicate is refused."""
    rows = [line.partition("=") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = {key.strip(): value.strip() for key, _, value in rows}
    if len(found) != len(rows):
        raise ValueError("duplicate key")
    return found


def nodes_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def answer(nodes: Sequence[str], ask: Callable[[str], State]) -> dict[str, Any]:
    """Return what `nvidia-imex-ctl -N -j` prints."""
    states = {node: ask(node) for node in nodes}

    def link(one: State, other: State) -> str:
        if one is None:
            return "INVALID"
        if other is None:
            return "NEVER_CONNECTED"
        if one["version"] != other["version"]:
            return "VERSION_MISMATCH"
        return "CONNECTED" if one["nodes"] == other["nodes"] else "NODE_MAP_MISMATCH"

    rows: dict[str, dict[str, Any]] = {}
    words: set[str] = set()
    for number, node in enumerate(nodes):
        links = [link(states[node], states[other]) for other in nodes]
        words.update(links)
        connections = {str(to): {"host": nodes[to], "status": word, "changed": False} for to, word in enumerate(links)}
        status = "READY" if states[node] else "UNAVAILABLE"
        rows[str(number)] = {"status": status, "host": node, "hostName": "N/A", "connections": connections}
    whole = "UP" if words == {"CONNECTED"} else "DEGRADED" if any(states.values()) else "DOWN"
    return {"nodes": rows, "timestamp": "11/27/2026 00:00:00.000", "status": whole}


def _ask(port: int) -> Callable[[str], State]:
    def ask(node: str) -> State:
        try:
            with socket.create_connection((node, port), timeout=5) as found:
                text = b"".join(iter(lambda: found.recv(65536), b""))
        except OSError:
            return None
        state: dict[str, Any] = json.loads(text)
        return state

    return ask


def serve(settings: dict[str, str]) -> None:
    """Read the list, find this host in it, listen, and become a daemon as the genuine program does (Type=forking)."""
    nodes = nodes_of(Path(settings["IMEX_NODE_CONFIG_FILE"]).read_text())
    own = subprocess.run(("hostname", "-I"), capture_output=True, text=True, check=True).stdout.split()
    address = next((node for node in nodes if node in own), None)
    if address is None:
        sys.exit("Unable to find an IP address of this node in the node configuration file")
    server = socket.create_server((address, int(settings["IMEX_CMD_PORT"])), backlog=64)
    if os.fork():
        return
    os.setsid()
    state = json.dumps({"version": VERSION, "nodes": nodes}).encode()
    while True:
        client, _ = server.accept()
        with client:
            client.sendall(state)


def main() -> None:
    if "--version" in sys.argv:
        print(f"IMEX version is: {VERSION}")
        return
    settings = settings_of(Path(CONFIG).read_text())
    if settings.get("IMEX_CMD_ENABLED") != "1" or settings["IMEX_WAIT_FOR_QUORUM"] not in ("NONE", "RECOVERY", "FULL"):
        sys.exit("config.cfg: no command service, or an unknown quorum")
    if Path(sys.argv[0]).name == "nvidia-imex":
        serve(settings)
        return
    if "-N" not in sys.argv or "-j" not in sys.argv:
        sys.exit("nvidia-imex-ctl: -N -j alone")
    nodes = nodes_of(Path(settings["IMEX_NODE_CONFIG_FILE"]).read_text())
    print(json.dumps(answer(nodes, _ask(int(settings["IMEX_CMD_PORT"])))))


UNIT = """\
[Unit]
Description=NVIDIA IMEX service
After=network-online.target
Requires=network-online.target
[Service]
User=root
PrivateTmp=false
Type=forking
TimeoutStartSec=infinity
ExecStart=/usr/bin/nvidia-imex -c /etc/nvidia-imex/config.cfg
LimitCORE=infinity
[Install]
WantedBy=multi-user.target
"""
PACKAGED_CONFIG = """\
# NVIDIA IMEX configuration file.
LOG_LEVEL=4
DAEMONIZE=1
BIND_INTERFACE_IP=
SERVER_PORT=50000
IMEX_NODE_CONFIG_FILE=/etc/nvidia-imex/nodes_config.cfg
IMEX_WAIT_FOR_QUORUM=RECOVERY
IMEX_ENABLE_AUTH_ENCRYPTION=0
IMEX_CMD_ENABLED=0
IMEX_CMD_PORT=
"""


def package_files(version: str) -> dict[str, str]:
    """Return path → text of the files of a package of this version; it enables its unit, as NVIDIA's does."""
    program = "#!/usr/bin/python3\n" + Path(__file__).read_text().replace("@VERSION@", version, 1)
    return {
        "usr/bin/nvidia-imex": program, "usr/bin/nvidia-imex-ctl": program,
        "lib/systemd/system/nvidia-imex.service": UNIT, "etc/nvidia-imex/config.cfg": PACKAGED_CONFIG,
        "DEBIAN/conffiles": "/etc/nvidia-imex/config.cfg\n",
        "DEBIAN/postinst": "#!/bin/sh\nsystemctl enable nvidia-imex.service\n",
        "DEBIAN/prerm": "#!/bin/sh\nsystemctl disable --now nvidia-imex.service || true\n",
    }  # fmt: skip


if __name__ == "__main__":
    main()
