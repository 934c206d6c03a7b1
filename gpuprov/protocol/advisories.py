"""Known security holes of NVIDIA's driver and container toolkit, by NVIDIA's security bulletins. Pure.

The table is advisories.json: a row for each bulletin, product and driver branch. cli/advisories.py makes rows of
NVIDIA's CSAF documents. Every bulletin says: an earlier branch without a listed update may be affected too, and gets no
fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from gpuprov.protocol.dataclass import asdict, dataclass
from gpuprov.protocol.tables import ADVISORIES, DATE, FORMAT, LONG_TERM_BRANCH, Tables, checked_rows
from gpuprov.protocol.versions import version_numbers

DRIVER, TOOLKIT = PRODUCTS = ("driver", "container toolkit")
TOOLKIT_PACKAGE = "nvidia-container-toolkit"
# The qualitative ratings of CVSS 3.1 (first.org, section 5), as gpuprov_refuse_advisories names them.
THRESHOLDS = {"none": 100.0, "high": 7.0, "critical": 9.0}
_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}")
_BULLETIN = re.compile(r"\d{4}/\d{1,8}")
_BRANCH = re.compile(r"[0-9]{1,9}")
_CVE = re.compile(r"CVE-\d{4}-\d{4,7}")


@dataclass(frozen=True)
class Advisory:
    """What a bulletin says of a product; `branch` is a driver's, `score` the highest CVSS base score among `cves`.

    `cves`: by name, not all of them in every row; releases of the branch before `fixed_in` are affected.
    """

    bulletin: str
    published: str
    product: str
    branch: str
    fixed_in: str
    score: float
    cves: tuple[str, ...] = ()


@dataclass(frozen=True)
class Vulnerabilities:
    """The known holes of one installed version: bulletins, the worst score, and the release to take instead.

    `unfixed_branch`: no release of the installed branch fixes them all.
    """

    product: str
    version: str
    advisories: tuple[Advisory, ...]
    fixed_in: str
    unfixed_branch: bool = False

    @property
    def score(self) -> float:
        return max(one.score for one in self.advisories)

    @property
    def bulletins(self) -> str:
        """Each bulletin with its score, the newest first."""
        return ", ".join(f"{one.bulletin} ({one.score:g})" for one in self.advisories)

    def __str__(self) -> str:
        bulletins = f"NVIDIA {'bulletins' if len(self.advisories) > 1 else 'bulletin'} {self.bulletins}"
        if self.unfixed_branch:
            what = f"{self.product} {self.version}: branch {_branch(self.version)} gets no security fixes any more"
            return f"{what}, and may have the holes of {bulletins}; fixed in {self.fixed_in}"
        return f"{self.product} {self.version} has known security holes: {bulletins}; fixed in {self.fixed_in}"


def advisories(tables: Tables) -> tuple[Advisory, ...]:
    """Return all known advisories, the newest first."""
    return rows_of(tables.table(ADVISORIES))


def updated(tables: Tables) -> str:
    """Return the day on which the table of advisories was made (YYYY-MM-DD)."""
    return str(tables.table(ADVISORIES)["updated"])


def vulnerabilities(product: str, version: str, known: Iterable[Advisory]) -> Vulnerabilities | None:
    """Return the known holes of a version of a product, None if there are none or the version is unknown."""
    if not version_numbers(version):
        return None
    rows = [one for one in known if one.product == product]
    bulletins = dict.fromkeys(one.bulletin for one in rows)
    hits = (_affected(product, version, [one for one in rows if one.bulletin == name]) for name in bulletins)
    found = tuple(one for one in hits if one is not None)
    if not found:
        return None
    unfixed = product == DRIVER and any(one.branch != _branch(version) for one in found)
    return Vulnerabilities(product, version, found, _fix(version, rows, found, unfixed), unfixed)


def known_vulnerabilities(versions: Mapping[str, str], tables: Tables) -> tuple[Vulnerabilities, ...]:
    """Return the known security holes of these versions of the driver and of NVIDIA's toolkit."""
    known = advisories(tables)
    found = (vulnerabilities(DRIVER, versions["driver"], known), vulnerabilities(TOOLKIT, versions["toolkit"], known))
    return tuple(one for one in found if one is not None)


def _branch(version: str) -> str:
    return str(version_numbers(version)[0])


def _affected(product: str, version: str, members: list[Advisory]) -> Advisory | None:
    """Return the row of a bulletin by which a version is affected."""
    if product != DRIVER:
        return next((one for one in members if version_numbers(version) < version_numbers(one.fixed_in)), None)
    own = next((one for one in members if one.branch == _branch(version)), None)
    if own is not None:
        return own if version_numbers(version) < version_numbers(own.fixed_in) else None
    # An unlisted branch is affected if a later one is listed; a branch that came after all of them is not.
    later = [one for one in members if int(one.branch) > int(_branch(version))]
    return min(later, key=lambda one: int(one.branch), default=None)


def _fix(version: str, rows: list[Advisory], found: Iterable[Advisory], unfixed: bool) -> str:
    """Return the oldest release that has all fixes: of the own branch, else of the long-term one or a later one."""
    last = max((one.fixed_in for one in found), key=version_numbers)
    if not unfixed:
        return last
    newest, own = rows[0].bulletin, int(_branch(version))
    later = {one.branch: one.fixed_in for one in rows if one.bulletin == newest and int(one.branch) > own}
    return later.get(LONG_TERM_BRANCH) or min(later.values() or [last], key=version_numbers)


# -- the table as data -----------------------------------------------------------------------------------------------


def rows_of(data: Any, origin: str = "") -> tuple[Advisory, ...]:
    """Return the rows of a table, the newest first. Raises GpuprovError that names what is wrong in it."""
    hint = "gpuprov advisories update --from FILE makes it from NVIDIA's CSAF documents"
    rows = checked_rows(data, "rows", Advisory, _fits, ("security advisories", origin, hint))
    return tuple(sorted(rows, key=lambda one: (one.published, one.bulletin, one.branch), reverse=True))


def _fits(one: Advisory) -> object:
    return (
        _BULLETIN.fullmatch(one.bulletin) and DATE.fullmatch(one.published) and _VERSION.fullmatch(one.fixed_in)
        and one.product in PRODUCTS and 0 <= one.score <= 10 and all(map(_CVE.fullmatch, one.cves))
        and (_BRANCH.fullmatch(one.branch) if one.product == DRIVER else not one.branch)
    )  # fmt: skip


def table_of(rows: Iterable[Advisory], day: str) -> dict[str, Any]:
    """Return the table of these rows as JSON values; the same rows and day, the same table."""
    ordered = sorted(set(rows), key=lambda one: (one.published, one.bulletin, one.product, one.branch), reverse=True)
    return {"format": FORMAT, "updated": day, "rows": [{**asdict(one), "cves": list(one.cves)} for one in ordered]}


def merged(old: Iterable[Advisory], new: Iterable[Advisory]) -> tuple[Advisory, ...]:
    """Return both, where a bulletin of `new` takes the place of all that `old` has of it."""
    fresh = tuple(new)
    again = {one.bulletin for one in fresh}
    return (*(one for one in old if one.bulletin not in again), *fresh)
