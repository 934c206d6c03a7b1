"""The summary that stands for a long diff of a CDI specification."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from gpuprov.cdi.generate import in_short
from gpuprov.fleet.progress import PlainLines, Plans
from gpuprov.protocol.events import Planned, PlannedChange
from gpuprov.runtime_hook.driver_files import HOOK_PATH

_PATH = "/etc/cdi/nvidia.json"


def specification(version: str, devices: int, *libraries: str, program: str = "/usr/bin/nvidia-smi") -> bytes:
    mounts: list[dict[str, Any]] = [
        {"hostPath": f"/usr/lib/{name}", "containerPath": f"/usr/lib/{name}", "options": ["ro"]} for name in libraries
    ]
    mounts.append({"hostPath": program, "containerPath": "/usr/bin/nvidia-smi"})
    hook = {
        "hookName": "createContainer", "path": HOOK_PATH,
        "args": ["gpuprov-cdi-hook", "links", "--host-driver-version", version],
    }  # fmt: skip
    nodes = [{"path": f"/dev/nvidia{number}"} for number in range(devices)]
    return json.dumps({
        "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
        "devices": [{"name": str(n), "containerEdits": {"deviceNodes": [node]}} for n, node in enumerate(nodes)],
        "containerEdits": {"mounts": mounts, "hooks": [hook]},
    }).encode()  # fmt: skip


def test_it_counts_what_comes_goes_and_changes() -> None:
    before = specification("535.261.03", 1, "liba.so.535", "libb.so.1")
    after = specification("550.163.01", 2, "liba.so.550", "libb.so.1", program="/opt/nvidia-smi")
    lines = in_short(_PATH, before, after).splitlines()
    assert lines[:2] == [_PATH, "  driver version: 535.261.03 → 550.163.01"]
    assert "  devices: 2 (1 added)" in lines and "  device nodes: 2 (1 added)" in lines
    assert "  libraries: 2 (1 added, 1 removed)" in lines and "  programs: 1 (1 changed)" in lines
    assert len(lines) <= 8


def test_a_new_one_and_the_same_one() -> None:
    one = specification("550.163.01", 2, "liba.so.550")
    assert in_short(_PATH, None, one).splitlines()[0] == f"{_PATH} (new)"
    assert "  libraries: 1 (1 added)" in in_short(_PATH, None, one)
    assert "(" not in in_short(_PATH, one, one)


@pytest.mark.parametrize("broken", [b"", b"no JSON", b"[]"])
def test_what_is_no_specification_is_left_to_the_diff(broken: bytes) -> None:
    assert in_short(_PATH, broken, specification("550.163.01", 1)) == ""


@pytest.mark.parametrize("whole", [False, True])
def test_the_plan_shows_the_summary_and_with_v_all(whole: bool) -> None:
    change = PlannedChange("k", "cdi", f"write {_PATH}", "--- a\n+++ b\n+one\n+two", f"{_PATH}\n  devices: 2 (1 added)")
    text = Plans(diff=True, whole=whole).text("lab-a", (change,)).plain
    assert ("devices: 2 (1 added)" in text) is not whole
    assert ("+two" in text) is whole
    assert ("4 lines of diff: add -v to see them" in text) is not whole
    console = Console(file=io.StringIO(), width=200)
    PlainLines(console, verbose=whole, diff=True)("lab-a", Planned((change,)))
    assert ("+two" in console.file.getvalue()) is whole  # type: ignore[attr-defined]
