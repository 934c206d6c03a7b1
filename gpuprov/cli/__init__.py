"""The commands: parse, call, print. Controller only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from gpuprov.fleet.options import made_options


def run(
    command: str, options: dict[str, Any], *, arguments: Mapping[str, Any] | None = None, **overrides: str | None
) -> NoReturn:
    """Carry a click command out, and exit with its code; overrides that are not empty win over the inventory."""
    from gpuprov.fleet.command import run_command

    wanted = tuple((name, value) for name, value in overrides.items() if value)
    raise SystemExit(int(run_command(made_options(command, options, arguments=arguments or {}, overrides=wanted))))
