"""Validate a CDI specification by the rules of engines. Pure.

Source: github.com/cncf-tags/container-device-interface, SPEC.md and pkg/cdi (validate.go, container-edits.go,
pkg/parser): an engine that finds one fault ignores the whole file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gpuprov.cdi.specification import Edits, IntelRdt, NetDevice, Specification, minimum_version

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
