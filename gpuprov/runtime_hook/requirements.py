"""NVIDIA_REQUIRE_*: expressions that an image holds against the host's driver, and the words for a driver too old.

Blanks separate alternatives, commas separate conditions that must all hold: `cuda>=12.4,driver>=550 brand=tesla`.
Table: NVIDIA CUDA Toolkit release notes, "CUDA Toolkit and Corresponding Driver Versions" (Linux x86_64).
"""

from __future__ import annotations

from .errors import Refused

# CUDA release, and the first driver that has it.
FIRST_DRIVERS = (
    ("8.0", "367.48"), ("9.0", "384.81"), ("9.1", "390.46"), ("9.2", "396.26"), ("10.0", "410.48"),
    ("10.1", "418.39"), ("10.2", "440.33"), ("11.0", "450.36.06"), ("11.1", "455.23"), ("11.2", "460.27.03"),
    ("11.3", "465.19.01"), ("11.4", "470.42.01"), ("11.5", "495.29.05"), ("11.6", "510.39.01"), ("11.7", "515.43.04"),
    ("11.8", "520.61.05"), ("12.0", "525.60.13"), ("12.1", "530.30.02"), ("12.2", "535.54.03"), ("12.3", "545.23.06"),
    ("12.4", "550.54.14"), ("12.5", "555.42.02"), ("12.6", "560.28.03"), ("12.8", "570.26"), ("12.9", "575.51.03"),
    ("13.0", "580.65.06"), ("13.1", "590.44.01"), ("13.2", "595.45.04"), ("13.3", "610.43.02"),
    # The release notes of CUTLASS 4.8 name the branch alone: R615 comes with CUDA 13.4.
    ("13.4", "615"),
)  # fmt: skip
_VERSIONS = ("cuda", "driver", "arch")
_PROPERTIES = (*_VERSIONS, "brand")
# An image of NVIDIA's names some thirty alternatives: nobody reads them in an error line.
_MOST_NAMED = 3
_MOST_DIGITS = 4000
_OPERATORS = ("!=", "<=", ">=", "=", "<", ">")


def version_key(text: str) -> tuple[int, ...]:
    """Return a version that compares; missing components count as 0. Raises ValueError for anything but numbers."""
    parts = text.split(".")
    # Of more digits, some versions of Python make no number, and others take minutes.
    if not all(part.isascii() and part.isdigit() and len(part) < _MOST_DIGITS for part in parts):
        raise ValueError(f"{text!r} is no version")
    key = [int(part) for part in parts]
    while key and key[-1] == 0:
        key.pop()
    return tuple(key)


def cuda_version_of_driver(driver: str) -> str:
    """Return the newest CUDA release that a driver has, nothing for one older than all, or of a later branch than all.

    What a later branch has is not known here; to take it for the last known one would refuse images that run on it.
    """
    if version_key(driver)[:1] > version_key(FIRST_DRIVERS[-1][1])[:1]:
        return ""
    found = [cuda for cuda, first in FIRST_DRIVERS if version_key(first) <= version_key(driver)]
    return found[-1] if found else ""


def require(expressions: list[str], host: dict[str, str]) -> None:
    """Raise Refused for the first expression that the host (cuda, driver, arch, brand → value) does not satisfy.

    A condition on a property that nobody knows is dropped, as NVIDIA's toolkit does it; an alternative of such
    conditions alone is dropped with them, and the others decide.
    """
    for expression in expressions:
        alternatives = [part for part in expression.split(" ") if part]
        decided = False
        for alternative in alternatives:
            conditions = _known_conditions(alternative)
            if conditions and all(_condition_holds(*condition, host) for condition in conditions):
                break
            decided = decided or bool(conditions)
        else:
            if decided:
                raise Refused(_violation(alternatives, host))


def check(expressions: list[str], host: dict[str, str]) -> tuple[str, str]:
    """Return (`satisfied`, `violated` or `invalid`, reason): each condition is looked at before any is held up."""
    state = "invalid"
    try:
        for part in filter(None, ",".join(expressions).replace(" ", ",").split(",")):
            _condition(part)
        state = "violated"
        require(expressions, host)
    except Refused as refused:
        return state, str(refused)
    return "satisfied", ""


def _known_conditions(alternative: str) -> list[tuple[str, str, str]]:
    conditions = [_condition(part) for part in alternative.split(",") if part]
    return [condition for condition in conditions if condition[0] in _PROPERTIES]


def _condition(text: str) -> tuple[str, str, str]:
    """Return (property, operator, value). Raises Refused for what is no condition."""
    places = [place for place in (text.find(mark) for mark in "!<>=") if place >= 0]
    place = min(places) if places else 0
    operator = next((mark for mark in _OPERATORS if text.startswith(mark, place)), "")
    name, value = text[:place], text[place + len(operator) :]
    if not name or not operator or not value or value[0] in "!<>=":
        raise Refused(f"the image's requirement {text!r} is no condition such as cuda>=12.4: correct NVIDIA_REQUIRE_*")
    if name == "brand" and operator not in ("=", "!="):
        raise Refused(f"the image's requirement {text!r} can't be: brands are = or !=")
    if name in _VERSIONS:
        try:
            version_key(value)
        except ValueError as error:
            raise Refused(f"the image's requirement {text!r} can't be held against this host: {error}") from None
    return name, operator, value


def _condition_holds(name: str, operator: str, value: str, host: dict[str, str]) -> bool:
    # What this host can't tell (the brand, say, without NVML) refuses nobody.
    if not host.get(name):
        return True
    if name == "brand":
        return (host[name].lower() == value.lower()) is (operator == "=")
    try:
        ours, theirs = version_key(host[name]), version_key(value)
    except ValueError as error:
        raise Refused(f"the CDI specification's {name} can't be compared: {error}") from None
    return {
        "=": ours == theirs, "!=": ours != theirs, "<": ours < theirs,
        "<=": ours <= theirs, ">": ours > theirs, ">=": ours >= theirs,
    }[operator]  # fmt: skip


def _violation(alternatives: list[str], host: dict[str, str]) -> str:
    asked = " or ".join(alternatives[:_MOST_NAMED])
    if len(alternatives) > _MOST_NAMED:
        asked += f" or {len(alternatives) - _MOST_NAMED} more"
    message = f"requires {asked}, this host's driver {host.get('driver', '?')} supports {host.get('cuda', '?')}"
    advice = next(filter(None, (_advice(alternative, host) for alternative in alternatives)), "")
    return f"{message}: {advice or 'use another image, or NVIDIA_DISABLE_REQUIRE=1 if you know better'}"


def _advice(alternative: str, host: dict[str, str]) -> str:
    """Return what makes an alternative hold, nothing where a newer driver alone would not."""
    failed = [condition for condition in _known_conditions(alternative) if not _condition_holds(*condition, host)]
    if not failed:
        return ""
    drivers = [_driver_needed(*condition, host) for condition in failed]
    if not all(drivers):
        return ""
    advice = f"update the driver to ≥ {max(drivers, key=version_key)}"
    by_cuda = any(name == "cuda" for name, _, _ in failed)
    return f"{advice} or use an image for CUDA ≤ {host['cuda']}" if by_cuda else advice


def _driver_needed(name: str, operator: str, value: str, host: dict[str, str]) -> str:
    """Return the driver with which a failed condition holds, nothing if no newer one is known to do it."""
    if name not in ("cuda", "driver") or operator not in (">=", ">", "=") or _condition_holds(name, ">", value, host):
        return ""
    if name == "driver":
        return "" if operator == "=" else value
    wanted = version_key(value)
    enough = (
        first
        for cuda, first in FIRST_DRIVERS
        if version_key(cuda) > wanted or (version_key(cuda) == wanted and operator != ">")
    )
    return next(enough, "").partition(".")[0]
