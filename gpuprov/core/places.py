"""Paths on a host that several steps share."""

from gpuprov.core.journal import STATE_DIRECTORY

CACHE_DIRECTORY = "/var/cache/gpuprov"
# The .run files of the installed driver and of the one before it.
KEPT = "/var/cache/gpuprov/driver"
# The driver's packages that came from a bundle, a folder for each version.
KEPT_PACKAGES = "/var/cache/gpuprov/driver-packages"
# Where a run unpacks a bundle on a host. Always the same folder, owned by root: the next run finds and removes what a
# killed run left there.
FOLDER = "/var/cache/gpuprov/bundle"
# Copies of removed packages, for a rollback.
COPIES = f"{STATE_DIRECTORY}/removed"
# In a bundle and below FOLDER: the repository, its key, and the keys of those who signed the packages.
REPOSITORY = "repository"
REPOSITORY_KEY = f"{REPOSITORY}/key.gpg"
KEYS = "keys"
# apt's only source while a bundle is unpacked; this file is written last.
SOURCES_LIST = f"{FOLDER}/sources.list"
# Units and containers that are stopped and must be started again; the file survives a killed run.
STOPPED = f"{STATE_DIRECTORY}/stopped.json"
# What the last green verification saw (checks/memory.py).
REMEMBERED = f"{STATE_DIRECTORY}/remembered.json"
# Records of repairs, 00000001.json and so on (agent/repair.py).
REPAIRS = f"{STATE_DIRECTORY}/repairs"
