"""From the driver on a host to its CDI specification: discover what is there, generate, render."""
