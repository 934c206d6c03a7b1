"""Fixtures for all tests, and who shares a worker where tests run in parallel (`make test`)."""

import pytest
from hypothesis import HealthCheck, settings

from tests.lab.fixtures import rpm_site, site

__all__ = ["rpm_site", "site"]
# The hosts of a session are one worker's; all other files may go to whichever is free.
_SHARED = ("site", "rpm_site")
# How long an example takes says how busy the machine is: no test is decided by that.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests on the same hosts together, and those of a file, whose fixtures they share."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        group = next((name for name in _SHARED if name in names), item.path.name)
        item.add_marker(pytest.mark.xdist_group(group))
