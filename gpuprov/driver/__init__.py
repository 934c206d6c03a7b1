"""The driver and what is around it: which one, whether it can be, how it gets there, what needs it."""
