"""The reference of inventory variables, made from HostSpec: a table, Markdown or JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, fields

from gpuprov.protocol.spec import HostSpec, spec_to_json
from gpuprov.protocol.spec_fields import PREFIX


@dataclass(frozen=True)
class Variable:
    """One inventory variable as the reference shows it."""

    name: str
    default: object
    choices: tuple[str, ...]
    help: str


def variables() -> tuple[Variable, ...]:
    """Return all inventory variables in their documented order."""
    defaults = spec_to_json(HostSpec())
    return tuple(
        Variable(PREFIX + f.name, defaults[f.name], f.metadata["choices"], f.metadata["help"].strip())
        for f in fields(HostSpec)
    )


def as_json() -> str:
    """Return the reference as a list of JSON objects."""
    return json.dumps(
        [{"name": v.name, "default": v.default, "choices": list(v.choices), "help": v.help} for v in variables()],
        indent=2,
        ensure_ascii=False,
    )


def as_markdown() -> str:
    """Return the reference as a Markdown table."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for v in variables():
        text = v.help.replace("|", "\\|")
        rows.append(f"| `{v.name}` | {_shown(v, code='`')} | {text} |")
    return "\n".join(rows)


def as_text(columns: int = 0) -> str:
    """Return the reference for people; with `columns`, wrapped to a terminal that is so wide."""
    blocks = []
    for v in variables():
        choices = f"  ({' | '.join(v.choices)})" if v.choices else ""
        default = _shown(v)
        meaning = v.help.replace("`", "")
        lines = textwrap.wrap(meaning, max(columns - 4, 20), break_on_hyphens=False) if columns else [meaning]
        blocks.append("\n    ".join((f"{v.name}{': ' + default if default else ''}{choices}", *lines)))
    return "\n\n".join(blocks)


def _shown(variable: Variable, code: str = "") -> str:
    if variable.default in ("", [], None):
        return ""
    value = variable.default if isinstance(variable.default, str) else json.dumps(variable.default)
    return f"{code}{value}{code}"
