"""What speed is claimed of gpuprov, measured side by side with what a user would use instead: `make bench`."""
