"""What is planned for which GPU model: a table of whole machines by their PCI trees (tests/simgpu/boards.py)."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuprov.core.changes import WriteFile
from gpuprov.driver import fabric_manager, generations
from gpuprov.driver.fabric_manager import RunFabricManager
from gpuprov.driver_run import InstallDriver
from gpuprov.facts.host import HostFacts, gather
from gpuprov.machine.pci import own_ids
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.plan.steps import STEPS
from gpuprov.protocol.models import model_of
from gpuprov.protocol.spec import parse_spec
from gpuprov.protocol.tables import PACKAGED
from tests.simgpu.boards import BOARDS, write_board
from tests.unit.fake_host import FakeHost

pytestmark = pytest.mark.root
_LATEST, _URL = "580.159.04", "/root/driver.run"


@dataclass(frozen=True)
class Planned:
    """A row: kernel modules at 580 and at an older release, first and last branch, what joins the GPUs, MIG.

    `virtual`: the GRID driver alone serves it, which is in no table.
    """

    modules: str
    older: str
    refused_at: tuple[str, ...] = ()
    manager: tuple[str, ...] = ()
    loads: str = ""
    problem: str = ""
    rack: bool = False
    mig: bool = False
    virtual: bool = False


_MANAGER = "nvidia-fabricmanager"
PLANNED = {
    "V100 PCIe": Planned("proprietary", "proprietary", ("590.48.01",)),
    "V100 HGX-1": Planned("proprietary", "proprietary", ("590.48.01",)),
    "V100 HGX-2": Planned("proprietary", "proprietary", ("590.48.01",), (_MANAGER,)),
    "L4": Planned("open", "proprietary", ("470.256.02",)),
    "L4 fraction": Planned("open", "proprietary", virtual=True),
    "H100 HGX": Planned("open", "proprietary", ("470.256.02",), (_MANAGER,), mig=True),
    "GH200": Planned("open", "open", ("470.256.02",), mig=True),
    "B200 HGX": Planned("open", "open", ("550.163.01",), (_MANAGER, "nvlsm"), "mlx5_ib\nib_umad\n", mig=True),
    "B200 HGX without adapters": Planned("open", "open", ("550.163.01",), problem="none is in sight", mig=True),
    "B200 in a guest": Planned("open", "open", ("550.163.01",), mig=True),
    "GB200 NVL72": Planned("open", "open", ("550.163.01",), rack=True, mig=True),
    "GB300 NVL72": Planned("open", "open", ("570.195.03",), rack=True, mig=True),
}


@pytest.fixture(params=PLANNED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def facts(tmp_path: Path, name: str) -> HostFacts:
    host = FakeHost(tmp_path / "root", metal=True)
    write_board(host.root, name)
    return gather(host)


def test_every_board_has_a_row() -> None:
    assert list(PLANNED) == list(BOARDS)


def test_all_gpus_are_on_the_bus(facts: HostFacts, name: str) -> None:
    board = BOARDS[name]
    assert tuple(gpu.device_id for gpu in facts.gpus) == (board.device_id,) * board.gpus
    assert facts.gpu_device_ids == (() if PLANNED[name].virtual else (board.device_id,) * board.gpus)
    assert bool(facts.virtual_gpu) is PLANNED[name].virtual
    assert len(facts.fabric.switches) == (0 if facts.fabric.rack else board.switches + board.adapters)
    assert facts.fabric.rack == PLANNED[name].rack


def test_the_kernel_modules_are_those_of_the_model(facts: HostFacts, name: str) -> None:
    row = PLANNED[name]
    assert generations.settled_type(facts.gpu_device_ids, _LATEST, "auto", PACKAGED) == row.modules
    assert generations.settled_type(facts.gpu_device_ids, "535.261.03", "auto", PACKAGED) == row.older
    (driver,) = (step for step in STEPS if step.name == "driver")
    context = PlanContext(facts, parse_spec({"driver_version": _LATEST, "driver_url": _URL}))
    (install,) = (one for one in driver.plan(context) if isinstance(one, InstallDriver))
    # Where both serve the GPUs, the installer of the release chooses.
    assert install.module_type == (row.modules if row.modules == row.older else "auto")


def test_a_branch_that_does_not_serve_the_model_is_refused(facts: HostFacts, name: str) -> None:
    assert generations.problems(facts.gpu_device_ids, _LATEST, "auto", PACKAGED) == ()
    for version in PLANNED[name].refused_at:
        assert generations.problems(facts.gpu_device_ids, version, "auto", PACKAGED) != ()


def test_what_joins_the_gpus_is_planned(facts: HostFacts, name: str) -> None:
    row, source = PLANNED[name], source_of(facts, parse_spec({"driver_version": _LATEST, "driver_url": _URL}))
    problems = fabric_manager.plan_problems(source)
    assert [row.problem in one.what for one in problems] == ([True] if row.problem else [])
    changes = fabric_manager.plan(source)
    packages = fabric_manager.wanted_packages(source)
    assert tuple(one.partition("=")[0] for one in packages) == row.manager
    loads = [one.content.decode() for one in changes if isinstance(one, WriteFile)]
    assert loads == ([row.loads] if row.loads else [])
    assert bool([one for one in changes if isinstance(one, RunFabricManager)]) == bool(row.manager)


def test_a_layout_for_all_gpus_divides_models_that_have_mig(facts: HostFacts, name: str) -> None:
    models = [model_of(device_id, PACKAGED) for device_id in own_ids(facts.gpus)]
    assert {model is not None and model.mig for model in models} == {PLANNED[name].mig}
