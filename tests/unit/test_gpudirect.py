"""GPUDirect, MPS, confidential computing: what is planned where, in which order, what a boot runs, what is proved."""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.boot import prepare
from gpuprov.checks import features
from gpuprov.checks.outcome import Failed
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.driver import cuda_repository, gpudirect
from gpuprov.driver.running_driver import UNITS as STOPPED_UNITS
from gpuprov.facts import boot
from gpuprov.facts.boot import CONFIDENTIAL, GPUDIRECT, MPS, PERSISTENCE, UNITS
from gpuprov.facts.host import HostFacts, gather
from gpuprov.facts.kernels import ImageFacts
from gpuprov.machine.pci import PciGpu
from gpuprov.plan import software
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.plan.steps import STEPS, make_plan
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.protocol.tables import packaged
from tests.files import put
from tests.unit.fake_host import RELEASE, FakeHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root
ALL = ["storage", "gdrcopy", "rdma"]
_NOT_READY = """\
==============NVSMI CONF-COMPUTE LOG==============
    CC State                   : ON
    Multi-GPU Mode             : None
    CPU CC Capabilities        : INTEL TDX
    GPU CC Capabilities        : CC Capable
    CC GPUs Ready State        : Not Ready
"""


class Rdma(FakeHost):
    """A machine with an RDMA adapter, which asks some of the machine's own programs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, metal=True)
        self.available.update({"gdrdrv-dkms": "2.6-1", "libgdrapi": "2.6-1", "nvidia-fs-dkms": "2.29.4-1"})
        self.path("/sys/class/infiniband/mlx5_0").mkdir(parents=True)
        self.answers: dict[str, Completed] = {}
        self.timeouts: dict[tuple[str, ...], float] = {}

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        self.timeouts[tuple(argv)] = more.get("timeout", 0)
        return self.answers.get(argv[0]) or super().run(argv, **more)


@pytest.fixture
def host(tmp_path: Path) -> Rdma:
    return Rdma(tmp_path / "root")


def spec(*kinds: str, **values: Any) -> HostSpec:
    return parse_spec({"driver": "preinstalled", "gpudirect": list(kinds), **values})


def put_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    put(folder / name, f"#!/bin/sh\n{text}\n", 0o755)


def test_packages_are_installed_after_the_driver_in_their_order(host: Rdma) -> None:
    source = source_of(gather(host), spec(*ALL))
    assert gpudirect.packages(source) == ("gdrdrv-dkms", "libgdrapi", "nvidia-fs-dkms")
    assert [one.name for one in cuda_repository.repositories(source)] == ["cuda"]
    assert "gdrdrv-dkms, libgdrapi, nvidia-fs-dkms" in gpudirect.plan(source)[-1].summary()
    # In the driver's step, which follows its packages and the reboot; the unit that loads them comes later.
    names = [step.name for step in STEPS]
    assert names.index("packages") < names.index("reboot") < names.index("driver") < names.index("boot")
    rpm = replace(source.facts, os=replace(source.facts.os, id="rocky", version="9.4"))
    rpm = replace(rpm, packages=replace(rpm.packages, manager="dnf"))
    assert gpudirect.packages(source_of(rpm, spec("gdrcopy"))) == ("gdrcopy-kmod", "gdrcopy")
    assert gpudirect.plan(source_of(gather(host), spec("rdma"))) == (), "it comes with the driver"
    host.installed.update(dict.fromkeys(("gdrdrv-dkms", "libgdrapi", "nvidia-fs-dkms"), "1"))
    assert gpudirect.plan(source_of(gather(host), spec(*ALL))) == (), "settled"


@pytest.mark.parametrize(("kinds", "builds"), [([], False), (["rdma"], False), (["gdrcopy"], True), (ALL, True)])
def test_what_dkms_needs_is_installed_beside_any_driver(host: Rdma, kinds: list[str], builds: bool) -> None:
    source = source_of(gather(host), spec(*kinds))
    assert ({f"linux-headers-{RELEASE}", "gcc", "dkms"} <= {*software.wanted(source)}) is builds


# Stand-ins: modinfo tells the module's file, DKMS builds it.
_PROGRAMS = {
    "modinfo": 'ls "$ROOT/$2.ko"',
    "modprobe": 'echo "modprobe $*" >> "$ROOT/asked"',
    "dkms": 'echo "dkms $*" >> "$ROOT/asked"; case "$1" in install) test "$ROOT/fails" != "$ROOT/$FAILS" && '
            'touch "$ROOT/${2%%/*}.ko";; esac',
    "uname": "echo 6.1.0-13-amd64",
}  # fmt: skip


@pytest.mark.parametrize(("built", "builds"), [
    ({}, ["gdrdrv", "nvidia-fs"]),
    ({"gdrdrv": 1000, "nvidia-fs": 1000}, []),
    ({"gdrdrv": 999, "nvidia-fs": 1500}, ["gdrdrv"]),
])  # fmt: skip
def test_old_modules_are_built_again(host: Rdma, tmp_path: Path, built: dict[str, float], builds: list[str]) -> None:
    root = tmp_path / "modules"
    for name, text in _PROGRAMS.items():
        put_program(tmp_path / "bin", name, text)
    for name in ("gdrdrv-2.6", "nvidia-fs-2.29.4"):
        (root / "src" / name).mkdir(parents=True)
    for name, time in {"nvidia": 1000.0, **built}.items():
        (root / f"{name}.ko").write_text("")
        os.utime(root / f"{name}.ko", (time, time))
    unit = unit_of(gather(host), GPUDIRECT, spec(*ALL)).replace("\\\n", "")
    commands = [one.replace("$$", "$") for one in re.findall(r"^ExecStart=/bin/sh -c '(.*?)'$", unit, re.MULTILINE)]
    command = commands[0].replace("/usr/src", str(root / "src"))
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "ROOT": str(root), "FAILS": ""}
    subprocess.run(["/bin/sh", "-c", command], check=True, env=env)
    asked = (root / "asked").read_text().splitlines() if builds else []
    version = {"gdrdrv": "2.6", "nvidia-fs": "2.29.4"}
    assert [one for one in asked if one.startswith("dkms install")] == [
        f"dkms install {name}/{version[name]} -k 6.1.0-13-amd64" for name in builds
    ]
    subprocess.run(["/bin/sh", "-c", command], check=True, env=env)
    assert (root / "asked").exists() is bool(builds), "nothing is built twice"
    if builds:
        assert len((root / "asked").read_text().splitlines()) == len(asked)
        (root / f"{builds[0]}.ko").unlink()
        done = subprocess.run(["/bin/sh", "-c", command], check=False, env={**env, "FAILS": "fails"})
        assert done.returncode == 1, "a build that fails fails the unit"


def test_what_prevents_it_is_told_before_anything_is_changed(host: Rdma, tmp_path: Path) -> None:
    def told(facts: HostFacts, *kinds: str) -> list[str]:
        found = refusals(source_of(facts, spec(*kinds)))
        return [str(one) for one in found if one.what != "no NVIDIA driver is installed"]

    facts = gather(host)
    assert told(facts, *ALL) == told(facts) == []
    without = replace(facts, rdma_devices=())
    assert "no RDMA device" in told(without, "rdma")[0] and told(without, "gdrcopy") == []
    assert "which an image lacks" in told(replace(facts, image=ImageFacts()), "gdrcopy")[0]
    assert "the container host's" in told(gather(FakeHost(tmp_path / "container")), "storage")[0]
    virtual = replace(facts, gpus=(PciGpu("0000:31:00.0", "27b8", "", "1733"),))
    assert "virtual GPUs" in told(virtual, "rdma")[0]
    for driver, more, is_told in (
        ("preinstalled", {}, True), ("distribution", {}, True), ("runfile", {}, False), ("packages", {}, False),
        ("distribution", {"packages": ["nvidia-cuda-mps"]}, False),
    ):  # fmt: skip
        wanted = parse_spec({"driver": driver, "mps": True, **more})
        assert any("MPS' program" in str(one) for one in refusals(source_of(facts, wanted))) is is_told
    assert any("no RDMA" in one.what for one in make_plan(without, spec("rdma")).problems), "preflight asks it"


def unit_of(facts: HostFacts, name: str, wanted: HostSpec) -> str:
    """Return a unit as the plan writes it, "" if it does not."""
    changes = prepare.plan(source_of(facts, wanted))
    files: dict[str, bytes] = {path: text for one in changes for path, text in one.files}  # type: ignore[attr-defined]
    return files.get(f"{UNITS}/{name}", b"").decode()


def test_units_are_written_where_they_are_asked_for_and_removed_afterwards(host: Rdma) -> None:
    facts = gather(host)
    assert "ExecStart=/sbin/modprobe -a nvidia-peermem gdrdrv nvidia-fs\n" in unit_of(facts, GPUDIRECT, spec(*ALL))
    assert "After=gpuprov-nodes.service openibd.service rdma-load-modules" in unit_of(facts, GPUDIRECT, spec("rdma"))
    assert unit_of(facts, GPUDIRECT, spec()) == unit_of(facts, MPS, spec()) == ""
    limited = unit_of(facts, MPS, spec(mps=True, mps_threads=25, mps_memory="0=10G,1=512M"))
    assert "CUDA_MPS_PIPE_DIRECTORY=/run/gpuprov-mps" in limited and "/tmp" not in limited.partition("[Unit]")[2]
    # They are stopped and started with the driver, whose unloading loses the GPUs' ready state too; started in the
    # reverse order, after persistence and before what computes.
    assert [one for one in STOPPED_UNITS if one in (MPS, GPUDIRECT, CONFIDENTIAL)] == [MPS, GPUDIRECT, CONFIDENTIAL]
    assert STOPPED_UNITS[-1] == PERSISTENCE
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10G,1=512M\n" in limited
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25 \n" in unit_of(facts, MPS, spec(mps=True, mps_threads=25))
    for path in ("/dev/sev-guest", "/dev/tdx_guest"):
        assert unit_of(gather(host), CONFIDENTIAL, spec()) == ""
        host.path(path).write_text("")
        assert "conf-compute -srs 1" in unit_of(gather(host), CONFIDENTIAL, spec())
        assert unit_of(gather(host), CONFIDENTIAL, spec(confidential_ready="off")) == ""
        host.path(path).unlink()


def test_mps_is_not_restarted_for_another_file_and_goes_when_it_is_no_longer_asked_for(host: Rdma) -> None:
    (first,) = prepare.plan(source_of(gather(host), spec(mps=True)))
    assert MPS in first.units  # type: ignore[attr-defined]
    before = first.capture(host)
    first.apply(host, lambda *words: None)
    assert host.timeouts["systemctl", "restart", MPS] == prepare.START_SECONDS
    host.path(boot.PROGRAM).write_text("of an older gpuprov")
    (second,) = prepare.plan(source_of(gather(host), spec(mps=True)))
    assert MPS not in second.units and boot.NODES in second.units  # type: ignore[attr-defined]
    (third,) = prepare.plan(source_of(gather(host), spec()))
    assert f"{UNITS}/{MPS}" in third.stale  # type: ignore[attr-defined]
    # It is for a change of its own.
    (fourth,) = prepare.plan(source_of(gather(host), spec(mps=True, mps_threads=25)))
    assert MPS in fourth.units and MPS not in fourth.links  # type: ignore[attr-defined]
    first.undo(host, before, {})
    assert not host.exists(f"{UNITS}/{MPS}") and not host.exists(f"{boot.WANTS}/{MPS}")


@pytest.mark.parametrize(("state", "sets"), [
    (_NOT_READY, True),
    (_NOT_READY.replace(": ON", ": OFF"), False),
    (_NOT_READY.replace(": ON", ": OFF").replace(": None", ": Protected PCIe"), True),
])  # fmt: skip
def test_a_boot_sets_the_ready_state_where_the_mode_is_on(host: Rdma, tmp_path: Path, state: str, sets: bool) -> None:
    host.path("/dev/tdx_guest").write_text("")
    unit = unit_of(gather(host), CONFIDENTIAL, spec())
    (command,) = re.findall(r"^ExecStart=/bin/sh -c '(.*?)'$", unit.replace("$$", "$").replace("\\\n", ""), re.M | re.S)
    put_program(
        tmp_path / "bin", "nvidia-smi", f'echo "$@" >> {tmp_path}/asked\n[ "$2" = -q ] && cat <<X\n{state}X\nexit 0'
    )
    subprocess.run(["/bin/sh", "-c", command], check=True, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    assert ("conf-compute -srs 1" in (tmp_path / "asked").read_text()) is sets
    host.answers["sh"] = Completed((), 0, state, "")
    put(host.path(f"{UNITS}/{CONFIDENTIAL}"), "")
    check = dict(features.checks(host, spec()))["confidential computing"]
    if sets:
        with pytest.raises(Failed, match="system not yet initialized"):
            check()
        host.answers["sh"] = Completed((), 0, state.replace("Not Ready", "Ready"), "")
    assert check()[1] == ""


@pytest.mark.parametrize(("code", "fails"), [(2, False), (3, False), (13, False), (9, True), (137, True), (255, True)])
def test_failed_query_does_not_mean_that_the_mode_is_off(host: Rdma, tmp_path: Path, code: int, fails: bool) -> None:
    """nvidia-smi(1): 2, 3 and 13 of a driver or GPU without it."""
    host.path("/dev/tdx_guest").write_text("")
    unit = unit_of(gather(host), CONFIDENTIAL, spec())
    (command,) = re.findall(r"^ExecStart=/bin/sh -c '(.*?)'$", unit.replace("$$", "$").replace("\\\n", ""), re.M | re.S)
    put_program(tmp_path / "bin", "nvidia-smi", f"echo why; exit {code}")
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh", "-c", command], check=False, env=environment, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == ((code, b"why\n") if fails else (0, b""))
    (row,) = (one for one in packaged("options")["checks"] if one["name"] == "confidential computing")
    done = subprocess.run(row["argv"], check=False, env=environment, stdout=subprocess.PIPE)
    assert (done.returncode != 0, b"unsupported" in done.stdout) == (fails, not fails)


@pytest.mark.parametrize(
    ("vendor", "detected", "log", "found"),
    [
        ("Microsoft Corporation", "sev-snp\n", "", True), ("Microsoft Corporation", "tdx\n", "", True),
        ("Microsoft Corporation", "", "Hyper-V: Isolation Config: Group A 0x1, Group B 0xba2\n", True),
        ("Microsoft Corporation", "none\n", "Hyper-V: Isolation Config: Group A 0x1, Group B 0x21\n", False),
        ("Microsoft Corporation", "", "", False), ("QEMU", "sev-snp\n", "", False),
    ],
)  # fmt: skip
def test_azures_guests_are_known_by_hyper_v(host: Rdma, vendor: str, detected: str, log: str, found: bool) -> None:
    host.path("/sys/class/dmi/id").mkdir(parents=True, exist_ok=True)
    host.path("/sys/class/dmi/id/sys_vendor").write_text(f"{vendor}\n")
    for program, answer in (("systemd-detect-virt", detected), ("journalctl", log)):
        host.answers[program] = Completed((program,), 0 if answer else 1, answer)
    assert boot.gather_boot(host).confidential is found


@pytest.mark.parametrize("silent", ["systemd-detect-virt", "journalctl"])
def test_an_unknown_isolation_is_no_plain_memory(host: Rdma, silent: str) -> None:
    """The unit of the ready state would go, and the GPUs take no work after the next boot."""
    host.path("/sys/class/dmi/id").mkdir(parents=True, exist_ok=True)
    host.path("/sys/class/dmi/id/sys_vendor").write_text("Microsoft Corporation\n")
    host.answers.update({name: Completed((name,), 1) for name in ("systemd-detect-virt", "journalctl")})
    host.answers[silent] = Completed((silent,), 124, "", "stopped after 60 s, its time limit")
    problem = refused(boot.gather_boot, host)
    assert problem.what == "whether this machine's memory is encrypted is not known" and silent in problem.evidence


def test_verify_passes_a_driver_without_confidential_computing(tmp_path: Path) -> None:
    """A guest with encrypted memory and a GPU or a driver without the mode: the unit has nothing to do there either."""
    put_program(tmp_path, "nvidia-smi", 'echo "ERROR: Option $1 is not recognized."; exit 2')
    (tmp_path / "root/etc/systemd/system").mkdir(parents=True)
    (tmp_path / "root/etc/systemd/system" / CONFIDENTIAL).write_text("")
    system = System(str(tmp_path / "root"))
    system.environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    assert dict(features.checks(system, spec()))["confidential computing"]() == ("unsupported", "")


def test_the_unit_of_gpudirect_makes_the_node_that_the_module_leaves_to_others(host: Rdma, tmp_path: Path) -> None:
    unit = unit_of(gather(host), GPUDIRECT, spec("gdrcopy"))
    command = re.findall(r"^ExecStart=/bin/sh -c '(.*)'$", unit, re.MULTILINE)[-1]
    devices, node = tmp_path / "devices", tmp_path / "gdrdrv"
    # systemd makes one dollar sign of two (systemd.service(5)).
    words = command.replace("$$", "$").replace("/proc/devices", str(devices)).replace("/dev/gdrdrv", str(node))
    for text, made in (("195 nvidia\n", False), ("195 nvidia\n508 gdrdrv\n", True)):
        devices.write_text(text)
        done = subprocess.run(["/bin/sh", "-c", f"mknod() {{ echo mknod \"$@\"; }}; {words}"], check=True,
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert done.stdout == (f"mknod -m 0666 {node} c 508 0\n" if made else "")


@pytest.mark.parametrize(("kind", "output", "code", "result"), [
    ("rdma", "/sys/module/nvidia_peermem\nmlx5_0\n", 0, "mlx5_0"),
    ("rdma", "/sys/module/nvidia_peermem\n", 0, None),
    ("rdma", "", 2, None),
    ("gdrcopy", "/dev/gdrdrv\n/sys/module/gdrdrv\n", 0, "gdrdrv"),
    ("gdrcopy", "gdrdrv is older than the driver\n", 1, None),
    ("gdrcopy", "/dev/gdrdrv\n/usr/bin/gdrcopy_sanity\nbasic_cumemalloc: FAILED\n", 1, None),
    ("storage", "/dev/nvidia-fs0\n/sys/module/nvidia_fs\n", 0, "nvidia_fs"),
    ("storage", "", 2, None),
])  # fmt: skip
def test_verify_proves_module_and_program(host: Rdma, kind: str, output: str, code: int, result: str | None) -> None:
    checks = dict(features.checks(host, spec(kind)))
    assert list(checks) == [f"GPUDirect {kind}"]
    host.answers["sh"] = Completed(("sh",), code, output, "")
    if result is not None:
        assert checks[f"GPUDirect {kind}"]() == (result, "")
    else:
        with pytest.raises(Failed, match="systemctl restart gpuprov-gpudirect"):
            checks[f"GPUDirect {kind}"]()


@pytest.mark.parametrize("kind", ["rdma", "gdrcopy", "storage"])
def test_the_commands_of_verify_are_sound(kind: str) -> None:
    """On this machine without GPUDirect the genuine shell runs them, and the check fails in its own words."""
    ((_, check),) = features.checks(System(), spec(kind))
    with pytest.raises(Failed) as caught:
        check()
    said = str(caught.value)
    assert "yntax error" not in said and ("does not work" in said or "is not loaded" in said)


def test_a_daemon_of_mps_that_never_starts_is_failed_in_the_end(host: Rdma) -> None:
    """systemd gives up, so that `doctor` sees a failed unit, and the journal does not fill (systemd.unit(5))."""
    found = dict(re.findall(r"^(RestartSec|StartLimit\w+)=(\d+)$", unit_of(gather(host), MPS, spec(mps=True)), re.M))
    assert int(found["StartLimitBurst"]) * int(found["RestartSec"]) < int(found["StartLimitIntervalSec"])


def test_verify_asks_the_daemon_of_mps(host: Rdma) -> None:
    check = dict(features.checks(host, spec(mps=True)))["MPS"]
    host.answers["sh"] = Completed(("sh",), 1, "", "Cannot find MPS control daemon process")
    with pytest.raises(Failed, match=r"Cannot find MPS control daemon process; systemctl restart gpuprov-mps\.service"):
        check()
    host.answers["sh"] = Completed(("sh",), 0, "25.0\n", "")
    assert check() == ("25.0", "")


@pytest.mark.parametrize(("name", "value"), [
    ("mps_threads", 101), ("mps_memory", "10G"), ("mps_memory", "0=10G; reboot"), ("gpudirect", ["ib"]),
    ("coherent_memory", "os"), ("confidential_ready", "on"),
])  # fmt: skip
def test_a_wrong_value_is_refused(name: str, value: object) -> None:
    with pytest.raises(GpuprovError, match=f"gpuprov_{name}"):
        parse_spec({name: value})
