"""Fixtures for all tests."""

from tests.lab.fixtures import site

__all__ = ["site"]
