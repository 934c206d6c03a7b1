"""Specifications of all folders together: who wins, what is a conflict, what is left when a file is broken."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.cdi.registry import Registry, inject, read_registry
from gpuprov.cdi.specification import parse, problems, render, with_root
from gpuprov.cli.main import cli
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
from tests.unit.refused import refused
from tests.unit.runtime_hook.test_malformed import SPECIFICATION, WRONG, places, replaced


def write(folder: Path, name: str, kind: str, common: dict[str, Any] | None = None, **devices: str) -> None:
    """Write a specification; each device brings the variable D=TEXT."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "cdiVersion": "0.5.0", "kind": kind, "containerEdits": common or {},
        "devices": [{"name": key, "containerEdits": {"env": [f"D={text}"]}} for key, text in devices.items()],
    }  # fmt: skip
    (folder / name).write_text(json.dumps(document))


def read(*folders: Path) -> Registry:
    return read_registry(System("/"), [str(folder) for folder in folders])


def values(registry: Registry) -> dict[str, str]:
    return {name: found.device.edits.env[0][2:] for name, found in registry.devices.items()}


def test_a_later_folder_wins_device_by_device(tmp_path: Path) -> None:
    write(tmp_path / "etc", "a.json", "v.com/c", x="etc", y="etc")
    write(tmp_path / "run", "b.json", "v.com/c", x="run", z="run")
    assert values(read(tmp_path / "etc", tmp_path / "run")) == {
        "v.com/c=x": "run",
        "v.com/c=y": "etc",
        "v.com/c=z": "run",
    }
    assert values(read(tmp_path / "run", tmp_path / "etc"))["v.com/c=x"] == "etc"


def test_the_same_device_twice_in_one_folder_is_none_and_both_files_say_so(tmp_path: Path) -> None:
    write(tmp_path, "a.json", "v.com/c", x="a", y="a")
    write(tmp_path, "b.json", "v.com/c", x="b")
    write(tmp_path, "c.json", "other.com/c", x="c")
    registry = read(tmp_path)
    assert values(registry) == {"v.com/c=y": "a", "other.com/c=x": "c"}
    assert set(registry.errors) == {str(tmp_path / "a.json"), str(tmp_path / "b.json")}
    assert all("v.com/c=x stands in" in text for texts in registry.errors.values() for text in texts)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("{", "Expecting"),
        ('{"cdiVersion": "0.5.0", "kind": "v.com/c", "devices": []}', "there is no device in it"),
        ('{"cdiVersion": "0.5.0", "kind": "v.com/c", "odd": 1}', "unknown in Specification: odd"),
        ('{"cdiVersion": "0.2.0", "kind": "v.com/c", "devices": [{"name": "x"}]}', "is below"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_an_error_of_its_own_and_the_others_load(tmp_path: Path, text: str, says: str) -> None:
    write(tmp_path, "good.json", "v.com/c", x="good")
    (tmp_path / "bad.json").write_text(text)
    (tmp_path / "ignored.txt").write_text("{")
    registry = read(tmp_path, tmp_path / "missing")
    assert values(registry) == {"v.com/c=x": "good"}
    assert list(registry.errors) == [str(tmp_path / "bad.json")]
    assert says in registry.errors[str(tmp_path / "bad.json")][0]


def test_yaml_is_read_as_well(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        'cdiVersion: "0.5.0"\nkind: v.com/c\ndevices:\n- name: x\n  containerEdits:\n    env: ["D=yaml"]\n'
    )
    (tmp_path / "b.yml").write_text("a: [\n")
    registry = read(tmp_path)
    assert values(registry) == {"v.com/c=x": "yaml"}
    assert list(registry.errors) == [str(tmp_path / "b.yml")]


def test_injected_devices_come_in_order_with_their_common_edits_once(tmp_path: Path) -> None:
    write(tmp_path, "a.json", "v.com/a", {"env": ["C=a", "O=1"]}, x="x", y="y")
    write(tmp_path, "b.json", "v.com/b", {"env": ["C=b"]}, x="bx")
    before: dict[str, Any] = {"process": {"env": ["D=old", "KEEP=1"]}, "odd": [1]}
    after = inject(before, ["v.com/a=y", "v.com/b=x", "v.com/a=x"], read(tmp_path))
    assert after == {"process": {"env": ["D=x", "KEEP=1", "C=b", "O=1"]}, "odd": [1]}
    assert before["process"]["env"] == ["D=old", "KEEP=1"]


def test_a_configuration_that_is_nested_too_deeply_is_one_sentence(tmp_path: Path) -> None:
    write(tmp_path, "a.json", "v.com/a", x="x")
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"a": deep}
    with pytest.raises(GpuprovError, match="can't be put into this configuration") as caught:
        inject(deep, ["v.com/a=x"], read(tmp_path))
    assert caught.value.problems[0].evidence == "nested too deeply"


def test_devices_that_are_not_there_are_all_named_and_nothing_is_done(tmp_path: Path) -> None:
    write(tmp_path, "a.json", "v.com/a", x="x")
    config = {"process": {"env": ["A=1"]}}
    problem = refused(inject, config, ["v.com/a=x", "v.com/a=q", "w.com/a=x"], read(tmp_path))
    assert problem.what == "there is no CDI device v.com/a=q, w.com/a=x"
    assert config == {"process": {"env": ["A=1"]}}


KEYS = st.sampled_from(["", "devices", "\0", "\ud800", "é", "x" * 5000])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cdi")
    (made / "etc").mkdir()
    return made


def require_clean(folder: Path, content: bytes, name: str) -> None:
    """Read it as every command does: the file is right, or an error says what is wrong."""
    path = folder / "etc" / name
    path.write_bytes(content)
    try:
        registry = read_registry(System(str(folder)), ("/etc",))
        assert registry.devices or registry.errors
        found = parse(content, name)
        problems(found)
        render(with_root(found, "/", "/x"), "json")
        render(found, "yaml")
    except GpuprovError as error:
        assert str(error).isprintable() or "\n" in str(error)
    finally:
        path.unlink()


@given(path=st.sampled_from(list(places(SPECIFICATION))), value=WRONG, suffix=st.sampled_from(["json", "yaml"]))
def test_a_wrong_value_anywhere(folder: Path, path: tuple[Any, ...], value: Any, suffix: str) -> None:
    require_clean(folder, json.dumps(replaced(SPECIFICATION, path, value)).encode(), f"x.{suffix}")


@given(path=st.sampled_from([path for path in places(SPECIFICATION) if path]), key=KEYS, value=WRONG)
def test_a_wrong_key_anywhere(folder: Path, path: tuple[Any, ...], key: str, value: Any) -> None:
    require_clean(folder, json.dumps(replaced(SPECIFICATION, path, {key: value})).encode(), "x.json")


@given(st.binary(max_size=200), st.sampled_from(["json", "yaml"]))
def test_any_bytes(folder: Path, content: bytes, suffix: str) -> None:
    require_clean(folder, content, f"x.{suffix}")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.json", "[" * 100_000),
        ("deep-object.json", '{"a":' * 100_000),
        ("deep.yaml", "[" * 600),
        ("cycle.yaml", "&a [*a]"),
        ("tag.yaml", "!!python/object/apply:os.system [true]"),
        ("date.yaml", "2026-01-01"),
        ("keys.yaml", "? [a]\n: b\n"),
        ("number.json", "1" * 5000),
        ("half.json", '{"kind": "\\ud800"}'),
    ],
    ids=lambda value: value[:20],
)
def test_documents_that_readers_stumble_over(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    for words in (("cdi", "list", "--spec-dir", str(tmp_path)), ("cdi", "transform", "root", "--input", str(path))):
        done = CliRunner().invoke(cli, words)
        assert done.exception is None or isinstance(done.exception, (SystemExit, GpuprovError)), done.exception
        assert "internal error" not in done.output
