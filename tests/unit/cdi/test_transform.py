"""Changes to a whole specification."""

from __future__ import annotations

import pytest

from gpuprov.cdi.specification import Device, DeviceNode, Edits, Hook, Mount, Specification, with_root


def of(common: Edits, **devices: Edits) -> Specification:
    return Specification(tuple(Device(name, edits) for name, edits in devices.items()), common, {})


NODE, OTHER_NODE = DeviceNode("/dev/nvidia0", major=195, minor=0), DeviceNode("/dev/nvidia1", major=195, minor=1)
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
