"""What provisioning puts on a host so that the runtime runs there; never loaded at container start."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import marshal
import pkgutil
import re
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path
from types import CodeType

from .driver_files import HOOK_PATH
from .record import FOLDER as RECORDS
from .settings import LOW_LEVEL_CACHE, NVIDIA_SETTINGS_PATH, SETTINGS_PATH, candidates

LAUNCHER_PATH = "/usr/bin/gpuprov-container-runtime"
LIBRARY_PATH = "/usr/lib/gpuprov"
# What runs the programs once the Python that they name is gone, if it is not too old, until an installation.
STAND_IN = "/usr/bin/python3"
# The name under which docker looks for the hook of `docker run --gpus`, on its PATH, when it starts.
NVIDIA_HOOK_PATH = "/usr/bin/nvidia-container-runtime-hook"
# PEP 552: magic number, flags (checked hash), hash of the source.
_CHECKED_HASH = b"\x03\x00\x00\x00"
# A shell starts in 0.7 ms, grep in 1, Python in 6: so only a `create` whose config.json has one of the words by which
# containers ask for GPUs comes to Python, and one on a host whose settings name other words. Paths are fixed: a
# caller's PATH decides nothing. The hook is a shell script too: without its Python, the engine would only say "no such
# file or directory".
_LAUNCHER, _HOOK = "launcher.sh.in", "hook.sh.in"
_MISSING = "the container runtime needs {python}, which is missing: run gpuprov install on this host"
_PYTHON = re.compile(r"^python=(\S+)$", re.MULTILINE)
# Launchers of versions that did not record it.
_PYTHON_BEFORE = re.compile(r"^exec (\S+) -I -S -E -B ", re.MULTILINE)
# What a container asks for GPUs by, in config.json; and the settings by which it may ask in other words. No slash
# stands in them: JSON may have it as \\/.
_WORDS = r"NVIDIA_|CUDA_VERSION|cdi\.k8s\.io|nvidia-container-devices"
# A key may stand in quotes, or behind its table's name and a dot.
_KEYS = r"^[^#]*(swarm-resource|annotation-prefixes)"
# The path may lead to an older Python by now: every Python must be able to read this part.
_NEW_ENOUGH = "new_enough.py.in"
# -I -S -E: nothing of the environment, of the working folder (which may be a container's) or of site-packages counts.
# All modules come from one file: the import system looks into folders, and reads, checks and closes a file for each.
# Nothing lives long enough to be collected. Without that file (another Python since) imports are as ever.
_LOAD = "load.py.in"
_KEEP = 'sys.path.insert(0, "{library}"); from runtime_hook.settings import keep_low_level; keep_low_level(sys.argv[1])'
# What that file begins with. Modules that only some containers need are in it as bytes, unmarshalled when a function
# imports them. It is code in the file and not text in the launcher, because text is compiled at every start.
_STARTER = "starter.py.in"
# What a start begins with; each has a file with all modules that it imports.
_ENTRIES = ("main", "hook_main")
_DIGEST_SIZE = 32
# Of the file with all modules: another one than the launcher knows is not read.
_FORMAT = "3"


def render_launcher(python: str, library: str = LIBRARY_PATH, low_level: tuple[str, ...] = ("runc", "crun")) -> str:
    """Return the launcher, a shell script. A `low_level` runtime is a name, looked for as root would, or a path."""
    return _template(_LAUNCHER).format(
        candidates=" ".join(candidates(low_level)), python=python, stand_in=STAND_IN,
        missing=_MISSING.format(python=python),
        start=render_start("main", library), keep=_template(_NEW_ENOUGH) + _KEEP.format(library=library),
        settings=SETTINGS_PATH, nvidia_settings=NVIDIA_SETTINGS_PATH, cache=LOW_LEVEL_CACHE,
        settings_folder=SETTINGS_PATH.rpartition("/")[0], nvidia_folder=NVIDIA_SETTINGS_PATH.rpartition("/")[0],
        words=_WORDS, keys=_KEYS, records=RECORDS,
    )  # fmt: skip


def render_hook(python: str, library: str = LIBRARY_PATH) -> str:
    """Return the program that engines run as an OCI hook, a shell script."""
    # An engine's or a container's PATH has no say in which Python this is.
    missing, start = _MISSING.format(python=python), render_start("hook_main", library)
    return _template(_HOOK).format(python=python, stand_in=STAND_IN, missing=missing, start=start)


def _template(name: str) -> str:
    """Return a script in which `{name}` stands for a value, and `{{` for a brace."""
    content = pkgutil.get_data(__package__ or "gpuprov.runtime_hook", name)
    assert content is not None
    return content.decode()


def python_of(launcher: bytes) -> str:
    """Return the Python that a launcher of any version starts, nothing if it is no launcher of ours."""
    text = launcher.decode("utf-8", "replace")
    found = _PYTHON.search(text) or _PYTHON_BEFORE.search(text)
    return found[1] if found else ""


def render_start(name: str, library: str) -> str:
    """Return the Python text with which an entry (`main` or `hook_main`) starts."""
    load = _template(_LOAD).format(name=name, library=library, digest_size=_DIGEST_SIZE, format=_FORMAT)
    return _template(_NEW_ENOUGH) + load


def is_ours(content: bytes) -> bool:
    """Say whether a hook's program is ours, of whatever version."""
    return b"runtime_hook.hook_main" in content


def deployed_files(python: str, *, docker_hook: bool = True) -> tuple[tuple[str, int, bytes], ...]:
    """Return (path, mode, content) of every file that a host needs; works from inside a zipapp too.

    `python`: the path of the interpreter that runs them. Without `docker_hook`, the hook is not put under the name that
    docker looks for: NVIDIA's package owns it.
    """
    package = __package__ or "gpuprov.runtime_hook"
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    names = sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
    hook = render_hook(python).encode()
    files = [(LAUNCHER_PATH, 0o755, render_launcher(python).encode()), (HOOK_PATH, 0o755, hook)]
    if docker_hook:
        files.append((NVIDIA_HOOK_PATH, 0o755, hook))
    for name in ("__init__", *(name for name in names if name != "deploy")):
        content = pkgutil.get_data(package, f"{name}.py")
        assert content is not None
        files.append((f"{LIBRARY_PATH}/runtime_hook/{name}.py", 0o644, content))
    return tuple(files)


def compile_bytecode(directory: str) -> None:
    """Compile the modules in a folder for the Python that runs this; a start then reads instead of compiling."""
    folder = Path(directory)
    (folder / "__pycache__").mkdir(exist_ok=True)
    # The entries share most modules.
    modules = {source.stem: compile_module(source.name, source.read_bytes()) for source in folder.glob("*.py")}
    compiled = {name: code for name, (code, _) in modules.items()}
    imports = {name: imported for name, (_, imported) in modules.items()}
    written = set()
    for name, code in compiled.items():
        source = folder / f"{name}.py"
        written.add(_cache(source))
        _replace(_cache(source), _header(source) + marshal.dumps(code))
    starter = _without_lines(compile(_template(_STARTER), "starter", "exec", dont_inherit=True, optimize=2))
    for entry in [one for one in _ENTRIES if one in compiled]:
        order, later = _in_order(imports, entry)
        first = [(_dotted(name), compiled[name]) for name in order]
        others = {_dotted(name): marshal.dumps(compiled[name]) for name in later}
        _replace(_bundle(folder, entry), _digest(folder) + marshal.dumps((starter, first, others)))
        written.add(_bundle(folder, entry))
    # Of modules, formats and Pythons of earlier versions.
    for other in set((folder / "__pycache__").iterdir()) - written:
        other.unlink()


def bytecode_is_current(directory: str) -> bool:
    """Say whether every module in a folder has byte code that belongs to it, for the Python that runs this."""
    folder = Path(directory)
    entries = [entry for entry in _ENTRIES if (folder / f"{entry}.py").exists()]
    bundles = all(_first_bytes(_bundle(folder, entry)) == _digest(folder) for entry in entries)
    return bundles and all(_first_bytes(_cache(source))[:16] == _header(source) for source in folder.glob("*.py"))


def _cache(source: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(source)))


def _header(source: Path) -> bytes:
    return importlib.util.MAGIC_NUMBER + _CHECKED_HASH + importlib.util.source_hash(source.read_bytes())


def _replace(path: Path, content: bytes) -> None:
    """Replace a file whole: containers start meanwhile, and half a file would refuse them."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    temporary.chmod(0o644)
    temporary.replace(path)


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_DIGEST_SIZE)
    except OSError:
        return b""


def _bundle(folder: Path, entry: str) -> Path:
    return folder / f"__pycache__/{entry}.{_FORMAT}.{sys.implementation.cache_tag}"


def _digest(folder: Path) -> bytes:
    """Return what changes when a module does, or the Python that compiles it."""
    sources = [source.read_bytes() for source in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"\0".join([importlib.util.MAGIC_NUMBER, _template(_STARTER).encode(), *sources])).digest()


def _in_order(imports: dict[str, tuple[list[str], list[str]]], entry: str) -> tuple[list[str], list[str]]:
    """Return the package and all modules that this one imports at once, each behind those that it needs itself.

    And those that functions import, with what they need.
    """

    def reached(kind: int) -> set[str]:
        found = {entry}
        while more := {needed for name in found for needed in imports[name][kind]} - found:
            found |= more
        return found

    graph = {name: imports[name][0] for name in sorted(reached(0))}
    return ["__init__", *TopologicalSorter(graph).static_order()], sorted(reached(1) - graph.keys())


def _imported(nodes: Iterable[ast.AST]) -> list[str]:
    relative = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1]
    return [name for node in relative for name in ([node.module] if node.module else [one.name for one in node.names])]


def compile_module(name: str, source: bytes) -> tuple[CodeType, tuple[list[str], list[str]]]:
    """Return a module's code, as little of it as does the same: neither annotations nor line numbers are looked at.

    And the modules of the package that it imports at once, and all that it ever imports.
    """
    tree, bare = ast.parse(source), _Bare()
    at_once = _imported(tree.body)
    code = compile(bare.visit(tree), name, "exec", dont_inherit=True, optimize=2)
    return _without_lines(code), (at_once, _imported(bare.imports))


class _Bare(ast.NodeTransformer):
    """Takes annotations away, and with them the imports of __future__ and typing; collects the other imports."""

    def __init__(self) -> None:
        self.imports: list[ast.ImportFrom] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Leave expressions out: they have neither, and are most of the tree."""
        return node if isinstance(node, ast.expr) else super().generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        self.imports.append(node)
        return None if node.module in ("__future__", "typing") else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return ast.copy_location(ast.Assign([node.target], node.value) if node.value else ast.Pass(), node)


def _without_lines(code: CodeType) -> CodeType:
    inner = tuple(_without_lines(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    table = {"co_linetable": b""} if sys.version_info >= (3, 10) else {"co_lnotab": b""}
    return code.replace(co_consts=inner, **table)  # type: ignore[arg-type]


def _dotted(name: str) -> str:
    return "runtime_hook" if name == "__init__" else f"runtime_hook.{name}"
