"""Which running containers doctor examines, and what it says of those that it could not."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.doctor import gather
from gpuprov.doctor.gather import gather_containers
from gpuprov.doctor.snapshot import Containers, Loaded


class Docker(System):
    """A docker that lists containers of which the last one is gone when it is asked for more."""

    def __init__(self, *names: str) -> None:
        super().__init__("/")
        self.names = names

    def which(self, program: str) -> str | None:
        return "/usr/bin/docker" if program == "docker" else None

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[1] == "ps":
            return Completed(tuple(argv), 0, "".join(f"{name}\n" for name in self.names))
        lines = "".join(f"{number} /{name}\n" for number, name in enumerate(self.names[:-1], 1))
        return Completed(tuple(argv), 1, lines, f"Error: No such container: {self.names[-1]}\n")


@pytest.fixture(autouse=True)
def surveys(monkeypatch: pytest.MonkeyPatch) -> None:
    def survey(system: System, name: str, call: object) -> Any:
        if name == "hostile":
            raise RecursionError("too deep")
        return SimpleNamespace(libraries=(), findings=())

    monkeypatch.setattr(gather, "survey", survey)
    monkeypatch.setattr(gather, "_has_node", lambda pid: pid != "2")


def test_one_that_ends_meanwhile_hides_no_other() -> None:
    found = gather_containers(Docker("a", "without-gpus", "b", "gone"))
    assert found == Containers((Loaded("docker", "a"), Loaded("docker", "b")))


def test_an_examination_that_breaks_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    found = gather_containers(Docker("a", "without-gpus", "hostile", "b", "gone"))
    assert found == Containers((Loaded("docker", "a"),), 2, "RecursionError: too deep")
    assert capfd.readouterr().err == ""
