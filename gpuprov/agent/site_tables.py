"""Tables on the controller that replace packaged ones: read here, sent with each request.

Advisories and known problems: the files that `gpuprov advisories update` wrote for this user. Driver releases, models
of GPUs, MIG layouts and the distributions' servers: the files that the specification names.
"""

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

from gpuprov.core.download import fetch_small
from gpuprov.core.files import make_user_folder, write_whole
from gpuprov.core.proxy import Proxy
from gpuprov.core.system import System, sha256_of
from gpuprov.protocol import tables
from gpuprov.protocol.advisories import merged, rows_of, table_of
from gpuprov.protocol.errors import UsageError, os_errors, require_format
from gpuprov.protocol.known_problems import problems_of
from gpuprov.protocol.mig_configs import checked_mig_configs
from gpuprov.protocol.models import checked_models
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.spec import HostSpec

# What `gpuprov advisories update` replaces, and what refuses a wrong one.
UPDATED: Mapping[str, Callable[[Any, str], Any]] = {tables.ADVISORIES: rows_of, tables.KNOWN_PROBLEMS: problems_of}


def user_path(name: str) -> Path:
    """Return where this user's own table of that name is kept."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return (Path(data) / "gpuprov" / f"{name}.json").expanduser()


def user_table(name: str) -> Mapping[str, Any]:
    """Return the newer of this user's table and the packaged one: advisories or known problems.

    What a user's newer table of advisories lacks of the packaged one is added: that may be of a later gpuprov. Raises
    GpuprovError that names this user's file if it is damaged.
    """
    mine, found = user_path(name), tables.packaged(name)
    try:
        content = mine.read_bytes()
    except OSError:
        return dict(found)
    data = _parsed(content, str(mine))
    rows = UPDATED[name](data, str(mine))
    if data["updated"] < found["updated"]:
        return dict(found)
    return table_of(merged(rows_of(found), rows), data["updated"]) if name == tables.ADVISORIES else dict(data)


def save_table(name: str, data: Mapping[str, Any]) -> Path:
    """Write this user's table atomically."""
    path = user_path(name)
    with os_errors(f"the table can't be written to {path}", "set XDG_DATA_HOME"):
        make_user_folder(path.parent)
        write_whole(path, (json.dumps(data, indent=1) + "\n").encode(), 0o644, None)
    return path


def for_request(spec: HostSpec) -> dict[str, Any]:
    """Return the tables to send with a request for this host; packaged tables are not sent."""
    found: dict[str, Any] = {name: mine for name in UPDATED if (mine := user_table(name)) != tables.packaged(name)}
    proxy = Proxy(spec.proxy, spec.no_proxy)
    for name in filter(lambda one: getattr(spec, one), _OF_SITES):
        found[name] = _OF_SITES[name](*_site_table(name, getattr(spec, name), getattr(spec, f"{name}_sha256"), proxy))
    return found


@functools.cache
def _site_table(name: str, place: str, sha256: str, proxy: Proxy) -> tuple[Any, str]:
    """Return a site's table and its place for messages; it is read once for all hosts."""
    if not sha256:
        step = f"set gpuprov_{name}_sha256 (sha256sum FILE, of a file that you trust)"
        raise UsageError(f"gpuprov_{name} has no digest", masked(place), step)
    system = System()
    system.proxy = proxy
    content = fetch_small(system, f"file://{place}" if place.startswith("/") else place)
    if sha256_of(content) != sha256:
        seen = f"{masked(place)} has SHA-256 {sha256_of(content)}, gpuprov_{name}_sha256 is {sha256}"
        next_step = "get the file again, or correct the digest"
        raise UsageError(f"the table of {name.replace('_', ' ')} is not the one that was asked for", seen, next_step)
    if name != tables.MIG_CONFIGS:
        return _parsed(content, masked(place)), masked(place)
    import yaml  # of no use on hosts

    try:
        return yaml.safe_load(content), masked(place)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{masked(place)} is not valid YAML", str(error)[:200], "get the file again") from None


def checked_servers(data: Any, origin: str) -> Mapping[str, Any]:
    """Return a site's table of servers if it is sound. Raises GpuprovError (exit code 2) that names what is wrong."""
    require_format(data, tables.FORMAT, "the table of servers", origin)
    known, given = tables.packaged(tables.SERVERS), data.get("servers") if isinstance(data, dict) else None
    wrong = [f"its format is not {known['format']}"] if not given or data.get("format") != known["format"] else []
    for name, url in given.items() if isinstance(given, dict) else ():
        if name not in known["servers"] or not re.fullmatch(r"https?://[^\s'\"`$;|&<>\\{}]+", str(url)):
            wrong.append(f"{str(name)[:40]!r} is no server of gpuprov's, or its URL is not one")
    if wrong or not isinstance(given, dict):
        raise tables.invalid_table(tables.SERVERS, "servers", origin, "; ".join(wrong[:3]))
    return dict(data)


# What a site may replace by a variable of the same name, and what refuses a wrong one.
_OF_SITES: Mapping[str, Callable[[Any, str], Mapping[str, Any]]] = {
    tables.RELEASES: tables.checked_releases, tables.SERVERS: checked_servers, tables.MODELS: checked_models,
    tables.MIG_CONFIGS: checked_mig_configs,
}  # fmt: skip


def _parsed(content: bytes, origin: str) -> Any:
    try:
        return tables.parse(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin} is not valid JSON", str(error)[:200], "get the file again, or remove it") from None


def checked_tables(sent: Mapping[str, Any]) -> tables.Tables:
    """Return the tables that came with a request. Raises GpuprovError for an invalid one."""
    checks = {**UPDATED, **_OF_SITES}
    for name in filter(sent.__contains__, checks):
        checks[name](sent[name], "the request")
    return tables.Tables({name: sent[name] for name in checks if name in sent})


def with_newer_tables(found: tables.Tables, content: Callable[[str], bytes], origin: str) -> tables.Tables:
    """Return `found` with the newer advisories and known problems of a bundle. `content` reads a file of it."""
    for name, check in UPDATED.items():
        if text := content(f"{name}.json"):
            data = _parsed(text, origin)
            check(data, origin)
            if data["updated"] > found.table(name)["updated"]:
                found = found.with_table(name, data)
    return found
