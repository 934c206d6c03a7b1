"""HostSpec: what the user asks a host to be, validated, with defaults; never what a host is (facts/host.py).

An option is a field of HostSpec: its inventory variable is the field's name with `gpuprov_` before it, its marshmallow
field checks what comes in. options.json has the text of each for the configuration reference.
Every value may come from a hostile inventory: what reaches a command line, a path or a URL passes an allow-list here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marshmallow import ValidationError, validate
from marshmallow import fields as schema_fields

from gpuprov.protocol import spec_fields as check
from gpuprov.protocol.codec import as_json
from gpuprov.protocol.dataclass import dataclass, field, fields, replace
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.spec_fields import PREFIX, TextOrList, choice, flag, number, or_empty, several, text
from gpuprov.protocol.tables import PACKAGED, RELEASES, Tables, packaged

# Those that some driver branch of today serves; models.json knows their device ids.
GENERATIONS = ("maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "grace-hopper", "blackwell", "rubin")
HOST, IMAGE = "host", "image"
# Read by the playbooks alone: how a play goes over its hosts, not what a host shall be.
PLAY_VARIABLES = frozenset(packaged("options")["play_variables"])


@dataclass(frozen=True)
class SiteRepository:
    """A signed package repository: the key at `key_url` counts only if it has the full `key_fingerprint`."""

    name: str = check.required(check.NAME)
    uri: str = check.required(check.HTTP_URL)
    key_url: str = check.required(check.HTTP_URL)
    key_fingerprint: str = check.required(check.FINGERPRINT)
    suite: str = check.option(schema_fields.String(validate=check.WORDS), "./")
    components: str = check.option(schema_fields.String(validate=or_empty(check.WORDS)), "")


@dataclass(frozen=True)
class AcceptCommand:
    """A command to run in a container of an image, and what its output must show (checks/accept_commands.py)."""

    image: str = check.required(check.IMAGE)
    command: tuple[str, ...] = check.required(validate.Length(1, 64, error="is no list of words"), words=check.LINE)
    expect: str = check.option(schema_fields.String(validate=check.LINE), "")


@dataclass(frozen=True)
class Vgpu:
    """How virtual GPUs get their licence (driver/vgpu.py): by a token, by a server, by neither at a cloud's."""

    feature: int | None = check.option(
        schema_fields.Integer(allow_none=True, validate=validate.Range(0, 4, error="is not a feature type")), None
    )
    token: str = field(default="", repr=False, metadata=text(check.TOKEN).metadata)
    server: str = text(check.SERVER)


@dataclass(frozen=True)
class HostSpec:
    """What a host shall be."""

    # Which driver, how it is built, and what may stop for it.
    driver: str = choice("runfile", "packages", "distribution", "preinstalled")
    driver_version: str = text(check.VERSION)
    driver_url: str = text(check.URL_OR_PATH)
    driver_sha256: str = text(check.SHA256)
    driver_mirror: str = text(check.HTTP_URL)
    keep_driver: bool = flag(default=True)
    driver_updates: str = choice("hold", "follow")
    driver_releases: str = text(check.URL_OR_PATH)
    driver_releases_sha256: str = text(check.SHA256)
    servers: str = text(check.URL_OR_PATH)
    servers_sha256: str = text(check.SHA256)
    models: str = text(check.URL_OR_PATH)
    models_sha256: str = text(check.SHA256)
    refuse_advisories: str = choice("none", "high", "critical")
    allow_known_problems: tuple[str, ...] = several(schema_fields.List(schema_fields.String(validate=check.NAME)))
    kernel_modules: str = choice("auto", "build", "precompiled", "none")
    kernel_module_type: str = choice("auto", "open", "proprietary")
    kernel_archive: bool = flag()
    epel: bool = flag(default=True)
    epel_repository: str = text(check.HTTP_URL)
    epel_key_fingerprint: str = text(check.FINGERPRINT)
    module_signing_key: str = text(check.PATH)
    module_signing_certificate: str = text(check.PATH)
    coherent_memory: str = text(check.one_of("driver", "numa"))
    reboot: str = choice("never", "if-needed")
    stop_containers: bool = flag()
    stop_display_manager: bool = flag()
    fabric_manager: str = choice("auto", "preinstalled")
    vgpu: Vgpu | None = check.option(schema_fields.Nested(check.schema_of(Vgpu), allow_none=True), None)
    gpudirect: tuple[str, ...] = several(TextOrList(check.one_of("rdma", "gdrcopy", "storage")))
    mps: bool = flag()
    mps_threads: int = number(default=100, largest=100)
    mps_memory: str = text(check.MPS_MEMORY)
    confidential_ready: str = choice("auto", "off")
    imex: str = choice("auto", "off", "service", "dra")
    imex_domain: str = text(check.MIG_CONFIG)
    imex_address: str = text(check.IMEX_NODE)
    imex_nodes: tuple[str, ...] = several(TextOrList(check.IMEX_NODE))
    imex_quorum: str = choice("recovery", "none", "full")
    imex_settings: tuple[str, ...] = several(TextOrList(check.IMEX_SETTING))
    dcgm: bool = flag()
    dcgm_exporter: bool = flag()
    mig_layout: tuple[str, ...] = several(TextOrList(check.MIG_LAYOUT))
    mig_config: str = text(check.MIG_CONFIG)
    mig_configs: str = text(check.URL_OR_PATH)
    mig_configs_sha256: str = text(check.SHA256)

    # Whether the machine's disk becomes an image, and which GPUs its copies will meet.
    target: str = choice(HOST, IMAGE)
    image_gpus: tuple[str, ...] = several(TextOrList(check.one_of(*GENERATIONS)))
    image_nvswitch: bool | None = check.option(check.StrictBoolean(allow_none=True), None)
    image_force: bool = flag()
    image_remove_signing_key: bool = flag()

    # What gives containers the GPUs, and everything else.
    docker: str = choice("distribution", "docker-ce", "preinstalled", "none")
    toolkit: str = choice("bundled", "nvidia")
    toolkit_version: str = text(check.PACKAGE_VERSION)
    toolkit_channel: str = choice("stable", "experimental")
    toolkit_repository: str = text(check.HTTP_URL, default="https://nvidia.github.io/libnvidia-container")
    toolkit_key_fingerprint: str = text(check.FINGERPRINT, default="C95B321B61E88C1809C4F759DDCAE044F796ECB0")
    cuda: str = text(check.form(r"\d{2}\.\d", "is not a CUDA version such as 12.4"))
    cuda_url: str = text(check.URL_OR_PATH)
    cuda_sha256: str = text(check.SHA256)
    cuda_repository: str = text(check.HTTP_URL, default="https://developer.download.nvidia.com/compute/cuda/repos")
    cuda_key_fingerprint: str = text(check.FINGERPRINT)
    engines: tuple[str, ...] = several(schema_fields.List(schema_fields.String(validate=check.one_of(*check.ENGINES))))
    default_runtime: bool = flag()
    restart_kubernetes: bool = flag()
    docker_default_runtime: bool = flag()
    nvidia_docker: bool = flag()
    serve: bool = flag()
    migrate_nvidia_docker: bool = flag()
    repositories: tuple[SiteRepository, ...] = several(check.rows_of(SiteRepository))
    proxy: str = text(check.PROXY)
    no_proxy: str = text(check.NO_PROXY)
    packages: tuple[str, ...] = several(schema_fields.List(schema_fields.String(validate=check.PACKAGE)))
    hold_pinned: bool = flag(default=True)
    lock_timeout: int = number(default=300, largest=86400)
    watch: str = choice("off", "hourly", "daily", "weekly")
    watch_metrics: str = text(
        check.PATH,
        check.form(r".*/[^/]+\.prom", "does not end with .prom, so node_exporter would not read it"),
        validate.Length(min=1),
        default="/var/lib/prometheus/node-exporter/gpuprov.prom",
    )
    verify_image: str = text(check.IMAGE)
    torch_image: str = text(check.IMAGE)
    tensorflow_image: str = text(check.IMAGE)
    accept_commands: tuple[AcceptCommand, ...] = several(
        check.rows_of(AcceptCommand, validate=validate.Length(max=16, error="has more than 16 commands"))
    )

    @property
    def divides_gpus(self) -> bool:
        """Say whether a MIG layout is given, here or in a file."""
        return bool(self.mig_layout or self.mig_config)


# Made once: a thousand hosts are checked against it.
_SCHEMA = check.schema_of(HostSpec)


def option_names() -> tuple[str, ...]:
    """Return the names of all options, without prefix, in their documented order."""
    return tuple(f.name for f in fields(HostSpec))


def parse_spec(values: Mapping[str, Any], origin: str = "", tables: Tables = PACKAGED) -> HostSpec:
    """Return the spec that `values` (names without prefix) describe; the rest takes its default.

    Raises GpuprovError with exit code 2 that lists every unknown name, with the nearest known one, and every wrong
    value. `origin` says where the values come from, for the message; `tables` what a branch means.
    """
    try:
        loaded: HostSpec = _SCHEMA().load({key: _finite(key, value, origin) for key, value in values.items()})
    except ValidationError as error:
        wrong = check.flat(error.messages)
        known = (*option_names(), *(one[len(PREFIX) :] for one in PLAY_VARIABLES))
        problems = tuple(check.problem_of(*one, values, origin, known) for one in wrong)
        raise UsageError.several(problems) from None
    return replace(loaded, driver_version=_driver_version(loaded, origin, tables))


def _driver_version(spec: HostSpec, origin: str, tables: Tables) -> str:
    """Return the release that is meant, where this is known: every host of a run gets the same.

    Nothing means the recommended one, which the host finds (driver/recommended.py). A mirror's index says what its
    branches are, the repository of NVIDIA's packages what theirs are; a site's table travels with the request, and is
    not there before.
    """
    version = spec.driver_version
    if version == "recommended":
        return ""
    if spec.driver != "runfile":
        return "" if version == "latest" else version
    if spec.driver_mirror or (spec.driver_releases and RELEASES not in tables.sent):
        return version
    found = tables.resolved(version)
    if found.isdecimal():
        day = tables.announced(found)
        reason = f"is a branch of which no release is known (it appeared on {day}): give a full version" if day else ""
        problem = check.problem_of("driver_version", reason or check.VERSION.error, {"driver_version": version}, origin)
        raise UsageError.several((problem,))
    return found


def spec_from_variables(variables: Mapping[str, Any], origin: str = "") -> HostSpec:
    """Return the spec that the `gpuprov_…` names among inventory variables describe; other names are not ours."""
    names = (name for name in variables if name.startswith(PREFIX) and name not in PLAY_VARIABLES)
    return parse_spec({name[len(PREFIX) :]: variables[name] for name in names}, origin)


def spec_to_json(spec: HostSpec) -> dict[str, Any]:
    """Return the spec as plain JSON values, such that parse_spec gives it back."""
    return dict(as_json(spec))


def _finite(name: str, value: Any, origin: str) -> Any:
    """Return the value in JSON's own types. Raises GpuprovError for one without an end (YAML's anchors)."""
    try:
        # A set (YAML's !!set) would get an order by chance, and a MIG layout is a list by index.
        plain = value if isinstance(value, (set, frozenset)) else as_json(value)
    except RecursionError:
        what = f"{PREFIX}{name} is nested too deep, or holds itself"
        raise UsageError(what, origin, "look for an anchor (&name, *name) in it") from None
    if has_long_number(plain):
        raise UsageError(f"{PREFIX}{name} has a number of more than 64 bits", origin, f"correct {PREFIX}{name}")
    return plain


def has_long_number(value: Any) -> bool:
    """Say whether a number is in a value whose digits Python may refuse to write."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, int) and value.bit_length() > 64) or any(map(has_long_number, parts))
