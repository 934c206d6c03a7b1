"""The hook's front: what comes on standard input is an engine's state, or anything."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.runtime_hook import hook_main
from gpuprov.runtime_hook.errors import Refused
from tests.triplet import LIBRARIES


def serve(words: list[str], stdin: bytes) -> int:
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        return hook_main.serve(words)
    finally:
        sys.stdin = before


@pytest.mark.parametrize("words", [[], ["--help"], ["start"], ["-debug", "unknown"]])
def test_an_unknown_stage_is_refused_with_the_usage(words: list[str]) -> None:
    with pytest.raises(Refused, match="usage: gpuprov-container-runtime-hook prestart"):
        serve(words, b"{}")


@pytest.mark.parametrize("words", ["poststart", "poststop", "-debug -config /etc/config.toml poststop"])
def test_after_the_start_there_is_nothing_to_do(words: str) -> None:
    assert serve(words.split(), b"garbage") == 0


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["bundle", "pid", "id", "x"]), inner),
    max_leaves=6,
)


@given(
    st.binary(max_size=60) | _JSON.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(["prestart", "createContainer"]),
)
def test_nothing_on_standard_input_raises_anything_but_a_refusal(content: bytes, stage: str) -> None:
    try:
        assert serve([stage], content) == 0
    except Refused as refused:
        assert str(refused)


@pytest.mark.root
@pytest.mark.parametrize("key", ["bundle", "bundlePath"])
def test_links_are_made_in_the_root_that_the_bundle_names(tmp_path: Path, key: str) -> None:
    root = tmp_path / "rootfs"
    root.mkdir()
    folder = LIBRARIES
    mounts: list[Any] = [{"destination": f"{folder}/libcuda.so.550.1"}, {"destination": "/proc"}, {}, 5]
    (tmp_path / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}, "mounts": mounts}))
    words = ["createContainer", "--host-driver-version", "550.1", "--link", f"libcuda.so.550.1::{folder}/libcuda.so.1"]
    assert serve([*words, "--link", "odd"], json.dumps({key: str(tmp_path)}).encode()) == 0
    assert str((root / folder[1:] / "libcuda.so.1").readlink()) == "libcuda.so.550.1"
    assert b"libcuda.so.1\0" in (root / "etc/ld.so.cache").read_bytes()


def test_a_bundle_without_a_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"root": {"path": "none"}}')
    with pytest.raises(Refused, match=r"root folder .*/none can't be opened"):
        serve(["createContainer"], json.dumps({"bundle": str(tmp_path)}).encode())
