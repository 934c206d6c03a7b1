"""daemon.json as text: parsed with line and column of errors, edited without losing other content. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpuprov.engines.docker_unit import DAEMON_JSON
from gpuprov.engines.json_text import BOM, in_place, with_member, without_member
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.versions import version_numbers

__all__ = ["DAEMON_JSON", "edited", "parse_config"]
# The first that takes a byte order mark, and that has `dockerd --validate`.
_FIRST_WITH_BOM = _FIRST_WITH_VALIDATE = (23,)

# docker 25 to 28.1 reads CDI specifications if its file sets features.cdi, 28.2 and later unless it disables it; older
# releases can't (docs.docker.com, dockerd, "Enable CDI devices").
_FIRST_WITH_CDI = (25,)
_FIRST_WITH_CDI_BY_DEFAULT = (28, 2)
VERSIONS_WITH_FEATURE = "25 to 28.1"


def knows_cdi(version: str) -> bool:
    """Say whether a docker of that version can read CDI specifications."""
    return version_numbers(version) >= _FIRST_WITH_CDI


def needs_feature(version: str) -> bool:
    """Say whether a docker of that version needs features.cdi to read them."""
    return _FIRST_WITH_CDI <= version_numbers(version) < _FIRST_WITH_CDI_BY_DEFAULT


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


def edited(
    text: str | None, name: str, path: str, *, set_default: bool, cdi: bool = False, drop: Sequence[str] = ()
) -> str | None:
    """Return valid daemon.json with a runtime of that name and path; None if nothing changes.

    Without a path no runtime is added; `cdi` sets features.cdi; the runtimes of `drop` are removed. Every other byte
    stays: a JSON writer would lose line ends, a byte order mark, a duplicate key, bytes that are invalid UTF-8.
    """
    text = text if text and text.lstrip(BOM).strip() else "{}\n"

    def edit(plain: str) -> str:
        config = json.loads(plain)
        there = (config.get("runtimes") or {}).get(name)
        is_right = isinstance(there, dict) and there.get("path") == path and not there.get("args")
        if path and not is_right:
            plain = with_member(plain, ("runtimes", name), {"path": path, "args": []})
        if path and set_default:
            plain = with_member(plain, ("default-runtime",), name)
        if cdi:
            plain = with_member(plain, ("features", "cdi"), True)
        return without_runtimes(plain, drop)

    after = in_place(text, edit)
    return None if after == text else after


def without_runtimes(text: str, names: Sequence[str]) -> str:
    """Return the text without these runtimes; docker does not start with a missing default runtime."""
    if names and json.loads(text).get("default-runtime") in names:
        text = without_member(text, ("default-runtime",))
    for name in names:
        text = without_member(text, ("runtimes", name))
    return text


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
