"""Computes once what depends on the same bytes in hundreds of tests: the hook's byte code, the sonames of libraries."""

import contextlib
import functools
from collections.abc import Iterator

import pytest

from gpuprov.cdi import files
from gpuprov.core.system import System
from gpuprov.runtime_hook import deploy


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Keep the results for the time of the block."""
    soname = files.soname
    names: dict[bytes, str] = {}

    def known_name(system: System, path: str) -> str:
        try:
            content = system.read_bytes(path)
        except OSError:
            content = None
        if not content:
            return soname(system, path)
        return names.get(content) or names.setdefault(content, soname(system, path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deploy, "compile_module", functools.cache(deploy.compile_module))
        patch.setattr(files, "soname", known_name)
        yield
