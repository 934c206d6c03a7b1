"""Hosts of a rack for IMEX's tests: a stand-in daemon that reads the genuine files, and its control program."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuprov.core.commands import Completed
from gpuprov.facts.gpus import IMEX_CONFIG as CONFIG
from gpuprov.facts.gpus import IMEX_NODES as NODES
from gpuprov.facts.gpus import IMEX_UNIT as UNIT
from tests.imex_stand_in import PACKAGED_CONFIG, answer, nodes_of, settings_of
from tests.unit.fake_host import FakeHost

VERSION, NEWER = "580.159.04", "580.178.04"
LIST = ["10.0.0.1 gpu1", "10.0.0.2 gpu2", "10.0.0.3 gpu3"]


class Rack:
    """What runs on the nodes of a domain: address → version and list, as the daemon read it when it started."""

    def __init__(self) -> None:
        self.running: dict[str, dict[str, Any]] = {}


class Node(FakeHost):
    """A host of a rack: the stand-in's daemon reads the genuine files, and its control program asks the others."""

    def __init__(self, root: Path, rack: Rack, address: str) -> None:
        super().__init__(root)
        self.rack, self.address, self.version, self.enabled, self.masked = rack, address, "", False, False
        self.available |= {"nvidia-imex-550": "550.163.01-1", "nvidia-imex-535": "535.261.03-1"}
        devices = self.root / "proc/devices"
        devices.write_text(
            devices.read_text().replace("Block devices:", "239 nvidia-caps-imex-channels\n\nBlock devices:")
        )

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        program = argv[0].rpartition("/")[2]
        if program == "nvidia-imex":
            return Completed(tuple(argv), 0, f"IMEX version is: {self.version}\n")
        if program == "nvidia-imex-ctl":
            found = answer(nodes_of(self.read_text(NODES) or ""), self.rack.running.get)
            return Completed(tuple(argv), 0, json.dumps(found))
        if self.masked and tuple(argv) == ("systemctl", "is-enabled", UNIT):
            return Completed(tuple(argv), 1, "masked\n")
        return super().run(argv, **more)

    def _apt_get(self, words: tuple[str, ...]) -> tuple[int, str]:
        done = super()._apt_get(words)
        name = next((name for name in self.installed if name.startswith("nvidia-imex")), "")
        if name and not self.version:
            self.write("/usr/bin/nvidia-imex", b"#!/bin/sh\n")
            self.make_directory("/etc/nvidia-imex")
            self.write(CONFIG, PACKAGED_CONFIG.encode())
            self.enabled = True
        elif not name and self.version:
            for path in ("/usr/bin/nvidia-imex", CONFIG):
                self.remove(path)
            self.path("/etc/nvidia-imex").rmdir()
            self.enabled = False
        self.version = self.installed[name].partition("-")[0] if name else ""
        return done

    def _systemctl(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[-1] != UNIT:
            return super()._systemctl(words)
        verb = words[0]
        if verb == "is-active":
            return (0, "active\n") if self.address in self.rack.running else (3, "inactive\n")
        if verb == "is-enabled":
            return (0 if self.enabled else 1), ""
        if verb in ("mask", "unmask"):
            self.masked = verb == "mask"
        if self.masked and verb in ("enable", "restart"):
            return 1, f"Unit {UNIT} is masked."
        if verb in ("enable", "disable"):
            self.enabled = verb == "enable"
        if verb in ("stop", "restart") or "--now" in words:
            self.rack.running.pop(self.address, None)
        if verb == "restart":
            return self._start()
        return 0, ""

    def _start(self) -> tuple[int, str]:
        settings, nodes = settings_of(self.read_text(CONFIG) or ""), nodes_of(self.read_text(NODES) or "")
        if (
            settings["IMEX_NODE_CONFIG_FILE"] != NODES
            or settings["IMEX_CMD_ENABLED"] != "1"
            or self.address not in nodes
        ):
            return 1, f"Job for {UNIT} failed."
        self.rack.running[self.address] = {"version": self.version, "nodes": nodes}
        return 0, ""
