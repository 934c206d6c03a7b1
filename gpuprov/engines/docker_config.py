"""daemon.json as text: read with line and column for mistakes, edited without losing what is not ours. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from gpuprov.wire.errors import Problem

DAEMON_JSON = "/etc/docker/daemon.json"
_VALIDATE = f"dockerd --validate --config-file {DAEMON_JSON}"


def parse_config(text: str | None) -> tuple[Mapping[str, Any], tuple[Problem, ...]]:
    """Return the configuration that daemon.json's text holds; a missing or empty file is an empty one.

    `text` has bytes that are no UTF-8 as lone surrogates (surrogateescape). What docker itself could not read, or what
    has no place for a runtime, is returned as problems.
    """
    if text is None or not text.strip():
        return {}, ()
    stray = re.search("[\udc80-\udcff]", text)
    if stray is not None:
        number = text.count("\n", 0, stray.start()) + 1
        return {}, (Problem(f"{DAEMON_JSON} is not UTF-8", f"line {number}", f"correct it, then check: {_VALIDATE}"),)
    try:
        config = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_number, parse_float=_number)
    except json.JSONDecodeError as error:
        # Not splitlines: JSON counts line feeds only.
        line = text.split("\n")[error.lineno - 1]
        seen = f"line {error.lineno}, column {error.colno}: {error.msg}: {line.strip()}"
        return {}, (Problem(f"{DAEMON_JSON} is not valid JSON", seen, f"correct it, then check: {_VALIDATE}"),)
    except (ValueError, RecursionError) as error:
        return {}, (
            Problem(f"{DAEMON_JSON} can't be edited safely", str(error), f"correct it, then check: {_VALIDATE}"),
        )
    wrong = _wrong_shape(config)
    if wrong:
        return {}, (Problem(f"{DAEMON_JSON} has the wrong shape", wrong, f"correct it, then check: {_VALIDATE}"),)
    return config, ()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that stands twice: writing the file back would silently drop one of the two."""
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f'"{twice}" stands twice in the same object')
    return dict(pairs)


def _number(text: str) -> float:
    """Refuse NaN, Infinity and what overflows to it: Python would write them back, docker could not read them."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number in JSON")
    return value


def _wrong_shape(config: Any) -> str:
    if not isinstance(config, dict):
        return f"it holds a {type(config).__name__}, not an object"
    runtimes = config.get("runtimes", {})
    # docker itself takes null for none.
    if runtimes is not None and not isinstance(runtimes, dict):
        return f'"runtimes" is a {type(runtimes).__name__}, not an object'
    return ""


def with_runtime(config: Mapping[str, Any], name: str, path: str, *, set_default: bool) -> dict[str, Any]:
    """Return the configuration with a runtime of that name and path; everything else, and its order, stays."""
    runtimes = config.get("runtimes") or {}
    entry = runtimes.get(name)
    if not (isinstance(entry, dict) and entry.get("path") == path and not entry.get("args")):
        entry = {"path": path, "args": []}
    changed = {**config, "runtimes": {**runtimes, name: entry}}
    return {**changed, "default-runtime": name} if set_default else changed


def render_config(config: Mapping[str, Any], like: str | None) -> str:
    """Return the text of a configuration, indented as the text `like` is (four blanks without one)."""
    found = re.search(r"^([ \t]+)\"", like or "", re.MULTILINE)
    indent = found[1] if found else "    "
    plain = json.dumps(config, indent=indent, ensure_ascii=False) + "\n"
    # Half of a surrogate pair ("\ud800") is valid JSON but has no UTF-8: then every such character stays escaped.
    is_utf8 = not re.search("[\ud800-\udfff]", plain)
    return plain if is_utf8 else json.dumps(config, indent=indent) + "\n"
