"""Bundles: one file with everything that an installation needs, for hosts without a network."""
