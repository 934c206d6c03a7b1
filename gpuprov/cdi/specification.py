"""The CDI specification: its types, its text (JSON, YAML on the controller), and the rules by which engines check it.

Source: github.com/cncf-tags/container-device-interface, SPEC.md. The format is JSON because the runtime reads it at
every container start, and Python's JSON parser is the fastest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

from gpuprov.protocol.errors import GpuprovError

VENDOR_CLASS = "nvidia.com/gpu"
# Mount options of the driver's files.
FILE_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")


@dataclass(frozen=True)
class DeviceNode:
    """A device node to make in the container; the engine takes missing values (None, "") from the host's node."""

    path: str
    major: int | None = None
    minor: int | None = None
    permissions: str = "rw"
    type: str = "c"
    host_path: str = ""
    file_mode: int | None = None
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True)
class Mount:
    """A file of the host to mount into the container."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = FILE_OPTIONS
    type: str = ""


@dataclass(frozen=True)
class Hook:
    """A program to run at a stage of the container's life; gpuprov's own specification has one, for links."""

    name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


@dataclass(frozen=True)
class NetDevice:
    """A network device to move into the container."""

    host_interface_name: str
    name: str


@dataclass(frozen=True)
class IntelRdt:
    """Intel's Resource Director Technology, as the OCI runtime specification has it."""

    clos_id: str = ""
    l3_cache_schema: str = ""
    mem_bw_schema: str = ""
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False
    enable_cmt: bool = False
    enable_mbm: bool = False


@dataclass(frozen=True)
class Edits:
    """The changes that a device, or all devices, make to a container."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()
    intel_rdt: IntelRdt | None = None


@dataclass(frozen=True)
class Device:
    """A device that a container can request by name."""

    name: str
    edits: Edits
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Specification:
    """A CDI specification. `declared_version`: the version in a file; "" means the lowest sufficient version."""

    devices: tuple[Device, ...]
    edits: Edits
    annotations: Mapping[str, str]
    kind: str = VENDOR_CLASS
    declared_version: str = ""

    @property
    def version(self) -> str:
        """The declared version, else the lowest that supports all features of this specification."""
        return self.declared_version or minimum_version(self)

    @property
    def every_edits(self) -> tuple[Edits, ...]:
        """The common edits and each device's."""
        return (self.edits, *(device.edits for device in self.devices))


# Version, and the features that it introduced (SPEC.md, "Released versions"); newest first.
_FEATURES: tuple[tuple[str, Callable[[Specification], bool]], ...] = (
    ("1.1.0", lambda one: any(edits.net_devices or _uses_new_rdt(edits.intel_rdt) for edits in one.every_edits)),
    ("0.7.0", lambda one: any(edits.additional_gids or edits.intel_rdt is not None for edits in one.every_edits)),
    ("0.6.0", lambda one: bool(one.annotations) or any(device.annotations for device in one.devices)),
    ("0.6.0", lambda one: "." in one.kind.rpartition("/")[2]),
    ("0.5.0", lambda one: any(node.host_path for edits in one.every_edits for node in edits.device_nodes)),
    ("0.5.0", lambda one: any(not device.name[:1].isalpha() for device in one.devices)),
    ("0.4.0", lambda one: any(mount.type for edits in one.every_edits for mount in edits.mounts)),
)
LOWEST_VERSION = "0.3.0"


def minimum_version(specification: Specification) -> str:
    """Return the lowest CDI version that supports all features of the specification; old engines refuse higher ones."""
    return next((version for version, uses in _FEATURES if uses(specification)), LOWEST_VERSION)


def _uses_new_rdt(rdt: IntelRdt | None) -> bool:
    return rdt is not None and bool(rdt.schemata or rdt.enable_monitoring)


def render_json(specification: Specification) -> bytes:
    """Return the specification as JSON; the same specification gives the same bytes."""
    document: dict[str, Any] = {"cdiVersion": specification.version, "kind": specification.kind}
    if specification.annotations:
        document["annotations"] = dict(sorted(specification.annotations.items()))
    document["devices"] = [_encode(device) for device in specification.devices]
    document["containerEdits"] = _encode(specification.edits)
    return (json.dumps(document, indent=1) + "\n").encode()


def parse_json(content: bytes) -> Specification:
    """Return the specification in a file. Raises GpuprovError that names the place of an error.

    Strict, as engines are: an unknown or duplicate key is an error. validation.problems() checks the values.
    """
    try:
        document = json.loads(content.decode(), object_pairs_hook=_unique)
        found: Specification = _decode(Specification, document, "")
        if not found.declared_version:
            raise ValueError("cdiVersion is missing")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GpuprovError("this is no CDI specification", reason, "gpuprov install refreshes it") from None
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _text(value: Any, where: str) -> str:
    if not isinstance(value, (str, type(None))):
        raise ValueError(f"{where} must be text")
    return value or ""


def _number(value: Any, where: str) -> int | None:
    return None if value is None else _required_number(value, where)


def _required_number(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{where} must be a whole number")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, (bool, type(None))):
        raise ValueError(f"{where} must be true or false")
    return bool(value)


def _map(value: Any, where: str) -> Mapping[str, str]:
    if not isinstance(value, (dict, type(None))):
        raise ValueError(f"{where} must be an object")
    return {key: _text(item, f"{where}.{key}") for key, item in (value or {}).items()}


def _each(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def read_all(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, type(None))):
            raise ValueError(f"{where} must be a list")
        return tuple(read(item, f"{where}[{number}]") for number, item in enumerate(value or ()))

    return read_all


def _object(cls: type[Any], *, optional: bool = False) -> Callable[[Any, str], Any]:
    def read(value: Any, where: str) -> Any:
        return None if optional and value is None else _decode(cls, {} if value is None else value, where)

    return read


def _item(cls: type[Any]) -> Callable[[Any, str], Any]:
    return lambda value, where: _decode(cls, value, where)


# Attribute, key in JSON (in output order), how a value is read.
_SHAPES: dict[type[Any], tuple[tuple[str, str, Callable[[Any, str], Any]], ...]] = {
    DeviceNode: (
        ("path", "path", _text), ("host_path", "hostPath", _text), ("type", "type", _text), ("major", "major", _number),
        ("minor", "minor", _number), ("file_mode", "fileMode", _number), ("permissions", "permissions", _text),
        ("uid", "uid", _number), ("gid", "gid", _number),
    ),
    Mount: (
        ("host_path", "hostPath", _text), ("container_path", "containerPath", _text),
        ("options", "options", _each(_text)), ("type", "type", _text),
    ),
    Hook: (
        ("name", "hookName", _text), ("path", "path", _text), ("args", "args", _each(_text)),
        ("env", "env", _each(_text)), ("timeout", "timeout", _number),
    ),
    NetDevice: (("host_interface_name", "hostInterfaceName", _text), ("name", "name", _text)),
    IntelRdt: (
        ("clos_id", "closID", _text), ("l3_cache_schema", "l3CacheSchema", _text),
        ("mem_bw_schema", "memBwSchema", _text), ("schemata", "schemata", _each(_text)),
        ("enable_monitoring", "enableMonitoring", _flag), ("enable_cmt", "enableCMT", _flag),
        ("enable_mbm", "enableMBM", _flag),
    ),
    Edits: (
        ("env", "env", _each(_text)), ("device_nodes", "deviceNodes", _each(_item(DeviceNode))),
        ("net_devices", "netDevices", _each(_item(NetDevice))), ("mounts", "mounts", _each(_item(Mount))),
        ("hooks", "hooks", _each(_item(Hook))), ("additional_gids", "additionalGids", _each(_required_number)),
        ("intel_rdt", "intelRdt", _object(IntelRdt, optional=True)),
    ),
    Device: (
        ("name", "name", _text), ("annotations", "annotations", _map), ("edits", "containerEdits", _object(Edits)),
    ),
    Specification: (
        ("declared_version", "cdiVersion", _text), ("kind", "kind", _text), ("annotations", "annotations", _map),
        ("devices", "devices", _each(_item(Device))), ("edits", "containerEdits", _object(Edits)),
    ),
}  # fmt: skip


def _decode(cls: type[Any], value: Any, where: str) -> Any:
    """Return the dataclass of a JSON object; a missing key means empty, whatever the dataclass's default is."""
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the document'} must be an object")
    shape = _SHAPES[cls]
    unknown = sorted(set(value) - {key for _, key, _ in shape})
    if unknown:
        raise ValueError(f"{where or 'the document'} has a key that CDI does not know: {unknown[0]!r}")
    prefix = f"{where}." if where else ""
    return cls(**{name: read(value.get(key), f"{prefix}{key}") for name, key, read in shape})


def _encode(value: Any) -> Any:
    """Return a dataclass as JSON values; empty values are left out, but a device always has its edits."""
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if type(value) not in _SHAPES:
        return dict(sorted(value.items())) if isinstance(value, Mapping) else value
    found = {key: _encode(getattr(value, name)) for name, key, _ in _SHAPES[type(value)]}
    return {key: part for key, part in found.items() if key == "containerEdits" or not _is_empty(part)}


def _is_empty(part: Any) -> bool:
    # Zero is a valid value: a minor number, or root's id.
    return part is None or part is False or part in ("", [], {})


_MAKE = "gpuprov cdi generate makes one"
SUFFIXES = (".json", ".yaml", ".yml")


def parse(content: bytes, name: str) -> Specification:
    """Return the specification in a file: YAML by its name, or JSON. Raises GpuprovError for an invalid one."""
    if not content.strip():
        raise GpuprovError(f"{name} is no CDI specification", "it is empty", _MAKE)
    return parse_json(_json_of(content, name) if is_yaml(content, name) else content)


def is_yaml(content: bytes, name: str) -> bool:
    """Say whether a file is YAML: by its suffix, or for standard input by how it begins."""
    if name.endswith((".yaml", ".yml")):
        return True
    return not name.endswith(".json") and not content.lstrip().startswith(b"{")


def render(specification: Specification, form: str) -> bytes:
    """Return the specification as `json` or `yaml`; the same specification gives the same bytes."""
    content = render_json(specification)
    if form == "json":
        return content
    text: str = _yaml().safe_dump(json.loads(content), sort_keys=False, default_flow_style=False)
    return text.encode()


def _json_of(content: bytes, name: str) -> bytes:
    yaml = _yaml()
    try:
        return json.dumps(yaml.safe_load(content)).encode()
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise GpuprovError(f"{name} is no CDI specification", " ".join(str(error).split()), _MAKE) from None


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise GpuprovError("YAML can't be read or written here", "PyYAML is missing", "use --format json") from None
    return yaml


# -- the rules of engines --------------------------------------------------------------------------------------------
# Source: container-device-interface, SPEC.md and pkg/cdi (validate.go, container-edits.go, pkg/parser): an engine that
# finds one fault ignores the whole file.
_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
# ASCII only. A vendor and a class begin with a letter and may hold `_-.`; a device name may also begin with a digit
# and hold a colon.
_KIND_PART = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
# As Kubernetes has it: an optional DNS subdomain, then a name.
_ANNOTATION_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_ANNOTATION_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,61}[a-z0-9])?")
_LONGEST_PREFIX = 253
_MOST_ANNOTATION_BYTES = 256 << 10
_STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_DEVICE_TYPES = ("", "b", "c", "u", "p")
# A folder's name in the kernel's resctrl.
_LONGEST_CLOS_ID = 4096


def _is_kind(text: str) -> bool:
    """Say whether a text is a valid kind, such as nvidia.com/gpu."""
    vendor, _, class_ = text.partition("/")
    return bool(_KIND_PART.fullmatch(vendor) and _KIND_PART.fullmatch(class_))


def _is_device_name(text: str) -> bool:
    """Say whether a text can be the name of a device."""
    return bool(_DEVICE_NAME.fullmatch(text))


def problems(specification: Specification) -> tuple[str, ...]:
    """Return one sentence for each fault; none for a valid specification."""
    return tuple(_problems(specification))


def _problems(specification: Specification) -> Iterator[str]:
    yield from _version_problems(specification)
    if not _is_kind(specification.kind):
        yield f"{specification.kind!r} is no kind such as nvidia.com/gpu"
    yield from _annotation_problems("the specification", specification.annotations)
    if not specification.devices:
        yield "there is no device in it"
    names = [device.name for device in specification.devices]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"the device {name!r} stands there more than once"
    yield from _edit_problems("all devices", specification.edits)
    for device in specification.devices:
        where = f"device {device.name!r}"
        if not _is_device_name(device.name):
            yield f"{device.name!r} is no name for a device"
        if device.edits == Edits():
            yield f"{where} brings nothing"
        yield from _annotation_problems(where, device.annotations)
        yield from _edit_problems(where, device.edits)


def _version_problems(specification: Specification) -> Iterator[str]:
    version = specification.version[1:] if specification.version.startswith("v") else specification.version
    needed = minimum_version(specification)
    if version not in _VERSIONS:
        yield f"there is no CDI version {specification.version!r}"
    elif _VERSIONS.index(version) < _VERSIONS.index(needed):
        yield f"CDI version {version} is below {needed}, which this content needs"


def _annotation_problems(where: str, annotations: Mapping[str, str]) -> Iterator[str]:
    for key in annotations:
        prefix, slash, name = key.lower().rpartition("/")
        bad_prefix = slash and not (_ANNOTATION_PREFIX.fullmatch(prefix) and len(prefix) <= _LONGEST_PREFIX)
        if bad_prefix or not _ANNOTATION_NAME.fullmatch(name):
            yield f"{where}: {key!r} is no key for an annotation"
    # JSON escapes can contain half of a surrogate pair, which UTF-8 can't encode: count it, do not refuse it here.
    size = sum(len(text.encode("utf-8", "surrogatepass")) for pair in annotations.items() for text in pair)
    if size > _MOST_ANNOTATION_BYTES:
        yield f"{where}: bytes of annotations: {size}, at most {_MOST_ANNOTATION_BYTES} are allowed"


def _edit_problems(where: str, edits: Edits) -> Iterator[str]:
    yield from (f"{where}: {entry!r} is no NAME=VALUE" for entry in edits.env if not _is_assignment(entry))
    for node in edits.device_nodes:
        if not node.path:
            yield f"{where}: a device node has no path"
        if node.type not in _DEVICE_TYPES:
            yield f"{where}: {node.path} is of type {node.type!r}, not b, c, u or p"
        if node.permissions != "none" and set(node.permissions) - set("rwm"):
            yield f"{where}: {node.path} has permissions {node.permissions!r}, not some of r, w, m"
    for mount in edits.mounts:
        if not mount.host_path or not mount.container_path:
            yield f"{where}: a mount lacks a path: {mount.host_path!r} at {mount.container_path!r}"
    for hook in edits.hooks:
        if hook.name not in _STAGES:
            yield f"{where}: there is no hook {hook.name!r}"
        if not hook.path:
            yield f"{where}: a hook has no path"
        yield from (f"{where}: {entry!r} is no NAME=VALUE" for entry in hook.env if not _is_assignment(entry))
    yield from _net_device_problems(where, edits.net_devices)
    if edits.intel_rdt is not None and not _is_clos_id(edits.intel_rdt):
        yield f"{where}: {edits.intel_rdt.clos_id[:80]!r} is no closID"


def _is_assignment(entry: str) -> bool:
    return entry.find("=") > 0


def _net_device_problems(where: str, devices: tuple[NetDevice, ...]) -> Iterator[str]:
    for names in ([one.host_interface_name for one in devices], [one.name for one in devices]):
        if "" in names:
            yield f"{where}: a network device lacks a name"
        yield from (
            f"{where}: the network device {name!r} stands there twice"
            for name in sorted({name for name in names if name and names.count(name) > 1})
        )


def _is_clos_id(rdt: IntelRdt) -> bool:
    name = rdt.clos_id
    plain = name not in (".", "..") and "/" not in name and "\n" not in name and len(name) < _LONGEST_CLOS_ID
    return name == "/" or plain
