"""Machines that are something else: recognised by trees like theirs, and served or refused with a way there.

The files, ids and product names are those that each row of machines.json names with its source.
"""

import errno
import os
import socket
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.probe import parse_probe, python_problem
from gpuprov.core.system import System
from gpuprov.facts.host import HostFacts
from gpuprov.facts.kernels import ImageFacts
from gpuprov.fleet import ssh
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import SshSettings
from gpuprov.machine.distros import UNKNOWN, distribution_of
from gpuprov.machine.machine import MACHINES, MachineKind, gather_kernel, gather_kinds, gather_os
from gpuprov.plan.context import PlanContext
from gpuprov.plan.preflight import preflight, read_only
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import parse_spec

pytestmark = pytest.mark.root
DEBIAN = "ID=debian\nVERSION_ID=12\nVERSION_CODENAME=bookworm\n"
UBUNTU = "ID=ubuntu\nVERSION_ID=24.04\n"
# Name → the files of its tree, and what a refusal, or the note, tells to do.
TREES: dict[str, tuple[dict[str, str], str]] = {
    "WSL 2": (
        {"/proc/version": "Linux version 5.15.90.1-microsoft-standard-WSL2 (gcc 12)\n", "/etc/os-release": UBUNTU},
        "gpuprov cdi generate --mode wsl",
    ),
    "Jetson, IGX (Tegra)": (
        {"/etc/nv_tegra_release": "# R36 (release), REVISION: 4.3\n", "/etc/os-release": UBUNTU}, "nvidia-container",
    ),
    "DGX Spark, DGX OS": (
        {"/etc/os-release": UBUNTU, "/etc/dgx-release": 'DGX_NAME="DGX Spark"\nDGX_PRETTY_NAME="NVIDIA DGX Spark"\n'},
        "gpuprov_driver: preinstalled",
    ),
    "Container-Optimized OS": ({"/etc/os-release": "ID=cos\nVERSION_ID=117\n"}, "cos-extensions install gpu"),
    "Flatcar Container Linux": ({"/etc/os-release": "ID=flatcar\nID_LIKE=coreos\n"}, "/etc/flatcar/nvidia-metadata"),
    "Talos Linux": ({"/etc/os-release": "ID=talos\nVERSION_ID=v1.11.5\n"}, "talosctl upgrade"),
    "Bottlerocket": ({"/etc/os-release": "ID=bottlerocket\n"}, "aws-k8s-VERSION-nvidia"),
    "openSUSE MicroOS": ({"/etc/os-release": 'ID="opensuse-microos"\n'}, "transactional-update"),
    "SUSE Linux Micro": ({"/etc/os-release": 'ID="sl-micro"\nVERSION_ID="6.1"\n'}, "transactional-update"),
    "Fedora CoreOS": ({"/etc/os-release": "ID=fedora\nVERSION_ID=43\nVARIANT_ID=coreos\n"}, "bootc switch"),
    "bootc, ostree (Silverblue, RHEL image mode)": (
        {"/etc/os-release": 'ID="rhel"\nVERSION_ID="9.6"\n', "/run/ostree-booted": ""}, "gpuprov install --image",
    ),
    "Guest of LXC, Incus, LXD, Proxmox VE": (
        {"/etc/os-release": DEBIAN, "/run/systemd/container": "lxc\n"}, "gpuprov docker-args --for incus",
    ),
    "Host of Proxmox VE": (
        {"/etc/os-release": DEBIAN, "/etc/pve/.version": "{}"}, "gpuprov docker-args --for lxc >> /etc/pve/lxc/ID.conf",
    ),
    "Host of Incus or LXD": ({"/etc/os-release": DEBIAN, "/var/lib/incus/database/local.db": ""}, "args --for incus"),
}  # fmt: skip


def kinds_of(root: Path, files: dict[str, str]) -> dict[str, str]:
    for path, text in files.items():
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    system = System(str(root))
    return dict(gather_kinds(system, gather_os(system), gather_kernel(system)))


def row(name: str) -> MachineKind:
    (found,) = (one for one in MACHINES if one.name == name)
    return found


def of_kind(debian: HostFacts, root: Path, name: str) -> HostFacts:
    return replace(debian, kinds=kinds_of(root, TREES[name][0]), os=gather_os(System(str(root))))


def test_each_row_has_a_tree_and_a_source() -> None:
    assert [one.name for one in MACHINES] == list(TREES)
    assert all(one.source for one in MACHINES)


@pytest.mark.parametrize("name", TREES)
def test_a_machine_of_a_kind_is_recognised_as_that_kind_alone(tmp_path: Path, name: str) -> None:
    assert list(kinds_of(tmp_path, TREES[name][0])) == [name]


@pytest.mark.parametrize("name", ["debian-12", "ubuntu-24.04", "rhel-9.3", "fedora-38", "sles-16.0"])
def test_an_ordinary_server_is_of_no_kind(tmp_path: Path, name: str) -> None:
    text = (Path(__file__).parents[1] / "data/os-release" / name).read_text()
    # Ubuntu Server brings LXD, whose socket systemd makes; without a database it has never run.
    socket = "/var/snap/lxd/common/lxd/unix.socket"
    files = {"/etc/os-release": text, "/proc/version": "Linux version 6.1.0-13-amd64", socket: ""}
    assert kinds_of(tmp_path, files) == {}


def test_a_dgx_spark_is_known_by_its_product_name(tmp_path: Path) -> None:
    found = kinds_of(tmp_path, {"/etc/os-release": UBUNTU, "/sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n"})
    assert found == {"DGX Spark, DGX OS": "DMI product name: NVIDIA_DGX_Spark"}


@pytest.mark.parametrize("name", [one.name for one in MACHINES if one.served == "no"])
def test_a_refused_kind_is_the_one_thing_said(debian: HostFacts, tmp_path: Path, name: str) -> None:
    found = of_kind(debian, tmp_path, name)
    for driver in ("runfile", "preinstalled"):
        (problem,) = preflight(PlanContext(replace(found, gpus=()), parse_spec({"driver": driver})))
        assert problem.what == row(name).what and TREES[name][1] in problem.next_step and problem.evidence
    if row(name).os:
        assert distribution_of(found.os) == UNKNOWN


@pytest.mark.parametrize("name", [one.name for one in MACHINES if one.served == "preinstalled"])
def test_a_machine_with_a_driver_of_its_own_is_served_beside_it(debian: HostFacts, tmp_path: Path, name: str) -> None:
    found = of_kind(debian, tmp_path, name)
    (problem,) = preflight(PlanContext(found, parse_spec({"driver_version": "550.163.01"})))
    assert problem.what == row(name).what and TREES[name][1] in problem.next_step
    beside = preflight(PlanContext(found, parse_spec({"driver": "preinstalled"})))
    assert row(name).what not in [one.what for one in beside]


def test_an_image_is_not_of_the_kind_that_it_is_built_on(debian: HostFacts, tmp_path: Path) -> None:
    found = replace(debian, image=ImageFacts(), kinds=kinds_of(tmp_path, TREES["WSL 2"][0]))
    assert not [one for one in preflight(PlanContext(found, parse_spec({"target": "image"}))) if "WSL" in one.what]


def test_on_an_ostree_host_usr_is_not_to_be_remounted(debian: HostFacts, tmp_path: Path) -> None:
    found = of_kind(debian, tmp_path, "bootc, ostree (Silverblue, RHEL image mode)")
    (problem,) = read_only(replace(found, read_only={"/usr": "/usr (ro)"}), ["/usr"])
    assert "remount" not in problem.next_step and "bootc switch" in problem.next_step
    dgx = of_kind(debian, tmp_path / "dgx", "DGX Spark, DGX OS")
    (problem,) = read_only(replace(dgx, read_only={"/usr": "/usr (ro)"}), ["/usr"])
    assert problem.next_step == "mount -o remount,rw /usr", "an ordinary file system"


@pytest.mark.parametrize("name", [one.name for one in MACHINES if one.served == "yes"])
def test_a_served_kind_is_told_the_way_and_nothing_is_refused(debian: HostFacts, tmp_path: Path, name: str) -> None:
    found = replace(debian, kinds=kinds_of(tmp_path, TREES[name][0]))
    plan = make_plan(found, parse_spec({"driver_version": "550.163.01"}))
    assert plan.problems == ()
    assert [note for note in plan.notes if TREES[name][1] in note and note.startswith(row(name).what)]


def test_a_host_without_python_is_refused_by_what_its_login_shows() -> None:
    os_line = "os flatcar|4230.2.0|||Flatcar Container Linux||"
    probe = parse_probe(f"gpuprov-probe 1\nsystem Linux x86_64\nuid 0\n{os_line}\nend\n")
    assert probe is not None
    problem = python_problem(probe, "")
    assert problem is not None and "Flatcar builds its driver itself" in problem.what
    assert "/etc/flatcar/nvidia-metadata" in problem.next_step


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


_REFUSED = OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def explained(error: Exception, gateway: Any = None) -> Problem:
    hop: Any = types.SimpleNamespace(host="127.0.0.1", original_host="127.0.0.1", port=22, user="root", gateway=gateway)
    with pytest.raises(GpuprovError) as caught, ssh.explained(HostTarget("gpu1", parse_spec({})), hop, SshSettings()):
        raise error
    return caught.value.problems[0]


def test_talos_is_known_by_the_port_of_its_api(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        monkeypatch.setattr(ssh, "MACHINES", (replace(row("Talos Linux"), api_port=port),))
        problem = explained(_REFUSED)
        assert problem.what.startswith("127.0.0.1 is probably a host of Talos Linux: Talos has no SSH")
        assert f"port {port} is open" in problem.evidence and "talosctl upgrade" in problem.next_step
        # Behind a jump host, the port could not be asked.
        assert "Talos" not in str(explained(_REFUSED, types.SimpleNamespace(is_connected=True)))
    assert "Talos" not in str(explained(_REFUSED))


@pytest.mark.parametrize("error", [
    OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)),
    ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)),  # sshd answered
    EOFError("the connection ended"),
])  # fmt: skip
def test_an_open_ssh_port_is_not_talos(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with listening() as port:
        monkeypatch.setattr(ssh, "MACHINES", (replace(row("Talos Linux"), api_port=port),))
        text = str(explained(error))
    assert "Talos" not in text and "127.0.0.1 port 22 cannot be reached" in text
