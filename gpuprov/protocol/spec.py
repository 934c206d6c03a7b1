"""HostSpec: what the user asks a host to be, validated, with defaults; never what a host is (facts/host.py).

HostSpec and its bases (ImageOptions, DriverOptions) are the one place where an option is written
down: its inventory variable is the field's name with `gpuprov_` before it, its marshmallow field checks what comes in,
its `help` becomes the configuration reference.
Every value may come from a hostile inventory: what reaches a command line, a path or a URL passes an allow-list here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from marshmallow import RAISE, Schema, ValidationError, post_load, validate
from marshmallow import fields as schema_fields

from gpuprov.protocol import spec_fields as check
from gpuprov.protocol import tables
from gpuprov.protocol.codec import as_json
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.spec_fields import PREFIX, OrEmpty, TextOrList, choice, flag, maybe, number, several, text


@dataclass(frozen=True)
class DriverOptions:
    """Which driver a host shall have, how it is built, and what may stop for it."""

    driver: str = choice(
        "The driver's source: `runfile` (NVIDIA's .run file), `packages` (NVIDIA's CUDA repository), `distribution`"
        " (the distribution's own; Debian, Ubuntu, SUSE, Amazon Linux), or `preinstalled`. `runfile` without a version"
        " is the same as the default: a driver from another source that an earlier run chose or found stays.",
        ("runfile", "packages", "distribution", "preinstalled"),
    )
    driver_version: str = text(
        "The driver's version, such as 580.178.04, or a branch: 580 is its newest release with a known digest, "
        "`latest` that of the long-term branch. Default: `recommended`, which keeps a driver that serves the GPUs, "
        "else takes the newest release without known holes of the long-term branch, or of one that the GPUs need. With "
        "`packages`: the branch or version to pin (default: the newest); with `distribution`: a branch.",
        check.VERSION,
    )
    driver_url: str = text(
        "The .run file: a URL, or an absolute path on the host. Default: NVIDIA's download server.", check.URL_OR_PATH
    )
    driver_sha256: str = text(
        "The SHA-256 of the .run file. Default: the one that this gpuprov knows, else the `.sha256sum` file beside it.",
        check.SHA256,
    )
    driver_mirror: str = text(
        "A mirror of NVIDIA's .run files, by its index: a page with links or a text. A branch, or `latest`, is then"
        " the newest release that it lists.",
        check.HTTP_URL,
    )
    keep_driver: bool = flag(
        "Keep the .run files (of a bundle: packages) of the installed driver and of the one before it, for a rollback.",
        default=True,
    )
    driver_updates: str = choice(
        "`hold`: no upgrade changes the driver's packages (libraries, modules, fabric manager, IMEX) but gpuprov's, "
        "whatever `gpuprov_hold_pinned` says. `follow`: they are not held; after an upgrade the CDI specification "
        "follows, or /run/reboot-required says that a reboot is due.",
        ("hold", "follow"),
    )
    driver_releases: str = text(
        "A table of driver releases instead of gpuprov/protocol/driver_releases.json: a URL, or an absolute path on"
        " the machine where gpuprov or Ansible runs. Needs its digest.",
        check.URL_OR_PATH,
    )
    driver_releases_sha256: str = text("The SHA-256 of that table.", check.SHA256)
    servers: str = text(
        "A table that replaces some or all servers of gpuprov/protocol/servers.json: a URL, or an absolute path on "
        "the machine where gpuprov or Ansible runs. Needs its digest.",
        check.URL_OR_PATH,
    )
    servers_sha256: str = text("The SHA-256 of that table.", check.SHA256)
    models: str = text(
        "A table of GPU models, and of what they need, instead of gpuprov/protocol/models.json: a URL, or an absolute "
        "path on the machine where gpuprov or Ansible runs. Needs its digest.",
        check.URL_OR_PATH,
    )
    models_sha256: str = text("The SHA-256 of that table.", check.SHA256)
    refuse_advisories: str = choice(
        "Refuse a driver, or a toolkit of NVIDIA's, with known security holes from this CVSS score on: `high` "
        "(7.0), `critical` (9.0), or `none`, which only warns.",
        ("none", "high", "critical"),
    )
    allow_known_problems: tuple[str, ...] = several(
        "Known problems (`gpuprov advisories` lists them) that an installation may make: a list of names. Others are "
        "refused.",
        schema_fields.List(schema_fields.String(validate=check.NAME)),
    )
    kernel_modules: str = choice(
        "Where kernel modules come from: `build` compiles them for the running kernel, `precompiled` takes packages"
        " (`gpuprov_driver: packages`), `none` installs the libraries only. `auto`: `none` in a system container "
        "(LXC, systemd-nspawn), else `precompiled` if repositories have them, else `build`.",
        ("auto", "build", "precompiled", "none"),
    )
    kernel_module_type: str = choice(
        "Which kernel modules: NVIDIA's `open` or `proprietary` ones. `auto` takes those that the GPUs need, else "
        "the installer's choice.",
        ("auto", "open", "proprietary"),
    )
    kernel_archive: bool = flag(
        "Add the distribution's archive of the running kernel's release (the vaults of Rocky Linux and AlmaLinux), "
        "for headers that the repositories no longer have."
    )
    epel: bool = flag(
        "If modules are built and the distribution has no DKMS (Red Hat's family, SLES), take it, and nothing else,"
        " from EPEL or SUSE's Package Hub.",
        default=True,
    )
    epel_repository: str = text(
        "A mirror of EPEL (the folder with 8, 9 and 10) or of openSUSE:Backports. Default: "
        "`epel` and `opensuse-backports` of gpuprov_servers.",
        check.HTTP_URL,
    )
    epel_key_fingerprint: str = text(
        "The fingerprint of the key that signs it. Default: the one that this gpuprov knows.", check.FINGERPRINT
    )
    module_signing_key: str = text(
        "With Secure Boot: the private key, a path on the host, that signs the kernel modules, those too that DKMS "
        "builds later. Its certificate must be enrolled in the firmware.",
        check.PATH,
    )
    module_signing_certificate: str = text("The certificate (DER) of that key, a path on the host.", check.PATH)
    reboot: str = choice(
        "Allow gpuprov to reboot a host that needs it, and to continue afterwards: `if-needed`, or `never` (the run "
        "ends with exit code 3 and says why). A run over other hosts never reboots this machine.",
        ("never", "if-needed"),
    )
    stop_containers: bool = flag(
        "Allow gpuprov to stop containers that use a GPU while it replaces a loaded driver, and start them again. The "
        "driver's own services (nvidia-persistenced, fabric manager, DCGM) are stopped and started in any case."
    )
    stop_display_manager: bool = flag(
        "Allow gpuprov to stop the display manager while it replaces a loaded driver, and start it again."
    )
    fabric_manager: str = choice(
        "On machines with NVSwitches: `auto` installs and runs NVIDIA's fabric manager of the driver's version; "
        "`preinstalled` only compares versions.",
        ("auto", "preinstalled"),
    )
    dcgm: bool = flag(
        "Install DCGM 4 for the driver's CUDA version from NVIDIA's repository or the bundle, and run nvidia-dcgm."
    )
    dcgm_exporter: bool = flag("With it, install and run NVIDIA's dcgm-exporter: metrics for Prometheus, port 9400.")
    mig_layout: tuple[str, ...] = several(
        "The MIG layout, one for all GPUs or a list by index: `disabled`, `all-1g.10gb` (as many as fit), or "
        "profiles such as `3g.40gb,2g.20gb,2g.20gb`. Default: unchanged.",
        TextOrList(check.MIG_LAYOUT),
    )


# Those that some driver branch of today serves; models.json knows their device ids.
GENERATIONS = (
    "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "grace-hopper", "blackwell", "rubin",
)  # fmt: skip
HOST, IMAGE = "host", "image"


@dataclass(frozen=True)
class ImageOptions:
    """Whether a machine's disk becomes an image, and which GPUs its copies will meet."""

    target: str = choice(
        "`host`: this host with its GPUs. `image`: an image, built on a machine without a GPU and booted on others.",
        (HOST, IMAGE),
    )
    image_gpus: tuple[str, ...] = several(
        "With `gpuprov_target: image`: the GPUs that its copies will meet, one generation or a list: "
        f"{', '.join(f'`{one}`' for one in GENERATIONS)}. They decide which kernel modules are built, unless "
        "gpuprov_kernel_module_type does.",
        TextOrList(validate.OneOf(GENERATIONS, error="is not one of {choices}")),
    )
    image_nvswitch: bool | None = maybe(
        "With `gpuprov_target: image`: whether its copies will meet NVSwitches (HGX and DGX machines), and so need the "
        "fabric manager."
    )
    image_force: bool = flag(
        "With `gpuprov_target: image`: also build on a machine with GPUs, running containers, a display or a "
        "kubelet. Its identity (machine-id, SSH host keys) is removed."
    )
    image_remove_signing_key: bool = flag(
        "With `gpuprov_target: image`: remove the private key with which DKMS signs kernel modules. With Secure Boot, "
        "copies then load the modules of the image, but none that DKMS builds later."
    )


class RepositorySchema(Schema):
    """One more package repository of the site's own."""

    class Meta:
        unknown = RAISE

    name = schema_fields.String(required=True, validate=check.NAME)
    uri = schema_fields.String(required=True, validate=check.HTTP_URL)
    suite = schema_fields.String(load_default="./", validate=check.WORDS)
    components = schema_fields.String(load_default="", validate=OrEmpty(check.WORDS))
    key_url = schema_fields.String(required=True, validate=check.HTTP_URL)
    key_fingerprint = schema_fields.String(required=True, validate=check.FINGERPRINT)

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
     "gpuprov_play_remember", "gpuprov_play_upgrade", "gpuprov_play_before_host_tasks",
     "gpuprov_play_after_host_tasks", "gpuprov_play_rollback_on_failure", "gpuprov_play_window")
)  # fmt: skip


@dataclass(frozen=True)
class HostSpec(ImageOptions, DriverOptions):
    """What a host shall be."""

    docker: str = choice(
        "Where docker comes from if it is missing: the `distribution`, `docker-ce` (Docker's repository; needed for"
        " Red Hat's family), `preinstalled` (never install it), or `none` (neither require nor touch docker).",
        ("distribution", "docker-ce", "preinstalled", "none"),
    )
    toolkit: str = choice(
        "What puts GPUs into containers: gpuprov's `bundled` runtime, or NVIDIA's container toolkit (`nvidia`) from "
        "its signed repository.",
        ("bundled", "nvidia"),
    )
    toolkit_version: str = text(
        "The version of NVIDIA's toolkit packages, such as 1.19.1-1. Default: the newest.", check.PACKAGE_VERSION
    )
    toolkit_channel: str = choice(
        "Which releases of NVIDIA's toolkit there are to choose from: `stable`, or `experimental`, which adds release "
        "candidates.",
        ("stable", "experimental"),
    )
    toolkit_repository: str = text(
        "Where NVIDIA's toolkit repository, or its mirror, lies.",
        check.HTTP_URL,
        default="https://nvidia.github.io/libnvidia-container",
    )
    toolkit_key_fingerprint: str = text(
        "The fingerprint of the key that signs it. ",
        check.FINGERPRINT,
        default="C95B321B61E88C1809C4F759DDCAE044F796ECB0",
    )
    cuda: str = text(
        "The CUDA toolkit to install from NVIDIA's repository, such as 12.4. Default: none; containers bring theirs.",
        validate.Regexp(r"\d{2}\.\d\Z", error="is not a CUDA version such as 12.4"),
    )
    cuda_url: str = text(
        "The toolkit's .run file instead of the repository: a URL, or an absolute path on the host. It is installed"
        " into /usr/local/cuda-VERSION, and /usr/local/cuda links to it.",
        check.URL_OR_PATH,
    )
    cuda_sha256: str = text("The SHA-256 of that file. Needed with a URL.", check.SHA256)
    cuda_repository: str = text(
        "Where NVIDIA's CUDA repositories, or their mirror, lie: a folder for each distribution below it.",
        check.HTTP_URL,
        default="https://developer.download.nvidia.com/compute/cuda/repos",
    )
    cuda_key_fingerprint: str = text(
        "The fingerprint of the key that signs it. Default: NVIDIA's for the distribution.", check.FINGERPRINT
    )
    engines: tuple[str, ...] = several(
        "Engines besides docker to configure: a list of `containerd`, `crio`, `podman`, `k3s`, `microk8s`, `rke2`, "
        "which must be installed. Default: none; with `gpuprov_docker: none` the installed ones of the first three,"
        " but a Kubernetes node's engine is restarted only if it is named.",
        schema_fields.List(
            schema_fields.String(validate=validate.OneOf(check.ENGINES, error="is not one of {choices}"))
        ),
    )
    default_runtime: bool = flag(
        "Make `nvidia` the default runtime of containerd, CRI-O, k3s, RKE2 and microk8s where they are configured: "
        "pods then need no RuntimeClass. Docker's is `gpuprov_docker_default_runtime`."
    )
    restart_kubernetes: bool = flag(
        "Restart k3s, RKE2 or microk8s if a file has changed. Pods keep running; a server node's API server does "
        "not answer for some seconds. Default: print the command."
    )
    docker_default_runtime: bool = flag("Make `nvidia` docker's default runtime.")
    nvidia_docker: bool = flag(
        "Install a command `nvidia-docker` for scripts that use it: `run` and `create` get the GPUs, `NV_GPU` chooses "
        "them. A command of that name that is not gpuprov's is left alone."
    )
    serve: bool = flag(
        "Install a service that answers as nvidia-docker-plugin did, on 127.0.0.1:3476 and on a unix socket. "
        "`gpuprov docker-args` is the safer way."
    )
    migrate_nvidia_docker: bool = flag(
        "Remove leftovers of nvidia-docker 1 and 2: packages, plugin, unused volumes, repositories and keys, "
        "runtimes without a program. Containers stay."
    )
    repositories: tuple[SiteRepository, ...] = several(
        "More signed package repositories: a list of `name`, `uri`, `suite` (default `./`), `components`, `key_url`, "
        "`key_fingerprint`. `suite` and `components` are apt's alone. A login in `uri` (`https://USER:PASSWORD@…`) is "
        "stored for root only.",
        schema_fields.List(schema_fields.Nested(RepositorySchema)),
    )
    proxy: str = text(
        "The HTTP proxy of downloads, of apt, dnf and zypper (for the run only) and of docker's daemon: "
        "`http://USER:PASSWORD@HOST:PORT`. Default: the environment's. No message, report or command line has the "
        "password.",
        check.PROXY,
    )
    no_proxy: str = text(
        "What is reached without the proxy: hosts, domains (`.example.org`) and networks with commas between.",
        check.NO_PROXY,
    )
    packages: tuple[str, ...] = several(
        "More packages to install.", schema_fields.List(schema_fields.String(validate=check.PACKAGE))
    )
    hold_pinned: bool = flag(
        "Hold packages whose version is asked for, so that unattended upgrades leave them (apt-mark hold, versionlock, "
        "zypper's locks). The kernel is never held; the driver's packages are `gpuprov_driver_updates`'s alone.",
        default=True,
    )
    lock_timeout: int = number(
        "How many seconds to wait for another program (unattended-upgrades, say) that holds the package manager.",
        default=300,
        largest=86400,
    )
    watch: str = choice(
        "How often a systemd timer checks and verifies the host and writes metrics (`hourly`, `daily`, `weekly`); "
        "`off` removes it.",
        ("off", "hourly", "daily", "weekly"),
    )
    watch_metrics: str = text(
        "The file that the timer writes, for node_exporter's textfile collector. Its folder must exist; the default is "
        "the folder of Debian's prometheus-node-exporter.",
        check.PATH,
        validate.Regexp(r".*/[^/]+\.prom\Z", error="does not end with .prom, so node_exporter would not read it"),
        validate.Length(min=1),
        default="/var/lib/prometheus/node-exporter/gpuprov.prom",
    )
    verify_image: str = text(
        "The image to run nvidia-smi in. Default: a tiny one made of the host's own C library and shell.", check.IMAGE
    )
    torch_image: str = text(
        "An image with PyTorch: verify asks it for its GPUs and computes on each. Default: that check is left out.",
        check.IMAGE,
    )
    tensorflow_image: str = text(
        "An image with TensorFlow: verify asks it for its GPUs. Default: that check is left out.", check.IMAGE
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
            check.problem_of(name, reason, values, origin, option_names())
            for name, reason in check.flat(error.messages)
        )
        raise GpuprovError.several(problems, exit_code=ExitCode.USAGE) from None
    settings: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in loaded.items()
    }
    return HostSpec(**{**settings, "driver_version": _driver_version(settings, origin)})


def _driver_version(settings: Mapping[str, Any], origin: str) -> str:
    """Return the release that is meant, where this is known: every host of a run gets the same.

    Nothing means the recommended one, which the host finds (driver/recommended.py). A mirror's index says what its
    branches are, the repository of NVIDIA's packages what theirs are; a site's table travels with the request, and is
    not there before.
    """
    version: str = settings.get("driver_version", "")
    if version == "recommended":
        return ""
    if settings.get("driver", "runfile") != "runfile":
        return "" if version == "latest" else version
    is_packaged = tables.table(tables.RELEASES) is tables.packaged(tables.RELEASES)
    if settings.get("driver_mirror") or (settings.get("driver_releases") and is_packaged):
        return version
    found = tables.resolved(version)
    if found.isdecimal():
        day = tables.announced(found)
        reason = f"is a branch of which no release is known (it appeared on {day}): give a full version" if day else ""
        problem = check.problem_of("driver_version", reason or check.VERSION.error, {"driver_version": version}, origin)
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
    found: dict[str, Any] = as_json(spec)
    return found


def _finite(name: str, value: Any, origin: str) -> Any:
    """Return the value in JSON's own types. Raises GpuprovError for one without an end (YAML's anchors)."""
    try:
        # A set (YAML's !!set) would get an order by chance, and a MIG layout is a list by index.
        plain = value if isinstance(value, (set, frozenset)) else as_json(value)
    except RecursionError:
        raise UsageError(
            f"{PREFIX}{name} is nested too deep, or holds itself", origin, "look for an anchor (&name, *name) in it",
        ) from None  # fmt: skip
    if has_long_number(plain):
        raise UsageError(f"{PREFIX}{name} has a number of more than 64 bits", origin, f"correct {PREFIX}{name}")
    return plain


def has_long_number(value: Any) -> bool:
    """Say whether a number is in a value whose digits Python may refuse to write."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, int) and value.bit_length() > 64) or any(map(has_long_number, parts))
