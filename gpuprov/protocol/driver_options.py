"""The options about the driver and its kernel modules: the first part of HostSpec (spec.py)."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprov.protocol.spec_fields import (
    FINGERPRINT,
    HTTP_URL,
    MIG_LAYOUT,
    PATH,
    SHA256,
    URL_OR_PATH,
    VERSION,
    TextOrList,
    choice,
    flag,
    option,
    text,
)


@dataclass(frozen=True)
class DriverOptions:
    """Which driver a host shall have, how it is built, and what may stop for it."""

    driver: str = choice(
        "runfile",
        "The driver's source: `runfile` (NVIDIA's .run file), `packages` (NVIDIA's CUDA repository), `distribution`"
        " (the distribution's own; Debian, Ubuntu, SUSE, Amazon Linux), or `preinstalled`.",
        "runfile", "packages", "distribution", "preinstalled",
    )  # fmt: skip
    driver_version: str = text(
        "",
        "The driver's version, such as 580.178.04, or a branch: 580 is its newest release with a known digest, "
        "`latest` that of the long-term branch. Required with `runfile`. With `packages`: the branch or version to "
        "pin (default: the newest); with `distribution`: a branch.",
        VERSION,
    )
    driver_url: str = text(
        "",
        "The .run file: a URL, or an absolute path on the host. Default: NVIDIA's download server.",
        URL_OR_PATH,
    )
    driver_sha256: str = text(
        "",
        "The SHA-256 of the .run file. Default: the one that this gpuprov knows, else the `.sha256sum` file beside it.",
        SHA256,
    )
    driver_mirror: str = text(
        "",
        "A mirror of NVIDIA's .run files, by its index: a page with links or a text. A branch, or `latest`, is then"
        " the newest release that it lists.",
        HTTP_URL,
    )
    keep_driver: bool = flag(
        True,
        "Keep the .run files of the installed driver and of the one before it on the host, for a rollback.",
    )
    driver_releases: str = text(
        "",
        "A table of driver releases instead of gpuprov/protocol/driver_releases.json: a URL, or an absolute path on"
        " the machine where gpuprov or Ansible runs. Needs its digest.",
        URL_OR_PATH,
    )
    driver_releases_sha256: str = text("", "The SHA-256 of that table.", SHA256)
    servers: str = text(
        "",
        "A table that replaces some or all servers of gpuprov/protocol/servers.json: a URL, or an absolute path on "
        "the machine where gpuprov or Ansible runs. Needs its digest.",
        URL_OR_PATH,
    )
    servers_sha256: str = text("", "The SHA-256 of that table.", SHA256)
    refuse_advisories: str = choice(
        "none",
        "Refuse a driver, or a toolkit of NVIDIA's, with known security holes from this CVSS score on: `high` "
        "(7.0), `critical` (9.0), or `none`, which only warns.",
        "none", "high", "critical",
    )  # fmt: skip
    kernel_modules: str = choice(
        "auto",
        "Where kernel modules come from: `build` compiles them for the running kernel, `precompiled` takes packages"
        " (`gpuprov_driver: packages`), `none` installs the libraries only. `auto`: `none` in a system container "
        "(LXC, systemd-nspawn), else `precompiled` if repositories have them, else `build`.",
        "auto", "build", "precompiled", "none",
    )  # fmt: skip
    kernel_module_type: str = choice(
        "auto",
        "Which kernel modules: NVIDIA's `open` or `proprietary` ones. `auto` takes those that the GPUs need, else "
        "the installer's choice.",
        "auto", "open", "proprietary",
    )  # fmt: skip
    kernel_archive: bool = flag(
        False,
        "Add the distribution's archive of the running kernel's release (the vaults of Rocky Linux and AlmaLinux), "
        "for headers that the repositories no longer have.",
    )
    epel: bool = flag(
        True,
        "If modules are built and the distribution has no DKMS (Red Hat's family, SLES), take it, and nothing else,"
        " from EPEL or SUSE's Package Hub.",
    )
    epel_repository: str = text(
        "",
        "A mirror of EPEL (the folder with 8, 9 and 10) or of openSUSE:Backports. Default: "
        "`epel` and `opensuse-backports` of gpuprov_servers.",
        HTTP_URL,
    )
    epel_key_fingerprint: str = text(
        "", "The fingerprint of the key that signs it. Default: the one that this gpuprov knows.", FINGERPRINT
    )
    module_signing_key: str = text(
        "",
        "With Secure Boot: the private key, a path on the host, that signs the kernel modules, those too that DKMS "
        "builds later. Its certificate must be enrolled in the firmware.",
        PATH,
    )
    module_signing_certificate: str = text("", "The certificate (DER) of that key, a path on the host.", PATH)
    reboot: str = choice(
        "never",
        "Allow gpuprov to reboot a host that needs it, and to continue afterwards: `if-needed`, or `never` (the run "
        "ends with exit code 3 and says why). A run over other hosts never reboots this machine.",
        "never", "if-needed",
    )  # fmt: skip
    stop_containers: bool = flag(
        False,
        "Allow gpuprov to stop containers that use a GPU while it replaces a loaded driver, and start them again. The "
        "driver's own services (nvidia-persistenced, fabric manager, DCGM) are stopped and started in any case.",
    )
    stop_display_manager: bool = flag(
        False, "Allow gpuprov to stop the display manager while it replaces a loaded driver, and start it again."
    )
    fabric_manager: str = choice(
        "auto",
        "On machines with NVSwitches: `auto` installs and runs NVIDIA's fabric manager of the driver's version; "
        "`preinstalled` only compares versions.",
        "auto", "preinstalled",
    )  # fmt: skip
    mig_layout: tuple[str, ...] = option(
        TextOrList(MIG_LAYOUT),
        (),
        "The MIG layout, one for all GPUs or a list by index: `disabled`, `all-1g.10gb` (as many as fit), or "
        "profiles such as `3g.40gb,2g.20gb,2g.20gb`. Default: unchanged.",
    )
