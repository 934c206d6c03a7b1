"""Container engines: for each, what it is now (gather), what is wrong (problems), what to change (plan)."""
