"""The CDI specification: its types, its text (JSON, YAML on the controller), and the rules by which engines check it.

Source: github.com/cncf-tags/container-device-interface, SPEC.md. The format is JSON because the runtime reads it at
every container start, and Python's JSON parser is the fastest.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

from gpuprov.protocol.codec import load
from gpuprov.protocol.dataclass import Field, dataclass, field, fields, is_dataclass, replace
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.config import STAGES
from gpuprov.runtime_hook.jsonio import unique

VENDOR_CLASS = "nvidia.com/gpu"
# Mount options of the driver's files.
FILE_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
# Fields whose key in JSON is not their name in camel case have it as `key`. Python 3.9 does not evaluate `int | None`.
Number = Optional[int]


@dataclass(frozen=True)
class DeviceNode:
    """A device node to make in the container; the engine takes missing values (None, "") from the host's node."""

    path: str
    host_path: str = ""
    type: str = "c"
    major: Number = None
    minor: Number = None
    file_mode: Number = None
    permissions: str = "rw"
    uid: Number = None
    gid: Number = None


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

    name: str = field(metadata={"key": "hookName"})
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: Number = None


@dataclass(frozen=True)
class NetDevice:
    """A network device to move into the container."""

    host_interface_name: str
    name: str


@dataclass(frozen=True)
class IntelRdt:
    """Intel's Resource Director Technology, as the OCI runtime specification has it."""

    clos_id: str = field(default="", metadata={"key": "closID"})
    l3_cache_schema: str = ""
    mem_bw_schema: str = ""
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False
    enable_cmt: bool = field(default=False, metadata={"key": "enableCMT"})
    enable_mbm: bool = field(default=False, metadata={"key": "enableMBM"})


@dataclass(frozen=True)
class Edits:
    """The changes that a device, or all devices, make to a container."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()
    intel_rdt: Optional[IntelRdt] = None  # noqa: UP045


@dataclass(frozen=True)
class Device:
    """A device that a container can request by name."""

    name: str
    edits: Edits = field(metadata={"key": "containerEdits"})
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Specification:
    """A CDI specification. `declared_version`: the version in a file; "" means the lowest sufficient version."""

    devices: tuple[Device, ...]
    edits: Edits = field(metadata={"key": "containerEdits"})
    annotations: Mapping[str, str]
    kind: str = VENDOR_CLASS
    declared_version: str = field(default="", metadata={"key": "cdiVersion"})

    @property
    def version(self) -> str:
        """The declared version, else the lowest that supports all features of this specification."""
        return self.declared_version or minimum_version(self)

    @property
    def every_edits(self) -> tuple[Edits, ...]:
        """The common edits and each device's."""
        return (self.edits, *(device.edits for device in self.devices))

    @property
    def every_rdt(self) -> tuple[IntelRdt, ...]:
        """What all of these say of Intel's RDT."""
        return tuple(edits.intel_rdt for edits in self.every_edits if edits.intel_rdt is not None)


# Version, and the features that it introduced (SPEC.md, "Released versions"); newest first.
_FEATURES: tuple[tuple[str, Callable[[Specification], bool]], ...] = (
    ("1.1.0", lambda one: any(edits.net_devices for edits in one.every_edits)),
    ("1.1.0", lambda one: any(rdt.schemata or rdt.enable_monitoring for rdt in one.every_rdt)),
    ("0.7.0", lambda one: any(edits.additional_gids for edits in one.every_edits) or bool(one.every_rdt)),
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


def render_json(specification: Specification) -> bytes:
    """Return the specification as JSON; the same specification gives the same bytes."""
    document = {
        "cdiVersion": specification.version, "kind": specification.kind, **_annotations(specification),
        "devices": [
            {"name": one.name, **_annotations(one), "containerEdits": _encode(one.edits)}
            for one in specification.devices
        ],
        "containerEdits": _encode(specification.edits),
    }  # fmt: skip
    return (json.dumps(document, indent=1) + "\n").encode()


def _annotations(one: Specification | Device) -> dict[str, Any]:
    return {"annotations": dict(sorted(one.annotations.items()))} if one.annotations else {}


def _encode(value: Any) -> Any:
    """Return a value in JSON; empty values are left out, but not zero: a minor number, or root's id."""
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if not is_dataclass(value):
        return value
    found = {_key(one): _encode(getattr(value, one.name)) for one in fields(value)}
    return {key: part for key, part in found.items() if part is not None and part is not False and part not in ("", [])}


def _key(one: Field[Any]) -> str:
    head, *rest = one.name.split("_")
    return str(one.metadata.get("key") or head + "".join(word.capitalize() for word in rest))


def parse_json(content: bytes) -> Specification:
    """Return the specification in a file. Raises GpuprovError that names the place of an error.

    Strict, as engines are: an unknown or duplicate key is an error. validation.problems() checks the values.
    """
    try:
        document = json.loads(content.decode(), object_pairs_hook=unique)
        found = load(Specification, document, trusted=True, exact=True, key=_key, null_is_empty=True)
        if not found.declared_version:
            raise ValueError("cdiVersion is missing")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GpuprovError("this is no CDI specification", reason, "gpuprov install refreshes it") from None
    return found


_MAKE = "gpuprov cdi generate makes one"
SUFFIXES = (".json", ".yaml", ".yml")


def parse(content: bytes, name: str) -> Specification:
    """Return the specification in a file: YAML by its name, or JSON. Raises GpuprovError for an invalid one."""
    if not content.strip():
        raise GpuprovError(f"{name} is no CDI specification", "it is empty", _MAKE)
    if is_yaml(content, name):
        yaml = _yaml()
        try:
            content = json.dumps(yaml.safe_load(content)).encode()
        except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
            raise GpuprovError(f"{name} is no CDI specification", " ".join(str(error).split()), _MAKE) from None
    return parse_json(content)


def is_yaml(content: bytes, name: str) -> bool:
    """Say whether a file is YAML: by its suffix, or for standard input by how it begins."""
    return name.endswith((".yaml", ".yml")) or not (name.endswith(".json") or content.lstrip().startswith(b"{"))


def render(specification: Specification, form: str) -> bytes:
    """Return the specification as `json` or `yaml`; the same specification gives the same bytes."""
    content = render_json(specification)
    if form == "json":
        return content
    text: str = _yaml().safe_dump(json.loads(content), sort_keys=False, default_flow_style=False)
    return text.encode()


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
_DEVICE_TYPES = ("", "b", "c", "u", "p")
# A folder's name in the kernel's resctrl.
_LONGEST_CLOS_ID = 4096


def problems(specification: Specification) -> tuple[str, ...]:
    """Return one sentence for each fault; none for a valid specification."""
    return tuple(_problems(specification))


def _problems(specification: Specification) -> Iterator[str]:
    yield from _version_problems(specification)
    vendor, _, class_ = specification.kind.partition("/")
    if not (_KIND_PART.fullmatch(vendor) and _KIND_PART.fullmatch(class_)):
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
        if not _DEVICE_NAME.fullmatch(device.name):
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
    yield from (f"{where}: {entry!r} is no NAME=VALUE" for entry in edits.env if entry.find("=") <= 0)
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
        if hook.name not in STAGES:
            yield f"{where}: there is no hook {hook.name!r}"
        if not hook.path:
            yield f"{where}: a hook has no path"
        yield from (f"{where}: {entry!r} is no NAME=VALUE" for entry in hook.env if entry.find("=") <= 0)
    for names in ([one.host_interface_name for one in edits.net_devices], [one.name for one in edits.net_devices]):
        if "" in names:
            yield f"{where}: a network device lacks a name"
        for name in sorted({name for name in names if name and names.count(name) > 1}):
            yield f"{where}: the network device {name!r} stands there twice"
    name = edits.intel_rdt.clos_id if edits.intel_rdt else "/"
    if name != "/" and (name in (".", "..") or set(name) & set("/\n") or len(name) >= _LONGEST_CLOS_ID):
        yield f"{where}: {name[:80]!r} is no closID"


# -- paths below another root ------------------------------------------------------------------------------------------
# Source: nvidia-container-toolkit, pkg/nvcdi/transform/root.
# Of these stages' hooks the arguments are the container's, not the host's; of the second, the path too.
_CONTAINER_ARGUMENTS = ("createContainer", "startContainer")


def with_root(specification: Specification, source: str, target: str, *, relative_to: str = "host") -> Specification:
    """Return the specification with paths below `source` moved below `target`, for the `host` or the `container`."""
    on_host = relative_to == "host"
    moved = functools.partial(_moved, source=source, target=target)

    def hook(one: Hook) -> Hook:
        path = moved(one.path) if (one.name == "startContainer") is not on_host else one.path
        words = tuple("::".join(map(moved, word.split("::"))) for word in one.args)
        return replace(one, path=path, args=words if (one.name in _CONTAINER_ARGUMENTS) is not on_host else one.args)

    def change(edits: Edits) -> Edits:
        if on_host:
            nodes = [_with_host_path(one, moved(one.host_path or one.path)) for one in edits.device_nodes]
            mounts = [replace(one, host_path=moved(one.host_path)) for one in edits.mounts]
        else:
            nodes = [replace(one, path=moved(one.path)) for one in edits.device_nodes]
            mounts = [replace(one, container_path=moved(one.container_path)) for one in edits.mounts]
        return replace(edits, device_nodes=tuple(nodes), mounts=tuple(mounts), hooks=tuple(map(hook, edits.hooks)))

    return _edited(specification, change)


def with_device_root(specification: Specification, root: str) -> Specification:
    """Return the specification with the host's device nodes below `root`; paths in containers do not change."""

    def change(edits: Edits) -> Edits:
        nodes = (_with_host_path(one, _moved(one.path, "/", root)) for one in edits.device_nodes)
        return replace(edits, device_nodes=tuple(nodes))

    return _edited(specification, change)


def _with_host_path(node: DeviceNode, path: str) -> DeviceNode:
    return replace(node, host_path="" if path == node.path else path)


def _moved(path: str, source: str, target: str) -> str:
    source = source.rstrip("/")
    if path != source and not path.startswith(f"{source}/"):
        return path
    return posixpath.normpath(f"{target}/{path[len(source) :]}").replace("//", "/")


def _edited(specification: Specification, change: Callable[[Edits], Edits]) -> Specification:
    devices = tuple(replace(device, edits=change(device.edits)) for device in specification.devices)
    return replace(specification, devices=devices, edits=change(specification.edits))
