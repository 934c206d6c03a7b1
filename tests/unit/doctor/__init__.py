"""The doctor's rules over recorded hosts."""
