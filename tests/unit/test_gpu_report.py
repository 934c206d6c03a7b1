"""What `make test-gpu` asks of rare hardware: a reason where it is missing, the proof of `gpuprov verify` elsewhere."""

from pathlib import Path

import pytest

from gpuprov.core.commands import Completed
from tests import gpu
from tests.unit.test_gpudirect import _NOT_READY, Rdma

pytestmark = pytest.mark.root
ABSENT = {
    "coherent memory": "no GPU of a Grace host", "vGPU licence": "no virtual GPU",
    "MPS": "gpuprov-mps.service does not run", "IMEX": "nvidia-imex does not run: no rack, or no domain",
    "confidential computing": "no guest with encrypted memory",
    "GPUDirect rdma": "the module nvidia_peermem is not loaded", "GPUDirect gdrcopy": "the module gdrdrv is not loaded",
    "GPUDirect storage": "the module nvidia_fs is not loaded",
}  # fmt: skip


def test_a_machine_without_it_says_why_each_is_skipped(tmp_path: Path) -> None:
    report = gpu.Report()
    gpu.check_features(report, Rdma(tmp_path / "root"))
    assert sorted(report.lines) == sorted(f"skipped  {name}: {reason}" for name, reason in ABSENT.items())


@pytest.mark.parametrize(
    ("name", "path", "program", "answers"),
    [
        ("confidential computing", "dev/sev-guest", "sh", (_NOT_READY.replace("Not R", "R"), _NOT_READY)),
        ("GPUDirect rdma", "sys/module/nvidia_peermem", "sh", ("/sys/module/nvidia_peermem\nmlx5_0\n", "\n")),
        ("MPS", "run/gpuprov-mps/control", "sh", ("100.0\n", "\n")),
    ],
)
def test_a_machine_proves_it(tmp_path: Path, name: str, path: str, program: str, answers: tuple[str, str]) -> None:
    host = Rdma(tmp_path / "root")
    host.path(f"/{path}").parent.mkdir(parents=True, exist_ok=True)
    host.path(f"/{path}").touch()
    for answer, word in zip(answers, ("ok", "FAILED")):
        host.answers[program] = Completed((program,), 0, answer)
        report = gpu.Report()
        gpu.check_features(report, host)
        (line,) = (line for line in report.lines if f"  {name}: " in line)
        assert line.startswith(word) and report.good is (word == "ok")
