"""Keys that runc reads in another way than this program are refused."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.runtime_hook import config, hook_main
from gpuprov.runtime_hook.errors import Refused
from tests.unit.runtime_hook.test_main import Bundle

KELVIN, LONG_S = "\u212a", "\u017f"
GPU_PROCESS = '"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"], "user": {"uid": 1000}}'
ROOT = '"root": {"path": "rootfs"}'


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f'{{{GPU_PROCESS}, {ROOT}, "PROCESS": {{}}}}', "'PROCESS', which runc reads as 'process'"),
        (f'{{{GPU_PROCESS}, {ROOT}, "proces{LONG_S}": {{}}}}', "which runc reads as 'process'"),
        (f'{{{GPU_PROCESS}, {ROOT}, "linux": {{}}, "linux": {{}}}}', "the key 'linux' twice"),
        (f'{{{GPU_PROCESS}, {ROOT}, "\\u006cinux": {{}}, "linux": {{}}}}', "the key 'linux' twice"),
        (f'{{{GPU_PROCESS}, {ROOT}, "Linux": {{}}}}', "'Linux', which runc reads as 'linux'"),
        (f'{{{GPU_PROCESS}, {ROOT}, "hoo{KELVIN}s": {{}}}}', "which runc reads as 'hooks'"),
        (f'{{{GPU_PROCESS}, {ROOT}, "linux": {{"seccomp": {{"a": 1, "a": 2}}}}}}', "the key 'a' twice"),
        (f'{{{GPU_PROCESS}, {ROOT}, "mounts": [{{"Destination": "/x"}}]}}', "'Destination', which"),
        (f'{{{GPU_PROCESS}, {ROOT}, "linux": {{"resources": {{"Devices": []}}}}}}', "'Devices', which"),
        # Asked for in runc's reading alone.
        (f"{{{GPU_PROCESS.replace('process', 'Process')}, {ROOT}}}", "'Process', which runc reads as"),
        (f'{{{GPU_PROCESS}, "process": {{"args": ["sh"]}}, {ROOT}}}', "the key 'process' twice"),
        ('{"process": {"Env": ["NVIDIA_VISIBLE_DEVICES=0"]}}', "'Env', which runc reads as 'env'"),
        # Privilege is judged by these.
        (f'{{{GPU_PROCESS[:-1]}, "Capabilities": {{"bounding": []}}}}, {ROOT}}}', "'Capabilities', which"),
        # Without GPUs too: nobody knows in which reading it has none.
        ('{"process": {}, "process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}}', "the key 'process' twice"),
        ('{"annotations": {"a": "1", "a": "2"}}', "the key 'a' twice"),
    ],
)
def test_a_container_with_such_a_key_is_refused_and_left_as_it_is(bundle: Bundle, text: str, says: str) -> None:
    with pytest.raises(Refused) as refused:
        bundle.prepare(text)
    assert says in str(refused.value)
    assert str(refused.value).endswith("remove that key")
    assert bundle.is_untouched


def test_keys_that_users_choose_may_be_in_any_case(bundle: Bundle) -> None:
    bundle.prepare(
        f'{{{GPU_PROCESS}, {ROOT}, "annotations": {{"Process": "x", "process": "y", "PATH": "z"}}, '
        '"linux": {"sysctl": {"Path": "1", "path": "2"}, "seccomp": {"syscalls": [{"Args": []}]}}}'
    )
    assert not bundle.is_untouched
    assert json.loads(bundle.config.read_text())["annotations"] == {"Process": "x", "process": "y", "PATH": "z"}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ('{"bundle": "/a", "Bundle": "/b", "pid": 1}', "'Bundle', which runc reads as 'bundle'"),
        ('{"bundle": "/a", "bundle": "/b", "pid": 1}', "the key 'bundle' twice"),
        ('{"bundle": "/a", "PID": 1}', "'PID', which runc reads as 'pid'"),
    ],
)
def test_a_state_with_such_a_key_is_none(state: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(state.encode())))
    with pytest.raises(Refused, match=says):
        hook_main.serve(["prestart"])


@given(st.sampled_from(sorted(config.CONFIG)), st.data())
def test_a_known_key_is_found_in_every_case_of_letters(name: str, data: st.DataObject) -> None:
    variants = {"s": f"sS{LONG_S}", "k": f"kK{KELVIN}"}
    key = "".join(data.draw(st.sampled_from(variants.get(one.lower(), one.lower() + one.upper()))) for one in name)
    odd = config.odd_key({key: None}, config.CONFIG)
    assert odd == ("" if key == name else f"the key {key!r}, which runc reads as {name!r}")


@given(st.text())
def test_a_key_in_other_letters_is_unknown(key: str) -> None:
    if key.casefold() not in {name.casefold() for name in config.CONFIG}:
        assert config.odd_key({key: None}, config.CONFIG) == ""
