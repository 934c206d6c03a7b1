"""A container's decision by its name: docker and podman know the id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.engines.containers import decision_of
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook import jsonio, record

ID = "4f5c" * 16
OTHER = "9a9b" * 16


class Engines(System):
    """Engines that know names, as their `inspect` answers."""

    def __init__(self, **names: dict[str, str]) -> None:
        super().__init__("/")
        self.names = names

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}" if program in self.names else None

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        assert argv[1:-1] == ("inspect", "--type", "container", "--format", "{{.Id}} {{.State.Running}}", "--")
        found = self.names[argv[0]].get(argv[-1])
        if found is None:
            return Completed(tuple(argv), 1, "\n", f"Error: No such container: {argv[-1]}\n", 0.1)
        return Completed(tuple(argv), 0, f"{found} {'false' if argv[-1] == 'ended' else 'true'}\n", "", 0.1)


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


def test_a_file_of_another_format_is_none(records: Path) -> None:
    (records / ID).write_text(jsonio.dumps({"format": 99}))
    with pytest.raises(GpuprovError, match="no decision is kept"):
        decision_of(Engines(docker={"web": ID}), "web")
