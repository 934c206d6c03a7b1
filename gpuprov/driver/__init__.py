"""The driver: which version to install, whether that is possible, how it is installed, and what depends on it."""
