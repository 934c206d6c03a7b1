"""The cases that a test can be: `only` leaves out others, and --strict-skips knows the skips that are expected."""

import pytest

from tests.skips import is_expected


@pytest.fixture(params=["docker", "podman", "crio"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.only(engine="podman")
def test_only_leaves_out_other_cases(engine: str) -> None:
    assert engine == "podman"


@pytest.mark.only(engine=("docker", "podman"))
def test_only_takes_several_cases(engine: str) -> None:
    assert engine != "crio"


def test_a_skip_is_expected_by_the_beginning_of_its_reason() -> None:
    assert is_expected("this file system knows no immutable files")
    assert not is_expected("needs podman: this file system knows no immutable files")
