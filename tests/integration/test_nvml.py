"""NVML asked by nvidia-ml-py, in a process of its own, on the simulated driver; the genuine nvidia-smi beside it."""

import sys
from pathlib import Path

import pytest

from gpuprov.cdi.files import soname
from gpuprov.cdi.nvml import GpuAnswer, parse_answers, run_child
from gpuprov.core.system import System
from gpuprov.fleet.agent_file import build_agent
from tests.integration.test_simgpu import on_host
from tests.simgpu import build_libraries, gpu, mig_uuid
from tests.simgpu.layout import driver_files
from tests.unit.scripted import Scripted

pytestmark = pytest.mark.root
_VERSION = "550.163.01"
_CHILD = run_child(Scripted(), "", "gpuprov.cdi.nvml_child").argv[3]


def asked(gpus: int, *, divided: tuple[int, ...] = (), folders: list[str] | None = None, **setting: str) -> str:
    """Return what the child process prints where that many GPUs have nodes."""
    library = build_libraries() / f"libnvidia-ml.so.{_VERSION}"
    command = ("exec", sys.executable, "-I", "-c", f"'{_CHILD}'", str(library), *(folders or sys.path[1:]))
    done = on_host(gpus, " ".join(command), divided=divided, **setting)
    return done.stdout if done.returncode == 0 else f"exit {done.returncode}: {done.stderr}"


def test_it_knows_what_files_do_not_tell() -> None:
    gpus, cuda_version = parse_answers(asked(2))
    assert cuda_version == "12.4"
    assert gpus == {gpu(n).sysfs_id: GpuAnswer(gpu(n).uuid, "NVIDIA", "9.0") for n in (0, 1)}


def test_it_knows_the_parts_of_a_divided_gpu() -> None:
    gpus, _ = parse_answers(asked(2, divided=(1,)))
    assert gpus[gpu(0).sysfs_id].mig == {}
    assert gpus[gpu(1).sysfs_id].mig == {(1, 0): mig_uuid(1, 1), (2, 0): mig_uuid(1, 2)}


def test_nvidia_smi_lists_the_parts_whose_nodes_may_be_opened() -> None:
    done = on_host(1, "$SMI -L; rm /dev/nvidia-caps/nvidia-cap13; $SMI -L", divided=(0,))
    parts = [line.split("(UUID: ")[1].rstrip(")") for line in done.stdout.splitlines() if "MIG 3g.40gb" in line]
    assert parts == [mig_uuid(0, 1), mig_uuid(0, 2), mig_uuid(0, 2)]


@pytest.mark.parametrize(("error", "code"), [("9", 9), ("18", 18), ("999", 231)])
def test_a_driver_that_does_not_answer_ends_the_child_with_its_number(error: str, code: int) -> None:
    assert asked(1, SIMGPU_ERROR=error).startswith(f"exit {code}: ")


def test_the_agent_holds_all_that_the_child_needs(tmp_path: Path) -> None:
    """On a host there is no virtual environment: only what the agent's file brings."""
    (tmp_path / "agent.pyz").write_bytes(build_agent(tmp_path).content)
    bare = "/usr/bin/python3"
    library = build_libraries() / f"libnvidia-ml.so.{_VERSION}"
    done = on_host(1, f"exec {bare} -I -c '{_CHILD}' {library} {tmp_path}/agent.pyz")
    assert parse_answers(done.stdout)[0][gpu(0).sysfs_id].uuid == gpu(0).uuid, done.stderr


def test_sonames_are_those_that_the_linker_wrote() -> None:
    folder = build_libraries()
    rows = [row for row in driver_files(_VERSION) if row.path.startswith("@LIBDIR@/") and not row.is_link]
    wanted = {row.name: row.soname for row in rows}
    assert len(wanted) > 20
    system = System(str(folder))
    assert {name: soname(system, f"/{name}") for name in wanted} == wanted
