"""What a migration from nvidia-docker 1 and 2 removes, keeps and says: a table on facts, no machine."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from gpuprov.core.changes import FileFact, RemoveFile, WriteFile, tell_nobody
from gpuprov.engines.docker import DockerFacts
from gpuprov.engines.docker_config import edited
from gpuprov.engines.docker_unit import DAEMON_JSON
from gpuprov.engines.known import EngineFacts, RuntimeEntry
from gpuprov.engines.nvidia_docker_removal import RemoveFolder, RemoveVolume, StopPlugin
from gpuprov.facts.host import HostFacts
from gpuprov.facts.leftovers import FOLDER, UNIT, Leftovers, Volume
from gpuprov.packages import retired
from gpuprov.packages.apt_changes import RemovePackages, control_of
from gpuprov.packages.keys import armored, fingerprints, without_key
from gpuprov.plan import migration
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.plan.steps import CHANGE_KINDS, make_plan
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH
from gpuprov.toolkit import InstallRuntime
from tests.keys import key_fingerprint, key_packet
from tests.unit.refused import refused
from tests.unit.scripted import Scripted

pytestmark = pytest.mark.root
TOOLKIT = dict.fromkeys(retired.TOOLKIT, "1.13.5-1")
SECOND = {**TOOLKIT, "nvidia-container-runtime": "3.13.0-1", "nvidia-docker2": "2.13.0-1"}
ASKED = HostSpec(driver_version="550.163.01", migrate_nvidia_docker=True, toolkit_key_fingerprint=key_fingerprint(1))
OLD = "deb https://nvidia.github.io/nvidia-docker/debian10/$(ARCH) /\n"
CURRENT = "https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH) /\n"


def with_packages(facts: HostFacts, packages: dict[str, str], **left: Any) -> HostFacts:
    installed = {**facts.packages.installed, **packages}
    found = replace(facts.leftovers, **{"volumes": (), **left})
    return replace(facts, packages=replace(facts.packages, installed=installed), leftovers=found)


def keys(facts: HostFacts, spec: HostSpec = ASKED) -> list[str]:
    return [change.key for change in migration.plan(facts, spec)]


def said(facts: HostFacts, spec: HostSpec = ASKED) -> str:
    return "\n".join(map(str, migration.kept(facts, spec)))


def file(content: str | bytes) -> FileFact:
    return FileFact(content.encode() if isinstance(content, str) else content, 0o644, 0, 0)


def test_a_host_without_leftovers_is_planned_as_ever(debian: HostFacts) -> None:
    assert migration.plan(debian, ASKED) == () and said(debian) == "" and migration.note(debian, HostSpec()) == ""
    assert make_plan(debian, ASKED).changes == make_plan(debian, replace(ASKED, migrate_nvidia_docker=False)).changes


def test_all_of_nvidia_docker2_goes_and_daemon_json_stays(debian: HostFacts) -> None:
    (change,) = migration.plan(with_packages(debian, SECOND), ASKED)
    assert isinstance(change, RemovePackages)
    assert set(change.names) == set(SECOND) and change.keep == (DAEMON_JSON,)
    (change,) = migration.plan(with_packages(debian, SECOND, has_settings=True), ASKED)
    assert isinstance(change, RemovePackages) and change.keep == (DAEMON_JSON, NVIDIA_SETTINGS_PATH)


def test_by_default_nothing_is_removed_and_one_line_says_what_is_there(debian: HostFacts) -> None:
    facts = with_packages(debian, SECOND, volumes=(Volume("nvidia_driver_375.26", "local"),))
    facts = replace(facts, files={**facts.files, "/etc/apt/sources.list.d/old.list": file(OLD)})
    plain = replace(ASKED, migrate_nvidia_docker=False)
    assert migration.plan(facts, plain) == () == migration.removed_packages(facts, plain)
    (line,) = [note for note in make_plan(facts, plain).notes if "nvidia-docker" in note]
    assert "nvidia-docker2, " in line and "nvidia_driver_375.26" in line
    assert "/etc/apt/sources.list.d/old.list" in line and line.endswith("=true --check --diff")


@pytest.mark.parametrize("toolkit", ["bundled", "nvidia"])
def test_retired_repo_file_is_named(debian: HostFacts, toolkit: Literal["bundled", "nvidia"]) -> None:
    path, text = "/etc/yum.repos.d/old.repo", "[a]\nbaseurl=https://nvidia.github.io/nvidia-docker/centos7/$basearch\n"
    facts = replace(debian, files={**debian.files, path: file(text)})
    assert path in migration.note(facts, replace(ASKED, migrate_nvidia_docker=False, toolkit=toolkit))
    assert keys(facts, replace(ASKED, toolkit=toolkit)) == [f"remove {path}"]


def test_nvidias_toolkit_stays_and_the_others_go_before_it(debian: HostFacts) -> None:
    facts, spec = with_packages(debian, SECOND), replace(ASKED, toolkit="nvidia", toolkit_version="1.18.1-1")
    assert keys(facts, spec) == []
    (change,) = migration.removed_packages(facts, spec)
    assert change.key == "remove nvidia-docker2, nvidia-container-runtime"
    steps = [item.change.key for item in make_plan(facts, spec).changes]
    assert steps.index(change.key) < next(index for index, key in enumerate(steps) if key.startswith("install nvidia"))


def test_a_toolkit_of_today_is_no_leftover(debian: HostFacts) -> None:
    assert keys(with_packages(debian, dict.fromkeys(retired.TOOLKIT, "1.18.1-1"))) == []
    assert len(keys(with_packages(debian, TOOLKIT))) == 1


def test_the_hook_that_goes_with_a_package_is_replaced_in_the_same_plan(debian: HostFacts) -> None:
    facts = with_packages(debian, SECOND)
    facts = replace(facts, files={**facts.files, "/usr/bin/nvidia-container-runtime-hook": file(b"\x7fELF")})
    runtime = next(item.change for item in make_plan(facts, ASKED).changes if isinstance(item.change, InstallRuntime))
    assert "/usr/bin/nvidia-container-runtime-hook" in {path for path, _, _ in runtime.files}
    plain = replace(ASKED, migrate_nvidia_docker=False)
    runtime = next(item.change for item in make_plan(facts, plain).changes if isinstance(item.change, InstallRuntime))
    assert "/usr/bin/nvidia-container-runtime-hook" not in {path for path, _, _ in runtime.files}


# What uses the packages → what else is on the host, and what is said; "" where nothing does.
CONTAINERD = {"engines": {"containerd": EngineFacts("/usr/bin/containerd")}}
TOML, RUNTIME = "/etc/containerd/config.toml", "/usr/bin/nvidia-container-runtime"
LEGACY = f"{RUNTIME}.legacy"
USED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a container runs": ({"running": ("job",)}, {}, "job runs with it; docker stop job"),
    "containerd": ({"users": {TOML: (RUNTIME,)}}, {}, f"gpuprov_engines: [containerd], or edit {TOML}"),
    "gpuprov configures that containerd": ({"users": {TOML: (RUNTIME,)}}, CONTAINERD, ""),
    "it has another runtime besides": ({"users": {TOML: (LEGACY,)}}, CONTAINERD, f"names {LEGACY}"),
    "docker": ({"users": {f"{DAEMON_JSON}, runtime legacy": (LEGACY,)}}, {}, "runtime legacy names"),
    "a package": ({"needed_by": {"libnvidia-container1": ("site-tool",)}}, {}, "container1; apt-get purge site-tool"),
}


@pytest.mark.parametrize("name", USED)
def test_packages_that_are_used_stay_all_of_them(debian: HostFacts, name: str) -> None:
    left, more, why = USED[name]
    facts = replace(with_packages(debian, SECOND, **left), **more)
    assert len(migration.plan(facts, ASKED)) == (not why)
    assert why in said(facts) and (said(facts) == "") == (why == "")


def test_a_held_package_keeps_the_others(debian: HostFacts) -> None:
    facts = with_packages(debian, SECOND)
    facts = replace(facts, packages=replace(facts.packages, held=frozenset({"nvidia-docker2"})))
    assert migration.plan(facts, ASKED) == ()
    assert "nvidia-docker2 is held; apt-mark unhold nvidia-docker2" in said(facts)


def test_volumes_that_a_container_refers_to_keep_the_plugin(debian: HostFacts) -> None:
    volumes = (
        Volume("nvidia_driver_375.26", "nvidia-docker", ("job (Exited (0) 2 years ago)",)),
        Volume("nvidia_driver_384.111", "nvidia-docker"),
    )
    plugin = {"files": ("/usr/bin/nvidia-docker-plugin",), "unit": "active", "folder": True}
    facts = with_packages(debian, {}, volumes=volumes, **plugin)
    assert keys(facts) == ["remove volume nvidia_driver_384.111"]
    assert "volume nvidia_driver_375.26 stays: job (Exited (0) 2 years ago) refers to it" in said(facts)
    assert "nvidia-docker's plugin stays" in said(facts)
    local = with_packages(debian, {}, volumes=(replace(volumes[0], driver="local"),), **plugin)
    assert keys(local) == [f"stop and disable {UNIT}", "remove /usr/bin/nvidia-docker-plugin", f"remove {FOLDER}"]
    mounted = with_packages(debian, {}, folder_users=("job",), **plugin)
    assert keys(mounted) == [] and "docker rm job" in said(mounted)


def test_without_docker_its_packages_stay_where_it_is_installed(debian: HostFacts) -> None:
    spec = replace(ASKED, docker="none")
    facts = with_packages(debian, SECOND, dead_runtimes=("x",))
    assert keys(facts, spec) == [] and "gpuprov_docker is none" in said(facts, spec)
    assert keys(replace(facts, docker=DockerFacts()), spec)[0].startswith("remove nvidia-docker2, ")


def test_a_docker_that_does_not_run_is_asked_for_where_there_are_traces(debian: HostFacts) -> None:
    facts = replace(with_packages(debian, {}, unseen=("nvidia_driver_375.26",)), docker=DockerFacts(installed=True))

    def found(facts: HostFacts, spec: HostSpec) -> list[Problem]:
        return [one for one in refusals(source_of(facts, spec)) if "docker does not run" in one.what]

    (problem,) = found(facts, ASKED)
    assert "found: nvidia_driver_375.26" in str(problem) and "systemctl start docker" in problem.next_step
    for spec in (replace(ASKED, docker="none"), HostSpec()):
        assert found(facts, spec) == []
    assert found(replace(facts, leftovers=Leftovers()), ASKED) == []


@pytest.mark.parametrize(
    ("sources", "keyring", "gone"),
    [
        ("", "/etc/apt/trusted.gpg", True), ("", "/etc/apt/trusted.gpg.d/nvidia.gpg", True),
        ("", "/usr/share/keyrings/libnvidia-container.gpg", True), ("", "/usr/share/keyrings/site.gpg", False),
        (f"deb {CURRENT}", "/etc/apt/trusted.gpg", False),
        (f"deb [signed-by=/usr/share/keyrings/libnvidia-container.gpg] {CURRENT}", "/etc/apt/trusted.gpg", True),
        (f"deb [signed-by=/usr/share/keyrings/libnvidia-container.gpg] {CURRENT}",
         "/usr/share/keyrings/libnvidia-container.gpg", False),
        (OLD, "/etc/apt/trusted.gpg", True),
    ],
)  # fmt: skip
def test_the_key_goes_where_no_source_needs_it(sources: str, keyring: str, gone: bool) -> None:
    files = {"/etc/apt/sources.list.d/x.list": file(sources), keyring: file(key_packet(1))}
    expected = (RemoveFile(keyring, "the key of NVIDIA's retired repositories"),) if gone else ()
    assert retired.plan_keys(files, key_fingerprint(1)) == expected
    both = {**files, keyring: file(key_packet(2) + key_packet(1))}
    expected_both = (WriteFile(keyring, key_packet(2)),) if gone else ()
    assert retired.plan_keys(both, key_fingerprint(1)) == expected_both


def test_a_keyring_that_cannot_be_read_is_left_alone() -> None:
    assert retired.plan_keys({"/etc/apt/trusted.gpg": file("a keybox, or a web page")}, key_fingerprint(1)) == ()


def test_a_key_is_taken_out_of_an_armored_keyring_with_its_subkeys() -> None:
    ring = armored(key_packet(1) + key_packet(2) + key_packet(3))
    assert fingerprints(without_key(ring, key_fingerprint(2))) == (key_fingerprint(1), key_fingerprint(3))
    assert without_key(ring, key_fingerprint(9)) == ring


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("[a]\nbaseurl=https://nvidia.github.io/nvidia-docker/centos7/$basearch\n", None),
        ("[a]\nbaseurl=https://nvidia.github.io/libnvidia-container/stable/rhel7.6/$basearch\n", None),
        ("[a]\nbaseurl=https://nvidia.github.io/libnvidia-container/stable/rpm/$basearch\n", ""),
        ("[a]\nmirrorlist=https://example.org/\n", ""),
        (
            "[b]\nbaseurl=http://site.example\n\n[a]\nbaseurl=https://nvidia.github.io/nvidia-container-runtime/x\ngpgcheck=0\n",
            "[b]\nbaseurl=http://site.example\n\n",
        ),
    ],
)
def test_retired_sections_leave_a_repo_file(text: str, left: str | None) -> None:
    path = "/etc/yum.repos.d/x.repo"
    changes = retired.plan_repo_files({path: file(text), "/etc/yum.repos.d/gpuprov-x.repo": file(text)})
    if left is None:
        assert changes == (RemoveFile(path, "NVIDIA has retired this repository"),)
    else:
        assert changes == ((WriteFile(path, left.encode()),) if left else ())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"runtimes": {"nvidia": {"path": "/r", "args": []}}}', None),
        ('{"default-runtime": "old", "runtimes": {"old": {"path": "/x"}, "nvidia": {"path": "/r", "args": []}}}',
         '{"runtimes": {"nvidia": {"path": "/r", "args": []}}}'),
        # Edited in place: a name may be duplicated.
        (
            '{"debug": true, "debug": false, "default-runtime": "old", "runtimes": {"old": {"path": "/x"}, '
            '"nvidia": {"path": "/r", "args": []}}}',
            '{"debug": true, "debug": false, "runtimes": {"nvidia": {"path": "/r", "args": []}}}',
        ),
    ],
)  # fmt: skip
def test_a_dead_runtime_leaves_daemon_json(before: str, after: str | None) -> None:
    assert edited(before, RuntimeEntry(path="/r"), drop=("old",)) == after


def test_a_control_file_has_the_package_s_fields_and_none_of_dpkgs() -> None:
    status = (
        "Package: x\nStatus: install ok installed\nVersion: 1\nConffiles:\n /etc/x 0123\n /etc/y 4567 obsolete\n"
        "Description: a thing\n of two lines\n"
    )
    assert control_of(status) == "Package: x\nVersion: 1\nDescription: a thing\n of two lines\n"


# -- The changes themselves --------------------------------------------------------------------------------------------


def machine(root: Path, **answers: tuple[int, str]) -> Scripted:
    """Return a machine that answers a command with this word: an exit code, and what it prints to stderr."""
    return Scripted(root, {word: (code, "", error) for word, (code, error) in answers.items()})


@pytest.mark.parametrize(
    ("answer", "evidence"),
    [((0, ""), None), ((1, "Error: No such volume: v"), None), ((1, "Error: volume is in use - [9f]"), "is in use")],
)
def test_a_volume_goes_unless_docker_refuses(tmp_path: Path, answer: tuple[int, str], evidence: str | None) -> None:
    host, change = machine(tmp_path, docker=answer), RemoveVolume("v")
    assert (change.key, change.capture(host)) == ("remove volume v", {"name": "v"})
    assert "remove volume v " in change.summary() and "can't restore" in change.summary()
    if evidence is None:
        change.apply(host, tell_nobody)
    else:
        problem = refused(change.apply, host, tell_nobody)
        assert "volume v" in problem.what and evidence in problem.evidence
        assert problem.next_step.startswith("docker ps --all --filter volume=v;")
    assert (host.asked, host.timeouts) == ([("docker", "volume", "rm", "--", "v")], [120])
    (sentence,) = RemoveVolume.irreversible(host, change.capture(host), None, ())
    assert "volume v and its content" in sentence and RemoveVolume.undo_when_interrupted is False


@pytest.mark.parametrize(
    ("answers", "started"),
    [
        ({}, ["enable", "start"]),
        ({"is-active": (3, "")}, ["enable"]),
        ({"is-enabled": (1, "")}, ["start"]),
        ({"is-active": (3, ""), "is-enabled": (1, "")}, []),
    ],
    ids=str,
)
def test_stop_of_plugin_is_undone(tmp_path: Path, answers: dict[str, tuple[int, str]], started: list[str]) -> None:
    host, change = machine(tmp_path, **answers), StopPlugin(UNIT)
    assert change.summary() == f"stop and disable {UNIT}"
    before = change.capture(host)
    assert before == {"unit": UNIT, "active": "start" in started, "enabled": "enable" in started}
    assert host.asked == [("systemctl", verb, "--quiet", UNIT) for verb in ("is-active", "is-enabled")]
    change.apply(host, tell_nobody)
    assert (host.asked[-1], host.timeouts[-1]) == (("systemctl", "disable", "--now", UNIT), 120)
    host.asked.clear()
    StopPlugin.undo(host, before, None)
    assert [words for words in host.asked if words[0] == "systemctl" and words[1] != "list-units"] == [
        ("systemctl", "daemon-reload"), *(("systemctl", verb, UNIT) for verb in started),
    ]  # fmt: skip


def test_a_plugin_counts_as_stopped_only_if_systemd_says_so(tmp_path: Path) -> None:
    """A rollback would leave it stopped and disabled."""
    host = machine(tmp_path, **{"is-active": (1, "Failed to retrieve unit state: Connection timed out")})
    assert UNIT in refused(StopPlugin(UNIT).capture, host).what


def test_a_plugin_that_does_not_stop_is_an_error(tmp_path: Path) -> None:
    host = machine(tmp_path, disable=(1, "Failed to disable unit"))
    problem = refused(StopPlugin(UNIT).apply, host, tell_nobody)
    assert UNIT in problem.what and "Failed to disable unit" in problem.evidence
    assert problem.next_step == f"systemctl status {UNIT}"


@pytest.mark.parametrize(
    ("answers", "line", "programs"),
    [
        ({"id": (1, "")}, "x:x:998:997:a plugin:/srv/x:/bin/sh", ["id", "groupadd", "useradd"]),
        ({}, "x:x:998:997:a plugin:/srv/x:/bin/sh", ["id"]),
        ({"id": (1, "")}, "x:x:998:997:/srv/x:/bin/sh", []),
        ({"id": (1, ""), "groupadd": (9, "")}, "x:x:998:997:a plugin:/srv/x:/bin/sh", ["id", "groupadd", "useradd"]),
    ],
    ids=["gone", "there", "no line of passwd", "its group is there"],
)  # fmt: skip
def test_account_is_remade(tmp_path: Path, answers: dict[str, tuple[int, str]], line: str, programs: list[str]) -> None:
    host = machine(tmp_path, **answers)
    CHANGE_KINDS["RemoveAccount"].undo(host, {"name": "x", "line": line}, {})
    assert [words[0] for words in host.asked] == programs
    if programs[1:]:
        assert host.asked[0] == ("id", "x")
        assert host.asked[1] == ("groupadd", "--system", "--gid", "997", "x")
        assert host.asked[2] == (
            "useradd", "--system", "--no-create-home", "--uid", "998", "--gid", "997", "--comment", "a plugin",
            "--home-dir", "/srv/x", "--shell", "/bin/sh", "x",
        )  # fmt: skip
        assert host.timeouts[1:] == [120, 120]


def test_an_account_that_can_not_be_made_again_is_an_error(tmp_path: Path) -> None:
    host = machine(tmp_path, id=(1, ""), useradd=(4, "useradd: UID 998 is not unique"))
    before = {"name": "x", "line": "x:x:998:997::/:/bin/sh"}
    problem = refused(CHANGE_KINDS["RemoveAccount"].undo, host, before, {})
    assert "user x" in problem.what and "UID 998 is not unique" in problem.evidence
    assert problem.next_step == "getent passwd 998"


@pytest.mark.parametrize("kind", ["folder", "link", "nothing"])
def test_plugin_folder_comes_back_empty_and_a_link_stays(tmp_path: Path, kind: str) -> None:
    host, change = machine(tmp_path), RemoveFolder("/srv/plugin")
    host.make_directory("/srv")
    place = host.path("/srv/plugin")
    if kind == "folder":
        host.make_directory("/srv/plugin/files", 0o750)
    elif kind == "link":
        place.symlink_to("/elsewhere")
    before = change.capture(host)
    assert change.key == "remove /srv/plugin" and "remove /srv/plugin " in change.summary()
    assert before == (
        {"path": "/srv/plugin", "mode": 0o750, "uid": os.geteuid(), "gid": os.getegid()}
        if kind == "folder"
        else {"path": "/srv/plugin", "mode": None}
    )
    sentences = RemoveFolder.irreversible(host, before, None, ())
    assert any("/srv/plugin" in one for one in sentences) is (kind == "folder")
    change.apply(host, tell_nobody)
    assert (host.exists("/srv/plugin"), place.is_symlink()) == (False, kind == "link")
    for _ in range(2):
        RemoveFolder.undo(host, before, None)
    status, left = host.status("/srv/plugin"), {"folder": ("directory", 0o750), "link": ("link", 0o777)}
    assert (status and (status.kind, status.mode)) == left.get(kind)
    owner = f"{os.geteuid()}:{os.getegid()}"
    assert host.asked == ([("chown", owner, "/srv/plugin")] if kind == "folder" else [])


@pytest.mark.parametrize(
    ("mounted", "step"),
    [
        (("/srv/plugin",), "umount /srv/plugin;"),
        (("/srv/plugin/a", "/srv/plugin/a/b\\040c"), "umount '/srv/plugin/a/b c' /srv/plugin/a;"),
        (("/srv/plugins", "/srv", "/"), ""),
    ],
    ids=["itself", "below", "beside"],
)  # fmt: skip
def test_what_is_mounted_in_a_folder_is_unmounted_first(tmp_path: Path, mounted: tuple[str, ...], step: str) -> None:
    host = machine(tmp_path)
    host.make_directory("/srv/plugin/a")
    host.write("/srv/plugin/a/file", b"another file system's")
    host.make_directory("/proc/self")
    rows = (f"36 35 98:0 / {place} rw - ext4 /dev/sda rw\n" for place in mounted)
    host.write("/proc/self/mountinfo", "".join(("36 35 98:0 /\n", *rows)).encode())
    if step:
        problem = refused(RemoveFolder("/srv/plugin").apply, host, tell_nobody)
        assert "/srv/plugin is not removed" in problem.what and problem.next_step.startswith(step)
        assert problem.evidence == "mounted: " + ", ".join(mounted).replace("\\040", " ")
    else:
        RemoveFolder("/srv/plugin").apply(host, tell_nobody)
    assert host.exists("/srv/plugin/a/file") is bool(step)
    assert bool(step) or not host.exists("/srv/plugin")
