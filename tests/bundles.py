"""Bundles made of a few bytes, as gpuprov writes them."""

import dataclasses
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

from gpuprov.bundle.format import write_bundle
from gpuprov.bundle.manifest import BundleFile, BundlePackage, Manifest
from gpuprov.packages.keys import fingerprints
from tests import simgpu

DRIVER = f"driver/NVIDIA-Linux-x86_64-{simgpu.DRIVER_VERSION}.run"
TOOLS = "repository/site-gpu-tools_1.0_all.deb"
# As much of an OpenPGP key as has a fingerprint: the packet of a version 4 public key.
KEY = b"\xc6\x06\x04key12"
_LABEL = f"NVIDIA Accelerated Graphics Driver for Linux-x86_64 {simgpu.DRIVER_VERSION}"
# What the host of tests/unit/fake_host.py needs.
FILES: Mapping[str, bytes] = {
    "agent/gpuprov-agent.pyz": b"an agent",
    DRIVER: f'#!/bin/sh\nlabel="{_LABEL}"\n'.encode(),
    "repository/Packages": b"Package: site-gpu-tools\n",
    "repository/InRelease": b"",
    "repository/key.gpg": KEY,
    TOOLS: b"!<arch>\n" + bytes(600),
}
MANIFEST = Manifest(
    distribution="debian", version="12", architecture="x86_64", gpuprov="0.1.0",
    driver_version=simgpu.DRIVER_VERSION, driver_file=DRIVER,
    repository_key=fingerprints(KEY)[0], packages=(BundlePackage("site-gpu-tools", "1.0", "all", TOOLS),),
    inputs={"kernels": [], "packages": ["site-gpu-tools"]},
)  # fmt: skip


def listed(manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
    """Return the manifest with these files in it."""
    rows = (BundleFile(path, len(files[path]), hashlib.sha256(files[path]).hexdigest()) for path in sorted(files))
    return dataclasses.replace(manifest, files=tuple(rows))


def bundle_bytes(manifest: Manifest = MANIFEST, files: Mapping[str, bytes] = FILES, signature: bytes = b"") -> bytes:
    """Return a bundle of these files."""
    made = io.BytesIO()
    write_bundle(made, listed(manifest, files), lambda path: io.BytesIO(files[path]), signature)
    return made.getvalue()


def write_test_bundle(path: Path, manifest: Manifest = MANIFEST, files: Mapping[str, bytes] = FILES) -> Path:
    """Write that bundle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bundle_bytes(manifest, files))
    return path
