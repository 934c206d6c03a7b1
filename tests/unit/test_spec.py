"""What users may write: good values, and every kind of bad one with the sentence it gets."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import gpuprov
from gpuprov.agent.result import HostResult
from gpuprov.cli import reference
from gpuprov.cli.main import cli
from gpuprov.fleet.history import Run, save
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.events import ChosenDriver
from gpuprov.protocol.spec import GENERATIONS, HostSpec, option_names, parse_spec, spec_from_variables, spec_to_json
from gpuprov.protocol.tables import packaged
from tests.unit.refused import refused

REPOSITORY = {
    "name": "site", "uri": "http://mirror/apt", "key_url": "http://mirror/key.asc", "key_fingerprint": "A" * 40,
}  # fmt: skip


def test_defaults_are_valid_and_survive_the_wire() -> None:
    assert parse_spec({}) == HostSpec()
    spec = parse_spec({"driver_version": "550.163.01", "repositories": [REPOSITORY], "packages": ["jq", "gcc-12=12.2"]})
    assert parse_spec(spec_to_json(spec)) == spec and spec.image_nvswitch is None
    assert parse_spec({"image_nvswitch": "false"}).image_nvswitch is False


@pytest.mark.parametrize("value", [True, "true", "yes", "True"])
def test_booleans_as_yaml_and_extra_vars_write_them(value: object) -> None:
    assert parse_spec({"docker_default_runtime": value}).docker_default_runtime is True


@pytest.mark.parametrize(
    ("values", "what", "next_step"),
    [
        ({"driver_verison": "1"}, "no variable gpuprov_driver_verison", "did you mean gpuprov_driver_version?"),
        ({"zzz": "1"}, "there is no variable gpuprov_zzz", "gpuprov options"),
        ({"driver_version": 550.1}, "put a version number in quotes", ""),
        ({"driver_version": None}, "gpuprov_driver_version has no value", ""),
        ({"driver_version": "latest; rm -rf /"}, "not a driver version", ""),
        ({"driver_version": "550.163.01\n"}, "not a driver version", ""),
        ({"mig_layout": {"disabled"}}, "must be text or a list of texts", ""),
        ({"driver": "nouveau"}, "not one of runfile, packages, distribution, preinstalled", ""),
        ({"image_gpus": ["voodoo"]}, "gpuprov_image_gpus is not one of maxwell", ""),
        ({"driver_url": "ftp://x/y"}, "neither a URL", ""),
        ({"driver_url": "http://x/$(id)"}, "neither a URL", ""),
        ({"driver_url": "relative/path"}, "neither a URL", ""),
        ({"driver_sha256": "abc"}, "not a SHA-256", ""),
        ({"docker_default_runtime": 1}, "must be true or false", ""),
        ({"docker_default_runtime": "maybe"}, "must be true or false", ""),
        ({"packages": "jq"}, "must be a list", ""),
        ({"packages": ["--option"]}, "not a package name", ""),
        ({"packages": ["libc6:"]}, "not a package name", ""),
        ({"packages": ["libc6:I386"]}, "not a package name", ""),
        ({"toolkit_version": "1.17.8-1=x"}, "not the version of a package", ""),
        ({"toolkit_version": "1.17.8-1 jq"}, "not the version of a package", ""),
        ({"lock_timeout": "soon"}, "must be a whole number", ""),
        ({"lock_timeout": -1}, "not a whole number from 0 to 86400", ""),
        ({"toolkit_key_fingerprint": "F796ECB0"}, "full key fingerprint", ""),
        ({"repositories": [{"name": "x"}]}, "gpuprov_repositories.0.uri is missing", ""),
        ({"repositories": [{**REPOSITORY, "ur": "x"}]}, "gpuprov_repositories.0.ur", "did you mean uri?"),
        ({"repositories": [{**REPOSITORY, "name": "../x"}]}, "not a name", ""),
        ({"verify_image": "--privileged"}, "not an image reference", ""),
    ],
)
def test_bad_values_get_their_sentence(values: dict[str, Any], what: str, next_step: str) -> None:
    with pytest.raises(GpuprovError) as caught:
        parse_spec(values, "group_vars/all.yml")
    said = str(caught.value)
    assert what in said
    assert next_step in said
    assert "group_vars/all.yml" in said
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("version", ["1.17.8-1", "1.19.0~rc.2-1", "1.13.5"])
def test_versions_as_nvidia_gives_them_to_its_packages(version: str) -> None:
    assert parse_spec({"toolkit_version": version}).toolkit_version == version


def test_off_is_a_word_though_yaml_makes_false_of_it() -> None:
    assert parse_spec({"watch": False}).watch == "off"
    with pytest.raises(GpuprovError, match="gpuprov_watch must be text"):
        parse_spec({"watch": True})


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(GpuprovError) as caught:
        parse_spec({"driver": "x", "driver_version": 1, "nope": 2})
    assert len(caught.value.problems) == 3


def test_only_our_own_inventory_variables_count() -> None:
    assert spec_from_variables({"ansible_host": "x", "gpuprov_driver": "preinstalled"}).driver == "preinstalled"


def test_a_misspelt_variable_of_plays_is_recognised() -> None:
    with pytest.raises(GpuprovError, match="there is no variable gpuprov_play_bundel") as caught:
        spec_from_variables({"gpuprov_play_bundel": "b.tar"})
    assert caught.value.problems[0].next_step == "did you mean gpuprov_play_bundle?"


def test_every_option_has_a_text_and_every_text_an_option() -> None:
    texts = packaged("options")["texts"]
    assert set(texts) == set(option_names()), "next: a text in gpuprov/protocol/options.json for each field of HostSpec"
    assert list(texts) == list(option_names()), "next: the texts in the order of the fields"
    assert [name for name, text in texts.items() if len(text) <= 20] == [], "next: say what these options do"
    assert all(f"`{one}`" in texts["image_gpus"] for one in GENERATIONS)


def test_every_option_is_read_somewhere() -> None:
    package = Path(gpuprov.__file__).parent
    code = "\n".join(file.read_text() for file in package.rglob("*.py") if file != package / "protocol/spec.py")
    code += json.dumps({key: rows for key, rows in packaged("options").items() if key != "texts"})
    words = set(re.findall(r"""[."'](?:gpuprov_)?(\w+)""", code))
    # The digest beside a site's table: agent/site_tables.py makes the name.
    unread = [name for name in option_names() if name not in words and name.removesuffix("_sha256") not in words]
    assert not unread, "next: let gpuprov/plan, gpuprov/driver or a file that they call read these options"


@pytest.mark.parametrize("name", ["driver_version", "driver_mirror", "toolkit_version", "verify_image"])
def test_a_whole_number_is_a_text_and_no_other_number_is(name: str) -> None:
    """YAML, INI files and JSON make a number of 580."""
    assert parse_spec({"driver_version": 580}) == parse_spec({"driver_version": "580"})
    assert parse_spec({"toolkit_version": 1}).toolkit_version == "1"
    for value in (True, None, [580], {"580": 1}):
        with pytest.raises(GpuprovError):
            parse_spec({name: value})
    problem = refused(parse_spec, {name: 12.1})
    assert "put a version number in quotes" in problem.what
    assert f'set gpuprov_{name}: "12.1"' in problem.next_step
    assert "12.10 is 12.1" in problem.next_step


def test_hints_put_versions_in_quotes() -> None:
    """What is typed without them may be read as another version."""
    unquoted = re.compile(r".*gpuprov_(?:driver_version|cuda|toolkit_version): ?[{0-9].*")
    sources = Path(gpuprov.__file__).parent.rglob("*.py")
    assert [(path.name, line) for path in sources for line in unquoted.findall(path.read_text())] == []


# -- what `gpuprov options --write` writes -----------------------------------------------------------------------------


FILE = "inventory/group_vars/gpu_hosts.yml"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def write(*words: str) -> Result:
    return CliRunner().invoke(cli, ["options", "--write", FILE, *words])


def written(*words: str) -> dict[str, Any]:
    done = write(*words)
    assert done.exit_code == 0, done.output
    return yaml.safe_load(Path(FILE).read_text()) or {}


def installed(
    name: str, *versions: str, check: bool = False, driver: str = "runfile", gpus: str = "H100", inventory: str = ""
) -> None:
    """Store an installation of gpu01, gpu02 …, which left these versions of the driver."""
    results = tuple(
        HostResult(f"gpu{number:02}", ExitCode.DONE, choice=ChosenDriver(gpus, driver, version, "why"))
        for number, version in enumerate(versions, 1)
    )
    save(Run(name, "install", "", 1.0, results, check, (inventory,) if inventory else ()))


def test_what_all_hosts_have_in_common_is_chosen(here: Path) -> None:
    (here / "hosts.yml").write_text(
        "all: {hosts: {gpu01: {gpuprov_watch: daily}, gpu02: {gpuprov_watch: weekly}}, "
        "vars: {gpuprov_driver: packages, gpuprov_packages: [nvtop, 'a-b'], gpuprov_lock_timeout: 300}}"
    )
    assert written("--hosts", "hosts.yml", "-e", "gpuprov_reboot=if-needed") == {
        "gpuprov_driver": "packages", "gpuprov_packages": ["nvtop", "a-b"], "gpuprov_reboot": "if-needed",
    }  # fmt: skip


def test_without_comment_signs_it_is_every_variable() -> None:
    text = reference.as_yaml({"gpuprov_driver": "packages"})
    whole = yaml.safe_load(text.replace("\n#gpuprov_", "\ngpuprov_"))
    assert list(whole) == [one["name"] for one in reference.variables()]
    assert spec_from_variables(whole) == replace(HostSpec(), driver="packages")
    assert yaml.safe_load(text) == {"gpuprov_driver": "packages"}
    assert max(map(len, text.splitlines())) < 120


def test_the_driver_that_the_last_installation_left_is_chosen() -> None:
    installed("20261121T081500Z-1", "580.178.04", "580.178.04")
    installed("20261121T081600Z-1", "590.1.1", "590.1.1", check=True)
    assert written("--hosts", "gpu01,gpu02") == {"gpuprov_driver_version": "580.178.04"}
    assert written("--force", "--hosts", "gpu01,gpu03") == {}
    assert written("--force", "--hosts", "gpu01,gpu02", "-e", "gpuprov_driver_version=590.48.01") == {
        "gpuprov_driver_version": "590.48.01"
    }
    installed("20261121T081700Z-1", "580.178.04")  # gpu01 alone, with --limit
    assert written("--force", "--hosts", "gpu01,gpu02") == {"gpuprov_driver_version": "580.178.04"}
    # Not every repository can pin a version, and a branch of the distribution is no release.
    packages = {"gpuprov_driver": "packages"}
    assert written("--force", "--hosts", "gpu01,gpu02", "-e", "gpuprov_driver=packages") == packages


def test_another_sites_host_of_the_same_name_does_not_choose(here: Path) -> None:
    installed("20261121T081500Z-1", "580.178.04", inventory=str(here / "hosts"))
    installed("20261121T081600Z-1", "590.48.01", inventory="/other/hosts")
    (here / "hosts").write_text("gpu01\n")
    assert written("--hosts", "hosts") == {"gpuprov_driver_version": "580.178.04"}


@pytest.mark.parametrize("versions", [("580.178.04", "590.48.1"), ("{{ lookup('pipe', 'id') }}",), ("1\nx: y",), ("",)])
def test_versions_that_differ_or_are_none_are_not_chosen(versions: tuple[str, ...]) -> None:
    installed("20261121T081500Z-1", *versions)
    assert written("--hosts", ",".join(f"gpu{number + 1:02}" for number in range(len(versions))) + ",") == {}


def test_a_version_that_packages_or_a_kernel_outside_decide_is_not_chosen() -> None:
    installed("20261121T081500Z-1", "580.178.04", driver="preinstalled")
    assert written("--hosts", "gpu01,") == {}
    installed("20261121T081600Z-1", "580.178.04", gpus="")
    assert written("--force", "--hosts", "gpu01,") == {}


@pytest.mark.parametrize(
    ("name", "text", "secret"),
    [
        ("proxy", "gpuprov_proxy=http://me:hunter2@proxy:3128", "hunter2"),
        ("driver_mirror", "gpuprov_driver_mirror=https://ghp_0123456789@mirror.example/drivers", "ghp_"),
        ("vgpu", '{"gpuprov_vgpu": {"feature": 1, "token": "eyJhbGciOiJSUzI1NiJ9"}}', "eyJ"),
    ],
)
def test_a_secret_stays_out(name: str, text: str, secret: str) -> None:
    done = write("-e", text, "-e", "gpuprov_no_proxy=localhost")
    assert done.stderr == f"warning: gpuprov_{name} is left out: it has a password\n"
    left = Path(FILE).read_text()
    assert secret not in left and yaml.safe_load(left) == {"gpuprov_no_proxy": "localhost"}


def test_a_licence_without_a_token_is_chosen() -> None:
    assert written("-e", '{"gpuprov_vgpu": {"feature": 2}}')["gpuprov_vgpu"]["feature"] == 2


def test_an_existing_file_stays_without_force() -> None:
    Path(FILE).parent.mkdir(parents=True)
    Path(FILE).write_text("mine: {}\n")
    done = write("-e", "gpuprov_watch=daily")
    assert isinstance(done.exception, UsageError) and "exists" in str(done.exception)
    assert Path(FILE).read_text() == "mine: {}\n"
    assert written("--force", "-e", "gpuprov_watch=daily") == {"gpuprov_watch": "daily"}


def test_what_chooses_needs_a_file_to_write() -> None:
    done = CliRunner().invoke(cli, ["options", "-e", "gpuprov_watch=daily"])
    assert done.exit_code == 2 and "need --write" in done.output
