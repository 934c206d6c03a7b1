"""What users may write: good values, and every kind of bad one with the sentence it gets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import gpuprov
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.spec import GENERATIONS, HostSpec, option_names, parse_spec, spec_from_variables, spec_to_json
from gpuprov.protocol.tables import packaged

REPOSITORY = {
    "name": "site", "uri": "http://mirror/apt", "key_url": "http://mirror/key.asc", "key_fingerprint": "A" * 40,
}  # fmt: skip


def test_defaults_are_valid_and_survive_the_wire() -> None:
    assert parse_spec({}) == HostSpec()
    spec = parse_spec({"driver_version": "550.163.01", "repositories": [REPOSITORY], "packages": ["jq", "gcc-12=12.2"]})
    assert parse_spec(spec_to_json(spec)) == spec


@pytest.mark.parametrize("value", [True, "true", "yes", "True"])
def test_booleans_as_yaml_and_extra_vars_write_them(value: object) -> None:
    assert parse_spec({"docker_default_runtime": value}).docker_default_runtime is True


@pytest.mark.parametrize(
    ("values", "what", "next_step"),
    [
        (
            {"driver_verison": "1"},
            "there is no variable gpuprov_driver_verison",
            "did you mean gpuprov_driver_version?",
        ),
        ({"zzz": "1"}, "there is no variable gpuprov_zzz", "gpuprov options"),
        ({"driver_version": 550.1}, "put a version number in quotes", ""),
        ({"driver_version": "latest; rm -rf /"}, "not a driver version", ""),
        ({"driver_version": "550.163.01\n"}, "not a driver version", ""),
        ({"mig_layout": {"disabled"}}, "must be text or a list of texts", ""),
        ({"driver": "nouveau"}, "not one of runfile, packages, distribution, preinstalled", ""),
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


def test_every_option_has_a_text_and_every_text_an_option() -> None:
    texts = packaged("options")
    assert list(texts) == list(option_names())
    assert all(len(text) > 20 for text in texts.values())
    assert all(f"`{one}`" in texts["image_gpus"] for one in GENERATIONS)


@pytest.mark.parametrize("name", ["driver_version", "driver_mirror", "toolkit_version", "verify_image"])
def test_a_whole_number_is_a_text_and_no_other_number_is(name: str) -> None:
    """YAML, INI files and JSON make a number of 580."""
    assert parse_spec({"driver_version": 580}) == parse_spec({"driver_version": "580"})
    assert parse_spec({"toolkit_version": 1}).toolkit_version == "1"
    for value in (True, None, [580], {"580": 1}):
        with pytest.raises(GpuprovError):
            parse_spec({name: value})
    with pytest.raises(GpuprovError) as caught:
        parse_spec({name: 12.1})
    (problem,) = caught.value.problems
    assert "put a version number in quotes" in problem.what
    assert f'set gpuprov_{name}: "12.1"' in problem.next_step
    assert "12.10 is 12.1" in problem.next_step


def test_hints_put_versions_in_quotes() -> None:
    """What is typed without them may be read as another version."""
    sources = Path(gpuprov.__file__).parent.rglob("*.py")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sources
        for line in path.read_text().splitlines()
        if re.search(r"gpuprov_(driver_version|cuda|toolkit_version): ?[{0-9]", line)
    ]
    assert found == []
