"""`make test-gpu` itself, on a provisioned host whose GPUs are simulated: its checks, and its report."""

import shutil
import sys

import pytest

from tests.gpu import differences, leaves, without_serials
from tests.lab.fixtures import Site
from tests.lab.lab import REPOSITORY

_REPORT = "<nvidia_smi_log><driver_version>550</driver_version><gpu><serial>1652</serial>{}</gpu></nvidia_smi_log>"


def test_fields_that_change_by_themselves_are_left_out() -> None:
    first, second = (_REPORT.format(f"<name>H100</name><gpu_temp>{n}</gpu_temp><temperature><a>{n}</a></temperature>")
                     for n in (40, 41))  # fmt: skip
    assert differences((first, second), first.replace("<gpu_temp>40", "<gpu_temp>42")) == []
    (found,) = differences((first, first), first.replace("H100", "A100"))
    assert found == "/gpu[1]/name[1]: H100 on the host, A100 in the container"
    (found,) = differences((first, first), first.replace("<name>H100</name>", ""))
    assert found.endswith("missing in the container")
    assert "1652" not in without_serials(first)
    assert list(leaves(first)) == ["/driver_version[1]", "/gpu[1]/serial[1]", "/gpu[1]/name[1]", "/gpu[1]/gpu_temp[1]"]


@pytest.mark.lab
@pytest.mark.root
def test_the_report_of_a_host(site: Site) -> None:
    host = site.installed("main")
    shutil.copy("/bin/busybox", host.root / "bin/busybox")
    command = f"cd {REPOSITORY} && {sys.executable} -B -m tests.gpu --report /root/report.txt"
    said = host.ssh(command, check=False)
    lines = [line.split(":")[0] for line in said.stdout.splitlines()]
    assert lines[:1] == ["ok       discovery"], said.stdout + said.stderr
    for way in ("runtime", "hook"):
        assert f"ok       {way}, all GPUs" in lines, said.stdout
        assert f"ok       {way}, one GPU" in lines, said.stdout
        # Simulated GPUs compute nothing, and the report says so.
        assert f"skipped  {way}, CUDA" in lines, said.stdout
    assert "skipped  accept" in lines, said.stdout
    assert "skipped  PyTorch" in lines
    assert "skipped  IMEX" in lines and "skipped  confidential computing" in lines
    assert said.returncode == 0
    recorded = host.ssh("cat /root/report.txt").stdout
    assert "==== nvidia-smi -q -x\n<?xml" in recorded
    assert '"cdiVersion"' in recorded
    # Another driver in the container's specification than the loaded one, or a node that is missing, would show.
    host.ssh("rm /dev/nvidia-uvm")
    said = host.ssh(command, check=False)
    assert said.returncode == 1
    assert "FAILED   discovery: missing device nodes: /dev/nvidia-uvm" in said.stdout
