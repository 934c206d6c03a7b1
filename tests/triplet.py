"""Debian's names for the architecture of the machine that runs the tests, and of the hosts that they simulate."""

import os

MACHINE = os.uname().machine
TRIPLET = f"{MACHINE}-linux-gnu"
LIBRARIES = f"/usr/lib/{TRIPLET}"
LOADER = {"aarch64": "/lib/ld-linux-aarch64.so.1"}.get(MACHINE, "/lib64/ld-linux-x86-64.so.2")
