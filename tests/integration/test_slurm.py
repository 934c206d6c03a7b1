"""Slurm's own daemons run `gpuprov health --for slurm`: an unfit node is drained, and taken back once it is fit again.

Debian's Slurm with two nodes, in namespaces of this machine (slurm.sh); the reports are the genuine nvidia-smi's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_simgpu import on_host

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces and daemons"),
]
_CLONE = Path(__file__).parents[2]
_NAMESPACES = ("--mount", "--propagation", "private", "--uts", "--pid", "--ipc", "--fork", "--kill-child")
_SMI = "mount -t tmpfs none /run; mkdir /run/simgpu; echo 1 > /run/simgpu/persistence-0; {}; $SMI -q -x"


def test_slurm_drains_a_node_whose_gpu_is_unfit_and_takes_it_back(tmp_path: Path) -> None:
    for name, state in (("well", "true"), ("ill", "echo 1 > /run/simgpu/remap-failed-0")):
        (tmp_path / f"{name}.xml").write_text(on_host(1, _SMI.format(state)).stdout)
    (tmp_path / "machine").mkdir()
    script = (str(_CLONE / "tests/integration/slurm.sh"), str(tmp_path / "machine"), str(tmp_path))
    argv = ("unshare", *_NAMESPACES, "bash", *script, str(_CLONE), sys.executable)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    sentence = "gpuprov health: GPU 0: broken memory rows could not be replaced [root@"
    assert said["well"].split() == said["again"].split() == ["State=IDLE"]
    assert said["ill"].split()[0] == "State=IDLE+DRAIN"
    assert sentence in said["ill"]
    assert "State=IDLE+DRAIN" in said["an administrator's"]
    assert "Reason=a fan is to be replaced" in said["an administrator's"]
    logged = [line for line in done.stdout.splitlines() if line.startswith("log: ")]
    assert {line.split()[1] for line in logged} == {"drained", "resumed"}
