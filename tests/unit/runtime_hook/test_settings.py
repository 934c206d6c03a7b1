"""The runtime's settings: NVIDIA's names and defaults, our own file over NVIDIA's; a mistake is named."""

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.runtime_hook import driver_files, settings
from gpuprov.runtime_hook.settings import Settings, read_settings
from tests.deployed import Deployed, deploy_below
from tests.files import put

DEFAULTS = {
    "accept_envvar_when_unprivileged": True, "accept_volume_mounts": False, "disable_require": False,
    "supported_capabilities": driver_files.ALL, "swarm_resources": [], "debug": "", "log_level": "info",
    "runtimes": ("runc", "crun"), "mode": "auto", "spec_dirs": ("/etc/cdi", "/var/run/cdi"),
    "default_kind": "nvidia.com/gpu", "annotation_prefixes": ("cdi.k8s.io/",), "cuda_compat": True,
    "ignore_imex": False, "additional_gids": True,
}  # fmt: skip
RUNTIME = "[nvidia-container-runtime]\n"
CDI = "[nvidia-container-runtime.modes.cdi]\n"


def read(folder: Path, own: str | None = None, nvidia: str | None = None) -> tuple[Settings, str]:
    paths = []
    for name, text in (("own.toml", own), ("config.toml", nvidia)):
        if text is not None:
            (folder / name).write_text(text, errors="surrogateescape")
        paths.append(str(folder / name))
    return read_settings(*paths)


def values(settings: Settings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in DEFAULTS}


def test_without_a_file_nvidias_defaults_hold(tmp_path: Path) -> None:
    settings, trouble = read(tmp_path)
    assert (values(settings), trouble) == (DEFAULTS, "")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("disable-require = true", "disable_require", True),
        ("swarm-resource = ' A ,, B'", "swarm_resources", ["A", "B"]),
        ("accept-nvidia-visible-devices-envvar-when-unprivileged = false", "accept_envvar_when_unprivileged", False),
        ("accept-nvidia-visible-devices-as-volume-mounts = true", "accept_volume_mounts", True),
        (
            "supported-driver-capabilities = 'utility, compute,compute,'",
            "supported_capabilities",
            ("compute", "utility"),
        ),
        ("supported-driver-capabilities = 'video,all'", "supported_capabilities", driver_files.ALL),
        ("supported-driver-capabilities = ''", "supported_capabilities", ()),
        (RUNTIME + "debug = '/var/log/x.log'", "debug", "/var/log/x.log"),
        (RUNTIME + "debug = '/dev/null'", "debug", ""),
        (RUNTIME + "debug = 'journal'", "debug", "journal"),
        (RUNTIME + "log-level = 'error'", "log_level", "error"),
        (RUNTIME + "log-level = 'WARN'", "log_level", "warning"),
        (RUNTIME + "log-level = 'trace'", "log_level", "debug"),
        (RUNTIME + "log-level = 'fatal'", "log_level", "error"),
        (RUNTIME + "log-level = 'panic'", "log_level", "error"),
        (RUNTIME + "runtimes = ['crun', '/opt/runc']", "runtimes", ("crun", "/opt/runc")),
        (RUNTIME + "mode = 'legacy'", "mode", "legacy"),
        (CDI + "spec-dirs = ['/a']", "spec_dirs", ("/a",)),
        (CDI + "default-kind = 'example.com/gpu'", "default_kind", "example.com/gpu"),
        (CDI + "annotation-prefixes = []", "annotation_prefixes", ()),
        ("[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = 'disabled'", "cuda_compat", False),
        ("[features]\ndisable-cuda-compat-lib-hook = true", "cuda_compat", False),
        ("[features]\nignore-imex-channel-requests = true", "ignore_imex", True),
        ("[features]\nno-additional-gids-for-device-nodes = true", "additional_gids", False),
    ],
)
def test_every_key_is_heard_in_either_file(tmp_path: Path, text: str, name: str, value: object) -> None:
    for files in ({"own": text}, {"nvidia": text}):
        for path in tmp_path.iterdir():
            path.unlink()
        settings, trouble = read(tmp_path, **files)
        assert trouble == ""
        assert values(settings) == {**DEFAULTS, name: value}


def test_each_key_of_our_own_file_stands_over_nvidias(tmp_path: Path) -> None:
    nvidia = "disable-require = true\nswarm-resource = 'A'\n" + RUNTIME + "debug = '/a'"
    settings, trouble = read(tmp_path, "swarm-resource = 'B'", nvidia)
    assert (trouble, settings.disable_require, settings.swarm_resources, settings.debug) == ("", True, ["B"], "/a")


def test_nvidias_own_default_file_is_understood(tmp_path: Path) -> None:
    text = """#accept-nvidia-visible-devices-as-volume-mounts = false
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
environment = []
ldconfig = "@/sbin/ldconfig.real"
load-kmods = true

[nvidia-container-runtime]
log-level = "info"
mode = "auto"
runtimes = ["runc", "crun"]

[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]

[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"

[nvidia-container-runtime-hook]
skip-mode-detection = false

[nvidia-ctk]
path = "nvidia-ctk"
"""
    settings, trouble = read(tmp_path, nvidia=text)
    assert (values(settings), trouble) == (DEFAULTS, "")
    assert read(tmp_path, own=text)[1] == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("disable-require = 'yes'", "disable-require must be true or false"),
        ("disable-require = 1", "disable-require must be true or false"),
        ("swarm-resource = ['A']", "swarm-resource must be text"),
        ("supported-driver-capabilities = 'compute,magic'", "there is no driver capability 'magic'"),
        (RUNTIME + "runtimes = []", "runtimes must be a list of texts"),
        (RUNTIME + "runtimes = 'runc'", "runtimes must be a list of texts"),
        (RUNTIME + "runtimes = [1]", "runtimes must be a list of texts"),
        (RUNTIME + "mode = 'csv'", "mode 'csv' is for Tegra"),
        (RUNTIME + "mode = ''", "mode '' is unknown: use one of auto"),
        (RUNTIME + "log-level = 3", "log-level must be text"),
        ("[disable-require]\nx = 1", "disable-require must be true or false"),
        ("[nvidia-container-runtime.debug]", "debug must be text"),
        ("nvidia-container-runtime = 5", "nvidia-container-runtime must be a table"),
        ("[nvidia-container-runtime]\nmodes = 'cdi'", "modes must be a table"),
        ("{", "can't be read: line 1"),
        ("a = 1\nb", "can't be read: line 2"),
        ("\udcff", "can't be read"),
    ],
)
def test_a_mistake_is_named_by_file_and_key_in_either_file(tmp_path: Path, text: str, says: str) -> None:
    for files, name in (({"nvidia": text}, "config.toml"), ({"own": text, "nvidia": ""}, "own.toml")):
        settings, trouble = read(tmp_path, **files)
        assert str(tmp_path / name) in trouble and says in trouble
        assert "\n" not in trouble
        assert values(settings) == DEFAULTS


@pytest.mark.parametrize("text", ["typo = 1", "[nvidia-container-runtime]\ntypo = 1", "[typo]\na = 1"])
def test_an_unknown_key_is_a_typing_error_in_ours_and_a_newer_versions_in_nvidias(tmp_path: Path, text: str) -> None:
    assert "there is no key" in read(tmp_path, own=text)[1]
    (tmp_path / "own.toml").unlink()
    assert read(tmp_path, nvidia=text)[1] == ""


def test_a_log_level_that_nobody_knows_is_a_typing_error_in_ours_and_info_in_nvidias(tmp_path: Path) -> None:
    text = RUNTIME + "log-level = 'loud'"
    settings, trouble = read(tmp_path, nvidia=text)
    assert (settings.log_level, trouble) == ("info", "")
    assert "log-level 'loud' is unknown: use one of trace, debug" in read(tmp_path, own=text)[1]


def test_a_file_that_is_a_folder_is_trouble(tmp_path: Path) -> None:
    (tmp_path / "own.toml").mkdir()
    assert read(tmp_path)[1].endswith("own.toml can't be read: Is a directory")


@given(st.text())
def test_no_text_raises(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("settings")
    (folder / "own.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    _, trouble = read_settings(str(folder / "own.toml"), str(folder / "none"))
    assert isinstance(trouble, str)


# -- which low-level runtime does the work, and how the launcher gets to know it --------------------------------------


def program(path: Path) -> str:
    put(path, "#!/bin/sh\n", 0o755)
    return str(path)


def test_the_first_that_is_there_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "FOLDERS", (str(tmp_path / "a"), str(tmp_path / "b")))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    second, other = program(tmp_path / "b/second"), program(tmp_path / "other")
    (tmp_path / "a/second").write_text("no program")
    assert settings.find_low_level(("first", "second")) == second
    assert settings.find_low_level((other, "second")) == other
    assert settings.find_low_level((f"{tmp_path}/none", "second")) == second
    assert settings.find_low_level(("first",)) == ""


def test_the_answer_is_a_shells_word_whatever_the_path(tmp_path: Path) -> None:
    runtime = program(tmp_path / "run'c $(touch x)")
    own = tmp_path / "own.toml"
    own.write_text(f'[nvidia-container-runtime]\nruntimes = ["{runtime}"]\n')
    settings.keep_low_level("", str(tmp_path / "run/low-level"), str(own))
    told = subprocess.run(
        ("sh", "-c", '. "$1"; printf %s "$low_level"', "sh", tmp_path / "run/low-level"), capture_output=True,
        text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert told.stdout == runtime
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["low-level"]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("configured", [True, False])
def test_where_none_is_installed_the_engine_is_told(tmp_path: Path, configured: bool) -> None:
    deployed = deploy_below(tmp_path, str(tmp_path / "absent/runc"))
    log = tmp_path / "log.json"
    if configured:
        deployed.settings.write_text('[nvidia-container-runtime]\nruntimes = ["crun-of-nobody"]\n')
    done = call(deployed, "--log", str(log), "--log-format", "json", "create", "id")
    says = "none of the low-level runtimes crun-of-nobody is" if configured else "neither runc nor crun is installed"
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"gpuprov: {says}")
    entry = json.loads(log.read_text())
    assert (entry["level"], entry["msg"]) == ("error", done.stderr.strip())
    assert not (tmp_path / "run").exists()


@pytest.fixture
def deployed(tmp_path: Path) -> Deployed:
    """A runtime over two low-level ones, which say which they are."""
    made = deploy_below(tmp_path)
    for name in ("first", "second"):
        put(tmp_path / name, f"#!/bin/sh\necho {name}\n", 0o755)
    made.settings.write_text(f'[nvidia-container-runtime]\nruntimes = ["{tmp_path}/first", "{tmp_path}/second"]\n')
    return made


def call(deployed: Deployed, *words: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    return subprocess.run((deployed.runtime, *words), capture_output=True, text=True, check=False, umask=umask)


def test_one_that_is_gone_since_gives_way_to_the_next(deployed: Deployed, tmp_path: Path) -> None:
    """Docker's own packages bring runc to another folder than the distribution's."""
    assert [call(deployed, "state").stdout for _ in range(2)] == ["first\n", "first\n"]
    (tmp_path / "first").unlink()
    assert [call(deployed, "state").stdout for _ in range(2)] == ["second\n", "second\n"]
    (tmp_path / "second").unlink()
    done = call(deployed, "state")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "is installed" in done.stderr


@pytest.mark.parametrize("place", ["run", "run/low-level/x"])
def test_containers_start_if_the_answer_cannot_be_kept(deployed: Deployed, tmp_path: Path, place: str) -> None:
    put(tmp_path / place, "in the way")
    before = sorted(tmp_path.glob("run*"))
    done = call(deployed, "state")
    assert (done.returncode, done.stdout, done.stderr) == (0, "first\n", "")
    assert sorted(tmp_path.glob("run*")) == before


def test_nobody_but_root_may_write_what_a_shell_of_roots_reads(deployed: Deployed, tmp_path: Path) -> None:
    assert call(deployed, "state", umask=0).stdout == "first\n"
    assert (tmp_path / "run/low-level").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("slash", ["/", "\\/"])
def test_an_annotation_is_heard_however_its_slash_is_written(deployed: Deployed, tmp_path: Path, slash: str) -> None:
    text = '{"annotations": {"cdi.k8s.io/x": "vendor.com/class=0"}}'
    (tmp_path / "config.json").write_text(text.replace("/", slash))
    assert call(deployed, "create", "--bundle", str(tmp_path), "id").returncode == 1


@pytest.mark.parametrize(
    "setting",
    ["modes.cdi.annotation-prefixes = ['example.com/']", "'modes'.cdi.\"annotation-prefixes\" = ['example.com/']"],
)
def test_own_prefix_counts_however_its_key_is_written(deployed: Deployed, tmp_path: Path, setting: str) -> None:
    with deployed.settings.open("a") as file:
        file.write(f"{setting}\n")
    (tmp_path / "config.json").write_text('{"annotations": {"example.com/x": "vendor.com/class=0"}}')
    done = call(deployed, "create", "--bundle", str(tmp_path), "id")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no CDI specification of vendor.com/class" in done.stderr
