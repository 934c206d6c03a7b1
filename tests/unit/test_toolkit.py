"""The container toolkit's changes: whose hook stays, what the runtime's undo leaves, and the CDI specifications."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from gpuprov.cdi.discover import DriverFacts, Node, discover
from gpuprov.cdi.generate import OTHER_PATHS, specification
from gpuprov.cdi.specification import render_json
from gpuprov.core.changes import Change, FileFact, MakeNode, SetMode, tell_nobody
from gpuprov.core.system import System
from gpuprov.driver.source import DriverSource
from gpuprov.engines.known import NVIDIA_RUNTIME
from gpuprov.facts.host import HostFacts
from gpuprov.facts.interpreter import Interpreter
from gpuprov.protocol.spec import HostSpec
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, LIBRARY_PATH, NVIDIA_HOOK_PATH, deployed_files
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from gpuprov.toolkit import (
    CDI_SPECIFICATION,
    HandOverHook,
    InstallRuntime,
    WriteCdiSpecification,
    follow_driver,
    is_runtimes,
    packages,
    plan_cdi,
    plan_device_nodes,
    plan_runtime,
    runtime_path,
)
from tests import simgpu

MODULES = f"{LIBRARY_PATH}/runtime_hook"
OURS, NVIDIAS = b"import runtime_hook.hook_main\n", b"\x7fELF"
BUNDLED, NVIDIA = HostSpec(toolkit="bundled"), HostSpec(toolkit="nvidia", toolkit_version="1.18.0-1")
PYTHON = Interpreter(path="/usr/bin/python3.11")
OTHER = OTHER_PATHS[0]
DEPLOYED = deployed_files(PYTHON.path)
LAUNCHER = next(FileFact(content, mode, 0, 0) for path, mode, content in DEPLOYED if path == LAUNCHER_PATH)


@dataclass
class Facts:
    """As much of a host as the toolkit's plans read."""

    files: Mapping[str, FileFact]
    interpreter: Interpreter = PYTHON
    bytecode_current: bool = True
    driver: DriverFacts | None = None
    other_specifications: Mapping[str, bytes] | None = None
    cdi_folder_mode: int | None = 0o755
    runtime_modes: Mapping[str, int] = field(default_factory=dict)

    is_roots = HostFacts.is_roots


def facts(files: Mapping[str, FileFact] | None = None, **more: Any) -> HostFacts:
    return cast(HostFacts, Facts(files or {}, **{"other_specifications": {}, **more}))


def roots(content: bytes, mode: int = 0o644) -> FileFact:
    return FileFact(content, mode, 0, 0)


@pytest.fixture
def host(tmp_path: Path) -> System:
    """A host with a driver and two GPUs, whose device nodes nobody has made."""
    simgpu.install_tree(tmp_path)
    simgpu.write_kernel_tree(tmp_path, 2)
    for folder in ("dev", "etc", "usr/bin"):
        (tmp_path / folder).mkdir(exist_ok=True, parents=True)
    if not (tmp_path / "lib").exists():
        (tmp_path / "lib").symlink_to("usr/lib")
    return System(str(tmp_path))


def test_the_program_and_the_packages_of_each_toolkit() -> None:
    assert (runtime_path(BUNDLED), runtime_path(NVIDIA)) == (LAUNCHER_PATH, NVIDIA_RUNTIME)
    assert packages(BUNDLED) == ()
    assert len(packages(NVIDIA)) == 4 and all(name.endswith("=1.18.0-1") for name in packages(NVIDIA))
    assert packages(HostSpec(toolkit="nvidia")) == tuple(name.partition("=")[0] for name in packages(NVIDIA))


@pytest.mark.parametrize("there", [True, False])
def test_the_undo_of_a_handover_leaves_nvidias_hook(host: System, there: bool) -> None:
    host.write(NVIDIA_HOOK_PATH, OURS)
    before = HandOverHook().capture(host)
    host.write(NVIDIA_HOOK_PATH, NVIDIAS)
    if not there:
        host.remove(NVIDIA_HOOK_PATH)
    HandOverHook.undo(host, before, None)
    assert host.read_bytes(NVIDIA_HOOK_PATH) == (NVIDIAS if there else OURS)


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        (LAUNCHER_PATH, True), (HOOK_PATH, True), (NVIDIA_HOOK_PATH, True), (f"{MODULES}/any.py", True),
        (f"{MODULES}/__pycache__/any.pyc", False), ("/usr/bin/any", False),
    ],
)  # fmt: skip
def test_the_files_of_the_runtime(path: str, ours: bool) -> None:
    assert is_runtimes(path) is ours


@pytest.mark.parametrize(
    ("spec", "change", "more", "stale"),
    [
        (BUNDLED, {}, {}, None), (NVIDIA, {LAUNCHER_PATH: None}, {}, None),
        (BUNDLED, {LAUNCHER_PATH: None}, {"interpreter": Interpreter()}, None),
        (BUNDLED, {LAUNCHER_PATH: None}, {}, ()), (BUNDLED, {LAUNCHER_PATH: roots(b"old", 0o755)}, {}, ()),
        (BUNDLED, {LAUNCHER_PATH: replace(LAUNCHER, uid=1000)}, {}, ()),
        (BUNDLED, {LAUNCHER_PATH: replace(LAUNCHER, mode=0o777)}, {}, ()),
        (BUNDLED, {LAUNCHER_PATH: replace(LAUNCHER, gid=1000)}, {}, None),
        (BUNDLED, {}, {"bytecode_current": False}, ()),
        (BUNDLED, {f"{MODULES}/gone.py": roots(b"")}, {}, (f"{MODULES}/gone.py",)),
        (BUNDLED, {"/usr/bin/other": roots(b"")}, {}, None), (BUNDLED, {NVIDIA_HOOK_PATH: roots(NVIDIAS)}, {}, None),
    ],
)  # fmt: skip
def test_the_runtime_is_installed_if_it_is_not_this_versions(
    spec: HostSpec, change: dict[str, FileFact | None], more: dict[str, Any], stale: tuple[str, ...] | None
) -> None:
    there = {**{path: roots(content, mode) for path, mode, content in DEPLOYED}, **change}
    found = plan_runtime(facts({path: one for path, one in there.items() if one}, **more), spec)
    assert found == (() if stale is None else (InstallRuntime(DEPLOYED, PYTHON, stale),))


def test_the_diff_of_the_runtime_names_what_changes(host: System) -> None:
    host.write(LAUNCHER_PATH, b"same")
    files = ((LAUNCHER_PATH, 0o755, b"same"), (f"{MODULES}/a.py", 0o644, b""), (f"{MODULES}/b.py", 0o644, b""))
    change = InstallRuntime(files, PYTHON, (f"{MODULES}/gone.py", f"{MODULES}/old.py"))
    names = [f"+{MODULES}/a.py", f"+{MODULES}/b.py", f"-{MODULES}/gone.py", f"-{MODULES}/old.py"]
    assert change.diff(host).splitlines() == names


@pytest.mark.parametrize(("there", "stays"), [(NVIDIAS, True), (OURS, False), (None, False)])
@pytest.mark.parametrize("captured", [True, False])
def test_undo_keeps_a_hook_of_nvidia(host: System, there: bytes | None, stays: bool, captured: bool) -> None:
    files = ((LAUNCHER_PATH, 0o755, b"new"), *(((NVIDIA_HOOK_PATH, 0o755, OURS),) if captured else ()))
    before = InstallRuntime(files, PYTHON).capture(host)
    host.write(LAUNCHER_PATH, b"new")
    if there:
        host.write(NVIDIA_HOOK_PATH, there)
    host.make_directory(f"{MODULES}/__pycache__")
    host.write(f"{MODULES}/__pycache__/main.pyc", b"")
    left = (NVIDIA_HOOK_PATH,) if stays and captured else ()
    assert InstallRuntime.skipped_paths(host, before) == left
    said = InstallRuntime.irreversible(host, before, None, ())
    assert [NVIDIA_HOOK_PATH in one for one in said] == [True for _ in left]
    InstallRuntime.undo(host, before, None)
    assert not host.exists(LAUNCHER_PATH) and not host.exists(f"{MODULES}/__pycache__")
    assert host.exists(NVIDIA_HOOK_PATH) is (there is not None and (stays or not captured))


# -- device nodes and the CDI specification ----------------------------------------------------------------------------


def made(host: System) -> DriverFacts:
    """The driver with all its nodes."""
    found = discover(host)
    return replace(found, present=tuple(node.path for node in (*found.nodes, *found.capability_nodes)))


def test_missing_nodes_are_made_and_closed_ones_opened(host: System) -> None:
    driver = discover(host)
    driver = replace(driver, nodes=tuple(replace(node, gid=44) for node in driver.nodes))
    nodes = (*driver.nodes, *driver.capability_nodes)
    assert nodes and len(driver.present) < len(nodes)
    closed = Node("/dev/nvidia0", 195, 0, 0o666, 44)
    driver = replace(driver, present=tuple(node.path for node in nodes[1:]), closed=(closed,))
    first = nodes[0]
    assert plan_device_nodes(facts(driver=driver)) == (
        MakeNode(first.path, first.major, first.minor, first.mode, first.gid), SetMode("/dev/nvidia0", 0o666),
    )  # fmt: skip


class Source(DriverSource):
    """A source that has a driver to install, or none."""

    installs_now = False

    def plan(self) -> tuple[Change, ...]:
        return (HandOverHook(),) if self.installs_now else ()


@pytest.mark.parametrize(
    ("state", "change"),
    [
        ("current", None), ("absent", "new"), ("outdated", "new"), ("not root's", "new"), ("no nodes", "later"),
        ("driver comes", "later"), ("other absent", "same"), ("other outdated", "same"), ("other current", None),
        ("others, too", "new"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("mode", "opened"), [(0o755, None), (None, None), (0o700, 0o755), (0o751, 0o755)])
def test_the_specification_is_written_if_it_is_not_the_drivers(
    host: System, state: str, change: str | None, mode: int | None, opened: int | None
) -> None:
    driver = made(host)
    text = render_json(specification(driver))
    files = {CDI_SPECIFICATION: roots(text)}
    if state in ("absent", "others, too"):
        files = {}
    elif state == "outdated":
        files = {CDI_SPECIFICATION: roots(render_json(specification(replace(driver, library_version="1.2.3"))))}
    elif state == "not root's":
        files = {CDI_SPECIFICATION: replace(roots(text), uid=1000)}
    elif state == "no nodes":
        driver = replace(driver, present=())
    elif state in ("other outdated", "other current"):
        files[OTHER] = roots(b"other" if state == "other current" else b"old")
    others = {OTHER: b"other"} if state.startswith("other") else {}
    made_source = type("Now", (Source,), {"installs_now": state == "driver comes"})
    source = made_source(facts(files, driver=driver, other_specifications=others, cdi_folder_mode=mode), BUNDLED)
    missing = () if state == "other current" else tuple(others.items())
    written = () if change is None else (WriteCdiSpecification(None if change == "later" else text, missing),)
    assert plan_cdi(source) == (*(() if opened is None else (SetMode("/etc/cdi", opened),)), *written)


@pytest.mark.root
def test_the_summary_and_the_diffs_of_the_specification(host: System) -> None:
    change, later = WriteCdiSpecification(b"{}", ((OTHER, b"{}\n"),)), WriteCdiSpecification(None)
    assert change.summary() == f"write {CDI_SPECIFICATION}, {OTHER}"
    assert later.summary().startswith(f"write {CDI_SPECIFICATION} (") and later.key == change.key
    assert CDI_SPECIFICATION in change.key and OTHER not in change.key
    diff = change.diff(host)
    assert diff.count("+++") == 2 and CDI_SPECIFICATION in diff and OTHER in diff
    assert all(line[0] in "+-@" for line in diff.splitlines())
    assert later.diff(host) == "" == later.diff_in_short(host)
    assert WriteCdiSpecification(b"{}").diff_in_short(host).startswith(f"{CDI_SPECIFICATION} (new)")
    assert change.diff_in_short(host) == "", "one that is no specification is shown whole"
    change.apply(host, tell_nobody)
    text = host.read_bytes(CDI_SPECIFICATION) or b""
    host.write(OTHER, b"{}\n")
    assert change.diff(host) == "" == change.diff_in_short(host)
    host.write(OTHER, b"other\n")
    assert OTHER in change.diff(host) and CDI_SPECIFICATION not in change.diff(host)
    for path in (CDI_SPECIFICATION, OTHER):
        host.write(path, text.replace(simgpu.DRIVER_VERSION.encode(), b"1.2.3"))
    lines = WriteCdiSpecification(text, ((OTHER, text),)).diff_in_short(host).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [CDI_SPECIFICATION, OTHER]


@pytest.mark.root
@pytest.mark.parametrize("old_journal", [False, True])
def test_the_specifications_undo_restores_each_file(host: System, old_journal: bool) -> None:
    host.make_directory("/etc/cdi")
    host.write(CDI_SPECIFICATION, b"old")
    before = WriteCdiSpecification(None).capture(host)
    assert [image["path"] for image in before["files"]] == [CDI_SPECIFICATION, *OTHER_PATHS]
    WriteCdiSpecification(None).apply(host, tell_nobody)
    assert json.loads(host.read_text(CDI_SPECIFICATION) or "")["kind"] == "nvidia.com/gpu"
    assert host.path(CDI_SPECIFICATION).stat().st_mode & 0o777 == 0o644
    host.write(OTHER, b"new")
    WriteCdiSpecification.undo(host, before["files"][0] if old_journal else before, None)
    assert host.read_bytes(CDI_SPECIFICATION) == b"old" and host.exists(OTHER) is old_journal


@pytest.mark.root
@pytest.mark.parametrize(
    ("present", "before", "loaded", "follows"),
    [
        ("old", "1.2.3", simgpu.DRIVER_VERSION, True),
        ("old", simgpu.DRIVER_VERSION, simgpu.DRIVER_VERSION, False),
        ("old", "1.2.3", "1.2.3", False),
        ("", "1.2.3", simgpu.DRIVER_VERSION, False),
    ],
)
def test_specification_follows_the_driver(host: System, present: str, before: str, loaded: str, follows: bool) -> None:
    host.make_directory("/etc/cdi")
    text = render_json(specification(replace(discover(host), library_version="1.2.3"))) if present else b""
    if present:
        host.write(CDI_SPECIFICATION, text)
    version = host.path("/proc/driver/nvidia/version")
    version.write_text(version.read_text().replace(simgpu.DRIVER_VERSION, loaded))
    follow_driver(host, before)
    assert (host.read_bytes(CDI_SPECIFICATION) not in (None, text)) is follows
