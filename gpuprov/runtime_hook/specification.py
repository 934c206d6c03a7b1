"""The CDI specifications on this host: read as JSON, and searched for the devices that a container names.

gpuprov's own (nvidia.json in the first folder that has it) answers for nvidia.com/gpu; other kinds are looked for in
every specification, a later folder's winning over an earlier one's, as CDI has it. The types of the keys that this
runtime uses are checked, so that what passes here breaks nothing later (gpuprov.cdi.specification is CDI's own, on the
host side).
"""

from __future__ import annotations

import posix
from typing import Any

from . import jsonio
from .errors import Refused
from .settings import Settings

KIND = "nvidia.com/gpu"
_OWN_NAME = "nvidia.json"
# What the host is stands among the arguments of gpuprov's own hook.
HOST_FLAGS = {
    "--host-driver-version": "driver", "--host-cuda-version": "cuda", "--gpu-architecture": "arch",
    "--gpu-brand": "brand",
}  # fmt: skip
_TEXT, _TEXTS, _ID, _MODE, _SECONDS, _OBJECT = "text", "a list of texts", "an id", "a file mode", "seconds", "an object"
_NUMBER = "a device number"
# The largest that system calls take: users' ids are 32 bits and -1 is none; makedev(3) is called with an int.
_LARGEST = {_ID: (1 << 32) - 2, _NUMBER: (1 << 31) - 1, _MODE: (1 << 31) - 1, _SECONDS: (1 << 31) - 1}
# List of the edits → key → (type, whether it must be there).
_ENTRIES = {
    "deviceNodes": {
        "path": (_TEXT, True), "hostPath": (_TEXT, False), "type": (_TEXT, False), "permissions": (_TEXT, False),
        "major": (_NUMBER, False), "minor": (_NUMBER, False), "fileMode": (_MODE, False), "uid": (_ID, False),
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


class OnlyYaml(Refused):
    """The kind has a specification, but not in JSON."""


class Specification:
    """One kind's devices by name, what all of them share, what the host is (driver, cuda, …), and where it stands.

    Of a kind that stands in several files: `sources`, where each device is from, and `conflicts`, the two files of a
    device that stands in both, of one folder.
    """

    def __init__(
        self, path: str, devices: dict[str, dict[str, Any]], common: dict[str, Any], host: dict[str, str]
    ) -> None:
        self.path = path
        self.devices = devices
        self.common = common
        self.host = host
        self.sources: dict[str, Specification] = {}
        self.conflicts: dict[str, str] = {}


class Specifications:
    """All kinds, each read when it is asked for."""

    def __init__(self, settings: Settings) -> None:
        self._folders = settings.spec_dirs
        self._default_kind = settings.default_kind
        self._known: dict[str, Specification] = {}

    @property
    def own(self) -> Specification:
        """What gpuprov wrote about this host's driver. Raises Refused if it is missing or no specification."""
        return self.of(KIND)

    def of(self, kind: str) -> Specification:
        """Return a kind's specification. Raises Refused, saying what to type, if there is none."""
        if kind not in self._known:
            found = _own(self._folders) if kind == KIND else None
            self._known[kind] = found or _searched(kind, self._folders)
        return self._known[kind]

    def edits_of(self, names: list[str], *, by_annotation: bool = False) -> list[dict[str, Any]]:
        """Return the edits of the named devices, each specification's common ones before its first device's.

        A device that an annotation names and a YAML specification has is left out: the engine, which made or read the
        annotation, gives it itself. No name at all stands for the driver's files without a device. Names are an index,
        a UUID, a PCI bus id, a MIG device (0:1), `all`, or qualified (nvidia.com/gpu=0). Raises Refused, naming what
        there is, for any other.
        """
        if not names:
            return [{**self.own.common, "deviceNodes": [], "additionalGids": []}]
        found = []
        begun = set()
        for name in dict.fromkeys(names):
            kind, device = self._split(name)
            try:
                specification = self.of(kind)
            except OnlyYaml:
                if by_annotation:
                    continue
                raise
            known = _known_name(specification, kind, device)
            source = specification.sources.get(known, specification)
            if source.path not in begun:
                begun.add(source.path)
                found.append(source.common)
            # Of wrong types: later that would be an error of another kind.
            wrong = fault(specification.devices[known])
            if wrong:
                raise Refused(unusable(source.path, wrong))
            found.append(specification.devices[known])
        return found

    def _split(self, name: str) -> tuple[str, str]:
        """Return (kind, device): a name that is not VENDOR/CLASS=NAME is of the default kind."""
        kind = kind_of(name)
        device = name[len(kind) + 1 :] if kind else name
        kind = kind or self._default_kind
        # `runtime.nvidia.com/gpu=` says that the runtime shall find it, which it does in any case.
        return (KIND, device) if kind == f"runtime.{KIND}" else (kind, device)


def kind_of(name: str) -> str:
    """Return the kind of a qualified name, VENDOR/CLASS=NAME; nothing for any other name."""
    kind, equals, device = name.partition("=")
    vendor, slash, class_ = kind.partition("/")
    return kind if equals and slash and vendor and class_ and device else ""


def _known_name(specification: Specification, kind: str, name: str) -> str:
    """Return by which name a device stands in the specification. Raises Refused for one that does not."""
    if name in specification.conflicts:
        raise Refused(f"{specification.conflicts[name]} have a device {kind}={name}: take it out of one of them")
    for known in (name, _sysfs_bus_id(name)):
        if known in specification.devices:
            return known
    if kind != KIND:
        there = ", ".join(sorted(specification.devices)) or "none"
        raise Refused(f"there is no device {kind}={name} on this host; there are {there}")
    raise Refused(f"there is no GPU {name!r} on this host; its GPUs: {_numbers(specification)}; next: gpuprov doctor")


def _sysfs_bus_id(name: str) -> str:
    """Return a PCI bus id as the specification has it: 00000000:1B:00.0, as nvidia-smi writes it, is 0000:1b:00.0."""
    domain, colon, rest = name.partition(":")
    if len(domain) == 8:  # the kernel writes four digits, and of a larger domain all of them
        domain = domain.lstrip("0").zfill(4)
    return f"{domain}:{rest}".lower() if colon else name


def _numbers(specification: Specification) -> str:
    """Return the GPUs' numbers, and the MIG devices' (0:1), for people."""
    numbers = [name.split(":") for name in specification.devices if name.replace(":", "", 1).isdecimal()]
    known = sorted([int(part) for part in parts] for parts in numbers if all(parts))
    return ", ".join(":".join(str(part) for part in parts) for parts in known) or "none"


def _own(folders: tuple[str, ...]) -> Specification | None:
    for folder in folders:
        path = f"{folder}/{_OWN_NAME}"
        try:
            kind, specification = _read(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise Refused(unusable(path, error)) from None
        if kind == KIND:
            return specification
    return None


def _searched(kind: str, folders: tuple[str, ...]) -> Specification:
    """Return all devices of a kind in all folders' specifications, as one. Raises Refused if there is none."""
    found = Specification("", {}, {}, {})
    for path in _files(folders):
        if not path.endswith(".json"):
            continue
        try:
            other, specification = _read(path)
        except (OSError, ValueError):
            continue  # as CDI has it: an invalid file is none
        if other == kind:
            _add(found, specification)
    if found.path:
        return found
    if kind != KIND:
        for path in _files(folders):
            if not path.endswith(".json") and _names_kind(path, kind):
                hint = f"gpuprov cdi transform root --format json --input {path}"
                raise OnlyYaml(f"{path} is YAML, which this runtime can't read: {hint}")
        raise Refused(f"there is no CDI specification of {kind} in {', '.join(folders)} on this host")
    raise Refused(f"there is no CDI specification {folders[0]}/{_OWN_NAME} on this host: run gpuprov install there")


def _add(found: Specification, new: Specification) -> None:
    """Add a specification to what was found of its kind: a later folder's device wins, of one folder neither counts."""
    for name in new.devices:
        other = found.sources.get(name)
        if other and other.path.rpartition("/")[0] == new.path.rpartition("/")[0]:
            found.conflicts[name] = f"{other.path} and {new.path}"
        else:
            found.conflicts.pop(name, None)
        found.sources[name] = new
    found.devices.update(new.devices)
    found.path, found.common, found.host = new.path, new.common, new.host


def _names_kind(path: str, kind: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return any(line.strip().replace('"', "").replace("'", "") == f"kind: {kind}" for line in file)
    except (OSError, ValueError):
        return False


def _files(folders: tuple[str, ...]) -> list[str]:
    found = []
    for folder in folders:
        try:
            names = sorted(posix.listdir(folder))
        except OSError:
            continue
        found += [f"{folder}/{name}" for name in names if name.endswith((".json", ".yaml", ".yml"))]
    return found


def _read(path: str) -> tuple[str, Specification]:
    """Return a specification and its kind. Raises OSError, and ValueError for a file that is none."""
    with open(path, encoding="utf-8") as file:
        document = jsonio.loads(file.read())
    if not isinstance(document, dict):
        raise ValueError("it is no object")
    if not isinstance(document.get("kind"), str):
        raise ValueError("it has no kind")
    listed, common = document.get("devices"), document.get("containerEdits") or {}
    if not isinstance(listed, list) or not all(
        isinstance(device, dict) and isinstance(device.get("name"), str) for device in listed
    ):
        raise ValueError("devices is no list of objects with a name")
    wrong = fault(common)
    if wrong:
        raise ValueError(wrong)
    words = [word for hook in common.get("hooks") or () for word in hook.get("args") or ()]
    devices = {device["name"]: device.get("containerEdits") for device in listed}
    return document["kind"], Specification(path, devices, common, host_of(words))


def host_of(arguments: list[str]) -> dict[str, str]:
    """Return what the arguments of our own hook say of the host: driver, cuda, arch, brand."""
    return {HOST_FLAGS[flag]: value for flag, value in zip(arguments, arguments[1:]) if flag in HOST_FLAGS}


def unusable(path: str, wrong: Exception | str) -> str:
    """Return what to say of a specification that is not one."""
    return f"the CDI specification {path} can't be used ({wrong}): run gpuprov install on this host"


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
