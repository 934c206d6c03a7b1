"""daemon.json as text: parsed with line and column of errors, edited without losing other content. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpuprov.engines.docker_unit import DAEMON_JSON
from gpuprov.engines.json_text import BOM, in_place, with_member, without_member
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.versions import version_numbers

__all__ = ["DAEMON_JSON", "edited", "has_member_twice", "parse_config", "render_config", "with_runtime"]
# The first that takes a byte order mark, and that has `dockerd --validate`.
_FIRST_WITH_BOM = _FIRST_WITH_VALIDATE = (23,)


def parse_config(
    text: str | None, path: str = DAEMON_JSON, version: str = ""
) -> tuple[Mapping[str, Any], tuple[Problem, ...]]:
    """Return the configuration in daemon.json's text; a missing or empty file is an empty configuration.

    `text` holds bytes that are invalid UTF-8 as lone surrogates (surrogateescape); docker accepts such bytes. Of a
    duplicate key in an object the last counts, as for docker. Returned as problems: text that gpuprov can't read or
    edit, or that has no place for a runtime. `version` is docker's, which decides on a byte order mark; "" means
    unknown.
    """
    if text is None or not text.strip():
        return {}, ()
    if text.startswith(BOM) and version_numbers(version) >= _FIRST_WITH_BOM:
        text = text[1:]
    step = f"correct it, then check: {check_command(path, version)}"
    try:
        config = json.loads(text, parse_constant=_number, parse_float=_number)
    except json.JSONDecodeError as error:
        # Not splitlines: JSON counts line feeds only.
        line = text.split("\n")[error.lineno - 1]
        seen = f"line {error.lineno}, column {error.colno}: {error.msg}: {line.strip()}"
        return {}, (Problem(f"{path} is not valid JSON", _printable(seen), step),)
    except (ValueError, RecursionError) as error:
        return {}, (Problem(f"{path} can't be edited safely", str(error), step),)
    wrong = _wrong_shape(config)
    if wrong:
        return {}, (Problem(f"{path} has the wrong shape", wrong, step),)
    return config, ()


def check_command(path: str, version: str) -> str:
    """Return the command that checks a configuration file: dockerd's own, if available."""
    if version_numbers(version) >= _FIRST_WITH_VALIDATE:
        return f"dockerd --validate --config-file {path}"
    return f"python3 -m json.tool {path}"


def _printable(text: str) -> str:
    """Return text without lone surrogates, which terminals reject."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def has_member_twice(text: str) -> bool:
    """Say whether an object of valid JSON has a duplicate key: rendering it again would drop one of the two."""
    found = False

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found = found or len({name for name, _ in pairs}) < len(pairs)
        return dict(pairs)

    json.loads(text.lstrip(BOM), object_pairs_hook=look)
    return found


def edited(
    text: str | None, name: str, path: str, *, set_default: bool, cdi: bool = False, drop: Sequence[str] = ()
) -> str | None:
    """Return valid daemon.json with a runtime of that name and path; None if nothing changes.

    Without a path the runtime is removed; `cdi` sets features.cdi; the runtimes of `drop` are removed. An edit in place
    keeps what a JSON writer would lose: a byte order mark, a duplicate key, bytes that are invalid UTF-8. Line ends
    stay as they are.
    """
    plain = (text or "").lstrip(BOM)
    config = json.loads(plain) if plain.strip() else {}
    wanted = with_runtime(config, name, path, set_default=set_default) if path else dict(config)
    if cdi:
        wanted["features"] = {**(wanted.get("features") or {}), "cdi": True}
    wanted = _without_runtimes(wanted, drop)
    if wanted == config:
        return None
    is_plain = plain == (text or "") and not re.search("[\udc80-\udcff]", plain)
    if not plain.strip() or (is_plain and not has_member_twice(plain)):
        return render_config(wanted, text)

    def edit(text: str) -> str:
        if path:
            text = with_member(text, ("runtimes", name), wanted["runtimes"][name])
        if set_default:
            text = with_member(text, ("default-runtime",), name)
        for one in drop:
            text = without_member(text, ("runtimes", one))
        if drop and "default-runtime" not in wanted:
            text = without_member(text, ("default-runtime",))
        return with_member(text, ("features", "cdi"), True) if cdi else text

    return in_place(text or "", edit)


def _without_runtimes(config: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the configuration without these runtimes; docker does not start with a missing default runtime."""
    runtimes = config.get("runtimes") or {}
    if not any(name in runtimes for name in names):
        return config
    left = {name: one for name, one in runtimes.items() if name not in names}
    config = {**config, "runtimes": left} if left else {key: one for key, one in config.items() if key != "runtimes"}
    gone = config.get("default-runtime") in names
    return {key: one for key, one in config.items() if key != "default-runtime"} if gone else config


def _number(text: str) -> float:
    """Refuse NaN, Infinity and overflowing numbers: Python would write them back, and docker could not read them."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number in JSON")
    return value


def _wrong_shape(config: Any) -> str:
    if not isinstance(config, dict):
        return f"it holds a {type(config).__name__}, not an object"
    for name in ("runtimes", "features"):
        found = config.get(name, {})
        # docker itself takes null for none.
        if found is not None and not isinstance(found, dict):
            return f'"{name}" is a {type(found).__name__}, not an object'
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
    """Return a configuration's text, with the indentation (without one: four blanks) and line ends of `like`."""
    found = re.search(r"^([ \t]+)\"", like or "", re.MULTILINE)
    indent = found[1] if found else "    "
    plain = json.dumps(config, indent=indent, ensure_ascii=False) + "\n"
    # Half of a surrogate pair ("\ud800") is valid JSON but has no UTF-8: then every such character stays escaped.
    is_utf8 = not re.search("[\ud800-\udfff]", plain)
    text = plain if is_utf8 else json.dumps(config, indent=indent) + "\n"
    # No other line end stands in JSON's own text: in strings they are escaped.
    return text.replace("\n", "\r\n") if "\r\n" in (like or "") else text
