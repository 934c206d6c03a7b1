"""What the last green verification saw is kept on the host; verify and the doctor say which GPU is missing since."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.checks import memory
from gpuprov.checks.memory import CHECK, Gpu, gpu_changes, parse_links, recall
from gpuprov.core.commands import Completed
from gpuprov.core.lock import LockHolder
from gpuprov.core.places import REMEMBERED
from gpuprov.core.system import BOOTED
from gpuprov.facts.kernels import gather_identity
from gpuprov.protocol.events import CheckDone, Event, Note
from gpuprov.protocol.spec import HostSpec
from gpuprov.verify import verify
from tests.simgpu import gpu, write_kernel_tree
from tests.unit.checks.test_smi import REPORT
from tests.unit.doctor.host import DoctorHost, examined, first, healthy, names
from tests.unit.fake_host import FakeHost
from tests.unit.test_uninstall import carry_out, done
from tests.unit.test_uninstall import host as set_up
from tests.unit.test_verify import SPEC, RecordedHost, only
from tests.unit.test_verify import cuda_is_well as cuda_is_well
from tests.unit.test_verify import host as recorded

pytestmark = pytest.mark.root
FIRST, SECOND = 1793692800, 1795420800  # 2026-11-03 08:00 and 2026-11-23 08:00 UTC
XID = "[ 12.1] NVRM: Xid (PCI:0000:2a:00): 79, pid='<unknown>', GPU has fallen off the bus."
GPUS = [{"uuid": gpu(n).uuid, "model": gpu(n).name, "bus_id": gpu(n).sysfs_id} for n in range(3)]
KEPT = {"schema": 1, "date": "2026-11-03 08:00:00 UTC", "machine": "", "gpus": GPUS, "driver": "550.163.01",
        "kernel": "6.1", "gpuprov": "1"}  # fmt: skip
HEALTHY_BOOT = "[  1.2] nvidia 0000:2a:00.0: enabling device (0140 -> 0142)"


class Machine(RecordedHost):
    """A booted host with two GPUs; `now` is the time of day, `log` the kernel's log, `links` what nvlink says."""

    time: int = FIRST
    log: str = HEALTHY_BOOT
    links: str = ""
    links_code: int = 0

    def clock(self) -> int:
        return self.time

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[:2] == ("nvidia-smi", "nvlink"):
            return Completed(tuple(argv), self.links_code, self.links, "")
        if argv[0] == "dmesg":
            return Completed(tuple(argv), 0, self.log, "")
        if argv[0] == "journalctl":  # the newest first, as it prints with --reverse
            assert "--reverse" in argv
            return Completed(tuple(argv), 0, "\n".join(reversed(self.log.splitlines())), "")
        return super().run(argv, **more)


host, container = recorded, set_up


@pytest.fixture
def machine(host: RecordedHost) -> Machine:
    made = Machine(host.root)
    made.programs.add("dmesg")
    made.make_directory(BOOTED)
    return made


def look(machine: Machine, spec: HostSpec = SPEC, **more: Any) -> tuple[CheckDone | None, list[Note]]:
    """Verify; return the check of this module, None if there was none, and what was said."""
    events: list[Event] = []
    verify(machine, spec, events.append, **more)
    found = [one for one in events if isinstance(one, CheckDone) and one.name == CHECK]
    return (found[0] if found else None), [one for one in events if isinstance(one, Note)]


def lose_one(machine: Machine) -> None:
    """Take the second GPU out of the machine."""
    machine.time = SECOND
    for command in ("smi", "all", "gpus", "cdi", "0"):
        machine.answers[command] = (0, only(REPORT, 0), "")
    machine.path("/sys/bus/pci/devices/0000:2a:00.0").rename(machine.path("/gone"))


def test_the_first_green_verification_is_remembered(machine: Machine) -> None:
    assert look(machine) == (None, [])
    status = machine.status(REMEMBERED)
    assert status is not None and (status.mode, status.uid) == (0o600, 0)
    kept = recall(machine).memory
    assert kept is not None
    assert kept.gpus == tuple(Gpu(gpu(n).uuid, gpu(n).name, gpu(n).sysfs_id) for n in (0, 1))
    assert (kept.driver, kept.day, kept.engines) == ("550.163.01", "2026-11-03", {"docker": "28.5.2"})
    check, said = look(machine)
    assert check == CheckDone(CHECK, "ok", "all 2 of 2026-11-03") and said == []
    # An image is cleaned of it.
    assert REMEMBERED in gather_identity(machine)


def test_a_gpu_that_is_gone_fails_and_is_not_forgotten(machine: Machine) -> None:
    look(machine)
    lose_one(machine)
    for _ in range(2):
        check, _ = look(machine)
        assert check is not None and check.status == "failed"
        assert check.reason == (
            f"2 GPUs on 2026-11-03, 1 today: {gpu(1).uuid} (NVIDIA H100 80GB HBM3 at 0000:2a:00.0) is gone; "
            "/sys/bus/pci/devices/0000:2a:00.0 is not there; gpuprov doctor; taken out on purpose: "
            "gpuprov verify --remember"
        )


@pytest.mark.parametrize("program", ["dmesg", "journalctl"])
def test_what_the_kernel_log_says_of_its_address_is_evidence(machine: Machine, program: str) -> None:
    """The newest of the worst lines."""
    look(machine)
    lose_one(machine)
    machine.programs.add(program)
    earlier, other = XID.replace("12.1", "02.1"), XID.replace("2a", "1b")
    machine.log = "\n".join((HEALTHY_BOOT, earlier, XID, "[ 13.0] NVRM: 0000:2a:00.0 more", other))
    check, _ = look(machine)
    assert check is not None and f"; the kernel log says: {XID}; " in check.reason


def test_a_gpu_that_comes_back_is_no_news(machine: Machine) -> None:
    look(machine)
    whole = dict(machine.answers)
    lose_one(machine)
    look(machine)
    machine.path("/gone").rename(machine.path("/sys/bus/pci/devices/0000:2a:00.0"))
    machine.answers = whole
    check, said = look(machine)
    assert check is not None and check.status == "ok" and said == []


def test_remember_takes_what_is_there_now_as_right(machine: Machine) -> None:
    look(machine)
    lose_one(machine)
    check, said = look(machine, remember=True)
    assert check is None
    assert Note("remembered: 1 GPU, driver 550.163.01") in said
    check, _ = look(machine)
    assert check is not None and (check.status, check.on_host) == ("ok", "all 1 of 2026-11-23")


def test_a_gpu_that_was_added_is_said_once(machine: Machine) -> None:
    look(machine)
    data = json.loads(machine.read_text(REMEMBERED) or "")
    machine.write(REMEMBERED, json.dumps({**data, "gpus": data["gpus"][:1]}).encode(), mode=0o600)
    _, said = look(machine)
    assert said == [Note(f"new since 2026-11-03: {gpu(1).uuid} (NVIDIA H100 80GB HBM3 at 0000:2a:00.0)")]
    assert look(machine)[1] == []


def test_changed_versions_are_no_failure(machine: Machine) -> None:
    look(machine)
    data = json.loads(machine.read_text(REMEMBERED) or "")
    older = {**data, "driver": "535.261.03", "kernel": "5.10.0", "engines": {"docker": "20.10.24"}}
    machine.write(REMEMBERED, json.dumps(older).encode(), mode=0o600)
    _, (said,) = look(machine)
    assert said.level == "debug"
    assert said.message.startswith("changed since 2026-11-03: kernel 5.10.0 → ")
    assert said.message.endswith("driver 535.261.03 → 550.163.01, docker 20.10.24 → 28.5.2")
    machine.write(REMEMBERED, json.dumps({**older, "kernel": data["kernel"]}).encode(), mode=0o600)
    # A run of gpuprov has worked since then: what it changed was wanted.
    machine.make_directory("/var/lib/gpuprov/runs")
    machine.write("/var/lib/gpuprov/runs/0001.jsonl", b"")
    os.utime(machine.path(REMEMBERED), (FIRST, FIRST))
    assert look(machine)[1] == []


def test_a_gpu_with_fewer_nvlinks_is_a_warning(machine: Machine) -> None:
    told = f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {gpu(0).uuid})\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    assert parse_links(told + f"GPU 1: B (UUID: {gpu(1).uuid})\n\t Link 0: <inactive>\n") == {
        gpu(0).uuid: 2, gpu(1).uuid: 0
    }  # fmt: skip
    machine.links = told
    look(machine)
    machine.links = told.replace("Link 1: 26.562 GB/s", "Link 1: <inactive>")
    _, (said,) = look(machine)
    assert said.level == "warning" and "has 1 active NVLink, 2 on 2026-11-03" in said.message


@pytest.mark.parametrize("code", [124, 137, 255])
def test_nvlinks_of_which_nvidia_smi_does_not_tell_are_not_forgotten(machine: Machine, code: int) -> None:
    machine.links = f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {gpu(0).uuid})\n\t Link 0: 26.5 GB/s\n\t Link 1: 26.5 GB/s\n"
    look(machine)
    told, machine.links, machine.links_code = machine.links, "", code
    assert look(machine)[1] == []
    machine.links, machine.links_code = told.replace("Link 1: 26.5 GB/s", "Link 1: <inactive>"), 0
    _, (said,) = look(machine)
    assert "has 1 active NVLink, 2 on 2026-11-03" in said.message


@pytest.mark.parametrize("what", ["failed", "image", "not booted", "a run works"])
def test_such_a_verification_is_not_remembered(machine: Machine, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "failed":
        machine.answers["gpus"] = (125, "", "no")
    if what == "not booted":
        machine.remove(BOOTED)
    if what == "a run works":
        monkeypatch.setattr(memory, "other_run", lambda _: LockHolder(7, "install", "now", alive=True))
    look(machine, replace(SPEC, target="image") if what == "image" else SPEC)
    assert machine.status(REMEMBERED) is None


UNTRUSTED = (
    (b"{", 0o600, "can't be read"),
    (b'{"schema": 1}', 0o600, "Memory.date is missing"),
    (b'{"schema": 2}', 0o600, "schema 2, not 1"),
    (b"[" * 300_000, 0o600, "not a small file"),
    (b"[" * 200_000, 0o600, "nested too deep"),
    (b"{}", 0o666, "not a small file that only root can write"),
)


@pytest.mark.parametrize(("content", "mode", "reason"), UNTRUSTED)
def test_a_file_that_is_not_trusted_is_said_and_stays(machine: Machine, content: bytes, mode: int, reason: str) -> None:
    machine.make_directory(str(Path(REMEMBERED).parent))
    machine.write(REMEMBERED, content, mode=mode)
    check, (said,) = look(machine)
    assert check is None and said.level == "warning" and reason in said.message
    assert machine.read_bytes(REMEMBERED) == content
    look(machine, remember=True)
    assert recall(machine).memory is not None


def test_a_copy_of_a_disk_begins_a_memory_of_its_own(machine: Machine) -> None:
    look(machine)
    lose_one(machine)
    machine.write("/etc/machine-id", b"another\n")
    assert look(machine) == (None, [])
    kept = recall(machine).memory
    assert kept is not None and len(kept.gpus) == 1


def test_a_system_containers_machine_is_not_its_hosts(machine: Machine) -> None:
    """Without privileges a container may not read the firmware's number either."""
    machine.make_directory("/sys/class/dmi/id")
    machine.write("/sys/class/dmi/id/product_uuid", b"of the hardware\n")
    machine.write("/etc/machine-id", b"of the system\n")
    look(machine)
    kept = recall(machine).memory
    machine.make_directory("/run/systemd")
    machine.write("/run/systemd/container", b"lxc\n")
    look(machine)
    own = recall(machine).memory
    assert kept is not None and own is not None
    assert {kept.machine, own.machine} == {"of the hardware", "of the system"}


def test_a_card_of_the_same_model_stands_for_a_missing_one() -> None:
    a, b, moved = Gpu("GPU-a", "H100", "0000:1b:00.0"), Gpu("GPU-b", "H100", "0000:2a:00.0"), "0000:3c:00.0"
    new = Gpu("GPU-c", "H100", b.bus_id)
    assert gpu_changes((a, b), (a, replace(b, bus_id=moved))) == memory.GpuChanges()
    assert gpu_changes((a, b), (a, new)).replaced == ((b, new),)
    assert gpu_changes((a, b), (replace(new, bus_id=moved), replace(new, uuid="GPU-d"))).replaced[1] == (
        b, replace(new, uuid="GPU-d")
    )  # fmt: skip
    other = replace(new, model="L4")
    assert gpu_changes((a, b), (a, other)) == memory.GpuChanges((b,), (other,))


def test_an_install_warns_of_a_lost_gpu_and_makes_no_change_of_it(container: FakeHost) -> None:
    done(carry_out(container, "install"))
    container.write(REMEMBERED, json.dumps({**KEPT, "gpus": GPUS[:2]}).encode(), mode=0o600)
    assert _warned(container) == ("0 changes: the host is as it should be", [])
    container.write(REMEMBERED, json.dumps(KEPT).encode(), mode=0o600)
    warning = (
        f"3 GPUs on 2026-11-03, 2 today: {gpu(2).uuid} (NVIDIA H100 80GB HBM3 at {gpu(2).sysfs_id}) is gone; "
        "gpuprov doctor; taken out on purpose: gpuprov verify --remember"
    )
    assert _warned(container, check=True) == ("nothing to change", [warning])
    assert _warned(container) == ("0 changes: no change brings a lost GPU back", [warning])


def _warned(host: FakeHost, *, check: bool = False) -> tuple[str, list[str]]:
    events = carry_out(host, "install", check=check)
    return done(events).summary, [one.message for one in events if isinstance(one, Note) and one.level == "warning"]


# -- the doctor ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ill(tmp_path: Path) -> DoctorHost:
    """A host that remembers three GPUs and has two."""
    made = healthy(tmp_path)
    made.write("/etc/machine-id", b"\n")
    made.write(REMEMBERED, json.dumps(KEPT).encode(), mode=0o600)
    return made


def test_the_doctor_names_the_missing_gpu(ill: DoctorHost) -> None:
    ill.answers["dmesg"] = (0, XID.replace("2a", gpu(2).sysfs_id[5:7]))
    cause = first(examined(ill))
    assert cause.rule.name == "gpus-lost"
    assert re.match(rf"3 GPUs on 2026-11-03, 2 today: {gpu(2).uuid} \(.*\) is gone$", cause.finding.what)
    assert f"{REMEMBERED}: 2026-11-03 08:00:00 UTC\n" in cause.finding.evidence
    assert "the kernel log says: [ 12.1] NVRM: Xid" in cause.finding.evidence
    assert cause.finding.next_step.startswith("systemctl reboot  # ")


def test_the_doctor_names_it_where_no_driver_answers_and_buses_have_their_numbers(ill: DoctorHost) -> None:
    ill.answers["nvidia-smi"] = (9, "NVIDIA-SMI has failed")
    assert "gpus-lost" in names(examined(ill))
    ill.path("/sys/bus/pci/devices/0000:2a:00.0").rename(ill.path("/sys/bus/pci/devices/0000:2b:00.0"))
    assert "gpus-lost" not in names(examined(ill))


def test_a_gpu_on_the_bus_is_the_trouble_of_other_rules(ill: DoctorHost) -> None:
    write_kernel_tree(ill.root, 3)
    found = names(examined(ill))
    assert "nodes-missing" in found and "gpus-lost" not in found


def test_the_doctor_says_what_it_does_not_trust(ill: DoctorHost) -> None:
    ill.write(REMEMBERED, b"{", mode=0o600)
    x = examined(ill)
    assert "can't be read" in x.memory_fault and names(x) == ["driver-old"]
