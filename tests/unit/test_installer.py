"""What is known of the .run file: header, options by version, every way to fail."""

from typing import Any

import pytest

from gpuprov.driver.installer import Installation, explain_failure, knows, parse_header
from gpuprov.packages.apt import APT
from gpuprov.packages.dnf import DNF
from gpuprov.packages.interface import PackageManager
from gpuprov.packages.zypper import ZYPPER
from gpuprov.protocol.errors import GpuprovError

HEADER = """#!/bin/sh
CRCsum="1234567890"
MD5="0123456789abcdef0123456789abcdef"
skip=1200
label="NVIDIA Accelerated Graphics Driver for Linux-x86_64 550.163.01"
version_string=550.163.01
"""


def test_header_gives_version_and_architecture() -> None:
    header = parse_header(HEADER)
    assert (header.version, header.architecture) == ("550.163.01", "x86_64")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!DOCTYPE html><html>404 Not Found</html>", "web page"),
        ("\n  <html><body>login", "web page"),
        ("#!/bin/sh\necho hello\n", "no NVIDIA driver .run"),
        ('#!/bin/sh\nlabel="Some other installer 1.2"\n', "no NVIDIA driver .run"),
        ("", "no NVIDIA driver .run"),
        ("\x7fELF", "no NVIDIA driver .run"),
    ],
)
def test_what_is_no_driver_is_named(text: str, says: str) -> None:
    with pytest.raises(GpuprovError, match=says):
        parse_header(text)


@pytest.mark.parametrize(
    ("version", "option", "known"),
    [
        ("304.20", "--dkms", False),
        ("304.22", "--dkms", True),
        ("515.43.03", "--no-kernel-modules", False),
        ("515.43.04", "--no-kernel-modules", True),
        ("550.163.01", "--kernel-module-type", False),
        ("555.42.02", "--kernel-module-type", True),
        ("470.42.01", "-m=kernel-open", True),
        ("390.157", "--silent", True),
    ],
)
def test_options_by_version(version: str, option: str, known: bool) -> None:
    assert knows(version, option) is known


def arguments(version: str, modules: bool, dkms: bool = False, **fields: Any) -> tuple[str, ...]:
    driver = Installation(version, "/driver.run", "", "x86_64", modules, **fields)
    return driver.arguments(dkms=dkms, temporary="/var/tmp/x", log="/var/log/l")


@pytest.mark.parametrize(
    ("version", "modules", "kind", "dkms", "expected", "unexpected"),
    [
        ("550.163.01", False, "auto", False, ["--no-kernel-modules"], ["--dkms", "--no-kernel-module"]),
        ("470.256.02", False, "auto", False, ["--no-kernel-module"], ["--no-kernel-modules"]),
        ("550.163.01", True, "open", True, ["--dkms", "-m=kernel-open"], ["--no-kernel-modules"]),
        ("570.86.16", True, "open", False, ["--kernel-module-type=open"], ["--dkms"]),
        ("570.86.16", True, "proprietary", False, ["--kernel-module-type=proprietary"], []),
        ("550.163.01", True, "proprietary", False, [], ["-m=kernel-open"]),
        ("570.86.16", True, "auto", True, ["--dkms"], ["--kernel-module-type=open"]),
    ],
)
def test_install_arguments(
    version: str, modules: bool, kind: str, dkms: bool, expected: list[str], unexpected: list[str]
) -> None:
    found = arguments(version, modules, dkms, module_type=kind)
    assert set(expected) <= set(found)
    assert not set(unexpected) & set(found)
    # Two words: the stub ignores --tmpdir=DIR, and takes it only in front of the installer's own options.
    assert found[:2] == ("--tmpdir", "/var/tmp/x")


def test_open_modules_of_a_driver_that_has_none_are_refused() -> None:
    with pytest.raises(GpuprovError, match="no open kernel modules"):
        arguments("460.32.03", True, module_type="open")


@pytest.mark.parametrize(
    ("returncode", "log", "output", "what"),
    [
        (1, "ERROR: Unable to find the development tool `cc` in your path; please", "", "no compiler"),
        (1, "ERROR: Unable to find the kernel source tree for the currently running kernel.", "", "headers"),
        (1, "ERROR: The kernel source path '/x' does not exist.", "", "headers"),
        (1, "ERROR: The nvidia kernel module was not created.", "", "did not compile"),
        (1, "ERROR: Failed to install the kernel module through DKMS. No kernel module was installed;", "", "DKMS"),
        (1, "ERROR: The Nouveau kernel driver is currently in use by your system.", "", "nouveau"),
        (1, "ERROR: You appear to be running an X server; please exit X", "", "X server"),
        (1, "ERROR: An NVIDIA kernel module 'nvidia-uvm' appears to be already loaded in your kernel.", "", "loaded"),
        # Version 460, LibVF.IO issue 20.
        (1, "ERROR: An NVIDIA kernel module 'nvidia-drm' appears to already be loaded in your kernel.", "", "loaded"),
        # compute-gpu-installation issue 15; intel/hdk pull request 622.
        (
            1,
            "*** Failed CC version check. Bailing out! ***\nERROR: Failed to install the kernel module through DKMS.",
            "",
            "compiler",
        ),
        (
            1,
            "gcc: error: unrecognized command line option '-mharden-sls=all'\nERROR: The nvidia kernel module was not "
            "created.",
            "",
            "compiler",
        ),
        # The kernel loads a module of which it says so.
        (
            1,
            "ERROR: Unable to load the kernel module 'nvidia.ko'.\n-> Kernel messages:\nnvidia: module verification "
            "failed: signature and/or required key missing - tainting kernel\nNVRM: None of the NVIDIA devices were "
            "initialized.",
            "",
            "started no GPU",
        ),
        (
            1,
            "ERROR: Unable to load the kernel module 'nvidia.ko'.\n-> Kernel module load error: Key was rejected by "
            "service",
            "",
            "Secure Boot",
        ),
        (1, "The installation was canceled due to the availability of an alternate driver installation", "", "package"),
        (1, "", "ERROR: nvidia-installer must be run as root", "as root"),
        (1, "", "Temporary directory /tmp/x is not executable", "noexec"),
        (1, "", 'unrecognized option: "--x"', "option"),
        (2, "", "Error in checksums 1 2", "damaged"),
        (2, "", "sh: 3: Syntax error: redirection unexpected", "damaged or no .run"),
        (15, "", "cannot create /dev/tty", "temporary directory is full"),
        (135, "Received signal SIGBUS; aborting.", "", "filled up"),
        (0, "ERROR: Post-install sanity check failed", "", "final check"),
        (0, "ERROR: something nobody has seen before", "", "reported errors"),
        (77, "", "odd\nlast words", "reported errors"),
    ],
)
def test_every_failure_has_its_sentence(returncode: int, log: str, output: str, what: str) -> None:
    found = explain_failure(returncode, log, output, commands=DNF.commands, initramfs="dracut --force")
    assert found is not None
    sentence, line, next_step = found
    assert what in sentence
    assert next_step
    assert line or not (log or output)


def test_a_clean_log_and_exit_code_0_are_no_failure() -> None:
    log = "-> done.\nWARNING: nvidia-installer was forced\n-> is now complete."
    assert explain_failure(0, log, "", commands=APT.commands, initramfs="") is None


@pytest.mark.parametrize(
    ("manager", "install", "remove"),
    [(APT, "apt-get install", "apt-get purge"), (DNF, "dnf install", "dnf remove"),
     (ZYPPER, "zypper install", "zypper remove")],
)  # fmt: skip
def test_what_to_type_names_the_hosts_package_manager(manager: PackageManager, install: str, remove: str) -> None:
    def next_step(line: str) -> str:
        found = explain_failure(1, line, "", commands=manager.commands, initramfs="rebuild --all")
        assert found is not None and "{" not in found[2]
        return found[2]

    assert next_step("ERROR: Unable to find the development tool `cc`").startswith(f"{install} -y gcc make")
    assert f"{remove} '*nvidia*'" in next_step("ERROR: an alternate method of installation was detected")
    assert "(rebuild --all)" in next_step("ERROR: The Nouveau kernel driver is currently in use")


@pytest.mark.parametrize(("has_libgl", "option"), [(True, "--no-install-libglvnd"), (False, "--install-libglvnd")])
def test_the_distributions_libgl_is_kept_and_a_headless_host_gets_one(has_libgl: bool, option: str) -> None:
    assert option in arguments("550.163.01", False, has_libgl=has_libgl)


def test_modules_are_signed_with_the_sites_key() -> None:
    key: dict[str, Any] = {"signing_key": "/root/mok.key"}
    both = {**key, "signing_certificate": "/root/mok.der"}
    options = {"--module-signing-secret-key=/root/mok.key", "--module-signing-public-key=/root/mok.der"}
    assert options <= {*arguments("550.163.01", True, **both)}
    for modules, signing in ((False, both), (True, key)):
        assert not [one for one in arguments("550.163.01", modules, **signing) if "signing" in one]
