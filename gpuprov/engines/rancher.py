"""k3s and RKE2, which write containerd's configuration themselves from a template: drop-in or template. Writes nothing.

https://docs.k3s.io/advanced#configuring-containerd. Their own base adds runtimes that it finds at its start, `nvidia`
among them, so a template must not write the same table again: containerd could not read it and the node would go down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpuprov.engines import containerd
from gpuprov.engines.known import DISTRIBUTIONS, Distribution
from gpuprov.engines.runtime_entry import DETECTED_RUNTIMES, Configuration, ConfigureRequest, Reader, RuntimeEntry
from gpuprov.engines.toml import edited, emptied, read, read_text, read_toml, read_without_ours
from gpuprov.protocol.errors import GpuprovError

_BASE = '{{ template "base" . }}'


def configuration(system: Reader, request: ConfigureRequest) -> Configuration:
    """Return the edits that register the runtime in the files of a k3s or RKE2, or remove it."""
    if request.unset:
        return containerd.configuration(system, request)
    distribution = DISTRIBUTIONS[request.engine]
    rendered_text = read_text(system, distribution.rendered)
    if rendered_text is None and not request.config:
        raise GpuprovError(
            f"{distribution.name} has not written its containerd configuration yet, so nobody knows its version",
            f"there is no {distribution.rendered}",
            f"start {distribution.name} once, or name the template: --config {distribution.templates[3]}",
        )
    rendered = read_toml(rendered_text or "", distribution.rendered)
    version = containerd.version_of(rendered, 3 if "v3" in request.config.rpartition("/")[2] else 2)
    template = request.config or distribution.templates[version]
    source = containerd.plugin_table(rendered, version)
    drop_in = distribution.drop_in[version] if request.drop_in is None else request.drop_in
    takes_in = containerd.is_imported(rendered, distribution.rendered, drop_in) if drop_in else False
    if takes_in and version >= 3:
        wanted = containerd.runtime_values({}, version, request.runtime, source)
        edit = edited(system, drop_in, containerd.with_version(version, wanted))
        return Configuration((edit,), (), distribution.reload_command)
    return _by_template(system, request, distribution, template, version)


def _by_template(
    system: Reader, request: ConfigureRequest, distribution: Distribution, template: str, version: int
) -> Configuration:
    rendered = read(system, distribution.rendered)
    source = containerd.plugin_table(rendered, version)
    text = read_text(system, template)
    own = read_without_ours(system, template)
    extends = text is None or 'template "base"' in text
    if not extends:
        wanted = containerd.runtime_values(own, version, request.runtime, source)
        return Configuration((edited(system, template, wanted),), (), distribution.reload_command)
    if request.runtime.set_default and source.get("containerd", {}).get("default_runtime_name") != request.runtime.name:
        raise GpuprovError(
            f"the default runtime is {distribution.name}'s own setting; its base template writes that table",
            "", f"put `default-runtime: {request.runtime.name}` into /etc/rancher/{distribution.name}/config.yaml, "
            f"then: {distribution.reload_command}",
        )  # fmt: skip
    ours = containerd.plugin_table(read_toml(text or "", template), version)
    has_ours = request.runtime.name in ours.get("containerd", {}).get("runtimes", {})
    path = _adds_itself(system, source, request.runtime, has_ours=has_ours)
    if path == request.runtime.path:
        # An earlier run's entry would be a second table of that name.
        edits = emptied(system, template)
        note = (
            f"{distribution.name} has runtime {request.runtime.name} by itself, from its next start on at least: {path}"
        )
        return Configuration(edits, (note,), distribution.reload_command)
    if path:
        raise GpuprovError(
            f"{distribution.name} itself adds a runtime {request.runtime.name}, of another program; a second would "
            "keep containerd from starting",
            f"{distribution.rendered}: {path}",
            "give another name with --nvidia-runtime-name, or take that program away and restart",
        )
    # The base template writes these two tables.
    entry = replace(request.runtime, set_default=False, cdi=False)
    no_cdi = request.runtime.cdi and not source.get("enable_cdi", version >= 3)
    notes = (f"CDI is not enabled: the base template of {distribution.name} writes that table",) if no_cdi else ()
    wanted = containerd.runtime_values(own, version, entry, source)
    return Configuration((edited(system, template, wanted, first=_BASE),), notes, distribution.reload_command)


def _adds_itself(system: Reader, source: Mapping[str, Any], runtime: RuntimeEntry, *, has_ours: bool) -> str:
    """Return the program of a runtime of that name that the base adds by itself, "" if it adds none."""
    there = source.get("containerd", {}).get("runtimes", {}).get(runtime.name)
    if there is not None and not has_ours:
        return str(there.get("options", {}).get("BinaryName") or "another one")
    if runtime.name != RuntimeEntry().name:
        return ""
    # It looks for these at each start. The requested one exists by then, even if it does not yet.
    return next((path for path in DETECTED_RUNTIMES if system.exists(path) or path == runtime.path), "")
