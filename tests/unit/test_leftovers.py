"""What of nvidia-docker 1 and 2 is found on a host that has all of it, and what docker is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gpuprov.core.commands import Completed
from gpuprov.engines.docker import DockerFacts
from gpuprov.facts.leftovers import FOLDER, SETTINGS_FOLDER, UNIT, Leftovers, Volume, gather_leftovers, with_docker
from gpuprov.packages.interface import PackageFacts, PackageManager
from gpuprov.protocol.errors import GpuprovError
from tests.unit.fake_host import FakeHost

pytestmark = pytest.mark.root
RUNTIME = "/usr/bin/nvidia-container-runtime"
VOLUME = "nvidia_driver_375.26"
ACCOUNT = f"nvidia-docker:x:998:998::{FOLDER}:/bin/sh"
STOPPED = "job (Exited (0) 2 years ago)"
PACKAGES = PackageFacts("apt", {"nvidia-docker2": "2.13.0-1", "nvidia-container-toolkit": "1.13.5-1"})
PLUGIN = PackageFacts("apt", {"nvidia-docker": "1.0.1-1"})
CONFIG = {
    "nvidia": RUNTIME, "legacy": "nvidia-container-runtime.legacy", "lost": "nvidia-container-runtime.lost",
    "gone": "/opt/nvidia-container-runtime.gone", "kata": "/usr/bin/kata",
}  # fmt: skip
RUNTIMES = {**{name: {"path": path} for name, path in CONFIG.items()}, "odd": None, "none": {}}
DOCKER = DockerFacts(
    installed=True, active=True, running_containers=("job",), config_text=json.dumps({"runtimes": RUNTIMES})
)
# As docker 20.10 takes them; anything else is an error of usage.
_PS = ("docker", "ps", "--quiet", "--no-trunc")
_PS_ALL = ("docker", "ps", "--all", "--quiet", "--no-trunc")
_INSPECT = ("docker", "inspect", "--format")
_MOUNTS = "{{json .HostConfig.Binds}} {{json .HostConfig.Mounts}} {{.Name}}"
ANSWERS: dict[tuple[str, ...], tuple[int, str]] = {
    ("systemctl", "is-active", UNIT): (0, "active\n"),
    ("docker", "volume", "ls", "--format", "{{.Driver}} {{.Name}}"): (
        0, f"local data\nnvidia-docker {VOLUME}\nlocal nvidia_driver_of_mine\nlocal nvidia_driver_384 1\n\n",
    ),
    ("docker", "ps", "--all", "--no-trunc", "--filter", f"volume={VOLUME}", "--format", "{{.Names}} ({{.Status}})"): (
        0, f"{STOPPED}\nbuild (Created)\n",
    ),
    _PS: (0, "2222\n3333\n"),
    _PS_ALL: (0, "1111\n2222\n3333\n"),
    (*_INSPECT, "{{.HostConfig.Runtime}} {{.Name}}", "2222", "3333"): (0, "nvidia /Xjob\nrunc /nvidia\n"),
    (*_INSPECT, _MOUNTS, "1111", "2222", "3333"): (
        0, f'["{FOLDER}/volumes/x:/n"] null /Xold\n["/srv:/srv"] null /web\nnull [{{"Source":"{FOLDER}"}}] /job\n',
    ),
}  # fmt: skip


class OldHost(FakeHost):
    """A host with all that nvidia-docker 1 and 2 leave."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answers = dict(ANSWERS)
        for path, text in {
            f"/etc/systemd/system/{UNIT}": "[Service]\n",
            "/usr/bin/nvidia-docker-plugin": "\x7fELF",
            "/usr/bin/nvidia-docker": "#!/bin/sh\n# of a package\n",
            "/usr/local/bin/nvidia-docker": "#!/bin/sh\n# gpuprov\n",
            "/etc/passwd": f"root:x:0:0::/root:/bin/sh\n{ACCOUNT}\n",
            f"{FOLDER}/volumes/x": "",
            f"{SETTINGS_FOLDER}/config.toml": "disable-require = true\n",
            f"{SETTINGS_FOLDER}/config.toml.dpkg-old": "",
            f"{SETTINGS_FOLDER}/config.toml.mine": "",
            "/etc/containerd/config.toml": f'  # "/a/nvidia-container-runtime"\n  BinaryName = "{RUNTIME}"\n',
            "/etc/crio/crio.conf.d/99-nvidia.conf": f'[x]\nruntime_path = "{RUNTIME}" # {RUNTIME}.cdi\n',
            "/etc/containers/containers.conf": "[engine]\n",
            "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json": '{"path": "/usr/bin/nvidia-container-toolkit"}',
            RUNTIME: "\x7fELF",
            f"{RUNTIME}.legacy": "\x7fELF",
        }.items():
            self.put(path, text)

    def put(self, path: str, text: str) -> None:
        self.make_directory(path.rpartition("/")[0])
        self.write(path, text.encode(), mode=0o755)

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        assert 0 < more["timeout"] <= 30
        code, text = self.answers.get(tuple(argv), (125, "unknown"))
        return Completed(tuple(argv), code, "" if code else text, text if code else "")


class Manager:
    """A package manager of which a package owns /usr/bin/nvidia-docker."""

    asked: tuple[str, ...] = ()

    def unowned(self, system: OldHost, paths: Sequence[str]) -> frozenset[str]:
        assert isinstance(system, OldHost)
        self.asked = tuple(paths)
        return frozenset(paths) - {"/usr/bin/nvidia-docker"}

    def needed_by(self, system: OldHost, names: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        assert isinstance(system, OldHost)
        return dict.fromkeys(names, ("site-tool",))


@pytest.fixture
def host(tmp_path: Path) -> OldHost:
    return OldHost(tmp_path / "root")


def gathered(host: OldHost, packages: PackageFacts = PACKAGES, docker: DockerFacts = DOCKER) -> Leftovers:
    return gather_leftovers(host, packages, docker, cast(PackageManager, Manager()))


def test_all_that_both_generations_leave_is_found(host: OldHost) -> None:
    found = gathered(host)
    assert found == Leftovers(
        files=("/usr/bin/nvidia-docker-plugin", f"/etc/systemd/system/{UNIT}"),
        unit="active",
        account=ACCOUNT,
        folder=True,
        settings=(f"{SETTINGS_FOLDER}/config.toml", f"{SETTINGS_FOLDER}/config.toml.dpkg-old"),
        settings_count=True,
        dead_runtimes=("lost", "gone"),
        users={
            "/etc/containerd/config.toml": (RUNTIME,),
            "/etc/crio/crio.conf.d/99-nvidia.conf": (RUNTIME, f"{RUNTIME}.cdi"),
            f"{DOCKER.config_path}, runtime legacy": ("nvidia-container-runtime.legacy",),
        },
        needed_by={"nvidia-docker2": ("site-tool",), "nvidia-container-toolkit": ("site-tool",)},
    )
    assert found.has_plugin
    # Hooks are for engines that read them.
    hook = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json"
    for engine in ("/usr/bin/podman", "/usr/bin/crio"):
        host.put(engine, "\x7fELF")
        assert gathered(host).users == {**found.users, hook: ("/usr/bin/nvidia-container-toolkit",)}
        host.remove(engine)
    host.answers[("systemctl", "is-active", UNIT)] = (3, "inactive")
    assert gathered(host).unit == "inactive"


def test_without_packages_of_it_nobody_is_asked_who_uses_them(host: OldHost) -> None:
    found = gathered(host, PackageFacts("apt", {}))
    assert (found.users, found.needed_by, found.folder) == ({}, {}, True)


def test_a_host_without_a_trace_is_asked_nothing(tmp_path: Path) -> None:
    class Untouched(FakeHost):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            raise AssertionError(argv)

    manager = cast(PackageManager, None)
    assert gather_leftovers(Untouched(tmp_path), PackageFacts("apt", {}), DockerFacts(), manager) == Leftovers()


def test_an_old_setting_alone_is_looked_up_too(tmp_path: Path) -> None:
    host = OldHost(tmp_path)
    for path in ("/usr/bin/nvidia-docker-plugin", "/usr/bin/nvidia-docker", f"/etc/systemd/system/{UNIT}"):
        host.remove(path)
    found = gathered(host)
    assert (found.files, found.unit) == ((), "")
    assert found.settings == (f"{SETTINGS_FOLDER}/config.toml", f"{SETTINGS_FOLDER}/config.toml.dpkg-old")
    # A file that can't be read may hold settings that count.
    host.put(f"{SETTINGS_FOLDER}/config.toml", "[")
    assert gathered(host).settings_count


def test_docker_tells_volumes_with_stopped_users_and_running_containers(host: OldHost) -> None:
    found = gathered(host)
    asked = with_docker(host, found, DOCKER, PACKAGES)
    assert asked == replace(
        found, volumes=(Volume(VOLUME, "nvidia-docker", ("build (Created)", STOPPED)),), running=("Xjob",),
        folder_users=("Xold", "job"),
    )  # fmt: skip
    # Nobody asks for the containers of a runtime that is not installed, nor where no container runs.
    for packages, docker in ((PackageFacts("apt", {}), DOCKER), (PACKAGES, replace(DOCKER, running_containers=()))):
        assert with_docker(host, found, docker, packages).running == ()
    host.answers[_PS] = (0, "")
    assert with_docker(host, found, DOCKER, PACKAGES).running == ()


def test_the_plugins_package_is_trace_enough_to_ask_for_volumes(host: OldHost) -> None:
    none = Leftovers()
    assert with_docker(host, none, replace(DOCKER, running_containers=()), PLUGIN).volumes != ()
    assert with_docker(host, none, replace(DOCKER, running_containers=()), PACKAGES).volumes == ()
    assert with_docker(host, none, replace(DOCKER, running_containers=()), PACKAGES, always=True).volumes != ()


@pytest.mark.parametrize("silent", [argv for argv in ANSWERS if argv[0] == "docker"], ids=lambda argv: argv[1])
def test_a_docker_that_does_not_tell_is_an_error_where_it_must(host: OldHost, silent: tuple[str, ...]) -> None:
    host.answers[silent] = (1, "1\n2\n3\n4\nCannot connect")
    found = gathered(host)
    with pytest.raises(GpuprovError, match="docker does not tell") as caught:
        with_docker(host, found, DOCKER, PACKAGES, always=True)
    (problem,) = caught.value.problems
    assert problem.evidence.endswith("Cannot connect") and problem.next_step
    assert with_docker(host, found, DOCKER, PACKAGES) == found


def test_where_docker_does_not_run_its_volumes_are_seen_on_the_disk(host: OldHost) -> None:
    host.make_directory(f"/var/lib/docker/volumes/{VOLUME}")
    host.make_directory("/var/lib/docker/volumes/nvidia_driver_of_mine")
    found = gathered(host)
    assert with_docker(host, found, replace(DOCKER, active=False), PACKAGES) == replace(found, unseen=(VOLUME,))
