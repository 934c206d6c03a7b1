"""Writes the end of docs/ansible.md: the collection's module as ansible-doc tells it, and its roles with their steps.

python -m tools.ansible_page
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

_CLONE = Path(__file__).resolve().parents[1]
PAGE = _CLONE / "docs/ansible.md"
_PLAYBOOKS = _CLONE / "playbooks"
_MODULE = "gpuprov.host.agent"
# In the order of site.yml.
_ROLES = ("preflight", "drain", "repos", "driver", "toolkit", "engine", "verify", "undrain", "image")
_MARK = "<!-- written by make docs -->\n"


def page() -> str:
    """Return the page: what people wrote, then the module and the roles."""
    found = _module()
    doc = found["doc"]
    return "\n".join((
        PAGE.read_text(encoding="utf-8").partition(_MARK)[0] + _MARK,
        f"### Module `{_MODULE}`",
        "",
        f"{doc['short_description']}.",
        "",
        *(f"- {_text(line)}" for line in doc["description"]),
        "",
        "| option | type | default | meaning |",
        "|---|---|---|---|",
        *(_option(name, one) for name, one in doc["options"].items()),
        "",
        "| attribute | support | |",
        "|---|---|---|",
        *(f"| `{name}` | {one['support']} | {_text(one['description'])} |" for name, one in doc["attributes"].items()),
        "",
        "| returned value | type | when | meaning |",
        "|---|---|---|---|",
        *(f"| `{name}` | {_type(one)} | {_text(one['returned'])} | {_text(one['description'])} |"
          for name, one in found["return"].items()),
        "",
        "```yaml",
        found["examples"].strip(),
        "```",
        "",
        "### Roles",
        "",
        "| role | what it does | steps of the plan |",
        "|---|---|---|",
        *map(_role, _ROLES),
        "",
    ))  # fmt: skip


def _module() -> dict[str, Any]:
    """Return what ansible-doc says of the module in the clone's collection."""
    environment = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(_PLAYBOOKS / "collections")}
    program = str(Path(sys.executable).with_name("ansible-doc"))
    argv = (program, "--type", "module", "--json", _MODULE)
    done = subprocess.run(
        argv, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)[_MODULE]
    return found


def _text(text: str | list[str]) -> str:
    """Return a description in Markdown: Ansible's C(…) and I(…) as code."""
    whole = text if isinstance(text, str) else " ".join(text)
    return re.sub(r"\b[CI]\(([^)]*)\)", r"`\1`", whole)


def _type(one: dict[str, Any]) -> str:
    return f"list of {one['elements']}" if "elements" in one else str(one["type"])


def _option(name: str, one: dict[str, Any]) -> str:
    choices = f" One of: {', '.join(f'`{choice}`' for choice in one['choices'])}." if "choices" in one else ""
    default = f"`{json.dumps(one['default'])}`" if one.get("default") not in ("", [], None) else ""
    return f"| `{name}` | {_type(one)} | {default} | {_text(one['description'])}{choices} |"


def _role(role: str) -> str:
    """Return a role's row: its description, and the steps of all its tasks."""
    folder = _PLAYBOOKS / "roles" / role
    described = yaml.safe_load((folder / "meta/main.yml").read_text())["galaxy_info"]["description"]
    tasks = yaml.safe_load((folder / "tasks/main.yml").read_text())
    steps = [f"`{step}`" for task in tasks for step in task.get(_MODULE, {}).get("steps", ())]
    return f"| `{role}` | {described} | {', '.join(steps)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
