"""HostSpec: what the user asks a host to be, validated, with defaults; never what a host is (facts.py).

The dataclass below is the one place where an option is written down: its inventory variable is the field's name with
`gpuprov_` before it, its marshmallow field checks what comes in, its `help` becomes the configuration reference.
Every value may come from a hostile inventory: what reaches a command line, a path or a URL passes an allow-list here.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from marshmallow import RAISE, Schema, ValidationError, post_load, validate
from marshmallow import fields as schema_fields

from gpuprov.driver import releases
from gpuprov.errors import ExitCode, GpuprovError, Problem

PREFIX = "gpuprov_"
# Read by the playbooks alone: how a play goes over its hosts, not what a host shall be.
PLAY_VARIABLES = frozenset(
    ("gpuprov_play_hosts", "gpuprov_play_serial", "gpuprov_play_any_errors_fatal", "gpuprov_play_bootstrap_python",
     "gpuprov_play_bundle", "gpuprov_play_bundle_key")
)  # fmt: skip

_VERSION = validate.Regexp(
    r"\d{3,4}(\.\d{1,4}){0,3}\Z|latest\Z",
    error=f"is not a driver version such as 550.163.01, nor a branch ({', '.join(releases.branches())}), nor latest",
)
_SHA256 = validate.Regexp(r"[0-9a-f]{64}\Z", error="is not a SHA-256 digest (64 hexadecimal digits, lower case)")
_URL_OR_PATH = validate.Regexp(
    r"(https?|file)://[^\s'\"`$;|&<>\\]+\Z|/[^\s'\"`$;|&<>\\]*\Z",
    error="is neither a URL (http, https, file) nor an absolute path",
)
_PATH = validate.Regexp(r"/[A-Za-z0-9._/+@-]*\Z", error="is not an absolute path (letters, digits and ._/+@- alone)")
_HTTP_URL = validate.Regexp(r"https?://[^\s'\"`$;|&<>\\]+\Z", error="is not an http or https URL")
_NAME = validate.Regexp(
    r"[a-z0-9][a-z0-9_.-]{0,63}\Z", error="is not a name of small letters, digits, '.', '_' and '-'"
)
_PACKAGE = validate.Regexp(
    r"[A-Za-z0-9][A-Za-z0-9+._-]*(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~_-]+)?\Z", error="is not a package name"
)
_FINGERPRINT = validate.Regexp(
    r"[0-9A-F]{40}\Z|[0-9A-F]{64}\Z", error="is not a full key fingerprint (40 hexadecimal digits, capitals)"
)
_MIG_LAYOUT = validate.Regexp(
    r"disabled\Z|all-\d+g\.\d+gb(\+[a-z.]+)?\Z|\d+g\.\d+gb(\+[a-z.]+)?(,\d+g\.\d+gb(\+[a-z.]+)?)*\Z",
    error="is neither disabled, nor all-PROFILE, nor profiles with commas between, such as 3g.40gb,2g.20gb,2g.20gb",
)
_ENGINES = ("containerd", "crio", "podman")
_WORDS = validate.Regexp(r"[A-Za-z0-9./_-]+( [A-Za-z0-9./_-]+)*\Z", error="is not a list of plain words")


class _OrEmpty(validate.Validator):
    def __init__(self, check: validate.Validator) -> None:
        self.check = check

    def __call__(self, value: Any) -> Any:
        return value if value == "" else self.check(value)


class _RepositorySchema(Schema):
    """One more package repository of the site's own."""

    class Meta:
        unknown = RAISE

    name = schema_fields.String(required=True, validate=_NAME)
    uri = schema_fields.String(required=True, validate=_HTTP_URL)
    suite = schema_fields.String(load_default="./", validate=_WORDS)
    components = schema_fields.String(load_default="", validate=_OrEmpty(_WORDS))
    key_url = schema_fields.String(required=True, validate=_HTTP_URL)
    key_fingerprint = schema_fields.String(required=True, validate=_FINGERPRINT)

    @post_load
    def _make(self, data: dict[str, Any], **_: Any) -> SiteRepository:
        return SiteRepository(**data)


@dataclass(frozen=True)
class SiteRepository:
    """A signed package repository: the key at `key_url` counts only if it has the full `key_fingerprint`."""

    name: str
    uri: str
    key_url: str
    key_fingerprint: str
    suite: str = "./"
    components: str = ""


def _option(check: schema_fields.Field, default: Any, text: str, *, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"check": check, "help": text, "choices": choices})


def _text(default: str, text: str, *checks: validate.Validator) -> Any:
    # The empty string always means "not given".
    allowed = [_OrEmpty(check) for check in checks]
    return _option(schema_fields.String(validate=allowed), default, text)


def _choice(default: str, text: str, *choices: str) -> Any:
    check = validate.OneOf(choices, error="is not one of {choices}")
    return _option(schema_fields.String(validate=check), default, text, choices=choices)


def _flag(default: bool, text: str) -> Any:
    return _option(_StrictBoolean(), default, text)


def _number(default: int, text: str, largest: int) -> Any:
    check = validate.Range(0, largest, error="is not a whole number from {min} to {max}")
    return _option(schema_fields.Integer(validate=check), default, text)


class _TextOrList(schema_fields.Field):
    """One text, or a list of texts; either becomes a tuple."""

    def __init__(self, check: validate.Validator, **more: Any) -> None:
        super().__init__(**more)
        self._check = check

    def _deserialize(self, value: Any, attr: str | None, data: Any, **kwargs: Any) -> list[str]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValidationError("must be text or a list of texts")
        return [self._check(text) for text in texts if len(texts) > 1 or text]


class _StrictBoolean(schema_fields.Boolean):
    """A boolean as YAML and Ansible's `-e` write it, and nothing else: no 1, no "on the"."""

    truthy = {True, "true", "True", "yes", "Yes"}  # noqa: RUF012 (marshmallow's own interface)
    falsy = {False, "false", "False", "no", "No"}  # noqa: RUF012

    def _deserialize(self, value: Any, attr: str | None, data: Any, **kwargs: Any) -> bool:
        if not isinstance(value, (bool, str)):
            raise self.make_error("invalid", input=value)
        return bool(super()._deserialize(value, attr, data, **kwargs))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class HostSpec:
    """What a host shall be."""

    driver: str = _choice(
        "runfile",
        "Where the driver comes from: `runfile` installs NVIDIA's .run file, `packages` NVIDIA's packages from its "
        "CUDA repository, `preinstalled` takes what is there.",
        "runfile", "packages", "preinstalled",
    )  # fmt: skip
    driver_version: str = _text(
        "",
        "The driver's version, such as 550.163.01, or a branch: 580 is its newest release that this gpuprov knows (by "
        "its digest), `latest` that of the long-term branch. Needed with `driver: runfile`; with `packages` it is what "
        "they are pinned to, where the repository can (branch or version; default: its newest).",
        _VERSION,
    )
    driver_url: str = _text(
        "",
        "Where the .run file lies: a URL, or an absolute path on the host. Default: NVIDIA's download server, "
        "us.download.nvidia.com/XFree86 (data-centre releases that are not there: …/tesla/VERSION/, with the digest).",
        _URL_OR_PATH,
    )
    driver_sha256: str = _text(
        "",
        "The SHA-256 of the .run file. Default: the one that this gpuprov knows, else the `.sha256sum` file beside it.",
        _SHA256,
    )
    driver_mirror: str = _text(
        "",
        "A mirror of NVIDIA's .run files, by its index: a page with links or a text, below which lie "
        "VERSION/NVIDIA-Linux-ARCH-VERSION.run, or the files. A branch, or `latest`, is then the newest one that it "
        "lists.",
        _HTTP_URL,
    )
    kernel_modules: str = _choice(
        "auto",
        "Who brings the kernel's half of the driver: `build` compiles it for the running kernel, `none` installs the "
        "libraries only. `auto` means `none` inside a system container (LXC, systemd-nspawn), whose kernel belongs to "
        "the machine outside, else `build`.",
        "auto", "build", "none",
    )  # fmt: skip
    kernel_module_type: str = _choice(
        "auto",
        "Which kernel modules are built: NVIDIA's open or proprietary ones. `auto` takes those that the GPUs found "
        "need, and leaves it to the installer where both would do.",
        "auto", "open", "proprietary",
    )  # fmt: skip
    kernel_archive: bool = _flag(
        False,
        "Add the distribution's archive of the running kernel's release (the vaults of Rocky Linux, AlmaLinux and "
        "CentOS 7), for headers that the repositories have no longer.",
    )
    module_signing_key: str = _text(
        "",
        "With Secure Boot: the private key, a path on the host, that signs the kernel modules. Its certificate must be "
        "enrolled in the firmware.",
        _PATH,
    )
    module_signing_certificate: str = _text("", "The certificate (DER) of that key, a path on the host.", _PATH)
    reboot: str = _choice(
        "never",
        "Whether gpuprov may reboot a host that needs it, and go on afterwards: `never` (the run ends with exit code 3 "
        "and says why), or `if-needed`. This machine is never rebooted in the midst of a run over other hosts.",
        "never", "if-needed",
    )  # fmt: skip
    stop_containers: bool = _flag(
        False,
        "Whether containers that use a GPU may be stopped while a loaded driver is replaced; they are started again. "
        "The driver's own services (nvidia-persistenced, fabric manager, DCGM) are stopped and started in any case.",
    )
    stop_display_manager: bool = _flag(False, "Whether the display manager may be stopped for it, and started again.")
    fabric_manager: str = _choice(
        "auto",
        "On machines with NVSwitches: `auto` installs NVIDIA's fabric manager of the driver's very version, from its "
        "CUDA repository, and runs it; `preinstalled` leaves it to the site and only compares versions.",
        "auto", "preinstalled",
    )  # fmt: skip
    mig_layout: tuple[str, ...] = _option(
        _TextOrList(_MIG_LAYOUT),
        (),
        "How GPUs are divided by MIG: one text for all, or a list with one for each GPU by index: `disabled`, "
        "`all-1g.10gb` (as many as there is room for), or profiles such as `3g.40gb,2g.20gb,2g.20gb`. Default: as "
        "they are.",
    )
    docker: str = _choice(
        "distribution",
        "Where docker comes from if it is missing: the `distribution`'s package, `docker-ce` (Docker's own repository: "
        "Red Hat's family has no docker of its own), or `preinstalled` (never install it).",
        "distribution", "docker-ce", "preinstalled",
    )  # fmt: skip
    toolkit: str = _choice(
        "bundled",
        "What puts GPUs into containers: gpuprov's `bundled` runtime, or NVIDIA's container toolkit (`nvidia`) from "
        "its signed repository.",
        "bundled", "nvidia",
    )  # fmt: skip
    toolkit_version: str = _text("", "The version of NVIDIA's toolkit packages. Default: the newest.", _PACKAGE)
    toolkit_channel: str = _choice(
        "stable",
        "Which releases of NVIDIA's toolkit there are to choose from: `stable`, or `experimental`, which adds release "
        "candidates.",
        "stable", "experimental",
    )  # fmt: skip
    toolkit_repository: str = _text(
        "https://nvidia.github.io/libnvidia-container",
        "Where NVIDIA's toolkit repository, or its mirror, lies.",
        _HTTP_URL,
    )
    toolkit_key_fingerprint: str = _text(
        "C95B321B61E88C1809C4F759DDCAE044F796ECB0",
        "The fingerprint of the key that signs it. ",
        _FINGERPRINT,
    )
    cuda: str = _text(
        "",
        "The CUDA toolkit to install from NVIDIA's repository, such as 12.4. Default: none; containers bring theirs.",
        validate.Regexp(r"\d{2}\.\d\Z", error="is not a CUDA version such as 12.4"),
    )
    cuda_url: str = _text(
        "",
        "Where the toolkit's own .run file lies (a URL, or an absolute path on the host), if it is not to come from "
        "the repository: it is installed into /usr/local/cuda-VERSION, and /usr/local/cuda is linked to it.",
        _URL_OR_PATH,
    )
    cuda_sha256: str = _text("", "The SHA-256 of that file. Needed with a URL.", _SHA256)
    cuda_repository: str = _text(
        "https://developer.download.nvidia.com/compute/cuda/repos",
        "Where NVIDIA's CUDA repositories, or their mirror, lie: a folder for each distribution below it.",
        _HTTP_URL,
    )
    cuda_key_fingerprint: str = _text(
        "", "The fingerprint of the key that signs it. Default: NVIDIA's for the distribution.", _FINGERPRINT
    )
    engines: tuple[str, ...] = _option(
        schema_fields.List(schema_fields.String(validate=validate.OneOf(_ENGINES, error="is not one of {choices}"))),
        (),
        "Engines besides docker that shall know the runtime: a list of `containerd`, `crio`, `podman`. They must be "
        "installed; k3s, RKE2 and microk8s: `gpuprov runtime configure`.",
    )
    docker_default_runtime: bool = _flag(False, "Make `nvidia` docker's default runtime.")
    repositories: tuple[SiteRepository, ...] = _option(
        schema_fields.List(schema_fields.Nested(_RepositorySchema)),
        (),
        "More signed package repositories: a list of `name`, `uri`, `suite` (default `./`), `components`, `key_url`, "
        "`key_fingerprint`. `suite` and `components` are apt's alone.",
    )
    packages: tuple[str, ...] = _option(
        schema_fields.List(schema_fields.String(validate=_PACKAGE)), (), "More packages to install."
    )
    hold_pinned: bool = _flag(
        True,
        "Hold packages whose version is asked for (apt-mark hold, versionlock, zypper's locks), so that unattended "
        "upgrades leave them. The kernel is never held.",
    )
    lock_timeout: int = _number(
        300,
        "How many seconds to wait for another program (unattended-upgrades, say) that holds the package manager.",
        86400,
    )
    verify_image: str = _text(
        "",
        "The image to run nvidia-smi in. Default: a tiny one made of the host's own C library and shell.",
        validate.Regexp(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*\Z", error="is not an image reference"),
    )
    torch_image: str = _text(
        "",
        "An image with PyTorch, to run `torch.cuda.is_available()` in. Default: that check is left out.",
        validate.Regexp(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*\Z", error="is not an image reference"),
    )


def option_names() -> tuple[str, ...]:
    """Return the names of all options, without prefix, in their documented order."""
    return tuple(f.name for f in fields(HostSpec))


def parse_spec(values: Mapping[str, Any], origin: str = "") -> HostSpec:
    """Return the spec that `values` (names without prefix) describe; the rest takes its default.

    Raises GpuprovError with exit code 2 that lists every unknown name, with the nearest known one, and every wrong
    value. `origin` says where the values come from, for the message.
    """
    try:
        loaded = _schema()(unknown=RAISE).load({key: _plain(value) for key, value in values.items()})
    except ValidationError as error:
        problems = tuple(_problem(name, reason, values, origin) for name, reason in _flat(error.messages))
        raise GpuprovError.several(problems, exit_code=ExitCode.USAGE) from None
    settings: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in loaded.items()
    }
    return HostSpec(**{**settings, "driver_version": _driver_version(settings, origin)})


def _driver_version(settings: Mapping[str, Any], origin: str) -> str:
    """Return the release that is meant, where this is known: every host of a run gets the same.

    A mirror's index says what its branches are, and the repository of NVIDIA's packages what theirs are.
    """
    version: str = settings.get("driver_version", "")
    if settings.get("driver", "runfile") != "runfile":
        return "" if version == "latest" else version
    if settings.get("driver_mirror"):
        return version
    found = releases.resolved(version)
    if found.isdigit():
        problem = _problem("driver_version", _VERSION.error, {"driver_version": version}, origin)
        raise GpuprovError.several((problem,), exit_code=ExitCode.USAGE)
    return found


@functools.cache
def _schema() -> type[Schema]:
    """Return the schema of all options; made once, for a thousand hosts are checked against it."""
    return Schema.from_dict({f.name: f.metadata["check"] for f in fields(HostSpec)})


def spec_from_variables(variables: Mapping[str, Any], origin: str = "") -> HostSpec:
    """Return the spec that the `gpuprov_…` names among inventory variables describe; other names are not ours."""
    names = (name for name in variables if name.startswith(PREFIX) and name not in PLAY_VARIABLES)
    ours = {name[len(PREFIX) :]: variables[name] for name in names}
    return parse_spec(ours, origin)


def spec_to_json(spec: HostSpec) -> dict[str, Any]:
    """Return the spec as plain JSON values, such that parse_spec gives it back."""
    return {key: _plain(value) for key, value in asdict(spec).items()}


def _plain(value: Any) -> Any:
    """Return the value in JSON's own types: Ansible hands out subclasses of str, tuples and the like."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _flat(messages: Any, path: str = "") -> list[tuple[str, str]]:
    """Return (path, reason) pairs from marshmallow's nested messages."""
    if isinstance(messages, Mapping):
        return [pair for key, inner in messages.items() for pair in _flat(inner, f"{path}.{key}" if path else str(key))]
    return [(path, str(reason)) for reason in messages]


def _problem(path: str, reason: str, values: Mapping[str, Any], origin: str) -> Problem:
    name = path.split(".")[0]
    where = f"in {origin}" if origin else ""
    if reason == "Unknown field.":
        known = option_names() if path == name else ("name", "uri", "suite", "components", "key_url", "key_fingerprint")
        near = difflib.get_close_matches(path.rsplit(".", 1)[-1], known, n=1, cutoff=0.6)
        hint = f"did you mean {PREFIX if path == name else ''}{near[0]}?" if near else ""
        return Problem(f"there is no variable {PREFIX}{path}", where, hint or "`gpuprov options` lists all variables")
    what = f"{PREFIX}{path} {_REASONS.get(reason, reason)}"
    return Problem(
        what, f"{where + ': ' if where else ''}{values.get(name)!r}", "`gpuprov options` lists what each variable takes"
    )


_REASONS = {
    "Not a valid string.": "must be text (put a version number in quotes)",
    "Not a valid boolean.": "must be true or false",
    "Not a valid list.": "must be a list",
    "Not a valid integer.": "must be a whole number",
    "Invalid input type.": "must be a mapping",
    "Missing data for required field.": "is missing",
}
