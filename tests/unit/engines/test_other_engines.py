"""Engines besides docker, as an installation keeps them: told, restarted if they run, brought back if that fails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core import units
from gpuprov.core.commands import TIMED_OUT
from gpuprov.core.system import System
from gpuprov.engines import cri_status, known
from gpuprov.engines.configure import configuration
from gpuprov.engines.cri_status import CriStatus
from gpuprov.engines.known import ENGINES, ConfigureRequest, EngineFacts, FileEdit, RuntimeEntry
from gpuprov.engines.other_engines import (
    ConfigureEngine,
    gather,
    kept_running,
    names,
    plan,
    problems,
    restart_command,
    with_coming,
)
from gpuprov.facts.host import gather as gather_facts
from gpuprov.plan.context import PlanContext
from gpuprov.plan.steps import STEPS
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH
from gpuprov.toolkit import engine_runtime
from tests.files import put
from tests.unit.engines.test_containerd import K3S, NEW_K3S, OLD_K3S
from tests.unit.fake_host import FakeHost
from tests.unit.scripted import Answer, Scripted

CONTAINERD = 'version = 2\n# mine\n[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "pause:3.9"\n'
BOTH = ("containerd", "podman")
NVIDIA = RuntimeEntry(path=LAUNCHER_PATH)


class Host(Scripted):
    """A host with containerd 1.7 and podman, whose systemctl does what it is told to, or not."""

    which = System.which

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.active = True
        self.starts, self.exits = True, 1
        self.log = ""
        for program in ("containerd", "podman"):
            put(root / "usr/bin" / program, "#!/bin/sh\n", 0o755)
        self.config = root / "etc/containerd/config.toml"
        put(self.config, CONTAINERD, 0o640)

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if argv == ("/usr/bin/containerd", "--version"):
            return "containerd github.com/containerd/containerd 1.7.24 1.7.24~ds1-6\n"
        if argv[0] == "journalctl":
            return self.log
        assert argv[0] == "systemctl"
        if argv[1] == "restart":
            self.active = self.starts
            # What does not start with the new file starts with the old one.
            self.starts = True
            return 0 if self.active else self.exits, ""
        return 0 if argv[1] != "is-active" or self.active else 3, ""

    @property
    def restarts(self) -> int:
        return len([argv for argv in self.asked if argv[:2] == ("systemctl", "restart")])


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def applied(host: Host) -> list[ConfigureEngine]:
    changes = [change for change in plan(gather(host, BOTH), NVIDIA) if isinstance(change, ConfigureEngine)]
    for change in changes:
        change.apply(host, lambda *_: None)
    return changes


def test_engines_are_told_once_and_the_running_one_is_restarted_once(host: Host) -> None:
    assert [change.engine for change in applied(host)] == ["containerd", "podman"]
    assert host.restarts == 1
    text = host.config.read_text()
    assert text.replace("enable_cdi = true  # gpuprov: added\n", "").startswith(CONTAINERD)
    assert f'BinaryName = "{LAUNCHER_PATH}"' in text
    assert host.config.stat().st_mode & 0o777 == 0o640
    assert plan(gather(host, BOTH), NVIDIA) == ()


def test_a_stopped_engine_reads_its_files_when_somebody_starts_it(host: Host) -> None:
    host.active = False
    applied(host)
    assert host.restarts == 0


@pytest.mark.parametrize(
    ("log", "evidence", "exits"),
    [
        ("starting\nerror: no such plugin\n", "error: no such plugin", 1),
        ("1 ERROR\n2 Failed\n3\n4 error\n5 failure\n", "2 Failed\n4 error\n5 failure", 1),
        ("starting\n", "`systemctl restart containerd.service` exited 1", 1),
        ("failure\n", "failure", 0),
        ("starting\n", "containerd.service is not active", 0),
    ],
)
def test_an_engine_that_does_not_come_up_gets_its_files_back(host: Host, log: str, evidence: str, exits: int) -> None:
    host.starts, host.log, host.exits = False, log, exits
    (change,) = plan(gather(host, ("containerd",)), NVIDIA)
    told: list[tuple[str, int, int]] = []
    with pytest.raises(GpuprovError, match="failed to start with its new configuration; the old one is back") as caught:
        change.apply(host, lambda message, done, total: told.append((message, done, total)))
    (problem,) = caught.value.problems
    assert problem.evidence.startswith(evidence) and "fix what containerd names" in problem.next_step
    assert told == [("restarting containerd.service", 0, 0)]
    (words,) = (argv for argv in host.asked if argv[0] == "journalctl")
    assert "containerd.service" in words and "--lines=20" in words
    assert host.config.read_text() == CONTAINERD
    assert host.active and host.restarts == 2


def test_a_rollback_says_that_an_engine_does_not_start_with_its_old_file(host: Host) -> None:
    (change,) = plan(gather(host, ("containerd",)), NVIDIA)
    image = change.capture(host)
    change.apply(host, lambda *_: None)
    host.starts, host.log = False, "error: no such snapshotter\n"
    with pytest.raises(GpuprovError, match="containerd does not start with its old configuration") as caught:
        type(change).undo(host, image, {})
    (problem,) = caught.value.problems
    assert (problem.evidence, host.config.read_text()) == ("error: no such snapshotter", CONTAINERD)
    assert problem.next_step.startswith("journalctl -u containerd.service -n 50")
    # One that was removed since reads nothing.
    (host.root / "usr/bin/containerd").unlink()
    host.starts = False
    type(change).undo(host, image, {})


def test_undoing_gives_back_every_byte(host: Host) -> None:
    before = {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()}
    changes = plan(gather(host, BOTH), NVIDIA)
    images = [change.capture(host) for change in changes]
    applied(host)
    for change, image in reversed(list(zip(changes, images))):
        type(change).undo(host, image, None)
    assert {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()} == before


def test_the_summary_says_what_is_restarted_and_what_becomes_of_containers(host: Host) -> None:
    first, second = plan(gather(host, BOTH), NVIDIA)
    assert first.summary().endswith("config.toml and restart containerd (its containers go on)")
    assert "restart" not in second.summary()
    assert "+BinaryName" in first.diff(host).replace(" ", "")
    edits = (FileEdit("/etc/containerd/config.toml", b"", CONTAINERD.encode() + b"b\n"), FileEdit("/b", None, b"c\n"))
    head, added = ConfigureEngine("containerd", edits).diff(host).split("\n--- /dev/null\n")
    assert (head.splitlines()[-1], added) == ("+b", "+++ /b\n@@ -0,0 +1 @@\n+c") and "+version" not in head


def test_engines_that_are_missing_or_broken_are_problems_told_together(host: Host) -> None:
    host.config.write_text("version = \n")
    found = problems(gather(host, ("containerd", "crio")), NVIDIA)
    assert found[0].what == "crio is not installed"
    assert "there is no crio on the PATH" in found[0].evidence and "take crio out of gpuprov_engines" in str(found[0])
    assert "line 1" in str(found[1])
    assert plan(gather(host, ("containerd",)), NVIDIA) == ()


def test_only_engines_that_are_asked_for_are_looked_at(host: Host) -> None:
    assert gather(host, ()) == {}
    assert host.asked == []


@pytest.mark.parametrize(
    ("values", "dockerd", "expected"),
    [
        ({}, True, ()),
        ({"engines": ["crio"]}, True, ("crio",)),
        ({"docker": "none"}, False, ("containerd", "podman")),
        # Docker's containerd is docker's.
        ({"docker": "none"}, True, ("podman",)),
        ({"docker": "none", "engines": ["containerd"]}, True, ("containerd",)),
    ],
)
def test_default_without_docker(host: Host, values: dict[str, Any], dockerd: bool, expected: tuple[str, ...]) -> None:
    if dockerd:
        (host.root / "usr/bin/dockerd").touch(0o755)
    assert names(host, parse_spec(values)) == expected


@pytest.mark.parametrize("values", [{"docker": "none"}, {"engines": ["podman"]}])
def test_podman_of_the_runs_own_packages_is_configured_in_the_same_run(host: Host, values: dict[str, Any]) -> None:
    (host.root / "usr/bin/podman").unlink()
    (host.root / "usr/bin/containerd").unlink()
    package = "podman" if values.get("engines") else "podman=5.4.2-1"
    without, spec = parse_spec(values), parse_spec({**values, "packages": [package]})
    assert not [one for one in gather(host, names(host, without)).values() if one.program]
    found = with_coming(gather(host, names(host, spec)), spec)
    assert problems(found, NVIDIA) == ()
    (change,) = plan(found, NVIDIA)
    assert isinstance(change, ConfigureEngine) and change.engine == "podman"
    # What the host has, and what the run does not install, stays as it was found.
    other = {"podman": EngineFacts("/opt/podman"), "crio": EngineFacts()}
    assert with_coming(other, spec) == other


def test_an_engine_that_is_kept_running_reads_its_files_later_and_is_not_restarted_by_the_undoing(host: Host) -> None:
    before = host.config.read_text()
    (change,) = plan(gather(host, ("containerd",)), NVIDIA, frozenset({"containerd"}))
    image = change.capture(host)
    change.apply(host, lambda *_: None)
    assert host.config.read_text() != before
    type(change).undo(host, image, None)
    assert (host.config.read_text(), host.restarts) == (before, 0)


@pytest.mark.parametrize(
    ("paths", "found", "own"),
    [
        ((), (), ()),
        (("usr/bin/kubelet",), ("kubelet",), ()),
        (("usr/local/bin/k3s", "snap/bin/microk8s"), ("k3s", "microk8s"), ("k3s", "microk8s")),
    ],
)
def test_signs_of_kubernetes(host: Host, paths: tuple[str, ...], found: tuple[str, ...], own: tuple[str, ...]) -> None:
    for path in paths:
        (host.root / path).parent.mkdir(parents=True, exist_ok=True)
        (host.root / path).touch()
    assert known.kubernetes_programs(host) == found
    assert known.own_engines(found) == own


@pytest.mark.parametrize(
    ("of_kubernetes", "values", "kept"),
    [
        ((), {}, {"k3s"}),
        ((), {"restart_kubernetes": True}, set()),
        (("k3s",), {"restart_kubernetes": True}, set()),
        # The kubelet's engine may be any; a user who names one has decided.
        (("kubelet",), {"restart_kubernetes": True}, {"containerd", "crio", "k3s"}),
        (("kubelet",), {"engines": ["crio", "k3s"]}, {"containerd", "k3s"}),
    ],
)
def test_engines_without_restart(of_kubernetes: tuple[str, ...], values: dict[str, Any], kept: set[str]) -> None:
    facts = {name: EngineFacts(f"/usr/bin/{name}") for name in ("containerd", "crio", "k3s")}
    assert kept_running(facts, of_kubernetes, parse_spec({"docker": "none", **values})) == kept


def test_an_undo_with_a_journal_that_names_no_unit_restarts_the_engines_own(host: Host) -> None:
    (change,) = plan(gather(host, ("containerd",)), NVIDIA)
    image = {name: value for name, value in change.capture(host).items() if name != "unit"}
    change.apply(host, lambda *_: None)
    type(change).undo(host, image, None)
    assert host.config.read_text() == CONTAINERD
    assert [argv[-1] for argv in host.asked if argv[1] == "restart"] == ["containerd.service"] * 2


def test_podman_has_no_default_runtime(host: Host) -> None:
    facts = gather(host, ("podman",))
    assert plan(facts, replace(NVIDIA, set_default=True)) == plan(facts, NVIDIA)


def test_an_engine_whose_version_is_not_told_gets_no_cdi(host: Host) -> None:
    class Silent(Host):
        def answer(self, argv: tuple[str, ...]) -> Answer:
            return (1, "containerd 1.7.24") if argv[1:] == ("--version",) else super().answer(argv)

    silent = Silent(host.root / "silent")
    facts = gather(silent, ("containerd",))["containerd"]
    assert facts.version == "" and gather(host, ("containerd",))["containerd"].version
    assert (silent.asked, silent.timeouts) == ([("/usr/bin/containerd", "--version")], [20])
    assert gather(silent, ("podman",))["podman"].version == ""


def test_a_containerd_that_hangs_is_named(host: Host) -> None:
    class Hanging(Host):
        def answer(self, argv: tuple[str, ...]) -> Answer:
            return (TIMED_OUT, "") if argv[1:] == ("--version",) else super().answer(argv)

    hanging = Hanging(host.root / "hanging")
    for ask in (
        lambda: gather(hanging, ("containerd",)),
        lambda: configuration(hanging, ConfigureRequest("containerd")),
    ):
        with pytest.raises(GpuprovError, match="containerd does not tell its version"):
            ask()


def test_only_a_socket_that_is_there_is_asked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def ask(*words: object) -> CriStatus:
        asked.append(words)
        return CriStatus(("nvidia",))

    monkeypatch.setattr(cri_status, "ask", ask)
    assert [one.running for one in gather(host, BOTH).values()] == [None, None] and asked == []
    put(host.root / "run/containerd/containerd.sock", "")
    assert [one.running for one in gather(host, BOTH).values()] == [CriStatus(("nvidia",)), None]
    host.config.write_text(f'imports = ["conf.d/*.toml"]\n{CONTAINERD}[grpc]\naddress = "/run/main.sock"\n')
    put(host.root / "etc/containerd/conf.d/10.toml", '[grpc]\naddress = "/run/my.sock"\n')
    host.write("/run/my.sock", b"")
    assert gather(host, ("containerd",))["containerd"].running is not None
    assert asked == [(host, "/run/containerd/containerd.sock"), (host, "/run/my.sock")]


@pytest.mark.parametrize("toolkit", ["bundled", "nvidia"])
def test_the_step_engines_registers_the_runtime_of_the_spec(host: Host, tmp_path: Path, toolkit: str) -> None:
    (tmp_path / "fake").mkdir()
    facts = replace(gather_facts(FakeHost(tmp_path / "fake")), engines=gather(host, ("podman",)))
    step = next(one for one in STEPS if one.name == "engines")
    (change,) = step.plan(PlanContext(facts, parse_spec({"toolkit": toolkit})))
    runtime = {"bundled": LAUNCHER_PATH, "nvidia": "/usr/bin/nvidia-container-runtime"}[toolkit]
    assert f'+nvidia = ["{runtime}"]' in change.diff(host)


IMPORTED = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "pause:3.9"\n'


@pytest.mark.parametrize(
    ("engine", "files"),
    [
        ("containerd", {"etc/containerd/config.toml": CONTAINERD}),
        ("containerd", {"etc/containerd/config.toml": 'version = 2\nimports = ["/opt/*.toml"]\n',
                        "opt/a.toml": IMPORTED}),
        ("containerd", {"etc/containerd/config.toml": 'version = 2\nimports = ["conf.d/*.toml"]\n',
                        "etc/containerd/conf.d/10-cri.toml": "version = 2\n"}),
        ("containerd", {"etc/containerd/config.toml": ""}),
        ("crio", {"etc/crio/crio.conf.d/10-crun.conf": '[crio.runtime]\ndefault_runtime = "crun"\n'
                  '[crio.runtime.runtimes.crun]\nruntime_path = "/usr/bin/crun"\nmonitor_path = "/usr/bin/conmon"\n'}),
        ("podman", {"etc/containers/containers.conf.d/99-nvidia.conf": "[engine]\n# mine\n"}),
    ],
)  # fmt: skip
def test_facts_give_the_same_edits_as_the_host_itself(host: Host, engine: str, files: dict[str, str]) -> None:
    """The plan reads gathered files, `gpuprov runtime configure` reads the host: neither may see more."""
    (host.root / "usr/bin/crio").touch(0o755)
    for path, text in files.items():
        put(host.root / path, text)
    # containerd 1.7 reads CDI on request alone.
    entry = RuntimeEntry(path=LAUNCHER_PATH, cdi=engine == "containerd")
    found = configuration(host, ConfigureRequest(engine, entry))
    (change,) = plan(gather(host, (engine,)), NVIDIA)
    assert isinstance(change, ConfigureEngine)
    assert change.edits == tuple(edit for edit in found.edits if edit.changes) != ()


# -- Kubernetes nodes --------------------------------------------------------------------------------------------------
MICROK8S = "/var/snap/microk8s/current/args/containerd-template.toml"
MICROK8S_TEXT = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\ndefault_runtime_name = "${RUNTIME}"\n'
FILES = {
    "k3s": {"/usr/local/bin/k3s": "", f"{K3S}/config.toml": NEW_K3S},
    "rke2": {"/opt/rke2/bin/rke2": "", f"{K3S.replace('k3s', 'rke2')}/config.toml": NEW_K3S.replace("k3s", "rke2")},
    "microk8s": {"/snap/bin/microk8s": "", MICROK8S: MICROK8S_TEXT},
}
WRITTEN = {
    "k3s": f"{K3S}/config-v3.toml.d/99-nvidia.toml",
    "rke2": f"{K3S.replace('k3s', 'rke2')}/config-v3.toml.d/99-nvidia.toml",
    "microk8s": MICROK8S,
}
UNITS = {"k3s": "k3s-agent", "rke2": "rke2-agent", "microk8s": "snap.microk8s.daemon-containerd"}


class Node(Scripted):
    """A node with a distribution, whose systemctl keeps to itself what it is told."""

    which = System.which

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root)
        for path, text in FILES[name].items():
            put(root / path.lstrip("/"), text)
        self.restarted: list[str] = []

    def answer(self, argv: tuple[str, ...]) -> Answer:
        assert argv[0] == "systemctl", argv
        if argv[1] == "restart":
            self.restarted.append(argv[-1])
        is_server = argv[-1] in ("k3s.service", "rke2-server.service")
        return 3 if argv[1] == "is-active" and is_server else 0, ""


def spec(name: str, **values: Any) -> HostSpec:
    return parse_spec({"docker": "none", "engines": [name], **values})


def changes(node: System, name: str, **values: Any) -> list[ConfigureEngine]:
    wanted = spec(name, **values)
    facts = gather(node, names(node, wanted))
    assert problems(facts, engine_runtime(wanted)) == ()
    kept = kept_running(facts, (name,), wanted)
    found = plan(facts, engine_runtime(wanted), kept)
    return [one for one in found if isinstance(one, ConfigureEngine)]


@pytest.mark.parametrize("name", ["k3s", "rke2", "microk8s"])
def test_a_named_distribution_is_configured_and_not_restarted(tmp_path: Path, name: str) -> None:
    node = Node(tmp_path, name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (change,) = changes(node, name)
    assert [edit.path for edit in change.edits] == [WRITTEN[name]]
    assert f"is not restarted: type systemctl restart {UNITS[name]}" in change.summary()
    image = change.capture(node)
    change.apply(node, lambda *_: None)
    assert node.restarted == [] and changes(node, name) == []
    assert LAUNCHER_PATH in str(node.read_text(WRITTEN[name]))
    type(change).undo(node, image, {})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert node.restarted == []


@pytest.mark.parametrize("name", ["k3s", "rke2", "microk8s"])
def test_it_is_restarted_where_that_is_asked_for(tmp_path: Path, name: str) -> None:
    node = Node(tmp_path, name)
    (change,) = changes(node, name, restart_kubernetes=True)
    assert f"and restart {UNITS[name]} (its pods go on" in change.summary()
    image = change.capture(node)
    change.apply(node, lambda *_: None)
    assert node.restarted == [f"{UNITS[name]}.service"]
    type(change).undo(node, image, {})
    assert node.restarted == [f"{UNITS[name]}.service"] * 2


@pytest.mark.parametrize(("asked", "restarts"), [(False, []), (True, ["k3s-agent.service"])])
def test_requested_restart_reads_changed_files(tmp_path: Path, asked: bool, restarts: list[str]) -> None:
    node = Node(tmp_path, "k3s")
    for change in changes(node, "k3s"):
        change.apply(node, lambda *_: None)
    wanted = spec("k3s", restart_kubernetes=asked)
    facts = {"k3s": replace(gather(node, ("k3s",))["k3s"], running=CriStatus(("runc",)))}
    assert facts["k3s"].has_not_read_its_files
    assert units.is_active(node, facts["k3s"].unit) and not units.is_active(node, ENGINES["k3s"].unit)
    assert restart_command("k3s", facts["k3s"]) == "systemctl restart k3s-agent"
    for found in plan(facts, NVIDIA, kept_running(facts, ("k3s",), wanted)):
        assert "it runs and has not read its files" in found.summary() and found.diff(node) == ""
        image = found.capture(node)
        found.apply(node, lambda *_: None)
        # Nothing was written, so a rollback has nothing to bring back.
        type(found).undo(node, image, {})
    assert node.restarted == restarts


def test_default_runtime(tmp_path: Path) -> None:
    (change,) = changes(Node(tmp_path / "k3s", "k3s"), "k3s", default_runtime=True)
    assert b'default_runtime_name = "nvidia"' in (change.edits[0].after or b"")
    old = Node(tmp_path / "old", "k3s")
    old.write(f"{K3S}/config.toml", OLD_K3S.encode())
    (problem,) = problems(gather(old, ("k3s",)), replace(NVIDIA, set_default=True))
    assert "put `default-runtime: nvidia` into /etc/rancher/k3s/config.yaml" in problem.next_step


def test_runtime_that_k3s_finds_itself_needs_no_file(tmp_path: Path) -> None:
    node = Node(tmp_path, "k3s")
    node.write(f"{K3S}/config.toml", OLD_K3S.encode())
    assert plan(gather(node, ("k3s",)), RuntimeEntry()) == ()
    assert len(plan(gather(node, ("k3s",)), NVIDIA)) == 1
    node.make_directory("/usr/local/nvidia/toolkit")
    node.write("/usr/local/nvidia/toolkit/nvidia-container-runtime", b"")
    assert plan(gather(node, ("k3s",)), NVIDIA) == ()
    (problem,) = problems(gather(node, ("k3s",)), NVIDIA)
    assert "itself adds a runtime nvidia" in problem.what


def test_a_distribution_is_configured_only_if_it_is_named(tmp_path: Path) -> None:
    node = Node(tmp_path, "k3s")
    assert names(node, parse_spec({"docker": "none"})) == ()
    (problem,) = problems(gather(node, ("rke2",)), NVIDIA)
    assert problem.what == "rke2 is not installed"


@pytest.mark.parametrize(
    ("version", "text", "enabled"),
    [
        ("1.6.20", "", False),
        ("1.7.24", "", True),
        ("1.7.24", "enable_cdi = false\n", False),
        ("1.7.24", "enable_cdi = true\n", False),
        ("2.1.9", "", False),
    ],
)
def test_containerd_1_7_gets_cdi_unless_it_is_configured(version: str, text: str, enabled: bool) -> None:
    main = "/etc/containerd/config.toml"
    config = f'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n{text}'.encode()
    facts = EngineFacts(
        "/usr/bin/containerd", f"containerd github.com/containerd/containerd {version}\n", {main: config}
    )
    (change,) = plan({"containerd": facts}, NVIDIA)
    assert isinstance(change, ConfigureEngine)
    added = b"".join(edit.after or b"" for edit in change.edits).count(b"enable_cdi = true") - config.count(b"= true")
    assert added == enabled


def test_a_drop_in_that_goes_is_said_to_go() -> None:
    edits = (FileEdit("/a", b"1", b"2"), FileEdit("/b", b"1", None))
    assert ConfigureEngine("podman", edits).summary() == "write /a and remove /b"
    assert ConfigureEngine("podman", edits[1:]).summary() == "remove /b"
