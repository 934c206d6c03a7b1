"""What docker and podman answer is not trusted: JSON that is nested too deeply is one sentence."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from gpuprov.checks.cuda.search import Program
from gpuprov.checks.cuda.survey import opened
from gpuprov.engines.configure import is_hook_for
from gpuprov.engines.docker import parse_info
from gpuprov.protocol.errors import GpuprovError
from tests.unit.scripted import Answer, Scripted


class Deep(Scripted):
    """A host whose engines answer every question with JSON that is nested too deeply."""

    def answer(self, argv: tuple[str, ...]) -> Answer:
        return "[" * 100_000

    def output(self, argv: Sequence[str], *, timeout: float) -> contextlib.AbstractContextManager[BinaryIO]:
        raise FileNotFoundError(argv[0])


def test_an_answer_that_is_nested_too_deeply_is_one_sentence(tmp_path: Path) -> None:
    host = Deep(str(tmp_path))
    (tmp_path / "tmp").mkdir()
    assert not parse_info("[" * 100_000).active
    assert not is_hook_for(b"[" * 100_000, "/usr/bin/x")
    with pytest.raises(GpuprovError, match="docker export a gave no archive"), opened(host, "a", Program()):
        pass
