"""How gpuprov refuses something: by one problem."""

from collections.abc import Callable
from typing import Any

import pytest

from gpuprov.protocol.errors import GpuprovError, Problem


def refused(act: Callable[..., object], *arguments: Any, **options: Any) -> Problem:
    """Call what must fail; return the one problem of its error."""
    with pytest.raises(GpuprovError) as caught:
        act(*arguments, **options)
    (problem,) = caught.value.problems
    return problem
