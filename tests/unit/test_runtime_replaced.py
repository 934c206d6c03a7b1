"""The runtime is replaced while containers start: no start that began before finds its byte code or modules gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprov import toolkit
from gpuprov.core.changes import parent_of
from gpuprov.core.system import System
from gpuprov.facts.interpreter import Interpreter
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, LIBRARY_PATH
from gpuprov.toolkit import InstallRuntime

_MODULES = f"{LIBRARY_PATH}/runtime_hook"
_MODULE, _GONE = f"{_MODULES}/main.py", f"{_MODULES}/gone.py"
_OLD, _NEW = f"{_MODULES}/__pycache__/main.2", f"{_MODULES}/__pycache__/main.3"


class Host(System):
    """A host that notes, whenever it waits, its launcher and what of both versions' files is there."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.waits: list[tuple[str | None, set[str]]] = []

    def sleep(self, seconds: float) -> None:
        there = {path for path in (_GONE, _OLD, _NEW) if self.exists(path)}
        self.waits.append((self.read_text(LAUNCHER_PATH), there))


def test_a_start_that_began_before_ends_with_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_bytecode(system: System, *_: object) -> None:
        system.write(_NEW, b"byte code")
        system.remove(_OLD)

    monkeypatch.setattr(toolkit, "compile_bytecode", compile_bytecode)
    host = Host(tmp_path)
    for path, content in ((LAUNCHER_PATH, b"old"), (_MODULE, b"old"), (_GONE, b"old"), (_OLD, b"byte code")):
        host.make_directory(parent_of(path), 0o755)
        host.write(path, content, mode=0o755)
    files = ((LAUNCHER_PATH, 0o755, b"new"), (_MODULE, 0o644, b"new"))
    change = InstallRuntime(files, Interpreter(), stale=(_GONE,))

    before = change.capture(host)
    change.apply(host, lambda *_: None)
    assert host.waits == [("new", {_GONE, _OLD})]
    InstallRuntime.undo(host, before, {})
    assert host.waits[1:] == [("old", {_GONE, _OLD, _NEW})]
    assert (host.exists(_OLD), host.exists(_NEW)) == (True, False)
