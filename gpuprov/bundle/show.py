"""A bundle as text for people and as JSON for programs. Pure."""

from __future__ import annotations

import json

from gpuprov.bundle.format import Contents


def as_text(contents: Contents) -> str:
    """Return what a bundle is for and what it holds, a line for each package."""
    manifest = contents.manifest
    size = sum(one.size for one in manifest.files)
    rows = [
        ("for", manifest.target),
        ("made by", f"gpuprov {manifest.gpuprov}"),
        ("digest", contents.digest),
        ("signed", "yes" if contents.signature else "no"),
        ("driver", manifest.driver_version or "none"),
        ("cuda", f"{manifest.cuda_version}, .run" if manifest.cuda_file else "no .run"),
        ("kernels", ", ".join(manifest.inputs.get("kernels", ())) or "none"),
        ("images", ", ".join(one.reference for one in manifest.images) or "none"),
        ("files", f"{len(manifest.files)}, {size / 2**20:.1f} MiB"),
        ("packages", str(len(manifest.packages))),
    ]
    lines = [f"{name:10}{value}" for name, value in rows]
    asked = {str(name).partition("=")[0] for name in manifest.inputs.get("packages", ())}
    for one in manifest.packages:
        mark = "  asked for" if one.name in asked else ""
        lines.append(f"  {one.name} {one.version} {one.architecture}{mark}")
    return "\n".join(lines)


def as_json_text(contents: Contents) -> str:
    """Return the manifest, with the bundle's digest and whether it is signed."""
    data = json.loads(contents.manifest_bytes)
    return json.dumps({**data, "digest": contents.digest, "signed": bool(contents.signature)}, indent=2)
