"""Which specifications engines take, and which CDI version a specification needs: the rules of SPEC.md as tables."""

import json
from dataclasses import replace
from typing import Any

import pytest

from gpuprov.cdi.specification import (
    Device,
    DeviceNode,
    Edits,
    Hook,
    IntelRdt,
    Mount,
    NetDevice,
    Specification,
    minimum_version,
    parse_json,
    problems,
    render_json,
    with_root,
)
from tests.unit.refused import refused

NODE = DeviceNode("/dev/nvidia0", major=195, minor=0)
GPU = Device("gpu0", Edits(device_nodes=(NODE,)))
GOOD = Specification((GPU,), Edits(("A=1",), mounts=(Mount("/a", "/b"),)), {})


def edited(edits: Edits) -> Specification:
    """A specification whose device has these edits."""
    return replace(GOOD, devices=(Device("gpu0", edits),))


def annotated(**annotations: str) -> Specification:
    return replace(GOOD, annotations=annotations)


@pytest.mark.parametrize(
    ("specification", "version"),
    [
        (GOOD, "0.3.0"),
        (edited(Edits(mounts=(Mount("/a", "/b", type="bind"),))), "0.4.0"),
        (edited(Edits(device_nodes=(replace(NODE, host_path="/dev/x"),))), "0.5.0"),
        (replace(GOOD, devices=(replace(GPU, name="0"),)), "0.5.0"),
        (replace(GOOD, kind="nvidia.com/gpu.large"), "0.6.0"),
        (annotated(a="b"), "0.6.0"),
        (replace(GOOD, devices=(replace(GPU, annotations={"a": "b"}),)), "0.6.0"),
        (edited(Edits(additional_gids=(44,))), "0.7.0"),
        (edited(Edits(intel_rdt=IntelRdt("guaranteed"))), "0.7.0"),
        (edited(Edits(intel_rdt=IntelRdt(enable_monitoring=True))), "1.1.0"),
        (edited(Edits(intel_rdt=IntelRdt(schemata=("L3:0=ff",)))), "1.1.0"),
        (edited(Edits(net_devices=(NetDevice("eth1", "eth0"),))), "1.1.0"),
        # What all devices share counts as well.
        (replace(GOOD, edits=Edits(mounts=(Mount("/a", "/b", type="bind"),))), "0.4.0"),
        (replace(GOOD, edits=Edits(additional_gids=(44,))), "0.7.0"),
        (replace(GOOD, edits=Edits(net_devices=(NetDevice("eth1", "eth0"),))), "1.1.0"),
    ],
)
def test_the_lowest_version_that_will_do(specification: Specification, version: str) -> None:
    assert minimum_version(specification) == version
    assert problems(specification) == ()
    assert parse_json(render_json(specification)) == replace(specification, declared_version=version)


def test_a_declared_version_stays_and_may_be_higher() -> None:
    for version in ("0.3.0", "v0.5.0", "1.0.0", "1.1.0"):
        declared = replace(GOOD, declared_version=version)
        assert problems(declared) == ()
        assert parse_json(render_json(declared)) == declared


@pytest.mark.parametrize(
    ("specification", "says"),
    [
        (replace(GOOD, declared_version="0.2.0"), "CDI version 0.2.0 is below 0.3.0"),
        (replace(annotated(a="b"), declared_version="v0.5.0"), "CDI version 0.5.0 is below 0.6.0"),
        (replace(GOOD, declared_version="0.9.0"), "no CDI version '0.9.0'"),
        (replace(GOOD, declared_version="1"), "no CDI version '1'"),
        (replace(GOOD, kind="nvidia.com"), "no kind"),
        (replace(GOOD, kind="/gpu"), "no kind"),
        (replace(GOOD, kind="nvidia.com/"), "no kind"),
        (replace(GOOD, kind="1nvidia.com/gpu"), "no kind"),
        (replace(GOOD, kind="nvidia.com/gpu-"), "no kind"),
        (replace(GOOD, kind="nvidia.com/gp/u"), "no kind"),
        (replace(GOOD, kind="nvidiä.com/gpu"), "no kind"),
        (annotated(**{"a b": "c"}), "no key for an annotation"),
        (annotated(**{"-.com/a": "c"}), "no key for an annotation"),
        (annotated(**{"a/b/c": "d"}), "no key for an annotation"),
        (annotated(**{"x" * 64: "d"}), "no key for an annotation"),
        (annotated(a="b" * (256 << 10)), "bytes of annotations"),
        (replace(GOOD, devices=()), "there is no device"),
        (replace(GOOD, devices=(GPU, GPU)), "'gpu0' stands there more than once"),
        (replace(GOOD, devices=(replace(GPU, name=""),)), "no name for a device"),
        (replace(GOOD, devices=(replace(GPU, name="gpu/0"),)), "no name for a device"),
        (replace(GOOD, devices=(replace(GPU, name="d=e"),)), "no name for a device"),
        (replace(GOOD, devices=(replace(GPU, name=":0"),)), "no name for a device"),
        (replace(GOOD, devices=(replace(GPU, name="0:"),)), "no name for a device"),
        (edited(Edits()), "device 'gpu0' brings nothing"),
        (edited(Edits(env=("A",))), "'A' is no NAME=VALUE"),
        (edited(Edits(env=("=A",))), "'=A' is no NAME=VALUE"),
        (edited(Edits(device_nodes=(replace(NODE, path=""),))), "has no path"),
        (edited(Edits(device_nodes=(replace(NODE, type="d"),))), "type 'd'"),
        (edited(Edits(device_nodes=(replace(NODE, permissions="rwx"),))), "permissions 'rwx'"),
        (edited(Edits(device_nodes=(replace(NODE, permissions="nonem"),))), "permissions 'nonem'"),
        (edited(Edits(mounts=(Mount("", "/b"),))), "lacks a path"),
        (edited(Edits(mounts=(Mount("/a", ""),))), "lacks a path"),
        (edited(Edits(hooks=(Hook("preStart", "/h"),))), "no hook 'preStart'"),
        (edited(Edits(hooks=(Hook("prestart", ""),))), "a hook has no path"),
        (edited(Edits(hooks=(Hook("prestart", "/h", env=("A",)),))), "'A' is no NAME=VALUE"),
        (edited(Edits(intel_rdt=IntelRdt(".."))), "no closID"),
        (edited(Edits(intel_rdt=IntelRdt("a/b"))), "no closID"),
        (edited(Edits(intel_rdt=IntelRdt("a\nb"))), "no closID"),
        (edited(Edits(intel_rdt=IntelRdt("a" * 4096))), "no closID"),
        (edited(Edits(net_devices=(NetDevice("", "a"),))), "lacks a name"),
        (edited(Edits(net_devices=(NetDevice("a", "c"), NetDevice("b", "c")))), "'c' stands there twice"),
        (edited(Edits(net_devices=(NetDevice("a", "b"), NetDevice("a", "c")))), "'a' stands there twice"),
    ],
)
def test_what_engines_refuse(specification: Specification, says: str) -> None:
    (problem,) = problems(specification)
    assert says in problem
    # The same fault in what all devices share.
    if specification.devices and specification.devices[0].edits not in (GPU.edits, Edits()):
        (problem,) = problems(replace(GOOD, edits=specification.devices[0].edits))
        assert says in problem and problem.startswith("all devices: ")


@pytest.mark.parametrize(
    "specification",
    [
        replace(GOOD, kind="a/b"),
        replace(GOOD, kind="vendor_1.x-y/class_1-2"),
        replace(GOOD, devices=(replace(GPU, name="0000:1b:00.0"), replace(GPU, name="a"), replace(GPU, name="all"))),
        annotated(**{"gpuprov.io/driver-version": "550", "Upper.Case/Name_1": "", "x": "y"}),
        edited(Edits(env=("A=", "B==", "A=2"))),
        edited(Edits(device_nodes=tuple(replace(NODE, type=kind) for kind in ("", "b", "c", "u", "p")))),
        edited(Edits(device_nodes=tuple(replace(NODE, permissions=some) for some in ("", "r", "mwr", "none")))),
        edited(Edits(hooks=(Hook("createContainer", "/h", ("h", "x"), ("A=1",), 5),))),
        edited(Edits(intel_rdt=IntelRdt("/"))),
        edited(Edits(additional_gids=(0, 44, 44))),
    ],
)
def test_what_engines_take(specification: Specification) -> None:
    assert problems(specification) == ()
    assert parse_json(render_json(specification)) == replace(specification, declared_version=specification.version)


def document(**changes: Any) -> bytes:
    """A good document with these keys changed; None takes one away."""
    found = {**json.loads(render_json(GOOD)), **changes}
    return json.dumps({key: value for key, value in found.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "Expecting value"),
        (b"null", "Specification is not an object"),
        (b"[]", "Specification is not an object"),
        (b"\xff{}", "can't decode"),
        (b'{"kind": "a/b", "kind": "a/b"}', "'kind' twice in one object"),
        (b"[" * 200_000, "nested too deeply"),
        (document(spec=1), "unknown in Specification: spec"),
        (document(cdiVersion=1), "cdiVersion is not a text"),
        (document(cdiVersion=None), "cdiVersion is missing"),
        (document(annotations=[]), "annotations is not an object"),
        (document(annotations={"a": 1}), "annotations.a is not a text"),
        (document(devices={}), "devices is not a list"),
        (document(devices=[None]), "devices[0] is not an object"),
        (document(devices=[{"name": "0", "edits": {}}]), "unknown in Specification.devices[0]: edits"),
        (document(containerEdits={"env": "A=1"}), "containerEdits.env is not a list"),
        (
            document(containerEdits={"deviceNodes": [{"path": "/dev/a", "major": 1.0}]}),
            "containerEdits.deviceNodes[0].major is not a whole number",
        ),
        (document(containerEdits={"deviceNodes": [{"major": True}]}), "major is not a whole number"),
        (document(containerEdits={"additionalGids": [None]}), "additionalGids[0] is not a whole number"),
        (document(containerEdits={"intelRdt": {"enableCMT": 1}}), "enableCMT is not true or false"),
        (document(containerEdits={"mounts": [{"hostPath": "/a", "source": "/a"}]}), "mounts[0]: source"),
    ],
)  # fmt: skip
def test_what_is_no_specification_is_named_by_its_place(content: bytes, says: str) -> None:
    problem = refused(parse_json, content)
    assert problem.what == "this is no CDI specification"
    assert says in problem.evidence


def test_a_key_that_is_missing_means_none() -> None:
    """Not what a dataclass's own default says: an engine takes a node without numbers from the host's node."""
    content = document(containerEdits={"deviceNodes": [{"path": "/dev/a"}], "mounts": [{"hostPath": "/a"}]})
    (node,) = parse_json(content).edits.device_nodes
    assert node == DeviceNode("/dev/a", permissions="", type="")
    assert parse_json(content).edits.mounts == (Mount("/a", "", ()),)
    assert parse_json(document(containerEdits=None)).edits == Edits()
    # As a key without a value in YAML: engines take it as an empty text, too.
    assert parse_json(document(annotations={"a": None})).annotations == {"a": ""}
    assert problems(parse_json(b'{"cdiVersion": "0.3.0"}')) == (
        "'' is no kind such as nvidia.com/gpu", "there is no device in it",
    )  # fmt: skip


def test_zero_is_written() -> None:
    node = replace(NODE, major=0, minor=0, uid=0, gid=0, file_mode=0)
    written = json.loads(render_json(edited(Edits(device_nodes=(node,)))))["devices"][0]["containerEdits"]
    assert {written["deviceNodes"][0][key] for key in ("major", "minor", "uid", "gid", "fileMode")} == {0}


# -- paths below another root ------------------------------------------------------------------------------------------
def of(common: Edits, **devices: Edits) -> Specification:
    return Specification(tuple(Device(name, edits) for name, edits in devices.items()), common, {})


@pytest.mark.parametrize(
    ("path", "source", "target", "moved"),
    [
        ("/usr/lib/x", "/", "/host", "/host/usr/lib/x"),
        ("/usr/lib/x", "/usr", "/opt", "/opt/lib/x"),
        ("/usr", "/usr", "/opt", "/opt"),
        ("/usrlocal/x", "/usr", "/opt", "/usrlocal/x"),
        ("/host/usr/x", "/host", "/", "/usr/x"),
        ("/host/usr/x", "/host/", "/", "/usr/x"),
        ("/usr/lib/x", "/usr", "/opt/../srv", "/srv/lib/x"),
        ("/etc/x", "/usr", "/opt", "/etc/x"),
    ],
)
def test_paths_move_at_a_boundary_and_are_cleaned(path: str, source: str, target: str, moved: str) -> None:
    found = with_root(of(Edits(mounts=(Mount(path, "/c"),))), source, target)
    assert found.edits.mounts == (Mount(moved, "/c"),)


def hooks(specification: Specification) -> list[tuple[str, tuple[str, ...]]]:
    return [(hook.path, hook.args) for hook in specification.edits.hooks]


HOOKS = tuple(
    Hook(stage, "/a/hook", ("hook", "/a/x::/a/y", "--plain"))
    for stage in ("createRuntime", "createContainer", "startContainer")
)


def test_on_the_host_side_move_sources_nodes_and_the_hooks_that_run_there() -> None:
    edits = Edits(device_nodes=(DeviceNode("/a/dev"), DeviceNode("/c", host_path="/a/c")), hooks=HOOKS,
                  mounts=(Mount("/a/m", "/a/m"),))  # fmt: skip
    found = with_root(of(edits, x=edits), "/a", "/b")
    for one in (found.edits, found.devices[0].edits):
        assert [(node.path, node.host_path) for node in one.device_nodes] == [("/a/dev", "/b/dev"), ("/c", "/b/c")]
        assert one.mounts == (Mount("/b/m", "/a/m"),)
    assert hooks(found) == [
        ("/b/hook", ("hook", "/b/x::/b/y", "--plain")),
        ("/b/hook", ("hook", "/a/x::/a/y", "--plain")),
        ("/a/hook", ("hook", "/a/x::/a/y", "--plain")),
    ]


def test_a_node_moved_onto_its_own_path_needs_no_host_path() -> None:
    edits = Edits(device_nodes=(DeviceNode("/b/dev", host_path="/a/dev"),))
    assert with_root(of(edits), "/a", "/b").edits.device_nodes[0].host_path == ""


def test_on_the_containers_side_move_targets_and_the_hooks_that_run_there() -> None:
    edits = Edits(device_nodes=(DeviceNode("/a/dev"),), hooks=HOOKS, mounts=(Mount("/a/m", "/a/m"),))
    found = with_root(of(edits), "/a", "/b", relative_to="container")
    assert [(node.path, node.host_path) for node in found.edits.device_nodes] == [("/b/dev", "")]
    assert found.edits.mounts == (Mount("/a/m", "/b/m"),)
    assert hooks(found) == [
        ("/a/hook", ("hook", "/a/x::/a/y", "--plain")),
        ("/a/hook", ("hook", "/b/x::/b/y", "--plain")),
        ("/b/hook", ("hook", "/b/x::/b/y", "--plain")),
    ]
