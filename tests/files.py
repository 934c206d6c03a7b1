"""Files that a test lays somewhere."""

from pathlib import Path


def put(path: Path, content: str | bytes, mode: int | None = None) -> Path:
    """Write a file, and make the folders above it; return its path. Without a mode it has the usual one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if mode is not None:
        path.chmod(mode)
    return path
