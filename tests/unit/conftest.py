"""What makes unit tests fast: temporary folders in memory where the machine has enough, and the hook compiled once."""

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprov.core.system import System
from gpuprov.facts.host import HostFacts, gather
from tests import world
from tests.read_once import read_once
from tests.unit.fake_host import FakeHost


@pytest.fixture(scope="session", autouse=True)
def known() -> Iterator[None]:
    """Compile the hook once in a session: hundreds of tests deploy the same texts."""
    with read_once():
        yield


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    """Return what is known of a system container of Debian 12 with GPUs, docker, and nothing of gpuprov's."""
    return gather(FakeHost(tmp_path_factory.mktemp("host") / "root"))


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "root")


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(str(tmp_path))


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Take back what a test has changed in the environment: some run whole programs in this process."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def tmp_path_factory(tmp_path_factory: pytest.TempPathFactory) -> pytest.TempPathFactory:
    """Give folders in memory, unless `--basetemp` names another place."""
    if not world.MEMORY.is_mount() or not tmp_path_factory.getbasetemp().is_relative_to(world.TEMPORARY):
        return tmp_path_factory
    made = copy.copy(tmp_path_factory)
    made._basetemp = Path(tempfile.mkdtemp(dir=world.MEMORY))
    return made


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Empty a test's folder in memory after the test: they would be gigabytes at the end.

    It stays: Ansible remembers what it has read by its path.
    """
    yield tmp_path
    # Not through what a test has left mounted.
    if tmp_path.is_relative_to(world.MEMORY) and f" {tmp_path}/" not in Path("/proc/self/mountinfo").read_text():
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir(exist_ok=True)
