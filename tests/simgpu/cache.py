"""Where built things are kept: a folder per digest of the inputs, filled once, by the first process that needs it.

Nothing here knows what is built. The folder can be deleted at any time.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
DATA = HERE / "data"


def cache_root() -> Path:
    """The cache folder: $SIMGPU_CACHE, or .cache/simgpu at the top of the repository, which git ignores."""
    return Path(os.environ.get("SIMGPU_CACHE") or HERE.parents[1] / ".cache" / "simgpu")


def digest_of(parts: Iterable[str | bytes]) -> str:
    """A short digest of all inputs of a build, in order."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()[:16]


def source_digest() -> str:
    """The digest of this package's own sources: code, C, scripts and tables."""
    files = sorted(path for path in HERE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return digest_of(part for path in files for part in (str(path.relative_to(HERE)), path.read_bytes()))


def built(kind: str, digest: str, build: Callable[[Path], None]) -> Path:
    """The folder cache/kind/digest, calling `build(folder)` if it does not exist yet.

    Safe for parallel test processes: one builds under a lock, into a folder that gets its name only when complete.
    """
    final = cache_root() / kind / digest
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with (final.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.is_dir():
            scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=final.parent))
            scratch.chmod(0o755)  # mkdtemp's 0700 would hide the libraries from other users
            try:
                build(scratch)
                scratch.rename(final)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return final
