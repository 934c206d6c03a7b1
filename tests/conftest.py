"""Fixtures for all tests."""

from tests.lab.fixtures import rpm_site, site

__all__ = ["rpm_site", "site"]
