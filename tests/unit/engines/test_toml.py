"""TOML files of others: what is put in stands there, everything else stays, and it comes out to the byte."""

from typing import Any

import pytest
import tomlkit
import tomllib
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuprov.engines.toml import difference, is_only_ours, merged, read_toml, with_values, without_ours
from gpuprov.protocol.errors import GpuprovError
from tests.examples import examples
from tests.unit.refused import refused

TABLE = ("plugins", "io.containerd.grpc.v1.cri", "containerd")


def nested(path: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(path):
        values = {name: values}
    return values


def says(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return merged(found, wanted) == found


IN_TABLE = nested(
    TABLE,
    {
        "default_runtime_name": "nvidia",
        "snapshotter": "native",
        "runtimes": {
            "nvidia": {
                "runtime_type": "io.containerd.runc.v2",
                "options": {"BinaryName": "/usr/bin/x", "SystemdCgroup": True},
            }
        },
    },
)
WANTED = {"imports": ["/etc/a/*.toml", "/etc/b/*.toml"], **IN_TABLE}
HEADER = '[plugins."io.containerd.grpc.v1.cri".containerd]'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        " \t\n\n",
        "# a comment",
        "# a comment\n",
        "version = 2",
        "version = 2\n",
        "version = 2 # why\r\n\r\n[other]\r\nx = 1\r\n",
        'version=2\nimports = ["/etc/a/*.toml"]',
        'version=2\nimports = [  "/etc/a/*.toml" , ]   # ours\n',
        'imports = [\n  # first\n  "/etc/a/*.toml", # second\n]\nversion = 2\n',
        f"version = 2\n{HEADER}",
        f"version = 2\n{HEADER}\n",
        f"version = 2\n  {HEADER}  # here\n    default_runtime_name = 'runc' # the usual\n",
        f'version = 2\n{HEADER}\ndefault_runtime_name = "ru\\"nc # no comment"   \n\n\n',
        f'version = 2\n{HEADER}\ndefault_runtime_name = """\n[looks.like.a.header]\n"""\n',
        f"version = 2\n{HEADER}\nsnapshotter = '''\noverlayfs'''\n[[proxies]]\nname = 1\n[[proxies]]\n",
        # Tables in any order, and the parent after its child.
        f"version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\na = 1\n[b]\n{HEADER}\nx = 1\n",
        "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.nvidia]\nkept = 'yes'\n",
        "version = 2\n[plugins]\n[plugins.other]\nwhen = 1979-05-27T07:32:00Z\nf = 1e6\nhex = 0xDEADBEEF\n",
        "version = 2\n'quoted key' = 1\n\"imports\" = []\n",
    ],
)
def test_edits_come_out_to_the_byte(text: str) -> None:
    edited = with_values(text, WANTED, "config.toml")
    assert says(read_toml(edited, ""), WANTED)
    assert says(tomllib.loads(edited), WANTED)
    assert with_values(edited, WANTED, "config.toml") == edited
    assert without_ours(edited) == text


def test_what_others_wrote_stays_where_it_is() -> None:
    table = f"{HEADER} # table\n  # a word\n  default_runtime_name = 'runc' # usual\n"
    text = f"# top\nversion = 2\n\n{table}\n[last]\nz = 1\n"
    lines = with_values(text, IN_TABLE, "").splitlines()
    assert lines[:10] == [
        "# top",
        "version = 2",
        "",
        f"{HEADER} # table",
        "  # a word",
        "  default_runtime_name = \"nvidia\" # usual  # gpuprov: was 'runc'",
        'snapshotter = "native"  # gpuprov: added',
        "",
        "[last]",
        "z = 1",
    ]
    assert lines[11] == "# gpuprov begin: `gpuprov runtime configure --unset` takes this out"


def test_new_file_is_known_as_ours_alone() -> None:
    made = with_values(None, WANTED, "")
    assert is_only_ours(made)
    assert not is_only_ours(made + "[more]\n")
    assert without_ours(made + "[more]\n") == "[more]\n"
    # An empty file that was there before is another's.
    assert not is_only_ours(with_values("", WANTED, ""))


def test_another_value_replaces_ours_and_another_table_joins_it() -> None:
    first = with_values("version = 2\n", WANTED, "")
    moved = nested((*TABLE, "runtimes", "nvidia", "options"), {"BinaryName": "/opt/y"})
    second = nested((*TABLE, "runtimes", "second"), {"runtime_type": "x"})
    both = with_values(with_values(first, moved, ""), second, "")
    assert both.count("gpuprov begin") == 1
    options = tomllib.loads(both)["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]
    assert options["nvidia"]["options"] == {"BinaryName": "/opt/y", "SystemdCgroup": True}
    assert options["second"] == {"runtime_type": "x"}
    assert without_ours(both) == "version = 2\n"


@pytest.mark.parametrize("text", [None, "version = 2\n", "version = 2\n[a.nvidia]\nx = 1\n"])
def test_empty_table_of_what_is_copied_is_left_out(text: str | None) -> None:
    edited = with_values(text, {"a": {"nvidia": {"type": "t", "options": {}}, "registry": {"auths": {}}}}, "")
    assert read_toml(edited, "")["a"]["nvidia"]["type"] == "t"
    assert "options" not in edited and "registry" not in edited
    assert without_ours(edited) == (text or "")


def test_what_is_ours_is_told() -> None:
    text = f'version = 2\n{HEADER}\ndefault_runtime_name = "runc"\nkept = 1\n'
    edited = with_values(text, WANTED, "")
    assert difference(read_toml(without_ours(edited), ""), read_toml(edited, "")) == WANTED


OF_0_1 = """\
version = 2
imports = ["/etc/site/*.toml", "/etc/containerd/conf.d/*.toml"]  # ours  # gpuprov: was ["/etc/site/*.toml"]
[plugins."io.containerd.grpc.v1.cri"]
enable_cdi = true  # gpuprov: added
  sandbox_image = "mirror.example/pause:3.9"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "nvidia"  # the usual  # gpuprov: was "runc"

# gpuprov begin: `gpuprov runtime configure --unset` takes this out
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/old"
# gpuprov end
"""


def test_file_of_an_earlier_version_is_read_upgraded_and_unset() -> None:
    """As the first version wrote it into a file of a site's own."""
    own = nested(TABLE, {"default_runtime_name": "nvidia", "runtimes": {"nvidia": {"options": {"BinaryName": "/new"}}}})
    upgraded = with_values(OF_0_1, own, "")
    assert tomllib.loads(upgraded) == tomllib.loads(OF_0_1.replace("/usr/bin/old", "/new"))
    assert with_values(upgraded, own, "") == upgraded
    before = (
        'version = 2\nimports = ["/etc/site/*.toml"]  # ours\n[plugins."io.containerd.grpc.v1.cri"]\n'
        '  sandbox_image = "mirror.example/pause:3.9"\n  [plugins."io.containerd.grpc.v1.cri".containerd]\n'
        '    default_runtime_name = "runc"  # the usual\n'
    )
    assert without_ours(OF_0_1) == without_ours(upgraded) == before


def test_what_stands_after_our_block_survives() -> None:
    edited = with_values("version = 2\n", WANTED, "") + "\n[later]\nx = 1\n"
    assert with_values(edited, WANTED, "") == edited
    assert without_ours(edited) == "version = 2\n\n[later]\nx = 1\n"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("version = 2\n[plugins\n", "line 2, column 9"),
        ("version = 2\nx = \n", "line 2, column 5"),
        ("a = 1\na = 2\n", 'Key "a" already exists'),
        ("x = [1, 2\n[b]\n", "line 2"),
    ],
)
def test_file_that_cannot_be_read_is_refused(text: str, seen: str) -> None:
    problem = refused(with_values, text, WANTED, "/etc/config.toml")
    assert problem.what.startswith("/etc/config.toml is not valid TOML")
    assert seen in problem.evidence


@pytest.mark.parametrize("text", ['version = 2\nplugins = {x = "y"}\n', "version = 2\nplugins = 1\n"])
def test_table_that_cannot_be_extended_is_refused(text: str) -> None:
    with pytest.raises(GpuprovError, match="can't be edited safely"):
        with_values(text, WANTED, "/etc/config.toml")


# -- any file ----------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "nvidia", "runtimes", "containerd", "options", "x y", "é", "default_runtime_name"])
SCALARS = st.one_of(
    st.booleans(), st.integers(-5, 10**12), st.text(max_size=8), st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.one_of(SCALARS, st.lists(st.text(max_size=4), max_size=3))
TABLES = st.recursive(
    st.dictionaries(NAMES, VALUES, max_size=3),
    lambda inner: st.dictionaries(NAMES, st.one_of(VALUES, inner), max_size=3),
)
NOISE = st.sampled_from(["", "\n", "# a note\n", "   \n", "\t# [not.a.table]\n", "# x = 1  # y\n"])


@st.composite
def files(draw: st.DrawFn) -> str:
    """A valid TOML file, comments and blank lines in odd places, either line ending, perhaps cut at the end."""
    lines = tomlkit.dumps(draw(TABLES)).splitlines(keepends=True)
    text = "".join(draw(NOISE) + line for line in lines) + draw(NOISE)
    try:
        tomlkit.parse(text)
    except tomlkit.exceptions.ParseError:  # noise inside a multi-line value
        text = "".join(lines)
    if draw(st.booleans()):
        text = text.replace("\n", "\r\n")
    return text.rstrip("\r\n") if draw(st.booleans()) else text


OUR_VALUES = st.one_of(
    st.booleans(), st.text("ab#\"'= \\", max_size=6), st.lists(st.text("ab#", max_size=3), max_size=2)
)
wanted_values = st.recursive(
    st.dictionaries(NAMES, OUR_VALUES, min_size=1, max_size=3),
    lambda inner: st.dictionaries(NAMES, st.one_of(OUR_VALUES, inner), min_size=1, max_size=3),
)


def leaves(found: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(found, dict):
        return {path: found}
    return {place: leaf for name, value in found.items() for place, leaf in leaves(value, (*path, name)).items()}


@settings(max_examples=examples(400), deadline=None)
@given(files(), wanted_values)
@example("a = false\n\n[runtimes]\na = false\n\n[b]\n", {"runtimes": {"b": {"a": False}, "a": {"a": False}}})
def test_any_edit_has_the_values_and_comes_out_to_the_byte(text: str, wanted: dict[str, Any]) -> None:
    try:
        edited = with_values(text, wanted, "")
    except GpuprovError:
        return
    before, after = tomllib.loads(text), tomllib.loads(edited)
    assert says(after, wanted)
    asked = leaves(wanted)
    kept = {place: leaf for place, leaf in leaves(before).items() if place not in asked}
    assert kept.items() <= leaves(after).items()
    assert with_values(edited, wanted, "") == edited
    assert edited == text or without_ours(edited) == text
