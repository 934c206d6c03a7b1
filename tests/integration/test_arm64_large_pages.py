"""gpuprov on a genuine arm64 kernel with pages of 16 KiB: what could assume 4 KiB, on the disk of test_arm64.py.

It is Debian's full kernel, so GPUDirect's check meets an RDMA device here (Soft-RoCE).
The tests are one story and stand in its order.
"""

import json
import re
from collections.abc import Iterator

import pytest

from tests.integration.test_arm64 import LIBRARIES, PROGRAM, check_facts, check_one_gpu, install_driver, running
from tests.integration.test_vm import Machine
from tests.lab.fixtures import gpuprov_succeeds

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.root, pytest.mark.timeout(3000)]
_PAGE_SIZE = 16384


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with running(tmp_path_factory.mktemp("arm64"), _PAGE_SIZE) as machine:
        yield machine


def test_facts_have_the_page_size_of_this_kernel(machine: Machine) -> None:
    assert machine.vm.ssh("getconf PAGESIZE").stdout.strip() == str(_PAGE_SIZE)
    assert machine.kernel().endswith("-arm64-16k")
    check_facts(machine, _PAGE_SIZE)


def test_the_one_file_program_finds_the_drivers_libraries(machine: Machine) -> None:
    version = install_driver(machine.vm).partition("-")[0]
    found = json.loads(machine.vm.ssh(f"{PROGRAM} cdi generate --format json", timeout=600).stdout)
    paths = {one["containerPath"] for one in found["containerEdits"]["mounts"]}
    assert {f"{LIBRARIES}/lib{name}.so.{version}" for name in ("cuda", "nvidia-ml")} <= paths


def test_an_rdma_device_is_what_gpudirect_asks_for(machine: Machine) -> None:
    plan = ("install", "--check", "-e", "gpuprov_gpudirect=rdma")
    code, said = machine.gpuprov(*plan)
    assert code == 1 and "there is no RDMA device on this host" in said, said
    machine.vm.ssh("modprobe rdma_rxe && rdma link add rxe0 type rxe netdev $(ls /sys/class/net | grep -m 1 ^en)")
    done = gpuprov_succeeds("facts", "--hosts", machine.inventory, "--json", timeout=1800)
    assert re.search(r'"rdma_devices": ?\["rxe0"\]', done.stdout), done.stdout
    code, said = machine.gpuprov(*plan)
    assert code == 0 and "gpuprov-gpudirect.service" in said, said


def test_an_installation(machine: Machine) -> None:
    code, said = machine.gpuprov("install")
    assert code == 0, said


def test_a_container_gets_one_gpu_and_a_loader_cache(machine: Machine) -> None:
    check_one_gpu(machine.vm, "runtime", "runc")


def test_the_one_file_program_removes_all_of_it(machine: Machine) -> None:
    done = machine.vm.ssh(f"{PROGRAM} uninstall", check=False, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.vm.ssh("ls /usr/bin/gpuprov-* /usr/lib/gpuprov 2>/dev/null", check=False).stdout == ""
