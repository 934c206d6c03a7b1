"""A driver replaced by another hand and not yet booted: every command says it, and nothing is made on the host."""

import re

import pytest

from tests import simgpu
from tests.integration.doctor_typing import SLEEPER
from tests.lab import Host
from tests.lab.command_line import GPUPROV
from tests.lab.drivers import bring_run_files, install_by_hand
from tests.lab.fixtures import DRIVER, Site
from tests.lab.shell import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.root]
_NEWER = "580.105.08"
_RUN = "docker run --rm --network=none {} sleeper:1 /bin/sleep 0 2>&1"
_ASKS = {
    "the hook": _RUN.format("--gpus all"),
    "the runtime": _RUN.format("--runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all"),
    "docker-args": f"{GPUPROV} docker-args 2>&1",
    "hook explain": "echo '{\"process\": {\"env\": [\"NVIDIA_VISIBLE_DEVICES=all\"]}}' | "
    f"{GPUPROV} hook explain 2>&1",
    "cuda": f"{GPUPROV} cuda 2>&1",
    "verify": f"{GPUPROV} verify 2>&1",
    "doctor": f"{GPUPROV} doctor 2>&1",
    "facts": f"{GPUPROV} facts 2>&1",
}  # fmt: skip
_FILES = "find /usr/lib/x86_64-linux-gnu | sort"


@pytest.fixture(scope="module")
def host(site: Site) -> Host:
    """An installed host with a container that runs, whose driver's files are of a newer release since."""
    found = site.installed("main")
    found.ssh(SLEEPER)
    found.ssh("docker run --detach --network=none --gpus all --name before sleeper:1 /bin/sleep 9999")
    bring_run_files(site.lab, found, _NEWER)
    install_by_hand(found, _NEWER)
    return found


def test_each_command_says_the_same_and_nothing_is_made_on_the_host(host: Host) -> None:
    before = host.ssh(_FILES).stdout
    sentence = re.compile(rf"the driver's files are {re.escape(_NEWER)}[^,]*, the loaded module is {re.escape(DRIVER)}")
    for name, command in _ASKS.items():
        done = host.ssh(command, check=False)
        said = " ".join(done.stdout.split())
        assert sentence.search(said), f"{name}: {done.stdout}"
        assert "gpuprov install" in said, f"{name}: {said}"
        assert done.returncode != 0 or name in ("hook explain", "facts"), f"{name}: {said}"
        assert "remove" not in said or name == "doctor", f"{name}: {said}"
    for name in ("verify", "doctor"):
        said = " ".join(host.ssh(_ASKS[name], check=False).stdout.split())
        assert "since NVIDIA's installer wrote them" in said, f"{name}: {said}"
    assert host.ssh(_FILES).stdout == before
    assert host.ssh("docker inspect --format '{{.State.Running}}' before").stdout.strip() == "true"


def test_once_module_and_files_agree_containers_start_without_anybody(host: Host) -> None:
    """The path unit sees the libraries, and refreshes the specification."""
    tree = host.root / "usr/lib/simgpu"
    simgpu.write_kernel_tree(tree, 2, _NEWER)
    install_by_hand(host, _NEWER)
    wait_for("a start", lambda: host.ssh(_ASKS["the hook"], check=False).returncode == 0)
    assert _NEWER in host.ssh("cat /etc/cdi/nvidia.json").stdout
