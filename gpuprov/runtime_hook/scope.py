"""Tells systemd which device nodes a container of the hook may open, so that `systemctl daemon-reload` keeps them.

With systemd's cgroups (docker's default on cgroup version 2) the container has a scope, a unit whose device rules
systemd writes again at its next reload. runc has given the scope the rules of config.json; this adds the hook's nodes.
Source: systemd.resource-control(5), DeviceAllow= and DevicePolicy=; nvidia-container-toolkit issue 48.
"""

from __future__ import annotations

from _struct import pack

from .bus import Bus, add_string, align, begin_array, end_array, get_property, unit_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SCOPE = "org.freedesktop.systemd1.Scope"
_MANAGER = "org.freedesktop.systemd1.Manager"
_MANAGER_PATH = "/org/freedesktop/systemd1"
# With the third, `auto`, a scope without rules may open everything: a privileged container's. A rule would restrict it.
_RESTRICTS = ("strict", "closed")
_FOLDERS = {"c": "/dev/char", "b": "/dev/block"}


def scope_of(folder: str, identifier: str) -> str:
    """Return the container's scope, from its cgroup's folder; nothing if its cgroup is not systemd's.

    crun's containers are in a cgroup below their scope.
    """
    end = f"-{identifier}.scope"
    return next((name for name in folder.split("/")[-2:] if identifier and name.endswith(end) and name.isascii()), "")


def tell(scope: str, nodes: list[dict[str, Any]]) -> Bus | None:
    """Ask systemd to let the scope open the nodes too. Raises OSError if systemd does not answer.

    Returns the connection, on which the answer comes later: systemd works for some milliseconds. Returns None if the
    scope may open everything.
    """
    bus = Bus()
    if get_property(bus, unit_path(scope), _SCOPE, "DevicePolicy") not in _RESTRICTS:
        bus.close()
        return None
    bus.send(_MANAGER_PATH, _MANAGER, "SetUnitProperties", "sba(sv)", properties(scope, nodes))
    return bus


def wait(bus: Bus | None) -> None:
    """Wait until systemd has done it; an error changes nothing, and nothing is logged.

    The caller is in the container's mount namespace, where the log's path may be another file.
    """
    if bus is None:
        return
    try:
        bus.begin()
        bus.answer()
    except OSError:
        pass
    bus.close()


def properties(scope: str, nodes: list[dict[str, Any]]) -> bytes:
    """Return the body of the call: the unit, until the next boot, and its property DeviceAllow, which is added to."""
    body = bytearray()
    add_string(body, scope)
    align(body, 4)
    body += pack("=I", True)
    settings = begin_array(body)
    add_string(body, "DeviceAllow")
    body += b"\5a(ss)\0"
    allowed = begin_array(body)
    for node in nodes:
        align(body, 8)
        add_string(body, f"{_FOLDERS[node['type']]}/{node['major']}:{node['minor']}")
        add_string(body, node["access"])
    end_array(body, allowed)
    end_array(body, settings)
    return bytes(body)
