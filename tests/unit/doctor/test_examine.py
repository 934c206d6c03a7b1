"""An examination from end to end on a host at the System seam: what is told, how it ends, that nothing changes."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from gpuprov.agent.run import run_request
from gpuprov.doctor.examine import diagnose, report
from gpuprov.doctor.finding import AREAS
from gpuprov.doctor.snapshot import ModuleFile
from gpuprov.engines.docker_unit import last_words
from gpuprov.facts.interpreter import MISSING, Interpreter
from gpuprov.facts.kernels import InstalledKernel
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import CauseFound, CheckDone, Event, Note, from_line, to_line
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import spec_to_json
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, NVIDIA_HOOK_PATH
from tests.unit.ask import finished
from tests.unit.doctor.host import SMI, SPEC, DoctorHost, examined, first, healthy
from tests.unit.doctor.ill import both, docker, metal, unit, without
from tests.unit.fake_host import PYTHON, RELEASE, FakeHost

pytestmark = pytest.mark.root
FAILED = both(docker(active=False), unit("docker.service", active="failed", result="exit-code"))


@pytest.fixture
def host(tmp_path: Path) -> DoctorHost:
    return healthy(tmp_path)


def events_of(host: FakeHost) -> list[Event]:
    """Return the events of `gpuprov doctor`, each as it comes over the wire."""
    found: list[Event] = []
    run_request(Request("doctor", spec_to_json(SPEC)), found.append, host)
    assert [from_line(to_line(event)) for event in found] == found
    return found


def causes(events: list[Event]) -> list[CauseFound]:
    return [event for event in events if isinstance(event, CauseFound)]


@pytest.mark.parametrize("metal", [True, False])
def test_a_machine_without_gpu_has_one_cause(tmp_path: Path, *, metal: bool) -> None:
    """Nothing of gpuprov and no driver is there either, and to install them would not help."""
    events = events_of(FakeHost(tmp_path, 0, metal=metal))
    (cause,) = causes(events)
    assert (cause.rule, [one.what for one in finished(events).problems]) == ("no-gpu", [f"{cause.what} (certain)"])
    assert "gpuprov install" not in cause.next_step
    checks = {event.name: (event.status, event.reason) for event in events if isinstance(event, CheckDone)}
    assert checks.pop("GPUs")[0] == "failed" and set(checks.values()) == {("skipped", "there is no GPU")}


def test_a_healthy_host_has_nothing_wrong_and_tells_what_was_looked_at(host: DoctorHost) -> None:
    events = events_of(host)
    assert finished(events).problems == ()
    assert finished(events).exit_code == ExitCode.DONE
    assert finished(events).summary == "nothing found wrong"
    checks = [event for event in events if isinstance(event, CheckDone)]
    assert [check.name for check in checks] == list(AREAS)
    assert {check.status for check in checks} == {"ok"}
    assert all(check.on_host for check in checks)


def test_a_cause_is_told_with_evidence_confidence_and_what_to_type(host: DoctorHost) -> None:
    (host.root / "usr/bin/gpuprov-container-runtime").unlink()
    events = events_of(host)
    cause = causes(events)[0]
    assert (cause.rank, cause.rule, cause.area, cause.confidence) == (
        1, "runtime-missing", "container toolkit", "certain",
    )  # fmt: skip
    assert "/usr/bin/gpuprov-container-runtime is missing" in cause.what
    assert "docker info: runtime nvidia is /usr/bin/gpuprov-container-runtime" in cause.evidence
    assert cause.next_step == "gpuprov install"
    assert finished(events).exit_code == ExitCode.FAILED
    assert finished(events).problems[0].what == f"{cause.what} (certain)"
    failed = [event.name for event in events if isinstance(event, CheckDone) and event.status == "failed"]
    assert failed == ["container toolkit"]


def test_it_changes_nothing(host: DoctorHost) -> None:
    (host.root / "etc/docker/daemon.json").write_text("{\n")
    (host.root / "dev/nvidia0").unlink()
    before = host.everything()
    assert len(causes(events_of(host))) >= 2
    assert host.everything() == before


# All that the doctor ever runs; none of these changes anything.
HARMLESS = (
    ("dmesg",), ("nvidia-smi", "-q", "-x"), ("modinfo", "nvidia"), ("modinfo", "nvidia-current"), ("dkms", "status"),
    ("systemctl", "show"),
    ("systemctl", "cat"), ("journalctl",), ("docker", "info"), ("docker", "ps"), ("getenforce",), ("getsebool",),
    ("/usr/bin/runc", "--version"), ("tail",), ("grep",), ("head", "-c", "0"), ("dpkg-query",), ("dpkg",), ("rpm",),
    (f"/usr/bin/{PYTHON}", "-I", "-S", "-E", "-B", "-c", "import os, sys; print('%d.%d.%d' % sys.version_info[:3], "
     "sys.implementation.cache_tag, os.path.dirname(os.__file__))"),
)  # fmt: skip


def test_it_runs_nothing_that_could_change_something(host: DoctorHost) -> None:
    for program in ("journalctl", "modinfo", "dkms", "getenforce", "getsebool", "tail", "grep"):
        host.answer(program, "")
    host.commands.clear()
    events_of(host)
    assert ("nvidia-smi", "-q", "-x") in host.commands
    assert [argv for argv in host.commands if not any(argv[: len(words)] == words for words in HARMLESS)] == []


def test_dkms_trees_of_other_drivers_are_not_this_one(host: DoctorHost) -> None:
    """What the removal of an earlier driver has left: its module does not fit the libraries."""
    host.answer("dkms", f"nvidia-fs/2.24.2, {RELEASE}, x86_64: installed\nnvidia/535.129.03, {RELEASE}, x86: built\n")
    unbuilt = (InstalledKernel(RELEASE, headers=True, module=False),)
    x = metal(examined(host), dkms=examined(host).dkms, module=ModuleFile(), kernels=unbuilt)
    assert (first(x).rule.name, "gpuprov install" in first(x).finding.next_step) == ("module-missing", True)
    host.answer("dkms", "nvidia/535.129.03: added\nnvidia/550.163.01: added\n")
    x = metal(examined(host), dkms=examined(host).dkms, module=ModuleFile(), kernels=unbuilt)
    assert first(x).finding.next_step.startswith(f"dkms install nvidia/550.163.01 -k {RELEASE}; modprobe nvidia")


@pytest.mark.parametrize("trouble", ["dev/nvidia1", "proc/driver/nvidia/version", "usr/bin/nvidia-smi"])
def test_nvidia_smi_is_not_asked_where_it_would_make_nodes_or_load_modules(host: DoctorHost, trouble: str) -> None:
    (host.root / trouble).unlink()
    host.commands.clear()
    causes(events_of(host))
    assert "nvidia-smi" not in {argv[0] for argv in host.commands}


def rules_of(host: DoctorHost) -> list[str]:
    return [cause.rule for cause in causes(events_of(host))]


def test_nodes_are_opened_only_where_nvidia_smi_fails_and_does_not_hang(host: DoctorHost) -> None:
    said = "head: cannot open '/dev/nvidia0' for reading: Input/output error"
    host.answers["head"] = (1, said)
    for code, opened in ((0, 0), (124, 0), (15, 2)):
        host.answers["nvidia-smi"] = (code, SMI if code == 0 else "GPU is lost")
        host.commands.clear()
        found = causes(events_of(host))
        assert (("head", "-c", "0", "/dev/nvidia0") in host.commands) is bool(opened)
        assert len(found) == {0: 0, 124: 1, 15: 2}[code]
    assert found[1].follows == "" and found[1].evidence == "head -c 0 /dev/nvidia0: Input/output error"


def test_settings_that_cannot_be_read_are_seen(host: DoctorHost) -> None:
    (host.root / "etc/gpuprov").mkdir(exist_ok=True)
    (host.root / "etc/gpuprov/container-runtime.toml").write_text("mode = \n")
    assert rules_of(host) == ["settings-broken"]
    (cause,) = causes(events_of(host))
    assert cause.evidence.startswith("/etc/gpuprov/container-runtime.toml can't be read: line 1")


def test_files_that_others_can_change_are_seen(host: DoctorHost) -> None:
    assert examined(host).changeable == {}
    journals = ("/var/lib/gpuprov", "/var/lib/gpuprov/runs", "/var/lib/gpuprov/runs/0001.jsonl")
    paths = ("/etc/cdi", LAUNCHER_PATH, "/etc/docker/daemon.json", *journals)
    for path in paths:
        host.path(path).chmod(0o777)
    assert examined(host).changeable == dict.fromkeys(paths, "0 777")
    # Whether a newer driver may be had is in the journals.
    found: list[Event] = []
    run_request(Request("doctor", spec_to_json(replace(SPEC, driver="runfile"))), found.append, host)
    assert "others-can-change" in [cause.rule for cause in causes(found)]
    for path in journals:
        host.path(path).chmod(0o700)
    for path, target in (("etc/docker/daemon.json", "/dev/null"), ("usr/bin/gpuprov-container-runtime", "/nowhere")):
        (host.root / path).unlink()
        (host.root / path).symlink_to(target)
    assert examined(host).changeable == {"/etc/cdi": "0 777"}


def test_a_low_level_runtime_that_does_not_run_is_seen(host: DoctorHost) -> None:
    host.answers["/usr/bin/runc"] = (126, "Exec format error")
    assert examined(host).broken == {"/usr/bin/runc": "`/usr/bin/runc --version` exited 126\nExec format error"}


def test_programs_are_named_by_a_folder_that_is_no_link(host: DoctorHost) -> None:
    """Fedora's /usr/sbin is a link to bin, and stands first on the PATH."""
    for folder in ("usr/sbin", "usr/local/sbin"):
        shutil.rmtree(host.root / folder, ignore_errors=True)
    (host.root / "usr/sbin").symlink_to("bin")
    assert examined(host).programs["nvidia-container-runtime-hook"] == NVIDIA_HOOK_PATH
    other = host.root / "usr/local/sbin/nvidia-container-runtime-hook"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    assert examined(host).programs[other.name] == f"/usr/local/sbin/{other.name}"


def test_a_specification_of_another_driver_is_seen(host: DoctorHost) -> None:
    path = host.root / "etc/cdi/nvidia.json"
    path.write_text(path.read_text().replace("550.163.01", "535.261.03"))
    found = causes(events_of(host))
    assert [cause.rule for cause in found] == ["cdi-stale", "cdi-names-absent-files"]
    assert found[1].follows == "cdi-stale"
    assert re.match(r"/etc/cdi/nvidia.json:\d+: /usr/lib/\S+\.so\.535\.261\.03\n", found[1].evidence)


def test_nothing_is_typed_against_a_consequence_before_its_first_cause_is_gone(host: DoctorHost) -> None:
    x = docker(active=False, runtimes=None, config_text="{", refused="unexpected EOF")(examined(host))
    ill = both(without(LAUNCHER_PATH), FAILED)(x)
    told: list[Event] = []
    found = diagnose(ill)
    problems = report(ill, found, told.append).problems
    steps = {cause.rule.name: problem.next_step for cause, problem in zip(found, problems)}
    followed = {cause.rule.name: cause.follows for cause in found}
    assert followed["docker-down"] == "daemon-json-broken"
    assert steps["docker-down"] == f"first: {steps['daemon-json-broken']}"
    assert all(
        steps[name].startswith("first: ") or steps[name] == steps[root] for name, root in followed.items() if root
    )
    assert not steps["daemon-json-broken"].startswith("first: ")


@pytest.mark.parametrize("name", ["gpuprov-nodes.service", "gpuprov-refresh.service"])
def test_a_unit_without_its_python_is_not_to_be_started(host: DoctorHost, name: str) -> None:
    x = unit(name, active="failed", result="exit-code")(examined(host))
    python = Interpreter(PYTHON, deployed="/usr/bin/python3.8", fault=MISSING)
    told: list[Event] = []
    gone = replace(x, host=replace(x.host, interpreter=python))
    (problem,) = report(gone, diagnose(gone), told.append).problems
    warnings = [event.message for event in told if isinstance(event, Note)]
    assert any(one.endswith(f"; first: {problem.next_step}") for one in warnings), warnings


def test_a_kernels_log_that_cannot_be_read_is_told(host: DoctorHost) -> None:
    host.answer("dmesg", "dmesg: read kernel buffer failed: Operation not permitted", 1)
    warnings = [event.message for event in events_of(host) if isinstance(event, Note)]
    assert len(warnings) == 1
    assert "Operation not permitted" in warnings[0]


def test_an_aside_is_a_warning_and_fails_nothing(host: DoctorHost) -> None:
    host.answer("dmesg", "NVRM: Xid (PCI:0000:65:00): 63, pid='N/A', Row Remapper: New row marked for remapping\n")
    events = events_of(host)
    assert finished(events).exit_code == ExitCode.DONE
    assert [(cause.rule, cause.confidence) for cause in causes(events)] == [("xid-63", "aside")]
    assert [event.level for event in events if isinstance(event, Note)] == ["warning"]


def test_it_needs_root(host: DoctorHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "user_id", lambda: 1000)
    assert finished(events_of(host)).exit_code == ExitCode.USAGE


def test_the_doctor_quotes_the_sentence_that_an_installation_quotes(host: DoctorHost) -> None:
    sentence = 'invalid argument "x" for "--bip" flag: invalid CIDR address: x'
    host.answer("journalctl", f"Starting docker.service\n{sentence}\nSee 'dockerd --help'.\nFailed to start docker\n")
    finding = first(FAILED(examined(host))).finding
    assert finding.what == f"docker does not run: {sentence}"
    assert finding.evidence.splitlines()[-1] == f"journalctl -u docker: {last_words(host)}"


def test_a_users_own_docker_that_has_the_runtime_is_no_trouble(host: DoctorHost) -> None:
    (host.root / "run/user/1000").mkdir(parents=True)
    (host.root / "run/user/1000/docker.sock").touch()
    accounts = host.root / "etc/passwd"
    accounts.write_text("root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n")
    assert rules_of(host) == ["docker-rootless"]
    file = host.root / "home/ann/.config/docker/daemon.json"
    file.parent.mkdir(parents=True)
    for text, expected in (('{"runtimes": {"nvidia": {"path": "/x"}}}', []), ('{"features": {"cdi": true}}', []),
                           ("{", ["docker-rootless"]),
                           # Of a large file only the start is read: a user's could use up the host's memory.
                           ('{"features": {"cdi": true}}' + " " * (2 << 20) + "}", [])):  # fmt: skip
        file.write_text(text)
        assert rules_of(host) == expected


@pytest.mark.parametrize("closed", ["/home/ann/.config/docker/daemon.json", "/run/user/1000/docker.sock"])
def test_unreadable_files_end_no_examination(host: DoctorHost, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home on NFS (root_squash), or a file system of the user's own (FUSE)."""
    (host.root / "run/user/1000").mkdir(parents=True)
    (host.root / "etc/passwd").write_text("ann:x:1000:1000::/home/ann:/bin/sh\n")
    refused, opened, exists = PermissionError(13, "Permission denied", closed), host.open, host.exists

    def unless_closed(look: Callable[[str], Any]) -> Callable[[str], Any]:
        def looks(path: str) -> Any:
            if path == closed:
                raise refused
            return look(path)

        return looks

    monkeypatch.setattr(host, "open", unless_closed(opened))
    monkeypatch.setattr(host, "exists", unless_closed(exists))
    assert rules_of(host) == []


def test_a_file_that_a_tool_writes_after_each_run_is_told_by_its_second_time(host: DoctorHost) -> None:
    (host.root / "etc/docker/daemon.json").write_text("{}")
    assert "journalctl" not in causes(events_of(host))[0].next_step
    # As another run of gpuprov leaves its journal.
    runs = host.root / "var/lib/gpuprov/runs"
    shutil.copy(runs / "0001.jsonl", runs / "0002.jsonl")
    found = causes(events_of(host))[0]
    assert found.rule in ("docker-not-restarted", "runtime-unsaved", "runtime-unregistered")
    assert found.next_step.startswith("journalctl --no-pager --since @") and "gpuprov install" in found.next_step
