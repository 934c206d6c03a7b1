"""Which libcuda a program of an OCI bundle loads: its root file system with its volumes, and what the runtime adds.

Read as the runtime reads it, by the safe walk of runtime_hook.rootfs; nothing of it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuprov.core.system import System
from gpuprov.runtime_hook.decision import owner_of, root_of
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.request import parse_request
from gpuprov.runtime_hook.rootfs import Root
from gpuprov.runtime_hook.settings import Settings
from gpuprov.runtime_hook.volumes import cover, volumes_of
from gpuprov.verify.cuda.added import AddedTree, add_driver
from gpuprov.verify.cuda.roots import Subject
from gpuprov.verify.cuda.search import Program
from gpuprov.verify.cuda.survey import Survey, survey_on
from gpuprov.verify.cuda.trees import RootTree, chain
from gpuprov.wire.errors import GpuprovError


def survey_bundle(system: System, config: dict[str, Any], bundle: str, settings: Settings) -> Survey:
    """Return what was found in a bundle's root file system. Raises GpuprovError if it can't be read."""
    folder = Path(system.temporary_directory())
    try:
        root = Root(root_of(config, bundle), owner_of(config))
    except (OSError, ValueError) as error:
        system.remove_tree(str(folder))
        what = f"the root file system of {bundle} can't be read"
        raise GpuprovError(what, str(error), "put sudo before the command") from None
    try:
        request = parse_request(config, settings)
        cover(root, volumes_of(config, bundle))
        tree = AddedTree(RootTree(root))
        said = "as it is: the container asks for no GPU"
        if request.devices is not None:
            said = add_driver(tree, folder, settings, request)
        read = f"{root_of(config, bundle)} and the volumes, {said}"
        return survey_on(system, Subject("container", bundle, tree, _program(config, tree), read, said[:5] == "with "))
    except (Refused, OSError) as error:
        raise GpuprovError(f"the libraries of {bundle} were not looked for", str(error)) from None
    finally:
        root.close()
        system.remove_tree(str(folder))


def _program(config: Mapping[str, Any], tree: AddedTree) -> Program:
    """Return what the bundle starts. Wrong types are as good as nothing: the engine says what is wrong."""
    process = config.get("process")
    found: Mapping[str, Any] = process if isinstance(process, dict) else {}
    entries, words, folder = (found.get(name) for name in ("env", "args", "cwd"))
    pairs = (str(one).partition("=") for one in (entries if isinstance(entries, list) else ()))
    first = str(words[0]) if isinstance(words, list) and words else ""
    path = first if first.startswith("/") and chain(tree, first) else ""
    environment = {name: value for name, separator, value in pairs if separator}
    return Program(environment, folder if isinstance(folder, str) else "/", path)
