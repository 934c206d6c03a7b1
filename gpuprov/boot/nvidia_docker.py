"""Install the command nvidia-docker on a host if requested; never replace another program of that name."""

from __future__ import annotations

from gpuprov.core.changes import Change, Json, Jsons, RemoveFile, WriteFile
from gpuprov.core.system import System
from gpuprov.facts.boot import PROGRAM
from gpuprov.facts.host import HostFacts
from gpuprov.facts.leftovers import NVIDIA_DOCKER as PATH
from gpuprov.packages.retired import WRAPPERS
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.spec import HostSpec
from gpuprov.runtime_hook.deploy import STAND_IN

_MODE = 0o755
_MARK = b"# gpuprov's nvidia-docker:"
# -I -S: the caller's environment, folder and home do not affect imports. `-c` instead of the zip file itself, whose
# start imports more than needed.
_TEXT = """\
#!/bin/sh
# gpuprov's nvidia-docker: gives `run` and `create` the GPUs, and passes everything to docker.
python={python}
[ -x "$python" ] || python={stand_in}
exec "$python" -I -S -B -c 'import sys
sys.path.insert(0, "{program}")
from gpuprov.engines.nvidia_docker_command import main
main(sys.argv[1:], "{path}")' "$@"
"""


def is_ours(content: bytes) -> bool:
    """Say whether a file of this name is gpuprov's, of any version."""
    return _MARK in content[:200]


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that installs the command, or removes gpuprov's if it is no longer requested."""
    found = facts.files.get(PATH)
    if found is not None and not is_ours(found.content):
        return ()
    if not spec.nvidia_docker:
        return (RemoveFile(PATH, "gpuprov_nvidia_docker is false"),) if found is not None else ()
    if not facts.interpreter.path:
        return ()
    content = _TEXT.format(python=facts.interpreter.path, stand_in=STAND_IN, program=PROGRAM, path=PATH).encode()
    return () if facts.is_roots(PATH, content, _MODE) else (InstallNvidiaDocker(PATH, content, _MODE),)


def warning(facts: HostFacts, spec: HostSpec) -> str:
    """Return a warning if another program has the command's name: gpuprov does not replace it."""
    found = facts.files.get(PATH)
    if not spec.nvidia_docker or found is None or is_ours(found.content):
        return ""
    package = next((name for name in WRAPPERS if name in facts.packages.installed), "")
    whose = f"belongs to the package {package}" if package else "is not gpuprov's"
    remedy = f"remove {package or 'it'}"
    return f"{PATH} {whose}: gpuprov keeps it and installs no other (to get gpuprov's: {remedy}, then install again)"


@dataclass(frozen=True)
class InstallNvidiaDocker(WriteFile):
    """Install gpuprov's nvidia-docker command. If a package replaces it later, the package's file stays."""

    @classmethod
    def skipped_paths(cls, system: System, before: Json) -> tuple[str, ...]:
        path: str = before["path"]
        there = system.status(path) is not None
        return (path,) if there and not is_ours(system.read_bytes(path) or b"") else ()

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        return tuple(f"{path} stays: it is no longer gpuprov's" for path in cls.skipped_paths(system, before))
