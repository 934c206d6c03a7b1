"""hatchling runs this when it builds the wheel: the agent of this release goes into it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class AgentHook(BuildHookInterface[Any]):
    """Fetches the locked wheels and builds the agent; a clone that runs in its place (`pip install -e`) needs none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the agent to the wheel's files."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from gpuprov.fleet.agent_file import RELEASED, build_agent
        from tools import host_packages

        host_packages.fetch()
        made = Path(self.root, "build", RELEASED)
        made.parent.mkdir(exist_ok=True)
        made.write_bytes(build_agent().content)
        build_data["force_include"][str(made)] = f"gpuprov/fleet/{RELEASED}"
