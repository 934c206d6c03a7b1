"""Debian's own driver, its genuine packages by real apt: libraries and programs on a host, in containers, and back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_ansible import play, recap
from tests.integration.test_install import etc, packages
from tests.lab import Host
from tests.lab.fixtures import Site, events, gpuprov, gpuprov_succeeds
from tests.lab.host import Snapshot, differences

pytestmark = [pytest.mark.lab, pytest.mark.root]
_WANTED: dict[str, Any] = {
    "gpuprov_driver": "distribution",
    **dict.fromkeys(("gpuprov_driver_version", "gpuprov_driver_url", "gpuprov_driver_sha256", "gpuprov_packages")),
}
# All files of the driver's packages that are libraries, wherever the links of Debian's alternatives lead.
_LIBRARIES = r"""
dpkg-query -W -f '${Package}\n' '*nvidia*' 'libcuda1' 'libnvcuvid1' | xargs dpkg -L 2>/dev/null | sort -u |
while read -r path; do [ -f "$path" ] && [ ! -L "$path" ] && echo "$path"; done |
grep -E '/lib(nvidia|cuda|nvcuvid)[^/]*\.so\.[0-9.]+$'
"""
# An image of the host's own C library and shell: what nvidia-smi and a program that loads libcuda need.
_IMAGE = r"""
cd / && { ldd /bin/sh /bin/ls | grep -o '/lib/x86[^ ]*'; echo /bin/sh /bin/ls /lib64/ld-linux-x86-64.so.2
ls /lib/x86_64-linux-gnu/lib{c,m,dl,pthread,rt}.so.*; } | tr ' ' '\n' | cut -c2- | sort -u |
tar -hc -T - | docker import - tiny > /dev/null
"""
# Debian's packages leave their users when they are purged; the backups of these files follow.
_ACCOUNTS = {f"/etc/{name}{end}" for name in ("passwd", "group", "shadow", "gshadow") for end in ("", "-")}


@pytest.fixture(scope="module")
def before() -> dict[str, tuple[Snapshot, str]]:
    """What /etc and the packages were on a host, by its name."""
    return {}


@pytest.fixture(scope="module")
def installed(site: Site, before: dict[str, tuple[Snapshot, str]]) -> Iterator[Host]:
    """Debian 13 with its own driver; the container host's kernel shows that very version."""
    host = site.fresh("trixie")
    host.add_archive()
    before["trixie"] = (etc(host), packages(host))
    done = gpuprov_succeeds("install", "--hosts", site.inventory("trixie", **_WANTED), timeout=600)
    assert "warning: driver 550.163.01" in done.stdout
    yield host


def specification(host: Host) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(host.ssh("cat /etc/cdi/nvidia.json").stdout)
    return found


def test_check_shows_the_source_with_the_missing_components_and_changes_nothing(site: Site) -> None:
    host = site.fresh("trixie")
    host.add_archive()
    before = (etc(host), packages(host))
    done = gpuprov_succeeds("install", "--hosts", site.inventory("trixie", **_WANTED), "--check", "--diff")
    assert "write /etc/apt/sources.list.d/gpuprov-driver-components.sources" in done.stdout
    assert "+Components: contrib non-free non-free-firmware" in done.stdout
    assert "install libcuda1, nvidia-smi" in done.stdout
    assert (etc(host), packages(host)) == before
    foreseen = play("site", site.inventory("trixie", **_WANTED), "--check", "--diff", "--skip-tags", "verify")
    assert foreseen.returncode == 0 and recap(foreseen, "trixie")["changed"] > 0, foreseen.stdout
    assert "gpuprov-driver-components.sources" in foreseen.stdout and "libcuda1" in foreseen.stdout
    assert (etc(host), packages(host)) == before


def test_nvidia_smi_and_libcuda_are_the_genuine_ones(installed: Host) -> None:
    """They look for a GPU that is not there, and say so in their own words."""
    said = installed.ssh("nvidia-smi", check=False)
    assert said.returncode == 9 and "couldn't communicate with the NVIDIA driver" in said.stdout
    program = "import ctypes; lib = ctypes.CDLL('libcuda.so.1'); v = ctypes.c_int(); lib.cuDriverGetVersion"
    asked = installed.ssh(f'python3 -c "{program}(ctypes.byref(v)); print(lib.cuInit(0), v.value)"')
    assert asked.stdout == "100 12040\n"
    assert installed.ssh("systemctl is-enabled nvidia-persistenced").stdout == "enabled\n"


def test_every_genuine_library_is_in_the_specification_by_the_name_that_programs_load(installed: Host) -> None:
    libraries = installed.ssh(_LIBRARIES).stdout.split()
    assert any("/nvidia/current/libcuda.so." in path for path in libraries) and len(libraries) >= 10
    edits = specification(installed)["containerEdits"]
    mounted = {mount["hostPath"] for mount in edits["mounts"]}
    assert set(libraries) <= mounted
    links = [word for hook in edits["hooks"] for word in hook["args"] if "::" in word]
    assert len(links) == len(set(links))
    names = {Path(path).name.partition(".so")[0] for path in libraries}
    # That one is loaded by its full name.
    assert {name for name in names if f"/{name}.so" not in "".join(links)} == {"libnvidia-pkcs11-openssl3"}


def test_a_container_has_the_libraries_where_its_loader_looks(installed: Host) -> None:
    installed.ssh(("bash", "-ec", _IMAGE), timeout=120)
    run = "docker run --rm --runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all -e NVIDIA_DRIVER_CAPABILITIES=all tiny"
    inside = installed.ssh(f"{run} nvidia-smi", check=False)
    outside = installed.ssh("nvidia-smi", check=False)
    assert (inside.returncode, inside.stdout) == (outside.returncode, outside.stdout) == (9, outside.stdout)
    listed = installed.ssh(f"{run} ls -L /usr/lib/x86_64-linux-gnu").stdout.split()
    assert {"libcuda.so.1", "libnvidia-ml.so.1", "libnvcuvid.so.1", "libnvidia-encode.so.1"} <= {*listed}


def test_verify_and_doctor_say_what_the_genuine_programs_say(site: Site, installed: Host) -> None:
    hosts = site.inventory("trixie", **_WANTED)
    verified = gpuprov("verify", "--hosts", hosts)
    assert verified.returncode == 1 and "nvidia-smi exited 9: NVIDIA-SMI has failed" in verified.stdout
    assert "ok CDI specification" in verified.stdout
    said = gpuprov("doctor", "--hosts", hosts).stdout
    assert "ok kernel module" in said and "nvidia-smi does not reach the driver" in said
    assert "gpuprov uninstall; gpuprov install -e gpuprov_driver_version=580" in said


def test_every_genuine_package_of_the_driver_is_held(installed: Host) -> None:
    listed = installed.ssh("dpkg-query -W -f '${db:Status-Status} ${source:Package} ${Package}\\n'").stdout
    rows = [line.split() for line in listed.splitlines() if line.startswith("installed nvidia-")]
    driver = {name for _, source, name in rows if source in ("nvidia-graphics-drivers", "nvidia-persistenced")}
    held = {*installed.ssh("apt-mark showhold").stdout.split()}
    assert {"libcuda1", "nvidia-smi", "libnvidia-ml1", "nvidia-persistenced"} <= driver <= held
    assert held <= {name for *_, name in rows}


def test_a_second_run_and_the_playbook_find_nothing_to_do(site: Site, installed: Host) -> None:
    hosts = site.inventory("trixie", **_WANTED)
    again = gpuprov("install", "--hosts", hosts)
    assert again.returncode == 0 and "nothing to change" in again.stdout, again.stdout
    told = gpuprov("install", "--hosts", hosts, "--json")
    seen = events(told.stdout)
    assert told.returncode == 0 and [e["changes"] for e in seen if e["event"] == "Planned"] == [[]], told.stdout
    (result,) = seen[-1]["hosts"]
    assert (result["changed"], result["versions"]["driver"]) == (0, "550.163.01")
    done = play("site", hosts, "--skip-tags", "verify")
    assert done.returncode == 0 and recap(done, "trixie")["changed"] == 0, done.stdout


def test_rollback_removes_the_driver(site: Site, installed: Host, before: dict[str, tuple[Snapshot, str]]) -> None:
    gpuprov_succeeds("rollback", "--hosts", site.inventory("trixie", **_WANTED), timeout=600)
    files, names = before["trixie"]
    assert packages(installed) == names and installed.ssh("apt-mark showhold").stdout == ""
    after = etc(installed)
    assert differences(files, after) <= _ACCOUNTS
    accounts = [path for path in sorted(_ACCOUNTS) if not path.endswith("-")]
    new = {line for path in accounts for line in set(after[path][-1].splitlines()) - set(files[path][-1].splitlines())}
    assert {line.partition(b":")[0] for line in new} == {b"nvpd"}


def test_uninstall_removes_the_driver(site: Site, installed: Host, before: dict[str, tuple[Snapshot, str]]) -> None:
    """After a rollback and an installation by the playbook."""
    hosts = site.inventory("trixie", **_WANTED)
    done = play("site", hosts, "--skip-tags", "verify")
    assert done.returncode == 0 and "libcuda1" in packages(installed), done.stdout
    gpuprov_succeeds("uninstall", "--hosts", hosts, timeout=600)
    files, names = before["trixie"]
    assert packages(installed) == names and installed.ssh("apt-mark showhold").stdout == ""
    assert differences(files, etc(installed)) <= _ACCOUNTS
