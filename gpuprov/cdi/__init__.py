"""Discover the driver on a host and generate its CDI specification."""
