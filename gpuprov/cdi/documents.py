"""Read and write CDI specifications: JSON, or YAML if PyYAML is available (on the controller, not on hosts)."""

from __future__ import annotations

import json
from typing import Any

from gpuprov.cdi.specification import Specification, parse_json, render_json
from gpuprov.protocol.errors import GpuprovError

_MAKE = "gpuprov cdi generate makes one"
SUFFIXES = (".json", ".yaml", ".yml")


def parse(content: bytes, name: str) -> Specification:
    """Return the specification in a file: YAML by its name, or JSON. Raises GpuprovError for an invalid one."""
    if not content.strip():
        raise GpuprovError(f"{name} is no CDI specification", "it is empty", _MAKE)
    return parse_json(_json_of(content, name) if is_yaml(content, name) else content)


def is_yaml(content: bytes, name: str) -> bool:
    """Say whether a file is YAML: by its suffix, or for standard input by how it begins."""
    if name.endswith((".yaml", ".yml")):
        return True
    return not name.endswith(".json") and not content.lstrip().startswith(b"{")


def render(specification: Specification, form: str) -> bytes:
    """Return the specification as `json` or `yaml`; the same specification gives the same bytes."""
    content = render_json(specification)
    if form == "json":
        return content
    text: str = _yaml().safe_dump(json.loads(content), sort_keys=False, default_flow_style=False)
    return text.encode()


def _json_of(content: bytes, name: str) -> bytes:
    yaml = _yaml()
    try:
        return json.dumps(yaml.safe_load(content)).encode()
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise GpuprovError(f"{name} is no CDI specification", " ".join(str(error).split()), _MAKE) from None


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise GpuprovError("YAML can't be read or written here", "PyYAML is missing", "use --format json") from None
    return yaml
