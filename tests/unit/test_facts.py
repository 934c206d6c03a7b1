"""Facts from a tree of files: what machines show, and what they don't."""

import json
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from gpuprov.core import files
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.driver import kernel
from gpuprov.facts.host import driver_package, facts_to_json, gather, gather_files
from gpuprov.machine.machine import gather_kernel, gather_os
from gpuprov.machine.pci import gather_gpus
from gpuprov.packages.interface import PackageFacts
from gpuprov.plan.context import source_of
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import FactsGathered, Note
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import parse_spec
from gpuprov.runtime_hook.deploy import NVIDIA_HOOK_PATH
from tests import simgpu
from tests.unit.ask import ask
from tests.unit.fake_host import RELEASE, FakeHost

DEVICES = {
    "0000:00:02.0": ("0x8086", "0x030000", "0x3e92"),  # another maker's display
    "0000:17:00.0": ("0x10de", "0x030200", "0x2330"),  # an H100: 3D controller
    "0000:01:00.0": ("0x10de", "0x030000", "0x2684"),  # a GeForce: VGA
    "0000:01:00.1": ("0x10de", "0x040300", "0x22ba"),  # its audio function
    "0000:65:00.0": ("0x10de", "0x068000", "0x22a3"),  # an NVSwitch: a bridge
    "0000:66:00.0": ("0x10de", "0x038000", "0x1db6"),  # "other" display controller, as some Teslas are
}


def put(root: Path, path: str, text: str | bytes) -> None:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_gpus_are_display_controllers_of_nvidia(tmp_path: Path) -> None:
    for bus_id, (vendor, kind, device) in DEVICES.items():
        for name, value in (("vendor", vendor), ("class", kind), ("device", device)):
            put(tmp_path, f"/sys/bus/pci/devices/{bus_id}/{name}", f"{value}\n")
    found = gather_gpus(System(str(tmp_path)))
    assert [(gpu.bus_id, gpu.device_id) for gpu in found] == [
        ("0000:01:00.0", "2684"), ("0000:17:00.0", "2330"), ("0000:66:00.0", "1db6"),
    ]  # fmt: skip


def test_facts_warn_of_a_driver_that_was_replaced_and_not_loaded(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    simgpu.install_tree(tmp_path)
    simgpu.write_kernel_tree(tmp_path, 1, "535.261.03")
    ended, events = ask(host, Request("facts"))
    assert ended.exit_code == 0
    (said,) = (one for one in events if isinstance(one, Note))
    assert said.level == "warning"
    assert said.message.startswith("the driver's files are 550.163.01, the loaded module is 535.261.03: ")
    assert (ended.versions["driver"], ended.versions["gpus"]) == ("550.163.01", "2")


@pytest.mark.parametrize(
    "name", ["nvidia-driver-local-repo-ubuntu2204-580.95.05", "nvidia-driver-assistant", "nvidia-driver-pinning-580"]
)
def test_a_package_that_only_helps_to_get_a_driver_is_none(name: str) -> None:
    assert driver_package(PackageFacts("apt", {name: "1"})) == ""
    assert driver_package(PackageFacts("apt", {name: "1", "nvidia-driver": "580.95.05-1"})) == "nvidia-driver"


SIGNED = "filename: /x/nvidia.ko\nsig_id:         PKCS#7\nsigner:         DKMS module signing key\nsig_key:        2A\n"


@pytest.mark.parametrize(
    ("secure_boot", "said", "has"), [(b"\x00", "", True), (b"\x01", SIGNED, True), (b"\x01", "filename: /x\n", False)]
)
def test_secure_boot_takes_a_signed_module_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure_boot: bytes, said: str, has: bool
) -> None:
    """As where it was switched on after the driver came: install repeats a .run, and names the missing signature."""
    host = FakeHost(tmp_path, metal=True)
    simgpu.install_tree(tmp_path)
    put(
        tmp_path,
        "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c",
        b"\x06\0\0\0" + secure_boot,
    )
    put(tmp_path, f"/lib/modules/{RELEASE}/modules.dep", "updates/dkms/nvidia.ko.xz:\n")
    real = host.run
    answer = Completed(("modinfo", "nvidia"), 0, said)
    monkeypatch.setattr(host, "run", lambda argv, **more: answer if argv[0] == "modinfo" else real(argv, **more))
    facts = replace(gather(host), driver=replace(gather(host).driver, kernel_version=""))
    driver = source_of(facts, parse_spec({"driver_version": simgpu.DRIVER_VERSION}))
    assert (facts.has_module, not driver.installs, not kernel.problems(driver)) == (has, has, has)


def test_a_machine_without_pci_has_no_gpu(tmp_path: Path) -> None:
    assert gather_gpus(System(str(tmp_path))) == ()


OS_RELEASES = (
    ('ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
     ("debian", "12", "bookworm", ())),
    ('NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n',
     ("ubuntu", "24.04", "noble", ("debian",))),
    ('ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n',
     ("rocky", "9.4", "", ("rhel", "centos", "fedora"))),
    ("ID=arch\n", ("arch", "", "", ())),
    ("", ("", "", "", ())),
)  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), OS_RELEASES)
def test_os_release(tmp_path: Path, text: str, expected: tuple[object, ...]) -> None:
    put(tmp_path, "/etc/os-release", text)
    found = gather_os(System(str(tmp_path)))
    assert (found.id, found.version, found.codename, found.like) == expected


MODULES = "nvidia 1 0 - Live 0x0\next4 2 1 - Live 0x0\n"
APPARMOR = "/sys/module/apparmor/parameters/enabled"
WSL = "Linux version 5.15.90.1-microsoft-standard-WSL2 (gcc 12)\n"


@pytest.mark.parametrize(
    ("files", "fields"),
    [
        ({}, {"takes_modules": False, "container": "", "apparmor": False, "wsl": False}),
        ({"/proc/modules": MODULES}, {"takes_modules": True, "loaded_modules": ("ext4", "nvidia")}),
        ({"/proc/modules": "", "/proc/sys/kernel/modules_disabled": "1\n"}, {"takes_modules": False}),
        ({"/proc/modules": "", "/run/systemd/container": "lxc\n"}, {"takes_modules": True, "container": "lxc"}),
        ({"/.dockerenv": ""}, {"takes_modules": False, "container": "docker"}),
        ({"/run/.containerenv": ""}, {"takes_modules": False, "container": "podman"}),
        ({APPARMOR: "Y\n"}, {"apparmor": True}),
        ({APPARMOR: "N\n"}, {"apparmor": False}),
        ({APPARMOR: ""}, {"apparmor": False}),
        ({"/proc/version": WSL}, {"wsl": True}),
    ],
)
def test_kernel(tmp_path: Path, files: dict[str, str], fields: dict[str, object]) -> None:
    for path, text in files.items():
        put(tmp_path, path, text)
    found = gather_kernel(System(str(tmp_path)))
    assert {name: getattr(found, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("variable", "efi", "state"),
    [
        (None, False, "no-efi"),
        (b"\x06\x00\x00\x00\x01", True, "enabled"),
        (b"\x06\x00\x00\x00\x00", True, "disabled"),
        (None, True, "disabled"),
        (b"", True, "disabled"),
    ],
)
def test_secure_boot(tmp_path: Path, variable: bytes | None, efi: bool, state: str) -> None:
    if efi:
        (tmp_path / "sys/firmware/efi/efivars").mkdir(parents=True)
    if variable is not None:
        name = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
        (tmp_path / f"sys/firmware/efi/efivars/{name}").write_bytes(variable)
    assert gather_kernel(System(str(tmp_path))).secure_boot == state


@pytest.mark.root
def test_facts_are_json_for_programs(tmp_path: Path) -> None:
    data = json.loads(json.dumps(facts_to_json(gather(FakeHost(tmp_path, gpus=3)))))
    assert data["os"]["id"] == "debian"
    assert len(data["gpus"]) == 3
    assert data["driver"]["kernel_version"] == "550.163.01"
    assert data["kernel"]["container"] == "systemd-nspawn"


def test_what_only_root_may_look_at_ends_in_a_command_to_type() -> None:
    class Closed(System):
        def list_directory(self, path: str) -> tuple[str, ...]:
            raise PermissionError(13, "Permission denied", path)

    last, _ = ask(Closed(), Request("facts"))
    assert last.exit_code == ExitCode.USAGE
    assert last.problems[0].next_step == "sudo gpuprov facts"


def test_facts_for_a_user_leave_out_what_only_root_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost(tmp_path)
    (tmp_path / "etc/docker/daemon.json").write_text("{}")
    real = files.open_regular

    def refused(place: Path) -> BinaryIO:
        if place.name == "daemon.json":
            raise PermissionError(13, "Permission denied", str(place))
        return real(place)

    real_status = files.status_of

    def closed(place: Path) -> files.FileStatus | None:
        if place.name == "driver-incomplete":  # in a folder of root's, on a host that gpuprov has installed
            raise PermissionError(13, "Permission denied", str(place))
        return real_status(place)

    monkeypatch.setattr(files, "open_regular", refused)
    monkeypatch.setattr(files, "status_of", closed)
    monkeypatch.setattr(host, "user_id", lambda: 1000)
    ended, events = ask(host, Request("facts"))
    assert ended.exit_code == 0
    assert any(isinstance(event, FactsGathered) for event in events)
    (note,) = (event for event in events if isinstance(event, Note))
    left_out = "/etc/docker/daemon.json, /var/lib/gpuprov/driver-incomplete"
    assert note == Note(f"left out, because only root may read it: {left_out}", "warning")
    monkeypatch.setattr(host, "user_id", lambda: 0)
    assert ask(host, Request("facts"))[0].exit_code == 2


@pytest.mark.parametrize(("target", "content"), [("/srv/unit", b"x"), ("/srv/none", None), ("/srv", None)])
def test_a_file_that_is_a_link_is_where_the_link_leads(tmp_path: Path, target: str, content: bytes | None) -> None:
    host = System(str(tmp_path))
    for folder in ("/srv", "/etc/apt/sources.list.d", "/etc/yum.repos.d", "/usr/bin"):
        host.make_directory(folder)
    (tmp_path / "srv/unit").write_bytes(b"x")
    paths = ("/etc/apt/sources.list.d/gpuprov-site.sources", "/etc/apt/sources.list", "/etc/apt/sources.list.d/x.list",
             "/etc/yum.repos.d/x.repo")  # fmt: skip
    for path in (*paths, NVIDIA_HOOK_PATH):
        # Relative: the folder of the test is no root.
        (tmp_path / path[1:]).symlink_to("../" * (path.count("/") - 1) + target[1:])
    found = {path: one.content for path, one in gather_files(host).items()}
    # Where the link of NVIDIA's hook leads is NVIDIA's own program.
    assert found.pop(NVIDIA_HOOK_PATH) == b""
    assert found == (dict.fromkeys(paths, content) if content else {})
