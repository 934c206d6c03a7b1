"""Extra variables (-e) that need no Ansible: key=value, JSON, YAML and @file, read as Ansible reads them.

ansible-core costs half a second to import, and the one-file program does not have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuprov.fleet import one_file
from gpuprov.fleet.inventory_messages import EXTRA_VARS_HINT
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.secrets import masked

_VALUE = r"""(?:"[^"\\]*"|'[^'\\]*'|[^\s"'\\]*)"""
_PAIR = re.compile(rf"([A-Za-z_]\w*)=({_VALUE})", re.ASCII)
_PAIRS = re.compile(rf"\s*(?:{_PAIR.pattern}(?:\s+|$))+", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TEMPLATE = re.compile(r"\{[{%#]")
_NOT_PLAIN = "neither key=value, JSON nor YAML; templates and vaults need the whole gpuprov, which has Ansible"
_MARKED = ("__ansible_vault", "__ansible_unsafe")


def require_files(words: Sequence[str]) -> None:
    """Raise GpuprovError if -e names a missing file; Ansible's own message has five lines."""
    for word in words:
        path = Path(word[1:]).expanduser()
        if word.startswith("@") and not path.is_file():
            raise UsageError(
                f"there is no file {word[1:]} with extra variables", f"-e {word}: {path.absolute()}", EXTRA_VARS_HINT,
            )  # fmt: skip


def plain_extra_vars(words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the variables set by -e, and "" or the first word that only Ansible can read.

    Such words have templates, vaults or mistakes, or need Ansible's settings. Raises GpuprovError (exit code 2) for
    them in the one-file program.
    """
    found: dict[str, Any] = {}
    for word in filter(None, words):
        values = _read(word)
        # ansible.cfg may ask for dictionaries to be merged.
        if values is None or any(isinstance(found.get(name), dict) for name in values):
            if one_file.active:
                raise UsageError(
                    "the extra variables cannot be read", f"-e {masked(word)}\n{_NOT_PLAIN}", EXTRA_VARS_HINT,
                )  # fmt: skip
            return {}, word
        found |= values
    return found, ""


def _read(word: str) -> dict[str, Any] | None:
    if word.startswith("@"):
        try:
            text = Path(word[1:]).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        return _mapping(text)
    if word.startswith(("{", "[")):
        return _mapping(word)
    if _TEMPLATE.search(word) or word.startswith(("/", ".")) or not _PAIRS.fullmatch(word):
        return None
    return {name: value.strip("\"'") if value[:1] in "\"'" else value for name, value in _PAIR.findall(word)}


def _mapping(text: str) -> dict[str, Any] | None:
    """Return a JSON or YAML mapping of plain values, or None."""
    import yaml

    try:
        try:
            values = json.loads(text)
        except ValueError:
            values = yaml.safe_load(text)
        named = isinstance(values, dict) and all(isinstance(name, str) and _NAME.fullmatch(name) for name in values)
        return values if named and _is_plain(values) else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(name not in _MARKED and _is_plain(name) and _is_plain(one) for name, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return (
        not _TEMPLATE.search(value)
        if isinstance(value, str)
        else value is None or isinstance(value, (bool, int, float))
    )
