"""Changes to a whole specification."""

from __future__ import annotations

import pytest

from gpuprov.cdi.specification import Device, DeviceNode, Edits, Hook, Mount, Specification
from gpuprov.cdi.transform import deduplicated, in_order, simplified, with_merged_device, with_root
from gpuprov.wire.errors import GpuprovError


def of(common: Edits, **devices: Edits) -> Specification:
    return Specification(tuple(Device(name, edits) for name, edits in devices.items()), common, {})


NODE, OTHER_NODE = DeviceNode("/dev/nvidia0", 195, 0), DeviceNode("/dev/nvidia1", 195, 1)
MOUNT = Mount("/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.1")


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
    edits = Edits(device_nodes=(DeviceNode("/a/dev", 1, 1), DeviceNode("/c", 1, 1, host_path="/a/c")), hooks=HOOKS,
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
    edits = Edits(device_nodes=(DeviceNode("/b/dev", 1, 1, host_path="/a/dev"),))
    assert with_root(of(edits), "/a", "/b").edits.device_nodes[0].host_path == ""


def test_on_the_containers_side_move_targets_and_the_hooks_that_run_there() -> None:
    edits = Edits(device_nodes=(DeviceNode("/a/dev", 1, 1),), hooks=HOOKS, mounts=(Mount("/a/m", "/a/m"),))
    found = with_root(of(edits), "/a", "/b", relative_to="container")
    assert [(node.path, node.host_path) for node in found.edits.device_nodes] == [("/b/dev", "")]
    assert found.edits.mounts == (Mount("/a/m", "/b/m"),)
    assert hooks(found) == [
        ("/a/hook", ("hook", "/a/x::/a/y", "--plain")),
        ("/a/hook", ("hook", "/b/x::/b/y", "--plain")),
        ("/b/hook", ("hook", "/b/x::/b/y", "--plain")),
    ]


def test_what_stands_twice_in_one_place_stands_there_once() -> None:
    twice = Edits(env=("A=1", "A=1", "A=2"), device_nodes=(NODE, NODE), mounts=(MOUNT, MOUNT), hooks=HOOKS[:1] * 2,
                  additional_gids=(5, 5))  # fmt: skip
    once = Edits(env=("A=1", "A=2"), device_nodes=(NODE,), mounts=(MOUNT,), hooks=HOOKS[:1], additional_gids=(5,))
    found = deduplicated(of(twice, x=twice))
    assert (found.edits, found.devices[0].edits) == (once, once)


def test_devices_do_not_repeat_what_all_share_but_none_gets_empty() -> None:
    common = Edits(env=("A=1",), mounts=(MOUNT,))
    found = simplified(of(common, x=Edits(env=("A=1", "B=2"), mounts=(MOUNT,)), y=Edits(env=("A=1",))))
    assert [device.edits for device in found.devices] == [Edits(env=("B=2",)), Edits(env=("A=1",))]


def test_devices_are_ordered_by_name_nodes_and_mounts_by_depth_and_path() -> None:
    mounts = (Mount("/1", "/a/b/c"), Mount("/2", "/b"), Mount("/3", "/a"), Mount("/4", "/a/b"))
    found = in_order(
        of(Edits(env=("B=1", "A=1"), mounts=mounts), b=Edits(device_nodes=(OTHER_NODE, NODE)), a=Edits(env=("X=1",)))
    )
    assert [device.name for device in found.devices] == ["a", "b"]
    assert [mount.container_path for mount in found.edits.mounts] == ["/a", "/b", "/a/b", "/a/b/c"]
    assert found.devices[1].edits.device_nodes == (NODE, OTHER_NODE)
    assert found.edits.env == ("B=1", "A=1")


def test_the_merged_device_is_all_others_together() -> None:
    specification = of(
        Edits(mounts=(MOUNT,)), x=Edits(device_nodes=(NODE,), mounts=(MOUNT,)), y=Edits(device_nodes=(NODE, OTHER_NODE))
    )
    found = with_merged_device(specification)
    assert found.devices[-1] == Device("all", Edits(device_nodes=(NODE, OTHER_NODE)))
    assert with_merged_device(found, skip=True) == found
    with pytest.raises(GpuprovError, match="there is a device 'all' already"):
        with_merged_device(found)
    with pytest.raises(GpuprovError, match="is no name"):
        with_merged_device(specification, "-x")
