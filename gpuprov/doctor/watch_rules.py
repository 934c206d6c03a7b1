"""Rules about a host that is not watched although gpuprov_watch requests it. Pure."""

from __future__ import annotations

from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ASIDE, TOOLKIT, Finding, Rule
from gpuprov.facts.watch import SERVICE, TIMER


def _failed(x: Examined) -> Finding | None:
    unit = x.units.get(SERVICE)
    if unit is None or unit.active != "failed":
        return None
    return Finding(
        f"{SERVICE} has failed: this host's metrics are old",
        f"systemctl show {SERVICE}: Result={unit.result}",
        f"journalctl -u {SERVICE}; systemctl start {SERVICE}",
        ASIDE,
    )


def _not_running(x: Examined) -> Finding | None:
    unit = x.units.get(TIMER)
    if unit is None or unit.load != "loaded" or unit.active == "active":
        return None
    return Finding(
        f"{TIMER} is installed and does not run: this host is not watched",
        f"systemctl show {TIMER}: ActiveState={unit.active}",
        f"systemctl start {TIMER}",
        ASIDE,
    )


RULES = (
    Rule("watch-failed", TOOLKIT, f"{SERVICE} ended with an error", _failed),
    Rule("watch-stopped", TOOLKIT, f"{TIMER} is there and not active", _not_running),
)
