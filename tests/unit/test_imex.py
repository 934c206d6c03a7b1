"""IMEX on a host: by model and variable, in the driver's version, with the domain's list, and back again."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprov.boot import program_main
from gpuprov.core.commands import Completed
from gpuprov.driver import cuda_repository, imex
from gpuprov.driver.source import DriverSource
from gpuprov.facts.gpus import IMEX_CONFIG as CONFIG
from gpuprov.facts.gpus import IMEX_NODES as NODES
from gpuprov.facts.gpus import IMEX_UNIT as UNIT
from gpuprov.facts.gpus import FabricFacts
from gpuprov.facts.host import HostFacts, gather
from gpuprov.packages.apt_changes import HoldPackages, RemovePackages
from gpuprov.packages.interface import HELD_LIST, LockFacts
from gpuprov.packages.managers import manager_of
from gpuprov.packages.rpm import InstallRpmPackages
from gpuprov.plan import software
from gpuprov.plan.context import source_of
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import Event, Finished
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, parse_spec, spec_to_json
from tests import simgpu
from tests.imex_stand_in import PACKAGED_CONFIG, settings_of
from tests.unit.ask import ask
from tests.unit.imex_host import LIST, VERSION, Node, Rack
from tests.unit.refused import refused
from tests.unit.test_fabric_manager import with_gpus

pytestmark = pytest.mark.root
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
OPTION, CREATE = "/etc/modprobe.d/gpuprov-imex.conf", "options nvidia NVreg_CreateImexChannel0=1\n"
# Those that need no network.
STEPS = ("driver", "device nodes")


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver": "preinstalled", "docker": "preinstalled", **values})


def of_domain(nodes: Sequence[str] = LIST, **values: Any) -> HostSpec:
    return spec(**{"imex": "service", "imex_domain": "rack1", "imex_nodes": list(nodes), **values})


@pytest.fixture
def domain(tmp_path: Path) -> list[Node]:
    rack = Rack()
    made = [Node(tmp_path / f"gpu{number}", rack, f"10.0.0.{number}") for number in (1, 2, 3)]
    for node in made:
        simgpu.install_tree(node.root)
    return made


@pytest.fixture
def node(domain: list[Node]) -> Node:
    return domain[0]


@pytest.fixture
def whole(domain: list[Node]) -> list[Node]:
    """A domain that is installed on each of its nodes."""
    for node in domain:
        install(node, of_domain())
    return domain


def with_newer_driver(node: Node) -> HostFacts:
    facts = gather(node)
    return replace(facts, driver=replace(facts.driver, library_version=VERSION), has_module=True)


def request(host: Node, wanted: HostSpec, command: str = "install", **more: Any) -> tuple[Finished, list[Event]]:
    steps = STEPS if command == "install" else ()
    return ask(host, Request(command, spec_to_json(wanted), steps=steps, **more))


def install(host: Node, wanted: HostSpec) -> Finished:
    finished, _ = request(host, wanted)
    assert finished.exit_code == 0, finished
    return finished


# -- what is planned, by model and variable ----------------------------------------------------------------------------

RUN, STOP = f"enable and restart {UNIT} ({VERSION}) with 3 nodes", f"stop and disable {UNIT}"
MASK = f"stop, disable and mask {UNIT}"
# Device id, variables → the last change, and whether the plan warns.
PLANNED: list[tuple[str, dict[str, Any], str, bool]] = [
    ("2941", {"imex_nodes": LIST}, RUN, False), ("31c2", {"imex_nodes": LIST}, RUN, False),
    ("2941", {}, "", True), ("31c2", {"imex": "off"}, "", False), ("2941", {"imex": "dra"}, MASK, False),
    ("2941", {"imex": False, "imex_nodes": LIST}, "", False), ("27b8", {}, "", False),
    ("2941", {"imex": "service", "imex_nodes": LIST}, RUN, False),
    ("2330", {"imex_nodes": LIST}, "", False), ("2901", {}, "", False), ("2342", {}, "", False),
    ("2330", {"imex": "service", "imex_nodes": LIST}, RUN, False), ("2342", {"imex": "dra"}, MASK, False),
]  # fmt: skip


def source(facts: HostFacts, **values: Any) -> DriverSource:
    return source_of(facts, parse_spec({"driver_version": VERSION, **values}))


@pytest.mark.parametrize(("device_id", "values", "last", "warns"), PLANNED, ids=str)
def test_what_a_model_plans(tmp_path: Path, device_id: str, values: dict[str, Any], last: str, warns: bool) -> None:
    driver = source(gather(with_gpus(tmp_path / "root", device_id, 4)), **values)
    changes = [change.key for change in imex.plan(driver)]
    assert changes[-1:] == ([last] if last else [])
    assert bool(imex.warning(driver)) == warns
    installs = [f"install nvidia-imex={VERSION}-*"] if last else []
    assert [key for key in changes if key.startswith("install")] == installs
    assert bool(cuda_repository.repositories(driver)) == bool(last)
    assert imex.problems(driver) == ()


ACTIVE, ENABLED = {"active": True}, {"enabled": True}
OLDER, NAMESAKE = {"nvidia-imex-570": "570.1-1", "docker-ce": "29"}, {"nvidia-imex": "580.1-1"}
FREE, REMOVE = "no longer hold nvidia-imex-570", "remove nvidia-imex-570"
INSTALL = f"install nvidia-imex={VERSION}-*"
# The unit, the packages, gpuprov_imex → the changes.
FOUND: list[tuple[dict[str, Any], dict[str, str], str, list[str]]] = [
    ({"version": "570.1"}, OLDER, "off", []), (ACTIVE, OLDER, "off", [STOP]), (ENABLED, OLDER, "off", [STOP]),
    ({"version": VERSION}, {}, "dra", [MASK]), ({"version": "570.1"}, OLDER, "dra", [FREE, REMOVE, INSTALL, MASK]),
    (ACTIVE, OLDER, "dra", [FREE, STOP, REMOVE, INSTALL, MASK]), (ACTIVE, NAMESAKE, "dra", [INSTALL, MASK]),
    (ENABLED, OLDER, "dra", [FREE, STOP, REMOVE, INSTALL, MASK]),
]  # fmt: skip


@pytest.mark.parametrize(("unit", "packages", "mode", "planned"), FOUND, ids=str)
def test_what_is_planned_by_what_is_there(
    tmp_path: Path, unit: dict[str, Any], packages: dict[str, str], mode: str, planned: list[str]
) -> None:
    facts = gather(with_gpus(tmp_path / "root", "2941", 1))
    there = replace(facts, imex=FabricFacts(**unit), packages=replace(facts.packages, installed=packages))
    keys = [change.key.partition(" (")[0] for change in imex.plan(source(there, imex=mode))]
    assert [key for key in keys if "index" not in key] == planned


@pytest.mark.parametrize("bundle", [None, SimpleNamespace(vendor_keys=())], ids=["sources", "bundle"])
def test_packages_of_bundle_or_past_streams(tmp_path: Path, bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostFacts, "package_manager", manager_of(None, "dnf"))
    facts = replace(gather(with_gpus(tmp_path / "root", "2941", 1)), bundle=bundle)
    (install,) = (one for one in imex.plan(source(facts, imex="dra")) if isinstance(one, InstallRpmPackages))
    assert ("--setopt=gpuprov-cuda.module_hotfixes=1" in install.options) == (bundle is None)


def test_the_plan_of_a_rack_host_without_a_domain_warns(tmp_path: Path) -> None:
    host = with_gpus(tmp_path / "root", "2941", 4)
    simgpu.install_tree(host.root)
    plan = make_plan(gather(host), spec(), ())
    assert any("set gpuprov_imex_domain in the inventory" in one for one in plan.warnings)


@pytest.mark.parametrize("values", [{"driver": "packages"}, {"driver_mirror": "https://mirror.example"}], ids=str)
def test_a_branch_takes_the_version_of_the_installed_driver(tmp_path: Path, values: dict[str, Any]) -> None:
    facts = gather(with_gpus(tmp_path / "root", "2941", 1))
    there = replace(facts, driver=replace(facts.driver, library_version=VERSION))
    wanted = {**values, "driver_version": "580", "imex": "dra"}
    assert [imex.wanted_version(source(one, **wanted)) for one in (facts, there)] == ["", VERSION]


def test_in_a_system_container_it_is_the_container_hosts_unless_asked_for(tmp_path: Path) -> None:
    facts = gather(with_gpus(tmp_path / "root", "2941", 4))
    inside = replace(facts, kernel=replace(facts.kernel, container="lxc"))
    assert imex.plan(source(inside, imex_nodes=LIST)) == ()
    assert imex.plan(source(inside, imex_nodes=LIST, imex="service"))[-1].key == RUN


@pytest.mark.parametrize(
    ("version", "manager", "own", "name"),
    [
        ("570.195.03", "apt", "", "nvidia-imex-570=570.195.03-*"), ("580.95.05", "apt", "", "nvidia-imex=580.95.05-*"),
        ("570.195.03", "dnf", "", "nvidia-imex-570=570.195.03"), ("580.95.05", "zypper", "", "nvidia-imex=580.95.05"),
        ("580.95.05", "apt", "nvidia-fabricmanager-580", "nvidia-imex-580=580.95.05-*"),
    ],
)  # fmt: skip
def test_the_package_is_named_as_its_repository_names_it(
    tmp_path: Path, version: str, manager: str, own: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = gather(with_gpus(tmp_path / "root", "2941", 1))
    driver = source(facts, imex="dra", driver_version=version)
    monkeypatch.setattr(type(driver), "fabric_package", lambda _: own)
    monkeypatch.setattr(HostFacts, "package_manager", manager_of(None, manager))
    assert imex.wanted_packages(driver) == (name,)
    assert bool(cuda_repository.repositories(driver)) == (not own)
    held = replace(facts, packages=replace(facts.packages, locks=LockFacts(missing_plugin=("plugin",))))
    assert "plugin" in software.wanted(replace(driver, facts=held))


@pytest.mark.parametrize("values", [{}, {"imex_nodes": LIST, "target": "image"}], ids=["no list", "an image"])
def test_a_service_without_a_list_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    facts = gather(with_gpus(tmp_path / "root", "2941", 1))
    image = replace(facts, image=None if not values else object())  # type: ignore[arg-type]
    (problem,) = imex.problems(source(image, imex="service", **values))
    assert problem.what == "the nodes of this host's IMEX domain are not known"
    assert problem.evidence and problem.next_step


WRONG = [
    ({"imex": "on"}, "imex"), ({"imex_nodes": ["gpu1"]}, "is not an address"), ({"imex_quorum": "some"}, "imex_quorum"),
    ({"imex_settings": ["IMEX_NODE_CONFIG_FILE=/x"]}, "have options of their own"),
    ({"imex_settings": ["IMEX_SERVER_KEY=/x\nA=1"]}, "KEY=VALUE"),
    ({"imex_nodes": ["10.0.0.1 a b"]}, "is not an address"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "said"), WRONG, ids=str)
def test_wrong_values_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(GpuprovError, match=said):
        parse_spec(values)


def test_off_is_what_yaml_makes_of_it() -> None:
    assert parse_spec({"imex": False}).imex == parse_spec({"imex": "off"}).imex == "off"
    assert parse_spec(spec_to_json(of_domain())) == of_domain()


# -- the files ---------------------------------------------------------------------------------------------------------


def test_config_cfg_keeps_other_keys_and_has_each_key_once(node: Node) -> None:
    def config(wanted: HostSpec) -> dict[str, str]:
        install(node, wanted)
        assert summaries(node, wanted) == []
        return settings_of(node.read_text(CONFIG) or "")

    install(node, of_domain())
    node.write(CONFIG, ("SITE=1\nIMEX_CMD_PORT=1=2\n" + PACKAGED_CONFIG.replace(NODES, "/list")).encode())
    found = config(
        of_domain(imex_quorum="none", imex_settings=["IMEX_ENABLE_AUTH_ENCRYPTION=1", "IMEX_CMD_PORT=50010"])
    )
    assert {key: found[key] for key in ("SITE", "LOG_LEVEL", "SERVER_PORT")} == {
        "SITE": "1", "LOG_LEVEL": "4", "SERVER_PORT": "50000",
    }  # fmt: skip
    assert {key: found[key] for key in found if key.startswith("IMEX")} == {
        "IMEX_NODE_CONFIG_FILE": NODES, "IMEX_WAIT_FOR_QUORUM": "NONE", "IMEX_ENABLE_AUTH_ENCRYPTION": "1",
        "IMEX_CMD_ENABLED": "1", "IMEX_CMD_PORT": "50010",
    }  # fmt: skip
    without = config(of_domain())
    assert "IMEX_ENABLE_AUTH_ENCRYPTION" not in without, "a setting that is taken back"
    assert without["IMEX_CMD_PORT"] == "50005"


# -- a domain of hosts -------------------------------------------------------------------------------------------------


def test_a_domain_comes_up_with_one_list_on_all_nodes(domain: list[Node]) -> None:
    for node in domain:
        assert any(one.startswith("enable and restart") for one in summaries(node, of_domain()))
        install(node, of_domain())
        assert install(node, of_domain()).changed == 0
    texts = {(node.read_text(NODES), node.read_text(CONFIG)) for node in domain}
    assert len(texts) == 1
    assert next(iter(texts))[0] == "10.0.0.1\n10.0.0.2\n10.0.0.3\n"
    for node in domain:
        assert imex.verify_domain(node, of_domain()) == ("rack1, 3 nodes", "")
        assert CREATE in (node.read_text(OPTION) or "")
        there = node.status(CHANNEL)
        assert there is not None and (there.kind, there.major, there.minor, there.mode) == ("char", 239, 0, 0o666)
        assert "nvidia-imex-550" in node.held


def summaries(node: Node, wanted: HostSpec) -> list[str]:
    plan = make_plan(gather(node), wanted, STEPS)
    assert plan.problems == ()
    return [one.change.summary() for one in plan.changes]


def test_check_mode_shows_the_files_and_changes_nothing(domain: list[Node]) -> None:
    before = domain[0].state()
    _, events = request(domain[0], of_domain(), check=True, diff=True)
    assert domain[0].state() == before
    text = str(events)
    assert "+10.0.0.1" in text and "NVreg_CreateImexChannel0=1" in text and "IMEX_WAIT_FOR_QUORUM=RECOVERY" in text


@pytest.mark.parametrize("command", ["rollback", "uninstall"])
def test_rollback_and_uninstall_take_it_back(node: Node, command: str) -> None:
    before = node.state()
    install(node, of_domain())
    finished, _ = request(node, of_domain(), command)
    assert finished.exit_code == 0, finished
    assert node.state() == before
    assert (node.rack.running, node.enabled) == ({}, False)


def test_one_that_served_before_gets_its_own_files_back(node: Node) -> None:
    install(node, of_domain())
    first = node.state()
    install(node, of_domain(LIST[:2]))
    assert node.rack.running[node.address]["nodes"] == ["10.0.0.1", "10.0.0.2"]
    assert request(node, of_domain(), "rollback")[0].exit_code == 0
    assert node.state() == first
    assert node.rack.running[node.address]["nodes"] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def fault(node: Node, wanted: HostSpec) -> str:
    with pytest.raises(GpuprovError, match="the IMEX domain rack1 is not whole") as raised:
        imex.verify_domain(node, wanted)
    return raised.value.problems[0].evidence


def test_a_missing_node_is_named(whole: list[Node]) -> None:
    whole[2].rack.running.pop(whole[2].address)
    assert fault(whole[0], of_domain()) == "it is DEGRADED; gpu3 (10.0.0.3) is UNAVAILABLE"


def test_nodes_with_other_lists_or_versions_are_named(whole: list[Node]) -> None:
    install(whole[1], of_domain(LIST[1::-1] + LIST[2:]))
    assert "gpu1 (10.0.0.1) to gpu2 (10.0.0.2): NODE_MAP_MISMATCH" in fault(whole[0], of_domain())
    whole[1].rack.running[whole[1].address] = {**whole[0].rack.running[whole[0].address], "version": "535.261.03"}
    assert "gpu2 (10.0.0.2) to gpu1 (10.0.0.1): VERSION_MISMATCH" in fault(whole[0], of_domain())


def test_a_daemon_with_an_old_list_is_told(node: Node) -> None:
    install(node, of_domain())
    assert "has other nodes: 10.0.0.1, 10.0.0.2, 10.0.0.3" in fault(node, of_domain(LIST[:2]))


def answering(monkeypatch: pytest.MonkeyPatch, node: Node, start: tuple[str, ...], code: int, text: str) -> None:
    """Let commands that begin with these words answer."""
    plain = node.run

    def run(argv: Sequence[str], **more: Any) -> Completed:
        words = tuple(argv)
        return Completed(words, code, text) if words[: len(start)] == start else plain(argv, **more)

    monkeypatch.setattr(node, "run", run)


def test_it_waits_for_nodes_that_connect_late(whole: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    late = whole[0].rack.running.pop("10.0.0.2")
    monkeypatch.setattr(whole[0], "sleep", lambda seconds: whole[0].rack.running.update({"10.0.0.2": late}))
    assert imex.verify_domain(whole[0], of_domain()) == ("rack1, 3 nodes", "")


def test_a_replaced_node_gets_the_same_list_and_the_others_change_nothing(whole: list[Node], tmp_path: Path) -> None:
    whole[1].rack.running.pop("10.0.0.2")
    new = Node(tmp_path / "new", whole[0].rack, "10.0.0.2")
    simgpu.install_tree(new.root)
    assert [install(node, of_domain()).changed for node in (whole[0], whole[2])] == [0, 0]
    install(new, of_domain())
    assert imex.verify_domain(new, of_domain()) == ("rack1, 3 nodes", "")


def test_an_upgrade_over_branches_removes_the_package_with_the_other_name(node: Node) -> None:
    install(node, of_domain())
    newer = with_newer_driver(node)
    summaries = [one.summary() for one in imex.plan(source_of(newer, of_domain()))]
    assert summaries[0] == "no longer hold nvidia-imex-550"
    assert summaries[1] == STOP
    assert summaries[2].startswith("remove nvidia-imex-550 (") and f"{CONFIG} stays" in summaries[2]
    assert summaries[-2].startswith(f"install nvidia-imex={VERSION}-*") and summaries[-1] == RUN


def test_an_upgrade_unmasks_the_unit_before_the_packages_scripts(node: Node) -> None:
    install(node, spec(imex="dra"))
    newer = with_newer_driver(node)
    found = [one.summary() for one in imex.plan(source_of(newer, spec(imex="dra")))]
    assert (found[0], found[-1]) == (f"unmask {UNIT} for its package", MASK)
    assert any(one.startswith("remove nvidia-imex-550") for one in found[1:-1])


def test_a_rollback_over_branches_starts_the_former_imex(node: Node) -> None:
    install(node, of_domain())
    planned = imex.plan(source_of(with_newer_driver(node), of_domain()))
    # What is undone after the removal, when the former package is there again.
    (stop,) = (one for one in planned[: [type(one) for one in planned].index(RemovePackages)] if one.disturbs)
    before = stop.capture(node)
    stop.apply(node, lambda *_: None)
    assert node.address not in node.rack.running and not node.enabled
    stop.undo(node, before, None)
    assert node.address in node.rack.running and node.enabled


def test_unknown_state_of_imex_changes_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (change,) = (one for one in imex.plan(source_of(gather(node), of_domain())) if one.disturbs)
    run = node.run
    ask_for = ("systemctl", "is-active", "--quiet", UNIT)
    monkeypatch.setattr(
        node, "run", lambda argv, **more: Completed(ask_for, 124) if argv == ask_for else run(argv, **more)
    )
    assert refused(change.capture, node).what == f"systemd does not tell about {UNIT}"


@pytest.mark.parametrize("updates", ["hold", "follow"])
def test_the_package_that_is_removed_is_not_held_by_then(node: Node, updates: str) -> None:
    wanted = of_domain(driver_updates=updates)
    install(node, wanted)
    node.held.clear()
    node.remove(HELD_LIST)
    newer = with_newer_driver(node)
    planned = [one.change for one in make_plan(newer, wanted, ("packages", "driver")).changes]
    kinds = [type(change) for change in planned]
    held_before: list[bool] = []
    for change in planned[: kinds.index(RemovePackages)]:
        change.apply(node, lambda *_: None)
        held_before += ["nvidia-imex-550" in node.held] if isinstance(change, HoldPackages) else []
    # apt-get removes no held package.
    assert held_before == ([True, False] if updates == "hold" else [])


def test_a_crash_between_files_and_restart_restarts_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    new = of_domain(LIST[:2])
    install(node, of_domain())
    plain = node._systemctl

    def cut(words: tuple[str, ...]) -> tuple[int, str]:
        if words == ("restart", UNIT):
            raise KeyboardInterrupt
        return plain(words)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(node, "_systemctl", cut)
        request(node, new)
    assert install(node, new).exit_code == 0
    assert node.rack.running[node.address]["nodes"] == ["10.0.0.1", "10.0.0.2"]


def test_dra_installs_and_masks_the_unit_until_it_is_undone(node: Node) -> None:
    wanted = spec(imex="dra")
    install(node, wanted)
    assert (node.version, node.enabled, node.masked, node.rack.running) == ("550.163.01", False, True, {})
    assert node.read_text(OPTION) is None
    assert install(node, wanted).changed == 0
    node.masked = False
    assert install(node, wanted).changed == 1
    install(node, of_domain())
    assert node.enabled and node.rack.running and not node.masked
    assert request(node, of_domain(), "rollback")[0].exit_code == 0
    assert node.masked and not node.rack.running
    install(node, of_domain())
    install(node, spec(imex=False))
    assert (node.version, node.enabled, node.rack.running, node.read_text(OPTION)) == ("550.163.01", False, {}, None)
    assert request(node, of_domain(), "rollback")[0].exit_code == 0
    assert node.enabled and node.rack.running
    for undo in ("rollback", "uninstall"):
        install(node, wanted)
        assert node.masked
        assert request(node, wanted, undo)[0].exit_code == 0
        assert not node.masked


def test_a_unit_that_does_not_start_says_why(node: Node) -> None:
    install(node, spec(imex="dra"))
    finished, _ = request(node, of_domain(["10.0.0.8 a", "10.0.0.9 b"]))
    assert (finished.exit_code, finished.problems[0].what) == (1, f"{UNIT} does not start")
    assert "failed" in finished.problems[0].evidence and finished.problems[0].next_step
    assert node.read_text(CONFIG) == PACKAGED_CONFIG and node.read_text(NODES) is None


def test_a_unit_that_waits_for_a_quorum_is_started(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, node, ("systemctl", "restart", UNIT), 1, "timed out")
    answering(monkeypatch, node, ("systemctl", "is-active", UNIT), 3, "activating\n")
    install(node, of_domain(imex_quorum="full"))
    assert gather(node).imex == FabricFacts(version="550.163.01", active=True, enabled=True)
    assert "IMEX_WAIT_FOR_QUORUM=FULL" in (node.read_text(CONFIG) or "")


# -- channel 0 ---------------------------------------------------------------------------------------------------------


def test_channel_0_is_made_again_at_each_boot_where_the_option_says_so(domain: list[Node]) -> None:
    node = domain[0]
    node.make_directory("/etc/modprobe.d")
    node.write(OPTION, CREATE.encode())
    program_main.make_nodes(node)
    there = node.status(CHANNEL)
    assert there is not None and (there.major, there.minor) == (239, 0)
    program_main.make_nodes(domain[1])
    assert domain[1].status(CHANNEL) is None


def test_a_channel_that_is_lost_is_planned(node: Node) -> None:
    install(node, of_domain())
    node.remove(CHANNEL)
    assert summaries(node, of_domain()) == [f"make device node {CHANNEL} (c 239:0)"]
