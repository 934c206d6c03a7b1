"""`gpuprov advisories`: list known security holes and problems of NVIDIA's driver and toolkit, and update the lists.

Updates are NVIDIA's security bulletins as CSAF 2.0 documents (github.com/NVIDIA/product-security). A product id names
platform, product and version: `linuxr580_tesla_all_driver_versions_prior_to_580_178_04` is affected,
`linuxr580_tesla_580_178_04` is fixed. Other platforms and products of a bulletin are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from gpuprov.fleet.standard_streams import say, say_text
from gpuprov.protocol.advisories import DRIVER, TOOLKIT, Advisory, merged, rows_of, table_of
from gpuprov.protocol.codec import json_at
from gpuprov.protocol.errors import GpuprovError, LaterFormatError, UsageError, os_errors
from gpuprov.protocol.known_problems import problems_of
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.tables import ADVISORIES, KNOWN_PROBLEMS, packaged
from gpuprov.protocol.versions import version_numbers
from gpuprov.protocol.words import counted

_OLD_DAYS = 60
# The same release serves all three; data-centre rows count where a bulletin has them.
_SERIES = ("tesla", "nvidia_rtx_quadro_nvs", "geforce")
_DRIVER = re.compile(rf"linuxr(?P<branch>\d{{3,4}})_(?P<series>{'|'.join(_SERIES)})_(?P<rest>.+)")


@click.group(invoke_without_command=True, short_help="Known security holes and problems, and how old this is.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with each CVE.")
@click.pass_context
def advisories(context: click.Context, as_json: bool) -> None:
    """List the known security holes of NVIDIA's driver and container toolkit, the combinations that are known to break,
    and how old this knowledge is.

    \b
    Examples:
      gpuprov advisories
      gpuprov advisories update --from product-security/2026
    """
    if context.invoked_subcommand is None:
        say_text(_shown(as_json=as_json))


@advisories.command(short_help="Read security bulletins of NVIDIA's.")
@click.option("--from", "source", metavar="FILE|DIR|URL", required=True, help="CSAF documents of NVIDIA's, or a table "
              "that another gpuprov has, of known problems too.")  # fmt: skip
@click.option("--sha256", metavar="DIGEST", default="", help="The digest of FILE or URL. Default: in SOURCE.sha256.")
def update(source: str, sha256: str) -> None:
    """Read security bulletins; later runs send them to the hosts. Documents: github.com/NVIDIA/product-security.

    A document that is malformed, cut off or of another digest changes nothing.

    \b
    Examples:
      gpuprov advisories update --from 5861.json
      gpuprov advisories update --from https://mirror.example/advisories.json --sha256 9f86d0…
    """
    from gpuprov.agent.site_tables import save_table, user_table

    read = [_read(*document) for document in documents(source, sha256)]
    try:
        known = rows_of(user_table(ADVISORIES))
    except LaterFormatError:
        raise
    except GpuprovError as error:  # its next step is this command
        say(f"warning: {error.problems[0].what}, and is made again", err=True)
        known = rows_of(packaged(ADVISORIES))
    fresh, own = [row for rows, _ in read for row in rows], [data for _, data in read if data is not None]
    if own:
        unused = "; not used: this gpuprov's own are newer" * (own[-1]["updated"] < packaged(KNOWN_PROBLEMS)["updated"])
        say(f"{save_table(KNOWN_PROBLEMS, own[-1])}: {counted(len(own[-1]['problems']), 'known problem')}{unused}")
        if not fresh:
            return
    if not fresh:
        what = f"{masked(source)} has no advisory on NVIDIA's driver or container toolkit for Linux"
        raise UsageError(what, "", "name CSAF documents, such as 2026/5861/5861.json")
    found = merged(known, fresh)
    # With a clock that is wrong, it would be older than the packaged one, and not used.
    day = max(time.strftime("%Y-%m-%d", time.gmtime()), packaged(ADVISORIES)["updated"])
    path = save_table(ADVISORIES, table_of(found, day))
    say(f"{path}: {counted(len(set(found)), 'advisory', 'advisories')}, new: {len(set(found) - set(known))}")


def _read(name: str, content: bytes) -> tuple[tuple[Advisory, ...], dict[str, Any] | None]:
    """Return the advisories of a document or of a gpuprov table, and the table of known problems, if it has one."""
    data = json_at(content)
    if not isinstance(data, dict) or not {"rows", "problems"} & {*data}:
        rows = parse_csaf(content, name)
        try:  # once in the table, such a row would end each later run
            rows_of(table_of(rows, packaged(ADVISORIES)["updated"]))
        except GpuprovError as error:
            what = f"the advisory {name} has what gpuprov does not know, so nothing was changed"
            raise GpuprovError(what, error.problems[0].evidence, "leave it out, or use a newer gpuprov") from None
        return rows, None
    own = data if "problems" in data else data.get("known_problems")
    if own is not None:
        problems_of(own, name)
    return rows_of(data, name) if "rows" in data else (), own


def documents(source: str, sha256: str) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each document, after checking its digest."""
    if re.match(r"(https?|file)://", source):
        yield masked(source), _fetched(source, sha256)
        return
    from gpuprov.core.files import expanded

    path = expanded(source)
    if sha256 and path.is_dir():
        raise UsageError("--sha256 is the digest of one document", f"{source} is a folder", "name a file")
    with os_errors(f"{source} can't be read", "check the path"):
        if not path.is_dir():
            yield source, _checked(source, path.read_bytes(), sha256 or _published_digest(path))
            return
        for file in sorted(path.rglob("*.json")):
            content = file.read_bytes()
            # Each bulletin has records of its CVEs beside it, one per file.
            if b'"dataType"' in content and b'"CVE_RECORD"' in content:
                continue
            yield str(file), _checked(str(file), content, _published_digest(file))


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
        what = f"the advisory {name} is not the one that was asked for, so nothing was changed"
        raise GpuprovError(what, f"its SHA-256 is {found}, expected {sha256}", "get it again, or correct the digest")
    return content


def _fetched(url: str, sha256: str) -> bytes:
    from gpuprov.core.download import fetch, fetch_small
    from gpuprov.core.system import System

    system = System()
    if not sha256 and url.startswith("http:"):
        raise UsageError("an advisory over http needs a digest", masked(url), "give --sha256, or use https")
    beside = f"{url}.sha256"
    digest = sha256 or _digest_in(fetch_small(system, beside).decode("ascii", "replace"), masked(beside))
    with system.temporary_directory("/tmp") as folder:
        fetch(system, url, f"{folder}/advisory", sha256=digest, tell=lambda *_: None)
        return Path(f"{folder}/advisory").read_bytes()


def _shown(*, as_json: bool) -> str:
    from gpuprov.agent.site_tables import user_path, user_table

    data, known = user_table(ADVISORIES), user_table(KNOWN_PROBLEMS)
    rows, problems = rows_of(data), problems_of(known)
    if as_json:
        return json.dumps({**table_of(rows, data["updated"]), "known_problems": known})
    lines = [("bulletin", "published", "product", "branch", "fixed in", "score", "CVEs")]
    lines += [
        (one.bulletin, one.published, one.product, one.branch, one.fixed_in, f"{one.score:g}", " ".join(one.cves[:3]))
        for one in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines)]
    shown = ["  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip() for line in lines]
    days = int((time.time() - time.mktime(time.strptime(data["updated"], "%Y-%m-%d"))) // 86400)
    origin = "this gpuprov" if data == packaged(ADVISORIES) else str(user_path(ADVISORIES))
    count, age = counted(len(rows), "advisory", "advisories"), counted(max(days, 0), "day")
    summary = f"{count}, of {data['updated']} ({age} ago), from {origin}"
    hint = "; for newer ones: gpuprov advisories update --from URL" if days > _OLD_DAYS else ""
    broken = (
        f"{one.name} ({one.reported}): {one.combination}\n  {one.what}; fixed in: {one.fixed_in or 'not known'}\n  "
        f"{' '.join(one.sources)}"
        for one in problems
    )
    of_problems = f"{counted(len(problems), 'known problem')}, of {known['updated']}"
    return "\n".join((*shown, "", summary + hint, "", *broken, "", of_problems))


def parse_csaf(content: bytes, origin: str) -> tuple[Advisory, ...]:
    """Return the advisories of a document; none if it is about other products.

    Raises GpuprovError that names the document if it is malformed, cut off, or lacks what a row needs.
    """
    try:
        data = json.loads(content)
        # The folders of bulletins have records of single CVEs beside it.
        document = data.get("document") if isinstance(data, dict) else None
        if not isinstance(document, dict) or "csaf_version" not in document:
            raise ValueError("it is no CSAF document")
        tracking = document["tracking"]
        published = str(tracking["current_release_date"])[:10]
        bulletin = f"{str(tracking['initial_release_date'])[:4]}/{tracking['id']}"
        found: dict[tuple[str, str, str], list[tuple[str, float, str]]] = {}
        for one in data["vulnerabilities"]:
            for key, fixed_in in _rows(one):
                # Only here: a CVE of other products may have no score yet.
                kinds = ((row, kind) for row in one["scores"] for kind in ("cvss_v3", "cvss_v4") if kind in row)
                score = max(float(row[kind]["baseScore"]) for row, kind in kinds)
                found.setdefault(key, []).append((fixed_in, score, str(one["cve"])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        step = "get the document again: it is malformed or cut off"
        raise GpuprovError(f"the advisory {origin} can't be read, so nothing was changed", reason[:200], step) from None
    # Of each product and branch the first series that the bulletin has.
    chosen: dict[tuple[str, str], list[tuple[str, float, str]]] = {}
    for product, branch, series in sorted(found, key=lambda key: _SERIES.index(key[2]) if key[2] else 0):
        chosen.setdefault((product, branch), found[product, branch, series])
    return tuple(
        Advisory(
            bulletin, published, product, branch, max((fixed for fixed, _, _ in rows), key=version_numbers),
            max(score for _, score, _ in rows), tuple(sorted({cve for _, _, cve in rows})),
        )
        for (product, branch), rows in chosen.items()
    )  # fmt: skip


def _rows(vulnerability: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield (product, branch, series) and the first fixed release for each product that one CVE affects."""
    status = vulnerability["product_status"]
    fixed: dict[tuple[str, str, str], list[str]] = {}
    for name in status.get("fixed", ()):
        key, rest = _key(str(name))
        if key and re.fullmatch(r"\d+(?:_\d+)+", rest):
            fixed.setdefault(key, []).append(rest.replace("_", "."))
    for name in dict.fromkeys(map(str, status.get("known_affected", ()))):
        key, rest = _key(name)
        if not key:
            continue
        before = re.fullmatch(r".*prior_to_(?P<version>\d+(?:_\d+)+)", rest)
        releases = fixed.get(key, [])
        if not releases and before is None:
            raise ValueError(f"{name}: no release fixes it")
        first = min(releases, key=version_numbers) if releases else str(before and before["version"]).replace("_", ".")
        yield key, first


def _key(name: str) -> tuple[tuple[str, str, str] | None, str]:
    if found := _DRIVER.fullmatch(name):
        return (DRIVER, found["branch"], found["series"]), found["rest"]
    if found := re.fullmatch(r"linux_nvidia_container_toolkit_(?P<rest>.+)", name):
        return (TOOLKIT, "", ""), found["rest"]
    return None, ""
