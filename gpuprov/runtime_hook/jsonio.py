"""JSON by the interpreter's own C scanner and encoder: 0.3 ms where `import json`, which pulls in re, costs 6."""

from __future__ import annotations

from typing import Any, Callable


class AmbiguousError(ValueError):
    """A document of which readers make different things; the message says what is in it."""


class _Context:
    """What the C scanner asks of its decoder (json.decoder.JSONDecoder, Python 3.9 to 3.15)."""

    strict = True
    object_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012 (the scanner's own interface)

    def __init__(self, object_pairs_hook: Callable[..., Any] | None) -> None:
        self.object_pairs_hook = object_pairs_hook


def loads(text: str, pairs: Callable[..., Any] | None = None) -> Any:
    """Return what a JSON document holds; `pairs` makes objects of their keys and values.

    Raises ValueError for anything that is not JSON.
    """
    try:
        try:
            from _json import make_scanner  # type: ignore[import-not-found,unused-ignore]

            scan = make_scanner(_Context(pairs))  # type: ignore[arg-type]
            value, end = scan(text, len(text) - len(text.lstrip(" \t\r\n")))
        except (ImportError, TypeError, AttributeError, StopIteration, SystemError):
            # Without json.decoder loaded, some versions' scanner fails with no exception set; json says what is wrong.
            import json

            return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text[end:].strip(" \t\r\n"):
        raise ValueError(f"something follows the JSON document, at character {end}")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of its keys and values. Raises AmbiguousError if it has a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise AmbiguousError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return found


def dumps(value: Any) -> str:
    """Return a value as a JSON document without blanks. Raises ValueError if it is nested too deeply."""
    try:
        try:
            from _json import encode_basestring_ascii, make_encoder  # type: ignore[import-not-found,unused-ignore]

            encode = make_encoder(None, _no_default, encode_basestring_ascii, None, ":", ",", False, False, True)
        except (ImportError, TypeError, AttributeError):
            import json

            return json.dumps(value, separators=(",", ":"))
        return "".join(encode(value, 0))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_default(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is not a JSON value")
