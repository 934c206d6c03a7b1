"""When hosts may begin to change: days and times of the week, in a time zone. Pure: the caller has the clock.

What counts is the clock on the wall, as in kured: where it jumps, a window is shorter, longer or comes twice.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone, tzinfo
from typing import Optional

from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import Problem, UsageError

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_FORM = re.compile(r"(?i)(?:([a-z,-]+) )?([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]|24(?=:00)):([0-5]\d)(?: (\S+))?")
_DAY = 24 * 60
# A window of one weekday that falls into the hour that summer time skips opens a week later.
_FARTHEST = 15 * _DAY * 60
_Zone = Optional[tzinfo]


@dataclass(frozen=True)
class Window:
    """`days`: the weekdays on which it opens, 0 is Monday. `begin`, `end`: minutes of the day.

    An `end` before `begin` is on the next day. `zone` None is this machine's.
    """

    text: str
    days: frozenset[int]
    begin: int
    end: int
    zone: _Zone = None

    def is_open(self, now: float) -> bool:
        """Say whether it is open at a time, in seconds since the epoch."""
        local = self._local(now)
        today, minute = local.weekday(), local.hour * 60 + local.minute
        if self.begin < self.end:
            return today in self.days and self.begin <= minute < self.end
        return (today in self.days and minute >= self.begin) or ((today - 1) % 7 in self.days and minute < self.end)

    def closed(self, now: float, again: str) -> Problem | None:
        """Return why nothing may begin now, and when `again`, a command, may run; None if it is open."""
        if self.is_open(now):
            return None
        opens = next(filter(self.is_open, range(int(now) // 60 * 60 + 60, int(now) + _FARTHEST, 60)))
        what = f"not run: outside of the window {self.text}"
        seen = f"it is {self._local(now):%a %Y-%m-%d %H:%M %Z}"
        return Problem(what, seen, f"it opens {self._local(opens):%a %Y-%m-%d %H:%M %Z}; then: {again}")

    def _local(self, now: float) -> datetime:
        return datetime.fromtimestamp(now, timezone.utc).astimezone(self.zone)


def parse_window(text: str, option: str = "--window") -> Window | None:
    """Return the window, None for an empty text. Raises GpuprovError (exit code 2)."""
    if not text:
        return None
    found = _FORM.fullmatch(text.strip())
    days = _days(found[1] or "mon-sun") if found else frozenset()
    if found is None or not days:
        example = f"for example {option} 'Sat 02:00-06:00', 'Mon-Fri 22:00-04:00 Europe/Berlin'"
        raise UsageError(f"{option} takes days, times and maybe a time zone, not {text!r}", "", example)
    from zoneinfo import ZoneInfo  # slow to load

    begin, end = (int(found[hour]) * 60 + int(found[hour + 1]) for hour in (2, 4))
    try:
        zone = ZoneInfo(found[6]) if found[6] else None
    except (OSError, ValueError, KeyError) as error:
        step = "take a name that `timedatectl list-timezones` shows; it needs the package tzdata"
        raise UsageError(f"{option} has an unknown time zone {found[6]!r}", str(error), step) from None
    return Window(text.strip(), days, begin, end % _DAY, zone)


def _days(text: str) -> frozenset[int]:
    """Return the weekdays of `Mon-Fri,Sun`; none if a name is wrong."""
    days: set[int] = set()
    for part in text.lower().split(","):
        first, _, last = part.partition("-")
        if first not in _DAYS or (last or first) not in _DAYS:
            return frozenset()
        begin = _DAYS.index(first)
        days |= {(begin + one) % 7 for one in range((_DAYS.index(last or first) - begin) % 7 + 1)}
    return frozenset(days)
