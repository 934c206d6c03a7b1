"""Tables that ship as data files beside this module, and what a run has in their place. Never fetches.

A request may bring newer tables: the site's releases and servers, the controller's advisories and known problems. A
driver release that is not in the table of releases is installed as well, by its full version; branches of `newest` may
lack a digest: nobody has published one.
"""

from __future__ import annotations

import functools
import json
import pkgutil
import re
from collections.abc import Mapping
from datetime import date
from typing import Any, Callable, TypeVar

from gpuprov.protocol.codec import load
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import GpuprovError, UsageError, require_format
from gpuprov.protocol.versions import version_numbers

RELEASES, ADVISORIES, SERVERS, KNOWN_PROBLEMS = "driver_releases", "advisories", "servers", "known_problems"
MODELS, XIDS, FAILURES, HEALTH, MIG_CONFIGS = "models", "xids", "failures", "health", "mig_configs"
# Those that a request may replace.
NAMES = RELEASES, ADVISORIES, SERVERS, KNOWN_PROBLEMS, MODELS, MIG_CONFIGS
T = TypeVar("T")
FORMAT = 1
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_RELEASE = re.compile(r"\d{3,4}\.\d{1,4}(\.\d{1,4}){0,2}")
_MONTH = re.compile(r"\d{4}-\d{2}|")
# The branch that is supported longest (580 is the long-term one until June 2028) and serves Maxwell to Blackwell.
LONG_TERM_BRANCH = "580"


@functools.cache
def packaged(name: str) -> Any:
    """Return the content of a table's data file, without its notes, which are for people."""
    return parse(pkgutil.get_data("gpuprov.protocol", f"{name}.json") or b"")


def parse(content: bytes) -> Any:
    """Return a table without its notes. Raises ValueError, or RecursionError, for what is not JSON."""
    return json.loads(content, object_hook=lambda one: {key: one[key] for key in one if key != "note"})


@functools.cache
def rows(name: str, key: str, kind: type[T]) -> tuple[T, ...]:
    """Return the rows of a list in a packaged table, each of a dataclass."""
    return loaded(packaged(name)[key], kind)


def loaded(given: list[dict[str, Any]], kind: type[T]) -> tuple[T, ...]:
    """Return rows as dataclasses; one with `like` has everything else from the row of that id and version.

    Raises ValueError that names a wrong field.
    """
    named = {f"{one.get('id')} {one.get('version', '')}".strip(): one for one in given}

    def whole(row: dict[str, Any]) -> dict[str, Any]:
        parent = whole(named[row["like"]]) if "like" in row else {}
        return {**parent, **{name: value for name, value in row.items() if name != "like"}}

    return tuple(load(kind, whole(one), trusted=True, exact=True) for one in given)


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of a run: the `sent` ones, which have been validated, and the packaged ones for all others.

    A machine is looked at with them: core/system.py has those of its run, facts those that they were gathered with.
    """

    sent: Mapping[str, Any] = field(default_factory=dict)

    def table(self, name: str) -> Any:
        """Return a table's content."""
        return self.sent.get(name) or packaged(name)

    def with_table(self, name: str, content: Any) -> Tables:
        """Return these tables with another one of that name."""
        return replace(self, sent={**self.sent, name: content})

    def server(self, name: str) -> str:
        """Return the URL of a distribution's server, without a slash at its end; a site's table may name some only."""
        return str(self.table(SERVERS)["servers"].get(name) or packaged(SERVERS)["servers"][name]).rstrip("/")

    def addresses(self, url: str) -> tuple[str, ...]:
        """Return a file's URL, and its URL on the second server if it is on a server that has one (NAME and NAME-2).

        A site that replaces only the first one means no second one.
        """
        names, own = packaged(SERVERS)["servers"], self.table(SERVERS)["servers"]
        seconds = [name for name in names if name.endswith("-2") and (name in own or name[:-2] not in own)]
        pairs = ((self.server(name[:-2]), self.server(name)) for name in seconds)
        return url, *(second + url[len(first) :] for first, second in pairs if url.startswith(f"{first}/"))

    def branches(self) -> tuple[str, ...]:
        """Return the branches with a known release, oldest first."""
        return tuple(sorted(self.table(RELEASES)["newest"], key=version_numbers))

    def resolved(self, version: str) -> str:
        """Return the release that is meant: `580` is the newest known of its branch, `latest` of the long-term one.

        Anything else, and a branch that is not known, is returned as it is.
        """
        branch = LONG_TERM_BRANCH if version == "latest" else version
        return str(self.table(RELEASES)["newest"].get(branch, version))

    def announced(self, branch: str) -> str:
        """Return the day (YYYY-MM-DD) on which a branch appeared of which no release is known, "" for any other."""
        return str(self.table(RELEASES).get("announced", {}).get(branch, ""))

    def known_sha256(self, version: str, architecture: str) -> str:
        """Return the SHA-256 of a release's .run file, "" if it is not known. A site's table wins over ours."""
        for source in (self.table(RELEASES), packaged(RELEASES)):
            if digest := source["sha256"].get(architecture, {}).get(version, ""):
                return str(digest)
        return ""

    def support_end(self, version: str) -> str:
        """Return the month (YYYY-MM) in which the support of a release's branch ends or ended, "" if not known."""
        return str(self.table(RELEASES)["support_ends"].get(version.partition(".")[0], ""))


PACKAGED = Tables()


def checked_rows(
    data: Any, key: str, kind: type[T], fits: Callable[[T], object], words: tuple[str, str, str]
) -> list[T]:
    """Return the rows of a dated table, each of a dataclass, `kind`; a row that does not `fits` is wrong.

    `words`: what the table is of, where it comes from, the next step. Raises GpuprovError with them.
    """
    try:
        require_table(data, *words[:2])
        if not DATE.fullmatch(data["updated"]):
            raise ValueError("updated is not a date")
        date.fromisoformat(data["updated"])
        rows = [load(kind, one, trusted=True, exact=True) for one in data[key]]
        wrong = next((given for given, row in zip(data[key], rows) if not fits(row)), None)
        if wrong is not None:
            raise ValueError(f"a wrong row: {str(wrong)[:120]}")
        return rows
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        name, origin, hint = words
        seen = f"{origin}: {str(error)[:200]}".lstrip(": ")
        raise GpuprovError(f"the table of {name} is not valid", seen, hint) from None


def require_table(data: Any, what: str, origin: str) -> Mapping[str, Any]:
    """Return a table (of `what`). Raises ValueError for data of another format, UsageError for a later one."""
    require_format(data, FORMAT, f"the table of {what}", origin)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    return data


def invalid_table(name: str, what: str, origin: str, fault: str) -> UsageError:
    """Return the error for a site's table (of `what`) in which something is wrong."""
    step = f"its form is that of gpuprov/protocol/{name}.json"
    return UsageError(f"the table of {what} is not valid", f"{origin}: {fault}", step)


def checked_releases(data: Any, origin: str) -> Mapping[str, Any]:
    """Return a site's table if it is sound. Raises GpuprovError (exit code 2) that names what is wrong in it."""
    try:
        table = require_table(data, "driver releases", origin)
        parts: list[Any] = [table.get(name) for name in ("newest", "sha256", "support_ends")]
        if not all(isinstance(one, dict) for one in parts):
            raise ValueError("newest, sha256 and support_ends must be mappings")
        newest, digests, ends = parts
        for branch, release in newest.items():
            if not _RELEASE.fullmatch(str(release)) or str(release).partition(".")[0] != branch:
                raise ValueError(f"newest: {branch}: {str(release)[:40]!r} is no release of that branch")
        if LONG_TERM_BRANCH not in newest:
            raise ValueError(f"newest lacks the long-term branch {LONG_TERM_BRANCH}")
        for architecture, rows in digests.items():
            for release, digest in rows.items() if isinstance(rows, dict) else [("", "")]:
                if not _RELEASE.fullmatch(str(release)) or not re.fullmatch("[0-9a-f]{64}", str(digest)):
                    raise ValueError(f"sha256: {architecture}: {str(release)[:40]!r} has no SHA-256 digest")
        if not isinstance(table.get("announced", {}), dict):
            raise ValueError("announced must be a mapping")
        if wrong := next((branch for branch, month in ends.items() if not _MONTH.fullmatch(str(month))), ""):
            raise ValueError(f"support_ends: {wrong}: not a month such as 2028-06")
    except ValueError as error:
        raise invalid_table(RELEASES, "driver releases", origin, str(error)) from None
    return table
