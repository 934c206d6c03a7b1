"""Create bundles, on a machine with a network."""
