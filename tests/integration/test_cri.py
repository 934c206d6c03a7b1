"""Kubernetes' side of a node: pods through CRI on containerd 1.6, 1.7 and 2, by runtime handler and by CDI."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.system import System
from gpuprov.engines.cri_status import CriStatus, ask
from tests.deployed import program
from tests.integration.cri import Container, Cri, Ended
from tests.integration.test_clients import fresh_sid, gpus
from tests.lab import Host
from tests.lab.cgroups import cgroup_directories
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds

pytestmark = [pytest.mark.lab, pytest.mark.root]
_SOCKET = "/run/containerd/containerd.sock"
_IMAGE = "docker.io/library/pod:1"
# A C library, a shell, and what the pod's own container ("pause") runs; of the driver's nothing.
_PREPARE = r"""
set -e
cd / && tar -ch lib64/ld-linux-x86-64.so.2 bin/sh bin/busybox $(printf 'lib/x86_64-linux-gnu/%s ' \
  libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1) >/root/pod.tar
docker import --change 'CMD ["/bin/busybox", "sleep", "1000000"]' /root/pod.tar pod:1
docker save pod:1 | ctr -n k8s.io image import -
"""
_VERSION_2 = f"""\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{_IMAGE}"
  restrict_oom_score_adj = true
"""
_VERSION_3 = f"""\
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = '{_IMAGE}'
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
"""
# The lab's machine has no controller for CPU shares, which CRI always asks for.
_RUNC = """\
#!/usr/bin/python3
import json, os, sys
if "create" in sys.argv:
    path = os.path.join(sys.argv[sys.argv.index("--bundle") + 1], "config.json")
    with open(path) as file:
        spec = json.load(file)
    spec["linux"].get("resources", {}).pop("cpu", None)
    with open(path, "w") as file:
        json.dump(spec, file)
os.execv("/usr/sbin/runc", ["runc", *sys.argv[1:]])
"""


_ALL = {"NVIDIA_VISIBLE_DEVICES": "all"}
_CDI: dict[str, dict[str, Any]] = {
    "devices": {"devices": ["nvidia.com/gpu=1"]},
    "annotations": {"annotations": {"cdi.k8s.io/nvidia-device-plugin_1": "nvidia.com/gpu=1"}},
}


@dataclass(frozen=True)
class Node:
    """A provisioned host, its CRI, and the UUIDs of its GPUs."""

    site: Site
    host: Host
    series: str
    cri: Cri
    socket: str
    gpus: list[str]

    def run(self, handler: str = "", command: str = "nvidia-smi -L", **asked: Any) -> Ended:
        return self.cri.run(Container(("sh", "-c", command), _IMAGE, **asked), handler)


def socket_of(host: Host, path: str) -> str:
    """Return the path under which this machine reaches a host's socket: /run is a mount of the host's own."""
    for directory in cgroup_directories(host.cgroup):
        for procs in directory.rglob("cgroup.procs"):
            for pid in procs.read_text().split():
                seen = Path(f"/proc/{pid}/root{path}")
                if seen.exists():
                    return str(seen)
    raise AssertionError(f"{host.name} has no {path}")


@pytest.fixture(scope="module", params=["1.6", "1.7", "2"])
def node(request: pytest.FixtureRequest, site: Site) -> Iterator[Node]:
    series = request.param
    name = {"1.6": "main", "1.7": "trixie", "2": "sid"}[series]
    host = fresh_sid(site) if name == "sid" else site.installed(name)
    assert f" {series}." in host.ssh("containerd --version").stdout.replace(" v", " ")
    subprocess.run(("cp", program("busybox"), str(host.root / "usr/bin/busybox")), check=True)
    host.ssh("sh -s", stdin=_PREPARE)
    host.ssh("cat > /usr/local/sbin/runc && chmod 755 /usr/local/sbin/runc", stdin=_RUNC)
    host.ssh("cat > /etc/containerd/config.toml", stdin=_VERSION_3 if series == "2" else _VERSION_2)
    gpuprov_succeeds("install", "--hosts", site.inventory(name, gpuprov_engines=["containerd"]))
    socket = socket_of(host, _SOCKET)
    with Cri(socket, host.root) as cri:
        yield Node(site, host, series, cri, socket, gpus(host.ssh("nvidia-smi -L").stdout))


def test_a_pod_with_the_handler_gets_the_gpus_that_it_asks_for(node: Node) -> None:
    asked = {"all": node.gpus, "1": node.gpus[1:], node.gpus[0]: node.gpus[:1]}
    for value, expected in asked.items():
        ended = node.run("nvidia", environment={"NVIDIA_VISIBLE_DEVICES": value})
        assert (ended.code, gpus(ended.said)) == (0, expected), ended
    assert "/dev/nvidia0" not in node.run("nvidia", "ls -d /dev/nvidia* || :").said
    assert node.host.ssh("nvidia-smi -L").stdout.strip() == node.run("nvidia", environment=_ALL).said


def test_a_pod_without_the_handler_gets_none(node: Node) -> None:
    assert node.run("", "ls -d /dev/nvidia* /usr/bin/nvidia-smi", environment=_ALL).code != 0
    with pytest.raises(node.cri.error, match="no runtime for"):
        node.run("no-such-handler")


@pytest.mark.parametrize(
    ("handler", "by"), [("", "devices"), ("", "annotations"), ("nvidia", "devices")], ids=lambda word: word or "none"
)
def test_a_pod_gets_cdi_devices_from_1_7_on(node: Node, handler: str, by: str) -> None:
    """The device plugin's answers of the kinds cdi-cri and cdi-annotations; 1.6 knows neither.

    With a RuntimeClass beside CDI devices, neither takes from the other.
    """
    ended = node.run(handler, **_CDI[by])
    expected = (127, []) if node.series == "1.6" else (0, node.gpus[1:])
    assert (ended.code, gpus(ended.said)) == expected, ended


def test_containerd_tells_its_handlers_and_whether_it_reads_cdi(node: Node) -> None:
    said = ask(System(), node.socket)
    assert said == CriStatus(("nvidia", "runc"), cdi=None if node.series == "1.6" else True)


# What other series answer is in the test above.
@pytest.mark.only(node="1.7")
def test_verify_fails_where_containerd_has_not_read_its_files_and_install_restarts_it(node: Node) -> None:
    inventory = node.site.inventory(node.host.name, gpuprov_engines=["containerd"])
    assert handler_check(inventory)["status"] == "ok"
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    # Started without what its files say now.
    node.host.ssh("cp -a /etc/containerd/config.toml /root/kept && cat > /etc/containerd/config.toml", stdin=_VERSION_2)
    node.host.ssh("systemctl restart containerd && cp -a /root/kept /etc/containerd/config.toml")
    check = handler_check(inventory)
    assert check["status"] == "failed" and check["reason"].endswith("(it knows runc); systemctl restart containerd")
    done = gpuprov("install", "--hosts", inventory)
    assert "restart containerd: it runs and has not read its files" in done.stdout
    assert ask(System(), node.socket) == CriStatus(("nvidia", "runc"), cdi=True)


@pytest.mark.only(node="1.7")
def test_verify_uses_the_address_that_containerd_is_configured_with(node: Node) -> None:
    """Docker, whose containerd it is too, is left alone meanwhile."""
    file = "/etc/containerd/config.toml"
    node.host.ssh(f"cp -a {file} /root/kept && printf '\n[grpc]\naddress = \"/run/my.sock\"\n' >> {file}")
    inventory = node.site.inventory(node.host.name, gpuprov_engines=["containerd"], gpuprov_docker="none")
    try:
        node.host.ssh("systemctl restart containerd && rm -f /run/containerd/containerd.sock")
        assert handler_check(inventory)["status"] == "ok"
        gpuprov_succeeds("verify", "--hosts", inventory)
    finally:
        node.host.ssh(f"cp -a /root/kept {file} && systemctl restart containerd docker")


# 1.6 and 1.7 are configured by the same file.
@pytest.mark.only(node=("1.7", "2"))
def test_as_the_default_it_needs_no_handler_and_rollback_takes_it_away(node: Node) -> None:
    inventory = node.site.inventory(node.host.name, gpuprov_engines=["containerd"], gpuprov_default_runtime=True)
    gpuprov_succeeds("install", "--hosts", inventory)
    assert gpus(node.run("", environment=_ALL).said) == node.gpus
    assert node.run("", "ls /usr/bin/nvidia-smi").code != 0
    gpuprov_succeeds("rollback", "--hosts", inventory)
    assert node.run("", "ls /usr/bin/nvidia-smi", environment=_ALL).code != 0


def handler_check(inventory: Path) -> dict[str, str]:
    """Return verify's check of the handler."""
    lines = gpuprov("verify", "--hosts", inventory, "--json").stdout.splitlines()
    checks = [event for event in map(json.loads, lines) if event.get("name") == "containerd, handler nvidia"]
    assert checks, lines
    return dict(checks[0])
