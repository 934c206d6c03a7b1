"""Summarise a change of a CDI specification in a few lines instead of a diff of hundreds. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gpuprov.cdi.generate import host_facts
from gpuprov.cdi.specification import Edits, Specification, parse_json
from gpuprov.protocol.errors import GpuprovError

_EMPTY = Specification((), Edits(), {})
_DRIVER = "--host-driver-version"


def in_short(path: str, before: bytes | None, after: bytes) -> str:
    """Return the driver's version and, for each kind of item, how many there are, are added, removed and changed.

    "" if either text is not a specification: then the full diff is shown.
    """
    try:
        old, new = _EMPTY if before is None else parse_json(before), parse_json(after)
    except GpuprovError:
        return ""
    lines = [f"{path}{' (new)' if before is None else ''}"]
    was, will = (host_facts(one).get(_DRIVER, "none") for one in (old, new))
    lines.append(f"  driver version: {will}" if was in (will, "none") else f"  driver version: {was} → {will}")
    there, here = _things(old), _things(new)
    for kind in dict.fromkeys((*here, *there)):
        lines.append(f"  {kind}: {_counts(there.get(kind, {}), here.get(kind, {}))}")
    return "\n".join(lines)


def _things(one: Specification) -> dict[str, dict[str, object]]:
    """Return kind → name → what it is."""
    edits = one.every_edits
    found: dict[str, dict[str, object]] = {
        "devices": {device.name: device.edits for device in one.devices},
        "device nodes": {node.path: node for each in edits for node in each.device_nodes},
        "libraries": {}, "programs": {}, "other files": {},
        "hooks": {f"{hook.name} {' '.join(hook.args[:2])}": hook for hook in one.edits.hooks},
    }  # fmt: skip
    for mount in (mount for each in edits for mount in each.mounts):
        name = mount.container_path.rpartition("/")[2]
        is_program = mount.container_path.rpartition("/")[0].endswith("bin")
        kind = "libraries" if ".so" in name else "programs" if is_program else "other files"
        found[kind][mount.container_path] = mount
    return {kind: things for kind, things in found.items() if things}


def _counts(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    added, removed = here.keys() - there.keys(), there.keys() - here.keys()
    changed = {name for name in here.keys() & there.keys() if here[name] != there[name]}
    counts = ((added, "added"), (removed, "removed"), (changed, "changed"))
    told = ", ".join(f"{len(names)} {word}" for names, word in counts if names)
    return f"{len(here)} ({told})" if told else f"{len(here)}"
