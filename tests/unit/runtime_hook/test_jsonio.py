"""JSON by the interpreter's C code: the same answers as Python's json gives, both ways."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.runtime_hook import jsonio

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)
_INDENTS = st.none() | st.integers(0, 4) | st.just("\t")


@given(_VALUES, st.booleans(), _INDENTS)
def test_a_document_is_read_as_json_reads_it(value: object, ascii_only: bool, indent: int | str | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert repr(jsonio.loads(f"\n {text}\r\n")) == repr(value)


@given(_VALUES)
def test_a_value_is_written_as_json_writes_it(value: object) -> None:
    assert jsonio.dumps(value) == json.dumps(value, separators=(",", ":"))


@given(st.text() | st.text(alphabet='[]{},:" \\u0123456789.eE+-truefalsn\n'))
def test_any_text_is_a_value_or_a_value_error(text: str) -> None:
    try:
        found = jsonio.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            json.loads(text)
        return
    assert repr(found) == repr(json.loads(text))


@pytest.mark.parametrize(
    "text",
    ["", " ", "{", '{"a"}', '{"a":}', "{'a':1}", "[1,]", "[1 2]", "tru", "01", "1 2", "{} x", '"\t"', '"\\x"',
     "\ufeff1"],
)  # fmt: skip
def test_invalid_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        jsonio.loads(text)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_a_document_nested_without_end_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        jsonio.loads(text)


def test_numbers_keep_what_a_configuration_needs() -> None:
    text = "[9223372036854775807,18446744073709551615,-1,0,1.5,1e3]"
    assert jsonio.loads(text) == [2**63 - 1, 2**64 - 1, -1, 0, 1.5, 1000.0]
    assert jsonio.dumps(jsonio.loads(text)) == "[9223372036854775807,18446744073709551615,-1,0,1.5,1000.0]"


def test_what_json_cannot_express_is_not_written() -> None:
    with pytest.raises(TypeError, match="set is not a JSON value"):
        jsonio.dumps({1})
