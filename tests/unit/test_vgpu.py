"""Virtual GPUs: how they are recognised, their licence, the token that nothing shows, and what is not done for them."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprov.boot import watch
from gpuprov.checks import features
from gpuprov.checks.outcome import Failed
from gpuprov.core.commands import Completed
from gpuprov.driver import fabric_manager, generations, vgpu
from gpuprov.facts.gpus import GRIDD, GRIDD_CONFIG, GRIDD_TEMPLATE, TOKEN, FabricFacts
from gpuprov.facts.host import gather
from gpuprov.facts.kernels import ImageFacts
from gpuprov.machine.pci import PciGpu, gather_gpus
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import Note, Sink
from gpuprov.protocol.secrets import hidden, secret_forms, secret_free
from gpuprov.protocol.spec import HostSpec, parse_spec, spec_to_json
from gpuprov.protocol.tables import PACKAGED
from tests.runs import as_a_run, undo_last
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused
from tests.unit.test_ansible_plugin import PLAYBOOKS, loaded

pytestmark = pytest.mark.root
SECRET = "eyJhbGciOiJSUzI1NiJ9.eyJ0b2tlbiI6InNlY3JldCJ9.c2lnbmF0dXJl"
# As the GRID driver brings it, in short (NVIDIA's licensing guide; Azure's instructions remove its FeatureType=0).
_TEMPLATE = """\
# /etc/nvidia/gridd.conf.template - Configuration file for NVIDIA Grid Daemon
# Description: Set License Server Address \xae
#ServerAddress=
#ServerPort=7070
FeatureType=0
#EnableUI=TRUE
"""
# The end of `nvidia-smi -q` for a GPU (recorded by operators).
_REPORT = """\
    vGPU Software Licensed Product
        Product Name                      : NVIDIA RTX Virtual Workstation
        License Status                    : {}
"""
# A GPU that is passed through whole, for which there is no licence to show.
_WHOLE = """\
    GPU Virtualization Mode
        Virtualization Mode               : Pass-Through
        Host VGPU Mode                    : N/A
"""


class Guest(FakeHost):
    """A virtual machine with the GRID driver; its GPU is licensed some time after nvidia-gridd has started."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, gpus=1, metal=True)
        for path, text in ((GRIDD_TEMPLATE, _TEMPLATE), ("/usr/bin/nvidia-gridd", "")):
            self.path(path).parent.mkdir(parents=True, exist_ok=True)
            self.path(path).write_text(text, encoding="latin-1")
        self.states: set[str] = set()
        self.licensed_after, self.virtual = 0.0, True

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[0] == "nvidia-smi":
            state = "Licensed (Expiry: N/A)" if self.slept >= self.licensed_after else "Unlicensed (Unrestricted)"
            return Completed(tuple(argv), 0, _REPORT.format(state) if self.virtual else _WHOLE, "")
        return super().run(argv, **more)

    def _systemctl(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[-1] != GRIDD or words[0] == "reset-failed":
            return super()._systemctl(words)
        verbs = {"enable": "is-enabled", "restart": "is-active", "disable": "is-enabled", "stop": "is-active"}
        if words[0] in verbs:
            self.states ^= self.states & {verbs[words[0]]}
            self.states |= {verbs[words[0]]} if words[0] in ("enable", "restart") else set()
        return (0 if words[0] in verbs or words[0] in self.states else 3), ""


@pytest.fixture
def guest(tmp_path: Path) -> Guest:
    return Guest(tmp_path / "root")


def spec(**licence: Any) -> HostSpec:
    return parse_spec({"driver_version": "570.237", "driver_url": "/srv/grid.run", "vgpu": licence})


def applied(guest: Guest, wanted: HostSpec) -> None:
    as_a_run(guest, *vgpu.plan(source_of(gather(guest), wanted)))


@pytest.mark.parametrize(("licence", "lines"), [
    ({"feature": 1, "token": SECRET}, ["FeatureType=1"]),
    ({"feature": 0, "token": SECRET}, ["FeatureType=0"]),
    ({"token": SECRET}, []),
    ({"feature": 2, "server": "lic.example.org:7071"},
     ["FeatureType=2", "ServerAddress=lic.example.org", "ServerPort=7071"]),
    ({"server": "lic.example.org"}, ["ServerAddress=lic.example.org"]),
    ({}, ["IgnoreSP=FALSE", "EnableUI=FALSE"]),
])  # fmt: skip
def test_gridd_conf_is_the_template_with_the_settings(guest: Guest, licence: dict[str, Any], lines: list[str]) -> None:
    applied(guest, spec(**licence))
    text = guest.read_text(GRIDD_CONFIG) or ""
    assert [one for one in text.splitlines() if not one.startswith("#")] == lines
    assert "#ServerPort=7070" in text and "# Description" in text
    assert guest.path(GRIDD_CONFIG).stat().st_mode & 0o777 == 0o644
    assert guest.states == {"is-enabled", "is-active"}
    assert vgpu.plan(source_of(gather(guest), spec(**licence))) == (), "a second run has nothing to do"


@pytest.mark.parametrize(("states", "image", "done"), [
    ({"is-enabled"}, False, f"enable and start {GRIDD}"),
    ({"is-active"}, False, f"enable and start {GRIDD}"),
    ({"is-active"}, True, f"enable {GRIDD}"),
    ({"is-enabled"}, True, ""),
])  # fmt: skip
def test_a_licence_that_is_written_needs_the_unit(guest: Guest, states: set[str], image: bool, done: str) -> None:
    applied(guest, spec())
    guest.states = states
    facts = replace(gather(guest), image=ImageFacts() if image else None)
    assert [one.summary() for one in vgpu.plan(source_of(facts, spec()))] == ([done] if done else [])


def test_a_diff_shows_what_becomes_of_each_file(guest: Guest) -> None:
    (change, _) = vgpu.plan(source_of(gather(guest), spec(feature=1)))
    assert TOKEN not in change.summary() + change.diff(guest)
    applied(guest, spec(feature=2))
    assert isinstance(change, vgpu.LicenseVgpu)
    lines = replace(change, token=SECRET).diff(guest).splitlines()
    changed = [one for one in lines if one.startswith(("-", "+"))]
    assert changed[2:4] == ["-FeatureType=2", "+FeatureType=1"] and len(changed) == 5
    assert all(GRIDD_CONFIG in one for one in changed[:2]) and TOKEN in changed[4]
    # The run that installs the driver brings the template later.
    guest.path(GRIDD_TEMPLATE).unlink()
    guest.path(GRIDD_CONFIG).unlink()
    added = [one for one in change.diff(guest).splitlines() if one.startswith("+")]
    assert [one for one in added[1:] if not one.startswith("+#")] == [
        "+FeatureType=1", "+IgnoreSP=FALSE", "+EnableUI=FALSE",
    ]  # fmt: skip


def test_the_removal_of_a_token_is_announced(guest: Guest) -> None:
    applied(guest, spec(feature=1, token=SECRET))
    change, *_ = vgpu.plan(source_of(gather(guest), spec(feature=1)))
    assert change.diff(guest).splitlines()[-1].startswith(f"-{TOKEN} ") and SECRET not in change.diff(guest)
    as_a_run(guest, change)
    assert not guest.exists(TOKEN) and TOKEN not in change.diff(guest)


def test_the_token_is_roots_alone_and_nothing_shows_it(guest: Guest) -> None:
    wanted = spec(feature=1, token=SECRET)
    changes = vgpu.plan(source_of(gather(guest), wanted))
    assert [one.summary() for one in changes] == [
        f"license virtual GPUs: {GRIDD_CONFIG}, {TOKEN}", f"enable and start {GRIDD}",
    ]  # fmt: skip
    assert "+FeatureType=1" in changes[0].diff(guest) and SECRET not in changes[0].diff(guest)
    assert SECRET not in repr(changes) and SECRET not in repr(wanted)
    applied(guest, wanted)
    status = guest.path(TOKEN).stat()
    assert (guest.read_text(TOKEN), status.st_mode & 0o777, status.st_uid) == (SECRET, 0o400, 0)
    # A newer token: the journal of its run must not have the older one either.
    applied(guest, spec(feature=1, token="new"))
    assert guest.read_text(TOKEN) == "new"
    journals = "".join(path.read_text() for path in guest.path("/var/lib/gpuprov").rglob("*") if path.is_file())
    assert "LicenseVgpu" in journals and SECRET not in journals
    events: list[Any] = []
    sink: Sink = secret_free(events.append, spec_to_json(wanted))
    sink(Note(f"nvidia-gridd says: {SECRET} is invalid"))
    assert SECRET not in repr(events) and "***" in repr(events)
    watched = watch.plan(gather(guest), replace(wanted, watch="daily"))
    assert watched and SECRET.encode() not in b"".join(content for _, content, _ in watched[0].files)  # type: ignore[attr-defined]


def test_a_wrong_licence_is_refused_without_showing_the_token() -> None:
    with pytest.raises(GpuprovError) as caught:
        parse_spec({"vgpu": {"feature": 9, "token": SECRET + " and more", "sever": "x"}}, "hosts.yml")
    text = str(caught.value)
    assert "gpuprov_vgpu.feature is not a feature type" in text and "did you mean server?" in text
    assert "gpuprov_vgpu.token is not the content" in text and SECRET not in text
    with pytest.raises(GpuprovError, match=r"^gpuprov_vgpu must be a mapping"):
        parse_spec({"vgpu": f"token={SECRET}"}, "hosts.yml")
    there = parse_spec(json.loads(json.dumps(spec_to_json(spec(token=SECRET)))))
    assert there.vgpu is not None and there.vgpu.token == SECRET


def test_undo_restores_the_configuration_and_removes_the_token(guest: Guest) -> None:
    before = guest.tree()
    applied(guest, spec(feature=1, token=SECRET))
    undo_last(guest)
    assert guest.tree() == before and guest.states == set()
    (change, _) = vgpu.plan(source_of(gather(guest), spec(token=SECRET)))
    assert change.irreversible(guest, change.capture(guest), {}, ()) == ()
    applied(guest, spec(token=SECRET))
    applied(guest, spec(token="new"))
    (change, _) = vgpu.plan(source_of(gather(guest), spec(token="third")))
    assert TOKEN in change.irreversible(guest, change.capture(guest), {}, ())[0]


@pytest.mark.parametrize(("had_folder", "other"), [(True, ""), (False, "another.tok")])
def test_undo_keeps_a_folder_of_tokens_that_others_need(guest: Guest, had_folder: bool, other: str) -> None:
    folder = guest.path(TOKEN).parent
    if had_folder:
        folder.mkdir(parents=True)
    applied(guest, spec(token=SECRET))
    if other:
        (folder / other).write_text("of the site")
    undo_last(guest)
    assert [one.name for one in folder.iterdir()] == ([other] if other else [])


def test_a_driver_that_takes_no_licence_is_named(guest: Guest) -> None:
    guest.path(GRIDD_TEMPLATE).unlink()
    problem = refused(applied, guest, spec(token=SECRET))
    assert "not NVIDIA's GRID driver" in problem.what
    assert GRIDD_TEMPLATE in problem.evidence and "gpuprov_driver_url" in problem.next_step
    assert not guest.exists(TOKEN)


@pytest.mark.parametrize(("licensed_after", "good"), [(0, True), (30, True), (600, False)])
def test_verify_waits_for_the_licence(guest: Guest, licensed_after: float, good: bool) -> None:
    guest.licensed_after = licensed_after
    checks = dict(features.checks(guest, HostSpec()))
    if good:
        assert checks["vGPU licence"]() == ("Licensed (Expiry: N/A)", "")
    else:
        with pytest.raises(Failed, match=r"slow after a day: License Status : Unlicensed \(Unrestricted\); systemctl"):
            checks["vGPU licence"]()


def test_a_template_that_an_earlier_driver_left_waits_for_no_licence(guest: Guest) -> None:
    guest.virtual = False
    assert dict(features.checks(guest, HostSpec()))["vGPU licence"]() == ("Pass-Through", "")
    assert guest.slept == 0
    with pytest.raises(Failed, match="a virtual GPU has no licence"):
        dict(features.checks(guest, spec()))["vGPU licence"]()


def test_virtual_gpu_is_known_by_subsystem_and_needs_grid_driver(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root", gpus=1, metal=True)
    (next(host.path("/sys/bus/pci/devices").iterdir()) / "subsystem_device").write_text("0x1733\n")
    assert gather_gpus(host)[0].subsystem == "1733"
    facts = replace(gather(host), gpus=(PciGpu("0000:31:00.0", "27b8", "", "1733"),))
    assert facts.virtual_gpu == "GPU 0000:31:00.0: L4, PCI subsystem 1733"
    assert replace(facts, gpus=(PciGpu("0000:31:00.0", "27b8", "", "16ca"),)).virtual_gpu == "", "a whole L4"
    for values, is_refused in (
        ({}, True), ({"driver": "packages"}, True), ({"driver": "preinstalled"}, False),
        ({"driver_url": "/srv/grid.run"}, False),
    ):  # fmt: skip
        found = refusals(source_of(facts, parse_spec({"driver_version": "570.237", **values})))
        assert any("GRID driver alone" in one.what for one in found) is is_refused


def test_no_table_of_modules_and_no_fabric_manager_concern_a_virtual_gpu(guest: Guest) -> None:
    fabric = FabricFacts(switches=("0000:87:00.0",), hidden="eight GPUs")
    facts = replace(gather(guest), fabric=fabric, gpus=(PciGpu("0000:31:00.0", "2901"),))
    assert facts.virtual_gpu == f"{GRIDD_TEMPLATE} is there" and facts.gpu_device_ids == ()
    # That file is a sign and no proof: a whole GPU may have had the GRID driver, as a virtual workstation has.
    found = refusals(source_of(facts, parse_spec({"driver_version": "580.95.05"})))
    (problem,) = (one for one in found if "GRID driver alone" in one.what)
    assert "seems to have" in problem.what and "If they are whole GPUs" in problem.next_step
    assert GRIDD_TEMPLATE in problem.evidence and GRIDD_TEMPLATE in problem.next_step
    assert generations.problems(facts.gpu_device_ids, "550.163.01", "proprietary", PACKAGED) == ()
    source = source_of(facts, spec())
    assert fabric_manager.plan(source) == () and fabric_manager.plan_problems(source) == ()


def test_result_shows_neither_login_nor_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    action = object.__new__(loaded(PLAYBOOKS / "plugins/action/agent.py").ActionModule)
    action._templar = SimpleNamespace(template=lambda value: value)
    action._task_vars = {
        "gpuprov_vgpu": {"feature": 1, "token": SECRET},
        "gpuprov_driver_mirror": "https://ops:correct-horse@mirror.example/",
    }
    told = hidden(f"a host says: {SECRET} and correct-horse", secret_forms(action._secrets()))
    assert told == "a host says: *** and ***"
