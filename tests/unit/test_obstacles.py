"""What would leave a host as it is after a run that seems to go well: named before any change, and by verify."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov import toolkit
from gpuprov.core.changes import SetMode, file_diff, text_diff
from gpuprov.core.journal import new_journal
from gpuprov.core.lock import other_run
from gpuprov.doctor.examine import Cause, diagnose
from gpuprov.doctor.gather import gather as examine
from gpuprov.doctor.gather import runs_now
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.facts.host import HostFacts, gather, read_only_places
from gpuprov.plan.inputs import gather_for
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, spec_to_json
from tests import simgpu
from tests.runs import as_a_run, ignore, undo_last
from tests.triplet import TRIPLET
from tests.unit.ask import ask, check_of
from tests.unit.doctor.host import SPEC, DoctorHost, healthy
from tests.unit.test_lock import Below, hold

pytestmark = pytest.mark.root
STALE = "535.261.03"
RUNFILE = HostSpec(driver_version=simgpu.DRIVER_VERSION, docker="preinstalled")


@pytest.fixture
def host(tmp_path: Path) -> DoctorHost:
    """A host that gpuprov has set up."""
    return healthy(tmp_path)


def hide(host: DoctorHost) -> str:
    """Put an older NVML before the driver's; return its path."""
    folder = host.root / "usr/local/lib"
    folder.mkdir(parents=True)
    name = f"libnvidia-ml.so.{STALE}"
    shutil.copy(simgpu.build_libraries(STALE) / name, folder / name)
    (folder / "libnvidia-ml.so.1").symlink_to(name)
    # A file that no package's pattern has: /usr/local/lib comes before /usr/lib in the loader's cache.
    (host.root / "etc/ld.so.conf").write_text(f"/usr/local/lib\n/usr/lib/{TRIPLET}\n")
    for link in ("lib", "lib64"):
        if not (host.root / link).exists():
            (host.root / link).symlink_to(f"usr/{link}")
    (host.root / "usr/lib64").mkdir(exist_ok=True)
    shutil.copy("/lib64/ld-linux-x86-64.so.2", host.root / "usr/lib64/")
    subprocess.run(("/sbin/ldconfig", "-r", str(host.root)), check=True, capture_output=True, timeout=60)
    return "/usr/local/lib/libnvidia-ml.so.1"


def facts_for(host: DoctorHost, spec: HostSpec) -> HostFacts:
    return gather_for(host, spec, None, (), ignore)


def causes(x: HostSnapshot) -> list[Cause]:
    """Return what the doctor finds, but for the age of the simulated driver."""
    return [cause for cause in diagnose(x) if cause.rule.name != "driver-old"]


def failed(host: DoctorHost, name: str) -> str:
    """Return why a check of verify fails."""
    found = check_of(name, host, SPEC)
    assert found.status == "failed"
    return found.reason


def test_installation_behind_another_library_is_refused(host: DoctorHost) -> None:
    path = hide(host)
    plan = make_plan(facts_for(host, RUNFILE), RUNFILE)
    assert plan.changes == ()
    (problem,) = (one for one in plan.problems if "the loader takes another library" in one.what)
    assert path in problem.what and STALE in problem.what
    assert problem.evidence == "/etc/ld.so.conf:1 names /usr/local/lib"
    assert problem.next_step == f"rm {path} /usr/local/lib/libnvidia-ml.so.{STALE}; ldconfig"


def test_verify_names_the_library_that_hides_the_drivers(host: DoctorHost) -> None:
    path = hide(host)
    host.answers["nvidia-smi"] = (18, "Failed to initialize NVML: Driver/library version mismatch")
    reason = failed(host, "driver")
    assert "nvidia-smi exited 18" in reason and path in reason and "; rm " in reason


def test_verify_names_files_and_module_of_different_versions(host: DoctorHost) -> None:
    host.answers["nvidia-smi"] = (18, "Failed to initialize NVML: Driver/library version mismatch")
    simgpu.write_kernel_tree(host.root, 2, STALE)
    sentence = f"the driver's files are {simgpu.DRIVER_VERSION}, the loaded module is {STALE}: run `gpuprov install -e"
    assert sentence in failed(host, "driver")
    assert failed(host, "CDI specification").startswith(sentence)


def test_verify_in_a_system_container_speaks_of_the_host_outside(host: DoctorHost) -> None:
    host.answers["nvidia-smi"] = (9, "NVIDIA-SMI has failed")
    (host.root / "proc/driver/nvidia/version").unlink()
    assert failed(host, "driver").endswith("(outside systemd-nspawn, on the container host)")
    assert failed(host, "device nodes").endswith("(outside systemd-nspawn, on the container host)")


def test_read_only_file_systems_refuse_what_writes_there_and_nothing_else(host: DoctorHost) -> None:
    facts = gather(host)
    read_only = replace(facts, read_only={"/usr": "/usr (ro,relatime,rw)"})
    assert make_plan(read_only, SPEC) == make_plan(facts, SPEC)
    without_specification = replace(read_only, files={k: v for k, v in facts.files.items() if "/etc/cdi/" not in k})
    assert [item.step for item in make_plan(without_specification, SPEC).changes] == ["cdi"]
    without_runtime = replace(read_only, files={k: v for k, v in facts.files.items() if "container-runtime" not in k})
    (problem,) = make_plan(without_runtime, SPEC).problems
    assert problem.what == "/usr is on a file system that is mounted read-only"
    assert problem.next_step == "mount -o remount,rw /usr"


def test_a_healthy_host_with_a_read_only_etc_is_healthy(host: DoctorHost) -> None:
    x = examine(host, SPEC)
    read_only = replace(x, host=replace(x.host, read_only={"/etc": "/etc (ro,relatime,rw)"}))
    assert causes(read_only) == causes(x)
    # An aside whose advice is an installation does not make it a fault either.
    old = replace(read_only.host, packages=replace(x.host.packages, installed={**x.host.packages.installed}))
    assert "install-obstructed" not in [cause.rule.name for cause in causes(replace(read_only, host=old))]


# proc(5): a mount that is read-only, and a file system that ext4 has made so after an error.
MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda {root}
90 27 254:0 /usr /usr {usr},relatime - ext4 /dev/vda rw,discard
"""


@pytest.mark.parametrize(
    ("root", "usr", "places"),
    [
        ("rw,discard", "rw", []),
        ("rw,discard", "ro", ["/usr"]),
        ("ro,errors=remount-ro", "rw", ["/etc", "/var/cache/gpuprov", "/var/lib"]),
    ],
)
def test_read_only_places_are_read_from_the_kernels_table_of_mounts(root: str, usr: str, places: list[str]) -> None:
    assert sorted(read_only_places(MOUNTS.format(root=root, usr=usr))) == places


def test_closed_modes_are_set_and_come_back(host: DoctorHost) -> None:
    nodes = [host.root / "dev/nvidia0", host.root / "dev/nvidiactl"]
    for place, mode in ((host.root / "etc/cdi", 0o700), (host.root / "etc/cdi/nvidia.json", 0o600)):
        place.chmod(mode)
    for node in nodes:
        node.chmod(0o600)
    before = host.tree()
    assert "has mode 0700" in failed(host, "CDI specification")
    assert "/dev/nvidia0 (it should be 0666)" in failed(host, "device nodes")
    plan = make_plan(gather(host), SPEC)
    changes = [item.change for item in plan.changes]
    assert SetMode("/etc/cdi", 0o755) in changes and SetMode("/dev/nvidia0", 0o666) in changes
    as_a_run(host, *changes)
    assert make_plan(gather(host), SPEC).changes == ()
    undo_last(host)
    after = host.tree()
    assert [path for path in {*before, *after} if before.get(path) != after.get(path) and "/runs" not in path] == []


def test_the_diff_of_a_specification_is_what_is_written_mode_included(host: DoctorHost) -> None:
    path = toolkit.CDI_SPECIFICATION
    place = host.root / path.lstrip("/")
    written = place.read_bytes()
    place.chmod(0o600)
    (item,) = make_plan(gather(host), SPEC).changes
    # The content stays, whatever only NVML knows of it: the mode alone is told.
    assert item.change.diff(host) == f"--- {path} (mode 0600)\n+++ {path} (mode 0644)"
    place.write_bytes(written.replace(simgpu.DRIVER_VERSION.encode(), STALE.encode()))
    (item,) = make_plan(gather(host), SPEC).changes
    told = item.change.diff(host)
    assert told.startswith(f"--- {path} (mode 0600)\n+++ {path} (mode 0644)\n@@")
    wrong = place.read_bytes()
    item.change.apply(host, lambda *_: None)
    assert told.splitlines()[2:] == text_diff(path, wrong, place.read_bytes()).splitlines()[2:]
    assert file_diff(host, path, place.read_bytes(), 0o644) == ""


def test_a_run_that_is_alive_is_seen_by_its_lock(host: DoctorHost) -> None:
    journal = new_journal(host, "install")
    assert [cause.rule.name for cause in causes(examine(host, SPEC))] == ["run-cut-off"]
    # The machine's own processes: the fake host's /proc has none.
    below = Below(str(host.root))
    assert runs_now(below) == ""
    process = hold(host.root, "alone")
    try:
        (cause,) = causes(replace(examine(host, SPEC), runs_now=runs_now(below)))
        assert (cause.rule.name, cause.finding.confidence) == ("run-alive", "aside")
        assert f"pid {process.pid}: gpuprov install, since 12:00, step 4 of 10" in cause.finding.evidence
        assert cause.finding.next_step.startswith(f"tail --pid={process.pid} -f /dev/null")
        # What else is found may be what the run has not done yet.
        host.remove("/etc/cdi/nvidia.json")
        first, *others = causes(replace(examine(host, SPEC), runs_now=runs_now(below)))
        assert (first.rule.name, first.finding.confidence) == ("run-alive", "certain")
        assert others and {one.finding.confidence for one in others} == {"possible"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpuprov.agent.run.other_run", lambda system: other_run(below))
            finished, _ = ask(host, Request("verify", spec_to_json(SPEC)))
        assert finished.exit_code == 1
        assert finished.problems[0].what.startswith("a run is working on this host")
        assert f"pid {process.pid}: gpuprov install, since 12:00, step 4 of 10" in finished.problems[0].evidence
    finally:
        process.kill()
        process.wait()
    assert runs_now(below) == ""
    journal.end("done")
