"""Paths on a host that several steps share."""

from __future__ import annotations

from gpuprov.core.journal import STATE_DIRECTORY

CACHE_DIRECTORY = "/var/cache/gpuprov"
# Where a run unpacks a bundle on a host. Always the same folder, root's own: what a killed run left there, the next one
# finds and takes away.
FOLDER = "/var/cache/gpuprov/bundle"
# apt's only source while a bundle is unpacked; the last file to come.
SOURCES_LIST = f"{FOLDER}/sources.list"
# What is stopped now and must run again; it outlives a run that is killed.
STOPPED = f"{STATE_DIRECTORY}/stopped.json"
