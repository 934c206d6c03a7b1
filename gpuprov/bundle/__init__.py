"""Bundles: all that an installation needs, in one file, for hosts without a network."""
