"""Which distribution, kernel and GPUs a machine has, and the table of distributions."""
