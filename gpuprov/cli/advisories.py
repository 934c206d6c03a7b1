"""`gpuprov advisories`: list known security holes of NVIDIA's driver and toolkit, and update the list."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuprov.fleet.standard_streams import say, say_text
from gpuprov.protocol.errors import GpuprovError, UsageError, from_os_error
from gpuprov.protocol.words import counted

if TYPE_CHECKING:
    from gpuprov.protocol.advisories import Advisory

_OLD_DAYS = 60


@click.group(invoke_without_command=True, short_help="Known security holes, and how old this knowledge is.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with each CVE.")
@click.pass_context
def advisories(context: click.Context, as_json: bool) -> None:
    """List the known security holes of NVIDIA's driver and container toolkit, and how old this knowledge is.

    \b
    Examples:
      gpuprov advisories
      gpuprov advisories update --from product-security/2026
    """
    if context.invoked_subcommand is None:
        say_text(_shown(as_json=as_json))


@advisories.command(short_help="Read security bulletins of NVIDIA's.")
@click.option("--from", "source", metavar="FILE|DIR|URL", required=True, help="CSAF documents of NVIDIA's, or a table "
              "that another gpuprov has.")  # fmt: skip
@click.option("--sha256", metavar="DIGEST", default="", help="The digest of FILE or URL. Default: in SOURCE.sha256.")
def update(source: str, sha256: str) -> None:
    """Read security bulletins; later runs send them to the hosts. Documents: github.com/NVIDIA/product-security.

    A document that is malformed, cut off or of another digest changes nothing.

    \b
    Examples:
      gpuprov advisories update --from 5861.json
      gpuprov advisories update --from https://mirror.example/advisories.json --sha256 9f86d0…
    """
    from gpuprov.agent.site_tables import advisories_table, save_advisories
    from gpuprov.protocol.advisories import merged, rows_of, table_of

    known = rows_of(advisories_table())
    fresh = [row for name, content in documents(source, sha256) for row in _rows(name, content)]
    if not fresh:
        raise UsageError(
            f"{source} has no advisory on NVIDIA's driver or container toolkit for Linux", "",
            "name CSAF documents, such as 2026/5861/5861.json"
        )  # fmt: skip
    found = merged(known, fresh)
    path = save_advisories(table_of(found, time.strftime("%Y-%m-%d", time.gmtime())))
    say(f"{path}: {counted(len(set(found)), 'advisory', 'advisories')}, new: {len(set(found) - set(known))}")


def _rows(name: str, content: bytes) -> tuple[Advisory, ...]:
    """Return the advisories of a document, or those of a gpuprov table."""
    from gpuprov.fleet.csaf import is_csaf, parse_csaf
    from gpuprov.protocol.advisories import rows_of

    try:
        data: Any = json.loads(content)
    except (ValueError, RecursionError):
        data = None
    if isinstance(data, dict) and "rows" in data and not is_csaf(data):
        return rows_of(data, name)
    return parse_csaf(content, name)


def documents(source: str, sha256: str) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each document, after checking its digest."""
    if re.match(r"(https?|file)://", source):
        yield source, _fetched(source, sha256)
        return
    path = Path(source).expanduser()
    try:
        if not path.is_dir():
            yield source, _checked(source, path.read_bytes(), sha256 or _published_digest(path))
            return
        for file in sorted(path.rglob("*.json")):
            content = file.read_bytes()
            # Each bulletin has records of its CVEs beside it, one per file.
            if b'"dataType"' in content and b'"CVE_RECORD"' in content:
                continue
            yield str(file), _checked(str(file), content, _published_digest(file))
    except OSError as error:
        raise from_os_error(f"{source} can't be read", error, "check the path") from None


def _published_digest(path: Path) -> str:
    file = path.with_name(f"{path.name}.sha256")
    return _digest_in(file.read_text(encoding="ascii", errors="replace"), str(file)) if file.is_file() else ""


def _digest_in(text: str, origin: str) -> str:
    found = re.search(r"\b[0-9a-fA-F]{64}\b", text)
    if found is None:
        raise GpuprovError(f"{origin} has no SHA-256 digest", text[:80], "get it again, or give --sha256")
    return found[0].lower()


def _checked(name: str, content: bytes, sha256: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if sha256 and found != sha256.lower():
        raise GpuprovError(
            f"the advisory {name} is not the one that was asked for, so nothing was changed",
            f"its SHA-256 is {found}, expected {sha256}", "get it again, or correct the digest",
        )  # fmt: skip
    return content


def _fetched(url: str, sha256: str) -> bytes:
    from gpuprov.core.download import fetch, fetch_small
    from gpuprov.core.system import System
    from gpuprov.protocol.secrets import masked

    system = System()
    if not sha256 and url.startswith("http:"):
        raise UsageError("an advisory over http needs a digest", masked(url), "give --sha256, or use https")
    digest = sha256 or _digest_in(fetch_small(system, f"{url}.sha256").decode("ascii", "replace"), f"{url}.sha256")
    folder = system.temporary_directory("/tmp")
    try:
        fetch(system, url, f"{folder}/advisory", sha256=digest, tell=lambda *_: None)
        return Path(f"{folder}/advisory").read_bytes()
    finally:
        system.remove_tree(folder)


def _shown(*, as_json: bool) -> str:
    from gpuprov.agent.site_tables import advisories_path, advisories_table
    from gpuprov.protocol.advisories import rows_of, table_of
    from gpuprov.protocol.tables import ADVISORIES, packaged

    data = advisories_table()
    rows = rows_of(data)
    if as_json:
        return json.dumps(table_of(rows, data["updated"]))
    lines = [("bulletin", "published", "product", "branch", "fixed in", "score", "CVEs")]
    lines += [
        (one.bulletin, one.published, one.product, one.branch, one.fixed_in, f"{one.score:g}", " ".join(one.cves[:3]))
        for one in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = ["  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip() for line in lines]
    days = int((time.time() - time.mktime(time.strptime(data["updated"], "%Y-%m-%d"))) // 86400)
    origin = "this gpuprov" if data == packaged(ADVISORIES) else str(advisories_path())
    count, age = counted(len(rows), "advisory", "advisories"), counted(max(days, 0), "day")
    summary = f"{count}, of {data['updated']} ({age} ago), from {origin}"
    hint = "; for newer ones: gpuprov advisories update --from URL" if days > _OLD_DAYS else ""
    return "\n".join((*shown, "", summary + hint))
