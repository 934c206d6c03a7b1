"""Checks of `gpuprov verify` for what options add to a host: rows of options.json. Reads only."""

import functools
import re
from collections.abc import Iterator
from typing import Any, Callable

from gpuprov.checks.outcome import Failed, Values
from gpuprov.core.system import System
from gpuprov.protocol import tables
from gpuprov.protocol.spec import HostSpec

# nvidia-smi takes two minutes on a host whose GPUs are asleep.
_SECONDS, _PAUSE = 120, 3
Row = dict[str, Any]


def checks(system: System, spec: HostSpec) -> Iterator[tuple[str, Callable[[], Values]]]:
    """Yield name and check of each row whose option is set (to its value, if it has one), or whose file is there."""
    for row in tables.packaged("options")["checks"]:
        asked = getattr(spec, row.get("option", ""), None)
        values = asked if isinstance(asked, tuple) else (None,)
        if (asked and row.get("value") in values) or ("where" in row and system.exists(row["where"])):
            yield row["name"], functools.partial(check, system, row, asked)


def check(system: System, row: Row, asked: Any) -> Values:
    """Run the row's command until its output matches `expect` and not `never`, at most `wait` seconds.

    `by_default` replaces `expect` where the option is not set: what an earlier driver left says little of this host.
    """
    expect: str = row["expect" if asked or "by_default" not in row else "by_default"]
    until = system.now() + row.get("wait", 0)
    while True:
        done = system.run(row["argv"], timeout=_SECONDS)
        found = re.search(expect.replace("{asked}", str(asked)), done.stdout)
        wrong = re.search(row["never"], done.stdout) if "never" in row else None
        if done.ok and found and not wrong:
            return found[1].strip(), ""
        if system.now() >= until:
            break
        system.sleep(_PAUSE)
    seen = wrong[0] if wrong else done.stdout.strip() or done.evidence(2)
    raise Failed(f"{row['what']}: {' '.join(seen.split())}; {row['next']}")
