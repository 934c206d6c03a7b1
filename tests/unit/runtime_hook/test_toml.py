"""Our TOML reader against Python's own: the same for all that it reads, a named line for all that it does not."""

import pytest
import tomllib
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.runtime_hook.toml import parse


@pytest.mark.parametrize(
    "text",
    [
        "", "\n\n", "# comment", "a = 1", "a=1 # x", "  a\t=\ttrue  ", "a = false\r\nb = -5\r\n", "a = +1_000",
        'a = "x # y"', "a = 'x \\ y'", 'a = "\\t\\n\\"\\\\\\u00e9\\U0001F600"', '"quoted key" = 1', "'k.k' = 1",
        "a.b.c = 1\na.d = 2",
        "[t]\na = 1", "[ t . u ]\na = 1\n[t]\nb = 2", '["x y".z]\na = 1', "[a]\n[a.b]\n[c]", "a = []", "a = [1, 2, ]",
        "a = [ # c\n 'x', # d\n\n 'y'\n]", "a = [true,\n false\n ,]  # end", "1 = 2", "-_ = 0", "a = ['b']",
        # Dotted keys open tables within one section, and no more behind it.
        "[a.b]\n[a]\nc.d = 1\nc.e = 2", "[a]\nb = 1\n[a.c.d]\n[a.c]", "# a\u00a0\u2028b", 'a = "\u00a0\u2028"',
        "a = [\r\n1,\r\n]\r\n",
    ],
)  # fmt: skip
def test_what_is_read_is_what_python_reads(text: str) -> None:
    assert parse(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a", 1), ("a =", 1), ("= 1", 1), ("a = 1 2", 1), ("a = 'x", 1), ('a = "x', 1), ("\na = x", 2), ("a = [1", 1),
        ("a = [1 2]", 1), ("a = [,]", 1), ("a = 1\na = 2", 2), ("[t]\n[t]", 2), ("a = 1\n[a]", 2), ("[t", 1), ("[]", 1),
        ("[t] x", 1),
        ('a = "\\x"', 1), ('a = "\\u12"', 1), ('a = "\\ud800"', 1), ("a = 01", 1), ("a = 1__0", 1), ("a = TRUE", 1),
        ("a.b = 1\na = 2", 2),
        ("a = 'x\x01'", 1), ("a b = 1", 1), ("a. = 1", 1),
        ("a.b = 1\n[a]", 2), ("a.b = 1\n[a.c]\n[a]", 3), ("[a.b]\n[a]\nb.c = 1", 3), ("[a]\n[b]\na.b.c = 1\n[b.a]", 4),
        ("# \x00", 1), ("a = 1 # \x7f", 1), ("[a] # \x0c", 1), ("a = [ # \x01\n]", 1), ("a = 1\r", 1), ("\r", 1),
        ("a = 'x\ry'", 1),
    ],
)  # fmt: skip
def test_what_is_wrong_is_wrong_here_too_and_the_line_is_named(text: str, line: int) -> None:
    with pytest.raises(tomllib.TOMLDecodeError):
        tomllib.loads(text)
    with pytest.raises(ValueError, match=f"^line {line}: "):
        parse(text)


@pytest.mark.parametrize(
    "text", ["a = 1.5", "a = 1979-05-27", "a = {b = 1}", "[[a]]", 'a = """x"""', "a = 0x1F", "a = inf", "a = [[1]]"]
)
def test_what_configurations_do_not_use_is_refused_not_misread(text: str) -> None:
    tomllib.loads(text)
    with pytest.raises(ValueError, match=r"^line 1: "):
        parse(text)


_KEYS = st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters="-_"), min_size=1, max_size=8)
_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@given(st.dictionaries(_KEYS, st.booleans() | st.integers() | _TEXTS | st.lists(_TEXTS, max_size=3), max_size=6))
def test_any_document_of_that_kind_is_read_alike(values: dict[str, object]) -> None:
    def rendered(value: object) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return f"[{', '.join(_quoted(one) for one in value)}]"
        return _quoted(value) if isinstance(value, str) else str(value)

    text = "\n".join(f"{key} = {rendered(value)}" for key, value in values.items())
    assert parse(text) == tomllib.loads(text) == values


_PIECES = st.sampled_from(
    ["a = 1", "a.b = 1", "b.a = 2", "[a]", "[a.b]", "[b]", "\n", "\n", "\r\n", "\r", "#", "[", "]", "'x'", "\x00", "="]
)


@given(st.text(alphabet="ab=.[]\"'#\n\\ ,1_-tru\t{}") | st.lists(_PIECES, max_size=10).map("".join))
def test_no_text_is_read_otherwise_than_python_reads_it(text: str) -> None:
    try:
        found = parse(text)
    except ValueError:
        return
    assert found == tomllib.loads(text)
