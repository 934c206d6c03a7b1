"""Resolve the spec: fill in what a mirror, a bundle or the host decides. Done once per run, before the plan."""

from __future__ import annotations

from dataclasses import replace

from gpuprov.bundle.manifest import Manifest
from gpuprov.core.places import FOLDER
from gpuprov.core.system import System
from gpuprov.driver import cuda_runfile, mirror
from gpuprov.wire.spec import HostSpec


def resolve(system: System, spec: HostSpec, manifest: Manifest | None) -> HostSpec:
    """Return the spec with version, place and digest of each .run file, as far as a bundle or a mirror decides them.

    A bundle replaces the network, so a mirror is asked only without one. What the user pinned stays, and is checked
    against the bundle later. Raises GpuprovError if the mirror's index can't be read, or lacks the branch.
    """
    if manifest is None:
        return mirror.resolved(system, spec, system.architecture())
    spec = mirror.of_bundle(spec, manifest.driver_version)
    return _with_driver_file(cuda_runfile.from_bundle(spec, manifest), manifest)


def _with_driver_file(spec: HostSpec, manifest: Manifest) -> HostSpec:
    if spec.driver != "runfile" or not manifest.driver_file:
        return spec
    return replace(
        spec,
        driver_version=spec.driver_version or manifest.driver_version,
        driver_url=f"{FOLDER}/{manifest.driver_file}",
        driver_sha256=spec.driver_sha256 or manifest.file(manifest.driver_file).sha256,
    )
