"""Extra variables that gpuprov reads by itself: as Ansible reads them, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible.parsing.dataloader import DataLoader

from gpuprov.fleet import one_file
from gpuprov.fleet.extra_vars import plain_extra_vars
from gpuprov.fleet.inventory import _load_extra_vars, read_extra_vars
from gpuprov.protocol.errors import ExitCode, GpuprovError

_PLAIN = [
    ("a=1",),
    ("a=1 b=two  c=",),
    ("a='x y' b=\"it is\"",),
    ("a==b", "b=c=d"),
    ("a=/x/y,z:1", "", "a=later"),
    ('{"a": [1, 2.5, null, true], "b": {"c": "d"}}',),
    ("{a: yes, b: 0x10, c: 010, d: 1_000, e: on, f: ~, g: 1e3}",),
    ("{a: [x, 'y z']}", "b=2"),
    ("a=ümlaut",),
]
_ANSIBLES = ["a={{ b }}", "a={% x %}", "{a: '{{ b }}'}", "{a: [{b: '{# c #}'}]}", "a", "a=b c", "/etc/x.yml", "[1, 2]",
             "{a: !vault x}", "{a: 2026-01-01}", "{1: a}", "a=b\\nc", "a=\"b", "{a", "a-b=c"]  # fmt: skip


@pytest.mark.parametrize("words", _PLAIN, ids=" ".join)
def test_plain_ones_are_read_as_ansible_reads_them(words: tuple[str, ...]) -> None:
    found, other = plain_extra_vars(words)
    assert other == ""
    # As text: True is not 1.
    assert json.dumps(found) == json.dumps(_load_extra_vars(DataLoader(), words))


@pytest.mark.parametrize("word", _ANSIBLES)
def test_all_others_are_left_to_ansible(word: str) -> None:
    assert plain_extra_vars(["a=1", word]) == ({}, word)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "site.yml").write_text("# site\ngpuprov_engines: [podman]\ngpuprov_packages:\n  - a\n")
    (tmp_path / "vault.yml").write_text("$ANSIBLE_VAULT;1.1;AES256\n6162\n")
    words = (f"@{tmp_path}/site.yml",)
    assert plain_extra_vars(words) == (dict(_load_extra_vars(DataLoader(), words)), "")
    assert plain_extra_vars([f"@{tmp_path}/vault.yml"])[1]


def test_dictionaries_of_one_name_are_left_to_ansible_which_may_merge_them() -> None:
    assert plain_extra_vars(["{a: {b: 1}}", "{a: {c: 2}}"])[1] == "{a: {c: 2}}"


def test_without_ansible_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_file, "active", True)
    assert read_extra_vars(["gpuprov_toolkit=nvidia"]).spec.toolkit == "nvidia"
    with pytest.raises(GpuprovError, match="the extra variables cannot be read") as caught:
        read_extra_vars(["gpuprov_proxy={{ x }}http://user:secret@proxy"])
    assert caught.value.exit_code == ExitCode.USAGE
    assert "secret" not in str(caught.value)
