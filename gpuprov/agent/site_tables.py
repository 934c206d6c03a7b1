"""Tables on the controller that replace packaged ones: read here, sent with each request.

Advisories: the file that `gpuprov advisories update` wrote for this user. Driver releases and the distributions'
servers: the files that the specification names.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuprov.core.disk import make_user_folder
from gpuprov.core.download import fetch_small
from gpuprov.core.proxy import Proxy
from gpuprov.core.system import System, sha256_of
from gpuprov.protocol.advisories import rows_of
from gpuprov.protocol.driver_releases import checked_releases
from gpuprov.protocol.errors import ExitCode, GpuprovError, from_os_error
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.protocol.tables import ADVISORIES, RELEASES, SERVERS, packaged, table, use


def advisories_path() -> Path:
    """Return where this user's updated advisories are kept."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return (Path(data) / "gpuprov" / "advisories.json").expanduser()


def advisories_table() -> Mapping[str, Any]:
    """Return the newer of this user's advisories and the packaged ones.

    Raises GpuprovError that names this user's file if it is damaged.
    """
    mine, found = advisories_path(), packaged(ADVISORIES)
    try:
        content = mine.read_bytes()
    except OSError:
        return dict(found)
    data = _parsed(content, str(mine))
    rows_of(data, str(mine))
    return dict(data if data["updated"] >= found["updated"] else found)


def save_advisories(data: Mapping[str, Any]) -> Path:
    """Write this user's advisories atomically."""
    path = advisories_path()
    temporary = path.with_suffix(".new")
    try:
        make_user_folder(path.parent)
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise from_os_error(f"the advisories can't be written to {path}", error, "set XDG_DATA_HOME") from None
    return path


def for_request(spec: HostSpec) -> dict[str, Any]:
    """Return the tables to send with a request for this host; packaged tables are not sent."""
    found: dict[str, Any] = {}
    advisories = advisories_table()
    if advisories != packaged(ADVISORIES):
        found[ADVISORIES] = advisories
    proxy = Proxy(spec.proxy, spec.no_proxy)
    if spec.driver_releases:
        data, origin = _site_table(RELEASES, spec.driver_releases, spec.driver_releases_sha256, proxy)
        found[RELEASES] = checked_releases(data, origin)
    if spec.servers:
        found[SERVERS] = checked_servers(*_site_table(SERVERS, spec.servers, spec.servers_sha256, proxy))
    return found


@functools.cache
def _site_table(name: str, place: str, sha256: str, proxy: Proxy) -> tuple[Any, str]:
    """Return a site's table and its place for messages; it is read once for all hosts."""
    if not sha256:
        raise GpuprovError(
            f"gpuprov_{name} has no digest", masked(place),
            f"set gpuprov_{name}_sha256 (sha256sum FILE, of a file that you trust)", exit_code=ExitCode.USAGE,
        )  # fmt: skip
    system = System()
    system.proxy = proxy
    content = fetch_small(system, f"file://{place}" if place.startswith("/") else place)
    if sha256_of(content) != sha256:
        raise GpuprovError(
            f"the table of {name.replace('_', ' ')} is not the one that was asked for",
            f"{masked(place)} has SHA-256 {sha256_of(content)}, gpuprov_{name}_sha256 is {sha256}",
            "get the file again, or correct the digest", exit_code=ExitCode.USAGE,
        )  # fmt: skip
    return _parsed(content, masked(place)), masked(place)


def checked_servers(data: Any, origin: str) -> Mapping[str, Any]:
    """Return a site's table of servers if it is sound. Raises GpuprovError (exit code 2) that names what is wrong."""
    known, given = packaged(SERVERS), data.get("servers") if isinstance(data, dict) else None
    wrong = [f"its format is not {known['format']}"] if not given or data.get("format") != known["format"] else []
    for name, url in given.items() if isinstance(given, dict) else ():
        if name not in known["servers"] or not re.fullmatch(r"https?://[^\s'\"`$;|&<>\\{}]+", str(url)):
            wrong.append(f"{str(name)[:40]!r} is no server of gpuprov's, or its URL is not one")
    if wrong or not isinstance(given, dict):
        raise GpuprovError(
            "the table of servers is not valid", f"{origin}: {'; '.join(wrong[:3])}",
            "its form is that of gpuprov/protocol/servers.json", exit_code=ExitCode.USAGE,
        )  # fmt: skip
    found: Mapping[str, Any] = data
    return found


def _parsed(content: bytes, origin: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise GpuprovError(
            f"{origin} is not valid JSON",
            str(error)[:200],
            "get the file again, or remove it",
            exit_code=ExitCode.USAGE,
        ) from None


def use_tables(sent: Mapping[str, Any]) -> None:
    """Use the tables of a request in this process. Raises GpuprovError for an invalid one."""
    checked: dict[str, Any] = {}
    if RELEASES in sent:
        checked[RELEASES] = checked_releases(sent[RELEASES], "the request")
    if ADVISORIES in sent:
        rows_of(sent[ADVISORIES], "the request")
        checked[ADVISORIES] = sent[ADVISORIES]
    if SERVERS in sent:
        checked[SERVERS] = checked_servers(sent[SERVERS], "the request")
    use(checked)


def read_spec(values: Mapping[str, Any], tables: Mapping[str, Any], origin: str = "") -> HostSpec:
    """Return the spec that `values` describe: the tables, which are in use from now on, say what a branch means."""
    use_tables(tables)
    return parse_spec(values, origin)


def use_newer_advisories(content: bytes, origin: str) -> None:
    """Use the advisories of a bundle, if any, if they are newer than those in use."""
    if not content:
        return
    data = _parsed(content, origin)
    rows_of(data, origin)
    if data["updated"] > table(ADVISORIES)["updated"]:
        use({**({RELEASES: table(RELEASES)} if table(RELEASES) is not packaged(RELEASES) else {}), ADVISORIES: data})
