"""Ansible's table of moved plugins: what is kept is what Ansible itself would have read."""

from __future__ import annotations

from pathlib import Path

import ansible
import pytest
from ansible.utils.collection_loader import _collection_finder
from ansible.utils.collection_loader._collection_meta import _meta_yml_to_dict as parse

from gpuprov.fleet.ansible_routing import keep_routing, keeping

TABLE = (Path(ansible.__file__).parent / "config/ansible_builtin_runtime.yml").read_bytes()
PLACE = ("ansible.builtin", "runtime.yml")


def never(text: object, place: object) -> object:
    pytest.fail("parsed again")


def test_the_second_run_finds_what_ansible_itself_parsed(tmp_path: Path) -> None:
    first = keeping(parse, tmp_path / "cache")(TABLE, PLACE)
    assert first == keeping(never, tmp_path / "cache")(TABLE, PLACE) == parse(TABLE, PLACE)


def test_another_text_is_parsed_anew_and_so_is_what_was_kept_badly(tmp_path: Path) -> None:
    kept = keeping(parse, tmp_path)
    kept(TABLE, PLACE)
    assert kept(TABLE + b"\nnew: 1\n", PLACE)["new"] == "1"
    for path in tmp_path.iterdir():
        path.write_text("{")
    assert kept(TABLE, PLACE) == parse(TABLE, PLACE)


def test_a_short_text_is_left_to_ansible_and_a_folder_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    assert keeping(parse, tmp_path)(b"a: 1\n", PLACE) == {"a": "1"}
    assert list(tmp_path.iterdir()) == []
    assert keeping(parse, Path("/dev/null/no"))(TABLE, PLACE) == parse(TABLE, PLACE)


def test_ansible_has_the_function_that_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_collection_finder, "_meta_yml_to_dict", parse)
    keep_routing(tmp_path)
    _collection_finder._meta_yml_to_dict(TABLE, PLACE)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    monkeypatch.delattr(_collection_finder, "_meta_yml_to_dict")
    keep_routing(tmp_path)
    assert not hasattr(_collection_finder, "_meta_yml_to_dict")
