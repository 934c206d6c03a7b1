"""Which device nodes a host lacks."""

from __future__ import annotations

from gpuprov.cdi.discover import DriverFacts


def missing_nodes(driver: DriverFacts) -> tuple[tuple[str, int, int, int, int], ...]:
    """Return (path, major, minor, mode, group) of each node that the loaded driver calls for and /dev lacks."""
    return tuple(
        (node.path, node.major, node.minor, node.mode, node.gid)
        for node in (*driver.nodes, *driver.capability_nodes)
        if node.path not in driver.present
    )
