"""Random histories of one real host with a real docker: runs, faults, edits by hand, undoing, reboots and rebuilds.

A seed gives the same history each time.
"""

import json
import random
from typing import Any

import pytest

from gpuprov.core.journal import read_runs
from gpuprov.core.system import System
from tests.integration.test_install import BREAKAGES, etc, packages
from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov
from tests.lab.host import Snapshot, differences

pytestmark = [pytest.mark.lab, pytest.mark.root]

_STEPS = 6
# Keys that docker has and gpuprov does not know.
_KEYS = {"log-level": "warn", "max-concurrent-downloads": 2, "labels": ["rack=7"], "shutdown-timeout": 20}
_FAULTS = ("runtime removed", "device node deleted", "CDI specification spoiled", "runtime's program deleted")
_RUNS = ("install", "install, docker's default runtime", "rebuild", "reboot", "edit daemon.json")
_WITH_RUNS = (*_RUNS, *_FAULTS, "rollback", "rollback", "uninstall")
_IMAGE = (
    "tar -hc /bin/sh /lib/x86_64-linux-gnu/libc.so.6 /lib64/ld-linux-x86-64.so.2 2>/dev/null | docker import - small:1"
)


class History:
    """A host, what it was before the first run that is not undone, and the keys that somebody put into daemon.json."""

    def __init__(self, site: Site, choice: random.Random) -> None:
        self.site, self.choice = site, choice
        self.steps: list[str] = []
        self.variables: dict[str, Any] = {}
        self.rebuild(installed=False)
        self.first = self.state()
        self.pristine = self.first

    def state(self) -> tuple[Snapshot, str]:
        return etc(self.host), packages(self.host)

    @property
    def undoable(self) -> int:
        """The number of runs that a rollback can undo."""
        return sum(bool(run.undoable) for run in read_runs(System(str(self.host.root))))

    def run(self, *words: str) -> str:
        done = gpuprov(*words, "--hosts", self.site.inventory("main", **self.variables))
        assert done.returncode == 0, f"{self.steps}: {done.stdout}"
        return done.stdout

    def rebuild(self, *, installed: bool) -> None:
        """Boot the same host from other files: pristine ones, or those of another installation."""
        self.host: Host = self.site.installed("main") if installed else self.site.fresh("main")
        self.host.ssh(_IMAGE)
        self.keys: dict[str, Any] = {}
        self.variables = {}

    def daemon_json(self) -> dict[str, Any]:
        path = self.host.root / "etc/docker/daemon.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def edit(self) -> None:
        """Add a key to daemon.json; nobody restarts docker."""
        name = self.choice.choice(list(_KEYS))
        self.keys[name] = _KEYS[name]
        path = self.host.root / "etc/docker/daemon.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**self.daemon_json(), **self.keys}))

    def step(self) -> None:
        """Do what the seed chooses, and hold the host against what must be true after it."""
        action = self.choice.choice(_WITH_RUNS if self.undoable else _RUNS)
        self.steps.append(action)
        if action == "rebuild":
            self.rebuild(installed=self.choice.random() < 0.5)
            self.first = self.pristine
        elif action == "reboot":
            self.host.reboot()
        elif action == "edit daemon.json":
            self.edit()
            if not self.undoable:
                self.first = self.state()
        elif action in ("rollback", "uninstall"):
            self.undo(action)
        else:
            self.install(action)
        self.host.ssh("docker run --rm --network=none small:1 /bin/sh -c :")

    def install(self, action: str) -> None:
        if action in BREAKAGES:
            self.host.ssh(BREAKAGES[action][0])
            self.keys = {name: self.keys[name] for name in self.keys if name in self.daemon_json()}
        elif action == "install":
            self.variables = {}
        else:
            self.variables = {"gpuprov_docker_default_runtime": True}
        self.run("install")
        config = self.daemon_json()
        assert {name: config.get(name) for name in self.keys} == self.keys, self.steps
        before = self.state()
        assert "0 changes" in self.run("install"), self.steps
        assert self.state() == before, self.steps
        self.run("verify")

    def undo(self, action: str) -> None:
        self.run(action)
        assert action == "rollback" or self.undoable == 0, self.steps
        if self.undoable == 0:
            now = self.state()
            assert (differences(self.first[0], now[0]), now[1]) == (set(), self.first[1]), self.steps
        # What somebody wrote after an undone run is undone with it.
        self.keys = {name: value for name, value in _KEYS.items() if name in self.daemon_json()}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))])
def test_a_host_keeps_its_promises_in_any_order_of_events(site: Site, seed: int) -> None:
    history = History(site, random.Random(seed))
    for _ in range(_STEPS):
        history.step()
    if history.undoable:
        history.steps.append("uninstall")
        history.undo("uninstall")
