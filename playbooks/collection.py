"""Makes the folder that `ansible-galaxy collection build` packs: playbooks, roles and plugins, with the agent inside.

    python playbooks/collection.py build/ansible_collections/gpuprov/host

The playbooks call roles and the plugin by their names in the collection, in a clone too, so nothing is rewritten.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import yaml

from gpuprov import __version__
from gpuprov.fleet.agent_file import build_agent

_HERE = Path(__file__).resolve().parent
_CLONE = _HERE.parent
_REPOSITORY = "https://github.com/gpuprov/gpuprov"
_RUNTIME = {"requires_ansible": ">=2.17.0"}
# What `ansible-test sanity` finds that is meant so, for each release of ansible-core that it is asked by.
_CORES = ("2.17", "2.18", "2.19", "2.20", "2.21")
_IGNORED = "plugins/modules/agent.py validate-modules:missing-gplv3-license # gpuprov is under Apache-2.0\n"


def galaxy(version: str) -> dict[str, object]:
    """Return galaxy.yml's content, whose keys Ansible's "Collection Galaxy metadata structure" describes."""
    return {
        "namespace": "gpuprov",
        "name": "host",
        "version": version,
        "readme": "README.md",
        "authors": ["gpuprov"],
        "description": "Makes Linux machines run containers on NVIDIA GPUs, and proves that they do.",
        "license_file": "LICENSE",
        "tags": ["linux", "infrastructure", "nvidia", "gpu", "docker"],
        "repository": _REPOSITORY,
        "documentation": f"{_REPOSITORY}/blob/main/docs/ansible.md",
        "homepage": _REPOSITORY,
        "issues": f"{_REPOSITORY}/issues",
        "dependencies": {},
    }


def write_collection(folder: Path) -> None:
    """Write the collection's files into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    without_caches = shutil.ignore_patterns("__pycache__")
    for part in ("roles", "plugins"):
        shutil.copytree(_HERE / part, folder / part, ignore=without_caches)
    (folder / "playbooks").mkdir()
    for playbook in sorted(_HERE.glob("*.yml")):
        shutil.copyfile(playbook, folder / "playbooks" / playbook.name)
    (folder / "files").mkdir()
    (folder / "files/gpuprov-agent.pyz").write_bytes(build_agent().content)
    shutil.copyfile(_CLONE / "LICENSE", folder / "LICENSE")
    page = (_CLONE / "docs/ansible.md").read_text()
    (folder / "README.md").write_text(re.sub(r"\]\((?=[\w-]+\.md)", f"]({_REPOSITORY}/blob/main/docs/", page))
    (folder / "CHANGELOG.md").write_text(
        f"# Changes\n\nThis collection is gpuprov {__version__}, and changes with it.\n"
    )
    (folder / "tests/sanity").mkdir(parents=True)
    for core in _CORES:
        (folder / f"tests/sanity/ignore-{core}.txt").write_text(_IGNORED)
    (folder / "meta").mkdir()
    _write_yaml(folder / "meta/runtime.yml", _RUNTIME)
    _write_yaml(folder / "galaxy.yml", galaxy(__version__))


class _Indented(yaml.SafeDumper):
    """Indents lists, as ansible-lint wants them."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _write_yaml(path: Path, content: object) -> None:
    path.write_text(yaml.dump(content, Dumper=_Indented, explicit_start=True, sort_keys=False, width=1000))


if __name__ == "__main__":
    write_collection(Path(sys.argv[1]))
