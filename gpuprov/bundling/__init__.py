"""Making bundles, on a machine with network."""
