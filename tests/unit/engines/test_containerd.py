"""containerd's tables by version, what a runtime copies, and which file it goes into."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomllib

from gpuprov.core.system import System
from gpuprov.engines import containerd, toml
from gpuprov.engines.configure import configuration, write
from gpuprov.engines.known import Configuration, ConfigureRequest, RuntimeEntry
from gpuprov.protocol.errors import GpuprovError
from tests.files import put

OLD = "#!/bin/sh\necho 'containerd github.com/containerd/containerd v1.7.24 abc'\n"
NEW = "#!/bin/sh\necho 'containerd github.com/containerd/containerd/v2 2.1.9+unknown '\n"
RUNTIME = RuntimeEntry("nvidia", "/usr/bin/x")


@pytest.mark.parametrize(
    ("text", "version"),
    [("", 7), ("# a note\n", 7), ("oom_score = 1\n", 1), ("version = 1\n", 1), ("version = 2\n", 2),
     ("version = 3\n", 3), ("version = 4\n", 3)],
)  # fmt: skip
def test_version(text: str, version: int) -> None:
    assert containerd.version_of(tomllib.loads(text), 7) == version


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3", 2),
        ("containerd github.com/containerd/containerd v1.7.27 05044ec0a9a7", 2),
        ("containerd containerd.io 2.2.0 1c4457e00facac03ce1d75f7b6777a7a851e5c41", 3),
        ("containerd github.com/containerd/containerd/v2 v2.0.5 fb4c30d4ede3", 3),
        ("containerd github.com/k3s-io/containerd v2.1.4-k3s1 ", 3),
        ("", 2),
    ],
)
def test_version_to_begin_with(said: str, version: int) -> None:
    assert containerd.version_from_program(said) == version


RUNC = {"runtime_type": "io.containerd.runc.v2", "options": {"SystemdCgroup": True}, "base_runtime_spec": "/b.json"}
CRUN = {"runtime_type": "io.containerd.runc.v2", "options": {"BinaryName": "/usr/bin/crun"}}


@pytest.mark.parametrize(
    ("source", "copied"),
    [
        ({"runtimes": {"runc": RUNC, "crun": CRUN}}, RUNC),
        ({"default_runtime_name": "crun", "runtimes": {"runc": RUNC, "crun": CRUN}}, CRUN),
        ({"default_runtime_name": "nvidia", "runtimes": {"runc": RUNC, "nvidia": CRUN}}, RUNC),
        ({"default_runtime_name": "nvidia-cdi", "runtimes": {"crun": CRUN, "nvidia-cdi": {}}}, CRUN),
        ({"default_runtime_name": "${RUNTIME}", "runtimes": {"runc": RUNC}}, RUNC),
        ({}, {"runtime_type": "io.containerd.runc.v2", "privileged_without_host_devices": False}),
    ],
)
def test_runtime_copies_the_default_one(source: dict[str, Any], copied: dict[str, Any]) -> None:
    assert containerd.runtime_like_default({"containerd": source}) == copied


@pytest.mark.parametrize(
    ("version", "plugin"), [(1, "cri"), (2, "io.containerd.grpc.v1.cri"), (3, "io.containerd.cri.v1.runtime")]
)
def test_tables_of_each_version(version: int, plugin: str) -> None:
    entry = RuntimeEntry("nvidia", "/x", set_default=True, cdi=True)
    text = toml.with_values(
        None, containerd.runtime_values({}, version, entry, {"containerd": {"runtimes": {"runc": RUNC}}}), ""
    )
    found = tomllib.loads(text)["plugins"][plugin]
    options = {"SystemdCgroup": True, "BinaryName": "/x", **({"Runtime": "/x"} if version == 1 else {})}
    assert found == {
        "enable_cdi": True,
        "containerd": {"default_runtime_name": "nvidia", "runtimes": {"nvidia": {**RUNC, "options": options}}},
    }


@pytest.mark.parametrize(
    ("imports", "taken_in"),
    [
        (["/etc/containerd/conf.d/*.toml"], True),
        (["/etc/containerd/conf.d/99-nvidia.toml"], True),
        (["conf.d/*.toml"], True),
        (["/etc/containerd/other.d/*.toml"], False),
        (["/etc/containerd/conf.d/10-*.toml"], False),
        (["/etc/containerd/*.d/*.toml"], True),
        (["/etc/containerd/*.toml"], False),
        ([], False),
    ],
)
def test_import_that_is_there_is_seen(imports: list[str], taken_in: bool) -> None:
    assert containerd.is_imported({"imports": imports}, containerd.MAIN, containerd.DROP_IN) is taken_in


# -- which file ------------------------------------------------------------------------------------------------------

CRI_2 = '[plugins."io.containerd.grpc.v1.cri"]\nsandbox_image = "mine"\n'


def host(tmp_path: Path, files: dict[str, str], program: str) -> tuple[System, str]:
    for name, text in files.items():
        put(tmp_path / "root" / name.lstrip("/"), text)
    (tmp_path / "root").mkdir(exist_ok=True)
    put(tmp_path / "containerd", program, 0o755)
    return System(str(tmp_path / "root")), str(tmp_path / "containerd")


def changed(found: Configuration) -> list[str]:
    return [edit.path for edit in found.edits if edit.changes]


def configured(system: System, engine: str, runtime: RuntimeEntry = RUNTIME, **options: Any) -> Configuration:
    """Do what a call does; return it."""
    found = configuration(system, ConfigureRequest(engine, runtime, **options))
    write(system, found.edits)
    return found


MAIN, DROP_IN = containerd.MAIN, containerd.DROP_IN


@pytest.mark.parametrize(
    ("files", "program", "drop_in", "edited"),
    [
        # Nothing of the plugin's table is anywhere: a drop-in hides nothing.
        ({}, OLD, None, [DROP_IN, MAIN]),
        ({MAIN: "version = 2\n"}, OLD, None, [DROP_IN, MAIN]),
        ({MAIN: 'version = 2\nimports = ["conf.d/*.toml"]\n'}, OLD, None, [DROP_IN]),
        # containerd 1.x would take the drop-in's table and forget the main file's.
        ({MAIN: "version = 2\n" + CRI_2}, OLD, None, [MAIN]),
        ({MAIN: "version = 2\n" + CRI_2}, OLD, DROP_IN, [DROP_IN, MAIN]),
        ({MAIN: "version = 2\n" + CRI_2}, NEW, None, [DROP_IN, MAIN]),
        # Of several, the last decides.
        ({MAIN: 'version = 2\nimports = ["/etc/x/*.toml"]\n' + CRI_2, "/etc/x/1.toml": CRI_2, "/etc/x/2.toml": CRI_2,
          "/etc/x/3.toml": "oom_score = 1\n"}, OLD, None, ["/etc/x/2.toml"]),
        ({MAIN: "version = 3\n"}, NEW, None, [DROP_IN, MAIN]),
        ({MAIN: "version = 2\n"}, OLD, "", [MAIN]),
        ({MAIN: "oom_score = 1\n"}, OLD, None, [MAIN]),
        ({MAIN: "oom_score = 1\n"}, OLD, DROP_IN, [MAIN]),
    ],
)  # fmt: skip
def test_file_that_takes_the_runtime(
    tmp_path: Path, files: dict[str, str], program: str, drop_in: str | None, edited: list[str]
) -> None:
    system, executable = host(tmp_path, files, program)
    assert changed(configured(system, "containerd", drop_in=drop_in, executable=executable)) == edited
    assert changed(configured(system, "containerd", drop_in=drop_in, executable=executable)) == []
    configured(system, "containerd", drop_in=drop_in, executable=executable, unset=True)
    assert {name: system.read_text(name) for name in files} == files
    for name in (MAIN, DROP_IN):
        assert system.exists(name) is (name in files)


@pytest.mark.parametrize("later", [MAIN, "/etc/containerd/conf.d/20-site.toml"])
def test_an_own_drop_in_does_not_hide_the_table_that_somebody_writes_later(tmp_path: Path, later: str) -> None:
    """containerd 1.x takes the last table alone: sandbox image and SystemdCgroup were lost."""
    system, executable = host(tmp_path, {MAIN: 'version = 2\nimports = ["conf.d/*.toml"]\n'}, OLD)
    assert changed(configured(system, "containerd", executable=executable)) == [DROP_IN]
    head = "" if later != MAIN else 'version = 2\nimports = ["conf.d/*.toml"]\n'
    system.write(later, f"{head}{CRI_2}".encode())
    assert changed(configured(system, "containerd", executable=executable)) == [later, DROP_IN]
    assert not system.exists(DROP_IN) and "gpuprov" in str(system.read_text(later))
    assert changed(configured(system, "containerd", executable=executable)) == []


def test_import_stays_for_those_who_came_to_need_it(tmp_path: Path) -> None:
    system, executable = host(tmp_path, {MAIN: "version = 3\n"}, NEW)
    configured(system, "containerd", executable=executable)
    system.write("/etc/containerd/conf.d/50-site.toml", b"oom_score = 1\n")
    undone = configured(system, "containerd", executable=executable, unset=True)
    assert not system.exists(DROP_IN)
    assert "imports" in str(system.read_text(MAIN))
    assert "50-site.toml needs it" in undone.notes[0]


def test_files_that_the_import_wakes_are_told(tmp_path: Path) -> None:
    sleeping = "/etc/containerd/conf.d/10-old.toml"
    system, executable = host(tmp_path, {MAIN: "version = 3\n", sleeping: "oom_score = 1\n"}, NEW)
    assert sleeping in configured(system, "containerd", executable=executable).notes[0]
    assert configured(system, "containerd", executable=executable).notes == ()


def test_two_runtimes_live_side_by_side(tmp_path: Path) -> None:
    system, executable = host(tmp_path, {MAIN: "version = 2\n" + CRI_2}, OLD)
    for name in ("nvidia", "nvidia-cdi"):
        configured(system, "containerd", RuntimeEntry(name, f"/usr/bin/{name}"), executable=executable)
    found = tomllib.loads(str(system.read_text(MAIN)))["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]
    assert {name: entry.get("options", {}).get("BinaryName") for name, entry in found.items()} == {
        "runc": None, "nvidia": "/usr/bin/nvidia", "nvidia-cdi": "/usr/bin/nvidia-cdi",
    }  # fmt: skip


def test_runtime_of_another_tool_keeps_its_keys_and_comes_back(tmp_path: Path) -> None:
    table = 'plugins."io.containerd.grpc.v1.cri".containerd.runtimes'
    entry = f"[{table}.nvidia]\nkept = 1\n[{table}.nvidia.options]\nBinaryName = '/old'\n"
    text = f"version = 2\n[{table}.runc]\nx = 1\n{entry}"
    system, executable = host(tmp_path, {MAIN: text}, OLD)
    configured(system, "containerd", executable=executable)
    found = tomllib.loads(str(system.read_text(MAIN)))["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]
    assert found["nvidia"] == {"kept": 1, "options": {"BinaryName": "/usr/bin/x"}}
    configured(system, "containerd", executable=executable, unset=True)
    assert system.read_text(MAIN) == text


def test_version_3_is_refused_where_containerd_does_not_know_it(tmp_path: Path) -> None:
    """containerd 1.7.24: `unsupported config version 3`; 1.6.20 starts and reads no table of CRI's in it."""
    system, executable = host(tmp_path, {MAIN: "version = 3\n"}, OLD)
    with pytest.raises(GpuprovError, match="is of version 3, which containerd knows"):
        configured(system, "containerd", executable=executable)


def test_disabled_cri_is_told(tmp_path: Path) -> None:
    system, executable = host(tmp_path, {MAIN: 'version = 2\ndisabled_plugins = ["cri"]\n'}, OLD)
    (note,) = configured(system, "containerd", executable=executable).notes
    assert "disabled_plugins" in note


# -- k3s, RKE2, microk8s ---------------------------------------------------------------------------------------------

K3S = "/var/lib/rancher/k3s/agent/etc/containerd"
RKE2 = "/var/lib/rancher/rke2/agent/etc/containerd"
CRI_3 = "plugins.'io.containerd.cri.v1.runtime'"
RENDERED_3 = f"""\
# File generated by k3s. DO NOT EDIT. Use config-v3.toml.tmpl instead.
version = 3
{{imports}}
[{CRI_3}]
  enable_selinux = false
[{CRI_3}.containerd]
  snapshotter = "overlayfs"
[{CRI_3}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[{CRI_3}.containerd.runtimes.runc.options]
  SystemdCgroup = true
"""
OLD_K3S = RENDERED_3.replace("{imports}", "")
NEW_K3S = RENDERED_3.replace("{imports}", f"imports = ['{K3S}/config-v3.toml.d/*.toml']")
NEW_RKE2 = NEW_K3S.replace("/k3s/", "/rke2/")
OWN_NVIDIA = f"""[{CRI_3}.containerd.runtimes."nvidia"]
  runtime_type = "io.containerd.runc.v2"
[{CRI_3}.containerd.runtimes."nvidia".options]
  BinaryName = "/usr/bin/nvidia-container-runtime"
"""


def rendered(template: str, base: str) -> dict[str, Any]:
    """Do as k3s does: put its base into the template."""
    return tomllib.loads(template.replace('{{ template "base" . }}', base))


@pytest.mark.parametrize(("engine", "folder", "base"), [("k3s", K3S, NEW_K3S), ("rke2", RKE2, NEW_RKE2)])
def test_rancher_that_imports_a_folder_gets_a_drop_in(tmp_path: Path, engine: str, folder: str, base: str) -> None:
    system, _ = host(tmp_path, {f"{folder}/config.toml": base + OWN_NVIDIA}, NEW)
    found = configured(system, engine, RuntimeEntry("nvidia", "/usr/bin/x", set_default=True, cdi=True))
    (edit,) = found.edits
    assert edit.path == f"{folder}/config-v3.toml.d/99-nvidia.toml"
    plugin = tomllib.loads((edit.after or b"").decode())["plugins"]["io.containerd.cri.v1.runtime"]
    assert plugin["containerd"]["default_runtime_name"] == "nvidia"
    assert plugin["containerd"]["runtimes"]["nvidia"]["options"] == {"SystemdCgroup": True, "BinaryName": "/usr/bin/x"}
    assert engine in found.reload_command
    undone = configured(system, engine, unset=True)
    assert [(one.path, one.after) for one in undone.edits] == [(edit.path, None)]


def test_older_k3s_gets_a_template_on_its_base(tmp_path: Path) -> None:
    system, _ = host(tmp_path, {f"{K3S}/config.toml": OLD_K3S}, NEW)
    (edit,) = configured(system, "k3s").edits
    assert edit.path == f"{K3S}/config-v3.toml.tmpl"
    template = (edit.after or b"").decode()
    runtimes = rendered(template, OLD_K3S)["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]
    assert runtimes["nvidia"]["options"] == {"SystemdCgroup": True, "BinaryName": "/usr/bin/x"}
    # k3s has started with it since.
    system.write(f"{K3S}/config.toml", template.replace('{{ template "base" . }}', OLD_K3S).encode())
    assert changed(configured(system, "k3s")) == []
    undone = configured(system, "k3s", unset=True)
    assert [(one.path, one.after) for one in undone.edits] == [(edit.path, None)]


def test_template_of_the_users_own_is_extended_and_comes_back(tmp_path: Path) -> None:
    own = '{{ template "base" . }}\n\n# mine\n[metrics]\n  address = "127.0.0.1:1"\n{{ if .X }}\n{{ end }}\n'
    system, _ = host(tmp_path, {f"{K3S}/config.toml": OLD_K3S, f"{K3S}/config-v3.toml.tmpl": own}, NEW)
    configured(system, "k3s")
    assert str(system.read_text(f"{K3S}/config-v3.toml.tmpl")).startswith(own)
    configured(system, "k3s", unset=True)
    assert system.read_text(f"{K3S}/config-v3.toml.tmpl") == own


def test_complete_template_may_take_default_and_cdi(tmp_path: Path) -> None:
    own = OLD_K3S.replace("SystemdCgroup = true", "SystemdCgroup = {{ .SystemdCgroup }}").replace(
        'snapshotter = "overlayfs"', 'snapshotter = "overlayfs"\n  default_runtime_name = "runc" # as it was'
    )
    system, _ = host(tmp_path, {f"{K3S}/config.toml": OLD_K3S, f"{K3S}/config-v3.toml.tmpl": own}, NEW)
    entry = RuntimeEntry("nvidia", "/usr/bin/x", set_default=True, cdi=True)
    configured(system, "k3s", entry)
    text = str(system.read_text(f"{K3S}/config-v3.toml.tmpl"))
    assert "  SystemdCgroup = {{ .SystemdCgroup }}\n" in text
    plugin = tomllib.loads(text.replace("{{ .SystemdCgroup }}", "true"))["plugins"]["io.containerd.cri.v1.runtime"]
    assert plugin["containerd"]["default_runtime_name"] == "nvidia"
    assert plugin["enable_cdi"] is True
    configured(system, "k3s", entry, unset=True)
    assert system.read_text(f"{K3S}/config-v3.toml.tmpl") == own


def test_runtime_that_k3s_adds_itself_is_left_to_it(tmp_path: Path) -> None:
    system, _ = host(tmp_path, {f"{K3S}/config.toml": OLD_K3S + OWN_NVIDIA}, NEW)
    found = configured(system, "k3s", RuntimeEntry())
    assert found.edits == () and "by itself" in found.notes[0]
    with pytest.raises(GpuprovError, match="itself adds a runtime nvidia"):
        configured(system, "k3s")
    configured(system, "k3s", RuntimeEntry("gpu", "/usr/bin/x"))
    template = str(system.read_text(f"{K3S}/config-v3.toml.tmpl"))
    assert set(
        rendered(template, OLD_K3S + OWN_NVIDIA)["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]
    ) == {"runc", "nvidia", "gpu"}


def test_runtime_that_k3s_will_add_at_its_next_start_is_left_to_it(tmp_path: Path) -> None:
    """NVIDIA's runtime came, or is to come, after k3s has started. The same table twice would end containerd."""
    system, _ = host(tmp_path, {f"{K3S}/config.toml": OLD_K3S}, NEW)
    configured(system, "k3s")
    template = f"{K3S}/config-v3.toml.tmpl"
    assert system.exists(template)
    found = configured(system, "k3s", RuntimeEntry())
    assert [(edit.path, edit.after) for edit in found.edits] == [(template, None)]
    assert configured(system, "k3s", RuntimeEntry()).edits == ()
    system.make_directory("/usr/bin")
    system.write("/usr/bin/nvidia-container-runtime", b"")
    with pytest.raises(GpuprovError, match="itself adds a runtime nvidia"):
        configured(system, "k3s")


def test_default_of_k3s_is_its_own_setting_and_needs_no_more_once_it_is_made(tmp_path: Path) -> None:
    rendered_default = OLD_K3S.replace('"overlayfs"', '"overlayfs"\n  default_runtime_name = "nvidia"')
    system, _ = host(tmp_path, {f"{K3S}/config.toml": rendered_default}, NEW)
    (edit,) = configured(system, "k3s", RuntimeEntry("nvidia", "/usr/bin/x", set_default=True)).edits
    assert b"default_runtime_name" not in (edit.after or b"") and b"/usr/bin/x" in (edit.after or b"")


@pytest.mark.parametrize(
    ("files", "call", "says"),
    [
        ({}, ConfigureRequest("k3s", RUNTIME), "has not written"),
        ({f"{K3S}/config.toml": OLD_K3S}, ConfigureRequest("k3s", RuntimeEntry(set_default=True)), "k3s's own setting"),
        ({f"{K3S}/config.toml": OLD_K3S}, ConfigureRequest("containerd", config=f"{K3S}/config.toml"), "written by"),
        ({MAIN: "oom_score = 1\n"}, ConfigureRequest("containerd"), "version 1"),
        ({}, ConfigureRequest("microk8s"), "there is no microk8s here"),
    ],
)
def test_what_would_break_is_refused(tmp_path: Path, files: dict[str, str], call: ConfigureRequest, says: str) -> None:
    system, executable = host(tmp_path, files, NEW)
    with pytest.raises(GpuprovError, match=says):
        configuration(system, replace(call, executable=executable))


def test_microk8s_template_is_edited_in_place(tmp_path: Path) -> None:
    path = "/var/snap/microk8s/current/args/containerd-template.toml"
    table = 'plugins."io.containerd.grpc.v1.cri".containerd'
    text = (
        f'version = 2\n[{table}]\nsnapshotter = "${{SNAPSHOTTER}}"\ndefault_runtime_name = "${{RUNTIME}}"\n'
        f'[{table}.runtimes.runc]\nruntime_type = "${{RUNTIME_TYPE}}"\n'
    )
    system, _ = host(tmp_path, {path: text}, NEW)
    found = configured(system, "microk8s")
    assert changed(found) == [path] and found.reload_command.startswith("snap restart")
    plugin = tomllib.loads(str(system.read_text(path)))["plugins"]["io.containerd.grpc.v1.cri"]
    assert plugin["containerd"]["runtimes"]["nvidia"] == {
        "runtime_type": "${RUNTIME_TYPE}",
        "options": {"BinaryName": "/usr/bin/x"},
    }
    configured(system, "microk8s", unset=True)
    assert system.read_text(path) == text
