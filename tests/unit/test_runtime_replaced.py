"""The runtime is replaced while containers start: no start that began before finds its byte code or modules gone."""

from pathlib import Path
from typing import Any

import pytest

from gpuprov import toolkit
from gpuprov.core.changes import parent_of
from gpuprov.core.system import System
from gpuprov.facts.interpreter import Interpreter
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, LIBRARY_PATH
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from gpuprov.toolkit import InstallRuntime

_MODULES = f"{LIBRARY_PATH}/runtime_hook"
_MODULE, _GONE = f"{_MODULES}/main.py", f"{_MODULES}/gone.py"
_OLD, _NEW = f"{_MODULES}/__pycache__/main.2", f"{_MODULES}/__pycache__/main.3"


class Host(System):
    """A host that notes, whenever it waits, its launcher and what of both versions' files is there."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.waits: list[tuple[str | None, set[str]]] = []
        self.steps: list[str] = []

    def write(self, path: str, *content: Any, **more: Any) -> None:
        self.steps.append(path)
        super().write(path, *content, **more)

    def remove(self, path: str) -> None:
        self.steps.append(path)
        super().remove(path)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        there = {path for path in (_GONE, _OLD, _NEW) if self.exists(path)}
        self.waits.append((self.read_text(LAUNCHER_PATH), there))


@pytest.mark.root
def test_a_start_that_began_before_ends_with_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_bytecode(system: System, python: Interpreter, folder: str) -> None:
        assert (python, folder) == (Interpreter(), _MODULES)
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


@pytest.mark.root
@pytest.mark.parametrize("replaced", [True, False])
def test_programs_follow_their_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool) -> None:
    monkeypatch.setattr(toolkit, "compile_bytecode", lambda *_: None)
    host, paths = Host(tmp_path), (LAUNCHER_PATH, HOOK_PATH, _MODULE)
    for path in paths if replaced else ():
        host.make_directory(parent_of(path))
        host.write(path, b"old")
    change = InstallRuntime(tuple((path, 0o755, b"new") for path in paths), Interpreter())
    before = change.capture(host)
    host.steps.clear()
    change.apply(host, lambda *_: None)
    assert host.steps == [*reversed(paths)]
    host.steps.clear()
    InstallRuntime.undo(host, before, {})
    assert [path for path in host.steps if path in paths] == [*(reversed(paths) if replaced else paths)]
