"""Facts about NVIDIA's .run file: its header, its options by version, its failures. Pure; never runs one.

Sources: the published history of nvidia-installer (1.0-7182 to 590.48.01) and recorded runs of 550.163.01.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprov.core.commands import first_match
from gpuprov.packages.interface import Commands
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.versions import version_numbers

# First version that knows an option; older installers stop at an unknown one with exit code 1, after a whole unpack.
_OPTION_SINCE = {
    "--dkms": (304, 22),
    "--install-libglvnd": (361, 16),
    "--no-systemd": (465, 19, 1),
    "-m=kernel-open": (470, 42, 1),
    "--no-kernel-modules": (515, 43, 4),
    "--allow-installation-with-running-driver": (545, 23, 6),
    "--skip-module-load": (550, 40, 7),
    "--kernel-module-type": (555, 42, 2),
}
_OLD_NAMES = {"--no-kernel-modules": "--no-kernel-module"}


@dataclass(frozen=True)
class Header:
    """The header in the shell stub at the start of a .run; the payload begins at line `skip` (0: unknown)."""

    version: str
    architecture: str
    label: str
    skip: int = 0


# The header is within this many bytes.
HEADER_BYTES = 8192


def parse_header(text: str) -> Header:
    """Return a .run file's header from the text of its shell stub (its first few KiB), without running anything.

    Raises GpuprovError if this is no driver .run, and says what it seems to be.
    """
    if re.match(r"\s*<(!doctype|html)", text, re.IGNORECASE):
        raise GpuprovError("this is a web page, not a .run file", text[:80].strip(), "check gpuprov_driver_url")
    label = _assigned(text, "label")
    found = re.search(r"Linux-(?P<architecture>\w+)\s+(?P<version>\d{3,4}(\.\d+)+)", label)
    if not text.startswith("#!") or found is None:
        raise GpuprovError(
            "this is no NVIDIA driver .run file",
            f"it begins with {text[:40]!r} and its label is {label!r}",
            "check gpuprov_driver_url",
        )
    skip = _assigned(text, "skip")
    return Header(found["version"], found["architecture"], label, int(skip) if skip.isdigit() else 0)


def _assigned(text: str, name: str) -> str:
    found = re.search(rf'^{name}="?([^"\n]*)"?$', text, re.MULTILINE)
    return found[1] if found else ""


def knows(version: str, option: str) -> bool:
    """Say whether the installer of that version knows an option."""
    return version_numbers(version) >= _OPTION_SINCE.get(option, (0,))


def install_arguments(
    version: str,
    *,
    kernel_modules: bool,
    module_type: str,
    dkms: bool,
    has_libgl: bool,
    temporary: str,
    log: str,
    signing: tuple[str, str] = ("", ""),
    keep_loaded: bool = False,
    image_kernel: str = "",
    without_systemd: bool = False,
) -> tuple[str, ...]:
    """Return the installer's arguments for an unattended installation.

    `has_libgl`: the distribution's own libGL is installed. `signing`: key and certificate for the modules, or nothing.
    `keep_loaded`: another version is loaded, and stays so. `image_kernel`: build for that kernel of an image, and look
    at nothing that the builder's machine runs or has loaded; `without_systemd`: no systemd runs.
    `--tmpdir` and its value are two words: the stub ignores `--tmpdir=DIR`. It also expands its arguments again without
    quotes, so that no path may hold blanks.
    """
    arguments = ["--tmpdir", temporary, "--silent", "--no-questions", "--ui=none", f"--log-file-name={log}"]
    if not kernel_modules:
        option = "--no-kernel-modules"
        arguments.append(option if knows(version, option) else _OLD_NAMES[option])
    if kernel_modules and dkms and knows(version, "--dkms"):
        arguments.append("--dkms")
    if kernel_modules and module_type != "auto":
        arguments += _module_type(version, module_type)
    if kernel_modules and all(signing):
        arguments += [f"--module-signing-secret-key={signing[0]}", f"--module-signing-public-key={signing[1]}"]
    if keep_loaded:
        arguments += ["--allow-installation-with-running-driver", "--skip-module-load"]
    if kernel_modules and image_kernel:
        arguments += [f"--kernel-name={image_kernel}", "--no-nouveau-check", "--no-x-check"]
        known = ("--skip-module-load", "--allow-installation-with-running-driver")
        arguments += [option for option in known if knows(version, option)]
    if without_systemd and knows(version, "--no-systemd"):
        arguments.append("--no-systemd")
    # The distribution's libGL is not overwritten; without one, the installer's own is needed: its sanity check fails
    # on a missing libGL.so.1 even on a headless host, and with exit code 0.
    if knows(version, "--install-libglvnd"):
        arguments.append("--no-install-libglvnd" if has_libgl else "--install-libglvnd")
    return tuple(arguments)


def _module_type(version: str, module_type: str) -> list[str]:
    if knows(version, "--kernel-module-type"):
        return [f"--kernel-module-type={module_type}"]
    if module_type == "proprietary":
        return []
    if knows(version, "-m=kernel-open"):
        return ["-m=kernel-open"]
    raise GpuprovError(
        f"driver {version} has no open kernel modules",
        "they came with 470.42.01 (data-centre GPUs, 515 for all)",
        "set gpuprov_kernel_module_type: proprietary, or a newer gpuprov_driver_version",
    )


# Messages of the installer, in its log or output, and their meaning. The first row that matches decides. Each: pattern,
# what happened, what to do next; words in braces are the distribution's own commands.
_FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"Error in check ?sums|checksums? [0-9a-f]+ .*(differ|mismatch)",
        "the .run file is damaged: its checksum is wrong",
        "remove it and run the same command again; it is then downloaded again",
    ),
    (
        r"Unable to find the development tool `(cc|gcc|make)`",
        "there is no compiler on this host, and the kernel modules need one",
        "{install} gcc make",
    ),
    (
        r"Unable to find the kernel source tree|kernel source path '.*' does not exist",
        "the headers of the running kernel are missing",
        "install the headers of exactly `uname -r`; if no repository has them any more, update the kernel and reboot",
    ),
    (
        r"Failed to install the kernel module through DKMS",
        "DKMS could not build the kernel modules",
        "the driver may be too old for this kernel, or the compiler not the kernel's own: see "
        "/var/lib/dkms/nvidia/*/build/make.log, where the compiler says why",
    ),
    (
        r"kernel module was not created|The nvidia kernel module was not",
        "the kernel modules did not compile",
        "the driver may be too old for this kernel, or the compiler not the kernel's own: see the log named above",
    ),
    (
        r"nouveau.*(in use|loaded)|Nouveau kernel driver is currently in use",
        "nouveau, the free driver, holds the GPU",
        "rebuild the initramfs ({initramfs}) so that the new blacklist counts, reboot, then run the same command again",
    ),
    (
        r"running an X server",
        "an X server holds the GPU",
        "stop the display manager (systemctl isolate multi-user.target), then run the same command again",
    ),
    (
        r"appears to be already loaded in your kernel",
        "another version of the driver is loaded and in use",
        "stop what uses the GPU (fuser -v /dev/nvidia*), unload it (modprobe -r nvidia_uvm nvidia_drm nvidia_modeset "
        "nvidia), then run the same command again",
    ),
    (
        r"alternate driver installation|alternate method of installation",
        "the distribution's own NVIDIA packages are installed; a .run over them would break both",
        "use them (gpuprov_driver: preinstalled), or remove them first: {remove} '*nvidia*'",
    ),
    (
        r"must be run as root",
        "the installer was not run as root",
        "run gpuprov as root",
    ),
    (
        r"is not executable",
        "the temporary directory is mounted noexec",
        "remount it with exec, then run the same command again",
    ),
    (
        r"unrecognized option",
        "the installer does not know an option that its version should know",
        "report this with the file's version",
    ),
    (
        r"SIGBUS",
        "the root file system filled up in the middle of the installation",
        "make room (df -h; inodes: df -i), then run the same command again",
    ),
    (
        r"Key was rejected by service|module verification failed|Required key not available",
        "Secure Boot refused the kernel module: it is not signed with an enrolled key",
        "set gpuprov_module_signing_key and gpuprov_module_signing_certificate to a key that is enrolled "
        "(mokutil --list-enrolled), or switch Secure Boot off in the firmware",
    ),
    (
        r"sanity check failed",
        "the installation failed its own final check",
        "see the log named above",
    ),
)  # fmt: skip
_FAILED_BY_CODE = {
    2: ("the .run file is damaged or no .run file at all", "remove it and run the same command again"),
    15: (
        "the .run file could not be unpacked: most likely the temporary directory is full",
        "df -h shows which is full (inodes: df -i)",
    ),
    124: ("the installer did not come to an end in time", "see the log named above"),
    135: (
        "the root file system filled up in the middle of the installation",
        "make room (df -h; inodes: df -i), then run again",
    ),
}


def explain_failure(
    returncode: int, log: str, output: str, *, commands: Commands, initramfs: str
) -> tuple[str, str, str] | None:
    """Return (what, decisive line, next step) if an installation failed, None if there is no sign of failure.

    `commands`: the host's package manager's. `initramfs`: the command that rebuilds the initramfs.

    Exit code 0 proves nothing: in silent mode the installer continues after errors. So the log is always read.
    """
    errors = [line for line in log.splitlines() if re.match(r"\s*ERROR:", line) or "sanity check failed" in line]
    if returncode == 0 and not errors:
        return None
    said = f"{log}\n{output}"
    found = first_match(_FAILURES, lambda row: row[0], said.splitlines(), re.IGNORECASE)
    if found is not None:
        (_, what, next_step), line = found
        own = {"install": commands.install, "remove": commands.remove, "initramfs": initramfs}
        return what, line.strip(), next_step.format(**own)
    what, next_step = _FAILED_BY_CODE.get(
        returncode, ("the driver's installer reported errors", "see the log named above")
    )
    decisive = errors[0] if errors else (output.strip().splitlines() or [""])[-1]
    return what, decisive.strip(), next_step


# nvidia-persistenced of the .run needs it and does not include it (packages.debian.org, packages.ubuntu.com).
_LIBTIRPC = {
    "libtirpc3": (("debian", "11"), ("debian", "12"), ("ubuntu", "20.04"), ("ubuntu", "22.04")),
    "libtirpc3t64": (("debian", "13"), ("ubuntu", "24.04"), ("ubuntu", "26.04")),
}  # fmt: skip


def service_packages(distribution: str, version: str) -> tuple[str, ...]:
    """Return the packages that a driver's services need on a distribution."""
    release = (distribution, version)
    return tuple(name for name, releases in _LIBTIRPC.items() if release in releases)
