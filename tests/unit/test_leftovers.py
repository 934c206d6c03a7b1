"""What of nvidia-docker 1 and 2 is found on a host that has all of it, and what docker is asked for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gpuprov.boot import nvidia_docker
from gpuprov.boot.nvidia_docker import InstallNvidiaDocker, is_ours
from gpuprov.core.changes import Change
from gpuprov.core.commands import Completed
from gpuprov.engines.docker import DockerFacts
from gpuprov.facts.host import HostFacts, gather
from gpuprov.facts.leftovers import FOLDER, UNIT, Leftovers, Volume, gather_leftovers, with_docker
from gpuprov.facts.leftovers import NVIDIA_DOCKER as PATH
from gpuprov.packages.interface import PackageFacts, PackageManager
from gpuprov.plan.context import PlanContext
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH
from tests import simgpu
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root
RUNTIME = "/usr/bin/nvidia-container-runtime"
VOLUME = "nvidia_driver_375.26"
PACKAGES = PackageFacts("apt", {"nvidia-docker2": "2.13.0-1", "nvidia-container-toolkit": "1.13.5-1"})
PLUGIN = PackageFacts("apt", {"nvidia-docker": "1.0.1-1"})
CONFIG = {
    "nvidia": RUNTIME, "legacy": "nvidia-container-runtime.legacy", "lost": "nvidia-container-runtime.lost",
    "gone": "/opt/nvidia-container-runtime.gone", "kata": "/usr/bin/kata",
}  # fmt: skip
RUNTIMES = {**{name: {"path": path} for name, path in CONFIG.items()}, "odd": None, "none": {}}
_DAEMON_JSON = json.dumps({"runtimes": RUNTIMES})
DOCKER = DockerFacts(installed=True, active=True, running_containers=("job",), config_text=_DAEMON_JSON)
# As docker 20.10 takes them; anything else is an error of usage.
_PS = ("docker", "ps", "--all", "--quiet", "--no-trunc")
_INSPECT = ("docker", "inspect", "--format", "{{.Name}} {{.State.Status}} {{.HostConfig.Runtime}} {{json .Mounts}}")
MOUNT = '[{"Type":"bind","Source":"/var/lib/nvidia-docker/volumes/x"}]'
ANSWERS: dict[tuple[str, ...], tuple[int, str]] = {
    ("systemctl", "is-active", UNIT): (0, "active\n"),
    ("docker", "volume", "ls", "--format", "{{.Driver}} {{.Name}}"): (
        0, f"local data\nnvidia-docker {VOLUME}\nlocal nvidia_driver_of_mine\nlocal nvidia_driver_384 1\n\n",
    ),
    _PS: (0, "1\n2\n3\n4\n"),
    (*_INSPECT, "1", "2", "3", "4"): (
        0, f'/job exited nvidia [{{"Type":"volume","Name":"{VOLUME}","Source":"{FOLDER}/x"}}]\n'
        f'/build running nvidia null\n/nvidia created runc {MOUNT}\n/web paused runc [{{"Source":"{FOLDER}-x"}}]\n',
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
            f"{FOLDER}/volumes/x": "",
            NVIDIA_SETTINGS_PATH: "disable-require = true\n",
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

    def unowned(self, system: OldHost, paths: Sequence[str]) -> tuple[str, ...]:
        assert isinstance(system, OldHost)
        return tuple(path for path in paths if path != "/usr/bin/nvidia-docker")

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
        folder=True,
        has_settings=True,
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
    host = FakeHost(tmp_path)
    assert gather_leftovers(host, PackageFacts("apt", {}), DockerFacts(), cast(PackageManager, None)) == Leftovers()
    assert host.commands == []


def test_a_link_in_the_folders_place_is_not_the_plugins(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.make_directory("/srv")
    host.make_link(FOLDER, "/srv")
    assert gather_leftovers(host, PackageFacts("apt", {}), DockerFacts(), cast(PackageManager, None)) == Leftovers()


def test_docker_tells_volumes_with_stopped_users_and_running_containers(host: OldHost) -> None:
    found = gathered(host)
    assert with_docker(host, found, DOCKER, PACKAGES) == replace(
        found, volumes=(Volume(VOLUME, "nvidia-docker", ("job (exited)",)),), running=("build",),
        folder_users=("nvidia",),
    )  # fmt: skip
    host.answers[_PS] = (0, "")
    assert with_docker(host, found, DOCKER, PACKAGES) == replace(found, volumes=(Volume(VOLUME, "nvidia-docker"),))


def test_a_container_that_goes_meanwhile_is_no_error(host: OldHost, tmp_path: Path) -> None:
    class Going(OldHost):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            done = super().run(argv, **more)
            gone = argv[:2] == ("docker", "inspect")
            return Completed(done.argv, 1, done.stdout, "Error: No such object: 5") if gone else done

    found = gathered(host)
    assert with_docker(Going(tmp_path / "going"), found, DOCKER, PACKAGES, always=True).folder_users == ("nvidia",)


def test_docker_is_asked_only_where_there_is_a_trace(host: OldHost) -> None:
    for packages, always, asked in ((PLUGIN, False, True), (PackageFacts("apt", {}), False, False),
                                    (PackageFacts("apt", {}), True, True)):  # fmt: skip
        assert (with_docker(host, Leftovers(), DOCKER, packages, always=always).volumes != ()) is asked
    host.make_directory(f"/var/lib/docker/volumes/{VOLUME}")
    assert with_docker(host, Leftovers(), DOCKER, PackageFacts("apt", {})).volumes != ()


@pytest.mark.parametrize("silent", [argv for argv in ANSWERS if argv[0] == "docker"], ids=lambda argv: argv[1])
def test_a_docker_that_does_not_tell_is_an_error_where_it_must(host: OldHost, silent: tuple[str, ...]) -> None:
    host.answers[silent] = (1, "1\n2\n3\n4\nCannot connect")
    found = gathered(host)
    problem = refused(with_docker, host, found, DOCKER, PACKAGES, always=True)
    assert "docker does not tell" in problem.what
    assert problem.evidence.endswith("Cannot connect") and problem.next_step
    assert with_docker(host, found, DOCKER, PACKAGES) == found


def test_where_docker_does_not_run_its_volumes_are_seen_on_the_disk(host: OldHost) -> None:
    host.make_directory(f"/var/lib/docker/volumes/{VOLUME}")
    host.make_directory("/var/lib/docker/volumes/nvidia_driver_of_mine")
    found = gathered(host)
    assert with_docker(host, found, replace(DOCKER, active=False), PACKAGES) == replace(found, unseen=(VOLUME,))


# -- the command nvidia-docker -----------------------------------------------------------------------------------------
THEIRS = b"#!/bin/sh\n# NVIDIA's\n"


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver_version": simgpu.DRIVER_VERSION, **values})


WANTED = spec(nvidia_docker=True)


@pytest.fixture
def fresh_host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "root")


@pytest.fixture
def facts(fresh_host: FakeHost) -> HostFacts:
    return gather(fresh_host)


def apply(fresh_host: FakeHost, changes: tuple[Change, ...]) -> dict[str, Any]:
    """Apply the only change; return what it captured."""
    (change,) = changes
    before = dict(change.capture(fresh_host))
    change.apply(fresh_host, lambda *words: None)
    return before


def test_it_comes_where_it_is_asked_for_and_once(fresh_host: FakeHost, facts: HostFacts) -> None:
    assert nvidia_docker.plan(facts, spec()) == ()
    before = apply(fresh_host, nvidia_docker.plan(facts, WANTED))
    status = fresh_host.status(PATH)
    assert status is not None
    assert (status.mode, status.uid, is_ours(fresh_host.read_bytes(PATH) or b"")) == (0o755, 0, True)
    text = fresh_host.read_text(PATH) or ""
    assert f"\npython={facts.interpreter.path}\n" in text and "/usr/lib/gpuprov/" in text and f'"{PATH}")' in text
    assert nvidia_docker.plan(gather(fresh_host), WANTED) == ()
    InstallNvidiaDocker.undo(fresh_host, before, {})
    InstallNvidiaDocker.undo(fresh_host, before, {})
    assert not fresh_host.exists(PATH)


def test_one_of_another_version_or_mode_is_replaced(fresh_host: FakeHost, facts: HostFacts) -> None:
    apply(fresh_host, nvidia_docker.plan(facts, WANTED))
    fresh_host.change_mode(PATH, 0o777)
    assert nvidia_docker.plan(gather(fresh_host), WANTED) != ()
    fresh_host.change_mode(PATH, 0o755)
    moved = replace(facts.interpreter, path="/usr/bin/python3.99")
    assert nvidia_docker.plan(replace(gather(fresh_host), interpreter=moved), WANTED) != ()


def test_ours_goes_where_it_is_no_longer_asked_for(fresh_host: FakeHost, facts: HostFacts) -> None:
    apply(fresh_host, nvidia_docker.plan(facts, WANTED))
    (change,) = nvidia_docker.plan(gather(fresh_host), spec())
    assert change.summary() == f"remove {PATH} (gpuprov_nvidia_docker is false)"


@pytest.mark.parametrize("kind", ["file", "link", "large", "folder"])
def test_anothers_is_kept_and_named(fresh_host: FakeHost, kind: str) -> None:
    place = fresh_host.path(PATH)
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        place.symlink_to("/opt/nvidia-docker")
    elif kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(THEIRS if kind == "file" else bytes(5 << 20))
    facts = gather(fresh_host)
    assert nvidia_docker.plan(facts, WANTED) == nvidia_docker.plan(facts, spec()) == ()
    assert nvidia_docker.warning(facts, spec()) == ""
    assert nvidia_docker.warning(facts, WANTED).startswith(f"{PATH} is not gpuprov's: gpuprov keeps it")
    assert "remove it" in nvidia_docker.warning(facts, WANTED)
    packaged = replace(facts, packages=PackageFacts("apt", {"nvidia-docker2": "2.13.0-1"}))
    assert "remove nvidia-docker2" in nvidia_docker.warning(packaged, WANTED)
    assert "belongs to the package nvidia-docker2" in nvidia_docker.warning(packaged, WANTED)


@pytest.mark.parametrize("left", ["package", "file"])
def test_a_migration_makes_room_in_the_same_run(fresh_host: FakeHost, left: str) -> None:
    fresh_host.path(PATH).parent.mkdir(parents=True, exist_ok=True)
    fresh_host.path(PATH).write_bytes(THEIRS)
    facts = gather(fresh_host)
    if left == "package":
        facts = replace(facts, packages=replace(facts.packages, installed={"nvidia-docker2": "2.13.0-1"}))
    else:
        facts = replace(facts, leftovers=replace(facts.leftovers, files=(PATH,)))
    for wanted, plans in ((WANTED, False), (spec(nvidia_docker=True, migrate_nvidia_docker=True), True)):
        later = PlanContext(facts, wanted).migrated
        assert bool(nvidia_docker.plan(later, wanted)) is plans
        assert bool(nvidia_docker.warning(later, wanted)) is not plans


def test_the_way_back_keeps_what_a_package_has_brought_since(fresh_host: FakeHost, facts: HostFacts) -> None:
    before = apply(fresh_host, nvidia_docker.plan(facts, WANTED))
    assert InstallNvidiaDocker.irreversible(fresh_host, before, {}, ()) == ()
    fresh_host.write(PATH, THEIRS, mode=0o755)
    assert InstallNvidiaDocker.irreversible(fresh_host, before, {}, ()) == (f"{PATH} stays: it is no longer gpuprov's",)
    InstallNvidiaDocker.undo(fresh_host, before, {})
    assert fresh_host.read_bytes(PATH) == THEIRS
