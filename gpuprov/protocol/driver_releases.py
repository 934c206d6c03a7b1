"""Driver releases: the newest of each branch, digests, and until when a branch is supported. Pure.

The table is driver_releases.json; a site may give another (gpuprov_driver_releases). A release that is not in it is
installed as well, by its full version. Branches of `newest` may lack a digest: nobody has published one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.tables import RELEASES, packaged, table
from gpuprov.protocol.versions import version_numbers

_FORMAT = 1
_RELEASE = re.compile(r"\d{3,4}\.\d{1,4}(\.\d{1,4}){0,2}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MONTH = re.compile(r"\d{4}-\d{2}|")
# The branch that is supported longest (580 is the long-term one until June 2028) and serves Maxwell to Blackwell.
LONG_TERM_BRANCH = "580"


def branches() -> tuple[str, ...]:
    """Return the branches with a known release, oldest first."""
    return tuple(sorted(table(RELEASES)["newest"], key=version_numbers))


def resolved(version: str) -> str:
    """Return the release that is meant: `580` is the newest known of its branch, `latest` that of the long-term one.

    Anything else, and a branch that is not known, is returned as it is.
    """
    found: str = table(RELEASES)["newest"].get(LONG_TERM_BRANCH if version == "latest" else version, version)
    return found


def announced(branch: str) -> str:
    """Return the day (YYYY-MM-DD) on which a branch appeared of which no release is known, nothing for any other."""
    return str(table(RELEASES).get("announced", {}).get(branch, ""))


def known_sha256(version: str, architecture: str) -> str:
    """Return the SHA-256 of a release's .run file, nothing if it is not known. A site's table wins over ours."""
    for source in (table(RELEASES), packaged(RELEASES)):
        if digest := source["sha256"].get(architecture, {}).get(version, ""):
            return str(digest)
    return ""


def support_end(version: str) -> str:
    """Return the month (YYYY-MM) in which the support of a release's branch ends or ended, nothing if not known."""
    return str(table(RELEASES)["support_ends"].get(version.partition(".")[0], ""))


def checked_releases(data: Any, origin: str) -> Mapping[str, Any]:
    """Return a site's table if it is sound. Raises GpuprovError (exit code 2) that names what is wrong in it."""
    fault = _fault(data)
    if fault:
        raise GpuprovError(
            "the table of driver releases is not valid", f"{origin}: {fault}",
            "its form is that of gpuprov/protocol/driver_releases.json", exit_code=ExitCode.USAGE,
        )  # fmt: skip
    found: Mapping[str, Any] = data
    return found


def _fault(data: Any) -> str:
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        return f"its format is not {_FORMAT}"
    parts: list[Any] = [data.get(name) for name in ("newest", "sha256", "support_ends")]
    if not all(isinstance(one, dict) for one in parts):
        return "newest, sha256 and support_ends must be mappings"
    newest, digests, ends = parts
    for branch, release in newest.items():
        if not _RELEASE.fullmatch(str(release)) or str(release).partition(".")[0] != branch:
            return f"newest: {branch}: {str(release)[:40]!r} is no release of that branch"
    if LONG_TERM_BRANCH not in newest:
        return f"newest lacks the long-term branch {LONG_TERM_BRANCH}"
    for architecture, rows in digests.items():
        for release, digest in rows.items() if isinstance(rows, dict) else [("", "")]:
            if not _RELEASE.fullmatch(str(release)) or not _SHA256.fullmatch(str(digest)):
                return f"sha256: {architecture}: {str(release)[:40]!r} has no SHA-256 digest"
    if not isinstance(data.get("announced", {}), dict):
        return "announced must be a mapping"
    wrong = next((branch for branch, month in ends.items() if not _MONTH.fullmatch(str(month))), "")
    return f"support_ends: {wrong}: not a month such as 2028-06" if wrong else ""
