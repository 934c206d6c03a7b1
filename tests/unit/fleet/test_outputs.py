"""How far a long work is: told on a terminal, and to nobody else."""

from __future__ import annotations

import io
import sys

import pytest

from gpuprov.fleet.standard_streams import percentage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "said"),
    [(Terminal(), "\rwork: 0 %\rwork: 50 %\r          \r"), (io.StringIO(), "")],
    ids=["tty", "pipe"],
)
def test_each_hundredth_once_and_a_clean_line_at_the_end(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, said: str
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    show = percentage("work:")
    for done in (1, 2, 500, 501, 1000):
        show(done, 1000)
    assert stream.getvalue() == said
