"""`gpuprov doctor --explain NAME`: what a cause means, from causes.json, which `make docs` writes from the rules.

Loads no rule, so that shell completion is fast.
"""

from __future__ import annotations

import difflib
import json
import pkgutil
from typing import Any

import click

from gpuprov.protocol.errors import UsageError


def causes() -> dict[str, dict[str, Any]]:
    """Return name → cause, in the order of the areas."""
    return {cause["name"]: cause for cause in json.loads(pkgutil.get_data(__package__, "causes.json") or b"[]")}


def explain(name: str, *, as_json: bool) -> str:
    """Return what the cause means, how it is recognised, what to type and what --fix does."""
    known = causes()
    cause = known.get(name)
    if cause is None:
        near = difflib.get_close_matches(name, known, 3)
        raise UsageError(
            f"the doctor has no cause {name!r}", f"similar names: {', '.join(near)}" if near else "",
            f"gpuprov doctor --explain {near[0]}" if near else "choose a name from docs/doctor.md",
        )  # fmt: skip
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
    return "\n".join(
        (f"{name} ({cause['area']})", *lines, "Names, versions and commands are those of one example host.")
    )


def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names that begin with what is typed."""
    return [name for name in causes() if name.startswith(incomplete)]
