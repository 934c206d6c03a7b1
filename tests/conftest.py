"""Fixtures for all tests, and who shares a worker where tests run in parallel (`make test`)."""

import pytest
from hypothesis import HealthCheck, settings

from tests.lab.fixtures import rpm_site, site

__all__ = ["rpm_site", "site"]
# The hosts of a session are one worker's; all other files may go to whichever is free.
_SHARED = ("site", "rpm_site")
# What takes longest is begun first: at the end, other workers would wait for it.
_LONGEST = ("site", "test_vm.py")
# How long an example takes says how busy the machine is: no test is decided by that.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests on the same hosts together, and those of a file, whose fixtures they share."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    order = {group: place for place, group in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(_group(item), len(order)))


def _group(item: pytest.Item) -> str:
    names = getattr(item, "fixturenames", ()) if item.get_closest_marker("lab") else ()
    return next((name for name in _SHARED if name in names), item.path.name)
