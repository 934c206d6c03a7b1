"""Malformed CDI files on the host side: an error that names the place, never a defect of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.cdi.registry import read_registry
from gpuprov.cdi.specification import parse, problems, render, with_root
from gpuprov.cli.main import cli
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
from tests.unit.runtime_hook.test_malformed import SPECIFICATION, WRONG, places, replaced

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
        ("deep.yaml", "[" * 5_000),
        ("cycle.yaml", "&a [*a]"),
        ("tag.yaml", "!!python/object/apply:os.system [true]"),
        ("date.yaml", "2026-01-01"),
        ("keys.yaml", "? [a]\n: b\n"),
        ("number.json", "1" * 5000),
        ("half.json", '{"kind": "\\ud800"}'),
    ],
)
def test_documents_that_readers_stumble_over(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    for words in (("cdi", "list", "--spec-dir", str(tmp_path)), ("cdi", "transform", "root", "--input", str(path))):
        done = CliRunner().invoke(cli, words)
        assert done.exception is None or isinstance(done.exception, (SystemExit, GpuprovError)), done.exception
        assert "internal error" not in done.output
