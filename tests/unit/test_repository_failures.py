"""Of several repositories that fail, which one is told: the first, for apt, dnf and zypper."""

from __future__ import annotations

import pytest

from gpuprov.core.commands import Completed
from gpuprov.packages.failures import finish_apt, finish_rpm
from gpuprov.protocol.errors import GpuprovError

REFUSED = "E: Failed to fetch http://dead.example/InRelease  Could not connect to dead.example:80 (192.0.2.1)"
UNKNOWN = "E: Failed to fetch http://gone.example/InRelease  Temporary failure resolving 'gone.example'"


DNF_REFUSED = "- Curl error (7): Couldn't connect to server for http://dead.example/repodata/repomd.xml"
DNF_UNKNOWN = "- Curl error (6): Couldn't resolve host name for http://gone.example/repodata/repomd.xml"
DNF_GONE = "- Status code: 404 for http://old.example/repodata/repomd.xml (IP: 192.0.2.1)"
ZYPPER = ("Download (curl) error for 'http://gone.example/repomd.xml':", "Error code: Connection failed",
          "Error message: Could not resolve host: gone.example")  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "decisive", "meaning"),
    [
        ((REFUSED, UNKNOWN), REFUSED, "can't be reached"), ((UNKNOWN, REFUSED), UNKNOWN, "name is not known"),
        ((DNF_REFUSED, DNF_UNKNOWN), DNF_REFUSED, "can't be reached"),
        ((DNF_UNKNOWN, DNF_REFUSED), DNF_UNKNOWN, "name is not known"),
        ((DNF_GONE, DNF_UNKNOWN), DNF_GONE, "gone from it"),
        (("Errors during downloading metadata:", DNF_REFUSED, DNF_GONE), DNF_REFUSED, "can't be reached"),
        ((ZYPPER[0], ZYPPER[2], DNF_REFUSED), ZYPPER[2], "name is not known"),
    ],
)  # fmt: skip
def test_of_several_repositories_the_first_error_is_the_cause(
    lines: tuple[str, ...], decisive: str, meaning: str
) -> None:
    finish = finish_apt if decisive.startswith("E:") else finish_rpm
    with pytest.raises(GpuprovError) as caught:
        finish(Completed(("program",), 1, "", "\n".join(lines)), "the index could not be read")
    (problem,) = caught.value.problems
    assert problem.what.endswith(meaning) and problem.evidence.endswith(decisive)
