"""What provisioning puts on a host so that the runtime runs there; never loaded at container start."""

from __future__ import annotations

import importlib.util
import pkgutil
import py_compile
from pathlib import Path

from .settings import SETTINGS_PATH

LAUNCHER_PATH = "/usr/bin/gpuprov-container-runtime"
LIBRARY_PATH = "/usr/lib/gpuprov"
_NOT_DEPLOYED = ("deploy",)
# PEP 552: magic number, flags (checked hash), hash of the source.
_CHECKED_HASH = b"\x03\x00\x00\x00"
# A shell starts in 0.7 ms, grep in 1, Python in 6: so only a `create` whose config.json names one of the words by which
# containers ask for GPUs comes to Python. A settings file may name other words (swarm-resource): then Python looks.
# Paths are fixed: a caller's PATH decides nothing.
_LAUNCHER = """#!/bin/sh
# gpuprov's container runtime: gives containers their GPUs on `create`, passes everything else to runc or crun.
for low_level in {candidates}; do
    [ -x "$low_level" ] && break
    low_level=
done
if [ -z "$low_level" ]; then
    echo "gpuprov: neither runc nor crun is installed: apt-get install runc" >&2
    exit 1
fi
create= bundle=. previous=
for word do
    case $word in
        create) create=yes ;;
        -b=*|-bundle=*|--bundle=*) bundle=${{word#*=}} ;;
    esac
    case $previous in
        -b|-bundle|--bundle) bundle=$word ;;
    esac
    previous=$word
done
[ -n "$create" ] || exec "$low_level" "$@"
if [ ! -e {settings} ]; then
    PATH=/usr/bin:/bin grep -qF -e NVIDIA_ -e CUDA_VERSION "$bundle/config.json" 2>/dev/null
    [ $? = 1 ] && exec "$low_level" "$@"
fi
exec {python} -I -S -E -B -c '{start}' "$low_level" "$@"
"""
# -I -S -E: nothing of the environment, of the working folder (which may be a container's) or of site-packages counts.
_START = (
    'import sys; sys.path.insert(0, "{library}"); from runtime_hook.main import main; main(sys.argv[1], sys.argv[2:])'
)
_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")


def render_launcher(
    python: str = "/usr/bin/python3", library: str = LIBRARY_PATH, low_level: tuple[str, ...] = ("runc", "crun")
) -> str:
    """Return the launcher, a shell script. A `low_level` runtime is a name, looked for as root would, or a path."""
    candidates = [
        path for name in low_level for path in ([name] if "/" in name else [f"{folder}/{name}" for folder in _FOLDERS])
    ]
    start = _START.format(library=library)
    return _LAUNCHER.format(candidates=" ".join(candidates), python=python, start=start, settings=SETTINGS_PATH)


def deployed_files() -> tuple[tuple[str, int, bytes], ...]:
    """Return (path, mode, content) of every file that a host needs; works from inside a zipapp too."""
    package = __package__ or "gpuprov.runtime_hook"
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    names = sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
    files = [(LAUNCHER_PATH, 0o755, render_launcher().encode())]
    for name in ("__init__", *(name for name in names if name not in _NOT_DEPLOYED)):
        content = pkgutil.get_data(package, f"{name}.py")
        assert content is not None
        files.append((f"{LIBRARY_PATH}/runtime_hook/{name}.py", 0o644, content))
    return tuple(files)


def compile_bytecode(directory: str) -> None:
    """Compile the modules in a folder for the Python that runs this; a start then reads instead of compiling."""
    for source in sorted(Path(directory).glob("*.py")):
        py_compile.compile(str(source), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def bytecode_is_current(directory: str) -> bool:
    """Say whether every module in a folder has byte code that belongs to it, for the Python that runs this."""
    return all(_is_current(source) for source in Path(directory).glob("*.py"))


def _is_current(source: Path) -> bool:
    try:
        header = Path(importlib.util.cache_from_source(str(source))).read_bytes()[:16]
    except OSError:
        return False
    return header == importlib.util.MAGIC_NUMBER + _CHECKED_HASH + importlib.util.source_hash(source.read_bytes())
