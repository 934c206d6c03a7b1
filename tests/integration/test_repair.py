"""`doctor --fix --allow` on a host that is drained for it: a GPU is reset, the host is judged, and gets work again.

The genuine `nvidia-smi --gpu-reset` asks NVML by functions that no header has, so a stand-in before it answers that
option alone: it clears the trouble in the state file or, told so, leaves it. The nodes of simulated
GPUs can't be opened, so who has one open is the subject of unit/test_repair.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.files import put
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds
from tests.lab.host import Host

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.slow]
_RESETS = """#!/bin/sh
case " $* " in *" --gpu-reset "*)
  echo "$*" >> /run/resets
  if [ -e /run/lasting ]; then :; else for n in 0 1; do echo 0 > /run/simgpu/recovery-action-$n; done; fi
  echo "GPU was successfully reset."; exit 0;;
esac
exec /usr/bin/nvidia-smi "$@"
"""


@pytest.fixture
def host(site: Site) -> Iterator[Host]:
    """An installed host that takes itself for a bare machine, whose driver asks for a reset of GPU 1."""
    found = site.installed("main")
    (found.root / "usr/local/sbin/nvidia-smi").write_text(_RESETS)
    found.ssh(
        "chmod 755 /usr/local/sbin/nvidia-smi; rm -f /run/systemd/container; mkdir -p /run/simgpu; "
        "for n in 0 1; do echo 1 > /run/simgpu/persistence-$n; done; echo 1 > /run/simgpu/recovery-action-1"
    )
    yield found
    found.ssh("rm -rf /run/simgpu /run/lasting", check=False)


@pytest.mark.parametrize("lasting", [False, True], ids=["cleared", "stays"])
def test_a_gpu_is_reset_on_a_drained_host_which_gets_work_again_if_it_is_fit(
    site: Site, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script, calls = tmp_path / "scheduler", tmp_path / "calls"
    put(script, f'#!/bin/sh\necho "$1 $2" >> {calls}\n', 0o700)
    inventory = site.inventory("main")
    words = ("doctor", "--hosts", inventory, "--fix", "--before-host", f"{script} drain {{host}}",
             "--after-host", f"{script} undrain {{host}}")  # fmt: skip
    if lasting:
        host.ssh("touch /run/lasting")

    refused = gpuprov(*words)
    assert "reset GPU 1 (GPU 1: the driver asks for a reset of this GPU)" in refused.stdout
    assert "needs --allow reset" in refused.stdout
    foreseen = gpuprov(*words, "--allow", "reset", "--check")
    assert "reset GPU 1" in foreseen.stdout, foreseen.stdout
    assert f"would run before the changes: {script} drain main" in foreseen.stdout
    assert (foreseen.returncode, calls.exists(), host.ssh("ls /run/resets", check=False).stdout) == (7, False, "")

    done = gpuprov(*words, "--allow", "reset,reboot", timeout=600)
    (line,) = host.ssh("cat /run/resets").stdout.splitlines()
    assert line.startswith("--gpu-reset -i 0000") and "," not in line, line
    record = json.loads(host.ssh("cat /var/lib/gpuprov/repairs/00000001.json").stdout)
    assert [one["rule"] for one in record["before"]] == ["recovery-reset"]
    if lasting:
        assert (done.returncode, record["outcome"]) == (7, "unfit"), done.stdout
        assert calls.read_text() == "drain main\n"
        assert "drained: main" in done.stdout.splitlines()[-1]
        host.ssh("rm /run/lasting")
        done = gpuprov(*words, "--allow", "reset", timeout=600)
        assert "main is drained since" in done.stdout
    else:
        assert (record["outcome"], record["after"]) == ("ok", [])
        assert "these GPUs are simulated: they compute nothing" in done.stdout
    assert done.returncode == 0, done.stdout
    assert calls.read_text() == "drain main\n" * (2 if lasting else 1) + "undrain main\n"
    gpuprov_succeeds("health", "--hosts", inventory)


def test_reboot_loads_gpus_before_work(site: Site, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script, calls = tmp_path / "scheduler", tmp_path / "calls"
    put(script, f'#!/bin/sh\necho "$1" >> {calls}\n', 0o700)
    # A boot clears the driver's wish; persistence mode is on in each.
    lines = "".join(f"f+ /run/simgpu/persistence-{number} - - - - 1\n" for number in range(2))
    (host.root / "etc/tmpfiles.d/simgpu.conf").write_text(f"d /run/simgpu\n{lines}")
    host.ssh("echo 2 > /run/simgpu/recovery-action-1")
    drains = ("--before-host", f"{script} drain", "--after-host", f"{script} undrain")
    words = ("doctor", "--hosts", site.inventory("main"), "--fix", "--allow", "reboot", *drains)
    done = gpuprov(*words, timeout=900)
    assert "reboot (GPU 1: the driver asks for a reboot because of this GPU)" in done.stdout, done.stdout
    assert done.stdout.index("waiting for the host") < done.stdout.index("these GPUs are simulated")
    assert (done.returncode, calls.read_text()) == (0, "drain\nundrain\n"), done.stdout
    record = json.loads(host.ssh("cat /var/lib/gpuprov/repairs/*1.json").stdout)
    assert (record["action"], record["outcome"], record["after"]) == ("reboot", "ok", [])
