"""What can be looked up: the doctor's causes (`gpuprov doctor --explain`), inventory variables (`gpuprov options`).

causes.json is written from the rules by `make docs`: no rule is loaded here, so that shell completion is fast.
"""

import difflib
import json
import pkgutil
import re
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import click

from gpuprov.protocol.errors import UsageError


def causes() -> dict[str, dict[str, Any]]:
    """Return name → cause, in the order of the areas."""
    return {cause["name"]: cause for cause in json.loads(pkgutil.get_data("gpuprov.cli", "causes.json") or b"[]")}


def explain(name: str, *, as_json: bool) -> str:
    """Return what the cause means, how it is recognised, what to type and what --fix does."""
    known = causes()
    cause = known.get(name)
    if cause is None:
        near = difflib.get_close_matches(name, known, 3)
        step = f"gpuprov doctor --explain {near[0]}" if near else "choose a name from docs/doctor.md"
        raise UsageError(f"the doctor has no cause {name!r}", f"similar names: {', '.join(near)}" if near else "", step)
    if as_json:
        return json.dumps(cause, ensure_ascii=False)
    rows = (
        ("means", f"{cause['meaning']} ({cause['confidence']})"),
        ("sign", cause["sign"]),
        ("type", cause["next_step"]),
        ("--fix", "; ".join(cause["fix"]) or "nothing: this cause is left to you"),
        ("after", " or ".join(cause["follows"])),
    )
    lines = [f"  {label + ':':<7} {text}" for label, text in rows if text]
    note = "Names, versions and commands are those of one example host."
    return "\n".join((f"{name} ({cause['area']})", *lines, note))


def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names that begin with what is typed."""
    return [name for name in causes() if name.startswith(incomplete)]


def variables() -> list[dict[str, Any]]:
    """Return name, default, choices and help of all inventory variables in their documented order."""
    from gpuprov.protocol.spec import HostSpec, spec_to_json
    from gpuprov.protocol.spec_fields import ENGINES, PREFIX
    from gpuprov.protocol.tables import packaged

    engines = ", ".join(f"`{name}`" for name in ENGINES)
    defaults, texts = spec_to_json(HostSpec()), packaged("options")["texts"]
    return [
        {
            "name": PREFIX + one.name, "default": defaults[one.name], "choices": list(one.metadata["choices"]),
            "help": texts[one.name].replace("{engines}", engines),
        }
        for one in fields(HostSpec)
    ]  # fmt: skip


def as_markdown() -> str:
    """Return the variables as a Markdown table."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for one in variables():
        default = f"`{_default(one)}`" if _default(one) else ""
        rows.append(f"| `{one['name']}` | {default} | {one['help'].replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def as_text(columns: int = 0) -> str:
    """Return the variables for people; with `columns`, wrapped to a terminal that is so wide."""
    from gpuprov.fleet.inventory import SITE_FILE, site_words, variables_of
    from gpuprov.protocol.secrets import masked_settings

    blocks, of_site = [], variables_of(site_words())
    for one in variables():
        here = f"  [{masked_settings(str(of_site[one['name']]))} by {SITE_FILE}]" if one["name"] in of_site else ""
        choices = f"  ({' | '.join(one['choices'])})" if one["choices"] else ""
        default = f": {_default(one)}" if _default(one) else ""
        meaning = _plain(one["help"])
        lines = textwrap.wrap(meaning, max(columns - 4, 20), break_on_hyphens=False) if columns else [meaning]
        blocks.append("\n    ".join((f"{one['name']}{default}{here}{choices}", *lines)))
    return "\n\n".join(blocks)


def as_yaml(chosen: Mapping[str, Any]) -> str:
    """Return the variables as YAML: those that are chosen with their values, the others as comments with defaults."""
    import yaml

    blocks = ["# Written by `gpuprov options --write`: what is chosen; the rest is a comment with its default.\n"]
    for one in variables():
        is_chosen = one["name"] in chosen
        value = {one["name"]: chosen[one["name"]] if is_chosen else one["default"]}
        lines = [f"# {text}" for text in textwrap.wrap(_plain(one["help"]), 100, break_on_hyphens=False)]
        dumped = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000).splitlines()
        blocks.append("\n".join((*lines, *(text if is_chosen else f"#{text}" for text in dumped), "")))
    return "\n".join(blocks)


def _plain(markdown: str) -> str:
    return re.sub(r"\[\S+\]\((\S+?)\)", r"docs/\1", markdown).replace("`", "")


def _default(variable: dict[str, Any]) -> str:
    value = variable["default"]
    return "" if value in ("", [], None) else value if isinstance(value, str) else json.dumps(value)
