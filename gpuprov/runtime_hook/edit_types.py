"""The types of the keys in a CDI specification that this runtime uses, and what is wrong with a document.

Not a validation of CDI (gpuprov.cdi.specification is that, on the host side): what passes here breaks nothing later.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TEXT, _TEXTS, _ID, _MODE, _SECONDS, _OBJECT = "text", "a list of texts", "an id", "a file mode", "seconds", "an object"
# The largest that system calls take: device numbers and users' ids are 32 bits, -1 is none of them.
_LARGEST = {_ID: (1 << 32) - 2, _MODE: (1 << 31) - 1, _SECONDS: (1 << 31) - 1}
# List of the edits → key → (type, whether it must be there).
_ENTRIES = {
    "deviceNodes": {
        "path": (_TEXT, True), "hostPath": (_TEXT, False), "type": (_TEXT, False), "permissions": (_TEXT, False),
        "major": (_ID, False), "minor": (_ID, False), "fileMode": (_MODE, False), "uid": (_ID, False),
        "gid": (_ID, False),
    },
    "mounts": {
        "hostPath": (_TEXT, True), "containerPath": (_TEXT, True), "type": (_TEXT, False), "options": (_TEXTS, False),
    },
    "hooks": {
        "hookName": (_TEXT, True), "path": (_TEXT, True), "args": (_TEXTS, False), "env": (_TEXTS, False),
        "timeout": (_SECONDS, False),
    },
    "netDevices": {"hostInterfaceName": (_TEXT, True), "name": (_TEXT, True)},
}  # fmt: skip


def fault(edits: Any) -> str:
    """Return what is wrong with container edits, nothing if their types are right."""
    if not isinstance(edits, dict):
        return "containerEdits is no object"
    for name, keys in _ENTRIES.items():
        entries = edits.get(name)
        if entries is None:
            continue
        if not isinstance(entries, list):
            return f"{name} is no list"
        for entry in entries:
            if not isinstance(entry, dict):
                return f"{name} has {_short(entry)}, which is no object"
            for key, (kind, required) in keys.items():
                value = entry.get(key)
                if (required or value is not None) and not _is(value, kind):
                    return f"{name} has {key} {_short(value)}, which is not {kind}"
    for name, kind in (("env", _TEXTS), ("intelRdt", _OBJECT)):
        if edits.get(name) is not None and not _is(edits[name], kind):
            return f"{name} is not {kind}"
    groups = edits.get("additionalGids")
    if groups is not None and not (isinstance(groups, list) and all(_is(one, _ID) for one in groups)):
        return "additionalGids is no list of ids"
    return ""


def _is(value: Any, kind: str) -> bool:
    if kind is _TEXT:
        return isinstance(value, str) and _is_usable(value)
    if kind is _TEXTS:
        return isinstance(value, list) and all(isinstance(one, str) and _is_usable(one) for one in value)
    if kind is _OBJECT:
        return isinstance(value, dict)
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST[kind]


def _is_usable(text: str) -> bool:
    """Say whether system calls take it: no end in the middle, no half of a character."""
    return (text.isascii() and "\0" not in text) or not any(one == "\0" or "\ud800" <= one <= "\udfff" for one in text)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}…"
