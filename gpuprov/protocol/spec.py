"""HostSpec: what the user asks a host to be, validated, with defaults; never what a host is (facts/host.py).

HostSpec and its bases (ImageOptions, driver_options.py) are the one place where an option is written
down: its inventory variable is the field's name with `gpuprov_` before it, its marshmallow field checks what comes in,
its `help` becomes the configuration reference.
Every value may come from a hostile inventory: what reaches a command line, a path or a URL passes an allow-list here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from marshmallow import RAISE, Schema, ValidationError, post_load, validate
from marshmallow import fields as schema_fields

from gpuprov.protocol import driver_releases, tables
from gpuprov.protocol.driver_options import DriverOptions
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.spec_fields import (
    ENGINES,
    FINGERPRINT,
    HTTP_URL,
    NAME,
    NO_PROXY,
    PACKAGE,
    PACKAGE_VERSION,
    PATH,
    PREFIX,
    PROXY,
    SHA256,
    URL_OR_PATH,
    VERSION,
    WORDS,
    OrEmpty,
    TextOrList,
    choice,
    flag,
    flat,
    maybe,
    number,
    option,
    problem_of,
    text,
)

# Those that some driver branch of today serves; driver/generations.py knows their device ids.
GENERATIONS = (
    "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "grace-hopper", "blackwell", "rubin",
)  # fmt: skip
HOST, IMAGE = "host", "image"


@dataclass(frozen=True)
class ImageOptions:
    """Whether a machine's disk becomes an image, and which GPUs its copies will meet."""

    target: str = choice(
        HOST,
        "`host`: this host with its GPUs. `image`: an image, built on a machine without a GPU and booted on others.",
        HOST, IMAGE,
    )  # fmt: skip
    image_gpus: tuple[str, ...] = option(
        TextOrList(validate.OneOf(GENERATIONS, error="is not one of {choices}")),
        (),
        "With `gpuprov_target: image`: the GPUs that its copies will meet, one generation or a list: "
        f"{', '.join(f'`{one}`' for one in GENERATIONS)}. They decide which kernel modules are built, unless "
        "gpuprov_kernel_module_type does.",
    )
    image_nvswitch: bool | None = maybe(
        "With `gpuprov_target: image`: whether its copies will meet NVSwitches (HGX and DGX machines), and so need the "
        "fabric manager.",
    )
    image_force: bool = flag(
        False,
        "With `gpuprov_target: image`: also build on a machine with GPUs, running containers, a display or a "
        "kubelet. Its identity (machine-id, SSH host keys) is removed.",
    )
    image_remove_signing_key: bool = flag(
        False,
        "With `gpuprov_target: image`: remove the private key with which DKMS signs kernel modules. With Secure Boot, "
        "copies then load the modules of the image, but none that DKMS builds later.",
    )


class RepositorySchema(Schema):
    """One more package repository of the site's own."""

    class Meta:
        unknown = RAISE

    name = schema_fields.String(required=True, validate=NAME)
    uri = schema_fields.String(required=True, validate=HTTP_URL)
    suite = schema_fields.String(load_default="./", validate=WORDS)
    components = schema_fields.String(load_default="", validate=OrEmpty(WORDS))
    key_url = schema_fields.String(required=True, validate=HTTP_URL)
    key_fingerprint = schema_fields.String(required=True, validate=FINGERPRINT)

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


# Read by the playbooks alone: how a play goes over its hosts, not what a host shall be.
PLAY_VARIABLES = frozenset(
    ("gpuprov_play_hosts", "gpuprov_play_serial", "gpuprov_play_any_errors_fatal", "gpuprov_play_bootstrap_python",
     "gpuprov_play_bundle", "gpuprov_play_bundle_key", "gpuprov_play_container", "gpuprov_play_fix",
     "gpuprov_play_remember", "gpuprov_play_before_host_tasks", "gpuprov_play_after_host_tasks")
)  # fmt: skip


@dataclass(frozen=True)
class HostSpec(ImageOptions, DriverOptions):
    """What a host shall be."""

    docker: str = choice(
        "distribution",
        "Where docker comes from if it is missing: the `distribution`, `docker-ce` (Docker's repository; needed for"
        " Red Hat's family), `preinstalled` (never install it), or `none` (neither require nor touch docker).",
        "distribution", "docker-ce", "preinstalled", "none",
    )  # fmt: skip
    toolkit: str = choice(
        "bundled",
        "What puts GPUs into containers: gpuprov's `bundled` runtime, or NVIDIA's container toolkit (`nvidia`) from "
        "its signed repository.",
        "bundled", "nvidia",
    )  # fmt: skip
    toolkit_version: str = text(
        "", "The version of NVIDIA's toolkit packages, such as 1.19.1-1. Default: the newest.", PACKAGE_VERSION
    )
    toolkit_channel: str = choice(
        "stable",
        "Which releases of NVIDIA's toolkit there are to choose from: `stable`, or `experimental`, which adds release "
        "candidates.",
        "stable", "experimental",
    )  # fmt: skip
    toolkit_repository: str = text(
        "https://nvidia.github.io/libnvidia-container",
        "Where NVIDIA's toolkit repository, or its mirror, lies.",
        HTTP_URL,
    )
    toolkit_key_fingerprint: str = text(
        "C95B321B61E88C1809C4F759DDCAE044F796ECB0",
        "The fingerprint of the key that signs it. ",
        FINGERPRINT,
    )
    cuda: str = text(
        "",
        "The CUDA toolkit to install from NVIDIA's repository, such as 12.4. Default: none; containers bring theirs.",
        validate.Regexp(r"\d{2}\.\d\Z", error="is not a CUDA version such as 12.4"),
    )
    cuda_url: str = text(
        "",
        "The toolkit's .run file instead of the repository: a URL, or an absolute path on the host. It is installed"
        " into /usr/local/cuda-VERSION, and /usr/local/cuda links to it.",
        URL_OR_PATH,
    )
    cuda_sha256: str = text("", "The SHA-256 of that file. Needed with a URL.", SHA256)
    cuda_repository: str = text(
        "https://developer.download.nvidia.com/compute/cuda/repos",
        "Where NVIDIA's CUDA repositories, or their mirror, lie: a folder for each distribution below it.",
        HTTP_URL,
    )
    cuda_key_fingerprint: str = text(
        "", "The fingerprint of the key that signs it. Default: NVIDIA's for the distribution.", FINGERPRINT
    )
    engines: tuple[str, ...] = option(
        schema_fields.List(schema_fields.String(validate=validate.OneOf(ENGINES, error="is not one of {choices}"))),
        (),
        "Engines besides docker to configure: a list of `containerd`, `crio`, `podman`, `k3s`, `microk8s`, `rke2`, "
        "which must be installed. Default: none; with `gpuprov_docker: none` the installed ones of the first three,"
        " but a Kubernetes node's engine is restarted only if it is named.",
    )
    default_runtime: bool = flag(
        False,
        "Make `nvidia` the default runtime of containerd, CRI-O, k3s, RKE2 and microk8s where they are configured: "
        "pods then need no RuntimeClass. Docker's is `gpuprov_docker_default_runtime`.",
    )
    restart_kubernetes: bool = flag(
        False,
        "Restart k3s, RKE2 or microk8s if a file has changed. Pods keep running; a server node's API server does "
        "not answer for some seconds. Default: print the command.",
    )
    docker_default_runtime: bool = flag(False, "Make `nvidia` docker's default runtime.")
    nvidia_docker: bool = flag(
        False,
        "Install a command `nvidia-docker` for scripts that use it: `run` and `create` get the GPUs, `NV_GPU` chooses "
        "them. A command of that name that is not gpuprov's is left alone.",
    )
    serve: bool = flag(
        False,
        "Install a service that answers as nvidia-docker-plugin did, on 127.0.0.1:3476 and on a unix socket. "
        "`gpuprov docker-args` is the safer way.",
    )
    migrate_nvidia_docker: bool = flag(
        False,
        "Remove leftovers of nvidia-docker 1 and 2: packages, plugin, unused volumes, repositories and keys, "
        "runtimes without a program. Containers stay.",
    )
    repositories: tuple[SiteRepository, ...] = option(
        schema_fields.List(schema_fields.Nested(RepositorySchema)),
        (),
        "More signed package repositories: a list of `name`, `uri`, `suite` (default `./`), `components`, `key_url`, "
        "`key_fingerprint`. `suite` and `components` are apt's alone. A login in `uri` (`https://USER:PASSWORD@…`) is "
        "stored for root only.",
    )
    proxy: str = text(
        "",
        "The HTTP proxy of downloads, of apt, dnf and zypper (for the run only) and of docker's daemon: "
        "`http://USER:PASSWORD@HOST:PORT`. Default: the environment's. No message, report or command line has the "
        "password.",
        PROXY,
    )
    no_proxy: str = text(
        "",
        "What is reached without the proxy: hosts, domains (`.example.org`) and networks with commas between.",
        NO_PROXY,
    )
    packages: tuple[str, ...] = option(
        schema_fields.List(schema_fields.String(validate=PACKAGE)), (), "More packages to install."
    )
    hold_pinned: bool = flag(
        True,
        "Hold packages whose version is asked for, and the fabric manager beside a .run file, so that unattended "
        "upgrades leave them (apt-mark hold, versionlock, zypper's locks). The kernel is never held.",
    )
    lock_timeout: int = number(
        300,
        "How many seconds to wait for another program (unattended-upgrades, say) that holds the package manager.",
        86400,
    )
    watch: str = choice(
        "off",
        "How often a systemd timer checks and verifies the host and writes metrics (`hourly`, `daily`, `weekly`); "
        "`off` removes it.",
        "off", "hourly", "daily", "weekly",
    )  # fmt: skip
    watch_metrics: str = text(
        "/var/lib/prometheus/node-exporter/gpuprov.prom",
        "The file that the timer writes, for node_exporter's textfile collector. Its folder must exist; the default is "
        "the folder of Debian's prometheus-node-exporter.",
        PATH,
        validate.Regexp(r".*/[^/]+\.prom\Z", error="does not end with .prom, so node_exporter would not read it"),
        validate.Length(min=1),
    )
    verify_image: str = text(
        "",
        "The image to run nvidia-smi in. Default: a tiny one made of the host's own C library and shell.",
        validate.Regexp(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*\Z", error="is not an image reference"),
    )
    torch_image: str = text(
        "",
        "An image with PyTorch: verify asks it for its GPUs and computes on each. Default: that check is left out.",
        validate.Regexp(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*\Z", error="is not an image reference"),
    )
    tensorflow_image: str = text(
        "",
        "An image with TensorFlow: verify asks it for its GPUs. Default: that check is left out.",
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
        loaded = _schema()(unknown=RAISE).load({key: _finite(key, value, origin) for key, value in values.items()})
    except ValidationError as error:
        problems = tuple(
            problem_of(name, reason, values, origin, option_names()) for name, reason in flat(error.messages)
        )
        raise GpuprovError.several(problems, exit_code=ExitCode.USAGE) from None
    settings: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in loaded.items()
    }
    return HostSpec(**{**settings, "driver_version": _driver_version(settings, origin)})


def _driver_version(settings: Mapping[str, Any], origin: str) -> str:
    """Return the release that is meant, where this is known: every host of a run gets the same.

    A mirror's index says what its branches are, the repository of NVIDIA's packages what theirs are; a site's table
    travels with the request, and is not there before.
    """
    version: str = settings.get("driver_version", "")
    if settings.get("driver", "runfile") != "runfile":
        return "" if version == "latest" else version
    if settings.get("driver_mirror") or (settings.get("driver_releases") and not tables.is_replaced(tables.RELEASES)):
        return version
    found = driver_releases.resolved(version)
    if found.isdigit():
        day = driver_releases.announced(found)
        reason = f"is a branch of which no release is known (it appeared on {day}): give a full version" if day else ""
        problem = problem_of("driver_version", reason or VERSION.error, {"driver_version": version}, origin)
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


def _finite(name: str, value: Any, origin: str) -> Any:
    """Return the value in JSON's own types. Raises GpuprovError for one without an end (YAML's anchors)."""
    try:
        return _plain(value)
    except RecursionError:
        raise GpuprovError(
            f"{PREFIX}{name} is nested too deep, or holds itself", origin, "look for an anchor (&name, *name) in it",
            exit_code=ExitCode.USAGE,
        ) from None  # fmt: skip


def _plain(value: Any) -> Any:
    """Return the value in JSON's own types: Ansible hands out subclasses of str, tuples and the like."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value
