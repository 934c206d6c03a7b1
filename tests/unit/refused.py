"""How gpuprov refuses something: by one problem."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuprov.protocol.errors import GpuprovError, Problem


def refused(act: Callable[..., object], *arguments: object) -> Problem:
    """Call what must fail; return the one problem of its error."""
    with pytest.raises(GpuprovError) as caught:
        act(*arguments)
    (problem,) = caught.value.problems
    return problem
