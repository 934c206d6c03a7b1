"""All steps in their order, preflight, and what a plan needs to know: pure."""
