"""The check that the names of a host's package sources can be looked up."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from gpuprov.core.changes import FileFact
from gpuprov.core.commands import TIMED_OUT
from gpuprov.core.system import System
from gpuprov.packages.sources import entries, repo_sections, text_of
from gpuprov.protocol.errors import Problem

# A second server is asked after five seconds (resolv.conf(5)).
_SECONDS = 8
_MOST_SECONDS = 12
_RESOLVER = "/etc/resolv.conf"
# With a proxy, the proxy looks the names up.
_PROXY_FILES = ("/etc/apt/apt.conf", "/etc/dnf/dnf.conf", "/etc/yum.conf", "/root/.curlrc", "/etc/rhsm/rhsm.conf")
_PROXY_FOLDERS = ("/etc/apt/apt.conf.d", "/etc/yum.repos.d", "/etc/zypp/repos.d")
_PROXY = re.compile(r"^[^#;/\n]*proxy\S*\s*\S*[\w:\"]", re.IGNORECASE | re.MULTILINE)
_SUSE = "/etc/sysconfig/proxy"


def dns_problem(system: System, manager: str, files: Mapping[str, FileFact]) -> Problem | None:
    """Return the problem of a host on which no source's name can be looked up; None if one can, or it is not needed."""
    names = _names(manager, files)
    if not names or system.which("getent") is None or _has_proxy(system):
        return None
    begun, seen = system.now(), ""
    for name in names:
        done = system.run(("getent", "ahosts", name), timeout=_SECONDS)
        if done.ok:
            return None
        ended = f"no answer in {_SECONDS} s" if done.returncode == TIMED_OUT else f"exit code {done.returncode}"
        seen = seen or f"getent ahosts {name}: {ended}"
        if system.now() - begun > _MOST_SECONDS:
            break
    servers = re.findall(r"^nameserver\s+\S+", system.read_text(_RESOLVER) or "", re.MULTILINE)
    return Problem(
        "DNS does not answer: no package source's name can be looked up",
        f"{seen}\n{_RESOLVER}: {', '.join(servers) or 'no nameserver'}",
        f"correct {_RESOLVER} or the network, then check: getent ahosts {names[0]}; or set gpuprov_proxy",
    )


def _names(manager: str, files: Mapping[str, FileFact]) -> tuple[str, ...]:
    """Return the hosts of all enabled sources; none if one needs no network, or can't be read."""
    read = _apt_urls if manager == "apt" else _rpm_urls
    try:
        urls = [urlsplit(url) for url in read(files)]
    except (ValueError, configparser.Error):
        return ()
    if any(url.scheme not in ("http", "https") or "$" in url.netloc or not url.hostname for url in urls):
        return ()
    return tuple(dict.fromkeys(url.hostname for url in urls if url.hostname))


def _apt_urls(files: Mapping[str, FileFact]) -> Iterator[str]:
    for path, file in files.items():
        if path == "/etc/apt/sources.list" or re.fullmatch(r"/etc/apt/sources\.list\.d/[^/]+\.(list|sources)", path):
            yield from (entry.uri for entry in entries(path, text_of(file)))


def _rpm_urls(files: Mapping[str, FileFact]) -> Iterator[str]:
    for path, file in files.items():
        if re.fullmatch(r"/etc/(yum\.|zypp/)repos\.d/[^/]+\.repo", path):
            for _, section in repo_sections(text_of(file)):
                texts = (section.get(key, "") for key in ("baseurl", "mirrorlist", "metalink"))
                yield from (word for text in texts for word in re.split(r"[\s,]+", text) if word)


def _has_proxy(system: System) -> bool:
    if system.proxy.url or any(os.environ.get(f"{kind}_proxy") for kind in ("http", "https", "all", "HTTP", "HTTPS")):
        return True
    listed = (f"{folder}/{name}" for folder in _PROXY_FOLDERS for name in system.list_directory(folder))
    texts = (system.read_text(path) or "" for path in (*_PROXY_FILES, *listed))
    return any(map(_PROXY.search, texts)) or 'PROXY_ENABLED="yes"' in (system.read_text(_SUSE) or "")
